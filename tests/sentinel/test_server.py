"""What strangers, old words and floods can do to a sentinel: nothing; and they learn nothing."""

import asyncio
import contextlib
import json
import re
import secrets
import socket
import ssl
import threading
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from powerguard.clock import boottime_s
from powerguard.daemon.observe.http import neighbours
from powerguard.effectors.sentinel import protocol as wire
from powerguard.sentinel.decide import Intent
from powerguard.sentinel.server import MAX_ADDRESSES, MAX_CONNECTIONS, MAX_CONNECTIONS_EACH, MAX_STRANGERS, Buckets
from powerguard.sentinel.store import Clocks, IntentFile, IntentStore, IntentTable
from tests.peers import require
from tests.peers.machine import folder_in_memory
from tests.peers.redfish import make_certificate
from tests.sentinel.rig import KEYS, Rig, arm, carried_out, disarm, running, settings_of

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
INTENT = Intent(host="n1", outage="o1", boot_id="b1", feeds=("a",), stored_s=0.0, not_before_s=0.0, expires_s=1e6)
STORE = {"feeds": ("a",), "outage": "o1", "boot_id": "b1", "in_s": 30.0, "valid_s": 3600.0}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Where intents are written down: the sentinel waits for its disk for 3 s, which a busy one may take."""
    with folder_in_memory() as folder:
        yield folder


class Client:
    """Says what a host says, and what one should not say. Without limits or patience of its own."""

    def __init__(self, rig: Rig, session: aiohttp.ClientSession) -> None:
        self.url = rig.url
        self.session = session

    async def challenge(self) -> str:
        async with self.session.get(f"{self.url}{wire.CHALLENGE_PATH}") as answer:
            return str((await answer.json())["challenge"])

    async def post(self, path: str, body: bytes, signature: str = "") -> tuple[int, dict[str, Any], dict[str, str]]:
        headers = {wire.SIGNATURE: signature} if signature else {}
        async with self.session.post(f"{self.url}{path}", data=body, headers=headers) as answer:
            return answer.status, await answer.json(), dict(answer.headers)

    async def say(self, kind: str, *, host: str = "n1", key: bytes = KEYS["n1"], **asked: Any) -> int:  # noqa: ANN401
        body = await self.body(kind, host=host, **asked)
        return (await self.post(wire.PATHS[kind], body, wire.sign_request(key, wire.PATHS[kind], body)))[0]

    async def body(self, kind: str, *, host: str = "n1", **asked: Any) -> bytes:  # noqa: ANN401
        challenge = asked.pop("challenge", None) or await self.challenge()
        given = {**STORE, **asked}
        return wire.encode(kind, wire.Request(challenge=challenge, nonce=secrets.token_hex(16), host=host, **given))


async def test_a_word_counts_once(tmp_path: Path) -> None:
    """Replayed as it was, with another path, after a restart of the sentinel: never again."""
    path = wire.PATHS["store"]
    async with aiohttp.ClientSession() as session:
        async with running(tmp_path) as rig:
            client = Client(rig, session)
            body = await client.body("store")
            signature = wire.sign_request(KEYS["n1"], path, body)
            status, answer, headers = await client.post(path, body, signature)
            assert (status, answer["object"], answer["outage"]) == (200, "stored", "o1")
            raw = json.dumps(answer).encode()
            assert wire.is_signed(wire.sign_answer(KEYS["n1"], signature, 200, raw), headers[wire.SIGNATURE])
            await carried_out(rig.effector(), disarm())
            assert rig.outages == {}
            assert (await client.post(path, body, signature))[0] == 401
            assert (await client.post(wire.PATHS["withdraw"], body, signature))[0] == 400
            kept = await client.body("store")
        async with running(tmp_path) as rig:
            client = Client(rig, session)
            assert (await client.post(path, kept, wire.sign_request(KEYS["n1"], path, kept)))[0] == 401
            assert rig.outages == {}


async def test_who_has_no_key_learns_nothing(tmp_path: Path) -> None:
    """Wrong key, no key, unknown host, old or made-up question: the same status, the same bytes."""
    settings = settings_of(tmp_path / "state", hosts=("n1", "n2"))
    async with running(tmp_path, settings) as rig, aiohttp.ClientSession() as session:
        client = Client(rig, session)
        path = wire.PATHS["store"]
        answers = []
        for host, key, challenge in (
            ("n1", b"x" * 64, None),
            ("n1", KEYS["n2"], None),
            ("n9", KEYS["n1"], None),
            ("n1", KEYS["n1"], "A" * 43),
            ("n1", KEYS["n1"], wire.Challenges(b"z" * 32).make(0.0, b"saltsalt")),
        ):
            body = await client.body("store", host=host, challenge=challenge)
            status, answer, headers = await client.post(path, body, wire.sign_request(key, path, body))
            answers.append((status, answer, wire.SIGNATURE in headers))
        answers.append((*(await client.post(path, await client.body("store")))[:2], False))
        assert answers == [(401, {"schema_version": 1, "object": "error", "error": "not accepted"}, False)] * 6
        assert (rig.outages, rig.door.counts["refused"]) == ({}, 6)


async def test_each_host_speaks_for_itself(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "state", hosts=("n1", "n2"))
    async with running(tmp_path, settings) as rig, aiohttp.ClientSession() as session:
        client = Client(rig, session)
        await carried_out(rig.effector("n2"), arm("o2", in_s=60.0))
        assert await client.say("withdraw", host="n2", key=KEYS["n1"], outage="o2") == 401
        assert await client.say("withdraw", host="n1", key=KEYS["n1"], outage="o2") == 200
        assert rig.outages == {"n2": "o2"}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff" * 100, b"[" * 4000, b'{"schema_version": 1}', b"x" * 4097, b"\x00" * 50_000]
)
async def test_garbage_is_refused(tmp_path: Path, body: bytes) -> None:
    async with running(tmp_path) as rig, aiohttp.ClientSession() as session:
        client = Client(rig, session)
        for path in wire.PATHS.values():
            status, answer, _ = await client.post(path, body, "0" * 64)
            assert (status, answer["object"]) == (413 if len(body) > 4096 else 400, "error")
        async with session.post(f"{rig.url}/v1/challenge") as answer, session.get(f"{rig.url}/v1/store") as other:
            assert (answer.status, other.status) == (405, 405)


def stop_clock(rig: Rig) -> None:
    """Stop the clock that lets requests through: a slow machine may be no quicker than the rate that is allowed."""
    now_s = boottime_s()
    rig.door._clock = lambda: now_s


async def test_a_flood_is_cut_off_and_costs_nothing(tmp_path: Path) -> None:
    """A thousand strangers' questions: most are told to go away, nothing is kept, the disk is left alone."""
    async with running(tmp_path, pace=1.0) as rig, aiohttp.ClientSession() as session:
        client = Client(rig, session)
        await carried_out(rig.effector(), arm(in_s=600.0))
        stop_clock(rig)
        written_s = (Path(rig.settings.state) / "intents.json").stat().st_mtime_ns
        statuses = [(await client.post(wire.PATHS["store"], b"{}"))[0] for _ in range(200)]
        assert {400, 429} == set(statuses)
        assert statuses.count(429) > 100
        assert rig.door._challenges._used.keys().__len__() <= 1
        assert (Path(rig.settings.state) / "intents.json").stat().st_mtime_ns == written_s
        assert rig.outages == {"n1": "o1"}


