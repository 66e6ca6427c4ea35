"""Questions and answers, of versions 1 and 2c: against the simulator's codec, which shares nothing with ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.protocols import snmp_ber
from powerguard.protocols import snmp_request as codec
from powerguard.protocols.snmp_ber import MessageError, element, integer
from powerguard.protocols.snmp_request import Message, Response
from powerguard.sim import snmp_ber as ber
from tests.protocols import damage

OIDS = ("1.3.6.1.2.1.1.3.0", "2.100.3", "0.39", "1.0.4294967295.128.127.16384")
VALUES: list[tuple[ber.SimValue, tuple[int, codec.Value]]] = [
    (ber.integer(-129), (2, -129)),
    (ber.integer(2**31 - 1), (2, 2**31 - 1)),
    (ber.gauge(2**32 - 1), (0x42, 2**32 - 1)),
    (ber.timeticks(0), (0x43, 0)),
    (ber.octets(b"\x00\xff"), (4, b"\x00\xff")),
    (ber.octets(bytes(300)), (4, bytes(300))),
    (ber.oid(OIDS[3]), (6, OIDS[3])),
    (ber.NULL_VALUE, (5, None)),
    (ber.SimValue(ber.NO_SUCH_OBJECT, b""), (0x80, None)),
    (ber.SimValue(ber.END_OF_MIB, b""), (0x82, None)),
    (ber.SimValue(ber.IP_ADDRESS, bytes(4)), (0x40, bytes(4))),
    (ber.SimValue(0x42, b"\xff\xff\xff\xff"), (0x42, 2**32 - 1)),
]


def answer(*rows: tuple[str, ber.SimValue], status: int = 0, index: int = 0) -> bytes:
    """An answer as the simulated card writes it."""
    varbinds = b"".join(
        ber.encode(ber.SEQUENCE, ber.encode_value(ber.oid(name)) + ber.encode_value(value)) for name, value in rows
    )
    numbers = b"".join(ber.encode_value(ber.integer(number)) for number in (77, status, index))
    pdu = ber.encode(0xA2, numbers + ber.encode(ber.SEQUENCE, varbinds))
    head = ber.encode_value(ber.integer(1)) + ber.encode_value(ber.octets(b"public"))
    return ber.encode(ber.SEQUENCE, head + pdu)


@pytest.mark.parametrize("dotted", OIDS)
def test_an_oid_is_written_as_others_write_it(dotted: str) -> None:
    assert snmp_ber.oid(dotted) == ber.encode_value(ber.oid(dotted))


@pytest.mark.parametrize("number", [0, 127, 128, 255, 256, 2**31, 2**32 - 1])
def test_a_number_without_a_sign(number: int) -> None:
    assert snmp_ber.unsigned(snmp_ber.GAUGE32, number) == ber.encode_value(ber.gauge(number))


def test_a_question() -> None:
    known: dict[str, bytes] = {}
    asked = codec.request(1, b"public", snmp_ber.GET, codec.content(77, codec.rows(OIDS, None, known)))
    assert list(known) == list(OIDS)
    told = answer(*((name, ber.NULL_VALUE) for name in OIDS))
    assert asked == told.replace(b"public\xa2", b"public\xa0")


def test_an_answer() -> None:
    rows = [(f"1.3.{number}", value) for number, (value, _) in enumerate(VALUES)]
    told = codec.parse(answer(*rows, status=2, index=3))
    found = tuple((f"1.3.{number}", tag, value) for number, (_, (tag, value)) in enumerate(VALUES))
    assert "public" not in repr(told), "a community is a secret"
    assert told == Message(1, b"public", Response(request_id=77, status=2, index=3, found=found))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        answer()[:-1],
        answer().replace(b"public\xa2", b"public\xa0"),
        answer(("1.3", ber.SimValue(0x47, b""))),
        answer(("1.3", ber.SimValue(0x02, b""))),
        answer(("1.3", ber.SimValue(0x46, bytes(10)))),
        answer(*[("1.3", ber.NULL_VALUE)] * 1025),
        bytes(70_000),
        element(0x30, integer(3) + element(4, b"")),
    ],
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(MessageError):
        codec.parse(data)


GOOD = [
    answer(*((f"1.3.{number}", value) for number, (value, _) in enumerate(VALUES))),
    answer(("1.3.6", VALUES[0][0])),
]


def survives(data: bytes) -> None:
    """Whatever the bytes: an answer, or the codec's own error."""
    try:
        told = codec.parse(data)
    except MessageError:
        return
    assert len(told.response.found) <= 1024
    assert all(isinstance(value, int | bytes | str | None) for _, _, value in told.response.found)


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=80).map(lambda rest: GOOD[1][:10] + rest)))
def test_any_bytes(data: bytes) -> None:
    survives(data)


@given(st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 900), st.integers(0, 255)), max_size=6))
def test_good_answers_with_bytes_changed(data: bytes, changes: list[tuple[int, int]]) -> None:
    survives(damage.changed(data, changes))


@pytest.mark.slow
def test_a_million_answers() -> None:
    """Good ones with bytes changed or cut off, and plain rubbish: no other error, none of them slow."""
    damage.million(GOOD, survives, 20261122)
