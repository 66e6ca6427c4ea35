"""The protocol between a host and a sentinel, as bytes: signed JSON over HTTP (docs/reference/sentinel.md).

The two sides share no clock: all times are seconds from now, and freshness is a challenge of the
sentinel's own, good for one request and for CHALLENGE_S by its own clock.
"""

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

SCHEMA_VERSION: Final = 1
SIGNATURE: Final = "Powerguard-Signature"
"""HTTP header, of requests and of answers: 64 hexadecimal digits."""
CHALLENGE_PATH: Final = "/v1/challenge"
PATHS: Final = {"hello": "/v1/hello", "store": "/v1/store", "withdraw": "/v1/withdraw"}
PORT: Final = 13494

MIN_KEY_BYTES: Final = 32
"""`openssl rand -hex 32` makes 64; an invented word can be guessed offline from one recorded request."""
MAX_BODY_BYTES: Final = 4096
CHALLENGE_S: Final = 30.0
MAX_FEEDS: Final = 16
MAX_IN_S: Final = 86_400.0
MIN_VALID_S: Final = 60.0
MAX_VALID_S: Final = 30 * 86_400.0
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
"""Of a host, and of a UPS as both sides call it."""

_NAME: Final = re.compile(NAME)
_ID: Final = re.compile(r"[!-~]{1,128}")
_HEX: Final = re.compile(r"[0-9a-f]{32}")
_REQUEST: Final = b"powerguard sentinel request 1"
_ANSWER: Final = b"powerguard sentinel answer 1"
_CHALLENGE: Final = b"powerguard sentinel challenge 1"
_MAC_BYTES: Final = 16


class SentinelWireError(ValueError):
    """Bytes that are not a request or an answer; the text says what is wrong with them, without quoting them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A host's request. challenge: as the sentinel gave it; nonce: 32 hexadecimal digits, the host's own, never twice.

    host: its name at the sentinel. feeds: the UPSes that feed it, by the names that both sides use; hello and store.
    outage, boot_id: which outage, and the boot that goes down with it. in_s: seconds from now before which it must not
    be powered on. valid_s: seconds from now after which the intent has ended.
    """

    challenge: str
    nonce: str
    host: str
    feeds: tuple[str, ...] = ()
    outage: str = ""
    boot_id: str = ""
    in_s: float = 0.0
    valid_s: float = 0.0


_COMMON: Final = frozenset(("challenge", "nonce", "host"))
_FIELDS: Final = {
    "hello": _COMMON | {"feeds"},
    "store": _COMMON | {"feeds", "outage", "boot_id", "in_s", "valid_s"},
    "withdraw": _COMMON | {"outage"},
}


def encode(kind: str, request: Request) -> bytes:
    """Return the body of a request. kind: of `PATHS`."""
    fields = {name: value for name, value in asdict(request).items() if name in _FIELDS[kind]}
    return json.dumps({"schema_version": SCHEMA_VERSION, **fields}).encode()


def decode(kind: str, body: bytes) -> Request:
    """Read the body of a request; the whole body is checked before any of it is used. Raises WireError."""
    fields = _object(body)
    if fields.pop("schema_version", None) != SCHEMA_VERSION:
        msg = f"schema_version must be {SCHEMA_VERSION}"
        raise SentinelWireError(msg)
    if set(fields) != _FIELDS[kind]:
        msg = f"must have exactly schema_version, {', '.join(sorted(_FIELDS[kind]))}"
        raise SentinelWireError(msg)
    return Request(
        challenge=_text(fields, "challenge", _ID),
        nonce=_text(fields, "nonce", _HEX),
        host=_text(fields, "host", _NAME),
        feeds=_feeds(fields["feeds"]) if "feeds" in fields else (),
        outage=_text(fields, "outage", _ID) if "outage" in fields else "",
        boot_id=_text(fields, "boot_id", _ID) if "boot_id" in fields else "",
        in_s=_seconds(fields, "in_s", 0.0, MAX_IN_S) if "in_s" in fields else 0.0,
        valid_s=_seconds(fields, "valid_s", MIN_VALID_S, MAX_VALID_S) if "valid_s" in fields else 0.0,
    )


