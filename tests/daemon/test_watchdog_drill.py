"""The drill of the BMC's watchdog: refused where it is not safe, written down before it arms, judged at the next boot.

The effector and its root helper are the real ones, on the stand-in for /dev/ipmi0; nobody is powered off.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.actions import Action, ArmPowerOn, CheckPowerOn, Detail, Level, Note, PowerOff, PowerOnMethod
from powerguard.core.model.policy import Mode
from powerguard.daemon.control.admin import admin_server
from powerguard.daemon.watchdog_drill import WatchdogDrill, verdict
from powerguard.daemon.wiring import Ports, build
from powerguard.effectors.base import EffectorError, PowerOnEffector
from powerguard.effectors.bmc.engine import WatchdogStatus
from powerguard.effectors.bmc.ipmi import RestartCause, Timer
from powerguard.effectors.bmc.watchdog import FILE, Board, DrillFile, DrillRecord, WatchdogEffector
from powerguard.effectors.child import Ended, run_child
from powerguard.effectors.options import BmcOptions
from powerguard.settings.load import SettingsError, load
from tests.daemon.looped import until
from tests.daemon.test_assemble import write
from tests.daemon.test_drills import REFERENCE, ask, ready
from tests.daemon.watched import BOOT, NOW_S, WALL_S, Watched, in_mode, scene
from tests.peers.ipmi_device import IpmiDevice

needs_device = pytest.mark.peer("cc", "systemd-socket-activate")
CHECK = CheckPowerOn(id="c-1", by_s=1e9, method=PowerOnMethod.WATCHDOG)
OLD = DrillRecord(
    state="pending",
    board=Board(manufacturer=674, product=256, firmware="1.72", name="", bios=""),
    boot_id="another-boot",
    armed_wall_s=WALL_S - NOW_S - 200.0,
    in_s=120.0,
    because="begun by root",
)


@pytest.fixture
def device() -> Iterator[IpmiDevice]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="pg-"))
    yield IpmiDevice(folder)
    shutil.rmtree(folder)


@dataclass
class Bench:
    """A daemon, its drill, and a power-off that only remembers; refuses: it says no; silent: it says nothing."""

    device: IpmiDevice
    daemon: Watched
    method: WatchdogEffector
    stopping: bool = False
    refuses: bool = False
    silent: bool = False
    offs: list[tuple[PowerOff, str, bool]] = field(default_factory=list)
    rests: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.effectors: dict[type[Action], Any] = {
            ArmPowerOn: PowerOnEffector({PowerOnMethod.WATCHDOG: self.method}),
            PowerOff: self,
        }
        self.output_off = self.device.folder / "output-off"
        self.drill = WatchdogDrill(
            self.daemon,
            lambda: self.effectors,
            spawn=self.spawn,
            host_name=lambda: "gpu07",
            pause=self.pause,
            output_off=self.output_off,
        )

    async def carry_out(self, action: Action) -> Detail:
        assert isinstance(action, PowerOff)
        if self.refuses:
            msg = "powerguard-off.socket is not listening"
            raise EffectorError(msg)
        self.offs.append((action, str(self.record["state"]), self.device.timer[4]))
        if self.silent:
            msg = "powerguard-off has not answered"
            raise EffectorError(msg, timed_out=True)
        return (("via", "fifo"),)

    async def spawn(self, argv: object, **_: object) -> Ended:
        return Ended(returncode=0, stdout=b"stopping\n" if self.stopping else b"running\n", stderr=b"")

    async def pause(self, seconds: float) -> None:
        self.rests.append(seconds)
        await asyncio.sleep(0)

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.device.folder / FILE).read_bytes()))

    async def run_until(self, true: Callable[[], object]) -> None:
        task = asyncio.get_running_loop().create_task(self.drill.run())
        try:
            await until(true)
        finally:
            task.cancel()


@asynccontextmanager
async def bench(device: IpmiDevice, daemon: Watched | None = None) -> AsyncIterator[Bench]:
    async with device.listening() as socket:
        options = BmcOptions(kind="in-band", socket=str(socket), watchdog=True)
        method = WatchdogEffector(options, DrillFile(device.folder), dmi=device.folder / "none")
        yield Bench(device, daemon or ready(), method)


# --- Beginning ------------------------------------------------------------------------------------------------------


@needs_device
async def test_it_is_written_down_then_armed_then_the_host_is_powered_off(device: IpmiDevice) -> None:
    """By whoever may, who has typed the host's name; the timer fires a minute after the forced power-off."""
    async with (
        bench(device) as mine,
        admin_server(mine.daemon, path=f"{device.folder}/s", watchdog=mine.drill) as path,
    ):
        code, plan = await ask(path, "POST", "watchdog-drill-plan", {})
        assert (code, plan["refused"], plan["host"], plan["in_s"], plan["last"]) == (200, "", "gpu07", 120, None)
        for wrong in ("", "gpu08", "GPU07"):
            code, result = await ask(path, "POST", "watchdog-drill", {"host": wrong})
            assert (code, result["error"]) == (409, f"{wrong!r} is not this host's name: it is gpu07")
        assert mine.offs == []
        began_s = boottime_s()
        code, result = await ask(path, "POST", "watchdog-drill", {"host": "gpu07"})
        assert (code, result["verb"]) == (202, "watchdog-drill")
        assert 119.0 - (boottime_s() - began_s) <= result["in_s"] <= 120.0
        ((order, state, armed),) = mine.offs
        assert (order.force_after_s, state, armed) == (60.0, "pending", True)
        notes = [(note.event, note.because.rsplit(", ")[-1]) for note in mine.daemon.notes]
        assert notes == [("watchdog_drill_armed", "begun by root"), ("power_off_ordered", "begun by root")]
        assert mine.record["boot_id"] == BOOT
        code, result = await ask(path, "POST", "watchdog-drill", {"host": "gpu07"})
        assert (code, result["error"]) == (409, "this drill is already running")
        code, plan = await ask(path, "POST", "watchdog-drill-plan", {})
        assert (plan["last"]["state"], len(mine.offs)) == ("pending", 1)
    example = json.loads((REFERENCE / "watchdog-drill-plan.json").read_bytes())
    assert example.keys() == plan.keys()
    assert example["last"].keys() == plan["last"].keys()
    assert example["last"]["board"].keys() == plan["last"]["board"].keys()


