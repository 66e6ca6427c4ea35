"""powerguard-slurm and its effector against a real cluster on loopback: munged, slurmctld, a slurmd for each node."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Le

from powerguard.core.model.actions import Action, DrainNode, LeaveNode, ReturnNode, SignalJobs
from powerguard.core.scheduler import DRAIN_LIMIT_S
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Ended
from powerguard.effectors.options import SchedulerOptions
from powerguard.effectors.root_helper import RefusedError
from powerguard.effectors.slurm import helper
from powerguard.effectors.slurm.effector import LIMIT_S, SlurmEffector, findings
from tests.peers import slurm
from tests.peers.slurm import Cluster

pytestmark = pytest.mark.xdist_group("slurm")

WAITS = "for i in $(seq 600); do sleep 0.2; done"
STANDS = f"trap 'exit 143' TERM\n{WAITS}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="sl") as folder, slurm.running(Path(folder), ["gpu1", "gpu2"]) as made:
        yield made


@pytest.fixture
def rig(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with both nodes in service and no job."""
    yield cluster
    cluster.clear()


@pytest.fixture(scope="module")
def path(cluster: Cluster) -> Iterator[Path]:
    with slurm.helper_listening(cluster) as path:
        yield path


def effector(path: Path, node: str = "gpu1", *, hold: bool = False) -> SlurmEffector:
    made = SchedulerOptions(kind="slurm", node=node, socket=str(path), spread_s=0.0, hold=hold)
    return SlurmEffector(made, host=socket.gethostname(), feeds=("rack-a",))


def do(path: Path, action: Action, node: str = "gpu1", *, hold: bool = False) -> dict[str, Any]:
    return dict(asyncio.run(effector(path, node, hold=hold).carry_out(action)))


def drain(outage: str = "o-1") -> DrainNode:
    return DrainNode(id="a", by_s=0.0, outage=outage)


def leave(outage: str = "o-1") -> LeaveNode:
    return LeaveNode(id="b", by_s=0.0, outage=outage)


def give_back(outage: str = "o-1", *jobs: str) -> ReturnNode:
    return ReturnNode(id="c", by_s=0.0, outage=outage, jobs=jobs)


def by_hand(rig: Cluster, state: str, reason: str, node: str = "gpu1") -> None:
    rig.ask("scontrol", "update", f"NodeName={node}", f"State={state}", f"Reason={reason}")


def test_drained_once_with_a_mark_of_the_outage_and_given_back(rig: Cluster, path: Path) -> None:
    assert do(path, drain())["did"] == "drained"
    node = rig.node("gpu1")
    assert node["State"].startswith("IDLE+DRAIN")
    host = socket.gethostname().partition(".")[0]
    assert node["Reason"] == f"powerguard: on-battery ups=rack-a outage=o-1 host={host}"
    assert do(path, drain())["did"] == "kept"
    assert do(path, drain("o-2"))["did"] == "drained"  # a second outage puts its own mark there
    assert " outage=o-2 " in rig.node("gpu1")["Reason"]
    assert do(path, give_back("o-1"))["did"] == "not_ours"
    assert rig.state("gpu1").startswith("IDLE+DRAIN")
    assert do(path, give_back("o-2"))["did"] == "resumed"
    assert rig.node("gpu1")["State"].startswith("IDLE")
    assert do(path, give_back("o-2"))["did"] == "in_service"


def test_a_mark_of_an_unknown_outage_is_taken_off_and_no_other(rig: Cluster, path: Path) -> None:
    """A daemon that has lost its journal does not know the outage's id; the mark itself says that it is ours."""
    do(path, leave("o-1"))
    assert do(path, give_back(""))["did"] == "resumed"
    rig.until(lambda: rig.is_idle("gpu1"), "it is in service")
    assert do(path, give_back(""))["did"] == "in_service"
    by_hand(rig, "DRAIN", "bad disk")
    assert do(path, give_back(""))["did"] == "not_ours"
    assert rig.node("gpu1")["Reason"] == "bad disk"


