"""What is learned of a battery: its health, measured by its discharges and not taken from the UPS, and its runtimes.

A discharge shows the health in two ways. A charge that falls by D while the account gives out E says E / D: honest
where the gauge counts against what the battery holds, always about 1 where it counts against the nameplate. So a high
figure is believed only as far as the discharge has really gone, or when a low-battery flag came where the gauge said
that it would; a low one always. A flag that came while the gauge still promised much is the battery's own word for
its end: what it has given by then is what it holds.

What the UPS *reports* (runtime) is an upper bound only, and never raises a figure here.
"""

from dataclasses import replace

from powerguard.core.model.events import Reading
from powerguard.core.model.policy import BatteryModel, Discharge, Health, Policy, Recharge, TauPoint

YEAR_S = 365.25 * 86400.0
EXPIRES_S = YEAR_S
"""A measured health expires after this time: the default holds again (docs/decisions/0049)."""
AGING = 0.10
"""Points of health that are lost in a year."""
DEPTH = 0.25
"""Least energy of a discharge that says anything about health, as a share of a full new battery."""
MANY_TIMES = 5.0
"""A runtime on utility this many times that of the first readings on battery was false."""
STEEP = 1.5
"""Seconds of reported runtime that go by in one second, above which the runtime was a fiction."""
SLOPE_WINDOW_S = 120.0
"""Some UPSes report whole minutes, so their slope is taken over two of them."""
_SHORT_WINDOW_S = 30.0
"""The others show it sooner: a battery of six minutes would be half empty by then."""
_TABLE_ERROR = 0.02
_KNEE_ERROR = 0.05
_GAUGE_GRAIN = 0.015
_LEAST_FALL = 0.2
"""From here on, a gauge of whole percents is off by less than ten points."""
_FULL_CHARGE = 0.9
_LONGEST_GAP_S = 30.0
"""Longer than this without a reading, and the account of a discharge is a guess."""
_BIN = 0.05
_RECHARGE_DEPTH = 0.2
_SHORTEST_RECHARGE_S, _LONGEST_RECHARGE_S = 3600.0, 72 * 3600.0


def health(policy: Policy, model: BatteryModel, now_s: float, *, replace_battery: bool) -> float:
    """Return the share to count with: measured and aged, else the default; the lower one if the UPS wants a new one.

    A lower bound counts if it is above the default; below, it does not contradict the default.
    """
    presumed = min(policy.health, policy.health_replace) if replace_battery else policy.health
    measured = aged(model, now_s)
    if measured is None or (model.health is not None and model.health.least and measured < presumed):
        return presumed
    return min(measured, presumed) if replace_battery else measured


def aged(model: BatteryModel, now_s: float) -> float | None:
    """Return the measured health less what the time since has taken; None where there is none, or it has expired."""
    if model.health is None:
        return None
    age_s = max(0.0, now_s - model.health.at_s)
    return None if age_s > EXPIRES_S else max(0.0, model.health.share - AGING * age_s / YEAR_S)


def table(
    policy: Policy, model: BatteryModel, now_point: tuple[float, float] | None
) -> tuple[tuple[float, float], ...]:
    """Return (load, seconds) of a full battery: of the settings, else as learned, else the one point of now.

    If only reports of the UPS are known, a larger load never lasts longer, although the reports may say so.
    """
    if policy.runtime_table:
        return policy.runtime_table
    points = {point.load: point.tau_s for point in model.points}
    if now_point is not None:
        near = [load for load in points if abs(load - now_point[0]) < _BIN]
        for load in near:
            del points[load]
        points[now_point[0]] = now_point[1]
    found: list[tuple[float, float]] = []
    for load in sorted(points):
        found.append((load, points[load] if not found else min(points[load], found[-1][1])))
    return tuple(found)


def recharge_s(policy: Policy, model: BatteryModel) -> float:
    """Seconds from empty to full: as measured, else as the settings say."""
    return policy.recharge_s if model.recharge_s is None else model.recharge_s


def shifted(model: BatteryModel, shift_s: float) -> BatteryModel:
    """Move every time into the clock of another boot. What was going on has ended unwatched."""
    return replace(
        model,
        health=None if model.health is None else replace(model.health, at_s=model.health.at_s + shift_s),
        points=tuple(replace(point, at_s=point.at_s + shift_s) for point in model.points),
        denied=None if model.denied is None else replace(model.denied, at_s=model.denied.at_s + shift_s),
        discharge=None,
        recharge=None if model.recharge is None else replace(model.recharge, since_s=model.recharge.since_s + shift_s),
        replaced_at_s=None if model.replaced_at_s is None else model.replaced_at_s + shift_s,
    )


