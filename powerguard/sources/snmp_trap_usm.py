"""Version 3 of traps and informs: the receiver's side of the user security model (RFC 3414 3.2, RFC 7860, RFC 3826).

Keys and ciphers are pysnmp's, the frame around them is ours. pysnmp's own receiver (7.1.30, measured) keeps 240 bytes
for ever of each message with a wrong digest and 1500 of each engine id that somebody makes up, hands on what has
neither user nor digest, and takes the time of every message for the sender's. Here is remembered only what the
settings name.
"""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from pysnmp.entity import config
from pysnmp.proto import rfc1902
from pysnmp.proto.error import StatusInformation

from powerguard.clock import Clock
from powerguard.options import SecretError
from powerguard.protocols import snmp_trap as codec
from powerguard.protocols.snmp_trap import Notification, ScopedPdu, UsmMessage
from powerguard.sources.trap_options import TrapUser, plain_engine

_WINDOW_S: Final = 150
_LAST_BOOT: Final = 2**31 - 1
_SHORTEST: Final = 8
_LEVEL: Final = codec.AUTH | codec.PRIV
_octets: Final = rfc1902.univ.OctetString

_AUTH: Final = {
    # protocol: pysnmp's name of it, the hash, bytes of the digest
    "MD5": (config.USM_AUTH_HMAC96_MD5, "md5", 12),
    "SHA": (config.USM_AUTH_HMAC96_SHA, "sha1", 12),
    "SHA-224": (config.USM_AUTH_HMAC128_SHA224, "sha224", 16),
    "SHA-256": (config.USM_AUTH_HMAC192_SHA256, "sha256", 24),
    "SHA-384": (config.USM_AUTH_HMAC256_SHA384, "sha384", 32),
    "SHA-512": (config.USM_AUTH_HMAC384_SHA512, "sha512", 48),
}
_PRIV: Final = {
    "DES": config.USM_PRIV_CBC56_DES,
    "AES": config.USM_PRIV_CFB128_AES,
    "AES-192": config.USM_PRIV_CFB192_AES,
    "AES-256": config.USM_PRIV_CFB256_AES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a message was worth.

    result: one of trap_counts.RESULTS, "hint" when it is good. ups: whose card sent it; None when its engine does not
    say, as in every inform. answer: what to send back; None: nothing.
    """

    result: str
    ups: str | None = None
    notification: Notification | None = None
    answer: bytes | None = None


@dataclass(slots=True)
class _Key:
    """A user's keys for one engine, and how far that engine's clock has come. boots -1: not heard of yet."""

    ups: str | None
    auth: bytes = field(repr=False)
    priv: Any = field(repr=False)
    boots: int = -1
    time_s: int = 0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _User:
    name: bytes
    digest: str
    digest_bytes: int
    cipher: Any
    keys: dict[bytes, _Key]

    @property
    def level(self) -> int:
        return codec.AUTH | (0 if self.cipher is None else codec.PRIV)


class UserError(Exception):
    """A user that cannot be used: what, where, what would be right."""


def _user(options: TrapUser, own_engine: bytes) -> _User:
    try:
        auth = options.auth.read()
        priv = None if options.priv is None else options.priv.read()
    except SecretError as error:
        raise UserError(str(error)) from error
    for word, secret in (("auth", auth), ("priv", priv)):
        if secret is not None and len(secret) < _SHORTEST:
            msg = f"the {word} passphrase is shorter than {_SHORTEST} characters (RFC 3414 11.2)"
            raise UserError(msg)
    protocol, digest, digest_bytes = _AUTH[options.auth_protocol]
    hashes = config.AUTH_SERVICES[protocol]
    cipher = None if priv is None else config.PRIV_SERVICES[_PRIV[options.priv_protocol]]
    auth_hash = hashes.hash_passphrase(auth)
    priv_hash = None if cipher is None else cipher.hash_passphrase(protocol, priv)

    def key(engine: bytes, ups: str | None) -> _Key:
        name = _octets(engine)
        localized = None if cipher is None else _octets(cipher.localize_key(protocol, priv_hash, name))
        return _Key(ups=ups, auth=bytes(hashes.localize_key(auth_hash, name)), priv=localized)

    keys = {bytes.fromhex(plain_engine(engine)): ups for ups, engine in options.engines.items()}
    return _User(
        name=options.user.encode(),
        digest=digest,
        digest_bytes=digest_bytes,
        cipher=cipher,
        keys={own_engine: key(own_engine, None)} | {engine: key(engine, ups) for engine, ups in keys.items()},
    )


class Usm:
    """The users of the settings, and the engine that we are to those who send informs.

    boots: must be higher after each start of the daemon (RFC 3414 2.2).
    """

    def __init__(self, *, engine_id: bytes, boots: int, clock: Clock) -> None:
        """Know nobody yet."""
        self._engine_id = engine_id
        self._boots = boots
        self._clock = clock
        self._began_s = clock()
        self._users: list[_User] = []
        self._engines: set[bytes] = {engine_id}
        self._unknown_engines = 0
        self._not_in_time = 0

    def add(self, options: Iterable[TrapUser]) -> list[str]:
        """Take users in; returns what is wrong with those that cannot be. Hashes a megabyte each: for a thread."""
        problems = []
        for one in options:
            try:
                user = _user(one, self._engine_id)
            except UserError as error:
                problems.append(f"traps.users, {one.user}: {error}")
            else:
                self._users.append(user)
                self._engines.update(user.keys)
        return problems

    def receive(self, data: bytes, message: UsmMessage) -> Verdict:
        """Judge one message. Raises codec.TrapError on what cannot be read."""
        if message.engine_id not in self._engines:
            self._unknown_engines += 1
            wants_answer = message.flags & codec.REPORTABLE
            told = self._report(codec.UNKNOWN_ENGINE, self._unknown_engines, message) if wants_answer else None
            # A question for our engine id is how every inform begins.
            return Verdict(
                result="discovery" if wants_answer and not message.engine_id else "unknown_engine", answer=told
            )
        named = [user for user in self._users if user.name == message.user and message.engine_id in user.keys]
        if not named:
            return Verdict(result="unknown_user")
        for user in named:  # one name may have other passphrases on another card
            if message.flags & _LEVEL == user.level and self._is_authentic(data, message, user):
                return self._authentic(message, user)
        return Verdict(result="not_authentic")

    def _is_authentic(self, data: bytes, message: UsmMessage, user: _User) -> bool:
        if len(message.digest) != user.digest_bytes:
            return False
        behind = message.digest_at + user.digest_bytes
        blank = data[: message.digest_at] + bytes(user.digest_bytes) + data[behind : message.end]
        return hmac.compare_digest(self._digest(blank, user, message.engine_id), message.digest)

    def _digest(self, blank: bytes, user: _User, engine_id: bytes) -> bytes:
        return hmac.digest(user.keys[engine_id].auth, blank, user.digest)[: user.digest_bytes]

    def _authentic(self, message: UsmMessage, user: _User) -> Verdict:
        key = user.keys[message.engine_id]
        ours = message.engine_id == self._engine_id
        if not (self._is_our_time(message) if ours else self._is_its_time(message, key)):
            self._not_in_time += 1
            reports = ours and message.flags & codec.REPORTABLE
            told = self._report(codec.NOT_IN_TIME, self._not_in_time, message, user) if reports else None
            return Verdict(result="out_of_time", answer=told)
        payload = message.payload
        if user.cipher is not None:
            decrypted = self._decrypted(message, user, key)
            if decrypted is None:
                return Verdict(result="undecipherable")
            payload = decrypted
        try:
            pdu = codec.parse_scoped(payload)
        except codec.NotATrapError:
            raise
        except codec.TrapError:
            # Behind a good digest stand bytes of the card's own: it is the privacy passphrase that is wrong.
            if user.cipher is None:
                raise
            return Verdict(result="undecipherable")
        told = self._answer(message, user, pdu) if pdu.notification.confirmed and ours else None
        return Verdict(result="hint", ups=key.ups, notification=pdu.notification, answer=told)

    # --- Time (RFC 3414 3.2, 7) ---------------------------------------------------------------------------------

    def _is_our_time(self, message: UsmMessage) -> bool:
        return message.boots == self._boots and abs(message.time_s - self._time_s()) <= _WINDOW_S

    def _is_its_time(self, message: UsmMessage, key: _Key) -> bool:
        now_s = self._clock()
        if not 0 <= message.boots < _LAST_BOOT or not 0 <= message.time_s <= _LAST_BOOT or message.boots < key.boots:
            return False
        if message.boots == key.boots and message.time_s < key.time_s + (now_s - key.at_s) - _WINDOW_S:
            return False
        if message.boots > key.boots or message.time_s > key.time_s:
            key.boots, key.time_s, key.at_s = message.boots, message.time_s, now_s
        return True

    def _time_s(self) -> int:
        return int(self._clock() - self._began_s)

    # --- Answers ------------------------------------------------------------------------------------------------

    def _decrypted(self, message: UsmMessage, user: _User, key: _Key) -> bytes | None:
        place = (message.boots, message.time_s, _octets(message.salt))
        try:
            return bytes(user.cipher.decrypt_data(key.priv, place, _octets(message.payload)))
        except (StatusInformation, ValueError):  # a salt, or a ciphertext, that the cipher cannot have made
            return None

    def _report(self, counter: bytes, count: int, message: UsmMessage, user: _User | None = None) -> bytes:
        scoped = codec.scoped(self._engine_id, b"", codec.REPORT, codec.report(counter, count))
        return self._sealed(message.message_id, 0 if user is None else codec.AUTH, user, scoped)

    def _answer(self, message: UsmMessage, user: _User, pdu: ScopedPdu) -> bytes:
        scoped = codec.scoped(pdu.context_engine, pdu.context_name, codec.RESPONSE, pdu.pdu)
        return self._sealed(message.message_id, user.level, user, scoped)

    def _sealed(self, message_id: int, flags: int, user: _User | None, payload: bytes) -> bytes:
        engine = (self._engine_id, self._boots, self._time_s())
        salt = b""
        if user is not None and flags & codec.PRIV:
            key = user.keys[self._engine_id].priv
            text, salted = user.cipher.encrypt_data(key, (engine[1], engine[2], None), payload)
            payload, salt = codec.element(codec.OCTETS, bytes(text)), bytes(salted)
        whole, at = codec.seal(
            message_id=message_id,
            flags=flags,
            engine=engine,
            user=b"" if user is None else user.name,
            salt=salt,
            digest_bytes=0 if user is None else user.digest_bytes,
            payload=payload,
        )
        if user is None:
            return whole
        return whole[:at] + self._digest(whole, user, self._engine_id) + whole[at + user.digest_bytes :]
