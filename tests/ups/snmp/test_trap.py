"""The trap port against net-snmp's snmptrap and snmpinform: each version becomes a hint, and nothing but a hint."""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from powerguard.options import Secret
from powerguard.ups.snmp.options import TrapOptions
from powerguard.ups.snmp.traps import Card, engine_id, plain_address
from tests.peers import require
from tests.ups.snmp.trap_helpers import (
    AUTH,
    CARD,
    ENGINE,
    TRAP_V1,
    TRAP_V2,
    V2C,
    free_port,
    listening,
    secret_file,
    send,
    users,
    v3,
)
from tests.wire import ber

pytestmark = pytest.mark.peer("snmptrap", "snmpinform")
ELSEWHERE = (Card(ups="rack-b", hosts=("10.9.8.7",)),)
FROM_ENGINE = ("-e", f"0x{ENGINE}")


async def test_every_version_makes_us_poll(tmp_path: Path) -> None:
    """v1, v2c and v3, traps and informs; the informs are answered, or snmpinform would fail."""
    async with listening(users=users(tmp_path)) as port:
        number = port.listener.port
        for program, words, trap in (
            ("snmptrap", ("-v1", "-c", "public"), TRAP_V1),
            ("snmptrap", V2C, TRAP_V2),
            ("snmpinform", V2C, TRAP_V2),
            ("snmptrap", (*FROM_ENGINE, *v3()), TRAP_V2),
            ("snmpinform", v3(), TRAP_V2),
        ):
            assert await send(program, number, words, trap) == 0
            assert await port.next_poll() == "rack-a"
        assert await port.until(6) == {"hint": 5, "discovery": 1}
        assert port.listener.counts.answered == 3, "two informs, and the question for our engine id"
        assert set(port.listener.counts.last_at_s) == {"rack-a"}


@pytest.mark.parametrize(
    ("auth", "priv"),
    [
        ("MD5", "DES"),
        ("SHA", None),
        ("SHA-224", "AES"),
        ("SHA-256", "AES"),
        ("SHA-384", "AES-192"),
        ("SHA-512", "AES-256"),
        ("SHA", "AES-256"),
    ],
)
async def test_version_3_in_all_its_ciphers(auth: str, priv: str | None, tmp_path: Path) -> None:
    """Both ways: a trap under the card's engine id, and an inform under ours, answered in the same cipher."""
    more: dict[str, Any] = {"auth_protocol": auth} | ({"priv": None} if priv is None else {"priv_protocol": priv})
    words = list(v3(level="authNoPriv" if priv is None else "authPriv"))
    words[words.index("-a") + 1] = auth
    if priv is not None:
        words[words.index("-x") + 1] = f"{priv}-C" if priv.startswith("AES-") else priv
    async with listening(users=users(tmp_path, **more)) as port:
        assert await send("snmptrap", port.listener.port, (*FROM_ENGINE, *words), TRAP_V2) == 0
        assert await port.next_poll() == "rack-a"
        assert await send("snmpinform", port.listener.port, words, TRAP_V2) == 0
        assert await port.next_poll() == "rack-a"


async def test_version_3_that_proves_nothing_does_nothing(tmp_path: Path) -> None:
    """Another engine id, passphrase, user or level: counted each by its name, told once, polled never."""
    async with listening(users=users(tmp_path)) as port:
        with capture_logs() as logs:
            for words in (
                ("-e", "0x8000000001020304", *v3()),
                (*FROM_ENGINE, *v3(auth="wrong-passphrase")),
                (*FROM_ENGINE, *v3(priv="wrong-passphrase")),
                (*FROM_ENGINE, *v3(user="nobody")),
                (*FROM_ENGINE, *v3(level="authNoPriv")),
            ):
                assert await send("snmptrap", port.listener.port, words, TRAP_V2) == 0
            once = ("-r", "0", "-t", "3")
            assert await send("snmpinform", port.listener.port, (*once, *v3(auth="wrong-passphrase")), TRAP_V2) != 0
            results = await port.until(7)
        assert port.polled.empty()
        assert results == {
            "unknown_engine": 1,
            "not_authentic": 3,
            "undecipherable": 1,
            "unknown_user": 1,
            "discovery": 1,
        }
    because = {line["result"]: line["because"] for line in logs if line["event"] == "trap_refused"}
    assert because["unknown_engine"].startswith("engine id 8000000001020304 is not in traps.users")
    assert "passphrase-of" not in str(logs)


async def test_a_stranger_is_counted_and_not_answered() -> None:
    """His inform gets no answer either: nobody learns from outside that we are here."""
    async with listening(cards=(Card(ups="rack-a", hosts=("10.0.0.5",)),)) as port:
        assert await send("snmptrap", port.listener.port, V2C, TRAP_V2) == 0
        assert await send("snmpinform", port.listener.port, ("-r", "0", "-t", "1", *V2C), TRAP_V2) != 0
        assert set(port.results) <= {"unknown_sender", "repeated"}
        assert (port.polled.empty(), port.listener.counts.answered) == (True, 0)


