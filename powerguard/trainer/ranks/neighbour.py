"""Each rank looks after the next one: of any that die, one has a living rank before it, which tells the others."""

from collections.abc import Callable
from pathlib import Path

from powerguard.trainer.ranks.base import Ranks


class Neighbour:
    """The next rank, as this one's watcher sees it while something is in flight.

    dead_s: without a beat of its watcher it is taken for dead. A process of the same host that has ended is known at
    once. beat_s: how often to look.
    """

    def __init__(self, ranks: Ranks, *, dead_s: float, beat_s: float, clock: Callable[[], float]) -> None:
        self._alone = ranks.size == 1
        self._rank = (ranks.rank + 1) % ranks.size
        self._dead_s, self._beat_s, self._clock = dead_s, beat_s, clock
        self._beat = 0
        self._heard = b""
        self._heard_at_s: float | None = None
        self._oldest: int | None = None
        self._looked_at_s = 0.0
        self._process: tuple[str, str] | None = None
        self._own = process("self")
        if not self._alone:
            ranks.set(f"process/{ranks.rank}", " ".join(self._own).encode("ascii", "replace"))

    def gone(self, ranks: Ranks, *, oldest: int | None) -> str:
        """Say why the next rank is taken for dead; "" while it is not, or while nothing is in flight.

        oldest: of the generations in flight. While there is none nobody beats: a watcher that was late may not have
        seen that, and must not hold the silence of one generation against the next.
        """
        if oldest != self._oldest:
            self._oldest, self._heard_at_s = oldest, None
        if self._alone or oldest is None:
            return ""
        now_s = self._clock()
        if self._heard_at_s is not None and now_s - self._looked_at_s < self._beat_s:
            return ""
        self._beat += 1
        ranks.set(f"beat/{ranks.rank}", b"%d" % self._beat)
        if self._killed(ranks):
            return f"rank {self._rank} has died"
        heard = ranks.get(f"beat/{self._rank}", 0.0) if ranks.check(f"beat/{self._rank}") else b""
        slept = now_s - self._looked_at_s > self._dead_s / 2
        if heard != self._heard or self._heard_at_s is None or slept:
            self._heard, self._heard_at_s = heard, now_s  # one that has slept itself has no right to complain
        self._looked_at_s = now_s
        silent_s = now_s - self._heard_at_s
        return f"nothing heard of rank {self._rank} for {silent_s:.1f} s" if silent_s >= self._dead_s else ""

    def _killed(self, ranks: Ranks) -> bool:
        if self._process is None and ranks.check(f"process/{self._rank}"):
            space, pid, began = ranks.get(f"process/{self._rank}", 0.0).decode().split(" ")
            seen = space == self._own[0] != "-" and pid != self._own[1]
            self._process = (pid, began) if seen else ("", "")
        if self._process is None or not self._process[0]:
            return False
        return process(self._process[0])[1:] != self._process


def process(pid: str) -> tuple[str, str, str]:
    """Return where this process counts (boot, pid namespace), its pid and when it began: proc(5), /proc/PID/stat.

    Dashes where it has ended, or where there is no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
        told = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "-", "-", "-"
    # The name in brackets may hold anything, brackets too; the state is the third field, the beginning the 22nd.
    state, *rest = told.rpartition(") ")[2].split(" ")
    if state in {"Z", "X"}:
        return space, "-", "-"
    return space, told.partition(" ")[0], rest[18]
