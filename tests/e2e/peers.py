"""Peers for the whole chain that are ours to direct: a trainer of either protocol, and a UPS card behind net-snmp."""

import asyncio
import contextlib
import json
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from aiohttp import web

from powerguard.clock import boottime_s
from powerguard.sim import snmp_values as sim
from powerguard.sim.snmp_values import SimValue, gauge, integer
from powerguard.sim.ups import SimUps
from powerguard.wire import (
    RESUME_PATH,
    STATUS_PATH,
    TRIGGER_PATH,
    After,
    CheckpointStatus,
    Phase,
    TrainerStatus,
    TriggerRequest,
)
from tests.peers.snmpd import Snmpd, snmpd

RFC1628 = "1.3.6.1.2.1.33.1"
_KINDS = {
    sim.INTEGER: "integer",
    sim.GAUGE32: "gauge",
    sim.TIMETICKS: "timeticks",
    sim.OCTETS: "string",
    sim.OID: "objectid",
}


class Mischief(StrEnum):
    """What a trainer does when it is asked for a checkpoint."""

    NONE = "none"
    REFUSES = "refuses"
    HANGS = "hangs"
    DIES = "dies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request for a checkpoint, as the trainer got it. journalled: the order was in the journal by then."""

    at_s: float
    id: str
    after: After
    event: str
    journalled: bool


