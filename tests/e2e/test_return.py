"""The host is back from a power-off of ours: another boot, the same outage, and training once the battery allows."""

import signal
import sqlite3
import sys
from contextlib import closing

from powerguard.effectors.host.check import MEMORY
from powerguard.effectors.host.look import HostMemory, RememberedFolder, to_json
from powerguard.sim.demo.story import numbers
from tests.cli.checkpoint_sites import save
from tests.e2e.rig import Rig, rig


def reboot(world: Rig) -> None:
    """Make the journal one of another boot. The kernel's boot id cannot be had twice; all else is as after a boot."""
    with closing(sqlite3.connect(world.journal)) as db, db:
        db.execute("UPDATE snapshot SET digest = '', boot_id = 'the-boot-before', at_s = at_s + 86400.0")


async def test_the_host_returns_and_training_with_it() -> None:
    """Power-off, power back, boot: no second power-off, training after the gate, and the outage closed in numbers.

    The storage comes later than the host, as a NAS does: training waits until its checkpoints are there again.
    """
    async with rig() as world:
        resumed = world.folder / "resumed"
        touch = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
        world.settings["resume"] = {"command": [sys.executable, "-I", "-c", touch, str(resumed)]}
        world.settings["trainers"][0]["checkpoint_s"] = 0.5
        await world.start()
        world.ups.utility = False
        await world.note("power_off_accepted")
        outage = world.one_outage()
        await world.kill()
        reboot(world)
        world.ups.utility = True
        world.trainers[0].paused = False
        storage = world.folder / "ckpt"
        kept = RememberedFolder(real=str(storage), mounted=None, steps={"llm": 5}, current_at=0.0)
        (world.journal.parent / MEMORY).write_text(to_json(HostMemory(places={str(storage): kept})), encoding="utf-8")
        await world.start()
        returned = await world.note("host_returned", outage=outage)
        assert returned.because == "powered off by us"
        status = await world.status()
        assert status is not None
        assert (status["phase"], status["outage"]["id"]) == ("recovery", outage)
        missing = await world.note("host_incomplete_raised")
        assert f"{storage}: it cannot be read: No such file or directory" in missing.because
        assert not resumed.exists()
        save(storage, 5)
        checked = await world.note("host_checked")
        assert f"llm: step 5 (whole) in {storage}" in str(numbers(checked)["newest"])
        ended = await world.note("outage_ended")
        opened = await world.note("gate_opened")
        assert returned.at_s < missing.at_s < checked.at_s <= opened.at_s <= ended.at_s
        assert resumed.exists()
        assert numbers(ended)["outcome"] == "clean_shutdown"
        assert numbers(ended)["outage"] == outage == world.one_outage()
        (record,) = world.outages()
        assert record.outcome == "clean_shutdown"
        assert record.figures["recovery_s"] is not None
        assert len(world.offs()) == 1
        await world.metric_becomes('powerguard_outages_total{outcome="clean_shutdown"}', 1.0)
        await world.metric_becomes('powerguard_need_samples{name="",need="resume"}', 1.0)
        world.no_traceback()


async def test_training_returns_after_a_loss_of_power_that_no_ups_reported() -> None:
    """The host goes dark in phase online: the next boot starts training. An ordinary reboot does not."""
    async with rig() as world:
        resumed = world.folder / "resumed"
        touch = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
        world.settings["resume"] = {"command": [sys.executable, "-I", "-c", touch, str(resumed)]}
        await world.start()
        await world.signal(signal.SIGTERM)
        await world.ended()
        reboot(world)
        await world.start()
        assert (world.notes("host_went_down"), resumed.exists()) == ([], False)
        await world.kill()
        await world.trainers[0].die()
        reboot(world)
        await world.start(wait=False)
        went = await world.note("host_went_down")
        returned = await world.note("host_returned", phase="online", trainers=1)
        opened = await world.note("gate_opened")
        await world.until(resumed.exists, "training to be started")
        assert went.at_s <= returned.at_s <= opened.at_s
        (record,) = world.outages()
        assert record.started_at_s <= went.at_s
        assert world.offs() == []
        world.no_traceback()
