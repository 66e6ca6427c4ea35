"""The page: what it shows in each phase, what it escapes, and its live updates over real sockets."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from structlog.testing import capture_logs

from powerguard.core.decide import conditions
from powerguard.core.model.policy import FeedPolicy, Mode, Shed
from powerguard.core.model.state import (
    Activity,
    GivenUp,
    Maintenance,
    Recovery,
    Supplied,
    Supply,
)
from powerguard.daemon.journal import history, read_only
from powerguard.daemon.journal.records import OutageRecord
from powerguard.daemon.observe.http import http_server
from powerguard.daemon.observe.page.updates import READERS, REPORT_FAILED_S, Page, Reports
from powerguard.daemon.observe.page.view import MOST_POINTS, MOST_ROWS, Curves, bars, duration
from powerguard.daemon.observe.page.words import WORDS, language_of
from powerguard.daemon.observe.readiness import ERRORS
from powerguard.daemon.observe.status import returning, status
from powerguard.effectors.child import MAX_OUTPUT_BYTES, Ended, run_child
from powerguard.sim.virtual import VirtualLoop
from tests.cli.test_explain import STORIES, told_in
from tests.daemon.watched import BOOT, NOW_S, PHASES, POLICY, WALL_S, Watched, committed, scene

PATIENCE_S = 60.0
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MARKUP = "<img src=x onerror=alert(1)>\"'&</script>"


class Outline(HTMLParser):
    """What a screen reader meets: elements, ids, the nesting, and the text without markup."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in {"meta", "br"}:  # never closed
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data


def shown(daemon: Watched, language: str = "en") -> Outline:
    outline = Outline(Page(daemon, status, returning).html(language))
    assert outline.open == []
    return outline


def recorded(**changes: object) -> OutageRecord:
    record = OutageRecord(
        id="6f1d2c3b-7",
        boot_id=BOOT,
        started_at_s=10.0,
        started_wall=WALL_S - 900.0,
        ended_at_s=310.0,
        ended_wall=WALL_S - 600.0,
        outcome="ridden_through",
    )
    return replace(record, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("language", WORDS)
@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_is_shown_in_each_language(phase: str, language: str) -> None:
    outline = shown(scene(phase), language)
    assert WORDS[language][f"phase.{phase}"] in outline.text
    assert ("html", {"lang": WORDS[language]["lang"]}) in outline.attributes
    assert "llm" in outline.text
    # One main heading, and each section has its own.
    assert outline.tags.count("h1") == 1
    labels = [attributes["aria-labelledby"] for tag, attributes in outline.attributes if tag == "section"]
    headings = [attributes["id"] for tag, attributes in outline.attributes if tag == "h2"]
    assert labels == headings
    assert len(headings) == 9
    live = [attributes["id"] for _, attributes in outline.attributes if "aria-live" in attributes]
    assert live == ["phase"]


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("online", "with a slack of 18 min 37 s"),
        ("on_battery", "Checkpoint in 7 min 26 s"),
        ("emergency_checkpoint", "Checkpoint durable in 12 s"),
        ("holding", "Power-off in 13 min 17 s"),
        ("shutdown", "Forced power-off in 55 s"),
        ("recovery", "Training waits"),
    ],
)
def test_what_is_counted_down(phase: str, expected: str) -> None:
    assert expected in re.sub(r"\s+", " ", shown(scene(phase)).text)


@pytest.mark.parametrize(
    ("phase", "supply", "expected"),
    [
        ("holding", Supply.UTILITY, "Utility is back; training goes on once it is stable"),
        ("recovery", Supply.BATTERY, "Power-off in 11 min 56 s"),
    ],
)
def test_a_power_off_is_counted_down_while_it_comes_and_no_longer(phase: str, supply: Supply, expected: str) -> None:
    daemon = scene(phase)
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, supply=supply))
    text = re.sub(r"\s+", " ", shown(daemon).text)
    assert expected in text
    assert (WORDS["en"]["next_online"] in text) is (supply is Supply.UTILITY)


