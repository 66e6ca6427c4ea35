"""The user security model of version 3: users, their keys, proofs, ciphers and clocks (RFC 3414, 3826, 7860).

The one of the product: polls and orders (`snmp_v3`), traps and informs (`snmp_trap_usm`) go through it. Hashes are
hashlib's, proofs hmac's, ciphers cryptography's, which is loaded for users with privacy alone.
"""

import hashlib
import hmac
import itertools
import secrets
from dataclasses import dataclass, field
from typing import Final, Protocol

from powerguard.options import Secret
from powerguard.protocols import snmp_ber as ber
from powerguard.protocols import snmp_v3 as codec
from powerguard.protocols.snmp_v3 import UsmMessage
from powerguard.sources.snmp_options import AuthProtocol, PrivProtocol

WINDOW_S: Final = 150
"""Seconds that a message may be old (RFC 3414 2.2.3)."""
LAST_BOOT: Final = codec.LAST
"""An engine that has started so often is in nobody's time window any more (RFC 3414 2.2.2)."""
_SHORTEST: Final = 8
_MEGABYTE: Final = 1 << 20
_PIECE: Final = 1 << 14
_SALT_BYTES: Final = 8
_SALTS: Final = itertools.count(secrets.randbits(64))
"""One row of numbers for every key of this process, so that none sees one twice; it begins anywhere, for the one of
the start before us is not known."""

_AUTH: Final[dict[AuthProtocol, tuple[str, int]]] = {
    # protocol: the hash, bytes of the digest that are sent (RFC 3414 6, 7; RFC 7860 4)
    "MD5": ("md5", 12),
    "SHA": ("sha1", 12),
    "SHA-224": ("sha224", 16),
    "SHA-256": ("sha256", 24),
    "SHA-384": ("sha384", 32),
    "SHA-512": ("sha512", 48),
}
_KEY_BYTES: Final[dict[PrivProtocol, int]] = {"DES": 16, "AES": 16, "AES-192": 24, "AES-256": 32}


class UserError(Exception):
    """A user that cannot be used: what, where, what would be right."""


class UndecipherableError(Exception):
    """A salt, or a ciphertext, that the cipher cannot have made."""


class Privacy(Protocol):
    """One way of keeping a scoped PDU secret. boots and time_s: of the engine whose key it is."""

    def encrypted(self, key: bytes, boots: int, time_s: int, number: int, plain: bytes) -> tuple[bytes, bytes]:
        """Return the ciphertext, and the salt to be sent with it. number: never used with this key before."""
        ...

    def decrypted(self, key: bytes, boots: int, time_s: int, salt: bytes, text: bytes) -> bytes:
        """Return what was encrypted, with its padding. Raises ValueError."""
        ...


class UserOptions(Protocol):
    """What settings say of a user of version 3."""

    @property
    def auth(self) -> Secret | None: ...
    @property
    def auth_protocol(self) -> AuthProtocol: ...
    @property
    def priv(self) -> Secret | None: ...
    @property
    def priv_protocol(self) -> PrivProtocol: ...


