"""libfaketime plays the wall clock of one process, by a file that it reads again and again."""

from pathlib import Path

from tests.peers import require


def faked(clock: Path) -> dict[str, str]:
    """The environment that makes a process take its wall clock's offset from a file."""
    program = Path(require("faketime")).resolve()
    libraries = sorted((program.parents[1] / "lib").glob("*/faketime/libfaketimeMT.so.1"))
    assert libraries, f"no libfaketime beside {program}"
    return {
        "LD_PRELOAD": str(libraries[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",  # seconds; without a cache every look at the clock reads the file
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
