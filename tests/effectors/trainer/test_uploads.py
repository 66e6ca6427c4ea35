"""Copies to slower storage wait while the battery lasts; what trainers say of where they save is flushed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from powerguard.core.model.actions import Grade, SyncFilesystems
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import EmergencyCheckpoint, Holding, OnBattery, Online, Outage, State
from powerguard.daemon.wiring import Ports, build, is_past_dwell
from powerguard.effectors.host.filesystems import SyncEffector
from powerguard.effectors.trainer.effector import LEASE_S, RENEW_S, TrainerEffector
from powerguard.effectors.trainer.options import TrainerOptions
from powerguard.settings.schema import Settings
from tests.effectors.trainer_peers import RESUME, STATUS, TRIGGER, accepted, effector, serve
from tests.peers.hurried import now_s
from tests.trainer.toy import short_folder

pytestmark = pytest.mark.hurried

HOLD = "POST /api/v1/hold_uploads"
NATIVE: dict[str, Any] = {"body": {"job": "llm", "step": 3}}


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def llm(url: str, name: str = "llm") -> TrainerOptions:
    return TrainerOptions.model_validate({"name": name, "url": url})


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_uploads_are_held_renewed_and_let_go() -> None:
    """Never by `resume`: somebody else may have paused the training for a reason of his own."""
    clock = Clock()
    async with serve({STATUS: [NATIVE], HOLD: [NATIVE]}) as peer:
        made = TrainerEffector([llm(peer.url)], clock=clock, publish=lambda _: None)
        await made.look()
        await made.uploads.turn(wanted=False)
        assert peer.count(HOLD) == 0
        for _ in range(3):
            await made.uploads.turn(wanted=True)
        assert peer.count(HOLD) == 1
        clock.now_s += RENEW_S
        await made.uploads.turn(wanted=True)
        assert peer.count(HOLD) == 2
        for _ in range(3):
            await made.uploads.turn(wanted=False)
        assert [body["lease_s"] for body in peer.bodies] == [LEASE_S, LEASE_S, 0.0]
        assert peer.count(RESUME) == 0
        await made.close()
    assert LEASE_S > 2 * RENEW_S


async def test_one_without_such_a_call_is_asked_once() -> None:
    clock = Clock()
    async with serve({STATUS: [NATIVE]}) as peer:
        made = TrainerEffector([llm(peer.url)], clock=clock, publish=lambda _: None)
        await made.look()
        for _ in range(4):
            await made.uploads.turn(wanted=True)
            clock.now_s += RENEW_S
        assert peer.count(HOLD) == 1
        await made.close()


async def test_a_stranger_is_not_asked() -> None:
    """What has never said that it is native has no uploads of ours."""
    async with serve({STATUS: [{"status": 404}], TRIGGER: [accepted()]}) as peer:
        made = TrainerEffector([llm(peer.url)], clock=Clock(), publish=lambda _: None)
        await made.look()
        await made.uploads.turn(wanted=True)
        assert peer.count(HOLD) == 0
        await made.close()


async def hang(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def test_one_that_does_not_answer_is_asked_again_at_the_next_turn() -> None:
    """Else its uploads would take the disk and the network for half a minute of the outage."""
    async with serve({STATUS: [NATIVE], HOLD: [hang, NATIVE]}) as peer, effector(llm(peer.url)) as (made, _):
        await made.look()
        for _ in range(3):
            await made.uploads.turn(wanted=True)
        assert peer.count(HOLD) == 2


async def test_one_that_hangs_holds_up_nobody_and_is_reported_later() -> None:
    async with (
        serve({STATUS: [NATIVE], HOLD: [NATIVE, hang, NATIVE]}) as slow,
        serve({STATUS: [NATIVE], HOLD: [NATIVE]}) as quick,
        effector(llm(slow.url, "slow"), llm(quick.url, "quick")) as (made, _),
    ):
        await made.look()
        await made.uploads.turn(wanted=True)
        await made.uploads.turn(wanted=False)  # slow does not answer
        assert [quick.count(HOLD), slow.count(HOLD)] == [2, 2]
        await made.uploads.turn(wanted=False)
        assert [quick.count(HOLD), slow.count(HOLD)] == [2, 3]


async def test_a_busy_one_is_reported_at_the_next_look() -> None:
    busy = {"status": 503, "headers": {"Retry-After": "1"}}
    async with serve({STATUS: [NATIVE], HOLD: [busy, NATIVE, busy, NATIVE]}) as peer:
        async with effector(llm(peer.url)) as (made, _):
            await made.look()
            for wanted in (True, True, False, False, False):
                await made.uploads.turn(wanted=wanted)
        assert [body["lease_s"] for body in peer.bodies] == [LEASE_S, LEASE_S, 0.0, 0.0]


async def test_one_that_is_gone_is_forgotten() -> None:
    async with serve({STATUS: [NATIVE], HOLD: [NATIVE]}) as peer:
        made = TrainerEffector([llm(peer.url)], clock=Clock(), publish=lambda _: None)
        await made.look()
        await made.uploads.turn(wanted=True)
    await made.uploads.turn(wanted=False)
    await made.uploads.turn(wanted=False)
    assert made.uploads._renew_at_s == {}
    await made.close()


async def test_keeping_follows_what_is_wanted() -> None:
    wishes = iter([False, True, True, False])

    async def rest(_: float) -> None:
        await asyncio.sleep(0)

    async with serve({STATUS: [NATIVE], HOLD: [NATIVE]}) as peer:
        made = TrainerEffector([llm(peer.url)], clock=Clock(), publish=lambda _: None)
        await made.look()
        with pytest.raises(RuntimeError, match="StopIteration"):
            await made.uploads.keep(lambda: next(wishes), rest)
        assert [body["lease_s"] for body in peer.bodies] == [LEASE_S, 0.0]
        await made.close()


def test_from_the_end_of_the_dwell_to_the_end_of_the_outage() -> None:
    outage = Outage(id="o", since_s=100.0, grade=Grade.FULL)
    policy = Policy(boot_id="b", ups="u")
    on_battery = State(phase=OnBattery(outage=outage))
    assert not is_past_dwell(policy, on_battery, 100.0 + policy.pause_dwell_s - 0.1)
    assert is_past_dwell(policy, on_battery, 100.0 + policy.pause_dwell_s)
    for phase in (EmergencyCheckpoint(outage=outage, began_s=101.0, because="x"), Holding(outage=outage, began_s=1.0)):
        assert is_past_dwell(policy, State(phase=phase), 101.0)
    assert not is_past_dwell(policy, State(phase=Online()), 500.0)


# --- Where trainers save ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "folders"),
    [
        ({"step": 3, "age_s": 1.0, "path": "/nvme/llm/step-000000000003-0123abcd"}, ("/nvme/llm",)),
        ({"step": 3, "age_s": 1.0, "path": "/nvme/../etc/x"}, ("/etc",)),
        ({"step": 3, "age_s": 1.0, "path": "s3://bucket/llm"}, ()),
        ({"step": 3, "age_s": 1.0, "path": "/nas/x", "tier": "remote"}, ()),
        ({"step": 3, "age_s": 1.0}, ()),
        (None, ()),
    ],
)
async def test_a_trainer_reports_where_it_saves(folder: Path, last: object, folders: tuple[str, ...]) -> None:
    body = {"job": "llm", "last_committed": last}
    async with (
        serve({STATUS: [{"body": body}]}, path=folder / "llm.sock") as peer,
        effector(llm(peer.url)) as (made, _),
    ):
        await made.look()
        assert made.folders() == folders


async def test_what_trainers_reported_is_flushed_too(tmp_path: Path) -> None:
    """Before the power goes: the settings need not know where every job saves."""
    found: list[str] = []
    sync = SyncEffector([], reported_paths=lambda: found, clock=now_s)
    order = SyncFilesystems(id="s", by_s=now_s() + 60.0, outage="o")
    assert dict(await sync.carry_out(order)) == {"filesystems": 0, "paths": ""}
    found.append(str(tmp_path))
    assert dict(await sync.carry_out(order)) == {"filesystems": 1, "paths": str(tmp_path)}


@pytest.mark.parametrize(("dry_run", "watchers"), [(False, {"trainers", "uploads"}), (True, {"trainers"})])
def test_only_an_armed_daemon_holds_uploads(*, dry_run: bool, watchers: set[str]) -> None:
    """In dry-run nobody is asked for anything."""
    given = {"mode": "armed", "ups": {"a": {"sources": [{"kind": "nut", "host": "127.0.0.1", "name": "a"}]}}}
    settings = Settings.model_validate(given)
    parts = build(settings, Ports(sources=lambda *_: []), lambda _: None, dry_run=dry_run)
    assert watchers <= set(parts.watchers)
    assert dry_run == ("uploads" not in parts.watchers)
