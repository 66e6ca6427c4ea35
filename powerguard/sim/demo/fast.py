"""The demo's story in virtual time: real loop, core and journal; sources and effectors replaced at their ports.

No socket, no process: those live in real time. What is gained: a real UPS's minutes pass in a blink.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from powerguard.core.model.actions import (
    Action,
    Detail,
    EnsurePolicy,
    ResumeTrainer,
    SyncFilesystems,
    TriggerCheckpoint,
)
from powerguard.core.model.events import CheckpointProgress, OutputSource, Reading
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import Inline, Journal, JournalError, Line, read_only, recent
from powerguard.daemon.loop import Loop
from powerguard.daemon.wiring import Ports, assemble
from powerguard.settings.schema import Settings
from powerguard.sim.demo.story import Facts, folder_of
from powerguard.sim.ups import SimUps, UpsBattery
from powerguard.ups.base import Publish, Source

_EPOCH_S = 1_800_000_000.0
_CHECKPOINT_S = 20.0
_STEP_S = 0.5


class FastTrainer:
    """A trainer in virtual time: a step every half second, a checkpoint of 20 s, and a pause that is kept."""

    def __init__(self) -> None:
        self.paused = False
        self.durable_step: int | None = None
        self.loop: Loop | None = None
        self._steps = 0.0
        self._at_s = 0.0

    @property
    def step(self) -> int:
        """Steps done."""
        now_s = asyncio.get_running_loop().time()
        if not self.paused:
            self._steps += (now_s - self._at_s) / _STEP_S
        self._at_s = now_s
        return int(self._steps)

    async def carry_out(self, action: Action) -> Detail:
        """Checkpoint at the paused step, or go on."""
        step = self.step
        if isinstance(action, ResumeTrainer):
            self.paused = False
            return ()
        if not isinstance(action, TriggerCheckpoint):
            return ()
        self.paused = action.after != "continue"
        if self.loop is not None:
            self.loop.submit(
                CheckpointProgress(
                    at_s=self.loop.clock(),
                    trainer=action.trainer,
                    action_id=action.id,
                    stage="writing",
                    eta_s=_CHECKPOINT_S,
                    paused=self.paused,
                    step=step,
                )
            )
        await rest(_CHECKPOINT_S)
        self.durable_step = step
        return (("step", step), ("at_paused_step", self.paused), ("paused", self.paused), ("verified", True))


class FastBmc:
    """A BMC that stores a policy."""

    def __init__(self) -> None:
        self.policy = "last-state"

    async def carry_out(self, action: Action) -> Detail:
        """Set it and read it back."""
        del action
        before, self.policy = self.policy, "always-on"
        return (("policy", self.policy), ("verified", True), ("before", before))


class FastDisks:
    """Filesystems that are always in sync."""

    async def carry_out(self, action: Action) -> Detail:
        """Do nothing, well."""
        del action
        return (("filesystems", 0),)


class FastSource:
    """Reads the simulated UPS once a second, without a network."""

    def __init__(self, ups: SimUps) -> None:
        self._ups = ups
        self._asked = asyncio.Event()

    def poll_now(self) -> None:
        """Read at once."""
        self._asked.set()

    async def run(self, publish: Publish) -> None:
        """Read for ever."""
        while True:
            self._ups.look()
            on_battery = not self._ups.utility
            publish(
                Reading(
                    at_s=asyncio.get_running_loop().time(),
                    ups="demo",
                    source="sim",
                    output_source=OutputSource.BATTERY if on_battery else OutputSource.UTILITY,
                    runtime_s=self._ups.runtime_s,
                    charge_pct=100.0 * self._ups.charge,
                    load_pct=100.0 * self._ups.load,
                    on_battery_s=self._ups.on_battery_s,
                    input_present=self._ups.utility,
                    low_battery=self._ups.low_battery,
                )
            )
            self._asked.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._asked.wait()


class FastStage:
    """The world of `fast`."""

    title = "virtual time: the real loop, core and journal; sources and effectors replaced at their ports"
    real: Sequence[str] = ("the decision (core)", "the loop and the bulkhead", "the journal (SQLite, on disk)")
    replaced: Sequence[str] = ("time", "SNMP, HTTP and IPMI", "the UPS, the trainer, the BMC", "the power-off")
    settle_s, dip_s, hold_s, recharge_s, patience_s = 30.0, 5.0, 60.0, 3600.0, 7200.0
    look_s = 1.0

    def __init__(self, path: Path, ups: SimUps, trainer: FastTrainer, bmc: FastBmc) -> None:
        self.journal = path
        self._ups = ups
        self._trainer = trainer
        self._bmc = bmc
        self._lines: tuple[Line, ...] = ()
        self._left_at_off_s: float | None = None

    def clock(self) -> float:
        """Seconds of virtual time."""
        return asyncio.get_running_loop().time()

    def set_utility(self, present: bool) -> None:  # noqa: FBT001 - it is what is set
        """Pull the plug, or put it back."""
        self._ups.utility = present

    def lines(self) -> Sequence[Line]:
        """Read the journal."""
        try:
            with read_only(self.journal) as db:
                newest = recent(db, 1)
                if newest == self._lines[-1:]:
                    return self._lines
                lines = self._lines = recent(db, 100)
        except JournalError:
            return ()
        if self._left_at_off_s is None and any(line.event == "power_off_accepted" for line in lines):
            self._left_at_off_s = self._ups.left_s
        return lines

    async def facts(self) -> Facts:
        """Ask the parts themselves."""
        return Facts(
            left_s=self._left_at_off_s,
            policy=self._bmc.policy,
            checkpoint_step=self._trainer.durable_step,
            step=self._trainer.step,
            paused=self._trainer.paused,
        )

    def check(self) -> None:
        """Nothing here can die by itself."""


@contextlib.asynccontextmanager
async def fast(keep: Path | None = None) -> AsyncIterator[FastStage]:
    """Build the world in the running (virtual) loop, and take it down again. keep: where the journal is left."""
    clock = asyncio.get_running_loop().time
    trainer, bmc = FastTrainer(), FastBmc()
    # An SRT 6000 by its data sheet, with a battery that has lost a fifth and a gauge that does not know.
    battery = UpsBattery(runtime=((0.50, 540.0), (0.75, 360.0), (1.00, 240.0)), health=0.8, recharge_s=3600.0)
    ups = SimUps(battery, clock=clock, load=lambda: 0.40 if trainer.paused else 0.75, gauge=1.25)
    settings = Settings.model_validate(
        {
            "mode": "rehearse",
            "ups": {
                "demo": {
                    "sources": [{"kind": "snmp", "host": "127.0.0.1", "version": "2c"}],
                    "runtime_table": {50.0: 540.0, 75.0: 360.0, 100.0: 240.0},
                }
            },
            "host": {"kind": "command", "command": ["true"]},
            "bmc": {"kind": "in-band"},
            "budget": {"recharge_h": 1},
            "trainers": [{"name": "toy", "url": "unix:/nowhere/toy.sock", "checkpoint_s": _CHECKPOINT_S}],
            "trainer_sockets": None,
        }
    )

    def sources(_settings: Settings, _clock: object) -> list[tuple[str, str, Source]]:
        return [("demo", "sim", FastSource(ups))]

    disks = FastDisks()
    ports = Ports(
        clock=clock,
        wall=lambda: _EPOCH_S + clock(),
        boot=lambda: "virtual0-boot",
        host=lambda: "demo",
        sources=sources,
        effectors={TriggerCheckpoint: trainer, ResumeTrainer: trainer, EnsurePolicy: bmc, SyncFilesystems: disks},
    )
    with folder_of(keep) as folder:
        path = folder / "journal.sqlite"
        journal = Journal(path, boot_id=ports.boot(), wall=ports.wall, writer=Inline(), reader=Inline())
        daemon = assemble(settings, config=Path("virtual.yaml"), ports=ports, journal=journal)
        trainer.loop = daemon
        # No group of tasks: what ends the story, such as a reader that leaves, must reach the command line as it is.
        running = asyncio.get_running_loop().create_task(daemon.run())
        try:
            yield FastStage(path, ups, trainer, bmc)
        finally:
            daemon.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(60.0):
                    await running
