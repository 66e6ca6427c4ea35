"""What of the UPS's load is this host's own? Only that part falls when training pauses, and only by it we may judge.

The load of the UPS empties the battery. On a UPS that other hosts hang on, a pause, a cap or a signal of ours changes
this host's part of it and nothing else. What the others do is measured with the UPS's load and never predicted.

Sources, best first: the BMC's power reading, the outlets of a PDU, the GPUs' power plus the rest of the host as it was
once measured, `own_w` of the settings, the load of the UPS divided by the number of hosts. The first three measure. A
measurement that is old, frozen, jumping, implausible, or larger than all that the UPS carries is passed over.
"""

import math
from dataclasses import dataclass, replace

from powerguard.core.energy.account import load_of
from powerguard.core.model.actions import Conduct
from powerguard.core.model.events import OwnLoad, OwnSource
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Emergency, Online, OwnLoadAtPause, OwnLoadReport, State, Supply

STALE_S = 15.0
"""On battery the sources are asked every 5 s: a reading that is older than three of them does not count."""
STALE_ON_UTILITY_S = 150.0
LEAST_W, MOST_W = 10.0, 1e6
"""No host that runs this program draws less, and none draws more."""
JUMP, JUMPED_S = 0.3, 30.0
"""Two changes of 30 % in opposite directions within three readings are no load. So long none of its readings counts."""
FROZEN_S = 15.0
"""A reading that is the same to the watt so long after training was asked to pause is frozen."""
FROZEN_AT_A_STEP_S = 60.0
"""And one that was the same to the watt before the UPS's load made a step and still is so long after it."""
ABOVE_S = 10.0
"""A UPS reports its load some seconds late: only a reading that stays above it so long is not of one host."""
TIMES_OWN_W = 2.0
"""A reading of more than this many times `own_w` of the settings is not of this host alone."""
_HIGH, _HIGH_SHARE, _FALLING = 1.15, 0.05, 0.95
_FOLLOWS_S = 8.0
"""A BMC averages: it is the readings after so long that show whether the draw has followed."""
_CONTRADICTS = 0.25
"""A trainer that reports a pause is contradicted by a draw that has fallen by less than this part of what was due."""
_SHARED, _SHARED_SHARE = 1.3, 0.05
"""Losses of power supplies and rounding of a UPS's load explain no more than this."""
_SAME_MINUTE_S = 60.0
_FORGETS = 0.1
_MEASURING = (OwnSource.BMC, OwnSource.PDU, OwnSource.GPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What this host draws, as a share of the UPS's rating: load, 0 where it is not known, so that it promises nothing.

    watts: None where the UPS's rating is not known and nothing measures. source: what it rests on; at_s: of its
    reading, None: no measurement. rating_w: of all UPSes that feed the host. passed_over: sources that measured, and
    why they do not count now.
    """

    load: float
    watts: float | None
    source: OwnSource
    at_s: float | None = None
    rating_w: float | None = None
    passed_over: tuple[tuple[OwnSource, str], ...] = ()

    @property
    def measured(self) -> bool:
        """Whether a source that measures reports it."""
        return self.at_s is not None


def enter(policy: Policy, state: State, event: OwnLoad) -> State:
    """Enter one reading of the host's own load."""
    known = next((each for each in state.own if each.source is event.source), None)
    if known is not None and event.at_s < known.at_s:
        return state
    watts = event.watts if math.isfinite(event.watts) else 0.0
    ups_w = _ups_w(policy, state)
    is_above = ups_w is not None and watts > 1.1 * ups_w + 0.02 * (rating_w(policy, state) or 0.0)
    above_since_s = event.at_s if is_above else None
    if known is None:
        report = OwnLoadReport(
            source=event.source,
            watts=watts,
            at_s=event.at_s,
            since_s=event.at_s,
            above_since_s=above_since_s,
            ups_w=ups_w,
        )
    else:
        if is_above and known.above_since_s is not None:
            above_since_s = known.above_since_s
        jumped = known.before_w is not None and _is_jump(known.before_w, known.watts, watts)
        report = OwnLoadReport(
            source=event.source,
            watts=watts,
            at_s=event.at_s,
            since_s=known.since_s if watts == known.watts else event.at_s,
            before_w=known.watts,
            jumped_at_s=event.at_s if jumped else known.jumped_at_s,
            above_since_s=above_since_s,
            ups_w=ups_w,
            before_ups_w=known.ups_w,
        )
    others = tuple(each for each in state.own if each.source is not event.source)
    return replace(state, own=tuple(sorted((*others, report), key=lambda each: _MEASURING.index(each.source))))


def _is_jump(first_w: float, second_w: float, third_w: float) -> bool:
    """Say whether the draw went one way and at once back: a pause goes one way."""
    there, back = second_w - first_w, third_w - second_w
    least = JUMP * max(abs(first_w), abs(second_w), abs(third_w))
    return there * back < 0.0 and min(abs(there), abs(back)) > least


def rating_w(policy: Policy, state: State) -> float | None:
    """Return the rated watts of all UPSes that feed this host, as far as settings or readings have them."""
    if policy.feeds:
        ratings = [each.policy.rating_w for each in policy.feeds]
        return None if None in ratings else sum(each for each in ratings if each is not None)
    reading = state.feed.reading
    if policy.rating_w is None and reading is not None and reading.watts and reading.load_pct:
        return 100.0 * reading.watts / reading.load_pct
    return policy.rating_w


def _ups_w(policy: Policy, state: State) -> float | None:
    rated = rating_w(policy, state)
    return None if rated is None or state.battery.load is None else rated * state.battery.load


def doubt(policy: Policy, state: State, report: OwnLoadReport, now_s: float) -> str:
    """Say why a measurement does not count now, or ""."""
    age_s, watts = now_s - report.at_s, report.watts
    on_battery = state.feed.supply is Supply.BATTERY and now_s - state.feed.since_s > STALE_S
    if age_s > (STALE_S if on_battery else STALE_ON_UTILITY_S):
        return f"no reading for {age_s:.0f} s"
    if not LEAST_W <= watts <= MOST_W:
        return f"implausible: {watts:g} W"
    limit_w = None if policy.shared is None or policy.shared.own_w is None else TIMES_OWN_W * policy.shared.own_w
    if limit_w is not None and watts > limit_w and report.source is not OwnSource.GPU:
        return f"{watts:g} W is over twice own_w of the settings, perhaps that of the whole chassis"
    if report.above_since_s is not None and _stays_above(state, report):
        return f"{watts:g} W is more than the whole UPS carries, perhaps that of the whole chassis"
    if report.jumped_at_s is not None and now_s - report.jumped_at_s <= JUMPED_S:
        return "it jumps up and down"
    return _frozen(state, report)


def _stays_above(state: State, report: OwnLoadReport) -> bool:
    step_at_s, since_s = state.battery.step_at_s, report.above_since_s or 0.0
    steady = step_at_s is None or report.at_s - step_at_s >= ABOVE_S
    return steady or report.at_s - since_s >= ABOVE_S


def _frozen(state: State, report: OwnLoadReport) -> str:
    """Say that a reading has not moved by a single watt although it had to."""
    phase, step_at_s = state.phase, state.battery.step_at_s
    if isinstance(phase, Emergency) and phase.own and any(t.alive and t.pause_ordered for t in state.trainers):
        paused_at_s = phase.paused_at_s
        if report.since_s < paused_at_s and report.at_s - paused_at_s >= FROZEN_S:
            return f"frozen: {report.watts:g} W since before training was asked to pause"
    if step_at_s is not None and report.since_s < step_at_s and report.at_s - step_at_s >= FROZEN_AT_A_STEP_S:
        return f"frozen: {report.watts:g} W for {report.at_s - report.since_s:.0f} s, and the UPS's load made a step"
    return ""


def own_load(policy: Policy, state: State, now_s: float) -> Own | None:
    """Return this host's own load, by the best source that counts; None where it has the UPS to itself."""
    shared = policy.shared
    if shared is None:
        return None
    load, rated = load_of(state.battery), rating_w(policy, state)
    passed_over: list[tuple[OwnSource, str]] = []
    for report in state.own:
        why = doubt(policy, state, report, now_s)
        if why:
            passed_over.append((report.source, why))
            continue
        watts = report.watts + (state.learned.rest_w or 0.0 if report.source is OwnSource.GPU else 0.0)
        share = _share(watts, rated, load)
        if share is not None:
            return Own(
                load=share,
                watts=watts,
                source=report.source,
                at_s=report.at_s,
                rating_w=rated,
                passed_over=tuple(passed_over),
            )
        passed_over.append((report.source, "the UPS's rating is not known (rating_w)"))
    presumed = None if shared.own_w is None else _share(shared.own_w, rated, load)
    if presumed is not None:
        source = OwnSource.SETTINGS
    elif shared.hosts:
        presumed, source = load / shared.hosts, OwnSource.HOSTS
    else:
        presumed, source = 0.0, OwnSource.UNKNOWN
    unknown = rated is None or source is OwnSource.UNKNOWN
    return Own(
        load=presumed,
        watts=None if unknown else presumed * (rated or 0.0),
        source=source,
        rating_w=rated,
        passed_over=tuple(passed_over),
    )


def _share(watts: float, rated: float | None, load: float) -> float | None:
    return None if not rated else min(load, watts / rated)


def rest_w(state: State, now_s: float) -> float | None:
    """Return what this host draws besides its GPUs, by two readings of the same moment; None where one is missing."""
    known = {each.source: each for each in state.own if now_s - each.at_s <= STALE_S}
    whole, gpus = known.get(OwnSource.BMC, known.get(OwnSource.PDU)), known.get(OwnSource.GPU)
    if whole is None or gpus is None:
        return None
    return whole.watts - gpus.watts if whole.watts > gpus.watts > 0.0 else None


def with_gpu_share(policy: Policy, state: State, now_s: float) -> State:
    """Enter which part of this host's draw its GPUs have, if training runs and both were measured in the same minute.

    The larger of several counts for long: a reading that meets the GPUs at rest, as between two epochs, hides no load.
    The whole is the host's draw by its BMC or PDU, and what a UPS carries that is this host's alone; the larger of the
    two, so that one that reads too low promises no drop.
    """
    recent = [each for each in state.own if 0.0 <= now_s - each.at_s <= _SAME_MINUTE_S]
    known = {each.source: each for each in recent if not doubt(policy, state, each, now_s)}
    gpus, host = known.get(OwnSource.GPU), known.get(OwnSource.BMC, known.get(OwnSource.PDU))
    runs = any(
        t.alive and not (t.paused or t.pause_ordered) and t.conduct is not Conduct.CONTINUE for t in state.trainers
    )
    calm = isinstance(state.phase, Online) and state.feed.supply is Supply.UTILITY and state.drill is None
    if gpus is None or not runs or not calm or state.cap is not None:
        return state
    whole_w = max(0.0 if host is None else host.watts, (gpus.ups_w or 0.0) if policy.shared is None else 0.0)
    if gpus.watts >= whole_w:
        return state
    seen, before = gpus.watts / whole_w, state.learned.gpu_share or 0.0
    share = round(max(seen, before + _FORGETS * (seen - before)), 3)
    return state if share == before else replace(state, learned=replace(state.learned, gpu_share=share))


def looks_shared(policy: Policy, state: State) -> str:
    """Say why other hosts seem to hang on the UPS although the settings do not say so, or "".

    By the draw of the whole host and the load of the UPS at the same moment: the UPS carries far more, or its load has
    moved and the host's draw has not.
    """
    rated = rating_w(policy, state)
    if policy.shared is not None or rated is None:
        return ""
    for report in state.own:
        if report.source is OwnSource.GPU or report.ups_w is None or not LEAST_W <= report.watts <= MOST_W:
            continue
        both = f"{report.ups_w:.0f} W, and this host draws {report.watts:.0f} W ({report.source})"
        if report.ups_w > _SHARED * report.watts + _SHARED_SHARE * rated:
            return f"the UPS carries {both}"
        if report.before_w is None or report.before_ups_w is None:
            continue
        moved_w, own_w = report.ups_w - report.before_ups_w, report.watts - report.before_w
        if abs(moved_w) > 2.0 * abs(own_w) + 2.0 * _SHARED_SHARE * rated:
            return f"the UPS's load moved by {moved_w:+.0f} W to {both}, which moved by {own_w:+.0f} W"
    return ""


# --- After a pause ---------------------------------------------------------------------------------------------------


def before_pause(policy: Policy, state: State, now_s: float, drop_share: float) -> tuple[OwnLoadAtPause, ...]:
    """Return what each valid source reports before training is asked to pause. drop_share: share that is to fall."""
    return tuple(
        OwnLoadAtPause(source=each.source, watts=each.watts, drop_w=drop_share * each.watts)
        for each in state.own
        if not doubt(policy, state, each, now_s)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """How far this host's own draw has followed the pause, by one source that measured before it and does now."""

    source: OwnSource
    before_w: float
    now_w: float
    expected_w: float
    is_falling: bool = False
    is_early: bool = False

    @property
    def stays_high(self) -> bool:
        """Whether the draw is clearly above what the pause promised, and does not fall any more."""
        if self.is_falling or self.is_early:
            return False
        return self.now_w > _HIGH * self.expected_w + _HIGH_SHARE * self.before_w

    @property
    def contradicts_pause(self) -> bool:
        """Whether hardly anything of what was promised has come: what a trainer says of its pause cannot be so."""
        return self.now_w > self.before_w - _CONTRADICTS * (self.before_w - self.expected_w)


def _shows_from_s(state: State, paused_at_s: float) -> float:
    """Return from when on a reading shows what the pause and the signals did: an older one proves nothing."""
    slowest_s = max((trainer.step_s for trainer in state.trainers if trainer.alive), default=0.0)
    return max((paused_at_s + 2 * slowest_s + _FOLLOWS_S, *(each.at_s + _FOLLOWS_S for each in state.signalled)))


def fall(policy: Policy, state: State, now_s: float) -> Fall | None:
    """Return how far the own draw has fallen since the pause was ordered; None if no source measures it.

    A reading that is still the same to the watt may be frozen: it is not held against a trainer.
    """
    phase = state.phase
    if not isinstance(phase, Emergency):
        return None
    for before in phase.own:
        report = next((each for each in state.own if each.source is before.source), None)
        if report is None or report.since_s <= phase.paused_at_s or doubt(policy, state, report, now_s):
            continue
        return Fall(
            source=report.source,
            before_w=before.watts,
            now_w=report.watts,
            expected_w=before.watts - before.drop_w,
            is_falling=report.before_w is not None and report.watts < _FALLING * report.before_w,
            is_early=report.at_s < _shows_from_s(state, phase.paused_at_s),
        )
    return None
