"""Traps and informs: bytes to values and back (RFC 1157, RFC 3416, RFC 3412, RFC 3414, RFC 3584).

Only what a hint needs is read: who is meant, what it is called, whether it wants an answer. Whatever else a datagram
holds is passed over; nothing in it makes this code take long, remember anything or raise but `MessageError`.
"""

from dataclasses import dataclass
from typing import Final

from powerguard.protocols import snmp_ber as ber
from powerguard.protocols import snmp_v3
from powerguard.protocols.snmp_ber import MessageError, Reader
from powerguard.protocols.snmp_v3 import ScopedPdu, UsmMessage

MAX_BYTES: Final = 8192
"""Longest datagram that is read; traps of UPS cards have some hundred bytes."""
MOST_VARBINDS: Final = 64
"""What a trap says of itself stands at its beginning or, from a relay, among the last few."""
_LARGEST_NUMBER: Final = 2**32 - 1
_V1, _V2C = 0, 1

# Contents of the OIDs that are looked for, as they stand on the wire.
_TRAP_OID: Final = bytes((0x2B, 6, 1, 6, 3, 1, 1, 4, 1, 0))  # snmpTrapOID.0
_TRAP_ADDRESS: Final = bytes((0x2B, 6, 1, 6, 3, 18, 1, 3, 0))  # snmpTrapAddress.0 (RFC 3584 3.1)
_TRAP_COMMUNITY: Final = bytes((0x2B, 6, 1, 6, 3, 18, 1, 4, 0))  # snmpTrapCommunity.0
_GENERIC: Final = "1.3.6.1.6.3.1.1.5"  # snmpTraps
_ENTERPRISE_SPECIFIC: Final = 6


class NotATrapError(MessageError):
    """A good SNMP message that is neither trap nor inform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """What a trap or inform says. trap_oid: as version 2 has it, "" when it says none; confirmed: it is an inform.

    agent_address: the card as a relay names it, dotted; None when nobody does. community: likewise.
    """

    trap_oid: str
    confirmed: bool
    agent_address: str | None = None
    community: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunityMessage:
    """A message of version 1 or 2c. pdu_at: where the PDU's tag stands; end: where the message ends."""

    version: str
    community: bytes
    pdu_at: int
    end: int
    notification: Notification


def _address(content: bytes) -> str | None:
    """Return an IpAddress dotted; None for 0.0.0.0, which relays and cards without an address write."""
    if len(content) != 4:
        msg = "an IpAddress without 4 bytes"
        raise MessageError(msg)
    return None if content == bytes(4) else ".".join(str(byte) for byte in content)


# --- Reading --------------------------------------------------------------------------------------------------------


def parse(data: bytes) -> CommunityMessage | UsmMessage:
    """Read one datagram. Raises MessageError; NotATrapError for a request, a response or a Report.

    Of version 3 only the envelope is read: what it holds is for `notification_of`, once it is proved and deciphered.
    """
    if len(data) > MAX_BYTES:
        msg = f"longer than {MAX_BYTES} bytes"
        raise MessageError(msg)
    message = Reader(data, 0, len(data)).inside(ber.SEQUENCE)
    version = message.number()
    if version == snmp_v3.VERSION:
        return snmp_v3.rest(message)
    if version not in {_V1, _V2C}:
        msg = f"SNMP version {version}"
        raise MessageError(msg)
    community = message.content(ber.OCTETS)
    pdu_at = message.at
    tag, begin, end = message.next()
    return CommunityMessage(
        version="1" if version == _V1 else "2c",
        community=community,
        pdu_at=pdu_at,
        end=message.end,
        notification=_notification(tag, Reader(data, begin, end), v1=version == _V1),
    )


def _notification(tag: int, inner: Reader, *, v1: bool) -> Notification:
    if tag == ber.TRAP_V1 and v1:
        return _trap_v1(inner)
    if tag not in {ber.TRAP_V2, ber.INFORM} or v1:
        msg = f"a PDU of tag {tag:#x}"
        raise NotATrapError(msg) if ber.GET <= tag <= ber.REPORT else MessageError(msg)
    for _ in range(3):  # request-id, error-status, error-index
        inner.number()
    return _from_varbinds(inner, confirmed=tag == ber.INFORM)


def _trap_v1(inner: Reader) -> Notification:
    enterprise = ber.dotted(inner.content(ber.OID))
    address = _address(inner.content(ber.IP_ADDRESS))
    generic, specific = inner.number(), inner.number()
    inner.content(ber.TIMETICKS)
    inner.inside(ber.SEQUENCE)
    if not 0 <= generic <= _ENTERPRISE_SPECIFIC or not 0 <= specific <= _LARGEST_NUMBER:
        msg = "a trap number that no trap has"
        raise MessageError(msg)
    named = f"{enterprise}.0.{specific}" if generic == _ENTERPRISE_SPECIFIC else f"{_GENERIC}.{generic + 1}"
    return Notification(trap_oid=named, confirmed=False, agent_address=address)


def _from_varbinds(inner: Reader, *, confirmed: bool) -> Notification:
    rows = inner.inside(ber.SEQUENCE)
    trap_oid, address, community = "", None, None
    read = 0
    while rows.at < rows.end and read < MOST_VARBINDS:
        read += 1
        row = rows.inside(ber.SEQUENCE)
        name = row.content(ber.OID)
        tag, begin, end = row.next()
        value = rows.data[begin:end]
        if name == _TRAP_OID and tag == ber.OID:
            trap_oid = ber.dotted(value)
        elif name == _TRAP_ADDRESS and tag == ber.IP_ADDRESS:
            address = _address(value)
        elif name == _TRAP_COMMUNITY and tag == ber.OCTETS:
            community = value
    return Notification(trap_oid=trap_oid, confirmed=confirmed, agent_address=address, community=community)


def notification_of(pdu: ScopedPdu) -> Notification:
    """Read what stood in a message of version 3. Raises as `parse` does."""
    return _notification(pdu.tag, Reader(pdu.content, 0, len(pdu.content)), v1=False)


# --- Answering ------------------------------------------------------------------------------------------------------


def answer(data: bytes, message: CommunityMessage) -> bytes:
    """Return the response to an inform of version 2c: the inform itself, as a response (RFC 3416 4.2.7)."""
    return data[: message.pdu_at] + bytes((ber.RESPONSE,)) + data[message.pdu_at + 1 : message.end]
