"""After the gate: the check of the host, the start, and when an outage is over. The gate is in scenarios gate-*."""

from dataclasses import replace

import pytest

from powerguard.core.comeback import gate
from powerguard.core.decide.turn import Turn
from powerguard.core.model.actions import CheckHost, Grade, Level, ResumeTraining
from powerguard.core.model.events import Done, Failed, OutputSource, Reading
from powerguard.core.model.policy import Policy, TrainerPolicy
from powerguard.core.model.state import (
    Activity,
    Battery,
    Feed,
    Outage,
    Recovery,
    State,
    Supply,
    Trainer,
)
from tests.core.play import play

POLICY = Policy(boot_id="boot", ups="ups", checks_host=True, trainers=(TrainerPolicy(name="llm"),))
OUTAGE = Outage(id="o", since_s=50.0, grade=Grade.FULL)
BACK = Recovery(outage=OUTAGE, began_s=80.0, clean=True)
NOW_S = 100.0


def feed(supply: Supply = Supply.UTILITY, at_s: float = NOW_S, **fields: object) -> Feed:
    source = OutputSource.BATTERY if supply is Supply.BATTERY else OutputSource.UTILITY
    reading = Reading(at_s=at_s, ups="ups", source="snmp", output_source=source, charge_pct=95.0)
    return Feed(supply=supply, reading=reading, **{"since_s": 50.0, **fields})  # type: ignore[arg-type]


def turn(phase: Recovery, *trainers: Trainer, policy: Policy = POLICY, at: Feed | None = None) -> Turn:
    made = State(phase=phase, feed=at or feed(), battery=Battery(at_s=NOW_S), trainers=trainers)
    return Turn(policy, made, NOW_S)


def phase(at: Turn) -> Recovery:
    assert isinstance(at.state.phase, Recovery)
    return at.state.phase


def kinds(at: Turn) -> list[str]:
    return [type(action).__name__ for action in at.actions]


def answered(at: Turn, *, well: bool = True) -> None:
    action = at.actions[-1]
    outcome = Done(at_s=at.now_s, action=action, took_s=0.1, detail=(("gpus", 8),))
    gate.handle(at, phase(at), outcome if well else Failed(at_s=at.now_s, action=action, took_s=0.1, reason="no GPU"))


def test_first_the_host_then_training() -> None:
    at = turn(BACK)
    gate.reconcile(at, phase(at))
    gate.reconcile(at, phase(at))
    assert kinds(at) == ["CheckHost"], "one at a time"
    assert at.actions[0].by_s == 130.0
    answered(at)
    assert (phase(at).checked_at_s, phase(at).asked) == (NOW_S, None)
    gate.reconcile(at, phase(at))
    assert kinds(at) == ["CheckHost", "ResumeTraining"]
    assert (phase(at).tries, at.actions[1].by_s) == (1, 130.0)
    answered(at)
    assert (phase(at).started_at_s, phase(at).asked) == (NOW_S, None)
    gate.reconcile(at, phase(at))
    assert len(at.actions) == 2
    assert [note.event for note in at.notes] == ["host_checked", "gate_opened"]
    assert at.notes[0].numbers == (("gpus", 8),)


def test_a_gate_is_not_said_to_be_forced_before_the_host_is_complete() -> None:
    """Each failed check would say that training may start, which it may not."""
    empty = feed()
    assert empty.reading is not None
    at = turn(BACK, at=replace(empty, reading=replace(empty.reading, charge_pct=5.0)), policy=POLICY)
    at.policy = replace(POLICY, charge_hold_s=10.0)
    gate.reconcile(at, phase(at))
    answered(at, well=False)
    assert [note.event for note in at.notes] == ["host_incomplete_raised"]
    at.set_phase(replace(phase(at), retry_at_s=0.0))
    gate.reconcile(at, phase(at))
    answered(at)
    gate.reconcile(at, phase(at))
    assert [note.event for note in at.notes].count("gate_forced") == 1


