"""What a drill measures, to the digit: loads that come late or never rest, slow training, a cap that does not pay."""

from dataclasses import replace

import pytest

from powerguard.core.decide.turn import Turn
from powerguard.core.drill import measures
from powerguard.core.model.actions import Scalar
from powerguard.core.model.events import TrainerSeen
from powerguard.core.model.policy import DrillReport, Health
from powerguard.core.model.state import Drill, DrillStage, State
from tests.core.play import Player, StoryResult, make_policy

WORDS = "table=50:540,75:360,100:240 trainer=llm:pause:20 rating_w=4000"
READY = "0..14 utility load=75 charge=100 runtime=360\n15 trainer llm step=100 durable_age_s=60"
ANSWERS = "auto policy sync poweroff resume trainer_resume pause cap restore checkpoint=5"
CAP = DrillStage(name="cap", at_s=16.0)
RUNNING = Drill(id="d", began_s=16.0, who="x", scopes=("cap",), witness="simulated", part=CAP)


def played(story: str, words: str = WORDS, answers: str = ANSWERS, ready: str = READY) -> StoryResult:
    return Player().play(f"policy {words}\n{answers}\n{ready}\n{story}")


def report(result: StoryResult) -> DrillReport:
    found = result.state.learned.drill
    assert found is not None
    return found


def figures(result: StoryResult) -> dict[str, Scalar]:
    return dict(report(result).figures)


def capped(before: float, after: float, load: int) -> StoryResult:
    """A drill of a cap: steps a second before and after, and the load in percent that it leaves."""
    story = ["16 drill scope=cap"]
    steps = 1000.0
    began_s: int | None = None
    player = Player()
    player.play(f"policy {WORDS} cap_share=0.7\n{ANSWERS}\n{READY}\n{story[0]}")
    for second in range(17, 140):
        if began_s is None and player.result is not None and player.result.state.cap is not None:
            began_s = second
        steps += before if began_s is None else after
        if second % 3 == 0:
            player.line(f"{second} trainer llm step={steps:.0f}")
        player.line(f"{second} utility load={75 if began_s is None else load} charge=100 runtime=360")
    assert player.result is not None
    return player.result


# --- Load -------------------------------------------------------------------------------------------------------------


def test_two_upses_are_measured_together_however_often_each_is_read() -> None:
    """The host draws 2000 W of one UPS and 1000 W of the other, which is read every third second only."""

    def read(first_s: int, last_s: int, a: int, b: int) -> str:
        found = [f"{at_s} utility ups=a load={a} charge=100 runtime=700" for at_s in range(first_s, last_s)]
        found[::3] = [f"{line} | utility ups=b load={b} charge=100 runtime=700" for line in found[::3]]
        return "\n".join(found)

    words = f"{WORDS} feed=a feed=b"
    ready = read(0, 16, 50, 25) + "\n15 trainer llm step=100 durable_age_s=60"
    result = played(f"16 drill scope=pause\n{read(17, 29, 50, 25)}\n{read(29, 90, 25, 15)}", words=words, ready=ready)
    found = figures(result)
    assert found["load_before"] == 0.375
    assert found["load_paused"] == pytest.approx(0.2, abs=0.005)
    assert found["drop_paused_w"] == pytest.approx(1400.0, abs=40.0), "of two times 4000 W"


def test_a_load_that_never_rests_is_reported_as_its_mean() -> None:
    """The baseline ends after 30 s; of a load that climbs by a point a second the last eleven seconds count."""
    result = played("16 drill scope=pause\n17..46 utility load=40+1\n47..100 utility load=30\n101..103 utility load=75")
    assert figures(result)["load_before"] == 0.635


def test_a_load_that_is_reported_too_late_is_compared_with_nothing() -> None:
    """Silent in the baseline, told in the pause: there is no drop, nothing is learned, and the drill is no failure."""
    ready = READY.replace("load=75 ", "")
    outcome = played("16 drill scope=pause\n17..46 utility charge=100\n47..110 utility load=40", ready=ready)
    assert figures(outcome)["load_reported"] is False
    assert "load_paused" not in figures(outcome)
    assert outcome.state.learned.pauses == ()
    assert report(outcome).result == "passed"


