"""What slower tiers have in common: where the second copy goes, how it is cut, what can go wrong, what is kept.

A shard is uploaded in parts of whole chunks. A part's name says which chunks it holds and what they are (xxh3-128 over
their digests), so a killed child finds by listing what is there already: there is no state to lose, and no part of
one checkpoint can be taken for another's. One checkpoint in so many seconds is copied (`period_of`), on all hosts of a
job the same ones. `within` limits calls that may never return: a mount whose server has gone.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, Protocol, Self, TypeVar

from powerguard.trainer.store.folders import Found, SavedCheckpoint
from powerguard.trainer.store.items import Loaded
from powerguard.trainer.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, ManifestError, Shard, StoreError
from powerguard.trainer.store.manifest import digest_of as digest_of_manifest
from powerguard.trainer.store.shards import THREADS, Snapshot, digest_of, over_chunks


def period_of(saved: SavedCheckpoint, every_s: float) -> int | None:
    """The number of the period of every_s seconds in which a checkpoint was made; the first of each period is copied.

    By the time in its manifest, on which all hosts agreed: by clocks of their own one host would copy this checkpoint
    and another the next one, and the slower tier would never have all shards of any. None: it cannot be read any more.
    """
    try:
        with Path(saved.path, MANIFEST).open("rb") as file:
            created = Manifest.parse(file.read(MAX_MANIFEST_BYTES + 1)).created
        return int(datetime.fromisoformat(created).timestamp() // every_s)
    except (OSError, ManifestError, ValueError, OverflowError):
        return None


SCHEMES: Final = ("s3://", "s3a://", "gs://", "az://", "azure://", "abfs://", "abfss://")
"""Of object stores; a folder is named by its absolute path."""

PART_BYTES: Final = 32 << 20
"""How much is put at a time: what a kill can cost each connection, and what each of them holds in memory."""

SET_ASIDE: Final = "SET-ASIDE"
"""Name of the marker next to a manifest that must not be loaded again; its content says why. Nothing is deleted."""

NEWEST: Final = 8
"""How many of the newest checkpoints a tier lists: each costs its manifest, and older ones are of no use."""

MAX_REASON_BYTES: Final = 2048

_CONTAINER: Final = re.compile(r"abfss?://[a-z0-9-]+@")
"""Of Azure's own form, abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH: no credentials."""

_SAFE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_DAY_S: Final = 86400


class Kind(StrEnum):
    """Kind of an error: it decides what to do next, and is a label of a metric."""

    THROTTLED = "throttled"
    SERVER = "server"
    NETWORK = "network"
    DENIED = "denied"
    CLOCK = "clock"
    ABSENT = "absent"
    FULL = "full"
    STALLED = "stalled"
    CONFLICT = "conflict"
    CORRUPT = "corrupt"
    LOST = "lost"
    UNUSABLE = "unusable"


TRANSIENT: Final = frozenset({Kind.THROTTLED, Kind.SERVER, Kind.NETWORK})
"""What may be gone in a moment: tried again at once, more and more slowly."""


