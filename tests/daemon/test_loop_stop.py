"""Told to stop, to reload, and watched by systemd: prompt, never held up, and never praised while nothing is done."""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.core.model.actions import CheckPowerOn, EnsurePolicy, Note, PowerOnMethod
from powerguard.core.model.events import CheckpointNow, OutputSource
from powerguard.core.model.policy import TrainerPolicy
from powerguard.core.model.state import Holding, OnBattery, Online
from powerguard.daemon.attempt import GRACE_S, rest
from powerguard.daemon.journal import Inline, JournalLimits
from powerguard.daemon.loop import CHECK_S, CLOSE_LIMIT_S, SOURCE_SILENT_S, STOP_LIMIT_S, Components
from powerguard.daemon.observe.port import BmcView
from powerguard.daemon.observe.readiness import readiness
from powerguard.daemon.systemd import Notifier
from tests.daemon.looped import Doer, World, in_virtual_time, now_s, until

# --- Stopping -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_stop_on_utility_takes_a_moment(tmp_path: Path) -> None:
    """Pollers and watchers end, connections are given back, and the file says that nothing runs."""
    ended: list[str] = []

    async def watch() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("watcher")

    world = World(tmp_path / "journal.sqlite", watchers={"trainers": watch})
    async with world.running() as daemon:
        began_s = now_s()
        daemon.stop_for_signal(host_stopping=False)
        await until(lambda: world.closed, 5.0)
    assert now_s() - began_s < 1.5
    assert ended == ["watcher"]
    assert (world.cards[0].ended, world.closed) == (1, 1)
    assert "foreign_stop_seen" not in world.notes(), "on utility nobody's stop is a story"


class Slow(Inline):
    """A disk with a rhythm of its own: 0.2 s for every call. busy: one is under way."""

    busy = False

    def submit(self, call: Callable[[], None]) -> None:
        self.busy = True
        asyncio.get_running_loop().call_later(0.2, self._end, call)

    def _end(self, call: Callable[[], None]) -> None:
        self.busy = False
        call()


@pytest.mark.parametrize("writer", [Inline(), Slow()], ids=["quick disk", "slow disk"])
def test_a_foreign_stop_on_battery_arms_the_return_first(tmp_path: Path, writer: Inline) -> None:
    """Somebody else shuts this host down: the BMC is made sure of before we go, also while the disk takes its time.

    The loop once ended while the step that orders it was still being written.
    """

    @in_virtual_time
    async def play() -> None:
        world = World(tmp_path / "journal.sqlite", writer=writer)
        async with world.running() as daemon:
            world.ups.utility = False
            await until(lambda: isinstance(daemon.state.phase, OnBattery), 5.0)
            world.bmc.takes_s = 3.0
            asked = len(world.bmc.asked)
            daemon.stop_for_signal(host_stopping=True)
            await until(lambda: len(world.bmc.done) > asked, STOP_LIMIT_S)
        assert isinstance(world.bmc.done[-1], EnsurePolicy)
        assert world.notes()[-2:] == ["foreign_stop_seen", "policy_verified"]

    play()


@in_virtual_time
async def test_a_stop_waits_for_a_dead_bmc_only_so_long(tmp_path: Path) -> None:
    """The BMC never answers: its own limit ends it, and we are gone within ours."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, OnBattery), 5.0)
        world.bmc.takes_s = 1e6
        began_s = now_s()
        daemon.stop_for_signal(host_stopping=True)
        await until(lambda: world.closed, 20.0)
        assert 4.9 < now_s() - began_s < STOP_LIMIT_S + 1.5
    assert "action_failed" in world.notes()


@in_virtual_time
async def test_a_stop_does_not_wait_for_a_checkpoint(tmp_path: Path) -> None:
    """The trainer writes on without us; without an outcome the next daemon of this boot asks again."""
    world = World(tmp_path / "journal.sqlite")
    world.trainer.takes_s = 120.0
    async with world.running() as daemon:
        world.ups.utility = False
        await until(lambda: world.trainer.asked)
        began_s = now_s()
        daemon.stop()
        await until(lambda: world.closed, 20.0)
        assert now_s() - began_s < 2.0
    world.trainer.takes_s = 10.0
    async with world.running() as daemon:
        await until(lambda: isinstance(daemon.state.phase, Holding), 60.0)
    first, second = world.trainer.actions
    assert first == second


@in_virtual_time
async def test_a_stop_is_not_held_up_by_those_who_do_not_listen(tmp_path: Path) -> None:
    """A trainer's effector, a poller and a connection that swallow every cancellation: left behind, and counted."""
    world = World(tmp_path / "journal.sqlite")
    stubborn = asyncio.Event()
    parts = world.parts(close=stubborn.wait)
    async with world.running(parts) as daemon:
        world.trainer.stubborn = stubborn
        world.ups.utility = False
        await until(lambda: world.trainer.asked)
        world.cards[0].stubborn = stubborn
        began_s = now_s()
        running = asyncio.all_tasks()
        daemon.stop()
        while daemon.journal._closed is False:
            await rest(0.1)
        limit_s = CLOSE_LIMIT_S + STOP_LIMIT_S + GRACE_S + CLOSE_LIMIT_S
        assert now_s() - began_s <= limit_s + 0.5
        assert {task.get_name().partition(" ")[0] for task in daemon.abandoned.running} == {"source", "action"}
        assert len(daemon.abandoned.running) == 2
    left = set(daemon.abandoned.running)
    assert left <= running
    stubborn.set()
    await asyncio.wait(left, timeout=60.0)
    assert daemon.abandoned.running == set()


