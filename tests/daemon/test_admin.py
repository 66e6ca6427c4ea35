"""The admin socket: who may change what, asked of the kernel and not of the client."""

import asyncio
import grp
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from powerguard.core.model.events import Abort, BatteryReplaced, CheckpointNow, SetMaintenance
from powerguard.core.model.policy import Mode
from powerguard.core.model.state import (
    Activity,
    Feed,
    Maintenance,
    Shutdown,
    State,
    Supply,
)
from powerguard.daemon.control.admin import (
    GROUP,
    Admin,
    Caller,
    Directory,
    admin_server,
    may_change,
    owns_shutdown,
    peer_of,
)
from tests.daemon.watched import NOW_S, PHASES, in_mode, scene


@pytest.fixture
def path() -> Iterator[str]:
    """A short path: unix sockets take 107 bytes."""
    folder = tempfile.mkdtemp(dir="/tmp", prefix="pg ")
    yield f"{folder}/powerguard.sock"
    shutil.rmtree(folder)


async def post(path: str, verb: str, body: object = None, raw: bytes | None = None) -> tuple[int, dict[str, Any]]:
    data = json.dumps(body or {}).encode() if raw is None else raw
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
        session.post(f"http://localhost/api/v1/{verb}", data=data) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize("phase", PHASES)
async def test_reads_are_here_too(path: str, phase: str) -> None:
    """One socket is enough for the command line."""
    async with (
        admin_server(scene(phase), path=path),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
    ):
        for target in ("/api/v1/status", "/api/v1/plan", "/api/v1/battery", "/metrics", "/healthz", "/readyz"):
            async with session.get(f"http://localhost{target}") as answer:
                assert answer.status == 200


@pytest.mark.parametrize("phase", PHASES)
async def test_abort_before_the_latch_only(path: str, phase: str) -> None:
    """Taken while there is a shutdown that can be called off; otherwise refused with the reason."""
    daemon = scene(phase)
    async with admin_server(daemon, path=path):
        code, body = await post(path, "abort", {"reason": "generator is up"})
    if phase in ("emergency_checkpoint", "holding"):
        (event,) = daemon.events
        assert isinstance(event, Abort)
        assert (event.reason, event.at_s) == ("generator is up", NOW_S)
        assert (code, body["object"], body["who"]) == (202, "accepted", event.who)
    else:
        assert (code, body["object"], daemon.events) == (409, "error", [])
        assert body["error"]
    if phase == "shutdown":
        assert "commit point" in body["error"]


async def test_maintenance_on_and_off(path: str) -> None:
    """With an end and a reason, or not at all."""
    daemon = scene()
    async with admin_server(daemon, path=path):
        assert (await post(path, "maintenance", {"for_s": 7200, "reason": "fan swap"}))[0] == 202
        assert (await post(path, "maintenance", {"for_s": 0}))[0] == 202
    on, off = daemon.events
    assert isinstance(on, SetMaintenance)
    assert isinstance(off, SetMaintenance)
    assert (on.until_s, on.reason, on.who) == (NOW_S + 7200.0, "fan swap", off.who)
    assert off.until_s <= off.at_s


@pytest.mark.hurried
async def test_an_answer_may_take_as_long_as_its_caller_waits(path: str) -> None:
    """A slow BMC: the watchdog drill must not look failed when it powers the host off."""

    async def slow(_names: list[str], _limit_s: float) -> dict[str, tuple[bool, str]]:
        await asyncio.sleep(15.0)
        return {"ops": (True, "ok")}

    async with admin_server(scene(), path=path, tester=slow):
        code, body = await post(path, "notify-test")
    assert (code, body["results"][0]["delivered"]) == (202, True)


