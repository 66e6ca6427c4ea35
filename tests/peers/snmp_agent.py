"""A UPS network card: an SNMP agent over real UDP, for v1, v2c and v3, that can be made to misbehave.

    async with SnmpAgent(values) as agent:      # values() -> {OID: SimValue}
        agent.port, agent.fault = ..., Fault.LATE

Its codec and ciphers are pysnmp's, as the client's are. That the client speaks SNMP is tested against net-snmp; the
card is there for what a real one does not do on demand. It makes its own messages, so that they can be wrong.
"""

import asyncio
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Self

from pyasn1.codec.ber import decoder, encoder
from pyasn1.type import univ
from pysnmp.proto import api, rfc1902, rfc1905
from pysnmp.proto.error import StatusInformation
from pysnmp.proto.mpmod.rfc3412 import ScopedPDU, SNMPv3Message
from pysnmp.proto.secmod.rfc3414.auth.hmacsha import HmacSha
from pysnmp.proto.secmod.rfc3414.service import UsmSecurityParameters
from pysnmp.proto.secmod.rfc3826.priv.aes import Aes

from powerguard.clock import Clock, boottime_s
from powerguard.sim import snmp_values as sim
from powerguard.sim.snmp_values import SimValue

_DIGEST_BYTES: Final = 12
_WINDOW_S: Final = 150
_AUTH, _PRIV = 1, 2
_STATS: Final = "1.3.6.1.6.3.15.1.1"
_UNSUPPORTED_LEVEL, _NOT_IN_WINDOW, _UNKNOWN_USER, _UNKNOWN_ENGINE, _WRONG_DIGEST, _UNDECIPHERABLE = range(1, 7)
_SHA: Final = HmacSha()
_AES: Final = Aes()


def localized_key(passphrase: bytes, engine_id: bytes) -> bytes:
    """Return the key of a passphrase for one engine (RFC 3414 A.2.2)."""
    return bytes(_SHA.localize_key(_SHA.hash_passphrase(passphrase), univ.OctetString(engine_id)))


def _sequence(*parts: bytes) -> bytes:
    """Return a SEQUENCE of whole elements, whatever they are."""
    whole = univ.Sequence()
    for place, part in enumerate(parts):
        whole.setComponentByPosition(place, univ.Any(part))
    return bytes(encoder.encode(whole))


def _numbers(*numbers: int) -> tuple[bytes, ...]:
    return tuple(bytes(encoder.encode(univ.Integer(number))) for number in numbers)


def _octets(*strings: bytes) -> tuple[bytes, ...]:
    return tuple(bytes(encoder.encode(univ.OctetString(string))) for string in strings)


