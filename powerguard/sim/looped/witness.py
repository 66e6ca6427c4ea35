"""Invariants of the running daemon, over all its lives and boots in one outage; each violation is noted.

`world.invariants` holds for each step of the core. The witnesses look from outside: at the orders to the effectors and
when, at the daemon's state between any two turns of its loop, and at the truth of the world, which the daemon does not
know. `OutageWitness` watches the outage, `PowerOnWitness` the power-on methods: what is armed, when it acts, and which
of them should have brought the host back (one that failed or broke its word in this outage is not expected to).
`Hardware` is the memory of the UPS and the BMC, which outlives every process.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from powerguard.core.comeback import methods as core
from powerguard.core.decide.transitions import TABLE
from powerguard.core.energy import account, budget
from powerguard.core.model.actions import (
    Action,
    ArmPowerOn,
    Conduct,
    EnsurePolicy,
    PowerOff,
    PowerOnMethod,
    ResumeTrainer,
    ResumeTraining,
    StopTrainer,
    SyncFilesystems,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import (
    EmergencyCheckpoint,
    Holding,
    OnBattery,
    Online,
    Phase,
    Recovery,
    Shutdown,
    State,
    phase_name,
)
from powerguard.daemon.journal import Loaded
from powerguard.sim.looped.mischief import Manner, Mischief
from powerguard.sim.world.host import Power
from powerguard.sim.world.world import World

ALWAYS_ON: Final = "always-on"


@dataclass(slots=True)
class Hardware:
    """Hardware state that outlives every daemon.

    policy: as the BMC reports it; found: before the first outage; seen: by the effector, when it was calm. cut_at_s:
    when the output goes off by our order, in the world's time; inf: it was not ordered. sent: so often it was. crashed:
    the host died of itself. foreign: another program has stopped it already.
    """

    folder: Path
    policy: str
    found: str
    seen: str = ""
    cut_at_s: float = math.inf
    sent: int = 0
    crashed: bool = False
    foreign: bool = False

    @classmethod
    def of(cls, world: World, folder: Path) -> "Hardware":
        """Return it as it is before anything happens. folder: of the daemon's notes."""
        if world.scene.returns.bracket:
            world.always_on = False
        policy = ALWAYS_ON if world.always_on or world.scene.returns.lies else "always-off"
        return cls(folder=folder, policy=policy, found=policy)

    def is_ours(self, world: World) -> bool:
        """Say whether the countdown that runs, if any does, was ordered by this host."""
        return world.is_counting and self.cut_at_s < math.inf


_NEWS_S = 4.0
_GUARD_S = 30.0
_HAIR_S = 1.0
_ORDER_S = 5.5
"""An order to cut goes out at the commit; should utility come back sooner, a UPS may refuse it."""
_FLAPS = 3.0
"""A flapping utility must be stable this many times as long."""


