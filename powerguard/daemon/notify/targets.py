"""Delivery of one message to one target, by the target's kind. Each ends in what the other side said, or a failure."""

import asyncio
import errno
import json
import socket
import ssl
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import PurePath
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from powerguard.clock import boottime_s
from powerguard.daemon.journal.journal import WorkerThread, in_thread
from powerguard.daemon.notify.answer import MAX_ANSWER_BYTES, REDIRECTED, error_in, one_line, redact
from powerguard.daemon.notify.composer import Message, is_wanted
from powerguard.effectors.child import Ended, Spawn, clean_environment
from powerguard.options import Secret, SecretError
from powerguard.settings.notify import (
    JSON,
    AlertmanagerOptions,
    AppriseOptions,
    CommandOptions,
    MailOptions,
    TargetOptions,
    TemplateError,
    WebhookOptions,
    fill,
    read_template,
)

CHILD: Final = (sys.executable, "-P", "-m", "powerguard.daemon.notify.child")
RESEND_S: Final = 60.0
LASTS_S: Final = 300.0
"""An alert that stands ends by itself after this long unless it is sent again."""
AWAY_S: Final = 86400.0
"""The same while the host is powered off and cannot send."""
CLOCKS_APART_S: Final = 60.0
"""Difference of two clocks that matters for how long an alert lasts."""
GRACE_S: Final = 1.0
"""From a program's limit to that of its delivery, so that what the program has printed is still read."""
EVENT_S: Final = 900.0
"""How long an alert of something that only happened stands."""
_SEVERITY: Final = {"error": "critical", "warning": "warning", "info": "info"}


class DeliveryError(Exception):
    """A message did not arrive, and why, without a secret. refused: it would be refused again.

    again_s: seconds after which the other side wants to be asked again; None: it does not say.
    """

    def __init__(self, why: str, *, refused: bool = False, again_s: float | None = None) -> None:
        super().__init__(why)
        self.refused = refused
        self.again_s = again_s


class Target(ABC):
    """A target of messages. Blocking work (secrets, names, certificates) has a thread, which may hang.

    folds: it gets the messages of an outage that are late as one.
    """

    folds = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread = WorkerThread(f"powerguard-notify {name}")
        self.secrets: list[str] = []
        """Those that were read, also older ones: an answer on its way may hold them."""

    @abstractmethod
    async def deliver(self, message: Message, limit_s: float) -> str:
        """Deliver; return the answer. Raises DeliveryError. limit_s: of a program; the caller ends the rest."""

    async def read(self, key: str, secret: Secret) -> str:
        """Return a secret. Raises DeliveryError."""
        try:
            text = (await in_thread(self.thread, secret.read)).decode()
        except SecretError as error:
            msg = f"notify.targets.{self.name}.{key}: {error}"
            raise DeliveryError(msg) from None
        except UnicodeDecodeError:
            msg = f"notify.targets.{self.name}.{key}: is not text"
            raise DeliveryError(msg) from None
        if text not in self.secrets:
            self.secrets.append(text)
        return text

    async def refresh(self) -> str:
        """Say again what stands, where that is wanted; return the answer, "" for nothing. Raises DeliveryError."""
        return ""

    def close(self) -> None:
        """End the thread; one that hangs is left behind."""
        self.thread.close(0.0)


