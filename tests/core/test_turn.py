"""One turn: ids that no other action ever has, alarms told once, grades that only go down, the duties of a shutdown."""

from dataclasses import replace

import pytest

from powerguard.core.decide.machine import step
from powerguard.core.decide.turn import Turn
from powerguard.core.model.actions import (
    Action,
    EnsurePolicy,
    Grade,
    Level,
    PollNow,
    PowerOff,
    ResumeTraining,
    SyncFilesystems,
)
from powerguard.core.model.events import Done, OutputSource, OwnSource, Reading, Tick
from powerguard.core.model.policy import Mode, Policy, Shared
from powerguard.core.model.state import (
    Battery,
    CheckpointInFlight,
    Durable,
    Feed,
    Holding,
    NotDurable,
    OnBattery,
    Online,
    Outage,
    OwnLoadAtPause,
    OwnLoadReport,
    Phase,
    Recovery,
    Shutdown,
    State,
    Step,
    Supply,
    Trainer,
)
from tests.core.play import make_policy, play

POLICY = make_policy(["table=50:2000,100:1000", "boot_id=0123456789"])
OUTAGE = Outage(id="o", since_s=0.0, grade=Grade.FULL)


def turn(phase: Phase | None = None, *, now_s: float = 100.0, **fields: object) -> Turn:
    state = State(phase=OnBattery(outage=OUTAGE) if phase is None else phase, **fields)  # type: ignore[arg-type]
    return Turn(POLICY, state, now_s)


# --- Ids and times ------------------------------------------------------------------------------------------------


def test_ids_differ_by_boot_time_and_number() -> None:
    at = turn(serial=41)
    first = at.order(PollNow, limit_s=2.0, ups="ups")
    second = at.order(PollNow, limit_s=0.5, ups="ups")
    assert (first, second) == ("01234567-186a0-42", "01234567-186a0-43")
    assert [action.by_s for action in at.actions] == [102.0, 100.5]
    assert at.state.serial == 43
    assert turn(now_s=-5.0).order(PollNow, limit_s=2.0, ups="ups") == "01234567-0-1"


def test_time_never_runs_backwards_for_the_account() -> None:
    assert Turn(POLICY, State(battery=Battery(at_s=50.0)), 40.0).now_s == 50.0
    assert Turn(POLICY, State(battery=Battery(at_s=50.0)), 60.0).now_s == 60.0


# --- Alarms -------------------------------------------------------------------------------------------------------


def test_an_alarm_is_reported_when_it_begins_and_when_it_ends() -> None:
    at = turn()
    for holds in (False, True, True, False, False):
        at.set_alarm("overload", "why", holds=holds, level=Level.ERROR)
    assert [(n.event, n.level) for n in at.notes] == [
        ("overload_raised", Level.ERROR),
        ("overload_cleared", Level.INFO),
    ]
    at.set_alarm("a", "why", holds=True)
    at.set_alarm("b", "why", holds=True)
    at.set_alarm("a", "why", holds=False)
    assert at.state.alarms == ("b",)
    assert at.notes[2].level is Level.WARNING


def test_transfers_are_remembered_for_an_hour_and_sixteen_at_most() -> None:
    at = turn(now_s=4000.0, transfers=(399.9, 400.0, 3000.0))
    at.count_transfer()
    assert at.state.transfers == (400.0, 3000.0, 4000.0)
    for _ in range(20):
        at.count_transfer()
    assert at.state.transfers == (4000.0,) * 16


@pytest.mark.parametrize(
    ("load", "now_s", "raised"),
    # 1.15 * 0.4 + 0.02 = 0.48 is what is left of a load that has fallen.
    [(0.5, 100.0, True), (0.48, 100.0, False), (0.481, 100.0, True), (0.9, 99.9, False)],
)
def test_a_pause_that_does_not_show_in_the_load(load: float, now_s: float, *, raised: bool) -> None:
    phase = Holding(outage=OUTAGE, began_s=50.0, paused_load=0.4, settle_by_s=100.0)
    at = turn(phase, now_s=now_s, battery=Battery(load=load))
    at.watch_load(phase)
    assert bool(at.notes) is raised
    at = turn(phase, battery=Battery(load=load))
    at.watch_load(replace(phase, paused_load=None))
    assert not at.notes


