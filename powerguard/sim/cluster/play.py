"""One outage of several hosts that run one job under Slurm: each host with its own UPS, its own core and its own clock.

After every change the play asks the invariants that concern the job and the scheduler (`Play._check`, `Play._over`;
those of Slurm's node and job are in `slurmctld`). An outage is played a second time without the scheduler, up to the
first power-off: it must come at the same moment.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final, NamedTuple

from powerguard.core.model.actions import (
    Action,
    Conduct,
    DrainNode,
    LeaveJob,
    LeaveNode,
    PauseTrainer,
    PowerOff,
    ReturnNode,
    SignalJobs,
    TriggerCheckpoint,
)
from powerguard.core.model.events import Done, Failed, TrainerSeen
from powerguard.core.model.state import Holding, NodeMarked, Online, Shutdown, Step, Supply
from powerguard.effectors.slurm.effector import LIMIT_S, detail_of, word_of
from powerguard.sim.cluster.slurmctld import OURS, ClusterEvent, Fault, HelperWord, Job, Slurmctld
from powerguard.sim.cluster.training import RankHost, Training
from powerguard.sim.world.back import ReturnFacts
from powerguard.sim.world.chance import Cut, SurroundingFacts, stream, uniform
from powerguard.sim.world.guarded import POLL_S, SNAPSHOT_S, TRAINER, Guarded
from powerguard.sim.world.host import HostAnswer, Power
from powerguard.sim.world.invariants import InvariantBroken, hold
from powerguard.sim.world.many import Progress, spread
from powerguard.sim.world.rack import RackHostPlay
from powerguard.sim.world.report import SimulationOptions
from powerguard.sim.world.run import WARM_S
from powerguard.sim.world.scene import Scene, TrainerFacts, draw
from powerguard.sim.world.site import ClusterSite, Site
from powerguard.sim.world.world import World

NEVER_LATER: Final = "the power-off is never later because of the scheduler"
DRIFT: Final = 1.02
SAME_S: Final = 1.0
"""Two power-offs within this time are in the same second."""
LEFT_S: Final = 2.0
"""After this long no rank is there any more whose job a host has left."""
HELD_S: Final = 5.0
"""So long an order to go on may be under way when another host takes hold."""
REPORTED_S: Final = 180.0
"""After this long a node that powerguard has marked is in service, or a person has heard why it is not."""
REPAIRED_S: Final = 900.0
"""A person looks at nodes that are out, and at a job that has failed, this often."""
CALM_S: Final = 30.0
"""The job has trained for so long, and nothing is owed: the outage is over."""
PATIENCE_S: Final = 2 * REPAIRED_S + 600.0
"""After this long, and two looks of a person, the job trains."""
_ASKS = (TriggerCheckpoint, PauseTrainer)
_WORDS = (DrainNode, SignalJobs, LeaveNode, ReturnNode)
_CHUNK: Final = 10


# --- What chance decides --------------------------------------------------------------------------------------

_KINDS: Final = ("hangs", "late", "refuses", "lies", "garbles")
_APART: Final = ("stays", "back_earlier", "goes_later")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One outage. scenes: one for each host. width: nodes of the job; the others are spare.

    requeues: the job may be requeued. hold: requeued in hold. disk_full: its disk takes no new checkpoint.
    """

    seed: int
    scenes: tuple[Scene, ...]
    width: int
    faults: tuple[Fault, ...] = ()
    deeds: tuple[ClusterEvent, ...] = ()
    requeues: bool = True
    hold: bool = False
    disk_full: bool = False


