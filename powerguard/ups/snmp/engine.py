"""Questions to an SNMP card, and what its answers say; all that touches pysnmp, but for traps (`notification`).

Versions 1 and 2c need no more than pysnmp's codec. Version 3 also needs its user security model, which is used through
RFC 3412's two services that seal and open a message (`Version3`). pysnmp's transports, timers and command generator
are not used: its timers follow wall time, it knows a card by its community alone, and after a Report it repeats a
request by itself, which for a SET is a second order. Sockets and deadlines are ours, by the loop's clock.

What is overridden, each for a test that pysnmp 7.1.30 alone fails (decision 0226):

- `_Sent`: numbers that count up (test_no_salt_and_no_number_comes_twice), and a question that ends with the first
  message that names it, forged or not (test_what_is_forged_is_no_answer_and_takes_none_away).
- `_Usm`: the time that any message names is taken (test_nothing_is_sealed_for_a_time_that_nobody_proved), the digest
  of a message without a user is not looked at (test_what_is_forged_..., "a Report: without a user"), and notes of each
  message are kept (test_ten_thousand_polls_leave_nothing, test_garbage_is_counted_and_nothing_else).
- `_Integers`: pyasn1 refuses an answer with a number that lacks its first byte
  (test_a_number_without_the_byte_that_makes_it_positive). pysnmp's models of version 3 read with it as well.
"""

import asyncio
import contextlib
import functools
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, Literal, Self, cast

import structlog
from pyasn1.codec.ber import decoder, encoder
from pyasn1.type import univ
from pysnmp.carrier.base import AbstractTransportDispatcher
from pysnmp.entity import config
from pysnmp.entity.engine import SnmpEngine
from pysnmp.proto import api, errind, rfc1902, rfc1905, rfc3411
from pysnmp.proto.error import ProtocolError, StatusInformation
from pysnmp.proto.mpmod import cache as message_cache
from pysnmp.proto.mpmod import rfc3412
from pysnmp.proto.mpmod.rfc3412 import SNMPv3Message, SnmpV3MessageProcessingModel
from pysnmp.proto.secmod import cache as security_cache
from pysnmp.proto.secmod.rfc3414 import SnmpUSMSecurityModel
from pysnmp.proto.secmod.rfc3414 import service as rfc3414
from pysnmp.proto.secmod.rfc3414.service import UsmSecurityParameters

from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid, parts
from powerguard.ups.snmp.options import AuthProtocol, PrivProtocol, SnmpOptions, TrapUser

log = structlog.get_logger(__name__)

Version = Literal[1, "2c", 3]
NUMBERS: Final[dict[Version, int]] = {1: 0, "2c": 1, 3: 3}
"""Versions as messages number them."""
V3: Final = NUMBERS[3]
USM: Final = 3
"""The user security model's number."""
GET, GET_NEXT, SET = "GetRequest", "GetNextRequest", "SetRequest"
_NO_AUTH: Final = 1
"""A security level as pysnmp numbers them."""
_LAST: Final = 2**31 - 1
_LONGEST_MESSAGE: Final = 65507
_SEQUENCE: Final = b"\x30"
_RANDOM: Final = random.SystemRandom()
_REMEMBER_S: Final = 10.0
"""Time for which the answer to a question that was given up counts as late: the longest timeout_s, twice."""
_ROUNDS: Final = 5
"""Sendings of one question while Reports name another engine or time."""
_SHORTEST_SECRET: Final = 8
_SYS_UP_TIME: Final = "1.3.6.1.2.1.1.3.0"
_SYS_OBJECT_ID: Final = "1.3.6.1.2.1.1.2.0"

