"""The budget: the energy left in the battery (`account`) against the seconds that are still needed.

    m       = min((1 - margin) e, e - floor)
    Reff(x) = m tau(x)

e: the energy left, as a share of a full new battery; tau(x): seconds that such a battery lasts at load x. Of the
seconds at the load of a paused host, checkpoint and stop must fit three quarters.
"""

from collections.abc import Callable
from dataclasses import dataclass

from powerguard.core.energy import learning, needs
from powerguard.core.energy.account import LOAD_FLOOR, advance, load_of, reported_load, table, tau_s
from powerguard.core.energy.own import Own
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.events import Reading
from powerguard.core.model.policy import Learned, Policy
from powerguard.core.model.state import Battery, Feed, Supply, Trainer

CUT_GUARD_S = 30.0
"""The forced power-off lies at least this long before a UPS cuts its output by its own countdown."""
_SHORT_RESERVE_S, _BARE_FORCE_S = 20.0, 3.0


def usable(policy: Policy, left: float) -> float:
    """Return m: what of the energy left we dare to plan with, as a share of a full new battery."""
    least = min((1.0 - policy.margin) * left, left - policy.floor)
    return max(0.0, least)


def energy_for(policy: Policy, needed: float) -> float:
    """Return the energy left at which `usable` is just `needed`: the inverse of `usable`."""
    return max(needed / (1.0 - policy.margin), needed + policy.floor)


def outlasts(policy: Policy, battery: Battery, denial: Reading, on_battery_s: float, stop_s: float) -> bool:
    """Say whether the battery still lasts for stop_s, by figures that the source that reports battery cannot forge.

    That is the charge that another source reports (denial), or our own account, less what this time on battery can have
    taken: by our account, and at the most at a full load. Without a table there is no figure, and the commit is not
        held back.
    """
    points = table(policy, battery)
    if not points:
        return False
    full_s = tau_s(points, 1.0)
    began = battery.model.discharge
    used = 0.0 if battery.used is None else battery.used
    taken = min(used if began is None else max(0.0, used - began.used), on_battery_s / full_s)
    charge = learning.charge_of(denial)
    had = battery.health * charge if charge is not None else battery.health - (used - taken)
    load = reported_load(policy, denial)
    return usable(policy, had - taken) * tau_s(points, min(1.0, load_of(battery) if load is None else load)) > stop_s


def stop_s(policy: Policy, grade: Grade, *, reserve_s: float | None = None) -> float:
    """Seconds that the host needs from the commit to the end of its need for power, at this grade (n_stop)."""
    reserve_s = policy.reserve_s if reserve_s is None else min(reserve_s, policy.reserve_s)
    full_s = min(policy.force_after_s, policy.stop_q95_s) + policy.ups_off_s + reserve_s
    if grade is Grade.FULL:
        return full_s
    short_s = min(policy.stop_median_s, policy.force_after_s) + policy.ups_off_s + min(_SHORT_RESERVE_S, reserve_s)
    return min(short_s, full_s) if grade is Grade.SHORT else min(policy.bare_stop_s, short_s, full_s)


def force_after_s(policy: Policy, grade: Grade) -> float:
    """Seconds after the commit at which the host is powered off hard: the stop term of its grade."""
    match grade:
        case Grade.FULL:
            return min(policy.stop_q95_s, policy.force_after_s)
        case Grade.SHORT:
            return min(policy.stop_median_s, policy.force_after_s)
        case Grade.BARE:
            return min(_BARE_FORCE_S, policy.force_after_s)


def checkpoint_s(trainers: tuple[Trainer, ...], now_s: float) -> float:
    """Seconds until every living trainer that still owes a checkpoint has a durable one.

    Trainers that share a disk add up, disks work side by side; of one in flight only the rest counts.
    """
    by_disk: dict[str, float] = {}
    for trainer in trainers:
        if not trainer.owes:
            continue
        rest_s = trainer.checkpoint_s
        if trainer.in_flight is not None:
            if trainer.conduct is not Conduct.CONTINUE and not trainer.pause_ordered:
                pass  # One during training is in flight; the one at the paused step is still to come.
            elif trainer.in_flight.eta_at_s is not None:
                rest_s = max(0.0, trainer.in_flight.eta_at_s - now_s)
            else:
                rest_s = max(0.1 * rest_s, rest_s - (now_s - trainer.ordered_at_s))
        by_disk[trainer.disk] = by_disk.get(trainer.disk, 0.0) + rest_s
    return max(by_disk.values(), default=0.0)


def shed_s(policy: Policy) -> float:
    """Seconds by which this host makes room earlier for the more important ones on its UPS.

    Without a number in the settings: one stop of a host for each tier above this one.
    """
    shed = policy.shed
    if shed is None:
        return 0.0
    if shed.extra_s is not None:
        return shed.extra_s
    return max(0, shed.highest - shed.tier) * shed_step_s(policy)


def shed_step_s(policy: Policy) -> float:
    """Seconds that the hosts of one tier take to stop: by the settings, else as long as this one takes."""
    longest_s = None if policy.shared is None else policy.shared.longest_stop_s
    return (min(policy.force_after_s, policy.stop_q95_s) if longest_s is None else longest_s) + policy.ups_off_s


