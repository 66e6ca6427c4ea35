"""What a drill orders, what it makes of each outcome, and the words in which it tells a failure."""

from dataclasses import replace

import pytest

from powerguard.core.decide.turn import Turn
from powerguard.core.drill import measures as drill_turn
from powerguard.core.model.actions import (
    CapPower,
    Conduct,
    EnsurePolicy,
    Level,
    Note,
    PauseTrainer,
    ResumeTrainer,
    Scalar,
    SyncFilesystems,
    TriggerCheckpoint,
)
from powerguard.core.model.events import Done, OutputSource, Reading, StartDrill, StopDrill, TrainerSeen
from powerguard.core.model.policy import DrillReport
from powerguard.core.model.state import (
    Activity,
    Drill,
    DrillStage,
    Resume,
    State,
    Trainer,
    Undoing,
)
from tests.core.play import Player, StoryResult, make_policy

WORDS = "table=50:540,75:360,100:240 trainer=llm:pause:20 rating_w=4000"
FULL = "utility load=75 charge=100 runtime=360"
READY = f"0..14 {FULL}\n15 trainer llm durable_age_s=60"
ANSWERS = "auto policy sync poweroff resume trainer_resume pause cap restore checkpoint=5"
ID = "boot-one-drill-160"


def played(story: str, words: str = WORDS, answers: str = ANSWERS, player: Player | None = None) -> StoryResult:
    return (player or Player()).play(f"policy {words}\n{answers}\n{READY}\n{story}")


def report(result: StoryResult) -> DrillReport:
    found = result.state.learned.drill
    assert found is not None
    return found


def figures(result: StoryResult) -> dict[str, Scalar]:
    return dict(report(result).figures)


def note(result: StoryResult, event: str) -> Note:
    """The newest one of its kind."""
    return next(each for each in reversed(result.notes) if each.event == event)


def answered(player: Player, kind: type, at_s: float, took_s: float = 0.1, **detail: Scalar) -> StoryResult:
    """Give the open order of this kind a good outcome with exactly this detail."""
    action = next(action for _, action in player.open if isinstance(action, kind))
    player.open = [(at, other) for at, other in player.open if other.id != action.id]
    player.send(Done(at_s=at_s, action=action, took_s=took_s, detail=tuple(detail.items())))
    assert player.result is not None
    return player.result


# --- The story in notes -----------------------------------------------------------------------------------------------


def test_the_journal_has_who_began_what_and_how_long_each_stage_may_take() -> None:
    result = played("16 drill scope=checkpoint,policy", answers="auto", words=f"{WORDS} bmc_limit_s=5.12345")
    assert note(result, "drill_began").because == "alice"
    assert note(result, "drill_began").numbers == (
        ("drill", ID),
        ("scopes", "checkpoint,policy"),
        ("witness", "simulated"),
    )
    assert note(result, "drill_stage").because == "checkpoint"
    assert note(result, "drill_stage").numbers == (("drill", ID), ("limit_s", 80.0))
    result = played("16 drill scope=policy", answers="auto", words=f"{WORDS} bmc_limit_s=5.12345")
    assert note(result, "drill_stage").numbers == (("drill", ID), ("limit_s", 5.123))


def test_before_a_cap_slow_training_is_watched_for_eight_steps() -> None:
    """Of 10 s each, and ten more: in half a minute nobody could tell its speed."""
    player = Player()
    played("16 utility load=75 charge=100", f"{WORDS} cap_share=0.7", "auto", player=player)
    player.send(TrainerSeen(at_s=16.1, trainer="llm", alive=True, conduct=Conduct.PAUSE, step=7, step_s=10.0))
    result = player.play("16.5 drill scope=cap")
    assert dict(note(result, "drill_stage").numbers)["limit_s"] == 90.0


def test_a_refusal_is_journalled_with_who_asked_for_what() -> None:
    result = played("16 drill scope=pause,cap,lunch")
    refused = note(result, "drill_refused")
    assert refused.level is Level.WARNING
    assert refused.numbers == (("who", "alice"), ("scopes", "pause,cap,lunch"))
    assert result.state.drill is None


def test_a_drill_in_the_first_tenth_of_a_second_has_an_id_too() -> None:
    """Its number is the time in tenths; the boot's first eight letters come before it."""
    assert played("16 drill scope=policy", words=f"{WORDS} boot_id=0123456789", answers="auto").state.drill is not None
    result = played("16 drill scope=policy", words=f"{WORDS} boot_id=0123456789", answers="auto")
    assert note(result, "drill_began").numbers[0] == ("drill", "01234567-drill-160")


