"""Power-on method C, the host's side: sends the intent to the sentinels at the commit, and withdraws it.

One question to one sentinel over HTTP or HTTPS: asked again while that can help; unsigned answers do not count.
"""

import asyncio
import errno
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import aiohttp

from powerguard.clock import Clock, boot_id, boottime_s
from powerguard.core.model.actions import Action, ArmPowerOn, CheckPowerOn, Detail, DisarmPowerOn
from powerguard.effectors.base import EffectorError
from powerguard.effectors.http import KnownNames, Verify, verifying
from powerguard.effectors.options import SentinelOptions
from powerguard.effectors.sentinel import protocol as wire
from powerguard.effectors.sentinel.protocol import MAX_IN_S, MIN_KEY_BYTES
from powerguard.options import SecretError

MAX_ANSWER_BYTES: Final = 65_536
_AGAIN_S: Final = 0.3
"""Least pause before the next try; up to as much is added at random, because many hosts ask in the same second."""

_TRY_S: Final = 2.0
"""One request that a flooded sentinel has accepted and does not answer: the next may get through."""
_WRITE_TRY_S: Final = 3.5
"""The same of one that the sentinel answers once its disk has taken it, for which it waits 3 s."""

Answer = Mapping[str, Any]


class _AgainError(Exception):
    """It did not work, and may a moment later."""


def session(names: KnownNames) -> aiohttp.ClientSession:
    """Make a session for one order. No proxy, no cookie, no netrc; no decompression."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True, use_dns_cache=False, resolver=names),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


class Trust:
    """The TLS check that proves that it is our sentinel, by the settings."""

    def __init__(self, options: SentinelOptions) -> None:
        self._options = options
        self._verify: Verify | None = None

    async def verifying(self) -> Verify:
        """Return it; sentinel.ca is read once. Raises EffectorError."""
        if self._verify is None:
            self._verify = await verifying("sentinel", self._options.fingerprint, self._options.ca)
        return self._verify

    def doubt(self) -> None:
        """Read sentinel.ca again next time: a certificate has failed, and the authority may have been renewed."""
        self._verify = None


@dataclass(slots=True)
class SentinelPeer:
    """One sentinel during one order. seen: why it has not answered so far."""

    url: str
    session: aiohttp.ClientSession = field(repr=False)
    trust: Trust = field(repr=False)
    key: bytes = field(repr=False)
    seen: str = "no answer"

    async def ask(self, kind: str, fields: Mapping[str, Any]) -> Answer:
        """Ask until it answers; the caller's limit ends it. fields: of `protocol.Request`, without challenge and nonce.

        Raises EffectorError if another try would not help.
        """
        refused = 0
        while True:
            try:
                return await self._ask(kind, fields, is_last=refused > 0)
            except _AgainError as error:
                self.seen = str(error)
                refused += self.seen == _NOT_ACCEPTED
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self.seen = _failure(error)
                if isinstance(error, aiohttp.ClientConnectorCertificateError):
                    self.trust.doubt()
            await asyncio.sleep(_AGAIN_S * (1.0 + secrets.randbelow(1000) / 1000.0))  # noqa: TID251 - there is no event to wait for

    async def _ask(self, kind: str, fields: Mapping[str, Any], *, is_last: bool) -> Answer:
        status, _, body = await self._request("GET", wire.CHALLENGE_PATH)
        challenge = _object(body).get("challenge") if status == 200 else None
        if not isinstance(challenge, str):
            raise _AgainError(_status(status))
        path = wire.PATHS[kind]
        question = wire.encode(kind, wire.Request(challenge=challenge, nonce=secrets.token_hex(16), **fields))
        signature = wire.sign_request(self.key, path, question)
        status, signed, body = await self._request("POST", path, question, {wire.SIGNATURE: signature})
        if not wire.is_signed(wire.sign_answer(self.key, signature, status, body), signed):
            if status == 401 and is_last:
                raise EffectorError(_NOT_ACCEPTED)
            raise _AgainError(_NOT_ACCEPTED if status == 401 else _status(status))
        answer = _object(body)
        if status in (429, 503):
            raise _AgainError(_words(answer))
        if status != 200:
            raise EffectorError(_words(answer))
        return answer

    async def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str | None, bytes]:
        all_headers = {"Accept": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        limit = aiohttp.ClientTimeout(total=_TRY_S)  # the order has a limit of its own, and several tries fit into it
        if body is not None:
            all_headers["Content-Type"] = "application/json"
            limit = aiohttp.ClientTimeout(total=_WRITE_TRY_S)
        verify, url = await self.trust.verifying(), f"{self.url}{path}"
        async with self.session.request(
            method, url, data=body, headers=all_headers, allow_redirects=False, timeout=limit, ssl=verify
        ) as response:
            content = b""
            async for chunk in response.content.iter_chunked(16_384):
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    msg = f"an answer is longer than {MAX_ANSWER_BYTES} bytes: this is not a sentinel"
                    raise EffectorError(msg)
            return response.status, response.headers.get(wire.SIGNATURE), content


# Short: an outcome holds 600 characters, and several sentinels may fail at once.
_NOT_ACCEPTED: Final = "refuses this host: sentinel.name and sentinel.key must be the same as in its settings"


def _status(status: int) -> str:
    if status == 429:
        return "is queried too often (HTTP 429)"
    return f"its answer is not signed with our key, so it does not count (HTTP {status}): check urls and key"


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        return wire.answer_object(body) if len(body) <= wire.MAX_BODY_BYTES else {}
    except wire.SentinelWireError:
        return {}


def _words(answer: Mapping[str, Any]) -> str:
    """The sentinel's reason for a refusal. It is signed, and yet only text."""
    reason = answer.get("reason")
    text = reason if isinstance(reason, str) else "refuses without a reason"
    return "".join(c if c.isprintable() else " " for c in text[:400])


