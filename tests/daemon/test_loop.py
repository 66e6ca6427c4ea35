"""The loop: journal before action, in order, whatever the disk does; and nobody who breaks takes it down."""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from structlog.testing import capture_logs

from powerguard.core.model.actions import Action, EnsurePolicy, Note, PollNow, ResumeTrainer, TriggerCheckpoint
from powerguard.core.model.events import Abort, CheckpointNow, CheckpointProgress, Done, Failed, Reading
from powerguard.core.model.state import OnBattery, Online
from powerguard.daemon.attempt import RESTART_MAX_S, keep_running, rest
from powerguard.daemon.journal import Inline, JournalError, JournalLimits, read_all, read_only
from powerguard.daemon.journal.store import Batch, Store
from powerguard.daemon.loop import QUEUE_LIMIT, Loop, log_note
from powerguard.daemon.observe.readiness import readiness
from tests.daemon.looped import CHECKPOINT_S, World, in_virtual_time, now_s, until


class Late(Inline):
    """A disk whose every call takes `delay_s` of the loop's time; None: it never answers again."""

    def __init__(self) -> None:
        self.delay_s: float | None = 0.0
        self.calls = 0

    def submit(self, call: Callable[[], None]) -> None:
        self.calls += 1
        if self.delay_s is not None:
            asyncio.get_running_loop().call_later(self.delay_s, call)


class Full(Store):
    """A disk that takes nothing while it is full."""

    full = False

    def write(self, batch: Batch) -> None:
        if self.full:
            msg = f"{self.path}: no space left on the device"
            raise JournalError(msg)
        super().write(batch)


def in_flight(path: Path) -> set[str]:
    with read_only(path) as db:
        return {action.id for action in read_all(db)[0].in_flight}


@in_virtual_time
async def test_an_action_starts_only_when_the_file_holds_it(tmp_path: Path) -> None:
    """Whoever is asked to do something looks into the file with a connection of its own: the order stands there."""
    world = World(tmp_path / "journal.sqlite")
    missing: list[Action] = []

    def look(action: Action) -> None:
        if "-policy-" not in action.id and action.id not in in_flight(world.path):
            missing.append(action)
        world.started.append(action)

    for doer in (world.trainer, world.resumer, world.bmc, world.disks, world.host):
        doer.on_start = look
    async with world.running() as daemon:
        world.ups.utility = False
        await until(lambda: world.host.asked)
        assert daemon.journal.health.durable
    assert missing == []
    kinds = [type(action).__name__ for action in world.started if "-policy-" not in action.id]
    assert kinds == ["EnsurePolicy", "TriggerCheckpoint", "EnsurePolicy", "SyncFilesystems", "PowerOff"]


@in_virtual_time
async def test_a_slow_disk_delays_the_action_and_no_more(tmp_path: Path) -> None:
    """0.3 s for each write: the order starts 0.3 s after it was decided, durable."""
    writer = Late()
    world = World(tmp_path / "journal.sqlite", writer=writer)
    async with world.running() as daemon:
        await rest(5.0)
        writer.delay_s = 0.3
        daemon.submit(CheckpointNow(at_s=world.clock(), who="tester"))
        asked_at_s = world.clock()
        await until(lambda: world.trainer.asked)
        assert 0.29 < world.trainer.asked[0][0] - asked_at_s < 0.65
        assert daemon.journal.health.durable
        assert world.trainer.actions[0].id in in_flight(world.path)
        writer.delay_s = 0.0


@in_virtual_time
async def test_a_hung_disk_holds_an_action_up_for_half_a_second_once(tmp_path: Path) -> None:
    """A disk that never answers again: the first order waits 500 ms, the next not at all; the outage goes on."""
    writer = Late()
    world = World(tmp_path / "journal.sqlite", writer=writer)
    async with world.running(kill=True) as daemon:
        await rest(5.0)
        writer.delay_s = None
        world.ups.utility = False
        began_s = world.clock()
        await until(lambda: world.host.asked)
        assert daemon.journal_trouble
        assert world.host.asked[0][0] - began_s < 250.0
        ordered_at_s = world.clock()
        daemon.submit(CheckpointNow(at_s=ordered_at_s, who="tester"))
        asked = len(world.trainer.asked)
        await until(lambda: len(world.trainer.asked) > asked)
        assert world.clock() - ordered_at_s < 0.15
        assert "TriggerCheckpoint" not in [line.event for line in world.lines()]


