"""The real daemon, the real root helper and a real Slurm cluster: an outage from the cut to the job that runs again."""

import asyncio
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from powerguard.sim.demo.story import numbers
from tests.e2e.rig import LONG, ROOMY, Rig, rig
from tests.e2e.test_return import reboot
from tests.peers import slurm
from tests.peers.slurm import Cluster

pytestmark = pytest.mark.xdist_group("slurm")
STANDS = "trap 'exit 143' TERM\nfor i in $(seq 900); do sleep 0.2; done"


@asynccontextmanager
async def host(runtime: tuple[tuple[float, float], ...], *others: str) -> AsyncIterator[tuple[Rig, Cluster]]:
    """A host whose node is gpu1 of a cluster. others: further nodes."""
    with (
        tempfile.TemporaryDirectory(prefix="sl") as folder,
        slurm.running(Path(folder), ["gpu1", *others]) as cluster,
        slurm.helper_listening(cluster) as path,
    ):
        async with rig(runtime=runtime) as world:
            world.settings["scheduler"] = {"kind": "slurm", "node": "gpu1", "socket": str(path), "spread_s": 0}
            world.settings["budget"] |= {"charge_hold_s": 3, "resume_charge_pct": 5}
            yield world, cluster


async def test_from_the_cut_to_the_same_job_running_again() -> None:
    """Drained on battery, requeued at the commit, given back with the gate: the job runs again by itself, once."""
    async with host(LONG) as (world, cluster):
        job = await asyncio.to_thread(cluster.submit, STANDS, "--requeue")
        await world.start()
        world.ups.utility = False
        drained = await world.note("node_drained")
        outage = world.one_outage()
        assert f" outage={outage} " in f"{numbers(drained)['reason']} "
        assert await asyncio.to_thread(cluster.state, "gpu1") in ("MIXED+DRAIN", "ALLOCATED+DRAIN")
        left = await world.note("node_left")
        assert (numbers(left)["did"], numbers(left)["jobs"]) == ("down", job)
        await world.note("power_off_accepted")
        await world.kill()
        reboot(world)
        world.ups.utility = True
        world.trainers[0].paused = False
        assert cluster.node("gpu1")["Reason"].endswith(f"host={socket.gethostname().partition('.')[0]}")
        await world.start()
        returned = await world.note("node_returned")
        assert (numbers(returned)["did"], numbers(returned)["jobs"]) == ("resumed", job)
        await world.until(lambda: cluster.job(job)["JobState"] == "RUNNING", "the job runs again")
        assert cluster.job(job)["Restarts"] == "1"
        assert cluster.node("gpu1")["State"] in ("MIXED", "ALLOCATED")
        world.no_traceback()


@pytest.mark.slow
async def test_a_controller_that_hangs_holds_up_nothing_and_hears_of_it_later() -> None:
    """It stands still from before the cut until after the power-off, which comes as if there were no Slurm."""
    async with host(LONG) as (world, cluster):
        await world.start()
        cluster.send("slurmctld", signal.SIGSTOP)
        world.ups.utility = False
        committed = await world.note("phase_changed", new="shutdown")
        ordered = await world.note("power_off_ordered")
        assert ordered.at_s - committed.at_s < 2.0  # one attempt at the node takes longer
        await world.note("power_off_accepted")
        await world.kill()
        cluster.send("slurmctld", signal.SIGCONT)
        reboot(world)
        world.ups.utility = True
        world.trainers[0].paused = False
        await world.start()
        # An order whose caller was killed waits in the controller's socket: it may mark the node once it goes on.
        assert numbers(await world.note("node_returned"))["did"] in ("in_service", "resumed")
        assert cluster.is_idle("gpu1")
        world.no_traceback()


KILLED: Final = {
    "marked": lambda world: world.notes("node_drained"),
    "paused": lambda world: world.notes("phase_changed", new="emergency_checkpoint"),
    "committed": lambda world: world.notes("phase_changed", new="shutdown"),
    "requeuing": lambda world: world.actions("LeaveNode"),
    "requeued": lambda world: world.notes("node_left"),
    "returning": lambda world: world.actions("ReturnNode"),
    "returned": lambda world: world.notes("node_returned"),
}
"""The stages of an outage after which the daemon is killed, as its journal shows them."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", KILLED)
async def test_killed_at_each_stage_the_next_daemon_gives_the_node_back(stage: str) -> None:
    """The mark is still known, the job is requeued no second time, and what a person drained stays drained."""
    async with host(ROOMY, "gpu2") as (world, cluster):
        cluster.ask("scontrol", "update", "NodeName=gpu2", "State=DRAIN", "Reason=bad disk")
        job = await asyncio.to_thread(cluster.submit, STANDS, "--requeue")
        await world.start()
        world.ups.utility = False
        if not stage.startswith("return"):
            await killed(world, stage)
        await world.note("node_left")
        await world.note("power_off_accepted")
        durable = world.trainers[0].step
        await world.kill()
        reboot(world)
        world.ups.utility = True
        world.trainers[0].paused = False
        await world.start()
        if stage.startswith("return"):
            await killed(world, stage)
        returned = await world.note("node_returned")
        assert numbers(returned)["did"] in ("resumed", "in_service" if stage == "returning" else "resumed")
        await world.until(lambda: cluster.job(job)["JobState"] == "RUNNING", "the job runs again", 200.0)
        assert cluster.job(job)["Restarts"] == "1"
        assert cluster.node("gpu1")["State"] in ("MIXED", "ALLOCATED")
        assert cluster.node("gpu2")["Reason"] == "bad disk"
        assert "DRAIN" in cluster.state("gpu2")
        assert world.trainers[0].step >= durable > 0
        world.no_traceback()


async def killed(world: Rig, stage: str) -> None:
    """Kill the daemon once its journal shows the stage, and start the next one."""
    await world.until(lambda: KILLED[stage](world), stage)
    await world.kill()
    await world.start(wait=False)


@pytest.mark.slow
async def test_a_person_who_drains_the_node_while_no_daemon_runs_keeps_it() -> None:
    """The daemon is killed after its mark. The next one finds another's reason there, and lifts nothing."""
    async with host(LONG) as (world, cluster):
        await world.start()
        world.ups.utility = False
        await world.note("node_drained")
        await world.kill()
        cluster.ask("scontrol", "update", "NodeName=gpu1", "State=DRAIN", "Reason=bad disk")
        await world.start(wait=False)
        await world.note("node_left", did="not_ours")
        await world.note("power_off_accepted")
        await world.kill()
        reboot(world)
        world.ups.utility = True
        world.trainers[0].paused = False
        await world.start()
        await world.note("outage_ended")
        await world.until(lambda: len(world.notes("node_kept", did="not_ours")) > 1, "the node to be left as it is")
        assert cluster.node("gpu1")["Reason"] == "bad disk"
        world.no_traceback()