class PowerOnWitness:
    """Watches over all lives and boots. broke: takes the name of an invariant, and what was seen.

    blind: a life began while the disk of its journal did not answer, so that no process knew of the outage any more.
    """

    def __init__(self, world: World, mischief: Mischief, hardware: Hardware, broke: Callable[[str, str], None]) -> None:
        """Nothing seen yet."""
        self.rebooted = 0
        self.blind = False
        self._world, self._mischief, self._hardware, self._broke = world, mischief, hardware, broke
        self._policy: Policy | None = None
        self._boot = self._outage = ""
        self._offset_s = 0.0
        self._sent: set[tuple[str, str]] = set()
        self._dirty = len(world.host.dirty_at_s)
        self._losses = world.back.losses
        self._losses_off = 0
        self._latched_s: float | None = None
        self._heard_foreign = self._late_due = self._died_armed = False

    # --- What the daemon does ---------------------------------------------------------------------------------------

    def began(self, policy: Policy, *, boot: str, offset_s: float) -> None:
        """A life begins."""
        if boot != self._boot:
            self._latched_s, self._heard_foreign, self._late_due, self._died_armed = None, False, False, False
        self._policy, self._boot, self._offset_s = policy, boot, offset_s

    def changed(self, what: str) -> None:
        """Something is armed or set that was not."""
        if self._policy is not None and not self._policy.powers_off:
            self._broke("armed_in_dry_run", f"{what} was changed")

    def cut_ordered(self, action: ArmPowerOn) -> None:
        """The effector has the order to cut an output in this outage."""
        self._outage = action.outage

    def sent(self, in_s: float) -> None:
        """The order that cuts an output goes out to the UPS: once in an outage of a boot, whatever is killed."""
        self.changed("the UPS's output")
        self._hardware.sent += 1
        key = (self._boot, self._outage)
        if key in self._sent:
            self._broke("output_sent_twice", f"{self._outage}: off in {in_s:.0f} s")
        self._sent.add(key)

    def unsent(self) -> None:
        """The UPS has refused it."""
        self._hardware.sent -= 1
        self._sent.discard((self._boot, self._outage))

    def powers_off(self, force_after_s: float) -> None:
        """The host gets the order to go off."""
        now_s, cut_s = self._world.now_s, self._hardware.cut_at_s
        soonest_s = now_s + force_after_s + _GUARD_S - _HAIR_S
        if cut_s < soonest_s and not self._is_hindered("host", "bmc", "disks"):
            self._broke("cut_too_early", f"cut at {cut_s:.1f} s, forced off at {now_s + force_after_s:.1f} s")

    def reboots(self) -> None:
        """Its power-off is to end in a reboot."""
        self.rebooted += 1
        self._late_due = False
        order, now_s = self._world.scene.order, self._world.now_s
        unheard = order is not None and (not self._has_answered() or now_s - order.at_s < _NEWS_S)
        if self._world.is_counting and not unheard:
            self._broke("reboot_races_cut", "the UPS counts down, and the host is to come up again")

    def turn(self, state: State) -> None:
        """Look at the daemon between two turns of its loop."""
        phase = state.phase
        if isinstance(phase, Shutdown) and self._latched_s is None:
            self._latched_s = phase.latched_s - self._offset_s

    def died(self, state: State, *, killed: bool) -> None:
        """The process is dead. A process that was killed while the host goes down is not started again in this boot."""
        unanswered = not state.armed or any(each.order is not None for each in state.armed)
        self._died_armed |= killed and unanswered and self._world.host.power is Power.STOPPING

    def terminated(self, state: State, *, foreign: bool) -> None:
        """The daemon gets its SIGTERM, and the host goes down."""
        self._heard_foreign |= foreign
        world, facts, phase = self._world, self._world.scene.returns, state.phase
        policy = self._policy
        is_ours = isinstance(phase, Shutdown) and phase.ordered and world.host.power is Power.STOPPING
        if policy is None or not is_ours or foreign or not policy.late_reboot or self._spoiled("reboot"):
            return
        factor = 1.0 if len(world.scene.cuts) == 1 else _FLAPS
        since_s = self._utility_s()
        stable = since_s is not None and since_s > factor * policy.utility_stable_s + _NEWS_S and self._has_answered()
        cuts = world.scene.order is not None or (self._hardware.sent and facts.declared != "aborts")
        output = self._spoiled("output") or (facts.output and facts.declared != "aborts")
        hung = self._mischief.hung or self._mischief.full or self._mischief.kills
        self._late_due = stable and not cuts and not output and not hung

    # --- What happens -----------------------------------------------------------------------------------------------

    def passed(self) -> None:
        """Time has passed."""
        world, hardware = self._world, self._hardware
        dirty, losses = len(world.host.dirty_at_s), world.back.losses
        if dirty > self._dirty:
            if losses == self._losses:
                if not self._spoiled("watchdog"):
                    self._broke("reset_while_up", "the BMC's watchdog has reset a host that was up")
            elif world.now_s >= hardware.cut_at_s - _HAIR_S and not world.pack.dead and not self._is_hindered("host"):
                self._broke("cut_under_host", "the output was cut by our order, and the host was up")
        self._dirty, self._losses = dirty, losses
        if not world.is_counting:
            hardware.cut_at_s = math.inf

    def off(self) -> None:
        """The host is off, or dark."""
        world, hardware = self._world, self._hardware
        self._losses_off = world.back.losses
        if hardware.is_ours(world) and not self._is_hindered("output", "rtc", "watchdog"):
            soonest_s = min(world.back.rtc_s, world.back.watchdog_s)
            if soonest_s < hardware.cut_at_s:
                self._broke("woken_into_cut", f"woken at {soonest_s:.1f} s, cut at {hardware.cut_at_s:.1f} s")

    def stranded(self) -> None:
        """A person must press the button: was there nothing that should have?"""
        is_armed = self._policy is not None and self._policy.powers_off
        knew_of_stop = is_armed and (self._latched_s is not None or self._heard_foreign)
        if self._world.host.power is not Power.OFF or not knew_of_stop or self._died_armed:
            return
        if not self._world.output and self._world.scene.returns.declared == "unknown":
            return  # Its answer was "unknown", and it keeps its output off: no method switches on without AC.
        expected = self._expected()
        if expected:
            self._broke("stranded", f"the host stays off, and there is {', '.join(expected)}")

    def _expected(self) -> list[str]:
        world, facts = self._world, self._world.scene.returns
        dropped = world.back.losses > self._losses_off
        well = {
            PowerOnMethod.SENTINEL: facts.sentinel and facts.sentinel_works,
            PowerOnMethod.RTC: facts.rtc and facts.rtc_works and not dropped,
            PowerOnMethod.WATCHDOG: facts.watchdog and facts.watchdog_works and not dropped and self._counts_that_far(),
            PowerOnMethod.OUTPUT: facts.output == "cycles" and not dropped and self._was_cut_possible(),
        }
        expected = [str(method) for method, is_well in well.items() if is_well and not self._spoiled(method.value)]
        if dropped and not facts.lies and not world.scene.bmc_refuses and not self._spoiled("bmc"):
            expected.append("the BMC's policy")
        if self._late_due and not dropped:
            expected.append("the late reboot")
        return expected

    def _counts_that_far(self) -> bool:
        """Say whether no battery of this host lasts longer than a watchdog counts."""
        if self._policy is None or not self._policy.runtime_table:
            return False
        load, seconds = self._policy.runtime_table[0]
        return seconds * (load + account.OWN_LOAD) / account.OWN_LOAD + core.WATCHDOG_AFTER_S < core.MOST_WATCHDOG_S

    def _was_cut_possible(self) -> bool:
        """Say whether the UPS could get the order: there was a commit of ours, on battery, and no other countdown.

        Of a UPS that shows none, a daemon that was killed cannot know whether it has the order, and does not repeat it.
        A daemon that was killed at the commit gives the order when it runs again, if there is no utility then.
        """
        scene, latched_s = self._world.scene, self._latched_s
        away_s = sum(kill.away_s for kill in self._mischief.kills)
        if not scene.returns.shows and self._mischief.kills:
            return False
        if latched_s is None or self._heard_foreign or scene.order is not None or scene.returns.declared == "stays_off":
            return False
        return any(cut.begin_s <= latched_s and latched_s + _ORDER_S + away_s < cut.end_s for cut in scene.cuts)

    # --- How it ends ------------------------------------------------------------------------------------------------

    def ended(self, state: State | None) -> None:
        """Everything is over. state: as the journal has it."""
        world, hardware = self._world, self._hardware
        left = [str(method) for method in world.back.armed if not self._lied(method.value)]
        if left:
            self._broke("left_armed", f"training runs, and armed is still {', '.join(left)}")
        if state is not None and state.armed:
            self._broke("armed_remembered", f"{', '.join(str(each.method) for each in state.armed)}")
        is_known = world.scene.returns.bracket and not self.blind and not self._spoiled("bmc")
        if hardware.policy != hardware.found and is_known:
            self._broke("policy_left", f"the BMC's policy was {hardware.found}, and is {hardware.policy}")

    # --- The truth --------------------------------------------------------------------------------------------------

    def _spoiled(self, *peers: str) -> bool:
        return any(name in peers for name, _ in self._mischief.manners)

    def _lied(self, word: str) -> bool:
        return any(name == word and Manner.LIE in manners for name, manners in self._mischief.manners)

    def _is_hindered(self, *peers: str) -> bool:
        """A peer that counts here misbehaves, or the daemon was away."""
        return self._spoiled(*peers) or bool(self._mischief.kills)

    def _utility_s(self) -> float | None:
        now_s, since_s = self._world.now_s, math.inf
        for cut in self._world.scene.cuts:
            if cut.begin_s <= now_s < cut.end_s:
                return None
            if cut.end_s <= now_s:
                since_s = now_s - cut.end_s
        return since_s

    def _has_answered(self) -> bool:
        now_s = self._world.now_s
        return all(end_s < now_s - 2 * _GUARD_S or begin_s > now_s for begin_s, end_s in self._world.scene.silences)


