"""The effector `host`: has this host powered off by its deadline, and training started after a return.

The daemon has no right to power the host off. It writes one line to a FIFO that only its user can write to.
`powerguard-off` reads it, a root program that needs neither this daemon nor D-Bus afterwards
(docs/guides/power-off.md).
"""

import asyncio
import contextlib
import errno
import fcntl
import math
import os
import pwd
import secrets
import shutil
import stat
import sys
import termios
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import structlog

from powerguard.clock import Clock, boot_id, boottime_s
from powerguard.core.model.actions import Action, Detail, PowerOff, Reboot, ResumeTraining
from powerguard.core.model.policy import Mode
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.options import OFF_FIFO, HostOptions, ResumeOptions

log = structlog.get_logger()

COMMAND_LIMIT_S: Final = 4.0
"""For a site's own power-off command, which only gives an order and does not wait for its end. Less than the order has
(RETRY_S): a command that has ended and left a child with its output has given it."""

FULL_LIMIT_S: Final = 4.0
"""For room in the FIFO: other words may fill it, and powerguard-off empties it while they do."""

FULL_RETRY_S: Final = 0.05
"""Interval of the tries."""

ANSWER_LIMIT_S: Final = 4.0
"""For the answer of powerguard-off, which systemd starts for the word (measured: 0.1 s)."""

ANSWER_EVERY_S: Final = 0.02
ANSWER_FILE: Final = "answer"
"""In the folder of the FIFO: what became of the newest word."""

RESUME_LIMIT_S: Final = 10.0
RESTART_SOCKET: Final = "systemctl restart powerguard-off.socket"
NOT_LISTENING: Final = f"powerguard-off.socket is not listening: {RESTART_SOCKET}"
DAEMON_USER: Final = "powerguard"
"""User= of powerguard.service and SocketUser= of powerguard-off.socket."""

LOOK_EVERY_S: Final = 60.0
"""Interval of the daemon's check that it can power this host off."""

HELLO_EVERY_S: Final = 3600.0
"""Interval of the daemon's check that powerguard-off answers: each one starts it."""

LOOK_AGAIN_S: Final = 5.0
"""The same interval while it cannot: a repair shows soon."""


