"""The host's own network as a witness: whether it is watched, and on the way to whom."""

import ipaddress
from collections.abc import Callable

from powerguard.clock import Clock
from powerguard.core.readings import NetworkSeen
from powerguard.settings.schema import Settings
from powerguard.sources.network import NetworkWatch


def network_watch(settings: Settings, *, publish: Callable[[NetworkSeen], None], clock: Clock) -> NetworkWatch | None:
    """Return what watches the way to our sources; None where it is not wanted, or every source is on this host."""
    hosts = [options.host for ups in settings.feeding for options in settings.ups[ups].sources]
    away = [host for host in dict.fromkeys(hosts) if not _is_here(host)]
    return NetworkWatch(away, publish=publish, clock=clock) if away and settings.network_witness else None


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
