"""`powerguard battery`: what is told of a battery, by whom, and what it takes to have it forgotten."""

import asyncio
import json
import os
import pty
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.battery import describe
from powerguard.cli.doctor.checks import OLD_MEASUREMENT_S, health_finding
from powerguard.cli.render import Paint
from powerguard.core.decide.machine import step
from powerguard.core.model.events import BatteryReplaced
from powerguard.core.model.policy import FeedPolicy
from powerguard.core.model.state import Battery, Drill, DrillStage, Feed, State, Supplied
from powerguard.daemon.control.admin import admin_server
from powerguard.daemon.journal import Entry, Inline, Journal
from powerguard.daemon.observe.http import http_server
from powerguard.daemon.observe.learned import battery_view
from tests.cli.test_commands import Ended, powerguard
from tests.daemon.watched import BOOT, DAY_S, HEALTH, NOW_S, PHASES, WALL_S, Watched, reading, scene, taught
from tests.golden import Golden

Make = Callable[..., Watched]
MONTH = {re.compile(r"\d{4}-\d\d(?= \(this month)"): "MONTH"}

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture
def folder() -> Iterator[Path]:
    made = tempfile.mkdtemp(dir="/tmp", prefix="pg ")
    yield Path(made)
    shutil.rmtree(made)


@asynccontextmanager
async def served(daemon: Watched, folder: Path) -> AsyncIterator[str]:
    async with admin_server(daemon, path=f"{folder}/s.sock") as path:
        yield path


def view(daemon: Watched) -> dict[str, Any]:
    return dict(json.loads(json.dumps(battery_view(daemon), allow_nan=False)))


def text(daemon: Watched) -> str:
    return "\n".join(describe(view(daemon), Paint()))


def example(name: str) -> dict[str, Any]:
    return dict(json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8")))


# --- The object -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "make"), [("battery", taught), ("battery-presumed", scene)])
def test_examples_in_the_reference_are_true(name: str, make: Make) -> None:
    """The documented objects are what the code makes; `tests/daemon/watched.py` is their world."""
    assert example(name) == view(make())


@pytest.mark.parametrize("make", [scene, taught])
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_plain_json_of_one_shape(phase: str, make: Make) -> None:
    result = view(make(phase))
    assert (result["phase"], list(result)) == (phase, list(example("battery")))
    assert [list(ups) for ups in result["ups"]] == [list(ups) for ups in example("battery")["ups"]]


def test_a_daemon_that_knows_nothing_yet(golden: Golden) -> None:
    """No reading, no table: every figure that would be invented is null, and it can be shown all the same."""
    daemon = scene()
    daemon.state = State(feed=Feed(), battery=Battery())
    daemon.policy = replace(daemon.policy, runtime_table=())
    (ups,) = view(daemon)["ups"]
    assert (ups["runtime"], ups["reported"]["runtime_s"]) == ({"origin": "unknown", "points": []}, None)
    assert ups["reported"]["over_report"] is None
    assert ups["health"]["to_measure"] == {"least_depth": 0.25, "at_load_now_s": None}
    golden("battery", text(daemon))


def test_the_ups_promises_more_than_the_account_has(golden: Golden) -> None:
    """Both at the present load, so that the surplus is the UPS's own and not the load's."""
    daemon = taught()
    reported = view(daemon)["ups"][0]["reported"]
    assert reported["account_s"] == pytest.approx(0.8008 * 1400.0, abs=0.01)
    assert reported["over_report"] == pytest.approx(1260.0 / (0.8008 * 1400.0) - 1.0, abs=0.001)
    golden("battery", text(daemon), "more")
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, reading=reading(runtime_s=560.0)))
    golden("battery", text(daemon), "less")


def test_what_the_ups_says_beside_a_table_does_not_count(golden: Golden) -> None:
    daemon = taught()
    daemon.policy = replace(daemon.policy, runtime_table=scene().policy.runtime_table)
    runtime = view(daemon)["ups"][0]["runtime"]
    assert runtime["origin"] == "settings"
    assert [(point["origin"], point["counts"]) for point in runtime["points"]] == [
        *[("settings", True)] * 3,
        *[("learned", False)] * 2,
    ]
    golden("battery", text(daemon))


