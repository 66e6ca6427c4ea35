"""All that touches pysnmp: its engine behind one socket for each card, and its codec for sweeps and traps.

pysnmp gives the messages, the user security model, keys and ciphers. This file adds what it does not do (7.1.30, each
with a test; docs/decisions/0226-snmp-through-pysnmp-behind-one-port.md has the reasons):

- An engine loads its MIB modules at the first question, which stops the loop for 0.4 s, and 5 s on a starved host.
  Engines are built and used once in a thread; there is one for each event loop.
- Its timers use wall time. The deadlines of a question are ours, by the loop's clock; pysnmp's only frees memory.
- It knows a card by its community alone. Each card has a socket and a security name of its own.
- It accepts the time of any message, proved or not. Time is only taken from a proved message inside RFC 3414's window.
- A forged answer removes the question that it names. Such a question is put back, so that the card's answer counts.
- It repeats a request by itself after a Report, which for a SET is a second order. Each sending is one pysnmp request.
- A packet that is no SNMP raises in the loop. Such packets are counted and dropped.
"""

import asyncio
import contextlib
import functools
import itertools
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
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
from pysnmp.proto.mpmod.rfc2576 import SnmpV1MessageProcessingModel, SnmpV2cMessageProcessingModel
from pysnmp.proto.mpmod.rfc3412 import SNMPv3Message, SnmpV3MessageProcessingModel
from pysnmp.proto.secmod import cache as security_cache
from pysnmp.proto.secmod.rfc2576 import SnmpV1SecurityModel, SnmpV2cSecurityModel
from pysnmp.proto.secmod.rfc3414 import SnmpUSMSecurityModel
from pysnmp.proto.secmod.rfc3414.service import UsmSecurityParameters

from powerguard.clock import Clock, boottime_s
from powerguard.options import SecretError
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid, parts
from powerguard.ups.snmp.options import AuthProtocol, PrivProtocol, SnmpOptions, TrapUser, plain_engine

log = structlog.get_logger(__name__)

GET, GET_NEXT, SET, _INFORM, _TRAP = "GetRequest", "GetNextRequest", "SetRequest", "InformRequest", "SNMPv2Trap"
_NO_AUTH, _AUTH_ONLY, _AUTH_PRIV = 1, 2, 3
"""Security levels as pysnmp numbers them."""
_V1, _V2C, _V3 = 0, 1, 3
"""Versions as messages number them."""
_USM: Final = 3
_LAST: Final = 2**31 - 1
_WINDOW_S: Final = 150
"""Seconds that a message may be old (RFC 3414 2.2.3)."""
_LONGEST_MESSAGE: Final = 65507
_SEQUENCE: Final = b"\x30"
_RANDOM: Final = random.SystemRandom()
_TICK_S: Final = 1.0
_FORGET_TICKS: Final = 12
"""Ticks until pysnmp forgets a question. Until then its answer counts as late: the longest timeout_s, twice."""
_LISTEN_S: Final = 10.0
"""Time for which a socket that is not used any more still hears late answers."""
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


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. status, index: RFC 3416. found: what was answered, by OID."""

    status: int
    index: int
    found: dict[str, Answer]


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
        told = (("auth", options.auth), ("priv", options.priv))
        secrets = {word: secret.read() for word, secret in told if secret is not None}
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


# --- What pysnmp lacks ----------------------------------------------------------------------------------------------


class _Questions(message_cache.Cache):  # type: ignore[misc]  # pysnmp ships no types
    """Questions by their number, which cannot be guessed. popped: the one that the last message named.

    pysnmp's own also has a queue of 600 ticks, which is of no use: the dispatcher takes out what has timed out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.popped: tuple[int, dict[str, Any]] | None = None
        self._sent: dict[int, dict[str, Any]] = {}
        self._numbers: dict[int, int] = {}

    def new_message_id(self) -> int:
        return _RANDOM.randrange(1, _LAST)

    def push_by_message_id(self, msgId: int, **msgInfo: Any) -> None:  # noqa: ANN401, N803 - pysnmp's
        self._sent[int(msgId)] = msgInfo
        self._numbers[int(msgInfo["sendPduHandle"])] = int(msgId)

    def pop_by_message_id(self, msgId: int) -> dict[str, Any]:  # noqa: N803 - pysnmp's
        number = int(msgId)
        if number not in self._sent:
            msg = "no such question"
            raise ProtocolError(msg)
        self.popped = number, self._sent.pop(number)
        del self._numbers[int(self.popped[1]["sendPduHandle"])]
        return self.popped[1]

    def pop_by_send_pdu_handle(self, sendPduHandle: int) -> None:  # noqa: N803 - pysnmp's
        if sendPduHandle in self._numbers:
            self.pop_by_message_id(self._numbers[sendPduHandle])

    def handle_of(self, number: int) -> int | None:
        """Return pysnmp's handle of the sending with this number; None: there is none, or it was answered."""
        found = self._sent.get(number)
        return None if found is None else int(found["sendPduHandle"])


