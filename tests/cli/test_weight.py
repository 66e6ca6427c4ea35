"""What hooks and monitoring call must be light: they run while the power fails, and every minute for ever."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAVY = (
    "asyncio",
    "email",
    "http",
    "dataclasses",
    "inspect",
    "logging",
    "ssl",
    "subprocess",
    "aiohttp",
    "prometheus_client",
    "pydantic",
    "pyghmi",
    "pysnmp",
    "structlog",
    "yaml",
    "powerguard.core",
    "powerguard.daemon",
    "powerguard.settings",
)
VERBS = [
    "event onbattery",
    "status",
    "plan",
    "abort",
    "maintenance off",
    "checkpoint",
    "battery show",
    "battery replaced",
]


def run(words: list[str], code: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", code, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("words", VERBS)
def test_stdlib_only(words: str, tmp_path: Path) -> None:
    """No library, and of the standard library nothing that costs more than the verb itself."""
    code = (
        "import sys\n"
        "from powerguard.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "print('\\n'.join(['LOADED', *sys.modules]))\n"
    )
    journal = ["--journal", str(tmp_path / "none")] if words in {"status", "battery show"} else []
    told = run([*words.split(), "--socket", str(tmp_path / "none.sock"), *journal], code)
    loaded = told.stdout.partition("LOADED\n")[2].split()
    assert loaded
    assert [name for name in loaded if name in HEAVY] == []


def test_hook_is_fast(tmp_path: Path) -> None:
    """Process start to exit within 100 ms on an idle machine; the best of several, as others work here too."""
    took = []
    for _ in range(7):
        began = time.perf_counter()
        argv = [sys.executable, "-m", "powerguard", "event", "x", "--socket", str(tmp_path / "none.sock")]
        subprocess.run(argv, capture_output=True, check=True, cwd=Path(__file__).parents[2])
        took.append(time.perf_counter() - began)
    assert min(took) < 0.1
