"""Seal a folder that somebody else's framework has written: after a power cut it is whole, or known not to be.

    seal(folder)     every file and folder flushed to the disk, every 8 MiB digested, SEAL.json written last
    verify(folder)   what is missing, extra, changed or cut short, by name, chunk and offset

torch.distributed.checkpoint, DeepSpeed, Megatron and others lose or tear acknowledged checkpoints at a power cut: of 23
cuts after a save of the first, 23 left nothing that loads; sealed, 15 of 15 were whole. A folder with a seal that
verifies is whole; one without a seal was never finished. Sealing again what is sealed and unchanged changes nothing.

A seal covers what lies in the folder. So a symbolic link that leads out of it is refused, as is what is no file, folder
or link; links that stay inside are recorded. While a folder is sealed nobody may write into it: if somebody does, that
is noticed, and there is no seal.

xxhash (xxh3-128, 0.03 CPU s/GB) is needed here; `seal_manifest` and so the daemon do without.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from powerguard.trainer.disk import Disk
from powerguard.trainer.manifest import MANIFEST, step_of
from powerguard.trainer.seal_manifest import (
    CHUNK_BYTES,
    DIGEST_DIGITS,
    MAX_SEAL_BYTES,
    SEAL,
    UNBORN,
    Seal,
    SealedFile,
    SealError,
    read_seal,
    step_in,
)
from powerguard.trainer.seal_read import (
    TOLD,
    Progress,
    Told,
    Tree,
    check_still,
    digests,
    each_of,
    hasher,
    open_to_read,
    walk,
)

__all__ = ["Finding", "Progress", "SealError", "Sealed", "Verdict", "glance", "seal", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A folder that is sealed and durable. is_new: this call wrote the seal; else it was there, and holds."""

    path: str
    seal: Seal
    digest: str
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it was sealed.

    kind: missing, extra, changed, truncated, grown, unreadable. chunk: the first one that differs, None where that has
    no meaning; offset_bytes: where in the file it begins. chunks: how many differ.
    """

    kind: str
    path: str
    chunk: int | None = None
    offset_bytes: int | None = None
    chunks: int = 0
    because: str = ""

    def __str__(self) -> str:
        """In words, for people."""
        where = "" if self.chunk is None else f" at chunk {self.chunk}, offset {self.offset_bytes}"
        more = f" ({self.chunks} chunks in all)" if self.chunks > 1 else ""
        return f"{self.path}: {self.kind}{where}{more}{self.because and ': ' + self.because}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `verify` found; no findings: whole. read_bytes: how much was read for it."""

    path: str
    seal: Seal
    findings: tuple[Finding, ...]
    read_bytes: int

    @property
    def is_whole(self) -> bool:
        """Every byte is as it was sealed, and nothing else is there."""
        return not self.findings


def seal(
    folder: Path | str,
    *,
    again: bool = False,
    step: int | None = None,
    disk: Disk | None = None,
    progress: Progress | None = None,
) -> Sealed:
    """Make a folder durable and seal it. Returns only when a power cut could do no harm any more.

    again: put a new seal in the place of one that does not hold (any more); without it that is refused. step: training
    step; None: as the folder's name has it (checkpoint-1200). Raises SealError, OSError; then there is no new seal.
    """
    root, disk = Path(folder).resolve(), disk or Disk()
    _check_foreign(root)
    _check_alone(root)
    before = _read_old(root, again=again)
    tree = walk(root)
    if not tree.files:
        msg = f"{root}: no file in it, so nothing to seal"
        raise SealError(msg)
    if before is not None and not again:
        _refuse_changes(root, _listed(before, tree) + _sized(before, tree))
    chunk_bytes = CHUNK_BYTES if before is None or again else before.chunk_bytes
    found = _flush_and_digest(root, tree, chunk_bytes, disk, progress)
    for name in reversed(["", *tree.folders]):
        disk.sync_folder(root / name)
    check_still(root, tree)
    made = Seal(
        files=tuple(SealedFile(path=name, size_bytes=tree.files[name].size, digests=found[name]) for name in found),
        links=tuple(tree.links.items()),
        folders=tuple(tree.folders),
        step=step if step is not None else step_in(root.name) if before is None else before.step,
        sealed_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        chunk_bytes=chunk_bytes,
    )
    if before is not None and not again:
        _refuse_changes(root, _differing(before, made))
    is_new = before is None or not before.same_content(made) or before.step != made.step
    kept = made if before is None or is_new else before
    if is_new:
        _write(root, made, disk)
    disk.sync_folder(root)
    _sync_above(root, disk)
    return Sealed(path=str(root), seal=kept, digest=kept.digest, is_new=is_new)