LATER_S = NOW_S + POLICY.unknown_hold_s


@pytest.mark.parametrize(
    ("known", "later"),
    [
        (feed(at_s=NOW_S - 4.0), feed(at_s=NOW_S - 4.0)),
        (feed(Supply.UNKNOWN, since_s=NOW_S - 4.0), feed(Supply.UNKNOWN, LATER_S, since_s=NOW_S - 4.0)),
    ],
    ids=["a late poll", "unknown for a moment"],
)
def test_the_hold_of_a_silent_ups_counts_from_its_silence(known: Feed, later: Feed) -> None:
    """Not from the boot: after ten minutes at the gate each late poll would open it, whatever the charge."""
    long_ago = replace(BACK, began_s=-2000.0, checked_at_s=NOW_S)
    at = turn(long_ago, at=known)
    gate.reconcile(at, phase(at))
    assert (kinds(at), at.notes) == ([], [])
    at = Turn(POLICY, replace(at.state, feed=later, phase=replace(long_ago, checked_at_s=LATER_S)), LATER_S)
    gate.reconcile(at, phase(at))
    assert kinds(at) == ["ResumeTraining"]
    assert [note.event for note in at.notes] == ["gate_forced", "gate_opened"]


def test_a_check_that_was_overruled_while_it_ran_holds_nothing_up() -> None:
    at = turn(BACK)
    gate.reconcile(at, phase(at))
    at.set_phase(replace(phase(at), forced_by="alice"))
    answered(at, well=False)
    gate.reconcile(at, phase(at))
    assert kinds(at) == ["CheckHost", "ResumeTraining"]
    assert [note.event for note in at.notes] == ["gate_opened"]


@pytest.mark.parametrize(
    ("known", "orders"),
    [(feed(since_s=99.0), ["CheckHost"]), (feed(Supply.UNKNOWN), []), (feed(Supply.BATTERY), [])],
    ids=["utility", "unknown", "battery"],
)
def test_the_host_is_checked_while_utility_has_to_hold(known: Feed, orders: list[str]) -> None:
    at = turn(BACK, at=known)
    gate.reconcile(at, phase(at))
    gate.reconcile(at, phase(at))
    assert kinds(at) == orders
    if orders:
        answered(at)
        gate.reconcile(at, phase(at))
        assert kinds(at) == orders, "the gate is still shut"
        assert [note.event for note in at.notes] == ["host_checked"]


@pytest.mark.parametrize(
    ("checked_at_s", "utility_since_s", "orders"),
    [
        (NOW_S - 60.0, 20.0, ["ResumeTraining"]),
        (NOW_S - 60.5, 20.0, ["CheckHost"]),
        (NOW_S - 20.0, NOW_S - 19.5, ["CheckHost"]),
        (NOW_S - 20.0, NOW_S - 20.0, ["ResumeTraining"]),
    ],
    ids=["young", "old", "before a cut", "since the cut"],
)
def test_what_the_check_found_is_asked_for_again(
    checked_at_s: float, utility_since_s: float, orders: list[str]
) -> None:
    """The gate may have waited for hours since, and a storage may have gone with a cut."""
    at = turn(replace(BACK, checked_at_s=checked_at_s), at=feed(since_s=utility_since_s))
    gate.reconcile(at, phase(at))
    assert kinds(at) == orders


def test_an_old_check_is_not_repeated_while_the_gate_waits() -> None:
    at = turn(replace(BACK, checked_at_s=NOW_S - 61.0), at=feed(since_s=NOW_S - 5.0))
    gate.reconcile(at, phase(at))
    assert kinds(at) == []


