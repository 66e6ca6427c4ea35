"""Is this host what it was before the outage? What was remembered of a good day, what is seen now, and the verdict.

Pure: nothing here looks at anything. A *problem* is why training must not start; a *note* is what a person should know.
"""

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

SCHEMA: Final = "powerguard.host/v1"
ANYWAY: Final = "`powerguard recover --unchecked` trains without it"
_NAMED: Final = 4
_CLOSED: Final = frozenset({errno.EACCES, errno.EPERM})
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU by its UUID and its model."""

    uuid: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs as they are now. because: why they cannot be asked, "" where they can. faults: of single ones.

    cards: NVIDIA devices that the kernel lists, whoever may ask them.
    """

    there: tuple[Gpu, ...] = ()
    faults: tuple[str, ...] = ()
    worn: tuple[str, ...] = ()
    because: str = ""
    cards: int = 0


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
class Found:
    """What training would resume from in a folder: as `host_look_child.Newest`."""

    job: str
    root: str
    step: int | None
    path: str
    state: str
    passed: int = 0
    passed_over: tuple[str, ...] = ()
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder of checkpoints as it is now. errno, because: why it cannot be looked at; late: it did not answer.

    real: where it really lies, with symbolic links followed. mounted: None where the kernel does not list its mounts.
    """

    real: str
    mounted: Mounted | None
    jobs: tuple[Found, ...] = ()
    errno: int = 0
    because: str = ""
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A folder as it was remembered. told_at: wall time at which it last counted as one where something is saved."""

    real: str
    mounted: Mounted | None
    steps: Mapping[str, int]
    told_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The host as it was on a good day."""

    gpus: tuple[Gpu, ...] = ()
    places: Mapping[str, Kept] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The host as it is now. at_s: CLOCK_BOOTTIME."""

    at_s: float
    gpus: Gpus
    places: Mapping[str, Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """problems: why training must not start. notes: what else there is to say."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def judge(before: Memory, now: Look, *, any_gpus: bool = False) -> Verdict:
    """Compare. any_gpus: the settings say that fewer are as good."""
    problems, notes = _gpus(before.gpus, now.gpus)
    if any_gpus:
        problems, notes = [], [*problems, *notes]
    for folder, place in now.places.items():
        kept = before.places.get(folder)
        wrong = _storage(folder, kept, place)
        if wrong and place.errno in _CLOSED and "lies on" not in wrong:
            notes.append(f"{wrong}: judged by its mount alone")
        elif wrong and place.errno in _ABSENT and kept is None:
            notes.append(f"{wrong} (it was never seen there)")
        elif wrong:
            problems.append(wrong)
        notes += [text for found in place.jobs for text in _said(found)]
    problems += _gone(before, now)
    return Verdict(problems=tuple(problems), notes=tuple(notes))


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _gpus(before: Sequence[Gpu], now: Gpus) -> tuple[list[str], list[str]]:
    notes = [f"{text}: its memory cannot be mended any more; exchange it" for text in now.worn]
    if now.because:
        if not before:
            text = f"{now.cards} NVIDIA devices are here, and cannot be asked: {now.because}; not compared"
            return [], [text] if now.cards else []
        return [f"{_count(before)} here, and none can be asked now: {now.because}; {ANYWAY}"], notes
    problems = [f"{text}; {ANYWAY}" for text in now.faults]
    there = {gpu.uuid for gpu in now.there}
    missing = [gpu for gpu in before if gpu.uuid not in there]
    if len(now.there) + len(now.faults) < len(before):
        named = ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        problems.append(
            f"{len(now.there)} of {len(before)} GPUs are there: {named}{more} is missing (nvidia-smi; dmesg; reseat "
            f"it, or cut its power once more); {ANYWAY}"
        )
    elif missing and not now.faults:
        notes.append(f"as many GPUs as before, but not the same: {', '.join(g.uuid for g in missing[:_NAMED])} is gone")
    return problems, notes


def _count(gpus: Sequence[Gpu]) -> str:
    return "one GPU was" if len(gpus) == 1 else f"{len(gpus)} GPUs were"


# --- Storage ----------------------------------------------------------------------------------------------------------


def _storage(folder: str, kept: Kept | None, now: Place) -> str:
    """Say what is wrong with a folder, "" where nothing is."""
    was = None if kept is None else kept.mounted
    if was is not None and now.mounted is not None and not _same(was, now.mounted):
        return (
            f"{folder}: lies on {_named(now.mounted)}, and was on {_named(was)}: it is not mounted (systemctl status "
            f"'*.mount'; mount {was.point}); {ANYWAY}"
        )
    if now.because:
        what = "it does not answer" if now.late else "it cannot be read"
        return f"{folder}: {what}: {now.because}"
    if was is not None and now.mounted is not None and was.writable and not now.mounted.writable:
        return f"{folder}: {_named(now.mounted)} is read-only, and was not: no checkpoint can be saved (dmesg; fsck)"
    return ""


def _same(was: Mounted, now: Mounted) -> bool:
    """Say whether a folder lies where it lay: on the same file system, or at least below the same mount point.

    A device may have another name after a reboot, and an id from it. What counts against it either way: a folder that
    had a file system of its own, and lies on that of "/" now, is the empty one below it.
    """
    if was.on_root != now.on_root:
        return False
    return was.point == now.point or (was.fsid is not None and was.fsid == now.fsid)


def _named(mounted: Mounted) -> str:
    return f"{mounted.point} ({mounted.kind}, {mounted.source})"


def _gone(before: Memory, now: Look) -> list[str]:
    """Say which jobs have nothing left to resume from, in any folder: their training would begin anew."""
    there = {key_of(found) for place in now.places.values() for found in place.jobs if found.path}
    problems = []
    for folder, kept in before.places.items():
        place = now.places.get(folder)
        if place is None or place.because:
            continue  # nobody asks for it any more, or it is told that it cannot be read
        for key, step in kept.steps.items():
            if key not in there and not _storage(folder, kept, place):
                torn = [found for found in place.jobs if found.passed]
                why = f"; passed over: {'; '.join(torn[0].passed_over[:2])}" if torn else ""
                problems.append(
                    f"{folder}: nothing is left to resume {key or 'training'} from, and step {step} was there{why}: "
                    f"bring it back (powerguard checkpoints list {folder}); {ANYWAY}"
                )
    return problems


def key_of(found: Found) -> str:
    """Name a job: as its manifests do, else by its folder."""
    return found.job or found.root


def _said(found: Found) -> list[str]:
    """What a person should know of a checkpoint; most often nothing."""
    said = []
    name = f"{found.job or found.root}"
    if found.passed and found.path:
        torn = "; ".join(found.passed_over[:2])
        said.append(f"{name}: {found.passed} newer passed over ({torn}): resume takes {_step(found)}")
    elif found.passed:
        said.append(f"{name}: {found.because}: {'; '.join(found.passed_over[:2])}")
    if found.path and found.state == "not_judged":
        said.append(f"{name}: {found.path} has no seal: whether it is whole is not known")
    elif found.path and found.because:
        said.append(f"{name}: {_step(found)}: {found.because}")
    return said


def _step(found: Found) -> str:
    return found.path if found.step is None else f"step {found.step}"


# --- Remembering ------------------------------------------------------------------------------------------------------


def remembered(before: Memory, now: Look, told: Sequence[str], *, wall_s: float, keep_s: float) -> Memory:
    """Return what is to be remembered after a look on a good day. What looks wrong stays as it was.

    told: folders that count now; others are forgotten keep_s after they last did.
    """
    gpus = before.gpus if now.gpus.because or now.gpus.faults else now.gpus.there
    places = {}
    for folder, place in now.places.items():
        kept = before.places.get(folder)
        told_at = wall_s if folder in told or kept is None else kept.told_at
        if not 0.0 <= wall_s - told_at <= keep_s:
            continue
        # An empty folder in place of a mount is nothing to remember; one to which the checkpoints have moved is.
        if _storage(folder, kept, place) and not _is_used(place) and place.errno not in _CLOSED:
            if kept is not None:
                places[folder] = kept
            continue
        steps = {key_of(found): found.step for found in place.jobs if found.path and found.step is not None}
        places[folder] = Kept(real=place.real, mounted=place.mounted, steps=steps, told_at=told_at)
    return Memory(gpus=gpus, places=places)


def _is_used(place: Place) -> bool:
    return any(found.path for found in place.jobs)


def to_json(memory: Memory) -> str:
    """Write it down."""
    places = {folder: asdict(kept) for folder, kept in memory.places.items()}
    return json.dumps({"schema": SCHEMA, "gpus": [asdict(gpu) for gpu in memory.gpus], "places": places})


def from_json(text: str) -> Memory:
    """Read it, and believe nothing else. Raises ValueError."""
    try:
        told: dict[str, Any] = json.loads(text)
        if told["schema"] != SCHEMA:
            raise ValueError(told["schema"])
        gpus = tuple(Gpu(uuid=str(each["uuid"]), name=str(each["name"])) for each in told["gpus"])
        places = {str(folder): _kept(each) for folder, each in told["places"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(type(error).__name__) from error
    return Memory(gpus=gpus, places=places)


def _kept(told: Mapping[str, Any]) -> Kept:
    mounted = told["mounted"]
    return Kept(
        real=str(told["real"]),
        mounted=None if mounted is None else _mounted(mounted),
        steps={str(job): int(step) for job, step in told["steps"].items()},
        told_at=float(told["told_at"]),
    )


def _mounted(told: Mapping[str, Any]) -> Mounted:
    return Mounted(
        point=str(told["point"]),
        kind=str(told["kind"]),
        source=str(told["source"]),
        on_root=told["on_root"] is True,
        writable=told["writable"] is True,
        fsid=None if told["fsid"] is None else int(told["fsid"]),
    )
