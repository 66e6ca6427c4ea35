"""Guards of several ranks: one asks, all save at one step and stand there; whoever fails costs no good checkpoint."""

import errno
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Never

import pytest

from powerguard.trainer import Buffer, Guard, Item, Loaded, StopTraining
from powerguard.trainer.loop.requests import RequestQueue, UploadsSeen
from powerguard.trainer.ranks import Memory, MemoryRanks, RanksError
from powerguard.trainer.ranks.agreement import Agreement
from powerguard.trainer.ranks.coordinator import Collective, NotCommittedError, RankCoordinator
from powerguard.trainer.ranks.replica import SharedParts, process
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.store import SavedCheckpoint, Store
from powerguard.wire import After, CheckpointStatus, Phase, Reason, TriggerRequest
from tests.trainer.checkpoints import read
from tests.trainer.test_guard_beside import GatedDisk
from tests.trainer.toy import short_folder


class Rank:
    """One rank: a training loop in a thread of its own, in lockstep with the others as by an all-reduce."""

    def __init__(
        self,
        memory: Memory,
        number: int,
        hosts: list[str],
        root: Path,
        barrier: threading.Barrier,
        *,
        measures: bool,
        disk: Disk,
    ) -> None:
        self.number = number
        self.done = 0
        self.fail_with: BaseException | None = None
        self.ended_by: BaseException | None = None
        self.final: int | None = None
        self.fails_save = False
        self.failed_save: BaseException | None = None
        self._barrier = barrier
        self.evaluates_at = -1
        self.keeps_state = True
        """It evaluates in a phase with a step."""
        self.saves_evaluated = False
        """It calls `save` in that phase, too."""
        self.copies_slowly = False
        """And copies its state for that until `saved`."""
        self.evaluating = threading.Event()
        self.evaluated = threading.Event()
        self.goes_back_to: int | None = None
        """After the next step it is rolled back to this one, and so are all others."""
        self.saves_at = -1
        self.saves_as: int | None = None
        """It calls `save` for another step there."""
        self.only_saves = False
        """It calls `save` in the place of `step` there."""
        self.saves = threading.Event()
        """It may call `save`."""
        self.saves.set()
        self.saving = threading.Event()
        """It takes its state in `save`, and so do all others: none can without them."""
        self.saved = threading.Event()
        """It may end with that."""
        self.measuring = threading.Event()
        """It looks at its state: for the first time to measure it, at its first step."""
        self.measured = threading.Event()
        """It may end with that."""
        if not measures:
            self.measured.set()
        self._over = threading.Event()
        self._root, self._disk = root, disk
        self._ranks = MemoryRanks(memory, number, len(hosts), hosts)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.guard: Guard
        self.ready = threading.Event()
        self._thread.start()

    def items(self) -> Iterator[Item]:
        """The step and the rank."""
        self.measuring.set()
        assert self.measured.wait(60)
        if self.fail_with is not None:
            raise self.fail_with
        if self.done == self.saves_at and not self.saved.is_set():
            self.saving.set()
            assert self.saved.wait(60)
            if self.fails_save:
                msg = "no memory"
                raise OSError(msg)
        yield Buffer.json("state", [self.number, self.done])
        yield Buffer("bulk", bytes([self.done % 256]) * 100_000)

    def load(self, items: Mapping[str, Loaded]) -> None:
        """Take this rank's part, and no other's."""
        number, self.done = items["state"].value()
        assert number == self.number

    def _run(self) -> None:
        try:
            with Guard(
                self,
                self._root,
                job="ranks",
                conduct="exit",
                every_s=None,
                snapshots=2 - self.number % 2,
                socket=None,
                ranks=self._ranks,
                disk=self._disk,
            ) as guard:
                self.guard = guard
                self.done = guard.restore()
                self.ready.set()
                while not self._over.is_set():
                    self._barrier.wait(60)
                    time.sleep(0.002)
                    self.done += 1
                    if not (self.only_saves and self.done == self.saves_at):
                        guard.step(self.done)
                    if self.goes_back_to is not None:
                        guard.restore(step=self.goes_back_to)
                        self.goes_back_to = None
                    if self.done == self.evaluates_at:
                        self._evaluate(guard)
                    if self.done == self.saves_at:
                        self._save(guard)
                self.final = guard.save(self.done).step
        except BaseException as error:  # noqa: BLE001 - the test looks at how it ended
            self.ended_by = error
            self._barrier.abort()

    def _evaluate(self, guard: Guard) -> None:
        with guard.phase("eval", step=self.done if self.keeps_state else None):
            if self.saves_evaluated:
                self.saves_at = self.done if self.copies_slowly else -1
                guard.save(self.done)
                self.saves_at = -1
            self.evaluating.set()
            while not self.evaluated.wait(0.01):
                guard.poll()

    def _save(self, guard: Guard) -> None:
        assert self.saves.wait(60)
        try:
            guard.save(self.done if self.saves_as is None else self.saves_as)
        except (NotCommittedError, OSError) as error:
            self.failed_save = error

    def finish(self) -> None:
        self._over.set()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


