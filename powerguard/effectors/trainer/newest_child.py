"""Child process: wait for a checkpoint newer than a moment, then print it as JSON.

    python -m powerguard.effectors.trainer.newest_child DIR SINCE_NS LIMIT_S

A process of its own, because the folder may lie on a file system that hangs. Exit codes: 0 found, 1 none in time.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from powerguard.trainer.store import newest_in

_EVERY_S = 0.2


def main(argv: list[str]) -> int:
    """Look until found or out of time."""
    folder, since_ns, limit_s = Path(argv[0]), int(argv[1]), float(argv[2])
    began_s = time.perf_counter()
    while True:
        found = newest_in(folder, since_ns=since_ns) if folder.is_dir() else None
        if found is not None:
            sys.stdout.write(json.dumps(asdict(found)))
            return 0
        if time.perf_counter() - began_s >= limit_s:
            return 1
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
