"""The effector `host`: what it writes, what it runs, and above all when it does nothing."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from pydantic import ValidationError

from powerguard.core.decide.transitions import RETRY_S
from powerguard.core.model.actions import Grade, PollNow, PowerOff, Reboot, ResumeTraining
from powerguard.core.model.policy import Mode
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Ended, run_child
from powerguard.effectors.host.power import COMMAND_LIMIT_S, HostEffector, obstacle, say
from powerguard.effectors.options import OFF_FIFO, HostOptions, ResumeOptions

BOOT = "0d3a7d2c-6a3c-4f0e-9a51-2f1f3f1d9b10"
OFF = PowerOff(id="a1", by_s=1010.0, outage="o1", grade=Grade.FULL, force_after_s=110.0)
RESUME = ResumeTraining(id="a2", by_s=1010.0, outage="o1")


def reboot(force_after_s: float) -> Reboot:
    return Reboot(id="r", by_s=1010.0, outage="o1", force_after_s=force_after_s)


class Spawned:
    """Stands in for child processes: remembers what it was asked to run and answers as told."""

    def __init__(self, ended: Ended | OSError | None = None) -> None:
        self.argvs: list[list[str]] = []
        self._ended = ended or Ended(returncode=0, stdout=b"", stderr=b"")

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        self.argvs.append(list(argv))
        if isinstance(self._ended, OSError):
            raise self._ended
        return self._ended


class Fifo:
    """A FIFO that is listened on, as systemd does: open both ways. What is read stays to be looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._heard = b""
        self._answered = 0
        os.mkfifo(path, 0o600)
        self.end = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def read(self) -> bytes:
        """Return what has come since the last look."""
        self._take()
        heard, self._heard, self._answered = self._heard, b"", 0
        return heard

    async def answer(self) -> None:
        """Say to each word that it is accepted, as powerguard-off does."""
        while True:
            self._take()
            *lines, rest = self._heard[self._answered :].split(b"\n")
            self._answered = len(self._heard) - len(rest)
            for line in filter(None, lines):
                (self.path.parent / "answer").write_bytes(line.ljust(200) + b"accepted\n")
            await asyncio.sleep(0.005)

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._heard += os.read(self.end, 65536)


@pytest.fixture
def fifo() -> Iterator[Fifo]:
    with TemporaryDirectory(prefix="pg host ", dir="/tmp") as folder:
        fifo = Fifo(Path(folder) / "word")
        yield fifo
        os.close(fifo.end)


@pytest.fixture
async def answered(fifo: Fifo) -> AsyncIterator[Fifo]:
    """A FIFO behind which each word is accepted."""
    answering = asyncio.create_task(fifo.answer())
    yield fifo
    answering.cancel()


def effector(options: HostOptions, *, mode: Mode = Mode.ARMED, spawn: Spawned | None = None) -> HostEffector:
    return HostEffector(options, mode=mode, spawn=spawn or Spawned(), clock=lambda: 1000.9, boot=lambda: BOOT)


async def test_the_word_names_this_boot_and_the_deadline_of_its_clock(answered: Fifo) -> None:
    """powerguard-off takes nothing but this line."""
    spawned = Spawned()
    detail = await effector(HostOptions(fifo=str(answered.path)), spawn=spawned).carry_out(OFF)
    assert answered.read() == f"\noff {BOOT} 1110\n".encode()
    assert dict(detail) == {"dry_run": False, "via": "fifo", "deadline_s": 110.0}
    assert spawned.argvs == []


async def test_said_twice_it_is_two_whole_words(answered: Fifo) -> None:
    """After a restart the daemon gives its order again."""
    host = effector(HostOptions(fifo=str(answered.path)))
    await host.carry_out(OFF)
    await host.carry_out(OFF)
    assert answered.read() == f"\noff {BOOT} 1110\n".encode() * 2


@pytest.mark.parametrize(("ordered_s", "meant_s"), [(600.0, 60.0), (30.0, 30.0), (0.0, 0.0), (-5.0, 0.0)])
async def test_the_settings_bound_the_deadline(answered: Fifo, ordered_s: float, meant_s: float) -> None:
    """Never later than force_after_s, and never in the past."""
    order = PowerOff(id="a1", by_s=0.0, outage="o1", grade=Grade.BARE, force_after_s=ordered_s)
    await effector(HostOptions(fifo=str(answered.path), force_after_s=60.0)).carry_out(order)
    assert answered.read() == f"\noff {BOOT} {int(1000.9 + meant_s)}\n".encode()


