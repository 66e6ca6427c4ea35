"""Files that somebody sends in: read whatever they know, and told with file, line and column where they are wrong."""

import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from powerguard.core.model.events import CheckpointProgress, OutputSource, Reading, SourceFailed, TrainerSeen
from powerguard.core.model.policy import FeedPolicy, Policy, TrainerPolicy
from powerguard.sim.replay.play import Recording, replay
from powerguard.sim.replay.recording import COLUMNS, MAX_LINE_BYTES, MAX_SPAN_S, ReplayFileError, Wanted, load

DEFAULT = Policy(boot_id="replay", ups="", trainers=(TrainerPolicy(name="trainer"),))
WANTED = Wanted(policy=None, default=DEFAULT)
HEAD = "t_s,ups,source,output_source,runtime_s,charge_pct,load_pct\n"
NOT_TOLD, MORE = "so it counts as unknown", "more of this column"
EXPORT = Path(__file__).parent.parent / "replays" / "killed-and-powered-off.jsonl"


def table(tmp_path: Path, text: str, wanted: Wanted = WANTED) -> tuple[Reading, ...]:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    (recording,) = load(str(path), wanted)
    return tuple(event for event in recording.legs[0].events if isinstance(event, Reading))


# --- CSV --------------------------------------------------------------------------------------------------------------


def test_columns_come_in_any_order_and_empty_is_not_reported(tmp_path: Path) -> None:
    """A byte order mark, comments, spaces, quotes and any field of a reading."""
    text = (
        "\ufeff# from the lab\n"
        "output_source, t_s ,low_battery,alarms,input_present,load_pct,ups\r\n"
        'utility,10,,,true,62.5,rack-a\r\n\r\n"BATTERY",11.5,true,on_battery|overload,false,,rack-a\r\n'
    )
    first, second = table(tmp_path, text)
    assert first == Reading(
        at_s=10.0, ups="rack-a", source="csv", output_source=OutputSource.UTILITY, input_present=True, load_pct=62.5
    )
    assert second == Reading(
        at_s=11.5,
        ups="rack-a",
        source="csv",
        output_source=OutputSource.BATTERY,
        input_present=False,
        low_battery=True,
        alarms=("on_battery", "overload"),
    )


def test_every_field_of_a_reading_is_a_column(tmp_path: Path) -> None:
    """One that is added to Reading can be written into a file at once."""
    from dataclasses import fields

    assert set(COLUMNS) == {field.name for field in fields(Reading)} - {"at_s", "provenance"} | {"t_s"}


def test_a_clock_below_zero_and_one_of_the_world(tmp_path: Path) -> None:
    """Any clock in seconds will do; what is told is told in the file's own."""
    path = tmp_path / "t.csv"
    path.write_text(HEAD + "-3,u,s,utility,,,\n-2,u,s,utility,,,\n", encoding="utf-8")
    (recording,) = load(str(path), WANTED)
    assert (recording.zero_s, [event.at_s for event in recording.legs[0].events]) == (3.0, [0.0, 1.0])
    assert [event.at_s for event in table(tmp_path, HEAD + "1.8e9,u,s,utility,,,\n")] == [1.8e9]


def test_whose_readings_count(tmp_path: Path) -> None:
    """Of several UPSes the one that is asked for, or that the settings feed on; of a single one that one."""
    text = HEAD + "1,a,s,utility,,,\n1,b,s,utility,,,\n2,a,s,battery,,,\n"
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ReplayFileError, match=r"readings of a, b; say --ups"):
        load(str(path), WANTED)
    with pytest.raises(ReplayFileError, match=r"and none of 'c'"):
        load(str(path), Wanted(policy=None, default=DEFAULT, ups="c"))
    (recording,) = load(str(path), Wanted(policy=None, default=DEFAULT, ups="b"))
    assert recording.legs[0].policy.ups == "b"
    assert recording.remarks == ("readings of a are left aside: the feed is b",)
    path.write_text(HEAD + "1,a,s,utility,,,\n", encoding="utf-8")
    (recording,) = load(str(path), Wanted(policy=Policy(boot_id="x", ups="rack-a"), default=DEFAULT))
    assert recording.legs[0].policy.ups == "a"


