"""The journal's promise: what was acknowledged is there after any death, in any version, for any reader."""

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from powerguard.core.model.actions import Action, EnsurePolicy, Grade, Level, Note, PowerOff, ResumeTrainer
from powerguard.core.model.events import Done, Failed, OutputSource, Reading, Tick
from powerguard.core.model.policy import BatteryModel, Learned, Need
from powerguard.core.model.state import Battery, Feed, Holding, OnBattery, Outage, Shutdown, State, Supplied
from powerguard.daemon.journal import (
    Entry,
    Journal,
    JournalError,
    JournalLimits,
    Loaded,
    OutageRecord,
    Recorded,
    RecordedEvents,
    Retention,
    counters,
    read_all,
    read_only,
    recent,
)
from powerguard.daemon.journal import history as query_history
from powerguard.daemon.journal import outage as query_outage
from powerguard.daemon.journal.queries import LEARNED, LOST_ALL, MODEL
from powerguard.daemon.journal.records import Record
from powerguard.daemon.journal.store import MIGRATIONS, Batch, Store
from tests.daemon.journal_writer import loaded_once

WALL = 1_795_000_000.0
LONG_S = 60.0
PATIENT = JournalLimits(append_s=LONG_S, load_s=LONG_S, read_s=LONG_S)
"""What a busy machine takes is no fault of the disk's."""


def on_battery(serial: int, outage: str = "o-1", since_s: float = 100.0) -> State:
    return State(phase=OnBattery(outage=Outage(id=outage, since_s=since_s, grade=Grade.FULL)), serial=serial)


def policy(serial: int, outage: str = "o-1") -> EnsurePolicy:
    return EnsurePolicy(id=f"{outage}-{serial}", by_s=500.0, outage=outage)


@asynccontextmanager
async def opened(
    path: Path, *, boot_id: str = "boot-1", limits: JournalLimits | None = None, retention: Retention | None = None
) -> AsyncIterator[tuple[Journal, Loaded]]:
    journal = Journal(path, boot_id=boot_id, wall=lambda: WALL, limits=limits or PATIENT, retention=retention)
    loaded = await journal.load()
    try:
        yield journal, loaded
    finally:
        assert await journal.close(LONG_S)


async def test_a_first_start_knows_nothing_and_is_durable(tmp_path: Path) -> None:
    async with opened(tmp_path / "state folder" / "journal.db") as (journal, loaded):
        assert loaded == Loaded(durable=True)
        assert journal.health.durable
    assert (tmp_path / "state folder" / "journal.db").stat().st_mode & 0o007 == 0, "the story is not for everybody"


async def test_the_next_daemon_continues_the_same_outage(tmp_path: Path) -> None:
    """State, open outage, counters and actions in flight survive a restart; what has an outcome is not repeated."""
    path = tmp_path / "journal.db"
    resume = ResumeTrainer(id="o-1-3", by_s=9.0, trainer="llm", outage="o-1")
    async with opened(path) as (journal, _):
        journal.count("outages")
        assert await journal.append(Entry(at_s=108.0, state=on_battery(2), actions=(policy(1), policy(2))))
        done = Done(at_s=109.0, action=policy(1), took_s=1.0, detail=(("policy", "always-on"), ("verified", True)))
        assert await journal.append(Entry(at_s=109.0, event=done, state=on_battery(3), actions=(resume,)))
        failed = Failed(at_s=110.0, action=policy(2), took_s=2.0, reason="no answer from 10.0.0.9")
        assert await journal.append(Entry(at_s=110.0, event=failed, state=on_battery(4)))
        journal.count("outages", 2)
    async with opened(path, boot_id="boot-2") as (journal, loaded):
        assert loaded.state == on_battery(4)
        assert (loaded.boot_id, loaded.at_s, loaded.wall) == ("boot-1", 110.0, WALL)
        assert loaded.in_flight == (resume,)
        assert loaded.outage is not None
        assert (loaded.outage.id, loaded.outage.started_at_s, loaded.outage.started_wall) == ("o-1", 100.0, WALL - 8.0)
        assert journal.open_outage == loaded.outage
        assert dict(journal.counters) == {"outages": 3.0}


