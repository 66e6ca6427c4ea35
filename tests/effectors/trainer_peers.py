"""Trainers of every kind and character, as real servers: scripted ones over HTTP, and raw ones below it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from powerguard.core.model.actions import Conduct, TriggerCheckpoint
from powerguard.core.model.events import CheckpointProgress, TrainerSeen
from powerguard.effectors.trainer.effector import TrainerEffector
from powerguard.effectors.trainer.options import TrainerOptions
from tests.peers.hurried import now_s

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TRIGGER = "POST /api/v1/trigger_checkpoint"
ALIAS = "POST /api/v1/checkpoints"
STATUS = "GET /api/v1/status"
RESUME = "POST /api/v1/resume"
DIGEST = "sha256:" + "a" * 64


class Scripted:
    """Answers each route with its list of answers in turn, the last one again and again; keeps what it was asked.

    An answer is a response's arguments, or a handler. What is not in the script is a 404.
    """

    def __init__(self, script: dict[str, list[dict[str, object] | Handler]]) -> None:
        self.asked: list[str] = []
        self.bodies: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self._script = {route: list(answers) for route, answers in script.items()}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        route = f"{request.method} {request.path}"
        self.asked.append(route)
        self.headers.append(dict(request.headers))
        if request.method == "POST":
            self.bodies.append(json.loads(await request.read()))
        answers = self._script.get(route)
        if answers is None:
            return web.Response(status=404)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if not isinstance(answer, dict):
            return await answer(request)
        return web.Response(
            status=int(str(answer.get("status", 200))),
            headers=dict(answer.get("headers", {})),  # type: ignore[call-overload]
            body=body.encode() if isinstance(body := answer.get("body", ""), str) else json.dumps(body).encode(),
        )

    def count(self, route: str) -> int:
        return self.asked.count(route)


@asynccontextmanager
async def serve(
    script: dict[str, list[dict[str, object] | Handler]], *, path: Path | None = None
) -> AsyncIterator[Scripted]:
    """Serve a script on a free loopback port, or on a unix socket."""
    scripted = Scripted(script)
    app = web.Application(client_max_size=1 << 20)
    app.router.add_route("*", "/{anything:.*}", scripted.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site: web.BaseSite = web.TCPSite(runner, "127.0.0.1", 0) if path is None else web.UnixSite(runner, str(path))
    await site.start()
    if path is None:
        host, port = runner.addresses[0][:2]
        scripted.url = f"http://{host}:{port}"
    else:
        scripted.url = f"unix:{path}"
    try:
        yield scripted
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serve_raw(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Serve bytes as they come from `talk`, on a free loopback port; yields the URL."""

    talking: set[asyncio.Task[object]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talking.add(task)
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            talking.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        for task in tuple(talking):
            task.cancel()
        if talking:
            await asyncio.wait(talking, timeout=5.0)


class PublishedEvents(list[TrainerSeen | CheckpointProgress]):
    """What the effector published."""

    @property
    def stages(self) -> list[str]:
        """Stages of the checkpoint in order, repeats left out."""
        stages = [news.stage for news in self if isinstance(news, CheckpointProgress)]
        return [stage for index, stage in enumerate(stages) if index == 0 or stages[index - 1] != stage]

    @property
    def seen(self) -> list[TrainerSeen]:
        return [news for news in self if isinstance(news, TrainerSeen)]


@asynccontextmanager
async def effector(
    *options: TrainerOptions,
    discover: Path | None = None,
    uids: tuple[int, ...] = (),
    others: tuple[str, ...] = (),
    remembered: Callable[[], Sequence[str]] = tuple,
) -> AsyncIterator[tuple[TrainerEffector, PublishedEvents]]:
    """Make an effector on the real clock, with what it publishes; closed at the end."""
    published = PublishedEvents()
    made = TrainerEffector(
        options,
        clock=now_s,
        publish=published.append,
        discover_dir=discover,
        discover_uids=uids,
        not_trainers=others,
        remembered=remembered,
    )
    try:
        yield made, published
    finally:
        await made.close()


def order(limit_s: float = 20.0, *, name: str = "a1", after: Conduct = Conduct.PAUSE) -> TriggerCheckpoint:
    return TriggerCheckpoint(
        id=name, by_s=now_s() + limit_s, trainer="llm", reason="on_battery", after=after, outage="o1"
    )


def native(phase: str, **fields: object) -> dict[str, object]:
    return {"body": {"id": "a1", "phase": phase, **fields}}


def accepted(name: str = "a1") -> dict[str, object]:
    return {"status": 202, "headers": {"Location": f"/api/v1/checkpoints/{name}"}}


DURABLE = native(
    "committed",
    step=7,
    paused=True,
    paused_step=7,
    durable=True,
    manifest_digest=DIGEST,
    bytes_total=5000,
    path="/ck/7",
)
FOLLOW = "GET /api/v1/checkpoints/a1"
