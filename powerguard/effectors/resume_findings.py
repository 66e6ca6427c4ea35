"""What `powerguard doctor` and `powerguard recover` look at before training has to start by itself after a power-off.

Would anything be started, and not too early? Is the host what it was on the last good day? Only looks.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host_check import MEMORY
from powerguard.effectors.host_findings import Finding
from powerguard.effectors.host_look import Checked
from powerguard.effectors.host_options import ResumeOptions

LOOK_LIMIT_S: Final = 2.0
MOST_UNITS: Final = 32
_ALLOWED: Final = "powerguard-resume.target"
"""What the polkit rule that comes with powerguard lets the daemon start."""
_EARLY: Final = frozenset({"multi-user.target", "graphical.target", "default.target", "basic.target"})
UNITS: Final = "/etc/systemd/system"
_GUIDE: Final = "docs/guides/recovery.md"
_PROPERTIES: Final = "--property=Id,LoadState,WantedBy,RequiredBy,Wants,Requires"


async def target(options: ResumeOptions, *, spawn: Spawn = run_child) -> list[Finding]:
    """Look at what starts training: would it start anything, and would that not have started long before the gate?"""
    name = "resume.target"
    if options.command:
        program = options.command[0]
        if shutil.which(program) is None:
            return [Finding(name, "FAIL", f"{program}: no such program, or not executable", "correct resume.command")]
        return [Finding(name, "PASS", f"training is started by {program}")]
    unit = options.target
    told = await _show(spawn, unit)
    if told is None or unit not in told:
        return [Finding(name, "WARN", f"cannot ask systemd about {unit}", "is this a systemd host?")]
    mine = told[unit]
    if mine.get("LoadState") != "loaded":
        fix = f"install systemd/{_ALLOWED} ({_GUIDE})" if unit == _ALLOWED else "correct resume.target"
        return [Finding(name, "FAIL", f"{unit}: {mine.get('LoadState') or 'not known'}: nothing starts training", fix)]
    found = []
    if unit != _ALLOWED:
        text = f"{unit}: the polkit rule that comes with powerguard does not let the daemon start it"
        found.append(Finding(name, "WARN", text, f"name it in /etc/polkit-1/rules.d/50-powerguard.rules ({_GUIDE})"))
    if unit.endswith(".service"):
        return found or [Finding(name, "PASS", f"training is started by {unit}")]
    units = [each for key in ("Wants", "Requires") for each in mine.get(key, "").split() if "." in each][:MOST_UNITS]
    if not units:
        text = f"{unit} wants nothing: after a power-off no training would be started"
        fix = f"WantedBy={unit} in the [Install] of what trains, then systemctl enable it"
        return [*found, Finding(name, "FAIL", text, fix)]
    wanted = list(_wanted(units, await _show(spawn, *units) or {}, unit))
    return [*found, *(wanted or [Finding(name, "PASS", f"{unit} starts {', '.join(units[:5])}")])]


def _wanted(units: Sequence[str], told: Mapping[str, Mapping[str, str]], by: str) -> list[Finding]:
    """Say what is wrong with what the target wants."""
    found = []
    for unit in units:
        its = told.get(unit, {})
        if its.get("LoadState") not in (None, "loaded"):
            text = f"{by} wants {unit}, which is {its['LoadState']}: it would not be started"
            fix = "name what trains: powerguard install --resume-unit UNIT"
            if its["LoadState"] == "masked":
                fix = f"systemctl unmask {unit}, or {fix}"
            elif its["LoadState"] == "not-found":
                fix = f"write {UNITS}/{unit} and systemctl daemon-reload, or {fix}"
            else:
                fix = f"systemctl status {unit}; correct it, then systemctl daemon-reload"
            found.append(Finding("resume.target", "FAIL", text, fix))
        early = _EARLY & {*its.get("WantedBy", "").split(), *its.get("RequiredBy", "").split()}
        if early:
            text = f"{unit} is wanted by {', '.join(sorted(early))} as well: it starts at boot, before the gate"
            found.append(Finding("resume.target", "WARN", text, f"WantedBy={by} alone, then systemctl reenable {unit}"))
    return found


async def _show(spawn: Spawn, *units: str) -> dict[str, dict[str, str]] | None:
    """Ask systemd about units; None where it cannot be asked."""
    try:
        ended = await spawn(["systemctl", "show", _PROPERTIES, "--", *units], limit_s=LOOK_LIMIT_S)
    except OSError:
        return None
    if ended.timed_out or ended.returncode != 0:
        return None
    blocks = ended.stdout.decode("utf-8", "replace").split("\n\n")
    read = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]
    return {each["Id"]: each for each in read if "Id" in each}


def host(checked: Checked, folder: Path) -> list[Finding]:
    """Say how the host compares with what is remembered. folder: where that is kept."""
    verdict, before = checked.verdict, checked.before
    found = [Finding("resume.host", "FAIL", text, _GUIDE) for text in verdict.problems]
    found += [Finding("resume.host", "WARN", text, _GUIDE) for text in verdict.notes]
    if not folder.exists():
        text = f"{folder}: no such folder: nothing is remembered of this host yet"
        found.append(Finding("resume.host", "WARN", text, "see the finding `journal`"))
    elif not os.access(folder, os.R_OK | os.X_OK):
        text = f"{folder}: cannot be read: what is remembered of this host is not compared"
        found.append(Finding("resume.host", "WARN", text, "run doctor as root or as powerguard"))
    elif not before.gpus and not before.places:
        text = f"{folder / MEMORY}: nothing is remembered yet: an unmounted storage or a missing GPU could not be told"
        found.append(Finding("resume.host", "WARN", text, "let the daemon run for a minute on utility"))
    if found:
        return found
    gpus, places = len(checked.look.gpus.there), len(checked.look.places)
    return [Finding("resume.host", "PASS", f"as remembered: GPUs {gpus}, folders of checkpoints {places}")]
