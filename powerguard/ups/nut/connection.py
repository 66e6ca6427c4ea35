"""One connection to upsd: requests go out, answers come back in order; unexpected data ends it.

Every wait has a limit. An answer that comes too late is passed over when it comes, so that a hiccup costs a poll and
not the connection, and with it the login.

One connection to upsd on which something is ordered: variables set, a command given, and heard how it went.

upsd's OK means "handed to the driver" only. With `SET TRACKING ON` (NUT 2.8) it names each order, and reports the
driver's result; without that, only what can be read back afterwards counts.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from powerguard.options import SecretError
from powerguard.ups.base import Resolver, why_not_found
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.nut.protocol import Answer, Decoder, Err, Line, NutError, Ok, Table, encode
from powerguard.ups.profiles.vocabulary import DeviceError

_CLOSE_S: Final = 0.5
_QUICK_ACK: Final = getattr(socket, "TCP_QUICKACK", None)


class LinkError(Exception):
    """The connection is gone or cannot be had: one line for the operator, which names upsd's address."""


class TlsError(LinkError):
    """TLS cannot be had or verified: another certificate, name, authority or time than there should be."""


class LateError(Exception):
    """No whole answer within the limit. The connection stands; what comes late is passed over."""


class _Wire(asyncio.Protocol):
    """The protocol's end of the connection. Unexpected answers end it: they belong to no request."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self.answers: deque[Answer] = deque()
        self.owed = 0
        self.failure = ""
        self.changed = asyncio.Event()
        self._on_lost = on_lost
        self.closed = asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self._decoder = Decoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.failure:
            return
        try:
            got = self._decoder.feed(data)
        except NutError as error:
            self.fail(str(error))
            return
        self.owed -= len(got)
        if self.owed < 0 or (self.owed == 0 and not self._decoder.is_between):
            self.fail("upsd sent an unexpected answer")
            return
        self.answers.extend(got)
        if self.owed:
            self._acknowledge()
        else:
            self.changed.set()

    def _acknowledge(self) -> None:
        """Acknowledge at once: upsd writes line by line, and each waits for the one before (Nagle): 44 ms a poll."""
        peer = None if self.transport is None else self.transport.get_extra_info("socket")
        if peer is not None and _QUICK_ACK is not None:
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail("upsd closed the connection" if exc is None else f"the connection broke ({_reason(exc)})")
        self.closed.set()

    def fail(self, reason: str) -> None:
        """Give the connection up; the first reason stands."""
        if not self.failure:
            self.failure = reason
            if self.transport is not None:
                self.transport.abort()
            self._on_lost()
        self.changed.set()


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or "TLS failed").replace("_", " ").lower()
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return type(error).__name__


class Link:
    """One open connection. where: upsd's address as the operator knows it."""

    def __init__(self, wire: _Wire, where: str) -> None:
        """Take a wire that is connected."""
        self._wire = wire
        self._where = where
        self.is_verified = False
        """Whether TLS is on, with a certificate that was verified."""

    @classmethod
    async def open(
        cls, addresses: Sequence[str], port: int, where: str, *, limit_s: float, on_lost: Callable[[], None]
    ) -> "Link":
        """Connect to the first address that answers. on_lost: called when the connection ends. Raises LinkError."""
        loop = asyncio.get_running_loop()
        reason = "it has no address"
        for address in addresses:
            wire = _Wire(on_lost)
            try:
                async with asyncio.timeout(limit_s):
                    await loop.create_connection(lambda wire=wire: wire, address, port)  # type: ignore[misc]
            except TimeoutError:
                reason = f"no answer in {limit_s:g} s"
            except (socket.gaierror, UnicodeError) as error:
                msg = f"cannot connect to {where}: {why_not_found(error)}"
                raise LinkError(msg) from error
            except OSError as error:
                reason = os.strerror(error.errno).lower() if error.errno else type(error).__name__
            else:
                return cls(wire, where)
        msg = f"cannot connect to {where}: {reason} (is upsd running, and does its LISTEN line name this address?)"
        raise LinkError(msg)

    @property
    def failure(self) -> str:
        """Why the connection is gone; "" while it stands."""
        return self._wire.failure

    async def ask(self, *requests: bytes, limit_s: float) -> list[Answer]:
        """Send requests in one go and return their answers. Raises LateError or LinkError."""
        wire = self._wire
        try:
            async with asyncio.timeout(limit_s):
                while wire.owed:
                    await self._wait()
                wire.answers.clear()
                self._check()
                if wire.transport is not None:
                    wire.owed = len(requests)
                    wire.transport.write(b"".join(requests))
                while wire.owed:
                    await self._wait()
                self._check()
        except TimeoutError as error:
            raise LateError from error
        answers = list(wire.answers)
        wire.answers.clear()
        return answers

    async def _wait(self) -> None:
        self._check()
        self._wire.changed.clear()
        await self._wire.changed.wait()
        self._check()

    def _check(self) -> None:
        if self._wire.failure:
            msg = f"{self._where}: {self._wire.failure}"
            raise LinkError(msg)

    async def start_tls(self, context: ssl.SSLContext, host: str, *, limit_s: float) -> Err | None:
        """Go on under TLS, verified for host. Return upsd's answer when it has none to offer. Raises LinkError.

        Bytes that came after the answer in clear text have ended the connection already: they would count as sent under
        TLS, from any sender.
        """
        wire = self._wire
        answer = (await self.ask(encode("STARTTLS"), limit_s=limit_s))[0]
        if isinstance(answer, Err):
            return answer
        if not isinstance(answer, Ok) or wire.transport is None:
            msg = f"{self._where}: STARTTLS was answered with something else (where it knows no TLS: tls: off)"
            raise LinkError(msg)
        try:
            async with asyncio.timeout(limit_s):
                transport = await asyncio.get_running_loop().start_tls(
                    wire.transport, wire, context, server_hostname=host, ssl_shutdown_timeout=_CLOSE_S
                )
        except (OSError, TimeoutError) as error:
            wire.fail("TLS failed")
            wire.closed.set()  # the transport reports its end to TLS now, not to us: close() would wait in vain
            if isinstance(error, ssl.SSLCertVerificationError):
                msg = f"{self._where}: its certificate is not believed: {error.verify_message}"
                raise TlsError(msg) from error
            reason = "no answer" if isinstance(error, TimeoutError) else _reason(error)
            msg = f"{self._where}: STARTTLS failed: {reason}"
            raise (TlsError if isinstance(error, ssl.SSLError) else LinkError)(msg) from error
        if transport is None:
            msg = f"{self._where}: the connection broke during STARTTLS"
            raise LinkError(msg)
        wire.transport = transport
        self._check()
        self.is_verified = True
        return None

    async def close(self) -> None:
        """Log out and close; do not wait for a peer that does not close."""
        wire = self._wire
        transport = wire.transport
        if transport is None:
            return
        if not wire.failure and not wire.owed:
            wire.owed = 1
            transport.write(encode("LOGOUT"))
        transport.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await wire.closed.wait()
        except TimeoutError:
            transport.abort()


