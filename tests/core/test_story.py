"""What an operator reads: every note of an outage with its level and all of its numbers."""

import pytest

from powerguard.core.decide.machine import step
from powerguard.core.model.actions import EnsurePolicy, Grade, Level, Note, PollNow, PowerOff
from powerguard.core.model.events import Abort, OutputSource, Reading, SourceFailed, Tick
from powerguard.core.model.state import Battery, Feed, Maintenance, OnBattery, Online, Outage, Recovery, State, Supply
from tests.core.play import make_policy, play

BEGIN = """
policy table=50:540,75:360,100:240 trainer=llm:pause:20
auto policy sync poweroff resume trainer_resume checkpoint=15
0..5 utility load=75 charge=100 runtime=360
"""
BATTERY = "6..86 battery load=75 charge=100-0.27 runtime=350-1"
HOLD = "87..110 battery load=45 charge=78-0.15 runtime=500-1"
END = "111..200 battery load=45 charge=74-0.15 runtime=476-1"


def first_notes(*story: str) -> dict[str, Note]:
    """Return the first note of each kind."""
    first: dict[str, Note] = {}
    for note in play(BEGIN, *story).notes:
        first.setdefault(note.event, note)
    return first


def numbers(note: Note) -> dict[str, object]:
    return dict(note.numbers)


def test_how_an_outage_begins() -> None:
    note = first_notes(BATTERY)["outage_began"]
    assert (note.because, note.level) == ("second_reading", Level.WARNING)
    assert numbers(note) == {
        "outage": "boot-one-70",
        "grade": Grade.FULL,
        "source": "snmp",
        "charge_pct": pytest.approx(99.73),
        "load_pct": 75.0,
        "runtime_s": 349.0,
    }


def test_every_move_is_reported_with_its_sums() -> None:
    """0.75 - 1/360 left after a second; tau(45 %) is 540 * 0.54 / 0.49 s."""
    note = first_notes(BATTERY)["phase_changed"]
    left = 0.75 - 0.0027 * 0.75
    assert numbers(note) == {
        "old": "online",
        "new": "on_battery",
        "cause": "battery confirmed",
        "reff_now_s": pytest.approx(214.38, abs=0.5),
        "reff_s": pytest.approx(214.38, abs=0.5),
        "reff_paused_s": pytest.approx(354.4, abs=0.1),
        "checkpoint_s": 20.0,
        "stop_s": 170.0,
        "slack_s": pytest.approx(354.4 - 190.0, abs=0.1),
        "left": pytest.approx(left, abs=0.01),
        "load": 0.75,
        "grade": Grade.FULL,
        "cut_in_s": None,
    }


def test_how_it_ends() -> None:
    note = first_notes(BATTERY, HOLD, "111..125 utility load=45 charge=75 runtime=460")["outage_ended"]
    assert (note.because, note.level) == ("utility stable for 10 s", Level.INFO)
    assert numbers(note) == {
        "outage": "boot-one-70",
        "outcome": "resumed_in_place",
        "lasted_s": 115.0,
        "policy_verified": True,
    }


def test_how_the_power_off_is_shown() -> None:
    notes = first_notes(BATTERY, HOLD, END)
    ordered, accepted, verified = (notes[n] for n in ("power_off_ordered", "power_off_accepted", "policy_verified"))
    assert (ordered.because, ordered.level) == ("all preparations are done", Level.WARNING)
    assert numbers(ordered) == {"force_after_s": pytest.approx(109.9), "grade": Grade.FULL}
    assert (accepted.because, accepted.level) == ("the program that powers the host off took the order", Level.WARNING)
    assert (verified.level, numbers(verified)) == (Level.INFO, {"policy": "always-on", "verified": True})


def test_a_source_that_is_lost_says_what_we_do_about_it() -> None:
    on_utility = first_notes("8 lost no answer", "20 utility load=75")
    lost = on_utility["source_lost"]
    assert (lost.because, lost.level) == ("no answer", Level.ERROR)
    assert numbers(lost) == {"source": "snmp", "conduct": "alarm; no action on utility"}
    back = on_utility["source_recovered"]
    assert (back.because, back.level, numbers(back)) == (
        "snmp answers",
        Level.INFO,
        {"source": "snmp", "lost_s": 12.0},
    )
    on_battery = first_notes(BATTERY, "87 lost no answer")["source_lost"]
    assert numbers(on_battery)["conduct"] == "dead reckoning from the last reading"


