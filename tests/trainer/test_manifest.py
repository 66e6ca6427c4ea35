"""A manifest is taken only when it says exactly what we would have written; to refuse one costs little."""

import json
import random
import subprocess
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from powerguard.trainer.store.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_SHARD_JSON_BYTES,
    Entry,
    Layout,
    Manifest,
    ManifestError,
    Packed,
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
MANIFEST = Manifest(
    job="llm",
    step=7,
    created="2026-01-01",
    reason="drill",
    ranks=2,
    hosts=1,
    shards=tuple(shard.packed() for shard in SHARDS),
)


def test_it_comes_back() -> None:
    content = MANIFEST.to_json()
    assert Manifest.parse(content) == MANIFEST
    assert Manifest.parse(content + b"\n" * 1000) == MANIFEST, "line ends fill it up in a slot"
    assert MANIFEST.digest == digest_of(content + b"\n\n") == f"sha256:{sha256(content).hexdigest()}"
    assert MANIFEST.size_bytes == 2 * 12288
    assert tuple(Manifest.parse(content).shard(rank) for rank in range(2)) == SHARDS
    assert Packed.parse(SHARDS[1].packed().to_json()).unpacked() == SHARDS[1]


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


def unzipped(document: dict[str, Any], rank: int = 0) -> bytes:
    return zlib.decompress(b64decode(document["shards"][rank]["packed"]))


def zipped(content: bytes) -> str:
    return b64encode(zlib.compress(content)).decode()


def test_the_reference_shows_one_that_is_taken() -> None:
    """docs/reference/checkpoint-format.md, laid out for reading and without its sha256."""
    page = (Path(__file__).parents[2] / "docs/reference/checkpoint-format.md").read_text(encoding="utf-8")
    document = json.loads(page.partition("```json")[2].partition("```")[0])
    shown = Manifest.parse(signed(document))
    assert (shown.job, shown.step, shown.shard(0).items[0].shape) == ("llm", 1234, (50, 50))
    inner = json.loads(page.split("```json")[2].partition("```")[0])
    assert inner == json.loads(unzipped(document)), "what the page shows unpacked is what it shows packed"
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
    "a huge chunk": lambda m: m["shards"][0].update(chunk_bytes=2**40),
    "a rank twice": lambda m: m["shards"].__setitem__(1, m["shards"][0]),
    "a rank missing": lambda m: m["shards"].pop(),
    "a rank too many": lambda m: m["world"].update(ranks=1),
    "no ranks": lambda m: (m["world"].update(ranks=0), m["shards"].clear()),
    "a billion ranks": lambda m: m["world"].update(ranks=10**9),
    "no hosts": lambda m: m["world"].update(hosts=0),
    "a world that is none": lambda m: m.update(world=[2, 1]),
    "shards that are none": lambda m: m.update(shards={"0": m["shards"][0]}),
    "a key that we do not know": lambda m: m.update(pickle="gASV"),
    "an old schema": lambda m: m.update(schema="powerguard.checkpoint/v2"),
    "a job that is none": lambda m: m.update(job=["llm"]),
    "a description that is no text": lambda m: m["shards"][0].update(packed=["x"]),
    "a description that is missing": lambda m: m["shards"][0].pop("packed"),
}

HOSTILE_INSIDE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "too few digests": lambda s: s["digests"].pop(),
    "too many digests": lambda s: s["digests"].append("0" * 32),
    "a digest of another kind": lambda s: s["digests"].__setitem__(0, "0" * 64),
    "items over one another": lambda s: s["items"][1].update(offset=384),
    "items out of order": lambda s: s["items"].reverse(),
    "an item behind the end": lambda s: s["items"][1].update(offset=12288),
    "an item that ends behind the end": lambda s: s["items"][1].update(size_bytes=12288),
    "an item off the grid": lambda s: s["items"][1].update(offset=449),
    "a negative offset": lambda s: s["items"][0].update(offset=-64),
    "two items of one name": lambda s: s["items"][1].update(name="w"),
    "an item without a name": lambda s: s["items"][1].update(name=""),
    "a name that a terminal obeys": lambda s: s["items"][1].update(name="\x1b[2J"),
    "a very long name": lambda s: s["items"][1].update(name="x" * 100_000),
    "a shape of another size": lambda s: s["items"][0].update(shape=[10, 11]),
    "a negative shape": lambda s: s["items"][0].update(shape=[-10, -10]),
    "a million dimensions": lambda s: s["items"][0].update(shape=[1] * 1_000_000),
    "a dtype that is code": lambda s: s["items"][0].update(dtype="__import__('os')"),
    "no digests": lambda s: s.pop("digests"),
    "items that are none": lambda s: s.update(items={}),
    "a key that we do not know": lambda s: s.update(pickle="gASV"),
    "a fraction": lambda s: s["items"][0].update(offset=0.0),
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


@pytest.mark.parametrize("name", HOSTILE_INSIDE)
def test_a_hostile_description_of_a_shard_is_refused(name: str) -> None:
    document = json.loads(MANIFEST.to_json())
    inside = json.loads(unzipped(document))
    HOSTILE_INSIDE[name](inside)
    document["shards"][0]["packed"] = zipped(json.dumps(inside).encode())
    manifest = Manifest.parse(signed(document))
    with pytest.raises(ManifestError) as refused:
        manifest.shard(0)
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()
    assert manifest.shard(1) == SHARDS[1], "the other ranks' are as they were"