_AUTH: Final[dict[AuthProtocol, tuple[int, ...]]] = {
    "MD5": config.USM_AUTH_HMAC96_MD5,
    "SHA": config.USM_AUTH_HMAC96_SHA,
    "SHA-224": config.USM_AUTH_HMAC128_SHA224,
    "SHA-256": config.USM_AUTH_HMAC192_SHA256,
    "SHA-384": config.USM_AUTH_HMAC256_SHA384,
    "SHA-512": config.USM_AUTH_HMAC384_SHA512,
}
_PRIV: Final[dict[PrivProtocol, tuple[int, ...]]] = {
    "DES": config.USM_PRIV_CBC56_DES,
    "AES": config.USM_PRIV_CFB128_AES,
    "AES-192": config.USM_PRIV_CFB192_AES,
    "AES-256": config.USM_PRIV_CFB256_AES,
}
_UNSIGNED: Final = tuple(
    kind
    for module, names in (
        (api.PROTOCOL_MODULES[0], ("Counter", "Gauge", "TimeTicks")),
        (rfc1902, ("Counter32", "Gauge32", "Unsigned32", "TimeTicks", "Counter64")),
    )
    for kind in (getattr(module, name) for name in names)
)
_LONGEST_INTEGER: Final = 8
"""Bytes of the largest one that a card may mean: a Counter64."""
_TYPES: Final = {
    "integer": rfc1902.Integer32,
    "gauge": rfc1902.Gauge32,
    "timeticks": rfc1902.TimeTicks,
    "octets": rfc1902.OctetString,
    "oid": rfc1902.ObjectName,
}


class RefusedError(Exception):
    """The card said why it does not answer. reason: pysnmp's name for it, or the OID of the counter in its Report."""

    def __init__(self, reason: str) -> None:
        """Keep the reason."""
        super().__init__(reason)
        self.reason = reason


class RequestError(Exception):
    """pysnmp cannot make a request of this."""


class UserError(Exception):
    """A user that cannot be used: what, where, what would be right."""


class MessageError(Exception):
    """Bytes that are no SNMP message, or none of the wanted kind."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. status, index: RFC 3416. found: what was answered, by OID."""

    status: int
    index: int
    found: dict[str, Answer]


@dataclass(slots=True)
class Access:
    """How one card is spoken to. engine_id: the card's, once it has proved it; empty before."""

    where: str
    version: Version
    community: bytes = field(default=b"", repr=False)
    user: "User | None" = None
    engine_id: bytes = b""

    def has(self, engine_id: bytes) -> None:
        """Keep the engine id; report when it is not the one from before."""
        if self.engine_id not in (b"", engine_id):
            because = "another card answers there, or this one was reset: check the engine id in traps.users"
            was, now = self.engine_id.hex(), engine_id.hex()
            log.warning("engine_changed", where=self.where, because=because, was=was, now=now)
        self.engine_id = engine_id


# --- One card -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Question:
    """Something that was asked. answer: a Response, or a Report's reason. refused: a Report that proves nothing."""

    number: int
    sent_s: float
    answer: "asyncio.Future[Response | str]"
    is_greeting: bool
    refused: str = ""
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class _Opened:
    """A message that names a question. pdu: of an answer. reason: of a Report, or why it cannot be read."""

    question: int
    pdu: Any = None
    reason: str = ""
    is_report: bool = False
    proved: bool = False


_peers = itertools.count(1)
"""Numbers by which pysnmp tells cards apart."""


