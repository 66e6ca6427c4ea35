"""The root helper `powerguard-off` as a plain process: it alone stands between a word and a dark host.

It reads from a FIFO in a temporary folder and finds our own small tools in place of systemctl, sync, kill and sysrq,
so that nothing can happen to this machine; the real ones are out of its reach (POWERGUARD_UNDER_TEST).
"""

import asyncio
import contextlib
import fcntl
import os
import select
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from powerguard.clock import boot_id, boottime_s
from powerguard.core.model.actions import Grade, PowerOff
from powerguard.effectors.base import EffectorError
from powerguard.effectors.host.power import HostEffector, say, unanswered
from powerguard.effectors.options import HostOptions
from tests.effectors.host.test_findings import found

PROGRAM = Path(__file__).parents[3] / "systemd" / "powerguard-off"
SOCKET = PROGRAM.with_suffix(".socket")
PIPE_SIZE = next(
    int(line.removeprefix("PipeSize=")) for line in SOCKET.read_text("ascii").splitlines() if "PipeSize=" in line
)
STARTED = "systemctl start --no-block --job-mode=replace-irreversibly poweroff.target"
FORCED = "systemctl poweroff --force --force"
HARD_S = 2.0
SLACK_S = 30.0
"""For a busy machine: what is told apart is a program that hangs for minutes."""

OFF = PowerOff(id="a1", by_s=0.0, outage="o1", grade=Grade.FULL, force_after_s=60.0)
REBOOTED = "systemctl reboot --force --force"
RECORDING_TOOL = '#!/bin/bash\necho "${0##*/} $*" >>"${0%/*}/calls"\n'


class Helper:
    """powerguard-off under test, its FIFO and the tools that it finds."""

    def __init__(self, folder: Path) -> None:
        """Lay out a FIFO and four tools that record how they are called."""
        self.folder = folder
        self.tools = folder / "tools"
        self.calls_file = self.tools / "calls"
        self.log_file = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.tools.mkdir()
        for name in ("systemctl", "sync", "kill", "sysrq"):
            self.tool(name, "")
        os.mkfifo(folder / "word")
        self.fifo = os.open(folder / "word", os.O_RDWR)
        fcntl.fcntl(self.fifo, fcntl.F_SETPIPE_SZ, PIPE_SIZE)

    def tool(self, name: str, script: str) -> None:
        """Make a tool that records its call and then runs the script."""
        path = self.tools / name
        path.write_text(RECORDING_TOOL + script + "\n", encoding="ascii")
        path.chmod(0o755)

    def start(self, **environment: str) -> None:
        """Start it as systemd does: the FIFO, open both ways, is its standard input."""
        settings = {"POWERGUARD_UNDER_TEST": "1", "POWERGUARD_OFF_TOOLS": str(self.tools)}
        settings |= {"POWERGUARD_OFF_ANSWERS": str(self.folder), **environment}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                ["/bin/bash", PROGRAM],
                stdin=self.fifo,
                stdout=log,
                stderr=log,
                env={name: value for name, value in settings.items() if value},
                start_new_session=True,
            )

    def start_and_wait(self) -> None:
        """Start it, and wait until it listens: who speaks to it waits for 4 s."""
        self.start()
        until((self.folder / "answer").exists)

    def say(self, word: str) -> None:
        """Write one word with its end of line."""
        os.write(self.fifo, word.encode() + b"\n")

    def off(self, in_s: float) -> None:
        """Say a right word."""
        self.say(f"off {boot_id()} {int(boottime_s() + in_s)}")

    def reboot(self, in_s: float) -> None:
        """Say the word that turns it into a reboot."""
        self.say(f"reboot {boot_id()} {int(boottime_s() + in_s)}")

    @property
    def order(self) -> Path:
        """What it leaves for the last step of the shutdown."""
        return self.tools / "reboot"

    def has_ordered_reboot(self) -> bool:
        """Say whether the order is this boot's; until then its file is there without one."""
        return self.order.is_file() and self.order.read_text(encoding="ascii") == f"{boot_id()}\n"

    @property
    def calls(self) -> list[str]:
        """Every tool called so far, with its arguments."""
        return self.calls_file.read_text(encoding="ascii").splitlines() if self.calls_file.exists() else []

    @property
    def log(self) -> str:
        """Everything logged so far."""
        return self.log_file.read_text(encoding="ascii")

    def ended_within(self, limit_s: float) -> int:
        """Wait for its end."""
        assert self.process is not None
        return self.process.wait(timeout=limit_s)

    def running(self) -> bool:
        """Say whether it still listens."""
        return self.process is not None and self.process.poll() is None

    def close(self) -> None:
        """End it, and every child it left behind."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30)
        os.close(self.fifo)


@pytest.fixture
def helper() -> Iterator[Helper]:
    """Give a helper that is not started yet."""
    folder = Path(tempfile.mkdtemp(prefix="pg off ", dir="/tmp"))
    helper = Helper(folder)
    yield helper
    helper.close()
    shutil.rmtree(folder)


def until(what: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for another process to have got there."""
    end_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.02)