async def test_an_outage_is_reported_from_beginning_to_end(tmp_path: Path) -> None:
    """History, figures and the story of one outage, from the daemon and from the command line's reader alike."""
    path = tmp_path / "journal.db"
    reading = Reading(at_s=104.0, ups="a", source="snmp", output_source=OutputSource.BATTERY, runtime_s=600.0)
    note = Note(event="outage_confirmed", because="two readings", level=Level.WARNING, numbers=(("runtime_s", 600.0),))
    async with opened(path) as (journal, _):
        await journal.append(Entry(at_s=50.0, event=Tick(at_s=50.0), state=State()))
        await journal.append(
            Entry(at_s=104.0, event=reading, state=on_battery(1), notes=(note,), figures=(("steps", 7),))
        )
        holding = Holding(outage=Outage(id="o-1", since_s=100.0, grade=Grade.FULL), began_s=120.0)
        await journal.append(
            Entry(at_s=120.0, state=State(phase=holding), figures=(("checkpoint_s", 12.5), ("steps", 8)))
        )
        await journal.append(Entry(at_s=160.0, state=State(), outcome="resumed in place", figures=(("lost_steps", 0),)))
        await journal.append(Entry(at_s=170.0, state=State(), outcome="no outage, so nobody's outcome"))
        (record,) = await journal.history()
        result = await journal.outage("o-1")
    assert (record.ended_at_s, record.outcome) == (160.0, "resumed in place")
    assert record.figures == {"steps": 8, "checkpoint_s": 12.5, "lost_steps": 0}
    assert result is not None
    assert [(line.kind, line.event, line.because) for line in result[1]] == [
        ("event", "Reading", ""),
        ("note", "outage_confirmed", "two readings"),
    ]
    assert result[1][1].payload["level"] == "warning"
    with read_only(path) as db:
        assert query_history(db, 10) == (record,)
        assert query_outage(db, "o-1") == result
        assert query_outage(db, "o-2") is None
        assert [line.event for line in recent(db, 2)] == ["Reading", "outage_confirmed"]


async def test_one_outage_after_the_other_without_a_gap(tmp_path: Path) -> None:
    """A new id ends the old outage even when no step in between was online."""
    async with opened(tmp_path / "journal.db") as (journal, _):
        await journal.append(Entry(at_s=104.0, state=on_battery(1)))
        await journal.append(Entry(at_s=304.0, state=on_battery(2, "o-2", 300.0), outcome=""))
        newest, oldest = await journal.history()
    assert (newest.id, newest.ended_wall) == ("o-2", None)
    assert (oldest.id, oldest.ended_at_s) == ("o-1", 304.0)


async def test_many_appends_at_once_are_all_durable_and_in_order(tmp_path: Path) -> None:
    """Steps that pile up while a batch is being synced go into the next one together."""
    async with opened(tmp_path / "journal.db") as (journal, _), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(journal.append(Entry(at_s=float(n), state=on_battery(n), actions=(policy(n),))))
            for n in range(1, 200)
        ]
    assert all(task.result() for task in tasks)
    with read_only(tmp_path / "journal.db") as db:
        loaded, _ = read_all(db)
    assert [action.id for action in loaded.in_flight] == [f"o-1-{n}" for n in range(1, 200)]
    assert loaded.state == on_battery(199)


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """A process that appends in a loop is killed at random moments; every acknowledged step is there, in order."""
    path = tmp_path / "journal.db"
    chance = random.Random(20261121)
    acknowledged = 0
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent.with_name("journal_writer.py")), str(path)],
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(chance.randrange(1, 60))]
        time.sleep(chance.uniform(0.0, 0.02))
        writer.kill()
        rest, _ = writer.communicate()
        assert writer.returncode == -signal.SIGKILL, rest.decode()
        whole = (b"".join(lines) + rest).split(b"\n")[:-1]
        assert int(whole[0]) > acknowledged, "the next daemon went on from there"
        acknowledged = int(whole[-1])
        with read_only(path) as db:
            loaded, _ = read_all(db)
            serials = [
                int(str(row[0]).rpartition("-")[2]) for row in db.execute("SELECT action FROM entries ORDER BY seq")
            ]
        assert loaded.state is not None
        assert acknowledged <= loaded.state.serial <= acknowledged + 1, "at most the one in flight is more"
        assert serials == list(range(1, loaded.state.serial + 1))
        assert loaded.counters["steps"] == loaded.state.serial
        assert loaded.outage is not None
        acknowledged = loaded.state.serial
    assert acknowledged > 50


