"""Child process: look at a folder of checkpoints, and print what there is as JSON. Reads names and sizes only.

    python -m powerguard.effectors.trainer.folder_child DIR

A separate process, because the folder may lie on a file system that hangs. Exit codes: 0 printed, 1 cannot be read.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from powerguard.effectors.trainer.newest_child import newest_file
from powerguard.trainer.seal.folder import glance
from powerguard.trainer.seal.manifest import SEAL, SealError, step_in
from powerguard.trainer.store.folders import BAD, OLD, Found, look
from powerguard.trainer.store.manifest import MANIFEST


def main(argv: list[str]) -> int:
    """Look and say what is there."""
    folder = Path(argv[0])
    try:
        space = os.statvfs(folder)
        newest = max(_all(folder), key=lambda each: each["changed_s"], default=None)
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}\n")
        return 1
    if newest is not None:
        newest["age_s"] = max(0.0, time.time() - newest.pop("changed_s"))  # noqa: TID251 - as files are stamped
    answer = {"free_bytes": space.f_bavail * space.f_frsize, "slot_bytes": _slots(folder), "newest": newest}
    sys.stdout.write(json.dumps(answer))
    return 0


def _all(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what looks like a checkpoint here; state: complete, or not_sealed."""
    for found in look(folder):
        if isinstance(found, Found):
            with contextlib.suppress(OSError):
                changed_s = (Path(found.path) / MANIFEST).stat().st_mtime
                yield _entry("complete", found.path, found.step, found.manifest.size_bytes, changed_s)
    for path in (folder, *sorted(folder.iterdir())):
        if path.is_symlink() or not path.is_dir() or (path != folder and path.name.startswith((BAD, OLD))):
            continue  # no resume looks at what was set aside
        with contextlib.suppress(OSError, SealError):
            verdict = glance(path)
            if verdict is not None and verdict.is_whole:
                changed_s = (path / SEAL).stat().st_mtime
                yield _entry("complete", str(path), verdict.seal.step, verdict.seal.size_bytes, changed_s)
            elif verdict is None and path != folder and step_in(path.name) is not None and not _is_native(path):
                files = [each.stat() for each in path.rglob("*") if each.is_file() and not each.is_symlink()]
                changed_s = max((each.st_mtime for each in files), default=0.0)
                yield _entry("not_sealed", str(path), step_in(path.name), sum(f.st_size for f in files), changed_s)
    if (plain := newest_file(folder)) is not None:
        yield _entry("not_sealed", plain.path, plain.step, plain.size_bytes, plain.changed_ns / 1e9)


def _is_native(path: Path) -> bool:
    return any(path.glob("shard-?????")) or (path / MANIFEST).exists()


def _entry(state: str, path: str, step: int | None, size: int, changed_s: float) -> dict[str, Any]:
    return {"state": state, "path": path, "step": step, "size_bytes": size, "changed_s": changed_s}


def _slots(folder: Path) -> int:
    """Bytes that are kept ready for an emergency: of the smallest slot, since each must hold a checkpoint."""
    slots = [path for path in folder.glob(".slot-*") if path.is_dir()]
    return min((sum(each.stat().st_size for each in path.iterdir()) for path in slots), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
