"""The `nut` source: a client of NUT's upsd, with or without upsmon. It polls, and holds the login.

The login at upsd: what a primary counts on, and what must never cost a reading.
"""

import asyncio
import contextlib
import functools
import math
import random
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from powerguard.clock import Clock
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.options import SecretError
from powerguard.ups.base import LOOPBACK, Notices, Publish, Resolver
from powerguard.ups.nut.connection import LateError, Link, LinkError, TlsError
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.nut.protocol import Answer, Err, Line, NutError, Ok, Table, encode
from powerguard.ups.nut.variables import STATUS, WANTED, DecodedVariables, forgeable_behind, interpret, slow_behind
from powerguard.ups.profiles.text_values import share_of_charge

TRY_AGAIN_S: Final = 300.0
"""After a refused login, or a certificate that was not believed: the other end may have been put right."""
_NOT_NOW_S: Final = 1.0
_MOST_BREAKS: Final = 2
_AFTER_BREAKS_S: Final = 60.0
"""upsd asks the name service who logs in, where it was built with tcp wrappers, and does not answer meanwhile: in an
outage that can take longer than a source may be silent."""
_NOT_NOW: Final = frozenset(("DATA-STALE", "DRIVER-NOT-CONNECTED"))


class Login:
    """Logs in once for each connection. The login ends with the connection; we never log out.

    problem: why upsd refuses it, in one line for the operator; "" while it does not. delayed: likewise, why it is not
    tried for a while. is_held: a primary waits for us.
    """

    def __init__(self, options: NutOptions, clock: Clock) -> None:
        """Begin without a message."""
        self.problem = ""
        self.delayed = ""
        self.is_held = False
        self._options = options
        self._clock = clock
        self._is_sent = False
        self._at_s = 0.0
        self._breaks = 0

    def begin(self) -> None:
        """Start again with a new connection; later, where logging in has cost the last ones: readings come first."""
        self.problem, self.is_held, self._is_sent = "", False, False
        self._at_s = 0.0 if self._breaks < _MOST_BREAKS else self._clock() + _AFTER_BREAKS_S

    def is_worth_a_new_connection(self) -> bool:
        """Whether a refused login may be tried again: upsd takes one password for each connection."""
        return bool(self.problem) and not self.is_held and self._clock() >= self._at_s

    def is_due(self) -> bool:
        """Whether there is a login to be made now."""
        return self._options.user is not None and not self.is_held and not self.problem and self._clock() >= self._at_s

    async def make(self, link: Link, *, limit_s: float) -> None:
        """Log in, or find out why not (`problem`); where upsd cannot say now, it is due again in a second."""
        self._at_s = self._clock() + TRY_AGAIN_S
        try:
            await self._make(link, limit_s)
        except (SecretError, NutError) as error:
            self.problem = f"no login: {error}"
        except (LateError, LinkError) as error:
            self._at_s = self._clock() + _NOT_NOW_S
            self._breaks += 1
            if self._breaks >= _MOST_BREAKS:
                fault = "is not answered" if isinstance(error, LateError) else "ends the connection"
                self.delayed = (
                    f"the login {fault}, and is tried again in {_AFTER_BREAKS_S:g} s only: readings come first, and a "
                    "primary does not wait for this host (do upsd's host access checks wait for the name service?)"
                )
        else:
            self._breaks, self.delayed = 0, ""

    async def _make(self, link: Link, limit_s: float) -> None:
        options = self._options
        if not self._is_sent and options.user is not None and options.password is not None:
            password = (await asyncio.to_thread(options.password.read)).decode("utf-8", "surrogateescape")
            requests = (encode("USERNAME", options.user), encode("PASSWORD", password))
            self._is_sent = True
            for answer in await link.ask(*requests, limit_s=limit_s):
                if not isinstance(answer, Ok):
                    self.problem = f"user and password are not taken ({_code(answer)})"
                    return
        answer = (await link.ask(encode("LOGIN", options.name), limit_s=limit_s))[0]
        if isinstance(answer, Err) and answer.code in _NOT_NOW:
            self._at_s = self._clock() + _NOT_NOW_S
            return
        if not isinstance(answer, Ok) and _code(answer) != "ALREADY-LOGGED-IN":  # by a request that we gave up on
            self.problem = (
                f"login as {options.user} is refused ({_code(answer)}): check password and the upsmon line in "
                "upsd.users; readings go on, but a primary does not wait for this host"
            )
            return
        self.is_held = True
        if options.role == "primary":
            await self._become_primary(link, limit_s)

    async def _become_primary(self, link: Link, limit_s: float) -> None:
        answer: Answer = Err("")
        for word in ("PRIMARY", "MASTER"):  # NUT before 2.8.0 knows only the second
            answer = (await link.ask(encode(word, self._options.name), limit_s=limit_s))[0]
            if isinstance(answer, Ok):
                return
        self.problem = (
            f"{self._options.user} is logged in and may not be primary ({_code(answer)}): write `upsmon primary` in "
            "upsd.users"
        )


