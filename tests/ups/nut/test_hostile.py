"""The nut source against a upsd that lies, hangs, trickles, floods and breaks off: a true reading, or a failure."""

import asyncio
import os
import random
import tracemalloc
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.options import Secret
from powerguard.ups.nut.source import NutSource
from tests.peers.hurried import now_s
from tests.peers.redfish import make_certificate
from tests.ups.nut.nut_helpers import FakeUpsd, Heard, Later, fails, forget, listening, options, until, until_lost
from tests.ups.snmp.snmp_helpers import secret

pytestmark = pytest.mark.hurried

BATTERY = {"ups.status": "OB DISCHRG", "input.voltage": "0"}


async def test_it_polls_four_times_a_second_and_reports_once() -> None:
    """Quick to see, quiet to hear: an unchanged status is asked for at 4 Hz, the rest and a reading once a second."""
    async with FakeUpsd().serving() as upsd, listening(options(upsd.port)) as (_, heard):
        await until(heard, Reading)
        await asyncio.sleep(0.5)
        forget(heard)
        polls = sum(words == ("GET", "VAR", "dsim", "ups.status") for words in upsd.requests)
        loads = sum(words == ("GET", "VAR", "dsim", "ups.load") for words in upsd.requests)
        began_s = now_s()
        await asyncio.sleep(3)
        polls = sum(words == ("GET", "VAR", "dsim", "ups.status") for words in upsd.requests) - polls
        loads = sum(words == ("GET", "VAR", "dsim", "ups.load") for words in upsd.requests) - loads
        took_s = now_s() - began_s
        # Upper bounds: a busy machine polls less.
        assert 2 <= polls <= 4 * took_s + 2
        assert loads <= polls
        assert 1 <= loads <= took_s + 2
        assert 1 <= heard.qsize() <= took_s + 2
        assert upsd.connections == 1


async def test_a_change_is_reported_twice_at_once() -> None:
    """Battery needs two readings 0.2 s apart: the second does not wait for its turn."""
    async with FakeUpsd().serving() as upsd, listening(options(upsd.port)) as (_, heard):
        await until(heard, Reading)
        await asyncio.sleep(0.6)
        upsd.values |= BATTERY
        first = await until(heard, Reading, lambda reading: reading.output_source is OutputSource.BATTERY)
        second = await until(heard, Reading)
        assert second.output_source is OutputSource.BATTERY
        assert second.at_s - first.at_s >= 0.2
        assert (first.input_present, first.input_v) == (False, 0)


async def test_poll_now_polls_whole_at_once_but_never_floods() -> None:
    async with FakeUpsd().serving() as upsd, listening(options(upsd.port, poll_s=5.0)) as (source, heard):
        await until(heard, Reading)
        first = await until(heard, Reading)
        source.poll_now()
        second = await until(heard, Reading)
        assert second.at_s - first.at_s < 4
        before, began_s = len(upsd.requests), now_s()
        for _ in range(50):
            source.poll_now()
            await asyncio.sleep(0.01)
        polls = (now_s() - began_s) / 0.2 + 1
        assert len(upsd.requests) - before <= polls * 6
        await asyncio.sleep(0.5)
        forget(heard)
        asked_s = now_s()
        third = await until(heard, Reading)
        assert third.at_s - asked_s < 6, "polls that come early do not put off the next one in turn"


async def test_poll_now_does_not_hammer_a_upsd_that_is_away() -> None:
    """A hint can be forged; a thousand of them must not become a thousand connections."""
    away = FakeUpsd(answer=lambda _upsd, _words, writer: writer.close())
    async with away.serving() as upsd, listening(options(upsd.port)) as (source, _):
        began_s = now_s()
        for _ in range(100):
            source.poll_now()
            await asyncio.sleep(0.01)
        assert upsd.connections <= (now_s() - began_s) / 0.2 + 2