@pytest.mark.parametrize("mode", Mode)
def test_what_is_only_recorded_says_so(mode: Mode) -> None:
    text = shown(committed(mode)).text
    assert (WORDS["en"]["recorded"] in text) is (mode is not Mode.ARMED)
    # Else a rehearsal counts down to a power-off that never comes, and then says "now" until utility is back.
    assert ("orced power-off" in text) is (mode is Mode.ARMED)
    assert (WORDS["en"]["count.none"] in text) is (mode is not Mode.ARMED)


@pytest.mark.parametrize(("lasts_s", "expected"), [(3600.0, "Waiting for utility"), (60.0, "Power-off in 13 min 17 s")])
def test_a_power_off_that_maintenance_suspends_is_not_announced(lasts_s: float, expected: str) -> None:
    """One that comes after its end is."""
    daemon = scene("holding")
    daemon.state = replace(daemon.state, maintenance=Maintenance(until_s=NOW_S + lasts_s, reason="fan", who="a"))
    text = re.sub(r"\s+", " ", shown(daemon).text)
    assert expected in text
    assert ("power-off of the host" in text) is ("Power-off" in expected)


@pytest.mark.parametrize(("phase", "holds"), [("holding", True), ("shutdown", False)])
def test_maintenance_after_the_commit_keeps_no_host_on(phase: str, *, holds: bool) -> None:
    daemon = scene(phase)
    daemon.state = replace(daemon.state, maintenance=Maintenance(until_s=NOW_S + 3600.0, reason="fan", who="a"))
    text = shown(daemon).text
    assert [each in text for each in (WORDS["en"]["maintenance"], ERRORS["maintenance"])] == [holds, holds]


def test_every_name_is_escaped() -> None:
    """Names and texts of trainers, UPSes, sources, alarms, hosts and outages are text, whatever they hold."""
    daemon = scene("holding")
    trainer = replace(daemon.state.trainers[0], name=MARKUP, checkpoint=GivenUp(because=MARKUP, tries=1))
    reading = daemon.state.feed.reading
    assert reading is not None
    feed = replace(daemon.state.feed, reading=replace(reading, alarms=(MARKUP,), ups=MARKUP))
    daemon.state = replace(daemon.state, trainers=(trainer,), feed=feed)
    daemon.policy = replace(daemon.policy, ups=MARKUP)
    daemon.sources = (replace(daemon.sources[0], source=MARKUP, up=False, last_error=MARKUP, trouble=MARKUP),)
    daemon.host_name = MARKUP
    daemon.outages = (recorded(id=MARKUP, outcome=MARKUP),)
    plain, outline = shown(scene("holding")), shown(daemon)
    assert "img" not in outline.tags
    assert outline.tags.count("script") == plain.tags.count("script") == 1
    assert outline.text.count(MARKUP) >= 8
    assert not [name for _, attributes in outline.attributes for name in attributes if name.startswith("on")]
    assert not [tag for tag, attributes in outline.attributes if "style" in attributes]


def test_a_name_that_is_no_text_is_shown() -> None:
    """An undecodable byte in a name must not take the page away."""
    daemon = scene()
    daemon.host_name = "gpu-\udcff"
    assert "gpu-?" in shown(daemon).text


def test_a_started_training_is_awaited() -> None:
    daemon = scene("recovery")
    phase = daemon.state.phase
    assert isinstance(phase, Recovery)
    daemon.state = replace(daemon.state, phase=replace(phase, started_at_s=daemon.now_s - 5.0))
    assert WORDS["en"]["count.started"] in shown(daemon).text


def test_nothing_is_known() -> None:
    """No reading, no trainer, no BMC, no outage: said, and no error."""
    daemon = scene()
    feed = replace(daemon.state.feed, reading=None, supply=Supply.UNKNOWN)
    daemon.state = replace(daemon.state, feed=feed, trainers=())
    daemon.policy = replace(daemon.policy, runtime_table=(), trainers=())
    daemon.sources, daemon.bmc, daemon.methods = (), None, ()
    text = shown(daemon).text
    for name in ("no_reading", "no_trainers", "no_outages", "methods_uncovered"):
        assert WORDS["en"][name] in text