def test_a_word_starts_the_power_off_at_once_and_forces_it_at_the_deadline(helper: Helper) -> None:
    """The orderly way first, the hard way not before the deadline and not long after it."""
    helper.start()
    said_s = time.monotonic()
    helper.off(in_s=4)
    until(lambda: STARTED in helper.calls)
    assert helper.calls[0] == STARTED
    assert helper.ended_within(60) == 0
    assert 2.0 <= time.monotonic() - said_s <= 4 + HARD_S + SLACK_S
    found = [call for call in helper.calls if call in {STARTED, FORCED, "sync ", "sysrq o"}]
    assert found == [STARTED, "sync ", "sync ", FORCED, "sysrq o"]


@pytest.mark.parametrize(
    ("word", "because"),
    [
        (" ", "not a word"),
        ("off", "not a word"),
        ("on {boot} {now}", "not a word"),
        ("OFF {boot} {now}", "not a word"),
        ("offreboot {boot} {now}", "not a word"),
        ("reboot {boot}", "not a word"),
        ("reboot {boot} {now}", "no power-off of ours is under way"),
        ("reboot 00000000-0000-0000-0000-000000000000 {now}", "meant for another boot"),
        ("off {boot} {now} please", "not a word"),
        ("off {boot}  {now}", "not a word"),
        ("off {boot} -5", "not a word"),
        ("off {boot} {now}.5", "not a word"),
        ("off {boot} 010", "not a word"),
        ("off {boot} 99999999999999999999", "not a word"),
        ("off {boot} $(reboot)", "not a word"),
        ("off {boot} a[$(reboot)]", "not a word"),
        ("off 00000000-0000-0000-0000-000000000000 {now}", "meant for another boot"),
        ("off {boot} {long_ago}", "stale"),
        ("off {boot} {far}", "away; at most"),
        ("off {boot} {now}" + " " * 300, "not a word"),
        ("\x1b]0;owned\x07", "not a word"),
        ("x" * 200 + "off {boot} {now}", "not a word"),
        ("x" * 199 + "off {boot} {now}", "not a word"),
        ("o\0ff {boot} {now}", "not a word"),
        ("off {boot} {now}\0", "not a word"),
        ("\0off {boot} {now}", "not a word"),
        ("off {boot} {now}\r", "not a word"),
    ],
)
def test_anything_but_a_right_word_is_refused_and_logged(helper: Helper, word: str, because: str) -> None:
    """A stale, replayed, torn or hostile word must not take a host down, nor keep the right one from being heard."""
    now = int(boottime_s())
    helper.start()
    helper.say(word.format(boot=boot_id(), now=now, long_ago=max(0, now - 61), far=now + 7300))
    until(lambda: "refused" in helper.log)
    assert because in helper.log
    assert "\x1b" not in helper.log
    assert helper.calls == []
    assert helper.running()
    helper.off(in_s=60)
    until(lambda: STARTED in helper.calls)


