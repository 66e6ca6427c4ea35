"""A world around the real daemon: a UPS that empties, trainers, a recorded power-off; and everything worth looking at.

    async with rig() as world:
        await world.start()                      # the daemon is a process of its own, with settings from a file
        world.ups.utility = False
        await world.note("phase_changed", new="shutdown")
        off = await world.off()                  # what the power-off command was told, and when

The battery lasts some seconds, so that an outage does: emergency about 1 s after the cut, commit about 5 s after it.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp

from powerguard.clock import boottime_s
from powerguard.daemon.journal import JournalError, Line, OutageRecord, history, read_only, recent
from powerguard.sim.demo.story import numbers
from powerguard.sim.ups import UpsBattery
from tests.e2e.peers import Trainer
from tests.peers.ports import free_port
from tests.peers.snmp_agent import SimUser, SnmpAgent
from tests.peers.ups_output import SwitchedUps

TRAINING, PAUSED = 0.6, 0.3
SHORT: Final = ((PAUSED, 20.0), (TRAINING, 10.0))
"""Runtime by load of the usual battery, which is half worn: 5 s of training, or 10 s of a pause."""
LONG: Final = ((PAUSED, 40.0), (TRAINING, 20.0))
"""5 s until the emergency."""
ROOMY: Final = ((PAUSED, 60.0), (TRAINING, 30.0))
"""Longer than the 8 s before which nothing is committed, so that even a busy machine has time for a full stop."""
ENDLESS: Final = ((PAUSED, 1600.0), (TRAINING, 800.0))
"""For an outage that utility ends: nothing is saved or committed before that, however busy the machine is."""
FORCE_AFTER_S: Final = 10.0
BUSY_S: Final = 4.0
"""What a busy machine may add to any promise that is measured from outside."""
LIMIT_S: Final = 100.0
"""How long a test waits for anything before it fails: no promise, so long enough for a machine that is very busy."""
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Off:
    """One call of the power-off command. ordered: the journal on the disk held the order by then."""

    at_s: float
    deadline_s: float
    ordered: bool


class Rig:
    """One host with its daemon. `settings` may be changed before `start`; see `rig` for the rest."""

    def __init__(self, folder: Path, ups: SwitchedUps, runtime: Sequence[tuple[float, float]]) -> None:
        self.folder = folder
        self.ups = ups
        self.trainers: list[Trainer] = []
        self.agent: SnmpAgent | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.pids: list[int] = []
        self.between: list[int] = []
        """Processes of programs between the UPS and the daemon: the battery waits for these, too."""
        self.http_port = free_port()
        self.journal = folder / "state" / "journal.sqlite"
        self.socket = folder / "admin.sock"
        self.log_path = folder / "daemon.log"
        self.config = folder / "powerguard.yaml"
        self._offs = folder / "offs"
        self.journal.parent.mkdir()
        command = [sys.executable, "-I", str(_HERE / "record_off.py"), str(self.journal), str(self._offs)]
        self.settings: dict[str, Any] = {
            "mode": "armed",
            "ups": {"rack-a": {"sources": [], "runtime_table": {round(100 * x): s for x, s in runtime}}},
            "trainers": [],
            "trainer_sockets": None,
            "budget": {
                "health": 0.5,
                "reserve_s": 1,
                "stop_q95_s": 1,
                "bare_stop_s": 1,
                "stop_median_s": 1,
                "paused_load": 0.5,
                "low_battery_s": 20,
                "recharge_h": 0.01,
                "utility_stable_s": 2,
            },
            "host": {"kind": "command", "force_after_s": FORCE_AFTER_S, "command": [*command, "{deadline_s}"]},
            "bmc": {"kind": "none"},
            "resume": {"command": [sys.executable, "-I", "-c", "pass"]},
            "http": {"port": self.http_port},
            "control": {"socket": str(self.socket)},
            "journal": {"path": str(self.journal)},
            "log": {"format": "json", "level": "info"},
        }

    # --- Before the start --------------------------------------------------------------------------------------------

    def secret(self, name: str, value: str) -> dict[str, str]:
        """Keep a secret where nobody else can read it; returns how the settings name it."""
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(value, encoding="utf-8")
        return {"file": str(path)}

    def add_snmp(self, port: int, **options: object) -> None:
        """Poll the card on this port twice a second."""
        source = {"kind": "snmp", "host": "127.0.0.1", "port": port, "poll_s": 0.5, "timeout_s": 0.5, **options}
        self.settings["ups"]["rack-a"]["sources"].append(source)

    def add_trainer(self, trainer: Trainer, **options: object) -> None:
        """Name it in the settings, with a checkpoint that is said to take 2 s."""
        trainer.is_ordered = self.is_ordered
        trainer.on_change = self.ups.look
        self.trainers.append(trainer)
        listed = {"name": trainer.name, "url": trainer.url, "checkpoint_s": 2.0, **options}
        self.settings["trainers"].append(listed)

    def wear(self, runtime: tuple[tuple[float, float], ...]) -> None:
        """Give the battery another runtime by load from now on, whatever the settings say."""
        self.ups.look()
        self.ups.battery = replace(self.ups.battery, runtime=runtime)

    @property
    def load(self) -> float:
        """What the host draws: less once every trainer that can pause has paused."""
        able = [trainer for trainer in self.trainers if trainer.native]
        return PAUSED if able and all(trainer.paused for trainer in able) else TRAINING

    def write_settings(self) -> None:
        """Write the file that an operator would write. JSON is YAML, but for keys that are numbers."""
        text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in self.settings.items()) + "\n"
        for load in self.settings["ups"]["rack-a"]["runtime_table"]:
            text = text.replace(f'"{load}": ', f"{load}: ")
        self.config.write_text(text, encoding="utf-8")

    # --- The daemon --------------------------------------------------------------------------------------------------

    async def start(self, *words: str, env: Mapping[str, str] | None = None, wait: bool = True) -> None:
        """Start it, and wait until it has read the UPS and looked at every trainer."""
        self.write_settings()
        looks = [trainer.looks for trainer in self.trainers]
        argv = [sys.executable, "-P", "-m", "powerguard", "run", "--config", str(self.config), *words]
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(env or {})}
            )
        self.pids.append(self.process.pid)
        if wait:
            await self.until(self._is_watching, "the daemon to watch UPS and trainers")
            before = list(zip(self.trainers, looks, strict=True))
            await self.until(lambda: all(t.looks > count for t, count in before), "the trainers to be looked at")

    async def _is_watching(self) -> bool:
        assert self.process is not None
        assert self.process.returncode is None, self.log()[-10:]
        status = await self.status()
        return status is not None and status["supply"] != "unknown" and all(s["up"] for s in status["sources"])

    async def kill(self) -> None:
        """As the kernel does when memory is short: at once, anywhere."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self, limit_s: float = LIMIT_S) -> float:
        """Wait for the daemon's end; seconds that it took, less those in which it waited for a busy processor."""
        assert self.process is not None
        began_s, waited_s = boottime_s(), queued_s(self.process.pid)
        last_s = waited_s
        async with asyncio.timeout(limit_s):
            ending = asyncio.ensure_future(self.process.wait())
            while not (await asyncio.wait((ending,), timeout=0.02))[0]:
                last_s = max(last_s, queued_s(self.process.pid))
        return boottime_s() - began_s - (last_s - waited_s)

    # --- Looking -----------------------------------------------------------------------------------------------------

    async def until(self, reached: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:  # noqa: ANN401 - what is waited for
        """Wait until `reached` (plain or not) returns something true; return it. Fails with the log's end."""
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    answer = reached()
                    answer = await answer if asyncio.iscoroutine(answer) else answer
                    if answer:
                        return answer
                    await asyncio.sleep(0.03)
        except TimeoutError:
            tail = "\n".join(json.dumps(line)[:400] for line in self.log()[-25:])
            msg = f"waited {limit_s:.0f} s for {what}; the log ends:\n{tail}"
            raise AssertionError(msg) from None

    def lines(self) -> tuple[Line, ...]:
        """The journal's story so far; nothing where there is no journal to be read."""
        try:
            with read_only(self.journal) as db:
                return recent(db, 5000)
        except JournalError:
            return ()

    def outages(self) -> tuple[OutageRecord, ...]:
        """Every outage that the journal knows, the newest first."""
        with read_only(self.journal) as db:
            return history(db, 100)

    def notes(self, event: str, **wanted: object) -> list[Line]:
        """Notes of that name with these numbers, in order."""
        return [
            line
            for line in self.lines()
            if line.kind == "note" and line.event == event and wanted.items() <= numbers(line).items()
        ]

    async def note(self, event: str, limit_s: float = LIMIT_S, **wanted: object) -> Line:
        """Wait for such a note; return the first."""
        found: list[Line] = await self.until(lambda: self.notes(event, **wanted), f"{event} {wanted}", limit_s)
        return found[0]

    async def phase(self, name: str, limit_s: float = LIMIT_S) -> Line:
        """Wait for that phase to be entered, as the journal tells it."""
        return await self.note("phase_changed", limit_s, new=name)

    def actions(self, kind: str) -> list[Line]:
        """Orders of that kind, in order."""
        return [line for line in self.lines() if line.kind == "action" and line.event == kind]

    def is_ordered(self, id_: str) -> bool:
        """Say whether the journal on the disk holds the order with this id."""
        return any(line.action == id_ for line in self.lines() if line.kind == "action")

    def was_journalled_first(self, trainer: Trainer) -> bool:
        """Say whether the journal held each order before the trainer got it.

        A disk that does not answer within half a second is not waited for, and then the log says so.
        """
        late = bool(self.logged("journal_not_durable"))
        return bool(trainer.orders) and all(order.journalled or late for order in trainer.orders)

    def offs(self) -> list[Off]:
        """Every call of the power-off command."""
        if not self._offs.exists():
            return []
        whole = self._offs.read_text(encoding="ascii").rpartition("\n")[0]  # what follows is being written
        return [Off(**json.loads(line)) for line in whole.splitlines()]

    async def off(self, limit_s: float = LIMIT_S) -> Off:
        """Wait for the power-off; return its first call."""
        found: list[Off] = await self.until(self.offs, "the power-off", limit_s)
        return found[0]

    def log(self) -> list[dict[str, Any]]:
        """What the daemon has logged, over all its lives; what is no JSON stands under "raw"."""
        lines: list[dict[str, Any]] = []
        text = self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""
        for line in text.splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                lines.append({"event": "", "raw": line})
        return lines

    def logged(self, event: str, **wanted: object) -> list[dict[str, Any]]:
        """Log lines of that event with these values."""
        return [line for line in self.log() if line["event"] == event and wanted.items() <= line.items()]

    async def get(self, path: str) -> tuple[int, str]:
        """Ask the read-only port; (0, "") while nobody answers there."""
        limit = aiohttp.ClientTimeout(total=LIMIT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.get(f"http://127.0.0.1:{self.http_port}{path}") as answer,
            ):
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""

    async def status(self) -> dict[str, Any] | None:
        """The daemon's status; None while it does not answer."""
        code, text = await self.get("/api/v1/status")
        return json.loads(text) if code == 200 else None

    async def status_shows(self, holds: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Wait until the status shows it: an answer may be a quarter of a second old."""

        async def shown() -> bool:
            status = await self.status()
            return status is not None and holds(status)

        await self.until(shown, f"the status to show {what}")

    async def metric(self, series: str) -> float | None:
        """The value of one series, written as in the scrape; None where there is none."""
        _, text = await self.get("/metrics")
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        return None

    async def metric_becomes(self, series: str, value: float) -> None:
        """Wait for a metric to have this value: a scrape may be a quarter of a second old."""

        async def has_value() -> bool:
            return await self.metric(series) == value

        await self.until(has_value, f"{series} {value}")

    # --- What holds in every outage ----------------------------------------------------------------------------------

    def no_traceback(self) -> None:
        """Nothing that happened here is a bug: no line of the log carries an exception."""
        traces = [line for line in self.log() if "exception" in line or "Traceback" in line.get("raw", "")]
        assert traces == []

    def one_outage(self) -> str:
        """There was exactly one outage, under one id everywhere; return it."""
        outages = self.outages()
        assert len(outages) == 1, outages
        assert {line.outage for line in self.lines() if line.outage} == {outages[0].id}
        assert {order.event for trainer in self.trainers for order in trainer.orders} <= {outages[0].id}
        return outages[0].id


def queued_s(pid: int) -> float:
    """Seconds in which its first thread could have run and had no processor (Linux, schedstat); 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class PatientUps(SwitchedUps):
    """A UPS whose battery loses nothing while daemon or test wait for a processor: a busy machine empties no battery.

    pids: asks for the processes that count; those that are gone stay counted.
    """

    def __init__(
        self,
        battery: UpsBattery,
        *,
        load: Callable[[], float],
        low_battery_s: float,
        gauge: float,
        pids: Callable[[], Sequence[int]],
    ) -> None:
        self._pids = pids
        self._queued_s: dict[int, float] = {}
        super().__init__(battery, clock=boottime_s, load=load, low_battery_s=low_battery_s, gauge=gauge)

    def look(self) -> None:
        before_s = sum(self._queued_s.values())
        for pid in (os.getpid(), *self._pids()):
            self._queued_s[pid] = max(queued_s(pid), self._queued_s.get(pid, 0.0))
        spared_s = sum(self._queued_s.values()) - before_s
        if not self.utility:
            self._at_s = min(self._clock(), self._at_s + spared_s)
        super().look()


@contextlib.asynccontextmanager
async def rig(
    *trainers: Trainer,
    runtime: tuple[tuple[float, float], ...] = SHORT,
    gauge: float = 1.0,
    low_battery_s: float = 0.1,
    user: SimUser | None = None,
    card: bool = True,
    load: Callable[[], float] | None = None,
) -> AsyncIterator[Rig]:
    """Build the world, and take it down again: the daemon is killed, the folder removed.

    trainers: one native trainer when none is given. gauge: by how much the UPS exaggerates its runtime.
    low_battery_s: reported runtime that it calls low. card: a simulated APC card, which the settings name (v2c, or v3
    for `user`); False: the test brings its own. load: what all hosts on the UPS draw; None: this one is alone.
    """
    with tempfile.TemporaryDirectory(prefix="pg e2e ", dir="/tmp", ignore_cleanup_errors=True) as name:
        async with contextlib.AsyncExitStack() as stack:
            made: list[Rig] = []
            battery = UpsBattery(runtime=runtime, health=0.5, recharge_s=36.0)
            ups = PatientUps(
                battery,
                load=load or (lambda: made[0].load if made else TRAINING),
                low_battery_s=low_battery_s,
                gauge=gauge,
                pids=lambda: (*made[0].pids[-1:], *made[0].between) if made else (),
            )
            world = Rig(Path(name), ups, runtime)
            made.append(world)
            for trainer in trainers or (Trainer(),):
                world.add_trainer(await stack.enter_async_context(trainer))
            if card:
                world.agent = await stack.enter_async_context(SnmpAgent(ups.apc_table, user=user))
                if user is None:
                    world.add_snmp(world.agent.port)
            try:
                yield world
            finally:
                if world.process is not None and world.process.returncode is None:
                    await world.kill()
