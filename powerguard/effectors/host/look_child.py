"""Child process: check a folder of checkpoints, and print what training would resume from, as one line of JSON.

    python -m powerguard.effectors.host.look_child DIR manifest|full LIMIT_S [LOCK]

A separate process, because the folder may lie on a file system that hangs: then it is killed, or, if even that fails,
left behind. LOCK is a file that it holds meanwhile: while one hangs, a second one waits for a moment and reports that
without a check. It makes no change. It always exits 0 with its line, unless it is killed.
"""

import contextlib
import fcntl
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from powerguard.trainer.seal.folder import glance, verify
from powerguard.trainer.seal.manifest import SEAL, SealError, step_in
from powerguard.trainer.store.folders import Found, Refused, look
from powerguard.trainer.store.manifest import StoreError, step_of
from powerguard.trainer.store.shards import ShardReader, Snapshot, over_chunks
from powerguard.trainer.tiers.base import SET_ASIDE

MOST_ROOTS: Final = 64
"""Most jobs below one folder that are checked."""
MOST_ENTRIES: Final = 20_000
"""Most checkpoints of a folder that are checked by name."""
MOST_PASSED_OVER: Final = 8
"""Most skipped checkpoints that are listed by name."""
_FILES: Final = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_READERS: Final = 4


class _TimeUpError(Exception):
    """The time was not enough to read all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheckpoint:
    """What training would resume from, of one job; step None: no usable checkpoint.

    state: read (every byte of it just now), whole (names and sizes hold), partly (as far as it was read within the
    time), not_judged (its framework writes no digests). job: its name, "" if unknown. passed_over: newer ones
    that are not whole, and why; passed: how many.
    """

    job: str
    root: str
    step: int | None = None
    path: str = ""
    state: str = "whole"
    passed: int = 0
    passed_over: list[str] = field(default_factory=list)
    because: str = ""


def main(argv: list[str]) -> int:
    """Check and print."""
    folder, depth, by_s = Path(argv[0]), argv[1], time.perf_counter() + float(argv[2])
    with contextlib.ExitStack() as stack:
        if len(argv) > 3 and not _alone(argv[3], stack, float(argv[2]) / 4):
            answer: dict[str, Any] = {"hangs": True, "because": "an earlier check of it still hangs"}
        else:
            answer = _look_at(folder, depth, by_s)
    sys.stdout.write(json.dumps(answer))
    return 0


def _alone(path: str, stack: contextlib.ExitStack, wait_s: float) -> bool:
    """Hold the lock, for which it waits wait_s; True also where there can be none (a folder that is not ours)."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return True
    stack.callback(os.close, file)

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(wait_s, 0.01))
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return True


def _look_at(folder: Path, depth: str, by_s: float) -> dict[str, Any]:
    answer: dict[str, Any] = {"hangs": False, "because": "", "errno": 0}
    try:
        space = os.statvfs(folder)
        answer |= {"fsid": space.f_fsid, "real": os.path.realpath(folder)}
        answer["jobs"] = [asdict(found) for root in _roots(folder) for found in _newest(root, depth, by_s)]
    except OSError as error:
        answer |= {"because": error.strerror or str(error), "errno": error.errno or 0}
    return answer


def _roots(folder: Path) -> list[Path]:
    """Return the folder itself where checkpoints lie in it, else those in it that have some: one for each job."""
    if _has_some(folder):
        return [folder]
    found: list[Path] = []
    closed: PermissionError | None = None
    for path in _folders_in(folder)[: 8 * MOST_ROOTS]:
        try:
            found += [path] if _has_some(path) else []
        except PermissionError as error:
            closed = error
        except (NotADirectoryError, FileNotFoundError):
            continue
    if closed is not None and not found:
        raise closed  # what lies there is unknown
    return found[:MOST_ROOTS] or [folder]


def _has_some(folder: Path) -> bool:
    below = _folders_in(folder)
    named = any(step_of(path.name) is not None for path in below)
    return named or (folder / SEAL).exists() or any(map(_is_sealed, below))