def draw_plan(seed: int, site: Site, *, faults: bool) -> Plan:
    """Draw one outage. The hosts stand behind one feed, or behind two of which one fares better."""
    chance, cluster = stream(seed, "cluster"), site.cluster
    hosts = chance.randint(*cluster.hosts)
    first = _shortened(draw(seed, site, faults=faults).cuts, cluster.longest_s)
    apart, kind = chance.random() < cluster.apart_share, chance.choice(_APART)
    delay_s, on_other = uniform(chance, (5.0, 600.0)), [chance.random() < 0.5 for _ in range(hosts)]
    other = _other_cuts(first, kind, delay_s) if apart else first
    scenes = tuple(
        _scene(seed * 1000 + at, site, other if on_other[at] and at else first, faults=faults) for at in range(hosts)
    )
    spare = hosts > 2 and chance.random() < cluster.spare_share
    width, requeues, hold = (
        hosts - spare,
        chance.random() >= cluster.no_requeue_share,
        chance.random() < cluster.hold_share,
    )
    end_s = max(scene.end_s for scene in scenes)
    return Plan(
        seed=seed,
        scenes=scenes,
        width=width,
        faults=_faults(seed, cluster, end_s) if faults else (),
        deeds=_deeds(seed, cluster, end_s, hosts) if faults else (),
        requeues=requeues,
        hold=hold,
        disk_full=faults and any(scene.trainer.disk_full for scene in scenes),
    )


def _shortened(cuts: Sequence[Cut], longest_s: float) -> tuple[Cut, ...]:
    """Return the cuts, none of which lasts longer: hosts that are off for hours have nothing to show."""
    found, earlier_s = [], 0.0
    for cut in cuts:
        lasts_s = min(cut.end_s - cut.begin_s, longest_s)
        found.append(Cut(cut.begin_s - earlier_s, cut.begin_s - earlier_s + lasts_s))
        earlier_s += cut.end_s - cut.begin_s - lasts_s
    return tuple(found)


def _other_cuts(first: Sequence[Cut], kind: str, by_s: float) -> tuple[Cut, ...]:
    """Return what the second feed goes through."""
    if kind == "stays":
        return ()
    if kind == "goes_later":
        return tuple(Cut(cut.begin_s + by_s, cut.end_s + by_s) for cut in first)
    last = first[-1]
    end_s = max(last.begin_s + 1.0, last.end_s - by_s)
    return (*first[:-1], Cut(last.begin_s, end_s))


def _scene(seed: int, site: Site, cuts: tuple[Cut, ...], *, faults: bool) -> Scene:
    """Draw one host. What its trainer does in outages of one host, and other programs, are left out here."""
    drawn = draw(seed, site, faults=faults)
    trainer = TrainerFacts(estimate_s=drawn.trainer.estimate_s, disk_full=drawn.trainer.disk_full)
    gauge = replace(drawn.gauge, glitch_rate=0.0)
    return replace(
        drawn, cuts=cuts, trainer=trainer, gauge=gauge, order=None, always_on=True, second=None,
        surroundings=SurroundingFacts(), returns=ReturnFacts(), silences=(), dies_at=0.0,
    )  # fmt: skip


def _faults(seed: int, cluster: ClusterSite, end_s: float) -> tuple[Fault, ...]:
    """Draw when Slurm does not do what it is asked: before the cut, in the outage, or after it."""
    chance = stream(seed, "slurmctld")
    found = []
    for kind in _KINDS:
        occurs, begin_s = chance.random() < cluster.fault_share, _moment(chance, end_s)
        lasts_s = uniform(chance, cluster.fault_s)
        by_s = uniform(chance, (0.5, 3.0)) if kind == "late" else uniform(chance, (10.0, 120.0))
        if occurs:
            found.append(Fault(kind, begin_s, begin_s + lasts_s, by_s))
    return tuple(found)


def _deeds(seed: int, cluster: ClusterSite, end_s: float, hosts: int) -> tuple[ClusterEvent, ...]:
    """Draw what persons, and Slurm itself, do in between."""
    chance = stream(seed, "persons")
    found = []
    for kind in ("drain", "resume", "words", "requeue", "forget"):
        occurs, at_s, node = chance.random() < cluster.deed_share, _moment(chance, end_s), chance.randrange(hosts)
        if occurs:
            found.append(ClusterEvent(at_s, kind, node))
    return tuple(sorted(found))


