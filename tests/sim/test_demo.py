"""`powerguard demo`, live: real processes, sockets and seconds. It leaves nothing behind, whatever ends it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from powerguard.cli.main import main
from powerguard.daemon.journal import history, read_only
from powerguard.sim.demo.live import verified_step
from tests.sim.test_fast import SKELETON, skeleton

pytestmark = [pytest.mark.xdist_group("live demo"), pytest.mark.first, pytest.mark.timeout(300)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pg live ", dir="/tmp") as name:
        yield Path(name)


@contextlib.contextmanager
def demo(*more: str) -> Iterator[subprocess.Popen[str]]:
    """The demo as a shell starts it: in a process group of its own. Whatever happens, it is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "powerguard", "demo", *more],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def of_group(leader: int) -> list[str]:
    """Command lines of the processes of that session that live."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # session: the fourth field after the name, which may hold blanks; a zombie is nobody's process any more
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def wait_for(reached: Callable[[], object], limit_s: float) -> None:
    by_s = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < by_s, "waited in vain"
        time.sleep(0.05)


def test_the_whole_story_and_what_it_keeps(folder: Path) -> None:
    """A minute: every claim is true, it is the story that --fast tells, and --keep leaves its proof."""
    kept = folder / "kept"
    with demo("--json", "--keep", str(kept)) as process:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err + out
        wait_for(lambda: of_group(process.pid) == [], 60.0)
    answer = json.loads(out)
    assert answer["safe"] is True
    assert [check["observed"] for check in answer["checks"] if not check["holds"]] == []
    assert skeleton(answer) == SKELETON
    assert "SNMP v2c over UDP" in answer["real"]

    names = {path.name for path in kept.iterdir()}
    assert {"powerguard.yaml", "journal.sqlite", "checkpoints", "daemon.log", "trainer.log", "outage-3.html"} <= names
    assert not [path.name for path in kept.rglob("*") if path.is_socket()]
    (long,) = [check for check in answer["checks"] if check["name"] == "the last checkpoint is durable and verified"]
    assert f"stored {verified_step(kept / 'checkpoints')}," in long["observed"]
    with read_only(kept / "journal.sqlite") as db:
        outcomes = [record.outcome for record in reversed(history(db, 10))]
    assert outcomes[:2] == ["ridden_through", "resumed_in_place"]
    log = (kept / "daemon.log").read_text()
    assert "Traceback" not in log
    secret = (kept / "bmc-password").read_text()
    assert secret
    for path in ("powerguard.yaml", "daemon.log", "trainer.log", "journal.sqlite"):
        assert secret.encode() not in (kept / path).read_bytes()

    names = {path.name for path in kept.iterdir()}
    again = subprocess.run(
        [sys.executable, "-m", "powerguard", "demo", "--keep", str(kept)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 1
    assert again.stderr == f"powerguard demo: error: {kept} is not empty: give --keep a new folder\n"
    assert {path.name for path in kept.iterdir()} == names


@pytest.mark.slow
def test_three_hosts_on_one_ups(folder: Path) -> None:
    """The lower tier makes room for the upper one, by the three journals, and each host leaves its own proof.

    Slow: two outages of three hosts. Two daemons on one UPS are in tests/e2e/test_shared_ups.py.
    """
    kept = folder / "rack"
    with demo("--hosts", "3", "--json", "--keep", str(kept)) as process:
        out, err = process.communicate(timeout=280)
        assert process.returncode == 0, err + out
        wait_for(lambda: of_group(process.pid) == [], 60.0)
    answer = json.loads(out)
    assert [check["observed"] for check in answer["checks"] if not check["holds"]] == []
    assert len(answer["checks"]) == 9
    assert {each["host"] for each in answer["outages"]} == {"llm-1", "llm-2", "batch"}
    for host, outcome in (("llm-1", "resumed_in_place"), ("llm-2", "resumed_in_place"), ("batch", "rehearsed")):
        assert (kept / f"{host}-outage-2.html").exists()
        assert "Traceback" not in (kept / host / "daemon.log").read_text()
        with read_only(kept / host / "journal.sqlite") as db:
            assert history(db, 10)[-1].outcome == outcome


@pytest.mark.parametrize(
    "whom", ["the group, as a terminal does", pytest.param("the demo alone", marks=pytest.mark.slow)]
)
def test_interrupted_in_the_middle(whom: str) -> None:
    """Ctrl-C while the plug is pulled: 130, one line, no process, no folder, no socket."""
    with demo() as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "the plug is pulled" in line:
                break
        assert "the plug is pulled" in said, said + process.communicate(timeout=60)[1]
        (config,) = {
            word for line in of_group(process.pid) for word in line.split() if word.endswith("/powerguard.yaml")
        }
        home = Path(config).parent
        assert home.name.startswith("pg-demo-")
        assert len(of_group(process.pid)) >= 3
        if whom == "the demo alone":
            process.send_signal(signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert (process.returncode, err.strip()) == (130, "powerguard demo: stopped")
        wait_for(lambda: of_group(process.pid) == [], 60.0)
        assert not home.exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a-file", "File exists: give --keep a new folder"),
        ("a-file/below", "Not a directory: give --keep a new folder"),
        ("x" * 100, "give --keep a shorter one"),
    ],
)
def test_a_folder_that_cannot_be_kept(folder: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what would be right, or an object, and nothing is started."""
    (folder / "a-file").write_text("mine")
    assert main(["demo", "--keep", str(folder / name)]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("powerguard demo: error: ")
    assert said in stderr
    assert stderr.count("\n") == 1
    assert main(["demo", "--json", "--keep", str(folder / name)]) == 1
    assert said in json.loads(capsys.readouterr().out)["error"]
    assert (folder / "a-file").read_text() == "mine"


@pytest.mark.parametrize("stdin", ["nothing", "a file", "a pipe"])
def test_the_ups_alone_ends_with_standard_input(folder: Path, stdin: str) -> None:
    """Each line pulls or plugs, and the end ends it, whatever standard input is."""
    lines = "" if stdin == "nothing" else "\n\n"
    (folder / "stdin").write_text(lines)
    with contextlib.ExitStack() as stack:
        if stdin == "a pipe":
            given = {"input": lines}
        else:
            given = {"stdin": stack.enter_context(Path("/dev/null" if stdin == "nothing" else folder / "stdin").open())}
        ended = subprocess.run(
            [sys.executable, "-m", "powerguard", "demo", "--ups", "0"],
            **given,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line.partition(":")[0] for line in ended.stdout.splitlines()[2:]] == ["on battery", "utility"][: len(lines)]
