"""A drill in the core: when it may begin, what it measures, and that it always ends with everything as it was."""

from dataclasses import replace

import pytest

from powerguard.core.decide.machine import step
from powerguard.core.drill import checks, measures
from powerguard.core.model.actions import CapPower, PauseTrainer, RestorePower, ResumeTrainer, TriggerCheckpoint
from powerguard.core.model.events import Done, OutputSource, Reading, StartDrill, Tick, TrainerSeen
from powerguard.core.model.policy import DrillReport
from powerguard.core.model.state import (
    Activity,
    DrillStage,
    State,
    Trainer,
)
from tests.core.play import Player, StoryResult, make_policy

WORDS = "table=50:540,75:360,100:240 trainer=llm:pause:20 rating_w=4000"
READY = "0..14 utility load=75 charge=100 runtime=360\n15 trainer llm step=100 durable_age_s=60"
ANSWERS = "auto policy sync poweroff resume trainer_resume pause cap restore checkpoint=5"


def played(story: str, words: str = WORDS, answers: str = ANSWERS) -> StoryResult:
    return Player().play(f"policy {words}\n{answers}\n{READY}\n{story}")


def report(result: StoryResult) -> DrillReport:
    found = result.state.learned.drill
    assert found is not None
    return found


def why(story: str, scope: str = "full", words: str = WORDS, witness: str = "simulated") -> str:
    """Why such a drill may not begin at the end of that story."""
    player = Player()
    result = player.play(f"policy {words}\nauto policy\n{story}")
    scopes = tuple(scope.split(",")) if scope else ()
    return checks.refusal(player.policy, result.state, player.last_s, scopes, witness)


# --- May it begin? ----------------------------------------------------------------------------------------------------


def test_it_may_begin_when_all_is_well() -> None:
    for scope in checks.SCOPES:
        assert why(READY, scope, f"{WORDS} cap_share=0.7") == ""
    assert why(READY, "", witness="plug") == ""
    assert why(READY, "", witness="self_test") == ""


@pytest.mark.parametrize(
    ("story", "scope", "words", "said"),
    [
        ("0 tick", "policy", WORDS, "the UPS has not been read yet"),
        (f"{READY}\n20 tick", "policy", WORDS, "is 6 s old (at most 3 s)"),
        (f"{READY}\n15 battery", "policy", WORDS, "the newest reading reports battery"),
        (f"{READY}\n15..17 battery", "policy", WORDS, "the phase is on_battery"),
        ("0..5 utility load=75 charge=100", "policy", WORDS, "for 5 s only"),
        (f"{READY}\n15 battery testing input_present=true", "policy", WORDS, "tests its battery"),
        ("0..14 utility load=75 charge=30 runtime=100", "policy", WORDS, "charge 30 %; checkpoint and stop need 190 s"),
        ("0..14 utility charge=30", "policy", "trainer=llm:pause:20", "charge 30 %)"),
        (f"{READY}\n15 maintenance 60", "policy", WORDS, "maintenance suspends"),
        (f"{READY}\n15 trainer llm alive=false", "checkpoint", WORDS, "no trainer is alive"),
        (f"{READY}\n15 trainer llm conduct=continue", "pause", WORDS, "cannot be paused"),
        (READY, "cap", WORDS, "the settings cap no GPU power"),
        (READY.replace("_s=60", "_s=1900"), "pause", WORDS, "its checkpoint is 32 minutes old (at most 30 minutes)"),
        (READY.replace(" durable_age_s=60", ""), "full", WORDS, "no known checkpoint"),
        (f"{READY}\n15 trainer llm paused=true", "full", WORDS, "paused by another request"),
        (f"{READY}\n15 checkpoint_now", "full", WORDS, "is writing a checkpoint"),
        (f"{READY}\n15 drill scope=pause", "policy", WORDS, "(stage baseline)"),
        (READY, "full,nothing", WORDS, "scope 'nothing'"),
        (READY, "", WORDS, "needs a scope"),
    ],
)
def test_it_refuses_with_the_numbers(story: str, scope: str, words: str, said: str) -> None:
    """Each refusal says what is wrong; nobody has to guess what would be right."""
    result = why(story, scope, words)
    assert said in result
    assert len(result) > 20