class HostEffector:
    """Carries out PowerOff, Reboot and ResumeTraining. Repetition is harmless: no later word delays a deadline."""

    def __init__(
        self,
        options: HostOptions,
        *,
        mode: Mode = Mode.ARMED,
        resume: ResumeOptions | None = None,
        spawn: Spawn = run_child,
        clock: Clock = boottime_s,
        boot: Callable[[], str] = boot_id,
    ) -> None:
        """Set up, without touching anything. mode: in dry-run no order is carried out, in rehearse no power-off."""
        self._options = options
        self._mode = mode
        self._resume = ResumeOptions() if resume is None else resume
        self._spawn = spawn
        self._clock = clock
        self._boot = boot
        self.trouble = ""
        """Why a power-off would fail, by the newest check; "" when it would not, and before the first check."""

    async def keep(self, rest: Callable[[float], Awaitable[object]]) -> None:
        """Check at once and then every minute that a power-off can be ordered; log each change; never returns.

        Every hour, and after each trouble, powerguard-off is asked for an answer as well.
        """
        heard_at_s = -math.inf
        while True:
            found = obstacle(self._options)
            if not found and (self.trouble or self._clock() - heard_at_s >= HELLO_EVERY_S):
                found = await unanswered(self._options, boot=self._boot())
                heard_at_s = -math.inf if found else self._clock()
            if found and found != self.trouble:
                log.error("power_off_unavailable", because=found)
            elif self.trouble and not found:
                log.info("power_off_available")
            self.trouble = found
            await rest(LOOK_AGAIN_S if found else LOOK_EVERY_S)

    async def carry_out(self, action: Action) -> Detail:
        """Give the order and return at once, without waiting for the shutdown.

        Detail: `dry_run` (bool), `via` (fifo, command, systemctl or none) and, for PowerOff, `deadline_s`: seconds
        until the power is cut even if units still run. Raises EffectorError when the order could not be given.
        """
        match action:
            case PowerOff(force_after_s=force_after_s):
                return await self._power_off(min(max(force_after_s, 0.0), self._options.force_after_s))
            case Reboot(force_after_s=force_after_s):
                return await self._reboot(force_after_s)
            case ResumeTraining():
                return await self._resume_training()
            case _:
                msg = f"host: cannot carry out {type(action).__name__}: only PowerOff, Reboot and ResumeTraining"
                raise EffectorError(msg)

    async def _power_off(self, deadline_s: float) -> Detail:
        detail: Detail = (("deadline_s", deadline_s),)
        if self._mode is not Mode.ARMED:
            return (("dry_run", True), ("via", "nothing"), *detail)
        if self._options.kind == "command":
            argv = [word.replace("{deadline_s}", str(int(deadline_s))) for word in self._options.command]
            await self._run(argv, limit_s=COMMAND_LIMIT_S, right="host.command must give the order and return")
            return (("dry_run", False), ("via", "command"), *detail)
        await self._say("off", deadline_s)
        return (("dry_run", False), ("via", "fifo"), *detail)

    async def _reboot(self, force_after_s: float) -> Detail:
        """Turn the power-off that is under way into a reboot: utility came back after the commit.

        force_after_s: seconds until the reboot is forced; as all words it can only bring the deadline forward. Detail
        as for PowerOff. powerguard-off refuses it where no power-off of ours is under way. Raises EffectorError if the
        word could not be written, and for kind command, whose shutdown cannot become a reboot.
        """
        deadline_s = min(max(force_after_s, 0.0), self._options.force_after_s)
        detail: Detail = (("deadline_s", deadline_s),)
        if self._mode is not Mode.ARMED:
            return (("dry_run", True), ("via", "nothing"), *detail)
        if self._options.kind == "command":
            msg = "host: a power-off by host.command cannot end in a reboot: only host.kind: systemd can do that"
            raise EffectorError(msg)
        await self._say("reboot", deadline_s)
        return (("dry_run", False), ("via", "fifo"), *detail)

    async def _say(self, verb: Literal["off", "reboot"], deadline_s: float) -> None:
        refuse_under_test(self._options.fifo)
        await say(self._options.fifo, f"{verb} {self._boot()} {int(self._clock() + deadline_s)}")

    async def _resume_training(self) -> Detail:
        if self._mode is Mode.DRY_RUN:
            return (("dry_run", True), ("via", "nothing"))
        if self._resume.by == "scheduler":
            return (("dry_run", False), ("via", "scheduler"))
        if self._resume.command:
            await self._run(self._resume.command, limit_s=RESUME_LIMIT_S, right="see resume.command in the settings")
            return (("dry_run", False), ("via", "command"))
        if os.environ.get("POWERGUARD_UNDER_TEST") and self._spawn is run_child:
            msg = "host: refused under test: would start units of this machine; inject spawn or set resume.command"
            raise EffectorError(msg)
        target = self._resume.target
        await self._run(
            ["systemctl", "start", "--no-block", "--no-ask-password", target],
            limit_s=RESUME_LIMIT_S,
            right=f"is {target} installed, and does a polkit rule let this user start it (systemd/powerguard.rules)?",
        )
        return (("dry_run", False), ("via", "systemctl"))

    async def _run(self, argv: Sequence[str], *, limit_s: float, right: str) -> None:
        try:
            ended = await self._spawn(argv, limit_s=limit_s)
        except OSError as error:
            msg = f"{argv[0]}: cannot be started: {error.strerror or error}; {right}"
            raise EffectorError(msg) from error
        if ended.timed_out:
            msg = f"{argv[0]}: did not return within {limit_s:g} s; {right}"
            raise EffectorError(msg)
        if ended.returncode != 0:
            lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
            msg = f"{argv[0]}: exit status {ended.returncode}: {lines[-1][:200] if lines else 'no output'}; {right}"
            raise EffectorError(msg)


def refuse_under_test(fifo: str) -> None:
    """Raise EffectorError if a test would power off the machine that it runs on."""
    if os.environ.get("POWERGUARD_UNDER_TEST") and os.path.realpath(fifo) == os.path.realpath(OFF_FIFO):
        msg = f"host: refused under test: {fifo} powers this machine off; set host.fifo to a FIFO of the test's own"
        raise EffectorError(msg)


def obstacle(options: HostOptions) -> str:
    """Return why a power-off could not be ordered now, "" when it could. Writes no word and runs no program."""
    if options.kind == "command":
        program = options.command[0]
        return "" if shutil.which(program) else f"{program}: is not an executable file: correct host.command"
    if options.kind == "systemd":
        try:
            os.close(open_word(options.fifo))
        except EffectorError as error:
            return str(error)
    return ""


def _owners() -> set[int]:
    """Return the uids that the FIFO may belong to: root, this user, and for root the daemon's user."""
    owners = {0, os.geteuid()}
    if os.geteuid() == 0:
        with contextlib.suppress(KeyError):
            owners.add(pwd.getpwnam(DAEMON_USER).pw_uid)
    return owners


