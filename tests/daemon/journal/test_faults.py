"""A journal whose disk is full, read-only, damaged, gone or hung: told, kept in memory, never in the way."""

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from powerguard.core.model.actions import EnsurePolicy, Grade, Note
from powerguard.core.model.serialisation import to_plain
from powerguard.core.model.state import OnBattery, Outage, State
from powerguard.daemon.journal import (
    Entry,
    Inline,
    Journal,
    JournalError,
    JournalLimits,
    Loaded,
    read_all,
    read_only,
)
from powerguard.daemon.journal import recent as query_recent
from powerguard.daemon.journal.queries import LOST_ALL
from powerguard.daemon.journal.records import Snapshot, dump
from powerguard.daemon.journal.sqlite import quick_check
from powerguard.daemon.journal.store import Batch, Store
from tests.daemon.journal_writer import Patient, loaded_once
from tests.daemon.looped import in_virtual_time, now_s
from tests.peers.machine import file_size_limit, watched

LONG_S = 60.0
QUICK = JournalLimits(append_s=0.1, load_s=0.1, read_s=0.1, retry_s=0.05)
PATIENT = JournalLimits(append_s=LONG_S, load_s=LONG_S, read_s=LONG_S, retry_s=0.05)
"""For disks that refuse at once: what a busy machine takes is no fault of theirs."""


def step(serial: int) -> Entry:
    phase = OnBattery(outage=Outage(id="o-1", since_s=1.0, grade=Grade.FULL))
    action = EnsurePolicy(id=f"o-1-{serial}", by_s=500.0, outage="o-1")
    return Entry(at_s=float(serial), state=State(phase=phase, serial=serial), actions=(action,))


def serials(path: Path) -> list[int]:
    with read_only(path) as db:
        rows = db.execute("SELECT action FROM entries WHERE kind = 'action' ORDER BY seq").fetchall()
    return [int(str(row[0]).rpartition("-")[2]) for row in rows]


async def until(true: Callable[[], bool]) -> None:
    """Wait for what the journal does by itself, in its own time."""
    async with asyncio.timeout(LONG_S):
        while not true():  # noqa: ASYNC110 - what is waited for has no event to wait on
            await asyncio.sleep(0.01)


class HealthLog:
    """What the journal logs of its health."""

    def __init__(self, logged: Sequence[Mapping[str, Any]]) -> None:
        self._logged = logged

    def of(self, *events: str) -> list[Mapping[str, Any]]:
        return [each for each in self._logged if each["event"] in events]

    @property
    def durable(self) -> list[bool]:
        return [each["event"] == "journal_recovered" for each in self.of("journal_recovered", "journal_not_durable")]

    @property
    def reason(self) -> str:
        return str(self.of("journal_not_durable")[0]["because"])


@pytest.fixture
def health_log() -> Iterator[HealthLog]:
    with capture_logs() as logged:
        yield HealthLog(logged)


# --- Hung --------------------------------------------------------------------------------------------------------


class Held:
    """An executor whose disk does not answer until it is released."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.held = True

    def submit(self, call: Callable[[], None]) -> None:
        if self.held:
            self.calls.append(call)
        else:
            call()

    def release(self) -> None:
        self.held = False
        while self.calls:
            self.calls.pop(0)()

    def close(self, limit_s: float) -> None:
        del limit_s


@in_virtual_time
async def test_a_hung_disk_costs_one_append_its_limit_and_the_others_nothing(
    tmp_path: Path, health_log: HealthLog
) -> None:
    """500 ms once, not once a step: a shutdown has dozens of steps. When the disk is back, everything is on it."""
    path = tmp_path / "journal.db"
    writer = Held()
    writer.held = False
    journal = Journal(path, boot_id="b", writer=writer, reader=Inline())
    await journal.load()
    assert await journal.append(step(1))
    writer.held = True
    began_s = now_s()
    assert not await journal.append(step(2))
    assert now_s() - began_s == pytest.approx(0.5)
    for serial in range(3, 50):
        assert not await journal.append(step(serial))
    assert now_s() - began_s == pytest.approx(0.5)
    assert health_log.durable == [False]
    assert "no answer from the disk in 0.5 s" in health_log.reason
    assert journal.health.waiting == 48
    writer.release()
    await until(lambda: journal.health.durable)
    assert serials(path) == list(range(1, 50))
    assert await journal.append(step(50))
    assert health_log.durable == [False, True]
    assert await journal.close(LONG_S)


class Stuck(Store):
    """A store whose every write waits in the kernel, as far as its thread can tell."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.gate.set()

    def write(self, batch: Batch) -> None:
        self.gate.wait()
        super().write(batch)

    def load(self) -> tuple[Loaded, tuple[object, ...]]:  # type: ignore[override]  # narrower than needed here
        self.gate.wait()
        return super().load()


