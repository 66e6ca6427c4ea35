"""The command line as its users meet it: a process, its output, and its exit status, beside a served daemon or none."""

import argparse
import asyncio
import contextlib
import errno
import io
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from powerguard.cli.client import DownError, _missing, _why, _why_elsewhere, get, post
from powerguard.cli.install.uninstall import outage_under_way
from powerguard.cli.main import VERBS, Verbs, main
from powerguard.cli.plan.verb import describe as describe_plan
from powerguard.cli.render import Paint
from powerguard.cli.shared import CONFIG, SOCKET
from powerguard.cli.status import describe as describe_status
from powerguard.cli.status import short
from powerguard.cli.words import sentence
from powerguard.clock import boot_id
from powerguard.core.model.actions import PowerOnMethod
from powerguard.core.model.events import Abort, CheckpointNow, SetMaintenance
from powerguard.core.model.policy import Mode
from powerguard.core.model.state import (
    Armed,
    GivenUp,
    Maintenance,
    OnBattery,
    State,
)
from powerguard.daemon.control.admin import admin_server
from powerguard.daemon.control.hints import hint_socket
from powerguard.daemon.journal import Entry, Inline, Journal
from powerguard.daemon.observe.http import http_server
from tests.daemon.watched import BOOT, NOW_S, PHASES, WALL_S, Watched, committed, in_mode, outage, scene
from tests.golden import Golden

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        return dict(json.loads(self.out))


async def powerguard(*words: str) -> Ended:
    """Run a verb in a thread of this process, while the served daemon answers on the loop."""
    out, err = io.StringIO(), io.StringIO()

    def run() -> int:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                return main(words)
            except SystemExit as ended:
                return int(ended.code or 0)

    async with asyncio.timeout(60.0):
        code = await asyncio.to_thread(run)
    return Ended(code, out.getvalue(), err.getvalue())


async def powerguard_alone(*words: str, **env: str) -> Ended:
    """Run it as its users do: where the process itself is what matters."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "powerguard",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **env},
        cwd=Path(__file__).parents[2],
    )
    async with asyncio.timeout(60.0):
        out, err = await process.communicate()
    assert b"Traceback" not in out + err
    return Ended(process.returncode or 0, out.decode(), err.decode())


async def run_by_bash(words: str, pass_fds: tuple[int, ...] = ()) -> Ended:
    """Run it by a line of bash, for what only a shell does to a process's streams."""
    line = f"exec {shlex.quote(sys.executable)} -m powerguard {words}"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as its users have it
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, pass_fds=pass_fds,
        env=env, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    async with asyncio.timeout(60.0):
        out, err = await process.communicate()
    return Ended(process.returncode or 0, out.decode(), err.decode())


@pytest.fixture(autouse=True)
def _the_daemons_log_stands_apart() -> Iterator[None]:
    """The daemon that is served here logs in the same process: what it says is no verb's output."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
    yield
    structlog.reset_defaults()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path with a space in it."""
    made = tempfile.mkdtemp(dir="/tmp", prefix="pg ")
    yield Path(made)
    shutil.rmtree(made)


@asynccontextmanager
async def served(daemon: Watched, folder: Path) -> AsyncIterator[str]:
    async with admin_server(daemon, path=f"{folder}/s.sock") as path:
        yield path


# --- status -----------------------------------------------------------------------------------------------------------

CODES = {"online": 0, "on_battery": 1, "emergency_checkpoint": 1, "holding": 1, "shutdown": 2, "recovery": 1}


@pytest.mark.parametrize("phase", PHASES)
async def test_status_in_every_phase(phase: str, folder: Path, golden: Golden) -> None:
    """Table, line and object agree on the phase, and the exit status is the documented one."""
    async with served(scene(phase), folder) as path:
        for how in ([], ["--short"], ["--json"]):
            ended = await powerguard("status", "--socket", path, *how)
            assert (ended.code, ended.err) == (CODES[phase], "")
            assert phase.replace("_", "" if how else " ") in ended.out.replace("_", "" if how else " ")
            assert "\x1b" not in ended.out
        assert ended.object["phase"] == phase
        golden("status", (await powerguard("status", "--socket", path)).out)
        golden("status", (await powerguard("status", "--socket", path, "--short")).out, "short")


def test_a_feed_with_utility_is_no_runtime_of_months(golden: Golden) -> None:
    """One of two feeds is on battery and the other one carries the paused host: the sums say 1e7 s, nobody should."""
    status = json.loads((REFERENCE / "status-online.json").read_text(encoding="utf-8"))
    status["budget"] |= {"runtime_effective_paused_s": 9_997_447.3, "slack_s": 9_997_275.5}
    shown = "\n".join(describe_status(status, Paint()))
    golden("status", shown)
    golden("status", short(status), "short")
    plan = json.loads((REFERENCE / "plan-online.json").read_text(encoding="utf-8")) | {"slack_s": 9_997_275.5}
    plan["terms"].append(
        {"name": "reff_paused_s", "value": 9_997_447.3, "unit": "s", "source": "usable x tau_paused_s"}
    )
    planned = "\n".join(describe_plan(plan, Paint(), has_terms=True))
    golden("plan", planned)
    numbers = {"old": "online", "new": "on_battery", "reff_now_s": 90.0, "reff_paused_s": 1e7}
    said = sentence("phase_changed", "input_present", numbers)
    golden("explain", said)
    assert not re.search(r"[0-9]+ d ", shown.partition("slack")[0] + planned)


async def test_status_of_a_host_that_is_not_protected(folder: Path, golden: Golden) -> None:
    """Exit 3, and the reason with what to do about it. Dry-run alone is what it says, and no alarm."""
    daemon = in_mode(scene(), Mode.DRY_RUN)
    async with served(daemon, folder) as path:
        ended = await powerguard("status", "--socket", path)
        daemon.power_off_trouble = "nothing listens"
        daemon.now_s += 1.0
        worse = await powerguard("status", "--socket", path)
        answer = (await powerguard("status", "--socket", path, "--json")).object
    assert (ended.code, worse.code) == (3, 3)
    assert (answer["mode"], answer["ready"]) == ("dry-run", False)
    golden("status", ended.out)
    golden("status", worse.out, "worse")