class World:
    """All ranks of a job. hosts: of each rank. measures: the rank that measures its state until it is let go."""

    def __init__(
        self,
        folder: Path,
        hosts: list[str],
        *,
        shared: bool = True,
        measures: int | None = None,
        disk: Disk = Disk(),  # noqa: B008 - it has no state
    ) -> None:
        self._memory = Memory()
        # The last one to come decides for all whether there is another step: so all end at the same one.
        self._stop = False
        self._barrier = threading.Barrier(len(hosts), action=self._decide)
        self.roots = [folder / ("ck" if shared else f"ck-{host}") for host in hosts]
        self.ranks = [
            Rank(self._memory, number, hosts, root, self._barrier, measures=number == measures, disk=disk)
            for number, root in enumerate(self.roots)
        ]
        for rank in self.ranks:
            assert rank.ready.wait(60), rank.ended_by

    def _decide(self) -> None:
        if self._stop:
            for rank in self.ranks:
                rank.finish()

    def trigger(self, rank: int, name: str, after: After, deadline_s: float | None = 20.0) -> CheckpointStatus:
        request = TriggerRequest(id=name, reason=Reason.DRILL, after=after, deadline_s=deadline_s)
        return self.ranks[rank].guard.requests.trigger(request)

    def of(self, rank: int, name: str) -> CheckpointStatus:
        status = self.ranks[rank].guard.requests.checkpoint(name)
        assert status is not None
        return status

    def until(self, true: Callable[[], object]) -> None:
        until_s = time.perf_counter() + 60
        while not true():
            assert time.perf_counter() < until_s, "it never came true"
            time.sleep(0.005)

    def ended(self, rank: int, name: str) -> CheckpointStatus:
        self.until(lambda: self.of(rank, name).phase in (Phase.COMMITTED, Phase.FAILED, Phase.ABORTED))
        return self.of(rank, name)

    def steps_on_disk(self) -> list[int]:
        """Whose every shard verifies and is of that step and rank."""
        steps: set[int] = set()
        for number, root in enumerate(self.roots):
            with Store(root, job="ranks", rank=number, ranks=len(self.roots), leader=False) as store:
                for found in store.found():
                    assert read(found, number)["state"].value() == [number, found.step]
                    steps.add(found.step)
        return sorted(steps, reverse=True)

    def end(self) -> None:
        self._stop = True
        for rank in self.ranks:
            rank.guard.requests.resume(wait_s=0)
        for rank in self.ranks:
            rank.join()


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def test_all_save_at_one_step_stand_there_and_go_on(folder: Path) -> None:
    world = World(folder, ["a", "a", "a"])
    for turn in range(3):
        world.trigger(0, f"e{turn}", After.PAUSE)
        ending = world.ended(0, f"e{turn}")
        assert ending.at_paused_step
        assert [rank.done for rank in world.ranks] == [ending.step] * 3
        assert all(rank.guard.requests.status().paused for rank in world.ranks)
        assert world.steps_on_disk()[0] == ending.step
        assert not world.ranks[0].guard.requests.resume().paused
        world.until(lambda given=ending: world.ranks[2].done > (given.step or 0))  # type: ignore[misc]
    world.end()
    assert {rank.final for rank in world.ranks} == {world.steps_on_disk()[0]}
    again = World(folder, ["a", "a", "a"])
    assert again.ranks[0].guard.requests.status().last_committed is not None
    assert min(rank.done for rank in again.ranks) >= world.steps_on_disk()[1]
    again.end()


def test_several_hosts_each_with_a_daemon_make_one_checkpoint(folder: Path) -> None:
    """Each root gets the full manifest and its own shards; the second daemon joins what the first one began."""
    world = World(folder, ["a", "a", "b", "b"], shared=False)
    world.trigger(0, "from-a", After.PAUSE)
    world.trigger(2, "from-b", After.PAUSE, 15.0)
    one, other = world.ended(0, "from-a"), world.ended(2, "from-b")
    assert (one.step, one.manifest_digest) == (other.step, other.manifest_digest)
    assert one.at_paused_step
    assert other.at_paused_step
    assert one.path != other.path
    assert world.steps_on_disk() == [one.step]
    status = world.ranks[0].guard.requests.status()
    assert (status.ranks, status.hosts) == (4, 2)
    world.end()


def test_several_hosts_may_share_one_root(folder: Path) -> None:
    """A file system that all hosts see: one of them commits, and there is one checkpoint with all shards."""
    world = World(folder, ["a", "a", "b", "b"])
    world.trigger(2, "e", After.PAUSE)
    ending = world.ended(2, "e")
    assert ending.at_paused_step
    assert world.steps_on_disk() == [ending.step]
    assert len(list(Path(ending.path).glob("shard-*"))) == 4
    assert list((folder / "ck").glob(".here-*")) == []
    world.end()


def test_a_rank_that_cannot_describe_its_state_fails_it_for_all_and_keeps_the_last(folder: Path) -> None:
    world = World(folder, ["a", "a"])
    world.trigger(0, "good", After.CONTINUE)
    good = world.ended(0, "good").step
    world.ranks[1].fail_with = RuntimeError("no memory")
    world.trigger(0, "bad", After.PAUSE)
    ending = world.ended(0, "bad")
    assert ending.phase is Phase.FAILED
    assert "rank 1: RuntimeError: no memory" in ending.error
    assert world.steps_on_disk() == [good]
    world.until(lambda: world.ranks[0].guard.requests.status().paused)
    world.ranks[1].fail_with = None
    world.trigger(0, "second", After.PAUSE)
    assert world.ended(0, "second").at_paused_step
    world.end()


