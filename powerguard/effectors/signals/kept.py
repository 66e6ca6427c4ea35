"""What powerguard-signal has stopped: one small file, written before the first process is signalled.

It lies in /run and names the boot, for no process outlives one. Each entry holds the processes of a job, with the
moments at which they were started, so that nobody else is ever taken for one of them.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from powerguard.effectors.root_folder import KeptFolder, past_s

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
        by_hand = "let stopped processes go on by hand (kill -CONT)"
        super().__init__(path, helper="powerguard-signal", file=STOPPED, by_hand=by_hand)

    def read(self) -> tuple[Stopped, ...]:
        """What is kept. Raises KeptError."""
        told = self.load()
        if told is None:
            return ()
        try:
            return tuple(
                Stopped(
                    socket=str(each["socket"]),
                    uid=int(each["uid"]),
                    at_s=past_s(each["at_s"]),
                    processes=tuple((int(pid), int(started)) for pid, started in each["processes"]),
                )
                for each in told["stopped"]
            )
        except (ValueError, KeyError, TypeError):
            raise self.nonsense() from None

    def write(self, entries: tuple[Stopped, ...]) -> None:
        """Keep these; the file is gone where there are none."""
        if entries:
            self.keep({"stopped": [asdict(each) for each in entries]})
        else:
            self.forget()
