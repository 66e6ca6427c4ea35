"""powerguard-signal as a real process, against real jobs: whom it stops, whom it never touches, and that they go on.

Nobody can name a process to it; so most of these tests are about whom a socket's name leads to.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from powerguard.clock import boot_id, boottime_s
from powerguard.effectors.signals.kept import Folder, Stopped
from powerguard.effectors.signals.processes import look, place_of
from tests.peers.jobs import LAUNCHER, PYTHON, RANK, USER, Jobs, did, state, until


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.close()


def stands(pid: int) -> bool:
    return state(pid) == "T"


# --- Stopping, going on, ending -------------------------------------------------------------------------------------


def test_a_trainer_is_stopped_and_goes_on(jobs: Jobs) -> None:
    """It does nothing while it stands, goes on where it was, and nothing is left behind; twice is as good as once."""
    jobs.rank("llm.sock", "listens")
    pid = jobs.pid("llm.sock")
    told = jobs.ask("stop", "llm.sock")
    assert (told["schema_version"], told["word"], told["ok"], told["uid"]) == (1, "stop", True, USER)
    assert (told["listener"], did(told), told["stopped"]) == (pid, {pid: "stopped"}, 1)
    assert stands(pid)
    assert not jobs.advances("llm.sock")
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
    told = jobs.ask("terminate", "llm.sock")
    assert (told["ok"], did(told)) == (True, {process.pid: "terminated"})
    assert process.wait(10) == 0
    assert jobs.noted("llm.sock", "SIGTERM")
    assert not jobs.stopped.exists()
    again = jobs.ask("terminate", "llm.sock")
    assert not again["ok"]
    assert "nobody can be asked there" in again["error"]


def test_all_ranks_of_a_launcher_stop_and_go_on(jobs: Jobs) -> None:
    """torchrun gives each rank a session of its own: the job is the tree below the launcher, not a session."""
    script = LAUNCHER.replace("RANK,", f"{RANK!r},")
    launcher = jobs.start(PYTHON, "-c", script, jobs.path("llm.sock"), "3")
    pids = {jobs.pid("llm.sock", f"rank{rank}") for rank in range(3)}
    told = jobs.ask("stop", "llm.sock")
    assert set(did(told)) == {launcher.pid, *pids}
    assert told["processes"][0]["pid"] == launcher.pid, "who would notice that its children stand is stopped first"
    assert all(stands(pid) for pid in (launcher.pid, *pids))
    jobs.ask("continue", "llm.sock")
    assert all(jobs.advances("llm.sock", f"rank{rank}") for rank in range(3))


def test_the_shell_around_a_trainer_and_another_job_beside_it_are_left_alone(jobs: Jobs) -> None:
    """A login: the same user, the same shell, the same control group; only what the socket's owner started counts."""
    script = f'{PYTHON} -c "$0" $1 rank0 listens & {PYTHON} -c "$0" $2 rank0 listens & wait'
    shell = jobs.start("/bin/sh", "-c", script, RANK, jobs.path("a.sock"), jobs.path("b.sock"))
    one, other = jobs.pid("a.sock"), jobs.pid("b.sock")
    assert set(did(jobs.ask("stop", "a.sock"))) == {one}
    assert (state(shell.pid), stands(other)) == ("S", False)
    assert jobs.advances("b.sock")


@pytest.mark.root
def test_a_unit_is_stopped_whole(jobs: Jobs) -> None:
    """In a control group of its own whatever runs there belongs to the job, whoever its parent is."""
    cgroup = jobs.cgroup("train.service")
    jobs.rank("llm.sock", "listens", cgroup=cgroup)
    jobs.rank("helper", role="loader", cgroup=cgroup)
    told = jobs.ask("stop", "llm.sock")
    assert (told["scope"], set(did(told))) == (
        "train.service",
        {jobs.pid("llm.sock"), jobs.pid("helper", "loader")},
    )


@pytest.mark.root
def test_in_a_unit_that_starts_jobs_for_many_only_the_tree_counts(jobs: Jobs) -> None:
    """slurmd without control groups of its own, cron, sshd: somebody else runs there, too."""
    cgroup = jobs.cgroup("starter.service")
    jobs.rank("llm.sock", "listens", cgroup=cgroup)
    jobs.rank("other.sock", "listens", cgroup=cgroup)
    jobs.start("sleep", "60", user=0, cgroup=cgroup)
    told = jobs.ask("stop", "llm.sock")
    assert (told["scope"], set(did(told))) == ("process tree", {jobs.pid("llm.sock")})


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


