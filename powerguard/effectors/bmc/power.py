"""Powers another host on through its BMC: for the sentinel only (import-linter checks this).

Two commands do it: IPMI's Chassis Control with value 1 (power up), and Redfish's ComputerSystem.Reset with On. Neither
can power a host off, and neither affects a host that is on.
"""

from collections.abc import Mapping
from typing import Final, Protocol

from powerguard.clock import Clock, boottime_s
from powerguard.effectors.bmc.engine import Refusals
from powerguard.effectors.bmc.ipmi import BmcFailure, ChassisStatus, Failure
from powerguard.effectors.bmc.lan import LanEngine
from powerguard.effectors.bmc.redfish import RedfishEngine, link
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.options import BmcOptions

_RESET: Final = "#ComputerSystem.Reset"
_WORDS: Final = ("On", "ForceOn")
"""DSP2046, ComputerSystem.ResetType: the second one for boards that list only it."""


class Power(Protocol):
    """The BMC of one host. by_s: a moment of CLOCK_BOOTTIME by which it has answered or raised BmcError."""

    @property
    def where(self) -> str:
        """The BMC's address, for messages."""
        ...

    async def status(self, by_s: float) -> ChassisStatus:
        """Read only."""
        ...

    async def power_on(self, by_s: float) -> None:
        """Order it; `status` shows whether it worked."""
        ...


class LanPower(LanEngine):
    """IPMI over LAN, in a worker that is killed at the deadline."""

    async def power_on(self, by_s: float) -> None:
        await self._operate("power-on", by_s)


class RedfishPower(RedfishEngine):
    """Redfish over HTTPS."""

    async def power_on(self, by_s: float) -> None:
        async with self._talk(by_s) as talk:
            body = (await self._system(talk)).body
            actions = body.get("Actions")
            action = actions.get(_RESET) if isinstance(actions, Mapping) else None
            if not isinstance(action, Mapping):
                raise BmcFailure(Failure.UNSUPPORTED, f"does not offer the action {_RESET}")
            # A missing list (or one in an ActionInfo of its own) permits every value: DSP0266 9.6.
            listed = action.get("ResetType@Redfish.AllowableValues")
            values = [word for word in _WORDS if not isinstance(listed, list) or word in listed]
            if not values:
                raise BmcFailure(Failure.UNSUPPORTED, f"{_RESET} does not allow {' or '.join(_WORDS)}")
            await talk.post(link({"@odata.id": action.get("target")}), {"ResetType": values[0]})


def power_of(
    options: BmcOptions, *, spawn: Spawn = run_child, clock: Clock = boottime_s, refusals: Refusals | None = None
) -> Power:
    """Make the way to a host's BMC. options: of kind redfish or ipmi-lan. clock, refusals: as of `Login`."""
    if options.kind == "redfish":
        return RedfishPower(options, clock=clock, refusals=refusals)
    if options.kind != "ipmi-lan":
        msg = f"another host's BMC is reached by redfish or ipmi-lan, not by {options.kind}"
        raise ValueError(msg)
    return LanPower(options, spawn=spawn, clock=clock, refusals=refusals)
