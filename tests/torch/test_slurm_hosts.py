"""A job on two nodes of a real Slurm: one commits, the rank on the other ends, and the job is requeued."""

import asyncio
import contextlib
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import cast

import pytest

pytest.importorskip("torch", reason="torch is not installed (scripts/test-torch gets it)")

from powerguard.sim.demo.story import numbers
from powerguard.wire import After, LeaveRequest, Reason
from tests.e2e.peers import Trainer
from tests.e2e.rig import PAUSED, TRAINING, Rig, rig
from tests.e2e.test_return import reboot
from tests.peers.ports import free_port
from tests.peers.slurm import PROGRAMS, Cluster, helper_listening, running
from tests.torch.hosts import CHILD, Host
from tests.torch.processes import ROOT
from tests.torch.test_daemons_of_a_job import Ranks
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
    text = f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1"
    return f"{text} PYTHONPATH={shlex.quote(str(ROOT))}\nsrun unshare -u sh {folder}/rank.sh && exit\n{end}"


def until(true: Callable[[], object], hosts: list[Host]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until_s, "\n\n".join(host.output() for host in hosts)
        time.sleep(0.05)


@pytest.mark.slow
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
                # A dead node has no step. Here slurmd ends it, and the node must not be back before: slurmctld would
                # abort the step, and slurmd would end the newer run's step of the same number too, which neither
                # slurmctld nor srun notices (Slurm 22.05, 1 of 12 runs).
                cluster.until(lambda: not [*(folder / "spool/gpu2").glob("gpu2_*")], "the node has no step left")
                assert hosts[1].status() is None
                cluster.ask("scontrol", "update", "NodeName=gpu2", "State=RESUME")
                time.sleep(2.0)  # slurmd may refuse a launch of the second in which it has revoked the older one
                cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
                until(lambda: all(any(w == "step" and s > step for w, s, _ in host.said()) for host in hosts), hosts)
                assert [[s for w, s, _ in host.said() if w == "start"] for host in hosts] == [[0, step]] * 2
        finally:
            folder.unlink()


NAMES = ("gpu1", "gpu2", "gpu3", "gpu4")
OPTIONS = ("--requeue", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1")
ALL_DAY = ((PAUSED, 120.0), (TRAINING, 60.0))
"""Half of it is worn: 30 s of training. Four daemons and four ranks share this machine's processors."""


class Node:
    """One node of the job: its daemon, and its rank. fed: by the UPS whose power fails."""

    def __init__(self, name: str, ranks: Ranks, world: Rig, *, fed: bool) -> None:
        self.name, self.ranks, self.world, self.fed = name, ranks, world, fed

    @property
    def starts(self) -> list[int]:
        return [step for word, step, _ in self.ranks.host.said() if word == "start"]


@contextlib.asynccontextmanager
async def four(folder: Path, cluster: Cluster, helper: Path, fed: Collection[str]) -> AsyncIterator[list[Node]]:
    """Four daemons on two simulated UPSes, which both can lose utility. fed: the nodes on the first one."""
    ranks = [Ranks(Host(folder, name)) for name in NAMES]
    load = {True: lambda: PAUSED if ranks[0].paused else TRAINING, False: lambda: TRAINING}
    async with contextlib.AsyncExitStack() as stack:
        nodes: list[Node] = []
        cards: dict[bool, Rig] = {}
        for name, each in zip(NAMES, ranks, strict=True):
            is_fed = name in fed
            world = await stack.enter_async_context(
                rig(cast("Trainer", each), runtime=ALL_DAY, card=is_fed not in cards, load=load[is_fed])
            )
            card = cards.setdefault(is_fed, world)
            if card is not world:
                assert card.agent is not None
                world.ups = card.ups
                world.add_snmp(card.agent.port)
            world.settings["scheduler"] = {"kind": "slurm", "node": name, "socket": str(helper), "spread_s": 0}
            world.settings["resume"] = {"by": "scheduler"}
            world.settings["budget"] |= {"charge_hold_s": 3, "resume_charge_pct": 5}
            nodes.append(Node(name, each, world, fed=is_fed))
        yield nodes


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fed", [NAMES, NAMES[:1]], ids=["all", "batch-host"])
async def test_an_outage_of_four_nodes_from_the_flip_to_the_same_job_at_the_same_step(fed: tuple[str, ...]) -> None:
    """Every process is real. batch-host: the power of one node fails; the daemons of the others stay on utility."""
    with short_folder() as root, contextlib.ExitStack() as stack:
        folder = Path(str(root).replace(" ", "-"))
        await asyncio.to_thread(folder.symlink_to, root)
        stack.callback(folder.unlink)
        cluster = stack.enter_context(running(folder, NAMES))
        helper = stack.enter_context(helper_listening(cluster))
        async with four(folder, cluster, helper, fed) as nodes:
            job = await asyncio.to_thread(cluster.submit, script(folder), *OPTIONS)
            hosts = [node.ranks.host for node in nodes]
            await asyncio.to_thread(until, lambda: all(node.ranks.step > 0 for node in nodes), hosts)
            assert cluster.job(job)["BatchHost"] == NAMES[0]
            for node in nodes:
                await node.world.start()
            step = await the_power_fails(nodes)
            await asyncio.to_thread(others_end, nodes, step)
            for node in nodes:
                if node.fed:  # its power-off ends the daemon and slurmd; Slurm has ended the rank
                    await node.world.kill()
                    cluster.kill(node.name)
            await nodes[0].world.until(lambda: cluster.job(job)["JobState"] == "PENDING", "the job is requeued")
            assert cluster.job(job)["Restarts"] == "1"
            nodes[0].world.ups.utility = True
            for node in nodes:
                if node.fed:
                    cluster.start_slurmd(node.name, "-b")
                    reboot(node.world)
                    await node.world.start()
            returned = [await node.world.note("node_returned") for node in nodes if node.fed]
            began_s = time.monotonic()
            await nodes[0].world.until(lambda: all(node.ranks.step > step for node in nodes), "the job to run on")
            print(f"\nfrom the last node's return to the first step on all four: {time.monotonic() - began_s:.1f} s")
            assert [numbers(note)["did"] for note in returned] == ["resumed"] * len(fed)
            assert [node.starts for node in nodes] == [[0, step]] * 4, "each step asserts its bits: hosts_child"
            assert cluster.job(job)["Restarts"] == "1"
            for node in nodes:
                await node.world.note("outage_ended" if node.fed else "job_restarted")
                assert cluster.node(node.name)["Reason"] == ""
                assert len(node.world.offs()) == int(node.fed)
                node.world.no_traceback()


async def the_power_fails(nodes: list[Node]) -> int:
    """Flip the UPS, and wait for the power-off of what it feeds. Return the step that the whole job is saved at."""
    nodes[0].world.ups.utility = False
    fed = [node for node in nodes if node.fed]
    for node in fed:
        await node.world.note("node_drained", did="drained")
    steps = {numbers(await node.world.note("checkpoint_durable"))["step"] for node in fed}
    for node in fed:
        await node.world.note("node_left", did="down")
        await node.world.note("power_off_accepted")
    (step,) = steps
    assert isinstance(step, int)
    return step


def others_end(nodes: list[Node], step: int) -> None:
    """The ranks of nodes that have power end too, at the same step."""
    until(lambda: all(node.ranks.host.status() is None for node in nodes), [node.ranks.host for node in nodes])
    assert [node.ranks.step for node in nodes] == [step] * 4
