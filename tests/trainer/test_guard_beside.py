"""Saving beside training, over a real store: what training waits for, and whose bytes go first when two states meet."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from powerguard.trainer import Buffer, Guard, Item, Loaded, StopTraining
from powerguard.trainer.loop.requests import UploadsSeen
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.manifest import CHUNK_BYTES
from powerguard.trainer.store.shards import THREADS
from powerguard.trainer.store.store import SavedCheckpoint, Store, StoreError
from powerguard.wire import After, CheckpointStatus, Loop, Phase, Reason, TrainerStatus, TriggerRequest
from tests.trainer.checkpoints import read
from tests.trainer.toy import short_folder

SIZE = 1 << 20
LARGE = THREADS * CHUNK_BYTES + SIZE  # a chunk for each thread, and one that is still to come


class GatedDisk(Disk):
    """A disk that takes data only while its gate is open, and none when it is full."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.stuck = threading.Event()
        self.passes = 0
        """So many chunks of a file pass a closed gate: the first ones, in whichever order its threads come to them."""
        self.is_full = False

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Wait for the gate, as a slow disk does."""
        if not self.gate.is_set() and offset >= self.passes * CHUNK_BYTES:
            self.stuck.set()
            assert self.gate.wait(100)
        if self.is_full:
            raise OSError(28, os.strerror(28))
        return super().write(descriptor, content, offset)


class State:
    """Much that says which step it is of."""

    def __init__(self, size_bytes: int = SIZE) -> None:
        self.step = 0
        self.fail_with: Exception | None = None
        self._size_bytes = size_bytes

    def items(self) -> Iterator[Item]:
        """The step, and much of it."""
        if self.fail_with is not None:
            raise self.fail_with
        yield Buffer("state", bytes([self.step % 256]) * self._size_bytes)
        yield Buffer.json("step", self.step)

    def load(self, items: Mapping[str, Loaded]) -> None:
        """Check that it is of one step throughout."""
        self.step = items["step"].value()
        assert bytes(items["state"].data) == bytes([self.step % 256]) * self._size_bytes


class Job:
    """A training in the test's own thread: it steps when it is told to."""

    def __init__(
        self, folder: Path, *, every_s: float | None = None, size_bytes: int = SIZE, snapshots: int | None = None
    ) -> None:
        self.now_s = 1000.0
        self.folder = folder / "ck"
        self.disk = GatedDisk()
        self.state = State(size_bytes)
        self.snapshots = snapshots
        self.guard = Guard(
            self.state,
            self.folder,
            job="job",
            conduct="exit",
            every_s=every_s,
            snapshots=snapshots,
            socket=None,
            disk=self.disk,
            clock=lambda: self.now_s,
        )
        self.requests = self.guard.requests
        self.guard.restore()
        self.step()  # the first boundary measures the state and has room made
        self.until(lambda: self.requests.pace.limit is not None)

    def step(self) -> int:
        self.state.step += 1
        self.guard.step(self.state.step)
        return self.state.step

    def trigger(self, name: str, after: str = "pause", deadline_s: float | None = None, **more: object) -> None:
        request = {"id": name, "after": After(after), "deadline_s": deadline_s, "reason": Reason.DRILL, **more}
        self.requests.trigger(TriggerRequest(**request), asker=str(more and "daemon"))  # type: ignore[arg-type]

    def of(self, name: str) -> CheckpointStatus:
        status = self.requests.checkpoint(name)
        assert status is not None
        return status

    def ended(self, name: str) -> CheckpointStatus:
        self.until(lambda: self.of(name).phase in (Phase.COMMITTED, Phase.FAILED, Phase.ABORTED))
        return self.of(name)

    def until(self, true: Callable[[], object]) -> None:
        until_s = time.perf_counter() + 60
        while not true():
            assert time.perf_counter() < until_s, "it never came true"
            time.sleep(0.005)

    def standing(self) -> threading.Thread:
        """Take the next step in a thread of its own, because training is going to stand still in it."""
        thread = threading.Thread(target=self.step)
        thread.start()
        self.until(lambda: self.requests.status().paused or not thread.is_alive())
        return thread

    def steps_on_disk(self) -> list[int]:
        with Store(self.folder, job="job", leader=False) as store:
            found = store.found()
            for each in found:
                step = read(each, 0)["step"].value()
                assert step == each.step
            return [each.step for each in found]

    def slow(self, *, passes: int = 0) -> None:
        """Make the next write stick until the gate is opened. passes: after so many chunks of a file."""
        self.disk.passes = passes
        self.disk.stuck.clear()
        self.disk.gate.clear()

    def close(self) -> None:
        self.disk.gate.set()
        self.requests.resume(wait_s=0)
        self.guard.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture(params=[1, 2], ids=["one snapshot", "two snapshots"])
