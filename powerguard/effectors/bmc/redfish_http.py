"""One conversation with a Redfish service over HTTPS: nothing is followed, nothing is waited for too long.

DSP0266 is DMTF's "Redfish Specification". HTTP Basic and not a session (DSP0266 13.3.4): a session would have to be
closed, and a BMC that hangs would be left with it until none is free.
"""

import asyncio
import base64
import errno
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from yarl import URL

from powerguard.clock import boottime_s
from powerguard.effectors.bmc.exchange import BUSY_PAUSE_S, BmcFailure
from powerguard.effectors.bmc.ipmi import Failure
from powerguard.effectors.tls import Verify

MAX_BODY_BYTES: Final = 262_144
"""A ComputerSystem takes 4 to 20 KB; more is read of nobody."""
_PATH: Final = re.compile(r"/redfish/[!-~]{0,1000}")
_MAX_RETRY_AFTER_S: Final = 2.0
_TRIES_WITH_FRESH_ETAG: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource as read. etag: None where the service gives none."""

    path: str
    body: Mapping[str, Any]
    etag: str | None


@dataclass(slots=True)
class Talk:
    """One operation's requests. by_s: of CLOCK_BOOTTIME; the caller holds the operation to it, we only plan by it.

    doing: the request that is open. heard: the service has answered something at all.
    """

    session: aiohttp.ClientSession = field(repr=False)
    host: str
    port: int
    authorization: str = field(repr=False)
    by_s: float
    doing: str = "the connection"
    heard: bool = False

    async def get(self, path: str, *, login: bool = True) -> Resource:
        """Read a resource. Raises BmcFailure. login: False for the root, which everybody may read (DSP0266 13.3.1)."""
        status, headers, body = await self._patient("GET", path, login=login)
        if status != 200:
            raise _refusal(self.doing, status, body)
        if body is None:
            raise BmcFailure(Failure.PROTOCOL, f"GET {path} answered with what is no JSON object")
        etag = headers.get("ETag") or body.get("@odata.etag")
        return Resource(path=path, body=body, etag=etag if isinstance(etag, str) and etag.isprintable() else None)

    async def patch(self, resource: Resource, change: Mapping[str, Any]) -> None:
        """Change a resource as it was read; where somebody else has changed it since, read it again. Raises BmcFailure.

        Only what reads back counts, so any 2xx will do (202: a task of its own).
        """
        for left in range(_TRIES_WITH_FRESH_ETAG - 1, -1, -1):
            status, _, body = await self._patient("PATCH", resource.path, change=change, etag=resource.etag)
            if 200 <= status < 300:
                return
            if status not in (412, 428) or not left:
                raise _refusal(self.doing, status, body)
            resource = await self.get(resource.path)

    async def post(self, path: str, told: Mapping[str, Any]) -> None:
        """Call an action. Raises BmcFailure. Any 2xx will do: what came of it is looked at."""
        status, _, body = await self._patient("POST", path, change=told)
        if not 200 <= status < 300:
            raise _refusal(self.doing, status, body)

    async def pause(self, seconds: float) -> bool:
        """Wait, and say whether there was time for it."""
        if boottime_s() + seconds >= self.by_s:
            return False
        await asyncio.sleep(seconds)  # noqa: TID251 - a BMC tells nobody when it is ready; the caller's limit ends it
        return True

    async def _patient(
        self,
        method: str,
        path: str,
        *,
        login: bool = True,
        change: Mapping[str, Any] | None = None,
        etag: str | None = None,
    ) -> tuple[int, Mapping[str, str], dict[str, Any] | None]:
        """Request, and again while the service says that it is not ready (503) and there is time."""
        while True:
            status, headers, body = await self._request(method, path, login=login, change=change, etag=etag)
            if status != 503 or not await self.pause(_retry_after_s(headers.get("Retry-After"))):
                return status, headers, body

    async def _request(
        self, method: str, path: str, *, login: bool, change: Mapping[str, Any] | None, etag: str | None
    ) -> tuple[int, Mapping[str, str], dict[str, Any] | None]:
        self.doing = f"{method} {path}"
        url = URL.build(scheme="https", host=self.host, port=self.port, path=path, encoded=True)
        # Identity: nothing is unpacked here, so that a small answer cannot become a large one.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "OData-Version": "4.0"}
        if login:
            headers["Authorization"] = self.authorization
        if etag is not None:
            headers["If-Match"] = etag
        try:
            # Redirects are not followed: the login would go wherever they lead.
            async with self.session.request(method, url, json=change, headers=headers, allow_redirects=False) as told:
                self.heard = True
                return told.status, told.headers, _object(await _read(told))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failure(self.doing, error) from None


def session(verify: Verify) -> aiohttp.ClientSession:
    """Make a session for one operation. No proxy, no cookie, no netrc."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=verify, limit=1, use_dns_cache=False),
        timeout=aiohttp.ClientTimeout(total=None),  # the operation has one
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


