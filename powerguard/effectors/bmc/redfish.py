"""The engine `redfish`: ComputerSystem.PowerRestorePolicy (schema 1.6, 2018.3), and what vendors have in its place.

Where neither the property nor a vendor's own is there, a BIOS attribute is read if it says the same: it can be changed
only by a job that a reboot carries out, so it is never written.

One conversation with a Redfish service over HTTPS: no redirect is followed, and each wait is limited.

DSP0266 is DMTF's "Redfish Specification". HTTP Basic and not a session (DSP0266 13.3.4): a session would have to be
closed, and a BMC that hangs would be left with it until none is free.
"""

import asyncio
import base64
import errno
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import aiohttp
from yarl import URL

from powerguard.clock import Clock, boottime_s
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.engine import BmcError, Ensured, Login, Probe, Refusals
from powerguard.effectors.bmc.ipmi import (
    BUSY_PAUSE_S,
    READ_BACK_S,
    BmcFailure,
    ChassisStatus,
    Failure,
    PowerRestorePolicy,
)
from powerguard.effectors.http import KnownNames, Verify, verifying
from powerguard.effectors.options import BmcOptions

MAX_BODY_BYTES: Final = 262_144
"""Largest answer that is read; a ComputerSystem takes 4 to 20 KB."""
_PATH: Final = re.compile(r"/redfish/[!-~]{0,1000}")
_MAX_RETRY_AFTER_S: Final = 2.0
_TRIES: Final = 3
_CUT: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError)
"""An open connection has ended without an answer; also, of the second kind, none could be opened."""
_MORE: Final = "@Message.ExtendedInfo"
_MAX_W: Final = 1e6
"""Watts that no single host draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource as read. etag: None where the service gives none."""

    path: str
    body: Mapping[str, Any]
    etag: str | None


@dataclass(slots=True)
class RedfishRequests:
    """One operation's requests. by_s: of CLOCK_BOOTTIME; the caller holds the operation to it, we only plan by it.

    doing: the request that is open. heard: the service has sent any answer. is_in: it has taken the login; accepted is
    called then.
    """

    session: aiohttp.ClientSession = field(repr=False)
    host: str
    port: int
    authorization: str = field(repr=False)
    by_s: float
    accepted: Callable[[], object] = tuple
    doing: str = "the connection"
    heard: bool = False
    is_in: bool = False

    async def get(self, path: str, *, login: bool = True) -> Resource:
        """Read a resource. Raises BmcFailure.

        login: False for the root, which everybody may read (DSP0266 13.3.1); a service that asks for it gets it.
        """
        status, headers, body = await self._patient("GET", path, login=login)
        if status == 401 and not login:
            status, headers, body = await self._patient("GET", path)
        if status != 200:
            raise _refusal(self.doing, status, body)
        if body is None:
            raise BmcFailure(Failure.PROTOCOL, f"GET {path}: the answer is not a JSON object")
        etag = headers.get("ETag") or body.get("@odata.etag")
        return Resource(path=path, body=body, etag=etag if isinstance(etag, str) and etag.isprintable() else None)

    async def patch(self, resource: Resource, change: Mapping[str, Any]) -> str:
        """Change a resource as it was read; if it has changed since, read it again. Raises BmcFailure.

        Returns the service's own words, if any: some acknowledge a change that they do not make, and say why.

        Only what reads back counts, so any 2xx will do (202: a task of its own). Services refuse ETags that still hold:
        a weak one matches nothing in If-Match (RFC 9110 section 13.1.1), and some Lenovo XCC take none at all.
        """
        etag, left = resource.etag, _TRIES
        while True:
            left -= 1
            status, _, body = await self._patient("PATCH", resource.path, change=change, etag=etag)
            if 200 <= status < 300:
                return _message(body)
            if status not in (412, 428) or not left:
                raise _refusal(self.doing, status, body)
            fresh = await self.get(resource.path)
            if fresh.etag != resource.etag:
                etag = fresh.etag
            else:
                etag = etag.removeprefix("W/") if etag is not None and etag.startswith("W/") else None
            resource = fresh

    async def post(self, path: str, parameters: Mapping[str, Any]) -> None:
        """Call an action. Raises BmcFailure. Any 2xx will do: the result is checked afterwards."""
        status, _, body = await self._patient("POST", path, change=parameters)
        if not 200 <= status < 300:
            raise _refusal(self.doing, status, body)

    async def pause(self, seconds: float) -> bool:
        """Wait, and say whether there was time for it."""
        if boottime_s() + seconds >= self.by_s:
            return False
        await asyncio.sleep(seconds)  # noqa: TID251 - a BMC does not report when it is ready; the caller's limit ends it
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
        host = f"[{self.host}]" if ":" in self.host else self.host  # an IPv6 address, RFC 3986 section 3.2.2
        url = URL.build(scheme="https", host=host, port=self.port, path=path, encoded=True)
        # Identity: no decompression, so that a small answer cannot become a large one.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "OData-Version": "4.0"}
        if login:
            headers["Authorization"] = self.authorization
        if etag is not None:
            headers["If-Match"] = etag
        send, was_heard = partial(self._answer, method, url, headers, change, login=login), self.heard
        try:
            try:
                return await send()
            except _CUT as error:
                # Some services close the connection after each answer and do not announce it. aiohttp repeats only what
                # reads; all that we change may be asked for twice.
                if not was_heard or isinstance(error, aiohttp.ClientConnectorError):
                    raise
                return await send()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failure(self.doing, error) from None

    async def _answer(
        self, method: str, url: URL, headers: Mapping[str, str], change: Mapping[str, Any] | None, *, login: bool
    ) -> tuple[int, Mapping[str, str], dict[str, Any] | None]:
        # Redirects are not followed: the login would go wherever they lead.
        async with self.session.request(method, url, json=change, headers=headers, allow_redirects=False) as answer:
            self.heard = True
            if login and 200 <= answer.status < 300:
                self.is_in = True
                self.accepted()
            return answer.status, answer.headers, _object(await _read(answer))