def test_the_page_stays_small_with_many_trainers() -> None:
    """Of hundreds the urgent ones are shown, in their order, and the others are counted."""
    daemon = scene("holding")
    many = [
        replace(
            daemon.state.trainers[0],
            name=f"rank-{at:03}",
            activity=Activity.TRAINING if at not in {7, 431} else Activity.GONE,
        )
        for at in range(500)
    ]
    daemon.state = replace(daemon.state, trainers=tuple(many))
    html = Page(daemon, status, returning).html("en")
    assert len(html.encode()) <= 60_000
    names = re.findall(r"rank-\d+", html)
    assert {"rank-007", "rank-431"} <= set(names)
    assert names == sorted(names)
    assert len(set(names)) == MOST_ROWS - 1
    assert WORDS["en"]["more"].format(500 - len(set(names))) in html


def test_alarms_have_their_remedies() -> None:
    daemon = scene()
    daemon.policy = replace(daemon.policy, runtime_table=((0.5, 180.0), (1.0, 72.0)))
    status_shown: Any = status(daemon)
    (reason,) = status_shown["reasons"]
    text = shown(daemon).text
    assert reason["text"] in text
    assert reason["fix"]
    assert reason["fix"] in text
    assert WORDS["en"]["not_ready"] in text


def test_several_upses_are_shown_each() -> None:
    daemon = scene("on_battery")
    feeds = tuple(FeedPolicy(policy=replace(POLICY, ups=name)) for name in ("rack-a", "rack-b"))
    daemon.policy = replace(daemon.policy, feeds=feeds)
    known = daemon.state.feed, daemon.state.battery
    upses = tuple(Supplied(ups=each.policy.ups, feed=known[0], battery=known[1]) for each in feeds)
    daemon.state = replace(daemon.state, upses=upses)
    text = shown(daemon).text
    for name in ("rack-a + rack-b", "rack-a", "rack-b"):
        assert re.search(rf"\n{re.escape(name)}:", text), name


