"""Whole outages of a whole host: a Debian with systemd on a disk, powerguard as `install` puts it there, and training.

The UPS is a simulated card outside, read over SNMP, with a battery of its own; the BMC is OpenIPMI's, asked in-band
through the kernel's driver; AC is a plug. Nothing in the guest knows that it is one. It is interpreted, so everything
takes several times as long as on a board.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import pytest

from powerguard.clock import boottime_s
from powerguard.sim.snmp_values import SimValue
from powerguard.sim.ups import SimUps, UpsBattery
from tests.peers.ipmi import free_udp_port
from tests.peers.snmp_agent import SnmpAgent
from tests.vm.chassis import BOOT_S, HERE, Chassis
from tests.vm.debian import host

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.timeout(2400),  # the host and three boots take six minutes of a machine that is busy
    pytest.mark.peer("qemu-system-x86_64", "mmdebstrap", "mkfs.ext4", "ipmi_sim", "cc"),
]
TRAINING, PAUSED = 0.6, 0.5
"""Load of the UPS, as a share of its rating; 0 while the host is off."""
BATTERY: Final = UpsBattery(runtime=((PAUSED, 1480.0), (TRAINING, 1200.0)), health=0.17, recharge_s=36.0)
"""Large and nearly worn out: the emergency comes some 15 s after the cut, the commit half a minute later, and what is
left by then lasts for another boot."""
OFF_S: Final = 3.0


class Site(NamedTuple):
    """The disk of a host that was never started, and the port where it looks for its UPS."""

    disk: Path
    ups_port: int


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    port = free_udp_port()
    with host((HERE / "host/powerguard.yaml").read_text().replace("UPS_PORT", str(port))) as disk:
        yield Site(disk, port)


def waited_s(pid: int | None) -> float:
    """How long a process and its threads could have run, and had no processor (schedstat of proc(5))."""
    return sum(int(path.read_text().split()[1]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


class World:
    """One host, its UPS, and what the daemon has told last."""

    def __init__(self, chassis: Chassis) -> None:
        self.chassis = chassis
        self.ups = SimUps(BATTERY, clock=boottime_s, load=lambda: self._load)
        self.status: dict[str, Any] = {}
        """`status`; {} while nobody answers."""
        self.step = 0
        """Of the newest checkpoint of which the daemon has told that it is durable."""
        self.stood_at = 0
        """That step when the host was about to go off."""
        self.waited_s = 0.0
        """For a processor of this machine, from power-on until training continued."""
        self.fails_when_asked = False
        """Utility fails when the card is asked next: the first that a daemon hears, however long its boot takes."""

    @property
    def trainer(self) -> dict[str, Any]:
        return next(iter(self.status.get("trainers", [])), {})

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    def table(self) -> Mapping[str, SimValue]:
        """What the card answers."""
        if self.fails_when_asked:
            self.fails_when_asked = self.ups.utility = False
        return self.ups.apc_table()

    @property
    def _load(self) -> float:
        if self.chassis.pid is None:
            return 0.0
        return TRAINING if self.trainer.get("alive") and not self.trainer.get("paused") else PAUSED

    async def watch(self) -> None:
        """Ask the daemon what it sees, as a person would, for ever."""
        limit = aiohttp.ClientTimeout(total=5.0)
        async with aiohttp.ClientSession(timeout=limit) as session:
            while True:
                self.status = {}
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with session.get(f"http://127.0.0.1:{self.chassis.port}/api/v1/status") as answer:
                        self.status = await answer.json()
                self.step = max(self.step, self.trainer.get("durable_step") or 0)
                self.ups.look()
                await asyncio.sleep(0.5)

    async def until(self, holds: Callable[[], object], what: str, limit_s: float = BOOT_S) -> None:
        end_s = boottime_s() + limit_s
        while not holds():
            assert boottime_s() < end_s, f"not {what}: {json.dumps(self.status)}\n{self.chassis.console[-3000:]}"
            await asyncio.sleep(0.2)

    async def begins_to_train(self, *before: str) -> None:
        """Start the host for the first time, and its training by hand. before: what an administrator does first."""
        self.chassis.press()
        await self.chassis.is_up()
        for command in before:
            await self.says(command)
        await self.until(lambda: self.phase == "online" and self.status["supply"] == "utility", "watching the UPS")
        await self.until(lambda: self.chassis.bmc.policy == "always-on", "sure of the BMC")
        await self.says("systemctl start powerguard-resume.target")
        await self.until(lambda: (self.trainer.get("step") or 0) > 0, "training")

    async def commits(self) -> str:
        """Wait until it is to be powered off, whatever comes; the outage's id."""
        await self.until(lambda: self.phase == "shutdown", "committed")
        self.stood_at = self.step
        return str(self.status["outage"]["id"])

    async def goes_off(self) -> str:
        """Wait until it has powered itself off, in order; the outage's id."""
        id_ = await self.commits()
        await self.chassis.is_off()
        assert "reboot: Power down" in self.chassis.console, "it lost its power before it had gone off"
        assert "powerguard-off: forcing" not in self.chassis.console, self.chassis.console[-3000:]
        return id_

    async def trains_again(self, id_: str) -> dict[str, Any]:
        """Wait until that outage is over and training goes on where it stood; what the report says of it."""
        await self.until(lambda: self.phase == "online", "back online")
        self.waited_s = waited_s(self.chassis.pid)
        assert await self.went_on() == self.stood_at
        report = dict(json.loads(await self.says("/opt/powerguard/bin/powerguard report --json")))
        assert (report["outage"], report["outcome"], report["steps_lost"]) == (id_, "clean_shutdown", 0)
        return report

    async def went_on(self) -> int:
        """Return the step at which training of this boot went on."""
        said = await self.says("journalctl --boot --unit=train.service --output=cat --grep='go on'")
        return int(said.removeprefix("step ").removesuffix(": go on"))

    async def says(self, command: str) -> str:
        """Run a command in the guest that must succeed; what it said."""
        status, said = await self.chassis.run(command, limit_s=BOOT_S)
        assert status == 0, f"{command}: {status}: {said}"
        return said.strip()