def stale() -> Watched:
    daemon = ready()
    trainer = replace(daemon.state.trainers[0], durable_at_s=NOW_S - 3600.0)
    daemon.state = replace(daemon.state, trainers=(trainer,))
    return daemon


@needs_device
@pytest.mark.parametrize(
    ("daemon", "expected"),
    [
        (in_mode(ready(), Mode.DRY_RUN), "mode is dry-run"),
        (in_mode(ready(), Mode.REHEARSE), "mode is rehearse"),
        (scene("on_battery"), "the phase is on_battery, not online"),
        (stale(), "its checkpoint is 60 minutes old"),
        (replace(ready(), host_kind="command"), "host.kind is command"),
    ],
    ids=["dry-run", "rehearse", "on battery", "old checkpoint", "another power-off"],
)
async def test_it_is_refused_where_it_is_not_safe(device: IpmiDevice, daemon: Watched, expected: str) -> None:
    async with bench(device, daemon) as mine:
        with pytest.raises(EffectorError, match=expected):
            await mine.drill.begin("root", "gpu07")
        assert (mine.offs, (device.folder / FILE).exists(), "06/24" in device.heard) == ([], False, False)


@needs_device
async def test_it_is_refused_where_the_power_off_would_cut_the_output_of_the_ups(device: IpmiDevice) -> None:
    """On utility that takes the power from whatever else the UPS feeds, and it is AC that brings the host back then."""
    async with bench(device) as mine:
        mine.output_off.touch()
        assert "move that file away" in str((await mine.drill.plan())["refused"])
        with pytest.raises(EffectorError, match="output-off, which switches the UPS's output off"):
            await mine.drill.begin("root", "gpu07")
        assert (mine.offs, "06/24" in device.heard) == ([], False)
        mine.output_off.unlink()
        assert (await mine.drill.plan())["refused"] == ""


