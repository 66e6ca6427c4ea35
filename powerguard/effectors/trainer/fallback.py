"""A second way to a checkpoint, where the first brings none: after it has failed, or beside it while nobody answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from powerguard.core.actions import Detail
from powerguard.effectors.base import EffectorError
from powerguard.effectors.trainer.run import Run

_Result = TypeVar("_Result")
_log = structlog.get_logger("powerguard.trainer")


async def instead(first: Callable[[], Awaitable[Detail]], second: Run, hung: asyncio.Event, trainer: str) -> Detail:
    """Return what the first brings, else what the second does; of both at once, whichever is done earlier.

    hung: set when nobody answers; then the second begins beside the first, which is never given up for it. Raises
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
    """A failure as a value, so that one way's does not end the other."""
    try:
        return await work
    except EffectorError as error:
        return error
