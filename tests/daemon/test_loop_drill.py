"""A drill through the real loop, journal and bulkhead: killed, stopped or overtaken at any stage, nothing stays."""

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.model.actions import (
    Action,
    CapPower,
    Conduct,
    Detail,
    EnsurePolicy,
    PauseTrainer,
    RestorePower,
    ResumeTrainer,
    SyncFilesystems,
    TriggerCheckpoint,
)
from powerguard.core.model.events import StartDrill, StopDrill, TrainerSeen
from powerguard.core.model.policy import DrillReport
from powerguard.core.model.state import Holding, OnBattery, Online
from powerguard.daemon.attempt import rest
from powerguard.daemon.loop import Components, Loop
from tests.daemon.looped import World, in_virtual_time, until


class Training:
    """A trainer and its GPUs: they stand still and are capped by what reaches them, whoever has sent it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stands = False
        self.capped = False
        self.reaches_s = 0.2
        self.asked: list[Action] = []

    async def carry_out(self, action: Action) -> Detail:
        """Reach them in the middle of the time that it takes: what is cancelled before has not reached them."""
        self.asked.append(action)
        self.world.ups.look()
        await rest(self.reaches_s)
        match action:
            case TriggerCheckpoint():
                self.stands = self.stands or action.after is not Conduct.CONTINUE
                await rest(3.0)
                return (("step", 7), ("at_paused_step", True), ("paused", self.stands), ("verified", True))
            case PauseTrainer():
                self.stands = True
                await rest(self.reaches_s)
                return (("native", True), ("paused", True), ("step", 7))
            case ResumeTrainer():
                self.stands = False
                return (("native", True), ("resumed", True), ("step", 7))
            case _:
                self.capped = isinstance(action, CapPower)
                return ()

    def load(self) -> float:
        return 0.4 if self.stands else 0.6 if self.capped else 0.75


class DrillWorld(World):
    """A world whose load is what its training draws, and whose effectors reach that world.training."""

    @functools.cached_property
    def training(self) -> Training:
        return Training(self)

    def load_now(self) -> float:
        return self.training.load()

    def parts(self, **changes: Any) -> Components:  # noqa: ANN401 - the shape of dataclasses.replace
        made = super().parts()
        kinds = (TriggerCheckpoint, PauseTrainer, ResumeTrainer, CapPower, RestorePower)
        return replace(made, effectors={**made.effectors, **dict.fromkeys(kinds, self.training)}, **changes)


def made(path: Path) -> DrillWorld:
    world = DrillWorld(path)
    world.policy = replace(world.policy, cap_share=0.7)
    world.disks.takes_s = 1.0
    return world


async def begin(daemon: Loop, *scopes: str, witness: str = "simulated") -> None:
    await until(lambda: daemon.clock() - daemon.state.feed.since_s >= 11.0, 60.0)
    daemon.submit(
        TrainerSeen(at_s=daemon.clock(), trainer="llm", alive=True, conduct=Conduct.PAUSE, step=1, durable_age_s=10.0)
    )
    daemon.submit(StartDrill(at_s=daemon.clock(), who="alice", scopes=scopes, witness=witness))
    await until(lambda: daemon.state.drill is not None, 5.0)


def stage_of(daemon: Loop) -> str:
    return "" if daemon.state.drill is None else daemon.state.drill.stage


def report(daemon: Loop) -> DrillReport:
    result = daemon.state.learned.drill
    assert result is not None
    return result


@in_virtual_time
async def test_a_full_drill_measures_and_puts_everything_back(tmp_path: Path) -> None:
    world = made(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await begin(daemon, "full")
        await until(lambda: daemon.state.drill is None, 300.0)
        summary = report(daemon)
        assert (summary.result, summary.because) == ("passed", "every stage was carried out")
        figures = dict(summary.figures)
        assert (figures["load_before"], figures["load_paused"]) == (0.75, 0.4)
        assert figures["policy_verified"] is True
        assert figures["power_off_grade"] == "full"
        assert isinstance(daemon.state.phase, Online)
    assert not world.training.stands
    assert not world.training.capped
    assert world.host.asked == [], "nothing was powered off"
    assert [type(action) for action in world.disks.actions] == [SyncFilesystems]
    assert any(isinstance(action, EnsurePolicy) and not action.outage for action in world.bmc.actions)
    assert world.notes().count("drill_ended") == 1
    assert world.outages() == (), "a drill is no outage"


@pytest.mark.parametrize("after_s", [0.0, 0.3])
@pytest.mark.parametrize("stage", ["baseline", "checkpoint", "pause", "resume", "cap", "restore", "policy", "sync"])
def test_killed_at_any_stage(tmp_path: Path, stage: str, after_s: float) -> None:
    """kill -9 as soon as a stage begins, and a little later: the next daemon puts everything back, and tells."""

    @in_virtual_time
    async def play() -> None:
        world = made(tmp_path / "journal.sqlite")
        async with world.running(kill=True) as daemon:
            await begin(daemon, "full")
            async with asyncio.timeout(150.0):
                while stage_of(daemon) != stage:
                    await rest(0.02)
            await rest(after_s)
            cut = daemon.state.drill is not None
        await rest(2.0)
        async with world.running() as daemon:
            await until(lambda: daemon.state.drill is None and daemon.state.cap is None, 120.0)
            assert report(daemon).result == ("interrupted" if cut else "passed")
            assert not any(trainer.pause_ordered for trainer in daemon.state.trainers)
            await rest(1.0)
        assert not world.training.stands
        assert not world.training.capped

    play()


@pytest.mark.parametrize("stage", ["checkpoint", "pause", "cap"])
def test_killed_twice(tmp_path: Path, stage: str) -> None:
    """The daemon that puts things back is killed, too: the third one still knows."""

    @in_virtual_time
    async def play() -> None:
        world = made(tmp_path / "journal.sqlite")
        async with world.running(kill=True) as daemon:
            await begin(daemon, "full")
            await until(lambda: stage_of(daemon) == stage, 120.0)
            await rest(0.5)
        for _ in range(2):
            async with world.running(kill=True) as daemon:
                await rest(0.05)
        async with world.running() as daemon:
            await until(lambda: daemon.state.drill is None and daemon.state.cap is None, 120.0)
            assert report(daemon).result == "interrupted"
        assert (world.training.stands, world.training.capped) == (False, False)
        assert world.notes().count("drill_ended") == 1

    play()


@pytest.mark.parametrize("stage", ["checkpoint", "pause", "cap"])
def test_stopped_like_a_service(tmp_path: Path, stage: str) -> None:
    """systemctl stop: training goes on before the daemon is gone; nobody else would let it."""

    @in_virtual_time
    async def play() -> None:
        world = made(tmp_path / "journal.sqlite")
        async with world.running() as daemon:
            await begin(daemon, "full")
            await until(lambda: stage_of(daemon) == stage, 120.0)
            await rest(1.0)
            daemon.stop_for_signal(host_stopping=False)
        assert (world.training.stands, world.training.capped) == (False, False)

    play()


@in_virtual_time
async def test_stopped_by_the_operator_before_the_pause_arrives(tmp_path: Path) -> None:
    """A pause that takes long to arrive is waited for, and undone then."""
    world = made(tmp_path / "journal.sqlite")
    world.training.reaches_s = 4.0
    async with world.running() as daemon:
        await begin(daemon, "pause")
        await until(lambda: stage_of(daemon) == "pause", 60.0)
        await rest(1.0)
        daemon.submit(StopDrill(at_s=daemon.clock(), who="alice"))
        await until(lambda: daemon.state.drill is None, 60.0)
        assert report(daemon).because == "stopped by alice"
    assert not world.training.stands
    assert sum(isinstance(action, ResumeTrainer) for action in world.training.asked) >= 2


@in_virtual_time
async def test_a_real_outage_comes_first(tmp_path: Path) -> None:
    """The plug is pulled by nobody who asked: the drill ends at once, training goes on until the outage's own rule says
    pause, the outage holds, and all go on after it."""
    world = made(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await begin(daemon, "pause")
        await until(lambda: stage_of(daemon) == "pause", 60.0)
        await rest(5.0)
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, OnBattery), 10.0)
        assert report(daemon).result == "interrupted"
        await until(lambda: not world.training.stands and daemon.state.drill is None, 10.0)
        assert isinstance(daemon.state.phase, OnBattery)
        await until(lambda: isinstance(daemon.state.phase, Holding), 3600.0)
        assert world.training.stands
        world.ups.utility = True
        await until(lambda: isinstance(daemon.state.phase, Online), 60.0)
        await until(lambda: not world.training.stands, 5.0)
        assert daemon.state.drill is None
    assert len(world.outages()) == 1


@in_virtual_time
async def test_a_reboot_in_the_middle_is_reported(tmp_path: Path) -> None:
    world = made(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        await begin(daemon, "pause")
        await until(lambda: stage_of(daemon) == "pause", 60.0)
        await rest(1.0)
    await rest(60.0)
    world.next_boot()
    world.training.stands = False
    async with world.running() as daemon:
        assert daemon.state.drill is None
        assert (report(daemon).result, report(daemon).because) == (
            "interrupted",
            "the host was restarted in the middle of it",
        )
        assert isinstance(daemon.state.phase, Online)


@in_virtual_time
async def test_a_pulled_plug_is_an_outage_like_any_other(tmp_path: Path) -> None:
    world = made(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await begin(daemon, witness="plug")
        await rest(5.0)
        world.ups.utility = False
        await until(lambda: stage_of(daemon) == "outage", 10.0)
        await until(lambda: isinstance(daemon.state.phase, Holding), 3600.0)
        world.ups.utility = True
        await until(lambda: daemon.state.drill is None, 60.0)
        summary = report(daemon)
        assert summary.result == "passed"
        figures = dict(summary.figures)
        assert figures["load_before"] == 0.75
        assert isinstance(figures["checkpoint_s.llm"], float)
        await until(lambda: not world.training.stands, 5.0)
