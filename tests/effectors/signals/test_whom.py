"""Whom powerguard-signal reaches, against real jobs: whom a socket's name leads to, and whom it never touches.

Nobody can name a process to it, so whoever wants to have somebody else's stopped must have a name lead to him.
"""

import json
import os
import socket
import subprocess

import pytest

from powerguard.effectors.signals.processes import place_of
from tests.peers import require
from tests.peers.jobs import LAUNCHER, PYTHON, RANK, USER, Jobs, did, stands, state, until

# --- What is of the same job ----------------------------------------------------------------------------------------


def test_all_ranks_of_a_launcher_stop_and_go_on(jobs: Jobs) -> None:
    """torchrun gives each rank a session of its own: the job is the tree below the launcher, not a session."""
    script = LAUNCHER.replace("RANK,", f"{RANK!r},")
    launcher = jobs.start(PYTHON, "-c", script, jobs.path("llm.sock"), "3")
    pids = {jobs.pid("llm.sock", f"rank{rank}") for rank in range(3)}
    answer = jobs.ask("stop", "llm.sock")
    assert set(did(answer)) == {launcher.pid, *pids}
    assert answer["processes"][0]["pid"] == launcher.pid, "who would notice that its children stand is stopped first"
    assert all(stands(pid) for pid in (launcher.pid, *pids))
    jobs.ask("continue", "llm.sock")
    assert all(jobs.advances("llm.sock", f"rank{rank}") for rank in range(3))


def test_the_shell_around_a_trainer_and_another_job_beside_it_are_left_alone(jobs: Jobs) -> None:
    """A login: the same user, the same shell, the same control group; only what the socket's owner started counts."""
    script = f'{PYTHON} -c "$0" $1 rank0 listens & {PYTHON} -c "$0" $2 rank0 listens & wait'
    shell = jobs.start("/bin/sh", "-c", script, RANK, jobs.path("a.sock"), jobs.path("b.sock"))
    one, other = jobs.pid("a.sock"), jobs.pid("b.sock")
    assert set(did(jobs.ask("stop", "a.sock"))) == {one}
    until(lambda: state(shell.pid) == "S")
    assert not stands(other)
    assert jobs.advances("b.sock")


@pytest.mark.root
def test_a_unit_is_stopped_whole(jobs: Jobs) -> None:
    """In a control group of its own whatever runs there belongs to the job, whoever its parent is."""
    cgroup = jobs.cgroup("train.service")
    jobs.rank("llm.sock", "listens", cgroup=cgroup)
    jobs.rank("helper", role="loader", cgroup=cgroup)
    answer = jobs.ask("stop", "llm.sock")
    assert (answer["scope"], set(did(answer))) == (
        "train.service",
        {jobs.pid("llm.sock"), jobs.pid("helper", "loader")},
    )


@pytest.mark.root
@pytest.mark.parametrize("name", ["tmux: server", "powerguard"])
def test_a_unit_of_a_terminal_server_is_no_job(jobs: Jobs, name: str) -> None:
    """tmux.service, code-server, a notebook server: all that a person does runs there, and would be ended with it.

    So does the daemon: what resume.command leaves running is in the daemon's own unit, which must not be stopped.
    """
    cgroup = jobs.cgroup("server.service")
    script = f'printf "{name}" > /proc/$$/comm; {PYTHON} -c "$0" $1 rank0 listens & {PYTHON} -c "$0" $2 rank0 &'
    server = jobs.start("/bin/sh", "-c", f"{script} wait", RANK, jobs.path("a.sock"), jobs.path("b"), cgroup=cgroup)
    one, other = jobs.pid("a.sock"), jobs.pid("b")
    answer = jobs.ask("stop", "a.sock")
    assert (answer["scope"], set(did(answer))) == ("process tree", {one})
    assert not stands(server.pid)
    assert not stands(other)


@pytest.mark.root
def test_in_a_unit_that_starts_jobs_for_many_only_the_tree_counts(jobs: Jobs) -> None:
    """slurmd without control groups of its own, cron, sshd: somebody else runs there, too."""
    cgroup = jobs.cgroup("starter.service")
    jobs.rank("llm.sock", "listens", cgroup=cgroup)
    jobs.rank("other.sock", "listens", cgroup=cgroup)
    other = jobs.start("sleep", "60", user=0, cgroup=cgroup)
    until(lambda: str(other.pid) in (cgroup / "cgroup.procs").read_text(encoding="ascii").split())
    answer = jobs.ask("stop", "llm.sock")
    assert (answer["scope"], set(did(answer))) == ("process tree", {jobs.pid("llm.sock")})


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


