"""Questions and their answers: values to bytes and back (RFC 1157, RFC 3416, RFC 3417 8).

The message around them is that of versions 1 and 2c; version 3 has one of its own (`snmp_v3`). An answer is read whole
or not at all: whatever is wrong with it, MessageError is raised, and nothing else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from powerguard.protocols import snmp_ber as ber
from powerguard.protocols.snmp_ber import MessageError, Reader

NO_SUCH_OBJECT, NO_SUCH_INSTANCE, END_OF_MIB = 0x80, 0x81, 0x82
"""Instead of a value (RFC 3416 4.2.1)."""
_UNSIGNED: Final = frozenset((ber.COUNTER32, ber.GAUGE32, ber.TIMETICKS, ber.COUNTER64))
_BYTES: Final = frozenset((ber.OCTETS, ber.IP_ADDRESS, ber.OPAQUE))
_NOTHING: Final = frozenset((ber.NULL, NO_SUCH_OBJECT, NO_SUCH_INSTANCE, END_OF_MIB))
_MOST_VARBINDS: Final = 1024

Value = int | bytes | str | None
"""An OID is a str, dotted; None where there is no value, of which the tag says more."""


NO_VALUE: Final = bytes((ber.NULL, 0))


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. status, index: RFC 3416. found: OID, tag, value."""

    request_id: int
    status: int
    index: int
    found: tuple[tuple[str, int, Value], ...]


@dataclass(frozen=True, slots=True)
class Message:
    """An answer in a message of version 1 (0) or 2c (1)."""

    version: int
    community: bytes = field(repr=False)
    response: Response


def content(request_id: int, varbinds: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return what a question's PDU holds. varbinds: elements of name and value, NO_VALUE where something is asked."""
    rows = b"".join(ber.element(ber.SEQUENCE, name + value) for name, value in varbinds)
    return ber.integer(request_id) + ber.integer(0) * 2 + ber.element(ber.SEQUENCE, rows)


def request(version: int, community: bytes, tag: int, pdu: bytes) -> bytes:
    """Return a question. pdu: its `content`."""
    head = ber.integer(version) + ber.element(ber.OCTETS, community)
    return ber.element(ber.SEQUENCE, head + ber.element(tag, pdu))


def parse(data: bytes) -> Message:
    """Read one answer. Raises MessageError."""
    if len(data) > ber.LONGEST_MESSAGE:
        msg = f"longer than {ber.LONGEST_MESSAGE} bytes"
        raise MessageError(msg)
    message = Reader(data, 0, len(data)).inside(ber.SEQUENCE)
    version = message.number()
    community = message.content(ber.OCTETS)
    return Message(version, community, response(message.inside(ber.RESPONSE)))


def response(pdu: Reader) -> Response:
    """Read what an answer's PDU holds. Raises MessageError."""
    request_id, status, index = pdu.number(), pdu.number(), pdu.number()
    rows = pdu.inside(ber.SEQUENCE)
    found: list[tuple[str, int, Value]] = []
    while rows.at < rows.end:
        if len(found) == _MOST_VARBINDS:
            msg = f"more than {_MOST_VARBINDS} objects"
            raise MessageError(msg)
        row = rows.inside(ber.SEQUENCE)
        name = ber.dotted(row.content(ber.OID))
        tag, begin, end = row.next()
        found.append((name, tag, _value(tag, rows.data[begin:end])))
    return Response(request_id, status, index, tuple(found))


def _value(tag: int, content: bytes) -> Value:
    if tag == ber.INTEGER or tag in _UNSIGNED:
        if not 1 <= len(content) <= 9:
            msg = "a number that no SNMP message has"
            raise MessageError(msg)
        return int.from_bytes(content, "big", signed=tag == ber.INTEGER)
    if tag in _BYTES:
        return content
    if tag == ber.OID:
        return ber.dotted(content)
    if tag in _NOTHING:
        return None
    msg = f"a value of tag {tag:#x}"
    raise MessageError(msg)


def rows(
    dotted: Sequence[str], values: Sequence[bytes] | None, known: dict[str, bytes]
) -> Iterable[tuple[bytes, bytes]]:
    """Return the elements of a question. values: None where something is asked, and nothing is to be SET.

    known: the elements of names that were made before, which grows by the others.
    """
    for one in dotted:
        if one not in known:
            known[one] = ber.oid(one)
    told = [NO_VALUE] * len(dotted) if values is None else values
    return zip((known[one] for one in dotted), told, strict=True)
