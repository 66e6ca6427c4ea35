"""A host that lost power in phase online: its next daemon brings training back, and no ordinary reboot does."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.core.comeback.unseen import lost_power
from powerguard.core.model.actions import Conduct, ResumeTraining
from powerguard.core.model.events import PoweredOn, RecoverNow, TrainerSeen
from powerguard.core.model.state import Maintenance, Online, Recovery, State, UnseenStop
from powerguard.daemon.attempt import rest
from powerguard.daemon.boots import cause_of, report_power_on
from powerguard.daemon.control.admin import Admin, Directory
from powerguard.daemon.journal import Inline
from powerguard.daemon.loop import Loop
from powerguard.daemon.notify.composer import MessageComposer, StepNotes
from powerguard.daemon.observe.figures import cost_of
from powerguard.daemon.observe.readiness import readiness
from powerguard.daemon.observe.status import gates, stage
from powerguard.daemon.wiring import is_calm, is_waiting
from powerguard.effectors.bmc.engine import Probe
from powerguard.effectors.bmc.ipmi import ChassisStatus, PowerRestorePolicy, RestartCause
from powerguard.effectors.child import Ended
from powerguard.effectors.host.check import MEMORY, HostCheckEffector
from powerguard.effectors.options import ResumeOptions
from tests.core.play import Player
from tests.daemon.looped import World, in_virtual_time, until
from tests.daemon.test_loop_restart import LateDisk
from tests.daemon.test_power_on import systemctl
from tests.daemon.test_returning import ME
from tests.daemon.watched import NOW_S, scene

SEEN = TrainerSeen(at_s=0.0, trainer="llm", alive=True, conduct=Conduct.PAUSE, checkpoint_s=20.0, step_s=1.5)


def probe(cause: RestartCause | None, ac_failed: bool | None) -> Probe:
    status = ChassisStatus(power_on=True, policy=PowerRestorePolicy.ALWAYS_ON, ac_failed=ac_failed)
    return Probe(status=status, supported=None, restart_cause=cause)


@pytest.mark.parametrize(
    ("found", "lost"),
    [
        (None, None),
        (probe(None, None), None),
        (probe(None, True), True),
        (probe(None, False), None),
        (probe(RestartCause.UNKNOWN, True), True),
        (probe(RestartCause.POLICY_ALWAYS_ON, None), True),
        (probe(RestartCause.POLICY_LAST_STATE, False), True),
        (probe(RestartCause.POWER_BUTTON, True), True),
        (probe(RestartCause.SOFT_RESET, True), True),
        (probe(RestartCause.SOFT_RESET, False), None),
        (probe(RestartCause.POWER_BUTTON, False), None),
        (probe(RestartCause.SOFT_RESET, None), None),
        (probe(RestartCause.WATCHDOG, True), False),
        (probe(RestartCause.RESET_BUTTON, True), False),
        (probe(RestartCause.PEF_RESET, None), False),
        (probe(RestartCause.PEF_POWER_CYCLE, False), False),
    ],
)
def test_what_a_bmc_reports_of_the_boot_before(found: Probe | None, *, lost: bool | None) -> None:
    """The bit for a loss of AC outlives a reset, and many boards never set it; firmware makes a soft reset itself."""
    ac_failed = None if found is None else found.status.ac_failed
    assert lost_power(PoweredOn(at_s=1.0, because="", cause=cause_of(found), ac_failed=ac_failed)) is lost


async def training(world: World, daemon: Loop) -> None:
    """Let training run for two minutes."""
    daemon.submit(replace(SEEN, at_s=daemon.clock(), step=500, durable_step=460))
    await rest(120.0)
    assert isinstance(daemon.state.phase, Online)
    assert world.started[-1:] == [] or not isinstance(world.started[-1], ResumeTraining)


class SlowDisk(Inline):
    """A disk that takes takes_s for every call."""

    takes_s = 0.0

    def submit(self, call: Callable[[], None]) -> None:
        if self.takes_s:
            asyncio.get_running_loop().call_later(self.takes_s, call)
        else:
            call()


def started(world: World) -> int:
    return sum(isinstance(action, ResumeTraining) for action in world.started)


@contextlib.asynccontextmanager
async def asked(daemon: Loop, found: Probe | None) -> AsyncIterator[None]:
    """Ask the BMC what powered the host on, and find this; None: there is no BMC."""

    async def why_on(_limit_s: float) -> Probe:
        assert found is not None
        return found

    why = None if found is None else why_on
    asking = asyncio.get_running_loop().create_task(report_power_on(daemon, lambda: why, systemctl()))
    yield
    asking.cancel()


async def next_daemon(world: World, found: Probe | None, name: str = "boot-b-of-the-test") -> None:
    """Boot half an hour later, and let the next daemon decide; its trainer is gone until it is started."""
    await rest(1800.0)
    world.next_boot(name)
    async with world.running() as daemon:
        daemon.submit(replace(SEEN, at_s=daemon.clock(), alive=False))
        async with asked(daemon, found):
            await rest(90.0)
            if isinstance(daemon.state.phase, Recovery):
                daemon.submit(replace(SEEN, at_s=daemon.clock(), step=461, durable_step=460))
                await until(lambda: isinstance(daemon.state.phase, Online), 10.0)


@in_virtual_time
async def test_training_is_started_after_a_loss_of_power_that_was_no_outage(tmp_path: Path) -> None:
    """And what it cost is counted: the time that the host was off, and the work since the newest checkpoint."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await training(world, daemon)
    await next_daemon(world, probe(RestartCause.POLICY_ALWAYS_ON, True))
    assert started(world) == 1
    (record,) = world.outages()
    assert (record.outcome, record.figures["returned"], record.figures["host"]) == ("dirty", True, "gpu-01")
    assert record.lasted_s == pytest.approx(1800.0 + 90.0, abs=63.0), "the journal has a state a minute"
    cost = cost_of(record.figures)
    assert cost is not None
    assert cost.lost_s["rolled_back"] == pytest.approx(40 * 1.5)
    assert cost.lost_s["stopped"] == pytest.approx(record.lasted_s, abs=1.0)
    assert cost.return_s["power_on_to_boot"][0] == pytest.approx(41.25 + 20.0, abs=2.0)