def _moment(chance: Random, end_s: float) -> float:
    """Return a moment just before or after the cut, in the first ten minutes, or until long after the return."""
    first_s, last_s = chance.choice(((-10.0, 8.0), (0.0, 600.0), (0.0, end_s + 900.0)))
    return chance.uniform(first_s, last_s)


# --- One outage -----------------------------------------------------------------------------------------------


class Off(NamedTuple):
    """A power-off: when it was ordered, and how long after the commit."""

    at_s: float
    after_s: float


class Place(World):
    """A host of the cluster, and the UPS behind which it is alone."""

    def __init__(self, scene: Scene, site: Site, *, training: Training, at: int) -> None:
        super().__init__(scene, site, began_s=-WARM_S)
        self.at = at
        self.ranks = RankHost(scene, site, -WARM_S, training=training, at=at)
        self.host = self.ranks
        self.offs: list[Off] = []

    @property
    def on_battery_s(self) -> float | None:
        """For how long its UPS has had no utility; None: it has."""
        return None if self._began_battery_s is None else self.now_s - self._began_battery_s


class Member(Guarded):
    """powerguard on one host of the cluster."""

    def __init__(self, place: Place, slurm: Slurmctld, training: Training, plan: Plan, *, scheduler: bool) -> None:
        super().__init__(place)
        self.place, self.slurm, self.training = place, slurm, training
        self._kept_out = False
        """It was reported that the node is left as others have marked it."""
        self._plan_of, self._life = plan, 0
        # Signals reach the ranks of one host, without a word to the others (docs/guides/many-hosts.md).
        self._policy = replace(self._policy, scheduler=scheduler, signals=False)
        self._asked: dict[str, Action] = {}
        self._shown: tuple[object, ...] = ()

    @property
    def node(self) -> NodeMarked | None:
        """What is owed to Slurm."""
        return self._state.node

    @property
    def settled(self) -> bool:
        """Nothing is under way, and no node is owed."""
        return self._back_s is None and isinstance(self._state.phase, Online) and self._state.cap is None

    def boot(self, *, was_off_s: float | None) -> None:
        """Start the daemon in this boot."""
        self._life += 1
        self._asked.clear()
        super().boot(was_off_s=was_off_s)

    def _kill(self) -> None:
        self._life += 1
        self._asked.clear()
        super()._kill()

    def news(self) -> None:
        """Look at what the trainer says: the daemon keeps a request open at a job of several hosts."""
        self._ended_requests()
        if self._back_s is None and not self._stopped and self._boots and self.place.is_on:
            self._watch()

    @property
    def holds(self) -> bool:
        """It has had its ranks pause, and has not let them go on."""
        return self._back_s is None and isinstance(self._state.phase, Holding) and self.place.ranks.trainer_alive

    @property
    def reported(self) -> bool:
        """A person knows that the node is not as it should be."""
        return self._kept_out or "scheduler_failed" in self._state.alarms

    @property
    def _every_s(self) -> float:
        return POLL_S if self._state.feed.supply is Supply.BATTERY else 2.0 * POLL_S

    # --- The trainer -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        host, job, now_s = self.place.ranks, self.training, self.world.now_s
        alive = host.trainer_alive
        seen = (alive, host.paused, job.held_by(host.at), job.departed(host.at))
        if seen == self._shown and now_s - self._seen_s < SNAPSHOT_S:
            return
        self._shown, self._seen_s = seen, now_s
        run = job.run
        event = TrainerSeen(
            at_s=now_s + self._offset_s,
            trainer=TRAINER,
            alive=alive,
            conduct=Conduct.PAUSE,
            checkpoint_s=self.world.scene.trainer.estimate_s,
            disk="local",
            step=host.step if alive else None,
            step_s=self.world.site.trainer.step_s,
            paused=host.paused,
            durable_age_s=max(0.0, job.progress_s - job.newest_s),
            stall_s=self.world.site.trainer.stall_s,
            hosts=1 if run is None else len(run.nodes),
            held_by=job.held_by(host.at) if alive else "",
            ended_by=job.departed(host.at),
        )
        self._later(now_s, event)
        self._plan()

    def _ended_requests(self) -> None:
        """Answer the requests whose generation is over, or whose run is."""
        now_s = self.world.now_s
        for name, action in tuple(self._asked.items()):
            known = self.training.asked(name)
            if known is not None and known.ended is None and self.place.ranks.trainer_alive:
                continue
            del self._asked[name]
            took_s, at_s = 0.0, now_s + self._offset_s
            if known is not None and known.ended is not None and known.ended.ok:
                detail = (("step", known.step), ("at_paused_step", True), ("paused", True), ("verified", True))
                self._later(now_s, Done(at_s=at_s, action=action, took_s=took_s, detail=detail))
            else:
                why = "connection reset by peer" if known is None or known.ended is None else known.ended.error
                self._later(now_s, Failed(at_s=at_s, action=action, took_s=took_s, reason=why))

    # --- Orders ------------------------------------------------------------------------------------------------------

    def _took(self, answer: Step) -> None:
        for note in answer.notes:
            if note.event in ("node_kept", "node_drained"):
                self._kept_out = note.event == "node_kept"
        super()._took(answer)

    def _carry_out(self, action: Action) -> None:
        if not isinstance(action, _ASKS + _WORDS):
            super()._carry_out(action)
            return
        now_s, limit_s = self.world.now_s, action.by_s - self._offset_s
        self._open[action.id] = action
        if isinstance(action, _WORDS):
            limit_s = min(limit_s, now_s + LIMIT_S)
        reason = f"no answer within {limit_s - now_s:.1f} s"
        at_s = limit_s + self._offset_s
        took_s = limit_s - now_s
        self._later(limit_s, Failed(at_s=at_s, action=action, took_s=took_s, reason=reason, timed_out=True))
        if isinstance(action, _WORDS):
            self._ask_helper(action)
        elif not self.place.ranks.trainer_alive:
            self._fails(action, "connection refused")
        else:
            self._asked[action.id] = action
            after, save = "pause", isinstance(action, TriggerCheckpoint)
            if isinstance(action, TriggerCheckpoint):
                after = action.after.value
            left_s = limit_s - now_s
            self.training.ask(self.place.at, action.id, reason="on_battery", after=after, save=save, deadline_s=left_s)
            self._ended_requests()

    def _fails(self, action: Action, reason: str) -> None:
        at_s = self.world.now_s + 0.1
        self._later(at_s, Failed(at_s=at_s + self._offset_s, action=action, took_s=0.1, reason=reason))

    def _ask_helper(self, action: Action) -> None:
        """Ask the root helper, which outlives this daemon."""
        life, plan, place = self._life, self._plan_of, self.place
        request = {**word_of(action, ups="rack-a", hold=plan.hold), "node": self.slurm.nodes[place.at].name}

        def on_answer(answer: Mapping[str, Any]) -> None:
            now_s = self.world.now_s
            if life != self._life or action.id not in self._open:
                return
            if answer["ok"]:
                at_s = now_s + self._offset_s
                self._later(now_s, Done(at_s=at_s, action=action, took_s=0.1, detail=detail_of(answer)))
            else:
                self._fails(action, str(answer["error"]))
            self._plan()

        self.slurm.say(HelperWord(request, place.at, self._boots, self.world.now_s, on_answer))

    def _ordered(self, action: Action) -> HostAnswer:
        if isinstance(action, LeaveJob):
            if not self.place.ranks.trainer_alive:
                return HostAnswer(after_s=0.1, failure="connection refused")
            self.training.depart(self.place.at)
            return HostAnswer(after_s=0.3)
        phase, now_s = self._state.phase, self.world.now_s
        if isinstance(action, PowerOff) and isinstance(phase, Shutdown) and self.place.host.power is Power.UP:
            self.place.offs.append(Off(now_s, now_s - (phase.latched_s - self._offset_s)))
            self.training.ordered_off(self.place.at)
        return super()._ordered(action)