# --- Reloading --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_reload_replaces_the_pollers(tmp_path: Path) -> None:
    """Online: old pollers and connections end, new ones begin, the BMC is checked by the new settings."""
    world = World(tmp_path / "journal.sqlite")
    world.reload = world.parts
    async with world.running() as daemon:
        (old,) = world.cards
        checks = len(world.bmc.asked)
        await rest(10.0)
        daemon.reload()
        await until(lambda: world.closed == 1, 5.0)
        await rest(2.0)
        (new,) = world.cards
        assert (old.ended, new.runs) == (1, 1)
        assert new is not old
        assert daemon.settings_ok
        assert daemon.settings_at_s > daemon.started_at_s
        assert daemon.sources[0].polls > 10, "what was counted of a source that stays is kept"
        assert len(world.bmc.asked) == checks + 1
        assert isinstance(daemon.state.phase, Online)
    assert world.closed == 2


@in_virtual_time
async def test_what_happens_beside_the_machine_is_written_down_and_the_return_checked_again(tmp_path: Path) -> None:
    """A line of the story in its turn among the steps; a check that was asked for during another one follows it."""
    world = World(tmp_path / "journal.sqlite")
    world.bmc.takes_s = 3.0
    async with world.running() as daemon:
        daemon.note(Note(event="watchdog_drill_judged", because="restart cause watchdog", numbers=(("passed", True),)))
        await until(lambda: len(world.bmc.asked) == 1, 5.0)
        daemon.check_soon()
        await until(lambda: len(world.bmc.asked) == 2, 10.0)
        await rest(60.0)
        assert len(world.bmc.asked) == 2
        state = daemon.state
    (line,) = [line for line in world.lines() if line.event == "watchdog_drill_judged"]
    assert (line.kind, line.because, line.outage) == ("note", "restart cause watchdog", None)
    assert state.feed.reading is not None


@in_virtual_time
async def test_a_bmc_that_did_not_answer_is_asked_again_before_the_hour_is_over(tmp_path: Path) -> None:
    """At the boot it is often busy: after a minute, then ever less often; once it has answered, hourly."""
    world = World(tmp_path / "journal.sqlite")
    world.bmc.error = "no answer"
    world.bmc.takes_s = 0.0
    async with world.running():
        await rest(30.0)
        (first_s,) = [at_s for at_s, _ in world.bmc.asked]
        await rest(70 * 60.0)
        after_s = [round(at_s - first_s, -1) for at_s, _ in world.bmc.asked]
        minutes = [0, 1, 3, 7, 15, 31, 63]
        assert after_s == [60.0 * minute for minute in minutes]
        world.bmc.error = ""
        await until(lambda: world.bmc.done, 3700.0)
        asked = len(world.bmc.asked)
        await rest(3590.0)
        assert len(world.bmc.asked) == asked
        await rest(20.0)
        assert len(world.bmc.asked) == asked + 1


@in_virtual_time
async def test_a_slow_bmc_is_waited_for_without_an_outage(tmp_path: Path) -> None:
    """Old boards take 10 s for a login over Redfish; no power-off waits for this check."""
    world = World(tmp_path / "journal.sqlite")
    world.bmc.takes_s = 12.0
    async with world.running() as daemon:
        await until(lambda: world.bmc.done, 30.0)
        await rest(1.0)
        assert daemon.bmc is not None
        assert daemon.bmc.verified is True


