"""How the daemon starts: for the first time, in the same boot, after a return."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from powerguard.core.comeback.recovery import Stored, reloaded, restore
from powerguard.core.comeback.validation import BOOTS_KEPT
from powerguard.core.decide.machine import step
from powerguard.core.decide.turn import Turn
from powerguard.core.energy import needs
from powerguard.core.model.actions import (
    Action,
    CapPower,
    DrainNode,
    EnsurePolicy,
    Grade,
    LeaveNode,
    Level,
    PowerOff,
    PowerOnMethod,
    RestorePower,
    ResumeTrainer,
    ResumeTraining,
    ReturnNode,
    SyncFilesystems,
    TriggerCheckpoint,
)
from powerguard.core.model.events import OutputSource, OwnLoad, OwnSource, Reading, Tick
from powerguard.core.model.policy import BatteryModel, Discharge, Drop, Learned, Mode
from powerguard.core.model.state import (
    Armed,
    Battery,
    CheckpointInFlight,
    Drill,
    DrillStage,
    Durable,
    EmergencyCheckpoint,
    Feed,
    GpuCap,
    Holding,
    Maintenance,
    NodeMarked,
    OnBattery,
    Online,
    Outage,
    Phase,
    Recovery,
    Shutdown,
    Signalled,
    State,
    Supplied,
    Supply,
    TemporaryPolicy,
    Trainer,
)
from powerguard.core.trainers import lifecycle
from tests.core.invariants import check_step
from tests.core.play import make_policy, play

POLICY = make_policy(["boot_id=boot-one-of-many", "trainer=a:pause:20:x"])
OUTAGE = Outage(id="o", since_s=1000.0, grade=Grade.SHORT, load_at_start=0.8, policy_verified=True, aborted_by="who")
READ = Reading(at_s=1990.0, ups="ups", source="snmp", output_source=OutputSource.BATTERY)
SAVED = State(
    phase=Holding(outage=OUTAGE, began_s=1500.0),
    feed=Feed(supply=Supply.BATTERY, since_s=1000.0, reading=READ, suspect=True, low_battery_at_s=1800.0),
    battery=Battery(at_s=1999.0, used=0.3, left=0.4, load=0.5, health=0.7, tau_point=(0.5, 600.0)),
    trainers=(Trainer(name="a", in_flight=CheckpointInFlight(order="o-7"), checkpoint=Durable()),),
    maintenance=Maintenance(until_s=5000.0, reason="r", who="w"),
    transfers=(1000.0,),
    serial=7,
    alarms=("overload",),
)
SHUTDOWN = Shutdown(
    outage=OUTAGE,
    boot_id=POLICY.boot_id,
    latched_s=1990.0,
    because="budget",
    waiting=("w-1", "w-2"),
    prepare_by_s=2006.0,
    ordered=True,
    force_at_s=2100.0,
    again_at_s=2400.0,
)


def stored(phase: Phase | None = None, *orders: Action, boot: str = POLICY.boot_id, **how: object) -> Stored:
    state = SAVED if phase is None else replace(SAVED, phase=phase)
    return Stored(**{"state": state, "boot_id": boot, "at_s": 2000.0, "in_flight": orders, **how})  # type: ignore[arg-type]


def test_for_the_first_time() -> None:
    begun = restore(POLICY, None, 12.0)
    assert begun.state == State(
        trainers=(Trainer(name="a", conduct=POLICY.trainers[0].conduct, checkpoint_s=20.0, disk="x"),),
        battery=Battery(at_s=12.0, health=0.75),
        up=True,
    )
    assert (begun.actions, begun.notes) == ((), ())
    (note,) = restore(
        replace(POLICY, methods=(PowerOnMethod.OUTPUT, PowerOnMethod.RTC), outputs=("a", "b")), None, 12.0
    ).notes
    assert (note.event, note.level) == ("power_on_unknown", Level.INFO)
    waking = restore(
        replace(POLICY, methods=(PowerOnMethod.OUTPUT, PowerOnMethod.RTC), outputs=("a", "b")), None, 12.0
    ).state.armed
    blank = Armed(method=PowerOnMethod.OUTPUT, ups="a", outage="", at_s=12.0, acts_at_s=12.0)
    assert waking == (blank, replace(blank, ups="b"), replace(blank, method=PowerOnMethod.RTC, ups=""))
    worn = restore(replace(POLICY, health=0.6), None, 12.0)
    assert worn.state.battery.health == 0.6, "what the settings say of the battery's health, before any reading"


# --- The same boot ------------------------------------------------------------------------------------------------


def test_the_same_boot_goes_on() -> None:
    """The same phase, account and deadlines; only the doubt of one unconfirmed reading begins anew."""
    flying = TriggerCheckpoint(id="o-7", by_s=2003.0, trainer="a", reason="on_battery", after="pause", outage="o")  # type: ignore[arg-type]
    answer = restore(POLICY, stored(None, flying), 2002.5004)
    assert answer.state == replace(SAVED, feed=replace(SAVED.feed, suspect=False), up=True)
    assert answer.actions == (flying,)
    (note,) = answer.notes
    assert (note.event, note.level) == ("outage_continued", Level.WARNING)
    assert dict(note.numbers) == {"phase": "holding", "outage": "o", "away_s": 2.5, "repeated": 1}


SITE = "policy table=50:540,75:360,100:240 trainer=llm:pause:20"
CALM = "0..5 utility load=75 charge=100 runtime=360"


@pytest.mark.parametrize("before", ["dry-run", "rehearse"])
def test_a_checkpoint_that_was_only_recorded_is_none_when_the_mode_becomes_armed(before: str) -> None:
    """Else the host would be powered off without one: in dry-run no trainer was asked."""
    result = play(
        f"{SITE} mode={before}",
        "auto policy sync poweroff checkpoint=10",
        CALM,
        "6..103 battery load=75 charge=100-0.27 runtime=360-1",
        SITE,
        "104 restart",
        "105..200 battery load=75 charge=73-0.27 runtime=260-1",
    )
    assert result.phase == "shutdown"
    assert len(result.ordered(TriggerCheckpoint)) == 2
    assert len(result.ordered(ResumeTrainer)) == 1, "one that a rehearsal has paused stands in no other way"
    assert isinstance(result.state.phase, Shutdown)
    assert result.state.phase.outage.mode is Mode.ARMED


@pytest.mark.parametrize("before", ["dry-run", "rehearse"])
def test_a_power_off_that_was_only_recorded_is_no_latch_when_the_mode_becomes_armed(before: str) -> None:
    """The host would be powered off by force at once, seconds after utility has come back."""
    result = play(
        f"{SITE} mode={before}",
        "auto policy sync poweroff checkpoint=10 trainer_resume",
        CALM,
        "6..200 battery load=75 charge=100-0.3 runtime=360-1.1",
        "201..203 utility load=75 charge=45 runtime=100",
        SITE,
        "204 restart",
        "205..230 utility load=75 charge=45 runtime=100",
    )
    (recorded,) = result.ordered(PowerOff)
    assert (recorded.by_s < 201.0, result.phase) == (True, "online")


def test_a_return_in_dry_run_goes_back_to_before_its_start_of_training_when_the_mode_becomes_armed() -> None:
    phase = Recovery(
        outage=replace(OUTAGE, mode=Mode.DRY_RUN),
        began_s=1990.0,
        clean=True,
        asked="r-1",
        tries=2,
        retry_at_s=5000.0,
        started_at_s=1995.0,
    )
    begun = Recovery(outage=replace(OUTAGE, mode=Mode.ARMED), began_s=1990.0, clean=True)
    assert restore(POLICY, stored(phase), 2002.0).state.phase == begun


def test_a_power_off_after_a_return_in_rehearse_is_a_latch_once_the_mode_is_armed() -> None:
    """A daemon that is killed after the order must not take the outage back to its beginning: the host goes off."""
    result = play(
        SITE,
        "auto policy sync checkpoint=10 survives",
        CALM,
        "6..30 battery load=75 charge=9 runtime=20",
        f"{SITE} mode=rehearse",
        "31 reboot gap=300",
        SITE,
        "32 restart",
        "33..60 battery load=75 charge=9 runtime=20",
        "61 restart",
    )
    assert len(result.ordered(PowerOff)) > 1
    assert isinstance(result.state.phase, Shutdown)
    assert result.state.phase.outage.mode is Mode.ARMED


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        (Mode.DRY_RUN, {}),
        (Mode.REHEARSE, {"drained": True, "signalled": True, "running": ("12",)}),
    ],
)
def test_a_mark_on_the_node_that_was_only_recorded_is_set_when_the_mode_becomes_armed(
    mode: Mode, kept: dict[str, Any]
) -> None:
    """A rehearsal drains the node and signals its jobs; that it leaves at the commit is only recorded."""
    marked = NodeMarked(
        outage="o", at_s=1990.0, drained=True, left=True, leaving=True, recorded=True, signalled=True, running=("12",)
    )
    saved = replace(SAVED, phase=Holding(outage=replace(OUTAGE, mode=mode), began_s=1990.0), owed=(marked,))
    policy = replace(POLICY, scheduler=True)
    answer = restore(policy, replace(stored(), state=saved), 2002.0)
    node = answer.state.node
    assert node == NodeMarked(outage="o", at_s=1990.0, **kept)


@pytest.mark.parametrize(("answered", "rebooted"), [("leave", False), ("", True)])
def test_a_boot_that_the_scheduler_did_not_expect_is_known_at_the_return(answered: str, *, rebooted: bool) -> None:
    """The network had no power: the order at the commit got no answer, so the scheduler sees an unexpected boot."""
    result = play(
        f"{SITE} scheduler=1",
        f"auto policy sync poweroff checkpoint=10 trainer_resume resume host {answered}",
        "detail leave did=down",
        CALM,
        "6..400 battery load=75 charge=100-0.27 runtime=360-1",
        "900 reboot gap=100",
        "901..915 utility load=20 charge=99 runtime=900",
    )
    assert [each.rebooted for each in result.ordered(ReturnNode)] == [rebooted]


@pytest.mark.parametrize("site", [SITE, f"{SITE} scheduler=1 mode=dry-run"])
def test_a_mark_that_may_be_there_is_forgotten_with_the_scheduler(site: str) -> None:
    """One that is not installed after all would be an alarm at every boot."""
    result = play(
        f"{SITE} scheduler=1",
        "auto policy resume",
        "0..61 utility load=75 charge=100 runtime=360",
        "62 failed give_back no helper",
        site,
        "63 restart",
        "64..140 utility load=75 charge=100 runtime=360",
    )
    assert len(result.ordered(ReturnNode)) == 1
    assert [note.event for note in result.notes] == ["scheduler_failed_raised", "scheduler_failed_cleared"]
    assert result.state.owed == ()


CAPS = "cap_share=0.6"


def test_a_gpu_cap_that_was_only_recorded_is_ordered_when_the_mode_becomes_armed() -> None:
    result = play(
        f"{SITE} mode=dry-run {CAPS}",
        "auto policy sync poweroff checkpoint=10 cap restore",
        "1 learned cap=75:50:0.8",
        "2..5 utility load=75 charge=100 runtime=360",
        "6..30 battery load=75 charge=100-0.27 runtime=360-1",
        f"{SITE} {CAPS}",
        "31 restart",
        "32..40 battery load=75 charge=93-0.27 runtime=335-1",
    )
    assert [cap.by_s > 31.0 for cap in result.ordered(CapPower)] == [False, True]
    assert result.state.cap is not None


@pytest.mark.parametrize(("before", "drains"), [("dry-run", 2), ("rehearse", 1)])
def test_what_the_scheduler_did_not_hear_it_hears_when_the_mode_becomes_armed(before: str, drains: int) -> None:
    """In rehearse the node is drained, but its jobs are not requeued."""
    result = play(
        f"{SITE} scheduler=1 mode={before}",
        "auto policy sync poweroff checkpoint=10 trainer_resume drain signal"
        + (" leave" if before == "rehearse" else ""),
        CALM,
        "6..200 battery load=75 charge=100-0.3 runtime=360-1.1",
        f"{SITE} scheduler=1",
        "201 restart",
        "202..330 battery load=75 charge=42-0.3 runtime=140-1.1",
    )
    assert result.phase == "shutdown"
    assert len(result.ordered(DrainNode)) == drains
    assert [each.by_s > 201.0 for each in result.ordered(LeaveNode)][-1]


def test_a_checkpoint_that_dry_run_recorded_is_none_although_the_outage_began_armed() -> None:
    """armed, dry-run, armed: the host would be powered off without the checkpoint of the time between."""
    result = play(
        SITE,
        "auto policy sync poweroff checkpoint=10",
        CALM,
        "6..8 battery load=75 charge=100-0.27 runtime=360-1",
        f"{SITE} mode=dry-run",
        "9 restart",
        "10..103 battery load=75 charge=99-0.27 runtime=356-1",
        SITE,
        "104 restart",
        "105..200 battery load=75 charge=73-0.27 runtime=260-1",
    )
    assert result.phase == "shutdown"
    assert len(result.ordered(TriggerCheckpoint)) == 2


def test_training_that_was_not_started_in_dry_run_is_started_when_the_mode_becomes_armed() -> None:
    result = play(
        f"{SITE} mode=dry-run",
        "auto policy resume",
        CALM,
        "6..60 battery load=75 charge=100-0.27 runtime=360-1",
        "20 reboot gap=60",
        "21..50 utility load=20 charge=95 runtime=900",
        SITE,
        "51 restart",
        "52..59 utility load=20 charge=95 runtime=900",
    )
    assert len(result.ordered(ResumeTraining)) == 2


BATTERY = OutputSource.BATTERY
UTILITY = OutputSource.UTILITY


@pytest.mark.parametrize(
    ("readings", "grade"),
    [
        (((31, UTILITY, 100), (32, BATTERY, 100)), Grade.FULL),
        (((31, UTILITY, 12), (32, BATTERY, 12)), Grade.BARE),
        # The power fails twice in one return, and the battery is charged between.
        (
            ((31, UTILITY, 12), (32, BATTERY, 12), (33, UTILITY, 12), (28800, UTILITY, 100), (28801, BATTERY, 100)),
            Grade.FULL,
        ),
    ],
)
def test_a_stop_after_a_return_is_graded_by_what_the_battery_holds_then(
    readings: Sequence[tuple[float, OutputSource, int]], grade: Grade
) -> None:
    """The last outage ended with an empty battery and a bare stop; this one begins with another charge."""
    saved = replace(SHUTDOWN, outage=replace(OUTAGE, grade=Grade.BARE, lowered=True))
    policy = replace(POLICY, runtime_table=((0.5, 2000.0), (1.0, 900.0)))
    state = restore(policy, stored(saved, boot="another", gap_s=86400.0), 30.0).state
    for at_s, source, charge in readings:
        reading = Reading(
            at_s=at_s,
            ups="ups",
            source="snmp",
            output_source=source,
            load_pct=50.0,
            charge_pct=charge,
            on_battery_s=1.0 if source is BATTERY else None,
        )
        answer = step(policy, state, reading)
        check_step(policy, state, reading, answer)
        state = answer.state
    assert isinstance(state.phase, Recovery)
    assert (state.phase.outage.grade, state.phase.outage.lowered) == (grade, False)


@pytest.mark.parametrize("mode", [Mode.REHEARSE, Mode.DRY_RUN])
def test_a_latch_stays_one_in_a_mode_that_carries_out_less(mode: Mode) -> None:
    answer = restore(replace(POLICY, mode=mode), stored(SHUTDOWN), 2002.0)
    assert isinstance(answer.state.phase, Shutdown)


def test_a_power_off_that_was_only_recorded_did_not_end_the_host() -> None:
    outage = replace(OUTAGE, mode=Mode.DRY_RUN)
    answer = restore(POLICY, stored(replace(SHUTDOWN, outage=outage), boot="another"), 30.0)
    assert isinstance(answer.state.phase, Recovery)
    assert not answer.state.phase.clean
    (note,) = [note for note in answer.notes if note.event == "host_returned"]
    assert note.because == "the host went down after a power-off that was only recorded"


@pytest.mark.parametrize(("gap_s", "away_s"), [(600.0, 600.0), (-86400.0, None), (None, None)])
def test_how_long_the_host_was_away_is_unknown_where_the_clock_at_boot_is_wrong(
    gap_s: float | None, away_s: float | None
) -> None:
    """Its battery is empty: the boot begins before the outage. "Away for 0 s" would be wrong."""
    answer = restore(POLICY, replace(stored(SHUTDOWN, boot="another"), gap_s=gap_s), 30.0)
    (note,) = [note for note in answer.notes if note.event == "host_returned"]
    assert dict(note.numbers)["away_s"] == away_s


@pytest.mark.parametrize("restarted", [True, False])
def test_what_measured_the_own_load_before_the_settings_changed_raises_no_alarm(*, restarted: bool) -> None:
    """The PDU was taken out of the settings: it would be doubted for its silence for ever."""
    made = make_policy(["boot_id=boot-one-of-many", "shared=hosts:2", "rating_w=5400", "table=50:540,100:240"])
    state = restore(made, None, 0.0).state
    for source in (OwnSource.PDU, OwnSource.GPU):
        state = step(made, state, OwnLoad(at_s=1.0, source=source, watts=1500.0)).state
    state = (
        restore(made, Stored(state=state, boot_id=made.boot_id, at_s=1.0), 2.0).state
        if restarted
        else reloaded(made, made, state, 2.0)
    )
    for event in (
        Reading(at_s=500.0, ups="ups", source="snmp", output_source=OutputSource.UTILITY, load_pct=75.0),
        OwnLoad(at_s=501.0, source=OwnSource.GPU, watts=1501.0),
    ):
        state = step(made, state, event).state
    assert state.alarms == ()


def test_an_order_out_of_time_is_not_repeated_and_is_owed_again() -> None:
    flying = TriggerCheckpoint(id="o-7", by_s=2002.5, trainer="a", reason="on_battery", after="pause", outage="o")  # type: ignore[arg-type]
    answer = restore(POLICY, stored(None, flying), 2002.5)
    assert answer.actions == ()
    assert answer.state.trainers[0].order is None


def test_what_cannot_be_true_is_reported_and_the_outage_goes_on() -> None:
    """One bad number is an error that a person sees; what was on its way is on its way all the same."""
    flying = TriggerCheckpoint(id="o-7", by_s=2003.0, trainer="a", reason="on_battery", after="pause", outage="o")  # type: ignore[arg-type]
    wrong = replace(SAVED, battery=replace(SAVED.battery, used=7.0, load=-1.0))
    answer = restore(POLICY, stored(None, flying, state=wrong), 2002.5)
    assert (answer.state.battery.used, answer.actions) == (None, (flying,))
    result = answer.notes[0]
    assert (result.event, result.level) == ("history_dropped", Level.ERROR)
    assert result.because.endswith(": battery.used, battery.load")


def test_one_unconfirmed_reading_of_any_feed_is_forgotten() -> None:
    """Of one that was suspect when the daemon stopped, the second word is waited for anew."""
    two = make_policy(["boot_id=boot-one-of-many", "feed=a", "feed=b"])
    feed = replace(SAVED.feed, supply=Supply.UTILITY)
    upses = tuple(Supplied(ups=ups, feed=feed, battery=SAVED.battery) for ups in "ab")
    answer = restore(two, stored(state=replace(SAVED, upses=upses)), 2002.5)
    assert [each.feed for each in answer.state.upses] == [replace(feed, suspect=False)] * 2


def test_settings_that_are_read_again_bring_a_trainer_with_what_is_known_of_it() -> None:
    """No outage needs to be over: it is there at once, with the time that its checkpoints are known to take."""
    more = replace(POLICY, trainers=(*POLICY.trainers, replace(POLICY.trainers[0], name="n")))
    learned = needs.add(SAVED.learned, "checkpoint", 70.0, "n")
    begun = reloaded(POLICY, more, replace(SAVED, learned=learned), 2000.0).trainers
    assert [each.name for each in begun] == ["a", "n"]
    assert begun[0] == SAVED.trainers[0]
    assert begun[1].checkpoint_s == needs.checkpoint_s(learned, "n", 20.0) > 20.0
    assert reloaded(more, POLICY, replace(SAVED, trainers=begun), 2000.0).trainers == begun[:1]


def test_online_nothing_is_reported() -> None:
    assert restore(POLICY, stored(Online()), 2002.5).notes == ()


def test_settings_that_have_gained_a_trainer() -> None:
    grown = make_policy(["boot_id=boot-one-of-many", "trainer=a:pause:20:x", "trainer=n:exit:9"])
    names = [(t.name, t.checkpoint_s) for t in restore(grown, stored(), 2002.5).state.trainers]
    assert names == [("a", 60.0), ("n", 9.0)], "what is known of a stays as it is"


@pytest.mark.parametrize(
    ("phase", "again"),
    [
        (Online(), True),
        (OnBattery(outage=OUTAGE), True),
        (SAVED.phase, False),
        (EmergencyCheckpoint(outage=OUTAGE, began_s=1.0, because="budget"), False),
    ],
)
def test_the_word_to_go_on_is_owed_until_it_is_heard(phase: Phase, *, again: bool) -> None:
    """Order and outcome lost with a kill: nobody else would let it go on. What a later outage has paused stays so."""
    (trainer,) = SAVED.trainers
    feed = replace(SAVED.feed, supply=Supply.UTILITY, suspect=False)
    begun = Turn(
        POLICY, replace(SAVED, feed=feed, trainers=(replace(trainer, in_flight=None, pause_ordered=True),)), 1999.0
    )
    lifecycle.resume_all(begun)
    (order,) = begun.actions
    assert isinstance(order, ResumeTrainer)
    assert order.by_s == 2009.0
    state = replace(begun.state, phase=phase)
    known = restore(POLICY, Stored(state=state, boot_id=POLICY.boot_id, at_s=2000.0), 2009.5)
    assert known.actions == (), "as long as it may be on its way"
    answer = step(POLICY, known.state, Tick(at_s=2010.0))
    assert [a.trainer for a in answer.actions if isinstance(a, ResumeTrainer)] == (["a"] if again else [])
    in_time = Stored(state=state, boot_id=POLICY.boot_id, at_s=2000.0, in_flight=(order,))
    assert restore(POLICY, in_time, 2002.0).actions == (order,), "repeated as it was"


@pytest.mark.parametrize("phase", [SAVED.phase, SHUTDOWN, Online()], ids=lambda phase: type(phase).__name__)
def test_the_bmcs_policy_is_asked_for_again_when_its_answer_was_lost(phase: Phase) -> None:
    """Killed at the commit, it may not be set; killed after it was, nobody knows what to put back. A drill's is not."""
    lost = [EnsurePolicy(id=id_, by_s=2001.0, outage="o") for id_ in ("e-1", "e-2")]
    answer = restore(POLICY, stored(phase, *lost, EnsurePolicy(id="e-3", by_s=2001.0, outage="")), 2002.0)
    (anew,) = answer.actions
    assert anew == EnsurePolicy(id=anew.id, by_s=2002.0 + POLICY.bmc_limit_s, outage="o")
    assert anew.id not in {"e-1", "e-2", "e-3"}
    alive = EnsurePolicy(id="e-1", by_s=2009.0, outage="o")
    assert restore(POLICY, stored(phase, alive), 2002.0).actions == (alive,)


