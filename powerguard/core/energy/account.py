"""What is left in the battery: powerguard's energy account, and the figures that the UPS reports.

The runtime of a battery depends on the load (Peukert, K about 1.16 to 1.46), so seconds are the wrong currency:
pausing the GPUs makes the same battery last about three times as long. All energy here is a *share of a full, new
battery*; `tau(x)` is how many seconds such a battery lasts at load x.

    e = min(H - used, H * charge, reported runtime / tau(load))

A gauge that is wrong in the optimistic direction is overruled by our own account (`used`); one that is wrong in the
pessimistic direction only costs training time. On battery `e` never rises.
"""

import math
from dataclasses import replace

from powerguard.core.energy import learning
from powerguard.core.model.events import ON_UTILITY, UNREPORTED, OutputSource, Reading
from powerguard.core.model.policy import BatteryModel, Policy, TauPoint
from powerguard.core.model.state import Battery, Feed

LOAD_STEP = 0.05
"""A change of the load, as a share of the rating, that counts as a step."""
LOAD_FLOOR = 0.05
OWN_LOAD = 0.04
"""What a UPS takes for itself, as a share of its rating: it bounds runtimes at small loads."""
SMOOTHING_S = 20.0
"""Seconds that UPSes take to follow a load step in their reported runtime (measured: 10 to 20 s)."""
GAP_S = 5.0
"""Longest time between two updates; a longer gap is filled at the larger load."""
PEUKERT = 1.46
"""Steepest exponent seen in makers' tables; used above a table of one point, where steep is the cautious side."""
_PHYSICS, _GRAIN = 3.0, 0.005
AGREED_S = 20.0
"""How long all three terms must be higher than the held value, on battery, before a fall counts as a glitch."""
_AGREED = 0.05
_ALMOST_FULL = 0.9
_STILL_FULL = 0.99
_FALLS = 0.25
"""Seconds by which a reported runtime falls in a second where the battery carries the load: about one, more or less."""
_DENIED_SHARE = 1.0 / 3.0
"""Share of a full charge that the account must have counted before a reported full charge contradicts battery."""
PRESUMED = 0.5
"""Share of a full charge that counts as used while no charge has been reported."""


def table(policy: Policy, battery: Battery) -> tuple[tuple[float, float], ...]:
    """Return the runtime table: of the settings, else as learned from the UPS on utility, else empty."""
    return battery.composed or learning.table(policy, battery.model, battery.tau_point)


def tau_s(points: tuple[tuple[float, float], ...], load: float) -> float:
    """Seconds that a full, new battery lasts at `load` (share of the rating). `points` must not be empty.

    Interpolated in logs; above the highest point by the last slope; below the lowest by a constant loss of 4 %.
    """
    x = max(load, LOAD_FLOOR)
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
    """Return the load to count with: the last reported one, else full load."""
    return 1.0 if battery.load is None else battery.load


def reported_load(policy: Policy, reading: Reading) -> float | None:
    """Load of a reading as a share of the rating; None if not reported, or zero (a silent gauge, not a dark host)."""
    if reading.load_pct is not None and 0.0 < reading.load_pct <= 200.0:
        return reading.load_pct / 100.0
    if reading.watts is not None and policy.rating_w and 0.0 < reading.watts <= 2 * policy.rating_w:
        return reading.watts / policy.rating_w
    return None


def advance(policy: Policy, battery: Battery, now_s: float, *, draining: bool, load: float | None = None) -> Battery:
    """Bring the account up to `now_s` without a reading: dead reckoning of every term."""
    if now_s <= battery.at_s:
        return battery
    return _reckoned(policy, battery, now_s, draining=draining, load=load)


def _reckoned(policy: Policy, battery: Battery, now_s: float, *, draining: bool, load: float | None) -> Battery:
    """Return the battery at `now_s`, its terms by dead reckoning. load: what drains it; None: the last reported."""
    gone_s = now_s - battery.at_s
    if gone_s <= 0.0:
        return battery
    used = battery.used
    if used is not None and not draining:
        used = max(0.0, used - battery.health * gone_s / learning.recharge_s(policy, battery.model))
    elif used is not None and (points := table(policy, battery)):
        drain = gone_s / tau_s(points, load_of(battery) if load is None else load)
        return replace(
            battery,
            at_s=now_s,
            used=min(1.0, used + drain),
            gauge=_less(battery.gauge, drain),
            charged=_less(battery.charged, drain),
            low_left=_less(battery.low_left, drain),
            unflagged=_less(battery.unflagged, drain),
            left=_less(battery.left, drain),
        )
    return replace(battery, at_s=now_s, used=used)


