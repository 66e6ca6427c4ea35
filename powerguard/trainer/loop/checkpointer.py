"""What takes the state of one process and makes it durable, as the guard sees it.

A state is copied into a snapshot, and written into the store from there. There are two, or one where host memory is
short.
"""

import contextlib
import gc
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Final, Protocol, TypeVar

from powerguard.trainer.log import log
from powerguard.trainer.ranks.base import Ranks, boottime_s
from powerguard.trainer.store.items import Copier, State
from powerguard.trainer.store.manifest import Layout, Manifest, Packed, Shard, committed_ms
from powerguard.trainer.store.memory import available_bytes
from powerguard.trainer.store.resume import LocalTier, choose
from powerguard.trainer.store.shards import CancelledError, Snapshot, laid_out
from powerguard.trainer.store.store import SavedCheckpoint, Store, StoreError
from powerguard.trainer.tiers import tier_of
from powerguard.trainer.tiers.base import Remote, Tier
from powerguard.wire import Phase

Save = Callable[[int], SavedCheckpoint]
"""Makes the state after this step durable and only then returns. Called in the training thread; may raise anything."""

ReportProgress = Callable[[Phase, int | None, int | None], None]
"""Called with (WRITING or COMMITTING, bytes done, bytes in all), from any thread."""

CLOSED = "the guard is closed (step and save before close(), and before the end of its `with`)"
FORKED = "this process is a fork of the one that made the guard (make a Guard here, too)"

_Value = TypeVar("_Value")


class WriteAbandoned(Exception):  # noqa: N818 - not an error: other bytes come first
    """A write is not wanted any more: a newer state goes first, or training has ended."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A state that was copied at a step boundary and can be written while training continues.

    slot: which snapshot holds it, 0 or 1. size_bytes: what this process will write. stall_s: for how long
    training stood to be copied.
    """

    step: int
    slot: int
    size_bytes: int
    stall_s: float = 0.0


