"""What is kept is kept whole, means the same after a restart and a reboot, and is not believed when it is damaged."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.sentinel.decide import Intent
from powerguard.sentinel.store import (
    MAX_BYTES,
    Clocks,
    IntentFile,
    IntentFileError,
    IntentStore,
    IntentTable,
    StoredOrders,
    decode,
    encode,
)

NOW = Clocks(boot_id="boot-1", boottime_s=5000.0, wall_s=1_800_000_000.0)
INTENT = Intent(
    host="n1",
    outage="o1",
    boot_id="b1",
    feeds=("a", "b"),
    stored_s=4800.0,
    not_before_s=5100.0,
    expires_s=9000.0,
    tries=2,
    tried_s=4900.0,
    was_off=True,
    on_since_s=4930.0,
    on_at_s=4990.0,
)
TABLE = IntentTable(
    intents={
        "n1": INTENT,
        "n2": replace(INTENT, host="n2", tries=0, tried_s=None, was_off=False, on_since_s=None, on_at_s=None),
    },
    last_order_s=4990.0,
    given={"n3": StoredOrders(host="n3", outage="o0", orders=1)},
)


def test_inside_a_boot_nothing_moves() -> None:
    later = replace(NOW, boottime_s=5600.0, wall_s=NOW.wall_s - 86_400.0)  # the wall clock is not asked
    assert decode(encode(TABLE, NOW), later) == TABLE


@pytest.mark.parametrize(("wall_step_s", "gone_s"), [(300.0, 300.0), (0.0, 0.0), (-50_000.0, 0.0)])
def test_over_a_reboot_the_wall_clock_counts_unless_it_goes_back(wall_step_s: float, gone_s: float) -> None:
    """A clock that is behind makes a host wait once more; it never takes an intent's time away twice."""
    after = Clocks(boot_id="boot-2", boottime_s=40.0, wall_s=NOW.wall_s + wall_step_s)
    decoded = decode(encode(TABLE, NOW), after).intents["n1"]
    assert decoded.not_before_s - 40.0 == pytest.approx(100.0 - gone_s)
    assert 40.0 - decoded.stored_s == pytest.approx(200.0 + gone_s)
    assert decoded.expires_s - 40.0 == pytest.approx(4000.0 - gone_s)
    assert decoded.tried_s is not None
    assert 40.0 - decoded.tried_s == pytest.approx(100.0 + gone_s)
    assert decoded.on_since_s is not None
    assert decoded.on_at_s is not None
    assert (40.0 - decoded.on_since_s, 40.0 - decoded.on_at_s) == pytest.approx((70.0 + gone_s, 10.0 + gone_s))
    assert (decoded.tries, decoded.feeds) == (2, ("a", "b"))


def test_a_file_is_replaced_as_a_whole_and_is_nobody_elses(tmp_path: Path) -> None:
    store = IntentFile(tmp_path)
    assert store.load(NOW) == (IntentTable(), "")
    store.save(TABLE, NOW)
    store.save(TABLE.drop("n2"), NOW)
    assert store.load(NOW) == (TABLE.drop("n2"), "")
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["intents.json"]
    (tmp_path / ".intents.json.new").write_bytes(b"half of a")  # killed in the middle of the next one
    assert store.load(NOW) == (TABLE.drop("n2"), "")
    store.save(TABLE, NOW)
    assert store.load(NOW) == (TABLE, "")


async def test_all_that_wait_for_the_disk_are_in_its_next_write(tmp_path: Path) -> None:
    """The hosts of one UPS ask in the same second and wait for 5 s: one write for each took a slow disk longer."""
    writes: list[int] = []

    class Counted(IntentFile):
        def save(self, table: IntentTable, now: Clocks) -> None:
            writes.append(len(table.intents))
            super().save(table, now)

    async with asyncio.TaskGroup() as tasks:
        keeper = IntentStore(Counted(tmp_path), lambda: NOW, tasks)
        intents = [replace(INTENT, host=f"n{number}") for number in range(256)]
        result = await asyncio.gather(*(keeper.commit(partial(IntentTable.put, intent=each), 60.0) for each in intents))
    assert (set(result), writes, len(keeper.table.intents)) == ({""}, [1, 256], 256)


@pytest.mark.parametrize("kind", ["cut", "flipped", "empty", "zeros", "huge", "other version"])
def test_a_damaged_file_is_set_aside_and_reported(tmp_path: Path, kind: str) -> None:
    """Nothing of it is believed, and the last one is kept."""
    raw = encode(TABLE, NOW)
    other = raw.partition(b" ")[2].strip().replace(b'"schema_version": 1', b'"schema_version": 2')
    damaged = {
        "cut": raw[:50],
        "flipped": raw.replace(b'"boottime_s": 5000.0', b'"boottime_s": 9000.0'),
        "empty": b"",
        "zeros": bytes(len(raw)),
        "huge": b"x" * (MAX_BYTES + 10),
        "other version": hashlib.sha256(other).hexdigest().encode() + b" " + other + b"\n",
    }[kind]
    store = IntentFile(tmp_path)
    store.path.write_bytes(damaged)
    table, why = store.load(NOW)
    assert table == IntentTable()
    assert "its intents do not count; it was set aside as intents.json.damaged" in why
    assert (tmp_path / "intents.json.damaged").read_bytes() == damaged
    assert store.load(NOW) == (IntentTable(), "")


