"""A recorded outage through today's decisions: the real `step`, with the recording's inputs and an obedient world.

What is fed: readings, lost sources, what trainers said, operators' words and ticks in the order of the recording;
ticks as the loop makes them where the recording has none. An order is answered as the recording knows (the second
checkpoint of a trainer takes as long as its second one took, or for ever). An order that is given at its recorded
moment is answered at the place that the answer has among the recorded events, so that two events of one instant keep
their order. Where the recording knows nothing, the world obeys. The readings stay as they were: a battery that
today's decisions would have spared lasts no longer here.

The file begins with the recording and the result as plain data and how the two differ (`compare`), then the sources of
a recording and where one would have been lost, then the player.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Final

from powerguard.core.comeback.recovery import Stored, restore
from powerguard.core.decide import conditions
from powerguard.core.decide.machine import step
from powerguard.core.energy.needs import fold
from powerguard.core.model import events
from powerguard.core.model.actions import (
    Action,
    Conduct,
    Detail,
    EnsurePolicy,
    Note,
    PollNow,
    PowerOff,
    ResumeTrainer,
    ResumeTraining,
    SyncFilesystems,
    TriggerCheckpoint,
)
from powerguard.core.model.events import (
    CheckpointProgress,
    Done,
    Event,
    Failed,
    Reading,
    SourceFailed,
    Tick,
    TrainerSeen,
)
from powerguard.core.model.policy import Learned, Mode, Policy
from powerguard.core.model.state import Online, Recovery, Shutdown, State, Step, phase_name
from powerguard.core.supply import feeds
from powerguard.daemon.loop import TICK_ONLINE_S, TICK_OUTAGE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOrder:
    """An order of the recording and what came of it. outcome: None where none came before the outage's end.

    progress: what its checkpoint reported on the way. at_s: when it was ordered, in the clock of its boot.
    """

    action: Action
    at_s: float
    outcome: Done | Failed | None = None
    progress: tuple[CheckpointProgress, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonRun:
    """The events of one run of the daemon. shift_s: from its boot's clock to the recording's.

    state: it began with; None: with nothing known. events: in order.
    end_s: until when at least it lived, where that is after its last event.
    """

    at_s: float
    policy: Policy
    state: State | None = None
    shift_s: float = 0.0
    events: tuple[Event, ...] = ()
    end_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A phase that began, or an order. t_s: in the recording's clock. what: of it, and whom it concerns, else "".

    because, numbers: as in the phase's note.
    """

    t_s: float
    kind: str
    what: str
    whom: str = ""
    because: str = ""

    @property
    def label(self) -> tuple[str, str, str]:
        """What two marks have in common that mean the same."""
        return self.kind, self.what, self.whom


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One outage as recorded, or a file of readings. began_s: of the outage, in the recording's clock; None: not known.

    marks: what was done. complete: every reading was kept. zero_s: the file's own time at the recording's zero.
    cut_off: the file ends before the export did.
    """

    name: str
    legs: tuple[DaemonRun, ...]
    deeds: tuple[RecordedOrder, ...] = ()
    marks: tuple[Mark, ...] = ()
    began_s: float | None = None
    complete: bool = True
    zero_s: float = 0.0
    cut_off: bool = False
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLine:
    """A note or an order of the replay, at t_s of the recording's clock. mode: in which it was decided."""

    t_s: float
    mode: Mode
    note: Note | None = None
    action: Action | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The outcome with today's decisions. ended_s: in the recording's clock; forecast: what would come next.

    repeated: polls that the recording could not answer and that repeated its last reading. remarks: what is uncertain.
    before_deadline_s: the recording ends so long before the host must be off; None where that is not so.
    """

    recording: Recording
    lines: tuple[ReplayLine, ...]
    marks: tuple[Mark, ...]
    began_s: float
    ended_s: float
    phase: str
    forecast: tuple[conditions.Forecast, ...] = ()
    before_deadline_s: float | None = None
    readings: int = 0
    repeated: int = 0
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One mark of the two. by_s: later (positive) or earlier; None where only one of them has it."""

    verdict: str
    was: Mark | None
    now: Mark | None
    by_s: float | None = None


