"""The manifest of a checkpoint: what it consists of, to the byte, in JSON. Stdlib only, no I/O.

Each rank packs the description of its own shard (`Shard`, compressed as `Packed`), so that a manifest of many ranks
stays small and a reader unpacks only the shards that it reads.

`powerguard.checkpoint/v3`, see docs/reference/checkpoint-format.md. A manifest may come from a hostile or rotten
disk: `Manifest.parse` takes nothing on trust, needs bounded memory, and raises only ManifestError.
"""

import json
import math
import os
import re
import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, NoReturn

SCHEMA: Final = "powerguard.checkpoint/v3"
_ANY_SCHEMA: Final = SCHEMA.rstrip("0123456789")
MANIFEST: Final = "MANIFEST.json"
MAX_MANIFEST_BYTES: Final = 64 << 20
"""About 690 ranks of 2,900 items each, or 2,000 ranks of 1,000 items."""

MAX_SHARD_JSON_BYTES: Final = 32 << 20
"""What one rank's packed description may unpack to: about 200,000 items."""

CHUNK_BYTES: Final = 8 << 20
ALIGN: Final = 16
"""Where items begin: any dtype may be viewed in place, and most small tensors leave no gap between them."""

PAGE: Final = 4096
"""What O_DIRECT needs addresses, lengths and offsets to be multiples of, on every disk that we know."""
MAX_STEP: Final = 2**62
MAX_SHARD_BYTES: Final = 2**50
MAX_CHUNK_BYTES: Final = 1 << 30
MAX_RANKS: Final = 100_000
MAX_CONTAINERS: Final = 600_000
MAX_VALUES: Final = 3_000_000
MAX_TEXT: Final = 512
MAX_DIMENSIONS: Final = 64