@given(st.binary(max_size=400), st.integers(0, 2000))
def test_no_damage_is_taken_for_good(noise: bytes, at: int) -> None:
    """Whatever is changed is told."""
    raw = encode(TABLE, NOW)
    at %= len(raw)
    damaged = raw[:at] + noise + raw[at + len(noise) :]
    with contextlib.suppress(IntentFileError):
        assert decode(damaged, NOW) == TABLE


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """What cannot be read is kept for a person too: the next write would replace it."""
    other = tmp_path / "other"
    other.write_bytes(encode(TABLE, NOW))
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "intents.json").symlink_to(other)
    store = IntentFile(folder)
    table, why = store.load(NOW)
    assert (table, "cannot be read" in why) == (IntentTable(), True)
    assert "its intents do not count; it was set aside as intents.json.damaged" in why
    store.save(table, NOW)
    assert (folder / "intents.json.damaged").read_bytes() == encode(TABLE, NOW)


@contextlib.contextmanager
def unreadable(folder: Path) -> Iterator[None]:
    """Put something in place of the file that cannot be read, as its permissions or its disk may be; then mend it."""
    path, unread, kept = folder / "intents.json", folder / "intents.json.unread", folder / "kept"
    path.replace(kept)
    path.mkdir()
    yield
    wrong = unread if unread.is_dir() else path
    wrong.rmdir()
    kept.replace(wrong)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[IntentStore]:
    async with asyncio.TaskGroup() as tasks:
        keeper = IntentStore(IntentFile(folder), lambda: NOW, tasks)
        await keeper.load()
        task = tasks.create_task(keeper.run(0.01))
        yield keeper
        await asyncio.sleep(0.1)
        task.cancel()
        await keeper.close(10.0)


async def test_a_file_that_cannot_be_read_for_now_counts_once_it_can(tmp_path: Path) -> None:
    """The hosts in it are off, and wait for it: it is not set aside, and not written over."""
    IntentFile(tmp_path).save(TABLE, NOW)
    with contextlib.ExitStack() as mended:
        mended.enter_context(unreadable(tmp_path))
        async with running(tmp_path) as keeper:
            assert (keeper.table, "cannot be read (Is a directory)" in keeper.damage) == (IntentTable(), True)
            await asyncio.sleep(0.1)
        async with running(tmp_path) as keeper:
            assert keeper.table == IntentTable()
            mended.close()
            await asyncio.sleep(0.1)
            assert (keeper.table, keeper.damage) == (TABLE, "")
    assert names(tmp_path) == ["intents.json"]
    assert IntentFile(tmp_path).load(NOW) == (TABLE, "")


@pytest.mark.parametrize("restarts", [False, True])
async def test_it_does_not_count_for_a_host_that_was_heard_meanwhile(tmp_path: Path, *, restarts: bool) -> None:
    """What a host says is kept at once; the others still wait for the file that cannot be read, over a restart too."""
    IntentFile(tmp_path).save(TABLE, NOW)
    own = replace(INTENT, host="n4", outage="o2")
    with contextlib.ExitStack() as mended:
        mended.enter_context(unreadable(tmp_path))
        async with running(tmp_path) as keeper:
            keeper.hear("n1")  # it withdraws what it has asked for
            assert keeper.is_behind
            assert await keeper.flush(10.0) == ""
            assert await keeper.commit(partial(IntentTable.put, intent=own), 10.0) == ""
            assert keeper.table.intents == {"n4": own}
            if not restarts:
                mended.close()
                await asyncio.sleep(0.1)
                assert keeper.table.intents == {"n2": TABLE.intents["n2"], "n4": own}
    async with running(tmp_path) as keeper:
        assert (keeper.table.intents, keeper.damage) == ({"n2": TABLE.intents["n2"], "n4": own}, "")
    assert names(tmp_path) == ["intents.json"]


async def test_one_that_proves_to_be_damaged_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "intents.json").write_bytes(b"half of a")
    with contextlib.ExitStack() as mended:
        mended.enter_context(unreadable(tmp_path))
        async with running(tmp_path) as keeper:
            assert await keeper.flush(10.0) == ""
            mended.close()
            await asyncio.sleep(0.1)
            assert "it was set aside as intents.json.unread.damaged" in keeper.damage
