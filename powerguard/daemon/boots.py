"""Measurements of the last power-off and of this boot: how long the host took to stop, and to boot.

The end of a stop cannot be measured directly. It is the last entry of the old boot in the system journal, or the mark
that powerguard-off leaves when journald is gone and it still waits for leftover processes. The first daemon of the next
boot looks it up once, apart from its recovery; it counts only if it is plausible. A missing sample is harmless; a wrong
one could lose a host.

Also what brought the host back. The first daemon of a boot after an outage asks for it once, for the report; so does
one whose host went down unasked outside an outage, because it may have been a crash. The BMC knows what powered the
host on, and whether AC had been gone; the firmware knows how long it took until the kernel, with ACPI's FPDT or a boot
loader of systemd's. Neither delays other work; a missing answer is reported as unknown.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import structlog

from powerguard.clock import Clock
from powerguard.core.comeback import unseen
from powerguard.core.model.actions import Grade, PowerOff
from powerguard.core.model.events import Event, Measured, PoweredOn
from powerguard.core.model.policy import Policy
from powerguard.core.model.serialisation import PlainError, from_plain
from powerguard.core.model.state import Recovery, State
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import Journal, Line, pairs
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.engine import Probe
from powerguard.effectors.bmc.ipmi import RestartCause
from powerguard.effectors.child import Spawn

log = structlog.get_logger()

LOOK_LIMIT_S: Final = 20.0
"""journalctl opens every file of the journal, on a disk that is busy with a boot."""
MARK: Final = Path("/var/lib/powerguard-off/stopped")
"""Written by powerguard-off once every unit has stopped, and again until the root is read-only: boot id, seconds of
CLOCK_BOOTTIME, wall clock."""
_MARK_LIMIT_S: Final = 5.0
_MARK_BYTES: Final = 100
_MARK_LINE: Final = re.compile(r"([0-9a-f-]{36}) ([0-9]{1,10}\.[0-9]{2}) ([0-9]{1,11}\.[0-9]{6})\n")
TAIL_S: Final = 5.0
"""Added to a stop: after journald's last entry file systems are unmounted and the firmware cuts the power. That time
cannot be recorded."""
LATEST_S: Final = 60.0
"""A last entry this long after the deadline of the power-off is not of that stop."""
LONGEST_BOOT_S: Final = 3600.0
"""A daemon that starts later than this after the kernel did was started by a person."""
DOUBT_S: Final = 5.0
"""Wall clock and monotonic clock of the boot that went may differ by this much over one stop."""
_CUT_S: Final = 3.0
_OUTAGES: Final = 3
_JOURNAL_STOPPED: Final = "d93fb3c9c24d451a97cea615ce59c00b"
"""SD_MESSAGE_JOURNAL_STOP of systemd's sd-messages.h: journald was ended in order, after every unit."""


class BootDaemon(Protocol):
    """The part of the daemon that this module needs."""

    @property
    def clock(self) -> Clock:
        """The clock of this boot."""
        ...

    @property
    def policy(self) -> Policy:
        """The policy that the settings make."""
        ...

    @property
    def boot_id(self) -> str:
        """Name of this boot."""
        ...

    @property
    def journal(self) -> Journal:
        """Our own journal."""
        ...

    @property
    def state(self) -> State:
        """What the core remembers."""
        ...

    @property
    def started_at_s(self) -> float:
        """When this daemon started."""
        ...

    def submit(self, event: Event) -> None:
        """Hand one event to the loop."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoweredOff:
    """The power-off that powerguard ordered in the old boot.

    boot_id, latched_at_s, latched_wall_s: the commit, by both clocks. grade, force_s: of the order; force_s counts
    from the commit to the forced power-off.
    """

    boot_id: str
    latched_at_s: float
    latched_wall_s: float
    grade: Grade
    force_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LastKnownMoment:
    """The last known moment of a boot, by both clocks. stopped: every unit had been ended in order by then."""

    wall_s: float
    monotonic_s: float
    stopped: bool


MarkOf = Callable[[str], Awaitable[LastKnownMoment | None]]


async def measure(host: BootDaemon, spawn: Spawn, mark_of: MarkOf | None = None) -> None:
    """Feed the measurements of this boot's return, once.

    mark_of: how the mark of a boot is read; None reads MARK.
    """
    mark_of = mark_of or (lambda boot: read_mark(MARK, boot))
    story = await story_of_return(host)
    returned = next((line for line in reversed(story) if is_return(line, host)), None)
    if returned is None:
        _not_measured("this daemon has not brought the host back from an outage")
    else:
        if returned.at_s <= LONGEST_BOOT_S:
            _submit(host, "boot", returned.at_s)
        order = powered_off(story[: story.index(returned)], returned)
        if isinstance(order, str):
            _not_measured(order)
        else:
            last = await last_word(order.boot_id, spawn)
            seconds = took_s(order, later(order, last, await mark_of(order.boot_id)))
            if isinstance(seconds, str):
                _not_measured(seconds)
            else:
                _submit(host, "stop", seconds)
    await asyncio.Event().wait()


def _submit(host: BootDaemon, need: str, seconds: float) -> None:
    log.info("need_measured", need=need, seconds=round(seconds, 3))
    host.submit(Measured(at_s=host.clock(), need=need, seconds=seconds))


def _not_measured(because: str) -> None:
    log.debug("stop_not_measured", because=because)


# --- Our own journal --------------------------------------------------------------------------------------------------


async def story_of_return(host: BootDaemon) -> tuple[Line, ...]:
    """Return the lines of the outage that this daemon has come back from; empty if there was none."""
    for record in await host.journal.history(_OUTAGES):
        found = await host.journal.outage(record.id)
        if found is not None and any(is_return(line, host) for line in found[1]):
            return found[1]
    return ()


def is_return(line: Line, host: BootDaemon) -> bool:
    """The note of this daemon's own start, and not of an earlier one in the same boot: each stop counts once."""
    return line.event == "host_returned" and line.boot_id == host.boot_id and line.at_s >= host.started_at_s