def _code(answer: Answer) -> str:
    return answer.code if isinstance(answer, Err) else "an answer that makes no sense"


log = structlog.get_logger(__name__)

_LOST_AFTER: Final = 3
_ON_BATTERY_LIMIT_S: Final = 0.8
_ON_BATTERY_LOST_S: Final = 2.5
"""On battery two misses will do once the last reading is so old: at 3 s the core must know that it counts alone."""
_MISS_APART_S: Final = 0.8
"""Between two misses, however often we try: three of them, and the last good reading is not yet 3 s old."""
_MISS_APART_ON_UTILITY_S: Final = 1.5
"""A restart of upsd or of a driver is over in this time, and no news."""
_RETRY_S: Final = (0.25, 2.0)
"""From one try to connect to the next, and after the source counts as lost: a returned upsd is used in some seconds."""
SPREAD_S: Final = 5.0
"""Hosts that share a UPS come back to upsd within this time: its queue of new connections holds 16 (measured)."""
_CLOSEST_S: Final = 0.2
"""Shortest time between two polls, regardless of hints; a second reading counts from here on (`core.supply.fusion`)."""
_WHOLE_S: Final = 1.0
_WHOLE_ON_BATTERY_S: Final = 0.5
_LIST_S: Final = (1.0, 5.0, 60.0)
"""From one list of all variables to the next: a upsd that has just started hears of them one by one."""
_MOST_TLS_BREAKS: Final = 2
_TRUST_S: Final = 10.0
"""To read the authorities: all those of the system take a busy machine longer than a step of a connection may."""
_DICE: Final = random.SystemRandom()
_MEANINGS: Final = {
    "DATA-STALE": "its driver gets no data from the UPS (check the cable or the card, and the driver's log)",
    "DRIVER-NOT-CONNECTED": "the driver of this UPS is not running (upsdrvctl start, or the nut-driver unit)",
    "ACCESS-DENIED": "upsd denies access to this host (check its tcp wrappers, and LISTEN)",
}


