"""The socket level: small outages in real time, with the daemon as a process and every wire for real.

The UPS is an SNMP agent over UDP, the trainer really trains and is reached over HTTP on a unix socket, the BMC speaks
RMCP+; the daemon is killed with SIGKILL. Batteries last seconds, so an outage does too. The power-off is recorded.

Of the ways back the order to cut an output goes to the UPS's card by SETs, and the BMC's policy is set and put back
over its wire. Nobody comes back here: an outage ends with the power-off, and which way would have brought the host back
is for the other levels.
"""

import asyncio
import contextlib
import json
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

from powerguard.clock import boottime_s
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import JournalError, Line, history, read_only, recent
from powerguard.effectors.bmc.ipmi import PowerRestorePolicy
from powerguard.sim.bmc import Faults, SimBmc
from powerguard.sim.demo import LiveStage, free_port, until, verified_step, watches, write_secret
from powerguard.sim.snmp_agent import Fault, SnmpAgent
from powerguard.sim.snmp_ber import SimValue
from powerguard.sim.story import StoryError, numbers
from powerguard.sim.ups import Battery, SimUps
from powerguard.sim.ups_output import XUPS, SimCard, U
from powerguard.sim.world.many import Tell
from powerguard.sim.world.report import Options, Sample
from powerguard.sim.world.site import ReturnSite
from powerguard.sim.world.streams import stream, uniform

AT_ONCE: Final = 3
_TRAINING_LOAD, _PAUSED_LOAD = 0.60, 0.36
_TABLE: Final = {36: 75.0, 60: 30.0}
_HEALTH: Final = 0.65
_FORCE_S: Final = 10.0
_NEWS_S: Final = 4.0
_END_S: Final = 60.0
_GUARD_S: Final = 30.0
_HAIR_S: Final = 2.0
_FAULTS: Final = (Fault.DROP, Fault.LOSS, Fault.LATE, Fault.GARBAGE, Fault.GEN_ERR, Fault.NULLS, Fault.TEXT)


