"""Linux's rtnetlink, rtnetlink(7): which link and gateway a packet to somebody takes, and when they go. Bytes only.

Native byte order and alignment to 4, as the kernel of the same machine speaks it. What is not known is passed over; a
message that says more than it holds ends the datagram.
"""

import ipaddress
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

GROUPS: Final = 0x1 | 0x4 | 0x40 | 0x400
"""RTMGRP_LINK, RTMGRP_NEIGH, RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_ROUTE: what the kernel tells without being asked."""
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
    """An interface. wanted: somebody has set it up (IFF_UP); carrier: it has a signal (IFF_LOWER_UP). gone: deleted."""

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
    """What ARP or neighbour discovery says of an address. silent_s: since it was last confirmed; None: not told."""

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


Told = Link | Route | Neighbour | RoutesChanged | Refused


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


def parse(datagram: bytes) -> Iterator[tuple[int, Told]]:
    """Yield what a datagram tells, each with its sequence number: that of the question, 0 where nobody asked."""
    at = 0
    while at + _HEADER.size <= len(datagram):
        length, kind, _flags, sequence, _port = _HEADER.unpack_from(datagram, at)
        if length < _HEADER.size or at + length > len(datagram):
            return
        told = _told(kind, sequence, datagram[at + _HEADER.size : at + length])
        if told is not None:
            yield sequence, told
        at += (length + 3) & ~3


def _told(kind: int, sequence: int, body: bytes) -> Told | None:
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
        return None  # This very host, or nobody.
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