def paused_load(
    policy: Policy,
    trainers: tuple[Trainer, ...],
    load: float,
    learned: Learned | None = None,
    *,
    own: Own | None = None,
) -> float:
    """Predicted load once every trainer that pauses or exits has done so; the load itself where none does.

    Each by the drop that was seen when it paused, in watts and in proportion, whichever promises less; where one of
    them has never been seen to pause, by the presumed share for all. own: this host's part of the load, where
    others hang on the same UPS: only that part falls.
    """
    pausing = [
        t for t in trainers if t.alive and t.conduct is not Conduct.CONTINUE and not (t.paused or t.pause_ordered)
    ]
    if not pausing:
        return load
    if own is not None:
        return min(load, max(load - _own_drop(policy, pausing, own, learned), LOAD_FLOOR))
    drops = [None if learned is None else needs.drop_of(learned, t.name) for t in pausing]
    fallen = share = 0.0
    for drop in drops:
        if drop is None or drop.before <= 0.0:
            return load * presumed_share(policy, learned)
        fallen += drop.before - drop.after
        share += 1.0 - drop.after / drop.before
    return min(load, max(load - fallen, load * (1.0 - share), LOAD_FLOOR))


PAUSE_FREES = 0.7
"""Of what GPUs draw in training. An H100 fell from 690 to 146 W at the pause, by 79 %, and to 126 W in a minute; a GPU
that rests less deeply, and other work on the GPUs, get the rest."""


def presumed_share(policy: Policy, learned: Learned | None) -> float:
    """Return which share of this host's load remains in a pause that was never seen."""
    if policy.paused_is_set or learned is None or learned.gpu_share is None:
        return policy.paused_load_share
    return 1.0 - PAUSE_FREES * learned.gpu_share


