"""Layer C end to end: a host says at its commit that it may be powered on again; a sentinel does it, by its own eyes.

The daemon, the sentinel, the UPS's card and the BMCs are processes and sockets of their own; TLS is pinned, each word
signed. Nothing cuts the UPS's output here: AC never drops, so nothing else would bring the host back.
"""

import asyncio
import contextlib
import json
import sqlite3
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.actions import ArmPowerOn, DisarmPowerOn, PowerOnMethod
from powerguard.daemon.journal import Line
from powerguard.effectors.options import SentinelOptions
from powerguard.effectors.sentinel.effector import SentinelEffector
from powerguard.options import Secret
from powerguard.sim.demo.story import numbers
from powerguard.sim.snmp_values import SimValue
from powerguard.sim.ups import APC
from tests.e2e.peers import rfc1628_table
from tests.e2e.rig import BUSY_S, LIMIT_S, ROOMY, Rig, rig
from tests.peers.ipmi import IpmiSim
from tests.peers.ports import free_port
from tests.peers.redfish import PASSWORD, USER, Certificate, OwnRedfish, make_certificate
from tests.peers.snmp_agent import SnmpAgent
from tests.peers.ups_output import XUPS, SimCard

UTILITY_S: Final = 5.0
STAGGER_S: Final = 80.0
PREPARED_S: Final = 5.0
"""For everything that prepares a full power-off (`bmc.limit_s`), so for what a sentinel may take, too."""


