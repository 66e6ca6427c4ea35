"""The hint socket: anybody may say that something happened, and all that comes of it is an earlier poll."""

import asyncio
import json
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from powerguard.cli import event
from powerguard.daemon.control import hints
from powerguard.daemon.control.hints import AT_ONCE, POLL_EVERY_S, hint_path, hint_socket
from tests.daemon.looped import in_virtual_time
from tests.daemon.watched import Watched, scene

PATIENCE_S = 60.0
"""How long a test waits before it fails: no promise, so long enough for a busy machine."""


@pytest.fixture
def path() -> Iterator[Path]:
    """A short path: unix sockets take 107 bytes."""
    folder = tempfile.mkdtemp(dir="/tmp", prefix="pg ")
    yield Path(folder) / "hint.sock"
    shutil.rmtree(folder)


def give(path: Path, raw: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(raw, str(path))


def mode(path: Path) -> int | None:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


def write(path: Path) -> None:
    path.write_text("somebody's", encoding="ascii")
    path.chmod(0o644)


async def until(reached: Callable[[], bool]) -> None:
    while True:
        if reached():
            return
        await asyncio.sleep(0.005)


async def polled(daemon: Watched, times: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: daemon.polls >= times)


def test_daemon_and_hook_mean_the_same_socket() -> None:
    """The hook imports nothing of ours, so the name stands twice."""
    assert event.HINT_NAME == hints.NAME
    assert hint_path("/run/powerguard/powerguard.sock") == "/run/powerguard/hint.sock"


async def test_anybody_may_give_a_hint(path: Path) -> None:
    """Mode 0666, and gone with the daemon; a dead one of an earlier life makes way."""
    daemon = scene()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(path))
    async with hint_socket(daemon, path=str(path)):
        assert mode(path) == 0o666
        give(path, json.dumps({"name": "ONBATT", "ups": "rack-a"}).encode())
        await polled(daemon, 1)
        with pytest.raises(OSError, match="another powerguard"):
            async with hint_socket(daemon, path=str(path)):
                pass
    assert daemon.events == []
    assert mode(path) is None


async def test_what_is_in_the_way_stays(path: Path) -> None:
    write(path)
    with pytest.raises(OSError, match="not a socket"):
        async with hint_socket(scene(), path=str(path)):
            pass
    assert mode(path) == 0o644


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[1]",
        b'{"name": {"a": 1}}',
        b'{"name": "\\u001b[2J\\udcff", "ups": null}',
        b"[" * 4000,
        b'{"name": "' + b"x" * 4060 + b'"}',
    ],
)
async def test_whatever_it_says_it_is_a_hint_and_no_more(path: Path, raw: bytes) -> None:
    """Garbled, hostile, too long: a poll, a line in the log, nothing else."""
    daemon = scene("holding")
    async with hint_socket(daemon, path=str(path)):
        give(path, raw)
        await polled(daemon, 1)
    assert daemon.events == []


@in_virtual_time
async def test_a_flood_is_two_polls_and_twenty_lines(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first hint polls at once, all the others once more a second later; the log ends at twenty."""
    daemon = scene()
    loop = asyncio.get_running_loop()
    async with hint_socket(daemon, path=str(path)):
        began_s = loop.time()
        given = 0
        while loop.time() - began_s < 0.6 * POLL_EVERY_S:
            try:
                give(path, b'{"name": "x"}')
                given += 1
            except BlockingIOError:
                await asyncio.sleep(0.01)
        assert given > 2 * AT_ONCE
        assert daemon.polls == 1
        await polled(daemon, 2)
        assert POLL_EVERY_S <= loop.time() - began_s < 1.1 * POLL_EVERY_S
        give(path, b'{"name": "later"}')
        assert daemon.polls == 2
    result = capsys.readouterr().out.count("hint_received")
    assert result == 20


async def test_the_socket_goes_with_its_server(path: Path) -> None:
    daemon = scene()
    async with hint_socket(daemon, path=str(path)):
        give(path, b"{}")
        await polled(daemon, 1)
    assert mode(path) is None
