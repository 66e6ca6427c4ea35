"""Starts the toy trainer as a process of its own, and ends it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any, Final, Self

import pytest

LIMIT_S: Final = 100.0
"""How long a test waits for anything before it fails: no promise, so long enough for a machine that is very busy."""


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the name of a unix socket."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="pg toy "))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Toy:
    """One toy trainer, serving `folder`/toy.sock and saving in `folder`/ck."""

    def __init__(self, folder: Path, *arguments: str, socket_name: str = "toy.sock") -> None:
        self.socket = folder / socket_name
        self.checkpoints = folder / "ck"
        argv = ["-m", "powerguard.sim.toy_trainer", "--socket", self.socket, "--dir", self.checkpoints, *arguments]
        self.process = subprocess.Popen(
            [sys.executable, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    def end(self, *, timeout_s: float = LIMIT_S) -> tuple[int, str]:
        """Wait for its end; return its code and what it said on stderr."""
        _, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stderr

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.communicate(timeout=LIMIT_S)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        status, _, content = ask(self.socket, method, path, None if body is None else json.dumps(body).encode())
        return status, json.loads(content)

    def until_step(self, step: int) -> None:
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            if (self.ask("GET", "/api/v1/status")[1].get("step") or 0) >= step:
                return
            time.sleep(0.02)
        pytest.fail(f"the toy never got to step {step}")

    def until_ended(self, name: str) -> dict[str, Any]:
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            status = self.ask("GET", f"/api/v1/checkpoints/{name}?wait=1")[1]
            if status["phase"] in ("committed", "failed", "aborted"):
                return status
        pytest.fail(f"checkpoint {name} never ended")


class UnixConnection(HTTPConnection):
    """http.client over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("trainer", timeout=LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket(AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(
    where: Path | int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send one request to a socket or a loopback port; return status, headers and body."""
    if isinstance(where, Path):
        connection: HTTPConnection = UnixConnection(where)
    else:
        connection = HTTPConnection("127.0.0.1", where, timeout=LIMIT_S)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()