class Node:
    """A management node: `powerguard sentinel` in a process of its own, with settings from a file.

    hosts: BMC and stagger_s of each, by name. pace: how much faster its clock runs; 1: the program as it is.
    """

    def __init__(self, world: Rig, certificate: Certificate, *, pace: float = 1.0) -> None:
        self.folder = world.folder / "node"
        (self.folder / "state").mkdir(parents=True)
        self.port = free_port()
        self.pace = pace
        self.process: asyncio.subprocess.Process | None = None
        self._world = world
        self._zero_s = boottime_s()
        self._certificate = certificate
        sources = world.settings["ups"]["rack-a"]["sources"]
        self.settings: dict[str, Any] = {
            "mode": "armed",
            "port": self.port,
            "state": str(self.folder / "state"),
            "utility_stable_s": UTILITY_S,
            "charge_pct": 1,
            "tls": {"certificate": str(certificate.cert), "key": {"file": str(certificate.key)}},
            "log": {"format": "json"},
            # By its fast clock each poll is late; three that are missing are what it calls silence.
            "ups": {"rack-a": {"sources": [{**each, "timeout_s": 5.0} for each in sources]}},
            "hosts": {},
        }
        certificate.key.chmod(0o600)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def key(self, host: str) -> dict[str, str]:
        """The secret that it shares with this host."""
        return self._world.secret(f"key-{host}", f"{host:-<64}")

    def add(self, host: str, bmc: Mapping[str, Any], stagger_s: float = 0.0) -> None:
        its = {"key": self.key(host), "bmc": bmc, "feeds": ["rack-a"], "stagger_s": stagger_s}
        self.settings["hosts"][host] = its

    def settings_of(self, host: str) -> dict[str, Any]:
        """What a host's own settings say of it."""
        return {
            "kind": "http",
            "urls": [self.url],
            "key": self.key(host),
            "fingerprint": self._certificate.sha256,
            "name": host,
        }

    def of(self, host: str) -> SentinelEffector:
        """The host's side of it, for hosts whose daemon does not run here."""
        result = self.settings_of(host)
        return SentinelEffector(SentinelOptions(**(result | {"key": Secret(**result["key"])})), feeds=("rack-a",))

    async def start(self) -> None:
        """Start it, and wait until hosts can reach it."""
        config = self.folder / "sentinel.yaml"
        config.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in self.settings.items()))
        program = [str(Path(__file__).with_name("fast_sentinel.py")), str(config), str(self.pace), str(self._zero_s)]
        if self.pace == 1.0:
            program = ["-m", "powerguard", "sentinel", "--config", str(config)]
        before = len(self.logged("http_listening"))
        with (self.folder / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", *program, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        await self.until(lambda: len(self.logged("http_listening")) > before, "it to listen")

    async def until(self, reached: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait for what it does; fails with the end of its log."""
        try:
            await self._world.until(reached, what, limit_s)
        except AssertionError as error:
            msg = f"{error}\nthe sentinel's log ends:\n{self.log()[-4000:]}"
            raise AssertionError(msg) from None

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def logged(self, event: str, **wanted: object) -> list[dict[str, Any]]:
        """Log lines of that event with these values, over all its lives."""
        whole = self.log().rpartition("\n")[0]  # what follows is being written
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event and wanted.items() <= line.items()]

    async def line(self, event: str, **wanted: object) -> dict[str, Any]:
        """Return the newest line of that event, once it is there: a thread writes the log after the answer."""
        await self.until(lambda: self.logged(event, **wanted), f"{event} {wanted} in its log")
        return self.logged(event, **wanted)[-1]


@contextlib.asynccontextmanager
async def node(world: Rig, *, pace: float) -> AsyncIterator[Node]:
    made = Node(world, make_certificate(world.folder), pace=pace)
    try:
        yield made
    finally:
        if made.process is not None:
            await made.kill()


def redfish(world: Rig, bmc: OwnRedfish, certificate: Path) -> dict[str, Any]:
    password = world.secret("redfish-password", PASSWORD)
    given = {"kind": "redfish", "host": "127.0.0.1", "https_port": bmc.port, "user": USER, "password": password}
    return {**given, "ca": str(certificate)}


def ipmi(world: Rig, bmc: IpmiSim) -> dict[str, Any]:
    password = world.secret("ipmi-password", bmc.password)
    return {"kind": "ipmi-lan", "host": bmc.host, "port": bmc.port, "user": bmc.user, "password": password}


async def before_order(sentinel: Node, is_ordered: Callable[[], bool]) -> float:
    """Wait for an order to power on; return the last moment at which there was none."""
    last_s = boottime_s()

    def seen() -> bool:
        nonlocal last_s
        now_s = boottime_s()
        if is_ordered():
            return True
        last_s = now_s
        return False

    await sentinel.until(seen, "an order to power on")
    return last_s


async def powerguard(*words: str) -> tuple[int, str]:
    """Run a verb to its end."""
    argv = [sys.executable, "-P", "-m", "powerguard", *words]
    ended = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    stdout, _ = await ended.communicate()
    return ended.returncode or 0, stdout.decode()


def arm(host: str, in_s: float) -> ArmPowerOn:
    return ArmPowerOn(
        id=f"arm-{host}",
        by_s=boottime_s() + 0.5 * LIMIT_S,
        method=PowerOnMethod.SENTINEL,
        outage=f"of-{host}",
        in_s=in_s,
    )


def disarm(host: str) -> DisarmPowerOn:
    return DisarmPowerOn(
        id=f"disarm-{host}", by_s=boottime_s() + 0.5 * LIMIT_S, method=PowerOnMethod.SENTINEL, outage=f"of-{host}"
    )


@pytest.mark.parametrize(
    "kind",
    [
        "redfish",
        pytest.param("ipmi", marks=[pytest.mark.slow, pytest.mark.peer("ipmi_sim")]),
    ],
)
async def test_another_host_powers_it_on_and_the_report_says_so(tmp_path: Path, kind: str) -> None:
    """Outage, commit, intent over TLS, off; utility is back before the cut; the sentinel is killed twice in between.

    Once after it has said that it has stored it, once after its order: it acts once. Of the other hosts one is due at
    the same time and waits its turn, one is on again by itself, and one has never asked: that one is off for repairs.
    """
    certificate = make_certificate(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        world = await stack.enter_async_context(rig())
        sentinel = await stack.enter_async_context(node(world, pace=10.0 if kind == "redfish" else 4.0))
        bmcs = {f"node-{number}": await stack.enter_async_context(OwnRedfish(certificate)) for number in (1, 2, 3, 4)}
        sim = await stack.enter_async_context(IpmiSim(plugin=False)) if kind == "ipmi" else None
        for host, bmc in bmcs.items():
            its = ipmi(world, sim) if sim is not None and host == "node-1" else redfish(world, bmc, certificate.cert)
            sentinel.add(host, its, STAGGER_S)

        def orders(host: str) -> list[str]:
            return sim.orders if sim is not None and host == "node-1" else bmcs[host].resets

        await sentinel.start()
        world.settings["sentinel"] = sentinel.settings_of("node-1")
        await world.start()
        await world.status_shows(lambda status: layer(status)["stands"] == "armed", "layer C armed")

        world.ups.utility = False
        await world.off()
        armed = numbers(await world.note("power_on_armed", method="sentinel"))
        await world.kill()
        await sentinel.line("intent_stored", host="node-1", in_s=armed["in_s"])
        (latched,) = world.notes("phase_changed", new="shutdown")
        assert world.actions("PowerOff")[0].at_s - latched.at_s <= PREPARED_S + BUSY_S
        await sentinel.of("node-2").carry_out(arm("node-2", 1.0))
        await sentinel.of("node-3").carry_out(arm("node-3", 1.0))
        await sentinel.kill()

        for host in ("node-1", "node-2", "node-4"):
            bmcs[host].system["PowerState"] = "Off"
        if sim is not None:
            sim.switch(on=False)
        await sentinel.start()
        battery = "0 of 1 supplies have stable power (rack-a: on battery)"
        await sentinel.until(lambda: sentinel.logged("power_on_waits", host="node-1", because=battery), "its turn")
        assert not any(orders(host) for host in bmcs), "on battery nobody is powered on"
        back_at_s = boottime_s()
        world.ups.utility = True
        unordered_at_s = await before_order(sentinel, lambda: bool(orders("node-1") or orders("node-2")))
        assert (boottime_s() - back_at_s) * sentinel.pace >= UTILITY_S, "utility has to hold first"
        await sentinel.kill()
        await sentinel.start()
        await sentinel.until(lambda: orders("node-1") and orders("node-2"), "the other host's turn")
        assert (boottime_s() - unordered_at_s) * sentinel.pace >= STAGGER_S - 20.0, "less what sending takes"

        await boot(world)
        ended = await sentinel.line("intent_ended", host="node-1")
        assert (ended["how"], ended["outage"]) == ("withdrawn", world.one_outage())
        assert {host: len(set(orders(host))) for host in bmcs} == {"node-1": 1, "node-2": 1, "node-3": 0, "node-4": 0}
        if sim is None:
            assert [bmc.resets for bmc in bmcs.values()] == [["On"], ["On"], [], []]
        await sentinel.of("node-3").carry_out(disarm("node-3"))
        await sentinel.line("intent_ended", host="node-3", how="withdrawn")
        assert "Traceback" not in sentinel.log()


@pytest.mark.parametrize(
    "kind",
    [
        "redfish",
        pytest.param("ipmi", marks=[pytest.mark.slow, pytest.mark.peer("ipmi_sim")]),
    ],
)
@pytest.mark.slow
async def test_the_next_cut_meets_its_boot(tmp_path: Path, kind: str) -> None:
    """Powered on, dark again before its daemon could say a word, and its BMC has kept no policy: its old word holds.

    The sentinel is killed while it is dark. Then somebody switches the host off in its next boot, and that stays so.
    """
    certificate = make_certificate(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        world = await stack.enter_async_context(rig())
        sentinel = await stack.enter_async_context(node(world, pace=10.0 if kind == "redfish" else 4.0))
        bmc = await stack.enter_async_context(OwnRedfish(certificate))
        sim = await stack.enter_async_context(IpmiSim(plugin=False)) if kind == "ipmi" else None
        sentinel.add("node-1", redfish(world, bmc, certificate.cert) if sim is None else ipmi(world, sim))

        def switch_off() -> None:
            bmc.system["PowerState"] = "Off"
            if sim is not None:
                sim.switch(on=False)

        async def logged(event: str, count: int, **wanted: object) -> None:
            await sentinel.until(lambda: len(sentinel.logged(event, **wanted)) >= count, f"{event} {wanted}", 120.0)

        await sentinel.start()
        await sentinel.of("node-1").carry_out(arm("node-1", 1.0))
        switch_off()
        await logged("power_on_ordered", 1, number=1)
        await logged("host_on_seen", 1)
        world.ups.utility = False
        await logged("supply_changed", 1, because="on battery")
        switch_off()
        await logged("host_off_again", 1)
        await sentinel.kill()
        await sentinel.start()
        world.ups.utility = True
        await logged("power_on_ordered", 1, number=2)
        await logged("host_on_seen", 2)
        switch_off()
        await logged("intent_ended", 1, how="switched_off")
        if sim is None:
            assert bmc.resets == ["On", "On"]
        detail = dict(await sentinel.of("node-1").carry_out(disarm("node-1")))
        assert (detail["disarmed"], detail["orders"]) == (False, 2)
        assert "Traceback" not in sentinel.log()


async def boot(world: Rig) -> None:
    """The host is on again: its daemon takes its word back, and the outage is closed with who has brought it back."""
    # The kernel's boot id cannot be had twice; all else is as after a boot.
    with closing(sqlite3.connect(world.journal)) as db, db:
        db.execute("UPDATE snapshot SET digest = '', boot_id = 'the-boot-before', at_s = at_s + 86400.0")
    world.trainers[0].paused = False
    await world.start()

    def taken_back() -> list[Line]:
        # The one where the sentinel had seen it on before it said so.
        return [
            *world.notes("power_on_disarmed", method="sentinel"),
            *world.notes("power_on_found_disarmed", method="sentinel"),
        ]

    (note,) = await world.until(taken_back, "its word to be taken back")
    assert "has powered this host on" in note.because
    await world.note("outage_ended")
    answer = json.loads((await powerguard("report", "--json", "--journal", str(world.journal)))[1])
    assert (answer["outcome"], answer["recovery"]["powered_on_by"]) == ("clean_shutdown", "sentinel")
    world.no_traceback()


def layer(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Layer C, as the status tells it."""
    return next(each for each in answer["power_on"]["layers"] if each["layer"] == "C")


@contextlib.asynccontextmanager
async def silent(certificate: Certificate | None = None) -> AsyncIterator[str]:
    """Take connections and say nothing; with a certificate, nothing after the handshake."""
    tls = None
    if certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate.cert, certificate.key)
    listening = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=tls)
    async with listening:
        yield f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@pytest.mark.slow
