"""Messages from the loop to their targets: heard, queued, delivered in order, retried until they arrive.

    loop ── hear(notes) ──▶ composer ──▶ queue (memory, then disk) ──▶ a task for each target ──▶ the other side

`hear` only hands over; all else is done in tasks of its own, so that no mistake here and no target that hangs can
reach the loop. A target that fails is retried after 1 s, then 2 s, up to 10 min, each with up to half as much again.
A message that a target refuses, such as one without the keyword that its bot demands, goes behind those not tried yet.
"""

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import structlog

from powerguard.clock import Clock, boottime_s
from powerguard.core.model.actions import Note
from powerguard.core.model.state import State
from powerguard.daemon.attempt import keep_running, rest
from powerguard.daemon.journal.journal import Executor
from powerguard.daemon.notify.composer import (
    Message,
    MessageComposer,
    StepNotes,
    composed,
    fitting,
    is_moment,
    is_wanted,
    message_of,
    reason_levels,
)
from powerguard.daemon.notify.queue import Queue
from powerguard.daemon.notify.targets import RESEND_S, DeliveryError, Target, bounded, make
from powerguard.daemon.observe.port import Daemon, TargetView
from powerguard.daemon.observe.readiness import readiness
from powerguard.effectors.child import Spawn
from powerguard.settings.notify import NotifyOptions

log = structlog.get_logger()

FIRST_S: Final = 1.0
LONGEST_S: Final = 600.0
LATE_S: Final = 60.0
"""From this age on a message says when it happened, and begin and end become one."""
GIVE_UP_S: Final = 3600.0
"""A message that a target has refused for this long is dropped."""
WATCH_S: Final = 60.0
DRILL_DAYS: Final = 90
MOST_HEARD: Final = 2000
CLOSE_S: Final = 1.0


