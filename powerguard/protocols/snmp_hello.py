"""The smallest questions to which any SNMP agent answers, and the number by which an answer is known (RFC 3416, 3414).

For finding out who is there; whoever answers is then asked in earnest.
"""

from typing import Final, Literal

from powerguard.protocols import snmp_ber as ber
from powerguard.protocols import snmp_v3
from powerguard.protocols.snmp_ber import MessageError, Reader

Version = Literal[1, "2c", 3]

_SYS_OBJECT_ID: Final = bytes((0x2B, 6, 1, 2, 1, 1, 2, 0))
_NUMBERS: Final[dict[Version, int]] = {1: 0, "2c": 1, 3: 3}
_VERSIONS: Final = {number: version for version, number in _NUMBERS.items()}


def hello(version: Version, number: int, community: bytes = b"public") -> bytes:
    """Return a question. number: by which the answer is known, 0 to 2^31-1.

    Versions 1 and 2c ask for sysObjectID. Version 3 asks for the engine id, which needs no user (RFC 3414 section 4).
    """
    row = ber.element(ber.SEQUENCE, ber.element(ber.OID, _SYS_OBJECT_ID) + ber.element(ber.NULL, b""))
    rows = ber.element(ber.SEQUENCE, b"" if version == 3 else row)
    pdu = ber.integer(number) + ber.integer(0) * 2 + rows
    if version == 3:
        whole, _ = snmp_v3.seal(
            message_id=number,
            flags=snmp_v3.REPORTABLE,
            engine=(b"", 0, 0),
            user=b"",
            salt=b"",
            digest_bytes=0,
            payload=snmp_v3.scoped(b"", b"", ber.GET, pdu),
        )
        return whole
    head = ber.integer(_NUMBERS[version]) + ber.element(ber.OCTETS, community)
    return ber.element(ber.SEQUENCE, head + ber.element(ber.GET, pdu))


def answered(data: bytes) -> tuple[Version, int]:
    """Return the version of an answer, and the number of the question. Raises MessageError when it is no answer."""
    message = Reader(data, 0, len(data)).inside(ber.SEQUENCE)
    version = _VERSIONS.get(message.number())
    if version is None:
        msg = "an unknown version of SNMP"
        raise MessageError(msg)
    if version != 3:
        message.content(ber.OCTETS)
        return version, message.inside(ber.RESPONSE).number()
    told = snmp_v3.rest(message)
    if not told.engine_id:
        msg = "version 3 without an engine id: our own question, sent back"
        raise MessageError(msg)
    return version, told.message_id
