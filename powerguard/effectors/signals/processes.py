"""Processes as the kernel reports them: the listener of a socket, the rest of its job, and a signal to exactly those.

No caller names a process. One is found by the socket that it listens on, and from then on it is a number with a start
time, held by a pidfd while it is signalled: a number that was given to another process since does not match. Only the
standard library; /proc is read without privileges.
"""

import contextlib
import errno
import os
import re
import signal
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = "/proc"
CONNECT_S: Final = 1.0
SOCKET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\.sock")

_SO_PEERPIDFD: Final = 77
"""asm-generic/socket.h, Linux 6.5: a pidfd of the process that called listen(), which cannot be a reused number."""

_ENDED: Final = frozenset("ZX")
STOPPED: Final = frozenset("Tt")
"""States of proc(5): stopped by a signal, or by a debugger."""

_SLURM_JOB: Final = re.compile(r"job_\d+")
_CONTAINER: Final = re.compile(r"(?:(?:docker|libpod|crio|cri-containerd)-)?[0-9a-f]{64}(?:\.scope)?")
_OWN: Final = ".service", ".scope"
_SHELLS: Final = frozenset(
    ("ash", "bash", "csh", "dash", "elvish", "fish", "ksh", "mksh", "nu", "pwsh", "rbash", "sh", "tcsh", "xonsh", "zsh")
)
_STARTERS: Final = _SHELLS | {
    "(sd-pam)",
    "SCREEN",
    "abduco",
    "alacritty",
    "atd",
    "code",
    "code-server",
    "code-tunnel",
    "conmon",
    "containerd-shim",
    "cron",
    "crond",
    "doas",
    "dtach",
    "emacs",
    "gnome-terminal-",
    "jupyter",
    "jupyter-lab",
    "jupyter-noteboo",
    "jupyter-server",
    "jupyterhub-sing",
    "kitty",
    "konsole",
    "login",
    "mosh-server",
    "node",
    "nvim",
    "powerguard",
    "rsession",
    "runuser",
    "screen",
    "slurmstepd",
    "sshd",
    "sshd-session",
    "su",
    "sudo",
    "supervisord",
    "systemd",
    "tmux: client",
    "tmux: server",
    "ttyd",
    "vim",
    "wezterm-gui",
    "xterm",
    "zellij",
}
"""Programs that start jobs for a person or a cluster, by their name in proc(5) (15 letters); not part of the job."""

_HUBS: Final = _STARTERS - _SHELLS
"""Those whose unit holds a person's other work as well. A unit whose first process is a shell is a job."""


class NotFoundError(Exception):
    """No process may be signalled by this name: the reason, and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process. started: ticks since boot, which with pid identifies it. state: of proc(5)."""

    pid: int
    started: int
    parent: int
    uid: int
    state: str
    name: str
    cgroup: str

    @property
    def key(self) -> tuple[int, int]:
        """Its identity among all processes of this boot."""
        return self.pid, self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A listener and what belongs to the same job. scope: in words, for people."""

    listener: Process
    scope: str
    processes: tuple[Process, ...]


# --- One process ----------------------------------------------------------------------------------------------------


def look(pid: int) -> Process | None:
    """Look at one process; None when it is gone, has ended, or runs as more than one user (sudo and its like)."""
    try:
        folder = Path(PROC) / str(pid)
        stat_line = (folder / "stat").read_bytes()
        status = (folder / "status").read_text("utf-8", "replace")
        cgroups = (folder / "cgroup").read_text("utf-8", "replace")
    except (OSError, ValueError):
        return None
    # The name is in brackets and may hold anything, brackets too.
    name, _, rest = stat_line.partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    uids = {line for line in re.findall(r"^Uid:\s*(.*)$", status, re.MULTILINE) for line in line.split()}
    if len(fields) < 20 or fields[0].decode() in _ENDED or len(uids) != 1:
        return None
    return Process(
        pid=pid,
        started=int(fields[19]),
        parent=int(fields[1]),
        uid=int(uids.pop()),
        state=fields[0].decode(),
        name=name.decode("utf-8", "replace"),
        cgroup=_cgroup(cgroups),
    )


def _cgroup(text: str) -> str:
    """The path that systemd and others order processes by: of cgroup v2, or of v1's systemd hierarchy."""
    lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    for hierarchy in ("name=systemd", ""):
        for _, controllers, path in lines:
            if controllers == hierarchy:
                return path
    return ""


