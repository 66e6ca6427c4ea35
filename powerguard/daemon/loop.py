"""The loop: events in, one `step` after another, journal, then actions. It decides nothing.

    while True:
        event  = await queue                      readings, ticks, outcomes, operators
        answer = step(policy, state, event)       pure
        await journal.append(answer)              durable, or half a second and memory
        state  = answer.state
        start(answer.actions)                     each in its own task, behind the bulkhead; outcomes are events

A daemon that is killed between any two of these lines repeats at most actions that may be repeated.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from powerguard.clock import Clock
from powerguard.core.comeback.methods import named
from powerguard.core.comeback.recovery import Stored, reloaded, restore
from powerguard.core.decide.machine import step
from powerguard.core.energy.needs import fold
from powerguard.core.model import events
from powerguard.core.model.actions import Action, ArmPowerOn, CheckPowerOn, EnsurePolicy, Level, Note, PollNow, Reboot
from powerguard.core.model.events import (
    BatteryReplaced,
    CheckpointProgress,
    Done,
    Event,
    Failed,
    ForeignStop,
    OwnLoad,
    Reading,
    SetMaintenance,
    SourceFailed,
    Tick,
    TrainerSeen,
)
from powerguard.core.model.policy import Learned, Policy
from powerguard.core.model.state import OnBattery, Online, Shutdown, State, Step, phase_name
from powerguard.daemon.attempt import AbandonedTasks, attempt, keep_running, rest
from powerguard.daemon.journal import Entry, Journal
from powerguard.daemon.journal.records import Loaded, OutageRecord, Recorder
from powerguard.daemon.log import bind_outage
from powerguard.daemon.notify.messenger import Messenger
from powerguard.daemon.observe.figures import Figures
from powerguard.daemon.observe.port import (
    ActionFigures,
    BmcView,
    LastOutage,
    PowerOnView,
    ReturnView,
    SourceView,
    SourceViews,
    TargetView,
)
from powerguard.daemon.systemd import Notifier
from powerguard.effectors.base import Effector
from powerguard.effectors.bmc.engine import Probe
from powerguard.effectors.host.check import HostCheckEffector
from powerguard.effectors.host.power import HostEffector
from powerguard.effectors.options import ResumeOptions
from powerguard.ups.base import Publish, Source
from powerguard.ups.snmp.traps import TrapCounts

log = structlog.get_logger()

CLOSE_LIMIT_S = 1.0
"""Timeout for pollers to end and connections to be closed. What takes longer is abandoned."""

Runnable = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """The components that the settings make: everything that a reload replaces.

    sources: (ups, source name, poller). watchers: tasks that publish events by themselves, such as the trainers'.
    effectors: the effector of each kind of action. close: releases their resources. traps: the counts of the trap port;
        None without one. resume: what starts training. check: checks the host after a return.
    why_on: asks the BMC, within so many seconds, what powered the host on; None without a BMC. strangers: sockets of
        trainers that other users serve, and why. host: powers the host off; None when another effector does.
    has_no_bmc: the settings state that the host has no BMC, which is then no alarm.
    """

    policy: Policy
    host_kind: str
    bmc_kind: str
    sources: Sequence[tuple[str, str, Source]]
    watchers: Mapping[str, Runnable]
    effectors: Mapping[type[Action], Effector]
    close: Runnable | None = None
    traps: TrapCounts | None = None
    resume: ResumeOptions = field(default_factory=ResumeOptions)
    check: HostCheckEffector | None = None
    why_on: Callable[[float], Awaitable[Probe]] | None = None
    strangers: Callable[[], Sequence[str]] = tuple
    host: HostEffector | None = None
    has_no_bmc: bool = False


async def close(parts: Components) -> None:
    """Release the parts' resources, within CLOSE_LIMIT_S."""
    if parts.close is None:
        return
    try:
        async with asyncio.timeout(CLOSE_LIMIT_S):
            await keep_running("close", parts.close, once=True)
    except TimeoutError:
        log.warning("close_incomplete", because=f"did not end within {CLOSE_LIMIT_S:g} s")