async def test_the_loop_turns_on_while_the_real_writer_thread_hangs(tmp_path: Path) -> None:
    """A timer keeps its time while an append waits for a thread that does not come back. The best of several counts."""
    for turn in range(4):  # a virtual machine may lose its processor, which looks like our own doing
        store = Stuck(tmp_path / f"journal-{turn}.db")
        journal = Journal(
            tmp_path / f"journal-{turn}.db", boot_id="b", store=store, limits=replace(PATIENT, append_s=0.5)
        )
        await journal.load()
        store.gate.clear()
        async with watched() as machine:
            assert not await journal.append(step(1))
            began_s = time.monotonic()
            assert not await journal.close(limit_s=0.4)
            took_s = time.monotonic() - began_s
        store.gate.set()
        if took_s < 2 + machine.late_s and machine.worst_s < 0.4:
            return
    pytest.fail(f"the loop stood still for {machine.worst_s:.3f} s, and the close took {took_s:.3f} s")


async def test_a_hung_disk_does_not_keep_the_daemon_from_starting(tmp_path: Path, health_log: HealthLog) -> None:
    """The start is bounded too; what is decided meanwhile is on the disk once it answers, counters included."""
    path = tmp_path / "journal.db"
    before = Journal(path, boot_id="a", limits=PATIENT)
    await before.load()
    before.count("outages", 5)
    assert await before.close(LONG_S)
    store = Stuck(path)
    store.gate.clear()
    journal = Journal(path, boot_id="b", store=store, limits=QUICK)
    async with watched() as machine:
        began_s = time.monotonic()
        loaded = await journal.load()
        assert time.monotonic() - began_s < 2 + machine.late_s
    assert loaded == Loaded(trouble=journal.health.reason, lost=LOST_ALL)
    assert "no answer from the disk" in loaded.trouble
    journal.count("outages")
    assert not await journal.append(step(1))
    store.gate.set()
    await until(lambda: health_log.durable == [False, True])
    assert dict(journal.counters) == {"outages": 6.0}
    assert await journal.close(LONG_S)
    with read_only(path) as db:
        after, _ = read_all(db)
    assert after.counters == {"outages": 6.0}
    assert after.state == step(1).state


async def test_a_process_that_stood_still_does_not_forget_what_the_disk_has_answered(
    tmp_path: Path, health_log: HealthLog
) -> None:
    """A virtual machine that was paused, or a host that swaps: the answer is there, and the limit has passed."""
    path = tmp_path / "journal.db"
    before = Journal(path, boot_id="a", limits=PATIENT)
    await before.load()
    assert await before.append(step(1))
    assert await before.close(LONG_S)

    async def stood_still() -> None:
        time.sleep(0.2)  # noqa: ASYNC251 - twice the limit

    limits = replace(PATIENT, load_s=0.1, append_s=0.1)
    journal = Journal(path, boot_id="a", writer=Inline(), limits=limits)
    loaded, _ = await asyncio.gather(journal.load(), stood_still())
    assert loaded.state == step(1).state
    durable, _ = await asyncio.gather(journal.append(step(2)), stood_still())
    assert durable
    assert journal.health.durable
    assert not health_log.of("journal_not_durable", "history_lost")
    assert await journal.close(LONG_S)