def _less(term: float | None, drain: float) -> float | None:
    return None if term is None else term - drain if term > drain else 0.0


def _caught_up(policy: Policy, battery: Battery, feed: Feed, reading: Reading, *, drained: bool) -> Battery:
    """Bring the account up to this reading. A gap in the readings counts at the larger load of its two ends."""
    load, now_load = reported_load(policy, reading), load_of(battery)
    seen_at_s = battery.at_s if feed.previous is None else feed.previous.at_s
    if load is None or load <= now_load or reading.at_s - seen_at_s <= GAP_S or not (points := table(policy, battery)):
        return _reckoned(policy, battery, reading.at_s, draining=drained, load=None)
    if drained:
        # Ticks have counted part of the gap at the smaller load: that part counts again, for the difference.
        counted_s = max(0.0, battery.at_s - seen_at_s)
        share = 1.0 - tau_s(points, load) / tau_s(points, now_load)
        battery = replace(battery, at_s=battery.at_s - share * counted_s)
    return _reckoned(policy, battery, reading.at_s, draining=drained, load=load)


def _after_silence(policy: Policy, battery: Battery, feed: Feed, reading: Reading, *, drained: bool) -> Battery:
    """Take back what was counted in a silence and the gauges do not show, if no outage was seen before it.

    When the power failed in it is unknown, or whether it did. A source may have been silent for an hour, and the outage
    have just begun; or battery was presumed, and the UPS had utility.
    """
    last, points = feed.previous, table(policy, battery)
    if last is None or battery.used is None or battery.used_heard is None or not points:
        return battery
    if last.output_source is OutputSource.BATTERY and not (last.testing or last.calibrating):
        return battery
    tau_now_s, falls = tau_s(points, load_of(battery)), []
    if last.charge_pct is not None and reading.charge_pct is not None:
        falls.append((last.charge_pct - reading.charge_pct) / 100.0)
    if last.runtime_s is not None and reading.runtime_s is not None:
        falls.append((last.runtime_s - reading.runtime_s) / tau_now_s)
    taken = max(0.0, reading.at_s - battery.at_s) / tau_now_s if drained else 0.0
    most = battery.used_heard + max(0.0, *falls) + _AGREED if falls else math.inf
    if reading.output_source is OutputSource.BATTERY:
        most = max(most, battery.used)  # What was presumed was right, and a charge may stand at 100 % for minutes.
    if battery.used + taken <= most:
        return battery
    at_s = max(battery.at_s, reading.at_s)
    return replace(battery, at_s=at_s, used=most, gauge=None, charged=None, unflagged=None, left=None)


def enter(
    policy: Policy, battery: Battery, feed: Feed, reading: Reading, *, draining: bool, drained: bool | None = None
) -> Battery:
    """Enter one reading. `draining`: the battery carries the load, whatever the cause (an outage, a test).

    drained: it did so until now; None: as `draining`. What lies between a battery and a utility reading was battery.
    """
    drained = draining if drained is None else drained
    battery = _after_silence(policy, battery, feed, reading, drained=drained)
    load, before = reported_load(policy, reading), battery
    battery = _caught_up(policy, battery, feed, reading, drained=drained)
    used = battery.used
    if not draining and reading.output_source in UNREPORTED and before.used is not None:
        # No source reports a supply to recharge from.
        used = max(before.used, used or 0.0)
    averaged, step_at_s = _averaged(before, load, reading.at_s)
    charge = learning.charge_of(reading)
    health = learning.health(policy, battery.model, reading.at_s, replace_battery=reading.replace_battery)
    presumed, left, model = battery.presumed, _bound(battery), battery.model
    fell, away_charge = _fallen_while_away(battery, feed, charge)
    if charge is not None and (used is None or presumed):
        # A gauge that counts against the nameplate reports too much; only energy that was observed is certain.
        used = _begun(battery, health, charge, used, draining=draining)
        # A presumed charge gives no bound, and a discharge that began with it cannot measure the health.
        presumed, left, model = False, None, replace(model, discharge=None)
    elif used is None:
        used, presumed = PRESUMED * health, True
    elif charge is not None and not draining:
        # While the host was off there were no readings; the charge now bounds what that time can have put back.
        # One odd charge is a glitch: it counts for the past once a second reading repeats it.
        twice = max(charge, learning.charge_of(feed.previous) or 0.0)
        back = health * battery.away_s / learning.recharge_s(policy, battery.model)
        # The first charge after the host was off is compared with the one before it, at the second reading: what it
        # bounds now would be counted again then.
        shown = 0.0 if away_charge is not None else health * (1.0 - twice)
        used, fell = max(used - back + fell, shown, 0.0), 0.0
    used = min(1.0, used + fell)
    steady = step_at_s is None or reading.at_s - step_at_s >= SMOOTHING_S
    contradicted = draining and _is_contradicted(battery, reading, charge, used)
    if battery.contradicted and draining and charge is not None and charge < _STILL_FULL:
        # Only now the charge falls: it was full until now, and what was counted meanwhile was not taken out.
        used, left, model = min(used, health * (1.0 - charge)), None, replace(model, discharge=None)
    battery = replace(
        battery,
        contradicted=contradicted,
        at_s=max(reading.at_s, battery.at_s),
        used=used,
        used_heard=used,
        presumed=presumed,
        unflagged=left,
        left=None,
        away_s=0.0,
        away_charge=away_charge,
        # On battery a term that falls silent goes on by dead reckoning; on utility it is simply not known.
        charged=health * charge if charge is not None else battery.charged if draining else None,
        load=averaged,
        step_at_s=step_at_s,
        health=health,
        model=_learned(
            policy, before, model, feed, reading, draining=draining, used=used, load=averaged, steady=steady
        ),
    )
    battery = _reported_tau(policy, battery, feed, reading, charge, draining=draining)
    return _left(policy, before, battery, feed, reading, draining=draining)


