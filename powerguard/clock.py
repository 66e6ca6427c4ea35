"""The one clock of a boot, and the boot's name."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since this boot, suspend included; never set back."""


def boottime_s() -> float:
    """Seconds of CLOCK_BOOTTIME: the same for every process of this boot, whatever NTP does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Name of this boot, as the kernel reports it (random(4)); "unknown" where there is no /proc."""
    from pathlib import Path  # noqa: PLC0415 - 4 ms, which a root helper's first word would wait for

    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
