"""The SNMP port against a card that misbehaves: no fault may look like an answer, and none may reach the loop."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from powerguard.options import Secret
from powerguard.sim import snmp_values as sim
from powerguard.ups.profiles.vocabulary import Missing, Oid
from powerguard.ups.snmp.engine import garbled_packets
from powerguard.ups.snmp.port import MAX_BATCH, MAX_ROWS, CardPort, SnmpError, Typed
from tests.peers.hurried import now_s
from tests.peers.machine import watched
from tests.peers.snmp_agent import Fault, SimUser, SnmpAgent
from tests.ups.snmp.snmp_helpers import A, NarrowCard, U, card, options, port_to, secret, table

pytestmark = pytest.mark.hurried

STATUS, RUNTIME, CHARGE = f"{A}.4.1.1.0", f"{A}.2.2.3.0", f"{A}.2.2.1.0"
ASKED = [STATUS, RUNTIME, CHARGE]
ANSWERED = {STATUS: 2, RUNTIME: 174000, CHARGE: 100}
SYS_DESCR, SYS_OBJECT_ID = "1.3.6.1.2.1.1.1.0", "1.3.6.1.2.1.1.2.0"


async def test_every_type_becomes_plain_python() -> None:
    values = {
        f"{A}.1.0": sim.integer(-1),
        f"{A}.2.0": sim.gauge(2**32 - 1),
        f"{A}.3.0": sim.timeticks(174000),
        f"{A}.4.0": sim.octets(b"\x00\xff"),
        f"{A}.5.0": sim.oid("1.3.6.1"),
        f"{A}.6.0": sim.NULL_VALUE,
        f"{A}.7.0": sim.SimValue(sim.COUNTER64, 2**63),
        f"{A}.8.0": sim.SimValue(sim.IP_ADDRESS, b"\x0a\0\0\x05"),
    }
    async with card(values) as agent, port_to(agent) as port:
        answers = await port.get([*values, f"{A}.9.0", f"{A}.1.1"])
    assert list(answers.values()) == [
        *(-1, 2**32 - 1, 174000, b"\x00\xff", Oid("1.3.6.1"), Missing.NULL, 2**63, b"\x0a\0\0\x05"),
        *(Missing.NO_SUCH_OBJECT, Missing.NO_SUCH_INSTANCE),
    ]
    assert isinstance(answers[f"{A}.5.0"], Oid)


@pytest.mark.parametrize("version", [1, "2c"])
@pytest.mark.parametrize("fault", [Fault.SWAPPED, Fault.SHIFTED, Fault.TWICE, Fault.NONE])
async def test_answers_in_any_order_are_distinguished_by_name(fault: Fault, version: int | str) -> None:
    """Each value belongs to the name beside it, not to the place of the question."""
    async with card(table("apc")) as agent, port_to(agent, version=version) as port:
        agent.fault = fault
        for _ in range(3):
            assert await port.get(ASKED) == ANSWERED


@pytest.mark.parametrize("fault", [Fault.FEWER, Fault.EMPTY])
async def test_what_is_left_out_is_missing(fault: Fault) -> None:
    """A card that leaves objects out has not said that they are not there."""
    async with card(table("apc")) as agent, port_to(agent) as port:
        agent.fault = fault
        answers = await port.get(ASKED)
    kept = {} if fault is Fault.EMPTY else {STATUS: 2, RUNTIME: 174000}
    assert answers == dict.fromkeys(ASKED, Missing.NO_ANSWER) | kept


@pytest.mark.parametrize(
    "fault", [Fault.DROP, Fault.LATE, Fault.GARBAGE, Fault.TRUNCATED, Fault.WRONG_ID, Fault.WRONG_COMMUNITY]
)
async def test_no_answer_of_ours_is_no_answer(fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    """Each ends at its timeout with one line for the operator; nothing reaches the loop's exception handler."""
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context))
    async with card(table("apc")) as agent, port_to(agent, retries=1, timeout_s=0.5) as port:
        assert await port.get(ASKED) == ANSWERED
        agent.fault = fault
        began_s = now_s()
        with pytest.raises(SnmpError) as caught:
            await port.get(ASKED)
        took_s = now_s() - began_s
        assert str(caught.value) == (
            f"no answer from 127.0.0.1:{agent.port} in 1.0 s (v2c): check address, community, ACL of the card"
        )
        assert caught.value.unanswered
        assert 1.0 <= took_s <= 1.1
        agent.fault = Fault.NONE
        assert await port.get(ASKED) == ANSWERED
    assert raised == []
    assert caplog.records == []