def test_each_word_is_answered(helper: Helper) -> None:
    """The daemon reads what became of its word; what is no word leaves the answer as it is."""
    answer = helper.folder / "answer"
    helper.start()
    until(answer.exists)
    assert stat.S_IMODE(answer.stat().st_mode) == 0o644
    other = "00000000-0000-0000-0000-000000000000"
    now = int(boottime_s())
    for word, said in (
        (f"hello {other} 17", f"refused: meant for another boot; this one is {boot_id()}"),
        (f"reboot {boot_id()} {now}", "refused: no power-off of ours is under way that could end in a reboot"),
        (f"off {boot_id()} {now + 600}", "accepted"),
        (f"off {boot_id()} {now + 601}", "accepted"),
        (f"reboot {boot_id()} {now + 600}", "accepted"),
        (f"hello {boot_id()} 18", "accepted"),
    ):
        helper.say(word)
        until(lambda word=word: answer.read_text(encoding="ascii").startswith(f"{word} "))  # type: ignore[misc]
        assert answer.read_text(encoding="ascii") == f"{word} {said}".ljust(255) + "\n"
        helper.say("nonsense")
    until(lambda: helper.log.count("refused nonsense") == 6)
    assert answer.read_text(encoding="ascii").startswith(f"hello {boot_id()} 18 accepted")


async def test_doctor_and_the_daemon_hear_whether_it_would_obey(helper: Helper) -> None:
    """A socket that listens says nothing of the program behind it, nor of a boot id that both must see alike."""
    options = HostOptions(fifo=str(helper.folder / "word"))
    silent = (await found(options))["host.helper"]
    assert (silent.verdict, "has not answered" in silent.text) == ("FAIL", True)
    helper.start_and_wait()
    assert (await found(options))["host.helper"].text == "powerguard-off.service answers, and would act"
    assert helper.ended_within(SLACK_S) == 0
    helper.start()
    assert await unanswered(options, boot=boot_id()) == ""
    assert helper.ended_within(SLACK_S) == 0
    helper.start()
    elsewhere = await unanswered(options, boot="00000000-0000-0000-0000-000000000000")
    assert "meant for another boot" in elsewhere
    assert helper.calls == []


def test_hello_powers_nothing_off(helper: Helper) -> None:
    """doctor and the daemon ask whether a word would be heard, on a host that trains.

    The process then ends: an operator who has just run doctor may set it to record, which one that runs would not see.
    """
    helper.start_and_wait()
    asyncio.run(say(str(helper.folder / "word"), f"hello {boot_id()} 5"))
    assert helper.ended_within(15) == 0
    assert helper.calls == []


def test_a_later_word_brings_the_deadline_forward(helper: Helper) -> None:
    """The battery fell faster than thought: the second word counts, and the order is not given twice."""
    helper.start()
    helper.off(in_s=600)
    until(lambda: STARTED in helper.calls)
    helper.off(in_s=0)
    assert helper.ended_within(60) == 0
    assert helper.calls.count(STARTED) == 1
    assert FORCED in helper.calls


def test_a_reboot_is_left_to_the_last_step_and_forced_at_the_deadline(helper: Helper) -> None:
    """Utility is back during the stop: nothing is started anew, and no later word makes it a power-off again."""
    helper.start()
    helper.off(in_s=600)
    until(lambda: STARTED in helper.calls)
    assert not helper.has_ordered_reboot()
    helper.reboot(in_s=600)
    until(helper.has_ordered_reboot)
    assert stat.S_IMODE(helper.order.stat().st_mode) == 0o600
    assert helper.calls == [STARTED]
    helper.off(in_s=0)
    assert helper.ended_within(60) == 0
    assert [
        call for call in helper.calls if call.startswith(("systemctl ", "sysrq ")) and "list-units" not in call
    ] == [
        STARTED,
        REBOOTED,
        "sysrq b",
    ]


def test_a_reboot_is_heard_after_the_deadline_until_the_power_is_cut(helper: Helper) -> None:
    """A unit hung in its stop until it was killed: only then is the daemon stopped, and says that utility is back."""
    kill_says = (
        f'if [[ $1 == kill ]]; then echo "reboot {boot_id()} $(cut -d. -f1 /proc/uptime)" >"{helper.folder}/word"'
    )
    helper.tool("systemctl", f"{kill_says}; elif [[ $1 == list-units ]]; then echo hung.service; fi")
    helper.start()
    helper.off(in_s=0)
    assert helper.ended_within(60) == 0
    assert helper.has_ordered_reboot()
    assert REBOOTED in helper.calls
    assert FORCED not in helper.calls


