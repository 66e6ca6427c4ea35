"""The bulkhead: every effector yields an outcome to the loop, in time."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import structlog

from powerguard.clock import Clock
from powerguard.core.model.actions import Action, Detail
from powerguard.core.model.events import Done, Failed
from powerguard.daemon.log import describe
from powerguard.effectors.base import Effector, EffectorError

log = structlog.get_logger()

GRACE_S = 0.25
"""How long a cancelled effector may clean up before it is left behind."""


@dataclass(slots=True)
class AbandonedTasks:
    """Tasks that swallowed their cancellation and still run somewhere; held, so that nothing collects them."""

    running: set[asyncio.Task[object]] = field(default_factory=set)

    def take(self, task: asyncio.Task[object]) -> None:
        """Keep a task that did not end when it was cancelled."""
        self.running.add(task)
        task.add_done_callback(self.running.discard)


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of an effector: exactly one of the two is set."""

    detail: Detail | None = None
    error: BaseException | None = None


async def attempt(effector: Effector, action: Action, *, clock: Clock, abandoned: AbandonedTasks) -> Done | Failed:
    """Carry out one action before `action.by_s`, and return its outcome. Raises CancelledError only.

    It returns at the latest GRACE_S after the deadline, even if the effector swallows its cancellation. An effector
    that blocks the event loop's thread cannot be bounded from here: effectors must not.
    A group of exceptions, an effector that cancels itself and one that calls sys.exit() are failures like any other.
    """
    began_s = clock()
    limit_s = action.by_s - began_s
    if not limit_s > 0:  # also NaN
        return _failed(action, clock, began_s, f"not started: its deadline passed {-limit_s:.1f} s ago", timed_out=True)
    # No asyncio.timeout: it waits for as long as the effector takes to clean up. No TaskGroup, for the same reason.
    task = asyncio.get_running_loop().create_task(_carry_out(effector, action), name=f"action {action.id}")
    try:
        await asyncio.wait((task,), timeout=None if math.isinf(limit_s) else limit_s)
        timed_out = not task.done()
        if timed_out:
            task.cancel()
            await asyncio.wait((task,), timeout=GRACE_S)
    except asyncio.CancelledError:
        task.cancel()
        try:
            await asyncio.wait((task,), timeout=GRACE_S)
        finally:
            if not task.done():
                abandoned.take(task)
        raise
    if timed_out:
        reason = f"timed out after {clock() - began_s:.1f} s"
        if not task.done():
            abandoned.take(task)
            reason += f", and did not stop within {GRACE_S:g} s more (left behind)"
            log.warning(
                "action_left_behind", action_id=action.id, action=type(action).__name__, running=len(abandoned.running)
            )
        return _failed(action, clock, began_s, reason, timed_out=True)
    return _outcome(task, action, clock, began_s)


async def _carry_out(effector: Effector, action: Action) -> _Result:
    """Turn every end but our own cancellation into a value: a SystemExit in a task would end the daemon's loop."""
    try:
        return _Result(detail=await effector.carry_out(action))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - the one bulkhead: a bug in an effector must not stop the shutdown
        return _Result(error=error)


def _outcome(task: asyncio.Task[_Result], action: Action, clock: Clock, began_s: float) -> Done | Failed:
    if task.cancelled():
        return _failed(action, clock, began_s, "the effector cancelled itself")
    result = task.result()
    error = result.error
    if error is None and not _is_detail(result.detail):
        error = TypeError(f"the effector returned a {type(result.detail).__name__}, not (name, number or string) pairs")
    if error is None:
        now_s = clock()
        return Done(at_s=now_s, action=action, took_s=now_s - began_s, detail=result.detail or ())
    if isinstance(error, EffectorError):
        reason = describe(error, 600).removeprefix(f"{type(error).__name__}: ")  # it may name several peers
        failed = _failed(action, clock, began_s, reason, timed_out=error.timed_out)
        return replace(failed, harmless=error.harmless, detail=error.detail)
    log.error("action_failed", action_id=action.id, action=type(action).__name__, exc_info=error)
    return _failed(action, clock, began_s, describe(error))


def _failed(
    action: Action, clock: Callable[[], float], began_s: float, reason: str, *, timed_out: bool = False
) -> Failed:
    now_s = clock()
    return Failed(at_s=now_s, action=action, took_s=now_s - began_s, reason=reason, timed_out=timed_out)


def _is_detail(detail: object) -> bool:
    """Say whether detail can be journalled."""
    return isinstance(detail, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is str and _is_scalar(pair[1]) for pair in detail
    )


def _is_scalar(value: object) -> bool:
    return value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))


RESTART_S = 1.0
RESTART_MAX_S = 30.0
"""A task that broke is started again after RESTART_S, and after twice as long each time, up to this: a bug that repeats
must become neither a busy loop nor a flood in the log."""


async def keep_running(
    name: str,
    run: Callable[[], Awaitable[object]],
    on_failure: Callable[[str], None] = lambda _: None,
    *,
    once: bool = False,
) -> None:
    """Run a task that should not end, again and again: a bug in one source must not take the daemon down.

    on_failure: called each time, with why it ended, in one line. once: do not start it again. One that swallowed its
    cancellation is not started again either. Raises only CancelledError.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    rest_s = RESTART_S
    while True:
        reason = "it ended by itself"
        began_s = loop.time()
        try:
            await run()
        except Exception as error:  # The same bulkhead, for permanent tasks: a bug must not end the daemon.
            reason = describe(error)
            log.exception("task_failed", task=name)
        if once or (task is not None and task.cancelling()):
            return
        rest_s = RESTART_S if loop.time() - began_s > RESTART_MAX_S else rest_s
        on_failure(f"{name}: {reason}")
        log.error("task_restarted", task=name, because=reason, after_s=rest_s)
        await rest(rest_s)
        rest_s = min(2 * rest_s, RESTART_MAX_S)


async def rest(seconds: float) -> None:
    """Let `seconds` of the loop's time pass."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
    except TimeoutError:
        pass