def compare(replayed: Replayed, *, tolerance_s: float = 1.5) -> tuple[Difference, ...]:
    """Set what would be done against what was done, in the order of time.

    Of the outage alone: an export has nothing of what was ordered before it, by a drill or after a restart.
    """
    was, began_s = replayed.recording.marks, replayed.recording.began_s
    now = [mark for mark in replayed.marks if began_s is None or mark.t_s >= began_s - tolerance_s]
    out: list[tuple[float, Difference]] = []
    for mark in was:
        other = next((each for each in now if each.label == mark.label), None)
        if other is None:
            out.append((mark.t_s, Difference(verdict="not done", was=mark, now=None)))
            continue
        now.remove(other)
        by_s = other.t_s - mark.t_s
        verdict = "same" if abs(by_s) <= tolerance_s else "later" if by_s > 0 else "earlier"
        out.append((mark.t_s, Difference(verdict=verdict, was=mark, now=other, by_s=by_s)))
    out += [(mark.t_s, Difference(verdict="new", was=None, now=mark)) for mark in now]
    return tuple(each for _, each in sorted(out, key=lambda pair: pair[0]))


def mark_of(t_s: float, entry: Note | Action) -> Mark | None:
    """Return the mark that a note or an order sets; None where it sets none."""
    if isinstance(entry, Note):
        if entry.event != "phase_changed":
            return None
        return Mark(t_s=t_s, kind="phase", what=str(dict(entry.numbers).get("new")), because=entry.because)
    if isinstance(entry, PollNow):
        return None
    return Mark(t_s=t_s, kind="order", what=type(entry).__name__, whom=str(getattr(entry, "trainer", "")))


MISSES: Final = 3


def sources_of(events: Sequence[Event], ups: str) -> tuple[str, ...]:
    """Return the sources of one UPS, those that were only ever lost among them, in the order of their first word."""
    matching = (event for event in events if isinstance(event, Reading | SourceFailed) and event.ups == ups)
    return tuple(dict.fromkeys(event.source for event in matching))


def coarseness_s(events: Sequence[Event], ups: str) -> float:
    """Median time between the readings of one source, of several the slowest; 1 where there are too few to know."""
    every_s = [_every_s(events, ups, source) for source in sources_of(events, ups)]
    return max((each for each in every_s if each is not None), default=1.0)


def _every_s(events: Sequence[Event], ups: str, source: str) -> float | None:
    at_s = [event.at_s for event in events if _is_of(event, ups, source)]
    gaps = [later - earlier for earlier, later in pairwise(at_s) if later > earlier]
    return median(gaps) if gaps else None


def _is_of(event: Event, ups: str, source: str) -> bool:
    return isinstance(event, Reading) and event.ups == ups and event.source == source


def with_losses(events: Sequence[Event], *, ups: str, every_s: float) -> tuple[Event, ...]:
    """Add where a source is silent for longer than three of its polls: there the daemon would have lost it.

    every_s: how often it is polled at least, seconds; a source that reports less often, as often as it reports.
    """
    lost: list[Event] = []
    for source in sources_of(events, ups):
        polled_s = max(every_s, _every_s(events, ups, source) or every_s)
        silent_s = MISSES * polled_s
        for last, event in pairwise([event for event in events if _is_of(event, ups, source)]):
            if event.at_s - last.at_s > silent_s + 0.5 * polled_s:
                reason = f"the recording has no reading for {event.at_s - last.at_s:.0f} s"
                lost_s = last.at_s + silent_s
                lost.append(SourceFailed(at_s=lost_s, ups=ups, source=source, reason=reason, lost=True))
    return tuple(sorted((*events, *lost), key=lambda event: event.at_s))