def test_latched_is_latched() -> None:
    """What the power-off waits for is repeated, its word is ordered anew, and at once where nobody has accepted it."""
    sync = SyncFilesystems(id="w-2", by_s=2005.0, outage="o")
    word = PowerOff(id="p-1", by_s=2005.0, outage="o", grade=Grade.SHORT, force_after_s=45.0)
    answer = restore(POLICY, stored(SHUTDOWN, sync, word), 2002.0)
    assert answer.actions == (sync,)
    assert answer.state.phase == replace(SHUTDOWN, waiting=("w-2",))
    unheard = restore(POLICY, stored(replace(SHUTDOWN, ordered=False), word), 2002.0)
    assert unheard.state.phase == replace(SHUTDOWN, ordered=False, waiting=(), again_at_s=2002.0)


@pytest.mark.parametrize(("by_s", "asked"), [(2003.0, "r-1"), (2001.0, None)])
def test_training_that_was_being_started(by_s: float, asked: str | None) -> None:
    phase = Recovery(outage=OUTAGE, began_s=1990.0, clean=True, asked="r-1", tries=1)
    answer = restore(POLICY, stored(phase, ResumeTraining(id="r-1", by_s=by_s, outage="o")), 2002.0)
    assert answer.state.phase == replace(phase, asked=asked)
    assert len(answer.actions) == (asked is not None)


