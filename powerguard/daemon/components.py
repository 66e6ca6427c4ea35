"""The components of a running daemon: made from the settings, closed together, and the log lines of their notes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from powerguard.core.model.actions import Action, Level, Note
from powerguard.core.model.policy import Policy
from powerguard.daemon.attempt import keep_running
from powerguard.effectors.base import Effector
from powerguard.effectors.bmc.engine import Probe
from powerguard.effectors.host.check import HostCheckEffector
from powerguard.effectors.host.power import HostEffector
from powerguard.effectors.options import ResumeOptions
from powerguard.ups.base import Source
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