def test_a_reader_in_another_process_sees_every_commit_while_we_write(tmp_path: Path) -> None:
    """The command line reads beside the daemon: neither waits for, nor breaks, the other."""
    path = tmp_path / "journal.db"
    writer = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent.with_name("journal_writer.py")), str(path)], stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None
        for _ in range(100):
            said = int(writer.stdout.readline())
            with read_only(path) as db:
                loaded, _ = read_all(db)
            assert loaded.state is not None
            assert loaded.state.serial >= said
    finally:
        writer.kill()
        writer.communicate()


READ = """
import os, sys, urllib.parse  # pathlib loads it late from Python 3.13 on, and this user may not read root's Python
from pathlib import Path
from powerguard.daemon.journal import read_all, read_only
os.setgid(65534); os.setuid(65534)
with read_only(Path(sys.argv[1])) as db:
    print(read_all(db)[0].state.serial)
"""


def read_as_nobody(path: Path) -> tuple[str, str]:
    ended = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    return ended.stdout, ended.stderr


@pytest.mark.root
@pytest.mark.parametrize("clean", [True, False], ids=["after a clean stop", "while it is held"])
async def test_who_may_only_read_reads(clean: bool) -> None:
    """SQLite wants to write beside a WAL file even to read it; a group member who cannot still gets the story."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "journal.db"
        path.parent.chmod(0o755)
        journal = Journal(path, boot_id="boot-1", limits=PATIENT)
        await journal.load()
        await journal.append(Entry(at_s=1.0, state=State(serial=41)))
        if clean:
            await journal.close(LONG_S)
        for each in path.parent.iterdir():
            each.chmod(0o644)
        assert await asyncio.to_thread(read_as_nobody, path) == ("41\n", "")
        if not clean:
            await journal.close(LONG_S)


def test_reading_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"no journal here: "), read_only(tmp_path / "none.db"):
        pass
    noise = tmp_path / "noise.db"
    noise.write_bytes(b"not a database" * 100)
    with pytest.raises(JournalError, match="file is not a database"), read_only(noise):
        pass
    other = tmp_path / "other.db"
    sqlite3.connect(other).execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(JournalError, match="not a powerguard journal"), read_only(other):
        pass
    pipe = tmp_path / "pipe.db"
    os.mkfifo(pipe)
    with pytest.raises(JournalError, match=r"pipe\.db: is not a file"), read_only(pipe):
        pass


# --- Versions ------------------------------------------------------------------------------------------------------

SECOND = (
    "ALTER TABLE outages ADD COLUMN note TEXT NOT NULL DEFAULT ''",
    "CREATE TABLE annotations (id TEXT PRIMARY KEY)",
)


async def written(path: Path, make: Callable[[Path], Store] = Store) -> None:
    journal = Journal(path, boot_id="boot-1", wall=lambda: WALL, store=make(path), limits=PATIENT)
    await journal.load()
    assert await journal.append(Entry(at_s=104.0, state=on_battery(7), actions=(policy(7),)))
    await journal.close(LONG_S)


async def test_an_older_file_is_brought_up_to_date(tmp_path: Path) -> None:
    """This version becomes the next with everything in it, and the next is written and read from then on."""
    path = tmp_path / "journal.db"
    await written(path)
    journal = Journal(path, boot_id="boot-1", store=Store(path, migrations=(*MIGRATIONS, SECOND)), limits=PATIENT)
    loaded = await journal.load()
    assert (loaded.state, loaded.in_flight) == (on_battery(7), (policy(7),))
    assert await journal.append(Entry(at_s=105.0, state=on_battery(8)))
    await journal.close(LONG_S)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    assert db.execute("SELECT note FROM outages").fetchall() == [("",)]
    db.close()


def test_a_migration_is_all_or_nothing(tmp_path: Path) -> None:
    """A daemon killed (here: failing) half-way through leaves the old version, which the next one migrates again."""
    path = tmp_path / "journal.db"
    loaded_once(Store(path))
    db = sqlite3.connect(path)
    broken = (SECOND[0], "INSERT INTO snapshot (one) VALUES (2)")  # breaks a constraint
    store = Store(path, migrations=(*MIGRATIONS, broken))
    loaded, _ = store.load()
    assert not loaded.durable
    assert "constraint failed" in loaded.trouble
    assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    db.close()
    loaded_once(Store(path, migrations=(*MIGRATIONS, SECOND)))


async def test_a_newer_file_is_set_aside_and_kept(tmp_path: Path) -> None:
    """A downgraded daemon must not write a schema that it does not know."""
    path = tmp_path / "journal.db"
    await written(path, lambda path: Store(path, migrations=(*MIGRATIONS, SECOND)))
    async with opened(path) as (journal, loaded):
        assert loaded.state is None
        newer = f"schema version {len(MIGRATIONS) + 1}, written by a newer powerguard; kept as journal.db.newer-1"
        assert newer in loaded.trouble
        assert await journal.append(Entry(at_s=1.0, state=State()))
    newer_again = loaded_once(Store(tmp_path / "journal.db.newer-1", migrations=(*MIGRATIONS, SECOND)))
    assert newer_again.state == on_battery(7)


async def test_what_another_boot_has_ordered_is_not_in_flight_in_this_one(tmp_path: Path) -> None:
    """A power-off without an outcome belongs to the boot that ordered it: repeated in the next one it strikes twice."""
    path = tmp_path / "journal.db"
    off = PowerOff(id="o-1-9", by_s=5000.0, outage="o-1", grade=Grade.FULL, force_after_s=110.0)
    async with opened(path) as (journal, _):
        assert await journal.append(Entry(at_s=108.0, state=on_battery(2), actions=(off,)))
    async with opened(path, boot_id="boot-2") as (journal, loaded):
        assert loaded.in_flight == (off,), "the boot after it still hears of it"
        assert await journal.append(Entry(at_s=20.0, state=on_battery(3), actions=(policy(4),)))
    async with opened(path, boot_id="boot-2") as (_, loaded):
        assert loaded.in_flight == (policy(4),)


async def test_a_state_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    """An edited or foreign state is told; outages, actions and counters are still there."""
    path = tmp_path / "journal.db"
    await written(path)
    db = sqlite3.connect(path)
    db.execute("UPDATE snapshot SET digest = '', state = ?", ('{"kind": "State", "phase": {"kind": "Party"}}',))
    db.commit()
    db.close()
    async with opened(path) as (_, loaded):
        assert loaded.state is None
        assert "State.phase: unknown kind 'Party'" in loaded.trouble
        assert loaded.outage is not None
        assert loaded.in_flight == (policy(7),)


def spoiled(path: Path, spoil: Callable[[dict[str, Any]], object]) -> None:
    """Edit the stored state."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        plain = json.loads(db.execute("SELECT state FROM snapshot").fetchone()[0])
        spoil(plain)
        db.execute("UPDATE snapshot SET digest = '', state = ?", (json.dumps(plain),))
        db.commit()


