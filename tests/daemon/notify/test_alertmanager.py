"""Alerts in Debian's own Alertmanager: they begin, stand, and end."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from powerguard.core.model.actions import Level
from powerguard.core.model.state import State
from tests.daemon.notify.post import Clock, began, ended, note, options, post
from tests.peers.ports import free_port
from tests.prometheus.served import alertmanager

pytestmark = pytest.mark.peer("prometheus-alertmanager", "unshare")
ROUTES = "route: {receiver: none}\nreceivers: [{name: none}]\n"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    config = tmp_path / "alertmanager.yml"
    config.write_text(ROUTES, encoding="utf-8")
    with alertmanager(config, tmp_path / "alertmanager", free_port()) as running:
        yield running


async def alerts(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/api/v2/alerts") as answer:
        return {each["labels"]["alertname"]: each for each in json.loads(await answer.text())}


def ends(found: dict[str, Any], name: str) -> datetime:
    return datetime.fromisoformat(found[name]["endsAt"])


async def test_alerts_begin_stand_and_end(url: str, tmp_path: Path) -> None:
    """An outage and an alarm stand until they end; a power-off stands for a day, because the host cannot say more."""
    target = {"kind": "alertmanager", "url": url, "limit_s": 30, "labels": {"site": "berlin"}}
    async with post(options(alerts=target), tmp_path) as made:
        made.hear(*began())
        made.hear(note("overload_raised", Level.ERROR, "the UPS is overloaded"))
        await made.until(lambda: made.view("alerts").delivered == 2)
        found = await alerts(url)
        assert set(found) == {"PowerguardOutage", "PowerguardOverload"}
        labels = found["PowerguardOverload"]["labels"]
        assert (labels["severity"], labels["host"], labels["site"]) == ("critical", "gpu-01", "berlin")
        assert "97 %" in found["PowerguardOutage"]["annotations"]["description"]
        before = ends(found, "PowerguardOverload")

        await made.messenger._targets["alerts"].refresh()
        assert ends(await alerts(url), "PowerguardOverload") > before

        made.hear(note("phase_changed", old="holding", new="shutdown", stop_s=100.0, grade="full"))
        await made.until(lambda: made.view("alerts").delivered == 3)
        off = await alerts(url)
        assert set(off) == {"PowerguardOutage", "PowerguardOverload", "PowerguardPowerOff"}
        assert all(ends(off, name) - before > timedelta(hours=20) for name in off)

        made.hear(note("host_returned", Level.INFO, "powered off by us", outage="o1", away_s=900.0))
        made.hear(note("overload_cleared", Level.INFO))
        made.hear(*ended(outcome="clean_shutdown"))
        await made.until(lambda: made.view("alerts").delivered == 6)
        assert await alerts(url) == {}
        assert made.view("alerts").failed == 0


@pytest.mark.parametrize("ahead_s", [-1000.0, 1000.0, -8e8])
async def test_a_host_whose_clock_is_wrong_has_its_alerts_seen(url: str, tmp_path: Path, ahead_s: float) -> None:
    """Behind: an alert would be over before it begins, in spite of status 200. Ahead: it would not end."""
    target = {"kind": "alertmanager", "url": url, "limit_s": 30}
    async with post(options(alerts=target), tmp_path, Clock(ahead_s=ahead_s)) as made:
        made.hear(*began())
        made.hear(note("power_on_blocked", because="x", method="m"))
        await made.until(lambda: made.view("alerts").delivered == 2)
        found = await alerts(url)
        assert set(found) == {"PowerguardOutage", "PowerguardPowerOnBlocked"}
        left = ends(found, "PowerguardOutage") - datetime.now(UTC)
        assert timedelta(minutes=2) < left < timedelta(minutes=7)
        made.hear(*ended())
        await made.until(lambda: made.view("alerts").delivered == 3)
        assert set(await alerts(url)) == {"PowerguardPowerOnBlocked"}


async def test_an_alert_still_ends_by_itself_after_the_hosts_clock_was_set(url: str, tmp_path: Path) -> None:
    """After a boot with an empty clock battery. Alertmanager keeps the latest end that it was given."""
    target = {"kind": "alertmanager", "url": url, "limit_s": 30}
    clock = Clock(ahead_s=-8e8)
    async with post(options(alerts=target), tmp_path, clock) as made:
        made.hear(*began())
        await made.until(lambda: made.view("alerts").delivered == 1)
        clock.ahead_s = 0.0
        await made.messenger._targets["alerts"].refresh()
        assert ends(await alerts(url), "PowerguardOutage") - datetime.now(UTC) < timedelta(minutes=7)


async def test_what_stands_is_ended_after_a_restart(url: str, tmp_path: Path) -> None:
    """The alarm went while no daemon ran: the state says so, and nobody noted its end."""
    target = {"kind": "alertmanager", "url": url, "limit_s": 30}
    async with post(options(alerts=target), tmp_path) as made:
        made.hear(note("overload_raised", Level.ERROR, "the UPS is overloaded"))
        await made.until(lambda: made.view("alerts").delivered == 1)
    async with post(options(alerts=target), tmp_path) as made:
        assert "alarm:overload" in made.messenger.composer.standing
        made.messenger._add(made.messenger.composer.watch({}, State(), "armed"))
        await made.until(lambda: made.view("alerts").delivered == 2)
        assert await alerts(url) == {}
