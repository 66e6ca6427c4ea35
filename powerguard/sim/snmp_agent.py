"""A UPS network card: an SNMP agent over real UDP, for v1, v2c and v3, that can be told to misbehave.

    async with SnmpAgent(values) as agent:      # values() -> {OID: SimValue}
        agent.port, agent.fault = ..., Fault.LATE

It shares no code with the client that polls it: an error in one of the two is not hidden by the other.
"""

import asyncio
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

from powerguard.sim import snmp_ber as ber
from powerguard.sim.snmp_ber import SimValue
from powerguard.sim.snmp_usm import ReportError, Request, SimUser

Values = Callable[[], Mapping[str, SimValue]]
OnSet = Callable[[str, SimValue], bool | int]

_TOO_BIG, _NO_SUCH_NAME, _GEN_ERR, _NOT_WRITABLE = 1, 2, 5, 17
_READ_ONLY: Final = 4
_EXCEPTIONS: Final = frozenset({ber.NO_SUCH_OBJECT, ber.NO_SUCH_INSTANCE, ber.END_OF_MIB})


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
    """Right names beside the values of their neighbours' places, in another order: to be told apart by name."""
    GEN_ERR = "gen_err"
    TOO_BIG = "too_big"
    """More than four objects at once are too many."""
    BAD_INDEX = "bad_index"
    NULLS = "nulls"
    TEXT = "text"
    """Numbers come as strings of rubbish."""
    SET_LOST = "set_lost"
    """A SET is not carried out and not answered."""
    SET_MUTE = "set_mute"
    """A SET is carried out, and its answer is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pdu:
    tag: int
    request_id: int
    varbinds: tuple[tuple[str, SimValue], ...]
    status: int = 0
    index: int = 0

    @classmethod
    def parse(cls, element: bytes) -> Self:
        tag, content = ber.Reader(element).element()
        reader = ber.Reader(content)
        request_id, _status, _index = reader.number(), reader.number(), reader.number()
        rows = ber.Reader(reader.expect(ber.SEQUENCE))
        varbinds: list[tuple[str, SimValue]] = []
        while rows.more():
            row = ber.Reader(rows.expect(ber.SEQUENCE))
            name = row.value()
            if not isinstance(name.content, str):
                msg = "a varbind without a name"
                raise ber.BerError(msg)
            varbinds.append((name.content, row.value()))
        return cls(tag=tag, request_id=request_id, varbinds=tuple(varbinds))

    def encode(self) -> bytes:
        head = b"".join(ber.encode_value(ber.integer(number)) for number in (self.request_id, self.status, self.index))
        rows = b"".join(
            ber.encode(ber.SEQUENCE, ber.encode_value(ber.oid(name)) + ber.encode_value(value))
            for name, value in self.varbinds
        )
        return ber.encode(self.tag, head + ber.encode(ber.SEQUENCE, rows))


def _key(dotted: str) -> tuple[int, ...]:
    return tuple(int(part) for part in dotted.split("."))


class SnmpAgent:
    """One card. values: its table, read anew for every request. on_set: takes a SET; None or False: not writable.

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
        except (ber.BerError, IndexError, ValueError, OverflowError):
            return  # A real card is silent, too.
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
        reader = ber.Reader(ber.Reader(message).expect(ber.SEQUENCE))
        version = reader.number()
        if version == 3:
            return self._answer_v3(message)
        community = reader.expect(ber.OCTETS)
        pdu = _Pdu.parse(ber.encode(*reader.element()))
        if community not in {self._read, self._write}:
            return None
        answer = self._respond(pdu, v1=version == 0, may_write=community == self._write)
        if answer is None:
            return None
        if self.fault is Fault.WRONG_COMMUNITY:
            community = b"another"
        head = ber.encode_value(ber.integer(version)) + ber.encode(ber.OCTETS, community)
        return ber.encode(ber.SEQUENCE, head + answer.encode())

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
        match pdu.tag:
            case ber.GET:
                found = [(name, _get(values, name)) for name, _ in pdu.varbinds]
            case ber.GETNEXT:
                order = sorted(values, key=_key)
                found = [_next(values, order, name) for name, _ in pdu.varbinds]
            case ber.SET:
                if self.fault is Fault.SET_LOST:
                    return None
                answer = self._set(pdu, v1=v1, may_write=may_write)
                return None if self.fault is Fault.SET_MUTE else answer
            case _:
                return None
        answer = replace(pdu, tag=ber.RESPONSE, varbinds=tuple(found))
        if v1:
            # Version 1 has no word for "this one is missing": it refuses all of them (RFC 1157 4.1.2).
            absent = [place for place, (_, value) in enumerate(found, 1) if value.tag in _EXCEPTIONS]
            if absent:
                answer = replace(answer, status=_NO_SUCH_NAME, index=absent[0], varbinds=pdu.varbinds)
        return self._spoil(answer, pdu)

    def _set(self, pdu: _Pdu, *, v1: bool, may_write: bool) -> _Pdu:
        answer = replace(pdu, tag=ber.RESPONSE)
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
            case Fault.NULLS:
                return replace(answer, varbinds=tuple((name, ber.NULL_VALUE) for name, _ in rows))
            case Fault.TEXT:
                return replace(answer, varbinds=tuple((name, ber.octets(b"\xff???")) for name, _ in rows))
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
    return SimValue(ber.NO_SUCH_INSTANCE if known else ber.NO_SUCH_OBJECT)


def _next(values: Mapping[str, SimValue], order: list[str], name: str) -> tuple[str, SimValue]:
    place = bisect_right(order, _key(name), key=_key)
    return (order[place], values[order[place]]) if place < len(order) else (name, SimValue(ber.END_OF_MIB))