NAN = float("nan")
LATCHED = State(
    phase=Shutdown(
        outage=Outage(id="o-1", since_s=100.0, grade=Grade.FULL), boot_id="boot-1", latched_s=150.0, because="budget"
    ),
    battery=Battery(at_s=151.0, used=0.31, health=0.7, model=BatteryModel(recharge_s=9000.0)),
    learned=Learned(needs=(Need(of="stop", name="", seconds=(12.0,)),)),
    upses=(Supplied(ups="a", feed=Feed(), battery=Battery(used=0.2, model=BatteryModel(recharge_s=9000.0))),),
    serial=7,
)
NO_MODEL = replace(
    LATCHED,
    battery=replace(LATCHED.battery, model=BatteryModel()),
    upses=tuple(replace(each, battery=replace(each.battery, model=BatteryModel())) for each in LATCHED.upses),
)


@pytest.mark.parametrize(
    ("spoil", "left", "lost", "where"),
    [
        (
            lambda s: s["learned"]["needs"][0].update(seconds=[NAN]),
            replace(LATCHED, learned=Learned()),
            LEARNED,
            "State.learned.needs[0].seconds[0]: expected a finite number, found float nan",
        ),
        (lambda s: s.update(learned=[5]), replace(LATCHED, learned=Learned()), LEARNED, "State.learned"),
        (lambda s: s["battery"]["model"].update(recharge_s=NAN), NO_MODEL, MODEL, "State.battery.model.recharge_s"),
        (lambda s: s["upses"][0]["battery"].update(model={"kind": "Need"}), NO_MODEL, MODEL, "upses[0].battery.model"),
        (
            lambda s: (s.update(learned=5), s["battery"].update(model=5)),
            replace(NO_MODEL, learned=Learned()),
            f"{LEARNED} and {MODEL}",
            "State.battery.model",
        ),
        (lambda s: s["battery"].update(used=NAN), None, LOST_ALL, "State.battery.used"),
        (lambda s: s["upses"].append(5), None, LOST_ALL, "State.upses[1]"),
    ],
    ids=["nan-in-needs", "learned-is-a-list", "nan-in-model", "model-of-one-ups", "both", "account", "upses"],
)
async def test_what_was_learned_is_lost_before_the_latch_is(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object], left: State | None, lost: str, where: str
) -> None:
    """One bad number among the measurements costs the measurements, not the running outage; and it is said."""
    path = tmp_path / "journal.sqlite"
    async with opened(path) as (journal, _):
        assert await journal.append(Entry(at_s=151.0, state=LATCHED))
    spoiled(path, spoil)
    with capture_logs() as logged:
        async with opened(path) as (journal, loaded):
            assert loaded.state == left
            assert (loaded.lost, journal.lost) == (lost, lost)
            assert where in loaded.trouble
            assert loaded.outage is not None
    assert [(each["event"], each["lost"]) for each in logged] == [("history_lost", lost)]


