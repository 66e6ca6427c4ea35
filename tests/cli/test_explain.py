"""`history`, `explain` and `replay` as their users meet them: on journals that the real loop wrote."""

import asyncio
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.main import main
from powerguard.cli.outages.explain import describe, explained, host_readings, what_if
from powerguard.cli.outages.facts import OutageFacts, gather
from powerguard.cli.outages.history import Elapsed, Outage, read
from powerguard.cli.render import Paint
from powerguard.cli.words import sentence
from powerguard.core.model.events import Abort, OutputSource, Reading
from powerguard.core.model.policy import FeedPolicy, Policy
from powerguard.core.model.state import NotDurable, State
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import Line, OutageRecord, history, outage, read_only
from powerguard.daemon.journal.export import Scrub
from powerguard.daemon.journal.records import Recorded, ReplayStart
from powerguard.daemon.journal.store import MIGRATIONS, Store
from powerguard.daemon.loop import Loop
from powerguard.sim.demo.story import numbers
from powerguard.sim.virtual import VirtualLoop
from tests.cli.test_commands import powerguard, run_by_bash
from tests.daemon.journal_writer import loaded_once
from tests.daemon.looped import World, until
from tests.golden import FIGURES, Golden

pytestmark = pytest.mark.xdist_group("explain")  # one process makes the journals, for all
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
URL = "http://operator:hunter2@trainer.example:8080/api"
"""What a trainer's failure might tell; it must not leave the host."""


def in_phase(name: str, daemon: Loop) -> Callable[[], bool]:
    return lambda: type(daemon.state.phase).__name__ == name


async def _held(world: World) -> None:
    """Held and resumed in place; one checkpoint fails first, with an address in its reason."""
    world.trainer.error = f"no answer from {URL}"
    async with world.running() as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("EmergencyCheckpoint", daemon))
        await until(lambda: daemon.state.trainers[0].checkpoint == NotDurable(tries=2))
        world.trainer.error = ""
        await until(in_phase("Holding", daemon))
        await rest(20.0)
        world.ups.utility = True
        await until(in_phase("Online", daemon))
        await rest(20.0)


async def _powered_off(world: World) -> None:
    """Powered off in order, and back; utility had come back while the host went down."""
    async with world.running(kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("Shutdown", daemon))
        await rest(4.0)
        world.ups.utility = True
        await rest(6.0)
    await rest(600.0)
    world.next_boot()
    async with world.running() as daemon:
        await until(in_phase("Online", daemon), 20_000)
        await rest(20.0)


async def _running(world: World) -> None:
    """The daemon died in an outage that nobody has ended yet."""
    async with world.running(kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("Holding", daemon))
        await rest(7.0)


async def _committed(world: World) -> None:
    """The power-off is decided and not ordered yet, as the disks still sync: nobody tells more of it."""
    world.disks.takes_s = 3.0
    async with world.running(kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("Shutdown", daemon))


async def _dip(world: World) -> None:
    """Ridden through: nothing had to be done."""
    async with world.running() as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("OnBattery", daemon))
        await rest(30.0)
        world.ups.utility = True
        await until(in_phase("Online", daemon))
        await rest(60.0)


STORIES = {
    "committed": _committed,
    "dip": _dip,
    "held": _held,
    "powered-off": _powered_off,
    "running": _running,
}


