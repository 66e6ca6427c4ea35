"""Ranks that train behind a barrier per step agree on steps, endings, pauses: real threads over a store in memory."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from powerguard.trainer.ranks import Alone, Memory, MemoryRanks, RanksError
from powerguard.trainer.ranks.agreement import Agreement, Limits
from powerguard.trainer.ranks.machine import NEVER, Generation
from powerguard.wire import After, Reason, TriggerRequest
from tests.trainer.ranks_job import QUICK, Job, job


def ask(name: str, after: After = After.CONTINUE, deadline_s: float | None = None, **other: object) -> TriggerRequest:
    return TriggerRequest(id=name, after=after, deadline_s=deadline_s, **other)  # type: ignore[arg-type]


def hung(it: Job, which: int) -> threading.Event:
    """Make that rank hang between two steps; what is returned lets it go."""
    let_go, hangs = threading.Event(), threading.Event()

    def between(rank: int) -> None:
        if rank == which:
            hangs.set()
            let_go.wait(60)

    it.between = between
    assert hangs.wait(60)
    return let_go


def spoiled(it: Job, rank: int, words: str, after: After = After.CONTINUE) -> Generation:
    """Ask for one that fails at its deadline for that reason; with a longer one where a slow machine has another."""
    for deadline_s in (2.0, 20.0):
        ended = it.until_ended(it.agreements[rank].open(ask(f"within-{deadline_s:.0f}-s", after, deadline_s)).number)
        assert ended.ended is not None
        assert not ended.ended.ok
        if words in ended.ended.error:
            return ended
    pytest.fail(str(ended))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_save_at_one_step_and_train_on(size: int) -> None:
    """Several checkpoints asked of any rank: each is of one step, all parts are in, training goes on."""
    with job(size) as it:
        for number in range(1, 6):
            it.until_moving()
            opened = it.agreements[number % size].open(ask(f"a{number}"))
            ended = it.until_ended(opened.number)
            assert ended.ended is not None
            assert ended.ended.ok, ended
            assert ended.ended.digest == f"sha256:{number:064x}"
            assert {(who, step) for g, who, step in it.saved if g == number} == {
                (who, ended.step) for who in range(size)
            }
        it.until_moving()
        assert it.agreements[0].due == NEVER


def test_a_pause_stands_at_the_saved_step_until_resume() -> None:
    """After `pause` every rank stands at the very step that is durable; resume releases all."""
    with job(4) as it:
        opened = it.agreements[2].open(ask("a", After.PAUSE, 30.0))
        ended = it.until_ended(opened.number)
        it.until_standing(ended.step)
        assert it.agreements[1].state.held_at == ended.step
        time.sleep(0.02)
        assert it.steps == [ended.step] * 4
        it.agreements[3].resume()
        it.until_moving()


def test_asked_again_while_standing_saves_the_very_step() -> None:
    """A second checkpoint of a job that stands moves nobody, and says that this step is durable already."""
    with job(3) as it:
        first = it.until_ended(it.agreements[0].open(ask("a", After.PAUSE)).number)
        it.until_standing(first.step)
        again = it.until_ended(it.agreements[1].open(ask("b")).number)
        assert again.step == first.step
        assert first.ended is not None
        assert again.already == first.ended.digest
        assert again.token != first.token
        it.until_standing(first.step)


def test_a_pause_without_a_checkpoint_and_one_on_top() -> None:
    """All stand at one step without saving; a checkpoint then is of that step; resume ends both."""
    with job(3) as it:
        paused = it.until_ended(it.agreements[1].open(ask("p"), save=False).number)
        it.until_standing(paused.step)
        assert it.saved == set()
        saved = it.until_ended(it.agreements[2].open(ask("a", After.PAUSE)).number)
        assert saved.step == paused.step
        it.agreements[0].resume()
        it.until_moving()


def test_two_hosts_ask_at_once_and_become_one() -> None:
    """Every daemon triggers its own host: one generation, the tightest deadline, the stronger after, both named."""
    with job(4, hosts=2, limits=Limits(beat_s=0.02)) as it:
        assert [(one.host, one.hosts, one.local_rank) for one in it.ranks] == [
            (0, 2, 0),
            (0, 2, 1),
            (1, 2, 0),
            (1, 2, 1),
        ]
        release = threading.Event()
        save = it.save
        it.save = lambda rank, generation: (release.wait(60), save(rank, generation))[1]  # type: ignore[func-returns-value]
        opened = it.agreements[0].open(ask("o-1", deadline_s=60.0, after=After.PAUSE, reason=Reason.ON_BATTERY))
        joined = it.agreements[2].open(ask("o-2", deadline_s=20.0, after=After.EXIT, reason=Reason.ON_BATTERY))
        assert joined.number == opened.number
        loose = it.agreements[1].open(ask("o-3", deadline_s=500.0))
        assert loose.number == opened.number
        it.until(lambda: all(one.state.front and one.state.front.after is After.EXIT for one in it.agreements))
        for agreement in it.agreements:
            left_s = (agreement.deadline_at_s(opened.number) or 0.0) - time.clock_gettime(time.CLOCK_BOOTTIME)
            assert 0.0 < left_s <= 20.0
        release.set()
        ended = it.until_ended(opened.number)
        assert ended.on_battery == (0, 1)
        assert ended.ids[:2] == ("o-1", "o-2")
        it.until(lambda: it.exited == {0, 1, 2, 3})


def test_simultaneous_asks_are_one_generation() -> None:
    """The same id and other ids from all ranks at the same instant: one checkpoint."""
    with job(4) as it:
        release = threading.Event()
        save = it.save
        it.save = lambda rank, generation: (release.wait(60), save(rank, generation))[1]  # type: ignore[func-returns-value]
        start = threading.Barrier(8)
        opened: list[int] = []

        def trigger(index: int) -> None:
            start.wait(60)
            opened.append(it.agreements[index % 4].open(ask(f"o-{index // 2}", After.PAUSE)).number)

        threads = [threading.Thread(target=trigger, args=[index]) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert opened == [1] * 8
        release.set()
        for _ in range(2):
            assert it.agreements[0].open(ask("o-0")).number == 1
            assert it.agreements[2].open(ask("o-1")).number == 1
            it.until_ended(1)


def test_storm_of_asks_does_not_grow_the_log() -> None:
    """Asks that change nothing for the others are not written down."""
    with job(2) as it:
        it.until_standing((it.until_ended(it.agreements[0].open(ask("p"), save=False).number)).step)
        hang = threading.Event()
        it.save = lambda rank, generation: str(hang.wait(60))
        it.agreements[0].open(ask("a", After.PAUSE, 30.0))
        it.until(lambda: it.agreements[0].state.front and it.agreements[0].state.front.begun)
        before = len(it.memory)
        for index in range(500):
            it.agreements[0].open(ask(f"s{index}", After.PAUSE, 30.0 + index))
        assert len(it.memory) <= before + 4
        hang.set()


def test_called_off_before_it_began() -> None:
    """Utility is back before any rank stands at the step: aborted everywhere, nothing saved."""
    with job(3, restored=None) as it:
        hang = hung(it, 1)
        opened = it.agreements[0].open(ask("a", After.PAUSE))
        cancelled = it.agreements[2].cancel(opened.number)
        assert cancelled is not None
        ended = it.until_ended(opened.number)
        assert ended.ended is not None
        assert ended.ended.aborted
        assert ended.ended.error == "called off before it began"
        assert it.saved == set()
        hang.set()
        it.until_moving()


def test_called_off_after_it_began_is_finished() -> None:
    """One that has begun is worth finishing; training goes on after it."""
    with job(3) as it:
        hang = threading.Event()
        save = it.save
        it.save = lambda rank, generation: (hang.wait(60), save(rank, generation))[1]  # type: ignore[func-returns-value]
        opened = it.agreements[0].open(ask("a", After.PAUSE))
        it.until(lambda: len(it.saved) == 3)
        it.agreements[1].cancel(opened.number)
        hang.set()
        ended = it.until_ended(opened.number)
        assert ended.ended is not None
        assert ended.ended.ok
        it.until_moving()


def test_a_failing_disk_fails_it_for_all() -> None:
    """One rank's disk is full: everybody says so, nobody commits, training stands where a second try loses nothing."""
    with job(3) as it:
        save = it.save

        def full(rank: int, generation: object) -> str:
            if rank == 1:
                raise OSError(28, "No space left on device")
            return save(rank, generation)  # type: ignore[arg-type]

        it.save = full
        failed = it.until_ended(it.agreements[0].open(ask("a", After.PAUSE, 30.0)).number)
        assert failed.ended is not None
        assert not failed.ended.ok
        assert failed.ended.error == "rank 1: [Errno 28] No space left on device"
        it.until_standing(failed.step)
        it.save = save
        again = it.until_ended(it.agreements[0].open(ask("b", After.PAUSE, 30.0)).number)
        assert again.step == failed.step
        assert again.ended is not None
        assert again.ended.ok


