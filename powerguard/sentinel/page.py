"""The sentinel's page: its UPSes, its hosts and their intents; names and reasons only for readers with the page key."""

# ruff: noqa: RUF001 - Chinese has its own punctuation

import base64
import binascii
import hmac
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from powerguard.daemon.observe.http import HTML_TYPE, TEXT_TYPE, Handler, respond
from powerguard.daemon.observe.page.view import Row, duration, moment, policy, render, shortened
from powerguard.daemon.observe.page.words import WORDS, language_of
from powerguard.sentinel.decide import Intent
from powerguard.sentinel.run import Sentinel
from powerguard.sentinel.server import HostRequests

NAMES: Final = "/names"
_ASK: Final = {"WWW-Authenticate": 'Basic realm="powerguard sentinel: any user, the page key", charset="UTF-8"'}
_ENGLISH: Final = {
    "title": "sentinel",
    "live": "updated every 5 seconds",
    "stale": "No connection to the sentinel. What is shown here is old.",
    "quiet": "No host waits",
    "waiting": "Hosts wait to be powered on",
    "failed": "A person is needed",
    "hosts_on": "hosts on",
    "dry-run": "orders are only recorded",
    "hosts": "Hosts, in the order in which they are powered on",
    "host": "host",
    "on": "on",
    "off": "off",
    "unknown": "unknown",
    "good": "good",
    "not_good": "not good",
    "asked": "asked to be powered on",
    "tries": "orders given",
    "expires": "expires in",
    "looked": "BMC asked",
    "not_writable": "Intents cannot be stored, and new ones are refused.",
    "damaged": "Stored intents are damaged or cannot be read, and do not count.",
    "given_up": "Intents that ended without a host that is on:",
    "with_names": "Show names and reasons (asks for the page key)",
    "no_names": "Names are not shown: the settings have no page_key.",
}
_CHINESE: Final = {
    "title": "哨兵",
    "live": "每 5 秒更新",
    "stale": "与哨兵的连接已断开。此处显示的内容已过时。",
    "quiet": "没有主机等待开机",
    "waiting": "有主机等待开机",
    "failed": "需要人工处理",
    "hosts_on": "台主机已开机",
    "dry-run": "指令只记录，不执行",
    "hosts": "主机（按开机顺序）",
    "host": "主机",
    "on": "开机",
    "off": "关机",
    "unknown": "尚不清楚",
    "good": "良好",
    "not_good": "不可用",
    "asked": "已请求开机",
    "tries": "已发指令",
    "expires": "失效倒计时",
    "looked": "BMC 查询",
    "not_writable": "无法保存开机请求，新的请求会被拒绝。",
    "damaged": "保存的开机请求已损坏或无法读取，不予采用。",
    "given_up": "已结束但主机未开机的请求：",
    "with_names": "显示名称和原因（需要页面密钥）",
    "no_names": "不显示名称：设置中没有 page_key。",
}
TEXTS: Final[Mapping[str, Mapping[str, str]]] = {"en": {**WORDS["en"], **_ENGLISH}, "zh": {**WORDS["zh"], **_CHINESE}}


def page(sentinel: Sentinel, language: str, *, has_names: bool, has_key: bool = False) -> str:
    """Return the page. Without names it shows no reasons either: those name hosts, UPSes and addresses.

    has_key: the settings have a page key.
    """
    words = TEXTS[language]
    world, keeper = sentinel.world(), sentinel.keeper
    lost = len(sentinel.left_off)
    alarms = [words["not_writable"]] if keeper.error else []
    alarms += [words["damaged"]] if keeper.damage else []
    alarms += [f"{words['given_up']} {lost}"] if lost else []
    waiting = [name for name in world.intents if name in world.hosts]
    mood = "bad" if alarms else "warn" if waiting else "good"
    on = sum(seen.power_on is True for seen in world.seen.values())
    supplies = [
        Row(
            name if has_names else f"UPS {number}",
            words["good" if each.good else "not_good"],
            "good" if each.good else "warn",
            [each.why] if each.why and has_names else [],
        )
        for number, (name, each) in enumerate(world.supplies.items(), 1)
    ]
    hosts = [_host(sentinel, name, at, words, has_names=has_names) for at, name in enumerate(world.hosts, 1)]
    values = {
        "w": words,
        "at": moment(sentinel.wall()),
        "phase": words[{"bad": "failed", "warn": "waiting", "good": "quiet"}[mood]],
        "mood": mood,
        "mode": sentinel.settings.mode,
        "on": f"{on} / {len(world.hosts)} {words['hosts_on']}",
        "alarms": alarms,
        "supplies": shortened(supplies, words),
        "hosts": shortened(hosts, words),
        "names": "" if has_names else NAMES if has_key else None,
    }
    return render(values, "powerguard.sentinel")


def _host(sentinel: Sentinel, name: str, number: int, words: Mapping[str, str], *, has_names: bool) -> Row:
    now_s, seen = sentinel.clock(), sentinel.seen.get(name)
    is_on = None if seen is None else seen.power_on
    state, mood = {True: ("on", "good"), False: ("off", "plain"), None: ("unknown", "warn")}[is_on]
    intent: Intent | None = sentinel.keeper.table.intents.get(name)
    details = []
    if intent is not None:
        mood = "warn"
        details = [words["asked"], f"{words['expires']} {duration(max(0.0, intent.expires_s - now_s), words)}"]
        details += [f"{words['tries']}: {intent.tries}"] if intent.tries else []
    if seen is not None:
        details.append(f"{words['looked']}: {words['ago'].format(duration(now_s - seen.at_s, words))}")
    if has_names:
        details += [text for text in (sentinel.waits.get(name, ""), "" if seen is None else seen.why) if text]
    return Row(name if has_names else f"{words['host']} {number}", words[state], mood, details)


def pages(sentinel: Sentinel, door: HostRequests, key: bytes) -> dict[str, Handler]:
    """Return the pages. key: shows names and reasons to a reader who has it; empty: they are never shown."""

    def made(request: web.Request, *, has_names: bool) -> web.Response:
        language = language_of(request.headers.get("Accept-Language", ""))
        html = page(sentinel, language, has_names=has_names, has_key=bool(key))
        return respond(
            (200, html.encode(), HTML_TYPE), **{"Content-Security-Policy": policy(html), "Vary": "Accept-Language"}
        )

    async def without_names(request: web.Request) -> web.Response:
        return made(request, has_names=False) if door.admits(request) else door.turn_away()

    async def with_names(request: web.Request) -> web.Response:
        if not door.admits(request):
            return door.turn_away()
        if not key or not hmac.compare_digest(_password(request.headers.get("Authorization", "")), key):
            return respond(
                (401, b"The page key is needed: any user name, and the key as password.\n", TEXT_TYPE), **_ASK
            )
        return made(request, has_names=True)

    return {"/": without_names, NAMES: with_names}


def _password(authorization: str) -> bytes:
    """Return the password of Basic authentication; empty if there is none."""
    scheme, _, given = authorization.partition(" ")
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2] if scheme.lower() == "basic" else b""
    except (binascii.Error, ValueError):
        return b""