class _Resolver(AbstractResolver):
    """Names are resolved in the target's own thread: asyncio's are few, and others must not wait for a dead DNS."""

    def __init__(self, thread: WorkerThread) -> None:
        self._thread = thread

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await in_thread(
            self._thread, lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
        )
        return [
            ResolveResult(
                hostname=host,
                host=str(where[0]),
                port=int(where[1]),
                family=kind,
                proto=proto,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, proto, _, where in found
        ]

    async def close(self) -> None:
        """Hold nothing."""


class _Http(Target):
    """POST over HTTP and HTTPS: verified, without redirects to other hosts, cookies and proxies of the environment."""

    answered: tuple[float, float] | None = None
    """When the last answer came: by the clock of the other side (its Date), and by this host's that is never set."""
    _tls: ssl.SSLContext | None = None

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        content_type: str = JSON,
        authorization: str | None = None,
        ca_file: str | None = None,
        proxy: str | None = None,
    ) -> tuple[bytes, str]:
        """Return the body of a successful answer, and how to show it. Raises DeliveryError."""
        headers = {"Content-Type": content_type, "User-Agent": "powerguard"}
        if authorization is not None:
            headers["Authorization"] = authorization
        try:
            if self._tls is None:
                self._tls = await in_thread(self.thread, lambda: ssl.create_default_context(cafile=ca_file))
            connector = aiohttp.TCPConnector(
                ssl=self._tls, resolver=_Resolver(self.thread), force_close=True, use_dns_cache=False
            )
            async with aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
            ) as session:
                return await self._exchange(session, url, body, headers, proxy)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, aiohttp.ClientConnectorCertificateError):
                self._tls = None  # read ca_file again next time: the authority may have been renewed
            # From None: its text, and what it was raised from, may hold the URL.
            raise DeliveryError(_failure(error, ca_file)) from None

    async def _exchange(
        self, session: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str], proxy: str | None
    ) -> tuple[bytes, str]:
        async with session.post(url, data=body, headers=headers, proxy=proxy, allow_redirects=False) as response:
            content = b""
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) >= MAX_ANSWER_BYTES:
                    break
        date = _date(response.headers.get("Date"))
        self.answered = None if date is None else (date, boottime_s())
        answer = f"{response.status} {one_line(content, self.secrets)}".strip()
        if 200 <= response.status < 300:
            return content, answer
        if 300 <= response.status < 400:
            raise DeliveryError(REDIRECTED, refused=True)
        refused = response.status < 500 and response.status not in (408, 425, 429)
        raise DeliveryError(answer, refused=refused, again_s=_seconds(response.headers.get("Retry-After")))


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() and len(text) < 6 else None