class _Usm(SnmpUSMSecurityModel):  # type: ignore[misc]
    """The user security model, with RFC 3414's time window. proved: whether the last message proves its sender.

    asks: the engine whose questions are answered; None: it receives traps, which answer no question.
    """

    def __init__(self, clock: Clock, asks: "Engine | None" = None) -> None:
        super().__init__()
        self.proved = False
        self._clock = clock
        self._asks = asks
        self._times: dict[tuple[bytes, str], tuple[int, int, float]] = {}

    def process_incoming_message(self, *told: Any) -> Any:  # noqa: ANN401
        """Check a message. Raises StatusInformation.

        pysnmp takes the time of any message. Its note of the time is put back unless this message is proved. A message
        that names no user is none, whatever level it claims. pysnmp also forgets every engine's time 300 s after each
        message from it, and so asks twice from then on: that queue is emptied.
        """
        number, level = int(told[7][1][0]), told[5]
        question = None if self._asks is None else self._asks.question(number)
        if self._asks is not None and question is None:
            raise StatusInformation(errorIndication=errind.dataMismatch)
        timeline = self._SnmpUSMSecurityModel__timeline
        before = dict(timeline)
        self.proved = False
        try:
            answer = super().process_incoming_message(*told)
            if level > _NO_AUTH and answer[1]:
                boots, time_s = map(int, timeline[answer[0]][:2])
                is_report = answer[2][2].getComponent().tagSet in rfc3411.INTERNAL_CLASS_PDUS
                is_own = answer[0] == told[0].snmpEngineID
                # Two cards may have been sold with one engine id.
                sender = (bytes(answer[0]), "" if question is None else question.where)
                is_asked = is_report and question is not None
                if not is_own and not self._takes(sender, boots, time_s, is_asked=is_asked):
                    raise StatusInformation(errorIndication=errind.notInTimeWindow)  # noqa: TRY301 - as the model does
                self.proved = True
        except StatusInformation as error:
            # Told when no better answer comes. Both are found after the digest: it is the card's own message.
            if question is not None and _reason(error) in {"NotInTimeWindow", "DecryptionError"}:
                question.refused = _reason(error)
            raise
        else:
            return answer
        finally:
            self._SnmpUSMSecurityModel__timelineExpQueue.clear()
            if not self.proved:
                timeline.clear()
                timeline.update(before)

    def _takes(self, sender: tuple[bytes, str], boots: int, time_s: int, *, is_asked: bool) -> bool:
        """Whether a proved message is no older than the window (RFC 3414 3.2.7 b); it moves the engine's clock on.

        is_asked: it is a Report to a question of ours. A card that restarts and does not count that is outside the
        window for as long as it was up before; the time in its Report is accepted.
        """
        now_s = self._clock()
        known = self._times.get(sender)
        if not 0 <= boots < _LAST:
            return False
        if known is not None:
            was_boots, was_s, at_s = known
            if boots < was_boots or (boots == was_boots and time_s < was_s + int(now_s - at_s) - _WINDOW_S):
                if not is_asked:
                    return False
                log.warning("engine_time_went_back", where=sender[1], was=known[:2], now=(boots, time_s))
            elif boots == was_boots and time_s <= was_s:
                return True
        self._times[sender] = (boots, time_s, now_s)
        return True


class _V3Messages(SnmpV3MessageProcessingModel):  # type: ignore[misc]
    """Messages of version 3. asks: as of `_Usm`."""

    def __init__(self, asks: "Engine | None" = None) -> None:
        super().__init__()
        self._cache = self.questions = _Questions()
        self._asks = asks

    def prepare_data_elements(self, *told: Any) -> Any:  # noqa: ANN401
        """Read a message. Raises StatusInformation; the question that it does not answer waits on."""
        self._cache.popped = None
        try:
            read = super().prepare_data_elements(*told)
            handle, pdu = read[9], read[7]
            if handle is None or self._asks is None or self._asks.takes_answer(int(handle), int(pdu[0])):
                return read
            error = StatusInformation(errorIndication=errind.dataMismatch)
        except StatusInformation as refused:
            error = refused
        popped = self._cache.popped
        if popped is None or self._asks is None:
            raise error
        if "sendPduHandle" in error and self._asks.takes_report(int(error["sendPduHandle"]), error):
            raise error
        number, question = popped
        self._cache.push_by_message_id(number, **question)
        raise StatusInformation(errorIndication=error.get("errorIndication"))


class _Communities:
    """Cards of versions 1 and 2c by their socket: two with one community do not meet. For both security models."""

    def __init__(self, communities: dict[int, bytes]) -> None:
        super().__init__()
        self._communities = communities

    def _sec2com(self, _engine: Any, security_name: int, *_context: Any) -> Any:  # noqa: ANN401
        return univ.OctetString(self._communities[security_name])

    def _com2sec(self, engine: Any, community: Any, transport: tuple[int, object]) -> tuple[int, Any, bytes]:  # noqa: ANN401
        if self._communities.get(transport[0]) != bytes(community):
            raise StatusInformation(errorIndication=errind.unknownCommunityName)
        return transport[0], engine.snmpEngineID, b""


class _V1Security(_Communities, SnmpV1SecurityModel):  # type: ignore[misc]
    pass


class _V2cSecurity(_Communities, SnmpV2cSecurityModel):  # type: ignore[misc]
    pass


class _Dispatcher(AbstractTransportDispatcher):  # type: ignore[misc]
    """Where an engine sends to. send: takes a message and the number of the socket."""

    def __init__(self, send: Callable[[bytes, int], None]) -> None:
        super().__init__()
        self.set_timer_resolution(_TICK_S)
        self._send = send

    def send_message(self, outgoingMessage: bytes, transportDomain: int, transportAddress: object) -> None:  # noqa: ARG002, N803 - pysnmp's
        self._send(outgoingMessage, transportDomain)


