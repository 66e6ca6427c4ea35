"""powerguard in the simulated world: the real core, stepped with readings and outcomes as its daemon would.

Simulated in place of the daemon: readings once a second and on request, a journal that keeps what the real one would
have kept when the daemon is killed, and effectors that ask the simulated host (a kind of action that it does not name
is done after 0.1 s). Every step is checked.
"""

import heapq
import json
import math
from dataclasses import replace

from powerguard.core.comeback.recovery import Stored, restore
from powerguard.core.decide.machine import step
from powerguard.core.energy import budget, needs
from powerguard.core.model.actions import (
    Action,
    ArmPowerOn,
    CapPower,
    Conduct,
    ContinueTrainer,
    DisarmPowerOn,
    EnsurePolicy,
    PauseTrainer,
    PollNow,
    PowerOff,
    PowerOnMethod,
    Reboot,
    RestorePower,
    ResumeTrainer,
    ResumeTraining,
    StopTrainer,
    SyncFilesystems,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import (
    Abort,
    CheckpointProgress,
    Done,
    Event,
    Failed,
    ForeignStop,
    Outcome,
    SourceFailed,
    TrainerSeen,
)
from powerguard.core.model.policy import Drop, FeedPolicy, Health, Need, Policy, TrainerPolicy
from powerguard.core.model.serialisation import from_plain, to_plain
from powerguard.core.model.state import EmergencyCheckpoint, Holding, OnBattery, Online, Recovery, Shutdown, State, Step
from powerguard.sim.world.chance import TWIN, OtherUpses, SecondSource, stream
from powerguard.sim.world.host import STOPPING, HostAnswer, Power
from powerguard.sim.world.invariants import check_restored, check_step, hold
from powerguard.sim.world.scene import Scene
from powerguard.sim.world.site import Site
from powerguard.sim.world.world import SOURCE, UPS, World

TRAINER = "llm"
_OLD_MONTHS = 36
_DRILL_CHECKPOINTS = 5


def policy_of(scene: Scene, site: Site) -> Policy:
    """Return what the settings of such a site say: the data sheet's table, and the battery's date."""
    alone = Policy(
        boot_id="simboot1",
        ups=UPS,
        sources=1 if scene.second is None else 2,
        runtime_table=tuple((load / 100.0, float(seconds)) for load, seconds in sorted(site.ups.runtime_table.items())),
        health=0.6 if scene.age_months > _OLD_MONTHS else 0.75,
        recharge_s=site.ups.recharge_h * 3600.0,
        fsd_delay_s=site.faults.fsd_delay_s[0],
        cap_share=site.host.capped_load if site.drill.cap else None,
        signals=site.host.signals,
        trainers=(TrainerPolicy(name=TRAINER, conduct=Conduct.PAUSE, disk="local"),),
        methods=scene.returns.methods,
        outputs=(UPS,) if scene.returns.output else (),
        ups_off_s=budget.CUT_GUARD_S if scene.returns.output else 0.0,
        late_reboot=scene.returns.late,
    )
    if not scene.surroundings.twin:
        return alone
    feeds = tuple(FeedPolicy(policy=replace(alone, ups=name)) for name in (UPS, TWIN))
    return replace(alone, feeds=feeds, minimum_supplies=scene.surroundings.needed)


def drilled(scene: Scene, site: Site, state: State) -> State:
    """Return the state as a drill on this host would have left it; what it measures, the site file says."""
    host, at_s = site.host, state.battery.at_s
    if site.drill.done:
        health = Health(
            share=scene.measured_health, error=max(site.drill.health_error, 0.01), depth=0.5, at_s=at_s, how="drill"
        )
        chance = stream(scene.seed, "drill checkpoints")
        trainer = site.trainer
        took = tuple(
            trainer.checkpoint_median_s * chance.lognormvariate(0.0, trainer.checkpoint_spread)
            for _ in range(_DRILL_CHECKPOINTS)
        )
        pause = Drop(before=host.load, after=host.load * host.paused_load, at_s=at_s)
        learned = replace(
            state.learned, pauses=((TRAINER, pause),), needs=(Need(of="checkpoint", name=TRAINER, seconds=took),)
        )
        battery = replace(state.battery, model=replace(state.battery.model, health=health), health=health.share)
        state = replace(state, learned=learned, battery=battery)
    if site.drill.cap:
        cap = Drop(before=host.load, after=host.load * host.capped_load, at_s=at_s, speed=host.capped_speed)
        state = replace(state, learned=replace(state.learned, cap=cap))
    return state


POLL_S = 1.0
SNAPSHOT_S = 5.0
"""The journal keeps every answer that has an order or a note, and otherwise the state this often."""
ABORT_S = 3000.0
"""When a person looks why training stands although utility is back: the loads have shown by then what they can."""
_MISSES = 3
_SEEN_S = 30.0
_PROGRESS_S = 1.0
_BOOT_CLOCK_S = 60.0
_BMC_S = 1.2
_SYNC_S = 1.5
_ASK_S = 0.2
_SOONEST_CUT_S = 30.0
"""No output goes off sooner than this after the order: a bare stop takes its seconds, and a guard lies behind it."""
_LAST_S = 0.5
"""Before the end of the stop: the daemon is the last but the network."""
_FOREIGN_LIMIT_S = 1e9
"""A foreign stop of the host has no deadline."""
_NEWS_S = 2.5 * POLL_S


class Guarded:
    """powerguard as a `Decider`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.next_s = world.now_s
        self._policy = policy_of(world.scene, world.site)
        self._state = State()
        self._offset_s = 1000.0
        self._boots = 0
        self._kept = State()
        self._kept_at_s = -math.inf
        self._kept_boot = ""
        self._open: dict[str, Action] = {}
        self._known: dict[str, tuple[float, HostAnswer]] = {}
        self._newest = ""
        """The checkpoint that was ordered last."""
        self._due: list[tuple[float, int, Event]] = []
        self._serial = 0
        self._poll_s = world.now_s
        self._ask_s = math.inf
        self._seen_s = -math.inf
        self._seen = (True, False)
        self._missed = 0
        self._kills = [kill for kill in world.scene.kills if kill[0] > world.now_s]
        self._back_s: float | None = None
        self._stopped = False
        """The daemon got its SIGTERM: the host goes down, and it is the last to go."""
        self._second: SecondSource | None = None
        self._surroundings = OtherUpses(world.scene.surroundings, world.now_s)

    # --- As the engine sees it ---------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """The gate is shut, or has not been asked yet."""
        return isinstance(self._state.phase, Recovery)

    @property
    def settled(self) -> bool:
        """The core is online and has nothing left to undo; after a boot the engine starts training, not the gate."""
        state = self._state
        running = self._back_s is None and state.cap is None and not state.signalled and not state.armed
        is_aborted = isinstance(state.phase, OnBattery) and bool(state.phase.outage.aborted_by)
        return running and (is_aborted or isinstance(state.phase, Online | Recovery))

    def boot(self, *, was_off_s: float | None) -> None:
        """Start the daemon in this boot, from what the journal kept."""
        now_s = self.world.now_s
        self._boots += 1
        self._back_s, self._stopped = None, False
        self._missed = 0
        facts = self.world.scene.second
        self._second = None if facts is None else SecondSource(facts)
        self._surroundings = OtherUpses(self.world.scene.surroundings, now_s)
        if was_off_s is None:
            self._policy = needs.fold(self._policy, self._state.learned)
            answer = restore(self._policy, None, now_s + self._offset_s)
            answer = Step(drilled(self.world.scene, self.world.site, answer.state), answer.actions, answer.notes)
        else:
            stored_at_s = self._kept_at_s + self._offset_s
            self._offset_s = _BOOT_CLOCK_S - now_s
            self._policy = replace(self._policy, boot_id=f"simboot{self._boots}")
            gap_s = now_s - self._kept_at_s + self.world.scene.wall_error_s
            stored = Stored(state=_through_journal(self._kept), boot_id=self._kept_boot, at_s=stored_at_s, gap_s=gap_s)
            answer = restore(self._policy, stored, now_s + self._offset_s)
            check_restored(self._kept, answer.state)
        self._took(answer)
        self._poll_s = now_s
        self._watch()
        self._plan()

    def gone(self) -> None:
        """The host is off: what was in flight is forgotten, what is in the journal is not."""
        self._open.clear()
        self._due.clear()
        self._known.clear()
        self._ask_s = math.inf
        self._kills = [kill for kill in self._kills if kill[0] > self.world.now_s]
        self.next_s = math.inf

    def end(self) -> None:
        """Utility is there and training runs: nothing may be left behind."""
        hold(not self.world.host.capped, "GPU power is restored when the outage is over")
        hold(not self.world.host.stopped, "no trainer is left stopped when the outage is over")
        hold(self.world.back.idle, "no power-on method is left armed when the outage is over")

    def look(self) -> None:
        """Do what is due."""
        now_s = self.world.now_s
        if now_s >= self._sigterm_s:
            self._end_daemon()
            return
        if self._back_s is not None:
            if now_s >= self._back_s:
                self._restart()
            self._plan()
            return
        if self._kills and now_s >= self._kills[0][0]:
            self._kill()
            self._plan()
            return
        while self._due and self._due[0][0] <= now_s:
            _, _, event = heapq.heappop(self._due)
            if not isinstance(event, Outcome) or self._open.pop(event.action.id, None) is not None:
                self._send(event)
        if now_s >= self._ask_s:
            self._ask_s = math.inf
            self._read()
        if now_s >= self._poll_s:
            self._abort()
            self._watch()
            self._read()
            self._poll_s += POLL_S
        self._plan()

    @property
    def _sigterm_s(self) -> float:
        """When the daemon gets its SIGTERM: at the end of a stop in order, or when another program stops the host."""
        world, host = self.world, self.world.host
        if self._stopped or self._back_s is not None:
            return math.inf
        if host.power is STOPPING:
            if host.forced or not world.scene.returns.late:
                return math.inf
            return max(world.now_s, host.stop_ends_s - _LAST_S)
        foreign_s = world.scene.returns.foreign_s
        if foreign_s == math.inf or world.utility or isinstance(self._state.phase, Online | Recovery | Shutdown):
            return math.inf
        return max(world.now_s, foreign_s)

    def _end_daemon(self) -> None:
        world = self.world
        if world.host.power is Power.UP:
            world.foreign = True
            world.power_off(_FOREIGN_LIMIT_S)
        self._read()
        self._send(ForeignStop(at_s=world.now_s + self._offset_s, host_stopping=True))
        self._stopped = True
        self.next_s = math.inf

    def _plan(self) -> None:
        if self._back_s is not None:
            self.next_s = self._back_s
            return
        due_s = self._due[0][0] if self._due else math.inf
        killed_s = self._kills[0][0] if self._kills else math.inf
        wanted_s = min(self._poll_s, self._ask_s, due_s, killed_s, self._sigterm_s)
        self.next_s = max(self.world.now_s, wanted_s)

    # --- The sources -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        world = self.world
        reading = world.reading(self._offset_s)
        if world.answers() and not world.scene.surroundings.is_cut_off(world.now_s):
            self._missed = 0
            self._send(reading)
        else:
            self._missed += 1
            lost = self._missed >= _MISSES
            self._send(SourceFailed(at_s=reading.at_s, ups=UPS, source=SOURCE, reason="no answer", lost=lost))
        reported = None if self._second is None else self._second.report(reading, world.now_s)
        if reported is not None:
            self._send(reported)
        for event in self._surroundings.report(reading, world.now_s):
            self._send(event)

    def _watch(self) -> None:
        """Report the trainer's state when it changes, and from time to time."""
        host, now_s = self.world.host, self.world.now_s
        seen = (host.trainer_alive, host.paused)
        if seen == self._seen and now_s - self._seen_s < _SEEN_S:
            return
        trainer = self.world.site.trainer
        self._seen, self._seen_s = seen, now_s
        self._send(
            TrainerSeen(
                at_s=now_s + self._offset_s,
                trainer=TRAINER,
                alive=host.trainer_alive,
                conduct=Conduct.PAUSE,
                checkpoint_s=self.world.scene.trainer.estimate_s,
                disk="local",
                step=host.step,
                step_s=trainer.step_s,
                paused=host.paused,
                durable_age_s=max(0.0, host.progress_s - host.durable_s),
                stall_s=trainer.stall_s,
            )
        )

    def _abort(self) -> None:
        """Have a person end the outage where a card is gone for good and no load can show that its UPS lives."""
        phase, now_s = self._state.phase, self.world.now_s
        if now_s - self.world.scene.end_s < ABORT_S or not isinstance(phase, EmergencyCheckpoint | Holding):
            return
        watches = (each.watch for each in self._state.upses if each.feed.lost_since_s is not None)
        if any(one.risen for watch in watches if watch is not None for one in watch.others):
            self._send(Abort(at_s=now_s + self._offset_s, who="person"))

    # --- The core ----------------------------------------------------------------------------------------------------

    def _send(self, event: Event) -> None:
        before = self._state
        answer = step(self._policy, before, event)
        check_step(self._policy, before, event, answer)
        self._took(answer)

    def _took(self, answer: Step) -> None:
        """Keep it in the journal where the daemon would, then carry out what is ordered."""
        state = self._state = answer.state
        now_s = self.world.now_s
        if answer.actions or answer.notes or now_s - self._kept_at_s >= SNAPSHOT_S:
            if state.learned is not self._kept.learned:
                self._policy = needs.fold(self._policy, state.learned)
            self._kept, self._kept_at_s, self._kept_boot = state, now_s, self._policy.boot_id
        for action in answer.actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        world = self.world
        if isinstance(action, PollNow):
            self._ask_s = min(self._ask_s, world.now_s + _ASK_S)
            return
        self._open[action.id] = action
        if action.id in self._known:
            # The same id is the same order: who asks again after a restart hears how the first one went.
            ends_s, answer = self._known[action.id]
            answer = replace(answer, after_s=max(0.1, ends_s - world.now_s))
        else:
            answer = self._ordered(action)
            self._known[action.id] = (world.now_s + answer.after_s, answer)
        now_s, limit_s = world.now_s, action.by_s - self._offset_s
        ends_s = now_s + answer.after_s
        if isinstance(action, TriggerCheckpoint):
            self._newest = action.id
            self._progress(action, answer, limit_s)
        if ends_s > limit_s:
            reason = f"no answer within {limit_s - now_s:.1f} s"
            late = Failed(
                at_s=limit_s + self._offset_s, action=action, took_s=limit_s - now_s, reason=reason, timed_out=True
            )
            self._later(limit_s, late)
        elif answer.failure:
            failed = Failed(at_s=ends_s + self._offset_s, action=action, took_s=answer.after_s, reason=answer.failure)
            self._later(ends_s, failed)
        else:
            done = Done(at_s=ends_s + self._offset_s, action=action, took_s=answer.after_s, detail=answer.detail)
            self._later(ends_s, done)

    def _ordered(self, action: Action) -> HostAnswer:
        """Ask the world."""
        world, host = self.world, self.world.host
        now_s = world.now_s
        answer = HostAnswer(after_s=0.1)
        match action:
            case TriggerCheckpoint():
                answer = host.checkpoint(now_s, action.after)
            case PauseTrainer():
                answer = host.pause(now_s)
            case ResumeTrainer():
                answer = host.resume(now_s)
            case CapPower():
                answer = host.cap(now_s, on=True)
            case RestorePower():
                answer = host.cap(now_s, on=False)
            case StopTrainer() | TerminateTrainer() | ContinueTrainer():
                answer = self._signalled(action)
            case ResumeTraining():
                answer = host.start_training(now_s)
            case _:
                answer = self._going_down(action)
        return answer

    def _going_down(self, action: Action) -> HostAnswer:
        """Ask the world for what a power-off, and the way back from it, are made of."""
        world, host = self.world, self.world.host
        answer = HostAnswer(after_s=0.1)
        match action:
            case EnsurePolicy() if world.scene.bmc_refuses:
                answer = HostAnswer(after_s=_BMC_S, failure="the BMC refuses the session")
            case EnsurePolicy():
                world.always_on = not world.scene.returns.lies
                answer = HostAnswer(after_s=_BMC_S, detail=(("policy", "always-on"), ("verified", True)))
            case SyncFilesystems():
                answer = HostAnswer(after_s=_SYNC_S, detail=(("filesystems", 1),))
            case PowerOff():
                answer = world.power_off(action.force_after_s)
            case ArmPowerOn():
                hold(
                    action.method is not PowerOnMethod.OUTPUT or action.in_s > _SOONEST_CUT_S,
                    "no output is cut under its host",
                )
                answer = world.arm(action.method, action.in_s)
            case DisarmPowerOn():
                answer = world.disarm(action.method)
            case Reboot():
                hold(not world.is_counting, "no reboot races a cut")
                host.reboots = host.power is Power.STOPPING
            case _:
                pass
        return answer

    def _signalled(self, action: StopTrainer | TerminateTrainer | ContinueTrainer) -> HostAnswer:
        """Signal the trainer; whether it may be, the world knows better than the core."""
        world = self.world
        if isinstance(action, ContinueTrainer):
            return world.host.signal(world.now_s, "continue")
        hold(self._newest not in self._open, "no trainer is signalled while its checkpoint is in flight")
        began_s = -math.inf
        for cut in world.scene.cuts:
            if cut.end_s <= world.now_s:
                began_s = cut.end_s
        surroundings = world.scene.surroundings
        # A UPS that fell silent with the power is on battery, for a host that needs it, until it answers.
        silences = (
            *world.scene.silences,
            *((surroundings.silent,) if surroundings.twin else ()),
            surroundings.network or (0.0, 0.0),
        )
        unheard = any(begin_s < world.now_s and end_s > began_s for begin_s, end_s in silences)
        known = world.utility and world.now_s - began_s > _NEWS_S and not unheard and self._second is None
        hold(not known, "no trainer is signalled on utility")
        return world.host.signal(world.now_s, "stop" if isinstance(action, StopTrainer) else "terminate")

    def _progress(self, action: TriggerCheckpoint, answer: HostAnswer, limit_s: float) -> None:
        """A trainer says once when it expects to be done; a hung one means it as well."""
        at_s = self.world.now_s + _PROGRESS_S
        if self.world.host.is_deaf or answer.failure or at_s >= min(limit_s, self.world.now_s + answer.after_s):
            return
        expects_s = answer.after_s if answer.after_s < math.inf else self.world.scene.trainer.estimate_s
        progress = CheckpointProgress(
            at_s=at_s + self._offset_s,
            trainer=action.trainer,
            action_id=action.id,
            stage="writing",
            eta_s=max(0.0, expects_s - _PROGRESS_S),
        )
        self._later(at_s, progress)

    def _later(self, at_s: float, event: Event) -> None:
        self._serial += 1
        heapq.heappush(self._due, (at_s, self._serial, event))

    # --- Killed ------------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        """SIGKILL: what the host does goes on; whatever was not in the journal is gone."""
        _, away_s = self._kills.pop(0)
        self._back_s = self.world.now_s + away_s
        self._due.clear()
        self._ask_s = math.inf

    def _restart(self) -> None:
        now_s = self.world.now_s
        self._surroundings = OtherUpses(self.world.scene.surroundings, now_s)
        self._back_s = None
        self._missed = 0
        in_flight = tuple(self._open.values())
        self._open.clear()
        stored = Stored(
            state=_through_journal(self._kept),
            boot_id=self._kept_boot,
            at_s=self._kept_at_s + self._offset_s,
            gap_s=now_s - self._kept_at_s,
            in_flight=in_flight,
        )
        answer = restore(self._policy, stored, now_s + self._offset_s)
        check_restored(self._kept, answer.state)
        self._took(answer)
        self._poll_s = now_s
        self._seen_s = -math.inf


def _through_journal(state: State) -> State:
    """Send a state through the journal's plain form, which must keep it whole."""
    again = from_plain(json.loads(json.dumps(to_plain(state))), State)
    hold(again == state, "the journal keeps every state whole")
    return again
