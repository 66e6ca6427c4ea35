"""A job on two nodes of a real Slurm: one commits, the rank on the other ends, and the job is requeued."""

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed (scripts/test-torch gets it)")

from powerguard.wire import After, LeaveRequest, Reason
from tests.peers.ports import free_port
from tests.peers.slurm import PROGRAMS, running
from tests.torch.hosts import CHILD, Host
from tests.torch.processes import ROOT
from tests.trainer.toy import LIMIT_S, ask, short_folder

pytestmark = [pytest.mark.peer(*PROGRAMS, "srun", "unshare"), pytest.mark.root]
EXAMPLE = ROOT / "examples" / "slurm-many.sbatch"
RANK = """
hostname $SLURMD_NODENAME
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0 HOST_FOLDER={folder}/$SLURMD_NODENAME
exec {python} {child} 0.02 >>$HOST_FOLDER/output 2>&1
"""


def script(folder: Path) -> str:
    """Return a batch script that ends as the example does, with one rank of our training on each node."""
    command, _, end = EXAMPLE.read_text(encoding="utf-8").partition(" && exit\n")
    assert "srun torchrun" in command
    assert "exit 1" in end
    (folder / "rank.sh").write_text(
        RANK.format(folder=folder, python=shlex.quote(sys.executable), child=shlex.quote(str(CHILD))), encoding="utf-8"
    )
    told = f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1"
    return f"{told} PYTHONPATH={shlex.quote(str(ROOT))}\nsrun unshare -u sh {folder}/rank.sh && exit\n{end}"


def until(true: Callable[[], object], hosts: list[Host]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until_s, [host.output() for host in hosts]
        time.sleep(0.05)


@pytest.mark.timeout(230)
def test_a_node_leaves_and_the_job_is_requeued() -> None:
    """The batch script runs on the node that stays. The other one leaves, goes down, and comes back."""
    with short_folder() as root:
        folder = Path(str(root).replace(" ", "-"))
        folder.symlink_to(root)
        hosts = [Host(folder, name) for name in ("gpu1", "gpu2")]
        try:
            with running(folder, ["gpu1", "gpu2"]) as cluster:
                options = ("--requeue", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
                job = cluster.submit(script(folder), *options)
                until(lambda: all(any(w == "step" for w, _, _ in host.said()) for host in hosts), hosts)
                assert cluster.job(job)["BatchHost"] == "gpu1"
                hosts[1].trigger("e", after=After.PAUSE, reason=Reason.ON_BATTERY, deadline_s=60.0)
                step = hosts[1].durable("e").step or 0
                ask(hosts[1].folder / "s", "POST", "/api/v1/leave", LeaveRequest(because="its power fails").to_json())
                until(lambda: hosts[0].status() is None, hosts)
                cluster.ask("scontrol", "update", "NodeName=gpu2", "State=DOWN", "Reason=powerguard: on-battery")
                cluster.until(lambda: cluster.job(job)["JobState"] == "PENDING", "the job is requeued")
                assert cluster.job(job)["Restarts"] == "1"
                cluster.ask("scontrol", "update", "NodeName=gpu2", "State=RESUME")
                cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
                until(lambda: all(any(w == "step" and s > step for w, s, _ in host.said()) for host in hosts), hosts)
                assert [[s for w, s, _ in host.said() if w == "start"] for host in hosts] == [[0, step]] * 2
        finally:
            folder.unlink()