OURS = replace(POLICY, rating_w=5000.0, shared=Shared(hosts=4))
"""The policy on a UPS that other hosts share."""


def shared(now_w: float | None, now_s: float) -> Turn:
    """A look at a hold whose pause should lower this host from 1500 to 900 W. None: nothing measures it."""
    before = (OwnLoadAtPause(source=OwnSource.BMC, watts=1500.0, drop_w=600.0),)
    phase = Holding(
        outage=OUTAGE, began_s=50.0, paused_at_s=40.0, paused_load=0.6, settle_by_s=100.0, own=before, own_drop=0.12
    )
    known = OwnLoadReport(source=OwnSource.BMC, watts=now_w or 0.0, at_s=now_s - 1.0, since_s=now_s - 1.0)
    state = State(phase=phase, battery=Battery(load=0.9), own=() if now_w is None else (known,))
    at = Turn(OURS, state, now_s)
    at.watch_load(phase)
    return at


@pytest.mark.parametrize(
    ("now_w", "now_s", "raised", "because"),
    [
        (
            1400.0,
            100.0,
            "load_not_fallen",
            "training was paused, and this host still draws 1400 W (bmc; expected 900 W)",
        ),
        (
            None,
            100.0,
            "own_load_unmeasured",
            "nothing measures what this host draws: no trainer is stopped for a load that may be its neighbours'",
        ),
        (1110.0, 100.0, "", ""),  # 1.15 * 900 + 0.05 * 1500 is what a pause may leave
        (1400.0, 99.9, "", ""),
        (None, 99.9, "", ""),
    ],
)
def test_a_pause_on_a_shared_ups_is_judged_by_this_hosts_draw(
    now_w: float | None, now_s: float, raised: str, because: str
) -> None:
    at = shared(now_w, now_s)
    expected = [(f"{raised}_raised", because, Level.ERROR if now_w else Level.WARNING)] if raised else []
    assert [(note.event, note.because, note.level) for note in at.notes] == expected
    assert at.state.alarms == ((raised,) if raised else ())


def test_alarms_of_a_shared_ups_end_with_their_cause() -> None:
    for raised, now_w, because in (
        ("load_not_fallen", 900.0, "this host draws no more than a pause leaves"),
        ("own_load_unmeasured", 900.0, "it is measured"),
        ("load_not_fallen", None, "its draw is not measured"),
    ):
        at = shared(1400.0 if raised == "load_not_fallen" else None, 100.0)
        phase = at.state.phase
        assert isinstance(phase, Holding)
        known = () if now_w is None else (OwnLoadReport(source=OwnSource.BMC, watts=now_w, at_s=109.0, since_s=109.0),)
        later = Turn(OURS, replace(at.state, own=known), 110.0)
        later.watch_load(phase)
        ended = [(note.event, note.because) for note in later.notes if note.event.endswith("_cleared")]
        assert ended == [(f"{raised}_cleared", because)]


# --- Grades -------------------------------------------------------------------------------------------------------


def on_battery(reff_s: float, *, grade: Grade = Grade.FULL, phase: type = OnBattery, **feed: object) -> Turn:
    """Return a turn with so many seconds of effective runtime, at a load that will not fall."""
    fields = {OnBattery: {}, Holding: {"began_s": 1.0}, Recovery: {"began_s": 1.0, "clean": True}}[phase]
    battery = Battery(at_s=100.0, left=reff_s / 1000.0 + 0.1, load=1.0, used=0.0)
    return turn(
        phase(outage=replace(OUTAGE, grade=grade), **fields),
        battery=battery,
        feed=Feed(supply=Supply.BATTERY, since_s=50.0, **feed),  # type: ignore[arg-type]
        trainers=(Trainer(name="t", checkpoint_s=10.0),),
    )