def test_a_rank_that_does_not_come_is_given_up_on_at_the_deadline() -> None:
    """One training thread hangs: the others say so when the deadline is over, and the next generation works."""
    with job(3) as it:
        hang = hung(it, 1)
        ended = spoiled(it, 1, "not all ranks have come to the step", After.PAUSE)
        assert it.saved == set()
        hang.set()
        it.until_standing(ended.step)  # the late one too learns that all are to stand here
        again = it.until_ended(it.agreements[0].open(ask("b", After.PAUSE, 60.0)).number)
        assert again.step == ended.step
        assert again.ended is not None
        assert again.ended.ok


def test_a_write_that_hangs_is_given_up_on_late() -> None:
    """What has begun has a while after its deadline, then it fails for all, and those who write are let go."""
    with job(3) as it:
        hang = threading.Event()
        save = it.save
        it.save = lambda rank, generation: (rank == 2 and hang.wait(60), save(rank, generation))[1]
        spoiled(it, 0, "(no word from rank 2)")
        it.save = save
        hang.set()
        it.until_moving()
        again = it.until_ended(it.agreements[0].open(ask("b", deadline_s=60.0)).number)
        assert again.ended is not None
        assert again.ended.ok


def test_a_rank_that_is_waited_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """As where rank 0 alone calls guard.step: the checkpoint fails after half an hour, and the next one waits again."""
    with job(2, limits=replace(QUICK, words_s=0.2)) as it:
        hang = threading.Event()
        save = it.save
        it.save = lambda rank, generation: (rank == 1 and hang.wait(60), save(rank, generation))[1]
        opened = it.agreements[0].open(ask("a", deadline_s=60.0))
        it.until(lambda: "has waited 0 s for rank 1 (does it call guard.step" in caplog.text)
        hang.set()
        ended = it.until_ended(opened.number)
        assert ended.ended is not None
        assert ended.ended.ok


