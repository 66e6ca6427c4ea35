"""How much memory this host has, and how much of it this process may still take."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_V2: Final = ("memory.max", "memory.current", "inactive_file")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files of a control group with its limit and its usage, and the name in memory.stat of what the kernel can drop."""


def physical_bytes() -> int:
    """The memory of this host: no shard that was written here is larger."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that this process may still take: of the host, and of each control group around it. None: not known.

    Source: MemAvailable of proc(5); the memory controller of cgroups v2 and v1, where a job of Slurm, a container or a
    systemd unit may have a limit.
    """
    return min((*_of_host(proc), *_of_groups(proc, cgroups)), default=None)


def _of_host(proc: Path) -> Iterator[int]:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable" and (number := value.removesuffix("kB").strip()).isdecimal():
            yield int(number) * 1024


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    for line in _lines(proc / "self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        group = top / path.lstrip("/")
        for each in (group, *group.parents):
            if each.is_relative_to(top):
                yield from _of_group(each, *names)


def _of_group(group: Path, limit: str, usage: str, droppable: str) -> Iterator[int]:
    """What is left of a group's limit; nothing where it has none."""
    numbers = [int(line) for name in (limit, usage) for line in _lines(group / name) if line.isdecimal()]
    if len(numbers) == 2:
        stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
        yield max(0, numbers[0] - numbers[1] + int(stat.get(droppable, 0)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