async def told_in(path: Path, story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    world = World(path)
    world.policy = replace(world.policy, recharge_s=3600.0)
    world.ups.battery = replace(world.ups.battery, recharge_s=240.0)
    await story(world)


@pytest.fixture(scope="module")
def journals() -> Iterator[dict[str, Path]]:
    """One journal for each story, under a path with a space in it."""
    made = Path(tempfile.mkdtemp(dir="/tmp", prefix="pg "))
    paths = {name: made / f"{name}.sqlite" for name in STORIES}
    for name, story in STORIES.items():
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(told_in(paths[name], story))
    yield paths
    shutil.rmtree(made)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line here: code, stdout, stderr."""

    def ran(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ran


Run = Callable[..., tuple[int, str, str]]


def shape(value: object) -> object:
    """Keys of an object, and of the first of a list's objects: what a reader of the JSON relies on."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items() if name != "numbers"}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def known_only(answer: object, example: object) -> None:
    """Every key of the example is there, and no other; null may stand for a value."""
    if isinstance(example, dict):
        assert isinstance(answer, dict)
        assert list(answer) == list(example)
        for name, item in example.items():
            known_only(answer[name], item)
    elif isinstance(example, list) and example and isinstance(answer, list) and answer:
        known_only(answer[0], example[0])
    elif "NoneType" not in (answer, example) and not isinstance(example, list):
        assert {answer, example} <= {"int", "float"} or answer == example


def like(answer: dict[str, Any], name: str) -> None:
    example = json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8"))
    known_only(shape(answer), shape(example))


# --- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("story", STORIES)
def test_a_story_is_explained(story: str, journals: dict[str, Path], run: Run, golden: Golden) -> None:
    """Each step with its time and the numbers that decided; what would have changed it; how long it took."""
    code, out, err = run("explain", "last", "--journal", journals[story])
    assert (code, err) == (0, "")
    golden("explain", out, varies=FIGURES)
    golden("history", run("history", "--journal", journals[story])[1], varies=FIGURES)


def test_a_hold_is_explained(journals: dict[str, Path], run: Run) -> None:
    answer = json.loads(run("explain", "last", "--json", "--journal", journals["held"])[1])
    assert answer["outcome"] == "resumed_in_place"
    paused = next(step for step in answer["steps"] if step["numbers"].get("new") == "emergency_checkpoint")
    assert (paused["event"], paused["because"], paused["after_s"] > 60.0) == ("phase_changed", "budget", True)
    assert [step["event"] for step in answer["steps"]].count("action_failed") == 1
    assert len(answer["what_if"]) == 2
    assert answer["durations"]["away_s"] is None, "it never was"


def test_a_hold_ends_with_its_abort(run: Run, tmp_path: Path) -> None:
    """Training continues then: what the outage lasts after it is no hold."""

    async def aborted(world: World) -> None:
        async with world.running() as daemon:
            await until(lambda: daemon.clock() > 1060.0)
            world.ups.utility = False
            await until(in_phase("Holding", daemon))
            await rest(20.0)
            daemon.submit(Abort(at_s=daemon.clock(), who="root"))
            await until(in_phase("OnBattery", daemon))
            await rest(30.0)
            world.ups.utility = True
            await until(in_phase("Online", daemon))

    journal = tmp_path / "journal.sqlite"
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(told_in(journal, aborted))
    answer = json.loads(run("report", "last", "--json", "--journal", journal)[1])
    assert 20.0 <= answer["durations"]["held_s"] < 30.0
    (hold,) = (phase for phase in answer["phases"] if phase["name"] == "holding")
    assert answer["durations"]["held_s"] == hold["s"]


def test_a_power_off_is_explained(journals: dict[str, Path], run: Run) -> None:
    """When utility would have had to be back to spare it, and by how much it was too late."""
    answer = json.loads(run("explain", "last", "--json", "--journal", journals["powered-off"])[1])
    assert answer["outcome"] == "clean_shutdown"
    commit = next(step for step in answer["steps"] if step["numbers"].get("new") == "shutdown")
    assert commit["because"] == "budget"
    (spared,) = answer["what_if"]
    assert re.search(r" [345]\.\d s too late", spared)
    for part in ("away_s", "recovery_s", "held_s", "trained_on_s"):
        assert answer["durations"][part] > 0.0, part


def test_a_dip_is_explained(journals: dict[str, Path], run: Run) -> None:
    """How much longer it could have lasted: at least what the sums of its end give, and no more than the truth."""
    code, out, _ = run("explain", "last", "--journal", journals["dip"])
    assert code == 0
    assert json.loads(run("explain", "last", "--json", "--journal", journals["dip"])[1])["outcome"] == "ridden_through"
    found = re.search(r"at least (\d+) s", out)
    assert found is not None
    paused = run("explain", "last", "--json", "--journal", journals["held"])[1]
    trained_on_s = json.loads(paused)["durations"]["trained_on_s"]
    assert 0.5 * (trained_on_s - 31.0) < float(found[1]) <= trained_on_s - 31.0


def test_an_outage_that_runs_is_explained(journals: dict[str, Path], run: Run) -> None:
    """Beside a daemon that is down, and one that is not."""
    answer = json.loads(run("explain", "last", "--json", "--journal", journals["running"])[1])
    assert (answer["ended_at"], answer["outcome"], answer["phase"]) == (None, None, "holding")
    assert answer["durations"]["lasted_s"] is None
    held_at_s = next(step["after_s"] for step in answer["steps"] if step["numbers"].get("new") == "holding")
    assert answer["durations"]["on_battery_s"] >= held_at_s


@pytest.mark.parametrize("story", STORIES)
def test_the_object_is_as_documented(story: str, journals: dict[str, Path], run: Run) -> None:
    code, out, _ = run("explain", "last", "--json", "--journal", journals[story])
    answer = json.loads(out)
    assert code == 0
    like(answer, "explain")
    assert [step["after_s"] for step in answer["steps"]] == sorted(step["after_s"] for step in answer["steps"])
    assert all(step["text"] for step in answer["steps"])


def test_battery_time_of_an_outage_that_runs_is_not_behind_its_steps() -> None:
    """The figures are written now and then: 0.6 s, and a step that was taken at +3.7 s, do not go together."""
    record = OutageRecord(id="o-1", boot_id="b", started_at_s=100.0, started_wall=1000.0, figures={"on_battery_s": 0.6})
    payload = {"level": "info", "numbers": []}
    note = Line(
        seq=1, boot_id="b", at_s=103.7, wall=1003.7, outage="o-1", kind="note", event="x_raised", because="y",
        payload=payload,
    )  # fmt: skip
    assert explained(gather(Outage(record, (note,), ())))["durations"]["on_battery_s"] == 3.7
    ended = replace(record, ended_at_s=110.0, ended_wall=1010.0)
    assert explained(gather(Outage(ended, (note,), ())))["durations"]["on_battery_s"] == 0.6


def test_a_long_story_is_not_searched_again_for_each_of_its_lines() -> None:
    """Of 10,000 lines that took seconds, of 100,000 minutes: utility may come and go for days."""

    looks: list[int] = []

    class Story(tuple[Line, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[Line]:
            looks.append(1)
            return super().__iter__()

    record = OutageRecord(id="o-1", boot_id="b", started_at_s=0.0, started_wall=1000.0)
    note = Line(
        seq=1, boot_id="b", at_s=1.0, wall=1001.0, outage="o-1", kind="note", event="x_raised", because="y",
        payload={"level": "info", "numbers": []},
    )  # fmt: skip
    explanation = explained(
        gather(Outage(record, Story(replace(note, seq=seq, at_s=float(seq)) for seq in range(200)), ()))
    )
    assert len(explanation["steps"]) == 200
    assert len(looks) < 50


def test_a_countdown_of_the_ups_is_not_undone_by_utility(golden: Golden) -> None:
    """So utility in time would not have spared that power-off, and nothing of the kind is said."""
    record = OutageRecord(id="o-1", boot_id="b", started_at_s=100.0, started_wall=1000.0, ended_wall=1300.0)
    step = {
        "at": 1050.0,
        "after_s": 50.0,
        "because": "power_off_at",
        "event": "phase_changed",
        "numbers": {"new": "shutdown"},
    }
    policy = Policy(boot_id="b", ups="a")
    assert what_if(record, [step], [], policy) == []
    (said,) = what_if(record, [{**step, "because": "budget"}], [], policy)
    golden("explain", said)


def test_room_for_higher_tiers_is_not_spare() -> None:
    """The commit of a host that powers off earlier for more important ones comes earlier, and its pause too."""
    sums = {"reff_now_s": 500.0, "reff_paused_s": 600.0, "checkpoint_s": 20.0, "stop_s": 170.0, "shed_s": 220.0}

    def story(*phases: tuple[float, str]) -> list[dict[str, Any]]:
        step = {"event": "phase_changed", "because": "budget"}
        return [{**step, "after_s": at_s, "numbers": {"new": new, **sums}} for at_s, new in phases]

    record = OutageRecord(id="o", boot_id="b", started_at_s=0.0, started_wall=0.0, ended_wall=100.0)
    held = story((10.0, "emergency_checkpoint"), (30.0, "holding"))
    policy = Policy(boot_id="b", ups="ups")
    _, said = what_if(replace(record, outcome="resumed_in_place"), held, [(40.0, "utility")], policy)
    assert "at least 3 m 30 s were left" in said
    (said,) = what_if(replace(record, outcome="ridden_through"), story((20.0, "online")), [], policy)
    assert "for at least 44 s more" in said


def test_utility_is_back_when_enough_power_supplies_have_it() -> None:
    """One of two UPSes never failed: what would have helped is the return of the other."""
    one = Policy(boot_id="b", ups="rack-a")
    both = (FeedPolicy(policy=one), FeedPolicy(policy=replace(one, ups="rack-b")))
    policy = replace(one, feeds=both, minimum_supplies=2)
    readings = [
        Reading(at_s=float(at_s), ups=ups, source="snmp", output_source=OutputSource(source))
        for at_s in range(60)
        for ups, source in (("rack-a", "utility"), ("rack-b", "battery" if at_s < 50 else "utility"))
    ]
    events = tuple((each.at_s, each) for each in readings)
    record = OutageRecord(id="o", boot_id="b", started_at_s=0.0, started_wall=0.0, ended_wall=60.0)
    record = replace(record, outcome="resumed_in_place")
    start = ReplayStart(at_s=0.0, policy=policy, state=State())
    facts = OutageFacts(Outage(record, (), ()), Elapsed(record, ()), (), events, events, start, 60.0)
    step = {"event": "phase_changed", "because": "budget"}
    sums = {"reff_now_s": 500.0, "reff_paused_s": 600.0, "checkpoint_s": 20.0, "stop_s": 170.0}
    steps = [
        {**step, "after_s": at_s, "numbers": {"new": new, **sums}}
        for at_s, new in ((10.0, "emergency_checkpoint"), (30.0, "holding"))
    ]
    earlier, held = what_if(record, steps, host_readings(facts), policy)
    assert earlier.startswith("Utility 40 s earlier")
    assert "utility came after 20 s of it" in held


@pytest.mark.parametrize("name", ["held", "powered-off", "running"])
def test_a_clock_that_is_set_in_an_outage_changes_nothing_that_is_reckoned(
    journals: dict[str, Path], name: str
) -> None:
    """An hour back when training was paused: what would have helped, and for how long it was on battery, stay."""
    with read_only(journals[name]) as db:
        found = read(db, "last")
    right = explained(gather(Outage(found.record, found.lines, found.rows)))
    paused_s = next(line.at_s for line in found.lines if numbers(line).get("new") == "emergency_checkpoint")
    first = found.record.boot_id

    def is_later(each: Line | Recorded) -> bool:
        return each.boot_id != first or each.at_s >= paused_s

    lines = [replace(line, wall=line.wall - 3600.0) if is_later(line) else line for line in found.lines]
    rows = [replace(row, wall=row.wall - 3600.0) if is_later(row) else row for row in found.rows]
    explanation = explained(gather(Outage(found.record, tuple(lines), tuple(rows))))
    assert bool(right["what_if"]) is (name != "running")
    assert [re.sub("before [0-9:]+ ", "", text) for text in explanation["what_if"]] == [
        re.sub("before [0-9:]+ ", "", text) for text in right["what_if"]
    ]
    assert explanation["durations"]["on_battery_s"] == right["durations"]["on_battery_s"]


@pytest.mark.parametrize("by_s", [-5 * 3600.0, 5 * 3600.0])
def test_a_clock_that_was_wrong_at_boot_changes_no_duration(journals: dict[str, Path], by_s: float) -> None:
    """NTP corrects it seconds later. The daemon has reckoned the time off with it, and the length of the outage."""
    with read_only(journals["powered-off"]) as db:
        found = read(db, "last")
    right = explained(gather(found))
    first = found.record.boot_id
    boot_s = min(line.at_s for line in found.lines if line.boot_id != first)

    def moved(line: Line) -> Line:
        numbers = dict(line.payload.get("numbers", ()))
        wrong = {name: value + by_s for name, value in numbers.items() if name in {"away_s", "lasted_s"}}
        line = (
            replace(line, payload={**line.payload, "numbers": [list(pair) for pair in (numbers | wrong).items()]})
            if wrong
            else line
        )
        return replace(line, wall=line.wall + by_s) if line.boot_id != first and line.at_s < boot_s + 5.0 else line

    figures = {**found.record.figures, "lasted_s": found.record.figures["lasted_s"] + by_s}
    explanation = explained(gather(Outage(replace(found.record, figures=figures), tuple(map(moved, found.lines)), ())))
    assert explanation["durations"] == right["durations"]
    ends = {"host_returned", "outage_ended"}
    assert [step["text"] for step in explanation["steps"] if step["event"] in ends] == [
        step["text"] for step in right["steps"] if step["event"] in ends
    ]
    assert replace(found.record, figures=figures).lasted_s == pytest.approx(found.record.lasted_s)


def test_which_outage(journals: dict[str, Path], run: Run, golden: Golden) -> None:
    """An id, how it begins, or last; else which ones there are, and which was meant."""
    journal = ("--journal", journals["held"])
    with read_only(journals["held"]) as db:
        name = history(db, 1)[0].id
    for asked in (name, name[:6], "last"):
        assert run("explain", asked, *journal)[0] == 0
    assert run("explain", *journal) == run("explain", "last", *journal)
    code, out, err = run("explain", "lats", *journal)
    assert (code, out) == (64, "")
    golden("explain", err, varies=FIGURES)
    assert f"the last ones: {name} (20" in err
    assert "did you mean " + name in run("explain", name[:-1] + "x", *journal)[2]
    answer = json.loads(run("explain", "nonsense", "--json", *journal)[1])
    assert answer["object"] == "error"


def test_a_beginning_of_several_is_refused(run: Run, tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "j.sqlite"
    loaded_once(Store(path))
    import sqlite3

    with sqlite3.connect(path) as db:
        for name in ("6f1d-1", "6f1d-2"):
            db.execute("INSERT INTO outages VALUES (?, 'b', 1, 2, 3, 4, 'ridden_through', '{}')", (name,))
    db.close()
    code, _, err = run("explain", "6f1d", "--journal", path)
    assert code == 64
    golden("explain", err)
    code, out, _ = run("explain", "6f1d-1", "--journal", path)
    assert (code, "the journal has no step of it left" in out) == (0, True), "without a single line, too"


def test_without_a_journal(run: Run, tmp_path: Path, golden: Golden) -> None:
    for verb in (("explain", "last"), ("history",), ("history", "export", "last")):
        code, out, err = run(*verb, "--journal", tmp_path / "none.sqlite")
        assert (code, out) == (66, ""), verb
        assert "no journal here" in err
    loaded_once(Store(tmp_path / "empty.sqlite"))
    code, _, err = run("explain", "last", "--journal", tmp_path / "empty.sqlite")
    assert code == 64
    golden("explain", err)


@pytest.mark.root
def test_a_journal_that_is_closed_to_the_reader(
    journals: dict[str, Path], run: Run, tmp_path: Path, golden: Golden
) -> None:
    """The reader is told to be root, not to open the daemon's folder to itself."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    path = folder / "journal.sqlite"
    shutil.copy(journals["dip"], path)
    verbs = ("history", "explain", "report")
    for verb in verbs:
        run(verb, "--journal", path)  # The other user may not read the modules that a verb imports when it is called.
    os.seteuid(65534)
    try:
        ended = {verb: run(verb, "--journal", path) for verb in verbs}
    finally:
        os.seteuid(0)
    for verb, (code, _, err) in ended.items():
        assert code == 66
        golden(verb, err)


def test_the_journal_is_where_the_settings_say(journals: dict[str, Path], run: Run, tmp_path: Path) -> None:
    """Also with a mistake elsewhere in them; else at its usual place: an outage must be told all the same."""
    config = tmp_path / "pg.yaml"
    text = "mode: dry-run\nups:\n  rack-a:\n    sources:\n      - {kind: snmp, host: 10.0.0.5, version: 2c}\n"
    for mistake in ("", "budget: {margni: 0.2}\n"):
        config.write_text(f'{text}journal: {{path: "{journals["held"]}"}}\n{mistake}', encoding="utf-8")
        assert run("--config", config, "explain", "last")[0] == 0
    config.write_text("mode: armde\n", encoding="utf-8")
    code, _, err = run("--config", config, "history")
    assert (code, "/var/lib/powerguard/journal.sqlite" in err) in ((66, True), (0, False))


def test_settings_that_cannot_be_read_are_not_replaced_by_the_journal_of_this_host(run: Run, tmp_path: Path) -> None:
    """A mistyped --config showed the outages of the host's own daemon as if they were those of the settings."""
    for verb in ("history", "explain", "report"):
        code, out, err = run("--config", tmp_path / "typo.yaml", verb)
        assert (code, out, err.split(": ")[2:4]) == (66, "", [f"{tmp_path}/typo.yaml", "cannot be read"])
        assert "--journal FILE" in err


def test_an_outage_of_an_older_journal_is_explained(journals: dict[str, Path], run: Run, tmp_path: Path) -> None:
    """Without readings nothing is said of what would have changed it; the rest is told."""
    with read_only(journals["held"]) as db:
        record = history(db, 1)[0]
        found = outage(db, record.id)
    assert found is not None
    explanation = explained(gather(Outage(record, found[1], ())))
    assert explanation["what_if"] == []
    assert any("three quarters" in line for line in describe(explanation, Paint()))


async def test_a_real_process(journals: dict[str, Path]) -> None:
    """Start to exit, with colours off in a pipe, and hostile names made harmless."""
    ended = await powerguard("explain", "last", "--journal", str(journals["held"]))
    assert (ended.code, ended.err) == (0, "")
    assert "\x1b" not in ended.out
    listed = await powerguard("history", "--journal", str(journals["held"]))
    assert "resumed_in_place" in listed.out


# --- history and its export -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["history", "history --sum", "history export last", "explain last", "report last"])
async def test_a_full_disk_behind_the_output_is_none_of_the_journal(journals: dict[str, Path], words: str) -> None:
    """Else it reads as if the daemon's journal had no room left."""
    ended = await run_by_bash(f"{words} --journal '{journals['held']}' > /dev/full")
    assert (ended.code, ended.err) == (74, "powerguard: error: standard output: No space left on device\n")


def test_history_lists_outages(journals: dict[str, Path], run: Run) -> None:
    code, out, _ = run("history", "--json", "--journal", journals["powered-off"])
    answer = json.loads(out)
    assert code == 0
    like(answer, "history")
    assert [each["outcome"] for each in answer["outages"]] == ["clean_shutdown"]
    assert "runs" in run("history", "--journal", journals["running"])[1]
    for limit in ("0", "-1"):
        with pytest.raises(SystemExit, match="64"):  # Not one outage, as if there were no more.
            run("history", "--limit", limit, "--journal", journals["running"])


def test_the_cost_of_no_outage_is_no_row_of_zeros(journals: dict[str, Path], run: Run, tmp_path: Path) -> None:
    """Neither without outages, nor while the only one still runs."""
    loaded_once(Store(tmp_path / "empty.sqlite"))
    none = run("history", "--sum", "--journal", tmp_path / "empty.sqlite")
    assert none == (0, "the journal has no outage\n", "")
    since = run("history", "--sum", "--since", "2100-01-01", "--journal", journals["held"])
    assert since == (0, "the journal has no outage since 2100-01-01 00:00\n", "")
    runs = run("history", "--sum", "--journal", journals["running"])
    assert runs == (0, "0 outages, and 1 whose cost is not known\n", "")


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("more", [(), ("--anonymize",)], ids=["plain", "anonymized"])
def test_an_export_is_decided_the_same(
    story: str, more: tuple[str, ...], journals: dict[str, Path], run: Run, tmp_path: Path
) -> None:
    """Exported, replayed, compared: the same phases and orders at the same times, to a poll."""
    code, out, _ = run("history", "export", "last", *more, "--journal", journals[story])
    assert code == 0
    path = tmp_path / "o.jsonl"
    path.write_text(out, encoding="utf-8")
    code, out, _ = run("replay", path, "--diff", "--json")
    answer = json.loads(out)
    assert code == 0, [each for each in answer["outages"][0]["diff"] if each["verdict"] != "same"]
    like(answer, "replay")
    assert (answer["same"], answer["settings"], answer["outages"][0]["complete"]) == (True, "as recorded", True)


def test_what_comes_after_a_recording_is_no_difference(
    journals: dict[str, Path], run: Run, tmp_path: Path, golden: Golden
) -> None:
    """It ends with its commit, by itself or cut off there: what today's decisions do next was perhaps done, too.

    The order to power off was "new" once, and so was, in a file without its last lines, all of the return.
    """
    path = tmp_path / "o.jsonl"
    path.write_text(run("history", "export", "last", "--journal", journals["committed"])[1], encoding="utf-8")
    code, out, _ = run("replay", path, "--diff")
    assert code == 0
    golden("replay", out, varies=FIGURES)
    (off,) = [line for line in out.splitlines() if "order: power the host off" in line]
    assert off.endswith("not known")

    whole = run("history", "export", "last", "--journal", journals["powered-off"])[1].splitlines()
    kinds = [json.loads(line) for line in whole]
    ordered = [(line.get("action") or {}).get("kind") for line in kinds].index("PowerOff")
    committed = [(line.get("numbers") or {}).get("new") for line in kinds].index("shutdown")
    assert committed < ordered < len(whole) - 10
    for last, missing in ((ordered, {"ResumeTraining"}), (committed, {"PowerOff", "ResumeTraining"})):
        path.write_text("\n".join(whole[: last + 1]), encoding="utf-8")
        code, out, _ = run("replay", path, "--diff", "--json")
        answer = json.loads(out)
        verdicts = {each["what"]: each["verdict"] for each in answer["outages"][0]["diff"]}
        assert (code, answer["same"], set(verdicts.values())) == (0, True, {"same", "not known"})
        assert {what for what, verdict in verdicts.items() if verdict == "not known"} >= missing
        assert verdicts["shutdown"] == "same"


def test_a_difference_before_the_end_is_one(journals: dict[str, Path], run: Run, tmp_path: Path) -> None:
    """Another runtime table commits much earlier; an order that was not done while the recording went on is new."""
    path = tmp_path / "o.jsonl"
    path.write_text(run("history", "export", "last", "--journal", journals["committed"])[1], encoding="utf-8")
    code, out, _ = run("replay", path, "--diff", "--json", "--table", "50:270,75:180,100:120")
    answer = json.loads(out)
    verdicts = {each["what"]: each["verdict"] for each in answer["outages"][0]["diff"]}
    assert (code, answer["same"], verdicts["shutdown"], verdicts["PowerOff"]) == (1, False, "earlier", "new")


def test_an_export_has_no_secret(journals: dict[str, Path], run: Run) -> None:
    """The reason of a failure named the trainer's address, and a password in it."""
    assert b"trainer.example" in journals["held"].read_bytes(), "the journal knows it"
    out = run("history", "export", "last", "--journal", journals["held"])[1]
    assert "trainer.example" not in out
    assert "hunter2" not in out
    assert "[url]" in out
    lines = [json.loads(line) for line in out.splitlines()]
    assert (lines[0]["kind"], lines[-1]) == ("meta", {"kind": "end", "lines": len(lines) - 1})
    assert {line["kind"] for line in lines} == {
        "meta", "start", "reading", "tick", "event", "note", "action", "outcome", "end",
    }  # fmt: skip


def test_an_anonymized_export_names_nobody(journals: dict[str, Path], run: Run) -> None:
    """Each name becomes a word, always the same; the orders still mean what they meant."""
    plain = run("history", "export", "last", "--journal", journals["held"])[1]
    out = run("history", "export", "last", "--anonymize", "--journal", journals["held"])[1]
    for name in ("llm", "rack-a", "boot-a", "gpu-01", '"card"'):
        assert name in plain
        assert name not in out
    assert len(out.splitlines()) == len(plain.splitlines())
    lines = [json.loads(line) for line in out.splitlines()]
    orders = [line["action"] for line in lines if line["kind"] == "action"]
    assert {order["trainer"] for order in orders if "trainer" in order} == {"trainer-1"}


def test_names_that_are_words_of_ours() -> None:
    """A trainer called "pause": its name goes, the order's meaning stays. Addresses and paths go from free text."""
    given = {
        "kind": "action",
        "action": {"kind": "TriggerCheckpoint", "trainer": "pause", "after": "pause", "outage": "b0075678-9"},
        "boots": ["b0075678-aaaa"],
        "because": "pause, at 10.0.0.5 and fe80::1 (/srv/ckpt/x.bin): http://u:p@h/x, unix:/run/a b",
        "numbers": {"who": "alice", "source": "snmp:rack-a.example", "checkpoint_s.pause": 3.0},
        "reason": "card at rack-a.example:161: no answer; upsd at nas.example:3493: no answer",
        "error": "BMC gpu-17-bmc port 623: no answer; BMC 10.0.0.9 port 443: refused; upsd at pdu.example:3493: no",
        "sources": [{"source": "nut:ups@nas.example"}, {"source": "apcupsd:localhost"}],
        "status": {"held_by": "gpu-02, gpu-03", "ended_by": "gpu-03 left the job"},
    }
    made = Scrub(given)(given)
    assert made == {
        "kind": "action",
        "action": {"kind": "TriggerCheckpoint", "trainer": "trainer-1", "after": "pause", "outage": "outage-1"},
        "boots": ["boot-1"],
        "because": "trainer-1, at [address] and [address] ([path]): [url], [url] b",
        "numbers": {"who": "person-1", "source": "source-1", "checkpoint_s.trainer-1": 3.0},
        "reason": "card at host-1:161: no answer; upsd at host-2:3493: no answer",
        "error": "BMC host-3 port 623: no answer; BMC [address] port 443: refused; upsd at host-4:3493: no",
        "sources": [{"source": "source-2"}, {"source": "source-3"}],
        "status": {"held_by": "host-5, host-6", "ended_by": "host-6 left the job"},
    }
    assert Scrub(())(given) == given | {"because": "pause, at 10.0.0.5 and fe80::1 (/srv/ckpt/x.bin): [url], [url] b"}


def test_all_outages_in_one_export(journals: dict[str, Path], run: Run, tmp_path: Path, golden: Golden) -> None:
    out = run("history", "export", "all", "--journal", journals["held"])[1]
    path = tmp_path / "all.jsonl"
    path.write_text(out * 2, encoding="utf-8")
    answer = json.loads(run("replay", path, "--json")[1])
    assert len(answer["outages"]) == 2
    assert answer["same"] is None
    code, _, err = run("replay", path, "--outage", "nobody")
    assert code == 64
    golden("replay", err)


def test_an_export_of_an_older_journal(journals: dict[str, Path], run: Run, tmp_path: Path, golden: Golden) -> None:
    """A reading in five seconds and no settings: replayed with what is told, and said to be coarse."""
    path = tmp_path / "old.sqlite"
    shutil.copy(journals["held"], path)
    import sqlite3

    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE recorded")
        db.execute("PRAGMA user_version = 1")
    db.close()
    assert len(MIGRATIONS) == 3
    out = run("history", "export", "last", "--journal", path)[1]
    file = tmp_path / "old.jsonl"
    file.write_text(out, encoding="utf-8")
    code, out, _ = run("replay", file, "--table", "50:540,75:360,100:240", "--trainer", "llm:pause:20")
    assert code == 0
    golden("replay", out, varies=FIGURES)


# --- replay's options -------------------------------------------------------------------------------------------------


def test_what_another_setting_would_have_done(
    journals: dict[str, Path], run: Run, tmp_path: Path, golden: Golden
) -> None:
    """A larger reserve: training would have been paused earlier; told side by side, and by the exit status."""
    path = tmp_path / "o.jsonl"
    path.write_text(run("history", "export", "last", "--journal", journals["powered-off"])[1], encoding="utf-8")
    config = tmp_path / "pg.yaml"
    config.write_text(
        "mode: armed\n"
        "ups:\n  rack-b:\n    sources:\n      - {kind: snmp, host: 10.0.0.5, version: 2c}\n"
        "    runtime_table: {50: 540, 75: 360, 100: 240}\n"
        "budget: {reserve_s: 90}\n"
        'trainers: [{name: llm, url: "unix:/run/x.sock", checkpoint_s: 20}]\n',
        encoding="utf-8",
    )
    for words in (("replay", path, "--config", config), ("--config", config, "replay", path)):
        code, out, _ = run(*words, "--diff")
        assert code == 1
        assert f"settings: {config}" in out
    golden("replay", out, varies=FIGURES)
    answer = json.loads(run("replay", path, "--config", config, "--diff", "--json")[1])
    assert answer["same"] is False
    assert {each["verdict"] for each in answer["outages"][0]["diff"]} >= {"earlier"}
    config.write_text("mode: armde\n", encoding="utf-8")
    code, _, err = run("replay", path, "--config", config)
    assert (code, f"{config}:1:7" in err) == (78, True)


WRONG = [
    ("--table", "x"),
    ("--table", "50:540,50:300"),
    ("--table", "50:-1"),
    ("--table", "50:240,75:360"),
    ("--ups", "rack-z"),
    ("--trainer", "llm"),
    ("--trainer", "llm:hope:3"),
    ("--trainer", "llm:pause:nan"),
    ("--diff",),
    ("--trainer", "llm:pause:5", "--trainer", "llm:pause:6"),
    ("--tolerance", "nan"),
    ("--tolerance", "-1"),
    ("--tolerance", "inf"),
]


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_options_of_replay(words: tuple[str, ...], run: Run, tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t_s,output_source\n1,utility\n", encoding="utf-8")
    code, out, err = run("replay", path, *words)
    assert (code, out) == (64, "")
    golden("replay", err)
    code, out, _ = run("replay", path, *words, "--json")
    assert json.loads(out)["object"] == "error"


def test_an_export_that_was_cut_off_has_nothing_to_compare(journals: dict[str, Path], run: Run, tmp_path: Path) -> None:
    """Its actions come last: it is an export, and it is not whole."""
    lines = run("history", "export", "last", "--journal", journals["held"])[1].splitlines(keepends=True)
    path = tmp_path / "half.jsonl"
    path.write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")
    code, _, err = run("replay", "--diff", path)
    assert (code, "it has been cut off, so export it again" in err) == (64, True)


def test_a_lone_word_of_battery_is_not_passed_over(run: Run, tmp_path: Path, golden: Golden) -> None:
    """Who replays it expects an outage, and is told why there is none."""
    path = tmp_path / "t.csv"
    cases = {"alone": "1,battery\n2,utility\n", "borne out": "1,battery\n2,battery\n", "none": "1,utility\n"}
    for case, rows in cases.items():
        path.write_text(f"t_s,output_source\n0,utility\n{rows}", encoding="utf-8")
        golden("replay", run("replay", path)[1], case)


def test_a_file_that_cannot_be_replayed_exits_65(run: Run, tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t_s,output_source,runtime_s\n1,utility,NaN\n", encoding="utf-8")
    code, out, err = run("replay", path)
    assert (code, out) == (65, "")
    assert f"{path}:2:3: runtime_s: " in err
    golden("replay", err)


def test_hostile_names_do_not_reach_the_terminal(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t_s,output_source,ups\n1,utility,\x1b[2J\n2,utility,b\n", encoding="utf-8")
    code, out, err = run("replay", path, "--ups", "b")
    assert (code, "\x1b" in out + err) == (0, False)


def test_the_documented_objects_are_of_these_verbs() -> None:
    for name, what in (("explain", "explanation"), ("history", "history"), ("replay", "replay")):
        assert json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8"))["object"] == what


@pytest.mark.parametrize("name", ["explain", "replay"])
def test_the_documented_texts_are_those_of_today(name: str) -> None:
    def steps_in(value: object) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict) and "text" in value and "numbers" in value:
            yield value
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from steps_in(inner)

    steps = list(steps_in(json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8"))))
    assert steps
    for each in steps:
        assert each["text"] == sentence(each["event"], each["because"], each["numbers"], "armed")