async def test_status_over_the_port(folder: Path) -> None:
    """Another host's daemon, read-only."""
    async with http_server(scene("holding"), port=0) as port:
        ended = await powerguard("status", "--url", f"http://127.0.0.1:{port}", "--short")
    assert (ended.code, ended.out.split()[0]) == (1, "holding")


async def test_status_when_the_daemon_is_down(folder: Path, golden: Golden) -> None:
    """Exit 4, why, and what the journal last knew: written by the daemon's own journal."""
    path = folder / "journal.sqlite"
    journal = Journal(path, boot_id=BOOT, wall=lambda: WALL_S, writer=Inline(), reader=Inline())
    await journal.load()
    assert await journal.append(Entry(at_s=NOW_S, state=scene("holding").state))
    assert await journal.close()
    args = ("status", "--socket", str(folder / "none.sock"), "--journal", str(path))
    ended = await powerguard(*args)
    assert ended.code == 4
    golden("status", ended.out)
    answer = (await powerguard(*args, "--json")).object
    assert (answer["reachable"], answer["schema_version"]) == (False, 1)
    assert answer["last_known"] == {"phase": "holding", "boot_id": BOOT, "at": WALL_S, "outage": "6f1d2c3b-49400"}
    example = json.loads((REFERENCE / "status-down.json").read_text(encoding="utf-8"))
    assert (list(answer), answer["last_known"]) == (list(example), example["last_known"])
    assert (await powerguard(*args, "--short")).code == 4


def test_what_is_missing_before_a_daemon_can_run(tmp_path: Path, golden: Golden) -> None:
    """Nothing to start where nothing is installed, and nothing to run with where there are no settings."""
    golden("client", _missing(tmp_path), "not installed")
    unit = tmp_path / "etc" / "systemd" / "system" / "powerguard.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    golden("client", _missing(tmp_path), "no settings")
    (tmp_path / CONFIG[1:]).parent.mkdir()
    (tmp_path / CONFIG[1:]).touch()
    assert _missing(tmp_path) == ""
    gone = FileNotFoundError(errno.ENOENT, "")
    assert _why(gone, "s.sock", "nothing there") == "s.sock: nothing there"
    golden("client", _why(gone, "s.sock"), "not running")


async def test_another_host_that_does_not_answer_is_not_asked_to_start_here(golden: Golden) -> None:
    """Nothing is known of it: no unit of this host would help."""
    ended = await powerguard("status", "--url", "http://127.0.7.9:9")
    assert ended.code == 4
    assert "systemctl" not in ended.out
    golden("status", ended.out)
    late = _why_elsewhere(TimeoutError(), "http://10.0.0.9:13493", "10.0.0.9")
    golden("client", late)
    down = OSError(errno.EHOSTUNREACH, "No route to host")
    assert _why_elsewhere(down, "http://10.0.0.9:13493", "10.0.0.9") == late


@pytest.mark.parametrize(
    "content", [None, b"", b"no database" * 200, "a pipe"], ids=["none", "empty", "no database", "a pipe"]
)
async def test_status_without_daemon_and_journal(content: bytes | str | None, folder: Path, golden: Golden) -> None:
    """No journal, an empty file, a file of rubbish, a pipe that nobody writes to: said, not raised nor waited for."""
    path = folder / "journal.sqlite"
    if isinstance(content, str):
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    args = ("status", "--socket", str(folder / "none.sock"), "--journal", str(path))
    ended = await powerguard(*args)
    assert ended.code == 4
    assert (await powerguard(*args, "--json")).object["last_known"] is None
    golden("status", ended.out)


async def test_status_watches(folder: Path) -> None:
    """Again every second; not cleared where it is no terminal."""
    async with served(scene("holding"), folder) as path:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "powerguard", "status", "--socket", path, "--watch", "--short",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.timeout(60.0):
            lines = [await process.stdout.readline() for _ in range(2)]
        process.send_signal(2)
        _, err = await process.communicate()
    assert all(line.startswith(b"holding armed ready") for line in lines)
    assert (process.returncode, err) == (1, b"")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
async def test_a_watch_that_ends_gives_the_terminal_its_cursor_back(folder: Path, sent: signal.Signals) -> None:
    ours, terminal = os.openpty()
    seen = b""
    async with served(scene("holding"), folder) as path:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "powerguard", "status", "--socket", path, "--watch",
            stdout=terminal, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(terminal)
        async with asyncio.timeout(60.0):
            while b"holding" not in seen:
                seen += await asyncio.to_thread(os.read, ours, 4096)
            process.send_signal(sent)
            await process.wait()
            with contextlib.suppress(OSError):  # a terminal that nobody holds any more
                while more := await asyncio.to_thread(os.read, ours, 4096):
                    seen += more
    os.close(ours)
    assert seen.startswith(b"\x1b[2J\x1b[?25l")
    assert seen.endswith(b"\x1b[?25h\r\n")


async def test_a_watch_that_is_suspended_lends_the_shell_its_cursor(folder: Path) -> None:
    """Ctrl-Z shows the cursor and stops the process; `fg` hides it and draws on an empty screen."""
    ours, terminal = os.openpty()
    async with served(scene("holding"), folder) as path:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "powerguard", "status", "--socket", path, "--watch",
            stdout=terminal, env={**os.environ, "TERM": "xterm"}, process_group=0,
        )  # fmt: skip
        os.close(terminal)

        async def shown(text: bytes) -> bytes:
            seen = b""
            while text not in seen:
                seen += await asyncio.to_thread(os.read, ours, 4096)
            return seen

        async with asyncio.timeout(60.0):
            await shown(b"holding")
            process.send_signal(signal.SIGTSTP)
            await shown(b"\x1b[?25h\r\n")
            _, state = await asyncio.to_thread(os.waitpid, process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(state)
            process.send_signal(signal.SIGCONT)
            after = await shown(b"holding")
            process.send_signal(signal.SIGINT)
            await shown(b"\x1b[?25h\r\n")
            await process.wait()
    os.close(ours)
    assert after.startswith(b"\x1b[2J\x1b[?25l")


async def test_status_watch_that_is_stopped_before_its_first_look(folder: Path) -> None:
    """Ctrl-C while the daemon has not answered: 130, and not 0, which says that the host is online."""
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(folder / "s.sock"))
        daemon.listen()
        daemon.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "powerguard", "status", "--socket", str(folder / "s.sock"), "--watch",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(60.0):
            client, _ = await asyncio.get_running_loop().sock_accept(daemon)
        with client:
            process.send_signal(2)
            ended = await process.communicate()
    assert (process.returncode, ended) == (130, (b"", b""))