def open_word(path: str) -> int:
    """Open the FIFO for writing, without ever waiting, and make sure that it is root's or the daemon's.

    Raises EffectorError: no reader, not a FIFO, a wrong owner, or no permission to write.
    """
    try:
        fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENXIO}:
            msg = f"{path}: {NOT_LISTENING}"
        elif error.errno == errno.EACCES:
            msg = f"{path}: user {os.geteuid()} may not write here: only powerguard may (SocketUser=powerguard)"
        elif error.errno == errno.ELOOP:
            msg = f"{path}: is a symbolic link, but must be the FIFO of powerguard-off.socket itself: {RESTART_SOCKET}"
        else:
            msg = f"{path}: {error.strerror}; {NOT_LISTENING}"
        raise EffectorError(msg) from error
    found = os.fstat(fifo)
    if not stat.S_ISFIFO(found.st_mode):
        os.close(fifo)
        msg = f"{path}: is not a FIFO; {NOT_LISTENING}"
        raise EffectorError(msg)
    if found.st_uid not in _owners() or found.st_mode & 0o022:
        os.close(fifo)
        msg = (
            f"{path}: owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}: other users could write here;"
            f" it must be owned by root or {DAEMON_USER}, mode 0200: {RESTART_SOCKET}"
        )
        raise EffectorError(msg)
    return fifo


async def unanswered(options: HostOptions, *, boot: str) -> str:
    """Return why powerguard-off would not obey a word, "" if it would: it is asked for an answer, without an effect.

    boot: this boot's id, as the daemon sees it. Only kind systemd has a helper to ask.
    """
    if options.kind != "systemd":
        return ""
    try:
        refuse_under_test(options.fifo)
        await say(options.fifo, f"hello {boot} {secrets.randbelow(10**9)}")
    except EffectorError as error:
        return str(error)
    return ""


async def say(path: str, word: str, *, limit_s: float = ANSWER_LIMIT_S) -> None:
    """Write a word and wait for its answer. Raises EffectorError: not written, refused, or not answered (timed_out)."""
    # The first newline ends an unfinished line in the FIFO, which would corrupt this one.
    await write_word(path, f"\n{word}\n".encode("ascii"))
    answer = ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not (answer := _answer(path, word)):  # noqa: ASYNC110 - no code here could set an event
                await asyncio.sleep(ANSWER_EVERY_S)  # noqa: TID251 - a file does not report changes
    if answer == "accepted":
        return
    if answer:
        msg = f"powerguard-off did not obey: {answer}"
        raise EffectorError(msg)
    msg = (
        f"powerguard-off has not answered within {limit_s:g} s: journalctl -u powerguard-off.service; "
        "if it is older than this daemon: powerguard install"
    )
    raise EffectorError(msg, timed_out=True)


def _answer(path: str, word: str) -> str:
    """Return powerguard-off's answer to the word; "" until it answers, or if the file is not its own."""
    try:
        file = os.open(Path(path).parent / ANSWER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        text = os.read(file, 1024) if os.fstat(file).st_uid in {0, os.geteuid()} else b""
    except OSError:
        return ""
    finally:
        os.close(file)
    line, end, _ = text.decode("ascii", "replace").partition("\n")
    return line.removeprefix(f"{word} ").strip() if end and line.startswith(f"{word} ") else ""


async def write_word(path: str, word: bytes) -> None:
    """Write one word, whole or not at all (PIPE_BUF), without blocking the loop. Raises EffectorError.

    Another writer that waits for room in a full FIFO takes it before we are woken. So a FIFO that is read and stays
    full is made larger; one that is not read for FULL_LIMIT_S is left as it is, and that is an error.
    """
    fifo = open_word(path)
    try:
        async with asyncio.timeout(FULL_LIMIT_S):
            while not _wrote(fifo, word):
                unread = _unread(fifo)
                await asyncio.sleep(FULL_RETRY_S)  # noqa: TID251 - a FIFO that others fill reports no room
                if _unread(fifo) != unread:
                    _enlarge(fifo)
    except TimeoutError as error:
        off = "powerguard-off does not read (systemctl status powerguard-off.service)"
        msg = f"{path}: full for {FULL_LIMIT_S:g} s: {off}"
        raise EffectorError(msg) from error
    except OSError as error:
        msg = f"{path}: {error.strerror}; {NOT_LISTENING}"
        raise EffectorError(msg) from error
    finally:
        os.close(fifo)


def _wrote(fifo: int, word: bytes) -> bool:
    try:
        os.write(fifo, word)
    except BlockingIOError:
        return False
    return True


def _unread(fifo: int) -> int:
    """Return how many bytes wait in the FIFO."""
    return int.from_bytes(fcntl.ioctl(fifo, termios.FIONREAD, bytes(4)), sys.byteorder)


def _enlarge(fifo: int) -> None:
    """Double the FIFO, as far as the kernel permits (fs.pipe-max-size, 1 MiB)."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fifo, fcntl.F_SETPIPE_SZ, 2 * fcntl.fcntl(fifo, fcntl.F_GETPIPE_SZ))