def test_last_outages_come_from_the_journal() -> None:
    daemon = scene()
    daemon.outages = (recorded(ended_at_s=None, ended_wall=None, outcome=""), recorded(id="6f1d2c3b-6"))
    text = shown(daemon).text
    assert text.index("still running") < text.index("ridden through: training never stopped")
    assert "powerguard report 6f1d2c3b-7 --html FILE" in text
    assert "5 min 0 s" in text
    daemon.outages = (recorded(figures={"lasted_s": 119.0}),)
    assert "1 min 59 s" in shown(daemon).text, "as in history: not by a wall clock that was set in the outage"


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal that the real loop wrote, with one outage that has ended."""
    path = tmp_path_factory.mktemp("pg ") / "journal.sqlite"
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(told_in(path, STORIES["held"]))
    return path


class Counted:
    """Starts real children, and counts them. ended: what they answer in the place of a child of ours."""

    def __init__(self, ended: Ended | OSError | None = None) -> None:
        self.argv: list[Sequence[str]] = []
        self.last: Ended | None = None
        self._ended = ended

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        self.argv.append(argv)
        if isinstance(self._ended, OSError):
            raise self._ended
        self.last = await run_child(argv, limit_s=PATIENCE_S) if self._ended is None else self._ended
        return self.last


async def ask(port: int, outage: str) -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/outages/{quote(outage, safe='')}") as answer,
    ):
        return answer.status, await answer.text(), answer.headers["Content-Security-Policy"]


async def test_the_last_outages_link_to_their_reports(journal: Path) -> None:
    """Made once by a child, under the policy that its own style needs; the running one and others have none."""
    with read_only(journal) as db:
        (record,) = history(db, 1)
    daemon, spawn = scene(), Counted()
    daemon.outages = (recorded(id="runs", ended_wall=None), record)
    reports = Reports(daemon, journal, spawn)
    linked = re.findall(r'href="/outages/([^"]*)"', Page(daemon, status, returning, reports).html("en"))
    assert linked == [quote(record.id)]
    async with http_server(daemon, port=0, reports=reports) as port:
        code, html, policy = await ask(port, record.id)
        assert (code, html.count("<svg")) == (200, 1), spawn.last
        assert record.id in html
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert (await ask(port, record.id))[1] == html
        for name in ("runs", "none", "--help", "a/b", "../x", MARKUP):
            code, text, _ = await ask(port, name)
            assert (code, "<" in text) == (404, False)
    assert len(spawn.argv) == 1


async def test_no_report_is_made_in_an_outage(journal: Path) -> None:
    """Nor is one linked: the daemon then has other work."""
    daemon, spawn = scene("holding"), Counted()
    daemon.outages = (recorded(),)
    reports = Reports(daemon, journal, spawn)
    assert "/outages/" not in Page(daemon, status, returning, reports).html("en")
    async with http_server(daemon, port=0, reports=reports) as port:
        code, text, _ = await ask(port, recorded().id)
        assert (code, text.partition("; ")[2]) == (503, f"on the host: powerguard report {recorded().id} --html FILE\n")
    assert spawn.argv == []


@pytest.mark.parametrize(
    ("ended", "logged"),
    [
        (Ended(returncode=-9, stdout=b"<p>", stderr=b"", timed_out=True), "not made within 8 s"),
        (Ended(returncode=66, stdout=b"", stderr=b"first\nsecret\n"), "ended with status 66: secret"),
        (Ended(returncode=-9, stdout=b"", stderr=b""), "ended with status -9: it wrote nothing"),
        (Ended(returncode=0, stdout=b"x" * MAX_OUTPUT_BYTES, stderr=b""), "longer than 1048576 bytes"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
    ],
    ids=["slow", "failed", "killed", "cut off", "no memory"],
)
async def test_a_report_that_cannot_be_made_names_the_command(
    journal: Path, ended: Ended | OSError, logged: str
) -> None:
    """The reader gets no text of the child, which may name the host's files: that is in the log, once for a child."""
    daemon = scene()
    daemon.outages = (recorded(),)
    spawn = Counted(ended)
    with capture_logs() as logs:
        await _ask_thrice(daemon, journal, spawn)
    line = {"event": "report_failed", "log_level": "warning", "outage": recorded().id, "because": logged}
    assert [each for each in logs if each["event"] == "report_failed"] == [line] * 2


async def _ask_thrice(daemon: Watched, journal: Path, spawn: Counted) -> None:
    async with http_server(daemon, port=0, reports=Reports(daemon, journal, spawn)) as port:
        for _ in range(3):
            code, text, _ = await ask(port, recorded().id)
            assert code == 503
            assert f"powerguard report {recorded().id} --html FILE" in text
            assert "secret" not in text
        assert len(spawn.argv) == 1, "readers cause no flood of children"
        daemon.now_s += REPORT_FAILED_S
        assert (await ask(port, recorded().id))[0] == 503
    assert len(spawn.argv) == 2


@pytest.mark.parametrize(
    ("checkpoint_s", "stop_s", "shed_s"),
    [(20.0, 120.0, 0.0), (0.0, 600.0, 0.0), (100.0, 1100.0, 0.0), (20.0, 120.0, 360.0)],
)
def test_the_bar_is_the_budget(checkpoint_s: float, stop_s: float, shed_s: float) -> None:
    """Lengths are seconds; what does not fit lies behind the battery's end. The room for higher tiers is no slack."""
    needs = {"checkpoint": checkpoint_s, "stop": stop_s, "shed": shed_s}
    budget = {"runtime_effective_paused_s": 600.0, **{f"{kind}_s": seconds for kind, seconds in needs.items()}}
    found, empty_x = bars(budget)
    lengths = {bar.kind: bar.width for bar in found}
    scale = 1000.0 / max(600.0, sum(needs.values()))
    wanted = {"slack": max(0.0, 600.0 - sum(needs.values())), **needs}
    assert lengths == pytest.approx({kind: s * scale for kind, s in wanted.items() if s}, abs=0.1)
    assert empty_x == pytest.approx(600.0 * scale, abs=0.1)
    assert bars({**budget, "runtime_effective_paused_s": None}) == ([], 0.0)


