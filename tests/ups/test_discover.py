"""The search: who is found on which address, and that nobody who answers can hold it up, fill it or dirty its words."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pysnmp.proto import api

from powerguard.ups.discover import MAX_UPSES, Found, Search, Wanted, merged, sweep, text
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.snmp import engine
from powerguard.ups.snmp.engine import MessageError
from powerguard.ups.snmp.options import SnmpOptions
from tests.peers.apcupsd import apcupsd as real_apcupsd
from tests.peers.apcupsd import scripts
from tests.peers.hurried import now_s
from tests.peers.nut import BATTERY, upsd
from tests.peers.snmp_agent import Fault, SimUser, SnmpAgent
from tests.peers.snmpd import AUTH, COMMUNITY, PRIV, USER, snmpd
from tests.ups.apcupsd.apcupsd_helpers import apcupsd
from tests.ups.snmp.snmp_helpers import NarrowCard, secret, table, walk
from tests.ups.snmp.trap_helpers import free_port

pytestmark = pytest.mark.hurried

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def found_by(wanted: Wanted, deadline_s: float = 60.0) -> Search:
    search = Search(wanted)
    async with asyncio.timeout(deadline_s + 5):
        await search.run(deadline_s=deadline_s)
    return search


async def found_again_by(wanted: Wanted, answers: int = 1) -> Search:
    """Search for other processes, which a busy machine may keep from answering in time: up to five times."""
    for _ in range(5):
        search = await found_by(wanted)
        if len(search.found) + len(search.others) >= answers:
            break
    return search


@asynccontextmanager
async def card_at(host: str, port: int, name: str = "apc", **more: object) -> AsyncIterator[SnmpAgent]:
    values = table(name)
    async with SnmpAgent(lambda: values, host=host, port=port, **more) as agent:  # type: ignore[arg-type]
        yield agent


@asynccontextmanager
async def listening(talk: Talk) -> AsyncIterator[int]:
    """A TCP server that does with everybody what the test says."""

    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await talk(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await server.wait_closed()
        await asyncio.sleep(0.05)


# --- SNMP -------------------------------------------------------------------------------------------------------------


async def test_a_small_network_of_cards() -> None:
    """Two families, a card that is silent, one that talks rubbish, one that knows another community, and nobody."""
    port = free_port()
    addresses = [f"127.0.7.{number}" for number in range(1, 15)]
    async with (
        card_at("127.0.7.3", port),
        card_at("127.0.7.5", port, "rfc1628"),
        card_at("127.0.7.7", port) as silent,
        card_at("127.0.7.8", port) as babbling,
        card_at("127.0.7.9", port, community="another"),
    ):
        silent.fault, babbling.fault = Fault.DROP, Fault.GARBAGE
        steps: list[tuple[int, int, int]] = []
        search = Search(Wanted(addresses=addresses, kinds=("snmp",), snmp_port=port), lambda *step: steps.append(step))
        await search.run(deadline_s=20)
    assert [(one.host, one.profile, one.on_battery) for one in search.found] == [
        ("127.0.7.3", "apc-powernet", False),
        ("127.0.7.5", "rfc1628", False),
    ]
    first = search.found[0]
    assert (first.runtime_s, first.charge_pct, first.load_pct, first.watts) == (1740, 99.5, 42.1, 1134)
    assert first.source == {"kind": "snmp", "host": "127.0.7.3", "port": port}
    assert (search.whole, search.others) == (True, [])
    assert steps[-1] == (14, 14, 2)


async def test_a_card_that_speaks_version_1_only() -> None:
    """Asked in what it knows: the settings need `version: 1`."""
    port = free_port()

    class OldCard(SnmpAgent):
        def receive(self, message: bytes, sender: tuple[str, int]) -> None:
            if int(api.decodeMessageVersion(message)) == 0:
                super().receive(message, sender)

    values = table("apc")
    async with OldCard(lambda: values, port=port):
        search = await found_by(Wanted(addresses=["127.0.0.1"], kinds=("snmp",), snmp_port=port))
    assert [one.source for one in search.found] == [{"kind": "snmp", "host": "127.0.0.1", "port": port, "version": 1}]


async def test_a_card_that_answers_one_object_at_a_time() -> None:
    """Found and read like any other, with a remark."""
    async with NarrowCard(table("rfc1628"), 1) as agent:
        search = await found_by(Wanted(addresses=["127.0.0.1"], kinds=("snmp",), snmp_port=agent.port))
    assert [(one.profile, one.runtime_s) for one in search.found] == [("rfc1628", 2100)]
    assert search.found[0].remark == "answers only 1 object in one request, so a poll takes many"


@pytest.mark.real_time
@pytest.mark.peer("snmpd")
async def test_snmpd_by_community_and_by_user(tmp_path: Path) -> None:
    """Another maker's SNMP: version 2c with a community from a file, version 3 with a user; and version 3 unasked."""
    values = {oid: answer for oid, answer in walk("rfc1628").items() if not oid.startswith("1.3.6.1.2.1.1.")}
    async with snmpd(values) as peer:
        community = {"community": secret(tmp_path, "c", COMMUNITY).model_dump(exclude_none=True)}
        user = {"version": 3, "user": USER, "auth": secret(tmp_path, "a", AUTH), "priv": secret(tmp_path, "p", PRIV)}
        here = Wanted(addresses=["127.0.0.1"], kinds=("snmp",), snmp_port=peer.port)
        plain = await found_again_by(here)
        read = await found_again_by(
            Wanted(
                addresses=["127.0.0.1"],
                kinds=("snmp",),
                snmp_port=peer.port,
                snmp=community,
                community=COMMUNITY.encode(),
            )
        )
        proved = await found_again_by(Wanted(addresses=["127.0.0.1"], kinds=("snmp",), snmp_port=peer.port, snmp=user))
    assert plain.found == []
    assert [one.why for one in plain.others] == [
        "answers SNMP, but not to community `public`: --community-file, or --user for version 3"
    ]
    assert [(one.profile, one.runtime_s, one.authenticated) for one in read.found] == [("rfc1628", 2100, False)]
    assert [(one.profile, one.runtime_s, one.authenticated) for one in proved.found] == [("rfc1628", 2100, True)]
    source = proved.found[0].source
    assert source is not None
    assert source["auth"] == {"file": str(tmp_path / "a")}
    assert SnmpOptions.model_validate(source).user == USER