@pytest.mark.parametrize(
    ("reff_s", "grade", "lowered"),
    [
        (241.0, Grade.FULL, Grade.FULL),  # 180 / 0.75 = 240
        (239.0, Grade.FULL, Grade.SHORT),
        (99.0, Grade.FULL, Grade.BARE),  # 75 / 0.75 = 100
        (241.0, Grade.SHORT, Grade.SHORT),  # never up
        (5.0, Grade.FULL, Grade.BARE),
    ],
)
def test_a_grade_only_goes_down(reff_s: float, grade: Grade, lowered: Grade) -> None:
    for phase in (OnBattery, Holding):
        at = on_battery(reff_s, grade=grade, phase=phase)
        at.regrade()
        assert at.outage is not None
        assert at.outage.grade is lowered
        assert [n.event for n in at.notes] == ["grade_lowered"] * (grade is not lowered)
    at = on_battery(reff_s, grade=grade, phase=Recovery)
    at.regrade()
    assert at.outage == replace(OUTAGE, grade=grade), "what is past is past"


@pytest.mark.parametrize(
    ("cut_in_s", "grade"),
    # 10 s to checkpoint, 110 or 45 s to stop, and the guard of 30; or 10 s for a bare one, without it.
    [(150.0, Grade.FULL), (149.9, Grade.SHORT), (85.0, Grade.SHORT), (84.9, Grade.BARE), (1.0, Grade.BARE)],
)
def test_before_a_cut_the_grade_is_what_ends_in_time(cut_in_s: float, grade: Grade) -> None:
    at = on_battery(700.0, countdown_at_s=100.0 + cut_in_s)
    at.regrade()
    assert at.outage is not None
    assert at.outage.grade is grade


# --- The end ------------------------------------------------------------------------------------------------------

LATCHED = Shutdown(
    outage=OUTAGE,
    boot_id=POLICY.boot_id,
    latched_s=100.0,
    because="budget",
    waiting=("w",),
    prepare_by_s=105.25,
    again_at_s=570.0,
)


def off(phase: Shutdown, at_s: float, *, cut_at_s: float | None = None, mode: Mode = Mode.ARMED) -> list[float]:
    """Return force_after_s of every power-off that a tick at at_s orders."""
    state = State(phase=phase, feed=Feed(supply=Supply.BATTERY, countdown_at_s=cut_at_s))
    policy = replace(POLICY, mode=mode)
    actions: tuple[Action, ...] = step(policy, state, Tick(at_s=at_s)).actions
    return [round(action.force_after_s, 3) for action in actions if isinstance(action, PowerOff)]


@pytest.mark.parametrize(
    ("phase", "at_s", "expected"),
    [
        (LATCHED, 105.2, []),
        (LATCHED, 105.25, [104.75]),  # 110 s after the commit, whatever was waited for
        (replace(LATCHED, waiting=()), 101.0, [109.0]),
        (replace(LATCHED, boot_id="another"), 900.0, []),
        (replace(LATCHED, waiting=(), outage=replace(OUTAGE, grade=Grade.SHORT)), 101.0, [44.0]),
        (replace(LATCHED, waiting=(), outage=replace(OUTAGE, grade=Grade.BARE)), 102.0, [3.0]),
        (replace(LATCHED, force_at_s=210.0), 569.9, []),
        (replace(LATCHED, force_at_s=210.0), 570.0, [0.0]),
        (replace(LATCHED, force_at_s=210.0, again_at_s=150.0), 150.0, [60.0]),
    ],
)
def test_when_the_power_off_is_ordered(phase: Shutdown, at_s: float, expected: list[float]) -> None:
    assert off(phase, at_s) == expected


@pytest.mark.parametrize(
    ("cut_at_s", "at_s", "expected"),
    [
        (239.1, 150.0, []),  # 30 s before that is no more than a second sooner than 210
        (238.9, 150.0, [58.9]),
        (170.0, 150.0, [0.0]),
        (238.9, 210.0, []),  # its deadline has passed
    ],
)
def test_a_countdown_hastens_it(cut_at_s: float, at_s: float, expected: list[float]) -> None:
    ordered = replace(LATCHED, ordered=True, force_at_s=210.0)
    assert off(ordered, at_s, cut_at_s=cut_at_s) == expected
    assert off(ordered, at_s, cut_at_s=cut_at_s, mode=Mode.DRY_RUN) == []
    first = replace(LATCHED, waiting=())
    assert off(first, 101.0, cut_at_s=200.0) == [69.0]
    assert off(replace(first, outage=replace(OUTAGE, grade=Grade.BARE)), 101.0, cut_at_s=103.0) == [3.0]