def _averaged(battery: Battery, load: float | None, at_s: float) -> tuple[float | None, float | None]:
    """Return the load averaged over its steps, and when it last made one. load: of this reading."""
    if load is None or battery.load is None:
        return battery.load if load is None else load, battery.step_at_s
    if abs(load - battery.load) > LOAD_STEP:
        return load, at_s
    return battery.load + 0.2 * (load - battery.load), battery.step_at_s


def _reported_tau(
    policy: Policy, battery: Battery, feed: Feed, reading: Reading, charge: float | None, *, draining: bool
) -> Battery:
    """Learn the runtime of a full battery from a reported runtime, if the settings have no table.

    A figure on utility that the first readings on battery contradict many times over was never true (a counter at its
    ceiling). Taken for one, it would make the first true runtime look like an empty battery.
    """
    if policy.runtime_table or not reading.runtime_s:
        return battery
    point = (max(load_of(battery), LOAD_FLOOR), reading.runtime_s / (charge or 1.0))
    if not draining:
        return battery if learning.is_denied(policy, battery.model, *point) else replace(battery, tau_point=point)
    if battery.tau_point is None:
        return replace(battery, tau_point=point)
    before = feed.previous
    if not charge or not _has_just_begun(battery, reading, charge) or before is None or not before.runtime_s:
        return battery
    claimed_s = tau_s(table(policy, battery), point[0])
    if learning.MANY_TIMES * max(point[1], before.runtime_s / charge) > claimed_s:
        return battery
    model = replace(
        battery.model, points=(), denied=TauPoint(load=point[0], tau_s=point[1], at_s=reading.at_s), discharge=None
    )
    # The energy counted in shares of the wrong battery is unknown; it has been on battery for some seconds only.
    return replace(battery, tau_point=point, model=model, used=min(battery.used or 0.0, 1.0 - charge), unflagged=None)


def _has_just_begun(battery: Battery, reading: Reading, charge: float) -> bool:
    """Say whether little has been taken yet, by the charge: it is almost full, or as our account began with it."""
    began = battery.model.discharge
    if charge >= _ALMOST_FULL:
        return True
    as_counted = charge >= 1.0 - (battery.used or 0.0) / battery.health - _AGREED
    return began is not None and reading.at_s - began.since_s <= SMOOTHING_S and as_counted


def _begun(battery: Battery, health: float, charge: float, used: float | None, *, draining: bool) -> float:
    """Return the energy used, at the first charge that is reported: an upsd whose driver has just started reports none.

    used: as presumed until now, with what was drained since. On battery that part counts on, whatever the charge says.
    """
    reported_used = min(health, 1.0 - charge)
    return reported_used if used is None or not draining else max(reported_used, used - PRESUMED * battery.health)


