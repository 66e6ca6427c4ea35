"""The host's own network as a witness: what counts as gone, and what does not; on real links where root is at hand."""

import asyncio
import ipaddress
import subprocess
import sys
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.events import NetworkSeen
from powerguard.ups.network import Link, Neighbour, NetworkWatch, Route, Watched, resolve
from tests.peers import require

GATEWAY = ipaddress.ip_address("10.0.0.1")
ETH0 = Route(index=3, gateway=GATEWAY)


def _eth0(*, carrier: bool = True, wanted: bool = True, gone: bool = False, index: int = 3, name: str = "eth0") -> Link:
    return Link(index=index, name=name, wanted=wanted, carrier=carrier, gone=gone)


def _gateway(*, alive: bool, index: int = 3, silent_s: float | None = None) -> Neighbour:
    return Neighbour(index=index, address=GATEWAY, reachable=alive, failed=not alive, silent_s=silent_s)


def _watched() -> Watched:
    watched = Watched()
    watched.take_ways([ETH0])
    return watched


def test_a_link_that_was_there_goes_and_comes_back() -> None:
    """Each is told once, however often the kernel says it."""
    watched = _watched()
    assert watched.take(_eth0(), 1.0) == NetworkSeen(at_s=1.0, part="link eth0", up=True)
    assert watched.take(_eth0(), 2.0) is None
    assert watched.take(_eth0(carrier=False), 3.0) == NetworkSeen(at_s=3.0, part="link eth0", up=False)
    assert watched.take(_eth0(carrier=False), 4.0) is None
    assert watched.take(_eth0(), 5.0) == NetworkSeen(at_s=5.0, part="link eth0", up=True)


def test_what_was_down_already_did_not_go() -> None:
    """A port without a cable at the start of the daemon is no witness of an outage."""
    watched = _watched()
    assert watched.take(_eth0(carrier=False), 1.0) is None
    assert watched.take(_gateway(alive=False), 1.0) is None
    assert watched.parts == {}


@pytest.mark.parametrize("taken", [_eth0(carrier=False, wanted=False), _eth0(carrier=False, gone=True)])
def test_what_somebody_takes_down_did_not_go(taken: Link) -> None:
    """`ip link set down`, a network that is configured anew, and the end of every shutdown."""
    watched = _watched()
    watched.take(_eth0(), 1.0)
    assert watched.take(taken, 2.0) is None
    assert watched.take(_eth0(carrier=False), 3.0) is None, "and is not there when it comes up without a cable"


def test_a_dead_link_is_heard_of_again_though_its_routes_are_gone() -> None:
    """Network managers remove them; and with no way at all the old ones stay."""
    watched = _watched()
    watched.take(_eth0(), 1.0)
    watched.take(_eth0(carrier=False), 2.0)
    watched.take_ways([Route(index=9, gateway=None)])
    assert watched.links() == {3, 9}
    assert watched.take(_eth0(), 3.0) == NetworkSeen(at_s=3.0, part="link eth0", up=True)
    watched.take_ways([])
    assert watched.links() == {9}


def test_links_and_neighbours_of_others_are_none_of_ours() -> None:
    """A container's interface comes and goes all day; a neighbour that is no gateway may be switched off."""
    watched = _watched()
    assert watched.take(_eth0(index=7, name="veth7"), 1.0) is None
    assert watched.take(_gateway(alive=True, index=7), 1.0) is None
    other = Neighbour(index=3, address=ipaddress.ip_address("10.0.0.5"), reachable=True, failed=False)
    assert watched.take(other, 1.0) is None


def test_a_gateway_that_dies_was_last_heard_before() -> None:
    """Linux finds out up to a minute late, and says so. Doubt (stale, probed) is no news."""
    watched = _watched()
    assert watched.take(_gateway(alive=True), 100.0) == NetworkSeen(at_s=100.0, part=f"gateway {GATEWAY}", up=True)
    doubted = Neighbour(index=3, address=GATEWAY, reachable=False, failed=False)
    assert watched.take(doubted, 110.0) is None
    seen = watched.take(_gateway(alive=False, silent_s=40.0), 140.0)
    assert seen == NetworkSeen(at_s=140.0, part=f"gateway {GATEWAY}", up=False, heard_s=100.0)
    watched.take_ways([Route(index=3, gateway=None)])
    assert watched.take(_gateway(alive=True), 150.0) is not None, "its end is told, whatever became of the way"


async def test_names_are_resolved_and_what_nobody_knows_is_no_address() -> None:
    """A site whose DNS is down at boot is asked again later."""
    assert ipaddress.ip_address("127.0.0.1") in await resolve("localhost")
    assert await resolve("192.0.2.9") == (ipaddress.ip_address("192.0.2.9"),)
    assert await resolve("no-such-host.invalid") == ()
    assert await resolve("x" * 300) == ()


async def test_the_watch_of_this_machine_runs_and_ends() -> None:
    """Without any privilege: rtnetlink talks to everybody."""
    heard: list[NetworkSeen] = []
    watch = NetworkWatch(["192.0.2.9", "no-such-host.invalid"], publish=heard.append, clock=boottime_s)
    task = asyncio.get_running_loop().create_task(watch.run())
    done, _ = await asyncio.wait([task], timeout=0.5)
    assert not done
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert all(seen.up for seen in heard), "whatever this machine has is there"
    assert set(watch.parts) == {seen.part for seen in heard}


@pytest.mark.root
def test_real_links_and_a_real_gateway() -> None:
    """A veth pair between two network namespaces: a gateway without ARP, a pulled cable, an interface taken down."""
    for program in ("unshare", "nsenter", "ip"):
        require(program)
    child = [sys.executable, str(Path(__file__).with_name("network_child.py"))]
    probe = subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True)
    if probe.returncode:
        pytest.skip("this kernel gives us no network namespace")
    veth = ["unshare", "-n", "ip", "link", "add", "near", "type", "veth", "peer", "name", "far"]
    if subprocess.run(veth, check=False, capture_output=True).returncode:
        pytest.skip("this kernel has no veth")
    ended = subprocess.run(["unshare", "-n", *child], check=False, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "at first: link near up",
        "an address is polled: gateway 10.77.0.2 up",
        "the gateway dies: gateway 10.77.0.2 gone",
        "it lives again: gateway 10.77.0.2 up",
        "the cable is pulled: link near gone",
        "and put back: link near up",
        "the link is taken down and up: link near up",
        "quiet",
    ]
