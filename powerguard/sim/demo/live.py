"""The live world of `powerguard demo`: a UPS, a trainer and a BMC that speak the real protocols, and the real daemon.

The UPS is an SNMP agent over real battery physics (its load falls when training pauses, and its gauge exaggerates), the
BMC speaks RMCP+, the trainer really trains; the daemon is a process of its own, with settings from a file. Only the
power-off is recorded and not done. The battery lasts seconds and charges in seconds, as a supercapacitor does, so that
the whole story fits into a minute. `serve` is that UPS alone, for a daemon that a newcomer has started
(`powerguard demo --ups`).
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from powerguard.clock import boottime_s
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import JournalError, Line, read_only, recent
from powerguard.effectors.child import clean_environment
from powerguard.sim.bmc import SimBmc
from powerguard.sim.demo.story import Facts, StoryError, folder_of
from powerguard.sim.snmp_agent import SnmpAgent
from powerguard.sim.ups import SimUps, UpsBattery
from powerguard.trainer.store.folders import Found, look
from powerguard.trainer.store.shards import read_shard
from powerguard.trainer.store.store import StoreError

RATING_W = 5400.0
_TRAINING_W, _PAUSED_W = 3240.0, 1944.0
SETTINGS: dict[str, Any] = {
    "mode": "rehearse",
    "host": {"kind": "command", "command": ["true"], "force_after_s": 10},
    "budget": {
        "health": 0.5,
        "reserve_s": 8,
        "recharge_h": 0.01,
        "low_battery_s": 20,
        "utility_stable_s": 5,
    },
}
_READY_S = 60.0
_KILLED_S = 30.0
"""A killed process is gone at once, unless the disk holds it; what it writes into is removed after that."""
_MAX_SOCKET_PATH = 107
"""Bytes that sun_path has room for, unix(7)."""


class LiveStage:
    """One host and its UPS, once they stand. See `live`, and `rack` for several hosts."""

    title = "live: real sockets, real processes, the real daemon"
    real: Sequence[str] = (
        "the daemon (a process, its settings, journal, HTTP and effectors)",
        "SNMP v2c over UDP",
        "the trainer's HTTP endpoint on a unix socket",
        "IPMI 2.0 (RMCP+) over UDP",
        "checkpoints on this disk",
    )
    replaced: Sequence[str] = ("the UPS, the BMC (simulated devices)", "the power-off (recorded, not done)")
    settle_s, dip_s, hold_s, recharge_s, patience_s = 3.0, 3.0, 3.0, 7.0, 60.0
    look_s = 0.1

    def __init__(self, folder: Path, ups: SimUps, bmc: SimBmc, *, draws_w: tuple[float, float]) -> None:
        """Take over the parts. folder: where all files of this host are; draws_w: its draw in training and paused."""
        self.folder = folder
        self.journal = folder / "journal.sqlite"
        self.draws_w = draws_w
        self.is_off = False
        self.paused = False
        self.step: int | None = None
        self._ups = ups
        self._bmc = bmc
        self._cut_at_s = boottime_s()
        self._left_at_off_s: float | None = None
        self._processes: list[tuple[str, asyncio.subprocess.Process]] = []

    @property
    def config(self) -> Path:
        """The daemon's settings."""
        return self.folder / "powerguard.yaml"

    def clock(self) -> float:
        """Seconds since boot, as in the daemon's journal."""
        return boottime_s()

    def set_utility(self, present: bool) -> None:  # noqa: FBT001 - it is what is set
        """Pull the plug, or put it back: then a host that was off starts again."""
        self._ups.utility = present
        if present:
            self.is_off = False
        else:
            self._cut_at_s, self._left_at_off_s = boottime_s(), None

    @property
    def draw_w(self) -> float:
        """Watts that this host draws now; a host whose power-off was ordered draws none."""
        return 0.0 if self.is_off else self.draws_w[self.paused]

    def lines(self) -> Sequence[Line]:
        """Read the daemon's journal, as any user may while it runs."""
        try:
            with read_only(self.journal) as db:
                lines = recent(db, 100)
        except JournalError:
            return ()
        off = any(line.event == "power_off_accepted" and line.at_s > self._cut_at_s for line in lines)
        if off and self._left_at_off_s is None and not self._ups.utility:
            self._left_at_off_s = self._ups.left_s
            self.is_off = True
        return lines

    async def facts(self) -> Facts:
        """Ask the battery, the BMC and the disk themselves."""
        step = await asyncio.to_thread(verified_step, self.folder / "checkpoints")
        return Facts(
            left_s=self._left_at_off_s,
            policy=str(self._bmc.policy),
            checkpoint_step=step,
            step=self.step,
            paused=self.paused,
        )

    def check(self) -> None:
        """Raise StoryError when a process of this world has died."""
        for name, process in self._processes:
            if process.returncode is not None:
                log = self.folder / f"{name}.log"
                tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:] if log.exists() else []
                msg = f"{name} died with status {process.returncode}:\n" + "\n".join(f"    {line}" for line in tail)
                raise StoryError(msg)

    async def start(self, name: str, *argv: str) -> None:
        """Start a process of this world; what it says goes into a file."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=clean_environment()
            )
        self._processes.append((name, process))

    async def stop(self) -> None:
        """End every process of this world, gently and then not."""
        for gentle in (True, False):
            for _, process in self._processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.terminate() if gentle else process.kill()
            for _, process in self._processes:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(12.0 if gentle else _KILLED_S):
                        await process.wait()

    async def measure(self) -> None:
        """Let the BMC measure what this host draws, which is never twice the same to the watt."""
        for number in count():
            await self._bmc.set_watts(round(self.draw_w) + number % 7)
            await rest(1.0)

    async def follow_trainer(self) -> None:
        """Watch the trainer, for its load: this is how the UPS feels that training has paused."""
        connector = aiohttp.UnixConnector(path=str(self.folder / "toy.sock"))
        limit = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                    async with session.get("http://toy/api/v1/status") as answer:
                        body = await answer.json(content_type=None) or {}  # an empty body is None: it is ending
                    paused, step = bool(body.get("paused")), body.get("step")
                    if paused != self.paused:
                        self._ups.look()
                    self.paused, self.step = paused, step if isinstance(step, int) else None
                await rest(0.2)


def verified_step(root: Path) -> int | None:
    """Return the step of the newest checkpoint on the disk, if every byte of it matches its manifest."""
    try:
        found = next((each for each in look(root) if isinstance(each, Found)), None)
        if found is None:
            return None
        for rank in range(found.manifest.ranks):
            read_shard(Path(found.path), found.shard(rank))
    except (OSError, StoreError):
        return None
    return found.step


def free_port() -> int:
    """Return a TCP port of this host that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_secret(path: Path, secret: str) -> None:
    """Write a secret that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secret)


def _write_settings(stage: LiveStage, port: int, bmc: SimBmc, battery: UpsBattery, more: dict[str, Any]) -> None:
    """Write the settings file that an operator would write. JSON is YAML."""
    folder = stage.folder
    community = {"file": str(folder / "community")}
    source = {"kind": "snmp", "host": "127.0.0.1", "port": port, "version": "2c", "community": community}
    table = {round(100 * load): seconds for load, seconds in battery.runtime}
    password = {"file": str(folder / "bmc-password")}
    settings = {
        **SETTINGS,
        "trainers": [{"kind": "http", "name": "toy", "url": f"unix:{folder / 'toy.sock'}", "checkpoint_s": 4}],
        "trainer_sockets": None,
        "checkpoint_dirs": [str(folder / "checkpoints")],
        "bmc": {"kind": "ipmi-lan", "host": bmc.host, "port": bmc.port, "user": "powerguard", "password": password},
        "http": {"port": free_port()},
        "control": {"socket": str(folder / "powerguard.sock")},
        "journal": {"path": str(folder / "journal.sqlite")},
        **more,
        "ups": {"demo": {"sources": [source], "runtime_table": table, **more.get("ups", {})}},
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in settings.items()]
    # JSON keys are strings; loads are numbers.
    text = "\n".join(lines)
    for load in table:
        text = text.replace(f'"{load}": ', f"{load}: ")
    stage.config.write_text(text + "\n", encoding="utf-8")


@contextlib.asynccontextmanager
async def live(keep: Path | None = None) -> AsyncIterator[LiveStage]:
    """Build the world, wait until the daemon watches it, and take it down again. keep: folder to leave behind."""
    with home(keep) as folder:
        # Health 0.6: this battery is worn, and its gauge does not know it.
        battery = UpsBattery(runtime=((0.36, 150.0), (0.60, 60.0)), health=0.6, recharge_s=36.0)
        async with hosts({folder: (_TRAINING_W, _PAUSED_W)}, battery) as (stage,):
            yield stage


@contextlib.contextmanager
def home(keep: Path | None, longest: str = "") -> Iterator[Path]:
    """Make the folder of a demo with short paths. Raises StoryError. longest: name of a folder in it, for its sockets.

    /tmp is short; TMPDIR may not be, and a unix socket's path would have no room.
    """
    if keep is not None and len(os.fsencode(keep.absolute() / longest / "powerguard.sock")) > _MAX_SOCKET_PATH:
        room = f"too long a name for sockets ({_MAX_SOCKET_PATH} bytes with theirs)"
        msg = f"{keep.absolute()}: {room}: give --keep a shorter one"
        raise StoryError(msg)
    with folder_of(keep, within="/tmp") as folder:  # noqa: S108 - a folder of its own below it, closed to others
        yield folder


@contextlib.asynccontextmanager
async def hosts(
    draws_w: Mapping[Path, tuple[float, float]],
    battery: UpsBattery,
    more: Mapping[Path, dict[str, Any]] | None = None,
) -> AsyncIterator[tuple[LiveStage, ...]]:
    """Build a UPS and its hosts, wait until each daemon watches the UPS, and take them down again.

    draws_w: draw of each host in training and paused, by its folder. more: settings of each, besides those of the demo.
    """
    stages: list[LiveStage] = []

    def load() -> float:
        return sum(stage.draw_w for stage in stages) / RATING_W

    ups = SimUps(battery, clock=boottime_s, load=load, low_battery_s=4.0, gauge=1.0 / battery.health, rating_w=RATING_W)
    async with contextlib.AsyncExitStack() as stack:
        agent = await stack.enter_async_context(SnmpAgent(ups.apc_table))
        for folder, watts in draws_w.items():
            password = secrets.token_hex(8)
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            write_secret(folder / "community", "public")
            write_secret(folder / "bmc-password", password)
            bmc = await stack.enter_async_context(SimBmc("powerguard", password))
            stage = LiveStage(folder, ups, bmc, draws_w=watts)
            _write_settings(stage, agent.port, bmc, battery, (more or {}).get(folder, {}))
            stages.append(stage)
        async with _running(stages):
            yield tuple(stages)


@contextlib.asynccontextmanager
async def _running(stages: Sequence[LiveStage]) -> AsyncIterator[None]:
    """Run trainer and daemon of each host; end them all afterwards."""
    is_shared = len(stages) > 1
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(stage.follow_trainer()) for stage in stages]
    tasks += [loop.create_task(stage.measure()) for stage in stages if is_shared]
    python = (sys.executable, "-P", "-m")
    try:
        for stage in stages:
            toy = ("--socket", str(stage.folder / "toy.sock"), "--dir", str(stage.folder / "checkpoints"))
            padding = ("--mb", "24", "--mb-per-s", "8")
            await stage.start("trainer", *python, "powerguard.sim.toy_trainer", *toy, *padding)
        for stage in stages:
            await until(stage, lambda stage=stage: stage.step is not None, "the trainer to train")
            await stage.start("daemon", *python, "powerguard", "run", "--config", str(stage.config))
        for stage in stages:
            socket_path = stage.folder / "powerguard.sock"
            await until(stage, lambda at=socket_path: watches(at), "the daemon to watch the UPS")
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        async with asyncio.TaskGroup() as group:
            for stage in stages:
                group.create_task(stage.stop())


async def until(stage: LiveStage, reached: Any, what: str) -> None:  # noqa: ANN401 - a predicate, plain or not
    """Wait until it is so. Raises StoryError after _READY_S, or when a process of this world has died."""
    try:
        async with asyncio.timeout(_READY_S):
            while True:
                stage.check()
                answer = reached()
                if await answer if asyncio.iscoroutine(answer) else answer:
                    return
                await rest(0.1)
    except TimeoutError:
        msg = f"waited {_READY_S:.0f} s for {what}, in vain; {_last_words(stage.folder)}"
        raise StoryError(msg) from None


def _last_words(folder: Path) -> str:
    """Return how each log of this world ends: the folder may be gone before a person can look into it."""
    endings = []
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        endings.append(f"{log.name} ends with {lines[-1][:200]!r}" if lines else f"{log.name} is empty")
    return ", ".join(endings) or "training was not started"


async def watches(path: Path) -> bool:
    """Say whether the daemon has had a reading and knows its trainer, by its admin socket."""
    sources = (await status(path)).get("sources", [])
    return bool(sources) and all(source.get("up") for source in sources)


async def status(path: Path) -> dict[str, Any]:
    """Return the daemon's status by its admin socket; empty while it does not answer."""
    connector = aiohttp.UnixConnector(path=str(path))
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
        limit = aiohttp.ClientTimeout(total=2.0)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=limit) as session,
            session.get("http://powerguard/api/v1/status") as answer,
        ):
            return dict(await answer.json(content_type=None))
    return {}