def test_exit_ends_every_rank_after_it_is_durable(folder: Path) -> None:
    world = World(folder, ["a", "a"])
    world.trigger(0, "e", After.EXIT)
    end = world.ended(0, "e")
    assert end.durable
    world.ranks[0].guard.requests.mark_end_sent("e")
    for rank in world.ranks:
        rank.join()
        assert isinstance(rank.ended_by, StopTraining)
        assert rank.ended_by.code == 0
    assert world.steps_on_disk() == [end.step]


def test_a_pause_and_its_lease_are_everybodys(folder: Path) -> None:
    """A daemon that dies in a drill leaves no rank standing."""
    world = World(folder, ["a", "a"])
    requests, now_s = world.ranks[0].guard.requests, [1000.0]
    requests.clock = lambda: now_s[0]  # it lives until they stand, however long a busy machine takes to that
    requests.pause(lease_s=2.0, asker="daemon")
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    stood = [rank.done for rank in world.ranks]
    assert stood[0] == stood[1]
    assert world.steps_on_disk() == []
    now_s[0] += 2.5
    world.until(lambda: all(not rank.guard.requests.status().paused for rank in world.ranks))
    world.until(lambda: world.ranks[1].done > stood[1])
    world.end()


def test_each_host_releases_its_own_pause_alone(folder: Path) -> None:
    """Each has a UPS: training goes on when the last one on battery says so, and then at once, losing nothing."""
    world = World(folder, ["a", "a", "b"], shared=False)
    one, other = (world.ranks[rank].guard.requests for rank in (0, 2))
    world.trigger(0, "from-a", After.PAUSE)
    world.trigger(2, "from-b", After.PAUSE)
    step = world.ended(0, "from-a").step
    assert world.ended(2, "from-b").step == step
    world.until(lambda: one.status().paused and other.status().hosts_holding == 2)
    result = other.resume()
    assert (result.paused, result.hosts_holding) == (True, 1)
    assert other.resume().paused, "twice is as good as once"
    assert [rank.done for rank in world.ranks] == [step] * 3
    one.resume()
    world.until(lambda: all(rank.done > (step or 0) for rank in world.ranks))
    world.until(lambda: one.status().hosts_holding == 0)
    world.end()


def test_a_lease_that_ends_releases_its_host_alone(folder: Path) -> None:
    """A daemon that died with its lease holds nobody; that of the other host, which lives, is not overruled."""
    world = World(folder, ["a", "b"], shared=False)
    one, other = (world.ranks[rank].guard.requests for rank in (0, 1))
    one.pause(asker="lives")
    other.trigger(TriggerRequest(id="b", after=After.PAUSE, lease_s=0.3), asker="dies")
    world.until(lambda: other.status().hosts_holding == 1)  # and was 2: a wish is known here before it is answered
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    world.until(lambda: other.status().lease_s is None)
    assert not other.resume(all_hosts=True).hosts_holding, "the word of an operator, for a host that has died"
    before = world.ranks[1].done
    world.until(lambda: world.ranks[1].done > before)
    world.end()


def test_a_host_whose_training_ends_holds_nobody(folder: Path) -> None:
    world = World(folder, ["a", "b"], shared=False)
    for rank in world.ranks:
        rank.guard.requests.pause()
    world.until(lambda: all(rank.guard.requests.status().hosts_holding == 2 for rank in world.ranks))
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    world.ranks[0].guard._together.close()  # type: ignore[union-attr] # as at the end of its process
    world.until(lambda: world.ranks[1].guard.requests.status().hosts_holding == 1)
    assert world.ranks[1].guard.requests.status().paused
    assert not world.ranks[1].guard.requests.resume().paused
    world.end()


class Late:
    """The other ranks, as an asker finds them who joins a checkpoint and is held up until that has ended."""

    def __init__(self, together: RankCoordinator, settled: Callable[[int], object]) -> None:
        self._together, self._settled = together, settled
        self.paused, self.resumed, self.cancelled = together.paused, together.resumed, together.cancelled
        self.news = together.news
        self.holds, self.hosts_holding, self.trouble = False, None, ""
        self.held_by, self.calls_the_roll, self.departs = (), False, together.departs

    def opened(self, request: TriggerRequest) -> int:
        first = self._together.opened(TriggerRequest(id="first"))
        number = self._together.opened(request)
        assert number == first
        self._settled(number)
        return number


def test_who_joins_what_ends_meanwhile_learns_of_it(folder: Path) -> None:
    """No news comes any more of what has ended; who asked must not wait for some."""
    disk = GatedDisk()
    world = World(folder, ["a", "a"], disk=disk)
    requests, together = world.ranks[0].guard.requests, world.ranks[0].guard._together
    assert together is not None
    world.until(lambda: all(rank.guard.requests.pace.limit is not None for rank in world.ranks))  # room has been made
    disk.gate.clear()  # it does not end before it is joined

    def settle(number: int) -> None:
        disk.gate.set()
        world.until(lambda: requests.last is not None and requests.of_generation(number) is None)

    requests.others = Late(together, settle)
    assert world.trigger(0, "joins", After.CONTINUE).phase is Phase.COMMITTED
    requests.others = together
    world.end()