class Trainer:
    """A training job in this process, so it outlives the daemon: aiohttp on a loopback port.

    native: speaks the whole protocol; else it is a dumb endpoint that saves before it answers 200, and never pauses.
    write_s: how long a checkpoint takes. token: the bearer token that it wants to see; "" for none.
    is_ordered: asks the journal for an action's id (see `Rig.is_ordered`).
    """

    def __init__(
        self, name: str = "llm", *, native: bool = True, write_s: float = 0.3, mischief: Mischief = Mischief.NONE
    ) -> None:
        self.name = name
        self.native = native
        self.write_s = write_s
        self.mischief = mischief
        self.token = ""
        self.is_ordered: Callable[[str], bool] = lambda _: False
        self.on_change: Callable[[], None] = lambda: None
        self.orders: list[Order] = []
        self.resumed_at_s: list[float] = []
        self.looks = 0
        self.refused = 0
        self.paused = False
        self.paused_for = ""
        self.step = 1000
        self.url = ""
        self._began: dict[str, tuple[float, CheckpointStatus]] = {}
        self._runner: web.AppRunner | None = None
        self._dying: asyncio.Task[None] | None = None

    @property
    def checkpoints(self) -> set[str]:
        """Ids of the checkpoints that were made or begun: the same id again is the same checkpoint."""
        return set(self._began)

    def committed(self) -> list[CheckpointStatus]:
        return [status for id_ in self._began if (status := self._status(id_)).phase is Phase.COMMITTED]

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get(STATUS_PATH, self._look)
        app.router.add_post(TRIGGER_PATH, self._trigger)
        app.router.add_post(RESUME_PATH, self._resume)
        app.router.add_get("/api/v1/checkpoints/{id}", self._follow)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.die()

    async def die(self) -> None:
        """End as a process that is killed: nobody listens there any more."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _may(self, request: web.Request) -> bool:
        allowed = not self.token or request.headers.get("Authorization") == f"Bearer {self.token}"
        self.refused += not allowed
        return allowed

    async def _look(self, request: web.Request) -> web.Response:
        self.looks += 1
        if not self._may(request):
            return web.Response(status=401)
        if not self.native:
            return web.Response(status=404)
        status = TrainerStatus(
            job=self.name,
            step=self.step,
            paused=self.paused,
            paused_for=self.paused_for if self.paused else "",
            conduct=After.PAUSE,
            step_time_p95_s=0.05,
        )
        return web.Response(body=status.to_json())

    async def _trigger(self, request: web.Request) -> web.Response:
        asked = TriggerRequest.parse(await request.read())
        assert isinstance(asked, TriggerRequest), asked
        if not self._may(request):
            return web.Response(status=401)
        journalled = self.is_ordered(asked.id)
        self.orders.append(
            Order(at_s=boottime_s(), id=asked.id, after=asked.after, event=asked.event, journalled=journalled)
        )
        match self.mischief:
            case Mischief.REFUSES:
                return web.Response(status=403)
            case Mischief.HANGS:
                await asyncio.sleep(600.0)
            case _:
                pass
        if not self.native:
            await asyncio.sleep(self.write_s)
            self._begin(asked, paused=False, at_s=boottime_s() - self.write_s)
            return web.Response()
        self._begin(asked, paused=asked.after is not After.CONTINUE, at_s=boottime_s())
        return web.Response(status=202, headers={"Location": f"/api/v1/checkpoints/{asked.id}"})

    def _begin(self, asked: TriggerRequest, *, paused: bool, at_s: float) -> None:
        if asked.id in self._began:
            return
        if not self.paused:
            self.step += 10
        self.paused_for = self.paused_for if self.paused else asked.reason.value
        self.paused = self.paused or paused
        self.on_change()
        status = CheckpointStatus(
            id=asked.id,
            phase=Phase.WRITING,
            after=asked.after,
            step=self.step,
            paused=self.paused,
            paused_step=self.step if self.paused else None,
            bytes_total=8_500,
        )
        self._began[asked.id] = (at_s, status)

    def _status(self, id_: str) -> CheckpointStatus:
        began_s, status = self._began[id_]
        if boottime_s() - began_s < self.write_s:
            return status
        return CheckpointStatus(
            id=id_,
            phase=Phase.COMMITTED,
            after=status.after,
            step=status.step,
            paused=status.paused,
            paused_step=status.paused_step,
            bytes_done=status.bytes_total,
            bytes_total=status.bytes_total,
            durable=True,
            manifest_digest="sha256:" + "5a" * 32,
            path=f"/checkpoints/{status.step}",
        )

    async def _follow(self, request: web.Request) -> web.Response:
        if self.mischief is Mischief.DIES:
            # As a task of its own: a server cannot wait for the end of the request that ends it.
            self._dying = asyncio.get_running_loop().create_task(self.die())
            await asyncio.sleep(600.0)
        id_ = request.match_info["id"]
        if id_ not in self._began:
            return web.Response(status=404)
        if request.query.get("seen") == self._status(id_).phase.value:
            left_s = self._began[id_][0] + self.write_s - boottime_s()
            await asyncio.sleep(max(0.0, min(left_s, float(request.query.get("wait", "0")))))
        return web.Response(body=self._status(id_).to_json())

    async def _resume(self, request: web.Request) -> web.Response:
        if not self._may(request):
            return web.Response(status=401)
        self.resumed_at_s.append(boottime_s())
        self.paused = False
        self.on_change()
        return web.Response(body=TrainerStatus(job=self.name, step=self.step, paused=False).to_json())


# --- A UPS card behind net-snmp ----------------------------------------------------------------------------------


def rfc1628_table(ups: SimUps) -> Mapping[str, SimValue]:
    """What a card that only speaks RFC 1628 would answer. Its runtime is in whole minutes."""
    on_battery = not ups.utility
    return {
        f"{RFC1628}.1.1.0": sim.octets("A maker of the tests"),
        f"{RFC1628}.2.1.0": integer(3 if ups.low_battery else 2),
        f"{RFC1628}.2.2.0": integer(int(ups.on_battery_s)),
        f"{RFC1628}.2.3.0": integer(int(ups.runtime_s / 60.0)),
        f"{RFC1628}.2.4.0": integer(round(100 * ups.charge)),
        f"{RFC1628}.3.2.0": integer(1),
        f"{RFC1628}.3.3.1.3.1": integer(0 if on_battery else 230),
        f"{RFC1628}.4.1.0": integer(5 if on_battery else 3),
        f"{RFC1628}.4.3.0": integer(1),
        f"{RFC1628}.4.4.1.5.1": integer(round(100 * ups.load)),
        f"{RFC1628}.6.1.0": gauge(0),
    }


@contextlib.asynccontextmanager
async def net_snmp_card(values: Callable[[], Mapping[str, SimValue]], *roots: str) -> AsyncIterator[Snmpd]:
    """Serve a table that changes, through snmpd's pass_persist. roots: the subtrees that the table answers for."""
    # snmpd splits the line at spaces and hands the rest to a shell: its folder has no space, and the script is quoted.
    folder = Path("/tmp") / f"pg-card-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    table, script = folder / "table.json", folder / "pass"

    def write() -> None:
        rows = {
            name: (_KINDS[value.tag], value.content.decode() if isinstance(value.content, bytes) else value.content)
            for name, value in values().items()
            if name.startswith(roots)
        }
        fresh = folder / "table.new"
        fresh.write_text(json.dumps(rows), encoding="ascii")
        fresh.replace(table)

    async def keep_writing() -> None:
        while True:
            write()
            await asyncio.sleep(0.1)

    write()
    program = shlex.join([sys.executable, "-I", str(Path(__file__).parent / "pass_persist.py"), str(table)])
    script.write_text(f"#!/bin/sh\nexec {program}\n", encoding="utf-8")
    script.chmod(0o700)
    lines = tuple(f"pass_persist .{root} {script}" for root in roots)
    writing = asyncio.get_running_loop().create_task(keep_writing())
    try:
        async with snmpd({}, lines=lines) as card:
            yield card
    finally:
        writing.cancel()
        for path in (table, script, folder / "table.new"):
            path.unlink(missing_ok=True)
        folder.rmdir()
