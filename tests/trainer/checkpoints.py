"""Make checkpoints for tests: one call from items to a committed folder."""

import os
from collections.abc import Sequence
from threading import Event

from powerguard.trainer.items import Item
from powerguard.trainer.manifest import Manifest, Shard
from powerguard.trainer.snapshot import Snapshot
from powerguard.trainer.store import SavedCheckpoint, Store


def manifest(step: int, shards: Sequence[Shard], *, hosts: int = 1, job: str = "test") -> Manifest:
    return Manifest(
        job=job,
        step=step,
        created="2026-01-01T00:00:00+00:00",
        reason="test",
        ranks=len(shards),
        hosts=hosts,
        shards=tuple(shard.packed() for shard in shards),
    )


def save(
    store: Store, step: int, items: Sequence[Item], *, urgent: bool = False, cancel: Event | None = None
) -> SavedCheckpoint:
    """Save as one rank, and prune."""
    name = store.name(step, os.urandom(4).hex())
    with Snapshot() as snapshot:
        layout = snapshot.take(items)
        shard = store.write_shard(name, 0, snapshot, layout, urgent=urgent, cancel=cancel)
    saved = store.commit(name, manifest(step, [shard]))
    store.prune()
    return saved