def session(verify: Verify, names: KnownNames) -> aiohttp.ClientSession:
    """Make a session for one operation. No proxy, no cookie, no netrc."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=verify, limit=1, use_dns_cache=False, resolver=names),
        timeout=aiohttp.ClientTimeout(total=None),  # the operation has one
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


def basic(user: str, password: bytes) -> str:
    """Make the Authorization header (RFC 7617, UTF-8)."""
    return "Basic " + base64.b64encode(user.encode() + b":" + password).decode("ascii")


def link(body: Mapping[str, Any], *names: str) -> str:
    """Path that a resource links to by these names. Raises BmcFailure if it is not a path of this service."""
    value: object = body
    for name in (*names, "@odata.id"):
        value = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, str) or not _PATH.fullmatch(value):
        raise BmcFailure(Failure.PROTOCOL, f"its {'.'.join(names) or 'member'} does not link to a path under /redfish/")
    return value


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = b""
    async for chunk in response.content.iter_chunked(65536):
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise BmcFailure(Failure.PROTOCOL, f"an answer is longer than {MAX_BODY_BYTES} bytes")
    return content


def _object(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _retry_after_s(header: str | None) -> float:
    """Seconds to wait; for a date or a missing value as long as for IPMI's "busy"."""
    if header is not None and header.isascii() and header.isdecimal() and len(header) < 6:
        return min(max(float(header), BUSY_PAUSE_S), _MAX_RETRY_AFTER_S)
    return BUSY_PAUSE_S


_MEANINGS: Final = {
    400: (Failure.UNSUPPORTED, "refused"),
    401: (Failure.AUTH, "login refused"),
    403: (Failure.PRIVILEGE, "not permitted to this account"),
    404: (Failure.PROTOCOL, "is not there"),
    405: (Failure.UNSUPPORTED, "cannot be changed"),
    412: (Failure.BUSY, "was changed by another client each time"),
    428: (Failure.PROTOCOL, "requires an ETag, but sent none that it accepts"),
    500: (Failure.PROTOCOL, "failed inside the service"),
    501: (Failure.UNSUPPORTED, "is not implemented"),
    503: (Failure.BUSY, "is not ready"),
}


