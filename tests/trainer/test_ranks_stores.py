"""Every kind of store keeps the same few promises; and what each of them has to fear is answered."""

import os
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from powerguard.trainer.ranks import Memory, MemoryRanks, Ranks, RanksError, SocketRanks
from powerguard.trainer.ranks.agreement import Agreement
from powerguard.trainer.ranks.base import MAX_VALUE_BYTES, meet
from powerguard.trainer.ranks.socket_store import Frames, framed, packed, unpacked
from tests.trainer.checkpoints import forked_worker
from tests.trainer.ranks_job import QUICK, Job

Make = Callable[[int], list[Ranks]]
"""Makes so many ranks of one job."""


def together(make: Callable[[int], Ranks], size: int) -> list[Ranks]:
    """Make all ranks at once, as processes of a job do: each waits for the others."""
    made: dict[int, Ranks] = {}
    errors: list[Exception] = []

    def one(rank: int) -> None:
        try:
            made[rank] = make(rank)
        except RanksError as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=[rank]) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [made[rank] for rank in range(size)]


def refused(join: Callable[[float], object], words: str) -> None:
    """Expect an error of these words, which comes at the end of that time: a long one where a slow machine needs it.

    {}: that time.
    """
    for join_s in (0.5, 20.0):
        with pytest.raises(RanksError) as caught:
            join(join_s)
        if words.format(f"{join_s:g}") in str(caught.value):
            return
    raise caught.value


