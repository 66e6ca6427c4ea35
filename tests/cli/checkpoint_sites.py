"""Checkpoints on a disk, for the tests of the verbs that look after them."""

import re
import secrets
from pathlib import Path

from powerguard.trainer.store.folders import SavedCheckpoint
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.manifest import Manifest
from powerguard.trainer.store.shards import Snapshot
from powerguard.trainer.store.store import Store
from tests.trainer.checkpoints import read

IDS = {re.compile(r"(step-\d+)-[0-9a-f]+"): r"\1-ID"}
"""What varies in the names of checkpoints, as `golden` takes it."""


def content(step: int, name: str, rank: int = 0) -> bytes:
    return f"{name} of rank {rank} at step {step};".encode() * 1000


def save(
    root: Path, step: int, *, ranks: int = 1, job: str = "llm", extra: str = "", minute: int = 0, year: int = 2026
) -> Path:
    """Write one checkpoint as a training does: two buffers and a plain value for each rank."""
    with Store(root, job=job, ranks=ranks) as store:
        name = store.name(step, secrets.token_hex(4))
        shards = []
        for rank in range(ranks):
            items = [Buffer(each, content(step, each, rank)) for each in ("model.w", "optim.m", *filter(None, [extra]))]
            with Snapshot() as snapshot:
                layout = snapshot.take([*items, Buffer.json("step", step)])
                shards.append(store.write_shard(name, rank, snapshot, layout))
        created = f"{year}-11-21T04:{minute or step % 60:02d}:00Z"
        manifest = Manifest(
            job=job,
            step=step,
            created=created,
            reason="periodic",
            ranks=ranks,
            hosts=1,
            shards=tuple(shard.packed() for shard in shards),
        )
        saved: SavedCheckpoint = store.commit(name, manifest)
    return Path(saved.path)


def items_of(path: Path, rank: int = 0) -> dict[str, bytes]:
    """Read everything back, verified, by the reader that a resume uses."""
    with Store(path.parent, job="") as store:
        found = next(each for each in store.found() if each.path == str(path))
        return {name: bytes(item.data) for name, item in read(found, rank).items()}


def flip(path: Path, offset: int = 5000) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
