"""Finds the checkpoints below a folder or in an object store, and checks whether they are complete.

A folder may be a checkpoint itself, a job's root, or hold several of these (a NAS with a folder for each job). Native
checkpoints and sealed folders of any framework are recognised by their content, never by a name alone.
"""

import argparse
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from powerguard.cli.render import Bar
from powerguard.effectors.host.filesystems import NETWORKED, kind_of
from powerguard.trainer.seal.folder import glance, verify
from powerguard.trainer.seal.manifest import SEAL, SealError, UnjudgedError, step_in
from powerguard.trainer.store.folders import BAD, OLD, Found, Refused, look
from powerguard.trainer.store.manifest import MANIFEST, Shard, StoreError, step_of
from powerguard.trainer.store.shards import ShardReader, Snapshot, held, over_chunks
from powerguard.trainer.tiers import ObjectTier
from powerguard.trainer.tiers.base import SET_ASIDE, Kind, Remote, Source, TierError
from powerguard.trainer.tiers.transfer import Gate

NEWER: Final = "newer-"
"""Prefix of a checkpoint's name that a roll-back to an older one has set aside."""
_GONE_BACK: Final = "training had gone back before its step"
_DEPTH: Final = 2
_READERS: Final = 4
PATIENCE_S: Final = 30.0
"""Retries for an object store that is throttling, or a network that fails for a moment."""


def access_of(args: argparse.Namespace) -> dict[str, str | None]:
    """Return the options of an object store other than its address."""
    return {
        "endpoint": args.endpoint,
        "region": args.region,
        "credentials_file": args.credentials_file,
        "profile": args.profile,
    }


class PlaceError(Exception):
    """A place that cannot be read: which, why, and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One checkpoint, or an object that looks like one.

    kind: native, sealed, other (of a framework, without a seal). state: complete (names and sizes hold, not read),
    verified (every byte read just now), corrupt, unreadable, unfinished, set_aside, not_sealed; because: why.
    created_s: wall time of the commit; None when not known. tier: where it lies.
    """

    kind: str
    state: str
    name: str
    path: str
    tier: str
    step: int | None = None
    job: str | None = None
    size_bytes: int | None = None
    created_s: float | None = None
    reason: str = ""
    because: str = ""
    found: Found | None = None

    @property
    def is_whole(self) -> bool:
        """As far as is known, it can be resumed from."""
        return self.state in ("complete", "verified")

    def as_json(self, now_s: float) -> dict[str, object]:
        """The object that --json shows."""
        age_s = None if self.created_s is None else round(max(0.0, now_s - self.created_s), 3)
        return {
            "kind": self.kind,
            "state": self.state,
            "because": self.because,
            "step": self.step,
            "job": self.job,
            "name": self.name,
            "path": self.path,
            "tier": self.tier,
            "size_bytes": self.size_bytes,
            "created_at": self.created_s,
            "age_s": age_s,
            "reason": self.reason,
        }


def tier_at(url: str, **access: str | None) -> ObjectTier:
    """Open a job's part of an object store: scheme://bucket/prefix/JOB. Raises PlaceError."""
    base, _, job = url.rstrip("/").rpartition("/")
    if not job or base.endswith("/") or "://" not in base:
        msg = f"{url}: add the job's folder (example: s3://bucket/prefix/JOB)"
        raise PlaceError(msg)
    try:
        given = {key: value for key, value in access.items() if value is not None}
        return ObjectTier(Remote(url=base, **given), job)  # type: ignore[arg-type]
    except (ValueError, TierError, ImportError) as error:
        msg = f"{url}: {error}"
        raise PlaceError(msg) from error