async def test_garbage_is_counted() -> None:
    async with card(table("apc")) as agent, port_to(agent, retries=1, timeout_s=0.5) as port:
        await port.get(ASKED)
        before = garbled_packets()
        agent.fault = Fault.GARBAGE
        with pytest.raises(SnmpError):
            await port.get(ASKED)
        assert garbled_packets() > before


@pytest.mark.parametrize("fault", [Fault.GEN_ERR, Fault.BAD_INDEX])
async def test_an_error_status_is_never_an_answer(fault: Fault) -> None:
    """The varbinds beside an error status look perfectly good."""
    async with card(table("apc")) as agent, port_to(agent) as port:
        agent.fault = fault
        with pytest.raises(SnmpError, match=r"genErr "):
            await port.get(ASKED)


async def test_too_big_is_asked_in_parts() -> None:
    values = table("apc")
    async with card(values) as agent, port_to(agent) as port:
        agent.fault = Fault.TOO_BIG
        answers = await port.get(list(values))
        assert set(answers) == set(values)
        assert all(not isinstance(answer, Missing) for answer in answers.values())
        assert agent.requests >= 6


async def test_a_card_that_calls_a_request_too_big_gets_smaller_ones() -> None:
    values = table("apc")
    async with card(values) as agent, port_to(agent) as port:
        agent.fault = Fault.TOO_BIG
        await port.get(list(values))
        assert port.at_once == 3
        before = agent.requests
        await port.get(list(values)[:6])
        assert agent.requests - before == 2


@pytest.mark.parametrize("version", [1, "2c"])
@pytest.mark.parametrize(("most", "at_once"), [(1, 1), (4, 2), (14, 2), (15, MAX_BATCH)])
async def test_a_card_that_drops_what_is_too_large_gets_smaller_requests(
    most: int, at_once: int, version: int | str
) -> None:
    """It is found out within the time of one request, and the ports that come after know it."""
    values = table("apc")
    async with (
        NarrowCard(values, most) as agent,
        port_to(agent, version=version, retries=1, timeout_s=0.5) as port,
        watched() as machine,
    ):
        began_s = now_s()
        await port.get(ASKED[:2])
        answers = await port.get(list(values)[:20])
        assert now_s() - began_s <= 1.5 + machine.late_s
        assert not [oid for oid, answer in answers.items() if isinstance(answer, Missing)]
        assert port.at_once == at_once
        assert set(await port.following([f"{A}.4.1.1", f"{A}.2.2.3", f"{A}.2.2.1"])) == set(ASKED)
        async with port_to(agent, version=version) as other:
            assert await other.get(ASKED) == ANSWERED


async def test_a_card_that_is_silent_or_slow_is_not_taken_for_one_that_drops_large_requests() -> None:
    """Silence takes no longer to find than before."""
    async with card(table("apc")) as agent, port_to(agent, retries=1, timeout_s=0.5) as port:
        agent.fault = Fault.DROP
        began_s = now_s()
        with pytest.raises(SnmpError, match=r"in 1\.0 s \(v2c\): check address") as caught:
            await port.get(ASKED)
        assert caught.value.unanswered
        assert 1.0 <= now_s() - began_s <= 1.1
        agent.fault, agent.late_s = Fault.LATE, 0.7
        assert await port.get(ASKED) == ANSWERED
        assert port.at_once == MAX_BATCH


class LosesTwo(SnmpAgent):
    """A card behind a network that loses two requests in a row, and lets the next one through."""

    lost = 0

    def receive(self, message: bytes, sender: tuple[str, int]) -> None:
        if self.lost:
            self.lost -= 1
        else:
            super().receive(message, sender)


