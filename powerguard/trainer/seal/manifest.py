"""What a sealed folder consists of: `SEAL.json`, read and written. Stdlib only, and nothing is trusted.

{"schema": "powerguard.seal/v1", "step": 1200, "sealed_at": "2026-11-21T04:12:09Z", "chunk_bytes": 8388608,
 "files": [{"path": "rank0/model.bin", "size_bytes": 9000000, "xxh3_128": "<32 hex digits for each chunk>"}],
 "links": [{"path": "latest", "target": "rank0"}], "folders": ["rank0"], "sha256": "<of all the above>"}
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

SCHEMA = "powerguard.seal/v1"
SEAL = "SEAL.json"
UNBORN = f"{SEAL}.tmp"
CHUNK_BYTES = 8 << 20
DIGEST_DIGITS = 32
MAX_SEAL_BYTES = 32 << 20
"""A million chunks: 8 TB in one folder."""
MAX_STEP = 2**62

_DIGESTS = re.compile(r"(?:[0-9a-f]{32})*")
_STEP = re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt|global_step|step|iter|iteration|batch)[-_=]*([0-9]{1,18})(?![0-9])")
_COUNT = re.compile(r"(?:^|[^a-z])(?:model|epoch|ep)[-_=]*([0-9]{1,18})(?![0-9a-z]|[-_]of[-_])|^([0-9]{1,18})$")
"""What counts where no step is named. A model's size (7b) and a part of several (00001-of-00004) are no counts."""
_TOKEN = re.compile(r"(?<=^dcp#)-[0-9a-f]{8}$")
"""What `dcp.save_sealed` puts behind the step, another one at each save."""


class SealError(Exception):
    """A folder that cannot be sealed, or a seal that does not hold: what, where, what would be right."""


class UnjudgedError(SealError):
    """A seal of which nothing is known here: a newer powerguard wrote it, or xxhash is missing. It may well hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFile:
    """One file: its path under the folder, its size, and the xxh3-128 of each chunk as hexadecimal digits in a row."""

    path: str
    size_bytes: int
    digests: str

    def digest(self, chunk: int) -> str:
        """Return the digest of one chunk; "" behind the end."""
        return self.digests[chunk * DIGEST_DIGITS : (chunk + 1) * DIGEST_DIGITS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """A folder as it was when it was sealed.

    step: training step, None when neither given nor in the folder's name. sealed_at: UTC, for people. links: symbolic
    ones, (path, target). folders: all below the sealed one, so that an empty one is missed, too.
    """

    files: tuple[SealedFile, ...]
    links: tuple[tuple[str, str], ...] = ()
    folders: tuple[str, ...] = ()
    step: int | None = None
    sealed_at: str = ""
    chunk_bytes: int = CHUNK_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes in all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """Name of this seal and of everything in it: "sha256:<hex>" of the bytes of SEAL.json."""
        return f"sha256:{sha256(self.to_json()).hexdigest()}"

    def same_content(self, other: "Seal") -> bool:
        """Say whether both seal the same bytes under the same names, whenever they did."""
        own = (self.files, self.links, self.folders, self.chunk_bytes)
        return own == (other.files, other.links, other.folders, other.chunk_bytes)

    def to_json(self) -> bytes:
        """Return the bytes that are stored; names that are no UTF-8 come back as they were (surrogateescape)."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "step": self.step,
            "sealed_at": self.sealed_at,
            "chunk_bytes": self.chunk_bytes,
            "files": [{"path": f.path, "size_bytes": f.size_bytes, "xxh3_128": f.digests} for f in self.files],
            "links": [{"path": path, "target": target} for path, target in self.links],
            "folders": list(self.folders),
        }
        own = sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        return json.dumps({**document, "sha256": own}, sort_keys=True).encode() + b"\n"

    @classmethod
    def parse(cls, content: bytes) -> "Seal":
        """Read a seal; raises SealError when it does not hold together."""
        try:
            document: dict[str, Any] = json.loads(content)
            schema = document["schema"]
            if schema != SCHEMA:
                msg = f"{SEAL}: its schema is {str(schema)[:60]!r}, not {SCHEMA}"
                if str(schema).startswith(SCHEMA.rstrip("0123456789")):
                    msg = f"{msg} (use the version that wrote it)"
                    raise UnjudgedError(msg)
                raise SealError(msg)
            seal = cls(
                files=tuple(
                    SealedFile(path=file["path"], size_bytes=file["size_bytes"], digests=file["xxh3_128"])
                    for file in document["files"]
                ),
                links=tuple((link["path"], link["target"]) for link in document["links"]),
                folders=tuple(document["folders"]),
                step=document["step"],
                sealed_at=document["sealed_at"],
                chunk_bytes=document["chunk_bytes"],
            )
            sound = not any(_slips(seal)) and seal.to_json() == content
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            msg = f"{SEAL} is not readable ({type(error).__name__}): written in part, or damaged"
            raise SealError(msg) from error
        if not sound:
            msg = f"{SEAL} does not hold together: damaged, or changed by hand"
            raise SealError(msg)
        return seal


def _slips(seal: Seal) -> Iterator[bool]:
    """Yield True for whatever a seal of ours never says. What is no text, number or list raises TypeError."""
    yield not _is_count(seal.chunk_bytes, 1 << 30) or seal.chunk_bytes < 4096 or seal.chunk_bytes % 4096 != 0
    yield seal.step is not None and not _is_count(seal.step, MAX_STEP)
    yield not isinstance(seal.sealed_at, str)
    for file in seal.files:
        yield not _is_path(file.path) or not _is_count(file.size_bytes, 2**60)
        yield _DIGESTS.fullmatch(file.digests) is None
        yield len(file.digests) != -(-file.size_bytes // seal.chunk_bytes) * DIGEST_DIGITS
    for path, target in seal.links:
        yield not _is_path(path) or not isinstance(target, str)
    for folder in seal.folders:
        yield not _is_path(folder)
    names = [*(file.path for file in seal.files), *(path for path, _ in seal.links), *seal.folders]
    yield len(set(names)) != len(names)


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_path(value: object) -> bool:
    """A path that stays inside, as we write it: no "..", no "//", not absolute, and not the seal's own name."""
    if not isinstance(value, str) or not 0 < len(value) <= 4096 or "\0" in value or value in (SEAL, UNBORN):
        return False
    return all(part not in ("", ".", "..") for part in value.split("/"))


def read_seal(folder: Path | str) -> Seal | None:
    """Read a folder's seal; None where there is none. Raises SealError, OSError. Looks at no other file."""
    try:
        descriptor = os.open(Path(folder) / SEAL, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(MAX_SEAL_BYTES + 1)
    if len(content) > MAX_SEAL_BYTES:
        msg = f"{SEAL} is larger than {MAX_SEAL_BYTES >> 20} MiB: not one of ours"
        raise SealError(msg)
    return Seal.parse(content)


def step_in(name: str) -> int | None:
    """Return the training step in a folder's name as frameworks write it; None where there is none.

    checkpoint-1200 (Transformers), global_step1200 (DeepSpeed), iter_0001200 (Megatron), step-1200, epoch=1-step=34
    (Lightning), ckpt_1200. Where no step is named, the count that scripts use: epoch_242, model_68, 68.
    """
    found = _STEP.findall(name.lower()) or ["".join(each) for each in _COUNT.findall(name.lower())]
    return int(found[-1]) if found else None


def series_of(name: str) -> str:
    """Return a folder's name without step, counts and token: the rest is the same for one training's checkpoints."""
    return _TOKEN.sub("", _COUNT.sub("#", _STEP.sub("#", name.lower())))
