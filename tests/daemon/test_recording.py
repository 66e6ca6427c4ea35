"""What is heard in an outage is in the journal, whole and small, and never in the way of an action."""

import asyncio
import dataclasses
import itertools
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.core.model.actions import Conduct, EnsurePolicy, Grade
from powerguard.core.model.events import (
    Abort,
    CheckpointProgress,
    Done,
    Event,
    Failed,
    OutputSource,
    Reading,
    SourceFailed,
    Tick,
    TrainerSeen,
)
from powerguard.core.model.serialisation import to_plain
from powerguard.core.model.state import OnBattery, Online, Outage, State
from powerguard.daemon.journal import (
    Entry,
    Journal,
    JournalLimits,
    Recorded,
    RecordedEvents,
    ReplayStart,
    Retention,
    read_only,
    recording,
)
from powerguard.daemon.journal.records import BEFORE_S, LIMIT_EVENTS, QUICK_EVENTS, Recorder, joined, pack, unpack
from powerguard.daemon.journal.store import MIGRATIONS, Store
from tests.daemon.journal.test_faults import Held
from tests.daemon.journal_writer import loaded_once
from tests.daemon.looped import POLICY, World, in_virtual_time, until

WALL = 1_795_000_000.0
OUTAGE = State(phase=OnBattery(outage=Outage(id="o-1", since_s=100.0, grade=Grade.FULL)))
NEXT = State(phase=OnBattery(outage=Outage(id="o-2", since_s=900.0, grade=Grade.FULL)))


def reading(at_s: float, **fields: object) -> Reading:
    result = Reading(at_s=at_s, ups="a", source="snmp", output_source=OutputSource.BATTERY, charge_pct=80.0)
    return dataclasses.replace(result, **fields)  # type: ignore[arg-type]


# --- Packing ----------------------------------------------------------------------------------------------------------

numbers = st.none() | st.floats(0.0, 100.0)
readings = st.builds(
    Reading,
    at_s=st.floats(0.0, 1e6),
    ups=st.sampled_from(["a", "b"]),
    source=st.sampled_from(["snmp", "nut"]),
    output_source=st.sampled_from(OutputSource),
    runtime_s=numbers,
    charge_pct=numbers,
    load_pct=numbers,
    input_present=st.none() | st.booleans(),
    low_battery=st.booleans(),
    alarms=st.lists(st.text(max_size=4), max_size=3).map(tuple),
)
seen = st.builds(
    TrainerSeen,
    at_s=st.floats(0.0, 1e6),
    trainer=st.sampled_from(["llm", "vlm"]),
    alive=st.booleans(),
    conduct=st.sampled_from(Conduct),
    step=st.none() | st.integers(0, 10**9),
)
failures = st.builds(SourceFailed, at_s=st.floats(0, 9), ups=st.just("a"), source=st.just("snmp"), reason=st.text())
progress = st.builds(
    CheckpointProgress, at_s=st.floats(0, 9), trainer=st.just("llm"), action_id=st.text(max_size=3), stage=st.text()
)
ticks = st.builds(Tick, at_s=st.floats(0.0, 1e6))
orders = st.builds(EnsurePolicy, id=st.text(max_size=3), by_s=st.floats(0.0, 1e6), outage=st.just("o-1"))
outcomes = st.builds(Done, at_s=st.floats(0.0, 1e6), action=orders, took_s=st.floats(0.0, 9.0)) | st.builds(
    Failed, at_s=st.floats(0.0, 1e6), action=orders, took_s=st.floats(0.0, 9.0), reason=st.text()
)


@settings(deadline=None)
@given(st.lists(readings | seen | failures | progress | ticks | outcomes, max_size=30), st.integers(0, 9))
def test_what_is_packed_is_unpacked(events: list[Event], dropped: int) -> None:
    """Whatever sources, trainers and effectors report, in any order: the order stays, and no value is lost."""
    heard = RecordedEvents(outage="o-1", events=tuple(events), dropped=dropped)
    assert unpack("o-1", pack(heard)) == heard


