"""What a stored state may say: what cannot be true is dropped from it, by name, and the rest stays.

A journal is a file: it can be old, of another hand, or wrong in one number. One bad number must not cost an outage its
latch.
"""

import math
from dataclasses import replace

from powerguard.core.comeback import methods, unseen
from powerguard.core.energy import needs
from powerguard.core.model.policy import BatteryModel, Drop, Learned, Need
from powerguard.core.model.state import (
    Armed,
    Battery,
    NodeMarked,
    Obligation,
    Online,
    Phase,
    State,
    Supplied,
    TemporaryPolicy,
    UnseenStop,
    Watch,
)

LONGEST_TAU_S = 7 * 86400.0
_SHORTEST_RECHARGE_S, _LONGEST_RECHARGE_S = 600.0, 30 * 86400.0
_MOST_LOAD = 2.0
_MOST_SPEED = 2.0
_AHEAD_S = 60.0
"""How far a stored time may lie after the newest entry: clocks of one boot do not jump, entries are a little late."""

_LONGEST_AHEAD_S = 30 * 86400.0
BOOTS_KEPT = 16
_MOST_ARMED = 32
"""Three methods, and an output of each UPS that feeds one host."""

Drops = list[str]


def validated(state: State, at_s: float) -> tuple[State, tuple[str, ...]]:
    """Return the state without what cannot be true, and the names of what was dropped. at_s: when it was stored."""
    dropped: Drops = []
    latest_s = at_s + _AHEAD_S
    own = tuple(each for each in state.own if each.at_s <= latest_s and each.since_s <= each.at_s)
    if len(own) < len(state.own):
        dropped.append("own")
    return (
        replace(
            state,
            own=own,
            phase=_phase(state.phase, latest_s, dropped),
            owed=_owed(state.owed, at_s, latest_s, dropped),
            battery=_battery(state.battery, "", latest_s, dropped),
            upses=tuple(_supplied(each, latest_s, dropped) for each in state.upses),
            learned=_learned(state.learned, latest_s, dropped),
            unseen=_unseen(state.unseen, latest_s, dropped),
        ),
        tuple(dropped),
    )


def _phase(phase: Phase, latest_s: float, dropped: Drops) -> Phase:
    if isinstance(phase, Online):
        return phase
    outage = phase.outage
    boots = tuple(each for each in outage.boots if -math.inf < each <= latest_s)[-BOOTS_KEPT:]
    back_off_s = outage.back_off_s if _within(outage.back_off_s, 0.0, methods.MOST_BACK_OFF_S) else 0.0
    if boots != outage.boots:
        dropped.append("outage.boots")
    if back_off_s != outage.back_off_s:
        dropped.append("outage.back_off_s")
    kept = replace(outage, boots=boots, back_off_s=back_off_s)
    return phase if kept == outage else replace(phase, outage=kept)


def _unseen(stop: UnseenStop | None, latest_s: float, dropped: Drops) -> UnseenStop | None:
    if stop is None:
        return None
    are_past = all(-math.inf < each <= latest_s for each in (stop.down_at_s, *stop.boots))
    if are_past and stop.at_risk_s >= 0.0 and (stop.by_s or 0.0) <= latest_s + unseen.REPORT_LIMIT_S:
        return stop
    dropped.append("unseen")
    return None


def _owed(owed: tuple[Obligation, ...], at_s: float, latest_s: float, dropped: Drops) -> tuple[Obligation, ...]:
    """What is owed stays owed, whatever else is wrong with it: it loses its times only. Of two the later counts."""
    kept: dict[tuple[str, ...], Obligation] = {}
    room = _MOST_ARMED
    if sum(isinstance(each, Armed) for each in owed) > room:
        dropped.append("armed")
    for each in owed:
        place = (type(each).__name__, *each.key)
        sound = each
        if isinstance(each, Armed):
            room -= 1
            if room < 0:
                continue
            # Each vain order to disarm moves at_s, for months perhaps: how long ago it would have acted has no limit.
            is_time = each.at_s <= latest_s and -math.inf < each.acts_at_s <= each.at_s + _LONGEST_AHEAD_S
            sound = each if is_time else replace(each, at_s=at_s, acts_at_s=at_s)
            if place in kept or not is_time:
                dropped.append(f"armed.{each.method}")
        elif isinstance(each, TemporaryPolicy | NodeMarked) and each.retry_at_s > latest_s + methods.RESTORE_AGAIN_S:
            sound = replace(each, retry_at_s=0.0)
            dropped.append(f"{'node_marked' if isinstance(each, NodeMarked) else 'temporary_policy'}.retry_at_s")
        kept[place] = sound
    return tuple(kept.values())


def _supplied(each: Supplied, latest_s: float, dropped: Drops) -> Supplied:
    watch = each.watch
    if watch is not None and not _is_watch(watch, latest_s):
        dropped.append(f"{each.ups}.watch")
        watch = None
    return replace(each, battery=_battery(each.battery, f"{each.ups}.", latest_s, dropped), watch=watch)


