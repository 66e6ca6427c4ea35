"""The power is cut at every instant of a job's saving: nothing torn is taken for good, nothing promised is lost.

Everything the store does to the disk is recorded, and each state that a cut could leave is laid down and opened again
(see cuts/states.py for what may be lost). A store whose flushes are forgotten, one kind at a time, must be caught, else
this suite would prove nothing.
"""

import random
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from powerguard.trainer.store.folders import Found, Refused, look
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.manifest import Manifest
from powerguard.trainer.store.shards import CorruptError, Snapshot, laid_out
from powerguard.trainer.store.store import Store
from tests.trainer.checkpoints import read
from tests.trainer.cuts.recording import Promise, RecordingDisk
from tests.trainer.cuts.states import Tree, cuts, lay_down

CHUNK = 4096
LIVES = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))]
MEMORY = Path("/dev/shm")


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: thousands of states are laid down here."""
    with TemporaryDirectory(prefix="powerguard-", dir=MEMORY if MEMORY.is_dir() else tmp_path) as folder:
        yield Path(folder)


def items(step: int, rank: int) -> list[Buffer]:
    """A state of this step, which differs from every other one's in every page. It grows on the way."""
    size = 9000 + 3000 * (step > 4)
    return [Buffer("weights", bytes([16 * rank + step]) * size), Buffer.json("step", [step, rank])]


class Job:
    """All ranks of a job, in one process, one after the other."""

    def __init__(self, root: Path, disk: RecordingDisk | None, ranks: int, slots: int) -> None:
        self.stores = [
            Store(root, job="cut", rank=rank, ranks=ranks, leader=rank == 0, slots=slots, chunk_bytes=CHUNK, disk=disk)
            for rank in range(ranks)
        ]
        self.snapshot = Snapshot(1 << 16)

    def prepare(self, step: int) -> None:
        for rank, store in enumerate(self.stores):
            store.prepare(laid_out(items(step, rank)).size_bytes)

    def save(self, step: int, *, urgent: bool = False, commit: bool = True) -> str:
        name = self.stores[0].name(step, f"{step:08x}")
        shards = {}
        for rank, store in sorted(enumerate(self.stores), reverse=step % 2 == 0):
            layout = self.snapshot.take(items(step, rank))
            shards[rank] = store.write_shard(name, rank, self.snapshot, layout, urgent=urgent)
        if commit:
            self.stores[0].commit(
                name,
                Manifest(
                    job="cut",
                    step=step,
                    created="2026-01-01T00:00:00Z",
                    reason="test",
                    ranks=len(self.stores),
                    hosts=1,
                    shards=tuple(shards[rank].packed() for rank in range(len(self.stores))),
                ),
            )
        return name

    def close(self) -> None:
        self.snapshot.close()
        for store in self.stores:
            store.close()


def recorded(root: Path, *, ranks: int, slots: int, seed: int, forgets: str = "") -> RecordingDisk:
    """A job's life: saves with and without hurry, growing slots, retention, some given up or set aside, restarts."""
    rng = random.Random(seed)
    disk = RecordingDisk(root, forgets)
    job = Job(root, disk, ranks, slots)
    held: list[int] = []

    def save(step: int, *, urgent: bool) -> None:
        job.save(step, urgent=urgent)
        held.append(step)
        disk.promise(step, min(len(held), 2))
        if rng.random() < 0.8:
            job.stores[0].prune()

    save(1, urgent=False)
    for step in range(2, 9):
        match rng.choice(("save", "urgent", "prepare", "give up", "set aside", "restart")):
            case "prepare":
                job.prepare(step)
            case "give up":
                job.stores[0].abandon(job.save(step, commit=False))
            case "set aside" if len(held) > 1:
                disk.promise(0, 0)  # taken away on purpose: only what is saved from here on is promised again
                job.stores[0].set_aside(job.stores[0].found()[0], "a test of what follows")
                held.clear()
            case "restart":
                job.close()
                job = Job(root, disk, ranks, slots)
                job.prepare(step)
            case what:
                save(step, urgent=what == "urgent")
    save(9, urgent=True)
    save(10, urgent=False)
    job.close()
    return disk


