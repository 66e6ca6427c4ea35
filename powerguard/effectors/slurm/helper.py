"""powerguard-slurm: the root helper that marks this host's Slurm node and requeues its jobs, and nothing else.

Slurm lets only root and its own administrators change a node (`scontrol update`: "Invalid user id"), so the daemon
asks this helper, one JSON line for one process, as the other root helpers are asked. The helper takes no node but one
that runs on this host, and no words but those of WORDS.

A node is ours if its Reason begins with MARK and names the outage. Slurm has no compare-and-set: each word reads the
node, decides, writes, and reads again. A drain or a reason of another origin is reported and not changed.

All output is read as text in fields that the helper names itself: `scontrol --json` does not exist before Slurm 23.02,
and the JSON of squeue needs a plugin and differs with each version. Measured with 22.05.8: `scontrol update` takes 6
to 40 ms; with slurmctld stopped, scontrol returns after 10 s, so each call is killed after CALL_S. Only the standard
library.
"""

import argparse
import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from powerguard.clock import boottime_s
from powerguard.effectors.child import Ended, run_child
from powerguard.effectors.root_helper import EX_USAGE, Answer, RefusedError, by_hand, log_line, serve

MARK: Final = "powerguard:"
"""How a Reason of ours begins."""
REBOOTED: Final = "Node unexpectedly rebooted"
"""The Reason of slurmctld itself for a node that boots although no order has set it down."""
CALL_S: Final = 2.0
"""Timeout for one call of scontrol or squeue."""
WITHIN_S: Final = 8.0
"""Timeout for one word, which may need several calls."""
DOWN_S: Final = 4.0
"""What of that is kept for the node, whatever becomes of the jobs: a host that powers off must be down in Slurm."""
MAX_JOBS: Final = 1000
AT_ONCE: Final = 50
"""Jobs in one call: measured with 22.05.8, one takes 1 to 20 ms."""
_OUTAGE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANY_OUTAGE: Final = re.compile(rf"({_OUTAGE.pattern})?")
_NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_NAME: Final = re.compile(r"[A-Za-z0-9_.,-]{1,200}")
_JOB: Final = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?")
_SIGNAL: Final = re.compile(r"powerguard:signal=(USR1|USR2|TERM|INT|HUP|CONT)\b")
_REASON: Final = re.compile(r"\sReason=(.*?)( \[[^\s\[\]]+@[^\s\[\]]+\].*|\sComment=.*|\sExtra=.*)?$", re.DOTALL)
_OURS: Final = re.compile(rf"{MARK} on-battery ups={_NAME.pattern} outage=({_OUTAGE.pattern}) host=[A-Za-z0-9_.-]+")
_REFUSED: Final = re.compile(
    r"^(?:(?P<left>[0-9_]+): (?P<why>.+)|(?P<because>.+) for job (?P<right>[0-9_]+))$", re.MULTILINE
)
_FIELDS: Final = (("JobArrayID", 32), ("BatchHost", 72), ("Requeue", 8), ("RestartCnt", 12))
"""Columns of squeue, none of which a user can write: a comment with a line break would add a line, and so a job."""
_NO_JOB: Final = "2147483647"
_OURS_STATES: Final = "RUNNING,SUSPENDED,CONFIGURING,STOPPED"
_CONF: Final = "slurm.conf cannot be read: set SLURM_CONF for powerguard-slurm@.service, or mount its folder"
_HINTS: Final = (
    ("not found", "it is not in slurm.conf: set scheduler.node to its NodeName"),
    ("Invalid node name", "the node is not in slurm.conf: set scheduler.node to its NodeName"),
    ("Invalid user id", "run as root, or as SlurmUser"),
    ("munge", "munged does not answer: systemctl status munge"),
    ("Unable to contact", "slurmctld does not answer: scontrol ping"),
    ("cannot stat file", _CONF),
    ("configuration source", _CONF),
    ("configuration file", _CONF),
)


class SlurmError(Exception):
    """Slurm does not do what was asked: what, and what would be right."""


class Host(Protocol):
    """Where a word is carried out: this host, or a simulated one."""

    @property
    def name(self) -> str:
        """Its name, without the domain."""
        ...

    def now_s(self) -> float:
        """Return the time on a clock that never steps."""
        ...

    def run(self, argv: Sequence[str], *, limit_s: float) -> Ended:
        """Run a program to its end or its limit. Raises OSError if it cannot be started."""
        ...