RUBBISH = (
    (b"ERR DATA-STALE\n", "gets no data from the UPS"),
    (b"ERR DRIVER-NOT-CONNECTED\n", "the driver of this UPS is not running"),
    (b"ERR ACCESS-DENIED\n", "ACCESS-DENIED"),
    (b"ERR " + b"X" * 3000 + b"\n", "XXXX"),
    (b"\x00\xff\x7fELF garbage\n", "something else than it was asked"),
    (b"\n", "something else than it was asked"),
    (b"OK\n", "something else than it was asked"),
    (b'VAR dsim ups.load "3"\n', "something else than it was asked"),
    (b'VAR other ups.status "OL"\n', "something else than it was asked"),
    (b'VAR dsim ups.status "OL" "OB"\n', "something else than it was asked"),
    (b'VAR dsim ups.status "OL\n', "quotes that do not close"),
    (b"BEGIN LIST VAR dsim\nEND LIST VAR dsim\n", "something else than it was asked"),
    (b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n", "sent an unexpected answer"),
    (b'VAR dsim ups.status "OL"\nVAR dsim ups.status "OL"\n', "sent an unexpected answer"),
    (b'VAR dsim ups.status "OL"\nVAR dsim', "sent an unexpected answer"),
    (b"x" * 10_000, "a line of more than"),
    (b"BEGIN LIST VAR dsim\n" + b'VAR dsim x "y"\n' * 5000, "a list of more than"),
)


async def test_no_answer_of_a_upsd_becomes_a_reading_that_it_is_not() -> None:
    """After the first good poll it goes bad: no further reading, a failure that says why, and all well afterwards."""
    async with asyncio.TaskGroup() as tasks:  # they mostly wait
        for answer, says in RUBBISH:
            tasks.create_task(_goes_bad(answer, says))


async def _goes_bad(answer: bytes, says: str) -> None:
    is_bad = False

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes:
        return answer if is_bad and words[0] in {"GET", "LIST"} else upsd.honest(words)

    async with FakeUpsd(answer=answers).serving() as upsd, listening(options(upsd.port)) as (_, heard):
        await until(heard, Reading)
        forget(heard)
        is_bad = True
        failure = await heard.get()
        assert isinstance(failure, SourceFailed), answer
        assert says in failure.reason, answer
        assert f"127.0.0.1:{upsd.port}" in failure.reason
        assert len(failure.reason) < 400
        is_bad = False
        assert (await until(heard, Reading)).output_source is OutputSource.UTILITY


async def test_answers_at_random_end_nothing_and_make_up_nothing() -> None:
    """Good and bad answers in any order, cut anywhere, the connection broken anywhere: readings, or failures."""
    dice = random.Random(4)
    rubbish = [answer for answer, _ in RUBBISH] + [b"OK STARTTLS\n", b"OK\n", b"ERR UNKNOWN-UPS\n", b""]

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes | None:
        if dice.random() < 0.9:
            return upsd.honest(words)
        answer = dice.choice(rubbish)
        if dice.random() < 0.3:
            writer.write(answer[: dice.randrange(len(answer) + 1)])
            writer.close()
            return None
        return answer

    heard: list[Reading | SourceFailed] = []
    async with FakeUpsd(answer=answers).serving() as upsd:
        more = {"user": "pg", "password": Secret(file="/nowhere"), "timeout_s": 0.5}
        source = NutSource(options(upsd.port, **more), ups="a", clock=now_s)
        with capture_logs():
            async with asyncio.timeout(250):
                for _ in range(200):
                    await source._poll_and_publish(heard.append, whole=dice.random() < 0.5)
                    source._miss_at_s = -1e9
        await source._drop()
        assert upsd.connections > 10
    found = [event for event in heard if isinstance(event, Reading)]
    assert len(found) > 20
    assert {reading.output_source for reading in found} == {OutputSource.UTILITY}
    assert {reading.charge_pct for reading in found} <= {100, None}
    assert len(heard) - len(found) > 20


async def test_a_upsd_that_hangs_on_battery_is_lost_before_the_last_reading_is_3_s_old() -> None:
    """A poll unanswered for 0.8 s is a miss, three are a loss; the connection, and the login, outlive one."""
    hangs = False

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes | None:
        return None if hangs else upsd.honest(words)

    async with FakeUpsd(BATTERY, answers).serving() as upsd, listening(options(upsd.port)) as (source, heard):
        await until(heard, Reading)
        await until(heard, Reading)
        await asyncio.sleep(0.7)
        last_s = 0.0
        hangs = True
        failures: list[SourceFailed] = []
        while not failures or not failures[-1].lost:
            event = await heard.get()
            if isinstance(event, Reading):
                last_s = event.at_s
            else:
                failures.append(event)
        assert [failure.lost for failure in failures][-2:] == [False, True]
        assert "no whole answer in 0.8 s" in failures[0].reason
        # 0.5 s from a reading to the next, then two or three limits: what a busy machine adds is not the source's.
        assert failures[0].at_s - last_s >= 0.75
        assert 2 <= len(failures) <= 3
        assert source._limit_s == options(upsd.port).timeout_s  # lost, it has its whole time again
        hangs = False
        assert (await until(heard, Reading)).output_source is OutputSource.BATTERY
        assert upsd.connections == 2


@pytest.mark.parametrize(("spread_s", "least_s", "most_s"), [(5.0, 2.5, 4.0), (0.0, 0.0, 1.0)])
async def test_hosts_that_share_a_ups_come_back_to_upsd_at_drawn_moments(
    spread_s: float, least_s: float, most_s: float
) -> None:
    """A host draws the middle of 5 s. Until then it counts its misses all the same."""
    breaks = False

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes | None:
        nonlocal breaks
        if not breaks:
            return upsd.honest(words)
        breaks = False
        writer.close()
        return None

    async with FakeUpsd(answer=answers).serving() as upsd:
        heard: Heard = asyncio.Queue()
        source = NutSource(options(upsd.port), ups="a", clock=now_s, jitter=lambda: 0.5, spread_s=spread_s)
        task = asyncio.get_running_loop().create_task(source.run(heard.put_nowait))
        await until(heard, Reading)
        breaks = True
        lost = await until(heard, SourceFailed)
        events = [await heard.get()]
        while not isinstance(events[-1], Reading):
            events.append(await heard.get())
        task.cancel()
        await asyncio.wait([task])
    assert least_s <= events[-1].at_s - lost.at_s <= most_s
    assert len(events) - 1 == (1 if spread_s else 0)
    assert upsd.connections == 2


async def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    """What was said before the miss is older than it looks: it is passed over, and the next poll asks anew."""
    late: list[tuple[asyncio.StreamWriter, bytes]] = []
    is_late = False

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes | None:
        if not is_late:
            return upsd.honest(words)
        late.append((writer, upsd.honest(words)))
        return None

    async with FakeUpsd(answer=answers).serving() as upsd, listening(options(upsd.port, timeout_s=2.0)) as (_, heard):
        await until(heard, Reading)
        await asyncio.sleep(0.5)
        forget(heard)
        is_late = True
        await until(heard, SourceFailed)
        upsd.values |= BATTERY
        is_late = False
        for writer, answer in late:
            writer.write(answer)
        reading = await until(heard, Reading)
        assert reading.output_source is OutputSource.BATTERY
        assert upsd.connections == 1


async def test_a_upsd_that_trickles_is_lost_and_found() -> None:
    """One byte at a time is no answer, however many come."""
    trickling: set[asyncio.Task[None]] = set()
    trickles = True

    async def trickle(writer: asyncio.StreamWriter) -> None:
        for _ in range(1000):
            writer.write(b"B")
            await asyncio.sleep(0.05)

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes | None:
        if not trickles or words[0] == "STARTTLS":
            return upsd.honest(words)
        trickling.add(asyncio.get_running_loop().create_task(trickle(writer)))
        return None

    async with FakeUpsd(answer=answers).serving() as upsd:
        async with listening(options(upsd.port, timeout_s=0.5)) as (_, heard):
            await fails(heard, "too slow")
            trickles = False
            assert (await until(heard, Reading)).output_source is OutputSource.UTILITY
        for task in trickling:
            task.cancel()
        await asyncio.wait(trickling)


async def test_a_flood_costs_no_memory() -> None:
    """Tens of megabytes of lines that nobody asked for: the connection ends at the first of them."""

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes:
        return upsd.honest(words) if words[0] != "LIST" else flood

    flood = b"VAR a b c\n" * 100_000
    async with FakeUpsd(answer=answers).serving() as upsd:
        tracemalloc.start()
        try:
            async with listening(options(upsd.port)) as (_, heard):
                await fails(heard, "more answers than any client asks for")
                _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 16 * len(flood)  # the flood itself, and what its sender makes of it, is in this process, too


async def test_bytes_sent_before_tls_do_not_count_as_sent_under_it() -> None:
    """Whoever stands between can add clear text behind the answer to STARTTLS; it ends the connection."""

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes:
        return b'OK STARTTLS\nVAR dsim ups.status "OL"\n' if words == ("STARTTLS",) else upsd.honest(words)

    async with (
        FakeUpsd(answer=answers).serving() as upsd,
        listening(options(upsd.port, tls="required")) as (_, heard),
    ):
        await fails(heard, "sent an unexpected answer")
        assert upsd.said("GET") == upsd.said("LIST") == 0


async def test_tls_that_is_required_and_not_offered_yields_no_reading() -> None:
    async with FakeUpsd().serving() as upsd, listening(options(upsd.port, tls="required")) as (_, heard):
        await fails(heard, "offers no TLS (FEATURE-NOT-CONFIGURED)")
        assert upsd.said("GET") == upsd.said("LIST") == 0


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "no answer to STARTTLS in 0.5 s"),
        (b"OK STARTTLS\n", "STARTTLS failed: no answer"),
        (b"", "upsd closed the connection"),
    ],
    ids=["no answer", "a handshake that hangs", "breaks off"],
)
async def test_tls_that_hangs_or_breaks_off(answer: bytes | None, says: str, tmp_path: Path) -> None:
    """Required: never a poll in clear text. If offered: a miss, then an alarm, and readings without trust or login.

    Tried again five minutes later, and then used as it is.
    """
    is_mended = False

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes | None:
        if words != ("STARTTLS",) or is_mended:
            return upsd.honest(words)
        if answer == b"":
            writer.close()
        return answer or None

    # An authority of our own: to read all those of the system takes a busy machine longer than a step may take.
    ca = str(make_certificate(tmp_path).cert)
    more = {"timeout_s": 0.5, "user": "u", "password": secret(tmp_path, "password", "a secret"), "ca": ca}
    clock = Later()
    async with FakeUpsd(answer=answers).serving() as upsd:
        async with listening(options(upsd.port, tls="required", **more)) as (_, heard):
            await fails(heard, says)
            while upsd.connections < 4:  # noqa: ASYNC110 - upsd tells nobody
                await asyncio.sleep(0.02)
            assert upsd.said("GET") == upsd.said("LIST") == upsd.said("PASSWORD") == 0
        with capture_logs() as logs:
            async with listening(options(upsd.port, **more), clock=clock) as (source, heard):
                await fails(heard, says)
                assert not (await until(heard, Reading)).authenticated
                assert upsd.said("PASSWORD") == 0
                assert says in source.trouble
                is_mended = True
                clock.ahead_s = 301.0
                while not upsd.said("LOGIN") or source.trouble:  # noqa: ASYNC110 - upsd tells nobody
                    await asyncio.sleep(0.02)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["tls_broken"]