# --- Learning ---------------------------------------------------------------------------------------------------


def learn_on_utility(
    policy: Policy, model: BatteryModel, reading: Reading, *, load: float | None, settled: bool, used: float
) -> BatteryModel:
    """Enter a reading on utility: what a full battery would last at this load, and how far it is charged again.

    load: averaged share of the rating. settled: no step of the load lately. used: our account when the discharge that
    may just have ended did so.
    """
    charge = charge_of(reading)
    if model.discharge is not None:
        ended = _ended(policy, model, used, reading.at_s)
        started = Recharge(since_s=reading.at_s, charge=charge) if charge is not None else None
        model = replace(model, health=ended, discharge=None, recharge=started)
    elif model.recharge is not None and charge is not None and charge >= _FULL_CHARGE:
        model = replace(model, recharge_s=_recharged(model, charge, reading.at_s), recharge=None)
    if load is not None and settled and charge is not None and charge >= _FULL_CHARGE and reading.runtime_s:
        reported_s = reading.runtime_s / charge
        if not is_denied(policy, model, load, reported_s):
            model = _with_point(model, load, reported_s, reading.at_s)
    return model


def is_denied(policy: Policy, model: BatteryModel, load: float, reported_s: float) -> bool:
    """Say whether an earlier outage has shown that a full battery lasts far less than `reported_s` at this load."""
    if policy.runtime_table or model.denied is None:
        return False
    most_s = MANY_TIMES * model.denied.tau_s
    return reported_s > most_s and reported_s * load > most_s * model.denied.load


def learn_on_battery(
    policy: Policy, model: BatteryModel, reading: Reading, *, used: float, gap_s: float, steady: bool, low: bool
) -> BatteryModel:
    """Enter a reading of a discharge. used: our account; gap_s: time since the last reading.

    steady: the load has made no step lately, so that the fall of the reported runtime is meaningful. low: the UPS
    has called its battery low, twice.
    """
    charge, old = charge_of(reading), model.discharge
    if old is None:
        # The charge of this reading is the one to start from: the account starts from it as well.
        started = Discharge(
            since_s=reading.at_s,
            used=used,
            charge=charge,
            charge_now=charge,
            mark_at_s=reading.at_s,
            mark_runtime_s=reading.runtime_s,
        )
        return replace(model, discharge=started, recharge=None)
    knee, mark_at_s, mark_runtime_s, slope = old.knee, old.mark_at_s, old.mark_runtime_s, old.slope
    if low and not old.low:
        promised = reading.runtime_s is not None and reading.runtime_s > 2.0 * policy.low_battery_s
        knee = promised and used - old.used >= DEPTH
    if not steady or reading.runtime_s is None or mark_runtime_s is None:
        mark_at_s, mark_runtime_s = reading.at_s, reading.runtime_s
    elif reading.at_s - mark_at_s >= _slope_window_s(mark_runtime_s, reading.runtime_s):
        slope = (mark_runtime_s - reading.runtime_s) / (reading.at_s - mark_at_s)
        mark_at_s, mark_runtime_s = reading.at_s, reading.runtime_s
    whole = old.whole and gap_s <= _LONGEST_GAP_S and used < 1.0
    observed = (whole, old.low or low, knee, slope, mark_at_s, mark_runtime_s)
    if observed != (old.whole, old.low, old.knee, old.slope, old.mark_at_s, old.mark_runtime_s):
        old = replace(
            old,
            whole=whole,
            low=old.low or low,
            knee=knee,
            slope=slope,
            mark_at_s=mark_at_s,
            mark_runtime_s=mark_runtime_s,
        )
    if charge is not None and charge != old.charge_now:
        old = replace(old, charge_now=charge)
    return model if old is model.discharge else replace(model, discharge=old)


def _slope_window_s(then_s: float, now_s: float) -> float:
    coarse = then_s % 60.0 == 0.0 and now_s % 60.0 == 0.0
    return SLOPE_WINDOW_S if coarse else _SHORT_WINDOW_S


