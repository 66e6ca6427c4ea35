"""Threads and processes that meet at one instant: what is asked, told, closed or removed just then comes out right."""

import errno
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from powerguard.cli.checkpoints.found import _native_at, entries_at
from powerguard.cli.checkpoints.restore import Native
from powerguard.cli.main import main
from powerguard.trainer import Guard
from powerguard.trainer.loop.checkpointer import (
    FunctionCheckpointer,
    Order,
    ReportProgress,
    SingleProcess,
    StoreCheckpointer,
    Taken,
    WriteAbandoned,
)
from powerguard.trainer.loop.endpoint import Endpoint
from powerguard.trainer.loop.requests import RequestQueue
from powerguard.trainer.loop.writer import Writer
from powerguard.trainer.ranks import Alone, Memory, MemoryRanks, RanksError, SocketRanks
from powerguard.trainer.ranks.agreement import Agreement
from powerguard.trainer.ranks.coordinator import NotCommittedError, RankCoordinator, StandIn
from powerguard.trainer.ranks.machine import Ended, Generation
from powerguard.trainer.ranks.replica import Neighbour
from powerguard.trainer.ranks.socket_store import Server
from powerguard.trainer.seal.folder import newest_whole, seal, verify
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.folders import remove
from powerguard.trainer.store.store import SavedCheckpoint, Store
from powerguard.wire import After, Phase, TriggerRequest
from tests.trainer.checkpoints import save
from tests.trainer.test_guard_beside import State
from tests.trainer.toy import short_folder

OLD = SavedCheckpoint(step=4, path="/ck/step-4", size_bytes=9, manifest_digest="sha256:old")


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads take turns after every few instructions."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual_s)


@pytest.fixture
def together() -> Iterator[RankCoordinator]:
    """The connection of one process's requests with the agreement."""
    requests = RequestQueue(job="llm", conduct=After.EXIT)
    together = RankCoordinator(requests, Writer(requests, FunctionCheckpointer(lambda _step: OLD)), Alone())
    yield together
    together.close()


class Waiting(FunctionCheckpointer):
    """Has two snapshots, and writes none before its gate opens."""

    snapshots = 2

    def __init__(self) -> None:
        super().__init__(lambda _step: OLD)
        self.began, self.gate = threading.Event(), threading.Event()

    def write(self, taken: Taken, report: ReportProgress, order: Order) -> SavedCheckpoint:
        """Wait, unless it is called off before it begins."""
        self.began.set()
        assert self.gate.wait(60)
        if order.cancel.is_set():
            msg = "called off"
            raise WriteAbandoned(msg)
        return replace(OLD, step=taken.step)


class Seventh(SingleProcess):
    """The part of others in the seventh generation."""

    number = 7


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_copy_whose_write_is_called_off_stays_unless_a_newer_state_has_its_snapshot(is_reused: bool) -> None:
    requests, disk = RequestQueue(job="llm", conduct=After.EXIT), Waiting()
    writer = Writer(requests, disk)
    with requests.lock:
        writer.submit(Taken(step=1, slot=0, size_bytes=9), None)
    assert disk.began.wait(60)
    with requests.lock:
        writer.submit(Taken(step=2, slot=1, size_bytes=9), None, Seventh())
        if is_reused:
            assert writer.slot() == 1
        writer.call_off(7)
        assert (writer.taken(2) is None) is is_reused
    disk.gate.set()
    writer.close(finish=True)
    assert (writer.taken(2) is None) is is_reused


def at(code: object, event: str, act: Callable[[], object]) -> None:
    """Do something at the first call of a function, or at its return, by this thread: as another process would."""

    def look(frame: FrameType, what: str, _arg: object) -> None:
        if frame.f_code is code and what == event:
            sys.setprofile(None)
            act()

    sys.setprofile(look)


# --- The agreement --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
def test_who_joins_what_ends_at_that_instant_is_not_refused() -> None:
    """An emergency that joined a periodic checkpoint was told that all ranks exit, and nothing more is saved."""
    agreement, over = Agreement(Alone()), threading.Event()
    agreement.step = 0
    refused: list[str] = []

    def train() -> None:
        while not over.is_set():
            agreement.step = step = (agreement.step or 0) + 1
            while step >= agreement.due and (known := agreement.wait(step)) is not None:
                agreement.conclude(known.number, ok=True, digest="sha256:x")

    def ask(who: int) -> None:
        for number in range(400):
            try:
                agreement.open(TriggerRequest(id=f"{who}-{number}"))
            except RanksError as error:
                refused.append(str(error))

    training = threading.Thread(target=train)
    askers = [threading.Thread(target=ask, args=[who]) for who in range(3)]
    for thread in (training, *askers):
        thread.start()
    for thread in askers:
        thread.join(60)
    over.set()
    training.join(60)
    agreement.close()
    assert refused == []