def test_a_host_that_still_boots_is_not_called_incomplete() -> None:
    """Nothing waits for it yet: its drivers load, its storage is being mounted."""
    at = turn(replace(BACK, began_s=NOW_S - 9.5), at=feed(since_s=NOW_S - 9.0))
    gate.reconcile(at, phase(at))
    answered(at, well=False)
    assert (list(at.notes), phase(at).retry_at_s) == ([], NOW_S + gate.CHECK_AGAIN_S)
    at.now_s += gate.CHECK_AGAIN_S
    gate.reconcile(at, phase(at))
    answered(at, well=False)
    assert [note.event for note in at.notes] == ["host_incomplete_raised"]


def test_a_host_that_is_not_whole_is_asked_again_and_reported_once() -> None:
    """A NAS boots slower than its hosts: a page comes after three minutes, and the question less often from then on."""
    at = turn(BACK)
    asked_s = []
    while at.now_s < 400.0:
        at.state = replace(at.state, feed=feed(at_s=at.now_s))
        before = len(at.actions)
        gate.reconcile(at, phase(at))
        if len(at.actions) > before:
            asked_s.append(at.now_s)
            answered(at, well=False)
        at.now_s += 0.5
    assert asked_s[:3] == [100.0, 105.0, 110.0]
    assert asked_s[-3:] == [320.0, 350.0, 380.0]
    found = [(note.event, note.level) for note in at.notes]
    assert found == [("host_incomplete_raised", Level.WARNING), ("host_incomplete_long_raised", Level.ERROR)]
    assert at.notes[0].because == "no GPU; training waits until the host is complete"
    assert at.notes[1].because == "no GPU; training has waited for 180 s: repair the host, or overrule the check"
    at.now_s = 410.0
    at.state = replace(at.state, feed=feed(at_s=at.now_s))
    gate.reconcile(at, phase(at))
    answered(at)
    cleared = ["host_incomplete_cleared", "host_incomplete_long_cleared"]
    assert [note.event for note in at.notes][2:] == [*cleared, "host_checked"]
    assert {note.because for note in at.notes[2:4]} == {"the host is complete again"}


def test_a_start_that_fails_is_tried_again_until_a_person_must() -> None:
    at = turn(BACK, policy=replace(POLICY, checks_host=False))
    for tries in (1, 2, 3):
        gate.reconcile(at, phase(at))
        assert kinds(at) == ["ResumeTraining"] * tries
        assert gate.resumed_because(at, phase(at)) == "", "it is on its way"
        answered(at, well=False)
        assert gate.resumed_because(at, phase(at)) == "", "not before its rest is over"
        at.now_s = phase(at).retry_at_s
        at.state = replace(at.state, feed=feed(at_s=at.now_s))
    assert gate.resumed_because(at, phase(at)) == "powerguard gave up: start training by hand"
    assert at.notes[-1].event == "resume_failed"


@pytest.mark.parametrize(
    ("known", "orders"),
    [
        (feed(), ["ResumeTraining"]),
        (feed(Supply.UNKNOWN), ["ResumeTraining"]),
        (feed(at_s=10.0), ["ResumeTraining"]),
        (feed(Supply.BATTERY), []),
        (feed(countdown_at_s=400.0), []),
        (feed(fsd_at_s=400.0), []),
    ],
    ids=["utility", "unknown", "silent", "battery", "countdown", "fsd"],
)
def test_an_operator_overrules_everything_but_the_power(known: Feed, orders: list[str]) -> None:
    at = turn(replace(BACK, forced_by="alice", began_s=99.9), at=known)
    gate.reconcile(at, phase(at))
    assert kinds(at) == orders
    if orders:
        assert at.notes[-1].because == "alice wants training started"


def started(*trainers: Trainer, waited_s: float = 10.0, policy: Policy = POLICY, at: Feed | None = None) -> str:
    made = turn(replace(BACK, started_at_s=NOW_S - waited_s), *trainers, policy=policy, at=at)
    because = gate.resumed_because(made, phase(made))
    found = [(note.event, note.level) for note in made.notes]
    assert found == ([("resume_unconfirmed", Level.ERROR)] if "no step for" in because else [])
    return because


