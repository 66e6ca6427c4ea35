"""Make checkpoints for tests: one call from items to a committed folder."""

import os
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

from powerguard.trainer.store.folders import Found
from powerguard.trainer.store.items import Item, Loaded
from powerguard.trainer.store.manifest import MANIFEST, Manifest, Shard
from powerguard.trainer.store.shards import Snapshot, read_shard
from powerguard.trainer.store.store import SavedCheckpoint, Store


def manifest(step: int, shards: Sequence[Shard], *, hosts: int = 1, job: str = "test") -> Manifest:
    return Manifest(
        job=job,
        step=step,
        created="2026-01-01T00:00:00+00:00",
        reason="test",
        ranks=len(shards),
        hosts=hosts,
        shards=tuple(shard.packed() for shard in shards),
    )


@contextmanager
def forked_worker() -> Iterator[None]:
    """A child of fork, as a data loader's worker is: it has all that this process has, until the end."""
    held, let_go = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(let_go)
        os.read(held, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(let_go)
        os.close(held)
        os.waitpid(worker, 0)


def save(
    store: Store, step: int, items: Sequence[Item], *, urgent: bool = False, cancel: Event | None = None
) -> SavedCheckpoint:
    """Save as one rank, and prune."""
    name = store.name(step, os.urandom(4).hex())
    with Snapshot() as snapshot:
        layout = snapshot.take(items)
        shard = store.write_shard(name, 0, snapshot, layout, urgent=urgent, cancel=cancel)
    saved = store.commit(name, manifest(step, [shard]))
    store.prune()
    return saved


def read(found: Found, rank: int, into: Snapshot | None = None) -> dict[str, Loaded]:
    """Read and verify one rank's shard."""
    return read_shard(Path(found.path), found.shard(rank), into)


def break_description(folder: Path, rank: int = 0) -> None:
    """Leave a manifest whose digests all hold, and in which one rank's shard has no digests and no items."""
    path = folder / MANIFEST
    broken = Manifest.parse(path.read_bytes())
    shards = list(broken.shards)
    empty = b64encode(zlib.compress(b'{"digests":[],"items":[]}')).decode()
    shards[rank] = replace(shards[rank], content=empty)
    path.write_bytes(replace(broken, shards=tuple(shards)).to_json())
