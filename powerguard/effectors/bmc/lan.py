"""The engine `ipmi-lan`: IPMI over LAN, each operation in a process of its own that cannot outlive its limit."""

import base64
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from powerguard.clock import Clock, boottime_s
from powerguard.effectors.bmc.engine import BmcError, Login, ProcessEngine, Refusals
from powerguard.effectors.bmc.ipmi import Failure, ReplyError
from powerguard.effectors.child import Spawn
from powerguard.effectors.options import BmcOptions
from powerguard.ups.base import Resolver

WORKER: Final = (sys.executable, "-P", "-m", "powerguard.effectors.bmc.worker")
"""-P: files in the working folder are not imported."""

KILL_MARGIN_S: Final = 0.3
"""The worker ends itself this much before its limit and says what it waited for; else it is killed."""

LOOK_UP_S: Final = 0.5
"""Timeout for the BMC's name; then the known address serves."""

IPMI_PASSWORD_BYTES: Final = 20
_T = TypeVar("_T")

_REMEDIES: Final = {
    Failure.UNREACHABLE: "check that the BMC is powered and reachable from here, its address and port, and that IPMI "
    "over LAN is enabled; some BMCs also stay silent to a user that they do not know",
    Failure.AUTH: "check bmc.user and bmc.password, and that the account may log in over LAN",
    Failure.PRIVILEGE: "the account needs privilege level Operator on the LAN channel (not Administrator)",
    Failure.UNSUPPORTED: "this board has no such setting over IPMI: set 'restore on AC power loss' to always on in its "
    "firmware setup or web page, read it back there, and check that `powerguard doctor` can read it",
    Failure.BUSY: "the BMC is busy (starting, or updating its firmware): it is asked again at the next check",
    Failure.TIMEOUT: "the BMC hangs or its network failed: reset the BMC if this continues",
    Failure.MISMATCH: "the BMC did not store it: set it in the firmware setup, and update the firmware",
    Failure.PROTOCOL: "the BMC or the IPMI library misbehaves: compare with `ipmitool -I lanplus chassis status`",
    Failure.HELD: "find the other program that uses it",
    Failure.SETTINGS: "correct the settings of bmc",
}


class LanEngine(ProcessEngine):
    """IPMI over LAN (RMCP+) through a library that never is in this process."""

    kind = "ipmi-lan"

    def __init__(self, options: BmcOptions, *, spawn: Spawn, clock: Clock, refusals: Refusals | None = None) -> None:
        """options: with host, user and password. clock, refusals: as of `Login`."""
        if options.host is None or options.user is None or options.password is None:
            msg = "IPMI over LAN needs host, user and password"
            raise ValueError(msg)
        self._host = options.host
        self._port = options.port
        self._resolver = Resolver(options.host, OSError)
        self._login = Login(
            options.user,
            options.password,
            where=self.where,
            clock=clock,
            refusals=refusals,
            max_bytes=IPMI_PASSWORD_BYTES,
        )
        self._spawn = spawn

    async def account_level(self, by_s: float) -> int | None:
        """Privilege limit of powerguard's account (`ipmi.ADMINISTRATOR`, ...); None if not reported."""
        level = (await self._operate("account", by_s)).get("level")
        return level if isinstance(level, int) else None

    @property
    def where(self) -> str:
        """The BMC's address, for messages."""
        return f"BMC {self._host} port {self._port}"

    def _error(self, failure: Failure, seen: str) -> BmcError:
        return BmcError(f"{self.where}: {seen}; {_REMEDIES[failure]}", failure)

    async def _ask(self, word: str, by_s: float, read: Callable[[Mapping[str, Any]], _T], **more: str) -> _T:
        try:
            return read(await self._operate(word, by_s, **more))
        except ReplyError as error:
            raise self._error(Failure.PROTOCOL, str(error)) from None

    async def _operate(self, operation: str, by_s: float, **more: str) -> dict[str, Any]:
        """Run one operation in a worker; returns its answer. Raises BmcError with the whole story in one line."""
        async with self._login.attempt(by_s, self._error) as password:
            answer = await self._run(operation, password, by_s, more)
            if answer["ok"] is True:
                self._login.accept(password)
                return answer
            failure, text = answer["failure"], answer["text"]
            if failure is Failure.AUTH:
                text = f"login refused ({text}); {self._login.refuse(password)}"
            raise self._error(failure, text)

    async def _run(self, operation: str, password: bytes, by_s: float, more: Mapping[str, str]) -> dict[str, Any]:
        """Return a worker's answer, also that the operation has failed. Raises BmcError if there is none."""
        address = await self._address(by_s)
        limit_s = max(by_s - boottime_s(), 0.0)
        request = {
            "operation": operation,
            "host": address,
            "port": self._port,
            "user": base64.b64encode(self._login.user.encode()).decode(),
            "password": base64.b64encode(password).decode(),
            "by_s": by_s - KILL_MARGIN_S,
            **more,
        }
        try:
            ended = await self._spawn(WORKER, limit_s=limit_s, stdin=json.dumps(request).encode())
        except OSError as error:
            msg = f"{self.where}: the IPMI worker cannot be started ({error.strerror})"
            raise BmcError(msg, Failure.PROTOCOL) from None
        if ended.timed_out:
            raise self._error(Failure.TIMEOUT, f"the IPMI worker was killed at its limit of {limit_s:.1f} s")
        try:
            answer = dict(json.loads(ended.stdout))
            if answer["ok"] is True:
                return answer
            return {"ok": False, "failure": Failure(answer["failure"]), "text": str(answer["text"])}
        except (ValueError, KeyError, TypeError):
            # stderr is not quoted: a library's last output might hold a secret.
            seen = f"the IPMI worker ended with status {ended.returncode} and no answer"
            raise self._error(Failure.PROTOCOL, seen) from None

    async def _address(self, by_s: float) -> str:
        """Return the BMC's address; its name if none is known, which the worker looks up and reports."""
        try:
            return (await self._resolver.addresses(min(LOOK_UP_S, max(by_s - boottime_s(), 0.0))))[0]
        except OSError:
            return self._host
