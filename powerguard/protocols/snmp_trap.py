"""Traps and informs: bytes to values and back (RFC 1157, RFC 3416, RFC 3412, RFC 3414, RFC 3584).

Only what a hint needs is read: who is meant, what it is called, whether it wants an answer. Whatever else a datagram
holds is passed over; nothing in it makes this code take long, remember anything or raise but `TrapError`.
"""

from dataclasses import dataclass
from typing import Final

MAX_BYTES: Final = 8192
"""Longest datagram that is read; traps of UPS cards have some hundred bytes."""
MOST_VARBINDS: Final = 64
"""What a trap says of itself stands at its beginning or, from a relay, among the last few."""
_LONGEST_OID: Final = 128
"""Sub-identifiers of an OID (RFC 2578 3.5)."""
_LARGEST_PART: Final = 2**32 - 1

INTEGER, OCTETS, OID, SEQUENCE, IP_ADDRESS, TIMETICKS, COUNTER32 = 0x02, 0x04, 0x06, 0x30, 0x40, 0x43, 0x41
GET, RESPONSE, TRAP_V1, INFORM, TRAP_V2, REPORT = 0xA0, 0xA2, 0xA4, 0xA6, 0xA7, 0xA8

AUTH, PRIV, REPORTABLE = 1, 2, 4
"""msgFlags (RFC 3412 6.4)."""
_USM: Final = 3
_V1, _V2C, _V3 = 0, 1, 3
_LARGEST_MESSAGE: Final = 65507

# Contents of the OIDs that are looked for, as they stand on the wire.
_TRAP_OID: Final = bytes((0x2B, 6, 1, 6, 3, 1, 1, 4, 1, 0))  # snmpTrapOID.0
_TRAP_ADDRESS: Final = bytes((0x2B, 6, 1, 6, 3, 18, 1, 3, 0))  # snmpTrapAddress.0 (RFC 3584 3.1)
_TRAP_COMMUNITY: Final = bytes((0x2B, 6, 1, 6, 3, 18, 1, 4, 0))  # snmpTrapCommunity.0
_GENERIC: Final = "1.3.6.1.6.3.1.1.5"  # snmpTraps
_ENTERPRISE_SPECIFIC: Final = 6
UNKNOWN_ENGINE: Final = bytes((0x2B, 6, 1, 6, 3, 15, 1, 1, 4, 0))  # usmStatsUnknownEngineIDs.0
NOT_IN_TIME: Final = bytes((0x2B, 6, 1, 6, 3, 15, 1, 1, 2, 0))  # usmStatsNotInTimeWindows.0


class TrapError(Exception):
    """Bytes that are no SNMP message, or none that can be read."""


class NotATrapError(TrapError):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UsmMessage:
    """A message of version 3 with the user security model, unchecked. boots and time_s: of the engine that is named.

    digest_at: where the digest stands in the datagram; end: where the message ends. payload: the scoped PDU, or what
    it was made into by privacy.
    """

    message_id: int
    flags: int
    engine_id: bytes
    boots: int
    time_s: int
    user: bytes
    digest: bytes
    digest_at: int
    salt: bytes
    payload: bytes
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopedPdu:
    """What version 3 protects. pdu: the PDU's content, for the answer."""

    context_engine: bytes
    context_name: bytes
    pdu: bytes
    notification: Notification


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
            raise TrapError(msg)
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            if not 1 <= size <= 4 or at + size > self.end:
                msg = "a length that no SNMP message has"
                raise TrapError(msg)
            length = int.from_bytes(data[at : at + size], "big")
            at += size
        if at + length > self.end:
            msg = "an element that is longer than its message"
            raise TrapError(msg)
        self.at = at + length
        return tag, at, self.at

    def inside(self, tag: int) -> "Reader":
        """Return a reader of the next element, which must have this tag."""
        found, begin, end = self.next()
        if found != tag:
            msg = f"tag {found:#x} where {tag:#x} belongs"
            raise TrapError(msg)
        return Reader(self.data, begin, end)

    def content(self, tag: int) -> bytes:
        """Return the content of the next element, which must have this tag."""
        inner = self.inside(tag)
        return self.data[inner.at : inner.end]

    def number(self) -> int:
        """Return the next INTEGER."""
        content = self.content(INTEGER)
        if not 1 <= len(content) <= 8:
            msg = "an INTEGER that no SNMP message has"
            raise TrapError(msg)
        return int.from_bytes(content, "big", signed=True)


