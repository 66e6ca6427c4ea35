"""The steps of `powerguard install` on the running system: systemd, udev, kernel modules. Each is bounded."""

import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import powerguard
from powerguard.cli.install.pieces import (
    ALWAYS,
    DAEMON,
    PARTS,
    RESUME,
    SENTINEL,
    SENTINEL_AT_BOOT,
    TRAINERS,
    TRAINERS_MOUNT,
    UNITS,
    InstalledFile,
)
from powerguard.cli.install.report import Report
from powerguard.clock import boot_id
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn
from powerguard.effectors.gpu.helper import LIMITS
from powerguard.effectors.host.findings import HELPER, named_to_kill, seconds, services
from powerguard.effectors.options import GPU_SOCKET, SIGNAL_SOCKET
from powerguard.effectors.root_client import RootHelper
from powerguard.effectors.signals.helper import STOPPED_FILE

STEP_LIMIT_S: Final = 60.0
LOOK_LIMIT_S: Final = 10.0
LEAST_STOP_S: Final = 10
_BMC_SIGNS: Final = ("dev/ipmi0", "sys/firmware/dmi/entries/38-0", "sys/bus/acpi/devices/IPI0001:00")
_POLKIT: Final = ("usr/lib/polkit-1/polkitd", "usr/libexec/polkitd", "usr/libexec/polkit-1/polkitd")
_SAFE: Final = re.compile(r"/[A-Za-z0-9_./+-]+")
_HIDDEN: Final = ("/home", "/root", "/run", "/tmp")  # noqa: S108 - folders that our units cannot see


RUN_FOLDERS: Final = (
    "/run/powerguard",
    "/run/powerguard-gpu",
    "/run/powerguard-ipmi",
    "/run/powerguard-off",
    "/run/powerguard-signal",
    "/run/powerguard-slurm",
    TRAINERS,
)
"""Folders that the daemon, the helpers and systemd-tmpfiles have made in memory."""
_SYSTEMDS: Final = re.compile(
    r"(systemd-.*|initrd-.*|user@.*|user-runtime-dir@.*|dbus(-broker|-org\..*)?|(console-|container-|serial-)?getty@?.*"
    r"|autovt@.*|debug-shell|emergency|rescue)\.service"
)
"""Services of systemd and of the bus, whose limits the site must not lower."""


class Step(NamedTuple):
    """One program to run. need: it is skipped without this file; "" for none. may_fail: continue if it fails."""

    argv: tuple[str, ...]
    what: str
    need: str = ""
    may_fail: bool = False


class Offer(NamedTuple):
    """A drop-in for a unit of another package: written only on request."""

    piece: InstalledFile
    why: str


def has_bmc(root: Path) -> bool:
    """Say whether this host has a BMC that its system can talk to, by its device, SMBIOS or ACPI."""
    return any((root / sign).exists() for sign in _BMC_SIGNS)


def has_polkit(root: Path) -> bool:
    """Say whether polkit is installed, which the daemon needs to start units."""
    return any((root / place).exists() for place in _POLKIT)


def wrong_prefix(prefix: str, *, live: bool) -> str:
    """Return why units must not run programs from there as root; "" if they may."""
    if not _SAFE.fullmatch(prefix) or os.path.normpath(prefix) != prefix:
        return (
            f"{prefix!r}: units cannot name it: only plain letters, digits, dots and dashes may be in such a path; "
            "make the virtual environment elsewhere, as in /opt/powerguard"
        )
    hidden = tuple(f"{place}/" for place in _HIDDEN)
    if f"{prefix}/".startswith(hidden):
        return f"{prefix}: units cannot see this folder (ProtectHome=): install it into /opt/powerguard"
    if not live:
        return ""
    program = Path(prefix) / "bin" / "powerguard"
    if not program.exists():
        return f"{program}: is not there: name the virtual environment with --prefix"
    python = Path(os.path.realpath(f"{prefix}/bin/python"))
    if f"{python}".startswith(hidden):
        return (
            f"{python}: units cannot see this Python (ProtectHome=): make the virtual environment again with a Python "
            "elsewhere, such as /usr/bin/python3"
        )
    package = Path(powerguard.__file__).resolve().parent
    if f"{package}/".startswith(hidden):
        return f"{package}: units cannot see this folder (ProtectHome=): install powerguard without --editable"
    programs = (program, python, package)
    return next(filter(None, map(not_roots, programs)), "") or roots_alone([*programs, *_beside(package)], prefix)


