"""The log: no secrets, no broken lines, nothing that waits; to journald, as logfmt and as JSON."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog

from powerguard.core.model.actions import EnsurePolicy, Grade
from powerguard.daemon.log import JournalSink, Log, StreamSink, Style, bind_outage, configure, is_secret, open_scope
from tests.peers.jobs import until
from tests.peers.machine import unhindered_s

PASSWORD = "correct horse battery staple"


class Lines:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.lost = 0
        self.all: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.all.append(line)

    def close(self, limit_s: float = 0.5) -> None:
        del limit_s

    def one(self) -> str:
        (line,) = self.all
        return line.decode(errors="replace")  # journald: the length of a value is bytes


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Where this test's log goes; afterwards logging is as before."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    open_scope()
    yield Lines()
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    structlog.reset_defaults()


def to(lines: Lines, style: Style, level: str = "info") -> Log:
    # pytest's own handlers raise where a library's line cannot be formatted; the daemon has none but ours.
    logging.getLogger().handlers.clear()
    return configure(style=style, level=level, sink=lines)


def untimed(line: str) -> str:
    time, _, rest = line.partition(" ")
    assert time.startswith("time=20")
    return rest


def test_logfmt(lines: Lines) -> None:
    to(lines, Style.LOGFMT)
    structlog.get_logger().warning(
        "source_lost", ups="rack-a", because="three misses", age_s=3.0, armed=True, since=None
    )
    at, _, rest = lines.one().partition(" ")
    assert -60 < (datetime.now(UTC) - datetime.fromisoformat(at.removeprefix("time="))).total_seconds() < 60
    assert rest == ('level=warning event=source_lost ups=rack-a because="three misses" age_s=3.0 armed=true since=\n')


def test_json(lines: Lines) -> None:
    to(lines, Style.JSON)
    structlog.get_logger().info("phase_changed", runtime_s=612.5, numbers=[1, "x"], bad=float("inf"))
    answer = json.loads(lines.one())
    assert -60 < (datetime.now(UTC) - datetime.fromisoformat(answer.pop("time"))).total_seconds() < 60
    assert answer == {
        "level": "info",
        "event": "phase_changed",
        "runtime_s": 612.5,
        "numbers": [1, "x"],
        "bad": "inf",
    }


def test_journald_fields(lines: Lines) -> None:
    to(lines, Style.JOURNALD)
    bind_outage("2026-11-21T04:12Z-a3")
    structlog.get_logger().error("policy_refused", because="no privilege", took_s=1.25)
    assert lines.one().splitlines() == [
        'MESSAGE=policy_refused outage=2026-11-21T04:12Z-a3 because="no privilege" took_s=1.25',
        "PRIORITY=3",
        "SYSLOG_IDENTIFIER=powerguard",
        "PG_EVENT=policy_refused",
        "PG_OUTAGE=2026-11-21T04:12Z-a3",
        "PG_BECAUSE=no privilege",
        "PG_TOOK_S=1.25",
    ]


@pytest.mark.parametrize(
    ("level", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3), ("critical", 2)]
)
def test_levels(lines: Lines, level: str, priority: int) -> None:
    to(lines, Style.JOURNALD, "debug")
    getattr(structlog.get_logger(), level)("x_happened")
    assert f"PRIORITY={priority}\n" in lines.one()


def test_what_is_below_the_level_is_not_rendered(lines: Lines) -> None:
    to(lines, Style.LOGFMT, "warning")
    structlog.get_logger().info("x_happened")
    assert lines.all == []


# --- Secrets ----------------------------------------------------------------------------------


@dataclass
class Login:
    """What a careless line might hand over."""

    user: str
    password: str


def log_in(password: str) -> None:
    login = Login("pg", password)
    raise ConnectionError(login.user + ": refused")


def fail(way: str) -> None:
    if way == "group":
        raise ExceptionGroup("several", [_caught(refuse)])  # noqa: EM101 - as asyncio does
    log_in(PASSWORD)


OUTER = RuntimeError("outer")
STYLES = [Style.LOGFMT, Style.JSON, Style.JOURNALD]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("way", ["exception", "exc_info", "stdlib", "nested", "group"])
def test_a_traceback_shows_no_locals(lines: Lines, style: Style, way: str) -> None:
    """The password is an argument and a local of a frame in the traceback, and appears in no format."""
    to(lines, style)
    try:
        if way == "nested":
            try:
                log_in(PASSWORD)
            except ConnectionError as error:
                raise OUTER from error
        fail(way)
    except Exception as error:
        if way == "stdlib":
            logging.getLogger("asyncio").exception("Task exception was never retrieved")
        elif way == "exc_info":
            structlog.get_logger().error("action_failed", exc_info=error)
        else:
            structlog.get_logger().exception("action_failed")
    line = lines.one()
    assert "log_in" in line, "the traceback is there"
    assert "refused" in line
    assert PASSWORD not in line
    assert "staple" not in line


def refuse() -> None:
    log_in(PASSWORD)


def _caught(call: Callable[[], None]) -> Exception:
    try:
        call()
    except ConnectionError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "values",
    [
        {"password": PASSWORD},
        {"snmp_auth_password": PASSWORD},
        {"community": PASSWORD},
        {"token": PASSWORD},
        {"Authorization": PASSWORD},
        {"auth_key": PASSWORD, "priv_key": PASSWORD},
        {"options": {"host": "10.0.0.5", "login": {"passphrase": PASSWORD}}},
        {"options": [{"api-key": PASSWORD}]},
        {"login": Login("pg", PASSWORD)},
        {"raw": PASSWORD.encode()},
        {"url": f"https://pg:{PASSWORD.replace(' ', '')}@10.0.0.5/"},
        {"url": f"https://pg:p@{PASSWORD.replace(' ', '')}@10.0.0.5/"},
        {"what": Log},
    ],
    ids=",".join,
)
def test_what_looks_like_a_secret_is_not_shown(lines: Lines, style: Style, values: dict[str, object]) -> None:
    """The second net; the first is that nobody logs one."""
    to(lines, style)
    structlog.get_logger().info("settings_read", **values)
    assert PASSWORD.partition(" ")[0] not in lines.one()


@pytest.mark.parametrize("key", ["tokens_per_s", "passed", "bypass", "credential", "authenticated", "key", "passive"])
def test_what_only_sounds_like_a_secret_is_shown(key: str) -> None:
    assert not is_secret(key)


# --- Hostile values ----------------------------------------------------------------------------------

HOSTILE = "UPS\n12:00:00 error host_lost\r\x1b[2J\x00\u202egnp.exe\u2028level=error PRIORITY=0\nMESSAGE=x\ud800"


@pytest.mark.parametrize("style", STYLES)
def test_a_hostile_name_stays_one_value(lines: Lines, style: Style) -> None:
    """In a value, in a key, in the event, in an exception, in an object: one line, all of it printable."""
    log = to(lines, style)
    logger = structlog.get_logger()
    logger.info("ups_found", name=HOSTILE, more={HOSTILE: [HOSTILE]}, grade=Grade.FULL)
    logger.info(HOSTILE, **{HOSTILE: 1})
    logging.getLogger("pysnmp").warning("%s %d", HOSTILE, "not a number")
    try:
        int(HOSTILE)
    except ValueError:
        logger.exception("x_failed")
    assert len(lines.all) == 4
    for line in lines.all:
        text = line.decode()
        if style is Style.JOURNALD:
            fields = [each.partition("=")[0] for each in text.split("\n")]
            assert fields.count("MESSAGE") == 1
            assert fields.count("PRIORITY") == 1
            text = "".join(char for char in text.partition("PG_EXCEPTION\n")[0] if char != "\n")
        else:
            assert text.count("\n") == 1
            text = text.removesuffix("\n")
        assert text.isprintable()
    assert log.lost == 0


@pytest.mark.parametrize("style", STYLES)
def test_the_length_of_a_line_is_bounded(lines: Lines, style: Style) -> None:
    to(lines, style)
    deep: object = "x" * 10_000
    for _ in range(50):
        deep = [deep] * 50
    wide = {str(n): "y" * 900 for n in range(500)}
    structlog.get_logger().info("ups_found", name="x" * 1_000_000, deep=deep, wide=wide)
    assert len(lines.all[0]) < 30_000


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__


def test_an_object_is_shown_by_its_class_only(lines: Lines) -> None:
    """Its repr may hold anything, or raise."""
    to(lines, Style.LOGFMT)
    action = EnsurePolicy(id="o-1", by_s=2.0, outage="o")
    structlog.get_logger().info("x_seen", what=Unspeakable(), where=Path("/run/x y"), action=action)
    logging.getLogger("lib").error("%s", Unspeakable())
    assert 'what=<Unspeakable> where="/run/x y" action="{' in lines.all[0].decode()
    assert "(its arguments do not fit)" in lines.all[1].decode()


def test_libraries_are_heard_from_warning_on(lines: Lines) -> None:
    to(lines, Style.LOGFMT)
    logging.getLogger("aiohttp.access").info("GET / 200")
    logging.getLogger("aiohttp.server").warning("odd %s", "request")
    assert untimed(lines.one()) == ('level=warning event=library_logged library=aiohttp.server message="odd request"\n')


# --- Which outage ----------------------------------------------------------------------------------


async def test_the_outage_is_on_the_lines_of_tasks_that_are_older_than_it(lines: Lines) -> None:
    """Sources are started long before; and another daemon in this process (the simulator's) is not concerned."""
    to(lines, Style.LOGFMT)
    logger = structlog.get_logger()
    begun, taken, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def source() -> None:
        await begun.wait()
        logger.info("reading_taken")
        taken.set()
        await over.wait()
        logger.info("reading_taken")

    async def daemon() -> None:
        open_scope()
        async with asyncio.TaskGroup() as group:
            group.create_task(source())
            await asyncio.sleep(0)
            bind_outage("o-1")
            begun.set()
            await taken.wait()
            bind_outage(None)
            over.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(daemon())
    logger.info("elsewhere")
    assert [untimed(line.decode()).split() for line in lines.all] == [
        ["level=info", "event=reading_taken", "outage=o-1"],
        ["level=info", "event=reading_taken"],
        ["level=info", "event=elsewhere"],
    ]


# --- Sinks that fail ----------------------------------------------------------------------------------


def test_a_full_pipe_holds_nobody_up(lines: Lines) -> None:
    """Whoever reads our stderr has stopped: lines are lost and counted, and come again when he reads on."""
    reader, writer = os.pipe()
    sink = StreamSink(writer, held=100)
    log = configure(style=Style.LOGFMT, sink=sink)
    began_s = unhindered_s()
    for number in range(3000):
        structlog.get_logger().info("x_happened", number=number, filler="y" * 400)
    assert unhindered_s() - began_s < 10, "else it waits for as long as nobody reads"
    assert log.lost > 1000
    began_s = unhindered_s()
    sink.close(limit_s=0.1)
    assert unhindered_s() - began_s < 3
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.readlines()  # to the end: the thread has ended, and closed its side
    assert b"number=0 " in found[0]
    assert len(found) == 3000 - log.lost


@pytest.mark.parametrize("how", ["reader gone", "closed", "not blocking"])
def test_a_broken_stderr(lines: Lines, how: str) -> None:
    reader, writer = os.pipe()
    if how == "not blocking":
        os.set_blocking(writer, False)
    if how == "closed":
        os.close(writer)
        os.close(reader)
        sink = StreamSink(writer)
    else:
        sink = StreamSink(writer)
        os.close(writer)  # the sink has a descriptor of its own
        if how == "reader gone":
            os.close(reader)
    log = configure(style=Style.LOGFMT, sink=sink)
    for number in range(300):
        structlog.get_logger().info("x_happened", number=number, filler="y" * 400)
    if how == "not blocking":
        with os.fdopen(reader, "rb") as pipe:
            found = [pipe.readline() for _ in range(300)]
        assert b"number=299 " in found[-1]
    log.close()
    lost = 0 if how == "not blocking" else 300
    until(lambda: log.lost >= lost)  # the thread that writes has half a second to end
    assert log.lost == lost


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def test_journald_that_listens_stops_reading_and_goes_away(lines: Lines, folder: Path) -> None:
    path = str(folder / "journal")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        log = configure(style=Style.JOURNALD, sink=JournalSink(path))
        structlog.get_logger().info("x_happened", number=1)
        assert b"PG_NUMBER=1\n" in listener.recv(65536)
        began_s = unhindered_s()
        for number in range(2000):
            structlog.get_logger().info("x_happened", number=number)
        assert unhindered_s() - began_s < 10
        stalled = log.lost
        assert stalled > 1000
    structlog.get_logger().info("x_happened")
    assert log.lost == stalled + 1
    log.close()
    structlog.get_logger().info("x_happened")
    assert log.lost == stalled + 2


def test_the_real_journald_takes_our_largest_entry(lines: Lines) -> None:
    """One datagram must do: what does not fit into a socket buffer would need a file descriptor instead."""
    to(lines, Style.JOURNALD)
    wide = {f"key{n}": "y" * 1000 for n in range(20)}
    try:
        int("x" * 20_000)
    except ValueError:
        structlog.get_logger().exception("x_failed", wide=wide, **wide)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.setblocking(False)
        assert ours.send(lines.all[0]) == len(lines.all[0])
        assert theirs.recv(1 << 20) == lines.all[0]


def test_auto_finds_journald_by_its_stream(lines: Lines) -> None:
    """$JOURNAL_STREAM is inherited by whoever redirects stderr elsewhere: device and inode decide."""
    with tempfile.TemporaryFile() as file:
        stream = os.fstat(file.fileno())
        environ = {"JOURNAL_STREAM": f"{stream.st_dev}:{stream.st_ino}"}
        assert configure(sink=lines, environ=environ, fd=file.fileno()).style is Style.JOURNALD
        assert configure(sink=lines, environ=environ, fd=2).style is Style.LOGFMT
        assert configure(sink=lines, environ={}, fd=file.fileno()).style is Style.LOGFMT
        assert configure(sink=lines, environ=environ, fd=9999).style is Style.LOGFMT


PROGRAM = """
import structlog
from powerguard.daemon.log import configure
configure(style="json")
structlog.get_logger().info("x_happened", number=1)
"""


def test_the_last_line_comes_out_at_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(ended.stderr)["event"] == "x_happened"