def test_of_two_checkpoints_of_a_step_all_ranks_name_the_same(together: RankCoordinator) -> None:
    """One rank's writer had not told of the second yet: it named the first, and the checkpoint failed for all."""
    requests = together._requests
    requests.last = OLD
    known = Generation(number=3, ids=("e",), step=OLD.step, already="sha256:new")
    assert together.already(known, OLD.step).manifest_digest == "sha256:new"
    assert together.already(Generation(number=4, ids=("f",), already=OLD.manifest_digest), OLD.step) is OLD
    with requests.changed:
        requests.committed(together.already(known, OLD.step))
    assert requests.last is OLD, "it is known where that one lies"


def test_who_joins_too_late_learns_the_step_that_was_saved(together: RankCoordinator) -> None:
    """The writer's thread is about to tell of it: until then the requests know an older one."""
    requests = together._requests
    with requests.changed:
        requests.committed(OLD)
        operation = requests.open(TriggerRequest(id="e"), After.CONTINUE, "", 7)
        ended = Ended(ok=True, digest="sha256:new")
        together._reconcile(Generation(number=7, ids=("e",), step=8, begun=True, ended=ended))
    assert (operation.phase, operation.step, operation.manifest_digest) == (Phase.COMMITTED, 8, "sha256:new")


def test_what_has_ended_as_a_rank_comes_to_its_step_stays_ended(together: RankCoordinator) -> None:
    """It was at the boundary already when another rank failed: the asker was told so, and then waited for ever."""
    requests = together._requests
    with requests.changed:
        operation = requests.open(TriggerRequest(id="e"), After.CONTINUE, "", 7)
        requests.settle(operation, NotCommittedError("rank 1: no memory"))
        assert together.claim(Generation(number=7, ids=("e",), step=8, begun=True), 8) is None
    assert operation.phase is Phase.FAILED
    assert requests.begun == []


def test_what_is_asked_as_an_evaluation_ends_is_saved() -> None:
    """The stand-in had told the others that its boundary can still be had, and left without looking once more."""
    agreement = Agreement(Alone())
    agreement.step = 5

    def take_part(known: Generation) -> None:
        agreement.conclude(known.number, ok=True, digest="sha256:x")

    stand_in = StandIn(agreement, 5, take_part)
    number = agreement.open(TriggerRequest(id="e")).number
    while agreement._bid_in != number:
        time.sleep(0)
    assert stand_in.relieved(60.0)
    agreement.step = 6
    while agreement.wait(6) is not None:
        pytest.fail("step 5 was bid, and step 6 is wanted")
    known = agreement.generation(number)
    agreement.close()
    assert known is not None
    assert known.ended == Ended(ok=True, digest="sha256:x")


def test_the_silence_of_one_generation_is_not_held_against_the_next() -> None:
    """Stopped and given up on, a rank wakes and opens the next one before its neighbour saw that there was none."""
    now, ranks = [0], MemoryRanks(Memory(), 0, 2)
    neighbour = Neighbour(ranks, dead_s=6.0, beat_s=0.1, clock=lambda: now[0])

    def dead_in(number: int) -> int:
        began_s = now[0]
        while not neighbour.gone(ranks, oldest=number):
            now[0] += 1
        return now[0] - began_s

    assert [dead_in(1), dead_in(2)] == [6, 6]


# --- The writer -----------------------------------------------------------------------------------------------------


def test_an_emergency_does_not_wait_until_all_memory_is_touched(tmp_path: Path) -> None:
    """At the first start: the thread that is to write it was busy with pages that nobody needs now."""
    size_bytes, stop = 48 << 20, threading.Event()
    stop.set()
    stored = StoreCheckpointer(State(), Store(tmp_path, job="llm"))
    before = _resident_bytes(size_bytes)
    stored.prepare(size_bytes, stop)
    assert _resident_bytes(size_bytes) - before < size_bytes // 4
    stop.clear()
    stored.prepare(size_bytes, stop)
    assert _resident_bytes(size_bytes) - before >= size_bytes, "it goes on later where it was stopped"
    stored.close()


def _resident_bytes(least_bytes: int) -> int:
    """Memory of the mappings that are at least so large: what else this process holds, others take and give back."""
    held = 0
    for mapping in Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags:"):
        output = dict(line.split(":", 1) for line in mapping.splitlines() if line.endswith(" kB"))
        if output and int(output["Size"].split()[0]) << 10 >= least_bytes:
            held += int(output["Rss"].split()[0]) << 10
    return held


