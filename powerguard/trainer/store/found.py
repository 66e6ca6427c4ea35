"""What lies under a root, by names, manifests and sizes alone: no data is read, nothing is changed. Stdlib only."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from powerguard.trainer.store.disk import is_gone
from powerguard.trainer.store.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestError,
    Shard,
    StoreError,
    digest_of,
    step_of,
)
from powerguard.trainer.store.slots import size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """One durable checkpoint. size_bytes: all shards, on all hosts.

    manifest_digest: "sha256:<hex>" of the manifest, and so of everything in it.
    """

    step: int
    path: str
    size_bytes: int
    manifest_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint whose manifest and sizes hold; the data is verified while it is read. tier: where it lies."""

    step: int
    name: str
    path: str
    manifest: Manifest
    digest: str
    tier: str = "local"

    def shard(self, rank: int) -> Shard:
        """The description of one rank's shard. Raises ManifestError if it does not hold together."""
        try:
            return self.manifest.shard(rank)
        except ManifestError as error:
            msg = f"{self.path}/{MANIFEST}: {error}"
            raise ManifestError(msg) from error

    def saved(self) -> SavedCheckpoint:
        """The same, in short."""
        return SavedCheckpoint(
            step=self.step, path=self.path, size_bytes=self.manifest.size_bytes, manifest_digest=self.digest
        )


@dataclass(frozen=True, slots=True)
class Refused:
    """A folder that looks like a checkpoint and is none. rotten: it will be none tomorrow either."""

    name: str
    reason: str
    rotten: bool


def newest_in(root: Path, *, since_ns: int = 0) -> SavedCheckpoint | None:
    """The newest checkpoint under root whose manifest and sizes hold, and that was committed after `since_ns`.

    since_ns: wall time, as the file system stamps it. Reads no data, changes nothing, takes no lock: anybody may ask.
    Raises OSError when root cannot be read.
    """
    for found in look(root):
        if isinstance(found, Found):
            with contextlib.suppress(OSError):
                if Path(found.path, MANIFEST).stat().st_mtime_ns >= since_ns:
                    return found.saved()
    return None


def look(root: Path, rank: int | None = None, *, among: Sequence[Path] | None = None) -> Iterator[Found | Refused]:
    """Look at every folder under root that has the name and the manifest of a checkpoint, highest step first.

    rank: whose shard must be here where several hosts have roots of their own; None: anybody's. among: these folders
    only, in this order. Raises OSError when root cannot be read.
    """
    for folder in folders(root) if among is None else among:
        try:
            yield _looked_at(folder, rank)
        except OSError as error:
            if not is_gone(error):  # else no manifest, or pruned while we looked
                yield Refused(folder.name, f"{folder}: {error}", rotten=False)
        except StoreError as error:
            # Pruned between its manifest and its shards: the manifest is what goes first, and no name comes twice.
            if (folder / MANIFEST).exists():
                yield Refused(folder.name, str(error), rotten=True)


def _looked_at(folder: Path, rank: int | None) -> Found:
    descriptor = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        content = b""
        while len(content) <= MAX_MANIFEST_BYTES and (piece := file.read(MAX_MANIFEST_BYTES + 1 - len(content))):
            content += piece
    try:
        manifest = Manifest.parse(content)
    except ManifestError as error:
        msg = f"{folder / MANIFEST}: {error}"
        raise StoreError(msg) from error
    if step_of(folder.name) != manifest.step:
        msg = f"{folder / MANIFEST}: is of step {manifest.step}, which is not the folder's"
        raise StoreError(msg)
    present = 0
    for shard in manifest.shards:
        try:
            size = (folder / shard.file).stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            if manifest.hosts == 1 or shard.rank == rank:
                msg = f"{folder / shard.file}: is missing"
                raise StoreError(msg) from None
            continue
        present += 1
        if size < shard.size_bytes:
            size = size_of(folder / shard.file, least=shard.size_bytes)
        if size < shard.size_bytes:
            msg = f"{folder / shard.file}: has {size} bytes, not {shard.size_bytes}"
            raise StoreError(msg)
    if not present:
        msg = f"{folder}: none of its shards is here"
        raise StoreError(msg)
    return Found(step=manifest.step, name=folder.name, path=str(folder), manifest=manifest, digest=digest_of(content))


def folders(root: Path) -> Sequence[Path]:
    """All folders under root with the name of a checkpoint, highest step first; of one step, the last written first."""
    found: list[tuple[int, int, Path]] = []
    with os.scandir(root) as entries:
        for entry in entries:
            step = step_of(entry.name)
            if step is not None and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    found.append((step, entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    return [path for _, _, path in sorted(found, reverse=True)]
