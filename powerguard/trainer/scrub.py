"""Read a checkpoint again in idle time, from the disk itself: the page cache hides a disk that forgets.

One chunk of memory, no faster than told, and it stops when told.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from powerguard.trainer.manifest import MANIFEST, Manifest, ManifestError, Packed, Shard
from powerguard.trainer.reader import CorruptError, ShardReader, held
from powerguard.trainer.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """What a scrub saw. whole: all that lies here was read. corrupt: what it stumbled over; None: nothing."""

    path: str
    size_bytes: int
    took_s: float
    whole: bool
    corrupt: CorruptError | None


def scrub(folder: Path, manifest: Manifest, *, rate: float | None = None, stop: Event | None = None) -> Scrubbed:
    """Verify every shard of a checkpoint that lies in this folder. Keeps it from being pruned meanwhile.

    rate: bytes a second at most; None: at full speed. Raises FileNotFoundError when it is gone, OSError when the disk
    does not answer (which is no proof of rot).
    """
    stop = stop or Event()
    began_s = time.perf_counter()
    done = 0
    corrupt = None
    whole = True
    shards = [packed for packed in manifest.shards if manifest.hosts == 1 or (folder / packed.file).exists()]
    with held(folder), Snapshot(max((packed.chunk_bytes for packed in shards), default=0)) as memory:
        try:
            for packed in shards:
                shard = _unpacked(folder, packed)
                with ShardReader(folder, shard) as file:
                    for index, start in enumerate(range(0, shard.size_bytes, shard.chunk_bytes)):
                        due_s = 0.0 if rate is None else began_s + done / rate - time.perf_counter()
                        if stop.is_set() or (due_s > 0 and stop.wait(due_s)):
                            whole = False
                            break
                        size = min(shard.chunk_bytes, shard.size_bytes - start)
                        file.read_chunk(index, memory.buffer[:size])
                        done += size
        except CorruptError as error:
            corrupt = error
            whole = False
    took_s = time.perf_counter() - began_s
    return Scrubbed(path=str(folder), size_bytes=done, took_s=took_s, whole=whole, corrupt=corrupt)


def _unpacked(folder: Path, packed: Packed) -> Shard:
    try:
        return packed.unpacked()
    except ManifestError as error:
        raise CorruptError(folder / MANIFEST, str(error)) from error
