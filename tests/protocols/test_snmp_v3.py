"""Messages of version 3: against the simulator's codec, which shares nothing with ours, and against any bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.protocols import snmp_request
from powerguard.protocols import snmp_v3 as codec
from powerguard.protocols.snmp_ber import MessageError, Reader
from powerguard.sim import snmp_ber as ber
from powerguard.sim.snmp_usm import ReportError, Request, SimUser
from tests.protocols import damage

CARD = SimUser(name="pg", auth=b"authpass-of-the-tests", priv=b"privpass-of-the-tests", boots=3, clock=lambda: 77.0)
ROWS = ber.encode(ber.SEQUENCE, ber.encode_value(ber.oid("1.3.6.1")) + ber.encode_value(ber.octets(b"of the card")))
NUMBERS = b"".join(ber.encode_value(ber.integer(number)) for number in (7, 0, 0))
RESPONSE = ber.encode(ber.RESPONSE, NUMBERS + ber.encode(ber.SEQUENCE, ROWS))


def of_card(level: int, pdu: bytes = RESPONSE) -> bytes:
    """Return an answer as the simulated card writes it."""
    request = Request(message_id=2**31 - 1, flags=level, context_engine=CARD.engine_id, context_name=b"", pdu=b"")
    return CARD.seal(request, pdu)


def response(message: codec.UsmMessage) -> snmp_request.Response:
    pdu = codec.parse_scoped(message.payload)
    assert (pdu.context_engine, pdu.context_name, pdu.tag) == (CARD.engine_id, b"", ber.RESPONSE)
    return snmp_request.response(Reader(pdu.content, 0, len(pdu.content)))


@pytest.mark.parametrize("level", [0, 1, 3])
def test_an_answer_of_each_level(level: int) -> None:
    whole = of_card(level)
    told = codec.parse(whole + b"behind")
    user = b"pg" if level else b""
    assert (told.message_id, told.level, told.engine_id, told.user) == (2**31 - 1, level, CARD.engine_id, user)
    assert (told.boots, told.time_s, len(told.digest), len(told.salt)) == (
        3,
        0,
        12 if level else 0,
        8 if level > 1 else 0,
    )
    assert told.unsigned == whole.replace(told.digest, bytes(len(told.digest)), 1)
    if level < 3:
        assert response(told).found == (("1.3.6.1", ber.OCTETS, b"of the card"),)
    else:
        assert b"of the card" not in told.payload


@pytest.mark.parametrize("counter", [codec.NOT_IN_TIME, codec.UNKNOWN_ENGINE])
def test_a_report(counter: bytes) -> None:
    told = codec.parse(CARD.report(ReportError(counter[-2], 5)))
    assert codec.reported(codec.parse_scoped(told.payload)) == counter


@pytest.mark.parametrize(
    "data",
    [
        b"",
        of_card(1)[:-1],
        of_card(1).replace(b"\x02\x01\x03", b"\x02\x01\x01", 1),
        ber.encode(ber.SEQUENCE, b"\x02\x01\x03"),
        of_card(3).replace(b"\x04\x01\x03", b"\x04\x02\x03\x03", 1),
    ],
)
def test_what_is_no_message(data: bytes) -> None:
    with pytest.raises(MessageError):
        codec.parse(data)


def timed(boots: int, time_s: int) -> bytes:
    """Return a message that says that it is enciphered, by whoever may have made it."""
    numbers = ber.encode_value(ber.integer(boots)) + ber.encode_value(ber.integer(time_s))
    security = ber.encode(ber.SEQUENCE, ber.encode(ber.OCTETS, CARD.engine_id) + numbers + b"\x04\x00" * 3)
    header = ber.encode(ber.SEQUENCE, b"\x02\x01\x05\x02\x02\x05\xc0\x04\x01\x02\x02\x01\x03")
    return ber.encode(ber.SEQUENCE, b"\x02\x01\x03" + header + ber.encode(ber.OCTETS, security) + b"\x04\x01x")


@pytest.mark.parametrize(("boots", "time_s"), [(2**31, 0), (-1, 0), (3, 2**31), (3, -1), (2**40, 2**40)])
def test_boots_and_time_that_no_engine_has(boots: int, time_s: int) -> None:
    """No cipher is asked about them: it takes them into its start, in four bytes each, before anything is proved."""
    with pytest.raises(MessageError, match="boots or time"):
        codec.parse(timed(boots, time_s))
    assert codec.parse(timed(2**31 - 1, 0)).boots == 2**31 - 1


GOOD = [
    *(of_card(level) for level in (0, 1, 3)),
    *(CARD.report(ReportError(2, 5, authenticated=yes)) for yes in (0, 1)),
]


def survives(data: bytes) -> None:
    """Whatever the bytes: a message, or the codec's own error."""
    try:
        message = codec.parse(data)
        assert len(message.unsigned) == message.end <= len(data)
        pdu = codec.parse_scoped(message.payload)
        if pdu.tag == ber.REPORT:
            codec.reported(pdu)
        else:
            snmp_request.response(Reader(pdu.content, 0, len(pdu.content)))
    except MessageError:
        pass


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=200).map(lambda rest: GOOD[0][:20] + rest)))
def test_any_bytes(data: bytes) -> None:
    survives(data)


@given(st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6))
def test_good_messages_with_bytes_changed(data: bytes, changes: list[tuple[int, int]]) -> None:
    survives(damage.changed(data, changes))


@pytest.mark.slow
def test_a_million_messages() -> None:
    """Good ones with bytes changed or cut off, and plain rubbish: no other error, none of them slow."""
    damage.million(GOOD, survives, 20261123)
