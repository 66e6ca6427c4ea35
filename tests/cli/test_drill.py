"""`powerguard drill` as its users meet it: what it says first, how it asks, what it shows, and how Ctrl-C ends it.

The daemon beside it is the real core behind the real socket, in a world that goes twenty times as fast.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import fcntl
import getpass
import json
import os
import pty
import re
import shutil
import signal
import struct
import sys
import tempfile
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.client import RefusedError
from powerguard.cli.doctor.checks import drill_finding
from powerguard.cli.drill import _Progress, _watch, describe
from powerguard.cli.render import Paint
from powerguard.core.decide.machine import step
from powerguard.core.model.actions import (
    Action,
    Conduct,
    EnsurePolicy,
    PauseTrainer,
    PollNow,
    ResumeTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import Done, Event, Failed, OutputSource, TrainerSeen
from powerguard.core.model.policy import Mode
from powerguard.daemon.control.admin import admin_server
from powerguard.daemon.observe.http import FRESH_S
from powerguard.daemon.observe.status import drill_view
from tests.cli.test_commands import Ended, powerguard
from tests.daemon.looped import until
from tests.daemon.watched import DAY_S, NOW_S, Watched, drilled, reading, running_drill, scene
from tests.golden import FIGURES, Golden

COLUMNS = 64

FAST = 20.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    made = tempfile.mkdtemp(dir="/tmp", prefix="pg ")
    yield Path(made)
    shutil.rmtree(made)


@dataclass
class Living(Watched):
    """A daemon that answers by the real core; its trainer, BMC and disks do what they are asked, or refuse it."""

    refuses: tuple[type[Action], ...] = ()
    ordered: list[Action] = field(default_factory=list)
    open: list[Action] = field(default_factory=list)
    stands: bool = False
    battery: bool = False
    still: bool = False
    views: int = 0
    at_begin: Callable[[], object] = lambda: None

    def wall(self) -> float:
        self.views += 1
        return super().wall()

    def submit(self, event: Event) -> None:
        answer = step(self.policy, self.state, event)
        begins = self.state.drill is None and answer.state.drill is not None
        self.state = answer.state
        if begins:
            self.at_begin()
        orders = [action for action in answer.actions if not isinstance(action, PollNow)]
        self.ordered += orders
        self.open += orders

    async def live(self) -> None:
        """One second of this world after the other."""
        while True:
            await asyncio.sleep(1.0 / FAST)
            if self.still:
                continue
            self.now_s += 1.0
            source = OutputSource.BATTERY if self.battery else OutputSource.UTILITY
            load_pct = 30.0 if self.stands else 62.0
            self.submit(reading(at_s=self.now_s, output_source=source, load_pct=load_pct))
            waiting, self.open = self.open, []
            for action in waiting:
                self._carry_out(action)

    @contextlib.asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Let no time pass until what is done meanwhile has stopped the drill: a busy machine may be slow to ask."""
        self.still = True
        yield
        await until(lambda: self.state.drill is None or self.state.drill.stage == "undo", 60.0)
        self.still = False

    @contextlib.asynccontextmanager
    async def begun(self) -> AsyncIterator[None]:
        """Let no time pass until the drill that is begun meanwhile has been looked at in its first stage."""
        self.still = True
        yield
        await until(lambda: self.state.drill is not None, 60.0)
        await self.seen()
        self.still = False

    async def seen(self) -> None:
        """Wait until the drill is looked at once more."""
        before = self.views
        self.now_s += 2 * FRESH_S  # an answer that was made a moment ago would be given again
        await until(lambda: self.views > before, 60.0)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, self.refuses):
            self.submit(Failed(at_s=self.now_s, action=action, took_s=1.0, reason="disk full"))
            return
        if isinstance(action, PauseTrainer):
            self.stands = True
        elif isinstance(action, TriggerCheckpoint):
            self.stands = self.stands or action.after is not Conduct.CONTINUE
        elif isinstance(action, ResumeTrainer):
            self.stands = False
        detail = (("verified", True), ("paused", self.stands), ("resumed", not self.stands), ("step", 48300))
        if isinstance(action, EnsurePolicy):
            detail = (("verified", True), ("policy", "always-on"))  # type: ignore[assignment]
        self.submit(Done(at_s=self.now_s, action=action, took_s=1.0, detail=detail))