async def test_one_address_keeps_nobody_out(tmp_path: Path) -> None:
    """As many connections as it likes, each silent: it gets its share, and another address is served."""
    async with running(tmp_path) as rig, aiohttp.ClientSession() as session:
        held = [
            await asyncio.open_connection("127.0.0.1", rig.port, local_addr=("127.0.0.2", 0))
            for _ in range(MAX_CONNECTIONS_EACH + 10)
        ]
        try:
            async with asyncio.timeout(60):
                assert await held[0][0].read() == b"", "the oldest makes room"
            assert await Client(rig, session).say("hello") == 200
        finally:
            for _, writer in held:
                writer.transport.abort()


@pytest.mark.parametrize("shakes", [False, True])
async def test_silent_connections_of_many_addresses_keep_nobody_out(tmp_path: Path, *, shakes: bool) -> None:
    """All that the server takes, from sixteen addresses, after the handshake if there is one: a host is served."""
    certificate = make_certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate.cert, certificate.key)
    theirs = ssl.create_default_context(cafile=str(certificate.cert))
    theirs.check_hostname = False
    async with running(tmp_path, tls=tls if shakes else None) as rig:
        held = [
            await asyncio.open_connection(
                "127.0.0.1", rig.port, local_addr=(f"127.0.1.{1 + number % 16}", 0), ssl=theirs if shakes else None
            )
            for number in range(MAX_CONNECTIONS + 20)
        ]
        try:
            seal = {"fingerprint": certificate.sha256} if shakes else {}
            assert (await carried_out(rig.effector(**seal), arm(in_s=600.0)))["sentinels"] == rig.url
            assert rig.outages == {"n1": "o1"}
        finally:
            for _, writer in held:
                writer.transport.abort()