def _own_drop(policy: Policy, pausing: list[Trainer], own: Own, learned: Learned | None) -> float:
    """Return by how much the pause of these trainers lowers the UPS's load, as a share of its rating."""
    fallen = share = 0.0
    for trainer in pausing:
        drop = None if learned is None else needs.drop_of(learned, trainer.name)
        if drop is None or drop.before <= 0.0:
            return own.load * (1.0 - presumed_share(policy, learned))
        in_watts = drop.watts is not None and own.rating_w
        fallen += (drop.watts or 0.0) / own.rating_w if in_watts and own.rating_w else drop.before - drop.after
        share += 1.0 - drop.after / drop.before
    return min(fallen, own.load * min(1.0, share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The sums of one moment. Seconds, and shares of a full new battery; None if unknown (blind).

    load: what counts in the commit test (the predicted load until it has settled); load_now: as measured. shed_s: by
    how much earlier this host pauses and powers off than its own needs ask for. own: its part of load_now, if shared.
    """

    now_s: float
    load: float
    load_now: float
    load_paused: float
    tau_now_s: float | None
    tau_paused_s: float | None
    health: float
    used: float
    left: float | None
    usable: float | None
    reff_now_s: float | None
    reff_s: float | None
    reff_paused_s: float | None
    cut_in_s: float | None
    checkpoint_s: float
    stop_s: float
    need_s: float
    grade: Grade
    fits: bool
    shed_s: float = 0.0
    own: Own | None = None

    @property
    def pause_need_s(self) -> float:
        """Seconds that must fit three quarters of the effective runtime: our own needs, and what we make room by."""
        return self.need_s + self.shed_s

    @property
    def commit_s(self) -> float:
        """Seconds of effective runtime at which the host powers off."""
        return self.stop_s + self.shed_s

    @property
    def slack_s(self) -> float | None:
        """Seconds to spare: effective runtime when paused, less everything that is still needed."""
        return None if self.reff_paused_s is None else self.reff_paused_s - self.pause_need_s


def fits(policy: Policy, *, left: float, tau_paused_s: float, checkpoint: float, grade: Grade) -> bool:
    """Say whether checkpoint and stop fit three quarters of the effective runtime when paused."""
    return checkpoint + stop_s(policy, grade) <= 0.75 * usable(policy, left) * tau_paused_s


def choose_grade(
    policy: Policy, *, left: float, tau_paused_s: float, checkpoint: float, at_most: Grade = Grade.FULL
) -> Grade:
    """Return the most orderly grade that fits, never better than `at_most`; bare where none fits."""
    return _most_orderly(
        at_most, lambda grade: fits(policy, left=left, tau_paused_s=tau_paused_s, checkpoint=checkpoint, grade=grade)
    )


def stops_within_s(policy: Policy, now: Budget, grade: Grade) -> float:
    """Seconds after the commit at which the host is powered off hard, with what the power leaves at this moment.

    Every stop begins in order. A bare one is forced early because time is short: it has what the power leaves, less
    what a forced power-off needs. Before a cut in 16 s the units have 9 s to end in order, and not 3.
    """
    least_s = force_after_s(policy, grade)
    if grade is not Grade.BARE or now.reff_now_s is None:
        return least_s
    return max(least_s, min(now.reff_now_s - after_force_s(policy), policy.force_after_s))


def after_force_s(policy: Policy) -> float:
    """Seconds that the power must outlast a forced power-off."""
    return max(0.0, policy.bare_stop_s - _BARE_FORCE_S)


def grade_left(policy: Policy, now: Budget) -> Grade:
    """Return the most orderly grade that fits what is left now, never better than the one so far."""
    if now.left is None or now.tau_paused_s is None:
        return now.grade
    return choose_grade(
        policy, left=now.left, tau_paused_s=now.tau_paused_s, checkpoint=now.checkpoint_s, at_most=now.grade
    )


def grade_within(policy: Policy, reff_s: float | None, *, at_most: Grade) -> Grade:
    """Return the most orderly stop that ends within `reff_s`, without a reserve; None: unknown, so at_most."""
    if reff_s is None:
        return at_most
    return _most_orderly(at_most, lambda grade: stop_s(policy, grade, reserve_s=0.0) <= reff_s)


def grade_before_cut(policy: Policy, feed: Feed, now: Budget, *, at_most: Grade) -> Grade:
    """Return the most orderly grade whose checkpoint and stop end before the UPS cuts its output."""
    cut_at_s = power_off_at_s(feed)
    if cut_at_s is None:
        return at_most

    def in_time(grade: Grade) -> bool:
        guard_s = 0.0 if grade is Grade.BARE else CUT_GUARD_S
        return now.now_s + now.checkpoint_s + stop_s(policy, grade, reserve_s=0.0) <= cut_at_s - guard_s

    return _most_orderly(at_most, in_time)


def _most_orderly(at_most: Grade, is_possible: Callable[[Grade], bool]) -> Grade:
    grades = tuple(Grade)
    return next((grade for grade in grades[grades.index(at_most) :] if is_possible(grade)), Grade.BARE)


def power_off_at_s(feed: Feed) -> float | None:
    """When the UPS cuts its output, by a countdown or a forced shutdown that has been confirmed."""
    if feed.countdown_at_s is None or feed.fsd_at_s is None:
        return feed.fsd_at_s if feed.countdown_at_s is None else feed.countdown_at_s
    return min(feed.countdown_at_s, feed.fsd_at_s)


def compute(
    policy: Policy,
    battery: Battery,
    feed: Feed,
    trainers: tuple[Trainer, ...],
    now_s: float,
    *,
    grade: Grade | None = None,
    settled_load: float | None = None,
    learned: Learned | None = None,
    own: Own | None = None,
) -> Budget:
    """Compute the sums at `now_s`. grade: of the outage, else the one that a full battery allows.

    settled_load: the load to use in the commit test while the measured one has not followed the pause yet.
    learned: whose pauses are known. own: this host's part of the load, where the UPS is shared.
    """
    if feed.supply is Supply.BATTERY and now_s > battery.at_s:
        battery = advance(policy, battery, now_s, draining=True)
    load_now = load_of(battery)
    load = load_now if settled_load is None else settled_load
    load_paused = paused_load(policy, trainers, load_now, learned, own=own) if settled_load is None else settled_load
    checkpoint = checkpoint_s(trainers, now_s)
    points = table(policy, battery)
    cut_at_s = power_off_at_s(feed)
    tau_now_s = tau_paused_s = reff_now_s = reff_s = reff_paused_s = spare = None
    if points and battery.left is not None:
        tau_now_s = tau_s(points, load_now)
        tau_paused_s = tau_now_s if load_paused == load_now else tau_s(points, load_paused)
        spare = usable(policy, battery.left)
        reff_now_s, reff_paused_s = spare * tau_now_s, spare * tau_paused_s
        reff_s = spare * (tau_now_s if settled_load is None else tau_paused_s)
        if grade is None:
            grade = choose_grade(policy, left=battery.health, tau_paused_s=tau_paused_s, checkpoint=checkpoint)
    grade = Grade.FULL if grade is None else grade
    cut_in_s = None
    if cut_at_s is not None:
        cut_in_s = max(0.0, cut_at_s - now_s - (0.0 if grade is Grade.BARE else CUT_GUARD_S))
        reff_now_s = cut_in_s if reff_now_s is None else min(reff_now_s, cut_in_s)
        reff_s = cut_in_s if reff_s is None else min(reff_s, cut_in_s)
        reff_paused_s = cut_in_s if reff_paused_s is None else min(reff_paused_s, cut_in_s)
    stop = stop_s(policy, grade)
    return Budget(
        now_s=now_s,
        load=load,
        load_now=load_now,
        load_paused=load_paused,
        tau_now_s=tau_now_s,
        tau_paused_s=tau_paused_s,
        health=battery.health,
        used=battery.used or 0.0,
        left=battery.left,
        usable=spare,
        reff_now_s=reff_now_s,
        reff_s=reff_s,
        reff_paused_s=reff_paused_s,
        cut_in_s=cut_in_s,
        checkpoint_s=checkpoint,
        stop_s=stop,
        need_s=checkpoint + stop,
        grade=grade,
        fits=reff_paused_s is not None and checkpoint + stop <= 0.75 * reff_paused_s,
        shed_s=shed_s(policy),
        own=own,
    )