WRONG = [
    ({}, "for_s"),
    ({"for_s": -1, "reason": "x"}, "for_s"),
    ({"for_s": "2h", "reason": "x"}, "for_s"),
    ({"for_s": True, "reason": "x"}, "for_s"),
    ({"for_s": float("nan"), "reason": "x"}, "for_s"),
    ({"for_s": 8 * 86400, "reason": "x"}, "for_s"),
    ({"for_s": 60}, "reason"),
    ({"for_s": 60, "reason": ["x"]}, "reason"),
]


@pytest.mark.parametrize(("body", "word"), WRONG)
async def test_maintenance_that_makes_no_sense(path: str, body: object, word: str) -> None:
    """What is wrong is named, and nothing happens."""
    daemon = scene()
    async with admin_server(daemon, path=path):
        code, answer = await post(path, "maintenance", body)
    assert (code, daemon.events) == (400, [])
    assert answer["error"].startswith(f"{word}: ")


@pytest.mark.parametrize("raw", [b"{", b"[]", b"[" * 4000, b"\xff", b'"x"'])
async def test_body_that_is_no_object(path: str, raw: bytes) -> None:
    daemon = scene("holding")
    async with admin_server(daemon, path=path):
        code, answer = await post(path, "abort", raw=raw)
        assert (code, answer["object"]) == ((400, "error"))
        code, answer = await post(path, "abort", raw=b"{" + b" " * 5000 + b"}")
        assert code == 413
    assert daemon.events == []


async def test_hostile_reason_is_cleaned(path: str) -> None:
    """What goes to the log and the terminal has no control characters and an end."""
    daemon = scene("holding")
    async with admin_server(daemon, path=path):
        await post(path, "abort", {"reason": "\x1b[31m\n" + "x" * 3000})
    (event,) = daemon.events
    assert isinstance(event, Abort)
    assert event.reason.isprintable()
    assert len(event.reason) == 200


async def test_checkpoint_needs_a_trainer(path: str) -> None:
    """Nobody to ask is an error, not an accepted nothing."""
    daemon = scene()
    async with admin_server(daemon, path=path):
        code, body = await post(path, "checkpoint")
        assert (code, body["trainers"]) == (202, ["llm"])
        (event,) = daemon.events
        assert isinstance(event, CheckpointNow)
        daemon.state = replace(daemon.state, trainers=(replace(daemon.state.trainers[0], activity=Activity.GONE),))
        code, body = await post(path, "checkpoint")
    assert (code, len(daemon.events)) == (409, 1)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_battery_is_replaced_on_utility_only(path: str, phase: str) -> None:
    """In an outage a measured health would become a default just when it counts."""
    daemon = scene(phase)
    async with admin_server(daemon, path=path):
        code, body = await post(path, "battery-replaced", {"installed": "2026-11"})
    if phase != "online":
        assert (code, body["object"], daemon.events) == (409, "error", [])
        return
    (event,) = daemon.events
    assert isinstance(event, BatteryReplaced)
    assert (event.at_s, event.who) == (NOW_S, body["who"])
    assert (code, body["ups"], body["presumed"]) == (202, "rack-a", {"health": 0.75, "origin": "default"})


async def test_a_battery_is_not_replaced_while_a_self_test_drains_it(path: str) -> None:
    """No outage, and yet the old one carries the load."""
    daemon = scene()
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, supply=Supply.BATTERY))
    async with admin_server(daemon, path=path):
        assert (await post(path, "battery-replaced"))[0] == 409
    assert daemon.events == []


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"installed": "2026-13"}, 400, "installed: "),
        ({"installed": "last year"}, 400, "installed: "),
        ({"installed": 2026}, 400, "installed: "),
        ({"ups": ["rack-a"]}, 400, "ups: "),
        ({"ups": "rack-b"}, 409, "ups: "),
    ],
)
async def test_a_battery_that_nobody_could_have_meant(path: str, body: object, code: int, words: str) -> None:
    daemon = scene()
    async with admin_server(daemon, path=path):
        status, answer = await post(path, "battery-replaced", body)
    assert (status, daemon.events) == (code, [])
    assert answer["error"].startswith(words)