_HONEST: Final = ("--mb-per-s", "8")
_SLOW: Final = ("--mb-per-s", "2.5")
_FULL: Final = ("--full",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What happens in one outage. Times are seconds since the first cut.

    cuts: (from, to). kills: (when, until the daemon is started again). spoiled: (from, to, how) of the UPS's card.
    bmc: how it misbehaves. disk: the trainer's, as words for the toy: honest, slow, or full. output: this host may have
    the UPS cut its output. bracket: the BMC's policy is set for the outage only. armed: the host is told to go off.
    """

    cuts: tuple[tuple[float, float], ...]
    kills: tuple[tuple[float, float], ...] = ()
    spoiled: tuple[tuple[float, float, Fault], ...] = ()
    bmc: Faults = field(default_factory=Faults)
    disk: tuple[str, ...] = _HONEST
    output: bool = False
    bracket: bool = False
    armed: bool = False


def draw(seed: int, *, faults: bool, returns: ReturnSite | None = None) -> Script:
    """Draw one outage: a dip, a hold or a shutdown, perhaps twice, and what breaks. returns: None: no ways."""
    script, chance = _drawn(seed, faults=faults), stream(seed, "wired ways")
    if returns is None or returns == ReturnSite():
        return script
    output, bracket, dry_run = (chance.random() for _ in range(3))
    armed = dry_run >= returns.dry_run_share
    return replace(
        script,
        # A host that goes off is not there for a second cut.
        cuts=script.cuts[:1] if armed else script.cuts,
        output=output < returns.output_share,
        bracket=bracket < returns.bracket_share,
        armed=armed,
    )


def _drawn(seed: int, *, faults: bool) -> Script:
    lengths = stream(seed, "wired cuts")
    cuts = [(0.0, _length_s(lengths))]
    if lengths.random() < 0.25:
        begin_s = cuts[0][1] + uniform(lengths, (6.0, 15.0))
        cuts.append((begin_s, begin_s + _length_s(lengths)))
    if not faults:
        return Script(cuts=tuple(cuts))
    return Script(
        cuts=tuple(cuts),
        kills=_kills(seed),
        spoiled=_spoiled(seed),
        bmc=_bmc(stream(seed, "wired bmc")),
        disk=_disk(stream(seed, "wired disk")),
    )


def _length_s(chance: Random) -> float:
    return uniform(chance, chance.choice(((2.0, 3.5), (8.0, 10.0), (15.0, 18.0))))


def _kills(seed: int) -> tuple[tuple[float, float], ...]:
    chance = stream(seed, "wired kills")
    return ((uniform(chance, (0.5, 16.0)), uniform(chance, (0.0, 1.5))),) if chance.random() < 0.4 else ()


def _spoiled(seed: int) -> tuple[tuple[float, float, Fault], ...]:
    chance = stream(seed, "wired card")
    if chance.random() >= 0.4:
        return ()
    begin_s = uniform(chance, (-2.0, 14.0))
    return ((begin_s, begin_s + uniform(chance, (0.5, 5.0)), chance.choice(_FAULTS)),)


def _bmc(chance: Random) -> Faults:
    which = chance.random()
    if which < 0.1:
        return Faults(refuse=0xC1)
    if which < 0.2:
        return Faults(lie=True)
    if which < 0.3:
        return Faults(dead=True)
    return Faults(busy=1) if which < 0.4 else Faults()


def _disk(chance: Random) -> tuple[str, ...]:
    which = chance.random()
    if which < 0.15:
        return _FULL
    return _SLOW if which < 0.4 else _HONEST


class Stage(LiveStage):
    """The world of one outage. stood_s: for how long training has stood still."""

    stood_s = 0.0

    @property
    def policy(self) -> str:
        """Policy that the BMC holds."""
        return self._bmc.policy

    async def run_daemon(self, config: Path) -> None:
        """Start the daemon, and wait until it watches."""
        await self.start("daemon", sys.executable, "-P", "-m", "powerguard", "run", "--config", str(config))
        await until(self, lambda: watches(self.folder / "powerguard.sock"), "the daemon to watch the UPS")

    async def kill_daemon(self) -> None:
        """SIGKILL."""
        for name, process in self._processes:
            if name == "daemon" and process.returncode is None:
                process.send_signal(signal.SIGKILL)
                await process.wait()
        self._processes = [(name, process) for name, process in self._processes if name != "daemon"]

    async def count(self) -> None:
        """Count the seconds in which training stands."""
        while True:
            began_s = boottime_s()
            await rest(0.2)
            if self.paused:
                self.stood_s += boottime_s() - began_s


def _settings(folder: Path, agent: SnmpAgent, bmc: SimBmc, script: Script) -> Path:
    """Write the settings file. JSON is YAML."""
    source = {
        "kind": "snmp",
        "host": "127.0.0.1",
        "port": agent.port,
        "version": "2c",
        "community": {"file": str(folder / "community")},
    }
    password = {"file": str(folder / "bmc-password")}
    ups: dict[str, Any] = {"sources": [source], "runtime_table": "TABLE"}
    if script.output:
        writes = {"file": str(folder / "community-that-writes")}
        ups["output_off"] = {"by": "snmp", "dedicated_network": True, "community": writes}
    settings: dict[str, Any] = {
        "mode": "armed" if script.armed else "rehearse",
        "host": {"kind": "command", "command": ["true", "{deadline_s}"], "force_after_s": _FORCE_S},
        "budget": {"health": 0.5, "reserve_s": 2, "recharge_h": 0.01, "low_battery_s": 20, "utility_stable_s": 3},
        "ups": {"sim": ups},
        "trainers": [{"kind": "http", "name": "toy", "url": f"unix:{folder / 'toy.sock'}", "checkpoint_s": 2}],
        "trainer_sockets": None,
        "checkpoint_dirs": [str(folder / "checkpoints")],
        "bmc": {
            "kind": "ipmi-lan",
            "host": bmc.host,
            "port": bmc.port,
            "user": "powerguard",
            "password": password,
            "policy": "bracket" if script.bracket else "ensure",
        },
        "http": {"port": free_port()},
        "control": {"socket": str(folder / "powerguard.sock")},
        "journal": {"path": str(folder / "journal.sqlite")},
    }
    # JSON keys are strings; loads are numbers.
    table = "{" + ", ".join(f"{load}: {seconds:g}" for load, seconds in _TABLE.items()) + "}"
    text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in settings.items()).replace('"TABLE"', table)
    path = folder / "powerguard.yaml"
    path.write_text(text + "\n", encoding="utf-8")
    return path


class Outage:
    """One outage over sockets. violations: what was broken, in words."""

    def __init__(self, seed: int, script: Script, folder: Path) -> None:
        """folder: with a short name, for its sockets."""
        self.seed, self.script, self.folder = seed, script, folder
        self.violations: list[str] = []
        self.began_s = 0.0
        self.died_at_s: float | None = None
        self.left_at_off_s: float | None = None
        self.password = secrets.token_hex(8)
        self.sets_s: list[float] = []
        """When a SET came by which an output was told to go off."""
        self._card: SimCard | None = None

    async def play(self) -> Sample:
        """Play it."""
        try:
            async with self._world() as (stage, ups, agent, config):
                await rest(1.5)
                self.began_s = boottime_s()
                watching = asyncio.get_running_loop().create_task(self._watch(stage, ups))
                try:
                    await self._act(stage, ups, agent, config)
                    await self._until_over(stage)
                finally:
                    watching.cancel()
                await self._look_back()
                self._look_at_ways(stage)
                stood_s = stage.stood_s
        except StoryError as error:
            self.violations.append(f"world_broke: {error}")
            stood_s = 0.0
        return self._sample(stood_s)

    @contextlib.asynccontextmanager
    async def _world(self) -> AsyncIterator[tuple[Stage, SimUps, SnmpAgent, Path]]:
        folder, stages = self.folder, list[Stage]()

        def load() -> float:
            return _PAUSED_LOAD if stages and stages[0].paused else _TRAINING_LOAD

        runtime = tuple((load_pct / 100.0, seconds) for load_pct, seconds in sorted(_TABLE.items()))
        battery = Battery(runtime=runtime, health=_HEALTH, recharge_s=20.0)
        ups = SimUps(battery, clock=boottime_s, load=load, low_battery_s=4.0, gauge=1.0 / _HEALTH)
        write_secret(folder / "community", "public")
        write_secret(folder / "community-that-writes", "private")
        write_secret(folder / "bmc-password", self.password)
        (folder / "checkpoints").mkdir()
        card = self._card = SimCard(
            ups.output, boottime_s, utility=lambda: ups.utility, lacks=frozenset({XUPS, U, "1.3.6.1.2.1.1."})
        )

        def values() -> Mapping[str, SimValue]:
            return {**card.values(), **ups.apc_table()} if self.script.output else ups.apc_table()

        def take(name: str, value: SimValue) -> bool | int:
            before = ups.output.off_at_s
            taken = card.take(name, value)
            if ups.output.off_at_s not in (None, before):
                self.sets_s.append(boottime_s())
            return taken

        async with (
            SnmpAgent(values, seed=self.seed, on_set=take) as agent,
            SimBmc("powerguard", self.password) as bmc,
        ):
            await bmc.set_faults(self.script.bmc)
            stage = Stage(folder, ups, bmc)
            stages.append(stage)
            config = _settings(folder, agent, bmc, self.script)
            tasks = [asyncio.get_running_loop().create_task(each) for each in (stage.follow_trainer(), stage.count())]
            try:
                toy = ["--socket", str(folder / "toy.sock"), "--dir", str(folder / "checkpoints")]
                padding = ["--mb", "8", "--step-ms", "50", *self.script.disk]
                await stage.start("trainer", sys.executable, "-P", "-m", "powerguard.sim.toy_trainer", *toy, *padding)
                await until(stage, lambda: stage.step is not None, "the trainer to train")
                await stage.run_daemon(config)
                yield stage, ups, agent, config
            finally:
                for task in tasks:
                    task.cancel()
                await stage.stop()

    # --- What happens ------------------------------------------------------------------------------------------------

    async def _act(self, stage: Stage, ups: SimUps, agent: SnmpAgent, config: Path) -> None:
        """Let everything of the script happen at its time."""

        def utility(present: bool) -> Callable[[], None]:  # noqa: FBT001 - it is what is set
            return lambda: setattr(ups, "utility", present)

        def spoil(fault: Fault) -> Callable[[], None]:
            return lambda: setattr(agent, "fault", fault)

        todo: list[tuple[float, Callable[[], Any]]] = []
        for begin_s, end_s in self.script.cuts:
            todo += [(begin_s, utility(False)), (end_s, utility(True))]
        for begin_s, end_s, fault in self.script.spoiled:
            todo += [(begin_s, spoil(fault)), (end_s, spoil(Fault.NONE))]
        for kill_s, away_s in self.script.kills:
            todo += [(kill_s, stage.kill_daemon), (kill_s + away_s, lambda: stage.run_daemon(config))]
        starting: list[asyncio.Task[Any]] = []
        for when_s, do in sorted(todo, key=lambda each: each[0]):
            await rest(max(0.0, self.began_s + max(0.0, when_s) - boottime_s()))
            done = do()
            if asyncio.iscoroutine(done):  # A start takes seconds, in which the world goes on.
                starting.append(asyncio.get_running_loop().create_task(done))
        for start in starting:
            await start

    async def _watch(self, stage: Stage, ups: SimUps) -> None:
        """Notice when the battery is dead, and what was left when the power-off was recorded."""
        while True:
            await rest(0.1)
            ups.look()
            if not ups.alive and self.died_at_s is None:
                self.died_at_s = boottime_s()
            if self.left_at_off_s is None and any(line.event == "power_off_accepted" for line in stage.lines()):
                self.left_at_off_s = ups.left_s

    async def _until_over(self, stage: Stage) -> None:
        """Wait until the journal knows no open outage, and training goes on."""
        calm = 0
        try:
            async with asyncio.timeout(_END_S):
                while calm < 10:
                    await rest(0.2)
                    stage.check()
                    over = self.left_at_off_s is not None if self._is_latched(stage) else not stage.paused
                    is_open = self._open() and not self._is_latched(stage)
                    calm = calm + 1 if over and not is_open else 0
        except TimeoutError:
            what = "training stands" if stage.paused else "the outage is still open"
            self._broke("never_ended", f"{_END_S:.0f} s after utility was back for good {what}")

    # --- What must hold ----------------------------------------------------------------------------------------------

    def _broke(self, name: str, what: str) -> None:
        self.violations.append(f"{name}: {what}")

    def _is_latched(self, stage: Stage) -> bool:
        """Say whether this host goes off in earnest, and for good."""
        return self.script.armed and any(line.event == "power_off_ordered" for line in stage.lines())

    def _look_at_ways(self, stage: Stage) -> None:
        """What was told to cut was told once, by the commit alone, and no sooner than the host may be on."""
        latched = self._is_latched(stage)
        if self.sets_s and not latched and not self.script.kills:
            self._broke("cut_without_commit", "the output was told to go off, and no power-off was ordered")
        if self._card is not None and self._card.sets and not self.script.armed:
            self._broke("armed_in_dry_run", f"{self._card.sets[-1][0]} was set")
        if len(self.sets_s) > 1:
            self._broke("output_sent_twice", f"{len(self.sets_s)} times")
        if self.sets_s and latched and not self.script.kills:
            cut_s = None if self._card is None else self._card.output.off_at_s
            off = [line.at_s for line in stage.lines() if line.event == "power_off_ordered"]
            if cut_s is not None and cut_s < off[0] + _FORCE_S + _GUARD_S - _HAIR_S:
                self._broke("cut_too_early", f"{cut_s - off[0]:.1f} s after the power-off was ordered")
        is_well = self.script.bmc == Faults()
        if self.script.bracket and not latched and is_well and stage.policy != PowerRestorePolicy.LAST_STATE:
            self._broke("policy_left", f"the BMC's policy is {stage.policy}")

    def _open(self) -> bool:
        with contextlib.suppress(JournalError), read_only(self.folder / "journal.sqlite") as db:
            return any(outage.ended_wall is None for outage in history(db, 10))
        return True

    def _journal(self) -> tuple[Line, ...]:
        with read_only(self.folder / "journal.sqlite") as db:
            return tuple(recent(db, 100_000))

    async def _look_back(self) -> None:
        lines = self._journal()
        notes = [line for line in lines if line.kind == "note"]
        is_long = any(end_s - begin_s > _NEWS_S for begin_s, end_s in self.script.cuts)
        if is_long and not self._was_hindered() and not any(line.event == "outage_began" for line in notes):
            self._broke("unnoticed", "utility was gone, and no outage began")
        for line in notes:
            # The latch, not its order: a dead BMC takes its five seconds in between, and nothing undoes a latch.
            latched = line.event == "phase_changed" and numbers(line)["new"] == "shutdown"
            if latched and self._utility_for_s(line.at_s - self.began_s) > _NEWS_S:
                self._broke("latched_on_utility", f"latched {line.at_s - self.began_s:.1f} s after the first cut")
            if line.event == "outage_began" and line.at_s < self.began_s:
                self._broke("outage_without_cut", "an outage began before utility was gone")
        self._look_at_checkpoints(notes, await asyncio.to_thread(verified_step, self.folder / "checkpoints"))
        answered = {line.action for line in lines if line.kind == "outcome"}
        killed = bool(self.script.kills)
        left = [line.event for line in lines if line.kind == "action" and line.action not in answered]
        if left and not killed:
            self._broke("left_running", f"without an outcome: {', '.join(left)}")
        if self.died_at_s is not None and self.left_at_off_s is None and not self._was_hindered():
            self._broke("planning_dirty", "the battery was empty, and the power-off had not been ordered")
        if self.left_at_off_s is not None and self.left_at_off_s <= 0.0 and not self._was_hindered():
            self._broke("planning_dirty", "the power-off was ordered on an empty battery")
        for log in ("daemon.log", "trainer.log"):
            if self.password in (self.folder / log).read_text(encoding="utf-8", errors="replace"):
                self._broke("secret_told", f"{log} holds the BMC's password")

    def _look_at_checkpoints(self, notes: list[Line], on_disk: int | None) -> None:
        """What was called durable must be on the disk, whole."""
        told = [line.payload for line in notes if line.event == "checkpoint_durable"]
        steps = [step for payload in told for step in _steps(payload)]
        if steps and (on_disk is None or on_disk < max(steps)):
            self._broke("checkpoint_lost", f"step {max(steps)} was called durable, the disk holds {on_disk}")

    def _was_hindered(self) -> bool:
        """The daemon was dead, or heard nothing: a battery of seconds does not wait for it to come back."""
        return bool(self.script.kills or self.script.spoiled)

    def _utility_for_s(self, at_s: float) -> float:
        """For how long utility had been there; 0 while it was gone."""
        ends = [end_s for begin_s, end_s in self.script.cuts if begin_s <= at_s]
        return 0.0 if not ends else max(0.0, at_s - ends[-1])

    def _sample(self, stood_s: float) -> Sample:
        dirty = self.died_at_s is not None and self.left_at_off_s is None
        planning = any(violation.startswith("planning_dirty") for violation in self.violations)
        return Sample(
            seed=self.seed,
            excess_s=stood_s,
            loss_s=stood_s,
            rollback_s=0.0,
            planning_dirty=planning,
            physics_dirty=dirty and not planning,
            shutdown=self.left_at_off_s is not None,
            needless=False,
            stranded=False,
            violations=tuple(self.violations),
        )


def _steps(payload: Any) -> list[int]:  # noqa: ANN401 - JSON
    """Return the steps that a note tells."""
    step = payload.get("step")
    if step is None:
        step = dict(payload.get("numbers") or ()).get("step")
    return [step] if isinstance(step, int) else []


async def _play(seed: int, *, faults: bool, returns: ReturnSite | None) -> Sample:
    # Short: a unix socket's path has room for 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pg-wired-", dir="/tmp") as folder:
        return await Outage(seed, draw(seed, faults=faults, returns=returns), Path(folder)).play()


async def _play_all(options: Options, at_once: int, tell: Tell, returns: ReturnSite | None) -> list[Sample]:
    samples: list[Sample] = []
    todo = iter(range(options.seed, options.seed + options.outages))

    async def worker() -> None:
        for seed in todo:
            samples.append(await _play(seed, faults=options.faults, returns=returns))
            tell(len(samples))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(at_once, options.outages)):
            tasks.create_task(worker())
    return samples


def play_many(
    options: Options,
    *,
    at_once: int | None = None,
    tell: Tell = lambda _: None,
    returns: ReturnSite | None = None,
) -> list[Sample]:
    """Play all outages of a run in real time, at_once of them side by side; None: AT_ONCE. returns: as for `draw`."""
    return asyncio.run(_play_all(options, at_once or AT_ONCE, tell, returns))
