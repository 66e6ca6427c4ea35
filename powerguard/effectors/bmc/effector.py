"""Makes sure that the BMC powers the host on when AC returns, and proves it by reading back."""

import asyncio
import base64
import hashlib
import json
import math
import sys
from dataclasses import dataclass
from typing import Any, Final

from powerguard.clock import Clock, boottime_s
from powerguard.core.events import Action, Detail, EnsurePolicy
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.ipmi import (
    ChassisStatus,
    Failure,
    PowerRestorePolicy,
    ReplyError,
    RestartCause,
    decode_restart_cause,
    decode_support,
)
from powerguard.effectors.bmc.options import BmcOptions
from powerguard.effectors.child import Spawn, run_child
from powerguard.options import SecretError

WORKER: Final = (sys.executable, "-P", "-m", "powerguard.effectors.bmc.worker")
"""-P: whatever lies in the working folder is not imported."""

BACK_OFF_S: Final = 600.0
"""After a refused login, so that we never are what locks the account of the BMC."""

KILL_MARGIN_S: Final = 0.3
"""The worker ends itself this much before its limit and says what it waited for; else it is killed."""

_REMEDIES: Final = {
    Failure.UNREACHABLE: "check that the BMC is powered and reachable from here, its address and port, and that IPMI "
    "over LAN is enabled; some BMCs also stay silent to a user that they do not know",
    Failure.AUTH: "check bmc.user and bmc.password, and that the account may log in over LAN",
    Failure.PRIVILEGE: "the account needs privilege level Operator on the LAN channel (not Administrator)",
    Failure.UNSUPPORTED: "this board cannot be told over IPMI: set 'restore on AC power loss' to always on in its "
    "firmware setup or web page, read it back there, and see whether `powerguard doctor` can read it",
    Failure.BUSY: "the BMC is busy (starting, or updating its firmware): it is asked again at the next check",
    Failure.TIMEOUT: "the BMC hangs or its network went away: reset the BMC if this goes on",
    Failure.MISMATCH: "the BMC did not store it: set it in the firmware setup, and look for a firmware update",
    Failure.PROTOCOL: "the BMC or the IPMI library misbehaves: compare with `ipmitool -I lanplus chassis status`",
}


class BmcError(EffectorError):
    """The return of the host could not be verified. failure: which way; None where no BMC was asked."""

    def __init__(self, text: str, failure: Failure | None = None) -> None:
        super().__init__(text)
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What is worth knowing of a BMC before an outage.

    supported: policies that it can be set to; None when it does not say, or was not asked (policy: observe).
    restart_cause: which layer powered the host on last; None when it does not say (IPMI 2.0 section 28.11 is optional).
    """

    status: ChassisStatus
    supported: frozenset[PowerRestorePolicy] | None
    restart_cause: RestartCause | None


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A refused login. login: digest of what was refused, so that another password is tried at once."""

    at_s: float
    login: bytes


