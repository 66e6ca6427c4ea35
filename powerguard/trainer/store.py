"""Checkpoints in a folder that survive a power cut, or are never taken for good.

    <root>/step-000000001234-9f86d081/<part>       data
                                      MANIFEST.json  names, sizes and sha256 of all parts; written last

The order is the promise: parts are written and flushed, then the manifest under another name and flushed, then the
folder, then the rename, then the folder again and its parent. A folder without a manifest is garbage, whatever else it
holds. A folder's name is never used twice: overwriting one in place let 17 of 25 kills pass for good checkpoints in our
measurement of torch.distributed.checkpoint. Digests are checked at every load, because no loader notices a flipped bit.

No pickle: whoever can write into the folder must not be able to run code in the trainer.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, Self, TypeGuard

SCHEMA = "powerguard.checkpoint/v1"
MANIFEST = "MANIFEST.json"
CHUNK = 1 << 20
MAX_MANIFEST_BYTES = 16 << 20
_FOLDER = re.compile(r"step-(\d{12,19})-[0-9a-f]{8}")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

Progress = Callable[[int, int | None], None]
"""Told (bytes written, bytes in all or None) as a save goes on."""


class StoreError(Exception):
    """A checkpoint that cannot be written or must not be loaded: what, where, what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """One durable checkpoint. manifest_digest: "sha256:<hex>" of the manifest, and so of everything in it."""

    step: int
    path: str
    size_bytes: int
    manifest_digest: str


class Disk:
    """The three calls that durability hangs on; the test that cuts the power at each of them puts its own here."""

    def write(self, descriptor: int, content: memoryview) -> int:
        """Write some or all of it; return how many bytes."""
        return os.write(descriptor, content)

    def sync(self, descriptor: int) -> None:
        """Flush a file or a folder to the disk itself."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its new name, at once and never half."""
        old.rename(new)