def test_an_order_that_the_journal_has_no_more_is_not_waited_for() -> None:
    """One action in it that cannot be read: training would stay off, and a method armed, until the next boot."""
    stuck = Armed(
        method=PowerOnMethod.WATCHDOG, outage="o", at_s=1990.0, acts_at_s=5000.0, order="gone-1", confirmed=True
    )
    phase = Recovery(outage=OUTAGE, began_s=1990.0, clean=True, asked="gone-2", tries=1)
    state = replace(SAVED, phase=phase, owed=(stuck,))
    answer = restore(POLICY, Stored(state=state, boot_id=POLICY.boot_id, at_s=2000.0), 2002.0)
    assert answer.state.phase == replace(phase, asked=None)
    assert answer.state.armed == (replace(stuck, order=None),)


def test_nor_are_a_cap_a_signal_and_a_checkpoint_that_it_does_not_know() -> None:
    """GPUs would stay slow, a trainer stopped and another without its checkpoint, until the next boot."""
    state = replace(
        SAVED,
        owed=(
            GpuCap(outage="o", at_s=1990.0, order="gone-1", lifting=True),
            Signalled(trainer="a", outage="o", word="continue", at_s=1990.0, order="gone-2"),
        ),
        trainers=(replace(SAVED.trainers[0], in_flight=CheckpointInFlight(order="gone-3")),),
    )
    answer = restore(POLICY, stored(state=state), 2002.0)
    assert answer.actions == ()
    assert answer.state.cap == replace(state.cap, order=None)  # type: ignore[type-var]
    assert answer.state.signalled == (replace(state.signalled[0], order=None),)
    assert answer.state.trainers == (replace(state.trainers[0], in_flight=None),)