async def test_a_rack_pdu_is_reported_and_is_no_source() -> None:
    port = free_port()
    async with card_at("127.0.0.1", port, "pdus/apc-rpdu2"):
        search = await found_by(Wanted(addresses=["127.0.0.1"], kinds=("snmp",), snmp_port=port))
    assert [(one.what, one.profile, one.source) for one in search.found] == [("pdu", "apc-rpdu2, apc-rpdu", None)]
    assert merged(search.found) == []


async def test_a_card_that_has_only_an_ipv6_address() -> None:
    port = free_port()
    async with card_at("::1", port):
        search = await found_by(Wanted(addresses=["::1", "127.0.0.1"], kinds=("snmp",), snmp_port=port))
    assert [one.where for one in search.found] == [f"[::1]:{port}"]


async def test_what_answers_and_is_no_ups_is_named() -> None:
    port = free_port()
    values = {oid: value for oid, value in table("apc").items() if oid.startswith("1.3.6.1.2.1.1.")}
    async with SnmpAgent(lambda: values, port=port):
        search = await found_by(Wanted(addresses=["127.0.0.1"], kinds=("snmp",), snmp_port=port))
    assert search.found == []
    assert len(search.others) == 1
    assert search.others[0].why.startswith("answers (APC Web/SNMP Management Card")


async def test_an_answer_from_elsewhere_or_with_another_number_is_none() -> None:
    """Whoever knows that we search may send answers for a card that is not there; he would have to guess a number."""
    port = free_port()
    loop = asyncio.get_running_loop()

    class Forger(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            forged = data.replace(b"\xa0", b"\xa2", 1)
            _, number = engine.answered(forged) if data[4] != 3 else (3, 0)
            for answer in (forged.replace(number.to_bytes(4, "big"), b"\x01\x02\x03\x04"), b"\x30\x00", b"rubbish"):
                self.transport.sendto(answer, addr)  # type: ignore[attr-defined]
            other.sendto(forged, addr)

    other, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=("127.0.0.9", port))
    forger, _ = await loop.create_datagram_endpoint(Forger, local_addr=("127.0.0.1", port))
    found = await sweep(["127.0.0.1"], port=port, community=b"public")
    forger.close()
    other.close()
    assert found == {}


