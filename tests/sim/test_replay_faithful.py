"""What the real loop has done comes out of its own export the same: outage after outage, over kills and boots."""

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Online, Shutdown
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import history, read_only
from powerguard.daemon.journal.export import lines
from powerguard.sim.replay.play import compare, replay
from powerguard.sim.replay.recording import Wanted, load
from powerguard.sim.virtual import VirtualLoop
from tests.daemon.looped import World

WANTED = Wanted(policy=None, default=Policy(boot_id="x", ups=""))
LIVES = 3
KILLED_S = 6.0
"""A daemon that is killed takes the readings of up to 5 s with it."""


async def lives(path: Path, seed: int) -> bool:
    """Three lives of a daemon with utility that comes and goes; True where they end by kill -9."""
    draw = random.Random(seed)
    world = World(path)
    world.load = draw.choice([0.4, 0.6, 0.75, 0.9])
    world.paused_load = world.load * draw.choice([0.4, 0.6, 1.0])
    world.policy = replace(world.policy, recharge_s=draw.choice([1200.0, 3600.0]))
    world.ups.battery = replace(world.ups.battery, recharge_s=300.0, health=draw.choice([0.6, 0.8, 1.0]))
    world.trainer.takes_s = draw.choice([5.0, 20.0, 60.0, 150.0])
    if draw.random() < 0.2:
        world.bmc.error = "no answer"
    kill = draw.random() < 0.5
    for life in range(LIVES):
        async with world.running(kill=kill) as daemon:
            await rest(draw.uniform(40.0, 90.0))
            for _ in range(draw.randint(1, 4)):
                world.ups.utility = False
                await rest(draw.choice([3.0, 8.0, 30.0, 90.0, 200.0, 400.0]) * draw.uniform(0.8, 1.2))
                if isinstance(daemon.state.phase, Shutdown) or draw.random() < 0.3:
                    break
                world.ups.utility = True
                await rest(draw.uniform(3.0, 60.0))
            off = isinstance(daemon.state.phase, Shutdown)
            await rest(9.0 if off else 0.0)
        await rest(500.0 if off else draw.uniform(1.0, 10.0))
        if off:
            world.next_boot(f"boot-{life}-abcdef")
            world.ups.utility = True
    async with world.running() as daemon:
        world.ups.utility = True
        for _ in range(4000):
            if isinstance(daemon.state.phase, Online):
                break
            await rest(2.0)
        await rest(20.0)
    return kill


def differences(seed: int) -> Iterator[str]:
    """Whatever today's decisions would do otherwise in any outage of these lives: nothing, they are the same."""
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:
        path, file = Path(folder) / "j.sqlite", Path(folder) / "o.jsonl"
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            killed = runner.run(lives(path, seed))
        with read_only(path) as db:
            known = history(db, 100)
            exports = [list(lines(db, each.id, version="test", anonymize=seed % 2 == 0)) for each in known]
        assert exports
        for export in exports:
            file.write_text("\n".join(json.dumps(line) for line in export), encoding="utf-8")
            (recording,) = load(str(file), WANTED)
            tolerance_s = KILLED_S if killed and len(recording.legs) > 1 else 1.5
            for each in compare(replay(recording), tolerance_s=tolerance_s):
                if each.verdict != "same":
                    yield f"seed {seed}, {recording.name}: {each}"


@pytest.mark.parametrize("seed", [12, 211, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (8, 125, 216))])
def test_an_export_comes_out_the_same(seed: int) -> None:
    """Two returns and a host that would not die; a checkpoint that ends with the outage; a kill; limits to the tick."""
    assert list(differences(seed)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 240, 10))
def test_many_exports_come_out_the_same(first: int) -> None:
    assert [text for seed in range(first, first + 10) for text in differences(seed)] == []
