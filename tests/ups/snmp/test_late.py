"""A card that is slower than the settings wait: told as such, and never read late."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.sim import snmp_values as sim
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.snmp.engine import garbled_packets
from powerguard.ups.snmp.port import CardPort, LateAnswers, SnmpError
from powerguard.ups.snmp.source import SnmpSource, probe
from tests.peers.hurried import now_s
from tests.peers.snmp_agent import Fault, SimUser, SnmpAgent
from tests.ups.snmp.snmp_helpers import A, options, port_to, secret, table
from tests.wire import ber, v3

pytestmark = pytest.mark.hurried

PROFILES = load_profiles(None)
STATUS = f"{A}.4.1.1.0"
AUTH, PRIV = "authpass-of-the-tests", "privpass-of-the-tests"
VERSIONS = [1, "2c", 3]


def credentials(version: int | str, folder: Path) -> dict[str, Any]:
    if version != 3:
        return {"version": version}
    return {"version": 3, "user": "pg", "auth": secret(folder, "auth", AUTH), "priv": secret(folder, "priv", PRIV)}


class Card(SnmpAgent):
    """A card that keeps its answers back, until they are sent by hand. lets: so many it does not keep."""

    def __init__(self) -> None:
        self.values = table("apc")
        super().__init__(lambda: self.values, user=SimUser(name="pg", auth=AUTH.encode(), priv=PRIV.encode()))
        self.lets: float = math.inf
        self.sent: list[tuple[bytes, tuple[str, int]]] = []
        self.kept: list[tuple[bytes, tuple[str, int]]] = []

    def _send(self, answer: bytes, sender: tuple[str, int]) -> None:
        self.lets -= 1
        if self.lets < 0:
            self.kept.append((answer, sender))
        else:
            self.sent.append((answer, sender))
            super()._send(answer, sender)

    def send(self, number: int = 0) -> None:
        """Send one at last."""
        super()._send(*self.kept[number])


@asynccontextmanager
async def slow_card(version: int | str, folder: Path, *, retries: int = 0) -> AsyncIterator[tuple[Card, CardPort]]:
    """A card that was good, and has just left a question unanswered."""
    more = credentials(version, folder)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(5):  # half a second may be too little for a busy machine, and then that would be the silence
            card = await stack.enter_async_context(Card())
            port = await stack.enter_async_context(port_to(card, retries=retries, timeout_s=0.5, **more))
            with contextlib.suppress(SnmpError):
                good = await port.get([STATUS])
                break
        assert good == {STATUS: 2}
        card.lets = 0
        with pytest.raises(SnmpError, match="check address") as caught:
            await port.get([STATUS])
        assert caught.value.unanswered
        assert len(card.kept) == retries + 1
        yield card, port


async def counted(port: CardPort, count: int) -> None:
    """Wait until so many late answers have come."""
    async with asyncio.timeout(20):
        while port.late_answers < count:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    assert port.late_answers == count


async def garbled(count: int) -> None:
    """Wait until so many packets of this process were of no use."""
    async with asyncio.timeout(20):
        while garbled_packets() < count:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


async def fails(port: CardPort) -> str:
    with pytest.raises(SnmpError) as caught:
        await port.get([STATUS])
    assert caught.value.unanswered
    return str(caught.value)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("after", ["at once", "in the next question"])
async def test_a_late_answer_is_counted_and_reported(version: int | str, after: str, tmp_path: Path) -> None:
    """Also when the next question is on its way, by another socket. The words name the wait that would do."""
    async with slow_card(version, tmp_path) as (card, port):
        before = garbled_packets()
        if after == "in the next question":
            asking = asyncio.get_running_loop().create_task(fails(port))
            while len(card.kept) < 2:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
            card.send()
            await asking
        else:
            card.send()
        await counted(port, 1)
        result = await fails(port)
        head, _, tail = result.partition(f"(v{version}), but answers come after ")
        assert head == f"no answer from 127.0.0.1:{card.port} in 0.5 s "
        took, _, advice = tail.partition(" s: ")
        assert float(took) > 0.5
        assert advice == "raise timeout_s above it"
        assert garbled_packets() == before


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_late_answer_is_no_reading(version: int | str, tmp_path: Path) -> None:
    """What it says is of long ago: the question that is asked next has an answer of its own, or none."""
    async with slow_card(version, tmp_path) as (card, port):
        card.send()
        await counted(port, 1)
        assert "answers come after" in await fails(port)
        card.lets = math.inf
        card.values[STATUS] = sim.integer(3)
        assert await port.get([STATUS]) == {STATUS: 3}
        assert await port.get([STATUS]) == {STATUS: 3}


@pytest.mark.parametrize("version", VERSIONS)
async def test_one_question_is_counted_once(version: int | str, tmp_path: Path) -> None:
    """Its repetition is answered as well, and so may be the answer itself."""
    async with slow_card(version, tmp_path, retries=1) as (card, port):
        before = garbled_packets()
        for number in (0, 0, 1):
            card.send(number)
        await garbled(before + 2)
        assert port.late_answers == 1


@pytest.mark.parametrize("version", VERSIONS)
async def test_what_was_answered_in_time_is_not_late(version: int | str, tmp_path: Path) -> None:
    """A network that doubles packets: the second one answers no question of ours."""
    async with Card() as card, port_to(card, **credentials(version, tmp_path)) as port:
        before = garbled_packets()
        card.fault = Fault.TWICE
        assert await port.get([STATUS]) == {STATUS: 2}
        await garbled(before + (6 if version == 3 else 2))
        assert port.late_answers == 0


async def test_a_refusal_in_time_is_not_late(tmp_path: Path) -> None:
    """The card has said that it does not know the user; that this comes again is no answer."""
    async with Card() as card, port_to(card, **credentials(3, tmp_path) | {"user": "nobody"}) as port:
        with pytest.raises(SnmpError, match="knows no user"):
            await port.get([STATUS])
        before = garbled_packets()
        SnmpAgent._send(card, *card.sent[-1])
        await garbled(before + 1)
        assert port.late_answers == 0


@pytest.mark.parametrize("version", VERSIONS)
async def test_who_guesses_learns_nothing(version: int | str, tmp_path: Path) -> None:
    """From the card's address, but with another number, another community, or without the keys: no late answer."""
    async with slow_card(version, tmp_path) as (card, port):
        before = garbled_packets()
        answer, sender = card.kept[0]
        at = answer.index(b"\xa2") + 4 if version != 3 else answer.index(b"\x02", 6) + 3
        forged = [
            answer[:at] + bytes((answer[at] ^ 1,)) + answer[at + 1 :],
            answer.replace(b"public", b"secret") if version != 3 else answer[:-1] + bytes((answer[-1] ^ 1,)),
            answer[:-3],
        ]
        if version == 3:
            number = v3.parse(answer).message_id
            forged.append(SimUser(name="pg", auth=AUTH.encode())._seal(number, 0, b"", ber.element(ber.RESPONSE, b"")))
        assert len({answer, *forged}) == len(forged) + 1
        for one in forged:
            SnmpAgent._send(card, one, sender)
        await garbled(before + len(forged))
        assert port.late_answers == 0
        assert "check address" in await fails(port)
        card.send()
        await counted(port, 1)


