"""Child process: flush the file system that each path lies on. Stdlib only, so that it starts in 20 ms.

    python -I -S syncfs_child.py PATH...

syncfs(2) through the C library; where that fails (an odd C library, a folder of another user), sync(2) of everything.
The paths are flushed at the same time. Exit codes: 0 all flushed, 1 not, with each of those paths and its reason as a
line on stderr.
"""

import ctypes
import os
import sys
import threading


def main(argv: list[str]) -> int:
    """Flush and say how it went."""
    faults = dict.fromkeys(argv, "its flush did not end")

    def flush(path: str) -> None:
        faults[path] = _flush(path)

    threads = [threading.Thread(target=flush, args=(path,)) for path in argv]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stderr.writelines(f"{path}: {fault}\n" for path, fault in faults.items() if fault)
    return 1 if any(faults.values()) else 0


def _flush(path: str) -> str:
    """Return the error; "" if there was none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        os.sync()  # which needs no permission
        return ""
    except OSError as error:
        return str(error.strerror)
    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        os.sync()
        return ""
    return "" if syncfs(descriptor) == 0 else f"syncfs: {os.strerror(ctypes.get_errno())}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
