"""Run by test_rack.py in a network namespace of its own, as root: three hosts on one UPS, and every process is real.

Each host is a network namespace with a daemon, a trainer and OpenIPMI's ipmi_sim, and reaches only upsd, over a veth
pair. upsd serves a battery whose load is the sum of what the hosts draw. The daemons are armed; their power-off command
does nothing, and the test ends the processes of that host instead. Argument: the name of the play.
"""

import asyncio
import contextlib
import json
import os
import re
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from powerguard.clock import boottime_s
from powerguard.daemon.journal import Line, read_only, recent
from powerguard.sim.demo import live
from powerguard.sim.demo.story import numbers
from powerguard.sim.ups import SimUps, UpsBattery
from tests.e2e.cable_child import inside, ip, new_namespace
from tests.peers.ipmi import IpmiSim
from tests.peers.nut import UTILITY, Upsd, upsd

TIERS: Final = {"batch": 0, "llm-1": 2, "llm-2": 2}
LOWER: Final = "batch"
UPPER: Final = ("llm-1", "llm-2")
RATING_W: Final = 5400.0
TRAINING_W, PAUSED_W = 900.0, 600.0
RUNTIME: Final = ((0.20, 500.0), (0.50, 200.0))
LIMIT_S: Final = 150.0
PYTHON: Final = (sys.executable, "-P", "-m")