def powered_off(before: Sequence[Line], returned: Line) -> PoweredOff | str:
    """Find the power-off that ended the old boot, or return why there is none. before: what led to `returned`."""
    if returned.because != "powered off by us":
        return returned.because
    boot_id = next((line.boot_id for line in reversed(before) if line.boot_id != returned.boot_id), "")
    boot_lines = [line for line in before if line.boot_id == boot_id]
    latch = next((line for line in reversed(boot_lines) if line.event == "phase_changed" and _is_latch(line)), None)
    if latch is None:
        return "the commit is no longer in the journal"
    orders = [line for line in boot_lines if line.kind == "action" and line.event == "PowerOff"]
    accepted = [line for line in orders if any(_was_accepted(other, line) for other in boot_lines)]
    if not accepted:
        return "no power-off was accepted"
    try:
        # Ordered again by a restarted daemon, or hastened: the earliest deadline is the one that holds.
        read = [(line.at_s, from_plain(line.payload, PowerOff)) for line in accepted]
    except PlainError as error:
        return f"the order cannot be read: {error}"
    return PoweredOff(
        boot_id=boot_id,
        latched_at_s=latch.at_s,
        latched_wall_s=latch.wall,
        grade=read[0][1].grade,
        force_s=min(at_s + order.force_after_s for at_s, order in read) - latch.at_s,
    )


def _is_latch(line: Line) -> bool:
    return pairs(line.payload.get("numbers")).get("new") == "shutdown"


def _was_accepted(line: Line, order: Line) -> bool:
    """Accepted, and not only recorded, as in dry-run."""
    if line.kind != "outcome" or line.event != "Done" or line.action != order.action:
        return False
    return pairs(line.payload.get("detail")).get("dry_run") is not True


# --- The system's journal ---------------------------------------------------------------------------------------------


async def last_word(boot_id: str, spawn: Spawn) -> LastKnownMoment | str:
    """Ask journald for the last entry of a boot, or return why it has none. Never raises for what it finds."""
    name = boot_id.replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{32}", name):
        return f"{boot_id!r} is not the name of a boot"
    # By name and not as -1: between the two boots there may have been a third, such as a rescue system's.
    argv = ["journalctl", "--boot", name, "--lines", "1", "--output", "json", "--output-fields", "_BOOT_ID,MESSAGE_ID"]
    try:
        ended = await spawn([*argv, "--no-pager", "--quiet"], limit_s=LOOK_LIMIT_S)
    except OSError as error:
        return f"journalctl: {error.strerror or error}"
    if ended.timed_out:
        return f"journalctl: no answer within {LOOK_LIMIT_S:g} s"
    if ended.returncode != 0 or not ended.stdout.strip():
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        return f"journalctl: {lines[0][:200] if lines else 'no entry of that boot: check that /var/log/journal exists'}"
    return parse(ended.stdout, name)


def parse(raw: bytes, boot: str) -> LastKnownMoment | str:
    """Read the one line of `journalctl -o json`; boot: whose entry it must be, 32 hexadecimal digits."""
    try:
        entry = json.loads(raw)
        wall_us, monotonic_us = int(entry["__REALTIME_TIMESTAMP"]), int(entry["__MONOTONIC_TIMESTAMP"])
        whose, message_id = entry["_BOOT_ID"], entry.get("MESSAGE_ID")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "journalctl: answers, but not with one entry"
    if whose != boot:
        return "journalctl: answers with another boot's entry"
    return LastKnownMoment(wall_s=wall_us / 1e6, monotonic_s=monotonic_us / 1e6, stopped=message_id == _JOURNAL_STOPPED)


# --- The mark of powerguard-off ---------------------------------------------------------------------------------------


async def read_mark(path: Path, boot: str) -> LastKnownMoment | None:
    """Return the mark that powerguard-off left in that boot; None when there is none, or none that is whole."""

    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(_MARK_BYTES)

    try:
        async with asyncio.timeout(_MARK_LIMIT_S):
            raw = await asyncio.to_thread(read)
    except (OSError, TimeoutError):
        return None
    found = _MARK_LINE.fullmatch(raw.decode("ascii", "replace"))
    if found is None or found[1] != boot:
        return None
    return LastKnownMoment(wall_s=float(found[3]), monotonic_s=float(found[2]), stopped=True)