@in_virtual_time
async def test_settings_that_are_wrong_are_refused_and_later_taken(tmp_path: Path) -> None:
    """The settings so far stay, and all that runs by them runs on; readiness knows it; mended, they are taken."""
    world = World(tmp_path / "journal.sqlite")
    mended: list[bool] = []

    def reload() -> Components:
        if not mended:
            msg = "powerguard.yaml:12:11: budget.margin: must be 0 to 0.9, got '20%' (write 0.2)"
            raise ValueError(msg)
        return world.parts()

    world.reload = reload
    async with world.running() as daemon:
        (card,) = world.cards
        kept = daemon.parts
        daemon.reload()
        await until(lambda: not daemon.settings_ok, 5.0)
        await rest(5.0)
        assert daemon.parts is kept
        assert world.closed == 0
        assert daemon.sources[0].up
        assert (card.runs, card.ended) == (1, 0), "its poller was not even interrupted"
        mended.append(True)
        daemon.reload()
        await until(lambda: daemon.settings_ok, 5.0)
        await until(lambda: world.closed == 1, 5.0)
        assert daemon.parts is not kept


@in_virtual_time
async def test_no_reload_while_an_outage_runs(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    world.reload = world.parts
    async with world.running() as daemon:
        kept = daemon.parts
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, OnBattery), 5.0)
        daemon.reload()
        await rest(2.0)
        assert daemon.parts is kept
        assert not daemon.settings_ok
        world.ups.utility = True
        await until(lambda: isinstance(daemon.state.phase, Online), 15.0)
        daemon.reload()
        await until(lambda: daemon.settings_ok, 5.0)
        await until(lambda: daemon.parts is not kept, 5.0)


@in_virtual_time
async def test_a_reload_waits_for_the_step_that_is_being_written(tmp_path: Path) -> None:
    """That step may be the beginning of an outage: settings changed in it once, and what they named was forgotten."""
    writer = Slow()
    world = World(tmp_path / "journal.sqlite", writer=writer)
    both = (*world.policy.trainers, TrainerPolicy(name="second", checkpoint_s=5.0))
    world.reload = lambda: world.parts(policy=replace(world.policy, trainers=both))
    async with world.running() as daemon:
        kept = daemon.parts
        await until(lambda: not writer.busy and world.bmc.done, 10.0)
        world.ups.utility = False
        await until(lambda: writer.busy, 10.0)
        assert isinstance(daemon.state.phase, Online), "the outage is being written"
        daemon.reload()
        await until(lambda: isinstance(daemon.state.phase, OnBattery), 5.0)
        await rest(2.0)
        assert (daemon.parts is kept, daemon.settings_ok) == (True, False)
        world.ups.utility = True
        await until(lambda: isinstance(daemon.state.phase, Online) and not writer.busy, 15.0)
        daemon.note(Note(event="watchdog_drill_judged", because="something to write"))
        await until(lambda: writer.busy, 5.0)
        daemon.reload()
        await until(lambda: daemon.settings_ok, 5.0)
        await rest(2.0)
        assert [trainer.name for trainer in daemon.state.trainers] == ["llm", "second"]


@in_virtual_time
async def test_a_bmc_comes_and_goes_with_the_settings(tmp_path: Path) -> None:
    """What is shown of a BMC is never that of earlier settings."""
    world = World(tmp_path / "journal.sqlite")
    world.reload = lambda: world.parts(bmc_kind="none")
    async with world.running() as daemon:
        await until(lambda: daemon.bmc is not None and daemon.bmc.verified, 5.0)
        daemon.reload()
        await until(lambda: daemon.bmc is None, 5.0)
        world.reload = world.parts
        daemon._reload = world.parts
        daemon.reload()
        await until(lambda: daemon.bmc is not None and daemon.bmc.verified, 5.0)


@in_virtual_time
async def test_a_bmc_that_the_settings_do_not_have_is_not_asked(tmp_path: Path) -> None:
    """It is the reason no_bmc, and no failed order: that would be an error in the log at each start."""
    world = World(tmp_path / "journal.sqlite", bmc_kind="none")
    async with world.running() as daemon:
        await until(lambda: daemon.sources[0].up, 5.0)
        await rest(5.0)
        assert world.bmc.asked == []
        assert [reason.name for reason in readiness(daemon)] == ["no_bmc"]