@pytest.mark.parametrize(
    "packed",
    [
        "",
        "no base64!",
        "\u00e9",
        b64encode(b"no zlib").decode(),
        zipped(b""),
        zipped(b"[]"),
        zipped(b"\xff\xfe"),
        zipped(b"[" * 100_000),
        b64encode(zlib.compress(b"{}") + b"more").decode(),
        b64encode(zlib.compress(b'{"digests":[],"items":[]}')[:-4]).decode(),
    ],
)
def test_a_description_that_cannot_be_unpacked_is_refused(packed: str) -> None:
    shard = replace(MANIFEST.shards[0], content=packed)
    with pytest.raises(ManifestError):
        replace(MANIFEST, shards=(shard, MANIFEST.shards[1])).shard(0)


def large_shard(rank: int, items: int, digests: int) -> Shard:
    """As a sharded model of many layers has it: long names, shapes and sizes of all kinds, and digests at random."""
    rng = random.Random(rank)
    names = [f"optimizer/state/model.layers.{n // 36}.self_attn.q_proj_{n % 36}.weight/exp_avg" for n in range(items)]
    entries, end = [], 0
    for name in names:
        rows = rng.randrange(1, 200)
        entries.append(Entry(name, "float32", (rows, 8192), end, rows * 8192 * 4))
        end += rows * 8192 * 4
    chunk_bytes = -(-end // digests // 4096) * 4096
    size_bytes = -(-end // 4096) * 4096
    texts = tuple(rng.randbytes(16).hex() for _ in range(-(-size_bytes // chunk_bytes)))
    return Shard(rank=rank, size_bytes=size_bytes, digests=texts, items=tuple(entries), chunk_bytes=chunk_bytes)


def test_a_manifest_of_128_ranks_is_small_and_each_rank_unpacks_its_own_alone() -> None:
    """128 ranks of 2,900 items each: as one list of 371,200 items they would need 65 MB and seconds on every rank."""
    one = large_shard(0, 2_900, 800).packed()
    manifest = replace(MANIFEST, ranks=128, shards=tuple(replace(one, rank=rank) for rank in range(128)))
    content = manifest.to_json()
    print(f"{len(content) / 1e6:.1f} MB, {len(one.content) / 1e3:.0f} kB for each rank")
    assert len(content) < MAX_MANIFEST_BYTES / 4
    parsed = Manifest.parse(content)
    assert parsed == manifest
    assert len(parsed.shard(127).items) == 2_900


def test_a_manifest_that_would_be_too_large_is_refused_before_anything_is_saved() -> None:
    shard = large_shard(0, 2_900, 800)
    layout = Layout(shard.items, shard.size_bytes)
    Shard.check(layout, ranks=512)
    with pytest.raises(ManifestError, match=r"the manifest of 4096 ranks with 2900 items each .* more than 67 MB"):
        Shard.check(layout, ranks=4096)
    many = tuple(Entry(f"{'x' * 400}{n}", "uint8", (), 64 * n, 1) for n in range(MAX_SHARD_JSON_BYTES // 440))
    with pytest.raises(ManifestError, match="save fewer, larger items"):
        Shard.check(Layout(many, 64 * len(many) + -64 * len(many) % 4096))


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
        Packed.parse(content)


def test_an_old_schema_is_reported_by_name() -> None:
    with pytest.raises(ManifestError, match=r"schema is 'powerguard\.checkpoint/v2', not powerguard\.checkpoint/v3"):
        Manifest.parse(b'{"schema": "powerguard.checkpoint/v2", "step": 1}')


def test_a_shard_missing_is_no_manifest_to_commit() -> None:
    """All ranks at that step, or no commit."""
    with pytest.raises(ManifestError, match="shards of 1 ranks, not of each of the 2"):
        replace(MANIFEST, shards=MANIFEST.shards[:1]).check()


def test_random_damage_is_refused() -> None:
    """Every byte counts: the sha256 is over what was meant, and what was meant is compared with what is there."""
    content = MANIFEST.to_json()
    rng = random.Random(1)
    for _ in range(2000):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content) - 1)] ^= 1 << rng.randrange(8)
        with pytest.raises(ManifestError):
            Manifest.parse(bytes(damaged))


PEAK = """
import re
def peak_kib():  # not getrusage's: that counts what the process was before it was replaced, too
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""

GREEDY = (
    PEAK
    + """
import sys
from powerguard.trainer.store.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestError
piece, end = sys.argv[1].encode(), sys.argv[2].encode()
content = b'{"schema":"powerguard.checkpoint/v3","shards":[' + piece * (int(sys.argv[3]) // len(piece)) + end
before = peak_kib()
try:
    Manifest.parse(content)
except ManifestError:
    print(peak_kib() - before)
"""
)


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


BOMB = (
    PEAK
    + """
import sys, zlib
from base64 import b64encode
from powerguard.trainer.store.manifest import ManifestError, Packed
piece, zipper, packed = sys.argv[1].encode() * 200_000, zlib.compressobj(), b""
for _ in range(int(sys.argv[2]) // len(piece)):
    packed += zipper.compress(piece)
packed += zipper.flush()
before = peak_kib()
try:
    Packed(rank=0, size_bytes=4096, content=b64encode(packed).decode()).unpacked()
except ManifestError:
    print(peak_kib() - before)
"""
)


@pytest.mark.parametrize(
    ("piece", "size"), [("[", 1 << 30), ("[],", MAX_SHARD_JSON_BYTES), ("10,", MAX_SHARD_JSON_BYTES)]
)
def test_what_a_small_description_unpacks_to_costs_little_memory(piece: str, size: int) -> None:
    """A gigabyte of one letter packs to one megabyte."""
    run = subprocess.run(
        [sys.executable, "-c", BOMB, piece, str(size)], capture_output=True, text=True, check=True, timeout=60
    )
    grown_kib = int(run.stdout)
    print(f"{size} bytes of {piece!r}: {grown_kib} KiB more")
    assert grown_kib < 200 * 1024
