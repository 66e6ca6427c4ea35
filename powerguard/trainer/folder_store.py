"""The store of a job that hands over finished bytes by name: a thin face of Store, for one process."""

import contextlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from powerguard.trainer.disk import Disk
from powerguard.trainer.items import Buffer
from powerguard.trainer.manifest import MANIFEST, Manifest, StoreError
from powerguard.trainer.reader import CorruptError
from powerguard.trainer.snapshot import Progress, Snapshot
from powerguard.trainer.store import SavedCheckpoint, Store

CHUNK: Final = 1 << 20
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A verified checkpoint with its content. refused: what newer ones were set aside, and why."""

    saved: SavedCheckpoint
    parts: Mapping[str, bytes]
    refused: tuple[str, ...] = ()


class FolderStore:
    """A folder of checkpoints with one writer."""

    def __init__(self, root: Path | str, *, job: str = "training", keep: int = 2, disk: Disk | None = None) -> None:
        self._store = Store(root, job=job, keep=keep, slots=0, disk=disk)
        self._snapshot = Snapshot()

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self, step: int, parts: Mapping[str, Iterable[bytes]], progress: Progress | None = None
    ) -> SavedCheckpoint:
        """Make the parts durable under this step; only then return. Raises StoreError or OSError."""
        bad = [name for name in parts if not _PART.fullmatch(name) or name == MANIFEST]
        if bad:
            msg = f"part names {bad!r}: letters, digits, '.', '_' and '-' only, and not {MANIFEST}"
            raise StoreError(msg)
        done = 0
        items = []
        for name, chunks in parts.items():
            content = bytearray()
            for chunk in chunks:
                content += chunk
                done += len(chunk)
                if progress is not None:
                    progress(done, None)
            items.append(Buffer(name, content))
        layout = self._snapshot.take(items)
        name = self._store.name(step, secrets.token_hex(4))
        try:
            shard = self._store.write_shard(name, 0, self._snapshot, layout)
            if progress is not None:
                progress(done, done)
            manifest = Manifest(
                job=self._store.job,
                step=step,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                reason="",
                ranks=1,
                hosts=1,
                shards=(shard,),
            )
            saved = self._store.commit(name, manifest)
        except BaseException:
            with contextlib.suppress(OSError):
                self._store.abandon(name)
            raise
        self._store.prune()
        return saved

    def newest(self) -> SavedCheckpoint | None:
        return self._store.newest()

    def restore(self) -> Restored | None:
        """Return the newest checkpoint that verifies to the last byte; None when there is none."""
        refused = []
        for each in self._store.refused():
            refused.append(each.reason)
            if each.rotten:
                self._store.set_aside(each, each.reason)
        for found in self._store.found():
            try:
                items = self._store.read_shard(found, 0)
            except CorruptError as error:
                refused.append(str(error))
                self._store.set_aside(found, str(error))
            except OSError as error:
                refused.append(str(error))
            else:
                parts = {name: bytes(item.data) for name, item in items.items()}
                return Restored(saved=found.saved(), parts=parts, refused=tuple(refused))
        return None