class CardSocket(asyncio.DatagramProtocol):
    """A connected socket to one card, so that the kernel drops what others send, and what was asked through it.

    engine: for version 3. garbled: packets of all sockets that cannot be read, prove nothing, or answer no question.
    """

    garbled = 0

    def __init__(self, engine: "Engine | None", access: Access, late: Callable[[float, float], None]) -> None:
        """Be opened by `open`. late: called when an answer comes too late, with the time of its question."""
        self._engine = engine
        self._access = access
        self._late = late
        self._questions: dict[int, _Question] = {}
        self._peer = next(_peers)
        self._transport: asyncio.DatagramTransport | None = None
        self._leaves: asyncio.TimerHandle | None = None
        self.closed = asyncio.Event()
        self._is_met = False
        self._meeting = asyncio.Lock()

    async def open(self, address: tuple[str, int]) -> None:
        """Open it to this card. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, remote_addr=address)
        if self._engine is not None:
            self._engine.sockets.add(self)

    async def ask(
        self, kind: str, oids: Sequence[str], values: Sequence[Any] | None, *, timeout_s: float, tries: int
    ) -> Response:
        """Ask, and again after each timeout_s. values: to be SET; None: it is a question.

        Raises TimeoutError; RefusedError when the card said why; RequestError.
        """
        rows = list(zip(map(name_of, oids), [None] * len(oids) if values is None else values, strict=True))
        if self._engine is None:
            return cast("Response", await self._asked(kind, rows, timeout_s=timeout_s, tries=tries))
        if kind == SET:
            # An order is sent once. Engine and time are found out before it.
            known = self._access.engine_id
            await self.ask(GET, [_SYS_UP_TIME], None, timeout_s=timeout_s, tries=tries)
            if known not in {b"", self._access.engine_id}:
                reason = "UnknownEngineID"  # Another card than the one that was looked at before the order.
                raise RefusedError(reason)
            answer = await self._asked(kind, rows, timeout_s=timeout_s, tries=tries)
            if isinstance(answer, str):
                raise RefusedError(answer)
            return answer
        if self._is_met:
            return await self._in_rounds(self._engine, kind, rows, timeout_s=timeout_s, tries=tries)
        async with self._meeting:  # A poll and a doctor's probe may come first together.
            answer = await self._in_rounds(self._engine, kind, rows, timeout_s=timeout_s, tries=tries)
            self._is_met = True
            return answer

    async def _in_rounds(
        self, engine: "Engine", kind: str, rows: list[tuple[Any, Any]], *, timeout_s: float, tries: int
    ) -> Response:
        """Ask in version 3 until engine and time are the card's (RFC 3414 4)."""
        refused, doubted = RefusedError("NotInTimeWindow"), b""
        for _ in range(_ROUNDS):
            asked_as = engine.engine_id_of(self._peer)
            if doubted and asked_as == doubted:
                break  # It is the same engine as before.
            try:
                answer = await self._asked(kind, rows, timeout_s=timeout_s, tries=tries)
            except RefusedError as error:
                if error.reason != "UnknownEngineID":
                    raise
                answer = error.reason
            if isinstance(answer, Response):
                self._access.has(engine.engine_id_of(self._peer))
                return answer
            if answer == "UnknownEngineID" and asked_as:
                refused, doubted = RefusedError(answer), asked_as
                engine.forget(self._peer)
                self._peer = next(_peers)
            elif answer not in {"UnknownEngineID", "NotInTimeWindow"}:
                raise RefusedError(answer)
        raise refused

    async def _asked(self, kind: str, rows: list[tuple[Any, Any]], *, timeout_s: float, tries: int) -> Response | str:
        """Send, and again after each timeout_s, until there is an answer."""
        loop = asyncio.get_running_loop()
        is_greeting = self._engine is not None and not self._engine.engine_id_of(self._peer)
        question = _Question(_RANDOM.randrange(1, _LAST), loop.time(), loop.create_future(), is_greeting)
        self._questions[question.number] = question
        pdu = make_pdu(NUMBERS[self._access.version], kind, rows, question.number)
        try:
            for _ in range(tries):
                if question.refused:  # Asked again it would refuse again.
                    break
                self._send(pdu, question)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        return await asyncio.shield(question.answer)
            if question.refused:
                raise RefusedError(question.refused)
            raise TimeoutError
        finally:
            if question.answer.done():
                self._forget(question)
            else:
                question.answer.cancel()
                loop.call_later(_REMEMBER_S, self._forget, question)

    def _send(self, pdu: Any, question: _Question) -> None:  # noqa: ANN401 - pysnmp ships no types
        access = self._access
        try:
            if self._engine is None or access.user is None:
                message = community_message(NUMBERS[access.version], access.community, pdu)
            else:
                message = self._engine.seal(self._peer, access.user, pdu, question.number)
        except StatusInformation as error:
            raise RequestError(reason_of(error)) from None
        except Exception as error:  # noqa: BLE001 - PySnmpError, pyasn1's errors, and what pysnmp trips over
            # The text of such an error may hold a secret.
            raise RequestError(type(error).__name__) from None
        if self._transport is not None:
            self._transport.sendto(message)

    def _forget(self, question: _Question) -> None:
        self._questions.pop(question.number, None)
        if self._engine is not None:
            self._engine.sent.forget(question.number)

    def datagram_received(self, data: bytes, addr: object) -> None:  # noqa: ARG002 - the kernel lets only the card's through
        """Take a packet, or count it."""
        opened = None
        if data[:1] == _SEQUENCE and len(data) <= _LONGEST_MESSAGE:
            opened = self._open(data) if self._engine is None else self._engine.open(self._peer, data)
        if opened is None or not self._takes(opened):
            CardSocket.garbled += 1

    def _open(self, data: bytes) -> _Opened | None:
        """Read an answer of version 1 or 2c; None: it is none."""
        try:
            version, message = read_message(data)
            if version != NUMBERS[self._access.version] or bytes(message[1]) != self._access.community:
                return None
            pdu = message[2].getComponent()
            return _Opened(int(pdu[0]), pdu) if pdu.tagSet in rfc3411.RESPONSE_CLASS_PDUS else None
        except Exception:  # noqa: BLE001 - whatever a decoder raises on a hostile packet
            return None

    def _takes(self, opened: _Opened) -> bool:
        """End the question that a message answers. Returns whether the message had an answer."""
        question = self._questions.get(opened.question)
        if question is None or (opened.pdu is not None and int(opened.pdu[0]) != question.number):
            return False
        if question.answer.done():
            if not question.answer.cancelled() or question.refused or question.is_late:
                return False
            question.is_late = True
            self._late(asyncio.get_running_loop().time(), question.sent_s)
        elif opened.pdu is not None:
            try:
                question.answer.set_result(_response(opened.pdu))
            except Exception:  # noqa: BLE001 - pyasn1 decodes some parts when they are read
                return False
        elif opened.is_report and (opened.proved or (question.is_greeting and opened.reason == "UnknownEngineID")):
            question.answer.set_result(opened.reason)
        elif opened.is_report and opened.reason == "NotInTimeWindow":
            return False
        else:
            # It is reported when no better answer comes.
            question.refused = opened.reason
        return True

    def error_received(self, exc: Exception) -> None:
        """ICMP refused: anyone can send that, and the card may be starting: the question runs into its own time."""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Be closed."""
        if self._engine is not None:
            self._engine.sockets.discard(self)
            self._engine.forget(self._peer)
        self.closed.set()

    def leave(self) -> None:
        """Ask nothing any more, listen for late answers, and let go of the socket some time later."""
        if self._transport is not None and self._leaves is None:
            self._leaves = asyncio.get_running_loop().call_later(_REMEMBER_S, self._transport.abort)

    async def close(self) -> None:
        """Let go of the socket; it is gone when this returns."""
        if self._leaves is not None:
            self._leaves.cancel()
        if self._transport is not None:
            self._transport.abort()
            await self.closed.wait()


def garbled_packets() -> int:
    """Packets of this process that cannot be read, prove nothing, or answer no question of ours."""
    return CardSocket.garbled


# --- Users of version 3 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user, its passphrases made into keys that fit no engine yet. level: of its messages."""

    name: str
    level: int
    auth_protocol: tuple[int, ...]
    priv_protocol: tuple[int, ...]
    _auth: Any = field(repr=False)
    _priv: Any = field(repr=False)

    @classmethod
    def read(cls, name: str, options: SnmpOptions | TrapUser) -> Self:
        """Read the secrets and hash a megabyte for each: for a thread. Raises SecretError, UserError."""
        passphrases = (("auth", options.auth), ("priv", options.priv))
        secrets = {word: secret.read() for word, secret in passphrases if secret is not None}
        for word, secret in secrets.items():
            if len(secret) < _SHORTEST_SECRET:
                msg = f"the {word} passphrase is shorter than {_SHORTEST_SECRET} characters (RFC 3414 11.2)"
                raise UserError(msg)
        auth_protocol = _AUTH[options.auth_protocol] if "auth" in secrets else config.USM_AUTH_NONE
        priv_protocol = _PRIV[options.priv_protocol] if "priv" in secrets else config.USM_PRIV_NONE
        auth_key = config.AUTH_SERVICES[auth_protocol].hash_passphrase(secrets.get("auth", b""))
        priv_key = config.PRIV_SERVICES[priv_protocol].hash_passphrase(auth_protocol, secrets.get("priv", b""))
        return cls(
            name=name,
            level=1 + len(secrets),
            auth_protocol=auth_protocol,
            priv_protocol=priv_protocol,
            _auth=auth_key,
            _priv=priv_key,
        )

    def add_to(self, engine: Any, engine_id: bytes | None = None) -> None:  # noqa: ANN401 - pysnmp ships no types
        """Let an engine know this user. engine_id: of the card, when it is known before it is asked."""
        config.add_v3_user(
            engine,
            self.name,
            self.auth_protocol,
            self._auth,
            self.priv_protocol,
            self._priv,
            securityEngineId=None if engine_id is None else rfc1902.OctetString(engine_id),
            authKeyType=config.USM_KEY_TYPE_MASTER,
            privKeyType=config.USM_KEY_TYPE_MASTER,
        )


