"""Every term of the budget by name: value, unit, and where it comes from. What `powerguard plan` prints."""

from dataclasses import dataclass

from powerguard.core import battery as learning
from powerguard.core import budget as sums
from powerguard.core.actions import Grade
from powerguard.core.budget import Budget
from powerguard.core.learned import Learned
from powerguard.core.model import State
from powerguard.core.policy import Policy
from powerguard.core.readings import Reading
from powerguard.daemon.origins import (
    Wall,
    checkpoint_from,
    health_view,
    paused_from,
    recharge_from,
    stop_from,
    tau_from,
)
from powerguard.daemon.port import Daemon


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One number of the budget. value: None when not known. unit: "s", "share", "pct" or "word". source: for people."""

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
        Term(name="slack_s", value=_round(now.slack_s), unit="s", source="reff_paused_s - need_s"),
        Term(name="fits", value=now.fits, unit="word", source="need_s <= 0.75 reff_paused_s"),
    )


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _seconds(name: str, value: float | None, source: str) -> Term:
    return Term(name=name, value=_round(value), unit="s", source=source)


def _share(name: str, value: float | None, source: str) -> Term:
    return Term(name=name, value=_round(value), unit="share", source=source)


def _told(reading: Reading | None, field: str) -> str:
    """Name the object of the protocol that told a field, as far as the source says."""
    if reading is None:
        return "not told yet"
    of = dict(reading.provenance).get(field)
    return f"{reading.source} {of}" if of else reading.source


def _loads(policy: Policy, state: State, now: Budget, at: Wall) -> tuple[Term, ...]:
    reading = state.feed.reading
    by_watts = reading is not None and reading.load_pct is None and reading.watts is not None
    told = _told(reading, "watts" if by_watts else "load_pct") + (" / rating_w" if by_watts else "")
    source_now = f"{told}, averaged" if state.battery.load is not None else "not told: counted as full"
    return (
        _share("load_now", now.load_now, source_now),
        _share("load_paused", now.load_paused, paused_from(policy, state, now, at)),
    )


def _energy(policy: Policy, state: State, now: Budget, at: Wall) -> tuple[Term, ...]:
    reading, battery = state.feed.reading, state.battery
    health = health_view(policy, state, now.now_s, at).because
    recharge = {"learned": "learned from a recharge", "settings": "settings"}[recharge_from(state)]
    return (
        _share("health", now.health, f"share of a new battery that a full charge holds; {health}"),
        _seconds("recharge_s", learning.recharge_s(policy, battery.model), f"from empty to full; {recharge}"),
        _share("used", now.used, "our own energy account"),
        _share("left_by_account", max(0.0, now.health - now.used), "health - used"),
        _share("left_by_charge", battery.charged, f"health x charge: {_told(reading, 'charge_pct')}"),
        _share("left_by_runtime", battery.gauge, f"reported runtime / tau: {_told(reading, 'runtime_s')}"),
        _share("left", now.left, "the smallest of the three; on battery it never rises"),
        _share("usable", now.usable, f"min({1 - policy.margin:g} left, left - {policy.floor:g})"),
    )


def _runtimes(policy: Policy, state: State, now: Budget) -> tuple[Term, ...]:
    tau = tau_from(policy, state)
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
    for trainer in state.trainers:
        rest_s = sums.checkpoint_s((trainer,), now.now_s)
        if not trainer.alive:
            source = "not alive"
        elif trainer.durable:
            source = "durable"
        elif trainer.failed:
            source = f"given up: {trainer.failed}"
        elif trainer.order is not None:
            source = "in flight: what is left of it"
        else:
            source = checkpoint_from(policy, state.learned, trainer)
        found.append(_seconds(f"checkpoint_s.{trainer.name}", rest_s, source))
    found.append(_seconds("checkpoint_s", now.checkpoint_s, "sum over a shared disk, largest over disks"))
    word = Term(name="grade", value=now.grade.value, unit="word", source="the most orderly stop that fits")
    return (*found, word, *_stop(policy, state.learned, now))


def _stop(policy: Policy, learned: Learned, now: Budget) -> tuple[Term, ...]:
    bare_s = sums.stop_s(policy, now.grade, reserve_s=0.0)
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