def entries_at(place: str, **access: str | None) -> list[Entry]:
    """List what is at a place, the highest step first. Reads no data. Raises PlaceError."""
    if "://" in place:
        return _stored(tier_at(place, **access), place)
    root = Path(place).absolute()
    try:
        if not root.is_dir():
            msg = f"{root}: {'is not a folder' if root.exists() else 'no such folder'}"
            raise PlaceError(msg)
        tier = tier_of_folder(str(root))
        alone = _checkpoint(root, tier)
        entries = [alone] if alone is not None else list(_below(root, tier, _DEPTH))
    except OSError as error:
        msg = f"{error.filename or root}: {error.strerror or error}"
        raise PlaceError(msg) from error
    return sorted(entries, key=_newest_first)


def _newest_first(entry: Entry) -> tuple[int, float, str]:
    return (-1 if entry.step is None else -entry.step, -(entry.created_s or 0.0), entry.path)


def by_commit(entry: Entry) -> tuple[float, float]:
    """Return the key by which the newest is the last: training that was rolled back commits lower steps later.

    Sealed ones go by their step: copying or sealing again changes their time.
    """
    created_s, step = entry.created_s or 0.0, float(entry.step or 0)
    return (created_s, step) if entry.kind == "native" else (step, created_s)


def _stored(tier: ObjectTier, place: str) -> list[Entry]:
    scheme = place.partition("://")[0]
    try:
        entries = [entry for name in tier.by_commit() if (entry := _in_store(tier, name, place)) is not None]
        for name in tier.aside(most=None):
            because = "marked in the store, because it did not verify"
            path = f"{place.rstrip('/')}/{name}"
            entries.append(
                Entry(
                    kind="native",
                    state="set_aside",
                    name=name,
                    path=path,
                    tier=scheme,
                    step=step_of(name),
                    because=because,
                )
            )
    except (TierError, StoreError, OSError) as error:
        raise PlaceError(str(error)) from error
    return sorted(entries, key=_newest_first)


def _in_store(tier: ObjectTier, name: str, place: str) -> Entry | None:
    """Return a checkpoint of a store; None if it was removed meanwhile."""
    scheme, path = place.partition("://")[0], f"{place.rstrip('/')}/{name}"
    try:
        found = tier.looked_at(name)
    except TierError as error:
        if error.kind is not Kind.CORRUPT:
            raise
        step = step_of(name)
        return Entry(kind="native", state="corrupt", name=name, path=path, tier=scheme, step=step, because=str(error))
    return None if found is None else _native(found, scheme)


def tier_of_folder(path: str) -> str:
    """Return "nas" for a network mount, else "local", without touching it."""
    mountinfo = ""
    with contextlib.suppress(OSError):
        mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return "nas" if kind_of(path, mountinfo) in NETWORKED else "local"


def _below(root: Path, tier: str, depth: int) -> Iterator[Entry]:
    """Yield the checkpoints below a folder; a folder that is not one may hold some."""
    paths = sorted(root.iterdir())
    natives: dict[str, Found | Refused] = {each.name: each for each in look(root)}
    for path in paths:
        is_other = path.is_symlink() and path.name not in natives
        if path.name.startswith(".") or is_other or not path.is_dir():
            continue
        with contextlib.suppress(PermissionError, FileNotFoundError):  # a training prunes, and renames, meanwhile
            entry = _checkpoint(path, tier, natives)
            if entry is not None:
                yield entry
            elif depth > 1:
                yield from _below(path, tier, depth - 1)


def _checkpoint(path: Path, tier: str, natives: dict[str, Found | Refused] | None = None) -> Entry | None:
    """Return a folder as a checkpoint; None if it is not one."""
    name = path.name
    for mark, because in (
        (BAD, "it did not verify, or its restore was undone"),
        (NEWER, "newer than the checkpoint of a roll-back"),
        (OLD, _GONE_BACK),
    ):
        step = step_of(name[name.find("step-") :])
        if name.startswith(mark) and step is not None:
            return Entry(
                kind="native", state="set_aside", name=name, path=str(path), tier=tier, step=step, because=because
            )
    if step_of(name) is not None:
        if natives is None:
            natives = {each.name: each for each in look(path.parent) if each.name == name}
        return _native_at(path, tier, natives.get(name))
    if (path / SEAL).exists():
        entry = _sealed(path, tier)
        for mark, because in ((BAD, "it did not verify"), (OLD, _GONE_BACK)):
            if name.startswith(mark):  # no resume looks at it
                entry = replace(entry, state="set_aside", because=because, step=entry.step or step_in(name))
        return entry
    if step_in(name) is not None and any(path.iterdir()):
        because = f"run `powerguard seal {path}` to make it safe against a power cut"
        return Entry(
            kind="other",
            state="not_sealed",
            name=name,
            path=str(path),
            tier=tier,
            step=step_in(name),
            created_s=path.stat().st_mtime,
            because=because,
        )
    return None