def test_a_recording_of_the_power_off_reports_its_figures_and_is_no_alarm() -> None:
    words = f"{WORDS} stop_q95_s=90.12345 reserve_s=60"
    result = played("16 drill scope=full\n17..31 utility load=75\n32..60 utility load=40", words)
    rehearsed = note(result, "power_off_rehearsed")
    assert (rehearsed.because, rehearsed.level) == ("a drill does not order a power-off", Level.INFO)
    numbers = dict(rehearsed.numbers)
    assert (numbers["stop_s"], numbers["power_off_force_after_s"]) == (150.123, 90.123)
    assert numbers.items() <= figures(result).items()


def test_a_stop_names_by_whom_and_why() -> None:
    player = Player()
    played("16 drill scope=pause\n17 utility load=75", player=player)
    player.send(StopDrill(at_s=18.0, who="bob", reason="visitors"))
    assert player.result is not None
    assert report(player.result).because == "stopped by bob: visitors"
    assert report(played("16 drill scope=pause\n17 drill_stop")).because == "stopped by alice"


# --- Outcomes ---------------------------------------------------------------------------------------------------------


def test_a_policy_that_reads_back_otherwise_fails_the_drill_at_its_end() -> None:
    """The BMC took the order and says something else: after an outage the host would stay off."""
    for detail, said in (({"policy": "always-off", "verified": False}, "always-off"), ({"verified": False}, "unknown")):
        player = Player()
        played("16 drill scope=policy", answers="auto", player=player)
        outcome = answered(player, EnsurePolicy, 16.5, **detail)  # type: ignore[arg-type]
        assert report(outcome).result == "failed"
        assert report(outcome).because == f"policy: read back as {said}: the host may stay off"
        assert figures(outcome)["policy_verified"] is False


def test_a_policy_is_rehearsed_in_no_outages_name() -> None:
    """With bmc.policy: bracket it is set for an outage and put back after it; a drill puts nothing back."""
    player = Player()
    played("16 drill scope=policy", answers="auto", player=player)
    (asked,) = [action for _, action in player.open if isinstance(action, EnsurePolicy)]
    assert asked.outage == ""


def test_in_dry_run_an_unread_policy_is_no_failure() -> None:
    player = Player()
    played("16 drill scope=policy", words=f"{WORDS} mode=dry-run", answers="auto", player=player)
    outcome = answered(player, EnsurePolicy, 16.5, dry_run=True)
    assert report(outcome).result == "recorded"
    assert note(outcome, "drill_ended").level is Level.INFO


def test_in_dry_run_what_was_seen_is_reported_and_nothing_else() -> None:
    """The BMC is really read; the checkpoint is not made, so it took no time that could be told."""
    player = Player()
    words = f"{WORDS} mode=dry-run"
    played("16 drill scope=full\n17..27 utility load=75", words=words, answers="auto", player=player)
    for _ in range(9):
        kinds = [type(action) for _, action in player.open]
        for kind in kinds:
            if kind is EnsurePolicy:
                outcome = player.play("28 failed policy always-off")
            else:
                outcome = answered(player, kind, 28.0, took_s=0.0, dry_run=True)
    outcome = player.play("29..40 utility load=75")
    assert report(outcome).result == "recorded"
    assert report(outcome).because.endswith("; seen: policy: always-off")
    assert not [name for name in figures(outcome) if name.startswith(("checkpoint_s", "checkpoint_verified", "sync_s"))]


def test_policy_and_sync_are_both_tried_and_both_reported() -> None:
    """Neither hides the other: the drill goes on to its end, and then names both."""
    player = Player()
    played("16 drill scope=full\n17..27 utility load=75", answers="auto checkpoint=5 trainer_resume", player=player)
    outcome = player.play("28..45 utility load=40\n46 failed policy no answer\n47 failed sync disk gone")
    assert (report(outcome).result, report(outcome).because) == ("failed", "policy: no answer; sync: disk gone")
    assert "fits" in figures(outcome), "the power-off was recorded all the same"


def test_a_policy_order_without_outcome_is_given_up_and_reported() -> None:
    found = played("16 drill scope=policy\n17..40 utility load=75", answers="auto")
    assert (report(found).result, report(found).because) == ("failed", "policy: no outcome")
    assert report(found).lasted_s == 11.0, "5 s for the order, 5 s of grace"


