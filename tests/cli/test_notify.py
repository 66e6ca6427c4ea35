"""`powerguard notify`, and what status and doctor say of messages."""

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from powerguard.cli.doctor.checks import message_findings
from powerguard.cli.notify import TEST_S
from powerguard.cli.render import Paint
from powerguard.cli.status import describe as describe_status
from powerguard.daemon.control.admin import CONNECTION_LIMIT_S, TEST_LIMIT_S, admin_server
from powerguard.daemon.notify.targets import GRACE_S
from powerguard.daemon.observe.status import status
from powerguard.settings.notify import CommandOptions
from powerguard.settings.schema import Settings
from tests.daemon.watched import WALL_S, Watched, scene
from tests.golden import Golden

ROOT = Path(__file__).parents[2]
UPS = {"a": {"sources": [{"kind": "apcupsd", "host": "h"}]}}


@pytest.fixture
def folder() -> Iterator[Path]:
    made = tempfile.mkdtemp(dir="/tmp", prefix="pg ")
    yield Path(made)
    shutil.rmtree(made)


@dataclass(frozen=True)
class Ended:
    """How the verb ended."""

    code: int
    out: str
    err: str


async def notify(*words: str) -> Ended:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "powerguard", "notify", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    async with asyncio.timeout(60.0):
        out, err = await process.communicate()
    return Ended(process.returncode or 0, out.decode(), err.decode())


def failing() -> Watched:
    """A daemon with two targets, of which one has failed for an hour."""
    daemon = scene()
    bad = replace(
        daemon.message_targets[0],
        name="ops-chat",
        kind="apprise",
        queued=300,
        failed=9,
        since=WALL_S - 3600.0,
        answer='200 {"errcode": 310000, "errmsg": "keywords not in content"}',
    )
    daemon.message_targets = (*daemon.message_targets, bad)
    return daemon


async def test_list_and_pending(folder: Path, golden: Golden) -> None:
    """Exit 1 while a target fails; the object is the daemon's."""
    async with admin_server(scene(), path=f"{folder}/s.sock") as path:
        good = await notify("list", "--socket", path)
        result = await notify("list", "--socket", path, "--json")
    assert (good.code, good.err) == (0, "")
    assert json.loads(result.out)["targets"][0]["name"] == "ops"
    golden("notify", good.out, "good")
    async with admin_server(failing(), path=f"{folder}/s.sock") as path:
        listed = await notify("list", "--socket", path)
        pending = await notify("pending", "--socket", path)
    assert (listed.code, pending.code) == (1, 1)
    golden("notify", listed.out, "failing")
    assert pending.out.splitlines()[1].split()[-1] == "t"
    assert pending.out.splitlines()[-1].strip() == "and 300 more"


async def test_no_host_is_informed(folder: Path) -> None:
    daemon = scene()
    daemon.message_targets = ()
    async with admin_server(daemon, path=f"{folder}/s.sock") as path:
        listed = await notify("list", "--socket", path)
        tested = await notify("test", "--socket", path)
    assert (listed.code, listed.out) == (0, "no target: outages cause no message (notify.targets in the settings)\n")
    assert tested.code == 1
    assert "the settings name no target of messages" in tested.err


async def test_test_shows_each_answer(folder: Path, golden: Golden) -> None:
    """For one target or all; a name that the settings have not is refused."""
    asked: list[list[str]] = []

    async def tester(names: list[str], limit_s: float) -> Mapping[str, tuple[bool, str]]:
        asked.append(names)
        assert limit_s == TEST_LIMIT_S
        return {name: (name == "ops", "accepted" if name == "ops" else "404 no_service") for name in names}

    async with admin_server(failing(), path=f"{folder}/s.sock", tester=tester) as path:
        both = await notify("test", "--socket", path)
        one = await notify("test", "ops", "--socket", path, "--json")
        wrong = await notify("test", "opps", "--socket", path)
    assert (both.code, one.code, wrong.code) == (1, 0, 1)
    assert asked == [["ops", "ops-chat"], ["ops"]]
    golden("notify", both.out)
    assert json.loads(one.out)["results"] == [{"target": "ops", "delivered": True, "answer": "accepted"}]
    assert "opps: not a target of messages; known are ops, ops-chat" in wrong.err


def test_a_test_gives_a_slow_target_as_long_as_a_message_does() -> None:
    """With less, a mail server that takes its time would fail each test, and count as not reached after it."""
    with pytest.raises(ValidationError):
        CommandOptions(kind="command", command=["/bin/true"], limit_s=TEST_LIMIT_S + 0.1)
    assert TEST_LIMIT_S + GRACE_S < TEST_S < CONNECTION_LIMIT_S


async def test_the_daemon_is_down(folder: Path) -> None:
    ended = await notify("list", "--socket", f"{folder}/none.sock")
    assert (ended.code, ended.out) == (4, "")


def test_status_mentions_a_target_that_fails() -> None:
    """At once in a line of its own; after five minutes it reduces protection, too."""
    good = "\n".join(describe_status(json.loads(json.dumps(status(scene()))), Paint()))
    assert "messages" not in good
    bad = json.loads(json.dumps(status(failing())))
    assert "ops-chat fails for 1 h 00 m, 300 wait" in "\n".join(describe_status(bad, Paint()))
    assert [each["name"] for each in bad["reasons"] if each["name"].startswith("messages")] == ["messages_failing"]
    soon = failing()
    soon.message_targets = (replace(soon.message_targets[1], since=WALL_S - 2.0),)
    assert status(soon)["reasons"] == status(scene())["reasons"]
    lost = scene()
    lost.messages_trouble = "/var/lib/powerguard/messages.sqlite: disk full"
    assert "messages_at_risk" in json.dumps(status(lost)["reasons"])


def settings(targets: dict[str, Any]) -> Settings:
    return Settings.model_validate({"mode": "dry-run", "ups": UPS, "notify": {"targets": targets}})


def test_doctor_warns_of_what_nobody_would_hear() -> None:
    """No target; one that failed last; one that nothing was ever sent to."""
    (none,) = message_findings(settings({}), None)
    assert (none.verdict, none.name) == ("WARN", "messages")
    daemon = failing()
    daemon.message_targets = (*daemon.message_targets, replace(daemon.message_targets[0], name="new", at=None))
    some = settings({"ops": {"kind": "command", "command": ["/bin/true"]}})
    found = message_findings(some, json.loads(json.dumps(status(daemon))))
    assert [(each.name, each.verdict) for each in found] == [
        ("messages.ops", "PASS"),
        ("messages.ops-chat", "WARN"),
        ("messages.new", "WARN"),
    ]
    assert found[1].fix == "powerguard notify test ops-chat"
    assert message_findings(some, None) == []