def verify(folder: Path | str, *, progress: Progress | None = None, direct: bool = True) -> Verdict:
    """Read a sealed folder to the last byte and compare.

    direct: past the page cache where the file system can, so that the disk itself is asked. Raises SealError when there
    is no seal or it does not hold, OSError when the folder cannot be listed.
    """
    root = Path(folder).resolve()
    sealed = read_seal(root)
    if sealed is None:
        msg = f"{root}: not sealed, or not finished (`powerguard seal {root}` seals it as it is)"
        raise SealError(msg)
    tree = walk(root, refuse=False)
    findings = _listed(sealed, tree)
    told = Told(sum(min(f.size_bytes, tree.files[f.path].size) for f in sealed.files if f.path in tree.files), progress)

    def compare(file: SealedFile) -> list[Finding]:
        return _compare(root, file, sealed.chunk_bytes, told, direct=direct)

    there = [file for file in sealed.files if file.path in tree.files]
    for found in each_of(compare, there):
        findings += found
    return Verdict(path=str(root), seal=sealed, findings=tuple(findings), read_bytes=told.done)


def _check_foreign(root: Path) -> None:
    """Refuse what is no folder, and what needs no seal: a store of ours (it goes on being written) or a part of it."""
    if not root.is_dir():
        msg = f"{root}: {'is no folder (seal the folder that it lies in)' if root.exists() else 'no such folder'}"
        raise SealError(msg)
    ours = root if _is_ours(root) else None
    with os.scandir(root) as entries:
        ours = ours or next((root / each.name for each in entries if _is_ours(root / each.name)), None)
    if ours is not None:
        msg = (
            f"{ours}: a checkpoint of powerguard's own, which needs no seal: its manifest holds the digests "
            f"(`powerguard checkpoints verify {root}` reads it to the last byte)"
        )
        raise SealError(msg)


def _check_alone(root: Path) -> None:
    """Refuse a seal within a seal: whichever is made anew breaks the other."""
    inner = next((path.parent for path in root.glob(f"*/{SEAL}")), None)
    if inner is not None:
        msg = f"{root}: {inner.name} in it is sealed by itself (seal each checkpoint's own folder, not the one above)"
        raise SealError(msg)
    if (root.parent / SEAL).exists():
        msg = f"{root}: {root.parent} is sealed as a whole (seal that --again, or remove its {SEAL} first)"
        raise SealError(msg)


def _is_ours(path: Path) -> bool:
    return step_of(path.name) is not None and (path / MANIFEST).is_file()