def test_a_reading_a_second_is_small() -> None:
    """An hour on battery must fit many times over, beside everything else. Four ticks a second come with it."""
    provenance = tuple((name, "1.3.6.1.4.1.318.1.1.1.2.2.3.0") for name in ("runtime_s", "charge_pct", "load_pct"))
    events = tuple(
        reading(1000.0 + n, runtime_s=500.0 - n, charge_pct=90.1 - n, load_pct=75.3, on_battery_s=n + 0.5, watts=4000.0)
        for n in range(5)
    )
    ticks = tuple(Tick(at_s=123456.789012345 + 0.25 * n) for n in range(5 * 4))
    whole = tuple(dataclasses.replace(event, provenance=provenance) for event in events)
    text = pack(RecordedEvents(outage="o-1", events=whole + ticks))
    assert len(text) < 5 * 200
    assert unpack("o-1", text).events == events + ticks, "all but the provenance, by which nothing is decided"


def test_what_cannot_be_written_costs_only_itself() -> None:
    """NaN where a number is meant: the machine takes such a reading for one that tells nothing there, and so do we."""
    lost = (reading(float("inf")), Tick(at_s=float("nan")))
    events = (reading(1.0), reading(2.0, runtime_s=float("nan")), *lost, reading(4.0))
    heard = unpack("o-1", pack(RecordedEvents(outage="o-1", events=events)))
    assert [(event.at_s, event.runtime_s) for event in heard.events if isinstance(event, Reading)] == [
        (1.0, None),
        (2.0, None),
        (4.0, None),
    ]
    assert heard.dropped == len(lost)


@pytest.mark.parametrize(
    ("text", "events", "dropped"),
    [
        ("", 0, 1),
        ("[" * 100_000, 0, 1),
        ("[]", 0, 1),
        ('{"events":7}', 0, 0),
        ('{"events":[{"kind":["x"]},{"kind":"Tick","at_s":1.5}]}', 1, 1),
        ('{"events":[{"kind":{}},{"kind":"Tick","at_s":1.5,"ups":[]},{"kind":"Tick","at_s":2.5}]}', 2, 1),
        ('{"events":[],"dropped":-5}', 0, 0),
        ('{"events":[],"dropped":true}', 0, 0),
        ('{"events":[{"at_s":1.5},{"kind":"Tick","at_s":1.5},{"at_s":2.5}]}', 2, 1),
        ('{"events":[7,{"kind":"Tomorrow","at_s":1}],"dropped":"x"}', 1, 1),
        ('{"events":[true,"7",null,NaN,7.5]}', 1, 4),
        ('{"events":[{"kind":"Tick","at_s":1.5,"tomorrow":1}],"start":{"kind":"Start"}}', 1, 1),
    ],
)
def test_a_damaged_row_is_counted(text: str, events: int, dropped: int) -> None:
    heard = unpack("o-1", text)
    assert (len(heard.events), heard.dropped, heard.start) == (events, dropped, None)


def test_rows_of_one_life_are_one() -> None:
    """A restart begins anew, as does another boot."""
    start = ReplayStart(at_s=5.0, policy=POLICY, state=State())

    def row(boot_id: str, *events: Event, start: ReplayStart | None = None) -> Recorded:
        return Recorded(
            boot_id=boot_id, at_s=1.0, wall=2.0, heard=RecordedEvents(outage="o", start=start, events=events)
        )

    rows = joined([row("b", Tick(at_s=1), start=start), row("b", Tick(at_s=2)), row("b", start=start), row("c")])
    assert [(each.boot_id, len(each.heard.events)) for each in rows] == [("b", 2), ("b", 0), ("c", 0)]


# --- Gathering --------------------------------------------------------------------------------------------------------


def test_the_minute_before_belongs_to_the_outage() -> None:
    """It begins with the state in which the oldest of its events was heard, not with that of now."""
    recorder = Recorder()
    for n in range(200):
        recorder.hear(reading(float(n)), float(n), State(serial=n), State(serial=n + 1), POLICY)
    recorder.hear(Tick(at_s=199.5), 199.5, State(serial=200), State(serial=200), POLICY)
    recorder.hear(reading(200.0), 200.0, State(serial=200), OUTAGE, POLICY)
    assert recorder.take(hurry=True) == (), "actions wait for this entry"
    (heard,) = recorder.take(hurry=False)
    assert heard.outage == "o-1"
    assert heard.start == ReplayStart(at_s=200.0 - BEFORE_S, policy=POLICY, state=State(serial=140))
    assert [event.at_s for event in heard.events] == [*(140.0 + n for n in range(60)), 199.5, 200.0]
    assert recorder.take(hurry=False) == ()


