"""What the core remembers between events, as frozen plain data, and what a step answers.

Part of it is kept for each source of a UPS, and for the host's own network.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from powerguard.core.model.actions import Action, Conduct, Grade, Note, PowerOnMethod, Scalar
from powerguard.core.model.events import OwnSource, Reading
from powerguard.core.model.policy import BatteryModel, Learned, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What a source has shown that it measures; before that, it is not a witness against utility.

    volts: it has reported an input that is there. clock_s: the first seconds on battery that it reported; None: none
    yet.
    clock: those seconds have moved.
    """

    volts: bool = False
    clock_s: float | None = None
    clock: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """One of several sources of a UPS, as last heard. Kept only where there is more than one.

    reading, previous: its newest two; None until the first one.
    lost_since_s: since when it counts as lost; None while it answers.
    utility_seen: it has reported utility since first contact, so a report of battery is news.
    battery_at_s: start of the unbroken readings of battery; None while it reports another source.
    gauges: charge (percent) and runtime (seconds) that it reported then.
    measures: what it has shown that it measures.
    moved_at_s: when a figure of its readings last changed, or was not there; None until the first one.
    back_at_s: when it reported utility after two readings of battery; its return is news.
    doubted: it reports battery, and all other evidence contradicts it.
    countdown_at_s, fsd_since_s, fsd_at_s, fsd_at_first: what it announces by itself, as in `Feed`; it holds until the
        same source withdraws it.
    """

    source: str
    reading: Reading | None = None
    previous: Reading | None = None
    lost_since_s: float | None = None
    utility_seen: bool = False
    battery_at_s: float | None = None
    gauges: tuple[float | None, float | None] = (None, None)
    measures: Measures = field(default_factory=Measures)
    moved_at_s: float | None = None
    back_at_s: float | None = None
    doubted: bool = False
    countdown_at_s: float | None = None
    fsd_since_s: float | None = None
    fsd_at_s: float | None = None
    fsd_at_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """Another UPS that takes over when one that may be silent ends.

    share: load of the silent one for each of this one, as last seen while neither made a step. least: the least load
    that this one has reported since the other's last report, as a share of the rating. risen: it has reported more than
    that since, or may have had more while it was not heard. took: its load has risen by just what the other one
    carried, when the other one fell silent or when its battery was used up: that load has moved here, and must not be
    counted twice.
    """

    ups: str
    share: float
    least: float
    risen: bool = False
    took: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What has been seen of one of several UPSes since it was last heard (see `silence`).

    load: its own when it was last heard, as a share of the rating.
    spent: energy that it would have given meanwhile on battery, in full new batteries, counted until counted_s; None:
    not begun. lives: it is silent, and must have utility.
    """

    load: float
    others: tuple[Witness, ...]
    spent: float = 0.0
    counted_s: float | None = None
    lives: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLoss:
    """A part of this host's own network that went: between heard_s and at_s. part: as in `events.NetworkSeen`."""

    part: str
    heard_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoadReport:
    """The last report of one source on this host's own load. watts: its newest reading; before_w: the one before that.

    since_s: since when it has reported the same number of watts. jumped_at_s: when it last went up and down at once.
    above_since_s: since when it has reported more than the whole UPS carries; None while it does not.
    ups_w, before_ups_w: what the whole UPS carried when watts and before_w were reported; None: unknown.
    """

    source: OwnSource
    watts: float
    at_s: float
    since_s: float
    before_w: float | None = None
    jumped_at_s: float | None = None
    above_since_s: float | None = None
    ups_w: float | None = None
    before_ups_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoadAtPause:
    """A source's report on this host's own load when training was asked to pause. drop_w: how much of it is to fall."""

    source: OwnSource
    watts: float
    drop_w: float


