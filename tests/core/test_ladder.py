"""Signals to a trainer that draws on: when, to whom, in which order, and that nobody stays stopped.

The stories are in tests/scenarios/ladder-*.txt; here is what they leave out: each condition alone, and each edge.
"""

from dataclasses import replace

import pytest

from powerguard.core.decide.machine import step
from powerguard.core.model.actions import (
    Action,
    ContinueTrainer,
    ResumeTrainer,
    ResumeTraining,
    StopTrainer,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import Done, Failed
from powerguard.core.model.state import Signalled
from powerguard.core.trainers import escalation
from tests.core.play import Player, StoryResult, make_policy

WORDS = "table=50:5400,75:3600,100:2400 trainer=llm:pause:20 signals=1"
READY = "0..5 utility load=75 charge=100 runtime=3600"
LOW = "6..16 battery load=75 charge=90 runtime=3000 low_battery"
"""Low battery: training is told to pause at 10 s, so from 25 s on the load must have fallen."""
ON = "17..24 battery load=75 charge=90 runtime=3000 low_battery"
ALL = "auto policy sync poweroff resume trainer_resume cap restore stop terminate continue checkpoint=5"
SIGNALS = (StopTrainer, TerminateTrainer, ContinueTrainer)


def played(story: str, answers: str = ALL, words: str = WORDS, player: Player | None = None) -> StoryResult:
    return (player or Player()).play(f"policy {words}\n{answers}\n{READY}\n{LOW}\n{ON}\n{story}")


def at(result: StoryResult) -> list[str]:
    """When which signal was ordered, to whom."""
    found = []
    for line in result.lines:
        when, mark, *words = line.split()
        if mark == "!" and words[0] in [kind.__name__ for kind in SIGNALS]:
            found.append(f"{when} {words[0]} {words[-1].partition('=')[2]}")
    return found


def high(start: int, end: int, load: int = 75) -> str:
    return f"{start}..{end} battery load={load} charge=89 runtime=2900 low_battery"


# --- When -----------------------------------------------------------------------------------------------------------


def test_from_two_steps_and_fifteen_seconds_after_the_pause_on() -> None:
    assert at(played(high(25, 26))) == ["25 StopTrainer llm"]
    assert at(played("")) == []


def test_a_long_step_is_waited_for() -> None:
    """Until it ends nobody can pause; the settings' own trainer tells how long its steps are."""
    player = Player()
    player.play(f"policy {WORDS}\n{ALL}\n{READY}")
    trainer = replace(player.result.state.trainers[0], step_s=10.0)  # type: ignore[union-attr]
    player.result.state = replace(player.result.state, trainers=(trainer,))  # type: ignore[union-attr]
    assert at(player.play(f"{LOW}\n{ON}\n{high(25, 46)}")) == ["45 StopTrainer llm"]


def test_not_where_the_settings_do_not_say_so() -> None:
    assert at(played(high(25, 50), words=WORDS.replace("signals=1", "signals=0"))) == []


def test_not_while_the_load_has_fallen() -> None:
    assert at(played(high(25, 60, load=40))) == []


@pytest.mark.parametrize("source", ["utility", "unknown", "off"])
def test_not_while_the_newest_reading_says_anything_but_battery(source: str) -> None:
    """On battery as far as is proven, and yet: what cannot be taken back needs a battery that is told."""
    assert at(played(f"25 {source} load=75 charge=48")) == []


def test_not_on_a_reading_that_is_old_and_not_missed() -> None:
    """The daemon stood still: utility may be back for long. The next reading says."""
    assert at(played(f"34 tick\n{high(35, 36)}")) == ["35 StopTrainer llm"]
    assert at(played("34 tick\n35 utility load=75 charge=89")) == []


def test_not_for_an_output_that_is_cut_anyway() -> None:
    countdown = "battery load=75 charge=89 low_battery off_in=400"
    assert at(played(f"24.2 {countdown}\n24.9 {countdown}\n25..30 {countdown}-1")) == []


def test_not_in_maintenance_and_as_soon_as_it_is_over() -> None:
    result = played(f"24.5 maintenance 8\n{high(25, 40)}")
    assert at(result) == ["33 StopTrainer llm"]


def test_not_after_the_commit() -> None:
    """A battery that is as good as empty: the host goes down first, and systemd wakes what is stopped."""
    story = "6..60 battery load=75 charge=5 runtime=5 low_battery"
    result = Player().play(f"policy {WORDS}\nauto policy sync poweroff checkpoint=1\n{READY}\n{story}")
    assert (result.phase, at(result)) == ("shutdown", [])


def test_the_cap_has_ten_seconds_and_one_that_fails_has_none() -> None:
    capped = f"{WORDS} cap_share=0.6"
    assert at(played(high(25, 32), words=capped)) == ["30 StopTrainer llm"], "ordered at 20 s"
    failing = "auto policy sync poweroff checkpoint=5 stop restore"
    story = "17..22 battery load=75 charge=89 runtime=2900 low_battery\n22.5 failed cap no helper"
    result = Player().play(f"policy {capped}\n{failing}\n{READY}\n{LOW}\n{story}\n{high(23, 27)}")
    assert at(result) == ["25 StopTrainer llm"]


def test_each_rung_has_fifteen_seconds_from_when_it_was_carried_out() -> None:
    result = played(f"{high(25, 29)}\n30 done stop\n{high(31, 60)}", ALL.replace(" stop", ""))
    assert at(result) == ["25 StopTrainer llm", "45 TerminateTrainer llm"]
    assert at(played(high(25, 90))) == ["25 StopTrainer llm", "41 TerminateTrainer llm"], "and then there is no more"


def test_one_that_is_not_stopped_is_asked_once_more() -> None:
    """It does not pause, and its checkpoint is of an older step: only a stop makes a second one pointless."""
    none, older = ALL.replace(" checkpoint=5", ""), f"{high(25, 26)}\n27 durable llm older"
    assert len(played(older, none).ordered(TriggerCheckpoint)) == 1
    unsignalled = played(older, none, words=WORDS.replace("signals=1", "signals=0"))
    assert len(unsignalled.ordered(TriggerCheckpoint)) == 2
    early = played("24.5 durable llm older", none)
    assert len(early.ordered(TriggerCheckpoint)) == 2, "the load may still fall"
    fallen = played(f"{high(25, 60, load=40)}\n61 durable llm older", none)
    assert len(fallen.ordered(TriggerCheckpoint)) == 2, "it stands"


# --- To whom --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conduct", ["pause", "exit"])
def test_what_was_asked_to_stand(conduct: str) -> None:
    assert at(played(high(25, 26), words=WORDS.replace(":pause:", f":{conduct}:"))) == ["25 StopTrainer llm"]


def test_nobody_who_goes_on_by_his_settings() -> None:
    words = f"{WORDS} trainer=beside:continue:5"
    result = played(f"{high(25, 60)}", words=words)
    assert {line.split()[2] for line in at(result)} == {"llm"}


def test_nobody_whose_checkpoint_is_on_its_way() -> None:
    none = ALL.replace(" checkpoint=5", "")
    assert at(played(high(25, 60), none)) == []
    assert at(played(f"{high(25, 30)}\n31 durable llm\n{high(32, 33)}", none)) == ["31 StopTrainer llm"]
    assert at(played(f"{high(25, 30)}\n31 failed llm timeout\n{high(32, 33)}", none)) == ["31 StopTrainer llm"]


def test_nobody_who_is_about_to_be_asked_again() -> None:
    """Refused twice at once, it is asked again two seconds later; stopped meanwhile, it could not answer."""
    refused = f"{high(25, 26)}\n26.5 failed llm busy\n26.75 failed llm busy\n{high(27, 28)}"
    result = played(refused, ALL.replace(" checkpoint=5", ""))
    assert (len(result.ordered(TriggerCheckpoint)), at(result)) == (2, [])
    result = played(f"{refused}\n{high(29, 40)}", ALL.replace(" checkpoint=5", ""))
    assert (len(result.ordered(TriggerCheckpoint)), at(result)) == (3, [])


def test_nobody_who_says_meanwhile_that_he_goes_on() -> None:
    """A trainer may be told another conduct while it runs: nobody who is to train on is stopped."""
    assert at(played(f"24.5 trainer llm conduct=continue\n{high(25, 60)}")) == []


def test_nobody_who_is_gone() -> None:
    assert at(played(f"24.5 trainer llm alive=false\n{high(25, 60)}")) == []


def test_those_first_who_do_not_even_say_that_they_stand() -> None:
    """Both rungs for one before the first for the other? No: nobody is ended while somebody is not even stopped."""
    words = f"{WORDS} trainer=small:pause:5"
    result = played(f"24.5 trainer llm paused=false\n{high(25, 90)}", words=words)
    assert at(result) == [
        "25 StopTrainer llm",
        "41 StopTrainer small",
        "57 TerminateTrainer llm",
        "73 TerminateTrainer small",
    ]


def test_two_of_a_kind_go_together() -> None:
    result = played(high(25, 26), words=f"{WORDS} trainer=small:pause:5")
    assert at(result) == ["25 StopTrainer llm", "25 StopTrainer small"]


def test_what_is_done_is_reported_with_the_load_that_asks_for_it() -> None:
    """And the order bears the outage, by which the helper and the journal know it again."""
    result = played(high(25, 50))
    said = [(note.level, dict(note.numbers)) for note in result.notes if note.event == "trainer_signalled"]
    assert said == [
        ("warning", {"trainer": "llm", "word": "stop", "load_pct": 75}),
        ("warning", {"trainer": "llm", "word": "terminate", "load_pct": 75}),
    ]
    orders = [action for action in result.actions if isinstance(action, StopTrainer | TerminateTrainer)]
    (outage,) = {action.outage for action in result.ordered(TriggerCheckpoint)}  # type: ignore[attr-defined]
    assert outage
    assert [action.outage for action in orders] == [outage, outage]


# --- What comes of it -----------------------------------------------------------------------------------------------


def test_one_that_cannot_be_signalled_is_reported_once_and_left_alone() -> None:
    result = played(f"{high(25, 26)}\n26.5 failed stop no helper\n{high(27, 90)}", ALL.replace(" stop", ""))
    assert at(result) == ["25 StopTrainer llm"]
    assert [note.because for note in result.notes if note.event == "signal_failed_raised"] == ["llm: no helper"]
    result = played(f"{high(25, 44)}\n45 failed terminate no helper\n{high(46, 90)}", ALL.replace(" terminate", ""))
    assert at(result) == ["25 StopTrainer llm", "41 TerminateTrainer llm"]


def test_a_stop_that_may_have_come_is_undone_too() -> None:
    """A helper that fails half-way has stopped some of them."""
    result = played(
        f"{high(25, 26)}\n26.5 failed stop timeout\n27..60 utility load=75 charge=60", ALL.replace(" stop", "")
    )
    assert at(result) == ["25 StopTrainer llm", "37 ContinueTrainer llm"]
    assert result.state.signalled == ()


def test_what_was_ended_is_started_again_and_not_let_go_on() -> None:
    result = played(f"{high(25, 50)}\n51..80 utility load=26 charge=60")
    assert at(result) == ["25 StopTrainer llm", "41 TerminateTrainer llm"]
    assert [type(action) for action in result.actions if isinstance(action, ResumeTraining)] == [ResumeTraining]
    assert result.state.signalled == ()


def test_who_is_gone_because_we_ended_him_is_no_alarm() -> None:
    result = played(f"{high(25, 42)}\n43 trainer llm alive=false")
    (gone,) = [note for note in result.notes if note.event == "trainer_gone"]
    assert (gone.because, gone.level) == ("ended by powerguard's signal", "info")
    result = played(f"{high(25, 30)}\n31 trainer llm alive=false")
    (gone,) = [note for note in result.notes if note.event == "trainer_gone"]
    assert (gone.because, gone.level) == ("no longer reachable", "warning")


def test_whoever_bears_the_name_next_is_another_process() -> None:
    """It was started again by its supervisor: it owes a checkpoint, and nothing was done to it yet."""
    result = played(f"{high(25, 42)}\n43 trainer llm alive=false\n44 trainer llm paused=false")
    assert result.state.signalled == ()
    assert len(result.ordered(TriggerCheckpoint)) == 2


def test_no_trainer_is_asked_to_go_on_before_it_can_answer() -> None:
    player = Player()
    result = played(f"{high(25, 30)}\n31..41 utility load=40 charge=60", ALL.replace(" continue", ""), player=player)
    assert (result.phase, at(result)[-1], result.ordered(ResumeTrainer)) == ("online", "41 ContinueTrainer llm", [])
    result = player.play("42 done continue\n43 utility load=75 charge=60")
    assert [action.by_s for action in result.ordered(ResumeTrainer)] == [52.0]


def test_going_on_is_tried_for_ever_and_reported_once() -> None:
    player = Player()
    played(f"{high(25, 30)}\n31..41 utility load=40 charge=60", ALL.replace(" continue", ""), player=player)
    result = player.play(
        "42 failed continue a\n43..51 utility load=40 charge=60\n52 failed continue b\n53..61 utility load=40"
    )
    assert at(result) == [
        "25 StopTrainer llm",
        "41 ContinueTrainer llm",
        "51 ContinueTrainer llm",
        "61 ContinueTrainer llm",
    ]
    assert [note.because for note in result.notes if note.event == "trainer_left_stopped_raised"] == ["llm: a"]
    result = player.play("62 done continue")
    assert result.notes[-1].event == "trainer_left_stopped_cleared"
    assert result.state.signalled == ()


def test_one_that_does_not_answer_keeps_nobody_else_stopped() -> None:
    """Two were stopped, and both are let go on. The first word has no outcome yet; the second is tried again."""
    player = Player()
    words, answers = f"{WORDS} trainer=small:pause:5", ALL.replace(" continue", "")
    story = f"{high(25, 30)}\n31..41 utility load=40 charge=60"
    result = played(story, answers, words=words, player=player)
    assert at(result)[-2:] == ["41 ContinueTrainer llm", "41 ContinueTrainer small"]
    second = result.ordered(ContinueTrainer)[-1]
    player.send(Failed(at_s=42.0, action=second, took_s=0.1, reason="busy"))
    assert at(player.play("43..51 utility load=40 charge=60"))[-1] == "51 ContinueTrainer small"


def test_the_alarm_stands_until_the_last_one_goes_on() -> None:
    player = Player()
    words, answers = f"{WORDS} trainer=small:pause:5", ALL.replace(" continue", "")
    result = played(f"{high(25, 30)}\n31..41 utility load=40 charge=60", answers, words=words, player=player)
    first, second = result.ordered(ContinueTrainer)
    player.send(Failed(at_s=42.0, action=second, took_s=0.1, reason="busy"))
    player.send(Done(at_s=42.5, action=first, took_s=0.1))
    assert "trainer_left_stopped" in result.state.alarms
    again = player.play("43..51 utility load=40 charge=60").ordered(ContinueTrainer)[-1]
    player.send(Done(at_s=51.5, action=again, took_s=0.1))
    assert "trainer_left_stopped" not in result.state.alarms


def test_what_was_only_recorded_is_not_reported_as_done() -> None:
    """In dry-run nobody is signalled: whoever reads the story must not think so. Done or recorded, it is no alarm."""
    player = Player()
    result = played(high(25, 26), ALL.replace(" stop", ""), player=player)
    (stop,) = result.ordered(StopTrainer)
    player.send(Done(at_s=26.5, action=stop, took_s=0.1, detail=(("dry_run", True),)))
    (recorded,) = [note for note in result.notes if note.event == "trainer_stopped"]
    (done,) = [note for note in played(high(25, 26)).notes if note.event == "trainer_stopped"]
    assert (recorded.level, recorded.because) == ("info", "dry-run: no signal was sent, it is only recorded")
    assert (done.level, done.because) == ("info", "confirmed by the helper")


def test_going_on_is_tried_through_the_next_outage() -> None:
    """A trainer that is still stopped could not save then, either."""
    player = Player()
    played(f"{high(25, 30)}\n31..41 utility load=40 charge=60", ALL.replace(" continue", ""), player=player)
    result = player.play(f"42 failed continue a\n{high(43, 60)}")
    assert result.phase == "holding"
    assert at(result)[-1] == "51 ContinueTrainer llm"


def test_one_unconfirmed_reading_lets_nobody_go_on() -> None:
    player = Player()
    played(f"{high(25, 30)}\n31..41 utility load=40 charge=60", ALL.replace(" continue", ""), player=player)
    result = player.play("42 failed continue a\n43..50 utility load=40 charge=60\n51 battery load=40 charge=60")
    assert at(result)[-1] == "41 ContinueTrainer llm"


def test_a_stop_without_an_outcome_is_waited_for() -> None:
    """The word to go on must not overtake it."""
    result = played(f"{high(25, 26)}\n27..40 utility load=75 charge=60", ALL.replace(" stop", ""))
    assert (result.phase, at(result)) == ("online", ["25 StopTrainer llm"])


def test_a_stopped_trainer_is_asked_for_nothing() -> None:
    result = played(f"{high(25, 30)}\n31 checkpoint_now\n32 battery load=40 charge=47 low_battery")
    assert len(result.ordered(TriggerCheckpoint)) == 1


def test_a_pause_that_did_not_come_teaches_nothing() -> None:
    """Or the next outage would expect this load, and see nothing wrong with it."""
    story = f"24.5 trainer llm paused=true\n{high(25, 80, load=70)}"
    assert played(story).state.learned.pauses == ()
    without = played(story, words=WORDS.replace("signals=1", "signals=0"))
    assert [name for name, _ in without.state.learned.pauses] == ["llm"]


def test_an_outcome_of_which_nobody_knows_changes_nothing() -> None:
    result = played(high(25, 30))
    stray: Action = StopTrainer(id="another", by_s=99.0, trainer="llm", outage="o")
    answer = step(make_policy(WORDS.split()), result.state, Done(at_s=30.5, action=stray, took_s=0.1))
    assert answer.state.signalled == result.state.signalled


# --- After a restart -------------------------------------------------------------------------------------------------


def test_a_signal_on_its_way_is_not_repeated_by_the_new_daemon() -> None:
    result = played(f"{high(25, 26)}\n27 restart", ALL.replace(" stop", ""))
    assert at(result) == ["25 StopTrainer llm"]
    (each,) = result.state.signalled
    assert (each.word, each.order, each.carried_out) == ("stop", None, "")


def test_one_that_is_stopped_is_not_stopped_again_by_the_new_daemon() -> None:
    """The word to end it may have been lost with the old daemon; that it stands has not."""
    result = played(f"{high(25, 41)}\n42 restart\n{high(43, 60)}", ALL.replace(" terminate", ""))
    assert at(result) == ["25 StopTrainer llm", "41 TerminateTrainer llm", "56 TerminateTrainer llm"]


def test_a_word_to_go_on_on_its_way_is_repeated() -> None:
    answers = ALL.replace(" continue", "")
    result = played(f"{high(25, 30)}\n31..41 utility load=40 charge=60\n43 restart", answers)
    assert at(result)[-2:] == ["41 ContinueTrainer llm", "43 ContinueTrainer llm"]
    result = played(f"{high(25, 30)}\n31..41 utility load=40 charge=60\n50 restart\n51..52 utility load=40", answers)
    assert at(result)[-2:] == ["41 ContinueTrainer llm", "51 ContinueTrainer llm"], "out of time: ordered again"


def test_in_another_boot_nobody_is_stopped() -> None:
    result = played(f"{high(25, 30)}\n31 reboot gap=100")
    assert result.state.signalled == ()


# --- Questions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "stopped", "terminated"),
    [
        ({"word": "stop", "order": "a"}, True, False),
        ({"word": "stop", "carried_out": "stop"}, True, False),
        ({"word": "stop", "failed": True}, True, False),
        ({"word": "terminate", "carried_out": "stop", "order": "a"}, True, True),
        ({"word": "terminate", "carried_out": "terminate"}, False, True),
        ({"word": "continue", "carried_out": "stop", "order": "a"}, True, False),
        ({"word": "continue", "carried_out": "stop", "failed": True}, False, False),
    ],
)
def test_who_counts_as_stopped(fields: dict[str, object], *, stopped: bool, terminated: bool) -> None:
    each = Signalled(**{"trainer": "llm", "outage": "o", "at_s": 1.0, **fields})  # type: ignore[arg-type]
    state = replace(played("").state, owed=(each,))
    assert escalation.is_stopped(state, "llm") is stopped
    assert escalation.is_terminated(state, "llm") is terminated
    assert not escalation.is_stopped(state, "other")
    assert not escalation.is_terminated(state, "other")
