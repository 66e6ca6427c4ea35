"""Every kind of store keeps the same few promises; and what each of them has to fear is answered."""

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from powerguard.trainer.agreement import Agreement
from powerguard.trainer.ranks import FileRanks, Memory, MemoryRanks, Ranks, RanksError, SocketRanks
from powerguard.trainer.ranks import files as files_module
from powerguard.trainer.ranks.base import MAX_VALUE_BYTES, meet
from powerguard.trainer.ranks.frames import FrameError, Sealer, packed, unpacked
from tests.peers.ports import free_port
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
    """Expect an error of these words, which comes at the end of that time: a long one where a slow machine needs it."""
    for join_s in (2.0, 20.0):
        with pytest.raises(RanksError) as told:
            join(join_s)
        if words in str(told.value):
            return
    raise told.value


@pytest.fixture(params=["memory", "files", "files over a network", "unix", "tcp"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Each kind of store, closed at the end."""
    memory = Memory()
    address = f"127.0.0.1:{free_port()}" if request.param == "tcp" else f"unix:{tmp_path}/s"
    with ExitStack() as stack:

        def making(size: int) -> list[Ranks]:
            kinds: dict[str, Callable[[int], Ranks]] = {
                "memory": lambda rank: MemoryRanks(memory, rank, size),
                "files": lambda rank: FileRanks(tmp_path / "f", rank, size, join_s=60.0),
                "files over a network": lambda rank: remote(tmp_path / "f", rank, size),
            }
            sockets = lambda rank: SocketRanks(  # noqa: E731 - one of four
                address, rank, size, secret_file=tmp_path / "secret", join_s=60.0
            )
            ranks = together(kinds.get(request.param, sockets), size)
            for one in ranks:
                stack.callback(one.close)
            return ranks

        yield making


def remote(folder: Path, rank: int, size: int) -> FileRanks:
    """Files on what is taken for a network's file system: looked at less often, and touched now and then."""
    one = FileRanks(folder, rank, size, join_s=60.0)
    one._look_s = files_module._REMOTE_LOOK_S
    return one


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
    with pytest.raises(RanksError, match="1 ranks have not come: 1"):
        FileRanks(tmp_path, 0, 2, join_s=0.2)
    with pytest.raises(RanksError, match="rank 0 has not answered"):
        FileRanks(tmp_path / "other", 1, 2, join_s=0.2)
    with pytest.raises(RanksError, match=r"1 ranks have not come within 0.2 s: 1"):
        SocketRanks(f"unix:{tmp_path}/s", 0, 2, secret_file=tmp_path / "secret", join_s=0.2)
    with pytest.raises(RanksError, match="does not answer"):
        SocketRanks(f"unix:{tmp_path}/t", 1, 2, secret_file=tmp_path / "secret", join_s=0.2)
    memory = Memory()
    with pytest.raises(RanksError, match="3 ranks have not come"):
        meet(MemoryRanks(memory, 0, 4), 0, 4, 0.1)
    with pytest.raises(RanksError, match="rank 4 of 4: must be 0 to 3"):
        MemoryRanks(memory, 4, 4)


# --- A folder ------------------------------------------------------------------------------------------------------


def test_files_of_an_earlier_run_are_nobodys(tmp_path: Path) -> None:
    """What a killed run left behind is neither believed nor kept; a rank that comes first waits for its own rank 0."""
    old = together(lambda rank: FileRanks(tmp_path, rank, 2, join_s=60.0), 2)
    old[0].claim("log/0", b"old")
    old[0]._lead.close()  # type: ignore[attr-defined] # as with its process
    early: list[Ranks] = []
    thread = threading.Thread(target=lambda: early.append(FileRanks(tmp_path, 1, 2, join_s=60.0)))
    thread.start()
    time.sleep(0.1)
    assert early == []
    new = FileRanks(tmp_path, 0, 2, join_s=60.0)
    thread.join(60)
    assert not new.check("log/0")
    assert early[0].claim("log/0", b"new") == b"new"
    assert new.claim("log/0", b"other") == b"new"
    assert len(list(tmp_path.glob("run-*"))) == 1
    with pytest.raises(RanksError, match="cannot meet"):
        old[0].claim("log/1", b"old")


def test_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A file in the way, said in words."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RanksError, match="file/deep: the ranks cannot meet in this folder: Not a directory"):
        FileRanks(tmp_path / "file" / "deep", 0, 2, join_s=0.2)


def test_ranks_that_count_differently_are_refused(tmp_path: Path) -> None:
    """Two and three ranks in one folder are not one job."""

    def differing(join_s: float) -> None:
        folder = tmp_path / f"{join_s}"
        together(lambda rank: FileRanks(folder, rank, 2 + rank, join_s=join_s), 2)

    refused(differing, "rank 0 counts 2 ranks, and rank 1 counts 3")


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"run": "../..", "words": {"1": 5}, "size": 2}', b"\xff" * 10])
def test_garbage_in_the_folder_is_no_answer(tmp_path: Path, garbage: bytes) -> None:
    """Half-written and foreign files are waited out."""
    (tmp_path / "run.json").write_bytes(garbage)
    (tmp_path / "hello-1.json").write_bytes(garbage)
    one, two = together(lambda rank: FileRanks(tmp_path, rank, 2, join_s=60.0), 2)
    one.set("a", b"b")
    assert two.get("a", 60.0) == b"b"


# --- A socket ------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[SocketRanks, int, Path]]:
    """Rank 0 of a job of one, over TCP: itself, its port, its secret's file."""
    port = free_port()
    rank = SocketRanks(f"127.0.0.1:{port}", 0, 1, secret_file=tmp_path / "secret", join_s=60.0)
    yield rank, port, tmp_path / "secret"
    rank.close()


def stranger(port: int, secret: bytes) -> tuple[socket.socket, Sealer]:
    """Connect as one who knows that secret."""
    connection = socket.create_connection(("127.0.0.1", port), 60.0)
    theirs = connection.recv(32)
    connection.sendall(bytes(32))
    return connection, Sealer(secret, theirs, bytes(32), server=False)


def ends(connection: socket.socket) -> bool:
    """Has the server hung up, or does it at once?"""
    connection.settimeout(60)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_secret_is_made_for_this_user_alone(served: tuple[SocketRanks, int, Path]) -> None:
    """Rank 0 writes it where it is missing, with mode 0600."""
    _, _, secret = served
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(secret.read_bytes()) == 32


def test_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """And one that is too short."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 32)
    secret.chmod(0o640)
    with pytest.raises(RanksError, match="others can read or change this secret"):
        SocketRanks(f"unix:{tmp_path}/s", 0, 1, secret_file=secret, join_s=1.0)
    secret.write_bytes(b"short")
    secret.chmod(0o600)
    with pytest.raises(RanksError, match="16 to 64 bytes"):
        SocketRanks(f"unix:{tmp_path}/s", 0, 1, secret_file=secret, join_s=1.0)


def test_another_secret_is_not_heard(served: tuple[SocketRanks, int, Path], tmp_path: Path) -> None:
    """Whoever does not know it changes nothing, and is told nothing but that the line is dead."""
    rank, port, _ = served
    (tmp_path / "other").write_bytes(b"y" * 32)
    (tmp_path / "other").chmod(0o600)
    other = tmp_path / "other"
    refused(lambda join_s: SocketRanks(f"127.0.0.1:{port}", 1, 2, secret_file=other, join_s=join_s), "hung up")
    assert not rank.check("in/1")


def test_frames_cannot_be_repeated_or_turned_round(served: tuple[SocketRanks, int, Path]) -> None:
    """A recorded frame sent again, or a server's own frame sent back, ends the connection and changes nothing."""
    rank, port, secret = served
    connection, sealer = stranger(port, secret.read_bytes())
    frame = sealer.frame(packed(b"A", "n#", struct.pack(">q", 1)))
    with connection:
        connection.sendall(frame)
        answer = connection.recv(1000)
        connection.sendall(frame)
        assert ends(connection)
    assert rank.add("n#", 0) == 1
    connection, sealer = stranger(port, secret.read_bytes())
    with connection:
        connection.sendall(answer)
        assert ends(connection)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        bytes(1000),
        b"\xff" * 1000,
        struct.pack(">I", 1 << 30) + bytes(100),
    ],
)
def test_garbage_ends_only_its_own_connection(served: tuple[SocketRanks, int, Path], garbage: bytes) -> None:
    """Scanners and broken peers are let go; the job does not notice."""
    rank, port, _ = served
    with socket.create_connection(("127.0.0.1", port), 60.0) as connection:
        connection.recv(32)
        connection.sendall(bytes(32) + garbage)
        assert ends(connection)
    rank.set("a", b"still here")
    assert rank.get("a", 0.0) == b"still here"