@asynccontextmanager
async def world(site: Site) -> AsyncIterator[World]:
    """A host that is off, with AC there."""
    async with Chassis(disk=site.disk) as chassis:
        it = World(chassis)
        async with SnmpAgent(it.table, port=site.ups_port), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(it.watch())
            yield it
            watching.cancel()


async def figures(it: World) -> dict[str, float]:
    """Seconds of this boot at which something was so: systemd's for units, journald's for what the daemon said."""
    at: dict[str, float] = {}
    for name, what in (
        ("os", "--property=UserspaceTimestampMonotonic"),
        ("daemon_started", "powerguard.service --property=ExecMainStartTimestampMonotonic"),
        ("trainer_started", "train.service --property=ExecMainStartTimestampMonotonic"),
    ):
        at[name] = int(await it.says(f"systemctl show --value {what}")) / 1e6
    for event in ("host_returned", "gate_opened", "host_checked", "outage_ended"):
        at[event] = (await logged_s(it, f"--boot --unit=powerguard.service --grep='{event}'"))[0]
    return at


async def stopping_s(it: World) -> float:
    """From the decision to power the host off, in the boot before, to the first unit that stops."""
    decided_s = (await logged_s(it, "--boot=-1 --unit=powerguard.service --grep='new=shutdown'"))[-1]
    return min(at for at in await logged_s(it, "--boot=-1 _PID=1 --grep='^Stopp'") if at > decided_s) - decided_s


async def logged_s(it: World, which: str) -> list[float]:
    """When journald had such lines, in seconds of their boot."""
    lines = await it.says(f"journalctl --output=json --output-fields=MESSAGE {which}")
    return [int(json.loads(line)["__MONOTONIC_TIMESTAMP"]) / 1e6 for line in lines.splitlines()]


