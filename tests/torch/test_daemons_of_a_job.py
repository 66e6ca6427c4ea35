"""A job on two hosts, each with a UPS and a real daemon: held together, and one learns why the other has left."""

import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator
from typing import Any, Self, cast

import pytest

pytest.importorskip("torch", reason="torch is not installed (scripts/test-torch gets it)")

from powerguard.cli.main import main
from powerguard.sim.demo.story import numbers
from tests.e2e.peers import Order, Trainer
from tests.e2e.rig import ROOMY, Rig, rig
from tests.torch.hosts import Host, Hosts
from tests.trainer.toy import short_folder


class Ranks:
    """The ranks of one host, as the rig of the daemon's tests knows trainers."""

    name = "many"
    native = True
    orders: tuple[Order, ...] = ()

    def __init__(self, host: Host) -> None:
        self.host = host
        self._looks = itertools.count()
        self.url = f"unix:{host.folder}/s"
        self.is_ordered: Any = None
        self.on_change: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @property
    def looks(self) -> int:
        return next(self._looks)

    @property
    def paused(self) -> bool:
        status = self.host.status()
        return status is not None and status.paused

    @property
    def step(self) -> int:
        return max((s for word, s, _ in self.host.said() if word == "step"), default=0)


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[Hosts, list[Ranks], list[Rig]]]:
    """A job that trains on two hosts, and their daemons. Each daemon's start of training leaves a file `started`."""
    with short_folder() as folder, Hosts(folder, 2, step_s=0.02) as hosts:
        hosts.start()
        hosts.until_training()
        ranks = [Ranks(host) for host in hosts.all]
        async with (
            rig(cast("Trainer", ranks[0]), runtime=ROOMY) as one,
            rig(cast("Trainer", ranks[1]), runtime=ROOMY) as other,
        ):
            touch = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
            for world in (one, other):
                world.settings["resume"] = {"command": [sys.executable, "-I", "-c", touch, f"{world.folder}/started"]}
                await world.start()
            yield hosts, ranks, [one, other]
            for world in (one, other):
                world.no_traceback()


@pytest.mark.slow
@pytest.mark.timeout(230)
async def test_two_upses_hold_one_job_until_both_are_back() -> None:
    """Neither host trains on while the other is on battery; the one that is back first says for whom it waits."""
    async with two() as (_, ranks, (one, other)):
        one.ups.utility = other.ups.utility = False
        await one.until(lambda: all(each.paused for each in ranks), "training to stand")
        await one.note("checkpoint_durable")
        await other.note("checkpoint_durable")
        step = ranks[0].step
        one.ups.utility = True
        held = await one.note("training_held", hosts="gpu1")
        await one.note("outage_ended")
        await one.status_shows(lambda status: status["trainers"][0]["held_by"] == "gpu1", "who holds training")
        assert numbers(held)["trainer"] == "many"
        assert [each.step for each in ranks] == [step, step]
        other.ups.utility = True
        await other.note("outage_ended")
        await other.until(lambda: all(each.step > step for each in ranks), "training to go on, on both hosts")
        await one.note("training_released")
        assert one.offs() == other.offs() == []


@pytest.mark.timeout(230)
async def test_the_other_daemon_knows_why_the_job_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """One host empties its battery. The other never lost its power: it says so, and has training started again."""
    async with two() as (hosts, ranks, (one, other)):
        one.ups.utility = False
        await other.note("training_held", hosts="gpu0")
        await one.note("job_left")
        await one.off()
        ended = await other.note("job_ended")
        assert ended.because.startswith("gpu0 has left the job: its power fails (outage ")
        hosts.all[0].lose_power()
        assert hosts.all[1].end() == 75
        gone = await other.note("trainer_gone")
        assert gone.because == ended.because
        await other.status_shows(lambda status: status["trainers"][0]["ended_by"] == ended.because, "why it has ended")
        await other.until((other.folder / "started").exists, "training to be started again")
        step = ranks[1].step
        hosts.start()
        await other.until(lambda: all(each.step > step for each in ranks), "training to run on both hosts")
        again = await other.note("job_restarted")
        assert numbers(again)["step"] >= step
        assert other.offs() == []
        assert main(["explain", "job", "--json", "--journal", str(other.journal)]) == 0
        (hold,) = json.loads(capsys.readouterr().out)["holds"]
        assert (hold["trainer"], hold["held_by"], hold["job_ended"]) == ("many", ["gpu0"], ended.because)
        held = await other.note("training_held")
        assert hold["idle_s"] == pytest.approx(again.at_s - held.at_s, abs=0.01)
