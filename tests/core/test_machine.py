"""One event, one answer: what may take the short way online, what time alone moves, what an outcome must not move."""

from dataclasses import replace

import pytest

from powerguard.core.decide.machine import LATEST_S, step
from powerguard.core.energy.account import PRESUMED
from powerguard.core.model.actions import (
    Conduct,
    Grade,
    PollNow,
    PowerOff,
    RestorePolicy,
    RestorePower,
    SyncFilesystems,
    TriggerCheckpoint,
)
from powerguard.core.model.events import (
    BatteryReplaced,
    Done,
    Event,
    Failed,
    OutputSource,
    PoweredOn,
    Reading,
    SetMaintenance,
    SourceFailed,
    Tick,
)
from powerguard.core.model.policy import BatteryModel, Policy, TauPoint
from powerguard.core.model.state import (
    Battery,
    CheckpointInFlight,
    EmergencyCheckpoint,
    Feed,
    GpuCap,
    NetworkLoss,
    OnBattery,
    Online,
    Outage,
    Shutdown,
    Signalled,
    State,
    Step,
    Supply,
    TemporaryPolicy,
    Trainer,
)
from tests.core.play import make_policy

POLICY = make_policy(["table=50:2000,100:1000"])
BLIND = make_policy([])
OUTAGE = Outage(id="o", since_s=0.0, grade=Grade.FULL)
FULL = Battery(at_s=0.0, used=0.0, left=0.75, load=1.0)

WRITER = Trainer(name="t", conduct=Conduct.PAUSE, checkpoint_s=10.0)


def says(at_s: float, source: str = "utility", **more: object) -> Reading:
    fields = {"load_pct": 100.0, "charge_pct": 100.0, **more}
    return Reading(at_s=at_s, ups="ups", source="snmp", output_source=OutputSource(source), **fields)  # type: ignore[arg-type]


def after(*events: Event, state: State | None = None, policy: Policy = POLICY) -> Step:
    """Return the answer to the last of the events."""
    answer = Step(State(battery=FULL) if state is None else state)
    for event in events:
        answer = step(policy, answer.state, event)
    return answer


def notes(answer: Step) -> list[tuple[str, str]]:
    return [(note.event, note.because) for note in answer.notes]


# --- The short way online -----------------------------------------------------------------------------------------


def test_a_self_test_takes_from_the_account_at_every_reading() -> None:
    """Energy is counted whatever the cause; the short way, which counts nothing, is for utility alone."""
    began = [says(1.0), says(2.0, "battery", testing=True)]
    on = [says(float(at_s), "battery", testing=True) for at_s in range(3, 7)]
    answer = after(*began, *on)
    assert isinstance(answer.state.phase, Online)
    assert answer.state.battery.at_s == 6.0
    # What lies between a utility and a battery reading counts as battery: 5 s of 1000.
    assert answer.state.battery.used == pytest.approx(0.005)


PENDING = {
    "owed": (
        GpuCap(outage="o", at_s=0.0, order="c-1", lifting=True),
        Signalled(trainer="t", outage="o", word="continue", at_s=0.0, order="s-1", carried_out="stop"),
    ),
    "gone": (NetworkLoss(part="link eth0", heard_s=0.0, at_s=0.0),),
}


@pytest.mark.parametrize("field", PENDING)
def test_what_is_not_over_outlives_utility_as_ever(field: str) -> None:
    """The short way keeps only what is always there: power that is still capped must not be forgotten on it."""
    calm = after(says(1.0), says(2.0)).state
    result = after(says(3.0), says(4.0), state=replace(calm, **{field: PENDING[field]}))  # type: ignore[arg-type]
    assert getattr(result.state, field) == PENDING[field]


def test_an_account_of_which_nothing_is_known_begins_with_the_next_reading() -> None:
    calm = after(says(1.0), says(2.0)).state
    result = after(says(3.0), state=replace(calm, battery=replace(calm.battery, used=None)))
    assert result.state.battery.used == 0.0


def test_power_that_could_not_be_restored_is_tried_again_by_time_alone() -> None:
    """Also while no reading comes."""
    calm = replace(after(says(1.0), says(2.0)).state, owed=(GpuCap(outage="o", retry_at_s=10.0, lifting=True),))
    assert not any(isinstance(order, RestorePower) for order in after(Tick(at_s=9.9), state=calm).actions)
    assert [order.by_s for order in after(Tick(at_s=10.0), state=calm).actions if isinstance(order, RestorePower)] == [
        15.0
    ]