class Lost:
    """The other ranks, as one sees them that has lost them; see `requests.RankRequests`."""

    holds = False
    hosts_holding = 0
    held_by = ()
    calls_the_roll = False
    trouble = "this rank has lost the others: no answer"

    def _gone(self, *_: object, all_hosts: bool = False) -> Never:
        raise RanksError(self.trouble)

    opened = cancelled = paused = resumed = departs = news = _gone


def test_a_rank_that_has_lost_the_others_says_so_at_its_endpoint() -> None:
    """Nobody can save there any more, until the job is started anew: an operator must see that before an outage."""
    requests = RequestQueue(job="llm", conduct=After.PAUSE, ranks=2, hosts=2)
    requests.others = Lost()
    result = requests.trigger(TriggerRequest(id="e", after=After.PAUSE, lease_s=9.0))
    assert (result.phase, result.error) == (Phase.FAILED, f"RanksError: {Lost.trouble}")
    for status in (requests.status(), requests.pause(lease_s=9.0), requests.resume()):
        assert (status.trouble, status.paused, status.lease_s) == (Lost.trouble, False, None)


def test_a_request_ends_when_its_rank_loses_the_others(folder: Path) -> None:
    """The daemon would wait for it until its deadline, or for good; the disk is looked after only between requests."""
    world = World(folder, ["a", "a"])
    other = world.ranks[1]
    other.keeps_state, other.evaluates_at = False, other.done + 20
    assert other.evaluating.wait(60)
    world.trigger(0, "e", After.PAUSE, None)
    world.until(lambda: world.of(0, "e").step is not None)
    for rank in world.ranks:
        assert rank.guard._together is not None
        rank.guard._together.agreement._replica.lose("no answer")
    assert (world.of(0, "e").phase, world.of(0, "e").error) == (
        Phase.FAILED,
        "NotCommittedError: this rank has lost the others: no answer",
    )
    assert world.ranks[0].guard.requests.begun == []
    other.evaluated.set()
    world.end()


def test_saves_of_all_ranks_leave_nothing_behind(folder: Path) -> None:
    """A loop that saves by a rule of its own, ten thousand times: the store and the connections must not grow."""
    memory, opened = Memory(), []

    class Counted(MemoryRanks):
        def clone(self) -> "Counted":
            opened.append(self)
            return self

        def close(self) -> None:
            opened.remove(self)

    ranks, parts = [Counted(memory, rank, 2) for rank in range(2)], [SharedParts(), SharedParts()]

    def save(rank: int, number: int) -> str:
        one = Collective(ranks[rank].clone(), number, number, parts[rank], 10.0)
        shards = one.gather(b"shard", read=rank == 0)
        assert len(shards) == (0 if rank else 2)
        saved = SavedCheckpoint(step=number, path="", size_bytes=1, manifest_digest="" if rank else f"d{number}")
        return one.conclude(saved).manifest_digest

    sizes = []
    with ThreadPoolExecutor(2) as pool:
        for number in range(1, 5):
            result = list(pool.map(save, range(2), [number] * 2))
            assert result == [f"d{number}"] * 2
            sizes.append(len(memory))
    assert sizes[1:] == [sizes[0]] * 3
    assert opened == []


@pytest.mark.parametrize("cut", [KeyboardInterrupt(), OSError("no memory")])
def test_the_others_do_not_wait_for_a_rank_that_was_cut_off(folder: Path, cut: BaseException) -> None:
    """While it took its state, whoever asked: all hear of it at once, and not when patience ends."""
    world = World(folder, ["a", "a"])
    world.until(lambda: world.ranks[1].done > 1)  # at its first step it measures its state, and takes part in nothing
    world.ranks[1].fail_with = cut
    world.trigger(0, "e", After.CONTINUE)
    ending = world.ended(0, "e")
    name = type(cut).__name__
    assert (ending.phase, name in ending.error) == (Phase.FAILED, True)
    if isinstance(cut, Exception):
        world.end()  # each of them saves for itself, and finds that the other cannot
        assert isinstance(world.ranks[1].ended_by, OSError)
        assert isinstance(world.ranks[0].ended_by, NotCommittedError)
        assert "no memory" in str(world.ranks[0].ended_by)
    else:
        world.until(lambda: isinstance(world.ranks[0].ended_by, threading.BrokenBarrierError))
        for rank in world.ranks:
            rank.join()
        assert isinstance(world.ranks[1].ended_by, KeyboardInterrupt)


def test_training_that_ends_before_a_checkpoint_began_calls_it_off(folder: Path) -> None:
    """An interrupt while a rank only measures its state fails no checkpoint: its end calls off what has not begun."""
    world = World(folder, ["a", "a"], measures=1)
    assert world.ranks[1].measuring.wait(60)
    world.trigger(0, "e", After.CONTINUE)
    world.ranks[1].fail_with = KeyboardInterrupt()
    world.ranks[1].measured.set()
    ending = world.ended(0, "e")
    assert (ending.phase, ending.error) == (Phase.ABORTED, "training has ended")
    for rank in world.ranks:
        rank.join()


def test_called_off_before_it_began_or_finished_after(folder: Path) -> None:
    world = World(folder, ["a", "a"])
    world.trigger(0, "e", After.PAUSE)
    world.ranks[0].guard.requests.cancel("e")
    ending = world.ended(0, "e")
    assert ending.phase in (Phase.ABORTED, Phase.COMMITTED)
    world.until(lambda: not world.ranks[0].guard.requests.status().paused)
    before = world.ranks[1].done
    world.until(lambda: world.ranks[1].done > before + 3)
    world.end()