async def test_tls_that_is_tried_again_costs_a_shared_ups_no_seconds(tmp_path: Path) -> None:
    """Every five minutes: what was lost is not upsd, so there is no moment to draw."""

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes | None:
        if words != ("STARTTLS",):
            return upsd.honest(words)
        writer.close()
        return None

    clock, heard = Later(), Heard()
    async with FakeUpsd(answer=answers).serving() as upsd:
        settings = options(upsd.port, ca=str(make_certificate(tmp_path).cert))
        source = NutSource(settings, ups="a", clock=clock, jitter=lambda: 1.0, spread_s=5.0)
        task = asyncio.get_running_loop().create_task(source.run(heard.put_nowait))
        await until(heard, Reading)
        clock.ahead_s = 301.0
        await fails(heard, "upsd closed the connection")
        event = await heard.get()
        task.cancel()
        await asyncio.wait([task])
    assert isinstance(event, Reading)


async def test_the_authorities_are_read_once_and_outside_the_time_that_upsd_has(tmp_path: Path) -> None:
    """A busy machine takes a second for all of the system's; here they come through a pipe, and when we say so."""
    pipe = tmp_path / "ca.pem"
    os.mkfifo(pipe)
    authorities = make_certificate(tmp_path).cert.read_bytes()
    upsd = FakeUpsd()
    try:
        async with listening(options(upsd.port, timeout_s=0.5, ca=str(pipe))) as (_, heard):
            async with upsd.serving():
                await asyncio.sleep(2.0)
                assert (upsd.connections, heard.empty()) == (0, True), "nobody is late before upsd is asked"
                await asyncio.to_thread(pipe.write_bytes, authorities)
                await until(heard, Reading)
                assert upsd.said("STARTTLS")
            await until_lost(heard)
            async with upsd.serving():
                await until(heard, Reading)
    finally:
        os.close(os.open(pipe, os.O_RDWR))  # Whoever still waits for it goes on.


