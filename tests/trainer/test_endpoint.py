"""The endpoint over real sockets: routes, joined requests, tokens, bad peers, and a socket that is never half open."""

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from powerguard.effectors.trainer.peer import places_of
from powerguard.trainer.guard import AUTO, Guard, endpoint_of
from powerguard.trainer.loop.endpoint import MAX_STRANGERS, MAX_WAIT_S, Endpoint, EndpointError
from powerguard.trainer.loop.requests import RequestQueue
from powerguard.trainer.store.store import SavedCheckpoint
from powerguard.wire import (
    After,
    CheckpointStatus,
    Phase,
    TrainerStatus,
    TriggerRequest,
)
from tests.peers import require
from tests.trainer.toy import ask, short_folder

TOKEN = b"Heron-Lamp-Seven-19"


def saved_at(step: int) -> SavedCheckpoint:
    return SavedCheckpoint(step=step, path=f"/ck/{step}", size_bytes=1000, manifest_digest="sha256:" + "0" * 64)


@pytest.fixture
def guard() -> Guard:
    return Guard(saved_at, job='odd "job"')


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture
def where(guard: Guard, folder: Path) -> Iterator[Path]:
    with Endpoint(guard.requests, folder / "t.sock"):
        yield folder / "t.sock"


def trigger(
    where: Path | int, name: str, path: str = "/api/v1/trigger_checkpoint"
) -> tuple[int, dict[str, str], bytes]:
    return ask(where, "POST", path, TriggerRequest(id=name).to_json())


def test_trigger_follow_and_again(guard: Guard, where: Path) -> None:
    status, headers, body = trigger(where, "a")
    assert (status, headers["Location"]) == (202, "/api/v1/checkpoints/a")
    parsed = CheckpointStatus.parse(body)
    assert isinstance(parsed, CheckpointStatus)
    assert parsed.phase is Phase.WAITING_STEP
    guard.step(3)
    status, _, body = ask(where, "GET", headers["Location"])
    parsed = CheckpointStatus.parse(body)
    assert isinstance(parsed, CheckpointStatus)
    assert (status, parsed.phase, parsed.durable, parsed.step) == (200, Phase.COMMITTED, True, 3)
    assert trigger(where, "a")[0] == 200
    assert trigger(where, "b", "/api/v1/checkpoints")[0] == 202


def test_a_bare_curl_is_an_operators_wish(guard: Guard, where: Path) -> None:
    """`curl -X POST` with nothing in it works, and gets an id to ask by."""
    status, headers, _ = ask(where, "POST", "/api/v1/trigger_checkpoint")
    guard.step(1)
    assert status == 202
    assert json.loads(ask(where, "GET", headers["Location"])[2])["phase"] == "committed"


def test_a_long_poll_ends_with_the_news(guard: Guard, where: Path) -> None:
    trigger(where, "a")
    timer = threading.Timer(0.2, guard.step, [4])
    began_s = time.perf_counter()
    timer.start()
    body = ask(where, "GET", f"/api/v1/checkpoints/a?wait={MAX_WAIT_S}")[2]
    assert 0.2 <= time.perf_counter() - began_s < MAX_WAIT_S
    timer.join()
    assert json.loads(body)["phase"] in ("snapshot", "committed")
    trigger(where, "b")
    began_s = time.perf_counter()
    assert json.loads(ask(where, "GET", "/api/v1/checkpoints/b?wait=0.3")[2])["phase"] == "waiting_step"
    assert time.perf_counter() - began_s > 0.25


def test_a_change_between_two_polls_is_not_missed(where: Path) -> None:
    """Whoever says which phase he has seen is told of another one at once, not at the end of his wait."""
    trigger(where, "a")
    began_s = time.perf_counter()
    body = ask(where, "GET", f"/api/v1/checkpoints/a?wait={MAX_WAIT_S}&seen=snapshot")[2]
    assert json.loads(body)["phase"] == "waiting_step"
    assert time.perf_counter() - began_s < MAX_WAIT_S
    began_s = time.perf_counter()
    assert (
        json.loads(ask(where, "GET", "/api/v1/checkpoints/a?wait=0.3&seen=waiting_step")[2])["phase"] == "waiting_step"
    )
    assert time.perf_counter() - began_s > 0.25


