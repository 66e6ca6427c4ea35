"""One process of the daemon in virtual time: from its start until it ends, is killed, or its host dies under it."""

import asyncio
import contextlib
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from powerguard.core.comeback import unseen
from powerguard.core.model.actions import Action, CheckPowerOn, Conduct, EnsurePolicy, ResumeTrainer
from powerguard.core.model.events import Abort, CheckpointNow, Event, SetMaintenance, TrainerSeen
from powerguard.core.model.state import Online, Recovery, Shutdown, State
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import Inline, Journal, Loaded
from powerguard.daemon.log import describe
from powerguard.daemon.loop import Loop
from powerguard.daemon.wiring import Ports, assemble
from powerguard.effectors.gpu.helper import LEASE_S as CAP_LEASE_S
from powerguard.effectors.signals.helper import LEASE_S
from powerguard.settings.schema import Settings
from powerguard.sim.looped.mischief import Kill, Mischief, Moment
from powerguard.sim.looped.ports import SimDisk, SimPolicy, SimSource, SimStore, effectors, ways
from powerguard.sim.looped.witness import Hardware, OutageWitness, PowerOnWitness
from powerguard.sim.virtual import VirtualLoop
from powerguard.sim.world.chance import stream
from powerguard.sim.world.host import HostAnswer, Power
from powerguard.sim.world.world import SOURCE, UPS, World
from powerguard.ups.base import Source

TRAINER = "toy"
EPOCH_S = 1_800_000_000.0
_WATCH_S = 2.0
_TERMINATED_S = 1.0
_LAST_S = 0.5
"""Before the end of the stop: the daemon is the last but the network."""
_FOREIGN_LIMIT_S = 1e9
"""A foreign stop of the host has no deadline."""
_GUARD_S = 30.0
_BURIED_TURNS = 20
_LOAD_S = 2.5
_SETTLED_S = 35.0
"""Utility and phase online for so long: a power cap takes 30 s of it to be lifted."""


class DiedError(BaseException):
    """The process is dead: kill -9."""


class KilledError(BaseException):
    """The host under it has no power, or is off."""


class _Turns(VirtualLoop):
    """Virtual time in step with a world, and a process that can die between any two turns."""

    def __init__(self, life: "Life") -> None:
        """life: whose loop it is."""
        self._life: Life | None = life
        super().__init__(began_s=life.world.now_s + life.offset_s)

    def check(self) -> None:
        """Look whether this process is still there."""
        if self._life is not None:
            super().check()
            self._life.turn()

    def jump(self, seconds: float) -> None:
        """Let the world's time pass with ours."""
        super().jump(seconds)
        if self._life is not None:
            self._life.passed(self.time())

    def bury(self) -> None:
        """Take a dead process's tasks down. None of them can do anything any more."""
        self._life = None
        for _ in range(_BURIED_TURNS):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=60.0))
        self.close()