async def test_a_power_off_under_way_can_be_made_a_reboot(answered: Fifo) -> None:
    """The other word, with the same boot, clock and bounds."""
    host = effector(HostOptions(fifo=str(answered.path), force_after_s=60.0))
    assert dict(await host.carry_out(reboot(600.0))) == {"dry_run": False, "via": "fifo", "deadline_s": 60.0}
    await host.carry_out(reboot(-5.0))
    assert answered.read() == f"\nreboot {BOOT} 1060\n\nreboot {BOOT} 1000\n".encode()


async def test_a_reboot_is_not_for_a_sites_own_power_off() -> None:
    """A program that has given its order cannot be told to have meant another one."""
    spawned = Spawned()
    with pytest.raises(EffectorError, match=r"only host\.kind: systemd"):
        await effector(HostOptions(kind="command", command=["/opt/off"]), spawn=spawned).carry_out(reboot(60.0))
    assert spawned.argvs == []


@pytest.mark.parametrize("kind", ["systemd", "command"])
@pytest.mark.parametrize("mode", [Mode.REHEARSE, Mode.DRY_RUN])
async def test_not_armed_it_only_records(fifo: Fifo, kind: str, mode: Mode) -> None:
    """A host that another program has powered off is not without its training in a rehearsal: that is started."""
    options = HostOptions.model_validate(
        {"kind": kind, "fifo": str(fifo.path), "command": ["/bin/false"] if kind == "command" else []}
    )
    spawned = Spawned()
    host = effector(options, mode=mode, spawn=spawned)
    assert dict(await host.carry_out(OFF)) == {"dry_run": True, "via": "nothing", "deadline_s": 110.0}
    assert dict(await host.carry_out(reboot(60.0))) == {"dry_run": True, "via": "nothing", "deadline_s": 60.0}
    assert (fifo.read(), spawned.argvs) == (b"", [])
    started = dict(await host.carry_out(RESUME))
    assert started == {"dry_run": mode is Mode.DRY_RUN, "via": "nothing" if mode is Mode.DRY_RUN else "systemctl"}
    assert len(spawned.argvs) == (mode is Mode.REHEARSE)


async def test_a_command_gets_the_seconds_that_are_left() -> None:
    """The placeholder becomes whole seconds, in any word, and no shell ever sees it."""
    spawned = Spawned()
    options = HostOptions(kind="command", command=["/opt/off", "--within={deadline_s}", "a b; $(c)"])
    detail = await effector(options, spawn=spawned).carry_out(OFF)
    assert spawned.argvs == [["/opt/off", "--within=110", "a b; $(c)"]]
    assert dict(detail)["via"] == "command"


async def test_a_real_command_really_runs(tmp_path: Path) -> None:
    """Through the one way in which the daemon starts programs."""
    result = tmp_path / "result"
    script = 'printf %s "$1" >"$0"'
    options = HostOptions(kind="command", command=["/bin/sh", "-c", script, str(result), "{deadline_s}"])
    await HostEffector(options, spawn=run_child, clock=lambda: 0.0).carry_out(OFF)
    assert result.read_text(encoding="ascii") == "110"


async def test_a_command_that_leaves_a_child_behind_has_given_its_order() -> None:
    """Its limit comes before that of the order: else the power-off would count as failed, and be ordered again."""
    ended = Ended(returncode=0, stdout=b"", stderr=b"", left_open=True)
    options = HostOptions(kind="command", command=["/opt/off"])
    assert dict(await effector(options, spawn=Spawned(ended)).carry_out(OFF))["via"] == "command"
    assert COMMAND_LIMIT_S < RETRY_S


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Ended(returncode=1, stdout=b"", stderr=b"first\nno such verb\n"), "/opt/off: exit status 1: no such verb"),
        (Ended(returncode=2, stdout=b"", stderr=b""), "/opt/off: exit status 2: no output"),
        (Ended(returncode=-9, stdout=b"", stderr=b"", timed_out=True), "/opt/off: did not return within 4 s"),
        (FileNotFoundError(2, "No such file or directory"), "/opt/off: cannot be started: No such file"),
    ],
)
async def test_a_command_that_fails_says_how(ended: Ended | OSError, said: str) -> None:
    host = effector(HostOptions(kind="command", command=["/opt/off"]), spawn=Spawned(ended))
    with pytest.raises(EffectorError) as caught:
        await host.carry_out(OFF)
    assert said in str(caught.value)


async def test_nobody_listens(tmp_path: Path) -> None:
    """No socket unit, or a FIFO without a reader: the same one line that says what to do."""
    right = "powerguard-off.socket is not listening: systemctl restart powerguard-off.socket"
    with pytest.raises(EffectorError, match=right):
        await effector(HostOptions(fifo=str(tmp_path / "word"))).carry_out(OFF)
    os.mkfifo(tmp_path / "word", 0o600)
    with pytest.raises(EffectorError, match=right):
        await effector(HostOptions(fifo=str(tmp_path / "word"))).carry_out(OFF)


