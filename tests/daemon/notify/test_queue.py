"""The queue on disk: what a power-off, a full house and a broken file leave of it."""

import contextlib
import itertools
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from powerguard.core.model.actions import Level
from powerguard.core.model.state import State
from powerguard.daemon.journal.journal import WorkerThread
from powerguard.daemon.notify.composer import Message
from powerguard.daemon.notify.queue import KEEP_S, MOST, VERSION, Queue
from powerguard.daemon.observe.http import as_json
from tests.daemon.notify.post import LIMIT_S, Clock, began, note, options, post, settled
from tests.daemon.watched import scene


def message(number: int, at: float | None = None) -> Message:
    return Message(
        id=f"{number}",
        at=time.time() if at is None else at,
        key=f"event:{number}",
        status="event",
        event="overload_raised",
        level="error",
        host="gpu-01",
        title=f"message {number}",
        text="a text \udcff",
    )


@contextlib.asynccontextmanager
async def queue(path: Path, clock: Callable[[], float] = time.time) -> AsyncIterator[Queue]:
    made = Queue(path, WorkerThread("test"), clock)
    await made.load(LIMIT_S)
    yield made
    await made.close(LIMIT_S)


def titles(made: Queue, target: str) -> list[str]:
    return [each.title for _, each in made.waiting(target)]


async def test_messages_survive_in_order(tmp_path: Path) -> None:
    """Of each target what it has not got yet; what all have got is gone from the file."""
    path = tmp_path / "state" / "messages.sqlite"
    async with queue(path) as made:
        for number in range(5):
            made.add(message(number), ("a", "b"))
        made.done("a", [1, 2, 3])
        made.done("b", [1, 4])
        made.keep("said", {"x": 1.0})
    async with queue(path) as made:
        assert titles(made, "a") == ["message 3", "message 4"]
        assert titles(made, "b") == ["message 1", "message 2", "message 4"]
        made.add(message(5), ("a",))
        assert titles(made, "a")[-1] == "message 5"
        made.retain(["a"])
        made.done("a", [4, 5, 6])
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM pending").fetchone() == (0,)
        assert db.execute("SELECT payload FROM kept").fetchone() == ('{"x":1.0}',)


async def test_a_thousand_are_kept_and_the_oldest_go(tmp_path: Path) -> None:
    async with queue(tmp_path / "q.sqlite") as made:
        for number in range(MOST + 7):
            made.add(message(number), ("a",))
        assert (made.count("a"), made.lost, titles(made, "a")[0]) == (MOST, 7, "message 7")
        assert made.full == "1000 messages wait, and 7 older ones were dropped"
        made.done("a", [8])
        assert made.full == ""
    async with queue(tmp_path / "q.sqlite") as made:
        assert (made.count("a"), titles(made, "a")[0]) == (MOST - 1, "message 8")


async def test_what_is_a_month_old_is_forgotten(tmp_path: Path) -> None:
    async with queue(tmp_path / "q.sqlite") as made:
        made.add(message(1, time.time() - KEEP_S - 60.0), ("a",))
        made.add(message(2), ("a",))
        made.add(message(3, 86400.0), ("a",))  # in 1970: the clock was not set yet
    async with queue(tmp_path / "q.sqlite") as made:
        assert titles(made, "a") == ["message 2", "message 3"]


async def test_what_was_made_before_the_clock_was_set_is_kept(tmp_path: Path) -> None:
    """With an empty clock battery a host begins years ago; the network sets its clock before it takes a message."""
    clock = Clock(ahead_s=-3 * 365 * 86400.0)
    async with queue(tmp_path / "q.sqlite", clock) as made:
        made.add(message(1, clock()), ("a",))
        clock.ahead_s = 0.0
        made.prune()
        assert (titles(made, "a"), made.lost) == (["message 1"], 0)


async def test_a_kill_at_any_instant_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """The file is copied while it is in use, as a power cut would leave it."""
    path, copy = tmp_path / "q.sqlite", tmp_path / "copy.sqlite"
    async with queue(path) as made:
        made.add(message(1), ("a",))
        await settled(lambda: made._busy is None and not made._ops)
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    async with queue(copy) as made:
        assert titles(made, "a") == ["message 1"]


def damaged(path: Path, how: str) -> None:
    if how == "garbage":
        path.write_bytes(b"no database " * 1000)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif how == "zeros":
        path.write_bytes(path.read_bytes()[:4096] + bytes(8192))
    else:
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute({"newer": f"PRAGMA user_version = {VERSION + 1}", "foreign": "PRAGMA application_id = 7"}[how])


