"""Killed in any phase and started again: the same outage, the same deadline, and nothing repeated that has an end."""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.core.model.actions import (
    Action,
    ArmPowerOn,
    CheckPowerOn,
    DisarmPowerOn,
    EnsurePolicy,
    PowerOff,
    PowerOnMethod,
    ResumeTraining,
    SyncFilesystems,
    TriggerCheckpoint,
)
from powerguard.core.model.events import BatteryReplaced, SetMaintenance
from powerguard.core.model.state import EmergencyCheckpoint, Holding, OnBattery, Online, Outage, Recovery, Shutdown
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import Inline, JournalError, Loaded, OutageRecord
from powerguard.daemon.journal.store import Store
from powerguard.daemon.loop import Loop
from powerguard.daemon.observe.readiness import readiness
from tests.daemon.looped import Doer, World, in_virtual_time, now_s, until


def outage_of(daemon: Loop) -> Outage:
    assert not isinstance(daemon.state.phase, Online)
    return daemon.state.phase.outage


def ordered(world: World, kind: type[Action]) -> list[str]:
    return [action.id for action in world.started if isinstance(action, kind) and "-policy-" not in action.id]


async def dark_until(world: World, daemon: Loop, reached: Callable[[], object]) -> Outage:
    world.ups.utility = False
    await until(reached)
    return outage_of(daemon)


@in_virtual_time
async def test_killed_on_battery(tmp_path: Path) -> None:
    """The outage goes on under its id, counted from its beginning, and what was used is not forgotten."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        before = await dark_until(world, daemon, lambda: isinstance(daemon.state.phase, OnBattery))
        await rest(6.0)
        used = daemon.state.battery.used
    await rest(3.0)
    async with world.running() as daemon:
        assert isinstance(daemon.state.phase, OnBattery)
        assert (outage_of(daemon).id, outage_of(daemon).since_s) == (before.id, before.since_s)
        assert daemon.state.battery.used is not None
        assert used is not None
        assert daemon.state.battery.used >= used
        world.ups.utility = True
        await until(lambda: isinstance(daemon.state.phase, Online), 5.0)
    assert [record.id for record in world.outages()] == [before.id]
    assert world.notes().count("outage_began") == 1


@in_virtual_time
async def test_killed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """The order is repeated under its own id, with its own deadline; the trainer joins the two."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        before = await dark_until(world, daemon, lambda: world.trainer.asked)
        await rest(5.0)
        assert world.trainer.done == []
    await rest(1.0)
    async with world.running() as daemon:
        assert outage_of(daemon).id == before.id
        await until(lambda: world.trainer.done, 30.0)
        await until(lambda: isinstance(daemon.state.phase, Holding), 2.0)
        await rest(5.0)
    first, second = world.trainer.actions
    assert first == second
    assert world.notes().count("checkpoint_ordered") == 1


@in_virtual_time
async def test_killed_in_a_hold(tmp_path: Path) -> None:
    """The checkpoint has its outcome in the file: it is not asked for again, and the hold goes on."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        before = await dark_until(world, daemon, lambda: isinstance(daemon.state.phase, Holding))
        await rest(2.0)
    for _ in range(3):
        async with world.running(kill=True) as daemon:
            assert isinstance(daemon.state.phase, Holding)
            assert outage_of(daemon).id == before.id
            await rest(4.0)
    async with world.running() as daemon:
        world.ups.utility = True
        await until(lambda: isinstance(daemon.state.phase, Online), 30.0)
        await rest(1.0)
        assert daemon.last_outage is not None
        assert daemon.last_outage.outcome == "resumed_in_place"
    assert len(world.trainer.asked) == 1
    assert len(world.resumer.asked) == 1
    assert world.host.asked == []


@in_virtual_time
async def test_killed_between_the_latch_and_the_power_off(tmp_path: Path) -> None:
    """The most delicate second: latched, nothing ordered yet. The next daemon orders it, with the same latch."""
    world = World(tmp_path / "journal.sqlite")
    world.disks.takes_s = 3.0
    async with world.running(kill=True) as daemon:
        before = await dark_until(world, daemon, lambda: isinstance(daemon.state.phase, Shutdown))
        phase = daemon.state.phase
        await rest(0.1)
        assert world.host.asked == []
    async with world.running() as daemon:
        now = daemon.state.phase
        assert isinstance(now, Shutdown)
        assert isinstance(phase, Shutdown)
        assert (now.latched_s, now.boot_id, now.outage.id) == (phase.latched_s, phase.boot_id, before.id)
        await until(lambda: world.host.done, 10.0)
        await rest(1.0)
    (off,) = world.host.actions
    assert isinstance(off, PowerOff)
    assert world.host.asked[0][0] + off.force_after_s <= phase.latched_s + world.policy.force_after_s + 0.01
    assert len(set(ordered(world, SyncFilesystems))) == 1


@in_virtual_time
async def test_killed_after_the_power_off_was_ordered(tmp_path: Path) -> None:
    """The word has its outcome in the file: the next daemon of this boot waits, and does not order it every second."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await dark_until(world, daemon, lambda: world.host.done)
        await rest(0.5)
    async with world.running(kill=True) as daemon:
        await rest(20.0)
        assert isinstance(daemon.state.phase, Shutdown)
    assert len(world.host.asked) == 1


