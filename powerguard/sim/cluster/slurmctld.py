"""A simulated slurmctld with its faults, and the real root helper that speaks to it in the world's time.

The helper's words (`powerguard.effectors.slurm.helper`) are the product's: they read the text that Slurm prints, and
decide by it. A word makes several calls, and other things happen between two of them. So a `Word` is played again from
its beginning whenever a call has ended, with the answers so far, up to the first call that it has not made yet.

What Slurm does is as measured with 22.05.8 (docs/guides/slurm.md): a job that is requeued waits for 121 s, a node that
does not answer is down after 300 s, one that reboots unannounced stays down, and a DRAIN overwrites the reason of any
other. `by` and `by_s` of a node, which Slurm itself does not know, say who has marked it: the invariants ask them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from powerguard.effectors.child import Ended
from powerguard.effectors.slurm.helper import REBOOTED, answer_to
from powerguard.sim.world.invariants import hold

REQUEUED_S: Final = 121.0
SILENT_S: Final = 300.0
TICK_S: Final = 5.0
ONE_CALL_S: Final = 0.02
_NEWS_S: Final = 5.0
"""So long after a change of utility an order may still be under way that was right before."""
OURS, PERSON, ITSELF = "powerguard", "person", "slurmctld"


class Fault(NamedTuple):
    """What slurmctld does from begin_s to end_s: hangs, is late, refuses, lies or garbles. by_s: by how much."""

    kind: str
    begin_s: float
    end_s: float
    by_s: float = 0.0


class ClusterEvent(NamedTuple):
    """What a person, or Slurm itself, does at at_s: drain, resume or words (on a node), requeue, forget."""

    at_s: float
    kind: str
    node: int = 0


@dataclass(slots=True, kw_only=True)
class Node:
    """A node. by: who has marked it last, since by_s; "": it has no mark. silent_s: its slurmd is away since then."""

    name: str
    drain: bool = False
    down: bool = False
    reason: str = ""
    by: str = ""
    by_s: float = -math.inf
    silent_s: float = math.inf

    @property
    def is_free(self) -> bool:
        """Whether a job may start there."""
        return not self.drain and not self.down and self.silent_s == math.inf


@dataclass(slots=True, kw_only=True)
class Job:
    """The job. nodes: where it runs; empty while it waits. width: nodes that it needs. may_start_s: when it may."""

    id: str
    width: int
    requeues: bool = True
    nodes: tuple[int, ...] = ()
    restarts: int = 0
    may_start_s: float = -math.inf
    held: bool = False
    failed: bool = False


class _CallError(BaseException):
    """The word has made a call that it does not have the answer of yet: not for the helper to catch."""

    def __init__(self, argv: tuple[str, ...], limit_s: float) -> None:
        super().__init__()
        self.argv, self.limit_s = argv, limit_s


class HelperWord:
    """One word of the helper on a host, call by call: what the helper knows as its `Host`.

    request: what the caller asks for.
    """

    def __init__(
        self,
        request: Mapping[str, object],
        host: int,
        boot: int,
        now_s: float,
        on_answer: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """boot: how often the host had started. on_answer: gets the answer, if the host is still there."""
        self.request, self.host, self.boot, self.name = dict(request), host, boot, str(request["node"])
        self.on_answer, self.began_s = on_answer, now_s
        self.call: _CallError | None = None
        self.ends_s = math.inf
        """When the call that it waits for ends."""
        self.read_s, self.lied = -math.inf, False
        """When it read the node last, and whether Slurm then said what was not so."""
        self._answers: list[tuple[float, Ended]] = []
        self._at = 0

    def now_s(self) -> float:
        """Return the time of the last answer that it has been played up to."""
        return self._answers[self._at - 1][0] if self._at else self.began_s

    def run(self, argv: Sequence[str], *, limit_s: float) -> Ended:
        """Return the answer to a call that has been made already."""
        if self._at == len(self._answers):
            raise _CallError(tuple(argv), limit_s)
        self._at += 1
        return self._answers[self._at - 1][1]

    def go(self) -> Mapping[str, Any] | None:
        """Play on to the next call (`call` is set then), or to the answer."""
        self._at, self.call = 0, None
        try:
            return answer_to(self.request, self)
        except _CallError as call:
            self.call = call
            return None

    def take_in(self, now_s: float, ended: Ended) -> None:
        """Enter how its call has ended."""
        self._answers.append((now_s, ended))


class Refused(Exception):  # noqa: N818 - what Slurm answers
    """Slurm's exit status 1; the text is what it prints."""


