"""The drill as others see it: its objects, and the verbs of the admin socket that begin and stop one."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from powerguard.core.model.events import Event, StartDrill, StopDrill
from powerguard.core.model.state import Maintenance
from powerguard.daemon.control.admin import admin_server
from powerguard.daemon.observe.status import drill_plan, drill_view, status
from tests.daemon.watched import NOW_S, WALL_S, Watched, drilled, running_drill, scene

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture
def path() -> Iterator[str]:
    folder = tempfile.mkdtemp(dir="/tmp", prefix="pg ")
    yield f"{folder}/powerguard.sock"
    shutil.rmtree(folder)


def ready() -> Watched:
    """A daemon on which any drill may begin."""
    daemon = scene()
    trainer = replace(daemon.state.trainers[0], durable_at_s=NOW_S - 300.0)
    daemon.state = replace(daemon.state, trainers=(trainer,))
    return daemon


async def ask(path: str, method: str, verb: str, body: object = None) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
        session.request(method, f"http://localhost/api/v1/{verb}", json=body) as answer,
    ):
        return answer.status, await answer.json()


# --- The objects ------------------------------------------------------------------------------------------------------


def test_nothing_was_rehearsed_yet() -> None:
    view = drill_view(scene())
    assert (view["object"], view["running"], view["last"]) == ("drill", None, None)


def test_the_last_report_in_wall_time() -> None:
    last: Any = drill_view(drilled(age_s=3600.0))["last"]
    assert last["ended_at"] == WALL_S - 3600.0
    assert (last["age_s"], last["result"], last["who"]) == (3600.0, "passed", "root")
    assert last["figures"]["checkpoint_s.llm"] == 18.2


def test_the_drill_that_runs() -> None:
    running: Any = drill_view(running_drill())["running"]
    assert (running["stage"], running["stage_lasted_s"], running["stage_ends_in_s"]) == ("pause", 6.0, 39.0)
    assert running["paused"] == ["llm"]
    assert running["coming"] == ["resume", "policy", "sync", "record"]


def test_the_plan_says_what_would_happen_and_whether_it_may() -> None:
    plan: Any = drill_plan(ready(), ("full",), "simulated")
    assert plan["refused"] == ""
    assert [each["stage"] for each in plan["stages"]][:3] == ["baseline", "checkpoint", "pause"]
    assert plan["stages"][-1]["what"] == "left out: the settings cap no GPU power"
    refused: Any = drill_plan(scene(), ("pause",), "simulated")
    assert "no known checkpoint" in refused["refused"]
    assert drill_plan(ready(), ("full",), "magic")["stages"] == []


def examples() -> dict[str, object]:
    return {
        "drill": drill_view(drilled()),
        "drill-running": drill_view(running_drill()),
        "drill-plan": drill_plan(ready(), ("full",), "simulated"),
    }


@pytest.mark.parametrize("name", examples())
def test_examples_in_the_reference_are_true(name: str) -> None:
    shown = json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8"))
    assert shown == json.loads(json.dumps(examples()[name]))


def test_status_shows_that_a_drill_runs() -> None:
    """Training that stands still on utility is no alarm then."""
    shown: Any = status(running_drill())
    assert shown["drill"] == {"id": "6f1d2c3b-drill-49900", "who": "root", "stage": "pause", "lasted_s": 42.0}
    assert "training_paused" not in [reason["name"] for reason in shown["reasons"]]
    assert status(scene())["drill"] is None
    after = running_drill()
    after.state = replace(after.state, drill=None)
    shown = status(after)
    assert "training_paused" in [reason["name"] for reason in shown["reasons"]], "and after it, it is one"


# --- The verbs --------------------------------------------------------------------------------------------------------


async def test_begin(path: str) -> None:
    daemon = ready()
    async with admin_server(daemon, path=path):
        code, body = await ask(path, "POST", "drill", {"scopes": ["checkpoint", "pause"]})
    (event,) = daemon.events
    assert isinstance(event, StartDrill)
    assert (event.scopes, event.witness, event.at_s) == (("checkpoint", "pause"), "simulated", NOW_S)
    assert (code, body["verb"], body["who"]) == (202, "drill", event.who)


async def test_begin_is_refused_with_the_numbers(path: str) -> None:
    daemon = ready()
    until_s = NOW_S + 60.0
    daemon.state = replace(daemon.state, maintenance=Maintenance(until_s=until_s, reason="fan", who="bob"))
    async with admin_server(daemon, path=path):
        code, body = await ask(path, "POST", "drill", {"scopes": ["full"]})
        assert (code, body["object"]) == (409, "error")
        assert "maintenance suspends" in body["error"]
        assert (await ask(path, "POST", "drill-plan", {"scopes": ["full"]}))[1]["refused"] == body["error"]
    assert daemon.events == []


@pytest.mark.parametrize(
    "body",
    [
        {"scopes": "full"},
        {"scopes": [1]},
        {"scopes": ["full"] * 6},
        {"scopes": {"full": True}},
        {"scopes": ["full"], "witness": 7},
    ],
)
async def test_a_body_that_makes_no_sense(path: str, body: object) -> None:
    daemon = ready()
    async with admin_server(daemon, path=path):
        code, answer = await ask(path, "POST", "drill", body)
    assert (code, answer["object"], daemon.events) == (400, "error", [])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "needs a scope"),
        ({"scopes": ["nonsense"]}, "scope 'nonsense'"),
        ({"scopes": ["\x1b[2J"]}, "unknown scope"),
        ({"scopes": ["full"], "witness": "magic"}, "witness 'magic'"),
        ({"scopes": ["full"], "witness": "plug"}, "takes no scope"),
    ],
)
async def test_words_that_nobody_knows(path: str, body: object, said: str) -> None:
    daemon = ready()
    async with admin_server(daemon, path=path):
        code, answer = await ask(path, "POST", "drill", body)
    assert (code, daemon.events) == (409, [])
    assert said in answer["error"]
    assert "\x1b" not in answer["error"]


async def test_stop(path: str) -> None:
    daemon = running_drill()
    async with admin_server(daemon, path=path):
        code, body = await ask(path, "POST", "drill-stop", {"reason": "enough"})
    (event,) = daemon.events
    assert isinstance(event, StopDrill)
    assert (code, body["drill"], event.reason) == (202, "6f1d2c3b-drill-49900", "enough")


async def test_there_is_nothing_to_stop(path: str) -> None:
    async with admin_server(scene(), path=path):
        assert await ask(path, "POST", "drill-stop") == (
            409,
            {"schema_version": 1, "object": "error", "error": "no drill is running"},
        )
    outage = running_drill()
    outage.state = replace(scene("on_battery").state, drill=outage.state.drill)
    async with admin_server(outage, path=path):
        code, body = await ask(path, "POST", "drill-stop")
    assert (code, outage.events) == (409, list[Event]())
    assert "a real outage" in body["error"]


async def test_anybody_may_look(path: str) -> None:
    async with admin_server(drilled(), path=path):
        code, body = await ask(path, "GET", "drill")
    assert (code, body["last"]["result"]) == (200, "passed")