async def test_a_late_report_shows_that_the_card_is_there(tmp_path: Path) -> None:
    """Version 3 begins with two questions that only Reports answer, the first of them without a proof."""
    async with Card() as card, port_to(card, timeout_s=0.5, **credentials(3, tmp_path)) as port:
        for question in (0, 1):
            card.lets = question
            await fails(port)
            card.send(-1)
            await counted(port, question + 1)
        assert len(card.kept) == 2
        assert "answers come after" in await fails(port)


@pytest.mark.parametrize("version", VERSIONS)
async def test_nothing_is_left_of_old_sockets(version: int | str, tmp_path: Path) -> None:
    """However often a card is silent: the one before the last is closed, and at the end both are."""
    async with slow_card(version, tmp_path) as (_, port):
        seen = [port._socket]
        for _ in range(3):
            await fails(port)
            seen.append(port._socket)
        assert len(set(seen)) == 4
        closed = [each is not None and each.closed.is_set() for each in seen]
        assert closed == [True, True, False, False]
    assert all(each is not None and each.closed.is_set() for each in seen)


def test_words_of_what_came() -> None:
    """The slowest of late; rounded up, for it is a bound; nothing that is old, or would have been in time."""
    late = LateAnswers()
    assert late.words(0.0, 1.0) == ""
    late.heard(now_s=100.0, asked_s=99.1)
    assert late.words(100.0, 1.0) == "", "whoever asked had less patience than the settings say"
    for at_s, took_s in ((110.0, 3.14), (120.0, 2.2)):
        late.heard(now_s=at_s, asked_s=at_s - took_s)
    assert late.words(125.0, 1.0) == "answers come after 3.2 s: raise timeout_s above it"
    assert late.words(145.0, 1.0) == "answers come after 2.3 s: raise timeout_s above it"
    assert late.words(151.0, 1.0) == ""
    late.heard(now_s=200.0, asked_s=195.05)
    assert late.words(200.0, 1.0) == "answers come after 5.0 s: look for what slows the card, or the network to it"
    assert late.count == 4


