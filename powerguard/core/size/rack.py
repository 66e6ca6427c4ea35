"""Does a battery carry all hosts that share it? Which tier pauses, holds and powers off when, on one time axis.

Every host decides as its daemon does (`conditions`): by the UPS's load of the moment and its own needs, and without a
forecast of what the other hosts do. Here all hosts are known, so the outage is followed from one change of the load to
the next.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from powerguard.core.decide import conditions
from powerguard.core.energy import account, budget
from powerguard.core.energy.budget import Budget
from powerguard.core.energy.own import Own
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.events import OwnSource
from powerguard.core.model.policy import Policy, Shared, Shed
from powerguard.core.model.state import (
    Activity,
    Battery,
    CheckpointInFlight,
    Durable,
    EmergencyCheckpoint,
    Feed,
    Holding,
    OnBattery,
    Outage,
    Phase,
    State,
    Supply,
    Trainer,
)
from powerguard.core.size.host import MOST_BATTERY, Verdict

_HALVINGS, _GRAIN = 40, 0.01
_POLL_S = 2.0
"""Hosts whose decisions come within one poll of each other decide by the same reading, before any load has fallen."""
_FEED = Feed(supply=Supply.BATTERY, since_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Hosts of one tier that are alike. load, load_paused: of one of them, as shares of the UPS's rating.

    checkpoint_s: order to durable. stop_s: how long the host takes to stop; None: as the policy says.
    """

    tier: int
    count: int
    load: float
    load_paused: float
    checkpoint_s: float
    stop_s: float | None = None