POLL_TAKES_S: Final = 0.25
POLL_NEAR_S: Final = 1.5
"""A reading so soon after a poll was ordered is its answer."""
LONG_GAP_S: Final = 60.0
"""Where the recording is silent for longer, ticks come less often."""
TICKS_IN_GAP_S: Final = 10.0
AFTER_END_S: Final = 30.0
"""A power-off that has begun when the recording ends is followed for so long."""
MISSED_TICKS: Final = 3.0
"""Where a recording with ticks has no event for so many of them, the replay makes ticks of its own."""
ROUNDING_S: Final = 0.01
SAME_S: Final = 1e-6
"""What is so near is one instant: then an outcome comes before a reading, and both before a tick, as in the loop."""
_TAKES_S: Final[dict[type[Action], float]] = {
    EnsurePolicy: 0.2,
    SyncFilesystems: 0.5,
    PowerOff: 0.1,
    ResumeTrainer: 0.2,
    ResumeTraining: 1.0,
}


def replay(recording: Recording, *, obedient: bool = False) -> Replayed:
    """Play a recording. obedient: the recorded outcomes are left aside, too."""
    player = _Player(recording, obedient=obedient)
    for leg, following in zip(recording.legs, (*recording.legs[1:], None), strict=True):
        if not player.enter(leg, first=leg is recording.legs[0]):
            break
        player.play(leg, follow_until_s=_follow_until_s(leg, following))
    return player.replayed()


def _follow_until_s(leg: DaemonRun, following: DaemonRun | None) -> float:
    """How long a power-off that has begun may be followed, in the leg's clock.

    Where the daemon was started again within the boot this life had ended: its next one goes on with the power-off.
    """
    if following is None:
        return math.inf
    is_same_boot = following.policy.boot_id == leg.policy.boot_id
    return -math.inf if is_same_boot else following.at_s + following.shift_s - leg.shift_s


def _order_of(event: Event) -> str:
    """Return the id of the order that an event answers; "" if it answers none."""
    if isinstance(event, Done | Failed):
        return event.action.id
    return event.action_id if isinstance(event, CheckpointProgress) else ""


@dataclass(slots=True)
class _Poll:
    """A poll of one UPS that was ordered and is to be answered at at_s, unless the recording does."""

    at_s: float
    ups: str


@dataclass(order=True, slots=True)
class _Due:
    at_s: float
    number: int
    event: Event | _Poll = field(compare=False)
    action: Action | None = field(compare=False, default=None)


