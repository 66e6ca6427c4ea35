"""A trainer is told to stand still: a real one does at its next step boundary, others say why they cannot."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from powerguard.core.model.actions import PauseTrainer, ResumeTrainer
from powerguard.effectors.base import EffectorError
from powerguard.effectors.trainer.options import TrainerOptions
from tests.effectors.trainer_peers import STATUS, effector, serve, serve_raw
from tests.peers.hurried import now_s
from tests.trainer.toy import Toy, short_folder

pytestmark = pytest.mark.hurried

PAUSE = "POST /api/v1/pause"


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def pause(limit_s: float = 20.0) -> PauseTrainer:
    return PauseTrainer(id="p1", by_s=now_s() + limit_s, trainer="llm", outage="d1")


def llm(url: str) -> TrainerOptions:
    return TrainerOptions(name="llm", url=url)


def paused_status(**status: object) -> dict[str, object]:
    return {"body": {"job": "llm", "conduct": "pause", **status}}


@pytest.mark.real_time
async def test_a_real_trainer_stands_still_and_goes_on(folder: Path) -> None:
    """Paused twice is paused once; resumed, it trains on from where it stood."""
    with Toy(folder, "--step-ms", "5", socket_name="toy.sock") as toy:
        async with effector(llm(f"unix:{toy.socket}")) as (made, news):
            detail = dict(await made.carry_out(pause(60.0)))
            assert (detail["native"], detail["paused"]) == (True, True)
            stands = detail["step"]
            assert isinstance(stands, int)
            assert news.seen[-1].paused
            await asyncio.sleep(0.1)
            assert dict(await made.carry_out(pause(60.0)))["step"] == stands
            await made.carry_out(ResumeTrainer(id="r1", by_s=now_s() + 60, trainer="llm", outage="d1"))
            async with asyncio.timeout(60):
                while news.seen[-1].paused or (news.seen[-1].step or 0) <= stands:
                    await asyncio.sleep(0.05)
                    await made.look()


async def test_it_waits_for_the_step_boundary() -> None:
    """The answer to the pause says where training is now; that it stands is told by a later status."""
    later = [paused_status(step=6), paused_status(step=7), paused_status(step=7, paused=True)]
    script: dict[str, list[Any]] = {PAUSE: [paused_status(step=6)], STATUS: [*later]}
    async with serve(script) as peer, effector(llm(peer.url)) as (made, news):
        detail = dict(await made.carry_out(pause()))
    assert detail == {"native": True, "paused": True, "step": 7}
    assert peer.count(PAUSE) == 1
    assert [seen.paused for seen in news.seen] == [False, False, False, True]


async def hang(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def test_one_that_hangs_in_its_step_is_waited_for() -> None:
    """A compilation, or a copy, that keeps the interpreter's lock for seconds is no failure of the pause."""
    script: dict[str, list[Any]] = {
        PAUSE: [paused_status(step=6)],
        STATUS: [hang, hang, paused_status(step=7, paused=True)],
    }
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        assert dict(await made.carry_out(pause(60.0)))["paused"] is True


async def test_a_busy_one_is_asked_again() -> None:
    busy = {"status": 503, "headers": {"Retry-After": "0"}}
    script: dict[str, list[Any]] = {
        PAUSE: [busy, {"status": 429}, paused_status(step=6)],
        STATUS: [busy, paused_status(step=7, paused=True)],
    }
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        assert dict(await made.carry_out(pause()))["paused"] is True


async def test_a_step_that_never_ends_is_cut_off_by_the_bulkhead() -> None:
    script: dict[str, list[Any]] = {PAUSE: [paused_status(step=6)], STATUS: [paused_status(step=6)]}
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        began_s = now_s()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await made.carry_out(pause(60.0))
        assert now_s() - began_s < 4.0
        assert peer.count(STATUS) >= 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": 404}, r"cannot be paused \(it has no POST /api/v1/pause; embed powerguard.trainer\)"),
        ({"status": 405}, "cannot be paused"),
        ({"status": 200, "body": {"hello": 1}}, "expected 200 and its status"),
        ({"status": 500}, "HTTP 500"),
        ({"status": 401}, "HTTP 401"),
        (paused_status(step=1) | {"body": {"job": "llm", "conduct": "continue"}}, "its conduct is continue"),
    ],
)
async def test_whoever_cannot_says_why(answer: dict[str, object], said: str) -> None:
    async with serve({PAUSE: [answer]}) as peer, effector(llm(peer.url)) as (made, _):
        with pytest.raises(EffectorError, match=said):
            await made.carry_out(pause())


async def test_nobody_there_and_somebody_mute() -> None:
    async with effector(llm("http://127.0.0.1:9")) as (made, news):
        with pytest.raises(EffectorError, match="no trainer listens"):
            await made.carry_out(pause())
        assert not news.seen[0].alive

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        await asyncio.Event().wait()
        writer.close()

    async with serve_raw(mute) as url, effector(llm(url)) as (made, _):
        with pytest.raises(EffectorError, match="no answer to POST /api/v1/pause"):
            await made.carry_out(replace(pause(), by_s=now_s() + 9))