async def test_hostile_names_do_not_reach_the_terminal(folder: Path) -> None:
    """What a trainer calls itself cannot clear the operator's screen."""
    daemon = scene()
    evil = replace(daemon.state.trainers[0], name="\x1b[2J\nllm", checkpoint=GivenUp(because="\x07", tries=1))
    daemon.state = replace(daemon.state, trainers=(evil,))
    async with served(daemon, folder) as path:
        for verb in ("status", "plan --terms"):
            ended = await powerguard(*verb.split(), "--socket", path)
            assert "\x1b" not in ended.out
            assert "?[2J?llm" in ended.out


# --- plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
async def test_plan_in_every_phase(phase: str, folder: Path, golden: Golden) -> None:
    """The answer first; with --terms every term in words, with its source; exit 0 only when it fits."""
    async with served(scene(phase), folder) as path:
        brief = await powerguard("plan", "--socket", path)
        ended = await powerguard("plan", "--socket", path, "--terms")
        shown = (await powerguard("plan", "--socket", path, "--json")).object
    assert ended.code == (0 if shown["fits"] else 1)
    for term in shown["terms"]:
        row = rf"^[a-zA-Z ,]+ {{2,}}{re.escape(term['name'])}  +.+  +{re.escape(term['source'])}$"
        assert re.search(row, ended.out, re.MULTILINE), term["name"]
        assert not re.search(row, brief.out, re.MULTILINE)
    assert shown["phase"] == phase
    assert not re.search(r"reff_|tau_|_s\b", brief.out)
    golden("plan", brief.out)
    golden("plan", ended.out, "terms")


async def test_plan_that_does_not_fit(folder: Path, golden: Golden) -> None:
    daemon = scene()
    daemon.policy = replace(daemon.policy, runtime_table=((0.5, 180.0), (1.0, 72.0)))
    async with served(daemon, folder) as path:
        ended = await powerguard("plan", "--socket", path)
        assert ended.code == 1
        assert (await powerguard("plan", "--socket", path, "--json")).object["grade"] == "short"
        golden("plan", ended.out, "short")
        daemon.policy = replace(daemon.policy, runtime_table=())
        daemon.now_s += 1.0
        ended = await powerguard("plan", "--socket", path)
        assert ended.code == 1
        assert (await powerguard("plan", "--socket", path, "--json")).object["slack_s"] is None
        golden("plan", ended.out, "unknown")
    assert (await powerguard("plan", "--socket", str(folder / "no"))).code == 4


@pytest.mark.parametrize(
    ("phase", "left", "has_slack"),
    [
        ("emergency_checkpoint", 0.18, True),
        ("holding", 0.16, True),
        ("on_battery", 0.18, True),
        ("holding", 0.15, False),
    ],
)
async def test_plan_and_status_in_the_last_quarter(
    phase: str, left: float, has_slack: bool, folder: Path, golden: Golden
) -> None:
    """A pause begins as three quarters are no more than is needed: that is no alarm then, and before it, it is."""
    daemon = scene(phase)
    daemon.state = replace(daemon.state, battery=replace(daemon.state.battery, left=left, used=0.75 - left))
    daemon.state = replace(daemon.state, maintenance=Maintenance(until_s=daemon.now_s + 900.0, reason="fan", who="a"))
    async with served(daemon, folder) as path:
        ended = await powerguard("plan", "--socket", path, "--terms")
        answer = (await powerguard("plan", "--socket", path, "--json")).object
        status = (await powerguard("status", "--socket", path)).out
    assert (ended.code, answer["fits"], answer["slack_s"] >= 0.0) == (1, False, has_slack)
    has_begun = phase != "on_battery"
    assert ("\nfits " in ended.out) is not (has_begun and has_slack), "one verdict, not two"
    golden("plan", ended.out)
    golden("status", status)


# --- event ------------------------------------------------------------------------------------------------------------


async def test_event_polls_at_once(folder: Path) -> None:
    daemon = scene()
    async with served(daemon, folder) as path:
        ended = await powerguard_alone("event", "onbattery", "rack-a", "--socket", path)
    assert (ended, daemon.polls, daemon.events) == (Ended(0, "", ""), 1, [])


async def test_event_gives_its_hint_to_the_hint_socket(folder: Path) -> None:
    """Which is open to everybody: the admin socket is not even asked, unless somebody wants to know who owns it."""
    daemon, other = scene("on_battery"), scene("on_battery")
    async with served(other, folder) as path, hint_socket(daemon, path=f"{folder}/hint.sock"):
        assert await powerguard_alone("event", "onbattery", "rack-a", "--socket", path) == Ended(0, "", "")
        async with asyncio.timeout(60.0):
            while True:
                if daemon.polls:
                    break
                await asyncio.sleep(0.01)
        assert other.polls == 0
        assert (await powerguard_alone("event", "--for", "nut", "onbattery", "--socket", path)).code == 99
        assert (daemon.polls, other.polls, daemon.events) == (1, 1, [])


@pytest.mark.parametrize("words", [["onbattery"], [], ["--bogus"], ["a", "b", "c", "d"], ["--for", "nobody"]])
async def test_event_never_fails(words: list[str], folder: Path) -> None:
    """No daemon, no name, options of tomorrow: a hook exits 0."""
    ended = await powerguard_alone("event", *words, "--socket", str(folder / "none.sock"))
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.startswith("powerguard event: ")


