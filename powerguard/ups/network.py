"""The host's own network, as a witness: did the link or the gateway of its sources go down?

The kernel reports it without a request (rtnetlink), to every listener and at once: a link that loses its signal within
milliseconds, a gateway that no longer answers ARP within a minute (Linux asks it again 15 to 45 s after its last word,
waits 5 s, and asks three times). An interface that is taken down by hand is not a witness, nor is one that was down
already.

Linux's rtnetlink, rtnetlink(7): which link and gateway a packet takes, and when they go down. Bytes only.

Native byte order and alignment to 4, as the kernel of the same machine speaks it. What is not known is passed over; a
message that says more than it holds ends the datagram.
"""

import asyncio
import errno
import ipaddress
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from powerguard.clock import Clock
from powerguard.core.model.events import NetworkSeen

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

GROUPS: Final = 0x1 | 0x4 | 0x40 | 0x400
"""RTMGRP_LINK, RTMGRP_NEIGH, RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_ROUTE: what the kernel reports without a request."""
MAX_DATAGRAM: Final = 65536

_HEADER: Final = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence, port."""
_LINK: Final = struct.Struct("=BxHiII")
"""struct ifinfomsg: family, type, index, flags, changed."""
_ROUTE: Final = struct.Struct("=BBBBBBBBI")
"""struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags."""
_NEIGHBOUR: Final = struct.Struct("=BxHiHBB")
"""struct ndmsg: family, index, state, flags, type."""
_ATTRIBUTE: Final = struct.Struct("=HH")
_KNOWN: Final = 0x3FFF
"""Of an attribute's type; the two bits above say how it is packed."""

_ERROR, _NEWLINK, _DELLINK, _GETLINK = 2, 16, 17, 18
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_NEWNEIGH = 28
_REQUEST: Final = 1
_IFLA_IFNAME, _RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_VIA, _NDA_DST, _NDA_CACHEINFO = 3, 1, 4, 5, 18, 1, 3
_IFF_UP: Final = 0x1
_IFF_LOWER_UP: Final = 0x10000
_RTN_UNICAST: Final = 1
_NUD_REACHABLE, _NUD_FAILED = 0x02, 0x20
_USER_HZ: Final = 100.0
_FAMILIES: Final[dict[int, type[Address]]] = {2: ipaddress.IPv4Address, 10: ipaddress.IPv6Address}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An interface. wanted: it is set up (IFF_UP); carrier: it has a signal (IFF_LOWER_UP). gone: deleted."""

    index: int
    name: str
    wanted: bool
    carrier: bool
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """By which link a packet leaves, and to which gateway; None: straight to its destination, or another family's."""

    index: int
    gateway: Address | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """What ARP or neighbour discovery says of an address. silent_s: since it was last confirmed; None: unknown."""

    index: int
    address: Address
    reachable: bool
    failed: bool
    silent_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesChanged:
    """Some route came or went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The kernel refused what was asked. code: errno, such as ENETUNREACH (101)."""

    code: int


Answer = Link | Route | Neighbour | RoutesChanged | Refused


def _request(kind: int, sequence: int, body: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST, sequence, 0) + body


def ask_route(address: Address, sequence: int) -> bytes:
    """Ask which way a packet to this address takes."""
    family = 2 if address.version == 4 else 10
    packed = address.packed
    route = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
    return _request(_GETROUTE, sequence, route + _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _RTA_DST) + packed)


def ask_link(index: int, sequence: int) -> bytes:
    """Ask how a link is."""
    return _request(_GETLINK, sequence, _LINK.pack(0, 0, index, 0, 0))


def parse(datagram: bytes) -> Iterator[tuple[int, Answer]]:
    """Yield the messages of a datagram, each with its sequence number: of the request, 0 without one."""
    at = 0
    while at + _HEADER.size <= len(datagram):
        length, kind, _flags, sequence, _port = _HEADER.unpack_from(datagram, at)
        if length < _HEADER.size or at + length > len(datagram):
            return
        message = _parsed(kind, sequence, datagram[at + _HEADER.size : at + length])
        if message is not None:
            yield sequence, message
        at += (length + 3) & ~3