def test_pause_resume_delete_status(guard: Guard, where: Path) -> None:
    assert ask(where, "POST", "/api/v1/pause")[0] == 200
    stepping = threading.Thread(target=guard.step, args=[9])
    stepping.start()
    result = TrainerStatus(job="")
    until_s = time.perf_counter() + 60
    while time.perf_counter() < until_s:
        parsed = TrainerStatus.parse(ask(where, "GET", "/api/v1/status")[2])
        assert isinstance(parsed, TrainerStatus)
        result = parsed
        if result.paused:
            break
        time.sleep(0.01)
    assert (result.paused, result.step, result.job) == (True, 9, 'odd "job"')
    resumed = TrainerStatus.parse(ask(where, "POST", "/api/v1/resume", b"{}")[2])
    assert isinstance(resumed, TrainerStatus)
    assert not resumed.paused
    stepping.join(60)
    assert not stepping.is_alive()
    trigger(where, "a")
    assert json.loads(ask(where, "DELETE", "/api/v1/checkpoints/a")[2])["phase"] == "aborted"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("GET", "/api/v1/healthz", None, 200, "ok"),
        ("GET", "/nothing", None, 404, "no such route"),
        ("GET", "/api/v1/checkpoints/x", None, 404, "no such checkpoint"),
        ("GET", "/api/v1/checkpoints/x?wait=nan", None, 404, "no such checkpoint"),
        ("DELETE", "/api/v1/checkpoints/x", None, 404, "no such checkpoint"),
        ("DELETE", "/api/v1/status", None, 404, "no such route"),
        ("POST", "/api/v1/status", b"{}", 404, "no such route"),
        ("POST", "/api/v1/trigger_checkpoint", b"{", 400, "not JSON"),
        ("POST", "/api/v1/trigger_checkpoint", b'{"id": "../x"}', 400, "id: must be"),
        ("POST", "/api/v1/trigger_checkpoint", b'{"id": "a", "after": "burn"}', 400, "after: must be one of"),
        ("POST", "/api/v1/trigger_checkpoint", b"x" * 70_000, 413, "at most 65536"),
        ("POST", "/api/v1/trigger_checkpoint", b"x" * 900_000, 413, "at most 65536"),
        ("POST", "/api/v1/pause", b'{"lease_s": -1}', 400, "lease_s: must be a number of 0 to"),
        ("POST", "/api/v1/hold_uploads", b'{"lease_s": "long"}', 400, "lease_s: must be a number of 0 to"),
        ("POST", "/api/v1/hold_uploads", None, 200, "uploads_held"),
        ("PUT", "/api/v1/status", None, 501, '{"error": "Unsupported method (\'PUT\')"}'),
        ("GET", f"/{'x' * 66_000}", None, 414, '{"error": "'),
    ],
)
def test_every_request_gets_its_answer(
    where: Path, method: str, path: str, body: bytes | None, *, status: int, said: str
) -> None:
    got, _, content = ask(where, method, path, body)
    assert got == status
    assert said in content.decode()


