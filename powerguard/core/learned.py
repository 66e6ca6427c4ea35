"""What powerguard has measured on this host and this UPS, and how far each figure may be believed.

Plain data only, as in `model`; it is kept in the journal's state, so it survives restarts and boots. How it is learned
and used: `battery` (health, runtime by load, recharge) and `needs` (seconds per need, load drops).
"""

from dataclasses import dataclass


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

    used: our account when it began; charge: the charge told then (share), charge_now the newest; None: not told.
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
    """What has been learned of one UPS's battery. None and empty: nothing yet, the settings or defaults hold.

    points: runtime by load, ascending, one for each 5 % of load. recharge_s: from empty to full.
    replaced_at_s: since when this battery is in place, by the operator's word. denied: what a full battery really lasts
    at a load where the UPS's figure on utility was many times as much; such figures are not learned again.
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

    speed: training speed after, as a share of the speed before; 0 for a pause.
    """

    before: float
    after: float
    at_s: float
    speed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """How one drill went. result: of `drill.RESULTS`; witness: of `drill.WITNESSES`; at_s: of its end.

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
    """All that has been learned but the battery itself. cap: what capping GPU power brings; None until a drill."""

    needs: tuple[Need, ...] = ()
    pauses: tuple[tuple[str, Drop], ...] = ()
    cap: Drop | None = None
    drill: DrillReport | None = None
