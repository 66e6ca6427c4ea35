"""The guides of alerts and messages, done as they say: from a daemon to messages, alerts and a page of an outage."""

import asyncio
import contextlib
import json
import os
import queue
import re
import shlex
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.e2e.rig import ROOMY, Rig, rig
from tests.peers import require
from tests.peers.ports import free_port
from tests.prometheus.served import alertmanager, prometheus

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "monitoring.md").read_text(encoding="utf-8")
RULES = ROOT / "config" / "prometheus" / "powerguard.rules.yml"
FILES = dict(re.findall(r"^```yaml\n# ([a-z]+\.yml)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL))
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
MESSAGES = (ROOT / "docs" / "guides" / "messages.md").read_text(encoding="utf-8")
PEERS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool", "unshare")


class Receiver:
    """The other end of the webhooks. arrived: (path, alert) of Alertmanager; messages: the bodies of the daemon."""

    def __init__(self) -> None:
        self.arrived: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        arrived, messages = self.arrived, self.messages

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                answer = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/hook":
                    messages.put(answer)
                for alert in answer.get("alerts", ()):
                    arrived.put((self.path, alert))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def wait_for(self, alertname: str) -> tuple[str, dict[str, Any]]:
        """Return the first alert of that name; others are passed over."""
        while True:
            path, alert = self.arrived.get(timeout=120.0)
            if alert["labels"]["alertname"] == alertname:
                return path, alert


def laid_out(folder: Path, ports: Mapping[str, int]) -> None:
    """Write the guide's files, with ports of this test in the place of theirs, and shorter waits."""
    for name, text in FILES.items():
        for old, new in ports.items():
            text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")  # noqa: PLW2901 - one after the other
        (folder / name).write_text(text.replace("_interval: 15s", "_interval: 1s"), encoding="utf-8")
    rules = RULES.read_text(encoding="utf-8").replace("interval: 15s", "interval: 1s")
    (folder / RULES.name).write_text(rules, encoding="utf-8")


def test_the_guide_has_what_is_tested() -> None:
    assert set(FILES) == {"prometheus.yml", "alertmanager.yml"}
    assert {shlex.split(command)[0] for command in COMMANDS} == {"promtool", "amtool"}
    assert [command for command in COMMANDS if "alert add" in command]


def slack_of_the_guide(folder: Path) -> dict[str, Any]:
    """Return the guide's target of messages, with its template in a folder of this test."""
    section = MESSAGES.partition("### Slack without Apprise")[2].partition("\n### ")[0]
    (block,) = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (where,) = re.findall(r"^`(/\S+)`:$", section, re.MULTILINE)
    (template,) = re.findall(r"^    (\{.*\})$", section, re.MULTILINE)
    (folder / "slack.json").write_text(template, encoding="utf-8")
    result: dict[str, Any] = yaml.safe_load(block.replace(where, str(folder / "slack.json")))
    return result


async def powerguard(words: str, *more: str, asked: str = "", **env: str) -> str:
    """Run a command of a guide, and return what it printed."""
    assert f"powerguard {words}" in MESSAGES
    argv = [sys.executable, "-P", "-m", "powerguard", *words.split(), *more]
    ran = await asyncio.to_thread(
        subprocess.run, argv, input=asked, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


async def first_message(world: Rig, receiver: Receiver) -> None:
    """Do what messages.md says, from the secret to the test message, on a daemon that systemd would start."""
    world.settings |= slack_of_the_guide(world.folder)
    root = world.folder / "root"
    root.mkdir()
    await powerguard("secret set ops-chat", "--root", str(root), asked=f"http://127.0.0.1:{receiver.port}/hook")
    given = {"CREDENTIALS_DIRECTORY": str(root / "etc" / "powerguard" / "secrets")}
    world.write_settings()
    await powerguard("config validate", str(world.config), **given)
    await world.start(env=given)
    assert await powerguard("notify test", "--socket", str(world.socket)) == "ops-chat: delivered: 200 ok\n"
    assert "test" in receiver.messages.get(timeout=60.0)["text"]
    assert "ops-chat" in await powerguard("notify list", "--socket", str(world.socket))


def first_alert(folder: Path, receiver: Receiver, port: int) -> None:
    """Run the commands of alerts.md; the one that sends a test arrives at the pager."""
    programs = folder / "bin"
    programs.mkdir()
    for name in PEERS:
        (programs / name).symlink_to(require(name))
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(folder)}
    said = {}
    for command in COMMANDS:
        words = shlex.split(command.replace(":9093", f":{port}"))
        ran = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
        said[command] = ran.stdout
    assert [text for text in said.values() if "PowerguardTest" in text], "the query shows the alert"
    path, alert = receiver.wait_for("PowerguardTest")
    assert (path, alert["labels"]["severity"]) == ("/pager", "critical")


def loaded_alerts(url: str) -> set[str]:
    with urllib.request.urlopen(f"{url}/api/v1/rules?type=alert") as answer:
        groups = json.load(answer)["data"]["groups"]
    return {rule["name"] for group in groups for rule in group["rules"]}


async def page_of(world: Rig) -> str:
    headers = {"Accept": "text/html"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"http://127.0.0.1:{world.http_port}/") as answer,
    ):
        return await answer.text()


@pytest.mark.peer(*PEERS)
@pytest.mark.timeout(400)
async def test_from_the_daemon_to_a_message_an_alert_and_a_page(tmp_path: Path) -> None:
    """By the commands and files of the two guides alone; then the plug is pulled, and all three show the outage."""
    receiver = Receiver()
    async with rig(runtime=ROOMY) as world:
        with receiver.serving(), contextlib.ExitStack() as peers:
            await first_message(world, receiver)
            port = free_port()
            laid_out(tmp_path, {"9093": port, "5001": receiver.port, "13493": world.http_port})
            peers.enter_context(alertmanager(tmp_path / "alertmanager.yml", tmp_path / "alerts", port))
            url = peers.enter_context(prometheus(tmp_path / "prometheus.yml", tmp_path / "data", free_port()))
            await asyncio.to_thread(first_alert, tmp_path, receiver, port)
            assert loaded_alerts(url) == set(re.findall(r"alert: (\w+)", RULES.read_text(encoding="utf-8")))

            world.ups.utility = False
            path, alert = await asyncio.to_thread(receiver.wait_for, "PowerguardOnBattery")
            assert (path, alert["labels"]["severity"]) == ("/chat", "warning")
            assert "has been on battery for" in alert["annotations"]["summary"]
            await world.phase("shutdown")
            page = await page_of(world)
            assert "Powering off" in page
            assert page.count("<polyline") == 4, "battery time, need, charge and load of this outage"
            outage = world.one_outage()
            assert f"powerguard report {outage} --html FILE" in page
            said = ""
            while ": powering off" not in said:
                said += (await asyncio.to_thread(receiver.messages.get, timeout=60.0))["text"] + "\n"
            assert ": on battery*" in said
        world.no_traceback()
