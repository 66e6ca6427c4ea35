"""Child process: flush the one file system that a path lies on. Stdlib only, so that it starts in 20 ms.

    python -I -S syncfs_child.py PATH

syncfs(2) through the C library; where that fails (an odd C library), sync(2) of everything. Exit codes: 0 flushed,
1 not, with the reason on stderr.
"""

import ctypes
import os
import sys


def main(argv: list[str]) -> int:
    """Flush and say how it went."""
    try:
        descriptor = os.open(argv[0], os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        sys.stderr.write(f"{error.strerror}\n")
        return 1
    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        os.sync()
        return 0
    if syncfs(descriptor) == 0:
        return 0
    sys.stderr.write(f"syncfs: {os.strerror(ctypes.get_errno())}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
