"""The apcupsd source against an apcupsd of ours: what it publishes, when it gives up, how it comes back."""

import asyncio
import contextlib
import gc
import os
import socket
import tracemalloc
from typing import Any

import pytest
from structlog.testing import capture_logs

from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.ups.apcupsd.protocol import NisError
from powerguard.ups.apcupsd.source import News, NisClient, draft_of, probe
from tests.peers.hurried import HurriedLoop, now_s
from tests.peers.machine import watched
from tests.peers.ports import free_port
from tests.ups.apcupsd.apcupsd_helpers import (
    ONBATT,
    ONLINE,
    SHUTDOWN_ON_MAINS,
    Heard,
    apcupsd,
    date,
    listening,
    options,
    until,
)

pytestmark = pytest.mark.hurried


async def lost(heard: Heard) -> SourceFailed:
    while not (failed := await until(heard, SourceFailed)).lost:
        pass
    return failed


async def ordered(heard: Heard) -> Reading:
    while not (reading := await until(heard, Reading)).forced_shutdown:
        pass
    return reading


async def on_battery(heard: Heard) -> Reading:
    while (reading := await until(heard, Reading)).output_source is not OutputSource.BATTERY:
        pass
    return reading


async def test_a_reading_is_whole_and_as_old_as_it_is() -> None:
    async with apcupsd() as peer:
        peer.every_s, peer.looked_s = None, now_s() - 40
        async with listening(peer.port) as (source, heard):
            reading = await until(heard, Reading)
    assert (reading.ups, reading.source) == ("rack-a", f"apcupsd:127.0.0.1:{peer.port}")
    assert (reading.output_source, reading.runtime_s, reading.charge_pct) == (OutputSource.UTILITY, 1800.0, 100.0)
    assert (reading.load_pct, reading.input_present, reading.authenticated) == (40.0, True, False)
    assert reading.at_s == pytest.approx(peer.looked_s, abs=2.0)  # both of its dates are whole seconds
    assert source.name == reading.source


async def test_news_is_reported_once_over_one_connection() -> None:
    """However often it is asked meanwhile; and none is older than the last question without it."""
    async with apcupsd() as peer, listening(peer.port) as (_, heard):
        peer.every_s = None
        await until(heard, Reading)
        for _ in range(2):
            before_s = now_s()
            await peer.asked(5)  # the first may have been on its way before
            assert heard.empty()
            peer.look()
            reading = await until(heard, Reading)
            assert before_s < reading.at_s <= now_s()
        assert peer.connections == 1


async def test_battery_is_seen_at_the_next_question() -> None:
    async with apcupsd() as peer:
        peer.every_s = 60.0
        async with listening(peer.port) as (_, heard):
            await until(heard, Reading)
            before = peer.questions
            peer.set(ONBATT, LINEV="000.0 Volts")
            reading = await on_battery(heard)
            assert peer.questions == before + 1
            assert reading.input_present is False


async def test_poll_now_asks_at_once_but_never_floods() -> None:
    async with apcupsd() as peer, listening(peer.port, poll_s=10.0) as (source, heard):
        await until(heard, Reading)
        before, began_s = peer.questions, now_s()
        peer.set(ONBATT)
        source.poll_now()
        await on_battery(heard)
        assert now_s() - began_s < 5.0
        for _ in range(50):
            source.poll_now()
            await asyncio.sleep(0.01)
        assert peer.questions - before <= (now_s() - began_s) / 0.1 + 3


async def test_lost_on_battery_when_the_last_news_is_three_seconds_old() -> None:
    """Killed, hung or cut off: the core must know in time."""
    async with apcupsd() as peer, listening(peer.port) as (_, heard), watched() as machine:
        peer.set(ONBATT)
        reading = await on_battery(heard)
        peer.mute = True
        failed = await lost(heard)
        while not heard.empty():
            heard.get_nowait()
        assert 1.8 < failed.at_s - reading.at_s < 4.2 + machine.late_s
        assert failed.reason.startswith(f"no answer from 127.0.0.1:{peer.port} in ")
        peer.mute = False
        peer.set(ONBATT)
        assert (await until(heard, Reading)).at_s - failed.at_s < 4.0 + machine.late_s


async def test_a_ups_that_answers_slowly_on_battery_is_not_lost_between_two_looks() -> None:
    """On a slow serial line, a look takes 3 s, and apcupsd waits for 1 s after it."""
    async with apcupsd() as peer, listening(peer.port, limit_s=600.0) as (_, heard):
        peer.set(ONBATT)
        peer.every_s = 4.0
        await on_battery(heard)
        for _ in range(3):
            reading = await until(heard, Reading)
        events = [await heard.get() for _ in range(6)]
        assert [type(event) for event in events] == [Reading] * 6
        reading, peer.every_s = await until(heard, Reading), None
        assert 7.0 < (await lost(heard)).at_s - reading.at_s < 11.0


