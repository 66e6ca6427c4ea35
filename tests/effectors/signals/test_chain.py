"""The whole chain: the real daemon, its journal, the real helper, and a trainer that only says that it stands.

The UPS's load falls when the trainer's process really stands, and not before.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.e2e.rig import PAUSED, TRAINING, Rig, rig
from tests.peers.jobs import Jobs, state

pytestmark = [pytest.mark.peer("systemd-socket-activate"), pytest.mark.slow]

PLENTY = ((PAUSED, 800.0), (TRAINING, 400.0))


class Host(Rig):
    """A host whose load is that of its process, whatever that says of itself."""

    pid = 0

    @property
    def load(self) -> float:
        """Draws in full for as long as the process runs."""
        return PAUSED if state(self.pid) in ("T", "") else TRAINING


@asynccontextmanager
async def host() -> AsyncIterator[tuple[Host, Jobs]]:
    """A host on utility whose UPS calls its battery low at once, so that training is told to pause soon."""
    jobs = Jobs()
    try:
        process = jobs.pretender("llm.sock")
        with jobs.listening() as path:
            async with rig(runtime=PLENTY, low_battery_s=1e6) as world:
                world.__class__ = Host
                assert isinstance(world, Host)
                world.pid = process.pid
                world.trainers.clear()
                named = {"name": "llm", "url": f"unix:{jobs.path('llm.sock')}", "checkpoint_s": 2.0}
                world.settings |= {"trainers": [named], "signals": {"kind": "helper", "socket": str(path)}}
                world.settings["trainer_sockets"] = str(jobs.sockets)
                await world.start()
                yield world, jobs
    finally:
        jobs.close()


async def test_a_trainer_that_only_says_that_it_stands_is_stopped_and_goes_on() -> None:
    async with host() as (world, jobs):
        world.ups.utility = False
        await world.phase("holding", 30.0)
        assert jobs.advances("llm.sock"), "it trains on, whatever it says"
        await world.note("trainer_stopped", 60.0)
        assert state(world.pid) == "T"
        await world.status_shows(lambda status: status["trainers"][0]["signalled"] == "stop", "that it is stopped")
        await world.metric_becomes("powerguard_trainers_signalled", 1.0)
        world.ups.utility = True
        await world.phase("online", 30.0)
        await world.note("trainer_continued")
        await world.until(lambda: jobs.noted("llm.sock", "resumed"), "the word that it may go on")
        assert jobs.advances("llm.sock")
        assert not jobs.stopped.exists()
        continued, resumed = world.actions("ContinueTrainer")[0], world.actions("ResumeTrainer")[0]
        assert continued.at_s < resumed.at_s, "it goes on before it is told that it may"
        assert world.offs() == []
        world.no_traceback()


async def test_a_daemon_that_is_killed_while_a_trainer_is_stopped_lets_it_go_on_when_it_is_there_again() -> None:
    async with host() as (world, jobs):
        world.ups.utility = False
        await world.note("trainer_stopped", 60.0)
        await world.kill()
        assert state(world.pid) == "T", "the helper has no opinion: a daemon may be back at once"
        await world.start()
        await world.note("outage_continued", 30.0)
        assert state(world.pid) == "T", "the outage goes on, and so does the stop"
        world.ups.utility = True
        await world.note("trainer_continued", 60.0)
        await world.until(lambda: jobs.noted("llm.sock", "resumed"), "the word that it may go on")
        assert jobs.advances("llm.sock")
        world.no_traceback()
