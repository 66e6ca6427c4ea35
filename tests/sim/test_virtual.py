"""Virtual time: an hour in a blink, in order, and a world that stands still or hides a fault says so."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from powerguard.daemon.attempt import rest
from powerguard.sim.virtual import VirtualLoop


def play(world: Coroutine[Any, Any, object]) -> object:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(world)


def test_an_hour_of_sleeping_tasks() -> None:
    """Ten sleepers that wake every few seconds for an hour: seconds of ours at most, and each at its time."""
    woken: list[tuple[float, int]] = []

    async def sleeper(which: int) -> None:
        for at in range(1, 3600 // (which + 3)):
            await rest(which + 3.0)
            woken.append((asyncio.get_running_loop().time(), which))
            assert abs(woken[-1][0] - 1000.0 - at * (which + 3.0)) < 1e-6

    async def world() -> float:
        async with asyncio.TaskGroup() as tasks:
            for which in range(10):
                tasks.create_task(sleeper(which))
        return asyncio.get_running_loop().time()

    began_s = time.thread_time()
    ended_s = play(world())
    assert time.thread_time() - began_s < 5.0
    assert isinstance(ended_s, float)
    assert 1000.0 + 3580 < ended_s <= 1000.0 + 3600
    assert len(woken) > 5000
    assert [at_s for at_s, _ in woken] == sorted(at_s for at_s, _ in woken)


def test_timers_fire_in_order_whenever_they_were_set() -> None:
    async def world() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for delay in (3, 1, 2, 0):
            loop.call_later(delay * 1e4, fired.append, delay)
        loop.call_later(1e4, fired.append, 10)
        await rest(1e5)
        return fired

    assert play(world()) == [0, 1, 10, 2, 3]


def test_far_away_times_are_reached() -> None:
    """Rounding at ten thousand days after the start must not make a timer wait for ever."""

    async def world() -> float:
        await rest(1e9)
        for _ in range(100):
            await rest(0.1)
        return asyncio.get_running_loop().time()

    assert play(world()) == pytest.approx(1000.0 + 1e9 + 10.0, abs=1e-3)


def test_a_world_that_waits_for_nothing_says_so() -> None:
    async def world() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="time would stop"):
        play(world())


def test_a_fault_that_nobody_awaits_ends_the_world() -> None:
    """A callback that raises: asyncio would log it and go on."""

    def broken() -> None:
        msg = "a bug"
        raise ValueError(msg)

    async def world() -> None:
        asyncio.get_running_loop().call_later(5.0, broken)
        await rest(10.0)

    with pytest.raises(RuntimeError, match=r"virtual time: Exception in callback") as caught:
        play(world())
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_timeout_ends_what_takes_too_long() -> None:
    async def world() -> float:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await rest(3600.0)
        return asyncio.get_running_loop().time() - began_s

    assert play(world()) == pytest.approx(30.0)