@in_virtual_time
async def test_a_full_disk_is_an_alarm_and_no_hindrance(tmp_path: Path) -> None:
    """Nothing can be written: the action starts at once; when there is room again, the whole story is on the disk."""
    store = Full(tmp_path / "journal.sqlite")
    world = World(tmp_path / "journal.sqlite", store=store, limits=JournalLimits(retry_s=5.0))
    async with world.running() as daemon:
        store.full = True
        began_s = world.clock()
        world.ups.utility = False
        await until(lambda: world.trainer.done)
        (reason,) = (each for each in readiness(daemon) if each.name == "journal_in_memory")
        assert daemon.journal_trouble in reason.text
        assert world.trainer.asked[0][0] - began_s < 120.0
        assert "outage_began" not in world.notes()
        store.full = False
        await until(lambda: not daemon.journal_trouble, 10.0)
        assert world.notes()[:2] == ["outage_began", "phase_changed"]
        assert "checkpoint_durable" in world.notes()


@in_virtual_time
async def test_outcomes_are_written_and_polls_never(tmp_path: Path) -> None:
    """Of every order but a poll the file knows the end, so a restart repeats nothing."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running():
        world.ups.utility = False
        await until(lambda: world.host.done)
        await rest(1.0)
        kinds = [(line.kind, line.event) for line in world.lines()]
        ordered = [line.action for line in world.lines() if line.kind == "action"]
        ended = [line.action for line in world.lines() if line.kind == "outcome"]
    assert world.cards[0].polled > 0, "polls were ordered"
    assert ("action", "PollNow") not in kinds
    assert not any(line.payload.get("kind") == "PollNow" for line in world.lines())
    assert sorted(map(str, ordered)) == sorted(map(str, ended))
    assert in_flight(world.path) == set()


@in_virtual_time
async def test_polls_go_to_the_ups_that_is_meant(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        (card,) = world.cards
        polled = card.polled
        daemon._start(PollNow(id="p-1", by_s=now_s() + 1, ups="another"))
        assert card.polled == polled
        daemon._start(PollNow(id="p-2", by_s=now_s() + 1, ups="rack-a"))
        daemon.poll_now()
        assert card.polled == polled + 2


@in_virtual_time
async def test_an_order_that_nobody_carries_out_fails_in_words(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    parts = world.parts()
    parts = world.parts(effectors={k: v for k, v in parts.effectors.items() if k is not TriggerCheckpoint})
    async with world.running(parts) as daemon:
        daemon.submit(CheckpointNow(at_s=world.clock(), who="tester"))
        await until(lambda: daemon.actions.counts["checkpoint", "failed"])
        failed = [line for line in world.lines() if line.kind == "outcome"]
    assert [line.because for line in failed] == ["no effector carries out TriggerCheckpoint: the settings have none"]


# --- Those who break ------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_source_that_raises_is_lost_restarted_and_back(tmp_path: Path) -> None:
    """A bug in a poller: the core hears of a lost source, the poller is started anew, ever more seldom."""
    world = World(tmp_path / "journal.sqlite")
    # Captured: structlog's own traceback for people takes half a second each.
    with capture_logs() as logged:
        async with world.running() as daemon:
            await breaks_and_mends(world, daemon)
    restarts = [line["after_s"] for line in logged if line["event"] == "task_restarted"]
    assert restarts[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert {line["task"] for line in logged if line["event"] == "task_failed"} == {"source card"}


async def breaks_and_mends(world: World, daemon: Loop) -> None:
    (card,) = world.cards
    await rest(5.0)
    card.fault = ValueError("a reply of minus one bytes")
    card.poll_now()
    await until(lambda: not daemon.sources[0].up)
    assert "a reply of minus one bytes" in daemon.sources[0].last_error
    await until(lambda: daemon.state.feed.lost_since_s is not None, 10.0)
    assert isinstance(daemon.state.phase, Online)
    assert "source_lost" in world.notes()
    await rest(300.0)
    assert 5 + 7 < card.runs < 20, "1, 2, 4, 8, 16, then every 30 s"
    card.fault = None
    await until(lambda: daemon.sources[0].up, RESTART_MAX_S + 1.0)
    await rest(2.0)
    assert daemon.state.feed.lost_since_s is None
    assert "source_recovered" in world.notes()


@in_virtual_time
async def test_a_source_that_ends_is_lost_and_restarted(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        (card,) = world.cards
        card.ends = True
        await until(lambda: card.runs > 2)
        assert daemon.sources[0].last_error == "source card: it ended by itself"
        card.ends = False
        await until(lambda: daemon.sources[0].up)


@in_virtual_time
async def test_a_watcher_that_raises_is_restarted(tmp_path: Path) -> None:
    """Whoever watches the trainers may break as well: nobody else feels it."""
    runs: list[float] = []

    async def watch() -> None:
        runs.append(now_s())
        if len(runs) < 3:
            msg = "trainer spoke Latin"
            raise UnicodeError(msg)
        await asyncio.Event().wait()

    world = World(tmp_path / "journal.sqlite", watchers={"trainers": watch})
    async with world.running() as daemon:
        await until(lambda: len(runs) == 3, 10.0)
        await rest(60.0)
        assert [round(after - before) for before, after in pairwise(runs)] == [1, 2]
        assert daemon.sources[0].up


@in_virtual_time
async def test_a_task_that_ran_long_is_restarted_at_once(tmp_path: Path) -> None:
    """The back-off is for bugs that repeat: one that shows once an hour waits a second, not thirty."""
    began: list[float] = []
    found: list[str] = []

    async def lasts() -> None:
        began.append(now_s())
        await rest(0.5 if len(began) < 8 else 3600.0)

    task = asyncio.get_running_loop().create_task(keep_running("lasts", lasts, found.append))
    await until(lambda: len(began) == 10, 10_000.0)
    task.cancel()
    gaps = [after - before for before, after in pairwise(began)]
    assert [round(gap - 0.5) for gap in gaps[:7]] == [1, 2, 4, 8, 16, 30, 30]
    assert [round(gap - 3600.0) for gap in gaps[7:]] == [1, 1]
    assert found == ["lasts: it ended by itself"] * 9


@in_virtual_time
async def test_a_task_that_swallowed_its_end_is_not_restarted() -> None:
    """It was left behind at a reload: started again, it would read the UPS of the earlier settings for ever."""
    runs: list[float] = []

    async def swallows() -> None:
        runs.append(now_s())
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await rest(5.0)

    task = asyncio.get_running_loop().create_task(keep_running("swallows", swallows))
    await rest(1.0)
    task.cancel()
    await asyncio.wait({task}, timeout=60.0)
    assert task.done()
    assert len(runs) == 1


# --- Too much at once -----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_ten_thousand_readings_at_once(tmp_path: Path) -> None:
    """What repeats is dropped, what does not is not: the queue is bounded, outcomes and orders arrive."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        reading = world.cards[0].reading()
        action = EnsurePolicy(id="o-1", by_s=world.clock() + 5.0, outage="")
        ends: list[Done | Failed] = [
            Done(at_s=world.clock(), action=action, took_s=0.1, detail=(("policy", "always-on"), ("verified", True))),
            Failed(at_s=world.clock(), action=action, took_s=0.1, reason="it said no"),
        ]
        for at in range(10_000):
            daemon.publish(reading)
            if at % 2500 == 0:
                daemon.submit(ends[0])
                daemon.submit(ends[1])
        progress = CheckpointProgress(at_s=world.clock(), trainer="llm", action_id="x", stage="writing")
        daemon.submit(progress)
        daemon.submit(Abort(at_s=world.clock(), who="tester"))
        assert daemon._queue.qsize() <= QUEUE_LIMIT + 9
        assert daemon._dropped >= 10_000 - QUEUE_LIMIT
        before_s = daemon.progressed_at_s
        await rest(5.0)
        assert daemon._queue.empty()
        assert daemon.actions.counts["bmc_policy", "failed"] == 4
        assert daemon.actions.counts["bmc_policy", "done"] == 5, "four of ours, and the check at the start"
        assert daemon.progressed_at_s >= before_s + 4.0
        assert daemon.state.feed.reading is not None
        assert daemon.state.feed.reading.at_s > reading.at_s