async def powered_off_and_back(world: World) -> Outage:
    """Have the host powered off and, with utility, begin its next boot; return the outage."""
    async with world.running(kill=True) as daemon:
        outage = await dark_until(world, daemon, lambda: world.host.done)
        await rest(0.5)
    await rest(900.0)
    world.next_boot()
    world.ups.utility = True
    world.host.asked.clear()
    return outage


@in_virtual_time
async def test_the_host_comes_back(tmp_path: Path) -> None:
    """Another boot: recovery and not a shutdown; training starts when the charge survives a second outage."""
    world = World(tmp_path / "journal.sqlite")
    before = await powered_off_and_back(world)
    async with world.running(kill=True) as daemon:
        assert isinstance(daemon.state.phase, Recovery)
        assert outage_of(daemon).id == before.id
        assert world.bmc.actions[-1].id.startswith("boot-b"), "the return is armed again at once"
        await rest(30.0)
    async with world.running() as daemon:
        await until(lambda: isinstance(daemon.state.phase, Online), 6 * 3600.0)
        assert [type(action) for action in world.host.actions] == [ResumeTraining]
        assert daemon.last_outage is not None
        assert daemon.last_outage.outcome == "clean_shutdown"
    (record,) = world.outages()
    assert (record.id, record.outcome) == (before.id, "clean_shutdown")


@in_virtual_time
async def test_what_brings_a_host_back_is_checked_soon_after_its_return(tmp_path: Path) -> None:
    """The BMC starts with the host and may be busy, and no outage checks the power-on methods."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await dark_until(world, daemon, lambda: world.host.done)
        await rest(0.5)
    world.next_boot()
    world.ups.utility = True
    world.bmc.error = "busy"
    clock = Doer(world.clock)
    parts = world.parts(policy=replace(world.policy, methods=(PowerOnMethod.RTC,)))
    async with world.running(replace(parts, effectors={**parts.effectors, CheckPowerOn: clock})) as daemon:
        await until(lambda: isinstance(daemon.state.phase, Recovery) and daemon.bmc is not None and daemon.bmc.error)
        world.bmc.error = ""
        await until(lambda: isinstance(daemon.state.phase, Online), 6 * 3600.0)
        await rest(120.0)
        assert daemon.bmc is not None
        assert daemon.bmc.verified
        assert [view.ready for view in daemon.methods] == [True]


@in_virtual_time
async def test_training_is_not_started_twice(tmp_path: Path) -> None:
    """Killed while training is being started: the same order again, by its id."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await dark_until(world, daemon, lambda: world.host.done)
        await rest(0.5)
    world.next_boot()
    world.ups.utility = True
    world.host.asked.clear()
    world.host.takes_s = 5.0
    async with world.running(kill=True) as daemon:
        await until(lambda: world.host.asked, 8 * 3600.0)
        await rest(1.0)
    async with world.running() as daemon:
        await until(lambda: isinstance(daemon.state.phase, Online), 100.0)
    first, second = world.host.actions
    assert first == second


