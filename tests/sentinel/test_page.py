"""The sentinel's page: what a reader without the key sees, what one with it sees, and in a browser."""

import re
from pathlib import Path

import aiohttp
import pytest

from powerguard.core.model.events import OutputSource
from powerguard.sentinel.options import MAX_HOSTS
from powerguard.sentinel.page import TEXTS, page
from powerguard.sentinel.run import Sentinel
from powerguard.sentinel.server import Buckets
from tests.daemon.test_page import Outline
from tests.e2e.test_page import tab
from tests.sentinel.rig import Chassis, Rig, Supply, arm, carried_out, running, settings_of

KEY = b"k" * 64
HOSTS = ("gpu-rack7-1", "gpu-rack7-2")
MARKUP = "<img src=x onerror=\"document.title='owned'\">"


def two(folder: Path) -> dict[str, object]:
    """Two hosts on two UPSes: the first is off, and the BMC of the second answers with markup."""
    settings = settings_of(folder / "state", hosts=HOSTS, ups=("ups-a", "ups-b"), page_key={"file": "/nowhere"})
    chassis = {HOSTS[0]: Chassis(power_on=False), HOSTS[1]: Chassis(power_on=None, why=MARKUP)}
    supplies = {"ups-a": Supply(), "ups-b": Supply(OutputSource.BATTERY)}
    return {"settings": settings, "chassis": chassis, "supplies": supplies, "page_key": KEY}


async def seen(rig: Rig) -> None:
    await rig.until(lambda: len(rig.sentinel.seen) == 2 and rig.sentinel.world().supplies["ups-b"].why != "not read")


async def get(rig: Rig, path: str, key: bytes = b"", **headers: str) -> tuple[int, str, dict[str, str]]:
    headers |= {"Authorization": aiohttp.encode_basic_auth("me", key.decode())} if key else {}
    async with aiohttp.ClientSession() as session, session.get(f"{rig.url}{path}", headers=headers) as answer:
        return answer.status, await answer.text(), dict(answer.headers)


async def test_names_are_for_those_with_the_key(tmp_path: Path) -> None:
    """Without it: counts and states, no name and no reason. A wrong key and none get the same bytes."""
    async with running(tmp_path, **two(tmp_path)) as rig:  # type: ignore[arg-type]
        await seen(rig)
        status, open_to_all, headers = await get(rig, "/")
        assert status == 200
        assert [name for name in (*HOSTS, "ups-a", "ups-b", "battery", "img") if name in open_to_all] == []
        assert "0 / 2 hosts on" in open_to_all
        refused = [(await get(rig, "/names", key))[:2] for key in (b"", b"x" * 64, KEY[:-1], KEY + b"k")]
        assert len(set(refused)) == 1
        assert refused[0][0] == 401
        assert "ups-a" not in refused[0][1]
        for garbage in ("Basic", "Basic !", "Basic \xff\xfe", f"Bearer {KEY.decode()}", "Basic " + "A" * 1500):
            assert (await get(rig, "/names", Authorization=garbage))[:2] == refused[0]
        status, named, _ = await get(rig, "/names", KEY)
        assert status == 200
        for name in (*HOSTS, "ups-a", "ups-b", "on battery"):
            assert name in named
        for html in (open_to_all, named):
            assert len(html.encode()) <= 60_000
            assert 'http-equiv="refresh"' in html
            assert not re.search(r"(src|href)=\"?(https?:)?//", html)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy


async def test_a_reason_is_text(tmp_path: Path) -> None:
    async with running(tmp_path, **two(tmp_path)) as rig:  # type: ignore[arg-type]
        await seen(rig)
        outline = Outline(page(rig.sentinel, "en", has_names=True))
        assert outline.open == []
        assert "img" not in outline.tags
        assert MARKUP in outline.text


