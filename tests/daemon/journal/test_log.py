"""A damaged write-ahead log: SQLite drops all that lies behind and says nothing. What a crash leaves is not told."""

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from powerguard.daemon.journal import Journal, JournalLimits, Loaded, read_all, read_only, sqlite
from powerguard.daemon.journal.queries import LOST_ALL
from powerguard.daemon.journal.store import Batch, Store
from tests.daemon.journal.test_faults import serials, step
from tests.peers.machine import file_size_limit

HEADER = 32
FRAME = 24
LONG_S = 60.0
SLOW = JournalLimits(append_s=LONG_S, load_s=LONG_S)
WRITER = Path(__file__).parent.with_name("journal_writer.py")


class Patient(Store):
    """A store that a busy machine does not keep from finding what is there."""

    look_s = LONG_S


class Frame(NamedTuple):
    """A frame of a log: where it begins, its page, and whether it ends a transaction."""

    at: int
    page: int
    commits: bool


def frames(log: bytes) -> list[Frame]:
    """Return the frames of the log's newest generation, by their headers alone."""
    size = struct.unpack_from(">I", log, 8)[0]
    found = []
    for at in range(HEADER, len(log) - FRAME - size + 1, FRAME + size):
        page, pages = struct.unpack_from(">2I", log, at)
        if log[at + 8 : at + 16] != log[16:24]:
            break
        found.append(Frame(at, page, pages > 0))
    return found


def running(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(WRITER), str(path)], stdout=subprocess.PIPE)


