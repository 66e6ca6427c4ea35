"""How long a stop took, as the boot after it finds out: from our journal, and from the last word of the system's."""

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from powerguard.core.energy import needs
from powerguard.core.model.actions import Action, Detail, Grade
from powerguard.core.model.policy import Mode
from powerguard.core.model.state import Online, Recovery, Shutdown
from powerguard.daemon.attempt import rest
from powerguard.daemon.boots import (
    TAIL_S,
    LastKnownMoment,
    PoweredOff,
    last_word,
    later,
    measure,
    parse,
    read_mark,
    took_s,
)
from powerguard.daemon.journal import Line
from powerguard.daemon.loop import Loop
from powerguard.effectors.child import Ended, run_child
from tests.daemon.looped import EPOCH_S, Doer, World, in_virtual_time, until
from tests.peers import require

BOOT = "6f1d2c3b-0000-4000-8000-00000000000a"
NEXT = "6f1d2c3b-0000-4000-8000-00000000000b"
PLAIN = BOOT.replace("-", "")
STOPPED = "d93fb3c9c24d451a97cea615ce59c00b"


def entry(wall_s: float, monotonic_s: float, *, boot: str = PLAIN, message_id: str = STOPPED) -> bytes:
    """One line as journalctl 252 prints it: numbers as strings, microseconds, a cursor."""
    given = {
        "_BOOT_ID": boot,
        "__REALTIME_TIMESTAMP": str(round(wall_s * 1e6)),
        "__MONOTONIC_TIMESTAMP": str(round(monotonic_s * 1e6)),
        "__CURSOR": f"s=7d5e4ba0789f4f27a956939e078e8b3f;i=1b4;b={boot};m=3281eabe7;t=660c644686131;x=ac4649ea688b97de",
        "MESSAGE_ID": message_id,
    }
    return json.dumps(given).encode() + b"\n"


@dataclass
class Journalctl:
    """Stands in for the program at our own port: answers one recorded line, and remembers what it was asked."""

    stdout: bytes = b""
    stderr: bytes = b""
    returncode: int = 0
    timed_out: bool = False
    error: OSError | None = None
    asked: list[Sequence[str]] = field(default_factory=list)

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        assert limit_s <= 60.0
        self.asked.append(argv)
        if self.error is not None:
            raise self.error
        return Ended(returncode=self.returncode, stdout=self.stdout, stderr=self.stderr, timed_out=self.timed_out)


# --- The whole way: an outage, a power-off, the next boot -----------------------------------------------------------


def world_of(tmp_path: Path, **changes: object) -> World:
    world = World(tmp_path / "journal.sqlite")
    world.policy = replace(world.policy, boot_id=BOOT, **changes)  # type: ignore[arg-type]
    return world


async def power_off(world: World) -> Line:
    """Run an outage to its power-off; returns the line of the commit, as it is in the file."""
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Shutdown))
        await until(lambda: world.host.done)
        await rest(1.0)
    await rest(1800.0)
    world.ups.utility = True
    return next(line for line in world.lines() if line.event == "phase_changed" and "shutdown" in str(line.payload))


@contextlib.asynccontextmanager
async def measuring(world: World, spawn: Journalctl, mark: LastKnownMoment | None = None) -> AsyncIterator[Loop]:
    """A daemon of this boot, with the task that looks back; in virtual time no file can be read beside the loop."""

    async def mark_of(_boot: str) -> LastKnownMoment | None:
        return mark

    async with world.running() as daemon:
        task = asyncio.get_running_loop().create_task(measure(daemon, spawn, mark_of))
        await rest(2.0)
        assert not task.done(), "it must not end: whatever ends is started anew"
        yield daemon
        task.cancel()


def stops(daemon: Loop) -> tuple[float, ...]:
    return needs.samples(daemon.state.learned, "stop")


