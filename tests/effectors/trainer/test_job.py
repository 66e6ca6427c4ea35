"""A job on several hosts: its trainer is asked to leave at a commit, and says at once when another host has left."""

import asyncio
from collections.abc import Iterator

import pytest

from powerguard.core.model.actions import LeaveJob
from powerguard.effectors.base import EffectorError
from powerguard.effectors.trainer.options import TrainerOptions
from powerguard.trainer.loop.endpoint import Endpoint
from powerguard.trainer.loop.requests import RequestQueue
from powerguard.wire import After
from tests.effectors.trainer.test_watch import until
from tests.effectors.trainer_peers import effector, serve
from tests.peers.hurried import now_s
from tests.trainer.test_many_hosts import Others
from tests.trainer.toy import short_folder


@pytest.fixture
def requests() -> RequestQueue:
    made = RequestQueue(job="llm", conduct=After.PAUSE, ranks=4, hosts=2)
    made.others = Others(made)  # type: ignore[assignment] # what the endpoint needs of it here
    return made


@pytest.fixture
def url(requests: RequestQueue) -> Iterator[str]:
    with short_folder() as folder, Endpoint(requests, folder / "llm.sock"):
        yield f"unix:{folder}/llm.sock"


def leave() -> LeaveJob:
    return LeaveJob(id="l1", by_s=now_s() + 20.0, trainer="llm", outage="o-7")


async def test_the_ranks_learn_why_this_host_leaves(requests: RequestQueue, url: str) -> None:
    async with effector(TrainerOptions(name="llm", url=url)) as (made, _):
        detail = dict(await made.carry_out(leave()))
    assert (detail["native"], detail["hosts"]) == (True, 2)
    assert requests.departed == "gpu2 has left the job: its power fails (outage o-7)"


@pytest.mark.parametrize("answer", [{"status": 404}, {"status": 500}, {"body": "{}"}])
async def test_a_trainer_that_knows_no_such_call_is_a_failure(answer: dict[str, object]) -> None:
    """An older library, or a program of one's own: its ranks elsewhere will hang, and that must be in the story."""
    script = {"POST /api/v1/leave": [answer]}
    async with serve(script) as peer, effector(TrainerOptions(name="llm", url=peer.url)) as (made, _):  # type: ignore[arg-type]
        with pytest.raises(EffectorError, match=r"update powerguard\.trainer"):
            await made.carry_out(leave())


async def test_the_daemon_hears_at_once_that_another_host_has_left(requests: RequestQueue, url: str) -> None:
    """Its next poll would find no process any more, and no reason."""
    async with effector(TrainerOptions(name="llm", url=url)) as (made, published), asyncio.TaskGroup() as group:
        watching = group.create_task(made.watch(every_s=25.0))
        await until(lambda: published.seen)
        assert (published.seen[0].hosts, published.seen[0].ended_by) == (2, "")
        await asyncio.sleep(0.1)
        await asyncio.to_thread(requests.leave, "its power fails")
        await until(lambda: published.seen[-1].ended_by, limit_s=20.0)
        watching.cancel()
    assert published.seen[-1].ended_by == "gpu2 has left the job: its power fails"
    assert requests.departure_sent