def test_after_the_outage_only_the_last_minute_is_kept() -> None:
    """What led to the end belongs to the outage; what follows does not."""
    recorder = Recorder()
    policy = EnsurePolicy(id="1", by_s=9.0, outage="o-1")
    recorder.hear(reading(1.0), 1.0, State(), OUTAGE, POLICY)
    recorder.hear(Done(at_s=2.0, action=policy, took_s=1.0), 2.0, OUTAGE, OUTAGE, POLICY)
    recorder.hear(Abort(at_s=3.0, who="alice"), 3.0, OUTAGE, OUTAGE, POLICY)
    recorder.hear(reading(4.0), 4.0, OUTAGE, State(), POLICY)
    recorder.hear(reading(5.0), 5.0, State(), State(), POLICY)
    (heard,) = recorder.take(hurry=True)
    assert [event.at_s for event in heard.events] == [1.0, 2.0, 3.0, 4.0]
    recorder.hear(reading(6.0), 6.0, State(serial=7), NEXT, POLICY)
    (heard,) = recorder.take(hurry=True)
    assert (heard.outage, [event.at_s for event in heard.events]) == ("o-2", [5.0, 6.0])


def test_one_outage_after_the_other_is_kept_apart() -> None:
    recorder = Recorder()
    recorder.hear(reading(1.0), 1.0, State(), OUTAGE, POLICY)
    recorder.hear(reading(2.0), 2.0, OUTAGE, State(), POLICY)
    recorder.hear(reading(3.0), 3.0, State(), NEXT, POLICY)
    assert [(heard.outage, len(heard.events)) for heard in recorder.take(hurry=False)] == [("o-1", 2), ("o-2", 1)]


@pytest.mark.parametrize("at_s", [float("nan"), float("inf"), float("-inf"), 1e11])
def test_an_event_of_no_time_is_passed_over(at_s: float) -> None:
    """As by the machine; it must not cost the outage its beginning."""
    recorder = Recorder()
    recorder.hear(reading(at_s), at_s, State(), State(), POLICY)
    recorder.hear(reading(5.0), 5.0, State(), OUTAGE, POLICY)
    recorder.hear(reading(at_s), at_s, OUTAGE, OUTAGE, POLICY)
    (heard,) = recorder.take(hurry=False)
    assert [event.at_s for event in heard.events] == [5.0]
    assert heard.start is not None
    assert heard.start.at_s == 5.0


def test_memory_is_bounded() -> None:
    """A journal that takes nothing for long: the oldest go, and are counted."""
    recorder = Recorder()
    recorder.hear(None, 0.0, State(), OUTAGE, POLICY)
    for n in range(LIMIT_EVENTS + 7):
        recorder.hear(reading(float(n)), float(n), OUTAGE, OUTAGE, POLICY)
    assert recorder.take(hurry=True) == ()
    (heard,) = recorder.take(hurry=False)
    assert (len(heard.events), heard.events[0].at_s, heard.dropped) == (LIMIT_EVENTS, 7.0, 7)
    assert heard.start is not None
    assert heard.start.restored
    assert QUICK_EVENTS < LIMIT_EVENTS


# --- In the journal ---------------------------------------------------------------------------------------------------


LONG_S = 60.0
PATIENT = JournalLimits(append_s=LONG_S, load_s=LONG_S, read_s=LONG_S)
"""What a busy machine takes is no fault of the disk's."""


async def test_it_is_in_the_file_with_the_entry(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, boot_id="boot-1", wall=lambda: WALL, limits=PATIENT)
    await journal.load()
    start = ReplayStart(at_s=90.0, policy=POLICY, state=State(serial=3))
    first = RecordedEvents(outage="o-1", start=start, events=(reading(90.0), reading(91.0)))
    assert await journal.append(Entry(at_s=101.0, state=OUTAGE, heard=(first,)))
    assert await journal.append(
        Entry(at_s=106.0, state=OUTAGE, heard=(RecordedEvents(outage="o-1", events=(reading(105.0),)),))
    )
    assert await journal.close(LONG_S)
    with read_only(path) as db:
        (row,) = recording(db, "o-1")
        assert recording(db, "o-2") == ()
    assert (row.boot_id, row.at_s, row.wall) == ("boot-1", 101.0, WALL)
    assert row.heard == RecordedEvents(outage="o-1", start=start, events=(reading(90.0), reading(91.0), reading(105.0)))


def test_a_journal_of_the_first_version_has_none(tmp_path: Path) -> None:
    """Read beside a daemon that has not been restarted since the upgrade; then brought up to date."""
    path = tmp_path / "journal.db"
    loaded_once(Store(path, migrations=MIGRATIONS[:1]))
    with read_only(path) as db:
        assert recording(db, "o-1") == ()
    loaded_once(Store(path))
    with read_only(path) as db:
        assert recording(db, "o-1") == ()
        assert db.execute("PRAGMA user_version").fetchone() == (3,)


