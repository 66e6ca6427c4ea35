"""A guard in a process of its own: signals, forks, kills, what is loaded, told over the socket and uploaded."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from powerguard.trainer.ranks.replica import process
from powerguard.trainer.store.store import Store
from tests.trainer.checkpoints import read
from tests.trainer.toy import Toy, ask, short_folder

ROOT = Path(__file__).parents[2]

TRAINING = """
import os, sys, time
from powerguard.trainer import Guard, Parts
from powerguard.trainer.store.disk import Disk

root = sys.argv[1]
class Sticky(Disk):
    def write(self, *write):
        while os.path.exists(root + "/stuck"):
            time.sleep(0.01)
        return super().write(*write)
state = {"step": 0, "bulk": bytearray(3_000_000)}
def save():
    return dict(state)
def load(saved):
    state["step"] = saved["step"]
guard = Guard(Parts(save, load), root + "/ck", job="proc", socket=root + "/t.sock", OPTIONS)
guard.restore()
PREPARE
print("ready", flush=True)
while True:
    time.sleep(0.005)
    state["step"] += 1
    guard.step(state["step"])
"""


class Training:
    """A script around a guard, in `folder`."""

    def __init__(
        self, folder: Path, options: str = "", prepare: str = "", environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.socket = folder / "t.sock"
        (folder / "ck").mkdir(exist_ok=True)
        script = folder / "training.py"
        script.write_text(TRAINING.replace("OPTIONS", options).replace("PREPARE", textwrap.dedent(prepare)))
        self.process = subprocess.Popen(
            [sys.executable, script, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=100)

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        found = json.loads(ask(self.socket, method, path, content)[2])
        assert isinstance(found, dict)
        return found

    def status(self) -> dict[str, Any]:
        return self.ask("GET", "/api/v1/status")

    def ended(self, name: str) -> dict[str, Any]:
        until(
            lambda: self.ask("GET", f"/api/v1/checkpoints/{name}?wait=1")["phase"] in ("committed", "failed", "aborted")
        )
        return self.ask("GET", f"/api/v1/checkpoints/{name}")

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=100)
        return self.process.returncode, said


def until(true: Callable[[], object]) -> None:
    until_s = time.perf_counter() + 100
    while not true():
        assert time.perf_counter() < until_s, "it never came true"
        time.sleep(0.01)


def steps(folder: Path) -> list[int]:
    with Store(folder / "ck", job="proc", leader=False) as store:
        return [read(found, 0)["step"].value() for found in store.found()]


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_signal_is_a_wish_for_a_checkpoint_and_the_end(folder: Path, number: signal.Signals) -> None:
    """Slurm and systemd speak no HTTP; and a job that is told to end, ends, whatever it is willing to do else."""
    with Training(folder, "signals=True") as training:
        until(lambda: training.status().get("step", 0) > 5)
        training.process.send_signal(number)
        assert training.end() == (0, "")
    assert len(steps(folder)) == 1
    assert not training.socket.exists()


def test_a_signal_while_paused_ends_it_with_the_checkpoint_that_there_is(folder: Path) -> None:
    with Training(folder, "signals=True") as training:
        training.ask("POST", "/api/v1/trigger_checkpoint", {"id": "e", "after": "pause"})
        stood = training.ended("e")["paused_step"]
        training.process.send_signal(signal.SIGTERM)
        assert training.end() == (0, "")
    assert steps(folder) == [stood]


def test_a_signal_whose_checkpoint_fails_still_ends_it(folder: Path) -> None:
    """Who sends SIGTERM wants an end: standing until SIGKILL comes would help nobody. The code says that it failed."""
    with Training(folder, "signals=True", "state['oops'] = object()") as training:
        until(lambda: training.status().get("step", 0) > 5)
        training.process.send_signal(signal.SIGTERM)
        code, said = training.end()
    assert code == 1
    assert "oops: is neither a buffer nor a plain value" in said
    assert "Traceback" not in said
    assert steps(folder) == []


def test_a_signal_that_is_passed_on_as_well_is_one_wish(folder: Path) -> None:
    """`systemctl stop` signals torchrun and each rank, and torchrun passes on to them what it got."""
    busy = "print('ready', flush=True)\nwhile not os.path.exists(root + '/go'): time.sleep(0.01)"
    with Training(folder, "signals=True", busy) as training:
        training.process.send_signal(signal.SIGTERM)
        until(lambda: training.status()["checkpoint"])  # before that the kernel would make one of two
        training.process.send_signal(signal.SIGTERM)
        (folder / "go").touch()
        assert training.end() == (0, "")
    assert len(steps(folder)) == 1


def test_the_second_signal_ends_it_at_once(folder: Path) -> None:
    """Somebody is in a hurry: the loop does not come to a boundary."""
    # Not one long sleep: a signal that comes just before it would be heard when it ends.
    stuck = "print('ready', flush=True)\nwhile True: time.sleep(0.01)"
    with Training(folder, "signals=True", stuck) as training:
        training.process.send_signal(signal.SIGTERM)
        until(lambda: training.status()["checkpoint"])  # before that the kernel would make one of two
        began_s = time.monotonic()
        while training.process.poll() is None:
            training.process.send_signal(signal.SIGTERM)
            assert time.monotonic() < began_s + 60
            time.sleep(0.05)
        assert training.end()[0] == -signal.SIGTERM


@pytest.mark.parametrize("after", ["continue", "pause"], ids=["beside training", "emergency"])
@pytest.mark.parametrize("end", ["SIGTERM", "Ctrl-C", "Ctrl-C twice"])
def test_ended_in_mid_write_the_last_good_one_stands(folder: Path, end: str, after: str) -> None:
    """Without signals=True SIGTERM is as good as a kill; Ctrl-C lets the write end first, a second one does not."""
    with Training(folder, "disk=Sticky()") as training:
        training.ask("POST", "/api/v1/trigger_checkpoint", {"id": "good", "after": "continue"})
        good = training.ended("good")["step"]
        (folder / "stuck").touch()
        training.ask("POST", "/api/v1/trigger_checkpoint", {"id": "e", "after": after})
        until(lambda: training.ask("GET", "/api/v1/checkpoints/e")["phase"] == "writing")
        training.process.send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGINT)
        if end != "SIGTERM":
            time.sleep(0.3)
            assert training.process.poll() is None
        if end == "Ctrl-C":
            (folder / "stuck").unlink()
        while end == "Ctrl-C twice" and training.process.poll() is None:
            training.process.send_signal(signal.SIGINT)  # again: the kernel makes one of two that it cannot deliver yet
            time.sleep(0.3)
        code, said = training.end()
    assert code == (-signal.SIGTERM if end == "SIGTERM" else -signal.SIGINT)
    assert ("KeyboardInterrupt" in said) == (end != "SIGTERM")
    found = steps(folder)
    assert found[-1] == good
    assert len(found) == (2 if end == "Ctrl-C" else 1)


def test_a_forked_worker_keeps_nothing_of_the_guard(folder: Path) -> None:
    """A data loader's worker outlives its killed parent: the socket is dead, the folder free, SIGTERM ends it."""
    worker = """
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        guard.step(1)
        os.write(1, b"worker %d\\n" % os.getpid())
        os.write(said, b".")
        time.sleep(600)
        os._exit(0)
    os.read(heard, 1)
    """
    with Training(folder, "signals=True", worker) as training:
        assert training.said.startswith("worker")
        pid = int(training.said.split()[1])
        until(lambda: training.status().get("step", 0) > 5)
        training.process.kill()
        training.process.wait(60)
        os.kill(pid, 0)
        with pytest.raises(ConnectionRefusedError):
            training.status()
        with Training(folder) as again:
            assert again.said == "ready"
        os.kill(pid, signal.SIGTERM)
        until(lambda: process(str(pid))[1] != str(pid))