class Host:
    """One host of the rack. number: of its namespace's network; `stage` runs its processes and watches its trainer."""

    def __init__(self, name: str, number: int, folder: Path, ups: SimUps, bmc: IpmiSim) -> None:
        self.name = name
        self.upsd = f"10.78.{number}.1"
        self.bmc = bmc
        self.namespace = new_namespace()
        self.stage = live.LiveStage(folder, ups, bmc, draws_w=(TRAINING_W, PAUSED_W))  # type: ignore[arg-type]
        own = f"in{number}"
        ip("link", "add", f"out{number}", "type", "veth", "peer", "name", own)
        ip("link", "set", own, "netns", f"/proc/{os.getpid()}/fd/{self.namespace}")
        ip("addr", "add", f"{self.upsd}/24", "dev", f"out{number}")
        ip("link", "set", f"out{number}", "up")
        with inside(self.namespace):
            ip("link", "set", "lo", "up")
            ip("addr", "add", f"10.78.{number}.2/24", "dev", own)
            ip("link", "set", own, "up")

    def write_settings(self, port: int, shared: Mapping[str, Any]) -> None:
        """Write what an operator would write. JSON is YAML, but for keys that are numbers."""
        folder = self.stage.folder
        (folder / "checkpoints").mkdir(parents=True)
        live.write_secret(folder / "bmc-password", self.bmc.password)
        touch = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
        settings = {
            **live.SETTINGS,
            "mode": "armed",
            "ups": {
                "rack": {
                    "sources": [{"kind": "nut", "host": self.upsd, "port": port, "name": "dsim"}],
                    "runtime_table": {round(100 * load): seconds for load, seconds in RUNTIME},
                    "rating_w": RATING_W,
                    "shared": dict(shared),
                }
            },
            "shed": {"tier": TIERS[self.name], "highest": max(TIERS.values())},
            "trainers": [{"kind": "http", "name": "toy", "url": f"unix:{folder / 'toy.sock'}", "checkpoint_s": 4}],
            "trainer_sockets": None,
            "checkpoint_dirs": [str(folder / "checkpoints")],
            "bmc": {
                "kind": "ipmi-lan",
                "host": self.bmc.host,
                "port": self.bmc.port,
                "user": self.bmc.user,
                "password": {"file": str(folder / "bmc-password")},
            },
            "signals": {"kind": "helper", "socket": str(folder / "signal.sock")},
            "resume": {"command": [sys.executable, "-I", "-c", touch, str(folder / "resume")]},
            "http": {"port": live.free_port()},
            "control": {"socket": str(folder / "powerguard.sock")},
            "journal": {"path": str(folder / "journal.sqlite")},
        }
        text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
        self.stage.config.write_text(re.sub(r'"(\d+)":', r"\1:", text), encoding="utf-8")

    async def start_trainer(self) -> None:
        folder = self.stage.folder
        where = ("--socket", str(folder / "toy.sock"), "--dir", str(folder / "checkpoints"))
        with inside(self.namespace):
            await self.stage.start("trainer", *PYTHON, "powerguard.sim.toy_trainer", *where, "--mb", "8")

    async def start_daemon(self) -> None:
        with inside(self.namespace):
            await self.stage.start("daemon", *PYTHON, "powerguard", "run", "--config", str(self.stage.config))
        await self.until(lambda: live.watches(self.stage.folder / "powerguard.sock"), "the daemon to watch the UPS")

    async def reboot(self) -> None:
        """Start the daemon in what its journal takes for the next boot: the kernel's boot id cannot be had twice."""
        with closing(sqlite3.connect(self.stage.journal)) as db, db:
            db.execute("UPDATE snapshot SET digest = '', boot_id = 'the-boot-before', at_s = at_s + 86400.0")
        self.stage.is_off = False
        await self.start_daemon()

    async def status(self) -> dict[str, Any]:
        return await live.status(self.stage.folder / "powerguard.sock")

    def lines(self) -> tuple[Line, ...]:
        with read_only(self.stage.journal) as db:
            return recent(db, 5000)

    def find(self, event: str, **wanted: object) -> Line | None:
        """Return the first such line of the journal."""
        return next((x for x in self.lines() if x.event == event and wanted.items() <= numbers(x).items()), None)

    async def saved(self) -> int:
        """Wait until journal, disk and trainer agree on the step that this host has paused at; return it."""

        def steps() -> tuple[object, ...]:
            result = max((numbers(x)["step"] for x in self.lines() if x.event == "checkpoint_durable"), default=None)
            return result, live.verified_step(self.stage.folder / "checkpoints"), self.stage.step

        try:
            await self.until(lambda: self.stage.paused and len(set(steps())) == 1, "one step")
        except AssertionError as error:
            error.add_note(f"journal, disk, trainer: {steps()}, paused: {self.stage.paused}")
            raise
        assert self.stage.step is not None
        return self.stage.step

    async def note(self, event: str, **wanted: object) -> Line:
        """Wait for such a line of the journal."""
        await self.until(lambda: self.find(event, **wanted), f"{event} {wanted}")
        line = self.find(event, **wanted)
        assert line is not None
        return line

    async def until(self, reached: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait until it is so; fails with the end of the daemon's log."""
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    answer = reached()
                    if await answer if asyncio.iscoroutine(answer) else answer:
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            log = (self.stage.folder / "daemon.log").read_text(errors="replace")[-2500:]
            msg = f"{self.name}: waited {limit_s:.0f} s for {what}; the log ends:\n{log}"
            raise AssertionError(msg) from None


class Rack:
    """The hosts, by name, on one battery and one upsd. others_w: draw of what runs no powerguard."""

    def __init__(self, served: Upsd) -> None:
        self.served = served
        self.hosts: dict[str, Host] = {}
        self.others_w = 0.0
        battery = UpsBattery(runtime=RUNTIME, health=0.6, recharge_s=36.0)
        self.ups = SimUps(battery, clock=boottime_s, load=lambda: self.draw_w / RATING_W, low_battery_s=4.0)

    @property
    def draw_w(self) -> float:
        return self.others_w + sum(host.stage.draw_w for host in self.hosts.values())

    async def feed(self) -> None:
        """Let dummy-ups and each BMC report what is drawn, which is never twice the same to the watt."""
        number = 0
        while True:
            number += 1
            ups = self.ups
            self.served.change(
                {
                    "ups.status": "OL" if ups.utility else "OB DISCHRG",
                    "ups.load": f"{100 * ups.load:.1f}",
                    "ups.realpower": f"{self.draw_w:.0f}",
                    "battery.charge": f"{100 * ups.charge:.1f}",
                    "battery.runtime": f"{ups.runtime_s:.0f}",
                    "input.voltage": "230" if ups.utility else "0",
                }
            )
            for host in self.hosts.values():
                host.bmc.draw(host.stage.draw_w + number % 7)
            await asyncio.sleep(0.5)

    def none_signalled(self) -> None:
        for host in self.hosts.values():
            assert [x for x in host.lines() if x.event in ("StopTrainer", "TerminateTrainer")] == []
            assert "Traceback" not in (host.stage.folder / "daemon.log").read_text(errors="replace")


@contextlib.asynccontextmanager
async def rack(shared: Mapping[str, Any]) -> AsyncIterator[Rack]:
    """Build it, wait until each daemon knows what its host draws, and take it down again."""
    ip("link", "set", "lo", "up")
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pg-rack-", dir="/tmp")))
        served = await stack.enter_async_context(upsd(values=UTILITY, address="0.0.0.0"))
        made = Rack(served)
        for number, name in enumerate(TIERS):
            bmc = IpmiSim(plugin=True)
            host = Host(name, number, folder / name, made.ups, bmc)
            with inside(host.namespace):
                await stack.enter_async_context(bmc)
            host.write_settings(served.port, shared)
            made.hosts[name] = host
            stack.push_async_callback(host.stage.stop)
        tasks = [asyncio.create_task(made.feed())]
        tasks += [asyncio.create_task(host.stage.follow_trainer()) for host in made.hosts.values()]
        try:
            for host in made.hosts.values():
                await host.start_trainer()
            for host in made.hosts.values():
                await host.until(lambda host=host: host.stage.step is not None, "the trainer to train")
                await host.start_daemon()
            for host in made.hosts.values():
                await host.until(lambda host=host: _own(host, "bmc"), "the BMC's power reading")
            yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _own(host: Host, source: str) -> bool:
    return ((await host.status()).get("own_load") or {}).get("source") == source


async def story() -> None:
    """The lower tier makes room and comes back by a boot; the upper one holds, and goes on where it paused."""
    async with rack({"hosts": len(TIERS)}) as made:
        batch = made.hosts[LOWER]
        upper = [made.hosts[name] for name in UPPER]
        made.ups.utility = False
        saved: dict[str, int] = {}
        for host in (batch, *upper):
            began = numbers(await host.note("phase_changed", new="on_battery"))
            assert began["own_from"] == "bmc"
            assert abs(began["own_w"] - TRAINING_W) < 10.0
        first = await batch.note("phase_changed", new="emergency_checkpoint")
        saved[LOWER] = await batch.saved()
        off = await batch.note("power_off_accepted")
        await batch.stage.stop()
        batch.stage.is_off, batch.stage.paused = True, False
        assert batch.bmc.policy == "always-on"
        for host in upper:
            assert first.at_s < (await host.note("phase_changed", new="emergency_checkpoint")).at_s
            held = await host.note("phase_changed", new="holding")
            assert held.at_s > first.at_s
            assert host.find("phase_changed", new="shutdown") is None
            saved[host.name] = await host.saved()

        made.ups.utility = True
        (batch.stage.folder / "toy.sock").unlink(missing_ok=True)
        await batch.reboot()
        for host in upper:
            ended = await host.note("outage_ended")
            assert numbers(ended)["outcome"] == "resumed_in_place"
            assert host.find("power_off_accepted") is None
            await host.until(lambda host=host: (host.stage.step or 0) > saved[host.name], "training to go on")
        opened = await batch.note("gate_opened")
        await batch.until((batch.stage.folder / "resume").exists, "the resume command")
        await batch.start_trainer()
        await batch.until(lambda: (batch.stage.step or 0) > saved[LOWER], "training to go on from its checkpoint")
        assert numbers(await batch.note("outage_ended"))["outcome"] == "clean_shutdown"
        assert off.at_s < ended.at_s
        assert all((host.find("outage_ended") or opened).at_s < opened.at_s for host in upper)
        made.none_signalled()


NEIGHBOUR_W: Final = 1500.0


async def trouble() -> None:
    """In one outage upsd is restarted, a BMC answers after 4 s, and a neighbour appears: all are saved."""
    async with rack({"hosts": len(TIERS)}) as made:
        hosts = tuple(made.hosts.values())
        _, slow, other = hosts
        leaving = [asyncio.create_task(_leave(made, host)) for host in hosts]
        made.ups.utility = False
        for host in hosts:
            await host.note("phase_changed", new="on_battery")
        await made.served.kill()
        await made.served.start()
        for host in hosts:
            await host.until(lambda host=host: _reads_upsd(host), "upsd's first answer after its restart")
        slow.bmc.misbehave(delay_ms=4000)
        for host in (slow, other):
            await host.note("phase_changed", new="emergency_checkpoint")
            await host.note("phase_changed", new="holding")
        await slow.until(lambda: _own(slow, "hosts"), "the next source")
        passed_over = (await slow.status())["own_load"]["passed_over"]
        assert [each["source"] for each in passed_over] == ["bmc"]
        assert passed_over[0]["because"].startswith("no reading for")
        assert await _own(other, "bmc")

        at_s = boottime_s()
        made.others_w = NEIGHBOUR_W
        left_s = dict(zip(made.hosts, await asyncio.gather(*leaving), strict=True))
        for host in hosts:
            assert left_s[host.name] > 0.0, "the battery outlasts the host"
        offs = [host.find("power_off_accepted") for host in (slow, other)]
        assert all(off is not None and off.at_s > at_s for off in offs)
        made.none_signalled()


async def _reads_upsd(host: Host) -> bool:
    (source,) = (await host.status())["sources"]
    return bool(source["up"])


async def _leave(made: Rack, host: Host) -> float:
    """Wait until a host powers off with its training saved; end its processes. Return the charge that is left."""
    await host.note("phase_changed", new="emergency_checkpoint")
    await host.saved()
    await host.note("power_off_accepted")
    await host.stage.stop()
    host.stage.is_off, host.stage.paused = True, False
    return made.ups.charge


if __name__ == "__main__":
    asyncio.run({"story": story, "trouble": trouble}[sys.argv[1]]())