@in_virtual_time
async def test_a_stop_is_measured_once(tmp_path: Path) -> None:
    """From the commit to the last word of that boot; a daemon that is restarted in this boot counts nothing again."""
    world = world_of(tmp_path)
    latch = await power_off(world)
    world.next_boot(NEXT)
    spawn = Journalctl(entry(latch.wall + 31.0, latch.at_s + 31.0))
    async with measuring(world, spawn) as daemon:
        (stop,) = stops(daemon)
        assert stop == pytest.approx(31.0 + TAIL_S)
        (boot,) = needs.samples(daemon.state.learned, "boot")
        assert 20.0 <= boot < 21.0, "the clock of this boot when its recovery began"
        assert isinstance(daemon.state.phase, Recovery)
        await rest(10.0)
    async with measuring(world, spawn) as daemon:
        assert len(stops(daemon)) == 1
        assert len(needs.samples(daemon.state.learned, "boot")) == 1
    (asked,) = spawn.asked
    assert asked[0] == "journalctl"
    assert PLAIN in asked


@in_virtual_time
async def test_a_stop_is_measured_where_no_journal_is_kept(tmp_path: Path) -> None:
    """By the mark alone."""
    world = world_of(tmp_path)
    latch = await power_off(world)
    world.next_boot(NEXT)
    mark = LastKnownMoment(wall_s=latch.wall + 31.0, monotonic_s=latch.at_s + 31.0, stopped=True)
    async with measuring(world, Journalctl(returncode=1), mark) as daemon:
        assert stops(daemon) == (pytest.approx(31.0 + TAIL_S),)


@in_virtual_time
async def test_the_way_back_to_training_is_measured(tmp_path: Path) -> None:
    """Fed when training has been started; a person who had to start it is no measurement."""
    for error, count in (("", 1), ("no such target", 0)):
        folder = tmp_path / f"{count}"
        folder.mkdir()
        world = world_of(folder)
        await power_off(world)
        world.next_boot(NEXT)
        world.host = Doer(world.clock, error=error)
        async with measuring(world, Journalctl()) as daemon:
            await until(lambda daemon=daemon: isinstance(daemon.state.phase, Online), 6 * 3600.0)
            await rest(1.0)
            resumed = needs.samples(daemon.state.learned, "resume")
            assert len(resumed) == count
            assert all(10.0 < seconds < 6 * 3600.0 for seconds in resumed)


@in_virtual_time
async def test_three_stops_replace_what_was_presumed(tmp_path: Path) -> None:
    """The measurements survive boots, and the policy that decides is made of them."""
    world = world_of(tmp_path)
    boots = [f"6f1d2c3b-0000-4000-8000-00000000000{digit}" for digit in "abcd"]
    latch = await power_off(world)
    for number, (went, came) in enumerate(itertools.pairwise(boots)):
        world.next_boot(came)
        world.host.done.clear()
        seconds = 20.0 + number
        spawn = Journalctl(entry(latch.wall + seconds, latch.at_s + seconds, boot=went.replace("-", "")))
        async with measuring(world, spawn) as daemon:
            assert len(stops(daemon)) == number + 1
            await until(lambda daemon=daemon: isinstance(daemon.state.phase, Online), 6 * 3600.0)
            await rest(61.0)
            assert daemon.policy.stop_q95_s == (110.0 if number < 2 else pytest.approx((22.0 + TAIL_S) * (1 + 0.5 / 3)))
        await rest(10 * 3600.0)
        await power_off(world)
        latch = [line for line in world.lines() if line.event == "phase_changed" and "shutdown" in str(line.payload)][
            -1
        ]


@in_virtual_time
async def test_a_host_that_went_dark_by_itself(tmp_path: Path) -> None:
    """No commit of ours, no stop of ours; how long the boot took is known all the same."""
    world = world_of(tmp_path)
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        await until(lambda: not isinstance(daemon.state.phase, Online))
        await rest(20.0)
    await rest(600.0)
    world.next_boot(NEXT)
    spawn = Journalctl(entry(EPOCH_S, 0.0))
    async with measuring(world, spawn) as daemon:
        assert (stops(daemon), spawn.asked) == ((), [])
        assert len(needs.samples(daemon.state.learned, "boot")) == 1