@pytest.mark.parametrize("phase", PHASES)
async def test_event_is_a_hint(path: str, phase: str) -> None:
    """Whatever it is called, it causes a poll and nothing else: no event reaches the core."""
    daemon = scene(phase)
    async with admin_server(daemon, path=path):
        code, body = await post(path, "event", {"name": "doshutdown", "ups": "rack-a"})
    owned = phase not in ("online", "recovery")
    assert (code, body["owned"], daemon.polls, daemon.events) == (202, owned, 1, [])


def test_owns_the_shutdown_only_when_it_can_do_it() -> None:
    """Another UPS daemon stands back only for one that is armed, awake, and knows of the outage."""
    assert owns_shutdown(scene("holding"))
    assert not owns_shutdown(in_mode(scene("holding"), Mode.DRY_RUN))
    assert not owns_shutdown(in_mode(scene("holding"), Mode.REHEARSE))
    assert not owns_shutdown(replace(scene("holding"), progressed_at_s=NOW_S - 9.0))
    assert not owns_shutdown(replace(scene(), state=State(feed=Feed())))
    dark = scene("on_battery").state
    maintained = replace(dark, maintenance=Maintenance(until_s=NOW_S + 9.0, reason="fan", who="root"))
    assert owns_shutdown(replace(scene("on_battery"), state=maintained))
    lost = replace(dark, feed=replace(dark.feed, lost_since_s=NOW_S - 60.0))
    assert owns_shutdown(replace(scene("on_battery"), state=lost))


@pytest.mark.parametrize("phase", ["on_battery", "holding"])
def test_owns_no_shutdown_that_it_could_not_carry_out(phase: str) -> None:
    """powerguard-off is gone: if the other daemon stood back, the host would run until the battery is empty."""
    assert not owns_shutdown(replace(scene(phase), power_off_trouble="powerguard-off.socket is not listening"))


@pytest.mark.parametrize("ordered", [True, False])
def test_owns_a_shutdown_that_is_under_way(*, ordered: bool) -> None:
    """powerguard-off has its order, and the shutdown stops its socket."""
    daemon = replace(scene("shutdown"), power_off_trouble="powerguard-off.socket is not listening")
    assert isinstance(daemon.state.phase, Shutdown)
    daemon.state = replace(daemon.state, phase=replace(daemon.state.phase, ordered=ordered))
    assert owns_shutdown(daemon) is ordered


def test_owns_no_shutdown_of_which_it_knows_nothing() -> None:
    """Another UPS, a source that was lost on utility, an order that only upsd tells: the other daemon knows more."""
    assert not owns_shutdown(scene())
    feed = scene().state.feed
    lost = replace(scene().state, feed=replace(feed, lost_since_s=NOW_S - 3600.0))
    assert not owns_shutdown(replace(scene(), state=lost))
    assert not owns_shutdown(scene("recovery"))
    again = scene("recovery").state
    dark = replace(again, feed=replace(again.feed, supply=Supply.BATTERY))
    assert owns_shutdown(replace(scene("recovery"), state=dark))


async def test_leaves_an_order_of_upsmon_alone_unless_it_hears_upsd(path: str) -> None:
    """It may be a forced shutdown: the UPS cuts its output soon, and SNMP does not tell."""
    daemon = scene("holding")
    async with admin_server(daemon, path=path):
        assert (await post(path, "event", {"name": "nut-shutdown"}))[1]["owned"] is False
        daemon.sources = (*daemon.sources, replace(daemon.sources[0], source="nut:rack-a@10.0.0.9"))
        assert (await post(path, "event", {"name": "nut-shutdown"}))[1]["owned"] is True