def test_a_fork_that_trains_is_warned_that_nothing_is_saved(folder: Path) -> None:
    """The thread that writes is the parent's: a save would wait for it for ever."""
    fork = """
    child = os.fork()
    if child == 0:
        guard.step(1)
        guard.step(2)
        for call in (lambda: guard.save(2), guard.restore):
            try:
                call()
            except Exception as error:
                os.write(1, f"{type(error).__name__}: {error}; ".encode())
        os.write(1, b"over\\n")
        os._exit(0)
    os.waitpid(child, 0)
    """
    with Training(folder, "every_s=0.001", fork) as training:
        refusal = "WriteAbandoned: this process is a fork of the one that made the guard (make a Guard here, too); "
        assert training.said == f"{refusal}{refusal}over"
        training.process.terminate()
        assert training.process.communicate(timeout=100)[1].count("its steps are not saved") == 1


def test_what_a_guard_that_was_let_go_is_writing_becomes_durable(folder: Path) -> None:
    """A function made it, without `with`, and has returned; then the program ends."""
    lost = """
    import gc, threading
    guard.step(1)
    open(root + "/stuck", "w").close()
    while not guard._writer.busy:
        time.sleep(0.01)
        state["step"] += 1
        guard.step(state["step"])
    taken = guard.requests.pace.step
    del guard
    gc.collect()
    later = threading.Timer(0.5, os.unlink, [root + "/stuck"])
    later.daemon = True
    later.start()
    print(taken, flush=True)
    raise SystemExit
    """
    with Training(folder, "every_s=0.001", lost) as training:
        assert training.end() == (0, "")
    assert steps(folder)[-1] == int(training.said)


