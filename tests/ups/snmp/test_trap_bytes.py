"""Traps and informs: what is read of good messages, and that no bytes at all bring the receiver out of its way."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.ups.snmp.engine import MessageError
from powerguard.ups.snmp.notification import NotATrapError, Notification, TrapReceiver, TrapResult
from tests.ups import damage
from tests.wire import ber
from tests.wire import v3 as v3_messages

RFC1628 = "1.3.6.1.2.1.33.2"
TRAP_OID = "1.3.6.1.6.3.1.1.4.1.0"
TRAP_ADDRESS = "1.3.6.1.6.3.18.1.3.0"
TRAP_COMMUNITY = "1.3.6.1.6.3.18.1.4.0"


def sequence(*elements: bytes, tag: int = ber.SEQUENCE) -> bytes:
    return ber.element(tag, b"".join(elements))


def number(value: int) -> bytes:
    return ber.integer(value)


def varbind(name: str, value: bytes) -> bytes:
    return sequence(ber.oid(name), value)


def message(version: int, pdu: bytes, community: bytes = b"public") -> bytes:
    return sequence(number(version), ber.element(ber.OCTETS, community), pdu)


def trap_v1(*, generic: int = 6, specific: int = 1, address: bytes = bytes((10, 0, 0, 5))) -> bytes:
    inside = (
        ber.oid(RFC1628),
        ber.element(ber.IP_ADDRESS, address),
        number(generic),
        number(specific),
        ber.unsigned(ber.TIMETICKS, 4711),
        sequence(varbind("1.3.6.1.2.1.33.1.2.3.0", ber.integer(9))),
    )
    return message(0, sequence(*inside, tag=0xA4))


def trap_v2(*varbinds: bytes, tag: int = 0xA7) -> bytes:
    return message(1, sequence(number(77), number(0), number(0), sequence(*varbinds), tag=tag))


NAMED = varbind(TRAP_OID, ber.oid(f"{RFC1628}.1"))


RECEIVER = TrapReceiver(engine_id=b"\x80\x00\x00\x00\x05ours", boots=1, clock=lambda: 0.0)


def read(data: bytes) -> Notification:
    result = RECEIVER.receive(data).notification
    assert result is not None
    return result


def test_version_1_becomes_the_names_of_version_2() -> None:
    """RFC 3584 3.1: an enterprise's trap is ENTERPRISE.0.SPECIFIC, the six old ones have names of their own."""
    result = RECEIVER.receive(trap_v1())
    assert result.notification is not None
    assert (result.community, result.notification.confirmed, result.answer) == (b"public", False, None)
    assert (result.notification.trap_oid, result.notification.agent_address) == (f"{RFC1628}.0.1", "10.0.0.5")
    assert read(trap_v1(generic=0)).trap_oid == "1.3.6.1.6.3.1.1.5.1"  # coldStart
    assert read(trap_v1(address=bytes(4))).agent_address is None


def test_version_2_and_what_a_relay_adds() -> None:
    relayed = (
        NAMED,
        varbind(TRAP_ADDRESS, ber.element(ber.IP_ADDRESS, bytes((10, 0, 0, 5)))),
        varbind(TRAP_COMMUNITY, ber.element(ber.OCTETS, b"of-the-card")),
    )
    result = read(trap_v2(*relayed))
    assert result.trap_oid == f"{RFC1628}.1"
    assert (result.agent_address, result.community) == ("10.0.0.5", b"of-the-card")
    assert read(trap_v2()).trap_oid == "", "a trap that says nothing is a trap all the same"


def test_the_answer_to_an_inform_is_the_inform_as_a_response() -> None:
    """RFC 3416 4.2.7: same request-id, same varbinds."""
    inform = trap_v2(NAMED, tag=0xA6)
    result = RECEIVER.receive(inform)
    assert result.notification is not None
    assert result.notification.confirmed
    assert result.answer == trap_v2(NAMED, tag=0xA2)


@pytest.mark.parametrize(
    "data",
    [
        *(trap_v2(NAMED, tag=tag) for tag in (0xA0, 0xA1, 0xA2, 0xA3, 0xA5, 0xA8)),
    ],
)
def test_other_messages_are_distinguished(data: bytes) -> None:
    """A card that answers somebody else."""
    with pytest.raises(NotATrapError):
        RECEIVER.receive(data)


BAD = {
    "nothing": b"",
    "no SNMP": b"GET / HTTP/1.1\r\n\r\n",
    "version 4": sequence(number(4), ber.element(ber.OCTETS, b"public"), trap_v1()),
    "a trap of version 1 in version 2c": message(1, sequence(tag=0xA4)),
    "a trap of version 2c in version 1": message(0, sequence(number(1), number(0), number(0), sequence(), tag=0xA7)),
    "length of lengths": b"\x30\x89" + bytes(9),
    "indefinite length": b"\x30\x80" + trap_v2(NAMED)[2:],
    "an address of 3 bytes": trap_v1(address=bytes(3)),
    "a generic trap 9": trap_v1(generic=9),
    "an OID that ends in the middle": trap_v2(NAMED[:-1] + b"\x86"),
    "a huge OID": trap_v2(varbind(TRAP_OID, ber.oid("1.3." + ".".join(["1"] * 200)))),
    "another security model": sequence(
        number(3),
        sequence(number(1), number(65507), ber.element(ber.OCTETS, b"\x00"), number(9)),
        b"\x04\x00",
        b"\x30\x00",
    ),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_what_cannot_be_read_is_one_error(data: bytes) -> None:
    with pytest.raises(MessageError) as caught:
        RECEIVER.receive(data)
    assert not isinstance(caught.value, NotATrapError)


def test_many_varbinds_are_not_read_for_ever() -> None:
    """Eight kilobytes of them hold a thousand; what a trap says of itself stands among the first."""
    result = read(trap_v2(NAMED, *[varbind("1.3.6.1.1", ber.element(ber.NULL, b""))] * 500))
    assert result.trap_oid == f"{RFC1628}.1"
    late = read(trap_v2(*[varbind("1.3.6.1.1", ber.element(ber.NULL, b""))] * 500, NAMED))
    assert late.trap_oid == ""


def sealed(flags: int, payload: bytes) -> tuple[bytes, int]:
    engine = (b"\x80\x00\x00\x00\x05engine", 3, 1234)
    return v3_messages.seal(
        message_id=99, flags=flags, engine=engine, user=b"pg", salt=b"8 bytes.", digest_bytes=12, payload=payload
    )


GOOD = [
    trap_v1(),
    trap_v2(NAMED, varbind(TRAP_ADDRESS, ber.element(ber.IP_ADDRESS, bytes(4)))),
    trap_v2(NAMED, tag=0xA6),
    sealed(v3_messages.AUTH, v3_messages.scoped(b"", b"", 0xA7, number(1) * 3 + b"\x30\x00"))[0],
    sealed(v3_messages.AUTH | v3_messages.PRIV, ber.element(ber.OCTETS, bytes(64)))[0],
]


def survives(data: bytes) -> None:
    """Whatever the bytes: a verdict, or the receiver's own error."""
    with contextlib.suppress(MessageError):
        assert isinstance(RECEIVER.receive(data), TrapResult)


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    survives(data)


@given(st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6))
def test_good_messages_with_bytes_changed(data: bytes, changes: list[tuple[int, int]]) -> None:
    survives(damage.changed(data, changes))


@pytest.mark.slow
def test_a_great_many_datagrams() -> None:
    """Mutated good messages and plain rubbish: no other error, none of them slow."""
    damage.million(GOOD, survives, 20261121, times=200_000)
