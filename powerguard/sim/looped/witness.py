"""Who watches the daemon: every invariant, and what was seen that broke one.

It looks at three things: what the effectors were told and when, the daemon's state between any two turns of its loop,
and the truth of the world, which the daemon does not know.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from powerguard.core import budget as sums
from powerguard.core.actions import (
    Action,
    Conduct,
    EnsurePolicy,
    PowerOff,
    ResumeTrainer,
    ResumeTraining,
    StopTrainer,
    SyncFilesystems,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model import EmergencyCheckpoint, Holding, OnBattery, Online, Recovery, Shutdown, State
from powerguard.core.policy import Policy
from powerguard.core.table import TABLE, phase_name
from powerguard.daemon.journal import Loaded
from powerguard.sim.looped.hardware import Hardware
from powerguard.sim.looped.mischief import Mischief
from powerguard.sim.looped.way_witness import WayWitness
from powerguard.sim.world.world import World

NEWS_S = 4.0
"""How long the daemon may not know of a change: a poll that waits, an answer on its way, a journal that hangs."""
ORDER_S = 7.5
"""From the latch to the word that powers off: five seconds for the BMC, the bulkhead's grace, a hung disk."""
AGAIN_S = 13.0
"""From a word that was not heard to the next one."""
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


class Witness:
    """Watches one outage over all lives and boots of its daemon.

    ways: who watches the ways back. blind: a life began while the disk of its journal did not answer, so that nobody
    knew of the outage any more.
    """

    def __init__(self, world: World, mischief: Mischief, hardware: Hardware) -> None:
        """Nothing seen yet."""
        self.ways = WayWitness(world, mischief, hardware, self.broke)
        self.violations: list[Violation] = []
        self.latches = 0
        self.holds = 0
        self.blind = False
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
        """For how long utility has really been there, or gone; None where it is the other way round."""
        now_s, since_s = self._world.now_s, math.inf
        for cut in self._world.scene.cuts:
            if cut.begin_s <= now_s < cut.end_s:
                return None if utility else now_s - cut.begin_s
            if cut.end_s <= now_s:
                since_s = now_s - cut.end_s
        return since_s if utility else None

    def _was_told(self, for_s: float) -> bool:
        """Say whether the source has answered throughout the last for_s."""
        now_s = self._world.now_s
        return all(end_s < now_s - for_s or begin_s > now_s for begin_s, end_s in self._world.scene.silences)

    def _is_ordered_off(self, state: State) -> bool:
        return sums.power_off_at_s(state.feed) is not None or self._world.scene.order is not None

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
        # A step ahead is well: what is durable becomes true only then.
        ahead = any(old is type(left.phase) and new is type(phase) for (old, _), new in TABLE.items())
        if type(phase) is not type(left.phase) and not ahead:
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
        """What was lowered or stopped has to be put back, whoever does it."""
        if old.cap is not None and new.cap is None:
            self.broke("cap_forgotten", "GPU power was capped, and after the restart nobody knows it")
        if old.signalled and not new.signalled:
            self.broke("stop_forgotten", "a trainer was stopped, and after the restart nobody knows it")

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
        asked = [other for other in self._asked.values() if isinstance(other, EnsurePolicy | SyncFilesystems)]
        mine = [other for other in asked if other.outage == action.outage]
        for kind in (EnsurePolicy, SyncFilesystems):
            if not any(isinstance(other, kind) for other in mine):
                self.broke("unprepared", f"the power-off was ordered, and no {kind.__name__} ever was")
        had_time = self._world.now_s >= phase.prepare_by_s - self._offset_s - 0.01
        # One of before the latch may still be on its way: the one at the latch has asked the same thing after it.
        newest = {type(other): other for other in mine if self._asked_s[other.id] >= self._life_s}
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
        latest_s = latched_s + max(sums.stop_s(self._policy, action.grade, reserve_s=0.0), within_s)
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
        gone_s, scene = self._since_s(utility=False), self._world.scene
        is_full = scene.charge > 0.95 and self._world.pack.left > 0.55 and scene.cuts[0].end_s > self._world.now_s
        hurried = gone_s is not None and gone_s < DWELL_S and not scene.gauge.silent and not scene.gauge.glitch_rate
        if is_full and hurried and not self._is_ordered_off(state):
            self.broke("paused_in_a_dip", f"training was paused {gone_s:.1f} s after the cut, on a full battery")

    def _signalled(self, action: StopTrainer | TerminateTrainer, state: State) -> None:
        kind, utility_s = type(action).__name__, self._since_s(utility=True)
        if utility_s is not None and utility_s > NEWS_S and self._was_told(utility_s + NEWS_S):
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
        gone_s = self._since_s(utility=False)
        told = gone_s is not None and gone_s > NEWS_S and self._was_told(gone_s + NEWS_S)
        if isinstance(phase, Recovery) and told:
            self.broke("resumed_on_battery", f"{kind} {gone_s:.1f} s after utility had gone again")
        # Later than this nobody repeats any more what a return before that cut had ordered, but to who answers nobody.
        repeated = self._mischief.people or self._world.scene.trainer.mute
        if told and (gone_s or 0.0) > MINUTE_S and isinstance(phase, OnBattery) and not repeated:
            self.broke("resumed_on_battery", f"{kind} after {gone_s:.0f} s on battery")

    def _died_of_itself(self) -> bool:
        """The trainer died at a checkpoint beside training: nobody had told it to stand, and nobody is to start it."""
        asked = [action for action in self._asked.values() if isinstance(action, TriggerCheckpoint)]
        host = self._world.host
        return not host.trainer_alive and bool(asked) and asked[-1].after is Conduct.CONTINUE

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
        if self._was_told(utility_s + NEWS_S):
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
        if not training and not self.blind and not self._died_of_itself():
            self.broke("left_paused", "utility is back, and training still stands")
        if capped:
            self.broke("left_capped", "utility is back, and GPU power is still capped")
        if stopped and not self.blind:
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