def test_what_a_drill_orders_again_is_not_ordered_twice() -> None:
    """It puts back what it has capped, by an order that nobody has repeated: that one has an answer to come."""
    drill = Drill(
        id="d", began_s=1900.0, who="w", scopes=("cap",), witness="simulated", part=DrillStage(name="cap", at_s=1950.0)
    )
    standing = GpuCap(outage="d", at_s=1950.0, order="c-1")
    flying = CapPower(id="c-1", by_s=2005.0, outage="d", share=0.6)
    answer = restore(
        POLICY, stored(Online(), flying, state=replace(SAVED, phase=Online(), drill=drill, owed=(standing,))), 2002.0
    )
    (order,) = [action for action in answer.actions if isinstance(action, RestorePower)]
    assert answer.state.cap is not None
    assert (answer.state.cap.order, answer.state.cap.lifting) == (order.id, True)


# --- Another boot -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "clean", "because"),
    [
        (SHUTDOWN, True, "powered off by us"),
        (replace(SHUTDOWN, force_at_s=0.0), False, "the host went down between the commit and its power-off"),
        (SAVED.phase, False, "the host went down before the commit point"),
        (OnBattery(outage=OUTAGE), False, "the host went down before the commit point"),
        (
            EmergencyCheckpoint(outage=OUTAGE, began_s=1.0, because="b"),
            False,
            "the host went down before the commit point",
        ),
    ],
)
def test_another_boot_is_a_return(phase: Phase, because: str, *, clean: bool) -> None:
    """Times are moved into the new clock: the outage began 1000 s before the last entry, and 600 s lie between."""
    answer = restore(POLICY, stored(phase, boot="boot-zero", gap_s=600.0), 30.0)
    outage = replace(OUTAGE, since_s=30.0 - 600.0 - 1000.0, aborted_by="", boots=(30.0,), grade=Grade.FULL)
    assert answer.state == State(
        phase=Recovery(outage=outage, began_s=30.0, clean=clean),
        feed=Feed(since_s=30.0),
        battery=Battery(at_s=30.0, used=0.3, health=0.7, tau_point=(0.5, 600.0), away_s=600.0),
        trainers=(Trainer(name="a", conduct=POLICY.trainers[0].conduct, checkpoint_s=20.0, disk="x"),),
        maintenance=Maintenance(until_s=5000.0 + 30.0 - 2600.0, reason="r", who="w"),
        serial=8,
        up=True,
    )
    assert [(type(o), o.by_s, o.outage) for o in answer.actions] == [(EnsurePolicy, 35.0, "o")]  # type: ignore[attr-defined]
    (note,) = answer.notes
    assert (note.event, note.because) == ("host_returned", because)
    assert note.level is (Level.INFO if isinstance(phase, Shutdown) else Level.ERROR)
    assert dict(note.numbers)["away_s"] == 600.0


