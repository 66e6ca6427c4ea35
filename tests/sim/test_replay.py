"""A recording through today's decisions: every file in tests/replays comes out as it is written beside it.

`pytest tests/sim/test_replay.py --rewrite-scenarios` writes the answers anew; read the diff before you commit it.
"""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from powerguard.cli.main import main
from powerguard.core.model.actions import Conduct, EnsurePolicy, PowerOff, TriggerCheckpoint
from powerguard.core.model.events import CheckpointNow, Done, Failed, OutputSource, Reading, SourceFailed, TrainerSeen
from powerguard.core.model.policy import Mode, Policy, TrainerPolicy
from powerguard.daemon.loop import TICK_OUTAGE_S
from powerguard.sim.replay.play import DaemonRun, Mark, RecordedOrder, Recording, Replayed, compare, replay, with_losses

FOLDER = Path(__file__).parent.parent / "replays"
OPTIONS = {
    "held-in-place.csv": "--table 50:1620,75:1080,100:720 --trainer llm:pause:20",
    "killed-and-powered-off.jsonl": "--diff",
}
"""Beside the file's name; without an entry: none."""
RECORDINGS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".csv", ".jsonl"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_replay(
    path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    code = main(["replay", path.name, *shlex.split(OPTIONS.get(path.name, ""))])
    captured = capsys.readouterr()
    assert captured.err == ""
    text = "\n".join(line.rstrip() for line in captured.out.splitlines()) + f"\nexit {code}\n"
    expected = path.with_name(path.name + ".txt")
    if request.config.getoption("--rewrite-scenarios"):
        expected.write_text(text, encoding="utf-8")
        return
    assert text == expected.read_text(encoding="utf-8")


def test_there_are_recordings() -> None:
    """An empty folder would pass the test above; an answer without a recording would be read by nobody."""
    assert {path.suffix for path in RECORDINGS} == {".csv", ".jsonl"}
    assert [path.name for path in FOLDER.glob("*.txt") if path.with_suffix("") not in RECORDINGS] == []
    assert [name for name in OPTIONS if FOLDER / name not in RECORDINGS] == []


# --- The world around step --------------------------------------------------------------------------------------------

TABLE = ((0.50, 540.0), (0.75, 360.0), (1.00, 240.0))
POLICY = Policy(
    boot_id="replay", ups="ups", runtime_table=TABLE, trainers=(TrainerPolicy(name="llm", checkpoint_s=20.0),)
)


def reading(at_s: float, source: str = "battery", **fields: object) -> Reading:
    result = Reading(
        at_s=at_s,
        ups="ups",
        source="snmp",
        output_source=OutputSource(source),
        runtime_s=max(0.0, 360.0 - 0.9 * at_s),
        charge_pct=max(0.0, 100.0 - 0.25 * at_s),
        load_pct=75.0,
    )
    return dataclasses.replace(result, **fields)  # type: ignore[arg-type]


def outage(until_s: float, *, every_s: float = 1.0, back_s: float = 1e9) -> tuple[Reading, ...]:
    """Utility for 5 s, then battery until `back_s`."""
    count = int(until_s / every_s) + 1
    return tuple(reading(n * every_s, "battery" if 5.0 < n * every_s < back_s else "utility") for n in range(count))


def recording(*events: object, policy: Policy = POLICY, **fields: object) -> Recording:
    leg = DaemonRun(at_s=events[0].at_s, policy=policy, events=events)  # type: ignore[attr-defined, arg-type]
    return Recording(name="r", legs=(leg,), **fields)  # type: ignore[arg-type]


def phases(replayed: Replayed) -> list[tuple[str, float]]:
    return [(mark.what, round(mark.t_s, 1)) for mark in replayed.marks if mark.kind == "phase"]


def orders(replayed: Replayed) -> list[tuple[str, float]]:
    return [(mark.what, round(mark.t_s, 1)) for mark in replayed.marks if mark.kind == "order"]


def test_an_obedient_world_answers_everything() -> None:
    """Checkpoint after the trainer's seconds, policy verified, power-off accepted: the outage runs its course."""
    replayed = replay(recording(*outage(400.0)))
    assert [name for name, _ in phases(replayed)] == ["on_battery", "emergency_checkpoint", "holding", "shutdown"]
    at_s = dict(phases(replayed))
    assert at_s["holding"] - at_s["emergency_checkpoint"] == pytest.approx(20.0, abs=0.3)
    notes = {line.note.event for line in replayed.lines if line.note is not None}
    assert {"policy_verified", "checkpoint_durable", "power_off_accepted"} <= notes
    assert replayed.phase == "shutdown"
    assert replayed.ended_s < 400.0, "the host is off, whatever the recording goes on to say"
    assert replay(recording(*outage(400.0))) == replayed, "the same recording, the same answer"


def test_a_checkpoint_that_has_no_time_fails() -> None:
    """Nobody is more obedient than the time that the order leaves."""
    trainer = TrainerPolicy(name="llm", checkpoint_s=900.0, max_checkpoint_s=900.0)
    slow = dataclasses.replace(POLICY, trainers=(trainer,))
    utility = (reading(float(n), "utility") for n in range(700))
    events = sorted((*utility, CheckpointNow(at_s=3.5, who="alice")), key=lambda event: event.at_s)
    replayed = replay(recording(*events, policy=slow))
    failed = [line for line in replayed.lines if line.note is not None and line.note.event == "action_failed"]
    assert [(line.t_s, line.note and line.note.because) for line in failed] == [(603.5, "timed out after 600.0 s")]


def test_what_the_recording_knows_is_answered_so() -> None:
    """The first checkpoint failed after 7 s; the second is not known, so it is obeyed. The BMC refused."""
    order = TriggerCheckpoint(id="x-1", by_s=200.0, trainer="llm", reason="on_battery", after=Conduct.PAUSE, outage="o")
    ask = EnsurePolicy(id="x-2", by_s=20.0, outage="o")
    deeds = (
        RecordedOrder(action=order, at_s=84.0, outcome=Failed(at_s=91.0, action=order, took_s=7.0, reason="disk full")),
        RecordedOrder(action=ask, at_s=14.0, outcome=Failed(at_s=15.0, action=ask, took_s=1.0, reason="no answer")),
    )
    replayed = replay(recording(*outage(180.0), deeds=deeds))
    because = [line.note.because for line in replayed.lines if line.note and line.note.event == "action_failed"]
    assert because == ["no answer", "disk full"]
    checkpoints = [at_s for name, at_s in orders(replayed) if name == "TriggerCheckpoint"]
    assert checkpoints[1] - checkpoints[0] == pytest.approx(7.0, abs=0.3)
    assert "holding" in dict(phases(replayed))
    obedient = replay(recording(*outage(180.0), deeds=deeds), obedient=True)
    assert [line for line in obedient.lines if line.note and line.note.event == "action_failed"] == []


def test_a_trainer_stands_as_the_replay_has_it() -> None:
    """The recording says that it trains; here it has been told to pause, and did."""
    seen = [
        TrainerSeen(at_s=at_s + 0.5, trainer="llm", alive=True, conduct=Conduct.PAUSE, checkpoint_s=20.0)
        for at_s in range(100, 110)
    ]
    events = sorted((*outage(130.0, back_s=112.0), *seen), key=lambda event: event.at_s)
    replayed = replay(recording(*events))
    assert orders(replayed)[-1][0] == "ResumeTrainer"
    assert replayed.phase == "online"


def test_polls_between_coarse_readings_are_answered_by_what_lies_between() -> None:
    """A reading in ten seconds: the second look at battery, and at the commit, would otherwise never come."""
    policy = dataclasses.replace(POLICY, stale_s=30.0)
    replayed = replay(recording(*outage(400.0, every_s=10.0), policy=policy))
    assert replayed.repeated >= 2
    assert dict(phases(replayed))["on_battery"] == pytest.approx(10.2, abs=0.1)
    assert replayed.phase == "shutdown"
    edge = replay(recording(reading(0.0, "utility"), reading(10.0), reading(20.0, "utility"), policy=policy))
    assert (edge.repeated, phases(edge)) == (0, []), "between battery and utility lies neither"


def test_silence_is_a_lost_source() -> None:
    """A gap of more than three polls: told at the time at which the daemon would have found out."""
    events = with_losses((*outage(20.0), reading(60.0)), ups="ups", every_s=1.0)
    (lost,) = (event for event in events if isinstance(event, SourceFailed))
    assert (lost.at_s, lost.lost, lost.reason) == (23.0, True, "the recording has no reading for 40 s")
    assert with_losses(outage(20.0), ups="ups", every_s=1.0) == outage(20.0)
    assert with_losses(outage(90.0, every_s=30.0), ups="ups", every_s=30.0) == outage(90.0, every_s=30.0)


def test_a_week_of_silence_ends() -> None:
    """Dead reckoning goes on in larger steps where nobody says anything."""
    events = with_losses((*outage(4.0), reading(604_000.0, "utility")), ups="ups", every_s=1.0)
    replayed = replay(recording(*events))
    assert replayed.phase == "online"
    assert replayed.ended_s == 604_000.0


def test_the_end_of_a_recording_is_no_end_of_the_outage() -> None:
    """It ends in a hold: what would have come next is told from the same sums."""
    replayed = replay(recording(*outage(110.0)))
    assert replayed.phase == "holding"
    assert [step.action for step in replayed.forecast] == ["shutdown"]
    at_s = replayed.forecast[0].at_s
    assert at_s is not None
    assert 110.0 < at_s < 400.0


def test_a_recording_that_ends_in_the_power_off_says_that_the_end_is_not_known() -> None:
    """Whether the battery lasted until the deadline is not in it: nobody must read "power-off" as saved."""
    whole = replay(recording(*outage(500.0)))
    (off,) = (line for line in whole.lines if isinstance(line.action, PowerOff))
    assert isinstance(off.action, PowerOff)
    assert (whole.phase, whole.before_deadline_s, whole.remarks) == ("shutdown", None, ())
    end_s = float(int(off.t_s + 0.6 * off.action.force_after_s))
    replayed = replay(recording(*outage(end_s)))
    assert replayed.before_deadline_s == pytest.approx(off.t_s + off.action.force_after_s - end_s, abs=1.0)
    (remark,) = replayed.remarks
    assert remark.startswith(f"the recording ends {replayed.before_deadline_s:.0f} s before the power-off's deadline: ")
    dry = replay(recording(*outage(end_s), policy=dataclasses.replace(POLICY, mode=Mode.DRY_RUN)))
    assert (dry.before_deadline_s, dry.remarks) == (None, ())


def test_a_poll_is_answered_by_the_source_that_reports_next() -> None:
    """Of two sources each is asked for what it told itself, not for what they say together."""
    rows = [reading(at_s, "utility" if at_s < 30.0 else "battery") for at_s in range(0, 400, 10)]
    other = [dataclasses.replace(row, at_s=row.at_s + 5.0, source="nut", charge_pct=85.0) for row in rows]
    events = sorted((*rows, *other), key=lambda event: event.at_s)
    policy = dataclasses.replace(POLICY, sources=2, stale_s=30.0)
    replayed = replay(recording(*events, policy=policy))
    assert replayed.repeated == 1
    assert phases(replayed)[-1] == ("shutdown", 108.2), "the poll between two rows decides"


def test_a_boot_that_today_would_not_have_come_to() -> None:
    """The host was powered off then; with more battery it would not have been: the replay ends there, and says so."""
    large = dataclasses.replace(POLICY, runtime_table=((0.5, 5400.0), (1.0, 2400.0)))
    events = tuple(dataclasses.replace(event, runtime_s=None) for event in outage(100.0))
    first = DaemonRun(at_s=0.0, policy=large, events=events)
    second = DaemonRun(at_s=30.0, policy=dataclasses.replace(large, boot_id="next"), shift_s=700.0, events=outage(50.0))
    replayed = replay(Recording(name="r", legs=(first, second)))
    assert (replayed.phase, replayed.ended_s) == ("on_battery", 100.0)
    assert replayed.remarks == (
        "the host was off then; today's decisions had not powered it off when the recording ends",
    )


def test_another_boot_is_a_return() -> None:
    first = DaemonRun(at_s=0.0, policy=POLICY, events=outage(400.0))
    back = tuple(reading(at_s, "utility", charge_pct=95.0) for at_s in range(30, 60))
    policy = dataclasses.replace(POLICY, boot_id="next")
    trains = TrainerSeen(at_s=59.5, trainer="llm", alive=True, step=7)
    second = DaemonRun(at_s=30.0, policy=policy, shift_s=1000.0, events=(*back, trains))
    replayed = replay(Recording(name="r", legs=(first, second)))
    assert replayed.phase == "online"
    returned = [line for line in replayed.lines if line.note is not None and line.note.event == "host_returned"]
    assert [line.t_s for line in returned] == [1030.0]
    assert [name for name, _ in orders(replayed)][-1] == "ResumeTraining"


def test_a_life_that_ended_at_its_commit_is_not_followed_into_the_next() -> None:
    """The daemon was killed as it latched, and started again seconds later: only then was the power-off ordered."""
    whole = replay(recording(*outage(400.0)))
    latched_s = next(mark.t_s for mark in whole.marks if mark.what == "shutdown")
    (off,) = (line.t_s for line in whole.lines if isinstance(line.action, PowerOff))
    first = DaemonRun(at_s=0.0, policy=POLICY, events=outage(latched_s), end_s=latched_s)
    back_s = latched_s + 5.0
    rows = tuple(event for event in outage(400.0) if event.at_s >= back_s)
    second = DaemonRun(at_s=back_s, policy=POLICY, events=rows)
    replayed = replay(Recording(name="r", legs=(first, second)))
    (again,) = (line.t_s for line in replayed.lines if isinstance(line.action, PowerOff))
    assert off < back_s <= again
    assert [line.t_s for line in replayed.lines if line.note and line.note.event == "outage_continued"] == [back_s]
    times = [line.t_s for line in replayed.lines]
    assert times == sorted(times)
    alone = replay(Recording(name="r", legs=(first,)))
    assert [line.t_s for line in alone.lines if isinstance(line.action, PowerOff)] == [off], "nobody else goes on"


@pytest.mark.parametrize(("gap_s", "followed"), [(600.0, True), (0.2, False)])
def test_a_power_off_is_followed_no_further_than_to_the_next_boot(gap_s: float, *, followed: bool) -> None:
    whole = replay(recording(*outage(400.0)))
    latched_s = next(mark.t_s for mark in whole.marks if mark.what == "shutdown")
    first = DaemonRun(at_s=0.0, policy=POLICY, events=outage(latched_s), end_s=latched_s)
    back = tuple(reading(at_s, "utility", charge_pct=95.0) for at_s in range(30, 40))
    policy = dataclasses.replace(POLICY, boot_id="next")
    second = DaemonRun(at_s=30.0, policy=policy, shift_s=latched_s + gap_s - 30.0, events=back)
    replayed = replay(Recording(name="r", legs=(first, second)))
    returned_s = next(line.t_s for line in replayed.lines if line.note and line.note.event == "host_returned")
    off = [line.t_s for line in replayed.lines if isinstance(line.action, PowerOff)]
    assert returned_s == pytest.approx(latched_s + gap_s)
    assert bool(off) == followed
    assert all(at_s < returned_s for at_s in off)


# --- Side by side -----------------------------------------------------------------------------------------------------


def test_what_was_done_is_set_against_what_would_be() -> None:
    """Each order is compared with its like: the second checkpoint with the second."""
    replayed = replay(recording(*outage(400.0)))
    same = dataclasses.replace(replayed, recording=dataclasses.replace(replayed.recording, marks=replayed.marks))
    assert {each.verdict for each in compare(same)} == {"same"}
    changed = [mark for mark in replayed.marks if mark.what != "SyncFilesystems"]
    changed = [
        dataclasses.replace(mark, t_s=mark.t_s + {"holding": 5.0, "shutdown": -8.0}.get(mark.what, 0.9))
        for mark in changed
    ]
    changed.append(Mark(t_s=300.0, kind="order", what="ResumeTrainer", whom="llm"))
    other = dataclasses.replace(replayed, recording=dataclasses.replace(replayed.recording, marks=tuple(changed)))
    diff = {(each.was or each.now).what: each for each in compare(other) if each.verdict != "same"}  # type: ignore[union-attr]
    assert {name: each.verdict for name, each in diff.items()} == {
        "holding": "earlier",
        "shutdown": "later",
        "SyncFilesystems": "new",
        "ResumeTrainer": "not done",
    }
    assert (diff["holding"].by_s, diff["shutdown"].by_s) == (pytest.approx(-5.0), pytest.approx(8.0))
    assert (diff["SyncFilesystems"].by_s, diff["ResumeTrainer"].by_s) == (None, None)
    assert {each.verdict for each in compare(other, tolerance_s=0.5)} >= {"earlier"}
    times = [(each.was or each.now).t_s for each in compare(other)]  # type: ignore[union-attr]
    assert times == sorted(times)


def test_the_last_tick_of_a_busy_daemon_counts() -> None:
    """It decided a quarter of a second after its last reading, later than ticks are apart; until then it is played."""
    leg = DaemonRun(at_s=0.0, policy=POLICY, events=outage(13.0), end_s=13.2)
    assert TICK_OUTAGE_S > 0.2
    assert replay(Recording(name="r", legs=(leg,))).ended_s == 13.2


def test_what_a_drill_did_before_the_outage_is_not_set_against_anything() -> None:
    """An export tells of its outage alone: what the lead orders today was perhaps ordered then, too."""
    replayed = replay(recording(*outage(400.0), began_s=6.0))
    early = Mark(t_s=1.0, kind="order", what="ResumeTrainer", whom="llm")
    back = dataclasses.replace(early, t_s=390.0)
    was = dataclasses.replace(replayed.recording, marks=(*replayed.marks, back))
    both = dataclasses.replace(replayed, recording=was, marks=(early, *replayed.marks, back))
    assert {each.verdict for each in compare(both)} == {"same"}


def test_a_checkpoint_before_the_outage_takes_no_answer_of_one_in_it() -> None:
    """An operator asked shortly before: the outage's own checkpoint was taken for that one, and nothing was resumed."""
    asked = CheckpointNow(at_s=2.5, who="root")
    events = (*outage(2.0), asked, *outage(400.0, back_s=110.0)[3:])
    alone = replay(recording(*outage(400.0, back_s=110.0), began_s=6.0))
    order = next(line for line in alone.lines if isinstance(line.action, TriggerCheckpoint))
    assert isinstance(order.action, TriggerCheckpoint)
    done = Done(at_s=order.t_s + 20.0, action=order.action, took_s=20.0, detail=(("step", 7), ("paused", True)))
    deed = RecordedOrder(action=order.action, at_s=order.t_s, outcome=done)
    replayed = replay(recording(*events, deeds=(deed,), began_s=6.0))
    assert [label for label, _ in orders(replayed)].count("TriggerCheckpoint") == 2
    assert "ResumeTrainer" in dict(orders(replayed))
    assert [each.note.event for each in replayed.lines if each.note].count("trainer_left_paused") == 0


def test_a_repeated_order_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """After a restart the same order is given again: neither the recording nor the replay counts it twice."""
    path = FOLDER / "killed-and-powered-off.jsonl"
    assert main(["replay", str(path), "--diff", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    # Recorded when training still waited for the charge of a full stop: it starts earlier today.
    moved = [each["what"] for each in answer["outages"][0]["diff"] if each["verdict"] != "same"]
    assert moved == ["ResumeTraining", "online"]
    checkpoints = [mark for mark in answer["outages"][0]["marks"] if mark["what"] == "TriggerCheckpoint"]
    assert len(checkpoints) == 1


@pytest.mark.parametrize("mode", [Mode.REHEARSE, Mode.DRY_RUN])
def test_a_rehearsal_is_not_shown_as_a_power_off(
    mode: Mode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`explain` says of the same outage that the host was not powered off."""
    lines = (FOLDER / "killed-and-powered-off.jsonl").read_text(encoding="utf-8")
    path = tmp_path / "rehearsed.jsonl"
    path.write_text(lines.replace('"policy":{', f'"policy":{{"mode":"{mode}",'), encoding="utf-8")
    assert main(["replay", str(path)]) == 0
    stdout = capsys.readouterr().out
    assert "the host would be powered off, because" in stdout
    assert "the host is powered off" not in stdout
    assert ("order: sync" in stdout) == (mode is Mode.REHEARSE)


def test_done_is_answered_once() -> None:
    """An answer that comes after the outage's own end changes nothing."""
    order = PowerOff(id="x-9", by_s=1.0, outage="o", grade="full", force_after_s=1.0)  # type: ignore[arg-type]
    deed = RecordedOrder(action=order, at_s=0.0, outcome=Done(at_s=5000.0, action=order, took_s=5000.0))
    replayed = replay(recording(*outage(400.0), deeds=(deed,)))
    assert replayed.phase == "shutdown"
    assert replayed.ended_s <= 440.0