async def test_event_for_apcupsd(folder: Path) -> None:
    """99 exactly when the daemon is alive and owns the shutdown; never over what a UPS calls itself."""
    ask = ("event", "--for", "apcupsd", "doshutdown", "ups", "--socket")
    async with served(scene("on_battery"), folder) as path:
        assert (await powerguard(*ask, path)).code == 99
        for name in ("--socket=/tmp/theirs.sock", "--help", "-h", "--for=nut-shutdown", "--", "a\nb" * 999, "\udcff"):
            words = ("event", "--socket", path, "--for", "apcupsd", "--", "doshutdown", name)
            assert (await powerguard(*words)).code == 99, name
    assert (await powerguard(*ask, path)).code == 0
    async with served(in_mode(scene("on_battery"), Mode.DRY_RUN), folder) as path:
        assert (await powerguard(*ask, path)).code == 0
    async with served(replace(scene("on_battery"), state=State()), folder) as path:
        assert (await powerguard(*ask, path)).code == 0


async def test_event_for_nut(folder: Path) -> None:
    """The command that SHUTDOWNCMD was takes our place, with its own status, unless the daemon owns the shutdown."""
    command = ("--for", "nut-shutdown", "--", "sh", "-c", 'echo "$0 $1"; exit 7', "two words", "--bogus")
    daemon = scene("on_battery")
    daemon.sources = (replace(daemon.sources[0], source="nut:rack-a@10.0.0.9"),)
    async with served(daemon, folder) as path:
        ended = await powerguard_alone("event", "--socket", path, *command)
        assert (ended.code, ended.out) == (0, "")
        assert (await powerguard_alone("event", "--socket", path, "--for", "nut", "--", "nut-shutdown")).code == 99
    ended = await powerguard_alone("event", "--socket", path, *command)
    assert (ended.code, ended.out) == (7, "two words --bogus\n")
    ended = await powerguard_alone("event", "--socket", path, "--for", "nut-shutdown", "--", str(folder / "missing"))
    assert (ended.code, "No such file" in ended.err) == (127, True)
    assert (await powerguard_alone("event", "--socket", path, "--for", "nut-shutdown")).code == 64


@pytest.mark.parametrize("words", [["--for", "nut-shutdown"], ["--for=nut-shutdown"]])
async def test_a_wrong_option_is_an_error_where_it_would_cost_a_shutdown(words: list[str]) -> None:
    assert (await powerguard_alone("event", *words, "--bogus", "--", "true")).code == 64


async def test_a_damaged_installation_costs_no_shutdown(folder: Path) -> None:
    """The settings need third-party packages; what upsmon was to run does not wait for these."""
    (folder / "pydantic.py").write_text("raise ImportError('no pydantic')", encoding="utf-8")
    config = settings_in(folder)
    words = ("event", "--config", str(config), "--for", "nut-shutdown", "--", "sh", "-c", "exit 7")
    ended = await powerguard_alone(*words, PYTHONPATH=str(folder))
    assert (ended.code, "the settings cannot be read: no pydantic" in ended.err) == (7, True)