@pytest.mark.parametrize("text", ["garbage", "[" * 100_000, "[]", "5"], ids=["no-json", "deep", "list", "number"])
async def test_a_state_that_is_no_state_is_lost_and_reported(tmp_path: Path, text: str) -> None:
    """Whatever stands there, the outages and counters beside it are still read."""
    path = tmp_path / "journal.sqlite"
    await written(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE snapshot SET digest = '', state = ?", (text,))
        db.commit()
    async with opened(path) as (_, loaded):
        assert (loaded.state, loaded.lost) == (None, LOST_ALL)
        assert loaded.outage is not None


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        ("UPDATE snapshot SET digest = '', at_s = 'x'", (False, True, True)),
        ("UPDATE snapshot SET digest = '', wall = 9e999", (False, True, True)),
        ("UPDATE outages SET started_wall = 'x'", (True, False, True)),
        ("UPDATE outages SET ended_wall = ''", (True, False, True)),
        ("UPDATE entries SET at_s = 'x'", (True, True, False)),
        ("UPDATE entries SET wall = -9e999", (True, True, False)),
        ("UPDATE entries SET event = x'00'", (True, True, False)),
        ("UPDATE counters SET value = 'x'", (True, True, True)),
    ],
)
async def test_a_row_without_its_moment_costs_only_itself(
    tmp_path: Path, damage: str, kept: tuple[bool, bool, bool]
) -> None:
    """SQLite finds nothing wrong with text in a column of numbers; the daemon starts, counts on, and can tell."""
    path = tmp_path / "journal.sqlite"
    async with opened(path) as (journal, _):
        journal.count("starts")
        assert await journal.append(Entry(at_s=104.0, state=on_battery(7), actions=(policy(7),)))
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(damage)
        db.commit()
    with read_only(path) as db:
        assert (query_outage(db, "o-1") is not None, bool(recent(db, 100))) == kept[1:]
    async with opened(path) as (journal, loaded):
        assert (loaded.state is not None, loaded.outage is not None) == kept[:2]
        assert bool(loaded.lost) is not kept[0]
        assert math.isfinite(loaded.at_s + loaded.wall)
        journal.count("starts")
        assert await journal.append(Entry(at_s=105.0, state=on_battery(8)))
    with read_only(path) as db:
        assert counters(db)["starts"] >= 1.0


# --- What a hostile peer can put into a step -------------------------------------------------------------------------


async def test_a_hostile_string_is_stored(tmp_path: Path) -> None:
    """Quotes, NULs and lone surrogates from a UPS neither break the statement nor keep the step off the disk."""
    name = "x'; DROP TABLE entries; --\x00\ud800\n"
    state = State(alarms=(name,), phase=OnBattery(outage=Outage(id=name, since_s=1.0, grade=Grade.BARE)))
    action: Action = EnsurePolicy(id=name, by_s=1.0, outage=name)
    path = tmp_path / "journal.db"
    async with opened(path) as (journal, _):
        note = Note(event=name, because=name, numbers=((name, name),))
        assert await journal.append(Entry(at_s=2.0, state=state, actions=(action,), notes=(note,)))
        done = Done(at_s=3.0, action=action, took_s=1.0, detail=((name, name),))
        assert await journal.append(Entry(at_s=3.0, event=done, state=state, figures=((name, name),)))
    async with opened(path) as (_, loaded):
        assert loaded.state == state
        assert loaded.in_flight == ()


