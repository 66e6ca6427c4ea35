"""The common answers and failures of every BMC engine, and the pause after a refused login.

The IPMI answers of a worker and of the root helper as values: both send the same, in hex.
"""

import asyncio
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self, TypeVar

from powerguard.clock import Clock, boottime_s
from powerguard.core.model.actions import Detail
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.ipmi import (
    ChassisStatus,
    Device,
    Failure,
    PowerRestorePolicy,
    RestartCause,
    Timer,
    decode_restart_cause,
    decode_support,
)
from powerguard.options import Secret, SecretError

_T = TypeVar("_T")

BACK_OFF_S: Final = 600.0
"""Pause after a refused login, so that powerguard never locks the account of the BMC. It doubles with each refusal."""
LONGEST_BACK_OFF_S: Final = 4 * 3600.0
"""The longest pause: a BMC may refuse a right password while it starts, or while another has locked the account."""


class BmcError(EffectorError):
    """The return of the host could not be verified. failure: the kind; None if no BMC was asked.

    detail: the policy that was read all the same, where one was.
    """

    def __init__(
        self, text: str, failure: Failure | None = None, *, harmless: bool = False, detail: Detail = ()
    ) -> None:
        super().__init__(text, harmless=harmless, detail=detail)
        self.failure = failure

    def having_read(self, policy: PowerRestorePolicy) -> Self:
        """Report also the policy that was read, which was not the wanted one."""
        if policy is not PowerRestorePolicy.UNKNOWN:
            self.detail = (("policy", policy.value),)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensured:
    """The BMC's policy before and after, both read from it. changed: a set was sent and accepted."""

    before: ChassisStatus
    after: ChassisStatus
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Facts about a BMC that matter before an outage.

    supported: policies that it can be set to; None when it does not say, or was not asked (policy: observe).
    restart_cause: which layer powered the host on last; None if not reported (IPMI 2.0 section 28.11 is optional).
    """

    status: ChassisStatus
    supported: frozenset[PowerRestorePolicy] | None
    restart_cause: RestartCause | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogStatus:
    """The BMC's watchdog timer, and what says whether it could bring this host back.

    device: None if the BMC does not identify itself; restart_cause: as in `Probe`. kernel_driver: ipmi_watchdog is
    loaded, which stops the timer at every power-off (Linux, ipmi_watchdog.c, wdog_reboot_handler).
    """

    timer: Timer
    device: Device | None
    restart_cause: RestartCause | None
    kernel_driver: bool


class Engine(Protocol):
    """One engine for the host's own BMC. by_s: CLOCK_BOOTTIME by which it has answered or raised BmcError."""

    kind: str

    @property
    def where(self) -> str:
        """The BMC's address, for messages."""
        ...

    async def ensure(self, wanted: PowerRestorePolicy, by_s: float) -> Ensured:
        """Read; set only if it differs; read back until it is so."""
        ...

    async def put_back(self, wanted: PowerRestorePolicy, by_s: float) -> Ensured:
        """Ensure, but only over always-on: any other policy was set by another program, and is left."""
        ...

    async def status(self, by_s: float) -> ChassisStatus:
        """Read only."""
        ...

    async def probe(self, by_s: float, *, ask_support: bool) -> Probe:
        """Read what is worth knowing. ask_support: also what may look like a set to a strict reader of logs."""
        ...

    async def power_watts(self, by_s: float) -> float | None:
        """The host's power draw now, as the BMC measures it (DCMI); None if unknown."""
        ...


class ProcessEngine(ABC):
    """An engine that asks a process of its own, the worker or the root helper, by the same words."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The BMC's address, for messages."""

    @abstractmethod
    async def _ask(self, word: str, by_s: float, read: Callable[[Mapping[str, Any]], _T], **more: str) -> _T:
        """Say a word and read the answer. Raises BmcError."""

    @abstractmethod
    def _error(self, failure: Failure, seen: str) -> BmcError:
        """Return what was seen, with what is to be done about it."""

    async def ensure(self, wanted: PowerRestorePolicy, by_s: float) -> Ensured:
        result = await self._ask("ensure", by_s, ensured)
        if result.after.policy is not wanted:
            error = self._error(Failure.MISMATCH, f"reads {result.after.policy}, but {wanted} was set")
            raise error.having_read(result.after.policy)
        return result

    async def put_back(self, wanted: PowerRestorePolicy, by_s: float) -> Ensured:
        return await self._ask("restore", by_s, ensured, policy=wanted.value)

    async def status(self, by_s: float) -> ChassisStatus:
        return await self._ask("status", by_s, status)

    async def probe(self, by_s: float, *, ask_support: bool) -> Probe:
        return await self._ask("probe" if ask_support else "look", by_s, probe)

    async def power_watts(self, by_s: float) -> float | None:
        return await self._ask("power", by_s, watts)


@dataclass(slots=True)
class Refusal:
    """A login that a BMC has refused. digest: of user and password. at_s: when; times: how often in a row."""

    digest: bytes
    at_s: float
    times: int = 1

    @property
    def rest_s(self) -> float:
        """Seconds until it is tried again."""
        return min(BACK_OFF_S * 2.0 ** min(self.times - 1, 10), LONGEST_BACK_OFF_S)


Refusals = dict[str, Refusal]
"""The last refusal of each BMC, by its address: it outlives a reload of the settings, which makes new engines."""


def hasten(refusals: Refusals, where: str = "") -> None:
    """Let the pause be the first one again, of one BMC or of all: the host's return depends on it now.

    A right password is refused while the directory of its users is away, and that ends sooner than in four hours.
    """
    for address, refusal in refusals.items():
        if where in ("", address):
            refusal.times = 1


