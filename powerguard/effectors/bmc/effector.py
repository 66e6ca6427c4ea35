"""Makes sure that the BMC powers the host on when AC returns, and proves it by reading back."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from powerguard.clock import Clock, boottime_s
from powerguard.core.events import Action, Detail, EnsurePolicy
from powerguard.effectors.bmc.engine import BACK_OFF_S, BmcError, Engine, Ensured, Probe
from powerguard.effectors.bmc.inband import InbandEngine
from powerguard.effectors.bmc.ipmi import ChassisStatus, Failure, PowerRestorePolicy
from powerguard.effectors.bmc.lan import WORKER, LanEngine
from powerguard.effectors.bmc.options import BmcOptions
from powerguard.effectors.child import Spawn, run_child

__all__ = ["BACK_OFF_S", "WORKER", "BmcEffector", "BmcError", "Failure", "Probe"]

_T = TypeVar("_T")
_NONE: Final = (
    "bmc.kind is none: nobody makes sure that this host powers on when power returns; "
    "give it its BMC (bmc: {kind: auto}, or {kind: ipmi-lan, host: ..., user: ..., password: ...})"
)
_ANSWER_MARGIN_S: Final = 0.1
"""We end this much before the action's own deadline, so that what was seen is told and not only that time is up."""


class BmcEffector:
    """Carries out `EnsurePolicy` through the engine that the settings name; kind auto: the first that verifies it.

    limit_s: of one operation, all engines together; a caller that cancels earlier ends it, with every process of it.
    clock: seconds of CLOCK_BOOTTIME; times the operations and the rest after a refused login.
    """

    def __init__(
        self, options: BmcOptions, *, spawn: Spawn = run_child, clock: Clock = boottime_s, limit_s: float = 5.0
    ) -> None:
        self._options = options
        self._engines = _engines(options, spawn, clock)
        self._clock = clock
        self._limit_s = limit_s

    async def carry_out(self, action: Action) -> Detail:
        """Ensure (policy: ensure), ensure for an outage (bracket) or only verify (observe) always-on.

        Returns policy, verified, before, changed, power_on, ac_failed (None: not told), engine and latency_s; earlier:
        why engines before it failed, where any did; restore: the policy to put back after the outage, where policy is
        bracket and it was another. Raises BmcError unless always-on was read from the BMC; with bracket and no outage:
        unless it could be set.
        """
        if not isinstance(action, EnsurePolicy):
            msg = f"the bmc effector carries out EnsurePolicy, not {type(action).__name__}"
            raise TypeError(msg)
        began_s = self._clock()
        limit_s = min(self._limit_s, action.by_s - began_s - _ANSWER_MARGIN_S)
        bracket = self._options.policy == "bracket"
        ask = _able if bracket and not action.outage else _look if self._options.policy == "observe" else _ensure
        engine, told, earlier = await self._first(ask, limit_s)
        status = told.after
        if self._options.policy == "observe" and status.policy is not PowerRestorePolicy.ALWAYS_ON:
            msg = (
                f"{engine.where}: power restore policy is {status.policy}, so this host stays off when power returns; "
                "set it to always-on, or let us do it (bmc.policy: ensure; it is observe)"
            )
            raise BmcError(msg)
        more: tuple[tuple[str, str], ...] = (("earlier", "; ".join(earlier)),) if earlier else ()
        if bracket and told.changed and told.before.policy is not PowerRestorePolicy.UNKNOWN:
            more += (("restore", told.before.policy.value),)
        return (
            ("policy", status.policy.value),
            ("verified", True),
            ("before", told.before.policy.value),
            ("changed", told.changed),
            ("power_on", status.power_on),
            ("ac_failed", status.ac_failed),
            ("engine", engine.kind),
            ("latency_s", round(self._clock() - began_s, 3)),
            *more,
        )

    async def status(self, limit_s: float) -> ChassisStatus:
        """Read the chassis status within limit_s; changes nothing. Raises BmcError."""
        return (await self._first(lambda engine, by_s: engine.status(by_s), limit_s))[1]

    async def probe(self, limit_s: float) -> Probe:
        """Read status, support and restart cause within limit_s; changes nothing. Raises BmcError.

        With policy: observe the support is not asked for: the question is a form of the set command.
        """
        ask_support = self._options.policy != "observe"
        return (await self._first(lambda engine, by_s: engine.probe(by_s, ask_support=ask_support), limit_s))[1]

    async def why_on(self, limit_s: float) -> Probe:
        """Read what powered this host on and whether AC had failed before, for the story of an outage. Raises BmcError.

        Who tells neither (Redfish) is passed over, so it may be another way than the one that verifies the policy.
        """
        return (await self._first(_why_on, limit_s))[1]

    async def _first(
        self, ask: Callable[[Engine, float], Awaitable[_T]], limit_s: float
    ) -> tuple[Engine, _T, tuple[str, ...]]:
        """Ask one engine after the other; the first that does not fail counts. Returns also why earlier ones failed.

        Each gets an equal share of the time that is left, so a dead one takes no later one's.
        """
        if not self._engines:
            raise BmcError(_NONE)
        by_s = boottime_s() + limit_s  # the engines' own clock, also where ours is a simulated one
        failed: list[BmcError] = []
        for number, engine in enumerate(self._engines):
            now_s = boottime_s()
            if now_s >= by_s:
                failed.append(BmcError(f"{engine.where}: not asked, as no time was left", Failure.TIMEOUT))
                continue
            try:
                told = await ask(engine, now_s + (by_s - now_s) / (len(self._engines) - number))
            except BmcError as error:
                failed.append(error)
            else:
                return engine, told, self._told(failed)
        if len(failed) == 1:
            raise failed[0]
        msg = f"no way to the BMC has verified it: {'; '.join(self._told(failed))}"
        raise BmcError(msg, failed[-1].failure)

    def _told(self, failed: list[BmcError]) -> tuple[str, ...]:
        return tuple(f"{engine.kind}: {error}" for engine, error in zip(self._engines, failed, strict=False))


