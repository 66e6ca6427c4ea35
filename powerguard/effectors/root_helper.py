"""The common part of the small root helpers: a line in, a line out, and a folder that outlives a killed process.

systemd starts one process of a helper for each connection to its socket. It reads one JSON line, answers with one, and
ends. What it has changed stands in a file that names the boot and is written before anything is touched; a watch
undoes it when the daemon is gone. Only the standard library.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from powerguard.clock import boot_id, boottime_s
from powerguard.durable import replace_file

_HELD: Final = "held"
_LOCK: Final = "lock"


class KeptError(Exception):
    """The file cannot be read or written, or another process of the helper is at work: what, and what to do."""


def past_s(stored: object) -> float:
    """A stored moment of CLOCK_BOOTTIME; 0, long ago, if there is none. Raises TypeError or ValueError."""
    at_s = float(stored)  # type: ignore[arg-type]
    return at_s if 0.0 <= at_s <= boottime_s() else 0.0


class BootFolder:
    """A helper's own folder in /run, or a test's, with one file that names the boot. Only root can write there."""

    def __init__(self, path: Path, *, helper: str, file: str, by_hand: str) -> None:
        """helper: its name, for messages. file: of what is kept. by_hand: how to repair it by hand."""
        self.path = path
        self._helper = helper
        self._file = path / file
        self._by_hand = by_hand

    def load(self) -> dict[str, Any] | None:
        """The content of the file; None if there is none. A file of another boot is removed. Raises KeptError."""
        try:
            self._refuse_foreign()
            content = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.cannot(self._file, "read", error) from None
        except (ValueError, RecursionError):
            raise self.nonsense() from None
        if not isinstance(content, dict) or not isinstance(content.get("boot_id"), str):
            raise self.nonsense()
        if content["boot_id"] != boot_id():
            self.forget()
            return None
        if content.get("schema_version") != 1:
            raise self.nonsense()
        return content

    def keep(self, plain: Mapping[str, object]) -> None:
        """Write the state before the first change. Raises KeptError."""
        self.put(self._file.name, json.dumps({"schema_version": 1, "boot_id": boot_id(), **plain}))

    def forget(self) -> None:
        """Remove the file, which ends the watch: all is as it was found. Raises KeptError."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            raise self.cannot(self._file, "remove", error) from None

    def nonsense(self) -> KeptError:
        """Return the error for a file with damaged content."""
        return KeptError(f"{self._file}: {self._helper} did not write this content: {self._by_hand}, then remove it")

    def _refuse_foreign(self) -> None:
        """Refuse a folder that other users can write: they could control root's actions."""
        found = self.path.stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            msg = f"{self.path}: other users than root can write there, so its content is not trusted"
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

        In place, and from the first change on: that works even if the disk has become full.
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
        """When the daemon last renewed it; 0 if never."""
        try:
            return past_s((self.path / _HELD).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0.0

    @contextlib.contextmanager
    def locked(self, by_s: float) -> Iterator[None]:
        """Exclude other processes of the same helper."""
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
        """Return the error for a file that cannot be read, written or removed."""
        match error.errno:
            case errno.ENOENT:
                right = f"systemctl enable --now {self._helper}.socket makes the folder"
            case errno.EACCES | errno.EPERM:
                right = f"only root may do this: call {self._helper} as root"
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                right = f"make room: df {self.path}; df -i {self.path}"
            case errno.EISDIR | errno.ELOOP | errno.ENOTDIR:
                right = f"the folder is {self._helper}'s own, but holds another kind of file: remove it"
            case _:
                right = f"mount | grep {self.path.parent}; dmesg"
        return KeptError(f"{path}: cannot {verb}: {error.strerror or error} ({right})")


MAX_LINE_BYTES: Final = 4096
LINE_S: Final = 2.0
"""Timeout for the request line: a client sends it at once."""

EX_USAGE: Final = 64

WATCH_S: Final = 1.0

Answer = dict[str, Any]
_Kept = TypeVar("_Kept")


class RefusedError(Exception):
    """An unknown or forbidden word: what was wrong, and the fix."""


def parse_object(line: bytes) -> Mapping[str, object]:
    """Return the JSON object of a line. Raises RefusedError."""
    try:
        value = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        msg = 'not a word: one JSON object on one line is expected, such as {"word": "list"}'
        raise RefusedError(msg)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def read_line(descriptor: int, by_s: float) -> bytes | None:
    """Read one line of at most MAX_LINE_BYTES by by_s. None if the input was empty. Raises RefusedError."""
    line = b""
    while b"\n" not in line:
        ready, _, _ = select.select([descriptor], [], [], max(by_s - boottime_s(), 0.0))
        if not ready:
            msg = f"no whole line within {LINE_S:g} s"
            raise RefusedError(msg)
        more = os.read(descriptor, MAX_LINE_BYTES + 1 - len(line))
        if not more:
            if line:
                msg = "the line has no end"
                raise RefusedError(msg)
            return None
        line += more
        if len(line) > MAX_LINE_BYTES:
            msg = f"the line is longer than {MAX_LINE_BYTES} bytes"
            raise RefusedError(msg)
    return line.partition(b"\n")[0]


def _read_request(descriptor: int, awaited: Collection[str]) -> Mapping[str, object] | None:
    """Return the object of the line; None if the input was empty. Raises RefusedError."""
    line = read_line(descriptor, boottime_s() + LINE_S)
    if line is None:
        return None
    request = parse_object(line)
    if request.get("word") in awaited and is_gone(descriptor):
        msg = f"{request['word']}: its caller no longer waits, so it is not carried out"
        raise RefusedError(msg)
    return request


def is_gone(descriptor: int) -> bool:
    """Say whether a socket's other end was closed; False for anything else than a socket."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    looks = select.poll()
    looks.register(descriptor, 0)
    return any(event & select.POLLHUP for _, event in looks.poll(0))


def serve(carry_out: Callable[[Mapping[str, object]], Answer], *, awaited: Collection[str] = ()) -> int:
    """Answer the one line that comes in on standard input. carry_out may raise RefusedError.

    awaited: words that are not carried out if their caller no longer waits. A host that is busy may start this process
    late, and by then the opposite word may have been carried out.
    """
    try:
        request = _read_request(sys.stdin.fileno(), awaited)
        if request is None:
            return 0
        answer = carry_out(request)
    except RefusedError as error:
        answer = {"schema_version": 1, "word": "", "ok": False, "error": str(error)}
        log_line(3, f"refused: {error}")
    say(answer)
    return 0


def by_hand(helper: str, carry_out: Callable[[], Answer]) -> int:
    """Carry out a word of the command line; returns the exit status: 0 done, 1 not done, 64 usage (RefusedError)."""
    try:
        answer = carry_out()
    except RefusedError as error:
        sys.stderr.write(f"{helper}: {error}\n")
        return EX_USAGE
    say(answer)
    return 0 if answer["ok"] and not answer.get("failure") else 1


def wait_until_due(read: Callable[[], _Kept], due_s: Callable[[_Kept], float]) -> _Kept | None:
    """Wait until nothing is kept any more (None), or until that is to be undone: then return what is kept.

    read: what is kept now; may raise KeptError. due_s: when it is to be undone, a moment of CLOCK_BOOTTIME.
    """
    reported = ""
    while True:
        left_s = WATCH_S
        try:
            kept = read()
            if not kept:
                return None
            left_s = due_s(kept) - boottime_s()
        except KeptError as error:  # a person must repair it; systemd starts this again
            if str(error) != reported:
                log_line(3, reported := str(error))
        else:
            if left_s <= 0:
                return kept
        time.sleep(min(left_s, WATCH_S))


def refuse_under_test(path: Path, real: str, what: str) -> None:
    """Raise RefusedError if a test would do this to the machine that it runs on."""
    if os.environ.get("POWERGUARD_UNDER_TEST") and path == Path(real):
        msg = f"refused under test: it would {what} of this machine; give --folder"
        raise RefusedError(msg)


def seconds(text: str) -> float:
    """Seconds of a command line. Raises ValueError, which argparse reports."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(text)
    return value


def log_line(severity: int, text: str) -> None:
    """Write a line to the log (severity as in syslog(3))."""
    try:
        sys.stderr.write(f"<{severity}>{text}\n")
        sys.stderr.flush()
    except OSError:
        return  # a missing log must not prevent a restore


def say(answer: Answer) -> None:
    """Write an answer."""
    try:
        sys.stdout.write(json.dumps(answer, separators=(",", ":")) + "\n")
        sys.stdout.flush()
    except OSError:
        # The caller is gone; the request is carried out anyway. The interpreter must not try again at its end,
        # complain, and end with a status of its own.
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