class Login:
    """User and password, read again for each operation, and the pause after they were refused.

    where: the BMC's address. clock: seconds of CLOCK_BOOTTIME for the rest. refusals: of the engines before these;
    None: none. max_bytes: of the password, None where the protocol has no limit.
    """

    def __init__(
        self,
        user: str,
        password: Secret,
        *,
        where: str,
        clock: Clock,
        refusals: Refusals | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.user = user
        self._password = password
        self._where = where
        self._clock = clock
        self._refusals = {} if refusals is None else refusals
        self._max_bytes = max_bytes
        self._accepted: bytes | None = None
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def attempt(self, by_s: float, error: Callable[[Failure, str], BmcError]) -> AsyncIterator[bytes]:
        """Yield the password for one login. Raises BmcError, of which `error` makes one with address and remedy.

        Until the BMC has accepted this password, one login at a time: several at once could lock the account.
        """
        password = await self.password(by_s)
        async with AsyncExitStack() as held:
            if self._accepted != self._digest(password):
                try:
                    async with asyncio.timeout(max(by_s - boottime_s(), 0.0)):
                        await held.enter_async_context(self._turn)
                except TimeoutError:
                    raise error(Failure.UNREACHABLE, "not asked, because an earlier login has no answer yet") from None
            if self._accepted == self._digest(password):
                await held.aclose()  # others need not wait
            self._check_back_off(password, error)
            yield password

    async def password(self, by_s: float) -> bytes:
        """Read the secret in a thread: it may lie on a disk that hangs. Raises BmcError."""
        limit_s = max(by_s - boottime_s(), 0.0)
        try:
            async with asyncio.timeout(limit_s):
                password = await asyncio.to_thread(self._password.read)
        except SecretError as error:
            msg = f"bmc.password: {error}"
            raise BmcError(msg) from None
        except TimeoutError:
            msg = f"bmc.password: not read within {limit_s:.1f} s: its disk hangs (keep it in a systemd credential)"
            raise BmcError(msg) from None
        if self._max_bytes is not None and len(password) > self._max_bytes:
            msg = f"bmc.password: {len(password)} bytes, and IPMI 2.0 allows at most {self._max_bytes} (section 22.30)"
            raise BmcError(msg)
        return password

    def _check_back_off(self, password: bytes, error: Callable[[Failure, str], BmcError]) -> None:
        """Raise BmcError if these were refused a short while ago; changed ones are tried at once."""
        refusal = self._refusals.get(self._where)
        if refusal is None or refusal.digest != self._digest(password):
            return
        left_s = refusal.at_s + refusal.rest_s - self._clock()
        if left_s > 0:
            text = (
                f"login was refused {refusal.rest_s - left_s:.0f} s ago, and BMCs lock accounts: next try in "
                f"{math.ceil(left_s)} s, or at once with a new password"
            )
            raise error(Failure.AUTH, text)

    def accept(self, password: bytes) -> None:
        """Remember, by a digest, what was accepted."""
        self._accepted = self._digest(password)
        self._refusals.pop(self._where, None)

    def refuse(self, password: bytes) -> str:
        """Remember, by a digest, what was refused; return when it is tried again, for messages."""
        digest, before, self._accepted = self._digest(password), self._refusals.get(self._where), None
        times = before.times + 1 if before is not None and before.digest == digest else 1
        refusal = self._refusals[self._where] = Refusal(digest, self._clock(), times)
        return f"the next try is in {refusal.rest_s / 60:g} minutes"

    def _digest(self, password: bytes) -> bytes:
        return hashlib.sha256(self.user.encode() + b"\0" + password).digest()


def status(answer: Mapping[str, Any], key: str = "status") -> ChassisStatus:
    """Chassis status of an answer. Raises ReplyError where there is none."""
    return ChassisStatus.decode(_data(answer.get(key)) or b"")


def ensured(answer: Mapping[str, Any]) -> Ensured:
    """The policy that was set and read back. Raises ReplyError."""
    return Ensured(
        before=status(answer, "before"), after=status(answer, "after"), changed=answer.get("changed") is True
    )


def probe(answer: Mapping[str, Any]) -> Probe:
    """Facts about the BMC. Raises ReplyError if there is no status."""
    support, cause = _data(answer.get("support")), _data(answer.get("cause"))
    return Probe(
        status=status(answer),
        supported=None if support is None else decode_support(support),
        restart_cause=None if cause is None else decode_restart_cause(cause),
    )


def watts(answer: Mapping[str, Any]) -> float | None:
    """Watts of an answer, as the worker or the helper has decoded them; None where it has none."""
    power_watts = answer.get("power_watts")
    return float(power_watts) if isinstance(power_watts, int | float) and power_watts > 0 else None


def timer(answer: Mapping[str, Any]) -> Timer:
    """The watchdog timer of an answer. Raises ReplyError where there is none."""
    return Timer.decode(_data(answer.get("timer")) or b"")


def watch(answer: Mapping[str, Any]) -> WatchdogStatus:
    """The watchdog timer and related facts. Raises ReplyError if there is no timer."""
    device, cause = _data(answer.get("device")), _data(answer.get("cause"))
    return WatchdogStatus(
        timer=timer(answer),
        device=None if device is None else Device.decode(device),
        restart_cause=None if cause is None else decode_restart_cause(cause),
        kernel_driver=answer.get("kernel_driver") is True,
    )


def _data(value: object) -> bytes | None:
    """Bytes of an answer's hex field; None when it is absent or not hex."""
    try:
        return bytes.fromhex(value) if isinstance(value, str) else None
    except ValueError:
        return None