def test_a_child_that_is_started_has_no_descriptor_of_ours(folder: Path) -> None:
    look = """
    import subprocess
    out = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout
    print([line.split()[-1] for line in out.splitlines() if "socket" in line or ".lock" in line], flush=True)
    """
    with Training(folder, "", look) as training:
        assert training.said == "[]"


def test_killed_while_paused_it_goes_on_from_that_step(folder: Path) -> None:
    with Training(folder) as training:
        training.ask("POST", "/api/v1/trigger_checkpoint", {"id": "e", "after": "pause"})
        stood = training.ended("e")["paused_step"]
    with Training(folder) as again:
        status = again.status()
        assert status["last_committed"]["step"] == stood
        until(lambda: again.status()["step"] > stood)


def test_the_tcp_port_wants_the_token_of_the_file(folder: Path) -> None:
    token = folder / "token"
    token.write_text("Heron-Lamp-Seven-19\n")
    token.chmod(0o644)
    with Training(folder, f"port=0, token_file={str(token)!r}") as training:
        code, said = training.end()
        assert code == 1
        assert "others can read the token (chmod 600)" in said
        assert "Heron" not in said
    token.chmod(0o600)
    with Training(folder, f"port=0, token_file={str(token)!r}", "print(guard.port, flush=True)") as training:
        port = int(training.said)
        assert ask(port, "GET", "/api/v1/status", headers={"Authorization": "Bearer wrong"})[0] == 401
        assert ask(port, "GET", "/api/v1/status", headers={"Authorization": "Bearer Heron-Lamp-Seven-19"})[0] == 200


def test_the_lease_of_one_process_is_not_renewed_by_another(folder: Path) -> None:
    """The daemon died; a dashboard that looks every second must not keep training standing."""
    poke = """
    import json, sys
    sys.path.insert(0, {root!r})
    from pathlib import Path
    from tests.trainer.toy import ask
    where = Path({socket!r})
    print(ask(where, "POST", "/api/v1/pause", b'{{"lease_s": 4.0}}')[0])
    while not json.loads(ask(where, "GET", "/api/v1/status")[2])["paused"]:
        pass
    """
    with Training(folder) as training:
        code = textwrap.dedent(poke).format(root=str(ROOT), socket=str(training.socket))
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
        assert ended.stdout.strip() == "200"
        until(lambda: not training.status()["paused"])


