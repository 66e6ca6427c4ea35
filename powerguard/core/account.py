"""What is left in the battery: an account of energy, by our own reckoning and by what the UPS says.

The runtime of a battery depends on the load (Peukert, K about 1.16 to 1.46), so seconds are the wrong currency:
pausing the GPUs makes the same battery last about three times as long. All energy here is a *share of a full, new
battery*; `tau(x)` is how many seconds such a battery lasts at load x.

    e = min(H - used, H * charge, reported runtime / tau(load))

A gauge that is wrong in the optimistic direction is overruled by our own account (`used`); one that is wrong in the
pessimistic direction only costs training time. On battery `e` never rises.
"""

import math

from powerguard.core import battery as learning
from powerguard.core.frozen import replace
from powerguard.core.learned import BatteryModel
from powerguard.core.model import Battery, Feed
from powerguard.core.policy import Policy
from powerguard.core.readings import ON_UTILITY, OutputSource, Reading

LOAD_STEP = 0.05
"""A change of the load, as a share of the rating, that counts as a step."""
LOAD_FLOOR = 0.05
OWN_LOAD = 0.04
"""What a UPS takes for itself, as a share of its rating: it bounds runtimes at small loads."""
SMOOTHING_S = 20.0
"""Seconds that UPSes take to follow a load step in their reported runtime (measured: 10 to 20 s)."""
GAP_S = 5.0
"""Longer between two accounts, and we were away: the gap is filled at the larger load."""
PEUKERT = 1.46
"""Steepest exponent seen in makers' tables; used above a table of one point, where steep is the cautious side."""
UTILITY_ACCOUNT_S = 10.0
"""On utility nothing moves fast: the account is brought up to date this often."""
_NOTHING_SEEN = frozenset((OutputSource.OFF, OutputSource.UNKNOWN))
_PHYSICS, _GRAIN = 3.0, 0.005


def table(policy: Policy, battery: Battery) -> tuple[tuple[float, float], ...]:
    """Return the runtime table: the settings' one, else as learned from the UPS's word on utility, else nothing."""
    return battery.composed or learning.table(policy, battery.model, battery.tau_point)


def tau_s(points: tuple[tuple[float, float], ...], load: float) -> float:
    """Seconds that a full, new battery lasts at `load` (share of the rating). `points` must not be empty.

    Interpolated in logs; above the highest point by the last slope; below the lowest by a constant loss of 4 %.
    """
    x = LOAD_FLOOR if load < LOAD_FLOOR else load
    low_x, low_s = points[0]
    if x <= low_x:
        return low_s * (low_x + OWN_LOAD) / (x + OWN_LOAD)
    if len(points) == 1:
        return low_s * float((low_x / x) ** PEUKERT)
    at = 1
    while at < len(points) - 1 and x > points[at][0]:
        at += 1
    (x0, s0), (x1, s1) = points[at - 1], points[at]
    slope = math.log(s1 / s0) / math.log(x1 / x0)
    return s1 * float((x / x1) ** slope)


def load_of(battery: Battery) -> float:
    """Return the load to count with: the last one told, else full."""
    return 1.0 if battery.load is None else battery.load


def told_load(policy: Policy, reading: Reading) -> float | None:
    """Load of a reading as a share of the rating; None where not told, or zero (a silent gauge, not a dark host)."""
    if reading.load_pct is not None and 0.0 < reading.load_pct <= 200.0:
        return reading.load_pct / 100.0
    if reading.watts is not None and policy.rating_w and 0.0 < reading.watts <= 2 * policy.rating_w:
        return reading.watts / policy.rating_w
    return None


def advance(policy: Policy, battery: Battery, now_s: float, *, draining: bool, load: float | None = None) -> Battery:
    """Bring the account up to `now_s` without a reading: dead reckoning of every term."""
    if now_s <= battery.at_s:
        return battery
    at_s, used, gauge, charged, left = _reckoned(policy, battery, now_s, draining=draining, load=load)
    return replace(battery, at_s=at_s, used=used, gauge=gauge, charged=charged, left=left)


_Terms = tuple[float, float | None, float | None, float | None, float | None]  # at_s, used, gauge, charged, left