def _forget_refused(engine: Any) -> None:  # noqa: ANN401
    """Free what pysnmp keeps of each refused message without end."""
    for model in engine.security_models.values():
        if not model._cache.is_empty():  # noqa: SLF001
            model._cache = security_cache.Cache()  # noqa: SLF001


# --- The engine of a loop -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Question:
    """Something that was asked. answer: a Response, or a Report's reason. refused: a Report that proves nothing."""

    where: str
    request_id: int
    sent_s: float
    answer: "asyncio.Future[Response | str]"
    is_greeting: bool = False
    refused: str = ""
    is_late: bool = False


class Engine:
    """One pysnmp engine. users: the version 3 users that it knows; one name has one set of keys.

    is_broken: a tick failed, as it would at every tick: nothing is freed any more, and another engine takes over.
    """

    def __init__(self, clock: Clock = boottime_s) -> None:
        """Build an engine and use it once: takes 0.4 s, and 5 s on a starved host. For a thread."""
        self.sockets: dict[int, CardSocket] = {}
        self.communities: dict[int, bytes] = {}
        self.questions: dict[int, _Question] = {}
        self.users: dict[str, User] = {}
        self.is_broken = False
        self.is_used = False
        """Whether the message in hand was an answer to something."""
        self._is_ticking = False
        self.pysnmp: Any = SnmpEngine()
        messages = self.v3 = _V3Messages(self)
        self.usm = _Usm(clock, self)
        self.pysnmp.security_models = {
            1: _V1Security(self.communities),
            2: _V2cSecurity(self.communities),
            _USM: self.usm,
        }
        for model in (SnmpV1MessageProcessingModel(), SnmpV2cMessageProcessingModel()):
            model._cache = _Questions()  # noqa: SLF001
            self.pysnmp.message_processing_subsystems[model.MESSAGE_PROCESSING_MODEL_ID] = model
        self.pysnmp.message_processing_subsystems[messages.MESSAGE_PROCESSING_MODEL_ID] = messages
        self.pysnmp.register_transport_dispatcher(_Dispatcher(self._send))
        self._warm_up()

    def _warm_up(self) -> None:
        """Ask and answer once in each version, without a network."""
        sent: list[bytes] = []
        user = User.read("warm", SnmpOptions(kind="snmp", host="warm", version=3, user="warm"))
        user.add_to(self.pysnmp)
        self.communities[0] = b"warm"
        self.pysnmp.transport_dispatcher._send = lambda message, _: sent.append(message)  # noqa: SLF001
        for version in (_V1, _V2C, _V3):
            pdu = make_pdu(version, GET, [(name_of(_SYS_UP_TIME), None)])
            name = user.name.encode() if version == _V3 else 0
            self.send(version, 0, ("", 0), name, _NO_AUTH, pdu, lambda *_: None, None)
            with contextlib.suppress(Exception):
                self.receive(0, ("", 0), sent[-1].replace(b"warm\xa0", b"warm\xa2"))
        self.pysnmp.transport_dispatcher._send = self._send  # noqa: SLF001
        del self.communities[0]

    def send(  # noqa: PLR0917 - RFC 3412 4.1.1
        self,
        version: int,
        domain: int,
        address: tuple[str, int],
        name: bytes | int,
        level: int,
        pdu: Any,  # noqa: ANN401
        heard: Callable[..., None],
        question: _Question | None,
    ) -> int:
        """Send one message. heard: called once, with the answer or with why there is none."""
        return int(
            self.pysnmp.message_dispatcher.send_pdu(
                *(self.pysnmp, domain, address, version, version if version == _V3 else version + 1),
                *(name if version != _V3 else rfc1902.OctetString(name), level, None, b""),
                *(0 if version == _V1 else 1, pdu, True, _FORGET_TICKS, heard, question),
            )
        )

    def receive(self, domain: int, address: tuple[str, int], data: bytes) -> None:
        """Read one message. Raises whatever pysnmp does on a hostile one."""
        self.pysnmp.message_dispatcher.receive_message(self.pysnmp, domain, address, data)

    def engine_id_at(self, domain: int, address: tuple[str, int]) -> bytes:
        """Return the engine id that was found there; empty: none yet."""
        found = self.v3.get_peer_engine_info(domain, address)[0]
        return b"" if found is None else bytes(found)

    def _send(self, message: bytes, domain: int) -> None:
        socket = self.sockets.get(domain)
        if socket is not None:
            socket.transmit(message)

    def question(self, number: int) -> _Question | None:
        """Return the question that was sent with this number, of version 3."""
        handle = self.v3.questions.handle_of(number)
        return None if handle is None else self.questions.get(handle)

    def takes_answer(self, handle: int, request_id: int) -> bool:
        """Whether an answer is to the question of this handle."""
        question = self.questions.get(handle)
        return question is None or question.request_id == request_id

    def takes_report(self, handle: int, error: StatusInformation) -> bool:
        """Whether a Report ends its question. One that proves nothing is told when no better answer comes."""
        question = self.questions.get(handle)
        reason = _reason(error)
        if question is None:
            return True
        if question.answer.done():
            return not question.refused
        if self.usm.proved or (question.is_greeting and reason == "UnknownEngineID"):
            return True
        if reason != "NotInTimeWindow":
            question.refused = reason
            self.is_used = True
        return False

    def tick(self) -> None:
        """Free what has got no answer; once a second, while there are questions."""
        if not self._is_ticking and not self.is_broken:
            self._is_ticking = True
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        try:
            self.pysnmp.transport_dispatcher.handle_timer_tick(asyncio.get_running_loop().time())
        except Exception:  # noqa: BLE001 - whatever pysnmp trips over; the questions in flight end by our own clock
            self.is_broken = True
        if self.questions:
            self.tick()


