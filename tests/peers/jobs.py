"""Training jobs as real processes of an ordinary user, with sockets of their own; and the real powerguard-signal.

A job is a launcher with ranks, a shell around a trainer, a unit: whatever it is, it counts, and says how far it is.
"""

import contextlib
import errno
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.peers import require

HELPER: Final = (sys.executable, "-I", "-m", "powerguard.effectors.signals.helper")
USER: Final = 65534 if os.geteuid() == 0 else os.getuid()
"""Whose jobs they are: nobody's where the tests run as root, for root's are left alone."""

PYTHON: Final = sys.executable if os.geteuid() != 0 else shutil.which("python3", path="/usr/bin:/bin") or sys.executable
"""An interpreter that this user can start: one below /root is none."""

RANK: Final = """
import os, signal, socket, sys, time
name, role, *rest = sys.argv[1:]
folder = os.path.dirname(name)
def note(word):
    with open(f"{name}.{role}.{word}", "a") as file:
        file.write(f"{os.getpid()}\\n")
if "catches" in rest:
    def save(number, frame):
        note(signal.Signals(number).name)
        with open(f"{name}.{role}.ckpt", "wb") as file:
            file.write(bytes(range(256)))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, save)
    def end(number, frame):
        note("SIGTERM")
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
if "listens" in rest:
    server = socket.socket(socket.AF_UNIX)
    server.bind(name)
    os.chmod(name, 0o660)
    server.listen(1 if "short" in rest else 100)
note("up")
count = 0
while True:
    count += 1
    with open(f"{name}.{role}.count", "w") as file:
        file.write(str(count))
    time.sleep(0.005)
"""
LAUNCHER: Final = """
import os, subprocess, sys, time
name, ranks, *rest = sys.argv[1:]
for rank in range(int(ranks)):
    listens = ["listens"] if rank == 0 else []
    subprocess.Popen([sys.executable, "-c", RANK, name, f"rank{rank}", *listens, *rest], start_new_session=True)
while True:
    time.sleep(0.01)
"""


PRETENDER: Final = """
import http.server, json, os, socketserver, sys, threading, time
name = sys.argv[1]
paused = False
def status():
    return {"job": "llm", "step": 1000, "paused": paused, "conduct": "pause"}
class Endpoint(http.server.BaseHTTPRequestHandler):
    def answer(self, content, code=200, **headers):
        body = json.dumps(content).encode()
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if "/checkpoints/" not in self.path:
            return self.answer(status())
        content = {"id": self.path.rsplit("/", 1)[1].split("?")[0], "phase": "committed", "after": "pause"}
        self.answer({**content, "step": 1000, "paused": True, "paused_step": 1000, "durable": True})
    def do_POST(self):
        global paused
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path.endswith("/resume"):
            paused = False
            with open(f"{name}.rank0.resumed", "a") as file:
                file.write("yes ")
            return self.answer(status())
        if not self.path.endswith("/trigger_checkpoint"):
            return self.answer({"error": "no such route"}, 404)
        paused = paused or content.get("after") == "pause"
        self.answer({"id": content["id"], "phase": "writing"}, 202, Location=f"/api/v1/checkpoints/{content['id']}")
    def address_string(self):
        return "peer"
    def log_message(self, *words):
        pass
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
def train():
    count = 0
    while True:
        count += 1
        with open(f"{name}.rank0.count", "w") as file:
            file.write(str(count))
        time.sleep(0.005)
threading.Thread(target=train, daemon=True).start()
server = Server(name, Endpoint)
os.chmod(name, 0o666)
with open(f"{name}.rank0.up", "w") as file:
    file.write(f"{os.getpid()}\\n")
server.serve_forever()
"""
"""A trainer that says over HTTP that it stands, and does not."""


CLOSE_S = 20.0
"""Less than the 60 s after which a test that failed, and does not come to its end, ends its whole worker."""


