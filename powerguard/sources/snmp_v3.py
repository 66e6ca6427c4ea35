"""Version 3 of SNMP to one card: finding its engine and its time, and answers that prove whose they are.

What is believed without a proof, where the user has one (RFC 3414 4, RFC 3412 7.1):

- which engine the card has: nothing can be proved before that is known;
- why the card refuses (another engine, unknown user, wrong digest, another level, undecipherable): where no answer
  comes in the same try, the engine is looked for anew, or it is told. Who forges such a Report takes no answer away.

The card's time is never taken from such a message: a question that was sealed for a time to come could be recorded, and
sent to the card when that time has come. After the engine is found the card is asked with a time of nought, which it
refuses with its own, proved.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from powerguard.clock import Clock
from powerguard.protocols import snmp_ber as ber
from powerguard.protocols import snmp_request, snmp_v3
from powerguard.protocols.snmp_ber import MessageError, Reader
from powerguard.protocols.snmp_hello import hello
from powerguard.protocols.snmp_request import Response
from powerguard.protocols.snmp_v3 import ScopedPdu, UsmMessage
from powerguard.sources.snmp_socket import CardSocket, RefusedError
from powerguard.sources.snmp_usm import EngineClock, Keys, UndecipherableError, User

log = structlog.get_logger(__name__)

_LAST_ID: Final = 2**31 - 1
_IDS: Final = random.SystemRandom()
_ROUNDS: Final = 4
"""How often one question is asked while Reports say that it went to another engine, or for another time."""
_ENGINE_ID_BYTES: Final = range(5, 33)
_NO_CONTEXT: Final = b""


@dataclass(slots=True)
class Engine:
    """A card's engine: our keys for it, and its time."""

    keys: Keys
    where: str
    clock: Clock
    time: EngineClock = field(default_factory=EngineClock)

    def place(self) -> tuple[int, int]:
        """Return its boots and time by now; noughts where nobody has proved them."""
        return (0, 0) if self.time.boots < 0 else (self.time.boots, self.time.now(self.clock()))

    def hears(self, message: UsmMessage, *, late: bool) -> None:
        """Move the time on with an authentic message. late: it says that we have the wrong time.

        Raises MessageError on one that is older than the window. But a card that starts again and does not count that
        would be deaf to us for ever: what it says of its time, in a Report and to the number of our question, is taken.
        """
        now_s = self.clock()
        if self.time.takes(message.boots, message.time_s, now_s):
            return
        anew = EngineClock()
        if not late or not anew.takes(message.boots, message.time_s, now_s):
            msg = "an answer from long ago"
            raise MessageError(msg)
        log.warning("engine_time_went_back", where=self.where, was=self.place(), now=(anew.boots, anew.time_s))
        self.time = anew


@dataclass(slots=True)
class Card:
    """What is known of a card; it outlives sockets. engine None: not found yet."""

    where: str
    user: User
    clock: Clock
    engine: Engine | None = None

    async def engine_of(self, engine_id: bytes) -> Engine:
        """Return the engine of this name: the one that is known, or one whose time is not known yet."""
        if self.engine is not None and self.engine.keys.engine_id == engine_id:
            return self.engine
        # A long key of privacy is made of another megabyte.
        return Engine(await asyncio.to_thread(self.user.keys, engine_id), self.where, self.clock)

    def has(self, engine: Engine) -> None:
        """Take it for the card's own; tell when it is another one than before."""
        if self.engine is not None and self.engine is not engine:
            because = "another card answers there, or this one was set up anew; traps.users may name the old engine id"
            was, now = self.engine.keys.engine_id.hex(), engine.keys.engine_id.hex()
            log.warning("engine_changed", where=self.where, because=because, was=was, now=now)
        self.engine = engine