def test_a_daemon_that_hangs_is_reported_with_the_time_that_it_had(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{folder}/s.sock")
        silent.listen(4)
        with pytest.raises(DownError, match=r"no answer within 0\.2 s: the daemon hangs"):
            post(argparse.Namespace(socket=f"{folder}/s.sock"), "notify-test", {}, 0.2)


async def test_event_does_not_wait_for_a_daemon_that_hangs(folder: Path) -> None:
    """A socket that takes the call and never answers: two seconds, then the hook goes on."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{folder}/s.sock")
        silent.listen(4)
        ended = await powerguard_alone("event", "--for", "apcupsd", "x", "--socket", f"{folder}/s.sock")
        assert ended.code == 0
        assert "hangs" in ended.err


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.0 200 OK\r\n\r\nhello", b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 9999]
)
async def test_somebody_else_on_the_socket(answer: bytes, folder: Path) -> None:
    """Whatever answers there, it is no traceback and no ownership."""
    with socket.socket(socket.AF_UNIX) as strange:
        strange.bind(f"{folder}/s.sock")
        strange.listen(4)

        def serve() -> None:
            for _ in range(2):
                peer, _ = strange.accept()
                peer.recv(4096)
                peer.sendall(answer)
                peer.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert (await powerguard("event", "--for", "apcupsd", "x", "--socket", f"{folder}/s.sock")).code == 0
        assert (await powerguard("status", "--socket", f"{folder}/s.sock")).code == 4
        thread.join(60)


@pytest.mark.parametrize(
    ("verb", "example", "key"),
    [
        ("status", "status-online", "version"),
        ("status --short", "status-online", "mode"),
        ("plan", "plan-online", "terms"),
        ("battery show", "battery", "ups"),
        ("drill report", "drill", "last"),
        ("recover --dry-run", "recovery", "gates"),
        ("plan", "status-online", ""),
        ("drill stop", "battery", ""),
    ],
)
async def test_a_daemon_of_another_version(verb: str, example: str, key: str, folder: Path, golden: Golden) -> None:
    """The command was updated and the daemon not restarted yet: said in words, with what to do, and exit 4."""
    body = json.loads((REFERENCE / f"{example}.json").read_text(encoding="utf-8"))
    body.pop(key, None)
    with socket.socket(socket.AF_UNIX) as older:
        older.bind(f"{folder}/s.sock")
        older.listen(4)

        def serve() -> None:
            peer, _ = older.accept()
            peer.recv(4096)
            peer.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(body).encode())
            peer.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        ended = await powerguard(*verb.split(), "--socket", f"{folder}/s.sock")
        thread.join(60)
    assert ended.code == 4
    golden("client", ended.out + ended.err)


async def test_a_crowded_daemon_is_not_called_gone(folder: Path, golden: Golden) -> None:
    """It hangs up on whoever is too many: that is told in words, and what to do."""
    with socket.socket(socket.AF_UNIX) as crowded:
        crowded.bind(f"{folder}/s.sock")
        crowded.listen(4)

        def hang_up() -> None:
            peer, _ = crowded.accept()  # closed with our words unread: the kernel resets the connection
            select.select([peer], [], [], 60.0)
            peer.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        ended = await powerguard("abort", "--socket", f"{folder}/s.sock")
        thread.join(60)
    assert ended.code == 4
    golden("client", ended.err)


# --- abort, maintenance, checkpoint ----------------------------------------------------------------------------------


async def test_abort(folder: Path, golden: Golden) -> None:
    """Taken while holding; refused past the commit, with the reason; 4 without a daemon."""
    daemon = scene("holding")
    async with served(daemon, folder) as path:
        ended = await powerguard("abort", "--reason", "generator", "--socket", path)
        assert (ended.code, ended.err) == (0, "")
        golden("abort", ended.out, "taken")
        (event,) = daemon.events
        assert isinstance(event, Abort)
        assert event.reason == "generator"
    async with served(scene("shutdown"), folder) as path:
        ended = await powerguard("abort", "--socket", path)
        assert ended.code == 1
        golden("abort", ended.err, "refused")
        result = await powerguard("abort", "--json", "--socket", path)
        assert (result.code, result.object["object"]) == (1, "error")
    assert (await powerguard("abort", "--socket", path)).code == 4


@pytest.mark.parametrize("mode", [Mode.REHEARSE, Mode.DRY_RUN])
async def test_a_recorded_commit_is_no_power_off(mode: Mode, folder: Path, golden: Golden) -> None:
    """The host stays on, so neither `abort` nor `maintenance` may say that its power-off is decided."""
    async with served(committed(mode), folder) as path:
        ended = await powerguard("abort", "--socket", path)
        kept = await powerguard("maintenance", "on", "--for", "2h", "--reason", "fan swap", "--socket", path)
    assert (ended.code, kept.code) == (1, 0)
    golden("abort", ended.err)
    golden("maintenance", kept.out)


@pytest.mark.parametrize("letter", ["x", "й", "停", "\N{FIRE}", "\udcff"])
async def test_a_long_text_is_cut_and_not_refused(letter: str, folder: Path) -> None:
    """The daemon reads 4096 bytes of a request, and keeps 200 letters."""
    daemon = scene("holding")
    async with served(daemon, folder) as path:
        assert (await powerguard("abort", "--reason", letter * 5000, "--socket", path)).code == 0
        ended = await powerguard("event", "--socket", path, "--for", "nut", "--", letter * 999, letter * 999)
        assert ended == Ended(99, "", "")
    (event,) = daemon.events
    assert isinstance(event, Abort)
    assert event.reason == (letter if letter.isprintable() else "?") * 200


async def test_after_an_abort_nothing_is_promised(folder: Path, golden: Golden) -> None:
    """Nobody commits any more in this outage: that is no protection, and no power-off is forecast."""
    daemon = scene("on_battery")
    daemon.state = replace(daemon.state, phase=OnBattery(outage=outage(aborted_by="root: generator is up")))
    async with served(daemon, folder) as path:
        line = await powerguard("status", "--short", "--socket", path)
        result = await powerguard("status", "--socket", path)
        status = (await powerguard("status", "--json", "--socket", path)).object
        plan = await powerguard("plan", "--socket", path)
        drawn = await powerguard("plan", "--picture", "--socket", path)
        again = await powerguard("abort", "--socket", path)
    assert (line.code, again.code) == (1, 1)
    assert (status["ready"], "aborted" in [reason["name"] for reason in status["reasons"]]) == (False, True)
    for out in (result.out, plan.out):
        assert "power-off: " not in out
    golden("status", line.out, "short")
    golden("status", result.out)
    golden("plan", plan.out)
    golden("plan", drawn.out, "drawn")
    golden("abort", again.err)


async def test_maintenance_after_the_commit_promises_nothing(folder: Path) -> None:
    """It is kept for later, and this outage's power-off goes on."""
    async with admin_server(scene("shutdown"), path=f"{folder}/s.sock") as path:
        ended = await powerguard("maintenance", "on", "--for", "2h", "--reason", "fan swap", "--socket", path)
    assert ended.code == 0
    assert "NOT powered off" not in ended.out
    assert "too late for this outage" in ended.out


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_user_who_may_not_ask_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 would say that the daemon is down, which this user cannot know."""
    path = str(folder / "s.sock")
    assert main(["abort", "--socket", path]) == 4, "and all modules are imported now"
    capsys.readouterr()
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(path)
        daemon.listen()
        Path(path).chmod(0o600)
        folder.chmod(0o755)
        os.seteuid(65534)
        try:
            code = main(["abort", "--socket", path])
        finally:
            os.seteuid(0)
    assert code == 1
    assert f"refused: {path}: permission denied (be root, or join group" in capsys.readouterr().err


async def test_maintenance(folder: Path, golden: Golden) -> None:
    daemon = scene()
    async with served(daemon, folder) as path:
        ended = await powerguard("maintenance", "on", "--for", "2h", "--reason", "fan swap", "--socket", path)
        assert (ended.code, ended.err) == (0, "")
        golden("maintenance", ended.out)
        assert (await powerguard("maintenance", "off", "--json", "--socket", path)).object["verb"] == "maintenance"
    on, off = daemon.events
    assert isinstance(on, SetMaintenance)
    assert isinstance(off, SetMaintenance)
    assert on.until_s - on.at_s == 7200.0
    assert off.until_s == off.at_s


async def test_checkpoint(folder: Path, golden: Golden) -> None:
    daemon = scene()
    async with served(daemon, folder) as path:
        assert (await powerguard("checkpoint", "--socket", path)).code == 0
        daemon.state = replace(daemon.state, trainers=())
        ended = await powerguard("checkpoint", "--socket", path)
    assert isinstance(daemon.events[0], CheckpointNow)
    assert ended.code == 1
    golden("checkpoint", ended.err)


# --- where the daemon is ----------------------------------------------------------------------------------------------


def settings_in(folder: Path) -> Path:
    """Settings whose daemon is anywhere but at the default place."""
    config = folder / "pg.yaml"
    config.write_text(
        "mode: armed\n"
        "ups:\n  rack-a:\n    sources:\n      - {kind: snmp, host: 10.0.0.5, version: 2c}\n"
        f'control: {{socket: "{folder}/s.sock"}}\njournal: {{path: "{folder}/j.sqlite"}}\n',
        encoding="utf-8",
    )
    return config


@pytest.mark.parametrize(
    "words",
    ["status", "plan", "battery show", "doctor --json", "checkpoint", "maintenance off", "drill report", "abort"],
)
async def test_the_daemon_of_the_named_settings_is_asked(words: str, folder: Path) -> None:
    """Before and behind the verb: whoever looks elsewhere calls a host unprotected that is well."""
    config = str(settings_in(folder))
    async with served(scene("holding"), folder):
        found = [
            await powerguard("--config", config, *words.split()),
            await powerguard(*words.split(), "--config", config),
        ]
        if words == "status":
            found.append(await powerguard_alone("status", POWERGUARD_CONFIG=config))
    for ended in found:
        assert "DOWN" not in ended.out + ended.err
        assert "s.sock" not in ended.out + ended.err
        assert ended.code != 4
        assert ended.code not in (64, 78)


async def test_a_hook_asks_the_daemon_of_the_named_settings(folder: Path) -> None:
    """And nobody where these are wrong: another daemon's answer is not theirs. A hook goes on, and says why."""
    config = settings_in(folder)
    other = folder / "other"
    other.mkdir()
    async with served(scene("on_battery"), folder), served(scene("on_battery"), other) as stranger:
        for words in (["--for", "apcupsd", "doshutdown"], ["--for", "nut", "onbattery"]):
            assert await powerguard_alone("--config", str(config), "event", *words) == Ended(99, "", "")
            assert await powerguard_alone("event", *words, POWERGUARD_CONFIG=str(config)) == Ended(99, "", "")
        config.write_text("mode: armde\n", encoding="utf-8")
        for words in (["x"], ["--for", "apcupsd", "x"], ["--for", "nut-shutdown", "--", "/bin/true"]):
            ended = await powerguard_alone("event", "--config", str(config), *words)
            assert (ended.code, ended.out) == (0, "")
            assert f"powerguard event: {config}:1:1" in ended.err
            assert "Traceback" not in ended.err
        asked = ("event", "--socket", stranger, "--config", str(config), "--for", "apcupsd", "x")
        assert (await powerguard_alone(*asked)).code == 99


async def test_the_journal_of_the_named_settings_is_read_when_it_is_down(folder: Path, golden: Golden) -> None:
    journal = Journal(folder / "j.sqlite", boot_id=BOOT, wall=lambda: WALL_S, writer=Inline(), reader=Inline())
    await journal.load()
    assert await journal.append(Entry(at_s=NOW_S, state=scene("holding").state))
    assert await journal.close()
    ended = await powerguard("status", "--config", str(settings_in(folder)))
    assert ended.code == 4
    assert f"{folder}/s.sock: not there" in ended.out
    golden("status", ended.out)


@pytest.mark.skipif(Path(SOCKET).exists(), reason="a daemon runs here")
async def test_the_daemon_is_asked_where_the_settings_of_this_host_say(folder: Path) -> None:
    """Also without --config: an abort that reaches no daemon, although one runs, costs the outage."""
    daemon, config = scene("holding"), str(settings_in(folder))
    async with served(daemon, folder):
        args = argparse.Namespace(config=config, socket=None, journal=None, verb="abort")
        assert (await asyncio.to_thread(post, args, "abort", {"reason": "x"}))["phase"] == "holding"
        args = argparse.Namespace(config=config, socket=None, journal=None, verb="status")
        assert (await asyncio.to_thread(get, args, "/api/v1/status"))["phase"] == "holding"
        assert args.journal == f"{folder}/j.sqlite"
    assert len(daemon.events) == 1
    args = argparse.Namespace(config=config, socket=None, verb="abort")
    with pytest.raises(DownError, match=f"{folder}/s.sock: not there"):
        post(args, "abort", {})
    for verb, named in (("abort", f"{folder}/none.yaml"), ("event", config)):
        with pytest.raises(DownError, match=f"{SOCKET}: "):
            post(argparse.Namespace(config=named, socket=None, verb=verb), verb, {})


async def test_an_uninstall_sees_the_outage_of_the_daemon_of_its_settings(folder: Path) -> None:
    """Also while that is down: then by its journal."""
    journal = Journal(folder / "j.sqlite", boot_id=boot_id(), wall=lambda: WALL_S, writer=Inline(), reader=Inline())
    await journal.load()
    assert await journal.append(Entry(at_s=NOW_S, state=scene("holding").state))
    assert await journal.close()
    config = str(settings_in(folder))

    async def asked() -> str:
        return await asyncio.to_thread(outage_under_way, argparse.Namespace(config=config, socket=None))

    assert "phase holding, as the daemon last wrote" in await asked()
    async with served(scene("on_battery"), folder):
        assert "phase on_battery)" in await asked()
    async with served(scene(), folder):
        assert await asked() == ""


async def test_an_uninstall_sees_what_is_not_disarmed_yet(folder: Path) -> None:
    """A watchdog that counts down would cut the power of this host, and only the daemon stops it."""
    seen = scene()
    late = Armed(method=PowerOnMethod.WATCHDOG, outage="o", at_s=NOW_S, acts_at_s=NOW_S + 600.0, leaving=True)
    seen.state = replace(seen.state, owed=(*seen.state.owed, late))
    args = argparse.Namespace(config=str(settings_in(folder)), socket=None)
    async with served(seen, folder):
        assert "not disarmed yet (watchdog)" in await asyncio.to_thread(outage_under_way, args)


async def test_settings_that_do_not_name_where_the_daemon_is(folder: Path) -> None:
    """Not "down": it is not known where to ask. With a socket it is; and doctor tells it among its findings."""
    config = folder / "pg.yaml"
    config.write_text("mode: armde\n", encoding="utf-8")
    ended = await powerguard("status", "--config", str(config))
    assert (ended.code, ended.out) == (78, "")
    assert f"{config}:1:7" in ended.err
    assert "give --socket PATH" in ended.err
    assert (await powerguard("drill", "--json", "--config", str(folder / "none.yaml"))).object["object"] == "error"
    assert (await powerguard("doctor", "--config", str(config), "--json")).object["object"] == "doctor"
    async with served(scene(), folder) as path:
        assert (await powerguard("status", "--config", str(config), "--socket", path)).code == 0


@pytest.mark.parametrize("verb", VERBS)
def test_the_shared_options_stand_behind_every_verb(verb: str) -> None:
    """And behind a verb of a verb."""

    def options(parser: argparse.ArgumentParser) -> Iterator[set[str]]:
        yield {option for action in parser._actions for option in action.option_strings}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for each in action.choices.values():
                    yield from options(each)

    verbs = Verbs()
    verbs.add(verb)
    assert [known for known in options(verbs.subparsers.choices[verb]) if not {"--config", "--socket"} <= known] == []


# --- the rest ---------------------------------------------------------------------------------------------------------

USAGE = [
    (["stauts"], "status"),
    (["status", "--bogus"], "--bogus"),
    (["status", "--wach"], "--watch"),
    (["checkpoint", "llm"], "unknown argument llm"),
    (["history", "export", "last", "--json"], "unknown option --json\n"),
    (["battery", "replaced", "--instaled", "2026-11"], "--installed"),
    (["status", "--json", "--short"], "--json"),
    (["help", "stauts"], "status"),
    (["--bogus"], "--bogus"),
    (["maintenance"], "on|off"),
    (["maintenance", "on", "--for", "2x", "--reason", "x"], "--for"),
    (["maintenance", "on", "--for", "99d", "--reason", "x"], "--for"),
    (["maintenance", "on", "--for", "1h"], "--reason"),
    (["history", "--limit", "0"], "1 to 999999999999999, got '0' (example: 20)"),
    (["demo", "--ups", "99999"], "0 to 65535, got '99999' (example: 1161)"),
    (["snmp", "probe", "card", "--port", "x"], "must be a whole number"),
    (["seal", "ckpt", "--step", "-1"], "must be a whole number"),
    (["completion", "tcsh"], "bash"),
    (["status", "--url", "ftp://x"], None),
    (["status", "--url", "http://gpü..example:13493"], None),
    ([], "verbs"),
]
"""What is typed wrongly, and the word of the answer that helps."""


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ([], "powerguard [-h]"),
        (["plan"], "powerguard plan [-h]"),
        (["battery", "replaced"], "powerguard battery replaced"),
    ],
)
async def test_help_is_a_verb(words: list[str], usage: str) -> None:
    ended = await powerguard("help", *words)
    assert (ended.code, ended.out.startswith(f"usage: {usage}")) == (0, True)


