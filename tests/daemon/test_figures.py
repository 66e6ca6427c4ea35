"""The outage in numbers: each way an outage can end, over restarts and boots, and the counters that outlive them."""

from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.core.model.actions import Action, TriggerCheckpoint
from powerguard.core.model.policy import Mode, TrainerPolicy
from powerguard.core.model.state import EmergencyCheckpoint, Holding, OnBattery, Online, Recovery, Shutdown
from powerguard.daemon.attempt import rest
from powerguard.daemon.loop import Loop
from powerguard.daemon.observe import figures
from powerguard.daemon.observe.metrics import LIFETIME, OUTCOMES
from powerguard.daemon.observe.port import LastOutage
from tests.daemon.looped import CHECKPOINT_S, EPOCH_S, World, in_virtual_time, now_s, over, until


async def resumed(world: World, daemon: Loop) -> LastOutage:
    """Give utility back, and return the outage when it has ended."""
    world.ups.utility = True
    await over(daemon)
    assert daemon.last_outage is not None
    return daemon.last_outage


def counted(daemon: Loop) -> dict[str, float]:
    """The counters, all of which must be known to the metrics; without what the outages cost (test_cost.py)."""
    counters = dict(daemon.journal_counters)
    assert set(counters) <= set(LIFETIME)
    return {name: value for name, value in counters.items() if name not in figures.LIFETIME}


@in_virtual_time
async def test_ridden_through(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        assert daemon.last_outage is None
        await rest(10.0)
        cut_at_s = now_s()
        world.ups.utility = False
        await rest(6.0)
        last = await resumed(world, daemon)
        assert (last.outcome, last.checkpoint_s, last.recovery_s) == ("ridden_through", None, None)
        assert last.on_battery_s is not None
        assert 5.0 <= last.on_battery_s <= 7.1
        assert abs(last.began_wall_s - EPOCH_S - cut_at_s) < 1.1
        assert counted(daemon) == {
            "ups_transfers": 1.0,
            "outages_ridden_through": 1.0,
            "on_battery_seconds": pytest.approx(last.on_battery_s),
        }
    (record,) = world.outages()
    assert record.outcome == "ridden_through"
    assert record.figures["on_battery_s"] == last.on_battery_s
    async with world.running() as daemon:
        assert daemon.last_outage == replace(
            last, began_wall_s=record.started_wall, ended_wall_s=record.ended_wall or 0
        )
        assert counted(daemon)["outages_ridden_through"] == 1.0


@in_virtual_time
async def test_resumed_in_place(tmp_path: Path) -> None:
    """Seconds on battery end with the return of utility, not ten seconds later when it is believed."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await rest(5.0)
        cut_at_s = now_s()
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Holding))
        await rest(5.0)
        world.ups.utility = True
        dark_s = now_s() - cut_at_s
        await over(daemon)
        last = daemon.last_outage
        assert last is not None
        assert last.outcome == "resumed_in_place"
        assert last.checkpoint_s is not None
        assert CHECKPOINT_S <= last.checkpoint_s < CHECKPOINT_S + 0.5
        assert last.on_battery_s is not None
        assert abs(last.on_battery_s - dark_s) < 1.6
        assert counted(daemon)["on_battery_seconds"] == pytest.approx(last.on_battery_s)
    (record,) = world.outages()
    assert record.figures["checkpoint_step"] == 7
    assert record.figures["phase"] == "online"


@in_virtual_time
async def test_utility_that_comes_and_goes_is_no_time_on_battery(tmp_path: Path) -> None:
    """One outage until utility is stable for 10 s: only the stretches on battery count."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await rest(5.0)
        world.ups.utility = False
        cut_at_s = now_s()
        await until(lambda: isinstance(daemon.state.phase, Holding))
        dark_s = now_s() - cut_at_s
        for _ in range(5):
            world.ups.utility = True
            await rest(8.0)
            world.ups.utility = False
            await rest(4.0)
        last = await resumed(world, daemon)
    assert (len(world.outages()), last.outcome) == (1, "resumed_in_place")
    assert last.on_battery_s is not None
    assert abs(last.on_battery_s - dark_s - 5 * 4.0) < 6.0, "a second for each, until the UPS is read again"


@in_virtual_time
async def test_the_checkpoint_of_an_outage_ends_with_that_of_the_last_trainer(tmp_path: Path) -> None:
    """`history`, `report` and the metrics have one figure for all trainers: until every one has its checkpoint."""
    world = World(tmp_path / "journal.sqlite")
    takes_s = {"small": 5.0, "big": 40.0}
    trainers = tuple(TrainerPolicy(name=name, checkpoint_s=s, disk=name) for name, s in takes_s.items())
    world.policy = replace(world.policy, trainers=trainers)

    def begins(action: Action) -> None:
        assert isinstance(action, TriggerCheckpoint)
        world.trainer.takes_s = takes_s[action.trainer]

    world.trainer.on_start = begins
    async with world.running() as daemon:
        await rest(5.0)
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Holding))
        last = await resumed(world, daemon)
        assert last.checkpoint_s is not None
        assert abs(last.checkpoint_s - 40.0) < 0.5


