"""powerguard in a container, put in place by its own `install`; run by this machine's interpreter and libraries.

The units start /opt/powerguard/bin/python and powerguard, as on a host; behind these names is what the tests run on.
"""

import importlib
import json
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.peers.nspawn import Container, image

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = "/opt/any-python"
"""This machine's interpreter, as seen from inside."""
PREFIX: Final = "/opt/powerguard"

_ANY_PYTHON: Final = f"""#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib:/opt/libraries
exec /opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor} "$@"
"""
_RUN: Final = f"""#!/bin/sh
exec {PYTHON} -I -c 'import runpy, sys
sys.path[:0] = ["/opt/site", "/opt/site-packages"]
sys.argv[0:1] = []
sys.executable = "{PREFIX}/bin/python"
BODY' "$@"
"""
_MODULE: Final = """while sys.argv[0] in ("-I", "-P", "-S"):
    del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")"""
_COMMAND: Final = """sys.argv.insert(0, "powerguard")
from powerguard.cli.main import main
sys.exit(main())"""


def binds() -> dict[str, Path]:
    """What is shown inside: the interpreter, its libraries, and powerguard as a checkout has it."""
    return {
        "/opt/python": Path(sys.base_prefix),
        "/opt/site/powerguard": ROOT / "powerguard",
        "/opt/site/systemd": ROOT / "systemd",
        "/opt/site/config": ROOT / "config",
        "/opt/site-packages": Path(sysconfig.get_path("purelib")),
        **_libraries(),
    }


def _libraries() -> dict[str, Path]:
    """What the interpreter takes from this machine for the daemon's modules, and a small Debian has not."""
    for name in ("sqlite3", "ssl", "ctypes", "lzma", "bz2", "zlib"):
        importlib.import_module(name)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
    found = (Path(path) for path in mapped if path.startswith(("/lib/", "/usr/lib/")) and ".so" in path)
    missing = [path for path in found if not (image() / str(path)[1:]).exists()]
    # By every name that it has: it is loaded by one, and mapped by another.
    names = {name: path for path in missing for name in path.parent.glob(f"{path.name.split('.so')[0]}.so*")}
    return {f"/opt/libraries/{name.name}": path for name, path in names.items() if name.resolve() == path}


FILES: Final[Mapping[str, str]] = {
    PYTHON: _ANY_PYTHON,
    f"{PREFIX}/bin/python": _RUN.replace("BODY", _MODULE),
    f"{PREFIX}/bin/powerguard": _RUN.replace("BODY", _COMMAND),
}


def install(container: Container, *words: str, status: int = 0) -> dict[str, Any]:
    """Run `powerguard install` inside and return its object; skip where this interpreter cannot run there."""
    if container.run(PYTHON, "-I", "-c", "import ctypes").returncode != 0:
        pytest.skip("the interpreter of this machine does not run in the container")
    return say(container, "install", "--prefix", PREFIX, *words, status=status)


def say(container: Container, *words: str, status: int = 0) -> dict[str, Any]:
    """Run a verb inside and return its object. What it changes is the container's own, so it is not refused there."""
    argv = ["env", "--unset=POWERGUARD_UNDER_TEST", f"{PREFIX}/bin/powerguard", *words, "--json"]
    ended = container.run(*argv, limit_s=120)
    assert ended.returncode == status, f"{words}: {ended.returncode}: {ended.stdout}{ended.stderr}"
    return dict(json.loads(ended.stdout))