@in_virtual_time
async def test_a_daemon_that_a_person_started_late(tmp_path: Path) -> None:
    """The stop is as true as ever; how long the host was up by then is not how long it boots."""
    world = world_of(tmp_path)
    latch = await power_off(world)
    world.next_boot(NEXT)
    await rest(3600.0)
    async with measuring(world, Journalctl(entry(latch.wall + 31.0, latch.at_s + 31.0))) as daemon:
        assert len(stops(daemon)) == 1
        assert needs.samples(daemon.state.learned, "boot") == ()


@in_virtual_time
async def test_a_boot_without_an_outage_before_it(tmp_path: Path) -> None:
    """An upgrade, a reboot by hand: nobody is asked, and nothing is learned."""
    world = world_of(tmp_path)
    async with world.running():
        await rest(60.0)
    world.next_boot(NEXT)
    spawn = Journalctl()
    async with measuring(world, spawn) as daemon:
        assert (daemon.state.learned.needs, spawn.asked) == ((), [])


class Recorder(Doer):
    """The host effector of a dry-run: it says what it would have done."""

    async def carry_out(self, action: Action) -> Detail:
        await super().carry_out(action)
        return (("dry_run", True),)


@in_virtual_time
async def test_dry_run_stops_nothing(tmp_path: Path) -> None:
    """The power-off was recorded and not done; that somebody else rebooted then is no stop of ours."""
    world = world_of(tmp_path, mode=Mode.DRY_RUN)
    world.host = Recorder(world.clock)
    await power_off(world)
    world.next_boot(NEXT)
    spawn = Journalctl()
    async with measuring(world, spawn) as daemon:
        assert isinstance(daemon.state.phase, Recovery)
        assert (stops(daemon), spawn.asked) == ((), [])


# --- What can be believed ---------------------------------------------------------------------------------------------

ORDER = PoweredOff(boot_id=BOOT, latched_at_s=900.0, latched_wall_s=EPOCH_S, grade=Grade.FULL, force_s=110.0)


def word(seconds: float, *, stopped: bool = True, drift_s: float = 0.0) -> LastKnownMoment:
    return LastKnownMoment(wall_s=EPOCH_S + seconds + drift_s, monotonic_s=900.0 + seconds, stopped=stopped)


@pytest.mark.parametrize(("seconds", "drift_s"), [(0.0, 0.0), (31.0, 0.0), (31.0, 4.9), (31.0, -4.9), (110.0, 0.0)])
def test_a_stop_in_order_counts_with_its_tail(seconds: float, drift_s: float) -> None:
    """By the clock that nobody sets; the wall clock only has to agree."""
    assert took_s(ORDER, word(seconds, drift_s=drift_s)) == pytest.approx(seconds + TAIL_S)


@pytest.mark.parametrize(
    ("last", "because"),
    [
        (word(31.0, drift_s=5.1), "two clocks"),
        (word(31.0, drift_s=-3600.0), "two clocks"),
        (word(-1.0), "is not the end of that stop"),
        (word(171.0), "is not the end of that stop"),
        (word(31.0, stopped=False), "breaks off 31.0 s after the commit"),
        ("journalctl: no", "journalctl: no"),
    ],
)
def test_what_cannot_be_believed_is_no_sample(last: LastKnownMoment | str, because: str) -> None:
    result = took_s(ORDER, last)
    assert isinstance(result, str)
    assert because in result


@pytest.mark.parametrize(("seconds", "counts"), [(106.9, None), (107.5, 110.0), (111.0, 111.0)])
def test_a_full_stop_that_was_cut_took_all_that_it_was_given(seconds: float, counts: float | None) -> None:
    result = took_s(ORDER, word(seconds, stopped=False))
    assert isinstance(result, str) if counts is None else result == pytest.approx(counts)