def _refusal(doing: str, status: int, body: Mapping[str, Any] | None) -> BmcFailure:
    failure, meaning = _MEANINGS.get(status, (Failure.PROTOCOL, "was answered with an unexpected status"))
    if 300 <= status < 400:
        meaning = "redirects, which is not followed"
    message = _message(body)
    return BmcFailure(failure, f"{doing}: {meaning} (HTTP {status}{f': {message}' if message else ''})")


def _message(body: Mapping[str, Any] | None) -> str:
    """The service's words on a request or a property (DSP0266 8.6), shortened and without control characters."""
    body = body or {}
    error = body.get("error")
    error = error if isinstance(error, Mapping) else {}
    more = (error.get(_MORE), *(value for name, value in body.items() if name.endswith(_MORE)))
    first = next((each[0] for each in more if isinstance(each, list) and each and isinstance(each[0], Mapping)), {})
    message = first.get("Message") or first.get("MessageId") or error.get("message")
    return "".join(c if c.isprintable() else " " for c in message[:160]).strip() if isinstance(message, str) else ""


def _failure(doing: str, error: Exception) -> BmcFailure:
    """Say what went wrong. Texts of errors are not passed on: they may hold headers that we sent."""
    if isinstance(error, aiohttp.ServerFingerprintMismatch):
        return BmcFailure(Failure.SETTINGS, f"its certificate is not the pinned one, but sha256 {error.got.hex()}")
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        reason = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else type(cause).__name__
        return BmcFailure(Failure.SETTINGS, f"its certificate does not verify ({reason})")
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return BmcFailure(Failure.PROTOCOL, "the service does not speak TLS, or only an unsafe version")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return BmcFailure(Failure.UNREACHABLE, "the name does not resolve")
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return BmcFailure(Failure.UNREACHABLE, f"no connection ({errno.errorcode.get(number or 0, 'unknown reason')})")
    return BmcFailure(Failure.PROTOCOL, f"{doing} got an incomplete answer ({type(error).__name__})")


ROOT: Final = "/redfish/v1/"
MAX_SYSTEMS: Final = 64

_REMEDIES: Final = {
    Failure.UNREACHABLE: "check that the BMC is powered and reachable from here, its address and https_port, and that "
    "Redfish is enabled",
    Failure.AUTH: "check bmc.user and bmc.password, and that the BMC permits this account Redfish with HTTP Basic",
    Failure.PRIVILEGE: "the account may log in but not do this: if the BMC asks for it, change its first password; "
    "else give it the role Operator, or in a role of the vendor the right to configure the system",
    Failure.UNSUPPORTED: "this board has no such setting over Redfish: try kind: auto, or set 'restore on AC "
    "power loss' to always on in its firmware setup",
    Failure.BUSY: "the BMC is busy (starting, or updating its firmware): it is asked again at the next check",
    Failure.TIMEOUT: "the BMC hangs or its network failed: reset the BMC if this continues",
    Failure.MISMATCH: "the BMC did not store it, or not yet: set it in the firmware setup, and update the firmware",
    Failure.PROTOCOL: "this is not a known kind of Redfish service: check with curl https://HOST/redfish/v1/",
    Failure.HELD: "find the other program that uses it",
    Failure.SETTINGS: "see bmc.ca, bmc.fingerprint and bmc.system (docs/guides/bmc.md)",
}


@dataclass(frozen=True, slots=True)
class PolicyProperty:
    """A property of a ComputerSystem that holds the policy. path: names from the outermost in."""

    path: tuple[str, ...]
    words: Mapping[PowerRestorePolicy, str]

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return ".".join(self.path)

    def word(self, system: Mapping[str, Any]) -> object:
        """The value; None if it is absent."""
        value: object = system
        for name in self.path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def policy(self, system: Mapping[str, Any]) -> PowerRestorePolicy:
        """The policy, in our words."""
        word = self.word(system)
        return next((policy for policy, value in self.words.items() if value == word), PowerRestorePolicy.UNKNOWN)

    def change(self, wanted: PowerRestorePolicy) -> dict[str, Any]:
        """Body of a PATCH."""
        body: Any = self.words[wanted]
        for name in reversed(self.path):
            body = {name: body}
        return dict(body)

    def supported(self, system: Mapping[str, Any]) -> frozenset[PowerRestorePolicy]:
        """Values it can be set to: those that the service lists (DSP0266 9.5.2), else all that the schema knows."""
        outer: object = system
        for name in self.path[:-1]:
            outer = outer.get(name) if isinstance(outer, Mapping) else None
        listed = outer.get(f"{self.path[-1]}@Redfish.AllowableValues") if isinstance(outer, Mapping) else None
        values = listed if isinstance(listed, list) else list(self.words.values())
        return frozenset(policy for policy, word in self.words.items() if word in values)