async def test_through_a_relay_the_card_is_known_by_what_the_trap_says(tmp_path: Path) -> None:
    """The agent address of v1, snmpTrapAddress.0 of v2c, or the community that only this card has."""
    cards = (Card(ups="rack-b", hosts=("10.9.8.7",), communities=(Secret(**secret_file(tmp_path, "c", "of-rack-b")),)),)
    async with listening(cards=cards) as port:
        relayed = (*TRAP_V2, "1.3.6.1.6.3.18.1.3.0", "a", "10.9.8.7")
        other = (*TRAP_V2, "1.3.6.1.6.3.18.1.3.0", "a", "10.9.8.8")
        for words, trap in (
            (("-v1", "-c", "public"), TRAP_V1),
            (V2C, relayed),
            (("-v2c", "-c", "of-rack-b"), TRAP_V2),
        ):
            assert await send("snmptrap", port.listener.port, words, trap) == 0
            assert await port.next_poll() == "rack-b"
        assert await send("snmptrap", port.listener.port, V2C, other) == 0
        assert await port.until(4) == {"hint": 3, "unknown_sender": 1}


@pytest.mark.peer("snmptrapd")
async def test_through_snmptrapd(tmp_path: Path) -> None:
    """A real relay: version 1 keeps the card's address, 2c is known by its community alone, and the rest by nothing."""
    cards = (Card(ups="rack-b", hosts=("10.9.8.7",)), Card(ups="rack-c", hosts=("10.9.8.6",)))
    own = {"rack-c": secret_file(tmp_path, "c", "of-rack-c")}
    async with listening(cards=cards, communities=own) as port, snmptrapd(port.listener.port) as relay:
        assert await send("snmptrap", relay, ("-v1", "-c", "public"), TRAP_V1) == 0
        assert await port.next_poll() == "rack-b"
        assert await send("snmptrap", relay, ("-v2c", "-c", "of-rack-c"), TRAP_V2) == 0
        assert await port.next_poll() == "rack-c"
        assert await send("snmptrap", relay, V2C, TRAP_V2) == 0
        assert await port.until(3) == {"hint": 2, "unknown_sender": 1}


@asynccontextmanager
async def snmptrapd(forward_to: int) -> AsyncIterator[int]:
    """Run net-snmp's snmptrapd as a relay to a port of the loopback; yields its own."""
    program, own = require("snmptrapd"), free_port()
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pg-trapd-") as name:
        folder = Path(name)
        config = folder / "snmptrapd.conf"
        config.write_text(f"disableAuthorization yes\nforward default udp:127.0.0.1:{forward_to}\n", encoding="utf-8")
        child = await asyncio.create_subprocess_exec(
            *(program, "-f", "-Lf", str(folder / "log"), "-C", "-c", str(config), "-p", str(folder / "pid"), "-M", ""),
            *("-m", "", f"udp:127.0.0.1:{own}"),
            env={**os.environ, "MIBS": "", "MIBDIRS": name, "SNMP_PERSISTENT_DIR": name},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(60):
                log = folder / "log"
                while "NET-SNMP version" not in (log.read_text(encoding="utf-8") if log.exists() else ""):
                    assert child.returncode is None
                    await asyncio.sleep(0.02)
            yield own
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def test_a_community_is_asked_for_where_one_is_set(tmp_path: Path) -> None:
    async with listening(community=secret_file(tmp_path, "c", "of-the-traps")) as port:
        assert await send("snmptrap", port.listener.port, V2C, TRAP_V2) == 0
        assert await port.until(1) == {"wrong_community": 1}
        assert await send("snmptrap", port.listener.port, ("-v2c", "-c", "of-the-traps"), TRAP_V2) == 0
        assert await port.next_poll() == "rack-a"


async def test_a_secret_that_cannot_be_read_closes_the_door_and_says_so(tmp_path: Path) -> None:
    """Not: any community will do."""
    missing = {"file": str(tmp_path / "missing")}
    with capture_logs() as logs:
        async with listening(community=missing, users=users(tmp_path, auth=missing)) as port:
            assert await send("snmptrap", port.listener.port, V2C, TRAP_V2) == 0
            assert await send("snmptrap", port.listener.port, (*FROM_ENGINE, *v3()), TRAP_V2) == 0
            assert await port.until(2) == {"wrong_community": 1, "unknown_engine": 1}
    refused = [line["because"] for line in logs if line["event"] == "trap_setting_refused"]
    assert [line.partition(":")[0] for line in refused] == ["traps.community", "traps.users, pgtrap"]


async def test_a_short_passphrase_is_refused(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with listening(users=users(tmp_path, priv=secret_file(tmp_path, "short", "seven77"))):
            pass
    assert "the priv passphrase is shorter than 8 characters" in str(logs)


async def test_a_trap_leads_to_a_poll_at_once() -> None:
    """From the moment at which the datagram is there; snmptrap's own start is not ours. The best of several counts."""
    best_s = 1.0
    async with listening() as port:
        loop = asyncio.get_running_loop()
        sender, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=("127.0.0.1", port.listener.port)
        )
        for turn in range(10):
            began_s = time.perf_counter()
            sender.sendto(_inform(turn))
            await port.next_poll()
            best_s = min(best_s, time.perf_counter() - began_s)
        sender.close()
    print(f"trap to poll: {1000 * best_s:.2f} ms")
    assert best_s <= 0.1


def _inform(turn: int) -> bytes:
    """A v2c inform with a request-id of its own."""
    pdu = ber.integer(turn) + ber.integer(0) * 2 + ber.element(ber.SEQUENCE, b"")
    inside = ber.integer(1) + ber.element(ber.OCTETS, b"public") + ber.element(ber.INFORM, pdu)
    return ber.element(ber.SEQUENCE, inside)


async def test_names_in_the_log_come_from_the_profiles() -> None:
    """RFC 1628's traps come as 33.2.1 and, out of version 1, as 33.2.0.1; a name decides nothing."""
    async with listening() as port:
        name_of = port.listener.name_of
        assert (name_of("1.3.6.1.2.1.33.2.1"), name_of("1.3.6.1.2.1.33.2.0.1")) == ("on_battery", "on_battery")
        assert (name_of("1.3.6.1.2.1.33.2.2"), name_of(""), name_of("1")) == ("unknown", "unknown", "unknown")


async def test_the_log_is_not_flooded_by_a_card_that_repeats_itself() -> None:
    with capture_logs() as logs:
        async with listening() as port:
            for turn in range(30):
                port.listener.take(_inform(turn), ("127.0.0.1", 1))
            for turn in range(60):
                port.listener.take(_inform(turn), (f"10.0.0.{turn}", 1))
    assert len([line for line in logs if line["event"] == "trap_received"]) == 5
    assert len([line for line in logs if line["event"] == "trap_refused"]) == 32


async def test_both_families_of_addresses() -> None:
    """One socket for IPv6 and IPv4: an IPv4 card is known there too."""
    async with listening(listen="::", cards=(*CARD, Card(ups="rack-c", hosts=("::1",)))) as port:
        assert await send("snmptrap", port.listener.port, V2C, TRAP_V2) == 0
        assert await port.next_poll() == "rack-a"
        loop = asyncio.get_running_loop()
        sender, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=("::1", port.listener.port)
        )
        sender.sendto(_inform(1))
        assert await port.next_poll() == "rack-c"
        sender.close()
    assert plain_address("fe80::1%eth0") == "fe80::1"