def test_a_pause_that_does_not_come_to_rest_ends_in_its_last_second() -> None:
    """45 s after it was ordered at 27 s, and not a reading later."""
    for last_s, stage in ((71, "pause"), (72, "resume")):
        result = played(
            f"16 drill scope=pause\n17..27 utility load=75\n28..{last_s} utility load=30+1", answers="auto pause"
        )
        assert result.state.drill is not None
        assert result.state.drill.stage == stage


def test_where_nobody_paused_nothing_is_learned_of_a_pause() -> None:
    """The only trainer died before it was its turn."""
    result = played("16 drill scope=pause\n17..20 utility load=75\n20 trainer llm alive=false\n21..120 utility load=75")
    assert result.state.drill is None
    assert result.state.learned.pauses == ()


def test_of_a_checkpoint_that_is_being_written_the_rest_is_expected() -> None:
    """One that somebody asked for at 17 s takes 100 s; when the baseline ends at 28 s, 89 s are left."""
    words = f"{WORDS} trainer=vit:continue:100:other"
    player = Player()
    result = player.play(
        f"policy {words}\nauto\n{READY}\n15 trainer vit conduct=continue durable_age_s=60\n"
        "16 drill scope=checkpoint,pause\n17 checkpoint_now\n18..28 utility load=75"
    )
    assert result.state.drill is not None
    assert dict(result.state.drill.figures)["checkpoint_expected_s"] == 89.0


def test_a_checkpoint_alone_has_what_was_expected_of_it() -> None:
    """A drill without a baseline, which compares with what the budget counts."""
    outcome = played("16 drill scope=checkpoint\n17..60 utility load=75").state.learned.drill
    assert outcome is not None
    figures = dict(outcome.figures)
    assert (outcome.result, figures["checkpoint_expected_s"], figures["checkpoint_s"]) == ("passed", 20.0, 5.0)


def test_a_load_reported_in_watts_counts_as_well() -> None:
    """3000 W and 1640 W on 4 kW; the drop is told in tenths of a watt."""
    ready = "0..14 utility watts=3000 charge=100 runtime=360\n15 trainer llm durable_age_s=60"
    result = played(
        "16 drill scope=pause\n17..27 utility watts=3000\n28..45 utility watts=1640\n46..47 utility watts=3000",
        ready=ready,
    )
    assert (figures(result)["load_before"], figures(result)["load_paused"]) == (0.75, 0.41)
    odd = played(
        "16 drill scope=pause\n17..27 utility load=75\n28..45 utility load=41\n46..47 utility load=75",
        WORDS.replace("4000", "3333"),
    )
    assert figures(odd)["drop_paused_w"] == 1133.2


def test_halves_that_are_one_and_a_half_percent_apart_still_agree() -> None:
    """Whole percents of a gauge make that much by themselves."""
    samples = tuple(zip((0.0, 3.0, 6.0, 10.0), (0.0, 0.0, 0.015, 0.015), strict=True))
    assert measures.stage_load(replace(CAP, samples=samples), 10.0, late=False) == (0.0075, True)


# --- Speed ------------------------------------------------------------------------------------------------------------


def seen(*samples: tuple[float, int | None], alive: bool = True) -> DrillStage:
    found = CAP
    for at_s, number in samples:
        found = measures.watch_trainer(found, TrainerSeen(at_s=at_s, trainer="a", alive=alive, step=number))
    return found


def test_steps_are_counted_from_the_first_one_reported() -> None:
    """Late in a long boot, in steps of ten seconds, and through looks between which no step ended."""
    slow = seen((100000.0, 10), (100005.0, 10), (100010.0, 11), (100050.0, 15))
    assert measures.speed_of(slow, "a") == 0.1