def test_orders_that_are_lost_together_are_reported_together() -> None:
    """Two trainers that never answer: neither hides the other."""
    words = f"{WORDS} trainer=vit:pause:20"
    story = f"{READY}\n15 trainer vit durable_age_s=60\n16 drill scope=checkpoint\n17..110 utility load=75 charge=100"
    result = Player().play(f"policy {words}\nauto\n{story}")
    assert report(result).because == "checkpoint: no outcome; checkpoint: no outcome"


def test_the_times_of_orders_are_reported_in_milliseconds() -> None:
    player = Player()
    played("16.1234 drill scope=full\n17..27 utility load=75", answers="auto trainer_resume", player=player)
    answered(player, TriggerCheckpoint, 27.5678, took_s=5.1236, verified=True, paused=True)
    player.play("28..41 utility load=40")
    answered(player, EnsurePolicy, 41.2, policy="always-on", verified=True)
    result = answered(player, SyncFilesystems, 42.0, took_s=0.12345)
    assert figures(result)["sync_s"] == 0.123
    assert (figures(result)["checkpoint_s.llm"], figures(result)["checkpoint_s"]) == (5.124, 0.568)
    assert report(result).lasted_s == 25.877


def test_the_checkpoint_behind_a_pulled_plug_is_timed_too() -> None:
    """The real rules order it; the drill only writes down how long it took."""
    player = Player()
    played(
        "16 drill witness=plug\n17 utility load=75\n18..105 battery load=75 charge=99", answers="auto", player=player
    )
    result = answered(player, TriggerCheckpoint, 105.5, took_s=5.1236, verified=True, paused=True)
    assert result.state.drill is not None
    assert dict(result.state.drill.figures)["checkpoint_s.llm"] == 5.124


def test_the_first_checkpoint_that_is_refused_ends_the_drill() -> None:
    """A disk that is full for one is no place to go on for the other."""
    words = f"{WORDS} trainer=vit:pause:20"
    player = Player()
    player.play(
        f"policy {words}\nauto trainer_resume\n{READY}\n15 trainer vit durable_age_s=60\n16 drill scope=checkpoint"
    )
    outcome = player.play("17 failed llm full\n18 failed vit full\n19..40 utility load=75")
    assert report(outcome).because == "checkpoint: llm: full"
    assert report(outcome).result == "failed"


def test_a_cap_that_fails_fails_the_drill_and_a_restore_that_fails_is_tried_again() -> None:
    words = f"{WORDS} cap_share=0.7"
    player = Player()
    outcome = played("16 drill scope=cap\n17..27 utility load=75", words, "auto", player=player)
    (order,) = outcome.ordered(CapPower)
    assert isinstance(order, CapPower)
    assert order.share == 0.7
    outcome = player.play("28 failed cap no helper\n29 done restore")
    assert (report(outcome).result, report(outcome).because) == ("failed", "cap: no helper")


def test_limits_that_come_back_at_the_second_try_are_no_failure() -> None:
    words = f"{WORDS} cap_share=0.7"
    story = "16 drill scope=cap\n17..27 utility load=75\n28..40 utility load=50\n40.5 failed restore busy"
    player = Player()
    outcome = played(story, words, "auto cap", player=player)
    assert outcome.state.drill is not None
    assert outcome.state.drill.stage == "restore"
    outcome = player.play("41..52 utility load=50\n52.5 done restore\n53 utility load=75")
    assert report(outcome).result == "passed"


def test_limits_that_do_not_come_back_fail_the_drill_after_half_a_minute() -> None:
    words = f"{WORDS} cap_share=0.7"
    outcome = played("16 drill scope=cap\n17..27 utility load=75\n28..110 utility load=50", words, "auto cap")
    assert outcome.state.drill is not None
    assert outcome.state.drill.part == Undoing(
        at_s=outcome.state.drill.part.at_s, result="failed", because="the GPU power limits could not be restored"
    )


def test_a_resume_that_was_lost_fails_the_drill_only_after_its_time() -> None:
    """15 s for the order and its grace, 30 s for the stage: a trainer may have gone on without saying so."""
    story = "16 drill scope=pause\n17..27 utility load=75\n28..67 utility load=40\n68..70 utility load=75"
    result = played(story, answers="auto pause")
    ended = note(result, "drill_undoing")
    assert ended.because == "llm did not continue after the pause"
    assert dict(ended.numbers)["open"] == 0


