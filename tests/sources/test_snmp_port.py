"""The SNMP port against a card that misbehaves: no fault may look like an answer, and none may reach the loop."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from powerguard.options import Secret
from powerguard.profiles.values import Missing, Oid
from powerguard.sim import snmp_ber as ber
from powerguard.sim.snmp_agent import Fault, SnmpAgent
from powerguard.sim.snmp_usm import SimUser
from powerguard.sources.snmp_engine import close_engines, garbled_packets, live_engines
from powerguard.sources.snmp_port import MAX_ROWS, PysnmpPort, SnmpError, Typed
from tests.sources.snmp_helpers import A, U, card, options, port_to, secret, table

STATUS, RUNTIME, CHARGE = f"{A}.4.1.1.0", f"{A}.2.2.3.0", f"{A}.2.2.1.0"
ASKED = [STATUS, RUNTIME, CHARGE]
ANSWERED = {STATUS: 2, RUNTIME: 174000, CHARGE: 100}
SYS_DESCR, SYS_OBJECT_ID = "1.3.6.1.2.1.1.1.0", "1.3.6.1.2.1.1.2.0"


async def test_every_type_becomes_plain_python() -> None:
    values = {
        f"{A}.1.0": ber.integer(-1),
        f"{A}.2.0": ber.gauge(2**32 - 1),
        f"{A}.3.0": ber.timeticks(174000),
        f"{A}.4.0": ber.octets(b"\x00\xff"),
        f"{A}.5.0": ber.oid("1.3.6.1"),
        f"{A}.6.0": ber.NULL_VALUE,
        f"{A}.7.0": ber.SimValue(ber.COUNTER64, 2**63),
        f"{A}.8.0": ber.SimValue(ber.IP_ADDRESS, b"\x0a\0\0\x05"),
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
async def test_answers_in_any_order_are_told_apart_by_name(fault: Fault, version: int | str) -> None:
    """pysnmp hands swapped varbinds on as they come."""
    async with card(table("apc")) as agent, port_to(agent, version=version) as port:
        agent.fault = fault
        for _ in range(3):
            assert await port.get(ASKED) == ANSWERED


@pytest.mark.parametrize("fault", [Fault.FEWER, Fault.EMPTY])
async def test_what_is_left_out_is_missing(fault: Fault) -> None:
    """pysnmp accepts short answers silently."""
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
    async with card(table("apc")) as agent, port_to(agent, retries=1) as port:
        assert await port.get(ASKED) == ANSWERED
        agent.fault = fault
        began = time.monotonic()
        with pytest.raises(SnmpError) as caught:
            await port.get(ASKED)
        took = time.monotonic() - began
        assert str(caught.value) == (
            f"no answer from 127.0.0.1:{agent.port} in 1.0 s (v2c): check address, community, ACL of the card"
        )
        assert caught.value.unanswered
        assert 0.8 <= took <= 3.0
        agent.fault = Fault.NONE
        assert await port.get(ASKED) == ANSWERED
    assert raised == []
    assert caplog.records == []


async def test_garbage_is_counted() -> None:
    async with card(table("apc")) as agent, port_to(agent) as port:
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


async def test_version_1_gives_up_one_object_not_all() -> None:
    """noSuchName refuses the whole request, and pysnmp then shows every object as missing."""
    absent = [f"{A}.9.9.0", f"{U}.4.1.0"]
    async with card(table("apc")) as agent, port_to(agent, version=1) as port:
        answers = await port.get([absent[0], *ASKED, absent[1]])
    assert answers == dict.fromkeys(absent, Missing.NO_SUCH_OBJECT) | ANSWERED


async def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    values = table("apc")
    async with card(values) as agent, port_to(agent) as port:
        await port.get(ASKED)
        agent.fault, agent.late_s = Fault.LATE, 0.9
        with pytest.raises(SnmpError):
            await port.get(ASKED)
        agent.fault = Fault.NONE
        values[STATUS] = ber.integer(3)
        assert (await port.get(ASKED))[STATUS] == 3
        await asyncio.sleep(0.5)
        assert (await port.get(ASKED))[STATUS] == 3


async def test_half_of_the_packets_lost() -> None:
    """Retries carry it: with one retry three quarters get through."""
    async with card(table("apc"), seed=7) as agent, port_to(agent, retries=3) as port:
        agent.fault = Fault.LOSS
        good = 0
        for _ in range(4):
            with contextlib.suppress(SnmpError):
                good += await port.get(ASKED) == ANSWERED
    assert good >= 2


async def test_a_walk_ends_whatever_the_card_says() -> None:
    """At the end of the column; at MAX_ROWS; and when the card goes round in a circle."""
    values = {f"{U}.4.4.1.5.{line}": ber.integer(line) for line in range(1, 400)} | {f"{U}.5.1.0": ber.integer(1)}
    async with card(values) as agent, port_to(agent) as port:
        assert len(await port.walk(f"{U}.4.4.1.5")) == MAX_ROWS
        assert await port.walk(f"{U}.5") == {f"{U}.5.1.0": 1}
        assert await port.walk(f"{U}.9") == {}
        agent.fault = Fault.GEN_ERR
        with pytest.raises(SnmpError, match="genErr"):
            await port.walk(f"{U}.5")
    circle = {f"{U}.4.4.1.5.{line}": ber.integer(line) for line in (1, 2)}
    async with card(circle) as agent, port_to(agent, version=1) as port:
        assert await port.walk(f"{U}.4.4.1.5") == {f"{U}.4.4.1.5.1": 1, f"{U}.4.4.1.5.2": 2}


async def test_a_set_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    values = table("apc")
    delay = f"{A}.5.2.10.0"
    values[delay] = ber.timeticks(2000)

    def on_set(oid: str, value: ber.SimValue) -> bool:
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
            port = PysnmpPort(options(agent.port, version=3, **settings))
            with pytest.raises(SnmpError) as caught:
                await port.get(ASKED)
            await port.close()
            assert hint in str(caught.value)
            assert "of-the-tests" not in str(caught.value)
    close_engines()


async def test_two_cards_one_user_name_other_keys(tmp_path: Path) -> None:
    """One engine would change the user's keys with every request, and both cards would refuse."""
    users = [SimUser(name="pg", auth=f"authpass-number-{n}".encode()) for n in (1, 2)]
    secrets = [secret(tmp_path, f"auth{n}", f"authpass-number-{n}") for n in (1, 2)]
    async with card(table("apc"), user=users[0]) as one, card(table("rfc1628"), user=users[1]) as two:
        ports = [
            PysnmpPort(options(agent.port, version=3, user="pg", auth=auth))
            for agent, auth in zip((one, two), secrets, strict=True)
        ]
        for _ in range(2):
            assert (await ports[0].get([STATUS]))[STATUS] == 2
            assert (await ports[1].get([f"{U}.4.1.0"]))[f"{U}.4.1.0"] == 3
        for port in ports:
            await port.close()
        close_engines()


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("no-such-host.invalid", r"^cannot look up no-such-host\.invalid: "),
        ("no..host", r"^cannot look up no\.\.host: that is no name: "),
        ("fe80::5%lo", r"^fe80::5%lo:161: fe80::5%lo is good on one link only: "),
    ],
)
async def test_a_name_that_nobody_knows(host: str, says: str) -> None:
    port = PysnmpPort(options(161, host=host))
    with pytest.raises(SnmpError, match=says):
        await port.get(ASKED)
    await port.close()
    close_engines()