# --- Whom it never touches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../llm.sock", "/run/x.sock", "llm", ".sock", "a/b.sock", "", "llm.sock\n", "x" * 99])
def test_only_a_plain_name_leads_anywhere(jobs: Jobs, name: str) -> None:
    line = json.dumps({"word": "stop", "socket": name}).encode() + b"\n"
    told = jobs.serve(line)
    assert not told["ok"]
    assert "no slashes" in told["error"]


@pytest.mark.root
def test_roots_processes_are_left_alone(jobs: Jobs) -> None:
    process = jobs.rank("root.sock", "listens", user=0)
    told = jobs.ask("stop", "root.sock")
    assert not told["ok"]
    assert "root listens there" in told["error"]
    assert not stands(process.pid)


@pytest.mark.root
def test_a_socket_file_of_somebody_else_leads_nowhere(jobs: Jobs) -> None:
    """Whoever passes his socket to another user's process to listen on it has named nobody."""
    process = jobs.rank("llm.sock", "listens")
    os.chown(jobs.path("llm.sock"), 12345, -1)
    told = jobs.ask("stop", "llm.sock")
    assert (told["ok"], "uid 12345's file" in told["error"]) == (False, True)
    assert not stands(process.pid)


def test_a_link_a_file_and_nobody_lead_nowhere(jobs: Jobs) -> None:
    process = jobs.rank("llm.sock", "listens")
    (jobs.sockets / "link.sock").symlink_to("llm.sock")
    (jobs.sockets / "file.sock").write_text("", encoding="ascii")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(jobs.path("deaf.sock"))
    wrong = {name: jobs.ask("stop", name) for name in ("link.sock", "file.sock", "deaf.sock", "none.sock")}
    assert [told["ok"] for told in wrong.values()] == [False] * 4
    assert "is no socket" in wrong["file.sock"]["error"]
    assert not stands(process.pid)
    assert not jobs.stopped.exists()


def test_a_child_that_has_inherited_the_socket_is_nobody(jobs: Jobs) -> None:
    """Who called listen() has ended; its number may be anybody's by now, so nobody is signalled."""
    script = "import os, socket, sys, time\ns = socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\ns.listen()\n"
    script += "if os.fork():\n    os._exit(0)\n"
    script += "open(sys.argv[1] + '.heir.up', 'w').write(f'{os.getpid()}\\n')\ntime.sleep(60)\n"
    jobs.start(PYTHON, "-c", script, jobs.path("llm.sock")).wait(10)
    heir = jobs.pid("llm.sock", "heir")
    told = jobs.ask("stop", "llm.sock")
    assert not told["ok"]
    assert "has ended" in told["error"] or "is not there any more" in told["error"]
    assert not stands(heir)


def test_a_number_that_was_given_to_another_process_is_not_signalled(jobs: Jobs) -> None:
    """The file names a process by its start as well: one that has the number now is somebody else."""
    process = jobs.rank("llm.sock", "listens")
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: stands(process.pid))
    found = look(process.pid)
    assert found is not None
    entry = Stopped(socket="llm.sock", uid=USER, at_s=boottime_s(), processes=((found.pid, found.started - 1),))
    Folder(jobs.folder).write((entry,))
    told = jobs.ask("continue")
    assert (told["ok"], told["processes"], jobs.stopped.exists()) == (True, [], False)
    assert stands(process.pid)


def test_a_trainer_whose_queue_is_full_can_still_be_ended_once_it_was_stopped(jobs: Jobs) -> None:
    """A stopped trainer accepts nobody, and its queue fills up: then the file knows who it is."""
    process = jobs.rank("llm.sock", "listens", "short", "catches")
    jobs.ask("stop", "llm.sock")
    waiting = []
    for _ in range(8):
        client = socket.socket(socket.AF_UNIX)
        waiting.append(client)
        client.settimeout(0.2)
        try:
            client.connect(jobs.path("llm.sock"))
        except (BlockingIOError, TimeoutError):
            break
    assert jobs.ask("terminate", "llm.sock")["ok"]
    assert process.wait(10) == 0
    for client in waiting:
        client.close()


# --- Killed, silent, broken -----------------------------------------------------------------------------------------


def test_a_daemon_that_is_gone_does_not_leave_training_stopped(jobs: Jobs) -> None:
    process = jobs.rank("llm.sock", "listens")
    jobs.ask("stop", "llm.sock")
    watch = jobs.watch(lease_s=0.5)
    assert watch.wait(20) == 0
    assert jobs.advances("llm.sock")
    assert not stands(process.pid)
    assert not jobs.stopped.exists()


