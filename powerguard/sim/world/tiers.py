"""Where a simulated training's checkpoints lie, and what of them is there when it resumes.

Locally every few minutes, in a second tier every half hour, and what was ordered. Progress is seconds of training at
full speed. A disk may have no room, so that nothing new becomes durable; and what a tier has acknowledged may turn out
torn: then the resume takes the same step from the next tier, else an older one, and what lies between is lost.
"""

import math

from powerguard.sim.world.scene import TrainerFacts
from powerguard.sim.world.site import TrainerSite

_LOCAL_SAVE_S = 20.0
_COPY_S = 300.0
_KEPT = 2


class Tiers:
    """The checkpoints of one training. passed_over: how many torn ones resumes have refused so far."""

    def __init__(self, facts: TrainerFacts, site: TrainerSite) -> None:
        """Begin with what was saved before the story begins."""
        self.passed_over = 0
        self._facts, self._site = facts, site
        self._saved_s = self._ordered_s = -facts.saved_ago_s
        self._copied_s = -facts.saved_ago_s - facts.copied_ago_s

    def keep(self, progress_s: float) -> None:
        """What was ordered is durable."""
        self._ordered_s = max(self._ordered_s, progress_s)

    def durable_s(self, progress_s: float) -> float:
        """Progress that is acknowledged as durable, with training at progress_s."""
        return max(self._ordered_s, *self._periodic(progress_s))

    def resume(self, progress_s: float) -> float:
        """Lose what is not durable; return the progress that training resumes from."""
        local = sorted({self._ordered_s, *self._periodic(progress_s)}, reverse=True)[:_KEPT]
        torn = min(self._facts.torn, len(local))
        self.passed_over += torn
        from_s = min(progress_s, max([*local[torn:], self._copy(progress_s)]))
        self._saved_s = self._ordered_s = from_s
        self._copied_s = min(self._copied_s, from_s)
        return from_s

    def _periodic(self, progress_s: float) -> list[float]:
        """The last two that it saved by itself, the newest first; those that were there at first, else."""
        if self._facts.disk_full:
            return [self._saved_s]
        every_s = self._site.local_every_s
        count = math.floor((progress_s - _LOCAL_SAVE_S - self._saved_s) / every_s)
        if count < 0:
            return [self._saved_s]
        return [min(self._saved_s + every_s * (count - back), progress_s) for back in range(min(_KEPT, count + 1))]

    def _copy(self, progress_s: float) -> float:
        """The newest whole copy in the second tier, which is never waited for in an outage."""
        if self._facts.disk_full:
            return self._copied_s
        count = math.floor((progress_s - _COPY_S - self._saved_s) / self._site.remote_every_s)
        return self._copied_s if count < 1 else self._saved_s + self._site.remote_every_s * count