def test_connections_count_by_the_network_that_one_machine_may_have() -> None:
    """A machine with IPv6 has more addresses than the server has connections."""
    assert neighbours("2001:db8::1") == neighbours("2001:db8::ffff:1") != neighbours("2001:db8:0:1::1")
    assert neighbours("fe80::1%eth0") == neighbours("fe80::2%eth0")
    assert neighbours("192.0.2.1") != neighbours("192.0.2.2")


async def test_who_never_shakes_hands_keeps_nobody_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """TLS: two hundred that say nothing, or rubbish: a host is served beside them, and soon they are gone."""
    certificate = make_certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate.cert, certificate.key)
    async with running(tmp_path, tls=tls) as rig:
        held = [await asyncio.open_connection("127.0.0.1", rig.port) for _ in range(200)]
        try:
            for _, writer in held[::2]:
                writer.write(b"GET / HTTP/1.1\r\n\r\n" * 50)
            detail = await carried_out(rig.effector(fingerprint=certificate.sha256), arm(in_s=600.0))
            assert detail["sentinels"] == rig.url
            async with asyncio.timeout(60):
                for reader, _ in held:
                    with contextlib.suppress(ConnectionResetError):
                        while await reader.read(4096):
                            pass
        finally:
            for _, writer in held:
                writer.transport.abort()
    assert "Traceback" not in caplog.text


async def test_a_flood_before_the_handshake_leaves_descriptors_and_a_host_gets_through(tmp_path: Path) -> None:
    """A thousand connections from another address that say nothing: asyncio shows none of them before the handshake."""
    certificate = make_certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate.cert, certificate.key)
    async with running(tmp_path, tls=tls) as rig:
        before = descriptors()
        held: list[socket.socket] = []
        try:
            for number in range(1000):
                sock = socket.socket()
                sock.bind((f"127.0.0.{9 + number % 2}", 0))
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", rig.port))
                held.append(sock)
                if number % 50 == 49:
                    await asyncio.sleep(0.01)
            detail = await carried_out(rig.effector(fingerprint=certificate.sha256), arm(in_s=600.0))
            assert detail["sentinels"] == rig.url
            theirs = descriptors() - before - len(held)
            assert theirs <= MAX_STRANGERS, f"the sentinel holds {theirs} descriptors for strangers"
        finally:
            for sock in held:
                sock.close()


def descriptors() -> int:
    """Return how many file descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def own_address() -> str:
    """Return an address of this machine that is not loopback; "" where it has none. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737)
        except OSError:
            return ""
        return str(probe.getsockname()[0])


async def test_metrics_are_for_the_sentinels_own_machine(tmp_path: Path) -> None:
    """They name hosts and UPSes. A question from another address than the one that it was sent to is refused."""
    elsewhere = own_address()
    if not elsewhere or elsewhere.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    connector = aiohttp.TCPConnector(local_addr=(elsewhere, 0))
    async with running(tmp_path, pace=1.0) as rig, aiohttp.ClientSession(connector=connector) as session:
        async with session.get(f"{rig.url}/metrics") as answer:
            assert (answer.status, (await answer.json())["object"]) == (403, "error")
        async with session.get(f"{rig.url}/healthz") as answer:
            assert answer.status == 200


async def test_a_host_that_runs_wild_is_slowed_down(tmp_path: Path) -> None:
    async with running(tmp_path, pace=1.0) as rig, aiohttp.ClientSession() as session:
        client = Client(rig, session)
        stop_clock(rig)
        statuses = [await client.say("hello") for _ in range(25)]
        assert (statuses[0], statuses[-1]) == (200, 429)