async def test_sentinels_of_no_use_are_reported_and_hold_nothing_up(tmp_path: Path) -> None:
    """Absent, hung, with another certificate, with another key: each is told in words that say what would be right.

    doctor FAILs where nothing else covers the race. At the commit the UPS's output is armed all the same, and the
    power-off comes no later than everything before it may take.
    """
    (tmp_path / "other").mkdir()
    async with contextlib.AsyncExitStack() as stack:
        world = await stack.enter_async_context(rig(card=False, runtime=ROOMY))
        card = SimCard(
            world.ups.output,
            boottime_s,
            utility=lambda: world.ups.utility,
            lacks=frozenset({XUPS, APC, "1.3.6.1.2.1.1."}),
        )

        def values() -> Mapping[str, SimValue]:
            return {**card.values(), **rfc1628_table(world.ups)}

        agent = await stack.enter_async_context(SnmpAgent(values, on_set=card.take))
        world.add_snmp(agent.port)
        sentinel = await stack.enter_async_context(node(world, pace=1.0))
        sentinel.add(
            "node-9", {"kind": "ipmi-lan", "host": "127.0.0.1", "port": 1, "user": "u", "password": sentinel.key("x")}
        )
        absent = f"https://127.0.0.1:{free_port()}"
        hung = await stack.enter_async_context(silent())
        stranger = await stack.enter_async_context(silent(make_certificate(tmp_path / "other")))
        # Its key is another than what the sentinel has for it.
        world.settings["sentinel"] = sentinel.settings_of("node-9") | {
            "key": world.secret("wrong", "w" * 64),
            "urls": [absent, hung, sentinel.url, stranger],  # a status cuts long words off
        }
        words = (
            f"{absent}: no connection (ECONNREFUSED)",
            f"{hung}: no answer",
            f"{stranger}: its certificate is not",
            f"{sentinel.url}: refuses this host: sentinel.name and sentinel.key must be the same as in its settings",
        )
        await sentinel.start()
        world.write_settings()
        code, said = await powerguard("doctor", "--json", "--config", str(world.config))
        checks = {each["name"]: each for each in json.loads(said)["checks"]}
        assert (code, checks["power_on"]["verdict"], checks["power_on.sentinel"]["verdict"]) == (2, "FAIL", "WARN")
        assert [each for each in words if each not in checks["power_on"]["text"]] == [], checks["power_on"]["text"]

        world.settings["ups"]["rack-a"]["output_off"] = {
            "by": "snmp",
            "dedicated_network": True,
            "community": world.secret("write", "private"),
        }
        await world.start()
        world.ups.utility = False
        off = await world.off()
        (latched,) = world.notes("phase_changed", new="shutdown")
        assert world.actions("PowerOff")[0].at_s - latched.at_s <= PREPARED_S + BUSY_S
        assert off.deadline_s > 0.0
        blocked = world.notes("power_on_blocked", method="sentinel")[-1].because
        assert all(each in blocked for each in ("no sentinel has stored it", *words))
        await world.status_shows(lambda status: layer(status)["stands"] == "blocked", "layer C blocked")
        assert numbers(await world.note("power_on_armed", method="output"))["returns"] == "cycles"
        assert world.ups.output.off_at_s is not None
        assert not sentinel.logged("intent_stored")
        await sentinel.line("request_refused")
        assert "Traceback" not in sentinel.log()
        world.no_traceback()
