"""One connection to upsd on which something is ordered: variables set, a command given, and heard how it went.

upsd's OK means "handed to the driver" only. With `SET TRACKING ON` (NUT 2.8) it names each order, and tells what the
driver made of it; without that, only what can be read back afterwards counts.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from powerguard.options import SecretError
from powerguard.profiles.values import DeviceError
from powerguard.protocols.nut import Answer, Err, Line, NutError, Ok, Table, encode
from powerguard.sources.nut_link import LateError, Link, LinkError, Resolver
from powerguard.sources.nut_options import NutOptions

_LOOK_S: Final = 0.1
"""From one question after an order's end to the next; upsd tells nobody by itself."""
_NO_SUCH: Final = "powerguard.may.set"
"""A variable that no driver has: upsd looks at user, password and `actions = SET` before it says so (2.8.0, wire)."""
_DENIED: Final = "ACCESS-DENIED"


class NutControl:
    """upsd while somebody orders something (`opened`). Everything raises DeviceError.

    tracks: upsd tells how an order ended.
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
        """Say who we are, and ask to be told how orders end. upsd checks neither until something is ordered."""
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
        """Return the largest value that a variable takes; None where its driver says nothing of it."""
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
            case Line(("VAR", _, told, value)) if told == name:
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
        """Say why this user may set nothing, "" where he may: asked of a variable that there is not."""
        answer = await self._ask("SET", "VAR", self._ups, _NO_SUCH, "0")
        if isinstance(answer, Err) and answer.code == _DENIED:
            return (
                f"{self.where}: user {self._user} may not SET: check the password, and write `actions = SET` and "
                "`instcmds = shutdown.return` into his section of upsd.users"
            )
        return ""

    async def set(self, name: str, value: str) -> None:
        """Set one variable and wait for what the driver makes of it, where upsd tells that."""
        await self._order(f"{name} = {value}", "SET", "VAR", self._ups, name, value)

    async def do(self, command: str) -> None:
        """Give one instant command, once, and wait for what the driver makes of it, where upsd tells that."""
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
                    await asyncio.sleep(_LOOK_S)  # noqa: TID251 - upsd tells nobody by itself
                case Line(("SUCCESS",)):
                    return
                case Err(code, words):
                    msg = f"{self.where}: the driver refuses {what} ({' '.join((code, *words))})"
                    raise DeviceError(msg)
                case _:
                    msg = f"{self.where}: what became of {what} is not told"
                    raise DeviceError(msg, unanswered=True)


@asynccontextmanager
async def opened(options: NutOptions) -> AsyncIterator[NutControl]:
    """Connect to upsd for orders, under TLS where it is to be had, and leave again. Raises DeviceError.

    A certificate that is not believed gets no password, whatever `tls` says.
    """
    if options.user is None or options.password is None:
        msg = f"upsd at {options.host}:{options.port}: orders need user and password in the source's settings"
        raise DeviceError(msg)
    resolver = Resolver(options.host, options.port)
    link: Link | None = None
    where = f"upsd at {options.host}:{options.port}"
    try:
        password = await asyncio.to_thread(options.password.read)
        addresses = await resolver.addresses()
        link = await Link.open(addresses, options.port, where, limit_s=options.timeout_s, on_lost=lambda: None)
        if options.tls != "off":
            await _start_tls(link, options, where)
        control = NutControl(options, link)
        await control.begin(password)
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
