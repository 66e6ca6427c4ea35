"""The demo's card is one: powerguard's client and net-snmp read it in both versions, and what it lacks is absent."""

import asyncio
import socket

import pytest

from powerguard.sim.snmp_agent import SnmpAgent
from powerguard.sim.snmp_values import gauge, integer, octets, oid, timeticks
from powerguard.ups.profiles.vocabulary import Missing
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.port import CardPort

A = "1.3.6.1.4.1.318.1"
TABLE = {
    f"{A}.1.0": octets("Smart-UPS"),
    f"{A}.2.0": integer(-7),
    f"{A}.3.0": gauge(4_000_000_000),
    f"{A}.10.0": timeticks(360_000),
    f"{A}.11.0": oid("1.3.6.1.4.1.318"),
}
ANSWERS = {
    f"{A}.1.0": b"Smart-UPS",
    f"{A}.2.0": -7,
    f"{A}.3.0": 4_000_000_000,
    f"{A}.10.0": 360_000,
    f"{A}.11.0": "1.3.6.1.4.1.318",
}


@pytest.mark.parametrize("version", [1, "2c"])
async def test_our_client_reads_it(version: int | str) -> None:
    async with SnmpAgent(lambda: TABLE) as agent:
        port = CardPort(
            SnmpOptions.model_validate({"kind": "snmp", "host": "127.0.0.1", "port": agent.port, "version": version})
        )
        try:
            result = await port.get([*TABLE, f"{A}.2.1", f"{A}.4.0"])
            assert isinstance(result.pop(f"{A}.2.1"), Missing)
            assert isinstance(result.pop(f"{A}.4.0"), Missing)
            assert result == ANSWERS
            assert await port.walk(A) == ANSWERS
        finally:
            await port.close()


@pytest.mark.peer("snmpwalk")
@pytest.mark.parametrize("version", ["1", "2c"])
async def test_net_snmp_reads_it(version: str) -> None:
    async with SnmpAgent(lambda: TABLE) as agent:
        child = await asyncio.create_subprocess_exec(
            *("snmpwalk", f"-v{version}", "-c", "public", "-On", "-Oe", f"127.0.0.1:{agent.port}", A),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await child.communicate()
    lines = out.decode().splitlines()
    assert [line.partition(" = ")[0] for line in lines[: len(TABLE)]] == [f".{name}" for name in TABLE]
    assert lines[0].endswith('STRING: "Smart-UPS"')


@pytest.mark.parametrize("message", [b"", b"\x30\x03\x02\x01\x03", b"\x30\x80" * 500])
async def test_what_it_does_not_understand_is_not_answered(message: bytes) -> None:
    async with SnmpAgent(lambda: TABLE) as agent:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            asker.setblocking(False)
            asker.connect(("127.0.0.1", agent.port))
            await loop.sock_sendall(asker, message)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(loop.sock_recv(asker, 100), 0.2)
