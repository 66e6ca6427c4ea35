"""What the next boot makes of a host that went down on utility, unasked."""

from dataclasses import replace

import pytest

from powerguard.core.comeback.recovery import Stored, restore
from powerguard.core.comeback.unseen import REPORT_LIMIT_S, is_open
from powerguard.core.comeback.validation import validated
from powerguard.core.model.actions import ResumeTraining
from powerguard.core.model.policy import Policy, TrainerPolicy
from powerguard.core.model.state import Activity, JobEnded, OnBattery, Start, State, Trainer, UnseenStop
from tests.core.play import play
from tests.core.test_recovery import OUTAGE

SITE = "policy table=50:540,75:360,100:240 trainer=llm:pause:20"
AUTO = "auto policy sync poweroff resume trainer_resume checkpoint=15"
TRAINS = ("0..99 utility load=75 charge=100 runtime=360", "100 trainer llm step=100 conduct=pause durable_age_s=40")
BACK = ("21 trainer llm alive=false", "21..29 utility load=10 charge=100 runtime=2500")
LATER = "31..95 utility load=10 charge=100 runtime=2500"
POLICY = Policy(boot_id="boot-two", ups="ups", trainers=(TrainerPolicy(name="llm"),))
LLM = Trainer(name="llm", step=100, durable_step=90, step_s=2.0)
LEFT = State(trainers=(LLM,), up=True)


def next_boot(left: State, *, gap_s: float | None = 600.0) -> UnseenStop | None:
    stored = Stored(state=left, boot_id="boot-one", at_s=5000.0, gap_s=gap_s)
    return restore(POLICY, stored, 20.0).state.unseen


@pytest.mark.parametrize(
    ("came", "starts"), [((), 2), (("80 trainer llm alive=true", "81 trainer llm alive=false"), 1)]
)
def test_training_that_was_started_and_has_not_come_up_yet_is_owed(came: tuple[str, ...], starts: int) -> None:
    """A battery that an outage has emptied dies at the next transfer, while training still loads its image."""
    result = play(
        "policy table=50:540,75:360,100:240",
        AUTO,
        "0..10 utility load=75 charge=100 runtime=360",
        "11..25 battery load=75 charge=90 runtime=300",
        "5 reboot gap=900",
        "6..79 utility load=10 charge=95 runtime=3000",
        *came,
        "82..100 utility load=10 charge=95 runtime=3000",
        "5 reboot gap=60",
        "6..95 utility load=10 charge=95 runtime=3000",
    )
    assert len(result.ordered(ResumeTraining)) == starts


@pytest.mark.parametrize("gone", ["80 trainer llm alive=false", "95 trainer llm alive=false"])
def test_training_that_was_started_in_place_and_has_not_come_up_yet_is_owed(gone: str) -> None:
    """The same without a power-off between: the trainer (after: exit) ended in the outage, or after its start."""
    result = play(
        "policy table=50:2700,75:1800,100:1200 trainer=llm:exit:20",
        AUTO,
        "0..5 utility load=75 charge=100 runtime=1800",
        "6 trainer llm alive=true conduct=exit step=100",
        "7..79 battery load=75 charge=40 runtime=400",
        *((gone,) if gone.startswith("80") else ()),
        "81..94 utility load=20 charge=40 runtime=1600",
        gone,
        "96..400 utility load=20 charge=60 runtime=1600",
        "5 reboot gap=60",
        "6..95 utility load=10 charge=95 runtime=3000",
    )
    assert result.ordered(ResumeTraining)[-1].outage.startswith("boot-two")


