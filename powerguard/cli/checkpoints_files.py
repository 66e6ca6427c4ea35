"""Files of a sealed folder, restored into a new folder or into one that is there; the latter can be undone.

    .NAME.powerguard-restore/          beside the folder NAME, on the same file system
        PLAN.json                      what goes where, durable before the first file is touched
        new/0 ...                      verified while they were copied, and flushed
        old/0 ... old/SEAL.json        what was in their place, by a second name

Each file is in its place at every instant, old or new: the old one gets its second name, then the new one is renamed
over it. Killed or cut off in between, `undo` brings everything back from whatever state that left.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from powerguard.trainer.chunks import digest_of
from powerguard.trainer.disk import Disk
from powerguard.trainer.seal import Progress, seal
from powerguard.trainer.seal_manifest import SEAL, Seal, SealedFile, SealError, read_seal

SCHEMA: Final = "powerguard.restore/v1"
PLAN: Final = "PLAN.json"
_MAX_PLAN_BYTES: Final = 32 << 20


class FilesError(Exception):
    """Nothing was restored: why, what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """paths: of the files, relative. existed: whether there was one before. was_sealed: and is to be again."""

    paths: tuple[str, ...]
    existed: tuple[bool, ...]
    was_sealed: bool

    def to_json(self) -> bytes:
        files = [{"path": path, "existed": existed} for path, existed in zip(self.paths, self.existed, strict=True)]
        return json.dumps({"schema": SCHEMA, "files": files, "was_sealed": self.was_sealed}).encode()

    @classmethod
    def parse(cls, content: bytes) -> "_Plan":
        try:
            document: dict[str, Any] = json.loads(content)
            paths = tuple(str(each["path"]) for each in document["files"])
            existed = tuple(bool(each["existed"]) for each in document["files"])
            is_sound = document["schema"] == SCHEMA and not any(
                path.startswith("/") or ".." in path.split("/") for path in paths
            )
            plan = cls(paths=paths, existed=existed, was_sealed=bool(document["was_sealed"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            is_sound = False
        if not is_sound:
            msg = f"{PLAN} does not hold together: restore the files by hand from old/"
            raise FilesError(msg)
        return plan


def journal_of(target: Path) -> Path:
    """Return the folder beside the target that keeps what was in the place of restored files."""
    return target.with_name(f".{target.name}.powerguard-restore")


def restore(
    source: Path,
    target: Path,
    only: Sequence[str],
    *,
    is_new: bool,
    disk: Disk | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Copy the chosen files of a sealed folder, verified; return their names. is_new: the target is made.

    Raises FilesError, SealError, OSError: then the target is as it was, or `undo` makes it so.
    """
    disk = disk or Disk()
    sealed = read_seal(source)
    if sealed is None:
        msg = f"{source}: not sealed"
        raise FilesError(msg)
    chosen = [file for file in sealed.files if not only or any(fnmatchcase(file.path, glob) for glob in only)]
    if not chosen:
        known = [file.path for file in sealed.files]
        more = f" and {len(known) - 8} more" if len(known) > 8 else ""
        msg = f"{source}: no file {', '.join(only)}; it has {', '.join(known[:8])}{more}"
        raise FilesError(msg)
    copy = _Copy(source, sealed, disk, progress)
    if is_new:
        _restore_to(copy, target, chosen, whole=not only)
    else:
        _restore_into(copy, target, chosen)
    return [file.path for file in chosen]


def _restore_to(copy: "_Copy", target: Path, chosen: Sequence[SealedFile], *, whole: bool) -> None:
    """Make the target, sealed. whole: with links and empty folders. What fails leaves no folder behind."""
    was_there = target.exists()
    try:
        copy.run(target, {file.path: file for file in chosen})
        if whole:
            for path, to in copy.sealed.links:
                (target / path).symlink_to(to)
            for folder in copy.sealed.folders:
                (target / folder).mkdir(parents=True, exist_ok=True)
        seal(target, step=copy.sealed.step, disk=copy.disk)
    except BaseException:
        if not was_there:
            shutil.rmtree(target, ignore_errors=True)
        raise


def _restore_into(copy: "_Copy", target: Path, chosen: Sequence[SealedFile]) -> None:
    disk, journal = copy.disk, journal_of(target)
    if (journal / PLAN).exists() and not (journal / "done").exists():
        msg = f"{target}: a restore was cut off there (`powerguard checkpoints restore --undo {target}` first)"
        raise FilesError(msg)
    for file in chosen:
        _check_way(target, file.path)
    if journal.exists():
        (journal / PLAN).unlink(missing_ok=True)  # first: what is left then is nothing that could be undone by half
        shutil.rmtree(journal)
    (journal / "old").mkdir(parents=True)
    copy.run(journal / "new", {str(number): file for number, file in enumerate(chosen)})
    plan = _Plan(
        paths=tuple(file.path for file in chosen),
        existed=tuple(os.path.lexists(target / file.path) for file in chosen),
        was_sealed=(target / SEAL).exists(),
    )
    if plan.was_sealed:
        shutil.copy2(target / SEAL, journal / "old" / SEAL)
    for folder in (journal / "old", journal / "new"):
        disk.sync_folder(folder)
    _write(journal / PLAN, plan.to_json(), disk)
    disk.sync_folder(journal.parent)
    for number, (path, existed) in enumerate(zip(plan.paths, plan.existed, strict=True)):
        if existed:
            _second_name(target / path, journal / "old" / str(number))
    disk.sync_folder(journal / "old")
    for number, path in enumerate(plan.paths):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        disk.rename(journal / "new" / str(number), target / path)
    for folder in {(target / path).parent for path in plan.paths}:
        disk.sync_folder(folder)
    if plan.was_sealed:
        seal(target, again=True, disk=disk)
    _write(journal / "done", b"", disk)


def undo(target: Path, disk: Disk | None = None) -> list[str]:
    """Put back what the last restore into this folder replaced, however far it came. Twice is as good as once."""
    disk = disk or Disk()
    journal = journal_of(target)
    try:
        content = (journal / PLAN).read_bytes()[:_MAX_PLAN_BYTES]
    except FileNotFoundError:
        if journal.exists():
            shutil.rmtree(journal)  # cut off before anything was touched
        return []
    plan = _Plan.parse(content)
    for number, (path, existed) in enumerate(zip(plan.paths, plan.existed, strict=True)):
        old = journal / "old" / str(number)
        if existed and old.exists():
            disk.rename(old, target / path)
        elif not existed and not (journal / "new" / str(number)).exists():
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(target / path)
    if plan.was_sealed and (journal / "old" / SEAL).exists():
        disk.rename(journal / "old" / SEAL, target / SEAL)
    for folder in {target, *((target / path).parent for path in plan.paths)}:
        with contextlib.suppress(FileNotFoundError):
            disk.sync_folder(folder)
    disk.unlink(journal / PLAN)
    shutil.rmtree(journal)
    return list(plan.paths)


def _check_way(target: Path, path: str) -> None:
    """Refuse a way that leads over a link, or to something that is no file."""
    way = target
    for part in Path(path).parts[:-1]:
        way /= part
        if way.is_symlink() or (way.exists() and not way.is_dir()):
            msg = f"{way}: is no folder of its own, so {path} is not restored through it"
            raise FilesError(msg)
    final = target / path
    if final.is_symlink() or (final.exists() and not final.is_file()):
        msg = f"{final}: is no plain file"
        raise FilesError(msg)


def _second_name(path: Path, kept: Path) -> None:
    try:
        kept.hardlink_to(path)
    except FileExistsError:
        return
    except OSError:  # a file system without links: the file is gone for an instant, and `undo` knows where it is
        path.rename(kept)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copies files out of a sealed folder, each chunk compared before it is written."""

    source: Path
    sealed: Seal
    disk: Disk
    progress: Progress | None

    def run(self, target: Path, places: Mapping[str, SealedFile]) -> None:
        """Copy each file to its place in a folder that is made; all of it is flushed when this returns."""
        total, done = sum(file.size_bytes for file in places.values()), 0
        folders = {target}
        for place, file in places.items():
            path = target / place
            path.parent.mkdir(parents=True, exist_ok=True)
            folders.add(path.parent)
            done = self._file(file, path, done, total)
        for folder in folders:
            self.disk.sync_folder(folder)

    def _file(self, file: SealedFile, path: Path, done: int, total: int) -> int:
        reading = os.open(self.source / file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            writing = self.disk.open(path, create=True)
            try:
                for offset in range(0, file.size_bytes, self.sealed.chunk_bytes):
                    content = memoryview(self._chunk(reading, file, offset))
                    written = 0
                    while written < len(content):
                        written += self.disk.write(writing, content[written:], offset + written)
                    done += len(content)
                    if self.progress is not None:
                        self.progress(done, total)
                self.disk.sync(writing)
            finally:
                self.disk.close(writing)
        finally:
            os.close(reading)
        return done

    def _chunk(self, descriptor: int, file: SealedFile, offset: int) -> bytes:
        number, size = offset // self.sealed.chunk_bytes, min(self.sealed.chunk_bytes, file.size_bytes - offset)
        content = b""
        while len(content) < size and (piece := os.pread(descriptor, size - len(content), offset + len(content))):
            content += piece
        if len(content) != size or digest_of(memoryview(content)) != file.digest(number):
            msg = f"{self.source / file.path}: changed since it was sealed, at chunk {number}, offset {offset}"
            raise SealError(msg)
        return content


def _write(path: Path, content: bytes, disk: Disk) -> None:
    unborn = path.with_name(f"{path.name}.tmp")
    unborn.unlink(missing_ok=True)
    descriptor = disk.open(unborn, create=True)
    try:
        done = 0
        while done < len(content):
            done += disk.write(descriptor, memoryview(content)[done:], done)
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
    disk.rename(unborn, path)
    disk.sync_folder(path.parent)
