"""What lies on the disk is read again in idle time: slowly, interruptibly, and from the disk itself."""

import os
import time
from contextlib import closing
from pathlib import Path
from threading import Event, Thread

import pytest

from powerguard.trainer import Parts
from powerguard.trainer.loop.checkpointer import StoreCheckpointer
from powerguard.trainer.store.folders import newest_in
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.shards import scrub
from powerguard.trainer.store.store import SavedCheckpoint, Store, StoreError
from tests.trainer.checkpoints import save

PAGE = 4096


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "root", job="test", chunk_bytes=PAGE)


def items(step: int, pages: int = 10) -> list[Buffer]:
    return [Buffer("a", bytes([step]) * (pages * PAGE))]


def rot(saved: SavedCheckpoint, at: int) -> None:
    """Flip a bit in the data, past the page cache's own copy."""
    descriptor = os.open(Path(saved.path, "shard-00000"), os.O_RDWR)
    byte = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte[0] ^ 1]), at)
    os.fsync(descriptor)
    os.close(descriptor)


def test_a_good_one_is_read_whole(store: Store) -> None:
    assert store.scrub() is None
    save(store, 1, items(1))
    saved = save(store, 2, items(2))
    scrubbed = store.scrub()
    assert scrubbed is not None
    assert scrubbed.path == saved.path
    assert (scrubbed.whole, scrubbed.corrupt) == (True, None)


def test_a_rotten_one_is_set_aside_and_the_older_one_is_next(store: Store) -> None:
    """Found while there is time: the next emergency may be the last."""
    older = save(store, 1, items(1))
    rot(save(store, 2, items(2)), 5 * PAGE + 7)
    scrubbed = store.scrub()
    assert scrubbed is not None
    assert scrubbed.corrupt is not None
    assert (scrubbed.corrupt.chunk, scrubbed.corrupt.offset) == (5, 5 * PAGE)
    assert not scrubbed.whole
    assert newest_in(store.root) == older
    assert store.set_aside_count == 1
    scrubbed = store.scrub()
    assert scrubbed is not None
    assert scrubbed.whole


def test_it_keeps_its_rate(store: Store) -> None:
    """Ten pages at 100 pages a second: no less than the nine waits between them."""
    save(store, 1, items(1))
    began_s = time.perf_counter()
    scrubbed = store.scrub(rate=100 * PAGE)
    assert time.perf_counter() - began_s >= 0.09
    assert scrubbed is not None
    assert scrubbed.whole


def test_it_stops_when_asked(store: Store) -> None:
    """An hour's work at this rate; told to stop, it does, and says that it saw only a part."""
    save(store, 1, items(1))
    stop = Event()
    got = []
    scrubbing = Thread(target=lambda: got.append(store.scrub(rate=1.0, stop=stop)))
    scrubbing.start()
    stop.set()
    scrubbing.join(60)
    assert not scrubbing.is_alive()
    assert got[0] is not None
    assert not got[0].whole
    assert got[0].corrupt is None
    assert store.set_aside_count == 0


def test_what_is_scrubbed_is_not_pruned_meanwhile(store: Store) -> None:
    save(store, 1, items(1))
    found = store.found()[0]
    stop = Event()
    scrubbing = Thread(target=lambda: scrub(Path(found.path), found.manifest, rate=1.0, stop=stop))
    scrubbing.start()
    try:
        while not is_held(Path(found.path)):
            stop.wait(0.001)
        for step in (2, 3, 4):
            save(store, step, items(step))
        assert [each.step for each in store.found()] == [4, 3, 1]
    finally:
        stop.set()
        scrubbing.join(60)
    assert store.prune() == [found.name]


def is_held(folder: Path) -> bool:
    """As the kernel tells it: trying the lock would be in the way of the thread that is to take it."""
    return any(
        line.split()[5].endswith(f":{folder.stat().st_ino}") for line in Path("/proc/locks").read_text().splitlines()
    )


def test_what_is_gone_is_no_rot(store: Store) -> None:
    save(store, 1, items(1))
    found = store.found()[0]
    store.set_aside(found, "a test")
    with pytest.raises(FileNotFoundError):
        scrub(Path(found.path), found.manifest)


def test_a_disk_that_does_not_answer_is_asked_again_six_hours_later(store: Store) -> None:
    """Not at once: it would be busy with that, and the log full of it, for as long as it does not answer."""
    now_s = 0.0
    away = store.root.with_name("away")
    with closing(StoreCheckpointer(Parts(dict, lambda _: None), store, clock=lambda: now_s)) as stored:
        save(store, 1, items(1))
        rot(save(store, 2, items(2)), 0)
        now_s += 6 * 3600
        store.root.rename(away)
        with pytest.raises(StoreError, match="no longer the folder"):
            stored.idle(Event())
        away.rename(store.root)
        now_s += 60
        stored.idle(Event())
        assert stored.corrupt() == 0
        now_s += 6 * 3600
        stored.idle(Event())
        assert stored.corrupt() == 1