def test_who_reports_no_step_any_more_has_no_speed() -> None:
    """Alive without a step, or dead with one: what was counted before is not carried on."""
    assert seen((0.0, 10), (10.0, 30), (11.0, None)).seen == ()
    dead = measures.watch_trainer(
        seen((0.0, 10), (10.0, 30)), TrainerSeen(at_s=11.0, trainer="a", alive=False, step=32)
    )
    assert dead.seen == ()


def test_slow_training_reports_its_speed_under_a_cap_too() -> None:
    """Less than a step a second, and three quarters of that under the cap."""
    result = capped(0.8, 0.6, load=50)
    assert figures(result)["cap_speed"] == pytest.approx(0.75, abs=0.08)
    assert result.state.learned.cap is not None


def test_steps_before_a_cap_took_effect_say_nothing_of_it() -> None:
    """The helper takes five seconds; what training did in them it did at full power."""
    player = Player()
    player.play(f"policy {WORDS} cap_share=0.7\nauto restore\n{READY}\n16 drill scope=cap")
    steps, capped_s = 1000, None
    for second in range(17, 60):
        if capped_s is None and player.result is not None and player.result.state.cap is not None:
            capped_s = second
        if capped_s is not None and second == capped_s + 5:
            player.line(f"{second - 0.5} done cap")
        steps += 4 if capped_s is None or second < capped_s + 5 else 2
        player.line(f"{second} trainer llm step={steps}")
        player.line(f"{second} utility load={75 if capped_s is None else 50} charge=100 runtime=360")
    assert player.result is not None
    assert figures(player.result)["cap_speed"] == 0.5


def test_a_cap_makes_no_training_faster() -> None:
    """Twice as fast under the cap is a warm cache, not a gain."""
    result = capped(2.0, 4.0, load=50)
    assert figures(result)["cap_speed"] == 1.0
    assert result.state.learned.cap is not None
    assert result.state.learned.cap.speed == 1.0


def test_a_cap_that_does_not_pay_says_so() -> None:
    """Half the speed for five points of load: the battery lasts hardly longer, and less gets done with it."""
    result = capped(4.0, 2.0, load=70)
    assert figures(result)["cap_pays"] is False
    gain = figures(result)["cap_gain"]
    assert isinstance(gain, float)
    assert 0.5 < gain < 0.6


# --- Self-test and health ---------------------------------------------------------------------------------------------

SELF_TEST = (
    "16.1234 drill witness=self_test\n17..20 utility watts=3000 charge=100 runtime=360\n"
    "21..30 battery watts=2960 charge=100-0.3 runtime=355-2 testing input_present=true\n"
    "30.5678 battery watts=2960 charge=97 runtime=336 testing input_present=true\n"
    "31..33 utility watts=3000 charge=97 runtime=350"
)


def test_a_self_test_is_timed_to_the_millisecond() -> None:
    """It begins in the reading at 21 s, 4.8766 s after the drill, and is over in the one at 31 s."""
    result = figures(played(SELF_TEST))
    assert (result["test_began_s"], result["load_before"], result["load_test"]) == (4.877, 0.74, 0.74)
    late = SELF_TEST.replace("31..33", "31.2345 utility watts=3000 charge=97\n32..33")
    assert figures(played(late))["test_s"] == 10.234


def test_a_health_known_before_the_drill_was_not_learned_in_it() -> None:
    player = Player()
    result = player.play(f"policy {WORDS}\n{ANSWERS}\n{READY}")
    known = Health(share=0.8, error=0.05, depth=0.4, at_s=1.0, how="fall of the charge")
    model = replace(result.state.battery.model, health=known)
    result.state = replace(result.state, battery=replace(result.state.battery, model=model))
    assert figures(player.play(SELF_TEST))["health_learned"] is False


def test_a_health_learned_in_the_moment_that_the_drill_began_is_its_own() -> None:
    for at_s, is_learned in ((15.9, False), (16.0, True)):
        health = Health(share=0.8, error=0.05, depth=0.4, at_s=at_s, how="fall of the charge")
        state = State(drill=RUNNING)
        battery = replace(state.battery, health=0.7999, model=replace(state.battery.model, health=health))
        turn = Turn(make_policy(WORDS.split()), replace(state, battery=battery), 30.0)
        measures.report_health(turn, 16.0)
        assert turn.state.drill is not None
        learned = {"health": 0.7999, "health_measured": 0.8, "health_error": 0.05, "health_learned": True}
        assert dict(turn.state.drill.figures) == (learned if is_learned else {"health_learned": False})