def test_who_did_what() -> None:
    stop = first_notes("6..20 battery load=75 charge=100 on_battery=1+1", "21 sigterm host")["foreign_stop_seen"]
    assert (stop.because, stop.level) == ("another program shuts the host down", Level.WARNING)
    assert numbers(stop) == {"phase": "on_battery"}
    daemon = first_notes("6..20 battery load=75 charge=100 on_battery=1+1", "21 sigterm")["foreign_stop_seen"]
    assert daemon.because == "the daemon is being stopped"
    arming = play(BEGIN, "6..20 battery load=75 charge=100 on_battery=1+1", "21 sigterm host").ordered(EnsurePolicy)
    assert [(order.by_s, order.outage) for order in arming] == [(18.0, "boot-one-60"), (26.0, "boot-one-60")]  # type: ignore[attr-defined]
    works = first_notes("6 maintenance 20", "7..40 utility load=75")
    assert numbers(works["maintenance_set"]) == {"who": "alice"}
    assert numbers(works["maintenance_ended"]) == {"who": "alice"}
    assert numbers(first_notes("6 checkpoint_now")["checkpoint_requested"]) == {"who": "alice"}


def test_what_has_failed() -> None:
    note = first_notes("6 checkpoint_now", "7 failed llm disk full")["action_failed"]
    assert (note.because, note.level) == ("disk full", Level.ERROR)
    assert numbers(note) == {"action": "TriggerCheckpoint", "took_s": 0.1}


def test_low_battery_and_a_countdown_taken_back() -> None:
    low = first_notes("6..20 battery load=75 charge=40 runtime=90-1 on_battery=1+1 low_battery")["battery_low"]
    assert (low.because, low.level, numbers(low)) == ("two readings", Level.WARNING, {"runtime_s": 89.0})
    off = first_notes("6..10 utility load=75 off_in=180-1", "11..12 utility load=75")["power_off_cancelled"]
    assert (off.because, off.level) == ("the countdown was read back as cancelled", Level.INFO)


# --- Aborts and maintenance, at the border ------------------------------------------------------------------------

OUTAGE = Outage(id="o", since_s=0.0, grade=Grade.FULL)
POLICY = make_policy(["table=50:2000,100:1000"])


@pytest.mark.parametrize(
    ("reason", "because"), [("", "alice"), ("a test of the generator", "alice: a test of the generator")]
)
def test_an_abort_is_remembered_with_its_reason(reason: str, because: str) -> None:
    for phase in (OnBattery(outage=OUTAGE), Recovery(outage=OUTAGE, began_s=1.0, clean=True)):
        feed = Feed(supply=Supply.BATTERY, since_s=50.0)
        state = State(phase=phase, feed=feed, battery=Battery(at_s=99.0, left=0.7, load=1.0, used=0.0))
        answer = step(POLICY, state, Abort(at_s=100.0, who="alice", reason=reason))
        assert not isinstance(answer.state.phase, Online)
        assert answer.state.phase.outage.aborted_by == because
        note = answer.notes[0]
        assert (note.event, note.because, note.level) == ("shutdown_aborted", because, Level.WARNING)
        assert numbers(note) == {"who": "alice"}
    assert step(POLICY, State(), Abort(at_s=100.0, who="alice")).notes == ()


def test_nothing_pending_makes_a_tick_idle_and_anything_pending_does_not() -> None:
    """Online a tick costs nothing, unless maintenance or a guard must end by it."""
    state = State(feed=Feed(supply=Supply.UTILITY), battery=Battery(at_s=1.0, used=0.1))
    assert step(POLICY, state, Tick(at_s=100.0)).state is state
    works = Maintenance(until_s=50.0, reason="r", who="w")
    assert step(POLICY, State(maintenance=works), Tick(at_s=100.0)).state.maintenance is None
    assert step(POLICY, State(maintenance=works), Tick(at_s=49.9)).state.maintenance == works
    guarded = step(POLICY, State(guarded_since_s=50.0), Tick(at_s=110.0)).state
    assert guarded.guarded_since_s != 50.0


def test_a_failure_that_is_not_a_loss_says_nothing() -> None:
    state = State(feed=Feed(supply=Supply.UTILITY))
    miss = SourceFailed(at_s=1.0, ups="ups", source="snmp", reason="r")
    assert step(POLICY, state, miss).notes == ()


