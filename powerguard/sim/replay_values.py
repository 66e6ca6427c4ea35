"""A recording, what today's decisions make of it, and how the two differ: plain data; nothing is played here."""

from dataclasses import dataclass

from powerguard.core import plan
from powerguard.core.actions import Action, Note, PollNow
from powerguard.core.events import CheckpointProgress, Done, Event, Failed
from powerguard.core.model import State
from powerguard.core.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """An order of the recording and what came of it. outcome: None where none came before the outage's end.

    progress: what its checkpoint told on the way. at_s: when it was ordered, in the clock of its boot.
    """

    action: Action
    at_s: float
    outcome: Done | Failed | None = None
    progress: tuple[CheckpointProgress, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """What one life of the daemon heard. shift_s: from its boot's clock to the recording's.

    state: it began with; None: with nothing known. restored: it went on with an outage. events: in order.
    end_s: until when at least it lived, where that is after its last event.
    """

    at_s: float
    policy: Policy
    state: State | None = None
    restored: bool = False
    shift_s: float = 0.0
    events: tuple[Event, ...] = ()
    end_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A phase that began, or an order. t_s: in the recording's clock. what: of it, and whom it concerns, else "".

    because, numbers: as told by the phase's note.
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
    """One outage as recorded, or a file of readings. began_s: of the outage, in the recording's clock; None: not told.

    marks: what was done. complete: every reading was kept. zero_s: the file's own time at the recording's zero.
    cut_off: the file ends before the export did.
    """

    name: str
    legs: tuple[Leg, ...]
    deeds: tuple[Deed, ...] = ()
    marks: tuple[Mark, ...] = ()
    began_s: float | None = None
    complete: bool = True
    zero_s: float = 0.0
    cut_off: bool = False
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A note or an order of the replay, at t_s of the recording's clock."""

    t_s: float
    note: Note | None = None
    action: Action | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What today's decisions made of it. ended_s: in the recording's clock; forecast: what would come next.

    repeated: polls that the recording could not answer and that repeated its last reading. told: remarks.
    before_deadline_s: the recording ends so long before the host must be off; None where that is not so.
    """

    recording: Recording
    lines: tuple[Told, ...]
    marks: tuple[Mark, ...]
    began_s: float
    ended_s: float
    phase: str
    forecast: tuple[plan.Forecast, ...] = ()
    before_deadline_s: float | None = None
    readings: int = 0
    repeated: int = 0
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One mark of the two. by_s: later (positive) or earlier; None where only one of them has it."""

    verdict: str
    was: Mark | None
    now: Mark | None
    by_s: float | None = None


def compare(replayed: Replayed, *, tolerance_s: float = 1.5) -> tuple[Difference, ...]:
    """Set what would be done against what was done, in the order of time.

    Of the outage alone: an export tells nothing of what was ordered before it, by a drill or after a restart.
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


def mark_of(t_s: float, told: Note | Action) -> Mark | None:
    """Return the mark that a note or an order sets; None where it sets none."""
    if isinstance(told, Note):
        if told.event != "phase_changed":
            return None
        return Mark(t_s=t_s, kind="phase", what=str(dict(told.numbers).get("new")), because=told.because)
    if isinstance(told, PollNow):
        return None
    return Mark(t_s=t_s, kind="order", what=type(told).__name__, whom=str(getattr(told, "trainer", "")))
