"""Who orders the outputs of this host's UPSes off: the effector of way B, made of the settings."""

from pathlib import Path
from typing import Final

from powerguard.clock import Clock
from powerguard.effectors.ups.effector import Opening, OutputEffector
from powerguard.effectors.ups.options import OutputOffOptions
from powerguard.effectors.ups.sent import Notes
from powerguard.settings.output_off import sender
from powerguard.settings.schema import Settings
from powerguard.sources.nut_options import NutOptions
from powerguard.sources.snmp_options import SnmpOptions

GUARD_S: Final = 30.0
"""The output goes off no sooner than this after the host is powered off hard (DESIGN 4.5)."""


def output_effector(settings: Settings, *, clock: Clock, boot: str, armed: bool) -> OutputEffector:
    """Return it, for the UPSes of which this host is the sender. armed: False: it looks, and orders nothing."""
    outputs = {name: opening for name in settings.feeding if (opening := _opening(settings, name, clock)) is not None}
    return OutputEffector(
        outputs,
        notes=Notes(Path(settings.journal.path).parent),
        clock=clock,
        boot=boot,
        least_s=settings.host.force_after_s + GUARD_S,
        armed=armed,
    )


def _opening(settings: Settings, name: str, clock: Clock) -> Opening | None:
    """Make it. What a protocol needs is loaded here, so that a host without it pays nothing (ciphers: 6 MB)."""
    wanted = settings.ups[name].output_off
    by = None if wanted is None else sender(settings.ups[name].sources, wanted)
    if wanted is None or by is None:
        return None
    return _by_snmp(by, wanted, clock) if isinstance(by, SnmpOptions) else _by_nut(by, wanted)


def _by_snmp(by: SnmpOptions, wanted: OutputOffOptions, clock: Clock) -> Opening:
    from powerguard.effectors.ups import by_snmp  # noqa: PLC0415 - see above
    from powerguard.sources import snmp_control  # noqa: PLC0415 - see above

    return by_snmp.opening(lambda: snmp_control.opened(by, wanted.community), wanted, clock)


def _by_nut(by: NutOptions, wanted: OutputOffOptions) -> Opening:
    from powerguard.effectors.ups import by_nut  # noqa: PLC0415 - see above
    from powerguard.sources import nut_control  # noqa: PLC0415 - see above

    return by_nut.opening(lambda: nut_control.opened(by), wanted)