# --- Whom it marks, and when it is unsafe -----------------------------------------------------------------------------


def test_only_the_trainer_that_is_paused_counts_as_asked_to_pause() -> None:
    """The other one goes on in an outage, and in the drill."""
    words = f"{WORDS} trainer=vit:continue:20"
    result = Player().play(
        f"policy {words}\nauto\n{READY}\n15 trainer vit conduct=continue durable_age_s=60\n"
        "16 drill scope=checkpoint,pause\n17..27 utility load=75"
    )
    assert {trainer.name: trainer.pause_ordered for trainer in result.state.trainers} == {"llm": True, "vit": False}
    orders = {order.trainer: order for order in result.actions if isinstance(order, TriggerCheckpoint)}
    assert (orders["llm"].after, orders["vit"].after) == (Conduct.PAUSE, Conduct.CONTINUE)
    assert {order.reason for order in orders.values()} == {"drill"}
    assert (orders["llm"].lease_s, orders["vit"].lease_s) == (60.0, None), "should the daemon die, training goes on"


def test_a_trainer_that_nobody_knows_is_not_found_and_none_is_marked_for_it() -> None:
    turn = Turn(make_policy(WORDS.split()), State(trainers=(Trainer(name="a"), Trainer(name="b"))), 1.0)
    assert turn.state.trainer("c") is None
    drill_turn.mark(turn, "a", lambda t: t.found(paused=True))
    assert [trainer.paused for trainer in turn.state.trainers] == [True, False]


def test_a_checkpoint_of_the_drill_takes_no_time_from_an_older_one() -> None:
    """Its expected end is unknown until the trainer tells it."""
    result = played(
        "15.5 checkpoint_now\n15.6 progress llm eta=500\n15.8 durable llm\n16 drill scope=checkpoint", answers="auto"
    )
    (trainer,) = result.state.trainers
    assert trainer.in_flight is not None
    assert (trainer.in_flight.eta_at_s, trainer.in_flight.copied) == (None, False)


@pytest.mark.parametrize(
    ("story", "because"),
    [
        ("18..19 unknown load=75", "it is unknown whether utility is there"),
        ("18 lost", "the UPS no longer answers"),
        ("18..19 battery load=75 testing input_present=true", "the UPS began to test its battery"),
    ],
)
def test_a_drill_that_has_become_unsafe_says_why(story: str, because: str) -> None:
    outcome = played(f"16 drill scope=pause\n17 utility load=75\n{story}", answers="auto")
    assert (report(outcome).result, report(outcome).because) == ("interrupted", because)


@pytest.mark.parametrize("stage", ["checkpoint", "pause", "resume"])
def test_a_trainer_that_dies_while_the_drill_holds_it_is_named(stage: str) -> None:
    words = f"{WORDS} trainer=vit:pause:20"
    player = Player()
    answers = {"checkpoint": "auto", "pause": "auto checkpoint=0.1", "resume": "auto checkpoint=0.1"}[stage]
    player.play(
        f"policy {words}\n{answers}\n{READY}\n15 trainer vit durable_age_s=60\n"
        "16 drill scope=checkpoint,pause\n17..28 utility load=75"
    )
    result = player.play("29..42 utility load=40" if stage == "resume" else "29 utility load=75")
    assert result.state.drill is not None
    assert result.state.drill.stage == stage
    player.line("42.5 trainer vit alive=false")
    result = player.play("42.6 trainer llm")
    assert result.state.drill is not None
    assert isinstance(result.state.drill.part, Undoing)
    assert result.state.drill.part.because == "vit: died while the drill held it"


def test_all_who_died_at_once_are_named() -> None:
    """One look finds both: the restart of the daemon has heard of neither."""
    words = f"{WORDS} trainer=vit:pause:20"
    player = Player()
    player.play(
        f"policy {words}\nauto\n{READY}\n15 trainer vit durable_age_s=60\n16 drill scope=pause\n17..28 utility load=75"
    )
    assert player.result is not None
    dead = tuple(replace(trainer, activity=Activity.GONE) for trainer in player.result.state.trainers)
    player.result.state = replace(player.result.state, trainers=dead)
    result = player.play("29 tick")
    assert result.state.drill is not None
    assert isinstance(result.state.drill.part, Undoing)
    assert result.state.drill.part.because == "llm, vit: died while the drill held it"