# --- Version 3 ------------------------------------------------------------------------------------------------------


class _Sent(message_cache.Cache):  # type: ignore[misc]  # pysnmp ships no types
    """Messages in flight, by numbers that cannot be guessed. What they ask is forgotten by `forget` alone."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[int, dict[str, Any]] = {}

    def new_message_id(self) -> int:
        return _RANDOM.randrange(1, _LAST)

    def push_by_message_id(self, msgId: int, **msgInfo: Any) -> None:  # noqa: ANN401, N803 - pysnmp's
        self._sent[int(msgId)] = msgInfo

    def pop_by_message_id(self, msgId: int) -> dict[str, Any]:  # noqa: N803 - pysnmp's
        if int(msgId) not in self._sent:
            msg = "no such question"
            raise ProtocolError(msg)
        return self._sent[int(msgId)]

    def question(self, number: int) -> int | None:
        """Return the question that the message with this number asks."""
        found = self._sent.get(number)
        return None if found is None else int(found["sendPduHandle"])

    def forget(self, question: int) -> None:
        """Forget all messages that asked this question."""
        self._sent = {at: one for at, one in self._sent.items() if one["sendPduHandle"] != question}


class _Usm(SnmpUSMSecurityModel):  # type: ignore[misc]
    """The user security model. number, proved: of the last message, and whether it proves its sender.

    expects: whether a message with this number may be looked at; what is refused so costs and leaves nothing.
    """

    def __init__(self, expects: Callable[[int], bool]) -> None:
        super().__init__()
        self.number = 0
        self.proved = False
        self._expects = expects

    def process_incoming_message(self, *arguments: Any) -> Any:  # noqa: ANN401
        """Check a message, and take the time of its engine only if it proves its sender. Raises StatusInformation."""
        self.number, self.proved = int(arguments[7][1][0]), False
        if not self._expects(self.number):
            raise StatusInformation(errorIndication=errind.dataMismatch)
        timeline = self._SnmpUSMSecurityModel__timeline
        before = dict(timeline)
        try:
            answer = super().process_incoming_message(*arguments)
            self.proved = arguments[5] > _NO_AUTH and bool(answer[1])
            return answer
        finally:
            # pysnmp would forget an engine's time 300 s after each message from it, and ask twice from then on.
            self._SnmpUSMSecurityModel__timelineExpQueue.clear()
            if not self.proved:
                timeline.clear()
                timeline.update(before)

    def forget_refused(self) -> None:
        """Free what pysnmp keeps of each refused message without end."""
        self._cache: Any = security_cache.Cache()


class _Dispatcher(AbstractTransportDispatcher):  # type: ignore[misc]
    """Where pysnmp sends Reports and responses to: the last one is kept."""

    sent: bytes | None = None

    def send_message(self, outgoingMessage: bytes, transportDomain: int, transportAddress: object) -> None:  # noqa: ARG002, N803 - pysnmp's
        self.sent = outgoingMessage


NOWHERE: Final = ("", 0)
"""An address for pysnmp, which only compares it."""


class Version3:
    """pysnmp's message and user security models. Building one takes 0.4 s, and 5 s on a starved host: for a thread."""

    def __init__(self, expects: Callable[[int], bool] | None = None) -> None:
        """Build it. expects: numbers of messages that may be looked at; None: of those that were sent."""
        self.snmp: Any = SnmpEngine()
        self.messages: Any = SnmpV3MessageProcessingModel()
        self.messages._cache = self.sent = _Sent()  # noqa: SLF001
        self.usm = _Usm(expects or (lambda number: self.sent.question(number) is not None))
        self.dispatcher = _Dispatcher()
        self.snmp.security_models = {USM: self.usm}
        self.snmp.message_processing_subsystems = {V3: self.messages}
        self.snmp.register_transport_dispatcher(self.dispatcher)


