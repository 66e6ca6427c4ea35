"""The admin socket: all requests that make a change, for root, for our own user, and for group powerguard-admin.

The kernel reports the caller (SO_PEERCRED, SO_PEERGROUPS), which cannot be forged and needs no password. `event` makes
no change: it is a hint, and causes an earlier poll.

One daemon for each admin socket: two of them would write over each other's outage, and both would act on it.

A POSIX record lock on a file next to the socket: the kernel releases it however its holder ends, names the holder, and
children do not inherit it. Not next to the journal: opening a file on a hung disk may never return. A lock problem must
not leave the host unprotected: if there is no lock, or if the holder was killed and one of its threads hangs in the
disk, the daemon runs anyway.
"""

import asyncio
import contextlib
import errno
import fcntl
import grp
import json
import math
import os
import pwd
import re
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog
from aiohttp import web

from powerguard.core.drill.checks import SCOPES, refusal
from powerguard.core.model.events import (
    Abort,
    BatteryReplaced,
    CheckpointNow,
    RecoverNow,
    SetMaintenance,
    StartDrill,
    StopDrill,
)
from powerguard.core.model.state import Online, Recovery, Shutdown, Supply, phase_name
from powerguard.daemon.journal.journal import WorkerThread, in_thread
from powerguard.daemon.observe.http import (
    BACKLOG,
    Answer,
    Handler,
    add_reads,
    application,
    as_json,
    error_json,
    guarded,
    respond,
)
from powerguard.daemon.observe.port import Daemon
from powerguard.daemon.observe.readiness import HUNG_AFTER_S
from powerguard.daemon.observe.status import SCHEMA_VERSION, Json, can_abort, drill_plan
from powerguard.daemon.observe.status import refusal as refusal_to_recover
from powerguard.daemon.watchdog_drill import WatchdogDrill
from powerguard.effectors.base import EffectorError
from powerguard.fields import clean_text

log = structlog.get_logger()

_FLOCK: Final = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""


class TakenError(Exception):
    """Another daemon is running: its pid, and the fix."""


@contextlib.contextmanager
def alone(admin_socket: Path) -> Iterator[None]:
    """Hold the lock of this admin socket. Raises TakenError while another living daemon has it."""
    path = admin_socket.with_name(f"{admin_socket.name}.lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        log.warning("lock_unavailable", because=f"{path}: {error.strerror}: a second daemon would not be noticed")
        yield
        return
    try:
        _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            log.warning("lock_unavailable", because=f"{path}: {error.strerror}: a second daemon would not be noticed")
            return
        holder = _holder(descriptor)
        if _is_ending(holder):
            log.warning("lock_held_by_the_dead", because="it was killed, but hangs in a disk", pid=holder)
            return
        msg = (
            f"another powerguard runs with these settings (pid {holder} holds {path}): stop that one, or give this "
            "one its own control.socket and journal.path"
        )
        raise TakenError(msg) from error


def _holder(descriptor: int) -> int:
    """Pid of the process that holds the lock; 0 when it has just been given back, or is in another pid namespace."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return int(_FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, request))[4])


def _is_ending(pid: int) -> bool:
    """Say whether a process has been killed and only waits for the kernel: proc(5), its main thread is Z or X."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] in (["Z"], ["X"])


SOCKET: Final = "/run/powerguard/powerguard.sock"
GROUP: Final = "powerguard-admin"
MODE: Final = 0o660
MAX_MAINTENANCE_S: Final = 7 * 86400.0
"""Longest maintenance: a forgotten one must end by itself, because it leaves the host unprotected."""

NUT_SHUTDOWN: Final = "nut-shutdown"
"""Name of the event by which upsmon's SHUTDOWNCMD asks."""
SLAVE: Final = "-slave"
"""How the events of an apcupsd end that is ordered down by its master (config/apcupsd/powerguard-event)."""

CONNECTION_LIMIT_S: Final = 70.0
"""Timeout of a connection: a test of messages takes TEST_LIMIT_S and a moment, and its caller waits for 65 s."""
TEST_LIMIT_S: Final = 60.0
"""For all targets of a test, which are asked at the same time: the largest `limit_s` that a target may have. One that
was given less than its own would fail every test, and count as not reached from then on, although messages arrive."""
Tester = Callable[[list[str], float], Awaitable[Mapping[str, tuple[bool, str]]]]
"""Sends a test message to targets within a limit; returns for each whether it arrived, and what it answered."""
_LOOK_UP_S: Final = 1.0
_MONTH: Final = re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])")
_SO_PEERGROUPS: Final = 59
"""socket(7), Linux 4.13; Python has no name for it. The same number on every architecture but PA-RISC and SPARC."""
_MOST_GROUPS: Final = 65536
"""NGROUPS_MAX of Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The process at the other end, as the kernel reports it. name: of the user, for the log."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    name: str = ""


def peer_of(sock: socket.socket) -> Caller:
    """Ask the kernel who connected. Raises OSError when it does not know."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return Caller(pid=pid, uid=uid, gid=gid, groups=_groups_of(sock), name=f"uid {uid}")