RUNS = Trainer(name="llm", step=7)
OTHER = Trainer(name="other", step=5)
SILENT = "training was started; no trainer reports a step"


@pytest.mark.parametrize(
    ("trainers", "waited_s", "because"),
    [
        ((RUNS,), 0.0, "training runs, at step 7"),
        ((replace(RUNS, step=0),), 0.0, "training runs, at step 0"),
        ((replace(RUNS, activity=Activity.PAUSED),), 59.9, ""),
        ((replace(RUNS, step=None),), 59.9, ""),
        ((replace(RUNS, step=None),), 60.0, SILENT),
        ((replace(RUNS, activity=Activity.GONE),), 60.0, ""),
        ((replace(RUNS, activity=Activity.GONE),), 299.9, ""),
        ((replace(RUNS, activity=Activity.GONE),), 300.0, "training was started; llm reported no step for 300 s"),
        ((RUNS, replace(OTHER, activity=Activity.GONE)), 0.0, "training runs, at step 7"),
        ((), 0.0, ""),
        ((), 60.0, SILENT),
    ],
)
def test_when_the_outage_is_over(trainers: tuple[Trainer, ...], waited_s: float, because: str) -> None:
    """A trainer of the settings has told a step; one that others started does not count."""
    assert started(*trainers, waited_s=waited_s) == because


def test_where_none_is_in_the_settings_everyone_who_is_found_counts() -> None:
    unnamed = replace(POLICY, trainers=())
    assert started(RUNS, OTHER, policy=unnamed) == "training runs, at step 5"
    assert started(RUNS, replace(OTHER, step=None), policy=unnamed) == ""
    silent = tuple(replace(each, activity=Activity.GONE) for each in (RUNS, OTHER))
    why = "training was started; llm, other reported no step for 300 s"
    assert started(*silent, policy=unnamed, waited_s=300.0) == why


@pytest.mark.parametrize("known", [feed(Supply.BATTERY), feed(countdown_at_s=400.0)])
def test_the_next_outage_ends_this_one(known: Feed) -> None:
    assert started(replace(RUNS, step=None), at=known).startswith("the power failed again")
    waiting = turn(BACK, at=known)
    assert gate.resumed_because(waiting, phase(waiting)) == ""


def test_orders_carry_the_outage() -> None:
    at = turn(BACK)
    gate.reconcile(at, phase(at))
    (check,) = at.actions
    assert isinstance(check, CheckHost)
    answered(at)
    gate.reconcile(at, phase(at))
    start = at.actions[-1]
    assert isinstance(start, ResumeTraining)
    assert (check.outage, start.outage) == ("o", "o")


@pytest.mark.parametrize(("back_s", "ends_in"), [(8, "recovery"), (600, "shutdown")])
def test_what_was_called_off_in_a_return_counts_again_once_utility_is_stable(back_s: int, ends_in: str) -> None:
    """The host waits for its storage. An abort at its boot must not cost it the power-off of a failure hours later."""
    fails_s = 420 + back_s
    result = play(
        "policy table=50:540,75:360,100:240 trainer=llm:pause:20 checks_host=1",
        "auto policy sync poweroff checkpoint=10",
        "0..5 utility load=75 charge=100 runtime=360",
        "6..200 battery load=75 charge=100-0.4 runtime=360-1.4",
        "400 reboot gap=300",
        "401..405 battery load=30 charge=40-0.1 runtime=300-1",
        "405.5 abort",
        "406..419 battery load=30 charge=39-0.1 runtime=300-1",
        f"420..{fails_s - 1} utility load=30 charge=50+0.05 runtime=400",
        f"{fails_s}..{fails_s + 300} battery load=30 charge=50-0.2 runtime=400-1.5",
    )
    assert result.phase == ends_in
    ended = [note.because for note in result.notes if note.event == "abort_ended"]
    assert ended == ["utility is stable, so the power-off comes if it fails again"] * (ends_in == "shutdown")