def _beside(package: Path) -> list[Path]:
    """Return the other installed packages, which were not all written under the same umask."""
    beside = package.parent.iterdir() if package.parent.name == "site-packages" else ()
    return sorted(each for each in beside if each.name.isidentifier() and each.is_dir())


def roots_alone(programs: Iterable[Path], prefix: str) -> str:
    """Return why the daemon, which is not root, cannot run these programs, as of a pip with umask 027; "" if it can."""
    for each in dict.fromkeys(place for path in programs for place in (path, *path.parents)):
        status = each.stat()
        needed = stat.S_IXOTH if stat.S_ISDIR(status.st_mode) else stat.S_IROTH
        if status.st_uid == status.st_gid == 0 and not status.st_mode & needed:
            return f"{each}: only root can read it, but the daemon runs as user powerguard (chmod -R go+rX {prefix})"
    return ""


def not_roots(path: Path) -> str:
    """Return why other users could change the programs that units run as root; "" if they cannot."""
    for each in (path, *path.parents):
        try:
            status = each.stat()
        except OSError as error:
            return f"{each}: {error.strerror}"
        if status.st_uid != 0 or (status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX):
            return f"{each}: other users than root can write it, but units would run it as root (chown, chmod go-w)"
    return ""


def steps(parts: Collection[str], *, with_daemon: bool) -> list[Step]:
    """Return the steps that put the files into effect, in order. Each can be repeated."""
    made = [
        Step(("systemd-sysusers", "powerguard.conf"), "make the user and groups"),
        Step(("systemctl", "daemon-reload"), "read the units"),
        Step(("systemctl", "start", TRAINERS_MOUNT), "mount the folder of trainers' sockets", may_fail=True),
        Step(("systemd-tmpfiles", "--create", "powerguard.conf"), "make the folders"),
        Step(("udevadm", "control", "--reload"), "read the rules of devices", "/run/udev/control"),
        Step(
            ("udevadm", "trigger", "--action=change", "--subsystem-match=rtc"),
            "give the daemon access to the clock",
            "/dev/rtc0",
        ),
    ]
    if "ipmi" in parts:
        # It refuses to load where the BMC has another interface, as on many ARM boards: ipmi_ssif loads itself there.
        made.append(Step(("modprobe", "ipmi_si"), "load the BMC's usual driver", may_fail=True))
        made.append(Step(("modprobe", "ipmi_devintf"), "load the BMC's device"))
        # Words about a shared UPS's load come so often that it never ends by itself. The next word starts it again.
        made.append(Step(("systemctl", "stop", "powerguard-ipmi.service"), "end the BMC helper of an older version"))
    started = [*ALWAYS, *(unit for part in PARTS if part in parts for unit in PARTS[part])]
    listening = [unit for unit in started if unit.endswith((".socket", ".path"))]
    made.append(Step(("systemctl", "start", *listening), "listen"))
    if with_daemon:
        made.append(Step(("systemctl", "start", DAEMON), "start the daemon"))
    return _there(made)


def _has_sockets() -> bool:
    folder = Path(TRAINERS)
    return folder.is_dir() and any(folder.iterdir())


def shares_run() -> str:
    """Return why trainers' sockets are in the memory of /run, "" if they have their own file system."""
    if os.path.ismount(TRAINERS):
        return ""
    if _has_sockets():
        because = "trainers have sockets there, so it will be mounted at the next boot"
    else:
        because = f"see systemctl status '{TRAINERS_MOUNT}'"
    return f"{TRAINERS} is not a separate file system, so every user can fill /run: {because}"


class Undo(NamedTuple):
    """A change that a root helper must put back while the file exists, and the word for it."""

    helper: RootHelper
    word: str
    file: str
    what: str


_UNDO: Final = (
    Undo(
        RootHelper(name="powerguard-gpu", socket=GPU_SOCKET, real=GPU_SOCKET, hangs="the driver hangs"),
        "restore",
        LIMITS,
        "put GPU power limits back",
    ),
    Undo(
        RootHelper(name="powerguard-signal", socket=SIGNAL_SOCKET, real=SIGNAL_SOCKET),
        "continue",
        STOPPED_FILE,
        "continue stopped trainers",
    ),
)


def undone() -> list[Undo]:
    """Return the changes that are still to be put back."""
    return [each for each in _UNDO if Path(each.helper.socket).with_name(each.file).exists()]


