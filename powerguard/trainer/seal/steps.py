"""Sealed checkpoints of a framework's own writer, side by side: which is the newest whole one, which may go."""

import contextlib
import errno
import logging
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Final

from powerguard.trainer.seal.folder import verify
from powerguard.trainer.seal.manifest import SEAL, SealError, read_seal
from powerguard.trainer.store.store import SavedCheckpoint

_BAD: Final = "bad-"
_OLD: Final = "old-"
_log = logging.getLogger("powerguard.trainer")


def sealed_in(root: Path) -> list[Path]:
    """The folders under root that have a seal, newest step first; of one step, the last sealed first."""
    found = []
    for path in root.glob(f"*/{SEAL}"):
        if not path.parent.name.startswith((_BAD, _OLD)):
            with contextlib.suppress(FileNotFoundError):  # another rank removes it, or sets it aside
                found.append((_step(path.parent), path.stat().st_mtime_ns, path.parent))
    return [folder for _, _, folder in sorted(found, reverse=True)]


def _step(folder: Path) -> int:
    """The step that a seal tells; one that tells none, or is damaged, is looked at last."""
    try:
        seal = read_seal(folder)
    except SealError:
        return -1
    return -1 if seal is None or seal.step is None else seal.step


def newest_whole(root: str | os.PathLike[str]) -> Path | None:
    """The newest sealed checkpoint that verifies to the last byte; None without one.

    One that does not is renamed to `bad-...`: never looked at again, never lost. Every rank may look at once. Raises
    OSError.
    """
    for folder in sealed_in(Path(root)):
        try:
            is_whole = verify(folder).is_whole
        except (SealError, FileNotFoundError):
            is_whole = False
        if is_whole:
            return folder
        _set_aside(folder, _BAD)
    return None


def leave_behind(root: Path, above: int) -> None:
    """Rename the sealed checkpoints of steps above this one, which is about to be saved, to `old-...`.

    Training was rolled back behind them, or has begun anew. `newest_whole` would choose them, and `prune` keep them,
    before what is saved from now on.
    """
    later = [folder for folder in sealed_in(root) if _step(folder) > above]
    for folder in later:
        _log.warning("%s: kept as %s%s: training has gone back to step %d", folder, _OLD, folder.name, above)
        _set_aside(folder, _OLD)
    if later:
        _sync(root)


def _set_aside(folder: Path, word: str) -> None:
    """Rename it, unless another rank has. Frameworks use a name again: the one before may be lying there as well."""
    for number in count(1):
        aside = f"{word}{folder.name}" if number == 1 else f"{word}{folder.name}.{number}"
        try:
            folder.rename(folder.with_name(aside))
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
        else:
            return


def saved_in(folder: Path | str, step: int) -> SavedCheckpoint:
    """A sealed folder as a Guard knows checkpoints. Raises SealError without a seal."""
    seal = read_seal(folder)
    if seal is None:
        msg = f"{folder}: not sealed, so not finished"
        raise SealError(msg)
    return SavedCheckpoint(step=step, path=str(folder), size_bytes=seal.size_bytes, manifest_digest=seal.digest)


def unseal(folder: Path) -> None:
    """Take the seal away, durably, before anything in the folder changes: half of a checkpoint must not look whole."""
    (folder / SEAL).unlink(missing_ok=True)
    _sync(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep`. Call it when the newest is durable, and never before."""
    for folder in sealed_in(root)[keep:]:
        unseal(folder)
        shutil.rmtree(folder, ignore_errors=True)