def kept_aside(folder: Path) -> list[Path]:
    return list(folder.glob("q.sqlite.*-1"))


@pytest.mark.parametrize("how", ["garbage", "cut", "zeros", "newer", "foreign"])
async def test_a_file_that_cannot_be_used_is_kept_aside(tmp_path: Path, how: str) -> None:
    """Said once; a new one is begun, and messages go on."""
    path = tmp_path / "q.sqlite"
    async with queue(path) as made:
        made.add(message(1), ("a",))
    damaged(path, how)
    with capture_logs() as logs:
        async with queue(path) as made:
            made.add(message(2), ("a",))
            assert (titles(made, "a"), made.trouble) == (["message 2"], "")
    assert [line["event"] for line in logs] == ["messages_set_aside"]
    assert "kept as q.sqlite." in logs[0]["because"]
    assert [path.name[:9] for path in kept_aside(tmp_path)] == ["q.sqlite."]
    async with queue(path) as made:
        assert titles(made, "a") == ["message 2"]


async def test_rows_that_are_no_messages_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    async with queue(path) as made:
        for number in range(4):
            made.add(message(number), ("a",))
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for seq, payload in ((1, "[]"), (2, "{"), (3, '{"key": 7}')):
            db.execute("UPDATE messages SET payload = ? WHERE seq = ?", (payload, seq))
    async with queue(path) as made:
        assert titles(made, "a") == ["message 3"]


NO_MESSAGE = '{"reason:undersized": {"key": "k", "level": "loud"}}'
FOREIGN = {
    "standing": ('[["a", 1]]', '"text"', '{"pair:source_lost": 5}', NO_MESSAGE),
    "said": ("[1, 2]", '{"event:x": "noon", "event:y": null}'),
    "records": ('[["own"]]', '{"own": {"delivered": "many"}}', '{"own": {"kind": "command", "at": Infinity}}'),
}


@pytest.mark.parametrize(("name", "payload"), [(name, each) for name, some in FOREIGN.items() for each in some])
async def test_foreign_json_does_not_end_messages(tmp_path: Path, name: str, payload: str) -> None:
    """What is none of ours is passed over: the queue is delivered, and the status can be shown."""
    works = {"kind": "command", "command": ["/bin/true"], "limit_s": 30}
    async with post(options(own=works), tmp_path) as made:
        made.hear(*began())
        await made.until(lambda: made.view("own").delivered == 1)
    with contextlib.closing(sqlite3.connect(tmp_path / "messages.sqlite")) as db, db:
        db.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (name, payload))
        for at, text in enumerate(("-1e300", "Infinity", "NaN", f"1{'0' * 400}"), 100):
            plain = json.dumps(message(at).plain())
            db.execute("INSERT INTO messages VALUES (?, ?)", (at, f'{plain[:-1]}, "at": {text}}}'))
            db.execute("INSERT INTO pending VALUES ('own', ?)", (at,))
    async with post(options(own=works), tmp_path) as made:
        was = made.view("own").delivered
        made.hear(*began("o2"), outage="o2")
        await made.until(lambda: made.view("own").delivered == was + 1)
        assert made.view("own").queued == 0
        made.messenger._add(made.messenger.composer.watch({}, State(), "armed"))
        as_json({"targets": [asdict(each) for each in made.messenger.views()]})


async def test_a_disk_that_cannot_be_written_leaves_memory_and_an_alarm(tmp_path: Path) -> None:
    """Messages go on; once the disk is back, the file has all of them."""
    (tmp_path / "state").write_text("a file where the folder should be", encoding="utf-8")
    path = tmp_path / "state" / "q.sqlite"
    with capture_logs() as logs:
        async with queue(path) as made:
            made.add(message(1), ("a",))
            assert titles(made, "a") == ["message 1"]
            assert made.trouble.startswith(f"{path}: ")
            (tmp_path / "state").unlink()
            assert made._retry is not None
            made._retry.cancel()
            made._again()
            made.add(message(2), ("a",))
            await settled(lambda: not made.trouble)
    assert [line["event"] for line in logs] == ["messages_not_durable", "messages_durable"]
    async with queue(path) as made:
        assert titles(made, "a") == ["message 1", "message 2"]


