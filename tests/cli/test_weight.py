"""What hooks and monitoring call must be light: they run while the power fails, and every minute for ever."""

import resource
import subprocess
import sys
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
    "cryptography",
    "jinja2",
    "prometheus_client",
    "pydantic",
    "pyghmi",
    "shtab",
    "structlog",
    "yaml",
    "powerguard.core",
    "powerguard.daemon",
    "powerguard.settings",
)
VERBS = [
    "event onbattery",
    "plan",
    "abort",
    "maintenance off",
    "checkpoint",
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
    result = run([*words.split(), "--socket", str(tmp_path / "none.sock")], code)
    loaded = result.stdout.partition("LOADED\n")[2].split()
    assert loaded
    assert [name for name in loaded if name in HEAVY] == []


@pytest.mark.parametrize("module", ["status", "battery"])
def test_what_reads_the_journal_loads_its_reader_only_when_the_daemon_is_down(module: str) -> None:
    result = run([], f"import sys, powerguard.cli.main, powerguard.cli.{module}\nprint('\\n'.join(sys.modules))")
    assert [name for name in result.stdout.split() if name in HEAVY] == []


def test_hook_is_light(tmp_path: Path) -> None:
    """Start to exit in 100 ms of CPU time: a hook runs while the power fails, and the host has better things to do.

    On a machine that is slow, or slowed by others: five times what a Python that does nothing takes there just then.
    """
    argv = [sys.executable, "-m", "powerguard", "event", "x", "--socket", str(tmp_path / "none.sock")]
    took, nothing = [], []
    for _ in range(7):
        took.append(_took_s(argv))
        nothing.append(_took_s([sys.executable, "-c", "pass"]))
    assert min(took) < max(0.1, 5.0 * min(nothing))


def _took_s(argv: list[str]) -> float:
    """CPU seconds of a child."""
    began_s = _cpu_s()
    subprocess.run(argv, capture_output=True, check=True, cwd=Path(__file__).parents[2])
    return _cpu_s() - began_s


def _cpu_s() -> float:
    """CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