def log_note(note: Note) -> None:
    """Log one line of the story at its level. A number that is named as the line's own words does not replace them."""
    values = {name: value for name, value in note.numbers if name not in ("event", "because")}
    match note.level:
        case Level.ERROR:
            log.error(note.event, because=note.because, **values)
        case Level.WARNING:
            log.warning(note.event, because=note.because, **values)
        case Level.INFO:
            log.info(note.event, because=note.because, **values)
        case Level.DEBUG:
            log.debug(note.event, because=note.because, **values)


TICK_ONLINE_S = 1.0
TICK_OUTAGE_S = 0.25
SNAPSHOT_ONLINE_S = 60.0
"""Interval of writing the state on utility, so that a restart knows how long the daemon was down."""
SNAPSHOT_OUTAGE_S = 5.0
"""On battery what has been used must not be forgotten (docs/decisions/0034)."""
SOURCE_SILENT_S = 60.0
"""A poller without a report for this long hangs, and the watchdog is not fed. The slowest normal case: the first
discovery of a card with timeout_s: 5 takes 55 s at most, a broken source waits for 30 s before its next start."""
LATE_LATCH_S = 60.0
"""How long after the start of the daemon a power-off that it had ordered before may still be read and repeated."""
QUEUE_LIMIT = 1000
STOP_LIMIT_S = 8.0
QUIET_STOP_S = 2.0
"""The same on utility, where only the last steps are still to be written: that of the stop is the last one."""
RETURNS = (EnsurePolicy, ArmPowerOn, Reboot)
"""Actions that arm a power-on method. The daemon waits for them before it exits."""


