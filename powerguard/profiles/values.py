"""What one SNMP answer may be, in plain Python, so that the decoder needs no SNMP library."""

from enum import Enum


class Oid(str):
    """An object identifier in dotted form without a leading dot: "1.3.6.1.2.1.33.1.4.1.0"."""

    __slots__ = ()


Value = int | bytes | Oid
"""INTEGER, Gauge32, Counter and TimeTicks are int; OCTET STRING and IpAddress are bytes; OBJECT IDENTIFIER is Oid."""


class Missing(Enum):
    """Why there is no value. None of these is ever a number, and none of them is ever 0."""

    NO_SUCH_OBJECT = "the device has no such object"
    NO_SUCH_INSTANCE = "noSuchInstance (this card does not fill it)"
    END_OF_MIB = "beyond the last object of the device"
    NULL = "NULL: the device knows the object and has no value for it"
    NO_ANSWER = "asked for, and left out of the answer"
    REFUSED = "refused with an error status"


Answer = Value | Missing


class DeviceError(Exception):
    """A device that cannot be asked or told: one line for the operator.

    unanswered: nobody answered at all, in time. late: but after it, so address and credentials are right.
    """

    def __init__(self, reason: str, *, unanswered: bool = False, late: bool = False) -> None:
        """Keep the reason as the text of the exception."""
        super().__init__(reason)
        self.unanswered = unanswered
        self.late = late


def parts(oid: str) -> tuple[int, ...]:
    """Return the numbers of a dotted OID, for sorting and comparing."""
    return tuple(int(part) for part in oid.split("."))


def below(oid: str, root: str) -> bool:
    """Whether oid lies under root (and is not root itself)."""
    return oid.startswith(root + ".")
