"""SNMP behind one small port: get, walk, set. Versions 1 and 2c by `snmp_community`, version 3 by `snmp_v3`.

- Cards answer with fewer, other or swapped objects: values are keyed by OID, the rest is missing.
- An answer with an error status still carries objects that look good: the status is looked at first, always.
- SNMPv1 refuses a whole request for one missing object: the one that the error index names is taken out and the rest
  is asked again.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from powerguard.clock import Clock, boottime_s
from powerguard.options import SecretError
from powerguard.profiles.values import Answer, Missing, Oid, below, parts
from powerguard.protocols import snmp_ber as ber
from powerguard.protocols import snmp_request as codec
from powerguard.protocols import snmp_v3
from powerguard.protocols.snmp_request import Value
from powerguard.sources.snmp_community import CommunitySocket
from powerguard.sources.snmp_late import LateAnswers
from powerguard.sources.snmp_options import SnmpOptions
from powerguard.sources.snmp_place import Asked, Place, SnmpError, Typed
from powerguard.sources.snmp_socket import CardSocket, RefusedError

if TYPE_CHECKING:
    from powerguard.sources.snmp_v3 import Card

__all__ = ["MAX_BATCH", "MAX_ROWS", "CardPort", "SnmpError", "SnmpPort", "Typed", "garbled_packets"]

MAX_BATCH: Final = 15
"""Objects in one request: old cards answer tooBig, or nothing at all, to more."""
MAX_ROWS: Final = 256
"""Rows of one walk: a card that lies about its table must not keep us for ever."""
_MOST_REFUSALS: Final = 3
_TOO_BIG, _NO_SUCH_NAME = 1, 2
_WHY_REFUSED: Final = {
    snmp_v3.WRONG_DIGEST: "the auth passphrase or auth_protocol is not the card's",
    snmp_v3.UNKNOWN_USER: "the card knows no user {user!r}",
    snmp_v3.UNSUPPORTED_LEVEL: "the user has another security level on the card: set auth and priv alike",
    snmp_v3.UNDECIPHERABLE: "the priv passphrase or priv_protocol is not the card's",
    snmp_v3.NOT_IN_TIME: "the card's SNMPv3 clock jumps",
    snmp_v3.UNKNOWN_ENGINE: "its engine id is another one than it says when it is asked for it",
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

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return an answer for each OID asked for, `Missing` where there is no value."""
        ...

    async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return the objects that come next after these, each once, by their own OIDs."""
        ...

    async def walk(self, root: str) -> dict[str, Answer]:
        """Return everything under root, at most MAX_ROWS objects."""
        ...

    async def set(self, values: Mapping[str, Typed]) -> None:
        """Set objects in one request, all or none."""
        ...

    async def close(self) -> None:
        """Forget the target. The port cannot be used any more."""
        ...


_MISSING: Final = {
    ber.NULL: Missing.NULL,
    codec.NO_SUCH_OBJECT: Missing.NO_SUCH_OBJECT,
    codec.NO_SUCH_INSTANCE: Missing.NO_SUCH_INSTANCE,
    codec.END_OF_MIB: Missing.END_OF_MIB,
}
_ABSENT: Final = frozenset({Missing.NO_SUCH_OBJECT, Missing.NO_SUCH_INSTANCE, Missing.END_OF_MIB})


def garbled_packets() -> int:
    """Packets of this process that cannot be read, prove nothing, or answer no question of ours."""
    return CardSocket.garbled


class CardPort:
    """SNMP v1, v2c and v3 to one card. `retries`: how often a request is repeated before it counts as unanswered."""

    def __init__(
        self, options: SnmpOptions, *, retries: int = 1, clock: Clock = boottime_s, hears_late_s: float = 0.0
    ) -> None:
        """Connect to nothing yet: the first request looks the name up. clock: of version 3's time window.

        hears_late_s: before a request is told as unanswered, an answer that comes later is waited for until so long
        after its first sending: for whoever asks once.
        """
        self._options = options
        self._retries = retries
        self._place = Place(options)
        self.where = self._place.where
        """The card as the operator knows it."""
        self._clock = clock
        self._card: Card | None = None
        self._socket: CardSocket | None = None
        self._old: CardSocket | None = None
        """The one before, which may still hear late answers."""
        self._late = LateAnswers()
        self._hears_late_s = hears_late_s
        self._is_stale = False
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        """Forget the target."""
        sockets = [self._old, self._socket]
        self._old = self._socket = None
        for each in sockets:
            if each is not None:
                await each.close()

    @property
    def late_answers(self) -> int:
        """So many questions were answered after they had been given up."""
        return self._late.count

    # --- Requests -----------------------------------------------------------------------------------------------

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return an answer for each OID, `Missing` where there is no value. Raises SnmpError if all are refused."""
        answers: dict[str, Answer] = {}
        for start in range(0, len(oids), MAX_BATCH):
            batch: dict[str, Answer] = {}
            await self._get(oids[start : start + MAX_BATCH], batch, most=min(_MOST_REFUSALS, len(oids)))
            answers |= batch
        return answers

    async def _get(self, oids: Sequence[str], answers: dict[str, Answer], *, most: int) -> None:
        """Ask, and add to the answers; where the card refuses, tell what it refuses from the rest.

        most: refused objects at which asking on is in vain. Whom an error index names is asked alone before that is
        believed: some cards always name the first object, or none; then halves of the question show which one it is.
        """
        rest = list(oids)
        while rest:
            status, index, found = await self._request(ber.GET, rest)
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
            if status != _TOO_BIG and named is not None:
                await self._get([named], answers, most=most)
                rest.remove(named)
                if answers[named] is Missing.REFUSED:
                    continue
            half = len(rest) // 2
            await self._get(rest[:half], answers, most=most)
            rest = rest[half:]

    async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return what comes next after each OID, by GETNEXT: the one question that version 1 does not refuse.

        Which answer belongs to which question is not told, for cards leave answers out. Beyond the last object of the
        card comes nothing.
        """
        answers: dict[str, Answer] = {}
        for start in range(0, len(oids), MAX_BATCH):
            answers.update(await self._following(list(oids[start : start + MAX_BATCH])))
        return answers

    async def _following(self, oids: list[str]) -> dict[str, Answer]:
        while oids:
            status, index, found = await self._request(ber.GET_NEXT, oids)
            if status == 0:
                return {oid: answer for oid, answer in found.items() if answer is not Missing.END_OF_MIB}
            if status == _TOO_BIG and len(oids) > 1:
                half = len(oids) // 2
                return await self._following(oids[:half]) | await self._following(oids[half:])
            if status != _NO_SUCH_NAME or not 1 <= index <= len(oids):
                raise self._refused(status, "to what comes next")
            end = parts(oids[index - 1])  # What lies behind this one lies beyond the end as well.
            oids = [oid for oid in oids if parts(oid) < end]
        return {}

    async def walk(self, root: str, after: str | None = None) -> dict[str, Answer]:
        """Return what lies under root, by GETNEXT: version 1 knows nothing better. after: begin behind this object.

        Raises SnmpError where the card refuses to say what comes first; what it refuses later on may lie beyond root.
        """
        answers: dict[str, Answer] = {}
        at = root if after is None else after
        while len(answers) < MAX_ROWS:
            status, _index, found = await self._request(ber.GET_NEXT, [at])
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
        status, index, found = await self._request(ber.SET, names, [values[oid] for oid in names])
        if status:
            named = names[index - 1] if 1 <= index <= len(names) else "no object"
            raise self._refused(status, f"for {named}")
        for oid, answer in found.items():
            if answer in _ABSENT:
                msg = f"{self.where} says that it has set {oid}, and that {answer.value}"
                raise SnmpError(msg, unanswered=True)  # One of the two is wrong.

    async def _request(self, tag: int, oids: Sequence[str], values: Sequence[Typed] | None = None) -> Asked:
        """Ask, and again as often as it was told. values: to be SET."""
        timeout_s, tries = self._options.timeout_s, self._retries + 1
        told = None if values is None else [_encoded(value) for value in values]
        async with self._lock:  # A poll and a doctor's probe may come first together.
            socket = await self._opened()
        asked_s = asyncio.get_running_loop().time()
        try:
            answer = await socket.ask(tag, oids, told, timeout_s=timeout_s, tries=tries)
        except TimeoutError as error:
            check = "address, user, priv passphrase" if self._options.version == 3 else "address, community"
            self._is_stale = True
            late = await self._heard_late(asked_s, timeout_s)
            raise self._place.silent(timeout_s * tries, check, late) from error
        except RefusedError as error:
            because = _WHY_REFUSED.get(error.counter) or f"it reports {ber.dotted(error.counter)}"
            msg = f"{self.where} refuses (v3): {because.format(user=self._options.user)}"
            # What refuses proves nothing: an order may have been carried out.
            raise SnmpError(msg, unanswered=tag == ber.SET) from error
        except asyncio.CancelledError:
            self._is_stale = True  # Whoever asked had less patience: this host's own address may be another by now.
            raise
        return answer.status, answer.index, {oid: _understood(kind, value) for oid, kind, value in answer.found}

    async def _heard_late(self, asked_s: float, timeout_s: float) -> str:
        """Return what to say of answers that come too late; "": of none."""
        now_s = asyncio.get_running_loop().time
        if now_s() < asked_s + self._hears_late_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(asked_s + self._hears_late_s):
                    await self._late.wait()
        return self._late.words(now_s(), timeout_s)

    async def _opened(self) -> CardSocket:
        """Return the socket to the card, anew after a failure: the card's address may be another, and this host's."""
        if self._socket is None or self._place.again or self._is_stale:
            address = await self._place.address()
            made = await self._made()
            try:
                await made.open(address[:2])
            except OSError as error:
                msg = f"no way to {self.where}: {error.strerror or error}"
                raise SnmpError(msg, unanswered=True) from error
            made.late = self._late
            older, self._old, self._socket, self._is_stale = self._old, self._socket, made, False
            if self._old is not None:
                self._old.leave()
            if older is not None:
                await older.close()
        return self._socket

    async def _made(self) -> CardSocket:
        if self._options.version != 3:
            return CommunitySocket(0 if self._options.version == 1 else 1, self._community())
        # Here, for a host without version 3 needs none of it.
        from powerguard.sources.snmp_usm import User, UserError  # noqa: PLC0415
        from powerguard.sources.snmp_v3 import Card, UserSocket  # noqa: PLC0415

        if self._card is None:
            try:
                user = await asyncio.to_thread(User.read, self._options.user or "", self._options)
            except SecretError as error:
                raise SnmpError(str(error)) from error
            except UserError as error:
                msg = f"{self.where}: {error}"
                raise SnmpError(msg) from error
            self._card = Card(self.where, user, self._clock)
        return UserSocket(self._card)

    def _community(self) -> bytes:
        try:
            return b"public" if self._options.community is None else self._options.community.read()
        except SecretError as error:
            raise SnmpError(str(error)) from error

    def _refused(self, status: int, what: str) -> SnmpError:
        name = _ERROR_STATUS[status] if status < len(_ERROR_STATUS) else f"error {status}"
        return SnmpError(f"{self.where}: {name} {what}")


def _encoded(value: Typed) -> bytes:
    match value.kind, value.value:
        case "octets", bytes() as content:
            return ber.element(ber.OCTETS, content)
        case "oid", str() as dotted:
            return ber.oid(dotted)
        case "integer", int() as number:
            return ber.integer(number)
        case ("gauge" | "timeticks") as kind, int() as number:
            return ber.unsigned(ber.GAUGE32 if kind == "gauge" else ber.TIMETICKS, number)
        case kind, _:
            msg = f"{value.value!r:.60} is no value of type {kind}"
            raise SnmpError(msg)


def _understood(tag: int, value: Value) -> Answer:
    if value is None:
        return _MISSING[tag]
    return Oid(value) if isinstance(value, str) else value
