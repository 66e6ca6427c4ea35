"""The read-only port over real sockets: every answer in every phase, and what a hostile client can do to the loop."""

import asyncio
import contextlib
import json
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from powerguard.daemon.observe import http
from powerguard.daemon.observe.http import CONNECTION_LIMIT_S, MAX_CONNECTIONS, http_server
from tests.daemon.watched import NOW_S, PHASES, Watched, scene

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PATIENCE_S = 60.0
"""How long a test waits before it fails: no promise, so long enough for a busy machine."""
NO_LIMIT_S = 10.0 * PATIENCE_S
"""A connection's limit that ends nothing here: whatever ends earlier has been ended for another reason."""
PATHS = ("/metrics", "/healthz", "/readyz", "/api/v1/status", "/api/v1/plan", "/api/v1/recovery")


async def get(port: int, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as answer,
    ):
        return answer.status, await answer.read(), dict(answer.headers)


async def get_json(port: int, path: str) -> tuple[int, dict[str, Any]]:
    code, body, headers = await get(port, path)
    assert headers["Content-Type"] == "application/json; charset=utf-8"
    return code, json.loads(body)


@contextlib.asynccontextmanager
async def raw(port: int, data: bytes = b"") -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("phase", PHASES)
async def test_every_path_answers_in_every_phase(phase: str) -> None:
    """No phase may blind the watcher, least of all the shutdown."""
    async with http_server(scene(phase), port=0) as port:
        for path in PATHS:
            code, body, headers = await get(port, path)
            assert code == 200
            assert body
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cache-Control"] == "no-store"
            assert headers["Connection"] == "close"
        _, status = await get_json(port, "/api/v1/status")
        _, plan = await get_json(port, "/api/v1/plan")
        assert (status["phase"], plan["phase"]) == (phase, phase)


async def test_the_root_names_what_can_be_read() -> None:
    """A person who types host and port finds every path, and each of them answers."""
    async with http_server(scene(), port=0) as port:
        code, body, headers = await get(port, "/")
        assert (code, headers["Content-Type"]) == (200, http.TEXT_TYPE)
        paths = [line.split()[0] for line in body.decode().splitlines() if line.startswith("/")]
        assert {"/metrics", "/healthz", "/readyz", "/api/v1/status", "/api/v1/recovery"} <= set(paths)
        for path in paths:
            assert (await get(port, path))[0] == 200, path


async def test_not_ready_says_why_with_numbers() -> None:
    """503 for the orchestrator, reasons and numbers for the person behind it."""
    daemon = scene()
    daemon.policy = replace(daemon.policy, runtime_table=((0.5, 180.0), (1.0, 72.0)))
    async with http_server(daemon, port=0) as port:
        code, body = await get_json(port, "/readyz")
        assert (code, body["ready"]) == (503, False)
        (reason,) = body["reasons"]
        assert reason["name"] == "undersized"
        assert reason["numbers"]["missing_s"] > 0
        code, body = await get_json(port, "/healthz")
        assert (code, body["alive"]) == (200, True)


async def test_hung_loop_is_not_alive() -> None:
    """The socket still answers while the loop is stuck on an event: that must not read as healthy."""
    async with http_server(replace(scene(), progressed_at_s=NOW_S - 6.0), port=0) as port:
        code, body = await get_json(port, "/healthz")
        assert (code, body["alive"]) == (503, False)
        assert (await get(port, "/readyz"))[0] == 503


async def test_answers_are_made_a_few_times_a_second() -> None:
    """A moment later the same bytes, then new ones: a flood costs no sums."""
    daemon = scene()
    async with http_server(daemon, port=0) as port:
        first = await get_json(port, "/api/v1/status")
        daemon.now_s += 0.9 * http.FRESH_S
        assert await get_json(port, "/api/v1/status") == first
        daemon.now_s += 0.2 * http.FRESH_S
        assert (await get_json(port, "/api/v1/status"))[1]["at"] > first[1]["at"]