def test_a_policy_that_could_not_be_put_back_is_tried_again_by_time_alone() -> None:
    """An hour after it failed, also while no reading comes; and not by every tick of that hour."""
    calm = replace(after(says(1.0), says(2.0)).state, owed=(TemporaryPolicy(policy="always-off", retry_at_s=10.0),))
    assert after(Tick(at_s=9.9), state=calm) == Step(calm)
    due = after(Tick(at_s=10.0), state=calm)
    assert [(type(order), order.policy) for order in due.actions if isinstance(order, RestorePolicy)] == [
        (RestorePolicy, "always-off")
    ]
    assert due.state.temporary_policy is not None
    assert due.state.temporary_policy.order == due.actions[0].id
    assert after(Tick(at_s=11.0), state=due.state) == Step(due.state), "it is under way"


def lost(at_s: float, ups: str = "ups", source: str = "snmp") -> SourceFailed:
    return SourceFailed(at_s=at_s, ups=ups, source=source, reason="no answer", lost=True)


def test_silence_on_battery_is_no_transfer() -> None:
    """Three of those would be flapping, and training would wait three times as long for utility."""
    on = [says(1.0), says(2.0, "battery"), says(3.0, "battery")]
    assert after(*on).state.transfers == after(*on, lost(4.0)).state.transfers == (3.0,)


def test_of_several_ups_it_is_reported_which_one() -> None:
    """Lost, answering again, and with a new battery; where there is one alone its name would be noise."""
    two = make_policy(["table=50:2000,100:1000", "feed=a", "feed=b"])
    calm = after(replace(says(1.0), ups="a"), replace(says(1.2), ups="b"), policy=two, state=State()).state
    gone = after(lost(2.0, "b"), state=calm, policy=two)
    back = after(replace(says(3.0), ups="b"), state=gone.state, policy=two)
    new = after(BatteryReplaced(at_s=4.0, who="alice", ups="b"), state=back.state, policy=two)
    ups_of = {note.event: dict(note.numbers).get("ups") for note in (*gone.notes, *back.notes, *new.notes)}
    assert {event: ups_of[event] for event in ("source_lost", "source_recovered", "battery_replaced")} == {
        "source_lost": "b",
        "source_recovered": "b",
        "battery_replaced": "b",
    }
    alone = after(says(1.0), lost(2.0))
    assert "ups" not in dict(alone.notes[0].numbers)


def test_one_of_two_sources_that_is_lost_is_an_alarm_and_no_more() -> None:
    """Whoever reads it must not think that powerguard is blind."""
    two = replace(POLICY, sources=2)
    calm = after(says(1.0), replace(says(1.2), source="nut"), policy=two).state
    one = after(lost(2.0), state=calm, policy=two)
    both = after(lost(2.5, source="nut"), state=one.state, policy=two)
    said = [
        [dict(note.numbers)["conduct"] for note in each.notes if note.event == "source_lost"] for each in (one, both)
    ]
    assert said == [["alarm; the other sources continue"], ["alarm; no action on utility"]]


def test_as_long_as_a_battery_is_in_doubt_it_is_asked_again() -> None:
    """A second answer within the same fifth of a second is no second witness, so that one is still wanted."""
    first = after(says(1.0), says(2.0), says(3.0, "battery"))
    second = after(says(3.1, "battery"), state=first.state)
    for answer in (first, second):
        assert [type(action) for action in answer.actions] == [PollNow]
        assert isinstance(answer.state.phase, Online)


def test_fsd_that_rises_on_utility_is_acted_on_at_its_second_reading() -> None:
    """The delay runs already; a reading lost to the short way would be a second of it."""
    state = State(battery=FULL, trainers=(WRITER,))
    answer = after(says(1.0), says(2.0), says(3.0, forced_shutdown=True), says(4.0, forced_shutdown=True), state=state)
    assert isinstance(answer.state.phase, EmergencyCheckpoint)
    assert answer.state.phase.because == "fsd"
    assert answer.notes[0].because == "fsd"


def test_a_countdown_on_utility_is_named_as_the_reason() -> None:
    state = State(battery=FULL, trainers=(WRITER,))
    answer = after(says(1.0), says(2.0, output_off_in_s=200.0), says(3.0, output_off_in_s=199.0), state=state)
    assert isinstance(answer.state.phase, EmergencyCheckpoint)
    assert answer.state.phase.because == "countdown"


# --- Time ---------------------------------------------------------------------------------------------------------


def test_a_tick_on_battery_brings_the_account_up_to_date() -> None:
    """What the journal keeps between two readings is what a daemon that is started anew goes on with."""
    state = State(
        phase=OnBattery(outage=OUTAGE),
        feed=Feed(supply=Supply.BATTERY, reading=says(100.0, "battery")),
        battery=replace(FULL, at_s=100.0),
    )
    answer = after(Tick(at_s=101.0), state=state)
    assert answer.state.battery.at_s == 101.0
    assert answer.state.battery.used == pytest.approx(0.001)
    assert answer.state.battery.left == pytest.approx(0.749)
    on_utility = replace(state, phase=Online(), feed=Feed(supply=Supply.UTILITY))
    assert after(Tick(at_s=101.0), state=on_utility).state.battery == state.battery


