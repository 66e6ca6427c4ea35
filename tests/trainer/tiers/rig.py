"""What the tests of the tiers stand on: real checkpoints, a real S3 server, and a proxy before it that misbehaves."""

import asyncio
import contextlib
import ctypes
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from powerguard.trainer.store.folders import SavedCheckpoint
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.manifest import Manifest
from powerguard.trainer.store.shards import Snapshot
from powerguard.trainer.store.store import Store
from powerguard.trainer.tiers import Remote
from tests.peers.ports import free_port

MIB = 1 << 20
CHUNK = 8 * MIB
ACCESS, SECRET = "AKIAPOWERGUARDTESTS", "a-secret-that-shows-nowhere"


def state(step: int, rank: int = 0, mib: int = 20) -> bytes:
    """Bytes that no other step and no other rank has."""
    rng = random.Random(step * 1000 + rank)
    return b"".join(rng.randbytes(MIB) for _ in range(mib))


def save(
    roots: Path | Mapping[int, Path], step: int, *, ranks: int = 1, job: str = "llm", mib: int = 20, token: int = 0
) -> SavedCheckpoint:
    """Make a real checkpoint. roots: one for all ranks, or each rank's: several hosts. Returns the first root's."""
    of = dict.fromkeys(range(ranks), roots) if isinstance(roots, Path) else dict(roots)
    leaders = {root: rank for rank, root in sorted(of.items(), reverse=True)}
    stores = {root: Store(root, job=job, rank=rank, ranks=ranks, slots=0) for root, rank in leaders.items()}
    first = stores[of[min(of)]]
    name = first.name(step, f"{step * 16 + token:08x}")
    shards = []
    for rank in range(ranks):
        snapshot = Snapshot()
        layout = snapshot.take([Buffer("state", state(step, rank, mib)), Buffer.json("step", step)])
        shards.append(stores[of[rank]].write_shard(name, rank, snapshot, layout))
    manifest = Manifest(
        job=job,
        step=step,
        created=f"2026-01-01T00:00:{step % 60:02d}Z",
        reason="periodic",
        ranks=ranks,
        hosts=len(stores),
        shards=tuple(shard.packed() for shard in shards),
    )
    saved = {store.root: store.commit(name, manifest) for store in stores.values()}
    for store in stores.values():
        store.close()
    return saved[first.root]


def flip(path: Path, offset: int) -> None:
    """Turn one bit of a file over."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def until(what: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait until it is true; a test that waits for ever says nothing."""
    end_s = time.perf_counter() + limit_s
    while not what():
        assert time.perf_counter() < end_s, "did not come true"
        time.sleep(0.02)