def test_buckets_are_bounded() -> None:
    buckets = Buckets(1.0, 2.0)
    assert [buckets.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert buckets.take("a", 1.5)
    for number in range(3 * MAX_ADDRESSES):
        buckets.take(str(number), 2.0)
    assert len(buckets._left) == MAX_ADDRESSES


def test_a_name_that_asks_too_often_passes_at_its_rate() -> None:
    """Hosts behind one router share an address: those that are turned away ask again at once, and must get through."""
    buckets = Buckets(10.0, 60.0)
    assert sum(buckets.take("a", number * 0.02) for number in range(1, 501)) >= 60 + 90


async def test_hosts_behind_one_router_all_get_through(tmp_path: Path) -> None:
    """They ask in the same second, from one address, and ask again until their deadline."""
    hosts = tuple(f"h{number}" for number in range(60))
    settings = settings_of(tmp_path / "state", hosts=hosts)
    async with running(tmp_path, settings, pace=1.0) as rig, asyncio.TaskGroup() as tasks:
        for host in hosts:
            tasks.create_task(carried_out(rig.effector(host), arm(limit_s=20.0)))
    assert set(rig.outages) == set(hosts)


async def test_metrics_and_health_are_everybodys(tmp_path: Path) -> None:
    async with running(tmp_path, pace=1.0) as rig, aiohttp.ClientSession() as session:
        await carried_out(rig.effector(), arm(in_s=600.0))
        async with session.get(f"{rig.url}/metrics") as answer:
            text = await answer.text()
        assert 'powerguard_sentinel_intent{host="n1"} 1.0' in text
        assert 'powerguard_sentinel_requests_total{answer="store"} 1.0' in text
        assert "o1" not in text, "no outage in any label"
        named = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
        page = (REFERENCE / "sentinel.md").read_text(encoding="utf-8")
        assert named == set(re.findall(r"^- `(powerguard_sentinel_\w+)`", page, re.MULTILINE))
        async with session.get(f"{rig.url}/healthz") as answer:
            told_alive = await answer.json()
            assert (answer.status, told_alive["alive"]) == (200, True)
            assert list(told_alive) == list(json.loads((REFERENCE / "sentinel-healthz.json").read_text()))
        async with asyncio.timeout(30.0):  # its own next turn, every second, makes it alive again
            while answer.status != 503:
                rig.sentinel.turned_s -= 10_000.0
                async with session.get(f"{rig.url}/healthz") as answer:
                    pass


@pytest.mark.peer("promtool")
async def test_promtool_has_nothing_to_say(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as rig,
        aiohttp.ClientSession() as session,
        session.get(f"{rig.url}/metrics") as answer,
    ):
        text = await answer.read()
    linter = await asyncio.create_subprocess_exec(
        require("promtool"), "check", "metrics", stdin=PIPE, stdout=PIPE, stderr=STDOUT
    )
    said, _ = await linter.communicate(text)
    assert (linter.returncode, said) == (0, b"")


# --- The disk ------------------------------------------------------------------------------------------------------


class Held(IntentFile):
    """A disk that takes nothing while it is not free. busy: a write has begun since it was held."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.free, self.busy = threading.Event(), threading.Event()
        self.free.set()

    def save(self, table: IntentTable, now: Clocks) -> None:
        if not self.free.is_set():
            self.busy.set()
            self.free.wait(60.0)
        super().save(table, now)


class Full(IntentFile):
    full = True

    def save(self, table: IntentTable, now: Clocks) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().save(table, now)


async def test_what_is_not_on_disk_is_not_stored(tmp_path: Path) -> None:
    """The host is told so, now and beforehand; once there is room again it is taken."""
    settings = settings_of(tmp_path / "state")
    disk = Full(Path(settings.state))
    async with running(tmp_path, settings, store=disk) as rig, aiohttp.ClientSession() as session:
        client = Client(rig, session)
        assert await client.say("store") == 503
        assert rig.outages == {}
        body = await client.body("hello")
        _, hello, _ = await client.post(
            wire.PATHS["hello"], body, wire.sign_request(KEYS["n1"], wire.PATHS["hello"], body)
        )
        assert any("No space left on device" in why for why in hello["blocked"])
        disk.full = False
        assert await client.say("store") == 200
        assert rig.outages == {"n1": "o1"}


async def test_a_full_disk_keeps_nobody_off_who_is_stored(tmp_path: Path) -> None:
    """What stands is carried out from memory, with an alarm; what is taken back stays so."""
    settings = settings_of(tmp_path / "state")
    disk = Full(Path(settings.state))
    disk.full = False
    async with running(tmp_path, settings, store=disk) as rig, aiohttp.ClientSession() as session:
        await carried_out(rig.effector(), arm(in_s=20.0))
        disk.full = True
        rig.chassis["n1"].power_on = False
        await rig.until(lambda: rig.chassis["n1"].orders == 1)
        await rig.until(lambda: rig.word.on_since_s is not None)
        disk.full = False
        await carried_out(rig.effector(), arm("o2", in_s=600.0))
        disk.full = True
        assert await Client(rig, session).say("withdraw", outage="o2") == 503
        assert rig.outages == {}


async def test_a_withdrawal_reaches_the_disk_once_it_has_room_again(tmp_path: Path) -> None:
    """Without it the next start would bring the intent back, and power on a host that a person has switched off."""
    disk = Full(tmp_path)
    disk.full = False
    now = Clocks(boot_id="b", boottime_s=10.0, wall_s=20.0)
    async with asyncio.TaskGroup() as tasks:
        keeper = IntentStore(disk, lambda: now, tasks)
        assert await keeper.commit(lambda table: table.put(INTENT), 5.0) == ""
        disk.full = True
        keeper.apply(lambda table: table.drop("n1"))
        writer = tasks.create_task(keeper.run(every_s=0.05))
        while not keeper.error:  # noqa: ASYNC110 - the disk reports no failure
            await asyncio.sleep(0.01)
        disk.full = False
        async with asyncio.timeout(20.0):
            while keeper.error:  # noqa: ASYNC110 - nor its end
                await asyncio.sleep(0.01)
        writer.cancel()
    assert disk.load(now) == (IntentTable(), "")


async def test_a_withdrawal_overtakes_no_intent_on_its_way_to_the_disk(tmp_path: Path) -> None:
    """The host does not wait for long: it may withdraw what the disk takes later."""
    settings = settings_of(tmp_path / "state")
    disk = Held(Path(settings.state))
    async with running(tmp_path, settings, store=disk) as rig, aiohttp.ClientSession() as session:
        client = Client(rig, session)

        async def withdrawn() -> int:
            """Ask again, as a host does, while a busy disk takes longer than the sentinel waits for it."""
            while (status := await client.say("withdraw", outage="o1")) == 503:  # noqa: ASYNC110 - a disk tells nobody
                await asyncio.sleep(0.1)
            return status

        await rig.until(lambda: not rig.sentinel.keeper.is_behind)
        disk.free.clear()
        stores = asyncio.create_task(client.say("store"))
        await asyncio.to_thread(disk.busy.wait, 20.0)
        withdraws = asyncio.create_task(withdrawn())
        await asyncio.wait((withdraws,), timeout=0.5)
        disk.free.set()
        assert await withdraws == 200
        await stores
        assert rig.outages == {}
        assert disk.load(Clocks(boot_id="", boottime_s=0.0, wall_s=0.0))[0].intents == {}


async def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """The caller is told in time; what the disk takes later counts later, and what came meanwhile is not lost."""
    disk = Held(tmp_path)
    now = Clocks(boot_id="b", boottime_s=10.0, wall_s=20.0)
    async with asyncio.TaskGroup() as tasks:
        keeper = IntentStore(disk, lambda: now, tasks)
        await keeper.load()
        disk.free.clear()
        assert "has not taken it within 0.05 s" in await keeper.commit(lambda table: table.put(INTENT), 0.05)
        assert keeper.table.intents == {}
        keeper.apply(lambda table: IntentTable(intents=table.intents, last_order_s=5.0))
        disk.free.set()
        assert await keeper.flush(60.0) == ""
        assert (keeper.table.last_order_s, set(keeper.table.intents)) == (5.0, {"n1"})
    assert disk.load(now) == (keeper.table, "")