class Slurmctld:
    """See the module. starts, stops: what happens on the hosts when the job starts or is ended there."""

    def __init__(
        self,
        names: Sequence[str],
        job: Job,
        *,
        faults: Sequence[Fault] = (),
        deeds: Sequence[ClusterEvent] = (),
        on_battery_s: Callable[[int], float | None],
        starts: Callable[[tuple[int, ...]], None],
        stops: Callable[[], None],
    ) -> None:
        """on_battery_s: for how long a host is on battery; None: it has utility."""
        self.nodes = [Node(name=name) for name in names]
        self.job, self.faults = job, tuple(faults)
        self.now_s = -math.inf
        self.requeued: list[tuple[int, int, str, str]] = []
        """(host, boot, outage, job) of every requeue that powerguard has ordered."""
        self._deeds = sorted(deeds)
        self._words: list[HelperWord] = []
        self._held_up: list[tuple[float, HelperWord, tuple[str, ...]]] = []
        """Orders whose caller was killed: slurmctld reads them when it goes on."""
        self._before: list[tuple[float, tuple[Node, ...]]] = []
        self._tick_s = -math.inf
        self._on_battery_s, self._starts, self._stops = on_battery_s, starts, stops

    # --- Its time ----------------------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When something happens next."""
        deed_s = self._deeds[0].at_s if self._deeds else math.inf
        words = (word.ends_s for word in self._words)
        return min([deed_s, self._tick_s, *words, *(at_s for at_s, _, _ in self._held_up)])

    def pass_time(self, now_s: float) -> None:
        """Do what is due."""
        self.now_s = now_s
        while self._deeds and self._deeds[0].at_s <= now_s:
            self._do(self._deeds.pop(0))
        for each in [each for each in self._held_up if each[0] <= now_s]:
            self._held_up.remove(each)
            self._carried_out(each[1], each[2])
        for word in [word for word in self._words if word.ends_s <= now_s]:
            call, word.ends_s = word.call, math.inf
            assert call is not None  # noqa: S101 - only a word with a call has an end
            word.take_in(now_s, self._answered(word, call))
            self._play(word)
        if now_s >= self._tick_s:
            self._tick_s = now_s + TICK_S
            if not self._fault("hangs"):
                self._schedule()
            self._before = [*self._before[-60:], (now_s, tuple(replace(node) for node in self.nodes))]

    def say(self, word: HelperWord) -> None:
        """Begin a word of the helper."""
        self._words.append(word)
        self._play(word)

    def off(self, host: int) -> None:
        """A host is off, or has no power: its helper and its slurmd are gone."""
        self._words = [word for word in self._words if word.host != host]
        self.nodes[host].silent_s = min(self.nodes[host].silent_s, self.now_s)

    def on(self, host: int) -> None:
        """Its slurmd is up again, in another boot."""
        node, away_s = self.nodes[host], self.now_s - self.nodes[host].silent_s
        node.silent_s = math.inf
        if node.down and node.by == ITSELF and node.reason == "Not responding":
            self._mark(node, "", "", down=False)  # ReturnToService=1
        elif not node.down and away_s < SILENT_S:
            self._mark(node, node.reason or REBOOTED, node.by or ITSELF, down=True)
            self._lost(host)

    def _play(self, word: HelperWord) -> None:
        answer = word.go()
        if word.call is None:
            self._words.remove(word)
            if answer is not None:
                word.on_answer(answer)
            return
        late, hangs = self._fault("late"), self._fault("hangs")
        takes_s = word.call.limit_s if hangs else ONE_CALL_S if late is None else late.by_s
        word.ends_s = self.now_s + min(takes_s, word.call.limit_s)

    def _fault(self, kind: str) -> Fault | None:
        return next(
            (each for each in self.faults if each.kind == kind and each.begin_s <= self.now_s < each.end_s), None
        )

    # --- What it is asked --------------------------------------------------------------------------------------------

    def _answered(self, word: HelperWord, call: _CallError) -> Ended:
        """Carry a call out at its end, and return what the helper sees of it."""
        hangs, late = self._fault("hangs"), self._fault("late")
        if hangs is not None:
            self._held_up.append((hangs.end_s, word, call.argv))
            return Ended(returncode=-9, stdout=b"", stderr=b"", timed_out=True)
        if self._fault("refuses"):
            why = b"slurm_update error: Socket timed out on send/recv operation"
            return Ended(returncode=1, stdout=b"", stderr=why)
        ended = self._carried_out(word, call.argv)
        if late is not None and late.by_s > call.limit_s:
            return Ended(returncode=-9, stdout=b"", stderr=b"", timed_out=True)
        if self._fault("garbles"):
            ended = replace(ended, stdout=ended.stdout[: len(ended.stdout) // 3])
        return ended

    def _carried_out(self, word: HelperWord, argv: tuple[str, ...]) -> Ended:
        try:
            return Ended(returncode=0, stdout=self._output_of(word, argv).encode(), stderr=b"")
        except Refused as why:
            return Ended(returncode=1, stdout=b"", stderr=str(why).encode())

    def _output_of(self, word: HelperWord, argv: tuple[str, ...]) -> str:
        match argv:
            case ("scontrol", "--oneliner", "show", "node", name):
                return self._show(word, name)
            case ("scontrol", "--oneliner", "show", "job", _):
                return f"JobId={self.job.id} JobName=llm Comment=powerguard:signal=USR1"
            case ("scontrol", "update", name, state, *rest) if name.startswith("NodeName="):
                return self._update(word, name.partition("=")[2], state.partition("=")[2], "".join(rest)[7:])
            case ("scontrol", "update", ids, "StartTime=now"):
                return self._each(ids.partition("=")[2], self._start_now)
            case ("scontrol", "release", ids):
                return self._each(ids, self._release)
            case ("scontrol", "requeue" | "requeuehold" as verb, ids):
                return self._each(ids, lambda: self._requeue(word, held=verb == "requeuehold"))
            case ("squeue", *options):
                return self._queue(word, options)
            case _:
                return ""

    def _show(self, word: HelperWord, name: str) -> str:
        node = next(node for node in self.nodes if node.name == name)
        lies = self._fault("lies")
        word.read_s, word.lied = self.now_s, lies is not None
        if lies is not None:
            old = [nodes for at_s, nodes in self._before if at_s <= self.now_s - lies.by_s]
            node = next((each for each in (old[-1] if old else ()) if each.name == name), node)
        states = [self._base(node), *(["DRAIN"] if node.drain else [])]
        reason = f" Reason={node.reason} [root@2026-01-02T03:04:05]" if node.reason else ""
        away = "*" if node.silent_s < math.inf else ""
        return f"NodeName={name} CPUTot=8 NodeHostName={name} Version=22.05.8 State={'+'.join(states)}{away}{reason}\n"

    def _base(self, node: Node) -> str:
        if node.down:
            return "DOWN"
        return "ALLOCATED" if self.names.index(node.name) in self.job.nodes else "IDLE"

    def _queue(self, word: HelperWord, options: list[str]) -> str:
        here = f"--nodelist={word.name}" in options
        host = self.names.index(word.name)
        shown = host in self.job.nodes if here else not self.job.nodes and not self.job.failed
        if not shown:
            return ""
        batch = self.names[self.job.nodes[0]] if self.job.nodes else ""
        return f"{self.job.id:<32}{batch:<72}{int(self.job.requeues):<8}{self.job.restarts:<12}\n"

    @property
    def names(self) -> list[str]:
        """The names of its nodes."""
        return [node.name for node in self.nodes]

    def _each(self, ids: str, change: Callable[[], str]) -> str:
        """Change each job that is named; every refusal has its line, and makes the exit status 1."""
        refusals = [f"{why} for job {each}" for each in ids.split(",") if (why := self._one(each, change))]
        if refusals:
            raise Refused("\n".join(refusals))
        return ""

    def _one(self, id_: str, change: Callable[[], str]) -> str:
        return change() if id_ == self.job.id and not self.job.failed else "Invalid job id specified"

    def _start_now(self) -> str:
        if self.job.nodes:
            return "Job is no longer pending execution"
        hold(self.job.restarts, "no job is started that was not requeued")
        self.job.may_start_s = self.now_s
        return ""

    def _release(self) -> str:
        self.job.held = False
        return ""

    def _requeue(self, word: HelperWord, *, held: bool) -> str:
        job = self.job
        if not job.nodes:
            return "Job is pending execution"
        if not job.requeues:
            return "Requested operation is presently disabled"
        hold(job.nodes[0] == word.host, "only the host of the batch script requeues a job")
        key = (word.host, word.boot, str(word.request["outage"]), job.id)
        hold(key not in self.requeued, "no job is requeued twice for one outage")
        self.requeued.append(key)
        self._ended(held=held)
        return ""

    def _update(self, word: HelperWord, name: str, state: str, reason: str) -> str:
        node = next(node for node in self.nodes if node.name == name)
        read = word.read_s > node.by_s and not word.lied
        expected = state == "RESUME" and word.request.get("rebooted") is True and node.reason == REBOOTED
        hold(node.by in ("", OURS) or expected or not read, "no mark that is not ours is undone")
        host = self.nodes.index(node)
        if state == "RESUME":
            on_battery_s = self._on_battery_s(host)
            hold(on_battery_s is None or on_battery_s < _NEWS_S, "no node is given back on battery")
            self._mark(node, "", "", down=False, drain=False)
        elif state == "DRAIN":
            self._mark(node, reason, OURS, drain=True)
        else:
            self._mark(node, reason, OURS, down=True)
            self._lost(host)
        return ""

    # --- What happens to it ------------------------------------------------------------------------------------------

    def _mark(self, node: Node, reason: str, by: str, *, down: bool | None = None, drain: bool | None = None) -> None:
        node.reason, node.by, node.by_s = reason, by, self.now_s
        node.down = node.down if down is None else down
        node.drain = node.drain if drain is None else drain

    def _do(self, deed: ClusterEvent) -> None:
        """A person, or Slurm itself, does something."""
        node = self.nodes[deed.node]
        match deed.kind:
            case "drain":
                self._mark(node, "bad disk", PERSON, drain=True)
            case "resume":
                self._mark(node, "", "", down=False, drain=False)
            case "words" if node.by == OURS:
                self._mark(node, f"{node.reason} and bad disk", PERSON)
            case "requeue" if self.job.nodes and self.job.requeues:
                self._ended(held=False)
            case "forget" if node.by == OURS:
                node.reason = ""
            case _:
                pass

    def operate(self, node: int) -> None:
        """A person has repaired what was reported, and gives a node back."""
        self._mark(self.nodes[node], "", "", down=False, drain=False)

    def _lost(self, host: int) -> None:
        """A node is down: its job is requeued by Slurm itself, or ends."""
        if host in self.job.nodes:
            if self.job.requeues:
                self._ended(held=False)
            else:
                self.fail()

    def _ended(self, *, held: bool) -> None:
        job = self.job
        job.nodes, job.restarts, job.held = (), job.restarts + 1, held
        job.may_start_s = self.now_s + REQUEUED_S
        self._stops()

    def fail(self) -> None:
        """The job's script has ended with an error."""
        if self.job.nodes:
            self.job.nodes, self.job.failed = (), True
            self._stops()

    def submit(self) -> None:
        """A person submits it again."""
        self.job = Job(id=str(int(self.job.id) + 1), width=self.job.width, requeues=self.job.requeues)

    def _schedule(self) -> None:
        for at, node in enumerate(self.nodes):
            if not node.down and self.now_s - node.silent_s >= SILENT_S:
                self._mark(node, node.reason or "Not responding", node.by or ITSELF, down=True)
                self._lost(at)
        job = self.job
        free = tuple(at for at, node in enumerate(self.nodes) if node.is_free)[: job.width]
        waits = not job.nodes and not job.held and not job.failed and self.now_s >= job.may_start_s
        if waits and len(free) == job.width:
            job.nodes = free
            self._starts(free)