async def test_what_cannot_be_written_does_not_keep_the_rest_off_the_disk(tmp_path: Path) -> None:
    """Infinity in a state or a figure is a bug; it is told, that step is not called durable, and the next one is."""
    path = tmp_path / "journal.db"
    async with opened(path) as (journal, _):
        assert not await journal.append(Entry(at_s=1.0, state=State(transfers=(float("inf"),)), actions=(policy(1),)))
        assert not await journal.append(Entry(at_s=float("nan"), state=State(), figures=(("x", float("inf")),)))
        assert journal.health.durable
        assert await journal.append(Entry(at_s=2.0, state=State(serial=3)))
    async with opened(path) as (_, loaded):
        assert loaded.state == State(serial=3)
        assert loaded.in_flight == (policy(1),)


# --- Retention -------------------------------------------------------------------------------------------------------


async def test_retention_bounds_outages_and_quiet_lines_but_never_the_outage_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    keep = Retention(outages=5, quiet_lines=20)
    async with opened(path, limits=replace(PATIENT, prune_every=10), retention=keep) as (journal, _):
        await journal.append(Entry(at_s=1.0, state=on_battery(0, "first", 1.0), actions=(policy(0, "first"),)))
        for n in range(1, 41):
            at_s = 100.0 * n
            await journal.append(Entry(at_s=at_s, state=on_battery(n, f"o-{n}", at_s), actions=(policy(n, f"o-{n}"),)))
            await journal.append(Entry(at_s=at_s + 9, event=Tick(at_s=at_s), state=State()))
            await journal.append(Entry(at_s=at_s + 10, event=Tick(at_s=at_s), state=State()))
        for n in range(60):
            await journal.append(Entry(at_s=9000.0 + n, state=on_battery(n, "runs", 9000.0), event=Tick(at_s=9000.0)))
    with read_only(path) as db:
        kept = [each.id for each in query_history(db, 100)]
        assert set(kept) <= {"runs", *(f"o-{n}" for n in range(30, 41))}
        assert {"runs", "o-40", "o-39"} <= set(kept)
        quiet = db.execute("SELECT count(*) FROM entries WHERE outage IS NULL").fetchone()[0]
        assert 10 <= quiet <= 40
        assert db.execute("SELECT count(*) FROM entries WHERE outage = 'runs'").fetchone() == (60,)
        orphans = "SELECT count(*) FROM actions WHERE outage NOT IN (SELECT id FROM outages)"
        assert db.execute(orphans).fetchone() == (0,)


def test_a_long_outage_goes_with_all_that_was_recorded_of_it(tmp_path: Path) -> None:
    """Its inputs go in smaller chunks than its lines; what is left without its outage would stay in the file."""
    path = tmp_path / "journal.db"
    store = Store(path, Retention(outages=1))
    store.load()
    rows = tuple(Recorded(boot_id="b", at_s=1.0, wall=WALL, heard=RecordedEvents(outage="long")) for _ in range(1000))
    ended = [
        OutageRecord(id=name, boot_id="b", started_at_s=1.0, started_wall=WALL, ended_at_s=2.0, ended_wall=WALL)
        for name in ("long", "next")
    ]
    store.write(Batch(records=(Record(outages=tuple(ended), recorded=rows),)))
    while store.prune(None):
        pass
    store.close()
    with read_only(path) as db:
        assert [each.id for each in query_history(db, 10)] == ["next"]
        assert db.execute("SELECT count(*) FROM recorded").fetchone() == (0,)


def test_the_file_stays_small_through_an_outage_without_end(tmp_path: Path) -> None:
    """Weeks on a generator that the UPS calls battery: the oldest inputs go, decisions and outcomes stay."""
    path = tmp_path / "journal.db"
    store = Store(path, Retention(size_bytes=1_000_000))
    store.load()
    journal = Journal(path, boot_id="b", store=store)  # only for its way of making records
    reading = Reading(at_s=1.0, ups="a", source="snmp", output_source=OutputSource.BATTERY, alarms=("x" * 400,))
    from powerguard.daemon.journal.records import prepare

    for turn in range(8):
        records = tuple(
            prepare(
                Entry(
                    at_s=float(n),
                    event=reading,
                    state=on_battery(n),
                    notes=(Note(event="a_b", because="c"),) * (n == 0),
                ),
                journal.open_outage,
                "b",
                WALL,
            )
            for n in range(1000)
        )
        store.write(Batch(records=records, snapshot=records[-1].snapshot, open_outage="o-1"))
        while store.prune("o-1"):
            pass
        assert path.stat().st_size < 2_500_000, f"turn {turn}"
    with read_only(path) as db:
        assert db.execute("SELECT count(*) FROM entries WHERE kind = 'note'").fetchone() == (8,)
        assert query_history(db, 10)[0].ended_wall is None
    store.close()