def _failure(error: Exception) -> str:
    """Say what went wrong. Texts of errors are not passed on: they may hold headers that we sent."""
    if isinstance(error, aiohttp.ServerFingerprintMismatch):
        return f"its certificate is not that of sentinel.fingerprint, but sha256 {error.got.hex()}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        reason = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else type(cause).__name__
        return f"its certificate does not verify ({reason}): see sentinel.ca and sentinel.fingerprint"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return "the service there does not speak TLS (write http:// for one without, or give it a certificate)"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the name does not resolve (write an address)"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"no connection ({errno.errorcode.get(number or 0, 'unknown reason')})"
    if isinstance(error, TimeoutError):
        return "no answer (it takes connections and hangs, or a firewall is in between)"
    return f"an incomplete answer ({type(error).__name__})"


_ANSWER_MARGIN_S: Final = 0.1
"""Time before the action's deadline at which the effector ends, so that it can report what it saw."""

_MOST_ORDERS: Final = 99
"""Largest plausible number of orders."""

_Answers = dict[str, Answer | str]
"""By URL: what the sentinel answered, or why there is no answer."""


class SentinelEffector:
    """Carries out the orders of the power-on method SENTINEL. All sentinels are asked at the same time.

    feeds: names of the UPSes that feed this host; the sentinel must call them the same. armed: False in dry-run:
    sentinels are checked, but no intent is stored.
    """

    def __init__(
        self,
        options: SentinelOptions,
        *,
        feeds: Sequence[str],
        armed: bool = True,
        clock: Clock = boottime_s,
        boot: Callable[[], str] = boot_id,
    ) -> None:
        self._options = options
        self._feeds = tuple(sorted(set(feeds)))
        self._armed = armed
        self._clock = clock
        self._boot = boot
        self._names = KnownNames()
        self._trust = Trust(options)

    async def carry_out(self, action: Action) -> Detail:
        """Check: one that would power this host on; arm: one that has stored it; disarm: all that were reached.

        Returns sentinels (which), failed (the errors of the others, if any); of ArmPowerOn in_s as the sentinel
        holds it; of DisarmPowerOn disarmed (bool: one held an intent), and where this host was ordered powered on
        orders, ordered_by and because. Raises EffectorError if none will do it; for DisarmPowerOn if one of them could
        not be reached.
        """
        match action:
            case CheckPowerOn():
                answers = await self._ask("hello", {"feeds": self._feeds}, action)
                return self._able(answers)
            case ArmPowerOn() | DisarmPowerOn() if not self._armed:
                return (("dry_run", True),)
            case ArmPowerOn(outage=outage, in_s=in_s):
                fields = {
                    "feeds": self._feeds,
                    "outage": outage,
                    "boot_id": self._boot(),
                    "in_s": min(max(in_s, 0.0), MAX_IN_S),
                    "valid_s": self._options.valid_for_h * 3600.0,
                }
                return self._stored(await self._ask("store", fields, action), outage)
            case DisarmPowerOn(outage=""):
                # One that is dead takes all the time that it is given: half of it is for the others' second answer.
                soon = replace(action, by_s=(self._clock() + action.by_s) / 2)
                answers = await self._ask("hello", {"feeds": self._feeds}, soon)
                failed = _failed_of(answers)  # one that was not heard may hold an intent of another outage
                for outage in _held(answers):
                    answers = await self._ask("withdraw", {"outage": outage}, action)
                    failed |= _failed_of(answers)
                return self._withdrawn({**answers, **failed})
            case DisarmPowerOn(outage=outage):
                return self._withdrawn(await self._ask("withdraw", {"outage": outage}, action))
            case _:
                msg = f"the sentinel effector carries out orders of its power-on method, not {type(action).__name__}"
                raise TypeError(msg)

    def _able(self, answers: _Answers) -> Detail:
        able, failed = [], []
        for url, answer in answers.items():
            blocked = [answer] if isinstance(answer, str) else _texts(answer.get("blocked"))
            if blocked:
                failed.append(f"{url}: {', '.join(blocked)}")
            else:
                able.append(url)
        if not able:
            raise EffectorError("no sentinel would power this host on: " + "; ".join(failed))
        return _detail(able, failed)

    def _stored(self, answers: _Answers, outage: str) -> Detail:
        stored, failed, in_s = [], [], 0.0
        for url, answer in answers.items():
            if isinstance(answer, str):
                failed.append(f"{url}: {answer}")
                continue
            held_s = answer.get("in_s")
            if answer.get("outage") != outage or isinstance(held_s, bool) or not isinstance(held_s, int | float):
                failed.append(f"{url}: has stored another intent")
                continue
            if answer.get("mode") != "armed":
                failed.append(f"{url}: has stored it, but runs in dry-run (mode: armed powers hosts on)")
                continue
            stored.append(url)
            in_s = max(in_s, float(held_s))
        if not stored:
            raise EffectorError("no sentinel has stored it: " + "; ".join(failed))
        return (("in_s", in_s), *_detail(stored, failed))

    def _withdrawn(self, answers: _Answers) -> Detail:
        failed = [f"{url}: {answer}" for url, answer in answers.items() if isinstance(answer, str)]
        if failed:
            raise EffectorError("not withdrawn everywhere: " + "; ".join(failed))
        orders = {url: _orders(answer) for url, answer in answers.items()}
        ordered = [url for url, count in orders.items() if count]
        more: Detail = ()
        if ordered:
            count, sentinels = sum(orders.values()), ", ".join(ordered)
            because = f"{sentinels} has powered this host on" + (f", at order {count}" if count > 1 else "")
            more = (("orders", count), ("ordered_by", sentinels), ("because", because))
        found = any(answer.get("was_there") is True for answer in answers.values() if not isinstance(answer, str))
        return (*_detail(list(answers), []), ("disarmed", found), *more)

    async def _ask(self, kind: str, fields: Mapping[str, Any], action: Action) -> _Answers:
        """Ask all at once. Raises EffectorError if none could be asked."""
        limit_s = max(action.by_s - self._clock() - _ANSWER_MARGIN_S, 0.0)
        by_s = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(by_s):
                key = await self._key()
                await self._trust.verifying()
        except TimeoutError:
            msg = f"sentinel.key and sentinel.ca were not read within {limit_s:.1f} s: their disk hangs"
            raise EffectorError(msg) from None
        host = self._options.name or socket.gethostname().partition(".")[0]
        answers: _Answers = dict.fromkeys(self._options.urls, "")
        async with session(self._names) as open_session, asyncio.TaskGroup() as tasks:

            async def ask(url: str) -> None:
                peer = SentinelPeer(url, open_session, self._trust, key)
                try:
                    async with asyncio.timeout_at(by_s):
                        answers[url] = await peer.ask(kind, {"host": host, **fields})
                except TimeoutError:
                    answers[url] = peer.seen
                except EffectorError as error:
                    answers[url] = str(error)

            for url in self._options.urls:
                tasks.create_task(ask(url))
        return answers

    async def _key(self) -> bytes:
        if self._options.key is None:
            msg = "sentinel.kind is none: no other host powers this one on"
            raise EffectorError(msg)
        try:
            key = await asyncio.to_thread(self._options.key.read)
        except SecretError as error:
            msg = f"sentinel.key: {error}"
            raise EffectorError(msg) from None
        if len(key) < MIN_KEY_BYTES:
            msg = f"sentinel.key: {len(key)} bytes are too few, {MIN_KEY_BYTES} are needed (openssl rand -hex 32)"
            raise EffectorError(msg)
        return key


def _orders(answer: Answer | str) -> int:
    """How often it has ordered this host powered on in this outage; older sentinels do not report it."""
    count = 0 if isinstance(answer, str) else answer.get("orders")
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= _MOST_ORDERS else 0


def _failed_of(answers: _Answers) -> dict[str, str]:
    return {url: answer for url, answer in answers.items() if isinstance(answer, str)}


def _held(answers: _Answers) -> list[str]:
    """Return the outages of its stored intents, for a host that has no record of any."""
    intents = [answer.get("intent") for answer in answers.values() if not isinstance(answer, str)]
    return sorted({str(intent.get("outage")) for intent in intents if isinstance(intent, Mapping)})


def _texts(value: object) -> list[str]:
    """The reasons that block it; an answer without the field counts as blocked."""
    if not isinstance(value, list):
        return ["does not report whether it would"]
    return ["".join(c if c.isprintable() else " " for c in str(each)[:300]) for each in value[:8]]


def _detail(urls: list[str], failed: list[str]) -> Detail:
    more: Detail = (("failed", "; ".join(failed)),) if failed else ()
    return (("sentinels", ", ".join(urls)), *more)