def _reckoned(policy: Policy, battery: Battery, now_s: float, *, draining: bool, load: float | None) -> _Terms:
    """Return what becomes of the terms of a battery until `now_s`. load: what drains it; None: as it was told last."""
    used, gauge, charged, left = battery.used, battery.gauge, battery.charged, battery.left
    gone_s = now_s - battery.at_s
    if gone_s <= 0.0:
        return battery.at_s, used, gauge, charged, left
    if used is not None and not draining:
        used = max(0.0, used - battery.health * gone_s / learning.recharge_s(policy, battery.model))
    elif used is not None and (points := table(policy, battery)):
        drain = gone_s / tau_s(points, load_of(battery) if load is None else load)
        used = used + drain if used + drain < 1.0 else 1.0
        gauge, charged, left = _less(gauge, drain), _less(charged, drain), _less(left, drain)
    return now_s, used, gauge, charged, left


def _less(term: float | None, drain: float) -> float | None:
    return None if term is None else term - drain if term > drain else 0.0


def _caught_up(policy: Policy, battery: Battery, feed: Feed, reading: Reading, *, drained: bool) -> _Terms:
    """Bring the account up to this reading. A gap in the readings counts at the larger load of its two ends."""
    load, now_load = told_load(policy, reading), load_of(battery)
    seen_at_s = battery.at_s if feed.previous is None else feed.previous.at_s
    if load is None or load <= now_load or reading.at_s - seen_at_s <= GAP_S or not (points := table(policy, battery)):
        return _reckoned(policy, battery, reading.at_s, draining=drained, load=None)
    if drained:
        # Ticks have counted part of the gap at the smaller load: that part counts again, for the difference.
        counted_s = max(0.0, battery.at_s - seen_at_s)
        share = 1.0 - tau_s(points, load) / tau_s(points, now_load)
        battery = replace(battery, at_s=battery.at_s - share * counted_s)
    return _reckoned(policy, battery, reading.at_s, draining=drained, load=load)


def enter(
    policy: Policy, battery: Battery, feed: Feed, reading: Reading, *, draining: bool, drained: bool | None = None
) -> Battery:
    """Enter one reading. `draining`: the battery carries the load, whatever the cause (an outage, a test).

    drained: it did so until now; None: as `draining`. What lies between a battery and a utility reading was battery.
    """
    load, before = told_load(policy, reading), battery
    drained = draining if drained is None else drained
    at_s, used, gauge, charged, left = _caught_up(policy, battery, feed, reading, drained=drained)
    if not draining and reading.output_source in _NOTHING_SEEN and before.used is not None:
        # Nobody says that there is anything to recharge from.
        used = max(before.used, used or 0.0)
    step_at_s, averaged = battery.step_at_s, battery.load
    if load is not None:
        if averaged is None:
            averaged = load
        elif abs(load - averaged) > LOAD_STEP:
            averaged, step_at_s = load, reading.at_s
        else:
            averaged += 0.2 * (load - averaged)
    charge = learning.charge_of(reading)
    health = learning.health(policy, battery.model, reading.at_s, replace_battery=reading.replace_battery)
    tau_point = battery.tau_point
    if (not draining or tau_point is None) and not policy.runtime_table and reading.runtime_s:
        tau_point = (max(1.0 if averaged is None else averaged, LOAD_FLOOR), reading.runtime_s / (charge or 1.0))
    if used is None:
        # A gauge that counts against the nameplate tells more than there is; only what we saw ourselves is sure.
        used = 0.5 * health if charge is None else min(health, 1.0 - charge)
    elif charge is not None and not draining:
        # Nobody was there while the host was off; the charge told now bounds what that time can have put back.
        # One odd charge is a glitch: what it says of the past counts when a second reading says it too.
        twice = max(charge, learning.charge_of(feed.previous) or 0.0)
        back = health * battery.away_s / learning.recharge_s(policy, battery.model)
        used = max(used - back, health * (1.0 - twice), 0.0)
    fell, away_charge = _fallen_while_away(battery, feed, charge)
    used = used + fell if used + fell < 1.0 else 1.0
    steady = step_at_s is None or reading.at_s - step_at_s >= SMOOTHING_S
    model = _learned(policy, before, feed, reading, draining=draining, used=used, load=averaged, steady=steady)
    battery = replace(
        battery,
        at_s=reading.at_s if reading.at_s > at_s else at_s,
        used=used,
        gauge=gauge,
        left=left,
        away_s=0.0,
        away_charge=away_charge,
        # On battery a term that falls silent goes on by dead reckoning; on utility it is simply not known.
        charged=health * charge if charge is not None else charged if draining else None,
        load=averaged,
        step_at_s=step_at_s,
        health=health,
        tau_point=tau_point,
        model=model,
    )
    battery = _left(policy, before, battery, feed, reading, draining=draining)
    if battery.suspect is not None:
        # A silent reading must not repeat by dead reckoning what only one has said.
        battery = replace(battery, gauge=gauge, charged=charged)
    return battery