@in_virtual_time
async def test_a_checkpoint_that_ends_with_the_outage_has_its_time(tmp_path: Path) -> None:
    """Utility has been stable for long when it is durable: one step ends both."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await rest(5.0)
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, EmergencyCheckpoint))
        last = await resumed(world, daemon)
        assert last.checkpoint_s is not None
        assert abs(last.checkpoint_s - CHECKPOINT_S) < 0.5


@in_virtual_time
async def test_clean_shutdown_over_the_next_boot(tmp_path: Path) -> None:
    """The dark is no time on battery; what was gathered before it is not forgotten after it."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        cut_at_s = now_s()
        await until(lambda: isinstance(daemon.state.phase, Shutdown))
        committed_s = now_s() - cut_at_s
        await until(lambda: world.host.done)
        await rest(1.0)
        assert counted(daemon)["shutdowns"] == 1.0
        off_s = now_s() - cut_at_s
    await rest(1800.0)
    world.next_boot()
    world.ups.utility = True
    async with world.running() as daemon:
        assert isinstance(daemon.state.phase, Recovery)
        began_s = now_s()
        await over(daemon)
        recovered_s = now_s() - began_s
        last = daemon.last_outage
        assert last is not None
        assert last.outcome == "clean_shutdown"
        assert last.checkpoint_s is not None
        assert CHECKPOINT_S <= last.checkpoint_s < CHECKPOINT_S + 0.5
        assert last.on_battery_s is not None
        assert committed_s - 2.0 < last.on_battery_s <= off_s
        assert last.recovery_s is not None
        assert abs(last.recovery_s - recovered_s) < 3.0
        counters = counted(daemon)
    assert counters == {
        "ups_transfers": 1.0,
        "shutdowns": 1.0,
        "outages_clean_shutdown": 1.0,
        "on_battery_seconds": pytest.approx(last.on_battery_s),
    }
    (record,) = world.outages()
    commit_after_s = record.figures["commit_after_s"]
    assert isinstance(commit_after_s, float)
    assert abs(commit_after_s - committed_s) < 2.0
    assert record.figures["returned"] is True


@in_virtual_time
async def test_seconds_on_battery_count_while_the_outage_runs(tmp_path: Path) -> None:
    """A long outage is seen on the dashboard before it ends, and a daemon killed in it counts nothing twice."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Holding))
        so_far_s = counted(daemon)["on_battery_seconds"]
        assert so_far_s > CHECKPOINT_S
    async with world.running() as daemon:
        assert counted(daemon)["on_battery_seconds"] >= so_far_s
        last = await resumed(world, daemon)
        assert counted(daemon)["on_battery_seconds"] == pytest.approx(last.on_battery_s)


@in_virtual_time
async def test_dirty(tmp_path: Path) -> None:
    """The host went dark before the commit: told as it is, with the seconds on battery that were still seen."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, OnBattery))
        await rest(30.0)
    await rest(600.0)
    world.next_boot()
    world.ups.utility = True
    async with world.running() as daemon:
        await over(daemon)
        last = daemon.last_outage
        assert last is not None
        assert (last.outcome, last.checkpoint_s) == ("dirty", None)
        assert last.on_battery_s is not None
        assert 24.0 < last.on_battery_s < 33.0, "the file is written every five seconds"
        assert counted(daemon)["outages_dirty"] == 1.0
        assert "shutdowns" not in counted(daemon)