class JobHostPlay(RackHostPlay):
    """The play of one host: Slurm starts its training, and it plays on until the job does on all hosts."""

    def __init__(self, place: Place, member: Member, slurm: Slurmctld) -> None:
        super().__init__(place, member)
        self.place, self.slurm = place, slurm

    def act(self) -> None:
        """Do what is due now."""
        world, now_s = self.world, self.world.now_s
        if not world.is_on:
            if self._went_s is None:
                self.slurm.off(self.place.at)
            self._while_off()
        elif self._went_s is not None:
            self._power_is_there()
        if world.is_on and now_s >= self._daemon_s:
            self._daemon_s, self._watched_since_s = math.inf, now_s
            self.slurm.on(self.place.at)
            self.decider.boot(was_off_s=self._off_s)
        while world.is_on and self._daemon_s == math.inf and self.decider.next_s <= now_s:
            self.decider.look()

    @property
    def next_s(self) -> float:
        """When it wants to act next."""
        if self._went_s is not None:
            return math.inf
        return self.decider.next_s if self._daemon_s == math.inf else self._daemon_s

    @property
    def runs(self) -> bool:
        """Whether its daemon runs."""
        return self.world.is_on and self._went_s is None and self._daemon_s == math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of one outage. lost_s: of the job, from the first cut until it trains with utility everywhere.

    idle_s: of that, hosts with utility stood because another one was on battery, added up. restarts: by Slurm. offs:
    hosts that were powered off. reported: nodes of which a person had to hear. failed: so often it was submitted again.
    """

    seed: int
    hosts: int
    lost_s: float
    rolled_back_s: float
    idle_s: float
    offs: int
    restarts: int
    reported: int
    failed: int
    violations: tuple[str, ...]


class Play:
    """One outage. plan: drawn, or given. scheduler: whether powerguard knows of Slurm."""

    def __init__(self, plan: Plan, site: Site, *, scheduler: bool = True) -> None:
        self.plan, self.now_s = plan, -WARM_S
        moves = plan.width < len(plan.scenes)  # to a host on which it has saved nothing
        self.training = Training(plan.seed, site, shared=moves, disk_full=plan.disk_full, changed=self._news)
        self.places = [Place(scene, site, training=self.training, at=at) for at, scene in enumerate(plan.scenes)]
        self.training.hosts = [place.ranks for place in self.places]
        names = [f"gpu{at + 1}" for at in range(len(self.places))]
        self.slurm = Slurmctld(
            names,
            Job(id="12", width=plan.width, requeues=plan.requeues),
            faults=plan.faults,
            deeds=plan.deeds,
            on_battery_s=lambda at: self.places[at].on_battery_s,
            starts=self.training.start,
            stops=self.training.stop,
        )
        self.training.ended_badly = self.slurm.fail
        self.members = [Member(place, self.slurm, self.training, plan, scheduler=scheduler) for place in self.places]
        self.chairs = [
            JobHostPlay(place, member, self.slurm) for place, member in zip(self.places, self.members, strict=True)
        ]
        self.idle_s, self.restarts, self.failed = 0.0, 0, 0
        self.violations: list[str] = []
        self._end_s = max(scene.end_s for scene in plan.scenes)
        self._well_s, self._released_s = self._end_s, self.now_s
        last = [self._end_s, *(each.end_s for each in plan.faults), *(each.at_s for each in plan.deeds)]
        self._patience_s = max(last) + PATIENCE_S
        self._looked_s = -math.inf
        self._marked_s: dict[int, float] = {}

    def _news(self) -> None:
        for member in getattr(self, "members", ()):
            member.news()

    # --- Time --------------------------------------------------------------------------------------------------------

    def run(self, *, until_off: bool = False) -> None:
        """Play to the end, or to the first power-off."""
        try:
            self.slurm.pass_time(self.now_s)
            for chair in self.chairs:
                chair.boot()
            while not self._is_over():
                self._advance()
                if until_off and any(place.offs for place in self.places):
                    return
                self._check()
        except InvariantBroken as violation:
            self.violations.append(f"{violation} (at {self.now_s:.1f} s)")

    def _advance(self) -> None:
        to_s = min(
            self.slurm.next_s, self.training.next_s, *(min(each.next_s, each.world.due_s) for each in self.chairs)
        )
        to_s = max(to_s, self.now_s + 1e-6) if to_s < math.inf else self.now_s + 1.0
        run = self.training.run
        if run is not None and run.stands and not run.log.departed:
            powered = sum(self.places[at].utility for at in run.alive)
            self.idle_s += powered * (to_s - self.now_s) if powered < len(run.nodes) else 0.0
        self.training.advance(to_s)
        self.now_s = to_s
        for chair in self.chairs:
            chair.world.advance(to_s)
        for chair in self.chairs:
            chair.act()
        self.slurm.pass_time(to_s)
        self.training.act()

    # --- Invariants --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Ask what must hold at every moment."""
        for at, since_s in self.training.late().items():
            hold(
                since_s <= LEFT_S or self._could_not(at), "no rank trains, hangs or stands on whose job a host has left"
            )
        if not self.training.trains or not any(member.holds for member in self.members):
            self._released_s = self.now_s
        hold(self.now_s - self._released_s <= HELD_S, "no host of a job trains while another one holds it")
        if not self.training.trains or self.now_s < self._end_s:
            self._well_s = max(self._well_s, self.now_s)
        self._check_nodes()
        self._operate()
        hold(self.training.trains or self.now_s <= self._patience_s, "the job trains when utility is back for good")

    def _could_not(self, at: int) -> bool:
        """Say whether a host that left had no daemon to say so."""
        off_s = self.places[at].offs[-1].at_s
        return any(begin_s - 5.0 <= off_s <= begin_s + away_s + 5.0 for begin_s, away_s in self.places[at].scene.kills)

    def _check_nodes(self) -> None:
        """A node that we marked, on a host that is well, is given back or reported."""
        for at, (node, member) in enumerate(zip(self.slurm.nodes, self.members, strict=True)):
            place = self.places[at]
            well = self.chairs[at].runs and member.settled and place.utility and not self._is_in_fault()
            if node.by != OURS or not (node.drain or node.down) or not well or self.now_s < self._end_s:
                self._marked_s[at] = self.now_s
            since_s = self._marked_s[at]
            hold(
                self.now_s - since_s <= REPORTED_S or member.reported,
                "a node that powerguard has marked is given back or reported",
            )

    def _is_in_fault(self) -> bool:
        return any(each.begin_s <= self.now_s < each.end_s for each in self.slurm.faults)

    def _operate(self) -> None:
        """A person looks from time to time once the outage is over: at nodes that are out, and at a job that failed."""
        if self.now_s < max(self._end_s, self._looked_s) + REPAIRED_S or self.training.trains:
            return
        self._looked_s = self.now_s
        for at, node in enumerate(self.slurm.nodes):
            if node.by and self.chairs[at].runs:
                self.slurm.operate(at)
        if self.slurm.job.failed:
            self.failed += 1
            self.restarts += self.slurm.job.restarts
            self.slurm.submit()
        self.slurm.job.held = False

    def _is_over(self) -> bool:
        """Say whether the job trains on, every host has utility, and nothing is owed any more."""
        calm = self.now_s - self._well_s >= CALM_S and all(chair.runs for chair in self.chairs)
        return calm and all(member.settled and member.node is None for member in self.members)

    @property
    def first_off(self) -> Off:
        """The first power-off of all hosts; at inf: none was ordered."""
        return min((off for place in self.places for off in place.offs), default=Off(math.inf, 0.0))

    def played(self) -> Played:
        """Return the result."""
        return Played(
            seed=self.plan.seed,
            hosts=len(self.places),
            lost_s=self.now_s - self.training.progress_s,
            rolled_back_s=self.training.rolled_back_s,
            idle_s=self.idle_s,
            offs=sum(len(place.offs) for place in self.places),
            restarts=self.restarts + self.slurm.job.restarts,
            reported=sum(member.reported for member in self.members),
            failed=self.failed,
            violations=tuple(self.violations),
        )