async def test_an_apcupsd_that_is_restarted_is_no_loss() -> None:
    async with apcupsd() as peer, listening(peer.port) as (_, heard):
        await until(heard, Reading)
        await peer.stop()
        first = await until(heard, SourceFailed)
        assert "connection refused: check that apcupsd runs with NETSERVER on" in first.reason
        await asyncio.sleep(0.5)
        await peer.start()
        events = [await heard.get()]
        while not isinstance(events[-1], Reading):
            events.append(await heard.get())
        assert not any(event.lost for event in events if isinstance(event, SourceFailed))
        assert peer.connections == 2


async def test_a_connection_that_is_cut_between_two_questions_costs_nothing() -> None:
    async with apcupsd() as peer, listening(peer.port) as (_, heard):
        await until(heard, Reading)
        peer.hang_up()
        await peer.asked(2)
        assert peer.connections == 2
        assert not any(isinstance(heard.get_nowait(), SourceFailed) for _ in range(heard.qsize()))


async def test_lost_on_utility_and_asked_ever_more_seldom() -> None:
    async with listening(free_port()) as (_, heard), watched() as machine:
        first = await until(heard, SourceFailed)
        failed = await lost(heard)
        assert 2.0 < failed.at_s - first.at_s < 4.0 + machine.late_s
        assert (await until(heard, SourceFailed)).at_s - failed.at_s > 1.0


# --- Stories of the field ------------------------------------------------------------------------------------------


async def test_story_3_a_blip_on_battery_neither_ends_nor_shortens_the_outage() -> None:
    """apcupsd in COMMLOST keeps ONBATT in its flags, with values that are frozen: they age, and are no readings."""
    async with apcupsd() as peer, listening(peer.port) as (_, heard):
        peer.set(ONBATT)
        reading = await on_battery(heard)
        peer.every_s = None
        peer.flags = ONBATT | 0x100
        missed = await until(heard, SourceFailed)
        assert "apcupsd has lost its UPS" in missed.reason
        assert missed.reason.endswith("its values are frozen, and were those of an outage")
        assert not missed.lost
        failed = await lost(heard)
        assert failed.at_s - reading.at_s >= 2.9
        assert failed.reason == missed.reason, "a text that counts seconds would be a new failure with each poll"
        peer.set(ONBATT)
        assert (await until(heard, Reading)).output_source is OutputSource.BATTERY


async def test_story_4_communication_lost_in_a_harmless_state_is_only_that() -> None:
    async with apcupsd() as peer, listening(peer.port) as (_, heard):
        await until(heard, Reading)
        peer.every_s, peer.flags = None, ONLINE | 0x101
        failed = await until(heard, SourceFailed)
        assert failed.reason.endswith("(COMMLOST): its values are frozen")
        assert not failed.lost


async def test_story_9_an_apcupsd_that_no_longer_looks_at_its_ups() -> None:
    """It answers every question, with values of long ago and nothing that says so but DATE."""
    async with apcupsd() as peer, listening(peer.port) as (_, heard), watched() as machine:
        peer.set(ONBATT)
        reading = await on_battery(heard)
        peer.every_s = None
        failed = await lost(heard)
        assert failed.reason.endswith("apcupsd does not read its UPS any more")
        assert 2.9 < failed.at_s - reading.at_s < 4.4 + machine.late_s


async def test_story_10_a_polltime_of_60_is_reported() -> None:
    """Nobody looks for the minute that he loses in somebody else's settings."""
    late_s = 0.0

    with capture_logs() as logs:
        async with apcupsd() as peer, listening(peer.port, clock=lambda: now_s() + late_s) as (_, heard):
            await until(heard, Reading)
            for _ in range(2):
                peer.every_s = None
                late_s += 60.0
                peer.look()
                await until(heard, Reading)
    logged = [entry for entry in logs if entry["event"] == "source_doubtful"]
    assert len(logged) == 1
    assert "POLLTIME 1" in logged[0]["because"]
    assert logged[0]["every_s"] == pytest.approx(60, abs=1)