class Supply(StrEnum):
    """The state of the feed after both witnesses."""

    UNKNOWN = "unknown"
    UTILITY = "utility"
    BATTERY = "battery"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """One feed as confirmed by fusion.

    since_s: since when `supply` holds, by the best clock there is (the UPS's own seconds on battery count).
    proven_by: the second witness of the last time that it went to battery.
    suspect: the newest reading says battery and waits for its second witness.
    unproven_battery: the source has reported battery since first contact without any second witness.
    utility_seen: the source has reported utility since first contact, so a repeated report of battery is news.
    measures: what the source has shown that it measures.
    first_charge_pct: charge at first contact; its fall is a witness if there is no other.
    test_since_s: since when a self-test runs; one of more than 60 s is an outage.
    lost_since_s: since when no source has answered; None while one does.
    low_battery_at_s: since when two readings on battery have reported low battery.
    countdown_at_s: when the UPS cuts its output by a countdown of its own, reported by two readings.
    fsd_at_s: when it does so after a forced shutdown that we saw rise, by fsd_since_s: when that began at the earliest.
    fsd_at_first: FSD stood at first contact, or has cut nothing: history on utility, an order on battery.
    heard: what each source says, where there are several; `reading` is then what they say together.
    disagree_since_s: since when some of them say battery and others utility.
    """

    supply: Supply = Supply.UNKNOWN
    since_s: float = 0.0
    proven_by: str = ""
    reading: Reading | None = None
    previous: Reading | None = None
    suspect: bool = False
    unproven_battery: bool = False
    utility_seen: bool = False
    measures: Measures = field(default_factory=Measures)
    first_charge_pct: float | None = None
    test_since_s: float | None = None
    lost_since_s: float | None = None
    low_battery_at_s: float | None = None
    countdown_at_s: float | None = None
    fsd_since_s: float | None = None
    fsd_at_s: float | None = None
    fsd_at_first: bool = False
    heard: tuple[SourceReport, ...] = ()
    disagree_since_s: float | None = None

    @property
    def awaits_witness(self) -> bool:
        """Whether the next reading says if it is battery. A source that is lost says nothing: it is not waited for."""
        return self.suspect and self.lost_since_s is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Battery:
    """Our own account of the battery's energy, in shares of a full new battery (docs/decisions/0034).

    used: taken out and not yet put back; survives restarts and boots. used_heard: the same at the newest reading.
    presumed: no charge has been reported yet, so `used` began at half a charge; the first charge begins it again.
    gauge, charged: energy left by the reported runtime and charge; None until reported. Dead-reckoned when silent.
    left: the smallest of the three, and of what a low-battery flag permits. None: neither runtime nor a table is known.
    unflagged: the same without the flag; on battery it rises only when all three have said more for 20 s.
    higher_since_s: since when they do.
    load: share of the rating, averaged over steps of the load; None until reported.
    step_at_s: when the load last made a step of more than 5 %: the UPS's own runtime lags for 20 s after.
    suspect: a fall faster than physics that waits for a second reading. fell_at_s: when one was last confirmed so.
    health: share of a new battery's energy that a full charge holds.
    tau_point: (load, seconds) of a full battery derived from a reading on utility, where there is no table.
    composed: runtime table of several batteries that feed one host together; empty for one.
    low_left: energy that a low-battery flag permits: its seconds at the load at which it rose, less what was drained
        since; None while no flag is up.
    away_s: wall seconds for which the host was off; they may have recharged it, if the charge says so too.
    away_charge: the charge before that; its fall meanwhile was used. None once two readings have shown it.
    contradicted: the UPS says battery, and after a third of it its input is there and its charge is still full.
    model: what has been learned of it.
    """

    at_s: float = 0.0
    used: float | None = None
    used_heard: float | None = None
    presumed: bool = False
    gauge: float | None = None
    charged: float | None = None
    left: float | None = None
    load: float | None = None
    step_at_s: float | None = None
    suspect: float | None = None
    fell_at_s: float | None = None
    health: float = 0.75
    tau_point: tuple[float, float] | None = None
    composed: tuple[tuple[float, float], ...] = ()
    low_left: float | None = None
    unflagged: float | None = None
    higher_since_s: float | None = None
    away_s: float = 0.0
    away_charge: float | None = None
    contradicted: bool = False
    model: BatteryModel = field(default_factory=BatteryModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supplied:
    """One of several UPSes that feed the host, as far as it is known by itself.

    presumed: it fell silent as another one went to battery, or with this host's own network, and counts as on battery
        until it answers.
    overloaded: it would be, once those on battery end; a pause that cures it must not bring training back, so it stays
        so until none is on battery.
    watch: what the others have shown of it since it was last heard; None if they report no load.
    """

    ups: str
    feed: Feed
    battery: Battery
    presumed: bool = False
    overloaded: bool = False
    watch: Watch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInFlight:
    """A checkpoint that was ordered and has no outcome yet. order: its id. eta_at_s: when it expects to be durable.

    copied: the state has been copied, so training may go on while it is written.
    """

    order: str
    eta_at_s: float | None = None
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDurable:
    """The checkpoint of the outage is owed. tries: how often it was ordered. Without an outage, none is owed."""

    tries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """The checkpoint of the outage is durable: for a trainer that pauses, at the step where it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The checkpoint of the outage failed for good after so many tries, and why.

    cut_short: it had less time than it needs, so it is asked again in a hold that leaves enough.
    """

    because: str
    tries: int
    cut_short: bool = False


class Activity(StrEnum):
    """What a trainer does, as last seen. One that has not been seen yet is taken for training."""

    TRAINING = "training"
    PAUSED = "paused"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One trainer as last seen.

    checkpoint: that of the outage. checkpoint_s: seconds from order to durable, the best estimate there is.
    reported_s: the trainer's own estimate; None: not reported.
    in_flight: its checkpoint that has no outcome yet, of whatever cause. ordered_at_s: when the last one was ordered.
    pause_ordered: it was asked to pause or exit in this outage and has not been resumed.
    stood: it was paused before, on utility, and not by powerguard: it is not resumed.
    durable_at_s, durable_step: of the newest known checkpoint.
    stall_s: how long a checkpoint during training delays it, as it reports; None: not reported.
    priority: as in `TrainerPolicy`.
    hosts: of its job. held_by: names of the other ones that want training to stand; "" for none.
    """

    name: str
    activity: Activity = Activity.TRAINING
    conduct: Conduct = Conduct.CONTINUE
    checkpoint_s: float = 60.0
    reported_s: float | None = None
    disk: str = ""
    step: int | None = None
    step_s: float = 0.0
    pause_ordered: bool = False
    stood: bool = False
    checkpoint: NotDurable | Durable | GivenUp = field(default_factory=NotDurable)
    in_flight: CheckpointInFlight | None = None
    ordered_at_s: float = 0.0
    durable_at_s: float | None = None
    durable_step: int | None = None
    stall_s: float | None = None
    priority: int = 0
    hosts: int = 1
    held_by: str = ""

    @property
    def alive(self) -> bool:
        """It can be reached, or has not been found gone."""
        return self.activity is not Activity.GONE

    @property
    def paused(self) -> bool:
        """It is there and stands still."""
        return self.activity is Activity.PAUSED

    @property
    def durable(self) -> bool:
        """The checkpoint of the outage is durable."""
        return isinstance(self.checkpoint, Durable)

    @property
    def given_up(self) -> GivenUp | None:
        """How the checkpoint of the outage failed for good; None if it did not."""
        return self.checkpoint if isinstance(self.checkpoint, GivenUp) else None

    @property
    def owes(self) -> bool:
        """It is there, and the checkpoint of the outage is neither durable nor given up."""
        return self.alive and isinstance(self.checkpoint, NotDurable)

    def found(self, *, paused: bool) -> "Trainer":
        """Return it as paused or training; one that is gone stays so."""
        activity = Activity.PAUSED if paused else Activity.TRAINING
        return replace(self, activity=activity) if self.alive else self

    def without_outage(self) -> "Trainer":
        """Return it with nothing asked of it and nothing owed by it for an outage."""
        return replace(self, checkpoint=NotDurable(), pause_ordered=False)

    @property
    def order(self) -> str | None:
        """Id of the checkpoint in flight."""
        return None if self.in_flight is None else self.in_flight.order


@dataclass(frozen=True, slots=True, kw_only=True)
class Obligation:
    """What is owed until it is confirmed, in `State.owed`. How each kind is kept: `core/obligations.py`.

    outage: for which; "" if none is known. order: id of the order in flight, None: no outcome is waited for.
    at_s: when it was last ordered, or since when it is owed. retry_at_s: it is not ordered again before.
    """

    outage: str = ""
    order: str | None = None
    at_s: float = 0.0
    retry_at_s: float = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        """What tells two obligations of one kind apart, such as the trainer; () if there is one at most."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCap(Obligation):
    """GPU power is capped, or may be: owed until a restore is confirmed. lifting: the last order was the restore."""

    lifting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled(Obligation):
    """A trainer's processes were stopped or ended because it still drew power: owed until they are confirmed to run.

    word: of `escalation`, the last that was ordered. at_s: when; once it was carried out: then.
    carried_out: the highest rung that was carried out, "" for none. failed: the last word was not carried out.
    """

    trainer: str
    word: str
    carried_out: str = ""
    failed: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """The trainer."""
        return (self.trainer,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Obligation):
    """A trainer is owed a resume until it has confirmed one. Its order is not named by its id."""

    trainer: str

    @property
    def key(self) -> tuple[str, ...]:
        """The trainer."""
        return (self.trainer,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Obligation):
    """Training is to be started again after a return in place. tries: starts that failed.

    ending: trainers that were to end and were still there when it was ordered. The start of one that runs has no
    effect, so until until_s it is ordered again while one of them is gone. confirmed: the last order was carried out;
    without anything in ending, the first trainer is then awaited, and nothing is ordered.
    """

    tries: int
    ending: tuple[str, ...] = ()
    until_s: float = 0.0
    confirmed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Obligation):
    """A trainer's job has ended because another host left it: training is owed until it runs again.

    because: which host, and why, as the trainer reports. started: it was ordered to be started again.
    """

    trainer: str
    because: str
    started: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """The trainer."""
        return (self.trainer,)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMarked(Obligation):
    """The scheduler's node is drained or down for an outage, or may be: owed until it was given back.

    drained: the order to drain has been answered. left: so has the order at the commit, which `leaving` says is given.
    running: ids of jobs that ran here at the drain and that this host requeues. jobs: ids that were requeued, or may
    be: those of `running` from the order on, because its answer may be lost. returning: it was ordered to be given
    back, and nothing else since. waited_s: from the last return that failed to the next. signalled: jobs got their
    signal, or are being sent it; signal_at_s: not before this, because the order has failed. recorded: in dry-run; the
    node itself has no mark. rebooted: the host has booted since, and the order at the commit had not been answered.
    older: it may still have the mark of an outage before this one.
    """

    recorded: bool = False
    waited_s: float = 0.0
    drained: bool = False
    leaving: bool = False
    left: bool = False
    running: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    returning: bool = False
    signalled: bool = False
    signal_at_s: float = 0.0
    rebooted: bool = False
    older: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TemporaryPolicy(Obligation):
    """The BMC's policy was changed for an outage: owed until `policy`, which the outage found, is put back."""

    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed(Obligation):
    """A power-on method is armed, or may be: owed until it is confirmed that it is not.

    outage: "" if the daemon has no history (`methods.unknown`). ups: of method OUTPUT, else "". acts_at_s: when it
    acts, not sooner. confirmed: read back from the device. returns: of method OUTPUT, what the UPS does when utility
    returns in its countdown: cycles, aborts, stays_off or unknown; "" until read.
    leaving: it is being disarmed, or could not be. kept: another program stops the host, so the method stays armed
    until the daemon starts again. recorded: ordered only where no method is armed, as in dry-run.
    """

    method: PowerOnMethod
    acts_at_s: float
    ups: str = ""
    confirmed: bool = False
    returns: str = ""
    leaving: bool = False
    kept: bool = False
    recorded: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """The method, and the UPS whose output it is."""
        return self.method.value, self.ups


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOrder:
    """An order of a drill that has no outcome yet.

    what: checkpoint, pause, resume, cap, restore, policy or sync. trainer: whom it concerns, else "".
    """

    id: str
    what: str
    by_s: float
    trainer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillStage:
    """A stage of a drill is carried out. name: of `rehearsal.STAGES`; "" before the first one.

    at_s: since when; by_s: until when at the latest. coming: the stages after it.
    samples: (at_s, load) of this stage's readings, newest last. seen: (trainer, step and moment first reported in this
    stage, step and moment last reported). of: what the samples are of, "ups" or a source of the host's own load.
    """

    name: str
    at_s: float
    by_s: float = 0.0
    coming: tuple[str, ...] = ()
    samples: tuple[tuple[float, float], ...] = ()
    seen: tuple[tuple[str, int, float, int, float], ...] = ()
    of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugPulled:
    """The plug was pulled at at_s, and the real rules run; the drill only measures."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """A real outage came first at at_s; trainers that the drill has paused are still owed a resume."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Undoing:
    """Everything is being put back since at_s. result, because: of the report to be."""

    at_s: float
    result: str
    because: str