def test_one_reading_is_a_point_of_its_own() -> None:
    """Neither settings nor learned: it is gone with the next load."""
    daemon = scene()
    daemon.policy = replace(daemon.policy, runtime_table=())
    daemon.state = replace(daemon.state, battery=replace(daemon.state.battery, tau_point=(0.62, 1260.0)))
    runtime = view(daemon)["ups"][0]["runtime"]
    assert runtime["origin"] == "reported now"
    assert runtime["points"] == [
        {"load_pct": 62.0, "runtime_s": 1260.0, "origin": "reported now", "at": None, "counts": True}
    ]


def test_a_discharge_that_runs_is_reported_with_its_slope(golden: Golden) -> None:
    daemon = taught("holding")
    discharge = view(daemon)["ups"][0]["discharge"]
    assert discharge == {
        "since_at": WALL_S - 60.0, "depth": 0.19, "slope": 1.8, "steep": True, "whole": True, "low": False,
    }  # fmt: skip
    golden("battery", text(daemon))


def test_an_expired_measurement_is_shown_and_does_not_count() -> None:
    daemon = taught()
    daemon.now_s += 400 * DAY_S
    health = view(daemon)["ups"][0]["health"]
    assert (health["origin"], health["measured"]["expired"], health["measured"]["share_now"]) == ("default", True, None)
    assert "expires" not in text(daemon)


# --- show -------------------------------------------------------------------------------------------------------------


async def test_show(folder: Path, golden: Golden) -> None:
    async with served(taught(), folder) as path:
        ended = await powerguard("battery", "show", "--socket", path)
        assert (ended.code, ended.err) == (0, "")
        golden("battery", ended.out)
        answer = (await powerguard("battery", "show", "--socket", path, "--json")).object
    assert answer == example("battery")


async def test_show_over_the_port() -> None:
    async with http_server(taught(), port=0) as port:
        answer = (await powerguard("battery", "show", "--url", f"http://127.0.0.1:{port}", "--json")).object
    assert answer == example("battery")


async def test_show_when_the_daemon_is_down(folder: Path, golden: Golden) -> None:
    """Exit 4, and what the journal last knew: written by the daemon's own journal."""
    path = folder / "journal.sqlite"
    journal = Journal(path, boot_id=BOOT, wall=lambda: WALL_S, writer=Inline(), reader=Inline())
    await journal.load()
    assert await journal.append(Entry(at_s=NOW_S, state=taught().state))
    assert await journal.close()
    args = ("battery", "show", "--socket", "/run/powerguard-of-the-test/none.sock", "--journal", str(path))
    ended = await powerguard(*args)
    assert ended.code == 4
    golden("battery", ended.out)
    assert (await powerguard(*args, "--json")).object == example("battery-down")


async def test_each_of_several_batteries_is_shown_when_the_daemon_is_down(folder: Path, golden: Golden) -> None:
    """A mean of two batteries is the health of neither."""
    path = folder / "journal.sqlite"
    journal = Journal(path, boot_id=BOOT, wall=lambda: WALL_S, writer=Inline(), reader=Inline())
    await journal.load()
    state = taught().state
    worn = Battery(health=0.6, used=0.1, left=0.5)
    upses = (
        Supplied(ups="rack-b", feed=Feed(), battery=worn),
        Supplied(ups="rack-a", feed=Feed(), battery=state.battery),
    )
    assert await journal.append(Entry(at_s=NOW_S, state=replace(state, battery=Battery(health=0.7), upses=upses)))
    assert await journal.close()
    args = ("battery", "show", "--socket", "/run/powerguard-of-the-test/none.sock", "--journal", str(path))
    golden("battery", (await powerguard(*args)).out)
    known = (await powerguard(*args, "--json")).object["last_known"]
    assert [(ups["name"], ups["health"]) for ups in known["ups"]] == [("rack-a", 0.8008), ("rack-b", 0.6)]
    alone = example("battery-down")["last_known"]
    assert {**known["ups"][0], "at": known["at"], "ups": []} == {**alone, "name": "rack-a"}