def test_a_lesser_stop_that_was_cut_says_nothing() -> None:
    """Cut after 45 s it may have needed 110; a bare one is nobody's own stop at all."""
    short = replace(ORDER, grade=Grade.SHORT, force_s=45.0)
    assert isinstance(took_s(short, word(45.0, stopped=False)), str)
    assert took_s(short, word(30.0)) == pytest.approx(30.0 + TAIL_S)
    assert isinstance(took_s(replace(ORDER, grade=Grade.BARE, force_s=3.0), word(3.0)), str)


# --- The mark of powerguard-off ---------------------------------------------------------------------------------------


def marked(seconds: float, drift_s: float = 0.0, boot: str = BOOT) -> bytes:
    return f"{boot} {900.0 + seconds:.2f} {EPOCH_S + seconds + drift_s:.6f}\n".encode()


async def test_the_mark_shows_what_journald_cannot(tmp_path: Path) -> None:
    """Leftover processes were waited for, or no journal is kept at all: the stop ended when the mark says."""
    path = tmp_path / "stopped"
    path.write_bytes(marked(52.0))
    mark = await read_mark(path, BOOT)
    for last in (word(20.0), word(20.0, stopped=False), "journalctl: no entry of that boot"):
        assert took_s(ORDER, later(ORDER, last, mark)) == pytest.approx(52.0 + TAIL_S)
    assert took_s(ORDER, later(ORDER, word(53.0), mark)) == pytest.approx(53.0 + TAIL_S)


async def test_a_mark_that_goes_on_to_the_deadline_was_cut_there(tmp_path: Path) -> None:
    """What ignored SIGTERM took all that a full stop was given; of a shorter one nothing is learned."""
    path = tmp_path / "stopped"
    path.write_bytes(marked(109.5))
    assert took_s(ORDER, later(ORDER, word(20.0), await read_mark(path, BOOT))) == pytest.approx(110.0)
    short = replace(ORDER, grade=Grade.SHORT, force_s=45.0)
    path.write_bytes(marked(44.5))
    assert isinstance(took_s(short, later(short, word(20.0), await read_mark(path, BOOT))), str)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        marked(52.0)[:-1],
        marked(52.0)[:50],
        marked(52.0) * 2,
        marked(52.0, boot=NEXT),
        b"\xff" * 80,
        b"9" * 4096,
        BOOT.encode() + b" nan 1.000000\n",
    ],
)
async def test_a_mark_that_is_torn_or_of_another_boot_is_none(tmp_path: Path, raw: bytes) -> None:
    """The power went while it was written, or it was left by a stop before the last one."""
    path = tmp_path / "stopped"
    path.write_bytes(raw)
    assert await read_mark(path, BOOT) is None
    assert await read_mark(tmp_path / "none", BOOT) is None


async def test_a_mark_whose_clocks_disagree_is_no_sample(tmp_path: Path) -> None:
    """The wall clock was set during the stop, or the host has slept."""
    path = tmp_path / "stopped"
    path.write_bytes(marked(52.0, drift_s=-3600.0))
    result = took_s(ORDER, later(ORDER, word(20.0), await read_mark(path, BOOT)))
    assert isinstance(result, str)
    assert "two clocks" in result


# --- What journalctl says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"-- No entries --\n",
        b"[]",
        b"{}",
        b"3",
        b"[" * 5000,
        entry(1.0, 2.0) * 2,
        entry(1.0, 2.0).replace(b'"2000000"', b"null"),
        entry(1.0, 2.0).replace(b'"2000000"', b'"soon"'),
    ],
)
def test_an_answer_that_is_none(raw: bytes) -> None:
    assert isinstance(parse(raw, PLAIN), str)


