"""powerguard-signal as a real process, against real jobs: they stop, they end, and whatever happens they go on."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from powerguard.clock import boot_id, boottime_s
from powerguard.effectors.signals.helper import SignalFolder, Stopped
from powerguard.effectors.signals.processes import look
from tests.peers import require
from tests.peers.jobs import LAUNCHER, PYTHON, RANK, USER, Jobs, did, stands, state, until

_PTRACE_SEIZE, _PTRACE_INTERRUPT, _PTRACE_DETACH = 0x4206, 0x4207, 17


# --- Stopping, going on, ending -------------------------------------------------------------------------------------


def test_a_trainer_is_stopped_and_goes_on(jobs: Jobs) -> None:
    """It does nothing while it stands, goes on where it was, and nothing is left behind; twice is as good as once."""
    jobs.rank("llm.sock", "listens")
    pid = jobs.pid("llm.sock")
    answer = jobs.ask("stop", "llm.sock")
    assert (answer["schema_version"], answer["word"], answer["ok"], answer["uid"]) == (1, "stop", True, USER)
    assert (answer["listener"], did(answer), answer["stopped"]) == (pid, {pid: "stopped"}, 1)
    assert stands(pid)
    assert not jobs.advances("llm.sock", within_s=0.5)
    assert jobs.ask("stop", "llm.sock")["ok"]
    assert did(jobs.ask("continue", "llm.sock")) == {pid: "continued"}
    assert jobs.advances("llm.sock")
    assert not jobs.stopped.exists()
    again = jobs.ask("continue", "llm.sock")
    assert (again["ok"], again["processes"]) == (True, [])


def test_what_is_stopped_is_in_the_file_with_its_start(jobs: Jobs) -> None:
    jobs.rank("llm.sock", "listens")
    pid = jobs.pid("llm.sock")
    jobs.ask("stop", "llm.sock")
    kept = json.loads(jobs.stopped.read_text(encoding="utf-8"))
    process = look(pid)
    assert process is not None
    assert kept["boot_id"] == boot_id()
    assert [(each["socket"], each["processes"]) for each in kept["stopped"]] == [("llm.sock", [[pid, process.started]])]


def test_a_stopped_trainer_is_ended_and_gets_the_word(jobs: Jobs) -> None:
    """SIGTERM to a stopped process waits until it goes on: without the SIGCONT it would never end."""
    process = jobs.rank("llm.sock", "listens", "catches")
    jobs.ask("stop", "llm.sock")
    answer = jobs.ask("terminate", "llm.sock")
    assert (answer["ok"], did(answer)) == (True, {process.pid: "terminated"})
    assert process.wait(60) == 0
    assert jobs.noted("llm.sock", "SIGTERM")
    assert not jobs.stopped.exists()
    again = jobs.ask("terminate", "llm.sock")
    assert not again["ok"]
    assert "cannot connect" in again["error"]


def test_who_stood_before_is_not_let_go_on(jobs: Jobs) -> None:
    """A process that its user has stopped himself is his to let go on."""
    script = LAUNCHER.replace("RANK,", f"{RANK!r},")
    jobs.start(PYTHON, "-c", script, jobs.path("llm.sock"), "2")
    mine = jobs.pid("llm.sock", "rank1")
    jobs.pid("llm.sock")
    os.kill(mine, signal.SIGSTOP)
    until(lambda: stands(mine))
    jobs.ask("stop", "llm.sock")
    jobs.ask("continue", "llm.sock")
    assert stands(mine)
    assert jobs.advances("llm.sock", "rank0")


def test_whoever_was_let_go_on_by_others_is_stopped_again(jobs: Jobs) -> None:
    """`fg` in his shell, or a SIGCONT: to have been stopped once is not to stand."""
    process = jobs.rank("llm.sock", "listens")
    jobs.ask("stop", "llm.sock")
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: not stands(process.pid))
    assert did(jobs.ask("stop", "llm.sock")) == {process.pid: "stopped"}
    assert stands(process.pid)


def test_a_trainer_that_a_debugger_looks_at_is_stopped_for_when_it_lets_go(jobs: Jobs) -> None:
    """py-spy and gdb hold a process for a moment: it does not stand by anybody's will, and goes on at once."""
    process = jobs.rank("llm.sock", "listens")
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(_PTRACE_SEIZE, process.pid, 0, 0) == 0
    assert libc.ptrace(_PTRACE_INTERRUPT, process.pid, 0, 0) == 0
    until(lambda: state(process.pid) == "t")
    assert did(jobs.ask("stop", "llm.sock")) == {process.pid: "stopped"}
    os.waitpid(process.pid, os.WUNTRACED)
    assert libc.ptrace(_PTRACE_DETACH, process.pid, 0, 0) == 0
    until(lambda: stands(process.pid))
    assert jobs.ask("continue", "llm.sock")["continued"] == 1
    assert not stands(process.pid)