@dataclass(slots=True)
class _Question:
    """Something that was asked. engine None: which one is there. refused: why the card does not answer, as it says.

    answer: of the first question the engine id, of others a Response; None: it was asked for the wrong time.
    numbers: of its messages, and when each was sent.
    """

    request_id: int
    engine: Engine | None
    answer: "asyncio.Future[Response | bytes | None]"
    numbers: dict[int, float] = field(default_factory=dict)
    refused: bytes = b""


class UserSocket(CardSocket):
    """A socket to one card of version 3. Whoever forges an answer must have the user's keys."""

    def __init__(self, card: Card) -> None:
        """Be opened. card: what is known of it."""
        super().__init__()
        self._card = card
        self._names: dict[str, bytes] = {}
        self._waiting: dict[int, _Question] = {}
        self._given_up: dict[int, _Question] = {}
        """Without an answer, by the numbers of their messages."""
        self._is_met = False
        self._meeting = asyncio.Lock()

    # --- Asking -------------------------------------------------------------------------------------------------

    async def ask(
        self, tag: int, oids: Sequence[str], values: Sequence[bytes] | None, *, timeout_s: float, tries: int
    ) -> Response:
        """Ask, and again after each timeout_s. values: to be SET; None: it is a question.

        Raises TimeoutError; RefusedError where the card said why.
        """
        refused, doubted = RefusedError(snmp_v3.NOT_IN_TIME), None
        for _ in range(_ROUNDS):
            engine = await self._met(timeout_s=timeout_s, tries=tries)
            if engine is doubted:
                break  # It is the same card as before.
            rows = snmp_request.rows(oids, values, self._names)
            try:
                answer = await self._asked(engine, tag, rows, timeout_s=timeout_s, tries=tries)
            except RefusedError as error:
                # Nothing proves that an order was not carried out: it is not given again.
                if error.counter != snmp_v3.UNKNOWN_ENGINE or tag == ber.SET:
                    raise
                refused, doubted, self._is_met = error, engine, False
                continue
            if isinstance(answer, Response):
                return answer
        raise refused

    async def _met(self, *, timeout_s: float, tries: int) -> Engine:
        """Find the engine, for each socket anew; one that is not known proves itself with its time, if it can."""
        card = self._card
        if self._is_met and card.engine is not None:
            return card.engine
        async with self._meeting:  # A poll and a doctor's probe may come first together.
            if self._is_met and card.engine is not None:
                return card.engine
            engine_id = await self._asked(None, ber.GET, (), timeout_s=timeout_s, tries=tries)
            if not isinstance(engine_id, bytes):
                raise TimeoutError
            engine = await card.engine_of(engine_id)
            if card.user.level and engine is not card.engine:
                await self._asked(engine, ber.GET, (), timeout_s=timeout_s, tries=tries)
            card.has(engine)
            self._is_met = True
            return engine

    async def _asked(
        self,
        engine: Engine | None,
        tag: int,
        rows: Iterable[tuple[bytes, bytes]],
        *,
        timeout_s: float,
        tries: int,
    ) -> Response | bytes | None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Response | bytes | None] = loop.create_future()
        question = _Question(_IDS.randrange(_LAST_ID), engine, future)
        content = snmp_request.content(question.request_id, rows)

        def packet() -> bytes:
            if question.refused:  # Asked again it would refuse again.
                raise TimeoutError
            number = _IDS.randrange(_LAST_ID)
            question.numbers[number] = loop.time()
            self._waiting[number] = question
            if engine is None:
                return hello(3, number)
            keys = engine.keys
            scoped = snmp_v3.scoped(keys.engine_id, _NO_CONTEXT, tag, content)
            return keys.sealed(number, keys.user.level | snmp_v3.REPORTABLE, *engine.place(), scoped)

        try:
            return await self.answered(future, packet, timeout_s=timeout_s, tries=tries)
        except TimeoutError:
            if question.refused:
                raise RefusedError(question.refused) from None
            raise
        finally:
            for number in question.numbers:
                self._waiting.pop(number, None)
            if future.cancelled() and not question.refused:
                self._given_up.update(dict.fromkeys(question.numbers, question))

    # --- Hearing (RFC 3414 3.2) ---------------------------------------------------------------------------------

    def take(self, data: bytes) -> None:
        """Hand an answer that is proved to whoever waits for it. Raises MessageError on whatever else comes."""
        message = snmp_v3.parse(data)
        given_up = self._given_up.get(message.message_id)
        if given_up is not None:
            self._take_late(given_up, message)
            return
        question = self._waiting.get(message.message_id)
        if question is None or question.answer.done():
            msg = "an answer to no question of ours"
            raise MessageError(msg)
        if question.engine is None:
            pdu = snmp_v3.parse_scoped(message.payload)
            _check(not message.level and pdu.tag == ber.REPORT, "no Report where an engine id was asked for")
            _check(len(message.engine_id) in _ENGINE_ID_BYTES, "an engine id that no card has")
            question.answer.set_result(message.engine_id)
            return
        keys, level = question.engine.keys, question.engine.keys.user.level
        proved = bool(message.level & snmp_v3.AUTH)
        if proved:
            _check(keys.is_digest_right(message), "a wrong digest")
        try:
            pdu = snmp_v3.parse_scoped(keys.opened(message))
        except (UndecipherableError, MessageError):
            if proved and message.level == level:  # The card's own bytes: it is the privacy passphrase that is wrong.
                question.refused = snmp_v3.UNDECIPHERABLE
            raise
        if pdu.tag == ber.REPORT:
            self._take_report(question, question.engine, message, snmp_v3.reported(pdu))
            return
        _check(pdu.tag == ber.RESPONSE and message.level == level, "an answer of another security level")
        _check(_is_of(keys, message), "an answer of another engine or user")
        if proved:
            question.engine.hears(message, late=False)
        question.answer.set_result(_response(pdu, question, keys))

    def _take_late(self, question: _Question, message: UsmMessage) -> None:
        """Count what answers a question that was given up, and believe nothing else that it says.

        Raises MessageError where there is no proof and it is no Report, which has none.
        """
        keys = None if question.engine is None else question.engine.keys
        if keys is not None and message.level & snmp_v3.AUTH:
            _check(keys.is_digest_right(message), "a wrong digest")
        elif keys is None or keys.user.level:
            _check(snmp_v3.parse_scoped(message.payload).tag == ber.REPORT, "no proof, and no Report")
        asked_s = question.numbers[message.message_id]
        for number in question.numbers:
            self._given_up.pop(number, None)
        self.late.heard(now_s=asyncio.get_running_loop().time(), asked_s=asked_s)

    def _take_report(self, question: _Question, engine: Engine, message: UsmMessage, counter: bytes) -> None:
        proved = bool(message.level & snmp_v3.AUTH)
        is_other = message.engine_id != engine.keys.engine_id
        _check(is_other == (counter == snmp_v3.UNKNOWN_ENGINE), "an engine that does not know itself")
        _check(proved or counter != snmp_v3.NOT_IN_TIME, "a time without a proof")
        question.refused = counter
        if proved:
            engine.hears(message, late=counter == snmp_v3.NOT_IN_TIME)
        if counter == snmp_v3.NOT_IN_TIME:
            question.answer.set_result(None)


def _is_of(keys: Keys, message: UsmMessage) -> bool:
    return message.engine_id == keys.engine_id and message.user == keys.user.name


def _check(is_so: bool, otherwise: str) -> None:  # noqa: FBT001 - what is checked
    if not is_so:
        raise MessageError(otherwise)


def _response(pdu: ScopedPdu, question: _Question, keys: Keys) -> Response:
    response = snmp_request.response(Reader(pdu.content, 0, len(pdu.content)))
    _check(response.request_id == question.request_id, "an answer to another question")
    _check((pdu.context_engine, pdu.context_name) == (keys.engine_id, _NO_CONTEXT), "an answer from another context")
    return response