def test_a_host_of_a_lower_tier_shows_the_room_for_the_higher_ones() -> None:
    """In the bar, in the legend, and in the curve of what is needed."""
    daemon = scene("on_battery")
    daemon.policy = replace(daemon.policy, shed=Shed(tier=0, highest=2, extra_s=240.0))
    outline = shown(daemon)
    bar = [attributes for tag, attributes in outline.attributes if tag == "rect" and "y" in attributes]
    assert bar[-1]["class"] == "shed"
    assert WORDS["en"]["shed"] in outline.text
    curves = Curves()
    curves.take(daemon)
    (point,) = curves.points
    assert point.need_s == conditions.budget_now(daemon.policy, daemon.state, daemon.now_s).pause_need_s


def test_a_load_in_watts_has_its_curve() -> None:
    """Of a UPS that reports no percentage: by the rating in the settings, as the core counts it."""
    daemon = scene("on_battery")
    watts = replace(daemon.state.feed.reading, load_pct=None, watts=2700.0)
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, reading=watts))
    curves = Curves()
    curves.take(daemon)
    assert [point.load_pct for point in curves.points] == [50.0]


def test_curves_are_bounded_and_span_the_whole_outage() -> None:
    """A day of outage costs as many points as two minutes, from its first second on; the next one begins anew."""
    daemon = scene("holding")
    curves = Curves()
    began_s = daemon.now_s
    for _ in range(20_000):
        curves.take(daemon)
        daemon.now_s += 1.0
    assert MOST_POINTS / 3 < len(curves.points) <= MOST_POINTS
    assert curves.points[0].at_s - began_s < 300.0
    assert daemon.now_s - curves.points[-1].at_s < 300.0
    gaps = {later.at_s - point.at_s for point, later in zip(curves.points, curves.points[1:], strict=False)}
    assert max(gaps) <= 2.0 * min(gaps)
    daemon.state = scene("online").state
    curves.take(daemon)
    assert curves.points == []


def test_both_languages_say_the_same() -> None:
    assert WORDS["en"].keys() == WORDS["zh"].keys()
    assert [key for key, text in WORDS["zh"].items() if not text] == []


@pytest.mark.parametrize(
    ("accept", "language"),
    [
        ("", "en"),
        ("zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        ("en-US,zh;q=0.9", "en"),
        ("de,zh;q=0.3,en;q=0.2", "zh"),
        ("zh;q=nan,en;q=inf", "en"),
        ("zh;q=0", "en"),
        ("zh;q=\N{SUPERSCRIPT TWO},;;=,", "en"),
    ],
)
def test_the_browser_chooses_the_language(accept: str, language: str) -> None:
    assert language_of(accept) == language


def test_durations() -> None:
    found = [duration(each, WORDS["en"]) for each in (None, 0.2, 59.6, 3600.0, 90_000.0, -61.0)]
    assert found == ["?", "0 s", "1 min 0 s", "1 h 0 min", "1 d 1 h", "-1 min 1 s"]


# --- Over HTTP --------------------------------------------------------------------------------------------------------


async def test_a_browser_gets_the_page_and_its_policy_admits_it() -> None:
    """curl still gets the list of paths. The policy's hashes are those of the style and the script that are sent."""
    async with http_server(scene(), port=0) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}/"
        async with session.get(url, headers=HTML) as answer:
            html = await answer.text()
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert answer.headers["Vary"] == "Accept, Accept-Language"
            policy = answer.headers["Content-Security-Policy"]
        assert len(html.encode()) <= 60_000
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy
        assert re.search(r'<noscript><meta http-equiv="refresh" content="5"></noscript>', html)
        assert not re.search(r"(src|href)=\"?(https?:)?//", html)
        async with session.get(url, headers={**HTML, "Accept-Language": "zh-CN"}) as answer:
            assert '<html lang="zh-CN">' in await answer.text()
        async with session.get(url) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
        async with session.head(url, headers=HTML) as answer:
            assert (answer.status, await answer.read()) == (200, b"")