def test_a_discharge_that_shows_a_bound_reports_no_measurement() -> None:
    """The drill says how much the battery holds at least, and which health counts."""
    health = Health(share=0.4, error=0.05, depth=0.3, at_s=16.0, how="fall of the charge", least=True)
    state = State(drill=RUNNING)
    battery = replace(state.battery, health=0.75, model=replace(state.battery.model, health=health))
    turn = Turn(make_policy(WORDS.split()), replace(state, battery=battery), 30.0)
    measures.report_health(turn, 16.0)
    assert turn.state.drill is not None
    assert dict(turn.state.drill.figures) == {"health": 0.75, "health_at_least": 0.4, "health_learned": True}


@pytest.mark.parametrize(
    ("story", "because"),
    [
        (
            "16 drill witness=self_test\n17..140 utility load=75",
            "the UPS did not begin a self-test: start it at its front panel or on its card",
        ),
        (
            (
                "16 drill witness=self_test\n17..330 battery load=74 charge=100 runtime=30000 calibrating "
                "input_present=true"
            ),
            "the self-test of the UPS did not end",
        ),
    ],
    ids=["never begun", "never ended"],
)
def test_why_a_self_test_has_measured_nothing(story: str, because: str) -> None:
    outcome = played(story, "table=75:36000 trainer=llm:pause:20", ready=READY.replace("360", "30000"))
    assert (report(outcome).result, report(outcome).because) == ("failed", because)


# --- After a pause ----------------------------------------------------------------------------------------------------

PAUSED = "16 drill scope=pause\n17..27 utility load=75\n28..38 utility load=40"


def test_a_trainer_that_could_not_be_asked_to_go_on_fails_the_drill() -> None:
    """Its resume was refused, so it may stand still, whatever it tells: the drill is no success."""
    answers = "auto pause"
    outcome = played(f"{PAUSED}\n39 failed trainer_resume llm\n40..41 utility load=75", answers=answers)
    assert outcome.state.drill is not None
    assert outcome.state.drill.stage == "resume"
    outcome = played(f"{PAUSED}\n39 failed trainer_resume llm\n40..150 utility load=75", answers=answers)
    assert report(outcome).result == "failed"
    assert "llm did not continue after the pause" in report(outcome).because


def test_a_refused_resume_counts_also_where_the_trainer_says_that_it_runs() -> None:
    """Its word may be older than the pause: until it has heard, the drill is not over, and it is named."""
    story = f"{PAUSED}\n39 failed trainer_resume llm\n39.5 trainer llm\n40..41 utility load=75"
    result = played(story, answers="auto pause")
    assert result.state.drill is not None
    assert result.state.drill.stage == "resume"
    story = f"{PAUSED}\n39 failed trainer_resume llm\n39.5 trainer llm\n40..90 utility load=75"
    result = played(story, answers="auto pause")
    assert [note.because for note in result.notes if note.event == "drill_undoing"] == [
        "llm did not continue after the pause"
    ]


def test_all_who_did_not_go_on_are_named() -> None:
    player = Player()
    words = f"{WORDS} trainer=vit:pause:20"
    player.play(
        f"policy {words}\nauto pause\n{READY}\n15 trainer vit durable_age_s=60\n{PAUSED}\n39..90 utility load=75"
    )
    assert player.result is not None
    assert [note.because for note in player.result.notes if note.event == "drill_undoing"] == [
        "llm, vit did not continue after the pause"
    ]


def test_how_long_it_took_until_training_ran_again_is_timed_to_the_millisecond() -> None:
    outcome = played(f"{PAUSED}\n38.1236 done trainer_resume\n39..40 utility load=75", answers="auto pause")
    assert figures(outcome)["resume_s"] == 0.124
    assert report(outcome).result == "passed"
