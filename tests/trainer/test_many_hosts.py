"""A job on several hosts: one that leaves ends it on all of them, and none goes on where another is missing."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.trainer import StopTraining
from powerguard.trainer.loop.endpoint import Endpoint
from powerguard.trainer.loop.requests import RequestQueue
from powerguard.trainer.ranks import Memory, MemoryRanks, RanksError
from powerguard.wire import HOST_LEFT, After, LeaveRequest, Reason, TrainerStatus, TriggerRequest
from tests.trainer.ranks_job import QUICK, Job, job
from tests.trainer.test_guard_ranks import World
from tests.trainer.toy import ask, short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def ended_with(world: World) -> set[object]:
    """Wait for every rank's end; return the exit statuses."""
    for rank in world.ranks:
        rank.join()
    assert all(isinstance(rank.ended_by, StopTraining) for rank in world.ranks), [r.ended_by for r in world.ranks]
    return {rank.ended_by.code for rank in world.ranks if isinstance(rank.ended_by, StopTraining)}


@pytest.mark.parametrize("paused", [True, False])
def test_a_host_that_leaves_ends_every_rank_at_one_step(folder: Path, paused: bool) -> None:
    """In the hold after its checkpoint, as at a commit; and where training never stood, at the first common step."""
    world = World(folder, ["a", "a", "b", "b"], shared=False)
    if paused:
        world.trigger(2, "e", After.PAUSE)
        step = world.ended(2, "e").step
        world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    world.ranks[2].guard.requests.leave("its power fails")
    for rank in world.ranks[:2]:
        rank.join()
    assert all(rank.ended_by is None for rank in world.ranks[2:]), "the ranks of that host wait for its power-off"
    for rank in world.ranks[2:]:
        rank.guard.requests.signals_heard = True  # as SIGTERM does
    assert ended_with(world) == {HOST_LEFT}
    (stood,) = {rank.done for rank in world.ranks}
    said = {rank.guard.requests.status().ended_by for rank in world.ranks}
    assert said == {"b has left the job: its power fails"}
    if paused:
        assert stood == step
        assert world.steps_on_disk() == [step]


def test_what_is_being_written_is_finished_before_the_ranks_end(folder: Path) -> None:
    """The checkpoint of the step where all stand is the newest state there is."""
    with job(4, hosts=2) as it:
        hang = threading.Event()
        save = it.save

        def slow(rank: int, generation: object) -> str:
            hang.wait(60)
            return save(rank, generation)  # type: ignore[arg-type] # what Job passes on

        it.save = slow
        opened = it.agreements[0].open(TriggerRequest(id="a", after=After.PAUSE, deadline_s=60.0))
        it.until(lambda: len(it.saved) == 4)
        leaving = threading.Thread(target=lambda: it.agreements[2].depart("b has left"))
        leaving.start()
        it.until(lambda: all(one.departed for one in it.agreements))
        assert it.exited == set()
        hang.set()
        ended = it.until_ended(opened.number)
        assert ended.ended is not None
        assert ended.ended.ok
        it.until(lambda: it.exited == {0, 1, 2, 3})
        assert set(it.steps) == {ended.step}
        leaving.join(60)


class Breakable(MemoryRanks):
    """A rank whose host goes dark: no call of it reaches the store any more.

    fault: what a call for a key raises instead; None where it reaches the store.
    """

    def __init__(self, memory: Memory, rank: int, hosts: list[str], fault: Callable[[str], Exception | None]) -> None:
        super().__init__(memory, rank, len(hosts), hosts)
        for name in ("get", "set", "claim", "check", "add"):
            setattr(self, name, self._unless(fault, getattr(self, name)))

    @staticmethod
    def _unless(fault: Callable[[str], Exception | None], call: Callable[..., object]) -> Callable[..., object]:
        def asked(key: str, *arguments: object) -> object:
            if (raised := fault(key)) is not None:
                raise raised
            return call(key, *arguments)

        return asked


def held(it: Job) -> None:
    """Have all ranks stand."""
    it.agreements[0].open(TriggerRequest(id="a", after=After.PAUSE), save=False)
    it.until(lambda: it.agreements[0].state.held_at is not None)
    it.until_standing(it.agreements[0].state.held_at)


def test_no_rank_goes_on_where_a_host_has_vanished(folder: Path) -> None:
    """It went dark in the hold, without a word: the resume finds that, and the others end where they stand."""
    memory, dark, hosts = Memory(), threading.Event(), ["a", "b", "b"]

    def fault(_: str) -> Exception | None:
        return RanksError("the store has gone") if dark.is_set() else None

    ranks = [Breakable(memory, 0, hosts, fault), MemoryRanks(memory, 1, 3, hosts), MemoryRanks(memory, 2, 3, hosts)]
    it = Job(ranks, limits=replace(QUICK, dead_s=4.0, lost_s=60.0))
    it.start()
    try:
        held(it)
        steps = list(it.steps)
        dark.set()
        it.agreements[1].resume(all_hosts=True)
        it.until(lambda: {1, 2} <= it.exited)
        assert it.steps == steps, "no rank has trained on"
        assert "no message from rank 0" in it.agreements[1].departed
    finally:
        dark.clear()
        it.end()