async def test_only_a_fifo_of_root_or_of_ours_is_written_to(fifo: Fifo, tmp_path: Path) -> None:
    """A file, a link, or a FIFO that others can write to is somebody's trap or somebody's mistake."""
    plain = tmp_path / "plain"
    plain.write_text("", encoding="ascii")
    with pytest.raises(EffectorError, match="is not a FIFO"):
        await effector(HostOptions(fifo=str(plain))).carry_out(OFF)
    link = tmp_path / "link"
    link.symlink_to(fifo.path)
    with pytest.raises(EffectorError, match="is a symbolic link"):
        await effector(HostOptions(fifo=str(link))).carry_out(OFF)
    fifo.path.chmod(0o622)
    with pytest.raises(EffectorError, match="mode 0622: other users could write here"):
        await effector(HostOptions(fifo=str(fifo.path))).carry_out(OFF)
    assert (plain.read_bytes(), fifo.read()) == (b"", b"")


@pytest.mark.root
async def test_a_fifo_of_another_user_is_refused(fifo: Fifo) -> None:
    os.chown(fifo.path, 65534, 65534)
    with pytest.raises(EffectorError, match="owner 65534"):
        await effector(HostOptions(fifo=str(fifo.path))).carry_out(OFF)
    assert fifo.read() == b""


@pytest.mark.root
def test_root_accepts_the_daemons_fifo(fifo: Fifo, tmp_path: Path) -> None:
    """`doctor` as root looks at a FIFO that systemd gave to the daemon's user. The users are the test's own."""
    os.chown(fifo.path, 64999, 64999)
    users = tmp_path / "passwd"
    script = (
        "import sys; from powerguard.effectors.host.power import obstacle;"
        "from powerguard.effectors.options import *;"
        "print(obstacle(HostOptions(fifo=sys.argv[1])))"
    )
    mount = 'mount --bind "$1" /etc/passwd && exec "$2" -c "$3" "$4"'
    said = []
    for name in ("powerguard", "somebody"):
        users.write_text(f"root:x:0:0::/root:/bin/sh\n{name}:x:64999:64999::/:/bin/sh\n", encoding="ascii")
        argv = ["unshare", "--mount", "bash", "-c", mount, "bash", str(users), sys.executable, script, str(fifo.path)]
        said.append(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.strip())
    assert said[0] == ""
    assert "owner 64999" in said[1]
    assert fifo.read() == b""


async def test_the_daemon_checks_that_it_can_power_off(tmp_path: Path) -> None:
    """At its start, and on: what breaks and what is repaired both show. The only word is one that does nothing."""
    path = tmp_path / "word"
    answering: list[asyncio.Task[None]] = []
    host = effector(HostOptions(fifo=str(path)))
    seen: list[tuple[str, float]] = []
    made: list[Fifo] = []

    async def rest(seconds: float) -> None:
        seen.append((host.trouble, seconds))
        if len(seen) == 1:
            made.append(Fifo(path))
            answering.append(asyncio.create_task(made[0].answer()))
        elif len(seen) == 3:
            path.unlink()
        elif len(seen) == 4:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await host.keep(rest)
    answering[0].cancel()
    assert [bool(trouble) for trouble, _ in seen] == [True, False, False, True]
    assert [seconds for _, seconds in seen] == [5.0, 60.0, 60.0, 5.0], "a repair shows soon"
    assert re.fullmatch(rf"\nhello {BOOT} \d+\n", made[0].read().decode()), "asked once, and not each minute"
    os.close(made[0].end)


@pytest.mark.parametrize(
    ("said", "because"),
    [
        (b"off {boot} 1110 refused: meant for another boot\n", "did not obey: refused: meant for another boot"),
        (b"off {boot} 1110 accepted", "has not answered"),  # half written
        (b"off {boot} 1109 accepted\n", "has not answered"),  # of another word
        (b"\xff" * 256, "has not answered"),
        (b"", "has not answered"),
    ],
)
async def test_a_word_that_is_not_obeyed_is_no_power_off(fifo: Fifo, said: bytes, because: str) -> None:
    """What was written has powered nothing off yet: without an answer the core orders it again."""
    (fifo.path.parent / "answer").write_bytes(said.replace(b"{boot}", BOOT.encode()))
    with pytest.raises(EffectorError, match=because) as caught:
        await say(str(fifo.path), f"off {BOOT} 1110", limit_s=0.2)
    assert caught.value.timed_out is ("answered" in because), "else it may still be obeyed"


@pytest.mark.root
async def test_an_answer_of_another_user_is_none(fifo: Fifo) -> None:
    answer = fifo.path.parent / "answer"
    answer.write_bytes(f"off {BOOT} 1110 accepted\n".encode())
    await say(str(fifo.path), f"off {BOOT} 1110", limit_s=30.0)
    os.chown(answer, 65534, 65534)
    with pytest.raises(EffectorError, match="has not answered"):
        await say(str(fifo.path), f"off {BOOT} 1110", limit_s=0.2)


