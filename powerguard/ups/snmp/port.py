"""SNMP behind one small port: get, walk, set. What speaks to pysnmp is in `engine`.

- Cards answer with fewer, other or swapped objects: values are keyed by OID, the rest is missing.
- An answer with an error status still carries objects that look good: the status is looked at first, always.
- SNMPv1 refuses a whole request for one missing object: the one that the error index names is taken out and the rest
  is asked again.
- Some cards drop a request with more objects than they can answer (CyberPower UPS-IPCARD: more than one): while a
  larger request than any before goes unanswered, a smaller one is sent as well.
"""

import asyncio
import contextlib
import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from powerguard.options import SecretError
from powerguard.ups.base import Resolver
from powerguard.ups.profiles.vocabulary import Answer, DeviceError, Missing, below, parts
from powerguard.ups.snmp.engine import (
    GET,
    GET_NEXT,
    SET,
    Access,
    CardSocket,
    RefusedError,
    RequestError,
    Response,
    User,
    UserError,
    engine_for,
    typed,
)
from powerguard.ups.snmp.options import SnmpOptions

Address = tuple[str, int]
Asked = tuple[int, int, dict[str, Answer]]
"""Error status, error index, and what was answered, by OID."""


class SnmpError(DeviceError):
    """A request that brought nothing, in one line for the operator."""


@dataclass(frozen=True, slots=True)
class Typed:
    """A value to SET, with the type that the object has."""

    kind: Literal["integer", "gauge", "timeticks", "octets", "oid"]
    value: int | bytes | str


class CardAddress:
    """The address of one card. again: look it up again, because no card answered there."""

    def __init__(self, options: SnmpOptions) -> None:
        """Do not look it up yet."""
        self.where = f"{options.host}:{options.port}"
        self.again = False
        self._options = options
        self._known: Address | None = None
        self._resolver = Resolver(options.host, SnmpError)

    def silent(self, tries_s: float, check: str, late: str) -> SnmpError:
        """Return what to say of a card that did not answer for so long; its address is looked up again.

        check: what may be wrong. late: what is said instead, where answers came later; "": none did.
        """
        self.again = True
        version = self._options.version
        because = f", but {late}" if late else f": check {check}, ACL of the card"
        msg = f"no answer from {self.where} in {tries_s:.1f} s (v{version}){because}"
        return SnmpError(msg, unanswered=True, late=bool(late))

    async def look_up(self) -> Address:
        """Return it, looked up if that is due; while the name service is down the old address serves."""
        if self._known is not None and not self.again:
            return self._known
        # The first one: of a name with both many cards have an IPv6 address and no SNMP on it.
        address = (await self._resolver.addresses())[0]
        self.again = False
        if "%" in address:  # numbers of interfaces change
            msg = f"{self.where}: {address} is good on one link only: name an address of the card without a zone"
            raise SnmpError(msg)
        self._known = (address, self._options.port)
        return self._known

    def close(self) -> None:
        """Wait for no look-up any more."""
        self._resolver.close()


_GOOD_S: Final = 30.0
"""So long a late answer says why others are missing: a lost card is asked every 5 s."""
_REMEMBERED: Final = 16
_LONGEST_TIMEOUT_S: Final = 5.0
"""Of the settings."""


