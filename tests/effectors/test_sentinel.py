"""The host's side of the sentinel: one of several is enough, no impostor counts, and nobody holds a shutdown up."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from powerguard.clock import boottime_s
from powerguard.core.model.actions import ArmPowerOn, PollNow, PowerOnMethod
from powerguard.core.model.events import OutputSource
from powerguard.daemon.wiring import methods_of
from powerguard.effectors.base import EffectorError
from powerguard.effectors.options import SentinelOptions
from powerguard.effectors.sentinel import protocol as wire
from powerguard.effectors.sentinel.effector import SentinelEffector
from powerguard.options import Secret
from powerguard.sentinel.server import Buckets
from powerguard.sentinel.store import Clocks, IntentFile, IntentTable
from powerguard.settings.load import load
from tests.peers.machine import watched
from tests.peers.redfish import make_certificate
from tests.sentinel.rig import KEYS, arm, carried_out, check, disarm, options_of, running, settings_of

DEAD = "http://127.0.0.1:9"
LIMITS_S = (0.5, 4.0, 20.0)


def host(folder: Path, *urls: str, **more: Any) -> SentinelEffector:  # noqa: ANN401
    return SentinelEffector(options_of(folder, "n1", urls, **more), feeds=("a",), boot=lambda: "boot-1")


async def failure_of(effector: SentinelEffector, action: Any) -> str:  # noqa: ANN401
    with pytest.raises(EffectorError) as caught:
        await effector.carry_out(action)
    return str(caught.value)


def arming(limit_s: float) -> ArmPowerOn:
    return arm(limit_s=limit_s)


async def fails(effector: SentinelEffector, order: Callable[[float], Any], words: str) -> None:
    """See it fail with these words: soon, or with more time where the machine is so busy that it ends first."""
    for limit_s in LIMITS_S:
        why = await failure_of(effector, order(limit_s))
        if words in why:
            return
    assert words in why


async def test_one_of_several_is_enough(tmp_path: Path) -> None:
    """All are asked at the same time; what the dead one says is told beside it. To take it back all are needed."""
    async with running(tmp_path) as rig:
        mine = rig.effector(urls=(DEAD,))
        await rig.until(lambda: bool(rig.sentinel.seen))
        for order in (check, lambda limit_s: arm(in_s=60.0, limit_s=limit_s)):
            for limit_s in LIMITS_S:
                with contextlib.suppress(EffectorError):  # a busy machine
                    detail = await carried_out(mine, order(limit_s))
                    break
            assert detail["sentinels"] == rig.url
            assert detail["failed"] == f"{DEAD}: no connection (ECONNREFUSED)"
        assert detail["in_s"] == 60.0
        intent = rig.sentinel.keeper.table.intents["n1"]
        assert (intent.outage, intent.boot_id, intent.feeds) == ("o1", "boot-1", ("a",))
        await fails(mine, lambda limit_s: disarm(limit_s=limit_s), f"not withdrawn everywhere: {DEAD}: no connection")
        assert rig.outages == {}
    await fails(host(tmp_path, DEAD), arming, f"no sentinel has stored it: {DEAD}: no connection")


async def test_armed_twice_the_later_order_counts(tmp_path: Path) -> None:
    async with running(tmp_path, pace=1.0) as rig:
        for in_s in (600.0, 60.0):
            assert (await carried_out(rig.effector(), arm(in_s=in_s)))["in_s"] == in_s
        left_s = rig.sentinel.keeper.table.intents["n1"].not_before_s - rig.sentinel.clock()
        assert 0.0 < left_s <= 60.0


async def test_without_history_whatever_a_sentinel_holds_is_withdrawn(tmp_path: Path) -> None:
    """The journal is lost, and with it the outage's name: each is asked what it holds. All are needed, as ever."""
    async with running(tmp_path) as rig:
        mine, with_dead = rig.effector(), rig.effector(urls=(DEAD,))
        assert (await carried_out(mine, disarm("")))["disarmed"] is False
        await carried_out(mine, arm())
        for _ in range(2):  # The second finds nothing at the other one any more, and may not say that it is all.
            await fails(
                with_dead, lambda limit_s: disarm("", 3.0 * limit_s), f"not withdrawn everywhere: {DEAD}: no connection"
            )
            assert rig.outages == {}
        await carried_out(mine, arm())
        assert (await carried_out(mine, disarm("")))["disarmed"] is True
        assert (await carried_out(mine, disarm()))["disarmed"] is False