def _reason(error: StatusInformation) -> str:
    indication = error.get("errorIndication")
    if isinstance(indication, errind.ReportPduReceived) and "oid" in error:
        return str(error["oid"])
    return type(indication).__name__


_engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Engine]] = weakref.WeakKeyDictionary()
_building: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


async def engine_for(user: User | None) -> Engine:
    """Return the loop's engine; another one when this user has other keys on another card."""
    loop = asyncio.get_running_loop()
    async with _building.setdefault(loop, asyncio.Lock()):
        engines = _engines.setdefault(loop, [])
        engines[:] = [one for one in engines if not one.is_broken]
        for engine in engines:
            if user is None or engine.users.get(user.name, user) == user:
                break
        else:
            engine = await asyncio.to_thread(Engine)
            engines[:] = [*(one for one in engines if one.sockets), engine]
    if user is not None and user.name not in engine.users:
        engine.users[user.name] = user
        user.add_to(engine.pysnmp)
    return engine


# --- One card -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Access:
    """How one card is spoken to. engine_id: the card's, once it has proved it; empty before."""

    where: str
    version: Literal[1, "2c", 3]
    community: bytes = field(default=b"", repr=False)
    user: User | None = None
    engine_id: bytes = b""

    def has(self, engine_id: bytes) -> None:
        """Keep the engine id; tell when it is another one than before."""
        if self.engine_id not in (b"", engine_id):
            because = "another card answers there, or this one was reset: check the engine id in traps.users"
            was, now = self.engine_id.hex(), engine_id.hex()
            log.warning("engine_changed", where=self.where, because=because, was=was, now=now)
        self.engine_id = engine_id


_domains = itertools.count(1)


class CardSocket(asyncio.DatagramProtocol):
    """A connected socket to one card, so that the kernel drops what others send.

    garbled: packets of all sockets that cannot be read, prove nothing, or answer no question of ours.
    """

    garbled = 0

    def __init__(self, engine: Engine, access: Access, late: Callable[[float, float], None]) -> None:
        """Be opened by `open`. late: told when an answer comes too late, and when its question was sent."""
        self._engine = engine
        self._access = access
        self._late = late
        self._version = {1: _V1, "2c": _V2C, 3: _V3}[access.version]
        self._domain = next(_domains)
        self._address = ("", 0)
        self._transport: asyncio.DatagramTransport | None = None
        self._leaves: asyncio.TimerHandle | None = None
        self.closed = asyncio.Event()
        self._is_met = False
        self._meeting = asyncio.Lock()

    @property
    def is_broken(self) -> bool:
        """Whether its engine has failed."""
        return self._engine.is_broken

    async def open(self, address: tuple[str, int]) -> None:
        """Open it to this card. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, remote_addr=address)
        self._address = address
        self._register()

    def _register(self) -> None:
        self._engine.sockets[self._domain] = self
        if self._version != _V3:
            self._engine.communities[self._domain] = self._access.community

    def _unregister(self) -> None:
        self._engine.sockets.pop(self._domain, None)
        self._engine.communities.pop(self._domain, None)

    # --- Asking -----------------------------------------------------------------------------------------------------

    async def ask(
        self, kind: str, oids: Sequence[str], values: Sequence[Any] | None, *, timeout_s: float, tries: int
    ) -> Response:
        """Ask, and again after each timeout_s. values: to be SET; None: it is a question.

        Raises TimeoutError; RefusedError when the card said why; RequestError.
        """
        rows = list(zip(map(name_of, oids), [None] * len(oids) if values is None else values, strict=True))
        if self._version != _V3:
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
            return await self._in_rounds(kind, rows, timeout_s=timeout_s, tries=tries)
        async with self._meeting:  # A poll and a doctor's probe may come first together.
            answer = await self._in_rounds(kind, rows, timeout_s=timeout_s, tries=tries)
            self._is_met = True
            return answer

    async def _in_rounds(self, kind: str, rows: list[tuple[Any, Any]], *, timeout_s: float, tries: int) -> Response:
        """Ask until engine and time are the card's (RFC 3414 4)."""
        refused, doubted = RefusedError("NotInTimeWindow"), b""
        for _ in range(_ROUNDS):
            asked_as = self._engine.engine_id_at(self._domain, self._address)
            if doubted and asked_as == doubted:
                break  # It is the same engine as before.
            try:
                answer = await self._asked(kind, rows, timeout_s=timeout_s, tries=tries)
            except RefusedError as error:
                if error.reason != "UnknownEngineID":
                    raise
                answer = error.reason
            if isinstance(answer, Response):
                self._access.has(self._engine.engine_id_at(self._domain, self._address))
                return answer
            if answer == "UnknownEngineID" and asked_as:
                refused, doubted = RefusedError(answer), asked_as
                # pysnmp keeps an engine id for 300 s. Under another number it looks for the engine again.
                self._unregister()
                self._domain = next(_domains)
                self._register()
            elif answer not in {"UnknownEngineID", "NotInTimeWindow"}:
                raise RefusedError(answer)
        raise refused

    async def _asked(self, kind: str, rows: list[tuple[Any, Any]], *, timeout_s: float, tries: int) -> Response | str:
        """Send, and again after each timeout_s, until there is an answer."""
        loop = asyncio.get_running_loop()
        is_greeting = self._version == _V3 and not self._engine.engine_id_at(self._domain, self._address)
        question = _Question(
            self._access.where, _RANDOM.randrange(1, _LAST), loop.time(), loop.create_future(), is_greeting
        )
        pdu = make_pdu(self._version, kind, rows, question.request_id)
        try:
            for _ in range(tries):
                if question.refused:  # Asked again it would refuse again.
                    break
                self._send(question, pdu)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        return await asyncio.shield(question.answer)
            if question.refused:
                raise RefusedError(question.refused)
            raise TimeoutError
        finally:
            question.answer.cancel()

    def _send(self, question: _Question, pdu: Any) -> None:  # noqa: ANN401
        user = self._access.user
        name, level = (self._domain, _NO_AUTH) if user is None else (user.name.encode(), user.level)
        try:
            handle = self._engine.send(
                self._version, self._domain, self._address, name, level, pdu, self._heard, question
            )
        except StatusInformation as error:
            raise RequestError(_reason(error)) from None
        except Exception as error:  # noqa: BLE001 - PySnmpError, pyasn1's errors, and what pysnmp trips over
            # The text of such an error may hold a secret.
            raise RequestError(type(error).__name__) from None
        self._engine.questions[handle] = question
        self._engine.tick()

    def transmit(self, message: bytes) -> None:
        """Send what the engine has made."""
        if self._transport is not None:
            self._transport.sendto(message)

    # --- Hearing ----------------------------------------------------------------------------------------------------

    def datagram_received(self, data: bytes, addr: object) -> None:  # noqa: ARG002 - the kernel lets only the card's through
        """Take a packet, or count it."""
        engine = self._engine
        engine.is_used = False
        if data[:1] == _SEQUENCE and len(data) <= _LONGEST_MESSAGE:
            # Whatever a decoder raises on a hostile packet.
            with contextlib.suppress(Exception):
                engine.receive(self._domain, self._address, data)
            _forget_refused(engine.pysnmp)
        if not engine.is_used:
            CardSocket.garbled += 1

    def _heard(self, *told: Any) -> None:  # noqa: ANN401
        """Take an answer from the engine (RFC 3412 4.1.2.2); it is called once for each sending."""
        pdu, status, handle, question = told[8:]
        self._engine.questions.pop(int(handle), None)
        if status is not None and isinstance(status.get("errorIndication"), errind.RequestTimedOut):
            return
        if question.answer.done():
            if question.answer.cancelled() and not question.refused and not question.is_late:
                question.is_late = self._engine.is_used = True
                self._late(asyncio.get_running_loop().time(), question.sent_s)
            return
        if status is not None:
            question.answer.set_result(_reason(status))
        else:
            found = {str(row[0]): _plain(row[1]) for row in pdu[3]}
            question.answer.set_result(Response(int(pdu[1]), int(pdu[2]), found))
        self._engine.is_used = True

    def error_received(self, exc: Exception) -> None:
        """ICMP refused: anybody can say so, and the card may be starting: the question runs into its own time."""

    # --- Closing ----------------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Be closed."""
        self._unregister()
        self.closed.set()

    def leave(self) -> None:
        """Ask nothing any more, listen for late answers, and let go of the socket some time later."""
        if self._transport is not None and self._leaves is None:
            self._leaves = asyncio.get_running_loop().call_later(_LISTEN_S, self._transport.abort)

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