@in_virtual_time
async def test_what_new_settings_name_for_the_return_is_checked_at_once(tmp_path: Path) -> None:
    """And not at the next hour, although a poller of the earlier settings takes its time to end."""
    world = World(tmp_path / "journal.sqlite", bmc_kind="none")
    clock = Doer(world.clock)
    async with world.running() as daemon:
        await until(lambda: daemon.sources[0].up, 5.0)
        (card,) = world.cards
        card.stubborn = asyncio.Event()
        new = world.parts(bmc_kind="ipmi-lan", policy=replace(world.policy, methods=(PowerOnMethod.RTC,)))
        world.bmc.takes_s = 0.0
        daemon._reload = lambda: replace(new, effectors={**new.effectors, CheckPowerOn: clock})
        daemon.reload()
        await rest(5.0)
        card.stubborn.set()
        assert [view.ready for view in daemon.methods] == [True]
        assert daemon.bmc is not None
        assert daemon.bmc.verified


@in_virtual_time
async def test_a_poller_that_outlives_its_settings_is_not_heard(tmp_path: Path) -> None:
    """It may read a UPS that the settings no longer name: after one report, the watchdog would wait for the next."""
    world = World(tmp_path / "journal.sqlite")
    world.reload = world.parts
    async with world.running() as daemon:
        await until(lambda: daemon.sources[0].up, 5.0)
        (old,) = world.cards
        old.stubborn = asyncio.Event()
        late = old.reading()
        daemon.reload()
        await until(lambda: world.closed == 1, 5.0)
        polls = daemon.sources[0].polls
        old.publish(replace(late, ups="rack-b", output_source=OutputSource.BATTERY))
        old.publish(replace(late, output_source=OutputSource.BATTERY))
        assert [(view.ups, view.polls) for view in daemon.sources] == [("rack-a", polls)]
        await rest(SOURCE_SILENT_S + 5.0)
        assert daemon._sources.silent(SOURCE_SILENT_S) == ""
        old.stubborn.set()
        assert isinstance(daemon.state.phase, Online)


# --- The watchdog -----------------------------------------------------------------------------------------------------


class Manager:
    """What systemd is to us: a datagram socket. `told` takes what has come since the last look."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        self.environ = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "20000000"}

    def messages(self) -> list[str]:
        found: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._socket.recv(4096).decode())
        return found

    def fill(self) -> None:
        """Leave no room for a message until the next look."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
            while True:
                other.sendto(b"STATUS=busy", socket.MSG_DONTWAIT, self.environ["NOTIFY_SOCKET"])

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager() -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = Manager(Path(folder) / "notify")
        yield made
        made.close()


def test_the_watchdog_is_fed_for_progress_only(tmp_path: Path, manager: Manager) -> None:
    """Ready, fed every ten seconds, starved while a poller hangs, told of the phase, and told goodbye."""

    @in_virtual_time
    async def play() -> None:
        notifier = Notifier.take(dict(manager.environ), pid=os.getpid())
        world = World(tmp_path / "journal.sqlite", notifier=notifier)
        async with world.running() as daemon:
            assert manager.messages()[0].startswith("READY=1")
            for _ in range(6):
                await rest(10.0)
                assert "WATCHDOG=1" in manager.messages()
            (card,) = world.cards
            card.hangs = True
            card.poll_now()
            await rest(SOURCE_SILENT_S + 1.0)
            manager.messages()
            await rest(60.0)
            assert manager.messages() == [], "it hangs: systemd may kill and restart us"
            assert daemon.progressed_at_s > world.clock() - 2.0, "though events still are answered"
            world.ups.utility = False
            daemon.publish(card.reading())
            daemon.publish(card.reading())
            await rest(1.0)
            result = manager.messages()
            assert "WATCHDOG=1" in result
            assert any(line.startswith("STATUS=on_battery") for line in result)
        assert manager.messages()[-1].startswith("STOPPING=1")
        notifier.close()

    play()