async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async with card(table("apc")) as agent, port_to(agent) as port:
        await port.get(ASKED)
        agent.fault = Fault.DROP
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await port.get(ASKED)
        agent.fault = Fault.NONE
        assert await port.get(ASKED) == ANSWERED


async def test_the_first_request_does_not_stop_the_loop() -> None:
    """An engine's first request loads MIBs for 0.4 s (5 s on a starved host): that belongs into a thread."""
    worst_s = 0.0
    done = False

    async def watch() -> None:
        nonlocal worst_s
        while not done:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            worst_s = max(worst_s, time.monotonic() - began)

    async with card(table("apc")) as agent, port_to(agent) as port, asyncio.TaskGroup() as group:
        group.create_task(watch())
        began = time.monotonic()
        assert await port.get(ASKED) == ANSWERED
        took_s = time.monotonic() - began
        done = True
    assert worst_s < max(0.15, took_s / 2), f"the loop stood still for {worst_s:.3f} of {took_s:.3f} s"


async def test_the_last_port_closes_the_engine() -> None:
    """A daemon that ends, or a doctor that has asked, leaves no socket open."""
    loop = asyncio.get_running_loop()
    async with card(table("apc")) as agent:
        one, two = PysnmpPort(options(agent.port)), PysnmpPort(options(agent.port, version=1))
        for port in (one, two):
            assert await port.get(ASKED) == ANSWERED
        assert len(live_engines[loop]) == 1
        await one.close()
        assert await two.get(ASKED) == ANSWERED
        await two.close()
        assert live_engines[loop] == []


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


async def test_timeouts_do_not_follow_the_wall_clock() -> None:
    """pysnmp's own timer reads wall time; ours is the one that must be running, in whatever release."""
    loop = asyncio.get_running_loop()
    async with card(table("apc")) as agent, port_to(agent) as port:
        await port.get(ASKED)
        dispatcher = live_engines[loop][0].engine.transport_dispatcher
        assert dispatcher.loopingcall.get_coro().__qualname__ == "_Dispatcher.handle_timeout"
        assert not dispatcher.loopingcall.done()


async def test_an_engine_whose_timer_broke_is_replaced() -> None:
    """One poisoned entry raises at every tick: without a new engine nothing would ever time out again."""
    loop = asyncio.get_running_loop()

    def poison(_now: float) -> None:
        raise ValueError

    async with card(table("apc")) as agent, port_to(agent, retries=1) as port:
        assert await port.get(ASKED) == ANSWERED
        poisoned = live_engines[loop][0]
        poisoned.engine.transport_dispatcher.register_timer_callback(poison)
        await asyncio.sleep(0.6)
        assert poisoned.broken
        assert await port.get(ASKED) == ANSWERED
        assert poisoned not in live_engines[loop]
        agent.fault = Fault.DROP
        with pytest.raises(SnmpError, match="no answer from"):
            await port.get(ASKED)