class TierError(Exception):
    """A tier that did not do what was asked: what, where, what would be right. Holds no secret and no server's text."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Where the second copy of a job's checkpoints goes.

    url: "s3://bucket/prefix", "gs://...", "az://...", or a folder ("/nas/checkpoints"). A folder of the job's name is
    made below it; the folder itself is not: name one inside the mount, so that it is missing where the NAS is.
    endpoint: of an S3 server that is not Amazon's. region: None: the environment's, else us-east-1.
    credentials_file: as ~/.aws/credentials, readable by its owner only; None: the environment's, the pod's or the
    instance's own. profile: its section. checksum: let S3 verify the sha256 of each part (a few S3-likes cannot).
    bytes_per_s: the most it may send, on average over a few seconds; None: all it gets. connections: at a time;
    each holds one part of part_bytes in memory.
    keep, keep_days: the newest so many stay, and the newest of each of so many days before.
    """

    url: str
    endpoint: str | None = None
    region: str | None = None
    credentials_file: str | None = None
    profile: str = "default"
    checksum: bool = True
    bytes_per_s: float | None = None
    connections: int = 4
    part_bytes: int = PART_BYTES
    keep: int = 3
    keep_days: int = 7

    def __post_init__(self) -> None:
        if not self.is_folder and any(mark in _CONTAINER.sub("", self.url) + (self.endpoint or "") for mark in "@?"):
            msg = "a URL must not hold credentials (name a credentials_file)"
            raise ValueError(msg)
        if not self.is_folder and not self.url.startswith(SCHEMES):
            msg = f"{self.url}: must be an absolute path, or begin with one of {', '.join(SCHEMES)}"
            raise ValueError(msg)
        if not self.is_folder and not self.url.partition("://")[2].partition("/")[0]:
            msg = f"{self.url}: names no bucket (write {self.url.partition('://')[0]}://bucket/prefix)"
            raise ValueError(msg)
        for name, least in (("keep", 1), ("keep_days", 0), ("connections", 1), ("part_bytes", 1)):
            if getattr(self, name) < least:
                msg = f"{name}={getattr(self, name)}: must be at least {least}"
                raise ValueError(msg)
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            msg = f"bytes_per_s={self.bytes_per_s}: must be above 0 (None: no limit)"
            raise ValueError(msg)

    @classmethod
    def of(cls, remote: "str | Path | Remote") -> "Remote":
        """Take a plain URL or path as it is."""
        return remote if isinstance(remote, Remote) else cls(url=os.fspath(remote))

    @property
    def is_folder(self) -> bool:
        return self.url.startswith("/")

    def as_json(self) -> dict[str, Any]:
        """Order to the child. It names the file of the credentials, and never contains them."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        return cls(**{field.name: document[field.name] for field in fields(cls)})


def conflict(url: str, name: str, found: str | None, digest: str) -> TierError:
    """Say that another manifest stands where one of this digest was to be put."""
    msg = (
        f"{url}/{name}: another checkpoint stands under this name ({found}, not {digest}):"
        " two trainings share a job name, or the store mixed them up (give each job its own)"
    )
    return TierError(Kind.CONFLICT, msg)


def digest_there(content: bytes | None) -> str | None:
    """Return the digest of a manifest in a tier, also of one that was copied there from a local disk. None: none."""
    try:
        return None if content is None else digest_of_manifest(content)
    except ManifestError:  # it is none, and so not the one to be put
        return "no manifest"


def folder_of(job: str) -> str:
    """The name of a job's folder in a tier: its own name where that can stand in a path, else a digest of it."""
    return job if _SAFE.fullmatch(job) else "x" + sha256(job.encode("utf-8", "replace")).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some neighbouring chunks of a shard. digest: xxh3-128 over their digests, in hex."""

    file: str
    first: int
    digests: tuple[str, ...]
    offset: int
    size_bytes: int
    chunk_bytes: int
    digest: str

    @property
    def name(self) -> str:
        """Its name below the shard's: where it begins, how many chunks, and what they are."""
        return f"{self.first:08d}-{len(self.digests)}-{self.digest}"

    def wrong(self, content: memoryview) -> int | None:
        """The number, in the shard, of the first chunk that is not what it must be; None: all are."""
        for number, digest in enumerate(self.digests):
            if digest_of(content[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]) != digest:
                return self.first + number
        return None


def part_of(shard: Shard, first: int, count: int) -> Part:
    """The part of so many chunks (fewer at the end) from `first` on."""
    digests = shard.digests[first : first + count]
    offset = first * shard.chunk_bytes
    return Part(
        file=shard.file,
        first=first,
        digests=digests,
        offset=offset,
        size_bytes=min(len(digests) * shard.chunk_bytes, shard.size_bytes - offset),
        chunk_bytes=shard.chunk_bytes,
        digest=digest_of(memoryview(b"".join(bytes.fromhex(digest) for digest in digests))),
    )