class S3Server:
    """A real server process that speaks S3: moto's."""

    def __init__(self, log: Path, *, nice: int = 0) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        program = Path(sys.executable).with_name("moto_server")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["nice", "-n", str(nice), str(program), "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=output,
                stderr=output,
            )
        until(self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def bucket(self, name: str) -> str:
        """Make a bucket; return its URL."""
        self._ask("PUT", f"/{name}")
        return f"s3://{name}"

    def put(self, path: str, content: bytes) -> None:
        """Store an object as somebody else would; path: /bucket/key."""
        self._ask("PUT", path, content)

    def get(self, path: str) -> bytes:
        return self._ask("GET", path)

    def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        credential = f"AWS4-HMAC-SHA256 Credential={ACCESS}/20260101/us-east-1/s3/aws4_request"
        headers = {
            "Authorization": f"{credential}, SignedHeaders=host, Signature=0",
            "Content-Type": "application/octet-stream",
        }
        request = urllib.request.Request(f"{self.url}{path}", content, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            body: bytes = answer.read()
            return body

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Fault:
    """What the proxy does to one request.

    status: answer so instead. cut: hang up after so many bytes of the body. lost: it is done, and the answer is lost.
    """

    status: int = 0
    code: str = ""
    cut: int | None = None
    lost: bool = False


Rule = Callable[[str, str], Fault | None]


def storm(seed: int, share: float) -> Rule:
    """So large a share of all requests fails: refused, throttled, or cut off in mid-body."""
    rng = random.Random(seed)
    faults = [
        Fault(500, "InternalError"),
        Fault(503, "SlowDown"),
        Fault(429, "TooManyRequests"),
        Fault(cut=3 * MIB),
        Fault(lost=True),
    ]
    return lambda _method, _path: rng.choice(faults) if rng.random() < share else None


class Proxy:
    """Stands before the server. rule: asked for each request; bytes_per_s: of all bodies that go up; None: no limit."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self.rule: Rule = lambda _method, _path: None
        self.bytes_per_s: float | None = None
        self.met: Counter[str] = Counter()
        self.asked: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        """Of each request that was asked, their names in small letters."""
        self.bytes_up = 0
        self.in_flight = 0
        self.port = 0
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None] | None] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(60)
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 16)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await self._ended.wait()
            # Accept none any more, and let what is being accepted begin, in turns of the loop: closed under it,
            # Python 3.11 leaves a socket open, and so does a task that is cancelled before it has begun.
            self._loop.remove_reader(server.sockets[0])
            for _ in range(10):
                await asyncio.sleep(0)
            server.close()
            while tasks := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            await asyncio.sleep(0.05)  # transports that were aborted close at their next turn

        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(serve())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())  # the loop itself holds tasks loosely
        try:
            while await self._served(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; True: the connection goes on."""
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        pairs = (line.split(": ", 1) for line in lines if ": " in line)
        headers = {name.lower(): value for name, value in pairs}
        size = int(headers.get("content-length", "0"))
        fault = self.rule(method, path)
        self.asked.append((method, path))
        self.headers.append(headers)
        self.met["ok" if fault is None else f"{fault.status or ('lost' if fault.lost else 'cut')}"] += 1
        lost = fault is not None and fault.lost
        if fault is not None and fault.cut is not None:
            await reader.readexactly(min(size, fault.cut))
            return False
        if fault is not None and not lost:
            await self._carried(reader, None, size)
            body = f"<Error><Code>{fault.code}</Code><Message>no</Message></Error>".encode()
            writer.write(f"HTTP/1.1 {fault.status} No\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            return True
        back, forth = await asyncio.open_connection("127.0.0.1", self._upstream, limit=1 << 20)
        self.in_flight += 1
        try:
            kept = [line for line in lines if line and not line.lower().startswith(("connection:", "expect:"))]
            forth.write("\r\n".join([first, *kept, "Connection: close", "", ""]).encode("latin-1"))
            await self._carried(reader, forth, size)
            while piece := await back.read(1 << 20):
                if lost:
                    continue
                writer.write(piece)
                await writer.drain()
        finally:
            self.in_flight -= 1
            forth.transport.abort()
            with contextlib.suppress(OSError):
                await forth.wait_closed()
        writer.close()
        return False

    async def _carried(self, reader: asyncio.StreamReader, to: asyncio.StreamWriter | None, size: int) -> None:
        """Carry a body on, or away."""
        while size:
            piece = await reader.read(min(size, 1 << 16))
            if not piece:
                raise ConnectionResetError
            size -= len(piece)
            self.bytes_up += len(piece)
            if to is not None:
                to.write(piece)
                await to.drain()
            if self.bytes_per_s is not None:
                await asyncio.sleep(len(piece) / self.bytes_per_s)


def credentials(folder: Path, *, mode: int = 0o600, secret: str = SECRET) -> Path:
    path = folder / "credentials"
    path.write_text(f"[default]\naws_access_key_id = {ACCESS}\naws_secret_access_key = {secret}\n")
    path.chmod(mode)
    return path


def remote_of(url: str, endpoint: str, folder: Path, **options: object) -> Remote:
    """An S3 remote with small parts, so that a small checkpoint has several."""
    plain: dict[str, object] = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "credentials_file": str(credentials(folder)),
        "part_bytes": CHUNK,
        "connections": 2,
    }
    return Remote(url=url, **{**plain, **options})  # type: ignore[arg-type]


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """This process's environment, for as long as the block lasts: what an operator may have set."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class HungMount:
    """A mount whose server never answers, over a folder: whoever touches it hangs until it is gone. Needs root.

    A FUSE mount without a server: as real to the kernel as a NAS whose cable was pulled.
    """

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._folder = str(folder).encode()
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0".encode()
        if self._libc.mount(b"powerguard-tests", self._folder, b"fuse", 0, options):
            os.close(self._device)
            raise OSError(ctypes.get_errno(), "cannot mount")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._libc.umount2(self._folder, 2)  # MNT_DETACH
        os.close(self._device)  # whoever still hangs in it is told that it is gone


def hung(folder: Path) -> HungMount:
    """Hang a folder; skip the test where that cannot be had."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs root and /dev/fuse: a mount whose server never answers")
    try:
        return HungMount(folder)
    except OSError as error:
        pytest.skip(f"may not mount here ({error.strerror}): a mount whose server never answers")


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[None]:
    """A file system of so many MiB over a folder; skip the test where that cannot be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={mib}m".encode()):
        pytest.skip("may not mount here: a file system that is full")
    try:
        yield
    finally:
        libc.umount2(str(folder).encode(), 2)