class Engine(Version3):
    """What asks cards in version 3. users: those that it knows, one set of keys for each name. sockets: that use it."""

    def __init__(self) -> None:
        """Build it, and use it once: for a thread."""
        super().__init__()
        self.users: dict[str, User] = {}
        self.sockets: set[CardSocket] = set()
        user = User.read("warm", SnmpOptions(kind="snmp", host="warm", version=3, user="warm"))
        user.add_to(self.snmp)
        question = self.seal(0, user, make_pdu(V3, GET, [(name_of(_SYS_UP_TIME), None)], 1), 1)
        self.open(0, question)
        self.sent.forget(1)

    def seal(self, peer: int, user: User, pdu: Any, question: int) -> bytes:  # noqa: ANN401
        """Make a message for a card; while its engine is not known, the question for that."""
        name = rfc1902.OctetString(user.name.encode())
        arguments = (self.snmp, peer, NOWHERE, V3, USM, name, user.level, None, b"", 1, pdu, True, question)
        return bytes(self.messages.prepare_outgoing_message(*arguments)[2])

    def open(self, peer: int, data: bytes) -> _Opened | None:
        """Read a message from a card. Returns None if it answers no question, or not as it was asked. Never raises."""
        self.usm.number, reason, is_report, pdu = 0, "", False, None
        try:
            pdu = self.messages.prepare_data_elements(self.snmp, peer, NOWHERE, data)[7]
        except StatusInformation as error:
            reason, is_report = reason_of(error), "sendPduHandle" in error
        except Exception:  # noqa: BLE001 - whatever a decoder raises on a hostile packet
            return None
        finally:
            self.usm.forget_refused()
        question = self.sent.question(self.usm.number)
        if pdu is not None:
            is_read = pdu.tagSet in rfc3411.RESPONSE_CLASS_PDUS
        else:
            # Both are found after the digest: it is the card's own message.
            is_read = is_report or reason in {"NotInTimeWindow", "DecryptionError"}
        if question is None or not is_read:
            return None
        return _Opened(question, pdu, reason, is_report, self.usm.proved)

    def engine_id_of(self, peer: int) -> bytes:
        """Return the engine id of a card; empty: not found yet."""
        found = self.messages.get_peer_engine_info(peer, NOWHERE)[0]
        return b"" if found is None else bytes(found)

    def forget(self, peer: int) -> None:
        """Forget the engine id of a card."""
        self.messages._SnmpV3MessageProcessingModel__engineIdCache.pop((peer, NOWHERE), None)  # noqa: SLF001
        self.messages._SnmpV3MessageProcessingModel__engineIdCacheExpQueue.clear()  # noqa: SLF001