class Loop:
    """One daemon. It satisfies `port.Daemon`, which is all that status, metrics and the sockets see of it."""

    def __init__(
        self,
        parts: Components,
        journal: Journal,
        *,
        clock: Clock,
        wall: Callable[[], float],
        notifier: Notifier,
        host_name: str = "",
        config_path: str = "",
        reload: Callable[[], Components] | None = None,
        messenger: Messenger | None = None,
    ) -> None:
        """Set up without starting any task. reload: reads the settings again; raises ValueError with the errors."""
        self.messenger = messenger
        self.parts = parts
        self.journal = journal
        self.clock = clock
        self.wall = wall
        self.host_name = host_name
        self.config_path = config_path
        self.settings_ok = True
        self.settings_at_s = clock()
        self.started_at_s = clock()
        self.progressed_at_s = clock()
        self.actions = ActionFigures()
        self.figures = Figures(journal, host_name)
        self.abandoned = AbandonedTasks()
        self.loop_lag_s = 0.0
        self.state = State()
        self._notifier = notifier
        self._reload = reload
        self._queue: asyncio.Queue[Event | Note | Loaded] = asyncio.Queue()
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = False
        self._changed = asyncio.Event()
        self._commands: dict[str | None, SetMaintenance | BatteryReplaced] = {}
        """The newest maintenance (None), and the newest replacement of the battery of each UPS."""
        self._in_flight: dict[str, tuple[asyncio.Task[None], Action]] = {}
        self._settled = asyncio.Event()
        self._turn = asyncio.Lock()
        self._restored = Step(self.state)
        self._sources = SourceViews(clock)
        self._return_watch = ReturnWatch(clock)
        self._recorder = Recorder()
        self._folded: tuple[Policy, Learned, Policy] | None = None
        self._written_at_s = 0.0
        self._fed_at_s = 0.0
        self._lags: list[tuple[float, float]] = []
        self._dropped = 0

    # --- The public view (port.Daemon) -------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The settings, as the core needs them, and what has been measured in place of what they presume."""
        settings, learned = self.parts.policy, self.state.learned
        if self._folded is None or self._folded[0] is not settings or self._folded[1] is not learned:
            self._folded = settings, learned, fold(settings, learned)
        return self._folded[2]

    @property
    def boot_id(self) -> str:
        """Name of this boot."""
        return self.parts.policy.boot_id

    @property
    def host_kind(self) -> str:
        """How the host is powered off."""
        return self.parts.host_kind

    @property
    def power_off_trouble(self) -> str:
        """Why a power-off would fail now."""
        return "" if self.parts.host is None else self.parts.host.trouble

    @property
    def returning(self) -> ReturnView:
        """How the host is, and what starts training."""
        target, command = self.parts.resume.starts
        check = self.parts.check
        return ReturnView(target=target, command=tuple(command), seen=None if check is None else check.last)

    @property
    def strangers(self) -> Sequence[str]:
        """Sockets of trainers that other users serve, and why."""
        return self.parts.strangers()

    @property
    def journal_trouble(self) -> str:
        """Why the journal is not on disk."""
        return self.journal.health.reason

    @property
    def history_lost(self) -> str:
        """Records of earlier runs that could not be read."""
        return self.journal.lost

    @property
    def journal_counters(self) -> Mapping[str, float]:
        """Counters over all lives of this daemon."""
        return self.journal.counters

    @property
    def sources(self) -> Sequence[SourceView]:
        """Every source, as last heard of."""
        return self._sources.all()

    @property
    def bmc(self) -> BmcView | None:
        """The BMC as last read back; None when the settings have none."""
        return self._return_watch.bmc

    @property
    def has_no_bmc(self) -> bool:
        """The settings state that this host has no BMC."""
        return self.parts.has_no_bmc

    @property
    def methods(self) -> Sequence[PowerOnView]:
        """The power-on methods of the settings, as last checked."""
        return self._return_watch.methods

    @property
    def traps(self) -> TrapCounts | None:
        """Counts of the trap port; None without one."""
        return self.parts.traps

    @property
    def message_targets(self) -> Sequence[TargetView]:
        """Targets of messages."""
        return () if self.messenger is None else self.messenger.views()

    def pending_messages(self, most: int) -> Sequence[Mapping[str, object]]:
        """Return the oldest messages that wait."""
        return () if self.messenger is None else self.messenger.pending(most)

    @property
    def messages_trouble(self) -> str:
        """Why the queue of messages is not on disk."""
        return "" if self.messenger is None else self.messenger.trouble

    @property
    def last_outage(self) -> LastOutage | None:
        """The last outage that has ended."""
        return self.figures.last

    @property
    def outages(self) -> Sequence[OutageRecord]:
        """The newest outages that memory holds."""
        return self.journal.outages

    def submit(self, event: Event) -> None:
        """Hand one event to the loop. If it cannot keep up, only events that repeat by themselves are dropped."""
        repeats = isinstance(event, Reading | SourceFailed | OwnLoad | Tick | TrainerSeen | CheckpointProgress)
        if repeats and self._queue.qsize() >= QUEUE_LIMIT:
            self._dropped += 1
            return
        self._queue.put_nowait(event)

    def note(self, note: Note) -> None:
        """Log and journal an event outside of the machine, in its order among the steps."""
        self._queue.put_nowait(note)

    def check_soon(self) -> None:
        """Check the BMC and the power-on methods again at once, and not at the next hour."""
        self._return_watch.check_soon()

    def poll_now(self) -> None:
        """Poll every source at once: the only thing that a hint may cause."""
        for _, _, source in self.parts.sources:
            source.poll_now()

    def publish(self, event: Reading | SourceFailed) -> None:
        """Take a source's report."""
        self._sources.take(event)
        self.submit(event)

    def stop(self) -> None:
        """Stop soon (SIGTERM). Running actions get a moment; the journal is closed last."""
        self._stopping = True
        self._changed.set()

    def reload(self) -> None:
        """Read the settings again soon (SIGHUP)."""
        self._changed.set()

    # --- Running -----------------------------------------------------------------------------------------------------

    async def run(self, services: Mapping[str, Runnable] | None = None) -> None:
        """Run until `stop`. services: further tasks of this daemon (HTTP, the admin socket), kept running."""
        await self._restore()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            # Before any other event is answered: one that overtook the stored state would end its outage.
            await self._apply(None, self._restored)
            loops = [tasks.create_task(self._events()), tasks.create_task(self._ticks())]
            loops += [tasks.create_task(keep_running(name, run)) for name, run in (services or {}).items()]
            loops.append(tasks.create_task(self._watch_return()))
            self._notifier.ready(self._status_line())
            await self._serve_parts()
            await self._settle()
            for task in loops:
                task.cancel()
        await close(self.parts)
        if self.messenger is not None:
            await keep_running("close messages", self.messenger.close, once=True)
        self._notifier.stopping("stopped")
        await self.journal.close()

    async def _restore(self) -> None:
        loaded = await self.journal.load(late=self._queue.put_nowait)
        self.figures.load(await self.journal.history())
        answer = restore(self.policy, self._stored(loaded), self.clock())
        log.info(
            "daemon_started",
            phase=phase_name(answer.state.phase),
            mode=self.policy.mode.value,
            journal="durable" if loaded.durable else "in memory",
            because=loaded.trouble or "start",
        )
        self._restored = answer

    def _stored(self, loaded: Loaded) -> Stored | None:
        if loaded.state is None:
            return None
        return Stored(
            state=loaded.state,
            boot_id=loaded.boot_id,
            at_s=loaded.at_s,
            gap_s=self.wall() - loaded.wall,
            in_flight=tuple(action for action in loaded.in_flight if not isinstance(action, PollNow)),
            whole=not loaded.lost,
        )

    async def _take_late(self, loaded: Loaded) -> None:
        """Continue from a state that could be read only after the start, if nothing was ordered instead of it.

        A power-off of this boot that is older than LATE_LATCH_S is none: a host that runs is not powered off for it.
        """
        stored = self._stored(loaded)
        if stored is None or not isinstance(self.state.phase, Online | OnBattery) or self.state.drill is not None:
            return
        is_latch = isinstance(stored.state.phase, Shutdown) and stored.boot_id == self.boot_id
        if is_latch and self.clock() - self.started_at_s > LATE_LATCH_S:
            log.warning("history_not_taken", because="it ends in a power-off of this boot, and the host runs on")
            return
        self.journal.take(loaded)
        self.figures.load(self.journal.outages)
        log.info("history_read_late", because="the journal could be read only after the start")
        answer = restore(self.policy, stored, self.clock())
        await self._apply(None, answer)
        for command in self._commands.values():  # Entered by an operator meanwhile: the file has none of it.
            again = replace(command, at_s=self.clock())
            await self._apply(again, step(self.policy, self.state, again))

    async def _serve_parts(self) -> None:
        """Run the sources and watchers of the settings; those of new settings in their place, once they are taken.

        All of them, though their settings be the same: a reload also takes a password, a key or a profile that changed.
        """
        self._return_watch.set_parts(self.parts)
        while not self._stopping:
            # Not in the group: one that swallows its cancellation would block our exit without end.
            create_task = asyncio.get_running_loop().create_task
            publish = partial(self._publish_of, self.parts)
            running = [
                create_task(
                    keep_running(f"source {name}", partial(source.run, publish), self._blame(publish, ups, name)),
                    name=f"source {name}",
                )
                for ups, name, source in self.parts.sources
            ]
            running += [create_task(keep_running(name, run), name=name) for name, run in self.parts.watchers.items()]
            self._sources.begin(self.parts.sources)
            old = self.parts
            try:
                await self._wait_for_change()
            finally:
                await self._end(running)
            if self.parts is not old:
                await close(old)

    def _publish_of(self, parts: Components, event: Reading | SourceFailed) -> None:
        """Take a report of a source of these parts. One that outlives its settings no longer speaks for a UPS."""
        if parts is self.parts:
            self.publish(event)

    async def _end(self, running: Sequence[asyncio.Task[None]]) -> None:
        for task in running:
            task.cancel()
        if not running:
            return
        _, left = await asyncio.wait(running, timeout=CLOSE_LIMIT_S)
        for task in left:
            log.error("task_left_behind", task=task.get_name(), because=f"did not end within {CLOSE_LIMIT_S:g} s")
            self.abandoned.take(task)

    def _blame(self, publish: Publish, ups: str, name: str) -> Callable[[str], None]:
        """A poller that breaks is a source that is lost: the core must hear of it."""

        def failed(reason: str) -> None:
            publish(SourceFailed(at_s=self.clock(), ups=ups, source=name, reason=reason, lost=True))

        return failed

    async def _wait_for_change(self) -> None:
        """Wait for a stop, or until new settings are taken. Refused settings have no effect."""
        taken = False
        while not taken:
            await self._changed.wait()
            self._changed.clear()
            # Between two steps: one that is still being written may be an outage, and would undo our change.
            async with self._turn:
                if self._stopping:
                    return
                taken = self._take_new_settings()

    def _take_new_settings(self) -> bool:
        """Read the settings again and apply them. Returns False if they are refused, or the phase forbids it."""
        if not self._is_quiet() or self._reload is None:
            self.settings_ok = False
            log.warning(
                "settings_refused",
                because=f"the phase is {phase_name(self.state.phase)}: settings cannot change in an outage or a drill",
            )
            return False
        self._notifier.reloading()
        old = self.policy
        try:
            self.parts = self._reload()
        except ValueError as error:
            self.settings_ok = False
            log.error("settings_refused", because=str(error), kept="the settings so far")  # noqa: TRY400 - reported in full
        else:
            self.state = reloaded(old, self.policy, self.state, self.clock())
            self.settings_ok = True
            self.settings_at_s = self.clock()
            self._return_watch.set_parts(self.parts)
            self.check_soon()
            log.info("settings_reloaded", mode=self.policy.mode.value)
        self._notifier.ready(self._status_line())
        return self.settings_ok

    async def _events(self) -> None:
        while True:
            event = await self._queue.get()
            async with self._turn:
                if isinstance(event, Loaded):
                    await self._take_late(event)
                elif isinstance(event, Note):
                    await self._apply(None, Step(self.state, notes=(event,)))
                else:
                    if isinstance(event, SetMaintenance | BatteryReplaced):
                        self._commands[getattr(event, "ups", None)] = event
                    await self._apply(event, step(self.policy, self.state, event))
            self.progressed_at_s = self.clock()
            self._feed_watchdog()
            if self._queue.empty():
                self._settled.set()

    async def _apply(self, event: Event | None, answer: Step) -> None:
        """Write the step, then apply it, then start its actions. Always in this order."""
        old = self.state
        if isinstance(event, Done | Failed):
            self._in_flight.pop(event.action.id, None)
            self.actions.count(event)
            self._return_watch.enter(event)
        actions = tuple(action for action in answer.actions if not isinstance(action, PollNow))
        at_s = self.clock() if event is None else event.at_s
        self._recorder.hear(event, at_s, old, answer.state, self.parts.policy)
        if self._is_worth_writing(event, answer, actions):
            self._written_at_s = self.clock()
            self.figures.note(self, answer)
            entry = Entry(
                at_s=at_s,
                state=answer.state,
                event=event,
                actions=actions,
                notes=answer.notes,
                outcome=self.figures.outcome(answer),
                figures=self.figures.of_outage(answer),
                heard=self._recorder.take(hurry=bool(actions)),
            )
            await self.journal.append(entry)
        self.state = answer.state
        self._log_story(old, answer)
        for action in answer.actions:
            self._start(action)
        if answer.notes and self.messenger is not None:
            phases = (answer.state.phase, old.phase)
            outage = next((phase.outage.id for phase in phases if not isinstance(phase, Online)), "")
            self.messenger.hear(answer.notes, old, outage, self.parts.policy.mode.value)

    def _is_worth_writing(self, event: Event | None, answer: Step, actions: tuple[Action, ...]) -> bool:
        if actions or answer.notes or event is None or type(answer.state.phase) is not type(self.state.phase):
            return True
        if isinstance(event, ForeignStop):
            return True  # Without it the next boot would take this end for a loss of power.
        if isinstance(event, Done | Failed):
            # Without its outcome an action would be repeated after a restart.
            return not isinstance(event.action, PollNow)
        every_s = SNAPSHOT_ONLINE_S if isinstance(answer.state.phase, Online) else SNAPSHOT_OUTAGE_S
        return self.clock() - self._written_at_s >= every_s

    def _log_story(self, old: State, answer: Step) -> None:
        """Log the story, one line for each note, all under the outage's id."""
        phases = (answer.state.phase, old.phase)
        outage = next((phase.outage.id for phase in phases if not isinstance(phase, Online)), None)
        bind_outage(outage)
        for note in answer.notes:
            log_note(note)
        if isinstance(answer.state.phase, Online):
            bind_outage(None)
        if type(answer.state.phase) is not type(old.phase):
            self._notifier.status(self._status_line())

    def _start(self, action: Action) -> None:
        if isinstance(action, PollNow):
            for ups, _, source in self.parts.sources:
                if ups == action.ups:
                    source.poll_now()
            return
        if self._tasks is None:
            return
        self._in_flight[action.id] = self._tasks.create_task(self._carry_out(action)), action

    async def _carry_out(self, action: Action) -> None:
        self.submit(await self._attempt(action))

    async def _attempt(self, action: Action) -> Done | Failed:
        effector = self.parts.effectors.get(type(action))
        if effector is None:
            reason = f"no effector carries out {type(action).__name__}: the settings have none"
            return Failed(at_s=self.clock(), action=action, took_s=0.0, reason=reason)
        return await attempt(effector, action, clock=self.clock, abandoned=self.abandoned)

    async def _ticks(self) -> None:
        while True:
            every_s = TICK_ONLINE_S if isinstance(self.state.phase, Online) else TICK_OUTAGE_S
            due_s = self.clock() + every_s
            await rest(every_s)
            now_s = self.clock()
            self._lags = [(at_s, lag_s) for at_s, lag_s in self._lags if now_s - at_s < 60.0]
            self._lags.append((now_s, max(0.0, now_s - due_s)))
            self.loop_lag_s = max(lag_s for _, lag_s in self._lags)
            self.submit(Tick(at_s=now_s))

    def _feed_watchdog(self) -> None:
        """Feed it only for progress: after an event, and while every poller still reports."""
        every_s = self._notifier.watchdog_every_s
        now_s = self.clock()
        if every_s is None or now_s - self._fed_at_s < every_s:
            return
        if silent := self._sources.silent(SOURCE_SILENT_S):
            log.error("poller_hung", source=silent, because=f"no report for {SOURCE_SILENT_S:.0f} s")
            return
        if self._notifier.watchdog():  # else again after the next event: half the limit later, systemd would kill us
            self._fed_at_s = now_s

    async def _watch_return(self) -> None:
        async def ask(action: Action) -> Done | Failed:
            outcome = await self._attempt(action)
            self.actions.count(outcome)
            return outcome

        await self._return_watch.run(
            ask,
            can=lambda kind: kind in self.parts.effectors,
            is_quiet=lambda: isinstance(self.state.phase, Online),
            boot_id=self.boot_id,
            limit_s=2 * self.policy.bmc_limit_s,
        )

    def stop_for_signal(self, *, host_stopping: bool) -> None:
        """Record that the daemon has to stop, and on battery arm the power-on methods first; then stop."""
        self.submit(ForeignStop(at_s=self.clock(), host_stopping=host_stopping))
        self.stop()

    async def _settle(self) -> None:
        """Let the last events be answered and short actions end: a power-on method may be just being armed."""
        by_s = self.clock() + (QUIET_STOP_S if self._is_quiet() else STOP_LIMIT_S)
        while self.clock() < by_s:
            waiting = [action for _, action in self._in_flight.values() if isinstance(action, RETURNS)]
            undoing = self.state.drill is not None and isinstance(self.state.phase, Online)
            if self._queue.empty() and not self._turn.locked() and not waiting and not undoing:
                break
            self._settled.clear()
            try:
                async with asyncio.timeout(0.1):
                    await self._settled.wait()
            except TimeoutError:
                continue
        for task, _ in self._in_flight.values():
            # Without an outcome in the journal it is ordered again by the next daemon of this boot.
            task.cancel()
        log.info("daemon_stopped", phase=phase_name(self.state.phase), dropped=self._dropped)

    def _is_quiet(self) -> bool:
        return isinstance(self.state.phase, Online) and self.state.drill is None

    def _status_line(self) -> str:
        mode = "" if self.policy.powers_off else f" ({self.policy.mode})"
        return f"{phase_name(self.state.phase)}{mode}"