def test_in_dry_run_it_is_ordered_once_and_refused_ones_again() -> None:
    assert off(replace(LATCHED, ordered=True, force_at_s=210.0), 900.0, mode=Mode.DRY_RUN) == []
    assert off(replace(LATCHED, ordered=False, force_at_s=210.0), 900.0, mode=Mode.DRY_RUN) == [0.0]


def test_what_was_ordered_is_remembered() -> None:
    state = State(phase=replace(LATCHED, waiting=()), feed=Feed(supply=Supply.BATTERY))
    answer = step(POLICY, state, Tick(at_s=101.0))
    assert answer.state.phase == replace(LATCHED, waiting=(), force_at_s=210.0, again_at_s=215.0)
    (order,) = answer.actions
    done = step(POLICY, answer.state, Done(at_s=101.5, action=order, took_s=0.5))
    assert isinstance(done.state.phase, Shutdown)
    assert done.state.phase.ordered
    late = step(POLICY, done.state, Tick(at_s=215.0))
    assert isinstance(late.state.phase, Shutdown)
    assert (late.state.phase.force_at_s, late.state.phase.again_at_s) == (210.0, 245.0)
    assert [(note.event, note.level) for note in late.notes] == [
        ("power_off_repeated", Level.ERROR),
        ("power_off_overdue_raised", Level.ERROR),
    ]


# --- What the story says ------------------------------------------------------------------------------------------

BEGIN = """
policy table=50:540,75:360,100:240 trainer=llm:pause:20
auto policy sync poweroff resume trainer_resume checkpoint=15
0..5 utility load=75 charge=100 runtime=360
"""


def test_a_reading_of_another_ups_is_nobodys() -> None:
    result = play(BEGIN)
    other = Reading(at_s=6.0, ups="other", source="snmp", output_source="battery", input_present=False)  # type: ignore[arg-type]
    answer = step(make_policy(["table=50:540"]), result.state, other)
    assert answer.actions == answer.notes == ()


def test_maintenance_ends_by_itself_and_by_the_operator() -> None:
    result = play(BEGIN, "6 maintenance 20", "7..30 utility load=75 charge=100 runtime=360")
    assert [line for line in result.lines if "maintenance" in line] == [
        "6 maintenance_set because='works'",
        "26 maintenance_ended because='expired'",
    ]
    result = play(BEGIN, "6 maintenance 20", "7 maintenance 0", "8..30 utility load=75 charge=100 runtime=360")
    assert result.lines[-1] == "7 maintenance_ended because='works'"


def test_a_checkpoint_on_request_goes_beside_training() -> None:
    result = play(BEGIN, "6 checkpoint_now", "7..30 utility load=75 charge=100 runtime=360")
    assert result.phase == "online"
    assert result.lines == [
        "6 checkpoint_requested because='operator'",
        "6 checkpoint_ordered because='operator' trainer=llm after=continue",
        "6 ! TriggerCheckpoint within=600s trainer=llm after=continue",
        "21 checkpoint_durable because='reported by the trainer' trainer=llm",
    ]


def test_a_stop_of_the_daemon_alone_is_distinguished() -> None:
    outage = "6..20 battery load=75 charge=100 runtime=350 on_battery=1+1"
    assert "the daemon is being stopped" in play(BEGIN, outage, "21 sigterm").lines[-1 - 1]
    assert play(BEGIN, "6 sigterm host").lines == [], "on utility a stop is nobody's business"


def test_the_guard_after_a_return_below_the_gate_ends_with_the_charge() -> None:
    result = play(
        BEGIN,
        "6..90 battery load=75 charge=100-0.27 runtime=350-1 on_battery=1+1",
        "91..102 utility load=45 charge=20 runtime=60",
        "102 trainer llm conduct=pause stall_s=1",
        "103..240 utility load=75 charge=20+0.1 runtime=60",
        "241..242 utility load=75 charge=95 runtime=340",
    )
    lines = [line for line in result.lines if "guard" in line or "after=continue" in line]
    assert lines == [
        "101 guard_started (warning) because='a second outage now would leave no time for a full stop'",
        "162 checkpoint_ordered because='on_battery' trainer=llm after=continue",
        "162 ! TriggerCheckpoint within=60s trainer=llm after=continue",
        "238 checkpoint_ordered because='on_battery' trainer=llm after=continue",
        "238 ! TriggerCheckpoint within=60s trainer=llm after=continue",
        "241 guard_ended because='a second outage would leave time for a full stop again'",
    ]