class Messenger:
    """One per daemon. It outlives a reload, which only changes its targets."""

    def __init__(
        self,
        options: NotifyOptions,
        path: Path,
        *,
        host: str,
        spawn: Spawn,
        wall: Callable[[], float],
        clock: Clock = boottime_s,
        writer: Executor | None = None,
    ) -> None:
        """Start the targets' threads; the disk is first touched by `run`."""
        self.composer = MessageComposer(host.partition(".")[0] or "host", options.language, wall)
        self.queue = Queue(path, writer, wall, self._take_kept, clock)
        self._spawn = spawn
        self._wall = wall
        self._clock = clock
        self._heard: deque[StepNotes] = deque(maxlen=MOST_HEARD)
        self._overheard = 0
        self._wake = asyncio.Event()
        self._arrived: dict[str, asyncio.Event] = {}
        self._records: dict[str, TargetView] = {}
        self._failing: dict[str, float] = {}
        """Since when each target fails, by the clock that is never set."""
        self._refused: dict[str, dict[int, float]] = {}
        """Since when each target refuses which of its messages, by the same clock."""
        self._changed = asyncio.Event()
        self._loaded = False
        self._mode = ""
        self._before: set[str] = set()
        self._targets: dict[str, Target] = {}
        self.use(options)

    def hear(self, notes: tuple[Note, ...], before: State, outage: str, mode: str) -> None:
        """Take the notes of one step. Returns at once."""
        if not self._targets:
            return
        self._overheard += len(self._heard) == MOST_HEARD
        self._heard.append(StepNotes(notes, before, outage, mode, self._wall()))
        self._wake.set()

    def use(self, options: NotifyOptions) -> None:
        """Take the targets of new settings. Raises RuntimeError, and keeps the old ones, if no thread can start."""
        made = {
            name: make(name, each, spawn=self._spawn, wall=self._wall, standing=self.composer.standing)
            for name, each in options.targets.items()
        }
        for target in self._targets.values():
            target.close()
        self._targets = made
        self._options = options
        self.composer.language = options.language
        self._changed.set()

    # --- What watchers see --------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        """Why messages may be lost; "" while they are on disk, and there is room for more."""
        return self.queue.trouble or self.queue.full

    def views(self) -> tuple[TargetView, ...]:
        """Return how each target is."""
        return tuple(self._view(name) for name in self._targets)

    def _view(self, name: str) -> TargetView:
        kind, oldest = self._options.targets[name].kind, self.queue.oldest(name)
        age_s = None if oldest is None else max(0.0, self._wall() - oldest)
        known = self._records.get(name) or TargetView(name=name, kind=kind)
        return replace(
            known, kind=kind, queued=self.queue.count(name), oldest_age_s=age_s, since=self._failing_since(name)
        )

    def _failing_since(self, name: str) -> float | None:
        """Return since when a target fails, Unix seconds of the wall clock as it is set now; None if it does not."""
        failing_s = self._failing.get(name)
        return None if failing_s is None else round(self._wall() - (self._clock() - failing_s), 3)

    def pending(self, most: int) -> list[dict[str, Any]]:
        """Return the oldest messages that wait, for each target in turn."""
        shown = ("at", "event", "level", "title")
        waiting = ((name, message) for name in self._targets for _, message in self.queue.waiting(name))
        return [{"target": name, **{key: getattr(each, key) for key in shown}} for name, each in islice(waiting, most)]

    async def test(self, names: Iterable[str], limit_s: float) -> dict[str, tuple[bool, str]]:
        """Send a test message past the queue; return for each target whether it arrived, and the answer."""
        found: dict[str, tuple[bool, str]] = {}
        message = self.composer.test(self._mode)

        async def one(name: str) -> None:
            try:
                limit = min(limit_s, self._options.targets[name].limit_s)
                found[name] = True, await bounded(self._targets[name].deliver(message, limit), limit)
            except DeliveryError as error:
                found[name] = False, str(error)
            self._enter(name, ok=found[name][0], answer=found[name][1])

        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(one(name))
        return found

    # --- Running ------------------------------------------------------------------------------------------------------

    async def run(self, daemon: Daemon) -> None:
        """Deliver until cancelled."""
        while True:
            self._changed.clear()
            if self._targets and not self._loaded:
                await self.queue.load()
                self._loaded = True
            self.queue.retain(self._targets)
            self._arrived = {name: asyncio.Event() for name in self._targets}
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(keep_running(f"messages to {name}", partial(self._serve, name)))
                    for name in self._targets
                ]
                running.append(tasks.create_task(keep_running("messages", self._listen)))
                running.append(tasks.create_task(keep_running("message watch", partial(self._watch, daemon))))
                await self._changed.wait()
                for task in running:
                    task.cancel()

    async def close(self, limit_s: float = CLOSE_S) -> None:
        """Write what was heard last, for at most limit_s. Nothing is delivered any more: the next start does it."""
        if self._loaded:
            self._take_heard()
        await self.queue.close(limit_s)
        for target in self._targets.values():
            target.close()

    def _take_kept(self, kept: Mapping[str, Any]) -> None:
        """Take what an earlier daemon has kept; values that are none of ours are passed over."""
        standing, muted, said, records = (
            each if isinstance(each := kept.get(name), dict) else {}
            for name in ("standing", "muted", "said", "records")
        )
        for found, into in ((standing, self.composer.standing), (muted, self.composer.muted)):
            for key, plain in found.items():
                with contextlib.suppress(ValueError, TypeError):
                    if key not in self.composer.over:  # it was, before the disk answered
                        into.setdefault(key, message_of(plain))
        self.composer.said = {key: at for key, at in said.items() if is_moment(at)} | self.composer.said
        for name, plain in records.items():
            with contextlib.suppress(ValueError, TypeError):
                record = self._records.setdefault(name, _record_of(plain, name))
                if record.since is not None:
                    self._failing.setdefault(name, self._clock() - max(0.0, self._wall() - record.since))

    async def _listen(self) -> None:
        while True:
            self._take_heard()
            await self._wake.wait()
            self._wake.clear()

    def _take_heard(self) -> None:
        while self._heard:
            heard = self._heard.popleft()
            self._mode = heard.mode
            self._add(self.composer.of_step(heard))
        if self._overheard:
            self.composer.left_out["alarms"] += self._overheard
            self._overheard = 0

    def _add(self, messages: Iterable[Message]) -> None:
        for message in messages:
            wanted = [n for n, each in self._options.targets.items() if is_wanted(message, each.alarms)]
            self.queue.add(message, wanted)
            for name in wanted:
                if name in self._arrived:
                    self._arrived[name].set()
        self.queue.keep("standing", {key: each.plain() for key, each in self.composer.standing.items()})
        self.queue.keep("muted", {key: each.plain() for key, each in self.composer.muted.items()})
        self.queue.keep("said", self.composer.said)

    async def _watch(self, daemon: Daemon) -> None:
        while True:
            await rest(WATCH_S)
            self._look(daemon)

    def _look(self, daemon: Daemon) -> None:
        self._mode = daemon.policy.mode.value
        found = reason_levels(readiness(daemon), daemon.strangers) | _drill(daemon)
        # Twice in a row: at the start nothing has been looked at yet, and what passes in a minute is no trouble.
        known = self._before | {key.removeprefix("reason:") for key in (*self.composer.standing, *self.composer.muted)}
        reasons = {name: each for name, each in found.items() if name in known}
        self._before = set(found)
        is_whole = not daemon.journal_trouble
        self._add(self.composer.watch(reasons, daemon.state, self._mode, is_whole=is_whole))
        self.queue.prune()

    # --- Delivering ---------------------------------------------------------------------------------------------------

    async def _serve(self, name: str) -> None:
        target, limit_s = self._targets[name], self._options.targets[name].limit_s
        rest_s = least_s = refreshed = 0.0
        while True:
            await self._rest(name, rest_s, least_s)
            batch = self._batch(target)
            try:
                if batch:
                    message = composed((each for _, each in batch), self._options.language, self._wall(), LATE_S)
                    self._enter(name, ok=True, answer=await bounded(target.deliver(message, limit_s), limit_s))
                    self._done(name, [seq for seq, _ in batch])
                elif not 0.0 <= self._wall() - refreshed < RESEND_S:  # a clock that was set back is no reason to wait
                    answer = await bounded(target.refresh(), limit_s)
                    refreshed = self._wall()
                    if answer and (record := self._records.get(name)) is not None and record.since is not None:
                        self._enter(name, ok=True, answer=answer)
                rest_s = least_s = 0.0
            except DeliveryError as error:
                rest_s, least_s = min(LONGEST_S, max(FIRST_S, 2 * rest_s)), error.again_s or FIRST_S
                self._enter(name, ok=False, answer=str(error))
                if batch and error.refused:
                    self._give_up(name, batch, str(error))

    def _done(self, name: str, seqs: Sequence[int]) -> None:
        self.queue.done(name, seqs)
        for seq in seqs:
            self._refused.get(name, {}).pop(seq, None)

    def _give_up(self, name: str, batch: Sequence[tuple[int, Message]], because: str) -> None:
        """Put back what a target refuses, and drop what it has refused for long."""
        refused, now_s = self._refused.setdefault(name, {}), self._clock()
        if lost := [seq for seq, _ in batch if now_s - refused.setdefault(seq, now_s) > GIVE_UP_S]:
            record = self._records[name]
            self._records[name] = replace(record, dropped=record.dropped + len(lost))
            log.error("message_dropped", target=name, because=because, title=batch[-1][1].title)
            self._done(name, lost)

    async def _rest(self, name: str, rest_s: float, least_s: float) -> None:
        """Wait for the next try; a new message is a reason to try sooner, but not before least_s."""
        arrived = self._arrived[name]
        await rest(min(LONGEST_S, least_s))
        most_s = min(LONGEST_S, rest_s * (1.0 + secrets.randbelow(500) / 1000.0)) - least_s
        if not rest_s:
            most_s = 0.0 if self.queue.count(name) else RESEND_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, most_s)):
                await arrived.wait()
        arrived.clear()

    def _batch(self, target: Target) -> list[tuple[int, Message]]:
        """Return what goes next: a message, or those of a trouble or an outage whose begin and end are both late."""
        waiting, refused = self.queue.waiting(target.name), self._refused.get(target.name, {})
        if not waiting:
            refused.clear()
            return []
        waiting.sort(key=lambda each: each[0] in refused)
        first = waiting[0][1]
        if not target.folds or first.status != "begin" or self._wall() - first.at < LATE_S:
            return waiting[:1]
        related = [each for each in waiting if (each[1].outage or each[1].key) == (first.outage or first.key)]
        ended = any(each.key == first.key and each.status == "end" for _, each in related)
        return fitting(related) if ended else waiting[:1]

    def _enter(self, name: str, *, ok: bool, answer: str) -> None:
        old, now = self._records.get(name) or TargetView(name=name, kind=""), round(self._wall(), 3)
        if ok:
            self._failing.pop(name, None)
        else:
            self._failing.setdefault(name, self._clock())
        since = self._failing_since(name)
        delivered_, failed = old.delivered + ok, old.failed + (not ok)
        self._records[name] = replace(old, at=now, since=since, answer=answer, delivered=delivered_, failed=failed)
        self.queue.keep("records", {each: asdict(record) for each, record in self._records.items()})
        if ok and old.since is not None:
            log.info("target_reached", target=name, answer=answer)
        elif not ok and old.since is None:
            log.warning("target_failed", target=name, because=answer)


def _record_of(plain: Mapping[str, Any], name: str) -> TargetView:
    """Return the record of a target as it was kept. Raises ValueError, TypeError."""
    made = TargetView(**{**plain, "name": name})
    counts, moments = (made.delivered, made.failed, made.dropped), (made.at, made.since)
    are_counts = all(isinstance(each, int) for each in counts)
    if not (are_counts and all(each is None or is_moment(each) for each in moments) and isinstance(made.answer, str)):
        msg = "no record"
        raise ValueError(msg)
    return made


def _drill(daemon: Daemon) -> dict[str, tuple[str, str]]:
    """Return the alarm of a drill that is overdue. Before the first weeks are over (mode: rehearse) none is."""
    last = daemon.state.learned.drill
    if last is None:
        because = "none has been run yet"
        return {"drill_overdue": ("warning", because)} if daemon.policy.powers_off else {}
    days = (daemon.clock() - last.at_s) / 86400.0
    return {"drill_overdue": ("warning", f"the last one was {days:.0f} days ago")} if days > DRILL_DAYS else {}
