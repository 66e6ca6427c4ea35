"""Who answers SNMP among many addresses: a few small datagrams to each, at a bounded rate, over one socket."""

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from powerguard.protocols.snmp_ber import MessageError
from powerguard.protocols.snmp_hello import Version, answered, hello

PER_S: Final = 300
"""Datagrams a second: 24 kB/s, which no network and no old card minds."""
_BATCH: Final = 6
_ROUNDS: Final = 2
_LAST_ANSWERS_S: Final = 1.0
_MORE_VERSIONS_S: Final = 0.2
"""After everybody has answered in some version: for the other ones."""
_ANSWERS_EACH: Final = 8
"""Datagrams that one address may send back; what is more is not looked into."""
_ROOM_BYTES: Final = 1 << 20


@dataclass(slots=True)
class _Sweep(asyncio.DatagramProtocol):
    """Matches answers to questions: by address, and by a number that only the one who was asked knows."""

    port: int
    asked: dict[str, int] = field(default_factory=dict)
    versions: dict[str, set[Version]] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        address = addr[0]
        heard = self.heard.get(address, 0)
        if addr[1] != self.port or address not in self.asked or heard >= _ANSWERS_EACH:
            return
        self.heard[address] = heard + 1
        with contextlib.suppress(MessageError):
            version, number = answered(data)
            if number == self.asked[address]:
                self.versions.setdefault(address, set()).add(version)

    def error_received(self, exc: Exception) -> None:
        """ICMP refused: nothing tells whose it was."""


async def sweep(
    addresses: Sequence[str], *, port: int, community: bytes, progress: Callable[[int], None] = lambda _: None
) -> dict[str, set[Version]]:
    """Return which versions each address speaks; those that did not answer are left out.

    addresses: IP addresses. progress: told how many have been asked for good. Raises nothing; takes
    6 datagrams / PER_S for each address, and _LAST_ANSWERS_S.
    """
    found: dict[str, set[Version]] = {}
    done = 0
    for family, mine in _families(addresses):
        try:
            further = partial(_further, progress, done)
            found |= await _sweep(family, mine, port, community, further)
        except OSError:  # no such family on this host
            continue
        done += len(mine)
    return found


def _further(progress: Callable[[int], None], done: int, count: int) -> None:
    progress(done + count)


def _families(addresses: Sequence[str]) -> Iterator[tuple[socket.AddressFamily, list[str]]]:
    for family, is_six in ((socket.AF_INET, False), (socket.AF_INET6, True)):
        mine = [address for address in addresses if (":" in address) is is_six]
        if mine:
            yield family, mine


async def _sweep(
    family: socket.AddressFamily, addresses: list[str], port: int, community: bytes, progress: Callable[[int], None]
) -> dict[str, set[Version]]:
    loop = asyncio.get_running_loop()
    own = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM_BYTES)
    listener = _Sweep(port)
    transport, _ = await loop.create_datagram_endpoint(lambda: listener, sock=own)
    try:
        numbers = random.SystemRandom()
        for address in addresses:
            listener.asked[address] = numbers.randrange(1, 2**31 - 1)
        for turn in range(_ROUNDS):
            for place, address in enumerate(addresses):
                if address not in listener.versions:
                    for version in (1, "2c", 3):
                        transport.sendto(hello(version, listener.asked[address], community), (address, port))
                if place % (_BATCH // 3) == 0:
                    await _pause(_BATCH / PER_S)
                if turn == _ROUNDS - 1:
                    progress(place)
            await _pause(_LAST_ANSWERS_S if len(listener.versions) < len(addresses) else _MORE_VERSIONS_S)
    finally:
        transport.close()
    return listener.versions


async def _pause(seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
