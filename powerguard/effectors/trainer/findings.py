"""Checks of `powerguard doctor` on checkpoint folders: would one survive a power cut, and is there room?"""

import asyncio
import json
import stat
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host.filesystems import NETWORKED, VOLATILE, kind_of
from powerguard.effectors.host.findings import Finding, is_closed, unfit
from powerguard.effectors.host.power import DAEMON_USER
from powerguard.effectors.trainer.options import AnyTrainerOptions, SignalOptions, TrainerOptions

Ask = Callable[[dict[str, object]], Awaitable[dict[str, Any]]]
LOOK_LIMIT_S: Final = 5.0
OLD_S: Final = 2 * 3600.0
"""Training whose newest checkpoint is older would lose more than an outage should cost."""
_GUIDE: Final = "docs/guides/checkpoints.md"
_SIGNALS: Final = "docs/guides/gpu-and-signals.md"
_MOUNTS: Final = Path("/proc/self/mountinfo")


async def findings(
    folders: Mapping[str, str], *, alive: Collection[str], spawn: Spawn = run_child, mounts: Path = _MOUNTS
) -> list[Finding]:
    """Return the findings. folders: where each trainer saves, by its name. alive: those that run now."""
    if not folders:
        return []
    mountinfo = _listed(mounts)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_folder(name, folder, kind_of(folder, mountinfo), is_alive=name in alive, spawn=spawn))
            for name, folder in folders.items()
        ]
    return [finding for task in tasks for finding in task.result()]


async def ways(options: Sequence[AnyTrainerOptions], ask: Ask, *, user: str = DAEMON_USER) -> list[Finding]:
    """Check before an outage that signals may be sent, programs started and folders read.

    ask: of powerguard-signal. user: the daemon's.
    """
    found: list[Finding] = []
    signals: list[tuple[str, SignalOptions]] = []
    for trainer in options:
        way = trainer.fallback if isinstance(trainer, TrainerOptions) else trainer
        if trainer.checkpoint_dir is not None and await is_closed(trainer.checkpoint_dir, user=user):
            text = f"{trainer.checkpoint_dir}: user {user} may not read it: the daemon sees no checkpoint there"
            fix = f"let {user} read it (setfacl -m u:{user}:rx), and enter the folders above it (u:{user}:x)"
            found.append(Finding(f"trainer.{trainer.name}", "WARN", text, fix))
        if isinstance(way, SignalOptions):
            signals.append((trainer.name, way))
        elif way is not None and (because := await unfit(way.command[0], user=user)):
            found.append(Finding(f"trainer.{trainer.name}", "FAIL", because, "correct its command"))
    if not signals:
        return found
    try:
        answer = await ask({"word": "list"})
    except EffectorError as error:
        verdict: Any = "WARN" if "only powerguard and root may" in str(error) else "FAIL"
        text = f"its signal is sent by powerguard-signal: {error}"
        return [*found, *(Finding(f"trainer.{name}", verdict, text, _SIGNALS) for name, _ in signals)]
    units = answer.get("units")
    listed = {(each.get("unit"), each.get("signal")) for each in units} if isinstance(units, list) else set()
    for name, way in signals:
        if (way.unit, way.signal) in listed:
            text = f"SIG{way.signal} may be sent to {way.unit}"
            found.append(Finding(f"trainer.{name}", "PASS", text))
        else:
            broken = answer.get("units_because")  # then another line would not help
            because = broken or "/etc/powerguard/signals does not list it"
            text = f"SIG{way.signal} may not be sent to {way.unit}: {because}"
            fix = _SIGNALS if broken else f"echo '{way.unit} {way.signal}' >> /etc/powerguard/signals"
            found.append(Finding(f"trainer.{name}", "FAIL", text, fix))
    return found


