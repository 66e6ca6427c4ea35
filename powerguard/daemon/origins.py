"""Where each learned number comes from, in words: the same for `plan`, `battery`, `status` and metrics."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from powerguard.core import battery as learning
from powerguard.core import needs
from powerguard.core.actions import Conduct, Grade
from powerguard.core.budget import Budget
from powerguard.core.learned import Health, Learned
from powerguard.core.model import State, Trainer
from powerguard.core.policy import Policy

Wall = Callable[[float | None], float | None]
"""Turns a moment of this boot's clock into Unix seconds."""

ENOUGH: Final = 3
"""Stops that must have been measured before they count."""
PRESUMED: Final = {
    "settings": "budget.health of the settings",
    "default": "default: no discharge has measured it",
    "battery_old": "default for a battery older than 3 years (battery_installed)",
    "replace_battery": "the UPS wants its battery replaced",
}
"""Origins of a health that nobody has measured; a measured one is "measured"."""


def day(unix_s: float | None) -> str:
    """Return the day of a moment in local time; "?" when there is none."""
    if unix_s is None:
        return "?"
    try:
        return time.strftime("%Y-%m-%d", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return "?"


def percent(share: float, digits: int = 0) -> str:
    """Return a share in percent."""
    return f"{100.0 * share:.{digits}f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthView:
    """The health that counts. origin: "measured", or a word of PRESUMED; because: the same for people.

    presumed: what would count without a measurement. aged: the measured share less what the time since has taken;
    None where there is none, or where it has expired.
    """

    share: float
    origin: str
    because: str
    presumed: float
    aged: float | None


def health_view(policy: Policy, state: State, now_s: float, at: Wall) -> HealthView:
    """Say where the health comes from that counts now: by the rules of `battery.health`."""
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
    gone = f", {100.0 * (health.share - aged):.1f} points off since" if health.share - aged >= 0.0005 else ""
    error = f"+-{100.0 * health.error:.0f} points"
    share = f"at least {percent(health.share)}" if health.least else f"{percent(health.share)} {error}"
    return f"measured {day(at(health.at_s))}: {share}{gone}, {percent(health.depth)} deep, by the {health.how}"


def tau_from(policy: Policy, state: State) -> str:
    """Say whose word the runtime by load is."""
    if policy.table_origin == "nameplate":
        return "made from battery_wh and rating_w of the settings, cautiously (no runtime_table)"
    if policy.runtime_table:
        return f"runtime_table of the settings ({_count(len(policy.runtime_table), 'point')})"
    learned = len(state.battery.model.points)
    if learned:
        return f"learned, {_count(learned, 'point')}: the UPS's runtime / charge on utility (no runtime_table)"
    if state.battery.tau_point is not None:
        return "reported runtime / charge on utility (no runtime_table)"
    return "not known: no runtime_table, no reported runtime"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def recharge_from(state: State) -> str:
    """Say who knows how long a recharge takes: "learned" or "settings"."""
    return "settings" if state.battery.model.recharge_s is None else "learned"


def paused_from(policy: Policy, state: State, now: Budget, at: Wall) -> str:
    """Say what the predicted load of a pause rests on: by the rules of `budget.paused_load`."""
    able = [t for t in state.trainers if t.alive and t.conduct is not Conduct.CONTINUE]
    if not able:
        return "load_now: no living trainer pauses"
    pausing = [t for t in able if not (t.paused or t.told_pause)]
    if not pausing or now.load_paused == now.load_now:
        return "load_now: training is paused already"
    drops = {t.name: needs.drop_of(state.learned, t.name) for t in pausing}
    unseen = [name for name, drop in drops.items() if drop is None or drop.before <= 0.0]
    if unseen:
        why = "" if len(unseen) == len(drops) else f"; {', '.join(unseen)} never seen to pause"
        return f"load_now x {policy.paused_load_share:g} (settings; {', '.join(drops)} pause{why})"
    told = [
        f"{name} {percent(drop.before)} -> {percent(drop.after)} on {day(at(drop.at_s))}"
        for name, drop in drops.items()
        if drop is not None
    ]
    return f"measured drop of {'; '.join(told)}"


def checkpoint_from(policy: Policy, learned: Learned, trainer: Trainer) -> str:
    """Say where the time of a trainer's next checkpoint comes from: by the rules of `needs.checkpoint_s`."""
    known = needs.samples(learned, "checkpoint", trainer.name)
    if known and trainer.checkpoint_s == needs.q95(known):
        return f"q95 of {len(known)} measured"
    few = f", more than {len(known)} measured" if known else ""
    if trainer.told_s is not None:
        return f"told by the trainer{few}"
    if any(t.name == trainer.name for t in policy.trainers):
        return f"settings: checkpoint_s, else twice size over bandwidth{few}"
    return f"default: neither the trainer nor the settings say{few}"


def stop_from(policy: Policy, learned: Learned, grade: Grade) -> str:
    """Say where the time of the host's stop comes from: by the rules of `needs.fold`."""
    word = "median" if grade is Grade.SHORT else "q95"
    measured = len(needs.samples(learned, "stop"))
    if policy.stop_is_set:
        return f"settings: budget.stop_{word}_s"
    if measured >= ENOUGH:
        return f"{word} of {measured} measured stops, at most force_after_s"
    short = f"{measured} of the {ENOUGH} stops measured that it takes"
    return f"default ({short})" if grade is Grade.SHORT else f"host.force_after_s ({short})"
