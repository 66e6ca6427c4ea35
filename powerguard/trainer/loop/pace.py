"""How the loop and its checkpoints go, in figures: what the daemon budgets from before any outage."""

from collections import deque
from dataclasses import dataclass, field

from powerguard.wire import Estimate, Loop

STEPS = 256  # step times that are remembered; a power of two
_SAFETY = 0.8  # of the slowest tenth of the writes seen: disks are slower in an emergency than on a good day


@dataclass(slots=True)
class Totals:
    """Counters since the start, for the metrics.

    failed: periodic checkpoints that came to nothing. late: those that were due while an older one was being written.
    stall_s: for how long training stood still to be copied. corrupt: checkpoints that were refused at restore or scrub.
    """

    writes: int = 0
    bytes: int = 0
    write_s: float = 0.0
    stalls: int = 0
    stall_s: float = 0.0
    failed: int = 0
    late: int = 0
    corrupt: int = 0


@dataclass(slots=True)
class Pace:
    """One loop's figures, and all that the training thread looks at after a step: few objects, few cache misses.

    asked: there is something to attend to at the next boundary. due_s: when the next periodic checkpoint is due, on the
    guard's clock. times, seen: the last step times, and how many there were. These four and `step` take no lock.
    stepped_at_s: when the last step ended, on the guard's clock. loop: what the loop is busy with.
    size_bytes: what a checkpoint of this process would write; None when not known yet.
    processes: how many of the job write on this host at a time, each so much.
    beside: training goes on while a state is written, and stands still only to be copied.
    """

    stepped_at_s: float
    due_s: float = 0.0
    asked: bool = False
    step: int | None = None
    times: list[float] = field(default_factory=lambda: [0.0] * STEPS)
    seen: int = 0
    loop: Loop = Loop.TRAIN
    size_bytes: int | None = None
    beside: bool = True
    processes: int = 1
    totals: Totals = field(default_factory=Totals)
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    _stalls: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def rested(self, seconds: float) -> None:
        """Standing still, saving and evaluating are no step time."""
        self.stepped_at_s += seconds

    def step_time_s(self, share: float) -> float | None:
        """The step time below which `share` of the last 255 steps lay; None before the second step."""
        times = sorted(self.times[1 : min(self.seen, STEPS)])  # the first one is start-up
        return times[int(len(times) * share)] if times else None

    def stalled(self, seconds: float) -> None:
        """Training stood still so long, to be copied (or to be written, where it cannot go on beside)."""
        self.totals.stalls += 1
        self.totals.stall_s += seconds
        self._stalls.append(seconds)

    def written(self, size_bytes: int, seconds: float) -> None:
        """A checkpoint of this process's bytes became durable, so long after its first byte."""
        self.totals.writes += 1
        self.totals.bytes += size_bytes
        self.totals.write_s += seconds
        self.probed(size_bytes / max(seconds, 1e-6))

    def probed(self, rate: float) -> None:
        """The disk took so many bytes a second."""
        self._rates.append(rate)

    def write_s(self, size_bytes: int) -> float | None:
        """What writing so many bytes would take; None when no rate is known."""
        slow = self._slow()
        return None if slow is None else size_bytes / max(_SAFETY * slow, 1.0)

    def estimate(self) -> Estimate | None:
        """What a checkpoint would take from the order on; None when not even its size is known."""
        if self.size_bytes is None:
            return None
        write_s = self.write_s(self.size_bytes)
        stall_s = max(self._stalls) if self._stalls else None
        size_bytes, slow = self.size_bytes * self.processes, self._slow()
        if write_s is None or slow is None:
            return Estimate(bytes=size_bytes, stall_s=stall_s)
        seconds = (self.step_time_s(0.95) or 0.0) + write_s + ((stall_s or 0.0) if self.beside else 0.0)
        return Estimate(bytes=size_bytes, write_bw_p10=slow * self.processes, seconds=seconds, stall_s=stall_s)

    def _slow(self) -> float | None:
        """The rate that nine tenths of the writes reached."""
        return sorted(self._rates)[(len(self._rates) - 1) // 10] if self._rates else None
