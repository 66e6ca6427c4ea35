"""What powerguard-signal has stopped: one small file, written before the first process is signalled.

It lies in /run and names the boot, for no process outlives one. Each entry holds the processes of a job, with the
moments at which they were started, so that nobody else is ever taken for one of them.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from powerguard.clock import boot_id
from powerguard.effectors.root_helper import KeptError, KeptFolder

LEASE_S: Final = 180.0
"""A stop holds this long after the daemon last said so: longer than its restart (20 s to stop, 60 s to start)."""

STOPPED: Final = "stopped.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """One job that was stopped at at_s. processes: (pid, ticks since boot at which it was started)."""

    socket: str
    uid: int
    at_s: float
    processes: tuple[tuple[int, int], ...]


class Folder(KeptFolder):
    """The helper's own folder: /run/powerguard-signal, or a test's."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, helper="powerguard-signal")

    def read(self) -> tuple[Stopped, ...]:
        """What is kept. What another boot has left is removed. Raises KeptError."""
        path = self.path / STOPPED
        try:
            told = json.loads(path.read_bytes())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self.cannot(path, "read", error) from None
        except (ValueError, RecursionError):
            raise _nonsense(path) from None
        if isinstance(told, dict) and isinstance(told.get("boot_id"), str) and told["boot_id"] != boot_id():
            self.write(())
            return ()
        try:
            return _entries(told)
        except (ValueError, KeyError, TypeError):
            raise _nonsense(path) from None

    def write(self, entries: tuple[Stopped, ...]) -> None:
        """Keep these; the file is gone where there are none."""
        if entries:
            plain = [
                {"socket": each.socket, "uid": each.uid, "at_s": each.at_s, "processes": each.processes}
                for each in entries
            ]
            self.put(STOPPED, json.dumps({"schema_version": 1, "boot_id": boot_id(), "stopped": plain}))
        else:
            with contextlib.suppress(FileNotFoundError):
                (self.path / STOPPED).unlink()


def _entries(told: dict[str, Any]) -> tuple[Stopped, ...]:
    """Read what was written, and believe nothing else. Raises ValueError, KeyError or TypeError."""
    if told["schema_version"] != 1:
        raise ValueError(told["schema_version"])
    return tuple(
        Stopped(
            socket=str(each["socket"]),
            uid=int(each["uid"]),
            at_s=float(each["at_s"]),
            processes=tuple((int(pid), int(started)) for pid, started in each["processes"]),
        )
        for each in told["stopped"]
    )


def _nonsense(path: Path) -> KeptError:
    return KeptError(
        f"{path}: is not what powerguard-signal wrote: let stopped processes go on by hand (kill -CONT), then remove it"
    )