@in_virtual_time
async def test_readings_that_claim_nonsense_do_not_end_the_loop(tmp_path: Path) -> None:
    """A poller that hands over numbers which are none: the loop goes on and the file stays writable."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        nan = float("nan")
        good = world.cards[0].reading()
        for bad in (nan, float("inf"), -1e300):
            daemon.publish(
                Reading(
                    at_s=bad,
                    ups="rack-a",
                    source="card",
                    output_source=good.output_source,
                    runtime_s=bad,
                    charge_pct=bad,
                    load_pct=bad,
                )
            )
            daemon.publish(
                Reading(at_s=world.clock(), ups="rack-a", source="card", output_source=good.output_source, load_pct=bad)
            )
        daemon.submit(CheckpointNow(at_s=world.clock(), who="\ud800 tester\x00"))
        await until(lambda: world.trainer.done)
        await rest(2.0)
        assert not daemon.journal_trouble
        assert daemon.sources[0].up


# --- Dips, returns, and what is told ---------------------------------------------------------------------------------


@in_virtual_time
async def test_a_dip_is_ridden_through(tmp_path: Path) -> None:
    """Five seconds: the trainer never hears of it, and the loop is quick on battery and at ease on utility."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await rest(3.0)
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, OnBattery), 3.0)
        await rest(5.0)
        world.ups.utility = True
        await until(lambda: isinstance(daemon.state.phase, Online), 3.0)
        assert world.trainer.asked == []
        assert world.notes() == ["outage_began", "phase_changed", "phase_changed", "outage_ended"]
        assert daemon.last_outage is not None
        assert daemon.last_outage.outcome == "ridden_through"