def test_a_busy_manager_does_not_take_the_daemon_for_hung(tmp_path: Path, manager: Manager) -> None:
    """It reads nothing for a moment, at the start and later: what is lost of READY and WATCHDOG comes soon after."""

    @in_virtual_time
    async def play() -> None:
        notifier = Notifier.take(dict(manager.environ), pid=os.getpid())
        world = World(tmp_path / "journal.sqlite", notifier=notifier)
        manager.fill()
        async with world.running():
            await rest(1.0)
            manager.messages()
            await rest(2.0)
            assert manager.messages()[0].splitlines() == ["WATCHDOG=1", "READY=1"]
            manager.fill()
            await rest(11.0)
            manager.messages()
            await rest(2.0)
            assert manager.messages() == ["WATCHDOG=1"]
            await rest(7.0)
            assert manager.messages() == []
        notifier.close()

    play()


class Stuck(Inline):
    """A disk that stops answering, under a loop that (unlike ours) would wait for it for ever."""

    is_stuck = False

    def submit(self, call: Callable[[], None]) -> None:
        if not self.is_stuck:
            call()


def test_a_loop_that_stands_still_is_not_praised(tmp_path: Path, manager: Manager) -> None:
    """The machine does not get on: readings still come in and nobody answers them."""

    @in_virtual_time
    async def play() -> None:
        notifier = Notifier.take(dict(manager.environ), pid=os.getpid())
        writer = Stuck()
        world = World(tmp_path / "journal.sqlite", notifier=notifier, writer=writer, limits=JournalLimits(append_s=1e6))
        async with world.running(kill=True) as daemon:
            await rest(15.0)
            writer.is_stuck = True
            daemon.submit(CheckpointNow(at_s=world.clock(), who="tester"))
            await rest(1.0)
            manager.messages()
            await rest(60.0)
            assert manager.messages() == []
            assert daemon.sources[0].up
        notifier.close()

    play()


# --- The BMC's policy on an ordinary day ------------------------------------------------------------------------------


@in_virtual_time
async def test_the_policy_is_checked_at_start_and_every_hour(tmp_path: Path) -> None:
    """A BMC that forgets is found within the hour, shown with its reason, and cleared when it is mended."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await rest(1.0)
        assert daemon.bmc is not None
        assert (daemon.bmc.verified, daemon.bmc.policy, daemon.bmc.error) == (True, "always-on", "")
        assert len(world.bmc.asked) == 1
        world.bmc.error = "BMC 10.0.0.7: reads last-state where always-on was asked for"
        await rest(CHECK_S + 2.0)
        assert len(world.bmc.asked) == 2
        assert not daemon.bmc.verified
        assert daemon.bmc.error == world.bmc.error
        assert daemon.actions.counts["bmc_policy", "failed"] == 1
        world.bmc.error = ""
        await rest(CHECK_S)
        assert len(world.bmc.asked) == 3
        assert (daemon.bmc.verified, daemon.bmc.error) == (True, "")
    assert not any(line.event == "EnsurePolicy" for line in world.lines()), "an ordinary day is no story"


@in_virtual_time
async def test_what_was_read_of_a_bmc_is_shown_though_it_is_wrong(tmp_path: Path) -> None:
    """A policy that was read is known, whatever the check made of it; one that could not be read stays as old as it is.

    Status once said "?" beside a message that named the policy, and "always-on" beside one that had read another.
    """
    world = World(tmp_path / "journal.sqlite")
    world.bmc.takes_s = 0.0
    world.bmc.error, world.bmc.error_detail = "it is last-state", (("policy", "last-state"),)
    async with world.running() as daemon:

        async def asked() -> BmcView:
            before = len(world.bmc.asked)
            daemon.check_soon()
            await until(lambda: len(world.bmc.asked) > before, 5.0)
            await rest(1.0)
            assert daemon.bmc is not None
            return daemon.bmc

        wrong = await asked()
        assert (wrong.policy, wrong.verified, wrong.error) == ("last-state", False, "it is last-state")
        assert wrong.checked_at_s is not None
        await rest(30.0)
        world.bmc.error, world.bmc.error_detail = "no answer", ()
        silent = await asked()
        assert (silent.policy, silent.error) == ("last-state", "no answer")
        assert silent.checked_at_s is not None
        assert silent.checked_at_s < world.clock() - 30.0, "that was not read just now"
        world.bmc.error = ""
        assert (await asked()).policy == "always-on"


@in_virtual_time
async def test_a_bmc_that_hangs_is_an_error_in_the_view(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    world.bmc.takes_s = 1e6
    async with world.running() as daemon:
        await rest(25.0)
        assert daemon.bmc is not None
        assert daemon.bmc.error.startswith("timed out after 20.")
        assert daemon.actions.counts["bmc_policy", "timed_out"] == 1