def reason_of(error: StatusInformation) -> str:
    """Return why pysnmp refuses a message, or what a Report says."""
    indication = error.get("errorIndication")
    if isinstance(indication, errind.ReportPduReceived) and "oid" in error:
        return str(error["oid"])
    return type(indication).__name__


_engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Engine]] = weakref.WeakKeyDictionary()
_building: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


async def engine_for(user: User | None) -> Engine | None:
    """Return the loop's engine; another one when this user has other keys on another card. None without a user."""
    if user is None:
        return None
    loop = asyncio.get_running_loop()
    async with _building.setdefault(loop, asyncio.Lock()):
        engines = _engines.setdefault(loop, [])
        for engine in engines:
            if engine.users.get(user.name, user) == user:
                break
        else:
            engine = await asyncio.to_thread(Engine)
            engines[:] = [*(one for one in engines if one.sockets), engine]
    if user.name not in engine.users:
        engine.users[user.name] = user
        user.add_to(engine.snmp)
    return engine


# --- PDUs and values ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def name_of(oid: str) -> Any:  # noqa: ANN401
    """Return an OID as pysnmp has it, made once: a poll has the same ones for years."""
    return rfc1902.ObjectName(parts(oid))


def typed(kind: str, value: int | bytes | str) -> Any:  # noqa: ANN401
    """Return a value to SET. Raises ValueError when it is none of this type."""
    if isinstance(value, {"octets": bytes, "oid": str}.get(kind, int)):
        with contextlib.suppress(Exception):  # pyasn1's own errors
            return _TYPES[kind](value)
    msg = f"{value!r:.60} is not a value of type {kind}"
    raise ValueError(msg)


