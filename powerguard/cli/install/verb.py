"""`powerguard install`: put units, helpers and rules in place, and report each step."""

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import powerguard
from powerguard.cli.install.report import EX_NOT_DONE, Report
from powerguard.cli.shared import fail

if TYPE_CHECKING:
    from powerguard.cli.install.disk import Disk
    from powerguard.cli.install.pieces import InstalledFile
    from powerguard.settings.schema import Settings


UNIT: Final = re.compile(r"[A-Za-z0-9:_.\\@-]{1,200}\.(?:service|target|timer|socket|path)")
PARTS: Final = ("ipmi", "gpu", "signals", "slurm", "drop-ins")
_WORDS: Final = {
    "absent": "written",
    "disabled": "written",
    "ours": "updated",
    "mode": "owner and mode set",
    "foreign": "overwritten",
}


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Put powerguard's units, root helpers, user, folders and rules in place and enable them, and "
        "report each step. Run it again after an update or an interruption: correct files are left unchanged, "
        "and so are foreign files. Exit 0: done; 1: not done, or not completely."
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be done")
    parser.add_argument(
        "--with",
        dest="parts",
        action="append",
        choices=PARTS,
        default=[],
        help="more of it (may be repeated): the root helpers ipmi (where there is a BMC without asking), gpu, signals, "
        "slurm; drop-ins: those that are offered for other units",
    )
    parser.add_argument(
        "--resume-unit",
        dest="resume",
        action="append",
        type=_unit,
        default=[],
        metavar="UNIT",
        help="training unit: the daemon may start it after a power-off, and stops after it (may be repeated)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that are not ours, or changed since")
    parser.add_argument("--root", metavar="DIR", default="/", help="root of an image, instead of this system")
    parser.add_argument(
        "--prefix",
        metavar="DIR",
        help="virtual environment that the units use (default: this one; in an image /opt/powerguard)",
    )
    parser.add_argument("--verbose", action="store_true", help="also list unchanged files")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _unit(text: str) -> str:
    if not UNIT.fullmatch(text):
        msg = f"{text!r} is not a systemd unit name (example: train.service)"
        raise argparse.ArgumentTypeError(msg)
    return text


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from powerguard.cli.install.disk import PlaceError
    from powerguard.cli.install.host import wrong_prefix
    from powerguard.cli.install.pieces import PREFIX, SourceError

    report = Report("install", Path(args.root).resolve(), args.dry_run)
    is_here = report.root == Path("/")
    prefix = (args.prefix or (sys.prefix if is_here else PREFIX)).rstrip("/") or "/"
    if wrong := report.refused or wrong_prefix(prefix, live=is_here):
        return fail(args, "install", wrong, EX_NOT_DONE)
    try:
        _install(args, report, prefix)
    except (PlaceError, SourceError) as error:
        return fail(args, "install", str(error), EX_NOT_DONE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return fail(args, "install", f"{where}{error.strerror or error}; it can be run again", EX_NOT_DONE)
    return report.show(as_json=args.json, verbose=args.verbose)


def _install(args: argparse.Namespace, report: Report, prefix: str) -> None:
    import asyncio

    from powerguard.cli.install import host
    from powerguard.cli.install import pieces as parts_of
    from powerguard.cli.install.disk import Disk
    from powerguard.cli.secret import not_handed
    from powerguard.effectors.child import run_child
    from powerguard.effectors.options import HostOptions

    disk = Disk(report.root)
    disk.load()
    requested = {part for part in args.parts if part in parts_of.PARTS}
    if report.live and host.has_bmc(report.root):
        requested.add("ipmi")
    parts = sorted(requested | set(disk.manifest.parts))
    has_settings = disk.place(parts_of.SETTINGS).exists()
    # Settings that are missing for a moment must not keep the daemon from starting at the next boot.
    with_daemon = has_settings or parts_of.AT_BOOT in disk.manifest.files
    wanted = parts_of.pieces(report.root, prefix, parts, with_daemon=with_daemon)
    wanted += parts_of.resume_pieces(tuple(args.resume))
    settings = _settings(disk, report)
    wanted += _credentials(disk, settings)
    force_after_s = (HostOptions() if settings is None else settings.host).force_after_s
    offered = asyncio.run(host.offers(run_child, force_after_s)) if report.live else []
    if "drop-ins" in args.parts:
        wanted += [offer.piece for offer in offered]
    else:
        report.offers = [(offer.piece.path, offer.why, offer.piece.content.decode()) for offer in offered]
    disk.manifest.prefix, disk.manifest.parts = prefix, parts
    report.doubts += [
        f"{unit} was named earlier, but not now: it is no longer started after a power-off (name all units together)"
        for unit in _named_earlier(disk, args.resume)
    ]
    if not _put(disk, wanted, report, force=args.force):
        return
    given = settings is not None and _secrets(args, disk, report, settings)
    if report.live:
        behind = settings is not None and bool(not_handed(settings))
        status = _status(args)
        behind = behind or (status is not None and runs_older_code(status, Path(powerguard.__file__)))
        stale = (given or behind or _is_renewed(report)) and asyncio.run(host.is_up(run_child))
        calm = stale and _is_calm(status)
        todo = host.steps(parts, with_daemon=has_settings) + ([host.RESTART_DAEMON] if calm else [])
        asyncio.run(host.carry_out(run_child, todo, report))
        if stale and not calm:
            report.then.append(f"systemctl restart {parts_of.DAEMON}, when it is online: the old version still runs")
        report.doubts += asyncio.run(host.doubts(run_child, args.resume))
        if not report.dry_run:  # Before the mount it would be a warning about what this command repairs.
            report.doubts += filter(None, [host.shares_run()])
        if not host.has_polkit(report.root):
            report.doubts.append("no polkit: the daemon cannot start training after a power-off (apt install polkitd)")
    elif report.root == Path("/"):
        report.doubts.append("systemd does not run here: no unit was started")
    if not has_settings:
        report.then.append(
            f"write {parts_of.SETTINGS} (powerguard discover; sample: {parts_of.SAMPLE}); run this again"
        )
    if disk.place(parts_of.SENTINEL_SETTINGS).exists():
        _then_sentinel(disk, report)


def _named_earlier(disk: "Disk", units: list[str]) -> list[str]:
    """Return the training units of an earlier run that this one, which names others, leaves out."""
    from powerguard.cli.install.pieces import resume_pieces

    found: list[str] = []
    for piece in resume_pieces(tuple(units))[:1]:
        if piece.path in disk.manifest.files and disk.state_of(piece.path) == "same":
            text = disk.place(piece.path).read_text(encoding="utf-8")
            found = " ".join(re.findall(r"^Wants=(.*)$", text, re.MULTILINE)).split()
    return [unit for unit in found if unit not in units]


def _then_sentinel(disk: "Disk", report: Report) -> None:
    """Name the command that starts a sentinel with settings here, or starts it again: a person decides about it."""
    import asyncio

    from powerguard.cli.install import host
    from powerguard.cli.install.pieces import SENTINEL, SENTINEL_AT_BOOT, SENTINEL_SETTINGS
    from powerguard.effectors.child import run_child

    if not os.path.lexists(disk.place(SENTINEL_AT_BOOT)):
        check = f"powerguard sentinel --config {SENTINEL_SETTINGS} --check"
        report.then.append(f"{check}; systemctl enable --now {SENTINEL}: it is not started at boot")
        return
    is_old = any(path.endswith(f"/{SENTINEL}") and result == "updated" for path, _, result in report.files)
    if report.live and not is_old:
        is_old = asyncio.run(host.is_older_sentinel(run_child, Path(powerguard.__file__).stat().st_mtime))
    if is_old:
        report.then.append(f"systemctl restart {SENTINEL}: the old version still runs")


def _put(disk: "Disk", wanted: "list[InstalledFile]", report: Report, *, force: bool) -> bool:
    """Put all pieces in place, or none if one of them is refused. Return whether they were."""
    looks = [disk.look(piece) for piece in wanted]
    report.failed = not force and any(look.found == "foreign" for look in looks)
    todo: list[InstalledFile] = []
    for look in looks:
        if look.found == "same":
            result = "unchanged"
        elif look.found in {"foreign", "disabled"} and not force:
            result = f"{'refused' if look.found == 'foreign' else 'left out'}: {look.why}"
        else:
            result = "not done" if report.failed else report.result_word(_WORDS[look.found])
            todo.append(look.piece)
        report.files.append((look.piece.path, look.piece.what, result))
    if report.failed:
        report.then.append("no file was changed: move the refused files away, or overwrite them with --force")
        return False
    if report.dry_run:
        report.files += [(path, "of an earlier run", result) for path, result in disk.others(wanted, dry_run=True)]
        return True
    with disk.alone():
        disk.begin([look.piece for look in looks if look.found == "same" or look.piece in todo])
        for piece in todo:
            disk.put(piece)
        report.files += [(path, "of an earlier run", result) for path, result in disk.others(wanted, dry_run=False)]
        disk.end(wanted)
        if not report.live:
            # Where a system has run, its next boot makes our user only if /usr is newer (systemd-update-done(8)).
            os.utime(disk.place("/usr"))
    return True


def _is_renewed(report: Report) -> bool:
    """Say whether a change was made that a running daemon does not see."""
    from powerguard.cli.install.pieces import CREDENTIALS

    return any(state == "updated" or (path == CREDENTIALS and state != "unchanged") for path, _, state in report.files)


def _status(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the status of the running daemon; None if there is none."""
    from powerguard.cli.client import DownError, RefusedError, get

    try:
        return get(args, "/api/v1/status")
    except (DownError, RefusedError):
        return None


def runs_older_code(status: Mapping[str, Any], package: Path) -> bool:
    """Return whether the package was put in place after the daemon of this status had started."""
    return bool(package.stat().st_mtime > status["at"] - status["daemon"]["uptime_s"])


def _is_calm(status: Mapping[str, Any] | None) -> bool:
    """Return whether the running daemon may be restarted: on utility, with no drill under way."""
    return (
        status is not None and status["phase"] == "online" and status["supply"] != "battery" and status["drill"] is None
    )


def _settings(disk: "Disk", report: Report) -> "Settings | None":
    """Return the settings of that system; None if there are none, or invalid ones."""
    from powerguard.cli.install.pieces import SETTINGS
    from powerguard.settings.load import SettingsError, load

    path = disk.place(SETTINGS)
    if not path.exists():
        return None
    try:
        return load(path)
    except SettingsError as error:
        report.doubts.append(f"{error.problems[0]} (powerguard config validate names every mistake)")
        return None


def _credentials(disk: "Disk", settings: "Settings | None") -> "list[InstalledFile]":
    """Return the file that gives the daemon the secrets of its settings, except those of another unit file."""
    from powerguard.cli.install.pieces import CREDENTIALS, InstalledFile, credential_pieces
    from powerguard.cli.secret import named

    if settings is not None:
        return credential_pieces([each.name for each in named(disk.root, settings) if not each.passed_by])
    if CREDENTIALS in disk.manifest.files and disk.state_of(CREDENTIALS) == "same":
        # Settings that are invalid for a moment must not remove the secrets.
        content = disk.place(CREDENTIALS).read_bytes()
        return [InstalledFile(path=CREDENTIALS, what="gives the daemon its secrets", content=content)]
    return []


def _secrets(args: argparse.Namespace, disk: "Disk", report: Report, settings: "Settings") -> bool:
    """Ask for each missing secret on a terminal; else name it. Returns whether one was written."""
    from powerguard.cli.secret import asked_for, named, put, set_command

    missing = [each.name for each in named(disk.root, settings) if each.stands == "missing"]
    is_written = False
    for name in missing:
        if report.dry_run or args.json or not sys.stdin.isatty():
            report.then.append(f"{set_command(disk.root, name)}: it is missing")
            continue
        try:
            report.files.append(
                (str(put(disk.root, name, asked_for(name))), "secret, readable by root only", "written")
            )
            is_written = True
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            report.then.append(f"{set_command(disk.root, name)}: {error}")
    return is_written
