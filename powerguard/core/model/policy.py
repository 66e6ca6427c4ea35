"""What the settings say, as the core needs it: frozen plain data, rebuilt by a reload and after measurements.

What powerguard has measured on this host and this UPS, and how far each figure may be believed.

Plain data only, as in `model`; it is kept in the journal's state, so it survives restarts and boots. How it is learned
and used: `battery` (health, runtime by load, recharge) and `needs` (seconds per need, load drops).
"""

from dataclasses import dataclass
from enum import StrEnum

from powerguard.core.model.actions import Conduct, PowerOnMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Share of a new battery's energy that a full charge holds, as one discharge measured it.

    error: half the width of what the measurement allows, same unit. depth: energy taken in that discharge, as a share
    of a full new battery. at_s: when it ended, in the clock of this boot (negative for earlier boots). how: in words.
    least: the share is a lower bound: the discharge has shown so much, and the battery may hold more.
    """

    share: float
    error: float
    depth: float
    at_s: float
    how: str
    least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TauPoint:
    """Seconds that a full battery lasts at one load (share of the rating), as the UPS reports it on utility."""

    load: float
    tau_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Discharge:
    """The discharge that is going on, as far as it has been seen.

    used: our account when it began; charge: the charge reported then (share), charge_now the newest; None: not
    reported.
    low: the UPS has called its battery low; knee: while it still promised much. whole: no part of it went unwatched.
    mark_at_s, mark_runtime_s: where the slope of the reported runtime is taken from. slope: its fall, seconds a second.
    """

    since_s: float
    used: float
    charge: float | None
    charge_now: float | None = None
    low: bool = False
    knee: bool = False
    whole: bool = True
    mark_at_s: float = 0.0
    mark_runtime_s: float | None = None
    slope: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recharge:
    """The recharge that is going on: charge (share) when it began."""

    since_s: float
    charge: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatteryModel:
    """What has been learned of one UPS's battery. None and empty: not learned yet, the settings or defaults hold.

    points: runtime by load, ascending, one for each 5 % of load. recharge_s: from empty to full.
    replaced_at_s: since when this battery is in place, as the operator entered it. denied: what a full battery really
    lasts at a load where the UPS's figure on utility was many times as much; such figures are not learned again.
    """

    health: Health | None = None
    points: tuple[TauPoint, ...] = ()
    recharge_s: float | None = None
    discharge: Discharge | None = None
    recharge: Recharge | None = None
    replaced_at_s: float | None = None
    denied: TauPoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Measured durations of one need, newest last, at most `needs.KEPT`.

    of: "checkpoint", "stop", "boot" or "resume"; name: of the trainer for a checkpoint, else "".
    """

    of: str
    name: str
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A load drop that was seen: shares of the UPS's rating before and after, once both had settled.

    speed: training speed after, as a share of the speed before; 0 for a pause. watts: what it fell by, where the UPS is
    shared; before and after are then of this host's own load.
    """

    before: float
    after: float
    at_s: float
    speed: float = 0.0
    watts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """How one drill went. result: of `rehearsal.RESULTS`; witness: of `checks.WITNESSES`; at_s: of its end.

    figures: what was expected and what was measured.
    """

    id: str
    at_s: float
    scopes: tuple[str, ...]
    result: str
    because: str
    figures: tuple[tuple[str, str | int | float | bool | None], ...] = ()
    who: str = ""
    witness: str = "simulated"
    lasted_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """All that has been learned but the battery itself. cap: what capping GPU power brings; None until a drill.

    rest_w: what the host draws besides its GPUs, measured in a drill on a UPS that is shared. gpu_share: which part of
    what the host draws in training its GPUs draw; None until it was measured.
    """

    needs: tuple[Need, ...] = ()
    pauses: tuple[tuple[str, Drop], ...] = ()
    cap: Drop | None = None
    drill: DrillReport | None = None
    rest_w: float | None = None
    gpu_share: float | None = None


class Mode(StrEnum):
    """How much of what is decided is done."""

    ARMED = "armed"
    REHEARSE = "rehearse"
    """Everything except what would cut this host's power: the power-off, and the power-on methods that go with it."""
    DRY_RUN = "dry-run"
    """No action is carried out; each is only recorded."""