class Picky(Disk):
    """A disk that takes everything but checkpoints."""

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Refuse what goes into one."""
        if "/step-" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.EREMOTEIO, os.strerror(errno.EREMOTEIO))
        return super().write(descriptor, content, offset)


def test_a_failed_checkpoint_has_room_made_again(folder: Path) -> None:
    """It may have cost a slot, or have ended the making of one: the next emergency is not to find less."""

    def until(pattern: str, count: int) -> None:
        until_s = time.perf_counter() + 60
        while len(list(folder.glob(pattern))) != count:
            assert time.perf_counter() < until_s, f"there are never {count} of {pattern}"
            time.sleep(0.01)

    with Guard(State(), folder, job="llm", every_s=None, socket=None, disk=Picky()) as guard:
        guard.restore()
        guard.step(1)
        until(".room-*", 1)  # made last
        time.sleep(0.2)
        remove(Disk(), folder / ".slot-1")
        guard.requests.trigger(TriggerRequest(id="e"))
        guard.step(2)
        until_s = time.perf_counter() + 60
        while (status := guard.requests.checkpoint("e")) is None or status.phase is not Phase.FAILED:
            assert time.perf_counter() < until_s, f"it does not fail: {status}"
            time.sleep(0.01)
        until(".slot-*/shard-*", 2)


# --- Sockets -----------------------------------------------------------------------------------------------


class Prompt(Server):
    """A server whose thread sees that it is to end before the one that says so has said more."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_closing" and value:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self._listening.getsockname())
                self._thread.join(60)


def test_a_server_that_has_ended_already_is_closed_without_an_error(tmp_path: Path) -> None:
    """At the end of training, in rank 0: it was a traceback."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen()
    Prompt(listening).close()
    assert listening.fileno() == -1


def test_a_run_that_ends_late_leaves_the_next_ones_socket(tmp_path: Path) -> None:
    """A restart under the same address: the old rank 0 took the new one's socket away, and nobody could join."""
    path = tmp_path / "s"
    old = SocketRanks(path, 0, 1)
    new = SocketRanks(path, 0, 1)
    old.close()
    assert stat.S_ISSOCK(path.stat().st_mode)
    new.close()
    assert not path.exists()


def test_a_trainer_that_goes_just_now_is_in_nobodys_way(folder: Path) -> None:
    """Without its socket the next one could be asked for nothing, and would only have said so in its log."""
    path = folder / "t.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    at(Path.stat.__code__, "return", path.unlink)
    try:
        with Endpoint(RequestQueue(job="llm", conduct=After.EXIT), path):
            assert stat.S_ISSOCK(path.stat().st_mode)
    finally:
        sys.setprofile(None)


def test_checkpoints_are_listed_while_a_training_prunes(tmp_path: Path) -> None:
    """`powerguard checkpoints` beside a save: a folder that has just become a slot is none, and no error."""
    with Store(tmp_path, job="llm", slots=0) as store:
        for step in (1, 2):
            save(store, step, list(State().items()))
        unborn = tmp_path / store.name(0, "00000000")
        unborn.mkdir()
        at(_native_at.__code__, "call", unborn.rmdir)  # it is listed first
        try:
            assert [entry.step for entry in entries_at(str(tmp_path))] == [2, 1]
        finally:
            sys.setprofile(None)


def test_all_ranks_look_for_the_newest_sealed_checkpoint(tmp_path: Path) -> None:
    """Another rank sets the rotten one aside while this one looks at it; and the last of that name lies there still."""
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "model").write_bytes(b"x" * 100)
        seal(tmp_path / f"checkpoint-{step}", step=step)
    rotten, earlier = tmp_path / "checkpoint-2", tmp_path / "bad-checkpoint-2"
    (rotten / "model").write_bytes(b"y" * 100)
    earlier.mkdir()
    (earlier / "model").touch()
    at(verify.__code__, "return", lambda: rotten.rename(tmp_path / "bad-by-another-rank"))
    try:
        assert newest_whole(tmp_path) == tmp_path / "checkpoint-1"
    finally:
        sys.setprofile(None)
    (tmp_path / "bad-by-another-rank").rename(rotten)
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-1"
    assert (tmp_path / "bad-checkpoint-2.2" / "model").exists()


def test_a_checkpoint_that_is_restored_elsewhere_is_not_pruned_meanwhile(tmp_path: Path) -> None:
    """`powerguard checkpoints restore --to` beside a training: it was told to be corrupt, and was being removed."""
    with Store(tmp_path / "ck", job="llm") as store:
        save(store, 1, list(State().items()))
        at(Native._check_memory.__code__, "call", lambda: store.prune(keep=0))
        try:
            assert main(["checkpoints", "restore", str(tmp_path / "ck"), "--to", str(tmp_path / "new")]) == 0
        finally:
            sys.setprofile(None)
        assert store.prune(keep=0) != []