@pytest.fixture(params=["memory", "unix"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Each kind of store that needs no torch, closed at the end."""
    memory = Memory()
    with ExitStack() as stack:

        def one(rank: int, size: int) -> Ranks:
            if request.param == "memory":
                return MemoryRanks(memory, rank, size)
            return SocketRanks(tmp_path / "s", rank, size, join_s=60.0)

        def making(size: int) -> list[Ranks]:
            ranks = together(lambda rank: one(rank, size), size)
            for rank in ranks:
                stack.callback(rank.close)
            return ranks

        yield making


def test_store_keeps_its_promises(make: Make) -> None:
    """What one rank writes another reads; claims are won once; counters count; what is deleted is gone."""
    one, two = make(2)
    assert [(rank.rank, rank.size, rank.local_rank, rank.host, rank.hosts) for rank in (one, two)] == [
        (0, 2, 0, 0, 1),
        (1, 2, 1, 0, 1),
    ]
    one.set("g/1/a", b"\0\xff value")
    assert two.get("g/1/a", 0.0) == b"\0\xff value"
    two.set("g/1/a", b"")
    assert one.get("g/1/a", 60.0) == b""
    assert two.check("g/1/a")
    assert not two.check("g/1/b")
    with pytest.raises(TimeoutError):
        one.get("g/1/b", 0.0)
    began_s = time.perf_counter()
    with pytest.raises(TimeoutError):
        one.get("g/1/b", 0.2)
    assert time.perf_counter() - began_s > 0.15
    assert one.claim("log/0", b"mine") == b"mine"
    assert two.claim("log/0", b"yours") == b"mine"
    assert two.get("log/0", 0.0) == b"mine"
    assert [one.add("n#", 1), two.add("n#", 1), one.add("n#", 3)] == [1, 2, 5]
    for key in ("g/1/a", "log/0", "n#", "never"):
        two.delete(key)
    assert not one.check("g/1/a")
    assert one.claim("log/0", b"anew") == b"anew"
    assert one.add("n#", 1) == 1
    one.set("large", bytes(MAX_VALUE_BYTES))
    assert len(two.get("large", 60.0)) == MAX_VALUE_BYTES


def test_one_that_waits_holds_nobody_up(make: Make) -> None:
    """A clone waits for a key while its twin works; the wait ends as soon as there is something."""
    one, two = make(2)
    clone = one.clone()
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(clone.get("late", 100.0)))
    thread.start()
    for index in range(20):
        one.set("other", b"%d" % index)
    assert got == [], "its wait is not over, and nobody has waited for that"
    two.set("late", b"now")
    thread.join(60)
    assert got == [b"now"]
    clone.close()
    assert one.get("late", 0.0) == b"now"


def test_a_store_that_has_gone_raises_no_signal(tmp_path: Path) -> None:
    """A training may have given SIGPIPE its default back: it hears of the end of rank 0 by an error."""
    heard: list[int] = []
    one, two = together(lambda rank: SocketRanks(tmp_path / "s", rank, 2, join_s=60.0), 2)
    one.farewell_s = 0.0
    one.close()
    before = signal.signal(signal.SIGPIPE, lambda number, _frame: heard.append(number))
    try:
        with pytest.raises(RanksError, match="does not answer"):
            two.set("key", b"value")
    finally:
        signal.signal(signal.SIGPIPE, before)
        two.close()
    assert not heard


def test_a_store_without_a_free_descriptor_costs_no_processor(tmp_path: Path) -> None:
    """A rank that connects waits until there is one."""
    with closing(SocketRanks(tmp_path / "s", 0, 1)) as one:
        clock = time.pthread_getcpuclockid(one._server._thread.ident or 0)  # type: ignore[union-attr]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(60)
            free = os.dup(peer.fileno())
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            try:
                peer.connect(str(tmp_path / "s"))
                peer.sendall(framed(packed(b"C", "key")))
                began_s = time.clock_gettime(clock)
                time.sleep(1.0)
                assert time.clock_gettime(clock) - began_s < 0.2
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert list(Frames().bodies(peer.recv(1000))) == [b"N"]


def test_a_forked_worker_holds_no_connection_of_a_rank(tmp_path: Path) -> None:
    """A data loader's worker outlives its killed rank: the others see at once that the store has gone."""
    one, two = together(lambda rank: SocketRanks(tmp_path / "s", rank, 2, join_s=60.0), 2)
    try:
        with forked_worker():
            one._server.close()  # type: ignore[attr-defined] # as if rank 0 had been killed
            with pytest.raises(RanksError, match=r"has hung up|Broken pipe|reset"):
                two.check("key")
            said = ""
            until_s = time.monotonic() + 60.0
            while "refused" not in said:  # the thread that accepts takes a moment to leave the socket
                assert time.monotonic() < until_s, said
                with pytest.raises(RanksError) as caught:
                    two.check("key")
                said = str(caught.value)
    finally:
        one.farewell_s = 0.0
        one.close()
        two.close()


def test_of_many_claims_one_wins(make: Make) -> None:
    """Eight threads claim the same fifty keys: all read the same winners; eight counters count to the end."""
    (rank,) = make(1)
    won: list[list[bytes]] = []
    sums: list[int] = []

    def claim(index: int) -> None:
        mine = rank.clone()
        won.append([mine.claim(f"log/{at}", b"%d" % index) for at in range(50)])
        sums.append(mine.add("count#", 1))
        mine.close()

    threads = [threading.Thread(target=claim, args=[index]) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 8
    assert all(each == won[0] for each in won)
    assert sorted(sums) == list(range(1, 9))


def test_a_job_trains_over_every_store(make: Make) -> None:
    """Checkpoints, a pause and a resume over each kind of store."""
    from powerguard.wire import After
    from tests.trainer.test_agreement import ask

    it = Job(make(3), limits=QUICK)
    it.start()
    try:
        for number in range(1, 4):
            it.until_moving()
            ended = it.until_ended(it.agreements[number % 3].open(ask(f"a{number}", After.PAUSE, 30.0)).number)
            assert ended.ended is not None
            assert ended.ended.ok, ended
            it.until_standing(ended.step)
            it.agreements[0].resume()
        it.until_moving()
    finally:
        it.end()


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    """A rank that never comes is named by those that wait for it."""
    refused(lambda join_s: SocketRanks(tmp_path / "s", 0, 2, join_s=join_s), "1 ranks have not come within {} s: 1")
    with pytest.raises(RanksError, match="does not answer"):
        SocketRanks(tmp_path / "t", 1, 2, join_s=0.2)
    memory = Memory()
    with pytest.raises(RanksError, match="3 ranks have not come"):
        meet(MemoryRanks(memory, 0, 4), 0, 4, 0.1)
    with pytest.raises(RanksError, match="rank 4 of 4: must be 0 to 3"):
        MemoryRanks(memory, 4, 4)


def test_a_guard_of_rank_0_alone_is_logged_long_before_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Training stands meanwhile: the other rank waits in its first collective."""
    with pytest.raises(RanksError, match="does every rank make a Guard"):
        meet(MemoryRanks(Memory(), 0, 2), 0, 2, 1.0, word_s=0.1)
    assert caplog.messages == ["Guard has waited 0 s for all 2 ranks (does every rank make one, and not rank 0 alone?)"]
    caplog.clear()
    memory = Memory()
    memory.set("hello/1", b"here")
    assert len(meet(MemoryRanks(memory, 0, 2), 0, 2, 60.0)) == 2
    assert caplog.messages == []


# --- A socket ------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[SocketRanks]:
    """Rank 0 of a job of one."""
    rank = SocketRanks(tmp_path / "s", 0, 1, join_s=60.0)
    yield rank
    rank.close()


def connected(rank: SocketRanks) -> socket.socket:
    """Connect as another process of this user."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    connection.connect(str(rank._path))
    return connection


def ends(connection: socket.socket) -> bool:
    """Has the server hung up, or does it at once?"""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_socket_is_this_users_alone(served: SocketRanks) -> None:
    """Linux asks for the right to write to a socket from whoever connects."""
    assert stat.S_IMODE(served._path.stat().st_mode) == 0o600


@pytest.mark.root
def test_a_socket_of_another_user_is_not_joined(tmp_path: Path) -> None:
    """In a folder where others can make files, one of them could speak for rank 0."""
    path = tmp_path / "s"
    child = os.fork()
    if child == 0:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            os.setresuid(1234, 1234, 1234)
            listening.listen(8)
            time.sleep(60)
        os._exit(0)
    try:
        until_s = time.perf_counter() + 60
        while "user 1234 listens there" not in (said := joined(path)):
            assert time.perf_counter() < until_s, said
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def joined(path: Path) -> str:
    """What keeps a rank 1 from joining there."""
    with pytest.raises(RanksError) as caught:
        SocketRanks(path, 1, 2, join_s=0.1)
    return str(caught.value)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        bytes(1000),
        b"\xff" * 1000,
        struct.pack(">I", 1 << 30) + bytes(100),
    ],
)
def test_garbage_ends_only_its_own_connection(served: SocketRanks, garbage: bytes) -> None:
    """Broken peers are let go; the job does not notice."""
    with connected(served) as connection:
        connection.sendall(garbage)
        assert ends(connection)
    served.set("a", b"still here")
    assert served.get("a", 0.0) == b"still here"


@pytest.mark.parametrize(
    "body", [b"X\x01a", b"G", b"G\xc8a", b"G\xff" + b"a" * 255, b"G\x01\xff", b"A\x01axx", b"G\x01nxx"]
)
def test_wrong_requests(served: SocketRanks, body: bytes) -> None:
    """A broken rank loses its connection, not the others theirs."""
    with connected(served) as connection:
        connection.sendall(framed(body))
        assert ends(connection)
    assert not served.check("a")


def test_one_that_reads_no_answers_holds_nobody_up(served: SocketRanks) -> None:
    """It asks for megabytes and takes none: its connection is ended, the others are answered meanwhile."""
    rank = served
    rank.set("large", bytes(MAX_VALUE_BYTES))
    with connected(rank) as connection:
        ask = packed(b"G", "large", struct.pack(">Q", 0))
        try:
            for _ in range(200):
                connection.sendall(framed(ask))
                rank.check("large")
        except OSError:
            pass
        assert rank.check("large")
        server = rank._server
        assert server is not None
        assert sum(len(client.unsent) for client in server._clients.values()) < 20 * MAX_VALUE_BYTES


def test_values_are_bounded_before_they_are_sent(served: SocketRanks) -> None:
    """A value over 1 MiB is refused by name."""
    with pytest.raises(RanksError, match="large: a value of 1048577 bytes"):
        served.set("large", bytes(MAX_VALUE_BYTES + 1))


def test_rank_0_leaves_last(tmp_path: Path) -> None:
    """It holds the store: one that still reads how the last checkpoint ended must find it."""
    one, two = together(lambda rank: SocketRanks(tmp_path / "s", rank, 2), 2)
    one.set("end", b"committed")
    one.farewell_s = 100.0
    closing_one = threading.Thread(target=one.close)
    closing_one.start()
    time.sleep(0.2)
    assert two.get("end", 60.0) == b"committed"
    two.close()
    closing_one.join(60)
    assert not closing_one.is_alive()


def test_a_store_that_ends_is_an_error_in_words(tmp_path: Path) -> None:
    """Rank 0 gone: whoever waits is told, not left; a broken line is made anew when it is back."""
    one, two = together(lambda rank: SocketRanks(tmp_path / "s", rank, 2), 2)
    said: list[str] = []

    def wait() -> None:
        try:
            two.get("never", 100.0)
        except RanksError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    one._server.close()  # type: ignore[attr-defined] # as if rank 0 had been killed
    thread.join(60)
    assert "does not answer" in said[0]
    with pytest.raises(RanksError, match=f"{tmp_path}/s: the store of the ranks, in rank 0, does not answer"):
        two.check("a")
    one.close()
    assert not (tmp_path / "s").exists()


def test_an_earlier_run_that_still_listens_is_not_joined(tmp_path: Path) -> None:
    """A rank that finds its own place taken waits for the server of its own run."""
    path = tmp_path / "s"
    old = SocketRanks(path, 0, 1)
    old.claim("in/1", b"an earlier rank 1")
    refused(lambda join_s: SocketRanks(path, 1, 2, join_s=join_s), "a rank 1 has come already")
    new = together(lambda rank: SocketRanks(path, rank, 2, join_s=60.0), 2)
    new[1].set("a", b"b")
    assert new[0].check("a")
    assert not old.check("a")
    for one in (old, *reversed(new)):
        one.close()


def test_a_socket_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="gone/s: rank 0 cannot listen here: No such file or directory"):
        SocketRanks(tmp_path / "gone/s", 0, 1)