@pytest.mark.parametrize(("at_s", "taken"), [(LATEST_S, True), (-LATEST_S, True), (1.001 * LATEST_S, False)])
def test_what_is_no_time_is_not_taken_in(at_s: float, *, taken: bool) -> None:
    word = SetMaintenance(at_s=at_s, until_s=at_s + 5.0, reason="", who="alice")
    assert bool(after(word).notes) is taken


# --- Calibration --------------------------------------------------------------------------------------------------


def calibrating(at_s: float) -> Reading:
    return says(at_s, "battery", calibrating=True)


def test_a_calibration_of_the_blind_is_no_emergency() -> None:
    """Without a runtime "blind" is true at every moment: it would end every calibration after eight seconds."""
    answer = after(says(1.0), *(calibrating(float(at_s)) for at_s in range(2, 300)), policy=BLIND)
    assert isinstance(answer.state.phase, Online)
    assert not answer.actions


def test_a_calibration_while_a_checkpoint_is_written() -> None:
    """Of the one in flight only the rest counts, in a calibration as anywhere."""
    flying = Trainer(
        name="t",
        conduct=Conduct.PAUSE,
        checkpoint_s=500.0,
        in_flight=CheckpointInFlight(order="o-1", eta_at_s=9.0),
        pause_ordered=True,
    )
    for trainer, phase in ((flying, Online), (replace(flying, in_flight=None), EmergencyCheckpoint)):
        state = State(battery=FULL, trainers=(trainer,))
        answer = after(says(1.0), *(calibrating(float(at_s)) for at_s in range(2, 9)), state=state)
        assert isinstance(answer.state.phase, phase)


# --- Outcomes -----------------------------------------------------------------------------------------------------

LATCHED = Shutdown(
    outage=OUTAGE,
    boot_id=POLICY.boot_id,
    latched_s=100.0,
    because="budget",
    waiting=("o-1", "o-2"),
    prepare_by_s=105.25,
    again_at_s=570.0,
)


def latched(outcome: type[Done | Failed], action: object, phase: Shutdown = LATCHED, **fields: object) -> Step:
    state = State(phase=phase, feed=Feed(supply=Supply.BATTERY))
    more = {"reason": "refused"} if outcome is Failed else {}
    return step(POLICY, state, outcome(at_s=101.0, action=action, took_s=1.0, **more, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", [Done, Failed])
def test_the_power_off_waits_for_its_own_preparations_only(outcome: type[Done | Failed]) -> None:
    """A checkpoint that ends after the latch is not the disks' sync, whose word the power-off waits for."""
    write = TriggerCheckpoint(id="o-0", by_s=200.0, trainer="t", reason="on_battery", after=Conduct.PAUSE, outage="o")
    answer = latched(outcome, write)
    assert answer.state.phase == LATCHED
    assert not answer.actions
    sync = SyncFilesystems(id="o-2", by_s=105.0, outage="o")
    answer = latched(outcome, sync)
    assert answer.state.phase == replace(LATCHED, waiting=("o-1",))
    assert not answer.actions
    answer = latched(outcome, sync, replace(LATCHED, waiting=("o-2",)))
    assert [type(action) for action in answer.actions] == [PowerOff]


def test_what_the_host_says_of_its_power_off_is_reported() -> None:
    """How it will be done is what an operator asks first when it was not done."""
    ordered = replace(LATCHED, waiting=(), force_at_s=210.0)
    off = PowerOff(id="o-3", by_s=106.0, outage="o", grade=Grade.FULL, force_after_s=109.0)
    answer = latched(Done, off, ordered, detail=(("how", "powerguard-off"),))
    (note,) = answer.notes
    assert (note.event, note.numbers) == ("power_off_accepted", (("how", "powerguard-off"),))


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        (
            {"cause": "policy-always-on", "ac_failed": True, "firmware_s": 41.5},
            {"cause": "policy-always-on", "ac_failed": True, "firmware_s": 41.5},
        ),
        ({"ac_failed": False}, {"cause": "", "ac_failed": False, "firmware_s": None}),
        ({}, {"cause": "", "ac_failed": None, "firmware_s": None}),
    ],
)
def test_what_brought_the_host_back_is_reported_whole(fields: dict[str, object], numbers: dict[str, object]) -> None:
    """The report of the outage is made of this line: not told is not the same as no, nor as zero."""
    answer = after(PoweredOn(at_s=5.0, because="the BMC reports it", **fields))  # type: ignore[arg-type]
    assert notes(answer) == [("host_powered_on", "the BMC reports it")]
    assert dict(answer.notes[0].numbers) == numbers