@in_virtual_time
async def test_an_ordinary_reboot_starts_nothing(tmp_path: Path) -> None:
    """That the daemon was asked to stop is in the journal at once, although nothing else happened."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await training(world, daemon)
        daemon.stop_for_signal(host_stopping=True)
        await rest(1.0)
    await next_daemon(world, probe(RestartCause.POLICY_ALWAYS_ON, True))
    assert (started(world), world.outages()) == (0, ())


@in_virtual_time
async def test_an_ordinary_reboot_with_a_busy_disk_starts_nothing(tmp_path: Path) -> None:
    """Other steps are written before that of the stop: it is not left behind."""
    disk = SlowDisk()
    world = World(tmp_path / "journal.sqlite", writer=disk)
    async with world.running() as daemon:
        await training(world, daemon)
        disk.takes_s = 0.3
        for name in ("a", "b", "c"):
            daemon.submit(replace(SEEN, at_s=daemon.clock(), trainer=name, step=500))
        await rest(0.01)
        daemon.stop_for_signal(host_stopping=False)
        await until(lambda: world.closed, 10.0)
    disk.takes_s = 0.0
    await next_daemon(world, probe(RestartCause.POLICY_ALWAYS_ON, True))
    assert started(world) == 0


@in_virtual_time
async def test_a_daemon_that_was_stopped_and_started_again_is_up(tmp_path: Path) -> None:
    """An update of powerguard does not make the next loss of power an ordinary reboot."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await training(world, daemon)
        daemon.stop_for_signal(host_stopping=False)
    async with world.running(kill=True) as daemon:
        await training(world, daemon)
    await next_daemon(world, None)
    assert started(world) == 1


