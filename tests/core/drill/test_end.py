"""How a drill ends: stopped, overtaken by an outage, restarted, rebooted; each way is told once, and in order."""

from dataclasses import replace

import pytest

from powerguard.core.comeback.recovery import reloaded
from powerguard.core.decide.turn import Turn
from powerguard.core.drill import rehearsal
from powerguard.core.model.actions import CapPower, Level, Note, PauseTrainer, RestorePower, ResumeTrainer
from powerguard.core.model.policy import DrillReport, Policy
from powerguard.core.model.state import (
    Activity,
    Drill,
    HandedOver,
    Resume,
    Signalled,
    State,
    Trainer,
    Undoing,
)
from tests.core.play import Player, StoryResult

WORDS = "table=50:540,75:360,100:240 trainer=llm:pause:20 rating_w=4000"
CAP = f"{WORDS} cap_share=0.7"
READY = "0..14 utility load=75 charge=100 runtime=360\n15 trainer llm durable_age_s=60"
ANSWERS = "auto policy sync poweroff resume trainer_resume pause cap restore checkpoint=5"
PAUSING = "16 drill scope=pause\n17..28 utility load=75"
"""The pause is ordered at 27 s."""
ID = "boot-one-drill-160"


def played(story: str, answers: str = "auto", words: str = WORDS, player: Player | None = None) -> StoryResult:
    return (player or Player()).play(f"policy {words}\n{answers}\n{READY}\n{story}")


def running(result: StoryResult) -> Drill:
    assert result.state.drill is not None
    return result.state.drill


def report(result: StoryResult) -> DrillReport:
    found = result.state.learned.drill
    assert found is not None
    return found


def notes(result: StoryResult, event: str) -> list[Note]:
    return [note for note in result.notes if note.event == event]


# --- Undo -------------------------------------------------------------------------------------------------------------


def test_the_first_reason_to_stop_stands() -> None:
    """Stopped, then the daemon is stopped as well: it is told once, with who and how much was open."""
    outcome = played(f"{PAUSING}\n28.5 drill_stop\n28.6 sigterm")
    drill = running(outcome)
    assert drill.part == Undoing(at_s=28.5, result="interrupted", because="stopped by alice")
    (undoing,) = notes(outcome, "drill_undoing")
    assert undoing.numbers == (("drill", ID), ("paused", 1), ("open", 1))


def test_a_trainer_that_dies_in_the_undo_holds_nothing_up() -> None:
    """Its resume was refused, and then it is gone: the drill ends in that moment."""
    story = f"{PAUSING}\n28.1 done pause\n28.2 drill_stop\n28.3 failed trainer_resume llm\n28.4 trainer llm alive=false"
    outcome = played(story)
    assert outcome.state.drill is None
    assert (report(outcome).result, report(outcome).at_s) == ("interrupted", 28.4)
    assert len(outcome.ordered(ResumeTrainer)) == 1


def test_a_drill_is_not_over_before_the_limits_are_restored() -> None:
    result = played(
        "16 drill scope=cap\n17..30 utility load=75\n30.5 drill_stop\n31..33 utility load=50", "auto cap", CAP
    )
    assert running(result).stage == "undo"
    (restore,) = result.ordered(RestorePower)
    assert restore.outage == ID
    assert restore.by_s == 35.5
    assert result.state.cap is not None
    assert (result.state.cap.lifting, result.state.cap.at_s, result.state.cap.order) == (True, 30.5, restore.id)
    result = played(
        "16 drill scope=cap\n17..30 utility load=75\n30.5 drill_stop\n31..33 utility load=50", "auto cap restore", CAP
    )
    assert result.state.drill is None
    assert report(result).because == "stopped by alice"


def test_a_cap_on_its_way_is_waited_for_and_lifted_then() -> None:
    """A restore must not overtake the cap that it undoes."""
    player = Player()
    result = played("16 drill scope=cap\n17..28 utility load=75\n28.5 drill_stop", words=CAP, player=player)
    assert result.ordered(CapPower)
    assert not result.ordered(RestorePower)
    result = player.play("29 done cap\n29.5 utility load=50")
    assert len(result.ordered(RestorePower)) == 1
    result = player.play("30 done restore")
    assert result.state.drill is None