def test_a_command_that_is_not_there_is_an_obstacle(tmp_path: Path) -> None:
    """A program of the site's own: executable or not."""
    program = tmp_path / "off"
    options = HostOptions(kind="command", command=[str(program)])
    assert "is not an executable file" in obstacle(options)
    program.write_text("#!/bin/sh\n", encoding="ascii")
    program.chmod(0o755)
    assert obstacle(options) == ""


def fill(fifo: Fifo) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fifo.end, b"x" * 4096)


async def test_a_full_fifo_never_blocks(fifo: Fifo) -> None:
    """powerguard-off does not read: an error after 4 s, in which the daemon does everything else."""
    fill(fifo)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.1)

    ticking = asyncio.create_task(tick())
    with pytest.raises(EffectorError, match="full for 4 s: powerguard-off does not read"):
        await effector(HostOptions(fifo=str(fifo.path))).carry_out(OFF)
    ticking.cancel()
    assert ticks > 10


async def test_a_word_waits_for_room_in_a_full_fifo(fifo: Fifo) -> None:
    """Its deadline is that of the order, and not of the moment when there was room."""
    fill(fifo)
    waiting = asyncio.create_task(effector(HostOptions(fifo=str(fifo.path))).carry_out(OFF))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert set(fifo.read()) == {ord("x")}
    answering = asyncio.create_task(fifo.answer())
    assert dict(await waiting)["via"] == "fifo"
    answering.cancel()
    assert fifo.read() == f"\noff {BOOT} 1110\n".encode()


async def test_under_test_the_machine_itself_is_out_of_reach(tmp_path: Path) -> None:
    """Whatever the settings say: not the real FIFO, not by a detour, and no unit of this machine."""
    assert os.environ["POWERGUARD_UNDER_TEST"] == "1"
    for path in (OFF_FIFO, "/run/../run/powerguard-off/word", "/run//powerguard-off/./word"):
        with pytest.raises(EffectorError, match="refused under test"):
            await effector(HostOptions(fifo=path)).carry_out(OFF)
    with pytest.raises(EffectorError, match="refused under test"):
        await HostEffector(HostOptions(), spawn=run_child).carry_out(RESUME)


async def test_training_is_started_by_its_target() -> None:
    """Without waiting for it, and without ever asking for a password."""
    spawned = Spawned()
    detail = await effector(HostOptions(), spawn=spawned).carry_out(RESUME)
    assert spawned.argvs == [["systemctl", "start", "--no-block", "--no-ask-password", "powerguard-resume.target"]]
    assert dict(detail) == {"dry_run": False, "via": "systemctl"}


async def test_training_is_started_by_a_command_where_one_is_set() -> None:
    spawned = Spawned()
    resume = ResumeOptions(command=["/opt/train", "start"])
    host = HostEffector(HostOptions(), resume=resume, spawn=spawned)
    assert dict(await host.carry_out(RESUME))["via"] == "command"
    assert spawned.argvs == [["/opt/train", "start"]]


async def test_a_missing_right_to_start_names_the_rule() -> None:
    """The usual mistake: the polkit rule was not installed."""
    denied = Ended(returncode=4, stdout=b"", stderr=b"Failed to start: Interactive authentication required.\n")
    with pytest.raises(EffectorError, match=r"Interactive authentication required.*polkit rule.*powerguard\.rules"):
        await effector(HostOptions(), spawn=Spawned(denied)).carry_out(RESUME)


async def test_an_action_of_somebody_else_is_refused() -> None:
    with pytest.raises(EffectorError, match="cannot carry out PollNow"):
        await effector(HostOptions()).carry_out(PollNow(id="a3", by_s=0.0, ups="rack"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "command"}, "kind command needs command"),
        ({"kind": "systemd", "command": ["/bin/x"]}, "command is for kind command only"),
        ({"kind": "magic"}, "systemd"),
        ({"force_after_s": 9}, "greater than or equal to 10"),
        ({"force_after_s": 3601}, "less than or equal to 3600"),
        ({"fifo": "word"}, "pattern"),
        ({"kind": "command", "command": [""]}, "at least 1 character"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        HostOptions.model_validate(settings)
    assert said in str(caught.value)


@pytest.mark.parametrize("target", ["", "--force", "x; reboot", "a.mount", "../x.target"])
def test_a_target_is_a_unit_and_nothing_else(target: str) -> None:
    """It stands in an argument list: an option in disguise must not get there."""
    with pytest.raises(ValidationError):
        ResumeOptions(target=target)