def _parsed(kind: int, sequence: int, body: bytes) -> Answer | None:
    try:
        if kind in (_NEWLINK, _DELLINK):
            return _link(body, gone=kind == _DELLINK)
        if kind == _NEWNEIGH:
            return _neighbour(body)
        if kind in (_NEWROUTE, _DELROUTE):
            return _route(body) if sequence else RoutesChanged()
        if kind == _ERROR:
            code = struct.unpack_from("=i", body)[0]
            return Refused(code=-code) if code else None
    except (struct.error, ValueError):
        return None
    return None


def _attributes(body: bytes, at: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    at = (at + 3) & ~3
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if length < _ATTRIBUTE.size or at + length > len(body):
            break
        found[kind & _KNOWN] = body[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return found


def _link(body: bytes, *, gone: bool) -> Link | None:
    _family, _type, index, flags, _changed = _LINK.unpack_from(body)
    name = _attributes(body, _LINK.size).get(_IFLA_IFNAME, b"").rstrip(b"\0").decode("utf-8", "replace")
    if not name:
        return None
    return Link(index=index, name=name, wanted=bool(flags & _IFF_UP), carrier=bool(flags & _IFF_LOWER_UP), gone=gone)


def _address(family: int, packed: bytes | None) -> Address | None:
    make = _FAMILIES.get(family)
    return None if make is None or packed is None else make(packed)


def _route(body: bytes) -> Route | None:
    family, *_, kind, _flags = _ROUTE.unpack_from(body)
    attributes = _attributes(body, _ROUTE.size)
    if kind != _RTN_UNICAST or _RTA_OIF not in attributes:
        return None  # This host itself, or no other.
    gateway = _address(family, attributes.get(_RTA_GATEWAY))
    via = attributes.get(_RTA_VIA, b"")
    if gateway is None and len(via) > 2:  # IPv4 by way of an IPv6 neighbour (struct rtvia).
        gateway = _address(struct.unpack_from("=H", via)[0], via[2:])
    return Route(index=struct.unpack("=i", attributes[_RTA_OIF])[0], gateway=gateway)


def _neighbour(body: bytes) -> Neighbour | None:
    family, _, index, state, _flags, _type = _NEIGHBOUR.unpack_from(body)
    attributes = _attributes(body, _NEIGHBOUR.size)
    address = _address(family, attributes.get(_NDA_DST))
    if address is None:
        return None
    cache = attributes.get(_NDA_CACHEINFO, b"")
    silent_s = struct.unpack_from("=I", cache)[0] / _USER_HZ if len(cache) >= 4 else None
    return Neighbour(
        index=index,
        address=address,
        reachable=bool(state & _NUD_REACHABLE),
        failed=bool(state & _NUD_FAILED),
        silent_s=silent_s,
    )


LOOK_S: Final = 30.0
"""A route may have changed without a word that we heard: so often it is asked for."""
_RENAMED_EVERY: Final = 20
"""Number of checks between two look-ups of a name's address."""
_ANSWER_S: Final = 1.0
_RESOLVE_S: Final = 5.0
_CALM_S: Final = 0.2
"""Routes change by the dozen: they are asked for once a burst is over."""
_OUTSIDE: Final = (ipaddress.ip_address("192.0.2.1"), ipaddress.ip_address("2001:db8::1"))
"""Unused addresses (RFC 5737, RFC 3849): their route is the default route. No packet is ever sent there."""


async def resolve(host: str) -> tuple[Address, ...]:
    """Return the addresses of a host; none if it is unknown now."""
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, TimeoutError, UnicodeError):
        return ()
    return tuple({ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found})


class Watched:
    """The links and gateways on our ways, and which of them are there. Pure: events in, news out."""

    def __init__(self) -> None:
        """Begin without state."""
        self._ways: set[Route] = set()
        self._names: dict[int, str] = {}
        self._is_up: dict[str, bool] = {}
        self._down: set[int] = set()

    @property
    def parts(self) -> dict[str, bool]:
        """Every part that was seen, and whether it is there."""
        return dict(self._is_up)

    def links(self) -> set[int]:
        """Return the links that some way takes, or took when they went: a dead link loses its routes."""
        return {way.index for way in self._ways} | self._down

    def take_ways(self, ways: Collection[Route]) -> None:
        """Take the ways of now. Where there is none at all, the old ones stay."""
        if ways:
            self._ways = set(ways)

    def take(self, message: Link | Neighbour, now_s: float) -> NetworkSeen | None:
        """Enter one word of the kernel; return it as an event where it is news of one of our ways."""
        if isinstance(message, Link):
            return self._take_link(message, now_s)
        part = f"gateway {message.address}"
        is_ours = any(way.index == message.index and way.gateway == message.address for way in self._ways)
        if not (is_ours or part in self._is_up) or not (message.reachable or message.failed):
            return None
        heard_s = None if message.silent_s is None else now_s - message.silent_s
        return self._news(part, now_s, is_up=message.reachable, heard_s=heard_s)

    def _take_link(self, link: Link, now_s: float) -> NetworkSeen | None:
        if link.index not in self.links():
            return None
        part = f"link {self._names.setdefault(link.index, link.name)}"
        if link.gone or not link.wanted:
            self._is_up.pop(part, None)  # A person took it down on this host: no sign of a power failure.
            self._down.discard(link.index)
            return None
        news = self._news(part, now_s, is_up=link.carrier)
        if news is not None:
            self._down = self._down - {link.index} if news.up else self._down | {link.index}
        return news

    def _news(self, part: str, now_s: float, *, is_up: bool, heard_s: float | None = None) -> NetworkSeen | None:
        was_up = self._is_up.get(part)
        if was_up is is_up or (was_up is None and not is_up):
            return None  # What was never seen there did not go.
        self._is_up[part] = is_up
        return NetworkSeen(at_s=now_s, part=part, up=is_up, heard_s=None if is_up else heard_s)


class NetworkWatch:
    """Reports when a link or a gateway on the way to one of the hosts goes down, or comes back. Needs no privilege."""

    def __init__(self, hosts: Collection[str], *, publish: Callable[[NetworkSeen], None], clock: Clock) -> None:
        """hosts: names or addresses of the peers of the sources; the way to everybody else is watched as well."""
        self._hosts = tuple(dict.fromkeys(hosts))
        self._publish = publish
        self._clock = clock
        self._known: dict[str, tuple[Address, ...]] = {}
        self._watched = Watched()
        self._sequence = self._looks = 0
        self._answers: dict[int, asyncio.Future[Route | None]] = {}
        self._look_soon = asyncio.Event()

    @property
    def parts(self) -> dict[str, bool]:
        """Every link and gateway that is watched, and whether it is there."""
        return self._watched.parts

    async def run(self) -> None:
        """Watch until cancelled. Raises OSError where the kernel has no rtnetlink for us."""
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE) as netlink:
            netlink.bind((0, GROUPS))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(netlink))
                while True:
                    await self._look(netlink)
                    self._look_soon.clear()
                    try:
                        async with asyncio.timeout(LOOK_S):
                            await self._look_soon.wait()
                            await asyncio.sleep(_CALM_S)  # noqa: TID251 - until the burst is over
                    except TimeoutError:
                        continue

    async def _listen(self, netlink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                datagram = await loop.sock_recv(netlink, MAX_DATAGRAM)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self._look_soon.set()  # Some messages are lost: everything is asked for again.
                continue
            for sequence, message in parse(datagram):
                self._hear(sequence, message)

    def _hear(self, sequence: int, message: Link | Neighbour | Route | RoutesChanged | Refused) -> None:
        if isinstance(message, RoutesChanged):
            self._look_soon.set()
        elif isinstance(message, Route | Refused):
            waiting = self._answers.pop(sequence, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message if isinstance(message, Route) else None)
        else:
            news = self._watched.take(message, self._clock())
            if news is not None:
                self._publish(news)

    async def _look(self, netlink: socket.socket) -> None:
        """Find out by which links and gateways our peers are reached, and how those links are."""
        for host in self._hosts:
            found = () if host in self._known and self._looks % _RENAMED_EVERY else await resolve(host)
            if found:
                self._known[host] = found
        self._looks += 1
        ours = {address for addresses in self._known.values() for address in addresses if not address.is_loopback}
        if ours:
            ways = [await self._ask(netlink, address) for address in sorted((*ours, *_OUTSIDE), key=str)]
            self._watched.take_ways({way for way in ways if way is not None})
        for index in self._watched.links():
            self._sequence += 1
            netlink.send(ask_link(index, self._sequence))

    async def _ask(self, netlink: socket.socket, address: Address) -> Route | None:
        self._sequence += 1
        sequence = self._sequence
        waiting: asyncio.Future[Route | None] = asyncio.get_running_loop().create_future()
        self._answers[sequence] = waiting
        try:
            netlink.send(ask_route(address, sequence))
            async with asyncio.timeout(_ANSWER_S):
                return await waiting
        except (TimeoutError, OSError):
            return None
        finally:
            self._answers.pop(sequence, None)