async def test_a_size_that_was_answered_once_is_never_too_large_for_a_card() -> None:
    """Each order has a port of its own: two lost packets must not make its requests small for good."""
    async with LosesTwo(lambda: table("apc")) as agent:
        async with port_to(agent) as port:
            assert await port.get(ASKED) == ANSWERED
        agent.lost = 2
        async with port_to(agent, retries=1, timeout_s=0.5) as port:
            with pytest.raises(SnmpError, match="no answer"):
                await port.get(ASKED)
            assert port.at_once == MAX_BATCH


async def test_version_1_gives_up_one_object_not_all() -> None:
    """noSuchName refuses the whole request, for the sake of one object."""
    absent = [f"{A}.9.9.0", f"{U}.4.1.0"]
    async with card(table("apc")) as agent, port_to(agent, version=1) as port:
        answers = await port.get([absent[0], *ASKED, absent[1]])
    assert answers == dict.fromkeys(absent, Missing.NO_SUCH_OBJECT) | ANSWERED


async def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    values = table("apc")
    async with card(values) as agent, port_to(agent, timeout_s=1.5) as port:
        await port.get(ASKED)
        agent.fault, agent.late_s = Fault.LATE, 2.2
        with pytest.raises(SnmpError):
            await port.get(ASKED)
        agent.fault = Fault.NONE
        values[STATUS] = sim.integer(3)
        assert (await port.get(ASKED))[STATUS] == 3
        await asyncio.sleep(1.0)
        assert (await port.get(ASKED))[STATUS] == 3


async def test_half_of_the_packets_lost() -> None:
    """Retries carry it: with one retry three quarters get through."""
    async with card(table("apc"), seed=7) as agent, port_to(agent, retries=3, timeout_s=0.5) as port:
        agent.fault = Fault.LOSS
        good = 0
        for _ in range(4):
            with contextlib.suppress(SnmpError):
                good += await port.get(ASKED) == ANSWERED
    assert good >= 2


async def test_a_walk_ends_whatever_the_card_says() -> None:
    """At the end of the column; at MAX_ROWS; and when the card goes round in a circle."""
    values = {f"{U}.4.4.1.5.{line}": sim.integer(line) for line in range(1, 400)} | {f"{U}.5.1.0": sim.integer(1)}
    async with card(values) as agent, port_to(agent) as port:
        assert len(await port.walk(f"{U}.4.4.1.5")) == MAX_ROWS
        assert await port.walk(f"{U}.5") == {f"{U}.5.1.0": 1}
        assert await port.walk(f"{U}.9") == {}
        agent.fault = Fault.GEN_ERR
        with pytest.raises(SnmpError, match="genErr"):
            await port.walk(f"{U}.5")
    circle = {f"{U}.4.4.1.5.{line}": sim.integer(line) for line in (1, 2)}
    async with card(circle) as agent, port_to(agent, version=1) as port:
        assert await port.walk(f"{U}.4.4.1.5") == {f"{U}.4.4.1.5.1": 1, f"{U}.4.4.1.5.2": 2}


async def test_a_set_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    values = table("apc")
    delay = f"{A}.5.2.10.0"
    values[delay] = sim.timeticks(2000)

    def on_set(oid: str, value: sim.SimValue) -> bool:
        if oid == delay:
            values[oid] = value
        return oid == delay

    community = secret(tmp_path, "private", "private")
    async with card(values, on_set=on_set) as agent:
        async with port_to(agent, community=community) as port:
            await port.set({delay: Typed("timeticks", 6000)})
            assert await port.get([delay]) == {delay: 6000}
            with pytest.raises(SnmpError, match=rf"notWritable for {STATUS}$"):
                await port.set({STATUS: Typed("integer", 3)})
        async with port_to(agent) as port:
            with pytest.raises(SnmpError, match="notWritable"):
                await port.set({delay: Typed("timeticks", 1)})


AUTH, PRIV = "authpass-of-the-tests", "privpass-of-the-tests"