def answer_object(body: bytes) -> dict[str, Any]:
    """Read the body of an answer. Raises WireError."""
    return _object(body)


def sign_request(key: bytes, path: str, body: bytes) -> str:
    """HMAC-SHA256 over what is asked, and of whom."""
    return hmac.new(key, b"\n".join((_REQUEST, path.encode(), body)), hashlib.sha256).hexdigest()


def sign_answer(key: bytes, request_signature: str, status: int, body: bytes) -> str:
    """HMAC-SHA256 over an answer, bound to the one request that it answers."""
    message = b"\n".join((_ANSWER, request_signature.encode("ascii", "replace"), str(status).encode(), body))
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def is_signed(expected: str, signature: str | None) -> bool:
    """Compare two signatures in a time that does not depend on where they differ."""
    return hmac.compare_digest(expected.encode(), (signature or "").encode("utf-8", "replace"))


class Challenges:
    """Makes challenges and knows its own again without keeping them: a flood of questions costs no memory.

    secret: of this process alone, so that a restart forgets all challenges. Used ones are kept while they would still
    be valid; only the owner of a key can use one.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._used: dict[str, float] = {}

    def make(self, now_s: float, salt: bytes) -> str:
        """Return a challenge. now_s: this process's clock, at least 0; salt: 8 random bytes."""
        body = int(now_s * 1000.0).to_bytes(8, "big") + salt
        return base64.urlsafe_b64encode(body + self._mac(body)).decode()

    def is_good(self, challenge: str, now_s: float) -> bool:
        """Say whether it is ours, young enough, and not used yet."""
        try:
            decoded = base64.urlsafe_b64decode(challenge.encode("ascii"))
        except ValueError:
            return False
        body, mac = decoded[:-_MAC_BYTES], decoded[-_MAC_BYTES:]
        if len(body) != 16 or not hmac.compare_digest(self._mac(body), mac):
            return False
        age_s = now_s - int.from_bytes(body[:8], "big") / 1000.0
        # Decoding is lenient in ways that spell one challenge differently, so what is kept is what it says.
        return -1.0 <= age_s <= CHALLENGE_S and body.hex() not in self._used

    def use(self, challenge: str, now_s: float) -> None:
        """Let a good challenge be good no more."""
        self._used = {each: until_s for each, until_s in self._used.items() if until_s > now_s}
        self._used[base64.urlsafe_b64decode(challenge)[:-_MAC_BYTES].hex()] = now_s + CHALLENGE_S + 1.0

    def _mac(self, body: bytes) -> bytes:
        return hmac.new(self._secret, _CHALLENGE + body, hashlib.sha256).digest()[:_MAC_BYTES]


def _object(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY_BYTES:
        msg = f"must be at most {MAX_BODY_BYTES} bytes"
        raise SentinelWireError(msg)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        msg = "must be a JSON object"
        raise SentinelWireError(msg)
    return value


def _text(fields: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = fields[name]
    if not isinstance(value, str) or not pattern.fullmatch(value):
        msg = f"{name} must be text of the form {pattern.pattern}"
        raise SentinelWireError(msg)
    return value


def _feeds(value: object) -> tuple[str, ...]:
    if isinstance(value, list) and 1 <= len(value) <= MAX_FEEDS:
        feeds = tuple(sorted(each for each in value if isinstance(each, str) and _NAME.fullmatch(each)))
        if len(feeds) == len(set(feeds)) == len(value):
            return feeds
    msg = f"feeds must be 1 to {MAX_FEEDS} different names of UPSes"
    raise SentinelWireError(msg)


def _seconds(fields: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = fields[name]
    # NaN is between no two numbers.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        msg = f"{name} must be seconds, {least:g} to {most:g}"
        raise SentinelWireError(msg)
    return float(value)