def test_two_manifests_are_none() -> None:
    """Committers that name different digests have not committed the same checkpoint."""
    with job(2, hosts=2) as it:
        it.save = lambda rank, generation: f"sha256:{rank:064x}"
        ended = it.until_ended(it.agreements[0].open(ask("a")).number)
        assert ended.ended is not None
        assert not ended.ended.ok
        assert "2 manifests" in ended.ended.error


def test_nobody_committed_is_no_checkpoint() -> None:
    """All parts are durable and no rank names a manifest: that is not a checkpoint."""
    with job(2) as it:
        it.save = lambda rank, generation: ""
        ended = it.until_ended(it.agreements[0].open(ask("a")).number)
        assert ended.ended is not None
        assert not ended.ended.ok


def test_large_parts_go_in_pieces() -> None:
    """A shard's description of several MB arrives whole."""
    with job(2) as it:
        large = [bytes([rank]) * 2_500_001 for rank in range(2)]
        got: list[list[bytes]] = []

        def save(rank: int, generation: object) -> str:
            got.append(it.agreements[rank].gather(1, "shard", large[rank], read=rank == 0))
            return "sha256:00" if rank == 0 else ""

        it.save = save
        ended = it.until_ended(it.agreements[0].open(ask("a")).number)
        assert ended.ended is not None
        assert ended.ended.ok
        assert sorted(got) == [[], large]


