"""Typed values of a simulated SNMP card, by the tags that they have on the wire."""

from dataclasses import dataclass
from typing import Final

INTEGER: Final = 0x02
OCTETS: Final = 0x04
NULL: Final = 0x05
OID: Final = 0x06
IP_ADDRESS: Final = 0x40
COUNTER32: Final = 0x41
GAUGE32: Final = 0x42
TIMETICKS: Final = 0x43
COUNTER64: Final = 0x46
NO_SUCH_OBJECT: Final = 0x80
NO_SUCH_INSTANCE: Final = 0x81
END_OF_MIB: Final = 0x82


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