def test_options_take_the_place_of_table_and_trainers(tmp_path: Path) -> None:
    trainers = (TrainerPolicy(name="vlm", checkpoint_s=9.0),)
    wanted = Wanted(policy=None, default=DEFAULT, table=((0.5, 100.0),), trainers=trainers)
    path = tmp_path / "t.csv"
    path.write_text(HEAD + "1,a,s,utility,,,\n", encoding="utf-8")
    (recording,) = load(str(path), wanted)
    assert recording.legs[0].policy.runtime_table == ((0.5, 100.0),)
    assert recording.legs[0].policy.trainers == trainers
    (recording,) = load(str(EXPORT), wanted)
    first = recording.legs[0]
    assert first.policy.trainers == trainers
    assert first.state is not None
    assert [trainer.name for trainer in first.state.trainers] == ["vlm"]


def test_a_slow_file_is_fresh_for_three_of_its_own_steps(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = "".join(f"{n},a,s,utility,,,\n" for n in (0, 30, 60, 90, 300, 330))
    path.write_text(HEAD + rows, encoding="utf-8")
    (recording,) = load(str(path), WANTED)
    assert recording.legs[0].policy.stale_s == 90.0
    assert [event.at_s for event in recording.legs[0].events if isinstance(event, SourceFailed)] == [180.0]
    assert "a reading every 30 s" in recording.remarks[0]


def test_what_no_source_would_have_reported_is_not_reported(tmp_path: Path) -> None:
    """A row goes through the gates of the decoders, so a replay decides by what the daemon would have heard."""
    path = tmp_path / "t.csv"
    rows = (
        "0,a,s,utility,360,100,75",
        "1,a,s,battery,0,99,75",
        "2,a,s,battery,0,99,-5",
        "3,a,s,battery,65535,1000,75",
        "4,a,s,battery,1e300,12,75",
        "5,a,s,battery,0,12,75",
        "6,a,s,utility,7,12,75",
    )
    path.write_text(HEAD + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    (recording,) = load(str(path), WANTED)
    readings = [event for event in recording.legs[0].events if isinstance(event, Reading)]
    found = [(each.runtime_s, each.charge_pct, each.load_pct) for each in readings]
    assert found == [
        (360.0, 100.0, 75.0),
        (None, 99.0, 75.0),
        (None, 99.0, None),
        (None, None, 75.0),
        (None, 12.0, 75.0),
        (0.0, 12.0, 75.0),
        (None, 12.0, 75.0),
    ]
    assert recording.remarks == tuple(
        f"line {line}: {what}"
        for line, what in (
            (3, f"runtime_s 0 is not believed (0 with neither low battery nor a low charge), {NOT_TOLD}; 4 {MORE}"),
            (4, f"load_pct -5 is not believed (-5 is outside of what is believable (0 to 250)), {NOT_TOLD}"),
            (5, f"charge_pct 1000 is not believed (1000 is outside of what is believable (0 to 100)), {NOT_TOLD}"),
        )
    )


def test_a_zero_runtime_is_real_beside_a_low_battery(tmp_path: Path) -> None:
    """As in the decoder: on battery it is the end of the battery, whatever the charge says."""
    head = "t_s,output_source,runtime_s,charge_pct,low_battery,alarms,watts,load_pct\n"
    rows = "1,battery,0,60,true,,,\n2,battery,0,60,,battery_missing,,\n3,battery,0,60,,overload,0,75\n"
    result = table(tmp_path, head + rows)
    assert [each.runtime_s for each in result] == [0.0, 0.0, None]
    assert result[2].watts is None, "no watts at a real load: not measured"


def test_a_zero_right_after_the_transfer_does_not_commit(tmp_path: Path) -> None:
    """A card that tells 0 for some seconds would have cost the host; the decoder leaves it out, and a replay too."""
    path = tmp_path / "t.csv"
    rows = [f"{n},a,s,utility,360,100,75\n" for n in range(5)]
    rows += [f"{n},a,s,battery,{0 if n < 11 else 360 - n},99,75\n" for n in range(5, 20)]
    path.write_text(HEAD + "".join(rows), encoding="utf-8")
    wanted = Wanted(policy=None, default=replace(DEFAULT, runtime_table=((0.5, 540.0), (0.75, 360.0), (1.0, 240.0))))
    (recording,) = load(str(path), wanted)
    assert [mark.what for mark in replay(recording).marks if mark.kind == "phase"] == ["on_battery"]


TWO_FEEDS = "t_s,ups,source,output_source,runtime_s,charge_pct,load_pct\n" + "".join(
    f"{at_s},{ups},snmp,{'battery' if at_s >= cut_s else 'utility'},{600 - max(0, at_s - cut_s)},100,40\n"
    for at_s in range(90)
    for ups, cut_s in (("a", 20), ("b", 40))
)


def test_all_feeds_of_the_host_are_played(tmp_path: Path) -> None:
    """With settings that name both: one UPS on battery is a loss of redundancy, both are an outage."""
    path = tmp_path / "t.csv"
    path.write_text(TWO_FEEDS, encoding="utf-8")
    alone = replace(DEFAULT, ups="a", runtime_table=((0.4, 700.0), (0.8, 320.0)))
    feeds = tuple(FeedPolicy(policy=replace(alone, ups=name)) for name in ("a", "b"))
    (recording,) = load(str(path), Wanted(policy=replace(alone, feeds=feeds), default=DEFAULT))
    assert {event.ups for event in recording.legs[0].events if isinstance(event, Reading)} == {"a", "b"}
    played = replay(recording)
    times = {line.note.event: line.t_s for line in played.lines if line.note is not None}
    assert (times["redundancy_lost_raised"], times["outage_began"]) == (21.0, 41.0)
    (one,) = load(str(path), Wanted(policy=replace(alone, feeds=feeds), default=DEFAULT, ups="a"))
    times = {line.note.event: line.t_s for line in replay(one).lines if line.note is not None}
    assert times["outage_began"] == 21.0, "of one that is asked for, the others are left aside"


def test_a_feed_that_falls_silent_in_the_file_is_lost(tmp_path: Path) -> None:
    """With the other's transfer: it counts as on battery, and that is an outage."""
    path = tmp_path / "t.csv"
    silent = "".join(
        line for line in TWO_FEEDS.splitlines(keepends=True) if ",b," not in line or int(line.split(",")[0]) < 22
    )
    path.write_text(silent + "90,b,snmp,utility,600,100,40\n", encoding="utf-8")
    alone = replace(DEFAULT, ups="a", runtime_table=((0.4, 700.0), (0.8, 320.0)))
    feeds = tuple(FeedPolicy(policy=replace(alone, ups=name)) for name in ("a", "b"))
    (recording,) = load(str(path), Wanted(policy=replace(alone, feeds=feeds), default=DEFAULT))
    times = {line.note.event: line.t_s for line in replay(recording).lines if line.note is not None}
    assert 22.0 < times["outage_began"] < 30.0


def test_two_sources_of_one_ups_are_heard_together(tmp_path: Path) -> None:
    """As many as are in the file, whatever the settings say; where one falls silent, that one is lost."""
    path = tmp_path / "t.csv"
    rows = []
    for n in range(40):
        rows.append(f"{n},a,snmp,{'utility' if n < 10 else 'battery'},360,100,75\n")
        if n < 20:
            rows.append(f"{n}.5,a,nut,utility,360,100,75\n")
    path.write_text(HEAD + "".join(rows), encoding="utf-8")
    for policy in (None, replace(DEFAULT, ups="a", sources=3)):
        (recording,) = load(str(path), Wanted(policy=policy, default=DEFAULT))
        leg = recording.legs[0]
        assert (leg.policy.sources, leg.policy.stale_s) == (2, 3.0)
    path.write_text(HEAD + "".join((*rows, "40,a,nut,utility,360,100,75\n")), encoding="utf-8")
    (recording,) = load(str(path), WANTED)
    lost = [event for event in recording.legs[0].events if isinstance(event, SourceFailed)]
    assert [(event.source, event.at_s) for event in lost] == [("nut", 22.5)]
    notes = [line.note.event for line in replay(recording).lines if line.note is not None]
    assert "source_lost" in notes
    assert "outage_began" in notes


def test_a_trainer_of_an_option_takes_the_place_of_the_recorded_ones() -> None:
    """Of an export, too: what its own trainers said, did and taught is left aside, and that is told."""
    slow = TrainerPolicy(name="llm", checkpoint_s=90.0)
    (recording,) = load(str(EXPORT), replace(WANTED, trainers=(slow,)))
    first = recording.legs[0]
    assert first.policy.trainers == (slow,)
    assert first.state is not None
    assert [(each.name, each.checkpoint_s) for each in first.state.trainers] == [("llm", 90.0)]
    assert not any(
        isinstance(event, TrainerSeen | CheckpointProgress) for leg in recording.legs for event in leg.events
    )
    assert {type(deed.action).__name__ for deed in recording.deeds}.isdisjoint(
        {"TriggerCheckpoint", "PauseTrainer", "ResumeTrainer"}
    )
    assert any("the recording's own trainers" in text for text in recording.remarks)
    asked = [mark.whom for mark in replay(recording).marks if mark.what == "TriggerCheckpoint"]
    assert set(asked) == {"llm"}


def read(path: Path) -> tuple[tuple[Recording, ...] | None, str]:
    """What is in a file, or why it was refused."""
    try:
        return load(str(path), WANTED), ""
    except ReplayFileError as error:
        return None, str(error)


WRONG_TABLES = [
    ("", "empty"),
    ("\n\n# only this\n", "empty"),
    (HEAD, ":1: a header and no readings"),
    ("t_s,output_source,runtime\n1,utility,3\n", r":1:3: unknown column 'runtime' \(did you mean runtime_s\?\)"),
    ("t_s,output_source,zzzzz\n", r":1:3: unknown column 'zzzzz' \(known are t_s, ups"),
    ("t_s,output_source,provenance\n", ":1:3: unknown column 'provenance'"),
    ("t_s,output_source,t_s\n", ":1:3: column t_s twice"),
    ("t_s,ups\n1,a\n", r":1: no column output_source \(needed are t_s and output_source\)"),
    ("t_s;output_source\n1;utility\n", ":1: the columns are separated by something else than ','"),
    (HEAD + "1,a,s,utility,,\n", ":2: 6 columns, the header has 7"),
    (HEAD + '1,a,s,"utility,,,\n', ":2: no CSV"),
    (HEAD + ",a,s,utility,,,\n", ":2:1: t_s is empty"),
    (HEAD + "1,a,s,,,,\n", ":2:4: output_source is empty"),
    (HEAD + "1,a,s,batery,,,\n", r":2:4: output_source: unknown output_source 'batery' \(did you mean battery\?\)"),
    (HEAD + "1,a,s,7,,,\n", r":2:4: output_source: unknown output_source '7' \(one of utility"),
    (HEAD + "1,a,s,utility,NaN,,\n", ":2:5: runtime_s: expected a finite decimal number, found 'NaN'"),
    (HEAD + "1,a,s,utility,inf,,\n", ":2:5: runtime_s: expected a finite"),
    (HEAD + "1,a,s,utility,1e999,,\n", ":2:5: runtime_s: expected a finite"),
    (HEAD + "1,a,s,utility,0x10,,\n", ":2:5: runtime_s: expected a finite"),
    (HEAD + "1,a,s,utility,,100 %,\n", ":2:6: charge_pct: expected a finite"),
    (HEAD + '1,a,s,utility,,"99,5",\n', ":2:6: charge_pct: expected a finite"),
    (HEAD + "1e12,a,s,utility,,,\n", ":2:1: t_s: 1e[+]12 is not a time in seconds"),
    (HEAD + "5,a,s,utility,,,\n4,a,s,utility,,,\n", ":3:1: t_s runs backwards: 4 after 5; sort the rows"),
    (HEAD + "5,a,s,utility,,,\n5,a,s,battery,,,\n", ":3:1: two readings of a by s at 5"),
    (HEAD + f"5,a,s,utility,,,\n{6 + MAX_SPAN_S},a,s,battery,,,\n", ":3:1: t_s: more than 7 days"),
    ("t_s,output_source,testing\n1,utility,maybe\n", ":2:3: testing: expected true or false, found 'maybe'"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG_TABLES)
def test_a_mistake_is_reported_with_its_place(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(
        ReplayFileError, match=rf"t\.csv.*{expected}" if not expected.startswith(":") else rf"t\.csv{expected}"
    ):
        table(tmp_path, text)


WRONG_BYTES = [
    (HEAD.encode() + b"row\n" * 1_000_000, ":1000001: more than 1000000 lines; cut it to the outage"),
    (b"t_s,output_source\n1,utility\n2,\0battery\n", ":3:3: a NUL byte"),
    (b"\x7fELF\x02\x01\x01\0\0", ":1:8: a NUL byte"),
    (b"\x89PNG\r\n\x1a\n", ":1:1: not UTF-8"),
    (b"t_s,output_source\n1,\xff\xfe\n", ":2:3: not UTF-8"),
    (b"SQLite format 3\0", ":1:16: a NUL byte"),
    (b"\x1f\x8b\x08\x08abc", ":1:2: not UTF-8"),
]


@pytest.mark.parametrize(("content", "expected"), WRONG_BYTES)
def test_what_is_no_text_is_reported(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "b.bin"
    path.write_bytes(content)
    with pytest.raises(ReplayFileError, match=rf"b\.bin{expected}"):
        load(str(path), WANTED)


@pytest.mark.parametrize("begin", [b"", b"t_s,output_source\n", b'{"kind":"meta","schema_version":1}\n{"kind":"'])
def test_a_gigabyte_in_one_line_is_not_read(begin: bytes, tmp_path: Path) -> None:
    """A hole of a gigabyte: refused after four megabytes of it."""
    path = tmp_path / "big"
    path.write_bytes(begin)
    os.truncate(path, 1 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ReplayFileError, match="longer than 4 MiB"):
        load(str(path), WANTED)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"
    assert MAX_LINE_BYTES < 64 << 20


@pytest.mark.parametrize("name", ["", "missing.csv"])
def test_what_is_no_file_is_reported(name: str, tmp_path: Path) -> None:
    with pytest.raises(ReplayFileError, match=r"Is a directory|No such file"):
        load(str(tmp_path / name), WANTED)


# --- Exports ----------------------------------------------------------------------------------------------------------

META = {"kind": "meta", "schema_version": 1, "object": "outage_export", "outage": "o-1", "boots": ["b"]}
TOLD = {"kind": "reading", "boot": 0, "at_s": 5.0, "ups": "a", "source": "s", "output_source": "utility"}


def export(tmp_path: Path, *lines: object) -> str:
    path = tmp_path / "e.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines), encoding="utf-8")
    return str(path)


def test_an_export_without_settings_is_decided_by_the_defaults(tmp_path: Path) -> None:
    """Of a journal that did not keep them yet: what stands in is told."""
    (recording,) = load(export(tmp_path, META, TOLD, {"kind": "tomorrow"}, {"kind": "gap"}), WANTED)
    assert recording.legs[0].policy.trainers == DEFAULT.trainers
    assert (recording.name, recording.complete, recording.legs[0].policy.ups) == ("o-1", False, "a")
    text = "; ".join(recording.remarks)
    for words in ("settings of then are not in the file", "cut off", "did not keep every reading", "every step"):
        assert words in text
    assert replay(recording).phase == "online"


def test_a_wall_clock_that_was_set_moves_no_moment(tmp_path: Path) -> None:
    """By two hours between two lives of a boot, and in the next boot until it was corrected: each has its own clock."""
    lines = [json.loads(line) for line in EXPORT.read_text(encoding="utf-8").splitlines()]
    starts = [line for line in lines if line["kind"] == "start"]
    again, next_boot = starts[1], starts[-1]
    assert (again["boot"], next_boot["boot"]) == (0, 1)
    for line in lines:
        is_set = line.get("boot") == 1 or (line.get("boot") == 0 and line["at_s"] >= again["at_s"])
        if is_set and "at" in line:
            line["at"] -= 7200.0
    next_boot["at"] += 900_000.0
    (was,) = load(str(EXPORT), WANTED)
    (now,) = load(export(tmp_path, *lines), WANTED)
    assert [leg.shift_s for leg in now.legs] == pytest.approx([leg.shift_s for leg in was.legs], abs=0.01)
    assert [mark.t_s for mark in now.marks] == pytest.approx([mark.t_s for mark in was.marks], abs=0.01)


def test_an_unbelievable_wall_clock_of_the_next_boot_is_left_aside(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in EXPORT.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line.get("boot") == 1 and "at" in line:
            line["at"] -= 900_000.0
    (now,) = load(export(tmp_path, *lines), WANTED)
    before, after = now.legs[-2:]
    assert after.at_s + after.shift_s == pytest.approx(before.events[-1].at_s + before.shift_s)
    assert "the wall clock was wrong: how long the host was off is not known" in now.remarks


def test_several_outages_in_one_file(tmp_path: Path) -> None:
    found = load(export(tmp_path, META, TOLD, {"kind": "end"}, META | {"outage": "o-2"}, TOLD, {"kind": "end"}), WANTED)
    assert [recording.name for recording in found] == ["o-1", "o-2"]
    assert not any("cut off" in text for recording in found for text in recording.remarks)


WRONG_EXPORTS = [
    ([TOLD], ":1: expected a line with kind meta first"),
    ([META | {"schema_version": 2}], ":1: schema_version 2: this powerguard reads 1; upgrade it"),
    ([META | {"schema_version": "x"}], ":1: schema_version 'x'.*is this `powerguard history export`"),
    ([META | {"started_at_s": 10**400}], ":1: started_at_s: expected a time in seconds, found 1000"),
    ([META | {"started_at_s": "x"}], ":1: started_at_s: expected a time in seconds, found 'x'"),
    ([{"kind": "meta"}], ":1: no schema_version: this powerguard reads 1; is this `powerguard history export`"),
    ([META, "{"], ":2:2: no JSON"),
    ([META, '{"at_s":NaN}'], ":2: no JSON: NaN is not a number"),
    ([META, '{"kind":"reading","boot":0,"at_s":1e999}'], ":2: at_s: expected a time in seconds, found inf"),
    ([META, '{"a":' * 90_000], ":2: nested far too deeply for an export"),
    ([META, '{"at_s":' + "9" * 5000 + "}"], ":2: no JSON"),
    ([META, "[1]"], ":2: expected one JSON object a line"),
    ([META, TOLD | {"boot": -1}], ":2: boot: expected a small whole number"),
    ([META, TOLD | {"at_s": "5"}], ":2: at_s: expected a time in seconds"),
    ([META, TOLD | {"output_source": "x"}], r":2: Reading\.output_source: expected one of utility"),
    ([META, TOLD | {"load_pct": "x"}], r":2: Reading\.load_pct"),
    ([META, {"kind": "start", "boot": 0, "at_s": 1, "at": 1, "policy": {}, "state": {}}], ":2: Policy"),
    ([META, {"kind": "event", "boot": 0, "at_s": 1, "event": {"kind": "Reboot"}}], ":2: .*unknown kind 'Reboot'"),
    (
        [META, {"kind": "action", "boot": 0, "at_s": 1, "at": 1, "action": {"kind": "rm"}}],
        ":2: Action: unknown kind 'rm'",
    ),
    ([META, TOLD | {"at_s": 50.0}, TOLD], ":3: time runs backwards: 5 after 50"),
    ([META, TOLD, TOLD | {"at_s": 1e6}], ":3: longer than 7 days"),
    ([META, {"kind": "end"}], ": outage o-1: no readings in it"),
    ([META, TOLD, TOLD | {"ups": "b"}], ": readings of a, b; say --ups"),
]


@pytest.mark.parametrize(("lines", "expected"), WRONG_EXPORTS)
def test_a_mistake_of_an_export_is_reported_with_its_place(lines: list[object], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ReplayFileError, match=rf"e\.jsonl({expected})"):
        load(export(tmp_path, *lines), WANTED)


def test_every_line_of_an_export_may_be_missing() -> None:
    """Cut off anywhere, or with any line lost: replayed, or refused with its place; never anything else."""
    lines = EXPORT.read_text(encoding="utf-8").splitlines()
    path = Path(EXPORT.parent)
    assert path.is_dir()
    import tempfile

    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:
        for left_out in (*range(8), *range(8, len(lines), 60)):
            for kept in (lines[:left_out] + lines[left_out + 1 :], lines[: left_out + 1]):
                name = Path(folder) / "x.jsonl"
                name.write_text("\n".join(kept), encoding="utf-8")
                recordings, refused = read(name)
                assert refused.startswith(str(name)) if recordings is None else recordings[0].legs


# --- Whatever it is ---------------------------------------------------------------------------------------------------

cells = st.one_of(
    st.sampled_from(["", "battery", "utility", "off", "nan", "-1", "1e5", "true", "a|b", "\u2028", '"']),
    st.floats(-1e3, 1e3).map(str),
    st.text(max_size=5),
)
rows = st.lists(st.lists(cells, min_size=2, max_size=5).map(",".join), max_size=12)
headers = st.lists(st.sampled_from(sorted(COLUMNS)), min_size=2, max_size=5).map(",".join)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=200), st.tuples(headers, rows).map(lambda t: "\n".join([t[0], *t[1]]).encode())
    )
)
def test_any_file_is_read_or_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "any"
    path.write_bytes(content)
    recordings, refused = read(path)
    assert recordings is not None or refused.startswith(str(path))
    for recording in recordings or ():
        assert replay(recording).phase


sources = st.sampled_from(["battery", "battery", "battery", "utility", "unknown", "off", "bypass"])
numbers = st.sampled_from(["", "", "0", "5", "60", "400", "99.5", "1e9", "-3"])


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 9, 400]), sources, numbers, numbers, numbers), min_size=1, max_size=40
    )
)
def test_any_readings_are_decided(value: list[tuple[int, str, str, str, str]], tmp_path: Path) -> None:
    """Whatever a UPS has said, in whatever order: the replay ends, and says the same again."""
    t_s, lines = 0, []
    for gap_s, source, runtime_s, charge_pct, load_pct in value:
        t_s += gap_s
        lines.append(f"{t_s},u,s,{source},{runtime_s},{charge_pct},{load_pct}")
    path = tmp_path / "any.csv"
    path.write_text(HEAD + "\n".join(lines), encoding="utf-8")
    (recording,) = load(str(path), WANTED)
    assert replay(recording) == replay(recording)