@pytest.mark.parametrize("content", [None, b"", b"no database" * 200], ids=["none", "empty", "no database"])
async def test_show_without_daemon_and_journal(content: bytes | None, folder: Path, golden: Golden) -> None:
    path = folder / "journal.sqlite"
    if content is not None:
        path.write_bytes(content)
    args = ("battery", "show", "--socket", str(folder / "none.sock"), "--journal", str(path))
    ended = await powerguard(*args)
    assert ended.code == 4
    assert (await powerguard(*args, "--json")).object["last_known"] is None
    golden("battery", ended.out)


# --- replaced ---------------------------------------------------------------------------------------------------------


async def replaced(path: str, *words: str) -> Ended:
    return await powerguard("battery", "replaced", "--socket", path, *words)


async def test_replaced_says_what_goes_and_what_to_do(folder: Path, golden: Golden) -> None:
    daemon = taught()
    async with served(daemon, folder) as path:
        ended = await replaced(path, "--yes", "--installed", "2026-11")
    (event,) = daemon.events
    assert isinstance(event, BatteryReplaced)
    assert ended.code == 0
    golden("battery", ended.err, "asked")
    golden("battery", ended.out)
    assert 'ups.rack-a.battery_installed: "2026-11"' in ended.out


async def test_what_is_said_to_go_goes_and_the_rest_stays(folder: Path) -> None:
    """The core's own answer to the event that the socket takes."""
    daemon = taught()
    async with served(daemon, folder) as path:
        assert (await replaced(path, "--yes", "--json")).object["object"] == "accepted"
    (event,) = daemon.events
    daemon.state = step(daemon.policy, daemon.state, event).state
    (ups,) = view(daemon)["ups"]
    assert (ups["health"]["measured"], ups["health"]["share"], ups["runtime"]["points"]) == (None, 0.75, [])
    assert (ups["recharge"], ups["replaced_at"]) == ({"full_s": 22000.0, "origin": "learned"}, WALL_S)
    assert [need["need"] for need in view(daemon)["needs"]] == ["checkpoint", "stop", "boot", "resume"]


async def test_one_of_several_batteries_is_named(folder: Path, golden: Golden) -> None:
    """With --yes the first one's health would have been forgotten, whichever was replaced."""
    daemon = taught()
    alone = daemon.policy
    policies = (alone, replace(alone, ups="rack-b"))
    daemon.policy = replace(alone, feeds=tuple(FeedPolicy(policy=each) for each in policies))
    known = daemon.state.feed, daemon.state.battery
    upses = tuple(Supplied(ups=each.ups, feed=known[0], battery=known[1]) for each in policies)
    daemon.state = replace(daemon.state, upses=upses)
    async with served(daemon, folder) as path:
        ended = await replaced(path, "--yes")
        assert (ended.code, daemon.events) == (64, [])
        golden("battery", ended.err)
        assert (await replaced(path, "--yes", "--ups", "rack-b")).code == 0
    (event,) = daemon.events
    assert event.ups == "rack-b"


async def test_replaced_asks_on_a_terminal(folder: Path) -> None:
    """Whoever only presses return has changed nothing."""
    for answer, count in ((b"\n", 0), (b"n\n", 0), (b"y\n", 1)):
        daemon = taught()
        async with served(daemon, folder) as path:
            ours, theirs = pty.openpty()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "powerguard", "battery", "replaced", "--socket", path,
                stdin=theirs, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                cwd=Path(__file__).parents[2],
            )  # fmt: skip
            os.write(ours, answer)
            async with asyncio.timeout(60.0):
                _, err = await process.communicate()
            os.close(ours)
            os.close(theirs)
        assert b"Forget it? [y/N]" in err
        assert (process.returncode, len(daemon.events)) == (1 - count, count)


async def test_replaced_without_anybody_to_ask(folder: Path) -> None:
    daemon = taught()
    process_code = None
    async with served(daemon, folder) as path:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "powerguard", "battery", "replaced", "--socket", path,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        async with asyncio.timeout(60.0):
            _, err = await process.communicate()
        process_code = process.returncode
    assert (process_code, daemon.events) == (64, [])
    assert b"--yes" in err
    assert b"is forgotten" not in err, "nothing was: it refused"