def test_a_boot_that_slurm_did_not_expect_is_taken_off_where_it_was_ours(rig: Cluster, path: Path) -> None:
    """The way to slurmctld was without power in the outage, and back after it."""
    rig.reboot_unexpectedly("gpu1", helper.REBOOTED)
    assert do(path, give_back())["did"] == "not_ours"
    assert do(path, replace(give_back(), rebooted=True))["did"] == "resumed"
    rig.until(lambda: rig.is_idle("gpu1"), "it is in service")
    by_hand(rig, "DOWN", "bad disk")
    assert do(path, replace(give_back(), rebooted=True))["did"] == "not_ours"


def test_the_longest_spread_leaves_time_for_the_word() -> None:
    """A host that waits until its order has ended is never drained."""
    (most_s,) = [each.le for each in SchedulerOptions.model_fields["spread_s"].metadata if isinstance(each, Le)]
    assert isinstance(most_s, float)
    assert most_s + LIMIT_S <= DRAIN_LIMIT_S


@pytest.mark.parametrize("state", ["DRAIN", "DOWN"])
def test_a_mark_of_another_origin_stays(rig: Cluster, path: Path, state: str) -> None:
    """Before us, during and after: a person's drain is neither taken over, nor lifted."""
    by_hand(rig, state, "bad disk")
    result = do(path, drain())
    assert (result["did"], result["reason"]) == ("not_ours", "bad disk")
    assert do(path, leave())["did"] == "not_ours"
    assert do(path, give_back())["did"] == "not_ours"
    assert rig.node("gpu1")["Reason"] == "bad disk"
    by_hand(rig, "RESUME", "")
    do(path, drain())
    by_hand(rig, state, "bad disk")  # in the middle of our outage
    assert do(path, give_back())["did"] == "not_ours"
    assert rig.node("gpu1")["Reason"] == "bad disk"


def test_a_reason_that_only_begins_like_ours_is_not_of_this_outage(rig: Cluster, path: Path) -> None:
    by_hand(rig, "DRAIN", "powerguard: on-battery ups=a outage=o-11 host=x")
    assert do(path, give_back("o-1"))["did"] == "not_ours"


@pytest.mark.parametrize("more", [" and Alice: bad disk", " [bad disk]", "\nbad disk"])
def test_our_mark_with_words_of_a_person_is_theirs(rig: Cluster, path: Path, more: str) -> None:
    do(path, drain())
    by_hand(rig, "DRAIN", rig.node("gpu1")["Reason"] + more)
    result = do(path, give_back())
    assert result["did"] == "not_ours"
    assert "bad disk" in result["reason"]
    assert "DRAIN" in rig.state("gpu1")


@pytest.mark.parametrize(("more", "did"), [("", "resumed"), ("        bad disk", "not_ours")])
def test_what_newer_versions_print_below_the_reason_is_not_part_of_it(
    rig: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, did: str
) -> None:
    """From 23.02 on, the reservation that a node is in; a further line of the reason is eight spaces in."""
    monkeypatch.setenv("SLURM_CONF", str(rig.conf))
    monkeypatch.setenv("PATH", f"{tmp_path}:{rig.env['PATH']}")
    real = shutil.which("scontrol", path=rig.env["PATH"])
    below = f"{more} InstanceId=i-1 InstanceType=y ReservationName=class"
    program(tmp_path, "scontrol", f'{real} "$@" | sed "s/ Reason=.*/&{below}/"')
    word: dict[str, object] = {"node": "gpu1", "outage": "o-1"}
    assert helper.carry_out({**word, "word": "drain", "ups": "a"})["did"] == "drained"
    assert helper.carry_out({**word, "word": "return", "hold": False, "rebooted": False, "jobs": []})["did"] == did


def test_a_comment_of_several_lines_adds_no_job(rig: Cluster, path: Path) -> None:
    """Anybody may submit it; root would requeue or signal the job of another user that the second line names."""
    line = f"{'999999':<32}{'R':<4}{'gpu1':<72}{'1':<8}powerguard:signal=TERM"
    table = f"{'999999':<32}{'gpu1':<72}{'1':<8}{'0':<12}"
    mine = rig.submit(STANDS, "--nodelist=gpu1", "--requeue", f"--comment=x\n{line}\n{table}")
    result = do(path, leave())
    assert (result["jobs"], result["refused"]) == (mine, 0)