async def test_story_12_a_spent_order_is_no_order_of_the_next_outage() -> None:
    """SHUTTING DOWN stays until apcupsd is started anew. Who still answers after 5 minutes of utility is up."""
    late_s = 0.0

    with capture_logs() as logs:
        async with apcupsd() as peer, listening(peer.port, clock=lambda: now_s() + late_s) as (_, heard):
            peer.set(ONBATT | 0x200)
            assert (await on_battery(heard)).forced_shutdown
            peer.set(SHUTDOWN_ON_MAINS)
            while (reading := await until(heard, Reading)).output_source is not OutputSource.UTILITY:
                assert reading.forced_shutdown
            assert reading.forced_shutdown
            late_s = 301.0
            while (await until(heard, Reading)).forced_shutdown:
                peer.set()
            peer.set(ONBATT | 0x200)
            assert not (await on_battery(heard)).forced_shutdown
            peer.set(ONBATT)
            await until(heard, Reading)
            peer.set(ONBATT | 0x200)
            await ordered(heard)
            peer.set(SHUTDOWN_ON_MAINS)
            while (await until(heard, Reading)).output_source is not OutputSource.UTILITY:
                pass
            late_s = 700.0
            while (await until(heard, Reading)).forced_shutdown:
                peer.set()
    logged = [entry["because"] for entry in logs if "systemctl restart apcupsd there" in entry.get("because", "")]
    assert len(logged) == 2  # each order that is left over is logged, and logged once


@pytest.mark.parametrize(("back_for_s", "counts"), [(200.0, True), (310.0, False)])
async def test_an_order_stays_spent_for_a_daemon_that_has_just_started(back_for_s: float, *, counts: bool) -> None:
    """A reload, or an upgrade: the core remembers readings without the order, and takes it for one that has risen."""
    async with apcupsd() as peer:
        peer.set(SHUTDOWN_ON_MAINS, XOFFBATT=date(now_s() + peer.ahead_s - back_for_s))
        async with listening(peer.port) as (_, heard):
            assert (await until(heard, Reading)).forced_shutdown is counts
            peer.set(ONBATT | 0x200)
            assert (await on_battery(heard)).forced_shutdown is counts


async def test_an_order_on_battery_counts_at_first_contact_whatever_the_last_outage_was() -> None:
    async with apcupsd() as peer:
        peer.set(ONBATT | 0x200, XOFFBATT=date(now_s() + peer.ahead_s - 86400.0))
        async with listening(peer.port) as (_, heard):
            assert (await until(heard, Reading)).forced_shutdown
            peer.set(SHUTDOWN_ON_MAINS)  # Its date of the return comes a moment after the bit.
            while (reading := await until(heard, Reading)).output_source is not OutputSource.UTILITY:
                pass
            assert reading.forced_shutdown


async def test_an_order_that_was_left_to_us_is_none() -> None:
    """That apcupsd calls our apccontrol: it has stood back, and nobody cuts the power because of it."""
    async with apcupsd() as peer, listening(peer.port, leaves_shutdown=True) as (_, heard):
        peer.set(ONBATT | 0x200)
        assert not (await on_battery(heard)).forced_shutdown


async def test_story_14_another_ups_is_not_taken_for_ours() -> None:
    async with apcupsd(UPSNAME="rack-b") as peer, listening(peer.port, name="rack-a") as (_, heard):
        failed = await until(heard, SourceFailed)
        assert "its UPSNAME is 'rack-b', not 'rack-a'" in failed.reason
        peer.records["UPSNAME"] = "rack-a"
        await until(heard, Reading)


async def test_a_net_slave_is_reported_as_one() -> None:
    with capture_logs() as logs:
        async with apcupsd(MASTER="10.0.0.9:3551") as peer, listening(peer.port) as (_, heard):
            peer.set(ONLINE | 0x400)
            await until(heard, Reading)
            await until(heard, Reading)
    logged = [entry["because"] for entry in logs if entry["event"] == "source_doubtful"]
    assert len(logged) == 1
    assert "name 10.0.0.9:3551 in the settings" in logged[0]


# --- Peers that are something else, or break -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"HTTP/1.0 400 Bad Request\r\n\r\n", "is that the port of its NIS"),
        (b"\0\x10Invalid command\n\0\0", "answers `Invalid command"),
        (b"\0\0", "sends an empty answer to `status`"),
        (b"\xff" * 70_000, "is that the port of its NIS"),
        (b"\0\x05x: y\n" * 5000, "is that the port of its NIS"),
    ],
)
async def test_something_else_answers(raw: bytes, what: str) -> None:
    async with apcupsd() as peer:
        peer.raw = raw
        async with listening(peer.port) as (_, heard):
            assert what in (await until(heard, SourceFailed)).reason


async def test_half_an_answer_is_none() -> None:
    """Killed between two lines: the half that came is not used, and the next answer is whole."""
    async with apcupsd() as peer:
        peer.raw = peer.status()[:200]
        async with listening(peer.port) as (_, heard):
            while "no answer" not in (await until(heard, SourceFailed)).reason:
                pass
            peer.raw = None
            reading = await until(heard, Reading)
            assert reading.charge_pct == 100.0