@pytest.mark.parametrize("path", ["pause", "trigger_checkpoint"])
def test_a_request_that_is_cut_short_asks_for_nothing(guard: Guard, where: Path, path: str) -> None:
    """A drill that was killed before it had sent the lease: training paused without an end."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        peer.connect(str(where))
        peer.sendall(f"POST /api/v1/{path} HTTP/1.1\r\nContent-Length: 16\r\n\r\n".encode())
        peer.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: peer.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"a body of 16 bytes was announced, and 0 came" in answer
    assert not guard.requests.asked


def test_the_metrics_are_prometheus_text(guard: Guard, where: Path) -> None:
    for step in range(3):
        guard.step(step)
    trigger(where, "a")
    guard.step(3)
    lines = ask(where, "GET", "/metrics")[2].decode().splitlines()
    assert 'powerguard_trainer_step{job="odd \\"job\\""} 3' in lines
    assert 'powerguard_trainer_checkpoints_total{job="odd \\"job\\"",result="committed"} 1' in lines
    assert 'powerguard_trainer_durable_step{job="odd \\"job\\""} 3' in lines
    described = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {line.partition("{")[0] for line in lines if not line.startswith("#")} == described


@pytest.mark.peer("promtool")
def test_promtool_has_nothing_to_say(guard: Guard, where: Path) -> None:
    guard.step(0)
    text = ask(where, "GET", "/metrics")[2]
    ended = subprocess.run([require("promtool"), "check", "metrics"], input=text, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, b"")


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n\r\n",
        b"\xff\xfe\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\n\r\n",
        b"POST /api/v1/pause HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /api/v1/pause HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET /" + b"x" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000,
    ],
)
def test_garbage_hurts_nobody(where: Path, raw: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        peer.connect(str(where))
        try:
            peer.sendall(raw)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert ask(where, "GET", "/api/v1/healthz")[0] == 200


def test_those_who_trickle_hold_up_nobody_for_long(where: Path) -> None:
    """Sixteen at a time; one more is told to come back; and after 5 s the slow ones are out, however they trickle."""
    slow = []
    for _ in range(16):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(str(where))
        peer.sendall(b"GET /api/v1/sta")
        slow.append(peer)
    time.sleep(0.3)
    status, headers, _ = ask(where, "GET", "/api/v1/healthz")
    assert (status, headers["Retry-After"]) == (503, "1")
    began_s = time.perf_counter()
    while ask(where, "GET", "/api/v1/healthz")[0] == 503:
        assert time.perf_counter() - began_s < 60
        for peer in slow:
            try:
                peer.send(b"t")
            except OSError:
                continue
        time.sleep(0.2)
    for peer in slow:
        peer.close()


def test_requests_for_which_there_is_no_thread_are_served_one_by_one(guard: Guard, folder: Path) -> None:
    """The threads of this user are at their limit, or Python 3.12.1 starts none once the main thread has ended."""
    with Endpoint(guard.requests, folder / "t.sock", port=0, token=b"t" * 16) as endpoint:
        before = threading.stack_size(1 << 47)  # more than there are addresses: no thread starts
        try:
            codes = {ask(folder / "t.sock", "GET", "/api/v1/healthz")[0] for _ in range(20)}
            codes |= {ask(endpoint.port or 0, "GET", "/api/v1/healthz")[0] for _ in range(20)}
            assert trigger(folder / "t.sock", "a")[0] == 202
            assert ask(folder / "t.sock", "GET", "/api/v1/checkpoints/a?wait=30&seen=waiting_step")[0] == 200
        finally:
            threading.stack_size(before)
        assert codes == {200}


def test_a_training_without_a_free_descriptor_is_asked_later(guard: Guard, where: Path) -> None:
    """A daemon that connects waits until there is one, and costs the training no processor meanwhile."""
    (server,) = [each for each in threading.enumerate() if each.name == "powerguard-endpoint" and each.is_alive()][-1:]
    clock = time.pthread_getcpuclockid(server.ident or 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        free = os.dup(peer.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            peer.connect(str(where))
            peer.sendall(b"GET /api/v1/healthz HTTP/1.1\r\n\r\n")
            began_s = time.clock_gettime(clock)
            time.sleep(1.0)
            assert time.clock_gettime(clock) - began_s < 0.2
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert b" 200 OK" in peer.recv(1000)


def test_a_peer_that_hangs_up_raises_no_signal(guard: Guard, where: Path) -> None:
    """A training may have given SIGPIPE its default back, which would end it with the daemon that asks."""
    heard: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, _frame: heard.append(number))
    try:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(where))
                peer.sendall(b"GET /api/v1/status HTTP/1.1\r\n\r\n")
        assert ask(where, "GET", "/api/v1/healthz")[0] == 200
        for thread in threading.enumerate():
            if "process_request" in thread.name:
                thread.join(60)
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert not heard


def test_the_socket_is_for_owner_and_group_and_goes_with_the_endpoint(guard: Guard, folder: Path) -> None:
    path = folder / "t.sock"
    with Endpoint(guard.requests, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert [entry.name for entry in folder.iterdir()] == ["t.sock"]
    assert list(folder.iterdir()) == []


def test_a_socket_named_from_the_folder_of_the_start_goes_with_the_endpoint(folder: Path) -> None:
    """Training may have gone into another folder meanwhile."""
    script = (
        "import os\nfrom powerguard.trainer import Guard\n"
        "with Guard(lambda step: None, job='j', socket='t.sock'):\n    os.chdir('/')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=folder, timeout=100)
    assert not list(folder.iterdir())


@pytest.mark.root
def test_the_folder_gives_the_socket_its_group(guard: Guard, folder: Path) -> None:
    """A folder that is sticky and set-group-ID (3777, group powerguard) lets the daemon ask every user's trainer."""
    group = 4242
    os.chown(folder, 0, group)
    folder.chmod(0o3777)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            endpoint = Endpoint(guard.requests, folder / "t.sock")
            found = (folder / "t.sock").stat()
            code = 0 if (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, group, 0o660) else 2
            endpoint.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_a_killed_trainer_left_behind_is_replaced(guard: Guard, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "t.sock"))
    with Endpoint(guard.requests, folder / "t.sock"):
        assert ask(folder / "t.sock", "GET", "/api/v1/healthz")[0] == 200