@in_virtual_time
async def test_a_hung_reader_gets_an_answer_from_memory(tmp_path: Path) -> None:
    """HTTP asks for the history while the disk hangs: what is known is told, at once from the second time on."""
    reader = Held()
    limits = JournalLimits(read_s=0.4)
    journal = Journal(tmp_path / "journal.db", boot_id="b", writer=Inline(), reader=reader, limits=limits)
    await journal.load()
    await journal.append(step(1))
    began_s = now_s()
    (record,) = await journal.history()
    assert record.id == "o-1"
    assert now_s() - began_s == pytest.approx(0.4)
    result = await journal.outage("o-1")
    assert result is not None
    assert [line.action for line in result[1]] == ["o-1-1"]
    assert await journal.outage("o-9") is None
    assert now_s() - began_s == pytest.approx(0.4)
    assert len(reader.calls) == 1, "a query that hangs is not followed by others"
    reader.release()
    await asyncio.sleep(0)
    assert [each.id for each in await journal.history()] == ["o-1"]
    await journal.close(LONG_S)


async def test_memory_is_bounded_and_what_it_loses_is_reported(tmp_path: Path) -> None:
    """A disk that is gone for days: the newest steps and the newest state are kept, and the gap is told."""
    path = tmp_path / "journal.db"
    writer = Held()
    limits = JournalLimits(append_s=0.01, memory_steps=10)
    journal = Journal(path, boot_id="b", writer=writer, limits=limits)
    for serial in range(1, 41):
        assert not await journal.append(step(serial))
    assert (journal.health.waiting, journal.health.dropped) == (10, 30)
    writer.release()
    await until(lambda: journal.health.durable)
    with read_only(path) as db:
        loaded, _ = read_all(db)
        gaps = [line for line in query_recent(db, 100) if line.kind == "gap"]
    # The first batch was on its way when memory ran full.
    assert serials(path) == [1, *range(31, 41)]
    assert [gap.payload for gap in gaps] == [{"steps": 30}]
    assert loaded.state == step(40).state
    assert journal.health.waiting == 0
    await journal.close(LONG_S)


async def test_a_counter_that_waits_does_not_put_off_the_next_try(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.touch()
    limits = replace(PATIENT, counters_s=3600.0)
    journal = Journal(folder / "journal.db", boot_id="b", limits=limits)
    appended = asyncio.create_task(journal.append(step(1)))
    await asyncio.sleep(0)
    journal.count("outages")
    assert not await appended
    folder.unlink()
    folder.mkdir()
    await until(lambda: journal.health.durable)
    assert serials(folder / "journal.db") == [1]
    await journal.close(LONG_S)


async def test_a_cancelled_append_is_still_written(tmp_path: Path) -> None:
    """The step was decided; that its waiter went away changes nothing."""
    path = tmp_path / "journal.db"
    writer = Held()
    journal = Journal(path, boot_id="b", writer=writer)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(journal.append(step(1)))
        await asyncio.sleep(0.01)
        task.cancel()
    assert task.cancelled()
    writer.release()
    assert await journal.append(step(2))
    assert serials(path) == [1, 2]
    await journal.close(LONG_S)


def test_the_check_for_damage_ends_in_time_on_a_slow_disk() -> None:
    """A journal of 54 MB took 3.7 s where a page took 0.2 ms. By then the daemon had started without its history."""
    looked: list[int] = []

    def slow(value: int) -> int:
        looked.append(value)
        time.sleep(0.02)
        return 1

    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)) as db:
        db.execute("CREATE TABLE rows (value INTEGER)")
        db.executemany("INSERT INTO rows VALUES (?)", ((number,) for number in range(400)))
        db.create_function("slow", 1, slow, deterministic=True)
        db.execute("CREATE TABLE slowly (value INTEGER CHECK (slow(value)))")
        db.execute("PRAGMA ignore_check_constraints = 1")
        db.execute("INSERT INTO slowly SELECT value FROM rows")
        db.execute("PRAGMA ignore_check_constraints = 0")
        looked.clear()
        assert quick_check(db)
        assert 0 < len(looked) < 200
        assert db.execute("SELECT count(*) FROM slowly").fetchone() == (400,), "the next statement is not ended"


# --- Full, read-only, not there --------------------------------------------------------------------------------------


