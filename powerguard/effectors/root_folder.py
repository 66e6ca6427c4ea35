"""What the small root helpers keep: a folder that outlives whoever is killed, with one file that names the boot.

What they have changed stands in it before anything is touched. Only the standard library.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from powerguard.clock import boot_id, boottime_s
from powerguard.durable import replace_file

_HELD: Final = "held"
_LOCK: Final = "lock"


class KeptError(Exception):
    """The file cannot be read or written, or another process of the helper is at work: what, and what to do."""


def past_s(told: object) -> float:
    """A moment of CLOCK_BOOTTIME that was kept; 0, long ago, where it never was. Raises TypeError or ValueError."""
    at_s = float(told)  # type: ignore[arg-type]
    return at_s if 0.0 <= at_s <= boottime_s() else 0.0


class KeptFolder:
    """A helper's own folder in /run, or a test's, with one file that names the boot. Only root can write there."""

    def __init__(self, path: Path, *, helper: str, file: str, by_hand: str) -> None:
        """helper: its name, for messages. file: of what is kept. by_hand: what puts that right without us."""
        self.path = path
        self._helper = helper
        self._file = path / file
        self._by_hand = by_hand

    def load(self) -> dict[str, Any] | None:
        """What is kept; None where nothing is. What another boot has left is removed. Raises KeptError."""
        try:
            self._refuse_foreign()
            told = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.cannot(self._file, "read", error) from None
        except (ValueError, RecursionError):
            raise self.nonsense() from None
        if not isinstance(told, dict) or not isinstance(told.get("boot_id"), str):
            raise self.nonsense()
        if told["boot_id"] != boot_id():
            self.forget()
            return None
        if told.get("schema_version") != 1:
            raise self.nonsense()
        return told

    def keep(self, plain: Mapping[str, object]) -> None:
        """Write what is to be known before anything is touched. Raises KeptError."""
        self.put(self._file.name, json.dumps({"schema_version": 1, "boot_id": boot_id(), **plain}))

    def forget(self) -> None:
        """All is as it was found: the file is gone, and the watch with it. Raises KeptError."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            raise self.cannot(self._file, "remove", error) from None

    def nonsense(self) -> KeptError:
        """Return what to say of a file whose content makes no sense."""
        return KeptError(f"{self._file}: is not what {self._helper} wrote: {self._by_hand}, then remove it")

    def _refuse_foreign(self) -> None:
        """What others could have written is not believed: it would make root do what they like."""
        found = self.path.stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            msg = f"{self.path}: others than root can write there, so nothing in it is believed"
            msg += f" (chown root {self.path}; chmod 0755 {self.path})"
            raise KeptError(msg)

    def put(self, name: str, text: str) -> None:
        """Write a file durably and whole: a kill at any instruction leaves the old one or the new one."""
        path = self.path / name
        try:
            replace_file(path, text.encode() + b"\n", mode=0o644)
        except OSError as error:
            raise self.cannot(path, "write", error) from None

    def hold(self) -> None:
        """Note that the daemon is there and wants what was changed to stay. Raises KeptError.

        In place, and from the first change on: that works where somebody has filled the disk since.
        """
        path = self.path / _HELD
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                # Rounded down: a moment of the future, by half a millisecond, would be none.
                os.pwrite(descriptor, f"{math.floor(boottime_s() * 1000) / 1000:20.3f}\n".encode("ascii"), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self.cannot(path, "write", error) from None

    def held_s(self) -> float:
        """When the daemon last said so; 0 where it never did."""
        try:
            return past_s((self.path / _HELD).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0.0

    @contextlib.contextmanager
    def locked(self, by_s: float) -> Iterator[None]:
        """Keep others of our kind out."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self.cannot(self.path / _LOCK, "write", error) from None
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if boottime_s() >= by_s:
                        msg = f"another {self._helper} is still at work (systemctl status '{self._helper}*'): try again"
                        raise KeptError(msg) from None
                    time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)

    def cannot(self, path: Path, verb: str, error: OSError) -> KeptError:
        """Return what to say of a file that cannot be read, written or removed."""
        match error.errno:
            case errno.ENOENT:
                right = f"systemctl enable --now {self._helper}.socket makes the folder"
            case errno.EACCES | errno.EPERM:
                right = f"only root may: call {self._helper} as root"
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                right = f"make room: df {self.path}; df -i {self.path}"
            case errno.EISDIR | errno.ELOOP | errno.ENOTDIR:
                right = f"something else lies there, and the folder is {self._helper}'s own: remove it"
            case _:
                right = f"mount | grep {self.path.parent}; dmesg"
        return KeptError(f"{path}: cannot {verb}: {error.strerror or error} ({right})")