def _flush_and_digest(
    root: Path, tree: Tree, chunk_bytes: int, disk: Disk, progress: Progress | None
) -> dict[str, str]:
    """Return the digests of every file, each flushed before it is read."""
    hasher()
    told = Told(sum(stamp.size for stamp in tree.files.values()), progress)

    def work(name: str) -> str:
        size = tree.files[name].size
        descriptor = os.open(root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            disk.sync(descriptor)
            found = []
            for digest, length in digests(descriptor, size, chunk_bytes):
                found.append(digest)
                told.add(length)
            return "".join(found)
        finally:
            os.close(descriptor)

    names = list(tree.files)
    return dict(zip(names, each_of(work, names), strict=True))


def glance(folder: Path | str) -> Verdict | None:
    """Compare names and sizes alone, which needs no xxhash; None: not sealed. Raises SealError, OSError."""
    root = Path(folder).resolve()
    sealed = read_seal(root)
    if sealed is None:
        return None
    tree = walk(root, refuse=False)
    return Verdict(path=str(root), seal=sealed, findings=(*_listed(sealed, tree), *_sized(sealed, tree)), read_bytes=0)


# --- Comparing --------------------------------------------------------------------------------------------------------


def _listed(sealed: Seal, tree: Tree) -> list[Finding]:
    """Return what names alone tell."""
    files, links, folders = {file.path for file in sealed.files}, dict(sealed.links), set(sealed.folders)
    here = {*tree.files, *tree.links, *tree.folders, *tree.odd}
    found = [Finding(kind="missing", path=name) for name in sorted({*files, *links, *folders} - here)]
    found += [Finding(kind="extra", path=name) for name in sorted(here - {*files, *links, *folders})]
    for name in sorted(here & {*files, *links, *folders}):
        was = "a file" if name in files else "a link" if name in links else "a folder"
        now = "a file" if name in tree.files else "a link" if name in tree.links else "a folder"
        if name in tree.odd or was != now:
            because = f"it was {was} when it was sealed, and is none now"
            found.append(Finding(kind="changed", path=name, because=because))
        elif name in links and links[name] != tree.links[name]:
            found.append(Finding(kind="changed", path=name, because=f"the link led to {links[name]}"))
    return found


def _sized(sealed: Seal, tree: Tree) -> list[Finding]:
    """Return the files whose length alone tells that they changed."""
    pairs = [(file, tree.files[file.path].size) for file in sealed.files if file.path in tree.files]
    return [found for file, size in pairs if (found := _resized(file, size, sealed.chunk_bytes))]


def _resized(file: SealedFile, size: int, chunk_bytes: int) -> Finding | None:
    if size == file.size_bytes:
        return None
    kind, where = ("truncated", size) if size < file.size_bytes else ("grown", file.size_bytes)
    because = f"{size} bytes instead of {file.size_bytes}"
    return Finding(kind=kind, path=file.path, chunk=where // chunk_bytes, offset_bytes=where, because=because)


def _differing(before: Seal, made: Seal) -> list[Finding]:
    """Return the files whose bytes changed, and a step that is told anew."""
    found = []
    was = {file.path: file for file in before.files}
    for file in made.files:
        old, count = was[file.path], len(file.digests) // DIGEST_DIGITS
        chunks = [chunk for chunk in range(count) if old.digest(chunk) != file.digest(chunk)]
        if chunks:
            first = chunks[0]
            offset = first * made.chunk_bytes
            found.append(Finding(kind="changed", path=file.path, chunk=first, offset_bytes=offset, chunks=len(chunks)))
    if before.step != made.step:
        found.append(Finding(kind="changed", path="step", because=f"sealed with {before.step}, told {made.step}"))
    return found


def _compare(root: Path, file: SealedFile, chunk_bytes: int, told: Told, *, direct: bool) -> list[Finding]:
    """Read one file and return what differs. The bytes that are compared are those that the disk gives now."""
    found: list[Finding] = []
    differ: list[int] = []
    try:
        descriptor = open_to_read(root / file.path, direct=direct)
        try:
            size = os.fstat(descriptor).st_size
            whole = min(size, file.size_bytes) // chunk_bytes + (size == file.size_bytes)
            for chunk, (digest, length) in enumerate(digests(descriptor, size, chunk_bytes)):
                if chunk >= whole or chunk * chunk_bytes >= file.size_bytes:
                    break
                if digest != file.digest(chunk):
                    differ.append(chunk)
                told.add(length)
        finally:
            os.close(descriptor)
        if resized := _resized(file, size, chunk_bytes):
            found.append(resized)
    except OSError as error:
        found.append(Finding(kind="unreadable", path=file.path, because=error.strerror or str(error)))
    if differ:
        first = differ[0]
        found.append(
            Finding(kind="changed", path=file.path, chunk=first, offset_bytes=first * chunk_bytes, chunks=len(differ))
        )
    return found


def _refuse_changes(root: Path, findings: Sequence[Finding]) -> None:
    if findings:
        more = f" and {len(findings) - TOLD} more" if len(findings) > TOLD else ""
        told = "; ".join(map(str, findings[:TOLD]))
        msg = f"{root}: changed since it was sealed: {told}{more} (--again seals it as it is now)"
        raise SealError(msg)


def _read_old(root: Path, *, again: bool) -> Seal | None:
    """Return the seal that is there. One that does not hold counts as none where a new one is wanted."""
    try:
        return read_seal(root)
    except SealError as error:
        if again:
            return None
        msg = f"{root}: {error} (--again seals it as it is now)"
        raise SealError(msg) from error


# --- Making it durable ------------------------------------------------------------------------------------------------


def _write(root: Path, made: Seal, disk: Disk) -> None:
    """Write the seal beside its place, flush it and its name, and put it into its place; then flush that."""
    content, unborn = made.to_json(), root / UNBORN
    if len(content) > MAX_SEAL_BYTES:
        msg = f"{root}: its seal would be larger than {MAX_SEAL_BYTES >> 20} MiB (seal its folders one by one)"
        raise SealError(msg)
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(unborn)  # of a sealing that was killed
    try:
        descriptor = disk.open(unborn, create=True)
        try:
            done = 0
            while done < len(content):
                done += disk.write(descriptor, memoryview(content)[done:], done)
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
        disk.sync_folder(root)
        disk.rename(unborn, root / SEAL)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(unborn)
        raise


def _sync_above(root: Path, disk: Disk) -> None:
    """Flush the folders above, up to the file system's own: a framework may have made several of them just now."""
    device = root.stat().st_dev
    for above in root.parents:
        if above.stat().st_dev != device:
            return
        with contextlib.suppress(PermissionError):  # one that we may not read was not made by this training
            disk.sync_folder(above)