@pytest.mark.parametrize(
    "body", [b"X\x01a", b"G", b"G\xc8a", b"G\xff" + b"a" * 255, b"G\x01\xff", b"A\x01axx", b"G\x01nxx"]
)
def test_wrong_requests_of_one_who_knows_the_secret(served: tuple[SocketRanks, int, Path], body: bytes) -> None:
    """A broken rank loses its connection, not the others theirs."""
    rank, port, secret = served
    connection, sealer = stranger(port, secret.read_bytes())
    with connection:
        connection.sendall(sealer.frame(body))
        assert ends(connection)
    assert not rank.check("a")


def test_silent_strangers_are_few(served: tuple[SocketRanks, int, Path]) -> None:
    """Connections that prove nothing do not add up, and do not keep the ranks out."""
    rank, port, _ = served
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 60.0))
        rank.set("a", b"b")
        server = rank._server
        assert server is not None
        deadline_s = time.perf_counter() + 60
        while len(server._clients) < 60 and time.perf_counter() < deadline_s:
            time.sleep(0.01)
        assert len(server._clients) <= 66
        assert rank.get("a", 0.0) == b"b"


def test_a_rank_joins_past_any_number_of_silent_strangers(served: tuple[SocketRanks, int, Path]) -> None:
    """They hold all the places for strangers: the oldest is closed for the newest."""
    _, port, secret = served
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 60.0)).recv(32)
        connection, sealer = stranger(port, secret.read_bytes())
        stack.enter_context(connection)
        connection.sendall(sealer.frame(packed(b"A", "n#", struct.pack(">q", 1))))
        connection.settimeout(60)
        assert list(sealer.bodies(connection.recv(1000))) != []


