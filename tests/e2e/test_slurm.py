"""The real daemon, the real root helper and a real Slurm cluster: an outage from the cut to the job that runs again."""

import asyncio
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from powerguard.sim.demo.story import numbers
from tests.e2e.rig import LONG, ROOMY, Rig, rig
from tests.e2e.test_return import reboot
from tests.peers import slurm
from tests.peers.slurm import Cluster

pytestmark = pytest.mark.xdist_group("slurm")
STANDS = "trap 'exit 143' TERM\nfor i in $(seq 900); do sleep 0.2; done"


@asynccontextmanager
async def host(runtime: tuple[tuple[float, float], ...]) -> AsyncIterator[tuple[Rig, Cluster]]:
    """A host whose node is gpu1 of a cluster."""
    with (
        tempfile.TemporaryDirectory(prefix="sl") as folder,
        slurm.running(Path(folder), ["gpu1"]) as cluster,
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
        await world.note("node_returned", did="in_service")
        world.no_traceback()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["node_drained", "phase_changed", "node_left"])
async def test_killed_at_each_stage_the_next_daemon_gives_the_node_back(at: str) -> None:
    """Killed right after what it wrote down: the mark is still known, and the job is requeued no second time."""
    async with host(ROOMY) as (world, cluster):
        job = await asyncio.to_thread(cluster.submit, STANDS, "--requeue")
        await world.start()
        world.ups.utility = False
        await world.note(at, **({"new": "shutdown"} if at == "phase_changed" else {}))
        await world.kill()
        await world.start(wait=False)
        await world.note("node_left")
        await world.note("power_off_accepted")
        await world.kill()
        reboot(world)
        world.ups.utility = True
        world.trainers[0].paused = False
        await world.start()
        await world.note("node_returned", did="resumed")
        await world.until(lambda: cluster.job(job)["JobState"] == "RUNNING", "the job runs again", 200.0)
        assert cluster.job(job)["Restarts"] == "1"