@pytest.mark.parametrize(
    ("setting", "report", "starts", "because"),
    [
        ("start", "policy-always-on ac", True, ""),
        ("start", "unknown", True, ""),
        ("start", "reset-button reset", False, "the BMC reports reset-button"),
        ("if-confirmed", "policy-always-on ac", True, ""),
        ("if-confirmed", "unknown", False, "nothing confirms a loss of power (reported by the BMC)"),
        ("if-confirmed", "reset-button reset", False, "the BMC reports reset-button"),
        ("never", "policy-always-on ac", False, "resume.after_unseen_stop is never"),
    ],
)
def test_what_the_settings_say(setting: str, report: str, *, starts: bool, because: str) -> None:
    """As docs/guides/return.md has it."""
    result = play(
        f"{SITE} after_unseen_stop={setting}",
        AUTO,
        *TRAINS,
        "20 reboot gap=900",
        *BACK,
        f"30 powered_on {report}",
        LATER,
    )
    assert bool(result.ordered(ResumeTraining)) is starts
    assert ("training_not_started" in result.state.alarms) is bool(because)
    raised = [note.because for note in result.notes if note.event == "training_not_started_raised"]
    assert [because in each for each in raised] == [True] * bool(because)


def test_without_a_report_in_time_it_starts_all_the_same() -> None:
    result = play(f"{SITE}", AUTO, *TRAINS, "20 reboot gap=900", *BACK, LATER)
    (note,) = [note for note in result.notes if note.event == "host_returned"]
    assert dict(note.numbers)["away_s"] == 900.0
    assert result.ordered(ResumeTraining)
    early = play(f"{SITE}", AUTO, *TRAINS, "20 reboot gap=900", *BACK, "31..79 utility load=10 charge=100 runtime=2500")
    assert early.ordered(ResumeTraining) == [], f"{REPORT_LIMIT_S:.0f} s"


def test_the_alarm_ends_with_a_trainer_that_reports_no_steps() -> None:
    """A unit that powerguard stops by a signal has processes again. Until the first look it was presumed to."""
    left = (SITE, AUTO, *TRAINS, "20 reboot gap=900", "21 utility load=10 charge=100", "22 powered_on watchdog reset")
    assert play(*left, "23 utility load=10").state.alarms == ("training_not_started",)
    result = play(*left, *BACK, LATER, "96 trainer llm", "97 utility load=75")
    assert (result.phase, result.state.alarms) == ("online", ())


def test_one_of_two_trainers_that_starts_by_itself_does_not_keep_the_other_from_it() -> None:
    """The unit of one is enabled at boot; the other one is started by powerguard."""
    both = (*TRAINS, "100.5 trainer other step=100")
    back = ("21 trainer other alive=false", *BACK, "29.5 trainer llm step=101", "30 powered_on unknown", LATER)
    result = play(f"{SITE} trainer=other:pause:20", AUTO, *both, "20 reboot gap=900", *back)
    assert len(result.ordered(ResumeTraining)) == 1


@pytest.mark.parametrize(
    ("meanwhile", "because"),
    [
        (("22 maintenance 3600",), "alice has set maintenance"),
        ((f"{SITE} boot_id=boot-two after_unseen_stop=never",), "resume.after_unseen_stop is never"),
    ],
)
def test_what_is_ordered_in_the_minute_before_it_is_decided_counts(meanwhile: tuple[str, ...], because: str) -> None:
    """A person sets maintenance as soon as the host is back, or new settings are loaded."""
    report = "30 powered_on policy-always-on ac"
    result = play(SITE, AUTO, *TRAINS, "20 reboot gap=900", *BACK[:1], *meanwhile, *BACK[1:], report, LATER)
    assert (result.phase, result.ordered(ResumeTraining)) == ("online", [])
    raised = [note.because for note in result.notes if note.event == "training_not_started_raised"]
    assert [because in each for each in raised] == [True] * bool(because)
    assert not because or result.state.alarms == ("training_not_started",)


def test_what_something_else_has_started_is_left_alone() -> None:
    """A unit that is enabled at boot trains already: that is no alarm, and needs no order."""
    runs = "35 trainer llm step=101 conduct=pause"
    result = play(f"{SITE}", AUTO, *TRAINS, "20 reboot gap=900", *BACK, runs, "36..95 utility load=75 charge=100")
    assert (result.phase, result.ordered(ResumeTraining), result.state.alarms) == ("online", [], ())
    assert not is_open(result.state)