def until(what: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for another process to have got there."""
    end_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.01)


def state(pid: int) -> str:
    """State of a process as in proc(5); "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_removed(cgroup: Path) -> bool:
    """Remove a control group. It is busy for as long as one of its processes has not quite ended."""
    try:
        cgroup.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def stands(pid: int) -> bool:
    """Say whether a process is stopped by a signal."""
    return state(pid) == "T"


class Jobs:
    """Jobs of one test, the folder of their sockets, and the helper with its own."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="pg-jobs-", dir="/tmp"))
        self.root.chmod(0o755)
        self.sockets, self.folder = self.root / "trainers", self.root / "signal"
        self.allowed = self.root / "signals"
        self.sockets.mkdir()
        self.sockets.chmod(0o777)
        self.folder.mkdir()
        self._token = secrets.token_hex(4)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cgroups: list[Path] = []
        self._children: set[int] = set()

    @property
    def stopped(self) -> Path:
        """The file in which it stands what is stopped."""
        return self.folder / "stopped.json"

    # --- Jobs -------------------------------------------------------------------------------------------------------

    def start(self, *argv: str, user: int = USER, cgroup: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a process of the user, in a session of its own, perhaps in a control group."""
        if cgroup is not None:
            # Entered as root, before the user changes, so that nothing of it is ever outside.
            drop = [require("setpriv"), f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            argv = ("/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(cgroup), *drop, *argv)
        process = subprocess.Popen(
            argv,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            user=user if os.geteuid() == 0 and cgroup is None else None,
            cwd="/",
        )
        self._processes.append(process)
        return process

    def rank(self, name: str, *rest: str, role: str = "rank0", **how: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401
        """Start one trainer that listens on `name`, and wait until it does."""
        process = self.start(PYTHON, "-c", RANK, self.path(name), role, *rest, **how)
        self.pid(name, role)
        return process

    def pretender(self, name: str) -> subprocess.Popen[bytes]:
        """Start a trainer that says that it stands when it is told to, and trains on."""
        process = self.start(PYTHON, "-c", PRETENDER, self.path(name))
        self.pid(name)
        return process

    def path(self, name: str) -> str:
        """Path of a socket, which is what its job's files begin with."""
        return str(self.sockets / name)

    def pid(self, name: str, role: str = "rank0") -> int:
        """Number of a process of a job, once it is there."""
        file = Path(f"{self.path(name)}.{role}.up")
        until(lambda: file.exists() and file.read_text(encoding="ascii").endswith("\n"))
        pid = int(file.read_text(encoding="ascii").split()[-1])
        self._children.add(pid)
        return pid

    def count(self, name: str, role: str = "rank0") -> int:
        """How far it has got."""
        try:
            return int(Path(f"{self.path(name)}.{role}.count").read_text(encoding="ascii") or "0")
        except FileNotFoundError:
            return 0

    def noted(self, name: str, word: str, role: str = "rank0") -> bool:
        """Say whether a process has noted a signal that it caught."""
        return Path(f"{self.path(name)}.{role}.{word}").exists()

    def advances(self, name: str, role: str = "rank0", within_s: float = 30.0) -> bool:
        """Say whether it gets on. Of one that must not, half a second tells enough."""
        before = self.count(name, role)
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            if self.count(name, role) > before + 1:
                return True
            time.sleep(0.01)
        return False

    def adopt(self, pids: Iterable[int]) -> None:
        """Count these among what is ended at the end."""
        self._children.update(pids)

    def unit(self, name: str) -> str:
        """Name a unit that is nobody else's: the helper looks through all control groups of this machine."""
        return f"{name}-{self._token}.service"

    def cgroup(self, *names: str) -> Path:
        """Make a control group of this name, as systemd would for a unit; of several, each within the one before."""
        for root in ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
            if Path(root, "cgroup.procs").exists() and os.access(root, os.W_OK):
                top = Path(root) / f"pg-test-{secrets.token_hex(4)}.slice"
                made = top.joinpath(*names)
                made.mkdir(parents=True)
                self._cgroups += [made, *itertools.takewhile(top.parent.__ne__, made.parents)]
                return made
        return Path(require("a writable cgroup hierarchy"))

    # --- The helper -------------------------------------------------------------------------------------------------

    def argv(self, *words: str) -> list[str]:
        """Return the command line for words."""
        places = ("--folder", str(self.folder), "--sockets", str(self.sockets), "--allowed", str(self.allowed))
        return [*HELPER, *words, *places]

    def ask(self, *words: str) -> Any:  # noqa: ANN401 - JSON
        """Say a word on the command line."""
        ended = subprocess.run(self.argv(*words), capture_output=True, text=True, check=False, timeout=60)
        return json.loads(ended.stdout) if ended.stdout else ended.stderr

    def serve(self, line: bytes) -> Any:  # noqa: ANN401 - JSON
        """Say a line on standard input, as a connection would."""
        argv = self.argv("serve")
        ended = subprocess.run(argv, input=line, capture_output=True, check=False, timeout=60)
        return json.loads(ended.stdout) if ended.stdout else None

    @contextlib.contextmanager
    def listening(self) -> Iterator[Path]:
        """Let systemd's own program stand for the socket unit."""
        path = self.root / "signal.sock"
        argv = [require("systemd-socket-activate"), "--accept", "--inetd", f"--listen={path}"]
        argv += [f"--setenv={name}" for name in ("POWERGUARD_UNDER_TEST",) if name in os.environ]
        log = self.root / "socket-activate.log"
        with log.open("wb") as file:
            process = subprocess.Popen([*argv, *self.argv("serve")], stderr=file)
        try:
            until(lambda: b"Listening on" in log.read_bytes())  # the socket's file is there before anybody listens
            yield path
        finally:
            process.terminate()
            process.wait(30)

    def watch(self, lease_s: float) -> subprocess.Popen[bytes]:
        """Start the watch."""
        process = subprocess.Popen(self.argv("watch", "--lease-s", str(lease_s)))
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End all that was started, and by its number only."""
        for cgroup in self._cgroups:
            self.adopt(map(int, (cgroup / "cgroup.procs").read_text(encoding="ascii").split()))
        pids = {process.pid for process in self._processes} | self._children
        for pid in pids:
            for number in (signal.SIGKILL, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for process in self._processes:
            process.wait(30)
        until(lambda: all(state(pid) in ("", "Z") for pid in self._children), CLOSE_S)
        for cgroup in self._cgroups:
            until(lambda cgroup=cgroup: _is_removed(cgroup), CLOSE_S)  # type: ignore[misc]
        shutil.rmtree(self.root, ignore_errors=True)


def did(answer: Mapping[str, Any]) -> dict[int, str]:
    """What became of each process."""
    return {process["pid"]: process["did"] for process in answer["processes"]}