async def test_version_3_and_what_a_wrong_secret_says(tmp_path: Path) -> None:
    """Each wrong setting is one line that names it, and none of them shows a secret."""
    user = SimUser(name="pg", auth=AUTH.encode(), priv=PRIV.encode())
    auth, priv = secret(tmp_path, "auth", AUTH), secret(tmp_path, "priv", PRIV)
    wrong, short = secret(tmp_path, "wrong", "wrongpass-of-the-tests"), secret(tmp_path, "short", "seven77")
    async with card(table("apc"), user=user) as agent:
        async with port_to(agent, version=3, user="pg", auth=auth, priv=priv) as port:
            assert await port.get(ASKED) == ANSWERED
        for settings, hint in (
            ({"user": "pg", "auth": wrong, "priv": priv}, "the auth passphrase or auth_protocol"),
            ({"user": "pg", "auth": auth, "priv": wrong}, "the priv passphrase or priv_protocol"),
            ({"user": "pg", "auth": auth}, "another security level"),
            ({"user": "nobody", "auth": auth, "priv": priv}, "the card knows no user 'nobody'"),
            ({"user": "pg", "auth": short, "priv": priv}, "shorter than 8 characters"),
            ({"user": "pg", "auth": Secret(file=str(tmp_path / "none"))}, "No such file"),
        ):
            port = CardPort(options(agent.port, version=3, **settings))
            with pytest.raises(SnmpError) as caught:
                await port.get(ASKED)
            await port.close()
            assert hint in str(caught.value)
            assert "of-the-tests" not in str(caught.value)


async def test_a_user_whose_name_is_not_ascii(tmp_path: Path) -> None:
    """RFC 3414 has names in UTF-8."""
    user = SimUser(name="größe", auth=AUTH.encode())
    async with (
        card(table("apc"), user=user) as agent,
        port_to(agent, version=3, user="größe", auth=secret(tmp_path, "auth", AUTH)) as port,
    ):
        assert await port.get(ASKED) == ANSWERED


async def test_two_cards_one_user_name_other_keys(tmp_path: Path) -> None:
    """Keys belong to a user of a card: one name is not one set of them."""
    users = [SimUser(name="pg", auth=f"authpass-number-{n}".encode()) for n in (1, 2)]
    secrets = [secret(tmp_path, f"auth{n}", f"authpass-number-{n}") for n in (1, 2)]
    async with card(table("apc"), user=users[0]) as one, card(table("rfc1628"), user=users[1]) as two:
        ports = [
            CardPort(options(agent.port, version=3, user="pg", auth=auth))
            for agent, auth in zip((one, two), secrets, strict=True)
        ]
        for _ in range(2):
            assert (await ports[0].get([STATUS]))[STATUS] == 2
            assert (await ports[1].get([f"{U}.4.1.0"]))[f"{U}.4.1.0"] == 3
        for port in ports:
            await port.close()


async def test_cards_that_share_a_community() -> None:
    """Two cards with "public", one of version 1, and a second port to the first: each hears its own answers."""
    async with card({f"{U}.1.2.0": sim.octets("A")}) as one, card({f"{U}.1.2.0": sim.octets("B")}) as other:
        ports = [CardPort(options(agent.port, version=version)) for agent in (one, other) for version in ("2c", 1)]
        try:
            for _ in range(2):
                found = [(await port.get([f"{U}.1.2.0"]))[f"{U}.1.2.0"] for port in ports]
                assert found == [b"A", b"A", b"B", b"B"]
            await ports.pop(0).close()
            assert [(await port.get([f"{U}.1.2.0"]))[f"{U}.1.2.0"] for port in ports] == [b"A", b"B", b"B"]
        finally:
            for port in ports:
                await port.close()


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("no-such-host.invalid", r"^cannot look up no-such-host\.invalid: "),
        ("no..host", r"^cannot look up no\.\.host: not a valid name: "),
        ("fe80::5%lo", r"^fe80::5%lo:161: fe80::5%lo is good on one link only: "),
    ],
)
async def test_a_name_that_nobody_knows(host: str, says: str) -> None:
    port = CardPort(options(161, host=host))
    with pytest.raises(SnmpError, match=says):
        await port.get(ASKED)
    await port.close()


async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async with card(table("apc")) as agent, port_to(agent) as port:
        await port.get(ASKED)
        agent.fault = Fault.DROP
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await port.get(ASKED)
        agent.fault = Fault.NONE
        assert await port.get(ASKED) == ANSWERED