@needs_device
async def test_it_is_refused_where_the_timer_is_not_free_or_not_ours_to_have(device: IpmiDevice) -> None:
    async with bench(device) as mine:
        device.set_timer(4, 1)
        assert "another program uses" in str((await mine.drill.plan())["refused"])
        with pytest.raises(EffectorError, match="another program uses"):
            await mine.drill.begin("root", "gpu07")
        mine.effectors[ArmPowerOn] = PowerOnEffector({})
        assert "bmc.watchdog is not set: write bmc:" in str((await mine.drill.plan())["refused"])
        assert (mine.offs, device.timer) == ([], (4, 1, 0, 600, True))


@needs_device
@pytest.mark.parametrize("fault", ["power-off", "arm", "file"])
async def test_what_was_done_is_taken_back_where_it_does_not_begin(device: IpmiDevice, fault: str) -> None:
    """A host that goes on must not be power-cycled by its own drill."""
    async with bench(device) as mine:
        if fault == "power-off":
            mine.refuses = True
        elif fault == "arm":
            device.trick(start="lost")
        else:
            (device.folder / f".{FILE}.new").mkdir()
        with pytest.raises(EffectorError):
            await mine.drill.begin("root", "gpu07")
        assert mine.offs == []
        if fault == "file":
            assert "06/24" not in device.heard
            return
        assert device.timer[1] == 0
        assert mine.record["state"] == "failed"
        assert str(mine.record["because"]).startswith("it did not start: ")
        mine.refuses = False
        device.trick()
        assert await mine.drill.begin("root", "gpu07") > 100.0


@dataclass
class Blackout(Watched):
    """The power fails when the drill has armed the timer."""

    def note(self, note: Note) -> None:
        super().note(note)
        if note.event == "watchdog_drill_armed":
            self.state = scene("on_battery").state


@needs_device
async def test_it_does_not_power_off_where_the_power_fails_while_the_bmc_is_asked(device: IpmiDevice) -> None:
    """Then training has to be saved first, and utility may be back before any power-off is needed."""
    async with bench(device, Blackout(policy=ready().policy, state=ready().state)) as mine:
        with pytest.raises(EffectorError, match="the phase is on_battery, not online"):
            await mine.drill.begin("root", "gpu07")
        assert (mine.offs, device.timer[1], mine.record["state"]) == ([], 0, "failed")


# --- Judging --------------------------------------------------------------------------------------------------------

FIRES_S = OLD.armed_wall_s + OLD.in_s


@pytest.mark.parametrize(
    ("cause", "expired", "after_s", "passed", "because"),
    [
        (RestartCause.WATCHDOG, True, 40.0, True, "restart cause watchdog; this boot began 40 s after"),
        (RestartCause.WATCHDOG, None, -8.0, True, "this boot began 0 s after"),
        (None, True, 40.0, True, "reports no restart cause; its timer has fired; this boot began 40 s after"),
        (RestartCause.UNKNOWN, True, 40.0, True, "its timer has fired"),
        (RestartCause.POWER_BUTTON, True, 40.0, False, "restart cause power-button: once the host is off"),
        (None, False, 40.0, False, "its timer has not fired: once the host is off"),
        (None, None, 40.0, False, "its timer has not fired"),
        (RestartCause.WATCHDOG, True, -30.0, False, "this boot began 30 s before the timer would have fired"),
        (RestartCause.WATCHDOG, True, 1200.0, False, "this boot began 20 minutes after the timer had fired"),
    ],
)
def test_only_the_timer_and_in_its_time_counts(
    cause: RestartCause | None, expired: bool | None, after_s: float, passed: bool, because: str
) -> None:
    """A person at the power button, a policy, or a host that was never off prove nothing."""
    seen = WatchdogStatus(
        timer=Timer(False, 4, 3, expired=expired), device=None, restart_cause=cause, kernel_driver=False
    )
    judged, why = verdict(OLD, seen, FIRES_S + after_s)
    assert judged is passed
    assert because in why


