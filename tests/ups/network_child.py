"""Run by test_network.py in a network namespace of its own, as root: plays with a real link and a real gateway.

Prints one line for everything that the watch tells, after what was done to bring it about.
"""

import asyncio
import socket
import subprocess
import threading
from pathlib import Path

from powerguard.clock import boottime_s
from powerguard.core.model.events import NetworkSeen
from powerguard.ups.network import NetworkWatch

HURRIED = {
    "base_reachable_time_ms": "300",
    "delay_first_probe_time": "1",
    "ucast_solicit": "2",
    "mcast_solicit": "1",
    "retrans_time_ms": "100",
}
"""Linux's own patience with a neighbour is a minute."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def there(pid: int, *words: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", *words], check=True)


def apart(pid: int) -> None:
    """Wait until the other end has a namespace of its own."""
    pause = threading.Event()
    while Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        pause.wait(0.01)


def connect(pid: int) -> None:
    """Lay a cable from here (near, 10.77.0.1) to there (far, 10.77.0.2), which is our gateway."""
    ip("link", "add", "near", "type", "veth", "peer", "name", "far")
    ip("link", "set", "far", "netns", str(pid))
    ip("addr", "add", "10.77.0.1/24", "dev", "near")
    there(pid, "addr", "add", "10.77.0.2/24", "dev", "far")
    there(pid, "link", "set", "far", "up")
    ip("link", "set", "near", "up")
    ip("route", "add", "default", "via", "10.77.0.2")
    for name, value in HURRIED.items():
        Path(f"/proc/sys/net/ipv4/neigh/near/{name}").write_text(value, encoding="ascii")


async def play(pid: int, heard: "asyncio.Queue[NetworkSeen]") -> None:
    async def print_next(what: str) -> None:
        async with asyncio.timeout(20):
            seen = await heard.get()
        print(f"{what}: {seen.part} {'up' if seen.up else 'gone'}", flush=True)
        if seen.heard_s is not None:
            assert 0.0 <= seen.at_s - seen.heard_s < 20.0, seen

    async def poke() -> None:
        """Send something to whom the source polls, as it does."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            while True:
                out.sendto(b"", ("10.77.9.9", 9))
                await asyncio.sleep(0.05)

    await print_next("at first")
    poking = asyncio.create_task(poke())
    await print_next("an address is polled")
    there(pid, "link", "set", "far", "arp", "off")
    await print_next("the gateway dies")
    there(pid, "link", "set", "far", "arp", "on")
    await print_next("it lives again")
    poking.cancel()
    await asyncio.wait([poking])
    there(pid, "link", "set", "far", "down")
    await print_next("the cable is pulled")
    there(pid, "link", "set", "far", "up")
    await print_next("and put back")
    ip("link", "set", "near", "down")
    ip("link", "set", "near", "up")
    await print_next("the link is taken down and up")


async def watch(pid: int) -> None:
    heard: asyncio.Queue[NetworkSeen] = asyncio.Queue()
    watch = NetworkWatch(["10.77.9.9"], publish=heard.put_nowait, clock=boottime_s)
    watching = asyncio.create_task(watch.run())
    try:
        await play(pid, heard)
        print("quiet" if heard.empty() else f"more: {heard.get_nowait()}")
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def main() -> None:
    far = subprocess.Popen(["unshare", "-n", "sleep", "100"])
    try:
        apart(far.pid)
        connect(far.pid)
        asyncio.run(watch(far.pid))
    finally:
        far.kill()
        far.wait()


if __name__ == "__main__":
    main()
