"""Messages of version 3 with the user security model: bytes to values and back (RFC 3412 6, RFC 3414 2.4).

For tests that make messages which pysnmp would not: it shares no code with it. Nothing is proved or deciphered here.
"""

from dataclasses import dataclass
from typing import Final

from tests.wire import ber
from tests.wire.ber import MessageError, Reader

VERSION: Final = 3
LAST: Final = 2**31 - 1
"""The largest number of an engine's boots, its time, and a message (RFC 3412 6, RFC 3414 2.2)."""
AUTH, PRIV, REPORTABLE = 1, 2, 4
"""msgFlags (RFC 3412 6.4)."""
_USM: Final = 3
_LEVEL: Final = AUTH | PRIV


def _usm_stats(number: int) -> bytes:
    """Return the content of the OID of one of usmStats (RFC 3414 5), as it stands on the wire."""
    return bytes((0x2B, 6, 1, 6, 3, 15, 1, 1, number, 0))


UNSUPPORTED_LEVEL: Final = _usm_stats(1)
NOT_IN_TIME: Final = _usm_stats(2)
UNKNOWN_USER: Final = _usm_stats(3)
UNKNOWN_ENGINE: Final = _usm_stats(4)
WRONG_DIGEST: Final = _usm_stats(5)
UNDECIPHERABLE: Final = _usm_stats(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsmMessage:
    """A message of version 3 with the user security model, unchecked. boots and time_s: of the engine that is named.

    data: the whole datagram. digest_at: where the digest stands in it; end: where the message ends. payload: the scoped
    PDU, or what it was made into by privacy.
    """

    data: bytes
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

    @property
    def level(self) -> int:
        """AUTH, PRIV, both or neither."""
        return self.flags & _LEVEL

    @property
    def unsigned(self) -> bytes:
        """The message with noughts in the place of its digest: what the digest was made of (RFC 3414 6.3.2)."""
        behind = self.digest_at + len(self.digest)
        return self.data[: self.digest_at] + bytes(len(self.digest)) + self.data[behind : self.end]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopedPdu:
    """What version 3 protects. content: the PDU's; tag: which one it is."""

    context_engine: bytes
    context_name: bytes
    tag: int
    content: bytes


def parse(data: bytes) -> UsmMessage:
    """Read one message of version 3, whose size is bounded by whoever received it. Raises MessageError."""
    message = Reader(data, 0, len(data)).inside(ber.SEQUENCE)
    if message.number() != VERSION:
        msg = "another version than 3"
        raise MessageError(msg)
    return rest(message)


def rest(message: Reader) -> UsmMessage:
    """Read what follows the version. Raises MessageError."""
    header = message.inside(ber.SEQUENCE)
    message_id = header.number()
    header.number()  # msgMaxSize: what we send is shorter than any
    flags = header.content(ber.OCTETS)
    if len(flags) != 1 or header.number() != _USM:
        msg = "version 3 with another security model than the user's"
        raise MessageError(msg)
    outer = message.inside(ber.OCTETS)
    security = Reader(message.data, outer.at, outer.end).inside(ber.SEQUENCE)
    engine_id, boots, time_s = security.content(ber.OCTETS), security.number(), security.number()
    if not (0 <= boots <= LAST and 0 <= time_s <= LAST):
        msg = "an engine's boots or time that are none (RFC 3414 2.4)"
        raise MessageError(msg)
    user = security.content(ber.OCTETS)
    digest = security.inside(ber.OCTETS)
    salt = security.content(ber.OCTETS)
    scoped_at = message.at
    if flags[0] & PRIV:
        payload = message.content(ber.OCTETS)
    else:
        message.inside(ber.SEQUENCE)
        payload = message.data[scoped_at : message.at]
    return UsmMessage(
        data=message.data,
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
    """Read a scoped PDU; what privacy has padded it with is left alone. Raises MessageError."""
    inner = Reader(payload, 0, len(payload)).inside(ber.SEQUENCE)
    context_engine, context_name = inner.content(ber.OCTETS), inner.content(ber.OCTETS)
    tag, begin, end = inner.next()
    return ScopedPdu(context_engine=context_engine, context_name=context_name, tag=tag, content=payload[begin:end])


def reported(pdu: ScopedPdu) -> bytes:
    """Return which counter a Report names, as the content of its OID. Raises MessageError."""
    reader = Reader(pdu.content, 0, len(pdu.content))
    for _ in range(3):  # request-id, error-status, error-index
        reader.number()
    return reader.inside(ber.SEQUENCE).inside(ber.SEQUENCE).content(ber.OID)


def scoped(context_engine: bytes, context_name: bytes, tag: int, pdu: bytes) -> bytes:
    """Return a scoped PDU. pdu: its content."""
    content = ber.element(ber.OCTETS, context_engine) + ber.element(ber.OCTETS, context_name) + ber.element(tag, pdu)
    return ber.element(ber.SEQUENCE, content)


def report(counter: bytes, count: int) -> bytes:
    """Return the content of a Report PDU that names one counter (RFC 3414 3.2)."""
    varbind = ber.element(ber.OID, counter) + ber.unsigned(ber.COUNTER32, count)
    return ber.integer(0) * 3 + ber.element(ber.SEQUENCE, ber.element(ber.SEQUENCE, varbind))


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
    """Return a message of version 3 with a digest of noughts, and where that digest stands.

    engine: id, boots and time. payload: an element: the scoped PDU, or an OCTET STRING that privacy has made of it.
    """
    engine_id, boots, time_s = engine
    head = ber.element(
        ber.SEQUENCE,
        ber.integer(message_id)
        + ber.integer(ber.LONGEST_MESSAGE)
        + ber.element(ber.OCTETS, bytes((flags,)))
        + ber.integer(_USM),
    )
    before = (
        ber.element(ber.OCTETS, engine_id) + ber.integer(boots) + ber.integer(time_s) + ber.element(ber.OCTETS, user)
    )
    behind = ber.element(ber.OCTETS, bytes(digest_bytes)) + ber.element(ber.OCTETS, salt)
    security = ber.element(ber.OCTETS, ber.element(ber.SEQUENCE, before + behind))
    whole = ber.element(ber.SEQUENCE, ber.integer(VERSION) + head + security + payload)
    # From the end: what stands before depends on how many bytes the lengths take.
    digest_at = len(whole) - len(payload) - len(behind) + 2
    return whole, digest_at
