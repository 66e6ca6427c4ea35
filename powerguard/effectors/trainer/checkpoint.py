"""One emergency checkpoint of one trainer, from the first request to durable, or to a clear reason why not.

`Run` is what every way to a checkpoint has in common: its time, its progress, the folder where it appears. Whatever the
trainer answers, lies about or leaves unsaid, it ends before the action's deadline. The same id is sent at every try, so
a native trainer makes one checkpoint of them all. `instead` is a second way, where the first brings no checkpoint:
after it has failed, or at the same time while the trainer does not answer.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeVar

import structlog

from powerguard.clock import Clock
from powerguard.core.model.actions import Conduct, Detail, TriggerCheckpoint
from powerguard.core.model.events import CheckpointProgress
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn
from powerguard.effectors.host import syncfs_child
from powerguard.effectors.trainer.options import Common
from powerguard.effectors.trainer.peer import (
    BACKOFF_S,
    HEADERS_S,
    BrokenError,
    GoneError,
    HttpAnswer,
    HungError,
    Meaning,
    PeerError,
    TrainerPeer,
    TriggerAnswer,
    WrongUserError,
    busy_for_s,
    classify,
)
from powerguard.fields import clean_text
from powerguard.wire import (
    CHECKPOINTS_PATH,
    STATUS_PATH,
    TRIGGER_PATH,
    After,
    CheckpointStatus,
    Phase,
    Reason,
    TrainerStatus,
    TriggerRequest,
    WireError,
    wire_id,
)

STAMP_S: Final = 2.0
QUIET_S: Final = 6.0
"""Time without a change in the folder: longer than a busy disk pauses within one write."""
SETTLED_S: Final = 1.0
"""The same, once the trainer's processes have ended: only the file system may still lag."""
_GROWING: Final = 3
"""newest_child's exit code for "still growing"; the daemon does not import that module."""
_TICK_NS: Final = 20_000_000  # the file system's stamps lag by up to a tick of the kernel
_NEWEST: Final = (sys.executable, "-m", "powerguard.effectors.trainer.newest_child")
LAST_WORDS_S = 0.25
"""Time before the deadline at which a run ends, to report why; the bulkhead would only report "timed out"."""


