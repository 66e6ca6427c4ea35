"""`powerguard uninstall`: remove exactly what `powerguard install` has put in place."""

import argparse
import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

from powerguard.cli.install.report import EX_NOT_DONE, Report
from powerguard.cli.shared import fail

if TYPE_CHECKING:
    from powerguard.cli.install.disk import Disk

KEPT: Final = (
    ("/etc/powerguard", "settings and secrets"),
    ("/var/lib/powerguard", "journal, outages and measurements"),
    ("/var/lib/powerguard-off", "how long the last stop took"),
    ("/var/lib/powerguard-sentinel", "intents of the sentinel"),
)

SLURM_SOCKET: Final = "powerguard-slurm.socket"
LEFT_MARKED: Final = (
    "if `scontrol show node` shows a Reason that begins with `powerguard:`, "
    "give the node back: scontrol update NodeName=NAME State=RESUME"
)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Stop the daemon, put back what it may have left changed (GPU power limits, stopped trainers), and "
        "remove exactly what `powerguard install` has put in place. Settings, secrets, journal, the user and the "
        "virtual environment stay. Exit 0: done; 1: not done, or not completely."
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be done")
    parser.add_argument(
        "--force",
        action="store_true",
        help="continue in an outage, while hosts wait for the sentinel here, while upsmon needs our script, and if a "
        "step cannot be undone or stopped",
    )
    parser.add_argument("--root", metavar="DIR", default="/", help="root of an image, instead of this system")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from powerguard.cli.install.disk import Disk, PlaceError

    report = Report("uninstall", Path(args.root).resolve(), args.dry_run)
    if report.refused:
        return fail(args, "uninstall", report.refused, EX_NOT_DONE)
    disk = Disk(report.root)
    try:
        if not disk.load():
            msg = "powerguard is not installed here (or an uninstall has ended)"
            return fail(args, "uninstall", msg, EX_NOT_DONE)
        if wrong := _uninstall(args, disk, report):
            return fail(args, "uninstall", wrong, EX_NOT_DONE)
    except PlaceError as error:
        return fail(args, "uninstall", str(error), EX_NOT_DONE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return fail(args, "uninstall", f"{where}{error.strerror or error}; it can be run again", EX_NOT_DONE)
    return report.show(as_json=args.json)


def outage_under_way(args: argparse.Namespace) -> str:
    """Return what an active outage would lose, by the daemon's phase or its last state in this boot.

    A power-on method that is not disarmed yet counts as well: the BMC's watchdog would cut the power of this host.
    """
    from powerguard.cli.client import DownError, RefusedError, get, settle
    from powerguard.cli.status import JOURNAL, last_known
    from powerguard.clock import boot_id

    args.journal = None
    settle(args)  # without settings, or with wrong ones, the default places are asked
    armed: set[str] = set()
    try:
        status = get(args, "/api/v1/status")
        phase = status.get("phase", "")
        armed = {each["name"] for each in status.get("power_on", {}).get("armed", ())}
    except (DownError, RefusedError):
        known, _ = last_known(args.journal or JOURNAL)
        phase = "" if known is None or known["boot_id"] != boot_id() else f"{known['phase']}, as the daemon last wrote"
    if phase.partition(",")[0] in {"", "online"}:
        if not armed:
            return ""
        return (
            f"the power-on methods of an outage are not disarmed yet ({', '.join(sorted(armed))}): without powerguard "
            "they can cut this host's power, or power it on, at a wrong time"
        )
    return (
        f"an outage is active (phase {phase}): without powerguard, this host loses power when the battery is "
        "empty, and training does not start again"
    )


def needed_by_upsmon(disk: "Disk") -> str:
    """Return where upsmon's SHUTDOWNCMD runs our script, and what its removal would cause; "" if it does not."""
    from powerguard.cli.imports.draft import ReadError, read
    from powerguard.cli.imports.nut import FOLDERS, nut_words
    from powerguard.cli.install.disk import PlaceError
    from powerguard.cli.install.pieces import LIBRARY

    hook = f"{LIBRARY}/nut/powerguard-shutdown"
    for folder in FOLDERS if hook in disk.manifest.files else ():
        with contextlib.suppress(ReadError, PlaceError):
            path = disk.place(f"{folder}/upsmon.conf")
            commands = [line for line in nut_words(read(path), str(path)) if line.words[0] == "SHUTDOWNCMD"]
            if commands and hook in " ".join(commands[-1].words):  # the last one counts
                return f"{commands[-1].where}: SHUTDOWNCMD runs {hook}, without which upsmon cannot shut this host down"
    return ""


def waiting_for_sentinel(disk: "Disk") -> str:
    """Return which hosts the sentinel of that system is still to power on; "" if there are none."""
    import time

    from powerguard.cli.install.pieces import SENTINEL_SETTINGS
    from powerguard.clock import boot_id, boottime_s
    from powerguard.sentinel.options import SentinelSettings, load
    from powerguard.sentinel.store import NAME, UNREAD, Clocks, IntentFileError, IntentTable, decode
    from powerguard.settings.load import SettingsError

    try:
        state = load(disk.place(SENTINEL_SETTINGS)).state
    except SettingsError:
        state = SentinelSettings.model_fields["state"].default
    now = Clocks(boot_id=boot_id(), boottime_s=boottime_s(), wall_s=time.time())  # noqa: TID251 - as of another boot
    table = IntentTable()
    for name in (NAME, UNREAD):  # the newer one first
        with contextlib.suppress(OSError, IntentFileError):
            table = table.over(decode(disk.place(f"{state}/{name}").read_bytes(), now))
    waiting = (intent.host for intent in table.intents.values() if intent.expires_s > now.boottime_s)
    hosts = ", ".join(sorted(waiting))
    return f"the sentinel here is still to power on {hosts}: without it, they stay off" if hosts else ""


def _needed(args: argparse.Namespace, disk: "Disk", report: Report) -> str:
    """Return what others still need of it; "" if nothing, or with --force, which makes it a warning."""
    needs = (
        (needed_by_upsmon(disk), "put the former command back and restart upsmon (docs/guides/nut.md)"),
        (waiting_for_sentinel(disk), "wait until they are on"),
    )
    for needed, right in needs:
        if needed and not args.force:
            return f"{needed}: {right}, or use --force"
        if needed:
            report.doubts.append(needed)
    return ""


def _uninstall(args: argparse.Namespace, disk: "Disk", report: Report) -> str:
    """Stop the services, then remove; return why not, "" if done."""
    import asyncio

    from powerguard.cli.install import host
    from powerguard.effectors.child import run_child

    if needed := _needed(args, disk, report):
        return needed
    if report.live:
        if asyncio.run(host.is_powering_off(run_child)):
            return "a power-off is under way, and its helper must not be removed: wait for the next boot"
        if outage := outage_under_way(args):
            if not args.force:
                return f"{outage}: wait for its end, or use --force"
            report.doubts.append(outage)
        asyncio.run(host.carry_out(run_child, [host.STOP_DAEMON], report))
        asyncio.run(host.put_back(host.undone(), report))
        if report.failed and not args.force:
            report.then.append("no file was removed: repair the failed steps, or use --force")
            return ""
        asyncio.run(host.carry_out(run_child, host.steps_to_end(disk.manifest.files), report))
        host.remove_folders(report)
    if any(path.endswith(f".wants/{SLURM_SOCKET}") for path in disk.manifest.files):
        report.then.append(LEFT_MARKED)
    _take_away(disk, report)
    if report.live:
        asyncio.run(host.carry_out(run_child, host.steps_afterwards(), report))
    for path, what in KEPT:
        if disk.place(path).exists():
            report.files.append((path, what, "kept"))
    prefix = disk.manifest.prefix
    is_alone = disk.place(f"{prefix}/pyvenv.cfg").exists()  # else other programs are there, as in /usr
    remove = f"rm -r {prefix}" if is_alone else f"{prefix}/bin/python -m pip uninstall powerguard"
    inside = "" if report.root == Path("/") else f"chroot {shlex.quote(str(report.root))} "
    report.then.append(f"{inside}{remove} and {inside}userdel powerguard, to remove the rest")
    return ""


def _take_away(disk: "Disk", report: Report) -> None:
    """Remove every unchanged path of the manifest, the manifest last."""
    from powerguard.cli.install.disk import MANIFEST

    for path in sorted(disk.manifest.files):
        state = disk.state_of(path)
        if state == "changed":
            report.files.append((path, "", "left: was changed since"))
        elif state == "same":
            report.files.append((path, "", report.result_word("removed")))
    if report.dry_run:
        return
    with disk.alone():
        disk.begin_to_remove()
        for path in sorted(disk.manifest.files):
            disk.take_away(path)
        disk.settle()
        disk.take_folders_away()  # while the manifest names them: who is killed here can go on
        disk.place(MANIFEST).unlink()
        disk.take_folders_away()
