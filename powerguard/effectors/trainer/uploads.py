"""Trainers copy nothing to slower storage while the battery lasts: its bandwidth and processors are the local write's.

Held under a lease that is renewed, so that a daemon that dies stops nobody's copies for ever; let go by a lease of no
length, which changes nothing else (`resume` would also let training go on that somebody else has paused).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from powerguard.clock import Clock
from powerguard.effectors.trainer.peer import Answer, GoneError, Peer, busy_for_s
from powerguard.wire import HOLD_UPLOADS_PATH, LeaseRequest

LEASE_S: Final = 120.0
"""Longer than the daemon takes to stop (20 s) and to start again (60 s)."""
RENEW_S: Final = 30.0
LOOK_S: Final = 1.0
_NO_ROUTE: Final = frozenset((404, 405, 501))


class Uploads:
    """Holds the uploads of all native trainers while that is wanted. peers: those that are known now, by name."""

    def __init__(self, peers: Callable[[], Mapping[str, Peer]], clock: Clock) -> None:
        self._peers = peers
        self._clock = clock
        self._told: dict[str, float] = {}
        """When each was told last; those without such a call at the end of time."""

    async def keep(self, wanted: Callable[[], bool], rest: Callable[[float], Awaitable[object]]) -> None:
        """Hold and let go as is wanted; never returns. wanted: whether the dwell has ended, as the core has it."""
        while True:
            await self.turn(wanted=wanted())
            await rest(LOOK_S)

    async def turn(self, *, wanted: bool) -> None:
        """Tell those who do not know it yet. Ends within the 5 s that one call may take."""
        peers = self._peers()
        self._told = {name: at_s for name, at_s in self._told.items() if name in peers}
        now_s = self._clock()
        if wanted:
            names = [name for name, peer in peers.items() if peer.native and now_s >= self._told.get(name, now_s)]
        else:
            names = list(self._told)
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(self._tell(name, peers[name], hold=wanted))

    async def _tell(self, name: str, peer: Peer, *, hold: bool) -> None:
        body = LeaseRequest(lease_s=LEASE_S if hold else 0.0).to_json()
        answer = await peer.call("POST", HOLD_UPLOADS_PATH, body=body)
        if busy_for_s(answer) is not None:
            return  # asked again at the next look
        if not hold:
            if isinstance(answer, Answer | GoneError):
                self._told.pop(name, None)
            return
        knows_no_such_call = isinstance(answer, Answer) and answer.status in _NO_ROUTE
        self._told[name] = float("inf") if knows_no_such_call else self._clock() + RENEW_S
