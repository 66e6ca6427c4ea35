"""What brought the host back: asked for once, by the first daemon of a boot that followed an outage, for its story.

The BMC knows what powered the host on, and whether AC had been gone; the firmware how long it took until the kernel,
where it keeps ACPI's FPDT or a boot loader of systemd's says so. Neither holds anything up; what is not told is told
as that.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from powerguard.core.events import PoweredOn
from powerguard.daemon.attempt import rest
from powerguard.daemon.stops import Host, story_of_return
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.engine import Probe
from powerguard.effectors.bmc.ipmi import RestartCause
from powerguard.effectors.child import Spawn

log = structlog.get_logger()

WhyOn = Callable[[float], Awaitable[Probe]]

LIMIT_S: Final = 10.0
AGAIN_AFTER_S: Final = 30.0
"""A BMC whose AC was gone starts with the host, and may still be at it."""
SYSTEMCTL_LIMIT_S: Final = 5.0
LONGEST_FIRMWARE_S: Final = 3600.0
_FIRMWARE: Final = "FirmwareTimestampMonotonic"
"""Of systemd's manager, microseconds: how long before the kernel the firmware began; 0 where that is not known."""


async def tell(host: Host, why_on: Callable[[], WhyOn | None], spawn: Spawn) -> None:
    """Feed what brought this host back, once; then there is nothing more to do in this boot.

    why_on: asks the BMC, within so many seconds; None where the settings have none.
    """
    if await story_of_return(host):
        probe, because = await _probe(why_on())
        event = PoweredOn(
            at_s=host.clock(),
            because=because,
            cause=_cause(probe),
            ac_failed=None if probe is None else probe.status.ac_failed,
            firmware_s=await firmware_s(spawn),
        )
        log.info("power_on_told", cause=event.cause, ac_failed=event.ac_failed, because=because)
        host.submit(event)
    await asyncio.Event().wait()


async def _probe(why_on: WhyOn | None) -> tuple[Probe | None, str]:
    if why_on is None:
        return None, "the settings name no BMC"
    because = ""
    for pause_s in (0.0, AGAIN_AFTER_S):
        if pause_s:
            await rest(pause_s)
        try:
            async with asyncio.timeout(LIMIT_S + 1.0):
                return await why_on(LIMIT_S), "the BMC tells it"
        except EffectorError as error:
            because = str(error)
        except TimeoutError:
            because = f"no answer within {LIMIT_S:g} s"
    return None, f"the BMC does not tell it: {because}"


def _cause(probe: Probe | None) -> str:
    if probe is None or probe.restart_cause in (None, RestartCause.UNKNOWN):
        return ""
    return str(probe.restart_cause)


async def firmware_s(spawn: Spawn) -> float | None:
    """Seconds from power-on to the kernel, as systemd knows them from the firmware; None where it does not."""
    try:
        ended = await spawn(["systemctl", "show", f"--property={_FIRMWARE}"], limit_s=SYSTEMCTL_LIMIT_S)
    except OSError:
        return None
    name, _, told = ended.stdout.decode("ascii", "replace").strip().partition("=")
    if ended.timed_out or ended.returncode != 0 or name != _FIRMWARE or not told.isdecimal():
        return None
    seconds = int(told) / 1e6
    return seconds if 0.0 < seconds <= LONGEST_FIRMWARE_S else None