def test_a_daemon_that_asks_keeps_it_stopped(jobs: Jobs) -> None:
    process = jobs.rank("llm.sock", "listens")
    jobs.ask("stop", "llm.sock")
    kept = Folder(jobs.folder).read()
    Folder(jobs.folder).write(tuple(Stopped(**{**_fields(entry), "at_s": boottime_s() - 100.0}) for entry in kept))
    assert jobs.ask("hold")["stopped"] == 1
    watch = jobs.watch(lease_s=30.0)
    with pytest.raises(subprocess.TimeoutExpired):
        watch.wait(1.0)
    assert stands(process.pid)
    watch.kill()
    assert jobs.ask("continue", "llm.sock")["ok"]
    assert jobs.watch(lease_s=30.0).wait(20) == 0, "nothing is stopped any more: nothing to watch"


def _fields(entry: Stopped) -> dict[str, object]:
    return {name: getattr(entry, name) for name in Stopped.__slots__}


def test_a_helper_killed_before_its_first_signal_leaves_nobody_standing(jobs: Jobs) -> None:
    """The file is written first: whoever was to be stopped is let go on, whether the signal came or not."""
    process = jobs.rank("llm.sock", "listens")
    found = look(process.pid)
    assert found is not None
    Folder(jobs.folder).write((Stopped(socket="llm.sock", uid=USER, at_s=boottime_s(), processes=(found.key,)),))
    assert did(jobs.ask("continue")) == {process.pid: "continued"}
    assert jobs.advances("llm.sock")


def test_what_another_boot_has_left_is_forgotten(jobs: Jobs) -> None:
    jobs.stopped.write_text(
        json.dumps({"schema_version": 1, "boot_id": "another", "stopped": [{"socket": "x.sock"}]}), encoding="utf-8"
    )
    assert jobs.ask("list")["stopped"] == []
    assert not jobs.stopped.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot_id": 1}', '{"schema_version": 2}'])
def test_a_file_that_is_not_ours_is_told(jobs: Jobs, text: str) -> None:
    jobs.rank("llm.sock", "listens")
    jobs.stopped.write_text(text, encoding="utf-8")
    told = jobs.ask("stop", "llm.sock")
    assert not told["ok"]
    assert "kill -CONT" in told["error"]
    assert jobs.advances("llm.sock")


# --- List, and a checkpoint by signal -------------------------------------------------------------------------------


def test_list_tells_and_changes_nothing(jobs: Jobs) -> None:
    process = jobs.rank("llm.sock", "listens")
    (jobs.sockets / "dead.sock").write_text("", encoding="ascii")
    told = jobs.ask("list")
    assert told["ok"]
    assert told["stopped"] == []
    dead, llm = told["trainers"]
    assert (dead["socket"], dead["reachable"]) == ("dead.sock", False)
    assert (llm["socket"], llm["reachable"], llm["uid"], llm["listener"]) == ("llm.sock", True, USER, process.pid)
    jobs.ask("stop", "llm.sock")
    stopped = jobs.ask("list")["stopped"]
    assert [(each["socket"], each["processes"]) for each in stopped] == [("llm.sock", 1)]
    assert list(jobs.folder.glob("*.new")) == []


@pytest.mark.root
def test_a_unit_is_asked_for_a_checkpoint_by_whoever_has_a_handler(jobs: Jobs) -> None:
    """A shell around a trainer has no handler, and a signal would end it; nor has a program that only helps."""
    cgroup = jobs.cgroup("train.service")
    script = f'{PYTHON} -c "$0" $1 rank0 catches; true'
    shell = jobs.start("/bin/sh", "-c", script, RANK, jobs.path("t"), cgroup=cgroup)
    jobs.rank("plain", role="loader", cgroup=cgroup)
    pid = jobs.pid("t")
    jobs.allowed.write_text("# units that make a checkpoint on a signal\ntrain.service USR1\n", encoding="ascii")
    told = jobs.ask("checkpoint", "train.service", "USR1")
    assert (told["ok"], did(told), told["signalled"]) == (True, {pid: "signalled"}, 1)
    until(lambda: jobs.noted("t", "SIGUSR1"))
    assert (state(shell.pid), jobs.advances("plain", "loader")) == ("S", True)


def test_only_what_root_has_listed_is_signalled(jobs: Jobs) -> None:
    jobs.allowed.write_text("train.service USR1\n", encoding="ascii")
    assert "is not in" in jobs.ask("checkpoint", "train.service", "USR2")["error"]
    assert "is not in" in jobs.ask("checkpoint", "other.service", "USR1")["error"]
    assert "runs no process" in jobs.ask("checkpoint", "train.service", "USR1")["error"]
    jobs.allowed.unlink()
    assert "is not in" in jobs.ask("checkpoint", "train.service", "USR1")["error"]