class Stage(StrEnum):
    """What the hosts of a group do."""

    TRAINING = "training"
    CHECKPOINT = "checkpoint"
    HOLDING = "holding"
    STOP = "stop"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCourse:
    """How a long outage goes for one group, in seconds since utility failed. None: the battery was empty before.

    shed_s: by how much earlier than its own needs ask for it makes room. grade: of its stop. verdict: the grade, or
    NONE where its checkpoint is not durable at the power-off, or where the battery is empty before it is off.
    """

    group: Group
    shed_s: float
    grade: Grade
    verdict: Verdict
    pause_s: float | None
    durable_s: float | None
    commit_s: float | None
    off_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A change of the load. load: of the UPS from then on; left: energy, as a share of a full new battery."""

    at_s: float
    stage: Stage
    group: Group
    load: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RackCourse:
    """The whole answer. empty_s: when the battery is empty under load; None: all hosts are off before that.

    battery_times: the least multiple of the battery that carries every tier in full; None where it does so already,
    or where none does.
    """

    groups: tuple[GroupCourse, ...]
    moments: tuple[Moment, ...]
    load: float
    empty_s: float | None
    verdict: Verdict
    battery_times: float | None


def course(policy: Policy, groups: Sequence[Group]) -> RackCourse:
    """Follow one long outage with a full battery. policy: with a runtime table; it holds for every host."""
    found = _course(policy, groups)
    if found.verdict in (Verdict.FULL, Verdict.OVERLOAD):
        return found
    return replace(found, battery_times=_enough(policy, groups))


def _enough(policy: Policy, groups: Sequence[Group]) -> float | None:
    def carries(times: float) -> bool:
        # Twice the battery at half the rate each lasts more than twice as long: proportion is the cautious side.
        longer = tuple((load, tau_s * times) for load, tau_s in policy.runtime_table)
        return _course(replace(policy, runtime_table=longer), groups).verdict is Verdict.FULL

    if not carries(MOST_BATTERY):
        return None
    no, yes = 1.0, MOST_BATTERY
    while yes - no > 0.5 * _GRAIN:
        middle = 0.5 * (no + yes)
        no, yes = (no, middle) if carries(middle) else (middle, yes)
    return math.ceil(yes / _GRAIN) * _GRAIN


@dataclass(slots=True, kw_only=True)
class _Member:
    """One group, while the outage is followed."""

    group: Group
    policy: Policy
    grade: Grade = Grade.FULL
    stage: Stage = Stage.TRAINING
    at_s: dict[Stage, float] = field(default_factory=dict)

    @property
    def load(self) -> float:
        match self.stage:
            case Stage.TRAINING:
                return self.group.count * self.group.load
            case Stage.OFF:
                return 0.0
            case _:
                return self.group.count * self.group.load_paused

    @property
    def is_durable(self) -> bool:
        return Stage.HOLDING in self.at_s

    def plan(self, battery: Battery, grade: Grade | None) -> Budget:
        """Return the sums that a host of the group has at the battery's moment."""
        own = Own(load=self.load / self.group.count, watts=None, source=OwnSource.BMC, at_s=battery.at_s)
        return budget.compute(self.policy, battery, _FEED, (self._trainer(),), battery.at_s, grade=grade, own=own)

    def _trainer(self) -> Trainer:
        paused_s = self.at_s.get(Stage.CHECKPOINT)
        known = Trainer(name="training", conduct=Conduct.PAUSE, checkpoint_s=self.group.checkpoint_s)
        if paused_s is None:
            return known
        in_flight = CheckpointInFlight(order="checkpoint", eta_at_s=paused_s + self.group.checkpoint_s)
        paused = replace(known, activity=Activity.PAUSED, pause_ordered=True, ordered_at_s=paused_s)
        if self.is_durable:
            return replace(paused, checkpoint=Durable())
        return replace(paused, in_flight=in_flight)

    def _state(self, battery: Battery) -> State:
        outage = Outage(id="size", since_s=0.0, grade=self.grade)
        phase: Phase = OnBattery(outage=outage)
        if self.stage is Stage.CHECKPOINT:
            phase = EmergencyCheckpoint(outage=outage, began_s=self.at_s[Stage.CHECKPOINT], because="budget")
        elif self.stage is Stage.HOLDING:
            phase = Holding(outage=outage, began_s=self.at_s[Stage.HOLDING])
        return State(phase=phase, feed=_FEED, battery=battery, trainers=(self._trainer(),))

    def is_due(self, battery: Battery) -> bool:
        """Say whether training pauses, or the host powers off, with the battery as it is."""
        plan, state = self.plan(battery, self.grade), self._state(battery)
        if self.stage is Stage.TRAINING:
            return bool(conditions.checkpoint_due(self.policy, state, plan, battery.at_s))
        if self.stage is Stage.CHECKPOINT:  # as the daemon does: a less orderly stop leaves the checkpoint its time
            plan = self.plan(battery, budget.grade_left(self.policy, plan))
        return bool(conditions.commit_due(self.policy, state, plan, battery.at_s))

    def next(self, battery: Battery, empty_s: float) -> tuple[float, Stage]:
        """Return what it does next if the load stays as it is, and when."""
        if self.stage is Stage.OFF:
            return math.inf, Stage.OFF
        if self.stage is Stage.STOP:
            return self.at_s[Stage.STOP] + budget.force_after_s(self.policy, self.grade), Stage.OFF

        def is_due(at_s: float) -> bool:
            return self.is_due(account.advance(self.policy, battery, at_s, draining=True))

        due_s = _first(is_due, battery.at_s, empty_s)
        if self.stage is Stage.TRAINING:
            return due_s, Stage.CHECKPOINT
        if self.stage is Stage.CHECKPOINT:
            durable_s = self.at_s[Stage.CHECKPOINT] + self.group.checkpoint_s
            if durable_s <= due_s:
                return durable_s, Stage.HOLDING
        return due_s, Stage.STOP

    def move(self, stage: Stage, battery: Battery) -> None:
        """Go on to this stage."""
        if stage is Stage.STOP and not self.is_durable:
            self.grade = budget.grade_left(self.policy, self.plan(battery, self.grade))
        self.stage = stage
        self.at_s[stage] = battery.at_s

    def group_course(self, empty_s: float) -> GroupCourse:
        """Return how it went. empty_s: when the battery was empty, infinity if it was not."""
        at_s = {stage: at_s for stage, at_s in self.at_s.items() if at_s < empty_s}
        is_safe = self.is_durable and Stage.OFF in at_s
        return GroupCourse(
            group=self.group,
            shed_s=budget.shed_s(self.policy),
            grade=self.grade,
            verdict=Verdict(self.grade.value) if is_safe else Verdict.NONE,
            pause_s=at_s.get(Stage.CHECKPOINT),
            durable_s=at_s.get(Stage.HOLDING),
            commit_s=at_s.get(Stage.STOP),
            off_s=at_s.get(Stage.OFF),
        )