# --- The source and the probe ---------------------------------------------------------------------------------------


@asynccontextmanager
async def listening(agent: SnmpAgent, **more: object) -> AsyncIterator[asyncio.Queue[Reading | SourceFailed]]:
    heard: asyncio.Queue[Reading | SourceFailed] = asyncio.Queue()
    source = SnmpSource(options(agent.port, **more), ups="rack-a", clock=now_s, profiles=PROFILES)
    task = asyncio.get_running_loop().create_task(source.run(heard.put_nowait))
    try:
        async with asyncio.timeout(60):
            yield heard
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_source_reports_it(version: int | str, tmp_path: Path) -> None:
    """Of a card that has been too slow from the beginning, and for as long as it is."""
    async with Card() as card:
        card.fault, card.late_s = Fault.LATE, 2.0
        async with listening(card, **credentials(version, tmp_path)) as heard:
            failed = await heard.get()
            assert isinstance(failed, SourceFailed)
            while not failed.lost or "answers come after" not in failed.reason:
                failed = await heard.get()
                assert isinstance(failed, SourceFailed), "what came late is no reading"
            assert failed.reason.endswith("raise timeout_s above it")
            card.fault = Fault.NONE
            while not isinstance(await heard.get(), Reading):
                pass


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_probe_waits_to_report_it(version: int | str, tmp_path: Path) -> None:
    """doctor asks once: it would say "check the community" of a card that knows it."""
    async with Card() as card:
        card.fault, card.late_s = Fault.LATE, 2.5
        with pytest.raises(SnmpError, match=r"answers come after \d\.\d s: ") as caught:
            await probe(options(card.port, **credentials(version, tmp_path)), profiles=PROFILES)
        assert caught.value.unanswered


UTILITY, BATTERY = sim.integer(2), sim.integer(3)
STORIES = {
    "before the outage": ((UTILITY, Fault.NONE), (UTILITY, Fault.LATE), (BATTERY, Fault.LATE)),
    "with the outage": ((UTILITY, Fault.NONE), (BATTERY, Fault.LATE)),
    "in the outage": ((UTILITY, Fault.NONE), (BATTERY, Fault.NONE), (BATTERY, Fault.LATE)),
}


@pytest.mark.parametrize(
    "begins",
    ["with the outage", *(pytest.param(each, marks=pytest.mark.slow) for each in STORIES if each != "with the outage")],
)
async def test_a_slow_card_is_heard_again_on_battery(begins: str) -> None:
    """It needs more than the 0.8 s that an answer has on battery, and less than timeout_s: it is given that.

    Else one outage of seconds makes it deaf for ever, and the host goes down with utility there.
    """
    async with Card() as card, listening(card, timeout_s=5.0, poll_s=0.5) as heard:
        card.late_s = 1.0
        for card.values[STATUS], card.fault in STORIES[begins]:
            in_turn = 0
            while in_turn < 2:
                event = await heard.get()
                on_battery = isinstance(event, Reading) and event.output_source is OutputSource.BATTERY
                is_so = isinstance(event, Reading) and on_battery is (card.values[STATUS] is BATTERY)
                in_turn = in_turn + 1 if is_so else 0
        card.values[STATUS] = UTILITY
        while not isinstance(event := await heard.get(), Reading) or event.output_source is OutputSource.BATTERY:
            pass
