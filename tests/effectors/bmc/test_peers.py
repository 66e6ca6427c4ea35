"""The effector against OpenIPMI's ipmi_sim, checked with ipmitool and FreeIPMI: none of them shares code with us.

What is said inside a session is the same with both libraries; where they differ (logins, silence), both are tried.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.actions import RestorePolicy
from powerguard.effectors.bmc import ipmi
from powerguard.effectors.bmc.effector import BmcEffector, BmcError
from powerguard.effectors.bmc.ipmi import (
    RESET_WATCHDOG,
    BmcFailure,
    Command,
    Device,
    Exchange,
    Failure,
    Pace,
    PowerRestorePolicy,
    Timer,
)
from tests.peers.ipmi import ENSURE, FreeIpmi, IpmiSim, failing, options, read_with_ipmitool, until_heard

pytestmark = pytest.mark.peer("ipmi_sim")


def effector(tmp_path: Path, bmc: IpmiSim, *, limit_s: float = 15.0, password: str | None = None) -> BmcEffector:
    secret = bmc.password if password is None else password
    return BmcEffector(options(tmp_path, bmc.port, bmc.user, secret), limit_s=limit_s)


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
        seen = await mine.probe(15.0)
        assert (seen.status.policy, seen.supported, seen.restart_cause) == ("always-off", None, None)
        assert await mine.power_watts(15.0) is None


@pytest.mark.parametrize("before", ["always-off", "last-state"])
async def test_the_policy_is_set_verified_and_outlives_the_bmc(tmp_path: Path, before: str) -> None:
    """Set, read back; after the BMC itself lost power it still holds, and then nothing is written."""
    for heard in until_heard(["status", "set", "status", "status"]):
        async with IpmiSim(plugin=True, policy=before) as bmc:
            mine = effector(tmp_path, bmc)
            detail = dict(await mine.carry_out(ENSURE))
            assert (detail["before"], detail["policy"], detail["verified"], detail["changed"]) == (
                before,
                "always-on",
                True,
                True,
            )
            await bmc.restart()
            detail = dict(await mine.carry_out(ENSURE))
            assert (detail["before"], detail["changed"]) == ("always-on", False)
            heard.extend(bmc.heard)
            assert (await mine.probe(15.0)).supported == frozenset(PowerRestorePolicy) - {PowerRestorePolicy.UNKNOWN}


@pytest.mark.peer("ipmitool", "ipmi-chassis", "ipmi-config")
async def test_others_read_what_we_set_and_we_find_what_others_changed(tmp_path: Path) -> None:
    """ipmitool and both FreeIPMI tools read always-on; a change behind our back is put right; what was is put back."""
    async with IpmiSim(plugin=True) as bmc:
        mine = effector(tmp_path, bmc)
        other = FreeIpmi(tmp_path, bmc.port, bmc.user, bmc.password)
        await mine.carry_out(ENSURE)
        assert await read_with_ipmitool(tmp_path, bmc.port, bmc.user, bmc.password) == "always-on"
        assert await other.chassis_policy() == "Always on"
        assert await other.config_policy() == "On_State_AC_Apply"
        await other.set_policy("Restore_State_AC_Apply")
        assert bmc.policy == "last-state"
        detail = dict(await mine.carry_out(ENSURE))
        assert (detail["before"], detail["changed"]) == ("last-state", True)
        assert bmc.policy == "always-on"
        bracket = options(tmp_path, bmc.port, bmc.user, bmc.password).model_copy(update={"policy": "bracket"})
        back = RestorePolicy(id="back-1", by_s=1e9, outage="outage-1", policy="last-state")
        detail = dict(await BmcEffector(bracket, limit_s=15.0).carry_out(back))
        assert (detail["before"], detail["policy"], detail["changed"]) == ("always-on", "last-state", True)
        assert await read_with_ipmitool(tmp_path, bmc.port, bmc.user, bmc.password) == "previous"


async def set_once(tmp_path: Path, *, lie: bool = False, code: int = 0) -> BmcError:
    """See it fail after one set."""
    for heard in until_heard(["set"]):
        async with IpmiSim(plugin=True) as bmc:
            bmc.misbehave(lie=lie, code=code)
            error = await failure_of(effector(tmp_path, bmc))
            heard.extend(word for word in bmc.heard if word == "set")
    return error


async def test_an_acknowledged_lie_is_found_out(tmp_path: Path) -> None:
    """Acknowledged, not stored."""
    error = await set_once(tmp_path, lie=True)
    assert error.failure is Failure.MISMATCH
    assert "acknowledged always-on but still reads always-off 2 s later" in str(error)


@pytest.mark.parametrize(
    ("code", "failure"),
    [(0xC1, Failure.UNSUPPORTED), (0xCC, Failure.UNSUPPORTED), (0xD4, Failure.PRIVILEGE), (0xFF, Failure.PROTOCOL)],
)
async def test_a_refused_set_is_sent_once(tmp_path: Path, code: int, failure: Failure) -> None:
    """Whatever the board's reason is, it is not hammered."""
    error = await set_once(tmp_path, code=code)
    assert error.failure is failure
    assert f"0x{code:02X}" in str(error)


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
        assert dict(await effector(tmp_path, bmc, limit_s=40.0).carry_out(ENSURE))["verified"] is True


