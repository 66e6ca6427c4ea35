"""The effector against OpenIPMI's ipmi_sim, checked with ipmitool and FreeIPMI: none of them shares code with us."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from powerguard.effectors.bmc.effector import BmcEffector, BmcError
from powerguard.effectors.bmc.ipmi import Failure, PowerRestorePolicy
from tests.peers.ipmi import ENSURE, FreeIpmi, IpmiSim, options, read_with_ipmitool

pytestmark = pytest.mark.peer("ipmi_sim")


def effector(tmp_path: Path, bmc: IpmiSim, *, limit_s: float = 5.0, password: str | None = None) -> BmcEffector:
    given = options(tmp_path, bmc.port, bmc.user, bmc.password if password is None else password)
    return BmcEffector(given, limit_s=limit_s)


async def failure_of(bmc: BmcEffector) -> BmcError:
    with pytest.raises(BmcError) as caught:
        await bmc.carry_out(ENSURE)
    return caught.value


async def test_a_bmc_without_the_command_is_a_clear_alarm(tmp_path: Path) -> None:
    """ipmi_sim as Debian ships it refuses the set with 0xC1, like boards without a policy: told, and never verified."""
    async with IpmiSim(plugin=False) as bmc:
        mine = effector(tmp_path, bmc)
        error = await failure_of(mine)
        assert error.failure is Failure.UNSUPPORTED
        assert "Set Power Restore Policy refused with completion code 0xC1" in str(error)
        assert "set 'restore on AC power loss' to always on in its firmware setup" in str(error)
        seen = await mine.probe(5.0)
        assert (seen.status.policy, seen.supported, seen.restart_cause) == ("always-off", None, None)


@pytest.mark.parametrize("before", ["always-off", "last-state"])
async def test_the_policy_is_set_verified_and_outlives_the_bmc(tmp_path: Path, before: str) -> None:
    """Set, read back; after the BMC itself lost power it still holds, and then nothing is written."""
    async with IpmiSim(plugin=True, policy=before) as bmc:
        mine = effector(tmp_path, bmc)
        told = dict(await mine.carry_out(ENSURE))
        assert (told["before"], told["policy"], told["verified"], told["changed"]) == (before, "always-on", True, True)
        await bmc.restart()
        told = dict(await mine.carry_out(ENSURE))
        assert (told["before"], told["changed"]) == ("always-on", False)
        assert bmc.heard == ["status", "set", "status", "status"]
        assert (await mine.probe(5.0)).supported == frozenset(PowerRestorePolicy) - {PowerRestorePolicy.UNKNOWN}


@pytest.mark.peer("ipmitool", "ipmi-chassis", "ipmi-config")
async def test_others_read_what_we_set_and_we_find_what_others_changed(tmp_path: Path) -> None:
    """ipmitool and both FreeIPMI tools read always-on; a change behind our back is put right."""
    async with IpmiSim(plugin=True) as bmc:
        mine = effector(tmp_path, bmc)
        other = FreeIpmi(tmp_path, bmc.port, bmc.user, bmc.password)
        await mine.carry_out(ENSURE)
        assert await read_with_ipmitool(tmp_path, bmc.port, bmc.user, bmc.password) == "always-on"
        assert await other.chassis_policy() == "Always on"
        assert await other.config_policy() == "On_State_AC_Apply"
        await other.set_policy("Restore_State_AC_Apply")
        assert bmc.policy == "last-state"
        told = dict(await mine.carry_out(ENSURE))
        assert (told["before"], told["changed"]) == ("last-state", True)
        assert bmc.policy == "always-on"


async def test_an_acknowledged_lie_is_found_out(tmp_path: Path) -> None:
    """Acknowledged, not stored."""
    async with IpmiSim(plugin=True) as bmc:
        bmc.misbehave(lie=True)
        error = await failure_of(effector(tmp_path, bmc))
        assert error.failure is Failure.MISMATCH
        assert "acknowledged always-on but still reads always-off 2 s later" in str(error)
        assert bmc.heard.count("set") == 1


@pytest.mark.parametrize(
    ("code", "failure"),
    [(0xC1, Failure.UNSUPPORTED), (0xCC, Failure.UNSUPPORTED), (0xD4, Failure.PRIVILEGE), (0xFF, Failure.PROTOCOL)],
)
async def test_a_refused_set_is_sent_once(tmp_path: Path, code: int, failure: Failure) -> None:
    """Whatever the board's reason is, it is not hammered."""
    async with IpmiSim(plugin=True) as bmc:
        bmc.misbehave(code=code)
        error = await failure_of(effector(tmp_path, bmc))
        assert error.failure is failure
        assert f"0x{code:02X}" in str(error)
        assert bmc.heard.count("set") == 1