@pytest.mark.parametrize(
    "left",
    [
        replace(LEFT, up=False),
        replace(LEFT, phase=OnBattery(outage=OUTAGE)),
        replace(LEFT, trainers=()),
        replace(LEFT, trainers=(replace(LLM, activity=Activity.GONE),)),
        replace(LEFT, trainers=(replace(LLM, activity=Activity.PAUSED, stood=True),)),
    ],
)
def test_nothing_is_owed_where_nothing_trained_or_the_stop_was_ordered(left: State) -> None:
    assert next_boot(left) is None


def test_training_that_was_being_started_counts_as_training() -> None:
    gone = replace(LLM, activity=Activity.GONE)
    assert next_boot(replace(LEFT, trainers=(gone,), owed=(Start(tries=1),))) is not None
    assert next_boot(replace(LEFT, trainers=(gone,), owed=(JobEnded(trainer="llm", because="b"),))) is not None
    waiting = UnseenStop(down_at_s=1.0, trainers=3, by_s=5060.0, boots=(4990.0,))
    found = next_boot(replace(LEFT, trainers=(gone,), unseen=waiting))
    assert found is not None, "power was lost once more before it was decided"
    assert (found.trainers, found.boots) == (3, (4990.0 + 20.0 - 600.0 - 5000.0, 20.0))


@pytest.mark.parametrize(("cause", "starts"), [("unknown", 2), ("soft-reset", 2), ("policy-always-on", 5)])
def test_a_bit_that_outlives_resets_does_not_start_training_without_end(cause: str, starts: int) -> None:
    """Training that crashes its host: a BMC whose bit is of an older loss reports a loss of AC after each crash."""
    trains = ("31..40 utility load=10 charge=100 runtime=2500", "41 trainer llm step=101", "42..50 utility load=75")
    boots = [
        line
        for number in range(5)
        for line in (f"20 reboot id={number} gap=60", *BACK, f"30 powered_on {cause} ac", *trains)
    ]
    result = play(SITE, AUTO, *TRAINS, *boots)
    assert len(result.ordered(ResumeTraining)) == starts


def boots_that_crash(report: str, count: int) -> list[str]:
    """Each time the host goes down after training was started and before it reports a step."""
    runs = "31..50 utility load=10 charge=100 runtime=2500"
    return [
        line
        for number in range(count)
        for line in (f"20 reboot id={number} gap=60", *BACK, f"30 powered_on {report}", runs)
    ]


@pytest.mark.parametrize(("report", "starts"), [("unknown", 2), ("unknown ac", 2), ("policy-always-on ac", 5)])
def test_training_that_crashes_the_host_before_its_first_step_is_not_started_without_end(
    report: str, starts: int
) -> None:
    """It goes down in the recovery, then: that counts as well, whatever outage the recovery is of."""
    result = play(SITE, AUTO, *TRAINS, *boots_that_crash(report, 5))
    assert len(result.ordered(ResumeTraining)) == starts
    assert result.phase == "recovery"
    assert ("training_not_started" in result.state.alarms) is (starts == 2)
    forced = play(SITE, AUTO, *TRAINS, *boots_that_crash(report, 5), "51 recover", "52 trainer llm step=9")
    assert (forced.phase, forced.state.alarms) == ("online", ())


def test_a_person_who_orders_reboots_in_a_recovery_is_not_taken_for_a_crash() -> None:
    lines = "\n".join(boots_that_crash("unknown", 5)).replace("\n20 reboot", "\n50 sigterm host\n20 reboot")
    result = play(SITE, AUTO, *TRAINS, *lines.splitlines())
    assert len(result.ordered(ResumeTraining)) == 5
    assert result.state.alarms == ()


def test_an_ordered_reboot_does_not_decide_it() -> None:
    """As in a recovery: training that ended with the loss of power is started, however often the host boots."""
    once_more = ("30 sigterm host", "20 reboot id=three gap=60", *BACK, "30 powered_on unknown", LATER)
    result = play(SITE, AUTO, *TRAINS, "20 reboot gap=900", *BACK, *once_more)
    assert [note.event for note in result.notes].count("host_went_down") == 1
    (note,) = [note for note in result.notes if note.event == "host_returned"]
    assert (dict(note.numbers)["away_s"], dict(note.numbers)["at_risk_s"]) == (900.0 + 10.0 + 60.0, 40.0)
    assert len(result.ordered(ResumeTraining)) == 1