@pytest.mark.parametrize("status_bytes", [1, 2, 4, 12])
async def test_short_and_long_status_answers_are_read(tmp_path: Path, status_bytes: int) -> None:
    """Boards cut and stretch them; the policy is in the first byte."""
    async with IpmiSim(plugin=True) as bmc:
        bmc.misbehave(status_bytes=status_bytes)
        detail = dict(await effector(tmp_path, bmc).carry_out(ENSURE))
        assert (detail["verified"], detail["ac_failed"]) == (True, None if status_bytes == 1 else False)


async def test_a_wrong_password_and_an_unknown_user(tmp_path: Path) -> None:
    """Both are an authentication failure, at once and told as such."""
    async with IpmiSim(plugin=True) as bmc:
        error = await failure_of(effector(tmp_path, bmc, password="wrong"))
        assert error.failure is Failure.AUTH
        assert "check bmc.user and bmc.password" in str(error)
        unknown = BmcEffector(options(tmp_path, bmc.port, "nobody", bmc.password), limit_s=15.0)
        assert (await failure_of(unknown)).failure is Failure.AUTH
        assert bmc.heard == []


async def test_a_bmc_that_is_stopped_before_the_login(tmp_path: Path) -> None:
    """Its socket is there and takes packets, nobody reads them; afterwards it works again."""
    async with IpmiSim(plugin=True) as bmc:
        os.kill(bmc.pid, signal.SIGSTOP)
        error = await failing(lambda limit_s: effector(tmp_path, bmc, limit_s=limit_s), Failure.UNREACHABLE)
        assert error.failure is Failure.UNREACHABLE
        os.kill(bmc.pid, signal.SIGCONT)
        assert dict(await effector(tmp_path, bmc, limit_s=15.0).carry_out(ENSURE))["verified"] is True


async def test_a_bmc_that_is_stopped_in_mid_session(tmp_path: Path) -> None:
    """Silence after the login ends at the limit, with the command named."""
    for delay_ms, limit_s in ((1000, 7.0), (4000, 40.0)):  # the second, where it was not stopped within its delay
        async with IpmiSim(plugin=True) as bmc:
            bmc.misbehave(delay_ms=delay_ms)
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(failure_of(effector(tmp_path, bmc, limit_s=limit_s)))
                async with asyncio.timeout(60):
                    while "status" not in bmc.heard and not asked.done():  # noqa: ASYNC110 - a file tells nobody
                        await asyncio.sleep(0.01)
                os.kill(bmc.pid, signal.SIGSTOP)
        if "during Set Power Restore Policy" in str(asked.result()):
            break
    assert asked.result().failure is Failure.TIMEOUT
    assert "fell silent during Set Power Restore Policy" in str(asked.result())


async def test_openipmis_watchdog_is_armed_fires_and_says_so(tmp_path: Path) -> None:
    """Short answers, and bytes of its stack behind an acknowledgement: read all the same; it cuts the power.

    What disarms it leaves the flag that it has fired; a reset of somebody else's is left as it is.
    """
    async with IpmiSim(plugin=True) as bmc:
        with bmc.inside() as host:
            pace = Pace(clock=boottime_s, sleep=time.sleep, by_s=boottime_s() + 60.0)
            exchange = Exchange(host.send, pace)
            seen = ipmi.look(exchange)
            assert Device.decode(seen.device or b"") == Device(0x1291, 0xF02, "9.08", "00000000")
            assert (Timer.decode(seen.timer), seen.cause) == (Timer(False, 0, 0, expired=False, initial_s=0.0), None)
            with pytest.raises(BmcFailure, match="Reset Watchdog Timer refused with completion code 0x80"):
                exchange.ask(RESET_WATCHDOG)
            armed = Timer.decode(ipmi.arm(exchange, 1))
            assert (armed.is_ours, armed.initial_s, armed.present_s, armed.expired) == (True, 1.0, None, False)
            host.wait_for(host.POWER_OFF)
            result, changed = ipmi.disarm(exchange)
            assert changed
            assert Timer.decode(result) == Timer(False, 4, 0, expired=True, initial_s=10.0)
            assert ipmi.disarm(exchange) == (result, False)
            reset = Command("Set Watchdog Timer", 0x06, 0x24, bytes.fromhex("440100102823"))
            exchange.ask(reset)
            with pytest.raises(BmcFailure, match="another program") as caught:
                ipmi.arm(exchange, 1)
            assert caught.value.failure is Failure.HELD
            assert ipmi.disarm(exchange)[1] is False
            assert exchange.power_watts() is None
