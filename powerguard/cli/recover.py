"""`powerguard recover`: show what training waits for on a host that is back, or start it now."""

import argparse
import asyncio
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerguard.cli.client import DownError, RefusedError, add_options, get
from powerguard.cli.operate import ask
from powerguard.cli.render import Paint, clean, fold, mode_note
from powerguard.cli.shared import EX_DOWN, EX_REFUSED, fail, print_answer

if TYPE_CHECKING:
    from powerguard.effectors.host.findings import Finding
    from powerguard.effectors.host.look import HostLook
    from powerguard.settings.schema import Settings

_LOOK_S = 20.0

_STAGES = {
    "none": "there was no power-off to recover from",
    "unseen": "the host went down outside an outage, and training is not started yet",
    "gate": "training waits for the gate",
    "check": "the host is being checked",
    "start": "training is being started",
    "first_step": "training was started; powerguard waits for its first step",
}
_MARKS = {True: ("ok", "green"), False: ("waiting", "red"), None: ("?", "yellow")}


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Start training now on a host that is back from a power-off, even if the gate (utility, charge) "
        "would still wait. It is refused on battery, and if the host is not complete: --unchecked accepts it as it "
        "is. --dry-run shows each gate and whether it waits, and what would be started; also without the daemon, as "
        "far as possible. Exit 0: asked, or (with --dry-run) no gate waits; 1: refused, or a gate "
        "waits; 4: the daemon is down."
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be done")
    parser.add_argument("--unchecked", action="store_true", help="start although a GPU or a checkpoint is missing")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    try:
        report = get(args, "/api/v1/recovery")
    except DownError as down:
        return _alone(args, str(down))
    except RefusedError as error:
        return fail(args, "recover", str(error), EX_REFUSED)
    if not args.dry_run:
        return ask(args, "recover", {"unchecked": args.unchecked}, "asked the daemon to start training")
    starts = report["starts"]
    found = _target(starts["target"], starts["command"])
    report["gates"] += [_gate(finding) for finding in found]
    closed = any(gate["open"] is False for gate in report["gates"])
    print_answer(args, report, lambda: fold(_lines(report)))
    return EX_REFUSED if closed else 0


def _lines(report: dict[str, Any]) -> list[str]:
    paint = Paint()
    stage = _STAGES.get(report["stage"], clean(report["stage"]))
    head = f"phase {clean(report['phase'])}{mode_note(report['mode'])}: {stage}"
    if report.get("forced_by"):
        head += f", as {clean(report['forced_by'])} wants it"
    lines = [paint(head, "bold")]
    width = max(len(gate["name"]) for gate in report["gates"])
    for gate in report["gates"]:
        word, colour = _MARKS[gate["open"]]
        lines.append(f"  {paint(f'{word:<7}', colour)}  {clean(gate['name']):<{width}}  {clean(gate['text'])}")
    lines.append(f"would start: {clean(_start(report['starts'])) or 'nothing, because the scheduler starts training'}")
    if report.get("refused"):
        lines.append(f"`powerguard recover` would be refused: {clean(report['refused'])}")
    return lines


def _start(starts: dict[str, Any]) -> str:
    """Return the command that starts training; "" if the scheduler does."""
    if starts["command"]:
        return shlex.join(starts["command"])
    return "" if starts["target"] is None else f"systemctl start {starts['target']}"


def _target(target: str | None, command: list[str]) -> "list[Finding]":
    """Check here what would be started, without the daemon."""
    from powerguard.effectors.host import findings
    from powerguard.effectors.options import ResumeOptions

    if target is not None:
        options = ResumeOptions(target=target)
    else:
        options = ResumeOptions(command=command, by="host" if command else "scheduler")
    return asyncio.run(findings.target(options))


def _gate(finding: "Finding") -> dict[str, Any]:
    is_open = {"PASS": True, "FAIL": False}.get(finding.verdict)
    text = f"{finding.text} ({finding.fix})" if finding.fix else finding.text
    return {"name": "target", "open": is_open, "text": text}


# --- Without the daemon -----------------------------------------------------------------------------------------------


def host_look(settings: "Settings") -> "HostLook":
    """Return the check of this host, as the daemon's child does it."""
    from powerguard.daemon.wiring import checkpoint_dirs
    from powerguard.effectors.host.check import MEMORY
    from powerguard.effectors.host.look import HostLook

    return HostLook(
        memory=Path(settings.journal.path).parent / MEMORY,
        dirs=checkpoint_dirs(settings),
        gpu_socket=settings.gpu.socket,
        verify=settings.resume.verify,
        any_gpus=settings.resume.gpus == "any",
    )


def _alone(args: argparse.Namespace, why: str) -> int:
    """Show what is visible without the daemon; start no training, because the battery is not watched."""
    from powerguard.settings.load import SettingsError, load

    try:
        settings = load(Path(args.config))
    except SettingsError as error:
        return fail(args, "recover", f"{why}; and the settings are invalid: {error.problems[0]}", EX_DOWN)
    checked = asyncio.run(host_look(settings).look(_LOOK_S))
    problems, notes = checked.verdict.problems, checked.verdict.notes
    target, command = settings.resume.starts
    unseen = "unknown: the daemon is down (`powerguard doctor` asks the UPS)"
    gates = [
        *({"name": name, "open": None, "text": unseen} for name in ("utility", "countdown", "charge")),
        {"name": "host", "open": not problems, "text": "; ".join(problems or notes) or "as it was"},
        *(_gate(finding) for finding in _target(target, command)),
    ]
    report: dict[str, Any] = {
        "schema_version": 1,
        "object": "recovery",
        "at": None,
        "phase": None,
        "mode": settings.mode,
        "outage": None,
        "back_since_at": None,
        "stage": None,
        "forced_by": None,
        "gates": gates,
        "starts": {"target": target, "command": command},
        "refused": why,
        "refused_unchecked": why,
    }
    lines = _lines({**report, "phase": "unknown", "stage": "the daemon is down; this is the state without it"})
    lines.append("to start training with the battery watched: systemctl start powerguard.service")
    if by_hand := clean(_start(report["starts"])):
        lines.append(f"to start it by hand, without a watch on the battery: {by_hand}")
    print_answer(args, report, lambda: fold(lines))
    return EX_DOWN