class LateAnswers:
    """What one card has answered too late. count: so many, since the start."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.count = 0
        self._heard: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._came = asyncio.Event()

    def heard(self, *, now_s: float, asked_s: float) -> None:
        """Count one, to a question that was first sent at asked_s."""
        self.count += 1
        self._heard.append((now_s, now_s - asked_s))
        self._came.set()

    async def wait(self) -> None:
        """Wait for one, if none has come yet."""
        await self._came.wait()

    def words(self, now_s: float, timeout_s: float) -> str:
        """Return what to say of those that came lately, and what would be right; "" where none did.

        The slowest one counts: words that change with every poll would be logged with every poll.
        """
        slowest_s = max((after_s for heard_s, after_s in self._heard if now_s - heard_s <= _GOOD_S), default=0.0)
        if slowest_s <= timeout_s:
            return ""
        shown_s = math.ceil(slowest_s * 10) / 10
        if shown_s >= _LONGEST_TIMEOUT_S:
            return f"answers come after {shown_s:.1f} s: look for what slows the card, or the network to it"
        return f"answers come after {shown_s:.1f} s: raise timeout_s above it"


MAX_BATCH: Final = 15
"""Objects in one request: old cards answer tooBig, or nothing at all, to more."""
MAX_ROWS: Final = 256
"""Rows of one walk: a card that lies about its table must not keep us for ever."""
_MOST_REFUSALS: Final = 3
_TOO_BIG, _NO_SUCH_NAME = 1, 2
_WHY_REFUSED: Final = {
    "WrongDigest": "the auth passphrase or auth_protocol is not the card's",
    "UnknownUserName": "the card knows no user {user!r}",
    "UnsupportedSecurityLevel": "the user has another security level on the card: set auth and priv alike",
    "DecryptionError": "the priv passphrase or priv_protocol is not the card's",
    "NotInTimeWindow": "the card's SNMPv3 clock jumps",
    "UnknownEngineID": "its engine id is another one than it says when it is asked for it",
}
"""What a card says of a user, and what to look at."""
# RFC 3416 section 3, in order from 0.
_ERROR_STATUS: Final = (
    *("noError", "tooBig", "noSuchName", "badValue", "readOnly", "genErr", "noAccess", "wrongType", "wrongLength"),
    *("wrongEncoding", "wrongValue", "noCreation", "inconsistentValue", "resourceUnavailable", "commitFailed"),
    *("undoFailed", "authorizationError", "notWritable", "inconsistentName"),
)


class SnmpPort(Protocol):
    """What a source needs of SNMP. Everything raises SnmpError, and nothing else but CancelledError."""

    @property
    def at_once(self) -> int:
        """How many objects one request may have, as far as is known of the card."""
        ...

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return an answer for each OID asked for, `Missing` where there is no value."""
        ...

    async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return the objects that come next after these, each once, by their own OIDs."""
        ...

    async def walk(self, root: str, *, limit_s: float | None = None) -> dict[str, Answer]:
        """Return everything under root, at most MAX_ROWS objects. Raises TimeoutError after limit_s for one of them."""
        ...

    async def set(self, values: Mapping[str, Typed]) -> None:
        """Set objects in one request, all or none."""
        ...

    async def close(self) -> None:
        """Forget the target. The port cannot be used any more."""
        ...


@dataclass(slots=True)
class _Sizes:
    """Objects in one request to a card. most: what it may be asked for; answered: the largest that it has answered."""

    most: int = MAX_BATCH
    answered: int = 1


_sizes_of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Address, _Sizes]] = weakref.WeakKeyDictionary()
"""What is known of each card: an order opens a port of its own, and has no time to find it out."""


class _TooManyError(Exception):
    """The card leaves a request unanswered, and answers a smaller one. CardPort asks in smaller ones from then on."""


_ABSENT: Final = frozenset({Missing.NO_SUCH_OBJECT, Missing.NO_SUCH_INSTANCE, Missing.END_OF_MIB})


class CardPort:
    """SNMP v1, v2c and v3 to one card. `retries`: how often a request is repeated before it counts as unanswered."""

    def __init__(self, options: SnmpOptions, *, retries: int = 1, hears_late_s: float = 0.0) -> None:
        """Connect to nothing yet: the first request looks the name up.

        hears_late_s: before a request is reported as unanswered, an answer that comes later is waited for until so long
        after its first sending: for a caller that asks once.
        """
        self._options = options
        self._retries = retries
        self._address = CardAddress(options)
        self.where = self._address.where
        """The card as the operator knows it."""
        self._access: Access | None = None
        self._socket: CardSocket | None = None
        self._old: CardSocket | None = None
        """The one before, which may still hear late answers."""
        self._late = LateAnswers()
        self._hears_late_s = hears_late_s
        self._is_stale = False
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        """Forget the target."""
        self._address.close()
        sockets = [self._old, self._socket]
        self._old = self._socket = None
        for each in sockets:
            if each is not None:
                await each.close()

    @property
    def late_answers(self) -> int:
        """So many questions were answered after they had been given up."""
        return self._late.count

    @property
    def at_once(self) -> int:
        """How many objects one request may have, as far as is known of the card."""
        return self._sizes.most

    @property
    def _sizes(self) -> _Sizes:
        cards = _sizes_of.setdefault(asyncio.get_running_loop(), {})
        return cards.setdefault((self._options.host, self._options.port), _Sizes())

    def _takes_at_most(self, objects: int) -> None:
        self._sizes.most = min(self.at_once, max(1, objects))

    # --- Requests -----------------------------------------------------------------------------------------------

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return an answer for each OID, `Missing` where there is no value. Raises SnmpError if all are refused."""
        answers: dict[str, Answer] = {}
        rest = list(oids)
        while rest:
            batch: dict[str, Answer] = {}
            part = rest[: self.at_once]
            with contextlib.suppress(_TooManyError):
                await self._get(part, batch, most=min(_MOST_REFUSALS, len(oids)))
                answers |= batch
                rest = rest[len(part) :]
        return answers

    async def _get(self, oids: Sequence[str], answers: dict[str, Answer], *, most: int) -> None:
        """Ask, and add to the answers; where the card refuses, find out which objects it refuses.

        most: refused objects at which asking on is in vain. Whom an error index names is asked alone before that is
        believed: some cards always name the first object, or none; then halves of the question show which one it is.
        """
        rest = list(oids)
        while rest:
            status, index, found = await self._request(GET, rest)
            if status == 0:
                answers.update((oid, found.get(oid, Missing.NO_ANSWER)) for oid in rest)
                return
            named = rest[index - 1] if 1 <= index <= len(rest) else rest[0] if len(rest) == 1 else None
            if status == _NO_SUCH_NAME and named is not None:
                answers[named] = Missing.NO_SUCH_OBJECT
                rest.remove(named)
                continue
            if len(rest) == 1:
                answers[rest[0]] = Missing.REFUSED
                if list(answers.values()).count(Missing.REFUSED) >= most:
                    raise self._refused(status, f"for {rest[0]}")
                return
            if status == _TOO_BIG:
                self._takes_at_most(len(rest) // 2)
            elif named is not None:
                await self._get([named], answers, most=most)
                rest.remove(named)
                if answers[named] is Missing.REFUSED:
                    continue
            half = len(rest) // 2
            await self._get(rest[:half], answers, most=most)
            rest = rest[half:]

    async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return what comes next after each OID, by GETNEXT: the one question that version 1 does not refuse.

        Which answer belongs to which question is not known, for cards leave answers out. Beyond the last object of the
        card comes nothing.
        """
        answers: dict[str, Answer] = {}
        rest = list(oids)
        while rest:
            part = rest[: self.at_once]
            with contextlib.suppress(_TooManyError):
                answers.update(await self._following(part))
                rest = rest[len(part) :]
        return answers

    async def _following(self, oids: list[str]) -> dict[str, Answer]:
        while oids:
            status, index, found = await self._request(GET_NEXT, oids)
            if status == 0:
                return {oid: answer for oid, answer in found.items() if answer is not Missing.END_OF_MIB}
            if status == _TOO_BIG and len(oids) > 1:
                half = len(oids) // 2
                self._takes_at_most(half)
                return await self._following(oids[:half]) | await self._following(oids[half:])
            if status != _NO_SUCH_NAME or not 1 <= index <= len(oids):
                raise self._refused(status, "to what comes next")
            end = parts(oids[index - 1])  # What lies behind this one lies beyond the end as well.
            oids = [oid for oid in oids if parts(oid) < end]
        return {}

    async def walk(self, root: str, after: str | None = None, *, limit_s: float | None = None) -> dict[str, Answer]:
        """Return what lies under root, by GETNEXT: version 1 knows nothing better. after: begin behind this object.

        limit_s: for each request; one that takes longer raises TimeoutError. Raises SnmpError where the card refuses to
        say what comes first; what it refuses later on may lie beyond root.
        """
        answers: dict[str, Answer] = {}
        at = root if after is None else after
        while len(answers) < MAX_ROWS:
            async with asyncio.timeout(limit_s):
                status, _index, found = await self._request(GET_NEXT, [at])
            if status not in (0, _NO_SUCH_NAME) and not answers:
                raise self._refused(status, f"after {at}")
            if status or not found:
                break
            oid, answer = next(iter(found.items()))
            # A card that goes backwards would send us round for ever.
            if answer is Missing.END_OF_MIB or not below(oid, root) or parts(oid) <= parts(at):
                break
            answers[oid] = answer
            at = oid
        return answers

    async def set(self, values: Mapping[str, Typed]) -> None:
        """Set objects in one request, all or none (RFC 3416 4.2.5)."""
        names = list(values)
        status, index, found = await self._request(SET, names, [values[oid] for oid in names])
        if status:
            named = names[index - 1] if 1 <= index <= len(names) else "no object"
            raise self._refused(status, f"for {named}")
        for oid, answer in found.items():
            if answer in _ABSENT:
                msg = f"{self.where} says that it has set {oid}, and that {answer.value}"
                raise SnmpError(msg, unanswered=True)  # One of the two is wrong.

    async def _request(self, kind: str, oids: Sequence[str], values: Sequence[Typed] | None = None) -> Asked:
        """Ask, and again as often as it was set. values: to be SET."""
        timeout_s, tries = self._options.timeout_s, self._retries + 1
        try:
            typed_values = None if values is None else [typed(value.kind, value.value) for value in values]
        except ValueError as error:
            raise SnmpError(str(error)) from error
        async with self._lock:  # A poll and a doctor's probe may come first together.
            socket = await self._opened()
        asked_s = asyncio.get_running_loop().time()
        try:
            answer = await self._ask(socket, kind, oids, typed_values)
        except TimeoutError as error:
            check = "address, user, priv passphrase" if self._options.version == 3 else "address, community"
            self._is_stale = True
            late = await self._heard_late(asked_s, timeout_s)
            raise self._address.silent(timeout_s * tries, check, late) from error
        except RefusedError as error:
            because = _WHY_REFUSED.get(error.reason) or f"it reports {error.reason}"
            msg = f"{self.where} refuses (v3): {because.format(user=self._options.user)}"
            # What refuses proves nothing: an order may have been carried out.
            raise SnmpError(msg, unanswered=kind == SET) from error
        except RequestError as error:
            self._is_stale = True
            msg = f"{self.where}: the request failed in pysnmp: {error}"
            raise SnmpError(msg) from error
        except asyncio.CancelledError:
            self._is_stale = True  # The caller's limit was shorter: this host's own address may be another by now.
            raise
        if answer.status != _TOO_BIG:
            self._sizes.answered = max(self._sizes.answered, len(oids))
        return answer.status, answer.index, answer.found

    async def _ask(
        self, socket: CardSocket, kind: str, oids: Sequence[str], typed_values: Sequence[Any] | None
    ) -> Response:
        """Ask, and find out whether a request is unanswered because it is too large, in the time that it has anyway.

        Raises what `CardSocket.ask` does, and _TooManyError. Cards that know version 3 are not that old.
        """
        timeout_s, tries, answered = self._options.timeout_s, self._retries + 1, self._sizes.answered
        if typed_values is not None or len(oids) <= answered or tries == 1 or self._options.version == 3:
            return await socket.ask(kind, oids, typed_values, timeout_s=timeout_s, tries=tries)
        loop = asyncio.get_running_loop()
        whole = loop.create_task(socket.ask(kind, oids, None, timeout_s=timeout_s, tries=tries))
        few: asyncio.Task[bool] | None = None
        try:
            await asyncio.wait((whole,), timeout=timeout_s)
            if not whole.done():
                few = loop.create_task(self._is_answered(socket, kind, oids[:answered]))
            return await whole
        except TimeoutError:
            if few is not None and few.done() and few.result() and self._sizes.answered < len(oids):
                self._takes_at_most(self._sizes.answered)
                raise _TooManyError from None
            raise
        finally:
            asking = [each for each in (whole, few) if each is not None]
            for each in asking:
                each.cancel()
            await asyncio.wait(asking)

    async def _is_answered(self, socket: CardSocket, kind: str, oids: Sequence[str]) -> bool:
        with contextlib.suppress(TimeoutError, RefusedError, RequestError):
            await socket.ask(kind, oids, None, timeout_s=self._options.timeout_s, tries=self._retries)
            return True
        return False

    async def _heard_late(self, asked_s: float, timeout_s: float) -> str:
        """Return what to say of answers that come too late; "": of none."""
        now_s = asyncio.get_running_loop().time
        if now_s() < asked_s + self._hears_late_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(asked_s + self._hears_late_s):
                    await self._late.wait()
        return self._late.words(now_s(), timeout_s)

    async def _opened(self) -> CardSocket:
        """Return the socket to the card, new after a failure: either address may have changed."""
        if self._socket is None or self._address.again or self._is_stale:
            address = await self._address.look_up()
            if self._access is None:
                self._access = await self._read()
            made = CardSocket(await engine_for(self._access.user), self._access, self._heard)
            try:
                await made.open(address)
            except OSError as error:
                msg = f"no way to {self.where}: {error.strerror or error}"
                raise SnmpError(msg, unanswered=True) from error
            older, self._old, self._socket, self._is_stale = self._old, self._socket, made, False
            if self._old is not None:
                self._old.leave()
            if older is not None:
                await older.close()
        return self._socket

    def _heard(self, now_s: float, asked_s: float) -> None:
        self._late.heard(now_s=now_s, asked_s=asked_s)

    async def _read(self) -> Access:
        """Read the secrets, and make keys of version 3's."""
        options = self._options
        try:
            if options.version != 3:
                community = b"public" if options.community is None else options.community.read()
                return Access(self.where, options.version, community=community)
            user = await asyncio.to_thread(User.read, options.user or "", options)
        except SecretError as error:
            raise SnmpError(str(error)) from error
        except UserError as error:
            msg = f"{self.where}: {error}"
            raise SnmpError(msg) from error
        return Access(self.where, 3, user=user)

    def _refused(self, status: int, what: str) -> SnmpError:
        name = _ERROR_STATUS[status] if status < len(_ERROR_STATUS) else f"error {status}"
        return SnmpError(f"{self.where}: {name} {what}")
