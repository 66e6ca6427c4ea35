"""net-snmp's snmpd as the card: another maker's SNMP on the other end, in all three versions."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.snmp.port import CardPort, SnmpError, Typed
from powerguard.ups.snmp.source import SnmpSource, probe
from tests.peers import require
from tests.peers.snmp_agent import SimUser, SnmpAgent
from tests.peers.snmpd import AUTH, COMMUNITY, PRIV, USER, WRITE_COMMUNITY, snmpd
from tests.ups.snmp.snmp_helpers import A, U, options, secret, table, walk

pytestmark = pytest.mark.peer("snmpd", "snmpget")

PROFILES = load_profiles(None)
TICKS = frozenset({f"{A}.2.1.2.0", f"{A}.2.2.3.0"})


def settings(version: int | str, folder: Path) -> dict[str, Any]:
    """What reaches it, with a second and more for another process to answer."""
    if version == 3:
        login = {"user": USER, "auth": secret(folder, "a", AUTH), "priv": secret(folder, "p", PRIV)}
        return {"version": 3, "timeout_s": 1.5, **login}
    return {"version": version, "timeout_s": 1.5, "community": secret(folder, "c", COMMUNITY)}


def without_system(name: str) -> dict[str, Any]:
    return {oid: answer for oid, answer in walk(name).items() if not oid.startswith("1.3.6.1.2.1.1.")}


@pytest.mark.parametrize("version", [1, "2c", 3])
async def test_both_families(version: int | str, tmp_path: Path) -> None:
    """The same golden numbers as in the decoder's tests, now through real requests. They have all the time there is."""
    (tmp_path / "one").mkdir()
    slow = {"timeout_s": 5.0}
    async with snmpd(without_system("apc"), ticks=TICKS) as peer:
        report = await probe(options(peer.port, **settings(version, tmp_path / "one") | slow), profiles=PROFILES)
    decoded = report.decoded
    assert (report.profiles, report.authenticated) == (("apc-powernet",), version == 3)
    assert (decoded.output_source, decoded.runtime_s, decoded.charge_pct) == (OutputSource.UTILITY, 1740, 99.5)
    assert (decoded.load_pct, decoded.watts, decoded.input_v, decoded.rejected) == (42.1, 1134, 230.8, ())
    async with snmpd(without_system("rfc1628")) as peer:
        report = await probe(options(peer.port, **settings(version, tmp_path) | slow), profiles=PROFILES)
    decoded = report.decoded
    assert report.profiles == ("rfc1628",)
    assert (decoded.runtime_s, decoded.load_pct, decoded.watts, decoded.input_present) == (2100, 38, 410, True)


LEVELS = [
    (),
    *((auth,) for auth in ("MD5", "SHA", "SHA-224", "SHA-256", "SHA-384", "SHA-512")),
    *((auth, "AES") for auth in ("MD5", "SHA", "SHA-224", "SHA-256", "SHA-384", "SHA-512")),
    *((auth, priv) for auth in ("MD5", "SHA", "SHA-512") for priv in ("DES", "AES-192", "AES-256")),
]
"""Each digest; each cipher, with digests whose keys are long enough for it and with those that are lengthened."""


async def test_every_protocol_and_level(tmp_path: Path) -> None:
    """Of net-snmp, whose AES-192-C and AES-256-C lengthen keys as cards do: read, written, walked."""
    lines = []
    for number, words in enumerate(LEVELS):
        ciphers = (f"{word}-C" if word.startswith("AES-") else word for word in words[1:])
        given = [f"{words[0]} {AUTH}", *(f"{word} {PRIV}" for word in ciphers)] if words else []
        level = ("noauth", "auth", "priv")[len(words)]
        lines += [" ".join([f"createUser u{number}", *given]), f"rwuser u{number} {level}"]
    auth, priv = secret(tmp_path, "auth", AUTH), secret(tmp_path, "priv", PRIV)
    oid = f"{U}.8.2.0"
    async with snmpd(without_system("rfc1628"), lines=lines) as peer:
        for number, words in enumerate(LEVELS):
            more = dict(zip(("auth_protocol", "priv_protocol"), words, strict=False))
            more |= {"auth": auth} if words else {}
            more |= {"priv": priv} if len(words) > 1 else {}
            port = CardPort(options(peer.port, version=3, user=f"u{number}", timeout_s=5.0, **more))
            await port.set({oid: Typed("integer", 100 + number)})
            assert await port.get([oid]) == {oid: 100 + number}, words
            assert await port.walk(f"{U}.8.2") == {oid: 100 + number}
            await port.close()