def test_a_checkpoint_of_just_half_an_hour_is_recent() -> None:
    assert why(READY.replace("_s=60", "_s=1800"), "pause") == ""
    assert "30 minutes old" in why(READY.replace("_s=60", "_s=1801"), "pause")


def test_a_pause_of_an_outage_that_lands_after_it_is_undone() -> None:
    """On utility, without a drill, nobody waits for it and nobody may stand still because of it; on battery it may."""
    for phase, expected in (("utility load=75 charge=100", 1), ("battery load=75 charge=99", 0)):
        player = Player()
        player.play(f"policy {WORDS}\n{READY}\n16..20 {phase}")
        late = PauseTrainer(id="late", by_s=30.0, trainer="llm", outage="o")
        player.send(Done(at_s=20.5, action=late, took_s=9.0, detail=(("paused", True),)))
        player.send(Tick(at_s=21.0))
        assert player.result is not None
        assert len(player.result.ordered(ResumeTrainer)) == expected


def test_a_checkpoint_of_somebody_else_survives_a_restart_in_a_drill() -> None:
    """Only what the drill has ordered is given up."""
    player = Player()
    result = player.play(f"policy {WORDS}\nauto policy\n{READY}\n16 drill scope=policy\n16.01 checkpoint_now")
    assert result.state.drill is not None
    (order,) = result.ordered(TriggerCheckpoint)
    result = player.play("16.02 restart")
    assert [trainer.order for trainer in result.state.trainers] == [order.id]
    assert order in result.ordered(TriggerCheckpoint)[1:], "repeated, for the trainer joins the two"


def test_an_old_checkpoint_allows_the_scope_that_makes_one() -> None:
    old = READY.replace("_s=60", "_s=1900")
    assert why(old, "checkpoint") == ""
    assert why(old, "policy") == ""
    outcome = played("16 drill scope=checkpoint\n17..25 utility load=75 charge=100\n26 drill scope=pause")
    assert report(outcome).result == "passed"
    assert outcome.state.drill is not None, "now there is a checkpoint, and the pause may begin"


def test_a_cap_that_stands_refuses_a_drill() -> None:
    """The limits that a drill would write down would be the capped ones."""
    story = f"{READY}\n15 learned cap=75:50:0.9\n15..27 battery load=75 charge=100 runtime=360"
    result = why(story, "policy", f"{WORDS} cap_share=0.7")
    assert "on_battery" in result
    story += "\n28..40 utility load=75 charge=97 runtime=350"
    assert "GPU power is capped" in why(story, "policy", f"{WORDS} cap_share=0.7")


@pytest.mark.parametrize("witness", ["plug", "self_test"])
def test_a_real_witness_takes_no_scope(witness: str) -> None:
    assert witness in why(READY, "pause", witness=witness)
    assert "witness 'magic'" in why(READY, "pause", witness="magic")


def test_the_outline_names_every_stage_and_its_limit() -> None:
    player = Player()
    result = player.play(f"policy {WORDS} cap_share=0.7\n{READY}")
    lines = checks.outline(player.policy, result.state, ("full",), "simulated")
    assert [stage for stage, _, _ in lines] == [
        "baseline", "checkpoint", "pause", "resume", "cap", "restore", "policy", "sync", "record",
    ]  # fmt: skip
    words = {stage: what for stage, what, _ in lines}
    assert words["checkpoint"] == "ask llm for a checkpoint and to pause there"
    assert "70 %" in words["cap"]
    assert all(limit_s > 0 for stage, _, limit_s in lines if stage != "record")
    assert [stage for stage, *_ in checks.outline(player.policy, result.state, (), "plug")] == ["plug"]