async def test_a_upsd_that_accepts_and_breaks_off_is_not_hammered() -> None:
    """Once the source is lost a try takes its time, whoever ends the connection."""

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes | None:
        if words[0] != "LIST":
            return upsd.honest(words)
        writer.close()
        return None

    async with FakeUpsd(answer=answers).serving() as upsd, listening(options(upsd.port)) as (_, heard):
        await until_lost(heard)
        before, began_s = upsd.connections, now_s()
        while upsd.connections < before + 3:  # noqa: ASYNC110 - the fake tells nobody
            await asyncio.sleep(0.02)
        assert now_s() - began_s >= 1.8, "one at once, and two with their pauses"


async def test_what_the_ups_says_in_words_is_reported_once() -> None:
    values = {"driver.name": "usbhid-ups", "ups.status": "ALARM OL RB", "ups.alarm": "Replace  battery!"}
    with capture_logs() as logs:
        async with FakeUpsd(values).serving() as upsd, listening(options(upsd.port)) as (_, heard):
            for _ in range(3):
                assert (await until(heard, Reading)).replace_battery
    assert [(entry["event"], entry["because"][-18:]) for entry in logs] == [("ups_alarm", ": Replace battery!")]


async def test_a_password_that_cannot_be_had_costs_the_login_alone(tmp_path: Path) -> None:
    """A file that is not there, or with a line break, which would be a second request: alarm once, and readings."""
    file = tmp_path / "password"
    for text in (None, "one\nFSD dsim"):
        if text is not None:
            file.write_text(text, encoding="utf-8")
            file.chmod(0o400)
        with capture_logs() as logs:
            more = {"user": "pg", "password": Secret(file=str(file))}
            async with FakeUpsd().serving() as upsd, listening(options(upsd.port, **more)) as (_, heard):
                for _ in range(3):
                    await until(heard, Reading)
        assert [(entry["event"], entry["log_level"]) for entry in logs] == [("login_refused", "error")]
        assert upsd.said("PASSWORD") == upsd.said("FSD") == upsd.said("LOGIN") == 0
        assert "FSD" not in str(logs)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("upsd.invalid", "cannot look up upsd.invalid: "),
        ("upsd..example", "cannot look up upsd..example: not a valid name: "),
        ("::1%nowhere", "cannot connect to upsd at ::1%nowhere:3493: Name or service not known"),
    ],
)
async def test_a_name_that_cannot_be_looked_up_is_a_failure_and_not_the_end(host: str, says: str) -> None:
    """The name service is often the first to go; and some typing errors Python refuses before it asks anybody."""
    async with listening(options(3493, host=host)) as (_, heard):
        failure = await until(heard, SourceFailed)
        assert says in failure.reason