async def test_openmetrics_where_asked_for() -> None:
    async with http_server(scene(), port=0) as port:
        _, body, headers = await get(port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert body.endswith(b"# EOF\n")
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        _, _, headers = await get(port, "/metrics")
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_nothing_can_be_changed_here() -> None:
    """The verbs of the admin socket do not exist on the port, and what exists takes no POST."""
    daemon = scene("holding")
    async with http_server(daemon, port=0) as port, aiohttp.ClientSession() as session:
        for verb in ("abort", "maintenance", "checkpoint", "event"):
            async with session.post(f"http://127.0.0.1:{port}/api/v1/{verb}", json={"reason": "x"}) as answer:
                assert answer.status == 404
        async with session.post(f"http://127.0.0.1:{port}/api/v1/status") as answer:
            assert answer.status == 405
            assert answer.headers["Allow"] == "GET,HEAD"
            assert (await answer.json())["object"] == "error"
        assert (daemon.events, daemon.polls) == ([], 0)


HOSTILE = {
    "long line": b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge header": b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET /metrics HTTP/1.1\r\n" + b"X-A: b\r\n" * 5000 + b"\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
    "two lengths": b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "bad chunk": b"POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "bad accept": b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain;version=x;escaping=\xff\r\n\r\n",
    "bad path": b"GET /%ff%00/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_bytes_are_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """An answer or an end without waiting for the connection's limit, no traceback, and the next client is served."""
    async with http_server(scene(), port=0, connection_limit_s=NO_LIMIT_S) as port:
        async with raw(port, HOSTILE[name]) as (reader, _), asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionResetError):
                answer = await reader.read(65536)
                assert b"Traceback" not in answer
                if answer and name != "bad accept":
                    assert answer.split(b" ", 2)[1].startswith(b"4")
        assert (await get(port, "/healthz"))[0] == 200
    assert "Traceback" not in caplog.text


async def turns_until(over: asyncio.Future[Any]) -> list[float]:
    """CPU seconds of this thread between two wake-ups of a 5 ms timer: the same on a busy machine."""
    found: list[float] = []
    while not over.done():
        began_s = time.thread_time()
        await asyncio.sleep(0.005)
        found.append(time.thread_time() - began_s)
    return sorted(found)


def has_ended(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def p99(turns: list[float]) -> float:
    return turns[int(0.99 * len(turns))]


async def test_crowd_cannot_hold_up_the_loop() -> None:
    """200 silent connections: the loop keeps its time, and the surplus is ended at once."""
    async with http_server(scene(), port=0, connection_limit_s=NO_LIMIT_S) as port:
        crowding = asyncio.to_thread(
            lambda: [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) for _ in range(200)]
        )
        async with asyncio.TaskGroup() as tasks:
            coming = tasks.create_task(crowding)
            turns = await turns_until(coming)
        crowd = set(coming.result())
        try:
            gone: set[socket.socket] = set()
            async with asyncio.timeout(PATIENCE_S):
                while len(gone) < 200 - MAX_CONNECTIONS:
                    gone |= {each for each in crowd - gone if has_ended(each)}
                    await asyncio.sleep(0.02)
            assert p99(turns) < 0.05
        finally:
            for each in crowd:
                each.close()
        assert await served(port) == 200


async def served(port: int) -> int:
    """Ask until there is room for the question: those who have left are only noticed one by one."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                return (await get(port, "/healthz"))[0]


async def test_flood_cannot_hold_up_the_loop() -> None:
    """Clients that scrape as fast as they can, from a process of their own as in life."""
    script = (
        "import socket,sys\n"
        "n=0\n"
        "for _ in range(500):\n"
        "    s=socket.create_connection(('127.0.0.1',int(sys.argv[1])))\n"
        "    s.sendall(b'GET /metrics HTTP/1.0\\r\\n\\r\\n')\n"
        "    try:\n"
        "        while s.recv(65536): pass\n"
        "        n+=1\n"
        "    except OSError: pass\n"
        "    s.close()\n"
        "print(n)\n"
    )
    async with http_server(scene(), port=0) as port:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, str(port), stdout=asyncio.subprocess.PIPE
        )
        ended = asyncio.ensure_future(child.communicate())
        turns = await turns_until(ended)
        assert int((await ended)[0]) == 500
        # The median: the worst turns of a busy machine are the machine's. `python -m bench` has the figures.
        assert statistics.median(turns) < 0.05


async def test_slow_client_is_ended() -> None:
    """One byte a second would hold a connection for ever; all of it together has one limit."""
    assert CONNECTION_LIMIT_S <= 10.0
    loop = asyncio.get_running_loop()
    async with http_server(scene(), port=0, connection_limit_s=0.4) as port:
        began = loop.time()
        async with raw(port, b"GET /metrics HTTP/1.1\r\nX: ") as (reader, writer), asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                while not reader.at_eof():
                    writer.write(b"x")
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.1):
                            await reader.read(1)
        assert loop.time() - began > 0.3
        assert await served(port) == 200


async def test_reader_who_does_not_read_is_ended() -> None:
    """A client that never takes its answer is not kept either."""
    async with http_server(scene(), port=0, connection_limit_s=0.3) as port:
        ask = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        async with raw(port, ask * 50):
            await asyncio.sleep(0.5)
        assert await served(port) == 200


async def test_port_that_is_taken_is_an_oserror() -> None:
    """The daemon goes on without its port; who started it must learn why."""
    async with http_server(scene(), port=0) as port:
        with pytest.raises(OSError, match="address already in use"):
            async with http_server(scene(), port=port):
                pass


async def test_server_ends_with_open_connections() -> None:
    """A stop waits for no connection's limit, whoever still hangs on."""
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(http_server(scene(), port=0, connection_limit_s=NO_LIMIT_S))
        async with raw(port, b"GET /metrics HTTP/1.1\r\n") as (reader, _), asyncio.timeout(PATIENCE_S):
            await stack.aclose()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""


def test_scene_satisfies_the_port() -> None:
    """The fake stands at our own port, typed."""
    watched: Watched = scene()
    assert watched.clock() == NOW_S


def test_examples_in_the_reference_are_true() -> None:
    """What the reference shows is what the port answers."""
    undersized = scene()
    undersized.policy = replace(undersized.policy, runtime_table=((0.5, 180.0), (1.0, 72.0)))
    for name, answer in (("healthz", http.Views(scene()).healthz()), ("readyz", http.Views(undersized).readyz())):
        assert json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8")) == json.loads(answer[1])