@pytest.mark.parametrize(
    ("words", "expected"), USAGE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
async def test_wrong_options(words: list[str], expected: str | None, golden: Golden) -> None:
    """Exit 64 with what would be right, on stderr; an address that is none is a daemon that is not there."""
    ended = await powerguard(*words)
    assert ended.code == (64 if expected is not None else 4)
    assert expected is None or expected in ended.err
    if words and words[0] != "completion":  # each version of Python has words of its own for a wrong choice
        golden("usage", ended.out + ended.err, varies={", ".join(VERBS): "VERBS"})


@pytest.mark.parametrize("verb", VERBS)
async def test_every_verb_helps(verb: str) -> None:
    ended = await powerguard(verb, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"usage: powerguard {verb}")


async def test_wrong_settings_exit_78(folder: Path) -> None:
    """The daemon says what is wrong, with its place, and is not restarted into it blindly."""
    config = folder / "pg.yaml"
    config.write_text("mode: armde\n", encoding="utf-8")
    ended = await powerguard("run", "--config", str(config))
    assert ended.code == 78
    assert f"{config}:1:7" in ended.err
    assert (await powerguard("--config", str(config), "config", "validate")).code == 78


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ("history", 66, "File name too long, so the journal is unknown"),
        ("report", 66, "File name too long, so the journal is unknown"),
        ("doctor", 2, "File name too long"),
        ("plan --size", 78, "File name too long"),
        ("checkpoints list", 64, "name a folder"),
        (
            "discover --only nut --nut-port 1 --deadline 1 --nut /none --apcupsd /none",
            1,
            "is skipped: File name too",
        ),
    ],
)
async def test_settings_that_cannot_even_be_looked_for(words: str, code: int, expected: str, folder: Path) -> None:
    """As in a folder that is closed to who asks; here by a name that no file can have, since tests may be root."""
    ended = await powerguard(*words.split(), "--config", f"{folder}/{'x' * 300}.yaml")
    assert (ended.code, expected in ended.out + ended.err) == (code, True)