def _native_at(path: Path, tier: str, seen: Found | Refused | None) -> Entry:
    step = step_of(path.name)
    blank = Entry(kind="native", state="unfinished", name=path.name, path=str(path), tier=tier, step=step)
    match seen:
        case Found():
            if (path / SET_ASIDE).exists():
                reason = (path / SET_ASIDE).read_text(encoding="utf-8", errors="replace")[:500].strip()
                return replace(_native(seen, tier), state="set_aside", because=f"set aside: {reason}")
            return _native(seen, tier)
        case Refused():
            return replace(blank, state="corrupt" if seen.rotten else "unreadable", because=seen.reason)
        case None:
            because = f"no {MANIFEST}: it was never committed, or is still being written"
            return replace(blank, because=because, created_s=path.stat().st_mtime)


def _native(found: Found, tier: str) -> Entry:
    try:
        created_s: float | None = datetime.fromisoformat(found.manifest.created).timestamp()
    except (ValueError, OverflowError):
        created_s = None
    return Entry(
        kind="native",
        state="complete",
        name=found.name,
        path=found.path,
        tier=tier,
        step=found.step,
        job=found.manifest.job,
        size_bytes=found.manifest.size_bytes,
        created_s=created_s,
        reason=found.manifest.reason,
        found=found,
    )


def _sealed(path: Path, tier: str) -> Entry:
    entry = Entry(kind="sealed", state="complete", name=path.name, path=str(path), tier=tier, step=step_in(path.name))
    try:
        verdict = glance(path)
        created_s = (path / SEAL).stat().st_mtime
    except UnjudgedError as error:
        return replace(entry, state="unreadable", because=str(error))
    except SealError as error:
        return replace(entry, state="corrupt", because=str(error))
    except OSError as error:
        return replace(entry, state="unreadable", because=error.strerror or str(error))
    if verdict is None:
        return replace(entry, state="unfinished", because=f"{SEAL} has just gone")
    entry = replace(
        entry, step=verdict.seal.step, size_bytes=verdict.seal.size_bytes, created_s=created_s, reason="sealed"
    )
    return replace(entry, state="corrupt", because=_summary(verdict.findings)) if verdict.findings else entry


def _summary(findings: Sequence[object]) -> str:
    more = f" and {len(findings) - 8} more" if len(findings) > 8 else ""
    return "; ".join(map(str, findings[:8])) + more


# --- Reading to the last byte -----------------------------------------------------------------------------------------


def verified(entry: Entry, bar: Bar, **access: str | None) -> Entry:
    """Read every byte of a checkpoint; return its new state. Other entries are returned unchanged.

    One that training has removed while others were read, because it has committed a newer one, is no damage.
    """
    read = _verified(entry, bar, **access)
    if read.is_whole or not entry.is_whole or _is_here(entry, **access):
        return read
    return replace(entry, state="unfinished", because="it was removed meanwhile")


def _is_here(entry: Entry, **access: str | None) -> bool:
    """Whether there still is what makes it a checkpoint, which goes first when it is removed."""
    if "://" not in entry.path:
        return any((Path(entry.path) / name).exists() for name in (MANIFEST, SEAL))
    with contextlib.suppress(TierError):
        return tier_at(entry.path.rpartition("/")[0], **access).committed(entry.name) is not None
    return True


