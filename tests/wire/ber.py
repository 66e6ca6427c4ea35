"""The basic encoding rules as SNMP uses them: elements to bytes and back (RFC 3417 8, ITU-T X.690).

For tests that make messages which pysnmp would not: it shares no code with it.
"""

from functools import lru_cache
from typing import Final

LONGEST_MESSAGE: Final = 65_507
"""Bytes that one datagram can hold."""
_LONGEST_OID: Final = 128
"""Sub-identifiers of an OID (RFC 2578 3.5)."""
_LARGEST_PART: Final = 2**32 - 1

INTEGER, OCTETS, NULL, OID, SEQUENCE = 0x02, 0x04, 0x05, 0x06, 0x30
IP_ADDRESS, COUNTER32, GAUGE32, TIMETICKS, OPAQUE, COUNTER64 = 0x40, 0x41, 0x42, 0x43, 0x44, 0x46
GET, GET_NEXT, RESPONSE, SET, TRAP_V1, INFORM, TRAP_V2, REPORT = 0xA0, 0xA1, 0xA2, 0xA3, 0xA4, 0xA6, 0xA7, 0xA8


class MessageError(Exception):
    """Bytes that are no SNMP message, or none that can be read."""


class Reader:
    """Reads the elements between two places of a datagram."""

    __slots__ = ("at", "data", "end")

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, end

    def next(self) -> tuple[int, int, int]:
        """Return tag, begin and end of the next element's content, and step behind it."""
        data, at = self.data, self.at
        if at + 2 > self.end:
            msg = "the message ends too early"
            raise MessageError(msg)
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            if not 1 <= size <= 4 or at + size > self.end:
                msg = "a length that no SNMP message has"
                raise MessageError(msg)
            length = int.from_bytes(data[at : at + size], "big")
            at += size
        if at + length > self.end:
            msg = "an element that is longer than its message"
            raise MessageError(msg)
        self.at = at + length
        return tag, at, self.at

    def bounds(self, tag: int) -> tuple[int, int]:
        """Return begin and end of the next element's content, which must have this tag."""
        found, begin, end = self.next()
        if found != tag:
            msg = f"tag {found:#x} where {tag:#x} belongs"
            raise MessageError(msg)
        return begin, end

    def inside(self, tag: int) -> "Reader":
        """Return a reader of the next element, which must have this tag."""
        return Reader(self.data, *self.bounds(tag))

    def content(self, tag: int) -> bytes:
        """Return the content of the next element, which must have this tag."""
        begin, end = self.bounds(tag)
        return self.data[begin:end]

    def number(self) -> int:
        """Return the next INTEGER."""
        begin, end = self.bounds(INTEGER)
        if not 1 <= end - begin <= 8:
            msg = "an INTEGER that no SNMP message has"
            raise MessageError(msg)
        return int.from_bytes(self.data[begin:end], "big", signed=True)


@lru_cache(maxsize=512)  # The same few come with every poll, and are a third of what reading an answer costs.
def dotted(content: bytes) -> str:
    """Return the content of an OID as people write it. Raises MessageError."""
    numbers: list[int] = []
    number = 0
    for byte in content:
        number = number << 7 | byte & 0x7F
        if number > _LARGEST_PART:
            msg = "an OID with a part of more than 32 bits"
            raise MessageError(msg)
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    if not numbers or content[-1] & 0x80 or len(numbers) >= _LONGEST_OID:
        msg = "an OID that no SNMP message has"
        raise MessageError(msg)
    first = min(numbers[0] // 40, 2)
    return ".".join(str(part) for part in (first, numbers[0] - first * 40, *numbers[1:]))


def element(tag: int, content: bytes) -> bytes:
    """Return one element."""
    length = len(content)
    if length < 0x80:
        return bytes((tag, length)) + content
    size = (length.bit_length() + 7) // 8
    return bytes((tag, 0x80 | size)) + length.to_bytes(size, "big") + content


def integer(number: int) -> bytes:
    """Return an INTEGER."""
    return element(INTEGER, number.to_bytes((number.bit_length() + 8) // 8, "big", signed=True))


def unsigned(tag: int, number: int) -> bytes:
    """Return a Gauge32, TimeTicks or their like."""
    return element(tag, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def oid(written: str) -> bytes:
    """Return the element of an OID."""
    first, second, *rest = (int(part) for part in written.split("."))
    content = bytearray()
    for number in (40 * first + second, *rest):
        content.append(number & 0x7F)
        at = len(content) - 1
        while number := number >> 7:
            content.insert(at, 0x80 | number & 0x7F)
    return element(OID, bytes(content))
