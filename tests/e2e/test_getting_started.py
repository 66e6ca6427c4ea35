"""docs/getting-started.md, command by command: a simulated UPS, a training script, the daemon, an outage, its story."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.peers.ports import free_port

pytestmark = pytest.mark.first

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
LIMIT_S: Final = 200.0


class Desk:
    """Runs the page's commands in a folder of its own, and at ports of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = {"/tmp/first": str(folder), "1161": str(free_port()), "9321": str(free_port())}
        self._stack = ExitStack()

    def own(self, text: str) -> str:
        for there, here in self._own.items():
            text = text.replace(there, here)
        return text

    def commands(self, words: str) -> list[str]:
        """Return the page's one command line with these words in it."""
        (line,) = [line for line in PAGE.splitlines() if line.startswith("    .venv/bin/") and words in line]
        program, *options = self.own(line).split()
        module = ["-m", "powerguard"] if program.endswith("powerguard") else []
        return [sys.executable, *module, *options]

    def start(self, words: str, log: str) -> "subprocess.Popen[str]":
        """Start what a terminal of its own is for."""
        out = self._stack.enter_context((self.folder / log).open("w", encoding="utf-8"))
        process = subprocess.Popen(
            self.commands(words),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            text=True,
            start_new_session=True,
        )
        if process.stdin is not None:
            self._stack.callback(process.stdin.close)
        self._stack.callback(end_session, process)
        return process

    def run(self, words: str, *more: str, may: tuple[int, ...] = (0,)) -> str:
        """Run a command to its end, and return what it printed."""
        ended = subprocess.run(
            [*self.commands(words), *more], cwd=ROOT, check=False, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert ended.returncode in may, ended.stdout + ended.stderr
        return ended.stdout

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.run("status --config", "--json", may=(0, 1, 2, 3, 4)))
        return answer if answer.get("reachable") else {}

    def phase(self) -> str:
        """The phase, as the daemon's metrics show it: asking costs less than starting a program each time."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._own['9321']}/metrics", timeout=LIMIT_S) as answer:
            return str(re.findall(r'(?m)^powerguard_phase\{phase="(\w+)"\} 1.0', answer.read().decode())[0])

    def until(self, reached: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not reached():
            assert time.monotonic() < end_s, what
            time.sleep(0.5)

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def close(self) -> None:
        self._stack.close()


def end_session(process: "subprocess.Popen[str]") -> None:
    """End it and its children, and return when none of them can write into the folder any more."""
    end_s = time.monotonic() + LIMIT_S
    with suppress(ProcessLookupError):
        while time.monotonic() < end_s:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)
    process.wait()


@pytest.fixture
def desk() -> Iterator[Desk]:
    with tempfile.TemporaryDirectory(prefix="pg-first-", dir="/tmp") as folder:  # sockets have short names
        made = Desk(Path(folder))
        try:
            yield made
        finally:
            made.close()


def press_enter(terminal: "subprocess.Popen[str]") -> None:
    assert terminal.stdin is not None
    terminal.stdin.write("\n")
    terminal.stdin.flush()


def test_the_page_from_the_first_command_to_the_last(desk: Desk) -> None:
    """Training pauses, the power-off is rehearsed, training resumes; killed, it continues at its checkpoint."""
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (desk.folder / "powerguard.yaml").write_text(desk.own(settings), encoding="utf-8")
    (desk.folder / "community").write_text("public", encoding="ascii")
    (desk.folder / "community").chmod(0o600)
    assert "valid" in desk.run("config validate")

    ups = desk.start("demo --ups", "ups.log")
    training = desk.start("plain_numpy_free.py", "train.log")
    desk.until(lambda: "step 100:" in desk.log("train.log"), "the training does not train")
    desk.start("powerguard run", "daemon.log")
    desk.until(
        lambda: [each for each in desk.status().get("trainers", []) if each["alive"]], "the trainer is not found"
    )
    assert desk.status()["supply"] == "utility"
    assert json.loads(desk.run("plan --config", "--json"))["next"]
    checks = {each["name"]: each["verdict"] for each in json.loads(desk.run("doctor", "--json", may=(2,)))["checks"]}
    assert (checks["trainer.line"], checks["ups.127.0.0.1"], checks["power_on"]) == ("PASS", "PASS", "FAIL")

    press_enter(ups)
    desk.until(lambda: desk.phase() == "holding", "no hold on battery")
    shown = desk.status()
    assert (shown["phase"], shown["trainers"][0]["paused"]) == ("holding", True)
    desk.until(lambda: desk.phase() == "shutdown", "the power-off is not rehearsed")
    press_enter(ups)
    desk.until(lambda: desk.phase() == "online", "utility does not end the rehearsal")
    desk.until(lambda: not desk.status()["trainers"][0]["paused"], "training does not resume")
    assert "commit point" in desk.run("explain last")
    desk.run("report last")
    assert "<svg" in desk.log("outage.html")

    training.kill()
    training.wait()
    desk.start("plain_numpy_free.py", "again.log")
    desk.until(lambda: "go on" in desk.log("again.log"), "the training does not continue at its checkpoint")