@in_virtual_time
async def test_a_host_without_training_starts_none(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        daemon.submit(replace(SEEN, at_s=daemon.clock(), alive=False))
        await rest(120.0)
    await next_daemon(world, probe(RestartCause.POLICY_ALWAYS_ON, True))
    assert (started(world), world.outages()) == (0, ())


@in_virtual_time
async def test_a_watchdog_is_no_loss_of_power(tmp_path: Path) -> None:
    """Training stands, and says so, until a person starts it."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await training(world, daemon)
    await next_daemon(world, probe(RestartCause.WATCHDOG, True))
    assert (started(world), world.outages()) == (0, ())
    assert world.notes().count("training_not_started_raised") == 1
    async with world.running() as daemon:
        (reason,) = [each for each in readiness(daemon) if each.name == "training_not_started"]
        assert "the BMC reports watchdog" in reason.text
        assert stage(daemon) == "unseen"
        daemon.submit(RecoverNow(at_s=daemon.clock(), who="anna"))
        await until(lambda: started(world) == 1, 20.0)
        assert isinstance(daemon.state.phase, Recovery)
    assert world.notes().count("training_not_started_cleared") == 1


@in_virtual_time
async def test_training_that_waited_for_a_person_cost_all_that_time(tmp_path: Path) -> None:
    """It stood since the stop, and not only while the host was off; the boot was as quick as any."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await training(world, daemon)
    await next_daemon(world, probe(RestartCause.WATCHDOG, True))
    await rest(7200.0)
    async with world.running() as daemon:
        daemon.submit(RecoverNow(at_s=daemon.clock(), who="anna"))
        await until(lambda: started(world) == 1, 20.0)
        daemon.submit(replace(SEEN, at_s=daemon.clock(), step=461, durable_step=460))
        await until(lambda: isinstance(daemon.state.phase, Online), 10.0)
        await rest(1.0)
    (record,) = world.outages()
    cost = cost_of(record.figures)
    assert cost is not None
    assert cost.lost_s["stopped"] == pytest.approx(record.lasted_s, abs=1.0) == pytest.approx(9090.0, abs=70.0)
    assert cost.return_s["power_on_to_boot"][0] == pytest.approx(41.25 + 20.0, abs=2.0)
    assert cost.return_s["boot_to_ready"][0] == pytest.approx(7290.0, abs=5.0)


@in_virtual_time
async def test_the_bmc_is_asked_also_if_the_disk_was_slow_at_the_start(tmp_path: Path) -> None:
    """The daemon begins without its journal, and learns only then that the host went down while it trained."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await training(world, daemon)
    world.writer = LateDisk(30.0)
    await next_daemon(world, probe(RestartCause.WATCHDOG, False))
    assert (started(world), world.notes().count("training_not_started_raised")) == (0, 1)


@in_virtual_time
async def test_a_daemon_that_is_killed_before_the_bmc_answers_asks_it_again(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await training(world, daemon)
    await rest(1800.0)
    world.next_boot()
    async with world.running(kill=True) as daemon:
        await rest(5.0)
        assert daemon.state.unseen is not None
    async with world.running() as daemon:
        daemon.submit(replace(SEEN, at_s=daemon.clock(), alive=False))
        await rest(1.0)
        async with asked(daemon, probe(RestartCause.RESET_BUTTON, False)):
            await rest(90.0)
        assert (started(world), daemon.state.alarms) == (0, ("training_not_started",))


@in_virtual_time
async def test_an_outage_before_it_is_decided_has_a_story_of_its_own(tmp_path: Path) -> None:
    """Power fails again within the first minute, and returns: two outages, each with its own lines and figures."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await training(world, daemon)
    await rest(1800.0)
    world.next_boot()
    async with world.running() as daemon:
        daemon.submit(replace(SEEN, at_s=daemon.clock(), alive=False))
        await rest(3.0)
        world.ups.utility = False
        await rest(70.0)
        world.ups.utility = True
        await until(lambda: started(world) == 1, 60.0)
        unseen, seen = world.outages()
        assert (seen.outcome, seen.figures["on_battery_s"]) == ("ridden_through", pytest.approx(70.0, abs=2.0))
        assert (unseen.outcome, unseen.ended_wall, unseen.figures["on_battery_s"]) == ("", None, 0.0)
    ended = [line.outage for line in world.lines() if line.event == "outage_ended"]
    assert ended == [seen.id]


@in_virtual_time
async def test_what_the_host_lacks_after_the_stop_is_not_remembered_as_good(tmp_path: Path) -> None:
    """A GPU that did not come back: the check behind the gate must still know of it when training is to start."""
    looks = 0

    async def spawn(_argv: object, **_more: object) -> Ended:
        nonlocal looks
        looks += 1
        answer = {"problems": ["7 of 8 GPUs"], "notes": [], "gpus": 7, "folders": 1, "detail": {}, "memory": "seven"}
        return Ended(returncode=0, stdout=json.dumps(answer).encode(), stderr=b"")

    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await training(world, daemon)
    await rest(1800.0)
    world.next_boot()
    check = HostCheckEffector(
        ResumeOptions(),
        folder=tmp_path,
        dirs=(),
        reported_dirs=tuple,
        wall=lambda: 1000.0,
        spawn=spawn,
        clock=world.clock,
    )
    memory = tmp_path / MEMORY
    async with world.running() as daemon:
        daemon.submit(replace(SEEN, at_s=daemon.clock(), alive=False))
        keep = check.keep(lambda: is_calm(daemon.state), lambda: is_waiting(daemon.state), rest)
        keeping = asyncio.get_running_loop().create_task(keep)
        await rest(55.0)
        assert isinstance(daemon.state.phase, Online)
        assert (memory.exists(), looks > 0) == (False, True)
        daemon.submit(replace(SEEN, at_s=daemon.clock(), step=461))
        await until(memory.exists, 700.0)
        keeping.cancel()


def test_the_message_names_the_command_once() -> None:
    story = (
        (Path(__file__).parents[1] / "scenarios" / "unseen-crash.txt").read_text(encoding="utf-8").partition("----")[0]
    )
    (note,) = [each for each in Player().play(story).notes if each.event == "training_not_started_raised"]
    (message,) = MessageComposer("gpu-01").of_step(StepNotes((note,), State(), "", "armed", NOW_S))
    assert message.text.count("powerguard recover") == 1
    assert "the BMC reports watchdog" in message.text


def test_recover_starts_what_is_not_started() -> None:
    """It shows the reason among the gates, and takes the order."""
    daemon = scene("online")
    stop = UnseenStop(down_at_s=NOW_S - 600.0, left_because="the BMC reports watchdog")
    daemon.state = replace(daemon.state, unseen=stop, maintenance=Maintenance(until_s=NOW_S + 9.0, reason="", who="a"))
    last = gates(daemon)[-1]
    assert (last.name, last.open, last.text) == ("loss of power", False, "the BMC reports watchdog")
    daemon.events.clear()
    code, _, _ = Admin(daemon, Directory("nobody")).recover(ME, {"unchecked": True})
    assert (code, daemon.events) == (202, [RecoverNow(at_s=NOW_S, who="root")])
    daemon.state = replace(daemon.state, unseen=replace(stop, left_because="", by_s=NOW_S + 5.0))
    assert gates(daemon)[-1].text == "the BMC is asked whether AC was gone"