def _verified(entry: Entry, bar: Bar, **access: str | None) -> Entry:
    if entry.kind == "sealed" and entry.state in ("complete", "corrupt"):
        try:
            verdict = verify(entry.path, progress=bar.renamed(entry.name))
        except UnjudgedError as error:
            return replace(entry, state="unreadable", because=str(error))
        except SealError as error:
            return replace(entry, state="corrupt", because=str(error))
        except OSError as error:
            return replace(entry, state="unreadable", because=f"{error.filename}: {error.strerror}")
        state = "verified" if verdict.is_whole else "unreadable" if verdict.is_unread else "corrupt"
        return replace(entry, state=state, because=_summary(verdict.findings))
    if entry.found is None or not entry.is_whole:
        return entry
    try:
        here = _read_native(entry.found, bar.renamed(entry.name), **access)
    except TierError as error:  # a store that does not answer, or refuses, does not show what it holds
        return replace(entry, state="corrupt" if error.kind is Kind.CORRUPT else "unreadable", because=str(error))
    except StoreError as error:
        return replace(entry, state="corrupt", because=str(error))
    except OSError as error:
        return replace(entry, state="unreadable", because=f"{error.filename}: {error.strerror}")
    elsewhere = entry.found.manifest.ranks - here
    because = f"{elsewhere} of {entry.found.manifest.ranks} shards lie on other hosts" if elsewhere else ""
    return replace(entry, state="verified", because=because)


def _read_native(found: Found, bar: Bar, **access: str | None) -> int:
    """Read and compare every shard that lies here; return how many."""
    if "://" in found.path:
        tier = tier_at(found.path.rpartition("/")[0], **access)
        shards = found.manifest.shards
        total, done = sum(shard.size_bytes for shard in shards), 0
        gate = Gate(patience_s=PATIENCE_S)
        for packed in shards:
            shard = found.shard(packed.rank)
            with contextlib.closing(Patient(tier, found, shard, gate)) as source:
                done = each_chunk(source, shard, lambda size, at=done: bar(at + size, total)) + done  # type: ignore[misc]
        return len(shards)
    folder = Path(found.path)
    shards = tuple(packed for packed in found.manifest.shards if (folder / packed.file).exists())
    total, done = sum(shard.size_bytes for shard in shards), 0
    with held(folder):
        for packed in shards:
            shard = found.shard(packed.rank)
            with ShardReader(folder, shard) as file:
                done = each_chunk(file, shard, lambda size, at=done: bar(at + size, total)) + done  # type: ignore[misc]
    return len(shards)


class Patient:
    """A shard in an object store; transient errors are retried. Raises TierError."""

    def __init__(self, tier: ObjectTier, found: Found, shard: Shard, gate: Gate) -> None:
        self._gate = gate
        self._source = gate.call(lambda: tier.open_shard(found, shard))

    def read_chunk(self, index: int, target: memoryview) -> None:
        self._gate.call(lambda: self._source.read_chunk(index, target))

    def close(self) -> None:
        self._source.close()


def each_chunk(source: Source, shard: Shard, progress: Callable[[int], None]) -> int:
    """Read all chunks of a shard, a few at a time, each thread in memory of its own. Returns the bytes."""
    own = threading.local()
    lock = threading.Lock()
    done = 0

    def work(index: int, start: int, end: int) -> None:
        nonlocal done
        if not hasattr(own, "memory"):
            own.memory = Snapshot(min(shard.chunk_bytes, shard.size_bytes))
        source.read_chunk(index, own.memory.buffer[: end - start])
        with lock:
            done += end - start
            progress(done)

    over_chunks(shard.size_bytes, shard.chunk_bytes, work, threads=_READERS)
    return done


def now_s() -> float:
    """Wall time: the age of a checkpoint counts over boots."""
    return time.time()  # noqa: TID251 - for display