_ON, _OFF, _LAST = PowerRestorePolicy.ALWAYS_ON, PowerRestorePolicy.ALWAYS_OFF, PowerRestorePolicy.LAST_STATE
KNOBS: Final = (
    PolicyProperty(("PowerRestorePolicy",), {_ON: "AlwaysOn", _OFF: "AlwaysOff", _LAST: "LastState"}),
    # HPE iLO 5 and 6, iLO 4 (their references of ComputerSystem, and recorded services).
    *(
        PolicyProperty(("Oem", vendor, "PowerAutoOn"), {_ON: "PowerOn", _OFF: "RemainOff", _LAST: "Restore"})
        for vendor in ("Hpe", "Hp")
    ),
)

# Attributes of a Bios resource, in lower case and with letters only, and their values likewise. Dell up to iDRAC 9:
# AcPwrRcvry; Supermicro: "Restore on AC Power Loss", with some generations' suffixes. Not seen on hardware by us.
_BIOS_NAMES: Final = ("acpwrrcvry", "restoreonacpowerloss")
_BIOS_WORDS: Final = {
    "on": _ON,
    "poweron": _ON,
    "alwayson": _ON,
    "off": _OFF,
    "stayoff": _OFF,
    "alwaysoff": _OFF,
    "last": _LAST,
    "laststate": _LAST,
}


@dataclass(frozen=True, slots=True)
class _Seen:
    """A system as read. knob: None if it has none of them; then `bios` says what was read instead, or why not."""

    system: Resource
    knob: PolicyProperty | None
    policy: PowerRestorePolicy
    bios: str = ""

    def status(self) -> ChassisStatus:
        # PoweringOff is a host that still stops: only the two lasting states count.
        state = str(self.system.body.get("PowerState"))
        return ChassisStatus(power_on={"On": True, "Off": False}.get(state), policy=self.policy)

    def unsupported(self) -> BmcFailure:
        if self.bios:
            text = f"{self.bios}; powerguard only reads BIOS attributes, because they change only with a reboot"
        else:
            text = f"{self.system.path} has none of {', '.join(knob.name for knob in KNOBS)}"
        return BmcFailure(Failure.UNSUPPORTED, text)