@pytest.mark.parametrize(
    ("step_s", "checkpoint_s", "limits"),
    [
        (0.0, 20.0, {"baseline": 30.0, "checkpoint": 80.0, "pause": 45.0, "resume": 30.0, "cap": 45.0}),
        (10.0, 5.0, {"baseline": 90.0, "checkpoint": 60.0, "pause": 45.0, "resume": 35.0, "cap": 90.0}),
        (20.0, 300.0, {"baseline": 150.0, "checkpoint": 600.0, "pause": 55.0, "resume": 55.0, "cap": 150.0}),
    ],
)
def test_every_stage_ends_in_time(step_s: float, checkpoint_s: float, limits: dict[str, float]) -> None:
    """By what an outage would give it: two steps + 15 s for the load, four times the expected time for a checkpoint."""
    policy = make_policy(WORDS.split())
    slow = Trainer(name="llm", step_s=step_s, checkpoint_s=checkpoint_s)
    gone = Trainer(name="gone", activity=Activity.GONE, step_s=1000.0, checkpoint_s=1000.0)
    state = State(trainers=(slow, Trainer(name="quick", checkpoint_s=1.0), gone))
    coming = ("baseline", "checkpoint", "pause", "resume", "cap")
    assert {stage: checks.stage_s(policy, state, stage, coming) for stage in coming} == limits
    assert checks.stage_s(policy, state, "baseline", ("baseline", "pause")) == 30.0
    others = {stage: checks.stage_s(policy, state, stage) for stage in ("restore", "policy", "sync", "plug")}
    assert others == {"restore": 30.0, "policy": 5.0, "sync": 5.0, "plug": 120.0}
    assert checks.stage_s(policy, state, "self_test") == 120.0
    assert checks.stage_s(policy, state, "record") == 0.0
    assert checks.stage_s(policy, replace(state, trainers=()), "checkpoint") == 0.0


def test_what_a_full_drill_leaves_out_is_named() -> None:
    player = Player()
    result = player.play(f"policy {WORDS}\n{READY}\n15 trainer llm conduct=continue durable_age_s=5")
    stages, skipped = checks.stages(player.policy, result.state, ("full",), "simulated")
    assert stages == ("checkpoint", "policy", "sync", "record")
    assert dict(skipped) == {
        "pause": "every trainer continues in an outage",
        "cap": "the settings cap no GPU power",
    }
    nobody = replace(result.state, trainers=())
    stages, skipped = checks.stages(player.policy, nobody, ("full",), "simulated")
    assert stages == ("policy", "sync", "record")
    assert set(dict(skipped)) == {"checkpoint", "pause", "cap"}


# --- What it measures -------------------------------------------------------------------------------------------------


def test_a_pause_teaches_its_drop() -> None:
    result = played("16 drill scope=pause\n17..27 utility load=75\n28..40 utility load=40\n41..42 utility load=75")
    drop = dict(result.state.learned.pauses)["llm"]
    assert (drop.before, round(drop.after, 6)) == (0.75, 0.40)
    figures = dict(report(result).figures)
    assert figures["load_before"] == 0.75
    assert figures["load_paused"] == 0.4
    assert figures["drop_paused_w"] == 1400.0
    assert figures["load_paused_expected"] == 0.45, "60 % of the load, until a drill has measured it"


def test_what_was_read_before_training_stood_still_is_no_measurement() -> None:
    """A step that takes long: the load stays, settled, until the trainer has acknowledged its pause."""
    story = "16 drill scope=pause\n17..40 utility load=75\n41 done pause\n42..60 utility load=40\n61 utility load=75"
    result = played(story, answers="auto trainer_resume")
    assert round(dict(result.state.learned.pauses)["llm"].after, 6) == 0.40


def test_two_that_pause_share_the_drop() -> None:
    words = "table=50:540,75:360,100:240 trainer=a:pause:20 trainer=b:pause:20"
    ready = READY.replace("15 trainer llm", "15 trainer a") + "\n15 trainer b durable_age_s=60"
    story = "16 drill scope=pause\n17..27 utility load=75\n28..40 utility load=45\n41..42 utility load=75"
    result = Player().play(f"policy {words}\n{ANSWERS}\n{ready}\n{story}")
    pauses = dict(result.state.learned.pauses)
    assert pauses["a"] == pauses["b"]
    assert round(pauses["a"].after, 6) == 0.60


def test_a_load_that_does_not_settle_teaches_nothing() -> None:
    """Training that draws now more, now less: the mean is told, and believed by nobody."""
    unsteady = "\n".join(f"{27 + n} utility load={30 + 4 * n}" for n in range(1, 60))
    outcome = played(f"16 drill scope=pause\n17..27 utility load=75\n{unsteady}")
    assert outcome.state.learned.pauses == ()
    assert dict(report(outcome).figures)["load_paused_settled"] is False
    assert report(outcome).result == "passed"