async def test_writes_that_fail_are_kept_and_caught_up(tmp_path: Path, health_log: HealthLog) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, boot_id="b", limits=PATIENT)
    await journal.load()
    assert await journal.append(step(1))
    with file_size_limit(8192):
        answers = [await journal.append(step(serial)) for serial in range(2, 60)]
        assert not any(answers[-10:])
        written = answers.count(True)
        await asyncio.sleep(0.15)  # the retries fail as well
        assert health_log.durable == [False]
        assert str(path) in health_log.reason
    with read_only(path) as db:
        assert read_all(db)[0].state == step(1 + written).state, "what was said to be durable is"
    await until(lambda: health_log.durable == [False, True])
    assert serials(path) == list(range(1, 60))
    assert await journal.close(LONG_S)


async def test_a_daemon_that_starts_on_a_full_disk_has_its_history(tmp_path: Path, health_log: HealthLog) -> None:
    """Killed, and what it has freed is taken by others: there is no room for the index of the log, and all is read."""
    path = tmp_path / "journal.sqlite"
    before = Journal(path, boot_id="b", limits=PATIENT)
    await before.load()
    assert await before.append(step(7))
    killed = as_killed(path, tmp_path / "killed") / "journal.sqlite"
    await before.close(LONG_S)
    journal = Journal(killed, boot_id="b", limits=PATIENT)
    with file_size_limit(0):
        loaded = await journal.load()
        assert not await journal.append(step(8))
    assert (loaded.state, loaded.lost, loaded.durable) == (step(7).state, "", False)
    assert "free some space there" in health_log.reason
    await until(lambda: journal.health.durable)
    assert serials(killed) == [7, 8]
    assert await journal.close(LONG_S)