def test_an_order_that_cannot_be_left_is_reported_and_the_deadline_reboots_all_the_same(helper: Helper) -> None:
    """Memory full, or something in its place: the late way is lost, the hard one is not."""
    helper.order.mkdir()
    helper.start()
    helper.off(in_s=600)
    helper.reboot(in_s=0)
    assert helper.ended_within(60) == 0
    assert "cannot be written" in helper.log
    assert REBOOTED in helper.calls
    assert FORCED not in helper.calls


FULL = """set -eu
mount -t tmpfs -o size=256k,nr_inodes=32 tmpfs "$1"
for tool in systemctl sync kill sysrq; do printf '#!/bin/bash\\n' >"$1/$tool"; chmod 755 "$1/$tool"; done
[ -z "$5" ] || for order in off reboot; do (umask 077; printf %s "$5" >"$1/$order"); done
[ -z "$5" ] || echo none >"$1/answer"
POWERGUARD_OFF_TOOLS=$1 /bin/bash "$2" <>"$3" >"$4" 2>&1 & program=$!
for _ in {1..600}; do [ -e "$1/reboot" ] && break; sleep 0.05; done
head -c 1M /dev/zero >"$1/filler" 2>/dev/null || :
for number in {1..40}; do { : >"$1/$number"; } 2>/dev/null || break; done
{ ! : >"$1/one-more"; } 2>/dev/null
at=$(($(cut -d. -f1 /proc/uptime) + 600)) boot=$(</proc/sys/kernel/random/boot_id)
printf '%s\\n' "off $boot $at" "reboot $boot $at" >"$3"
for _ in {1..600}; do [ "$(grep -c 'for the last step\\|last step of' "$4")" = 2 ] && break; sleep 0.05; done
kill -KILL "$program"
stat --format=%a:%s "$1/off" "$1/reboot"
cat "$1/off" "$1/reboot"
"""


@pytest.mark.root
@pytest.mark.parametrize("beforehand", ["", "-" * 37, "short"])
def test_memory_that_others_have_filled_does_not_keep_an_order_out(helper: Helper, beforehand: str) -> None:
    """A tmpfs without a page or an inode left, as /run may be: the files are there beforehand and written in place."""
    paths = (helper.tools, PROGRAM, helper.folder / "word", helper.log_file)
    argv = ["unshare", "--mount", "bash", "-c", FULL, "bash", *map(str, paths), beforehand]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "cannot be written" not in helper.log
    assert ended.stdout.splitlines() == ["600:37", "600:37", boot_id(), boot_id()]


@pytest.mark.parametrize("before", [b"off wi", b"x" * 300, b"\0", b"\n\n", b""])
def test_what_stands_in_the_fifo_does_not_spoil_the_daemons_word(helper: Helper, before: bytes) -> None:
    """A line that another writer has not ended: the daemon begins its own."""
    os.write(helper.fifo, before)
    helper.start_and_wait()
    asyncio.run(HostEffector(HostOptions(fifo=str(helper.folder / "word"))).carry_out(OFF))
    until(lambda: STARTED in helper.calls)
    assert ("refused" in helper.log) is bool(before.strip(b"\n")), "an empty line is nothing to report"


def test_a_writer_that_keeps_the_fifo_full_does_not_keep_the_word_out(helper: Helper) -> None:
    """The daemon waits for room, and powerguard-off makes room by refusing what is no word; it may be late."""
    host = HostEffector(HostOptions(fifo=str(helper.folder / "word")))

    def is_obeyed() -> bool:
        try:
            asyncio.run(host.carry_out(OFF))
        except EffectorError as error:
            assert error.timed_out  # noqa: PT017 - the daemon repeats such a word, too
            return False
        return True

    flood = subprocess.Popen(["/usr/bin/yes", "off with it"], stdout=helper.fifo)
    try:
        until(lambda: not select.select([], [helper.fifo], [], 0)[1])
        helper.start_and_wait()
        until(is_obeyed)
        until(lambda: STARTED in helper.calls)
    finally:
        flood.kill()
        flood.wait(timeout=30)