async def test_the_sweep_keeps_to_its_rate() -> None:
    """300 datagrams a second at most: no network and no old card minds."""
    port, asked = free_port(), 0

    class Deaf(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            nonlocal asked
            asked += 1

    loop = asyncio.get_running_loop()
    deaf, _ = await loop.create_datagram_endpoint(Deaf, local_addr=("127.0.9.1", port))
    began_s = now_s()
    await sweep([f"127.0.9.{number}" for number in range(1, 61)], port=port, community=b"public")
    took_s = now_s() - began_s
    deaf.close()
    assert asked == 6, "three versions, twice"
    assert took_s >= 60 * 6 / 300


def test_answers_that_are_none() -> None:
    for data in (b"", b"\x30\x00", b"\x30\x03\x02\x01\x07", engine.hello("2c", 5)):
        with pytest.raises(MessageError):
            engine.answered(data)


# --- upsd -------------------------------------------------------------------------------------------------------------


@pytest.mark.real_time
async def test_upsd_with_two_upses() -> None:
    """The real one: each UPS is told by its own name, with what it says now."""
    async with upsd("rack-a", "rack-b") as peer:
        peer.change(BATTERY, "rack-b")
        await peer.shows(BATTERY["ups.status"], ups="rack-b")
        search = await found_again_by(Wanted(addresses=["127.0.0.1"], kinds=("nut",), nut_port=peer.port), 2)
    assert [(one.name, one.on_battery, one.runtime_s) for one in search.found] == [
        ("rack-a", False, 1800),
        ("rack-b", True, 1700),
    ]
    assert all(one.model for one in search.found)
    source = {"kind": "nut", "host": "127.0.0.1", "port": peer.port, "name": "rack-a"}
    assert search.found[0].source == source
    assert NutOptions.model_validate(source)


@pytest.mark.real_time
async def test_upsd_whose_driver_is_gone() -> None:
    async with upsd() as peer:
        await peer.kill_driver()
        async with asyncio.timeout(60):
            while (await peer.talk("GET VAR dsim ups.status"))[0].startswith("VAR"):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.1)
        search = await found_again_by(Wanted(addresses=["127.0.0.1"], kinds=("nut",), nut_port=peer.port))
    assert [(one.on_battery, one.remark) for one in search.found] == [(None, "upsd says DRIVER-NOT-CONNECTED")]


def test_a_card_and_the_upsd_that_reads_it_are_one_ups() -> None:
    """By the driver's own word; a UPS of upsd that says nothing of its card is a UPS of its own."""
    card = Found(kind="snmp", what="ups", host="10.0.0.5", port=161, source={"kind": "snmp"})
    same = Found(kind="nut", what="ups", host="10.0.0.9", port=3493, behind="snmp:10.0.0.5:161", source={"kind": "nut"})
    other = Found(kind="nut", what="ups", host="10.0.0.9", port=3493, name="b", source={"kind": "nut"})
    pdu = Found(kind="snmp", what="pdu", host="10.0.0.6", port=161)
    assert merged([card, same, other, pdu]) == [[card, same], [other]]


def test_sources_of_one_model_and_serial_are_one_ups() -> None:
    """Seen by card, upsd and apcupsd; a serial number that two of one kind tell is a placeholder and merges nothing."""

    def one(kind: str, host: str, serial: str, model: str = "Smart-UPS X 750") -> Found:
        return Found(kind=kind, what="ups", host=host, port=1, model=model, serial=serial, source={"kind": kind})

    card, apc = one("snmp", "10.0.0.5", "AS1"), one("apcupsd", "127.0.0.1", "AS1")
    nut = one("nut", "10.0.0.9", "AS1", "American Power Conversion Smart-UPS X 750")
    assert merged([card, nut, apc]) == [[card, nut, apc]]
    other = one("snmp", "10.0.0.6", "AS1")
    assert merged([card, other, nut]) == [[card], [other], [nut]]
    for unlike in (one("nut", "h", "AS2"), one("nut", "h", ""), one("nut", "h", "AS1", "Smart-UPS 1500")):
        assert merged([card, unlike]) == [[card], [unlike]]