@in_virtual_time
async def test_a_second_daemon_does_not_wait_for_readings_to_go_on(tmp_path: Path) -> None:
    """Started on a dead network in the middle of a shutdown: the power-off needs no reading."""
    world = World(tmp_path / "journal.sqlite")
    world.disks.takes_s = 3.0
    async with world.running(kill=True) as daemon:
        await dark_until(world, daemon, lambda: isinstance(daemon.state.phase, Shutdown))
    world.away = True
    parts = world.parts()
    world.cards[0].hangs = True
    async with world.running(parts, kill=True):
        await until(lambda: world.host.done, 10.0)


@in_virtual_time
async def test_a_journal_that_is_lost_means_a_new_outage(tmp_path: Path) -> None:
    """The disk was replaced while the power was out: the battery is believed after two looks, under another id.

    What may be armed is taken back once, which the new journal tells; with a history it is known that nothing is.
    """
    world = World(tmp_path / "journal.sqlite")
    world.policy = replace(world.policy, methods=(PowerOnMethod.RTC,))
    parts = world.parts()
    ports = dict.fromkeys((CheckPowerOn, ArmPowerOn, DisarmPowerOn), world.host)
    parts = replace(parts, effectors={**parts.effectors, **ports})
    async with world.running(parts, kill=True) as daemon:
        before = await dark_until(world, daemon, lambda: isinstance(daemon.state.phase, OnBattery))
    for lives, orders in ((1, 1), (2, 0)):
        world.started.clear()
        world.path = tmp_path / "another-disk.sqlite"
        async with world.running(parts, kill=True) as daemon:
            await until(lambda: isinstance(daemon.state.phase, OnBattery), 10.0)
            await rest(2.0)
            assert outage_of(daemon).id != before.id
            assert daemon.state.armed == ()
        taken_back = [(each.method, each.outage) for each in world.started if isinstance(each, DisarmPowerOn)]
        assert taken_back == [(PowerOnMethod.RTC, "")] * orders, lives
        assert world.notes().count("power_on_unknown") == 1


@in_virtual_time
async def test_a_bad_number_among_the_measurements_does_not_end_the_outage(tmp_path: Path) -> None:
    """The hold goes on after the restart, with its account of the battery; what was lost stands as a reason."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        before = await dark_until(world, daemon, lambda: isinstance(daemon.state.phase, Holding))
        assert [reason.name for reason in readiness(daemon) if reason.name == "history_lost"] == []
    with contextlib.closing(sqlite3.connect(world.path)) as db:
        plain = json.loads(db.execute("SELECT state FROM snapshot").fetchone()[0])
        plain["learned"]["needs"] = [{"kind": "Need", "of": "stop", "name": "", "seconds": [float("nan")]}]
        db.execute("UPDATE snapshot SET digest = '', state = ?", (json.dumps(plain),))
        db.commit()
    async with world.running(kill=True) as daemon:
        assert isinstance(daemon.state.phase, Holding)
        assert outage_of(daemon).id == before.id
        assert daemon.state.battery.used == pytest.approx(plain["battery"]["used"], rel=0.2)
        (reason,) = (reason for reason in readiness(daemon) if reason.name == "history_lost")
        assert reason.severity == "warning"
        assert "checkpoints, stops, pauses and drills" in reason.text


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3])
def test_killed_right_at_the_order(tmp_path: Path, after_s: float) -> None:
    """Whatever stands in the file at that moment is carried out: a checkpoint is ordered once, by one id."""

    @in_virtual_time
    async def play() -> None:
        world = World(tmp_path / "journal.sqlite", writer=Inline())
        async with world.running(kill=True) as daemon:
            world.ups.utility = False
            await until(lambda: isinstance(daemon.state.phase, OnBattery))
            while not world.trainer.asked:
                await rest(0.05)
            await rest(after_s)
        killed_at_s = now_s()
        async with world.running(kill=True):
            await until(lambda: world.trainer.done, 40.0)
        assert len(set(ordered(world, TriggerCheckpoint))) == 1
        assert now_s() - killed_at_s < 30.0
        assert len(set(ordered(world, EnsurePolicy))) == 1

    play()


class LateDisk:
    """A disk whose first answer takes longer than the daemon waits for its journal at the start."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self._calls: list[Callable[[], None]] | None = []

    def submit(self, call: Callable[[], None]) -> None:
        if self._calls is None:
            call()
            return
        if not self._calls:
            asyncio.get_running_loop().call_later(self.takes_s, self._answer)
        self._calls.append(call)

    def _answer(self) -> None:
        calls, self._calls = self._calls or [], None
        for call in calls:
            call()

    def close(self, limit_s: float) -> None:
        del limit_s