# --- Whom it never touches ------------------------------------------------------------------------------------------


@pytest.mark.root
def test_roots_processes_are_left_alone(jobs: Jobs) -> None:
    process = jobs.rank("root.sock", "listens", user=0)
    answer = jobs.ask("stop", "root.sock")
    assert not answer["ok"]
    assert "root listens there" in answer["error"]
    assert not stands(process.pid)


@pytest.mark.root
def test_a_socket_file_of_somebody_else_leads_nowhere(jobs: Jobs) -> None:
    """Whoever passes his socket to another user's process to listen on it has named nobody."""
    process = jobs.rank("llm.sock", "listens")
    os.chown(jobs.path("llm.sock"), 12345, -1)
    answer = jobs.ask("stop", "llm.sock")
    assert (answer["ok"], "uid 12345's file" in answer["error"]) == (False, True)
    assert not stands(process.pid)


def test_a_link_a_file_and_nobody_lead_nowhere(jobs: Jobs) -> None:
    process = jobs.rank("llm.sock", "listens")
    (jobs.sockets / "link.sock").symlink_to("llm.sock")
    (jobs.sockets / "file.sock").write_text("", encoding="ascii")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(jobs.path("deaf.sock"))
    wrong = {name: jobs.ask("stop", name) for name in ("link.sock", "file.sock", "deaf.sock", "none.sock")}
    assert [each["ok"] for each in wrong.values()] == [False] * 4
    assert "is not a socket" in wrong["file.sock"]["error"]
    assert not stands(process.pid)
    assert not jobs.stopped.exists()


def test_a_hard_link_to_somebodys_other_socket_leads_nowhere(jobs: Jobs) -> None:
    """fs.protected_hardlinks=0: anybody links a database's socket to here, and its processes would be his "trainer"."""
    process = jobs.rank("llm.sock", "listens")
    os.link(jobs.path("llm.sock"), jobs.path("x.sock"))
    answer = jobs.ask("stop", "x.sock")
    assert (answer["ok"], "is a hard link" in answer["error"]) == (False, True)
    assert not stands(process.pid)


@pytest.mark.root
def test_where_proc_hides_processes_that_is_reported(jobs: Jobs) -> None:
    """hidepid= hides other users' processes from root without CAP_SYS_PTRACE, unless the mount names a group of his."""
    process = jobs.rank("llm.sock", "listens")
    script = 'mount -t proc -o hidepid=2,gid=4242 proc /proc || exit 77; exec setpriv --bounding-set=-all,+kill "$@"'
    argv = [require("unshare"), "-m", "sh", "-c", script, "sh", *jobs.argv("stop", "llm.sock")]
    ended = subprocess.run(argv, capture_output=True, check=False, timeout=60)
    if not ended.stdout:
        pytest.skip("root may not mount here (a container)")
    answer = json.loads(ended.stdout)
    assert (answer["ok"], "hidepid=, mount it with gid=powerguard" in answer["error"]) == (False, True)
    assert not stands(process.pid)


def test_a_child_that_has_inherited_the_socket_is_nobody(jobs: Jobs) -> None:
    """Who called listen() has ended; its number may be anybody's by now, so nobody is signalled."""
    script = "import os, socket, sys, time\ns = socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\ns.listen()\n"
    script += "if os.fork():\n    os._exit(0)\n"
    script += "open(sys.argv[1] + '.heir.up', 'w').write(f'{os.getpid()}\\n')\ntime.sleep(60)\n"
    jobs.start(PYTHON, "-c", script, jobs.path("llm.sock")).wait(60)
    heir = jobs.pid("llm.sock", "heir")
    answer = jobs.ask("stop", "llm.sock")
    assert not answer["ok"]
    assert "has ended" in answer["error"] or "the GPU is gone" in answer["error"]
    assert not stands(heir)


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
    assert process.wait(60) == 0
    for client in waiting:
        client.close()


# --- List, and a checkpoint by signal -------------------------------------------------------------------------------


