"""Asks trainers for checkpoints, pauses and resumes them, and polls them in between.

On battery, trainers do not copy checkpoints to slower storage: bandwidth and processors belong to the local write. The
hold is a lease that the daemon renews, so it ends if the daemon dies. A lease of length 0 releases it and has no other
effect (`resume` would also continue training that another request has paused).
"""

import asyncio
import contextlib
import logging
import os
import re
import stat
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from powerguard.clock import Clock
from powerguard.core.model.actions import (
    Action,
    Conduct,
    Detail,
    LeaveJob,
    PauseTrainer,
    ResumeTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import CheckpointProgress, TrainerSeen
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.trainer.checkpoint import CheckpointRun, Run
from powerguard.effectors.trainer.options import (
    MAX_SOCKET_PATH,
    AnyTrainerOptions,
    CommandOptions,
    CommandTrainerOptions,
    Common,
    SignalOptions,
    SignalTrainerOptions,
    TrainerOptions,
)
from powerguard.effectors.trainer.peer import (
    BACKOFF_S,
    HEADERS_S,
    GoneError,
    HttpAnswer,
    HungError,
    PeerError,
    TrainerPeer,
    WrongUserError,
    busy_for_s,
)
from powerguard.effectors.trainer.unmodified import Alive, Helper, is_there, unmodified_run
from powerguard.fields import clean_text
from powerguard.wire import (
    HOLD_UPLOADS_PATH,
    LEAVE_PATH,
    PAUSE_PATH,
    RESUME_PATH,
    STATUS_PATH,
    After,
    LeaseRequest,
    LeaveRequest,
    Loop,
    TrainerStatus,
    WireError,
)

LEASE_S: Final = 120.0
"""Longer than the daemon takes to stop (20 s) and to start again (60 s)."""
RENEW_S: Final = 30.0
LOOK_S: Final = 1.0
_NO_ROUTE: Final = frozenset((404, 405, 501))


class UploadHold:
    """Holds the uploads of all native trainers while that is wanted. peers: the known ones, by name."""

    def __init__(self, peers: Callable[[], Mapping[str, TrainerPeer]], clock: Clock) -> None:
        self._peers = peers
        self._clock = clock
        self._renew_at_s: dict[str, float] = {}
        """When each is asked next; infinity for trainers without such a call."""

    async def keep(self, wanted: Callable[[], bool], rest: Callable[[float], Awaitable[object]]) -> None:
        """Hold and release as wanted; never returns. wanted: whether the dwell has ended, by the core."""
        while True:
            await self.turn(wanted=wanted())
            await rest(LOOK_S)

    async def turn(self, *, wanted: bool) -> None:
        """Send it to trainers that do not have it yet. Ends within the 5 s that one call may take."""
        peers = self._peers()
        self._renew_at_s = {name: at_s for name, at_s in self._renew_at_s.items() if name in peers}
        now_s = self._clock()
        if wanted:
            names = [name for name, peer in peers.items() if peer.native and now_s >= self._renew_at_s.get(name, now_s)]
        else:
            names = list(self._renew_at_s)
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(self._send(name, peers[name], hold=wanted))

    async def _send(self, name: str, peer: TrainerPeer, *, hold: bool) -> None:
        body = LeaseRequest(lease_s=LEASE_S if hold else 0.0).to_json()
        answer = await peer.call("POST", HOLD_UPLOADS_PATH, body=body)
        if busy_for_s(answer) is not None:
            return  # asked again at the next poll
        if not hold:
            if isinstance(answer, HttpAnswer | GoneError):
                self._renew_at_s.pop(name, None)
            return
        knows_no_such_call = isinstance(answer, HttpAnswer) and answer.status in _NO_ROUTE
        # One that did not answer may have heard it, so it is released in any case; and asked again at the next turn.
        wait_s = RENEW_S if isinstance(answer, HttpAnswer) else 0.0
        self._renew_at_s[name] = float("inf") if knows_no_such_call else self._clock() + wait_s


Unmodified = SignalTrainerOptions | CommandTrainerOptions
Publish = Callable[[TrainerSeen | CheckpointProgress], None]

MAX_DISCOVERED = 64
CROWDED = 1000
"""Names in the folder for sockets: more than this host's trainers have ever left there."""
PAUSE_LOOK_S = 0.25
"""Interval of the polls of a trainer that is to pause."""
_SOCKET_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,63})\.sock")
_ORDER = (After.CONTINUE, After.PAUSE, After.EXIT)
_ORDERS = (TriggerCheckpoint, PauseTrainer, ResumeTrainer, LeaveJob)
_log = structlog.get_logger("powerguard.trainer")