def later(order: PoweredOff, last: LastKnownMoment | str, mark: LastKnownMoment | None) -> LastKnownMoment | str:
    """Return the best evidence of the end: the mark comes after journald, and exists without a persistent journal.

    One that goes on until the deadline was cut there: the last processes had not ended.
    """
    if mark is None or (isinstance(last, LastKnownMoment) and last.monotonic_s > mark.monotonic_s):
        return last
    return replace(mark, stopped=mark.monotonic_s - order.latched_at_s < order.force_s - _CUT_S)


def took_s(order: PoweredOff, last: LastKnownMoment | str) -> float | str:
    """Seconds from the commit to the end of the host, or why they are unknown.

    A stop that the deadline has cut took at least what it was given; where it was given all there is, that counts.
    One that ended otherwise (the battery ran out, a panic) is not measured.
    """
    if isinstance(last, str):
        return last
    by_wall_s, by_clock_s = last.wall_s - order.latched_wall_s, last.monotonic_s - order.latched_at_s
    if abs(by_wall_s - by_clock_s) > DOUBT_S:
        return f"two clocks differ, {by_wall_s:.1f} s and {by_clock_s:.1f} s: one was set, or the host was suspended"
    if not 0.0 <= by_wall_s <= order.force_s + LATEST_S:
        return f"{by_wall_s:.1f} s after the commit is not the end of that stop"
    if order.grade is Grade.BARE:
        return "a bare stop does not show how long the host needs"
    if last.stopped:
        return by_clock_s + TAIL_S
    if order.grade is Grade.FULL and by_clock_s >= order.force_s - _CUT_S:
        return max(by_clock_s, order.force_s)
    return f"the log breaks off {by_clock_s:.1f} s after the commit: that stop did not end in order"


WhyOn = Callable[[float], Awaitable[Probe]]

LIMIT_S: Final = 10.0
AGAIN_AFTER_S: Final = 30.0
"""A BMC whose AC was gone starts with the host, and may still be at it."""
LATE_S: Final = 2.0
"""Interval of looking whether a journal that did not answer at the start has been read."""
SYSTEMCTL_LIMIT_S: Final = 5.0
LONGEST_FIRMWARE_S: Final = 3600.0
_FIRMWARE: Final = "FirmwareTimestampMonotonic"
"""Property of systemd's manager: microseconds from the firmware's start to the kernel's; 0 if unknown."""


async def report_power_on(host: BootDaemon, why_on: Callable[[], WhyOn | None], spawn: Spawn) -> None:
    """Feed what brought this host back, once.

    why_on: asks the BMC, within so many seconds; None if the settings have none.
    """
    if await _is_back(host):
        probe, because = await _probe(why_on())
        event = PoweredOn(
            at_s=host.clock(),
            because=because,
            cause=cause_of(probe),
            ac_failed=None if probe is None else probe.status.ac_failed,
            firmware_s=await firmware_s(spawn),
        )
        log.info("power_on_cause_read", cause=event.cause, ac_failed=event.ac_failed, because=because)
        host.submit(event)
    await asyncio.Event().wait()


async def _is_back(host: BootDaemon) -> bool:
    """Say whether the host is back from an outage, or went down unasked. A journal may be read after the start."""
    if unseen.is_open(host.state) or await story_of_return(host):
        return True
    while host.journal.lost:
        await rest(LATE_S)
        if unseen.is_open(host.state) or (isinstance(host.state.phase, Recovery) and await story_of_return(host)):
            return True
    return False


async def _probe(why_on: WhyOn | None) -> tuple[Probe | None, str]:
    if why_on is None:
        return None, "the settings name no BMC"
    because = ""
    for pause_s in (0.0, AGAIN_AFTER_S):
        if pause_s:
            await rest(pause_s)
        try:
            async with asyncio.timeout(LIMIT_S + 1.0):
                return await why_on(LIMIT_S), "reported by the BMC"
        except EffectorError as error:
            because = str(error)
        except TimeoutError:
            because = f"no answer within {LIMIT_S:g} s"
    return None, f"the BMC does not report it: {because}"


def cause_of(probe: Probe | None) -> str:
    """Return what powered the host on, such as "policy-always-on"; "" if the BMC does not report it."""
    if probe is None or probe.restart_cause in (None, RestartCause.UNKNOWN):
        return ""
    return str(probe.restart_cause)


async def firmware_s(spawn: Spawn) -> float | None:
    """Seconds from power-on to the kernel, as systemd knows them from the firmware; None where it does not."""
    try:
        ended = await spawn(["systemctl", "show", f"--property={_FIRMWARE}"], limit_s=SYSTEMCTL_LIMIT_S)
    except OSError:
        return None
    name, _, value = ended.stdout.decode("ascii", "replace").strip().partition("=")
    if ended.timed_out or ended.returncode != 0 or name != _FIRMWARE or not value.isdecimal():
        return None
    seconds = int(value) / 1e6
    return seconds if 0.0 < seconds <= LONGEST_FIRMWARE_S else None
