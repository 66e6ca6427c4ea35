"""The effector `slurm`: marks this host's Slurm node in an outage, requeues its jobs at the commit, and gives it back.

The daemon has no right to change a node. It asks the root helper powerguard-slurm (docs/guides/slurm.md) and does not
wait for it longer than LIMIT_S. No action here holds up a power-off: the core never waits for one.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from powerguard.core.model.actions import Action, Detail, DrainNode, LeaveNode, ReturnNode, SignalJobs
from powerguard.effectors.base import EffectorError
from powerguard.effectors.host.findings import Finding
from powerguard.effectors.options import SLURM_SOCKET, SchedulerOptions
from powerguard.effectors.root_client import RootHelper, objects_in

LIMIT_S: Final = 9.0
"""Timeout for one word. The helper itself answers within 8 s, whatever Slurm does."""
JOBS_IN_A_WORD: Final = 100
"""A helper reads a line of at most 4096 bytes, and an id such as 1234567890_1234567890 has 21."""


class SlurmEffector:
    """Carries out DrainNode, SignalJobs, LeaveNode and ReturnNode. Twice is as good as once."""

    def __init__(self, options: SchedulerOptions, *, host: str, feeds: Sequence[str]) -> None:
        """Set up, without touching anything. host: this host's name; feeds: the UPSes that feed it."""
        self._options = options
        self._node = options.node or host.partition(".")[0]
        self._ups = ",".join(feeds)[:200]
        self._helper = RootHelper(
            name="powerguard-slurm", socket=options.socket, real=SLURM_SOCKET, hangs="powerguard-slurm hangs"
        )
        share = int.from_bytes(hashlib.sha256(host.encode()).digest()[:4], "big") / 2**32
        self._wait_s = share * options.spread_s

    async def carry_out(self, action: Action) -> Detail:
        """Say one word. Raises EffectorError.

        Detail: `did` (drained, kept, down, resumed, in_service, signalled; not_ours: the node was drained, or marked,
        by others, and was not changed; requeued: jobs were, but the node could not be set down), `node`, `state` and
        `reason` as read back, `jobs` (ids, separated by commas; of a drain: those that a commit would requeue),
        `refused` (how many jobs Slurm did not requeue or start) and `because`.
        """
        if isinstance(action, DrainNode):
            # A thousand hosts on one feed must not reach slurmctld at once.
            await asyncio.sleep(self._wait_s)  # noqa: TID251 - the action's deadline cancels it
        if isinstance(action, ReturnNode):
            return await self._give_back(action)
        return detail_of(await self.ask(word_of(action, ups=self._ups, hold=self._options.hold)))

    async def _give_back(self, action: ReturnNode) -> Detail:
        """Give the node back with the first word, and let the jobs start with as many as are needed for them."""
        answers, jobs = [], action.jobs
        for at in range(0, max(len(jobs), 1), JOBS_IN_A_WORD):
            some = replace(action, jobs=jobs[at : at + JOBS_IN_A_WORD])
            answers.append(await self.ask(word_of(some, ups=self._ups, hold=self._options.hold)))
        started = [job for answer in answers for job in answer.get("jobs", [])]
        because = "; ".join(filter(None, (str(answer.get("because", "")) for answer in answers)))
        refused = sum(int(answer.get("refused", 0)) for answer in answers)
        return detail_of({**answers[0], "jobs": started, "refused": refused, "because": because})

    async def ask(self, word: dict[str, object]) -> dict[str, Any]:
        """Send one word to the helper and return its answer. Raises EffectorError, also if it refuses."""
        return await self._helper.ask({**word, "node": self._node}, limit_s=LIMIT_S)


def word_of(action: Action, *, ups: str, hold: bool) -> dict[str, object]:
    """Return what the helper is asked for an action, but for the node. Raises EffectorError."""
    match action:
        case DrainNode(outage=outage):
            return {"word": "drain", "outage": outage, "ups": ups}
        case SignalJobs(outage=outage):
            return {"word": "signal", "outage": outage}
        case LeaveNode(outage=outage):
            return {"word": "leave", "outage": outage, "ups": ups, "hold": hold}
        case ReturnNode(outage=outage, jobs=jobs, rebooted=rebooted):
            return {"word": "return", "outage": outage, "jobs": list(jobs), "hold": hold, "rebooted": rebooted}
        case _:
            msg = f"slurm: cannot carry out {type(action).__name__}"
            raise EffectorError(msg)


def detail_of(answer: Mapping[str, Any]) -> Detail:
    """Return the details of an answer, for the journal and for messages."""
    jobs = answer.get("jobs", [])
    refused = answer.get("refused", 0)
    return (
        ("did", str(answer.get("did", ""))),
        ("node", str(answer.get("node", ""))),
        ("state", str(answer.get("state", ""))),
        ("reason", str(answer.get("reason", ""))[:300]),
        ("jobs", ",".join(str(job) for job in jobs) if isinstance(jobs, list) else ""),
        ("refused", refused if isinstance(refused, int) else 0),
        ("because", str(answer.get("because", ""))[:1000]),
    )


# --- Findings for doctor --------------------------------------------------------------------------------------
#
# Does the helper reach Slurm, is the node this host's, which jobs would be lost? The helper is asked to show, which
# changes nothing.

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
    jobs = objects_in(answer, "jobs")
    lost = [str(job.get("id")) for job in jobs if job.get("requeues") is not True]
    if lost:
        text = f"jobs {', '.join(lost[:20])} cannot be requeued: a power-off ends them"
        return [
            Finding("scheduler.jobs", "WARN", text, "submit them with --requeue (scontrol update JobId=ID Requeue=1)")
        ]
    return [Finding("scheduler.jobs", "PASS", f"{len(jobs)} jobs run here, all can be requeued")] if jobs else []