@pytest.mark.parametrize("knows_the_step", [True, False])
def test_a_rank_that_stands_and_loses_the_store_of_another_host_ends(folder: Path, knows_the_step: bool) -> None:
    """Whether all hosts go on can never be known again. On one host, ranks train on as before."""
    memory, dark, stands = Memory(), threading.Event(), threading.Event()

    def late(key: str) -> Exception | None:
        """Have the other rank bid first, so that it is not the one that has to write the step."""
        return unseen(key) if key == "log/0" and not (knows_the_step or stands.is_set()) else None

    def fault(key: str) -> Exception | None:
        if dark.is_set():
            return RanksError("the store has gone")
        return unseen(key) if key == "log/1" and not knows_the_step else None

    def unseen(key: str) -> Exception:
        time.sleep(QUICK.beat_s)
        return TimeoutError(key)

    ranks = [Breakable(memory, 0, ["a", "b"], late), Breakable(memory, 1, ["a", "b"], fault)]
    it = Job(ranks, limits=replace(QUICK, lost_s=3.0))
    it.start()
    try:
        it.agreements[1].open(TriggerRequest(id="a", after=After.PAUSE), save=False)
        it.until(lambda: it.agreements[1].standing is not None)
        stands.set()
        it.until(lambda: not knows_the_step or it.agreements[1].state.held_at is not None)
        dark.set()
        it.until(lambda: 1 in it.exited)
        assert "lost the others" in it.agreements[1].departed
    finally:
        it.end()


def test_training_goes_on_once_all_have_shown_that_they_are_there(folder: Path) -> None:
    """And a trainer says for which other host it stands."""
    world = World(folder, ["a", "b", "c"], shared=False)
    one, two, three = (rank.guard.requests for rank in world.ranks)
    one.trigger(TriggerRequest(id="a", reason=Reason.ON_BATTERY, after=After.PAUSE))
    two.pause()
    world.until(lambda: three.status().held_by == "a, b")
    world.until(lambda: all(rank.guard.requests.status().paused for rank in world.ranks))
    world.until(lambda: (one.status().held_by, two.status().held_by) == ("b", "a"))
    assert [each.status().paused_for for each in (one, two, three)] == ["on_battery", "", ""]
    result = one.resume()
    assert (result.paused, result.held_by, result.paused_for) == (True, "b", "")
    assert not two.resume(wait_s=30.0).paused
    world.until(lambda: three.status().held_by == "")
    before = world.ranks[2].done
    world.until(lambda: world.ranks[2].done > before)
    world.end()


class Others:
    """The other ranks, as an endpoint knows them; they note what is asked."""

    def __init__(self, requests: RequestQueue) -> None:
        self._requests = requests
        self.holds, self.hosts_holding, self.held_by, self.calls_the_roll, self.trouble = False, 0, (), False, ""

    def departs(self, because: str) -> None:
        with self._requests.changed:
            self._requests.departed = f"gpu2 has left the job: {because}"
            self._requests.changed.notify_all()


def test_the_endpoint_answers_as_soon_as_a_host_has_left(folder: Path) -> None:
    """The daemon waits there: it reads why before the process ends."""
    requests = RequestQueue(job="llm", conduct=After.PAUSE, ranks=2, hosts=2)
    requests.others = Others(requests)  # type: ignore[assignment] # what these two calls need of it
    found: list[TrainerStatus] = []

    def listen() -> None:
        status = TrainerStatus.parse(ask(folder / "s", "GET", "/api/v1/status?wait=30")[2])
        assert isinstance(status, TrainerStatus)
        found.append(status)

    with Endpoint(requests, folder / "s"):
        listener = threading.Thread(target=listen)
        listener.start()
        with suppress(TimeoutError):
            listener.join(0.2)
        assert found == []
        code, _, body = ask(folder / "s", "POST", "/api/v1/leave", LeaveRequest(because="its power fails").to_json())
        assert code == 200
        status = TrainerStatus.parse(body)
        assert isinstance(status, TrainerStatus)
        listener.join(25)
        assert [one.ended_by for one in (*found, status)] == ["gpu2 has left the job: its power fails"] * 2
        with requests.changed:  # noted once the answer is sent
            assert requests.changed.wait_for(lambda: requests.departure_sent, timeout=25)
        assert ask(folder / "s", "POST", "/api/v1/leave", b"[]")[0] == 400


def test_a_job_of_one_process_has_no_hosts_to_leave() -> None:
    """Its end is the host's own."""
    requests = RequestQueue(job="llm", conduct=After.PAUSE)
    assert requests.leave("its power fails").ended_by == ""
    began_s = time.perf_counter()
    requests.departure(0.05)
    assert time.perf_counter() - began_s >= 0.05