class RefusedError(Exception):
    """upsd answers, and has no values: one line for the operator. The connection stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NutReport:
    """What doctor shows of a UPS behind upsd.

    tls: verified. forgeable: why the answers of its driver could be forged, "" when they could not. latency_s: of one
    list of all variables. restart_pct: battery.charge.restart, the charge at which the UPS switches its output on
    again; None: not listed.
    clients: addresses of all that are logged in for this UPS (LIST CLIENT); empty where upsd does not say.
    """

    reading: Reading
    tls: bool
    is_logged_in: bool
    forgeable: str
    warnings: tuple[str, ...]
    latency_s: float
    restart_pct: float | None = None
    clients: frozenset[str] = frozenset()


def source_name(options: NutOptions) -> str:
    """Return the name of the source in readings, metrics and logs: "nut:rack-a@10.0.0.9"."""
    port = "" if options.port == 3493 else f":{options.port}"
    return f"nut:{options.name}@{options.host}{port}"


def _where(options: NutOptions) -> str:
    return f"upsd at {options.host}:{options.port}"


class NutSource:
    """Polls one UPS of one upsd, on one connection that stays.

    jitter: draws from 0 to 1, so that the hosts of a room do not all come back to upsd in the same moment. spread_s: a
    connection that was lost is tried again at a moment that is drawn from so many seconds.
    """

    def __init__(
        self,
        options: NutOptions,
        *,
        ups: str,
        clock: Clock,
        jitter: Callable[[], float] = _DICE.random,
        spread_s: float = 0.0,
    ) -> None:
        """Do not connect yet."""
        self.name = source_name(options)
        self._options = options
        self._ups = ups
        self._clock = clock
        self._jitter = jitter
        self._spread_s = spread_s
        self._connect_at_s = -math.inf
        self._refusal = ""
        self._where = _where(options)
        self._woken = asyncio.Event()
        self._asked = False
        self._resolver = Resolver(options.host, LinkError)
        self._link: Link | None = None
        self._login = Login(options, clock)
        self._plain_until_s = 0.0
        self._had_tls = False
        self._tls_breaks = 0
        self._trust: asyncio.Future[ssl.SSLContext] | None = None
        self._wanted: tuple[str, ...] = ()
        self._list_at_s = 0.0
        self._lists = 0
        self._values: dict[str, str] = {}
        self._forgeable = "not asked yet"
        self._slow = ""
        self._restart_pct: float | None = None
        self._whole_at_s = 0.0
        self._again = self._late = False
        self._began_s = self._published_at_s = -1e9
        self._on_battery = False
        self._misses = 0
        self._is_lost = False
        self._miss_at_s = -1e9
        self._notices = Notices(ups, self.name)

    @property
    def trouble(self) -> str:
        """The obstacle to a login, or to trust; "" if none."""
        return self._notices.trouble

    @property
    def is_local(self) -> bool:
        """Upsd runs on this host, and its driver has a cable to the UPS."""
        return self._options.host in LOOPBACK and not self._forgeable

    def poll_now(self) -> None:
        """Poll at once, and publish what comes of it; during a poll: once more after it."""
        self._asked = True
        self._woken.set()

    async def run(self, publish: Publish) -> None:
        """Poll until cancelled."""
        try:
            grid_s = self._clock()
            while True:
                self._began_s = self._clock()
                whole, self._asked = self._asked, False
                self._woken.clear()
                await self._poll_and_publish(publish, whole=whole)
                now_s = self._clock()
                if now_s >= grid_s:  # a poll that came early does not put off the next one in turn
                    grid_s += ((now_s - grid_s) // self._options.poll_s + 1) * self._options.poll_s
                await self._rest(self._next_s(now_s, grid_s))
        finally:
            self._resolver.close()
            await self._drop()

    def _next_s(self, now_s: float, grid_s: float) -> float:
        """When to poll next without a hint: on the grid; sooner to repeat a change; adapted while it fails."""
        if self._link is None:
            longest_s = _RETRY_S[1] if self._is_lost else _RETRY_S[0]
            return now_s + longest_s * (0.5 + 0.5 * self._jitter())
        if self._late:
            return now_s
        return min(grid_s, self._published_at_s + _CLOSEST_S) if self._again else grid_s

    async def _rest(self, until_s: float) -> None:
        """Wait for the next poll, for a hint, or for the end of the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - self._clock())):
                await self._woken.wait()
        too_early_s = max(self._began_s, self._published_at_s) + _CLOSEST_S - self._clock()
        if too_early_s > 0 and not self._late:
            await asyncio.sleep(too_early_s)  # noqa: TID251 - the gap itself; a request in it gets the next poll

    async def look(self) -> "NutReport":
        """Look once, as doctor does, and leave. Raises LinkError, whose text is for the operator."""
        try:
            link = await self._connected()
            began_s = self._clock()
            await self._list(link)
            took_s = self._clock() - began_s
            await self._log_in(link)
            unanswered = "" if self._options.user is None or self._login.is_held else "the login is not answered"
            # A login that is not answered holds up whatever is asked after it.
            clients = frozenset() if unanswered else await self._clients(link)
            warnings = [text for text in (self._slow, self._login.problem or unanswered) if text]
            return NutReport(
                reading=self._reading(self._understood()),
                tls=link.is_verified,
                is_logged_in=self._login.is_held,
                forgeable=self._forgeable,
                warnings=tuple(warnings),
                latency_s=took_s,
                restart_pct=self._restart_pct,
                clients=clients,
            )
        except LateError as error:
            msg = f"{self._where} is too slow: no whole answer in {self._limit_s:g} s"
            raise LinkError(msg) from error
        except RefusedError as error:
            raise LinkError(str(error)) from error
        finally:
            self._resolver.close()
            await self._drop()

    async def _clients(self, link: Link) -> frozenset[str]:
        """Return the addresses that are logged in for this UPS; empty where upsd does not say."""
        try:
            (answer,) = await link.ask(encode("LIST", "CLIENT", self._options.name), limit_s=self._limit_s)
        except LateError:
            return frozenset()
        return frozenset(row[0] for row in answer.rows if row) if isinstance(answer, Table) else frozenset()

    # --- One poll -----------------------------------------------------------------------------------------------

    async def _poll_and_publish(self, publish: Publish, *, whole: bool) -> None:
        self._late = False
        plain_until_s = self._plain_until_s
        try:
            link = await self._connected()
            decoded = await self._poll(link, whole=whole)
        except LateError:
            self._late = True
            self._miss(publish, f"{self._where} is too slow: no whole answer in {self._limit_s:g} s")
            if self._is_lost:
                await self._drop()
        except RefusedError as error:
            self._miss(publish, str(error))
        except LinkError as error:
            await self._drop()
            if not self._asked:
                self._woken.clear()  # it has been looked at
            if self._plain_until_s <= plain_until_s:  # else the next try does without TLS, and need not wait
                self._put_off(str(error))
            self._miss(publish, str(error))
        else:
            self._misses, self._is_lost = 0, False
            if decoded is not None:
                self._publish(publish, decoded)
            await self._log_in(link)

    def _put_off(self, refusal: str) -> None:
        """Draw the moment of the next try to connect. Until then the same failure is counted again."""
        if self._spread_s and self._clock() >= self._connect_at_s:
            self._connect_at_s = self._clock() + self._spread_s * self._jitter()
            self._refusal = refusal

    @property
    def _limit_s(self) -> float:
        """For an answer. Lost on battery it has its whole time again: it may be slow, and report utility."""
        timeout_s = self._options.timeout_s
        return min(timeout_s, _ON_BATTERY_LIMIT_S) if self._on_battery and not self._is_lost else timeout_s

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        if link.failure and not self._on_battery:
            self._plain_until_s = min(self._plain_until_s, self._clock())  # after a restart it may have a right one
        await link.close()

    async def _connected(self) -> Link:
        link = self._link
        if link is not None and link.failure:
            await self._drop()
            msg = f"{self._where}: {link.failure}"
            raise LinkError(msg)
        if link is not None and self._is_worth_a_new_try():
            await self._drop()
            link = None
        if link is None:
            if self._clock() < self._connect_at_s:
                raise LinkError(self._refusal)
            link = await self._connect()
        return link

    async def _connect(self) -> Link:
        addresses = await self._resolver.addresses()
        is_plain = self._options.tls == "off" or self._clock() < self._plain_until_s
        context = None if is_plain else await self._context()
        limit_s = 2 * self._limit_s  # for each step has a limit of its own, and there are three
        try:
            async with asyncio.timeout(limit_s):
                return await self._connect_to(addresses, context)
        except TimeoutError as error:
            msg = f"{self._where} is too slow: not connected in {limit_s:g} s"
            raise LinkError(msg) from error

    async def _connect_to(self, addresses: Sequence[str], context: ssl.SSLContext | None) -> Link:
        options = self._options
        limit_s = self._limit_s
        link = await Link.open(addresses, options.port, self._where, limit_s=limit_s, on_lost=self._wake)
        try:
            if context is not None:
                await self._start_tls(link, context)
        except BaseException:  # a link without the TLS that it should have must never be polled
            await link.close()
            raise
        self._link = link
        self._login.begin()
        self._wanted, self._lists = (), 0
        return link

    def _wake(self) -> None:
        """Look at once when the connection ends that we poll on; not when we end one ourselves."""
        if self._link is not None:
            self._woken.set()

    async def _start_tls(self, link: Link, context: ssl.SSLContext) -> None:
        options = self._options
        required = options.tls == "required"
        try:
            refusal = await link.start_tls(context, options.host, limit_s=self._limit_s)
        except LateError as error:
            msg = (
                f"{self._where} is too slow: no answer to STARTTLS in {self._limit_s:g} s (it hangs, or serves MAXCONN "
                "others; where it knows no TLS: tls: off)"
            )
            self._broke(msg)
            raise LinkError(msg) from error
        except TlsError as error:
            self._trust = None  # The next try reads the authorities again: they are renewed while we run.
            raise self._disbelieved(str(error)) from error
        except LinkError as error:
            self._broke(str(error))
            raise
        self._plain_until_s, self._tls_breaks = 0.0, 0
        if refusal is not None and required:
            msg = f"{self._where} offers no TLS ({refusal.code}): give it a certificate, or set tls: if-offered"
            raise LinkError(msg)
        self._notices.is_right("tls_not_believed", "tls_broken")
        if refusal is None:
            self._had_tls = True
            self._notices.is_right("tls_gone")
        elif self._had_tls:
            because = (
                f"{self._where} no longer offers TLS ({refusal.code}): readings and login continue in clear text "
                "(restore its certificate; tls: required refuses clear text)"
            )
            self._notices.stands("tls_gone", because)

    def _broke(self, reason: str) -> None:
        """TLS hangs or breaks off before anything is verified: where it need not be, readings go on without it.

        Once may be a hiccup, and costs a miss.
        """
        self._tls_breaks += 1
        if self._options.tls != "required" and self._tls_breaks >= _MOST_TLS_BREAKS:
            self._plain_until_s = self._clock() + TRY_AGAIN_S
            self._notices.stands("tls_broken", f"{reason}: readings go on without TLS and without login")

    def _disbelieved(self, reason: str) -> LinkError:
        """Return the effect of an unproven peer: if no proof is required, readings continue."""
        if self._options.tls != "required":
            self._plain_until_s = self._clock() + TRY_AGAIN_S
            self._notices.stands("tls_not_believed", f"{reason}: readings go on without TLS and without login")
        return LinkError(f"{reason} (set ca to the authority that signed it, and host to a name that stands in it)")

    async def _context(self) -> ssl.SSLContext:
        """Return what to verify with: read in a thread, and kept while what it verifies is believed."""
        unverified = f"{self._where} cannot be verified: ca {self._options.ca}: "
        if self._trust is None:
            read = functools.partial(ssl.create_default_context, cafile=self._options.ca)
            self._trust = asyncio.get_running_loop().run_in_executor(None, read)
        try:
            async with asyncio.timeout(_TRUST_S):
                return await asyncio.shield(self._trust)
        except TimeoutError as error:
            reason = f"not read in {_TRUST_S:g} s"  # It goes on, and serves once it has been read.
            raise self._disbelieved(unverified + reason) from error
        except OSError as error:
            self._trust = None
            reason = "no certificate in PEM" if isinstance(error, ssl.SSLError) else str(error.strerror)
            raise self._disbelieved(unverified + reason) from error

    async def _poll(self, link: Link, *, whole: bool) -> DecodedVariables | None:
        """Return what is to be published; None when all is as it was."""
        now_s = self._clock()
        if not self._wanted or now_s >= self._list_at_s:
            await self._list(link)
            return self._understood()
        if not (whole or self._again or now_s >= self._whole_at_s):
            status = await self._get(link, (STATUS,))
            if status[STATUS] == self._values[STATUS]:
                return None
            self._values |= status
            self._again = True
            with contextlib.suppress(LateError, RefusedError, LinkError):  # the change itself is reported in any case
                self._values = await self._get(link, self._wanted)
            return self._understood()
        self._again = False
        values = await self._get(link, self._wanted)
        self._again = values[STATUS] != self._values[STATUS]
        self._values = values
        return self._understood()

    def _understood(self) -> DecodedVariables:
        decoded = interpret(self._values)
        for oddity in decoded.oddities:
            self._notices.once("status_odd", f"{self._where}, {self._options.name}: {oddity}")
        if decoded.alarm:
            self._notices.once("ups_alarm", f"{self._where}, {self._options.name}: {decoded.alarm}")
        for token in decoded.unknown:
            because = f"{self._where}: ups.status has the unknown word {token!r}"
            self._notices.once("status_token_unknown", because, key=token)
        return decoded

    async def _get(self, link: Link, names: tuple[str, ...]) -> dict[str, str]:
        """Ask for variables; one that has gone in the meantime is left out."""
        ups = self._options.name
        answers = await link.ask(*(encode("GET", "VAR", ups, name) for name in names), limit_s=self._limit_s)
        found: dict[str, str] = {}
        for name, answer in zip(names, answers, strict=True):
            match answer:
                case Line(("VAR", echoed_ups, echoed_name, value)) if (echoed_ups, echoed_name) == (ups, name):
                    found[name] = value
                case Err("VAR-NOT-SUPPORTED"):
                    pass
                case _:
                    await self._refuse(link, answer)
        self._has_status(found)
        return found

    async def _list(self, link: Link) -> None:
        """Ask for all that the UPS has: which variables there are, and what its driver is."""
        ups = self._options.name
        answer = (await link.ask(encode("LIST", "VAR", ups), limit_s=self._limit_s))[0]
        if not isinstance(answer, Table) or answer.words != ("VAR", ups):
            await self._refuse(link, answer)
            return
        everything = {row[0]: row[1] for row in answer.rows if len(row) == 2}
        self._has_status(everything)
        self._wanted = tuple(name for name in WANTED if name in everything)
        self._again = everything.get(STATUS) != self._values.get(STATUS)
        self._values = {name: everything[name] for name in self._wanted if name in everything}
        self._list_at_s = self._clock() + _LIST_S[min(self._lists, len(_LIST_S) - 1)]
        self._lists += 1
        self._forgeable = forgeable_behind(everything)
        self._slow = slow_behind(everything)
        self._restart_pct = share_of_charge(everything.get("battery.charge.restart", ""))
        if self._slow:
            self._notices.once("driver_slow", f"{self._where}, {ups}: {self._slow}")

    def _has_status(self, values: dict[str, str]) -> None:
        """Take no values for a reading that lack the one that counts: a upsd that has just started lacks it."""
        if STATUS not in values:
            msg = f"{self._where}, {self._options.name}: {STATUS} is not there: its driver has not reported yet"
            raise RefusedError(msg)

    async def _refuse(self, link: Link, answer: Answer) -> None:
        """Raise what an answer without values means: RefusedError, or LinkError when it is out of step."""
        ups = self._options.name
        match answer:
            case Err("UNKNOWN-UPS"):
                self._wanted = ()
                msg = f"{self._where} has no UPS {ups!r} ({await self._known_upses(link)})"
                raise RefusedError(msg)
            case Err(code):
                msg = f"{self._where}, {ups}: {code}: {_MEANINGS.get(code, 'unknown error')}"
                raise RefusedError(msg)
            case _:
                msg = f"{self._where} answered something else than it was asked"
                raise LinkError(msg)

    async def _known_upses(self, link: Link) -> str:
        answer = (await link.ask(encode("LIST", "UPS"), limit_s=self._limit_s))[0]
        names = [row[0][:64] for row in answer.rows if row] if isinstance(answer, Table) else []
        return f"it has: {', '.join(names[:10])}" if names else "it has none"

    # --- The login ----------------------------------------------------------------------------------------------

    def _is_worth_a_new_try(self) -> bool:
        """Whether to connect again, for a login or a certificate that may be right by now. Never on battery."""
        now_s = self._clock()
        link = self._link
        if link is None or self._on_battery:
            return False
        return self._login.is_worth_a_new_connection() or (not link.is_verified and 0.0 < self._plain_until_s <= now_s)

    async def _log_in(self, link: Link) -> None:
        """Log in, so that a primary waits for this host; what goes wrong costs the login and never a reading."""
        if not self._login.is_due() or (self._plain_until_s > 0.0 and not link.is_verified):
            return  # after a certificate that was not believed an attacker may be between us and upsd
        await self._login.make(link, limit_s=self._limit_s)
        if self._login.problem or self._login.delayed:
            self._notices.stands("login_refused", f"{self._where}: {self._login.problem or self._login.delayed}")
        elif self._login.is_held:
            self._notices.is_right("login_refused")
            log.info("login_held", ups=self._ups, source=self.name, user=self._options.user, role=self._options.role)

    # --- Reports -------------------------------------------------------------------------------------------

    def _publish(self, publish: Publish, decoded: DecodedVariables) -> None:
        reading = self._reading(decoded)
        at_s = reading.at_s
        for rejected in decoded.draft.rejected:
            key = f"{rejected.field} {rejected.oid}"  # a value that is wrong in a new way each second is reported once
            self._notices.once("value_rejected", f"{rejected.oid}: {rejected.why}", key=key, field=rejected.field)
        self._on_battery = reading.output_source is OutputSource.BATTERY
        self._published_at_s = at_s
        self._whole_at_s = at_s + (_WHOLE_ON_BATTERY_S if self._on_battery else _WHOLE_S)
        self._whole_at_s -= self._options.poll_s / 2  # the poll that is nearest
        publish(reading)

    def _reading(self, decoded: DecodedVariables) -> Reading:
        link = self._link
        authenticated = link is not None and link.is_verified and not self._forgeable
        return decoded.reading(at_s=self._clock(), ups=self._ups, source=self.name, authenticated=authenticated)

    def _miss(self, publish: Publish, reason: str) -> None:
        """Count and report a miss, unless the last report was just now."""
        now_s = self._clock()
        apart_s = _MISS_APART_S if self._on_battery else _MISS_APART_ON_UTILITY_S
        if self._misses and now_s - self._miss_at_s < apart_s - 0.05:
            return
        self._misses += 1
        self._miss_at_s = now_s
        self._whole_at_s = 0.0
        is_old = self._on_battery and now_s - self._published_at_s >= _ON_BATTERY_LOST_S
        self._is_lost = self._misses >= (2 if is_old else _LOST_AFTER)
        publish(SourceFailed(at_s=now_s, ups=self._ups, source=self.name, reason=reason, lost=self._is_lost))