# --- Would this host come back? -------------------------------------------------------------------------------------

CHECK_S = 3600.0
RETRY_S = 60.0
POLICY_LIMIT_S = 20.0
"""Timeout for a check of the BMC's policy without an outage: old boards take 10 s for a login over Redfish."""


class ReturnWatch:
    """Status of the power-on methods, and the duty to check them: at start, after a reload or an outage, and hourly.

    A method that did not answer well is checked again after a minute, then ever less often: a BMC that was busy at the
    boot, or hung, must not leave the host without a power-on method until the next request.

    bmc: None when the settings have none. methods: those of the settings, in their order.
    """

    def __init__(self, clock: Clock) -> None:
        """Know nothing yet."""
        self.bmc: BmcView | None = None
        self.methods: tuple[PowerOnView, ...] = ()
        self._clock = clock
        self._kind = "none"
        self._asked = asyncio.Event()
        self._checks = 0

    def set_parts(self, parts: Components) -> None:
        """Take the methods of the settings; forget the results of all others."""
        self._kind = parts.bmc_kind
        if self.bmc is None or self.bmc.kind != self._kind:
            self.bmc = None if self._kind == "none" else BmcView(kind=self._kind)
        known = {(view.method, view.ups): view for view in self.methods}
        self.methods = tuple(
            known.get(each) or PowerOnView(method=each[0], ups=each[1]) for each in named(parts.policy)
        )

    def check_soon(self) -> None:
        """Check again at once, because the methods have changed; during a check, once more after it."""
        self._asked.set()

    def enter(self, outcome: Done | Failed) -> None:
        """Enter the outcome of an order about the return; other actions are ignored."""
        match outcome.action:
            case EnsurePolicy() if self._kind != "none":
                self._enter_policy(outcome)
            case CheckPowerOn(method=method, ups=ups) | ArmPowerOn(method=method, ups=ups):
                self.methods = tuple(
                    entered(view, outcome) if (view.method, view.ups) == (method, ups) else view
                    for view in self.methods
                )
            case _:
                pass

    def _enter_policy(self, outcome: Done | Failed) -> None:
        known = self.bmc or BmcView(kind=self._kind)
        found = events.policy_ensured(outcome)
        if isinstance(outcome, Failed):
            if found.policy is not None:  # it was read, and is not the one that is wanted
                known = replace(known, policy=found.policy, checked_at_s=outcome.at_s, power_watts=None)
            self.bmc = replace(known, verified=False, error=outcome.reason)
            return
        self.bmc = replace(
            known,
            policy=found.policy,
            verified=found.verified,
            checked_at_s=outcome.at_s,
            error="",
            power_watts=found.power_watts,
        )

    async def run(
        self,
        attempt: Callable[[Action], Awaitable[Done | Failed]],
        *,
        can: Callable[[type[Action]], bool],
        is_quiet: Callable[[], bool],
        boot_id: str,
        limit_s: float,
    ) -> None:
        """Check periodically. can: an effector exists. is_quiet: no outage checks anyway. limit_s: for one method."""
        failures = 0
        while True:
            self._asked.clear()
            rest_s = RETRY_S  # in an outage; what it has changed is checked soon after its end
            if is_quiet():
                self._checks += 1
                now_s = self._clock()
                by_s = now_s + limit_s
                name = f"{boot_id[:8]}-{{}}-{self._checks}"
                actions: list[Action] = []
                if self._kind != "none":
                    actions.append(EnsurePolicy(id=name.format("policy"), by_s=now_s + POLICY_LIMIT_S, outage=""))
                for view in self.methods:
                    id_ = name.format(f"{view.method}{view.ups}")
                    actions.append(CheckPowerOn(id=id_, by_s=by_s, method=view.method, ups=view.ups))
                # In parallel: one that hangs does not delay the others.
                async with asyncio.TaskGroup() as tasks:
                    asking = [tasks.create_task(self._ask(attempt, each)) for each in actions if can(type(each))]
                failures = 0 if all(task.result() for task in asking) else failures + 1
                rest_s = RETRY_S * 2.0 ** min(failures - 1, 10) if failures else CHECK_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(rest_s, CHECK_S)):
                    await self._asked.wait()
                    failures = 0

    async def _ask(self, attempt: Callable[[Action], Awaitable[Done | Failed]], action: Action) -> bool:
        outcome = await attempt(action)
        self.enter(outcome)
        if isinstance(action, CheckPowerOn):
            if isinstance(outcome, Failed):
                log.warning("power_on_blocked", because=outcome.reason, method=action.method, ups=action.ups)
        elif isinstance(outcome, Failed):
            log.error("policy_unverified", because=outcome.reason)
        else:
            log_note(Note(event="policy_verified", because="start or hourly", numbers=outcome.detail))
        return isinstance(outcome, Done)


def entered(view: PowerOnView, outcome: Done | Failed) -> PowerOnView:
    """Return the view after a method was checked, or armed. An order that was only recorded says nothing of it."""
    if events.is_recorded(outcome):
        return view
    if isinstance(outcome, Failed):
        return replace(view, ready=False, why=outcome.reason, checked_at_s=outcome.at_s)
    returns = events.power_on_armed(outcome).returns or view.returns
    return replace(view, ready=True, why="", returns=returns, checked_at_s=outcome.at_s)