def test_a_later_word_cannot_put_the_deadline_off(helper: Helper) -> None:
    """A daemon that was restarted and gives its order again must not win time that the battery does not have."""
    helper.start()
    helper.off(in_s=2)
    helper.off(in_s=600)
    assert helper.ended_within(60) == 0
    assert "deadline stays" in helper.log


def test_two_words_in_one_write_are_both_heard(helper: Helper) -> None:
    """A pipe may hand over several words at once."""
    helper.start()
    now = int(boottime_s())
    helper.say(f"off {boot_id()} {now + 600}\noff {boot_id()} {now}")
    assert helper.ended_within(60) == 0


def test_garbage_without_end_does_not_hold_the_deadline_up(helper: Helper) -> None:
    """A writer gone mad keeps the FIFO full; the deadline comes all the same."""
    helper.start()
    helper.off(in_s=2)
    until(lambda: STARTED in helper.calls)
    flood = subprocess.Popen(["/bin/bash", "-c", "while :; do printf x; sleep 0.01; done"], stdout=helper.fifo)
    try:
        assert helper.ended_within(60) == 0
    finally:
        flood.kill()
        flood.wait(timeout=30)
    assert FORCED in helper.calls


def test_nothing_that_hangs_holds_the_kernels_own_power_off_up(helper: Helper) -> None:
    """A dead disk keeps sync for ever, and each program that is read from it: dark in two seconds all the same."""
    helper.tool("sync", "exec sleep 300")
    helper.tool("systemctl", "exec sleep 300")
    helper.tool("sysrq", 'cat /proc/uptime >"${0%/*}/dark"')
    helper.start()
    deadline_s = int(boottime_s() + 1)
    helper.say(f"off {boot_id()} {deadline_s}")
    assert helper.ended_within(60) == 0
    assert "sync has not ended: going on without it" in helper.log
    assert helper.calls[-2:] == [FORCED, "sysrq o"]
    dark_s = float((helper.tools / "dark").read_text(encoding="ascii").split()[0]) - deadline_s
    assert 0.6 < dark_s < HARD_S + SLACK_S


def test_disks_are_synced_before_the_deadline_and_only_then(helper: Helper) -> None:
    """Two seconds are no time to write what a host has in memory; a sync right away would slow the stops down."""
    helper.start()
    helper.off(in_s=600)
    until(lambda: STARTED in helper.calls)
    helper.off(in_s=600)
    until(lambda: "deadline stays" in helper.log)
    assert helper.calls == [STARTED]
    helper.off(in_s=6)
    until(lambda: "sync " in helper.calls)
    assert "deadline reached" not in helper.log


def test_what_named_units_left_behind_is_killed_and_nothing_else(helper: Helper) -> None:
    """KillMode=process: the unit counts as stopped and its processes live on, in groups of their own below it."""
    groups = {
        "system.slice/slurmd.service": 4194301,
        "system.slice/containerd.service/deep/er": 4194302,
        "systemd/system.slice/system-k.slice/slurmd.service": 4194303,
        "system.slice/ssh.service": 4194304,
        "user.slice/my-slurmd.service": 4194305,
    }
    for group, pid in groups.items():
        (helper.folder / "cgroup" / group).mkdir(parents=True)
        (helper.folder / "cgroup" / group / "cgroup.procs").write_text(f"{pid}\n", encoding="ascii")
    helper.start(
        POWERGUARD_OFF_CGROUPS=str(helper.folder / "cgroup"), POWERGUARD_OFF_KILL="slurmd.service containerd.service"
    )
    helper.off(in_s=0)
    assert helper.ended_within(60) == 0
    killed = {call for call in helper.calls if call.startswith("kill -KILL ")}
    assert killed == {f"kill -KILL {pid}" for pid in (4194301, 4194302, 4194303)}
    assert "killing process 4194301, left behind by slurmd.service" in helper.log


def test_a_systemctl_that_hangs_costs_three_seconds_and_no_more(helper: Helper) -> None:
    """Without systemctl PID 1 is asked by signal, and the deadline still ends it."""
    helper.tool("systemctl", "exec sleep 300")
    helper.start()
    helper.off(in_s=1)
    until(lambda: "kill -s RTMIN+4 1" in helper.calls)
    assert helper.ended_within(60) == 0
    assert "sysrq o" in helper.calls