def test_jobs_are_requeued_once_by_the_host_of_their_script_and_start_again(rig: Cluster, path: Path) -> None:
    mine = rig.submit(STANDS, "--nodelist=gpu1", "--requeue")
    keeps = rig.submit(STANDS, "--nodelist=gpu2", "--requeue")
    assert do(path, drain())["jobs"] == mine, "so the return knows it, even if the answer to the next word is lost"
    result = do(path, leave())
    assert (result["did"], result["jobs"], result["refused"]) == ("down", mine, 0)
    assert rig.node("gpu1")["State"].startswith("DOWN")
    assert do(path, leave())["did"] == "down"
    assert rig.job(mine)["Restarts"] == "1"
    assert rig.job(keeps)["JobState"] == "RUNNING"
    rig.until(lambda: rig.job(mine)["JobState"] == "PENDING", "the job is pending")
    result = do(path, give_back("o-1", mine))
    assert (result["did"], result["jobs"]) == ("resumed", mine)
    rig.until(lambda: rig.job(mine)["JobState"] == "RUNNING", "the job runs again", 100.0)  # Slurm's own delay: 121 s
    refused = do(path, give_back("o-1", mine, "999999"))
    assert (refused["did"], refused["jobs"], refused["refused"]) == ("in_service", "", 2)


@pytest.mark.slow
def test_one_of_an_array_one_that_spans_hosts_and_one_that_may_not_be_requeued(rig: Cluster, path: Path) -> None:
    both = rig.submit(STANDS, "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--requeue")
    ends = rig.submit(STANDS, "--nodelist=gpu2", "--no-requeue")
    array = rig.submit(STANDS, "--array=7,8", "--nodelist=gpu1", "--requeue")
    assert rig.job(both)["BatchHost"] == "gpu1"
    result = do(path, leave(), node="gpu2")
    assert (result["jobs"], result["refused"]) == ("", 1)
    assert ends in result["because"]
    result = do(path, leave())
    assert f"{array}_7" in result["jobs"].split(",") or f"{array}_8" in result["jobs"].split(",")
    assert array not in result["jobs"].split(",")
    assert rig.job(both)["Restarts"] == "1"


@pytest.mark.slow
def test_a_heterogeneous_job_is_requeued_as_a_whole_by_the_host_of_its_leader(rig: Cluster, path: Path) -> None:
    parts = ("--requeue", "--nodelist=gpu1", "--ntasks=1", ":", "--requeue", "--nodelist=gpu2", "--ntasks=1")
    job = rig.submit(STANDS, *parts)
    named = do(path, drain(), node="gpu2")["jobs"]
    assert named == "", "its second part is led by gpu1"
    assert do(path, leave())["jobs"] == job
    rig.until(lambda: rig.ask("squeue", "--noheader", "--format=%T").split() == ["PENDING"] * 2, "both parts wait")


@pytest.mark.slow
def test_held_jobs_are_released_at_the_return(rig: Cluster, path: Path) -> None:
    job = rig.submit(STANDS, "--nodelist=gpu1", "--requeue")
    do(path, leave(), hold=True)
    rig.until(lambda: rig.job(job)["JobState"] == "PENDING", "the job is pending")
    assert rig.job(job)["Priority"] == "0"
    assert do(path, give_back("o-1", job), hold=True)["jobs"] == job
    rig.until(lambda: rig.job(job)["JobState"] == "RUNNING", "the job runs again", 100.0)


