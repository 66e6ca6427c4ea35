"""One daemon at a time: told by pid while it lives, free again however it ends, and no lock is no reason not to run."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from powerguard.daemon.control.admin import TakenError, alone, bind_unix
from powerguard.daemon.wiring import EX_TAKEN

HOLD = """
import sys, time
from pathlib import Path
from powerguard.daemon.control.admin import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def held(socket: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-P", "-c", HOLD, str(socket)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            yield holder
        finally:
            holder.kill()


def test_the_second_learns_who_the_first_is(tmp_path: Path) -> None:
    socket = tmp_path / "powerguard.sock"
    with held(socket) as first:
        with pytest.raises(TakenError, match=f"pid {first.pid} "), alone(socket):
            pass
        with alone(tmp_path / "another.sock"):
            pass
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        with alone(socket):
            pass
    with alone(socket):
        pass


@contextmanager
def killed_but_hanging(program: str, socket: Path) -> Iterator[None]:
    """Killed while one of its threads hangs in the disk, it keeps its files open: its leader is a zombie then."""
    leader_ends = program.replace("time.sleep(60)", "end()").replace(
        "import sys, time",
        "import ctypes, sys, threading, time\n"
        "def end():\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    ctypes.CDLL(None).pthread_exit(None)\n",
    )
    with subprocess.Popen([sys.executable, "-P", "-c", leader_ends, str(socket)], stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == b"held\n"
            state = Path(f"/proc/{first.pid}/stat")
            while state.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z":
                os.sched_yield()
            yield
        finally:
            first.kill()


def test_one_that_was_killed_and_does_not_end_is_no_daemon(tmp_path: Path) -> None:
    socket = tmp_path / "powerguard.sock"
    with killed_but_hanging(HOLD, socket), capture_logs() as logs, alone(socket):
        pass
    assert [line["event"] for line in logs] == ["lock_held_by_the_dead"]


LISTEN = """
import sys, time
from pathlib import Path
from powerguard.daemon.control.admin import bind_unix
with bind_unix(Path(sys.argv[1]), 0o660, None) as sock:
    sock.listen()
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_admin_socket_of_one_that_does_not_end_makes_way(tmp_path: Path) -> None:
    """No daemon answers there: `abort` and the hooks would reach no daemon until the next boot."""
    path = tmp_path / "powerguard.sock"
    with killed_but_hanging(LISTEN, path), bind_unix(path, 0o660, None) as sock:
        sock.listen()
        with pytest.raises(FileExistsError, match="another powerguard listens there already"):
            bind_unix(path, 0o660, None)


def test_no_lock_is_no_reason_not_to_run(tmp_path: Path) -> None:
    with capture_logs() as logs, alone(tmp_path / "missing" / "powerguard.sock"):
        pass
    assert [line["event"] for line in logs] == ["lock_unavailable"]


def test_the_daemon_refuses_beside_another(tmp_path: Path) -> None:
    """Without this the second one wrote over the first one's outage in the journal, and both gave orders."""
    socket, community = tmp_path / "powerguard.sock", tmp_path / "community"
    community.touch(0o600)
    community.write_text("public", encoding="ascii")
    config = tmp_path / "powerguard.yaml"
    config.write_text(
        f"""mode: dry-run
ups: {{a: {{sources: [{{kind: snmp, host: 127.0.0.1, version: 2c, community: {{file: '{community}'}}}}]}}}}
control: {{socket: '{socket}'}}
journal: {{path: '{tmp_path / "journal.sqlite"}'}}
""",
        encoding="utf-8",
    )
    run = [sys.executable, "-P", "-m", "powerguard", "run", "--config", str(config)]
    with held(socket) as first:
        ended = subprocess.run(run, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, f"pid {first.pid} " in ended.stderr) == (EX_TAKEN, True), ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "journal.sqlite").exists()