@in_virtual_time
async def test_training_goes_on_in_place(tmp_path: Path) -> None:
    """Held through: exactly one resume, after utility has been stable for ten seconds."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        world.ups.utility = False
        await until(lambda: "checkpoint_durable" in world.notes())
        await rest(10.0)
        world.ups.utility = True
        back_at_s = world.clock()
        await until(lambda: isinstance(daemon.state.phase, Online), 60.0)
        await rest(5.0)
    assert [type(action) for action in world.resumer.actions] == [ResumeTrainer]
    assert 10.0 <= world.resumer.asked[0][0] - back_at_s < 13.0
    assert world.host.asked == []
    assert world.trainer.asked[0][0] + CHECKPOINT_S < back_at_s


def test_the_file_is_a_plain_database(tmp_path: Path) -> None:
    """What the tests above read is what sqlite3 reads: no second truth in memory."""

    @in_virtual_time
    async def play() -> None:
        world = World(tmp_path / "journal.sqlite")
        async with world.running() as daemon:
            daemon.submit(CheckpointNow(at_s=world.clock(), who="tester"))
            await until(lambda: world.trainer.done)
            await rest(1.0)

    play()
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    kinds = db.execute("SELECT kind, count(*) FROM entries GROUP BY kind").fetchall()
    db.close()
    assert dict(kinds)["action"] == dict(kinds)["outcome"] == 1


def test_a_number_cannot_break_the_line_that_it_stands_in() -> None:
    """An effector's detail named like the line's own words ended the daemon: log calls take each name once."""
    with capture_logs() as logs:
        log_note(Note(event="policy_verified", because="hourly", numbers=(("because", "x"), ("event", "y"), ("n", 1))))
    assert logs == [{"event": "policy_verified", "because": "hourly", "n": 1, "log_level": "info"}]
