"""The guide of alerts, done as it says: its files hold, its commands run, and an alert of a host reaches a receiver."""

import contextlib
import json
import os
import queue
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from powerguard.daemon.observe.metrics import registry, scrape
from tests.daemon.watched import scene
from tests.peers import require
from tests.prometheus.served import alertmanager, free_port, prometheus

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "monitoring.md").read_text(encoding="utf-8")
RULES = ROOT / "config" / "prometheus" / "powerguard.rules.yml"
FILES = dict(re.findall(r"^```yaml\n# ([a-z]+\.yml)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL))
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
PEERS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool", "unshare")


class Receiver:
    """The other end of the webhooks. arrived: (path, alert)."""

    def __init__(self) -> None:
        self.arrived: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        arrived = self.arrived

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in told["alerts"]:
                    arrived.put((self.path, alert))
                self.send_response(200)
                self.end_headers()

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


class Host(BaseHTTPRequestHandler):
    """A host on battery: its /metrics is the real exposition."""

    body = scrape(registry(scene("on_battery")), "")[0]

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def host() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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


@pytest.mark.peer(*PEERS)
@pytest.mark.timeout(240)
def test_an_alert_arrives(tmp_path: Path) -> None:
    """By the guide's own commands, and from a host on battery through Prometheus' rules."""
    receiver = Receiver()
    ports = {"9093": free_port(), "5001": receiver.port}
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PEERS:
        (programs / name).symlink_to(require(name))
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    with host() as port, receiver.serving():
        laid_out(tmp_path, ports | {"13493": port})
        with (
            alertmanager(tmp_path / "alertmanager.yml", tmp_path / "alerts", ports["9093"]),
            prometheus(tmp_path / "prometheus.yml", tmp_path / "data", free_port()),
        ):
            said = {}
            for command in COMMANDS:
                words = shlex.split(command.replace(":9093", f":{ports['9093']}"))
                ran = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
                assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
                said[command] = ran.stdout
            assert [text for text in said.values() if "PowerguardTest" in text], "the query shows the alert"
            path, alert = receiver.wait_for("PowerguardTest")
            assert (path, alert["labels"]["severity"]) == ("/pager", "critical")
            path, alert = receiver.wait_for("PowerguardOnBattery")
            assert (path, alert["labels"]["severity"]) == ("/chat", "warning")
            assert "has been on battery for" in alert["annotations"]["summary"]