class Store(Protocol):
    """Where checkpoints go. The folder is one; tiers and many ranks are others."""

    def save(
        self, step: int, parts: Mapping[str, Iterable[bytes]], progress: Progress | None = None
    ) -> SavedCheckpoint:
        """Make the parts durable under this step; only then return. Raises StoreError or OSError."""
        ...

    def newest(self) -> SavedCheckpoint | None:
        """Return the newest checkpoint whose manifest and sizes hold; the data itself is verified at `restore`."""
        ...

    def restore(self) -> "Restored | None":
        """Return the newest checkpoint that verifies to the last byte; None when there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A verified checkpoint with its content. refused: what newer ones were set aside, and why."""

    saved: SavedCheckpoint
    parts: Mapping[str, bytes]
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a checkpoint, as its manifest has it."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    job: str
    parts: tuple[Part, ...]

    def to_json(self) -> bytes:
        """Return the bytes that are stored and whose digest names the checkpoint."""
        parts = [{"name": part.name, "size_bytes": part.size_bytes, "sha256": part.digest} for part in self.parts]
        document = {"schema": SCHEMA, "job": self.job, "step": self.step, "parts": parts}
        own = sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        return json.dumps({**document, "sha256": own}, sort_keys=True).encode() + b"\n"

    @classmethod
    def parse(cls, content: bytes) -> "Manifest":
        """Read a manifest; raises StoreError when it does not hold together."""
        try:
            document: dict[str, Any] = json.loads(content)
            if document["schema"] != SCHEMA:
                msg = f"schema is {document['schema']!r}, not {SCHEMA}"
                raise StoreError(msg)
            parts = tuple(
                Part(name=part["name"], size_bytes=part["size_bytes"], digest=part["sha256"])
                for part in document["parts"]
            )
            step: object = document["step"]
            job: object = document["job"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            msg = f"{MANIFEST} is not readable ({type(error).__name__})"
            raise StoreError(msg) from error
        names: list[object] = [part.name for part in parts]
        sound = all(isinstance(name, str) and _PART.fullmatch(name) and name != MANIFEST for name in names)
        sound = sound and len(set(names)) == len(names)
        sound = sound and all(_is_size(part.size_bytes) and isinstance(part.digest, str) for part in parts)
        if not sound or not _is_size(step) or not isinstance(job, str):
            msg = f"{MANIFEST} does not hold together"
            raise StoreError(msg)
        manifest = cls(step=step, job=job, parts=parts)
        if manifest.to_json() != content:
            msg = f"{MANIFEST} does not match its own sha256"
            raise StoreError(msg)
        return manifest


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


class FolderStore:
    """A folder of checkpoints with one writer, which a lock holds for as long as this object lives.

    keep: how many of the newest stay; older ones go only after a newer one is durable. At least 2, so that one
    rotten checkpoint does not cost the training.
    """

    def __init__(self, root: Path | str, *, job: str = "training", keep: int = 2, disk: Disk | None = None) -> None:
        root = Path(root)
        if keep < 2:
            msg = f"keep={keep}: keep at least 2 checkpoints, so that a rotten one can be passed over"
            raise StoreError(msg)
        self._root = root.absolute()
        self._job = job
        self._keep = keep
        self._disk = disk or Disk()
        root.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            msg = f"{root}: another process writes checkpoints here (give each training its own folder)"
            raise StoreError(msg) from error

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self, step: int, parts: Mapping[str, Iterable[bytes]], progress: Progress | None = None
    ) -> SavedCheckpoint:
        """Make the parts durable under this step; only then return. Raises StoreError or OSError.

        What a failed save leaves behind has no manifest; it is removed at once if the disk lets us, else later.
        """
        bad = [name for name in parts if not _PART.fullmatch(name) or name == MANIFEST]
        if bad:
            msg = f"part names {bad!r}: letters, digits, '.', '_' and '-' only, and not {MANIFEST}"
            raise StoreError(msg)
        folder = self._root / f"step-{step:012d}-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            saved = self._write(folder, step, parts, progress)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._prune(newest=folder.name)
        return saved

    def _write(
        self, folder: Path, step: int, parts: Mapping[str, Iterable[bytes]], progress: Progress | None
    ) -> SavedCheckpoint:
        written: list[Part] = []
        done = 0
        for name, chunks in parts.items():
            size, digest = 0, sha256()
            with (folder / name).open("xb", buffering=0) as file:
                for chunk in chunks:
                    self._write_all(file.fileno(), chunk)
                    digest.update(chunk)
                    size += len(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(done, None)
                self._disk.sync(file.fileno())
            written.append(Part(name=name, size_bytes=size, digest=digest.hexdigest()))
        content = Manifest(step=step, job=self._job, parts=tuple(written)).to_json()
        if progress is not None:
            progress(done, done)
        unborn = folder / f"{MANIFEST}.tmp"
        with unborn.open("xb", buffering=0) as file:
            self._write_all(file.fileno(), content)
            self._disk.sync(file.fileno())
        self._sync_folder(folder)
        self._disk.rename(unborn, folder / MANIFEST)
        self._sync_folder(folder)
        self._sync_folder(self._root)
        return SavedCheckpoint(step=step, path=str(folder), size_bytes=done, manifest_digest=_named(content))

    def newest(self) -> SavedCheckpoint | None:
        """Return the newest checkpoint whose manifest and sizes hold; see `newest_in`."""
        return newest_in(self._root)

    def restore(self) -> Restored | None:
        """Return the newest checkpoint that verifies to the last byte; None when there is none.

        A checkpoint with a manifest that does not verify is renamed to `bad-...`: never looked at again, never lost.
        One that cannot be read just now (EIO, EACCES) is passed over, and left as it is. All parts are held in memory.
        """
        refused: list[str] = []
        for folder in _newest_first(self._root):
            try:
                saved, manifest = _look(folder)
                parts = {part.name: _verified(folder, part) for part in manifest.parts}
            except OSError as error:
                refused.append(f"{folder.name}: {error}")
                continue
            except StoreError as error:
                refused.append(f"{folder.name}: {error}")
                with contextlib.suppress(OSError):
                    folder.rename(folder.with_name(f"bad-{folder.name}"))
                continue
            return Restored(saved=saved, parts=parts, refused=tuple(refused))
        return None

    def _prune(self, newest: str) -> None:
        """Remove what is older than the newest `keep`, and what never got its manifest."""
        kept = 0
        for folder in _folders(self._root):
            complete = (folder / MANIFEST).exists()
            kept += complete
            if folder.name != newest and (not complete or kept > self._keep):
                # The manifest goes first and alone: a half-removed checkpoint must not look whole.
                with contextlib.suppress(OSError):
                    (folder / MANIFEST).unlink(missing_ok=True)
                    self._sync_folder(folder)
                    shutil.rmtree(folder)

    def _write_all(self, descriptor: int, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[self._disk.write(descriptor, view[:CHUNK]) :]

    def _sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._disk.sync(descriptor)
        finally:
            os.close(descriptor)


def newest_in(root: Path, *, since_ns: int = 0) -> SavedCheckpoint | None:
    """Return the newest checkpoint under root whose manifest and sizes hold, and that was committed after `since_ns`.

    since_ns: wall time, as the file system stamps it. Reads no data, changes nothing, takes no lock: anybody may ask.
    Raises OSError when root cannot be read.
    """
    for folder in _newest_first(root):
        with contextlib.suppress(StoreError, OSError):
            if (folder / MANIFEST).stat().st_mtime_ns >= since_ns:
                return _look(folder)[0]
    return None


def _folders(root: Path) -> list[Path]:
    """All checkpoint folders under root, highest step first; of one step, the last written first."""
    found: list[tuple[int, int, Path]] = []
    with os.scandir(root) as entries:
        for entry in entries:
            match = _FOLDER.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append((int(match[1]), entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    return [path for _, _, path in sorted(found, reverse=True)]


def _newest_first(root: Path) -> Iterator[Path]:
    return (folder for folder in _folders(root) if (folder / MANIFEST).exists())


def _look(folder: Path) -> tuple[SavedCheckpoint, Manifest]:
    """Check manifest, step and sizes. Raises StoreError or OSError."""
    with (folder / MANIFEST).open("rb") as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        msg = f"{MANIFEST} is larger than {MAX_MANIFEST_BYTES} bytes"
        raise StoreError(msg)
    manifest = Manifest.parse(content)
    match = _FOLDER.fullmatch(folder.name)
    if match is None or int(match[1]) != manifest.step:
        msg = f"{MANIFEST} is of step {manifest.step}, which is not the folder's"
        raise StoreError(msg)
    for part in manifest.parts:
        try:
            size = (folder / part.name).stat().st_size
        except FileNotFoundError as error:
            msg = f"{part.name} is missing"
            raise StoreError(msg) from error
        if size != part.size_bytes:
            msg = f"{part.name} has {size} bytes, not {part.size_bytes}"
            raise StoreError(msg)
    total = sum(part.size_bytes for part in manifest.parts)
    saved = SavedCheckpoint(step=manifest.step, path=str(folder), size_bytes=total, manifest_digest=_named(content))
    return saved, manifest


def _verified(folder: Path, part: Part) -> bytes:
    """Read one part and check it: the bytes that are verified are the bytes that are used."""
    content = (folder / part.name).read_bytes()
    if sha256(content).hexdigest() != part.digest:
        msg = f"{part.name} does not match its sha256"
        raise StoreError(msg)
    return content


def _named(content: bytes) -> str:
    return f"sha256:{sha256(content).hexdigest()}"