@pytest.mark.parametrize("case", ["taken", "file", "long", "no folder", "no token", "no port"])
def test_an_endpoint_that_cannot_open_says_why(guard: Guard, where: Path, case: str) -> None:
    folder = where.parent
    (folder / "file").write_text("mine")
    path, port, said = {
        "taken": (where, None, "another trainer answers here"),
        "file": (folder / "file", None, "exists and is not a socket"),
        "long": (folder / ("x" * 120), None, "at most 107 bytes"),
        "no folder": (folder / "none" / "t.sock", None, f"no folder {folder}/none .make it, or"),
        "no token": (folder / "new.sock", 0, "needs a token"),
        "no port": (folder / "new.sock", 70000, "port 70000: must be 0 .any that is free. to 65535"),
    }[case]
    with pytest.raises(EndpointError, match=said):
        Endpoint(guard.requests, path, port=port, token=TOKEN if port else None)
    assert ask(where, "GET", "/api/v1/healthz")[0] == 200
    assert (folder / "file").read_text() == "mine"


def test_a_port_needs_the_token(guard: Guard, folder: Path) -> None:
    """Loopback is open to every local user; and neither answer nor refusal ever shows the token."""
    with Endpoint(guard.requests, folder / "t.sock", port=0, token=TOKEN) as endpoint:
        port = endpoint.port
        assert port is not None
        good = {"Authorization": f"Bearer {TOKEN.decode()}"}
        for headers, expected in [
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer "}, 401),
            ({"Authorization": "Bearer h\xe9ron"}, 401),
            ({"Authorization": f"Basic {TOKEN.decode()}"}, 401),
            (good, 200),
        ]:
            status, got, body = ask(port, "GET", "/api/v1/status", headers=headers)
            assert status == expected
            assert TOKEN not in body + str(got).encode()
        assert ask(port, "POST", "/api/v1/trigger_checkpoint", b'{"id": "a"}')[0] == 401
        assert ask(port, "POST", "/api/v1/trigger_checkpoint", b"x" * 500_000)[0] == 401
        assert ask(port, "DELETE", "/api/v1/checkpoints/a")[0] == 401
        assert guard.requests.status().checkpoint == ""
        assert ask(port, "POST", "/api/v1/trigger_checkpoint", b'{"id": "a"}', good)[0] == 202
        assert ask(folder / "t.sock", "GET", "/api/v1/status")[0] == 200, "the socket's mode is its guard"


