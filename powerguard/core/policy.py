"""What the settings say, as the core needs it: frozen plain data, made anew by a reload and by what was measured."""

from dataclasses import dataclass
from enum import StrEnum

from powerguard.core.actions import Conduct, Way


class Mode(StrEnum):
    """How much of what is decided is done."""

    ARMED = "armed"
    REHEARSE = "rehearse"
    """Everything except what would take this host's power away: the power-off, and the ways back that go with it."""
    DRY_RUN = "dry-run"
    """Nothing: each action is only recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPolicy:
    """What the settings say of one trainer. checkpoint_s: seed of its need until it gives a better estimate.

    max_checkpoint_s: what a trainer may claim at most; no trainer can force a shutdown by a claim.
    priority: whose checkpoint goes first where there is no time for all; higher is first.
    """

    name: str
    conduct: Conduct = Conduct.PAUSE
    checkpoint_s: float = 60.0
    max_checkpoint_s: float = 600.0
    disk: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything that the settings decide, with DESIGN's defaults.

    sources: how many sources tell about the UPS.
    runtime_table: (load share of the rating, seconds) of a full, healthy battery, ascending; empty when unknown.
    table_origin: who says so: "settings" (or ""), or "nameplate" (made from battery energy and rating, cautious).
    health: share of a new battery's energy that is left, until a discharge has measured it. health_from: who says
        so: "settings", "default", or "battery_old" (the default for one that is older than 3 years).
    stop_q95_s, stop_median_s: how long the host takes to stop; q95 is never more than force_after_s. stop_is_set: the
        operator's own numbers, which no measurement replaces.
    ups_off_s: the part of a UPS countdown that runs after the forced power-off; 0 where the UPS output stays on.
    fsd_delay_s: from FSD (after a silence: from its start) to output off: HOSTSYNC + FINALDELAY + the UPS's own delay.
    paused_load_share: load when training is paused, as a share of the load now, until a drill has measured it.
    charge_hold_s: utility this long after a return, and training starts whatever the charge.
    cap_share: GPU power limit on battery, as a share of the limit found; None: GPUs are left alone.
    signals: a trainer that draws on after it was told to pause may be stopped, and at last ended, by signals.
    boot_id: of this boot; an outage's latch holds in its own boot only.
    mode: where it is not armed, the power-off is only recorded, the host lives, and a latch ends when utility is back.
    ways: ways back that are armed at the commit. outputs: the UPSes whose output this host, and no other, switches off.
    late_reboot: utility that came back after the commit may turn the power-off into a reboot. checks_host: after a
        return nothing is started before the host was found whole.
    feeds: where several UPSes feed the host, each of them; empty for one. minimum_supplies: power supplies that must
        have power for the host to run.
    """

    boot_id: str
    ups: str
    sources: int = 1
    rating_w: float | None = None
    runtime_table: tuple[tuple[float, float], ...] = ()
    table_origin: str = ""
    health: float = 0.75
    health_from: str = "default"
    health_replace: float = 0.6
    margin: float = 0.2
    floor: float = 0.10
    recharge_s: float = 8 * 3600.0
    low_battery_s: float = 120.0
    reserve_s: float = 60.0
    force_after_s: float = 110.0
    stop_q95_s: float = 110.0
    stop_median_s: float = 45.0
    stop_is_set: bool = False
    bare_stop_s: float = 10.0
    ups_off_s: float = 0.0
    fsd_delay_s: float = 25.0
    blind_s: float = 120.0
    paused_load_share: float = 0.6
    cap_share: float | None = None
    cap_dwell_s: float = 10.0
    cap_lift_s: float = 30.0
    signals: bool = False
    precaution_every_s: float = 60.0
    pause_dwell_s: float = 4.0
    commit_dwell_s: float = 8.0
    utility_stable_s: float = 10.0
    stale_s: float = 3.0
    bmc_limit_s: float = 5.0
    resume_charge_share: float = 0.40
    unknown_hold_s: float = 600.0
    charge_hold_s: float = 60.0
    mode: Mode = Mode.ARMED
    ways: tuple[Way, ...] = ()
    outputs: tuple[str, ...] = ()
    late_reboot: bool = False
    checks_host: bool = False
    trainers: tuple[TrainerPolicy, ...] = ()
    feeds: tuple["FeedPolicy", ...] = ()
    minimum_supplies: int = 1

    @property
    def powers_off(self) -> bool:
        """Whether the power-off is carried out, and not only recorded."""
        return self.mode is Mode.ARMED


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPolicy:
    """One of several UPSes that feed this host. policy: as if it were the only one; supplies: power supplies on it."""

    policy: Policy
    supplies: int = 1