def evaluating(
    folder: Path, *, hosts: Sequence[str] = ("a", "a"), saves: bool = False, disk: Disk | None = None
) -> tuple[World, int]:
    """A world whose ranks are all in the middle of an evaluation after the same step. saves: they have saved in it."""
    world = World(folder, list(hosts), disk=disk or Disk())
    world.ranks[0].guard.requests.pause()
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    step = world.ranks[0].done + 2
    for rank in world.ranks:
        rank.evaluates_at, rank.saves_evaluated = step, saves
    world.ranks[0].guard.requests.resume()
    for rank in world.ranks:
        assert rank.evaluating.wait(60)
    return world, step


def test_an_emergency_in_an_evaluation_of_all_ranks(folder: Path) -> None:
    """No boundary comes, and yet all save the step at which they stand; and go on with the evaluation."""
    world, step = evaluating(folder)
    world.trigger(1, "e", After.PAUSE)
    ending = world.ended(1, "e")
    assert (ending.durable, ending.step) == (True, step)
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    assert world.of(1, "e").at_paused_step
    world.trigger(0, "again", After.PAUSE)
    assert world.ended(0, "again").step == step, "durable already"
    world.ranks[1].guard.requests.resume()
    world.until(lambda: not any(rank.guard.requests.status().paused for rank in world.ranks))
    for rank in world.ranks:
        rank.evaluated.set()
    world.until(lambda: world.ranks[0].done > step + 3)
    world.trigger(0, "later", After.CONTINUE)
    assert (world.ended(0, "later").step or 0) > step
    world.end()


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]], ids=["one host", "two hosts"])
def test_a_checkpoint_that_has_rotted_answers_no_emergency_of_all_ranks(folder: Path, hosts: list[str]) -> None:
    """The scrub sets it aside in an evaluation of hours: it is not durable any more, whatever was agreed on."""
    world, step = evaluating(folder, hosts=hosts)
    world.trigger(0, "a", After.CONTINUE)
    saved = Path(world.ended(0, "a").path, "shard-00001")
    leader = world.ranks[0].guard
    saved.write_bytes(bytes([saved.read_bytes()[0] ^ 1]) + saved.read_bytes()[1:])
    leader._checkpointer._scrub_at_s = leader._writer._idle_at_s = 0.0  # type: ignore[union-attr]
    with leader.requests.changed:
        leader.requests.changed.notify_all()
    assert leader._together is not None
    agreed = leader._together.agreement
    world.until(lambda: not saved.exists() and leader.requests.last is None and agreed.state.committed_step is None)
    world.until(lambda: world.ranks[1].guard.requests.status().last_committed is None)
    world.trigger(1, "e", After.CONTINUE)
    assert world.ended(1, "e").phase is Phase.FAILED
    for rank in world.ranks:
        rank.evaluated.set()
    world.until(lambda: world.ranks[0].done > step + 3)
    world.trigger(1, "later", After.CONTINUE)
    assert world.ended(1, "later").durable
    world.end()


class OneFails(Disk):
    """Refuses what rank 1 writes, while rank 0 writes slowly."""

    def __init__(self) -> None:
        self.fails = threading.Event()

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Write, or not."""
        if self.fails.is_set():
            if b"[1," in bytes(content[:100_000]):
                raise OSError(errno.EIO, "the disk of rank 1")
            time.sleep(0.2)
        return super().write(descriptor, content, offset)


def test_after_a_failure_in_an_evaluation_all_ranks_try_again(folder: Path) -> None:
    """What one rank's disk refused has called off the others' writes; their copies are whole, and in memory."""
    disk = OneFails()
    world, step = evaluating(folder, disk=disk)
    disk.fails.set()
    world.trigger(0, "e", After.PAUSE)
    assert "the disk of rank 1" in world.ended(0, "e").error
    disk.fails.clear()
    world.trigger(0, "again", After.PAUSE)
    ending = world.ended(0, "again")
    assert (ending.error, ending.durable, ending.step) == ("", True, step)
    world.ranks[0].guard.requests.resume()
    for rank in world.ranks:
        rank.evaluated.set()
    world.end()


def test_an_emergency_in_an_evaluation_of_what_was_just_saved(folder: Path) -> None:
    """Of the best state, say: host memory has it no more, and the checkpoint that there is answers."""
    world, step = evaluating(folder, saves=True)
    (saved,) = (path.name for path in world.roots[0].glob("step-*"))
    world.trigger(1, "e", After.PAUSE)
    ending = world.ended(1, "e")
    assert (ending.durable, ending.step, Path(ending.path).name) == (True, step, saved)
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    world.ranks[1].guard.requests.resume()
    for rank in world.ranks:
        rank.evaluated.set()
    world.until(lambda: world.ranks[0].done > step + 3)
    world.end()


class Slow(Disk):
    """Writes nothing while it is held."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Write, once it may."""
        assert self.go.wait(60)
        return super().write(descriptor, content, offset)