@pytest.mark.real_time
@pytest.mark.peer("snmpd", "upsd")
async def test_one_ups_by_its_card_upsd_and_apcupsd(tmp_path: Path) -> None:
    """The real programs: the model stands in place of sysDescr, and the serial number makes three sources one UPS."""
    values = {oid: answer for oid, answer in walk("apc").items() if not oid.startswith("1.3.6.1.2.1.1.")}
    values |= {"1.3.6.1.4.1.318.1.1.1.1.1.1.0": b"Smart-UPS X 750", "1.3.6.1.4.1.318.1.1.1.1.2.3.0": b"AS0833001234"}
    given = {"ups.mfr": "APC", "ups.model": "Smart-UPS X 750", "ups.serial": "AS0833001234", "ups.status": "OL"}
    community = {"community": secret(tmp_path, "c", COMMUNITY).model_dump(exclude_none=True)}
    async with (
        snmpd(values, ticks=frozenset({"1.3.6.1.4.1.318.1.1.1.2.2.3.0"})) as card,
        upsd("rack-a", values=given) as nut,
    ):
        with scripts() as made:
            place = f"127.0.0.1:{card.port}:APC_NOTRAP:{COMMUNITY}"
            async with real_apcupsd("snmp", place, scripts_=made) as apc:
                await apc.until(lambda status: status.values.get("SERIALNO") == "AS0833001234")
                search = await found_again_by(
                    Wanted(
                        addresses=["127.0.0.1"],
                        snmp=community,
                        community=COMMUNITY.encode(),
                        snmp_port=card.port,
                        nut_port=nut.port,
                        nis_port=apc.port,
                    ),
                    3,
                )
    assert [(one.kind, one.model, one.serial) for one in search.found] == [
        ("snmp", "Smart-UPS X 750", "AS0833001234"),
        ("nut", "APC Smart-UPS X 750", "AS0833001234"),
        ("apcupsd", "Smart-UPS X 750", "AS0833001234"),
    ]
    assert [len(group) for group in merged(search.found)] == [3]


# --- apcupsd ----------------------------------------------------------------------------------------------------------


@pytest.mark.real_time
async def test_the_real_apcupsd_beside_its_card() -> None:
    """Its own SNMP driver before a simulated card; the search sees both, and what each of them says."""
    port = free_port()
    async with card_at("127.0.0.1", port):
        with scripts() as made:
            async with real_apcupsd("snmp", f"127.0.0.1:{port}:APC_NOTRAP:public", scripts_=made) as peer:
                await peer.until(lambda status: bool(status.flags & 0x8))
                here = Wanted(addresses=["127.0.0.1"], kinds=("snmp", "apcupsd"), snmp_port=port, nis_port=peer.port)
                search = await found_again_by(here, 2)
    assert [(one.kind, one.name, one.on_battery) for one in search.found] == [
        ("snmp", "", False),
        ("apcupsd", "rack-a", False),
    ]
    assert search.found[1].source == {"kind": "apcupsd", "host": "127.0.0.1", "port": peer.port}


async def test_apcupsd_that_is_mute_or_lies() -> None:
    """It is named among those that answered and are nothing we could read."""
    async with apcupsd() as peer:
        peer.mute = True
        search = await found_by(Wanted(addresses=["127.0.0.1"], kinds=("apcupsd",), nis_port=peer.port))
        assert search.found == []
        assert len(search.others) == 1
        peer.mute, peer.raw = False, b"\x00\x10HTTP/1.1 400 Bad\x00\x00"
        search = await found_by(Wanted(addresses=["127.0.0.1"], kinds=("apcupsd",), nis_port=peer.port))
    assert "APC" in search.others[0].why or "status" in search.others[0].why


# --- Whoever answers --------------------------------------------------------------------------------------------------


async def flood(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"A" * 65536)
        await writer.drain()


async def mute(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def hang_up(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    return


async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"A")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["nut", "apcupsd"])
@pytest.mark.parametrize("talk", [flood, mute, hang_up, drip], ids=lambda talk: talk.__name__)
async def test_whoever_answers_holds_nothing_up(kind: str, talk: Talk) -> None:
    """Found to be nothing, within seconds, in words that a terminal can show."""
    async with listening(talk) as port:
        began_s = now_s()
        search = await found_by(Wanted(addresses=["127.0.0.1"], kinds=(kind,), nut_port=port, nis_port=port))
        took_s = now_s() - began_s
    assert search.found == []
    assert search.whole
    assert len(search.others) == 1
    assert search.others[0].why.isprintable()
    assert took_s < 12.0