class ReportError(Exception):
    """A message that is answered with a Report. counter: which of the usmStats; authenticated: the Report as well."""

    def __init__(self, counter: int, message_id: int, *, authenticated: bool = False) -> None:
        """Keep what the Report says."""
        super().__init__(counter)
        self.counter = counter
        self.message_id = message_id
        self.authenticated = authenticated


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A version 3 message, its security checked. pdu: the whole PDU element."""

    message_id: int
    flags: int
    context_name: bytes
    pdu: bytes


@dataclass(slots=True)
class SimUser:
    """A user of the card and the card's engine. priv None: authentication without privacy."""

    name: str
    auth: bytes = field(repr=False)
    priv: bytes | None = field(default=None, repr=False)
    engine_id: bytes = b"\x80\x00\x00\x00\x05powerguard-sim"
    boots: int = 1
    clock: Clock = boottime_s
    _began_s: float = field(init=False)
    _auth_key: bytes = field(init=False, repr=False)
    _priv_key: bytes | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Hash the passphrases into keys, once."""
        self._began_s = self.clock()
        self._auth_key = localized_key(self.auth, self.engine_id)
        self._priv_key = None if self.priv is None else localized_key(self.priv, self.engine_id)[:16]

    @property
    def engine_time_s(self) -> int:
        return int(self.clock() - self._began_s)

    def reboot(self) -> None:
        """Begin a new life of the card's engine (RFC 3414 2.2.2)."""
        self.boots += 1
        self._began_s = self.clock()

    def open(self, message: bytes) -> Request:
        """Check and decrypt a message. Raises pyasn1's errors, or ReportError with what RFC 3414 3.2 answers."""
        parsed, _ = decoder.decode(message, asn1Spec=SNMPv3Message())
        message_id, flags = int(parsed[1][0]), bytes(parsed[1][2])[0]
        parameters, _ = decoder.decode(parsed[2], asn1Spec=UsmSecurityParameters())
        engine, boots, time_s = bytes(parameters[0]), int(parameters[1]), int(parameters[2])
        if engine != self.engine_id:
            raise ReportError(_UNKNOWN_ENGINE, message_id)
        if bytes(parameters[3]) != self.name.encode():
            raise ReportError(_UNKNOWN_USER, message_id)
        if flags & (_AUTH | _PRIV) != _AUTH | (_PRIV if self._priv_key is not None else 0):
            raise ReportError(_UNSUPPORTED_LEVEL, message_id)
        try:
            _SHA.authenticate_incoming_message(univ.OctetString(self._auth_key), parameters[4], message)
        except StatusInformation:
            raise ReportError(_WRONG_DIGEST, message_id) from None
        if boots != self.boots or abs(time_s - self.engine_time_s) > _WINDOW_S:
            raise ReportError(_NOT_IN_WINDOW, message_id, authenticated=True)
        scoped = parsed[3].getComponent()
        if flags & _PRIV:
            key = univ.OctetString(self._priv_key)
            try:
                plain = _AES.decrypt_data(key, (parameters[1], parameters[2], parameters[5]), scoped)
                scoped, _ = decoder.decode(plain, asn1Spec=ScopedPDU())
            except Exception as error:
                raise ReportError(_UNDECIPHERABLE, message_id) from error
        return Request(
            message_id=message_id,
            flags=flags,
            context_name=bytes(scoped[1]),
            pdu=bytes(encoder.encode(scoped[2].getComponent())),
        )

    def seal(self, request: Request, pdu: bytes) -> bytes:
        """Return the answer to a request as a message, at the request's own security level."""
        return self._seal(request.message_id, request.flags & (_AUTH | _PRIV), request.context_name, pdu)

    def report(self, error: ReportError) -> bytes:
        """Return the Report for a message that was refused."""
        counter = (f"{_STATS}.{error.counter}.0", SimValue(sim.COUNTER32, 1))
        report = _Pdu(kind=rfc1905.ReportPDU, request_id=0, varbinds=(counter,))
        return self._seal(error.message_id, _AUTH if error.authenticated else 0, b"", report.encode())

    def _seal(self, message_id: int, flags: int, context_name: bytes, pdu: bytes) -> bytes:
        scoped = _sequence(*_octets(self.engine_id, context_name), pdu)
        place, salt = (self.boots, self.engine_time_s), b""
        if flags & _PRIV:
            sealed, result = _AES.encrypt_data(univ.OctetString(self._priv_key), (*place, None), scoped)
            (scoped,), salt = _octets(bytes(sealed)), bytes(result)
        user, blank = (self.name.encode(), bytes(_DIGEST_BYTES)) if flags & _AUTH else (b"", b"")
        parameters = _sequence(*_octets(self.engine_id), *_numbers(*place), *_octets(user, blank, salt))
        header = _sequence(*_numbers(message_id, 65507), *_octets(bytes((flags,))), *_numbers(3))
        whole = _sequence(*_numbers(3), header, *_octets(parameters), scoped)
        if not flags & _AUTH:
            return whole
        return bytes(_SHA.authenticate_outgoing_message(univ.OctetString(self._auth_key), whole))


Values = Callable[[], Mapping[str, SimValue]]
OnSet = Callable[[str, SimValue], bool | int]