@pytest.mark.parametrize("after", [After.PAUSE, After.CONTINUE])
def test_an_emergency_in_an_evaluation_of_what_is_just_being_written(folder: Path, after: After) -> None:
    """One rank had heard that the first is durable, and named it; the other one had not, and wrote its copy again.

    So each waited for the other's part until the time of the emergency was over.
    """
    disk = Slow()
    world, step = evaluating(folder, disk=disk)
    disk.go.clear()
    world.trigger(0, "first", After.CONTINUE, deadline_s=None)
    world.until(lambda: all(each.guard.requests.begun for each in world.ranks))
    world.until(lambda: all(agreement_of(each).state.back is not None for each in world.ranks))
    if after is After.PAUSE:
        world.trigger(1, "e", after)
        world.until(lambda: all((front := agreement_of(each).state.front) and front.begun for each in world.ranks))
    disk.go.set()
    if after is After.CONTINUE:
        world.trigger(1, "e", after)
    first, ending = world.ended(0, "first"), world.ended(1, "e")
    assert (first.error, ending.error, ending.durable, ending.step) == ("", "", True, step)
    assert len(list(world.roots[0].glob(f"step-{step:012}-*"))) == 1, "the same state, once"
    world.ranks[1].guard.requests.resume()
    for rank in world.ranks:
        rank.evaluated.set()
    world.end()


def test_an_emergency_in_a_save_that_one_rank_still_copies_for_gives_way_to_it(folder: Path) -> None:
    """That rank had handed in the copy of its evaluation, and the others waited for the save: each for the other."""
    world = World(folder, ["a", "a"])
    slow, other = world.ranks
    world.ranks[0].guard.requests.pause()
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    step = slow.done + 2
    slow.copies_slowly = True
    for rank in world.ranks:
        rank.evaluates_at, rank.saves_evaluated = step, True
    slow.guard.requests.resume()
    assert slow.saving.wait(60)
    world.until(lambda: other.guard._writer.finishes(step))
    world.trigger(1, "e", After.CONTINUE, deadline_s=600.0)
    assert "being saved by training itself" in world.ended(1, "e").error
    slow.saved.set()
    for rank in world.ranks:
        assert rank.evaluating.wait(60), rank.ended_by
    world.trigger(1, "again", After.CONTINUE)
    again = world.ended(1, "again")
    assert (again.durable, again.step) == (True, step)
    for rank in world.ranks:
        rank.evaluated.set()
    world.end()


def test_an_emergency_at_the_step_from_which_all_ranks_were_rolled_back_is_written(folder: Path) -> None:
    """The first checkpoint of that step is set aside by then: it is no answer."""
    world = World(folder, ["a", "a"])
    world.trigger(0, "older", After.CONTINUE)
    older = world.ended(0, "older").step or 0
    world.until(lambda: world.ranks[0].done > older)
    world.trigger(0, "newer", After.PAUSE)
    newer = world.ended(0, "newer").step or 0
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    for rank in world.ranks:
        rank.goes_back_to, rank.evaluates_at = older, newer
    world.ranks[0].guard.requests.resume()
    world.until(lambda: all(rank.evaluating.is_set() for rank in world.ranks))
    world.trigger(0, "again", After.CONTINUE)
    ending = world.ended(0, "again")
    assert (ending.phase, ending.step) == (Phase.COMMITTED, newer)
    assert Path(ending.path).is_dir()
    assert world.steps_on_disk() == [newer, older]
    for rank in world.ranks:
        rank.evaluated.set()
    world.end()


def test_an_end_in_an_evaluation_of_all_ranks(folder: Path) -> None:
    world, step = evaluating(folder)
    world.trigger(0, "e", After.EXIT)
    assert world.ended(0, "e").step == step
    world.ranks[0].guard.requests.mark_end_sent("e")
    for rank in world.ranks:
        rank.join()
        assert isinstance(rank.ended_by, StopTraining)
    assert world.steps_on_disk() == [step]


def test_a_signal_in_an_evaluation_without_a_state_ends_all_ranks_after_the_next_step(folder: Path) -> None:
    """As in Lightning and Transformers. The rank that polls must not keep the wish for itself."""
    world = World(folder, ["a", "a"])
    requests = world.ranks[1].guard.requests
    requests.signals = True
    with requests.changed:
        requests.changed.notify_all()
    world.ranks[0].guard.requests.pause()
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    step = world.ranks[0].done + 1
    for rank in world.ranks:
        rank.evaluates_at, rank.keeps_state = step, False
    world.ranks[0].guard.requests.resume()
    world.until(lambda: all(rank.evaluating.is_set() for rank in world.ranks))
    requests.signalled, requests.asked = signal.SIGTERM, True
    world.until(lambda: agreed(world) == step + 1)
    for rank in world.ranks:
        rank.evaluated.set()
    for rank in world.ranks:
        rank.join()
        assert isinstance(rank.ended_by, StopTraining)
        assert rank.ended_by.code == 0
    assert world.steps_on_disk() == [step + 1]


def agreement_of(rank: Rank) -> Agreement:
    assert rank.guard._together is not None
    return rank.guard._together.agreement


def saving(folder: Path, *, late: int = 0, only_saves: bool = False) -> tuple[World, int]:
    """A world whose ranks are all in `save` after the same step. late: so many are about to call it."""
    world = World(folder, ["a", "a", "b"])
    world.ranks[0].guard.requests.pause()
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    step = world.ranks[0].done + 2
    for rank in world.ranks:
        rank.saves_at, rank.only_saves = step, only_saves
    for rank in world.ranks[3 - late :]:
        rank.saves.clear()
    world.ranks[0].guard.requests.resume()
    if late:
        world.until(lambda: all(rank.done == step for rank in world.ranks))
        ended = step - only_saves  # as far as the guards know
        world.until(lambda: all(agreement_of(rank).step == ended for rank in world.ranks))
    else:
        for rank in world.ranks:
            assert rank.saving.wait(60), rank.ended_by
    return world, step


