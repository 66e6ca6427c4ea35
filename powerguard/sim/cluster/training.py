"""The ranks of one job on several hosts, which agree by the product's own log (`powerguard.trainer.ranks.machine`).

All of them train in step: what one host waits for, all wait for. The log is one value here, because what its replicas
do with it is tested elsewhere (tests/trainer/test_agreement_model.py); what a rank does at a boundary, how long a write
takes, and what is noticed of a rank that is gone, is played. Each host keeps its checkpoints on a disk of its own.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from powerguard.sim.world.chance import stream
from powerguard.sim.world.host import Host, HostAnswer, Power
from powerguard.sim.world.invariants import hold
from powerguard.sim.world.scene import Scene
from powerguard.sim.world.site import Site
from powerguard.trainer.ranks.agreement import Limits
from powerguard.trainer.ranks.machine import Generation, State, apply

_LIMITS: Final = Limits()
COLLECTIVE_S: Final = 600.0
"""After this long NCCL and gloo give up on a partner."""
_BOUNDARY_S: Final = 1.5
"""A training thread that comes to no boundary within this time is taken for one that hangs, if a host has left."""
_ENDS_S: Final = 0.3
_KILLED_S: Final = 2.0
"""Slurm's KillWait here."""
_KEPT: Final = 2
_LOADS_S: Final = 20.0
_SCRIPT_S: Final = 60.0
"""The job's script waits for so long after its ranks for Slurm to end it (examples/slurm-many.sbatch)."""


class RankHost(Host):
    """A host whose training is its part of the job. at: its place among the hosts."""

    def __init__(self, scene: Scene, site: Site, at_s: float, *, training: "Training", at: int) -> None:
        super().__init__(scene, site, at_s)
        self.job, self.at = training, at
        self.training = self.trainer_alive = False

    @property
    def step(self) -> int:
        """Training steps done, as the ranks count them."""
        return self.job.step

    @property
    def durable_s(self) -> float:
        """Progress that would survive the loss of power now."""
        return self.job.newest_s

    def shows(self, *, alive: bool, busy: bool) -> None:
        """Be what its ranks are now: busy draws as training does."""
        now = (alive, alive and busy, alive and not busy)
        if (self.trainer_alive, self.training, self.paused) != now:
            self.trainer_alive, self.training, self.paused = now
            self.version += 1

    def resume(self, at_s: float) -> HostAnswer:
        """Take back this host's hold."""
        if not self._reachable:
            return HostAnswer(after_s=0.1, failure="connection refused")
        self._later(at_s + 0.2, lambda: self.job.resume(self.at))
        return HostAnswer(after_s=0.3, detail=(("resumed", True),))

    def start_training(self, at_s: float) -> HostAnswer:  # noqa: ARG002 - as any host
        """Leave it to Slurm."""
        return HostAnswer(after_s=0.1, detail=(("via", "scheduler"),))

    def _killed(self) -> None:
        super()._killed()
        self.job.gone(self.at)

    def _gone(self) -> None:
        super()._gone()
        self.job.gone(self.at)

    def _lose(self) -> None:
        """Leave it to the job, which resumes from what all hosts have."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The job from one start by Slurm to its end. alive: hosts whose rank runs. began: all of them have, together."""

    nodes: tuple[int, ...]
    alive: set[int] = field(default_factory=set)
    log: State = field(default_factory=State)
    began: bool = False
    stands: bool = False
    planned: set[tuple[str, int]] = field(default_factory=set)
    left: dict[int, float] = field(default_factory=dict)
    """Hosts that have been ordered off, and when."""