def parts_of(shard: Shard, part_bytes: int = PART_BYTES) -> list[Part]:
    """Cut a shard into parts of at most `part_bytes`, but of at least one chunk."""
    count = max(1, part_bytes // shard.chunk_bytes)
    return [part_of(shard, first, count) for first in range(0, len(shard.digests), count)]


Seen = Callable[[int], None]
"""Called with the bytes that were read back, so that a long operation shows progress."""


class Target(Protocol):
    """The writing side of a tier: used in the upload's child only, from several threads. All raise TierError.

    Twice is as good as once, for each of them: a child is killed at any instant, and begins again.
    """

    def committed(self, name: str) -> str | None:
        """The digest of the manifest that stands under this name; None: none does."""
        ...

    def missing(self, name: str, shard: Shard, seen: Seen) -> list[Part]:
        """What of this shard is not there yet."""
        ...

    def put(self, name: str, part: Part, content: memoryview) -> None:
        """Store one part; its content has been verified."""
        ...

    def finish(self, name: str, shard: Shard, seen: Seen) -> None:
        """Make what was put durable and visible as a whole; raises TierError (unusable) when it is not what was put."""
        ...

    def absent(self, name: str, manifest: Manifest) -> list[int]:
        """The ranks whose shards are not whole yet, whichever host uploads them."""
        ...

    def commit(self, name: str, manifest: Manifest) -> bool:
        """Put the manifest unless there is one: that single act is the commit. False: the same one was there already.

        Raises TierError (conflict) when another stands there.
        """
        ...

    def prune(self, keep: int, keep_days: int, spare: str) -> list[str]:
        """Remove what retention does not keep; return its names. spare: the one that was just committed stays."""
        ...

    def clear(self, spare: str) -> bool:
        """Remove what was begun and never committed, but for this one. False: there is nothing of the kind."""
        ...


class Source(Protocol):
    """One rank's shard in one tier, open for reading."""

    def read_chunk(self, index: int, target: memoryview) -> None:
        """Fill the target, which has the chunk's size, and verify it. Raises TierError, StoreError or OSError."""
        ...

    def close(self) -> None: ...


class Tier(Protocol):
    """The reading side of a tier. Raises TierError, StoreError or OSError; never hangs."""

    @property
    def word(self) -> str:
        """Its name in status, metrics and errors."""
        ...

    def found(self) -> list[Found]:
        """The newest checkpoints that are not set aside: those committed last, by the server's clock."""
        ...

    def open_shard(self, found: Found, shard: Shard) -> Source: ...

    def set_aside(self, found: Found, reason: str) -> None:
        """See that it is never chosen again, without deleting it."""
        ...

    def aside(self) -> list[str]:
        """The names of those that were set aside."""
        ...


def read_shard(open_shard: Callable[[Found, Shard], Source], found: Found, rank: int) -> dict[str, Loaded]:
    """Read and verify one rank's shard, in one pass. open_shard: a tier's, or one that tries again.

    The items are views of the same memory. Raises what open_shard and the source do.
    """
    shard = found.shard(rank)
    memory = Snapshot()
    with closing(open_shard(found, shard)) as source:  # before the memory: its size was checked against real bytes
        memory.reserve(shard.size_bytes)
        buffer = memory.buffer
        over_chunks(
            shard.size_bytes,
            shard.chunk_bytes,
            lambda index, start, end: source.read_chunk(index, buffer[start:end]),
            threads=THREADS,
        )
    return items_in(buffer, shard)


def items_in(buffer: memoryview, shard: Shard) -> dict[str, Loaded]:
    """The items of a shard that has been read and verified."""
    return {
        item.name: Loaded(item.name, item.dtype, item.shape, buffer[item.offset : item.offset + item.size_bytes])
        for item in shard.items
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One folder of a tier as retention sees it.

    at_s: when its manifest, else its newest part, was stored, by the server's own clock. set_aside: it is marked, and
    kept for analysis.
    """

    name: str
    at_s: float
    committed: bool
    set_aside: bool

    @classmethod
    def of(cls, name: str, stored: Mapping[str, float]) -> Self:
        """Make it of what lies in the folder: when each of its files was stored."""
        at_s = stored.get(MANIFEST, max(stored.values(), default=0.0))
        return cls(name=name, at_s=at_s, committed=MANIFEST in stored, set_aside=SET_ASIDE in stored)


def outdated(listed: Iterable[Listed], keep: int, keep_days: int, spare: str = "") -> list[str]:
    """Choose what may go: all but the newest `keep`, the newest of each of the last `keep_days` days, and the marked.

    Newest is what was committed last, by one clock: the server's. A training that was rolled back has smaller steps
    than what it left behind. What was never committed goes a day after a newer one was. spare: a name that stays: if
    the server's clock was ahead for a while, all that is committed afterwards is older to it.
    """
    entries = sorted((each for each in listed if not each.set_aside), key=lambda each: (each.at_s, each.name))
    whole = [each for each in entries if each.committed][::-1]
    if not whole:
        return []
    newest_s = whole[0].at_s
    kept = {spare, *(each.name for each in whole[:keep])}
    days: dict[int, str] = {}
    for each in whole:
        if newest_s - each.at_s < keep_days * _DAY_S:
            days.setdefault(int(each.at_s // _DAY_S), each.name)
    kept.update(days.values())
    stale = (each for each in entries if not each.committed and each.at_s < newest_s - _DAY_S)
    return [each.name for each in [*whole, *stale] if each.name not in kept]


def unfinished(listed: Iterable[Listed], spare: str) -> list[str]:
    """Choose what was begun and never committed, but for this one."""
    return [each.name for each in listed if not each.committed and not each.set_aside and each.name != spare]


def newest_first(by_commit: Sequence[str]) -> list[str]:
    """Return names of checkpoints in the order to look at them: by turns the next one by commit and by step.

    A training that was rolled back commits lower steps later. And a tier that was copied elsewhere has the times of
    that copy, in any order: by them alone, the newest one may be behind `NEWEST` others.
    """
    return list(dict.fromkeys(chain.from_iterable(zip(by_commit, sorted(by_commit, reverse=True), strict=True))))


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a person: the first few, and how many more."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


_T = TypeVar("_T")

LIMIT_S: Final = 60.0
"""NFS repeats a request after 60 s (timeo=600): what answers within one period is slow, not gone."""


def within(limit_s: float, what: Callable[[], _T], where: str) -> _T:
    """Do it in a thread of its own, and leave that behind when it hangs: TierError (stalled).

    Raises what it raises: OSError, StoreError, TierError. What hangs may go on much later: it must not write into
    memory that another thread uses.
    """
    answers: SimpleQueue[tuple[_T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((what(), None))
        except (OSError, StoreError, TierError) as error:
            answers.put((None, error))

    Thread(target=run, name="powerguard-mount", daemon=True).start()
    try:
        answer, error = answers.get(timeout=limit_s)
    except Empty:
        msg = f"{where}: no answer within {limit_s:g} s (is its server there?)"
        raise TierError(Kind.STALLED, msg) from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value] # there was no error, so it is what came back
