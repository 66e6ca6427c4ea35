"""The little of BER that SNMP needs (X.690, RFC 3416 section 3), made anew so that the two ends test each other."""

from dataclasses import dataclass
from typing import Final

INTEGER: Final = 0x02
OCTETS: Final = 0x04
NULL: Final = 0x05
OID: Final = 0x06
SEQUENCE: Final = 0x30
IP_ADDRESS: Final = 0x40
COUNTER32: Final = 0x41
GAUGE32: Final = 0x42
TIMETICKS: Final = 0x43
COUNTER64: Final = 0x46
NO_SUCH_OBJECT: Final = 0x80
NO_SUCH_INSTANCE: Final = 0x81
END_OF_MIB: Final = 0x82
GET: Final = 0xA0
GETNEXT: Final = 0xA1
RESPONSE: Final = 0xA2
SET: Final = 0xA3
GETBULK: Final = 0xA5
REPORT: Final = 0xA8

_NUMBERS: Final = frozenset({INTEGER, COUNTER32, GAUGE32, TIMETICKS, COUNTER64})


class BerError(Exception):
    """Bytes that are no BER, or none that SNMP uses."""


@dataclass(frozen=True, slots=True)
class SimValue:
    """A typed value: content is an int for numbers, bytes for strings, a dotted OID for OIDs, None for the rest."""

    tag: int
    content: int | bytes | str | None = None


def integer(number: int) -> SimValue:
    """Return an INTEGER."""
    return SimValue(INTEGER, number)


def gauge(number: int) -> SimValue:
    """Return a Gauge32."""
    return SimValue(GAUGE32, number)


def timeticks(number: int) -> SimValue:
    """Return TimeTicks, hundredths of a second."""
    return SimValue(TIMETICKS, number)


def octets(text: str | bytes) -> SimValue:
    """Return an OCTET STRING."""
    return SimValue(OCTETS, text.encode() if isinstance(text, str) else text)


def oid(dotted: str) -> SimValue:
    """Return an OBJECT IDENTIFIER."""
    return SimValue(OID, dotted)


NULL_VALUE: Final = SimValue(NULL)


def encode(tag: int, content: bytes) -> bytes:
    """Return one element."""
    length = len(content)
    if length < 0x80:
        return bytes((tag, length)) + content
    size = (length.bit_length() + 7) // 8
    return bytes((tag, 0x80 | size)) + length.to_bytes(size, "big") + content


def encode_value(value: SimValue) -> bytes:
    """Return a typed value as an element."""
    match value.content:
        case int(number) if value.tag in _NUMBERS:
            size = (number.bit_length() + 8) // 8
            return encode(value.tag, number.to_bytes(size, "big", signed=True))
        case bytes(text):
            return encode(value.tag, text)
        case str(dotted):
            return encode(value.tag, _encode_oid(dotted))
        case None:
            return encode(value.tag, b"")
        case _:
            msg = f"{value} cannot be encoded"
            raise BerError(msg)


def _encode_oid(dotted: str) -> bytes:
    numbers = [int(part) for part in dotted.split(".")]
    first, second, *rest = numbers
    content = bytearray()
    for number in (first * 40 + second, *rest):
        groups = [number & 0x7F]
        while number := number >> 7:
            groups.append(0x80 | (number & 0x7F))
        content += bytes(reversed(groups))
    return bytes(content)


class Reader:
    """Reads elements one after the other. Raises BerError on anything that does not fit."""

    def __init__(self, data: bytes) -> None:
        """Begin at the first byte."""
        self.data = data
        self.at = 0

    def more(self) -> bool:
        """Whether anything is left."""
        return self.at < len(self.data)

    def element(self) -> tuple[int, bytes]:
        """Return tag and content of the next element."""
        tag, length = self._byte(), self._byte()
        if length & 0x80:
            size = length & 0x7F
            if not 1 <= size <= 4:
                msg = "a length that no SNMP message has"
                raise BerError(msg)
            length = int.from_bytes(self._take(size), "big")
        return tag, self._take(length)

    def expect(self, tag: int) -> bytes:
        """Return the content of the next element, which must have this tag."""
        found, content = self.element()
        if found != tag:
            msg = f"tag {found:#x} where {tag:#x} belongs"
            raise BerError(msg)
        return content

    def number(self) -> int:
        """Return the next INTEGER."""
        return int.from_bytes(self.expect(INTEGER), "big", signed=True)

    def value(self) -> SimValue:
        """Return the next element as a typed value."""
        tag, content = self.element()
        if tag in _NUMBERS:
            return SimValue(tag, int.from_bytes(content, "big", signed=tag == INTEGER))
        if tag in {OCTETS, IP_ADDRESS}:
            return SimValue(tag, content)
        return SimValue(tag, _decode_oid(content)) if tag == OID else SimValue(tag)

    def _byte(self) -> int:
        return self._take(1)[0]

    def _take(self, count: int) -> bytes:
        taken = self.data[self.at : self.at + count]
        if len(taken) != count:
            msg = "the message ends too early"
            raise BerError(msg)
        self.at += count
        return taken


def _decode_oid(content: bytes) -> str:
    numbers: list[int] = []
    number = 0
    for byte in content:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    if not numbers:
        msg = "an empty OID"
        raise BerError(msg)
    first = min(numbers[0] // 40, 2)
    return ".".join(str(part) for part in (first, numbers[0] - first * 40, *numbers[1:]))