def play(seed: int, site: Site, *, faults: bool) -> Played:
    """Play one outage, and up to its first power-off once more without the scheduler."""
    plan = draw_plan(seed, site, faults=faults)
    outage = Play(plan, site)
    outage.run()
    if not outage.violations and (why := _later_than_without(plan, site, outage)):
        outage.violations.append(why)
    return outage.played()


def _later_than_without(plan: Plan, site: Site, outage: Play) -> str:
    """Compare the first power-off with that of hosts that know no scheduler, unless others moved the job before.

    From the commit to the order it is the same second. The commit itself may differ by DRIFT: each outcome is one more
    moment at which a host decides, and one that pauses a moment earlier saves energy. After a kill it is not compared:
    each order is one more state in the journal, so the next daemon counts the energy with a newer one.
    """
    first = outage.first_off
    moved = any(deed.kind in ("requeue", "drain", "resume") and deed.at_s <= first.at_s for deed in plan.deeds)
    if first.at_s == math.inf or moved:
        return ""
    without = Play(plan, site, scheduler=False)
    without.run(until_off=True)
    bare = without.first_off
    killed = any(at_s <= first.at_s for scene in plan.scenes for at_s, _ in scene.kills)
    if first.after_s - bare.after_s <= SAME_S and (killed or first.at_s <= bare.at_s * DRIFT + SAME_S):
        return ""
    when = f"at {first.at_s:.1f} s, {first.after_s:.1f} s after the commit"
    return f"{NEVER_LATER} ({when}; without it at {bare.at_s:.1f} s, {bare.after_s:.1f} s after the commit)"


