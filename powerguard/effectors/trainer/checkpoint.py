"""One emergency checkpoint of one trainer, from the first request to durable, or to a clear reason why not.

Whatever the trainer answers, this ends before the action's deadline. The same id is sent at every try, so a native
trainer makes one checkpoint of them all.

A second way to a checkpoint, if the first brings none: after it has failed, or in parallel while no answer comes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from powerguard.core.model.actions import Detail
from powerguard.core.model.events import CheckpointProgress
from powerguard.effectors.base import EffectorError
from powerguard.effectors.trainer.peer import (
    BACKOFF_S,
    HEADERS_S,
    BrokenError,
    GoneError,
    HttpAnswer,
    HungError,
    Meaning,
    PeerError,
    StrangerError,
    TrainerPeer,
    TriggerAnswer,
    busy_for_s,
    classify,
)
from powerguard.effectors.trainer.run import QUIET_S, Run
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

_Result = TypeVar("_Result")
_log = structlog.get_logger("powerguard.trainer")


async def instead(first: Callable[[], Awaitable[Detail]], second: Run, hung: asyncio.Event, trainer: str) -> Detail:
    """Return what the first brings, else what the second does; of both at once, whichever is done earlier.

    hung: set when no answer comes; then the second starts in parallel with the first, which continues. Raises
    EffectorError that says why each has failed.
    """
    brought: Detail | None = None
    faults: list[str] = []
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(tried(first()))
        waiting = group.create_task(hung.wait())
        await asyncio.wait({asked, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        pending: set[asyncio.Task[Detail | EffectorError]] = {asked}
        is_second = False
        while pending and brought is None:
            if not is_second and (not asked.done() or isinstance(asked.result(), EffectorError)):
                because = str(asked.result()) if asked.done() else "does not answer"
                _log.warning("trainer_fallback", trainer=trainer, by=second.where, because=because)
                pending.add(group.create_task(tried(second.run())))
                is_second = True
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: each is not asked):
                match task.result():
                    case EffectorError() as error:
                        faults.append(str(error))
                    case detail if task is asked:
                        brought = brought or detail
                    case detail:
                        brought = brought or (*detail, ("fallback", second.where))
        for task in pending:
            task.cancel()
    if brought is None:
        raise EffectorError("; instead: ".join(faults))
    return brought


async def tried(work: Awaitable[_Result]) -> _Result | EffectorError:
    """A failure as a value, so that the failure of one way does not end the other."""
    try:
        return await work
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
        if isinstance(error, StrangerError):
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
                return await self._unheard(answer, self.common.seed_s)
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
                self._tell(status)
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
            case StrangerError():
                raise EffectorError(str(answer))
            case PeerError():
                return WireError(str(answer))
            case HttpAnswer(status=404 | 410):
                raise _AskAgain
            case HttpAnswer(status=200) if not answer.fault:
                return CheckpointStatus.parse(answer.body)
        return WireError(answer.fault or f"HTTP {answer.status} instead of 200")

    def _tell(self, status: CheckpointStatus) -> None:
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
                told = self.dumb(step=last.step, verified=verified, paused=status.paused, path=last.path)
                return await self.flushed(told)
            if verdict.meaning is Meaning.ADOPT:
                raise _AskAgain  # what was running has just ended, and began before us
            self.progress("waiting_status")
            await self.rest(_POLL_S)
        return await self._unheard(answer, self.common.max_checkpoint_s)

    async def _unheard(self, answer: HttpAnswer, mute_s: float) -> Detail:
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
            told = f"answered {answer.status}, but no newer checkpoint appeared in {folder} within {most_s:.0f} s"
            self.fail(f"{told}{self.unseen}: started, not confirmed (check `checkpoint_dir` of {self.action.trainer})")
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