async def test_leaves_a_slave_of_apcupsd_to_its_master_unless_it_hears_that_one(path: str) -> None:
    """The master goes down and may take the power with it; our own apcupsd on this host is the slave itself."""
    daemon = scene("holding")
    one = daemon.sources[0]
    async with admin_server(daemon, path=path):
        assert (await post(path, "event", {"name": "doshutdown"}))[1]["owned"] is True
        assert (await post(path, "event", {"name": "doshutdown-slave"}))[1]["owned"] is False
        daemon.sources = (one, replace(one, source="apcupsd:127.0.0.1"))
        assert (await post(path, "event", {"name": "doshutdown-slave"}))[1]["owned"] is False
        daemon.sources = (one, replace(one, source="apcupsd:10.0.0.9"))
        assert (await post(path, "event", {"name": "doshutdown-slave"}))[1]["owned"] is True


def test_who_may_change() -> None:
    """Root, ourselves, and the group by any of the peer's groups."""
    stranger = Caller(pid=1, uid=1000, gid=1000, groups=(1000, 27))
    assert not may_change(stranger, own_uid=990, admin_gid=991)
    assert not may_change(stranger, own_uid=990, admin_gid=None)
    assert may_change(stranger, own_uid=1000, admin_gid=None)
    assert may_change(stranger, own_uid=990, admin_gid=27)
    assert may_change(replace(stranger, gid=991), own_uid=990, admin_gid=991)
    assert may_change(replace(stranger, uid=0), own_uid=990, admin_gid=None)


def test_kernel_names_the_peer() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        peer = peer_of(ours)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert set(peer.groups) == set(os.getgroups())


async def is_named(directory: Directory, caller: Caller, name: str) -> None:
    """Wait until the directory calls a caller so: the thread that looks up may be late on a busy machine."""
    async with asyncio.timeout(60.0):
        while (await directory.named(caller)).name != name:
            pass


async def test_a_name_service_that_hangs_holds_nobody_up() -> None:
    """As LDAP without a network: the user is called by the number, and the group of before still counts. Not root's."""
    hangs, goes_on = threading.Event(), threading.Event()

    def user_of(uid: int) -> str:
        if hangs.is_set():
            goes_on.wait(250.0)
        return f"user-{uid}"

    directory = Directory("admins", user_of=user_of, group_of=lambda _: 991)
    root, alice, bob = (Caller(pid=1, uid=uid, gid=uid, name=f"uid {uid}") for uid in (0, 1000, 1001))
    await is_named(directory, alice, "user-1000")
    hangs.set()
    assert [(await directory.named(each)).name for each in (alice, alice, bob)] == ["uid 1000", "uid 1000", "uid 1001"]
    assert (directory.gid, (await directory.named(root)).name) == (991, "root")
    goes_on.set()
    await is_named(directory, bob, "user-1001")
    await directory.aclose()


async def test_no_thread_is_left_behind_by_a_server(path: str) -> None:
    """Each reload makes a new one."""
    before = set(threading.enumerate())
    async with admin_server(scene(), path=path):
        assert (await post(path, "event", {"name": "x"}))[0] == 202
    for thread in set(threading.enumerate()) - before:
        thread.join(60.0)
        assert not thread.is_alive()


ASK = (
    "import os,socket,sys\n"
    "os.setgroups([int(g) for g in sys.argv[3:]]);os.setgid(65534);os.setuid(65534)\n"
    "s=socket.socket(socket.AF_UNIX);s.connect(sys.argv[1])\n"
    "s.sendall(b'POST /api/v1/%s HTTP/1.0\\r\\n\\r\\n' % sys.argv[2].encode())\n"
    "print(s.recv(65536).decode())\n"
)


async def ask_as_nobody(path: str, verb: str, *groups: int) -> str:
    argv = [sys.executable, "-c", ASK, path, verb, *map(str, groups)]
    child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    return out.decode().split("\r\n", 1)[0]


async def is_taken(path: str, verb: str, *groups: int) -> bool:
    """Whether an order is taken, at the latest once the group has been found, which a busy machine may delay."""
    for _ in range(30):
        if " 403 " not in (said := await ask_as_nobody(path, verb, *groups)):
            return " 202 " in said
    return False


