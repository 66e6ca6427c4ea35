"""The real programs that tests talk to: where they are, and what happens where they are not."""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final, NoReturn

import pytest

MISSING: Final = "missing peer: "
"""How the reason of such a skip begins; tests/conftest.py gathers them by it."""

UNPACKED: Final = Path(__file__).parents[2] / "build" / "peers"


_FOLDERS: Final[list[Path]] = []


def folder_of_session(prefix: str) -> Path:
    """Make a folder in /tmp (its path has no space) for what all tests of this process share; conftest.py removes it.

    Not by atexit: a worker of xdist may be killed when its session has ended.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    _FOLDERS.append(folder)
    return folder


def remove_folders() -> None:
    """Remove what `folder_of_session` has made."""
    while _FOLDERS:
        shutil.rmtree(_FOLDERS.pop(), ignore_errors=True)


def find(program: str) -> str | None:
    """Return the path of a program: installed, unpacked by scripts/test-peers, of this environment; None: nowhere."""
    own = str(Path(sys.executable).parent)
    places = [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin", str(UNPACKED / "bin"), own]
    return shutil.which(program, path=os.pathsep.join(places))


def require(program: str) -> str:
    """Return the path of a program; skip the test without it, or fail it where POWERGUARD_REQUIRE_PEERS=1."""
    return find(program) or absent(program)


def absent(peer: str) -> NoReturn:
    """Skip the test for want of this, or fail it where POWERGUARD_REQUIRE_PEERS=1."""
    reason = f"{MISSING}{peer} (scripts/test-peers gets it, or pip install '.[test]' in the checkout)"
    if os.environ.get("POWERGUARD_REQUIRE_PEERS") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