_TOO_BIG, _NO_SUCH_NAME, _GEN_ERR, _NOT_WRITABLE = 1, 2, 5, 17
_READ_ONLY: Final = 4
_EXCEPTIONS: Final = frozenset({sim.NO_SUCH_OBJECT, sim.NO_SUCH_INSTANCE, sim.END_OF_MIB})


class Fault(StrEnum):
    """What the card does instead of answering well. Every one of these has been seen, or can be forged."""

    NONE = "none"
    DROP = "drop"
    LOSS = "loss"
    """Every other request goes unanswered, by dice."""
    LATE = "late"
    GARBAGE = "garbage"
    TRUNCATED = "truncated"
    WRONG_ID = "wrong_id"
    WRONG_COMMUNITY = "wrong_community"
    TWICE = "twice"
    FEWER = "fewer"
    EMPTY = "empty"
    SWAPPED = "swapped"
    SHIFTED = "shifted"
    """Right names with the values of their neighbours, in another order: only the names identify them."""
    GEN_ERR = "gen_err"
    TOO_BIG = "too_big"
    """More than four objects at once are too many."""
    BAD_INDEX = "bad_index"
    REFUSES = "refuses"
    """An object that it lacks is a general error."""
    NULLS = "nulls"
    TEXT = "text"
    """Numbers come as strings of rubbish."""
    SET_LOST = "set_lost"
    """A SET is not carried out and not answered."""
    SET_MUTE = "set_mute"
    """A SET is carried out, and its answer is lost."""