@dataclass(kw_only=True, slots=True)
class Run:
    """Carries out one TriggerCheckpoint. publish: takes CheckpointProgress. where: what failures name, an address.

    ends_training: this way of saving ends training, so it is not used if training is to continue, as after a drill.
    since_ns: newest stamp in the folder before the request. unseen: why the folder could not be read.
    growing: new files in it were still changing when the last look ended.
    """

    common: Common
    where: str
    action: TriggerCheckpoint
    clock: Clock
    publish: Callable[[CheckpointProgress], None]
    spawn: Spawn
    ends_training: bool = False
    began_s: float = 0.0
    since_ns: int = 0
    unseen: str = ""
    growing: bool = False
    stage: str = "asking"

    async def run(self) -> Detail:
        """Return what `Done.detail` promises; raises EffectorError."""
        if self.ends_training and (self.action.after is Conduct.CONTINUE or self.action.reason == Reason.DRILL):
            self.fail("saves only when it ends, but training is to continue: not asked")
        self.began_s = self.clock()
        try:
            async with asyncio.timeout(self.left_s()):
                self.since_ns = await self.stamp()
                return await self.checkpoint()
        except TimeoutError:
            self.fail(self._late(), timed_out=True)

    async def checkpoint(self) -> Detail:
        """Carry it out. Cancelled at the deadline."""
        raise EffectorError(self.where)  # pragma: no cover - each way has its own

    # --- What appears ----------------------------------------------------------------------------------------------

    async def stamp(self) -> int:
        """Return the newest stamp in the configured folder, before we ask: its clock need not be ours.

        A folder that does not answer soon must not delay the request: then the daemon's clock counts.
        """
        folder = self.common.checkpoint_dir
        if folder is not None:
            with contextlib.suppress(OSError, ValueError):
                ended = await self.spawn([*_NEWEST, folder], limit_s=min(STAMP_S, self.left_s()))
                return int(ended.stdout)
        return time.time_ns() - _TICK_NS

    async def appeared(self, most_s: float) -> Detail | None:
        """Return what appeared in the folder within most_s of the request; None: no checkpoint did."""
        while (left_s := most_s - self.took_s()) > 0:
            found = await self.newest(limit_s=left_s)
            if found is not None:
                return found
            await self.rest(min(1.0, most_s - self.took_s()))
        return None

    async def newest(self, *, limit_s: float, quiet_s: float = QUIET_S) -> Detail | None:
        """Return the checkpoint that appeared in the configured folder since we asked; None when there is none."""
        folder = self.common.checkpoint_dir
        if folder is None:
            return None
        left_s = self.left_s()
        look_s = max(0.0, min(limit_s, left_s - 1.0))
        argv = [*_NEWEST, folder, str(self.since_ns), f"{look_s:.3f}", f"{quiet_s:.3f}"]
        try:
            ended = await self.spawn(argv, limit_s=min(look_s + 5.0, left_s))
        except OSError as error:
            self.unseen = f" (no child can be started to read the folder: {error.strerror or error})"
            return None
        self.unseen = ""
        self.growing = ended.returncode == _GROWING
        if ended.timed_out or ended.returncode not in (0, 1, _GROWING):
            why = "does not answer" if ended.timed_out else clean_text(ended.stderr.decode("utf-8", "replace"), 200)
            self.unseen = f" (the folder cannot be read: {why})"
        try:
            found = json.loads(ended.stdout) if ended.returncode == 0 else None
        except ValueError:
            found = None
        if found is None:
            return None
        return self.dumb(
            step=found["step"], verified=found["verified"], path=found["path"], size_bytes=found["size_bytes"]
        )

    async def flushed(self, detail: Detail) -> Detail:
        """Flush the file system of an unsealed checkpoint: most frameworks leave it to the page cache.

        Returns how it went (`flushed`); a checkpoint that could not be flushed still counts.
        """
        fields = dict(detail)
        path = str(fields.get("path") or self.common.checkpoint_dir or "")
        if fields["native"] or fields["verified"] or not path.startswith("/"):
            return detail
        limit_s = self.action.by_s - 2 * LAST_WORDS_S - self.clock()
        if limit_s <= 0:
            return (*detail, ("flushed", False))
        self.progress("flushing")
        argv = [sys.executable, "-I", "-S", str(syncfs_child.__file__), path]
        try:
            ended = await self.spawn(argv, limit_s=limit_s)
        except OSError:
            return (*detail, ("flushed", False))
        return (*detail, ("flushed", ended.returncode == 0 and not ended.timed_out))

    def dumb(
        self,
        *,
        step: int | None = None,
        verified: bool = False,
        paused: bool = False,
        path: str = "",
        size_bytes: int | None = None,
        confirmed: bool = True,
    ) -> Detail:
        """Return the result of a peer that cannot say at which step training stands.

        confirmed: the trainer, or its folder, has shown that the checkpoint ended; else it has only started.
        """
        return (
            ("native", False),
            ("step", step),
            ("at_paused_step", False),
            ("verified", verified),
            ("confirmed", confirmed),
            ("paused", paused),
            ("bytes", size_bytes),
            ("path", path),
            ("took_s", round(self.took_s(), 3)),
        )

    # --- Time ------------------------------------------------------------------------------------------------------

    def left_s(self) -> float:
        """Seconds that are left; raises EffectorError if there are none."""
        left_s = self.action.by_s - LAST_WORDS_S - self.clock()
        if left_s <= 0:
            self.fail(self._late(), timed_out=True)
        return left_s

    def took_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.began_s

    def _late(self) -> str:
        return f"out of time: its checkpoint is still {self.stage}, {self.took_s():.1f} s after we asked"

    async def rest(self, seconds: float) -> None:
        """Wait before the next question, but not beyond the deadline."""
        left_s = self.left_s()
        if seconds > 0:
            # The next answer is the peer's only news: there is no event to await here.
            await asyncio.sleep(min(seconds, left_s))  # noqa: TID251

    def progress(self, stage: str) -> None:
        """Report its progress."""
        self.stage = stage
        self.publish(
            CheckpointProgress(at_s=self.clock(), trainer=self.action.trainer, action_id=self.action.id, stage=stage)
        )

    def fail(self, what: str, *, timed_out: bool = False) -> NoReturn:
        """Raise EffectorError with the address in front. timed_out: the time of the order is over."""
        msg = f"{self.where}: {what}"
        raise EffectorError(msg, timed_out=timed_out)


_Result = TypeVar("_Result")
_log = structlog.get_logger("powerguard.trainer")


