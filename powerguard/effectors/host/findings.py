"""Checks of `powerguard doctor` on the host: does the power-off work, and what would delay a shutdown?

Read-only: a few short-lived children, two seconds each, and an open() of the FIFO without a write.

Also the checks of `powerguard doctor` and `powerguard recover` on the return: would training start after a power-off,
and not too early? Is the host as it was on the last good day?
"""

import asyncio
import contextlib
import json
import os
import pwd
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from powerguard.clock import boot_id
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host.check import MEMORY
from powerguard.effectors.host.look import CheckedHost
from powerguard.effectors.host.power import DAEMON_USER, RESTART_SOCKET, obstacle, open_word, unanswered
from powerguard.effectors.options import HostOptions, ResumeOptions

LOOK_LIMIT_S: Final = 2.0
PATIENT_DELAY_S: Final = 10.0
"""logind's own InhibitDelayMaxSec is 5 s; unattended-upgrades sets 30 s on Debian and Ubuntu (measured: 30.2 s)."""

NAMED_UNITS: Final = 5
NAMED_LETTERS: Final = 40
HELPER: Final = "powerguard-off.service"
LAST_STEP: Final = "/usr/lib/systemd/system-shutdown/powerguard"
"""Where systemd/powerguard-shutdown is installed."""

LOGIND: Final = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
UPGRADES: Final = "unattended-upgrades.service"
TRUE: Final = frozenset({"true", "1", "yes", "on"})
"""The words that apt takes for true."""

REHEARSALS: Final = ("POWERGUARD_OFF_RECORD=", "POWERGUARD_OFF_TOOLS=", "POWERGUARD_UNDER_TEST=")
"""With one of these in its environment, powerguard-off does not act."""

UNIT_S: Final[Mapping[str, float]] = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
    "month": 2629800.0, "y": 31557600.0,
}  # fmt: skip
SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|min|h|d|w|month|y)")


class Finding(NamedTuple):
    """One line of doctor. fix: one line that an operator can act on; empty if no action is needed."""

    name: str
    verdict: Literal["PASS", "WARN", "FAIL"]
    text: str
    fix: str = ""


class Lock(NamedTuple):
    """A lock of logind that delays shutdowns: its holder, and whether it blocks or only delays."""

    who: str
    mode: str


async def findings(options: HostOptions, *, spawn: Spawn = run_child, last_step: str = LAST_STEP) -> list[Finding]:
    """Return the findings. Never raises for what it finds; takes a few seconds at most.

    last_step: where the hook lies that ends a power-off in a reboot.
    """
    async with asyncio.TaskGroup() as group:
        locks = group.create_task(_locks(spawn))
        delay_s = group.create_task(_delay_s(spawn))
        units = group.create_task(services(spawn))
        helper = group.create_task(shown(spawn, HELPER, "--property=LoadState,Environment"))
        upgrades = group.create_task(_look(spawn, "apt-config", "dump"))
    properties = (helper.result() or [{}])[0]
    return [
        await _way(options, spawn),
        *await _helper(options, properties),
        *_last_step(options, last_step),
        _inhibitors(options, delay_s.result(), locks.result()),
        *_slow_stops(options, units.result(), properties.get("Environment", "")),
        *_upgrades(units.result(), upgrades.result()),
        *_kubelet(options, locks.result()),
    ]


async def _way(options: HostOptions, spawn: Spawn) -> Finding:
    name = "host.power_off"
    if options.kind == "command":
        program = options.command[0]
        because = "" if Path(program).is_absolute() else f"{program}: is not an absolute path"
        if because := because or await unfit(program, spawn):
            return Finding(name, "FAIL", because, "name an executable by its absolute path in host.command")
        return Finding(name, "PASS", f"{program} powers this host off, without a forced deadline")
    try:
        os.close(open_word(options.fifo))
    except EffectorError as error:
        if os.geteuid() != 0 and "may not write" in str(error):
            fix = "run doctor as root or as powerguard"
            return Finding(name, "WARN", f"{options.fifo}: not checked, only user powerguard may open it", fix)
        return Finding(name, "FAIL", str(error), RESTART_SOCKET)
    forced = f"forced {options.force_after_s:g} s after the order"
    return Finding(name, "PASS", f"powerguard-off listens on {options.fifo}; {forced}")


