"""The outage in numbers: the figures of its record, and the counters that outlive the host's power-offs."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from powerguard.clock import Clock
from powerguard.core.energy import needs
from powerguard.core.model.actions import Conduct, Detail, Note, ResumeTraining, Scalar, TriggerCheckpoint
from powerguard.core.model.events import Event, Measured
from powerguard.core.model.policy import Mode, Policy
from powerguard.core.model.state import Online, Recovery, Shutdown, State, Step, Supply, Trainer
from powerguard.daemon.journal import Journal, OutageRecord
from powerguard.daemon.observe.port import LastOutage, ReturnView


class _Daemon(Protocol):
    clock: Clock

    @property
    def policy(self) -> Policy: ...

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
        self._on_battery = _OnBattery()
        self._owing: frozenset[str] = frozenset()
        self._meter = Meter()

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
                    on_battery_s=number(record.figures.get("on_battery_s")),
                    checkpoint_s=number(record.figures.get("checkpoint_s")),
                    recovery_s=number(record.figures.get("recovery_s")),
                )
                break

    def note(self, daemon: _Daemon, answer: Step) -> None:
        """Enter one step before it is written."""
        now_s = daemon.clock()
        seen = daemon.returning.seen
        gpus = 0 if seen is None else seen.gpus
        self._meter.powers_off = daemon.policy.powers_off
        phase = answer.state.phase
        self._add_on_battery(self._on_battery.since_last_step(answer.state, now_s))
        is_due = self._are_all_durable(answer) and _asks(answer.state)
        for note in answer.notes:
            values = dict(note.numbers)
            match note.event:
                case "outage_began":
                    self._open, self._at = dict(self._host), {}
                    self._began_wall_s = None
                    self._add_on_battery(0.0 if isinstance(phase, Online) else now_s - phase.outage.since_s)
                    self._meter.begin()
                    self._journal.count("ups_transfers")
                case "outage_continued" if answer.state.feed.supply is Supply.BATTERY:  # No daemon ran meanwhile.
                    self._add_on_battery(number(values.get("away_s")) or 0.0)
                case "host_returned":
                    if self._journal.open_outage is None:  # No daemon saw it begin.
                        self._open, self._began_wall_s = dict(self._host), None
                        self._meter.begin()
                    self._at = {"returned": now_s}
                    self._open["returned"] = True
                case "phase_changed":
                    self._phase(values, answer.state, now_s)
                case "checkpoint_durable" if is_due and "emergency" in self._at and "checkpoint_s" not in self._open:
                    self._open["checkpoint_s"] = round(now_s - self._at["emergency"], 3)
                    self._open["checkpoint_step"] = values.get("step")
                case "outage_ended":
                    self._meter.step(self._open, answer, now_s, gpus)
                    self._ended(daemon, note, answer.state)
                    self._resumed(daemon, answer.notes, now_s)
                case _:
                    pass
        if self.outcome(answer) == "lost" and (lost := self._journal.open_outage) is not None:
            self._journal.count("outages_lost")
            self._cost(answer.state)
            self.last = self._last(lost.id, "lost", lost.started_wall, daemon.wall())
        if isinstance(phase, Online):
            self._meter.online(answer.state, now_s)
        else:
            self._meter.step(self._open, answer, now_s, gpus)
        self._owing = _owing(answer.state)

    def _add_on_battery(self, seconds: float) -> None:
        """Add to the figure of the outage and to the lifetime counter: one write of the journal has both."""
        by_s = round(max(0.0, seconds), 3)
        self._open["on_battery_s"] = round((number(self._open.get("on_battery_s")) or 0.0) + by_s, 3)
        if by_s:
            self._journal.count("on_battery_seconds", by_s)

    def _are_all_durable(self, answer: Step) -> bool:
        """Say whether no trainer's checkpoint is waited for after this step.

        One that ends the outage leaves no trainer durable: those of the step before count, less those that it reports.
        """
        if not isinstance(answer.state.phase, Online):
            return not _owing(answer.state)
        durable = {dict(note.numbers).get("trainer") for note in answer.notes if note.event == "checkpoint_durable"}
        return self._owing <= durable

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
        lasted_s = number(values.get("lasted_s")) or 0.0
        now_s, now_wall_s = daemon.clock(), daemon.wall()
        if outcome in {"clean_shutdown", "dirty"} and "returned" in self._at:
            booted_s = number(self._open.get("returned_at_s"))
            self._open["recovery_s"] = round(now_s - (self._at["returned"] if booted_s is None else booted_s), 3)
        self._open["lasted_s"] = lasted_s
        self._journal.count(f"outages_{outcome}")
        self._cost(state)
        began_wall_s = now_wall_s - lasted_s if self._began_wall_s is None else self._began_wall_s
        self.last = self._last(str(values.get("outage")), outcome, began_wall_s, now_wall_s)

    def _last(self, outage: str, outcome: str, began_wall_s: float, ended_wall_s: float) -> LastOutage:
        return LastOutage(
            id=outage,
            outcome=outcome,
            began_wall_s=began_wall_s,
            ended_wall_s=ended_wall_s,
            on_battery_s=number(self._open.get("on_battery_s")),
            checkpoint_s=number(self._open.get("checkpoint_s")),
            recovery_s=number(self._open.get("recovery_s")),
        )

    def _cost(self, state: State) -> None:
        """Add what the outage cost to the lifetime counters."""
        found = self._meter.end(self._open, state)
        for name, amount in () if found is None else found.counters().items():
            self._journal.count(name, amount)

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


class _OnBattery:
    """Measures how long an outage's host was on battery, from step to step."""

    def __init__(self) -> None:
        """Know of no step before."""
        self._last_s: float | None = None  # Of the last step, if that left an outage running.
        self._was = False

    def since_last_step(self, state: State, now_s: float) -> float:
        """Return the seconds on battery since the last step of this outage. A transfer counts from its measurement."""
        last_s, was_on_battery = self._last_s, self._was
        self._last_s = None if isinstance(state.phase, Online) else now_s
        self._was = state.feed.supply is Supply.BATTERY
        if last_s is None or not (was_on_battery or self._was):
            return 0.0
        began_s = last_s if was_on_battery else max(last_s, state.feed.since_s)
        ended_s = now_s if self._was else min(now_s, state.feed.since_s)
        return max(0.0, ended_s - began_s)


