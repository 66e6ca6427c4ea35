"""The outage in numbers: the figures of its record, and the counters that outlive the host's power-offs."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from powerguard.clock import Clock
from powerguard.core.model.actions import Detail, Note, Scalar
from powerguard.core.model.events import Event, Measured
from powerguard.core.model.state import Online, Recovery, State, Step, Supply
from powerguard.daemon.journal import Journal, OutageRecord
from powerguard.daemon.observe import cost
from powerguard.daemon.observe.port import LastOutage, ReturnView


class _Daemon(Protocol):
    clock: Clock

    @property
    def returning(self) -> ReturnView: ...

    def wall(self) -> float: ...

    def submit(self, event: Event) -> None: ...


class Figures:
    """Gathers the figures of the outage that runs, from the notes of each step. One writer: the loop.

    The figures of an earlier run of this daemon are in its record; moments from before a restart are not, and
    measurements from them are left out, never invented.
    """

    def __init__(self, journal: Journal, host_name: str) -> None:
        """host_name: of this host, because a report is read on other hosts, too. "": unknown."""
        self.last: LastOutage | None = None
        self._journal = journal
        self._host: dict[str, Scalar] = {"host": host_name} if host_name else {}
        self._began_wall_s: float | None = None
        self._open: dict[str, Scalar] = {}
        self._at: dict[str, float] = {}
        self._meter = cost.Meter()

    def load(self, history: Sequence[OutageRecord]) -> None:
        """Take over what the journal remembers of the outage that runs and of the last one. history: newest first."""
        if history and history[0].ended_wall is None:
            self._open = dict(history[0].figures)
            self._began_wall_s = history[0].started_wall
        for record in history:
            if record.ended_wall is not None:
                self.last = LastOutage(
                    id=record.id,
                    outcome=record.outcome or "lost",
                    began_wall_s=record.started_wall,
                    ended_wall_s=record.ended_wall,
                    on_battery_s=_number(record.figures.get("on_battery_s")),
                    checkpoint_s=_number(record.figures.get("checkpoint_s")),
                    recovery_s=_number(record.figures.get("recovery_s")),
                )
                break

    def note(self, daemon: _Daemon, answer: Step) -> None:
        """Enter one step before it is written."""
        now_s = daemon.clock()
        seen = daemon.returning.seen
        gpus = 0 if seen is None else seen.gpus
        for note in answer.notes:
            values = dict(note.numbers)
            match note.event:
                case "outage_began":
                    self._open, self._at = dict(self._host), {}
                    self._began_wall_s = None
                    self._meter.begin()
                    self._journal.count("ups_transfers")
                case "host_returned":
                    self._at = {"returned": now_s}
                    self._open["returned"] = True
                case "phase_changed":
                    self._phase(values, answer.state, now_s)
                case "checkpoint_durable" if "emergency" in self._at and "checkpoint_s" not in self._open:
                    self._open["checkpoint_s"] = round(now_s - self._at["emergency"], 3)
                    self._open["checkpoint_step"] = values.get("step")
                case "outage_ended":
                    self._meter.step(self._open, answer, now_s, gpus)
                    self._ended(daemon, note, answer.state)
                    self._resumed(daemon, answer.notes, now_s)
                case _:
                    pass
        phase = answer.state.phase
        if self.outcome(answer) == "lost":
            self._journal.count("outages_lost")
            self._cost(answer.state)
        if isinstance(phase, Online):
            self._meter.online(answer.state, now_s)
        else:
            self._meter.step(self._open, answer, now_s, gpus)
        if not isinstance(phase, Online | Recovery) and "returned" not in self._open:
            self._open["on_battery_s"] = _on_battery_s(answer.state, phase.outage.since_s, now_s)

    def _phase(self, values: Mapping[str, Scalar], state: State, now_s: float) -> None:
        if values.get("new") == "emergency_checkpoint":
            self._at.setdefault("emergency", now_s)
        if values.get("new") == "shutdown" and not isinstance(state.phase, Online):
            # Of the first commit: a second one follows the return from it, and the time off is not time to decide.
            self._open.setdefault("commit_after_s", round(now_s - state.phase.outage.since_s, 3))
            self._open.setdefault("slack_at_commit_s", values.get("slack_s"))
            self._journal.count("shutdowns")
        self._open["phase"] = values.get("new")

    def _ended(self, daemon: _Daemon, note: Note, state: State) -> None:
        values = dict(note.numbers)
        outcome = str(values.get("outcome"))
        lasted_s = _number(values.get("lasted_s")) or 0.0
        now_s, now_wall_s = daemon.clock(), daemon.wall()
        if outcome in {"clean_shutdown", "dirty"}:
            # On battery as long as the daemon counted it: until the last written step of the old boot.
            if "returned" in self._at:
                self._open["recovery_s"] = round(now_s - self._at["returned"], 3)
        else:
            self._open["on_battery_s"] = _on_battery_s(state, now_s - lasted_s, now_s)
        self._open["lasted_s"] = lasted_s
        self._journal.count(f"outages_{outcome}")
        on_battery_s = _number(self._open.get("on_battery_s"))
        if on_battery_s is not None:
            self._journal.count("on_battery_seconds", on_battery_s)
        self._cost(state)
        self.last = LastOutage(
            id=str(values.get("outage")),
            outcome=outcome,
            began_wall_s=now_wall_s - lasted_s if self._began_wall_s is None else self._began_wall_s,
            ended_wall_s=now_wall_s,
            on_battery_s=on_battery_s,
            checkpoint_s=_number(self._open.get("checkpoint_s")),
            recovery_s=_number(self._open.get("recovery_s")),
        )

    def _cost(self, state: State) -> None:
        """Add what the outage cost to the lifetime counters."""
        found = self._meter.end(self._open, state)
        for name, by in () if found is None else found.counters().items():
            self._journal.count(name, by)

    def _resumed(self, daemon: _Daemon, notes: Sequence[Note], now_s: float) -> None:
        """Training was started after a return: how long that took, the wait for utility and charge included."""
        began_s = self._at.pop("returned", None)
        if began_s is not None and all(note.event != "resume_failed" for note in notes):
            daemon.submit(Measured(at_s=now_s, need="resume", seconds=now_s - began_s))

    def outcome(self, answer: Step) -> str:
        """Return how the outage ended with this step, else "". lost: it was open and is not in the state."""
        for note in answer.notes:
            if note.event == "outage_ended":
                return str(dict(note.numbers).get("outcome"))
        is_lost = isinstance(answer.state.phase, Online) and self._journal.open_outage is not None
        return "lost" if is_lost else ""

    def of_outage(self, answer: Step) -> Detail:
        """Return what has been gathered of the outage that runs or ends with this step."""
        if isinstance(answer.state.phase, Online) and not self.outcome(answer):
            return ()
        return tuple(self._open.items())


def _on_battery_s(state: State, since_s: float, now_s: float) -> float:
    """Seconds from the outage's first reading on battery until utility was stable, or until now."""
    feed = state.feed
    until_s = feed.since_s if feed.supply is Supply.UTILITY and since_s <= feed.since_s <= now_s else now_s
    return round(max(0.0, until_s - since_s), 3)


def _number(value: Scalar) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
