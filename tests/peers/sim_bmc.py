"""The demo's simulated BMC with what tests need: it misbehaves, remembers, and says when it has heard what.

`async with SimBmc("powerguard", "secret", faults=Faults(busy=3)) as bmc: await bmc.wait_until(...)`. This file is also
the program of the child process.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from powerguard.effectors.bmc.ipmi import PowerRestorePolicy
from powerguard.sim import bmc
from powerguard.sim.bmc import SimBmcError, report

__all__ = ["Faults", "SimBmc", "SimBmcError"]

_USER_LEVEL = 2
_CAUSE_OF_POLICY = {PowerRestorePolicy.ALWAYS_ON: 0x06, PowerRestorePolicy.LAST_STATE: 0x07}
_POWER_BUTTON = 0x03
_AC_FAILED = 0x01
_CHASSIS = 0x00
_BUSY_TO = (0x01, 0x06, 0x07)
"""Get Chassis Status, Set Power Restore Policy, Get System Restart Cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How the BMC misbehaves.

    refuse: completion code with which every Set Power Restore Policy is refused, such as 0xC1 (IPMI 2.0 table 5-2).
    busy: so many commands are first answered with 0xC0 (node busy).
    lie: a set is acknowledged and not stored. delay_s: every command takes so long. dead: no packet is answered.
    user_level: the account may only log in at level User, and its RAKP message 1 is refused with 0Ah (table 13-15).
    """

    refuse: int | None = None
    busy: int = 0
    lie: bool = False
    delay_s: float = 0.0
    dead: bool = False
    user_level: bool = False


class SimBmc(bmc.SimBmc):
    """The parent's side.

    state_file: JSON that outlives the BMC, as a real one's memory does, and wins over `policy`; None: forgotten at the
    end.
    """

    child = (__file__,)

    def __init__(
        self,
        user: str,
        password: str,
        *,
        policy: str = PowerRestorePolicy.LAST_STATE,
        state_file: Path | None = None,
        faults: Faults | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(user, password, policy=policy, port=port)
        self.first |= {
            "faults": asdict(faults or Faults()),
            "state_file": None if state_file is None else str(state_file),
        }
        self._news = asyncio.Condition()

    @property
    def pid(self) -> int:
        """Of the child process, for tests that stop it in mid-session."""
        return self.running.pid

    async def set_faults(self, faults: Faults) -> None:
        """Misbehave otherwise from now on; returns when the BMC has heard it."""
        seen = len(self.heard)
        await self.send({"faults": asdict(faults)})
        await self.wait_until(lambda: "faults" in self.heard[seen:])

    async def wait_until(self, reached: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Wait until `reached` (of `policy` or `heard`) is true. Raises TimeoutError."""
        async with asyncio.timeout(limit_s), self._news:
            await self._news.wait_for(reached)

    async def take(self, line: bytes) -> None:
        await super().take(line)
        async with self._news:
            self._news.notify_all()


class FaultyChassis(bmc.Chassis):
    def __init__(self, policy: PowerRestorePolicy, first: dict[str, Any]) -> None:
        super().__init__(policy)
        self.faults = Faults(**first["faults"])
        self._busy = self.faults.busy
        self._state_file = None if first["state_file"] is None else Path(first["state_file"])
        if self._state_file is not None and self._state_file.exists():
            # A BMC that remembers lost its AC, and its host was on: what woke it is the policy it woke with.
            self.policy = PowerRestorePolicy(json.loads(self._state_file.read_text(encoding="utf-8"))["policy"])
            self.cause = _CAUSE_OF_POLICY.get(self.policy, _POWER_BUTTON)
            self.event = _AC_FAILED

    def obey(self, order: dict[str, Any]) -> None:
        if "faults" not in order:
            super().obey(order)
            return
        self.faults = Faults(**order["faults"])
        self._busy = self.faults.busy
        report(heard="faults")

    def answer(self, command: tuple[int, int], data: bytes) -> tuple[int, bytes] | None:
        if self._busy and command[0] == _CHASSIS and command[1] in _BUSY_TO:
            self._busy -= 1
            report(heard="busy")
            answer: tuple[int, bytes] | None = (0xC0, b"")
        else:
            answer = super().answer(command, data)
        time.sleep(self.faults.delay_s)
        return answer

    def set(self, data: bytes) -> tuple[int, bytes]:
        if data and self.faults.refuse is not None:
            report(heard="set refused")
            return self.faults.refuse, b""
        return super().set(data)

    def store(self, policy: PowerRestorePolicy) -> None:
        if self.faults.lie:
            return
        if self._state_file is not None:
            fresh = self._state_file.with_name(self._state_file.name + ".new")
            fresh.write_text(json.dumps({"policy": policy}), encoding="utf-8")
            fresh.replace(self._state_file)
        super().store(policy)


def faulty_server(chassis: FaultyChassis, user: str, password: str, port: int) -> Any:  # noqa: ANN401 - pyghmi has no types
    from pyghmi.ipmi.private.serversession import ServerSession

    got_rakp1 = ServerSession._got_rakp1

    def refusing(session: Any, data: Any) -> None:  # noqa: ANN401
        if chassis.faults.user_level and data[24] & 0x0F > _USER_LEVEL:
            refusal = bytearray([data[0], 0x0A, 0, 0]) + session.clientsessionid
            session.send_payload(refusal, 0x13, retry=False)  # RAKP message 2, IPMI 2.0 table 13-16
        else:
            got_rakp1(session, data)

    ServerSession._got_rakp1 = refusing
    server = bmc.make_server(chassis, user, password, port)
    for name in ("sessionless_data", "handle_raw_request"):
        setattr(server, name, _unless_dead(chassis, getattr(server, name)))
    return server


def _unless_dead(chassis: FaultyChassis, act: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def acting(first: Any, second: Any) -> None:  # noqa: ANN401
        if not chassis.faults.dead:
            act(first, second)

    return acting


if __name__ == "__main__":
    bmc.main(FaultyChassis, faulty_server)