def test_one_that_reads_no_answers_holds_nobody_up(served: tuple[SocketRanks, int, Path]) -> None:
    """It asks for megabytes and takes none: its connection is ended, the others are answered meanwhile."""
    rank, port, secret = served
    rank.set("large", bytes(MAX_VALUE_BYTES))
    connection, sealer = stranger(port, secret.read_bytes())
    with connection:
        connection.settimeout(60)
        ask = packed(b"G", "large", struct.pack(">Q", 0))
        try:
            for _ in range(200):
                connection.sendall(sealer.frame(ask))
                rank.check("large")
        except OSError:
            pass
        assert rank.check("large")
        server = rank._server
        assert server is not None
        assert sum(len(client.unsent) for client in server._clients.values()) < 20 * MAX_VALUE_BYTES


def test_values_are_bounded_before_they_are_sent(served: tuple[SocketRanks, int, Path]) -> None:
    """A value over 1 MiB is refused by name."""
    rank, _, _ = served
    with pytest.raises(RanksError, match="large: a value of 1048577 bytes"):
        rank.set("large", bytes(MAX_VALUE_BYTES + 1))


def test_rank_0_leaves_last(tmp_path: Path) -> None:
    """It holds the store: one that still reads how the last checkpoint ended must find it."""
    one, two = together(lambda rank: SocketRanks(f"unix:{tmp_path}/s", rank, 2, secret_file=tmp_path / "x"), 2)
    one.set("end", b"committed")
    closing_one = threading.Thread(target=one.close)
    closing_one.start()
    time.sleep(0.2)
    assert two.get("end", 60.0) == b"committed"
    two.close()
    closing_one.join(4.0)
    assert not closing_one.is_alive()