async def _ensure(engine: Engine, by_s: float) -> Ensured:
    return await engine.ensure(PowerRestorePolicy.ALWAYS_ON, by_s)


async def _look(engine: Engine, by_s: float) -> Ensured:
    """Read, and set nothing. Raises BmcError where the BMC tells no policy; another engine may."""
    status = await engine.status(by_s)
    if status.policy is PowerRestorePolicy.UNKNOWN:
        msg = f"{engine.where}: tells no power restore policy, so nobody knows whether this host would power on"
        raise BmcError(msg, Failure.UNSUPPORTED)
    return Ensured(before=status, after=status, changed=False)


async def _able(engine: Engine, by_s: float) -> Ensured:
    """Could always-on be set when an outage comes? Raises BmcError where the BMC does not say that it could."""
    seen = await engine.probe(by_s, ask_support=True)
    wanted, policy = PowerRestorePolicy.ALWAYS_ON, seen.status.policy
    if policy is not wanted and wanted not in (seen.supported or ()):
        msg = (
            f"{engine.where}: power restore policy is {policy}, and it does not say that it could be set to always-on, "
            "so bmc.policy: bracket promises nothing: set always-on in the firmware setup, with bmc.policy: observe"
        )
        raise BmcError(msg, Failure.UNSUPPORTED)
    return Ensured(before=seen.status, after=seen.status, changed=False)


async def _why_on(engine: Engine, by_s: float) -> Probe:
    """Raises BmcError where the BMC tells neither the cause of the restart nor of its last power-off."""
    seen = await engine.probe(by_s, ask_support=False)
    if seen.restart_cause is None and seen.status.ac_failed is None:
        msg = f"{engine.where}: does not tell what powered this host on"
        raise BmcError(msg, Failure.UNSUPPORTED)
    return seen


def _engines(options: BmcOptions, spawn: Spawn, clock: Clock) -> tuple[Engine, ...]:
    """Make the engines that the settings name, in the order in which they are asked."""
    made: list[Engine] = []
    if options.kind in {"in-band", "auto"}:
        made.append(InbandEngine(options.socket))
    if options.kind != "none" and options.host and options.user and options.password:
        if options.kind in {"redfish", "auto"}:
            from powerguard.effectors.bmc.redfish import RedfishEngine  # noqa: PLC0415 - 1 MB for who needs it alone

            made.append(RedfishEngine(options, clock=clock))
        if options.kind in {"ipmi-lan", "auto"}:
            made.append(LanEngine(options.host, options.port, options.user, options.password, spawn=spawn, clock=clock))
    return tuple(made)