GOOD = {"Authorization": f"Bearer {TOKEN.decode()}"}


def test_strangers_at_the_port_keep_no_holder_of_the_token_out(guard: Guard, folder: Path) -> None:
    """Any local user can connect, and reconnect at once: a request with the token is answered all the same."""
    ended, strangers = threading.Event(), 3 * MAX_STRANGERS

    def crowd(port: int) -> None:
        held: list[socket.socket] = []
        while not ended.wait(0.01):
            while len(held) < strangers:
                peer = socket.create_connection(("127.0.0.1", port), timeout=60)
                peer.sendall(b"G")
                peer.setblocking(False)
                held.append(peer)
            held = [peer for peer in held if _is_open(peer)]
        for peer in held:
            peer.close()

    with Endpoint(guard.requests, folder / "t.sock", port=0, token=TOKEN) as endpoint:
        assert endpoint.port is not None
        crowding = threading.Thread(target=crowd, args=[endpoint.port])
        crowding.start()
        try:
            time.sleep(0.5)
            answers = [ask(endpoint.port, "GET", "/api/v1/status", headers=GOOD)[0] for _ in range(20)]
        finally:
            ended.set()
            crowding.join()
        assert answers == [200] * 20


def test_a_token_that_was_sent_in_time_is_read_late(guard: Guard, folder: Path) -> None:
    """Training leaves a thread no time to read it before so many strangers have come that its connection must go."""
    begun: list[tuple[object, object]] = []
    with ExitStack() as stack, Endpoint(guard.requests, folder / "t.sock", port=0, token=TOKEN) as endpoint:
        server = endpoint._servers[-1]
        begin = server.begin

        def late(request: object, address: object) -> None:
            begun.append((request, address))
            for each in begun if len(begun) == 1 + MAX_STRANGERS else []:
                begin(*each)

        server.begin = late  # type: ignore[method-assign]
        peers = []
        for _ in range(1 + MAX_STRANGERS):
            peers.append(stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), timeout=60)))
            if len(peers) == 1:
                peers[0].sendall(
                    f"GET /api/v1/status HTTP/1.1\r\nAuthorization: {GOOD['Authorization']}\r\n\r\n".encode()
                )
        assert peers[0].recv(1000).startswith(b"HTTP/1.1 200 ")


def _is_open(peer: socket.socket) -> bool:
    try:
        is_open = peer.recv(100) != b""
    except BlockingIOError:
        return True
    except OSError:
        is_open = False
    if not is_open:
        peer.close()
    return is_open


def test_a_stranger_has_half_a_second_and_the_token_gives_the_rest(guard: Guard, folder: Path) -> None:
    with Endpoint(guard.requests, folder / "t.sock", port=0, token=TOKEN) as endpoint:
        address = ("127.0.0.1", endpoint.port)
        for head, least_s, most_s in [
            ("", 0.3, 3.0),
            ("Authorization: Bearer wrong\r\n", 0.0, 3.0),
            (f"Authorization: Bearer {TOKEN.decode()}\r\n", 3.5, 60.0),
        ]:
            for _ in range(5):  # of a machine that is busy the best of some: at 5 s all are let go
                took_s = let_go_after(address, head)
                assert took_s >= least_s
                if took_s < most_s:
                    break
            assert took_s < most_s