@in_virtual_time
async def test_a_hold_goes_on_although_the_disk_was_slow_at_the_start(tmp_path: Path) -> None:
    """The journal's answer comes after the daemon's start: utility is back, and training goes on in place."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        before = await dark_until(world, daemon, lambda: isinstance(daemon.state.phase, Holding))
    world.ups.utility = True
    world.writer = LateDisk(4.0)
    async with world.running() as daemon:
        assert isinstance(daemon.state.phase, Online)
        assert [reason.name for reason in readiness(daemon) if reason.name == "history_lost"]
        await until(lambda: world.resumer.asked, 60.0)
        await until(lambda: isinstance(daemon.state.phase, Online), 60.0)
        await rest(1.0)
        assert not daemon.journal_trouble
        assert [reason.name for reason in readiness(daemon) if reason.name == "history_lost"] == []
    assert [(each.id, each.outcome) for each in world.outages()] == [(before.id, "resumed_in_place")]


@in_virtual_time
async def test_training_starts_after_a_return_although_the_disk_was_slow_at_the_start(tmp_path: Path) -> None:
    """A boot after a power-off, with a disk that is busy or cold."""
    world = World(tmp_path / "journal.sqlite")
    before = await powered_off_and_back(world)
    world.writer = LateDisk(4.0)
    async with world.running() as daemon:
        await until(lambda: isinstance(daemon.state.phase, Recovery), 60.0)
        await until(lambda: isinstance(daemon.state.phase, Online), 6 * 3600.0)
        assert [type(action) for action in world.host.actions] == [ResumeTraining]
    assert [(each.id, each.outcome) for each in world.outages()] == [(before.id, "clean_shutdown")]


@in_virtual_time
async def test_an_outage_that_has_paused_training_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """The disk answers only when the next outage has given orders of its own: those count."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        before = await dark_until(world, daemon, lambda: isinstance(daemon.state.phase, Holding))
    world.writer = LateDisk(900.0)
    async with world.running(kill=True) as daemon:
        await until(lambda: isinstance(daemon.state.phase, EmergencyCheckpoint | Holding | Shutdown), 600.0)
        now = outage_of(daemon)
        assert now.id != before.id
        await until(lambda: not daemon.journal_trouble, 1000.0)
        assert outage_of(daemon).id == now.id


