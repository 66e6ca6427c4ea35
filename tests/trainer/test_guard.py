"""One training thread, many who ask: joined, escalated, paused, resumed, and never charged for it while nobody asks."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from powerguard.trainer import Guard, StopTraining
from powerguard.trainer.loop.requests import UploadsSeen
from powerguard.trainer.loop.step_hook import _LAST_WORDS_S
from powerguard.trainer.store.store import SavedCheckpoint
from powerguard.wire import After, CheckpointStatus, Phase, Reason, TriggerRequest


def saved_at(step: int) -> SavedCheckpoint:
    return SavedCheckpoint(step=step, path=f"/ck/{step}", size_bytes=1000, manifest_digest="sha256:" + "0" * 64)


class Loop:
    """A training loop in a thread: steps until told to end; a save waits for `let_write`."""

    def __init__(self, conduct: After = After.PAUSE) -> None:
        self.let_write = threading.Event()
        self.let_write.set()
        self.saves: list[int] = []
        self.fail_with: Exception | None = None
        self.ended_by: BaseException | None = None
        self.steps = 0
        self._over = threading.Event()
        self.guard = Guard(self._save, job="loop", conduct=conduct)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _save(self, step: int) -> SavedCheckpoint:
        self.saves.append(step)
        self.guard.report(Phase.WRITING, 10, 1000)
        assert self.let_write.wait(60)
        if self.fail_with is not None:
            raise self.fail_with
        return saved_at(step)

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                time.sleep(0.002)
                self.steps += 1
                self.guard.step(self.steps)
        except StopTraining as stop:
            self.ended_by = stop

    def stop_training(self) -> None:
        """End the thread that steps: the test's own takes its place."""
        self._over.set()
        self._thread.join()

    def end(self) -> None:
        self._over.set()
        self.let_write.set()
        while self._thread.is_alive():
            self.guard.requests.resume(wait_s=0.1)
            self._thread.join(0.05)
        self.guard.close()

    def trigger(self, name: str, after: After = After.CONTINUE, deadline_s: float | None = None) -> Phase:
        request = TriggerRequest(id=name, reason=Reason.DRILL, after=after, deadline_s=deadline_s)
        return self.guard.requests.trigger(request).phase

    def until(self, true: Callable[[], object]) -> None:
        until_s = time.perf_counter() + 60
        while not true():
            assert time.perf_counter() < until_s, "it never came true"
            time.sleep(0.005)

    def phase(self, name: str) -> Phase:
        status = self.guard.requests.checkpoint(name)
        assert status is not None
        return status.phase

    def until_ended(self, name: str) -> Phase:
        self.until(lambda: self.phase(name) in (Phase.COMMITTED, Phase.FAILED, Phase.ABORTED))
        return self.phase(name)


@pytest.fixture
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.end()


def test_checkpoint_then_pause_then_on_in_place(loop: Loop) -> None:
    """The checkpoint is of the very step at which training stands, and resume loses none."""
    loop.trigger("a", After.PAUSE, 10)
    assert loop.until_ended("a") is Phase.COMMITTED
    status = loop.guard.requests.checkpoint("a")
    assert status is not None
    assert (status.step, status.paused_step, status.at_paused_step) == (loop.steps, loop.steps, True)
    assert loop.guard.requests.status().paused
    stood = loop.steps
    time.sleep(0.05)
    assert loop.steps == stood
    assert not loop.guard.requests.resume().paused
    loop.until(lambda: loop.steps > stood + 2)
    status = loop.guard.requests.checkpoint("a")
    assert status is not None
    assert (status.paused_step, status.at_paused_step) == (None, False)


def test_after_continue_training_goes_on(loop: Loop) -> None:
    loop.trigger("a")
    assert loop.until_ended("a") is Phase.COMMITTED
    at = loop.steps
    loop.until(lambda: loop.steps > at + 2)
    assert not loop.guard.requests.status().paused


class Uploads:
    """What copies checkpoints to slower storage; see `requests.Uploads`. meanwhile: called while it stops."""

    def __init__(self) -> None:
        self.is_held = False
        self.meanwhile: Callable[[], object] = lambda: None

    def hold(self) -> None:
        self.meanwhile()
        self.is_held = True

    def release(self) -> None:
        self.is_held = False

    def offer(self, saved: SavedCheckpoint, *, requested: bool) -> None: ...

    def seen(self) -> UploadsSeen:
        return UploadsSeen()

    def figures(self) -> Mapping[str, tuple[str, str, float]]:
        return {}