def crowding(folder: str | None, run: str = "/run") -> list[Finding]:
    """Check that the trainers' folder is not part of /run itself, where any user could fill all of /run."""
    try:
        found = None if folder is None else Path(folder).stat()
        if found is None or not found.st_mode & stat.S_IWOTH or found.st_dev != Path(run).stat().st_dev:
            return []
    except OSError:
        return []
    text = f"{folder}: is part of {run}, so every user can fill {run}"
    return [Finding("trainers.folder", "WARN", text, "powerguard install; while trainers have sockets there: reboot")]


def _listed(mounts: Path) -> str:
    try:
        return mounts.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""  # then the kind of each folder is unknown


async def _folder(name: str, folder: str, kind: str, *, is_alive: bool, spawn: Spawn) -> list[Finding]:
    """Look at one folder, in a child: even stat() hangs on a dead file server."""
    title = f"checkpoints.{name}"
    if kind in VOLATILE:
        text = f"{folder} is in memory ({kind}): a power-off erases it"
        return [Finding(title, "FAIL", text, "save to a disk of this host")]
    found = []
    if kind in NETWORKED:
        text = f"{folder} is on the network ({kind}): in an outage, switches and the server may be without power"
        found.append(Finding(title, "WARN", text, f"save to a local disk, and copy from there ({_GUIDE})"))
    argv = [sys.executable, "-m", "powerguard.effectors.trainer.folder_child", folder]
    try:
        ended = await spawn(argv, limit_s=LOOK_LIMIT_S)
    except OSError as error:
        return [*found, Finding(title, "WARN", f"{folder}: no child can be started ({error.strerror})")]
    if ended.timed_out:
        text = f"{folder} does not answer within {LOOK_LIMIT_S:g} s, so a checkpoint there would hang"
        return [*found, Finding(title, "FAIL", text, "check its disk or server")]
    try:
        answer: dict[str, Any] = json.loads(ended.stdout) if ended.returncode == 0 else {}
    except ValueError:
        answer = {}
    if not answer:
        reason = ended.stderr.decode("utf-8", "replace").strip()[-200:] or f"status {ended.returncode}"
        return [*found, Finding(title, "WARN", f"{folder}: cannot be checked: {reason}", "run doctor as root")]
    judged = judge(title, folder, answer, is_alive=is_alive)
    return [*found, *judged]


def judge(title: str, folder: str, answer: Mapping[str, Any], *, is_alive: bool) -> list[Finding]:
    """Return the findings on the child's answer."""
    newest, free = answer["newest"], int(answer["free_bytes"])
    if newest is None:
        return [
            Finding(
                title, "WARN", f"{folder}: no checkpoint there yet", "wait for the first one, or read the trainer's log"
            )
        ]
    size, age_s = int(newest["size_bytes"]), float(newest["age_s"])
    found = []
    room = free + int(answer["slot_bytes"])
    if room < 2 * size:
        text = f"{folder}: {_gb(room)} free, a checkpoint takes {_gb(size)}: one more fits, but not two"
        verdict: Any = "FAIL" if room < size else "WARN"
        text = (
            f"{folder}: {_gb(room)} free, a checkpoint takes {_gb(size)}: the next one does not fit"
            if room < size
            else text
        )
        found.append(
            Finding(
                title, verdict, text, f"free space, or keep fewer checkpoints (powerguard checkpoints prune {folder})"
            )
        )
    if newest["state"] == "not_sealed":
        text = f"{newest['path']} is not sealed: after a power cut it may be incomplete without a sign of it"
        found.append(Finding(title, "WARN", text, f"a folder for each save, and powerguard seal at its end ({_GUIDE})"))
    if is_alive and age_s > OLD_S:
        text = f"{folder}: the newest checkpoint is {age_s / 3600:.1f} h old"
        found.append(Finding(title, "WARN", text, "save more often: an outage can cost this much training"))
    step = "" if newest["step"] is None else f"step {newest['step']}, "
    text = f"{folder}: {step}{_gb(size)}, {age_s / 60:.0f} min old; {_gb(free)} free"
    return found or [Finding(title, "PASS", text)]


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