def _fallen_while_away(battery: Battery, feed: Feed, charge: float | None) -> tuple[float, float | None]:
    """Share that was used while the host was off, and what is left to be compared: the UPS lives on, and may run flat.

    A gauge that counts against the nameplate still shows half a battery then, but it shows by how much it fell.
    """
    before = learning.charge_of(feed.previous)
    if battery.away_charge is None or charge is None or before is None:
        return 0.0, battery.away_charge
    return max(0.0, battery.away_charge - max(charge, before)), None


def _learned(
    policy: Policy,
    before: Battery,
    feed: Feed,
    reading: Reading,
    *,
    draining: bool,
    used: float,
    load: float | None,
    steady: bool,
) -> BatteryModel:
    """Learn from this reading. What a discharge has taught counts from the next reading on utility."""
    model = before.model
    if draining:
        seen_at_s = reading.at_s if feed.previous is None else feed.previous.at_s
        low = feed.low_battery_at_s is not None
        gap_s = reading.at_s - seen_at_s
        model = learning.learn_on_battery(policy, model, reading, used=used, gap_s=gap_s, steady=steady, low=low)
    elif reading.output_source in ON_UTILITY:
        # What the charge has bounded already in this account is not what the discharge has taken.
        taken = used if before.used is None else max(used, before.used)
        model = learning.learn_on_utility(policy, model, reading, load=load, settled=steady, used=taken)
    return model


def _left(
    policy: Policy, before: Battery, battery: Battery, feed: Feed, reading: Reading, *, draining: bool
) -> Battery:
    points = table(policy, battery)
    if not points:
        return replace(battery, left=None, gauge=None)
    tau_now_s = tau_s(points, load_of(battery))
    gauge = battery.gauge
    smoothing = battery.step_at_s is not None and reading.at_s - battery.step_at_s < SMOOTHING_S
    lags = draining and smoothing and gauge is not None
    if reading.runtime_s is not None and reading.runtime_s >= 0.0 and not lags:
        gauge = reading.runtime_s / tau_now_s
    elif not draining:
        gauge = None
    low_load, cap = battery.low_load, math.inf
    if feed.low_battery_at_s is None:
        low_load = None
    elif draining:
        low_load = load_of(battery) if low_load is None else low_load
        cap_s = max(0.0, policy.low_battery_s - (reading.at_s - feed.low_battery_at_s))
        if not _low_battery_is_doubted(battery, reading, cap_s, tau_now_s):
            cap = cap_s / tau_s(points, low_load)
    left, charged, suspect = battery.health - (battery.used or 0.0), battery.charged, None
    if gauge is not None and gauge < left:
        left = gauge
    if charged is not None and charged < left:
        left = charged
    left = max(left, 0.0)
    if draining and before.left is not None and battery.left is not None:
        # A fall faster than the load explains counts only when the next reading repeats it: gauges glitch.
        allowed = before.left - _PHYSICS * (reading.at_s - before.at_s) / tau_now_s - _GRAIN
        if left < allowed and (battery.suspect is None or left > battery.suspect + _GRAIN):
            left, suspect = battery.left, left
        left = min(left, battery.left)
    # Low battery has been told by two readings already: what it caps needs no third.
    return replace(battery, gauge=gauge, low_load=low_load, left=min(left, cap), suspect=suspect)


def _low_battery_is_doubted(battery: Battery, reading: Reading, cap_s: float, tau_now_s: float) -> bool:
    """Charge, reported runtime and our own account all contradict a low-battery flag clearly."""
    own_s = (battery.health - (battery.used or 0.0)) * tau_now_s
    told_s = -1.0 if reading.runtime_s is None else reading.runtime_s
    charged = reading.charge_pct is not None and reading.charge_pct >= 50.0
    return charged and told_s > 2 * cap_s and own_s > 2 * cap_s