def test_uploads_are_not_stopped_again_by_a_request_that_is_repeated_after_its_end(loop: Loop) -> None:
    """Nothing would let them go on: the status says that none are held, and no second copy is made any more."""
    uploads = loop.guard.requests.uploads = Uploads()
    loop.trigger("a", After.PAUSE)
    assert uploads.is_held
    assert loop.until_ended("a") is Phase.COMMITTED
    assert not loop.guard.requests.resume().uploads_held
    assert not uploads.is_held
    assert loop.trigger("a", After.PAUSE) is Phase.COMMITTED
    assert (uploads.is_held, loop.guard.requests.status().uploads_held) == (False, False)


def test_uploads_that_are_let_go_as_they_are_stopped_go_on(loop: Loop) -> None:
    """Stopping takes a moment, in which utility may come back."""
    requests = loop.guard.requests
    uploads = requests.uploads = Uploads()
    uploads.meanwhile = lambda: requests.hold_uploads(lease_s=0)
    assert not requests.hold_uploads(lease_s=60).uploads_held
    assert not uploads.is_held


def test_the_same_id_is_the_same_checkpoint(loop: Loop) -> None:
    for _ in range(5):
        loop.trigger("a")
    loop.until_ended("a")
    assert loop.trigger("a") is Phase.COMMITTED
    assert len(loop.saves) == 1


def test_two_that_meet_are_one_with_the_tighter_deadline_and_the_stronger_end(loop: Loop) -> None:
    """The second asker joins in mid-write: nothing is written twice, and training stands where the first one saved."""
    loop.let_write.clear()
    loop.trigger("a", After.CONTINUE, 100)
    loop.until(lambda: loop.phase("a") is Phase.WRITING)
    joined = loop.guard.requests.trigger(TriggerRequest(id="b", after=After.PAUSE, deadline_s=20))
    assert (joined.id, joined.after, joined.paused) == ("a", After.PAUSE, True)
    assert joined.deadline_s is not None
    assert joined.deadline_s <= 20
    late = loop.guard.requests.trigger(TriggerRequest(id="c", after=After.CONTINUE, deadline_s=500))
    assert (late.after, late.deadline_s is not None and late.deadline_s <= 20) == (After.PAUSE, True)
    loop.let_write.set()
    assert loop.until_ended("b") is Phase.COMMITTED
    status = loop.guard.requests.checkpoint("b")
    assert status is not None
    assert status.at_paused_step
    assert len(loop.saves) == 1


def test_asked_again_while_standing_there_is_nothing_to_write(loop: Loop) -> None:
    loop.trigger("a", After.PAUSE)
    loop.until_ended("a")
    loop.trigger("b", After.PAUSE)
    assert loop.until_ended("b") is Phase.COMMITTED
    assert len(loop.saves) == 1
    loop.guard.requests.resume()
    loop.trigger("c", After.PAUSE)
    loop.until_ended("c")
    assert len(loop.saves) == 2


def test_a_pause_names_its_reason(loop: Loop) -> None:
    """A daemon that has lost its journal resumes what only a daemon can have paused, and leaves a person's pause."""
    requests = loop.guard.requests
    for name, first, paused_for in (("a", None, "on_battery"), ("b", requests.pause, "")):
        if first is not None:
            first()
            loop.until(lambda: requests.status().paused)
        requests.trigger(TriggerRequest(id=name, reason=Reason.ON_BATTERY, after=After.PAUSE))
        assert loop.until_ended(name) is Phase.COMMITTED
        assert (requests.status().paused, requests.status().paused_for) == (True, paused_for)
        assert requests.resume().paused_for == ""
    requests.trigger(TriggerRequest(id="c", reason=Reason.DRILL, after=After.PAUSE, lease_s=60.0))
    assert loop.until_ended("c") is Phase.COMMITTED
    assert requests.status().paused_for == "drill"
    requests.trigger(TriggerRequest(id="d", reason=Reason.ON_BATTERY, after=After.PAUSE))
    assert loop.until_ended("d") is Phase.COMMITTED
    assert requests.status().paused_for == "on_battery"
    requests.resume()


