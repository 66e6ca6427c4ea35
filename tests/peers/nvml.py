"""GPUs that are a folder: an NVML of our own, in C, behind NVIDIA's real Python bindings and the real helper.

nvidia-ml-py loads libnvidia-ml.so.1 as it would the driver's. What its functions return, and whether they fail or
hang, is in files that tests read and write (tests/peers/nvml.c).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.peers import folder_of_session, require

SOURCE: Final = Path(__file__).with_name("nvml.c")
HELPER: Final = (sys.executable, "-I", "-m", "powerguard.effectors.gpu.helper")

H100: Final = {
    "name": "NVIDIA H100 80GB HBM3",
    "limit_mw": 700_000,
    "default_mw": 700_000,
    "min_mw": 200_000,
    "max_mw": 700_000,
    "power_mw": 650_123,
    "utilization_pct": 98,
    "throttle_reasons": "0x4",
    "mig": 0,
    "persistence": 1,
    "remap_pending": 0,
    "ecc_uncorrected": 0,
}


@cache
def library() -> Path:
    """Return the folder with our libnvidia-ml.so.1, built once for this process."""
    compiler = require("cc")
    folder = folder_of_session("pg-nvml-")
    argv = [compiler, "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*argv, "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)], check=True, timeout=60)
    return folder


def until(what: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for another process to have got there."""
    end_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.01)


def did(answer: dict[str, Any]) -> list[str]:
    """What became of each GPU."""
    return [gpu["did"] for gpu in answer["gpus"]]


class Gpus:
    """A host with GPUs, and the folder of its helper."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.world = folder / "world"
        self.folder = folder / "run"
        self.limits = self.folder / "limits.json"
        self.world.mkdir()
        self.folder.mkdir()
        self.environment = {
            "PATH": os.environ["PATH"],
            "POWERGUARD_UNDER_TEST": "1",
            "LD_LIBRARY_PATH": str(library()),
            "FAKE_NVML": str(self.world),
        }
        self._started: list[subprocess.Popen[bytes]] = []
        for index in range(count):
            self.add(index)

    # --- The world ---

    def add(self, index: int, **facts: object) -> None:
        (self.world / f"gpu{index}").mkdir()
        uuid = f"GPU-{index:08x}-0000-0000-0000-000000000000"
        for name, value in {**H100, "uuid": uuid, **facts}.items():
            self.put(index, name, value)

    def put(self, index: int, name: str, value: object) -> None:
        path = self.world / f"gpu{index}" / name
        fresh = path.with_suffix(".test")
        fresh.write_text(f"{value}\n", encoding="ascii")
        fresh.replace(path)

    def forget(self, index: int, name: str) -> None:
        (self.world / f"gpu{index}" / name).unlink()

    def watts(self) -> list[float]:
        """The power limits that are set, of all GPUs."""
        places = sorted(self.world.glob("gpu*/limit_mw"))
        return [int(path.read_text(encoding="ascii")) / 1000 for path in places]

    def calls(self, function: str) -> list[str]:
        """Every call of a function so far: which GPU, and what was set."""
        path = self.world / "calls"
        lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(function + " ")]

    @contextlib.contextmanager
    def hanging(self, function: str, index: int | None = None) -> Iterator[None]:
        """Let a function hang as in a wedged driver, of one GPU or (None) where no GPU is named."""
        path = (self.world if index is None else self.world / f"gpu{index}") / f"hang_{function}"
        path.touch()
        try:
            yield
        finally:
            path.unlink()

    def fail(self, function: str, code: int, index: int | None = None) -> None:
        """Let a function return an error, a number of nvml.h; 0 ends that."""
        folder = self.world if index is None else self.world / f"gpu{index}"
        (folder / f"fail_{function}").write_text(f"{code}\n", encoding="ascii")

    # --- The helper ---

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*HELPER, "--folder", str(self.folder), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def say(self, line: bytes, limit_s: float = 60.0) -> dict[str, Any]:
        """Say one line to a helper of its own, as its socket would, and return the answer."""
        process = self.start("serve")
        out, log = process.communicate(line, timeout=limit_s)
        assert process.returncode == 0, log
        assert out.endswith(b"\n"), log
        assert out.count(b"\n") == 1, out
        shown: dict[str, Any] = json.loads(out)
        return shown

    def ask(self, word: str, share: float | None = None, limit_s: float = 60.0) -> dict[str, Any]:
        asked = {"word": word} if share is None else {"word": word, "share": share}
        return self.say(json.dumps(asked).encode() + b"\n", limit_s)

    def kill_when(self, there: Callable[[], bool], word: str, share: float | None = None) -> None:
        """Ask, and kill the helper (SIGKILL) as soon as something is there."""
        process = self.start(word, *([] if share is None else [str(share)]))
        until(there)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Path]:
        """A socket that starts a helper for each connection: systemd's own, with Accept=yes."""
        path = self.folder / "gpu.sock"
        argv = [require("systemd-socket-activate"), "--accept", "--inetd", f"--listen={path}"]
        for name, value in self.environment.items():
            argv.append(f"--setenv={name}={value}")
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*argv, *HELPER, "--folder", str(self.folder), "serve"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        # Not the socket's file: it is there before anybody listens.
        until(lambda: b"Listening on" in (self.folder / "log").read_bytes())
        try:
            yield path
        finally:
            self._end(process)
            path.unlink()

    def close(self) -> None:
        for process in self._started:
            self._end(process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