def _groups_of(sock: socket.socket) -> tuple[int, ...]:
    """Return the peer's supplementary groups; none before Linux 4.13, so that only the primary group counts then."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * 256)
    except OSError as error:
        return _many_groups_of(sock) if error.errno == errno.ERANGE else ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


def _many_groups_of(sock: socket.socket) -> tuple[int, ...]:
    """Return the groups of a user who has more than Python's getsockopt returns, 256, as a directory of users may."""
    import ctypes  # noqa: PLC0415 - 1 MB, which a host without such a user saves

    groups, length = (ctypes.c_uint32 * _MOST_GROUPS)(), ctypes.c_uint32(4 * _MOST_GROUPS)
    here = sock.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS
    failed = ctypes.CDLL(None).getsockopt(*here, groups, ctypes.byref(length))
    return () if failed else tuple(groups[: length.value // 4])


def user_name(uid: int) -> str:
    """Return the name of the user; the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def group_id(name: str = GROUP) -> int | None:
    """Return the id of the group; None where the host has no such group."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def may_change(peer: Caller, *, own_uid: int, admin_gid: int | None) -> bool:
    """Say whether this peer may change anything."""
    if peer.uid in (0, own_uid):
        return True
    return admin_gid is not None and admin_gid in (peer.gid, *peer.groups)


def owns_shutdown(daemon: Daemon) -> bool:
    """Say whether another UPS daemon may leave the host's shutdown to powerguard: armed, able to, awake, and active.

    Able to: what powers the host off passed its last check, or has taken the order.
    Active: powerguard holds the host to be on battery, or is past that. If it does not (the other daemon watches
    another UPS, our source was lost on utility, only upsd reports a forced shutdown), the other daemon knows more.
    """
    awake = daemon.clock() - daemon.progressed_at_s <= HUNG_AFTER_S
    state = daemon.state
    is_taken = isinstance(state.phase, Shutdown) and state.phase.ordered
    able = daemon.policy.powers_off and (is_taken or not daemon.power_off_trouble)
    at_it = not isinstance(state.phase, Online | Recovery) or state.feed.supply is Supply.BATTERY
    return able and awake and at_it


def hears_upsd(daemon: Daemon) -> bool:
    """Say whether upsd is one of our sources: only upsd reports a forced shutdown, which ends in output off."""
    return any(view.source.startswith("nut:") for view in daemon.sources)


def hears_master(daemon: Daemon) -> bool:
    """Say whether the apcupsd of another host is a source: only it reports that it goes down, and the power too."""
    own = ("apcupsd:127.", "apcupsd:localhost", "apcupsd:::1")
    return any(view.source.startswith("apcupsd:") and not view.source.startswith(own) for view in daemon.sources)


class _BadRequestError(Exception):
    """An invalid request: what is wrong, and the fix."""


class Directory:
    """The names of users, and the group that may make changes, looked up in a thread.

    A name service in the network may hang, in an outage above all. After `_LOOK_UP_S` a user is called by the number,
    and the group is the one that was found last; root is never looked up. gid: of the group; None: not found, or not
    yet. user_of, group_of: as `user_name` and `group_id`.
    """

    def __init__(
        self,
        group: str,
        *,
        user_of: Callable[[int], str] = user_name,
        group_of: Callable[[str], int | None] = group_id,
    ) -> None:
        """Look nothing up yet."""
        self.group = group
        self._user_of, self._group_of = user_of, group_of
        self.gid: int | None = None
        self._thread = WorkerThread("powerguard-names")
        self._asked: dict[int, asyncio.Future[tuple[str, int | None]]] = {}

    async def named(self, peer: Caller) -> Caller:
        """Return the caller with its name; `gid` is up to date then."""
        return replace(peer, name=await self.look_up(peer.uid) if peer.uid else "root")

    async def look_up(self, uid: int) -> str:
        """Return the name of a user, and bring `gid` up to date."""
        lookup = self._asked.get(uid)
        if lookup is None:
            lookup = in_thread(self._thread, lambda: (self._user_of(uid), self._group_of(self.group)))
            self._asked[uid] = lookup
        await asyncio.wait((lookup,), timeout=_LOOK_UP_S)
        if not lookup.done():
            return f"uid {uid}"
        self._asked.pop(uid, None)
        name, self.gid = lookup.result()
        return name

    async def aclose(self) -> None:
        """End the thread, as soon as no look-up hangs in it."""
        self._thread.close(0.0)


class Admin:
    """The verbs that make a change."""

    def __init__(
        self,
        daemon: Daemon,
        directory: Directory,
        *,
        watchdog: WatchdogDrill | None = None,
        tester: Tester | None = None,
    ) -> None:
        """Serve this daemon. directory: its group may make changes, like root and our own user; it need not exist."""
        self._daemon = daemon
        self._directory = directory
        self._tester = tester
        self._watchdog = watchdog

    def abort(self, who: Caller, body: Mapping[str, object]) -> Answer:
        """Abort this outage's shutdown; refused, with the reason, if there is none to abort."""
        why_not = can_abort(self._daemon)
        if why_not:
            return error_json(why_not, 409)
        reason = _text(body, "reason")
        self._daemon.submit(Abort(at_s=self._daemon.clock(), who=who.name, reason=reason))
        return self._accepted("abort", who)

    def maintenance(self, who: Caller, body: Mapping[str, object]) -> Answer:
        """Suspend the power-off for a while (for_s > 0, with a reason), or end that (for_s = 0)."""
        for_s = body.get("for_s")
        if isinstance(for_s, bool) or not isinstance(for_s, int | float) or not 0 <= for_s <= MAX_MAINTENANCE_S:
            msg = f"for_s: must be 0 (off) to {MAX_MAINTENANCE_S:.0f} seconds"
            raise _BadRequestError(msg)
        if not math.isfinite(for_s):
            msg = "for_s: must be finite"
            raise _BadRequestError(msg)
        reason = _text(body, "reason")
        if for_s and not reason:
            msg = "reason: must not be empty: give the reason for the maintenance"
            raise _BadRequestError(msg)
        now_s = self._daemon.clock()
        self._daemon.submit(SetMaintenance(at_s=now_s, until_s=now_s + for_s, reason=reason, who=who.name))
        return self._accepted("maintenance", who, for_s=float(for_s), reason=reason)

    def checkpoint(self, who: Caller, _: Mapping[str, object]) -> Answer:
        """Ask every trainer for a checkpoint now, while training continues."""
        trainers = [trainer.name for trainer in self._daemon.state.trainers if trainer.alive]
        if not trainers:
            return error_json("no trainer is alive (see trainers in `powerguard status`)", 409)
        self._daemon.submit(CheckpointNow(at_s=self._daemon.clock(), who=who.name))
        return self._accepted("checkpoint", who, trainers=trainers)

    def battery_replaced(self, who: Caller, body: Mapping[str, object]) -> Answer:
        """Forget what was learned of the old battery; refused while the one that is in carries the load."""
        policy, state = self._daemon.policy, self._daemon.state
        ups, installed = _text(body, "ups"), _text(body, "installed")
        if installed and not _MONTH.fullmatch(installed):
            msg = f"installed: {installed!r} is not a year and month (example: 2026-11)"
            raise _BadRequestError(msg)
        known = [feed_policy.policy.ups for feed_policy in policy.feeds] or [policy.ups]
        if ups not in ("", *known):
            feed = "feeds" if len(known) == 1 else "feed"
            return error_json(f"ups: {ups} is unknown: {' and '.join(known)} {feed} this host", 409)
        if not isinstance(state.phase, Online) or state.feed.supply is Supply.BATTERY:
            return error_json(f"phase {phase_name(state.phase)}, on battery: try again when that is over", 409)
        if state.drill is not None:
            return error_json("a drill is running and measures the present battery: try again when it is over", 409)
        one = ups if policy.feeds else ""
        self._daemon.submit(BatteryReplaced(at_s=self._daemon.clock(), who=who.name, ups=one))
        presumed: Json = {"health": policy.health, "origin": policy.health_from}
        return self._accepted(
            "battery-replaced", who, ups=ups or " + ".join(known), installed=installed, presumed=presumed
        )

    def drill(self, who: Caller, body: Mapping[str, object]) -> Answer:
        """Begin a drill; refused, with the reason, where that would not be safe."""
        scopes, witness = _drill_words(body)
        now_s = self._daemon.clock()
        refused = refusal(self._daemon.policy, self._daemon.state, now_s, scopes, witness)
        if refused:
            return error_json(refused, 409)
        self._daemon.submit(StartDrill(at_s=now_s, who=who.name, scopes=scopes, witness=witness))
        return self._accepted("drill", who, scopes=list(scopes), witness=witness)

    def drill_stop(self, who: Caller, body: Mapping[str, object]) -> Answer:
        """End the drill that runs; everything is put back."""
        running = self._daemon.state.drill
        if running is None:
            return error_json("no drill is running", 409)
        if not isinstance(self._daemon.state.phase, Online):
            return error_json("a real outage comes first: the drill is put back when the outage ends", 409)
        reason = _text(body, "reason")
        self._daemon.submit(StopDrill(at_s=self._daemon.clock(), who=who.name, reason=reason))
        return self._accepted("drill-stop", who, drill=running.id, reason=reason)

    def drill_plan(self, _: Caller, body: Mapping[str, object]) -> Answer:
        """Return what a drill would do, and whether it may begin now. Read-only."""
        scopes, witness = _drill_words(body)
        return as_json(drill_plan(self._daemon, scopes, witness))

    def recover(self, who: Caller, body: Mapping[str, object]) -> Answer:
        """Start training now, although the gate waits; refused on battery, and if the host is not complete."""
        unchecked = body.get("unchecked", False)
        if not isinstance(unchecked, bool):
            msg = "unchecked: must be true or false"
            raise _BadRequestError(msg)
        refused = refusal_to_recover(self._daemon, unchecked=unchecked)
        if refused:
            return error_json(refused, 409)
        self._daemon.submit(RecoverNow(at_s=self._daemon.clock(), who=who.name))
        return self._accepted("recover", who, unchecked=unchecked)

    async def watchdog_drill(self, who: Caller, body: Mapping[str, object]) -> Answer:
        """Arm the BMC's watchdog and power this host off (`WatchdogDrill`). host: its name, as a person typed it."""
        if self._watchdog is None:
            return error_json("this daemon has no BMC", 409)
        host = _text(body, "host")
        try:
            in_s = await self._watchdog.begin(who.name, host)
        except EffectorError as error:
            return error_json(str(error), 409)
        return self._accepted("watchdog-drill", who, host=host, in_s=in_s)

    async def watchdog_drill_plan(self, _: Caller, __: Mapping[str, object]) -> Answer:
        """Return what that would do, and whether it may begin now. Read-only."""
        return (
            error_json("this daemon has no BMC", 409)
            if self._watchdog is None
            else as_json(await self._watchdog.plan())
        )

    async def notify_test(self, who: Caller, body: Mapping[str, object]) -> Answer:
        """Send a test message to one target of messages, or to all; return what each has answered."""
        known = [target.name for target in self._daemon.message_targets]
        name = _text(body, "target")
        if self._tester is None or not known:
            return error_json("the settings name no target of messages (notify.targets)", 409)
        if name and name not in known:
            return error_json(f"{name}: not a target of messages; known are {', '.join(known)}", 409)
        found = await self._tester([name] if name else known, TEST_LIMIT_S)
        results = [{"target": each, "delivered": ok, "answer": answer} for each, (ok, answer) in sorted(found.items())]
        return self._accepted("notify-test", who, results=results)

    def event(self, who: Caller, body: Mapping[str, object]) -> Answer:
        """Take a hint from a hook: poll at once. `owned`: this daemon will handle the shutdown itself."""
        name, ups = _text(body, "name"), _text(body, "ups")
        log.info("hint_received", hint=name, ups=ups, who=who.name)
        self._daemon.poll_now()
        owned = owns_shutdown(self._daemon)
        if name == NUT_SHUTDOWN:
            owned = owned and hears_upsd(self._daemon)
        elif name.endswith(SLAVE):
            owned = owned and hears_master(self._daemon)
        return self._accepted("event", who, name=name, ups=ups, owned=owned)

    def _accepted(self, verb: str, who: Caller, **more: object) -> Answer:
        if verb not in ("event", "notify-test"):
            log.warning("operator_asked", verb=verb, who=who.name, pid=who.pid, **more)
        body: Json = {
            "schema_version": SCHEMA_VERSION,
            "object": "accepted",
            "verb": verb,
            "who": who.name,
            "phase": phase_name(self._daemon.state.phase),
            "mode": self._daemon.policy.mode.value,
            **more,
        }
        return as_json(body, 202)

    def add(self, app: web.Application) -> None:
        """Add the verbs to the application."""
        verbs: dict[str, tuple[Verb, bool]] = {
            "abort": (self.abort, True),
            "maintenance": (self.maintenance, True),
            "checkpoint": (self.checkpoint, True),
            "drill": (self.drill, True),
            "drill-stop": (self.drill_stop, True),
            "drill-plan": (self.drill_plan, False),
            "watchdog-drill": (self.watchdog_drill, True),
            "watchdog-drill-plan": (self.watchdog_drill_plan, True),
            "battery-replaced": (self.battery_replaced, True),
            "recover": (self.recover, True),
            "notify-test": (self.notify_test, True),
            "event": (self.event, False),
        }
        for name, (verb, changes) in verbs.items():
            app.router.add_post(f"/api/v1/{name}", self._handler(verb, changes=changes))

    def _handler(self, verb: "Verb", *, changes: bool) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            sock = None if request.transport is None else request.transport.get_extra_info("socket")
            if sock is None:
                return respond(error_json("the connection is gone", 400))
            try:
                peer = peer_of(sock)
            except OSError as error:
                return respond(error_json(f"the kernel does not report the caller: {error.strerror}", 403))
            peer = await self._directory.named(peer)
            if changes and not may_change(peer, own_uid=os.getuid(), admin_gid=self._directory.gid):
                log.warning("operator_refused", who=peer.name, pid=peer.pid, path=request.path)
                return respond(error_json(f"{peer.name} is neither root nor in group {self._directory.group}", 403))
            try:
                answer = verb(peer, _parsed(await request.read()))
                return respond(await answer if isinstance(answer, Awaitable) else answer)
            except _BadRequestError as error:
                return respond(error_json(str(error), 400))

        return handle


Verb = Callable[[Caller, Mapping[str, object]], Answer | Awaitable[Answer]]


def _parsed(raw: bytes) -> Mapping[str, object]:
    if not raw:
        return {}
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        msg = "the body is not JSON"
        raise _BadRequestError(msg) from error
    if not isinstance(body, dict):
        msg = "the body must be a JSON object"
        raise _BadRequestError(msg)
    return body


def _text(body: Mapping[str, object], key: str) -> str:
    value = body.get(key, "")
    if not isinstance(value, str):
        msg = f"{key}: must be a text"
        raise _BadRequestError(msg)
    return clean_text(value, 200)


def _drill_words(body: Mapping[str, object]) -> tuple[tuple[str, ...], str]:
    """Read scopes and witness of a drill; what they may be is asked by `refusal`."""
    scopes = body.get("scopes", [])
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes) or len(scopes) > len(SCOPES):
        msg = f"scopes: must be a list of {', '.join(SCOPES)}"
        raise _BadRequestError(msg)
    return tuple(clean_text(scope, 40) for scope in scopes), _text(body, "witness") or "simulated"


def bind_unix(path: Path, mode: int, gid: int | None, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Bind the socket with its mode from the very first moment; a dead one of an earlier life makes way.

    Raises OSError if another process listens there already, or if the path is not a socket.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(17, "exists, but is not a socket (remove it)", str(path))
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
                is_dead = _is_ending(peer_of(probe).pid)  # its thread that hangs in a disk keeps the socket open
            except ConnectionRefusedError:
                is_dead = True
            if not is_dead:
                raise FileExistsError(17, "another powerguard listens there already", str(path))
            path.unlink()
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    old = os.umask(0o777 & ~mode)
    try:
        sock.bind(str(path))
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(old)
    if gid is not None:
        try:
            os.chown(path, -1, gid)
        except PermissionError:
            because = f"{path}: this daemon's user is not in group {gid}, so the members of that group cannot connect"
            right = "SupplementaryGroups=GROUP in a drop-in of powerguard.service"
            log.warning("group_not_set", because=because, right=right)
    return sock


def unbind(path: Path) -> None:
    """Take the socket's name away."""
    path.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def admin_server(
    daemon: Daemon,
    *,
    path: str = SOCKET,
    mode: int = MODE,
    group: str = GROUP,
    watchdog: WatchdogDrill | None = None,
    tester: Tester | None = None,
) -> AsyncIterator[str]:
    """Serve the admin socket; yields its path. Raises OSError when it cannot be made."""
    app = application()
    add_reads(app, daemon)
    directory = Directory(group)
    Admin(daemon, directory, watchdog=watchdog, tester=tester).add(app)
    async with contextlib.aclosing(directory), guarded(app, CONNECTION_LIMIT_S) as make:
        await directory.look_up(os.getuid())
        if directory.gid is None:
            because = f"{path}: group {group} was not found within {_LOOK_UP_S:g} s, so its members cannot connect"
            log.warning("group_not_set", because=because, right=f"groupadd --system {group}; then restart the daemon")
        sock = bind_unix(Path(path), mode, directory.gid)
        server = await asyncio.get_running_loop().create_unix_server(make, sock=sock, backlog=BACKLOG)
        log.info("admin_listening", path=path)
        try:
            yield path
        finally:
            server.close()
            unbind(Path(path))