def test_periodic_one_beside_and_an_emergency_meanwhile() -> None:
    """While one is written beside training, an emergency gets a generation of its own, at a later step."""
    with job(2) as it:
        slow = threading.Event()
        it.beside = lambda rank, generation: slow.wait(60)
        first = it.agreements[0].open(ask("periodic"))
        it.until(lambda: len(it.saved) == 2)
        it.until_moving()
        joined = it.agreements[1].open(ask("another"))
        assert joined.number == first.number
        second = it.agreements[0].open(ask("outage", After.PAUSE))
        assert second.number == 2
        ended = it.until_ended(2)
        assert ended.ended is not None
        assert ended.ended.ok
        it.until_standing(ended.step)
        assert it.agreements[0].generation(1).ended is None  # type: ignore[union-attr]
        slow.set()
        older = it.until_ended(1)
        assert older.step is not None
        assert ended.step is not None
        assert older.step < ended.step
        it.until_standing(ended.step)


def test_a_step_that_was_set_again_fails_and_does_not_hang() -> None:
    """A loop that jumps past the agreed step (it restored something) is told apart from one that is on its way."""
    with job(1) as it:
        it.until_moving()
        it.save = lambda rank, generation: "sha256:00"
        agreement = it.agreements[0]
        hang = hung(it, 0)
        opened = agreement.open(ask("a"))
        it.until(lambda: (known := agreement.generation(1)) and known.step is not None)
        it.steps[0] += 1000
        hang.set()
        ended = it.until_ended(opened.number)
        assert ended.ended is not None
        assert "past the agreed step" in ended.ended.error
        it.until_moving()


def test_training_that_ends_takes_the_others_out_of_their_wait() -> None:
    """One rank leaves the loop: what is in flight ends for all, and nothing new is opened."""
    with job(3) as it:
        hang = threading.Event()
        save = it.save
        it.save = lambda rank, generation: (rank == 2 and hang.wait(60), save(rank, generation))[1]
        opened = it.agreements[0].open(ask("a"))
        it.until(lambda: len(it.saved) == 3)
        it.agreements[1].close()
        ended = it.until_ended(opened.number)
        assert ended.ended is not None
        assert not ended.ended.ok
        hang.set()
        late = it.agreements[0].open(ask("b"))
        assert late.ended is not None
        assert late.ended.aborted
        assert late.ended.error == "training has ended"


def test_nothing_is_asked_of_a_rank_that_has_not_begun() -> None:
    """A trigger while ranks still load their checkpoint waits for the first of them that can tell a step."""
    memory = Memory()
    it = Job([MemoryRanks(memory, rank, 2) for rank in range(2)], restored=None)
    try:  # nobody trains
        for deadline_s in (2.0, 20.0):  # a longer one where rank 0 itself was late on a busy machine
            it.agreements[0].step = None
            opened = it.agreements[0].open(ask(f"within-{deadline_s:.0f}-s", deadline_s=deadline_s))
            it.agreements[0].step = 700
            ended = it.until_ended(opened.number)
            assert ended.step is None
            assert ended.ended is not None
            if "(no word from rank 1)" in ended.ended.error:
                break
        assert "(no word from rank 1)" in ended.ended.error
    finally:
        it.end()


