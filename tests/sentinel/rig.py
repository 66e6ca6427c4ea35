"""A sentinel in this process: its own server, store and decisions; UPSes and, where a test wants it, BMCs are stand-ins
at our own ports. Its clock runs `pace` times faster than the loop, so that minutes of waiting are seconds; but not that
of its door, where half a minute must be enough for an answer on a busy machine."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powerguard.clock import boottime_s
from powerguard.core.model.actions import Action, ArmPowerOn, CheckPowerOn, Detail, DisarmPowerOn, PowerOnMethod
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.effectors.bmc.engine import BmcError
from powerguard.effectors.bmc.ipmi import ChassisStatus, Failure, PowerRestorePolicy
from powerguard.effectors.options import BmcOptions, SentinelOptions
from powerguard.effectors.sentinel.effector import SentinelEffector
from powerguard.options import Secret
from powerguard.sentinel.decide import Intent
from powerguard.sentinel.main import reads
from powerguard.sentinel.options import SentinelHost, SentinelSettings, SentinelUps
from powerguard.sentinel.run import Sentinel, SentinelPorts, moment_of
from powerguard.sentinel.server import HostRequests, server
from powerguard.sentinel.store import IntentFile, IntentStore
from powerguard.ups.base import Publish, Source
from powerguard.ups.nut.options import NutOptions
from tests.peers.ipmi import keep_secret

KEYS = {"n1": b"1" * 64, "n2": b"2" * 64}
NO_BMC = BmcOptions(kind="ipmi-lan", host="127.0.0.1", user="u", password=Secret(file="/nowhere"))


@dataclass
class Chassis:
    """A BMC at our port, and the host below it.

    power_on None: it does not say; why: it fails with this; stuck: it takes orders and does nothing; hangs_s: real
    seconds before each answer; refuses: so many orders are refused.
    """

    power_on: bool | None = True
    why: str = ""
    stuck: bool = False
    hangs_s: float = 0.0
    refuses: int = 0
    failure: Failure = Failure.BUSY
    refused: int = 0
    orders: int = 0
    ordered_s: list[float] = field(default_factory=list)
    where = "BMC of the test"

    async def status(self, by_s: float) -> ChassisStatus:
        if self.hangs_s:
            await asyncio.sleep(self.hangs_s)
        if self.why:
            raise BmcError(self.why)
        return ChassisStatus(power_on=self.power_on, policy=PowerRestorePolicy.ALWAYS_ON)

    async def power_on_(self) -> None:
        if self.refused < self.refuses:
            self.refused += 1
            msg = "the test refuses it"
            raise BmcError(msg, self.failure)
        self.orders += 1
        self.ordered_s.append(boottime_s())
        if not self.stuck:
            self.power_on = True


class Port:
    """What the sentinel holds of a `Chassis`: attributes and methods of one name would collide."""

    def __init__(self, chassis: Chassis) -> None:
        self._chassis = chassis
        self.where = chassis.where

    async def status(self, by_s: float) -> ChassisStatus:
        return await self._chassis.status(by_s)

    async def power_on(self, by_s: float) -> None:
        await self._chassis.power_on_()


@dataclass
class Supply:
    """A UPS: what its source says every few hundredths of a second. None: nothing, as if the card were dead."""

    source: OutputSource | None = OutputSource.UTILITY
    more: dict[str, Any] = field(default_factory=dict)


class Card(Source):
    def __init__(self, ups: str, supply: Supply, clock: Callable[[], float]) -> None:
        self._ups, self._supply, self._clock = ups, supply, clock

    async def run(self, publish: Publish) -> None:
        while True:
            result = self._supply.source
            if result is None:
                publish(SourceFailed(at_s=self._clock(), ups=self._ups, source="card", reason="silence", lost=True))
            else:
                input_present = result is OutputSource.UTILITY
                base = {"charge_pct": 80.0, "input_present": input_present, **self._supply.more}
                publish(Reading(at_s=self._clock(), ups=self._ups, source="card", output_source=result, **base))
            await asyncio.sleep(0.01)

    def poll_now(self) -> None:
        """It is polled all the time."""


@dataclass
class Rig:
    """One sentinel that runs. chassis: by host; supplies: by UPS."""

    settings: SentinelSettings
    sentinel: Sentinel
    door: HostRequests
    port: int
    folder: Path
    chassis: dict[str, Chassis]
    supplies: dict[str, Supply]
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def outages(self) -> dict[str, str]:
        """Which intents stand."""
        return {name: intent.outage for name, intent in self.sentinel.keeper.table.intents.items()}

    @property
    def word(self) -> Intent:
        """The word of n1, which stands."""
        return self.sentinel.keeper.table.intents["n1"]

    def effector(
        self,
        host: str = "n1",
        *,
        armed: bool = True,
        urls: tuple[str, ...] = (),
        **more: Any,  # noqa: ANN401
    ) -> SentinelEffector:
        options = options_of(self.folder, host, (*urls, self.url), **more)
        return SentinelEffector(options, feeds=self.settings.hosts[host].feeds, armed=armed, boot=lambda: "boot-1")

    async def until(self, is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
        async with asyncio.timeout(limit_s):
            while not is_so():  # noqa: ASYNC110 - what is waited for is a stand-in's state
                await asyncio.sleep(0.01)


def options_of(folder: Path, host: str, urls: tuple[str, ...], **more: Any) -> SentinelOptions:  # noqa: ANN401
    key = more.pop("key", KEYS.get(host, KEYS["n1"]))
    secret = Secret(file=str(keep_secret(folder / f"key-{host}", key.decode())))
    return SentinelOptions(kind="http", urls=list(urls), key=secret, name=host, **more)


def settings_of(
    folder: Path,
    *,
    hosts: tuple[str, ...] = ("n1",),
    ups: tuple[str, ...] = ("a",),
    **more: Any,  # noqa: ANN401
) -> SentinelSettings:
    bmc = more.pop("bmc", {})
    of_host = more.pop("of_host", {})
    folder.mkdir(exist_ok=True)
    source = NutOptions(kind="nut", host="127.0.0.1", name="x", poll_s=5.0, timeout_s=5.0)
    # By a fast clock a busy machine falls silent at every turn; nothing that is set could be so patient.
    source = source.model_copy(update={"timeout_s": more.pop("silent_s", 30.0) / 3.0 - 5.0})
    given = {
        name: SentinelHost(
            key=Secret(file="/nowhere"), bmc=bmc.get(name, NO_BMC), **{"feeds": list(ups), "stagger_s": 0, **of_host}
        )
        for name in hosts
    }
    base = {"mode": "armed", "state": str(folder), "utility_stable_s": 5, "port": 13494}
    return SentinelSettings(ups={name: SentinelUps(sources=[source]) for name in ups}, hosts=given, **(base | more))


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    settings: SentinelSettings | None = None,
    *,
    pace: float = 20.0,
    real_bmc: bool = False,
    tls: ssl.SSLContext | None = None,
    wall: Callable[[], float] = time.time,
    chassis: dict[str, Chassis] | None = None,
    supplies: dict[str, Supply] | None = None,
    store: IntentFile | None = None,
    page_key: bytes = b"",
) -> AsyncIterator[Rig]:
    """Run a sentinel until the block ends; it ends as if killed: nothing is written at the end."""
    result = settings or settings_of(folder / "state")
    chassis = chassis or {name: Chassis() for name in result.hosts}
    supplies = supplies or {name: Supply() for name in result.ups}
    zero_s = boottime_s()

    def clock() -> float:
        return zero_s + pace * (boottime_s() - zero_s)

    def power(name: str, _: SentinelHost) -> Port:
        return Port(chassis[name])

    ports = SentinelPorts(
        clock=clock,
        wall=wall,
        pace=pace,
        sources=lambda settings, clock: [(ups, Card(ups, supplies[ups], clock)) for ups in settings.ups],
        power=None if real_bmc else power,
    )
    async with asyncio.TaskGroup() as tasks:
        keeper = IntentStore(store or IntentFile(Path(result.state)), moment_of(ports), tasks)
        await keeper.load()
        sentinel = Sentinel(result, keeper, ports)
        keys = {name: KEYS.get(name, KEYS["n1"]) for name in result.hosts}
        door = HostRequests(keys, sentinel, boottime_s)
        task = tasks.create_task(sentinel.run())
        async with server(door, reads(sentinel, door, page_key), listen="127.0.0.1", port=0, tls=tls) as port:
            scheme = "http" if tls is None else "https"
            yield Rig(result, sentinel, door, port, folder, chassis, supplies, scheme)
        task.cancel()


def arm(outage: str = "o1", in_s: float = 0.0, limit_s: float = 30.0) -> ArmPowerOn:
    return ArmPowerOn(
        id=f"arm-{outage}", by_s=boottime_s() + limit_s, method=PowerOnMethod.SENTINEL, outage=outage, in_s=in_s
    )


def disarm(outage: str = "o1", limit_s: float = 30.0) -> DisarmPowerOn:
    return DisarmPowerOn(
        id=f"disarm-{outage}", by_s=boottime_s() + limit_s, method=PowerOnMethod.SENTINEL, outage=outage
    )


def check(limit_s: float = 30.0) -> CheckPowerOn:
    return CheckPowerOn(id="check", by_s=boottime_s() + limit_s, method=PowerOnMethod.SENTINEL)


async def carried_out(effector: SentinelEffector, action: Action) -> dict[str, Any]:
    detail: Detail = await effector.carry_out(action)
    return dict(detail)
