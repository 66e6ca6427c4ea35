"""A manifest is taken only when it says exactly what we would have written; to refuse one costs little."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from powerguard.trainer.manifest import (
    MAX_MANIFEST_BYTES,
    Entry,
    Manifest,
    ManifestError,
    Shard,
    checkpoint_name,
    digest_of,
    step_of,
)

SHARDS = tuple(
    Shard(
        rank=rank,
        size_bytes=12288,
        chunk_bytes=8192,
        digests=("0" * 32, "f" * 32),
        items=(Entry("w", "float32", (10, 10), 0, 400), Entry("step", "json", (), 448, 3)),
    )
    for rank in range(2)
)
MANIFEST = Manifest(job="llm", step=7, created="2026-01-01", reason="drill", ranks=2, hosts=1, shards=SHARDS)


def test_it_comes_back() -> None:
    content = MANIFEST.to_json()
    assert Manifest.parse(content) == MANIFEST
    assert Manifest.parse(content + b"\n" * 1000) == MANIFEST, "line ends fill it up in a slot"
    assert MANIFEST.digest == digest_of(content + b"\n\n") == f"sha256:{sha256(content).hexdigest()}"
    assert MANIFEST.size_bytes == 2 * 12288
    assert Shard.parse(SHARDS[1].to_json()) == SHARDS[1]


def test_names() -> None:
    assert checkpoint_name(1234, "9f86d081") == "step-000000001234-9f86d081"
    assert step_of("step-000000001234-9f86d081") == 1234
    assert step_of("bad-step-000000001234-9f86d081") is None
    for step, token in ((-1, "9f86d081"), (1, "../etc"), (1, "9F86D081"), (2**63, "9f86d081")):
        with pytest.raises(ValueError, match="8 hex digits"):
            checkpoint_name(step, token)


def signed(document: dict[str, Any]) -> bytes:
    """As whoever wants to harm us would write it: with the right sha256."""
    document.pop("sha256", None)
    body = json.dumps(document, separators=(",", ":")).encode()
    return json.dumps({**document, "sha256": sha256(body).hexdigest()}, separators=(",", ":")).encode() + b"\n"


def test_the_reference_shows_one_that_is_taken() -> None:
    """docs/reference/checkpoint-format.md, laid out for reading and without its sha256."""
    page = (Path(__file__).parents[2] / "docs/reference/checkpoint-format.md").read_text(encoding="utf-8")
    document = json.loads(page.partition("```json")[2].partition("```")[0])
    shown = Manifest.parse(signed(document))
    assert (shown.job, shown.step, shown.shards[0].items[0].shape) == ("llm", 1234, (50, 50))
    assert list(document) == list(json.loads(MANIFEST.to_json()))[:-1], "and in the same order"


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a path out": lambda m: m["shards"][0].update(file="../../etc/passwd"),
    "an absolute path": lambda m: m["shards"][0].update(file="/etc/passwd"),
    "another's file": lambda m: m["shards"][0].update(file="shard-00001"),
    "a huge shard": lambda m: m["shards"][0].update(size_bytes=2**60),
    "a negative size": lambda m: m["shards"][0].update(size_bytes=-4096),
    "a size that is no size": lambda m: m["shards"][0].update(size_bytes="12288"),
    "true for a number": lambda m: m.update(step=True),
    "a fraction": lambda m: m["shards"][0].update(size_bytes=12288.0),
    "not a number": lambda m: m["shards"][0].update(size_bytes=float("nan")),
    "infinity": lambda m: m.update(step=float("inf")),
    "a number of 100 digits": lambda m: m.update(step=10**100),
    "odd pages": lambda m: m["shards"][0].update(size_bytes=12289),
    "no chunk size": lambda m: m["shards"][0].update(chunk_bytes=0),
    "a huge chunk": lambda m: m["shards"][0].update(chunk_bytes=2**40, digests=["0" * 32]),
    "too few digests": lambda m: m["shards"][0]["digests"].pop(),
    "too many digests": lambda m: m["shards"][0]["digests"].append("0" * 32),
    "a digest of another kind": lambda m: m["shards"][0]["digests"].__setitem__(0, "0" * 64),
    "items over one another": lambda m: m["shards"][0]["items"][1].update(offset=384),
    "items out of order": lambda m: m["shards"][0]["items"].reverse(),
    "an item behind the end": lambda m: m["shards"][0]["items"][1].update(offset=12288),
    "an item that ends behind the end": lambda m: m["shards"][0]["items"][1].update(size_bytes=12288),
    "an item off the grid": lambda m: m["shards"][0]["items"][1].update(offset=449),
    "a negative offset": lambda m: m["shards"][0]["items"][0].update(offset=-64),
    "two items of one name": lambda m: m["shards"][0]["items"][1].update(name="w"),
    "an item without a name": lambda m: m["shards"][0]["items"][1].update(name=""),
    "a name that a terminal obeys": lambda m: m["shards"][0]["items"][1].update(name="\x1b[2J"),
    "a very long name": lambda m: m["shards"][0]["items"][1].update(name="x" * 100_000),
    "a shape of another size": lambda m: m["shards"][0]["items"][0].update(shape=[10, 11]),
    "a negative shape": lambda m: m["shards"][0]["items"][0].update(shape=[-10, -10]),
    "a million dimensions": lambda m: m["shards"][0]["items"][0].update(shape=[1] * 1_000_000),
    "a dtype that is code": lambda m: m["shards"][0]["items"][0].update(dtype="__import__('os')"),
    "a rank twice": lambda m: m["shards"].__setitem__(1, m["shards"][0]),
    "a rank missing": lambda m: m["shards"].pop(),
    "a rank too many": lambda m: m["world"].update(ranks=1),
    "no ranks": lambda m: (m["world"].update(ranks=0), m["shards"].clear()),
    "a billion ranks": lambda m: m["world"].update(ranks=10**9),
    "no hosts": lambda m: m["world"].update(hosts=0),
    "a world that is none": lambda m: m.update(world=[2, 1]),
    "shards that are none": lambda m: m.update(shards={"0": m["shards"][0]}),
    "a key that we do not know": lambda m: m.update(pickle="gASV"),
    "an old schema": lambda m: m.update(schema="powerguard.checkpoint/v1"),
    "a job that is none": lambda m: m.update(job=["llm"]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(name: str) -> None:
    document = json.loads(MANIFEST.to_json())
    assert signed(dict(document)) == MANIFEST.to_json(), "else this test would refuse the signature"
    HOSTILE[name](document)
    with pytest.raises(ManifestError) as refused:
        Manifest.parse(signed(document))
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"schema": "x"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        MANIFEST.to_json().replace(b'"job":"llm"', b'"job":"llm","job":"llm"'),
        MANIFEST.to_json().replace(b'"step":7', b'"step":8'),
        MANIFEST.to_json().replace(b":7", b": 7"),
        MANIFEST.to_json() + b"x",
        MANIFEST.to_json()[:-20],
    ],
)
def test_what_does_not_hold_together_is_refused(content: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.parse(content)
    with pytest.raises(ManifestError):
        Shard.parse(content)


def test_an_old_schema_is_told_by_name() -> None:
    with pytest.raises(ManifestError, match=r"schema is 'powerguard\.checkpoint/v1', not powerguard\.checkpoint/v2"):
        Manifest.parse(b'{"schema": "powerguard.checkpoint/v1", "step": 1}')


def test_a_shard_missing_is_no_manifest_to_commit() -> None:
    """All ranks at that step, or no commit."""
    with pytest.raises(ManifestError, match="shards of 1 ranks, not of each of the 2"):
        replace(MANIFEST, shards=SHARDS[:1]).check()


def test_random_damage_is_refused() -> None:
    """Every byte counts: the sha256 is over what was meant, and what was meant is compared with what is there."""
    content = MANIFEST.to_json()
    rng = random.Random(1)
    for _ in range(2000):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content) - 1)] ^= 1 << rng.randrange(8)
        with pytest.raises(ManifestError):
            Manifest.parse(bytes(damaged))


GREEDY = """
import resource, sys
from powerguard.trainer.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestError
piece, end = sys.argv[1].encode(), sys.argv[2].encode()
content = b'{"schema":"powerguard.checkpoint/v2","shards":[' + piece * (int(sys.argv[3]) // len(piece)) + end
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Manifest.parse(content)
except ManifestError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("piece", "end", "size"),
    [
        ("{},", "{}]}", 100 << 20),
        ("{},", "{}]}", MAX_MANIFEST_BYTES - 100),
        ("[],", "[]]}", MAX_MANIFEST_BYTES - 100),
        ("1000,", "1]}", MAX_MANIFEST_BYTES - 100),
        ('"xy",', '"x"]}', MAX_MANIFEST_BYTES - 100),
        ("[", "]", MAX_MANIFEST_BYTES - 100),
    ],
)
def test_megabytes_of_json_cost_little_memory(piece: str, end: str, size: int) -> None:
    """A byte of JSON can become a hundred in memory: what we never write is refused before it is read."""
    run = subprocess.run(
        [sys.executable, "-c", GREEDY, piece, end, str(size)], capture_output=True, text=True, check=True, timeout=60
    )
    grown_kib = int(run.stdout)
    print(f"{size} bytes of {piece!r}: {grown_kib} KiB more")
    assert grown_kib < 200 * 1024