def test_the_discharge_before_the_power_off_teaches_in_the_next_boot() -> None:
    """81 % of a new battery were used when the host went off: it holds more than the 75 % that were presumed."""
    going = Discharge(since_s=1000.0, used=0.0, charge=1.0, charge_now=0.1)
    old = stored(replace(SHUTDOWN, force_at_s=2000.0), boot="boot-zero", gap_s=600.0)
    battery = replace(old.state.battery, used=0.81, model=BatteryModel(discharge=going))
    answer = restore(POLICY, replace(old, state=replace(old.state, battery=battery)), 30.0)
    health = answer.state.battery.model.health
    assert health is not None
    assert (health.share, health.at_s) == (pytest.approx(0.9), 30.0 - 600.0)
    assert answer.state.battery.model.discharge is None


def test_what_was_learned_and_is_to_be_put_back_goes_with_it() -> None:
    """In the new boot's time: an age that is wrong would let a drill count for ever, or the BMC's policy stay."""
    drop = Drop(before=0.7, after=0.3, at_s=1500.0, speed=0.8)
    model = BatteryModel(replaced_at_s=1000.0)
    saved = replace(
        SAVED,
        battery=replace(SAVED.battery, model=model),
        learned=Learned(cap=drop),
        owed=(TemporaryPolicy(policy="last-state", retry_at_s=5000.0, order="r-1"),),
    )
    state = restore(POLICY, stored(boot="boot-zero", gap_s=600.0, state=saved), 30.0).state
    shift_s = 30.0 - 600.0 - 2000.0
    assert state.battery.model == replace(model, replaced_at_s=1000.0 + shift_s)
    assert state.learned.cap == replace(drop, at_s=1500.0 + shift_s)
    assert state.temporary_policy == TemporaryPolicy(policy="last-state", at_s=30.0, retry_at_s=30.0)