def _first(is_due: Callable[[float], bool], from_s: float, to_s: float) -> float:
    """Return the first moment at which it is due, at the latest to_s; infinity if it is not due by then."""
    if is_due(from_s):
        return from_s
    if not is_due(to_s):
        return math.inf
    no, yes = from_s, to_s
    for _ in range(_HALVINGS):
        middle = 0.5 * (no + yes)
        no, yes = (no, middle) if is_due(middle) else (middle, yes)
    return yes


def _members(policy: Policy, groups: Sequence[Group]) -> list[_Member]:
    highest = max(group.tier for group in groups)
    own_s = min(policy.stop_q95_s, policy.force_after_s)
    stops_s = [own_s if group.stop_s is None else group.stop_s for group in groups]
    set_s = None if policy.shared is None else policy.shared.longest_stop_s
    shared = Shared(hosts=sum(group.count for group in groups), longest_stop_s=max(stops_s) if set_s is None else set_s)
    members = []
    for group, stop_s in zip(groups, stops_s, strict=True):
        own = replace(
            policy,
            shared=shared,
            shed=Shed(tier=group.tier, highest=highest),
            paused_load_share=min(1.0, group.load_paused / group.load),
            paused_is_set=True,
        )
        if group.stop_s is not None:
            own = replace(own, stop_q95_s=stop_s, force_after_s=stop_s, stop_median_s=min(stop_s, own.stop_median_s))
        members.append(_Member(group=group, policy=own))
    return members


def _course(policy: Policy, groups: Sequence[Group]) -> RackCourse:
    members = _members(policy, groups)
    load = sum(member.load for member in members)
    battery = Battery(at_s=0.0, used=0.0, left=policy.health, load=load, health=policy.health)
    if load > 1.0:
        courses = tuple(replace(member.group_course(math.inf), verdict=Verdict.OVERLOAD) for member in members)
        return RackCourse(
            groups=courses, moments=(), load=load, empty_s=None, verdict=Verdict.OVERLOAD, battery_times=None
        )
    for member in members:
        member.grade = member.plan(battery, None).grade
    moments: list[Moment] = []
    empty_s = math.inf
    while any(member.stage is not Stage.OFF for member in members):
        empty_s = battery.at_s + (battery.left or 0.0) * account.tau_s(policy.runtime_table, account.load_of(battery))
        coming = [member.next(battery, empty_s) for member in members]
        at_s = min(at_s for at_s, _ in coming)
        if at_s >= empty_s:
            break
        battery = account.advance(policy, battery, at_s, draining=True)
        due = [
            (member, stage)
            for member, (due_s, stage) in zip(members, coming, strict=True)
            if due_s <= at_s + (_POLL_S if stage in (Stage.CHECKPOINT, Stage.STOP) else 0.0)
        ]
        for member, stage in due:
            member.move(stage, battery)
        battery = replace(battery, load=sum(member.load for member in members))
        moments += [
            Moment(at_s=at_s, stage=stage, group=member.group, load=battery.load or 0.0, left=battery.left or 0.0)
            for member, stage in due
        ]
        empty_s = math.inf
    group_courses = tuple(member.group_course(empty_s) for member in members)
    order = (Verdict.FULL, Verdict.SHORT, Verdict.BARE, Verdict.NONE)
    return RackCourse(
        groups=group_courses,
        moments=tuple(moments),
        load=load,
        empty_s=None if math.isinf(empty_s) else empty_s,
        verdict=max((each.verdict for each in group_courses), key=order.index),
        battery_times=None,
    )
