"""pysnmp's engines: one for each event loop, warmed in a thread, with a timer and sockets that nothing can break.

Only `snmp_port` uses this; together they are what touches pysnmp.
"""

import asyncio
import contextlib
import socket
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from pysnmp.carrier.asyncio import dispatch as pysnmp_dispatch
from pysnmp.carrier.asyncio.dgram import udp, udp6
from pysnmp.entity import config
from pysnmp.entity.engine import SnmpEngine
from pysnmp.entity.rfc3413 import cmdgen
from pysnmp.proto import rfc1902, rfc1905
from pysnmp.proto.secmod.rfc3414 import service as pysnmp_usm

from powerguard.clock import boottime_s

_TICK_S: Final = 0.25

# The clock of the user security model: with wall time a step of NTP throws a session out of the card's time window.
pysnmp_usm.time = SimpleNamespace(time=boottime_s)


class _Dispatcher(pysnmp_dispatch.AsyncioDispatcher):  # type: ignore[misc]  # pysnmp ships no types
    """pysnmp's timer, by the loop's clock: with wall time a step of NTP would cut or stretch every timeout.

    broken: a tick raised. pysnmp's own timer task ends there, and the entry that raised would do so at every tick:
    the engine never times anything out again. It is thrown away for a new one.
    """

    broken = False

    async def handle_timeout(self) -> None:
        """Tick until cancelled."""
        loop = asyncio.get_running_loop()
        while not self.broken:
            await asyncio.sleep(self.get_timer_resolution())  # noqa: TID251 - a timer's own tick
            try:
                self.handle_timer_tick(loop.time())
            except Exception:  # noqa: BLE001 - told by `broken`; the requests in flight end at our own timeout
                self.broken = True


class Udp(udp.UdpAsyncioTransport):  # type: ignore[misc]  # pysnmp ships no types
    """pysnmp's transport, that counts and drops what cannot be decoded instead of raising in the loop."""

    garbled = 0

    def datagram_received(self, datagram: bytes, transportAddress: tuple[str, int]) -> None:  # noqa: N803 - pysnmp's
        """Hand a packet to the engine; every SNMP message is a SEQUENCE."""
        if datagram[:1] != b"\x30":
            Udp.garbled += 1
            return
        try:
            self._callback_function(self, transportAddress, datagram)
        except Exception:  # noqa: BLE001 - whatever a decoder raises on a hostile packet; the request times out
            Udp.garbled += 1

    def error_received(self, exc: Exception) -> None:
        """ICMP refused: nothing tells whose it was, so the request runs into its own timeout."""


class Udp6(Udp, udp6.Udp6AsyncioTransport):  # type: ignore[misc]
    """The same over IPv6."""

    SOCK_FAMILY = udp6.Udp6AsyncioTransport.SOCK_FAMILY
    ADDRESS_TYPE = udp6.Udp6AsyncioTransport.ADDRESS_TYPE


def garbled_packets() -> int:
    """Packets of this process that were no SNMP at all, or could not be matched to a request."""
    return Udp.garbled


@dataclass(slots=True)
class Engine:
    """One engine of one loop. ports: who uses it; the last one to close closes it.

    users: SNMPv3 names in use and what their keys hash to: one name, one set of keys.
    """

    engine: Any
    ports: set[str] = field(default_factory=set)
    users: dict[str, tuple[object, ...]] = field(default_factory=dict)

    @property
    def broken(self) -> bool:
        return getattr(self.engine.transport_dispatcher, "broken", False)


live_engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Engine]] = weakref.WeakKeyDictionary()
_WARM = b"warm"


def _build_engine() -> Any:  # noqa: ANN401 - pysnmp ships no types
    """Build an engine and let it ask itself once, so that everything slow is behind it. For a thread."""
    engine = SnmpEngine()
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(_warm_up(engine))
    return engine


async def _warm_up(engine: Any) -> None:  # noqa: ANN401
    loop = asyncio.get_running_loop()
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as peer:
        peer.bind(("127.0.0.1", 0))
        peer.setblocking(False)
        add_transport(engine, udp.DOMAIN_NAME, Udp())
        config.add_v1_system(engine, "warm", _WARM)
        config.add_target_parameters(engine, "warm", "warm", "noAuthNoPriv", 1)
        config.add_target_address(engine, "warm", udp.DOMAIN_NAME, peer.getsockname(), "warm", 20, 0)
        asked = loop.create_future()
        cmdgen.GetCommandGenerator().send_varbinds(
            engine, "warm", None, b"", [(rfc1902.ObjectName((1, 3, 6)), rfc1905.unSpecified)], answer_to(asked)
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                packet, address = await loop.sock_recvfrom(peer, 4096)
                start = packet.index(_WARM) + len(_WARM)
                # The request with its tag turned into that of a response (A0 into A2) is a valid answer.
                await loop.sock_sendto(peer, packet[:start] + b"\xa2" + packet[start + 1 :], address)
                await asked
        config.delete_target_address(engine, "warm")
        config.delete_target_parameters(engine, "warm")
        config.delete_v1_system(engine, "warm")
        _close_dispatcher(engine)


def answer_to(asked: "asyncio.Future[Any]") -> Any:  # noqa: ANN401
    def on_answer(_engine: Any, _handle: Any, *answer: Any) -> None:  # noqa: ANN401
        if not asked.done():
            asked.set_result(answer[:4])

    return on_answer


def add_transport(engine: Any, domain: tuple[int, ...], transport: Any) -> None:  # noqa: ANN401
    """Open a socket for the engine on the running loop; 4 ticks a second, for 10 cost half as much as our polls."""
    if engine.transport_dispatcher is None:
        dispatcher = _Dispatcher()
        dispatcher.set_timer_resolution(_TICK_S)
        engine.register_transport_dispatcher(dispatcher)
    config.add_transport(engine, domain, transport.open_client_mode())


def _close_dispatcher(engine: Any) -> None:  # noqa: ANN401
    """Take the engine off its loop; it may be put on another one."""
    for domain in (udp.DOMAIN_NAME, udp6.DOMAIN_NAME):
        transport = config.get_transport(engine, domain)
        if transport is not None:
            config.delete_transport(engine, domain)
            transport.close_transport()
    if engine.transport_dispatcher is not None:
        engine.close_dispatcher()


async def engine_for(port: str, user: str | None, keys: tuple[object, ...]) -> Engine:
    """Return the loop's engine; another one where this user already has other keys on another card."""
    loop = asyncio.get_running_loop()
    engines = live_engines.setdefault(loop, [])
    for known in engines:
        if not known.broken and (user is None or known.users.get(user, keys) == keys):
            break
    else:
        known = Engine(await asyncio.to_thread(_build_engine))
        engines.append(known)
    known.ports.add(port)
    if user is not None:
        known.users[user] = keys
    return known


def leave_engine(port: str) -> None:
    engines = live_engines.get(asyncio.get_running_loop(), [])
    for known in [known for known in engines if port in known.ports]:
        known.ports.discard(port)
        if not known.ports:
            engines.remove(known)
            _close_dispatcher(known.engine)


def close_engines() -> None:
    """Close the sockets and timers of the running loop's engines, whoever still uses them. For the end of a test."""
    for known in live_engines.pop(asyncio.get_running_loop(), []):
        _close_dispatcher(known.engine)