def _is_contradicted(battery: Battery, reading: Reading, charge: float | None, used: float) -> bool:
    """Say whether the UPS reports battery and every other figure contradicts it: a third should be used, and none is.

    Its input is there, its charge is full, its runtime does not fall, and it reports no low battery. An inverter that
    reports battery permanently must not power the host off by the account, which rests on that report alone. It lasts
    until one of them says something else; the account goes on counting meanwhile, so that training is saved and paused
    in time.
    """
    if reading.input_present is not True or reading.low_battery or charge is None or charge < _STILL_FULL:
        return False
    began = battery.model.discharge
    if began is None or (reading.runtime_s is not None and (began.slope is None or began.slope >= _FALLS)):
        return False
    return used - began.used >= _DENIED_SHARE * battery.health


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
    model: BatteryModel,
    feed: Feed,
    reading: Reading,
    *,
    draining: bool,
    used: float,
    load: float | None,
    steady: bool,
) -> BatteryModel:
    """Learn from this reading. What a discharge has taught counts from the next reading on utility."""
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
    """Enter what is left: the smallest term, which never rises on battery, and what a low-battery flag permits."""
    points = table(policy, battery)
    if not points:
        return replace(battery, left=None, unflagged=None, gauge=None, low_left=None, suspect=None, higher_since_s=None)
    tau_now_s = tau_s(points, load_of(battery))
    gauge = battery.gauge
    smoothing = battery.step_at_s is not None and reading.at_s - battery.step_at_s < SMOOTHING_S
    lags = draining and smoothing and gauge is not None
    if reading.runtime_s is not None and reading.runtime_s >= 0.0 and not lags:
        gauge = reading.runtime_s / tau_now_s
    elif not draining:
        gauge = None
    low_left = None
    if draining and feed.low_battery_at_s is not None:
        seconds = max(0.0, policy.low_battery_s - (reading.at_s - feed.low_battery_at_s))
        low_left = seconds / tau_now_s if battery.low_left is None else battery.low_left
    own = battery.health - (battery.used or 0.0)
    left, suspect, higher_since_s = max(0.0, min(_known_terms(own, gauge, battery.charged))), None, None
    fell_at_s = battery.fell_at_s if draining else None
    bound = _bound(before)
    if draining and bound is not None and battery.unflagged is not None:
        # A fall faster than the load explains counts only when the next reading repeats it: gauges glitch.
        allowed = bound - _PHYSICS * (reading.at_s - before.at_s) / tau_now_s - _GRAIN
        if left < allowed and (battery.suspect is None or left > battery.suspect + _GRAIN):
            left, suspect = battery.unflagged, left
        elif left < allowed:
            fell_at_s = reading.at_s
        if left > battery.unflagged + _AGREED and None not in (reading.runtime_s, reading.charge_pct):
            higher_since_s = reading.at_s if battery.higher_since_s is None else battery.higher_since_s
        if higher_since_s is None or reading.at_s - higher_since_s < AGREED_S:
            left = min(left, battery.unflagged)
    unflagged = left
    # Two readings have reported low battery already: the runtime that it permits needs no third.
    if low_left is not None and not _low_battery_is_doubted(battery, reading, low_left, tau_now_s):
        left = min(left, low_left)
    if suspect is None:
        battery = replace(battery, gauge=gauge)
    else:
        # A silent reading must not repeat by dead reckoning what only one has said.
        reckoned = _caught_up(policy, before, feed, reading, drained=draining)
        battery = replace(battery, gauge=reckoned.gauge, charged=reckoned.charged)
    return replace(
        battery,
        low_left=low_left,
        left=left,
        unflagged=unflagged,
        suspect=suspect,
        fell_at_s=fell_at_s,
        higher_since_s=higher_since_s,
    )


def _bound(battery: Battery) -> float | None:
    """Return the energy left without a low-battery flag; a state without that figure has it in `left`."""
    return battery.left if battery.unflagged is None else battery.unflagged


def _known_terms(*terms: float | None) -> list[float]:
    return [term for term in terms if term is not None]


def _low_battery_is_doubted(battery: Battery, reading: Reading, low_left: float, tau_now_s: float) -> bool:
    """Charge, reported runtime and our own account all contradict a low-battery flag clearly."""
    own = battery.health - (battery.used or 0.0)
    reported = -1.0 if reading.runtime_s is None else reading.runtime_s / tau_now_s
    charged = reading.charge_pct is not None and reading.charge_pct >= 50.0
    return charged and reported > 2 * low_left and own > 2 * low_left
