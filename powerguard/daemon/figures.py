"""The outage in numbers: what its record holds in the end, and the counters that outlive the host's power-offs."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from powerguard.clock import Clock
from powerguard.core.model import Detail, Note, Online, Scalar, Step
from powerguard.daemon.journal import Journal, OutageRecord
from powerguard.daemon.port import LastOutage


class _Daemon(Protocol):
    clock: Clock

    def wall(self) -> float: ...


class Figures:
    """Gathers the figures of the outage that runs, from the notes of each step. One writer: the loop."""

    def __init__(self, journal: Journal) -> None:
        self.last: LastOutage | None = None
        self._journal = journal
        self._began_wall_s = 0.0
        self._open: dict[str, Scalar] = {}
        self._at: dict[str, float] = {}

    def load(self, history: Sequence[OutageRecord]) -> None:
        """Take over what the journal remembers of the last outage."""
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
        for note in answer.notes:
            values = dict(note.numbers)
            match note.event:
                case "outage_began":
                    self._open, self._at = {}, {"began": now_s}
                    self._began_wall_s = daemon.wall()
                    self._journal.count("ups_transfers")
                case "host_returned":
                    self._open, self._at = {}, {"returned": now_s}
                case "phase_changed":
                    self._phase(values, now_s)
                case "checkpoint_durable" if "emergency" in self._at and "checkpoint_s" not in self._open:
                    self._open["checkpoint_s"] = round(now_s - self._at["emergency"], 3)
                    self._open["checkpoint_step"] = values.get("step")
                case "outage_ended":
                    self._ended(daemon, note, now_s)
                case _:
                    pass

    def _phase(self, values: Mapping[str, Scalar], now_s: float) -> None:
        if values.get("new") == "emergency_checkpoint":
            self._at.setdefault("emergency", now_s)
        if values.get("new") == "shutdown":
            self._open["commit_after_s"] = round(now_s - self._at.get("began", now_s), 3)
            self._open["slack_at_commit_s"] = values.get("slack_s")
            self._journal.count("shutdowns")
        self._open["phase"] = values.get("new")

    def _ended(self, daemon: _Daemon, note: Note, now_s: float) -> None:
        values = dict(note.numbers)
        outcome = str(values.get("outcome"))
        lasted_s = _number(values.get("lasted_s"))
        ended_wall_s = daemon.wall()
        if "returned" in self._at:
            self._open["recovery_s"] = round(now_s - self._at["returned"], 3)
        else:
            self._open["on_battery_s"] = lasted_s
        self._open["lasted_s"] = lasted_s
        self._journal.count(f"outages_{outcome}")
        if lasted_s is not None and "returned" not in self._at:
            self._journal.count("on_battery_seconds", lasted_s)
        self.last = LastOutage(
            id=str(values.get("outage")),
            outcome=outcome,
            began_wall_s=ended_wall_s - (lasted_s or 0.0),
            ended_wall_s=ended_wall_s,
            on_battery_s=_number(self._open.get("on_battery_s")),
            checkpoint_s=_number(self._open.get("checkpoint_s")),
            recovery_s=_number(self._open.get("recovery_s")),
        )

    def outcome(self, answer: Step) -> str:
        """Return how the outage ended with this step, else ""."""
        for note in answer.notes:
            if note.event == "outage_ended":
                return str(dict(note.numbers).get("outcome"))
        return ""

    def of_outage(self, answer: Step) -> Detail:
        """Return what has been gathered of the outage that runs or ends with this step."""
        if isinstance(answer.state.phase, Online) and not self.outcome(answer):
            return ()
        return tuple(self._open.items())


def _number(value: Scalar) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