def _date(text: str | None) -> float | None:
    """Unix seconds of a Date header; None if there is none."""
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _failure(error: Exception, ca_file: str | None) -> str:
    """Say what went wrong, without the error's own text."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        reason = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else type(cause).__name__
        return f"its certificate does not verify ({reason}): see ca_file"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError) and not isinstance(
        error, aiohttp.ClientConnectorSSLError
    ):
        return f"{ca_file}: cannot be read as certificates"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return "what listens there does not speak TLS"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return f"its proxy refuses the connection (HTTP {error.status})"
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return "its URL is not one (http://... or https://...)"
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        return "its name does not resolve"
    if isinstance(error, aiohttp.ClientConnectorError):
        where = " to its proxy" if isinstance(error, aiohttp.ClientProxyConnectionError) else ""
        return f"no connection{where} ({errno.errorcode.get(error.os_error.errno or 0, 'unknown reason')})"
    if isinstance(error, FileNotFoundError | PermissionError) and ca_file is not None:
        return f"{ca_file}: {error.strerror}"
    return f"no whole answer ({type(error).__name__})"


class Webhook(_Http):
    """Kind `webhook`."""

    def __init__(self, name: str, options: WebhookOptions) -> None:
        super().__init__(name)
        self._options = options

    async def deliver(self, message: Message, limit_s: float) -> str:  # noqa: ARG002 - the caller ends it
        options = self._options
        url = await self.read("url", options.url)
        authorization = None
        if options.authorization is not None:
            authorization = await self.read("authorization", options.authorization)
        content, answer = await self.post(
            url,
            await self._body(message),
            content_type=options.content_type,
            authorization=authorization,
            ca_file=options.ca_file,
            proxy=options.proxy,
        )
        if error_in(content):
            raise DeliveryError(answer, refused=True)
        return answer

    async def _body(self, message: Message) -> bytes:
        if self._options.template is None:
            return json.dumps(message.plain(), ensure_ascii=False).encode()
        try:
            template = await in_thread(self.thread, lambda: read_template(self._options))
        except TemplateError as error:
            raise DeliveryError(str(error), refused=True) from None
        except OSError as error:
            msg = f"{self._options.template}: {error.strerror}"
            raise DeliveryError(msg, refused=True) from None
        plain = message.plain() | {"at": _iso(message.at)}
        return fill(template, {name: str(value) for name, value in plain.items()}, self._options.content_type).encode()


class Alertmanager(_Http):
    """Kind `alertmanager`: an alert begins, is sent again while it stands, and is ended.

    Its times are by the clock of the other side, which judges by that whether it is over.
    """

    folds = False

    def __init__(
        self, name: str, options: AlertmanagerOptions, wall: Callable[[], float], standing: Mapping[str, Message]
    ) -> None:
        super().__init__(name)
        self._options = options
        self._wall = wall
        self._standing = standing

    async def deliver(self, message: Message, limit_s: float) -> str:  # noqa: ARG002 - the caller ends it
        lasts_s = 0.0 if message.status == "end" else EVENT_S
        if message.key in self._standing and message.status != "end":
            lasts_s = self._lasts_s()
        return await self._send(lambda: [self._alert(message, lasts_s), *self._others(message.key)])

    async def refresh(self) -> str:
        return await self._send(self._others) if self._others() else ""

    def _others(self, but: str = "") -> list[dict[str, Any]]:
        """Return the alerts that stand, of those that this target gets."""
        wanted = {key: each for key, each in self._standing.items() if is_wanted(each, self._options.alarms)}
        return [self._alert(each, self._lasts_s()) for key, each in wanted.items() if key != but]

    def _lasts_s(self) -> float:
        """Return how long an alert stands that is not sent again: a host that is powered off cannot send."""
        return AWAY_S if any(key.startswith("power_off:") for key in self._standing) else LASTS_S

    def _alert(self, message: Message, lasts_s: float) -> dict[str, Any]:
        what, _, name = message.key.partition(":")
        name = what if message.story else name.partition(":")[0]
        # The labels are the alert's identity: the same at its begin and its end.
        severity = {"outage": "warning", "power_off": "critical"}.get(what, _SEVERITY[message.level])
        labels = {
            "alertname": "Powerguard" + "".join(part.capitalize() for part in name.split("_")),
            "host": message.host,
            "severity": severity,
            "key": message.key,
            "source": "powerguard",
        }
        ahead_s = self._ahead_s()
        ends = self._wall() + ahead_s + lasts_s
        return {
            "labels": {**labels, **self._options.labels},
            "annotations": {"summary": message.title, "description": message.text},
            "startsAt": _iso(min(message.at + ahead_s, ends)),
            "endsAt": _iso(ends),
        }

    def _ahead_s(self) -> float:
        """Return how far its clock is ahead of this host's; 0 while that is not known, or does not matter."""
        if self.answered is None:
            return 0.0
        date, at_s = self.answered
        ahead_s = date + boottime_s() - at_s - self._wall()
        return ahead_s if abs(ahead_s) >= CLOCKS_APART_S else 0.0

    async def _send(self, alerts: Callable[[], list[dict[str, Any]]]) -> str:
        """Send alerts; again, if the answer shows that the clocks are not as far apart as was assumed."""
        options = self._options
        authorization = None
        if options.authorization is not None:
            authorization = await self.read("authorization", options.authorization)
        url = f"{options.url}/api/v2/alerts"
        for _ in range(2):
            assumed_s = self._ahead_s()
            body = json.dumps(alerts()).encode()
            _, answer = await self.post(url, body, authorization=authorization, ca_file=options.ca_file)
            if abs(self._ahead_s() - assumed_s) < CLOCKS_APART_S:
                break
        return answer


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Program(Target):
    """Kind `command`: a program that gets the message on its stdin, and is killed at its limit."""

    def __init__(self, name: str, options: CommandOptions | MailOptions | AppriseOptions, spawn: Spawn) -> None:
        super().__init__(name)
        self._options = options
        self._spawn = spawn

    async def deliver(self, message: Message, limit_s: float) -> str:
        argv = self._options.command if isinstance(self._options, CommandOptions) else CHILD
        ended = await self._run(argv, message.plain(), clean_environment(), limit_s)
        has_failed = ended.returncode != 0
        output = ended.stderr or ended.stdout if has_failed else ended.stdout or ended.stderr
        lines = output.strip().splitlines() or [b""]
        line = one_line(lines[-1 if has_failed else 0])  # a Python program says last why it failed
        answer = f"exit status {ended.returncode}" + (f": {line}" if line else "")
        if has_failed:
            raise DeliveryError(answer)
        return answer

    async def _run(
        self, argv: Sequence[str], request: Mapping[str, Any], env: Mapping[str, str], limit_s: float
    ) -> Ended:
        body = json.dumps(request, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"
        try:
            ended = await self._spawn(argv, limit_s=limit_s, stdin=body, env=env)
        except OSError as error:
            msg = f"{PurePath(argv[0]).name}: {error.strerror}"
            raise DeliveryError(msg) from None
        if ended.timed_out:
            msg = f"no answer within {limit_s:g} s"
            raise DeliveryError(msg)
        return ended


class Child(Program):
    """Kinds `mail` and `apprise`: a child of our own for each message."""

    async def deliver(self, message: Message, limit_s: float) -> str:
        options = self._options
        key, secret = ("url", options.url) if isinstance(options, AppriseOptions) else ("password", None)
        if isinstance(options, MailOptions):
            secret = options.password
        request = {
            "kind": options.kind,
            "message": message.plain(),
            "limit_s": limit_s,
            "options": options.model_dump(mode="json"),
            "secret": None if secret is None else await self.read(key, secret),
        }
        ended = await self._run(CHILD, request, self._environment(), limit_s)
        try:
            reply = json.loads(ended.stdout)
            ok, answer, refused = bool(reply["ok"]), redact(str(reply["answer"]), self.secrets), bool(reply["refused"])
        except (ValueError, KeyError, TypeError):
            msg = f"its process ended with status {ended.returncode} and no answer"
            raise DeliveryError(msg) from None
        if not ok:
            raise DeliveryError(answer, refused=refused)
        return answer

    def _environment(self) -> dict[str, str]:
        """Return the child's environment; it names the proxy and the authorities for Apprise."""
        kept = {name: value for name, value in clean_environment().items() if not name.lower().endswith("_proxy")}
        if isinstance(self._options, AppriseOptions):
            proxy, ca_file = self._options.proxy, self._options.ca_file
            kept |= {} if proxy is None else {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy}
            kept |= {} if ca_file is None else {"REQUESTS_CA_BUNDLE": ca_file}
        return kept


def make(
    name: str, options: TargetOptions, *, spawn: Spawn, wall: Callable[[], float], standing: Mapping[str, Message]
) -> Target:
    """Make a target; its thread starts now, since threads may fail to start when memory is short.

    standing: what has begun and not ended, at any later time.
    """
    match options:
        case WebhookOptions():
            return Webhook(name, options)
        case AlertmanagerOptions():
            return Alertmanager(name, options, wall, standing)
        case CommandOptions():
            return Program(name, options, spawn)
        case MailOptions() | AppriseOptions():
            return Child(name, options, spawn)


async def bounded(work: Awaitable[str], limit_s: float) -> str:
    """Deliver within limit_s; return what the other side said. Raises DeliveryError, in which no secret stands."""
    try:
        # Later than a program's own limit: at that, one that has ended but left a child with its output has delivered.
        async with asyncio.timeout(limit_s + GRACE_S):
            return await work
    except TimeoutError:
        msg = f"no answer within {limit_s:g} s"
        raise DeliveryError(msg) from None
    except DeliveryError:
        raise
    except Exception as error:  # noqa: BLE001 - its text may hold a URL, and it is raised again without it
        msg = f"a mistake of powerguard's ({type(error).__name__}); please report it"
        raise DeliveryError(msg) from None
