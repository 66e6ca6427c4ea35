"""One checkpoint on its way from the local disk to a slower tier: shards first, in parts, then the manifest.

Of several hosts each uploads what it has, and the host that finds all shards there puts the manifest: the last host
does, and when two are last at once both put the same bytes, of which the first ones stand. No host waits for another.

All connections pass one `Gate`, which limits the rate. After an error all of them wait, for a random time up to a limit
that doubles ("full jitter"), so that a thousand hosts do not come back at the same instant.
"""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition, Event, Lock
from typing import Final, TypeVar

from powerguard.trainer.ranks.base import boottime_s
from powerguard.trainer.store.disk import is_there
from powerguard.trainer.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, ManifestError, Packed, Shard
from powerguard.trainer.store.shards import CorruptError, ShardReader, Snapshot
from powerguard.trainer.tiers.base import TRANSIENT, Kind, Part, Remote, Target, TierError

_T = TypeVar("_T")

FIRST_S: Final = 0.5
MOST_S: Final = 60.0
PATIENCE_S: Final = 600.0


def backoff_s(errors: int, *, first_s: float, most_s: float, rng: random.Random) -> float:
    """How long to wait after so many errors in a row: between half of, and all of, a limit that doubles."""
    limit_s = min(most_s, first_s * 2.0 ** min(errors - 1, 30))
    return rng.uniform(limit_s / 2, limit_s)


