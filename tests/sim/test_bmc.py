"""The simulated BMC is one: programs that are not ours read it, it keeps its memory, and it ends with its parent."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from powerguard.effectors.bmc.effector import BmcEffector
from powerguard.effectors.bmc.ipmi import PowerRestorePolicy, RestartCause
from tests.peers.ipmi import ENSURE, FreeIpmi, options, read_with_ipmitool
from tests.peers.sim_bmc import Faults, SimBmc, SimBmcError

USER, PASSWORD = "powerguard", "Owl-Trap-Nine-42"
LIMIT_S = 60.0
"""For one operation: each starts a process, which takes seconds on a busy machine."""


@pytest.mark.peer("ipmitool", "ipmi-chassis", "ipmi-config")
async def test_ipmitool_and_freeipmi_read_and_change_it(tmp_path: Path) -> None:
    """What our effector set is read by three tools, and what they set is what we hold."""
    async with SimBmc(USER, PASSWORD) as bmc:
        assert await read_with_ipmitool(tmp_path, bmc.port, USER, PASSWORD) == "previous"
        await BmcEffector(options(tmp_path, bmc.port, USER, PASSWORD), limit_s=LIMIT_S).carry_out(ENSURE)
        other = FreeIpmi(tmp_path, bmc.port, USER, PASSWORD)
        assert await read_with_ipmitool(tmp_path, bmc.port, USER, PASSWORD) == "always-on"
        assert await other.chassis_policy() == "Always on"
        assert await other.config_policy() == "On_State_AC_Apply"
        await other.set_policy("Off_State_AC_Apply")
        await bmc.wait_until(lambda: bmc.policy == "always-off", LIMIT_S)


STOCK_SERVER = """
import sys
from pyghmi.ipmi.bmc import Bmc
from pyghmi.ipmi.private import session

class Stock(Bmc):
    def get_power_state(self):
        return "on"

session.myself = "127.0.0.1"
bmc = Stock({"operator": sys.stdin.readline().strip()}, port=0, address="127.0.0.1")
bmc.port = bmc.serversocket.getsockname()[1]
print(bmc.port, flush=True)
for _ in range(2400):
    session.Session.wait_for_rsp(0.05)
"""
"""pyghmi's own server, without our changes: it answers every proposal with cipher suite 3. It ends after 2 minutes."""


async def test_a_bmc_that_answers_with_another_cipher_suite_is_read(tmp_path: Path) -> None:
    """Suite 17 is asked for and suite 3 is answered: the login goes on with what the BMC names."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STOCK_SERVER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(f"{PASSWORD}\n".encode())
        port = int(await child.stdout.readline())
        seen = await BmcEffector(options(tmp_path, port, "operator", PASSWORD)).probe(LIMIT_S)
        assert seen.status.power_on is True
    finally:
        child.kill()
        await child.wait()


async def test_its_memory_outlives_it(tmp_path: Path) -> None:
    """A BMC keeps its policy over a loss of AC; the file wins over the default."""
    kept = tmp_path / "bmc.json"
    async with SimBmc(USER, PASSWORD, state_file=kept) as bmc:
        mine = BmcEffector(options(tmp_path, bmc.port, USER, PASSWORD), limit_s=LIMIT_S)
        await mine.carry_out(ENSURE)
        await bmc.wait_until(lambda: bmc.policy == "always-on", LIMIT_S)
        assert (await mine.probe(LIMIT_S)).restart_cause is RestartCause.UNKNOWN
    assert json.loads(kept.read_text()) == {"policy": "always-on"}
    async with SimBmc(USER, PASSWORD, policy="always-off", state_file=kept) as bmc:
        assert bmc.policy == "always-on"
        seen = await BmcEffector(options(tmp_path, bmc.port, USER, PASSWORD)).probe(LIMIT_S)
        assert (seen.status.policy, seen.restart_cause) == ("always-on", RestartCause.POLICY_ALWAYS_ON)
        assert seen.status.ac_failed is True


async def test_faults_come_and_go_while_it_runs(tmp_path: Path) -> None:
    """Dead, then alive, on the same port."""
    async with SimBmc(USER, PASSWORD) as bmc:
        mine = BmcEffector(options(tmp_path, bmc.port, USER, PASSWORD), limit_s=LIMIT_S)
        await bmc.set_faults(Faults(refuse=0xC1))
        assert (await mine.probe(LIMIT_S)).supported is None
        await bmc.set_faults(Faults())
        assert (await mine.probe(LIMIT_S)).supported == frozenset(PowerRestorePolicy) - {PowerRestorePolicy.UNKNOWN}


async def test_a_taken_port_is_an_error_that_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Two BMCs on one port: the second says so and does not start."""
    async with SimBmc(USER, PASSWORD) as bmc:
        with pytest.raises(SimBmcError, match="did not start"):
            async with SimBmc(USER, PASSWORD, port=bmc.port):
                pass
        assert f"UDP port {bmc.port} on 127.0.0.1: Address already in use" in capfd.readouterr().err


async def test_it_can_be_started_by_hand_and_ends_with_its_parent(tmp_path: Path) -> None:
    """`python -m powerguard.sim.bmc`, credentials on stdin; the end of stdin is its end."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "powerguard.sim.bmc"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps({"user": USER, "password": PASSWORD}).encode() + b"\n")
    async with asyncio.timeout(2 * LIMIT_S):
        first = json.loads(await child.stdout.readline())
        status = await BmcEffector(options(tmp_path, first["port"], USER, PASSWORD)).status(LIMIT_S)
        assert status.policy == first["policy"] == "last-state"
        child.stdin.close()
        await child.stdout.read()
        assert await child.wait() == 0


async def test_it_wants_credentials(capfd: pytest.CaptureFixture[str]) -> None:
    """Without them it says what it wants, and never repeats what it was given."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "powerguard.sim.bmc", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(2 * LIMIT_S):
        await child.communicate(b'{"user": "somebody", "pass": "Owl-Trap"}\n')
    stderr = capfd.readouterr().err
    assert child.returncode == 1
    assert 'wants {"user": ..., "password": ...} as first line (KeyError)' in stderr
    assert "Owl-Trap" not in stderr