def test_maintenance_without_a_reason_is_the_operators_word() -> None:
    word = SetMaintenance(at_s=5.0, until_s=9.0, reason="", who="alice")
    assert notes(after(word)) == [("maintenance_set", "operator")]
    assert notes(after(word, replace(word, at_s=6.0, until_s=0.0))) == [("maintenance_ended", "operator")]


# --- Utility is back, while training goes on ----------------------------------------------------------------------


def going_on(transfers: tuple[float, ...], **feed: object) -> State:
    """Return an outage in which training goes on, with utility back since 100 s."""
    return State(
        phase=OnBattery(outage=replace(OUTAGE, since_s=90.0)),
        feed=Feed(supply=Supply.UTILITY, since_s=100.0, reading=says(100.0), utility_seen=True, **feed),  # type: ignore[arg-type]
        battery=replace(FULL, at_s=100.0),
        transfers=transfers,
    )


def ended_at_s(state: State, until_s: int = 200) -> float | None:
    """Return when the outage is over, with a reading on utility each second; None: it is not."""
    for at_s in range(101, until_s + 1):
        answer = after(says(float(at_s)), state=state)
        if isinstance(answer.state.phase, Online):
            assert ("outage_ended", "utility returned before any action was needed") in notes(answer)
            return float(at_s)
        state = answer.state
    return None


@pytest.mark.parametrize(
    ("transfers", "ended_s"),
    [
        ((), 101.0),
        ((60.0, 90.0), 101.0),
        ((30.0, 60.0, 90.0), 130.0),
        # Five minutes after the third transfer back, it does not flap any more.
        ((-190.0, 60.0, 90.0), 111.0),
        ((-199.5, 60.0, 90.0), 101.0),
    ],
)
def test_utility_that_comes_and_goes_ends_the_outage_when_it_stays(
    transfers: tuple[float, ...], ended_s: float
) -> None:
    """Else each of its visits would be an outage of its own; one that stays ends at its first reading."""
    assert ended_at_s(going_on(transfers)) == ended_s


def test_utility_that_went_again_counts_from_its_return_while_it_flaps() -> None:
    state = after(says(110.0, "battery"), says(111.0, "battery"), says(112.0), state=going_on((30.0, 60.0, 90.0))).state
    assert isinstance(state.phase, OnBattery)
    assert state.feed.since_s == 112.0
    for at_s, phase in ((141.0, OnBattery), (142.0, Online)):
        fresh = replace(state, feed=replace(state.feed, reading=says(at_s - 1.0)))
        assert isinstance(after(says(at_s), state=fresh).state.phase, phase)


@pytest.mark.parametrize("transfers", [(), (30.0, 60.0, 90.0)])
def test_a_utility_that_nobody_sees_ends_no_outage(transfers: tuple[float, ...]) -> None:
    """Neither one that flaps nor one that stays: only ten minutes of silence after it do."""
    state = replace(going_on(transfers, lost_since_s=100.0))
    assert isinstance(after(Tick(at_s=699.0), state=state).state.phase, OnBattery)
    answer = after(Tick(at_s=700.0), state=state)
    assert isinstance(answer.state.phase, Online)
    assert ("gate_forced", "the UPS reported utility last, and has been silent or unclear for long") in notes(answer)


WORN = Battery(
    at_s=2.0,
    used=0.3,
    left=0.2,
    load=0.5,
    health=0.5,
    tau_point=(0.5, 900.0),
    unflagged=0.2,
    away_s=600.0,
    away_charge=0.4,
    model=BatteryModel(health=0.5, points=(TauPoint(load=0.5, tau_s=800.0, at_s=1.0),), recharge_s=7200.0),
)


@pytest.mark.parametrize("draining", [False, True])
def test_of_an_older_battery_only_what_holds_for_a_new_one_is_kept(*, draining: bool) -> None:
    """How long charging takes is kept. On battery what was left counts until the new one's charge is reported."""
    supply = Supply.BATTERY if draining else Supply.UTILITY
    read = says(2.0, "battery" if draining else "utility")
    state = State(battery=WORN, feed=Feed(supply=supply, since_s=1.0, reading=read))
    new = after(BatteryReplaced(at_s=2.0, who="alice"), state=state)
    mine = new.state.battery
    model = BatteryModel(recharge_s=7200.0, replaced_at_s=2.0)
    assert (mine.model, mine.health, mine.unflagged) == (model, POLICY.health, None)
    assert (mine.away_s, mine.away_charge) == (0.0, None)
    assert mine.presumed is draining
    if draining:
        assert (mine.used, mine.left, mine.tau_point) == (PRESUMED * POLICY.health, 0.2, (0.5, 900.0))
    else:
        assert (mine.used, mine.left, mine.tau_point) == (None, None, None)
    (note,) = [note for note in new.notes if note.event == "battery_replaced"]
    assert dict(note.numbers) == {"who": "alice"}