class Training:
    """See the module."""

    def __init__(self, seed: int, site: Site, *, shared: bool, disk_full: bool, changed: Callable[[], None]) -> None:
        """shared: all hosts keep checkpoints in one folder. disk_full: no new checkpoint becomes durable.

        changed: called when the daemons' trainers have news.
        """
        self.hosts: Sequence[RankHost] = ()
        self.now_s, self.progress_s, self.newest_s, self.rolled_back_s = -math.inf, 0.0, 0.0, 0.0
        self.run: Run | None = None
        self.starts = 0
        self.ended_badly: Callable[[], None] = lambda: None
        """Called when the job's script ends because its ranks have."""
        self._site, self._changed, self._shared, self._disk_full = site.trainer, changed, shared, disk_full
        self._writes = stream(seed, "job writes")
        self._by_s: dict[str, float] = {}
        self._disks: dict[int, list[float]] = {}
        self._due: list[tuple[float, int, Run, Callable[[], None]]] = []
        self._serial = 0
        self._periodic_s = self._site.local_every_s

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.progress_s / self._site.step_s)

    @property
    def trains(self) -> bool:
        """Whether steps are done: all ranks are there, and none stands."""
        run = self.run
        return run is not None and run.began and not run.stands and len(run.alive) == len(run.nodes)

    # --- Its time ----------------------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When something happens next."""
        due_s = self._due[0][0] if self._due else math.inf
        left_s = self._periodic_s - self.progress_s
        return min(due_s, self.now_s + max(left_s, 1e-3) if self.trains else math.inf)

    def advance(self, to_s: float) -> None:
        """Let time pass."""
        if self.trains:
            self.progress_s += to_s - self.now_s
        self.now_s = to_s

    def act(self) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= self.now_s:
            _, _, run, change = heapq.heappop(self._due)
            if run is self.run:
                change()
        if self.trains and self.progress_s >= self._periodic_s:
            self._periodic_s = self.progress_s + self._site.local_every_s
            self.ask(self.run.nodes[0] if self.run else 0, f"periodic-{self._serial}", reason="periodic")

    def _later(self, in_s: float, change: Callable[[], None]) -> None:
        if self.run is not None:
            self._serial += 1
            heapq.heappush(self._due, (self.now_s + in_s, self._serial, self.run, change))

    # --- What Slurm does ---------------------------------------------------------------------------------------------

    def start(self, nodes: tuple[int, ...]) -> None:
        """Slurm starts the job: each rank loads the newest checkpoint that all of them have."""
        self.run = Run(nodes=nodes)
        self.starts += 1
        self._later(0.0 if self.starts == 1 else _LOADS_S, self._loaded)

    def _loaded(self) -> None:
        run = self.run
        assert run is not None  # noqa: S101 - only a run loads
        if self.starts > 1:
            common = set.intersection(*(set(self._disk(at)) for at in run.nodes))
            from_s = max(common, default=0.0)
            hold(from_s >= self.newest_s, "the newest checkpoint that all ranks have is never lost")
            self.rolled_back_s += self.progress_s - from_s
            self.progress_s = from_s
            self._periodic_s = from_s + self._site.local_every_s
        run.alive = {at for at in run.nodes if self.hosts[at].power is Power.UP}
        run.began = len(run.alive) == len(run.nodes)
        if not run.began:
            self._later(COLLECTIVE_S, self._all_end)
        self._show()

    def stop(self) -> None:
        """Slurm ends the job: every rank gets SIGTERM, and is killed soon after."""
        if self.run is not None:
            self._later(_KILLED_S, self._over)

    def _over(self) -> None:
        self.run = None
        self._show()

    # --- What daemons ask --------------------------------------------------------------------------------------------

    def ask(
        self,
        host: int,
        name: str,
        *,
        reason: str,
        after: str = "continue",
        save: bool = True,
        deadline_s: float = _LIMITS.write_s,
    ) -> None:
        """Ask all ranks for a checkpoint, or for a pause, in the name of a host."""
        self._by_s[name] = self.now_s + deadline_s
        self._say(kind="ask", id=name, reason=reason, event="", after=after, save=save, deadline_s=None, host=host)

    def asked(self, name: str) -> Generation | None:
        """Return what became of it; None: there is no such request in this run."""
        return None if self.run is None else self.run.log.asked_as(name)

    def resume(self, host: int) -> None:
        """A host does not hold training any more."""
        self._say(kind="resume", host=host, roll=True)

    def depart(self, host: int) -> None:
        """A host leaves, which ends the job on all of them."""
        self._say(kind="depart", host=host, because=f"gpu{host + 1} has left the job")

    def ordered_off(self, host: int) -> None:
        """A host is ordered off in order."""
        if self.run is not None and host in self.run.alive:
            self.run.left.setdefault(host, self.now_s)

    def held_by(self, host: int) -> str:
        """Return the names of the other hosts that hold training; "" for none."""
        run = self.run
        others = [] if run is None else [at for at, _ in run.log.holds if at != host]
        return ", ".join(f"gpu{at + 1}" for at in others)

    def departed(self, host: int) -> str:
        """Return which other host has left, as the trainers of this host say it; "": none."""
        run = self.run
        return "" if run is None or run.log.departing == host else run.log.departed

    # --- What the ranks do -------------------------------------------------------------------------------------------

    def _say(self, **entry: Any) -> None:  # noqa: ANN401 - an entry of the log
        run = self.run
        if run is None or not run.alive:
            return
        run.log = apply(run.log, entry)
        log, front = run.log, run.log.front
        if front is not None and front.step is None:
            boundary_s = 0.1 if run.stands else min(0.5 * self._site.step_s + 0.1, _BOUNDARY_S)
            self._once("agree", front.number, boundary_s, self._agree)
        if log.leaving is not None:
            self._once("end", log.leaving, _ENDS_S, lambda _: self._others_end())
        stands = log.held_at is not None or (front is not None and front.step is not None)
        if stands != run.stands:
            run.stands = stands
            self._show()
        self._changed()

    def _once(self, what: str, number: int, in_s: float, change: Callable[[int], None]) -> None:
        run = self.run
        if run is not None and (what, number) not in run.planned:
            run.planned.add((what, number))
            self._later(in_s, lambda: change(number))

    def _agree(self, number: int) -> None:
        """All ranks have bid: they stand at the step, and write."""
        run = self.run
        front = None if run is None else run.log.front
        if run is None or front is None or front.number != number or front.step is not None:
            return
        if len(run.alive) < len(run.nodes):
            if not run.log.departed:
                self._once("give up", number, _LIMITS.dead_s, self._give_up)
                return
            # A rank that is gone bids no more: the library ends the others without it.
            self._others_end()
            return
        self._say(kind="step", g=number, step=self.step, token="0123abcd")  # noqa: S106 - no secret
        if not front.save:
            return
        self._say(kind="begin", g=number)
        by_s = min(self._by_s[name] for name in front.ids)
        self._later(max(0.0, by_s - self.now_s) + _LIMITS.late_s, lambda: self._give_up(number))
        at_s, trainer = self.progress_s, self._site
        for host in sorted(run.alive):
            takes_s = trainer.checkpoint_median_s * self._writes.lognormvariate(0.0, trainer.checkpoint_spread)
            if self._writes.random() >= trainer.hung_share:
                self._later(takes_s, lambda host=host: self._written(number, host, at_s))  # type: ignore[misc]

    def _written(self, number: int, host: int, at_s: float) -> None:
        """One host's part is durable; with the last one the checkpoint counts, on every host that is there."""
        run = self.run
        if run is None or host not in run.alive or (known := run.log.generation(number)) is None:
            return
        if self._disk_full:
            self._say(kind="end", g=number, ok=False, error="No space left on device")
            return
        self._say(kind="gathered", g=number, key=str(host))
        known = run.log.generation(number)
        if known is None or known.ended is not None or len(known.gathered) < len(run.nodes):
            return
        self._say(kind="end", g=number, ok=True, digest="sha256:aa")
        for at in run.alive:
            self._disks[0 if self._shared else at] = sorted({*self._disk(at), at_s})[-_KEPT:]
        if len(run.alive) == len(run.nodes):
            self.newest_s = max(self.newest_s, at_s)

    def _disk(self, host: int) -> list[float]:
        """Return the checkpoints that a host can read."""
        return self._disks.get(0 if self._shared else host, [0.0])

    def _give_up(self, number: int) -> None:
        self._say(kind="end", g=number, ok=False, error="a rank has fallen silent")

    def _others_end(self) -> None:
        """Every rank ends with status 75, but for those of the host that leaves, which stand until it is off."""
        run = self.run
        if run is not None:
            run.stands = True
            run.alive &= {run.log.departing} if run.log.departing is not None else set()
            self._later(_SCRIPT_S, self._script_ends)
            self._show()

    def _all_end(self) -> None:
        run = self.run
        if run is not None:
            run.alive.clear()
            self._later(_SCRIPT_S, self._script_ends)
            self._show()

    def _script_ends(self) -> None:
        self._over()
        self.ended_badly()

    def gone(self, host: int) -> None:
        """A host's rank is gone with its host: the others hang in a collective, or find out where they stand."""
        run = self.run
        if run is None or host not in run.alive:
            return
        run.alive.discard(host)
        log = run.log
        for known in (log.front, log.back):
            if known is not None:
                self._once("give up", known.number, _LIMITS.dead_s, self._give_up)
        if log.departed:
            self._later(_ENDS_S, self._others_end)
        elif run.stands and host == run.nodes[0]:
            self._later(_LIMITS.lost_s, self._all_end)  # it had the store
        elif not run.stands:
            self._later(COLLECTIVE_S, self._all_end)
        self._show()

    def _show(self) -> None:
        """Let each host draw and answer as its ranks do."""
        run = self.run
        for at, host in enumerate(self.hosts):
            alive = run is not None and at in run.alive
            host.shows(alive=alive, busy=alive and run is not None and not run.stands)
        self._changed()

    def late(self) -> Mapping[int, float]:
        """Return the hosts that were ordered off and whose job has not ended elsewhere, with the seconds since then.

        A checkpoint that is being written is finished first.
        """
        run = self.run
        if run is None or not run.alive - run.left.keys() or (run.log.front is not None and run.log.front.begun):
            return {}
        return {at: self.now_s - at_s for at, at_s in run.left.items()}
