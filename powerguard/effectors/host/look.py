"""Looks at this host and compares it with what it was: the child of the daemon's `CheckHost`, and doctor's own eyes.

    python -m powerguard.effectors.host.look        stdin: one line of JSON, what to check; stdout: one line, the answer

This process touches neither a folder of checkpoints nor the NVIDIA driver: both hang when they are faulty. One child
for each folder checks it and is killed at its limit; the root helper powerguard-gpu checks the GPUs, or, if it is not
installed, the same program as a child. It is a separate process, so that its faults do not affect the daemon.

Is this host as it was before the outage? The remembered state of a good day, the present state, and the verdict.

The comparison is pure: no input or output. A *problem* is why training must not start; a *note* is what a person should
know.
"""

import asyncio
import contextlib
import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from powerguard.clock import Clock, boottime_s
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host.filesystems import mount_of
from powerguard.effectors.options import GPU_SOCKET
from powerguard.effectors.root_client import RootHelper, objects_in
from powerguard.fields import clean_text

SCHEMA: Final = "powerguard.host/v2"
ANYWAY: Final = "`powerguard recover --unchecked` trains without it"
_NAMED: Final = 4
_CLOSED: Final = frozenset({errno.EACCES, errno.EPERM})
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpu:
    """One GPU by its UUID and its model."""

    uuid: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs as they are now. because: why they cannot be asked, "" if they can. faults: of single ones.

    silent: how many are listed, but do not identify themselves. cards: NVIDIA devices that the kernel lists.
    no_helper: powerguard-gpu is not installed, without which the daemon cannot ask.
    """

    there: tuple[HostGpu, ...] = ()
    silent: int = 0
    faults: tuple[str, ...] = ()
    worn: tuple[str, ...] = ()
    because: str = ""
    cards: int = 0
    no_helper: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mounted:
    """On what a folder lies, as the kernel lists it.

    point, kind, source: such as /data, nfs4, nas:/export. on_root: on the file system of "/" itself. writable: the file
    system, whatever this mount of it allows. fsid: of statvfs(3), None where it was not asked; not every file system
    keeps it over a reboot.
    """

    point: str
    kind: str
    source: str
    on_root: bool
    writable: bool = True
    fsid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """What training would resume from in a folder: as `look_child.JobCheckpoint`."""

    job: str
    root: str
    step: int | None
    path: str
    state: str
    passed: int = 0
    passed_over: tuple[str, ...] = ()
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLook:
    """A folder of checkpoints as it is now. errno, because: why it cannot be looked at; late: it did not answer.

    real: where it really lies, with symbolic links followed. mounted: None where the kernel does not list its mounts.
    """

    real: str
    mounted: Mounted | None
    jobs: tuple[ResumePoint, ...] = ()
    errno: int = 0
    because: str = ""
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedFolder:
    """A folder as it was remembered. current_at: wall time at which it last counted."""

    real: str
    mounted: Mounted | None
    steps: Mapping[str, int]
    current_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The host as it was on a good day."""

    gpus: tuple[HostGpu, ...] = ()
    places: Mapping[str, RememberedFolder] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """The host as it is now."""

    gpus: Gpus
    places: Mapping[str, FolderLook]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostVerdict:
    """problems: why training must not start. notes: other remarks."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def judge(before: HostMemory, now: HostView, *, any_gpus: bool = False) -> HostVerdict:
    """Compare. any_gpus: the settings say that fewer are as good."""
    problems, notes = _gpus(before.gpus, now.gpus)
    if any_gpus:
        problems, notes = [], [*problems, *notes]
    for folder, place in now.places.items():
        kept = before.places.get(folder)
        wrong = _storage(folder, kept, place)
        if wrong and place.errno in _CLOSED and "it is not mounted" not in wrong:
            notes.append(f"{wrong}: judged by its mount alone")
        elif wrong and place.errno in _ABSENT and kept is None:
            notes.append(f"{wrong} (it was never seen there)")
        elif wrong:
            problems.append(wrong)
        notes += [text for found in place.jobs for text in _remarks(found)]
    problems += _gone(before, now)
    return HostVerdict(problems=tuple(problems), notes=tuple(notes))


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _gpus(before: Sequence[HostGpu], now: Gpus) -> tuple[list[str], list[str]]:
    notes = [f"{text}: its memory cannot be repaired any more; replace it" for text in now.worn]
    if now.because:
        if not before:
            text = f"{now.cards} NVIDIA devices are here, but cannot be queried and are not compared: {now.because}"
            return [], [text] if now.cards else []
        return [f"{_count(before)} here, and none can be queried now: {now.because}; {ANYWAY}"], notes
    problems = [f"{text}; {ANYWAY}" for text in now.faults]
    present = {gpu.uuid for gpu in now.there}
    missing = [gpu for gpu in before if gpu.uuid not in present]
    if len(now.there) + now.silent < len(before):
        named = ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        problems.append(
            f"{len(now.there)} of {len(before)} GPUs are there: {named}{more} is missing (nvidia-smi; dmesg; reseat "
            f"it, or cut its power once more); {ANYWAY}"
        )
    elif missing and not now.faults:
        notes.append(f"as many GPUs as before, but not the same: {', '.join(g.uuid for g in missing[:_NAMED])} is gone")
    return problems, notes


def _count(gpus: Sequence[HostGpu]) -> str:
    return "one GPU was" if len(gpus) == 1 else f"{len(gpus)} GPUs were"


# --- Storage ----------------------------------------------------------------------------------------------------------


def _storage(folder: str, kept: RememberedFolder | None, now: FolderLook) -> str:
    """Return what is wrong with a folder, "" if it is fine."""
    before = None if kept is None else kept.mounted
    if before is not None and now.mounted is not None and not _same(before, now.mounted):
        return (
            f"{folder}: is on {_named(now.mounted)}, but was on {_named(before)}: it is not mounted (systemctl status "
            f"'*.mount'; mount {before.point}); {ANYWAY}"
        )
    if now.because:
        what = "it does not answer" if now.late else "it cannot be read"
        return f"{folder}: {what}: {now.because}"
    if before is not None and now.mounted is not None and before.writable and not now.mounted.writable:
        return f"{folder}: {_named(now.mounted)} has become read-only, so no checkpoint can be saved (dmesg; fsck)"
    return ""


def _same(before: Mounted, now: Mounted) -> bool:
    """Say whether a folder lies where it lay: on the same file system, or at least below the same mount point.

    A device may have another name after a reboot, and an id from it. What counts against it either way: a folder that
    had a file system of its own, and lies on that of "/" now, is the empty one below it.
    """
    if before.on_root != now.on_root:
        return False
    return before.point == now.point or (before.fsid is not None and before.fsid == now.fsid)


def _named(mounted: Mounted) -> str:
    return f"{mounted.point} ({mounted.kind}, {mounted.source})"


def _gone(before: HostMemory, now: HostView) -> list[str]:
    """Name the jobs without any checkpoint left, in any folder: their training would restart at step 0."""
    present = {key_of(found) for place in now.places.values() for found in place.jobs if found.path}
    problems = []
    for folder, kept in before.places.items():
        place = now.places.get(folder)
        if place is None or place.because:
            continue  # it no longer counts, or is reported as unreadable
        for key, step in kept.steps.items():
            if key not in present and not _storage(folder, kept, place):
                torn = [found for found in place.jobs if found.passed]
                why = f"; skipped: {'; '.join(torn[0].passed_over[:2])}" if torn else ""
                problems.append(
                    f"{folder}: no checkpoint is left to resume {key or 'training'} from; it had step {step}{why}: "
                    f"bring it back (powerguard checkpoints list {folder}); {ANYWAY}"
                )
    return problems


def key_of(found: ResumePoint) -> str:
    """Name a job: as its manifests do, else by its folder."""
    return found.job or found.root


def _remarks(found: ResumePoint) -> list[str]:
    """Remarks on a checkpoint; usually none."""
    remarks = []
    name = f"{found.job or found.root}"
    if found.passed and found.path:
        torn = "; ".join(found.passed_over[:2])
        remarks.append(f"{name}: skipped {found.passed} newer ones ({torn}): training resumes at {_step(found)}")
    elif found.passed:
        remarks.append(f"{name}: {found.because}: {'; '.join(found.passed_over[:2])}")
    if found.path and found.state == "not_judged":
        remarks.append(f"{name}: {found.path} has no seal, so it is unknown whether it is complete")
    elif found.path and found.because:
        remarks.append(f"{name}: {_step(found)}: {found.because}")
    return remarks


def _step(found: ResumePoint) -> str:
    return found.path if found.step is None else f"step {found.step}"


# --- Remembering ------------------------------------------------------------------------------------------------------


def remembered(
    before: HostMemory, now: HostView, current: Sequence[str], *, wall_s: float, keep_s: float
) -> HostMemory:
    """Return the state to remember after a check on a good day. Faulty parts stay as remembered.

    current: folders that count now; others are forgotten keep_s after they last did, or once they are deleted.
    """
    # Once the helper is removed, nothing asks for GPUs any more: training would wait for them at each return.
    gpus = before.gpus if (now.gpus.because and not now.gpus.no_helper) or now.gpus.faults else now.gpus.there
    places = {}
    for folder, place in now.places.items():
        kept = before.places.get(folder)
        current_at = wall_s if folder in current or kept is None else kept.current_at
        if not 0.0 <= wall_s - current_at <= keep_s:
            continue
        if kept is not None and folder not in current and _is_deleted(kept, place):
            continue
        # An empty folder in place of a mount is not remembered; one to which the checkpoints have moved is.
        if _storage(folder, kept, place) and not _is_used(place) and place.errno not in _CLOSED:
            if kept is not None:
                places[folder] = kept
            continue
        steps = {key_of(found): found.step for found in place.jobs if found.path and found.step is not None}
        places[folder] = RememberedFolder(real=place.real, mounted=place.mounted, steps=steps, current_at=current_at)
    ended = sorted((folder for folder in places if folder not in current), key=lambda folder: places[folder].current_at)
    for folder in ended[:-MOST_ENDED]:
        del places[folder]
    return HostMemory(gpus=gpus, places=places)


def _is_deleted(kept: RememberedFolder, now: FolderLook) -> bool:
    """Say whether a folder is gone from a storage that is there: a scheduler clears a job's own when the job ends."""
    before, storage = kept.mounted, now.mounted
    is_there = before is not None and storage is not None and before.kind == storage.kind and _same(before, storage)
    return now.errno in _ABSENT and is_there


