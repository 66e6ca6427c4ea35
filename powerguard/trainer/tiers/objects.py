"""A tier in an object store, over obstore: S3 and what speaks it, Google's and Azure's.

    <url>/<job>/step-000000001234-9f86d081/shard-00000/<part> ...   first
                                           MANIFEST.json            created if absent, last: the commit
                                           SET-ASIDE                a marker: never load this again

Parts are objects of their own, not parts of S3's multipart uploads: they can be listed, taken up again by any process,
and read one by one; nothing invisible is left behind that costs money; and it is the same on every store.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from powerguard.trainer.chunks import digest_of
from powerguard.trainer.found import Found
from powerguard.trainer.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, ManifestError, Shard, step_of
from powerguard.trainer.tiers.base import (
    MAX_REASON_BYTES,
    NEWEST,
    SET_ASIDE,
    Kind,
    Listed,
    Part,
    Remote,
    Seen,
    Source,
    TierError,
    conflict,
    folder_of,
    outdated,
    part_of,
    parts_of,
)
from powerguard.trainer.tiers.connect import PUT_TIMEOUT, code_of, opened, told

if TYPE_CHECKING:
    from obstore import ObjectMeta

_PART: Final = re.compile(r"(\d{8})-(\d{1,8})-[0-9a-f]{32}")


class ObjectTier:
    """One job's checkpoints in an object store. Opens no connection until it is asked for something."""

    def __init__(self, remote: Remote, job: str) -> None:
        self.word = remote.url.partition("://")[0]
        self.url = f"{remote.url.rstrip('/')}/{folder_of(job)}"
        self._part_bytes = remote.part_bytes
        self._store = opened(remote, self.url)
        self._slow = opened(remote, self.url, PUT_TIMEOUT)

    # --- Writing ---------------------------------------------------------------------------------------------------

    def committed(self, name: str) -> str | None:
        content = self._content(f"{name}/{MANIFEST}", MAX_MANIFEST_BYTES)
        return None if content is None else f"sha256:{sha256(content).hexdigest()}"

    def missing(self, name: str, shard: Shard, seen: Seen) -> list[Part]:  # noqa: ARG002 - one answer tells all
        there = self._chunks(name, shard)
        return [
            part
            for part in parts_of(shard, self._part_bytes)
            if any(part.first + number not in there for number in range(len(part.digests)))
        ]

    def put(self, name: str, part: Part, content: memoryview) -> None:
        import obstore

        with self._worded(f"{part.file} part {part.first}"):
            obstore.put(self._slow, f"{name}/{part.file}/{part.name}", content, use_multipart=False)

    def finish(self, name: str, shard: Shard, seen: Seen) -> None:
        """Nothing is left to do: an object is there as a whole, and with its checksum, or not at all."""

    def absent(self, name: str, manifest: Manifest) -> list[int]:
        shards = (packed.unpacked() for packed in manifest.shards)  # one at a time: all of them may fill the memory
        return [shard.rank for shard in shards if len(self._chunks(name, shard)) < len(shard.digests)]

    def commit(self, name: str, manifest: Manifest) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        content = manifest.to_json()
        with self._worded(MANIFEST):
            try:
                obstore.put(self._store, f"{name}/{MANIFEST}", content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                there = self.committed(name)
                if there == manifest.digest:
                    return False
                raise conflict(self.url, name, there, manifest.digest) from None
        return True

    def prune(self, keep: int, keep_days: int) -> list[str]:
        import obstore

        names = outdated(self._listed(), keep, keep_days)
        for name in names:
            with self._worded(name):
                # The manifest goes first and alone: a half-removed checkpoint must not look whole.
                if self._content(f"{name}/{MANIFEST}", MAX_MANIFEST_BYTES) is not None:
                    obstore.delete(self._store, f"{name}/{MANIFEST}")
                for page in obstore.list(self._store, name):
                    obstore.delete(self._store, [entry["path"] for entry in page])
        return names

    # --- Reading ---------------------------------------------------------------------------------------------------

    def found(self) -> list[Found]:
        found: list[Found] = []
        for name in self._by_commit():
            if len(found) == NEWEST:
                break
            content = self._content(f"{name}/{MANIFEST}", MAX_MANIFEST_BYTES)
            with suppress(ManifestError):  # removed, or rotten: as if it were not there; nothing is lost by that
                manifest = Manifest.parse(content or b"")
                if manifest.step == step_of(name):
                    found.append(
                        Found(
                            step=manifest.step,
                            name=name,
                            path=f"{self.url}/{name}",
                            manifest=manifest,
                            digest=manifest.digest,
                            tier=self.word,
                        )
                    )
        return found

    def has(self, name: str, digest: str) -> bool:
        """Is this very checkpoint committed here?"""
        return self.committed(name) == digest

    def open_shard(self, found: Found, shard: Shard) -> Source:
        where = self._chunks(found.name, shard)
        missing = next((index for index in range(len(shard.digests)) if index not in where), None)
        if missing is not None:
            msg = f"{found.path}/{shard.file}: the part with chunk {missing} is missing"
            raise TierError(Kind.CORRUPT, msg)
        return _ObjectShard(self, shard, where)

    def read(self, path: str, start: int, target: memoryview) -> None:
        """Fill the target from an object, from byte `start` on."""
        import obstore

        with self._worded(path):
            content = memoryview(obstore.get_range(self._store, path, start=start, length=len(target)))
        if len(content) != len(target):
            msg = f"{self.url}/{path}: the answer was cut short"
            raise TierError(Kind.NETWORK, msg)
        target[:] = content

    def set_aside(self, found: Found, reason: str) -> None:
        import obstore

        with self._worded(found.name):
            obstore.put(self._store, f"{found.name}/{SET_ASIDE}", reason.encode()[:MAX_REASON_BYTES])

    def aside(self) -> list[str]:
        return [name for name in self._names()[:NEWEST] if self._is_aside(name)]

    def _is_aside(self, name: str) -> bool:
        return self._content(f"{name}/{SET_ASIDE}", MAX_REASON_BYTES) is not None

    # --- What both sides need --------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """All checkpoints' names, highest step first."""
        import obstore

        with self._worded("list"):
            prefixes = obstore.list_with_delimiter(self._store)["common_prefixes"]
        return sorted((name for name in prefixes if step_of(name) is not None), reverse=True)

    def _by_commit(self) -> list[str]:
        """The names of those that are committed and not set aside, the one committed last first."""
        known = []
        for name in self._names():
            with self._worded(name):
                there = {entry["path"].rpartition("/")[2]: entry["last_modified"] for entry in self._entries(name)}
            if MANIFEST in there and SET_ASIDE not in there:
                known.append((there[MANIFEST], name))
        return [name for _, name in sorted(known, reverse=True)]

    def _entries(self, name: str) -> "Sequence[ObjectMeta]":
        """What lies directly in a checkpoint's folder: the manifest, a marker."""
        import obstore

        return obstore.list_with_delimiter(self._store, name)["objects"]

    def _chunks(self, name: str, shard: Shard) -> dict[int, tuple[str, int]]:
        """Which chunks of a shard are there, however it was cut: the part's object, and the first chunk in it."""
        import obstore

        with self._worded(f"{name}/{shard.file}"):
            pages = list(obstore.list(self._store, f"{name}/{shard.file}", chunk_size=1000))
        where: dict[int, tuple[str, int]] = {}
        for entry in (entry for page in pages for entry in page):
            match = _PART.fullmatch(entry["path"].rpartition("/")[2])
            if match is not None:
                part = part_of(shard, int(match[1]), int(match[2]))
                if (part.name, part.size_bytes) == (match[0], entry["size"]):  # its name says what is in it
                    chunks = range(part.first, part.first + len(part.digests))
                    where.update(dict.fromkeys(chunks, (entry["path"], part.first)))
        return where

    def _listed(self) -> list[Listed]:
        import obstore

        listed = []
        for name in self._names():
            with self._worded(name):
                entries = [entry for page in obstore.list(self._store, name, chunk_size=1000) for entry in page]
            stored = {entry["path"].removeprefix(f"{name}/"): entry["last_modified"].timestamp() for entry in entries}
            listed.append(Listed.of(name, stored))
        return listed

    def _content(self, path: str, most: int) -> bytes | None:
        """A small object; None: there is none."""
        import obstore

        with self._worded(path):
            try:
                answer = obstore.get(self._store, path)
            except FileNotFoundError as error:
                if code_of(error) == "NoSuchBucket":
                    raise
                return None
            if answer.meta["size"] > most:
                msg = f"{self.url}/{path}: has {answer.meta['size']} bytes, more than the {most} that it may have"
                raise TierError(Kind.CORRUPT, msg)
            return bytes(answer.bytes())

    @contextmanager
    def _worded(self, what: str) -> Iterator[None]:
        """Say what a store's errors mean, in our words: theirs quote requests, with all that is in them."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError, ValueError) as error:
            raise told(error, f"{self.url}: {what}") from None


class _ObjectShard:
    """A shard whose parts are all there. where: of each chunk the part's object, and the first chunk in it."""

    def __init__(self, tier: ObjectTier, shard: Shard, where: dict[int, tuple[str, int]]) -> None:
        self._tier = tier
        self._shard = shard
        self._where = where

    def read_chunk(self, index: int, target: memoryview) -> None:
        path, first = self._where[index]
        self._tier.read(path, (index - first) * self._shard.chunk_bytes, target)
        if digest_of(target) != self._shard.digests[index]:
            msg = f"{self._tier.url}/{path}: chunk {index} does not match its digest"
            raise TierError(Kind.CORRUPT, msg)

    def close(self) -> None:
        """Nothing is open between two chunks."""
