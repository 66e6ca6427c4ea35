"""One turn of the machine: the state so far, and the actions and notes that this event has caused.

A `Turn` exists only inside one `step`, so `step` stays a function of its arguments.
"""

from dataclasses import replace
from typing import Any

from powerguard.core.decide import conditions
from powerguard.core.energy import account, budget, own
from powerguard.core.energy.budget import Budget
from powerguard.core.model.actions import Action, Grade, Level, Note, Scalar
from powerguard.core.model.policy import Mode, Policy
from powerguard.core.model.state import (
    Emergency,
    Holding,
    Obligation,
    OnBattery,
    Online,
    Outage,
    Phase,
    Recovery,
    Shutdown,
    State,
    Step,
)


class Turn:
    """What one event does, while it is being worked out."""

    __slots__ = ("actions", "notes", "now_s", "policy", "state")

    def __init__(self, policy: Policy, state: State, now_s: float) -> None:
        """Begin a turn at now_s; time never runs backwards for the account, whatever an event claims."""
        self.policy = policy
        self.state = state
        self.now_s = max(now_s, state.battery.at_s)
        self.actions: list[Action] = []
        self.notes: list[Note] = []

    def step(self) -> Step:
        """Return what came of it."""
        return Step(self.state, tuple(self.actions), tuple(self.notes))

    def update(self, **changes: Any) -> None:  # noqa: ANN401 - the shape of dataclasses.replace
        """Change fields of the state."""
        self.state = replace(self.state, **changes)

    def owe(self, each: Obligation) -> None:
        """Enter an obligation, in place of what was known of the same one."""
        known = [(type(other), other.key) for other in self.state.owed]
        place = known.index((type(each), each.key)) if (type(each), each.key) in known else len(known)
        self.update(owed=(*self.state.owed[:place], each, *self.state.owed[place + 1 :]))

    def settle(self, each: Obligation) -> None:
        """Drop an obligation: it is confirmed, or can never be."""
        keep = tuple(o for o in self.state.owed if (type(o), o.key) != (type(each), each.key))
        self.update(owed=keep)

    def set_phase(self, phase: Phase) -> None:
        """Set the phase."""
        self.update(phase=phase)

    @property
    def outage(self) -> Outage | None:
        """The outage that is open, if any."""
        phase = self.state.phase
        return None if isinstance(phase, Online) else phase.outage

    @property
    def outage_id(self) -> str:
        """Id of the open outage, else ""."""
        return "" if self.outage is None else self.outage.id

    def set_outage(self, **changes: Any) -> None:  # noqa: ANN401 - the shape of dataclasses.replace
        """Change fields of the open outage."""
        phase = self.state.phase
        if not isinstance(phase, Online):
            self.set_phase(replace(phase, outage=replace(phase.outage, **changes)))

    def aborted_by(self, outage: Outage) -> str:
        """Return who aborted this outage's shutdown: it was noted on the way out of the old phase."""
        return outage.aborted_by if self.outage is None else self.outage.aborted_by

    def order(self, kind: type[Action], *, limit_s: float, **fields: Any) -> str:  # noqa: ANN401 - the fields of the kind
        """Order an action that must end within limit_s; return its id, which no other action ever has."""
        serial = self.state.serial + 1
        id_ = f"{self.policy.boot_id[:8]}-{max(0, int(self.now_s * 1000)):x}-{serial}"
        self.update(serial=serial)
        self.actions.append(kind(id=id_, by_s=self.now_s + limit_s, **fields))
        return id_

    def note(self, event: str, because: str, level: Level = Level.INFO, /, **numbers: Scalar) -> None:
        """Add a line to the story."""
        self.notes.append(Note(event=event, because=because, level=level, numbers=tuple(numbers.items())))

    def set_alarm(self, name: str, because: str, *, holds: bool, level: Level = Level.WARNING) -> None:
        """Log an alarm when it begins and when it ends."""
        is_raised = name in self.state.alarms
        if holds and not is_raised:
            self.update(alarms=(*self.state.alarms, name))
            self.note(f"{name}_raised", because, level)
        elif is_raised and not holds:
            self.update(alarms=tuple(other for other in self.state.alarms if other != name))
            self.note(f"{name}_cleared", because)

    def budget(self) -> Budget:
        """Return the sums of this moment, of the state as it is by now."""
        return conditions.outage_budget(self.policy, self.state, self.now_s)

    def regrade(self) -> None:
        """Choose the grade of the stop again, only downward, so that the checkpoint fits."""
        outage = self.outage
        if outage is None or isinstance(self.state.phase, Shutdown | Recovery):
            return
        now = self.budget()
        if isinstance(self.state.phase, Holding) and now.checkpoint_s <= 0.0:
            return  # No checkpoint is owed: a lower grade would only put an orderly stop off until it does not fit.
        grade = budget.grade_before_cut(self.policy, self.state.feed, now, at_most=budget.grade_left(self.policy, now))
        if grade is not outage.grade:
            self.set_outage(grade=grade, lowered=True)
            self.note(
                "grade_lowered", "the checkpoint would not fit otherwise", Level.WARNING, old=outage.grade, new=grade
            )

    def raise_grade(self) -> None:
        """Choose the grade again, upward: more is left than wrong readings had it when it was lowered."""
        outage = self.outage
        if outage is None or isinstance(self.state.phase, Shutdown | Recovery):
            return
        now = replace(self.budget(), grade=Grade.FULL)
        grade = budget.grade_before_cut(self.policy, self.state.feed, now, at_most=budget.grade_left(self.policy, now))
        grades = tuple(Grade)
        if grades.index(grade) < grades.index(outage.grade):
            self.set_outage(grade=grade, lowered=False)
            self.note(
                "grade_raised", "the battery has more left than earlier readings reported", old=outage.grade, new=grade
            )

    def grade_again(self) -> None:
        """Choose the grade in a recovery in which the power fails again: the battery has been charged, or emptied.

        Neither a checkpoint nor a pause counts: training has not started, or its first step ends the recovery.
        """
        if isinstance(self.state.phase, Recovery):
            now = self.budget()
            now = replace(now, grade=Grade.FULL, checkpoint_s=0.0, tau_paused_s=now.tau_now_s)
            self.set_outage(grade=budget.grade_left(self.policy, now))

    def restore_grade(self) -> None:
        """Take back in the hold that a checkpoint has made the stop a bare one, once none is owed.

        A hold for a bare stop lasts until no orderly one fits any more, and the host is forced off needlessly.
        """
        outage = self.outage
        if outage is None or not outage.lowered or outage.grade is not Grade.BARE:
            return
        owes = any(trainer.owes for trainer in self.state.trainers)
        if not owes and budget.power_off_at_s(self.state.feed) is None:
            self.set_outage(grade=Grade.SHORT, lowered=False)
            self.note("grade_raised", "every checkpoint is done", old=Grade.BARE, new=Grade.SHORT)

    def watch_load(self, phase: Emergency) -> None:
        """Raise an alarm if a pause does not show in the load, so that the battery drains faster than planned."""
        if phase.paused_load is None:
            return
        if self.policy.shared is not None:
            self._watch_own_load(phase)
            return
        load = account.load_of(self.state.battery)
        stays = self.load_stays_high(phase)
        high = self.now_s >= phase.settle_by_s and stays
        if not (high or self.state.alarms):
            return
        because = f"the load has fallen to {100 * load:.0f} %"
        if self.state.feed.lost_since_s is not None:
            because = "no source reports the load"
        elif stays:
            because = "training has just been asked to pause again"
        if high:
            because = f"training was paused, the load is still {100 * load:.0f} % "
            because += f"(expected {100 * phase.paused_load:.0f} %)"
        self.set_alarm("load_not_fallen", because, holds=high, level=Level.ERROR)

    def _watch_own_load(self, phase: Emergency) -> None:
        """Do the same on a UPS that is shared, by this host's own draw: what the others draw accuses no trainer."""
        fall = own.fall(self.policy, self.state, self.now_s)
        due = self.now_s >= phase.settle_by_s
        high = due and fall is not None and fall.stays_high
        because = "this host draws no more than a pause leaves" if fall is not None else "its draw is not measured"
        if high and fall is not None:
            because = f"training was paused, and this host still draws {fall.now_w:.0f} W "
            because += f"({fall.source}; expected {fall.expected_w:.0f} W)"
        self.set_alarm("load_not_fallen", because, holds=high, level=Level.ERROR)
        because = "nothing measures what this host draws: no trainer is stopped for a load that may be its neighbours'"
        unmeasured = due and fall is None
        self.set_alarm("own_load_unmeasured", because if unmeasured else "it is measured", holds=unmeasured)

    def load_stays_high(self, phase: Emergency) -> bool:
        """Say whether the load is clearly above what the pause promised; unknown while the source is lost.

        On a UPS that is shared, the load of this host alone: where nothing measures it, it does not stay high.
        """
        if self.policy.shared is not None:
            fall = own.fall(self.policy, self.state, self.now_s)
            return fall is not None and fall.stays_high
        if phase.paused_load is None or self.state.feed.lost_since_s is not None:
            return False
        return account.load_of(self.state.battery) > 1.15 * phase.paused_load + 0.02

    def count_transfer(self) -> None:
        """The feed went to battery: in a hold too, where it begins no new outage."""
        recent = tuple(at_s for at_s in self.state.transfers if self.now_s - at_s <= 3600.0)
        self.update(transfers=(*recent[-15:], self.now_s))
        self.grade_again()
        if conditions.awaits_training(self.state):
            because = "training is not started yet"
            self.note("utility_failed_again", because, Level.WARNING, **self._on_battery())

    def open_outage(self, because: str) -> None:
        """Begin the outage's story. because: the second witness."""
        self.update(guarded_since_s=None)
        self.note("outage_began", because, Level.WARNING, **self._on_battery())

    def _on_battery(self) -> dict[str, Scalar]:
        """Return the outage, the stop that fits, and the newest reading."""
        reading = self.state.feed.reading
        return {
            "outage": self.outage_id,
            "grade": None if self.outage is None else self.outage.grade,
            "source": None if reading is None else reading.source,
            "charge_pct": None if reading is None else reading.charge_pct,
            "load_pct": None if reading is None else reading.load_pct,
            "runtime_s": None if reading is None else reading.runtime_s,
        }

    def close_outage(self, old: Phase, because: str) -> None:
        """End the outage's story: one line that sums it up."""
        if isinstance(old, Online):
            return
        outcome = "ridden_through"
        if isinstance(old, Emergency) or (isinstance(old, OnBattery) and old.outage.aborted_by):
            # An abort comes when training has been asked to pause. In dry-run no trainer is asked: it never stopped.
            outcome = "ridden_through" if old.outage.mode is Mode.DRY_RUN else "resumed_in_place"
        elif isinstance(old, Shutdown):
            outcome = "rehearsed"
        elif isinstance(old, Recovery):
            outcome = "clean_shutdown" if old.clean else "dirty"
        self.note(
            "outage_ended",
            because,
            outage=old.outage.id,
            outcome=outcome,
            lasted_s=round(self.now_s - old.outage.since_s, 3),
            policy_verified=old.outage.policy_verified,
        )
