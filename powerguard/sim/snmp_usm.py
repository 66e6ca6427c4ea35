"""The card's side of SNMPv3's user security model (RFC 3414, RFC 3826): one user, HMAC-SHA-96, AES-128."""

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from powerguard.clock import Clock, boottime_s
from powerguard.sim import snmp_ber as ber

_DIGEST_BYTES: Final = 12
_WINDOW_S: Final = 150
_AUTH, _PRIV, _REPORTABLE = 1, 2, 4
_STATS: Final = "1.3.6.1.6.3.15.1.1"
_UNSUPPORTED_LEVEL, _NOT_IN_WINDOW, _UNKNOWN_USER, _UNKNOWN_ENGINE, _WRONG_DIGEST, _UNDECIPHERABLE = range(1, 7)


def localized_key(passphrase: bytes, engine_id: bytes) -> bytes:
    """Return the key of a passphrase for one engine (RFC 3414 A.2.2)."""
    million = (passphrase * (1048576 // len(passphrase) + 1))[:1048576]
    digest = hashlib.sha1(million, usedforsecurity=False).digest()
    return hashlib.sha1(digest + engine_id + digest, usedforsecurity=False).digest()


class ReportError(Exception):
    """A message that is answered with a Report. counter: which of the usmStats; authenticated: the Report as well."""

    def __init__(self, counter: int, message_id: int, *, authenticated: bool = False) -> None:
        """Keep what the Report says."""
        super().__init__(counter)
        self.counter = counter
        self.message_id = message_id
        self.authenticated = authenticated


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A version 3 message, its security checked. pdu: the whole PDU element."""

    message_id: int
    flags: int
    context_engine: bytes
    context_name: bytes
    pdu: bytes


@dataclass(slots=True)
class SimUser:
    """A user of the card and the card's engine. priv None: authentication without privacy."""

    name: str
    auth: bytes = field(repr=False)
    priv: bytes | None = field(default=None, repr=False)
    engine_id: bytes = b"\x80\x00\x00\x00\x05powerguard-sim"
    boots: int = 1
    clock: Clock = boottime_s
    _began_s: float = field(init=False)
    _auth_key: bytes = field(init=False, repr=False)
    _priv_key: bytes | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Hash the passphrases into keys, once."""
        self._began_s = self.clock()
        self._auth_key = localized_key(self.auth, self.engine_id)
        self._priv_key = None if self.priv is None else localized_key(self.priv, self.engine_id)[:16]

    @property
    def engine_time_s(self) -> int:
        return int(self.clock() - self._began_s)

    def reboot(self) -> None:
        """Begin a new life of the card's engine (RFC 3414 2.2.2)."""
        self.boots += 1
        self._began_s = self.clock()

    def open(self, message: bytes) -> Request:
        """Check and decrypt a message. Raises BerError, or ReportError with what RFC 3414 3.2 answers."""
        outer = ber.Reader(ber.Reader(message).expect(ber.SEQUENCE))
        outer.number()
        header = ber.Reader(outer.expect(ber.SEQUENCE))
        message_id, _largest, flags = header.number(), header.number(), header.expect(ber.OCTETS)[0]
        security = ber.Reader(ber.Reader(outer.expect(ber.OCTETS)).expect(ber.SEQUENCE))
        engine, boots, time_s = security.expect(ber.OCTETS), security.number(), security.number()
        user, digest, salt = (security.expect(ber.OCTETS) for _ in range(3))
        if engine != self.engine_id:
            raise ReportError(_UNKNOWN_ENGINE, message_id)
        if user != self.name.encode():
            raise ReportError(_UNKNOWN_USER, message_id)
        if flags & (_AUTH | _PRIV) != _AUTH | (_PRIV if self._priv_key is not None else 0):
            raise ReportError(_UNSUPPORTED_LEVEL, message_id)
        if not hmac.compare_digest(self._digest(message.replace(digest, bytes(_DIGEST_BYTES), 1)), digest):
            raise ReportError(_WRONG_DIGEST, message_id)
        if boots != self.boots or abs(time_s - self.engine_time_s) > _WINDOW_S:
            raise ReportError(_NOT_IN_WINDOW, message_id, authenticated=True)
        tag, scoped = outer.element()
        if tag == ber.OCTETS:
            try:
                plain = self._cfb(scoped, boots, time_s, salt, decrypt=True)
                scoped = ber.Reader(plain).expect(ber.SEQUENCE)
            except (ber.BerError, ValueError) as error:
                raise ReportError(_UNDECIPHERABLE, message_id) from error
        inner = ber.Reader(scoped)
        context_engine, context_name = inner.expect(ber.OCTETS), inner.expect(ber.OCTETS)
        return Request(
            message_id=message_id,
            flags=flags,
            context_engine=context_engine,
            context_name=context_name,
            pdu=ber.encode(*inner.element()),
        )

    def _cfb(self, text: bytes, boots: int, time_s: int, salt: bytes, *, decrypt: bool) -> bytes:
        """CFB128 by hand: the library moves its own from place to place between releases."""
        block = Cipher(algorithms.AES(self._priv_key or b""), modes.ECB()).encryptor()  # noqa: S305 - one block each
        previous = boots.to_bytes(4, "big") + time_s.to_bytes(4, "big") + salt
        out = bytearray()
        for start in range(0, len(text), 16):
            piece = text[start : start + 16]
            mixed = bytes(one ^ other for one, other in zip(piece, block.update(previous), strict=False))
            previous = piece if decrypt else mixed
            out += mixed
        return bytes(out)

    def _digest(self, message: bytes) -> bytes:
        return hmac.new(self._auth_key, message, "sha1").digest()[:_DIGEST_BYTES]

    def seal(self, request: Request, pdu: bytes) -> bytes:
        """Return the answer to a request as a message, at the request's own security level."""
        return self._seal(request.message_id, request.flags & (_AUTH | _PRIV), request.context_name, pdu)

    def report(self, error: ReportError) -> bytes:
        """Return the Report for a message that was refused."""
        varbind = ber.encode_value(ber.oid(f"{_STATS}.{error.counter}.0")) + ber.encode_value(
            ber.SimValue(ber.COUNTER32, 1)
        )
        zeros = b"".join(ber.encode_value(ber.integer(0)) for _ in range(3))
        varbinds = ber.encode(ber.SEQUENCE, ber.encode(ber.SEQUENCE, varbind))
        return self._seal(
            error.message_id, _AUTH if error.authenticated else 0, b"", ber.encode(ber.REPORT, zeros + varbinds)
        )

    def _seal(self, message_id: int, flags: int, context_name: bytes, pdu: bytes) -> bytes:
        scoped = ber.encode(
            ber.SEQUENCE, ber.encode(ber.OCTETS, self.engine_id) + ber.encode(ber.OCTETS, context_name) + pdu
        )
        time_s, salt = self.engine_time_s, b""
        if flags & _PRIV:
            salt = os.urandom(8)
            scoped = ber.encode(ber.OCTETS, self._cfb(scoped, self.boots, time_s, salt, decrypt=False))
        blank = bytes(_DIGEST_BYTES) if flags & _AUTH else b""
        head = b"".join(
            (ber.encode_value(ber.integer(message_id)), ber.encode_value(ber.integer(65507))),
        ) + b"".join((ber.encode(ber.OCTETS, bytes((flags,))), ber.encode_value(ber.integer(3))))

        def message(digest: bytes) -> bytes:
            user = self.name.encode() if flags & _AUTH else b""
            security = b"".join(
                ber.encode_value(value)
                for value in (
                    ber.octets(self.engine_id),
                    ber.integer(self.boots),
                    ber.integer(time_s),
                    ber.octets(user),
                    ber.octets(digest),
                    ber.octets(salt),
                )
            )
            wrapped = ber.encode(ber.OCTETS, ber.encode(ber.SEQUENCE, security))
            version = ber.encode_value(ber.integer(3))
            return ber.encode(ber.SEQUENCE, version + ber.encode(ber.SEQUENCE, head) + wrapped + scoped)

        whole = message(blank)
        return message(self._digest(whole)) if flags & _AUTH else whole