def agreed(world: World) -> int | None:
    """The step at which all are to save, or do."""
    front = agreement_of(world.ranks[0]).state.front
    return None if front is None else front.step


def let_save(world: World) -> None:
    for rank in world.ranks:
        rank.saved.set()
        rank.saves.set()


def test_a_pause_during_a_save_of_all_ranks_stands_at_its_step(folder: Path) -> None:
    """Not one step later, which may be minutes: no rank leaves `save` while somebody wants it to stand."""
    world, step = saving(folder)
    world.trigger(2, "e", After.PAUSE)
    world.until(lambda: agreed(world))
    assert agreed(world) == step
    let_save(world)
    ending = world.ended(2, "e")
    assert (ending.step, ending.paused_step, ending.at_paused_step) == (step, step, True)
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    assert [rank.done for rank in world.ranks] == [step] * 3
    assert set(world.steps_on_disk()) == {step}
    world.ranks[2].guard.requests.resume()
    world.until(lambda: all(rank.done > step for rank in world.ranks))
    world.trigger(0, "later", After.PAUSE)
    assert (world.ended(0, "later").step or 0) > step
    world.end()


def test_an_end_during_a_save_of_all_ranks_comes_in_it(folder: Path) -> None:
    world, step = saving(folder)
    world.trigger(0, "e", After.EXIT)
    world.until(lambda: agreed(world))
    let_save(world)
    assert world.ended(0, "e").step == step
    world.ranks[0].guard.requests.mark_end_sent("e")
    for rank in world.ranks:
        rank.join()
        assert isinstance(rank.ended_by, StopTraining)
    assert [rank.done for rank in world.ranks] == [step] * 3


def test_a_wish_during_a_save_that_fails_is_served_at_its_step(folder: Path) -> None:
    """A second try, of the state that is still there; only then does `save` raise what it has to."""
    world, step = saving(folder)
    world.trigger(0, "e", After.PAUSE)
    world.until(lambda: agreed(world))
    world.ranks[1].fails_save = True
    let_save(world)
    ending = world.ended(0, "e")
    assert (ending.step, ending.durable, ending.at_paused_step) == (step, True, True)
    assert world.steps_on_disk() == [step]
    assert [rank.failed_save for rank in world.ranks] == [None] * 3
    world.ranks[0].guard.requests.resume()
    world.until(lambda: all(rank.done > step for rank in world.ranks))
    kinds = [type(rank.failed_save) for rank in world.ranks]
    assert kinds == [NotCommittedError, OSError, NotCommittedError]
    world.end()


def test_a_wish_before_all_ranks_are_in_a_save_is_for_the_next_step(folder: Path) -> None:
    """A rank that waits for the others in `save` can save nothing for a wish: they may stand where the step ended."""
    world, step = saving(folder, late=1)
    world.trigger(0, "e", After.PAUSE)
    world.until(lambda: agreed(world))
    let_save(world)
    ending = world.ended(0, "e")
    assert (ending.step, ending.at_paused_step) == (step + 1, True)
    assert [rank.done for rank in world.ranks] == [step + 1] * 3
    assert world.steps_on_disk() == [step + 1, step]
    world.end()


def test_a_save_in_the_place_of_a_step_is_a_boundary(folder: Path) -> None:
    """A wish that is agreed on for that step finds it there, and does not fail one step later as passed."""
    world, step = saving(folder, late=3, only_saves=True)
    world.trigger(0, "e", After.PAUSE)
    world.until(lambda: agreed(world))
    assert agreed(world) == step
    let_save(world)
    ending = world.ended(0, "e")
    assert (ending.durable, ending.step, ending.at_paused_step) == (True, step, True)
    world.end()


def test_rank_zeros_clock_saves_for_all(folder: Path) -> None:
    """A periodic checkpoint of several ranks, beside training."""
    world = World(folder, ["a", "a"])
    guard = world.ranks[0].guard
    assert guard._together is not None
    guard._together.due()
    world.until(lambda: guard.requests.status().last_committed is not None)
    assert world.steps_on_disk() == [guard.requests.status().last_committed.step]  # type: ignore[union-attr]
    assert guard.requests.results == {Phase.COMMITTED: 0, Phase.FAILED: 0, Phase.ABORTED: 0}
    world.end()


class Offered:
    """In the place of uploads: notes which steps it is to copy, and whether by request."""

    def __init__(self) -> None:
        self.offers: list[tuple[int, bool]] = []

    def offer(self, saved: SavedCheckpoint, *, requested: bool) -> None:
        self.offers.append((saved.step, requested))

    def hold(self) -> None:
        pass

    def release(self) -> None:
        pass

    def seen(self) -> UploadsSeen:
        return UploadsSeen()

    def figures(self) -> dict[str, tuple[str, str, float]]:
        return {}