@asynccontextmanager
async def guarded_card(folder: Path, turn: int) -> AsyncIterator[tuple[SnmpAgent, dict[str, Any]]]:
    """A card of version 3 with passphrases that nobody has hashed yet, and the options that reach it."""
    words = {"auth": f"{AUTH}-{turn}", "priv": f"{PRIV}-{turn}"}
    more = {name: secret(folder, f"{name}-{turn}", word) for name, word in words.items()}
    user = SimUser(name="pg", **{name: word.encode() for name, word in words.items()})
    async with card(table("apc"), user=user) as agent:
        yield agent, {"version": 3, "user": "pg", **more}


@pytest.mark.real_time
async def test_the_first_request_does_not_stop_the_loop(tmp_path: Path) -> None:
    """Ciphers are loaded, and megabytes hashed into keys, in a thread: the loop has other cards to ask."""
    for turn in range(8):  # where others have taken the cores, the loop stands still as well
        async with guarded_card(tmp_path, turn) as (agent, more), port_to(agent, **more) as port, watched() as machine:
            began = time.monotonic()
            assert await port.get(ASKED) == ANSWERED
            took_s = time.monotonic() - began
        if machine.worst_s < max(0.15, took_s / 2):
            return
    pytest.fail(f"the loop stood still for {machine.worst_s:.3f} of {took_s:.3f} s")


@pytest.mark.parametrize("patience_s", [5.0, 0.1])
async def test_after_silence_the_socket_is_another(patience_s: float) -> None:
    """This host's own address may have changed meanwhile: the old socket would send from one that is gone, for ever.

    Also where whoever asked gave up before the question's own time was over, as on battery.
    """
    async with card(table("apc")) as agent, port_to(agent, timeout_s=0.5) as port:
        assert await port.get(ASKED) == ANSWERED
        first = port._socket
        assert await port.get(ASKED) == ANSWERED
        assert port._socket is first
        agent.fault = Fault.DROP
        with pytest.raises((SnmpError, TimeoutError)):
            async with asyncio.timeout(patience_s):
                await port.get(ASKED)
        agent.fault = Fault.NONE
        assert await port.get(ASKED) == ANSWERED
        assert port._socket is not first


async def test_an_answer_from_elsewhere_is_none() -> None:
    """With the right number and the right community, but from another address: the kernel drops it."""
    async with card(table("apc")) as agent, port_to(agent, timeout_s=0.5) as port:
        assert await port.get(ASKED) == ANSWERED
        assert port._socket is not None
        assert port._socket._transport is not None
        asked: list[bytes] = []
        agent.receive = lambda message, sender: asked.append(message)  # type: ignore[method-assign]
        question = asyncio.get_running_loop().create_task(port.get([STATUS]))
        while not asked:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        forged = asked[0].replace(b"public\xa0", b"public\xa2")
        assert forged != asked[0]
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as stranger:
            stranger.sendto(forged, port._socket._transport.get_extra_info("sockname"))
        with pytest.raises(SnmpError, match="no answer"):
            await question


async def test_a_rebooted_card_keeps_its_version_3_user(tmp_path: Path) -> None:
    """Its engine boots rise and its engine time begins at 0: RFC 3414's window has to be found anew, by itself."""
    now_s = 5000.0
    user = SimUser(name="pg", auth=AUTH.encode(), priv=PRIV.encode(), clock=lambda: now_s)
    auth, priv = secret(tmp_path, "auth", AUTH), secret(tmp_path, "priv", PRIV)
    async with (
        card(table("apc"), user=user) as agent,
        port_to(agent, version=3, user="pg", auth=auth, priv=priv) as port,
    ):
        now_s += 1000
        assert await port.get(ASKED) == ANSWERED
        user.reboot()
        assert await port.get(ASKED) == ANSWERED
        now_s += 400  # The card's clock runs away from ours by more than the window of 150 s.
        assert await port.get(ASKED) == ANSWERED


async def test_a_name_leads_to_the_card() -> None:
    """localhost has both kinds of address, the card only one."""
    async with card(table("apc")) as agent, port_to(agent, host="localhost") as port:
        assert await port.get(ASKED) == ANSWERED


async def test_an_ipv6_card() -> None:
    values = table("apc")
    try:
        agent = await SnmpAgent(lambda: values, host="::1").__aenter__()
    except OSError as error:
        pytest.skip(f"no IPv6 on the loopback: {error}")
    async with port_to(agent, host="::1") as port:
        assert await port.get(ASKED) == ANSWERED
    await agent.__aexit__()