@dataclass(frozen=True, slots=True)
class Keys:
    """A user's keys for one engine. What they prove and decipher is of that engine and of nobody else."""

    engine_id: bytes
    user: "User"
    _auth: bytes = field(repr=False)
    _priv: bytes = field(repr=False)

    def proves(self, message: UsmMessage) -> bool:
        """Whether the message has this user's level, and its digest is right; without authentication none has."""
        return message.level == self.user.level and self.is_digest_right(message)

    def is_digest_right(self, message: UsmMessage) -> bool:
        """Whether the digest was made with our key, whatever the level; a shorter one is wrong."""
        size = self.user.digest_bytes
        if size == 0 or len(message.digest) != size:
            return False
        return hmac.compare_digest(self._digest(message.unsigned), message.digest)

    def opened(self, message: UsmMessage) -> bytes:
        """Return the scoped PDU of a message of this user's level. Raises UndecipherableError."""
        if not message.level & codec.PRIV:
            return message.payload
        if self.user.cipher is None or len(message.salt) != _SALT_BYTES:
            raise UndecipherableError
        try:
            return self.user.cipher.decrypted(self._priv, message.boots, message.time_s, message.salt, message.payload)
        except ValueError:
            raise UndecipherableError from None

    def sealed(self, message_id: int, flags: int, boots: int, time_s: int, scoped: bytes) -> bytes:
        """Return a message with proof and cipher, as flags say; its user is named at every level."""
        payload, salt = scoped, b""
        if flags & codec.PRIV and self.user.cipher is not None:
            secret, salt = self.user.cipher.encrypted(self._priv, boots, time_s, next(_SALTS), scoped)
            payload = ber.element(ber.OCTETS, secret)
        digest_bytes = self.user.digest_bytes if flags & codec.AUTH else 0
        whole, at = codec.seal(
            message_id=message_id,
            flags=flags,
            engine=(self.engine_id, boots, time_s),
            user=self.user.name,
            salt=salt,
            digest_bytes=digest_bytes,
            payload=payload,
        )
        if not digest_bytes:
            return whole
        return whole[:at] + self._digest(whole) + whole[at + digest_bytes :]

    def _digest(self, blank: bytes) -> bytes:
        return hmac.digest(self._auth, blank, self.user.hash_name)[: self.user.digest_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user, its passphrases made into keys that fit no engine yet.

    digest_bytes: 0 without authentication. cipher: None without privacy; it takes keys of key_bytes.
    """

    name: bytes
    hash_name: str
    digest_bytes: int
    cipher: Privacy | None
    key_bytes: int
    _auth: bytes = field(repr=False)
    _priv: bytes = field(repr=False)

    @classmethod
    def read(cls, name: str, options: UserOptions) -> "User":
        """Read the secrets and hash a megabyte for each: for a thread. Raises SecretError, UserError."""
        auth = None if options.auth is None else options.auth.read()
        priv = None if options.priv is None else options.priv.read()
        for word, secret in (("auth", auth), ("priv", priv)):
            if secret is not None and len(secret) < _SHORTEST:
                msg = f"the {word} passphrase is shorter than {_SHORTEST} characters (RFC 3414 11.2)"
                raise UserError(msg)
        hash_name, digest_bytes = _AUTH[options.auth_protocol]
        return cls(
            name=name.encode(),
            hash_name=hash_name,
            digest_bytes=0 if auth is None else digest_bytes,
            cipher=None if priv is None else _cipher(options.priv_protocol),
            key_bytes=_KEY_BYTES[options.priv_protocol],
            _auth=b"" if auth is None else _hashed(hash_name, auth),
            _priv=b"" if priv is None else _hashed(hash_name, priv),
        )

    @property
    def level(self) -> int:
        """AUTH, PRIV, both or neither: what its messages have, no more and no less."""
        return (codec.AUTH if self.digest_bytes else 0) | (0 if self.cipher is None else codec.PRIV)

    def keys(self, engine_id: bytes) -> Keys:
        """Return the keys for one engine: whoever learns them can speak to no other."""
        auth = _localized(self.hash_name, self._auth, engine_id) if self._auth else b""
        priv = self._priv and _stretched(
            self.hash_name, _localized(self.hash_name, self._priv, engine_id), engine_id, self.key_bytes
        )
        return Keys(engine_id, self, auth, priv)


def _cipher(protocol: PrivProtocol) -> Privacy:
    from powerguard.sources.snmp_ciphers import CIPHERS  # noqa: PLC0415 - 7 MB for those who need it

    return CIPHERS[protocol]


def _hash(name: str, data: bytes) -> bytes:
    return hashlib.new(name, data, usedforsecurity=False).digest()  # as MD5 is refused else where FIPS rules


def _hashed(hash_name: str, passphrase: bytes) -> bytes:
    """Return the key of a passphrase: the hash of a megabyte of it (RFC 3414 2.6 and A.2).

    In pieces: a megabyte at once, in a thread, stays with the process (2 MB, measured).
    """
    hashing = hashlib.new(hash_name, usedforsecurity=False)
    piece = passphrase * (_PIECE // len(passphrase) + 1)
    times, rest = divmod(_MEGABYTE, len(piece))
    for _ in range(times):
        hashing.update(piece)
    hashing.update(piece[:rest])
    return hashing.digest()


def _localized(hash_name: str, key: bytes, engine_id: bytes) -> bytes:
    """Return a key for one engine (RFC 3414 2.6)."""
    return _hash(hash_name, key + engine_id + key)


def _stretched(hash_name: str, key: bytes, engine_id: bytes, size: int) -> bytes:
    """Return a privacy key of this size. The longer ones are in no RFC.

    This is how draft-reeder-snmpv3-usm-3desede-00 (2.1) lengthens a key, and Cisco, pysnmp and net-snmp's AES-256-C do:
    what there is becomes a passphrase.
    """
    while len(key) < size:
        key += _localized(hash_name, _hashed(hash_name, key), engine_id)
    return key[:size]


@dataclass(slots=True)
class EngineClock:
    """How far an engine's clock has come, as far as it was heard of (RFC 3414 2.3). boots -1: never."""

    boots: int = -1
    time_s: int = 0
    at_s: float = 0.0

    def takes(self, boots: int, time_s: int, now_s: float) -> bool:
        """Whether an authentic message of this time is no older than the window; it moves the clock on (3.2.7 b)."""
        if not 0 <= boots < LAST_BOOT or not 0 <= time_s <= LAST_BOOT or boots < self.boots:
            return False
        if boots == self.boots and time_s < self.now(now_s) - WINDOW_S:
            return False
        if boots > self.boots or time_s > self.time_s:
            self.boots, self.time_s, self.at_s = boots, time_s, now_s
        return True

    def now(self, now_s: float) -> int:
        """Return its time as it must be by now, in whole seconds."""
        return min(self.time_s + int(now_s - self.at_s), LAST_BOOT)