# --- The latch and the gate, field by field -----------------------------------------------------------------------


def ready(grade: Grade = Grade.FULL, **fields: object) -> State:
    """Return a hold whose commit has come due a second ago, with all that it needs."""
    reading = Reading(at_s=99.0, ups="ups", source="snmp", output_source=OutputSource.BATTERY)
    return State(
        **{  # type: ignore[arg-type]
            "phase": Holding(outage=replace(OUTAGE, grade=grade), began_s=50.0, due_at_s=99.0),
            "feed": Feed(supply=Supply.BATTERY, since_s=10.0, reading=reading, previous=replace(reading, at_s=98.0)),
            "battery": Battery(at_s=99.0, used=0.0, left=0.26, load=1.0),
            **fields,
        }
    )


def on(state: State, at_s: float, source: OutputSource = OutputSource.BATTERY, policy: Policy = POLICY) -> Step:
    return step(policy, state, Reading(at_s=at_s, ups="ups", source="snmp", output_source=source, load_pct=100.0))


def test_the_latch_field_by_field() -> None:
    answer = on(ready(), 100.0)
    arm, sync = answer.actions
    assert (type(arm), arm.by_s, type(sync), sync.by_s) == (EnsurePolicy, 105.0, SyncFilesystems, 105.0)
    assert (arm.outage, sync.outage) == ("o", "o")  # type: ignore[attr-defined]
    assert answer.state.phase == Shutdown(
        outage=OUTAGE,
        boot_id=POLICY.boot_id,
        latched_s=100.0,
        stops_within_s=110.0,
        because="budget",
        waiting=(arm.id, sync.id),
        prepare_by_s=105.25,
        again_at_s=275.0,
    )
    bare = on(ready(Grade.BARE, battery=Battery(at_s=99.0, used=0.0, left=0.105, load=1.0)), 100.0)
    assert [action.by_s for action in bare.actions] == [102.0, 102.0], "a bare stop has less time to prepare"
    assert isinstance(bare.state.phase, Shutdown)
    assert (bare.state.phase.prepare_by_s, bare.state.phase.again_at_s) == (102.25, 115.0)


@pytest.mark.parametrize(("low_at_s", "grade"), [(90.0, Grade.FULL), (89.9, Grade.SHORT), (24.9, Grade.BARE)])
def test_a_blind_latch_knows_what_low_battery_leaves(low_at_s: float, grade: Grade) -> None:
    """120 s from its rise: 110 for the full stop, 45 for the short one."""
    state = ready(battery=Battery(at_s=99.0))
    assert state.feed.reading is not None
    low = replace(state.feed.reading, low_battery=True)
    state = replace(state, feed=replace(state.feed, low_battery_at_s=low_at_s, reading=low))
    answer = on(state, 100.0, policy=make_policy([f"boot_id={POLICY.boot_id}"]))
    assert isinstance(answer.state.phase, Shutdown)
    assert answer.state.phase.because == "blind: low_battery"
    assert answer.state.phase.outage.grade is grade


AT_THE_GATE = Recovery(outage=OUTAGE, began_s=100.0, clean=True)