class _Player:
    """The world around `step`, for one recording."""

    def __init__(self, recording: Recording, *, obedient: bool) -> None:
        self._recording = recording
        self._deeds: dict[tuple[str, str], deque[RecordedOrder]] = {}
        for deed in () if obedient else recording.deeds:
            key = type(deed.action).__name__, str(getattr(deed.action, "trainer", ""))
            self._deeds.setdefault(key, deque()).append(deed)
        self._obedient = obedient
        self._policy = recording.legs[0].policy if recording.legs else Policy(boot_id="replay", ups="")
        self._folded: tuple[Policy, Learned, Policy] | None = None
        self._state = State()
        self._leg = DaemonRun(at_s=0.0, policy=self._policy)
        self._now_s = 0.0
        self._due: list[_Due] = []
        self._open: dict[str, Action] = {}
        self._answered: dict[str, Action] = {}
        self._number = 0
        self._is_paused: dict[str, bool] = {}
        self._ahead: deque[Event] = deque()
        self._lines: list[ReplayLine] = []
        self._marks: list[Mark] = []
        self._began_s: float | None = recording.began_s
        self._readings = self._repeated = 0
        self._remarks: list[str] = []
        self._off = self._survives = False
        self._heard_s = self._end_s = 0.0
        self._ordered: set[str] = set()
        self._given: dict[str, tuple[float, RecordedOrder | None]] = {}

    # --- Legs --------------------------------------------------------------------------------------------------------

    def enter(self, leg: DaemonRun, *, first: bool) -> bool:
        """Begin a leg; False where today's decisions would not have come to it."""
        self._due.clear()
        self._ahead = deque(leg.events)
        if first:
            self._leg, self._policy, self._now_s = leg, leg.policy, leg.at_s
            self._state = restore(leg.policy, None, leg.at_s).state if leg.state is None else leg.state
            return True
        next_boot = leg.policy.boot_id != self._policy.boot_id
        if next_boot and not isinstance(self._state.phase, Shutdown):
            self._remarks.append(
                "the host was off then; today's decisions had not powered it off when the recording ends"
            )
            return False
        if not next_boot and self._off:
            return False
        # The clock of the recording goes on over a boot, so the difference of the two is the time without a daemon.
        gap_s = leg.at_s + leg.shift_s - (self._heard_s + self._leg.shift_s)
        stored = Stored(
            state=self._state,
            boot_id=self._policy.boot_id,
            at_s=self._heard_s,
            gap_s=max(0.0, gap_s),
            in_flight=() if next_boot else tuple(self._open.values()),
        )
        self._open.clear()
        if next_boot:
            self._is_paused.clear()  # Another process now.
        self._leg, self._policy, self._off = leg, leg.policy, False
        self._now_s = leg.at_s
        self._take(restore(self._current(), stored, leg.at_s), leg.at_s)
        return True

    def play(self, leg: DaemonRun, *, follow_until_s: float) -> None:
        """Feed what this leg heard, with ticks and answers between."""
        end_s = max(leg.events[-1].at_s if leg.events else leg.at_s, leg.end_s or leg.at_s) + ROUNDING_S
        is_ticking = any(isinstance(event, Tick) for event in leg.events)
        follow_until_s = min(follow_until_s, end_s + AFTER_END_S)
        self._heard_s, self._end_s = leg.at_s, end_s
        while not self._off:
            event_s = self._ahead[0].at_s if self._ahead else None
            tick_s = self._now_s + self._pace_s() * (MISSED_TICKS if is_ticking and self._ahead else 1.0)
            due_s = self._due[0].at_s if self._due else None
            at_s = min(each for each in (tick_s, event_s, due_s) if each is not None)
            if event_s is None and isinstance(self._state.phase, Online):
                return  # What begins now is another outage's.
            if event_s is None and at_s > end_s and not (self._is_going_down() and at_s <= follow_until_s):
                if leg.end_s is None or self._now_s >= leg.end_s:
                    return
                at_s = leg.end_s  # A busy daemon's ticks come late: it lived until then, and decided something.
            if due_s is not None and due_s <= at_s + SAME_S:
                self._answer(heapq.heappop(self._due))
            elif event_s is not None and event_s <= at_s + SAME_S:
                self._heard_s = event_s
                self._feed(self._ahead.popleft())
            else:
                self._send(Tick(at_s=at_s))
            phase = self._state.phase
            if isinstance(phase, Shutdown) and self._policy.powers_off and phase.ordered:
                self._off = self._now_s >= phase.force_at_s and not self._survives

    def _is_going_down(self) -> bool:
        """The power-off has been decided and not ordered yet."""
        phase = self._state.phase
        return isinstance(phase, Shutdown) and not phase.ordered

    def _pace_s(self) -> float:
        if self._now_s - self._heard_s > LONG_GAP_S:
            return TICKS_IN_GAP_S
        return TICK_ONLINE_S if isinstance(self._state.phase, Online) else TICK_OUTAGE_S

    # --- Feeding -----------------------------------------------------------------------------------------------------

    def _current(self) -> Policy:
        """The settings, and what has been measured in place of what they presume: as the loop does it."""
        learned = self._state.learned
        if self._folded is None or self._folded[0] is not self._policy or self._folded[1] is not learned:
            self._folded = self._policy, learned, fold(self._policy, learned)
        return self._folded[2]

    def _feed(self, event: Event) -> None:
        if isinstance(event, Reading):
            self._readings += 1
        elif isinstance(event, CheckpointProgress | Done | Failed):
            self._answer_in_place(event)
            return
        elif isinstance(event, TrainerSeen) and event.alive and event.trainer in self._is_paused:
            event = replace(event, paused=self._is_paused[event.trainer])
        self._send(event)

    def _send(self, event: Event) -> None:
        self._now_s = max(self._now_s, event.at_s)
        self._take(step(self._current(), self._state, event), event.at_s)

    def _take(self, answer: Step, at_s: float) -> None:
        self._state = answer.state
        t_s = at_s + self._leg.shift_s
        phase = answer.state.phase
        if self._began_s is None and not isinstance(phase, Online):
            self._began_s = phase.outage.since_s + self._leg.shift_s
        for note in answer.notes:
            self._lines.append(ReplayLine(t_s=t_s, mode=self._policy.mode, note=note))
            self._mark(t_s, note)
        for action in answer.actions:
            self._lines.append(ReplayLine(t_s=t_s, mode=self._policy.mode, action=action))
            self._mark(t_s, action)
            self._carry_out(action, at_s)

    def _mark(self, t_s: float, entry: Note | Action) -> None:
        mark = mark_of(t_s, entry)
        if isinstance(entry, Action):
            if entry.id in self._ordered:
                return  # Repeated after a restart: it is the same order.
            self._ordered.add(entry.id)
        if mark is not None:
            self._marks.append(mark)

    # --- Answering ---------------------------------------------------------------------------------------------------

    def _later(self, at_s: float, event: Event | _Poll, action: Action | None = None) -> None:
        self._number += 1
        heapq.heappush(self._due, _Due(at_s, self._number, event, action))

    def _carry_out(self, action: Action, at_s: float) -> None:
        if isinstance(action, PollNow):
            self._later(at_s + POLL_TAKES_S, _Poll(at_s + POLL_TAKES_S, action.ups))
            return
        self._open[action.id] = action
        if action.id not in self._given:
            known = self._deeds.get((type(action).__name__, str(getattr(action, "trainer", ""))))
            # An export has the orders of its outage alone: one from before it, such as an operator's, is none of them.
            is_earlier = at_s + self._leg.shift_s < (self._recording.began_s or -math.inf)
            self._given[action.id] = at_s, known.popleft() if known and not is_earlier else None
        # One that is repeated after a restart is the same order, answered as it was, as far as that is ahead.
        given_s, deed = self._given[action.id]
        if isinstance(action, PowerOff):
            # Where the recording goes on after the same order, the host did not go down: that is what it shows.
            self._survives = deed is not None and deed.at_s <= max(action.by_s, at_s + action.force_after_s)
        order = action if deed is None else deed.action
        is_in_time = deed is None or abs(given_s - deed.at_s) <= ROUNDING_S
        if is_in_time and not self._obedient and any(_order_of(each) == order.id for each in self._ahead):
            self._answered[order.id] = action
            return
        if deed is None:
            self._later(*self._obey(action, at_s), action)
            return
        for each in deed.progress:
            if (due_s := given_s + each.at_s - deed.at_s) >= at_s:
                self._later(due_s, replace(each, at_s=due_s, action_id=action.id), action)
        if deed.outcome is not None:
            ended_s = max(at_s, given_s + deed.outcome.at_s - deed.at_s)
            self._later(ended_s, replace(deed.outcome, at_s=ended_s, action=action), action)

    def _obey(self, action: Action, at_s: float) -> tuple[float, Event]:
        """How it goes where every peer obeys."""
        takes_s = _TAKES_S.get(type(action), 1.0)
        detail: Detail = ()
        if isinstance(action, TriggerCheckpoint):
            trainer = self._state.trainer(action.trainer)
            takes_s = 1.0 if trainer is None else trainer.checkpoint_s
            paused = action.after is not Conduct.CONTINUE
            step_done = None if trainer is None else trainer.step
            detail = (("step", step_done), ("at_paused_step", paused), ("paused", paused), ("verified", True))
        elif isinstance(action, EnsurePolicy):
            detail = (("policy", "always-on"), ("verified", True))
        elif isinstance(action, PowerOff):
            detail = (("via", "replay"), ("deadline_s", action.force_after_s))
        if at_s + takes_s > action.by_s:
            limit_s = max(0.0, action.by_s - at_s)
            reason = f"timed out after {limit_s:.1f} s"
            return action.by_s, Failed(at_s=action.by_s, action=action, took_s=limit_s, reason=reason, timed_out=True)
        return at_s + takes_s, Done(at_s=at_s + takes_s, action=action, took_s=takes_s, detail=detail)

    def _answer_in_place(self, event: CheckpointProgress | Done | Failed) -> None:
        """Answer an order at the place that its answer has among the recorded events.

        The order of an earlier outage was given before the recording began: its answer is fed as it was.
        """
        if (action := self._answered.get(_order_of(event))) is None:
            is_earlier = (
                isinstance(event, Done | Failed) and getattr(event.action, "outage", "") != self._recording.name
            )
            if is_earlier and not self._obedient:
                self._send(event)
        elif isinstance(event, CheckpointProgress):
            self._answer(_Due(event.at_s, 0, replace(event, action_id=action.id), action))
        else:
            self._answer(_Due(event.at_s, 0, replace(event, action=action), action))

    def _answer(self, due: _Due) -> None:
        event = due.event
        if isinstance(event, _Poll):
            self._poll(event)
            return
        if due.action is not None and due.action.id not in self._open:
            return
        if isinstance(event, Done | Failed):
            self._open.pop(event.action.id, None)
            if isinstance(event.action, TriggerCheckpoint) and isinstance(event, Done):
                if events.checkpoint_done(event).paused:
                    self._is_paused[event.action.trainer] = True
            elif isinstance(event.action, ResumeTrainer) and isinstance(event, Done):
                self._is_paused[event.action.trainer] = False
        self._send(event)

    def _poll(self, poll: _Poll) -> None:
        """Answer with a reading between the last and the next one, where they agree and neither is near."""
        known = feeds.of(self._state, poll.ups)
        feed = self._state.feed if known is None else known.feed
        last = feed.reading
        if last is None or feed.lost_since_s is not None or poll.at_s <= last.at_s:
            return
        after = next((each for each in self._ahead if isinstance(each, Reading) and each.ups == poll.ups), None)
        if after is not None and after.source != last.source:
            # Of several sources, the one that reports next is asked: for its own values, not those of all together.
            last = next((each.reading for each in feed.heard if each.source == after.source), None)
        if (
            after is None
            or last is None
            or poll.at_s <= last.at_s
            or after.at_s - poll.at_s <= POLL_NEAR_S
            or after.output_source is not last.output_source
        ):
            return
        share = (poll.at_s - last.at_s) / (after.at_s - last.at_s)
        between = {
            name: before + share * (then - before)
            for name in ("runtime_s", "charge_pct", "load_pct", "on_battery_s", "output_off_in_s")
            if (before := getattr(last, name)) is not None and (then := getattr(after, name)) is not None
        }
        self._repeated += 1
        self._send(replace(last, at_s=poll.at_s, **between))

    def _before_deadline_s(self) -> float | None:
        """How much later than the recording's end the host must be off; None where that is known, or not at stake."""
        phase = self._state.phase
        if not isinstance(phase, Shutdown) or not self._policy.powers_off or self._off:
            return None
        left_s = (phase.force_at_s if phase.ordered else phase.prepare_by_s) - self._end_s + ROUNDING_S
        return left_s if left_s > 0.0 else None

    # --- Output ------------------------------------------------------------------------------------------------------

    def replayed(self) -> Replayed:
        state, policy = self._state, self._current()
        ahead: tuple[conditions.Forecast, ...] = ()
        if not isinstance(state.phase, Online | Recovery | Shutdown):
            ahead = conditions.forecast(policy, state, conditions.outage_budget(policy, state, self._now_s))
        ended_s = self._now_s + self._leg.shift_s
        first = self._recording.legs[0] if self._recording.legs else None
        began_s = self._began_s
        if began_s is None:
            began_s = 0.0 if first is None else first.at_s + first.shift_s
        shift_s = self._leg.shift_s
        before_s = self._before_deadline_s()
        if before_s is not None:
            self._remarks.append(
                f"the recording ends {before_s:.0f} s before the power-off's deadline: "
                "whether the host was off in time is not known"
            )
        return Replayed(
            recording=self._recording,
            lines=tuple(self._lines),
            marks=tuple(self._marks),
            began_s=began_s,
            ended_s=ended_s,
            phase=phase_name(state.phase),
            before_deadline_s=before_s,
            forecast=tuple(replace(f, at_s=None if f.at_s is None else f.at_s + shift_s) for f in ahead),
            readings=self._readings,
            repeated=self._repeated,
            remarks=(*self._recording.remarks, *self._remarks),
        )