@contextlib.contextmanager
def held_by_another(path: Path) -> Iterator[None]:
    """Hold a journal as a backup or a `sqlite3` shell can: nothing else can read it meanwhile."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        yield


@in_virtual_time
async def test_training_starts_after_a_return_although_the_journal_could_not_be_read_at_the_start(
    tmp_path: Path,
) -> None:
    """What the daemon has seen without it must not replace the outage that the file holds."""
    world = World(tmp_path / "journal.sqlite")
    before = await powered_off_and_back(world)
    with contextlib.ExitStack() as other:
        other.enter_context(held_by_another(world.path))
        async with world.running() as daemon:
            await rest(12.0)
            assert isinstance(daemon.state.phase, Online)
            assert "another process holds it" in daemon.journal_trouble
            other.close()
            await until(lambda: isinstance(daemon.state.phase, Recovery), 10.0)
            await rest(1.0)
            assert not daemon.journal_trouble
            assert [reason.name for reason in readiness(daemon) if reason.name == "history_lost"] == []
            await until(lambda: isinstance(daemon.state.phase, Online), 6 * 3600.0)
        assert [type(action) for action in world.host.actions] == [ResumeTraining]
    assert [(each.id, each.outcome) for each in world.outages()] == [(before.id, "clean_shutdown")]


@in_virtual_time
async def test_a_daemon_that_ends_before_it_could_read_its_journal_leaves_it_as_it_is(tmp_path: Path) -> None:
    """The next one finds the outage of the boot before."""
    world = World(tmp_path / "journal.sqlite")
    before = await powered_off_and_back(world)
    with contextlib.ExitStack() as other:
        other.enter_context(held_by_another(world.path))
        async with world.running():
            await rest(7.0)
            other.close()
    async with world.running(kill=True) as daemon:
        assert isinstance(daemon.state.phase, Recovery)
        assert outage_of(daemon).id == before.id


@in_virtual_time
async def test_a_journal_that_stays_unreadable_is_written_all_the_same(tmp_path: Path) -> None:
    """A page that the disk gives back no more: an outage that begins later must be on disk."""
    world = World(tmp_path / "journal.sqlite", store=Unreadable(tmp_path / "journal.sqlite"))
    async with world.running(kill=True) as daemon:
        await rest(50.0)
        assert "a bad page" in daemon.journal_trouble
        await rest(20.0)
        assert not daemon.journal_trouble
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, OnBattery), 10.0)
        await rest(1.0)
        now = outage_of(daemon)
    world.store = None
    async with world.running(kill=True) as daemon:
        assert outage_of(daemon).id == now.id


class Unreadable(Store):
    """A file that can be written, and never read."""

    def load(self) -> tuple[Loaded, tuple[OutageRecord, ...]]:
        super().load()
        message = "a bad page"
        raise JournalError(message)


@in_virtual_time
@pytest.mark.parametrize(("late_s", "repeated"), [(30.0, 1), (90.0, 0)])
async def test_a_power_off_that_is_read_too_late_is_none(tmp_path: Path, late_s: float, repeated: int) -> None:
    """The word was given in this boot, and the host has run on for a minute: with utility there is no reason left."""
    world = World(tmp_path / "journal.sqlite")
    world.disks.takes_s = 3.0
    async with world.running(kill=True) as daemon:
        await dark_until(world, daemon, lambda: isinstance(daemon.state.phase, Shutdown))
        await rest(0.1)
    world.ups.utility = True
    world.writer = LateDisk(late_s)
    async with world.running(kill=True) as daemon:
        await rest(late_s + 20.0)
        assert len(world.host.asked) == repeated
        assert isinstance(daemon.state.phase, Shutdown if repeated else Online)


@in_virtual_time
@pytest.mark.parametrize(("before", "after"), [(0.0, 7200.0), (7200.0, 0.0)])
async def test_a_maintenance_that_was_entered_meanwhile_counts(tmp_path: Path, before: float, after: float) -> None:
    """One that was ended, too: the file's would suspend the power-off again."""
    world = World(tmp_path / "journal.sqlite")

    def maintenance(for_s: float) -> SetMaintenance:
        return SetMaintenance(at_s=now_s(), until_s=now_s() + for_s, reason="fan swap", who="root")

    async with world.running(kill=True) as daemon:
        await rest(5.0)
        daemon.submit(maintenance(before))
        await rest(1.0)
    world.writer = LateDisk(30.0)
    async with world.running(kill=True) as daemon:
        await rest(5.0)
        daemon.submit(maintenance(after))
        await rest(40.0)
        assert not daemon.journal_trouble
        assert (daemon.state.maintenance is not None) == (after > 0.0)


@in_virtual_time
async def test_a_battery_that_was_replaced_meanwhile_counts(tmp_path: Path) -> None:
    """What was learned of the old one comes with the file, and does not apply to the new one."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await rest(5.0)
        daemon.submit(BatteryReplaced(at_s=now_s(), who="root"))
        await rest(1.0)
        first_s = daemon.state.battery.model.replaced_at_s
    world.writer = LateDisk(30.0)
    async with world.running(kill=True) as daemon:
        await rest(5.0)
        daemon.submit(BatteryReplaced(at_s=now_s(), who="root"))
        await rest(40.0)
        assert not daemon.journal_trouble
        assert daemon.state.battery.model.replaced_at_s != first_s