def test_list_shows_and_changes_nothing(jobs: Jobs) -> None:
    process = jobs.rank("llm.sock", "listens")
    (jobs.sockets / "dead.sock").write_text("", encoding="ascii")
    answer = jobs.ask("list")
    assert answer["ok"]
    assert answer["stopped"] == []
    llm, dead = answer["trainers"]
    assert (dead["socket"], dead["reachable"]) == ("dead.sock", False)
    assert (llm["socket"], llm["reachable"], llm["uid"], llm["listener"]) == ("llm.sock", True, USER, process.pid)
    jobs.ask("stop", "llm.sock")
    stopped = jobs.ask("list")["stopped"]
    assert [(each["socket"], each["processes"]) for each in stopped] == [("llm.sock", 1)]
    assert list(jobs.folder.glob("*.new")) == []


def test_many_sockets_that_are_planted_hide_no_trainer(jobs: Jobs) -> None:
    jobs.rank("llm.sock", "listens")
    for number in range(70):
        (jobs.sockets / f"0{number}.sock").write_text("", encoding="ascii")
    answer = jobs.ask("list")
    assert (answer["trainers"][0]["socket"], len(answer["trainers"]), answer["left_out"]) == ("llm.sock", 64, 7)


@pytest.mark.root
def test_a_unit_within_a_unit_is_none_of_the_system(jobs: Jobs) -> None:
    """Who has a control group to himself (Delegate=) names what he makes in it as he likes."""
    unit = jobs.unit("train")
    jobs.rank("t", "catches", cgroup=jobs.cgroup("bob.service", unit))
    jobs.allowed.write_text(f"{unit} USR1\n", encoding="ascii")
    assert "has no process" in jobs.ask("checkpoint", unit, "USR1")["error"]


@pytest.mark.root
def test_a_unit_is_asked_for_a_checkpoint_by_whoever_has_a_handler(jobs: Jobs) -> None:
    """A shell around a trainer has no handler, and a signal would end it; nor has a program that only helps."""
    unit = jobs.unit("train")
    cgroup = jobs.cgroup(unit)
    script = f'{PYTHON} -c "$0" $1 rank0 catches; true'
    shell = jobs.start("/bin/sh", "-c", script, RANK, jobs.path("t"), cgroup=cgroup)
    jobs.rank("plain", role="loader", cgroup=cgroup)
    pid = jobs.pid("t")
    jobs.allowed.write_text(f"# units that make a checkpoint on a signal\n{unit} USR1\n", encoding="ascii")
    answer = jobs.ask("checkpoint", unit, "USR1")
    assert (answer["ok"], did(answer), answer["signalled"]) == (True, {pid: "signalled"}, 1)
    until(lambda: jobs.noted("t", "SIGUSR1"))
    until(lambda: state(shell.pid) == "S")
    assert jobs.advances("plain", "loader")


def test_only_what_root_has_listed_is_signalled(jobs: Jobs) -> None:
    unit = jobs.unit("train")
    jobs.allowed.write_text(f"{unit} USR1\n", encoding="ascii")
    assert "is not in" in jobs.ask("checkpoint", unit, "USR2")["error"]
    assert "is not in" in jobs.ask("checkpoint", "other.service", "USR1")["error"]
    assert "has no process" in jobs.ask("checkpoint", unit, "USR1")["error"]
    jobs.allowed.unlink()
    assert "is not in" in jobs.ask("checkpoint", "train.service", "USR1")["error"]


@pytest.mark.parametrize("where", ["signals", "."])
def test_a_list_that_others_can_change_is_not_believed(jobs: Jobs, where: str) -> None:
    jobs.allowed.write_text("train.service USR1\n", encoding="ascii")
    path = jobs.root / where
    path.chmod(path.stat().st_mode | 0o022)
    assert "other users than root can change it" in jobs.ask("checkpoint", "train.service", "USR1")["error"]
    answer = jobs.ask("list")
    assert (answer["units"], "other users than root can change it" in answer["units_because"]) == ([], True)


@pytest.mark.parametrize("line", ["train.service", "train.service KILL", "train USR1", "a.service USR1 USR2"])
def test_a_wrong_line_is_named(jobs: Jobs, line: str) -> None:
    jobs.allowed.write_text(f"# first\n{line}\n", encoding="ascii")
    assert f"{jobs.allowed}:2:" in jobs.ask("checkpoint", "train.service", "USR1")["error"]