async def test_an_outage_reported_by_set(tmp_path: Path) -> None:
    """Utility, battery, and the daemon of the card gone."""
    heard: asyncio.Queue[Reading | SourceFailed] = asyncio.Queue()
    async with snmpd(without_system("apc"), ticks=TICKS) as peer:
        opts = options(peer.port, poll_s=0.5, **settings("2c", tmp_path))
        source = SnmpSource(opts, ups="rack-a", clock=boottime_s, profiles=PROFILES)
        task = asyncio.get_running_loop().create_task(source.run(heard.put_nowait))
        async with asyncio.timeout(60):
            while not isinstance(first := await heard.get(), Reading):  # snmpd may be late on a busy machine
                pass
            assert first.output_source is OutputSource.UTILITY
            await peer.set(f"{A}.4.1.1.0", "i", "3")
            await peer.set(f"{A}.2.1.2.0", "t", "700")
            source.poll_now()
            while not isinstance(event := await heard.get(), Reading) or event.on_battery_s != 7:
                pass
            assert event.output_source is OutputSource.BATTERY
    async with asyncio.timeout(60):
        while not isinstance(failed := await heard.get(), SourceFailed) or not failed.lost:
            pass
    assert "no answer from" in failed.reason
    task.cancel()
    await asyncio.wait([task])


async def test_a_set_through_our_port(tmp_path: Path) -> None:
    async with snmpd(without_system("rfc1628")) as peer:
        port = CardPort(options(peer.port, timeout_s=5.0, community=secret(tmp_path, "w", WRITE_COMMUNITY)))
        await port.set({f"{U}.8.2.0": Typed("integer", 120)})
        assert await port.get([f"{U}.8.2.0"]) == {f"{U}.8.2.0": 120}
        with pytest.raises(SnmpError, match=rf"for {U}\.99\.0$"):
            await port.set({f"{U}.99.0": Typed("integer", 1)})
        await port.close()


@pytest.mark.slow
async def test_wrong_secrets_against_snmpd(tmp_path: Path) -> None:
    wrong = secret(tmp_path, "wrong", "wrongpass-of-the-tests")
    good = settings(3, tmp_path)
    async with snmpd(without_system("apc"), ticks=TICKS) as peer:
        for bad, hint in (
            ({**good, "auth": wrong}, "the auth passphrase or auth_protocol is not the card's"),
            ({**good, "priv": wrong}, "check address, user, priv passphrase"),
            ({**good, "user": "nobody"}, "the card knows no user 'nobody'"),
            ({"community": wrong}, "check address, community, ACL of the card"),
        ):
            with pytest.raises(SnmpError) as caught:
                await probe(options(peer.port, **bad), profiles=PROFILES)
            assert hint in str(caught.value)
            assert "of-the-tests" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["-v1", "-c", "public"],
        ["-v2c", "-c", "public"],
        ["-v3", "-u", "pg", "-l", "authPriv", "-a", "SHA", "-A", AUTH, "-x", "AES", "-X", PRIV],
    ],
    ids=["v1", "v2c", "v3"],
)
async def test_net_snmp_understands_the_simulated_card(words: list[str]) -> None:
    """The card of the demo speaks SNMP to others as well, not only to our own port."""
    user = SimUser(name="pg", auth=AUTH.encode(), priv=PRIV.encode())
    values = table("apc")

    async def ask(program: str, agent: SnmpAgent, *rest: str) -> str:
        argv = [require(program), *words, "-M", "", "-m", "", "-On", "-r", "3", "-t", "5", f"127.0.0.1:{agent.port}"]
        child = await asyncio.create_subprocess_exec(
            *argv, *rest, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        stdout, _ = await child.communicate()
        return stdout.decode()

    async with SnmpAgent(lambda: values, user=user) as agent:
        assert f".{A}.2.2.3.0 = INTEGER: 174000" in await ask("snmpget", agent, f".{A}.2.2.3.0")
        said = await ask("snmpwalk", agent, f".{A}")
    lines = [line for line in said.splitlines() if line.startswith(f".{A}") and "No more variables" not in line]
    assert len(lines) == sum(oid.startswith(A) for oid in values)
    assert f".{A}.4.1.1.0 = INTEGER: 2" in lines