def test_frames_come_in_any_pieces() -> None:
    """However the bytes are cut, the same bodies come out."""
    bodies = [packed(b"S", f"key{index}", bytes([index]) * index * 100) for index in range(5)]
    stream = b"".join(framed(body) for body in bodies)
    for size in (1, 7, 1000):
        frames = Frames()
        got = [body for at in range(0, len(stream), size) for body in frames.bodies(stream[at : at + size])]
        assert got == bodies
        assert [unpacked(body)[1] for body in got] == [f"key{index}" for index in range(5)]


def test_store_holds_no_descriptors_after_close(tmp_path: Path) -> None:
    """Ranks that come and go leave no sockets behind."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted, not walked
    for _ in range(5):
        ranks = together(lambda rank: SocketRanks(tmp_path / "s", rank, 2), 2)
        agreements = [Agreement(one, limits=QUICK) for one in ranks]
        for agreement in agreements:
            agreement.close()
        for one in reversed(ranks):
            one.close()
    until_s = time.perf_counter() + 60  # what answers them ends when it notices
    while len(os.listdir("/proc/self/fd")) > before + 1:  # noqa: PTH208 - as above
        assert time.perf_counter() < until_s, "some are left"
        time.sleep(0.01)


def test_another_job_that_takes_the_place_is_not_talked_to(tmp_path: Path) -> None:
    """Two jobs by hand, which no MASTER_PORT tells apart: parts of both would make one checkpoint."""
    first = SocketRanks(tmp_path / "s", 0, 1)
    script = (
        "import sys\nfrom powerguard.trainer.ranks import SocketRanks\n"
        "second = SocketRanks(sys.argv[1], 0, 1)\nprint(flush=True)\nsys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path / "s")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        first.set("a", b"b")
        assert first.check("a"), "by the connection that it has"
        with pytest.raises(RanksError, match="another job of this user has taken its place"):
            first.clone().set("a", b"c")
    first.close()
