"""The engine `in-band`: /dev/ipmi0 through the root helper powerguard-ipmi. No password, no network, no switch."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from powerguard.clock import boottime_s
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc import engine
from powerguard.effectors.bmc.engine import BmcError, Ensured, ProcessEngine, WatchdogStatus
from powerguard.effectors.bmc.ipmi import Failure, PowerRestorePolicy, ReplyError, Timer
from powerguard.effectors.options import IPMI_SOCKET
from powerguard.effectors.root_client import RootHelper

ANSWER_MARGIN_S: Final = 0.2
"""Time before our timeout at which the helper ends, and reports what it waited for."""

_LEAST_S: Final = 0.05
_T = TypeVar("_T")

_REMEDIES: Final = {
    Failure.UNSUPPORTED: "this board has no such setting over IPMI: set 'restore on AC power loss' to always on in its "
    "firmware setup, and check that `powerguard doctor` can read it",
    Failure.TIMEOUT: "the BMC hangs: reset it (its page, or the rack's power) if this continues",
    Failure.MISMATCH: "the BMC did not store it: set it in the firmware setup, and update the firmware",
    Failure.BUSY: "it is asked again at the next check",
    Failure.PROTOCOL: "compare with `ipmitool chassis status` on this host",
}


class InbandEngine(ProcessEngine):
    """The host's own BMC, asked by a process of root's that takes a few words (`helper.WORDS`)."""

    kind = "in-band"
    where = "BMC in-band"

    def __init__(self, socket: str = IPMI_SOCKET) -> None:
        self._helper = RootHelper(
            name="powerguard-ipmi", socket=socket, real=IPMI_SOCKET, hangs="the BMC's driver hangs"
        )

    async def ensure(self, wanted: PowerRestorePolicy, by_s: float) -> Ensured:
        if wanted is not PowerRestorePolicy.ALWAYS_ON:
            msg = f"powerguard-ipmi sets always-on only, not {wanted}"
            raise BmcError(msg, Failure.SETTINGS)
        return await super().ensure(wanted, by_s)

    async def watchdog(self, by_s: float) -> WatchdogStatus:
        """Read the watchdog timer."""
        return await self._ask("watchdog", by_s, engine.watch)

    async def arm(self, in_s: int, by_s: float) -> Timer:
        """Let the BMC cycle the power in in_s seconds, and return what was read back."""
        return await self._ask("arm", by_s, engine.timer, in_s=in_s)

    async def disarm(self, by_s: float) -> tuple[Timer, bool]:
        """Disarm it; return what was read, and whether it was armed."""
        return await self._ask("disarm", by_s, lambda answer: (engine.timer(answer), answer.get("changed") is True))

    async def _ask(self, word: str, by_s: float, read: Callable[[Mapping[str, Any]], _T], **more: object) -> _T:
        limit_s = max(by_s - boottime_s(), _LEAST_S)
        # The helper refuses longer limits; a short time remains for its answer to arrive.
        within_s = min(max(limit_s - ANSWER_MARGIN_S, limit_s / 2), 5.0)
        try:
            answer = await self._helper.ask({"word": word, "within_s": round(within_s, 3), **more}, limit_s=limit_s)
        except EffectorError as error:
            raise BmcError(str(error), Failure.UNREACHABLE) from None
        if answer.get("failure") is not None:
            try:
                failure = Failure(str(answer["failure"]))
            except ValueError:
                failure = Failure.PROTOCOL
            raise self._error(failure, str(answer.get("text", ""))[:1000])
        try:
            return read(answer)
        except ReplyError as error:
            raise self._error(Failure.PROTOCOL, str(error)) from None

    def _error(self, failure: Failure, seen: str) -> BmcError:
        remedy = _REMEDIES.get(failure)
        return BmcError(f"{self.where}: {seen}" + (f"; {remedy}" if remedy else ""), failure)