def test_another_boots_entry_is_not_taken() -> None:
    assert parse(entry(1.0, 2.0), PLAIN) == LastKnownMoment(wall_s=1.0, monotonic_s=2.0, stopped=True)
    assert parse(entry(1.0, 2.0, message_id="x"), PLAIN) == LastKnownMoment(wall_s=1.0, monotonic_s=2.0, stopped=False)
    assert isinstance(parse(entry(1.0, 2.0, boot=NEXT.replace("-", "")), PLAIN), str)


@pytest.mark.parametrize(
    ("spawn", "because"),
    [
        (Journalctl(returncode=1, stderr=b"Data is not available: No such boot ID in journal\n"), "No such boot ID"),
        (Journalctl(stdout=b"\n"), "no entry of that boot"),
        (Journalctl(timed_out=True, returncode=-9), "no answer within"),
        (Journalctl(error=FileNotFoundError(2, "No such file or directory")), "No such file"),
    ],
)
async def test_a_journal_that_has_no_answer(spawn: Journalctl, because: str) -> None:
    result = await last_word(BOOT, spawn)
    assert isinstance(result, str)
    assert because in result


@pytest.mark.parametrize("name", ["unknown", "boot-a-of-the-test", "", "../../etc", "-1", PLAIN.upper()])
async def test_no_program_is_asked_for_what_is_no_boot(name: str) -> None:
    spawn = Journalctl()
    assert isinstance(await last_word(name, spawn), str)
    assert spawn.asked == []


@pytest.mark.peer("journalctl")
async def test_the_real_program_on_a_boot_that_never_was() -> None:
    """Its exit status and its words for a boot that it does not know are understood as "no sample"."""
    require("journalctl")
    result = await last_word("00000000-0000-4000-8000-000000000000", run_child)
    assert isinstance(result, str)
    assert result.startswith("journalctl: ")


JOURNALD = """
set -e
mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /var/log
mkdir -p /run/systemd/journal "/var/log/journal/$(cat /etc/machine-id)"
"$1" & journald=$!
for _ in $(seq 500); do systemd-cat echo up && break; sleep 0.1; done  # its socket is there before it listens
for _ in $(seq 500); do journalctl --quiet MESSAGE=up | grep -q up && break; sleep 0.1; done
kill -"$2" "$journald"; wait "$journald" || true
journalctl --boot "$(tr -d - < /proc/sys/kernel/random/boot_id)" --lines 1 --output json \
    --output-fields _BOOT_ID,MESSAGE_ID --no-pager --quiet
"""


@pytest.mark.root
@pytest.mark.parametrize(("how", "stopped"), [("TERM", True), ("KILL", False)])
def test_the_last_word_of_a_real_journald(how: str, stopped: bool) -> None:
    """A journald in a mount namespace of its own, ended in order or killed: only the first one says its last word."""
    journald = Path("/lib/systemd/systemd-journald")
    if not journald.exists() or shutil.which("unshare") is None or not Path("/etc/machine-id").exists():
        pytest.skip("no systemd-journald here")
    argv = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "bash",
        "-c",
        JOURNALD,
        "bash",
        str(journald),
        how,
        "socat",
    ]
    before = time.time(), time.monotonic()
    ended = subprocess.run(argv, capture_output=True, timeout=100, check=False)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    result = parse(ended.stdout, boot)
    assert isinstance(result, LastKnownMoment), ended.stderr
    assert result.stopped is stopped
    assert before[0] <= result.wall_s <= time.time()
    assert before[1] <= result.monotonic_s <= time.monotonic()


def test_the_word_of_journald_is_systemds_own() -> None:
    """The number is systemd's; its catalogue names it where it is installed."""
    catalogue = Path("/usr/lib/systemd/catalog/systemd.catalog")
    if not catalogue.exists():
        pytest.skip("no catalogue here")
    assert f"-- {STOPPED}\nSubject: The journal has been stopped" in catalogue.read_text(encoding="utf-8")
