"""Versions 1 and 2c of SNMP: a question's number and the community are all by which an answer is known.

Written for the poll that comes every second for years: pysnmp takes twenty times the processor time for it
(docs/decisions/0162-versions-1-and-2c-by-our-own-hand.md).
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Final

from powerguard.protocols import snmp_request as codec
from powerguard.protocols.snmp_ber import MessageError
from powerguard.protocols.snmp_request import Response
from powerguard.sources.snmp_socket import CardSocket

_LAST_ID: Final = 2**31 - 1
_FIRST_ID: Final = random.SystemRandom()


class CommunitySocket(CardSocket):
    """A socket to one card. Whoever forges an answer must know address, port, community and the question's number."""

    def __init__(self, version: int, community: bytes) -> None:
        """Be opened. version: 0 for 1, 1 for 2c."""
        super().__init__()
        self._version, self._community = version, community
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._given_up: dict[int, float] = {}
        """Questions without an answer, and when each was first sent."""
        self._ids = itertools.count(_FIRST_ID.randrange(_LAST_ID))
        self._names: dict[str, bytes] = {}

    def take(self, data: bytes) -> None:
        """Hand an answer to whoever waits for it. Raises MessageError on whatever else comes."""
        message = codec.parse(data)
        number = message.response.request_id
        asked = self._waiting.get(number)
        is_ours = (message.version, message.community) == (self._version, self._community)
        if is_ours and number in self._given_up:
            self.late.heard(now_s=asyncio.get_running_loop().time(), asked_s=self._given_up.pop(number))
        elif is_ours and asked is not None and not asked.done():
            asked.set_result(message.response)
        else:
            msg = "an answer to no question of ours"
            raise MessageError(msg)

    async def ask(
        self, tag: int, oids: Sequence[str], values: Sequence[bytes] | None, *, timeout_s: float, tries: int
    ) -> Response:
        """Ask, and again after each timeout_s. values: to be SET; None: it is a question. Raises TimeoutError."""
        number = next(self._ids) % _LAST_ID
        content = codec.content(number, codec.rows(oids, values, self._names))
        packet = codec.request(self._version, self._community, tag, content)
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[Response] = loop.create_future()
        asked_s = loop.time()
        self._waiting[number] = asked
        try:
            return await self.answered(asked, lambda: packet, timeout_s=timeout_s, tries=tries)
        finally:
            del self._waiting[number]
            if asked.cancelled():
                self._given_up[number] = asked_s
