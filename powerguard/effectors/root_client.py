"""The daemon's client of a root helper: one word, one answer, and a limited wait."""

import asyncio
import errno
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from powerguard.effectors.base import EffectorError

MAX_ANSWER_BYTES: Final = 65536
HOLD_EVERY_S: Final = 30.0
"""Interval of lease renewals; without one, a helper undoes its change after 180 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootHelper:
    """A helper as the daemon reaches it.

    name: such as powerguard-signal. real: the socket of this machine's own. hangs: the likely cause if there is no
    answer.
    """

    name: str
    socket: str
    real: str
    hangs: str = "it hangs"

    @property
    def not_listening(self) -> str:
        """The error when the socket does not listen, with the fix."""
        return f"{self.name}.socket is not listening: systemctl enable --now {self.name}.socket"

    async def ask(self, word: dict[str, object], *, limit_s: float) -> dict[str, Any]:
        """Send one word and return the answer. Raises EffectorError, also if the helper refuses."""
        path = self.socket
        self._refuse_under_test()
        try:
            async with asyncio.timeout(limit_s):
                answer = await _exchange(path, json.dumps(word, allow_nan=False).encode() + b"\n")
        except TimeoutError:
            msg = f"{path}: no answer within {limit_s:g} s: {self.hangs} (systemctl status '{self.name}@*'; dmesg)"
            raise EffectorError(msg) from None
        except OSError as error:
            raise EffectorError(self._cannot(error)) from error
        except (ValueError, RecursionError):  # the line is too long, or is not JSON, or NaN was to be sent
            answer = None
        if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
            msg = f"{path}: the answer is not from {self.name}, or it failed (journalctl -t {self.name})"
            raise EffectorError(msg)
        if not answer["ok"]:
            msg = f"{self.name}: {str(answer.get('error', ''))[:1000]}"
            raise EffectorError(msg)
        return answer

    async def hold(
        self,
        wanted: Callable[[], bool],
        rest: Callable[[float], Any],
        failed: Callable[[str], None],
        *,
        limit_s: float,
    ) -> None:
        """Renew the lease of its change, for as long as the change is wanted; never returns.

        wanted: what the core remembers; a daemon that is gone, or has forgotten, is silent, and the helper undoes it.
        failed: called with the reason of a failed renewal, once for each reason.
        """
        reported = ""
        while True:
            because = ""
            if wanted():
                try:
                    await self.ask({"word": "hold"}, limit_s=limit_s)
                except EffectorError as error:
                    because = str(error)
                    if because != reported:
                        failed(because)
            reported = because
            await rest(HOLD_EVERY_S)

    def is_there(self) -> bool:
        """Return whether its socket exists: without one, it never made a change."""
        return Path(self.socket).exists()

    def _refuse_under_test(self) -> None:
        if os.environ.get("POWERGUARD_UNDER_TEST") and os.path.realpath(self.socket) == os.path.realpath(self.real):
            msg = f"{self.name}: refused under test: {self.socket} is this machine's own; name a test's own socket"
            raise EffectorError(msg)

    def _cannot(self, error: OSError) -> str:
        path = self.socket
        if error.errno in {errno.ENOENT, errno.ECONNREFUSED}:
            return f"{path}: {self.not_listening}"
        if error.errno in {errno.EACCES, errno.EPERM}:
            return f"{path}: user {os.geteuid()} may not connect here: only powerguard and root may"
        return f"{path}: {error.strerror or error}; {self.not_listening}"


async def _exchange(path: str, line: bytes) -> object:
    reader, writer = await asyncio.open_unix_connection(path, limit=MAX_ANSWER_BYTES)
    try:
        writer.write(line)
        await writer.drain()
        return json.loads(await reader.readline())
    finally:
        writer.close()


def objects_in(answer: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the objects in a list of an answer, whatever else is there."""
    value = answer.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
