"""The first moments of a daemon that goes on with an outage: nothing may be answered before what was stored."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from powerguard.clock import boottime_s
from powerguard.core.model.actions import Grade
from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.policy import Mode, Policy
from powerguard.core.model.state import OnBattery, Outage, State
from powerguard.daemon.journal import Entry, Journal, JournalLimits, WorkerThread
from powerguard.daemon.loop import Components, Loop
from powerguard.daemon.systemd import Notifier
from powerguard.ups.base import Publish
from tests.e2e.rig import LIMIT_S

BOOT = "boot-of-the-test"
DISK_S = 0.2


class SlowDisk(WorkerThread):
    """Everything that the journal does takes a while."""

    def submit(self, call: Callable[[], None]) -> None:
        def late() -> None:
            time.sleep(DISK_S)
            call()

        super().submit(late)


class Eager:
    """A card that answers at once, and again and again."""

    def __init__(self) -> None:
        self.published = asyncio.Event()

    def poll_now(self) -> None:
        pass

    async def run(self, publish: Publish) -> None:
        while True:
            publish(
                Reading(
                    at_s=boottime_s(),
                    ups="rack-a",
                    source="eager",
                    output_source=OutputSource.BATTERY,
                    on_battery_s=5.0,
                    runtime_s=900.0,
                    charge_pct=90.0,
                    load_pct=50.0,
                )
            )
            self.published.set()
            await asyncio.sleep(0.01)


def journal_at(path: Path) -> Journal:
    patient = JournalLimits(append_s=LIMIT_S, load_s=LIMIT_S)
    return Journal(path, boot_id=BOOT, writer=SlowDisk("slow-journal"), limits=patient)


async def test_a_quick_reading_does_not_make_us_forget_the_outage(tmp_path: Path) -> None:
    """A card that answers before a slow disk has taken the restored state: the outage goes on under its id.

    Found by twelve kills in a row: the reading was answered from an empty state, and a second outage began.
    """
    path = tmp_path / "journal.sqlite"
    now_s = boottime_s()
    outage = Outage(id="outage-before", since_s=now_s - 5.0, grade=Grade.FULL)
    journal = journal_at(path)
    await journal.load()
    await journal.append(Entry(at_s=now_s, state=State(phase=OnBattery(outage=outage))))
    assert await journal.close(LIMIT_S)

    source = Eager()
    parts = Components(
        policy=Policy(boot_id=BOOT, ups="rack-a", runtime_table=((0.5, 900.0),), mode=Mode.DRY_RUN),
        host_kind="systemd",
        bmc_kind="none",
        sources=[("rack-a", "eager", source)],
        watchers={},
        effectors={},
    )
    loop = Loop(parts, journal_at(path), clock=boottime_s, wall=time.time, notifier=Notifier.take({}))
    running = asyncio.get_running_loop().create_task(loop.run())
    async with asyncio.timeout(LIMIT_S):
        await source.published.wait()
        # Long enough for a step that is answered too early to be written, and to be seen below.
        await asyncio.sleep(5 * DISK_S)
    loop.stop()
    async with asyncio.timeout(LIMIT_S):
        await running
    assert loop.state.feed.reading is not None
    assert isinstance(loop.state.phase, OnBattery)
    assert loop.state.phase.outage.id == "outage-before"
