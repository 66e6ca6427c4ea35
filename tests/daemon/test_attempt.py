"""The bulkhead: every way in which an effector can end, and what the loop gets, and when.

In virtual time, so that every moment is exact however busy the machine is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from powerguard.core.model.actions import Action, Detail, EnsurePolicy
from powerguard.core.model.events import Done, Failed
from powerguard.core.model.serialisation import from_plain, to_plain
from powerguard.daemon.attempt import GRACE_S, AbandonedTasks, attempt
from powerguard.effectors.base import EffectorError
from tests.daemon.looped import in_virtual_time, now_s


class Does:
    """An effector that does what it is given."""

    def __init__(self, what: Callable[[], Awaitable[object]]) -> None:
        self.what = what
        self.asked: list[Action] = []

    async def carry_out(self, action: Action) -> Detail:
        self.asked.append(action)
        return cast("Detail", await self.what())


def order(limit_s: float) -> EnsurePolicy:
    return EnsurePolicy(id="o-1-7", by_s=now_s() + limit_s, outage="o-1")


async def outcome(what: Callable[[], Awaitable[object]], limit_s: float = 5.0) -> Done | Failed:
    abandoned = AbandonedTasks()
    found = await attempt(Does(what), order(limit_s), clock=now_s, abandoned=abandoned)
    assert from_plain(to_plain(found), type(found)) == found, "every outcome can be journalled"
    assert not abandoned.running
    return found


async def raising(error: BaseException) -> None:
    raise error


@in_virtual_time
async def test_done() -> None:
    async def work() -> Detail:
        await asyncio.sleep(2.0)
        return (("policy", "always-on"), ("verified", True))

    found = await outcome(work)
    assert isinstance(found, Done)
    assert found.detail == (("policy", "always-on"), ("verified", True))
    assert found.took_s == pytest.approx(2.0)
    assert found.action.id == "o-1-7"


@pytest.mark.parametrize("harmless", [True, False])
@in_virtual_time
async def test_an_effector_that_is_certain_that_it_did_nothing(*, harmless: bool) -> None:
    detail: Detail = (("restore", "last-state"),)
    found = await outcome(lambda: raising(EffectorError("refused", harmless=harmless, detail=detail)))
    assert isinstance(found, Failed)
    assert (found.harmless, found.reason, found.detail) == (harmless, "refused", detail)


@pytest.mark.parametrize("timed_out", [True, False])
@in_virtual_time
async def test_an_effector_that_ends_at_the_deadline_by_itself_has_timed_out(*, timed_out: bool) -> None:
    found = await outcome(lambda: raising(EffectorError("late", timed_out=timed_out)))
    assert isinstance(found, Failed)
    assert found.timed_out is timed_out


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            EffectorError("bmc 10.0.0.5: refused the policy (privilege too low)"),
            "bmc 10.0.0.5: refused the policy (privilege too low)",
        ),
        (ValueError("bad\nvalue\x1b[2J"), r"ValueError: bad\nvalue\x1b[2J"),
        (KeyError("x"), "KeyError: 'x'"),
        (OSError(111, "Connection refused"), "ConnectionRefusedError: [Errno 111] Connection refused"),
        (AssertionError(), "AssertionError"),
        (SystemExit(3), "SystemExit: 3"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (
            ExceptionGroup("unhandled errors", [ValueError("a"), OSError("b")]),
            "ExceptionGroup of 2: ValueError: a; OSError: b",
        ),
        (BaseExceptionGroup("g", [SystemExit(1)]), "BaseExceptionGroup of 1: SystemExit: 1"),
        (ValueError("x" * 5000), "ValueError: " + "x" * 288 + "...(+4712 chars)"),
        (ConnectionError("http://pg:hunter2@10.0.0.5/ refused"), "ConnectionError: http://10.0.0.5/ refused"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@in_virtual_time
async def test_every_exception_is_a_reason_in_one_line(error: BaseException, reason: str) -> None:
    found = await outcome(lambda: raising(error))
    assert isinstance(found, Failed)
    assert (found.reason, found.timed_out) == (reason, False)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@in_virtual_time
async def test_an_exception_that_cannot_be_printed() -> None:
    found = await outcome(lambda: raising(UnspeakableError()))
    assert isinstance(found, Failed)
    assert found.reason == "UnspeakableError: (cannot be printed)"


@in_virtual_time
async def test_a_failure_in_a_task_group_of_the_effector() -> None:
    """What killed a loop in the first sketch: a trainer that refuses, inside a TaskGroup."""

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raising(ConnectionRefusedError("llm refused")))
            group.create_task(asyncio.sleep(60))

    found = await outcome(work)
    assert isinstance(found, Failed)
    assert found.reason == "ExceptionGroup of 1: ConnectionRefusedError: llm refused"


@pytest.mark.parametrize(
    "value", ["text", 5, [("a", 1)], (("a", 1, 2),), (("a", [1]),), (("a", float("inf")),), None, {}]
)
@in_virtual_time
async def test_a_return_value_that_cannot_be_journalled_is_a_failure(value: object) -> None:
    """It would otherwise keep the journal from writing the outcome."""

    async def work() -> object:
        return value

    found = await outcome(work)
    assert isinstance(found, Failed)
    assert f"the effector returned a {type(value).__name__}" in found.reason


@in_virtual_time
async def test_an_effector_that_cancels_itself() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    found = await outcome(work)
    assert isinstance(found, Failed)
    assert found.reason == "the effector cancelled itself"


@in_virtual_time
async def test_the_deadline_is_absolute_and_kept() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    began_s = now_s()
    found = await outcome(work, 10.0)
    assert now_s() - began_s == pytest.approx(10.0)
    assert isinstance(found, Failed)
    assert found.timed_out
    assert found.reason == "timed out after 10.0 s"
    assert cleaned == [True]


@pytest.mark.parametrize("limit_s", [0.0, -3.0, float("nan")])
@in_virtual_time
async def test_an_action_whose_deadline_has_passed_is_not_started(limit_s: float) -> None:
    abandoned = AbandonedTasks()
    effector = Does(lambda: asyncio.sleep(0))
    found = await attempt(effector, order(limit_s), clock=now_s, abandoned=abandoned)
    assert isinstance(found, Failed)
    assert found.timed_out
    assert effector.asked == []


@in_virtual_time
async def test_no_deadline_means_no_limit() -> None:
    async def work() -> Detail:
        return ()

    found = await attempt(Does(work), order(float("inf")), clock=now_s, abandoned=AbandonedTasks())
    assert isinstance(found, Done)


@in_virtual_time
async def test_a_success_after_the_deadline_is_a_failure() -> None:
    """It caught its cancellation and returned something: half a job, for all we know."""

    async def work() -> Detail:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return (("step", 7),)
        return ()

    found = await outcome(work, 0.05)
    assert isinstance(found, Failed)
    assert found.timed_out


@in_virtual_time
async def test_an_effector_that_swallows_its_cancellation_is_left_behind() -> None:
    """Held, counted and told; the loop goes on a quarter of a second after the deadline."""
    stubborn = asyncio.Event()

    async def work() -> Detail:
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue
        return ()

    abandoned = AbandonedTasks()
    began_s = now_s()
    found = await attempt(Does(work), order(10.0), clock=now_s, abandoned=abandoned)
    assert now_s() - began_s == pytest.approx(10.0 + GRACE_S)
    assert isinstance(found, Failed)
    assert found.timed_out
    assert "did not stop within 0.25 s more (left behind)" in found.reason
    assert len(abandoned.running) == 1
    (task,) = abandoned.running
    stubborn.set()
    await asyncio.wait({task})
    assert not abandoned.running


@in_virtual_time
async def test_when_we_are_cancelled_the_effector_may_clean_up() -> None:
    """The daemon stops: children are killed in the effectors' own `finally`, and the cancellation goes on."""
    cleaned = []

    async def work() -> Detail:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.9 * GRACE_S)
            cleaned.append(True)
        return ()

    abandoned = AbandonedTasks()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(attempt(Does(work), order(60), clock=now_s, abandoned=abandoned))
        await asyncio.sleep(1.0)
        task.cancel()
    assert task.cancelled()
    assert cleaned == [True]
    assert not abandoned.running


@in_virtual_time
async def test_an_outcome_right_at_the_deadline_is_one_outcome() -> None:
    """Whichever of the two wins: no exception, no second answer."""
    for _ in range(50):

        async def work() -> Detail:
            await asyncio.sleep(0.002)
            return ()

        found = await attempt(Does(work), order(0.002), clock=now_s, abandoned=AbandonedTasks())
        assert isinstance(found, Done | Failed)