class BmcEffector:
    """Carries out `EnsurePolicy`. Every operation runs in a process of its own that cannot outlive its limit.

    limit_s: of one operation; a caller that cancels earlier kills the process, too.
    clock: seconds of CLOCK_BOOTTIME; times the operations and the back-off.
    """

    def __init__(
        self, options: BmcOptions, *, spawn: Spawn = run_child, clock: Clock = boottime_s, limit_s: float = 5.0
    ) -> None:
        self._options = options
        self._spawn = spawn
        self._clock = clock
        self._limit_s = limit_s
        self._refused: _Refusal | None = None

    async def carry_out(self, action: Action) -> Detail:
        """Ensure (policy: ensure) or only verify (policy: observe) always-on.

        Returns policy, verified, before, changed, power_on, ac_failed (None: not told), engine and latency_s. Raises
        BmcError unless always-on was read from the BMC.
        """
        if not isinstance(action, EnsurePolicy):
            msg = f"the bmc effector carries out EnsurePolicy, not {type(action).__name__}"
            raise TypeError(msg)
        began_s = self._clock()
        if self._options.policy == "observe":
            status = before = await self.status(self._limit_s)
            if status.policy is not PowerRestorePolicy.ALWAYS_ON:
                msg = (
                    f"{self._where}: power restore policy is {status.policy}, so this host stays off when power "
                    "returns; set it to always-on, or let us do it (bmc.policy: ensure; it is observe)"
                )
                raise BmcError(msg)
            changed = False
        else:
            told = await self._operate("ensure", self._limit_s)
            before, status = self._status(told, "before"), self._status(told, "after")
            changed = told.get("changed") is True
            if status.policy is not PowerRestorePolicy.ALWAYS_ON:
                raise self._error(Failure.MISMATCH, f"reads {status.policy} where always-on was asked for")
        return (
            ("policy", status.policy.value),
            ("verified", True),
            ("before", before.policy.value),
            ("changed", changed),
            ("power_on", status.power_on),
            ("ac_failed", status.ac_failed),
            ("engine", self._options.kind),
            ("latency_s", round(self._clock() - began_s, 3)),
        )

    async def status(self, limit_s: float) -> ChassisStatus:
        """Read the chassis status within limit_s; changes nothing. Raises BmcError."""
        return self._status(await self._operate("status", limit_s), "status")

    async def probe(self, limit_s: float) -> Probe:
        """Read status, support and restart cause within limit_s; changes nothing. Raises BmcError.

        With policy: observe the support is not asked for: the question is a form of the set command.
        """
        told = await self._operate("look" if self._options.policy == "observe" else "probe", limit_s)
        support, cause = _data(told.get("support")), _data(told.get("cause"))
        return Probe(
            status=self._status(told, "status"),
            supported=None if support is None else decode_support(support),
            restart_cause=None if cause is None else decode_restart_cause(cause),
        )

    @property
    def _where(self) -> str:
        return f"BMC {self._options.host} port {self._options.port}"

    def _error(self, failure: Failure, seen: str) -> BmcError:
        return BmcError(f"{self._where}: {seen}; {_REMEDIES[failure]}", failure)

    def _status(self, told: dict[str, Any], key: str) -> ChassisStatus:
        try:
            return ChassisStatus.decode(_data(told.get(key)) or b"")
        except ReplyError as error:
            raise self._error(Failure.PROTOCOL, str(error)) from None

    async def _operate(self, operation: str, limit_s: float) -> dict[str, Any]:
        """Run one operation in a worker; returns its answer. Raises BmcError with the whole story in one line."""
        options = self._options
        if options.kind == "none" or options.host is None or options.user is None or options.password is None:
            msg = (
                "bmc.kind is none: nobody makes sure that this host powers on when power returns; "
                "give it its BMC (bmc: {kind: ipmi-lan, host: ..., user: ..., password: ...})"
            )
            raise BmcError(msg)
        deadline_s = boottime_s() + limit_s  # the worker's own clock, also where ours is a simulated one
        password = await self._password(limit_s)
        user = options.user.encode()
        login = hashlib.sha256(user + b"\0" + password).digest()
        self._check_back_off(login)
        request = {
            "operation": operation,
            "host": options.host,
            "port": options.port,
            "user": base64.b64encode(user).decode(),
            "password": base64.b64encode(password).decode(),
            "by_s": deadline_s - KILL_MARGIN_S,
        }
        try:
            ended = await self._spawn(
                WORKER, limit_s=max(deadline_s - boottime_s(), 0.0), stdin=json.dumps(request).encode()
            )
        except OSError as error:
            msg = f"{self._where}: the IPMI worker cannot be started ({error.strerror})"
            raise BmcError(msg, Failure.PROTOCOL) from None
        if ended.timed_out:
            raise self._error(Failure.TIMEOUT, f"the IPMI worker was killed at its limit of {limit_s:g} s")
        try:
            told = json.loads(ended.stdout)
            if told["ok"] is True:
                return dict(told)
            failure, text = Failure(told["failure"]), str(told["text"])
        except (ValueError, KeyError, TypeError):
            # stderr is not quoted: nobody can promise that a library's last words hold no secret.
            seen = f"the IPMI worker ended with status {ended.returncode} and no answer"
            raise self._error(Failure.PROTOCOL, seen) from None
        if failure is Failure.AUTH:
            self._refused = _Refusal(self._clock(), login)
            text = f"login refused ({text}), not tried again for {BACK_OFF_S / 60:g} minutes"
        raise self._error(failure, text)

    async def _password(self, limit_s: float) -> bytes:
        """Read the secret in a thread: it may lie on a disk that hangs."""
        secret = self._options.password
        if secret is None:
            msg = "bmc.password is missing"
            raise BmcError(msg)
        try:
            async with asyncio.timeout(limit_s):
                password = await asyncio.to_thread(secret.read)
        except SecretError as error:
            msg = f"bmc.password: {error}"
            raise BmcError(msg) from None
        except TimeoutError:
            msg = f"bmc.password: not read within {limit_s:g} s: its disk hangs (a systemd credential lies in memory)"
            raise BmcError(msg) from None
        if len(password) > 20:
            msg = f"bmc.password: {len(password)} bytes, and IPMI 2.0 allows at most 20 (section 22.30)"
            raise BmcError(msg)
        return password

    def _check_back_off(self, login: bytes) -> None:
        if self._refused is None or self._refused.login != login:
            return
        left_s = self._refused.at_s + BACK_OFF_S - self._clock()
        if left_s > 0:
            msg = (
                f"{self._where}: login was refused {BACK_OFF_S - left_s:.0f} s ago, and BMCs lock accounts: not tried "
                f"for another {math.ceil(left_s)} s, but a new password at once; {_REMEDIES[Failure.AUTH]}"
            )
            raise BmcError(msg, Failure.AUTH)


def _data(told: object) -> bytes | None:
    """Bytes of an answer's hex field; None when it is absent or no hex."""
    try:
        return bytes.fromhex(told) if isinstance(told, str) else None
    except ValueError:
        return None