class SlowCard(IntentFile):
    """An SD card that takes its time for each intent."""

    def save(self, table: IntentTable, now: Clocks) -> None:
        time.sleep(2.3 if table.intents else 0.0)
        super().save(table, now)


async def test_without_history_a_sentinel_that_was_not_heard_is_not_disarmed(tmp_path: Path) -> None:
    """It may hold an intent of another outage than those that were withdrawn."""
    states = [settings_of(tmp_path / name) for name in ("one", "two")]
    async with running(tmp_path, states[0]) as one, running(tmp_path, states[1]) as two:
        await carried_out(one.effector(), arm("o1"))
        await carried_out(two.effector(), arm("o2"))
        two.door._addresses = Buckets(0.0, 0.0)

        async def free() -> None:
            """Let it answer once the withdrawal of the first one's intent is on its way."""
            await one.until(lambda: not one.outages)
            two.door._addresses = Buckets(10.0, 60.0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(free())
            with pytest.raises(EffectorError, match="not withdrawn everywhere"):
                await carried_out(one.effector(urls=(two.url,)), disarm("", limit_s=6.0))
        assert (one.outages, two.outages) == ({}, {"n1": "o2"})
        assert (await carried_out(one.effector(urls=(two.url,)), disarm("")))["disarmed"]
        assert two.outages == {}


async def test_a_sentinel_with_a_slow_disk_is_waited_for(tmp_path: Path) -> None:
    """It waits for its disk for 3 s itself, and only then says that the intent is not stored."""
    settings = settings_of(tmp_path / "state")
    async with running(tmp_path, settings, store=SlowCard(Path(settings.state))) as rig:
        assert (await carried_out(rig.effector(), arming(30.0)))["sentinels"] == rig.url


async def test_in_dry_run_nothing_is_stored(tmp_path: Path) -> None:
    async with running(tmp_path, pace=1.0) as rig:
        mine = rig.effector(armed=False)
        await rig.until(lambda: bool(rig.sentinel.seen))
        assert await carried_out(mine, check()) == {"sentinels": rig.url}
        assert await carried_out(mine, arm()) == await carried_out(mine, disarm()) == {"dry_run": True}
        assert rig.outages == {}


async def test_what_would_block_is_reported_beforehand(tmp_path: Path) -> None:
    """The check says what the sentinel sees: its words are what the operator reads. A battery is no obstacle to it."""
    async with running(tmp_path, settings_of(tmp_path / "state", silent_s=600.0)) as rig:
        await rig.until(lambda: bool(rig.sentinel.seen))
        await rig.until(lambda: rig.sentinel.world().supplies["a"].good)
        rig.supplies["a"].source = OutputSource.BATTERY
        assert await carried_out(rig.effector(), check()) == {"sentinels": rig.url}
        rig.supplies["a"].source = None
        await rig.until(lambda: "not read" in rig.sentinel.world().supplies["a"].why)
        assert "UPS a: not read for" in await failure_of(rig.effector(), check())
        elsewhere = SentinelEffector(options_of(tmp_path, "n1", (rig.url,)), feeds=("a", "b"))
        for action in (check(), arm()):
            assert "the host is fed by a, b; here its feeds are a" in await failure_of(elsewhere, action)
    silent = {"n1": type(rig.chassis["n1"])(why="BMC 10.0.0.1: no answer to the login")}
    async with running(tmp_path, settings_of(tmp_path / "state"), chassis=silent) as rig:
        assert "has not polled the BMC yet" in await failure_of(
            rig.effector(), check()
        ) or "no answer to the login" in await failure_of(rig.effector(), check())
        await rig.until(lambda: bool(rig.sentinel.seen))
        assert "BMC 10.0.0.1: no answer to the login" in await failure_of(rig.effector(), check())


async def test_a_wrong_key_or_name_says_what_would_be_right(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for more in ({"key": b"x" * 64}, {"name": "n7"}):
            options = options_of(tmp_path, "n1", (rig.url,), **{k: v for k, v in more.items() if k == "key"})
            mine = SentinelEffector(options.model_copy(update=more if "name" in more else {}), feeds=("a",))
            why = await failure_of(mine, arm())
            assert "refuses this host: sentinel.name and sentinel.key must be the same as in its settings" in why
        assert rig.outages == {}


async def test_a_key_that_cannot_be_used(tmp_path: Path) -> None:
    assert "10 bytes are too few, 32 are needed" in await failure_of(host(tmp_path, DEAD, key=b"0123456789"), arm())
    gone = SentinelOptions(kind="http", urls=[DEAD], key=Secret(file="/nowhere/key"), name="n1")
    why = await failure_of(SentinelEffector(gone, feeds=("a",)), check())
    assert "sentinel.key: /nowhere/key: No such file" in why
    missing = options_of(tmp_path, "n1", ("https://127.0.0.1:9",), ca=str(tmp_path / "none.pem"))
    assert "cannot be read as certificates" in await failure_of(SentinelEffector(missing, feeds=("a",)), arm())


# --- Who only looks like one ---------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def impostor(handler: Handler) -> AsyncIterator[str]:
    """Listens where the sentinel should, and gives challenges like one."""

    async def challenge(_: web.Request) -> web.Response:
        return web.json_response({"challenge": "c" * 43})

    app = web.Application()
    app.router.add_get(wire.CHALLENGE_PATH, challenge)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


STORED = {"object": "stored", "outage": "o1", "in_s": 0, "mode": "armed", "blocked": []}


async def test_an_answer_without_our_key_does_not_count(tmp_path: Path) -> None:
    """Plain HTTP, somebody else answers "stored": unsigned, signed with another key, or with an old answer of ours."""
    signatures: list[str | None] = [None, "0" * 64]

    async def says_stored(request: web.Request) -> web.Response:
        headers = {} if signatures[0] is None else {wire.SIGNATURE: signatures[0]}
        return web.json_response(STORED, headers=headers)

    async with impostor(says_stored) as url:
        old = wire.sign_answer(KEYS["n1"], wire.sign_request(KEYS["n1"], "/v1/store", b"old"), 200, b"{}")
        for signature in (None, "0" * 64, "\xe9" * 3, old):
            signatures[0] = signature
            await fails(host(tmp_path, url), arming, "its answer is not signed with our key")
        for order in (check, lambda limit_s: disarm(limit_s=limit_s)):
            await fails(host(tmp_path, url), order, "is not signed with our key")


@pytest.mark.parametrize("kind", ["hangs", "half", "huge", "redirects", "not http"])
async def test_a_peer_that_misbehaves_ends_in_time(tmp_path: Path, kind: str) -> None:
    never = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        match kind:
            case "hangs":
                await never.wait()
            case "half":
                response.content_length = 100
                await response.prepare(request)
                await response.write(b"{")
                await never.wait()
            case "huge":
                return web.Response(body=b"x" * 300_000)
            case "redirects":
                return web.Response(status=302, headers={"Location": "/v1/elsewhere"})
        return response

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00" * 200 + b"\r\n\r\n")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with impostor(answer) as theirs, await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        url = theirs if kind != "not http" else f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for limit_s in LIMITS_S:
            async with watched() as machine:
                began_s = time.monotonic()
                why = await failure_of(host(tmp_path, url), arming(limit_s))
                assert time.monotonic() - began_s < limit_s + 4.0 + machine.late_s
            if "no sentinel has stored it" in why:
                break
        never.set()
        assert "no sentinel has stored it" in why


async def test_a_black_hole_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    """A listener that never accepts: its backlog takes the connection, and then nothing comes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await fails(host(tmp_path, url), arming, f"{url}: no answer")


async def test_it_is_cancelled_like_any_other(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        mine = host(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await mine.carry_out(arm(limit_s=60.0))


# --- TLS -----------------------------------------------------------------------------------------------------------


async def test_https_by_authority_and_by_pin(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certificate, other = make_certificate(tmp_path), make_certificate(tmp_path / "other")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate.cert, certificate.key)
    async with running(tmp_path, tls=tls) as rig:
        for more in ({"ca": str(certificate.cert)}, {"fingerprint": certificate.sha256}):
            assert (await carried_out(rig.effector(**more), arm(in_s=60.0)))["sentinels"] == rig.url
        await carried_out(rig.effector(ca=str(certificate.cert)), disarm())
        for more, why in (
            ({}, "its certificate does not verify"),
            ({"ca": str(other.cert)}, "its certificate does not verify"),
            ({"fingerprint": other.sha256}, f"fingerprint, but sha256 {certificate.sha256}"),
        ):
            await fails(rig.effector(**more), arming, why)
        assert rig.outages == {}
    async with running(tmp_path) as rig:
        await fails(host(tmp_path, rig.url.replace("http:", "https:")), arming, "does not speak TLS")


async def test_a_renewed_authority_needs_no_restart(tmp_path: Path) -> None:
    """The file of sentinel.ca is another one since the daemon's start: after a failure it is read again."""
    (tmp_path / "old").mkdir()
    old, renewed, authority = make_certificate(tmp_path / "old"), make_certificate(tmp_path), tmp_path / "ca.pem"
    authority.write_bytes(old.cert.read_bytes())
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(renewed.cert, renewed.key)
    async with running(tmp_path, tls=tls) as rig:
        mine = rig.effector(ca=str(authority))
        await fails(mine, arming, "its certificate does not verify")
        authority.write_bytes(renewed.cert.read_bytes())
        assert (await carried_out(mine, arming(60.0)))["sentinels"] == rig.url


# --- Settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kind": "http"}, "kind http needs urls and key"),
        ({"kind": "none", "urls": ["https://a:1"]}, "kind none "),
        ({"urls": ["http://10.0.0.2:13494"]}, "http:// is not encrypted"),
        ({"urls": ["https://10.0.0.2"]}, "needs an address and a port"),
        ({"urls": ["https://10.0.0.2:99999"]}, "needs an address and a port"),
        ({"urls": ["https://u:p@10.0.0.2:1"]}, "should match pattern"),
        ({"urls": ["https://10.0.0.2:1/x"]}, "should match pattern"),
        ({"urls": ["https://a:1", "https://a:1"]}, "the same sentinel twice"),
        ({"ca": "/a", "fingerprint": "0" * 64}, "not both"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], why: str) -> None:
    base = {"kind": "http", "urls": ["https://10.0.0.2:13494"], "key": Secret(credential="s")}
    if "kind" in options:
        base = {}
    with pytest.raises(ValidationError, match=why):
        SentinelOptions(**{**base, **options})


def test_plain_http_must_be_said_and_loopback_needs_not() -> None:
    key = Secret(credential="s")
    for more in ({"urls": ["http://10.0.0.2:13494"], "plain_http": True}, {"urls": ["http://[::1]:13494"]}):
        assert SentinelOptions(kind="http", key=key, **more).urls == more["urls"]


@pytest.mark.parametrize("armed", [True, False])
async def test_the_daemon_has_one_where_the_settings_name_one(tmp_path: Path, armed: bool) -> None:
    """By the settings' own words, with the feeds of this host and no other UPS."""
    async with running(tmp_path, settings_of(tmp_path / "state", ups=("rack-a", "rack-b"))) as rig:
        options_of(tmp_path, "n1", (rig.url,))
        path = tmp_path / "powerguard.yaml"
        source = "{sources: [{kind: nut, host: 127.0.0.1, name: x, port: %d}]}"
        path.write_text(
            f"mode: armed\nups: {{rack-a: {source % 1}, rack-b: {source % 2}, other: {source % 3}}}\n"
            "feeds: {supplies: [rack-b, rack-a, rack-b]}\n"
            f"sentinel: {{kind: http, urls: ['{rig.url}'], key: {{file: {tmp_path}/key-n1}}, name: n1}}\n"
        )
        methods = methods_of(load(path), clock=boottime_s, wall=time.time, boot="boot-7", armed=armed)
        assert set(methods) == {PowerOnMethod.SENTINEL}
        detail = dict(await methods[PowerOnMethod.SENTINEL].carry_out(arm(in_s=60.0)))
        assert detail == ({"in_s": 60.0, "sentinels": rig.url} if armed else {"dry_run": True})
        held = rig.sentinel.keeper.table.intents.get("n1")
        assert (held.boot_id, held.feeds) == ("boot-7", ("rack-a", "rack-b")) if held is not None else not armed


async def test_other_orders_are_not_its_own(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not PollNow"):
        await host(tmp_path, DEAD).carry_out(PollNow(id="p", by_s=0.0, ups="a"))