DrillPart = DrillStage | PlugPulled | HandedOver | Undoing


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A rehearsal that runs (see `drill`).

    part: what it does now. waiting: orders without outcome.
    ordered_to_pause: trainers that it has asked to pause; paused: those that may still be paused.
    load: share of the rating before anything was done. speeds: steps a second before. failures: what went wrong.
    """

    id: str
    began_s: float
    who: str
    scopes: tuple[str, ...]
    witness: str
    part: DrillPart
    waiting: tuple[DrillOrder, ...] = ()
    ordered_to_pause: tuple[str, ...] = ()
    paused: tuple[str, ...] = ()
    load: float | None = None
    speeds: tuple[tuple[str, float], ...] = ()
    failures: tuple[str, ...] = ()
    figures: tuple[tuple[str, Scalar], ...] = ()

    @property
    def stage(self) -> str:
        """The word for `part` in status and log."""
        match self.part:
            case DrillStage(name=name):
                return name
            case PlugPulled():
                return "outage"
            case HandedOver():
                return "handed_over"
            case Undoing():
                return "undo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    until_s: float
    reason: str
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Online:
    """Utility is there, or no source contradicts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """What is true in every phase of an outage. One id, from the first reading on battery until training runs.

    lowered: the grade was lowered so that a checkpoint fits. mode: in which its orders were given.
    boots: when the host came back in it, newest last. back_off_s: how long it had to stay off the last time, because it
        came back too often; 0: no such wait.
    """

    id: str
    since_s: float
    grade: Grade
    lowered: bool = False
    mode: Mode = Mode.ARMED
    load_at_start: float | None = None
    policy_asked: bool = False
    policy_verified: bool = False
    aborted_by: str = ""
    boots: tuple[float, ...] = ()
    back_off_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OnBattery:
    """Training continues; the budget is watched."""

    outage: Outage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmergencyCheckpoint:
    """Trainers were asked to pause and to write a checkpoint.

    paused_load: predicted load once paused; None if no trainer pauses. settle_by_s: until then it counts.
    due_at_s: the commit test came true then and waits for one more poll.
    own_drop: on a UPS that is shared, by how much our pause is to lower its load; None on one that is not.
    own: what measured this host's own load before the pause.
    """

    outage: Outage
    began_s: float
    because: str
    paused_load: float | None = None
    settle_by_s: float = 0.0
    due_at_s: float | None = None
    own_drop: float | None = None
    own: tuple[OwnLoadAtPause, ...] = ()

    @property
    def paused_at_s(self) -> float:
        """When every trainer was asked to pause: this phase begins with it."""
        return self.began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Everything is durable; training is paused and the battery lasts longer. Fields as in the checkpoint phase."""

    outage: Outage
    began_s: float
    paused_load: float | None = None
    settle_by_s: float = 0.0
    paused_at_s: float = 0.0
    due_at_s: float | None = None
    own_drop: float | None = None
    own: tuple[OwnLoadAtPause, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Past the commit point, in the boot that is named. From here only "finish and come back".

    stops_within_s: seconds from the latch to the forced power-off, as chosen at the latch.
    waiting: ids of the actions that the power-off waits for, until prepare_by_s.
    force_at_s: when powerguard-off powers off hard; again_at_s: when we order it again if still alive.
    """

    outage: Outage
    boot_id: str
    latched_s: float
    because: str
    stops_within_s: float = 0.0
    waiting: tuple[str, ...] = ()
    prepare_by_s: float = 0.0
    ordered: bool = False
    force_at_s: float = 0.0
    again_at_s: float = 0.0

    @property
    def powers_off(self) -> bool:
        """The power-off was ordered, and not only recorded."""
        return bool(self.force_at_s) and self.outage.mode is Mode.ARMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The host is back from an outage that ended in power-off (or in darkness). Training waits for the gate.

    clean: the power-off was ours and was ordered. asked: id of the order in flight (to check the host, to start
    training); tries: how often training was to be started. retry_at_s: not before. checked_at_s: the host was whole.
    started_at_s: training was started, and its first step is waited for. forced_by: the person who ordered it to start
        now.
    due_at_s: as in `EmergencyCheckpoint`, should the power fail again.
    """

    outage: Outage
    began_s: float
    clean: bool
    due_at_s: float | None = None
    asked: str | None = None
    tries: int = 0
    retry_at_s: float = 0.0
    checked_at_s: float | None = None
    started_at_s: float | None = None
    forced_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenStop:
    """The host went down on utility, unasked: it lost power without a warning, or it crashed.

    down_at_s: when it was last known to run, in this boot's clock. away_s: from then to this boot's first step; None:
    unknown. trainers: how many trained, or were to be started. at_risk_s: their work since their newest checkpoints, as
    far as it is known.
    boots: when the host came back from such stops, this one last.
    lost_power: AC was gone, or it was not; None: nothing reports it. firmware_s: as in `events.PoweredOn`. reported:
    what says so. by_s: until when that is waited for; None: it is decided.
    left_because: why training is not started; "": it is, or is not decided yet. forced_by: the person who started it.
    gone: no trainer has been there in this boot, so one that comes runs.
    """

    down_at_s: float
    away_s: float | None = None
    trainers: int = 1
    at_risk_s: float = 0.0
    boots: tuple[float, ...] = ()
    lost_power: bool | None = None
    reported: str = ""
    firmware_s: float | None = None
    by_s: float | None = None
    left_because: str = ""
    forced_by: str = ""
    gone: bool = False


Owed = TypeVar("Owed", bound=Obligation)

Emergency = EmergencyCheckpoint | Holding
"""Training is paused, or has been asked to."""
Phase = Online | OnBattery | EmergencyCheckpoint | Holding | Shutdown | Recovery

_PHASE_NAMES: dict[type[Phase], str] = {
    Online: "online",
    OnBattery: "on_battery",
    EmergencyCheckpoint: "emergency_checkpoint",
    Holding: "holding",
    Shutdown: "shutdown",
    Recovery: "recovery",
}


def phase_name(phase: Phase | type[Phase]) -> str:
    """Return the phase's name in status, metric and log."""
    return _PHASE_NAMES[phase if isinstance(phase, type) else type(phase)]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that the core remembers. transfers: when the feed went to battery lately (three in 5 minutes = flapping).

    serial: numbers the actions, so that ids stay unique over restarts.
    guarded_since_s: training runs again below the charge gate since then, with checkpoints where they cost little.
    alarms: names of the alarms that hold, so that each is logged once.
    learned: what has been measured here, the battery apart. drill: the one that runs.
    upses: where several UPSes feed the host, each by itself; feed and battery are then what they are together.
    gone: parts of this host's own network that went, newest last.
    owed: all that was changed or promised and is not confirmed yet; the properties show it by kind.
    own: what measures this host's own load, best first.
    up: the daemon runs and was not asked to stop. What a host that goes down out of order leaves behind is still True.
    unseen: how the boot before this one ended, if that was out of order and outside an outage.
    """

    phase: Phase = field(default_factory=Online)
    feed: Feed = field(default_factory=Feed)
    battery: Battery = field(default_factory=Battery)
    trainers: tuple[Trainer, ...] = ()
    maintenance: Maintenance | None = None
    transfers: tuple[float, ...] = ()
    serial: int = 0
    guarded_since_s: float | None = None
    alarms: tuple[str, ...] = ()
    learned: Learned = field(default_factory=Learned)
    drill: Drill | None = None
    upses: tuple[Supplied, ...] = ()
    gone: tuple[NetworkLoss, ...] = ()
    owed: tuple[Obligation, ...] = ()
    own: tuple[OwnLoadReport, ...] = ()
    up: bool = False
    unseen: UnseenStop | None = None

    def trainer(self, name: str) -> Trainer | None:
        """Return the trainer of this name, if it is known."""
        return next((each for each in self.trainers if each.name == name), None)

    def owing(self, kind: type[Owed]) -> tuple[Owed, ...]:
        """Return what is owed of this kind."""
        return tuple(each for each in self.owed if isinstance(each, kind))

    @property
    def cap(self) -> GpuCap | None:
        """GPU power that is capped, or may be."""
        return next(iter(self.owing(GpuCap)), None)

    @property
    def signalled(self) -> tuple[Signalled, ...]:
        """Trainers that were stopped or ended."""
        return self.owing(Signalled)

    @property
    def start(self) -> Start | None:
        """Training that is still to be started again."""
        return next(iter(self.owing(Start)), None)

    @property
    def temporary_policy(self) -> TemporaryPolicy | None:
        """The BMC's policy that is still to be put back."""
        return next(iter(self.owing(TemporaryPolicy)), None)

    @property
    def node(self) -> NodeMarked | None:
        """The scheduler's node of this host, while it is marked."""
        return next(iter(self.owing(NodeMarked)), None)

    @property
    def armed(self) -> tuple[Armed, ...]:
        """Power-on methods that are armed, or may be."""
        return self.owing(Armed)


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to one event. `actions` start only after state and actions are in the journal."""

    state: State
    actions: tuple[Action, ...] = ()
    notes: tuple[Note, ...] = ()