def _is_watch(watch: Watch, latest_s: float) -> bool:
    loads = all(0.0 < one.share < math.inf and 0.0 < one.least <= _MOST_LOAD for one in watch.others)
    loads = loads and 0.0 < watch.load <= _MOST_LOAD
    return bool(watch.others) and loads and watch.spent >= 0.0 and (watch.counted_s or 0.0) <= latest_s


def _within(value: float | None, least: float, most: float) -> bool:
    return value is None or least <= value <= most


def _battery(battery: Battery, where: str, latest_s: float, dropped: Drops) -> Battery:
    """Keep an account whose shares are shares; the model apart, each figure falls alone."""
    bounds = {
        "used": (0.0, 1.0),
        "used_heard": (0.0, 1.0),
        "gauge": (0.0, 1e4),
        "charged": (0.0, 1.0),
        "left": (0.0, 1.0),
        "load": (0.0, _MOST_LOAD),
        "low_left": (0.0, 1e4),
        "unflagged": (0.0, 1.0),
        "suspect": (0.0, 1.0),
        "away_charge": (0.0, 1.0),
    }
    wrong = [name for name, (least, most) in bounds.items() if not _within(getattr(battery, name), least, most)]
    changes: dict[str, object] = dict.fromkeys(wrong)
    if not 0.0 <= battery.health <= 1.0:
        changes["health"] = Battery().health
        wrong.append("health")
    if battery.higher_since_s is not None and battery.higher_since_s > latest_s:
        changes["higher_since_s"] = None
        wrong.append("higher_since_s")
    point = battery.tau_point
    if point is not None and not (_within(point[0], 0.0, _MOST_LOAD) and _within(point[1], 1.0, LONGEST_TAU_S)):
        changes["tau_point"] = None
        wrong.append("tau_point")
    if any(not (0.0 < load <= 2.0 * _MOST_LOAD and tau_s > 0.0) for load, tau_s in battery.composed):
        changes["composed"] = ()
        wrong.append("composed")
    dropped += [f"{where}battery.{name}" for name in wrong]
    model = _model(battery.model, f"{where}battery.", latest_s, dropped)
    return replace(battery, model=model, **changes)  # type: ignore[arg-type]


def _model(model: BatteryModel, where: str, latest_s: float, dropped: Drops) -> BatteryModel:
    changes: dict[str, object] = {}
    health, discharge = model.health, model.discharge
    if health is not None and not (
        0.0 < health.share <= 1.0
        and 0.0 <= health.error <= 1.0
        and 0.0 <= health.depth <= 1.0
        and health.at_s <= latest_s
    ):
        changes["health"] = None
    points = tuple(p for p in model.points if 0.0 < p.load <= _MOST_LOAD and 1.0 <= p.tau_s <= LONGEST_TAU_S)
    if points != model.points:
        changes["points"] = points
    denied = model.denied
    if denied is not None and not (0.0 < denied.load <= _MOST_LOAD and 1.0 <= denied.tau_s <= LONGEST_TAU_S):
        changes["denied"] = None
    if not _within(model.recharge_s, _SHORTEST_RECHARGE_S, _LONGEST_RECHARGE_S):
        changes["recharge_s"] = None
    if discharge is not None and not (
        0.0 <= discharge.used <= 1.0
        and _within(discharge.charge, 0.0, 1.0)
        and _within(discharge.charge_now, 0.0, 1.0)
        and discharge.since_s <= latest_s
    ):
        changes["discharge"] = None
    if model.recharge is not None and not (0.0 <= model.recharge.charge <= 1.0 and model.recharge.since_s <= latest_s):
        changes["recharge"] = None
    if model.replaced_at_s is not None and model.replaced_at_s > latest_s:
        changes["replaced_at_s"] = None
    dropped += [f"{where}{name}" for name in changes]
    return replace(model, **changes) if changes else model  # type: ignore[arg-type]


def _learned(learned: Learned, latest_s: float, dropped: Drops) -> Learned:
    found: list[Need] = []
    for need in learned.needs:
        seconds = tuple(each for each in need.seconds if 0.0 < each <= needs.LONGEST_S)
        if need.of not in needs.NEEDS or len(seconds) < len(need.seconds):
            dropped.append(f"learned.needs.{need.of}")
        if need.of in needs.NEEDS and seconds:
            found.append(replace(need, seconds=seconds[-needs.KEPT :]))
    pauses = tuple(pair for pair in learned.pauses if _is_drop(pair[1], latest_s))
    if len(pauses) < len(learned.pauses):
        dropped.append("learned.pauses")
    cap = learned.cap
    if cap is not None and not _is_drop(cap, latest_s):
        dropped.append("learned.cap")
        cap = None
    return replace(learned, needs=tuple(found), pauses=pauses, cap=cap)


def _is_drop(drop: Drop, latest_s: float) -> bool:
    return 0.0 <= drop.after <= drop.before <= _MOST_LOAD and 0.0 <= drop.speed <= _MOST_SPEED and drop.at_s <= latest_s