def _dotted(content: bytes) -> str:
    numbers: list[int] = []
    number = 0
    for byte in content:
        number = number << 7 | byte & 0x7F
        if number > _LARGEST_PART:
            msg = "an OID with a part of more than 32 bits"
            raise TrapError(msg)
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    if not numbers or content[-1] & 0x80 or len(numbers) >= _LONGEST_OID:
        msg = "an OID that no SNMP message has"
        raise TrapError(msg)
    first = min(numbers[0] // 40, 2)
    return ".".join(str(part) for part in (first, numbers[0] - first * 40, *numbers[1:]))


def _address(content: bytes) -> str | None:
    """Return an IpAddress dotted; None for 0.0.0.0, which relays and cards without an address write."""
    if len(content) != 4:
        msg = "an IpAddress without 4 bytes"
        raise TrapError(msg)
    return None if content == bytes(4) else ".".join(str(byte) for byte in content)


# --- Reading --------------------------------------------------------------------------------------------------------


def parse(data: bytes) -> CommunityMessage | UsmMessage:
    """Read one datagram. Raises TrapError; NotATrapError for a request, a response or a Report.

    Of version 3 only the envelope is read: what it holds is for `parse_scoped`, once it is proved and deciphered.
    """
    if len(data) > MAX_BYTES:
        msg = f"longer than {MAX_BYTES} bytes"
        raise TrapError(msg)
    message = Reader(data, 0, len(data)).inside(SEQUENCE)
    version = message.number()
    if version == _V3:
        return _parse_usm(message)
    if version not in {_V1, _V2C}:
        msg = f"SNMP version {version}"
        raise TrapError(msg)
    community = message.content(OCTETS)
    pdu_at = message.at
    return CommunityMessage(
        version="1" if version == _V1 else "2c",
        community=community,
        pdu_at=pdu_at,
        end=message.end,
        notification=_notification(message, v1=version == _V1)[0],
    )


def _notification(reader: Reader, *, v1: bool) -> tuple[Notification, bytes]:
    tag, begin, end = reader.next()
    inner = Reader(reader.data, begin, end)
    if tag == TRAP_V1 and v1:
        return _trap_v1(inner), reader.data[begin:end]
    if tag not in {TRAP_V2, INFORM} or v1:
        msg = f"a PDU of tag {tag:#x}"
        raise NotATrapError(msg) if GET <= tag <= REPORT else TrapError(msg)
    for _ in range(3):  # request-id, error-status, error-index
        inner.number()
    return _from_varbinds(inner, confirmed=tag == INFORM), reader.data[begin:end]


def _trap_v1(inner: Reader) -> Notification:
    enterprise = _dotted(inner.content(OID))
    address = _address(inner.content(IP_ADDRESS))
    generic, specific = inner.number(), inner.number()
    inner.content(TIMETICKS)
    inner.inside(SEQUENCE)
    if not 0 <= generic <= _ENTERPRISE_SPECIFIC or not 0 <= specific <= _LARGEST_PART:
        msg = "a trap number that no trap has"
        raise TrapError(msg)
    named = f"{enterprise}.0.{specific}" if generic == _ENTERPRISE_SPECIFIC else f"{_GENERIC}.{generic + 1}"
    return Notification(trap_oid=named, confirmed=False, agent_address=address)


def _from_varbinds(inner: Reader, *, confirmed: bool) -> Notification:
    rows = inner.inside(SEQUENCE)
    trap_oid, address, community = "", None, None
    read = 0
    while rows.at < rows.end and read < MOST_VARBINDS:
        read += 1
        row = rows.inside(SEQUENCE)
        name = row.content(OID)
        tag, begin, end = row.next()
        value = rows.data[begin:end]
        if name == _TRAP_OID and tag == OID:
            trap_oid = _dotted(value)
        elif name == _TRAP_ADDRESS and tag == IP_ADDRESS:
            address = _address(value)
        elif name == _TRAP_COMMUNITY and tag == OCTETS:
            community = value
    return Notification(trap_oid=trap_oid, confirmed=confirmed, agent_address=address, community=community)


def _parse_usm(message: Reader) -> UsmMessage:
    header = message.inside(SEQUENCE)
    message_id = header.number()
    header.number()  # msgMaxSize: an answer of ours is shorter than any
    flags = header.content(OCTETS)
    if len(flags) != 1 or header.number() != _USM:
        msg = "version 3 with another security model than the user's"
        raise TrapError(msg)
    outer = message.inside(OCTETS)
    security = Reader(message.data, outer.at, outer.end).inside(SEQUENCE)
    engine_id, boots, time_s = security.content(OCTETS), security.number(), security.number()
    user = security.content(OCTETS)
    digest = security.inside(OCTETS)
    salt = security.content(OCTETS)
    scoped_at = message.at
    encrypted = bool(flags[0] & PRIV)
    if encrypted:
        payload = message.content(OCTETS)
    else:
        message.inside(SEQUENCE)
        payload = message.data[scoped_at : message.at]
    return UsmMessage(
        message_id=message_id,
        flags=flags[0],
        engine_id=engine_id,
        boots=boots,
        time_s=time_s,
        user=user,
        digest=message.data[digest.at : digest.end],
        digest_at=digest.at,
        salt=salt,
        payload=payload,
        end=message.end,
    )


def parse_scoped(payload: bytes) -> ScopedPdu:
    """Read a scoped PDU; what privacy has padded it with is left alone. Raises as `parse` does."""
    scoped = Reader(payload, 0, len(payload)).inside(SEQUENCE)
    context_engine, context_name = scoped.content(OCTETS), scoped.content(OCTETS)
    notification, pdu = _notification(scoped, v1=False)
    return ScopedPdu(context_engine=context_engine, context_name=context_name, pdu=pdu, notification=notification)


# --- Answering ------------------------------------------------------------------------------------------------------


def element(tag: int, content: bytes) -> bytes:
    """Return one element of BER."""
    length = len(content)
    if length < 0x80:
        return bytes((tag, length)) + content
    size = (length.bit_length() + 7) // 8
    return bytes((tag, 0x80 | size)) + length.to_bytes(size, "big") + content


def integer(number: int) -> bytes:
    """Return an INTEGER."""
    return element(INTEGER, number.to_bytes((number.bit_length() + 8) // 8, "big", signed=True))


def answer(data: bytes, message: CommunityMessage) -> bytes:
    """Return the response to an inform of version 2c: the inform itself, as a response (RFC 3416 4.2.7)."""
    return data[: message.pdu_at] + bytes((RESPONSE,)) + data[message.pdu_at + 1 : message.end]


def scoped(context_engine: bytes, context_name: bytes, tag: int, pdu: bytes) -> bytes:
    """Return a scoped PDU."""
    content = element(OCTETS, context_engine) + element(OCTETS, context_name) + element(tag, pdu)
    return element(SEQUENCE, content)


def report(counter: bytes, count: int) -> bytes:
    """Return the content of a Report PDU that names one counter (RFC 3414 3.2)."""
    size = (count.bit_length() + 8) // 8
    varbind = element(OID, counter) + element(COUNTER32, count.to_bytes(size, "big"))
    return integer(0) * 3 + element(SEQUENCE, element(SEQUENCE, varbind))


def seal(
    *,
    message_id: int,
    flags: int,
    engine: tuple[bytes, int, int],
    user: bytes,
    salt: bytes,
    digest_bytes: int,
    payload: bytes,
) -> tuple[bytes, int]:
    """Return a message of version 3 with a digest of zeros, and where that digest stands.

    engine: id, boots and time. payload: an element: the scoped PDU, or an OCTET STRING that privacy has made of it.
    """
    engine_id, boots, time_s = engine
    head = element(
        SEQUENCE,
        integer(message_id) + integer(_LARGEST_MESSAGE) + element(OCTETS, bytes((flags,))) + integer(_USM),
    )
    before = element(OCTETS, engine_id) + integer(boots) + integer(time_s) + element(OCTETS, user)
    behind = element(OCTETS, bytes(digest_bytes)) + element(OCTETS, salt)
    security = element(OCTETS, element(SEQUENCE, before + behind))
    whole = element(SEQUENCE, integer(_V3) + head + security + payload)
    # From the end: what stands before depends on how many bytes the lengths take.
    digest_at = len(whole) - len(payload) - len(behind) + 2
    return whole, digest_at
