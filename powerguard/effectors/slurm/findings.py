"""Checks of `powerguard doctor` on Slurm: does the helper reach it, is the node this host's, which jobs would be lost?

It asks the root helper to show, which changes nothing.
"""

from typing import Any, Final

from powerguard.effectors.base import EffectorError
from powerguard.effectors.host.findings import Finding
from powerguard.effectors.options import SchedulerOptions
from powerguard.effectors.slurm.effector import SlurmEffector

_GUIDE: Final = "docs/guides/slurm.md"


async def findings(options: SchedulerOptions, *, host: str) -> list[Finding]:
    """Look, and say what was found; nothing where no scheduler is set. Takes some seconds at most."""
    if options.kind == "none":
        return []
    try:
        answer = await SlurmEffector(options, host=host, feeds=()).ask({"word": "show"})
    except EffectorError as error:
        if "only powerguard and root may" in str(error):
            return [Finding("scheduler", "WARN", f"{error}: not checked", "run doctor as root or as powerguard")]
        return [Finding("scheduler", "FAIL", str(error), _GUIDE)]
    node, state = str(answer.get("node")), str(answer.get("state"))
    found = [Finding("scheduler", "PASS", f"Slurm {answer.get('version')}: node {node} is {state}")]
    reason = str(answer.get("reason", ""))
    if reason and answer.get("ours") is not True:
        text = f"node {node} is {state}, reason {reason!r}: powerguard does not change a node that others have marked"
        found.append(
            Finding(
                "scheduler.node",
                "WARN",
                text,
                f"when it may run jobs again: scontrol update NodeName={node} State=RESUME",
            )
        )
    elif reason:
        text = f"node {node} still has powerguard's mark {reason!r}"
        found.append(
            Finding(
                "scheduler.node",
                "WARN",
                text,
                f"`powerguard status`: is there an outage? Else: scontrol update NodeName={node} State=RESUME",
            )
        )
    return [*found, *_jobs(answer)]


def _jobs(answer: dict[str, Any]) -> list[Finding]:
    """Name the jobs that a power-off would end for good."""
    told = answer.get("jobs")
    jobs = [job for job in told if isinstance(job, dict)] if isinstance(told, list) else []
    lost = [str(job.get("id")) for job in jobs if job.get("requeues") is not True]
    if lost:
        text = f"jobs {', '.join(lost[:20])} cannot be requeued: a power-off ends them"
        return [
            Finding("scheduler.jobs", "WARN", text, "submit them with --requeue (scontrol update JobId=ID Requeue=1)")
        ]
    return [Finding("scheduler.jobs", "PASS", f"{len(jobs)} jobs run here, all can be requeued")] if jobs else []
