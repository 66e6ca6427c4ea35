"""A UPS network card: an SNMP agent over real UDP that answers reads of versions 1 and 2c, community public.

    async with SnmpAgent(values) as agent:      # values() -> {OID: SimValue}
        agent.port

Its codec is pysnmp's, as the client's is. The card that misbehaves, takes SETs and speaks version 3 is a test's.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from pyasn1.codec.ber import decoder, encoder
from pyasn1.type import univ
from pysnmp.proto import api, rfc1902, rfc1905

from powerguard.sim import snmp_values as sim
from powerguard.sim.snmp_values import SimValue

Values = Callable[[], Mapping[str, SimValue]]

_NO_SUCH_NAME: Final = 2
_TYPES: Final[dict[int, Any]] = {
    sim.INTEGER: rfc1902.Integer32,
    sim.OCTETS: rfc1902.OctetString,
    sim.OID: rfc1902.ObjectName,
    sim.GAUGE32: rfc1902.Gauge32,
    sim.TIMETICKS: rfc1902.TimeTicks,
}


class SnmpAgent(asyncio.DatagramProtocol):
    """One card. values: its table, read again for every request."""

    def __init__(self, values: Values, *, port: int = 0) -> None:
        """Bind nothing yet. port 0: a free one."""
        self.port = port
        self._values = values
        self._transport: asyncio.DatagramTransport | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", self.port))
        self.port = self._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer one datagram, or not."""
        try:
            answer = self._answer(data)
        except Exception:  # noqa: BLE001 - whatever pysnmp trips over; a real card is silent, too
            return
        if answer is not None and self._transport is not None:
            self._transport.sendto(answer, addr)

    def _answer(self, message: bytes) -> bytes | None:
        version = int(api.decodeMessageVersion(message))
        protocol = api.PROTOCOL_MODULES[version]
        request, _ = decoder.decode(message, asn1Spec=protocol.Message())
        question, values = protocol.apiMessage.get_pdu(request), self._values()
        names = [str(name) for name, _ in protocol.apiPDU.get_varbinds(question)]
        if bytes(protocol.apiMessage.get_community(request)) != b"public":
            return None
        if question.isSameTypeWith(protocol.GetRequestPDU()):
            found = [(name, _get(values, name)) for name in names]
        elif question.isSameTypeWith(protocol.GetNextRequestPDU()):
            order = sorted(values, key=_key)
            found = [_next(values, order, name) for name in names]
        else:
            return None
        answer = protocol.apiMessage.get_response(request)
        pdu = protocol.apiMessage.get_pdu(answer)
        absent = [place for place, (_, value) in enumerate(found, 1) if isinstance(value, univ.Null)]
        if version == api.SNMP_VERSION_1 and absent:
            # Version 1 has no word for "this one is missing": it refuses all of them (RFC 1157 4.1.2).
            found = [(name, univ.Null("")) for name in names]
            protocol.apiPDU.set_error_status(pdu, _NO_SUCH_NAME)
            protocol.apiPDU.set_error_index(pdu, absent[0])
        protocol.apiPDU.set_varbinds(pdu, found)
        return bytes(encoder.encode(answer))


def _key(dotted: str) -> tuple[int, ...]:
    return tuple(int(part) for part in dotted.split("."))


def _get(values: Mapping[str, SimValue], name: str) -> Any:  # noqa: ANN401 - pysnmp ships no types
    if name in values:
        return _TYPES[values[name].tag](values[name].content)
    column = name.rpartition(".")[0]
    known = any(other.rpartition(".")[0] == column for other in values)
    return rfc1905.noSuchInstance if known else rfc1905.noSuchObject


def _next(values: Mapping[str, SimValue], order: list[str], name: str) -> tuple[str, Any]:
    place = bisect_right(order, _key(name), key=_key)
    return (order[place], _get(values, order[place])) if place < len(order) else (name, rfc1905.endOfMibView)
