"""A loop with a world at its ports: a UPS with real physics, a trainer, a BMC and a host, all in virtual time.

Only what our own ports allow is replaced. The loop, the core, the bulkhead and the journal's file are real.
"""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from powerguard.clock import Clock
from powerguard.core.model.actions import (
    Action,
    Detail,
    EnsurePolicy,
    PowerOff,
    ResumeTrainer,
    ResumeTraining,
    SyncFilesystems,
    TriggerCheckpoint,
)
from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.policy import Policy, TrainerPolicy
from powerguard.core.model.state import Online
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import (
    Executor,
    Inline,
    Journal,
    JournalLimits,
    Line,
    OutageRecord,
    history,
    read_only,
    recent,
)
from powerguard.daemon.journal.store import Store
from powerguard.daemon.loop import Components, Loop, Runnable
from powerguard.daemon.systemd import Notifier
from powerguard.effectors.base import Effector, EffectorError
from powerguard.sim.ups import SimUps, UpsBattery
from powerguard.sim.virtual import VirtualLoop
from powerguard.ups.base import Publish, Source

EPOCH_S = 1_800_000_000.0
TABLE = ((0.50, 540.0), (0.75, 360.0), (1.00, 240.0))
CHECKPOINT_S = 20.0
RECHARGE_S = 1200.0
POLICY = Policy(
    boot_id="boot-a-of-the-test",
    ups="rack-a",
    runtime_table=TABLE,
    recharge_s=RECHARGE_S,
    trainers=(TrainerPolicy(name="llm", checkpoint_s=CHECKPOINT_S),),
)


class _EndedLoop(VirtualLoop):
    """Waits for the threads that read secrets as a call: in virtual time nobody would wait for them."""

    async def shutdown_default_executor(self, *_limit_s: float | None) -> None:
        """End them."""
        if self._default_executor is not None:  # type: ignore[attr-defined]
            self._default_executor.shutdown(wait=True)  # type: ignore[attr-defined]


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in a loop whose time passes only when nobody has anything left to do."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        with asyncio.Runner(loop_factory=_EndedLoop) as runner:
            runner.run(test(*args, **kwargs))

    assert not inspect.iscoroutinefunction(run)
    return run


def now_s() -> float:
    """The running loop's time."""
    return asyncio.get_running_loop().time()


async def until(reached: Callable[[], object], limit_s: float = 3600.0) -> None:
    """Let time pass until something is true."""
    async with asyncio.timeout(limit_s):
        while not reached():
            await rest(0.1)


async def over(daemon: Loop, limit_s: float = 6 * 3600.0) -> None:
    """Let time pass until the outage has ended and its record is written."""
    await until(lambda: isinstance(daemon.state.phase, Online), limit_s)
    await rest(1.0)


class Card:
    """Reads the simulated UPS once a second; it can be told to break, to end, to hang, and to swallow its end."""

    def __init__(self, ups: SimUps, clock: Clock, name: str = "card") -> None:
        self.ups = ups
        self.clock = clock
        self.name = name
        self.runs = 0
        self.ended = 0
        self.polled = 0
        self.fault: Exception | None = None
        self.ends = False
        self.hangs = False
        self.stubborn: asyncio.Event | None = None
        self.publish: Publish = lambda _: None
        self._asked = asyncio.Event()

    def poll_now(self) -> None:
        self.polled += 1
        self._asked.set()

    async def run(self, publish: Publish) -> None:
        self.publish = publish
        self.runs += 1
        try:
            while not self.ends:
                if self.fault is not None:
                    raise self.fault
                if self.hangs:
                    await asyncio.Event().wait()
                publish(self.reading())
                self._asked.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._asked.wait()
        finally:
            self.ended += 1
            while self.stubborn is not None and not self.stubborn.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.stubborn.wait()

    def reading(self) -> Reading:
        self.ups.look()
        utility = self.ups.utility
        return Reading(
            at_s=self.clock(),
            ups="rack-a",
            source=self.name,
            output_source=OutputSource.UTILITY if utility else OutputSource.BATTERY,
            runtime_s=self.ups.runtime_s,
            charge_pct=100.0 * self.ups.charge,
            load_pct=100.0 * self.ups.load,
            on_battery_s=self.ups.on_battery_s,
            input_present=utility,
            low_battery=self.ups.low_battery,
        )


class Doer:
    """An effector that takes its time, answers what it is given, and remembers what it was asked.

    error: it fails with that, where it is set. error_detail: what it tells all the same.
    """

    def __init__(self, clock: Clock, *, takes_s: float = 0.0, detail: Detail = (), error: str = "") -> None:
        self.clock = clock
        self.takes_s = takes_s
        self.detail = detail
        self.error = error
        self.error_detail: Detail = ()
        self.asked: list[tuple[float, Action]] = []
        self.done: list[Action] = []
        self.on_start: Callable[[Action], None] = lambda _: None
        self.stubborn: asyncio.Event | None = None

    @property
    def actions(self) -> list[Action]:
        return [action for _, action in self.asked]

    async def carry_out(self, action: Action) -> Detail:
        self.asked.append((self.clock(), action))
        self.on_start(action)
        while self.stubborn is not None and not self.stubborn.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.stubborn.wait()
        if self.takes_s:
            await rest(self.takes_s)
        if self.error:
            raise EffectorError(self.error, detail=self.error_detail)
        self.done.append(action)
        if isinstance(action, TriggerCheckpoint):
            return (("step", 7), ("at_paused_step", True), ("paused", action.after != "continue"), ("verified", True))
        if isinstance(action, PowerOff):
            return (("dry_run", False), ("via", "fifo"), ("deadline_s", action.force_after_s))
        return self.detail