_ALONE_LOAD = 0.60
_ALONE_RUNTIME = ((0.25, 420.0), (0.50, 200.0), (1.00, 90.0))
"""Share of the rating, and the seconds that a full battery lasts at it."""
_ALONE_RECHARGE_S = 120.0


async def serve(port: int) -> None:
    """Answer SNMP v2c on 127.0.0.1 as an APC card does, until standard input ends; each line pulls or plugs.

    Raises OSError if the port is taken. The loop must select: epoll takes neither a regular file nor /dev/null.
    """
    battery = UpsBattery(runtime=_ALONE_RUNTIME, recharge_s=_ALONE_RECHARGE_S)
    ups = SimUps(battery, clock=boottime_s, load=lambda: _ALONE_LOAD)
    loop, stdin, ended = asyncio.get_running_loop(), sys.stdin.fileno(), asyncio.Event()

    def entered() -> None:
        read = os.read(stdin, 4096)
        for _ in range(read.count(b"\n")):
            ups.utility = not ups.utility
            print(f"{'utility' if ups.utility else 'on battery'}: charge {100 * ups.charge:.0f} %", flush=True)
        if not read:
            ended.set()

    async with SnmpAgent(ups.apc_table, port=port) as agent:
        print(f"A simulated UPS answers SNMP v2c, community public, on 127.0.0.1 port {agent.port}.")
        print("Enter pulls the plug, and Enter again puts it back. Ctrl-D ends it.", flush=True)
        loop.add_reader(stdin, entered)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(stdin)