def _is_used(place: FolderLook) -> bool:
    return any(found.path for found in place.jobs)


def to_json(memory: HostMemory) -> str:
    """Write it down."""
    places = {folder: asdict(kept) for folder, kept in memory.places.items()}
    return json.dumps({"schema": SCHEMA, "gpus": [asdict(gpu) for gpu in memory.gpus], "places": places})


def from_json(text: str) -> HostMemory:
    """Read it strictly. Raises ValueError."""
    try:
        content: dict[str, Any] = json.loads(text)
        if content["schema"] != SCHEMA:
            raise ValueError(content["schema"])
        gpus = tuple(HostGpu(uuid=str(each["uuid"]), name=str(each["name"])) for each in content["gpus"])
        places = {str(folder): _kept(each) for folder, each in content["places"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(type(error).__name__) from error
    return HostMemory(gpus=gpus, places=places)


def _kept(content: Mapping[str, Any]) -> RememberedFolder:
    mounted = content["mounted"]
    return RememberedFolder(
        real=str(content["real"]),
        mounted=None if mounted is None else _mounted(mounted),
        steps={str(job): int(step) for job, step in content["steps"].items()},
        current_at=float(content["current_at"]),
    )


def _mounted(content: Mapping[str, Any]) -> Mounted:
    return Mounted(
        point=str(content["point"]),
        kind=str(content["kind"]),
        source=str(content["source"]),
        on_root=content["on_root"] is True,
        writable=content["writable"] is True,
        fsid=None if content["fsid"] is None else int(content["fsid"]),
    )


GPU_LIMIT_S: Final = 18.0
"""Longer than the helper takes for this word (HEALTH_S of gpu/helper.py)."""
FORGOTTEN_S: Final = 86400.0
"""A folder is compared for this long after it last counted as one where a trainer saves."""
MOST_ENDED: Final = 100
"""Most folders that are remembered of jobs that have ended, the newest: hundreds of short jobs may end in a day."""
AT_ONCE: Final = 16
"""Most folders that are looked at at the same time: each costs a process, of which the daemon's unit may have few."""
FILE_LIMIT_S: Final = 2.0
MOST_MEMORY_BYTES: Final = 1 << 20
_MOUNTS: Final = Path("/proc/self/mountinfo")
_PCI: Final = Path("/sys/bus/pci/devices")
_NVIDIA: Final = "0x10de"
_MAX_LETTERS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHost:
    """One look and what came of it."""

    look: HostView
    verdict: HostVerdict
    before: HostMemory


class HostLook:
    """Looks, compares, and returns the state to remember.

    memory: the file of what is remembered. dirs: folders of checkpoints that count now; those that are remembered are
    looked at as well. gpu_socket: of powerguard-gpu; if it is not there, a child asks NVML. verify, any_gpus: as
    the settings' `resume.verify` and `resume.gpus`.
    """

    def __init__(
        self,
        *,
        memory: Path,
        dirs: Sequence[str],
        gpu_socket: str = GPU_SOCKET,
        verify: str = "manifest",
        any_gpus: bool = False,
        spawn: Spawn = run_child,
        clock: Clock = boottime_s,
        mounts: Path = _MOUNTS,
        pci: Path = _PCI,
    ) -> None:
        self._memory = memory
        self._dirs = tuple(os.path.normpath(each) for each in dirs)
        self._verify = verify
        self._any_gpus = any_gpus
        self._helper = RootHelper(
            name="powerguard-gpu", socket=gpu_socket, real=GPU_SOCKET, hangs="powerguard-gpu or the NVIDIA driver hangs"
        )
        self._spawn = spawn
        self._clock = clock
        self._mounts = mounts
        self._pci = pci
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def look(self, limit_s: float) -> CheckedHost:
        """Check all parts at once, within limit_s; make no change."""
        before, trouble = await self._remembered()
        async with asyncio.TaskGroup() as group:
            gpus = group.create_task(self._gpus(min(GPU_LIMIT_S, limit_s)))
            places = {
                folder: group.create_task(self._place(folder, before, limit_s))
                for folder in dict.fromkeys((*self._dirs, *before.places))
            }
        seen = {folder: task.result() for folder, task in places.items()}
        now = HostView(gpus=gpus.result(), places=seen)
        verdict = judge(before, now, any_gpus=self._any_gpus)
        if trouble:
            verdict = replace(verdict, notes=(trouble, *verdict.notes))
        return CheckedHost(look=now, verdict=verdict, before=before)

    def fresh(self, checked: CheckedHost, wall_s: float) -> str | None:
        """Return the state to write on a good day; None if it is already written."""
        fresh = remembered(checked.before, checked.look, self._dirs, wall_s=wall_s, keep_s=FORGOTTEN_S)
        return None if fresh == checked.before else to_json(fresh)

    # --- GPUs ---------------------------------------------------------------------------------------------------------

    async def _gpus(self, limit_s: float) -> Gpus:
        has_helper = self._helper.is_there()
        try:
            if has_helper:
                answer: Any = await self._helper.ask({"word": "health"}, limit_s=limit_s)
            else:
                answer = await self._gpus_by_child(limit_s)
        except EffectorError as error:
            cards = await asyncio.to_thread(_cards, self._pci)
            return Gpus(because=str(error), cards=cards, no_helper=not has_helper)
        return _gpus_of(objects_in(answer, "gpus"))

    async def _gpus_by_child(self, limit_s: float) -> dict[str, Any]:
        """Ask NVML in a child. Under the daemon's own sandbox there is no device for it: it says so."""
        argv = [sys.executable, "-I", "-m", "powerguard.effectors.gpu.helper", "health"]
        try:
            ended = await self._spawn(argv, limit_s=limit_s)
        except OSError as error:
            msg = f"no child can be started ({error.strerror})"
            raise EffectorError(msg) from error
        if ended.timed_out:
            msg = f"no answer within {limit_s:g} s: the NVIDIA driver hangs (dmesg says why: look for Xid)"
            raise EffectorError(msg)
        try:
            answer = json.loads(ended.stdout)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("ok") is not True:
            last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            broke = f"its program ended with status {ended.returncode}: {clean_text(last, 200) or 'no message'}"
            why = str(answer.get("error")) if isinstance(answer, dict) else broke
            msg = f"{why} (powerguard-gpu.socket is not there either: see docs/guides/gpu-and-signals.md)"
            raise EffectorError(msg)
        return answer

    # --- Storage ------------------------------------------------------------------------------------------------------

    async def _place(self, folder: str, before: HostMemory, limit_s: float) -> FolderLook:
        kept = before.places.get(folder)
        by_s = self._clock() + limit_s
        async with self._turns:
            reply = await self._ask_child(folder, max(1.0, by_s - self._clock()))
        real = str(reply.get("real") or (folder if kept is None else kept.real))
        # Only now: an automounter mounts when it is touched.
        mounted = self._mounted(real, reply.get("fsid"))
        return FolderLook(
            real=real,
            mounted=mounted,
            jobs=tuple(_found(each) for each in reply.get("jobs", ())),
            errno=int(reply.get("errno", 0)),
            because=clean_text(str(reply["because"]), 300),
            late=reply.get("hangs") is True,
        )

    async def _ask_child(self, folder: str, limit_s: float) -> dict[str, Any]:
        lock = self._memory.parent / f".look-{sha256(os.fsencode(folder)).hexdigest()[:16]}"
        argv = [sys.executable, "-m", "powerguard.effectors.host.look_child", folder, self._verify]
        try:
            ended = await self._spawn([*argv, f"{0.8 * limit_s:.1f}", str(lock)], limit_s=limit_s)
        except OSError as error:
            return {"because": f"no child can be started ({error.strerror})", "errno": errno.EAGAIN}
        if ended.timed_out:
            return {"because": f"no answer within {limit_s:.0f} s (a hung disk or network file system)", "hangs": True}
        with contextlib.suppress(ValueError, RecursionError):
            reply = json.loads(ended.stdout)
            if isinstance(reply, dict) and "because" in reply:
                if reply.get("hangs") is not True:
                    with contextlib.suppress(OSError):
                        lock.unlink()  # each job may have a folder of its own, and leave a file here for good
                return reply
        lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        return {"because": f"the check of it failed: {lines[-1] if lines else ended.returncode}", "errno": errno.EIO}

    def _mounted(self, path: str, fsid: object) -> Mounted | None:
        try:
            listed = self._mounts.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
        mount, root = mount_of(path, listed), mount_of("/", listed)
        if mount is None or root is None:
            return None
        return Mounted(
            point=mount.point,
            kind=mount.kind,
            source=mount.source,
            on_root=mount.device == root.device,
            writable=mount.writable,
            fsid=fsid if isinstance(fsid, int) and fsid else None,
        )

    # --- Memory -------------------------------------------------------------------------------------------------------

    async def _remembered(self) -> tuple[HostMemory, str]:
        """Return the remembered state, and the error if it cannot be read."""
        path = self._memory

        def read() -> str:
            with path.open("rb") as file:
                return file.read(MOST_MEMORY_BYTES).decode("utf-8")

        try:
            async with asyncio.timeout(FILE_LIMIT_S):
                return from_json(await asyncio.to_thread(read)), ""
        except FileNotFoundError:
            return HostMemory(), ""
        except (OSError, ValueError, TimeoutError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            return HostMemory(), f"{path}: cannot be read ({why}), so the state before the outage is unknown"


def answer(looker: HostLook, checked: CheckedHost, wall_s: float) -> dict[str, Any]:
    """Return the answer for the daemon."""
    return {
        "problems": checked.verdict.problems,
        "notes": checked.verdict.notes,
        "gpus": len(checked.look.gpus.there),
        "folders": len(checked.look.places),
        "detail": details(checked),
        "memory": looker.fresh(checked, wall_s),
    }


def details(checked: CheckedHost) -> dict[str, str | int]:
    """The details of a successful check, for the journal and for messages."""
    places = checked.look.places
    newest = [
        f"{key_of(found)}: {'no step' if found.step is None else f'step {found.step}'} ({found.state}) in {folder}"
        for folder, place in places.items()
        for found in place.jobs
        if found.path
    ]
    storage = [
        f"{folder} on {place.mounted.point} ({place.mounted.kind})" for folder, place in places.items() if place.mounted
    ]
    return {
        "gpus": len(checked.look.gpus.there),
        "storage": clean_text("; ".join(storage), _MAX_LETTERS),
        "newest": clean_text("; ".join(newest), _MAX_LETTERS),
        "notes": clean_text("; ".join(checked.verdict.notes), _MAX_LETTERS),
    }


def _cards(pci: Path) -> int:
    """Count NVIDIA's display and 3D controllers, by the kernel's list of PCI devices."""
    count = 0
    try:
        devices = list(pci.iterdir())
    except OSError:
        return 0
    for device in devices:
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except (OSError, ValueError):
            continue
        count += vendor == _NVIDIA and kind.startswith("0x03")
    return count


def _gpus_of(entries: Sequence[Mapping[str, Any]]) -> Gpus:
    there, faults, worn, silent = [], [], [], 0
    for gpu in entries:
        name = f"GPU {gpu.get('index')}"
        if gpu.get("because") or not isinstance(gpu.get("uuid"), str):
            faults.append(f"{name}: {gpu.get('because') or 'it has no UUID'}")
            silent += 1
            continue
        there.append(HostGpu(uuid=str(gpu["uuid"]), name=str(gpu.get("name"))))
        pending = [str(word) for word in gpu.get("pending") or ()]
        if pending:
            named = ", ".join(word.replace("_", " ") for word in pending)
            faults.append(
                f"{name} ({gpu['uuid']}): {named} pending: it needs a reset (nvidia-smi --gpu-reset) or a reboot"
            )
        errors = gpu.get("memory_errors")
        if isinstance(errors, int) and errors > 0:
            faults.append(
                f"{name} ({gpu['uuid']}): {errors} uncorrected memory errors since its driver was loaded: it needs a "
                "reset (nvidia-smi --gpu-reset) or a reboot"
            )
        if gpu.get("worn") is True:
            worn.append(f"{name} ({gpu['uuid']})")
    return Gpus(there=tuple(there), silent=silent, faults=tuple(faults), worn=tuple(worn))


def _found(entry: Mapping[str, Any]) -> ResumePoint:
    step = entry.get("step")
    return ResumePoint(
        job=clean_text(str(entry.get("job", "")), 128),
        root=str(entry.get("root", "")),
        step=step if isinstance(step, int) else None,
        path=str(entry.get("path", "")),
        state=str(entry.get("state", "")),
        passed=int(entry.get("passed", 0)),
        passed_over=tuple(clean_text(str(text), 300) for text in entry.get("passed_over", ())),
        because=clean_text(str(entry.get("because", "")), 300),
    )


def main() -> int:
    """Look once, as stdin says."""
    request = json.loads(sys.stdin.buffer.read())
    looker = HostLook(
        memory=Path(request["memory"]),
        dirs=request["dirs"],
        gpu_socket=request["gpu_socket"],
        verify=request["verify"],
        any_gpus=request["any_gpus"],
    )
    checked = asyncio.run(looker.look(request["limit_s"]))
    sys.stdout.write(json.dumps(answer(looker, checked, request["wall_s"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