def test_a_request_that_joins_the_schedule_at_one_host_has_all_hosts_copy_it(folder: Path) -> None:
    """Else that host alone did, in place of what both were to copy: the second tier had neither of them whole."""
    world = World(folder, ["a", "b"], shared=False, measures=1)
    uploads = [Offered() for _ in world.ranks]
    for rank, mine in zip(world.ranks, uploads, strict=True):
        rank.guard.requests.uploads = mine
    assert world.ranks[1].measuring.wait(60)
    assert world.ranks[0].guard._together is not None
    world.ranks[0].guard._together.due()
    world.until(lambda: agreement_of(world.ranks[0]).state.front is not None)
    world.trigger(0, "e", After.CONTINUE)
    world.ranks[1].measured.set()
    step = world.ended(0, "e").step
    world.until(lambda: all(mine.offers for mine in uploads))
    assert [mine.offers[0] for mine in uploads] == [(step, True), (step, True)]
    world.end()


def test_a_save_at_different_steps_fails_on_all_ranks(folder: Path) -> None:
    """The data of one rank ended earlier. Together, these states would be a checkpoint that no resume can load."""
    world, step = saving(folder)
    let_save(world)
    world.until(lambda: all(rank.done > step for rank in world.ranks))
    world.ranks[0].guard.requests.pause()
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    later = world.ranks[0].done + 1
    for rank in world.ranks:
        rank.saves_at, rank.saves_as = later, later - rank.number
    world.ranks[0].guard.requests.resume()
    world.until(lambda: all(rank.failed_save for rank in world.ranks))
    text = f"rank 0 called guard.save for step {later}, rank 1 for step {later - 1}"
    assert all(str(rank.failed_save).startswith(text) for rank in world.ranks)
    assert world.steps_on_disk() == [step]
    world.end()


def test_a_save_names_the_ranks_that_it_waits_for() -> None:
    """One that hangs, or whose script saves elsewhere: half an hour without a word would be a riddle."""
    memory, both = Memory(), threading.Barrier(2)
    found: list[str] = []

    def save(rank: int) -> str:
        ranks = MemoryRanks(memory, rank, 3)
        add = ranks.add
        if rank != 1:  # it has come, and waits for none before the other one has, too
            ranks.add = lambda key, amount: (add(key, amount), both.wait(60))[0]
        return Collective(ranks, 1, 7, SharedParts(), 60.0, note_awaited=found.append, words_s=(0.05, 0.1)).token

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(save, rank) for rank in (0, 2)]
        until_s = time.perf_counter() + 60
        while len(found) < 4:
            assert time.perf_counter() < until_s
            time.sleep(0.005)
        assert all("s for rank 1 (does every rank save here, and is its process alive?)" in each for each in found)
        token = save(1)
        assert [each.result() for each in waiting] == [token] * 2
    assert found[-3:] == [""] * 3


def test_what_a_save_waits_for_shows_at_the_endpoint(folder: Path) -> None:
    world = World(folder, ["a", "a"])
    guard = world.ranks[0].guard
    assert guard._together is not None
    guard._together._note_awaited("guard.save has waited 10 s for rank 1")
    assert guard.requests.status().trouble == "guard.save has waited 10 s for rank 1"
    guard._together._note_awaited("")
    assert guard.requests.status().trouble == ""
    world.end()


def test_a_rank_that_was_killed_ends_the_save_of_the_others_at_once() -> None:
    """Ranks that were started by hand: no launcher ends them when one of them is killed."""
    memory = Memory()
    with subprocess.Popen(["sleep", "600"]) as other:
        memory.set("process/1", " ".join(process(str(other.pid))).encode())
        other.kill()
        with pytest.raises(NotCommittedError, match="rank 1 has died"):
            Collective(MemoryRanks(memory, 0, 2), 1, 7, SharedParts(), 1800.0)


def test_a_signal_ends_a_rank_that_has_lost_the_others(folder: Path) -> None:
    """Nothing can be saved there any more; the second signal is a kill."""
    world = World(folder, ["a", "a"])
    guard = world.ranks[0].guard
    assert guard._together is not None
    guard._together.agreement._replica.lose("no answer")
    guard.requests.signalled = signal.SIGTERM
    with guard.requests.changed:
        guard.requests.changed.notify_all()
    world.ranks[0].join()
    assert isinstance(world.ranks[0].ended_by, StopTraining)
    assert world.ranks[0].ended_by.code == 1
    world.ranks[1].join()


def test_a_signal_is_passed_on_in_the_middle_of_a_write(folder: Path) -> None:
    """What is being written may take a minute, and Slurm kills after thirty seconds."""
    disk = GatedDisk()
    world = World(folder, ["a", "a"], disk=disk)
    requests, together = world.ranks[0].guard.requests, world.ranks[0].guard._together
    assert together is not None
    world.until(lambda: all(rank.guard.requests.pace.limit is not None for rank in world.ranks))  # room has been made
    disk.gate.clear()
    world.trigger(0, "e", After.CONTINUE)
    assert disk.stuck.wait(60)
    requests.signalled, requests.asked = signal.SIGTERM, True
    with requests.changed:
        requests.changed.notify_all()
    world.until(lambda: together.agreement.state.number == 2)
    assert world.of(0, "e").phase is not Phase.COMMITTED
    disk.gate.set()
    for rank in world.ranks:
        rank.join()
        assert isinstance(rank.ended_by, StopTraining)
        assert rank.ended_by.code == 0