class RedfishEngine:
    """Redfish over HTTPS. Verified by its certificate authority, or by the fingerprint of its own certificate."""

    kind = "redfish"

    def __init__(self, options: BmcOptions, *, clock: Clock = boottime_s, refusals: Refusals | None = None) -> None:
        """options: of a kind that needs host, user and password. clock, refusals: as of `Login`."""
        if options.host is None or options.user is None or options.password is None:
            msg = "redfish needs host, user and password"
            raise ValueError(msg)
        self._host = options.host
        self._options = options
        self._login = Login(options.user, options.password, where=self.where, clock=clock, refusals=refusals)
        self._names = KnownNames()
        self._verify: Verify | None = None
        self._path: str | None = None

    async def ensure(self, wanted: PowerRestorePolicy, by_s: float) -> Ensured:
        return await self._set(wanted, by_s, None)

    async def put_back(self, wanted: PowerRestorePolicy, by_s: float) -> Ensured:
        return await self._set(wanted, by_s, PowerRestorePolicy.ALWAYS_ON)

    async def power_watts(self, by_s: float) -> float | None:
        """Read it of the one chassis that the system is in; None where there are several: they may hold others too."""
        async with self._talk(by_s) as talk:
            links = (await self._system(talk)).body.get("Links")
            chassis = links.get("Chassis") if isinstance(links, Mapping) else None
            if not isinstance(chassis, list) or len(chassis) != 1 or not isinstance(chassis[0], Mapping):
                return None
            body = (await talk.get(link(chassis[0]))).body
            watts: float | None = None
            if "EnvironmentMetrics" in body:
                try:
                    metrics = await talk.get(link(body, "EnvironmentMetrics"))
                    watts = _reading(metrics.body, "PowerWatts", "Reading")
                except BmcFailure:  # some services link to one that needs a license, or that is not there
                    watts = None
            if watts is not None or "Power" not in body:
                return watts
            controls = (await talk.get(link(body, "Power"))).body.get("PowerControl")
            first = controls[0] if isinstance(controls, list) and controls else None
            return _reading({"first": first}, "first", "PowerConsumedWatts")

    async def _set(self, wanted: PowerRestorePolicy, by_s: float, only_over: PowerRestorePolicy | None) -> Ensured:
        async with self._talk(by_s) as talk:
            seen = await self._look(talk)
            before = seen.status()
            if seen.policy is wanted or seen.policy is not (only_over or seen.policy):
                return Ensured(before=before, after=before, changed=False)
            knob = seen.knob
            if knob is None:
                raise seen.unsupported()
            if wanted not in knob.supported(seen.system.body):
                raise BmcFailure(Failure.UNSUPPORTED, f"{knob.name} cannot be set to {knob.words[wanted]}")
            message = await talk.patch(seen.system, knob.change(wanted))
            waited_s, found = 0.0, PowerRestorePolicy.UNKNOWN
            for at_s in READ_BACK_S:
                if at_s and not await talk.pause(at_s - waited_s):
                    break
                waited_s = at_s
                seen = _seen(await talk.get(seen.system.path))
                found = seen.policy
                if found is wanted:
                    return Ensured(before=before, after=seen.status(), changed=True)
            text = f"acknowledged {wanted} but still reads {found} {waited_s:g} s later"
            text += f" (it said: {message})" if message else ""
            raise self._error(Failure.MISMATCH, text).having_read(found)

    async def status(self, by_s: float) -> ChassisStatus:
        async with self._talk(by_s) as talk:
            return (await self._look(talk)).status()

    async def probe(self, by_s: float, *, ask_support: bool) -> Probe:  # noqa: ARG002 - the answer costs no question
        """Redfish lists the supported policies in the same answer, and does not report the cause of a restart."""
        async with self._talk(by_s) as talk:
            seen = await self._look(talk)
        supported = frozenset() if seen.knob is None else seen.knob.supported(seen.system.body)
        return Probe(status=seen.status(), supported=supported, restart_cause=None)

    @property
    def where(self) -> str:
        """The BMC's address, for messages."""
        return f"BMC {self._host} port {self._options.https_port}"

    def _error(self, failure: Failure, seen: str) -> BmcError:
        return BmcError(f"{self.where}: {seen}; {_REMEDIES[failure]}", failure)

    async def _look(self, talk: RedfishRequests) -> _Seen:
        """Read the policy; of a BIOS only if there is no other source."""
        seen = _seen(await self._system(talk))
        if seen.knob is not None or "Bios" not in seen.system.body:
            return seen
        try:
            bios = await talk.get(link(seen.system.body, "Bios"))
        except BmcFailure as refused:  # some services link to one that needs a license, or that is not there
            return _Seen(seen.system, None, seen.policy, str(refused))
        return _with_bios(seen, bios.body)

    async def _system(self, talk: RedfishRequests) -> Resource:
        """Find the one system that is ours, and read it.

        Where it was found is kept: some services take a second for each answer, and an outage leaves five for all.
        """
        if self._path is not None:
            try:
                return await talk.get(self._path)
            except BmcFailure as failed:
                if failed.failure is not Failure.PROTOCOL:
                    raise
        root = await talk.get(ROOT, login=False)
        systems = await talk.get(link(root.body, "Systems"))
        self._path = self._chosen(systems)
        return await talk.get(self._path)

    def _chosen(self, systems: Resource) -> str:
        """Path of the one system, or of the one that the settings name: never guessed. Raises BmcFailure."""
        members = systems.body.get("Members")
        entries = [each for each in members if isinstance(each, Mapping)] if isinstance(members, list) else []
        paths = [link(each) for each in entries[:MAX_SYSTEMS]]
        names = {path.rstrip("/").rpartition("/")[2]: path for path in paths}
        known = ", ".join([*names][:8]) or "none"
        # One of a list that goes on elsewhere (DSP0266 7.5.2) is not the only one.
        count = systems.body.get("Members@odata.count")
        is_all = not isinstance(count, int) or count <= len(paths)
        wanted = self._options.system
        if wanted is not None:
            if wanted not in names:
                raise BmcFailure(Failure.SETTINGS, f"bmc.system is {wanted}, but the service has: {known}")
            return names[wanted]
        if len(paths) == 1 and is_all:
            return paths[0]
        if not paths:
            raise BmcFailure(Failure.UNSUPPORTED, f"{systems.path} does not list a system")
        raise BmcFailure(Failure.SETTINGS, f"has several systems: set bmc.system to one of {known}")

    @asynccontextmanager
    async def _talk(self, by_s: float) -> AsyncIterator[RedfishRequests]:
        """Hold one operation to its deadline. Every failure becomes a BmcError."""
        talk: RedfishRequests | None = None
        async with self._login.attempt(by_s, self._error) as password:
            try:
                async with asyncio.timeout(max(by_s - boottime_s(), 0.0)):
                    async with session(await self._verifying(), self._names) as open_session:
                        talk = self._begin(open_session, password, by_s)
                        yield talk
            except TimeoutError:
                if talk is None or not talk.heard:
                    raise self._error(Failure.UNREACHABLE, "no answer") from None
                raise self._error(Failure.TIMEOUT, f"answered, then fell silent during {talk.doing}") from None
            except BmcFailure as failed:
                text = str(failed)
                if failed.failure is Failure.SETTINGS:
                    self._verify = None  # read bmc.ca again: the authority may have been renewed since
                # After an answer to this login, 401 is about one resource: some give it for want of a license.
                if failed.failure is Failure.AUTH and talk is not None and not talk.is_in:
                    text += f"; {self._login.refuse(password)}"
                raise self._error(failed.failure, text) from None

    def _begin(self, open_session: aiohttp.ClientSession, password: bytes, by_s: float) -> RedfishRequests:
        return RedfishRequests(
            open_session,
            self._host,
            self._options.https_port,
            basic(self._login.user, password),
            by_s,
            accepted=lambda: self._login.accept(password),
        )

    async def _verifying(self) -> Verify:
        """The TLS check that proves that it is our BMC. Raises BmcError."""
        if self._verify is None:
            try:
                self._verify = await verifying("bmc", self._options.fingerprint, self._options.ca)
            except EffectorError as error:
                raise BmcError(str(error), Failure.SETTINGS) from None
        return self._verify


