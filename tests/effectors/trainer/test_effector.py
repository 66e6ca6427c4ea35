"""The daemon's conduct for every answer of a trainer, against real servers: bounded, told, and never twice."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from powerguard.core.model.actions import PollNow, ResumeTrainer
from powerguard.effectors.base import EffectorError
from powerguard.effectors.trainer.options import TrainerOptions
from powerguard.effectors.trainer.peer import HungError, TrainerPeer
from powerguard.options import Secret
from tests.cli.checkpoint_sites import save as save_native
from tests.effectors.trainer_peers import (
    ALIAS,
    DIGEST,
    DURABLE,
    FOLLOW,
    RESUME,
    STATUS,
    TRIGGER,
    accepted,
    effector,
    native,
    order,
    serve,
    serve_raw,
)
from tests.peers.hurried import now_s
from tests.trainer.toy import short_folder

pytestmark = pytest.mark.hurried

TOKEN = "Stork-Kite-Nine-73"


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def llm(url: str, **more: object) -> TrainerOptions:
    return TrainerOptions.model_validate({"name": "llm", "url": url, **more})


# --- Native trainers -------------------------------------------------------------------------------------------------


async def test_native_is_followed_to_durable() -> None:
    script = {
        TRIGGER: [accepted()],
        FOLLOW: [
            native("waiting_step"),
            native("writing", step=7, paused=True, paused_step=7, eta_s=900.0, bytes_done=10, bytes_total=5000),
            DURABLE,
        ],
    }
    async with serve(script) as peer, effector(llm(peer.url, max_checkpoint_s=60.0)) as (made, published):
        detail = dict(await made.carry_out(order(30.0)))
        took_s = detail.pop("took_s")
    assert detail == {
        "native": True,
        "step": 7,
        "at_paused_step": True,
        "verified": True,
        "paused": True,
        "bytes": 5000,
        "path": "/ck/7",
        "digest": DIGEST,
    }
    assert isinstance(took_s, float)
    assert published.stages == ["waiting_step", "writing", "committed"]
    writing = published[1]
    assert (writing.eta_s, writing.bytes_done, writing.bytes_total, writing.paused) == (60.0, 10, 5000, True)
    body = peer.bodies[0]
    assert {key: body[key] for key in ("id", "reason", "after", "event")} == {
        "id": "a1",
        "reason": "on_battery",
        "after": "pause",
        "event": "o1",
    }
    assert 20.0 < float(str(body["deadline_s"])) < 30.001


@pytest.mark.parametrize(
    ("last", "verified", "at_paused_step"),
    [
        (native("committed", step=7, paused_step=7, durable=True), False, True),
        (native("committed", step=7, paused_step=7, manifest_digest=DIGEST), False, False),
        (native("committed", step=6, paused_step=7, durable=True, manifest_digest=DIGEST), True, False),
        (native("committed", step=7, durable=True, manifest_digest=DIGEST), True, False),
    ],
)
async def test_only_what_is_proven_is_reported(
    last: dict[str, object], *, verified: bool, at_paused_step: bool
) -> None:
    """No digest, not durable, of an older step, or training went on: each is told as it is."""
    async with serve({TRIGGER: [accepted()], FOLLOW: [last]}) as peer, effector(llm(peer.url)) as (made, _):
        detail = dict(await made.carry_out(order()))
    assert (detail["verified"], detail["at_paused_step"]) == (verified, at_paused_step)


@pytest.mark.parametrize("phase", ["failed", "aborted"])
async def test_a_checkpoint_that_fails_says_why(phase: str) -> None:
    script = {TRIGGER: [accepted()], FOLLOW: [native(phase, error="No space\nleft")]}
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        with pytest.raises(EffectorError, match=rf"checkpoint {phase}: No space\?left"):
            await made.carry_out(order())


async def test_a_trainer_that_was_restarted_is_asked_again_with_the_same_id() -> None:
    script = {TRIGGER: [accepted()], FOLLOW: [native("writing"), {"status": 404}, DURABLE]}
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        assert dict(await made.carry_out(order()))["verified"] is True
    assert [body["id"] for body in peer.bodies] == ["a1", "a1"]
    async with serve({TRIGGER: [accepted()]}) as peer, effector(llm(peer.url)) as (made, _):
        with pytest.raises(EffectorError, match="loses its checkpoints"):
            await made.carry_out(order())


async def test_nonsense_is_borne_five_times() -> None:
    lies = [{"body": "{"}, {"body": {"id": "a1", "phase": "writing", "eta_s": -5}}, {"status": 500}]
    async with serve({TRIGGER: [accepted()], FOLLOW: [*lies, DURABLE]}) as peer, effector(llm(peer.url)) as (made, _):
        assert dict(await made.carry_out(order()))["step"] == 7
    async with serve({TRIGGER: [accepted()], FOLLOW: [{"body": "[]"}]}) as peer, effector(llm(peer.url)) as (made, _):
        with pytest.raises(EffectorError, match="not a JSON object") as error:
            await made.carry_out(order())
    assert peer.count(FOLLOW) == 5
    assert not error.value.timed_out


async def test_one_that_never_ends_ends_before_the_deadline_and_is_not_polled_to_death() -> None:
    async with (
        serve({TRIGGER: [accepted()], FOLLOW: [native("writing")]}) as peer,
        effector(llm(peer.url)) as (made, _),
    ):
        action = order(3.0)
        with pytest.raises(EffectorError, match=r"out of time: its checkpoint is still writing") as error:
            await made.carry_out(action)
        assert now_s() < action.by_s
        assert error.value.timed_out  # so the core gives it up, and asks again in a hold that leaves enough time
    assert 2 <= peer.count(FOLLOW) <= 16


async def test_a_location_on_another_host_is_not_followed() -> None:
    """The token, and the question, go to the trainer of the settings only."""
    async with serve({FOLLOW: [DURABLE]}) as other:
        there = {"status": 202, "headers": {"Location": f"{other.url}/api/v1/checkpoints/a1"}}
        async with serve({TRIGGER: [there], FOLLOW: [DURABLE]}) as peer, effector(llm(peer.url)) as (made, _):
            assert dict(await made.carry_out(order()))["native"] is True
    assert other.asked == []


# --- Dumb trainers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 204])
async def test_any_other_2xx_may_mean_begun_and_gets_the_time_of_a_checkpoint(status: int) -> None:
    """The simplest script answers at once, and saves then."""
    async with (
        serve({TRIGGER: [{"status": status}]}) as peer,
        effector(llm(peer.url, checkpoint_s=1.5)) as (made, published),
    ):
        began_s = now_s()
        detail = dict(await made.carry_out(order()))
        assert now_s() - began_s >= 1.4
    assert (detail["native"], detail["verified"], detail["paused"], detail["at_paused_step"]) == (False,) * 4
    assert detail["confirmed"] is False
    assert peer.asked == [TRIGGER]
    assert published.stages == ["waiting"]


async def test_one_that_took_its_time_before_it_answered_is_not_waited_for_again() -> None:
    async def save(_: web.Request) -> web.Response:
        await asyncio.sleep(1.5)
        return web.Response(status=200)

    async with (
        serve({TRIGGER: [save]}) as peer,
        effector(llm(peer.url, checkpoint_s=1.5)) as (made, _),
    ):
        detail = dict(await made.carry_out(order()))
        assert float(str(detail["took_s"])) < 2.5
    assert detail["verified"] is False


async def test_one_that_answers_at_once_and_saves_then_is_done_when_its_file_is(tmp_path: Path) -> None:
    """Its 200 means begun: a host that is powered off then has a torn file."""
    parts, saved = 3, tmp_path / "ckpt_68.pt"
    saving: list[asyncio.Task[None]] = []

    async def save() -> None:
        for part in range(parts):
            with saved.open("ab") as file:
                file.write(bytes(range(256)) * 100)
            await asyncio.sleep(1.5 if part == 1 else 0.2)

    async def begin(_: web.Request) -> web.Response:
        saving.append(asyncio.get_running_loop().create_task(save()))
        return web.Response(status=200)

    (tmp_path / "ckpt_50.pt").write_bytes(b"\0" * 100)
    async with (
        serve({TRIGGER: [begin]}) as peer,
        effector(llm(peer.url, checkpoint_dir=str(tmp_path))) as (made, published),
    ):
        detail = dict(await made.carry_out(order(60.0)))
        assert saving[0].done()
    assert (detail["path"], detail["bytes"], detail["step"]) == (str(saved), parts * 25_600, 68)
    assert (detail["verified"], detail["confirmed"], detail["flushed"]) == (False, True, True)
    assert published.stages == ["waiting_folder", "flushing"]


@pytest.mark.parametrize("status", [200, pytest.param(202, marks=pytest.mark.slow)])
async def test_a_2xx_after_which_no_file_appears_is_begun_and_not_confirmed(tmp_path: Path, status: int) -> None:
    (tmp_path / "ckpt_50.pt").write_bytes(b"\0" * 100)  # just before the request, which it does not answer
    options = {"checkpoint_dir": str(tmp_path), "max_checkpoint_s": 7.0, "checkpoint_s": 1.0}
    async with serve({TRIGGER: [{"status": status}]}) as peer, effector(llm(peer.url, **options)) as (made, _):
        with pytest.raises(EffectorError, match=rf"answered {status}, but no newer .* within 7 s: started, not"):
            await made.carry_out(order(60.0))


async def test_a_dumb_one_that_wrote_where_we_can_look_is_verified(tmp_path: Path) -> None:
    async def save(_: web.Request) -> web.Response:
        save_native(tmp_path, 41)
        return web.Response(status=204)

    save_native(tmp_path, 40)
    async with serve({TRIGGER: [save]}) as peer, effector(llm(peer.url, checkpoint_dir=str(tmp_path))) as (made, _):
        detail = dict(await made.carry_out(order()))
    assert (detail["verified"], detail["step"], detail["bytes"], detail["paused"]) == (True, 41, 61440, False)


async def test_a_dumb_one_that_saves_before_it_answers_is_asked_once() -> None:
    """It answers after 3 s, longer than headers may take: a second request would make it save twice."""

    async def save(_: web.Request) -> web.Response:
        await asyncio.sleep(3.0)
        return web.Response(text="saved")

    async with serve({TRIGGER: [save]}) as peer, effector(llm(peer.url, checkpoint_s=4.0)) as (made, published):
        detail = dict(await made.carry_out(order(60.0)))
    assert detail["verified"] is False
    assert peer.count(TRIGGER) == 1
    assert published.stages == ["waiting_answer", "waiting"]


async def test_a_reload_does_not_make_it_save_twice() -> None:
    """The effector is closed while its first request waits for the answer: that goes on, and then all is closed."""
    asked = asyncio.Event()

    async def save(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(3.0)
        return web.Response(text="saved")

    async with serve({TRIGGER: [save]}) as peer, effector(llm(peer.url, checkpoint_s=4.0)) as (made, _):
        saving = asyncio.get_running_loop().create_task(made.carry_out(order(60.0)))
        await asked.wait()
        await made.close()
        await saving
        assert peer.count(TRIGGER) == 1
        assert made._watched["llm"].peer._session is None


async def test_dumb_and_asynchronous_is_watched_by_its_status() -> None:
    before = {"body": {"job": "llm", "last_committed": {"step": 5, "age_s": 100.0}}}
    now = {"body": {"job": "llm", "last_committed": {"step": 6, "age_s": 0.1, "manifest_digest": DIGEST}}}
    script = {TRIGGER: [{"status": 202}], STATUS: [before, now]}
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        detail = dict(await made.carry_out(order()))
    assert (detail["step"], detail["verified"], detail["at_paused_step"]) == (6, True, False)


async def test_dumb_and_asynchronous_is_watched_by_its_folder(tmp_path: Path) -> None:
    save_native(tmp_path, 7)
    async with (
        serve({TRIGGER: [{"status": 202}]}) as peer,
        effector(llm(peer.url, checkpoint_dir=str(tmp_path))) as (made, published),
        asyncio.TaskGroup() as group,
    ):
        task = group.create_task(made.carry_out(order(60.0)))
        while published.stages != ["waiting_folder"]:  # noqa: ASYNC110 - what was there before has been looked at by then
            await asyncio.sleep(0.02)
        await asyncio.to_thread(save_native, tmp_path, 8)
        detail = dict(await task)
    assert (detail["step"], detail["verified"], detail["bytes"]) == (8, True, 57344)
    assert published.stages == ["waiting_folder"]


async def test_dumb_and_mute_gets_the_configured_time() -> None:
    async with serve({TRIGGER: [{"status": 202}]}) as peer:
        async with effector(llm(peer.url, max_checkpoint_s=1.0)) as (made, published):
            detail = dict(await made.carry_out(order()))
        assert (detail["verified"], detail["native"]) == (False, False)
        assert published.stages == ["waiting"]
        async with effector(llm(peer.url)) as (made, _):
            with pytest.raises(EffectorError, match="out of time: its checkpoint is still waiting"):
                await made.carry_out(order(3.0))


# --- Refusals and faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [409, 423])
async def test_one_that_runs_already_is_adopted(status: int) -> None:
    script = {
        TRIGGER: [{"status": status}],
        STATUS: [{"body": {"job": "llm", "checkpoint": "earlier"}}],
        "GET /api/v1/checkpoints/earlier": [native("writing"), DURABLE],
    }
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        assert dict(await made.carry_out(order()))["verified"] is True
    assert peer.count(TRIGGER) == 1


async def test_one_that_ran_and_has_just_ended_is_asked_again() -> None:
    script = {TRIGGER: [{"status": 409}, accepted()], STATUS: [{"body": {"job": "llm"}}], FOLLOW: [DURABLE]}
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        assert dict(await made.carry_out(order()))["verified"] is True
    assert peer.count(TRIGGER) == 2


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_unknown_route_has_one_alias(status: int) -> None:
    script = {TRIGGER: [{"status": status}], ALIAS: [accepted()], FOLLOW: [DURABLE]}
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        assert dict(await made.carry_out(order()))["native"] is True
    async with serve({TRIGGER: [{"status": status}]}) as peer, effector(llm(peer.url)) as (made, _):
        with pytest.raises(EffectorError, match="has neither POST /api/v1/trigger_checkpoint nor"):
            await made.carry_out(order())
    assert peer.asked == [TRIGGER, ALIAS]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_token_is_reported_at_once(tmp_path: Path, status: int) -> None:
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    async with serve({TRIGGER: [{"status": status}]}) as peer:
        options = llm(peer.url, token=Secret(file=str(secret)))
        async with effector(options) as (made, _):
            with pytest.raises(
                EffectorError, match=rf"refuses the token \(HTTP {status}; check `token` of llm"
            ) as caught:
                await made.carry_out(order())
            assert TOKEN not in f"{caught.value!r} {made!r} {options!r}"
        assert peer.headers[0]["Authorization"] == f"Bearer {TOKEN}"
        secret.chmod(0o644)
        async with effector(options) as (made, _):
            with pytest.raises(EffectorError, match=r"`token` cannot be read: .*other users can read this secret"):
                await made.carry_out(order())
    assert peer.asked == [TRIGGER]


@pytest.mark.parametrize("token", [b"two\nlines\n", "caf\u00e9".encode()])
async def test_a_token_that_no_header_can_carry_is_reported_as_such(tmp_path: Path, token: bytes) -> None:
    """It is no fault of the trainer, which is not asked."""
    secret = tmp_path / "token"
    secret.write_bytes(token)
    secret.chmod(0o600)
    async with (
        serve({TRIGGER: [accepted()]}) as peer,
        effector(llm(peer.url, token=Secret(file=str(secret)))) as (made, _),
    ):
        with pytest.raises(EffectorError, match=r"`token` cannot be read: .*token: a token must be one line of ASCII"):
            await made.carry_out(order())
    assert peer.asked == []


async def test_a_token_on_a_disk_that_hangs_holds_nothing_up() -> None:
    """A read that does not come back ends at the limit, in one thread for all calls; the loop never waits for it."""
    released = threading.Event()
    reads: list[str] = []

    class OnHungDisk(Secret):
        def read(self) -> bytes:
            reads.append("token")
            released.wait(60.0)
            return b"late"

    given = llm("http://127.0.0.1:9").model_copy(update={"token": OnHungDisk(file="/mnt/hung/token")})
    peer = TrainerPeer(given, uids=None)
    try:
        for _ in range(2):
            answer = await peer.call("GET", "/api/v1/status", headers_s=-0.5)
            assert isinstance(answer, HungError)
            assert "`token` cannot be read, its disk hangs" in str(answer)
        async with asyncio.timeout(60):
            while not reads:  # noqa: ASYNC110 - a thread that starts late
                await asyncio.sleep(0.01)
        assert reads == ["token"]
    finally:
        released.set()
        await peer.close()


async def test_busy_is_asked_again_soon() -> None:
    """Retry-After is heeded, but never for more than a tenth of what is left."""
    busy = [{"status": 503, "headers": {"Retry-After": "3600"}}, {"status": 429, "headers": {"Retry-After": "soon"}}]
    async with (
        serve({TRIGGER: [*busy, accepted()], FOLLOW: [DURABLE]}) as peer,
        effector(llm(peer.url)) as (made, published),
    ):
        began_s = now_s()
        assert dict(await made.carry_out(order(8.0)))["verified"] is True
        assert 1.0 < now_s() - began_s < 3.0
    assert published.stages == ["busy", "committed"]
    assert [body["id"] for body in peer.bodies] == ["a1"] * 3


@pytest.mark.parametrize(
    "busy",
    [
        {"status": 503, "headers": {"Retry-After": "1"}},
        *(pytest.param({"status": status}, marks=pytest.mark.slow) for status in (429, 503)),
    ],
)
async def test_a_trainer_that_is_busy_while_it_saves_is_asked_again(busy: dict[str, object]) -> None:
    """Its endpoint is crowded and its checkpoint is under way: that is no nonsense, however often it says so."""
    script = {TRIGGER: [accepted()], FOLLOW: [*([busy] * 7), DURABLE]}
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        assert dict(await made.carry_out(order(30.0)))["verified"] is True
    assert peer.count(FOLLOW) == 8
    found = {"body": {"job": "llm", "checkpoint": "earlier"}}
    script = {
        TRIGGER: [{"status": 409}],
        STATUS: [busy, found],
        "GET /api/v1/checkpoints/earlier": [busy, DURABLE],
    }
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        assert dict(await made.carry_out(order(30.0)))["verified"] is True


async def test_one_that_stays_busy_ends_at_the_deadline() -> None:
    busy = {"status": 503, "headers": {"Retry-After": "3600"}}
    async with serve({TRIGGER: [accepted()], FOLLOW: [busy]}) as peer, effector(llm(peer.url)) as (made, _):
        with pytest.raises(EffectorError, match="out of time"):
            await made.carry_out(order(4.0))
    assert 3 <= peer.count(FOLLOW) <= 20


async def test_5xx_is_tried_four_times_with_the_same_id() -> None:
    async with serve({TRIGGER: [{"status": 500}]}) as peer, effector(llm(peer.url)) as (made, _):
        began_s = now_s()
        with pytest.raises(EffectorError, match=r"answered 500, 4 times; its earlier checkpoint remains"):
            await made.carry_out(order())
        assert 1.6 < now_s() - began_s < 4.0
    assert [body["id"] for body in peer.bodies] == ["a1"] * 4
    async with (
        serve({TRIGGER: [{"status": 502}, accepted()], FOLLOW: [DURABLE]}) as peer,
        effector(llm(peer.url)) as (made, _),
    ):
        assert dict(await made.carry_out(order()))["verified"] is True


@pytest.mark.parametrize("status", [302, 400, 422])
async def test_a_redirect_or_a_no_is_final(status: int) -> None:
    away = {"status": status, "headers": {"Location": "http://127.0.0.1:1/x"}}
    async with serve({TRIGGER: [away]}) as peer, effector(llm(peer.url)) as (made, _):
        with pytest.raises(EffectorError, match=rf"refuses the request \(HTTP {status}; expected 202\)"):
            await made.carry_out(order())
    assert peer.asked == [TRIGGER]


async def test_nobody_there_costs_no_time(folder: Path) -> None:
    """The battery is not burnt for a trainer that is gone; and the core hears of it."""
    (folder / "file").write_text("")
    for url in ("http://127.0.0.1:9", f"unix:{folder}/none.sock", f"unix:{folder}/file"):
        async with effector(llm(url)) as (made, published):
            began_s = now_s()
            with pytest.raises(EffectorError, match="no trainer listens there"):
                await made.carry_out(order())
            assert now_s() - began_s < 1.5
        assert [news.alive for news in published.seen] == [False]


async def hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    while await reader.read(1000):
        pass


async def hang_after_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{")
    await hang(reader, writer)


async def trickle_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(1000):
        writer.write(b"X-%d: y\r\n" % number)
        await writer.drain()
        await asyncio.sleep(0.05)


async def trickle_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n")
    for _ in range(1000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def gigabyte(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(1024):
        writer.write(b"100000\r\n" + b"[" * 0x100000 + b"\r\n")
        await writer.drain()


async def header_bomb(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 10_000_000 + b"\r\n\r\n")
    await writer.drain()


async def zip_bomb(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00")
    await writer.drain()


async def no_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)
    writer.write(b"\x00\xff220 smtp ready\r\n\r\n")
    await writer.drain()


async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)


MONSTERS = {
    talk.__name__: talk
    for talk in (hang, hang_after_headers, trickle_headers, trickle_body, gigabyte, header_bomb, zip_bomb, no_http, cut)
}


@pytest.mark.parametrize("name", MONSTERS)
async def test_a_monster_is_borne_within_the_deadline(name: str) -> None:
    """Whatever comes, `carry_out` answers in words before its deadline, and `look` ends in its time."""
    async with serve_raw(MONSTERS[name]) as url, effector(llm(url)) as (made, published):
        action = order(1.5)
        with contextlib.suppress(EffectorError):
            detail = dict(await made.carry_out(action))
            assert detail["verified"] is False
        assert now_s() < action.by_s
        began_s = now_s()
        await made.look()
        assert now_s() - began_s < 6.0
        assert published.seen[-1].alive, "it hangs or lies, but it is there"


async def test_a_hung_native_trainer_is_asked_again_until_it_wakes() -> None:
    """Known to be native, it has 2 s for the headers; the same id makes one checkpoint of all requests."""
    slow = asyncio.Event()

    async def stuck(_: web.Request) -> web.Response:
        await slow.wait()
        return web.Response(status=500)

    script = {STATUS: [{"body": {"job": "llm"}}], TRIGGER: [stuck, accepted()], FOLLOW: [DURABLE]}
    async with serve(script) as peer, effector(llm(peer.url)) as (made, published):
        await made.look()
        began_s = now_s()
        assert dict(await made.carry_out(order(10.0)))["verified"] is True
        assert 2.9 < now_s() - began_s < 5.0
        slow.set()
    assert published.stages == ["hung", "committed"]
    assert [body["id"] for body in peer.bodies] == ["a1", "a1"]


async def test_one_that_hangs_delays_no_other() -> None:
    async with (
        serve_raw(hang) as url,
        serve({TRIGGER: [accepted()], FOLLOW: [DURABLE]}) as good,
        effector(llm(good.url), TrainerOptions(name="hung", url=url)) as (made, _),
        asyncio.TaskGroup() as group,
    ):
        stuck = group.create_task(made.look())
        began_s = now_s()
        await made.carry_out(order())
        assert now_s() - began_s < 2.0
        assert not stuck.done()
        await stuck


# --- Going on, and other orders ---------------------------------------------------------------------------------------


def resume() -> ResumeTrainer:
    return ResumeTrainer(id="r1", by_s=now_s() + 5, trainer="llm", outage="o1")


@pytest.mark.parametrize(
    ("answers", "native_", "resumed"),
    [
        ([{"body": {"job": "llm", "step": 7}}], True, True),
        ([{"body": {"job": "llm", "step": 7, "paused": True}}], True, False),
        ([{"status": 204}], False, True),
        ([{"status": 404}], False, False),
        ([{"status": 503}, {"body": {"job": "llm"}}], True, True),
    ],
)
async def test_resume(answers: list[dict[str, object]], *, native_: bool, resumed: bool) -> None:
    async with serve({RESUME: [*answers]}) as peer, effector(llm(peer.url)) as (made, _):
        detail = dict(await made.carry_out(resume()))
    assert (detail["native"], detail["resumed"]) == (native_, resumed)


async def test_a_resume_whose_answer_is_cut_off_is_asked_again() -> None:
    """The trainer is known to answer with its status; half an answer does not say that it trains."""
    status = {"body": {"job": "llm", "step": 7, "paused": True}}
    script = {STATUS: [status], RESUME: [{"body": "{"}, {"body": "<html>"}, {"body": {"job": "llm", "step": 7}}]}
    async with serve(script) as peer, effector(llm(peer.url)) as (made, _):
        await made.look()
        detail = dict(await made.carry_out(resume()))
        assert (detail["native"], detail["resumed"], peer.count(RESUME)) == (True, True, 3)


async def test_resume_that_fails_says_what_to_do() -> None:
    async with serve({RESUME: [{"status": 500}]}) as peer, effector(llm(peer.url)) as (made, _):
        with pytest.raises(EffectorError, match=r"answered 500 .*training may still be paused"):
            await made.carry_out(resume())
    assert peer.count(RESUME) == 4
    async with effector(llm("http://127.0.0.1:9")) as (made, published):
        with pytest.raises(EffectorError, match="no trainer listens"):
            await made.carry_out(resume())
        assert not published.seen[0].alive


async def test_orders_for_others_are_refused() -> None:
    async with effector(llm("http://127.0.0.1:9")) as (made, _):
        with pytest.raises(EffectorError, match="PollNow"):
            await made.carry_out(PollNow(id="x", by_s=0.0, ups="u"))
    async with effector() as (made, _):
        with pytest.raises(EffectorError, match=r"no trainer 'llm' \(known: none\)"):
            await made.carry_out(order())


async def test_an_order_whose_time_is_over_asks_nobody() -> None:
    async with serve({TRIGGER: [accepted()]}) as peer, effector(llm(peer.url)) as (made, _):
        with pytest.raises(EffectorError, match="out of time"):
            await made.carry_out(order(-1.0))
    assert peer.asked == []


async def test_cancelled_it_lets_go_at_once() -> None:
    """The bulkhead cancels it, or the daemon stops: nothing is swallowed, no task is left behind."""
    async with serve_raw(hang) as url, effector(llm(url)) as (made, _):
        before = len(asyncio.all_tasks())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await made.carry_out(order(20.0))
        assert len([task for task in asyncio.all_tasks() if not task.done()]) <= before + 1, "the server's own task"


async def test_the_actions_id_may_be_anything() -> None:
    """The core names its actions as it likes; on the wire it becomes an id that can stand in a URL."""
    async with serve({TRIGGER: [{"status": 200}]}) as peer, effector(llm(peer.url, checkpoint_s=0.1)) as (made, _):
        await made.carry_out(order(name="boot 1/outage 2#3"))
        await made.carry_out(order(name="boot 1/outage 2#3"))
    assert peer.bodies[0]["id"] == peer.bodies[1]["id"]
    assert json.dumps(peer.bodies[0]["id"]).isascii()
