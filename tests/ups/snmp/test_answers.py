"""Answers of a card with bytes changed, in every version: an answer or none, and never an error."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from powerguard.ups.snmp.engine import (
    GET,
    Access,
    CardSocket,
    Response,
    User,
    engine_for,
    garbled_packets,
    plain,
    read_message,
)
from powerguard.ups.snmp.options import SnmpOptions
from tests.ups import damage

pytestmark = pytest.mark.hurried

VERSIONS = [1, "2c", 3]
ASKED = "1.3.6.1.2.1.1.3.0"


class Asker:
    """A card's socket, and the card's own end of it: a question that is on its way, and the answer that would do."""

    def __init__(self, card: CardSocket, peer: socket.socket) -> None:
        self._card, self._peer = card, peer
        self._asking: asyncio.Task[Response] | None = None
        self._answer = b""

    async def question(self) -> bytes:
        """Return a good answer to the question in flight; ask one, if there is none."""
        if self._asking is not None and self._asking.done():
            with contextlib.suppress(Exception):
                assert isinstance(self._asking.result(), Response)
            self._asking = None
        if self._asking is None:
            loop = asyncio.get_running_loop()
            self._asking = loop.create_task(self._card.ask(GET, [ASKED], None, timeout_s=600.0, tries=1))
            asked = await loop.sock_recv(self._peer, 4096)
            # The tag of a response, and a value of two bytes instead of NULL.
            self._answer = asked.replace(b"public\xa0", b"public\xa2").replace(b"\x04\x00\xa0", b"\x04\x00\xa8")
        return self._answer

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])


@asynccontextmanager
async def asker(version: object) -> AsyncIterator[tuple[Asker, CardSocket]]:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as peer:
        peer.bind(("127.0.0.1", 0))
        peer.setblocking(False)
        user = User.read("pg", SnmpOptions(kind="snmp", host="h", version=3, user="pg")) if version == 3 else None
        access = Access("h", version, community=b"public", user=user)  # type: ignore[arg-type]
        card = CardSocket(await engine_for(user), access, lambda *_: None)
        await card.open(peer.getsockname())
        made = Asker(card, peer)
        try:
            yield made, card
        finally:
            await made.close()
            await card.close()


async def fuzz(version: object, times: int) -> None:
    dice = random.Random(20261121)
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context))
    slowest_s, before = 0.0, garbled_packets()
    async with asker(version) as (made, card):
        for turn in range(times):
            data = bytearray(await made.question())
            for _ in range(dice.randrange(1, 8)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            if turn % 7 == 0:
                data = data[: dice.randrange(len(data) + 1)]
            began_s = time.thread_time()
            card.datagram_received(bytes(data) if turn % 11 else dice.randbytes(dice.randrange(200)), None)
            slowest_s = max(slowest_s, time.thread_time() - began_s)
            await asyncio.sleep(0)
    assert raised == []
    assert slowest_s < damage.SLOWEST_S
    assert garbled_packets() - before > times // 2


@pytest.mark.parametrize("version", VERSIONS)
async def test_answers_with_bytes_changed(version: object) -> None:
    await fuzz(version, 500)


def answer(version: int, value: bytes) -> bytes:
    """Return an answer with one object; every length fits into a byte."""

    def part(tag: int, *content: bytes) -> bytes:
        whole = b"".join(content)
        return bytes((tag, len(whole))) + whole

    row = part(0x30, bytes.fromhex("06082b06010201010300"), value)
    pdu = part(0xA2, b"\x02\x01\x05", b"\x02\x01\x00", b"\x02\x01\x00", part(0x30, row))
    return part(0x30, bytes((2, 1, version)), b"\x04\x06public", pdu)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("4304b39961ed", 0xB39961ED),
        ("430500b39961ed", 0xB39961ED),
        ("4204ffffffff", 2**32 - 1),
        ("420280e8", 33000),
        ("0204ffffffff", -1),
        ("02047fffffff", 2**31 - 1),
    ],
)
def test_a_number_without_the_byte_that_makes_it_positive(version: int, value: str, number: int) -> None:
    """Cards send these from 2^31 on: a sysUpTime of 249 days. One of them must not cost the whole answer."""
    _, message = read_message(answer(version, bytes.fromhex(value)))
    assert plain(message[2].getComponent()[3][0][1]) == number


def test_minus_one_as_a_number_without_a_sign() -> None:
    _, message = read_message(answer(1, bytes.fromhex("020500ffffffff")))
    assert plain(message[2].getComponent()[3][0][1]) == -1


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
async def test_a_great_many_answers_with_bytes_changed(version: object) -> None:
    await fuzz(version, 100_000)
