"""Whether the order that switches a UPS's output off can go the way that the settings name, and by which source."""

import contextlib
import ipaddress
from collections.abc import Sequence

from powerguard.effectors.ups.options import OutputOffOptions
from powerguard.sources.apcupsd_options import ApcupsdOptions
from powerguard.sources.nut_options import NutOptions
from powerguard.sources.snmp_options import SnmpOptions

Source = SnmpOptions | NutOptions | ApcupsdOptions


class UnfitError(ValueError):
    """An order that the sources cannot carry: a mistake that anything below the UPS may be the reason of."""


def sender(sources: Sequence[Source], wanted: OutputOffOptions) -> SnmpOptions | NutOptions | None:
    """Return the source that the order goes through; None where none is named, or more than one."""
    found = [
        each
        for each in sources
        if isinstance(each, SnmpOptions | NutOptions) and each.kind == wanted.by and wanted.host in {None, each.host}
    ]
    return found[0] if len(found) == 1 else None


def unfit(sources: Sequence[Source], wanted: OutputOffOptions) -> str:
    """Say what is wrong with it, and what would be right; "" when nothing is."""
    by = sender(sources, wanted)
    if by is None:
        at = "" if wanted.host is None else f" at {wanted.host}"
        return f"output_off.by: {wanted.by}{at} names no source of this UPS, or several (set output_off.host)"
    if isinstance(by, NutOptions):
        if by.user is None:
            return "output_off.by: nut needs user and password in that source (with instcmds in upsd.users)"
        is_protected = by.tls == "required" or _is_here(by.host)
        right = "tls: required"
    else:
        if wanted.community is not None and by.version == 3:
            return "output_off.community says nothing with version 3: its user must be allowed to write"
        is_protected = by.version == 3 and by.auth is not None and by.priv is not None
        right = "version: 3 with auth and priv"
    if is_protected or wanted.dedicated_network:
        return ""
    return f"output_off could be forged or overheard on its way: set {right}, or dedicated_network: true"


def _is_here(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host in {"localhost", "localhost.localdomain", "ip6-localhost"}
