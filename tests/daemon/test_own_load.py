"""What this host draws, read from a BMC that speaks DCMI, at the pace that the phase asks for."""

import asyncio
import signal
from pathlib import Path

import pytest

from powerguard.core.model.actions import Grade
from powerguard.core.model.events import OwnLoad, OwnSource
from powerguard.core.model.policy import Policy, Shared
from powerguard.core.model.state import OnBattery, Outage, Shutdown, State
from powerguard.daemon import own_load
from powerguard.daemon.own_load import Outlets, OwnLoadWatch, gpu_watts
from powerguard.effectors.bmc.effector import BmcEffector
from powerguard.effectors.gpu.effector import GpuEffector
from powerguard.effectors.options import BmcOptions, GpuOptions
from powerguard.options import Secret
from powerguard.ups.nut.options import OutletOptions
from tests.peers import nut
from tests.peers.ipmi import keep_secret
from tests.peers.sim_bmc import Faults, SimBmc

POLICY = Policy(boot_id="boot-one", ups="ups", shared=Shared(hosts=2))
OUTAGE = Outage(id="one", since_s=0.0, grade=Grade.FULL)


def _effector(folder: Path, bmc: SimBmc) -> BmcEffector:
    password = Secret(file=str(keep_secret(folder / "password", "of-the-tests")))
    options = BmcOptions(kind="ipmi-lan", host=bmc.host, port=bmc.port, user="powerguard", password=password)
    return BmcEffector(options)


async def test_a_bmc_that_speaks_dcmi(tmp_path: Path) -> None:
    """Over RMCP+, one session a reading; a BMC that takes a second for each command is waited for."""
    async with SimBmc("powerguard", "of-the-tests") as bmc:
        mine = _effector(tmp_path, bmc)
        assert await mine.power_watts(30.0) is None
        await bmc.set_watts(1480)
        assert await mine.power_watts(30.0) == 1480.0
        await bmc.set_faults(Faults(delay_s=1.0))
        assert await mine.power_watts(30.0) == 1480.0


class World:
    """A state that changes, a clock that is told, and what was published."""

    def __init__(self) -> None:
        self.state = State()
        self.now_s = 0.0
        self.heard: list[OwnLoad] = []
        self.reads = 0
        self.hangs = False
        self.changed = asyncio.Condition()

    async def read(self, limit_s: float) -> float | None:
        assert limit_s == own_load.LIMIT_S
        self.reads += 1
        async with self.changed:
            self.changed.notify_all()
        if self.hangs:
            await asyncio.Event().wait()
        return 1000.0 + self.reads

    async def rest(self, seconds: float) -> None:
        self.now_s += seconds
        async with self.changed:
            self.changed.notify_all()
        await asyncio.sleep(0)

    def watch(self, policy: Policy = POLICY) -> OwnLoadWatch:
        return OwnLoadWatch(
            policy=policy,
            read={OwnSource.BMC: self.read},
            state=lambda: self.state,
            publish=self.heard.append,
            clock=lambda: self.now_s,
            rest=self.rest,
        )

    async def play(self, watch: OwnLoadWatch, until_s: float) -> None:
        running = asyncio.create_task(watch.run())
        async with self.changed:
            await self.changed.wait_for(lambda: self.now_s >= until_s)
        running.cancel()
        await asyncio.wait((running,))


@pytest.mark.parametrize(
    ("phase", "policy", "until_s", "reads"),
    [
        (State(), POLICY, 62.0, 2),
        (State(phase=OnBattery(outage=OUTAGE)), POLICY, 62.0, 13),
        (State(), Policy(boot_id="b", ups="u"), 590.0, 0),
        (State(), Policy(boot_id="b", ups="u"), 610.0, 1),
        (State(phase=OnBattery(outage=OUTAGE)), Policy(boot_id="b", ups="u"), 610.0, 0),
        (State(phase=Shutdown(outage=OUTAGE, boot_id="b", latched_s=0.0, because="")), POLICY, 62.0, 0),
    ],
)
async def test_how_often_it_is_read(phase: State, policy: Policy, until_s: float, reads: int) -> None:
    """Every minute on utility, every 5 s on battery; where the UPS is ours alone, seldom and never on battery."""
    world = World()
    world.state = phase
    await world.play(world.watch(policy), until_s)
    assert world.reads == reads
    assert [each.watts for each in world.heard] == [1001.0 + n for n in range(reads)]


async def test_a_reading_that_hangs_is_let_go_at_the_commit() -> None:
    """From then on the BMC is for what counts: that the host comes back."""
    world = World()
    world.state = State(phase=OnBattery(outage=OUTAGE))
    world.hangs = True
    running = asyncio.create_task(world.watch().run())
    async with asyncio.timeout(60.0), world.changed:
        await world.changed.wait_for(lambda: world.reads == 1)
        world.state = State(phase=Shutdown(outage=OUTAGE, boot_id="b", latched_s=0.0, because=""))
        await world.changed.wait_for(lambda: world.now_s > 0.0)
    assert world.heard == []
    running.cancel()
    await asyncio.wait((running,))


async def test_gpus_behind_no_helper_are_not_reported(tmp_path: Path) -> None:
    """A helper that is not there is no reading, and no error of the daemon's."""
    gpu = GpuEffector(GpuOptions(kind="nvml", socket=str(tmp_path / "none.sock")))
    assert await gpu_watts(gpu, 2.0) is None


OUTLETS = {"ups.status": "OL", "outlet.3.realpower": "600", "outlet.4.realpower": "612.5", "outlet.5.status": "on"}


def _outlets(served: nut.Upsd, *outlets: int) -> Outlets:
    return Outlets([OutletOptions(kind="nut", host="127.0.0.1", port=served.port, name="pdu", outlets=list(outlets))])


async def test_the_outlets_of_a_pdu_behind_upsd() -> None:
    """Their sum, without a login. What upsd cannot say is None, and the reason names outlet, place and remedy."""
    async with nut.upsd("pdu", values=OUTLETS) as served:
        both = _outlets(served, 3, 4)
        assert await both.watts(5.0) == 1212.5
        assert both.trouble == ""
        assert await served.logins("pdu") == 0
        for outlet, says in ((5, "has no outlet.5.realpower"), (9, "has no outlet.9.realpower")):
            wrong = _outlets(served, 3, outlet)
            assert await wrong.watts(5.0) is None
            assert says in wrong.trouble
            assert f"{served.port}, pdu" in wrong.trouble
            assert "upsc pdu" in wrong.trouble
        for value in ("nan", "-5", "1e9", "600 W"):
            served.change({"outlet.4.realpower": value}, "pdu")
            await served.shows(value, "outlet.4.realpower", "pdu")
            assert await both.watts(5.0) is None
            assert f"answers {value!r} for outlet.4.realpower" in both.trouble
        await served.kill_driver(ups="pdu")
        async with asyncio.timeout(60.0):
            while "DRIVER-NOT-CONNECTED" not in both.trouble:  # Its last values stay until upsd has noticed.
                assert await both.watts(5.0) is None
        await served.kill()
        assert await both.watts(5.0) is None
        assert "refused" in both.trouble


async def test_a_upsd_that_hangs_costs_the_limit() -> None:
    async with nut.upsd("pdu", values=OUTLETS) as served:
        await served.kill(signal.SIGSTOP)
        hung = _outlets(served, 3)
        assert await hung.watts(0.5) is None
        assert hung.trouble == "no answer in 0.5 s"
