"""What sources share: one look-up of a name at a time, whatever the name service does."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from powerguard.core.model.events import Reading, SourceFailed
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.apcupsd.source import ApcupsdSource
from powerguard.ups.base import LOOK_UPS_AT_ONCE, Resolver, Source
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.nut.source import NutSource
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.source import SnmpSource
from tests.peers.hurried import HurriedLoop, now_s
from tests.peers.names import NameService

HOST = "ups.example"
SOURCES: dict[str, Callable[[], Source]] = {
    "snmp": lambda: SnmpSource(SnmpOptions(kind="snmp", host=HOST, timeout_s=0.5), ups="a", clock=now_s),
    "nut": lambda: NutSource(NutOptions(kind="nut", host=HOST, name="a", timeout_s=0.5), ups="a", clock=now_s),
    "apcupsd": lambda: ApcupsdSource(ApcupsdOptions(kind="apcupsd", host=HOST, timeout_s=0.5), ups="a", clock=now_s),
}


class Loop(NameService, HurriedLoop):
    """A name service, without waiting."""


async def until_lost(source: Source) -> SourceFailed:
    heard: asyncio.Queue[Reading | SourceFailed] = asyncio.Queue()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        polling = group.create_task(source.run(heard.put_nowait))
        while not isinstance(event := await heard.get(), SourceFailed) or not event.lost:
            source.poll_now()
        polling.cancel()
    return event


@pytest.mark.parametrize("kind", SOURCES)
def test_a_name_service_that_hangs_is_asked_once(kind: str) -> None:
    """A look-up cannot be stopped, and holds one of the threads that read passwords and write orders down."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        failed = runner.run(until_lost(SOURCES[kind]()))
        loop = runner.get_loop()
    assert isinstance(loop, Loop)
    assert loop.asked == 1
    assert f"cannot look up {HOST}: no answer from the name service" in failed.reason


def test_many_names_that_hang_leave_threads_to_other_work() -> None:
    """A sentinel whose BMCs have names could write no intent down while their name service was gone."""

    async def look_up() -> None:
        names = [Resolver(f"bmc-{number}.example", OSError) for number in range(40)]
        await asyncio.gather(*(each.addresses(0.01) for each in names), return_exceptions=True)
        for each in names:
            each.close()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(look_up())
        loop = runner.get_loop()
    assert isinstance(loop, Loop)
    assert loop.asked == LOOK_UPS_AT_ONCE


def test_the_old_addresses_serve_while_the_name_service_hangs() -> None:
    resolver = Resolver(HOST, OSError)
    v4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))
    v6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 3))

    async def addresses(loop: Loop, found: list[Any] | None) -> list[str]:
        loop.found = found
        return list(await resolver.addresses(0.01))

    with asyncio.Runner(loop_factory=Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Loop)
        assert runner.run(addresses(loop, [v6, v4])) == ["192.0.2.1", "fe80::1%3"]
        assert runner.run(addresses(loop, None)) == ["192.0.2.1", "fe80::1%3"]
        resolver.close()
        assert runner.run(addresses(loop, [v4])) == ["192.0.2.1"]


def test_the_old_addresses_serve_in_the_time_of_an_answer_on_battery() -> None:
    """A card that misses one poll is looked up again, in an outage that has taken the name service: 0.8 s for all."""
    resolver = Resolver(HOST, OSError)

    async def addresses(loop: Loop) -> list[str]:
        loop.found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
        await resolver.addresses()
        loop.found = None
        async with asyncio.timeout(1.5):
            return list(await resolver.addresses())

    with asyncio.Runner(loop_factory=Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Loop)
        assert runner.run(addresses(loop)) == ["192.0.2.1"]


def test_an_order_knows_the_address_that_its_source_has_found() -> None:
    """Each order opens a connection of its own; the name service may be gone by then."""

    async def addresses(loop: Loop) -> list[str]:
        loop.found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
        await Resolver(HOST, OSError).addresses()
        loop.found = None
        order = Resolver(HOST, OSError)
        try:
            return list(await order.addresses())
        finally:
            order.close()

    with asyncio.Runner(loop_factory=Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Loop)
        assert runner.run(addresses(loop)) == ["192.0.2.1"]