# --- PDUs and values ------------------------------------------------------------------------------------------------

_names: dict[str, Any] = {}
_MOST_NAMES: Final = 4096


def name_of(oid: str) -> Any:  # noqa: ANN401
    """Return an OID as pysnmp has it, made once: a poll has the same ones for years."""
    if oid not in _names:
        if len(_names) >= _MOST_NAMES:
            _names.clear()
        _names[oid] = rfc1902.ObjectName(parts(oid))
    return _names[oid]


def typed(kind: str, value: int | bytes | str) -> Any:  # noqa: ANN401
    """Return a value to SET. Raises ValueError when it is none of this type."""
    if isinstance(value, {"octets": bytes, "oid": str}.get(kind, int)):
        with contextlib.suppress(Exception):  # pyasn1's own errors
            return _TYPES[kind](value)
    msg = f"{value!r:.60} is not a value of type {kind}"
    raise ValueError(msg)


def make_pdu(version: int, kind: str, rows: Sequence[tuple[Any, Any]], request_id: int = 0) -> Any:  # noqa: ANN401
    """Return a PDU. rows: names, and values where something is SET."""
    module = api.PROTOCOL_MODULES[_V1 if version == _V1 else _V2C]
    pdu = getattr(module, f"{kind}PDU")()
    module.apiPDU.set_defaults(pdu)
    nothing = module.Null("") if version == _V1 else rfc1905.unSpecified
    module.apiPDU.set_varbinds(pdu, [(name, nothing if value is None else value) for name, value in rows])
    module.apiPDU.set_request_id(pdu, request_id)
    return pdu


def _plain(value: Any) -> Answer:  # noqa: ANN401
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

Version = Literal[1, "2c", 3]
_VERSIONS: Final[dict[int, Version]] = {_V1: 1, _V2C: "2c", _V3: 3}


class MessageError(Exception):
    """Bytes that are no SNMP message, or none of the wanted kind."""