@pytest.mark.parametrize("generations", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_generations_leave_nothing_behind(generations: int) -> None:
    """Keys and memory stay bounded however often it is asked."""
    memory = Memory()
    agreement = Agreement(MemoryRanks(memory, 0, 1), limits=QUICK)
    agreement.step = 0
    most = 0
    for number in range(1, generations + 1):
        agreement.open(ask(f"a{number}"))
        while (generation := agreement.wait(1)) is None:
            time.sleep(0)
        agreement.gather(number, "shard", b"x" * 100)
        agreement.conclude(generation.number, ok=True, digest="sha256:00")
        most = max(most, len(memory))
    assert agreement.state.number == generations
    assert most < 300
    assert len(agreement.state.to_json()) < 20_000
    assert len(agreement._parts._kept) < 5
    assert len(agreement._deadlines) < 5
    agreement.close()


def test_a_rank_that_slept_learns_what_it_missed() -> None:
    """Hundreds of entries later the log it would read is gone: it goes on from the kept state, and takes part again."""
    memory = Memory()

    class Asleep(MemoryRanks):
        """Finds nothing in the store while it sleeps."""

        awake = True

        def __init__(self) -> None:
            super().__init__(memory, 1, 2)
            got = self.get

            def get(key: str, timeout_s: float) -> bytes:
                if not self.awake and key.startswith("log/"):
                    time.sleep(0.005)
                    raise TimeoutError(key)
                return got(key, timeout_s)

            self.get = get

    sleeper = Asleep()
    it = Job([MemoryRanks(memory, 0, 2), sleeper], limits=Limits(beat_s=0.01, idle_s=0.02, dead_s=60.0))
    it.start()
    try:
        it.until_moving()
        sleeper.awake = False
        time.sleep(0.1)  # it may be in the middle of a look
        for number in range(1, 200):
            opened = it.agreements[0].open(ask(f"a{number}", After.PAUSE))
            it.agreements[0].cancel(opened.number)
        it.agreements[0].open(ask("last", After.PAUSE))
        assert not memory.check("log/0")
        # It wakes by being asked: what it writes where it fell asleep must neither count nor be believed.
        threading.Timer(0.1, lambda: setattr(sleeper, "awake", True)).start()
        number = it.agreements[1].open(ask("of the sleeper", After.PAUSE, reason=Reason.ON_BATTERY)).number
        assert number in {200, 201}, "the last one, or one of its own where that has ended before it was awake"
        assert not memory.check("log/0")
        ended = it.until_ended(number)
        assert ended.ended is not None
        assert ended.ended.ok
        it.until_standing(ended.step)
        it.agreements[1].resume()
        it.until_moving()
    finally:
        it.end()


def test_a_store_that_goes_away_lets_everybody_go() -> None:
    """Without a store a rank says that it has lost the others, stands for nobody, and takes no answer as the truth."""
    memory = Memory()
    gone = threading.Event()

    class Breakable(MemoryRanks):
        def __init__(self, rank: int) -> None:
            super().__init__(memory, rank, 2)
            got, claimed = self.get, self.claim

            def get(key: str, timeout_s: float) -> bytes:
                if gone.is_set():
                    msg = "the store has gone"
                    raise RanksError(msg)
                return got(key, timeout_s)

            def claim(key: str, value: bytes) -> bytes:
                get("nothing", 0.0) if gone.is_set() else None
                return claimed(key, value)

            self.get, self.claim = get, claim

    it = Job([Breakable(0), Breakable(1)], limits=replace(QUICK, lost_s=3.0))
    it.start()
    try:
        opened = it.agreements[0].open(ask("a", After.PAUSE))
        ended = it.until_ended(opened.number)
        it.until_standing(ended.step)
        gone.set()
        it.until_moving()
        assert "lost the others" in it.agreements[0].lost
        with pytest.raises(RanksError, match="lost the others"):
            it.agreements[1].open(ask("b"))
        assert it.agreements[0].generation(opened.number) == ended
    finally:
        it.end()


def test_a_lie_in_the_store_does_not_end_a_watcher_silently(caplog: pytest.LogCaptureFixture) -> None:
    """A key that holds what nobody of ours wrote: the rank says so, lets go of the others, and trains on."""
    memory = Memory()
    memory.set("cut", b"garbage")
    it = Job([MemoryRanks(memory, rank, 2) for rank in range(2)], limits=QUICK)
    it.start()
    try:
        with contextlib.suppress(RanksError):
            it.agreements[0].open(ask("a", After.PAUSE))
        it.until(lambda: all("lost the others: ValueError" in one.trouble for one in it.agreements))
        it.until_moving()
        assert "watching the other ranks failed: ValueError: invalid literal" in caplog.text
    finally:
        it.end()


def test_news_that_cannot_be_heard_ends_no_watcher(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever goes wrong beside the agreement, its watcher lives: without it all ranks would lose this one."""
    broken = threading.Event()

    def fail() -> None:
        if broken.is_set():
            msg = "a bug"
            raise ZeroDivisionError(msg)

    agreement = Agreement(Alone(), changed=fail)
    agreement.step = 7
    broken.set()
    opened = agreement.open(ask("a", After.PAUSE))
    assert agreement.wait(8) is not None
    ended = agreement.conclude(opened.number, ok=True, digest="sha256:aa").ended
    assert ended is not None
    assert ended.ok
    assert agreement.trouble == "news is not heard: ZeroDivisionError: a bug"
    assert "passing the agreement of the ranks to the endpoint failed: ZeroDivisionError: a bug" in caplog.text
    broken.clear()
    agreement.resume()
    assert agreement.wait(8) is None
    until_s = time.perf_counter() + 60
    while agreement.trouble:  # the watcher passes it on once it has applied it
        assert time.perf_counter() < until_s, agreement.trouble
        time.sleep(0.001)
    agreement.close()


def test_alone_is_the_same_with_one() -> None:
    """A job of one process goes the same way, and needs no store."""
    agreement = Agreement(Alone(), limits=QUICK)
    agreement.step = 41
    assert agreement.open(ask("a", After.PAUSE)).number == 1
    while agreement.due != 42:
        time.sleep(0.001)
    assert agreement.wait(41) is None
    generation = agreement.wait(42)
    assert generation is not None
    ended = agreement.conclude(generation.number, ok=True, digest="sha256:00").ended
    assert ended is not None
    assert ended.ok
    agreement.resume()
    assert agreement.wait(42) is None
    agreement.close()


class Lossy(MemoryRanks):
    """A store that loses one question in ten before it is heard, and one answer in ten after it was done."""

    def __init__(self, memory: Memory, rank: int, size: int, seed: int) -> None:
        super().__init__(memory, rank, size)
        self.lossy = False
        self._dice = random.Random(seed)
        for name in ("set", "get", "check", "claim", "add", "delete"):
            setattr(self, name, self._losing(getattr(self, name)))

    def _losing(self, call: Callable[..., object]) -> Callable[..., object]:
        def losing(*arguments: object) -> object:
            luck = self._dice.random() if self.lossy else 1.0
            if luck < 0.1:
                msg = "the question was lost"
                raise RanksError(msg)
            answer = call(*arguments)
            if luck < 0.2:
                msg = "the answer was lost"
                raise RanksError(msg)
            return answer

        return losing


@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_loses_questions_and_answers(seed: int) -> None:
    """Whatever was done twice or not at all: all say the same, and nothing is committed without all parts."""
    memory = Memory()
    ranks = [Lossy(memory, rank, 3, 10 * seed + rank) for rank in range(3)]
    it = Job(ranks, limits=replace(QUICK, beat_s=0.005))
    it.start()
    try:
        for one in ranks:
            one.lossy = True
        for number in range(1, 9):
            while True:
                try:
                    opened = it.agreements[number % 3].open(ask(f"a{number}", After.PAUSE, 60.0))
                    break
                except RanksError:
                    continue
            ended = it.until_ended(opened.number)
            assert ended.ended is not None
            assert ended.ended.ok, ended
            assert {who for g, who, step in it.saved if (g, step) == (opened.number, ended.step)} == {0, 1, 2}
            while it.agreements[0].state.held_at is not None:
                with contextlib.suppress(RanksError):
                    it.agreements[0].resume()
        it.until_moving()
    finally:
        for one in ranks:
            one.lossy = False
        it.end()


def test_a_part_that_was_counted_twice_is_not_taken_for_anothers() -> None:
    """The sum says that all are there, and one is not: nobody waits for it longer than the generation lasts."""
    memory = Memory()
    ranks = [MemoryRanks(memory, rank, 2) for rank in range(2)]
    add = ranks[0].add
    ranks[0].add = lambda key, amount: add(key, amount) and add(key, amount)
    it = Job(ranks, limits=replace(QUICK, late_s=0.1))
    it.start()
    hang = threading.Event()
    try:
        save = it.save
        it.save = lambda rank, generation: (rank == 1 and hang.wait(60), save(rank, generation))[1]
        for deadline_s in (2.0, 20.0):  # a longer one where it was over before a busy machine came to the step
            ended = it.until_ended(it.agreements[0].open(ask(f"a-{deadline_s:.0f}", deadline_s=deadline_s)).number)
            assert ended.ended is not None
            assert not ended.ended.ok
            if ended.begun:
                break
        it.until(lambda: (ended.number, 0) in it.ended)  # rank 0 was let go, too
        hang.set()
        it.save = save
        again = it.until_ended(it.agreements[1].open(ask("b", deadline_s=20.0)).number)
        assert again.ended is not None
        assert again.ended.ok
    finally:
        hang.set()
        it.end()
