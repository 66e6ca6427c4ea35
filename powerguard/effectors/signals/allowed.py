"""Which units may be sent which signal for a checkpoint: root's file, one `UNIT SIGNAL` a line."""

import os
import re
import signal
import stat
from pathlib import Path
from typing import Final

from powerguard.effectors.root_helper import RefusedError

ALLOWED: Final = "/etc/powerguard/signals"
SIGNALS: Final = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2, "TERM": signal.SIGTERM}
UNIT: Final = re.compile(r"[A-Za-z0-9:_.@\\-]{1,240}\.(?:service|scope)")

_MOST_BYTES: Final = 65536


def allowed(path: Path, owner: int) -> frozenset[tuple[str, str]]:
    """Read which units may be sent which signal. Raises RefusedError for a file that others can change.

    owner: whose it may be beside root's, in a test.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            for what, found in ((path, os.fstat(descriptor)), (path.parent, path.parent.stat())):
                if found.st_uid not in (0, owner) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    msg = f"{what}: others than root can change it, so it is not believed (chown root, chmod go-w)"
                    raise RefusedError(msg)
            text = os.read(descriptor, _MOST_BYTES).decode("utf-8", "replace")
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        msg = f"{path}: cannot be read: {error.strerror or error} (it must be a file, no link)"
        raise RefusedError(msg) from None
    pairs: set[tuple[str, str]] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not UNIT.fullmatch(words[0]) or words[1].removeprefix("SIG") not in SIGNALS:
            msg = f"{path}:{number}: expected UNIT and one of {', '.join(SIGNALS)}, such as: train.service USR1"
            raise RefusedError(msg)
        pairs.add((words[0], words[1].removeprefix("SIG")))
    return frozenset(pairs)
