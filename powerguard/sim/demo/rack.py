"""`powerguard demo --hosts 3`: three hosts of two tiers on one UPS, each with its own daemon, trainer and BMC.

The UPS's load is the sum of what the hosts draw; the daemons read it from one SNMP agent, and send each other no
messages. The battery lasts longer each time a host pauses or powers off. All checks come from the three journals,
except what only the world knows: the battery, the BMCs, and the checkpoints on the disk.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from powerguard.sim.demo import live
from powerguard.sim.demo.live import RATING_W, LiveStage
from powerguard.sim.demo.story import Act, Check, Facts, Narrator, Report, numbers, seconds
from powerguard.sim.ups import UpsBattery

TIERS: Final = {"llm-1": 1, "llm-2": 1, "batch": 0}
"""Hosts and their tiers: `batch` makes room for the other two."""
LOWER: Final = "batch"
UPPER: Final = tuple(host for host in TIERS if host != LOWER)
TITLE: Final = "live: three real daemons on one UPS"
REAL: Final = ("three daemons, each with its settings, journal and trainer", *LiveStage.real[1:])
REPLACED: Final = (
    "the UPS, the BMCs (simulated devices)",
    "the power-offs (recorded, not done: that host then draws no power)",
)
_TRAINING_W, _PAUSED_W = 900.0, 600.0
_BATTERY: Final = UpsBattery(runtime=((0.20, 225.0), (0.50, 90.0)), health=0.6, recharge_s=36.0)
_RECHARGE_S: Final = 3.0
_SIGNALS: Final = ("StopTrainer", "TerminateTrainer")


@contextlib.asynccontextmanager
async def rack(keep: Path | None = None) -> AsyncIterator[Mapping[str, LiveStage]]:
    """Build the rack, wait until each daemon knows what its own host draws, and take it down again."""
    with live.home(keep, longest=max(TIERS, key=len)) as folder:
        folders = {host: folder / host for host in TIERS}
        draws_w = dict.fromkeys(folders.values(), (_TRAINING_W, _PAUSED_W))
        more = {folders[host]: _settings(folders[host], tier) for host, tier in TIERS.items()}
        async with live.hosts(draws_w, _BATTERY, more) as stages:
            for stage in stages:
                await live.until(stage, lambda stage=stage: _is_measured(stage), "the BMC's power reading")
            yield dict(zip(TIERS, stages, strict=True))


def _settings(folder: Path, tier: int) -> dict[str, Any]:
    return {
        "ups": {"rating_w": RATING_W, "shared": {"hosts": len(TIERS)}},
        "shed": {"tier": tier, "highest": max(TIERS.values())},
        "budget": live.SETTINGS["budget"] | {"paused_load": round(_PAUSED_W / _TRAINING_W, 2)},
        # No helper listens there: a signal would be ordered all the same, and be in the journal.
        "signals": {"kind": "helper", "socket": str(folder / "signal.sock")},
    }


async def _is_measured(stage: LiveStage) -> bool:
    own = (await live.status(stage.folder / "powerguard.sock")).get("own_load") or {}
    return own.get("source") == "bmc"


async def play(stages: Mapping[str, LiveStage], print_text: Callable[[str], None]) -> Report:
    """Play two outages: one that the upper tier outlasts, and one to the end. Raises StoryError."""
    first = next(iter(stages.values()))
    began_s = first.clock()
    narrator = Narrator(stages, print_text)
    await narrator.wait(first.settle_s)

    held = _by_host(narrator.cut("An outage that the upper tier outlasts"))
    await narrator.until(
        lambda: all(held[host].find("phase_changed", new="holding") for host in UPPER), "tier 1 to hold"
    )
    await narrator.until(lambda: held[LOWER].find("power_off_accepted") is not None, "the power-off of tier 0")
    await narrator.wait(first.hold_s)
    paused = await _facts(stages)
    narrator.back()
    await narrator.until(lambda: all(act.find("outage_ended") for act in held.values()), "training to continue")
    await narrator.wait(_RECHARGE_S)
    for host, facts in (await _facts(stages)).items():
        held[host].facts = facts

    long = _by_host(narrator.cut("An outage to the end"))
    await narrator.until(lambda: all(act.find("power_off_accepted") for act in long.values()), "three power-offs")
    for host, facts in (await _facts(stages)).items():
        long[host].facts = facts
    narrator.say("all three hosts are off now")
    orders = [line.event for stage in stages.values() for line in stage.lines() if line.kind == "action"]
    return Report(
        title=TITLE,
        real=REAL,
        replaced=REPLACED,
        acts=(*held.values(), *long.values()),
        checks=[*_held_checks(held, paused), *_long_checks(long), _signal_check(orders)],
        seconds=first.clock() - began_s,
    )


def _by_host(acts: Sequence[Act]) -> dict[str, Act]:
    return {act.host: act for act in acts}


async def _facts(stages: Mapping[str, LiveStage]) -> dict[str, Facts]:
    return {host: await stage.facts() for host, stage in stages.items()}


# --- Is it true? --------------------------------------------------------------------------------------------------


def _after_s(act: Act, event: str, **wanted: str) -> float | None:
    at_s = act.at(event, **wanted)
    return None if at_s is None else at_s - act.cut_at_s


def _in_order(name: str, acts: Mapping[str, Act], event: str, **wanted: str) -> Check:
    """Check that the lower tier did it before the upper one."""
    lower = _after_s(acts[LOWER], event, **wanted)
    upper = [_after_s(acts[host], event, **wanted) for host in UPPER]
    known = [after_s for after_s in upper if after_s is not None]
    upper_text = ", ".join("never" if after_s is None else f"{after_s:.1f} s" for after_s in upper)
    return Check(
        name=name,
        holds=lower is not None and len(known) == len(upper) and lower < min(known),
        observed=f"tier 0 after {'?' if lower is None else f'{lower:.1f} s'}, tier 1 after {upper_text}",
    )


def _held_checks(held: Mapping[str, Act], paused: Mapping[str, Facts]) -> list[Check]:
    own = {host: numbers(line) for host, act in held.items() if (line := act.find("phase_changed", new="on_battery"))}
    known = {host: (figures.get("own_from"), figures.get("own_w")) for host, figures in own.items()}
    measured = [source == "bmc" and abs((watts or 0.0) - _TRAINING_W) < 20.0 for source, watts in known.values()]
    steps = {host: _numbers_of(held[host], "checkpoint_durable").get("step") for host in UPPER}
    outcomes = {host: _numbers_of(held[host], "outage_ended").get("outcome") for host in UPPER}
    now = {host: held[host].facts for host in UPPER}
    after = {host: facts.step if facts is not None else None for host, facts in now.items()}
    stood = {host: paused[host].step for host in UPPER}
    return [
        Check(
            name="each host measured its own part of the load",
            holds=len(measured) == len(held) and all(measured),
            observed=", ".join(f"{host} {watts} W by its {source}" for host, (source, watts) in known.items()),
        ),
        _in_order("the lower tier paused first", held, "phase_changed", new="emergency_checkpoint"),
        Check(
            name="the lower tier powered off, the upper one held on",
            holds=held[LOWER].find("power_off_accepted") is not None
            and not any(held[host].find("phase_changed", new="shutdown") for host in UPPER),
            observed=f"{LOWER} off after {seconds(_after_s(held[LOWER], 'power_off_accepted'))}",
        ),
        Check(
            name="the upper tier's training resumed in place without a reboot",
            holds=all(outcomes[host] == "resumed_in_place" for host in UPPER)
            and all(stood[host] is not None and (after[host] or 0) > (stood[host] or 0) for host in UPPER)
            and all(paused[host].paused and paused[host].checkpoint_step == steps[host] for host in UPPER),
            observed=", ".join(
                f"{host} {outcomes[host]}, step {stood[host]} paused, {after[host]} now" for host in UPPER
            ),
        ),
    ]


def _long_checks(long: Mapping[str, Act]) -> list[Check]:
    facts = {host: act.facts for host, act in long.items() if act.facts is not None}
    steps = {host: _numbers_of(long[host], "checkpoint_durable").get("step") for host in facts}
    safe = [
        steps[host] is not None and steps[host] == each.checkpoint_step == each.step for host, each in facts.items()
    ]
    policies = {host: each.policy for host, each in facts.items()}
    left = {host: each.left_s for host, each in facts.items()}
    needed = {host: _numbers_of(act, "power_off_accepted").get("deadline_s") for host, act in long.items()}
    enough = [(left[host] or 0.0) >= (needed[host] or float("inf")) for host in facts]
    return [
        _in_order("the lower tier powered off first", long, "power_off_accepted"),
        Check(
            name="the last checkpoint of each host is durable and verified",
            holds=len(safe) == len(long) and all(safe),
            observed=", ".join(f"{host} step {steps[host]}, stored {facts[host].checkpoint_step}" for host in facts),
        ),
        Check(
            name="each host will come back",
            holds=len(facts) == len(long) and set(policies.values()) == {"always-on"},
            observed=", ".join(f"the BMC of {host} says {policy}" for host, policy in policies.items()),
        ),
        Check(
            name="each host went down in order, before the battery was empty",
            holds=len(enough) == len(long) and all(enough),
            observed=", ".join(f"{host} {seconds(left[host])} left, {seconds(needed[host])} needed" for host in facts),
        ),
    ]


def _signal_check(orders: Sequence[str]) -> Check:
    signals = [order for order in orders if order in _SIGNALS]
    return Check(
        name="no training that obeyed was stopped by a signal",
        holds=not signals and bool(orders),
        observed=f"{len(signals)} signals among the last {len(orders)} orders of the three journals",
    )


def _numbers_of(act: Act, event: str) -> dict[str, Any]:
    line = act.last(event)
    return {} if line is None else numbers(line)