_LOOK_S: Final = 0.1
"""From one question after an order's end to the next; upsd does not report it by itself."""
_NO_SUCH: Final = "powerguard.may.set"
"""A variable that no driver has: upsd looks at user, password and `actions = SET` before it says so (2.8.0, wire)."""
_DENIED: Final = "ACCESS-DENIED"


class NutControl:
    """upsd while it gets an order (`opened`). Every method raises DeviceError.

    tracks: upsd reports how an order ended.
    """

    def __init__(self, options: NutOptions, link: Link) -> None:
        """Use a link that is logged on."""
        self.where = f"upsd at {options.host}:{options.port}, {options.name}"
        self.tracks = False
        self._ups = options.name
        self._user = options.user or ""
        self._link = link
        self._limit_s = options.timeout_s

    async def _ask(self, *words: str) -> Answer:
        try:
            return (await self._link.ask(encode(*words), limit_s=self._limit_s))[0]
        except LateError as error:
            msg = f"{self.where}: no answer to {words[0]} in {self._limit_s:g} s"
            raise DeviceError(msg, unanswered=True) from error
        except LinkError as error:
            raise DeviceError(str(error), unanswered=True) from error
        except NutError as error:
            msg = f"{self.where}: {error}"
            raise DeviceError(msg) from error

    async def begin(self, password: bytes) -> None:
        """Log in, and request tracking of orders. upsd checks neither until the first order."""
        for words in (("USERNAME", self._user), ("PASSWORD", password.decode("utf-8", "surrogateescape"))):
            if not isinstance(await self._ask(*words), Ok):
                msg = f"{self.where}: user and password are not taken"
                raise DeviceError(msg)
        self.tracks = isinstance(await self._ask("SET", "TRACKING", "ON"), Ok)

    async def variables(self) -> dict[str, str]:
        """Return every variable of the UPS."""
        return {row[0]: row[1] for row in await self._list("VAR") if len(row) > 1}

    async def settable(self) -> frozenset[str]:
        """Return the variables that can be set."""
        return frozenset(row[0] for row in await self._list("RW") if row)

    async def commands(self) -> frozenset[str]:
        """Return the instant commands that its driver has."""
        return frozenset(row[0] for row in await self._list("CMD") if row)

    async def longest(self, name: str) -> float | None:
        """Return the largest value that a variable takes; None if its driver does not report it."""
        rows = await self._list("RANGE", name)
        found = [float(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal() and len(row[1]) < 10]
        return max(found, default=None)

    async def _list(self, what: str, *of: str) -> tuple[tuple[str, ...], ...]:
        answer = await self._ask("LIST", what, self._ups, *of)
        if isinstance(answer, Table):
            return answer.rows
        code = answer.code if isinstance(answer, Err) else "an answer that makes no sense"
        msg = f"{self.where}: LIST {what}: {code}"
        raise DeviceError(msg)

    async def get(self, name: str) -> str | None:
        """Return one variable; None where the UPS has it not."""
        match await self._ask("GET", "VAR", self._ups, name):
            case Line(("VAR", _, echoed, value)) if echoed == name:
                return value
            case Err("VAR-NOT-SUPPORTED"):
                return None
            case Err(code):
                msg = f"{self.where}: {name}: {code}"
                raise DeviceError(msg)
            case _:
                msg = f"{self.where} answered something else than it was asked"
                raise DeviceError(msg)

    async def why_not_set(self) -> str:
        """Return why this user may not set variables, "" if it may: checked with an unknown variable."""
        answer = await self._ask("SET", "VAR", self._ups, _NO_SUCH, "0")
        if isinstance(answer, Err) and answer.code == _DENIED:
            return (
                f"{self.where}: user {self._user} may not SET: check the password, and write `actions = SET` and "
                "`instcmds = shutdown.return` into his section of upsd.users"
            )
        return ""

    async def set(self, name: str, value: str) -> None:
        """Set one variable and wait for the driver's result, if upsd reports it."""
        await self._order(f"{name} = {value}", "SET", "VAR", self._ups, name, value)

    async def do(self, command: str) -> None:
        """Give one instant command, once, and wait for the driver's result, if upsd reports it."""
        await self._order(command, "INSTCMD", self._ups, command)

    async def _order(self, what: str, *words: str) -> None:
        match await self._ask(*words):
            case Ok(("TRACKING", order)):
                await self._until_done(what, order)
            case Ok():
                pass
            case Err(code):
                hint = ": check the password, actions and instcmds of upsd.users" if code == _DENIED else ""
                msg = f"{self.where} refuses {what} to {self._user} ({code}){hint}"
                raise DeviceError(msg)
            case _:
                msg = f"{self.where} answered {what} with something that makes no sense"
                raise DeviceError(msg, unanswered=True)

    async def _until_done(self, what: str, order: str) -> None:
        """Wait for the end of an order; the caller's limit ends it where the driver never does."""
        while True:
            match await self._ask("GET", "TRACKING", order):
                case Line(("PENDING",)):
                    await asyncio.sleep(_LOOK_S)  # noqa: TID251 - upsd never reports by itself
                case Line(("SUCCESS",)):
                    return
                case Err(code, words):
                    msg = f"{self.where}: the driver refuses {what} ({' '.join((code, *words))})"
                    raise DeviceError(msg)
                case _:
                    msg = f"{self.where}: the result of {what} is unknown"
                    raise DeviceError(msg, unanswered=True)


@asynccontextmanager
async def opened(options: NutOptions, *, reads_only: bool = False) -> AsyncIterator[NutControl]:
    """Connect to upsd for orders, under TLS where it is to be had, and leave again. Raises DeviceError.

    A certificate that is not believed gets no password, whatever `tls` says. reads_only: without a login.
    """
    if not reads_only and (options.user is None or options.password is None):
        msg = f"upsd at {options.host}:{options.port}: orders need user and password in the source's settings"
        raise DeviceError(msg)
    resolver = Resolver(options.host, LinkError)
    link: Link | None = None
    where = f"upsd at {options.host}:{options.port}"
    try:
        addresses = await resolver.addresses()
        link = await Link.open(addresses, options.port, where, limit_s=options.timeout_s, on_lost=lambda: None)
        if options.tls != "off":
            await _start_tls(link, options, where)
        control = NutControl(options, link)
        if not reads_only and options.password is not None:
            await control.begin(await asyncio.to_thread(options.password.read))
        yield control
    except LateError as error:
        msg = f"{where} is too slow: no answer in {options.timeout_s:g} s"
        raise DeviceError(msg, unanswered=True) from error
    except (LinkError, SecretError) as error:
        raise DeviceError(str(error), unanswered=isinstance(error, LinkError)) from error
    finally:
        resolver.close()
        if link is not None:
            await link.close()


async def _start_tls(link: Link, options: NutOptions, where: str) -> None:
    try:
        context = await asyncio.to_thread(ssl.create_default_context, cafile=options.ca)
    except OSError as error:
        msg = f"{where} cannot be verified: ca {options.ca}: {error.strerror or 'no certificate in PEM'}"
        raise DeviceError(msg) from error
    refusal = await link.start_tls(context, options.host, limit_s=options.timeout_s)
    if refusal is not None and options.tls == "required":
        msg = f"{where} offers no TLS ({refusal.code})"
        raise DeviceError(msg)