def test_a_ups_that_reports_no_load_teaches_nothing() -> None:
    result = Player().play(
        f"policy {WORDS}\n{ANSWERS}\n0..14 utility charge=100 runtime=360\n15 trainer llm durable_age_s=60\n"
        "16 drill scope=pause\n17..130 utility charge=100 runtime=360"
    )
    assert result.state.learned.pauses == ()
    assert dict(report(result).figures)["load_reported"] is False


def test_a_cap_teaches_load_and_speed() -> None:
    story = ["16 drill scope=cap"]
    for second in range(17, 100):
        capped_s = second - 31
        if second % 6 == 0:
            story.append(
                f"{second} trainer llm step={1000 + (2 * second if capped_s < 0 else 62 + 1.5 * capped_s):.0f}"
            )
        story.append(f"{second} utility load={75 if capped_s < 0 else 50} charge=100 runtime=360")
    result = played("\n".join(story), f"{WORDS} cap_share=0.7")
    cap = result.state.learned.cap
    assert cap is not None
    assert (round(cap.before, 4), round(cap.after, 4), round(cap.speed, 2)) == (0.75, 0.5, 0.75)
    figures = dict(report(result).figures)
    assert figures["cap_pays"] is True, "1.5 times as long at three quarters of the speed"
    assert round(float(str(figures["cap_gain"])), 3) == 1.125
    assert result.state.cap is None
    assert len(result.ordered(CapPower)) == len(result.ordered(RestorePower)) == 1


def test_the_speed_is_the_mean_of_those_who_report_it() -> None:
    """One at half its speed and one undisturbed: three quarters."""
    words = "table=50:540,75:360,100:240 trainer=a:pause:20 trainer=b:pause:20 cap_share=0.7"
    story = ["15 trainer a step=0 durable_age_s=60", "15 trainer b step=0 durable_age_s=60", "16 drill scope=cap"]
    for second in range(17, 100):
        capped_s = second - 31
        if second % 6 == 0:
            story.append(f"{second} trainer a step={10 * second if capped_s < 0 else 310 + 5 * capped_s}")
            story.append(f"{second} trainer b step={10 * second}")
        story.append(f"{second} utility load={75 if capped_s < 0 else 50} charge=100 runtime=360")
    result = Player().play(f"policy {words}\n{ANSWERS}\n{READY.partition(chr(10))[0]}\n" + "\n".join(story))
    assert result.state.learned.cap is not None
    assert round(result.state.learned.cap.speed, 3) == 0.75


def test_a_cap_without_steps_is_measured_and_believed_by_nobody() -> None:
    story = "16 drill scope=cap\n17..27 utility load=75\n28..40 utility load=50\n41 trainer llm\n42..50 utility load=75"
    result = Player().play(f"policy {WORDS} cap_share=0.7\n{ANSWERS}\n{READY.replace('step=100 ', '')}\n{story}")
    figures = dict(report(result).figures)
    assert (figures["load_capped"], figures["drop_capped_w"]) == (0.5, 1000.0)
    assert figures["cap_speed_reported"] is False
    assert result.state.learned.cap is None


@pytest.mark.parametrize("at_s", [float("nan"), float("inf"), -1e300, 1e300])
def test_a_start_at_no_time_is_passed_over(at_s: float) -> None:
    player = Player()
    result = player.play(f"policy {WORDS}\n{READY}")
    event = StartDrill(at_s=at_s, who="x" * 5000, scopes=("full",) * 99, witness="simulated")
    assert step(player.policy, result.state, event).state == result.state


def test_the_same_scope_twice_is_once() -> None:
    result = played("16 drill scope=policy,policy\n17 tick")
    assert report(result).scopes == ("policy",)


