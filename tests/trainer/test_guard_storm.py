"""Askers at random, disks that stick and fail, phases, leases: every wish ends, no lie is told, training goes on."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from powerguard.trainer import Guard
from powerguard.trainer.store.store import Store
from powerguard.wire import After, CheckpointStatus, Phase, Reason, TriggerRequest
from tests.trainer.checkpoints import read
from tests.trainer.test_guard_beside import GatedDisk, State
from tests.trainer.test_guard_ranks import World
from tests.trainer.toy import short_folder

ENDED = (Phase.COMMITTED, Phase.FAILED, Phase.ABORTED)


class MoodyDisk(GatedDisk):
    """A disk that dawdles, and now and then is full."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Write late, or not at all."""
        time.sleep(self._chance.choice([0, 0, 0.002, 0.02]))
        self.is_full = self._chance.random() < 0.02
        return super().write(descriptor, content, offset)


class Storm:
    """One training and four askers, all from one seed (their threads are the system's)."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.state = State()
        self.guard = Guard(
            self.state,
            folder / "ck",
            job="storm",
            conduct="pause",
            every_s=0.2,
            snapshots=1 + seed % 2,
            socket=None,
            disk=MoodyDisk(random.Random(seed + 1)),
        )
        self.guard.restore()
        self.asked: list[str] = []
        self.lies: list[CheckpointStatus] = []
        self.over = threading.Event()
        self.training = threading.Thread(target=self._train)

    def _train(self) -> None:
        chance = random.Random(self.chance.random())
        while not self.over.is_set():
            time.sleep(0.001)
            self.state.step += 1
            self.guard.step(self.state.step)
            if chance.random() < 0.02:
                with self.guard.phase("eval", step=chance.choice([None, self.state.step])):
                    for _ in range(20):
                        time.sleep(0.001)
                        self.guard.poll()

    def ask(self, number: int) -> None:
        chance = random.Random(self.chance.random() + number)
        requests = self.guard.requests
        while not self.over.is_set():
            time.sleep(chance.uniform(0, 0.03))
            wish = chance.random()
            if wish < 0.5:
                name = f"{number}-{len(self.asked)}"
                self.asked.append(name)
                request = TriggerRequest(
                    id=name,
                    reason=Reason.DRILL,
                    after=chance.choice([After.CONTINUE, After.PAUSE]),
                    deadline_s=chance.choice([None, 0.05, 0.5, 5.0]),
                    lease_s=chance.choice([None, 0.05]),
                )
                requests.trigger(request, asker=str(number))
            elif wish < 0.6:
                requests.pause(lease_s=chance.choice([None, 0.05]), asker=str(number))
            elif wish < 0.8:
                requests.resume(wait_s=0)
            elif wish < 0.9 and self.asked:
                requests.cancel(chance.choice(self.asked[-20:]))
            elif self.asked:
                self.look(requests.checkpoint(chance.choice(self.asked[-20:]), wait_s=0.01))

    def look(self, status: CheckpointStatus | None) -> None:
        """Whoever says durable must have it on the disk; whoever says paused stands at a step that has ended."""
        if status is None:
            return
        wrong_step = status.paused_step is not None and status.paused_step > self.state.step
        if wrong_step or (status.durable and not status.path) or status.durable != (status.phase is Phase.COMMITTED):
            self.lies.append(status)

    def until(self, true: Callable[[], object]) -> None:
        for _ in range(20_000):
            if true():
                return
            time.sleep(0.005)
        pytest.fail("it never came true")


def rage(asked: Sequence[object]) -> None:
    """Let it storm for a while; on a machine that is busy elsewhere, until there was something of a storm."""
    for turn in range(600):
        if turn >= 50 and len(asked) > 20:
            return
        time.sleep(0.05)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.mark.parametrize(
    "seed", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_every_wish_ends_and_nothing_is_torn(folder: Path, seed: int) -> None:
    storm = Storm(folder, seed)
    askers = [threading.Thread(target=storm.ask, args=[number]) for number in range(4)]
    for thread in (storm.training, *askers):
        thread.start()
    rage(storm.asked)
    storm.over.set()
    for thread in askers:
        thread.join(60)
        assert not thread.is_alive()
    requests = storm.guard.requests
    requests.resume(wait_s=0)
    storm.until(lambda: not storm.training.is_alive() or requests.resume(wait_s=0.01) is None)
    storm.until(lambda: not requests.begun)
    storm.guard.close()
    states = [requests.checkpoint(name) for name in storm.asked]
    assert len(storm.asked) > 20
    assert [status for status in states if status is not None and status.phase not in ENDED] == []
    assert storm.lies == []
    with Store(folder / "ck", job="storm", leader=False) as store:
        for found in store.found():
            assert read(found, 0)["step"].value() == found.step
            storm.state.load(read(found, 0))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_every_wish_of_several_ranks_ends_and_they_never_part(folder: Path, seed: int) -> None:
    """Two daemons at two hosts, out of step with each other, and the clock's own checkpoints in between."""
    world = World(folder, ["a", "a", "b"] if seed % 2 else ["a", "b"], shared=seed == 3)
    over = threading.Event()
    asked: list[tuple[int, str]] = []

    def ask(rank: int) -> None:
        chance = random.Random(seed * 10 + rank)
        guard = world.ranks[rank].guard
        requests = guard.requests
        while not over.is_set():
            time.sleep(chance.uniform(0, 0.05))
            wish = chance.random()
            if wish < 0.5:
                asked.append((rank, f"{rank}-{len(asked)}"))
                after = chance.choice([After.CONTINUE, After.PAUSE])
                request = TriggerRequest(id=asked[-1][1], after=after, lease_s=chance.choice([None, 0.05]))
                requests.trigger(request, asker=str(rank))
            elif wish < 0.6:
                requests.pause(lease_s=chance.choice([None, 0.05]), asker=str(rank))
            elif wish < 0.8:
                requests.resume(wait_s=0)
            elif wish < 0.9 and asked:
                at, name = chance.choice(asked[-10:])
                world.ranks[at].guard.requests.cancel(name)
            elif guard._together is not None:
                guard._together.due()

    askers = [threading.Thread(target=ask, args=[rank]) for rank in (0, len(world.ranks) - 1)]
    for thread in askers:
        thread.start()
    rage(asked)
    over.set()
    for thread in askers:
        thread.join(60)
        assert not thread.is_alive()

    def is_quiet() -> bool:
        for rank in world.ranks:
            rank.guard.requests.resume(wait_s=0)
        return not any(rank.guard.requests.begun for rank in world.ranks)

    world.until(is_quiet)
    before = world.ranks[0].done
    world.until(lambda: is_quiet() and world.ranks[0].done > before + 3)
    states = [world.ranks[rank].guard.requests.checkpoint(name) for rank, name in asked]
    assert len(asked) > 20
    assert [status for status in states if status is not None and status.phase not in ENDED] == []
    assert all(rank.guard.requests.results[Phase.FAILED] == 0 for rank in world.ranks)
    world.end()
    assert {rank.final for rank in world.ranks} == {world.steps_on_disk()[0]}