@pytest.mark.root
def test_the_next_one_by_a_name_does_not_make_us_forget_the_one_before(jobs: Jobs) -> None:
    """Whoever was stopped has lost his socket's file, and another user has put his own there: both go on."""
    before = jobs.rank("llm.sock", "listens")
    jobs.ask("stop", "llm.sock")
    Path(jobs.path("llm.sock")).unlink()
    after = jobs.rank("llm.sock", "listens", role="next", user=12345)
    assert did(jobs.ask("stop", "llm.sock")) == {after.pid: "stopped"}
    assert jobs.ask("continue", "llm.sock")["continued"] == 2
    assert (stands(before.pid), stands(after.pid), jobs.stopped.exists()) == (False, False, False)


def test_of_many_the_first_are_named_and_all_are_counted(jobs: Jobs) -> None:
    """An answer that grew with a job would be too long a line for the daemon: an alarm about training that goes on."""
    script = f'for i in $(seq 80); do sleep 60 & echo $! >> $1; done; {PYTHON} -c "$0" $2 rank0 listens & wait'
    jobs.start("/bin/sh", "-c", script, RANK, jobs.path("pids"), jobs.path("llm.sock"))
    jobs.pid("llm.sock")
    pids = [int(line) for line in Path(jobs.path("pids")).read_text(encoding="ascii").split()]
    jobs.adopt(pids)
    keys = tuple(process.key for process in map(look, pids) if process is not None)
    SignalFolder(jobs.folder).write((Stopped(socket="llm.sock", uid=USER, at_s=0.0, processes=keys),))
    reply = jobs.ask("continue", "llm.sock")
    assert (reply["ok"], reply["continued"], len(reply["processes"])) == (True, 80, 64)


# --- Killed, silent, broken -----------------------------------------------------------------------------------------


def test_a_daemon_that_is_gone_does_not_leave_training_stopped(jobs: Jobs) -> None:
    process = jobs.rank("llm.sock", "listens")
    jobs.ask("stop", "llm.sock")
    watch = jobs.watch(lease_s=0.5)
    assert watch.wait(60) == 0
    assert jobs.advances("llm.sock")
    assert not stands(process.pid)
    assert not jobs.stopped.exists()


def test_a_daemon_that_asks_keeps_it_stopped(jobs: Jobs) -> None:
    process = jobs.rank("llm.sock", "listens")
    jobs.ask("stop", "llm.sock")
    kept = SignalFolder(jobs.folder).read()
    SignalFolder(jobs.folder).write(
        tuple(Stopped(**{**_fields(entry), "at_s": boottime_s() - 100.0}) for entry in kept)
    )
    assert jobs.ask("hold")["stopped"] == 1
    watch = jobs.watch(lease_s=30.0)
    with pytest.raises(subprocess.TimeoutExpired):
        watch.wait(1.0)
    assert stands(process.pid)
    watch.kill()
    assert jobs.ask("continue", "llm.sock")["ok"]
    assert jobs.watch(lease_s=30.0).wait(60) == 0, "nothing is stopped any more: nothing to watch"