async def test_without_a_key_in_the_settings_names_are_never_shown(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.until(lambda: bool(rig.sentinel.seen))
        assert TEXTS["en"]["no_names"] in (await get(rig, "/"))[1]
        for key in (b"", b"x" * 64):
            assert (await get(rig, "/names", key))[0] == 401


async def test_keys_cannot_be_tried_quickly(tmp_path: Path) -> None:
    """An address that asks too often is turned away, before its key is looked at."""
    async with running(tmp_path, **two(tmp_path)) as rig:  # type: ignore[arg-type]
        rig.door._addresses = Buckets(rate=0.0, burst=3.0)
        statuses = [(await get(rig, "/names", key))[0] for key in (b"x" * 64, b"y" * 64, b"z" * 64, KEY)]
        assert statuses == [401, 401, 401, 429]
        assert (await get(rig, "/"))[0] == 429


@pytest.mark.parametrize("language", TEXTS)
async def test_an_intent_is_shown(tmp_path: Path, language: str) -> None:
    """In the reader's language; an intent that could not be stored is an alarm."""
    words = TEXTS[language]
    async with running(tmp_path) as rig:
        await rig.until(lambda: bool(rig.sentinel.seen))
        _, quiet, headers = await get(rig, "/", **{"Accept-Language": language})
        assert headers["Vary"] == "Accept-Language"
        assert words["quiet"] in quiet
        await carried_out(rig.effector(), arm(in_s=60.0))
        waits = (await get(rig, "/", **{"Accept-Language": language}))[1]
        assert words["waiting"] in waits
        assert words["asked"] in waits
        rig.sentinel.keeper.error = "the disk is full"
        failed = (await get(rig, "/", **{"Accept-Language": language}))[1]
        assert words["failed"] in failed
        assert words["not_writable"] in failed


async def test_a_host_that_was_given_up_is_an_alarm_until_it_is_on(tmp_path: Path) -> None:
    """Also after a reload of the settings, which has no part in it."""
    text = TEXTS["en"]["given_up"]
    async with running(tmp_path, pace=2000.0, chassis={"n1": Chassis(power_on=False, stuck=True)}) as rig:
        await carried_out(rig.effector(), arm())
        await rig.until(lambda: rig.sentinel.ends["n1", "gave_up"] == 1)
        assert f"{text} 1" in (await get(rig, "/"))[1]
        reloaded = Sentinel(rig.settings, rig.sentinel.keeper, rig.sentinel._hands)
        assert f"{text} 1" in page(reloaded, "en", has_names=False)
        rig.chassis["n1"].power_on = True
        await rig.until(lambda: rig.sentinel.seen["n1"].power_on)
        assert text not in (await get(rig, "/"))[1]
        assert text not in page(reloaded, "en", has_names=False)


async def test_the_page_of_many_hosts_stays_small(tmp_path: Path) -> None:
    """As many as there may be, each with a BMC that fails at length."""
    hosts = tuple(f"gpu-rack7-{at:03}" for at in range(MAX_HOSTS))
    chassis = {name: Chassis(power_on=None, why="x" * 200) for name in hosts}
    async with running(tmp_path, settings_of(tmp_path / "state", hosts=hosts), chassis=chassis) as rig:
        await rig.until(lambda: len(rig.sentinel.seen) == MAX_HOSTS)
        html = page(rig.sentinel, "en", has_names=True)
    assert len(html.encode()) <= 60_000
    assert f"0 / {MAX_HOSTS} hosts on" in html


def test_both_languages_say_the_same() -> None:
    assert TEXTS["en"].keys() == TEXTS["zh"].keys()
    assert [key for key, text in TEXTS["zh"].items() if not text] == []


@pytest.mark.slow
@pytest.mark.peer("chromium")
async def test_a_browser_follows_the_sentinel(tmp_path: Path) -> None:
    """The page without names updates itself; the page key, entered once, serves for the updates of the other."""
    async with (
        running(tmp_path, **two(tmp_path)) as rig,  # type: ignore[arg-type]
        tab(tmp_path, f"{rig.url}/") as browser,
    ):
        await browser.until("document.getElementById('count')?.textContent.includes('0 / 2')")
        await browser.eval("window.kept = true")
        rig.chassis[HOSTS[0]].power_on = True
        rig.sentinel.seen.clear()
        for bell in rig.sentinel._bells.values():
            bell.set()
        await browser.until("document.getElementById('count').textContent.includes('1 / 2')")
        assert await browser.eval("window.kept"), "it was loaded again, not updated"
        await browser.eval(f"location.href = 'http://me:{KEY.decode()}@127.0.0.1:{rig.port}/names'")
        await browser.until(f"document.getElementById('hosts')?.textContent.includes('{HOSTS[1]}')")
        assert await browser.eval("document.querySelectorAll('img').length") == 0
        assert await browser.eval("document.documentElement.scrollWidth <= innerWidth")
        await browser.eval("window.kept = true")
        await carried_out(rig.effector(HOSTS[0]), arm(in_s=60.0))
        await browser.until(f"document.getElementById('phase').textContent.trim() === '{TEXTS['en']['waiting']}'")
        assert await browser.eval("window.kept")
    console = (tmp_path / "console").read_text(errors="replace")
    assert "Content Security Policy" not in console
    assert "Uncaught" not in console