@dataclass
class World:
    """Everything that outlives a daemon: the UPS, the disk and those who carry out. `boots` makes a daemon in it."""

    path: Path
    load: float = 0.75
    paused_load: float = 0.40
    policy: Policy = POLICY
    booted_at_s: float = 0.0
    away: bool = False
    bmc_kind: str = "ipmi-lan"
    limits: JournalLimits | None = None
    store: Store | None = None
    writer: Executor = field(default_factory=Inline)
    notifier: Notifier = field(default_factory=lambda: Notifier.take({}))
    watchers: Mapping[str, Runnable] = field(default_factory=dict)
    reload: Callable[[], Components] | None = None
    cards: Sequence[Card] = ()

    def __post_init__(self) -> None:
        self.ups = SimUps(UpsBattery(runtime=TABLE, recharge_s=RECHARGE_S), clock=now_s, load=self.load_now)
        self.trainer = Doer(self.clock, takes_s=CHECKPOINT_S)
        self.resumer = Doer(self.clock)
        self.bmc = Doer(self.clock, takes_s=0.2, detail=(("policy", "always-on"), ("verified", True)))
        self.disks = Doer(self.clock)
        self.host = Doer(self.clock)
        self.started: list[Action] = []
        for doer in (self.trainer, self.resumer, self.bmc, self.disks, self.host):
            doer.on_start = self.started.append
        self.closed = 0

    def clock(self) -> float:
        """Seconds since this boot."""
        return now_s() - self.booted_at_s

    def load_now(self) -> float:
        """Half the load is gone while training pauses, as its trainer was told."""
        asked = max((at_s for at_s, a in self.trainer.asked if getattr(a, "after", "") != "continue"), default=-1.0)
        resumed = max((at_s for at_s, _ in self.resumer.asked), default=-1.0)
        return self.paused_load if asked > resumed else self.load

    def next_boot(self, name: str = "boot-b-of-the-test") -> None:
        """The host was off and is back: another boot id, and a clock that starts anew."""
        self.booted_at_s = now_s() - 20.0
        self.policy = replace(self.policy, boot_id=name)
        for doer in (self.trainer, self.resumer):
            doer.asked.clear()

    def parts(self, **changes: Any) -> Components:  # noqa: ANN401 - the shape of dataclasses.replace
        """What the settings would make."""
        effectors: dict[type[Action], Effector] = {
            TriggerCheckpoint: self.trainer,
            ResumeTrainer: self.resumer,
            EnsurePolicy: self.bmc,
            SyncFilesystems: self.disks,
            PowerOff: self.host,
            ResumeTraining: self.host,
        }
        self.cards = [Card(self.ups, self.clock)]
        sources: list[tuple[str, str, Source]] = [("rack-a", card.name, card) for card in self.cards]
        parts = Components(
            policy=self.policy,
            host_kind="systemd",
            bmc_kind=self.bmc_kind,
            sources=sources,
            watchers=self.watchers,
            effectors=effectors,
            close=self._close,
        )
        return replace(parts, **changes)

    async def _close(self) -> None:
        self.closed += 1

    def daemon(self, parts: Components | None = None) -> Loop:
        """A daemon of this boot that has not started yet."""
        journal = Journal(
            self.path,
            boot_id=self.policy.boot_id,
            wall=lambda: EPOCH_S + now_s(),
            writer=self.writer,
            reader=Inline(),
            limits=self.limits,
            store=self.store,
        )
        return Loop(
            self.parts() if parts is None else parts,
            journal,
            clock=self.clock,
            wall=lambda: EPOCH_S + now_s(),
            notifier=self.notifier,
            host_name="gpu-01",
            reload=self.reload,
        )

    @contextlib.asynccontextmanager
    async def running(self, parts: Components | None = None, *, kill: bool = False) -> AsyncIterator[Loop]:
        """Run a daemon in this world. kill: it is dropped at the end, without a word; else it is told to stop."""
        daemon = self.daemon(parts)
        task = asyncio.get_running_loop().create_task(daemon.run())
        try:
            await until(lambda: daemon.state.feed.reading is not None or task.done() or self.away, 60.0)
            yield daemon
            assert daemon._stopping or not task.done(), "the daemon ended by itself"
            if not kill:
                daemon.stop()
                async with asyncio.timeout(60.0):
                    await task
        finally:
            task.cancel()
            await asyncio.wait({task})
            daemon.journal._store.close()

    # --- What the file knows -----------------------------------------------------------------------------------------

    def lines(self) -> tuple[Line, ...]:
        with read_only(self.path) as db:
            return recent(db, 1000)

    def notes(self) -> list[str]:
        return [line.event for line in self.lines() if line.kind == "note"]

    def outages(self) -> tuple[OutageRecord, ...]:
        with read_only(self.path) as db:
            return history(db, 20)