class ThisHost:
    """The real one."""

    @property
    def name(self) -> str:
        """Its name, without the domain."""
        return socket.gethostname().partition(".")[0]

    def now_s(self) -> float:
        """CLOCK_BOOTTIME."""
        return boottime_s()

    def run(self, argv: Sequence[str], *, limit_s: float) -> Ended:
        """Run a child process."""
        return asyncio.run(run_child(argv, limit_s=limit_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What slurmctld knows of this host's node. reason: "" for none."""

    name: str
    states: frozenset[str]
    reason: str
    version: str

    def is_ours(self, outage: str = "") -> bool:
        """Say whether the mark on it is ours. outage: of this outage; "": of any. One with more words is another's."""
        found = _OURS.fullmatch(self.reason)
        return found is not None and outage in ("", found[1])

    @property
    def is_out(self) -> bool:
        """Whether no job is started on it because it was drained, or is down."""
        return bool(self.states & {"DRAIN", "DRAINED", "DRAINING", "DOWN", "FAIL", "FAILING"})

    @property
    def is_foreign(self) -> bool:
        """Whether it is out, or has a reason, and that is not our doing."""
        return (self.is_out or bool(self.reason)) and not self.is_ours()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that runs on this node. id: as `scontrol requeue` takes it, such as 12 or 12_3.

    leads: its batch script runs here, so this host and no other requeues it. restarts: how often it was requeued.
    """

    id: str
    leads: bool
    requeues: bool
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One word. host: where it is carried out. by_s: when its answer is due, by that host's clock."""

    host: Host
    word: str
    node: str
    outage: str = ""
    ups: str = ""
    hold: bool = False
    rebooted: bool = False
    jobs: tuple[str, ...] = ()
    by_s: float = 0.0


# --- Slurm's commands -----------------------------------------------------------------------------------------------


def _slurm(request: Request, *argv: str) -> str:
    """Run one of Slurm's commands and return its output. Raises SlurmError."""
    returncode, output = _run(request, *argv)
    if returncode != 0:
        raise SlurmError(_refused(argv, output))
    return output


def _each(request: Request, jobs: Sequence[str], done: list[str], *argv: str) -> list[str]:
    """Give one order for each job and add those that took it to `done`; return why others did not.

    argv: the last word takes the ids. Raises SlurmError if Slurm does not answer, or has no time for all of them.
    """
    refused: list[str] = []
    for at in range(0, len(jobs), AT_ONCE):
        some = jobs[at : at + AT_ONCE]
        call = [word.replace("{}", ",".join(some)) for word in argv]
        returncode, output = _run(request, *call)
        reasons = {each["left"] or each["right"]: each["why"] or each["because"] for each in _REFUSED.finditer(output)}
        if returncode != 0 and not reasons.keys() & set(some):
            raise SlurmError(_refused(call, output))
        done += [job for job in some if job not in reasons]
        refused += [f"{job}: {reasons[job]}" for job in some if job in reasons]
    return refused


def _run(request: Request, *argv: str) -> tuple[int, str]:
    """Run one of Slurm's commands; return its exit status and output. Raises SlurmError if it does not end in time."""
    limit_s = min(CALL_S, request.by_s - request.host.now_s())
    if limit_s <= 0:
        msg = f"no time left for {argv[0]} (Slurm is slow: scontrol ping)"
        raise SlurmError(msg)
    try:
        ended = request.host.run(argv, limit_s=limit_s)
    except FileNotFoundError:
        msg = f"{argv[0]} is not in PATH: install Slurm's client commands, or set PATH for powerguard-slurm@.service"
        raise SlurmError(msg) from None
    except OSError as error:
        msg = f"{argv[0]} cannot be started: {error.strerror}"
        raise SlurmError(msg) from None
    if ended.timed_out:
        text = _printable(ended.stderr.decode("utf-8", "replace"))  # without slurm.conf it tries again for a minute
        hint = _hint(text)
        because = f"{text} ({hint})" if hint else "slurmctld hangs or is away (scontrol ping)"
        msg = f"{argv[0]}: no whole answer within {limit_s:.1f} s: {because}"
        raise SlurmError(msg)
    output = ended.stdout.decode("utf-8", "replace")
    if ended.returncode != 0:
        output += ended.stderr.decode("utf-8", "replace")
    return ended.returncode, output


def _refused(argv: Sequence[str], output: str) -> str:
    text = _printable(output)
    return f"{' '.join(argv[:3])}: {text or 'failed'} ({_hint(text) or 'scontrol ping'})"


def _printable(output: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in output).split())[:300]


def _hint(text: str) -> str:
    """Return what would be right, if Slurm's words are known; else ""."""
    return next((right for sign, right in _HINTS if sign.lower() in text.lower()), "")


def _node(request: Request) -> Node:
    """Read this host's node. Raises SlurmError, also for a node of another host."""
    text = _slurm(request, "scontrol", "--oneliner", "show", "node", request.node)
    fields = {name: _field(text, name) for name in ("NodeName", "NodeHostName", "State", "Version")}
    if fields["NodeName"] != request.node or not fields["State"]:
        msg = f"scontrol show node {request.node}: the answer is not of that node: {text[:80]!r}"
        raise SlurmError(msg)
    here = request.host.name
    if fields["NodeHostName"].partition(".")[0] != here:
        msg = f"node {request.node} runs on {fields['NodeHostName']}, not on this host ({here}): correct scheduler.node"
        raise SlurmError(msg)
    reason = _reason(text)
    return Node(
        name=request.node,
        states=frozenset(re.split(r"[+*~#!%$@^-]+", fields["State"])) - {""},
        reason=reason,
        version=fields["Version"],
    )


def _reason(text: str) -> str:
    """Return the Reason, with the lines below its first one, which stand behind who wrote it and when; "": none.

    Such a line is eight spaces in, and a further field one: Comment, Extra, InstanceId, ReservationName.
    """
    found = _REASON.search(text.rstrip())
    if found is None:
        return ""
    below = re.sub(r"^ \[[^\]]*\]|(?<! ) [A-Z]\w*=.*", "", found[2] or "", flags=re.DOTALL)
    return " ".join(f"{found[1]} {below}".split())


def _field(text: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return found[1] if found else ""


def _jobs(request: Request, *which: str) -> list[Job]:
    """Read jobs. which: options of squeue; none: the jobs that run on this node. Raises SlurmError."""
    columns = ",".join(f"{name}:{width}" for name, width in _FIELDS)
    which = which or (f"--nodelist={request.node}", f"--states={_OURS_STATES}")
    jobs: list[Job] = []
    for line in _slurm(request, "squeue", "--noheader", *which, f"--Format={columns}").splitlines():
        values, at = [], 0
        for _, width in _FIELDS:
            values.append(line[at : at + width].strip())
            at += width
        id_, batch_host, requeue, restarts = values
        leader, _, part = id_.partition("+")  # 12+0 is the leader of a heterogeneous job, which is requeued as a whole
        if not _JOB.fullmatch(leader):
            continue
        jobs.append(
            Job(
                id=leader,
                leads=batch_host == request.node and part in ("", "0"),
                requeues=requeue == "1",
                restarts=int(restarts) if restarts.isdecimal() else 0,
            )
        )
    return jobs[:MAX_JOBS]


def _mark(request: Request) -> str:
    return f"{MARK} on-battery ups={request.ups or '-'} outage={request.outage} host={request.host.name}"


def _set_state(request: Request, state: str) -> Node:
    """Set the node's state with our reason, and read it back. Raises SlurmError."""
    wanted = [f"State={state}"] if state == "RESUME" else [f"State={state}", f"Reason={_mark(request)}"]
    _slurm(request, "scontrol", "update", f"NodeName={request.node}", *wanted)
    return _node(request)


# --- The words ------------------------------------------------------------------------------------------------------


def do_show(request: Request) -> Answer:
    """Say what there is; change nothing."""
    node, jobs = _node(request), _jobs(request)
    return {
        "ok": True,
        **_node_fields(node),
        "version": node.version,
        "jobs": [{"id": job.id, "leads": job.leads, "requeues": job.requeues} for job in jobs],
    }


def do_drain(request: Request) -> Answer:
    """Let no further job start here. A node that was drained by others, or for another reason, is left as it is.

    The answer names the jobs that this host would requeue.
    """
    node, did = _node(request), "drained"
    if node.is_foreign:
        did = "not_ours"
    elif node.is_ours(request.outage) and node.is_out:
        did = "kept"
    else:
        node = _set_state(request, "DRAIN")
    jobs = []
    with contextlib.suppress(SlurmError):  # the ids serve a return whose requeue was not answered; the drain is done
        jobs = [job.id for job in _jobs(request) if job.leads and job.requeues]
    return {"ok": True, "did": did, **_node_fields(node), "jobs": jobs}


def do_signal(request: Request) -> Answer:
    """Send each batch job that asked for one, in its comment, its signal; the batch shell alone gets it.

    The order fails only if no job got its signal, so that it may be repeated.
    """
    sent, failed = [], []
    for job in _jobs(request):
        if not job.leads:
            continue
        try:
            output = _slurm(request, "scontrol", "--oneliner", "show", "job", job.id)
            requested = _SIGNAL.search(output.partition(" Comment=")[2])
            if requested:
                _slurm(request, "scancel", "--batch", f"--signal={requested[1]}", job.id)
                sent.append(job.id)
        except SlurmError as error:
            failed.append(f"{job.id}: {error}")
    if failed and not sent:
        raise SlurmError("; ".join(failed)[:1000])
    return {"ok": True, "did": "signalled", "jobs": sent, "refused": len(failed), "because": "; ".join(failed)[:1000]}


def do_leave(request: Request) -> Answer:
    """Requeue each job whose batch script runs here, once, then set the node down and drained: the host powers off.

    A job whose script runs on another host is requeued by slurmctld when this node is down, or by that host. One that
    may not be requeued ends with the host. Where jobs were requeued, but Slurm has failed before the node was down, the
    answer is `requeued` with their ids.
    """
    done: list[str] = []
    early = replace(request, by_s=request.by_s - DOWN_S)
    try:
        jobs = [job.id for job in _jobs(early) if job.leads]
        refused = _each(early, jobs, done, "scontrol", "requeuehold" if request.hold else "requeue", "{}")
    except SlurmError as error:  # slurmctld itself requeues the jobs of a node that is down
        refused = [str(error)]
    outcome: Answer
    try:
        node, did = _node(request), "not_ours"
        if not node.is_foreign:
            node, did = _set_state(request, "DOWN"), "down"
            if node.is_ours(request.outage) and "DRAIN" not in node.states:
                # With ReturnToService=2 slurmctld starts jobs on a node that is only down as soon as its slurmd is up.
                with contextlib.suppress(SlurmError):
                    node = _set_state(request, "DRAIN")
        outcome = {"did": did, **_node_fields(node)}
    except SlurmError as error:
        if not done:
            raise
        outcome = {"did": "requeued", "node": request.node}
        refused.append(str(error))
    because = "; ".join(refused)[:1000]
    return {"ok": True, **outcome, "jobs": done, "refused": len(refused), "because": because}


def do_return(request: Request) -> Answer:
    """Give the node back where the mark on it is of this outage; then let the jobs that we requeued start at once.

    Without an outage's id any mark of ours counts. After a boot that slurmctld did not expect, its own reason does.
    """
    node = _node(request)
    did = "in_service"
    if node.is_ours(request.outage) or (request.rebooted and node.reason == REBOOTED):
        node, did = _set_state(request, "RESUME"), "resumed"
    elif node.is_foreign or node.is_ours():
        did = "not_ours"
    started: list[str] = []
    refused = _start(request, started) if request.jobs else []
    because = "; ".join(refused)[:1000]
    return {"ok": True, "did": did, **_node_fields(node), "jobs": started, "refused": len(refused), "because": because}


def _start(request: Request, started: list[str]) -> list[str]:
    """Let the jobs that were requeued start now: Slurm delays them for 121 s. Return why others are left as they are.

    Raises SlurmError if Slurm does not answer: the word is said again then, and does no harm to those that started.
    """
    named = ",".join((*request.jobs, _NO_JOB))  # squeue fails for one unknown job, and passes over it among several
    waiting = {job.id for job in _jobs(request, "--array", "--states=PENDING", f"--jobs={named}") if job.restarts > 0}
    jobs = [job for job in request.jobs if job in waiting]
    refused = [f"{job}: does not wait after a requeue: left as it is" for job in request.jobs if job not in waiting]
    if request.hold:
        refused += _each(request, jobs, [], "scontrol", "release", "{}")
    return refused + _each(request, jobs, started, "scontrol", "update", "JobId={}", "StartTime=now")


def _node_fields(node: Node) -> Answer:
    return {"node": node.name, "state": "+".join(sorted(node.states)), "reason": node.reason, "ours": node.is_ours()}


WORDS: Final[Mapping[str, Callable[[Request], Answer]]] = {
    "show": do_show,
    "drain": do_drain,
    "signal": do_signal,
    "leave": do_leave,
    "return": do_return,
}
_TAKES: Final[Mapping[str, frozenset[str]]] = {
    "show": frozenset(),
    "drain": frozenset({"outage", "ups"}),
    "signal": frozenset({"outage"}),
    "leave": frozenset({"outage", "ups", "hold"}),
    "return": frozenset({"outage", "jobs", "hold", "rebooted"}),
}


# --- Understanding --------------------------------------------------------------------------------------------------


def checked(fields: Mapping[str, object], host: Host) -> Request:
    """Return the request, if it is one. Raises RefusedError."""
    word = fields.get("word")
    if not isinstance(word, str) or word not in WORDS:
        msg = f"unknown word; the words are {', '.join(WORDS)}"
        raise RefusedError(msg)
    expected = _TAKES[word] | {"word", "node"}
    if set(fields) != expected:
        msg = f"{word} takes {', '.join(sorted(expected - {'word'}))}"
        raise RefusedError(msg)
    jobs = fields.get("jobs", [])
    if not isinstance(jobs, list) or len(jobs) > MAX_JOBS or any(_not(_JOB, job) for job in jobs):
        msg = f"jobs must be a list of at most {MAX_JOBS} job ids, such as 12 or 12_3"
        raise RefusedError(msg)
    outage = _ANY_OUTAGE if word == "return" else _OUTAGE
    for name, pattern in (("node", _NODE), ("outage", outage), ("ups", _NAME)):
        if name in expected and _not(pattern, fields.get(name)):
            msg = f"{name} must match {pattern.pattern}"
            raise RefusedError(msg)
    return Request(
        host=host,
        word=word,
        node=str(fields["node"]),
        outage=str(fields.get("outage", "")),
        ups=str(fields.get("ups", "")),
        hold=fields.get("hold") is True,
        rebooted=fields.get("rebooted") is True,
        jobs=tuple(str(job) for job in jobs),
        by_s=host.now_s() + WITHIN_S,
    )


def _not(pattern: re.Pattern[str], value: object) -> bool:
    return not isinstance(value, str) or pattern.fullmatch(value) is None


def answer_to(fields: Mapping[str, object], host: Host) -> Answer:
    """Do what is asked, and answer whatever happens. Raises RefusedError."""
    request = checked(fields, host)
    try:
        answer = WORDS[request.word](request)
    except SlurmError as error:
        answer = {"ok": False, "error": str(error)}
    return {"schema_version": 1, "word": request.word, **answer}


def carry_out(fields: Mapping[str, object]) -> Answer:
    """Do on this host what is asked, and log it. Raises RefusedError."""
    answer = answer_to(fields, ThisHost())
    word = answer["word"]
    if not answer["ok"]:
        log_line(3, f"{word}: {answer['error']}")
    elif word != "show":
        log_line(5, f"{word}: {answer.get('did')}: node {fields['node']}, jobs {answer.get('jobs', [])}")
    return answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one word and return the exit status: 0 done, 1 not done, 64 usage."""
    parser = argparse.ArgumentParser(prog="powerguard-slurm", description="This host's Slurm node, as root.")
    parser.add_argument("word", choices=["show", "serve"])
    parser.add_argument("node", nargs="?", default=ThisHost().name, help="its NodeName")
    try:
        args = parser.parse_args(arguments)
    except SystemExit as end:
        return EX_USAGE if end.code else 0
    if args.word == "serve":
        return serve(carry_out, awaited=("drain",))
    return by_hand("powerguard-slurm", lambda: carry_out({"word": args.word, "node": args.node}))


if __name__ == "__main__":
    raise SystemExit(main())
