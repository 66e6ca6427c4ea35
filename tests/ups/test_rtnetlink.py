"""rtnetlink as bytes: what the kernel of this machine says of itself, and what no kernel would ever say."""

import ipaddress
import random
import socket
import struct

import pytest

from powerguard.ups.network import (
    MAX_DATAGRAM,
    Answer,
    Link,
    Neighbour,
    Refused,
    Route,
    RoutesChanged,
    ask_link,
    ask_route,
    parse,
)


def _attribute(kind: int, value: bytes) -> bytes:
    raw = struct.pack("=HH", 4 + len(value), kind) + value
    return raw + bytes(-len(raw) % 4)


def _message(kind: int, body: bytes, sequence: int = 0) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, sequence, 0) + body


def _link(index: int, name: str, flags: int, kind: int = 16) -> bytes:
    return _message(kind, struct.pack("=BxHiII", 0, 1, index, flags, 0) + _attribute(3, name.encode() + b"\0"))


def _neighbour(state: int, address: str, cache: bytes = b"") -> bytes:
    packed = ipaddress.ip_address(address).packed
    body = struct.pack("=BxHiHBB", 2 if len(packed) == 4 else 10, 0, 3, state, 0, 1) + _attribute(1, packed)
    return _message(28, body + (_attribute(3, cache) if cache else b""))


def _one(datagram: bytes) -> Answer:
    ((_, result),) = parse(datagram)
    return result


def _answer(question: bytes) -> list[Answer]:
    """Ask the kernel that runs this test."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(60)
        netlink.send(question)
        return [each for sequence, each in parse(netlink.recv(MAX_DATAGRAM)) if sequence == 7]


def test_the_kernel_answers_what_is_asked() -> None:
    """Layouts are the kernel's, not ours: the loopback link, and a way that ends on this very host."""
    index = socket.if_nametoindex("lo")
    (link,) = _answer(ask_link(index, 7))
    assert isinstance(link, Link)
    assert (link.index, link.name) == (index, "lo")
    assert _answer(ask_route(ipaddress.ip_address("127.0.0.1"), 7)) == [], "a way to ourselves is none"
    (refused,) = _answer(ask_link(2**30, 7))
    assert refused == Refused(code=19), "ENODEV"


@pytest.mark.parametrize(
    ("flags", "wanted", "carrier"), [(0x10001, True, True), (0x1, True, False), (0x0, False, False)]
)
def test_a_link_says_who_wanted_it(flags: int, wanted: bool, carrier: bool) -> None:
    """A cable that is pulled and an interface that is taken down look alike to everybody else."""
    assert _one(_link(3, "eth0", flags)) == Link(index=3, name="eth0", wanted=wanted, carrier=carrier)
    deleted = Link(index=3, name="eth0", wanted=wanted, carrier=carrier, gone=True)
    assert _one(_link(3, "eth0", flags, kind=17)) == deleted


def test_a_neighbour_says_when_it_was_last_heard() -> None:
    """In hundredths of a second, first of four numbers."""
    cache = struct.pack("=IIII", 4200, 1, 2, 3)
    result = _one(_neighbour(0x20, "10.0.0.1", cache))
    address = ipaddress.ip_address("10.0.0.1")
    assert result == Neighbour(index=3, address=address, reachable=False, failed=True, silent_s=42.0)
    quiet = _one(_neighbour(0x02, "fe80::1"))
    assert quiet == Neighbour(index=3, address=ipaddress.ip_address("fe80::1"), reachable=True, failed=False)


def test_a_way_names_its_link_and_its_gateway() -> None:
    """Also an IPv4 way by an IPv6 gateway (RTA_VIA); a way that nobody asked for is only news that ways changed."""

    def route(*attributes: bytes, family: int = 2, kind: int = 1, sequence: int = 9) -> list[tuple[int, Answer]]:
        body = struct.pack("=BBBBBBBBI", family, 32, 0, 0, 254, 0, 0, kind, 0) + b"".join(attributes)
        return list(parse(_message(24, body, sequence)))

    oif = _attribute(4, struct.pack("=i", 3))
    gateway = ipaddress.ip_address("10.0.0.1")
    assert route(oif, _attribute(5, gateway.packed)) == [(9, Route(index=3, gateway=gateway))]
    assert route(oif) == [(9, Route(index=3, gateway=None))]
    via = ipaddress.ip_address("fe80::1")
    assert route(oif, _attribute(18, struct.pack("=H", 10) + via.packed)) == [(9, Route(index=3, gateway=via))]
    assert route(oif, kind=2) == [], "to this host"
    assert route(_attribute(5, gateway.packed)) == [], "by no link"
    assert route(oif, sequence=0) == [(0, RoutesChanged())]


def test_several_messages_in_one_datagram() -> None:
    """They are aligned to four bytes; one that claims more than there is ends it."""
    both = _link(3, "eth0", 0x10001) + _link(4, "longer-name", 0x1)
    assert [each.name for _, each in parse(both) if isinstance(each, Link)] == ["eth0", "longer-name"]
    assert len(list(parse(both[:-1]))) == 1
    assert list(parse(b"")) == []
    assert list(parse(_message(2, struct.pack("=i", 0), 5))) == [], "an acknowledgement"


def test_nothing_that_comes_breaks_it() -> None:
    """Damaged and random datagrams: an answer or none, never an exception, and never more messages than bytes."""
    chance = random.Random(20261121)
    whole = _link(3, "eth0", 0x10001) + _neighbour(0x20, "10.0.0.1", bytes(16)) + _neighbour(0x02, "fe80::1")
    assert list(parse(_message(24, b"", 9))) == [], "a route without a body"
    for _ in range(20_000):
        raw = bytearray(whole if chance.random() < 0.7 else chance.randbytes(chance.randrange(200)))
        for _ in range(chance.randrange(4)):
            if raw:
                raw[chance.randrange(len(raw))] = chance.randrange(256)
        del raw[chance.randrange(len(raw) + 1) :]
        assert len(list(parse(bytes(raw)))) <= len(raw) // 16