class Gate:
    """The gate. bytes_per_s: None: no limit.

    patience_s: how long transient errors may go on without one success in between; then the upload is given up for now.
    """

    def __init__(
        self,
        *,
        bytes_per_s: float | None = None,
        first_s: float = FIRST_S,
        most_s: float = MOST_S,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = boottime_s,
        rng: random.Random | None = None,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._first_s = first_s
        self._most_s = most_s
        self._patience_s = patience_s
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - spreads retries, hides nothing
        self._changed = Condition()
        self._errors = 0
        self._failing_since_s: float | None = None
        self._closed_until_s = 0.0
        self._budget_at_s = 0.0
        self.trouble: TierError | None = None
        """The last transient error; None once something has succeeded since."""
        self.retries: dict[Kind, int] = {}
        """How often what was met, for status and metrics."""

    @property
    def backing_off(self) -> bool:
        """Everybody waits because of an error."""
        return self._clock() < self._closed_until_s

    @property
    def resting(self) -> bool:
        """Everybody waits, because of an error or for the bandwidth: that nothing moves is nothing wrong."""
        return self._clock() < max(self._closed_until_s, self._budget_at_s)

    def call(self, what: Callable[[], _T], size_bytes: int = 0) -> _T:
        """Do it when the gate is open, as often as it takes. Raises TierError: not transient, or out of patience."""
        while True:
            self._enter(size_bytes)
            began_s = self._clock()
            try:
                result = what()
            except TierError as error:
                if error.kind not in TRANSIENT:
                    raise
                self._failed(error, began_s)
                continue
            with self._changed:
                self._errors = 0
                self.trouble = None
                self._failing_since_s = None
            return result

    def _enter(self, size_bytes: int) -> None:
        with self._changed:
            while (rest_s := self._closed_until_s - self._clock()) > 0:
                self._changed.wait(rest_s)
            if self._bytes_per_s is None or not size_bytes:
                return
            now_s = self._clock()
            mine_s = max(self._budget_at_s, now_s)
            self._budget_at_s = mine_s + size_bytes / self._bytes_per_s
            while (rest_s := mine_s - self._clock()) > 0:
                self._changed.wait(rest_s)

    def _failed(self, error: TierError, began_s: float) -> None:
        """Count an error of a call that began at began_s: what hung before it failed has used up patience, too."""
        with self._changed:
            now_s = self._clock()
            self.trouble = error
            self.retries[error.kind] = self.retries.get(error.kind, 0) + 1
            if self._failing_since_s is None:
                self._failing_since_s = began_s
            if now_s - self._failing_since_s >= self._patience_s:
                raise error
            if now_s >= self._closed_until_s:  # what was in flight when the gate closed is the same storm
                self._errors += 1
                rest_s = backoff_s(self._errors, first_s=self._first_s, most_s=self._most_s, rng=self._rng)
                self._closed_until_s = now_s + rest_s


LINGER_S: Final = 120.0
"""How long a host that has finished looks whether others have: they put the manifest themselves if they take longer."""

_LOOK_FIRST_S: Final = 0.5
_LOOK_MOST_S: Final = 10.0


@dataclass
class Progress:
    """How far it is; written by the transfer's threads, read by the one that reports it."""

    bytes_total: int = 0
    bytes_done: int = 0
    bytes_sent: int = 0
    """Of the bytes that are done, those that this process put; the others were there."""
    committed: bool = False
    moved: int = 0
    """Grows with whatever happens; what stands still for long hangs."""
    lock: Lock = field(default_factory=Lock, repr=False)

    def seen(self, count: int) -> None:
        """Something moved: bytes that were read back, an answer."""
        with self.lock:
            self.moved += count

    def done(self, count: int, *, sent: bool) -> None:
        """So many more bytes are there; sent: by us, now."""
        with self.lock:
            self.moved += count
            self.bytes_done += count
            self.bytes_sent += count if sent else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadOrder:
    """Order to a child: upload what lies here of a committed checkpoint. path, digest: its."""

    remote: Remote
    job: str
    path: str
    digest: str


class Transfer:
    """One order being carried out. linger_s: see `LINGER_S`."""

    def __init__(
        self,
        order: UploadOrder,
        target: Target,
        gate: Gate,
        progress: Progress,
        *,
        linger_s: float = LINGER_S,
    ) -> None:
        self.progress = progress
        self.gate = gate
        self._order = order
        self._folder = Path(order.path)
        self._name = self._folder.name
        self._target = target
        self._linger_s = linger_s

    def run(self) -> bool:
        """Upload it. True: committed there. False: all that lies here is there, shards of other hosts are not yet.

        Raises TierError: what went wrong with the tier, or (lost, corrupt) with the local checkpoint.
        """
        name, target = self._name, self._target
        manifest = self._manifest()
        there = self.gate.call(lambda: target.committed(name))
        # A copy that was made by hand has its manifest before its shards.
        if there is None or (there == manifest.digest and self.gate.call(lambda: target.absent(name, manifest))):
            try:
                self._upload_all(manifest)
            except TierError as error:
                # What interrupted uploads have left there would keep it full: it goes only after a commit.
                if error.kind is not Kind.FULL or manifest.hosts > 1 or not self.gate.call(lambda: target.clear(name)):
                    raise
                self._upload_all(manifest)
            if not self._all_there(manifest):
                return False
        self.gate.call(lambda: target.commit(name, manifest))  # where one stands already, this says whether it is ours
        self.progress.committed = True
        remote = self._order.remote
        self.gate.call(lambda: target.prune(remote.keep, remote.keep_days, name))
        return True

    def _manifest(self) -> Manifest:
        try:
            with (self._folder / MANIFEST).open("rb") as file:
                manifest = Manifest.parse(file.read(MAX_MANIFEST_BYTES + 1))
        except (OSError, ManifestError) as error:
            raise TierError(Kind.LOST, f"{self._folder}: is no longer a checkpoint ({error})") from None
        if manifest.digest != self._order.digest:
            raise TierError(Kind.LOST, f"{self._folder}: is not the checkpoint that was offered")
        return manifest

    def _unpacked(self, packed: Packed) -> Shard:
        try:
            return packed.unpacked()
        except ManifestError as error:
            raise TierError(Kind.CORRUPT, f"local checkpoint: {self._folder / MANIFEST}: {error}") from None

    def _upload_all(self, manifest: Manifest) -> None:
        local_shards = [packed for packed in manifest.shards if is_there(self._folder / packed.file)]
        self.progress.bytes_total, self.progress.bytes_done = sum(packed.size_bytes for packed in local_shards), 0
        for packed in local_shards:
            self._upload(self._unpacked(packed))

    def _upload(self, shard: Shard) -> None:
        name, target, progress = self._name, self._target, self.progress
        missing = self.gate.call(lambda: target.missing(name, shard, progress.seen))
        progress.done(shard.size_bytes - sum(part.size_bytes for part in missing), sent=False)
        if missing:
            with _reading(self._folder, shard) as file:
                self._put_all(file, missing)
        self.gate.call(lambda: target.finish(name, shard, progress.seen))

    def _put_all(self, file: ShardReader, parts: list[Part]) -> None:
        """Put the parts over a few connections; the first error ends all of them, and is raised here."""
        todo: SimpleQueue[Part] = SimpleQueue()
        for part in parts:
            todo.put(part)
        stop = Event()
        workers = min(self._order.remote.connections, len(parts))

        def work() -> None:
            memory = Snapshot(max(part.size_bytes for part in parts))
            while not stop.is_set():
                try:
                    part = todo.get_nowait()
                except Empty:
                    return
                self._put(file, part, memory.buffer[: part.size_bytes])

        with ThreadPoolExecutor(workers, thread_name_prefix="powerguard-put") as pool:
            futures = [pool.submit(work) for _ in range(workers)]
            wait(futures, return_when=FIRST_EXCEPTION)
            stop.set()
        for future in futures:
            future.result()

    def _put(self, file: ShardReader, part: Part, content: memoryview) -> None:
        """Read, verify, put. Nothing is ever sent that is not what the manifest says."""
        for number in range(len(part.digests)):
            start = number * part.chunk_bytes
            file.read_chunk(part.first + number, content[start : start + part.chunk_bytes])
        self.gate.call(lambda: self._target.put(self._name, part, content), part.size_bytes)
        self.progress.done(part.size_bytes, sent=True)

    def _all_there(self, manifest: Manifest) -> bool:
        """Look whether the other hosts' shards are there, for a while: what a NAS lists may be some seconds old."""
        until_s = boottime_s() + self._linger_s
        rest, rest_s = Event(), _LOOK_FIRST_S
        while self.gate.call(lambda: self._target.absent(self._name, manifest)):
            self.progress.seen(1)
            if boottime_s() >= until_s:
                return False
            rest.wait(rest_s)
            rest_s = min(2 * rest_s, _LOOK_MOST_S)
        return True


@contextmanager
def _reading(folder: Path, shard: Shard) -> Iterator[ShardReader]:
    """Open a local shard; what cannot be read there any more is lost, what reads otherwise is corrupt."""
    try:
        with ShardReader(folder, shard) as file:
            yield file
    except CorruptError as error:
        kind = Kind.LOST if error.chunk is None else Kind.CORRUPT
        raise TierError(kind, f"local checkpoint: {error}") from None
    except OSError as error:
        raise TierError(Kind.LOST, f"local checkpoint: {folder / shard.file}: {error.strerror}") from None