def basic(user: str, password: bytes) -> str:
    """Make the Authorization header (RFC 7617, UTF-8)."""
    return "Basic " + base64.b64encode(user.encode() + b":" + password).decode("ascii")


def link(body: Mapping[str, Any], *names: str) -> str:
    """Path that a resource links to by these names. Raises BmcFailure where it is no path of this service."""
    told: object = body
    for name in (*names, "@odata.id"):
        told = told.get(name) if isinstance(told, Mapping) else None
    if not isinstance(told, str) or not _PATH.fullmatch(told):
        raise BmcFailure(Failure.PROTOCOL, f"its {'.'.join(names) or 'member'} links to no path under /redfish/")
    return told


async def _read(told: aiohttp.ClientResponse) -> bytes:
    content = b""
    async for chunk in told.content.iter_chunked(65536):
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise BmcFailure(Failure.PROTOCOL, f"an answer is longer than {MAX_BODY_BYTES} bytes")
    return content


def _object(content: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _retry_after_s(told: str | None) -> float:
    """Seconds to wait. A date, or nothing, is as long as IPMI's "busy"."""
    if told is not None and told.isascii() and told.isdecimal() and len(told) < 6:
        return min(max(float(told), BUSY_PAUSE_S), _MAX_RETRY_AFTER_S)
    return BUSY_PAUSE_S


_MEANINGS: Final = {
    400: (Failure.UNSUPPORTED, "refused"),
    401: (Failure.AUTH, "login refused"),
    403: (Failure.PRIVILEGE, "not permitted to this account"),
    404: (Failure.PROTOCOL, "is not there"),
    405: (Failure.UNSUPPORTED, "cannot be changed"),
    412: (Failure.BUSY, "was changed by somebody else each time"),
    428: (Failure.PROTOCOL, "wants an ETag, and has none"),
    501: (Failure.UNSUPPORTED, "is not implemented"),
    503: (Failure.BUSY, "is not ready"),
}


def _refusal(doing: str, status: int, body: Mapping[str, Any] | None) -> BmcFailure:
    failure, meaning = _MEANINGS.get(status, (Failure.PROTOCOL, "was answered with what no Redfish service should say"))
    if 300 <= status < 400:
        meaning = "redirects, and is not followed"
    words = _words(body)
    return BmcFailure(failure, f"{doing}: {meaning} (HTTP {status}{f': {words}' if words else ''})")


def _words(body: Mapping[str, Any] | None) -> str:
    """What the service says of an error (DSP0266 8.6), shortened and without what a terminal would act on."""
    error = (body or {}).get("error")
    if not isinstance(error, Mapping):
        return ""
    more = error.get("@Message.ExtendedInfo")
    first = more[0] if isinstance(more, list) and more and isinstance(more[0], Mapping) else {}
    told = first.get("Message") or error.get("message")
    return "".join(c if c.isprintable() else " " for c in told[:160]).strip() if isinstance(told, str) else ""


def _failure(doing: str, error: Exception) -> BmcFailure:
    """Say what went wrong. Texts of errors are not passed on: they may hold headers that we sent."""
    if isinstance(error, aiohttp.ServerFingerprintMismatch):
        return BmcFailure(
            Failure.SETTINGS, f"its certificate is not the one that is pinned, but sha256 {error.got.hex()}"
        )
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        reason = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else type(cause).__name__
        return BmcFailure(Failure.SETTINGS, f"its certificate does not verify ({reason})")
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return BmcFailure(Failure.PROTOCOL, "what listens there does not speak TLS, or none that is still safe")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return BmcFailure(Failure.UNREACHABLE, "the name does not resolve")
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return BmcFailure(Failure.UNREACHABLE, f"no connection ({errno.errorcode.get(number or 0, 'unknown reason')})")
    return BmcFailure(Failure.PROTOCOL, f"{doing} got no whole answer ({type(error).__name__})")