def _upsd(rows: list[str], variables: list[str]) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := (await reader.readline()).decode("utf-8", "replace").strip():
            of = line.removeprefix("LIST ")
            result = rows if of == "UPS" else [f"{of} {one}" for one in variables]
            writer.write("\n".join([f"BEGIN LIST {of}", *result, f"END LIST {of}", ""]).encode())
            await writer.drain()

    return talk


async def test_hostile_names_are_cleaned_and_bounded() -> None:
    """Colours, bells and lines of a megabyte stay out of the terminal, and out of the settings."""
    rows = ['UPS good "\x1b[31mred\x07 name"', 'UPS "not a name;rm" "x"', 'UPS no\0name "x"', 'UPS other\rname "x"']
    rows += [f'UPS u{n} ""' for n in range(100)]
    variables = ['device.mfr "\x1b]0;title\x07"', f'device.model "{"M" * 3000}"', 'ups.status "OL"']
    async with listening(_upsd(rows, variables)) as port:
        search = await found_by(Wanted(addresses=["127.0.0.1"], kinds=("nut",), nut_port=port))
    assert len(search.found) == MAX_UPSES
    assert [one.why for one in search.others] == [f"upsd with 104 UPSes: the first {MAX_UPSES} are listed"]
    by_name = {one.name: one for one in search.found}
    assert by_name["not a name;rm"].source is None
    assert "none that the settings take" in by_name["not a name;rm"].remark
    assert all(one.model.isprintable() and len(one.model) <= 80 for one in search.found)
    assert by_name["good"].on_battery is False


async def test_a_list_without_end_ends_the_conversation() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"BEGIN LIST UPS\n")
        while True:
            writer.write(b'UPS a "b"\n' * 1000)
            await writer.drain()

    async with listening(talk) as port:
        search = await found_by(Wanted(addresses=["127.0.0.1"], kinds=("nut",), nut_port=port))
    assert (search.found, len(search.others)) == ([], 1)


async def test_the_deadline_ends_it_and_keeps_what_was_found() -> None:
    async with apcupsd() as peer:
        addresses = ["127.0.0.1", *(f"127.0.{block}.{last}" for block in range(10, 18) for last in range(1, 255))]
        kinds = ("snmp", "apcupsd")
        search = Search(Wanted(addresses=addresses, kinds=kinds, snmp_port=free_port(), nis_port=peer.port))
        async with asyncio.timeout(60.0):
            await search.run(deadline_s=8.0)  # to ask them all takes 40 s
    assert not search.whole
    assert [one.kind for one in search.found] == ["apcupsd"]


async def test_a_source_of_the_settings_is_asked_as_it_stands_there() -> None:
    """With its own port; and not a second time by its address."""
    port = free_port()
    async with card_at("127.0.0.1", port) as agent:
        known = [SnmpOptions.model_validate({"kind": "snmp", "host": "127.0.0.1", "port": port})]
        search = await found_by(Wanted(addresses=["127.0.0.1"], known=known, kinds=("snmp",), snmp_port=port))
        assert [one.source for one in search.found] == [{"kind": "snmp", "host": "127.0.0.1", "port": port}]
        asked = agent.requests
        await found_by(Wanted(known=known, kinds=("snmp",)))
        assert agent.requests == 2 * asked


async def test_user_of_version_3_on_a_simulated_card(tmp_path: Path) -> None:
    port = free_port()
    user = SimUser(name=USER, auth=AUTH.encode(), priv=PRIV.encode())
    async with card_at("127.0.0.1", port, user=user, community="nobody-knows"):
        snmp = {"version": 3, "user": USER, "auth": secret(tmp_path, "a", AUTH), "priv": secret(tmp_path, "p", PRIV)}
        search = await found_by(Wanted(addresses=["127.0.0.1"], kinds=("snmp",), snmp_port=port, snmp=snmp))
    assert [one.authenticated for one in search.found] == [True]


def test_text_of_strangers() -> None:
    assert text("a\x1b[31m\n\u202eb" + "c" * 1000) == ("a [31m b" + "c" * 1000)[:77] + "..."
    assert (
        text("a model of many words " * 5)
        == "a model of many words a model of many words a model of many words a model of..."
    )