@pytest.mark.parametrize(
    ("supply", "source", "seen_at_s", "now_s", "opens"),
    [
        (Supply.UNKNOWN, "unknown", 699.0, 700.0, True),  # it answers, and says nothing
        (Supply.UNKNOWN, "unknown", 698.0, 699.9, False),
        (Supply.UTILITY, "utility", 100.0, 700.0, True),  # it has fallen silent
        (Supply.UTILITY, "utility", 101.0, 700.0, False),
        (Supply.UTILITY, "utility", 159.0, 159.9, False),  # it answers: the charge decides, for a minute
        (Supply.BATTERY, "battery", 300.0, 700.0, False),
    ],
)
def test_a_blind_gate_opens_after_ten_minutes(
    supply: Supply, source: str, seen_at_s: float, now_s: float, *, opens: bool
) -> None:
    reading = Reading(at_s=seen_at_s, ups="ups", source="snmp", output_source=OutputSource(source), charge_pct=20.0)
    feed = Feed(supply=supply, since_s=100.0, reading=reading)
    battery = Battery(at_s=now_s - 0.5, used=0.0, left=0.1, load=1.0)
    answer = step(POLICY, State(phase=AT_THE_GATE, feed=feed, battery=battery), Tick(at_s=now_s))
    assert [type(action) for action in answer.actions if not isinstance(action, PollNow)] == [ResumeTraining] * opens
    if opens:
        assert answer.actions[0].outage == "o"  # type: ignore[attr-defined]
        assert [(n.event, n.level) for n in answer.notes] == [("gate_forced", Level.ERROR), ("gate_opened", Level.INFO)]
        assert isinstance(answer.state.phase, Recovery)
        assert (answer.state.phase.tries, answer.state.phase.asked) == (1, answer.actions[0].id)


def test_training_that_cannot_be_started_is_left_to_a_person() -> None:
    reading = Reading(at_s=199.5, ups="ups", source="snmp", output_source=OutputSource.UTILITY, charge_pct=95.0)
    feed = Feed(supply=Supply.UTILITY, since_s=100.0, reading=reading)
    answer = step(POLICY, State(phase=replace(AT_THE_GATE, tries=3), feed=feed), Tick(at_s=200.0))
    failed = answer.notes[0]
    assert (failed.event, failed.level, dict(failed.numbers)) == ("resume_failed", Level.ERROR, {"tries": 3})
    assert isinstance(answer.state.phase, Online)
    ended = next(n for n in answer.notes if n.event == "outage_ended")
    expected = {"outage": "o", "outcome": "clean_shutdown", "lasted_s": 200.0, "policy_verified": False}
    assert dict(ended.numbers) == expected


def test_a_lowered_grade_is_reported_with_both() -> None:
    at = on_battery(239.0)
    at.regrade()
    (note,) = at.notes
    assert (note.level, dict(note.numbers)) == (Level.WARNING, {"old": Grade.FULL, "new": Grade.SHORT})


def test_a_grade_that_rises_again_is_logged_with_both() -> None:
    """The battery holds more than wrong readings had it when the grade was lowered."""
    at = on_battery(2000.0, grade=Grade.BARE)
    at.raise_grade()
    (note,) = at.notes
    assert (note.event, dict(note.numbers)) == ("grade_raised", {"old": Grade.BARE, "new": Grade.FULL})


@pytest.mark.parametrize(("checkpoint", "grade"), [(NotDurable(tries=1), Grade.BARE), (Durable(), Grade.SHORT)])
def test_a_bare_stop_stays_one_while_a_checkpoint_is_late(checkpoint: NotDurable | Durable, grade: Grade) -> None:
    """It expected to be durable by now, and is not: a stop that is more orderly would begin before its end."""
    flight = CheckpointInFlight(order="c-1", eta_at_s=99.0)
    trainer = Trainer(name="llm", pause_ordered=True, checkpoint=checkpoint, in_flight=flight)
    phase = Holding(outage=replace(OUTAGE, grade=Grade.BARE, lowered=True), began_s=10.0)
    at = turn(phase, trainers=(trainer,), feed=Feed(supply=Supply.BATTERY))
    at.restore_grade()
    assert at.outage is not None
    assert at.outage.grade is grade


@pytest.mark.parametrize(("at_s", "level"), [(210.0, Level.WARNING), (210.1, Level.ERROR)])
def test_a_repeated_order_is_a_page_once_its_deadline_has_passed(at_s: float, level: Level) -> None:
    phase = replace(LATCHED, force_at_s=400.0, again_at_s=at_s)
    answer = step(POLICY, State(phase=phase, feed=Feed(supply=Supply.BATTERY)), Tick(at_s=at_s))
    assert (answer.notes[0].event, answer.notes[0].level) == ("power_off_repeated", level)