def everybody() -> dict[int, Process]:
    """Look at all processes but the first one and this one; return them by their number. 0.1 ms for each."""
    pids = (int(name) for name in os.listdir(PROC) if name.isdecimal())  # noqa: PTH208 - names only, thousands of them
    found = (look(pid) for pid in pids if pid not in (1, os.getpid()))
    return {process.pid: process for process in found if process is not None}


def send(process: Process, word: signal.Signals) -> bool:
    """Send a signal to exactly this process. False if it is gone. Raises OSError if that is not permitted."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # It means one process for good: if that has the number now, it is the one that is looked at and signalled.
        now = look(process.pid)
        if now is None or now.key != process.key or now.uid != process.uid:
            return False
        signal.pidfd_send_signal(descriptor, word)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def catches(pid: int, word: signal.Signals) -> bool:
    """Say whether a process has a handler for a signal: without one, most signals end it."""
    try:
        status = (Path(PROC) / str(pid) / "status").read_text("utf-8", "replace")
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (word - 1) & 1)


# --- Who listens ----------------------------------------------------------------------------------------------------


def listener(folder: Path, name: str) -> Process:
    """Return the process that called listen() on a socket of this name in folder. Raises NotFoundError.

    The kernel reports it (SO_PEERCRED, unix(7)). The socket's file must be that user's own, and have no other name: the
    purpose of another user's file is unknown.
    """
    if not SOCKET_NAME.fullmatch(name):
        msg = f"{name[:80]!r} is not the name of a socket (example: llm.sock)"
        raise NotFoundError(msg)
    where = f"{folder}/{name}"
    with contextlib.ExitStack() as stack:
        owner, client = _connected(folder, name, stack)
        layout = struct.Struct("3i")
        pid, uid, _ = layout.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
        if uid == 0:
            msg = f"{where}: root listens there, and root's processes are not signalled (run the trainer as a user)"
            raise NotFoundError(msg)
        if owner != uid:
            msg = f"{where}: is uid {owner}'s file, and uid {uid} listens there: left alone"
            raise NotFoundError(msg)
        process = None if pid in (1, os.getpid()) else look(pid)
        # Asked after the look: who still lives has had this number all the time.
        if not _is_the_same(client):
            msg = f"{where}: the process that began to listen there has ended, and the present owner is unknown"
            raise NotFoundError(msg)
    if process is None or process.uid != uid:
        msg = f"{where}: the process that began to listen there (pid {pid}, uid {uid}) is gone, has another user, or"
        msg += " is hidden (if /proc is mounted with hidepid=, mount it with gid=powerguard)"
        raise NotFoundError(msg)
    return process


def _connected(folder: Path, name: str, stack: contextlib.ExitStack) -> tuple[int, socket.socket]:
    """Connect, and return the user of the socket's file, and the connection. Raises NotFoundError."""
    where = f"{folder}/{name}"
    try:
        inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, inside)
        file = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
        stack.callback(os.close, file)
        found = os.fstat(file)
        if not stat.S_ISSOCK(found.st_mode):
            msg = f"{where}: is not a socket"
            raise NotFoundError(msg)
        if found.st_nlink > 1:  # if fs.protected_hardlinks is 0, any user can link another user's socket to here
            msg = f"{where}: is a hard link to a socket that has another name, too: left alone (remove it)"
            raise NotFoundError(msg)
        client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        client.settimeout(CONNECT_S)
        client.connect(f"{PROC}/self/fd/{file}")  # this file, even if another has its name by now
    except BlockingIOError:
        msg = f"{where}: does not accept connections (its queue is full), so its owner is unknown"
        raise NotFoundError(msg) from None
    except OSError as error:
        right = " (it must let group powerguard write)" if error.errno == errno.EACCES else ""
        msg = f"{where}: cannot connect: {error.strerror or error}{right}"
        raise NotFoundError(msg) from None
    return found.st_uid, client