def _is_sealed(folder: Path) -> bool:
    """Say whether a seal lies in a folder. Another user's own, which may not be entered, counts as one without."""
    with contextlib.suppress(PermissionError):
        return (folder / SEAL).exists()
    return False


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in this one, by the kernel's type of each entry, without a request to the file server.

    lost+found of ext4 is not one: only root may enter it.
    """
    with os.scandir(folder) as entries:
        listed = [each for each in itertools.islice(entries, MOST_ENTRIES) if not each.name.startswith(".")]
    return sorted(
        Path(each.path) for each in listed if each.name != "lost+found" and each.is_dir(follow_symlinks=False)
    )


def _newest(root: Path, depth: str, by_s: float) -> Iterator[JobCheckpoint]:
    """Yield what there is to resume from: at most one native checkpoint, and one of another framework."""
    native, sealed = _native(root, depth, by_s), _sealed(root, depth, by_s)
    if native is not None:
        yield native
    if sealed is not None:
        yield sealed
    if native is None and sealed is None:
        plain = _plain(root)
        if plain is not None:
            yield plain


def _plain(root: Path) -> JobCheckpoint | None:
    """Return what another framework has left, by names alone: its files may be a million. None: there is none."""
    with os.scandir(root) as entries:
        listed = [Path(each.path) for each in itertools.islice(entries, MOST_ENTRIES)]
    named = [(step_in(path.stem), str(path)) for path in listed]
    found = [(-1 if step is None else step, path) for step, path in named if step is not None or path.endswith(_FILES)]
    step, path = max(found, default=(-1, ""))
    if not path:
        return None
    return JobCheckpoint(job="", root=str(root), step=None if step < 0 else step, path=path, state="not_judged")


# --- Native -----------------------------------------------------------------------------------------------------------


def _native(root: Path, depth: str, by_s: float) -> JobCheckpoint | None:
    """Return the newest that holds, as `trainer.store.resume` would take it; None: no file has such a name."""
    found = JobCheckpoint(job="", root=str(root), because="no native checkpoint is whole")
    anything = False
    for each in look(root):
        anything = True
        if isinstance(each, Refused):
            found = _passed(found, f"{each.name}: {each.reason}")
            continue
        if Path(each.path, SET_ASIDE).exists():
            continue
        try:
            state, because = _read(each, by_s) if depth == "full" else ("whole", "")
        except (StoreError, FileNotFoundError) as error:
            found = _passed(found, f"{each.name}: {error}")
            continue
        job = each.manifest.job
        return replace(found, job=job, step=each.step, path=each.path, state=state, because=because)
    return found if anything else None


def _passed(found: JobCheckpoint, text: str) -> JobCheckpoint:
    passed_over = [*found.passed_over, text[:300]] if found.passed < MOST_PASSED_OVER else found.passed_over
    return replace(found, passed=found.passed + 1, passed_over=passed_over)


def _read(found: Found, by_s: float) -> tuple[str, str]:
    """Read every shard that lies here; return the state, and why it is not more. Raises StoreError where one is bad."""
    own = threading.local()
    shards = [packed for packed in found.manifest.shards if Path(found.path, packed.file).exists()]
    total, done = sum(shard.size_bytes for shard in shards), 0
    for packed in shards:
        shard = found.shard(packed.rank)
        with ShardReader(Path(found.path), shard) as file:

            def work(index: int, start: int, end: int, file: ShardReader = file, most: int = shard.chunk_bytes) -> None:
                if time.perf_counter() > by_s:
                    raise _TimeUpError
                if not hasattr(own, "memory") or own.memory.size_bytes < most:
                    own.memory = Snapshot(most)
                file.read_chunk(index, own.memory.buffer[: end - start])

            try:
                over_chunks(shard.size_bytes, shard.chunk_bytes, work, threads=_READERS)
            except _TimeUpError:
                return "partly", f"the time was up after {done / 1e9:.1f} of {total / 1e9:.1f} GB"
            except ImportError:
                return "whole", f"not read: xxhash is not installed ({sys.executable} -m pip install xxhash)"
        done += shard.size_bytes
    elsewhere = len(found.manifest.shards) - len(shards)
    return "read", f"{elsewhere} shards lie on other hosts" if elsewhere else ""


# --- Sealed -----------------------------------------------------------------------------------------------------------


def _sealed(root: Path, depth: str, by_s: float) -> JobCheckpoint | None:
    """Return the newest sealed folder that holds, of this one and those in it; None: none is sealed."""
    found = JobCheckpoint(job="", root=str(root), because="no sealed checkpoint is whole")
    folders = [root] if (root / SEAL).exists() else []
    folders += filter(_is_sealed, _folders_in(root))
    for path in sorted(folders, key=_order, reverse=True):
        try:
            verdict = glance(path)
        except (SealError, OSError) as error:
            found = _passed(found, f"{path.name}: {error}")
            continue
        if verdict is None:
            continue
        because, state = "; ".join(map(str, verdict.findings[:2])), "whole"
        remark = ""
        if not because and depth == "full":
            state, because, remark = _verified(path, by_s)
        if because:
            found = _passed(found, f"{path.name}: {because}")
            continue
        return replace(found, step=verdict.seal.step, path=str(path), state=state, because=remark)
    return found if folders else None


def _order(path: Path) -> tuple[int, int]:
    """Newest last: by the step in the name, and of what has none by when it was sealed."""
    step = step_in(path.name)
    return (-1 if step is None else step, (path / SEAL).stat().st_mtime_ns)


def _verified(path: Path, by_s: float) -> tuple[str, str, str]:
    """Read a sealed folder; return the state, what is wrong with it, and what else there is to say."""

    def progress(_done: int, _total: int | None) -> None:
        if time.perf_counter() > by_s:
            raise _TimeUpError

    try:
        verdict = verify(path, progress=progress)
    except _TimeUpError:
        return "partly", "", "the time was up before all of it was read"
    except ImportError:
        return "whole", "", f"not read: xxhash is not installed ({sys.executable} -m pip install xxhash)"
    except (SealError, OSError) as error:
        return "whole", str(error), ""
    return "read", "; ".join(map(str, verdict.findings[:2])), ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
