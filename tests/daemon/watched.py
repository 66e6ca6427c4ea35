"""A daemon to be watched: a plain dataclass at our own port `Daemon`, and one scene for each phase."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from powerguard.clock import Clock
from powerguard.core.energy.needs import fold
from powerguard.core.model.actions import Conduct, Grade, Note, PowerOnMethod
from powerguard.core.model.events import Event, OutputSource, OwnSource, Reading
from powerguard.core.model.policy import (
    BatteryModel,
    Discharge,
    DrillReport,
    Drop,
    FeedPolicy,
    Health,
    Learned,
    Mode,
    Need,
    Policy,
    Shared,
    Shed,
    TauPoint,
    TrainerPolicy,
)
from powerguard.core.model.state import (
    Activity,
    Battery,
    CheckpointInFlight,
    Drill,
    DrillStage,
    Durable,
    EmergencyCheckpoint,
    Feed,
    Holding,
    NotDurable,
    OnBattery,
    Online,
    Outage,
    OwnLoadReport,
    Phase,
    Recovery,
    Shutdown,
    State,
    Supplied,
    Supply,
    Trainer,
)
from powerguard.daemon.journal.records import OutageRecord
from powerguard.daemon.observe.port import (
    ActionFigures,
    BmcView,
    LastOutage,
    PowerOnView,
    ReturnView,
    SourceView,
    TargetView,
)
from powerguard.ups.snmp.traps import TrapCounts

NOW_S = 5000.0
WALL_S = 1_795_000_000.0
BOOT = "6f1d2c3b-0000-4000-8000-000000000001"


@dataclass
class Watched:
    """Satisfies `port.Daemon`; remembers what it was told."""

    policy: Policy
    state: State
    started_at_s: float = 1000.0
    progressed_at_s: float = NOW_S - 0.4
    boot_id: str = BOOT
    config_path: str = "/etc/powerguard/powerguard.yaml"
    settings_ok: bool = True
    settings_at_s: float = 1000.0
    strangers: Sequence[str] = ()
    journal_trouble: str = ""
    history_lost: str = ""
    journal_counters: Mapping[str, float] = field(
        default_factory=lambda: {
            "outages_ridden_through": 3.0,
            "shutdowns": 1.0,
            "ups_transfers": 4.0,
            "on_battery_seconds": 321.5,
        }
    )
    sources: Sequence[SourceView] = ()
    traps: TrapCounts | None = None
    bmc: BmcView | None = None
    has_no_bmc: bool = False
    methods: Sequence[PowerOnView] = ()
    host_name: str = "gpu-01"
    host_kind: str = "systemd"
    power_off_trouble: str = ""
    returning: ReturnView = field(default_factory=lambda: ReturnView(target="powerguard-resume.target"))
    actions: ActionFigures = field(default_factory=ActionFigures)
    last_outage: LastOutage | None = None
    outages: Sequence[OutageRecord] = ()
    message_targets: Sequence[TargetView] = (
        TargetView(
            name="ops", kind="mail", queued=1, oldest_age_s=12.0, delivered=7, at=WALL_S - 60.0, answer="accepted"
        ),
    )
    messages_trouble: str = ""
    loop_lag_s: float = 0.004
    now_s: float = NOW_S
    events: list[Event] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    polls: int = 0
    checks: int = 0

    @property
    def clock(self) -> Clock:
        return lambda: self.now_s

    def submit(self, event: Event) -> None:
        self.events.append(event)

    def pending_messages(self, most: int) -> Sequence[Mapping[str, object]]:
        return [{"target": "ops", "at": WALL_S, "event": "overload_raised", "level": "error", "title": "t"}][:most]

    def note(self, note: Note) -> None:
        self.notes.append(note)

    def check_soon(self) -> None:
        self.checks += 1

    def poll_now(self) -> None:
        self.polls += 1

    def wall(self) -> float:
        return WALL_S + self.now_s - NOW_S


POLICY = Policy(
    boot_id=BOOT,
    ups="rack-a",
    rating_w=5400.0,
    runtime_table=((0.5, 1620.0), (0.75, 1080.0), (1.0, 720.0)),
    force_after_s=60.0,
    stop_q95_s=60.0,
    trainers=(TrainerPolicy(name="llm"),),
)

TRAINER = Trainer(
    name="llm",
    conduct=Conduct.PAUSE,
    checkpoint_s=20.0,
    reported_s=20.0,
    disk="nvme0",
    step=48211,
    step_s=1.2,
    durable_step=48000,
)


def reading(**changes: object) -> Reading:
    result = Reading(
        at_s=NOW_S - 0.5,
        ups="rack-a",
        source="snmp:10.0.0.5",
        output_source=OutputSource.UTILITY,
        runtime_s=1260.0,
        charge_pct=100.0,
        load_pct=62.0,
        input_v=231.0,
        provenance=(("load_pct", "upsAdvOutputLoad"), ("runtime_s", "upsAdvBatteryRunTimeRemaining")),
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def outage(**changes: object) -> Outage:
    began = Outage(
        id="6f1d2c3b-49400",
        since_s=NOW_S - 60.0,
        grade=Grade.FULL,
        load_at_start=0.62,
        policy_asked=True,
        policy_verified=True,
    )
    return replace(began, **changes)  # type: ignore[arg-type]


def _phases() -> dict[str, Phase]:
    return {
        "online": Online(),
        "on_battery": OnBattery(outage=outage(since_s=NOW_S - 6.0)),
        "emergency_checkpoint": EmergencyCheckpoint(
            outage=outage(), began_s=NOW_S - 5.0, because="budget", paused_load=0.37, settle_by_s=NOW_S + 40.0
        ),
        "holding": Holding(outage=outage(), began_s=NOW_S - 20.0, paused_load=0.37, settle_by_s=NOW_S + 20.0),
        "shutdown": Shutdown(
            outage=outage(),
            boot_id=BOOT,
            latched_s=NOW_S - 3.0,
            because="budget",
            ordered=True,
            force_at_s=NOW_S + 55.0,
            again_at_s=NOW_S + 400.0,
        ),
        "recovery": Recovery(outage=outage(since_s=NOW_S - 900.0), began_s=NOW_S - 30.0, clean=True),
    }


PHASES = tuple(_phases())


def in_mode(daemon: Watched, mode: Mode) -> Watched:
    """Return the daemon as another mode has it."""
    return replace(daemon, policy=replace(daemon.policy, mode=mode))


def committed(mode: Mode) -> Watched:
    """Return a daemon after the commit: in other modes than armed its power-off is only recorded."""
    daemon = in_mode(scene("shutdown"), mode)
    assert isinstance(daemon.state.phase, Shutdown)
    its = replace(daemon.state.phase.outage, mode=mode)
    return replace(daemon, state=replace(daemon.state, phase=replace(daemon.state.phase, outage=its)))


def scene(name: str = "online") -> Watched:
    """Return a daemon in that phase, with everything in order."""
    phase = _phases()[name]
    dark = name in ("on_battery", "emergency_checkpoint", "holding", "shutdown")
    result = reading()
    battery = Battery(at_s=NOW_S - 0.5, used=0.0, gauge=0.76, charged=0.75, left=0.74, load=0.62)
    trainer = TRAINER
    if dark:
        result = reading(output_source=OutputSource.BATTERY, runtime_s=900.0, charge_pct=71.0, on_battery_s=60.0)
        battery = replace(battery, used=0.21, gauge=0.55, charged=0.53, left=0.53)
    if name == "emergency_checkpoint":
        trainer = replace(
            trainer,
            in_flight=CheckpointInFlight(order="a-1", eta_at_s=NOW_S + 12.0),
            pause_ordered=True,
            ordered_at_s=NOW_S - 5.0,
            checkpoint=NotDurable(tries=1),
        )
    if name in ("holding", "shutdown"):
        battery = replace(battery, load=0.37)
        result = replace(result, load_pct=37.0)
        trainer = replace(
            trainer,
            activity=Activity.PAUSED,
            checkpoint=Durable(),
            pause_ordered=True,
            durable_at_s=NOW_S - 20.0,
            durable_step=48214,
        )
    source = SourceView(
        ups="rack-a", source="snmp:10.0.0.5", up=True, last_reading_at_s=NOW_S - 0.5, polls=4000, failures=2,
        authenticated=True, forgeable=False,
    )  # fmt: skip
    return Watched(
        policy=POLICY,
        state=State(
            phase=phase,
            feed=Feed(
                supply=Supply.BATTERY if dark else Supply.UTILITY,
                since_s=NOW_S - 60.0 if dark else 1002.0,
                reading=result,
            ),
            battery=battery,
            trainers=(trainer,),
        ),
        sources=(source,),
        bmc=BmcView(kind="ipmi", policy="always-on", verified=True, checked_at_s=NOW_S - 600.0, power_watts=2860.0),
        methods=(PowerOnView(method=PowerOnMethod.RTC, ready=True, checked_at_s=NOW_S - 600.0),),
        last_outage=LastOutage(
            id="6f1d2c3b-1",
            outcome="resumed_in_place",
            began_wall_s=WALL_S - 86400.0,
            ended_wall_s=WALL_S - 86100.0,
            on_battery_s=212.0,
            checkpoint_s=18.4,
        ),
    )


def half_fed(other: Supply, name: str = "holding") -> Watched:
    """Return a daemon whose UPS is on battery, with another one that is enough for the host."""
    daemon = scene(name)
    feeds = tuple(FeedPolicy(policy=replace(POLICY, ups=ups)) for ups in ("rack-a", "rack-b"))
    daemon.policy = replace(POLICY, feeds=feeds)
    dark, battery = daemon.state.feed, daemon.state.battery
    known = (("rack-a", dark), ("rack-b", replace(dark, supply=other, reading=reading(ups="rack-b"))))
    upses = tuple(Supplied(ups=ups, feed=feed, battery=battery) for ups, feed in known)
    daemon.state = replace(daemon.state, upses=upses)
    return daemon


DAY_S = 86400.0
HEALTH = Health(share=0.82, error=0.05, depth=0.31, at_s=NOW_S - 70 * DAY_S, how="fall of the charge")


def taught(name: str = "online") -> Watched:
    """Return the same daemon after some months: battery, load drops and needs have been measured."""
    daemon = scene(name)
    model = BatteryModel(
        health=HEALTH,
        points=(
            TauPoint(load=0.4, tau_s=2300.0, at_s=NOW_S - 40 * DAY_S),
            TauPoint(load=0.62, tau_s=1400.0, at_s=NOW_S - 3600.0),
        ),
        recharge_s=22000.0,
        replaced_at_s=NOW_S - 300 * DAY_S,
        discharge=None
        if name == "online"
        else Discharge(since_s=NOW_S - 60.0, used=0.02, charge=1.0, charge_now=0.71, slope=1.8),
    )
    learned = Learned(
        needs=(
            Need(of="checkpoint", name="llm", seconds=(17.5, 18.4, 19.0, 18.1)),
            Need(of="stop", name="", seconds=(31.0, 36.0, 33.5)),
            Need(of="boot", name="", seconds=(41.0,)),
            Need(of="resume", name="", seconds=(64.0,)),
        ),
        pauses=(("llm", Drop(before=0.62, after=0.26, at_s=NOW_S - 30 * DAY_S)),),
        cap=Drop(before=0.62, after=0.45, at_s=NOW_S - 30 * DAY_S, speed=0.81),
    )
    battery = replace(daemon.state.battery, model=model, health=0.8008)
    if name == "online":
        battery = replace(battery, charged=0.8008, gauge=0.9, left=0.8008)
    trainer = replace(daemon.state.trainers[0], checkpoint_s=19.0 * 1.125, reported_s=25.0)
    daemon.state = replace(daemon.state, battery=battery, learned=learned, trainers=(trainer,))
    daemon.policy = fold(replace(daemon.policy, runtime_table=()), learned)
    return daemon


def drilled(result: str = "passed", age_s: float = 5 * DAY_S) -> Watched:
    """Return the same daemon after a drill; `running_drill` is one in its middle."""
    daemon = taught()
    outcome = DrillReport(
        id="6f1d2c3b-drill-48000",
        at_s=NOW_S - age_s,
        scopes=("full",),
        result=result,
        because="every stage was carried out" if result == "passed" else "checkpoint: llm: disk full",
        who="root",
        lasted_s=87.3,
        figures=(
            ("skipped_cap", "the settings cap no GPU power"),
            ("load_before", 0.62),
            ("load_paused_expected", 0.372),
            ("runtime_paused_expected_s", 742.1),
            ("checkpoint_expected_s", 21.375),
            ("checkpoint_s.llm", 18.2),
            ("checkpoint_verified.llm", True),
            ("checkpoint_s", 18.4),
            ("load_paused", 0.26),
            ("drop_paused", 0.36),
            ("drop_paused_w", 1944.0),
            ("resume_s", 0.6),
            ("policy", "always-on"),
            ("policy_verified", True),
            ("sync_s", 0.031),
            ("power_off_grade", "full"),
            ("power_off_force_after_s", 60.0),
            ("stop_s", 120.0),
            ("runtime_paused_s", 1010.4),
            ("fits", True),
        ),
    )
    daemon.state = replace(daemon.state, learned=replace(daemon.state.learned, drill=outcome))
    return daemon


def running_drill() -> Watched:
    """Return a daemon that keeps training paused and waits for the load to settle."""
    daemon = drilled()
    drill = Drill(
        id="6f1d2c3b-drill-49900",
        began_s=NOW_S - 42.0,
        who="root",
        scopes=("full",),
        witness="simulated",
        part=DrillStage(
            name="pause", at_s=NOW_S - 6.0, by_s=NOW_S + 39.0, coming=("resume", "policy", "sync", "record")
        ),
        ordered_to_pause=("llm",),
        paused=("llm",),
        load=0.62,
        figures=(("load_before", 0.62), ("checkpoint_expected_s", 21.375), ("checkpoint_s", 18.4)),
    )
    paused = replace(daemon.state.trainers[0], activity=Activity.PAUSED, pause_ordered=True)
    daemon.state = replace(daemon.state, drill=drill, trainers=(paused,))
    return daemon


def shared() -> Watched:
    """Return a daemon on a UPS that three hosts share: its GPUs measure this one, and its BMC is silent."""
    calm = scene()
    own = (
        OwnLoadReport(source=OwnSource.BMC, watts=1480.0, at_s=NOW_S - 400.0, since_s=NOW_S - 400.0),
        OwnLoadReport(source=OwnSource.GPU, watts=1100.0, at_s=NOW_S - 3.0, since_s=NOW_S - 3.0),
    )
    policy = replace(calm.policy, rating_w=5400.0, shared=Shared(hosts=3), shed=Shed(tier=0, highest=1))
    return replace(calm, policy=policy, state=replace(calm.state, own=own))
