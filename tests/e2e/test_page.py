"""The live page of the real daemon in an outage: by its stream, and in a browser."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from powerguard.core.model.state import Maintenance
from powerguard.daemon.journal import history, read_only
from powerguard.daemon.observe.http import http_server
from powerguard.daemon.observe.page.updates import Reports
from powerguard.effectors.child import run_child
from powerguard.sim.virtual import VirtualLoop
from tests.cli.test_explain import STORIES, told_in
from tests.daemon.watched import Watched, scene
from tests.e2e.rig import LONG, rig
from tests.peers import require
from tests.peers.ports import free_port

PATIENCE_S: Final = 100.0
CHROMIUM: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--remote-debugging-port=0", "--window-size=500,900",
)  # fmt: skip


async def pages(port: int) -> AsyncGenerator[str, None]:
    """The page of each event, until the daemon ends."""
    limit = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.get(f"http://127.0.0.1:{port}/events") as answer,
    ):
        assert answer.status == 200
        while line := await answer.content.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def test_the_page_shows_an_outage_in_order() -> None:
    """Every phase that the journal has is shown, in its order; then the curves of the outage, and its line."""
    async with rig(runtime=LONG) as world:
        await world.start()
        seen: list[str] = []
        page = ""
        async with contextlib.aclosing(pages(world.http_port)) as events:
            async for page in events:
                found = re.search(r'<p class="phase \w+">([^<]*)</p>', page)
                assert found
                if not seen or seen[-1] != found[1]:
                    seen.append(found[1])
                world.ups.utility = False
                if found[1] == "Powering off" and page.count("<polyline") == 4:
                    break
        # A phase may be shorter than the look for its change: none is out of order, and the first and last are there.
        order = ["Online", "On battery", "Emergency checkpoint", "Holding", "Powering off"]
        assert seen == [each for each in order if each in seen]
        assert {"Online", "Holding", "Powering off"} <= set(seen)
        assert f'<code class="soft">{world.one_outage()}</code>' in page
        assert "still running" in page
        world.no_traceback()


async def test_the_daemon_serves_the_report_of_an_outage_that_is_over() -> None:
    """Made from the journal that it writes itself; while the outage ran there was none."""
    async with rig(runtime=LONG) as world:
        await world.start()
        world.ups.utility = False
        await world.phase("on_battery")
        outage = world.one_outage()
        assert (await world.get(f"/outages/{outage}"))[0] == 404
        world.ups.utility = True
        await world.note("outage_ended", outage=outage)

        async def made() -> str:
            code, text = await world.get(f"/outages/{outage}")
            return text if code == 200 else ""

        page: str = await world.until(made, "the report")
        assert "ridden through" in page
        assert page.count("<svg") == 1
        world.no_traceback()


class Tab:
    """A page in Chromium, asked by its DevTools."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def eval(self, expression: str) -> Any:  # noqa: ANN401 - any JSON
        """Return the value of an expression in the page."""
        self._number += 1
        params = {"expression": expression, "returnByValue": True}
        await self._socket.send_json({"id": self._number, "method": "Runtime.evaluate", "params": params})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("id") == self._number:
                return answer["result"]["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.eval(expression):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def tab(folder: Path, url: str) -> AsyncIterator[Tab]:
    """Open a page in a browser of its own."""
    profile, console = folder / "profile", folder / "console"
    with console.open("wb") as log:
        browser = await asyncio.create_subprocess_exec(
            require("chromium"),
            *(*CHROMIUM, f"--user-data-dir={profile}", url),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            port_file = profile / "DevToolsActivePort"
            while not port_file.exists() or "\n" not in port_file.read_text():
                assert browser.returncode is None, console.read_text(errors="replace")
                await asyncio.sleep(0.1)
            where = f"http://127.0.0.1:{port_file.read_text().split()[0]}/json"
            found: list[str] = []
            while not found:
                async with session.get(where) as answer:
                    found = [each["webSocketDebuggerUrl"] for each in await answer.json() if each["url"] == url]
            async with session.ws_connect(found[0]) as socket:
                yield Tab(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            browser.terminate()
        await browser.wait()


def hostile() -> Watched:
    """A daemon whose trainer has a script for a name, and whose maintenance has a long link for a reason."""
    daemon = scene("holding")
    name = "<img src=x onerror=\"document.title='owned'\">"
    trainer = replace(daemon.state.trainers[0], name=name)
    reason = f"https://tickets.example.org/{'x' * 120}"
    maintenance = Maintenance(until_s=daemon.now_s + 900.0, reason=reason, who="root")
    daemon.state = replace(daemon.state, trainers=(trainer,), maintenance=maintenance)
    return daemon


@pytest.mark.slow
@pytest.mark.peer("chromium")
async def test_a_browser_follows_the_daemon(tmp_path: Path) -> None:
    """The script runs under the policy, and replaces what has changed; no markup of a name becomes an element."""
    daemon = hostile()
    async with http_server(daemon, port=0) as port, tab(tmp_path, f"http://127.0.0.1:{port}/") as page:
        await page.until("document.getElementById('phase')?.textContent.trim() === 'Holding'")
        assert await page.eval("document.querySelectorAll('img').length") == 0
        assert await page.eval("document.getElementById('trainers').textContent.includes('<img src=x onerror=')")
        assert await page.eval("document.documentElement.scrollWidth <= innerWidth")
        await page.eval("window.kept = true")
        daemon.state = scene("shutdown").state
        daemon.now_s += 1.0
        await page.until("document.title === 'Powering off · gpu-01 · powerguard'")
        assert await page.eval("document.getElementById('phase').textContent.trim()") == "Powering off"
        assert await page.eval("document.getElementById('stale').hidden")
        assert await page.eval("window.kept"), "it was loaded again, not updated"
        assert await page.eval("document.documentElement.scrollWidth <= innerWidth")
    console = (tmp_path / "console").read_text(errors="replace")
    assert "Content Security Policy" not in console
    assert "Uncaught" not in console


def played(path: Path) -> Path:
    """Let the real loop write a journal with an outage that has ended."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(told_in(path, STORIES["held"]))
    return path


@pytest.mark.slow
@pytest.mark.peer("chromium")
async def test_a_browser_shows_a_report(tmp_path: Path) -> None:
    """The link leads to it, and its colours are there under the policy of the port."""
    daemon, journal = scene(), await asyncio.to_thread(played, tmp_path / "journal.sqlite")
    with read_only(journal) as db:
        daemon.outages = history(db, 1)
    reports = Reports(daemon, journal, run_child)
    async with http_server(daemon, port=0, reports=reports) as port, tab(tmp_path, f"http://127.0.0.1:{port}/") as page:
        await page.until("!!document.querySelector('#outages a')")
        await page.eval("document.querySelector('#outages a').click()")
        await page.until("document.title.includes('outage') && !!document.querySelector('svg.timeline rect')")
        fill = "getComputedStyle(document.querySelector('svg.timeline .t-battery')).fill"
        assert await page.eval(fill) == "rgb(234, 182, 118)"
    assert "Content Security Policy" not in (tmp_path / "console").read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.peer("chromium")
async def test_a_browser_says_that_the_page_is_old(tmp_path: Path) -> None:
    """The daemon ends: after some seconds the page says so, and takes up its updates when it is back."""
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        port = await first.enter_async_context(http_server(scene(), port=free_port()))
        page = await stack.enter_async_context(tab(tmp_path, f"http://127.0.0.1:{port}/"))
        await page.until("document.getElementById('stale')?.hidden")
        await first.aclose()
        await page.until("!document.getElementById('stale').hidden")
        await stack.enter_async_context(http_server(scene("holding"), port=port))
        await page.until("document.getElementById('stale').hidden")
        assert await page.eval("document.getElementById('phase').textContent.trim()") == "Holding"