def _is_the_same(client: socket.socket) -> bool:
    """Say whether the process that called listen() lives; kernels before 6.5 cannot say, so only its user counts."""
    try:
        descriptor = client.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        return error.errno == errno.ENOPROTOOPT
    try:
        signal.pidfd_send_signal(descriptor, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    finally:
        os.close(descriptor)
    return True


# --- What belongs to a job ------------------------------------------------------------------------------------------


def job_of(process: Process, among: Mapping[int, Process]) -> Job:
    """Return what belongs to the same job as this process, among all: of its user only, itself too.

    In a unit, a container or a Slurm job of its own: all that run there. Where the place is shared (a login, a daemon
    that starts jobs for many, a tmux or a notebook server in a unit of its own): the tree below its topmost ancestor
    that is not a shell or another program that starts jobs.
    """
    place = place_of(process.cgroup)
    in_place = {pid: other for pid, other in among.items() if not place or _is_in(other.cgroup, place)}
    own = {pid: other for pid, other in in_place.items() if other.uid == process.uid}
    own[process.pid] = process
    if place and (_is_job(place) or (len(own) == len(in_place) and not _has_hub(own))):
        found, scope = own, place.rpartition("/")[2]
    else:
        found = _tree(process, {pid: other for pid, other in own.items() if other.cgroup == process.cgroup})
        scope = "process tree"
    # Parents first: no running process must see its children stopped or gone.
    ordered = sorted(found.values(), key=lambda other: (_depth(other, found), other.pid))
    return Job(listener=process, scope=scope, processes=tuple(ordered))


def place_of(cgroup: str) -> str:
    """Return the unit, container or job that a control group belongs to; "" if it is shared (a login)."""
    parts = cgroup.split("/")
    if ".." in parts:  # outside our own view of the hierarchy
        return ""
    for index in range(len(parts) - 1, -1, -1):
        part, below = parts[index], parts[:index]
        if _SLURM_JOB.fullmatch(part) or _CONTAINER.fullmatch(part):
            return "/".join(parts[: index + 1])
        if part.endswith(_OWN):
            of_a_user = any(each.startswith("user@") for each in below)
            is_login = part.startswith(("session-", "user@", "init.scope"))
            # Scopes of a user's manager are terminals and desktop programs, but for what systemd-run has made.
            if is_login or (of_a_user and part.endswith(".scope") and not part.startswith("run-")):
                return ""
            return "/".join(parts[: index + 1])
    return ""


def _is_job(place: str) -> bool:
    name = place.rpartition("/")[2]
    return bool(_SLURM_JOB.fullmatch(name) or _CONTAINER.fullmatch(name))


def _has_hub(processes: Mapping[int, Process]) -> bool:
    """Say whether one that was not started by another of these holds more than one job."""
    return any(each.name in _HUBS for each in processes.values() if each.parent not in processes)


def _is_in(cgroup: str, place: str) -> bool:
    return cgroup == place or cgroup.startswith(f"{place}/")


def _tree(process: Process, processes: Mapping[int, Process]) -> dict[int, Process]:
    top, seen = process, {process.pid}
    while (parent := processes.get(top.parent)) is not None and parent.name not in _STARTERS and parent.pid not in seen:
        top = parent
        seen.add(top.pid)
    found = {top.pid: top}
    while more := {pid: other for pid, other in processes.items() if other.parent in found and pid not in found}:
        found |= more
    return found


def _depth(process: Process, among: Mapping[int, Process]) -> int:
    depth, at = 0, process
    while (parent := among.get(at.parent)) is not None and depth < len(among):
        depth, at = depth + 1, parent
    return depth


def unit_processes(unit: str) -> dict[int, Process]:
    """Return all processes of a unit of the system's own manager.

    Processes within another unit or a container do not count: the owner of such a group (a user's manager, Delegate=)
    can give a control group any name.
    """

    def is_its(process: Process) -> bool:
        above, found, _ = f"{process.cgroup}/".partition(f"/{unit}/")
        parts = above.split("/")
        return bool(found) and not any(part.endswith(_OWN) or _CONTAINER.fullmatch(part) for part in parts)

    return {pid: process for pid, process in everybody().items() if is_its(process)}


def topmost(processes: Mapping[int, Process], fits: Callable[[Process], bool]) -> Iterable[Process]:
    """Return those that fit and have no ancestor among them that fits, too."""
    fitting = {pid: process for pid, process in processes.items() if fits(process)}
    for process in fitting.values():
        at, depth = process, 0
        while (parent := processes.get(at.parent)) is not None and depth < len(processes):
            if parent.pid in fitting:
                break
            at, depth = parent, depth + 1
        else:
            yield process