async def test_a_file_that_is_removed_under_us_is_written_again(tmp_path: Path) -> None:
    """Only what came after that was in the new file: all that waited was lost at the power-off."""
    path = tmp_path / "q.sqlite"
    async with queue(path) as made:
        made.add(message(1), ("a",))
        made.keep("said", {"x": 1})
        await settled(lambda: made._busy is None and not made._ops)
        path.unlink()
        made.add(message(2), ("a",))
        await settled(lambda: made.trouble)
        assert "removed while in use" in made.trouble
        assert made._retry is not None
        made._retry.cancel()
        made._again()
        await settled(lambda: not made.trouble)
    async with queue(path) as made:
        assert titles(made, "a") == ["message 1", "message 2"]


async def test_a_full_disk_is_no_traceback(tmp_path: Path) -> None:
    """SQLite says FULL: what cannot be written stays in memory, and the file keeps what it has."""
    path = tmp_path / "q.sqlite"
    async with queue(path) as made:
        made.add(message(1), ("a",))
        await settled(lambda: made._busy is None and not made._ops)
        assert made.file._db is not None
        made.file._db.execute("PRAGMA max_page_count = 1")
        with capture_logs() as logs:
            for number in range(2, 60):
                made.add(message(number), ("a",))
            await settled(lambda: made._busy is None)
        assert [line["event"] for line in logs] == ["messages_not_durable"]
        assert "full" in made.trouble
        assert made.count("a") == 59


class Hung:
    """A writer whose disk never answers."""

    def submit(self, call: Callable[[], None]) -> None:
        """Take it, and do nothing."""

    def close(self, limit_s: float) -> None:
        """Likewise."""


