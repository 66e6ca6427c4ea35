"""Where HTTP brings no checkpoint, a signal or a program does: after it failed, or beside it while nobody answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web

from powerguard.effectors.base import EffectorError
from powerguard.effectors.trainer.effector import TrainerEffector
from powerguard.effectors.trainer.options import TrainerOptions
from tests.cli.checkpoint_sites import save
from tests.effectors.trainer_peers import (
    ALIAS,
    DURABLE,
    FOLLOW,
    STATUS,
    TRIGGER,
    PublishedEvents,
    accepted,
    order,
    serve,
)
from tests.peers.hurried import now_s

HEADERS_S = 2.0


class Helper:
    """Stands in for powerguard-signal: what it is asked for saves a checkpoint, after a while."""

    def __init__(self, folder: Path | None, after_s: float = 0.0) -> None:
        self.asked = 0
        self.heard = asyncio.Event()
        self._folder = folder
        self._after_s = after_s

    async def checkpoint(self, unit: str, signal: str) -> dict[str, Any]:
        self.asked += 1
        self.heard.set()
        await asyncio.sleep(self._after_s)
        if self._folder is None:
            msg = f"{unit}: has no process"
            raise EffectorError(msg)
        await asyncio.to_thread(save, self._folder, 88)
        return {"ok": True, "signal": signal}


def llm(url: str, folder: Path, **more: object) -> TrainerOptions:
    given: dict[str, object] = {
        "name": "llm",
        "url": url,
        "checkpoint_dir": str(folder),
        "checkpoint_s": 1.0,
        "fallback": {"kind": "signal", "unit": "train.service", "signal": "USR1"},
    }
    return TrainerOptions.model_validate({**given, **more})


async def asked(
    options: TrainerOptions, helper: Helper, limit_s: float = 40.0
) -> tuple[dict[str, Any], PublishedEvents]:
    published = PublishedEvents()
    made = TrainerEffector([options], clock=now_s, publish=published.append, helper=helper, alive=lambda _: None)
    try:
        return dict(await made.carry_out(order(limit_s))), published
    finally:
        await made.close()


async def slow(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response(status=204)


@pytest.mark.parametrize(
    ("script", "because"),
    [
        ({TRIGGER: [{"status": 404}], ALIAS: [{"status": 405}]}, "has neither"),
        ({TRIGGER: [{"status": 401}]}, "refuses a request without token"),
        ({TRIGGER: [{"status": 500}]}, "4 times"),
        ({TRIGGER: [{"status": 302}]}, "refuses the request"),
        (
            {TRIGGER: [accepted()], FOLLOW: [{"body": {"id": "a1", "phase": "failed", "error": "no space"}}]},
            "checkpoint failed: no space",
        ),
    ],
)
async def test_a_failure_is_followed_by_the_fallback(
    tmp_path: Path, script: dict[str, list[Any]], because: str
) -> None:
    """And the log says what was wrong, which is for somebody to mend."""
    helper = Helper(tmp_path)
    with structlog.testing.capture_logs() as logs:
        async with serve(script) as peer:
            detail, _ = await asked(llm(peer.url, tmp_path), helper)
    assert (detail["step"], detail["verified"], detail["fallback"], helper.asked) == (88, True, "train.service", 1)
    (line,) = [each for each in logs if each["event"] == "trainer_fallback"]
    assert because in line["because"]


async def test_nobody_listens_and_the_process_lives(tmp_path: Path) -> None:
    """Its endpoint is gone, its training is not."""
    detail, _ = await asked(llm("http://127.0.0.1:9", tmp_path), Helper(tmp_path))
    assert detail["fallback"] == "train.service"


async def test_both_ways_that_failed_are_reported(tmp_path: Path) -> None:
    with pytest.raises(EffectorError, match=r"no trainer listens there .*; instead: train.service: has no process"):
        await asked(llm("http://127.0.0.1:9", tmp_path), Helper(None))


async def test_what_goes_well_needs_no_fallback(tmp_path: Path) -> None:
    helper = Helper(tmp_path)
    async with serve({TRIGGER: [accepted()], FOLLOW: [DURABLE]}) as peer:
        detail, _ = await asked(llm(peer.url, tmp_path), helper)
    assert (detail["native"], "fallback" in detail, helper.asked) == (True, False, 0)


async def test_beside_one_that_hangs(tmp_path: Path) -> None:
    """It is asked again all the same; whoever is done first has made the checkpoint."""
    helper = Helper(tmp_path)
    async with serve({TRIGGER: [slow], STATUS: [{"body": {"job": "llm"}}]}) as peer:
        began_s = now_s()
        detail, published = await asked(llm(peer.url, tmp_path), helper, limit_s=60.0)
        assert now_s() - began_s < 45.0
    assert (detail["step"], detail["fallback"]) == (88, "train.service")
    assert "hung" in published.stages


async def test_one_that_wakes_up_first_is_heard(tmp_path: Path) -> None:
    """The fallback has begun, and the trainer answers after all: its own checkpoint is the better one."""
    helper = Helper(tmp_path, after_s=30.0)

    async def awake(_: web.Request) -> web.Response:
        await helper.heard.wait()
        return web.Response(status=202, headers={"Location": "/api/v1/checkpoints/a1"})

    script: dict[str, list[Any]] = {TRIGGER: [slow, awake], STATUS: [{"body": {"job": "llm"}}], FOLLOW: [DURABLE]}
    async with serve(script) as peer:
        detail, _ = await asked(llm(peer.url, tmp_path), helper, limit_s=25.0)
    assert (detail["native"], detail["step"], helper.asked) == (True, 7, 1)


async def test_a_mute_one_is_given_the_time_that_it_needs(tmp_path: Path) -> None:
    """It may be saving before it answers: only after twice what it takes does anybody else try."""

    async def saves(_: web.Request) -> web.Response:
        await asyncio.sleep(HEADERS_S + 1.0)
        await asyncio.to_thread(save, tmp_path, 5)
        return web.Response(status=204)

    async def says_so(_: web.Request) -> web.Response:
        return web.Response(status=204)

    helper = Helper(tmp_path)
    async with serve({TRIGGER: [saves]}) as peer:
        detail, _ = await asked(llm(peer.url, tmp_path, checkpoint_s=10.0), helper)
        assert (helper.asked, detail["native"]) == (0, False)
    async with serve({TRIGGER: [slow]}) as peer:
        detail, _ = await asked(llm(peer.url, tmp_path, checkpoint_s=0.1), helper)
        assert helper.asked == 1
    async with serve({TRIGGER: [says_so]}) as peer:
        detail, _ = await asked(llm(peer.url, tmp_path, checkpoint_s=0.1), helper)
        assert (helper.asked, detail["step"]) == (2, 88)


@pytest.mark.slow
async def test_one_that_answered_and_still_writes_is_not_made_to_save_twice(tmp_path: Path) -> None:
    """A second save would take the disk from the first, which is on its way."""
    (tmp_path / "checkpoints").mkdir()
    helper = Helper(tmp_path / "checkpoints")
    saved = tmp_path / "checkpoints" / "ckpt_68.pt"

    async def save_slowly() -> None:
        for _ in range(12):
            with saved.open("ab") as file:
                file.write(bytes(range(256)))
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:

        async def begins(_: web.Request) -> web.Response:
            group.create_task(save_slowly())
            return web.Response(status=200)

        async with serve({TRIGGER: [begins]}) as peer:
            detail, _ = await asked(llm(peer.url, saved.parent, checkpoint_s=3.0), helper, limit_s=60.0)
    assert (helper.asked, detail["path"], detail["bytes"]) == (0, str(saved), 12 * 256)


async def test_a_program_may_be_the_fallback(tmp_path: Path) -> None:
    options = llm("http://127.0.0.1:9", tmp_path, fallback={"kind": "command", "command": ["true"]})
    detail, _ = await asked(options, Helper(None))
    assert (detail["fallback"], detail["verified"], detail["flushed"]) == ("true", False, True)


async def test_the_deadline_holds_for_both(tmp_path: Path) -> None:
    async with serve({TRIGGER: [slow], STATUS: [{"body": {"job": "llm"}}]}) as peer:
        began_s = now_s()
        with pytest.raises(EffectorError, match="out of time") as error:
            await asked(llm(peer.url, tmp_path), Helper(tmp_path, after_s=60.0), limit_s=5.0)
        assert now_s() - began_s < 45.0
        assert error.value.timed_out