def test_limits_that_cannot_be_put_back_are_left_to_the_standing_duty_and_reported() -> None:
    """A minute after the end the drill gives up waiting; `gpu_power_stuck` stands and goes on."""
    player = Player()
    played("16 drill scope=cap\n17..30 utility load=75\n30.5 drill_stop", "auto cap", CAP, player=player)
    assert player.result is not None
    for second in range(31, 120):
        if any(isinstance(action, RestorePower) for _, action in player.open):
            player.line(f"{second}.2 failed restore no helper")
        player.line(f"{second}.5 utility load=50 charge=100")
        if player.result.state.drill is None:
            break
    outcome = player.result
    assert (report(outcome).result, report(outcome).because) == (
        "failed",
        "GPU power limits could not be put back; powerguard keeps trying (stopped by alice)",
    )
    assert report(outcome).at_s == 90.5, "a minute after the stop"
    (left,) = notes(outcome, "drill_left_behind")
    assert (left.because, left.level) == ("not put back yet; powerguard keeps trying", Level.ERROR)
    assert left.numbers == (("what", "GPU power limits"),)
    assert outcome.state.cap is not None


def test_trainers_that_do_not_answer_are_asked_on_after_the_drill() -> None:
    """Both are named; neither counts as told to pause any more, and both are told again."""
    words = f"{WORDS} trainer=vit:pause:20"
    player = Player()
    player.play(f"policy {words}\nauto pause\n{READY}\n15 trainer vit durable_age_s=60\n{PAUSING}\n28.5 drill_stop")
    assert player.result is not None
    for second in range(29, 120):
        for name in ("llm", "vit"):
            if any(isinstance(a, ResumeTrainer) and a.trainer == name for _, a in player.open):
                player.line(f"{second}.2 failed trainer_resume {name}")
        player.line(f"{second}.5 utility load=50 charge=100")
        if player.result.state.drill is None:
            break
    result = player.result
    assert report(result).because == "llm, vit could not be put back; powerguard keeps trying (stopped by alice)"
    assert notes(result, "drill_left_behind")[0].numbers == (("what", "llm, vit"),)
    assert [trainer.pause_ordered for trainer in result.state.trainers] == [False, False]
    before = len(result.ordered(ResumeTrainer))
    result = player.play("120..140 utility load=50 charge=100")
    assert len(result.ordered(ResumeTrainer)) > before


# --- The report -------------------------------------------------------------------------------------------------------


def test_the_end_is_reported_in_one_line_with_its_main_figures() -> None:
    """What concerns one trainer, and what was left out, stays in the report."""
    outcome = played("16.1234 drill scope=full\n17..31 utility load=75\n32..60 utility load=40", ANSWERS)
    (ended,) = notes(outcome, "drill_ended")
    numbers = dict(ended.numbers)
    assert ended.level is Level.INFO
    assert list(numbers)[:3] == ["drill", "result", "lasted_s"]
    assert (numbers["drill"], numbers["result"], numbers["lasted_s"]) == ("boot-one-drill-161", "passed", 26.177)
    assert "load_before" in numbers
    assert not [name for name in numbers if "." in name or name.startswith("skipped_")]
    assert {"checkpoint_s.llm", "skipped_cap"} <= set(dict(report(outcome).figures))


def test_each_drill_is_reported_once() -> None:
    result = played(
        "16 drill scope=policy\n17..20 utility load=75\n21 drill scope=policy\n22 utility load=75", "auto policy"
    )
    assert [dict(note.numbers)["drill"] for note in notes(result, "drill_ended")] == [ID, "boot-one-drill-210"]
    assert report(result).id == "boot-one-drill-210"


def test_an_interrupted_drill_is_a_warning() -> None:
    result = played("16 drill scope=policy\n17 drill_stop\n17.5 done policy")
    assert [note.level for note in notes(result, "drill_ended")] == [Level.WARNING]


# --- An outage comes first --------------------------------------------------------------------------------------------

OUTAGE = "31..45 battery load=40 charge=99 runtime=500"


