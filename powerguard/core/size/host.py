"""Is this battery large enough? The capacity check of a site, by the same sums that decide in an outage.

A `Site` is put into the state that an outage would begin in (full battery, no energy used), and `budget` and
`conditions.forecast` answer when the emergency checkpoint begins, when holding begins, and when the commit is. What
would make a site fit is found by trying: a fix is only proposed when the same sums say that with it a full stop fits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from powerguard.core.decide import conditions
from powerguard.core.energy import account, budget
from powerguard.core.energy.budget import Budget
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Battery, Feed, State, Supply, Trainer

LEAST_RESERVE_S = 20.0
"""Smallest reserve that is proposed; a smaller one would be a gamble."""
MOST_BATTERY = 20.0
"""Largest battery that is proposed, in multiples of today's."""
_LEAST_LOAD = 0.05
_LEAST_CHECKPOINT_S = 1.0
_LEAST_STOP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is to be checked. policy: with a runtime table; its health and stop terms count, its trainers do not.

    load, load_paused: shares of the rating, training and paused. checkpoint_s: order to durable, of all trainers.
    """

    policy: Policy
    load: float
    load_paused: float
    checkpoint_s: float


class Verdict(StrEnum):
    """full, short, bare: the most orderly stop that fits. none: not even a checkpoint and a bare stop do.

    overload: the load is more than the UPS can carry, so the other results do not apply.
    """

    FULL = "full"
    SHORT = "short"
    BARE = "bare"
    NONE = "none"
    OVERLOAD = "overload"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeFit:
    """Whether one grade of stop fits on a full battery. spare_s: below 0 it is short by so much."""

    grade: Grade
    stop_s: float
    need_s: float
    spare_s: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseStage:
    """One stretch of the outage. left, left_after: energy at its begin and end, a share of a full new battery."""

    name: str
    begins_s: float
    lasts_s: float
    load: float
    left: float
    left_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a long outage would go, in seconds since utility failed.

    training_s: for how long training runs on battery. durable: False where the commit comes before the checkpoint is.
    """

    training_s: float
    durable_s: float
    commit_s: float
    durable: bool
    stages: tuple[CourseStage, ...]


class Lever(StrEnum):
    """What could be changed. Each has its own unit: see `Fix`."""

    CHECKPOINT = "checkpoint"
    LOAD = "load"
    PAUSED_LOAD = "paused_load"
    BATTERY = "battery"
    HEALTH = "health"
    RESERVE = "reserve"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One change that alone makes a full stop fit, rounded to the safe side.

    value: what it must be: seconds (checkpoint, reserve, stop), a share of the rating (load, paused_load), times the
    energy of today's battery (battery), a share of a new battery (health). now: what it is, same unit.
    """

    lever: Lever
    value: float
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The whole answer. course: None without a runtime table. fixes: empty if it fits or no single change helps."""

    site: Site
    budget: Budget
    verdict: Verdict
    grades: tuple[GradeFit, ...]
    course: Course | None
    fixes: tuple[Fix, ...]


def size(site: Site) -> Size:
    """Check one site. Total for every policy that the settings allow."""
    now = budget.compute(*_outage(site), 0.0)
    grades = tuple(_grade(site, now, grade) for grade in Grade)
    verdict = _verdict(site, grades)
    return Size(
        site=site,
        budget=now,
        verdict=verdict,
        grades=grades,
        course=_course(site) if site.policy.runtime_table else None,
        fixes=() if verdict is Verdict.FULL or not site.policy.runtime_table else _fixes(site),
    )


def state_at(site: Site, at_s: float) -> State:
    """Return the state that an outage of this site is in at `at_s`, if no action was taken until then."""
    policy, battery, feed, trainers = _outage(site)
    return State(battery=account.advance(policy, battery, at_s, draining=True), feed=feed, trainers=trainers)


def policy_of(site: Site) -> Policy:
    """Return the policy with the site's paused load in it, which is of the whole UPS, also where others share it."""
    policy = site.policy
    return replace(
        policy,
        paused_load_share=min(1.0, site.load_paused / site.load),
        paused_is_set=True,
        shared=None,
        shed=None if policy.shed is None else replace(policy.shed, extra_s=budget.shed_s(policy)),
    )


def _outage(site: Site) -> tuple[Policy, Battery, Feed, tuple[Trainer, ...]]:
    """Utility has just failed: a full battery of the presumed health, and one trainer that pauses."""
    health = site.policy.health
    return (
        policy_of(site),
        Battery(at_s=0.0, used=0.0, left=health, load=site.load, health=health),
        Feed(supply=Supply.BATTERY, since_s=0.0),
        (Trainer(name="training", conduct=Conduct.PAUSE, checkpoint_s=site.checkpoint_s),),
    )


def _grade(site: Site, now: Budget, grade: Grade) -> GradeFit:
    policy, tau_paused_s = site.policy, now.tau_paused_s or 0.0
    stop_s = budget.stop_s(policy, grade)
    need_s = site.checkpoint_s + stop_s
    health = policy.health
    return GradeFit(
        grade=grade,
        stop_s=stop_s,
        need_s=need_s,
        spare_s=0.75 * budget.usable(policy, health) * tau_paused_s - need_s,
        fits=budget.fits(policy, left=health, tau_paused_s=tau_paused_s, checkpoint=site.checkpoint_s, grade=grade),
    )


def _verdict(site: Site, grades: tuple[GradeFit, ...]) -> Verdict:
    if site.load > 1.0:
        return Verdict.OVERLOAD
    return next((Verdict(each.grade.value) for each in grades if each.fits), Verdict.NONE)


# --- How it would go -------------------------------------------------------------------------------------------------


