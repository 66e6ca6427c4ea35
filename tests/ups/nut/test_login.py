"""When the nut source logs in, and when again: what a primary counts on, and what must never cost a reading."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from powerguard.core.model.events import Reading
from powerguard.options import Secret
from powerguard.ups.nut.connection import Link
from powerguard.ups.nut.source import Login
from tests.ups.nut.nut_helpers import Answerer, FakeUpsd, Heard, Later, forget, listening, options, until
from tests.ups.snmp.snmp_helpers import secret

pytestmark = pytest.mark.hurried


class Doorkeeper:
    """Answers LOGIN as a test wants it, and everything else as upsd does."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.hangs_up = False

    def __call__(self, upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes | None:
        if self.hangs_up:
            self.hangs_up = False
            writer.close()
            return None
        if words[0] == "LOGIN" and self.answers:
            return self.answers.pop(0)
        return upsd.honest(words)


@asynccontextmanager
async def logging_in(
    answer: Answerer | None, password: Secret, clock: Later, **more: object
) -> AsyncIterator[tuple[FakeUpsd, Heard]]:
    """Run a source that logs in at a upsd that answers so."""
    async with FakeUpsd(answer=answer).serving() as upsd:
        settings = options(upsd.port, user="pg", password=password, **more)
        async with listening(settings, clock=clock) as (_, heard):
            yield upsd, heard


async def noted(logs: Sequence[EventDict], event: str, times: int = 1) -> None:
    """Wait until the log has it: an answer to LOGIN that upsd has given is not one that has been read."""
    while sum(entry["event"] == event for entry in logs) < times:  # noqa: ASYNC110 - the log tells nobody
        await asyncio.sleep(0.02)


async def looks(heard: Heard, times: int) -> None:
    """Let the source look so often from now on: what it has published before does not count."""
    forget(heard)
    for _ in range(times):
        await until(heard, Reading)


async def test_a_reading_comes_before_the_login_and_nobody_logs_out(tmp_path: Path) -> None:
    """A login that hangs must not hold up what counts; one that stands is never given back while we run."""
    async with logging_in(None, secret(tmp_path, "word", "the word"), Later()) as (upsd, heard):
        await until(heard, Reading)
        await upsd.hears("LOGIN", 1)
        await looks(heard, 2)
        words = [request[0] for request in upsd.requests]
        assert words.index("LIST") < words.index("USERNAME") < words.index("PASSWORD") < words.index("LOGIN")
        assert ("PASSWORD", "the word") in upsd.requests
        assert (upsd.said("LOGOUT"), upsd.said("LOGIN"), upsd.connections) == (0, 1, 1)


async def test_a_driver_that_is_not_there_yet_delays_the_login_on_the_same_connection(tmp_path: Path) -> None:
    """upsd answers LOGIN with the driver's troubles; it takes a password only once for each connection."""
    door = Doorkeeper(b"ERR DRIVER-NOT-CONNECTED\n", b"ERR DATA-STALE\n")
    with capture_logs() as logs:
        async with logging_in(door, secret(tmp_path, "word", "w"), Later()) as (upsd, heard):
            await until(heard, Reading)
            await upsd.hears("LOGIN", 3)
            assert (upsd.said("USERNAME"), upsd.said("PASSWORD"), upsd.connections) == (1, 1, 1)
            await noted(logs, "login_held")
    assert [entry["event"] for entry in logs] == ["login_held"]


async def test_a_refused_login_is_tried_again_after_five_minutes_on_utility_only(tmp_path: Path) -> None:
    """It takes a new connection, which nobody risks on battery; the alarm is one, until a login was held again."""
    clock, door = Later(), Doorkeeper(b"ERR ACCESS-DENIED\n", b"ERR ACCESS-DENIED\n")
    with capture_logs() as logs:
        async with logging_in(door, secret(tmp_path, "word", "w"), clock) as (upsd, heard):
            await until(heard, Reading)
            await upsd.hears("LOGIN", 1)
            await looks(heard, 2)
            assert (upsd.said("LOGIN"), upsd.connections) == (1, 1)
            upsd.values["ups.status"] = "OB"
            await until(heard, Reading, lambda reading: reading.output_source == "battery")
            clock.ahead_s = 301.0
            await looks(heard, 3)
            assert (upsd.said("LOGIN"), upsd.connections) == (1, 1)
            upsd.values["ups.status"] = "OL"
            await upsd.hears("LOGIN", 2)
            assert upsd.connections == 2
            clock.ahead_s = 602.0
            await upsd.hears("LOGIN", 3)
            await noted(logs, "login_held")
            assert upsd.connections == 3
            door.answers, door.hangs_up = [b"ERR ACCESS-DENIED\n"], True  # started anew, with another password
            await upsd.hears("LOGIN", 4)
            await noted(logs, "login_refused", 2)
    assert [entry["event"] for entry in logs] == ["login_refused", "login_held", "login_refused"]


async def test_a_role_is_asked_for_in_both_words(tmp_path: Path) -> None:
    """NUT before 2.8.0 knows MASTER only."""

    def old(upsd: FakeUpsd, words: tuple[str, ...], _writer: asyncio.StreamWriter) -> bytes:
        if words[0] == "PRIMARY":
            return b"ERR UNKNOWN-COMMAND\n"
        return b"OK MASTER-GRANTED\n" if words[0] == "MASTER" else upsd.honest(words)

    with capture_logs() as logs:
        async with logging_in(old, secret(tmp_path, "word", "w"), Later(), role="primary") as (upsd, heard):
            await until(heard, Reading)
            await upsd.hears("MASTER", 1)
            await noted(logs, "login_held")
    assert [entry["event"] for entry in logs] == ["login_held"]


async def test_a_login_that_stands_is_not_given_up_for_a_role(tmp_path: Path) -> None:
    """A secondary that may not be primary is told once, and holds what it has, however much time goes by."""

    def strict(upsd: FakeUpsd, words: tuple[str, ...], _writer: asyncio.StreamWriter) -> bytes:
        return b"ERR ACCESS-DENIED\n" if words[0] in {"PRIMARY", "MASTER"} else upsd.honest(words)

    clock = Later()
    with capture_logs() as logs:
        async with logging_in(strict, secret(tmp_path, "word", "w"), clock, role="primary") as (upsd, heard):
            await until(heard, Reading)
            await upsd.hears("MASTER", 1)
            clock.ahead_s = 301.0
            await looks(heard, 3)
            assert (upsd.connections, upsd.said("LOGIN"), upsd.said("MASTER")) == (1, 1, 1)
    assert [entry["event"] for entry in logs] == ["login_refused"]


async def test_a_login_that_costs_the_connection_twice_waits_for_a_minute(tmp_path: Path) -> None:
    """Readings come first, and it is told; a single break is none, for upsd may have been started anew just then."""

    def hanging_up(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes | None:
        if words[0] != "LOGIN" or upsd.said("LOGIN") > 2:
            return upsd.honest(words)
        writer.close()
        return None

    clock = Later()
    with capture_logs() as logs:
        async with logging_in(hanging_up, secret(tmp_path, "word", "w"), clock) as (upsd, heard):
            await upsd.hears("LOGIN", 2)
            while upsd.connections < 3:  # noqa: ASYNC110 - the fake tells nobody
                await asyncio.sleep(0.02)
            await looks(heard, 3)
            assert (upsd.said("LOGIN"), upsd.connections) == (2, 3)
            clock.ahead_s = 61.0
            await upsd.hears("LOGIN", 3)
            await noted(logs, "login_held")
    logged = [(entry["event"], "ends the connection" in entry.get("because", "")) for entry in logs]
    assert logged == [("login_refused", True), ("login_held", False)]


async def test_a_login_that_is_not_answered_is_not_asked_for_on_every_connection(tmp_path: Path) -> None:
    """upsd may ask the name service who logs in, and answer nobody meanwhile: a reading must get through."""

    def mute(upsd: FakeUpsd, words: tuple[str, ...], _writer: asyncio.StreamWriter) -> bytes | None:
        return None if words[0] == "LOGIN" else upsd.honest(words)

    clock = Later()
    async with FakeUpsd(answer=mute).serving() as upsd:
        login = Login(options(upsd.port, user="pg", password=secret(tmp_path, "word", "w")), clock)
        due = []
        for _ in range(3):
            link = await Link.open(["127.0.0.1"], upsd.port, "upsd", limit_s=5.0, on_lost=lambda: None)
            login.begin()
            due.append(login.is_due())
            await login.make(link, limit_s=0.2)
            await link.close()
    assert due == [True, True, False]
    assert "is not answered" in login.delayed


async def test_a_login_that_was_answered_too_late_is_held(tmp_path: Path) -> None:
    """It is asked for again on the same connection, where upsd says that it stands."""
    door = Doorkeeper(b"ERR ALREADY-LOGGED-IN\n")
    with capture_logs() as logs:
        async with logging_in(door, secret(tmp_path, "word", "w"), Later()) as (upsd, _heard):
            await upsd.hears("LOGIN", 1)
            await noted(logs, "login_held")
    assert [entry["event"] for entry in logs] == ["login_held"]