@contextmanager
def small_disk(size: str = "256k") -> Iterator[Path]:
    """A real file system of this size."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=False, stderr=-3)
        if mounted.returncode:
            pytest.skip("may not mount a tmpfs here")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        while os.statvfs(file.fileno()).f_bavail:
            file.write(b"x" * 4096)


@pytest.mark.root
async def test_a_full_disk(tmp_path: Path, health_log: HealthLog) -> None:
    """A real ENOSPC: alarm with advice, memory, and everything written once there is room."""
    with small_disk() as disk:
        path = disk / "journal.db"
        journal = Journal(path, boot_id="b", limits=PATIENT)
        await journal.load()
        assert await journal.append(step(1))
        ballast = disk / "ballast"
        fill(ballast)
        answers = [await journal.append(step(serial)) for serial in range(2, 40)]
        with read_only(path) as db:
            assert read_all(db)[0].state == step(1 + answers.count(True)).state
        assert health_log.durable == [False]
        assert "full" in health_log.reason
        assert "free some space" in health_log.reason
        again = Journal(path, boot_id="b", limits=PATIENT)  # as after a kill
        loaded = await again.load()
        assert (loaded.state, loaded.lost) == (step(1 + answers.count(True)).state, "")
        await again.close()
        ballast.unlink()
        await until(lambda: journal.health.durable)
        assert serials(path) == list(range(1, 40))
        await journal.close(LONG_S)


def quiet(serial: int) -> Entry:
    return Entry(at_s=float(serial), state=State(serial=serial), notes=(Note(event="quiet", because="a test"),))


@pytest.mark.root
async def test_an_outage_is_written_on_a_disk_that_has_filled_up(health_log: HealthLog) -> None:
    """Room was kept for it, and for nothing else: before it, the full disk is an alarm as ever."""
    with small_disk("16m") as disk:
        path = disk / "journal.db"
        journal = Journal(path, boot_id="b", limits=PATIENT)
        await journal.load()
        assert await journal.append(quiet(1))
        reserve = disk / "journal.db-reserve"
        await until(reserve.exists)
        fill(disk / "ballast")
        serial = 2
        while await journal.append(quiet(serial)):
            serial += 1
        assert (health_log.durable, reserve.exists()) == ([False], True)
        await journal.append(step(serial + 1))
        await until(lambda: journal.health.durable)
        answers = [await journal.append(step(serial)) for serial in range(serial + 2, serial + 300)]
        assert all(answers)
        assert not reserve.exists()
        await journal.close(LONG_S)


@pytest.mark.root
async def test_a_disk_that_becomes_read_only(tmp_path: Path) -> None:
    """What ext4 does after an I/O error (here: a start on such a disk), and its return."""
    with small_disk() as disk:
        path = disk / "journal.db"
        journal = Journal(path, boot_id="b", limits=PATIENT)
        await journal.load()
        await journal.append(step(1))
        await journal.close(LONG_S)
        remount = "mount", "-o"
        subprocess.run([*remount, "remount,ro", str(disk)], check=True)  # noqa: ASYNC221 - set-up
        journal = Journal(path, boot_id="b", limits=PATIENT)
        loaded = await journal.load()
        assert not loaded.durable
        assert "must be able to write the file and its folder" in loaded.trouble
        assert (loaded.state, loaded.lost) == (step(1).state, ""), "a latch that stands there still counts"
        assert not await journal.append(step(2))
        assert [each.id for each in await journal.history()] == ["o-1"], "reading works"
        subprocess.run([*remount, "remount,rw", str(disk)], check=True)  # noqa: ASYNC221 - set-up
        await until(lambda: journal.health.durable)
        assert serials(path) == [1, 2]
        await journal.close(LONG_S)


async def test_a_folder_that_cannot_be(tmp_path: Path, health_log: HealthLog) -> None:
    """A file where the folder should be: the daemon starts, protects, and says so until it is put right."""
    (tmp_path / "state").write_text("not a folder")
    path = tmp_path / "state" / "journal.db"
    journal = Journal(path, boot_id="b", limits=PATIENT)
    loaded = await journal.load()
    assert (loaded.state, loaded.durable) == (None, False)
    assert str(path) in loaded.trouble
    assert not await journal.append(step(1))
    (tmp_path / "state").unlink()
    await until(lambda: health_log.durable == [False, True])
    assert serials(path) == [1]
    await journal.close(LONG_S)


async def test_a_second_writer_is_distinguished_from_a_broken_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, boot_id="b", limits=PATIENT)
    await journal.load()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert not await journal.append(step(1))
    assert "only one daemon may run" in journal.health.reason
    other.execute("ROLLBACK")
    other.close()
    await until(lambda: journal.health.durable)
    assert serials(path) == [1]
    await journal.close(LONG_S)


def remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink()


async def test_a_journal_that_is_removed_under_us_is_started_afresh(tmp_path: Path, health_log: HealthLog) -> None:
    """Commits into a file without a name would be acknowledged and gone."""
    path = tmp_path / "journal.db"
    journal = Journal(path, boot_id="b", limits=PATIENT)
    await journal.load()
    assert await journal.append(step(1))
    remove(path)
    assert await journal.append(step(2))
    assert serials(path) == [2]
    assert len(health_log.of("journal_set_aside")) == 1
    with read_only(path) as db:
        outage = read_all(db)[0].outage
    assert outage is not None, "the outage that runs is in the new file as well"
    await journal.close(LONG_S)


# --- Damaged -------------------------------------------------------------------------------------------------------


async def begun(path: Path, steps: int = 300) -> None:
    journal = Journal(path, boot_id="b", limits=PATIENT)
    await journal.load()
    journal.count("outages", 4)
    for serial in range(1, steps + 1):
        await journal.append(step(serial))
    await journal.close(LONG_S)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"SQLite format 3\0" + b"\xff" * 5000, b"{}"], ids=repr)
async def test_a_file_that_is_no_journal_is_kept_and_replaced(
    tmp_path: Path, health_log: HealthLog, content: bytes
) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    journal = Journal(path, boot_id="b", limits=PATIENT)
    loaded = await journal.load()
    assert (loaded.state, loaded.durable) == (None, True)
    assert await journal.append(step(1))
    await journal.close(LONG_S)
    if content:
        assert (tmp_path / "journal.db.corrupt-1").read_bytes() == content
        assert "kept as journal.db.corrupt-1, and a new journal was started" in loaded.trouble
        assert len(health_log.of("journal_set_aside")) == 1
    else:
        assert loaded.trouble == "", "an empty file is what a crash at the very first start leaves"


def test_what_can_still_be_read_of_a_damaged_file_is_used(tmp_path: Path) -> None:
    """Any page may be hit: the daemon starts, the damaged file is kept, and state and outage survive most hits."""
    good = tmp_path / "good.db"
    asyncio.run(begun(good))
    whole = good.read_bytes()
    chance = random.Random(7)
    survived = set_aside = 0
    for turn in range(40):
        folder = tmp_path / str(turn)
        folder.mkdir()
        path = folder / "journal.db"
        at = chance.randrange(100, len(whole) - 512)
        path.write_bytes(whole[:at] + chance.randbytes(512) + whole[at + 512 :])
        store = Patient(path)
        loaded, _ = store.load()
        survived += loaded.state == step(300).state
        store.write(Batch(open_outage="o-1"))
        store.close()
        if store.notices:
            set_aside += 1
            assert sorted(each.name for each in folder.iterdir()) == ["journal.db", "journal.db.corrupt-1"]
            if loaded.state is not None:
                again = loaded_once(Patient(path))
                assert (again.state, again.in_flight) == (loaded.state, loaded.in_flight), "seeded into the new file"
    assert set_aside >= 5
    assert survived >= 20


def journal_of(path: Path) -> bytes:
    """Make a journal with a state, stopped in order; return its bytes."""
    store = Store(path)
    store.load()
    state = State(serial=7)
    store.write(Batch(snapshot=Snapshot(boot_id="b", at_s=1.0, wall=2.0, state=dump(to_plain(state)))))
    store.close()
    return path.read_bytes()


@pytest.mark.parametrize("bit", [0x01, 0x20, 0x80])
def test_no_flipped_byte_of_the_first_page_keeps_the_daemon_from_its_journal(tmp_path: Path, bit: int) -> None:
    """sqlite3 raises UnicodeDecodeError for a broken schema, and the daemon ended at each start.

    With byte 18 or 19, the versions of the file's format, SQLite refuses to write or to read: these are put right.
    """
    whole = journal_of(tmp_path / "whole.sqlite")
    path = tmp_path / "journal.sqlite"
    for at in (*range(100), *range(100, 4096, 37)):  # the header whole, then a byte of each few cells
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        store = Store(path)
        loaded, _ = store.load()
        store.write(Batch(snapshot=Snapshot(boot_id="b", at_s=3.0, wall=4.0, state="{}")))
        store.close()
        known = loaded.state is not None and loaded.state.serial == 7
        assert known or at not in {18, 19}
        assert known or loaded.lost, f"byte {at}: the state is gone without a word"
        for kept in tmp_path.glob("journal.sqlite.*"):
            kept.unlink()


def as_killed(path: Path, folder: Path) -> Path:
    """Copy a journal that is in use to a folder of its own, as a kill of its daemon would leave it."""
    folder.mkdir()
    for name in ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm", "journal.sqlite-in-use"):
        shutil.copy(path.with_name(name), folder / name)
    return folder


@pytest.mark.parametrize("left", [None, 0, 32, 56])
def test_a_log_that_is_gone_is_reported(tmp_path: Path, left: int | None) -> None:
    """A file system check may take it, or a person: SQLite reads the older state without a word, a latch not in it."""
    path = tmp_path / "journal.sqlite"
    journal_of(path)
    assert not Path(f"{path}-in-use").exists(), "stopped in order"
    store = Store(path)
    store.load()
    state = dump(to_plain(State(serial=8)))
    store.write(Batch(snapshot=Snapshot(boot_id="b", at_s=3.0, wall=4.0, state=state)))
    killed, other = (as_killed(path, tmp_path / name) for name in ("killed", "other"))
    store.close()
    whole = loaded_once(Store(other / "journal.sqlite"))
    assert whole.state is not None
    assert (whole.state.serial, whole.lost) == (8, "")
    log = killed / "journal.sqlite-wal"
    log.write_bytes(log.read_bytes()[:left]) if left is not None else log.unlink()
    again = Store(killed / "journal.sqlite")
    loaded, _ = again.load()
    again.close()
    assert loaded.lost
    assert "its log is gone" in " ".join(again.notices)


@pytest.mark.parametrize("left", [None, b""])
def test_a_file_that_is_empty_or_gone_is_reported(tmp_path: Path, left: bytes | None) -> None:
    """As a file system may leave it after a power cut. SQLite began a new one without a word, and deleted its log."""
    path = tmp_path / "journal.sqlite"
    store = Store(path)
    store.load()
    store.write(Batch(snapshot=Snapshot(boot_id="b", at_s=3.0, wall=4.0, state=dump(to_plain(State(serial=8))))))
    killed = as_killed(path, tmp_path / "killed")
    store.close()
    damaged = killed / "journal.sqlite"
    damaged.unlink() if left is None else damaged.write_bytes(left)
    log = Path(f"{damaged}-wal").read_bytes()
    again = Store(damaged)
    loaded, _ = again.load()
    again.write(Batch(snapshot=Snapshot(boot_id="b", at_s=5.0, wall=6.0, state=dump(to_plain(State(serial=9))))))
    again.close()
    assert (loaded.state, loaded.lost) == (None, LOST_ALL)
    assert "is empty or gone" in " ".join(again.notices)
    assert (killed / "journal.sqlite.corrupt-1-wal").read_bytes() == log
    new = loaded_once(Store(damaged))
    assert new.state is not None
    assert (new.state.serial, new.lost) == (9, "")


def test_a_log_that_another_program_folded_into_the_file_is_not_gone(tmp_path: Path) -> None:
    """As the sqlite3 tool does when a person looks into the journal of a daemon that was killed."""
    path = tmp_path / "journal.sqlite"
    store = Store(path)
    store.load()
    for serial in (7, 8):
        state = dump(to_plain(State(serial=serial)))
        store.write(Batch(snapshot=Snapshot(boot_id="b", at_s=float(serial), wall=4.0, state=state)))
    killed = as_killed(path, tmp_path / "killed")
    store.close()
    with contextlib.closing(sqlite3.connect(killed / "journal.sqlite")) as db:
        db.execute("SELECT count(*) FROM snapshot").fetchone()
    assert not (killed / "journal.sqlite-wal").exists()
    again = Store(killed / "journal.sqlite")
    loaded, _ = again.load()
    again.close()
    assert loaded.state is not None
    assert (loaded.state.serial, loaded.lost, again.notices) == (8, "", [])


@pytest.mark.parametrize("column", ["boot_id", "at_s", "wall", "state"])
def test_a_state_that_was_changed_on_disk_is_not_believed(tmp_path: Path, column: str) -> None:
    """A flipped bit in it may still be JSON, and a moment still a number."""
    path = tmp_path / "journal.sqlite"
    journal_of(path)
    changed = "replace(state, '7', '9')" if column == "state" else "'c'" if column == "boot_id" else "64.0"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"UPDATE snapshot SET {column} = {changed}")
        db.commit()
    loaded = loaded_once(Store(path))
    assert loaded.state is None
    assert loaded.lost
    assert "digest" in loaded.trouble


def test_the_lost_head_of_a_log_is_noticed(tmp_path: Path) -> None:
    """The first sector zeroed: SQLite reads nothing of the log and would write over it without a word."""
    journal_of(tmp_path / "live.sqlite")
    live = Store(tmp_path / "live.sqlite")
    live.load()
    live.write(Batch(snapshot=Snapshot(boot_id="b", at_s=3.0, wall=4.0, state=dump(to_plain(State(serial=8))))))
    for suffix in ("", "-wal"):
        shutil.copyfile(tmp_path / f"live.sqlite{suffix}", tmp_path / f"killed.sqlite{suffix}")
    live.close()
    log = tmp_path / "killed.sqlite-wal"
    log.write_bytes(bytes(512) + log.read_bytes()[512:])
    store = Patient(tmp_path / "killed.sqlite")
    loaded, _ = store.load()
    assert "newest transactions" in loaded.lost
    assert loaded.state is not None
    assert loaded.state.serial == 7, "what is older than the log is still there"
    assert (tmp_path / "killed.sqlite-wal.corrupt-1").stat().st_size == log.stat().st_size or store.notices
    store.close()


async def test_damage_while_we_run(tmp_path: Path, health_log: HealthLog) -> None:
    """A bad page is met in the middle of an outage: the file is set aside and the step is durable in the new one."""
    path = tmp_path / "journal.db"
    await begun(path, 20)
    journal = Journal(path, boot_id="b", limits=PATIENT)
    await journal.load()
    store = journal._store
    assert store._db is not None
    store._db.execute("PRAGMA writable_schema = ON")
    store._db.execute("UPDATE sqlite_schema SET rootpage = 9999 WHERE name = 'entries'")
    store._db.execute("PRAGMA writable_schema = RESET")
    assert await journal.append(step(21))
    assert len(health_log.of("journal_set_aside")) == 1
    await journal.close(LONG_S)
    assert (tmp_path / "journal.db.corrupt-1").exists()
    with read_only(path) as db:
        loaded, _ = read_all(db)
    assert loaded.state == step(21).state
    assert loaded.outage is not None


# --- Everything at once ----------------------------------------------------------------------------------------------


FULL = JournalError("disk full")
BUG = RuntimeError("a bug")


class Moody(Store):
    """A store that fails at random, before or after the commit, and in ways that it should not."""

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(path)
        self.chance = random.Random(seed)
        self.cured = False

    def write(self, batch: Batch) -> None:
        mood = 9 if self.cured else self.chance.randrange(6)
        if mood == 0:
            raise FULL
        if mood == 1:
            raise BUG
        super().write(batch)
        if mood == 2:
            self.close()
            raise MemoryError


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_fails_an_acknowledged_step_is_there_and_none_is_missing(tmp_path: Path, seed: int) -> None:
    """Never raises; a commit whose answer was lost is written twice rather than not at all."""
    path = tmp_path / "journal.db"
    store = Moody(path, seed)
    journal = Journal(path, boot_id="b", store=store, limits=JournalLimits(retry_s=0.001))
    await journal.load()
    for serial in range(1, 120):
        if await journal.append(step(serial)):
            with read_only(path) as db:
                loaded, _ = read_all(db)
            assert loaded.state is not None
            assert loaded.state.serial == serial
        elif serial % 3 == 0:
            await asyncio.sleep(0.002)
    store.cured = True
    await until(lambda: journal.health.durable)
    await journal.close(LONG_S)
    found = serials(path)
    assert sorted(set(found)) == list(range(1, 120))
    with read_only(path) as db:
        assert len(read_all(db)[0].in_flight) == 119, "an action that was written twice is one action"


async def test_inline_needs_no_thread(tmp_path: Path) -> None:
    """The simulator runs the real journal in virtual time: nothing may depend on a thread."""
    before = threading.active_count()
    journal = Journal(tmp_path / "journal.db", boot_id="b", writer=Inline(), reader=Inline())
    assert threading.active_count() == before
    await journal.load()
    assert await journal.append(step(1))
    assert [each.id for each in await journal.history()] == ["o-1"]
    assert await journal.close(LONG_S)


HUNG_EXIT = """
import asyncio, sys, threading
from pathlib import Path
from powerguard.daemon.journal import Journal, JournalLimits
from powerguard.daemon.journal.store import Store
class Hung(Store):
    def load(self): threading.Event().wait()
async def main():
    journal = Journal(Path(sys.argv[1]), boot_id="b", store=Hung(Path(sys.argv[1])), limits=JournalLimits(load_s=0.05))
    print((await journal.load()).durable, await journal.close(limit_s=0.1))
asyncio.run(main())
"""


def test_the_process_ends_though_its_journal_hangs(tmp_path: Path) -> None:
    """A thread that waits for a dead disk must not keep the daemon's exit, and so the host's shutdown, waiting."""
    ended = subprocess.run(
        [sys.executable, "-c", HUNG_EXIT, str(tmp_path / "j.db")],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_S,
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "False True"), ended.stderr
