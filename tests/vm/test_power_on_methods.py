"""Power-on methods on a whole virtual host: a real kernel with its own drivers, our root programs, a BMC, an AC plug.

The helper's words go through the kernel's KCS driver to OpenIPMI's simulated BMC, and the alarm through the kernel's
clock driver to QEMU's clock. QEMU ends when its machine goes off, so no clock wakes it then: the alarm is proven as far
as that goes, by waking the machine from a sleep.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from powerguard.clock import boottime_s
from powerguard.effectors.bmc.ipmi import Timer
from powerguard.effectors.bmc.power import power_of
from tests.peers.ipmi import options
from tests.vm.chassis import Chassis

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.peer("qemu-system-x86_64", "mmdebstrap", "ipmi_sim", "ipmitool", "cc"),
]
OFF_S = 3.0
"""A machine that is to stay off is looked at for so long; every order that would start it is given within it."""
ARMED = "the BMC's watchdog was left armed by the boot before this one: it is stopped"


@asynccontextmanager
async def booted(policy: str = "always-off") -> AsyncIterator[Chassis]:
    """A chassis whose machine somebody has switched on, and which is up."""
    async with Chassis(policy=policy) as chassis:
        chassis.press()
        await chassis.is_up()
        yield chassis


async def timer(chassis: Chassis) -> Timer:
    """The BMC's watchdog timer as the guest's helper reads it."""
    return Timer.decode(bytes.fromhex((await chassis.helper("watchdog"))["timer"]))


async def test_the_watchdog_brings_a_host_back_that_never_lost_ac_and_the_next_boot_stops_it() -> None:
    async with booted() as chassis:
        assert await chassis.says("cat /run/disarm") == "=0"  # nothing was armed before the first boot
        armed = await chassis.helper("arm --in-s 15")
        assert (armed["failure"], armed["changed"]) == (None, True)
        await chassis.power_off()
        await chassis.is_on(limit_s=60)
        assert chassis.bmc.orders == ["power 1"]
        await chassis.is_up()
        assert ARMED in await chassis.says("cat /run/disarm")
        result = await timer(chassis)
        assert (result.is_ours, result.running, result.expired) == (
            False,
            False,
            True,
        )  # stopped, and it reports that it fired

        # Back by another way before it fires: without powerguard-disarm the power would be cycled under the host.
        assert (await chassis.helper("arm --in-s 1200"))["changed"]
        await chassis.power_off()
        chassis.press()
        await chassis.is_up()
        assert ARMED in await chassis.says("cat /run/disarm")
        result = await timer(chassis)
        assert (result.is_ours, result.running, result.expired) == (False, False, False)
        assert (await chassis.helper("disarm"))["changed"] is False

        # The kernel's own driver stops the timer at each power-off: the way is refused, and the timer left alone.
        await chassis.says("insmod /lib/modules/ipmi_watchdog.ko")
        assert "the timer is its own" in await chassis.says("/usr/lib/powerguard/powerguard-disarm")
        assert (await chassis.helper("arm --in-s 1200"))["failure"] == "held"


async def test_always_on_starts_the_host_at_acs_return_and_without_one_only_a_sentinel_does(tmp_path: Path) -> None:
    async with booted() as chassis:
        assert (await chassis.helper("ensure"))["changed"] is True
        assert "always-on" in await chassis.ipmitool("chassis", "status")
        # The race: off in order, and AC was never lost. The policy alone does nothing.
        await chassis.power_off()
        await chassis.stays_off(OFF_S)
        sentinel = power_of(options(tmp_path, chassis.bmc.port, chassis.bmc.user, chassis.bmc.password))
        await sentinel.power_on(boottime_s() + 8.0)
        await chassis.is_up()
        assert set(chassis.bmc.orders) == {"power 1"}  # IPMI repeats an order whose answer is late.
        # A UPS that cycles its output makes of the race an outage, and the policy acts.
        await chassis.power_off()
        await chassis.cut()
        await chassis.stays_off(OFF_S)
        await chassis.restore()
        await chassis.is_up()
        # Not in order either: AC is lost under a running host.
        first = chassis.pid
        await chassis.cut()
        assert chassis.pid is None
        await chassis.restore()
        await chassis.is_up()
        assert chassis.pid not in {None, first}
        # As it was before the outage: whoever wants a host that stays off gets one.
        assert (await chassis.helper("restore --policy always-off"))["changed"] is True
        await chassis.cut()
        await chassis.restore()
        await chassis.stays_off(OFF_S)


async def alarm(chassis: Chassis, *words: str) -> dict[str, Any]:
    return dict(json.loads(await chassis.says(f"/usr/lib/powerguard-test/alarm {' '.join(words)}")))


async def test_the_alarm_that_we_set_reads_back_everywhere_and_wakes_a_sleeping_machine() -> None:
    async with booted() as chassis:
        result = await alarm(chassis, "on", "7200")
        assert (result["has"], result["read"], result["on"]) == (True, result["at"], True)
        at = datetime.fromisoformat(result["at"]).replace(tzinfo=UTC)
        assert await chassis.says("cat /sys/class/rtc/rtc0/wakealarm") == f"{at.timestamp():.0f}"
        assert (await alarm(chassis, "off", "7200"))["on"] is False
        assert not await chassis.says("cat /sys/class/rtc/rtc0/wakealarm")

        result = await alarm(chassis, "on", "20")
        at = datetime.fromisoformat(result["at"]).replace(tzinfo=UTC)
        events: dict[str, float] = {}
        async with asyncio.TaskGroup() as tasks:
            asleep = tasks.create_task(chassis.run("echo mem >/sys/power/state", limit_s=120))
            async with asyncio.timeout(120), aclosing(chassis.qmp()) as qmp:
                async for event in qmp:
                    if event.get("event") in {"SUSPEND", "WAKEUP"}:
                        events[event["event"]] = event["timestamp"]["seconds"]
                    if "WAKEUP" in events:
                        break
            asleep.cancel()
        assert events["SUSPEND"] < at.timestamp() <= events["WAKEUP"]