def make_pdu(version: int, kind: str, rows: Sequence[tuple[Any, Any]], request_id: int = 0) -> Any:  # noqa: ANN401
    """Return a PDU. rows: names, and values where something is SET."""
    module = api.PROTOCOL_MODULES[min(version, 1)]
    pdu = getattr(module, f"{kind}PDU")()
    module.apiPDU.set_defaults(pdu)
    nothing = module.Null("") if version == 0 else rfc1905.unSpecified
    module.apiPDU.set_varbinds(pdu, [(name, nothing if value is None else value) for name, value in rows])
    module.apiPDU.set_request_id(pdu, request_id)
    return pdu


def community_message(version: int, community: bytes, pdu: Any) -> bytes:  # noqa: ANN401
    """Return a message of version 1 or 2c."""
    module = api.PROTOCOL_MODULES[version]
    message = module.Message()
    module.apiMessage.set_defaults(message)
    module.apiMessage.set_community(message, community)
    module.apiMessage.set_pdu(message, pdu)
    return bytes(encoder.encode(message))


class _Integers(decoder.IntegerPayloadDecoder):  # type: ignore[misc]
    """Integers as cards send them: unsigned ones without the byte that makes them positive, and -1 as 2^32-1.

    pyasn1 refuses a whole answer for one of them: a sysUpTime of 249 days would end the readings of such a card.
    """

    def valueDecoder(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401, N802 - pyasn1's
        return super().valueDecoder(*arguments, size=arguments[3], **options)

    def _createComponent(self, spec: Any, tags: Any, value: int, *, size: int, **options: Any) -> Any:  # noqa: ANN401, N802 - pyasn1's
        if value < 0 and size <= _LONGEST_INTEGER and isinstance(spec, _UNSIGNED):
            value += 256**size
        elif isinstance(spec, rfc1902.Integer32) and _LAST < value < 2**32:
            value -= 2**32
        return super()._createComponent(spec, tags, value, **options)


class _Items(decoder.SingleItemDecoder):  # type: ignore[misc]
    TYPE_MAP: Final = decoder.TYPE_MAP | {univ.Integer.typeId: _Integers()}


class _Stream(decoder.StreamingDecoder):  # type: ignore[misc]
    SINGLE_ITEM_DECODER = _Items


class _Decoder(decoder.Decoder):  # type: ignore[misc]
    STREAMING_DECODER = _Stream


_decode: Final = _Decoder()
# The models of version 3 have the decoder as a name of their modules.
rfc3412.decoder = rfc3414.decoder = SimpleNamespace(decode=_decode)


def read_message(data: bytes) -> tuple[int, Any]:
    """Read the outside of a message. Raises MessageError."""
    try:
        version = int(api.decodeMessageVersion(data))
        spec = SNMPv3Message() if version == V3 else api.PROTOCOL_MODULES[version].Message()
        return version, _decode(data, asn1Spec=spec)[0]
    except Exception as error:
        # pysnmp's and pyasn1's errors, and what their code trips over on hostile bytes.
        msg = "no SNMP message"
        raise MessageError(msg) from error


def parameters_of(message: Any) -> Any:  # noqa: ANN401
    """Return the security parameters of a version 3 message. Raises MessageError."""
    try:
        return decoder.decode(message[2], asn1Spec=UsmSecurityParameters())[0]
    except Exception as error:
        msg = "no security parameters"
        raise MessageError(msg) from error


def _response(pdu: Any) -> Response:  # noqa: ANN401
    return Response(int(pdu[1]), int(pdu[2]), {str(row[0]): plain(row[1]) for row in pdu[3]})


def plain(value: Any) -> Answer:  # noqa: ANN401
    """Return a value as plain Python. To pyasn1 the exceptions of version 2 are NULLs, and a NULL is a string."""
    while isinstance(value, univ.Choice):
        value = value.getComponent()
    if isinstance(value, rfc1905.NoSuchObject):
        return Missing.NO_SUCH_OBJECT
    if isinstance(value, rfc1905.NoSuchInstance):
        return Missing.NO_SUCH_INSTANCE
    if isinstance(value, rfc1905.EndOfMibView):
        return Missing.END_OF_MIB
    if isinstance(value, univ.Null):
        return Missing.NULL
    if isinstance(value, univ.Integer):
        return int(value)
    if isinstance(value, univ.ObjectIdentifier):
        return Oid(str(value))
    return bytes(value)


# --- Sweeps ---------------------------------------------------------------------------------------------------------


def hello(version: Version, number: int, community: bytes = b"public") -> bytes:
    """Return the smallest question that any agent answers. number: by which the answer is known, four bytes.

    Versions 1 and 2c ask for sysObjectID. Version 3 asks for the engine id, which needs no user (RFC 3414 section 4).
    """
    template, place = _template(version, community), _PLACE.to_bytes(4, "big")
    at = template.index(place) if version == 3 else template.rindex(place)  # a community may hold anything
    return template[:at] + number.to_bytes(4, "big") + template[at + 4 :]


_PLACE: Final = 0x41424344


@functools.lru_cache(maxsize=8)
def _template(version: Version, community: bytes) -> bytes:
    """Return a question with the number _PLACE: a sweep asks thousands of addresses."""
    if version != 3:
        pdu = make_pdu(NUMBERS[version], GET, [(name_of(_SYS_OBJECT_ID), None)], _PLACE)
        return community_message(NUMBERS[version], community, pdu)
    message, parameters = SNMPv3Message(), UsmSecurityParameters()
    for at, blank in enumerate((b"", 0, 0, b"", b"", b"")):
        parameters[at] = blank
    message[0], message[2] = V3, encoder.encode(parameters)
    for at, value in enumerate((_PLACE, _LONGEST_MESSAGE, b"\x04", USM)):
        message[1][at] = value
    scoped = message[3][0]
    scoped[0] = scoped[1] = b""
    pdu = make_pdu(V3, GET, [])
    scoped[2].setComponentByType(pdu.tagSet, pdu, matchTags=False, matchConstraints=False, verifyConstraints=False)
    return bytes(encoder.encode(message))


def answered(data: bytes) -> tuple[Version, int]:
    """Return the version of an answer, and the number of the question. Raises MessageError when it is not an answer."""
    number, message = read_message(data)
    if number != V3:
        pdu = message[2].getComponent()
        if pdu.tagSet not in rfc3411.RESPONSE_CLASS_PDUS:
            msg = "no answer"
            raise MessageError(msg)
        return next(version for version, of in NUMBERS.items() if of == number), int(pdu[0])
    if not parameters_of(message)[0]:
        msg = "version 3 without an engine id: our own question, sent back"
        raise MessageError(msg)
    return 3, int(message[1][0])