def test_an_outage_in_a_pause_begins_with_the_load_that_training_had() -> None:
    """Whoever waits for charge afterwards counts with 75 %, not with the 40 % of training that stands still."""
    outcome = played(f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n{OUTAGE}")
    drill = running(outcome)
    assert (drill.part, drill.paused) == (HandedOver(at_s=32.0), ("llm",))
    assert (report(outcome).result, report(outcome).because) == ("interrupted", "a real outage: second_reading")
    phase = outcome.state.phase
    assert getattr(phase, "outage").load_at_start == 0.75  # noqa: B009 - every phase but online has one


def test_an_outage_leaves_nothing_of_a_drill_that_held_nobody() -> None:
    """In the stage of the policy nobody is paused and nothing capped: it is over at once."""
    outcome = played("16 drill scope=policy\n17..18 battery load=75 charge=99")
    assert outcome.phase == "on_battery"
    assert outcome.state.drill is None
    assert report(outcome).result == "interrupted"


def test_an_outage_in_a_cap_keeps_the_load_that_training_had() -> None:
    result = played("16 drill scope=cap\n17..30 utility load=75\n31..33 battery load=50 charge=99", "auto cap", CAP)
    assert running(result).stage == "handed_over"
    assert getattr(result.state.phase, "outage").load_at_start == 0.75  # noqa: B009 - every phase but online has one


def test_in_an_outage_training_goes_on_until_its_rule_says_pause() -> None:
    """A drill must not cost more of an outage than the outage itself does."""
    story = f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n31..33 battery load=40 charge=99"
    result = played(story, "auto trainer_resume")
    assert (result.phase, result.state.drill) == ("on_battery", None)
    assert [action.by_s for action in result.ordered(ResumeTrainer)] == [42.0]
    assert not any(trainer.pause_ordered or trainer.paused for trainer in result.state.trainers)
    assert len(notes(result, "drill_ended")) == 1


def test_after_the_outage_the_drill_s_pause_ends_too_and_it_is_reported_once() -> None:
    """Nobody has heard it in the outage: it is said again, until somebody has."""
    player = Player()
    played(f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n31..33 battery load=40 charge=99", player=player)
    result = player.play("34..36 utility load=40 charge=99")
    assert (result.phase, running(result).stage, running(result).paused) == ("online", "undo", ("llm",))
    result = player.play("37 done trainer_resume\n38 done trainer_resume\n39..60 utility load=75 charge=99")
    assert result.state.drill is None
    assert len({action.id for action in result.ordered(ResumeTrainer)}) == 2
    assert len(notes(result, "drill_ended")) == 1


@pytest.mark.parametrize("stopped", [True, False])
def test_one_that_stands_stopped_is_asked_when_it_can_answer(*, stopped: bool) -> None:
    """Until then the word is owed since the outage's end: an order now would reach nobody, and put that off."""
    drill = Drill(
        id="d",
        began_s=10.0,
        who="a",
        scopes=("pause",),
        witness="x",
        part=HandedOver(at_s=20.0),
        paused=("llm",),
    )
    held = Signalled(trainer="llm", outage="o", word="stop", at_s=90.0, carried_out="stop")
    trainer = Trainer(name="llm", activity=Activity.PAUSED)
    owed = Resume(trainer="llm", retry_at_s=100.0)
    state = State(trainers=(trainer,), drill=drill, owed=(owed, *((held,) if stopped else ())))
    turn = Turn(Policy(boot_id="b", ups="a"), state, 100.0)
    rehearsal.end_of_outage(turn, "utility_stable")
    assert [isinstance(action, ResumeTrainer) for action in turn.actions] == [True] * (not stopped)
    assert [each.retry_at_s for each in turn.state.owing(Resume)] == [100.0 if stopped else 115.0]


def test_a_pause_on_its_way_into_an_outage_is_undone_when_it_has_come() -> None:
    """It could land after the word that training may go on, and nobody would know: so that is said once more."""
    player = Player()
    result = played(f"{PAUSING}\n29..31 battery load=75 charge=99", player=player)
    assert [order.what for order in running(result).waiting] == ["pause", "resume"]
    result = player.play("32 done trainer_resume\n33 battery load=75 charge=98")
    assert (running(result).paused, [order.what for order in running(result).waiting]) == (("llm",), ["pause"])
    result = player.play("34 done pause")
    assert (result.phase, [order.what for order in running(result).waiting]) == ("on_battery", ["resume"])
    result = player.play("35 done trainer_resume\n36 battery load=75 charge=97")
    assert result.state.drill is None


def test_a_pause_on_its_way_through_an_outage_is_waited_for_afterwards() -> None:
    player = Player()
    outcome = played(f"{PAUSING}\n29..31 battery load=75 charge=99", player=player)
    outcome = player.play("32..33 utility load=75 charge=99")
    drill = running(outcome)
    assert outcome.phase == "online"
    assert drill.part == Undoing(at_s=32.0, result="interrupted", because="a real outage")
    outcome = player.play("34 done pause\n35 done trainer_resume\n36 done trainer_resume\n37 done trainer_resume")
    assert outcome.state.drill is None
    assert len(notes(outcome, "drill_ended")) == 1, "it was logged when the outage began"


def test_a_word_to_go_on_that_comes_after_the_rule_says_pause_is_undone() -> None:
    """The outage's own pause may have been overtaken by the end of the drill's."""
    player = Player()
    played(f"{PAUSING}\n28.5 done pause\n29..40 utility load=40\n41..44 battery load=40 charge=99", player=player)
    result = player.play("45..46 battery load=40 charge=20 low_battery")
    assert (result.phase, running(result).stage) == ("emergency_checkpoint", "handed_over")
    result = player.play("46.5 done trainer_resume")
    (again,) = result.ordered(PauseTrainer)[1:]
    assert (again.by_s, running(result).paused) == (56.5, ("llm",)), "and the drill owes it the word after the outage"
    result = player.play("47 done pause\n48 battery load=30 charge=20 low_battery")
    assert len(result.ordered(PauseTrainer)) == 2


def test_what_is_heard_while_the_rule_says_pause_settles_nothing() -> None:
    """Every word of the drill has been heard, and then the outage's own pause: after it he is told again."""
    player = Player()
    played(f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n31..33 battery load=40 charge=99", player=player)
    result = player.play("34..35 battery load=40 charge=20 low_battery\n35.5 done trainer_resume")
    assert result.phase == "emergency_checkpoint"
    assert running(result).paused == ("llm",)


def test_one_that_dies_in_the_outage_is_owed_nothing() -> None:
    player = Player()
    played(f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n31..33 battery load=40 charge=99", player=player)
    result = player.play("33.5 trainer llm alive=false\n33.7 failed trainer_resume\n34 battery load=40 charge=99")
    assert (result.phase, result.state.drill) == ("on_battery", None)


def test_one_that_dies_after_it_could_not_be_asked_ends_the_drill_at_once() -> None:
    player = Player()
    played(f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n31..33 battery load=40 charge=99", player=player)
    result = player.play("33.3 failed trainer_resume\n33.5 trainer llm alive=false")
    assert (result.phase, result.state.drill) == ("on_battery", None)


def test_two_events_of_one_moment_report_it_once() -> None:
    """The outage is certain, and in the same moment the trainer is seen: the word is on its way already."""
    player = Player()
    played(f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n31..32 battery load=40 charge=99", player=player)
    result = player.play("32 trainer llm paused=true")
    assert (result.phase, len(result.ordered(ResumeTrainer))) == ("on_battery", 1)


def test_one_that_the_settings_let_go_in_the_outage_is_owed_nothing() -> None:
    player = Player()
    story = f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n31..33 battery load=40 charge=99"
    result = played(f"{story}\n33.3 failed trainer_resume", player=player)
    result.state = reloaded(player.policy, replace(player.policy, trainers=()), result.state, 33.4)
    player.policy = replace(player.policy, trainers=())
    assert player.play("34 battery load=40 charge=99").state.drill is None


def test_one_that_nobody_knows_any_more_keeps_no_daemon_from_starting() -> None:
    """It was found by its socket, took part in the drill, and went: the settings do not know it."""
    player = Player()
    played(f"{PAUSING}\n28.5 trainer llm alive=false", words=WORDS.replace(" trainer=llm:pause:20", ""), player=player)
    result = player.play("29 restart")
    assert (result.state.trainers, running(result).waiting) == ((), ())


def test_a_policy_order_on_its_way_into_an_outage_is_not_waited_for() -> None:
    """Only what may still make a trainer stand still is; nothing is owed for the rest."""
    player = Player()
    played("16 drill scope=full\n17..27 utility load=75\n28..40 utility load=40", "auto checkpoint=0.1", player=player)
    result = player.play("40.5 done trainer_resume\n41 utility load=75")
    assert running(result).stage == "policy"
    result = player.play("42..43 battery load=75 charge=99")
    assert result.state.drill is None


def test_an_outage_that_kills_the_trainer_lets_nobody_go_on() -> None:
    player = Player()
    played(f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n31..33 battery load=40 charge=99", player=player)
    result = player.play("33.5 trainer llm alive=false\n34..60 utility load=40 charge=99")
    assert result.phase == "online"
    assert [action.by_s for action in result.ordered(ResumeTrainer)] == [42.0], "in the outage, and never again"


# --- A pulled plug ----------------------------------------------------------------------------------------------------


def test_a_pulled_plug_is_logged_with_who_pulled_it_to_the_millisecond() -> None:
    story = (
        "16 drill witness=plug\n17 utility load=75 charge=100 runtime=360\n"
        "18.1234 battery load=75 charge=100\n19.1234 battery load=75 charge=99\n20..30 battery load=75 charge=98\n"
        "31.5678 utility load=75 charge=90\n32..45 utility load=75 charge=90"
    )
    outcome = played(story, ANSWERS)
    stages = notes(outcome, "drill_stage")
    assert [note.because for note in stages] == ["plug", "outage"]
    assert stages[-1].numbers == (("drill", ID), ("pulled_by", "alice"))
    assert (report(outcome).result, report(outcome).witness) == ("passed", "plug")
    outage_s = dict(report(outcome).figures)["outage_s"]
    assert isinstance(outage_s, float)
    assert outage_s == round(outage_s, 3)
    assert outage_s == round(report(outcome).at_s - 19.1234, 3)


DEEP = (
    "16 drill witness=plug\n17 utility load=75 charge=100 runtime=360\n"
    "18..99 battery load=75 charge=100-0.4 runtime=350-2\n"
)
FULL = f"{DEEP}100 failed llm full\n102 failed llm full\n105 failed llm full\n"
AT_LAST = f"{FULL}106 checkpoint_now\n109 done checkpoint\n"
BACK = "121..140 utility load=75 charge=60 runtime=160"
OFF = (
    f"{DEEP}100..160 battery load=75 charge=67-0.4 runtime=186-2\n10 reboot gap=600\n"
    "11 trainer llm alive=false\n12..400 utility load=20 charge=95"
)


@pytest.mark.parametrize(
    ("mode", "story", "result", "because"),
    [
        ("armed", f"{FULL}{BACK}", "failed", "llm: full"),
        ("armed", f"{AT_LAST}{BACK}", "passed", "utility stable"),
        ("armed", OFF, "failed", "llm: it was not durable at the power-off; training was started; llm reported no"),
        ("dry-run", f"{DEEP}100..120 battery load=75 charge=60\n{BACK}", "recorded", "the plug was pulled"),
    ],
    ids=["not saved", "saved later", "not saved and not back", "dry-run"],
)
def test_a_pulled_plug_has_not_passed_where_training_was_not_saved_or_did_not_come_back(
    mode: str, story: str, result: str, because: str
) -> None:
    outcome = played(story, "auto policy sync poweroff resume trainer_resume", words=f"{WORDS} mode={mode}")
    assert report(outcome).result == result
    assert because in report(outcome).because


def test_a_restart_in_a_pulled_plug_leaves_it_running() -> None:
    """The real rules run; a new daemon goes on with them, and the drill with it."""
    player = Player()
    played("16 drill witness=plug\n17 utility load=75 charge=100\n18..25 battery load=75 charge=99", player=player)
    outcome = player.play("26 restart")
    assert running(outcome).stage == "outage"
    outcome = player.play("27..29 battery load=75 charge=99\n30..50 utility load=75 charge=98")
    assert report(outcome).result == "passed"


# --- Restart and reboot -----------------------------------------------------------------------------------------------


def test_a_restart_undoes_and_repeats_nothing_of_the_drill() -> None:
    """The pause in flight may have landed: it is not ordered again, and the trainer is let go."""
    player = Player()
    played(PAUSING, player=player)
    outcome = player.play("29 restart")
    drill = running(outcome)
    because = "the daemon was restarted in the middle of it"
    assert drill.part == Undoing(at_s=drill.part.at_s, result="interrupted", because=because)
    assert [order.what for order in drill.waiting] == ["resume"]
    assert [type(action).__name__ for _, action in player.open] == ["ResumeTrainer"]


@pytest.mark.parametrize("back", [True, False])
def test_a_restart_lets_go_on_who_may_have_heard_the_pause_after_all(*, back: bool) -> None:
    """It could not be reached, and was given up; now it is there again, and perhaps stands. One that is gone is not."""
    player = Player()
    played(f"{PAUSING}\n28.5 trainer llm alive=false", player=player)
    result = player.play(f"28.7 trainer llm alive={str(back).lower()}\n29 restart")
    assert [order.what for order in running(result).waiting] == ["resume"] * back


def test_a_restart_forgets_the_drill_s_checkpoint_with_its_expected_end() -> None:
    player = Player()
    played("16 drill scope=checkpoint\n17 progress llm eta=30", player=player)
    assert player.result is not None
    (before,) = player.result.state.trainers
    assert before.in_flight is not None
    assert before.in_flight.eta_at_s == 47.0
    (after,) = player.play("18 restart").state.trainers
    assert after.in_flight is None


def test_a_restart_in_the_undo_keeps_its_reason_and_asks_the_trainer_again() -> None:
    player = Player()
    played(f"{PAUSING}\n28.5 drill_stop", player=player)
    outcome = player.play("29 restart")
    assert running(outcome).part == Undoing(at_s=29.0, result="interrupted", because="stopped by alice")
    assert [(order.what, order.by_s) for order in running(outcome).waiting] == [("resume", 39.0)]
    outcome = player.play("29.5 done trainer_resume\n30 utility load=75")
    assert outcome.state.drill is None
    assert report(outcome).because == "stopped by alice"


def test_a_restart_in_an_outage_keeps_what_the_drill_owes() -> None:
    player = Player()
    played(f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n31..33 battery load=40 charge=99", player=player)
    result = player.play("34 restart")
    assert (running(result).stage, running(result).paused) == ("handed_over", ("llm",))


@pytest.mark.parametrize("forgotten", [True, False])
def test_an_order_of_the_drill_is_not_repeated_by_the_new_daemon(*, forgotten: bool) -> None:
    """By its drill's name, also where the drill has given up waiting for it."""
    player = Player()
    result = played("16 drill scope=policy\n16.5 utility load=75", player=player)
    if forgotten:
        result.state = replace(result.state, drill=replace(running(result), waiting=()))
    player.play("17 restart")
    assert not player.open


def test_a_reboot_in_a_drill_is_reported_and_nothing_is_put_back() -> None:
    player = Player()
    played(f"{PAUSING}\n28.5 done pause", player=player)
    outcome = player.play("5 reboot gap=60")
    assert outcome.state.drill is None
    assert (report(outcome).result, report(outcome).because) == (
        "interrupted",
        "the host was restarted in the middle of it",
    )
    assert not outcome.ordered(ResumeTrainer)


def test_a_reboot_in_an_outage_does_not_report_the_drill_a_second_time() -> None:
    player = Player()
    played(f"{PAUSING}\n28.5 done pause\n29..30 utility load=40\n31..33 battery load=40 charge=99", player=player)
    result = player.play("5 reboot gap=60")
    assert result.state.drill is None
    assert len(notes(result, "drill_ended")) == 1


def test_a_host_that_is_booted_once_more_on_its_return_was_powered_off_in_order_all_the_same() -> None:
    """A person repairs it, perhaps, before training can be started."""
    off = "100..160 battery load=75 charge=67-0.4 runtime=186-2\n10 reboot gap=600\n11..14 utility load=20 charge=90"
    back = "10 reboot gap=60\n11..60 utility load=20 charge=95\n61 trainer llm step=7\n62 utility load=75 charge=95"
    outcome = played(f"{DEEP}{off}\n{back}", ANSWERS)
    assert (report(outcome).result, dict(report(outcome).figures)["powered_off_clean"]) == ("passed", True)


def test_a_pulled_plug_that_ends_in_a_power_off_is_timed_over_both_boots() -> None:
    """40 s of it before, 300 s off, and what the return takes."""
    player = Player()
    played("16 drill witness=plug\n17 utility load=75 charge=100\n18..60 battery load=75 charge=99", player=player)
    assert player.result is not None
    began_s = running(player.result).part.at_s
    result = player.play("10 reboot gap=300")
    drill = running(result)
    assert drill.stage == "outage"
    assert drill.part.at_s == pytest.approx(began_s - 60.0 - 300.0 + 10.0)
    assert drill.began_s == pytest.approx(16.0 - 60.0 - 300.0 + 10.0)
    assert dict(drill.figures)["powered_off_clean"] is False