def test_uploads_are_held_when_asked_and_released_at_resume(folder: Path) -> None:
    """The dwell has ended: bandwidth and processor are the local write's; after the outage they go on."""
    (folder / "nas").mkdir()
    remote = f"remote={str(folder / 'nas')!r}, remote_every_s=0.1, every_s=None"
    with Training(folder, remote) as training:
        assert training.ask("POST", "/api/v1/hold_uploads")["uploads_held"]
        assert not training.ask("POST", "/api/v1/hold_uploads", {"lease_s": 0})["uploads_held"]
        training.ask("POST", "/api/v1/hold_uploads", {"lease_s": 60.0})
        assert training.status()["uploads_held"]
        training.ask("POST", "/api/v1/trigger_checkpoint", {"id": "e", "after": "pause"})
        step = training.ended("e")["step"]
        time.sleep(0.5)
        assert list((folder / "nas").glob("proc/*/MANIFEST.json")) == []
        training.ask("POST", "/api/v1/resume")
        assert not training.status()["uploads_held"]
        until(lambda: list((folder / "nas").glob("proc/*/MANIFEST.json")))
        until(lambda: f'powerguard_trainer_upload_durable_step{{job="proc"}} {step}' in metrics(training))
    for path in (folder / "ck").glob("step-*/shard-*"):
        path.write_bytes(bytes(path.stat().st_size))
    with Training(folder, remote, "print(state['step'], flush=True)") as again:
        assert int(again.said) == step, "the same step from the next tier, before an older one"
        assert 'powerguard_trainer_corrupt_total{job="proc"} 0' not in metrics(again)


def metrics(training: Training) -> str:
    return ask(training.socket, "GET", "/metrics")[2].decode()


def test_it_needs_nothing_but_the_standard_library_and_xxhash(folder: Path) -> None:
    """`pip install --no-deps powerguard xxhash`: what a training's environment gets with us."""
    import xxhash

    site = folder / "site"
    (folder / "ck").mkdir()
    site.mkdir()
    (site / "powerguard").symlink_to(ROOT / "powerguard")
    (site / "xxhash").symlink_to(Path(xxhash.__file__).parent)
    code = """
    import sys, time
    before = set(sys.modules)
    from powerguard.trainer import Guard, Parts
    root = sys.argv[1]
    for turn in range(2):
        state = Parts(lambda: {"a": b"weights"}, lambda saved: None)
        with Guard(state, root + "/ck", job="x", socket=root + "/t.sock") as guard:
            print(guard.restore(), end=" ")
            guard.step(turn + 1)
            guard.save(turn + 1)
    ours = {"powerguard", "xxhash"}
    found = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names) - ours
    print(sorted(name for name in found if not name.startswith("_")))
    inside = {name.split(".")[1] for name in sys.modules if name.startswith("powerguard.")}
    print(sorted(inside - {"trainer", "wire", "fields"}))
    """
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-I",
            "-c",
            f"import sys; sys.path.insert(0, {str(site)!r})\n{textwrap.dedent(code)}",
            folder,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stderr, done.stdout.splitlines()) == ("", ["0 1 []", "[]"])


def test_the_toy_says_what_a_checkpoint_would_take_before_any_was_asked_for(folder: Path) -> None:
    """The daemon budgets from this before any outage."""
    with Toy(folder, "--step-ms", "2", "--mb", "4", "--every-s", "0.2") as toy:
        until(lambda: "seconds" in toy.ask("GET", "/api/v1/status")[1].get("estimate", {}))
        until(lambda: "last_committed" in toy.ask("GET", "/api/v1/status")[1])
        status = toy.ask("GET", "/api/v1/status")[1]
        assert status["estimate"]["bytes"] > 4_000_000
        assert status["snapshot_step"] >= status["last_committed"]["step"]