async def test_off_in_order_dark_and_back_to_training_by_itself(site: Site) -> None:
    """Utility fails until the battery is empty, and comes back: nobody touches anything, and not a step is lost."""
    async with world(site) as it:
        assert it.chassis.bmc.policy == "always-off"
        await it.begins_to_train()
        it.ups.utility = False
        id_ = await it.goes_off()
        await it.chassis.cut()
        await it.chassis.stays_off(OFF_S)
        it.ups.utility = True
        await it.chassis.restore()
        report = await it.trains_again(id_)
        assert report["boots"] == 2
        at = await figures(it)
        back_s = at["outage_ended"] - at["os"] - it.waited_s
        print(f"\nback after {back_s:.1f} s (90 are wanted of a real host): {at}\n{report['recovery']}")
        print(f"from the decision to the first unit that stops: {await stopping_s(it):.2f} s")


async def test_started_on_battery_it_waits_goes_down_again_and_comes_back(site: Site) -> None:
    """Utility fails again while the host boots: no training, no loop, off in order, and back with utility."""
    async with world(site) as it:
        await it.begins_to_train()
        it.ups.utility = False
        id_, stood_at = await it.goes_off(), it.stood_at
        await it.chassis.cut()
        it.ups.utility = True
        it.fails_when_asked = True
        await it.chassis.restore()
        await it.until(lambda: it.phase == "recovery" and it.status["supply"] == "battery", "on battery again")
        status, said = await it.chassis.run("systemctl is-active train.service powerguard-resume.target")
        assert (status, said.split()) == (3, ["inactive", "inactive"])
        assert await it.goes_off() == id_
        await it.chassis.cut()
        it.ups.utility = True
        await it.chassis.restore()
        report = await it.trains_again(id_)
        assert (report["boots"], it.stood_at) == (3, stood_at)


async def test_utility_back_while_units_stop_makes_it_a_reboot(site: Site) -> None:
    """The word reboot, heard in the middle of a shutdown: AC was never lost, and nobody had to press anything."""
    slow = "mkdir /etc/systemd/system/train.service.d && cd /etc/systemd/system/train.service.d"
    slow += " && printf '[Service]\\nExecStop=/bin/sleep 20\\n' >slow.conf && systemctl daemon-reload"
    async with world(site) as it:
        await it.begins_to_train(slow)
        pid = it.chassis.pid
        it.ups.utility = False
        id_ = await it.commits()
        await asyncio.sleep(3.0)
        it.ups.utility = True
        await it.chassis.is_up(boots=2)
        await it.trains_again(id_)
        assert (it.chassis.pid, it.chassis.bmc.orders) == (pid, [])
        assert "reboot_ordered" in await it.says("journalctl --boot=-1 --unit=powerguard.service --output=cat")


async def test_a_loss_of_power_that_no_ups_reported_ends_in_training_again(site: Site) -> None:
    """A breaker behind the UPS: the host is dark at once, in phase online. It comes back to its newest checkpoint."""
    async with world(site) as it:
        await it.begins_to_train()
        await it.says("/opt/powerguard/bin/powerguard checkpoint")
        await it.until(lambda: it.step > 0, "sure of a checkpoint")
        saved = it.step
        await it.chassis.cut()
        await it.chassis.stays_off(OFF_S)
        await it.chassis.restore()
        await it.until(lambda: it.phase == "recovery", "in recovery")
        await it.until(lambda: it.phase == "online", "back online")
        assert await it.went_on() >= saved
        report = dict(json.loads(await it.says("/opt/powerguard/bin/powerguard report --json")))
        assert (report["outcome"], report["boots"]) == ("dirty", 2)
        assert "unseen" in {each["rule"] for each in report["advice"]}
        print(f"\n{report['recovery']}")