def test_only_so_many_returns_are_counted() -> None:
    boots = tuple(float(at_s) for at_s in range(1000, 1020))
    outage = replace(OUTAGE, boots=boots[-BOOTS_KEPT:])
    phase = restore(POLICY, stored(OnBattery(outage=outage), boot="boot-zero", gap_s=0.0), 30.0).state.phase
    assert isinstance(phase, Recovery)
    assert phase.outage.boots == (*(at_s - 1970.0 for at_s in boots[1 - BOOTS_KEPT :]), 30.0)
    assert len(phase.outage.boots) == BOOTS_KEPT


@pytest.mark.parametrize(
    ("charged", "health", "away_charge"),
    [(0.6, 0.75, 0.8), (0.6, 0.5, 1.0), (0.0, 0.75, 0.0), (0.0, 0.0, None), (None, 0.75, None)],
)
def test_the_charge_before_the_return_is_kept_to_be_compared(
    charged: float | None, health: float, away_charge: float | None
) -> None:
    """Also of a battery that has been measured as worn out: the daemon must start with it."""
    saved = replace(SAVED, battery=replace(SAVED.battery, charged=charged, health=health))
    answer = restore(POLICY, stored(boot="boot-zero", gap_s=600.0, state=saved), 30.0)
    assert answer.state.battery.away_charge == (None if away_charge is None else pytest.approx(away_charge))