@contextlib.asynccontextmanager
async def living(folder: Path, *, refuses: tuple[type[Action], ...] = (), age_s: float = 60.0) -> AsyncIterator[Living]:
    quiet = scene()
    daemon = Living(policy=quiet.policy, state=quiet.state, refuses=refuses)
    daemon.submit(reading(at_s=NOW_S))
    daemon.submit(TrainerSeen(at_s=NOW_S, trainer="llm", alive=True, conduct=Conduct.PAUSE, durable_age_s=age_s))
    task = asyncio.get_running_loop().create_task(daemon.live())
    try:
        async with admin_server(daemon, path=f"{folder}/s.sock"):
            yield daemon
    finally:
        task.cancel()


async def drill(folder: Path, *words: str) -> Ended:
    return await powerguard("drill", *words, "--socket", f"{folder}/s.sock")


async def drilling(folder: Path, *words: str, **streams: int) -> asyncio.subprocess.Process:
    """Start the command as a process of its own. streams: other ones than nothing to read, and pipes to write to."""
    pipes = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    argv = [sys.executable, "-m", "powerguard", "drill", *words, "--socket", f"{folder}/s.sock"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return await asyncio.create_subprocess_exec(*argv, cwd=ROOT, env=env, **pipes | streams)


# --- Before -----------------------------------------------------------------------------------------------------------


async def test_it_says_first_what_will_happen_and_needs_a_yes(folder: Path, golden: Golden) -> None:
    """Where nobody can be asked, it does nothing without --yes."""
    async with living(folder) as daemon:
        process = await drilling(folder)
        out, err = await process.communicate()
        assert daemon.ordered == []
    assert process.returncode == 64
    golden("drill", out.decode(), "plan", varies=FIGURES)
    golden("drill", err.decode())


@pytest.mark.parametrize(("answer", "begins"), [(b"\n", False), (b"n\n", False), (b"y\n", True)])
async def test_it_asks_on_a_terminal(folder: Path, answer: bytes, *, begins: bool) -> None:
    async with living(folder) as daemon:
        ours, theirs = pty.openpty()
        process = await drilling(folder, "--scope", "policy", stdin=theirs)
        os.write(ours, answer)
        async with asyncio.timeout(60.0):
            _, err = await process.communicate()
        os.close(ours)
        os.close(theirs)
        assert any(isinstance(action, EnsurePolicy) for action in daemon.ordered) is begins
    assert b"Begin? [y/N]" in err
    assert process.returncode == (0 if begins else 1)


async def test_a_dry_run_needs_no_recent_checkpoint(folder: Path) -> None:
    """It asks no trainer for anything, so no training hangs on it; and it could make none."""
    async with living(folder, age_s=4000.0) as daemon:
        armed = await drill(folder, "--yes")
        daemon.policy = dataclasses.replace(daemon.policy, mode=Mode.DRY_RUN)
        ended = await drill(folder, "--yes", "--no-wait")
        await until(lambda: daemon.state.drill is not None or daemon.state.learned.drill is not None)
    assert (armed.code, ended.code) == (1, 0)
    assert "67 minutes" in armed.err


async def test_it_is_refused_with_the_numbers(folder: Path, golden: Golden) -> None:
    async with living(folder, age_s=4000.0) as daemon:
        ended = await drill(folder, "--yes")
        assert (ended.code, daemon.ordered) == (1, [])
        golden("drill", ended.err)
        assert (await drill(folder, "--yes", "--json")).object["object"] == "error"


@pytest.mark.parametrize(
    "words", [["--scope", "nonsense"], ["--scope", "pause,"], ["--witness", "magic"], ["reports"], ["--scope"]]
)
async def test_wrong_options(folder: Path, words: list[str]) -> None:
    assert (await drill(folder, *words)).code == 64


async def test_the_daemon_is_down(folder: Path, golden: Golden) -> None:
    for words in (["--yes"], ["report"]):
        ended = await drill(folder, *words)
        assert ended.code == 4
        golden("drill", ended.err, " ".join(words))


# --- While it runs, and after -----------------------------------------------------------------------------------------


async def test_a_full_drill_from_the_first_word_to_the_report(folder: Path, golden: Golden) -> None:
    """Stages as they begin, then what was expected beside what was measured; training goes on."""
    async with living(folder) as daemon:
        async with daemon.begun():
            asking = asyncio.get_running_loop().create_task(drill(folder, "--yes"))
        ended = await asking
        assert not daemon.stands
        assert daemon.state.drill is None
        report = (await drill(folder, "report")).out
        answer = (await drill(folder, "report", "--json")).object["last"]
    assert ended.code == 0, ended.err
    assert (answer["result"], answer["figures"]["policy"]) == ("passed", "always-on")
    assert re.search(r"37\.2 % +30\.0 %", report)
    assert re.search(r" 1728 W", report)
    assert ended.out.endswith(report)
    golden("drill", report, varies=FIGURES)
    assert "baseline: started" in ended.err


async def test_one_pipe_has_it_in_order(folder: Path) -> None:
    """What will happen, then how it goes, then the report: also where both streams are one file or pipe."""
    async with living(folder) as daemon:
        async with daemon.begun():
            process = await drilling(folder, "--scope", "pause", "--yes", stderr=asyncio.subprocess.STDOUT)
        async with asyncio.timeout(60.0):
            out, _ = await process.communicate()
    places = [out.find(words) for words in (b"This drill, in this order", b"  baseline: started", b"Drill passed")]
    assert -1 not in places
    assert places == sorted(places)


async def test_a_drill_for_programs(folder: Path) -> None:
    async with living(folder):
        ended = await drill(folder, "--scope", "checkpoint,policy", "--scope", "policy", "--yes", "--json")
    assert ended.err == ""
    answer = ended.object
    assert (answer["object"], answer["running"], answer["last"]["result"]) == ("drill", None, "passed")
    assert answer["last"]["scopes"] == ["checkpoint", "policy"]


async def test_a_drill_that_fails(folder: Path, golden: Golden) -> None:
    """Exit 1, the trainer's own words, and training goes on."""
    async with living(folder, refuses=(TriggerCheckpoint,)) as daemon:
        ended = await drill(folder, "--scope", "checkpoint", "--scope", "pause", "--yes")
        assert not daemon.stands
    assert ended.code == 1
    assert "llm: disk full" in ended.out
    golden("drill", ended.out, varies=FIGURES)


async def test_progress_on_a_terminal(folder: Path) -> None:
    """One line that changes, and fits the terminal: stage, time, load, what follows; gone when the drill is over."""
    async with living(folder) as daemon:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        async with daemon.begun():
            process = await drilling(folder, "--scope", "pause", "--yes", stderr=theirs)
        async with asyncio.timeout(60.0):
            await process.communicate()
        os.close(theirs)
        shown = ""
        with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more, and all has been read
            while more := os.read(ours, 65536):
                shown += more.decode()
        os.close(ours)
    assert process.returncode == 0
    assert re.search(r"\r  baseline: [\d.]+ s, .+ 62 %; then", shown)
    assert max(len(line) for line in re.split(r"\r|\x1b\[K", shown)) == COLUMNS - 1, "a longer one would be two lines"
    assert "\n" not in shown
    assert shown.endswith("\r\x1b[K")


async def test_begin_and_leave(folder: Path) -> None:
    async with living(folder) as daemon:
        ended = await drill(folder, "--scope", "policy", "--yes", "--no-wait")
        assert (ended.code, ended.out.splitlines()[-1][:8]) == (0, "started;")
        await until(lambda: daemon.state.learned.drill, 60.0)


async def test_stop_a_drill_that_nobody_watches(folder: Path, golden: Golden) -> None:
    """Begun and left: whoever may begin one may stop it, and is told when everything is put back."""
    async with living(folder) as daemon:
        assert (await drill(folder, "stop")).code == 1, "none runs"
        assert (await drill(folder, "--scope", "pause", "--yes", "--no-wait")).code == 0
        await until(lambda: daemon.stands, 60.0)
        async with daemon.stopped():
            asking = asyncio.get_running_loop().create_task(drill(folder, "stop"))
        ended = await asking
        assert not daemon.stands
    assert ended.code == 0
    golden("drill", ended.out, varies={**FIGURES, getpass.getuser(): "USER"})


async def test_ctrl_c_puts_everything_back_first(folder: Path) -> None:
    """One Ctrl-C: stopped, waited for, told; exit 1."""
    async with living(folder) as daemon:
        async with daemon.begun():  # only what follows a drill stops it at Ctrl-C
            process = await drilling(folder, "--scope", "pause", "--yes")
        await until(lambda: daemon.stands, 60.0)
        async with daemon.stopped():
            process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60.0):
            out, err = await process.communicate()
        assert not daemon.stands
    assert process.returncode == 1
    assert b"stopping: the daemon puts everything back" in err
    assert b"Drill interrupted: stopped by " in out
    assert b"Traceback" not in out + err


