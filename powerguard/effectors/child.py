"""Child processes that cannot outlive their deadline. The only way in which the daemon starts a program."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

MAX_OUTPUT_BYTES: Final = 1 << 20
"""Of each of stdout and stderr; what a program writes beyond it is read and dropped."""
_NAME: Final = "powerguard-exec"
_EXEC: Final = ("/bin/sh", "-c", 'exec "$@"', _NAME)
"""Python waits with all its threads until a child has begun, so one on a dead file server would hold the daemon."""
_UNSTARTED: Final = {126: errno.EACCES, 127: errno.ENOENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended. returncode: negative for a signal; timed_out: it was killed at its limit.

    left_open: it ended by itself, but at the limit a process that it had started still held its output.
    """

    returncode: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    left_open: bool = False


class Spawn(Protocol):
    """Runs a program to its end or to its limit. Injected, so that the simulator can stand in."""

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        """Return how it ended; raises OSError when it cannot be started."""
        ...


def clean_environment() -> dict[str, str]:
    """Return the environment without the daemon's own variables (a child must not speak to systemd in its name)."""
    private = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID", "CREDENTIALS_DIRECTORY")
    return {name: value for name, value in os.environ.items() if name not in private}


async def run_child(
    argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> Ended:
    """Run argv in a session of its own; at limit_s, or when cancelled, its whole process group is killed.

    A child in uninterruptible sleep (a hung disk) cannot be killed: it is left behind and reported as timed out.
    A program that ends is awaited until its output is closed, at most until limit_s: a process that it has left behind
    may still be at its work, and is not killed. Raises OSError if it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *_EXEC,
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=clean_environment() if env is None else dict(env),
        start_new_session=True,
    )
    timed_out = left_open = False
    stdout, stderr = bytearray(), bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_output(process.stdout, stdout))
                tasks.create_task(_output(process.stderr, stderr))
                await _feed(process.stdin, stdin)
            await process.wait()
    except TimeoutError:
        timed_out = process.returncode is None
        left_open = not timed_out
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):  # reaped here also when cancelled: the loop may end right after
                async with asyncio.timeout(0.2):
                    await process.wait()
        # A program that has ended may have left a child with its pipes: they would be ours for as long as that lives.
        process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio has no public way
    code = process.returncode
    if code in _UNSTARTED and stderr.startswith(f"{_NAME}: ".encode()):
        raise OSError(_UNSTARTED[code], os.strerror(_UNSTARTED[code]), argv[0])
    return Ended(
        returncode=-signal.SIGKILL if code is None else code,
        stdout=bytes(stdout),
        stderr=bytes(stderr),
        timed_out=timed_out,
        left_open=left_open,
    )


async def _output(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    """Read to the end and keep the beginning: a program that never stops writing must not fill our memory."""
    while stream is not None and (more := await stream.read(65536)):
        kept += more[: MAX_OUTPUT_BYTES - len(kept)]


async def _feed(stream: asyncio.StreamWriter | None, content: bytes) -> None:
    """Write what the program is to read. One that does not read it, or has ended, is no failure."""
    if stream is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(content)
        await stream.drain()
    stream.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await stream.wait_closed()