def job(folder: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    running = Job(folder, every_s=300, snapshots=request.param)
    yield running
    running.close()


@pytest.fixture
def large(folder: Path) -> Iterator[Job]:
    running = Job(folder, every_s=300, size_bytes=LARGE)
    yield running
    running.close()


def periodic(job: Job, *, passes: int = 0) -> int:
    """Let a periodic checkpoint begin, and leave it in the middle of its write, after so many chunks."""
    job.slow(passes=passes)
    job.now_s += 400
    step = job.step()
    assert job.disk.stuck.wait(60)
    (write,) = job.guard._writer._queue
    job.until(lambda: write.bytes_done == passes * CHUNK_BYTES)  # the threads of the others have said so, too
    return step


def test_training_goes_on_while_a_periodic_checkpoint_is_written(job: Job) -> None:
    began = periodic(job)
    for _ in range(5):
        job.step()
    assert job.requests.status().last_committed is None
    job.disk.gate.set()
    job.until(lambda: job.requests.status().last_committed is not None)
    assert job.steps_on_disk() == [began], "the state of that step, whatever training did to it since"
    totals = job.requests.pace.totals
    assert (totals.writes, totals.stalls, totals.failed) == (1, 1, 0)


def test_what_a_save_cost_is_reported(job: Job) -> None:
    """In the status and by the guard: the wait of training and the write apart, for the newest durable state only."""
    assert job.guard.stats() is None
    step = periodic(job)
    for _ in range(3):
        job.step()
    assert job.guard.stats() is None, "it is not durable yet"
    job.disk.gate.set()
    job.until(lambda: job.guard.stats() is not None)
    result = job.guard.stats()
    assert result == job.requests.status().last_save
    assert result is not None
    assert (result.step, result.bytes) == (step, job.requests.pace.totals.bytes)
    assert result.write_s == job.requests.pace.totals.write_s
    assert result.stall_s == job.requests.pace.totals.stall_s
    assert result.write_bw == pytest.approx(result.bytes / max(result.write_s, 1e-6))
    assert result.copy_bw is not None
    assert result.copy_bw > 0
    assert result.snapshots == job.snapshots
    assert TrainerStatus.parse(job.requests.status().to_json()) == job.requests.status()


def test_a_training_that_is_rolled_back_in_mid_write_reads_into_no_memory_that_is_written(job: Job) -> None:
    """Else the older state would be durable under the newer step, with digests that are right."""
    older = job.guard.save(job.step()).step
    newer = periodic(job)
    threading.Timer(0.2, job.disk.gate.set).start()
    assert job.guard.restore(step=older) == job.state.step == older
    assert job.steps_on_disk() == [newer, older]
    assert job.guard.save(job.step()).step == older + 1
    assert job.steps_on_disk() == [older + 1, older], "what was left behind is set aside"


def test_the_step_from_which_training_was_rolled_back_is_saved_again(job: Job) -> None:
    """Its first checkpoint is set aside by then: it is no answer to an emergency, and no risk is smaller for it."""
    older = job.guard.save(job.step()).step
    job.step()
    newer = job.guard.save(job.step()).step
    job.guard.restore(step=older)
    last = job.requests.status().last_committed
    assert last is not None
    assert last.step == older
    job.step()
    job.trigger("e", "continue")
    assert job.step() == job.ended("e").step == newer
    assert Path(job.of("e").path).is_dir()
    assert job.steps_on_disk() == [newer, older]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_in_the_training_costs_no_checkpoint_that_is_being_written(
    large: Job, error: type[BaseException]
) -> None:
    """Its state is whole, and Ctrl-C lets a write finish: also in the `with` of the guides."""
    step = periodic(large)
    threading.Timer(0.2, large.disk.gate.set).start()
    with pytest.raises(error), large.guard:
        raise error
    assert large.steps_on_disk() == [step]


def test_a_roll_back_does_not_wait_for_ever_for_a_disk_that_hangs(job: Job) -> None:
    older = job.guard.save(job.step()).step
    newer = periodic(job)
    failed: list[str] = []

    def restore() -> None:
        try:
            job.guard.restore(step=older)
        except StoreError as error:
            failed.append(str(error))

    thread = threading.Thread(target=restore)
    thread.start()
    until_s = time.monotonic() + 60.0
    while thread.is_alive() and time.monotonic() < until_s:
        job.now_s += 61
        thread.join(0.2)
    assert failed == [f"a state in memory is still being written: the disk has taken nothing of step {newer} for 60 s"]
    job.disk.gate.set()
    assert job.guard.restore(step=older) == older


def test_what_a_disk_that_hangs_writes_late_answers_for_no_step_of_a_training_that_went_back(job: Job) -> None:
    """A loop that counts anew while a write hangs: it comes to that step with another state, and saves that."""
    job.step()
    step = periodic(job)
    job.state.step = step - 2
    training = threading.Thread(target=job.step)
    training.start()
    until_s = time.monotonic() + 60.0
    while training.is_alive() and time.monotonic() < until_s:
        job.now_s += 61
        training.join(0.2)
    job.disk.gate.set()
    job.until(lambda: step in job.steps_on_disk())
    assert job.requests.status().last_committed is None
    job.trigger("e", "continue")
    assert job.step() == step
    assert job.ended("e").durable
    assert job.steps_on_disk().count(step) == 2


def test_what_a_failed_write_left_in_memory_is_forgotten_when_training_is_rolled_back(job: Job) -> None:
    """An emergency that finds no newer state would write the restored one under that step."""
    job.requests.pace.written(SIZE, 1.0)
    older = job.guard.save(job.step()).step
    job.disk.is_full = True
    job.now_s += 400
    job.step()
    job.until(lambda: job.requests.pace.totals.failed == 1)
    job.disk.is_full = False
    job.guard.restore(step=older)
    job.trigger("e", "continue", 1.0)
    time.sleep(0.7)
    assert job.of("e").phase is Phase.WAITING_STEP
    assert job.step() == job.ended("e").step == older + 1
    assert job.steps_on_disk() == [older + 1, older]


def test_one_that_is_due_during_a_write_waits_for_its_turn(job: Job) -> None:
    periodic(job)
    job.now_s += 400
    job.step()
    assert (job.requests.pace.totals.late, job.requests.pace.totals.stalls) == (1, 1)
    job.disk.gate.set()
    job.until(lambda: job.requests.status().last_committed is not None)
    job.now_s += 30
    late = job.step()
    job.until(lambda: late in job.steps_on_disk())


def test_an_emergency_of_the_same_step_joins_the_write(job: Job) -> None:
    """An evaluation begins while the state of its step is being written by the clock: those bytes are taken."""
    step = periodic(job)
    with job.guard.phase("eval", step=step):
        job.trigger("e", "pause", 60.0)
        time.sleep(0.7)
        assert job.of("e").phase is Phase.WAITING_STEP, "the writer's thread is in the middle of its bytes"
        job.disk.gate.set()
        end = job.ended("e")
        assert (end.durable, end.step) == (True, step)
        job.requests.resume(wait_s=0)
    assert job.steps_on_disk() == [step]
    assert job.requests.pace.totals.writes == 1


def check_emergency(job: Job, standing: threading.Thread, older: int, *, left: int) -> None:
    """Let the disk go on: the emergency has the state after the older one, and `left` checkpoints lie there."""
    job.disk.gate.set()
    end = job.ended("e")
    assert end.at_paused_step
    assert end.step == older + 1
    assert job.steps_on_disk() == [older + 1, older][:left]
    assert job.requests.pace.totals.failed == 0, "given up is not failed"
    job.requests.resume()
    standing.join(60)
    assert not standing.is_alive()


@pytest.mark.parametrize(
    ("deadline_s", "passes", "left"),
    [(None, 0, 2), (1000.0, 0, 1), (1000.0, THREADS, 2), (2.0, 0, 1)],
    ids=["no deadline: both", "time for both: the newer one", "nearly done: both", "time for one: the newer one"],
)
def test_the_deadline_decides_whose_bytes_go_first(
    large: Job, deadline_s: float | None, passes: int, left: int
) -> None:
    """An emergency during a background write of an older state; both snapshots are in memory."""
    job = large
    for _ in range(4):
        job.requests.pace.written(LARGE, 1.0)  # as long as this disk is known to take
    older = periodic(job, passes=passes)
    job.trigger("e", deadline_s=deadline_s)
    standing = job.standing()
    job.until(lambda: job.of("e").phase is Phase.WRITING)
    check_emergency(job, standing, older, left=left)


@pytest.mark.parametrize(
    ("deadline_s", "passes", "left"),
    [(None, 0, 1), (None, THREADS, 2), (1000.0, 0, 1), (1000.0, THREADS, 2), (2.0, 0, 1)],
    ids=["no deadline", "no deadline, nearly done", "time for both", "nearly done", "time for one"],
)
def test_with_one_snapshot_the_older_write_gives_way_or_is_waited_for(
    folder: Path, deadline_s: float | None, passes: int, left: int
) -> None:
    """An emergency during a background write: its state is taken when the memory is free, and not before."""
    job = Job(folder, every_s=300, size_bytes=LARGE, snapshots=1)
    for _ in range(4):
        job.requests.pace.written(LARGE, 1.0)
    older = periodic(job, passes=passes)
    job.trigger("e", deadline_s=deadline_s)
    standing = threading.Thread(target=job.step)
    standing.start()
    job.until(lambda: job.of("e").phase is Phase.SNAPSHOT)
    time.sleep(0.1)
    assert job.of("e").phase is Phase.SNAPSHOT, "the only snapshot is still read from"
    check_emergency(job, standing, older, left=left)
    job.close()


def test_with_one_snapshot_training_does_not_wait_for_ever(folder: Path) -> None:
    """The disk hangs in the middle of a write, and an emergency needs the memory; training goes on without it."""
    job = Job(folder, every_s=300, snapshots=1)
    older = periodic(job)
    job.trigger("e", "continue", 1000.0)
    training = threading.Thread(target=job.step)
    training.start()
    job.until(lambda: job.of("e").phase is Phase.SNAPSHOT)
    assert not job.requests.resume().paused, "whoever resumes does not wait for it"
    job.now_s += 61
    training.join(60)
    assert not training.is_alive()
    result = job.of("e")
    assert result.phase is Phase.FAILED
    assert f"the disk has taken nothing of step {older} for 60 s" in result.error
    job.disk.gate.set()
    job.trigger("again", "continue")
    again = job.step()
    assert job.ended("again").durable
    assert job.steps_on_disk()[0] == again
    job.close()


def test_asked_again_for_a_newer_state_an_older_asker_gets_the_newer_one(large: Job) -> None:
    """A precautionary checkpoint beside training, then the emergency: who asked first gets an answer, too."""
    job = large
    for _ in range(4):
        job.requests.pace.written(LARGE, 1.0)
    job.slow()
    job.trigger("early", "continue")
    early = job.step()
    assert job.disk.stuck.wait(60)
    assert job.of("early").step == early
    job.step()
    job.trigger("emergency", "pause", 2.0)
    standing = job.standing()
    job.until(lambda: job.of("emergency").phase is Phase.WRITING)
    job.disk.gate.set()
    assert job.ended("emergency").at_paused_step
    assert job.ended("early") == job.of("emergency")
    assert job.steps_on_disk() == [early + 2]
    job.requests.resume()
    standing.join(60)


def test_whoever_resumes_in_mid_write_does_not_wait_for_it(job: Job) -> None:
    """Utility is back: training goes on from memory at once, and the write is finished beside it."""
    job.slow()
    job.trigger("e", "pause")
    standing = job.standing()
    assert job.disk.stuck.wait(60)
    assert not job.requests.resume().paused
    standing.join(60)
    assert not standing.is_alive()
    job.step()
    assert job.of("e").phase is Phase.WRITING
    job.disk.gate.set()
    end = job.ended("e")
    assert (end.durable, end.paused, end.step) == (True, False, job.state.step - 1)


def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(job: Job) -> None:
    job.trigger("good", "continue")
    good = job.step()
    assert job.ended("good").durable
    job.disk.is_full = True
    job.trigger("e", "pause")
    standing = job.standing()
    end = job.ended("e")
    assert (end.phase, end.paused) == (Phase.FAILED, True)
    assert "No space left on device" in end.error
    assert job.steps_on_disk() == [good]
    job.disk.is_full = False
    job.trigger("again", "pause")
    assert job.ended("again").at_paused_step, "the state was still in memory"
    assert job.steps_on_disk()[0] == good + 1
    job.requests.resume()
    standing.join(60)


def test_a_state_that_cannot_be_described_fails_only_its_checkpoint(job: Job) -> None:
    job.trigger("good", "continue")
    good = job.step()
    job.ended("good")
    job.state.fail_with = RuntimeError("CUDA error: an illegal memory access was encountered")
    job.trigger("e", "continue")
    job.step()
    end = job.ended("e")
    assert end.phase is Phase.FAILED
    assert end.error == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert not end.paused
    job.now_s += 400
    job.step()
    assert job.requests.pace.totals.failed == 1
    job.state.fail_with = None
    job.step()
    assert job.steps_on_disk() == [good]


def test_checkpoints_of_another_job_are_not_taken(folder: Path) -> None:
    job = Job(folder)
    job.guard.save(job.step())
    with pytest.raises(StoreError, match="another process writes checkpoints here"):
        Guard(State(), job.folder, job="job", socket=None)
    job.close()
    with Guard(State(), job.folder, job="another", socket=None) as other, pytest.raises(StoreError, match="belongs to"):
        other.restore()
    assert job.steps_on_disk() == [2]


def test_a_storm_of_wishes_is_one_checkpoint(job: Job) -> None:
    """Three hundred askers in the middle of a write: they join it, and the first one can still ask how it went."""
    job.slow()
    job.trigger("first", "pause", 60.0)
    standing = job.standing()
    assert job.disk.stuck.wait(60)
    for number in range(300):
        job.trigger(f"n{number}", "pause", 60.0)
    job.disk.gate.set()
    assert job.ended("first").at_paused_step
    assert job.of("n299") == job.of("first")
    assert job.requests.pace.totals.writes == 1
    job.requests.resume()
    standing.join(60)


def test_exit_waits_until_it_is_durable_and_reported(job: Job) -> None:
    job.slow()
    job.trigger("e", "exit")
    ended: list[BaseException] = []

    def run() -> None:
        try:
            job.step()
        except StopTraining as stop:
            ended.append(stop)

    training = threading.Thread(target=run)
    training.start()
    assert job.disk.stuck.wait(60)
    time.sleep(0.05)
    assert not ended
    job.disk.gate.set()
    assert job.ended("e").at_paused_step
    job.requests.mark_end_sent("e")
    training.join(60)
    assert [stop.code for stop in ended if isinstance(stop, SystemExit)] == [0]


def test_utility_back_before_any_trainer_was_asked_to_end_keeps_training(job: Job) -> None:
    job.trigger("e", "exit")
    standing = job.standing()
    job.until(lambda: job.requests.ending is not None)
    assert not job.requests.resume().paused
    standing.join(60)
    job.step()


# --- Leases -----------------------------------------------------------------------------------------------------------


def test_a_pause_whose_asker_falls_silent_ends_by_itself(job: Job) -> None:
    """A daemon that dies in a drill leaves nothing standing; in an outage, without a lease, training stands."""
    job.requests.pause(lease_s=0.4, asker="daemon")
    standing = job.standing()
    for _ in range(5):
        job.now_s += 0.3
        job.requests.heard("daemon")
        assert job.requests.status().paused
    assert job.requests.status().lease_s == pytest.approx(0.4)
    job.requests.heard("somebody else")
    job.now_s += 0.5
    standing.join(60)
    assert not standing.is_alive()
    assert job.requests.status().lease_s is None


def test_a_checkpoint_with_a_lease_lets_go_after_it(job: Job) -> None:
    job.trigger("drill", "pause", lease_s=0.2)
    standing = job.standing()
    assert job.ended("drill").at_paused_step
    job.now_s += 0.3
    standing.join(60)
    assert not standing.is_alive()
    assert job.ended("drill").durable


@pytest.mark.parametrize("first", ["leased", "for good"])
def test_of_two_that_want_it_to_stand_the_one_without_a_lease_wins(job: Job, first: str) -> None:
    """An outage that begins in the middle of a drill: nothing that the drill wanted may end the pause."""
    leases = {"drill": 0.2, "outage": None}
    for name in ("drill", "outage") if first == "leased" else ("outage", "drill"):
        job.trigger(name, "pause", lease_s=leases[name])
    standing = job.standing()
    assert job.ended("outage").at_paused_step
    job.now_s += 100
    time.sleep(0.5)
    assert job.requests.status().paused
    assert job.requests.status().lease_s is None
    job.requests.resume()
    standing.join(60)


def test_an_outage_that_joins_a_drill_in_mid_write_takes_its_lease_away(job: Job) -> None:
    job.slow()
    job.trigger("drill", "pause", lease_s=0.2)
    standing = job.standing()
    assert job.disk.stuck.wait(60)
    job.trigger("outage", "pause", 60.0)
    job.disk.gate.set()
    assert job.ended("outage").at_paused_step
    job.now_s += 100
    time.sleep(0.5)
    assert job.requests.status().paused
    job.requests.resume()
    standing.join(60)


# --- Where no step ends -----------------------------------------------------------------------------------------------


def test_a_checkpoint_that_has_rotted_answers_no_emergency(job: Job) -> None:
    """In an evaluation of hours the scrub sets the checkpoint of its step aside: the next step is saved instead."""
    job.trigger("a", "continue")
    step = job.step()
    saved = Path(job.ended("a").path or "", "shard-00000")
    with job.guard.phase("eval", step=step):
        saved.write_bytes(bytes([saved.read_bytes()[0] ^ 1]) + saved.read_bytes()[1:])
        job.guard._checkpointer._scrub_at_s = 0.0  # type: ignore[union-attr]
        job.now_s += 61
        with job.requests.changed:
            job.requests.changed.notify_all()
        job.until(lambda: job.requests.pace.totals.corrupt and not job.guard._writer.has(step))
        job.trigger("e", "continue", 3600.0)
    job.step()
    assert job.ended("e").step == step + 1
    assert job.steps_on_disk()[0] == step + 1


def test_an_emergency_in_an_evaluation_finds_the_state_of_its_step(job: Job) -> None:
    """Whatever the evaluation does to the model; and training then stands at that very step."""
    step = job.step()
    with job.guard.phase("eval", step=step):
        assert job.requests.status().loop is Loop.EVAL
        assert job.requests.status().snapshot_step == step
        job.state.step = 77  # averaged weights are swapped in
        job.trigger("e", "pause", 60.0)
        assert job.ended("e").durable
        polling = threading.Thread(target=job.guard.poll)
        polling.start()
        job.until(lambda: job.requests.status().paused)
        assert job.of("e").at_paused_step
        assert not job.requests.resume().paused
        polling.join(60)
        job.state.step = step
    assert job.requests.status().loop is Loop.TRAIN
    assert job.steps_on_disk() == [step]
    assert job.step() == step + 1


@pytest.mark.parametrize("resumed", ["in mid-write", "when it is durable"])
def test_utility_that_is_back_takes_no_end_away_that_a_signal_asked_for(job: Job, resumed: str) -> None:
    """In an evaluation, an outage joins what a signal has saved. The scheduler still ends this process, or kills it."""
    step = job.step()
    job.slow()

    def evaluate() -> None:
        with job.guard.phase("eval", step=step):
            with job.requests.changed:
                job.requests.signals = job.requests.asked = True
                job.requests.signalled = signal.SIGTERM
                job.requests.changed.notify_all()
            assert job.disk.stuck.wait(60)
            job.trigger("outage")
            if resumed == "in mid-write":
                job.requests.resume(wait_s=0)
            job.disk.gate.set()
            assert job.ended("outage").durable
            job.requests.resume(wait_s=0)
            job.guard.poll()

    with pytest.raises(StopTraining):
        evaluate()


@pytest.mark.parametrize("is_told", [False, True], ids=["no step", "its step"])
def test_a_phase_within_a_phase_keeps_its_state_in_memory(job: Job, *, is_told: bool) -> None:
    """What compiles or evaluates in it may open a phase of its own, and an emergency after that is as urgent."""
    step = job.step()
    with job.guard.phase("eval", step=step):
        with job.guard.phase("compile", step=step if is_told else None):
            assert job.requests.status().loop is Loop.COMPILE
        assert job.requests.status().loop is Loop.EVAL
        job.trigger("e", "continue")
        assert job.ended("e").step == step


@pytest.mark.parametrize("snapshots", [1, 2])
def test_a_phase_that_begins_during_a_write_needs_a_second_snapshot(folder: Path, snapshots: int) -> None:
    """With one, the state that is being written is what an emergency in the phase finds."""
    job = Job(folder, every_s=300, snapshots=snapshots)
    older = periodic(job)
    step = job.step()
    with job.guard.phase("eval", step=step):
        assert job.requests.status().snapshot_step == (older if snapshots == 1 else step)
        job.disk.gate.set()
        job.until(lambda: job.requests.status().last_committed is not None)
        job.trigger("e", "continue", 60.0)
        if snapshots == 1:
            time.sleep(0.7)
            assert job.of("e").phase is Phase.WAITING_STEP
        else:
            job.until(lambda: job.of("e").phase is not Phase.WAITING_STEP)
    job.step()
    assert job.ended("e").step == step + (snapshots == 1)
    job.close()


def test_a_phase_that_reports_no_step_saves_nothing(job: Job) -> None:
    """What is in the model just now nobody knows: the next boundary does it."""
    with job.guard.phase(Loop.COMPILE):
        job.trigger("e", "continue", 60.0)
        job.guard.poll()
        time.sleep(0.7)
        assert job.of("e").phase is Phase.WAITING_STEP
    job.step()
    assert job.ended("e").durable


def test_a_copy_in_memory_is_written_when_the_boundary_does_not_come(job: Job) -> None:
    """The loop hangs; a newer state than the disk's is in memory since its write failed."""
    job.requests.pace.written(SIZE, 1.0)
    job.disk.is_full = True
    job.now_s += 400
    held = job.step()
    job.until(lambda: job.requests.pace.totals.failed == 1)
    job.disk.is_full = False
    job.step()
    job.trigger("e", "pause", 60.0)
    time.sleep(0.7)
    assert job.of("e").phase is Phase.WAITING_STEP, "there is time yet"
    job.now_s += 57
    end = job.ended("e")
    assert (end.step, end.durable, end.at_paused_step) == (held, True, False)
    standing = job.standing()
    end = job.of("e")
    assert (end.paused_step, end.at_paused_step) == (held + 2, False), "and it says that steps would be lost"
    job.trigger("second", "pause", 60.0)
    assert job.ended("second").at_paused_step
    job.requests.resume()
    standing.join(60)


def test_asked_while_it_stands_in_mid_step_it_says_what_there_is(job: Job) -> None:
    job.step()
    job.requests.pause()
    polling = threading.Thread(target=job.guard.poll)
    polling.start()
    job.until(lambda: job.requests.status().paused)
    job.trigger("e", "pause", 60.0)
    end = job.ended("e")
    assert end.phase is Phase.ABORTED
    assert "in the middle of a step" in end.error
    job.requests.resume()
    polling.join(60)
    assert not polling.is_alive()


# --- Room and figures -----------------------------------------------------------------------------------------------


def test_a_periodic_checkpoint_is_pruned_and_kept(job: Job) -> None:
    """Two stay; and the slots are ready again after each."""
    for number in range(1, 6):
        job.now_s += 400
        step = job.step()
        job.until(lambda number=number: job.requests.pace.totals.writes == number)  # type: ignore[misc]
        job.until(lambda: not job.requests.wanted.is_set())
    job.until(lambda: len(list(job.folder.glob("step-*"))) == 2)
    job.until(lambda: len(list(job.folder.glob(".slot-*/shard-*"))) == 2)
    assert job.steps_on_disk() == [step, step - 1]


def test_the_estimate_is_there_before_any_outage(folder: Path) -> None:
    """From the size of the state and what the disk took while the slots were made: nobody has saved yet."""
    job = Job(folder)
    job.until(lambda: (found := job.requests.status().estimate) is not None and found.seconds is not None)
    estimate = job.requests.status().estimate
    assert estimate is not None
    assert estimate.bytes is not None
    assert SIZE <= estimate.bytes < SIZE + 65536
    assert job.steps_on_disk() == []
    job.now_s += 1
    job.trigger("e", "continue")
    job.step()
    job.ended("e")
    estimate = job.requests.status().estimate
    assert estimate is not None
    assert estimate.stall_s is not None
    job.close()


def test_a_pause_that_comes_during_a_save_stands_at_its_step(job: Job) -> None:
    """Not one step later: the daemon is told "committed and paused" of the step that is durable."""
    step = job.step()
    job.slow()
    saves = [threading.Thread(target=lambda: (job.guard.save(step), job.step()))]
    saves[0].start()
    assert job.disk.stuck.wait(60)
    job.trigger("e", "pause")
    job.disk.gate.set()
    end = job.ended("e")
    assert (end.step, end.paused, end.paused_step, end.at_paused_step) == (step, True, step, True)
    time.sleep(0.1)
    assert job.state.step == step, "it stands in save()"
    assert job.steps_on_disk() == [step]
    job.requests.resume(wait_s=1)
    saves[0].join(60)
    assert job.state.step == step + 1


def test_an_end_that_is_asked_for_during_a_save_comes_in_it(job: Job) -> None:
    step = job.step()
    job.trigger("e", "exit")
    ended: list[object] = []

    def save() -> None:
        try:
            job.guard.save(step)
        except StopTraining as stop:
            ended.append(stop.code)

    thread = threading.Thread(target=save)
    thread.start()
    end = job.ended("e")
    assert (end.step, end.paused_step) == (step, step)
    job.requests.mark_end_sent("e")
    thread.join(60)
    assert ended == [0]


@pytest.mark.parametrize("after", ["pause", "exit"])
def test_what_a_save_keeps_under_a_name_is_kept_before_training_stands_or_ends(job: Job, after: str) -> None:
    """The outage comes just as the best model so far is saved: power goes, and no line after `save` runs any more."""
    step = job.step()
    job.trigger("e", after)
    ended: list[object] = []

    def save() -> None:
        try:
            ended.append(job.guard.save(step, keep_as="best").step)
        except StopTraining as stop:
            ended.append(stop.code)

    thread = threading.Thread(target=save)
    thread.start()
    assert job.ended("e").at_paused_step
    assert [path.name.split("-")[1] for path in (job.folder / "best").iterdir()] == [f"{step:012d}"]
    job.requests.mark_end_sent("e")
    job.requests.resume(wait_s=0)
    thread.join(60)
    assert ended == [0 if after == "exit" else step]


@pytest.mark.parametrize("after", ["pause", "continue"])
def test_no_periodic_checkpoint_follows_an_emergency_at_once(job: Job, after: str) -> None:
    """The clock begins again with the emergency, and after the pause: a flickering outage costs no stall each time."""
    job.now_s += 400  # due, too, at this very boundary
    job.trigger("e", after)
    thread = job.standing()
    job.ended("e")
    job.now_s += 400 if after == "pause" else 200  # a pause is no reason to save again
    job.requests.resume(wait_s=1)
    thread.join(60)
    stalls = job.requests.pace.totals.stalls
    job.step()
    if after == "pause":
        job.now_s += 200
        job.step()
    assert job.requests.pace.totals.stalls == stalls
    job.now_s += 301
    due = job.step()
    job.until(lambda: due in job.steps_on_disk())


def test_save_is_for_the_end_and_raises(job: Job) -> None:
    step = job.step()
    assert job.guard.save(step).step == step
    job.disk.is_full = True
    job.step()
    with pytest.raises(OSError, match="No space left"):
        job.guard.save(job.state.step)
    assert job.steps_on_disk() == [step]


class Slow:
    """What copies checkpoints, whose disk does not answer just now; see `requests.Uploads`."""

    def __init__(self) -> None:
        self.is_offered, self.gate = threading.Event(), threading.Event()

    def offer(self, saved: SavedCheckpoint, *, requested: bool) -> None:
        self.is_offered.set()
        assert self.gate.wait(200)

    def hold(self) -> None: ...

    release = hold

    def seen(self) -> UploadsSeen:
        return UploadsSeen()

    def figures(self) -> Mapping[str, tuple[str, str, float]]:
        return {}


def test_a_disk_that_holds_up_an_offer_holds_up_nothing_else(job: Job) -> None:
    """The manifest is read for it: the daemon hears that the checkpoint is durable, and training steps on."""
    uploads = job.requests.uploads = Slow()
    job.trigger("e", "continue")
    step = job.step()
    try:
        assert uploads.is_offered.wait(60)
        thread = threading.Thread(target=lambda: job.of("e"), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert (job.of("e").phase, job.of("e").step) == (Phase.COMMITTED, step)
        job.step()
    finally:
        uploads.gate.set()