async def test_ctrl_c_before_the_daemon_has_answered_stops_the_drill_that_it_has_begun(folder: Path) -> None:
    async with living(folder) as daemon:

        def interrupt() -> None:
            daemon.still = True  # nothing ends this drill but the word to stop it
            process.send_signal(signal.SIGINT)

        daemon.at_begin = interrupt
        process = await drilling(folder, "--scope", "pause", "--yes")
        await until(lambda: daemon.still, 60.0)
        async with daemon.stopped():
            pass
        async with asyncio.timeout(60.0):
            out, err = await process.communicate()
    assert process.returncode == 1, err
    assert b"Drill interrupted: stopped by " in out


async def test_ctrl_c_before_the_daemon_was_asked_begins_nothing(folder: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    args = argparse.Namespace(socket=f"{folder}/s.sock", config=None, json=True)
    async with living(folder) as daemon:
        with pytest.raises(RefusedError, match="interrupted before the daemon began it"):
            await asyncio.to_thread(_watch, args, None, interrupted)
        assert daemon.ordered == []


async def test_a_real_outage_ends_it(folder: Path, golden: Golden) -> None:
    """The drill is told as interrupted at once; the daemon has other things to do now."""
    async with living(folder) as daemon:
        asking = asyncio.get_running_loop().create_task(drill(folder, "--scope", "pause", "--yes"))
        await until(lambda: daemon.stands, 60.0)
        daemon.battery = True
        async with asyncio.timeout(60.0):
            ended = await asking
    assert ended.code == 1
    said = ended.out.partition("Drill interrupted: ")[2].splitlines()[0]
    assert re.fullmatch(r"[a-z': ]+", said), "no name of a field"


async def test_ctrl_c_while_the_daemon_is_down_promises_nothing(folder: Path, golden: Golden) -> None:
    """Nothing is put back then: what stands still is told, and who puts it back."""
    async with living(folder) as daemon:
        async with daemon.begun():  # only what follows a drill stops it at Ctrl-C
            process = await drilling(folder, "--scope", "pause", "--yes")
        await until(lambda: daemon.stands, 60.0)
        daemon.still = True  # time stands still, so that the drill does not end before we have looked
        assert process.stderr is not None
        seen = b""
        async with asyncio.timeout(60.0):
            while b"pause: started" not in seen:
                line = await process.stderr.readline()
                assert line, seen
                seen += line
        await daemon.seen()  # what it has to say later is in this answer,
        await daemon.seen()  # which it has read when it asks again
        process.send_signal(signal.SIGSTOP)  # so that it does not look while the daemon goes down
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(60.0):
        while b"systemctl start powerguard)" not in seen or b"is paused" not in seen:
            line = await process.stderr.readline()
            assert line, seen
            seen += line
        process.send_signal(signal.SIGINT)
        await process.wait()
    output = seen.decode()
    assert process.returncode == 130
    golden("drill", output[output.index("pause: started") :], varies=FIGURES)


def test_stages_that_nobody_saw_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A resume that is over within half a second is a stage all the same."""
    shown = _Progress(quiet=False)
    running = {"stage": "pause", "lasted_s": 9.0, "coming": ["resume", "policy", "sync", "record"]}
    shown.stage(running, 0.4)
    shown.stage({"stage": "policy", "lasted_s": 9.6, "coming": ["sync", "record"]}, 0.4)
    shown.end(done=True)
    said = capsys.readouterr().err
    assert "  resume: done\n" in said
    found = [line.split(":")[0].strip() for line in said.splitlines()]
    assert found == ["pause", "resume", "policy", "sync", "record"]
    stopped = _Progress(quiet=False)
    stopped.stage(running, 0.4)
    stopped.stage({"stage": "undo", "lasted_s": 9.6, "coming": []}, 0.4)
    stopped.end(done=False)
    found = [line.split(":")[0].strip() for line in capsys.readouterr().err.splitlines()]
    assert found == ["pause", "undo"], "what was left out is not shown as done"


async def test_a_cap_that_is_not_set_says_which_keys_are_meant(folder: Path, golden: Golden) -> None:
    async with living(folder):
        ended = await drill(folder, "--scope", "cap", "--yes")
    assert ended.code == 1
    golden("drill", ended.err)


async def test_status_shows_the_drill(folder: Path, golden: Golden) -> None:
    async with admin_server(running_drill(), path=f"{folder}/s.sock"):
        ended = await powerguard("status", "--socket", f"{folder}/s.sock")
    assert "42 s" in ended.out
    golden("status", ended.out)


async def test_there_was_none_yet(folder: Path, golden: Golden) -> None:
    async with admin_server(scene(), path=f"{folder}/s.sock"):
        ended = await drill(folder, "report")
        answer = (await drill(folder, "report", "--json")).object
    assert (ended.code, answer["last"]) == (0, None)
    golden("drill", ended.out)


# --- The report and doctor's word -------------------------------------------------------------------------------------


def last(daemon: Watched) -> dict[str, Any]:
    answer: Any = json.loads(json.dumps(drill_view(daemon)))["last"]
    return dict(answer)


def test_the_report_shows_what_was_not_measured(golden: Golden) -> None:
    report = last(drilled())
    report["figures"] |= {"load_reported": False, "cap_speed_reported": False, "checkpoint_verified.llm": False}
    golden("drill", "\n".join(describe(report, Paint())))


def test_a_drill_that_went_well_and_shows_too_small_a_battery(golden: Golden) -> None:
    """Both are the headline: who reads no further must not take the host for safe."""
    report = last(drilled())
    golden("drill", describe(report, Paint())[0])
    report["figures"] |= {"fits": False}
    golden("drill", describe(report, Paint())[0], "too small")


def test_hostile_words_do_not_reach_the_terminal() -> None:
    report = last(drilled()) | {"because": "\x1b[2J", "who": "\x07"}
    report["figures"] |= {"checkpoint_s.\x1b[2J": 1.0, "policy": "\x1b[31m", "skipped_cap": "\x1b"}
    assert "\x1b" not in "\n".join(describe(report, Paint()))


@pytest.mark.parametrize(
    ("result", "age_s", "verdict"),
    [
        ("passed", 3600.0, "PASS"),
        ("passed", DAY_S, "PASS"),
        ("passed", 5 * DAY_S, "PASS"),
        ("passed", 91 * DAY_S, "WARN"),
        ("failed", DAY_S, "WARN"),
        ("interrupted", DAY_S, "WARN"),
        ("recorded", DAY_S, "WARN"),
    ],
)
def test_doctor_on_drills(result: str, age_s: float, verdict: str, golden: Golden) -> None:
    found = drill_finding(last(drilled(result, age_s)))
    assert found.verdict == verdict
    golden("doctor", f"{found.text} -> {found.fix}")
    assert drill_finding(None).verdict == "WARN"