def test_a_store_that_ends_is_an_error_in_words(tmp_path: Path) -> None:
    """Rank 0 gone: whoever waits is told, not left; a broken line is made anew when it is back."""
    one, two = together(lambda rank: SocketRanks(f"unix:{tmp_path}/s", rank, 2, secret_file=tmp_path / "x"), 2)
    said: list[str] = []

    def wait() -> None:
        try:
            two.get("never", 100.0)
        except RanksError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    one._server.close()  # type: ignore[union-attr] # as if rank 0 had been killed
    thread.join(60)
    assert "does not answer" in said[0]
    with pytest.raises(RanksError, match=f"{tmp_path}/s: the store of the ranks, in rank 0, does not answer"):
        two.check("a")
    one.close()
    assert not (tmp_path / "s").exists()


def test_an_earlier_run_that_still_listens_is_not_joined(tmp_path: Path) -> None:
    """A rank that finds its own place taken waits for the server of its own run."""
    address = f"unix:{tmp_path}/s"
    old = SocketRanks(address, 0, 1, secret_file=tmp_path / "secret")
    old.claim("in/1", b"an earlier rank 1")
    secret = tmp_path / "secret"
    refused(lambda join_s: SocketRanks(address, 1, 2, secret_file=secret, join_s=join_s), "a rank 1 has come already")
    new = together(lambda rank: SocketRanks(address, rank, 2, secret_file=tmp_path / "secret", join_s=60.0), 2)
    new[1].set("a", b"b")
    assert new[0].check("a")
    assert not old.check("a")
    for one in (old, *reversed(new)):
        one.close()


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:70000", "unix:relative"])
def test_addresses_are_checked(tmp_path: Path, address: str) -> None:
    """Said with what would be right."""
    with pytest.raises(RanksError, match="must be unix:/PATH or HOST:PORT"):
        SocketRanks(address, 0, 1, secret_file=tmp_path / "secret")


def test_frames_come_in_any_pieces() -> None:
    """However the bytes are cut, the same bodies come out; one flipped bit anywhere ends it."""
    secret, nonce = b"s" * 32, bytes(32)
    stream = b""
    client = Sealer(secret, nonce, nonce, server=False)
    bodies = [packed(b"S", f"key{index}", bytes([index]) * index * 100) for index in range(5)]
    for body in bodies:
        stream += client.frame(body)
    for size in (1, 7, 1000):
        server = Sealer(secret, nonce, nonce, server=True)
        got = [body for at in range(0, len(stream), size) for body in server.bodies(stream[at : at + size])]
        assert got == bodies
        assert [unpacked(body)[1] for body in got] == [f"key{index}" for index in range(5)]
    for at in range(4, len(stream), 37):
        damaged = bytearray(stream)
        damaged[at] ^= 4
        server = Sealer(secret, nonce, nonce, server=True)
        try:
            got = list(server.bodies(bytes(damaged)))
        except FrameError:
            continue
        assert got == bodies[: len(got)]
        assert len(got) < len(bodies)


def test_store_holds_no_descriptors_after_close(tmp_path: Path) -> None:
    """Ranks that come and go leave no sockets behind."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted, not walked
    for _ in range(5):
        ranks = together(lambda rank: SocketRanks(f"unix:{tmp_path}/s", rank, 2, secret_file=tmp_path / "x"), 2)
        agreements = [Agreement(one, limits=QUICK) for one in ranks]
        for agreement in agreements:
            agreement.close()
        for one in reversed(ranks):
            one.close()
    until_s = time.perf_counter() + 60  # what answers them ends when it notices
    while len(os.listdir("/proc/self/fd")) > before + 1:  # noqa: PTH208 - as above
        assert time.perf_counter() < until_s, "some are left"
        time.sleep(0.01)