async def written(path: Path, steps: int) -> None:
    """Write steps and leave the files as a kill right after the last one does."""
    journal = Journal(path, boot_id="boot-1", store=Patient(path), limits=SLOW)
    first = serial(await journal.load()) + 1
    for number in range(first, first + steps):
        assert await journal.append(step(number))
    left = [(each, each.read_bytes()) for each in (path, sqlite.log_of(path))]
    assert await journal.close(LONG_S)
    for each, data in left:
        each.write_bytes(data)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a journal with its log. It is only ever copied."""
    path = tmp_path_factory.mktemp("killed") / "journal.db"
    asyncio.run(written(path, 25))
    return path


@dataclass(slots=True)
class Copy:
    """A journal to be damaged. newest: the serial of its newest state."""

    path: Path
    log: bytes
    newest: int

    def spoil(self, at: int, data: bytes) -> None:
        with sqlite.log_of(self.path).open("r+b") as file:
            os.pwrite(file.fileno(), data, at)

    def flip(self, at: int, bits: int = 0x10) -> None:
        self.spoil(at, bytes([self.log[at] ^ bits]))

    def load(self) -> tuple[Loaded, list[str]]:
        store = Patient(self.path)
        try:
            loaded, _ = store.load()
            return loaded, store.notices
        finally:
            store.close()

    def is_whole(self, loaded: Loaded) -> bool:
        """Say whether everything is there: the newest state and every line."""
        return serial(loaded) == self.newest and serials(self.path) == list(range(1, self.newest + 1))


def serial(loaded: Loaded) -> int:
    return 0 if loaded.state is None else loaded.state.serial


def copied(killed: Path, folder: Path) -> Copy:
    folder.mkdir(exist_ok=True)
    path = folder / "journal.db"
    shutil.copyfile(killed, path)
    shutil.copyfile(sqlite.log_of(killed), sqlite.log_of(path))
    return as_it_is(path)


def as_it_is(path: Path) -> Copy:
    with read_only(path) as db:
        state = read_all(db)[0].state
    Path(f"{path}-shm").unlink()
    assert state is not None
    return Copy(path, sqlite.log_of(path).read_bytes(), state.serial)


def transactions(log: bytes) -> list[list[Frame]]:
    found = frames(log)
    ends = [0, *(number for number, frame in enumerate(found, start=1) if frame.commits)]
    return [found[start:end] for start, end in itertools.pairwise(ends)]


# --- What a crash leaves -----------------------------------------------------------------------------------------


def test_a_killed_daemon_is_never_reported_as_damaged(tmp_path: Path) -> None:
    """Killed at any moment, life after life on the same files: nothing is told, nothing acknowledged is missing."""
    path = tmp_path / "journal.db"
    chance = random.Random(11)
    acknowledged = 0
    for life in range(5):
        with running(path) as writer:
            assert writer.stdout is not None
            said = writer.stdout.readline()
            with contextlib.suppress(subprocess.TimeoutExpired):
                writer.wait(chance.uniform(0.0, 0.2))
            writer.kill()
            said += writer.stdout.read()
        acknowledged = int(said.split(b"\n")[-2])
        assert sqlite.log_of(path).stat().st_size > 0
        assert sqlite.look(path, LONG_S) is None
        loaded, result = copied(path, tmp_path / str(life)).load()  # a copy: the next life finds the log as it is
        assert (result, loaded.lost, loaded.trouble) == ([], "", "")
        assert serial(loaded) >= acknowledged


def test_a_log_that_was_cut_anywhere_is_no_damage(killed: Path, tmp_path: Path) -> None:
    """A kill in the middle of a write leaves the beginning of it."""
    copy = copied(killed, tmp_path)
    chance = random.Random(12)
    for _ in range(20):
        sqlite.log_of(copy.path).write_bytes(copy.log[: chance.randrange(len(copy.log))])
        assert sqlite.look(copy.path, LONG_S) is None


@pytest.mark.parametrize("seed", range(8))
def test_a_commit_that_a_power_cut_has_torn_is_no_damage(killed: Path, tmp_path: Path, seed: int) -> None:
    """A disk writes what was not synced yet in any order: any part of the last transaction may be old or zero."""
    copy = copied(killed, tmp_path)
    chance = random.Random(seed)
    last = transactions(copy.log)[-1]
    assert last[-1].commits
    for frame in chance.sample(last, chance.randrange(1, len(last) + 1)):
        start, end = sorted(chance.sample(range(0, 4121, 512), 2))
        old = copy.log[HEADER + start : HEADER + end] if seed % 2 else bytes(end - start)
        copy.spoil(frame.at + start, old)
    loaded, result = copy.load()
    assert (result, loaded.lost) == ([], "")
    assert serial(loaded) >= copy.newest - 1


async def test_what_is_left_of_an_older_log_is_no_damage(killed: Path, tmp_path: Path) -> None:
    """SQLite begins the log anew over the old one; and what is damaged in the new part is told apart from that."""
    copied(killed, tmp_path)
    path = tmp_path / "journal.db"
    await written(path, 6)
    log = sqlite.log_of(path).read_bytes()
    new = frames(log)
    assert 10 < len(new) < len(log) // 4120 - 20, "this log has an older one behind it"
    assert log[16:24] != sqlite.log_of(killed).read_bytes()[16:24], "each start begins a new log"
    assert sqlite.look(path, LONG_S) is None
    copy = as_it_is(path)
    copy.flip(transactions(log)[2][0].at + 500)
    loaded, result = copy.load()
    assert len(result) == 1
    assert loaded.lost or copy.is_whole(loaded)


# --- Damage ------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_reported(killed: Path, tmp_path: Path) -> None:
    """Wherever it is, and the log is kept as it was; only in the last commits a crash may look the same."""
    chance = random.Random(13)
    size = sqlite.log_of(killed).stat().st_size
    middle = HEADER + 60 * 4120
    places = [*range(0, HEADER, 3), *range(middle, middle + FRAME, 3), *(chance.randrange(size) for _ in range(40))]
    found = silent = 0
    for number, at in enumerate(places):
        copy = copied(killed, tmp_path / str(number))
        copy.flip(at, 1 << chance.randrange(8))
        broken = sqlite.log_of(copy.path).read_bytes()
        loaded, result = copy.load()
        if not result:
            assert not loaded.lost
            assert at >= transactions(copy.log)[-2][0].at or copy.is_whole(loaded), at
            silent += 1
            continue
        assert "its log is damaged" in result[0]
        assert copy.path.with_name("journal.db-wal.corrupt-1").read_bytes() == broken
        assert loaded.lost, at
        assert serial(loaded) < copy.newest, at
        found += 1
        again, result = copy.load()
        assert (again.state, result) == (loaded.state, [])
    assert found > 40
    assert silent < 10


@pytest.mark.parametrize("size", [512, 4096, 20_000])
def test_garbage_is_reported(killed: Path, tmp_path: Path, size: int) -> None:
    """A sector, a page, several: it is told that the state is not the newest."""
    chance = random.Random(size)
    for number in range(8):
        copy = copied(killed, tmp_path / str(number))
        end = transactions(copy.log)[-4][0].at
        copy.spoil(chance.randrange(HEADER, end - size), chance.randbytes(size))
        loaded, result = copy.load()
        assert len(result) == 1
        assert loaded.lost
        assert serial(loaded) < copy.newest


async def test_what_is_hidden_is_lost_and_reported(killed: Path, tmp_path: Path) -> None:
    """The state is the one that SQLite reads, and nobody takes it for the newest; the damaged log is kept."""
    copy = copied(killed, tmp_path)
    copy.flip(HEADER + 60 * 4120 + 3000)
    broken = sqlite.log_of(copy.path).read_bytes()
    with read_only(copy.path) as db:
        before = read_all(db)[0].state
    journal = Journal(copy.path, boot_id="b", store=Patient(copy.path), limits=SLOW)
    with capture_logs() as logged:
        loaded = await journal.load()
    assert (loaded.durable, loaded.state) == (True, before)
    lost = next(each for each in logged if each["event"] == "history_lost")
    behind = int(str(lost["lost"]).split()[2])
    assert copy.newest - serial(loaded) <= behind <= copy.newest - serial(loaded) + 3
    assert journal.lost == lost["lost"] == f"the last {behind} transactions"
    assert "its log is damaged" in lost["because"]
    (aside,) = [each for each in logged if each["event"] == "journal_set_aside"]
    assert aside["because"].endswith("kept as journal.db-wal.corrupt-1, and what is older was read")
    assert (tmp_path / "journal.db-wal.corrupt-1").read_bytes() == broken
    assert await journal.close(LONG_S)


def test_a_young_journal_that_is_lost_whole_is_reported(killed: Path, tmp_path: Path) -> None:
    """Everything stands in the log yet: without its first part there is nothing, and that is no first start."""
    copy = copied(killed, tmp_path)
    for frame in frames(copy.log)[:-20]:
        copy.flip(frame.at + 100)
    loaded, result = copy.load()
    assert (loaded.state, loaded.lost) == (None, LOST_ALL)
    assert "its log is damaged" in loaded.trouble
    assert len(result) == 1


def test_without_room_to_keep_the_log_nothing_is_written_over(killed: Path, tmp_path: Path) -> None:
    """The daemon starts with what SQLite reads, in memory, and says that it is not the newest."""
    copy = copied(killed, tmp_path)
    copy.flip(HEADER + 50 * 4120 + 3000)
    store = Patient(copy.path)
    with file_size_limit(40_000):
        loaded, _ = store.load()
    assert (loaded.durable, loaded.lost.split()[:2]) == (False, ["the", "last"])
    assert 0 < serial(loaded) < copy.newest
    broken = sqlite.log_of(copy.path).read_bytes()
    store.write(Batch(open_outage="o-1"))
    assert len(store.notices) == 1
    store.close()
    assert (tmp_path / "journal.db-wal.corrupt-1").read_bytes() == broken


def test_a_reader_beside_is_not_disturbed(killed: Path, tmp_path: Path) -> None:
    """Whoever reads while the log is kept goes on with what he had."""
    copy = copied(killed, tmp_path)
    copy.flip(HEADER + 50 * 4120 + 3000)
    with read_only(copy.path) as db:
        before = read_all(db)[0]
        loaded, _ = copy.load()
        assert read_all(db)[0] == before
    with read_only(copy.path) as db:
        assert read_all(db)[0].state == loaded.state


def test_damage_is_found_whole_or_not_at_all(killed: Path, tmp_path: Path) -> None:
    """Wherever the time runs out: half of what lies behind would be taken for the newest."""
    copy = copied(killed, tmp_path)
    copy.flip(HEADER + 20 * 4120 + 3000)
    began_s = time.monotonic()
    whole = sqlite.look(copy.path, LONG_S)
    took_s = time.monotonic() - began_s
    assert whole is not None
    found = [sqlite.look(copy.path, took_s * share / 30) for share in range(30)]
    assert found[0] is None
    assert {each for each in found if each is not None} <= {whole}


def test_sqlite_locks_nothing_on_the_log(tmp_path: Path) -> None:
    """So that a descriptor of ours on it may be closed while SQLite has it open in the same process."""
    path = tmp_path / "journal.db"
    with running(path) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        inodes = {suffix: Path(f"{path}{suffix}").stat().st_ino for suffix in ("", "-wal", "-shm")}
        seen: set[int] = set()
        for _ in range(200):
            held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
            seen |= {int(each[5].rpartition(":")[2]) for each in held if each[4] == str(writer.pid)}
            writer.stdout.readline()
        writer.kill()
    if inodes["-shm"] not in seen:
        pytest.skip("/proc/locks shows no locks of other processes here")
    assert inodes["-wal"] not in seen