async def _helper(options: HostOptions, properties: Mapping[str, str]) -> list[Finding]:
    """Check the helper itself: its socket listens even if the helper is masked or set to rehearse.

    If this user may write to the FIFO, the helper is asked for an answer, by a harmless word.
    """
    if options.kind != "systemd":
        return []
    name = "host.helper"
    if "LoadState" not in properties:
        return [Finding(name, "WARN", f"cannot ask systemd about {HELPER}", "is this a systemd host?")]
    if properties["LoadState"] != "loaded":
        fix = "powerguard install" if properties["LoadState"] == "not-found" else f"systemctl unmask {HELPER}"
        return [Finding(name, "FAIL", f"{HELPER}: {properties['LoadState']}", fix)]
    if any(word in properties.get("Environment", "") for word in REHEARSALS):
        text = f"{HELPER} is set to rehearse: it records, and does not power off"
        right = f"remove the drop-in that sets it (systemctl cat {HELPER} names it); systemctl daemon-reload"
        return [Finding(name, "FAIL", text, right)]
    if obstacle(options):  # Another check reports it, or this user may not write there.
        return [Finding(name, "PASS", f"{HELPER} is installed; it was not asked")]
    if because := await unanswered(options, boot=boot_id()):
        return [Finding(name, "FAIL", because, f"journalctl -u {HELPER}")]
    return [Finding(name, "PASS", f"{HELPER} answers, and would act")]


def _last_step(options: HostOptions, path: str) -> list[Finding]:
    if options.kind != "systemd":
        return []
    name = "host.last_step"
    if os.access(path, os.X_OK):
        return [Finding(name, "PASS", "a power-off can end in a reboot when utility returns during it")]
    text = f"{path}: missing or not executable: if utility returns during a power-off, this host stays off"
    return [Finding(name, "WARN", text, "powerguard install")]


async def _look(spawn: Spawn, *argv: str) -> str | None:
    """Return a program's output, None if it cannot be run."""
    try:
        ended = await spawn(argv, limit_s=LOOK_LIMIT_S)
    except OSError:
        return None
    return None if ended.timed_out or ended.returncode != 0 else ended.stdout.decode("utf-8", "replace")


async def _delay_s(spawn: Spawn) -> float | None:
    output = await _look(spawn, "busctl", "get-property", *LOGIND, "InhibitDelayMaxUSec")
    match (output or "").split():
        case ["t", microseconds] if microseconds.isdecimal():
            return int(microseconds) / 1e6
        case _:
            return None


