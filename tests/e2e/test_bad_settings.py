"""Settings that cannot be used: exit 78 at once, every mistake with its place, and never a traceback."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from powerguard.cli.main import main

EX_CONFIG = 78
AT_ONCE_S = 20.0
"""Seconds of a processor. The start of a process takes 1.5 s of a quick one; a file that hurts takes minutes."""
LIMIT_S = 100.0
"""How long a test waits for the process to end: no promise, so long enough for a machine that is very busy."""
GOOD = """\
mode: rehearse
ups:
  rack-a:
    sources:
      - {kind: snmp, host: 127.0.0.1, port: 16161}
"""


def cpu_s() -> float:
    """Processor time of the children so far. Not the wall's: this machine may have other things to do."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


Run = Callable[[Path], str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the daemon on these settings, in this process; return what it says: 78, soon, and in plain words."""

    def run(config: Path) -> str:
        began_s = time.process_time()
        status = main(["run", "--config", str(config)])
        used_s = time.process_time() - began_s
        out, err = capfd.readouterr()
        assert status == EX_CONFIG, err
        assert used_s < AT_ONCE_S, err
        assert out == ""
        assert "Traceback" not in err
        assert err.strip()
        return err

    return run


def run_alone(config: Path) -> str:
    """Run it as systemd does, in a process of its own; what is held of `run` holds here."""
    used_s = cpu_s()
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "powerguard", "run", "--config", str(config)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=LIMIT_S,
    )
    used_s = cpu_s() - used_s
    output = ended.stderr.decode()
    assert ended.returncode == EX_CONFIG, output
    assert used_s < AT_ONCE_S, output
    assert ended.stdout == b""
    assert "Traceback" not in output
    assert output.strip()
    return output


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    return folder / "powerguard.yaml"


def test_every_mistake_is_reported_at_once(config: Path) -> None:
    """Four mistakes in four places: four lines, each with file, line and column, and what would be right."""
    config.write_text(
        GOOD.replace("rehearse", "rehears")
        + "budget: {margin: 20%, reserve_s: -1}\ntrainers:\n  - {name: llm, url: 'https://example.org'}\nbugdet: {}\n"
    )
    output = run_alone(config).splitlines()
    found = [line.removeprefix(f"{config}:").split(": ", 2) for line in output if line.startswith(f"{config}:")]
    places = {setting: place for place, setting, _ in found}
    assert places["mode"] == "1:7"
    assert places["budget.margin"] == "6:18"
    assert places["budget.reserve_s"] == "6:34"
    assert places["trainers[0].url"].startswith("8:")
    assert places["bugdet"] == "9:1"
    assert "budget" in next(why for _, setting, why in found if setting == "bugdet")


def test_there_are_no_settings(config: Path) -> None:
    assert str(config) in run_alone(config)


def test_the_settings_cannot_be_read(config: Path, run: Run) -> None:
    """A folder, in place of a file that root could always read."""
    config.mkdir()
    assert str(config) in run(config)


def _bomb() -> str:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(rows)


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(lambda: "", id="empty"),
        pytest.param(_bomb, id="billion laughs"),
        pytest.param(lambda: "[" * 100_000, id="deep"),
        pytest.param(lambda: "!!python/object/apply:os.system ['touch /nonexistent/x']", id="python object"),
        pytest.param(lambda: GOOD + "mode: dry-run\n", id="a key twice"),
        pytest.param(lambda: GOOD.replace("rack-a", "'\\x1b[2Jrack'"), id="escape sequence"),
        pytest.param(lambda: GOOD.replace("16161", "9" * 5000), id="long number"),
        pytest.param(lambda: "mode: [unclosed\n", id="syntax"),
        pytest.param(lambda: "\x00\x01\x02", id="control characters"),
        pytest.param(lambda: os.urandom(4096).decode("latin-1"), id="rubbish"),
        pytest.param(lambda: "a: 1\n" * 200_000, id="a megabyte"),
    ],
)
def test_hostile_settings_are_refused_in_words(config: Path, run: Run, hostile: Callable[[], str]) -> None:
    """Nothing that stands in the file can hang, crash or command the daemon, or write on the operator's terminal."""
    config.write_text(hostile(), encoding="utf-8")
    result = run(config)
    assert str(config) in result
    assert "\x1b" not in result
    assert len(result) < 20_000


def test_a_file_that_is_no_text(config: Path, run: Run) -> None:
    config.write_bytes(b"\xff\xfe\x00mode: armed")
    assert str(config) in run(config)
