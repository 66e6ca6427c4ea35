"""What Slurm costs and gains: the return of a node, the power-off while slurmctld hangs, and the daemon itself."""

import asyncio
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Final

import structlog

from bench.daemon import cost
from bench.figure import Figure
from powerguard.core.model.actions import DrainNode, LeaveNode, ReturnNode
from powerguard.effectors.options import SchedulerOptions
from powerguard.effectors.slurm.effector import SlurmEffector
from powerguard.sim.demo.story import numbers
from tests.e2e.rig import LONG, Rig, rig
from tests.peers.slurm import Cluster, helper_listening, running

_JOB: Final = "trap 'exit 143' TERM\nfor i in $(seq 900); do sleep 0.2; done"


def run(*, quick: bool) -> list[Figure]:
    """Measure, with real slurmctld, slurmd and munged. Needs root."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    figures = _returns(2 if quick else 5)
    figures += asyncio.run(_power_offs(1 if quick else 3))
    for name, more in (("", {}), (", Slurm", {"scheduler": {"kind": "slurm"}})):
        figures += asyncio.run(cost(name, None, 20.0 if quick else 120.0, **more))
    return figures


def _returns(count: int) -> list[Figure]:
    """Leave a node with a job and give it back, `count` times."""
    marked, runs = [], []
    with (
        tempfile.TemporaryDirectory(prefix="sl") as folder,
        running(Path(folder), ["gpu1"]) as cluster,
        helper_listening(cluster) as path,
    ):
        options = SchedulerOptions(kind="slurm", node="gpu1", socket=str(path), spread_s=0)
        slurm = SlurmEffector(options, host=socket.gethostname(), feeds=("rack-a",))
        for at in range(count):
            cluster.clear()
            job, outage = cluster.submit(_JOB, "--requeue"), f"o-{at}"
            began_s = time.monotonic()
            asyncio.run(slurm.carry_out(DrainNode(id="a", by_s=0.0, outage=outage)))
            marked.append(time.monotonic() - began_s)
            left = dict(asyncio.run(slurm.carry_out(LeaveNode(id="b", by_s=0.0, outage=outage))))
            assert left["jobs"] == job
            cluster.until(lambda job=job: _is_gone(cluster, job), "the job has left the node")  # type: ignore[misc]
            cluster.kill("gpu1")
            time.sleep(12.0)  # slurmctld pings a node that is given back at once, but not twice within some 10 s
            cluster.start_slurmd("gpu1", "-b")
            time.sleep(2.0)
            began_s = time.monotonic()
            asyncio.run(slurm.carry_out(ReturnNode(id="c", by_s=0.0, outage=outage, jobs=(job,))))
            cluster.until(lambda job=job: cluster.job(job)["JobState"] == "RUNNING", "the job runs")  # type: ignore[misc]
            runs.append(time.monotonic() - began_s)
    return [
        Figure(name="node marked, from the order", unit="s", values=tuple(marked), bar="1 s"),
        Figure(name="from RESUME to the job running", unit="s", values=tuple(runs), bar="5 s; 145 s with a requeue"),
    ]


def _is_gone(cluster: Cluster, job: str) -> bool:
    """Whether nothing of a requeued job is left, as on a host that was off in between."""
    return cluster.job(job)["JobState"] == "PENDING" and "COMPLETING" not in cluster.state("gpu1")


async def _power_offs(count: int) -> list[Figure]:
    """Time from the commit to the order that powers off: without Slurm, and with a slurmctld that was stopped."""
    without, hung = [], []
    for _ in range(count):
        async with rig(runtime=LONG) as world:
            await world.start()
            without.append(await _ordered_s(world))
        with (
            tempfile.TemporaryDirectory(prefix="sl") as folder,
            running(Path(folder), ["gpu1"]) as cluster,
            helper_listening(cluster) as path,
        ):
            async with rig(runtime=LONG) as world:
                world.settings["scheduler"] = {"kind": "slurm", "node": "gpu1", "socket": str(path), "spread_s": 0}
                await world.start()
                cluster.send("slurmctld", signal.SIGSTOP)
                hung.append(await _ordered_s(world))
                cluster.send("slurmctld", signal.SIGCONT)
    return [
        Figure(name="commit to power-off, no scheduler", unit="s", values=tuple(without)),
        Figure(name="commit to power-off, slurmctld hangs", unit="s", values=tuple(hung), bar="the same second"),
    ]


async def _ordered_s(world: Rig) -> float:
    world.ups.utility = False
    committed = await world.note("phase_changed", new="shutdown")
    ordered = await world.note("power_off_ordered")
    assert numbers(committed)["new"] == "shutdown"
    return ordered.at_s - committed.at_s