def test_a_return_that_is_interrupted_goes_on_as_a_return() -> None:
    phase = Recovery(outage=OUTAGE, began_s=1990.0, clean=True, due_at_s=1.0, asked="r-1", tries=2, retry_at_s=1999.0)
    answer = restore(POLICY, stored(phase, boot="boot-zero", gap_s=600.0), 30.0)
    outage = replace(OUTAGE, since_s=-1570.0, aborted_by="", boots=(30.0,), grade=Grade.FULL)
    assert answer.state.phase == Recovery(outage=outage, began_s=30.0, clean=True)


def test_from_online_it_is_online() -> None:
    answer = restore(POLICY, stored(Online(), boot="boot-zero", gap_s=600.0), 30.0)
    assert (answer.state.phase, answer.actions, answer.notes) == (Online(), (), ())
    assert answer.state.battery.used == 0.3


def test_what_the_charge_fell_by_while_the_host_was_off_is_counted_once() -> None:
    """It bounds the account, and shows what was used: counted for both, a battery at 60 % was taken for empty."""
    result = play(
        SITE,
        CALM,
        "6 reboot gap=1800",
        "7..8 utility load=10 charge=60 runtime=3000",
    )
    assert result.state.battery.used == pytest.approx(0.4, abs=0.001)
    assert result.state.battery.left == pytest.approx(0.75 - 0.4, abs=0.001)