async def put_back(wanted: Iterable[Undo], report: Report) -> None:
    """Have the helpers put everything back, and report each result."""
    for each in wanted:
        why = ""
        try:
            if not report.dry_run:
                await each.helper.ask({"word": each.word}, limit_s=STEP_LIMIT_S)
        except EffectorError as error:
            why = str(error)
        report.failed = report.failed or bool(why)
        report.steps.append(
            (f"{each.helper.name}: {each.word}", each.what, f"failed: {why}" if why else report.result_word("done"))
        )


def steps_to_end(paths: Iterable[str]) -> list[Step]:
    """Return the steps that stop all sockets. paths: the installed ones."""
    units = [Path(path).name for path in paths if str(Path(path).parent) == UNITS]
    listening = sorted(unit for unit in units if unit.endswith((".socket", ".path")))
    made = [Step(("systemctl", "stop", *listening), "stop the sockets")]
    if TRAINERS_MOUNT in units and os.path.ismount(TRAINERS) and not _has_sockets():
        unmount = ("systemctl", "stop", TRAINERS_MOUNT)
        made.append(Step(unmount, "unmount the folder of trainers' sockets", may_fail=True))
    made.append(Step(("systemctl", "disable", "--now", SENTINEL), "stop the sentinel", SENTINEL_AT_BOOT))
    return _there(made)


def remove_folders(report: Report) -> None:
    """Remove our folders in /run and the files in them, and report each.

    A change that a helper must still put back stays.
    """
    kept = {str(Path(each.helper.socket).parent): f"kept: {each.file} is still to be put back" for each in undone()}
    if _has_sockets():
        kept[TRAINERS] = "kept: trainers have sockets there; gone at the next boot"
    for folder in filter(os.path.exists, RUN_FOLDERS):
        result = kept.get(folder) or report.result_word("removed")
        if folder not in kept and not report.dry_run:
            try:
                for entry in Path(folder).iterdir():
                    if folder != TRAINERS and (entry.is_symlink() or not entry.is_dir()):
                        entry.unlink()
                Path(folder).rmdir()
            except OSError as error:
                result = f"left: {error.strerror or error}"
        report.files.append((folder, "until the next boot", result))


RESTART_DAEMON: Final = Step(("systemctl", "restart", DAEMON), "restart the daemon, to use the new files")
STOP_DAEMON: Final = Step(("systemctl", "stop", DAEMON), "stop the daemon")


def steps_afterwards() -> list[Step]:
    """Return the steps that make the system forget the removed files."""
    made = [
        Step(("systemctl", "daemon-reload"), "forget the units"),
        Step(("udevadm", "control", "--reload"), "drop the rule of the clock", "/run/udev/control"),
    ]
    return _there(made)


def _there(steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if not step.need or Path(step.need).exists()]


async def is_powering_off(spawn: Spawn, order: Path = Path("/run/powerguard-off/off")) -> bool:
    """Return whether powerguard-off was ordered to power off: then it must not be removed.

    It also runs for a moment after a question of the daemon or doctor. At an order it writes the id of this boot into
    `order`. A file that cannot be read counts as an order.
    """
    if (await _show(spawn, HELPER, "ActiveState")).get("ActiveState") not in {"active", "activating", "deactivating"}:
        return False
    return _is_ordered(order)


def _is_ordered(order: Path) -> bool:
    try:
        return order.read_bytes().strip() == boot_id().encode()
    except OSError:
        return True


async def is_up(spawn: Spawn) -> bool:
    """Say whether the daemon runs already."""
    return (await _show(spawn, DAEMON, "ActiveState")).get("ActiveState") in {"active", "activating", "reloading"}


async def is_older_sentinel(spawn: Spawn, placed_s: float) -> bool:
    """Return whether a sentinel runs that was started before the package was put in place. placed_s: wall time."""
    shown = await _show(spawn, SENTINEL, "ActiveState", "ExecMainStartTimestampMonotonic")
    started_us = shown.get("ExecMainStartTimestampMonotonic", "")
    if shown.get("ActiveState") not in {"active", "reloading"} or not started_us.isdecimal():
        return False
    for_s = time.clock_gettime(time.CLOCK_MONOTONIC) - int(started_us) / 1e6
    return placed_s > time.time() - for_s  # noqa: TID251 - the time of a file


async def carry_out(spawn: Spawn, steps: Iterable[Step], report: Report) -> None:
    """Run steps in order, even if some fail, and report each result."""
    for step in steps:
        why = "" if report.dry_run else await _run(spawn, step)
        report.failed = report.failed or (bool(why) and not step.may_fail)
        report.steps.append((" ".join(step.argv), step.what, f"failed: {why}" if why else report.result_word("done")))


