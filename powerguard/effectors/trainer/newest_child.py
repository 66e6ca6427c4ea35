"""Child process: wait for a checkpoint newer than a moment, then print it as JSON.

    python -m powerguard.effectors.trainer.newest_child DIR SINCE_NS LIMIT_S

A process of its own, because the folder may lie on a file system that hangs. Exit codes: 0 found, 1 none in time.
What counts: a manifest or a seal whose names and sizes hold (verified: true). In a folder that has neither, whatever
was written since and has then been left alone for two seconds (verified: false): its framework vouches for nothing.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from powerguard.trainer.disk import is_gone
from powerguard.trainer.found import newest_in
from powerguard.trainer.manifest import MANIFEST, step_of
from powerguard.trainer.seal import glance
from powerguard.trainer.seal_manifest import SEAL, SealError, step_in

QUIET_S: Final = 2.0
_EVERY_S: Final = 0.2
_MOST: Final = 20_000


@dataclass(frozen=True, slots=True)
class Newest:
    """A checkpoint that appeared. changed_ns: when it last changed, as the file system stamps it."""

    step: int | None
    path: str
    size_bytes: int
    verified: bool
    changed_ns: int

    def to_json(self) -> str:
        """Return what the daemon reads."""
        told = {"step": self.step, "path": self.path, "size_bytes": self.size_bytes, "verified": self.verified}
        return json.dumps(told)


def main(argv: list[str]) -> int:
    """Look until found or out of time."""
    folder, since_ns, limit_s = Path(argv[0]), int(argv[1]), float(argv[2])
    began_s = time.perf_counter()
    seen: dict[str, tuple[Newest, float]] = {}
    """What was there when we looked last, and since when it has been so."""
    while True:
        now_s = time.perf_counter()
        there = _there(folder, since_ns)
        seen = {each.path: (each, _since(seen.get(each.path), each, now_s)) for each in there}
        for found, quiet_since_s in seen.values():
            if found.verified or now_s - quiet_since_s >= QUIET_S:
                sys.stdout.write(found.to_json())
                return 0
        if now_s - began_s >= limit_s:
            return 1
        time.sleep(_EVERY_S)


def _there(folder: Path, since_ns: int) -> list[Newest]:
    """As `newest`; nothing while there is no such folder, or where something went as we looked: we look again."""
    try:
        return newest(folder, since_ns) if folder.is_dir() else []
    except OSError as error:
        if not is_gone(error):
            raise
        return []


def _since(before: tuple[Newest, float] | None, now: Newest, now_s: float) -> float:
    return before[1] if before is not None and before[0] == now else now_s


def newest(folder: Path, since_ns: int) -> list[Newest]:
    """Return what may be the checkpoint that was made since, the likeliest first. Raises OSError.

    A verified one alone, where there is one. In a folder in which things are named by their step, only those count:
    a log beside them is no checkpoint, however new it is.
    """
    saved = newest_in(folder, since_ns=since_ns)
    verified = list(_sealed(folder, since_ns))
    if saved is not None:
        changed_ns = (Path(saved.path) / MANIFEST).stat().st_mtime_ns
        verified.append(Newest(saved.step, saved.path, saved.size_bytes, True, changed_ns))
    if verified:
        return [max(verified, key=lambda each: each.changed_ns)]
    if newest_in(folder) is not None or (folder / SEAL).exists() or any(folder.glob(f"*/{SEAL}")):
        return []
    plain = list(_plain(folder))
    named = [each for each in plain if each.step is not None]
    late = [each for each in named or plain if each.changed_ns >= since_ns]
    return sorted(late, key=lambda each: each.changed_ns, reverse=True)


def _sealed(folder: Path, since_ns: int) -> Iterator[Newest]:
    """Yield the sealed folders among this one and those in it, whose seals were written since."""
    for path in (folder, *(each for each in folder.iterdir() if each.is_dir() and not each.is_symlink())):
        with contextlib.suppress(OSError, SealError):
            changed_ns = (path / SEAL).stat().st_mtime_ns
            verdict = glance(path) if changed_ns >= since_ns else None
            if verdict is not None and verdict.is_whole:
                yield Newest(verdict.seal.step, str(path), verdict.seal.size_bytes, True, changed_ns)


def _plain(folder: Path) -> Iterator[Newest]:
    """Yield every file and folder in this one, with all that is in it."""
    for path in folder.iterdir():
        if path.name.startswith(".") or path.is_symlink() or step_of(path.name) is not None:
            continue
        size, changed_ns = 0, 0
        for each in itertools.islice(_files(path), _MOST):
            with contextlib.suppress(OSError):
                found = each.stat(follow_symlinks=False)
                size, changed_ns = size + found.st_size, max(changed_ns, found.st_mtime_ns)
        if changed_ns:
            yield Newest(step_in(path.stem), str(path), size, False, changed_ns)


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for above, _, names in os.walk(path):
            yield from (Path(above) / name for name in names)
    else:
        yield path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