@pytest.mark.parametrize("month", ["2026-13", "26-11", "2099-01", "today"])
async def test_a_month_that_cannot_be(month: str, folder: Path) -> None:
    ended = await replaced(str(folder / "none.sock"), "--yes", "--installed", month)
    assert ended.code == 64
    assert month in ended.err


async def test_another_ups_is_refused(folder: Path, golden: Golden) -> None:
    daemon = taught()
    async with served(daemon, folder) as path:
        ended = await replaced(path, "--yes", "--ups", "rack-b")
    assert (ended.code, daemon.events) == (1, [])
    golden("battery", ended.err)


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "online"])
async def test_refused_while_the_battery_carries_the_load(phase: str, folder: Path, golden: Golden) -> None:
    """Health that was measured must not become a default in the middle of an outage."""
    daemon = taught(phase)
    async with served(daemon, folder) as path:
        ended = await replaced(path, "--yes")
    assert (ended.code, daemon.events) == (1, [])
    golden("battery", ended.err, varies=MONTH)


async def test_refused_in_a_drill(folder: Path, golden: Golden) -> None:
    daemon = taught()
    drill = Drill(
        id="d", began_s=NOW_S, who="root", scopes=("pause",), witness="simulated", part=DrillStage(name="x", at_s=NOW_S)
    )
    daemon.state = replace(daemon.state, drill=drill)
    async with served(daemon, folder) as path:
        ended = await replaced(path, "--yes")
    assert (ended.code, daemon.events) == (1, [])
    golden("battery", ended.err, varies=MONTH)


# --- doctor -----------------------------------------------------------------------------------------------------------


AGES = [
    (None, "WARN"),
    (70 * DAY_S, "PASS"),
    (OLD_MEASUREMENT_S - DAY_S, "PASS"),
    (OLD_MEASUREMENT_S + DAY_S, "WARN"),
    (400 * DAY_S, "WARN"),
]


@pytest.mark.parametrize(("age_s", "verdict"), AGES)
def test_doctor_wants_a_measured_health(age_s: float | None, verdict: str, golden: Golden) -> None:
    """A default costs training time, and a measurement that expires unnoticed becomes one."""
    daemon = taught()
    health = None if age_s is None else replace(HEALTH, at_s=NOW_S - age_s)
    model = replace(daemon.state.battery.model, health=health)
    daemon.state = replace(daemon.state, battery=replace(daemon.state.battery, model=model))
    (ups,) = view(daemon)["ups"]
    finding = health_finding(ups["name"], ups["health"])
    assert (finding.name, finding.verdict) == ("battery.rack-a", verdict)
    assert bool(finding.fix) is (verdict == "WARN")
    golden("doctor", f"{finding.text} -> {finding.fix}")


def test_doctor_asks_on_where_a_discharge_has_shown_only_a_bound() -> None:
    """A bound below the default measures nothing; one above it counts."""
    for share, verdict, origin in ((0.4, "WARN", "default"), (0.9, "PASS", "measured")):
        daemon = taught()
        model = replace(daemon.state.battery.model, health=replace(HEALTH, share=share, at_s=NOW_S, least=True))
        daemon.state = replace(daemon.state, battery=replace(daemon.state.battery, model=model))
        (ups,) = view(daemon)["ups"]
        finding = health_finding(ups["name"], ups["health"])
        assert (finding.verdict, ups["health"]["origin"]) == (verdict, origin)
        assert f"at least {100 * share:.0f} %" in finding.text


def test_doctor_leaves_a_health_alone_that_was_set() -> None:
    daemon = scene()
    daemon.policy = replace(daemon.policy, health=0.9, health_from="settings")
    assert health_finding("rack-a", view(daemon)["ups"][0]["health"]).verdict == "PASS"


async def test_doctor_asks_the_daemon(folder: Path) -> None:
    """Whatever else is wrong with this host."""
    async with served(scene(), folder) as path:
        answer = (await powerguard("doctor", "--json", "--socket", path, "--config", str(folder / "none.yaml"))).object
    checks = {check["name"]: check for check in answer["checks"]}
    assert checks["battery.rack-a"]["verdict"] == "WARN"