async def test_it_waits_for_a_disk_that_hangs(tmp_path: Path) -> None:
    """Nothing is held up, nothing is lost: when the disk answers again, what was heard meanwhile is on it."""
    path = tmp_path / "journal.db"
    writer = Held()
    writer.held = False
    journal = Journal(path, boot_id="boot-1", writer=writer, limits=JournalLimits(append_s=0.05))
    await journal.load()
    writer.held = True
    for n in range(5):
        heard = RecordedEvents(outage="o-1", events=(reading(100.0 + n),))
        assert not await journal.append(Entry(at_s=100.0 + n, state=OUTAGE, heard=(heard,)))
    writer.release()
    async with asyncio.timeout(60.0):
        while not journal.health.durable:  # noqa: ASYNC110 - what is waited for has no event to wait on
            await asyncio.sleep(0.01)
    with read_only(path) as db:
        (row,) = recording(db, "o-1")
    assert [event.at_s for event in row.heard.events] == [100.0, 101.0, 102.0, 103.0, 104.0]
    assert await journal.close(LONG_S)


async def test_it_goes_with_its_outage(tmp_path: Path) -> None:
    """Retention forgets both, or neither."""
    path = tmp_path / "journal.db"
    store = Store(path, Retention(outages=1))
    journal = Journal(path, boot_id="boot-1", wall=lambda: WALL, limits=PATIENT, store=store)
    await journal.load()
    for n in range(3):
        outage = State(phase=OnBattery(outage=Outage(id=f"o-{n}", since_s=float(n), grade=Grade.FULL)))
        heard = RecordedEvents(outage=f"o-{n}", events=(reading(float(n)),))
        assert await journal.append(Entry(at_s=float(n), state=outage, heard=(heard,)))
    assert await journal.append(Entry(at_s=9.0, state=State()))
    while store.prune(None):
        pass
    assert await journal.close(LONG_S)
    db = sqlite3.connect(path)
    assert db.execute("SELECT DISTINCT outage FROM recorded").fetchall() == [("o-2",)]
    db.close()


# --- In the loop ------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_the_loop_records_every_reading_of_an_outage() -> None:
    """From a minute before the first on battery to the one that ends it, each second, over a restart too."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:
        world = World(Path(folder) / "j.sqlite")
        async with world.running(kill=True) as daemon:
            await until(lambda: daemon.clock() > 1100.0)
            world.ups.utility = False
            await until(lambda: type(daemon.state.phase).__name__ == "EmergencyCheckpoint")
            await until(lambda: not daemon.state.trainers[0].order)
        async with world.running() as daemon:
            await until(lambda: daemon.clock() > 1260.0)
            world.ups.utility = True
            await until(lambda: isinstance(daemon.state.phase, Online))
            await until(lambda: daemon.clock() > 1400.0)
        (outage,) = world.outages()
        with read_only(world.path) as db:
            first, second = recording(db, outage.id)
        assert first.heard.start is not None
        assert second.heard.start is not None
        assert (first.heard.start.restored, second.heard.start.restored) == (False, True)
        assert first.heard.start.policy == world.policy
        at_s = [event.at_s for event in first.heard.events if isinstance(event, Reading)]
        assert outage.started_at_s - at_s[0] == pytest.approx(BEFORE_S, abs=2.0)
        assert max(b - a for a, b in itertools.pairwise(at_s)) <= 1.01, "each reading, not one in five"
        after_s = [event.at_s for event in second.heard.events if isinstance(event, Reading)]
        assert max(b - a for a, b in itertools.pairwise(after_s)) <= 1.01
        assert outage.ended_at_s is not None
        assert after_s[-1] == pytest.approx(outage.ended_at_s, abs=1.01)
        assert to_plain(first.heard.start)


def test_a_start_can_be_packed_with_its_events() -> None:
    start = ReplayStart(at_s=1.0, policy=POLICY, state=OUTAGE)
    heard = RecordedEvents(outage="o-1", start=start, events=(reading(2.0),))
    assert unpack("o-1", pack(heard)) == heard
    broken = dataclasses.replace(start, at_s=float("nan"))
    assert unpack("o-1", pack(RecordedEvents(outage="o-1", start=broken))) == RecordedEvents(outage="o-1", dropped=1)
