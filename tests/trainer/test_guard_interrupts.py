"""Ctrl-C into a training that survives it, or a handler that raises: nobody waits for ever, nobody is lied to."""

import faulthandler
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest

import powerguard.trainer
from powerguard.trainer import Guard
from powerguard.trainer.loop.step_hook import StepHook
from powerguard.trainer.ranks import Memory, MemoryRanks
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.items import Parts
from powerguard.trainer.store.store import SavedCheckpoint
from powerguard.wire import After, Phase, TriggerRequest

ENDED = (Phase.COMMITTED, Phase.FAILED, Phase.ABORTED)
OURS = (str(Path(powerguard.trainer.__file__).parent), threading.__file__)


def saved_at(step: int) -> SavedCheckpoint:
    return SavedCheckpoint(step=step, path=f"/ck/{step}", size_bytes=1000, manifest_digest="sha256:" + "0" * 64)


@contextmanager
def interrupted(when: Callable[[], object]) -> Iterator[None]:
    """Expect Ctrl-C, from a person who presses it as soon as something is true."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press() -> None:
        for _ in range(12000):
            if when():
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.005)

    person = threading.Thread(target=press)
    person.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        person.join()
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_in_a_pause_that_training_survives() -> None:
    """It is told to train again, not to stand where it stood; and the pause is still wanted at the next boundary."""
    with Guard(saved_at, job="loop", socket=None) as guard:
        requests = guard.requests
        requests.pause()
        for is_step in (True, False):
            with interrupted(lambda: requests.paused_step == 5):
                guard.step(5) if is_step else guard.poll()
            assert (requests.boundary, requests.serving, requests.status().paused) == (None, False, False)
        over, stood = threading.Event(), []

        def resume() -> None:
            while not stood and not over.wait(0.005):
                if requests.status().paused:
                    stood.append(requests.paused_step)
                    requests.resume()

        again = threading.Thread(target=resume)
        again.start()
        guard.step(6)
        over.set()
        again.join()
        assert stood == [6]
        assert not requests.held
        assert guard.save(6).step == 6


def test_an_interrupt_in_a_save_ends_that_save_alone() -> None:
    """Ctrl-C, or SIGTERM that raises SystemExit: nobody waits for that one any longer; the next is made."""
    cuts = [KeyboardInterrupt(), SystemExit(3)]

    def save(step: int) -> SavedCheckpoint:
        if cuts:
            raise cuts.pop()
        return saved_at(step)

    with Guard(save, job="loop", socket=None) as guard:
        for step, cut in ((1, SystemExit), (2, KeyboardInterrupt)):
            guard.requests.trigger(TriggerRequest(id=f"e{step}"))
            with pytest.raises(cut):
                guard.step(step)
            answer = guard.requests.checkpoint(f"e{step}")
            assert answer is not None
            assert (answer.phase, cut.__name__ in answer.error) == (Phase.FAILED, True)
            assert (guard.requests.boundary, guard.requests.saving) == (None, False)
        guard.requests.trigger(TriggerRequest(id="e3"))
        guard.step(3)
        assert guard.requests.last is not None
        assert guard.requests.last.step == 3


class Cut:
    """Interrupts this thread at its nth call at a boundary: at one in Python, or where one in C has just returned.

    There, and at jumps back, CPython runs the handlers of signals. Only not where Condition.wait has released its lock
    and does not guard it yet: an interrupt there is a RuntimeError of CPython's own, "cannot release un-acquired lock".
    """

    def __init__(self, at: int) -> None:
        self.is_done = self._is_there = False
        self._left = at

    def __enter__(self) -> None:
        sys.setprofile(self._count)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        self._is_there = self._is_there or frame.f_code is StepHook.attend.__code__
        if getattr(arg, "__name__", "") == "_release_save":
            return
        if self._is_there and event in {"call", "c_return"} and frame.f_code.co_filename.startswith(OURS):
            self._left -= 1
            if self._left == 0:
                sys.setprofile(None)
                self.is_done = True
                raise KeyboardInterrupt


def interrupted_at(number: int, after: After | None, root: Path | None) -> bool:
    """Interrupt a step that is asked for a checkpoint, or (None) for a pause, at that call. False: it has fewer.

    root: for checkpoints that are written beside training.
    """
    state = saved_at if root is None else Parts(lambda: {"a": b"x" * 5000}, lambda _items: None)
    with Guard(state, root, job="loop", socket=None, every_s=None) as guard:
        requests, over, locked = guard.requests, threading.Event(), []

        def go_on() -> None:
            while not over.wait(0.001):
                if not requests.lock.acquire(timeout=60.0):
                    locked.append(True)
                    return
                requests.lock.release()
                if requests.paused_step is not None:
                    requests.resume(wait_s=0)

        if after is None:
            requests.pause()
        else:
            requests.trigger(TriggerRequest(id="early", after=after))
        daemon = threading.Thread(target=go_on)
        daemon.start()
        cut = Cut(number)
        ended: BaseException = KeyboardInterrupt()
        try:
            with cut:
                guard.step(5)
        except (KeyboardInterrupt, RuntimeError) as error:
            ended = error.__context__ or error  # a Condition's own wait has a place where its lock is let go of twice
        assert isinstance(ended, KeyboardInterrupt)
        assert (requests.boundary, requests.serving, requests.saving) == (None, False, False)
        requests.trigger(TriggerRequest(id="late"))
        guard.step(6)
        over.set()
        daemon.join()
        assert not locked
        for name in ("early", "late") if after is not None else ("late",):
            until_s = time.perf_counter() + 60
            while (answer := requests.checkpoint(name, wait_s=1.0)) and answer.phase not in ENDED:
                assert time.perf_counter() < until_s, answer
            assert answer is not None
            assert answer.phase is Phase.COMMITTED or (answer.phase is Phase.FAILED and name == "early"), answer
    return cut.is_done


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a generator that is closed is cut, too
@pytest.mark.parametrize("after", [After.CONTINUE, After.PAUSE, None])
@pytest.mark.parametrize(("beside", "stride"), [(False, 1), (True, 20), pytest.param(True, 1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_call_of_a_step(tmp_path: Path, after: After | None, stride: int, *, beside: bool) -> None:
    """Whoever asked has an answer, training stands nowhere any more, and the next wish is fulfilled."""
    number = stride
    while interrupted_at(number, after, tmp_path / str(number) if beside else None):
        number += stride
    assert number > 30


def save_alike(guards: list[Guard], cut: Cut, over: threading.Event, rank: int) -> None:
    """Train as one of two ranks; rank 0 is interrupted while something is asked, and goes on.

    After its first step, at which it measures its state, nothing but a wish is attended to, and counted.
    """
    step = 0
    while not over.is_set():
        step += 1
        time.sleep(0.0005)
        with suppress(KeyboardInterrupt):
            if rank or cut.is_done or step == 1:
                guards[rank].step(step)
            else:
                with cut:
                    guards[rank].step(step)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("after", [After.CONTINUE, After.PAUSE])
@pytest.mark.parametrize(
    "number", [1, 60, *(pytest.param(number, marks=pytest.mark.slow) for number in range(2, 200, 3))]
)
def test_an_interrupt_of_one_of_two_ranks(number: int, after: After) -> None:
    """All hear how it ended; the rank stands nowhere any more, and is there for the next one."""

    memory, cut, over = Memory(), Cut(number), threading.Event()
    ranks = [MemoryRanks(memory, rank, 2, ["a", "a"]) for rank in range(2)]
    guards = [Guard(saved_at, job="pair", socket=None, ranks=each) for each in ranks]
    trainings = [threading.Thread(target=save_alike, args=[guards, cut, over, rank]) for rank in range(2)]
    requests = guards[0].requests

    def phase(name: str) -> Phase | None:
        if requests.paused_step is not None:
            requests.resume(wait_s=0)
        answer = requests.checkpoint(name, wait_s=0.01)
        return None if answer is None else answer.phase

    for each in trainings:
        each.start()
    try:
        until_s = time.perf_counter() + 60
        while (requests.pace.step or 0) < 2:
            assert time.perf_counter() < until_s
            time.sleep(0.001)
        requests.trigger(TriggerRequest(id="early", after=after))
        while phase("early") not in {Phase.COMMITTED, Phase.FAILED}:
            assert time.perf_counter() < until_s
        cut.is_done, was_cut = True, cut.is_done
        assert was_cut or number > 80
        requests.trigger(TriggerRequest(id="late"))
        while phase("late") is not Phase.COMMITTED:
            assert time.perf_counter() < until_s
    finally:
        over.set()
        for guard in guards:
            guard.requests.resume(wait_s=0)
        for each in trainings:
            each.join()
        for guard in guards:
            guard.close(finish=False)


def test_an_interrupted_close_closes_all_the_same(tmp_path: Path) -> None:
    """The folder is free for the next training of this process, and what was being written is given up."""
    root = tmp_path / "ck"

    writes = threading.Event()

    class Stuck(Disk):
        def write(self, descriptor: int, chunk: memoryview, offset: int) -> int:
            for each in guard._writer._queue[:1]:
                writes.set()
                assert each.cancel.wait(60)
            return super().write(descriptor, chunk, offset)

    state = Parts(lambda: {"bulk": bytes(40_000_000)}, lambda _: None)
    guard = Guard(state, root, job="loop", socket=None, disk=Stuck(), every_s=0.001)
    for step in itertools.count(1):
        guard.step(step)
        if writes.wait(0.01):
            break
    with interrupted(lambda: guard._writer._over):
        guard.close()
    guard.close()
    with Guard(state, root, job="loop", socket=None, new_run=True) as again:
        assert again.save(1).step == 1


def test_a_guard_that_listens_to_signals_is_closed_by_another_thread(tmp_path: Path) -> None:
    state = Parts(lambda: {"step": 1}, lambda _: None)
    before = signal.getsignal(signal.SIGTERM)
    guard = Guard(state, tmp_path, job="loop", socket=None, signals=True)
    try:
        closing = threading.Thread(target=guard.close)
        closing.start()
        closing.join(60)
        with Guard(state, tmp_path, job="loop", socket=None) as again:
            assert again.save(1).step == 1
    finally:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, before)


def test_a_handler_that_training_has_set_since_stays(tmp_path: Path) -> None:
    """What comes after training, an upload say, is to be ended by the program's own rules."""
    before = signal.getsignal(signal.SIGTERM)

    def mine(_number: int, _frame: FrameType | None) -> None: ...

    try:
        state = Parts(lambda: {"step": 1}, lambda _: None)
        with Guard(state, tmp_path, job="loop", socket=None, signals=True):
            signal.signal(signal.SIGTERM, mine)
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_python_has_not_set_fails_no_close(tmp_path: Path) -> None:
    """As of a simulator that embeds Python, or of a library that was preloaded."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (apt install gcc)")
    code = "#include <signal.h>\nstatic void heard(int number) {}\n"
    code += "__attribute__((constructor)) static void begin(void) { signal(SIGTERM, heard); }\n"
    (tmp_path / "handler.c").write_text(code)
    library = tmp_path / "handler.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "handler.c"], check=True, timeout=100)
    script = (
        "import signal, sys\nfrom powerguard.trainer import Guard, Parts\n"
        "print(signal.getsignal(signal.SIGTERM))\n"
        "state = Parts(lambda: {'step': 1}, lambda _: None)\n"
        "with Guard(state, sys.argv[1], job='loop', socket=None, signals=True) as guard:\n"
        "    print(guard.save(1).step)\n"
    )
    (tmp_path / "root").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "root"],
        env={**os.environ, "LD_PRELOAD": str(library)},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.stderr, done.stdout) == ("", "None\n1\n")


def test_a_signal_after_a_guard_that_another_thread_closed_ends_the_process(tmp_path: Path) -> None:
    """The handlers stay, and no training is there any more that would attend to the first one."""
    script = (
        "import os, signal, sys, threading, time\nfrom powerguard.trainer import Guard, Parts\n"
        "guard = Guard(Parts(dict, print), sys.argv[1], job='loop', socket=None, signals=True)\n"
        "closing = threading.Thread(target=guard.close)\nclosing.start()\nclosing.join()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], check=False, timeout=100)
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize("end", ["guard.close()", "os.kill(os.getpid(), signal.SIGTERM); now.append(60.0)"])
def test_a_handler_that_calls_the_guards_own_ends_the_process(tmp_path: Path, end: str) -> None:
    """After the guard, or at the second signal: training that survives errors must not survive this."""
    script = (
        "import os, signal, sys, time\nfrom powerguard.trainer import Guard, Parts\nnow = [0.0]\n"
        "clock = lambda: now[-1]\n"
        "guard = Guard(Parts(dict, print), sys.argv[1], job='loop', socket=None, signals=True, clock=clock)\n"
        "before = signal.getsignal(signal.SIGTERM)\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: before(number, frame))\n"
        f"{end}\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], check=False, timeout=100)
    assert done.returncode == -signal.SIGTERM


def test_a_handler_of_faulthandler_is_not_replaced_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stacks on SIGUSR1 are what clusters ask for. Registered after the guard, both have the signal."""
    state = Parts(lambda: {"step": 1}, lambda _: None)
    with (tmp_path / "stacks").open("w") as stacks:
        try:
            faulthandler.register(signal.SIGUSR1, stacks)
            with Guard(state, tmp_path / "root", job="loop", socket=None, signals=True):
                assert "a handler of SIGUSR1 that Python does not know is replaced" in caplog.text
                assert "SIGTERM" not in caplog.text
            faulthandler.unregister(signal.SIGUSR1)
            caplog.clear()
            with Guard(state, tmp_path / "root", job="loop", socket=None, signals=True) as guard:
                assert "is replaced" not in caplog.text
                faulthandler.register(signal.SIGUSR1, stacks, chain=True)
                signal.raise_signal(signal.SIGUSR1)
                assert guard.requests.signals_heard
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert "test_guard_interrupts.py" in (tmp_path / "stacks").read_text()