def test_a_systemctl_that_fails_is_asked_again_at_the_next_word(helper: Helper) -> None:
    """Twice is as good as once: a first order that came to nothing does not spoil the second."""
    helper.tool("systemctl", "exit 1")
    helper.start()
    helper.off(in_s=60)
    until(lambda: "kill -s RTMIN+4 1" in helper.calls)
    helper.tool("systemctl", "")
    helper.off(in_s=60)
    until(lambda: helper.calls.count(STARTED) == 2)
    until(lambda: "poweroff.target started" in helper.log)


def test_units_that_still_stop_at_the_deadline_are_killed_by_name(helper: Helper) -> None:
    """Kill what hangs, and only that, so that the rest may still end in order."""
    helper.tool(
        "systemctl",
        'if [[ $1 == list-units ]]; then printf "%s\\n" "slow.service loaded deactivating stop-sigterm slow" '
        '"session-3.scope loaded deactivating stop-sigterm s"; fi',
    )
    helper.start()
    helper.off(in_s=0)
    assert helper.ended_within(60) == 0
    assert "systemctl kill --signal=KILL -- slow.service session-3.scope" in helper.calls


def test_it_survives_the_shutdown_that_it_started(helper: Helper) -> None:
    """systemd-shutdown sends SIGTERM to everything, and the log goes away; the deadline does not."""
    helper.start()
    helper.off(in_s=3)
    until(lambda: STARTED in helper.calls)
    assert helper.process is not None
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        os.kill(helper.process.pid, number)
    assert helper.ended_within(60) == 0
    assert FORCED in helper.calls


def test_the_end_of_the_fifo_does_not_end_the_deadline(helper: Helper) -> None:
    """Should the FIFO be closed under it, it waits by the clock alone, without spinning."""
    helper.tool("systemctl", "")
    began_s = time.monotonic()
    script = f"echo off {boot_id()} {int(boottime_s()) + 3} | /bin/bash {shlex.quote(str(PROGRAM))}"
    environment = {"POWERGUARD_UNDER_TEST": "1", "POWERGUARD_OFF_TOOLS": str(helper.tools)}
    ended = subprocess.run(["/bin/bash", "-c", script], env=environment, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0
    assert 2.0 <= time.monotonic() - began_s <= 3 + HARD_S + SLACK_S
    assert FORCED in helper.calls


def test_recording_does_nothing(helper: Helper) -> None:
    """A rehearsal writes down what would be done, with its time, and touches no tool."""
    record = helper.folder / "record"
    helper.start(POWERGUARD_OFF_RECORD=str(record))
    helper.off(in_s=1)
    helper.reboot(in_s=1)
    assert helper.ended_within(60) == 0
    assert not helper.order.exists(), "a rehearsal leaves no file behind"
    done = [line.split(" ", 1)[1] for line in record.read_text(encoding="ascii").splitlines()]
    assert done[0] == STARTED
    assert {"order off", "order reboot", "sync", REBOOTED, "sysrq b"} <= set(done)
    assert done.count("order off") == 1
    assert helper.calls == []


async def test_the_daemon_hears_of_a_rehearsal_that_was_forgotten(helper: Helper) -> None:
    """Else an armed host would not be powered off in an outage, and only doctor would say so."""
    helper.start(POWERGUARD_OFF_RECORD=str(helper.folder / "record"))
    because = await unanswered(HostOptions(fifo=str(helper.folder / "word")), boot=boot_id())
    assert because.endswith(
        "did not obey: refused: it only records: remove the drop-in that systemctl cat powerguard-off.service names"
    )


def test_under_test_it_refuses_to_act_for_real(helper: Helper) -> None:
    """Neither a record nor tools: then no word is obeyed."""
    helper.start(POWERGUARD_OFF_TOOLS="")
    helper.off(in_s=0)
    until(lambda: "refused under test" in helper.log)
    time.sleep(0.5)
    assert helper.running()
    assert "powering off" not in helper.log
