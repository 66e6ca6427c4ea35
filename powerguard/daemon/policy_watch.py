"""Does the BMC's policy still bring the host back? Asked at start, after a reload and hourly, before it is dark."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from powerguard.clock import Clock
from powerguard.core.events import Done, EnsurePolicy, Failed, Note
from powerguard.daemon.parts import log_note
from powerguard.daemon.port import BmcView

log = structlog.get_logger()

POLICY_CHECK_S = 3600.0


class PolicyWatch:
    """What is known of the BMC, and the duty to ask it again. view: None when the settings have none."""

    def __init__(self, clock: Clock) -> None:
        """Know nothing yet."""
        self.view: BmcView | None = None
        self._clock = clock
        self._kind = "none"
        self._asked = asyncio.Event()
        self._checks = 0

    def set_kind(self, kind: str) -> None:
        """Take the kind of BMC that the settings name; what is known of another kind is forgotten."""
        self._kind = kind
        if self.view is None or self.view.kind != kind:
            self.view = None if kind == "none" else BmcView(kind=kind)

    def check_soon(self) -> None:
        """Ask again at once: the settings have changed."""
        self._asked.set()

    def enter(self, outcome: Done | Failed) -> None:
        """Enter how an order to ensure the policy ended; other actions are passed over."""
        if not isinstance(outcome.action, EnsurePolicy) or self._kind == "none":
            return
        known = self.view or BmcView(kind=self._kind)
        if isinstance(outcome, Failed):
            self.view = replace(known, verified=False, error=outcome.reason)
            return
        detail = dict(outcome.detail)
        policy = detail.get("policy")
        self.view = replace(
            known,
            policy=policy if isinstance(policy, str) else None,
            verified=detail.get("verified") is True,
            checked_at_s=outcome.at_s,
            error="",
        )

    async def run(
        self,
        attempt: Callable[[EnsurePolicy], Awaitable[Done | Failed]],
        *,
        is_wanted: Callable[[], bool],
        boot_id: str,
        limit_s: float,
    ) -> None:
        """Ask for ever. is_wanted: somebody can answer, and no outage is asking anyway. limit_s: for one answer."""
        while True:
            if is_wanted():
                self._checks += 1
                by_s = self._clock() + limit_s
                outcome = await attempt(EnsurePolicy(id=f"{boot_id[:8]}-policy-{self._checks}", by_s=by_s, outage=""))
                self.enter(outcome)
                if isinstance(outcome, Failed):
                    log.error("policy_unverified", because=outcome.reason)
                else:
                    log_note(Note(event="policy_verified", because="start or hourly", numbers=outcome.detail))
            self._asked.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLICY_CHECK_S):
                    await self._asked.wait()
