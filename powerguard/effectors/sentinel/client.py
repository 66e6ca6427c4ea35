"""One question to one sentinel over HTTP or HTTPS: asked again while that can help; unsigned answers do not count."""

import asyncio
import errno
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from powerguard.effectors.base import EffectorError
from powerguard.effectors.tls import Verify
from powerguard.protocols import sentinel as wire

MAX_ANSWER_BYTES: Final = 65_536
_AGAIN_S: Final = 0.3
"""Before the next try, and up to as much again: a room full of hosts asks in the same second."""

_TRY_S: Final = 2.0
"""One request that a flooded sentinel has accepted and does not answer: the next may get through."""

Answer = Mapping[str, Any]


class _AgainError(Exception):
    """It did not work, and may a moment later."""


def session(verify: Verify) -> aiohttp.ClientSession:
    """Make a session for one order. No proxy, no cookie, no netrc; nothing is unpacked."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=verify, force_close=True, use_dns_cache=False),
        timeout=aiohttp.ClientTimeout(total=_TRY_S),  # the order has a limit of its own, and several tries fit into it
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


@dataclass(slots=True)
class Peer:
    """One sentinel during one order. seen: why it has not answered so far."""

    url: str
    session: aiohttp.ClientSession = field(repr=False)
    key: bytes = field(repr=False)
    seen: str = "no answer"

    async def ask(self, kind: str, asked: Mapping[str, Any]) -> Answer:
        """Ask until it answers; the caller's limit ends it. asked: of `wire.Request`, without challenge and nonce.

        Raises EffectorError where asking again would not help.
        """
        refused = 0
        while True:
            try:
                return await self._ask(kind, asked, is_last=refused > 0)
            except _AgainError as error:
                self.seen = str(error)
                refused += self.seen == _NOT_ACCEPTED
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self.seen = _failure(error)
            await asyncio.sleep(_AGAIN_S * (1.0 + secrets.randbelow(1000) / 1000.0))  # noqa: TID251 - nothing tells us when

    async def _ask(self, kind: str, asked: Mapping[str, Any], *, is_last: bool) -> Answer:
        status, _, body = await self._request("GET", wire.CHALLENGE_PATH)
        challenge = _object(body).get("challenge") if status == 200 else None
        if not isinstance(challenge, str):
            raise _AgainError(_status(status))
        path = wire.PATHS[kind]
        question = wire.encode(kind, wire.Request(challenge=challenge, nonce=secrets.token_hex(16), **asked))
        signature = wire.sign_request(self.key, path, question)
        status, signed, body = await self._request("POST", path, question, {wire.SIGNATURE: signature})
        if not wire.is_signed(wire.sign_answer(self.key, signature, status, body), signed):
            if status == 401 and is_last:
                raise EffectorError(_NOT_ACCEPTED)
            raise _AgainError(_NOT_ACCEPTED if status == 401 else _status(status))
        told = _object(body)
        if status in (429, 503):
            raise _AgainError(_words(told))
        if status != 200:
            raise EffectorError(_words(told))
        return told

    async def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str | None, bytes]:
        all_headers = {"Accept": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        if body is not None:
            all_headers["Content-Type"] = "application/json"
        async with self.session.request(
            method, f"{self.url}{path}", data=body, headers=all_headers, allow_redirects=False
        ) as told:
            content = b""
            async for chunk in told.content.iter_chunked(16_384):
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    msg = f"an answer is longer than {MAX_ANSWER_BYTES} bytes: this is no sentinel"
                    raise EffectorError(msg)
            return told.status, told.headers.get(wire.SIGNATURE), content


# Short: an outcome holds 600 characters, and several sentinels may fail at once.
_NOT_ACCEPTED: Final = "does not accept us: sentinel.name and sentinel.key must be as it has them"


def _status(status: int) -> str:
    if status == 429:
        return "is asked too often (HTTP 429)"
    return (
        f"its answer is not signed with our key, so it does not count (HTTP {status}): another sentinel, or another key"
    )


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        return wire.answer_object(body) if len(body) <= wire.MAX_BODY_BYTES else {}
    except wire.WireError:
        return {}


def _words(told: Mapping[str, Any]) -> str:
    """What it says of a refusal. It is signed, and yet only text."""
    reason = told.get("reason")
    text = reason if isinstance(reason, str) else "refuses, and does not say why"
    return "".join(c if c.isprintable() else " " for c in text[:400])


def _failure(error: Exception) -> str:
    """Say what went wrong. Texts of errors are not passed on: they may hold headers that we sent."""
    if isinstance(error, aiohttp.ServerFingerprintMismatch):
        return f"its certificate is not as sentinel.fingerprint says, but sha256 {error.got.hex()}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        reason = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else type(cause).__name__
        return f"its certificate does not verify ({reason}): see sentinel.ca and sentinel.fingerprint"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return "what listens there does not speak TLS (write http:// for one without, or give it a certificate)"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the name does not resolve (write an address)"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"no connection ({errno.errorcode.get(number or 0, 'unknown reason')})"
    return f"no whole answer ({type(error).__name__})"