def test_the_short_way_online_answers_as_the_long_one() -> None:
    """Only what is utility as ever may take it; the rest must reach the account and the alarms."""
    state = State(battery=Battery(at_s=0.0))
    for at_s in range(1, 4):
        reading = Reading(
            at_s=float(at_s), ups="ups", source="snmp", output_source=OutputSource.UTILITY, charge_pct=100.0
        )
        state = step(POLICY, state, reading).state
    plain = Reading(at_s=4.0, ups="ups", source="snmp", output_source=OutputSource.UTILITY, charge_pct=100.0)
    quick = step(POLICY, state, plain)
    assert (quick.actions, quick.notes, quick.state.feed.reading) == ((), (), plain)
    from dataclasses import replace

    for field, event in (("replace_battery", "battery_worn_raised"), ("overload", "overload_raised")):
        answer = step(POLICY, state, replace(plain, **{field: True}))  # type: ignore[arg-type]
        assert [note.event for note in answer.notes] == [event]
    assert step(POLICY, state, replace(plain, charge_pct=40.0)).state.battery.charged == pytest.approx(0.3)
    bypass = step(POLICY, state, replace(plain, output_source=OutputSource.BYPASS))
    assert [note.event for note in bypass.notes] == ["unprotected_raised"]
    works = replace(state, maintenance=Maintenance(until_s=99.0, reason="r", who="w"), guarded_since_s=80.0)
    kept = step(POLICY, works, plain).state
    assert kept.maintenance == works.maintenance
    assert step(POLICY, replace(state, serial=7, transfers=(1.0,)), plain).state == replace(
        quick.state, serial=7, transfers=(1.0,)
    )


# --- The outage as it is remembered -------------------------------------------------------------------------------


def test_an_outage_remembers_how_it_began() -> None:
    """The gate of the next boot counts with the load that training had."""
    told_state = play(BEGIN, BATTERY).state
    assert not isinstance(told_state.phase, Online)
    outage = told_state.phase.outage
    assert (outage.id, outage.since_s, outage.load_at_start) == ("boot-one-70", 6.0, 0.75)
    countdown = play(BEGIN, "6..10 utility load=60 charge=88 off_in=180-1").state.phase
    assert not isinstance(countdown, Online)
    assert countdown.outage.since_s == 7.0


def test_the_power_off_waits_for_each_of_its_preparations() -> None:
    """One of the two is done: the other is still waited for, until their time is over; and the reason is told."""
    story = play(
        BEGIN.replace("policy sync poweroff", "policy"),
        BATTERY,
        HOLD,
        END.replace("200", "170"),
        "171..180 battery load=45",
    )
    (ordered,) = (note for note in story.notes if note.event == "power_off_ordered")
    assert ordered.because == "continuing without the preparations that did not finish"
    told_lines = [line for line in story.lines if "PowerOff" in line or "-> shutdown" in line]
    latched_s, ordered_s = (float(line.split()[0]) for line in told_lines)
    assert 5.25 <= ordered_s - latched_s <= 6.25
    (order,) = story.ordered(PowerOff)
    assert order.outage == "boot-one-70"  # type: ignore[attr-defined]


def test_a_commit_asks_its_own_ups_and_says_what_it_withdrew() -> None:
    edge = play(
        "policy table=50:540,75:360,100:240\nauto policy sync poweroff",
        "0..5 utility load=75 charge=100 runtime=360",
        "6..98 battery load=75 charge=100-0.3 runtime=350-2.5",
        "99..103 battery load=75 charge=72-1 runtime=115-4",
        "104..116 utility load=75 charge=70",
    )
    # One for the doubt at 6 s, one before the commit; each has two seconds.
    polls = [(order.ups, order.by_s) for order in edge.ordered(PollNow)]  # type: ignore[attr-defined]
    assert polls == [("ups", 8.0), ("ups", 105.0)]
    (withdrawn,) = (note for note in edge.notes if note.event == "commit_withdrawn")
    # 99 s on battery, and the floor of a tenth.
    assert numbers(withdrawn) == {"reff_s": pytest.approx((0.75 - 99.0 / 360.0 - 0.1) * 360.0), "stop_s": 65.0}


def test_a_second_power_off_order_says_what_is_left() -> None:
    still = first_notes("auto policy sync poweroff survives checkpoint=15", BATTERY, HOLD, END, "201..300 tick")[
        "power_off_repeated"
    ]
    assert (still.because, still.level, numbers(still)) == (
        "the host is still alive",
        Level.ERROR,
        {"force_after_s": 0.0},
    )
    sooner = first_notes(BATTERY, HOLD, END.replace("200", "175"), "176..180 battery load=45 off_in=90-1")[
        "power_off_hastened"
    ]
    assert sooner.level is Level.WARNING
    assert numbers(sooner) == {"force_after_s": pytest.approx(59.0)}