@functools.lru_cache(maxsize=8)
def _template(version: Version, community: bytes) -> bytes:
    """Return a question with the number _PLACE."""
    number = {told: number for number, told in _VERSIONS.items()}[version]
    if version != 3:
        message = api.PROTOCOL_MODULES[number].Message()
        api.PROTOCOL_MODULES[number].apiMessage.set_defaults(message)
        api.PROTOCOL_MODULES[number].apiMessage.set_community(message, community)
        pdu = make_pdu(number, GET, [(name_of(_SYS_OBJECT_ID), None)], _PLACE)
        api.PROTOCOL_MODULES[number].apiMessage.set_pdu(message, pdu)
        return bytes(encoder.encode(message))
    message = SNMPv3Message()
    message[0] = _V3
    for at, value in enumerate((_PLACE, _LONGEST_MESSAGE, b"\x04", _USM)):
        message[1][at] = value
    parameters = UsmSecurityParameters()
    for at, blank in enumerate((b"", 0, 0, b"", b"", b"")):
        parameters[at] = blank
    message[2] = encoder.encode(parameters)
    scoped = message[3][0]
    scoped[0] = scoped[1] = b""
    pdu = make_pdu(_V3, GET, [], _PLACE)
    scoped[2].setComponentByType(pdu.tagSet, pdu, matchTags=False, matchConstraints=False, verifyConstraints=False)
    return bytes(encoder.encode(message))


_PLACE: Final = 0x41424344


def hello(version: Version, number: int, community: bytes = b"public") -> bytes:
    """Return the smallest question that any agent answers. number: by which the answer is known, four bytes.

    Versions 1 and 2c ask for sysObjectID. Version 3 asks for the engine id, which needs no user (RFC 3414 section 4).
    """
    place, told = _PLACE.to_bytes(4, "big"), number.to_bytes(4, "big")
    if version == 3:
        return _template(3, b"").replace(place, told)
    head, _, tail = _template(version, community).rpartition(place)
    return head + told + tail


def answered(data: bytes) -> tuple[Version, int]:
    """Return the version of an answer, and the number of the question. Raises MessageError when it is no answer."""
    version, message = _read(data)
    if version != _V3:
        pdu = message[2].getComponent()
        if pdu.tagSet not in rfc3411.RESPONSE_CLASS_PDUS:
            msg = "no answer"
            raise MessageError(msg)
        return _VERSIONS[version], int(pdu[0])
    if not _parameters_of(message)[0]:
        msg = "version 3 without an engine id: our own question, sent back"
        raise MessageError(msg)
    return 3, int(message[1][0])


def _read(data: bytes) -> tuple[int, Any]:
    """Read the outside of a message. Raises MessageError."""
    try:
        version = int(api.decodeMessageVersion(data))
        spec = SNMPv3Message() if version == _V3 else api.PROTOCOL_MODULES[version].Message()
        return version, decoder.decode(data, asn1Spec=spec)[0]
    except Exception as error:
        # pysnmp's and pyasn1's errors, and what their code trips over on hostile bytes.
        msg = "no SNMP message"
        raise MessageError(msg) from error


def _parameters_of(message: Any) -> Any:  # noqa: ANN401
    """Return the security parameters of a version 3 message. Raises MessageError."""
    try:
        return decoder.decode(message[2], asn1Spec=UsmSecurityParameters())[0]
    except Exception as error:
        msg = "no security parameters"
        raise MessageError(msg) from error


# --- Traps and informs ----------------------------------------------------------------------------------------------

_MOST_VARBINDS: Final = 64
"""What a trap says of itself stands at its beginning or, from a relay, among the last few."""
_LONGEST_OID: Final = 128
"""Parts of an OID (RFC 2578 3.5)."""
_TRAP_OID: Final = "1.3.6.1.6.3.1.1.4.1.0"
_TRAP_ADDRESS: Final = "1.3.6.1.6.3.18.1.3.0"
_TRAP_COMMUNITY: Final = "1.3.6.1.6.3.18.1.4.0"
_GENERIC: Final = "1.3.6.1.6.3.1.1.5"
_ENTERPRISE_SPECIFIC: Final = 6
_HERE: Final = 0
_REPORTABLE: Final = 4
_CONFIRMED: Final = rfc1905.InformRequestPDU.tagSet
_UNCONFIRMED: Final = rfc1905.SNMPv2TrapPDU.tagSet
_OTHERS: Final = (
    rfc1905.GetRequestPDU.tagSet,
    rfc1905.GetNextRequestPDU.tagSet,
    rfc1905.GetBulkRequestPDU.tagSet,
    rfc1905.SetRequestPDU.tagSet,
)
_RESULTS: Final = {
    "UnknownEngineID": "unknown_engine",
    "UnknownSecurityName": "unknown_user",
    "AuthenticationFailure": "not_authentic",
    "AuthenticationError": "not_authentic",
    "UnsupportedSecurityLevel": "not_authentic",
    "NotInTimeWindow": "out_of_time",
    "DecryptionError": "undecipherable",
}
"""Why pysnmp refuses a message, and what the trap port calls it."""


class NotATrapError(MessageError):
    """A good SNMP message that is neither trap nor inform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """What a trap or inform says. trap_oid: as version 2 has it, "" when it says none; confirmed: it is an inform.

    agent_address: the card as a relay names it, dotted; None without a relay. community: likewise.
    """

    trap_oid: str
    confirmed: bool
    agent_address: str | None = None
    community: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a datagram was worth.

    result: one of `traps.RESULTS`, "hint" when it is good. community: of versions 1 and 2c; None: it is of version 3.
    ups: the UPS whose card sent it; None when the message does not say. answer: the message to send back, if any.
    engine_id: of version 3, when it is not known.
    """

    result: str
    community: bytes | None = None
    ups: str | None = None
    notification: Notification | None = None
    answer: bytes | None = None
    engine_id: bytes = b""