def charge_of(reading: Reading | None) -> float | None:
    """Charge of a reading as a share; None where there is none."""
    charge_pct = None if reading is None else reading.charge_pct
    return charge_pct / 100.0 if charge_pct is not None and 0.0 <= charge_pct <= 100.0 else None


def ended_by_power_off(
    policy: Policy, model: BatteryModel, used: float | None, at_s: float, seen_at_s: float | None
) -> BatteryModel:
    """Judge the discharge in which the host was powered off, by its last account. at_s: when that was.

    The deepest discharges end so. What the battery gave after the last account is not known, so it has given at least
    this much. seen_at_s: the last reading; an account without readings is a guess and measures no health.
    """
    if model.discharge is None or used is None:
        return model
    if seen_at_s is None or at_s - seen_at_s > _LONGEST_GAP_S:
        return replace(model, discharge=None)
    return replace(model, health=_ended(policy, model, used, at_s), discharge=None)


def _ended(policy: Policy, model: BatteryModel, used: float, at_s: float) -> Health | None:
    """Return the health after a discharge: measured, or unchanged if this one was too shallow."""
    discharge = model.discharge
    if discharge is None or not discharge.whole:
        return model.health
    depth = used - discharge.used
    if depth < DEPTH:
        return model.health
    known = aged(model, at_s) or 0.0
    found = _by_knee(discharge, depth) or _by_charge(policy, discharge, depth, max(policy.health, known))
    if found is None and discharge.charge and depth / discharge.charge > policy.health:
        found = depth / discharge.charge, _TABLE_ERROR, "energy that it gave", True
    if found is None:
        return model.health
    share, error, how, least = found
    if least and model.health is not None and known > 0.0:
        # A bound that does not count does not take the place of a measurement that does, even of a lower one.
        stands = known if model.health.least else max(known, policy.health)
        if share <= stands:
            return model.health
    return Health(share=min(1.0, share), error=error, depth=depth, at_s=at_s, how=how, least=least)


_Found = tuple[float, float, str, bool]  # share, error, how, least


def _by_knee(discharge: Discharge, depth: float) -> _Found | None:
    """The battery was near its end while its gauge reported more: it holds what it gave."""
    if not discharge.knee or not discharge.charge:
        return None
    return depth / discharge.charge, _KNEE_ERROR, "discharge to low battery", False


def _by_charge(policy: Policy, discharge: Discharge, depth: float, known: float) -> _Found | None:
    """The charge fell by so much for so much energy. Believed upward only as far as the discharge has gone.

    known: the health that counted until now.
    """
    if not discharge.charge or discharge.charge_now is None:
        return None
    fallen = discharge.charge - discharge.charge_now
    if fallen < _LEAST_FALL:
        return None
    share = depth / fallen
    error = _TABLE_ERROR + _GAUGE_GRAIN / fallen
    if discharge.low:
        return share, error, "fall of the charge to low battery", False
    shown = depth / discharge.charge + policy.floor
    if share > max(known, shown):
        return shown, error, "fall of the charge", True
    return share, error, "fall of the charge", False


def _recharged(model: BatteryModel, charge: float, at_s: float) -> float | None:
    recharge = model.recharge
    if recharge is None or charge - recharge.charge < _RECHARGE_DEPTH:
        return model.recharge_s
    took_s = (at_s - recharge.since_s) / (charge - recharge.charge)
    return min(max(took_s, _SHORTEST_RECHARGE_S), _LONGEST_RECHARGE_S)


def _with_point(model: BatteryModel, load: float, tau_s: float, at_s: float) -> BatteryModel:
    """Keep points 5 % of load apart, renewed when one has changed, or once a day.

    Between two that are nearer, the slope would come from runtimes that are rounded to minutes, or from a battery that
    has aged since.
    """
    near = [point for point in model.points if abs(point.load - load) < _BIN]
    known = min(near, key=lambda point: abs(point.load - load), default=None)
    if known is not None and abs(known.tau_s - tau_s) <= 0.02 * known.tau_s and at_s - known.at_s < 86400.0:
        return model
    fresh = TauPoint(load=load, tau_s=tau_s, at_s=at_s)
    others = (point for point in model.points if point not in near and at_s - point.at_s < YEAR_S)
    return replace(model, points=tuple(sorted((*others, fresh), key=lambda point: point.load)))