# --- Many outages ---------------------------------------------------------------------------------------------


def play_clusters(site: Site, options: SimulationOptions, *, jobs: int | None, progress: Progress) -> list[Played]:
    """Play all outages of a run of `powerguard simulate --job`."""
    return spread(_played, site, options, jobs=jobs, chunk=_CHUNK, progress=progress)


def _played(site: Site, options: SimulationOptions, seed: int) -> Played:
    return play(seed, site, faults=options.faults)


def report(samples: Sequence[Played], options: SimulationOptions) -> dict[str, Any]:
    """Return the object that `powerguard simulate --job --json` prints."""
    ordered = sorted(samples, key=lambda one: one.seed)
    count = max(1, len(ordered))
    return {
        "schema_version": 1,
        "object": "simulate_job",
        "seed": options.seed,
        "faults": options.faults,
        "site": options.site,
        "outages": len(ordered),
        "hosts": sum(one.hosts for one in ordered),
        "lost_s_mean": round(sum(one.lost_s for one in ordered) / count, 3),
        "rollback_s_mean": round(sum(one.rolled_back_s for one in ordered) / count, 3),
        "idle_s_mean": round(sum(one.idle_s for one in ordered) / count, 3),
        "power_offs": sum(one.offs for one in ordered),
        "requeues": sum(one.restarts for one in ordered),
        "reported": sum(one.reported for one in ordered),
        "submitted_again": sum(one.failed for one in ordered),
        "invariant_violations": [
            {"seed": one.seed, "violation": violation, "reproduce": f"{options.reproduce(one.seed)} --job"}
            for one in ordered
            for violation in one.violations
        ],
    }