@contextlib.asynccontextmanager
async def stream(port: int, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session,
        session.get(f"http://127.0.0.1:{port}/events", headers=headers) as answer,
    ):
        yield answer


async def event(answer: aiohttp.ClientResponse) -> str:
    """Return the page of the next event."""
    while True:
        line = await answer.content.readline()
        assert line, "the stream has ended"
        if line.startswith(b"data: "):
            page: str = json.loads(line[6:])
            return page


def phase_of(page: str) -> str:
    found = re.search(r'<p class="phase \w+">([^<]*)</p>', page)
    assert found
    return found[1]


async def test_updates_follow_the_phases_in_order() -> None:
    """Each phase that lasts until it is seen is shown, in order, without style and script; HEAD ends at once."""
    daemon = scene()
    async with http_server(daemon, port=0, connection_limit_s=0.5) as port:
        async with stream(port, **{"Accept-Language": "zh"}) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            seen = []
            for name in PHASES:
                daemon.state = scene(name).state
                while not seen or seen[-1] != WORDS["zh"][f"phase.{name}"]:
                    page = await event(answer)
                    assert "<script" not in page
                    assert "<style" not in page
                    if not seen or seen[-1] != phase_of(page):
                        seen.append(phase_of(page))
        assert seen == [WORDS["zh"][f"phase.{name}"] for name in PHASES]
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}/events"
            async with session.head(url) as answer:
                assert (answer.status, await answer.read()) == (200, b"")
            async with session.post(url) as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD")


async def test_one_reader_too_many_is_refused_until_another_leaves() -> None:
    async with http_server(scene(), port=0) as port, contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        await event(await first.enter_async_context(stream(port)))
        for _ in range(READERS - 1):
            await event(await stack.enter_async_context(stream(port)))
        async with stream(port) as answer:
            assert answer.status == 503
            assert "streams are open" in (await answer.json())["error"]
        await first.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with stream(port) as answer:
                    if answer.status == 200:
                        break
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/healthz") as answer:
            assert answer.status == 200


async def test_a_reader_who_does_not_read_is_dropped_and_delays_nobody() -> None:
    daemon = scene()
    daemon.outages = tuple(recorded(id=f"{number}-{'x' * 4_000}") for number in range(8))
    async with http_server(daemon, port=0) as port:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        with slow:
            await loop.sock_connect(slow, ("127.0.0.1", port))
            await loop.sock_sendall(slow, b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
            async with stream(port) as answer:
                frames = [len(await event(answer)) for _ in range(10)]
                got = 0
                async with asyncio.timeout(PATIENCE_S):
                    with contextlib.suppress(ConnectionResetError):
                        while part := await loop.sock_recv(slow, 65536):
                            got += len(part)
                assert got < sum(frames)
                await event(answer)


async def test_open_streams_do_not_delay_a_stop() -> None:
    async with contextlib.AsyncExitStack() as server:
        port = await server.enter_async_context(http_server(scene(), port=0))
        async with stream(port) as answer:
            await event(answer)
            await server.aclose()
            with contextlib.suppress(aiohttp.ClientError):
                while await answer.content.readline():
                    pass


def test_the_page_is_packaged() -> None:
    import powerguard.daemon.observe.page as package

    assert (Path(package.__file__).parent / "page.html").is_file()