def test_dry_run_proves_nothing() -> None:
    """Every effector answers that it only records: no load is waited for, nothing is learned, and it says so."""
    player = Player()
    player.play(f"policy {WORDS} mode=dry-run\n{READY}\n16 drill scope=pause\n17..27 utility load=75")
    (_, pause), *_ = [pair for pair in player.open if isinstance(pair[1], PauseTrainer)]
    player.send(Done(at_s=27.5, action=pause, took_s=0.0, detail=(("dry_run", True),)))
    (_, resume), *_ = [pair for pair in player.open if isinstance(pair[1], ResumeTrainer)]
    player.send(Done(at_s=27.6, action=resume, took_s=0.0, detail=(("dry_run", True),)))
    assert player.result is not None
    summary = report(player.result)
    assert summary.result == "recorded"
    assert "resume_s" not in dict(summary.figures), "training never stopped"
    assert player.result.state.learned.pauses == ()
    assert player.result.state.drill is None


def test_the_samples_are_bounded_and_settle_by_their_halves() -> None:
    """A load that still falls has not settled; four readings of one load over ten seconds have."""
    running = DrillStage(name="pause", at_s=0.0)
    policy = make_policy(WORDS.split())
    falling = running
    for second in range(1000):
        reading = Reading(
            at_s=float(second), ups="u", source="s", output_source=OutputSource.UTILITY, load_pct=80.0 - second % 40
        )
        falling = measures.watch_reading(policy, State(), falling, reading)
    assert len(falling.samples) <= 64
    assert measures.stage_load(falling, 999.0, late=False) == (None, False)
    assert measures.stage_load(falling, 999.0, late=True)[0] is not None
    still = replace(running, samples=tuple((float(at), 0.4) for at in (0, 3, 6, 10)))
    assert measures.stage_load(still, 10.0, late=False) == (0.4, True)
    assert measures.stage_load(replace(still, samples=still.samples[1:]), 10.0, late=False) == (None, False)
    assert measures.stage_load(running, 10.0, late=True) == (None, False)
    assert measures.stage_load(still, 11.5, late=False) == (None, False), "the oldest of them is too old by now"
    apart = replace(running, samples=tuple((float(at), 0.40 if at < 5 else 0.414) for at in range(11)))
    assert measures.stage_load(apart, 10.0, late=False)[1], "whole percents of a gauge are no step"
    further = replace(running, samples=tuple((float(at), 0.40 if at < 5 else 0.416) for at in range(11)))
    assert measures.stage_load(further, 10.0, late=False) == (None, False)


def test_the_speed_needs_steps_and_time() -> None:
    running = DrillStage(name="cap", at_s=0.0)
    for at_s, number in ((0.0, 10), (5.0, 20), (10.0, 30)):
        running = measures.watch_trainer(running, TrainerSeen(at_s=at_s, trainer="a", alive=True, step=number))
    assert measures.speed_of(running, "a") == 2.0
    assert measures.speed_of(running, "b") is None
    again = measures.watch_trainer(running, TrainerSeen(at_s=11.0, trainer="a", alive=True, step=3))
    assert measures.speed_of(again, "a") is None, "started anew: counted from there"
    few = replace(running, seen=(("a", 10, 0.0, 14, 20.0), ("c", 10, 0.0, 15, 8.9), ("d", 10, 0.0, 15, 9.0)))
    assert [measures.speed_of(few, name) for name in "acd"] == [None, None, 5 / 9]
    gone = measures.watch_trainer(running, TrainerSeen(at_s=11.0, trainer="a", alive=False))
    assert gone.seen == ()


def test_the_report_of_a_full_drill() -> None:
    """Every figure of it: what was expected beside what was measured, and the power-off that was not ordered."""
    summary = report(played("16 drill scope=full\n17..31 utility load=75\n32..60 utility load=40"))
    assert (summary.result, summary.because) == ("passed", "every stage was carried out")
    assert (summary.id, summary.who, summary.witness, summary.scopes) == (
        "boot-one-drill-160",
        "alice",
        "simulated",
        ("full",),
    )
    assert (round(summary.at_s, 3), summary.lasted_s) == (42.3, 26.3)
    assert dict(summary.figures) == {
        "skipped_cap": "the settings cap no GPU power",
        "load_before": 0.75,
        "load_paused_expected": 0.45,
        "runtime_paused_expected_s": 357.0612,
        "checkpoint_expected_s": 20.0,
        "checkpoint_s.llm": 0.1,
        "checkpoint_verified.llm": True,
        "checkpoint_s": 5.0,
        "load_paused": 0.4,
        "drop_paused": 0.35,
        "drop_paused_w": 1400.0,
        "resume_s": 0.1,
        "policy": "always-on",
        "policy_verified": True,
        "sync_s": 0.1,
        "power_off_grade": "full",
        "power_off_force_after_s": 110.0,
        "stop_s": 170.0,
        "runtime_paused_s": 397.6364,
        "fits": True,
    }