def test_only_a_job_that_asked_for_it_gets_its_signal(rig: Cluster, path: Path) -> None:
    asked_file = rig.folder / "signalled"
    script = f"trap 'echo asked >> {asked_file}' USR1\ntouch {rig.folder}/ready-$SLURM_JOB_ID\n{WAITS}"
    asks = rig.submit(script, "--nodelist=gpu1", "--comment=powerguard:signal=USR1")
    other = rig.submit(script, "--nodelist=gpu1")
    for job in (asks, other):  # A job that runs may not have its trap yet.
        rig.until((rig.folder / f"ready-{job}").exists, f"job {job} is ready")
    assert do(path, SignalJobs(id="s", by_s=0.0, outage="o-1"))["jobs"] == asks
    rig.until(lambda: asked_file.exists() and asked_file.read_text(), "the signal arrived")
    assert rig.job(other)["JobState"] == "RUNNING"
    assert asked_file.read_text() == "asked\n"


class Answers:
    """A host on which Slurm's commands answer as the test says, by what their line holds."""

    name = "gpu1"

    def __init__(self, answers: dict[str, tuple[int, str]]) -> None:
        self._answers = answers

    def now_s(self) -> float:
        return 0.0

    def run(self, argv: Sequence[str], *, limit_s: float) -> Ended:
        status, text = next(answer for part, answer in self._answers.items() if part in " ".join(argv))
        return Ended(returncode=status, stdout=text.encode() if status == 0 else b"", stderr=text.encode())


@pytest.mark.parametrize(("second", "is_done"), [((0, " Comment=powerguard:signal=USR1"), True), ((1, "gone"), False)])
def test_a_signal_that_some_jobs_got_is_not_to_be_said_again(second: tuple[int, str], *, is_done: bool) -> None:
    """A job that ended meanwhile would have the others signalled every few seconds."""
    rows = "".join(f"{job:<32}{'gpu1':<72}{'1':<8}{'0':<12}\n" for job in ("12", "13"))
    host = Answers(
        {"squeue": (0, rows), "show job 12": (1, "Invalid job id"), "show job 13": second, "scancel": (0, "")}
    )
    answer = helper.answer_to({"word": "signal", "node": "gpu1", "outage": "o-1"}, host)
    assert answer["ok"] is is_done
    assert "Invalid job id" in str(answer["because"] if is_done else answer["error"])
    assert answer.get("jobs", []) == (["13"] if is_done else [])


def program(folder: Path, name: str, script: str) -> None:
    """A command of Slurm's, as it would misbehave; the next one of that name in PATH is the real one."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("script", ["sleep 60", "exit 1"])
@pytest.mark.parametrize("hangs", ["requeue", "squeue"])
def test_the_node_is_set_down_whatever_becomes_of_its_jobs(
    rig: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str, script: str
) -> None:
    job = rig.submit(STANDS, "--nodelist=gpu1", "--requeue")
    monkeypatch.setenv("SLURM_CONF", str(rig.conf))
    monkeypatch.setenv("PATH", f"{tmp_path}:{rig.env['PATH']}")
    real = shutil.which("scontrol", path=rig.env["PATH"])
    if hangs == "squeue":
        program(tmp_path, "squeue", script)
    else:
        program(tmp_path, "scontrol", f'if [ "$1" = requeue ]; then {script}; fi; exec {real} "$@"')
    detail = helper.carry_out({"word": "leave", "node": "gpu1", "outage": "o-1", "ups": "a", "hold": False})
    assert (detail["ok"], detail["did"], detail["refused"]) == (True, "down", 1)
    assert rig.state("gpu1").startswith("DOWN")
    rig.until(lambda: rig.job(job)["JobState"] == "PENDING", "slurmctld itself has requeued the job")


def test_a_node_that_was_not_drained_before_stays_out_when_its_host_boots(rig: Cluster, path: Path) -> None:
    """ReturnToService=2 gives back each node that is only down, as soon as its slurmd has registered."""
    rig.returns_to_service(2)
    assert do(path, leave())["did"] == "down"
    rig.reboot("gpu1")
    rig.until(lambda: "DOWN" not in rig.state("gpu1"), "its slurmd has registered")
    assert rig.state("gpu1").startswith("IDLE+DRAIN")
    assert do(path, give_back())["did"] == "resumed"
    rig.returns_to_service(1)


def test_jobs_that_were_requeued_are_named_where_slurm_dies_before_the_node_is_down(
    rig: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same order again sets the node down, and requeues nothing twice."""
    job = rig.submit(STANDS, "--nodelist=gpu1", "--requeue")
    monkeypatch.setenv("SLURM_CONF", str(rig.conf))
    monkeypatch.setenv("PATH", f"{tmp_path}:{rig.env['PATH']}")
    real = shutil.which("scontrol", path=rig.env["PATH"])
    refuses = 'echo "slurm_update error: Unable to contact slurm controller" >&2; exit 1'
    program(tmp_path, "scontrol", f'if [ "$1" = update ]; then {refuses}; fi; exec {real} "$@"')
    word = {"word": "leave", "node": "gpu1", "outage": "o-1", "ups": "a", "hold": False}
    detail = helper.carry_out(word)
    assert (detail["ok"], detail["did"], detail["jobs"]) == (True, "requeued", [job])
    assert "slurmctld does not answer: scontrol ping" in detail["because"]
    (tmp_path / "scontrol").unlink()
    assert helper.carry_out(word)["did"] == "down"
    assert rig.job(job)["Restarts"] == "1"