def let_go_after(address: tuple[str, int | None], head: str) -> float:
    """Return how long a request is waited for whose head, or body, never comes whole."""
    began_s = time.perf_counter()
    with socket.create_connection(address, timeout=60) as peer:
        end = "" if not head else f"{head}Content-Length: 9\r\n\r\n"
        peer.sendall(f"POST /api/v1/pause HTTP/1.1\r\n{end}".encode())
        while peer.recv(1000):
            pass
    return time.perf_counter() - began_s


def test_only_the_token_takes_a_slot(guard: Guard, folder: Path) -> None:
    """Sixteen requests with the token may wait at a time; one more gets 503, and one without the token 401."""
    with Endpoint(guard.requests, folder / "t.sock", port=0, token=TOKEN) as endpoint:
        assert endpoint.port is not None
        trigger(folder / "t.sock", "a")
        port = endpoint.port

        def wait() -> None:  # a question of the test's own may have had the last slot
            while ask(port, "GET", "/api/v1/checkpoints/a?wait=30", headers=GOOD)[0] == 503:
                time.sleep(0.02)

        waiting = [threading.Thread(target=wait) for _ in range(16)]
        for each in waiting:
            each.start()
        until_s = time.perf_counter() + 25.0
        while (answer := ask(endpoint.port, "GET", "/api/v1/status", headers=GOOD))[0] != 503:
            assert time.perf_counter() < until_s
            time.sleep(0.05)
        assert answer[1]["Retry-After"] == "1"
        assert ask(endpoint.port, "GET", "/api/v1/status")[0] == 401
        guard.step(1)
        for each in waiting:
            each.join(60)
        assert ask(endpoint.port, "GET", "/api/v1/status", headers=GOOD)[0] == 200


@pytest.mark.root
@pytest.mark.parametrize("squatted", [["llm.sock"], ["llm.sock", "llm.4321.sock"]])
@pytest.mark.parametrize("kind", ["listens", "dead", "file"])
def test_a_name_that_another_user_took_first_keeps_no_training_from_being_asked(
    folder: Path, squatted: list[str], kind: str
) -> None:
    """In the sticky folder it can be neither replaced nor removed: the training takes a name of its user's own."""
    folder.chmod(0o1777)
    listening = []
    for name in squatted:
        if kind == "file":
            (folder / name).touch()
        else:
            listening.append(socket.socket(socket.AF_UNIX))
            listening[-1].bind(str(folder / name))
            if kind == "listens":
                listening[-1].listen()
        os.chown(folder / name, 65534, -1)
        (folder / name).chmod(0o666)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(4321)
            os.setuid(4321)
            endpoint = endpoint_of(RequestQueue(job="llm", conduct=After.PAUSE), AUTO, None, None, folder=folder)
            (own,) = (path for path in folder.glob("llm.4321*.sock") if path.stat().st_uid == 4321)
            assert endpoint is not None
            asked = ask(own, "GET", "/api/v1/status")[0]
            found = [path for path in places_of(str(folder / "llm.sock"), {4321}) if path == str(own)]
            foreseen = own.name == "llm.4321.sock"
            code = 0 if (asked, found, foreseen) == (200, [str(own)], len(squatted) == 1) else 2
            endpoint.close()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for each in listening:
        each.close()
    assert code == 0


def test_a_second_training_of_the_same_name_and_user_has_no_second_name(
    guard: Guard, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That is one person's mistake, and the log says so."""
    with Endpoint(guard.requests, folder / "llm.sock"):
        assert endpoint_of(RequestQueue(job="llm", conduct=After.PAUSE), AUTO, None, None, folder=folder) is None
    assert "another trainer answers here" in caplog.text


def test_a_job_may_have_any_letters_in_the_metrics(folder: Path) -> None:
    """Prometheus knows the escapes of a quote, a backslash and a line's end; no others."""
    guard = Guard(saved_at, job="größe 大")
    with Endpoint(guard.requests, folder / "t.sock"):
        lines = ask(folder / "t.sock", "GET", "/metrics")[2].decode().splitlines()
    assert 'powerguard_trainer_paused{job="größe 大"} 0' in lines
