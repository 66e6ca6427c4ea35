"""Reads what this host alone draws: its BMC's power reading, its PDU's outlets and its GPUs, as events for the core.

On a UPS that is shared, every 5 s on battery and in a drill, else every minute. On one that is not, now and then on
utility only, to see whether the settings forget that others hang on it.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from powerguard.clock import Clock
from powerguard.core.model.events import OwnLoad, OwnSource
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Online, Recovery, Shutdown, State, Supply
from powerguard.effectors.base import EffectorError
from powerguard.effectors.gpu.effector import GpuEffector
from powerguard.ups.nut.connection import opened
from powerguard.ups.nut.options import OutletOptions
from powerguard.ups.profiles.vocabulary import DeviceError

log = structlog.get_logger(__name__)

ON_BATTERY_S: Final = 5.0
ON_UTILITY_S: Final = 60.0
ALONE_S: Final = 600.0
LIMIT_S: Final = 6.0
"""Timeout for one reading: three of them make a stale one, and a BMC that needs more measures nothing in time."""
_LOOK_S: Final = 0.5
_WATTS: Final = re.compile(r"\d{1,7}(\.\d{1,6})?")
Read = Callable[[float], Coroutine[Any, Any, float | None]]
"""Reads watts within so many seconds; None: not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoadWatch:
    """Reads each source by itself, so that a slow one holds no other up. read: what measures, by source."""

    policy: Policy
    read: dict[OwnSource, Read]
    state: Callable[[], State]
    publish: Callable[[OwnLoad], None]
    clock: Clock
    rest: Callable[[float], Awaitable[None]]

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for source, read in self.read.items():
                tasks.create_task(self._keep(source, read))

    async def _keep(self, source: OwnSource, read: Read) -> None:
        # On a UPS of our own there is no hurry: the first minute's BMC is for its power-on policy.
        read_at_s = self.clock() if self.policy.shared is None else -math.inf
        while True:
            every_s = self._every_s()
            if every_s is not None and self.clock() - read_at_s >= every_s:
                read_at_s = self.clock()
                watts = await self._while_wanted(read)
                if watts is not None and math.isfinite(watts):
                    self.publish(OwnLoad(at_s=self.clock(), source=source, watts=watts))
            await self.rest(_LOOK_S)

    async def _while_wanted(self, read: Read) -> float | None:
        """Read, and let go at once when the host powers off: then the BMC is asked for what counts."""
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(LIMIT_S))
            while not reading.done():
                await asyncio.wait((reading,), timeout=_LOOK_S)
                if isinstance(self.state().phase, Shutdown):
                    reading.cancel()
        return None if reading.cancelled() else reading.result()

    def _every_s(self) -> float | None:
        """Return how often to read now; None: not at all."""
        state = self.state()
        calm = isinstance(state.phase, Online) and state.feed.supply is not Supply.BATTERY and state.drill is None
        if isinstance(state.phase, Shutdown | Recovery):
            return None
        if self.policy.shared is None:
            return ALONE_S if calm else None
        return ON_UTILITY_S if calm else ON_BATTERY_S


class Outlets:
    """The outlets that feed this host. trouble: why they cannot be read, with the remedy; "" if they can."""

    def __init__(self, outlets: Sequence[OutletOptions]) -> None:
        """Read nothing yet."""
        self.trouble = ""
        self._outlets = outlets

    async def watts(self, limit_s: float) -> float | None:
        """Return the sum of all outlets; None if one of them cannot be read (logged once for each reason)."""
        trouble = ""
        watts: float | None = None
        try:
            async with asyncio.timeout(limit_s):
                watts = math.fsum([await self._of(each) for each in self._outlets])
        except TimeoutError:
            trouble = f"no answer in {limit_s:g} s"
        except (DeviceError, ValueError) as error:
            trouble = str(error)
        if trouble and trouble != self.trouble:
            log.warning("outlets_unread", because=trouble)
        self.trouble = trouble
        return watts

    async def _of(self, pdu: OutletOptions) -> float:
        async with opened(pdu.as_source(), reads_only=True) as upsd:
            watts = 0.0
            for outlet in pdu.outlets:
                name = f"outlet.{outlet}.realpower"
                value = await upsd.get(name)
                if value is None or not _WATTS.fullmatch(value):
                    found = "has no" if value is None else f"answers {value!r:.40} for"
                    msg = f"{upsd.where} {found} {name}: name an outlet that measures watts (`upsc {pdu.name}`)"
                    raise ValueError(msg)
                watts += float(value)
            return watts


async def gpu_watts(gpu: GpuEffector, limit_s: float) -> float | None:
    """Return the sum of what the GPUs draw, as NVML reports it; None if one of them has no report."""
    try:
        async with asyncio.timeout(limit_s):
            answer = (await gpu.ask({"word": "list"})).get("gpus")
    except (EffectorError, TimeoutError):
        return None
    gpus: list[Any] = answer if isinstance(answer, list) else []
    draws = [each.get("power_w") if isinstance(each, dict) else None for each in gpus]
    known = [float(watts) for watts in draws if isinstance(watts, int | float)]
    return sum(known) if known and len(known) == len(draws) else None
