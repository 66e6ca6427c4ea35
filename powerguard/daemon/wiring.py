"""Dependency wiring: from settings to a running daemon.

First the parts with rules of their own: trap port, network witness, switching a UPS's output off, power-on methods.
Then `build`, which makes sources and effectors (its table says which effector carries out which kind of action),
`assemble` for the loop, `services` for its sockets, and `run`.
"""

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, TypedDict

import structlog

from powerguard.clock import Clock, boot_id, boottime_s
from powerguard.core.comeback import unseen
from powerguard.core.model.actions import (
    Action,
    ArmPowerOn,
    CapPower,
    CheckHost,
    CheckPowerOn,
    ContinueTrainer,
    Detail,
    DisarmPowerOn,
    DrainNode,
    EnsurePolicy,
    LeaveJob,
    LeaveNode,
    PauseTrainer,
    PowerOff,
    PowerOnMethod,
    Reboot,
    RestorePolicy,
    RestorePower,
    ResumeTrainer,
    ResumeTraining,
    ReturnNode,
    SignalJobs,
    StopTrainer,
    SyncFilesystems,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import Event, NetworkSeen, OwnSource
from powerguard.core.model.policy import Mode, Policy
from powerguard.core.model.state import OnBattery, Online, Recovery, Shutdown, State, Supply
from powerguard.daemon import boots
from powerguard.daemon.attempt import rest
from powerguard.daemon.control import admin
from powerguard.daemon.control.admin import TakenError, alone
from powerguard.daemon.control.hints import hint_path, hint_socket
from powerguard.daemon.journal import Journal, Retention
from powerguard.daemon.log import configure, open_scope
from powerguard.daemon.loop import POLICY_LIMIT_S, Components, Loop, Runnable
from powerguard.daemon.notify.messenger import Messenger
from powerguard.daemon.observe import http
from powerguard.daemon.observe.page.updates import Reports
from powerguard.daemon.own_load import Outlets, OwnLoadWatch, Read, gpu_watts
from powerguard.daemon.systemd import Notifier, is_host_stopping
from powerguard.daemon.watchdog_drill import WatchdogDrill
from powerguard.effectors.base import Effector, PowerOnEffector, Turns
from powerguard.effectors.bmc.effector import BmcEffector
from powerguard.effectors.bmc.engine import Refusals
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.gpu.effector import GpuEffector
from powerguard.effectors.host.check import HostCheckEffector
from powerguard.effectors.host.filesystems import SyncEffector
from powerguard.effectors.host.power import HostEffector
from powerguard.effectors.options import BmcOptions
from powerguard.effectors.signals.effector import TRAINER_SOCKETS, SignalEffector, SignalHelper
from powerguard.effectors.slurm.effector import SlurmEffector
from powerguard.effectors.trainer.effector import TrainerEffector
from powerguard.effectors.ups_output import by_nut
from powerguard.effectors.ups_output.effector import Notes, Opening, OutputEffector
from powerguard.options import Secret, SecretError
from powerguard.settings.cautions import secrets_in, unknown_users, warnings
from powerguard.settings.explain import dotted
from powerguard.settings.load import MESSAGES, SettingsError, load
from powerguard.settings.policy import policy as make_policy
from powerguard.settings.schema import Settings, SourceOptions, sender
from powerguard.settings.show import changed
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.base import NamedSource, Source
from powerguard.ups.network import NetworkWatch
from powerguard.ups.nut import connection
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.traps import Card, TrapListener


class _Known(TypedDict):
    """The names by which a trap may identify a card: see `traps.Card`."""

    hosts: tuple[str, ...]
    communities: tuple[Secret, ...]


def trap_names() -> Mapping[str, str]:
    """Return what the profiles call a trap, by its OID. Reads files."""
    names: dict[str, str] = {}
    for profile in load_profiles().ranked():
        for oid, word in profile.traps.items():
            names.setdefault(oid, str(word))
    return names


def trap_listener(
    settings: Settings, sources: Sequence[tuple[str, str, Source]], *, clock: Clock, wall: Callable[[], float]
) -> TrapListener | None:
    """Return the listener of the settings; None if they set no trap port. Does not open it yet.

    sources: (ups, source name, poller), of which a hint polls those of the UPS that it names.
    """
    if settings.traps is None:
        return None

    def poll(ups: str) -> None:
        for name, _, source in sources:
            if name == ups:
                source.poll_now()

    return TrapListener(
        settings.traps,
        cards=[Card(ups=ups, **_known_by(settings, ups)) for ups in dict.fromkeys(ups for ups, _, _ in sources)],
        poll=poll,
        clock=clock,
        wall=wall,
        names=trap_names,
    )


def _known_by(settings: Settings, ups: str) -> _Known:
    cards = [options for options in settings.ups[ups].sources if isinstance(options, SnmpOptions)]
    return {
        "hosts": tuple(options.host for options in cards),
        "communities": tuple(options.community for options in cards if options.community is not None),
    }


def network_watch(settings: Settings, *, publish: Callable[[NetworkSeen], None], clock: Clock) -> NetworkWatch | None:
    """Return the watch of the network to our sources; None if it is off, or every source is on this host."""
    hosts = [options.host for ups in settings.feeding for options in settings.ups[ups].sources]
    away = [host for host in dict.fromkeys(hosts) if not _is_here(host)]
    return NetworkWatch(away, publish=publish, clock=clock) if away and settings.network_witness else None


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


GUARD_S: Final = 30.0
"""The output goes off no sooner than this after the host is powered off hard (docs/decisions/0063)."""


def output_effector(settings: Settings, *, clock: Clock, boot: str, armed: bool) -> OutputEffector:
    """Return it, for the UPSes that this host switches off. armed: False: it only checks."""
    outputs = {name: opening for name in settings.feeding if (opening := _opening(settings, name, clock)) is not None}
    return OutputEffector(
        outputs,
        notes=Notes(Path(settings.journal.path).parent),
        clock=clock,
        boot=boot,
        least_s=max(settings.host.force_after_s, *_longest_stops_s(settings)) + GUARD_S,
        armed=armed,
    )


def _longest_stops_s(settings: Settings) -> list[float]:
    """Return how long the other hosts of each UPS take to stop, by the settings; 0 where it is ours alone."""
    shared = [settings.ups[name].shared for name in settings.feeding]
    return [0.0 if each is None else each.longest_stop_s or 0.0 for each in shared]


def _opening(settings: Settings, name: str, clock: Clock) -> Opening | None:
    """Make it. The modules of SNMP are loaded here, so that a host without it saves memory (ciphers: 6 MB)."""
    wanted = settings.ups[name].output_off
    source = None if wanted is None else sender(settings.ups[name].sources, wanted)
    if wanted is None or source is None:
        return None
    if isinstance(source, NutOptions):
        return by_nut.opening(lambda: connection.opened(source), wanted)
    from powerguard.effectors.ups_output import by_snmp  # noqa: PLC0415 - see above
    from powerguard.ups.snmp.discovery import opened  # noqa: PLC0415 - see above

    return by_snmp.opening(lambda: opened(source, wanted.community), wanted, clock)


def methods_of(
    settings: Settings, *, clock: Clock, wall: Callable[[], float], boot: str, armed: bool
) -> dict[PowerOnMethod, Effector]:
    """Return the effector of each method. armed: False in dry-run: they only check."""
    methods: dict[PowerOnMethod, Effector] = {}
    folder = Path(settings.journal.path).parent
    if outputs_of(settings):
        methods[PowerOnMethod.OUTPUT] = output_effector(settings, clock=clock, boot=boot, armed=armed)
    if settings.rtc.kind == "device":
        from powerguard.effectors.rtc import RtcEffector  # noqa: PLC0415 - likewise

        methods[PowerOnMethod.RTC] = RtcEffector(
            settings.rtc, kept=folder / "rtc-alarm.json", armed=armed, clock=clock, wall=wall
        )
    if settings.sentinel.kind == "http":
        from powerguard.effectors.sentinel.effector import SentinelEffector  # noqa: PLC0415 - likewise

        feeds = tuple(settings.feeding)
        methods[PowerOnMethod.SENTINEL] = SentinelEffector(
            settings.sentinel, feeds=feeds, armed=armed, clock=clock, boot=lambda: boot
        )
    if settings.bmc.watchdog:
        from powerguard.effectors.bmc.watchdog import (  # noqa: PLC0415 - likewise
            DrillFile,
            WatchdogEffector,
        )

        methods[PowerOnMethod.WATCHDOG] = WatchdogEffector(settings.bmc, DrillFile(folder), armed=armed, clock=clock)
    return methods


def outputs_of(settings: Settings) -> tuple[str, ...]:
    """Return the UPSes whose output this host, and no other, switches off."""
    return tuple(name for name in settings.feeding if settings.ups[name].output_off is not None)


def with_methods(
    policy: Policy, settings: Settings, methods: dict[PowerOnMethod, Effector], *, checks_host: bool
) -> Policy:
    """Return the policy with its power-on methods. checks_host: the host is checked after a return."""
    return replace(
        policy,
        methods=tuple(method for method in PowerOnMethod if method in methods),
        outputs=outputs_of(settings),
        late_reboot=settings.host.kind == "systemd" and settings.host.late_reboot,
        checks_host=checks_host,
    )


log = structlog.get_logger()

EX_SETTINGS: Final = 78
"""sysexits.h EX_CONFIG."""
EX_TAKEN: Final = 69
"""sysexits.h EX_UNAVAILABLE."""
SERVE_RETRY_S: Final = 2.0
USERS_RETRY_S: Final = 30.0
JOURNAL_BYTES_PER_OUTAGE: Final = 500_000


class DryRunEffector:
    """Replaces an effector in dry-run: it only records the action."""

    async def carry_out(self, action: Action) -> Detail:
        """Record the action."""
        log.info("dry_run_recorded", action=type(action).__name__, action_id=action.id)
        return (("dry_run", True),)


@dataclass(kw_only=True)
class Ports:
    """The daemon's interfaces to the world; the simulator replaces them.

    sources: makes the pollers. effectors: replaces, by kind of action, the effectors of the settings. methods: makes
    the effectors of the power-on methods, with or without permission to arm. bmc: makes the effector of the BMC's
    policy. refusals: logins that the BMC has refused; they outlive a reload.
    """

    clock: Clock = boottime_s
    wall: Callable[[], float] = time.time  # noqa: TID251 - for the journal and for display
    boot: Callable[[], str] = boot_id
    host: Callable[[], str] = socket.gethostname
    spawn: Spawn = run_child
    sources: Callable[[Settings, Clock], list[tuple[str, str, Source]]] | None = None
    effectors: dict[type[Action], Effector] = field(default_factory=dict)
    methods: Callable[[bool], dict[PowerOnMethod, Effector]] | None = None
    bmc: Callable[[BmcOptions], Effector] | None = None
    refusals: Refusals = field(default_factory=dict)


def _sources(settings: Settings, clock: Clock) -> list[tuple[str, str, Source]]:
    """Make the pollers of the UPSes that feed this host."""
    made: list[tuple[str, str, Source]] = []
    for ups in settings.feeding:
        for options in settings.ups[ups].sources:
            shared = settings.ups[ups].shared
            source = source_of(options, ups, clock, hosts=1 if shared is None else shared.hosts or 1)
            made.append((ups, source.name, source))
    return made


def _with_sources(policy: Policy, sources: Sequence[tuple[str, str, Source]]) -> Policy:
    """Return the policy with the names of the sources of each UPS."""

    def named(one: Policy) -> Policy:
        return replace(one, source_names=tuple(name for ups, name, _ in sources if ups == one.ups))

    feeds = tuple(replace(each, policy=named(each.policy)) for each in policy.feeds)
    return replace(named(policy), feeds=feeds)


def source_of(options: SourceOptions, ups: str, clock: Clock, *, hosts: int = 1) -> NamedSource:
    """Make one poller. A kind's modules are loaded here, so that a host without it saves memory (ciphers: 6 MB).

    hosts: on this UPS, as far as it is known.
    """
    match options:
        case SnmpOptions():
            from powerguard.ups.snmp.source import SnmpSource  # noqa: PLC0415 - see above

            return SnmpSource(options, ups=ups, clock=clock)
        case NutOptions():
            from powerguard.ups.nut.source import SPREAD_S, NutSource  # noqa: PLC0415 - see above

            return NutSource(options, ups=ups, clock=clock, spread_s=SPREAD_S if hosts > 1 else 0.0)
        case ApcupsdOptions():
            from powerguard.ups.apcupsd.source import ApcupsdSource  # noqa: PLC0415 - see above

            return ApcupsdSource(options, ups=ups, clock=clock)


def build(
    settings: Settings,
    ports: Ports,
    publish: Callable[[Event], None],
    *,
    dry_run: bool = False,
    state: Callable[[], State] = State,
    turns: Turns | None = None,
) -> Components:
    """Make the parts of a daemon, without any access yet.

    publish: takes trainers' status. state: the core's present state. turns: those of the parts that these replace,
    whose orders may still be under way.
    """
    if dry_run:
        settings = settings.model_copy(update={"mode": "dry-run"})
    acts = settings.mode != "dry-run"
    today = datetime.fromtimestamp(ports.wall()).astimezone().date()
    policy = make_policy(settings, boot_id=ports.boot(), today=today)
    # A host that is never powered off must not lose its UPS's output, nor be cycled by its BMC.
    methods = _methods(settings, ports, armed=policy.powers_off)
    policy = with_methods(policy, settings, methods, checks_host=CheckHost in ports.effectors or ports.sources is None)
    trainers = _trainers(settings, ports, publish, state)
    bmc_effector, keeper = _bmc(settings, ports, acts=acts)
    host = HostEffector(settings.host, mode=policy.mode, resume=settings.resume, spawn=ports.spawn, clock=ports.clock)
    hold: Effector = trainers if acts else DryRunEffector()
    disks = SyncEffector(
        checkpoint_dirs(settings), reported_paths=trainers.folders, spawn=ports.spawn, clock=ports.clock
    )
    check = _host_check(settings, ports, reported_folders=trainers.folders)
    relief, watchers = _relief(settings, ports, trainers, acts=acts, state=state)
    effectors: dict[type[Action], Effector] = {
        **dict.fromkeys((TriggerCheckpoint, PauseTrainer, ResumeTrainer), hold),
        EnsurePolicy: keeper,
        RestorePolicy: keeper if acts else DryRunEffector(),
        SyncFilesystems: disks if acts else DryRunEffector(),
        **dict.fromkeys((PowerOff, ResumeTraining, Reboot), host),
        CheckHost: check,
        **dict.fromkeys((CheckPowerOn, ArmPowerOn, DisarmPowerOn), PowerOnEffector(methods, turns)),
        **relief,
    }
    watchers |= _own_load(settings, ports, bmc_effector, policy=policy, publish=publish, state=state)
    watchers |= _watchers(settings, ports, trainers, check, host, policy=policy, publish=publish, state=state)
    sources = (ports.sources or _sources)(settings, ports.clock)
    policy = _with_sources(policy, sources)
    traps = trap_listener(settings, sources, clock=ports.clock, wall=ports.wall)
    if traps is not None:
        watchers["traps"] = lambda: _served(f"traps {traps.where}", traps.run, right=_TRAPS_RIGHT)
    return Components(
        policy=policy,
        host_kind=settings.host.kind,
        bmc_kind=settings.bmc.kind,
        has_no_bmc=settings.bmc.kind == "none" and "bmc" in settings.model_fields_set,
        sources=sources,
        watchers=watchers,
        traps=None if traps is None else traps.counts,
        effectors={**effectors, **ports.effectors},
        close=trainers.close,
        resume=settings.resume,
        check=check,
        why_on=None if settings.bmc.kind == "none" else bmc_effector.why_on,
        strangers=lambda: trainers.strangers,
        host=None if PowerOff in ports.effectors else host,
    )


def _trainers(
    settings: Settings, ports: Ports, publish: Callable[[Event], None], state: Callable[[], State]
) -> TrainerEffector:
    return TrainerEffector(
        settings.trainers,
        clock=ports.clock,
        publish=publish,
        discover_dir=None if settings.trainer_sockets is None else Path(settings.trainer_sockets),
        discover_uids=settings.trainer_uids,
        not_trainers=[settings.control.socket],
        spawn=ports.spawn,
        helper=SignalHelper(settings.signals.socket),
        remembered=lambda: [trainer.name for trainer in state().trainers if trainer.alive],
    )


def _own_load(
    settings: Settings,
    ports: Ports,
    bmc: BmcEffector,
    *,
    policy: Policy,
    publish: Callable[[Event], None],
    state: Callable[[], State],
) -> dict[str, Runnable]:
    """Return the task that reads this host's own draw; none where nothing measures it, and in a simulated world."""
    read: dict[OwnSource, Read] = {}
    if settings.bmc.kind != "none":
        read[OwnSource.BMC] = bmc.power_watts
    if outlets := settings.outlets:
        read[OwnSource.PDU] = Outlets(outlets).watts
    if settings.gpu.kind == "nvml":
        gpu = GpuEffector(settings.gpu)
        read[OwnSource.GPU] = lambda limit_s: gpu_watts(gpu, limit_s)
    if not read or ports.sources is not None or ports.bmc is not None:
        return {}
    watch = OwnLoadWatch(policy=policy, read=read, state=state, publish=publish, clock=ports.clock, rest=rest)
    return {"own load": watch.run}


def _watchers(
    settings: Settings,
    ports: Ports,
    trainers: TrainerEffector,
    check: HostCheckEffector,
    host: HostEffector,
    *,
    policy: Policy,
    publish: Callable[[Event], None],
    state: Callable[[], State],
) -> dict[str, Runnable]:
    """Return the tasks that check trainers, the host, its power-off and its network, by their names."""
    watchers: dict[str, Runnable] = {}
    if TriggerCheckpoint not in ports.effectors:
        watchers["trainers"] = trainers.watch
        if policy.mode is not Mode.DRY_RUN:
            watchers["uploads"] = lambda: trainers.uploads.keep(
                lambda: is_past_dwell(policy, state(), ports.clock()), rest
            )
    if policy.mode is not Mode.DRY_RUN and PowerOff not in ports.effectors:
        watchers["power-off"] = lambda: host.keep(rest)
    if ports.sources is not None:
        return watchers
    if CheckHost not in ports.effectors:
        watchers["host"] = lambda: check.keep(lambda: is_calm(state()), lambda: is_waiting(state()), rest)
    network = network_watch(settings, publish=publish, clock=ports.clock)
    if network is not None:
        watchers["network"] = network.run
    return watchers


def _host_check(
    settings: Settings, ports: Ports, *, reported_folders: Callable[[], Iterable[str]]
) -> HostCheckEffector:
    """Return the check of the host. reported_folders: returns the folders that trainers report."""
    return HostCheckEffector(
        settings.resume,
        folder=Path(settings.journal.path).parent,
        dirs=checkpoint_dirs(settings),
        wall=ports.wall,
        reported_dirs=reported_folders,
        gpu_socket=settings.gpu.socket,
        spawn=ports.spawn,
        clock=ports.clock,
    )


def checkpoint_dirs(settings: Settings) -> list[str]:
    """Return the folders of checkpoints that the settings name."""
    named = (each.checkpoint_dir for each in settings.trainers)
    return [*settings.checkpoint_dirs, *(each for each in named if each is not None)]


_TRAPS_RIGHT: Final = "another program listens there, or this host has no such address: see traps.listen and traps.port"


def _methods(settings: Settings, ports: Ports, *, armed: bool) -> dict[PowerOnMethod, Effector]:
    """Return the effectors of the power-on methods."""
    if ports.methods is not None:
        return ports.methods(armed)
    return methods_of(settings, clock=ports.clock, wall=ports.wall, boot=ports.boot(), armed=armed)


def _bmc(settings: Settings, ports: Ports, *, acts: bool) -> tuple[BmcEffector, Effector]:
    """Return the effectors of the BMC and its policy. In dry-run the policy is read only.

    An order of the core has its own, shorter limit.
    """
    options = settings.bmc if acts else settings.bmc.model_copy(update={"policy": "observe"})
    folder = Path(settings.journal.path).parent
    observes = not acts and settings.bmc.policy != "observe"
    asks = BmcEffector(
        options,
        spawn=ports.spawn,
        clock=ports.clock,
        limit_s=POLICY_LIMIT_S,
        folder=folder,
        dry_run=observes,
        refusals=ports.refusals,
    )
    return asks, asks if ports.bmc is None else ports.bmc(options)


def _relief(
    settings: Settings,
    ports: Ports,
    trainers: TrainerEffector,
    *,
    acts: bool,
    state: Callable[[], State],
) -> tuple[dict[type[Action], Effector], dict[str, Runnable]]:
    """Return what relieves the battery of load (GPU limits, signals, scheduler), and what renews the leases of that.

    Also what ends jobs at the commit, which a rehearsal does not.
    """
    gpu = GpuEffector(settings.gpu)
    scheduler = SlurmEffector(settings.scheduler, host=ports.host(), feeds=tuple(settings.feeding))
    sockets = {each.name: each.socket_path for each in settings.trainers}
    signals = SignalEffector(settings.signals, sockets=sockets, folder=settings.trainer_sockets or TRAINER_SOCKETS)
    watchers: dict[str, Runnable] = {}
    if CapPower not in ports.effectors and acts and settings.gpu.kind != "none":
        watchers["gpu"] = lambda: gpu.hold(lambda: state().cap is not None, rest)
    if StopTrainer not in ports.effectors and acts and settings.signals.kind != "none":
        watchers["signals"] = lambda: signals.hold(lambda: bool(state().signalled), rest)
    power: Effector = gpu if acts else DryRunEffector()
    signal_effector: Effector = signals if acts else DryRunEffector()
    caps = dict.fromkeys((CapPower, RestorePower), power)
    stops = dict.fromkeys((StopTrainer, TerminateTrainer, ContinueTrainer), signal_effector)
    marks = dict.fromkeys((DrainNode, SignalJobs, ReturnNode), scheduler if acts else DryRunEffector())
    ends: dict[type[Action], Effector] = {LeaveNode: scheduler, LeaveJob: trainers}
    ends = ends if settings.mode == "armed" else dict.fromkeys(ends, DryRunEffector())
    return {**caps, **stops, **marks, **ends}, watchers


def _unpassed(before: Settings, fresh: Settings) -> list[str]:
    """Return the credentials that are new in the settings, and that this process does not have."""
    known = {secret.credential for _, secret in secrets_in(before)}
    unpassed: list[str] = []
    for _, secret in secrets_in(fresh):
        if secret.credential is not None and secret.credential not in {*known, *unpassed}:
            try:
                secret.read()
            except SecretError:
                unpassed.append(secret.credential)
    return unpassed


def assemble(
    settings: Settings,
    *,
    config: Path,
    dry_run: bool = False,
    ports: Ports | None = None,
    journal: Journal | None = None,
) -> Loop:
    """Make a daemon that is ready to run. Must be called inside the event loop that will run it."""
    ports = ports or Ports()
    made: list[Loop] = []
    turns: Turns = {}
    accepted = [settings]

    def publish(event: Event) -> None:
        if made:
            made[0].submit(event)

    def state() -> State:
        return made[0].state if made else State()

    def make(accepted: Settings) -> Components:
        parts = build(accepted, ports, publish, dry_run=dry_run, state=state, turns=turns)
        return awaiting_users(parts, accepted, config, again)

    def again() -> None:
        made[0].reload()

    def reload() -> Components:
        try:
            fresh = load(config)
            parts = make(fresh)
            messenger.use(fresh.notify)
        except Exception as error:  # whatever a file brings about, the daemon goes on with the settings so far
            where = "" if isinstance(error, SettingsError) else f"{config}: cannot be used: {type(error).__name__}: "
            raise ValueError(where + str(error)) from error
        for key in changed(accepted[-1], fresh):
            log.info("setting_changed", setting=key)
        if any(getattr(fresh, name) != getattr(settings, name) for name in ("http", "control", "journal", "log")):
            log.warning("restart_needed", because="http, control, journal and log change only with a restart")
        if unpassed := _unpassed(accepted[-1], fresh):
            because = f"systemd passes credentials only at the start: {', '.join(unpassed)}"
            log.warning("restart_needed", because=because, right="systemctl restart powerguard.service")
        accepted[:] = [fresh]
        return parts

    if journal is None:
        path = Path(settings.journal.path)
        retention = Retention(
            outages=settings.journal.keep_outages,
            size_bytes=settings.journal.keep_outages * JOURNAL_BYTES_PER_OUTAGE,
        )
        journal = Journal(path, boot_id=ports.boot(), wall=ports.wall, retention=retention)
    messenger = _messenger(settings, ports)
    loop = Loop(
        make(settings),
        journal,
        clock=ports.clock,
        wall=ports.wall,
        notifier=Notifier.take(),
        host_name=ports.host(),
        config_path=str(config),
        reload=reload,
        messenger=messenger,
    )
    made.append(loop)
    return loop


def _messenger(settings: Settings, ports: Ports) -> Messenger:
    return Messenger(
        settings.notify,
        Path(settings.journal.path).with_name(MESSAGES),
        host=ports.host(),
        spawn=ports.spawn,
        wall=ports.wall,
        clock=ports.clock,
    )


def awaiting_users(parts: Components, settings: Settings, config: Path, reload: Callable[[], None]) -> Components:
    """Add to the parts the watcher for users of the settings that are not known yet, if there are any."""
    if not any(unknown_users(settings)):
        return parts
    return replace(parts, watchers={**parts.watchers, "users": partial(await_users, settings, config, reload)})


async def await_users(
    settings: Settings, config: Path, reload: Callable[[], None], *, every_s: float = USERS_RETRY_S
) -> None:
    """Reload the settings when a user becomes known that was not, unless the file has changed otherwise.

    A directory of users (LDAP) may answer only minutes after the boot, and until then the sockets of its users'
    trainers are not accepted. The names are looked up in a thread: a directory may hang.
    """
    while True:
        await rest(every_s)
        try:
            fresh = await asyncio.to_thread(load, config)
        except SettingsError:
            continue
        keys = changed(settings, fresh)
        if keys and all("uids[" in key for key in keys):
            reload()


def is_past_dwell(policy: Policy, state: State, now_s: float) -> bool:
    """Say whether an outage has lasted longer than the dwell: from then on it needs the disk and the network."""
    if isinstance(state.phase, OnBattery):
        return now_s - state.phase.outage.since_s >= policy.pause_dwell_s
    return not isinstance(state.phase, Online | Recovery)


def is_calm(state: State) -> bool:
    """Say whether all is calm: utility, and no outage, return or drill."""
    on_utility = isinstance(state.phase, Online) and state.feed.supply is Supply.UTILITY
    return on_utility and state.drill is None and not is_waiting(state)


def is_waiting(state: State) -> bool:
    """Say whether the host is back, and training does not run yet."""
    return isinstance(state.phase, Recovery) or unseen.is_open(state)


def services(loop: Loop, settings: Settings, spawn: Spawn = run_child) -> dict[str, Runnable]:
    """Return the tasks of the sockets, and the one that measures how long the last stop took."""
    web, control = settings.http, settings.control
    where = f"http {web.listen} port {web.port}"
    watchdog = WatchdogDrill(loop, lambda: loop.parts.effectors, spawn=spawn)
    tester = None if loop.messenger is None else loop.messenger.test
    reports = Reports(loop, Path(settings.journal.path), spawn)
    return {
        "http": lambda: _served(
            where,
            lambda: _open(http.http_server(loop, listen=web.listen, port=web.port, reports=reports)),
            right="another program listens there, or this host has no such address: see http.listen and http.port",
        ),
        "admin socket": lambda: _served(
            f"control.socket {control.socket}",
            lambda: _open(
                admin.admin_server(loop, path=control.socket, group=control.group, watchdog=watchdog, tester=tester)
            ),
            right="its folder must exist, and the daemon's user must be able to write it",
        ),
        "hint socket": lambda: _served(
            f"hint socket {hint_path(control.socket)}",
            lambda: _open(hint_socket(loop, path=hint_path(control.socket))),
            right="it is next to control.socket, whose folder the daemon's user must be able to write",
        ),
        "stops": lambda: boots.measure(loop, spawn),
        **({} if loop.messenger is None else {"messages": partial(loop.messenger.run, loop)}),
        "power-on": lambda: boots.report_power_on(loop, lambda: loop.parts.why_on, spawn),
        "watchdog drill": watchdog.run,
    }


async def _open(server: contextlib.AbstractAsyncContextManager[object]) -> None:
    """Keep a server open until cancelled."""
    async with server:
        await asyncio.Event().wait()


async def _served(where: str, serve: Runnable, *, right: str) -> None:
    """Serve; while the address is not available, log it once and retry. The host is protected meanwhile."""
    logged = ""
    while True:
        try:
            await serve()
        except OSError as error:
            because = f"{where}: {error.strerror or error} ({right})"
            if because != logged:
                log.error("socket_unavailable", because=because, retry_s=SERVE_RETRY_S)  # noqa: TRY400 - reported in full
            logged = because
        await rest(SERVE_RETRY_S)


async def run(
    settings: Settings,
    *,
    config: Path,
    dry_run: bool,
    ports: Ports | None = None,
    flush: Callable[[], None],
) -> NoReturn:
    """Run a daemon in this loop until SIGTERM or SIGINT, and end the process. SIGHUP reads the settings again.

    flush: writes the log's last lines.
    """
    open_scope()
    for caution in warnings(settings, today=datetime.now().astimezone().date()):
        log.warning("settings_doubtful", setting=dotted(caution.path), because=caution.what)
    daemon = assemble(settings, config=config, dry_run=dry_run, ports=ports)
    spawn = (ports or Ports()).spawn
    async with asyncio.TaskGroup() as tasks:
        running = asyncio.get_running_loop()
        stopping: list[asyncio.Task[None]] = []

        async def stop() -> None:
            # A foreign shutdown matters on battery only; on utility there is no need to ask, and in our own shutdown
            # there is no time: the inputs of the reboot decision are read at once.
            host = not isinstance(daemon.state.phase, Online | Shutdown) and await is_host_stopping(spawn)
            daemon.stop_for_signal(host_stopping=host)

        def on_stop() -> None:
            if not stopping:
                stopping.append(tasks.create_task(stop()))

        for number in (signal.SIGTERM, signal.SIGINT):
            running.add_signal_handler(number, on_stop)
        running.add_signal_handler(signal.SIGHUP, daemon.reload)
        try:
            await daemon.run(services(daemon, settings, spawn))
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                running.remove_signal_handler(number)
        if daemon.abandoned.running:
            log.error("exit_forced", because=f"{len(daemon.abandoned.running)} tasks never ended")
        # Python's own end would wait for these, and for threads that hang in a disk or a name server; and the shutdown
        # of the host with it.
        flush()
        os._exit(0)


def main(config: Path, *, dry_run: bool = False) -> int:
    """Load the settings and run. Returns only with an exit status of 78 or 69: settings cannot be used, one runs."""
    try:
        settings = load(config)
    except SettingsError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the log is not set up before the settings are read
        return EX_SETTINGS
    written = configure(style=settings.log.format, level=settings.log.level)
    try:
        with alone(Path(settings.control.socket)):
            asyncio.run(run(settings, config=config, dry_run=dry_run, flush=written.close))
    except TakenError as error:
        log.error("daemon_refused", because=str(error))  # noqa: TRY400 - reported in full
        written.close()
        return EX_TAKEN