def test_a_daemon_that_is_started_again_late_waits_for_the_bmc_as_well() -> None:
    """It was stopped before the BMC answered, and its minute has passed meanwhile."""
    again = ("25 sigterm", "200 restart", "201..205 utility load=10 charge=100", "206 powered_on watchdog reset")
    result = play(SITE, AUTO, *TRAINS, "20 reboot gap=900", BACK[0], *again, "207..300 utility load=10 charge=100")
    assert (result.ordered(ResumeTraining), result.state.alarms) == ([], ("training_not_started",))
    known = ("22 powered_on policy-always-on ac", "25 sigterm", "26 restart", "27..40 utility load=10 charge=100")
    result = play(SITE, AUTO, *TRAINS, "20 reboot gap=900", BACK[0], *known)
    assert len(result.ordered(ResumeTraining)) == 1, "what was reported is not asked for again"


def test_the_alarm_outlives_the_next_loss_of_power() -> None:
    """What a watchdog has ended is not started by powerguard, and must not be forgotten for that."""
    once_more = ("20 reboot id=three gap=900", *BACK, "30 powered_on policy-always-on ac", LATER)
    result = play(SITE, AUTO, *TRAINS, "20 reboot gap=900", *BACK, "30 powered_on watchdog reset", LATER, *once_more)
    assert (result.ordered(ResumeTraining), result.state.alarms) == ([], ("training_not_started",))
    in_order = (f"{LATER.replace('31', '96', 1).replace('95', '97', 1)}", "98 sigterm host", "20 reboot id=four gap=60")
    later = play(SITE, AUTO, *TRAINS, "20 reboot gap=900", *BACK, "30 powered_on watchdog reset", *in_order, *BACK)
    assert later.state.alarms == (), "the person who ordered that reboot starts training"


def test_what_is_known_of_such_a_stop() -> None:
    """Seconds in the new boot's clock. Where the wall clock is not believed, the time off is unknown."""
    found = next_boot(LEFT)
    assert found == UnseenStop(
        down_at_s=-580.0, away_s=600.0, trainers=1, at_risk_s=20.0, boots=(20.0,), by_s=20.0 + REPORT_LIMIT_S
    )
    unknown = next_boot(LEFT, gap_s=-5.0)
    assert unknown is not None
    assert (unknown.down_at_s, unknown.away_s) == (20.0, None)
    by_time = next_boot(replace(LEFT, trainers=(replace(LLM, durable_step=None, durable_at_s=4900.0),)))
    assert by_time is not None
    assert by_time.at_risk_s == 100.0


def test_stops_of_a_day_are_not_too_often() -> None:
    """Only the newest three count, and only within an hour."""
    old = UnseenStop(down_at_s=1.0, boots=(-3000.0, -2000.0, 100.0))
    found = next_boot(replace(LEFT, unseen=old))
    assert found is not None
    assert found.boots == (-2000.0 - 5580.0, 100.0 - 5580.0, 20.0)


@pytest.mark.parametrize(
    "stop",
    [
        UnseenStop(down_at_s=1e9),
        UnseenStop(down_at_s=1.0, boots=(1e9,)),
        UnseenStop(down_at_s=1.0, at_risk_s=-1.0),
        UnseenStop(down_at_s=1.0, by_s=1e9),
    ],
)
def test_one_that_cannot_be_is_dropped(stop: UnseenStop) -> None:
    kept, dropped = validated(replace(State(), unseen=stop), 1000.0)
    assert (kept.unseen, dropped) == (None, ("unseen",))
    sound = UnseenStop(down_at_s=-1e6, boots=(-1e6, 990.0), at_risk_s=1e5, by_s=1050.0)
    assert validated(replace(State(), unseen=sound), 1000.0) == (replace(State(), unseen=sound), ())


def test_a_stop_in_order_is_forgotten_by_the_boot_after_it() -> None:
    assert next_boot(replace(LEFT, up=False, unseen=UnseenStop(down_at_s=1.0, left_because="b"))) is None
