"""The slower tiers: what an upload costs, beside boto3; how soon it stops; what training feels of it."""

import contextlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import dcp
from bench.figure import Figure
from powerguard.trainer.ranks.base import Alone
from powerguard.trainer.store.folders import SavedCheckpoint
from powerguard.trainer.store.manifest import MANIFEST
from powerguard.trainer.store.resume import choose
from powerguard.trainer.tiers import Remote, tier_of
from powerguard.trainer.tiers.upload import Uploader
from tests.trainer.tiers.rig import ACCESS, SECRET, S3Server, remote_of, save

_BOTO3 = """
import sys, boto3
from boto3.s3.transfer import TransferConfig
client = boto3.client("s3", endpoint_url=sys.argv[1], region_name="us-east-1", aws_access_key_id=sys.argv[2],
                      aws_secret_access_key=sys.argv[3])
client.upload_file(sys.argv[4], sys.argv[5], sys.argv[6],
                   ExtraArgs={"ChecksumAlgorithm": "SHA256"} if sys.argv[7] else None,
                   Config=TransferConfig(multipart_chunksize=32 << 20, max_concurrency=4))
"""
_STEP = 60_000
_FAST = {"first_s": 0.05, "most_s": 1.0}


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _uploaded(saved: SavedCheckpoint, remote: Remote, job: str) -> tuple[float, float]:
    """Upload once, with the real child; return CPU s/GB (the child's start included) and GB/s."""
    cpu_s, began_s = _children_cpu_s(), time.perf_counter()
    uploader = Uploader(remote, job=job, gate=_FAST)
    uploader.offer(saved)
    while not uploader.status().commits:
        time.sleep(0.005)
    took_s = time.perf_counter() - began_s
    uploader.close()
    gigabytes = saved.size_bytes / 1e9
    return (_children_cpu_s() - cpu_s) / gigabytes, gigabytes / took_s


def _by_boto3(saved: SavedCheckpoint, server: S3Server, key: str, *, checksum: bool) -> tuple[float, float]:
    cpu_s, began_s = _children_cpu_s(), time.perf_counter()
    shard = str(Path(saved.path, "shard-00000"))
    argv = [sys.executable, "-c", _BOTO3, server.url, ACCESS, SECRET, shard, "bench", key, "yes" if checksum else ""]
    subprocess.run(argv, check=True)
    took_s = time.perf_counter() - began_s
    gigabytes = saved.size_bytes / 1e9
    return (_children_cpu_s() - cpu_s) / gigabytes, gigabytes / took_s


def _costs(at: Path, server: S3Server, saved: SavedCheckpoint, runs: int) -> list[Figure]:
    measured: dict[str, list[tuple[float, float]]] = {}
    (at / "nas").mkdir()
    s3 = remote_of("s3://bench", server.url, at, part_bytes=32 << 20, connections=4)
    plain = remote_of("s3://bench", server.url, at, part_bytes=32 << 20, connections=4, checksum=False)
    methods: dict[str, Callable[[str], tuple[float, float]]] = {
        "S3, sha256 of each part": lambda key: _uploaded(saved, s3, f"a{key}"),
        "S3, no checksum": lambda key: _uploaded(saved, plain, f"b{key}"),
        "S3 by boto3 upload_file, sha256": lambda key: _by_boto3(saved, server, f"c{key}", checksum=True),
        "S3 by boto3 upload_file": lambda key: _by_boto3(saved, server, f"d{key}", checksum=False),
        "folder, flushed and read back": lambda key: _uploaded(saved, Remote(url=str(at / "nas")), f"e{key}"),
    }
    for run in range(runs):  # interleaved: what else the machine does falls on all of them
        for name, method in methods.items():
            measured.setdefault(name, []).append(method(str(run)))
    cpu = [Figure(name=f"upload to {n}", unit="CPU s/GB", values=tuple(c for c, _ in v)) for n, v in measured.items()]
    rate = [Figure(name=f"upload to {n}", unit="GB/s", values=tuple(r for _, r in v)) for n, v in measured.items()]
    beside = dcp.saved(at / "nas" / "dcp", saved.size_bytes, runs, " into the folder, while training stands still")
    return cpu + rate + beside