@needs_device
async def test_the_next_boot_judges_stops_the_timer_and_from_then_on_it_may_be_armed(device: IpmiDevice) -> None:
    async with bench(device) as mine:
        DrillFile(device.folder).store(OLD)
        device.set_board(cause=4)
        device.set_timer(4, 3, expired=0x10)
        await mine.run_until(lambda: mine.record["state"] != "pending" and device.timer[1] == 0)
        assert (mine.record["state"], mine.record["judged_wall_s"]) == ("passed", WALL_S)
        assert mine.record["because"] == "restart cause watchdog; this boot began 80 s after the timer had fired"
        assert dict(await mine.method.carry_out(CHECK))["drilled_wall_s"] == WALL_S
        (result,) = mine.daemon.notes
        assert (result.event, result.because, result.level) == (
            "watchdog_drill_judged",
            mine.record["because"],
            Level.INFO,
        )
        assert (dict(result.numbers), mine.daemon.checks) == ({"passed": True}, 1)


@needs_device
async def test_a_result_that_cannot_be_written_leaves_no_timer_running(device: IpmiDevice) -> None:
    """A host that a person has switched on early must not be power-cycled because its disk is full."""
    async with bench(device) as mine:
        DrillFile(device.folder).store(OLD)
        (device.folder / f".{FILE}.new").mkdir()
        device.set_timer(4, 3)
        await mine.run_until(lambda: mine.daemon.notes and mine.daemon.notes[-1].event == "watchdog_drill_unjudged")
        assert (mine.record["state"], device.timer[1]) == ("pending", 0)


@needs_device
async def test_none_begins_before_the_last_one_is_judged(device: IpmiDevice) -> None:
    """Its judge would stop the timer of the new one, and the host would stay off."""
    async with bench(device) as mine:
        DrillFile(device.folder).store(OLD)
        device.set_board(cause=4)
        device.set_timer(4, 3, expired=0x10)
        begun, judged = asyncio.Event(), asyncio.Event()

        async def pause(_seconds: float) -> None:
            begun.set()
            await judged.wait()

        mine.drill = WatchdogDrill(
            mine.daemon, lambda: mine.effectors, spawn=mine.spawn, host_name=lambda: "gpu07", pause=pause
        )
        task = asyncio.get_running_loop().create_task(mine.drill.run())
        await begun.wait()
        assert "is not judged yet" in str((await mine.drill.plan())["refused"])
        with pytest.raises(EffectorError, match="is not judged yet"):
            await mine.drill.begin("root", "gpu07")
        assert (mine.offs, mine.record["boot_id"]) == ([], OLD.boot_id)
        judged.set()
        async with asyncio.timeout(60.0):
            while (await mine.drill.plan())["refused"]:  # noqa: ASYNC110 - a drill reports no end
                await asyncio.sleep(0.1)
        assert (mine.record["state"], device.timer[1]) == ("passed", 0)
        assert await mine.drill.begin("root", "gpu07") > 100.0
        task.cancel()


@needs_device
async def test_another_board_or_a_bmc_that_does_not_answer_is_no_proof(device: IpmiDevice) -> None:
    async with bench(device) as mine:
        DrillFile(device.folder).store(OLD)
        device.set_board(cause=4, firmware="0174")
        await mine.run_until(lambda: mine.record["state"] != "pending")
        assert mine.record["because"] == "board or firmware changed in between: firmware was 1.72, is 1.74"
    gone = WatchdogEffector(BmcOptions(kind="in-band", socket="/nowhere"), DrillFile(device.folder))
    other = Bench(device, ready(), gone)
    DrillFile(device.folder).store(OLD)
    await other.run_until(lambda: other.record["state"] != "pending")
    assert other.record["because"].startswith("the BMC could not be asked: /nowhere: powerguard-ipmi.socket is not")
    assert other.rests.count(10.0) == 60