def test_a_reading_that_the_core_did_not_take_is_no_load() -> None:
    """Of another UPS, for example: its load says nothing of this host."""
    player = Player()
    result = played("16 drill scope=pause", answers="auto", player=player)
    other = Reading(at_s=16.5, ups="other", source="snmp", output_source=OutputSource.UTILITY, load_pct=10.0)
    player.send(other)
    assert result.state.drill is not None
    assert isinstance(result.state.drill.part, DrillStage)
    assert result.state.drill.part.samples == ()


# --- Late outcomes ----------------------------------------------------------------------------------------------------


def test_a_pause_that_lands_in_the_undo_is_undone_once_more() -> None:
    """Stopped while the pause was on its way: whatever came of it, the trainer is told again that it may go on."""
    player = Player()
    played(
        "16 drill scope=pause\n17..27 utility load=75\n28 drill_stop\n28.1 done trainer_resume",
        answers="auto",
        player=player,
    )
    before = len(player.result.ordered(ResumeTrainer)) if player.result else 0
    outcome = answered(player, PauseTrainer, 28.5, paused=True)
    assert len(outcome.ordered(ResumeTrainer)) == before + 1
    assert outcome.state.drill is not None
    assert outcome.state.drill.paused == ("llm",)
    outcome = player.play("28.6 done trainer_resume\n29 utility load=75")
    assert outcome.state.drill is None
    assert report(outcome).result == "interrupted"


def test_a_pause_that_lands_on_a_trainer_that_was_lost_for_a_moment_is_owed_its_end() -> None:
    """It was given up as dead, and is there again: the drill does not end before it has heard that it may go on."""
    player = Player()
    story = (
        "16 drill scope=pause\n17..27 utility load=75\n28 drill_stop\n28.2 trainer llm alive=false\n28.4 trainer llm"
    )
    result = played(story, answers="auto", player=player)
    assert result.state.drill is not None
    assert result.state.drill.paused == ()
    result = answered(player, PauseTrainer, 28.5, paused=True)
    assert result.state.drill is not None
    assert result.state.drill.paused == ("llm",)


@pytest.mark.parametrize(
    ("reason", "after", "told_again"),
    [
        ("drill", Conduct.PAUSE, True),
        ("drill", Conduct.CONTINUE, False),
        ("outage", Conduct.PAUSE, False),
    ],
)
def test_a_checkpoint_of_an_old_drill_that_pauses_late_is_undone(
    reason: str, after: Conduct, *, told_again: bool
) -> None:
    """Nobody waits for it any more; the standing duty lets the trainer go on."""
    player = Player()
    played("16 utility load=75", answers="auto", player=player)
    late = TriggerCheckpoint(id="late", by_s=20.0, trainer="llm", reason=reason, after=after, outage="o")
    player.send(Done(at_s=17.0, action=late, took_s=9.0, detail=(("paused", True),)))
    assert player.result is not None
    assert bool(player.result.ordered(ResumeTrainer)) is told_again


def test_in_a_drill_a_stranger_s_pause_is_left_to_the_drill() -> None:
    """It holds the trainer itself; its own end lets it go on."""
    player = Player()
    played("16 drill scope=pause\n17..28 utility load=75", answers="auto", player=player)
    late = PauseTrainer(id="late", by_s=20.0, trainer="llm", outage="o")
    player.send(Done(at_s=28.5, action=late, took_s=9.0, detail=(("paused", True),)))
    assert player.result is not None
    assert not player.result.ordered(ResumeTrainer)
    assert not player.result.state.owing(Resume)


def test_a_drill_at_no_load_records_its_power_off_all_the_same() -> None:
    """Only the policy was rehearsed: there is no baseline, and the load of now counts."""
    outcome = played("15 trainer llm conduct=continue durable_age_s=9\n16 drill scope=full\n17..40 utility load=75")
    assert report(outcome).result == "passed"
    assert figures(outcome)["runtime_paused_s"] == 216.0


def test_the_start_of_a_drill_is_at_no_stage_yet() -> None:
    """While one reading says battery nothing is ordered, and the state says so."""
    player = Player()
    played("16 utility load=75", answers="auto", player=player)
    assert player.result is not None
    player.send(StartDrill(at_s=16.0, who="alice", scopes=("policy",), witness="simulated"))
    drill = player.result.state.drill
    assert drill is not None
    assert drill.part == DrillStage(name="policy", at_s=16.0, by_s=21.0)
    assert isinstance(drill, Drill)