def test_the_report_of_a_self_test() -> None:
    story = (
        "16 drill witness=self_test\n17..20 utility load=75 charge=100 runtime=360\n"
        "21..30 battery load=74 charge=100-0.3 runtime=355-2 testing input_present=true\n"
        "31..33 utility load=75 charge=97 runtime=350"
    )
    summary = report(played(story))
    assert (summary.result, summary.lasted_s) == ("passed", 15.0)
    assert dict(summary.figures) == {
        "test_began_s": 5.0,
        "load_before": 0.74,
        "charge_before_pct": 100.0,
        "runtime_before_s": 355.0,
        "health_before": 0.75,
        "load_test": 0.74,
        "runtime_test_s": 337.0,
        "charge_test_pct": 97.3,
        "test_s": 10.0,
        "health_learned": False,
    }


def test_a_self_test_that_nobody_starts_or_that_never_ends() -> None:
    summary = report(played("16 drill witness=self_test\n17..140 utility load=75"))
    assert (summary.result, summary.lasted_s) == ("failed", 120.0)
    testing = "battery load=74 charge=100 runtime=30000 calibrating input_present=true"
    ready = READY.replace("360", "30000")
    story = f"{ready}\n16 drill witness=self_test\n17..330 {testing}"
    summary = report(Player().play(f"policy table=75:36000 trainer=llm:pause:20\n{ANSWERS}\n{story}"))
    assert (summary.result, summary.lasted_s) == ("failed", 301.0)


@pytest.mark.parametrize(("at_s", "result"), [(None, "failed"), (45, "passed")])
def test_a_trainer_that_confirms_its_pause_and_trains_on_has_not_paused(at_s: int | None, result: str) -> None:
    """A load that did not fall has settled, too: nothing is learned of it. One that is late has paused."""
    lines = [f"{at} trainer llm step={at}" + " paused=true" * (at_s is not None and at >= at_s) for at in (35, 45, 60)]
    load = "36..{} utility load=75 charge=100 runtime=360"
    story = [lines[0], load.format(44), lines[1], load.format(59).replace("36", "46"), lines[2]]
    begin = "16 drill scope=pause\n17..34 utility load=75 charge=100 runtime=360"
    outcome = played("\n".join((begin, *story, "61..90 utility load=75 charge=100 runtime=360")))
    assert report(outcome).result == result
    assert ("llm: has not paused" in report(outcome).because) is (at_s is None)
    assert bool(outcome.state.learned.pauses) is (at_s is not None)
    assert outcome.ordered(ResumeTrainer)


def test_a_pulled_plug_measures_the_battery() -> None:
    """Deep enough: the health that this discharge has shown is in the report."""
    deep = "17 utility load=75 charge=100 runtime=360\n18..117 battery load=75 charge=100-0.4 runtime=350-1.9\n"
    outcome = played(f"16 drill witness=plug\n{deep}118..140 utility load=75 charge=60 runtime=160")
    figures = dict(report(outcome).figures)
    assert report(outcome).result == "passed"
    assert (figures["health_before"], figures["load_before"], figures["charge_before_pct"]) == (0.75, 0.75, 99.6)
    assert (figures["charge_after_pct"], figures["outage_s"]) == (60.0, 109.0)
    assert figures["health"] == figures["health_measured"]
    assert figures["health_learned"] is True
    measured, error = figures["health_measured"], figures["health_error"]
    assert isinstance(measured, float)
    assert isinstance(error, float)
    assert 0.4 < measured < 0.9
    assert 0.0 < error < 0.3
    assert figures["checkpoint_s.llm"] == 0.1