DTYPE_BYTES: Final = {
    **{f"{kind}{bits}": bits // 8 for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float8_{kind}": 1 for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
    "bool": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of the dtypes whose shape can be checked against their size."""

_LEVEL: Final = 1
"""Of compression: 0.1 MB for 2,900 items in 2 ms; level 6 saves a seventh of that and takes twice as long."""

_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
_DTYPE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_NAME: Final = re.compile(r"step-(\d{12,19})-([0-9a-f]{8})")
_TOKEN: Final = re.compile(r"[0-9a-f]{8}")


class StoreError(Exception):
    """A checkpoint that cannot be written or must not be loaded: what, where, what would be right."""


class ManifestError(StoreError):
    """A manifest that does not hold together: what is wrong with it."""


class VersionError(ManifestError):
    """A manifest of another version of powerguard: the checkpoint may well be good."""


def checkpoint_name(step: int, token: str) -> str:
    """Name the folder of a checkpoint. token: 8 hex digits that all ranks agree on and that no other save has."""
    if not _TOKEN.fullmatch(token) or not 0 <= step <= MAX_STEP:
        msg = f"step {step}, token {token!r}: must be a step from 0 and 8 hex digits"
        raise ValueError(msg)
    return f"step-{step:012d}-{token}"


def step_of(name: str) -> int | None:
    """The step that a folder is named for; None when it is none of ours."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def digest_of(content: bytes) -> str:
    """Name a manifest that `Manifest.parse` takes: see `Manifest.digest`."""
    return f"sha256:{sha256(_unpadded(content)).hexdigest()}"


def _unpadded(content: bytes) -> bytes:
    """The line of JSON, without the line ends that fill its file up."""
    end = content.find(b"\n") + 1 or len(content)
    if content[end:] != b"\n" * (len(content) - end):
        _refuse("goes on behind its end")
    return content[:end]


def committed_ms(created: str) -> int:
    """Return when a checkpoint was committed, in ms since 1970; 0 for what is no time.

    A training commits each checkpoint later than every one that it has seen, whatever the clock says, so that the
    highest is the one committed last. Steps do not say that: a training may be rolled back.
    """
    try:
        return max(0, round(datetime.fromisoformat(created).timestamp() * 1000))
    except (ValueError, OverflowError):
        return 0


def shard_file(rank: int) -> str:
    """The file name of a rank's shard: a manifest cannot choose another."""
    return f"shard-{rank:05d}"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an item lies in its shard. offset: from the shard's beginning, a multiple of 16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How the items lie in a snapshot. size_bytes: all of it, padded to 4 KiB."""

    items: tuple[Entry, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank wrote: a file, its digests (xxh3-128 in hex, one per chunk), and what lies where in it.

    size_bytes: a multiple of 4096. The file may be longer: the rest is unused.
    """

    rank: int
    size_bytes: int
    digests: tuple[str, ...]
    items: tuple[Entry, ...]
    chunk_bytes: int = CHUNK_BYTES

    @property
    def file(self) -> str:
        return shard_file(self.rank)

    def packed(self) -> "Packed":
        """Pack it for a manifest. Raises ManifestError if it could not be read again."""
        content = self._described()
        if len(content) > MAX_SHARD_JSON_BYTES:
            _refuse(
                f"{self.file}: the description of {len(self.items)} items has {len(content)} bytes,"
                f" more than {MAX_SHARD_JSON_BYTES} (save fewer, larger items)"
            )
        packed = Packed(
            rank=self.rank,
            size_bytes=self.size_bytes,
            chunk_bytes=self.chunk_bytes,
            content=b64encode(zlib.compress(content, _LEVEL)).decode(),
        )
        del content  # many items take much memory once more when they are read again
        if packed.unpacked() != self:
            _refuse(f"{self.file}: its description does not read back as it was written")
        return packed

    def _described(self) -> bytes:
        """Its digests and items as JSON."""
        items = [
            {"name": it.name, "dtype": it.dtype, "shape": it.shape, "offset": it.offset, "size_bytes": it.size_bytes}
            for it in self.items
        ]
        return _dump({"digests": self.digests, "items": items})

    @classmethod
    def check(cls, layout: Layout, ranks: int = 1) -> None:
        """Raise ManifestError if a checkpoint of so many ranks, laid out like this one, could not be committed."""
        digests = tuple(os.urandom(16).hex() for _ in range(0, layout.size_bytes, CHUNK_BYTES))
        shard = cls(rank=0, size_bytes=layout.size_bytes, digests=digests, items=layout.items)
        size_bytes = len(shard.packed().to_json())
        if size_bytes * ranks > MAX_MANIFEST_BYTES - PAGE:
            _refuse(
                f"the manifest of {ranks} ranks with {len(layout.items)} items each would have about"
                f" {size_bytes * ranks / 1e6:.0f} MB, more than {MAX_MANIFEST_BYTES / 1e6:.0f} MB; each rank's part has"
                f" {size_bytes / 1e6:.2f} MB (save fewer, larger items: join small tensors, or use fewer ranks)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One rank's shard as it stands in a manifest. content: its digests and items as JSON, zlib, base64."""

    rank: int
    size_bytes: int
    content: str
    chunk_bytes: int = CHUNK_BYTES

    @property
    def file(self) -> str:
        return shard_file(self.rank)

    def unpacked(self) -> Shard:
        """Return the whole description. Raises ManifestError."""
        content = _unzipped(self.content, self.file)
        document = _object(_load(content), self.file)
        shard = Shard(
            rank=self.rank,
            size_bytes=self.size_bytes,
            chunk_bytes=self.chunk_bytes,
            digests=tuple(_digest(each) for each in _list(document.get("digests"), "digests")),
            items=tuple(_entry(each) for each in _list(document.get("items"), "items")),
        )
        _check_shard(shard)
        if document.keys() != {"digests", "items"}:
            _refuse(f"{self.file} says more than it should")
        return shard

    def to_json(self) -> bytes:
        """What a rank hands to the one that commits."""
        return _dump(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """The shard as it stands in a manifest."""
        return {
            "file": self.file,
            "rank": self.rank,
            "size_bytes": self.size_bytes,
            "chunk_bytes": self.chunk_bytes,
            "packed": self.content,
        }

    @classmethod
    def parse(cls, content: bytes) -> "Packed":
        """Read what another rank handed in, without unpacking it. Raises ManifestError."""
        return _packed(_load(content))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    created: wall time of the commit, RFC 3339; `committed_ms` orders checkpoints by it. reason: why it was made
        ("periodic", "on_battery" ...), for people.
    ranks: how many shards there are, one per rank, in the order of the ranks. hosts: how many hosts wrote them.
    """

    job: str
    step: int
    created: str
    reason: str
    ranks: int
    hosts: int
    shards: tuple[Packed, ...]

    def shard(self, rank: int) -> Shard:
        """The description of one rank's shard. Raises ManifestError if it does not hold together."""
        return self.shards[rank].unpacked()

    @property
    def size_bytes(self) -> int:
        """All shards together."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def digest(self) -> str:
        """The name of this checkpoint's content: "sha256:<hex>" of the manifest, and so of everything in it."""
        return digest_of(self.to_json())

    def to_json(self) -> bytes:
        """The bytes that are stored; the same manifest always yields the same bytes."""
        document = {
            "schema": SCHEMA,
            "job": self.job,
            "step": self.step,
            "created": self.created,
            "reason": self.reason,
            "world": {"ranks": self.ranks, "hosts": self.hosts},
            "shards": [shard.as_json() for shard in self.shards],
        }
        return _dump({**document, "sha256": sha256(_dump(document)).hexdigest()}) + b"\n"

    @classmethod
    def parse(cls, content: bytes) -> "Manifest":
        """Read a manifest file, with the line ends that pad it in a slot. Raises ManifestError."""
        if len(content) > MAX_MANIFEST_BYTES:
            _refuse(f"is larger than {MAX_MANIFEST_BYTES} bytes")
        content = _unpadded(content)
        document = _object(_load(content), "the manifest")
        schema = document.get("schema")
        if schema != SCHEMA:
            msg = f"schema is {_shown(schema)}, not {SCHEMA} (read it with the version that wrote it)"
            raise VersionError(msg) if str(schema).startswith(_ANY_SCHEMA) else ManifestError(msg)
        world = _object(document.get("world"), "world")
        shards = tuple(_packed(each) for each in _list(document.get("shards"), "shards"))
        manifest = cls(
            job=_text(document.get("job"), "job"),
            step=_whole(document.get("step"), "step", MAX_STEP),
            created=_text(document.get("created"), "created"),
            reason=_text(document.get("reason"), "reason"),
            ranks=_whole(world.get("ranks"), "world.ranks", MAX_RANKS),
            hosts=_whole(world.get("hosts"), "world.hosts", MAX_RANKS),
            shards=shards,
        )
        manifest.check()
        if manifest.to_json() != content:
            _refuse("does not match its own sha256, or says more than it should")
        return manifest

    def check(self) -> None:
        """Raise ManifestError unless there is exactly one shard of each rank, in their order."""
        if [shard.rank for shard in self.shards] != list(range(self.ranks)) or not self.ranks or not self.hosts:
            _refuse(f"has shards of {len(self.shards)} ranks, not of each of the {self.ranks} once")


# --- Reading untrusted bytes ---------------------------------------------------------------------------------


def _load(content: bytes) -> object:
    # A few bytes of JSON can become a hundred in memory; what we write has few values in many bytes.
    if content.count(b"{") + content.count(b"[") > MAX_CONTAINERS or content.count(b",") > MAX_VALUES:
        _refuse(f"has more than {MAX_CONTAINERS} objects and lists, or {MAX_VALUES} values")
    try:
        return json.loads(
            content,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_refuse_float,
            parse_constant=_refuse_float,
        )
    except (ValueError, RecursionError) as error:
        msg = f"is not readable ({type(error).__name__})"
        raise ManifestError(msg) from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse("has the same key twice")
    return found


def _integer(text: str) -> int:
    return int(text) if len(text) <= 19 else _refuse(f"has a number of {len(text)} digits")


def _refuse_float(text: str) -> NoReturn:
    _refuse(f"has {text[:32]} where only whole numbers stand")


def _packed(value: object) -> Packed:
    document = _object(value, "a shard")
    rank = _whole(document.get("rank"), "rank", MAX_RANKS)
    if document.get("file") != shard_file(rank):
        _refuse(f"names the file {_shown(document.get('file'))}, not {shard_file(rank)}")
    content = document.get("packed")
    packed = Packed(
        rank=rank,
        size_bytes=_whole(document.get("size_bytes"), "size_bytes", MAX_SHARD_BYTES),
        chunk_bytes=_whole(document.get("chunk_bytes"), "chunk_bytes", MAX_CHUNK_BYTES),
        content=content if isinstance(content, str) else _refuse(f"{shard_file(rank)}: packed is not text"),
    )
    if packed.size_bytes % PAGE or packed.chunk_bytes % PAGE or not packed.chunk_bytes:
        _refuse(f"{packed.file} is not in pieces of {PAGE} bytes")
    return packed


def _unzipped(text: str, file: str) -> bytes:
    """Unpack a description, however much it claims to hold."""
    unzip = zlib.decompressobj()
    try:
        content = unzip.decompress(b64decode(text, validate=True), MAX_SHARD_JSON_BYTES + 1)
    except (ValueError, zlib.error) as error:
        msg = f"{file}: its description cannot be unpacked ({type(error).__name__})"
        raise ManifestError(msg) from error
    if not unzip.eof or unzip.unused_data or len(content) > MAX_SHARD_JSON_BYTES:
        _refuse(f"{file}: its description is cut, goes on behind its end, or has over {MAX_SHARD_JSON_BYTES} bytes")
    return content


def _check_shard(shard: Shard) -> None:
    if len(shard.digests) != -(-shard.size_bytes // shard.chunk_bytes):
        _refuse(f"{shard.file} of {shard.size_bytes} bytes has {len(shard.digests)} digests")
    end = 0
    for item in shard.items:
        if item.offset < end or item.offset % ALIGN or item.offset + item.size_bytes > shard.size_bytes:
            _refuse(f"{shard.file}: item {_shown(item.name)} lies over another, or outside")
        end = item.offset + item.size_bytes
    if len({item.name for item in shard.items}) != len(shard.items):
        _refuse(f"{shard.file} has two items of one name")


def _entry(value: object) -> Entry:
    document = _object(value, "an item")
    shape = _list(document.get("shape"), "shape")
    if len(shape) > MAX_DIMENSIONS:
        _refuse(f"has an item of {len(shape)} dimensions")
    item = Entry(
        name=_text(document.get("name"), "an item's name"),
        dtype=_text(document.get("dtype"), "dtype"),
        shape=tuple(_whole(each, "shape", MAX_SHARD_BYTES) for each in shape),
        offset=_whole(document.get("offset"), "offset", MAX_SHARD_BYTES),
        size_bytes=_whole(document.get("size_bytes"), "size_bytes", MAX_SHARD_BYTES),
    )
    element = DTYPE_BYTES.get(item.dtype)
    wrong = element is not None and math.prod(item.shape) * element != item.size_bytes
    if wrong or not _DTYPE.fullmatch(item.dtype) or not item.name:
        _refuse(f"item {_shown(item.name)} of {item.size_bytes} bytes is no {_shown(item.dtype)} of that shape")
    return item


def _digest(value: object) -> str:
    return value if isinstance(value, str) and _DIGEST.fullmatch(value) else _refuse(f"has the digest {_shown(value)}")


def _object(value: object, what: str) -> dict[str, object]:
    return value if isinstance(value, dict) else _refuse(f"{what} is not an object")


def _list(value: object, what: str) -> list[object]:
    return value if isinstance(value, list) else _refuse(f"{what} is not a list")


def _text(value: object, what: str) -> str:
    if isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable():
        return value
    return _refuse(f"{what} is {_shown(value)}, not a short text")


def _whole(value: object, what: str, most: int) -> int:
    if type(value) is int and 0 <= value <= most:
        return value
    return _refuse(f"{what} is {_shown(value)}, not a whole number from 0 to {most}")


def _shown(value: object) -> str:
    return ascii(value)[:80] if isinstance(value, (str, int, type(None))) else f"a {type(value).__name__}"


def _refuse(what: str) -> NoReturn:
    raise ManifestError(what)


def _dump(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
