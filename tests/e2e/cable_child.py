"""Run by test_lost_with_the_network.py in a network namespace of its own, as root: a host, a cable, a UPS beyond it.

The real daemon polls a simulated card through a veth pair. What is done to the cable is done here; what came of it is
asserted here as well. Argument: the name of the play.
"""

import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

from tests.e2e.peers import Trainer
from tests.e2e.rig import ROOMY, Rig, rig
from tests.peers.snmp_agent import SnmpAgent

NEW_NETWORK = 0x40000000
CARD = "10.78.0.5"
HERE = os.open("/proc/self/ns/net", os.O_RDONLY)
THERE: list[int] = []
_libc = ctypes.CDLL(None, use_errno=True)


def checked(returned: int) -> None:
    if returned:
        raise OSError(ctypes.get_errno(), "no network namespace")


def new_namespace() -> int:
    """Return a descriptor of a new network namespace, which ends with it; this process stays where it is."""
    checked(_libc.unshare(NEW_NETWORK))
    made = os.open("/proc/self/ns/net", os.O_RDONLY)
    checked(_libc.setns(HERE, NEW_NETWORK))
    return made


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Sockets and processes that are opened inside belong to this namespace."""
    checked(_libc.setns(namespace, NEW_NETWORK))
    try:
        yield
    finally:
        checked(_libc.setns(HERE, NEW_NETWORK))


def there() -> contextlib.AbstractContextManager[None]:
    """What is opened inside belongs to the other end of the cable."""
    return inside(THERE[0])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def lay_cable() -> None:
    THERE.append(new_namespace())
    ip("link", "set", "lo", "up")
    ip("link", "add", "near", "type", "veth", "peer", "name", "far")
    ip("link", "set", "far", "netns", f"/proc/{os.getpid()}/fd/{THERE[0]}")
    ip("addr", "add", "10.78.0.1/24", "dev", "near")
    ip("link", "set", "near", "up")
    with there():
        ip("addr", "add", f"{CARD}/24", "dev", "far")
        ip("link", "set", "far", "up")


def cable(*, whole: bool) -> None:
    """Pull the cable at the far end, or put it back: what a switch without power, or with it again, looks like."""
    with there():
        ip("link", "set", "far", "up" if whole else "down")


@contextlib.asynccontextmanager
async def world(*, witness: bool = True) -> AsyncIterator[Rig]:
    """The usual host, whose card is at the other end of the cable."""
    async with rig(Trainer(), runtime=ROOMY, card=False) as made, contextlib.AsyncExitStack() as stack:
        agent = SnmpAgent(made.ups.apc_table, host=CARD)
        with there():
            await stack.enter_async_context(agent)
        made.add_snmp(agent.port, host=CARD)
        made.settings["network_witness"] = witness
        await made.start()
        yield made
        made.no_traceback()


async def outage() -> None:
    """Utility and the switch go together: nobody tells of the battery, and the host is saved all the same."""
    async with world() as host:
        host.ups.utility = False
        cable(whole=False)
        result = await host.note("battery_presumed")
        assert "link near" in result.because, result
        await host.note("checkpoint_durable")
        await host.off()
        assert host.notes("checkpoint_durable")[0].at_s < host.actions("PowerOff")[0].at_s
        assert host.ups.alive
        host.one_outage()


async def switch() -> None:
    """Only the switch goes, and comes back: presumed, and over with the first answer; nothing is powered off."""
    async with world() as host:
        cable(whole=False)
        await host.note("battery_presumed")
        cable(whole=True)
        await host.note("network_back")
        await host.note("outage_ended")
        assert not host.actions("PowerOff")


async def somebody() -> None:
    """An interface that is taken down on this host is no witness: the UPS is silent, and that is an alarm."""
    async with world() as host:
        ip("link", "set", "near", "down")
        await host.note("source_lost")
        await host.note("ups_silent_raised")
        assert not host.notes("battery_presumed")
        assert not host.notes("network_lost")
        assert not host.outages()


async def unasked() -> None:
    """Nobody has said that the switches are on no UPS: one that fails is an alarm, and no reason to power off."""
    async with world(witness=False) as host:
        cable(whole=False)
        await host.note("ups_silent_raised")
        assert not host.notes("battery_presumed")
        assert not host.outages()


if __name__ == "__main__":
    lay_cable()
    asyncio.run({"outage": outage, "switch": switch, "somebody": somebody, "unasked": unasked}[sys.argv[1]]())