class Life:
    """See the module. It is what `ports.DaemonLife` wants."""

    def __init__(
        self,
        *,
        world: World,
        mischief: Mischief,
        witness: OutageWitness,
        hardware: Hardware,
        settings: Settings,
        path: Path,
        boot: str,
        offset_s: float,
        wall_error_s: float,
        kill: Kill | None,
        stored: Loaded | None,
        calls: dict[str, int],
        checkpoints: dict[str, tuple[float, HostAnswer]],
        words: list[tuple[float, str]],
        serial: int,
    ) -> None:
        """offset_s: this boot's clock at the first cut. path: of the journal. words: of the operator, still to come."""
        self.world, self.mischief, self.witness, self.hardware = world, mischief, witness, hardware
        self.offset_s, self.calls, self.checkpoints = offset_s, calls, checkpoints
        self.path, self.boot = path, boot
        self.dead = False
        self.daemon: Loop | None = None
        self.starts = world.back.starts
        """How often the host had been switched on when this life began: another number is another boot."""
        self._settings, self._wall_error_s = settings, wall_error_s
        self._kill, self._stored, self._words, self.serial = kill, stored, words, serial
        self._moments: Counter[Moment] = Counter()
        self._initial: State | None = None
        self._looking: sqlite3.Connection | None = None
        # A disk that does not answer at the start: nothing is known, the daemon continues in memory, and reports it.
        self._began_blind = any(begin - _LOAD_S <= world.now_s < end for begin, end in mischief.hung)
        self._aborts_late = mischief.late_abort
        witness.methods.blind |= self._began_blind
        self._crashes = mischief.crash_s is not None and world.now_s < mischief.crash_s
        self._held_s = self._capped_s = world.now_s
        """When the daemon last knew of a trainer that it had stopped, or of a cap: after that the helpers undo it."""

    @property
    def methods(self) -> PowerOnWitness:
        """The observer of the power-on methods."""
        return self.witness.methods

    # --- What happens to it ----------------------------------------------------------------------------------------

    def moment(self, moment: Moment) -> None:
        """Die here, if this is where it was to be. Power-on methods count from the first cut: before, none is armed."""
        if moment is Moment.WAY and self.world.now_s < 0.0:
            return
        self._moments[moment] += 1
        kill = self._kill
        if not self.dead and kill is not None and kill.moment is moment and self._moments[moment] == kill.count:
            self.dead = True
            self.keep_journal()

    def keep_journal(self) -> None:
        """Keep what a process that is killed here leaves on the disk: the page cache outlives it."""
        for suffix in ("", "-wal"):
            file = Path(f"{self.path}{suffix}")
            if file.exists():
                shutil.copyfile(file, f"{self.kept}{suffix}")

    @property
    def kept(self) -> Path:
        """Where the journal lies that the next life finds."""
        return self.path.with_name(f"journal-{self.serial + 1}.sqlite")

    def turn(self) -> None:
        """Between two turns of the loop."""
        self.moment(Moment.TURN)
        if self.dead:
            raise DiedError
        daemon = self.daemon
        if daemon is None:
            return
        state = daemon.state
        if self._initial is not None and state is not self._initial:
            self._initial = None
            if not self._began_blind:
                self.witness.restored(self._stored, state)
        if self._initial is None:
            self.witness.turn(state)
            self.methods.turn(state)
            if isinstance(state.phase, Shutdown) and self._aborts_late:
                self._aborts_late = False
                self.submit(Abort(at_s=daemon.clock(), who="somebody", reason="too late (simulated)"))

    def passed(self, now_s: float) -> None:
        """Time has passed."""
        world, at_s = self.world, now_s - self.offset_s
        crash_s = self.mischief.crash_s
        if self._crashes and crash_s is not None and at_s >= crash_s:
            world.advance(crash_s)
            if world.host.power is Power.UP:
                world.host.lose_power(crash_s)
                world.host.dirty_at_s.pop()  # It was no lack of power.
                self.hardware.crashed = True
        world.advance(at_s)
        self.methods.passed()
        if world.host.power not in (Power.UP, Power.STOPPING) or world.back.starts != self.starts:
            self.dead = True
            self.keep_journal()
            self.methods.off()
            raise KilledError

    # --- What it does ----------------------------------------------------------------------------------------------

    def heard(self, action: Action) -> None:
        """Witness an order; its line must be in the journal by now, if that is durable at all."""
        daemon = self.daemon
        if daemon is None:
            return
        # Asked in daylight, without an order: those are not in the journal.
        is_watch = (isinstance(action, EnsurePolicy) and not action.outage) or (
            isinstance(action, CheckPowerOn) and f"-{action.method}{action.ups}-" in action.id
        )
        journalled = is_watch or not daemon.journal.health.durable or self._is_journalled(action.id)
        if not is_watch:
            self.witness.heard(action, daemon.state, journalled=journalled)

    def answered(self, action: Action) -> None:
        """Witness that an effector has ended, in whatever way."""
        if not self.dead:
            self.witness.answered(action)

    def _is_journalled(self, name: str) -> bool:
        if self._looking is None:
            self._looking = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        return self._looking.execute("SELECT 1 FROM actions WHERE id = ?", (name,)).fetchone() is not None

    def submit(self, event: Event) -> None:
        """Hand the daemon an event."""
        if self.daemon is not None and not self.dead:
            self.daemon.submit(event)

    def wall(self) -> float:
        """Wall time, which may step."""
        at_s = self.world.now_s
        steps_s = sum(by_s for when_s, by_s in self.mischief.wall_steps if when_s <= at_s)
        return EPOCH_S + at_s + self._wall_error_s + steps_s

    def run(self, until_s: float) -> str:
        """Live. Returns how it ended: "finished", "died", "gone", "stopped", "broke"; "late": not over by until_s."""
        loop = _Turns(self)
        try:
            with quiet():
                return loop.run_until_complete(self._main(loop, until_s))
        except (DiedError, KilledError) as end:
            if self.daemon is not None:
                self.methods.died(self.daemon.state, killed=isinstance(end, DiedError))
                if self.daemon.journal.health.durable and not self._began_blind:
                    self.witness.died(self.daemon.state)
            return "died" if isinstance(end, DiedError) else "gone"
        except (ExceptionGroup, RuntimeError) as error:
            self.witness.broke("daemon_broke", describe(error))
            return "broke"
        finally:
            with quiet():
                loop.bury()
            if self._looking is not None:
                self._looking.close()

    async def _main(self, loop: VirtualLoop, until_s: float) -> str:
        store = SimStore(self.path)
        store.life = self
        journal = Journal(
            self.path, boot_id=self.boot, wall=self.wall, writer=SimDisk(self), reader=Inline(), store=store
        )
        chance = stream(self.world.scene.seed, f"answers {self.serial}")

        def sources(_settings: Settings, _clock: object) -> list[tuple[str, str, Source]]:
            return [(UPS, SOURCE, SimSource(self, chance))]

        least_s = self._settings.host.force_after_s + _GUARD_S
        ports = Ports(
            clock=loop.time,
            wall=self.wall,
            boot=lambda: self.boot,
            host=lambda: "sim",
            sources=sources,
            effectors=effectors(self, acts=self._settings.mode != "dry-run"),
            methods=lambda armed: ways(self, boot=self.boot, clock=loop.time, least_s=least_s, armed=armed),
            bmc=lambda options: SimPolicy(self, options),
        )
        daemon = assemble(self._settings, config=Path("virtual.yaml"), ports=ports, journal=journal)
        self._initial = daemon.state
        self.witness.began(daemon.policy, self._stored, boot=self.boot, offset_s=self.offset_s)
        self.methods.began(daemon.policy, boot=self.boot, offset_s=self.offset_s)
        self.daemon = daemon
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(daemon.run())
                doing = (self._watch(), self._talk(daemon), self._stopped(daemon))
                helpers = [tasks.create_task(each) for each in doing]
                how = await self._story(daemon, until_s)
                daemon.stop()
                await running
                for helper in helpers:
                    helper.cancel()
        finally:
            store.close()
        return how

    async def _watch(self) -> None:
        """Report its trainer to the daemon, as its watcher does."""
        while True:
            host, trainer = self.world.host, self.world.scene.trainer
            self.submit(
                TrainerSeen(
                    at_s=self.world.now_s + self.offset_s,
                    trainer=TRAINER,
                    alive=host.trainer_alive and host.power is Power.UP,
                    conduct=Conduct.PAUSE,
                    checkpoint_s=trainer.estimate_s,
                    step=host.step,
                    step_s=self.world.site.trainer.step_s,
                    paused=host.paused,
                    stall_s=self.world.site.trainer.stall_s,
                )
            )
            await rest(_WATCH_S)

    async def _talk(self, daemon: Loop) -> None:
        """Let the operator say what he has to say."""
        while self._words:
            when_s, word = self._words[0]
            await rest(max(0.0, when_s - self.world.now_s) + 0.01)
            self._words.pop(0)
            now_s = daemon.clock()
            match word:
                case "abort":
                    self.submit(Abort(at_s=now_s, who="somebody", reason="simulated"))
                case "maintenance":
                    self.submit(SetMaintenance(at_s=now_s, until_s=now_s + 300.0, reason="simulated", who="somebody"))
                case "checkpoint":
                    self.submit(CheckpointNow(at_s=now_s, who="somebody"))
                case _:
                    daemon.stop_for_signal(host_stopping=False)

    async def _stopped(self, daemon: Loop) -> None:
        """The service manager stops us a moment after the host has begun to go down, or as the last of all."""
        world, host = self.world, self.world.host
        while host.power is Power.UP:
            await rest(0.5)
            if self._is_stopped_by_others(daemon.state):
                self.hardware.foreign = True
                if world.scene.returns.called_off:
                    break
                world.foreign = True
                world.power_off(_FOREIGN_LIMIT_S)
        if world.foreign or host.power is Power.UP or not world.scene.returns.late:
            await rest(_TERMINATED_S)
        while world.scene.returns.late and not world.foreign and world.now_s < host.stop_ends_s - _LAST_S:
            await rest(min(0.25, host.stop_ends_s - _LAST_S - world.now_s))
        self.methods.terminated(daemon.state, foreign=host.power is Power.UP or world.foreign)
        daemon.stop_for_signal(host_stopping=True)

    def _is_stopped_by_others(self, state: State) -> bool:
        """Say whether another program stops the host now: once in an outage, on battery and before us."""
        world = self.world
        is_time = world.now_s >= world.scene.returns.foreign_s and not self.hardware.foreign
        return is_time and not world.utility and not isinstance(state.phase, Online | Recovery | Shutdown)

    def _is_busy(self, daemon: Loop) -> bool:
        """Something is under way that will have an end: a trainer that never answers is asked again without end."""
        under_way = [action for _, action in daemon._in_flight.values()]  # noqa: SLF001 - no other place has it
        mute = self.world.scene.trainer.mute
        return any(not (mute and isinstance(action, ResumeTrainer)) for action in under_way)

    def _watch_lease(self, state: State) -> None:
        """The watch of the helpers: a stop, and a cap, that no daemon stands for any more has an end."""
        host, now_s = self.world.host, self.world.now_s
        if state.signalled or not host.stopped:
            self._held_s = now_s
        elif now_s - self._held_s > LEASE_S:
            host.signal(now_s, "continue")
        if state.cap is not None or not host.capped:
            self._capped_s = now_s
        elif now_s - self._capped_s > CAP_LEASE_S:
            host.cap(now_s, on=False)
            self._capped_s = now_s

    async def _story(self, daemon: Loop, until_s: float) -> str:
        """Wait for the end of the story, or of this process."""
        world, quiet_s = self.world, 0.0
        last_s = max([world.scene.end_s, *(when_s for when_s, _ in self._words)])
        while world.now_s < until_s:
            await rest(1.0)
            if daemon._stopping:  # noqa: SLF001 - ended by a signal: no other place has it
                return "stopped"
            state = daemon.state
            self._watch_lease(state)
            calm = world.now_s > last_s and isinstance(state.phase, Online) and state.cap is None
            host = world.host
            calm = calm and not (state.signalled or host.starts or host.stopped or host.capped)
            calm = calm and not state.armed and state.temporary_policy is None and state.start is None
            calm = calm and not unseen.is_open(state)
            calm = calm and not self._is_busy(daemon)
            health = daemon.journal.health
            calm = calm and health.durable and not health.waiting
            quiet_s = quiet_s + 1.0 if calm else 0.0
            if quiet_s >= _SETTLED_S:
                return "finished"
        return "late"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Say nothing: a hundred thousand outages would fill a disk with their log."""
    before: dict[str, Any] = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50), cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)
