"""Would this host come back? Checks the BMC and the power-on methods at start, after a reload and hourly.

A failed check is repeated after a minute, then less and less often: a BMC that was busy at boot, or hung, would
otherwise leave the host without a power-on method until the next hour.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from powerguard.clock import Clock
from powerguard.core.comeback.methods import named
from powerguard.core.model import outcomes
from powerguard.core.model.actions import Action, ArmWay, CheckWay, EnsurePolicy, Note
from powerguard.core.model.events import Done, Failed
from powerguard.daemon.components import Components, log_note
from powerguard.daemon.observe.port import BmcView, WayView

log = structlog.get_logger()

CHECK_S = 3600.0
RETRY_S = 60.0


class ReturnWatch:
    """Status of the power-on methods, and the duty to check them again.

    bmc: None when the settings have none. ways: those of the settings, in their order.
    """

    def __init__(self, clock: Clock) -> None:
        """Begin without results."""
        self.bmc: BmcView | None = None
        self.ways: tuple[WayView, ...] = ()
        self._clock = clock
        self._kind = "none"
        self._asked = asyncio.Event()
        self._checks = 0

    def set_parts(self, parts: Components) -> None:
        """Take the methods of the settings; forget the results of all others."""
        self._kind = parts.bmc_kind
        if self.bmc is None or self.bmc.kind != self._kind:
            self.bmc = None if self._kind == "none" else BmcView(kind=self._kind)
        known = {(view.way, view.ups): view for view in self.ways}
        self.ways = tuple(known.get(each) or WayView(way=each[0], ups=each[1]) for each in named(parts.policy))

    def check_soon(self) -> None:
        """Check again at once, because the methods have changed; during a check, once more after it."""
        self._asked.set()

    def enter(self, outcome: Done | Failed) -> None:
        """Enter the outcome of an order about the return; other actions are ignored."""
        match outcome.action:
            case EnsurePolicy() if self._kind != "none":
                self._enter_policy(outcome)
            case CheckWay(way=way, ups=ups) | ArmWay(way=way, ups=ups):
                self.ways = tuple(
                    entered(view, outcome) if (view.way, view.ups) == (way, ups) else view for view in self.ways
                )
            case _:
                pass

    def _enter_policy(self, outcome: Done | Failed) -> None:
        known = self.bmc or BmcView(kind=self._kind)
        found = outcomes.policy_ensured(outcome)
        if isinstance(outcome, Failed):
            if found.policy is not None:  # it was read, and is not the one that is wanted
                known = replace(known, policy=found.policy, checked_at_s=outcome.at_s, power_watts=None)
            self.bmc = replace(known, verified=False, error=outcome.reason)
            return
        self.bmc = replace(
            known,
            policy=found.policy,
            verified=found.verified,
            checked_at_s=outcome.at_s,
            error="",
            power_watts=found.power_watts,
        )

    async def run(
        self,
        attempt: Callable[[Action], Awaitable[Done | Failed]],
        *,
        can: Callable[[type[Action]], bool],
        is_quiet: Callable[[], bool],
        boot_id: str,
        limit_s: float,
    ) -> None:
        """Check periodically. can: an effector exists. is_quiet: no outage checks anyway. limit_s: for one answer."""
        failures = 0
        while True:
            self._asked.clear()
            if is_quiet():
                self._checks += 1
                by_s = self._clock() + limit_s
                name = f"{boot_id[:8]}-{{}}-{self._checks}"
                asked: list[Action] = [EnsurePolicy(id=name.format("policy"), by_s=by_s, outage="")]
                for view in self.ways:
                    id_ = name.format(f"{view.way}{view.ups}")
                    asked.append(CheckWay(id=id_, by_s=by_s, way=view.way, ups=view.ups))
                # In parallel: one that hangs does not delay the others.
                async with asyncio.TaskGroup() as tasks:
                    asking = [tasks.create_task(self._ask(attempt, each)) for each in asked if can(type(each))]
                failures = 0 if all(task.result() for task in asking) else failures + 1
            rest_s = RETRY_S * 2.0 ** min(failures - 1, 10) if failures else CHECK_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(rest_s, CHECK_S)):
                    await self._asked.wait()
                    failures = 0

    async def _ask(self, attempt: Callable[[Action], Awaitable[Done | Failed]], action: Action) -> bool:
        outcome = await attempt(action)
        self.enter(outcome)
        if isinstance(action, CheckWay):
            if isinstance(outcome, Failed):
                log.warning("way_blocked", because=outcome.reason, way=action.way, ups=action.ups)
        elif isinstance(outcome, Failed):
            log.error("policy_unverified", because=outcome.reason)
        else:
            log_note(Note(event="policy_verified", because="start or hourly", numbers=outcome.detail))
        return isinstance(outcome, Done)


def entered(view: WayView, outcome: Done | Failed) -> WayView:
    """Return the view after a method was checked, or armed."""
    if isinstance(outcome, Failed):
        return replace(view, ready=False, why=outcome.reason, checked_at_s=outcome.at_s)
    returns = outcomes.way_armed(outcome).returns or view.returns
    return replace(view, ready=True, why="", returns=returns, checked_at_s=outcome.at_s)