class AfterUnseenStop(StrEnum):
    """Whether training is started at boot if the host had gone down unasked and outside an outage."""

    START = "start"
    """Unless it is reported to have been a reset."""
    IF_CONFIRMED = "if-confirmed"
    """Only if the BMC reports a loss of power."""
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPolicy:
    """What the settings say of one trainer. checkpoint_s: seed of its need until it gives a better estimate.

    max_checkpoint_s: what a trainer may claim at most; no trainer can force a shutdown by a claim.
    priority: whose checkpoint goes first where there is no time for all; higher is first.
    unseen: nothing shows whether it runs (kind `command`): it counts as alive.
    """

    name: str
    conduct: Conduct = Conduct.PAUSE
    checkpoint_s: float = 60.0
    max_checkpoint_s: float = 600.0
    disk: str = ""
    priority: int = 0
    unseen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The same UPS feeds other hosts, too. hosts: how many there are, this one included; own_w: what this one draws.

    None: not set. longest_stop_s: longest forced power-off of all hosts on it.
    """

    hosts: int | None = None
    own_w: float | None = None
    longest_stop_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """How important this host is among those on its UPS: a lower tier pauses and powers off earlier.

    tier: 0 to 9, the most important ones highest; highest: of the most important hosts on the UPS. extra_s: by how many
    seconds of effective runtime; None: one stop for each tier above.
    """

    tier: int
    highest: int
    extra_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything that the settings decide, with their defaults (docs/reference/settings.md).

    sources: number of sources of the UPS. source_names: their names in readings; empty where nothing polls them, as in
        a replay.
    runtime_table: (load share of the rating, seconds) of a full, healthy battery, ascending; empty when unknown.
    table_origin: who says so: "settings" (or ""), or "nameplate" (made from battery energy and rating, cautious).
    health: share of a new battery's energy that is left, until a discharge has measured it. health_from: who says
        so: "settings", "default", or "battery_old" (the default for one that is older than 3 years).
    stop_q95_s, stop_median_s: how long the host takes to stop; q95 is never more than force_after_s. stop_is_set: the
        operator's own numbers, which no measurement replaces.
    ups_off_s: the part of a UPS countdown that runs after the forced power-off; 0 where the UPS output stays on.
    fsd_delay_s: from FSD (after a silence: from its start) to output off: HOSTSYNC + FINALDELAY + the UPS's own delay.
    paused_load_share: load when training is paused, as a share of the load now, until a drill has measured it.
    paused_is_set: by the settings; else the GPUs' part of the draw counts, where it is known.
    charge_hold_s: utility this long after a return, and training starts whatever the charge.
    job_wait_s: a job that ended because another host left it must train again within this time, else an alarm.
    cap_share: GPU power limit on battery, as a share of the limit found; None: GPUs are left alone.
    signals: a trainer that still draws power after it was asked to pause may be stopped, and finally ended, by signals.
    bmc: the settings have a BMC, whose power restore policy is ensured and read back.
    scheduler: a scheduler starts jobs on this host, and hears of an outage. node_return_s: seconds of stable utility
        before its node is given back, in an outage without a power-off.
    boot_id: of this boot; an outage's latch holds in its own boot only.
    mode: where it is not armed, the power-off is only recorded, the host lives, and a latch ends when utility is back.
    methods: power-on methods that are armed at the commit. outputs: the UPSes whose output this host, and no other,
        switches off.
    late_reboot: utility that came back after the commit may turn the power-off into a reboot. checks_host: after a
        return training is not started before the check has found the host complete.
    after_unseen_stop: whether training is started, and the scheduler's node given back, after a stop outside an outage
        that nothing had ordered.
    shared: other hosts hang on the same UPS; None: this host has it to itself. shed: how early it makes room for them.
    feeds: where several UPSes feed the host, each of them; empty for one. minimum_supplies: power supplies that must
        have power for the host to run.
    """

    boot_id: str
    ups: str
    sources: int = 1
    source_names: tuple[str, ...] = ()
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
    paused_is_set: bool = False
    cap_share: float | None = None
    cap_dwell_s: float = 10.0
    cap_lift_s: float = 30.0
    signals: bool = False
    bmc: bool = True
    scheduler: bool = False
    node_return_s: float = 60.0
    precaution_every_s: float = 60.0
    pause_dwell_s: float = 4.0
    commit_dwell_s: float = 8.0
    utility_stable_s: float = 10.0
    stale_s: float = 3.0
    bmc_limit_s: float = 5.0
    resume_charge_share: float = 0.40
    unknown_hold_s: float = 600.0
    charge_hold_s: float = 60.0
    job_wait_s: float = 900.0
    mode: Mode = Mode.ARMED
    methods: tuple[PowerOnMethod, ...] = ()
    outputs: tuple[str, ...] = ()
    late_reboot: bool = False
    checks_host: bool = False
    after_unseen_stop: AfterUnseenStop = AfterUnseenStop.START
    trainers: tuple[TrainerPolicy, ...] = ()
    shared: Shared | None = None
    shed: Shed | None = None
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