def test_pause_alone_saves_nothing(loop: Loop) -> None:
    loop.guard.requests.pause()
    loop.until(lambda: loop.guard.requests.status().paused)
    assert loop.saves == []
    loop.trigger("a")
    assert loop.until_ended("a") is Phase.COMMITTED
    assert loop.guard.requests.status().paused, "a checkpoint does not end a pause"
    assert not loop.guard.requests.resume().paused


def test_utility_back_in_mid_write_finishes_it_and_goes_on(loop: Loop) -> None:
    loop.let_write.clear()
    loop.trigger("a", After.PAUSE)
    loop.until(lambda: loop.phase("a") is Phase.WRITING)
    status = loop.guard.requests.cancel("a")
    assert status is not None
    assert (status.phase, status.after, status.paused) == (Phase.WRITING, After.CONTINUE, False)
    loop.let_write.set()
    assert loop.until_ended("a") is Phase.COMMITTED
    at = loop.steps
    loop.until(lambda: loop.steps > at + 2)


def test_resume_in_mid_write_goes_on_after_it(loop: Loop) -> None:
    loop.let_write.clear()
    loop.trigger("a", After.EXIT)
    loop.until(lambda: loop.phase("a") is Phase.WRITING)
    assert not loop.guard.requests.resume().paused
    loop.let_write.set()
    assert loop.until_ended("a") is Phase.COMMITTED
    at = loop.steps
    loop.until(lambda: loop.steps > at + 2)


def test_a_failed_save_stands_and_can_be_tried_again(loop: Loop) -> None:
    """A full disk ends no training: it stands at its step, and a second try loses nothing."""
    loop.fail_with = OSError(28, "No space left on device")
    loop.trigger("a", After.PAUSE)
    assert loop.until_ended("a") is Phase.FAILED
    status = loop.guard.requests.checkpoint("a")
    assert status is not None
    assert "No space left on device" in status.error
    assert (status.durable, status.paused) == (False, True)
    loop.fail_with = None
    loop.trigger("b", After.PAUSE)
    assert loop.until_ended("b") is Phase.COMMITTED
    assert loop.saves == [loop.steps, loop.steps]
    assert loop.guard.requests.results == {Phase.COMMITTED: 1, Phase.FAILED: 1, Phase.ABORTED: 0}


def test_exit_waits_for_the_last_word_and_never_follows_a_failure() -> None:
    loop = Loop(conduct=After.EXIT)
    loop.fail_with = ValueError("no")
    loop.trigger("a", After.EXIT)
    assert loop.until_ended("a") is Phase.FAILED
    assert loop.ended_by is None
    assert loop.guard.requests.status().paused
    loop.fail_with = None
    asked_s = time.perf_counter()
    loop.trigger("b", After.EXIT)
    assert loop.until_ended("b") is Phase.COMMITTED
    time.sleep(0.05)
    is_early = loop.ended_by is not None and time.perf_counter() - asked_s < _LAST_WORDS_S
    assert not is_early, "nobody has read yet that it is durable"
    loop.guard.requests.mark_end_sent("b")
    loop.until(lambda: loop.ended_by is not None)
    loop.end()


@pytest.mark.parametrize(
    ("conduct", "asked", "paused"), [(After.CONTINUE, After.EXIT, False), (After.PAUSE, After.EXIT, True)]
)
def test_no_more_is_done_than_it_is_willing_to(
    caplog: pytest.LogCaptureFixture, conduct: After, asked: After, *, paused: bool
) -> None:
    """The answer and the log say why."""
    loop = Loop(conduct=conduct)
    loop.trigger("a", asked)
    assert loop.until_ended("a") is Phase.COMMITTED
    loop.until(lambda: loop.guard.requests.status().paused is paused)
    assert loop.ended_by is None
    reply = loop.guard.requests.checkpoint("a")
    assert reply is not None
    assert reply.note == f"asked for exit, but this training allows no more than {conduct.value} (Guard's conduct)"
    assert [each.getMessage() for each in caplog.records].count(f"checkpoint a: {reply.note}") == 1
    assert CheckpointStatus.parse(reply.to_json()) == reply
    if conduct is After.CONTINUE:
        assert not loop.guard.requests.pause().paused
        time.sleep(0.02)
        assert not loop.guard.requests.status().paused
    loop.end()


