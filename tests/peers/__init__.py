"""The real programs that tests talk to: where they are, and what happens where they are not."""

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

MISSING: Final = "missing peer: "
"""How the reason of such a skip begins; tests/conftest.py gathers them by it."""

UNPACKED: Final = Path(__file__).parents[2] / "build" / "peers"


def find(program: str) -> str | None:
    """Return the path of a program, installed or unpacked by scripts/test-peers; None where there is none."""
    places = [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin", str(UNPACKED / "bin")]
    return shutil.which(program, path=os.pathsep.join(places))


def require(program: str) -> str:
    """Return the path of a program; skip the test without it, or fail it where POWERGUARD_REQUIRE_PEERS=1."""
    path = find(program)
    if path is not None:
        return path
    reason = f"{MISSING}{program} (scripts/test-peers gets it)"
    if os.environ.get("POWERGUARD_REQUIRE_PEERS") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