def _reading(body: Mapping[str, Any], outer: str, name: str) -> float | None:
    """Watts of a property (DSP0268: EnvironmentMetrics.PowerWatts.Reading, Power.PowerControl.PowerConsumedWatts)."""
    within = body.get(outer)
    value = within.get(name) if isinstance(within, Mapping) else None
    # A host that answers draws something: services write 0 where they have not measured yet.
    return (
        float(value) if isinstance(value, int | float) and 0 < value < _MAX_W and not isinstance(value, bool) else None
    )


def _seen(system: Resource) -> _Seen:
    for knob in KNOBS:
        if knob.word(system.body) is not None:
            return _Seen(system, knob, knob.policy(system.body))
    return _Seen(system, None, PowerRestorePolicy.UNKNOWN)


def _with_bios(seen: _Seen, bios: Mapping[str, Any]) -> _Seen:
    attributes, found = bios.get("Attributes"), seen
    for name, value in attributes.items() if isinstance(attributes, Mapping) else ():
        if _letters(name).startswith(_BIOS_NAMES) and isinstance(value, str):
            policy = _BIOS_WORDS.get(_letters(value), PowerRestorePolicy.UNKNOWN)
            read = _Seen(seen.system, None, policy, f"BIOS attribute {name[:80]} reads {value[:80]!r}")
            if policy is not PowerRestorePolicy.UNKNOWN:
                return read
            found = found if found.bios else read  # AcPwrRcvryDelay begins like it, and may come first
    return found


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if "a" <= c <= "z")