def _fields(entry: Stopped) -> dict[str, object]:
    return {name: getattr(entry, name) for name in Stopped.__slots__}


def test_a_number_that_was_given_to_another_process_is_not_signalled(jobs: Jobs) -> None:
    """The file names a process by its start as well: one that has the number now is somebody else."""
    process = jobs.rank("llm.sock", "listens")
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: stands(process.pid))
    found = look(process.pid)
    assert found is not None
    entry = Stopped(socket="llm.sock", uid=USER, at_s=boottime_s(), processes=((found.pid, found.started - 1),))
    SignalFolder(jobs.folder).write((entry,))
    answer = jobs.ask("continue")
    assert (answer["ok"], answer["processes"], jobs.stopped.exists()) == (True, [], False)
    assert stands(process.pid)


def test_a_helper_killed_before_its_first_signal_leaves_nobody_standing(jobs: Jobs) -> None:
    """The file is written first: whoever was to be stopped is let go on, whether the signal came or not."""
    process = jobs.rank("llm.sock", "listens")
    found = look(process.pid)
    assert found is not None
    SignalFolder(jobs.folder).write((Stopped(socket="llm.sock", uid=USER, at_s=boottime_s(), processes=(found.key,)),))
    assert did(jobs.ask("continue")) == {process.pid: "continued"}
    assert jobs.advances("llm.sock")


def test_a_file_that_is_not_ours_is_reported(jobs: Jobs) -> None:
    jobs.rank("llm.sock", "listens")
    jobs.stopped.write_text(
        json.dumps({"schema_version": 1, "boot_id": boot_id(), "stopped": [{"socket": "x.sock"}]}), encoding="utf-8"
    )
    answer = jobs.ask("stop", "llm.sock")
    assert not answer["ok"]
    assert "kill -CONT" in answer["error"]
    assert jobs.advances("llm.sock")


def test_the_watch_is_there_again_as_soon_as_the_file_is_mended(jobs: Jobs) -> None:
    """It complains once, and does not sleep over what stands in it."""
    process = jobs.rank("llm.sock", "listens")
    assert jobs.ask("stop", "llm.sock")["ok"]
    mended = jobs.folder / "mended"
    shutil.copy2(jobs.stopped, mended)
    jobs.stopped.write_text("nonsense", encoding="utf-8")
    watch = subprocess.Popen(jobs.argv("watch", "--lease-s", "0"), stderr=subprocess.PIPE)
    assert watch.stderr is not None
    assert b"kill -CONT" in watch.stderr.readline()
    assert stands(process.pid)
    mended.replace(jobs.stopped)
    result = watch.communicate(timeout=60)[1]
    assert (watch.returncode, b"kill -CONT" in result) == (0, False)
    assert not stands(process.pid)


@pytest.mark.parametrize("at_s", [float("nan"), float("inf"), 1e12, -1.0])
def test_a_moment_that_never_was_keeps_nobody_standing(tmp_path: Path, at_s: float) -> None:
    """The watch would wait for a lease from then on."""
    folder = SignalFolder(tmp_path)
    folder.write((Stopped(socket="llm.sock", uid=USER, at_s=at_s, processes=()),))
    assert [entry.at_s for entry in folder.read()] == [0.0]


def test_where_the_disk_has_filled_up_whoever_stands_goes_on_all_the_same(jobs: Jobs) -> None:
    """What is left of the file cannot be written: an alarm for that would keep the word from him that he may train."""
    processes = [jobs.rank(name, "listens") for name in ("a.sock", "b.sock")]
    for name in ("a.sock", "b.sock"):
        assert jobs.ask("stop", name)["ok"]
    argv = [require("prlimit"), "--fsize=100", *jobs.argv("continue", "a.sock")]
    ended = subprocess.run(argv, capture_output=True, check=False, timeout=60)
    assert (json.loads(ended.stdout)["ok"], b"make room" in ended.stderr) == (True, True)
    assert [stands(process.pid) for process in processes] == [False, True]
    assert len(SignalFolder(jobs.folder).read()) == 2
    assert jobs.ask("continue")["ok"]
    assert not stands(processes[1].pid)