async def _locks(spawn: Spawn) -> list[Lock]:
    """Return logind's present shutdown locks; empty if it cannot be asked."""
    output = await _look(spawn, "busctl", "--json=short", "call", *LOGIND, "ListInhibitors")
    try:
        ((*held,),) = json.loads(output or "null")["data"]
        rows = [[str(word) for word in lock[:4]] for lock in held]
        return [
            Lock(who=who[:NAMED_LETTERS], mode=mode) for what, who, _, mode in rows if "shutdown" in what.split(":")
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def _inhibitors(options: HostOptions, delay_s: float | None, locks: Iterable[Lock]) -> Finding:
    name = "host.inhibitors"
    if delay_s is None:
        text = "cannot ask logind how long delay locks may delay a shutdown"
        return Finding(name, "WARN", text, "is logind running?")
    held = _named({lock.who for lock in locks if lock.mode == "delay"})
    held_by = f" (held now by {held})" if held else ""
    if delay_s <= PATIENT_DELAY_S:
        return Finding(name, "PASS", f"delay locks may delay a shutdown for at most {delay_s:g} s{held_by}")
    text = f"delay locks may delay a shutdown for {delay_s:g} s{held_by}"
    if options.kind == "systemd":
        return Finding(name, "PASS", f"{text}; powerguard-off does not wait for them, other shutdowns do")
    fix = "use host.kind: systemd, or set InhibitDelayMaxSec=5 in /etc/systemd/logind.conf.d/powerguard.conf"
    return Finding(name, "WARN", text, fix)


async def services(spawn: Spawn) -> list[dict[str, str]] | None:
    """Return Id, TimeoutStopUSec and KillMode of every active service; None where systemd cannot be asked."""
    properties = "--property=Id,TimeoutStopUSec,KillMode"
    units = await shown(spawn, "--type=service", "--state=active", properties, "*")
    return None if units is None else [each for each in units if "Id" in each]


def _slow_stops(options: HostOptions, units: list[dict[str, str]] | None, environment: str) -> list[Finding]:
    if units is None:
        text = "cannot ask systemd how long its units may take to stop"
        return [Finding("host.stop", "WARN", text, "is this a systemd host?")]
    slow = [unit["Id"] for unit in units if seconds(unit.get("TimeoutStopUSec", "")) > options.force_after_s]
    loose = {unit["Id"] for unit in units if unit.get("KillMode") in {"process", "none"}}
    known = loose & set(named_to_kill(environment)) if options.kind == "systemd" else set()
    limit = f"{options.force_after_s:g} s"
    found = [Finding("host.stop", "PASS", f"{len(units)} active services may stop within force_after_s ({limit})")]
    if slow:
        text = f"these may take longer to stop than force_after_s ({limit}) and are then killed: {_named(slow)}"
        found = [Finding("host.stop", "WARN", text, "lower their TimeoutStopSec=, or raise host.force_after_s")]
    if loose - known:
        text = "these leave processes behind when stopped (KillMode=process), which adds up to 90 s at the end: "
        text += _named(loose - known)
        fix = (
            "set KillMode=mixed where a service allows it, or name it in POWERGUARD_OFF_KILL (docs/guides/power-off.md)"
        )
        found.append(Finding("host.kill_mode", "WARN", text, fix))
    elif known:
        text = f"processes that these leave behind when stopped are killed at the deadline: {_named(known)}"
        found.append(Finding("host.kill_mode", "PASS", text))
    return found


def named_to_kill(environment: str) -> list[str]:
    """Return the units of POWERGUARD_OFF_KILL; environment: as `systemctl show` prints it, quoted like a shell's."""
    try:
        words = shlex.split(environment)
    except ValueError:
        return []
    lists = [word.partition("=")[2] for word in words if word.startswith("POWERGUARD_OFF_KILL=")]
    return lists[-1].split() if lists else []


def _upgrades(units: Iterable[Mapping[str, str]] | None, config: str | None) -> list[Finding]:
    """Check unattended-upgrades: a host on which dpkg was killed at work may not boot."""
    if UPGRADES not in {unit["Id"] for unit in units or ()}:
        return []
    name = "host.upgrades"
    options = dict(re.findall(r'^Unattended-Upgrade::(\w+) "([^"]*)";$', config or "", re.MULTILINE))
    if options.get("InstallOnShutdown", "").lower() in TRUE:
        text = "unattended-upgrades installs packages during every shutdown, and the deadline kills it at work"
        return [Finding(name, "WARN", text, 'set Unattended-Upgrade::InstallOnShutdown "false" in /etc/apt/apt.conf.d')]
    if options.get("MinimalSteps", "true").lower() not in TRUE:
        text = "unattended-upgrades does not stop between two packages, and the deadline kills it at work"
        return [Finding(name, "WARN", text, 'set Unattended-Upgrade::MinimalSteps "true" in /etc/apt/apt.conf.d')]
    return [Finding(name, "PASS", "unattended-upgrades stops between two packages when the host does")]


def _kubelet(options: HostOptions, locks: Iterable[Lock]) -> list[Finding]:
    """Report kubelet's graceful node shutdown: it is a delay lock, which powerguard-off does not wait for."""
    if options.kind != "systemd" or not any(lock.who == "kubelet" and lock.mode == "delay" for lock in locks):
        return []
    text = "powerguard-off does not wait for kubelet's graceful node shutdown: pods end without their grace period"
    fix = "connect training in pods to powerguard itself (docs/guides/trainers.md)"
    return [Finding("host.kubelet", "WARN", text, fix)]


async def watch(spawn: Spawn, name: str, unit: str, *, well: str, ill: str) -> Finding:
    """Would a root helper undo its changes if the daemon were gone? unit: starts the helper's watch.

    well: what happens then, if the unit is active; ill: if it is not.
    """
    properties = (await shown(spawn, unit, "--property=LoadState,ActiveState") or [{}])[0]
    if "ActiveState" not in properties:
        return Finding(name, "WARN", f"cannot ask systemd about {unit}", "is this a systemd host?")
    if properties["ActiveState"] == "active":
        return Finding(name, "PASS", well)
    text = f"{unit} is {properties.get('LoadState')} and {properties['ActiveState']}: with the daemon gone, {ill}"
    return Finding(name, "FAIL", text, f"systemctl enable --now {unit}")


async def unfit(program: str, spawn: Spawn = run_child, user: str = DAEMON_USER) -> str:
    """Return why the daemon cannot run a program; "" if it can. Root may run all, so there its user is tried."""
    path = shutil.which(program)
    if path is None:
        return f"{program}: no such program, or not executable"
    if await _fails(spawn, user, "-x", path):
        return f"{program}: user {user} may not run it (ls -ld {path} and its folders)"
    return ""


async def is_closed(folder: str, spawn: Spawn = run_child, user: str = DAEMON_USER) -> bool:
    """Say whether root can enter a folder and the daemon cannot; False where doctor is not run by root."""
    return await _fails(spawn, user, "-r", folder, "-a", "-x", folder) and not await _fails(spawn, "root", "-e", folder)


async def _fails(spawn: Spawn, user: str, *test: str) -> bool:
    """As root, say whether test(1) fails for a user; False where it cannot be tried."""
    with contextlib.suppress(KeyError, OSError):
        account = pwd.getpwnam(user)
        become = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups", "test"]
        return os.geteuid() == 0 and (await spawn([*become, *test], limit_s=LOOK_LIMIT_S)).returncode == 1
    return False


async def shown(spawn: Spawn, *argv: str) -> list[dict[str, str]] | None:
    """Return the properties that `systemctl show` prints of each unit; None where systemd cannot be asked."""
    output = await _look(spawn, "systemctl", "show", *argv)
    if output is None:
        return None
    return [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in output.split("\n\n")]


def _named(units: Iterable[str]) -> str:
    names = sorted(units)
    more = f" and {len(names) - NAMED_UNITS} more" if len(names) > NAMED_UNITS else ""
    return ", ".join(names[:NAMED_UNITS]) + more


def seconds(span: str) -> float:
    """Return the seconds of a time span as systemctl prints it ("1min 30s"); inf for infinity, 0 for an invalid one."""
    if span.strip() == "infinity":
        return float("inf")
    return sum(float(number) * UNIT_S[unit] for number, unit in SPAN.findall(span))


MOST_UNITS: Final = 32
_ALLOWED: Final = "powerguard-resume.target"
"""Units that powerguard's polkit rule lets the daemon start."""
_EARLY: Final = frozenset({"multi-user.target", "graphical.target", "default.target", "basic.target"})
UNITS: Final = "/etc/systemd/system"
_GUIDE: Final = "docs/guides/return.md"
_PROPERTIES: Final = "--property=Id,LoadState,WantedBy,RequiredBy,Wants,Requires"


async def target(options: ResumeOptions, *, spawn: Spawn = run_child, user: str = DAEMON_USER) -> list[Finding]:
    """Check what starts training: would it start a unit, and not one that starts before the gate?

    user: the daemon's, which runs a command.
    """
    name = "resume.target"
    if options.by == "scheduler":
        return [Finding(name, "PASS", "the scheduler starts training")]
    if options.command:
        program = options.command[0]
        if because := await unfit(program, spawn, user):
            return [Finding(name, "FAIL", because, "correct resume.command")]
        return [Finding(name, "PASS", f"training is started by {program}")]
    unit = options.target
    answer = await _show(spawn, unit)
    if answer is None or unit not in answer:
        return [Finding(name, "WARN", f"cannot ask systemd about {unit}", "is this a systemd host?")]
    properties = answer[unit]
    if properties.get("LoadState") != "loaded":
        fix = f"install systemd/{_ALLOWED} ({_GUIDE})" if unit == _ALLOWED else "correct resume.target"
        return [
            Finding(name, "FAIL", f"{unit}: {properties.get('LoadState') or 'not known'}: no unit starts training", fix)
        ]
    found = []
    if unit != _ALLOWED:
        text = f"{unit}: powerguard's polkit rule does not let the daemon start it"
        found.append(Finding(name, "WARN", text, f"name it in /etc/polkit-1/rules.d/50-powerguard.rules ({_GUIDE})"))
    if unit.endswith(".service"):
        return found or [Finding(name, "PASS", f"training is started by {unit}")]
    units = [each for key in ("Wants", "Requires") for each in properties.get(key, "").split() if "." in each][
        :MOST_UNITS
    ]
    if not units:
        text = f"{unit} wants no unit, so training would not start after a power-off"
        fix = f"set WantedBy={unit} in [Install] of the training unit, then systemctl enable it"
        return [*found, Finding(name, "FAIL", text, fix)]
    wanted = list(_wanted(units, await _show(spawn, *units) or {}, unit))
    return [*found, *(wanted or [Finding(name, "PASS", f"{unit} starts {', '.join(units[:5])}")])]


def _wanted(units: Sequence[str], answer: Mapping[str, Mapping[str, str]], wanted_by: str) -> list[Finding]:
    """Return the faults of the units that the target wants."""
    found = []
    for unit in units:
        properties = answer.get(unit, {})
        if properties.get("LoadState") not in (None, "loaded"):
            text = f"{wanted_by} wants {unit}, which is {properties['LoadState']} and would not start"
            fix = "name the training unit: powerguard install --resume-unit UNIT"
            if properties["LoadState"] == "masked":
                fix = f"systemctl unmask {unit}, or {fix}"
            elif properties["LoadState"] == "not-found":
                fix = f"write {UNITS}/{unit} and systemctl daemon-reload, or {fix}"
            else:
                fix = f"systemctl status {unit}; correct it, then systemctl daemon-reload"
            found.append(Finding("resume.target", "FAIL", text, fix))
        early = _EARLY & {*properties.get("WantedBy", "").split(), *properties.get("RequiredBy", "").split()}
        if early:
            text = f"{', '.join(sorted(early))} also starts {unit}, at boot and before the gate"
            found.append(
                Finding("resume.target", "WARN", text, f"set WantedBy={wanted_by} only, then systemctl reenable {unit}")
            )
    return found


async def _show(spawn: Spawn, *units: str) -> dict[str, dict[str, str]] | None:
    """Ask systemd about units; None where it cannot be asked."""
    rows = await shown(spawn, _PROPERTIES, "--", *units)
    return None if rows is None else {each["Id"]: each for each in rows if "Id" in each}


def host(checked: CheckedHost, folder: Path) -> list[Finding]:
    """Compare the host with its remembered state. folder: of that file."""
    verdict, before = checked.verdict, checked.before
    found = [Finding("resume.host", "FAIL", text, _GUIDE) for text in verdict.problems]
    found += [Finding("resume.host", "WARN", text, _GUIDE) for text in verdict.notes]
    if not folder.exists():
        text = f"{folder}: no such folder, so there is no earlier state of this host to compare with"
        found.append(Finding("resume.host", "WARN", text, "see the finding `journal`"))
    elif not os.access(folder, os.R_OK | os.X_OK):
        text = f"{folder}: cannot be read, so the earlier state of this host is not compared"
        found.append(Finding("resume.host", "WARN", text, "run doctor as root or as powerguard"))
    elif not before.gpus and not before.places:
        text = f"{folder / MEMORY}: not written yet, so missing storage or a missing GPU cannot be detected"
        found.append(Finding("resume.host", "WARN", text, "let the daemon run for a minute on utility"))
    if found:
        return found
    gpus, places = len(checked.look.gpus.there), len(checked.look.places)
    return [Finding("resume.host", "PASS", f"as remembered: GPUs {gpus}, folders of checkpoints {places}")]