@needs_device
async def test_a_host_that_was_not_powered_off_has_its_timer_stopped(device: IpmiDevice) -> None:
    """Killed after arming, or a power-off that never came; a host that is going down is left to the timer."""
    async with bench(device) as mine:
        DrillFile(device.folder).store(replace(OLD, boot_id=BOOT))
        device.set_timer(4, 3)
        mine.stopping = True
        task = asyncio.get_running_loop().create_task(mine.drill.run())
        await asyncio.sleep(0.2)
        task.cancel()
        assert (mine.record["state"], device.timer[1]) == ("pending", 3)
        mine.stopping = False
        await mine.run_until(lambda: mine.record["state"] == "failed")
        assert (mine.record["because"], device.timer[1]) == ("the host was not powered off after it", 0)
        mine.method.drills.store(replace(OLD, state="failed"))
        running = asyncio.get_running_loop().create_task(mine.drill.run())
        await mine.drill.begin("root", "gpu07")
        await until(lambda: mine.record["because"] == "the host was not powered off after it")
        running.cancel()
        assert 90.0 in mine.rests
        assert device.timer[1] == 0


@needs_device
async def test_an_order_that_may_still_be_obeyed_keeps_its_way_back(device: IpmiDevice) -> None:
    """The word was written: a host that goes off late would stay off. One that goes on is not power-cycled."""
    async with bench(device) as mine:
        mine.silent = mine.stopping = True
        mine.method.drills.store(replace(OLD, state="failed"))
        running = asyncio.get_running_loop().create_task(mine.drill.run())
        with pytest.raises(EffectorError, match=r"has not answered; .* timer stays armed: .* still on in 90 s"):
            await mine.drill.begin("root", "gpu07")
        await until(lambda: 90.0 in mine.rests)
        assert (mine.record["state"], device.timer[1], device.timer[4]) == ("pending", 3, True)
        running.cancel()
        mine.stopping = False
        await mine.run_until(lambda: mine.record["state"] == "failed")
        assert (mine.record["because"], device.timer[1]) == ("the host was not powered off after it", 0)


@needs_device
async def test_a_damaged_file_is_reported_and_nothing_is_touched(device: IpmiDevice) -> None:
    async with bench(device) as mine:
        (device.folder / FILE).write_text("{")
        device.set_timer(4, 3)
        await mine.drill._settle()
        assert "no drill counts" in str((await mine.drill.plan())["refused"])
        assert device.timer == (4, 3, 0, 600, True)


def test_the_settings_name_it_and_the_daemon_finds_it(tmp_path: Path) -> None:
    """Only where bmc.watchdog says so; and it is in-band, so a BMC over the network alone has none."""
    for watchdog in (False, True):
        path = write(tmp_path, mode="armed")
        text = path.read_text().replace("{kind: none}", f"{{kind: in-band, watchdog: {str(watchdog).lower()}}}")
        path.write_text(text)
        parts = build(load(path), Ports(), lambda _: None)
        drill = WatchdogDrill(ready(), lambda found=parts: found.effectors, spawn=run_child)
        assert (PowerOnMethod.WATCHDOG in parts.policy.methods) is watchdog
        if watchdog:
            assert drill._watchdog().drills.path == tmp_path / FILE
        else:
            with pytest.raises(EffectorError, match="watchdog is not set"):
                drill._watchdog()
    login = "host: b, user: u, password: {credential: c}"
    path.write_text(text.replace("{kind: in-band,", f"{{kind: ipmi-lan, {login},"))
    with pytest.raises(SettingsError, match="watchdog is armed in-band, but kind is ipmi-lan"):
        load(path)