async def test_a_peer_that_hangs_up_at_once() -> None:
    """tcp wrappers do that: the connection is made, and gone."""

    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server, listening(server.sockets[0].getsockname()[1]) as (_, heard):
        assert "hosts.allow" in (await until(heard, SourceFailed)).reason


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("no-such-host.invalid", r"^no-such-host\.invalid:1: cannot look up "),
        ("no..host", r"^no\.\.host:1: cannot look up no\.\.host: not a valid name: "),
    ],
)
async def test_a_name_that_nobody_knows(host: str, says: str) -> None:
    client = NisClient(options(1, host=host))
    with pytest.raises(NisError, match=says):
        await client.status(2.0)


async def test_a_name_with_two_addresses_and_nobody_at_either() -> None:
    client = NisClient(options(free_port(), host="localhost"))
    with pytest.raises(NisError, match="connection refused"):
        await client.status(60.0)


class TwoAddresses(HurriedLoop):
    """A name service that knows two addresses of every name."""

    async def getaddrinfo(self, *_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", 0)) for last in (2, 1)]


def test_an_address_that_drops_what_comes_does_not_hide_the_next_one() -> None:
    """A host with two interfaces, of which the first is down, or behind a firewall that drops."""

    async def ask() -> str:
        async with apcupsd() as peer:
            with contextlib.ExitStack() as sockets:
                dead = sockets.enter_context(socket.create_server(("127.0.0.2", peer.port), backlog=0))
                for _ in range(4):  # what does not fit into its queue is dropped
                    caller = sockets.enter_context(socket.socket())
                    caller.setblocking(False)
                    caller.connect_ex(dead.getsockname())
                client = NisClient(options(peer.port, host="ups.example"))
                try:
                    return (await client.status(5.0)).values["UPSNAME"]
                finally:
                    client.close()

    with asyncio.Runner(loop_factory=TwoAddresses) as runner:
        assert runner.run(ask()) == "rack-a"


async def test_a_slow_dribble_is_cut_off_at_the_limit() -> None:
    """A byte a moment keeps nobody waiting for ever."""

    async def dribble(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                writer.write(b"\0\1")
                await asyncio.sleep(0.05)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(dribble, "127.0.0.1", 0)
    async with server:
        client = NisClient(options(server.sockets[0].getsockname()[1]))
        with pytest.raises(NisError):
            async with asyncio.timeout(20):  # a minute of dribble, else
                await client.status(0.5)
        await asyncio.sleep(0.1)  # until the other end has seen it


async def test_no_socket_is_left_behind() -> None:
    """A thousand questions of which none is answered: one connection at a time."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = NisClient(options(deaf.getsockname()[1]))
        before = len(asyncio.all_tasks())
        for _ in range(30):
            with pytest.raises(NisError, match="no answer"):
                await client.status(0.01)
        assert len(asyncio.all_tasks()) == before


async def test_a_probe_has_what_doctor_asks_for() -> None:
    async with apcupsd(MODEL="Smart-UPS 3000") as peer:
        peer.every_s, peer.looked_s = None, now_s() - 42
        report = await probe(options(peer.port), ups="rack-a")
        assert (report.name, report.model, report.why_not) == ("rack-a", "Smart-UPS 3000", "")
        assert report.age_s == pytest.approx(42, abs=1)
        assert report.reading is not None
        assert report.reading.output_source is OutputSource.UTILITY
        peer.flags = ONLINE | 0x100
        report = await probe(options(peer.port), ups="rack-a")
        assert report.reading is None
        assert "COMMLOST" in report.why_not


@pytest.mark.slow
async def test_nothing_leaks_over_ten_thousand_polls_and_a_thousand_timeouts() -> None:
    async with apcupsd() as peer:
        client = NisClient(options(peer.port))
        news = News()

        async def ask(times: int, limit_s: float) -> int:
            failed = 0
            for _ in range(times):
                asked_s = now_s()
                try:
                    status = await client.status(limit_s)
                except NisError:
                    failed += 1
                else:
                    news.note(status, asked_s=asked_s, answered_s=now_s())
                    draft_of(status)
            return failed

        await ask(200, 5.0)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        open_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, not files
        assert await ask(10_000, 5.0) == 0
        peer.mute = True
        assert await ask(1_000, 0.005) == 1_000
        peer.mute = False
        client.close()
        await asyncio.sleep(0.5)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 100_000, after - before
        assert len(os.listdir("/proc/self/fd")) <= open_files + 2  # noqa: PTH208 - numbers, not files
