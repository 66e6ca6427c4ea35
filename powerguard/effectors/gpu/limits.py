"""What powerguard-gpu found before it changed anything: one small file, written before the first limit is lowered.

It lies in /run and names the boot: power limits do not survive a reboot, and neither does the file. Each entry holds
the limit found, which is never overwritten, and every limit that we may have set since: with a kill between any two
lines of ours, one of these is what the GPU reads, unless somebody else has set another.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from powerguard.clock import boot_id, boottime_s
from powerguard.effectors.gpu.nvml import SAME_MW

LEASE_S: Final = 180.0
"""A cap holds this long after the daemon last said so: longer than its restart (20 s to stop, 60 s to start)."""

RETRY_S: Final = (15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""From an order to restore that was not carried out to the first attempt of our own, and to each further one."""

REMEMBERED: Final = 8
"""Limits of ours that are remembered for each GPU, the newest: one for each share that was asked for."""

LIMITS: Final = "limits.json"
_HELD: Final = "held"
_LOCK: Final = "lock"


class LimitsError(Exception):
    """The file cannot be read or written, or another powerguard-gpu is at work: what, and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One GPU whose limit we may have changed. gone: it was not there when its limit was to be put back."""

    uuid: str
    index: int
    name: str
    found_mw: int
    set_mw: tuple[int, ...]
    gone: bool = False

    def is_ours(self, limit_mw: int) -> bool:
        """Say whether a limit is one that we have set."""
        return any(abs(limit_mw - ours_mw) < SAME_MW for ours_mw in self.set_mw)

    def is_found(self, limit_mw: int) -> bool:
        """Say whether a limit is the one found."""
        return abs(limit_mw - self.found_mw) < SAME_MW


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is kept. Times are seconds of CLOCK_BOOTTIME, 0 for never.

    capped_s: when GPUs were last capped. ordered_s: when they were to be restored: from then on no cap is wanted.
    tries: restores that the watch began, unasked; tried_s: the last of them.
    """

    capped_s: float
    ordered_s: float = 0.0
    tries: int = 0
    tried_s: float = 0.0
    gpus: tuple[Kept, ...] = ()

    def due_s(self, held_s: float, lease_s: float) -> float:
        """When the watch is to put the limits back: the daemon is gone, or what it ordered has failed."""
        if self.ordered_s:
            return max(self.ordered_s, self.tried_s) + RETRY_S[min(self.tries, len(RETRY_S) - 1)]
        return max(self.capped_s, held_s) + lease_s


class Folder:
    """The helper's own folder: /run/powerguard-gpu, or a test's. Only root can write there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Limits | None:
        """What is kept; None where nothing is. What another boot has left is removed. Raises LimitsError."""
        path = self.path / LIMITS
        try:
            told = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _cannot(path, "read", error) from None
        except (ValueError, RecursionError):
            raise _nonsense(path) from None
        if isinstance(told, dict) and isinstance(told.get("boot_id"), str) and told["boot_id"] != boot_id():
            self.forget()
            return None
        try:
            return _limits(told)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _nonsense(path) from None

    def write(self, limits: Limits) -> None:
        """Keep it, durably and whole: a kill at any instruction leaves the old file or the new one."""
        self._put(LIMITS, json.dumps({"schema_version": 1, "boot_id": boot_id(), **asdict(limits)}))

    def forget(self) -> None:
        """All limits are back."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / LIMITS).unlink()

    def hold(self) -> None:
        """Note that the daemon is there and wants the cap."""
        self._put(_HELD, f"{boottime_s():.3f}")

    def held_s(self) -> float:
        """When the daemon last said so; 0 where it never did."""
        try:
            held_s = float((self.path / _HELD).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0.0
        return held_s if 0.0 <= held_s <= boottime_s() else 0.0

    @contextlib.contextmanager
    def locked(self, by_s: float) -> Iterator[None]:
        """Keep others of our kind out. Let go at the end even where a thread of ours hangs in the driver for ever."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _cannot(self.path / _LOCK, "write", error) from None
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if boottime_s() >= by_s:
                        msg = "another powerguard-gpu is still at work (systemctl status 'powerguard-gpu*'): try again"
                        raise LimitsError(msg) from None
                    time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)

    def _put(self, name: str, text: str) -> None:
        path, fresh = self.path / name, self.path / f"{name}.new"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(fresh, flags, 0o644)
            try:
                os.write(descriptor, text.encode() + b"\n")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            fresh.replace(path)
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise _cannot(path, "write", error) from None


def _limits(told: dict[str, Any]) -> Limits:
    """Read what was written, and believe nothing else. Raises ValueError, KeyError, TypeError or AttributeError."""
    if told["schema_version"] != 1:
        raise ValueError(told["schema_version"])
    times = {name: float(told[name]) for name in ("capped_s", "ordered_s", "tried_s")}
    gpus = tuple(
        Kept(
            uuid=str(gpu["uuid"]),
            index=int(gpu["index"]),
            name=str(gpu["name"]),
            found_mw=int(gpu["found_mw"]),
            set_mw=tuple(int(limit) for limit in gpu["set_mw"]),
            gone=gpu["gone"] is True,
        )
        for gpu in told["gpus"]
    )
    if any(gpu.found_mw <= 0 for gpu in gpus):
        raise ValueError(gpus)
    return Limits(**times, tries=int(told["tries"]), gpus=gpus)


def _cannot(path: Path, verb: str, error: OSError) -> LimitsError:
    return LimitsError(f"{path}: cannot {verb}: {error.strerror or error} (powerguard-gpu runs as root and owns it)")


def _nonsense(path: Path) -> LimitsError:
    return LimitsError(
        f"{path}: is not what powerguard-gpu wrote: set the limits by hand (nvidia-smi --power-limit), then remove it"
    )