async def test_an_unknown_token_is_noted_once() -> None:
    values = {"driver.name": "usbhid-ups", "ups.status": "OL FLUX"}
    with capture_logs() as logs:
        async with FakeUpsd(values).serving() as upsd, listening(options(upsd.port)) as (_, heard):
            for _ in range(3):
                assert (await until(heard, Reading)).output_source is OutputSource.UTILITY
    assert [entry["event"] for entry in logs] == ["status_token_unknown"]


async def test_a_status_that_is_new_each_time_does_not_fill_the_log() -> None:
    """A peer that makes things up is told on a hundred times, and then no more."""
    count = 0

    def answers(upsd: FakeUpsd, words: tuple[str, ...], writer: asyncio.StreamWriter) -> bytes:
        nonlocal count
        count += 1
        upsd.values["ups.status"] = "OL " + " ".join(f"T{count}X{number}" for number in range(30))
        return upsd.honest(words)

    with capture_logs() as logs:
        async with FakeUpsd(answer=answers).serving() as upsd, listening(options(upsd.port)) as (source, heard):
            for _ in range(6):
                source.poll_now()
                await until(heard, Reading)
    assert len(logs) == 100


async def test_a_variable_that_vanishes_is_none_and_one_that_comes_is_found() -> None:
    """A driver that has just started tells one variable after the other."""
    async with FakeUpsd().serving() as upsd, listening(options(upsd.port)) as (_, heard):
        await until(heard, Reading)
        runtime = upsd.values.pop("battery.runtime")
        upsd.values["ups.realpower"] = "1080"
        assert (await until(heard, Reading, lambda reading: reading.runtime_s is None)).charge_pct == 100
        upsd.values["battery.runtime"] = runtime
        reading = await until(heard, Reading, lambda reading: None not in (reading.watts, reading.runtime_s))
        assert (reading.watts, reading.runtime_s) == (1080, 1800)


async def test_doctor_looks_once_and_leaves(tmp_path: Path) -> None:
    async with FakeUpsd().serving() as upsd:
        report = await NutSource(options(upsd.port), ups="a", clock=now_s).look()
        assert (report.reading.runtime_s, report.tls, report.is_logged_in) == (1800, False, False)
        assert (report.tls, report.forgeable, report.warnings) == (False, "", ())
        await upsd.hears("LOGOUT")
        upsd.answer = lambda upsd, words, _writer: None if words[0] == "LOGIN" else upsd.honest(words)
        more = {"user": "pg", "password": secret(tmp_path, "word", "w"), "timeout_s": 0.5}
        report = await NutSource(options(upsd.port, **more), ups="a", clock=now_s).look()
        assert (report.is_logged_in, report.warnings) == (False, ("the login is not answered",))