async def test_a_name_is_looked_up_and_one_that_does_not_exist_holds_nothing_up() -> None:
    cards = (Card(ups="rack-a", hosts=("localhost",)), Card(ups="rack-b", hosts=("no-such-host.invalid", "no..host")))
    async with listening(cards=cards) as port:
        assert await send("snmptrap", port.listener.port, V2C, TRAP_V2) == 0
        assert await port.next_poll() == "rack-a"


async def test_a_further_address_of_the_settings() -> None:
    """The card of a UPS that is read through upsd still sends its traps to us."""
    async with listening(cards=(), addresses={"rack-n": ["127.0.0.1"]}) as port:
        assert await send("snmptrap", port.listener.port, V2C, TRAP_V2) == 0
        assert await port.next_poll() == "rack-n"


def test_settings_that_cannot_be_meant(tmp_path: Path) -> None:
    good = users(tmp_path)[0]
    for wrong, what in (
        ({"listen": "ups.example"}, "must be an IP address of this host"),
        ({"addresses": {"rack-a": ["ups.example"]}}, "traps carry no names"),
        ({"users": [{**good, "engines": {"rack-a": "12"}}]}, "pattern"),
        (
            {"users": [{**good, "engines": {"rack-a": ENGINE, "rack-b": f"0x{ENGINE.upper()}"}}]},
            "each card has its own",
        ),
        ({"port": 0}, "greater than or equal to 1"),
    ):
        with pytest.raises(ValueError, match=what):
            TrapOptions.model_validate(wrong)
    assert TrapOptions.model_validate({"users": [good], "addresses": {"b": ["10.0.0.1"]}}).names == {"rack-a", "b"}


def test_our_engine_id_is_the_same_after_every_start(tmp_path: Path) -> None:
    """RFC 3411: 5 to 32 bytes, the highest bit set; two daemons of one machine are two engines."""
    machine = tmp_path / "machine-id"
    machine.write_text("0123456789abcdef\n", encoding="ascii")
    mine = engine_id(1162, machine)
    assert (mine, len(mine), mine[0]) == (engine_id(1162, machine), 17, 0x80)
    assert mine != engine_id(1163, machine)
    assert len(engine_id(1162, tmp_path / "missing")) == 17


def test_no_secret_in_what_is_shown(tmp_path: Path) -> None:
    shown = repr(TrapOptions.model_validate({"users": users(tmp_path)}))
    assert AUTH not in shown