def test_what_waits_when_training_ends_is_aborted() -> None:
    guard = Guard(saved_at, job="over")
    guard.requests.trigger(TriggerRequest(id="a"))
    guard.close()
    status = guard.requests.checkpoint("a", wait_s=5)
    assert status is not None
    assert (status.phase, status.error) == (Phase.ABORTED, "training has ended")
    assert guard.requests.trigger(TriggerRequest(id="b")).phase is Phase.ABORTED


def test_called_off_before_it_began_is_aborted() -> None:
    guard = Guard(saved_at, job="slow")
    guard.requests.trigger(TriggerRequest(id="a"))
    status = guard.requests.cancel("a")
    assert status is not None
    assert status.phase is Phase.ABORTED
    guard.step(1)
    assert guard.requests.status().last_committed is None
    assert guard.requests.cancel("never heard of") is None
    assert guard.requests.checkpoint("never heard of") is None


def test_old_checkpoints_are_forgotten() -> None:
    """Whoever sends a thousand ids fills no memory."""
    guard = Guard(saved_at, job="patient")
    for number in range(200):
        guard.requests.trigger(TriggerRequest(id=f"a{number}"))
        guard.step(number)
    assert guard.requests.checkpoint("a0") is None
    assert guard.requests.checkpoint("a199") is not None
    assert len(guard.requests._operations) <= 64


def test_the_status_is_what_a_budget_needs() -> None:
    now = [100.0]

    def save(step: int) -> SavedCheckpoint:
        now[0] += 4.0
        return saved_at(step)

    guard = Guard(save, job="numbers", restored=saved_at(50), clock=lambda: now[0])
    assert guard.requests.status().estimate is not None
    for step in range(51, 61):
        now[0] += 0.5
        guard.step(step)
    guard.requests.trigger(TriggerRequest(id="a"))
    now[0] += 0.5
    guard.step(61)
    now[0] += 2.0
    status = guard.requests.status()
    assert (status.step, status.step_time_p50_s, status.step_time_p95_s, status.last_step_age_s) == (61, 0.5, 0.5, 2.0)
    assert status.last_committed is not None
    assert (status.last_committed.step, status.last_committed.age_s) == (61, 2.0)
    assert status.estimate is not None
    assert (status.estimate.bytes, status.estimate.write_bw_p10) == (1000, 250.0)
    assert status.estimate.seconds == pytest.approx(0.5 + 1000 / (0.8 * 250.0))


def test_a_step_costs_next_to_nothing() -> None:
    """While nobody asks there is no lock: a million-step training pays a second or two, not minutes."""
    guard = Guard(saved_at, job="fast")
    best_s = 1.0
    for _ in range(5):
        began_s = time.thread_time()
        for step in range(20_000):
            guard.step(step)
        best_s = min(best_s, (time.thread_time() - began_s) / 20_000)
    print(f"guard.step: {best_s * 1e6:.2f} us")
    assert best_s < 10e-6


def test_a_poll_at_a_whole_state_saves_it_and_stands_there(loop: Loop) -> None:
    """As in an evaluation of a framework that writes its own checkpoints: the end of it may be minutes away."""
    loop.stop_training()
    step, guard = loop.steps, loop.guard
    evaluating = threading.Event()

    def evaluate() -> None:
        with guard.phase("eval"):
            while not evaluating.wait(0.002):
                guard.poll(step=step)

    thread = threading.Thread(target=evaluate, daemon=True)
    thread.start()
    loop.trigger("a", After.PAUSE, 10)
    assert loop.until_ended("a") is Phase.COMMITTED
    status = guard.requests.checkpoint("a")
    assert status is not None
    assert (status.step, status.at_paused_step) == (step, True)
    assert not guard.requests.resume().paused
    evaluating.set()
    thread.join(60)
    assert loop.saves == [step]


def test_training_that_is_held_in_an_evaluation_stands_at_the_next_step(loop: Loop) -> None:
    """Not where the evaluation ends: there it could not save what is asked for meanwhile."""
    loop.stop_training()
    step = loop.steps + 1

    def train() -> None:
        with loop.guard.phase("eval"):
            loop.guard.requests.pause()
        loop.guard.step(step)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    loop.until(lambda: loop.guard.requests.status().paused)
    loop.trigger("a", After.PAUSE, 10)
    assert loop.until_ended("a") is Phase.COMMITTED
    assert loop.saves == [step]
    assert not loop.guard.requests.resume().paused
    thread.join(60)