async def test_config_from_the_environment(folder: Path) -> None:
    ended = await powerguard_alone("run", POWERGUARD_CONFIG=str(folder / "none.yaml"))
    assert ended.code == 78
    assert "none.yaml" in ended.err


async def test_version() -> None:
    answer = (await powerguard("version", "--json")).object
    assert list(answer) == list(json.loads((REFERENCE / "version.json").read_text(encoding="utf-8")))
    assert answer["version"] in (await powerguard("--version")).out
    assert answer["schema_version"] == 1


COMPLETED = {
    "powerguard st": ["status"],
    "powerguard config val": ["validate"],
    "powerguard status --wa": ["--watch"],
    "powerguard completion z": ["zsh"],
    "powerguard report --html somew": ["somewhere.html"],
    "powerguard seal som": ["some-folder"],
}
"""What one types before the key, and what stands there then."""


async def test_completion_names_every_verb() -> None:
    """Made from the parsers: a verb or option that is added is completed."""
    for shell in ("bash", "zsh", "fish"):
        ended = await powerguard("completion", shell)
        assert (ended.code, [verb for verb in VERBS if verb not in ended.out]) == (0, [])
        assert "watch" in ended.out


@pytest.fixture
def few_files(folder: Path) -> Path:
    (folder / "somewhere.html").touch()
    (folder / "some-folder").mkdir()
    return folder


