"""Who arms each way back that the settings name. A host that names none loads none of them."""

from collections.abc import Callable
from pathlib import Path

from powerguard.clock import Clock
from powerguard.core.actions import Way
from powerguard.core.frozen import replace
from powerguard.core.policy import Policy
from powerguard.effectors.base import Effector
from powerguard.settings.schema import Settings


def ways_of(
    settings: Settings, *, clock: Clock, wall: Callable[[], float], boot: str, armed: bool
) -> dict[Way, Effector]:
    """Return the effector of each way. armed: False in dry-run: they look, and arm nothing."""
    ways: dict[Way, Effector] = {}
    folder = Path(settings.journal.path).parent
    if outputs_of(settings):
        from powerguard.daemon.outputs import output_effector  # noqa: PLC0415 - only for who has one

        ways[Way.OUTPUT] = output_effector(settings, clock=clock, boot=boot, armed=armed)
    if settings.rtc.kind == "device":
        from powerguard.effectors.rtc import RtcEffector  # noqa: PLC0415 - likewise

        ways[Way.RTC] = RtcEffector(settings.rtc, kept=folder / "rtc-alarm.json", armed=armed, clock=clock, wall=wall)
    if settings.sentinel.kind == "http":
        from powerguard.effectors.sentinel.effector import SentinelEffector  # noqa: PLC0415 - likewise

        feeds = tuple(settings.feeding)
        ways[Way.SENTINEL] = SentinelEffector(
            settings.sentinel, feeds=feeds, armed=armed, clock=clock, boot=lambda: boot
        )
    if settings.bmc.watchdog:
        from powerguard.effectors.bmc.drilled import DrillFile  # noqa: PLC0415 - likewise
        from powerguard.effectors.bmc.watchdog import WatchdogEffector  # noqa: PLC0415 - likewise

        ways[Way.WATCHDOG] = WatchdogEffector(settings.bmc, DrillFile(folder), armed=armed, clock=clock)
    return ways


def outputs_of(settings: Settings) -> tuple[str, ...]:
    """Return the UPSes whose output this host, and no other, switches off."""
    return tuple(name for name in settings.feeding if settings.ups[name].output_off is not None)


def with_ways(policy: Policy, settings: Settings, ways: dict[Way, Effector], *, checks_host: bool) -> Policy:
    """Return the policy with what there is to come back by. checks_host: somebody looks at the host after a return."""
    return replace(
        policy,
        ways=tuple(way for way in Way if way in ways),
        outputs=outputs_of(settings),
        late_reboot=settings.host.kind == "systemd" and settings.host.late_reboot,
        checks_host=checks_host,
    )