def _course(site: Site) -> Course:
    policy = policy_of(site)
    state = state_at(site, 0.0)
    now = conditions.outage_budget(policy, state, 0.0)
    training_s = conditions.forecast(policy, state, now)[0].at_s or 0.0
    paused = state_at(site, training_s)
    then = conditions.outage_budget(policy, paused, training_s)
    steps = conditions.forecast(policy, paused, then)
    durable_s = training_s + then.checkpoint_s
    commit_s = next((step.at_s for step in steps if step.action == "shutdown" and step.at_s is not None), 0.0)
    return Course(
        training_s=training_s,
        durable_s=durable_s,
        commit_s=commit_s,
        durable=durable_s <= commit_s,
        stages=_stages(site, then, training_s=training_s, durable_s=durable_s, commit_s=commit_s),
    )


def _stages(
    site: Site, then: Budget, *, training_s: float, durable_s: float, commit_s: float
) -> tuple[CourseStage, ...]:
    """Lay the stretches end to end until the battery would be empty; those of no length are left out."""
    policy, grade = site.policy, then.grade
    tau_now_s, tau_paused_s = then.tau_now_s or math.inf, then.tau_paused_s or math.inf
    off_s = budget.stop_s(policy, grade, reserve_s=0.0)
    stretches = [
        ("training", training_s, site.load, tau_now_s),
        ("checkpoint", min(durable_s, commit_s) - training_s, site.load_paused, tau_paused_s),
        ("holding", max(0.0, commit_s - durable_s), site.load_paused, tau_paused_s),
        ("stop", off_s, site.load_paused, tau_paused_s),
        ("reserve", then.stop_s - off_s, site.load_paused, tau_paused_s),
        ("margin", math.inf, site.load_paused, tau_paused_s),
    ]
    stages: list[CourseStage] = []
    at_s, left = 0.0, policy.health
    for name, wanted_s, load, tau_s in stretches:
        lasts_s = min(wanted_s, left * tau_s)
        if lasts_s <= 1e-9:
            continue
        after = max(0.0, left - lasts_s / tau_s)
        stages.append(CourseStage(name=name, begins_s=at_s, lasts_s=lasts_s, load=load, left=left, left_after=after))
        at_s, left = at_s + lasts_s, after
    return tuple(stages)


# --- What would fix it -----------------------------------------------------------------------------------------------


def works(site: Site) -> bool:
    """Say whether a full stop fits."""
    now = budget.compute(*_outage(site), 0.0)
    return _verdict(site, tuple(_grade(site, now, grade) for grade in Grade)) is Verdict.FULL


def changed(site: Site, lever: Lever, value: float) -> Site:
    """Return the site with one thing changed, in the unit of `Fix.value`."""
    policy = site.policy
    match lever:
        case Lever.CHECKPOINT:
            return replace(site, checkpoint_s=value)
        case Lever.LOAD:
            return replace(site, load=value, load_paused=site.load_paused * value / site.load)
        case Lever.PAUSED_LOAD:
            return replace(site, load_paused=value)
        case Lever.BATTERY:
            # Twice the battery at half the rate each lasts more than twice as long: proportion is the cautious side.
            longer = tuple((load, tau_s * value) for load, tau_s in policy.runtime_table)
            return replace(site, policy=replace(policy, runtime_table=longer))
        case Lever.HEALTH:
            return replace(site, policy=replace(policy, health=value))
        case Lever.RESERVE:
            return replace(site, policy=replace(policy, reserve_s=value))
        case Lever.STOP:
            return replace(
                site, policy=replace(policy, stop_q95_s=value, stop_median_s=min(value, policy.stop_median_s))
            )


def _fixes(site: Site) -> tuple[Fix, ...]:
    policy = site.policy
    stop_s = min(policy.stop_q95_s, policy.force_after_s)
    # Lever, what it is now, how far it may go, and the grain it is rounded to.
    levers = (
        (Lever.CHECKPOINT, site.checkpoint_s, _LEAST_CHECKPOINT_S, 0.1),
        (Lever.LOAD, site.load, _LEAST_LOAD, 0.001),
        (Lever.PAUSED_LOAD, site.load_paused, _LEAST_LOAD, 0.001),
        (Lever.BATTERY, 1.0, MOST_BATTERY, 0.01),
        (Lever.HEALTH, policy.health, 1.0, 0.01),
        (Lever.RESERVE, policy.reserve_s, LEAST_RESERVE_S, 1.0),
        (Lever.STOP, stop_s, _LEAST_STOP_S, 1.0),
    )
    found = (_fix(site, lever, now, limit, grain) for lever, now, limit, grain in levers)
    return tuple(fix for fix in found if fix is not None)


def _fix(site: Site, lever: Lever, now: float, limit: float, grain: float) -> Fix | None:
    """Find the least change that is enough; None where even the limit is not."""
    if (limit - now) * (1.0 if lever in (Lever.BATTERY, Lever.HEALTH) else -1.0) <= 0.0:
        return None

    def enough(value: float) -> bool:
        return works(changed(site, lever, value))

    if not enough(limit):
        return None
    value = _nearest(enough, now, limit)
    # Rounded away from the present value and tried again, so that the proposed value is exactly the tried one.
    whole = math.ceil(value / grain) if limit > now else math.floor(value / grain)
    rounded = round(whole * grain, 6)
    if not enough(rounded):
        rounded = round((whole + (1 if limit > now else -1)) * grain, 6)
    return Fix(lever=lever, value=rounded, now=now)


def _nearest(enough: Callable[[float], bool], no: float, yes: float) -> float:
    """Halve the way between what is not enough and what is."""
    for _ in range(60):
        middle = 0.5 * (no + yes)
        if enough(middle):
            yes = middle
        else:
            no = middle
    return yes