@pytest.mark.parametrize(
    ("gap_s", "away_s"),
    [(None, 0.0), (-1.0, 0.0), (0.0, 0.0), (2592000.0, 2592000.0), (2592000.1, 0.0), (1e12, 0.0), (float("nan"), 0.0)],
)
def test_a_wall_clock_that_lies_recharges_nothing(gap_s: float | None, away_s: float) -> None:
    answer = restore(POLICY, stored(SAVED.phase, boot="boot-zero", gap_s=gap_s), 30.0)
    assert answer.state.battery.away_s == away_s
    assert answer.state.battery.used == 0.3


@pytest.mark.parametrize(("until_s", "kept"), [(2600.1, True), (2600.0, False), (2100.0, False)])
def test_maintenance_ends_by_the_same_clock(until_s: float, *, kept: bool) -> None:
    """The entry was at 2000, and 600 s have passed since."""
    state = replace(SAVED, maintenance=Maintenance(until_s=until_s, reason="r", who="w"))
    answer = restore(POLICY, Stored(state=state, boot_id="boot-zero", at_s=2000.0, gap_s=600.0), 30.0)
    assert (answer.state.maintenance is not None) is kept


def test_an_outage_does_not_begin_after_now() -> None:
    state = replace(SAVED, phase=OnBattery(outage=replace(OUTAGE, since_s=9000.0)))
    answer = restore(POLICY, Stored(state=state, boot_id="boot-zero", at_s=2000.0), 30.0)
    assert isinstance(answer.state.phase, Recovery)
    assert answer.state.phase.outage.since_s == 30.0


def test_a_clock_that_ran_backwards_is_another_boot() -> None:
    """The same id, but an entry from the future: a restored disk, or a boot id that is not one."""
    answer = restore(POLICY, stored(SHUTDOWN), 1999.9)
    assert isinstance(answer.state.phase, Recovery)
    assert isinstance(restore(POLICY, stored(SHUTDOWN), 2000.0).state.phase, Shutdown)


def test_the_return_is_reported_with_its_outage() -> None:
    answer = restore(POLICY, stored(SHUTDOWN, boot="boot-zero", gap_s=1.2345), 30.0)
    assert dict(answer.notes[0].numbers) == {"outage": "o", "phase": "shutdown", "away_s": 1.234}
    short = restore(POLICY, stored(SHUTDOWN, boot="boot-zero", gap_s=0.5), 30.0)
    assert short.state.battery.away_s == 0.5


def test_an_order_to_start_training_that_still_has_time_is_not_doubled() -> None:
    start = ResumeTraining(id="r-2", by_s=2009.0, outage="o")
    assert restore(POLICY, stored(Online(), start), 2002.0).actions == (start,)
