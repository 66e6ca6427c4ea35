"""Turns the settings into the core's policy: shares instead of percent, seconds instead of hours, ages resolved."""

from dataclasses import replace
from datetime import date
from typing import Final

from powerguard.core.energy.budget import CUT_GUARD_S
from powerguard.core.energy.nameplate import nameplate_table
from powerguard.core.model.actions import Conduct
from powerguard.core.model.policy import AfterUnseenStop, FeedPolicy, Mode, Policy, Shared, Shed, TrainerPolicy
from powerguard.settings.schema import Settings, UpsOptions

HEALTH: Final = 0.75
"""Presumed health of a battery without a measurement."""
HEALTH_OLD: Final = 0.6
PAUSED_LOAD: Final = 0.6
"""The same for one that is older than OLD_MONTHS, or that asks to be replaced."""
OLD_MONTHS: Final = 36
_STOP_MEDIAN_S: Final = 45.0
_MISSES: Final = 3
"""Polls without an answer after which a reading is stale."""


def battery_age_months(installed: str | None, today: date) -> int | None:
    """Return the age of a battery installed in "YYYY-MM"; None if unknown; negative in the future."""
    if installed is None:
        return None
    year, month = installed.split("-")
    return (today.year - int(year)) * 12 + today.month - int(month)


def _table(ups: UpsOptions) -> tuple[tuple[tuple[float, float], ...], str]:
    """Return the runtime table and its origin; empty if neither a table nor the battery's energy is set."""
    if ups.runtime_table is not None:
        return tuple((load_pct / 100.0, float(s)) for load_pct, s in sorted(ups.runtime_table.items())), "settings"
    if ups.battery_wh is not None and ups.rating_w is not None:
        return nameplate_table(ups.battery_wh, ups.rating_w), "nameplate"
    return (), ""


def policy(settings: Settings, *, boot_id: str, today: date) -> Policy:
    """Return the policy of this boot. today: the date by the wall clock, for the age of the battery."""
    feeding = settings.feeding
    one = _of_ups(settings, settings.feed, boot_id=boot_id, today=today)
    if len(feeding) == 1:
        return one
    feeds = tuple(
        FeedPolicy(policy=_of_ups(settings, name, boot_id=boot_id, today=today), supplies=supplies)
        for name, supplies in feeding.items()
    )
    return replace(
        one,
        feeds=feeds,
        shared=_shared([each.policy.shared for each in feeds if each.policy.shared is not None]),
        minimum_supplies=1 if settings.feeds is None else settings.feeds.minimum_supplies,
        ups_off_s=max(each.policy.ups_off_s for each in feeds),
        stale_s=max(each.policy.stale_s for each in feeds),
    )


def _shared(feeds: list[Shared]) -> Shared | None:
    """Return what is true of all feeds together: the draw is of the whole host, and the most hosts count."""
    if not feeds:
        return None
    own_w = [each.own_w for each in feeds if each.own_w is not None]
    stops_s = [each.longest_stop_s for each in feeds if each.longest_stop_s is not None]
    return Shared(
        hosts=max((each.hosts for each in feeds if each.hosts is not None), default=None),
        own_w=min(own_w, default=None),
        longest_stop_s=max(stops_s, default=None),
    )


def _of_ups(settings: Settings, name: str, *, boot_id: str, today: date) -> Policy:
    """Return the policy of this boot as if this UPS were the only one."""
    budget, ups = settings.budget, settings.ups[name]
    age = battery_age_months(ups.battery_installed, today)
    is_old = age is not None and age > OLD_MONTHS
    force_after_s = settings.host.force_after_s
    stop_q95_s = force_after_s if budget.stop_q95_s is None else min(budget.stop_q95_s, force_after_s)
    stop_median_s = _STOP_MEDIAN_S if budget.stop_median_s is None else budget.stop_median_s
    health, health_from = (HEALTH_OLD, "battery_old") if is_old else (HEALTH, "default")
    if budget.health is not None:
        health, health_from = budget.health, "settings"
    runtime_table, table_origin = _table(ups)
    return Policy(
        boot_id=boot_id,
        ups=name,
        sources=len(ups.sources),
        rating_w=ups.rating_w,
        shared=None
        if ups.shared is None
        else Shared(hosts=ups.shared.hosts, own_w=ups.shared.own_w, longest_stop_s=ups.shared.longest_stop_s),
        shed=None
        if settings.shed is None
        else Shed(tier=settings.shed.tier, highest=settings.shed.highest, extra_s=settings.shed.extra_reserve_s),
        runtime_table=runtime_table,
        table_origin=table_origin,
        health=health,
        health_from=health_from,
        health_replace=min(health, HEALTH_OLD),
        margin=budget.margin,
        recharge_s=budget.recharge_h * 3600.0,
        low_battery_s=budget.low_battery_s,
        reserve_s=budget.reserve_s,
        force_after_s=force_after_s,
        stop_q95_s=stop_q95_s,
        stop_median_s=min(stop_median_s, stop_q95_s),
        stop_is_set=budget.stop_q95_s is not None or budget.stop_median_s is not None,
        bare_stop_s=budget.bare_stop_s,
        ups_off_s=max(ups.output_off_after_s, 0.0 if ups.output_off is None else CUT_GUARD_S),
        fsd_delay_s=ups.forced_shutdown_delay_s,
        blind_s=budget.blind_s,
        paused_load_share=PAUSED_LOAD if budget.paused_load is None else budget.paused_load,
        paused_is_set=budget.paused_load is not None,
        cap_share=settings.gpu.cap_share if settings.gpu.kind == "nvml" else None,
        signals=settings.signals.kind == "helper",
        bmc=settings.bmc.kind != "none",
        scheduler=settings.scheduler.kind != "none",
        utility_stable_s=budget.utility_stable_s,
        stale_s=_MISSES * max(1.0, *(source.poll_s for source in ups.sources)),
        resume_charge_share=budget.resume_charge_pct / 100.0,
        unknown_hold_s=budget.unknown_hold_s,
        after_unseen_stop=AfterUnseenStop(settings.resume.after_unseen_stop),
        job_wait_s=settings.resume.whole_within_s,
        charge_hold_s=budget.charge_hold_s,
        mode=Mode(settings.mode),
        trainers=tuple(
            TrainerPolicy(
                name=trainer.name,
                conduct=Conduct(trainer.after),
                checkpoint_s=trainer.seed_s,
                max_checkpoint_s=trainer.max_checkpoint_s,
                disk=trainer.disk,
                priority=trainer.priority,
                unseen=trainer.kind == "command",
            )
            for trainer in settings.trainers
        ),
    )
