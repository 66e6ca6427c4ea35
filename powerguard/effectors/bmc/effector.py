"""Makes sure that the BMC powers the host on when AC returns, and proves it by reading back."""

from typing import Final

from powerguard.clock import Clock, boottime_s
from powerguard.core.events import Action, Detail, EnsurePolicy
from powerguard.effectors.bmc.engine import BACK_OFF_S, BmcError, Engine, Ensured, Probe
from powerguard.effectors.bmc.inband import InbandEngine
from powerguard.effectors.bmc.ipmi import ChassisStatus, Failure, PowerRestorePolicy
from powerguard.effectors.bmc.lan import WORKER, LanEngine
from powerguard.effectors.bmc.options import BmcOptions
from powerguard.effectors.bmc.redfish import RedfishEngine
from powerguard.effectors.child import Spawn, run_child

__all__ = ["BACK_OFF_S", "WORKER", "BmcEffector", "BmcError", "Failure", "Probe"]

_NONE: Final = (
    "bmc.kind is none: nobody makes sure that this host powers on when power returns; "
    "give it its BMC (bmc: {kind: in-band}, or {kind: ipmi-lan, host: ..., user: ..., password: ...})"
)


class BmcEffector:
    """Carries out `EnsurePolicy` through the engine that the settings name.

    limit_s: of one operation; a caller that cancels earlier ends it, too, with every process of it.
    clock: seconds of CLOCK_BOOTTIME; times the operations and the rest after a refused login.
    """

    def __init__(
        self, options: BmcOptions, *, spawn: Spawn = run_child, clock: Clock = boottime_s, limit_s: float = 5.0
    ) -> None:
        self._options = options
        self._engine = _engine(options, spawn, clock)
        self._clock = clock
        self._limit_s = limit_s

    async def carry_out(self, action: Action) -> Detail:
        """Ensure (policy: ensure) or only verify (policy: observe) always-on.

        Returns policy, verified, before, changed, power_on, ac_failed (None: not told), engine and latency_s. Raises
        BmcError unless always-on was read from the BMC.
        """
        if not isinstance(action, EnsurePolicy):
            msg = f"the bmc effector carries out EnsurePolicy, not {type(action).__name__}"
            raise TypeError(msg)
        began_s = self._clock()
        by_s = boottime_s() + self._limit_s  # the engines' own clock, also where ours is a simulated one
        engine = self._reachable()
        if self._options.policy == "observe":
            status = await engine.status(by_s)
            told = Ensured(before=status, after=status, changed=False)
        else:
            told = await engine.ensure(PowerRestorePolicy.ALWAYS_ON, by_s)
        status = told.after
        if status.policy is not PowerRestorePolicy.ALWAYS_ON:
            msg = (
                f"BMC {self._options.host or engine.kind}: power restore policy is {status.policy}, so this host stays "
                "off when power returns; set it to always-on, or let us do it (bmc.policy: ensure; it is observe)"
            )
            raise BmcError(msg)
        return (
            ("policy", status.policy.value),
            ("verified", True),
            ("before", told.before.policy.value),
            ("changed", told.changed),
            ("power_on", status.power_on),
            ("ac_failed", status.ac_failed),
            ("engine", engine.kind),
            ("latency_s", round(self._clock() - began_s, 3)),
        )

    async def status(self, limit_s: float) -> ChassisStatus:
        """Read the chassis status within limit_s; changes nothing. Raises BmcError."""
        return await self._reachable().status(boottime_s() + limit_s)

    async def probe(self, limit_s: float) -> Probe:
        """Read status, support and restart cause within limit_s; changes nothing. Raises BmcError.

        With policy: observe the support is not asked for: the question is a form of the set command.
        """
        return await self._reachable().probe(boottime_s() + limit_s, ask_support=self._options.policy != "observe")

    def _reachable(self) -> Engine:
        if self._engine is None:
            raise BmcError(_NONE)
        return self._engine


def _engine(options: BmcOptions, spawn: Spawn, clock: Clock) -> Engine | None:
    """Make the engine that the settings name; None where they name none."""
    if options.kind == "in-band":
        return InbandEngine(options.socket)
    if options.kind == "none" or options.host is None or options.user is None or options.password is None:
        return None
    if options.kind == "redfish":
        return RedfishEngine(options, clock=clock)
    return LanEngine(options.host, options.port, options.user, options.password, spawn=spawn, clock=clock)