class TrapReceiver:
    """Reads traps and informs of all versions. Versions 1 and 2c need pysnmp's codec only, version 3 an engine.

    boots: must be higher after each start of the daemon (RFC 3414 2.2).
    """

    def __init__(self, *, engine_id: bytes, boots: int, clock: Clock) -> None:
        """Start without users."""
        self._engine_id, self._boots = engine_id, boots
        self._clock, self._began_s = clock, clock()
        self._engines: list[_TrapEngine] = []
        self._has_users = False

    def add(self, options: Iterable[TrapUser]) -> list[str]:
        """Take users in; returns what is wrong with those that cannot be. Builds an engine: for a thread."""
        problems = []
        for one in options:
            self._has_users = True
            try:
                user = User.read(one.user, one)
            except (SecretError, UserError) as error:
                problems.append(f"traps.users, {one.user}: {error}")
                continue
            engines = {bytes.fromhex(plain_engine(engine)): ups for ups, engine in one.engines.items()}
            # One name may have other passphrases on another card: such a user has an engine of its own.
            for trap_engine in self._engines:
                if user.name not in trap_engine.users:
                    break
            else:
                trap_engine = _TrapEngine(self._engine_id, self._boots, self._clock, self._began_s)
                self._engines.append(trap_engine)
            trap_engine.add(user, engines)
        return problems

    def receive(self, data: bytes) -> Heard:
        """Judge one datagram. Raises MessageError on what cannot be read, NotATrapError on other messages."""
        version, message = _read(data)
        if version != _V3:
            return _by_community(version, message)
        sender = bytes(_parameters_of(message)[0])
        heard = Heard(result="unknown_engine", engine_id=sender) if self._has_users else Heard(result="unknown_user")
        for place, trap_engine in enumerate(self._engines):
            told = trap_engine.receive(data, message)
            if told.result == "hint":
                return told
            if not place or _RANK.index(told.result) > _RANK.index(heard.result):
                heard = told
        return heard


_RANK: Final = ("unknown_engine", "discovery", "unknown_user", "not_authentic", "undecipherable", "out_of_time")
"""Of several engines' results the one that came furthest counts."""


class _TrapEngine:
    """A pysnmp engine that is the authority for informs, and knows the engines that send traps."""

    def __init__(self, engine_id: bytes, boots: int, clock: Clock, began_s: float) -> None:
        self.users: dict[str, User] = {}
        self._ups: dict[tuple[bytes, str], str | None] = {}
        self._known: set[bytes] = {engine_id}
        self._own_id = engine_id
        self._sender = b""
        self._sent: bytes | None = None
        self._heard: Heard | None = None
        self._failed = ""
        self._engine: Any = SnmpEngine()
        messages = _V3Messages()
        self._usm = _Usm(clock)
        self._engine.security_models = {_USM: self._usm}
        self._engine.message_processing_subsystems = {messages.MESSAGE_PROCESSING_MODEL_ID: messages}
        self._engine.register_transport_dispatcher(_Dispatcher(self._send))
        mib = self._engine.get_mib_builder()
        own_id, own_boots, own_time = mib.import_symbols(
            "__SNMP-FRAMEWORK-MIB", "snmpEngineID", "snmpEngineBoots", "snmpEngineTime"
        )
        # Not by SnmpEngine(engine_id): that writes its boots into a file in /tmp.
        own_id.syntax = own_id.syntax.clone(engine_id)
        self._engine.snmpEngineID = own_id.syntax
        own_boots.syntax = own_boots.syntax.clone(boots)
        own_time.syntax = _EngineTime(clock, began_s)
        self._engine.message_dispatcher.register_context_engine_id(
            b"", (_CONFIRMED, _UNCONFIRMED, *_OTHERS), self._process
        )
        self._engine.observer.register_observer(self._refused, "rfc3412.prepareDataElements:sm-failure")

    def add(self, user: User, engines: dict[bytes, str]) -> None:
        """Add a user. engines: ids of the cards that send traps as this user, with the name of their UPS."""
        self.users[user.name] = user
        self._ups[self._own_id, user.name] = None
        user.add_to(self._engine)
        for engine_id, ups in engines.items():
            self._known.add(engine_id)
            self._ups[engine_id, user.name] = ups
            user.add_to(self._engine, engine_id)

    def receive(self, data: bytes, message: Any) -> Heard:  # noqa: ANN401
        """Judge one message. Raises MessageError on what cannot be read."""
        parameters = _parameters_of(message)
        self._sender = bytes(parameters[0])
        wants_answer = bytes(message[1][2])[0] & _REPORTABLE
        if self._sender and self._sender not in self._known:
            # pysnmp would say that the user is unknown. Of a greeting it says that the engine is.
            if wants_answer:
                self._hand_over(hello(3, int(message[1][0])))
            return Heard(result="unknown_engine", answer=self._sent if wants_answer else None, engine_id=self._sender)
        if self._sender and (self._sender, bytes(parameters[3]).decode(errors="replace")) not in self._ups:
            # pysnmp would remember every name that it is asked for.
            return Heard(result="unknown_user")
        self._hand_over(data)
        if self._heard is not None:
            answer = self._sent if self._heard.result == "hint" and self._heard.ups is None else None
            return replace(self._heard, answer=answer)
        result = _RESULTS.get(self._failed, "")
        if result == "unknown_engine":
            # A question for our engine id is how every inform begins.
            return Heard(result="discovery" if wants_answer and not self._sender else result, answer=self._sent)
        if result:
            return Heard(result=result, answer=self._sent if result == "out_of_time" else None)
        if self._usm.proved:
            msg = "neither trap nor inform"
            raise NotATrapError(msg)
        msg = "no SNMP message"
        raise MessageError(msg)

    def _hand_over(self, data: bytes) -> None:
        self._sent, self._heard, self._failed, self._usm.proved = None, None, "", False
        # Whatever pysnmp raises on a hostile packet: then nothing was heard.
        with contextlib.suppress(Exception):
            self._engine.message_dispatcher.receive_message(self._engine, _HERE, ("", 0), data)
        _forget_refused(self._engine)

    def _send(self, message: bytes, _domain: int) -> None:
        self._sent = message

    def _refused(self, _engine: Any, _point: str, told: dict[str, Any], _context: Any) -> None:  # noqa: ANN401
        self._failed = _reason(told["statusInformation"])

    def _process(self, *told: Any) -> None:  # noqa: ANN401
        """Take a request that pysnmp has proved and deciphered (RFC 3412 4.2.1); an inform is answered."""
        engine, model, security, name, level, context_engine, context_name, version, pdu, size, state = told
        user = self.users[bytes(name).decode()]
        if not self._usm.proved or level != user.level:
            self._heard = Heard(result="not_authentic")
        elif pdu.tagSet in {_CONFIRMED, _UNCONFIRMED}:
            self._heard = Heard(result="hint", ups=self._ups[self._sender, user.name], notification=_from_varbinds(pdu))
        if self._heard is not None and self._heard.result == "hint" and pdu.tagSet == _CONFIRMED:
            engine.message_dispatcher.return_response_pdu(
                *(engine, model, security, name, level, context_engine, context_name, version),
                *(_response_to(api.PROTOCOL_MODULES[_V2C], pdu), size, state, {}),
            )


