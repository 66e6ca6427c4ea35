"""One connected socket for each card: a question, its repetitions, and the answer that is its own.

An answer that comes later, to a question that was given up, is counted as such (`snmp_late`) and is of no other use.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeVar

from powerguard.protocols.snmp_ber import MessageError
from powerguard.protocols.snmp_request import Response
from powerguard.sources.snmp_late import LateAnswers

_LISTEN_S: Final = 10.0
"""So long a socket that asks nothing any more waits for late answers: the longest timeout_s, twice."""

T = TypeVar("T")


class RefusedError(Exception):
    """The card said why it does not answer, and nothing else. counter: of RFC 3414 5, as the content of its OID."""

    def __init__(self, counter: bytes) -> None:
        """Keep what was said."""
        super().__init__(counter)
        self.counter = counter


class CardSocket(asyncio.DatagramProtocol, ABC):
    """A socket to one card, so that the kernel drops what others send.

    garbled: packets of all sockets that were no answer to any question, or none that can be read or proved.
    """

    garbled = 0

    def __init__(self) -> None:
        """Be opened by `open`."""
        self.late = LateAnswers()
        """What came too late; of a card, not of a socket: whoever opens another one hands it on."""
        self._leaves: asyncio.TimerHandle | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self._closed = asyncio.Event()

    async def open(self, address: tuple[str, int]) -> Self:
        """Open it to this card. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, remote_addr=address)
        return self

    @abstractmethod
    async def ask(
        self, tag: int, oids: Sequence[str], values: Sequence[bytes] | None, *, timeout_s: float, tries: int
    ) -> Response:
        """Ask, and again after each timeout_s. values: to be SET; None: it is a question.

        Raises TimeoutError; RefusedError where the card said why.
        """

    @abstractmethod
    def take(self, data: bytes) -> None:
        """Hand an answer to whoever waits for it. Raises MessageError on whatever else comes."""

    def datagram_received(self, data: bytes, addr: object) -> None:  # noqa: ARG002 - the kernel lets only the card's through
        """Take a packet, or count it."""
        try:
            self.take(data)
        except MessageError:
            CardSocket.garbled += 1

    def error_received(self, exc: Exception) -> None:
        """ICMP refused: anybody can say so, and the card may be starting: the question runs into its own time."""

    async def answered(
        self, answer: "asyncio.Future[T]", packet: Callable[[], bytes], *, timeout_s: float, tries: int
    ) -> T:
        """Send, and again after each timeout_s, until there is an answer. Raises TimeoutError, and what packet does."""
        try:
            for _ in range(tries):
                if self._transport is not None:
                    self._transport.sendto(packet())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        return await asyncio.shield(answer)
            raise TimeoutError
        finally:
            answer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Be closed."""
        self._closed.set()

    def leave(self) -> None:
        """Ask nothing any more, listen for late answers, and let go of the socket some time later."""
        if self._transport is not None and self._leaves is None:
            self._leaves = asyncio.get_running_loop().call_later(_LISTEN_S, self._transport.abort)

    async def close(self) -> None:
        """Let go of the socket; it is gone when this returns. Whoever still waits runs into his own time."""
        if self._leaves is not None:
            self._leaves.cancel()
        if self._transport is not None:
            self._transport.abort()
            await self._closed.wait()
