"""Every term of the budget by name: value, unit, and where it comes from. What `powerguard plan` prints.

Where each learned number comes from, in words: the same for `plan`, `battery`, `status` and metrics.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from powerguard.core.decide import conditions
from powerguard.core.energy import budget, learning, needs
from powerguard.core.energy.budget import PAUSE_FREES, Budget, presumed_share
from powerguard.core.energy.own import Own
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.events import OwnSource, Reading
from powerguard.core.model.policy import Health, Learned, Policy
from powerguard.core.model.state import Battery, State, Trainer
from powerguard.core.supply.feeds import each_alone
from powerguard.daemon.observe.port import Daemon

Wall = Callable[[float | None], float | None]
"""Turns a moment of this boot's clock into Unix seconds."""

PRESUMED: Final = {
    "settings": "budget.health of the settings",
    "default": "assumed, because no discharge has measured it",
    "battery_old": "default for a battery older than 3 years (battery_installed)",
    "replace_battery": "the UPS asks for a new battery",
}
"""Origins of a presumed health; a measured one is "measured"."""


def day(unix_s: float | None) -> str:
    """Return the day of a moment in local time; "?" when there is none."""
    if unix_s is None:
        return "?"
    try:
        return time.strftime("%Y-%m-%d", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return "?"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100.0 * share:.0f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthView:
    """The health that counts. origin: "measured", or a word of PRESUMED; because: the same in words.

    presumed: the value without a measurement. aged: the measured share less its aging since; None if there is none, or
    if it has expired.
    """

    share: float
    origin: str
    because: str
    presumed: float
    aged: float | None


def health_view(policy: Policy, state: State, now_s: float, at: Wall) -> HealthView:
    """Return the origin of the health that counts now: by the rules of `battery.health`; of several UPSes, of each."""
    alone = [
        (own_policy.ups, health_view(own_policy, of, now_s, at))
        for own_policy, of in each_alone(policy, state)
        if policy.feeds
    ]
    if alone:
        origin = next((view.origin for _, view in alone if view.origin != "measured"), "measured")
        because = "; ".join(f"{ups} {percent(view.share)}, {view.because}" for ups, view in alone)
        because = alone[0][1].because if len({view.because for _, view in alone}) == 1 else because
        return HealthView(share=state.battery.health, origin=origin, because=because, presumed=policy.health, aged=None)
    reading = state.feed.reading
    presumed, origin = policy.health, policy.health_from
    if reading is not None and reading.replace_battery and policy.health_replace < policy.health:
        presumed, origin = policy.health_replace, "replace_battery"
    health, aged = state.battery.model.health, learning.aged(state.battery.model, now_s)
    because = PRESUMED[origin]
    if health is not None and health.least and aged is not None and aged < presumed:
        shown = f"at least {percent(health.share)}, {percent(health.depth)} deep"
        because += f"; the discharge of {day(at(health.at_s))} shows {shown}, and does not contradict it"
    elif health is not None and aged is not None and (origin != "replace_battery" or aged <= presumed):
        origin, because = "measured", _measured(health, aged, at)
    elif health is not None and aged is None:
        because += f"; the measurement of {day(at(health.at_s))} has expired (12 months)"
    elif health is not None:
        because += f"; measured {percent(health.share)} on {day(at(health.at_s))} does not raise it"
    return HealthView(share=state.battery.health, origin=origin, because=because, presumed=presumed, aged=aged)


def _measured(health: Health, aged: float, at: Wall) -> str:
    decline = f", {100.0 * (health.share - aged):.1f} points off since" if health.share - aged >= 0.0005 else ""
    error = f"+-{100.0 * health.error:.0f} points"
    share = f"at least {percent(health.share)}" if health.least else f"{percent(health.share)} {error}"
    return f"measured {day(at(health.at_s))}: {share}{decline}, {percent(health.depth)} deep, by the {health.how}"


def tau_from(policy: Policy, state: State) -> str:
    """Return the origin of the runtime by load."""
    if policy.table_origin == "nameplate":
        return "made from battery_wh and rating_w of the settings, cautiously (no runtime_table)"
    if policy.runtime_table:
        return f"runtime_table of the settings ({_count(len(policy.runtime_table), 'point')})"
    learned = len(state.battery.model.points)
    if learned:
        return f"learned, {_count(learned, 'point')}: the UPS's runtime / charge on utility (no runtime_table)"
    if state.battery.tau_point is not None:
        return "reported runtime / charge on utility (no runtime_table)"
    return "unknown: no runtime_table, no reported runtime"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def recharge_from(state: State) -> str:
    """Return the origin of the recharge time: "learned" or "settings"."""
    return "settings" if state.battery.model.recharge_s is None else "learned"


def presumed_from(policy: Policy, state: State) -> str:
    """Say what `budget.presumed_share` rests on."""
    part = state.learned.gpu_share
    if policy.paused_is_set or part is None:
        return "settings" if policy.paused_is_set else "default of budget.paused_load"
    return f"GPUs draw {percent(part)} of this host's load, a pause frees {percent(PAUSE_FREES)} of that"


def paused_from(policy: Policy, state: State, now: Budget, at: Wall) -> str:
    """Say what the predicted load of a pause rests on: by the rules of `budget.paused_load`."""
    able = [t for t in state.trainers if t.alive and t.conduct is not Conduct.CONTINUE]
    if not able:
        return "load_now: no living trainer pauses"
    pausing = [t for t in able if not (t.paused or t.pause_ordered)]
    drops = {t.name: needs.drop_of(state.learned, t.name) for t in pausing}
    presumed = presumed_share(policy, state.learned)
    fell = [presumed < 1.0 if drop is None else drop.after < drop.before for drop in drops.values()]
    if not pausing or (now.load_paused == now.load_now and any(fell)):
        return "load_now: training is paused already"
    unseen = [name for name, drop in drops.items() if drop is None or drop.before <= 0.0]
    origin = presumed_from(policy, state)
    if unseen and now.own is not None:
        left = 1.0 - presumed
        return f"load_now - {left:.3g} x load_own ({origin}; {', '.join(drops)} pause); the other hosts as now"
    if unseen:
        why = "" if len(unseen) == len(drops) else f"; {', '.join(unseen)} with no measured pause"
        return f"load_now x {presumed:.3g} ({origin}; {', '.join(drops)} pause{why})"
    measured = [
        f"{name} {percent(drop.before)} -> {percent(drop.after)} on {day(at(drop.at_s))}"
        for name, drop in drops.items()
        if drop is not None
    ]
    return f"measured drop of {'; '.join(measured)}"


OWN_WORDS: Final = {
    OwnSource.BMC: "the BMC's power reading",
    OwnSource.PDU: "the PDU's outlets that feed this host",
    OwnSource.GPU: "the GPUs' power and the rest of the host",
    OwnSource.SETTINGS: "shared.own_w of the settings",
    OwnSource.HOSTS: "load_now / shared.hosts of the settings",
    OwnSource.UNKNOWN: "not known: no drop of the load is counted on",
}


def own_from(own: Own, now_s: float) -> str:
    """Say what this host's own load rests on, how old that is, and what was passed over."""
    watts = "" if own.watts is None else f"{own.watts:.0f} W, "
    age = "" if own.at_s is None else f", {max(0.0, now_s - own.at_s):.0f} s ago"
    over = "".join(f"; {source} passed over ({why})" for source, why in own.passed_over)
    return f"{watts}{OWN_WORDS[own.source]}{age}{over}"


def shed_from(policy: Policy) -> str:
    """Say how the extra reserve of this host's tier is made up."""
    shed = policy.shed
    if shed is None or shed.extra_s is not None:
        return "shed.extra_reserve_s of the settings"
    above = shed.highest - shed.tier
    return f"tier {shed.tier}: {_count(above, 'tier')} above, each one stop of {budget.shed_step_s(policy):.0f} s"


def checkpoint_from(policy: Policy, learned: Learned, trainer: Trainer) -> str:
    """Say where the time of a trainer's next checkpoint comes from: by the rules of `needs.checkpoint_s`."""
    known = needs.samples(learned, "checkpoint", trainer.name)
    if known and trainer.checkpoint_s == needs.q95(known):
        return f"q95 of {len(known)} measured"
    few = f", more than {len(known)} measured" if known else ""
    if trainer.reported_s is not None:
        return f"reported by the trainer{few}"
    if any(t.name == trainer.name for t in policy.trainers):
        return f"settings: checkpoint_s, else twice size over bandwidth{few}"
    return f"default: neither the trainer nor the settings have it{few}"


def stop_from(policy: Policy, learned: Learned, grade: Grade) -> str:
    """Say where the time of the host's stop comes from: by the rules of `needs.fold`."""
    word = "median" if grade is Grade.SHORT else "q95"
    measured = len(needs.samples(learned, "stop"))
    if policy.stop_is_set:
        return f"settings: budget.stop_{word}_s"
    if measured >= needs.ENOUGH:
        return f"{word} of {measured} measured stops, at most force_after_s"
    short = f"{measured} of the {needs.ENOUGH} stops measured that it takes"
    return f"default ({short})" if grade is Grade.SHORT else f"host.force_after_s ({short})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One number of the budget. value: None when not known. unit: "s", "share", "pct" or "word". source: in words."""

    name: str
    value: float | str | bool | None
    unit: str
    source: str


def terms(daemon: Daemon, now: Budget) -> tuple[Term, ...]:
    """Return the terms in the order in which the sums are made."""
    policy, state = daemon.policy, daemon.state
    wall_s = daemon.wall()

    def at(at_s: float | None) -> float | None:
        return None if at_s is None else wall_s + at_s - now.now_s

    return (
        *_loads(policy, state, now, at),
        *_energy(policy, state, now, at),
        *_runtimes(policy, state, now),
        *_needs(policy, state, now),
        Term(name="need_s", value=_round(now.need_s), unit="s", source="checkpoint_s + stop_s"),
        *([] if policy.shed is None else [_seconds("shed_s", now.shed_s, shed_from(policy))]),
        Term(
            name="slack_s",
            value=_round(now.slack_s),
            unit="s",
            source="reff_paused_s - need_s" + (" - shed_s" if policy.shed is not None else ""),
        ),
        Term(name="fits", value=now.fits, unit="word", source="need_s <= 0.75 reff_paused_s"),
    )


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _seconds(name: str, value: float | None, source: str) -> Term:
    return Term(name=name, value=_round(value), unit="s", source=source)


def _share(name: str, value: float | None, source: str) -> Term:
    return Term(name=name, value=_round(value), unit="share", source=source)


def _reported_by(reading: Reading | None, field: str) -> str:
    """Name the object of the protocol of a field, if the source reports it."""
    if reading is None:
        return "not reported yet"
    of = dict(reading.provenance).get(field)
    return f"{reading.source} {of}" if of else reading.source


def _mean(state: State, of: Callable[[Battery], float | None]) -> str:
    """Name the value of each of several UPSes, of which a term is the mean."""
    shares = [(each.ups, of(each.battery)) for each in state.upses]
    reports = ", ".join(f"{ups} {'?' if share is None else percent(share)}" for ups, share in shares)
    return f"mean by power supplies: {reports}"


def _loads(policy: Policy, state: State, now: Budget, at: Wall) -> tuple[Term, ...]:
    reading = state.feed.reading
    by_watts = reading is not None and reading.load_pct is None and reading.watts is not None
    source = _reported_by(reading, "watts" if by_watts else "load_pct") + (" / rating_w" if by_watts else "")
    source_now = f"{source}, averaged" if state.battery.load is not None else "not reported: counted as full"
    if policy.feeds:
        source_now = _mean(state, lambda battery: battery.load)
    own = () if now.own is None else (_share("load_own", now.own.load, own_from(now.own, now.now_s)),)
    waits = conditions.awaits_training(state)
    paused = "load_now: nothing to pause, training is not started yet" if waits else paused_from(policy, state, now, at)
    return (
        _share("load_now", now.load_now, source_now),
        *own,
        _share("load_paused", now.load_paused, paused),
    )


def _energy(policy: Policy, state: State, now: Budget, at: Wall) -> tuple[Term, ...]:
    reading, battery = state.feed.reading, state.battery
    health = health_view(policy, state, now.now_s, at).because
    charge, runtime = (_reported_by(reading, field) for field in ("charge_pct", "runtime_s"))
    left = "the smallest of the three"
    if policy.feeds:
        charge = runtime = "each UPS has its own"
        left = _mean(state, lambda battery: battery.left)
    recharge = {"learned": "learned from a recharge", "settings": "settings"}[recharge_from(state)]
    return (
        _share("health", now.health, f"share of a new battery that a full charge holds; {health}"),
        _seconds("recharge_s", learning.recharge_s(policy, battery.model), f"from empty to full; {recharge}"),
        _share("used", now.used, "powerguard's energy account"),
        _share("left_by_account", max(0.0, now.health - now.used), "health - used"),
        _share("left_by_charge", battery.charged, f"health x charge: {charge}"),
        _share("left_by_runtime", battery.gauge, f"reported runtime / tau: {runtime}"),
        _share("left", now.left, f"{left}; on battery it never rises"),
        _share("usable", now.usable, f"min({1 - policy.margin:g} left, left - {policy.floor:g})"),
    )


def _runtimes(policy: Policy, state: State, now: Budget) -> tuple[Term, ...]:
    tau = tau_from(policy, state)
    if policy.feeds:
        tau = f"all together, until too few power supplies have power; {tau}"
    cut = "UPS countdown or FSD" if now.cut_in_s is not None else "no countdown"
    bounded = ", at most cut_in_s" if now.cut_in_s is not None else ""
    return (
        _seconds("tau_now_s", now.tau_now_s, f"full new battery at load_now: {tau}"),
        _seconds("tau_paused_s", now.tau_paused_s, f"full new battery at load_paused: {tau}"),
        _seconds("cut_in_s", now.cut_in_s, cut),
        _seconds("reff_now_s", now.reff_now_s, f"usable x tau_now_s{bounded}"),
        _seconds("reff_paused_s", now.reff_paused_s, f"usable x tau_paused_s{bounded}"),
    )


def _needs(policy: Policy, state: State, now: Budget) -> tuple[Term, ...]:
    found: list[Term] = []
    waits = conditions.awaits_training(state)
    for trainer in state.trainers:
        rest_s = 0.0 if waits else budget.checkpoint_s((trainer,), now.now_s)
        if not trainer.alive:
            source = "not alive"
        elif waits:
            source = "none: training is not started yet"
        elif trainer.durable:
            source = "durable"
        elif trainer.given_up is not None:
            source = f"given up: {trainer.given_up.because}"
        elif trainer.order is not None:
            source = "in flight: what is left of it"
        else:
            source = checkpoint_from(policy, state.learned, trainer)
        found.append(_seconds(f"checkpoint_s.{trainer.name}", rest_s, source))
    found.append(_seconds("checkpoint_s", now.checkpoint_s, "sum over a shared disk, largest over disks"))
    word = Term(name="grade", value=now.grade.value, unit="word", source="the most orderly stop that fits")
    return (*found, word, *_stop(policy, state.learned, now))


def _stop(policy: Policy, learned: Learned, now: Budget) -> tuple[Term, ...]:
    bare_s = budget.stop_s(policy, now.grade, reserve_s=0.0)
    reserve_s = now.stop_s - bare_s
    if now.grade is Grade.BARE:
        return (_seconds("stop_s", now.stop_s, "bare: sync and forced power-off"),)
    median = now.grade is Grade.SHORT
    return (
        _seconds("host_stop_s", bare_s - policy.ups_off_s, stop_from(policy, learned, now.grade)),
        _seconds("ups_off_s", policy.ups_off_s, "the UPS's countdown after the forced power-off"),
        _seconds("reserve_s", reserve_s, "settings" if not median else "settings, at most 20 s at this grade"),
        _seconds("stop_s", now.stop_s, "host_stop_s + ups_off_s + reserve_s"),
    )