@in_virtual_time
async def test_on_battery_again_before_training_runs(tmp_path: Path) -> None:
    """Utility fails again while a host that is back waits: both times on battery count, the time off does not."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Shutdown))
        await rest(1.0)
    (record,) = world.outages()
    first_s = record.figures["on_battery_s"]
    assert isinstance(first_s, float)
    world.ups.utility = True
    await rest(1800.0)
    world.next_boot()
    async with world.running() as daemon:
        assert isinstance(daemon.state.phase, Recovery)
        await rest(3.0)
        world.ups.utility = False
        await rest(10.0)
        last = await resumed(world, daemon)
        assert last.on_battery_s is not None
        assert 8.0 < last.on_battery_s - first_s < 11.0
        assert counted(daemon)["on_battery_seconds"] == pytest.approx(last.on_battery_s)


@in_virtual_time
async def test_rehearsed(tmp_path: Path) -> None:
    """A power-off that was only recorded: the host lives on, and utility ends the outage."""
    world = World(tmp_path / "journal.sqlite")
    world.policy = replace(world.policy, mode=Mode.DRY_RUN)
    async with world.running() as daemon:
        world.ups.utility = False
        await until(lambda: world.host.done)
        await rest(30.0)
        assert isinstance(daemon.state.phase, Shutdown)
        world.ups.utility = True
        await over(daemon, 60.0)
        last = daemon.last_outage
        assert last is not None
        assert last.outcome == "rehearsed"
        assert counted(daemon)["outages_rehearsed"] == 1.0
        assert len(world.host.asked) == 1, "recorded once"
        assert [action.id for action in world.resumer.actions], "and training was let go on"


@in_virtual_time
async def test_a_restart_forgets_no_figure(tmp_path: Path) -> None:
    """Killed twice in one outage: since when, the checkpoint's seconds and the commit's stand as without it."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        cut_at_s = now_s()
        await until(lambda: isinstance(daemon.state.phase, Holding))
        await rest(1.0)
    async with world.running(kill=True) as daemon:
        await rest(3.0)
        assert daemon.last_outage is None
    async with world.running(kill=True) as daemon:
        await until(lambda: isinstance(daemon.state.phase, Shutdown))
        committed_s = now_s() - cut_at_s
        await rest(1.0)
    (record,) = world.outages()
    figures = record.figures
    assert isinstance(figures["commit_after_s"], float)
    assert abs(figures["commit_after_s"] - committed_s) < 2.0
    assert isinstance(figures["checkpoint_s"], float)
    assert CHECKPOINT_S <= figures["checkpoint_s"] < CHECKPOINT_S + 0.5


@in_virtual_time
async def test_the_last_outage_is_known_while_the_next_one_runs(tmp_path: Path) -> None:
    """Restarted in a second outage, the daemon still shows how the first one ended."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        world.ups.utility = False
        await rest(5.0)
        world.ups.utility = True
        await over(daemon)
        first = daemon.last_outage
    await rest(600.0)
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, OnBattery))
    async with world.running() as daemon:
        assert isinstance(daemon.state.phase, OnBattery)
        assert first is not None
        assert daemon.last_outage is not None
        assert daemon.last_outage.id == first.id
        world.ups.utility = True
        await over(daemon)
        assert daemon.last_outage.id != first.id
        assert counted(daemon)["ups_transfers"] == 2.0
        assert counted(daemon)["outages_ridden_through"] == 2.0


@in_virtual_time
async def test_an_outage_whose_end_nobody_saw_is_lost(tmp_path: Path) -> None:
    """The state in the file cannot be read, the outage beside it stands open: lost, and counted as such."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, OnBattery))
    world.ups.utility = True
    journal = world.daemon().journal
    await journal.load()
    journal._store._open().execute("UPDATE snapshot SET digest = '', state = '{}'")
    await journal.close()
    async with world.running() as daemon:
        await rest(2.0)
        assert isinstance(daemon.state.phase, Online)
        assert counted(daemon)["outages_lost"] == 1.0
        assert daemon.last_outage is not None
        known = daemon.last_outage
        assert known.outcome == "lost"
    (record,) = world.outages()
    assert record.outcome == "lost"
    async with world.running() as daemon:
        assert daemon.last_outage is not None
        assert (daemon.last_outage.id, daemon.last_outage.outcome) == (known.id, "lost")
        assert counted(daemon)["outages_lost"] == 1.0


def test_every_ending_is_in_the_closed_set() -> None:
    """What the core can say of an end, and what the journal adds, is what the metrics know."""
    assert set(OUTCOMES) == {"ridden_through", "resumed_in_place", "clean_shutdown", "dirty", "rehearsed", "lost"}
    assert {f"outages_{outcome}" for outcome in OUTCOMES} < set(LIFETIME)