async def _run(spawn: Spawn, step: Step) -> str:
    """Run one step; return "" on success, else why not."""
    try:
        ended = await spawn(step.argv, limit_s=STEP_LIMIT_S)
    except OSError as error:
        return f"{step.argv[0]}: {error.strerror or error}"
    if ended.timed_out:
        return f"did not end within {STEP_LIMIT_S:g} s"
    if ended.returncode == 0:
        return ""
    lines = (ended.stderr or ended.stdout).decode("utf-8", "replace").strip().splitlines()
    return f"exit status {ended.returncode}: {lines[-1] if lines else 'no output'}"


async def offers(spawn: Spawn, force_after_s: float) -> list[Offer]:
    """Return drop-ins for units that take longer to stop than the host has, or leave processes behind."""
    active = await services(spawn) or []
    made: list[Offer] = []
    stop_s = max(int(force_after_s / 2), LEAST_STOP_S)
    slow = [unit["Id"] for unit in active if seconds(unit.get("TimeoutStopUSec", "")) > force_after_s]
    # For user@1000.service and the like the template: other users' instances are as slow.
    for name in dict.fromkeys(re.sub(r"@.*(?=\.service$)", "@", each) for each in slow):
        if not _is_left_alone(name):
            text = f"# By powerguard install --with drop-ins.\n[Service]\nTimeoutStopSec={stop_s}\n"
            why = f"{name} may take longer to stop than the host has ({force_after_s:g} s): {stop_s} s"
            path = f"{UNITS}/{name}.d/50-powerguard-stop.conf"
            made.append(Offer(InstalledFile(path=path, what=why, content=text.encode(), is_choice=True), why))
    properties = await _show(spawn, HELPER, "Environment")
    named = named_to_kill(properties.get("Environment", ""))
    loose = sorted(unit["Id"] for unit in active if unit.get("KillMode") in {"process", "none"})
    if new := [name for name in loose if name not in named and not _is_left_alone(name)]:
        kill = " ".join([*named, *new])
        text = f'# By powerguard install --with drop-ins.\n[Service]\nEnvironment="POWERGUARD_OFF_KILL={kill}"\n'
        why = f"kill at the deadline processes that these leave behind (KillMode=process): {', '.join(new)}"
        path = f"{UNITS}/{HELPER}.d/50-powerguard-kill.conf"
        made.append(Offer(InstalledFile(path=path, what=why, content=text.encode(), is_choice=True), why))
    return made


def _is_left_alone(name: str) -> bool:
    return name.startswith("powerguard") or _SYSTEMDS.fullmatch(name) is not None


async def doubts(spawn: Spawn, resume: Sequence[str]) -> list[str]:
    """Return the errors of the training units, and any ordering cycle that our units have closed."""
    found: list[str] = []
    for unit in resume:
        properties = await _show(spawn, unit, "LoadState", "WantedBy", "RequiredBy")
        if properties.get("LoadState") != "loaded":
            state = properties.get("LoadState", "systemd cannot be asked")
            found.append(f"{unit}: {state}: it would not start after a power-off")
        others = {*properties.get("WantedBy", "").split(), *properties.get("RequiredBy", "").split()} - {RESUME}
        if others:
            at_boot = " ".join(sorted(others))
            found.append(f"{at_boot} starts {unit} too, at every boot: systemctl disable {unit}")
    return [*found, *await _circles(spawn)]


async def _circles(spawn: Spawn) -> list[str]:
    """Ask systemd whether its boot units form an ordering cycle with ours: it would then skip one of them."""
    try:
        ended = await spawn(("systemd-analyze", "verify", "--man=no", "default.target"), limit_s=LOOK_LIMIT_S)
    except OSError:
        return []
    output = ended.stderr.decode("utf-8", "replace")
    circle = re.findall(r"(?:Found ordering cycle|Found dependency) on (\S+)/start", output)
    if DAEMON not in circle:
        return []
    return [f"these wait for each other at boot, and systemd would leave one out: {' '.join(dict.fromkeys(circle))}"]


async def _show(spawn: Spawn, unit: str, *properties: str) -> dict[str, str]:
    try:
        argv = ("systemctl", "show", unit, f"--property={','.join(properties)}")
        ended = await spawn(argv, limit_s=LOOK_LIMIT_S)
    except OSError:
        return {}
    lines = ended.stdout.decode("utf-8", "replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)