async def instead(first: Callable[[], Awaitable[Detail]], second: Run, hung: asyncio.Event, trainer: str) -> Detail:
    """Return what the first brings, else what the second does; of both at once, whichever is done earlier.

    hung: set when no answer comes; then the second starts in parallel with the first, which continues. Raises
    EffectorError that says why each has failed.
    """
    brought: Detail | None = None
    faults: list[EffectorError] = []
    async with asyncio.TaskGroup() as group:
        first_task = group.create_task(tried(first))
        waiting = group.create_task(hung.wait())
        await asyncio.wait({first_task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        pending: set[asyncio.Task[Detail | EffectorError]] = {first_task}
        is_second = False
        while pending and brought is None:
            if not is_second and (not first_task.done() or isinstance(first_task.result(), EffectorError)):
                because = str(first_task.result()) if first_task.done() else "does not answer"
                _log.warning("trainer_fallback", trainer=trainer, by=second.where, because=because)
                pending.add(group.create_task(tried(second.run)))
                is_second = True
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: each is not first_task):
                match task.result():
                    case EffectorError() as error:
                        faults.append(error)
                    case detail if task is first_task:
                        brought = brought or detail
                    case detail:
                        brought = brought or (*detail, ("fallback", second.where))
        for task in pending:
            task.cancel()
    if brought is None:
        raise EffectorError("; instead: ".join(map(str, faults)), timed_out=any(each.timed_out for each in faults))
    return brought


async def tried(work: Callable[[], Awaitable[_Result]]) -> _Result | EffectorError:
    """A failure as a value, so that one way's does not end the other. Cancelled before its start, it does not start."""
    try:
        return await work()
    except EffectorError as error:
        return error


_POLL_S = 1.0
_PACE_S = 0.2  # between two requests to a peer that answers at once without news
_NEWS_S = 0.02  # and with news: a short checkpoint is noticed at once, and a faulty peer cannot keep us busy
_MAX_NONSENSE = 5
_MAX_FORGOTTEN = 3


class _AskAgain(Exception):  # noqa: N818 - not an error, but the way back to the first question
    """The followed checkpoint is unknown by now: the trainer was restarted, or it had just ended."""


@dataclass(kw_only=True, slots=True)
class CheckpointRun(Run):
    """A checkpoint over HTTP. gone: called if the trainer does not listen. fallback: is tried if this brings none."""

    peer: TrainerPeer
    gone: Callable[[], None]
    fallback: Run | None = None
    failures: int = 0
    forgotten: int = 0
    path: str = TRIGGER_PATH
    hung: asyncio.Event = field(default_factory=asyncio.Event)

    async def checkpoint(self) -> Detail:
        """Carry it out over HTTP; and by the fallback, if that fails, or in parallel while no answer comes."""
        if self.fallback is None:
            return await self._until_ended()
        return await instead(self._until_ended, self.fallback, self.hung, self.action.trainer)

    async def _until_ended(self) -> Detail:
        while True:
            answer = await self._ask()
            try:
                detail = await self._respond(answer)
            except _AskAgain:
                self.forgotten += 1
                if self.forgotten > _MAX_FORGOTTEN:
                    self.fail("loses its checkpoints: check whether it restarts repeatedly")
                await self.rest(BACKOFF_S[0])
                continue
            if detail is not None:
                return detail

    async def stamp(self) -> int:
        """As of every run; a native trainer answers for itself, and is not kept waiting for its folder."""
        return time.time_ns() if self.peer.native else await Run.stamp(self)

    # --- Asking ---------------------------------------------------------------------------------------------------

    async def _ask(self) -> HttpAnswer | PeerError:
        """Send the request once.

        A trainer that is known to be native has 2 s for the headers. Of any other we cannot know whether it saves
        before it answers; asking again would make it save twice. So its first request stays open as long as there is
        time, unless its status says that it is native and only hangs.
        """
        body = self._request().to_json()
        if self.peer.native:
            return await self.peer.call("POST", self.path, body=body)
        patience_s = self.left_s()
        async with asyncio.TaskGroup() as group:
            post = group.create_task(self.peer.call("POST", self.path, body=body, headers_s=patience_s))
            done, _ = await asyncio.wait({post}, timeout=min(HEADERS_S, patience_s))
            if not done:
                if isinstance(await self._status(), TrainerStatus):
                    post.cancel()
                    return HungError(f"{self.peer.options.url}: no answer to POST {self.path} in {HEADERS_S:.0f} s")
                self.progress("waiting_answer")
                done, _ = await asyncio.wait({post}, timeout=min(self.common.seed_s, self.left_s()))
                if not done:
                    self.hung.set()
            return await post

    def _request(self) -> TriggerRequest:
        action = self.action
        return TriggerRequest(
            id=wire_id(action.id),
            reason=Reason(action.reason) if action.reason in [*Reason] else Reason.OTHER,
            deadline_s=max(0.0, action.by_s - self.clock()),
            after=After(action.after.value),
            event=action.outage,
            lease_s=action.lease_s,
        )

    async def _respond(self, answer: HttpAnswer | PeerError) -> Detail | None:
        """Act on an answer: the checkpoint's end, or None to ask again."""
        if isinstance(answer, HttpAnswer):
            verdict = classify(answer.status, location=answer.location, retry_after=answer.retry_after)
            return await self._conduct(answer, verdict)
        await self._fault(answer)
        return None

    async def _fault(self, error: PeerError) -> None:
        """No answer: give up, or rest before the next try."""
        if isinstance(error, GoneError):
            self.gone()
            raise EffectorError(str(error))
        if isinstance(error, WrongUserError):
            raise EffectorError(str(error))
        if isinstance(error, BrokenError):
            await self._count_failure(str(error))
            return
        self.hung.set()
        self.progress("hung")
        await self.rest(_PACE_S)

    async def _conduct(self, answer: HttpAnswer, verdict: TriggerAnswer) -> Detail | None:
        match verdict.meaning:
            case Meaning.NATIVE:
                self.peer.native = True
                return await self._follow(str(verdict.location))
            case Meaning.ADOPT | Meaning.DUMB_ASYNC:
                return await self._adopt(answer, verdict)
            case Meaning.DUMB_SYNC:
                return await self._await_folder(answer, self.common.seed_s)
            case Meaning.BUSY:
                self.progress("busy")
                await self._yield_to(verdict.retry_after_s)
            case Meaning.NO_ROUTE if self.path == TRIGGER_PATH:
                self.path = CHECKPOINTS_PATH
            case Meaning.FAILED:
                await self._count_failure(f"{self.peer.options.url}: POST {self.path} answered {answer.status}")
            case Meaning.NO_ROUTE:
                routes = f"POST {TRIGGER_PATH} nor {CHECKPOINTS_PATH}"
                self.fail(f"has neither {routes} (it answered {answer.status}; check that this is the trainer)")
            case Meaning.BAD_TOKEN:
                self.peer.forget_token()
                token = "the token" if self.peer.options.token is not None else "a request without token"
                self.fail(f"refuses {token} (HTTP {answer.status}; check `token` of {self.action.trainer})")
            case Meaning.REFUSED:
                self.fail(f"refuses the request (HTTP {answer.status}; expected 202)")
        return None

    async def _yield_to(self, retry_after_s: float) -> None:
        """Rest for as long as a busy trainer wants, but for no more than a tenth of what is left."""
        await self.rest(max(_PACE_S, min(retry_after_s, 0.1 * self.left_s())))

    async def _count_failure(self, what: str) -> None:
        if self.failures >= len(BACKOFF_S):
            msg = f"{what}, {self.failures + 1} times; its earlier checkpoint remains"
            raise EffectorError(msg)
        self.progress("retrying")
        await self.rest(BACKOFF_S[self.failures])
        self.failures += 1

    # --- Following a native checkpoint ---------------------------------------------------------------------------

    async def _follow(self, path: str) -> Detail:
        """Poll, long, until the checkpoint ends. Raises _AskAgain when it is not known any more."""
        nonsense = 0
        phase = ""
        while True:
            asked_s = self.clock()
            self.left_s()
            question = f"{path}?wait={_POLL_S:g}" + (f"&seen={phase}" if phase else "")
            answer = await self.peer.call("GET", question, headers_s=_POLL_S + HEADERS_S)
            if (busy_s := busy_for_s(answer)) is not None:
                await self._yield_to(busy_s)
                continue
            status = self._understood(answer)
            pace_s = _PACE_S
            if isinstance(status, CheckpointStatus):
                nonsense = 0
                pace_s = _PACE_S if phase == status.phase.value else _NEWS_S
                phase = status.phase.value
                self._report(status)
                if status.phase is Phase.COMMITTED:
                    return self._native(status)
                if status.phase in (Phase.FAILED, Phase.ABORTED):
                    self.fail(f"checkpoint {status.phase.value}: {status.error or 'without a reason'}")
            elif isinstance(status, WireError):
                nonsense += 1
                if nonsense >= _MAX_NONSENSE:
                    self.fail(f"sends an invalid answer to GET {path}: {status.reason}")
            await self.rest(pace_s - (self.clock() - asked_s))

    def _understood(self, answer: HttpAnswer | PeerError) -> CheckpointStatus | WireError | None:
        """Return the status, what is wrong with it, or None for "hung: ask again"."""
        match answer:
            case GoneError():
                self.gone()
                msg = f"{answer}: the trainer ended while its checkpoint was {self.stage}"
                raise EffectorError(msg)
            case HungError():
                self.hung.set()
                self.progress("hung")
                return None
            case WrongUserError():
                raise EffectorError(str(answer))
            case PeerError():
                return WireError(str(answer))
            case HttpAnswer(status=404 | 410):
                raise _AskAgain
            case HttpAnswer(status=200) if not answer.fault:
                return CheckpointStatus.parse(answer.body)
        return WireError(answer.fault or f"HTTP {answer.status} instead of 200")

    def _report(self, status: CheckpointStatus) -> None:
        self.stage = status.phase.value
        most_s = self.peer.options.max_checkpoint_s
        self.publish(
            CheckpointProgress(
                at_s=self.clock(),
                trainer=self.action.trainer,
                action_id=self.action.id,
                stage=status.phase.value,
                eta_s=None if status.eta_s is None else min(status.eta_s, most_s),
                bytes_done=status.bytes_done,
                bytes_total=status.bytes_total,
                paused=status.paused,
                step=status.step,
            )
        )

    def _native(self, status: CheckpointStatus) -> Detail:
        return (
            ("native", True),
            ("step", status.step),
            ("at_paused_step", status.at_paused_step),
            ("verified", status.durable and status.manifest_digest != ""),
            ("paused", status.paused),
            ("bytes", status.bytes_total),
            ("path", status.path),
            ("digest", status.manifest_digest),
            ("took_s", round(self.took_s(), 3)),
        )

    # --- Peers that report less ----------------------------------------------------------------------------------

    async def _adopt(self, answer: HttpAnswer, verdict: TriggerAnswer) -> Detail:
        """Find the checkpoint that runs, by what the trainer's status says, else by what appears in its folder."""
        if verdict.location is not None:
            return await self._follow(verdict.location)
        while True:
            status = await self._status()
            if status is None or (self.peer.native and isinstance(status, HungError)):
                await self.rest(_POLL_S)
                continue
            if not isinstance(status, TrainerStatus):
                break
            if status.checkpoint:
                return await self._follow(f"{CHECKPOINTS_PATH}/{status.checkpoint}")
            last = status.last_committed
            if last is not None and last.age_s < self.took_s():
                verified = last.manifest_digest != ""
                detail = self.dumb(step=last.step, verified=verified, paused=status.paused, path=last.path)
                return await self.flushed(detail)
            if verdict.meaning is Meaning.ADOPT:
                raise _AskAgain  # what was running has just ended, and began before us
            self.progress("waiting_status")
            await self.rest(_POLL_S)
        return await self._await_folder(answer, self.common.max_checkpoint_s)

    async def _await_folder(self, answer: HttpAnswer, mute_s: float) -> Detail:
        """Wait for what appears in the folder; where there is none, until mute_s after we asked.

        A 2xx may mean "begun" as well as "done": many scripts answer first, and save then.
        """
        folder, most_s = self.common.checkpoint_dir, self.common.max_checkpoint_s
        if folder is None:
            self.progress("waiting")
            await self.rest(mute_s - self.took_s())
            self.left_s()
            return await self.flushed(self.dumb(confirmed=False))
        self.progress("waiting_folder")
        until_s = most_s if self.fallback is None else mute_s
        found = await self.appeared(until_s)
        while found is None and until_s < most_s:
            if self.growing:  # a second save would take the disk from this one
                until_s = min(most_s, self.took_s() + 2 * QUIET_S)
            else:
                self.hung.set()  # the trainer has had its time: start the fallback as well
                until_s = most_s
            found = await self.appeared(until_s)
        if found is None:
            problem = f"answered {answer.status}, but no newer checkpoint appeared in {folder} within {most_s:.0f} s"
            self.fail(
                f"{problem}{self.unseen}: started, not confirmed (check `checkpoint_dir` of {self.action.trainer})"
            )
        return await self.flushed(found)

    async def _status(self) -> TrainerStatus | WireError | PeerError | None:
        """Ask for the trainer's status; None: it is busy."""
        answer = await self.peer.call("GET", STATUS_PATH)
        if busy_for_s(answer) is not None:
            return None
        if isinstance(answer, PeerError):
            return answer
        if answer.status != 200 or answer.fault:
            return WireError(answer.fault or f"HTTP {answer.status} instead of 200")
        status = TrainerStatus.parse(answer.body)
        if isinstance(status, TrainerStatus):
            self.peer.native = True
        return status