@dataclass(slots=True)
class _Watched:
    """One trainer and its last status. fault, trouble: logged once, when they change.

    stranger: the fault is that its socket is served by a user that is not allowed, or that it may not be opened.
    folder: where it saves, as it reports.
    """

    peer: TrainerPeer
    found: bool
    seen: TrainerSeen | None = None
    fault: str = ""
    stranger: bool = False
    trouble: str = ""
    folder: str = ""


class TrainerEffector:
    """Carries out TriggerCheckpoint, PauseTrainer, ResumeTrainer and LeaveJob, for trainers known or found.

    publish: takes TrainerSeen and CheckpointProgress; never blocks. discover_dir: where trainers put their sockets;
    None: only configured ones count. discover_uids: whose sockets there are believed; root's and our own always are.
    not_trainers: sockets that never are trainers: the daemon's own.
    helper: sends signals; needed if a trainer, or a fallback, is of kind signal. alive: whether a unit
    has processes. remembered: names of the trainers that the core takes for alive, some of an earlier daemon: one that
    the settings no longer have, and that has no socket, is reported as gone.
    """

    def __init__(
        self,
        options: Sequence[AnyTrainerOptions],
        *,
        clock: Clock,
        publish: Publish,
        discover_dir: Path | None = None,
        discover_uids: Sequence[int] = (),
        not_trainers: Sequence[str] = (),
        spawn: Spawn = run_child,
        helper: Helper | None = None,
        alive: Alive = is_there,
        remembered: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._clock = clock
        self._remembered = remembered
        self._alive = alive
        self._helper = helper or _NoHelper()
        self._publish = publish
        self._discover_dir = None if discover_dir is None else discover_dir.absolute()
        self._discover_uids = frozenset({0, os.geteuid(), *discover_uids})
        self._not_trainers = frozenset(map(os.path.realpath, not_trainers))
        self._spawn = spawn
        self._ignored: set[str] = set()
        self._strangers: dict[str, str] = {}
        self._crowded = ""
        self._watched: dict[str, _Watched] = {}
        self._unmodified: dict[str, Unmodified] = {}
        self.uploads = UploadHold(lambda: {name: watched.peer for name, watched in self._watched.items()}, clock)
        for option in options:
            if not isinstance(option, TrainerOptions):
                self._unmodified[option.name] = option
                continue
            uids = None if option.uids is None else frozenset(option.uids)
            self._watched[option.name] = _Watched(TrainerPeer(option, uids=uids), found=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all trainers known now, configured and found."""
        return (*self._watched, *self._unmodified)

    @property
    def strangers(self) -> tuple[str, ...]:
        """Sockets of training that may be unguarded, and why: a user that is not allowed, or a crowded folder."""
        known = (each.fault if each.stranger else each.peer.refused for each in self._watched.values())
        return (*filter(None, known), *self._strangers.values(), *filter(None, (self._crowded,)))

    def folders(self) -> tuple[str, ...]:
        """Return where trainers on this host save, as they report: flushed before the power-off."""
        return tuple(dict.fromkeys(watched.folder for watched in self._watched.values() if watched.folder))

    @property
    def saves_in(self) -> dict[str, str]:
        """Where each trainer saves, by its name, as it reports or else as the settings say."""
        folders = {name: plain.checkpoint_dir or "" for name, plain in self._unmodified.items()}
        folders |= {name: each.folder or each.peer.options.checkpoint_dir or "" for name, each in self._watched.items()}
        return {name: folder for name, folder in folders.items() if folder}

    async def carry_out(self, action: Action) -> Detail:
        """Carry out a checkpoint, a pause or a resume. Raises EffectorError.

        The caller cancels it at `action.by_s`; it ends by itself a little before that.
        """
        if isinstance(action, _ORDERS) and action.trainer not in self.names:
            await self._discover()  # A daemon that was restarted in an outage repeats orders before its first poll.
        match action:
            case TriggerCheckpoint(trainer=name):
                return await self._run(action).run()
            case ResumeTrainer(trainer=name) if name in self._unmodified:
                return (("native", False), ("resumed", False))
            case ResumeTrainer(trainer=name):
                return await self._resume(self._find(name))
            case LeaveJob(trainer=name):
                return await self._leave(self._find(name), action.outage)
            case PauseTrainer(trainer=name) if name in self._unmodified:
                msg = f"{name}: cannot be paused (embed powerguard.trainer)"
                raise EffectorError(msg)
            case PauseTrainer(trainer=name):
                return await self._pause(self._find(name), action.lease_s)
            case _:
                pass
        msg = f"a trainer cannot carry out {type(action).__name__}"
        raise EffectorError(msg)

    def _run(self, action: TriggerCheckpoint) -> Run:
        """Make the run of one checkpoint."""
        plain = self._unmodified.get(action.trainer)
        if plain is not None:
            return self._by(plain, plain, action)
        watched = self._find(action.trainer)
        options = watched.peer.options
        return CheckpointRun(
            common=options,
            where=options.url,
            peer=watched.peer,
            action=action,
            clock=self._clock,
            publish=self._publish,
            gone=lambda: self._report(watched, self._absent(watched)),
            spawn=self._spawn,
            fallback=None if options.fallback is None else self._by(options.fallback, options, action),
        )

    def _by(self, way: SignalOptions | CommandOptions, common: Common, action: TriggerCheckpoint) -> Run:
        return unmodified_run(
            way,
            common=common,
            action=action,
            clock=self._clock,
            publish=self._publish,
            spawn=self._spawn,
            helper=self._helper,
            alive=self._alive,
        )

    async def watch(self, every_s: float = 5.0) -> None:
        """Look at all trainers every so often, until cancelled."""
        while True:
            await self.look()
            await self._listen(every_s)

    async def _listen(self, for_s: float) -> None:
        """Rest between two polls. A job on several hosts may end in that time, so its trainer answers when it does."""
        async with asyncio.TaskGroup() as group:
            for watched in self._watched.values():
                if watched.seen is not None and watched.seen.alive and watched.seen.hosts > 1:
                    group.create_task(self._look_at(watched, wait_s=for_s))
            # Trainers cannot call the daemon, so it polls.
            await asyncio.sleep(for_s)  # noqa: TID251

    async def look(self) -> None:
        """Poll once: find sockets, ask every trainer for its status, publish the answers. Ends within 6 s."""
        present = {*self.names, *await self._discover(), *self._watched}
        for name in self._remembered():
            if name not in present:
                self._publish(TrainerSeen(at_s=self._clock(), trainer=name, alive=False))
        for plain in self._unmodified.values():
            self._publish(self._seen_unmodified(plain))
        async with asyncio.TaskGroup() as group:
            for watched in self._watched.values():
                group.create_task(self._look_at(watched))

    async def close(self) -> None:
        """Close all connections."""
        for watched in self._watched.values():
            await watched.peer.close()

    def _find(self, name: str) -> _Watched:
        watched = self._watched.get(name)
        if watched is None:
            msg = f"no trainer {name!r} (known: {', '.join(self.names) or 'none'})"
            raise EffectorError(msg)
        return watched

    # --- Resuming -------------------------------------------------------------------------------------------------

    async def _resume(self, watched: _Watched) -> Detail:
        """Resume a trainer; one without this call was never paused by the daemon."""
        peer = watched.peer
        what = ""
        for pause_s in (0.0, *BACKOFF_S):
            await asyncio.sleep(pause_s)  # noqa: TID251 - between two tries there is nothing to await
            answer = await peer.call("POST", RESUME_PATH, body=b"{}")
            if isinstance(answer, GoneError | WrongUserError):
                if isinstance(answer, GoneError):
                    self._report(watched, self._absent(watched))
                raise EffectorError(str(answer))
            if isinstance(answer, PeerError):
                what = str(answer)
                continue
            if answer.status in (404, 405, 501):
                return (("native", False), ("resumed", False))
            status = TrainerStatus.parse(answer.body)
            if 200 <= answer.status < 300:
                if isinstance(status, TrainerStatus):
                    return (("native", True), ("resumed", not status.paused), ("step", status.step))
                if not peer.native:
                    return (("native", False), ("resumed", True))
                what = f"{peer.options.url}: POST {RESUME_PATH} has no valid answer: {answer.fault or status.reason}"
                continue
            what = f"{peer.options.url}: POST {RESUME_PATH} answered {answer.status}"
            if answer.status < 500 and answer.status != 429:
                break
        msg = f"{what} (expected 200; training may still be paused: POST {RESUME_PATH} by hand)"
        raise EffectorError(msg)

    # --- Pausing --------------------------------------------------------------------------------------------------

    async def _pause(self, watched: _Watched, lease_s: float | None) -> Detail:
        """Pause a trainer, and wait until it is paused: it finishes its step first.

        Only a native trainer can. Even after a failure it may still pause later, so the caller must resume it.
        """
        peer = watched.peer
        body = LeaseRequest(lease_s=lease_s).to_json()
        answer = await peer.call("POST", PAUSE_PATH, body=body)
        while True:
            if (busy_s := busy_for_s(answer)) is not None:
                # A busy trainer says when to ask again. The same request twice is one request.
                await asyncio.sleep(max(PAUSE_LOOK_S, min(busy_s, 1.0)))  # noqa: TID251
                answer = await peer.call("POST", PAUSE_PATH, body=body)
                continue
            if isinstance(answer, GoneError):
                self._report(watched, self._absent(watched))
            if isinstance(answer, PeerError):
                raise EffectorError(str(answer))
            if answer.status in (404, 405, 501):
                msg = f"{peer.options.url}: cannot be paused (it has no POST {PAUSE_PATH}; embed powerguard.trainer)"
                raise EffectorError(msg)
            status = TrainerStatus.parse(answer.body) if 200 <= answer.status < 300 else None
            if not isinstance(status, TrainerStatus):
                reason = f"HTTP {answer.status}" if status is None else status.reason
                msg = f"{peer.options.url}: POST {PAUSE_PATH}: {reason} (expected 200 and its status)"
                raise EffectorError(msg)
            self._report(watched, seen(peer.options, status, self._clock()))
            if status.paused:
                return (("native", True), ("paused", True), ("step", status.step))
            if status.conduct is After.CONTINUE:
                msg = f"{peer.options.url}: refuses to pause (its conduct is continue)"
                raise EffectorError(msg)
            answer = HungError()
            while isinstance(answer, HungError):  # a long step may keep the trainer's server waiting, too
                # The time of a step boundary is unknown, and the trainer cannot call the daemon.
                await asyncio.sleep(PAUSE_LOOK_S)  # noqa: TID251
                answer = await peer.call("GET", STATUS_PATH)

    # --- Leaving a job on several hosts ---------------------------------------------------------------------------

    async def _leave(self, watched: _Watched, outage: str) -> Detail:
        """Let the job's ranks on all hosts know that this one powers off. Nothing is repeated: there is no time."""
        peer = watched.peer
        body = LeaveRequest(because=f"its power fails (outage {outage})").to_json()
        answer = await peer.call("POST", LEAVE_PATH, body=body)
        if isinstance(answer, PeerError):
            raise EffectorError(str(answer))
        status = TrainerStatus.parse(answer.body) if 200 <= answer.status < 300 else None
        if not isinstance(status, TrainerStatus):
            msg = f"{peer.options.url}: POST {LEAVE_PATH} answered {answer.status} (update powerguard.trainer)"
            raise EffectorError(msg)
        return (("native", True), ("step", status.step), ("hosts", status.hosts))

    # --- Polling --------------------------------------------------------------------------------------------------

    async def _look_at(self, watched: _Watched, wait_s: float = 0.0) -> None:
        """Ask for the status. wait_s: the trainer may wait so long for news of its job before it answers."""
        peer = watched.peer
        path = f"{STATUS_PATH}?wait={wait_s:g}" if wait_s else STATUS_PATH
        answer = await peer.call("GET", path, headers_s=wait_s + HEADERS_S)
        if isinstance(answer, PeerError):
            watched.stranger = isinstance(answer, WrongUserError)
            self._fault(watched, str(answer))
            if isinstance(answer, GoneError | WrongUserError):
                self._report(watched, self._absent(watched))  # no listener, or none that can be asked
            else:
                self._report(watched, self._silent(watched))
            return
        watched.stranger = False
        status = TrainerStatus.parse(answer.body) if answer.status == 200 else None
        if isinstance(status, TrainerStatus):
            peer.native = True
            self._fault(watched, "")
            self._trouble(watched, status)
            watched.folder = _folder(peer.options, status)
            self._report(watched, seen(peer.options, status, self._clock()))
            return
        if answer.status in (404, 405, 501):
            peer.native = False
            self._fault(watched, "")
        elif answer.status in (401, 403):
            peer.forget_token()
            self._fault(watched, f"{peer.options.url}: refuses our token (HTTP {answer.status}; check `token`)")
        else:
            reason = status.reason if isinstance(status, WireError) else f"HTTP {answer.status}"
            self._fault(watched, f"{peer.options.url}: GET {STATUS_PATH}: {answer.fault or reason}")
        self._report(watched, self._silent(watched))

    def _seen_unmodified(self, options: Unmodified) -> TrainerSeen:
        """Without an answer: a unit with processes is alive, and a program can always be tried."""
        alive = not isinstance(options, SignalTrainerOptions) or self._alive(options.unit) is not False
        return TrainerSeen(
            at_s=self._clock(),
            trainer=options.name,
            alive=alive,
            conduct=Conduct(options.after),
            disk=options.disk,
        )

    def _absent(self, watched: _Watched) -> TrainerSeen:
        return TrainerSeen(
            at_s=self._clock(),
            trainer=watched.peer.options.name,
            alive=False,
            disk=watched.peer.options.disk,
        )

    def _silent(self, watched: _Watched) -> TrainerSeen:
        """It is alive but reports no news: its last status holds; a trainer without status continues."""
        if watched.seen is not None and watched.seen.alive:
            return replace(watched.seen, at_s=self._clock())
        options = watched.peer.options
        return TrainerSeen(at_s=self._clock(), trainer=options.name, alive=True, disk=options.disk)

    def _report(self, watched: _Watched, news: TrainerSeen) -> None:
        watched.seen = news
        self._publish(news)

    def _fault(self, watched: _Watched, fault: str) -> None:
        """Log a fault when it begins, changes or ends."""
        if fault == watched.fault:
            return
        watched.fault = fault
        name = watched.peer.options.name
        if fault and watched.stranger:
            _log.error("trainer_stranger", trainer=name, because=fault)
        elif fault:
            _log.warning("trainer_unreachable", trainer=name, because=fault)
        else:
            _log.info("trainer_reachable", trainer=name, url=watched.peer.options.url)

    def _trouble(self, watched: _Watched, status: TrainerStatus) -> None:
        """Log what is wrong behind a trainer that answers: its other ranks, its second copies."""
        trouble = status.trouble or status.uploads_error
        if trouble == watched.trouble:
            return
        watched.trouble, name = trouble, watched.peer.options.name
        if trouble:
            of, failing_s = ("ranks", None) if status.trouble else ("uploads", status.uploads_failing_s)
            _log.warning("trainer_troubled", trainer=name, of=of, failing_s=failing_s, because=trouble)
        else:
            _log.info("trainer_untroubled", trainer=name)

    # --- Finding --------------------------------------------------------------------------------------------------

    async def _discover(self) -> frozenset[str]:
        """Look for trainers' sockets; return the names of those that may be alive."""
        if self._discover_dir is None:
            return frozenset()
        configured = {
            place for watched in self._watched.values() if not watched.found for place in watched.peer.places()
        }
        found, names = sockets_in(self._discover_dir, self._discover_uids, known=self._watched)
        self._crowd(names)
        others = configured | self._not_trainers
        folder = Path(os.path.realpath(self._discover_dir))  # noqa: ASYNC240 - a local folder, listed in any case
        sockets = {n: path for n, path in found.items() if not {path, str(folder / Path(path).name)} & others}
        self._strangers = {path: because for path, because in self._strangers.items() if path in sockets.values()}
        gone: set[str] = set()
        async with asyncio.TaskGroup() as group:
            for name, path in sockets.items():
                if name not in self._watched:
                    options = TrainerOptions(name=name, url=f"unix:{path}")
                    fresh = _Watched(TrainerPeer(options, uids=self._discover_uids, found=True), found=True)
                    group.create_task(self._admit(fresh, gone))
                elif not self._watched[name].found:
                    self._ignore(path, f"the settings have another trainer {name!r} (rename this socket)")
        for name, watched in list(self._watched.items()):
            known = self._watched.get(name) is watched  # an order may have looked while the one before was closed
            if known and watched.found and name not in sockets and not watched.peer.calls:
                del self._watched[name]
                self._report(watched, self._absent(watched))
                await watched.peer.close()
        return frozenset(sockets) - gone

    async def _admit(self, watched: _Watched, gone: set[str]) -> None:
        """Add a found socket once it has answered: until then, its owner is not proved.

        gone: takes its name if no process listens there, or none that can be asked.
        """
        answer = await watched.peer.call("GET", STATUS_PATH)
        path = str(watched.peer.options.socket_path)
        name = watched.peer.options.name
        if isinstance(answer, HttpAnswer) and name not in self._watched:  # an order may look for sockets meanwhile
            self._ignored.discard(path)
            self._strangers.pop(path, None)
            self._watched[name] = watched
            return
        self._strangers.pop(path, None)
        if isinstance(answer, GoneError | WrongUserError):
            gone.add(name)
        if isinstance(answer, WrongUserError):
            self._strangers[path] = str(answer)
            self._ignore(path, str(answer), level=logging.ERROR)
        elif isinstance(answer, PeerError) and not isinstance(answer, GoneError):  # a dead trainer's socket is not news
            self._ignore(path, str(answer))
        await watched.peer.close()

    def _ignore(self, path: str, reason: str, level: int = logging.WARNING) -> None:
        if path not in self._ignored and len(self._ignored) < MAX_DISCOVERED:
            self._ignored.add(path)
            _log.log(level, "trainer_ignored", socket=path, because=reason)

    def _crowd(self, names: int) -> None:
        """Log once that the folder is crowded, and keep the alarm until it is not."""
        before, self._crowded = self._crowded, ""
        if names > CROWDED:
            self._crowded = (
                f"{self._discover_dir}: crowded, more than {CROWDED} names (remove them; `ls -l` shows whose they are)"
            )
            if not before:
                _log.error("trainers_crowded", folder=str(self._discover_dir), names=names, because=self._crowded)


def seen(options: TrainerOptions, status: TrainerStatus, at_s: float) -> TrainerSeen:
    """Translate a trainer's status into an event, clamped: no claim of a trainer can bring a shutdown nearer.

    Its conduct is that of the settings, as far as it agrees; its need is its estimate, but at most `max_checkpoint_s`.
    """
    after = min(After(options.after), status.conduct, key=_ORDER.index)
    needs_s: float | None = None
    if status.estimate is not None:
        needs_s = status.estimate.seconds
        if needs_s is None and status.estimate.bytes is not None and status.estimate.write_bw_p10:
            needs_s = status.estimate.bytes / (0.8 * status.estimate.write_bw_p10)
    step_s = status.step_time_p95_s or 0.0
    if status.loop in (Loop.COMPILE, Loop.IDLE):
        # No step ends soon there: the next one may be as far as the last one is.
        step_s = max(step_s, status.last_step_age_s or 0.0)
    last = status.last_committed
    return TrainerSeen(
        at_s=at_s,
        trainer=options.name,
        alive=True,
        conduct=Conduct(after.value),
        checkpoint_s=None if needs_s is None else min(needs_s, options.max_checkpoint_s),
        disk=options.disk,
        step=status.step,
        step_s=min(step_s, options.max_checkpoint_s),
        paused=status.paused,
        durable_step=None if last is None else last.step,
        durable_age_s=None if last is None else last.age_s,
        stall_s=None if status.estimate is None else status.estimate.stall_s,
        hosts=status.hosts,
        paused_for=status.paused_for,
        held_by=status.held_by,
        ended_by=status.ended_by,
    )


def _folder(options: TrainerOptions, status: TrainerStatus) -> str:
    """Return the folder of a trainer's last checkpoint, if it lies on this host; "" if it does not report it."""
    last = status.last_committed
    if last is None or last.tier != "local" or not options.is_local or not last.path.startswith("/"):
        return ""
    return os.path.dirname(os.path.normpath(last.path))  # noqa: PTH120 - not one call that could touch the disk


class _NoHelper:
    """Stands in if there is no helper."""

    async def checkpoint(self, unit: str, signal: str) -> dict[str, Any]:
        msg = f"{unit}: SIG{signal} cannot be sent: no signal helper here (docs/guides/gpu-and-signals.md)"
        raise EffectorError(msg)


def sockets_in(folder: Path, uids: Collection[int], known: Collection[str]) -> tuple[dict[str, str], int]:
    """Names and paths of the sockets in a folder, at most 64, symbolic links not followed; and how many names it has.

    The folder is open to all users, and one may have filled it. So all names are read, and those that are known
    already come first, then those that one of `uids` has made, the newest first: no other user can take their place.
    """
    ranked: dict[str, tuple[tuple[bool, bool, int], str]] = {}
    names = 0

    def take(name: str, path: str) -> None:
        found = os.lstat(path)
        if stat.S_ISSOCK(found.st_mode) and len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            ranked[name] = ((name not in known, found.st_uid not in uids, -found.st_ctime_ns), path)

    for name in known:
        with contextlib.suppress(OSError):
            take(name, f"{folder}/{name}.sock")
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names += 1
                match = _SOCKET_NAME.fullmatch(entry.name)
                # An entry that is listed as a file needs no further check.
                if match and match[1] not in ranked and not entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                        take(match[1], entry.path)
    except OSError as error:
        _log.debug("trainers_not_listed", folder=str(folder), because=clean_text(error.strerror or str(error)))
    first = sorted(ranked.values())[:MAX_DISCOVERED]
    return {Path(path).stem: path for _, path in first}, names