class _EngineTime(rfc1902.Integer32):  # type: ignore[misc]
    """The time of our own engine, by our clock instead of wall time. pysnmp reads it through `clone`."""

    def __init__(self, clock: Clock, began_s: float) -> None:
        super().__init__(0)
        self._clock, self._began_s = clock, began_s

    def clone(self, *_: object, **__: object) -> Any:  # noqa: ANN401
        return rfc1902.Integer32(int(self._clock() - self._began_s))


def _by_community(version: int, message: Any) -> Heard:  # noqa: ANN401
    """Read a trap or inform of version 1 or 2c. Raises MessageError."""
    module = api.PROTOCOL_MODULES[version]
    community, pdu = bytes(message[1]), message[2].getComponent()
    if version == _V1 and pdu.tagSet == module.TrapPDU.tagSet:
        return Heard(result="hint", community=community, notification=_trap_v1(pdu))
    if version == _V1 or pdu.tagSet not in {_CONFIRMED, _UNCONFIRMED}:
        msg = "neither trap nor inform"
        raise NotATrapError(msg)
    told = _from_varbinds(pdu)
    answer = None
    if told.confirmed:
        answered_with = module.Message()
        module.apiMessage.set_defaults(answered_with)
        module.apiMessage.set_community(answered_with, community)
        module.apiMessage.set_pdu(answered_with, _response_to(module, pdu))
        answer = bytes(encoder.encode(answered_with))
    return Heard(result="hint", community=community, notification=told, answer=answer)


def _response_to(module: Any, inform: Any) -> Any:  # noqa: ANN401
    """Return the response to an inform: the inform itself, as a response (RFC 3416 4.2.7)."""
    response = module.apiPDU.get_response(inform)
    module.apiPDU.set_varbinds(response, module.apiPDU.get_varbinds(inform))
    return response


def _trap_v1(pdu: Any) -> Notification:  # noqa: ANN401
    enterprise, generic, specific = str(pdu[0]), int(pdu[2]), int(pdu[3])
    if not 0 <= generic <= _ENTERPRISE_SPECIFIC or len(pdu[0]) > _LONGEST_OID:
        msg = "trap number out of range"
        raise MessageError(msg)
    named = f"{enterprise}.0.{specific}" if generic == _ENTERPRISE_SPECIFIC else f"{_GENERIC}.{generic + 1}"
    return Notification(trap_oid=named, confirmed=False, agent_address=_dotted(bytes(pdu[1].getComponent())))


def _from_varbinds(pdu: Any) -> Notification:  # noqa: ANN401
    found: dict[str, Answer] = {}
    for row in itertools.islice(pdu[3], _MOST_VARBINDS):
        found[str(row[0])] = _plain(row[1])
    trap_oid, address, community = (found.get(name) for name in (_TRAP_OID, _TRAP_ADDRESS, _TRAP_COMMUNITY))
    if isinstance(trap_oid, Oid) and trap_oid.count(".") >= _LONGEST_OID:
        msg = "an OID of too many parts"
        raise MessageError(msg)
    return Notification(
        trap_oid=trap_oid if isinstance(trap_oid, Oid) else "",
        confirmed=pdu.tagSet == _CONFIRMED,
        agent_address=_dotted(address) if isinstance(address, bytes) else None,
        community=community if isinstance(community, bytes) else None,
    )


def _dotted(address: bytes) -> str | None:
    """Return an IpAddress dotted; None for 0.0.0.0, which relays and cards without an address write."""
    return None if len(address) != 4 or address == bytes(4) else ".".join(map(str, address))