async def test_bash_completes(few_files: Path) -> None:
    """The real shell, with the real script."""
    script = (await powerguard("completion", "bash")).out
    ask = """
    completer=$(complete -p powerguard); completer=${completer% *}; completer=${completer##* }
    while read -ra COMP_WORDS; do COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); $completer; echo "${COMPREPLY[*]}"; done
    """
    out = await answer("bash", "--norc", "-c", f"{script}\n{ask}", typed="\n".join(COMPLETED) + "\n", folder=few_files)
    assert out.splitlines() == [" ".join(there) for there in COMPLETED.values()]


@pytest.mark.peer("fish")
async def test_fish_completes(few_files: Path) -> None:
    script = (await powerguard("completion", "fish")).out
    (few_files / "pg.fish").write_text(script, encoding="utf-8")
    for words, there in COMPLETED.items():
        line = f"source pg.fish; complete -C {shlex.quote(words)}"
        out = await answer("fish", "--no-config", "-c", line, folder=few_files)
        assert [row.split("\t")[0].rstrip("/") for row in out.splitlines()] == there


@pytest.mark.peer("zsh")
async def test_zsh_completes(few_files: Path) -> None:
    """On a terminal of its own, since zsh completes on no other."""
    (few_files / "_powerguard").write_text((await powerguard("completion", "zsh")).out, encoding="utf-8")
    lines = [
        "zmodload zsh/zpty; zpty shell zsh -f -i",
        "zpty -w shell 'PROMPT=; fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; echo re''ady'",
        "zpty -r shell seen '*ready*'",
        *(
            # What stands there after the key is put behind echo, and printed; what was typed does not read "there:".
            f"zpty -w -n shell {shlex.quote(words)}$'\\t\\x01echo \\x22th\\x22\\x22ere: \\x05\\x22\\n'\n"
            "zpty -r shell seen $'*there: powerguard*\\n'; print -r -- $seen"
            for words in COMPLETED
        ),
    ]
    out = await answer("zsh", "-f", "-c", "\n".join(lines), folder=few_files)
    said = [row.partition("there: ")[2].split() for row in out.splitlines() if row.startswith("there: ")]
    assert [row[-1:] for row in said] == list(COMPLETED.values())


async def answer(*argv: str, folder: Path, typed: str = "") -> str:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=folder
    )
    async with asyncio.timeout(60.0):
        out, _ = await process.communicate(typed.encode())
    return out.decode()


async def test_colours_on_a_terminal_only(folder: Path) -> None:
    """On a terminal, and never with NO_COLOR."""
    async with served(scene(), folder) as path:
        plain = await powerguard("status", "--socket", path)
        assert "\x1b" not in plain.out
        for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
            words = f"{shlex.quote(sys.executable)} -m powerguard status --socket '{path}'"
            process = await asyncio.create_subprocess_exec(
                "script", "-qec", words, "/dev/null",
                stdout=asyncio.subprocess.PIPE,
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "TERM": "xterm", **env},
                cwd=Path(__file__).parents[2],
            )  # fmt: skip
            out, _ = await process.communicate()
            assert (b"\x1b[32m" in out) is coloured


async def test_reader_that_leaves_is_no_error(folder: Path) -> None:
    """`powerguard status | head -1` has no complaint to make."""
    async with served(scene(), folder) as path:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", f"{shlex.quote(sys.executable)} -m powerguard plan --socket '{path}' | head -1",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        out, err = await process.communicate()
    assert out.startswith(b"gpu-01: online")
    assert err == b""


STREAMS = [
    ("version > /dev/full", 74, "powerguard: error: standard output: No space left on device\n"),
    ("config schema > /dev/full", 74, "powerguard: error: standard output: No space left on device\n"),
    ("version >&- <&-", 0, ""),
    ("status --help >&-", 0, ""),
    ("status --socket none --journal none >&-", 4, ""),
    ("plan --socket none 2>/dev/full", 4, ""),
    ("plan --socket none 2>&-", 4, ""),
    ("event onbattery --socket none 2>/dev/full", 0, ""),
]


@pytest.mark.parametrize(("words", "code", "err"), STREAMS, ids=[words for words, _, _ in STREAMS])
async def test_streams_that_take_nothing(words: str, code: int, err: str) -> None:
    """A full disk, a closed descriptor: one line where anybody can read it, and the status that is documented."""
    ended = await run_by_bash(words)
    assert (ended.code, ended.out, ended.err) == (code, "", err)


@pytest.mark.parametrize("words", ["version", "config schema", "status --help"])
async def test_a_reader_that_was_gone_before_is_no_error(words: str) -> None:
    """`powerguard version | true`, where the reader is the quicker one."""
    read, write = os.pipe()
    os.close(read)
    try:
        ended = await run_by_bash(f"{words} >&{write}", pass_fds=(write,))
    finally:
        os.close(write)
    assert (ended.code, ended.err) == (141, "")


async def test_a_letter_that_the_terminal_lacks(folder: Path) -> None:
    """A file's name may have any letter; a locale of old has few."""
    config = folder / "größe.yaml"
    shutil.copy(Path(__file__).parents[2] / "config" / "powerguard.yaml", config)
    ended = await powerguard_alone("config", "validate", str(config), PYTHONIOENCODING="ascii")
    assert (ended.code, "gr??e.yaml: valid" in ended.out) == (0, True)


async def test_the_shutdown_of_nut_does_not_hang_on_who_listens(folder: Path) -> None:
    """SHUTDOWNCMD is run where the daemon is down, though the words about it reach nobody: the host must go down."""
    done = folder / "done"
    for nobody in ("2>/dev/full", "2>&-"):
        ended = await run_by_bash(f"event --for nut-shutdown --socket none -- touch '{done}' {nobody}")
        assert (ended.code, done.exists()) == (0, True)
        done.unlink()


def test_reference_names_every_verb() -> None:
    page = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    rows = [line.partition(": ")[0] for line in page.splitlines() if line.startswith("- ")]
    missing = [verb for verb in VERBS if not any(re.search(rf"`{verb}[ `]", row) for row in rows)]
    assert missing == [], "each verb needs its exit statuses in docs/reference/cli.md"