@pytest.mark.parametrize("where", ["signals", "."])
def test_a_list_that_others_can_change_is_not_believed(jobs: Jobs, where: str) -> None:
    jobs.allowed.write_text("train.service USR1\n", encoding="ascii")
    path = jobs.root / where
    path.chmod(path.stat().st_mode | 0o022)
    assert "others than root can change it" in jobs.ask("checkpoint", "train.service", "USR1")["error"]


@pytest.mark.parametrize("line", ["train.service", "train.service KILL", "train USR1", "a.service USR1 USR2"])
def test_a_wrong_line_is_named(jobs: Jobs, line: str) -> None:
    jobs.allowed.write_text(f"# first\n{line}\n", encoding="ascii")
    assert f"{jobs.allowed}:2:" in jobs.ask("checkpoint", "train.service", "USR1")["error"]


# --- What it hears --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"stop\n", "not a word"),
        (b"[]\n", "not a word"),
        (b'{"word": "kill"}\n', "unknown word"),
        (b'{"word": "stop"}\n', "stop takes socket"),
        (b'{"word": "stop", "socket": 7}\n', "as text"),
        (b'{"word": "stop", "socket": "a.sock", "pid": 1}\n', "stop takes socket"),
        (b'{"word": "list", "socket": "a.sock"}\n', "list takes nothing else"),
        (b'{"word": "checkpoint", "unit": "a.service", "signal": "KILL"}\n', "checkpoint takes a unit"),
        (b'{"word": "checkpoint", "unit": "../a.service", "signal": "USR1"}\n', "checkpoint takes a unit"),
        (b'{"word": "stop"', "has no end"),
        (b"x" * 5000, "longer than"),
        (b"[" * 4000 + b"\n", "not a word"),
    ],
)
def test_anything_else_is_refused(jobs: Jobs, line: bytes, error: str) -> None:
    told = jobs.serve(line)
    assert (told["ok"], error in told["error"]) == (False, True)


def test_a_connection_that_says_nothing_is_no_word(jobs: Jobs) -> None:
    assert jobs.serve(b"") is None


def test_a_wrong_command_line_is_usage(jobs: Jobs) -> None:
    for words in (["kill"], ["stop"], ["stop", "a/b.sock"], ["list", "x"], ["checkpoint", "a.service", "HUP"]):
        assert subprocess.run(jobs.argv(*words), capture_output=True, check=False, timeout=60).returncode == 64, words


@pytest.mark.parametrize(
    ("cgroup", "place"),
    [
        ("/system.slice/train.service", "/system.slice/train.service"),
        ("/system.slice/train.service/payload/x", "/system.slice/train.service"),
        ("/system.slice/run-r12.scope", "/system.slice/run-r12.scope"),
        ("/user.slice/user-1000.slice/session-3.scope", ""),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", ""),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.scope", ""),
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/t.service",
            "/user.slice/user-1000.slice/user@1000.service/app.slice/t.service",
        ),
        (
            "/user.slice/user-1000.slice/user@1000.service/run-u3.scope",
            "/user.slice/user-1000.slice/user@1000.service/run-u3.scope",
        ),
        (
            "/system.slice/slurmstepd.scope/job_123/step_0/user/task_0",
            "/system.slice/slurmstepd.scope/job_123",
        ),
        (f"/docker/{'a' * 64}", f"/docker/{'a' * 64}"),
        (f"/system.slice/docker-{'a' * 64}.scope", f"/system.slice/docker-{'a' * 64}.scope"),
        ("/../../x.service", ""),
        ("/", ""),
        ("", ""),
    ],
)
def test_which_control_group_is_a_jobs_own(cgroup: str, place: str) -> None:
    """A login is nobody's own: it holds the shell, the editor, and the next job."""
    assert place_of(cgroup) == place


def test_it_is_refused_under_test_where_it_would_touch_this_machine() -> None:
    argv = [sys.executable, "-I", "-m", "powerguard.effectors.signals.helper", "list"]
    told = json.loads(subprocess.run(argv, capture_output=True, check=False, timeout=60).stdout)
    assert "refused under test" in told["error"]


def test_what_it_imports_is_little() -> None:
    """Root's process shall be small, and shall not depend on what a wheel brings."""
    code = "import sys; before = set(sys.modules); import powerguard.effectors.signals.helper; "
    code += "print(*(set(sys.modules) - before))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    found = set(ended.stdout.split())
    assert {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "powerguard",
        "powerguard.clock",
        "powerguard.effectors",
        "powerguard.effectors.root_helper",
        "powerguard.effectors.signals",
        "powerguard.effectors.signals.helper",
        "powerguard.effectors.signals.kept",
        "powerguard.effectors.signals.processes",
    }
