"""A Debian with a real systemd as PID 1, in a container: boots in about a second, and can really be powered off."""

import asyncio
import contextlib
import ctypes
import os
import pty
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Self

from tests.peers import find, require

ROOT: Final = Path(__file__).parents[2]
IMAGE: Final = ROOT / "build" / "vm" / "bookworm"
PACKAGES: Final = "systemd,systemd-sysv,dbus,libpam-systemd,polkitd"
"""What a small Debian server has, and polkitd for `systemctl start` by an ordinary user."""

EXIT_REBOOT: Final = 133
SYSTEM_BUS: Final = "/run/dbus/system_bus_socket"


def image() -> Path:
    """Return the root of a small Debian 12, made once (20 s, 190 MB) and never changed afterwards."""
    if not (IMAGE / "etc" / "os-release").exists():
        with bootstrapped(PACKAGES) as made:
            keep(made, IMAGE)
    return IMAGE


@contextlib.contextmanager
def bootstrapped(packages: str) -> Iterator[Path]:
    """Yield the root of a Debian 12 with these packages, just made by mmdebstrap."""
    mmdebstrap = require("mmdebstrap")
    # Not below the checkout while it is made: apt cannot quote a folder whose name has a space.
    with tempfile.TemporaryDirectory(prefix="pg-image-", dir="/tmp") as scratch:
        made = Path(scratch) / "root"
        skip = [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")]
        argv = [
            "perl",
            mmdebstrap,
            "--mode=root",
            "--variant=minbase",
            f"--include={packages}",
            *skip,
            "bookworm",
            str(made),
        ]
        # It looks for its own tools beside it where it was unpacked and not installed.
        path = os.pathsep.join([str(Path(mmdebstrap).resolve().parent), os.environ["PATH"], "/usr/sbin", "/sbin"])
        ended = subprocess.run(
            argv, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, timeout=300
        )
        if ended.returncode != 0:
            msg = f"mmdebstrap: exit status {ended.returncode}\n{ended.stderr[-2000:]}"
            raise RuntimeError(msg)
        yield made


def keep(made: Path, place: Path) -> None:
    """Put a root in its place, whole or not at all; whoever was there first stays."""
    place.parent.mkdir(parents=True, exist_ok=True)
    half = place.with_name(f"{place.name}.half-made-{os.getpid()}")
    # cp and not shutil: owners must stay what they are.
    subprocess.run(["cp", "--archive", "--one-file-system", made, half], check=True, timeout=120)
    with contextlib.suppress(OSError):
        half.rename(place)
    shutil.rmtree(half, ignore_errors=True)


@contextlib.contextmanager
def disk(lower: Path | None = None) -> Iterator[Path]:
    """Yield the root of a copy of an image, in memory, that lasts for several boots: give it to `Container`.

    lower: the root that is copied; None: that of `image`.
    """
    with tempfile.TemporaryDirectory(prefix="pg-disk-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        memory, root = Path(name, "memory"), Path(name, "root")
        memory.mkdir()
        root.mkdir()
        _mount(stack, "-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(memory))
        for part in ("upper", "work"):
            (memory / part).mkdir()
        options = f"lowerdir={lower or image()},upperdir={memory}/upper,workdir={memory}/work"
        _mount(stack, "-t", "overlay", "-o", options, "overlay", str(root))
        yield root


def _mount(stack: contextlib.ExitStack, *words: str) -> None:
    subprocess.run(["mount", *words], check=True, timeout=60)
    stack.callback(subprocess.run, ["umount", "--lazy", words[-1]], check=True, timeout=60)


@contextlib.contextmanager
def serving(network: Path, peers: Callable[[], AbstractAsyncContextManager[object]]) -> Iterator[None]:
    """Keep these peers up in a container's network: from a thread, which may be in another network than its process."""
    up, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with peers():
            up.set()
            await asyncio.to_thread(end.wait)

    def enter() -> None:
        with network.open("rb") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0
        asyncio.run(serve())

    thread = threading.Thread(target=enter)
    thread.start()
    try:
        assert up.wait(60)
        yield
    finally:
        end.set()
        thread.join(60)


class Container:
    """One boot of the image. Everything that it writes is gone afterwards (an overlay in memory)."""

    def __init__(self, *, binds: Mapping[str, Path], files: Mapping[str, str], root: Path | None = None) -> None:
        """Take files to show inside, read-only: of ours by path (binds), or made up for the test (files).

        root: of a `disk` that keeps what is written, for the boot after this one.
        """
        self._root = root
        self._binds = dict(binds)
        self._files = dict(files)
        self._folder = Path(tempfile.mkdtemp(prefix="pg-ns-", dir="/tmp"))
        self._console: list[bytes] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._leader: int | None = None

    def __enter__(self) -> Self:
        """Boot, and wait until systemd says that it is up."""
        argv = [require("systemd-nspawn"), "--quiet", "--boot"]
        argv += [f"--directory={self._root}"] if self._root else [f"--directory={image()}", "--volatile=overlay"]
        argv += ["--register=no", "--keep-unit", f"--machine=pg-{secrets.token_hex(4)}"]
        argv += ["--link-journal=no", "--resolv-conf=off", "--timezone=off", "--private-network"]
        for number, (inside, text) in enumerate(self._files.items()):
            outside = self._folder / f"{number}"
            outside.write_text(text, encoding="utf-8")
            outside.chmod(0o755)
            self._binds[inside] = outside
        for inside, outside in self._binds.items():
            quoted = str(outside).replace("\\", "\\\\").replace(":", "\\:")
            argv.append(f"--bind-ro={quoted}:{inside}")
        # Without a terminal it shows nothing and hangs (measured on systemd 252).
        ours, theirs = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name != "POWERGUARD_UNDER_TEST"}
        try:
            self._process = subprocess.Popen(
                argv, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
            )
        finally:
            os.close(theirs)
        threading.Thread(target=self._drain, args=(ours,), daemon=True).start()
        try:
            self._wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End it, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            # Killing the leader takes every process in the container along.
            for pid in filter(None, (self._leader, self._process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(timeout=60)
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, *argv: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a program inside, as root, to its end."""
        return subprocess.run(self._inside(argv), capture_output=True, text=True, check=False, timeout=limit_s)

    def check(self, *argv: str) -> str:
        """Run a program inside that must succeed, and return what it says."""
        ended = self.run(*argv)
        assert ended.returncode == 0, f"{argv}: {ended.returncode}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def off_within(self, limit_s: float) -> float:
        """Wait for the power-off; return how many seconds it took from now."""
        assert self._process is not None
        began_s = time.monotonic()
        try:
            self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            msg = f"still on after {limit_s:.0f} s; the end of its console:\n{self.console[-3000:]}"
            raise AssertionError(msg) from None
        return time.monotonic() - began_s

    def freeze_systemd(self) -> None:
        """Stop PID 1 inside, as a kernel bug or a hung disk may: it answers nobody any more."""
        assert self._leader is not None
        os.kill(self._leader, signal.SIGSTOP)

    @property
    def network(self) -> Path:
        """The network of its own, for setns(2)."""
        assert self._leader is not None
        return Path(f"/proc/{self._leader}/ns/net")

    @property
    def on(self) -> bool:
        """Say whether it still runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def rebooted(self) -> bool:
        """Say whether it has ended in a reboot, and not in a power-off: `systemd-nspawn --keep-unit` exits with 133."""
        return self._process is not None and self._process.poll() == EXIT_REBOOT

    @property
    def console(self) -> str:
        """Everything that came out on its console."""
        return b"".join(self._console).decode("utf-8", "replace")

    def _inside(self, argv: Sequence[str]) -> list[str]:
        assert self._leader is not None
        return [find("nsenter") or "/usr/bin/nsenter", "--target", str(self._leader), "--all", "--", *argv]

    def _drain(self, console: int) -> None:
        with contextlib.suppress(OSError):  # EIO when the last one has closed it
            while chunk := os.read(console, 4096):
                self._console.append(chunk)
        os.close(console)

    def _wait_until_up(self) -> None:
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s and self.on:
            self._leader = self._leader or self._find_leader()
            if self._leader is not None:
                ended = self.run("/usr/bin/systemctl", "is-system-running")
                if ended.stdout.strip() in {"running", "degraded"}:
                    return
            time.sleep(0.1)
        msg = f"systemd-nspawn did not boot:\n{self.console[-3000:]}"
        raise RuntimeError(msg)

    def _find_leader(self) -> int | None:
        """Return the process of ours that is PID 1 inside: a descendant named systemd."""
        assert self._process is not None
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                lines = dict(
                    line.split(":\t", 1) for line in status.read_text(encoding="utf-8").splitlines() if ":\t" in line
                )
            except OSError:
                continue
            if lines.get("PPid") == str(self._process.pid) and lines.get("NSpid", "").split()[-1:] == ["1"]:
                return int(status.parent.name)
        return None