_TYPES: Final[dict[int, Any]] = {
    sim.INTEGER: rfc1902.Integer32,
    sim.OCTETS: rfc1902.OctetString,
    sim.OID: rfc1902.ObjectName,
    sim.IP_ADDRESS: rfc1902.IpAddress,
    sim.COUNTER32: rfc1902.Counter32,
    sim.GAUGE32: rfc1902.Gauge32,
    sim.TIMETICKS: rfc1902.TimeTicks,
    sim.COUNTER64: rfc1902.Counter64,
}
_NOTHING: Final = {
    sim.NULL: rfc1905.unSpecified,
    sim.NO_SUCH_OBJECT: rfc1905.noSuchObject,
    sim.NO_SUCH_INSTANCE: rfc1905.noSuchInstance,
    sim.END_OF_MIB: rfc1905.endOfMibView,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pdu:
    """A PDU. kind: pysnmp's class for it; version 1 has the same tags."""

    kind: Any
    request_id: int
    varbinds: tuple[tuple[str, SimValue], ...]
    status: int = 0
    index: int = 0

    @classmethod
    def parse(cls, element: bytes) -> Self:
        pdu = decoder.decode(element, asn1Spec=rfc1905.PDUs())[0].getComponent()
        varbinds = tuple((str(row[0]), _sim_value(row[1])) for row in pdu[3])
        return cls(kind=type(pdu), request_id=int(pdu[0]), varbinds=varbinds)

    def encode(self) -> bytes:
        rows = (
            _sequence(bytes(encoder.encode(rfc1902.ObjectName(name))), bytes(encoder.encode(_pysnmp_value(value))))
            for name, value in self.varbinds
        )
        whole = self.kind()
        plain = _sequence(*_numbers(self.request_id, self.status, self.index), _sequence(*rows))
        return bytes((whole.tagSet.superTags[0].tagClass | 0x20 | whole.tagSet.superTags[0].tagId,)) + plain[1:]


def _pysnmp_value(value: SimValue) -> Any:  # noqa: ANN401 - pysnmp ships no types
    return _NOTHING[value.tag] if value.content is None else _TYPES[value.tag](value.content)


def _sim_value(value: Any) -> SimValue:  # noqa: ANN401
    while isinstance(value, univ.Choice):
        value = value.getComponent()
    tag = value.tagSet.superTags[0].tagClass | value.tagSet.superTags[0].tagId
    if isinstance(value, univ.Null):
        return SimValue(tag)
    if isinstance(value, univ.Integer):
        return SimValue(tag, int(value))
    return SimValue(tag, str(value) if isinstance(value, univ.ObjectIdentifier) else bytes(value))


def _key(dotted: str) -> tuple[int, ...]:
    return tuple(int(part) for part in dotted.split("."))


class SnmpAgent:
    """One card. values: its table, read again for every request. on_set: takes a SET; None or False: not writable.

    An on_set that returns a number refuses with this error status (RFC 3416 section 3); True takes it.

    requests: how many were answered or dropped. late_s: how long a late answer takes.
    """

    def __init__(
        self,
        values: Values,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        community: str = "public",
        write_community: str = "private",
        user: SimUser | None = None,
        on_set: OnSet | None = None,
        seed: int = 0,
    ) -> None:
        """Bind nothing yet. port 0: a free one."""
        self._values = values
        self._address = (host, port)
        self._read, self._write = community.encode(), write_community.encode()
        self._user = user
        self._on_set = on_set
        self._random = random.Random(seed)
        self._transport: asyncio.DatagramTransport | None = None
        self._late: set[asyncio.TimerHandle] = set()
        self.fault = Fault.NONE
        self.late_s = 1.5
        self.requests = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        transport, _protocol = await loop.create_datagram_endpoint(lambda: _Receiver(self), local_addr=self._address)
        self._transport = transport
        self._address = transport.get_extra_info("sockname")[:2]
        return self

    async def __aexit__(self, *_exception: object) -> None:
        for handle in self._late:
            handle.cancel()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    @property
    def port(self) -> int:
        return self._address[1]

    def receive(self, message: bytes, sender: tuple[str, int]) -> None:
        """Answer one datagram, or not."""
        self.requests += 1
        if self.fault is Fault.DROP or (self.fault is Fault.LOSS and self._random.random() < 0.5):
            return
        try:
            answer = self._answer(message)
        except Exception:  # noqa: BLE001 - whatever pysnmp trips over; a real card is silent, too
            return
        if answer is None:
            return
        if self.fault is Fault.GARBAGE:
            answer = self._random.randbytes(60)
        elif self.fault is Fault.TRUNCATED:
            answer = answer[:-7]
        if self.fault is Fault.LATE:
            loop = asyncio.get_running_loop()
            self._late.add(loop.call_later(self.late_s, self._send, answer, sender))
            return
        for _ in range(3 if self.fault is Fault.TWICE else 1):
            self._send(answer, sender)

    def _send(self, answer: bytes, sender: tuple[str, int]) -> None:
        if self._transport is not None:
            self._transport.sendto(answer, sender)

    def _answer(self, message: bytes) -> bytes | None:
        version = int(api.decodeMessageVersion(message))
        if version == 3:
            return self._answer_v3(message)
        parsed, _ = decoder.decode(message, asn1Spec=api.PROTOCOL_MODULES[version].Message())
        community, pdu = bytes(parsed[1]), _Pdu.parse(bytes(encoder.encode(parsed[2].getComponent())))
        if community not in {self._read, self._write}:
            return None
        answer = self._respond(pdu, v1=version == 0, may_write=community == self._write)
        if answer is None:
            return None
        if self.fault is Fault.WRONG_COMMUNITY:
            community = b"another"
        return _sequence(*_numbers(version), *_octets(community), answer.encode())

    def _answer_v3(self, message: bytes) -> bytes | None:
        if self._user is None:
            return None
        try:
            request: Request = self._user.open(message)
        except ReportError as error:
            return self._user.report(error)
        answer = self._respond(_Pdu.parse(request.pdu), v1=False, may_write=True)
        return None if answer is None else self._user.seal(request, answer.encode())

    # --- What the card says -------------------------------------------------------------------------------------

    def _respond(self, pdu: _Pdu, *, v1: bool, may_write: bool) -> _Pdu | None:
        values = self._values()
        match pdu.kind:
            case rfc1905.GetRequestPDU:
                found = [(name, _get(values, name)) for name, _ in pdu.varbinds]
            case rfc1905.GetNextRequestPDU:
                order = sorted(values, key=_key)
                found = [_next(values, order, name) for name, _ in pdu.varbinds]
            case rfc1905.SetRequestPDU:
                if self.fault is Fault.SET_LOST:
                    return None
                answer = self._set(pdu, v1=v1, may_write=may_write)
                return None if self.fault is Fault.SET_MUTE else answer
            case _:
                return None
        answer = replace(pdu, kind=rfc1905.ResponsePDU, varbinds=tuple(found))
        if v1:
            # Version 1 has no word for "this one is missing": it refuses all of them (RFC 1157 4.1.2).
            absent = [place for place, (_, value) in enumerate(found, 1) if value.tag in _EXCEPTIONS]
            if absent:
                answer = replace(answer, status=_NO_SUCH_NAME, index=absent[0], varbinds=pdu.varbinds)
        return self._spoil(answer, pdu)

    def _set(self, pdu: _Pdu, *, v1: bool, may_write: bool) -> _Pdu:
        answer = replace(pdu, kind=rfc1905.ResponsePDU)
        for place, (name, value) in enumerate(pdu.varbinds, 1):
            taken = may_write and self._on_set is not None and self._on_set(name, value)
            if taken is False:
                return replace(answer, status=_READ_ONLY if v1 else _NOT_WRITABLE, index=place)
            if taken is not True:
                return replace(answer, status=taken, index=place)
        return answer

    def _spoil(self, answer: _Pdu, asked: _Pdu) -> _Pdu:
        rows = answer.varbinds
        match self.fault:
            case Fault.WRONG_ID:
                return replace(answer, request_id=answer.request_id ^ 1)
            case Fault.FEWER:
                return replace(answer, varbinds=rows[:-1])
            case Fault.EMPTY:
                return replace(answer, varbinds=())
            case Fault.SWAPPED:
                return replace(answer, varbinds=rows[::-1])
            case Fault.SHIFTED:
                return replace(answer, varbinds=(*rows[1:], *rows[:1]))
            case Fault.GEN_ERR:
                return replace(answer, status=_GEN_ERR, index=1)
            case Fault.BAD_INDEX:
                return replace(answer, status=_GEN_ERR, index=99)
            case Fault.TOO_BIG if len(rows) > 4:
                return replace(answer, status=_TOO_BIG, varbinds=asked.varbinds)
            case Fault.REFUSES if asked.kind is rfc1905.GetRequestPDU:
                absent = [place for place, (_, value) in enumerate(rows, 1) if value.tag in _EXCEPTIONS]
                place = answer.index or next(iter(absent), 0)
                return replace(answer, status=_GEN_ERR, index=place, varbinds=asked.varbinds) if place else answer
            case Fault.NULLS:
                return replace(answer, varbinds=tuple((name, sim.NULL_VALUE) for name, _ in rows))
            case Fault.TEXT:
                return replace(answer, varbinds=tuple((name, sim.octets(b"\xff???")) for name, _ in rows))
            case _:
                return answer


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, agent: SnmpAgent) -> None:
        self._agent = agent

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._agent.receive(data, addr)


def _get(values: Mapping[str, SimValue], name: str) -> SimValue:
    if name in values:
        return values[name]
    column = name.rpartition(".")[0]
    known = any(other.rpartition(".")[0] == column for other in values)
    return SimValue(sim.NO_SUCH_INSTANCE if known else sim.NO_SUCH_OBJECT)


def _next(values: Mapping[str, SimValue], order: list[str], name: str) -> tuple[str, SimValue]:
    place = bisect_right(order, _key(name), key=_key)
    return (order[place], values[order[place]]) if place < len(order) else (name, SimValue(sim.END_OF_MIB))