class Wrong(list[str]):
    """What was wrong after the cuts, in words."""


def judge(tree: Tree, target: Path, promised: Promise, snapshot: Snapshot, wrong: Wrong, *, go_on: bool) -> None:
    """Open what a cut left, and say what is wrong with it. go_on: also save once more, and look again."""
    lay_down(tree, target)
    with Store(target, job="cut") as store:
        seen = list(look(target, 0))
        wrong.extend(f"refused: {each.reason}" for each in seen if isinstance(each, Refused))
        found = [each for each in seen if isinstance(each, Found)]
        good = [each for each in found if is_whole(store, each, snapshot, wrong)]
        newest = good[0].step if good else 0
        if newest < promised.step:
            wrong.append(f"lost: step {promised.step} was promised, {newest} is there")
        if len(good) < promised.good:
            wrong.append(f"lost: {promised.good} good ones were promised, {len(good)} are there")
    if go_on:
        ranks = good[0].manifest.ranks if good else 1
        job = Job(target, None, ranks, 2)
        for rank in range(ranks):
            job.stores[rank].prepare(8192)
        job.save(99, urgent=True)
        job.stores[0].prune()
        for store in job.stores:
            store.prepare(8192)
        again = job.stores[0].found()
        if not again or again[0].step != 99 or not is_whole(job.stores[0], again[0], snapshot, wrong):
            wrong.append("stuck: no new checkpoint could be made")
        if job.stores[0].slots_ready(4096) != 2:
            wrong.append("stuck: the slots are not there")
        job.close()
    shutil.rmtree(target)


def is_whole(store: Store, found: Found, snapshot: Snapshot, wrong: Wrong) -> bool:
    for rank in range(found.manifest.ranks):
        try:
            loaded = read(found, rank, snapshot)
        except CorruptError as error:
            wrong.append(f"corrupt: {error}")
            return False
        if any(loaded[item.name].data != item.data for item in items(found.step, rank)):
            wrong.append(f"torn: {found.name} was taken for good")
    return True


def tried(scratch: Path, disk: RecordingDisk, *, ordered: bool, samples: int, seed: int = 1) -> tuple[int, Wrong]:
    """Judge every state; return how many, and what was wrong."""
    wrong = Wrong()
    count = 0
    with Snapshot(1 << 16) as snapshot:
        for count, (instant, promised, tree) in enumerate(
            cuts(disk.changes, ordered=ordered, seed=seed, samples=samples), start=1
        ):
            before = len(wrong)
            judge(tree, scratch / "cut", promised, snapshot, wrong, go_on=count % 20 == 0)
            wrong[before:] = [f"{instant} {disk.changes[instant]!r:.200}: {each}" for each in wrong[before:]]
    return count, wrong


@pytest.mark.parametrize("ordered", [True, False], ids=["ext4", "weakest"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", LIVES)
def test_nothing_torn_is_accepted_and_nothing_promised_is_lost(
    scratch: Path, seed: int, ranks: int, ordered: bool
) -> None:
    """Slots, retention, emergencies, some given up or set aside, growth, restarts: at every instant, in every way."""
    disk = recorded(scratch / "root", ranks=ranks, slots=2 if seed else 0, seed=seed)
    count, wrong = tried(scratch, disk, ordered=ordered, samples=8)
    print(f"states that a cut may leave: {count}, at {len(disk.changes)} instants")
    assert list(islice(wrong, 5)) == []
    assert count > 150


KINDS = ["shard", "manifest", "folder", "root", "folder with its manifest", "folder that lost its manifest"]


@pytest.mark.parametrize("forgets", KINDS)
def test_a_disk_that_forgets_a_flush_is_caught(scratch: Path, forgets: str) -> None:
    """Every kind of flush that we do is needed; and even without it the digests let nothing torn through."""
    disk = recorded(scratch / "root", ranks=1, slots=2, seed=1, forgets=forgets)
    assert disk.kinds == set(KINDS)
    _, wrong = tried(scratch, disk, ordered=False, samples=3)
    assert wrong
    assert not any("torn" in each for each in wrong)