@pytest.mark.root
def test_who_may_not_be_signalled_does_not_hold_up_the_others(jobs: Jobs) -> None:
    """Root without CAP_KILL, as where a security module says no: the one goes on, the other is kept and told."""
    theirs, own = jobs.rank("a.sock"), jobs.rank("b.sock", user=0)
    for process in (theirs, own):
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda process=process: stands(process.pid))
    found = [process for process in (look(theirs.pid), look(own.pid)) if process is not None]
    kept = [Stopped(socket="x.sock", uid=each.uid, at_s=0.0, processes=(each.key,)) for each in found]
    SignalFolder(jobs.folder).write(tuple(kept))
    argv = [require("setpriv"), "--bounding-set=-all", "--inh-caps=-all", *jobs.argv("continue")]
    answer = json.loads(subprocess.run(argv, capture_output=True, check=False, timeout=60).stdout)
    assert (answer["ok"], did(answer)) == (False, {theirs.pid: "failed", own.pid: "continued"})
    assert f"not permitted for {answer['processes'][0]['name']} ({theirs.pid})" in answer["error"]
    assert (stands(theirs.pid), stands(own.pid)) == (True, False)
    assert SignalFolder(jobs.folder).read() == (kept[0],)
    assert jobs.ask("continue")["ok"]
    assert not stands(theirs.pid)


# --- What it hears --------------------------------------------------------------------------------------------------


def test_what_is_no_word_is_refused(jobs: Jobs) -> None:
    result = jobs.serve(b'{"word": "kill"}\n')
    assert (result["word"], result["ok"], "unknown word" in result["error"]) == ("", False, True)


def test_whoever_hangs_up_has_what_he_asked_for(jobs: Jobs) -> None:
    """A daemon whose time is up does not wait; and nothing but the facts is in the log."""
    process = jobs.rank("llm.sock", "listens")
    pipe = subprocess.PIPE
    with subprocess.Popen(jobs.argv("serve"), stdin=pipe, stdout=pipe, stderr=pipe) as helper:
        assert helper.stdin is not None
        assert helper.stdout is not None
        assert helper.stderr is not None
        helper.stdout.close()
        helper.stdin.write(b'{"word": "stop", "socket": "llm.sock"}\n')
        helper.stdin.close()
        log = helper.stderr.read()
    assert (helper.returncode, log.count(b"\n"), b"stopped" in log) == (0, 1, True)
    assert stands(process.pid)


def test_a_connection_that_says_nothing_is_no_word(jobs: Jobs) -> None:
    assert jobs.serve(b"") is None


def test_a_wrong_command_line_is_usage(jobs: Jobs) -> None:
    for words in (["kill"], ["stop"], ["stop", "a/b.sock"], ["list", "x"], ["checkpoint", "a.service", "HUP"]):
        assert subprocess.run(jobs.argv(*words), capture_output=True, check=False, timeout=60).returncode == 64, words


def test_it_is_refused_under_test_where_it_would_touch_this_machine() -> None:
    argv = [sys.executable, "-I", "-m", "powerguard.effectors.signals.helper", "list"]
    answer = json.loads(subprocess.run(argv, capture_output=True, check=False, timeout=60).stdout)
    assert "refused under test" in answer["error"]


def test_what_it_imports_is_little() -> None:
    """Root's process shall be small, and shall not depend on what a wheel brings."""
    code = "import sys; before = set(sys.modules); import powerguard.effectors.signals.helper; "
    code += "print(*(set(sys.modules) - before))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    found = set(ended.stdout.split())
    assert {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "powerguard",
        "powerguard.clock",
        "powerguard.durable",
        "powerguard.effectors",
        "powerguard.effectors.root_helper",
        "powerguard.effectors.signals",
        "powerguard.effectors.signals.helper",
        "powerguard.effectors.signals.processes",
    }
