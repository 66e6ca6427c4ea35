"""A host and the training on it: what it draws, what it has done, what it answers and when; and where checkpoints lie.

Everything is asked with the time, and answered with how long it takes; `advance` lets time pass. Progress is counted in
seconds of training at full speed.

`Tiers` holds the checkpoints: on the local disk every few minutes, in a second tier every half hour, and what was
ordered. A disk may have no room, so that nothing new becomes durable. What a tier has acknowledged may turn out torn:
then the resume takes the same step from the next tier, else an older one, and what lies between is lost.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from powerguard.core.model.actions import Conduct, Scalar
from powerguard.sim.world.chance import stream, uniform
from powerguard.sim.world.scene import Scene, TrainerFacts
from powerguard.sim.world.site import Site, TrainerSite

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


_TERMINATED_S = 2.0
_NO_SPACE_S = 1.0
_STUCK_TRAINER_SHARE = 0.3


class Power(StrEnum):
    """The host's power state."""

    UP = "up"
    STOPPING = "stopping"
    OFF = "off"
    DARK = "dark"
    """Power was lost under it."""


UP, STOPPING, OFF, DARK = Power
"""By names of their own, for they are asked at every step: Python 3.11 takes long to find a member of an enum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """How an order goes: after after_s it is done with `detail`, or has failed; inf: never answered."""

    after_s: float
    failure: str = ""
    detail: tuple[tuple[str, Scalar], ...] = ()


class Host:
    """The host of a scene, up and in training at at_s."""

    def __init__(self, scene: Scene, site: Site, at_s: float) -> None:
        """Begin in training, as long before the cut as the caller likes."""
        self.power = Power.UP
        self.training = True
        self.paused = False
        self.trainer_alive = True
        self.progress_s = 0.0
        self.rollback_s = 0.0
        self.dirty_at_s: list[float] = []
        self.off_at_s: float | None = None
        self.gone_at_s = 0.0
        """When it was up the last time: off in order, without power, or crashed."""
        self.stop_ends_s = math.inf
        self.capped = False
        self.reboots = self.forced = False
        """Its power-off ends in a reboot; it is forced, as something in it hangs."""
        self.starts = False
        """Training was started, and loads its checkpoint."""
        self.stopped = False
        """Its trainer's processes are stopped by a signal: it does nothing, and does not answer."""
        self.version = 0
        """Changes with everything that may move the next change or the load: callers compare it."""
        self.next_change_s = math.inf
        """When something changes by itself; inf: not before it is asked for something."""
        self.trains_from_s = -math.inf
        """After a boot, training that is started does not run before this."""
        self._scene, self._site = scene, site
        self._load, self._standby_load = site.host.load, site.ups.standby_load
        self._paused_load = self._load * site.host.paused_load
        self._capped_load = self._load * site.host.capped_load
        self._at_s = at_s
        self._changes: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self.tiers = Tiers(scene.trainer, site.trainer)
        self._disk_free_s = at_s
        self._written_step = 0
        """The step of the checkpoint that was begun last."""
        self._checkpoints = stream(scene.seed, "checkpoints")
        self._stops = stream(scene.seed, "stops")
        self._boots = 0
        self._pauses = 0
        """Orders to pause or to go on so far: an older one does not undo a newer one."""
        self._dies = scene.trainer.dies
        self._ended = False
        """Its trainer was ended by a signal: it has to load its checkpoint again."""

    # --- What it is ----------------------------------------------------------------------------------------------

    @property
    def load(self) -> float:
        """Share of the UPS's rating that it draws now."""
        if self.power is OFF or self.power is DARK:
            return self._standby_load
        if not self._draws:
            return self._paused_load
        return self._capped_load if self.capped else self._load

    @property
    def _draws(self) -> bool:
        """Its GPUs draw: they train, or wait for something for ever."""
        facts = self._scene.trainer
        busy = self.training or (self.paused and facts.draws_on)
        return busy and (not self.stopped or facts.spins)

    @property
    def running(self) -> bool:
        """Training gets on."""
        return self.training and not self.stopped

    @property
    def is_deaf(self) -> bool:
        """It does not answer."""
        return self.stopped or self._scene.trainer.mute

    @property
    def step(self) -> int:
        """Training steps done, as the trainer counts them."""
        return 1_000_000 + int(self.progress_s / max(self._site.trainer.step_s, 0.01))

    @property
    def durable_s(self) -> float:
        """Progress that would survive the loss of power now."""
        return self.tiers.durable_s(self.progress_s)

    def advance(self, to_s: float) -> None:
        """Let time pass, to next_change_s at most."""
        if self.running and self.power is UP:
            speed = self._site.host.capped_speed if self.capped else 1.0
            self.progress_s += speed * (to_s - self._at_s)
        self._at_s = to_s
        if to_s < self.next_change_s:
            return
        self.version += 1
        due = sorted(change for change in self._changes if change[0] <= to_s)
        self._changes = [change for change in self._changes if change[0] > to_s]
        self.next_change_s = min((change[0] for change in self._changes), default=math.inf)
        for _, _, change in due:
            change()

    def _later(self, at_s: float, change: Callable[[], None]) -> None:
        self._serial += 1
        boots = self._boots

        def unless_gone() -> None:
            if self._boots == boots:
                change()

        self._changes.append((at_s, self._serial, unless_gone))
        self.next_change_s = min(self.next_change_s, at_s)
        self.version += 1

    # --- What it is asked ----------------------------------------------------------------------------------------

    def checkpoint(self, at_s: float, after: Conduct) -> HostAnswer:
        """Order a checkpoint: during training (CONTINUE), or of the step at which training pauses."""
        if not self._reachable:
            return HostAnswer(after_s=0.1, failure="connection refused")
        if self._dies:
            self._dies = False
            self._die(at_s)
            return HostAnswer(after_s=0.3, failure="connection reset by peer")
        if self.is_deaf:
            return HostAnswer(after_s=math.inf)
        pauses = after is not Conduct.CONTINUE
        spoilt = self._spoilt(at_s, pauses=pauses)
        if spoilt is not None:
            return spoilt
        chance, trainer = self._checkpoints, self._site.trainer
        takes_s = trainer.checkpoint_median_s * chance.lognormvariate(0.0, trainer.checkpoint_spread)
        hung = chance.random() < trainer.hung_share
        begin_s = max(self._pause_at_s(at_s) if pauses else at_s + 0.5, self._disk_free_s)
        if pauses:
            self.pause(at_s)
        elif self.training and trainer.stall_s:
            self.progress_s = max(self.durable_s, self.progress_s - trainer.stall_s)
        if hung:
            return HostAnswer(after_s=math.inf)  # A collective that never ends; the next one is another one.
        ends_s = self._disk_free_s = begin_s + takes_s
        self._written_step = self.step
        begun: list[float] = []
        self._later(begin_s, lambda: begun.append(self.progress_s))
        self._later(ends_s, lambda: None if self.stopped else self._durable(begun[-1]))
        at_paused = pauses and not self._scene.trainer.never_pauses
        return HostAnswer(
            after_s=ends_s - at_s + 0.1,
            detail=(
                ("step", self.step),
                ("at_paused_step", at_paused),
                ("paused", at_paused),
                ("verified", True),
            ),
        )

    def _spoilt(self, at_s: float, *, pauses: bool) -> HostAnswer | None:
        """The answer where this trainer's ranks or disk spoil it, or where it joins what is under way; None: all well.

        Training stands all the same, if it is to: a second try then loses nothing.
        """
        facts = self._scene.trainer
        joins = facts.joins and self._disk_free_s > at_s
        if not (joins or facts.disk_full or facts.rank_lost_s < math.inf):
            return None
        stands_s = self._pause_at_s(at_s) - at_s if pauses else 0.0
        if pauses:
            self.pause(at_s)
        if joins:
            paused = pauses and not facts.never_pauses
            detail = (("step", self._written_step), ("at_paused_step", False), ("paused", paused), ("verified", True))
            return HostAnswer(after_s=self._disk_free_s - at_s + 0.1, detail=detail)
        if facts.disk_full:
            return HostAnswer(after_s=stands_s + _NO_SPACE_S, failure="checkpoint failed: No space left on device")
        return HostAnswer(after_s=stands_s + facts.rank_lost_s, failure="checkpoint failed: rank 3 has fallen silent")

    def pause(self, at_s: float) -> HostAnswer:
        """Order training to stand still at its next step."""
        if not self._reachable:
            return HostAnswer(after_s=0.1, failure="connection refused")
        if self._scene.trainer.never_pauses or self.is_deaf:
            return HostAnswer(after_s=math.inf)
        pause_at_s = self._pause_at_s(at_s)
        self._pauses += 1
        pause_number = self._pauses

        def stand() -> None:
            if pause_number == self._pauses and self.power is Power.UP and self.trainer_alive and not self.stopped:
                self.training, self.paused = False, True

        self._later(pause_at_s, stand)
        return HostAnswer(after_s=pause_at_s - at_s + 0.1)

    def resume(self, at_s: float) -> HostAnswer:
        """Order training to go on."""
        if not self._reachable:
            return HostAnswer(after_s=0.1, failure="connection refused")
        if self.is_deaf:
            return HostAnswer(after_s=math.inf)
        self._pauses += 1
        self._later(at_s + 0.2, self._going_on)
        return HostAnswer(after_s=0.3)

    def cap(self, at_s: float, *, on: bool) -> HostAnswer:
        """Cap GPU power, or lift the cap."""

        def change() -> None:
            self.capped = on

        self._later(at_s + 0.5, change)
        return HostAnswer(after_s=0.6)

    def signal(self, at_s: float, word: str) -> HostAnswer:
        """Have the trainer's processes stopped ("stop"), let go on ("continue") or ended ("terminate")."""
        if word == "continue":
            self._later(at_s + 0.2, self._went_on)
            return HostAnswer(after_s=0.3)
        if not self._reachable:
            return HostAnswer(after_s=0.1, failure="the device does not answer")
        change = self._stand if word == "stop" else self._end
        self._later(at_s + (0.2 if word == "stop" else _TERMINATED_S), change)
        return HostAnswer(after_s=0.3, detail=(("processes", 1),))

    def start_training(self, at_s: float) -> HostAnswer:
        """Start what trains, after a boot or a trainer's death; nothing where it runs."""
        if self.power is not Power.UP:
            return HostAnswer(after_s=0.1, failure="the host is going down")
        self.paused = False
        if not self.trainer_alive or not self.training:
            loads_s = self._site.trainer.restart_s if self._ended else 0.0
            self._later(max(at_s + loads_s, self.trains_from_s), self._begin)
            self.starts = True
        return HostAnswer(after_s=0.5)

    def power_off(self, at_s: float, force_after_s: float) -> HostAnswer:
        """Order the host off; what still runs after force_after_s is cut off hard."""
        site = self._site.host
        if self.power is Power.STOPPING:
            self.stop_ends_s = min(self.stop_ends_s, at_s + force_after_s + site.off_s)
            self._later(self.stop_ends_s, self._off)
            return HostAnswer(after_s=0.1)
        if self.power is not Power.UP:
            return HostAnswer(after_s=math.inf)
        self.power = Power.STOPPING
        chance = self._stops
        takes_s = site.stop_median_s * chance.lognormvariate(0.0, site.stop_spread)
        stuck = chance.random() < site.stop_stuck_share
        stuck_s, by_trainer = uniform(chance, site.stop_stuck_s), chance.random() < _STUCK_TRAINER_SHARE
        takes_s = stuck_s if stuck else min(takes_s, site.stop_stuck_s[0])
        self.forced, self.reboots = takes_s > force_after_s, False
        self.stop_ends_s = at_s + (takes_s if not self.forced else force_after_s + site.off_s)
        if not (stuck and by_trainer):
            self._later(min(at_s + _TERMINATED_S, self.stop_ends_s), self._killed)
        self._later(self.stop_ends_s, self._off)
        return HostAnswer(after_s=0.1, detail=(("via", "simulated"),))

    # --- What happens to it --------------------------------------------------------------------------------------

    def lose_power(self, at_s: float) -> bool:
        """Take its power away. Returns whether it was still up: that is dirty."""
        was_up = self.power in (Power.UP, Power.STOPPING)
        if was_up:
            self.dirty_at_s.append(at_s)
            self.gone_at_s = at_s
            self.power = Power.DARK
            self._gone()
        return was_up

    def switch_on(self, at_s: float) -> None:
        """Switch it on: the firmware begins, no trainer runs yet."""
        self.version += 1
        self.power = Power.UP
        self.training = self.paused = self.capped = self.stopped = self._ended = False
        self.trainer_alive = False
        self._at_s = at_s
        self._disk_free_s = at_s
        self.stop_ends_s = math.inf
        self.off_at_s = None

    @property
    def _reachable(self) -> bool:
        return self.trainer_alive and self.power is Power.UP

    def _stand(self) -> None:
        self.stopped = self.trainer_alive and self.power is Power.UP

    def _went_on(self) -> None:
        self.stopped = False

    def _end(self) -> None:
        if self.power is Power.UP and self.trainer_alive:
            self.trainer_alive = self.training = self.paused = self.stopped = False
            self._ended = True
            self._pauses += 1
            self._lose()

    def _pause_at_s(self, at_s: float) -> float:
        trainer = self._scene.trainer
        return at_s if not self.training else at_s + 0.5 * self._site.trainer.step_s + 0.1 + trainer.pause_late_s

    def _going_on(self) -> None:
        if self.power is Power.UP and self.trainer_alive:
            self.training, self.paused = True, False

    def _begin(self) -> None:
        """What was started trains: a checkpoint has been loaded, the first step is done."""
        self.trainer_alive = self.power is Power.UP
        self.starts = self._ended = False
        self._going_on()

    def _durable(self, progress_s: float) -> None:
        self.tiers.keep(progress_s)

    def _die(self, at_s: float) -> None:
        self.trainer_alive = self.training = self.paused = False
        self._pauses += 1
        self._lose()
        self._later(at_s + self._site.trainer.restart_s, self._reborn)

    def _reborn(self) -> None:
        """The supervisor of the job (systemd, Slurm) starts it again; it knows of no outage."""
        if self.power is Power.UP and not self.trainer_alive:
            self.trainer_alive = self.training = True
            self.paused = False

    def _killed(self) -> None:
        self.training = self.stopped = False  # systemd sends SIGCONT after its SIGTERM

    def _off(self) -> None:
        if self.power is Power.STOPPING and self._at_s >= self.stop_ends_s - 1e-9:
            self.power = Power.OFF
            self.off_at_s = self.gone_at_s = self._at_s
            self._gone()

    def _gone(self) -> None:
        self.training = self.paused = self.trainer_alive = self.stopped = self.starts = False
        self._boots += 1
        self._changes = []
        self.next_change_s = math.inf
        self.version += 1
        self._lose()

    def _lose(self) -> None:
        """What is not durable is lost."""
        from_s = self.tiers.resume(self.progress_s)
        self.rollback_s += self.progress_s - from_s
        self.progress_s = from_s