@contextlib.contextmanager
def _busy(processes: int) -> Iterator[None]:
    """So many processes that want a whole core each, at the usual priority: a training."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def _holds(at: Path, server: S3Server, saved: SavedCheckpoint, runs: int, busy: int) -> Figure:
    """From the call to the child being gone, at random instants of an upload."""
    rng = random.Random(1)
    took_ms = []
    with _busy(busy):
        for run in range(runs):
            remote = remote_of("s3://bench", server.url, at, part_bytes=32 << 20)
            uploader = Uploader(remote, job=f"hold{busy}-{run}", gate=_FAST)
            uploader.offer(saved)
            while not uploader.status().bytes_total:
                time.sleep(0.005)
            time.sleep(rng.uniform(0.0, 0.3))
            began_s = time.perf_counter()
            uploader.hold()
            took_ms.append(1000.0 * (time.perf_counter() - began_s))
            uploader.close()
    how = f"with {busy} busy processes on the cores" if busy else "idle machine"
    return Figure(name=f"hold, {how}", unit="ms", values=tuple(took_ms), bar="<= 500")


def _steps_s(seconds: float) -> list[float]:
    """Steps of a loop that only computes, for so long."""
    steps_s = []
    end_s = time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        total = 0
        for number in range(_STEP):
            total += number
        steps_s.append(time.perf_counter() - began_s)
    return steps_s


def _felt(at: Path, server: S3Server, saved: SavedCheckpoint, runs: int, beside: int) -> Figure:
    """How much longer steps are while an upload runs: median over median, in percent, paired.

    beside: other training processes. The server is on this machine, too; it is as nice as the child.
    """
    slower = []
    with _busy(beside):
        for run in range(runs):
            before = statistics.median(_steps_s(1.5))
            remote = remote_of("s3://bench", server.url, at, part_bytes=32 << 20)
            uploader = Uploader(remote, job=f"felt{beside}-{run}", gate=_FAST)
            uploader.offer(saved)
            while not uploader.status().bytes_total:
                time.sleep(0.005)
            during = statistics.median(_steps_s(1.5))
            uploader.close()
            slower.append(100.0 * (during / before - 1.0))
    name = f"training step beside an upload, {1 + beside} process(es) training on this machine's cores"
    return Figure(name=name, unit="% longer", values=tuple(slower))


def _reads(at: Path, server: S3Server, saved: SavedCheckpoint, runs: int) -> Figure:
    """The newest checkpoint chosen, read from the object store and verified."""
    remote = remote_of("s3://bench", server.url, at)
    _uploaded(saved, remote, "llm")
    rates = []
    for _ in range(runs):
        began_s = time.perf_counter()
        chosen = choose([tier_of(remote, "llm")], Alone(), job="llm")
        assert chosen is not None
        rates.append(saved.size_bytes / 1e9 / (time.perf_counter() - began_s))
    return Figure(name="resume from S3, verified", unit="GB/s", values=tuple(rates))


def run(*, quick: bool) -> list[Figure]:
    mib, runs = (64, 2) if quick else (512, 7)
    with tempfile.TemporaryDirectory(prefix="powerguard-bench-") as folder:
        at = Path(folder)
        saved = save(at / "root", 1, mib=mib)
        assert Path(saved.path, MANIFEST).exists()
        figures: list[Figure] = []
        parts: list[Any] = [
            lambda server: _costs(at, server, saved, runs),
            lambda server: [_holds(at, server, saved, 3 * runs, busy) for busy in (0, 4)],
            lambda server: [_felt(at, server, saved, runs, beside) for beside in (0, 1)],
            lambda server: [_reads(at, server, saved, runs)],
        ]
        for part in parts:  # a server of its own for each: moto keeps everything in memory
            server = S3Server(at / "s3.log", nice=19)
            try:
                server.bucket("bench")
                figures += part(server)
            finally:
                server.close()
    return figures