class Slow(WorkerThread):
    """A writer whose disk answers once the gate is open."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.gate = threading.Event()
        self.submit(self.gate.wait)


async def test_a_disk_that_answers_late_loses_nothing(tmp_path: Path) -> None:
    """What an earlier daemon has left comes first, and is in the file for the next one, too."""
    path, slow = tmp_path / "q.sqlite", Slow()
    async with queue(path) as made:
        made.add(message(1), ("a", "b"))
        made.add(message(2), ("a",))
        made.keep("said", {"x": 1.0})
    kept: list[Mapping[str, Any]] = []
    made = Queue(path, slow, time.time, kept.append)
    await made.load()
    assert (titles(made, "a"), kept, made.trouble) == ([], [], f"{path}: no answer from the disk in 2 s")
    made.add(message(3), ("a",))
    slow.gate.set()
    await settled(lambda: not made.trouble)
    assert (titles(made, "a"), titles(made, "b")) == (["message 1", "message 2", "message 3"], ["message 1"])
    assert kept == [{"said": {"x": 1.0}}]
    made.done("a", [seq for seq, _ in made.waiting("a")[:2]])
    await made.close(LIMIT_S)
    async with queue(path) as made:
        assert (titles(made, "a"), titles(made, "b")) == (["message 3"], ["message 1"])


async def test_a_hung_disk_holds_nothing_up(tmp_path: Path) -> None:
    """The loop hands its notes over at once, and a target gets them all the same."""
    target = {"kind": "command", "command": ["/bin/sh", "-c", f"cat >> {tmp_path / 'got'}"], "limit_s": 30}
    async with post(options(own=target), tmp_path, writer=Hung()) as made:
        began_s = time.thread_time()
        made.hear(*began())
        assert time.thread_time() - began_s < 0.5
        await made.until(lambda: made.view("own").delivered == 1)
        assert "no answer from the disk" in made.messenger.trouble
    assert json.loads((tmp_path / "got").read_text(encoding="utf-8"))["event"] == "outage_began"


async def test_messages_go_on_after_a_restart(tmp_path: Path) -> None:
    """What was heard at the very end is written, too, and delivered by the next daemon, in order."""
    got = tmp_path / "got"
    broken = {"kind": "command", "command": ["/bin/false"], "limit_s": 30}
    clock = Clock()
    async with post(options(own=broken), tmp_path, clock) as made:
        for number in range(20):
            made.hear(note("power_on_blocked", because=f"{number}", method=f"w{number}"))
        await made.until(lambda: made.view("own").failed)
        made.hear(note("overload_raised", Level.ERROR, "the last word"))
    works = {"kind": "command", "command": ["/bin/sh", "-c", f"cat >> {got}"], "limit_s": 30}
    async with post(options(own=works), tmp_path, clock) as made:
        assert made.view("own").failed >= 1
        await made.until(lambda: made.view("own").queued == 0)
    answer = [json.loads(line)["because"] for line in got.read_text(encoding="utf-8").splitlines()]
    assert answer == [*map(str, range(20)), "the last word"]


async def test_an_alarm_that_was_held_back_is_sent_although_the_daemon_restarts(tmp_path: Path) -> None:
    """It began again within the hour. The next daemon of this boot finds it in its state, and notes no beginning."""
    works = {"kind": "command", "command": ["/bin/true"], "limit_s": 30}
    clock = Clock()
    async with post(options(own=works), tmp_path, clock) as made:
        for event in ("overload_raised", "overload_cleared", "overload_raised"):
            made.hear(note(event, Level.ERROR))
        await made.until(lambda: made.view("own").delivered == 2)
    clock.passed_s += 3600.0
    async with post(options(own=works), tmp_path, clock) as made:
        (late,) = made.messenger.composer.watch({}, replace(State(), alarms=("overload",)), "armed")
        assert (late.key, late.status) == ("alarm:overload", "begin")


async def test_an_end_that_was_reported_before_the_disk_answered_is_reported_once(tmp_path: Path) -> None:
    """The host is back, with a cold disk: the power-off that the file still has is over."""
    works = {"kind": "command", "command": ["/bin/true"], "limit_s": 30}
    async with post(options(own=works), tmp_path) as made:
        made.hear(*began(), note("phase_changed", old="holding", new="shutdown"))
        await made.until(lambda: made.view("own").delivered == 2)
    slow = Slow()
    async with post(options(own=works), tmp_path, writer=slow) as made:
        composer = made.messenger.composer
        made.hear(note("host_returned", Level.INFO, outage="o1", away_s=600.0))
        await made.until(lambda: made.view("own").delivered == 1)
        slow.gate.set()
        await made.until(lambda: "outage:o1" in composer.standing)
        assert "power_off:o1" not in composer.standing


async def test_what_stands_over_a_restart_is_not_reported_as_over(tmp_path: Path) -> None:
    """The first look after a start begins nothing, and ends nothing that it finds."""
    works = {"kind": "command", "command": ["/bin/true"], "limit_s": 30}
    daemon = replace(scene(), power_off_trouble="powerguard-off.socket is not listening")
    for look in range(2):
        async with post(options(own=works), tmp_path) as made:
            for _ in range(2 - look):
                made.messenger._look(daemon)
            assert {"reason:no_power_off", "reason:drill_overdue"} <= set(made.messenger.composer.standing)
            await made.until(lambda: made.view("own").delivered == 2)
    async with post(options(own=works), tmp_path) as made:
        made.messenger._look(scene())
        assert set(made.messenger.composer.standing) == {"reason:drill_overdue"}


async def test_an_outage_is_not_over_while_the_journal_cannot_be_read(tmp_path: Path) -> None:
    """Its disk is late, or another process holds it: the state has no outage yet, and the file may have it."""
    works = {"kind": "command", "command": ["/bin/true"], "limit_s": 30}
    async with post(options(own=works), tmp_path) as made:
        composer = made.messenger.composer
        made.hear(*began())
        await made.until(lambda: "outage:o1" in composer.standing)
        made.messenger._look(replace(scene(), journal_trouble="no answer from the disk in 2 s"))
        assert "outage:o1" in composer.standing
        made.messenger._look(scene())
        assert "outage:o1" not in composer.standing


async def test_names_of_targets_are_all_that_the_file_knows_of_them(tmp_path: Path) -> None:
    async with queue(tmp_path / "q.sqlite") as made:
        made.add(message(1), ("ops-chat",))
    with contextlib.closing(sqlite3.connect(tmp_path / "q.sqlite")) as db:
        rows = itertools.chain.from_iterable(db.execute(f"SELECT * FROM {table}") for table in ("pending", "kept"))
        assert list(rows) == [("ops-chat", 1)]


async def test_without_a_target_the_disk_is_left_alone(tmp_path: Path) -> None:
    """A host that tells nobody pays nothing; a reload that names the first target begins the queue."""
    async with post(options(), tmp_path) as made:
        made.hear(*began())
        assert list_of(tmp_path) == []
        target = {"kind": "command", "command": ["/bin/sh", "-c", f"cat >> {tmp_path / 'got'}"], "limit_s": 30}
        made.messenger.use(options(own=target))
        await settled(lambda: made.messenger._loaded)
        made.hear(*began("o2"), outage="o2")
        await made.until(lambda: made.view("own").delivered == 1)
    assert json.loads((tmp_path / "got").read_text(encoding="utf-8"))["outage"] == "o2"


def list_of(folder: Path) -> list[Path]:
    return list(folder.iterdir())