def test_more_jobs_than_one_line_holds_do_not_keep_the_node(rig: Cluster, path: Path) -> None:
    do(path, leave())
    result = do(path, give_back("o-1", *(str(9_000_000 + each) for each in range(700))))
    assert (result["did"], result["refused"]) == ("resumed", 700)


def test_jobs_that_slurm_had_no_time_to_start_are_started_by_the_next_order(
    rig: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was requeued in hold and is not released would wait for ever."""
    monkeypatch.setenv("SLURM_CONF", str(rig.conf))
    monkeypatch.setenv("PATH", f"{tmp_path}:{rig.env['PATH']}")
    job = rig.submit(STANDS, "--nodelist=gpu1", "--requeue")
    word: dict[str, object] = {"node": "gpu1", "outage": "o-1", "hold": True}
    helper.carry_out({**word, "word": "leave", "ups": "a"})
    rig.until(lambda: rig.job(job)["JobState"] == "PENDING", "the job is pending")
    real = shutil.which("scontrol", path=rig.env["PATH"])
    program(tmp_path, "scontrol", f'if [ "$1" = release ]; then exit 1; fi; exec {real} "$@"')
    assert helper.carry_out({**word, "word": "return", "rebooted": False, "jobs": [job]})["ok"] is False
    (tmp_path / "scontrol").unlink()
    assert helper.carry_out({**word, "word": "return", "rebooted": False, "jobs": [job]})["jobs"] == [job]
    assert rig.job(job)["Priority"] != "0"


def test_a_controller_that_hangs_costs_no_more_than_the_limit(rig: Cluster, path: Path) -> None:
    rig.send("slurmctld", signal.SIGSTOP)
    try:
        with pytest.raises(EffectorError, match=r"no whole answer within 2\.0 s: slurmctld hangs or is away"):
            do(path, drain())
    finally:
        rig.send("slurmctld", signal.SIGCONT)
    assert do(path, drain())["did"] == "drained"


def test_without_munge_and_with_a_node_that_is_not_this_hosts(rig: Cluster, path: Path) -> None:
    with pytest.raises(EffectorError, match="runs on elsewhere, not on this host"):
        do(path, drain(), node="far")
    with pytest.raises(EffectorError, match=r"it is not in slurm\.conf: set scheduler\.node"):
        do(path, drain(), node="gpu9")
    rig.kill("munged")
    try:
        with pytest.raises(EffectorError, match=r"munged does not answer|no whole answer"):
            do(path, drain())
    finally:
        rig.start_munged()
    rig.until(lambda: do(path, drain())["did"] == "drained", "munged is used again")


def test_who_is_not_root_is_refused_by_slurm(rig: Cluster) -> None:
    script = "import json, sys; from powerguard.effectors.slurm import helper; "
    script += "print(json.dumps(helper.carry_out(json.loads(sys.argv[1]))))"
    word = '{"word": "drain", "node": "gpu1", "outage": "o-1", "ups": "a"}'
    done = subprocess.run(
        ["/usr/bin/setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c", script, word],
        env=rig.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd="/",
    )
    if "Permission denied" in done.stderr or "not found" in done.stderr or "No module" in done.stderr:
        pytest.skip("another user cannot start this interpreter")
    assert '"ok": false' in done.stdout
    assert "run as root, or as SlurmUser" in done.stdout


async def test_doctor_names_the_jobs_that_would_be_lost_and_a_mark_that_is_left(rig: Cluster, path: Path) -> None:
    options = SchedulerOptions(kind="slurm", node="gpu1", socket=str(path))
    assert [(each.name, each.verdict) for each in await findings(options, host="h")] == [("scheduler", "PASS")]
    job = rig.submit(STANDS, "--nodelist=gpu1", "--no-requeue")
    by_hand(rig, "DRAIN", "bad disk")
    found = {each.name: each for each in await findings(options, host="h")}
    assert {name: each.verdict for name, each in found.items()} == {
        "scheduler": "PASS",
        "scheduler.node": "WARN",
        "scheduler.jobs": "WARN",
    }
    assert job in found["scheduler.jobs"].text
    assert await findings(SchedulerOptions(), host="h") == []
    gone = SchedulerOptions(kind="slurm", node="gpu1", socket=str(rig.folder / "nothing.sock"))
    assert [each.verdict for each in await findings(gone, host="h")] == ["FAIL"]


RETURN = {"word": "return", "node": "gpu1", "outage": "o", "hold": False, "rebooted": False}


@pytest.mark.parametrize(
    ("word", "because"),
    [
        ({"word": "reboot", "node": "gpu1"}, "unknown word; "),
        ({"word": "drain", "node": "gpu1"}, "drain takes node, outage, ups"),
        ({"word": "drain", "node": "gpu[1-9]", "outage": "o", "ups": "a"}, "node must match "),
        ({"word": "drain", "node": "gpu1,gpu2", "outage": "o", "ups": "a"}, "node must match "),
        ({"word": "drain", "node": "gpu1", "outage": "o Reason=x", "ups": "a"}, "outage must match "),
        ({"word": "drain", "node": "--help", "outage": "o", "ups": "a"}, "node must match "),
        ({"word": "leave", "node": "gpu1", "outage": "o", "ups": "a\nState=DOWN", "hold": False}, "ups must match "),
        ({**RETURN, "jobs": ["1;reboot"]}, "jobs must be a list of at most 1000 job ids"),
        ({**RETURN, "jobs": [12]}, "jobs must be a list of at most 1000 job ids"),
        ({**RETURN, "jobs": ["1"] * 1001}, "jobs must be a list of at most 1000 job ids"),
        ({"word": "show", "node": None}, "node must match "),
    ],
)
def test_what_is_no_word_is_refused_before_slurm_is_asked(word: dict[str, object], because: str) -> None:
    """Each for its own fault, and not for a field that the word has got since."""
    with pytest.raises(RefusedError, match=f"^{because}"):
        helper.checked(word, helper.ThisHost())


@pytest.mark.parametrize(
    ("prints", "expected"),
    [
        ("while :; do echo NodeName=gpu1; done", "no whole answer"),
        ("sleep 60", "no whole answer within 2.0 s: slurmctld hangs or is away (scontrol ping)"),
        (
            "echo 's_p_parse_file: cannot stat file /nfs/slurm.conf: ..., retrying in 1sec up to 60sec' >&2; sleep 60",
            "up to 60sec (slurm.conf cannot be read: set SLURM_CONF",
        ),
        (
            "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1",
            "source (slurm.conf cannot be read: set SLURM_CONF",
        ),
        ("echo garbage", "the answer is not of that node"),
        ("exit 1", "failed"),
        ("printf '\\033[31mred\\n' >&2; exit 3", "red"),
    ],
)
def test_commands_that_misbehave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str, expected: str) -> None:
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{prints}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = helper.carry_out({"word": "show", "node": "gpu1"})
    assert answer["ok"] is False
    assert expected in answer["error"]
    assert "\033" not in answer["error"]


def test_without_slurms_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = helper.carry_out({"word": "show", "node": "gpu1"})
    assert "scontrol is not in PATH: install Slurm's client commands" in answer["error"]
