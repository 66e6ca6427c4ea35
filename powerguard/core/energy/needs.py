"""The needs, as measured: the q95 of each need's own history; before there is one, the settings' figure.

A few samples are not a distribution: with n of them (n < 20) their largest counts, times 1 + 0.5 / n.
"""

import math
from dataclasses import replace

from powerguard.core.model.policy import Drop, Learned, Need, Policy

KEPT = 32
"""Newest samples kept of each need."""
NEEDS = ("checkpoint", "stop", "boot", "resume")
ENOUGH = 3
"""Measurements of a need before they count."""
_DISTRIBUTION = 20
_MOST_NEEDS = 64
LONGEST_S = 86400.0


def q95(seconds: tuple[float, ...]) -> float:
    """Return the 95th percentile (nearest rank) of a need's samples; `seconds` must not be empty."""
    ranked = sorted(seconds)
    if len(ranked) < _DISTRIBUTION:
        return ranked[-1] * (1.0 + 0.5 / len(ranked))
    return ranked[math.ceil(0.95 * len(ranked)) - 1]


def median(seconds: tuple[float, ...]) -> float:
    """Return the middle one (the upper one of two); `seconds` must not be empty."""
    return sorted(seconds)[len(seconds) // 2]


def samples(learned: Learned, of: str, name: str = "") -> tuple[float, ...]:
    """Return what has been measured of one need, newest last."""
    return next((need.seconds for need in learned.needs if need.of == of and need.name == name), ())


def add(learned: Learned, of: str, seconds: float, name: str = "") -> Learned:
    """Enter one measurement; an impossible duration and an unknown need are ignored."""
    if of not in NEEDS or not 0.0 < seconds <= LONGEST_S:
        return learned
    kept = (*samples(learned, of, name), seconds)[-KEPT:]
    others = tuple(need for need in learned.needs if (need.of, need.name) != (of, name))
    return replace(learned, needs=(*others, Need(of=of, name=name, seconds=kept))[-_MOST_NEEDS:])


def fold(policy: Policy, learned: Learned) -> Policy:
    """Return the policy with what has been measured in place of what was presumed: how long this host takes to stop.

    Drivers of `step` call it when settings or measurements change. A number that the operator has set stays.
    """
    stops = samples(learned, "stop")
    if policy.stop_is_set or len(stops) < ENOUGH:
        return policy
    # No host stops faster than one that is forced off: a shorter time was not a stop.
    q95_s = min(max(q95(stops), policy.bare_stop_s), policy.force_after_s)
    return replace(policy, stop_q95_s=q95_s, stop_median_s=min(median(stops), q95_s))


def checkpoint_s(learned: Learned, trainer: str, estimate_s: float) -> float:
    """Seconds from order to durable to count with. estimate_s: the estimate of the trainer or the settings.

    Once measured three times, that history counts; unless the trainer says more than twice as much: another model is
    in training than the one that was measured.
    """
    known = samples(learned, "checkpoint", trainer)
    if not known:
        return estimate_s
    measured_s = q95(known)
    if len(known) < ENOUGH or estimate_s > 2.0 * measured_s:
        return max(measured_s, estimate_s)
    return measured_s


def drop_of(learned: Learned, trainer: str) -> Drop | None:
    """Return the load drop that was seen when this trainer paused, if ever."""
    return dict(learned.pauses).get(trainer)


def with_drop(learned: Learned, trainer: str, drop: Drop) -> Learned:
    """Enter the load drop of a pause."""
    others = tuple(pair for pair in learned.pauses if pair[0] != trainer)
    return replace(learned, pauses=(*others, (trainer, drop))[-_MOST_NEEDS:])


def shifted(learned: Learned, shift_s: float) -> Learned:
    """Move every time into the clock of another boot."""
    return replace(
        learned,
        pauses=tuple((name, replace(drop, at_s=drop.at_s + shift_s)) for name, drop in learned.pauses),
        cap=None if learned.cap is None else replace(learned.cap, at_s=learned.cap.at_s + shift_s),
        drill=None if learned.drill is None else replace(learned.drill, at_s=learned.drill.at_s + shift_s),
    )
