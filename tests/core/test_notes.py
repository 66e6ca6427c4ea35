"""What the journal's lines say with their numbers: whoever explains an outage afterwards has nothing else."""

from powerguard.core.model.actions import EnsurePolicy, Grade, Level, Note, PauseTrainer
from tests.core.play import Player, StoryResult

WORDS = "table=50:540,75:360,100:240 trainer=llm:pause:20"


def note(result: StoryResult, event: str) -> Note:
    """The newest one of its kind."""
    return next(each for each in reversed(result.notes) if each.event == event)


def test_the_beginning_of_an_outage_has_what_the_ups_reported() -> None:
    """By the reading that confirmed it, the second one on battery."""
    result = Player().play(
        f"policy {WORDS}\n0..5 utility load=75 charge=100 runtime=360\n6 battery load=74 charge=99 runtime=350\n"
        "7 battery load=73 charge=98.5 runtime=340\n8..9 battery load=70 charge=97 runtime=330"
    )
    began = note(result, "outage_began")
    assert (began.because, began.level) == ("second_reading", Level.WARNING)
    assert began.numbers == (
        ("outage", "boot-one-70"),
        ("grade", Grade.FULL),
        ("source", "snmp"),
        ("charge_pct", 98.5),
        ("load_pct", 73.0),
        ("runtime_s", 340.0),
    )


def test_the_end_of_an_outage_is_timed_to_the_millisecond() -> None:
    result = Player().play(
        f"policy {WORDS}\n0..5 utility load=75 charge=100\n6.1234 battery load=75 charge=99\n7 battery load=75\n"
        "8.5678 utility load=75\n9..20 utility load=75"
    )
    lasted_s = dict(note(result, "outage_ended").numbers)["lasted_s"]
    assert isinstance(lasted_s, float)
    assert lasted_s == round(lasted_s, 3)
    assert round(lasted_s % 1, 3) == round((8.5678 - 6.1234) % 1, 3), "from the first reading on battery"


def test_a_rehearsed_power_off_is_reported_as_rehearsed() -> None:
    """In dry-run the host survives its own power-off: that is neither a ride-through nor a return."""
    result = Player().play(
        f"policy {WORDS} mode=dry-run\nauto policy sync poweroff trainer_resume checkpoint=20\n"
        "0..5 utility load=75 charge=100 runtime=360\n5 trainer llm\n6..300 battery load=75 charge=100-0.4\n"
        "301..340 utility load=75 charge=40"
    )
    assert result.phase == "online"
    assert dict(note(result, "outage_ended").numbers)["outcome"] == "rehearsed"


def test_a_battery_that_was_never_proven_is_an_alarm() -> None:
    """Battery since first contact while its charge climbs: a stuck word, or a dead charger; somebody must look."""
    result = Player().play(f"policy {WORDS}\n0..40 battery load=75 charge=99 input_present=true")
    raised = note(result, "unproven_battery_raised")
    assert raised.level is Level.ERROR
    assert raised.because == (
        "the UPS has reported battery since first contact and no second witness confirms it: ignored; check the UPS"
    )
    assert "unproven_battery" in result.state.alarms


def test_a_gauge_that_falls_faster_than_time_is_an_alarm() -> None:
    """Just one and a half seconds of runtime a second is steep already, and told with the number."""
    result = Player().play(
        f"policy {WORDS}\n0..5 utility load=20 charge=100 runtime=3000\n"
        "6..140 battery load=20 charge=100 runtime=3000-1.5"
    )
    steep = [each for each in result.notes if "1.5 s a second" in each.because]
    assert [each.level for each in steep] == [Level.WARNING]


def test_the_end_of_the_guard_is_reported() -> None:
    """After a return with little charge, once a second outage would leave time for a full stop again."""
    result = Player().play(
        f"policy {WORDS}\nauto policy trainer_resume checkpoint=20\n0..5 utility load=75 charge=100 runtime=360\n"
        "5 trainer llm\n6..50 battery load=75 charge=100-0.6\n51..200 utility load=75 charge=50\n"
        "201..400 utility load=75 charge=95"
    )
    started = note(result, "guard_started")
    assert started.because == "a second outage now would leave no time for a full stop"
    ended = note(result, "guard_ended")
    assert (ended.because, ended.level) == (
        "a second outage would leave time for a full stop again",
        Level.INFO,
    )


def test_what_an_outage_asks_of_the_bmc_carries_its_id() -> None:
    """Asked for once, when the outage has lasted: should the host go down, it comes back."""
    result = Player().play(
        "policy table=20:30000 trainer=llm:pause:20\n0..5 utility load=20 charge=100\n6..30 battery load=20 charge=99"
    )
    (asked,) = result.ordered(EnsurePolicy)
    assert isinstance(asked, EnsurePolicy)
    assert asked.outage == "boot-one-70"


def test_a_trainer_that_waits_its_turn_is_paused_in_the_outages_name() -> None:
    """Two on one disk and too little time for both: the second one pauses, and the order says for which outage."""
    result = Player().play(
        "policy table=75:360 trainer=llm:pause:180 trainer=vit:pause:180\nauto policy\n"
        "0..5 utility load=75 charge=100 runtime=360\n5 trainer llm\n5 trainer vit\n6..60 battery load=75 charge=98"
    )
    pauses = [action for action in result.actions if isinstance(action, PauseTrainer)]
    assert pauses
    assert {action.outage for action in pauses} == {"boot-one-70"}
