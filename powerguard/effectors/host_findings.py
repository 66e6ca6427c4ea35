"""What `powerguard doctor` looks at on the host: is the way to power-off open, and what would hold a shutdown up.

Only looks: three short-lived children at most, two seconds each, and an open() of the FIFO that writes nothing.
"""

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host import open_word
from powerguard.effectors.host_options import HostOptions

LOOK_LIMIT_S: Final = 2.0
PATIENT_DELAY_S: Final = 10.0
"""logind's own InhibitDelayMaxSec is 5 s; unattended-upgrades sets 30 s on Debian and Ubuntu (measured: 30.2 s)."""

NAMED_UNITS: Final = 5
REHEARSALS: Final = ("POWERGUARD_OFF_RECORD=", "POWERGUARD_OFF_TOOLS=", "POWERGUARD_UNDER_TEST=")
"""With one of these in its environment powerguard-off does not act."""

UNIT_S: Final[Mapping[str, float]] = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
    "month": 2629800.0, "y": 31557600.0,
}  # fmt: skip
SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|min|h|d|w|month|y)")


class Finding(NamedTuple):
    """One line of doctor. fix: one line that an operator can act on; empty when there is nothing to do."""

    name: str
    verdict: Literal["PASS", "WARN", "FAIL"]
    text: str
    fix: str = ""


async def findings(options: HostOptions, *, armed: bool, spawn: Spawn = run_child) -> list[Finding]:
    """Look, and say what was found. Never raises for what it finds; takes a few seconds at most."""
    async with asyncio.TaskGroup() as group:
        inhibitors = group.create_task(_inhibitors(options, spawn))
        stops = group.create_task(_slow_stops(options, spawn))
        helper = group.create_task(_helper(options, spawn))
    return [_way(options, armed=armed), *helper.result(), inhibitors.result(), *stops.result()]


def _way(options: HostOptions, *, armed: bool) -> Finding:
    name = "host.power_off"
    if options.kind == "dry-run" or not armed:
        return Finding(
            name, "WARN", "dry run: this host will not be powered off", "set mode: armed and host.kind: systemd"
        )
    if options.kind == "command":
        program = options.command[0]
        if Path(program).is_absolute() and os.access(program, os.X_OK):
            return Finding(name, "PASS", f"{program} powers this host off; nothing forces it at a deadline")
        fix = "name an executable by its absolute path in host.command"
        return Finding(name, "FAIL", f"{program}: is not an executable by absolute path", fix)
    try:
        os.close(open_word(options.fifo))
    except EffectorError as error:
        if os.geteuid() != 0 and "may not write" in str(error):
            fix = "run doctor as root or as powerguard"
            return Finding(name, "WARN", f"{options.fifo}: only powerguard may look: not checked", fix)
        return Finding(name, "FAIL", str(error), "systemctl enable --now powerguard-off.socket")
    forced = f"forced {options.force_after_s:g} s after the order"
    return Finding(name, "PASS", f"powerguard-off listens on {options.fifo}; {forced}")


async def _helper(options: HostOptions, spawn: Spawn) -> list[Finding]:
    """Look behind the FIFO: a listening socket says nothing of a helper that is masked, or left in a rehearsal."""
    if options.kind != "systemd":
        return []
    name, unit = "host.helper", "powerguard-off.service"
    said = await _look(spawn, "systemctl", "show", unit, "--property=LoadState,Environment")
    told = _properties(said or "")
    if "LoadState" not in told:
        return [Finding(name, "WARN", f"cannot ask systemd about {unit}", "is this a systemd host?")]
    if told["LoadState"] != "loaded":
        fix = "install it (docs/guides/install.md)" if told["LoadState"] == "not-found" else f"systemctl unmask {unit}"
        return [Finding(name, "FAIL", f"{unit}: {told['LoadState']}", fix)]
    if any(name in told.get("Environment", "") for name in REHEARSALS):
        text = f"{unit} is set to rehearse: it records, and does not power off"
        return [Finding(name, "FAIL", text, f"systemctl revert {unit}")]
    return [Finding(name, "PASS", f"{unit} is installed and would act")]


async def _look(spawn: Spawn, *argv: str) -> str | None:
    """Return what a program says, None when it cannot be asked."""
    try:
        ended = await spawn(argv, limit_s=LOOK_LIMIT_S)
    except OSError:
        return None
    return None if ended.timed_out or ended.returncode != 0 else ended.stdout.decode("utf-8", "replace")


async def _inhibitors(options: HostOptions, spawn: Spawn) -> Finding:
    name = "host.inhibitors"
    login = "org.freedesktop.login1"
    said = await _look(
        spawn, "busctl", "get-property", login, "/org/freedesktop/login1", f"{login}.Manager", "InhibitDelayMaxUSec"
    )
    match (said or "").split():
        case ["t", microseconds] if microseconds.isdecimal():
            delay_s = int(microseconds) / 1e6
        case _:
            return Finding(
                name, "WARN", "cannot ask logind how long delay locks may hold a shutdown up", "is logind running?"
            )
    if delay_s <= PATIENT_DELAY_S:
        return Finding(name, "PASS", f"delay locks may hold a shutdown up for at most {delay_s:g} s")
    text = f"delay locks may hold a shutdown up for {delay_s:g} s"
    if options.kind == "systemd":
        return Finding(name, "PASS", f"{text}; powerguard-off does not wait for them, other shutdowns do")
    fix = "use host.kind: systemd, or set InhibitDelayMaxSec=5 in /etc/systemd/logind.conf.d/powerguard.conf"
    return Finding(name, "WARN", text, fix)


async def _slow_stops(options: HostOptions, spawn: Spawn) -> list[Finding]:
    properties = "--property=Id,TimeoutStopUSec,KillMode"
    said = await _look(spawn, "systemctl", "show", "--type=service", "--state=active", properties, "*")
    if said is None:
        return [
            Finding(
                "host.stop", "WARN", "cannot ask systemd how long its units may take to stop", "is this a systemd host?"
            )
        ]
    units = [_properties(block) for block in said.split("\n\n") if "Id=" in block]
    slow = [unit["Id"] for unit in units if seconds(unit.get("TimeoutStopUSec", "")) > options.force_after_s]
    loose = [unit["Id"] for unit in units if unit.get("KillMode") in {"process", "none"}]
    limit = f"{options.force_after_s:g} s"
    found = [Finding("host.stop", "PASS", f"{len(units)} active services may stop within force_after_s ({limit})")]
    if slow:
        text = f"may take longer to stop than force_after_s ({limit}) and are then killed: {_named(slow)}"
        found = [Finding("host.stop", "WARN", text, "lower their TimeoutStopSec=, or raise host.force_after_s")]
    if loose:
        text = f"leave processes behind when stopped (KillMode=process): up to 90 s more at the end: {_named(loose)}"
        found.append(Finding("host.kill_mode", "WARN", text, "set KillMode=mixed where the service allows it"))
    return found


def _properties(block: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in block.splitlines() if "=" in line)


def _named(units: Iterable[str]) -> str:
    names = sorted(units)
    more = f" and {len(names) - NAMED_UNITS} more" if len(names) > NAMED_UNITS else ""
    return ", ".join(names[:NAMED_UNITS]) + more


def seconds(span: str) -> float:
    """Return the seconds of a time span as systemctl prints it ("1min 30s"); inf for infinity, 0 for what is none."""
    if span.strip() == "infinity":
        return float("inf")
    return sum(float(number) * UNIT_S[unit] for number, unit in SPAN.findall(span))