NEWS_S = 4.0
"""How long the daemon may not know of a change: a poll that waits, an answer on its way, a journal that hangs."""
ORDER_S = 7.5
"""Time from the latch to the power-off order: five seconds for the BMC, the bulkhead's grace, a hung disk."""
AGAIN_S = 13.0
"""Time from an order that was not heard to the next one."""
PATIENCE_S = 600.0
"""Nothing that began in the dark pauses training so long after utility is back."""
MINUTE_S = 60.0
DWELL_S = 3.5
"""No battery that is full is so short that a dip of this length must pause training."""
_CLOCK_S = 0.75


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that was broken: its name, and what was seen."""

    name: str
    what: str


def _next_to(phase: type[Phase]) -> set[type[Phase]]:
    """Return the phases that one move reaches."""
    return {new for (old, _), new in TABLE.items() if old is phase}


class OutageWitness:
    """Watches one outage over all lives and boots of its daemon.

    methods: what watches the power-on methods.
    """

    def __init__(self, world: World, mischief: Mischief, hardware: Hardware) -> None:
        """Nothing seen yet."""
        self.methods = PowerOnWitness(world, mischief, hardware, self.broke)
        self.violations: list[Violation] = []
        self.latches = 0
        self.holds = 0
        self._world, self._mischief = world, mischief
        self._policy: Policy | None = None
        self._state: State | None = None
        self._ids: set[str] = set()
        self._all_ids: set[str] = set()
        self._may_repeat: set[str] = set()
        self._boot = ""
        self._life_s = -math.inf
        self._offset_s = 0.0
        self._deadlines: dict[str, float] = {}
        self._off_at_s = -math.inf
        self._off_after_latch = False
        self._asked: dict[str, Action] = {}
        self._asked_s: dict[str, float] = {}
        self._answered: set[str] = set()
        self._left: State | None = None
        self._died_s = -math.inf
        self._phase_since_s = -math.inf

    def broke(self, name: str, what: str) -> None:
        """Note a broken invariant, each once."""
        if all(other.name != name for other in self.violations):
            self.violations.append(Violation(name, f"at {self._world.now_s:.3f} s: {what}"))

    # --- The truth --------------------------------------------------------------------------------------------------

    def _since_s(self, *, utility: bool) -> float | None:
        """How long utility has really been present, or absent; None if it is the other way round."""
        now_s, since_s = self._world.now_s, math.inf
        for cut in self._world.scene.cuts:
            if cut.begin_s <= now_s < cut.end_s:
                return None if utility else now_s - cut.begin_s
            if cut.end_s <= now_s:
                since_s = now_s - cut.end_s
        return since_s if utility else None

    def _has_answered(self, for_s: float) -> bool:
        """Say whether the source has answered throughout the last for_s."""
        now_s = self._world.now_s
        return all(end_s < now_s - for_s or begin_s > now_s for begin_s, end_s in self._world.scene.silences)

    def _is_ordered_off(self, state: State) -> bool:
        return budget.power_off_at_s(state.feed) is not None or self._world.scene.order is not None

    # --- What the daemon does ---------------------------------------------------------------------------------------

    def began(self, policy: Policy, stored: Loaded | None, *, boot: str, offset_s: float) -> None:
        """A life begins. stored: what the one before has left."""
        self._policy, self._state = policy, None
        self._boot, self._offset_s = boot, offset_s
        self._life_s = self._world.now_s
        self._ids = set()
        self._off_after_latch = False
        in_flight = set() if stored is None else {action.id for action in stored.in_flight}
        self._may_repeat = in_flight
        self._found(None if stored is None else stored.state)

    def _found(self, state: State | None) -> None:
        """Compare what the file holds with what the dead process held to be true for more than a moment."""
        left, self._left = self._left, None
        if left is None or isinstance(left.phase, Online) or self._died_s - self._phase_since_s < 1.0:
            return
        phase = None if state is None else state.phase
        # A step ahead is well: what is durable becomes true only then. A save without trainers ends in its step.
        ahead = _next_to(type(left.phase))
        if EmergencyCheckpoint in ahead:
            ahead |= _next_to(EmergencyCheckpoint)
        if type(phase) not in {type(left.phase), *ahead}:
            held = "nothing" if phase is None else phase_name(phase)
            self.broke("journal_behind", f"the daemon died in {phase_name(left.phase)}, its journal holds {held}")

    def restored(self, stored: Loaded | None, state: State) -> None:
        """The daemon has taken up what it found: nothing of it may be lost or changed."""
        if stored is None or stored.state is None:
            return
        old, new = stored.state.phase, state.phase
        if (stored.state.battery.used or 0.0) > (state.battery.used or 0.0) + 1e-9:
            self.broke("used_forgotten", f"{stored.state.battery.used} was used, {state.battery.used} after the start")
        if stored.boot_id != self._boot:
            if isinstance(old, Online) != isinstance(new, Online) or not isinstance(new, Online | Recovery):
                self.broke("boot_misread", f"{phase_name(old)} became {phase_name(new)} at boot")
            elif not isinstance(old, Online) and not isinstance(new, Online) and old.outage.id != new.outage.id:
                self.broke("outage_changed", f"{old.outage.id} became {new.outage.id} at boot")
            return
        if type(old) is not type(new):
            self.broke("phase_forgotten", f"{phase_name(old)} became {phase_name(new)} at a restart")
        elif not isinstance(old, Online) and not isinstance(new, Online):
            if old.outage.id != new.outage.id or old.outage.since_s != new.outage.since_s:
                self.broke("outage_changed", f"{old.outage.id} became {new.outage.id} at a restart")
            if isinstance(old, Shutdown) and isinstance(new, Shutdown):
                was, now = (old.latched_s, old.force_at_s), (new.latched_s, new.force_at_s)
                if was != now:
                    self.broke("deadline_moved", f"latch and deadline {was} became {now} at a restart")
        self._owed(stored.state, state)

    def _owed(self, old: State, new: State) -> None:
        """What was lowered or stopped has to be put back, by whichever program."""
        if old.cap is not None and new.cap is None:
            self.broke("cap_forgotten", "GPU power was capped, and the state after the restart lost it")
        if old.signalled and not new.signalled:
            self.broke("stop_forgotten", "a trainer was stopped, and the state after the restart lost it")

    def heard(self, action: Action, state: State, *, journalled: bool) -> None:
        """An effector was given an order."""
        kind = type(action).__name__
        if not journalled:
            self.broke("action_before_journal", f"{kind} {action.id} started, and the journal does not hold it")
        if action.id in self._ids:
            self.broke("ordered_twice", f"{kind} {action.id} was started twice in one life")
        elif action.id in self._all_ids and action.id not in self._may_repeat:
            self.broke("repeated_after_outcome", f"{kind} {action.id} had its outcome in the journal, and was repeated")
        self._ids.add(action.id)
        self._all_ids.add(action.id)
        self._asked[action.id] = action
        self._asked_s[action.id] = self._world.now_s
        if isinstance(action, PowerOff):
            self._power_off(action, state)
        elif isinstance(action, TriggerCheckpoint) and action.after is not Conduct.CONTINUE:
            self._paused(state)
        elif isinstance(action, StopTrainer | TerminateTrainer):
            self._signalled(action, state)
        elif isinstance(action, ResumeTrainer | ResumeTraining):
            self._resumed(kind, state)

    def answered(self, action: Action) -> None:
        """An effector has ended, in whatever way."""
        self._answered.add(action.id)

    def died(self, state: State) -> None:
        """The process is dead, and its journal was durable: what it held to be true must be found again."""
        self._left, self._died_s = state, self._world.now_s

    def _prepared(self, action: PowerOff, phase: Shutdown) -> None:
        """Before the first word that powers off, the return was armed and the disks were synced, or had their time."""
        orders = [other for other in self._asked.values() if isinstance(other, EnsurePolicy | SyncFilesystems)]
        of_outage = [other for other in orders if other.outage == action.outage]
        for kind in (EnsurePolicy, SyncFilesystems):
            if not any(isinstance(other, kind) for other in of_outage):
                self.broke("unprepared", f"the power-off was ordered, and no {kind.__name__} ever was")
        had_time = self._world.now_s >= phase.prepare_by_s - self._offset_s - 0.01
        # One of before the latch may still be on its way: the one at the latch has asked the same thing after it.
        newest = {type(other): other for other in of_outage if self._asked_s[other.id] >= self._life_s}
        waiting = [kind.__name__ for kind, other in newest.items() if other.id not in self._answered]
        if waiting and not had_time:
            self.broke("power_off_too_early", f"the power-off was ordered before {', '.join(waiting)} had ended")

    def _power_off(self, action: PowerOff, state: State) -> None:
        phase, now_s = state.phase, self._world.now_s
        if not isinstance(phase, Shutdown) or phase.boot_id != self._boot:
            self.broke("power_off_without_latch", f"the power-off was ordered in {phase_name(phase)}")
            return
        deadline_s = now_s + action.force_after_s
        first_s = self._deadlines.setdefault(f"{self._boot}/{action.outage}", deadline_s)
        if deadline_s > max(first_s, now_s) + _CLOCK_S:
            self.broke("deadline_moved", f"forced at {first_s:.1f} s first, then at {deadline_s:.1f} s")
        assert self._policy is not None  # noqa: S101 - a life has begun before it orders anything
        latched_s = phase.latched_s - self._offset_s
        # A bare stop may end in order for as long as the power lasted by the sums of the latch.
        within_s = min(phase.stops_within_s, self._policy.force_after_s)
        latest_s = latched_s + max(budget.stop_s(self._policy, action.grade, reserve_s=0.0), within_s)
        if deadline_s > max(latest_s, now_s + 3.0) + _CLOCK_S:
            self.broke("deadline_late", f"forced at {deadline_s:.1f} s, latched at {latched_s:.1f} s as {action.grade}")
        if not self._off_after_latch and phase.latched_s - self._offset_s >= self._life_s:
            self._prepared(action, phase)
        self._off_at_s = now_s
        self._off_after_latch = True

    def _paused(self, state: State) -> None:
        utility_s = self._since_s(utility=True)
        if utility_s is not None and utility_s > PATIENCE_S and not self._is_ordered_off(state):
            self.broke("paused_on_utility", f"training was paused after {utility_s:.0f} s of utility")
        outage_s, scene = self._since_s(utility=False), self._world.scene
        is_full = scene.charge > 0.95 and self._world.pack.left > 0.55 and scene.cuts[0].end_s > self._world.now_s
        hurried = outage_s is not None and outage_s < DWELL_S and not scene.gauge.silent and not scene.gauge.glitch_rate
        if is_full and hurried and not self._is_ordered_off(state):
            self.broke("paused_in_a_dip", f"training was paused {outage_s:.1f} s after the cut, on a full battery")

    def _signalled(self, action: StopTrainer | TerminateTrainer, state: State) -> None:
        kind, utility_s = type(action).__name__, self._since_s(utility=True)
        if utility_s is not None and utility_s > NEWS_S and self._has_answered(utility_s + NEWS_S):
            self.broke("signalled_on_utility", f"{kind} after {utility_s:.1f} s of utility")
        if not isinstance(state.phase, EmergencyCheckpoint | Holding | Shutdown):
            self.broke("signalled_out_of_turn", f"{kind} in {phase_name(state.phase)}")
        if any(trainer.name == action.trainer and trainer.order is not None for trainer in state.trainers):
            self.broke("signalled_while_it_saves", f"{kind}, and a checkpoint of {action.trainer} is on its way")

    def _resumed(self, kind: str, state: State) -> None:
        phase, now_s = state.phase, self._world.now_s + self._offset_s
        if isinstance(phase, EmergencyCheckpoint | Holding):
            since_s = max(phase.began_s, self._life_s + self._offset_s)
            if now_s - since_s > NEWS_S:
                self.broke("resumed_in_hold", f"{kind} while {phase_name(phase)}")
        outage_s = self._since_s(utility=False)
        knew_of_cut = outage_s is not None and outage_s > NEWS_S and self._has_answered(outage_s + NEWS_S)
        if isinstance(phase, Recovery) and knew_of_cut:
            self.broke("resumed_on_battery", f"{kind} {outage_s:.1f} s after utility had gone again")
        # Later than this no daemon repeats what a return before that cut had ordered, except to a silent peer.
        repeated = self._mischief.people or self._world.scene.trainer.mute
        if knew_of_cut and (outage_s or 0.0) > MINUTE_S and isinstance(phase, OnBattery) and not repeated:
            self.broke("resumed_on_battery", f"{kind} after {outage_s:.0f} s on battery")

    def _died_of_itself(self) -> bool:
        """The trainer died at a checkpoint during training: it had no order to pause, and must not be started."""
        orders = [action for action in self._asked.values() if isinstance(action, TriggerCheckpoint)]
        host = self._world.host
        return not host.trainer_alive and bool(orders) and orders[-1].after is Conduct.CONTINUE

    # --- What the daemon is -----------------------------------------------------------------------------------------

    def turn(self, state: State) -> None:
        """Look at the daemon between two turns of its loop."""
        old, self._state = self._state, state
        phase = state.phase
        if old is None or type(old.phase) is not type(phase):
            self._phase_since_s = self._world.now_s
        if old is not None and type(old.phase) is not type(phase):
            self._moved(old, state)
        if isinstance(phase, Shutdown):
            self._latched(phase)

    def _moved(self, old: State, state: State) -> None:
        before, phase = old.phase, state.phase
        if isinstance(before, Shutdown) and (self._policy is None or self._policy.powers_off):
            self.broke("latch_undone", f"the latch became {phase_name(phase)} in the same boot")
        if isinstance(before, Online) and isinstance(phase, OnBattery | EmergencyCheckpoint):
            utility_s = self._since_s(utility=True)
            if utility_s is not None and utility_s > NEWS_S and not self._is_ordered_off(state):
                self.broke("outage_without_cut", f"{phase_name(phase)}, with utility for {utility_s:.1f} s")
        elif isinstance(before, Recovery) and isinstance(phase, OnBattery | EmergencyCheckpoint):
            pass  # One outage ended and another began within one turn.
        elif not isinstance(before, Online) and not isinstance(phase, Online) and before.outage.id != phase.outage.id:
            self.broke("outage_changed", f"{before.outage.id} became {phase.outage.id}")
        if isinstance(phase, Holding):
            self.holds += 1
        if isinstance(phase, Shutdown):
            self._latch(state)

    def _latch(self, state: State) -> None:
        self.latches += 1
        self._off_after_latch = False
        utility_s = self._since_s(utility=True)
        if utility_s is None or utility_s <= NEWS_S or self._is_ordered_off(state):
            return
        if self._has_answered(utility_s + NEWS_S):
            self.broke("latched_on_utility", f"latched {utility_s:.1f} s after utility was back")

    def _latched(self, phase: Shutdown) -> None:
        now_s = self._world.now_s
        since_s = max(phase.latched_s - self._offset_s, self._life_s)
        if phase.ordered and self._policy is not None and not self._policy.powers_off:
            return  # In dry-run it is ordered once, and no host ends by it.
        if not self._off_after_latch and now_s - since_s > ORDER_S:
            self.broke("power_off_late", f"latched {now_s - since_s:.1f} s ago, and the power-off is not ordered")
        elif self._off_after_latch and not phase.ordered and now_s - max(self._off_at_s, self._life_s) > AGAIN_S:
            self.broke("power_off_not_repeated", "the power-off was not heard, and is not ordered again")

    # --- How it ends ------------------------------------------------------------------------------------------------

    def ended(
        self, *, training: bool, capped: bool, stopped: bool, open_outage: str, in_flight: Sequence[Action]
    ) -> None:
        """Everything is over, and utility is there. in_flight: as the journal has it."""
        if not training and not self.methods.blind and not self._died_of_itself():
            self.broke("left_paused", "utility is back, and training still stands")
        if capped:
            self.broke("left_capped", "utility is back, and GPU power is still capped")
        if stopped and not self.methods.blind:
            self.broke("left_stopped", "utility is back, and a trainer is still stopped by our signal")
        if open_outage:
            self.broke("outage_left_open", f"{open_outage} has no end in the journal")
        mute = self._world.scene.trainer.mute
        left = [
            type(action).__name__
            for action in in_flight
            if action.id in self._ids
            and not (mute and isinstance(action, ResumeTrainer))
            # Ordered as the curtain fell: a UPS that is silent has checkpoints made for an hour.
            and self._world.now_s - self._asked_s.get(action.id, -math.inf) > 1.0
        ]
        if left:
            self.broke("left_running", f"without an outcome: {', '.join(left)}")