class OtherRanks(Protocol):
    """The other ranks' part in one checkpoint."""

    @property
    def number(self) -> int | None:
        """The generation's; None if there is no generation."""
        ...

    @property
    def is_asked(self) -> bool | None:
        """Whether a host has asked for it: the same for all ranks, once it has ended. None: there are no others."""
        ...

    @property
    def token(self) -> str:
        """8 hex digits that all ranks know and no other checkpoint has."""
        ...

    @property
    def created(self) -> str:
        """Time of the commit for the manifest, RFC 3339: the same for all ranks, known once the shards are gathered."""
        ...

    def gather(self, shard: bytes, *, read: bool, after_ms: int = 0) -> list[bytes]:
        """Hand in this rank's shard, durable; return those of all ranks once all have (read=False: []). May raise.

        after_ms: the newest commit that this rank has seen; see `manifest.committed_ms`.
        """
        ...

    def failed(self, error: Exception) -> None:
        """Say that this rank's part came to nothing, and so the checkpoint."""
        ...

    def conclude(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Say that this rank's part is done; return the checkpoint once everybody's is. Raises when it is not."""
        ...


def commit_time(after_ms: int) -> str:
    """Return the time of day, RFC 3339, and later than after_ms in any case: a clock may have been set back."""
    now = datetime.now(UTC)
    if now.timestamp() * 1000 < after_ms + 1:
        now = datetime.fromtimestamp((after_ms + 1) / 1000, UTC)
    return now.isoformat(timespec="milliseconds")


class SingleProcess:
    """A job of one process: no others."""

    number: int | None = None
    is_asked: bool | None = None

    def __init__(self) -> None:
        self.token = secrets.token_hex(4)
        self.created = ""

    def gather(self, shard: bytes, *, read: bool, after_ms: int = 0) -> list[bytes]:
        """There is this shard."""
        self.created = commit_time(after_ms)
        return [shard] if read else []

    def failed(self, error: Exception) -> None:
        """No writer waits."""

    def conclude(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """There are no other ranks to wait for."""
        return saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a state is to be written.

    reason: why, for people. urgent: it may use the last of what is kept for emergencies. cancel: set when it is not
    wanted any more. others: what the other ranks have to do with it.
    """

    reason: str
    urgent: bool
    cancel: Event
    others: OtherRanks


class Checkpointer(Protocol):
    """Takes states and writes them. With two snapshots, one state is written while the next one is taken.

    beside: training continues while it writes. snapshots: how many states host memory holds at a time, 1 or 2.
    """

    @property
    def beside(self) -> bool: ...

    @property
    def snapshots(self) -> int: ...

    def measure(self) -> int | None:
        """Learn what this process will write, and how many snapshots there can be. Training thread, first boundary.

        None: the size is not known before the first save.
        """
        ...

    def take(self, step: int, slot: int, *, late: bool = False) -> Taken | SavedCheckpoint:
        """Copy the state, in the training thread at a step boundary; or save it here and now. May raise anything.

        late: training may go on while what it cannot change yet is still copied.
        """
        ...

    def copied(self, taken: Taken) -> tuple[float, str]:
        """How long the copy of a state that was written took, in seconds, and how it was made, in words."""
        ...

    def before_update(self) -> None:
        """Let what training changes next come after the copies that are under way. Training thread."""
        ...

    def write(self, taken: Taken, report: ReportProgress, order: Order) -> SavedCheckpoint:
        """Make it durable, then return, in the writer's thread. May raise anything; WriteAbandoned: cancelled."""
        ...

    def prepare(self, size_bytes: int, stop: Event) -> float | None:
        """Tidy up and make room for an emergency, until stopped.

        Returns bytes a second that the disk took, if that was seen.
        """
        ...

    def idle(self, stop: Event) -> None:
        """Do what can wait (scrub), until stopped."""
        ...

    def corrupt(self) -> int:
        """How many checkpoints turned out to be corrupt since this was last asked."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...

    def forsake(self) -> None:
        """In a child of fork: close what the parent holds, and touch nothing else."""
        ...


class FunctionCheckpointer:
    """Calls a function that saves by itself: training stands still meanwhile."""

    beside = False
    snapshots = 1

    def __init__(self, save: Save) -> None:
        self._save = save

    def measure(self) -> int | None:
        """The size of what the function will write is not known."""
        return None

    def copied(self, taken: Taken) -> tuple[float, str]:
        """Never called: `take` leaves nothing to write."""
        return taken.stall_s, ""

    def before_update(self) -> None:
        """No copy is under way: `take` saves here and now."""

    def take(self, step: int, slot: int, *, late: bool = False) -> Taken | SavedCheckpoint:  # noqa: ARG002 - no snapshots
        """Save here and now. Raises what the function raises, and TypeError when it does not say what it saved."""
        saved: object = self._save(step)
        if not isinstance(saved, SavedCheckpoint):
            msg = (
                f"the function that saves returned {saved!r:.80}, not a SavedCheckpoint, so it is unknown what "
                "is durable"
            )
            raise TypeError(msg)
        return saved

    def write(self, taken: Taken, report: ReportProgress, order: Order) -> SavedCheckpoint:  # noqa: ARG002
        """Never called: `take` leaves nothing to write."""
        raise WriteAbandoned(taken.step)

    def prepare(self, size_bytes: int, stop: Event) -> float | None:  # noqa: ARG002
        """Nothing to prepare."""
        return None

    def idle(self, stop: Event) -> None:
        """Nothing to do."""

    def corrupt(self) -> int:
        """Nothing is verified here."""
        return 0

    def close(self) -> None:
        """Nothing to let go of."""

    def forsake(self) -> None:
        """Nothing is held."""


def attempted(call: Callable[[], _Value], what: str) -> _Value | Exception:
    """Return what a call returned, or how it failed: nothing that saving does may end the training."""
    try:
        return call()
    except WriteAbandoned as end:
        return end
    except Exception as error:  # noqa: BLE001 - a failing disk must not end the training; the caller gets the error
        log.warning("%s failed: %s: %s", what, type(error).__name__, error)
        log.debug("%s failed", what, exc_info=True)
        return error


_SCRUB_EVERY_S: Final = 6 * 3600.0
_SCRUB_RATE: Final = 100e6
"""Bytes a second for what can wait: a little of any disk that one trains on."""


_SHARE: Final = 0.75
"""Of the memory that is available, what snapshots may take: the rest is for what training takes later."""


class _Held:
    """One snapshot, as large as the state, and what it holds.

    lock: held while it is written into: by the training thread's copy, and while its pages are touched beforehand.
    layout: where the items of the state in it lie; None: it holds no state. how: in words, how that was copied.
    """

    def __init__(self, copier: Copier | None) -> None:
        self.snapshot = Snapshot(copier=copier)
        self.lock = threading.Lock()
        self.layout: Layout | None = None
        self.how = ""


class StoreCheckpointer:
    """Takes and writes the state of one rank under a root.

    snapshots: how many states host memory is to hold, 1 or 2; None: two, where both leave a quarter of what is
    available. processes: of the job on this host, which measure at the same step. Before `measure` there is one.
    """

    beside = True

    def __init__(
        self,
        state: State,
        store: Store,
        *,
        hosts: int = 1,
        snapshots: int | None = None,
        processes: int = 1,
        available: Callable[[], int | None] = available_bytes,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self._state = state
        self._store = store
        self._hosts = hosts
        self._clock = clock
        self._copier: Copier | None = getattr(state, "copier", None)
        self._wanted = snapshots
        self._processes = processes
        self._available = available
        self._held = [_Held(self._copier)]
        self._is_taking = False
        """The training thread takes a snapshot's lock: the writer's thread can wait. No Event: see step_hook."""
        self._is_short = False
        self._restores = 0
        self._aside = 0
        self._scrub_at_s = clock() + _SCRUB_EVERY_S
        self._seen_ms, self._seen_at_s = 0, clock()
        """The newest commit that this rank has seen, in any tier, and when it saw it, by a clock that is never set."""

    @property
    def root(self) -> Path:
        """The folder of this job's checkpoints."""
        return self._store.root

    def newest_step(self) -> int | None:
        """Return the highest step of the checkpoints that lie there; None: there is none."""
        found = self._store.found()
        for each in found:
            self._see(committed_ms(each.manifest.created))
        return max((each.step for each in found), default=None)

    def leave_behind(self, above: int) -> None:
        """Set aside every checkpoint of a step above this one; see `Store.leave_behind`."""
        self._store.leave_behind(above)

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that commits under its root."""
        return self._store.leader

    @property
    def snapshots(self) -> int:
        """How many states host memory holds at a time."""
        return len(self._held)

    def measure(self) -> int | None:
        """What this rank would write: asked of the items, without copying any. Raises what no save could write."""
        layout = laid_out(self._state.items())
        Shard.check(layout, self._store.ranks)
        if self.snapshots == 1 and self._has_room(layout.size_bytes):
            self._held.append(_Held(self._copier))
        return layout.size_bytes

    def _has_room(self, size_bytes: int) -> bool:
        """Whether host memory is to hold two snapshots of this size."""
        free_bytes = self._available()
        if self._wanted is not None or free_bytes is None:
            return self._wanted != 1
        share_bytes = free_bytes // self._processes
        missing_bytes = 2 * size_bytes - self._held[0].snapshot.size_bytes  # a restore has read into the first
        if missing_bytes <= _SHARE * share_bytes:
            return True
        log.warning(
            "host memory holds one snapshot of the state, not two: %.1f GB more are needed, and %.1f GB are available"
            " to this process (snapshots=2 has two in any case)",
            missing_bytes / 1e9,
            share_bytes / 1e9,
        )
        return False

    def take(self, step: int, slot: int, *, late: bool = False) -> Taken | SavedCheckpoint:
        """Copy every item. Raises what the state raises."""
        self._is_taking, collects = True, gc.isenabled()
        try:
            gc.disable()  # 40,000 tensors make objects enough for three collections of a quarter second in all
            held = self._held[slot]
            with held.lock:
                held.layout = None
                layout = held.layout = held.snapshot.take(self._state.items(), late=late)
        finally:
            self._is_taking = False
            if collects:
                gc.enable()
        held.how = "" if self._copier is None else self._copier.how
        return Taken(step, slot, layout.size_bytes)

    def copied(self, taken: Taken) -> tuple[float, str]:
        """How long the copy of a state that was written took, in seconds, and how it was made, in words."""
        held = self._held[taken.slot]
        return held.snapshot.copy_s, held.how

    def before_update(self) -> None:
        """Let what training changes next come after the copies that are under way. Training thread."""
        if self._copier is not None:
            self._copier.before_update()

    def write(self, taken: Taken, report: ReportProgress, order: Order) -> SavedCheckpoint:
        """Write this rank's shard; the leader of each root commits once all ranks have. A failure leaves nothing."""
        others = order.others
        name = self._store.name(taken.step, others.token)
        try:
            shard = self._write(name, taken, report, order)
            report(Phase.COMMITTING, taken.size_bytes, taken.size_bytes)
            after_ms = self._seen_ms + int(1000 * (self._clock() - self._seen_at_s))
            shards = others.gather(shard.packed().to_json(), read=self._store.leader, after_ms=after_ms)
            self._see(committed_ms(others.created))
            saved = self._commit(name, taken, shards, order)
        except CancelledError as error:
            over = WriteAbandoned(str(error))
            self._fail(name, others, over)
            raise over from error
        except Exception as error:
            self._fail(name, others, error)
            raise
        try:
            saved = others.conclude(saved)
        except Exception:
            self._abandon(name)
            raise
        self._store.let_go()
        self._leave_room(taken.size_bytes)  # not before all hosts have committed: until then the older one counts
        return saved

    def _write(self, name: str, taken: Taken, report: ReportProgress, order: Order) -> Shard:
        held = self._held[taken.slot]
        if order.cancel.is_set() or held.layout is None:  # it may hold another state, and no folder is to be taken
            msg = "a newer state went first, or training has ended"
            raise CancelledError(msg)
        return self._store.write_shard(
            name,
            self._store.rank,
            held.snapshot,
            held.layout,
            lambda done, total: report(Phase.WRITING, done, total),
            urgent=order.urgent,
            cancel=order.cancel,
        )

    def _fail(self, name: str, others: OtherRanks, error: Exception) -> None:
        """Inform the others first: else the first rank that misses the folder would fail without a reason."""
        try:
            others.failed(error)
        finally:
            self._abandon(name)

    def _abandon(self, name: str) -> None:
        with contextlib.suppress(OSError, StoreError):  # a disk that refused the write may refuse this, too
            self._store.abandon(name)

    def _see(self, committed_at_ms: int) -> None:
        """Note a commit: what is committed from now on is later, by as much as time has gone by."""
        if committed_at_ms > self._seen_ms:
            self._seen_ms, self._seen_at_s = committed_at_ms, self._clock()

    def _commit(self, name: str, taken: Taken, shards: list[bytes], order: Order) -> SavedCheckpoint:
        """Commit as the leader of this root; else say where it will lie, once the leader has."""
        if not self._store.leader:
            path = str(self._store.root / name)
            return SavedCheckpoint(step=taken.step, path=path, size_bytes=taken.size_bytes, manifest_digest="")
        manifest = Manifest(
            job=self._store.job,
            step=taken.step,
            created=order.others.created,
            reason=order.reason,
            ranks=self._store.ranks,
            hosts=self._hosts,
            shards=tuple(Packed.parse(each) for each in shards),
        )
        return self._store.commit(name, manifest)

    def _leave_room(self, size_bytes: int) -> None:
        """Have a slot for the next emergency at once, where this one took the last: it may come before idle time."""
        try:
            self._store.leave_room(size_bytes)
        except (OSError, StoreError) as error:  # what was committed is
            log.warning("%s: an emergency may find no room: %s", self._store.root, error)

    def prepare(self, size_bytes: int, stop: threading.Event) -> float | None:
        """Touch the snapshots, let old checkpoints go, and fill the emergency slots; see `Store.prepare`.

        Returns bytes a second that the disk took meanwhile; None when there was nothing to write, or it was stopped.
        """
        for held in tuple(self._held):
            try:
                with held.lock:
                    if held.layout is None:  # else growing or touching it would lose what it holds
                        held.snapshot.reserve(size_bytes, stop=stop)
            except OSError as error:  # old checkpoints must go all the same
                log.warning("host memory for a snapshot cannot be had: %s (snapshots=1 needs half of it)", error)
            self._register(held, stop)
            if stop.is_set():
                return None
        self._store.prune(stop)
        ready, began_s = self._store.slots_ready(size_bytes), self._clock()
        try:
            is_done, short = self._store.prepare(size_bytes, stop=stop), ""
        except StoreError as error:
            is_done, short = True, str(error)
        if short and not self._is_short:
            log.warning("%s", short)
        self._is_short = bool(short)
        made = self._store.slots_ready(size_bytes) - ready
        return made * size_bytes / max(self._clock() - began_s, 1e-6) if is_done and made > 0 else None

    def _register(self, held: _Held, stop: threading.Event) -> None:
        """Make a snapshot known to the GPU, piece by piece, until it is, or until someone waits."""
        is_more = True
        while is_more and not stop.is_set() and not self._is_taking:
            with held.lock:
                is_more = held.snapshot.register()

    def idle(self, stop: threading.Event) -> None:
        """Verify the newest checkpoint on the disk every six hours."""
        if not self._store.leader or self._clock() < self._scrub_at_s:
            return
        due_s, self._scrub_at_s = self._scrub_at_s, self._clock() + _SCRUB_EVERY_S  # after an error, too: it may stay
        scrubbed = self._store.scrub(rate=_SCRUB_RATE, stop=stop)
        if scrubbed is not None and not scrubbed.whole and scrubbed.corrupt is None:
            self._scrub_at_s = due_s  # it was stopped

    def corrupt(self) -> int:
        """How many checkpoints were set aside since this was last asked."""
        before, self._aside = self._aside, self._store.set_aside_count
        return self._aside - before

    def restore(
        self, ranks: Ranks, remote: Remote | None, step: int | None = None
    ) -> tuple[SavedCheckpoint, int] | None:
        """Load the newest checkpoint that every rank can read to the last byte, or that of a step, from whichever tier.

        Returns it, and how many were rotten (passed over, or repaired from another tier); None: there is none.
        Raises StoreError, RanksError, TierError.
        """
        tiers: list[Tier] = [LocalTier(self._store)]
        if remote is not None:
            tiers.append(tier_of(remote, self._store.job))
        self._restores += 1
        key, held = f"resume/{self._restores}", self._held[0]
        with held.lock:
            held.layout = None
            chosen = choose(tiers, ranks, job=self._store.job, step=step, into=held.snapshot, key=key)
            self.corrupt()  # those are in what is returned
            if chosen is None:
                self._store.warn_of_none()
                return None
            self._see(chosen.newest_ms)
            if chosen.local:
                self._store.trust(chosen.found)  # neither retention nor the scrub need read it again now
            held.snapshot.register(whole=True)  # a GPU loads from registered memory seven times as fast
            self._state.load(chosen.items)
        return chosen.found.saved(), len(chosen.refused) + bool(chosen.repaired)

    def keep_as(self, saved: SavedCheckpoint, name: str) -> None:
        """Keep this checkpoint under a name of its own; see `Store.keep_as`. Other ranks than the leader do nothing."""
        if self._store.leader:
            self._store.keep_as(saved, name)

    def close(self) -> None:
        """Let go of the root and of the memory."""
        self._store.close()
        for held in self._held:
            held.snapshot.close()

    def forsake(self) -> None:
        """In a child of fork: the lock is the parent's, and so is the GPU."""
        self._store.close()
        if self._copier is not None:
            self._copier.forsake()