def _owing(state: State) -> frozenset[str]:
    return frozenset(trainer.name for trainer in state.trainers if trainer.alive and not trainer.durable)


def _asks(state: State) -> bool:
    """Say whether a trainer hears of this outage's orders: in dry-run they are only recorded."""
    return isinstance(state.phase, Online) or state.phase.outage.mode is not Mode.DRY_RUN


def number(value: object) -> float | None:
    """Return a number, else None: true is not 1."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# --- The cost of an outage ------------------------------------------------------------------------------------
#
# Training time lost by cause, checkpoints, the durations of the return. `Meter` watches the steps of the core and
# keeps its sums among the figures of the outage's record, so they survive a restart and a power-off. `cost_of` reads
# them back; `report`, `history --sum` and the metrics have no other source.
## Trainer seconds: two trainers that stop for a minute lose two minutes. Time is counted while the trainers should have
# trained, from the outage's first reading on battery until training runs again.

CAUSES: Final[Mapping[str, str]] = {
    "rolled_back": "work since the last checkpoint, done again",
    "stopped": "the host, or a trainer, was down",
    "held": "paused with a durable checkpoint, until utility returned",
    "stalled": "paused, or held up, for a checkpoint",
    "capped": "trained slower, because GPU power was capped",
}
CHECKPOINTS: Final = ("asked", "durable", "late", "failed")
"""late: durable, but more than a tenth and a second later than expected when it was ordered."""
PHASES: Final = ("power_on_to_boot", "boot_to_ready", "ready_to_resumed", "total")
"""Of a return: firmware and kernel until the daemon runs; until training may start; until training runs; all of it."""
BOUNDS_S: Final = (15.0, 30.0, 60.0, 90.0, 120.0, 150.0, 180.0, 240.0, 300.0, 600.0, 1200.0, 3600.0)
"""Upper bounds of the buckets for returns."""

USUAL_LOOK_S: Final = 5.0
USUAL_SLEEP_S: Final = 50.0
"""The usual script: look at the UPS every 5 s; on battery trigger a checkpoint, sleep 50 s, halt."""
_USUAL_RETURN_S: Final = 180.0
_LONGER: Final = 1.1

LIFETIME: Final = (
    *(f"lost_{cause}" for cause in CAUSES),
    "lost_gpu",
    "lost_by_usual_script",
    *(f"checkpoints_{result}" for result in CHECKPOINTS),
    *(f"return_{phase}_le_{bound:g}" for phase in PHASES for bound in (*BOUNDS_S, float("inf"))),
    *(f"return_{phase}_sum" for phase in PHASES),
)
"""Names of the journal's lifetime counters that this module counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one outage, or several, cost. lost_s: trainer seconds by cause.

    gpu_s: GPU seconds lost in all; None if the number of GPUs is not known. usual_s: trainer seconds that the usual
    script would have lost. return_s: durations of each return, by phase. outages: how many; unknown: of how many more
    the journal has no cost, as they are from before it was kept, or still run.
    """

    lost_s: Mapping[str, float]
    gpu_s: float | None = None
    usual_s: float | None = None
    checkpoints: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKPOINTS, 0))
    return_s: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: dict.fromkeys(PHASES, ()))
    outages: int = 1
    unknown: int = 0

    @property
    def all_lost_s(self) -> float:
        """Trainer seconds lost by all causes."""
        return sum(self.lost_s.values())

    def counters(self) -> dict[str, float]:
        """Return what to add to the lifetime counters."""
        found = {f"lost_{cause}": seconds for cause, seconds in self.lost_s.items()}
        found |= {"lost_gpu": self.gpu_s or 0.0, "lost_by_usual_script": self.usual_s or 0.0}
        found |= {f"checkpoints_{result}": float(count) for result, count in self.checkpoints.items()}
        for phase, taken_s in self.return_s.items():
            for seconds in taken_s:
                bound = (*BOUNDS_S, float("inf"))[bisect_left(BOUNDS_S, seconds)]
                name = f"return_{phase}_le_{bound:g}"
                found[name] = found.get(name, 0.0) + 1.0
                found[f"return_{phase}_sum"] = found.get(f"return_{phase}_sum", 0.0) + seconds
        return {name: value for name, value in found.items() if value}


def cost_of(figures: Mapping[str, Scalar]) -> Cost | None:
    """Return the cost of an outage from the figures of its record; None if it was not counted."""
    trainers = number(figures.get("trainers"))
    if trainers is None:
        return None
    lost_s = {cause: round(max(0.0, number(figures.get(f"lost_{cause}_s")) or 0.0), 3) for cause in CAUSES}
    gpus = number(figures.get("gpus"))
    taken_s = {phase: number(figures.get(f"return_{phase}_s")) for phase in PHASES}
    return Cost(
        lost_s=lost_s,
        gpu_s=None if gpus is None or not trainers else round(sum(lost_s.values()) * gpus / trainers, 3),
        usual_s=number(figures.get("usual_lost_s")),
        checkpoints={result: int(number(figures.get(f"checkpoints_{result}")) or 0) for result in CHECKPOINTS},
        return_s={phase: () if seconds is None else (seconds,) for phase, seconds in taken_s.items()},
    )


def plain_cost(cost: Cost | None) -> dict[str, Any]:
    """Return it for JSON: null for what is not known. return_s: number, mean and longest of each phase."""
    known = cost is not None
    taken_s = dict.fromkeys(PHASES, ()) if cost is None else cost.return_s
    return {
        "lost_s": {cause: None if cost is None else cost.lost_s[cause] for cause in CAUSES}
        | {"all": None if cost is None else round(cost.all_lost_s, 3)},
        "lost_gpu_s": None if cost is None else cost.gpu_s,
        "usual_script_lost_s": None if cost is None else cost.usual_s,
        "checkpoints": {result: None if cost is None else cost.checkpoints[result] for result in CHECKPOINTS},
        "return_s": {
            phase: {
                "count": len(s) if known else None,
                "mean": round(sum(s) / len(s), 3) if s else None,
                "longest": max(s, default=None),
            }
            for phase, s in taken_s.items()
        },
    }


def total(costs: Iterable[Cost | None]) -> Cost:
    """Return the sum over several outages. gpu_s, usual_s: of those that have it; None if none has."""
    every = list(costs)
    known = [each for each in every if each is not None]
    gpu_s = [each.gpu_s for each in known if each.gpu_s is not None]
    usual_s = [each.usual_s for each in known if each.usual_s is not None]
    return Cost(
        lost_s={cause: round(sum(each.lost_s[cause] for each in known), 3) for cause in CAUSES},
        gpu_s=round(sum(gpu_s), 3) if gpu_s else None,
        usual_s=round(sum(usual_s), 3) if usual_s else None,
        checkpoints={result: sum(each.checkpoints[result] for each in known) for result in CHECKPOINTS},
        return_s={phase: tuple(s for each in known for s in each.return_s[phase]) for phase in PHASES},
        outages=len(known),
        unknown=len(every) - len(known),
    )


def usual_script_s(*, dark_s: float, checkpoint_s: float, at_risk_s: float, return_s: float) -> float:
    """Return the seconds that the usual script would have lost with one trainer.

    dark_s: from the loss of utility until a host that is off would be powered on. checkpoint_s: from order to durable.
    at_risk_s: work since the last checkpoint when the outage began. return_s: from power-on to training.

    It trains on while it sleeps, so that work is lost in any case. Nothing calls it back, and a host that it halts
    before the UPS cuts its output stays off until a person comes; that time is not counted, so this is a lower bound.
    """
    if dark_s <= USUAL_LOOK_S:
        return 0.0
    halted_s = USUAL_LOOK_S + USUAL_SLEEP_S
    rolled_back_s = USUAL_SLEEP_S + (0.0 if checkpoint_s <= USUAL_SLEEP_S else at_risk_s + USUAL_LOOK_S)
    return rolled_back_s + max(0.0, dark_s - halted_s) + return_s


class Meter:
    """Counts while an outage runs. One writer: the loop. figures: of the record; what is in them goes on from there."""

    def __init__(self) -> None:
        """Know nothing of the moment before. powers_off: whether a host that has committed goes down."""
        self.powers_off = True
        self._before: State | None = None
        self._at_s = 0.0
        self._per_step_s: dict[str, float] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        self._risk_s: dict[str, float] = {}
        self._ordered_s: float | None = None

    def step(self, figures: dict[str, Scalar], answer: Step, now_s: float, gpus: int) -> None:
        """Enter one step of an outage, its first and its last one among them. gpus: of this host; 0: not known."""
        before, since_s = self._before, self._at_s
        self._before, self._at_s = answer.state, now_s
        if not isinstance(answer.state.phase, Recovery):
            alive = sum(trainer.alive for trainer in answer.state.trainers)
            figures["trainers"] = max(number(figures.get("trainers")) or 0.0, float(alive))
        if gpus:
            figures["gpus"] = float(gpus)
        if before is not None and not isinstance(before.phase, Online):
            self._interval(figures, before, answer.state, now_s - since_s)
        for note in answer.notes:
            self._note(figures, before or answer.state, answer.state, note, now_s)
        for action in answer.actions:
            if isinstance(action, TriggerCheckpoint) and _asks(answer.state):
                _add(figures, "checkpoints_asked", 1.0)
            elif isinstance(action, ResumeTraining) and self._ordered_s is None and "returned_at_s" in figures:
                self._ordered_s = now_s
                _set_s(figures, "return_boot_to_ready_s", now_s - (number(figures["returned_at_s"]) or 0.0))
        self._work_at_risk(figures, answer.state, now_s)

    def online(self, state: State, now_s: float) -> None:
        """Learn how long a training step takes while there is no outage."""
        for trainer in state.trainers:
            last = self._seen.get(trainer.name)
            if trainer.step is None or not trainer.alive or trainer.paused:
                self._seen.pop(trainer.name, None)
            elif last is None or trainer.step < last[0]:
                self._seen[trainer.name] = trainer.step, now_s
            elif now_s - last[1] >= _RATE_S and trainer.step > last[0]:
                self._per_step_s[trainer.name] = (now_s - last[1]) / (trainer.step - last[0])
                self._seen[trainer.name] = trainer.step, now_s
        self._before, self._at_s = state, now_s

    def begin(self) -> None:
        """An outage begins: the figures are new."""
        self._risk_s, self._ordered_s, self._before = {}, None, None

    def _interval(self, figures: dict[str, Scalar], before: State, now: State, took_s: float) -> None:
        """Give the time since the last step to its cause, for each trainer."""
        if isinstance(before.phase, Recovery):
            # None where the record of an outage that goes on could not be read.
            _add(figures, "lost_stopped_s", took_s * (number(figures.get("trainers")) or 0.0))
            return
        ended = isinstance(before.phase, Shutdown) and self.powers_off
        for trainer in before.trainers:
            after = next((each for each in now.trainers if each.name == trainer.name), trainer)
            if not trainer.alive:
                if trainer.name in self._risk_s or ended:
                    _add(figures, "lost_stopped_s", took_s)
            elif trainer.stood or (trainer.paused and not trainer.pause_ordered):
                pass  # A person paused it.
            elif trainer.paused or _waits(trainer, after):
                _add(figures, "lost_held_s" if trainer.durable and not ended else _PAUSED[ended], took_s)
            elif before.cap is not None and before is not now and trainer.step is not None and after.step is not None:
                per_step_s = self._per_step_s.get(trainer.name, trainer.step_s)
                if per_step_s > 0.0:
                    _add(figures, "lost_capped_s", took_s - (after.step - trainer.step) * per_step_s)
            if trainer.alive and not after.alive and not ended and trainer.name in self._risk_s:
                _add(figures, "lost_rolled_back_s", self._risk_s[trainer.name])
                self._risk_s[trainer.name] = 0.0

    def _note(self, figures: dict[str, Scalar], before: State, now: State, note: Note, now_s: float) -> None:
        numbers = dict(note.numbers)
        match note.event:
            case "host_returned":
                self._returned(figures, now, numbers, now_s)
            case "outage_continued":  # What went on while no daemon ran is what it went on with.
                self._interval(figures, now, now, number(numbers.get("away_s")) or 0.0)
            case "host_powered_on" if "return_power_on_to_boot_s" in figures:
                _add(figures, "return_power_on_to_boot_s", number(numbers.get("firmware_s")) or 0.0)
            case "checkpoint_durable" if _asks(now):
                self._durable(figures, before, numbers)
            case "action_failed" if numbers.get("action") == "TriggerCheckpoint":
                _add(figures, "checkpoints_failed", 1.0)
            case "outage_ended" if self._ordered_s is not None:
                _set_s(figures, "return_ready_to_resumed_s", now_s - self._ordered_s)
                booted_s = number(figures.get("return_power_on_to_boot_s")) or 0.0
                _set_s(figures, "return_total_s", booted_s + now_s - (number(figures["returned_at_s"]) or 0.0))
            case _:
                pass

    def _returned(self, figures: dict[str, Scalar], now: State, numbers: Mapping[str, Scalar], now_s: float) -> None:
        """The host is back: what it had not saved is done again, and it was down all the while."""
        outage = None if isinstance(now.phase, Online) else now.phase.outage
        away_s, booted_s = number(numbers.get("away_s")) or 0.0, now_s
        for name in ("trainers", "at_risk_s"):  # Of a stop that nobody saw coming, the core has counted them.
            if numbers.get(name) is not None:
                figures[name] = numbers[name]
        if numbers.get("trainers") is not None and outage is not None:
            # Its outage began with the stop, and goes on since this boot: until it was known what it was, perhaps.
            away_s, booted_s = max(0.0, now_s - outage.since_s), max((*outage.boots, 0.0))
        trainers = number(figures.get("trainers")) or 0.0
        _add(figures, "lost_rolled_back_s", number(figures.pop("at_risk_s", None)) or 0.0)
        _add(figures, "lost_stopped_s", trainers * away_s)
        if outage is not None:
            # CLOCK_BOOTTIME began with this boot's kernel.
            _set_s(figures, "dark_s", max(0.0, -outage.since_s))
        _set_s(figures, "returned_at_s", booted_s)
        _set_s(figures, "return_power_on_to_boot_s", booted_s + (number(numbers.get("firmware_s")) or 0.0))
        self._ordered_s, self._risk_s = None, {}

    def _durable(self, figures: dict[str, Scalar], before: State, numbers: Mapping[str, Scalar]) -> None:
        _add(figures, "checkpoints_durable", 1.0)
        trainer = next((each for each in before.trainers if each.name == numbers.get("trainer")), None)
        if trainer is None:
            return
        if (number(numbers.get("took_s")) or 0.0) > _LONGER * trainer.checkpoint_s + 1.0:
            _add(figures, "checkpoints_late", 1.0)
        if not trainer.paused:
            _add(figures, "lost_stalled_s", trainer.stall_s or 0.0)

    def _work_at_risk(self, figures: dict[str, Scalar], state: State, now_s: float) -> None:
        """Keep what would be lost if the host went down now, for the boot that finds out."""
        if isinstance(state.phase, Online | Recovery):
            return
        for trainer in state.trainers:
            if trainer.alive:
                self._risk_s[trainer.name] = self._behind_s(trainer, now_s)
        at_risk_s = round(sum(self._risk_s.values()), 3)
        figures.setdefault("at_risk_at_start_s", at_risk_s)
        figures["at_risk_s"] = at_risk_s

    def _behind_s(self, trainer: Trainer, now_s: float) -> float:
        """Work of a trainer since its newest durable checkpoint; 0 where it is not known."""
        if trainer.durable and trainer.conduct is not Conduct.CONTINUE:
            return 0.0
        per_step_s = self._per_step_s.get(trainer.name, trainer.step_s)
        if trainer.step is not None and trainer.durable_step is not None and per_step_s > 0.0:
            return max(0, trainer.step - trainer.durable_step) * per_step_s
        if trainer.paused:
            return self._risk_s.get(trainer.name, 0.0)
        return 0.0 if trainer.durable_at_s is None else max(0.0, now_s - trainer.durable_at_s)

    def end(self, figures: dict[str, Scalar], state: State) -> Cost | None:
        """Close the sums of an outage that has ended, and return them."""
        trainers = number(figures.get("trainers")) or 0.0
        learned = state.learned
        back_s = sum(
            needs.median(known) for cost_of in ("boot", "resume") if (known := needs.samples(learned, cost_of))
        )
        dark_s = number(figures.get("dark_s"))
        checkpoints_s = [each.checkpoint_s for each in state.trainers]
        usual_s = usual_script_s(
            dark_s=(number(figures.get("on_battery_s")) or 0.0) if dark_s is None else dark_s,
            checkpoint_s=number(figures.get("checkpoint_s")) or max(checkpoints_s, default=0.0),
            at_risk_s=(number(figures.get("at_risk_at_start_s")) or 0.0) / max(1.0, trainers),
            return_s=number(figures.get("return_total_s")) or back_s or _USUAL_RETURN_S,
        )
        figures["usual_lost_s"] = round(trainers * usual_s, 3)
        for name in ("at_risk_s", "at_risk_at_start_s", "returned_at_s"):
            figures.pop(name, None)
        return cost_of(figures)


_RATE_S: Final = 30.0
_PAUSED: Final = {False: "lost_stalled_s", True: "lost_stopped_s"}


def _waits(trainer: Trainer, after: Trainer) -> bool:
    """Whether a trainer stands for the checkpoint that it is to pause at; it says so only when that is durable."""
    steps = trainer.step is not None and after.step is not None and after.step > trainer.step
    return trainer.pause_ordered and trainer.in_flight is not None and not steps


def _add(figures: dict[str, Scalar], name: str, amount: float) -> None:
    figures[name] = round((number(figures.get(name)) or 0.0) + amount, 3)


def _set_s(figures: dict[str, Scalar], name: str, seconds: float) -> None:
    figures[name] = round(seconds, 3)