async def test_busy_twice_then_verified(tmp_path: Path) -> None:
    """0xC0 is asked again within the limit."""
    async with IpmiSim(plugin=True) as bmc:
        bmc.misbehave(busy=2)
        assert dict(await effector(tmp_path, bmc).carry_out(ENSURE))["verified"] is True
        assert bmc.heard.count("busy") == 2


async def test_a_slow_bmc_is_waited_for(tmp_path: Path) -> None:
    """Each answer takes 0.6 s, longer than pyghmi's first patience: still verified within the limit."""
    async with IpmiSim(plugin=True) as bmc:
        bmc.misbehave(delay_ms=600)
        assert dict(await effector(tmp_path, bmc, limit_s=15.0).carry_out(ENSURE))["verified"] is True


@pytest.mark.parametrize("status_bytes", [1, 2, 4, 12])
async def test_short_and_long_status_answers_are_read(tmp_path: Path, status_bytes: int) -> None:
    """Boards cut and stretch them; the policy is in the first byte."""
    async with IpmiSim(plugin=True) as bmc:
        bmc.misbehave(status_bytes=status_bytes)
        told = dict(await effector(tmp_path, bmc).carry_out(ENSURE))
        assert (told["verified"], told["ac_failed"]) == (True, None if status_bytes == 1 else False)


async def test_a_wrong_password_and_an_unknown_user(tmp_path: Path) -> None:
    """Both are an authentication failure, at once and told as such."""
    async with IpmiSim(plugin=True) as bmc:
        error = await failure_of(effector(tmp_path, bmc, password="wrong"))
        assert error.failure is Failure.AUTH
        assert "check bmc.user and bmc.password" in str(error)
        unknown = BmcEffector(options(tmp_path, bmc.port, "nobody", bmc.password))
        assert (await failure_of(unknown)).failure is Failure.AUTH
        assert bmc.heard == []


async def test_a_bmc_that_is_stopped_before_the_login(tmp_path: Path) -> None:
    """Its socket is there and takes packets, nobody reads them; afterwards it works again."""
    async with IpmiSim(plugin=True) as bmc:
        os.kill(bmc.pid, signal.SIGSTOP)
        error = await failure_of(effector(tmp_path, bmc, limit_s=2.5))
        assert error.failure is Failure.UNREACHABLE
        os.kill(bmc.pid, signal.SIGCONT)
        assert dict(await effector(tmp_path, bmc, limit_s=15.0).carry_out(ENSURE))["verified"] is True


async def test_a_bmc_that_is_stopped_in_mid_session(tmp_path: Path) -> None:
    """Silence after the login ends at the limit, with the command named."""
    async with IpmiSim(plugin=True) as bmc:
        bmc.misbehave(delay_ms=300)
        async with asyncio.TaskGroup() as group:
            failing = group.create_task(failure_of(effector(tmp_path, bmc, limit_s=3.5)))
            async with asyncio.timeout(5):
                while "status" not in bmc.heard:  # noqa: ASYNC110 - a file of another program tells nobody
                    await asyncio.sleep(0.01)
            os.kill(bmc.pid, signal.SIGSTOP)
        assert failing.result().failure is Failure.TIMEOUT
        assert "fell silent during Set Power Restore Policy" in str(failing.result())