@pytest.mark.root
async def test_stranger_is_refused_and_the_group_is_not(path: str) -> None:
    """A real process of another user: refused; with the group among its supplementary groups: taken; hints: anybody."""
    daemon = scene("holding")
    group = grp.getgrgid(os.getgrouplist("daemon", 1)[0])
    Path(path).parent.chmod(0o755)
    async with admin_server(daemon, path=path, mode=0o666, group=group.gr_name):
        assert " 403 " in await ask_as_nobody(path, "abort")
        assert " 403 " in await ask_as_nobody(path, "maintenance")
        assert daemon.events == []
        assert " 202 " in await ask_as_nobody(path, "event")
        assert await is_taken(path, "abort", group.gr_gid)
        assert await is_taken(path, "abort", group.gr_gid, *range(20_000, 20_400)), "as LDAP may give"
    assert len(daemon.events) == 2


async def test_a_group_that_is_not_found_at_the_start_is_reported(path: str) -> None:
    with capture_logs() as logs:
        async with admin_server(scene(), path=path, group="no-such-group"):
            pass
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == ["group_not_set"]


BIND = (
    "import os,pathlib,sys\n"
    "from powerguard.daemon.control.admin import bind_unix\n"
    "os.setgroups([]);os.setgid(65534);os.setuid(65534)\n"
    "bind_unix(pathlib.Path(sys.argv[1]), 0o660, int(sys.argv[2]))\n"
)


@pytest.mark.root
async def test_a_group_that_the_daemon_is_not_in_is_reported(path: str) -> None:
    """Its members cannot connect, and would not know why."""
    Path(path).parent.chmod(0o777)
    argv = [sys.executable, "-c", BIND, path, str(grp.getgrnam("daemon").gr_gid)]
    child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    assert (child.returncode, b"group_not_set" in out) == (0, True)


def mode_of(path: str) -> int | None:
    return stat.S_IMODE(Path(path).stat().st_mode) if Path(path).exists() else None


def leave(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")


def left(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


async def test_mode_is_right_from_the_first_moment(path: str) -> None:
    async with admin_server(scene(), path=path):
        assert mode_of(path) == 0o660
    assert mode_of(path) is None


async def test_dead_socket_makes_way_and_a_living_one_does_not(path: str) -> None:
    """kill -9 leaves the socket behind; a second daemon beside the first would be worse."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    async with admin_server(scene(), path=path):
        with pytest.raises(FileExistsError, match="another powerguard listens there"):
            async with admin_server(scene(), path=path):
                pass
        assert (await post(path, "event"))[0] == 202


async def test_file_in_the_way_is_left_alone(path: str) -> None:
    leave(path, "precious")
    with pytest.raises(FileExistsError, match="not a socket"):
        async with admin_server(scene(), path=path):
            pass
    assert left(path) == "precious"


def test_examples_in_the_reference_are_true() -> None:
    """What the reference shows is what the socket answers."""
    reference = Path(__file__).parents[2] / "docs" / "reference"
    root = Caller(pid=4711, uid=0, gid=0, name="root")
    taken = Admin(scene(), Directory(GROUP)).maintenance(root, {"for_s": 7200, "reason": "fan swap"})
    refused = Admin(scene("shutdown"), Directory(GROUP)).abort(root, {})
    for name, answer in (("accepted", taken), ("error", refused)):
        assert json.loads((reference / f"{name}.json").read_text(encoding="utf-8")) == json.loads(answer[1])


async def test_one_that_leaves_in_mid_request_is_no_fault_of_ours(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Promises a body, sends none and goes: no traceback for it, or anybody could fill the log."""
    async with admin_server(scene(), path=path):
        for _ in range(3):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(b"POST /api/v1/event HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)
            assert isinstance(writer.transport, asyncio.WriteTransport)
            writer.transport.abort()
            await asyncio.sleep(0.05)
        assert (await post(path, "event", {"name": "x"}))[0] == 202
    assert "Traceback" not in caplog.text
