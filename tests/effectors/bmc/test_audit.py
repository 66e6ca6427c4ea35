"""What doctor finds of a BMC's own security: OpenIPMI's ipmi_sim is open by default, pyghmi's server is not."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.clock import boottime_s
from powerguard.effectors.bmc import findings as audit
from powerguard.effectors.bmc.findings import AnonymousAccess, findings
from powerguard.effectors.host.findings import Finding
from powerguard.effectors.options import BmcOptions
from tests.peers import require
from tests.peers.ipmi import IpmiSim, free_udp_port, keep_secret, options, run_tool
from tests.peers.machine import watched
from tests.peers.sim_bmc import SimBmc

USER, PASSWORD = "powerguard", "Owl-Trap-Nine-42"
SILENT = AnonymousAccess(cipher_0=None, cipher_17=None, anonymous=None, null_user=None)


@asynccontextmanager
async def answering(answer: Callable[[bytes], bytes]) -> AsyncIterator[int]:
    """A UDP port that answers each packet as it is told to."""

    class Answers(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            self.transport.sendto(answer(data), addr)

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Answers, local_addr=("127.0.0.1", 0))
    try:
        yield transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


async def looked(port: int) -> AnonymousAccess:
    """Look until all is answered: where others have taken the cores, a BMC may need more than its 1.6 s."""
    for _ in range(5):
        seen = await audit.look("127.0.0.1", port)
        if None not in astuple(seen):
            break
    return seen


async def found_by(given: BmcOptions, *expected: str) -> list[Finding]:
    """What is found, asked likewise."""
    for _ in range(5):
        found = await findings(given, limit_s=20.0)
        if tuple(each.verdict for each in found) == expected:
            break
    return found


def strangers_welcome(packet: bytes) -> bytes:
    """Refuses every proposal, and says of logins: no name and no password needed (IPMI 2.0 table 22-15)."""
    if packet[4] == 6:
        return b"\x06\x00\xff\x07\x06\x11" + bytes(8) + b"\x08\x00" + packet[16:17] + b"\x11" + bytes(6)
    message = b"\x81\x1c\x63\x20\x00\x38\x00\x01\x80\x07\x02" + bytes(5)
    return b"\x06\x00\xff\x07" + bytes(9) + bytes([len(message)]) + message


@given(st.binary(max_size=64) | st.binary(max_size=48).map(lambda more: b"\x06\x00\xff\x07" + more))
def test_any_packet_is_read_or_passed_over(packet: bytes) -> None:
    """Anybody may send us one."""
    assert audit.is_accepted(packet, 7) in {None, True, False}
    status = audit.login_status(packet)
    assert status is None or 0 <= status <= 255


@pytest.mark.peer("ipmi_sim", "ipmitool")
async def test_an_open_bmc_is_found_out_without_a_login(tmp_path: Path) -> None:
    """ipmi_sim takes cipher suite 0, which ipmitool proves with a wrong password; no command of ours reaches it."""
    async with IpmiSim(plugin=True) as bmc:
        seen = await looked(bmc.port)
        assert seen == AnonymousAccess(cipher_0=True, cipher_17=False, anonymous=False, null_user=False)
        assert bmc.heard == []
        wrong = keep_secret(tmp_path / "wrong", "not-the-password")
        words = ["-I", "lanplus", "-C", "0", "-L", "OPERATOR", "-H", "127.0.0.1", "-p", str(bmc.port), "-U", bmc.user]
        assert "System Power" in await run_tool(require("ipmitool"), *words, "-f", str(wrong), "chassis", "status")
        found = await found_by(options(tmp_path, bmc.port, bmc.user, bmc.password), "WARN", "FAIL", "WARN")
        assert [(each.name, each.verdict) for each in found] == [
            ("bmc", "WARN"),
            ("bmc.security", "FAIL"),
            ("bmc.security", "WARN"),
        ]
        assert "cipher suite 0 is accepted" in found[1].text
        assert "cipher suite 17" in found[2].text
        assert "set" not in bmc.heard[1:] or bmc.policy == "always-off", "doctor changes nothing"


@pytest.mark.peer("ipmi_sim")
async def test_an_account_that_may_too_much_is_reported(tmp_path: Path) -> None:
    async with IpmiSim(plugin=True, level="admin") as bmc:
        found = await found_by(options(tmp_path, bmc.port, bmc.user, bmc.password), "WARN", "FAIL", "WARN", "WARN")
        assert "account powerguard has more privilege than Operator (level 4)" in found[-1].text


async def test_a_closed_bmc_passes(tmp_path: Path) -> None:
    """pyghmi's server: suite 3 only, named users only; it knows no accounts to be asked about."""
    async with SimBmc(USER, PASSWORD, policy="always-on") as bmc:
        assert await looked(bmc.port) == AnonymousAccess(
            cipher_0=False, cipher_17=False, anonymous=False, null_user=False
        )
        found = await found_by(options(tmp_path, bmc.port, USER, PASSWORD), "PASS", "WARN")
        assert [each.verdict for each in found] == ["PASS", "WARN"]
        assert "always-on: the host comes back with the power" in found[0].text


async def test_anonymous_login_is_found(tmp_path: Path) -> None:
    """A BMC that does not let us in, and anybody else: both are told."""
    async with answering(strangers_welcome) as port:
        assert await looked(port) == AnonymousAccess(cipher_0=False, cipher_17=False, anonymous=True, null_user=True)
        found = await findings(options(tmp_path, port, USER, PASSWORD), limit_s=1.0)
        assert [each.verdict for each in found] == ["FAIL", "FAIL", "WARN"]
        assert "anonymous login is on" in found[1].text


async def test_silence_and_nonsense_end_in_time() -> None:
    """Nobody listens; somebody takes everything and says nothing; somebody repeats what he hears."""
    async with watched() as machine:
        began_s = boottime_s()
        await silence_and_nonsense()
        assert boottime_s() - began_s < 10.0 + machine.late_s


async def silence_and_nonsense() -> None:
    assert await audit.look("127.0.0.1", free_udp_port()) == SILENT
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind(("127.0.0.1", 0))
        assert await audit.look("127.0.0.1", hole.getsockname()[1]) == SILENT
    async with answering(lambda packet: packet) as port:
        assert await audit.look("127.0.0.1", port) == SILENT


async def test_in_band_alone_has_no_network_to_look_at(tmp_path: Path) -> None:
    found = await findings(BmcOptions(kind="in-band", socket=str(tmp_path / "none.sock")))
    assert [(each.name, each.verdict) for each in found] == [("bmc", "FAIL")]
    assert await findings(BmcOptions(kind="none")) == []
