"""Wiring: from a settings file to a running sentinel."""

import asyncio
import ipaddress
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Final, NamedTuple

import structlog
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from powerguard.daemon.attempt import rest
from powerguard.daemon.control.admin import TakenError, alone
from powerguard.daemon.log import configure
from powerguard.daemon.observe.http import Handler, as_json, error_json, respond
from powerguard.daemon.observe.metrics import scrape
from powerguard.daemon.systemd import Notifier
from powerguard.effectors.sentinel.protocol import SCHEMA_VERSION
from powerguard.options import SecretError
from powerguard.sentinel.decide import Ending
from powerguard.sentinel.options import SentinelSettings, load, read_keys
from powerguard.sentinel.page import pages
from powerguard.sentinel.run import Sentinel, SentinelPorts, moment_of
from powerguard.sentinel.server import ANSWERS, HostRequests, server
from powerguard.sentinel.store import IntentFile, IntentStore
from powerguard.settings.load import SettingsError

log = structlog.get_logger()

EX_SETTINGS: Final = 78
EX_TAKEN: Final = 69
HUNG_AFTER_S: Final = 45.0
"""A turn of decisions takes at most an order and the disk: 16 s."""
RETRY_S: Final = 2.0
REREAD_S: Final = 10.0


def tls_context(settings: SentinelSettings) -> ssl.SSLContext | None:
    """Return the sentinel's certificate; None for plain HTTP. Raises SettingsError."""
    if settings.tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    where = f"tls: {settings.tls.certificate}"
    try:
        # OpenSSL needs a file: this one is in memory, has no name, and is gone with this function.
        memory = os.memfd_create("tls-key", os.MFD_CLOEXEC)
        with os.fdopen(memory, "wb") as file:
            file.write(settings.tls.key.read())
            file.flush()
            context.load_cert_chain(settings.tls.certificate, f"/proc/self/fd/{file.fileno()}", password=_no_password)
    except SecretError as error:
        msg = f"tls.key: {error}"
        raise SettingsError([msg]) from None
    except (OSError, ValueError) as error:  # of which ssl.SSLError is one; its text may not be quoted
        reason = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else ""
        msg = f"{where}: not usable with tls.key ({reason or 'both must be PEM, and belong together'})"
        raise SettingsError([msg]) from None
    return context


def _no_password() -> str:
    """A key that is encrypted would be asked for on the terminal."""
    raise ValueError


class SentinelInputs(NamedTuple):
    """The inputs of a run: valid settings, the keys of hosts and page, and what proves who it is; None: plain HTTP."""

    settings: SentinelSettings
    keys: dict[str, bytes]
    page_key: bytes
    tls: ssl.SSLContext | None


def take(path: Path, *, dry_run: bool = False) -> SentinelInputs:
    """Read everything that is to be read. Raises SettingsError with what is wrong."""
    settings = load(path)
    (keys, page_key), tls = read_keys(settings), tls_context(settings)
    _check_state(settings.state)
    if dry_run:
        settings = settings.model_copy(update={"mode": "dry-run"})
    return SentinelInputs(settings, keys, page_key, tls)


async def run(
    taken: SentinelInputs,
    ports: SentinelPorts,
    *,
    reread: Callable[[], SentinelInputs],
) -> None:
    """Run a sentinel until SIGTERM or SIGINT.

    reread: reads the settings again at SIGHUP; on SettingsError the present ones remain. Intents outlive it.
    """
    notifier = Notifier.take()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, signals.put_nowait, number)
    async with asyncio.TaskGroup() as tasks:
        keeper = IntentStore(IntentFile(Path(taken.settings.state)), moment_of(ports), tasks)
        await keeper.load()
        event = "sentinel_started"
        while True:
            sentinel = Sentinel(taken.settings, keeper, ports)
            door = HostRequests(taken.keys, sentinel, ports.clock)
            standing = ", ".join(sorted(keeper.table.intents)) or "none"
            log.info(event, mode=taken.settings.mode, hosts=len(taken.settings.hosts), intents=standing)
            running = [
                tasks.create_task(sentinel.run()),
                tasks.create_task(_serve(taken.settings, door, reads(sentinel, door, taken.page_key), taken.tls)),
                tasks.create_task(_notify(notifier, sentinel)),
            ]
            another = await _another(taken, signals, reread, notifier)
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            if another is None:
                break
            taken, event = another, "settings_reloaded"
        notifier.stopping()
        await keeper.close(1.0)
    log.info("sentinel_stopped")


async def _another(
    taken: SentinelInputs,
    signals: asyncio.Queue[signal.Signals],
    reread: Callable[[], SentinelInputs],
    notifier: Notifier,
) -> SentinelInputs | None:
    """Wait for a stop (None), or for a SIGHUP with settings that hold."""
    while await signals.get() is signal.SIGHUP:
        notifier.reloading()
        try:
            async with asyncio.timeout(REREAD_S):
                another = await asyncio.to_thread(reread)
            _check_same(taken.settings, another.settings)
        except TimeoutError:
            because = f"the settings and secrets were not read within {REREAD_S:g} s"
        except (SettingsError, OSError) as error:  # the latter: of a disk that fails, whose intents are in memory
            because = str(error)
        else:
            return another
        log.error("settings_refused", because=because, kept="the settings so far")
        notifier.ready()
    return None


def _check_same(old: SentinelSettings, new: SentinelSettings) -> None:
    if old.state != new.state or old.log != new.log:
        msg = "state, log: only read at the start (systemctl restart powerguard-sentinel keeps all intents)"
        raise SettingsError([msg])


def _is_local(request: web.Request) -> bool:
    """Say whether the question comes from this machine: over loopback, or from the address that it was sent to."""
    own = None if request.transport is None else request.transport.get_extra_info("sockname")
    try:
        address = ipaddress.ip_address(request.remote or "")
        return address.is_loopback or (own is not None and address == ipaddress.ip_address(own[0]))
    except ValueError:
        return False


def reads(sentinel: Sentinel, door: HostRequests, page_key: bytes = b"") -> dict[str, Handler]:
    """Return what hosts' keys are not needed for: health and the page for all, metrics only from this machine."""
    collector = SentinelCollector(sentinel, door)

    async def metrics(request: web.Request) -> web.Response:
        if not _is_local(request):
            return respond(error_json("metrics name hosts and UPSes: read them on the sentinel's own machine", 403))
        body, kind = scrape(collector, request.headers.get("Accept", ""))
        return respond((200, body, kind))

    async def healthz(_: web.Request) -> web.Response:
        age_s = sentinel.clock() - sentinel.turned_s
        alive = age_s <= HUNG_AFTER_S
        body = {
            "schema_version": SCHEMA_VERSION,
            "object": "healthz",
            "alive": alive,
            "progress_age_s": round(age_s, 3),
        }
        return respond(as_json(body, 200 if alive else 503))

    return {"/metrics": metrics, "/healthz": healthz, **pages(sentinel, door, page_key)}


async def _serve(
    settings: SentinelSettings,
    door: HostRequests,
    paths: dict[str, Handler],
    tls: ssl.SSLContext | None,
) -> None:
    """Serve; while the address is not available, log it once and retry: stored intents are carried out meanwhile."""
    logged = ""
    while True:
        try:
            async with server(door, paths, listen=settings.listen, port=settings.port, tls=tls) as port:
                log.info("http_listening", listen=settings.listen, port=port, tls=tls is not None)
                await asyncio.Event().wait()
        except OSError as error:
            because = f"{settings.listen} port {settings.port}: {error.strerror or error}"
            if because != logged:
                log.error("socket_unavailable", because=because, retry_s=RETRY_S)  # noqa: TRY400 - reported in full
            logged = because
        await rest(RETRY_S)


async def _notify(notifier: Notifier, sentinel: Sentinel) -> None:
    """Report progress to systemd while decisions continue: at once, for each reload begins this again."""
    notifier.ready()
    while True:
        lost = sentinel.clock() - sentinel.turned_s <= HUNG_AFTER_S and not notifier.watchdog()
        await rest(RETRY_S if lost else notifier.watchdog_every_s or HUNG_AFTER_S)


def _check_state(folder: str) -> None:
    if not Path(folder).is_dir():
        msg = f"state: {folder}: no such folder: set StateDirectory= in the unit, which makes it"
        raise SettingsError([msg])


def _doubt_of_state(folder: str) -> str:
    """Return why the sentinel may not be able to use its state folder; "" if it can. Raises SettingsError."""
    try:
        _check_state(folder)
    except PermissionError:
        return f"state: {folder}: not checked: permission denied (run this as root)"
    except SettingsError:
        if not PurePath(folder).is_relative_to("/var/lib"):  # where systemd makes StateDirectory=
            raise
        return f"state: {folder}: no such folder yet: StateDirectory= in the unit makes it at the start"
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return f"state: {folder}: this user cannot write there: no host could register"
    return ""


def main(path: Path, *, dry_run: bool = False, check: bool = False, ports: SentinelPorts | None = None) -> int:
    """Load the settings and run. Returns the exit status: 78 when they cannot be used, 69 when one runs with them.

    ports: how it touches the world; None: as a program does.
    """
    try:
        if check:
            settings = load(path)
            if doubt := _doubt_of_state(settings.state):
                print(f"{path}: {doubt}", file=sys.stderr)  # noqa: T201 - as above
            print(f"{path}: valid (hosts: {len(settings.hosts)}, mode: {settings.mode})")  # noqa: T201 - what was asked for
            return 0
        taken = take(path, dry_run=dry_run)
    except (SettingsError, PermissionError) as error:  # the latter: of the folder of its state
        print(error, file=sys.stderr)  # noqa: T201 - the log is not set up before the settings are read
        return EX_SETTINGS
    ports = ports or SentinelPorts(wall=time.time)  # noqa: TID251 - for the file, across boots
    state = taken.settings.state
    written = configure(style=taken.settings.log.format, level=taken.settings.log.level)
    try:
        with alone(Path(state) / "sentinel"):
            asyncio.run(run(taken, ports, reread=lambda: take(path, dry_run=dry_run)))
    except TakenError:
        because = f"another sentinel uses {state}: stop that one, or give this one its own state"
        log.error("sentinel_refused", because=because)  # noqa: TRY400 - reported in full
        written.close()
        return EX_TAKEN
    return 0


PREFIX: Final = "powerguard_sentinel_"

GAUGES: Final = {
    "armed": ((), "1: hosts are powered on; 0: dry-run."),
    "store_writable": ((), "1: all intents are on disk; 0: they are not, and new ones are refused."),
    "store_damaged": ((), "1: stored intents do not count: their file was damaged, or cannot be read."),
    "intent": (("host",), "1: the host has asked at its power-off to be powered on again; 0: it has not."),
    "intent_tries": (("host",), "Orders given for the stored intent."),
    "host_on": (("host",), "1: its BMC reports it as on; 0: as off. Absent: unknown."),
    "bmc_up": (("host",), "1: the last poll of its BMC succeeded; 0: it failed."),
    "ups_good": (
        ("ups",),
        "1: utility is stable, no countdown runs, the charge is enough; 0: hosts are not powered on from it.",
    ),
}
COUNTERS: Final = {
    "orders": (("host", "result"), "Orders to power on: ordered, failed, recorded (dry-run)."),
    "intents_ended": (("host", "how"), f"Intents that have ended: {', '.join(Ending)}."),
    "requests": (("answer",), f"Requests by answer: {', '.join(ANSWERS)}."),
}


class SentinelCollector(Collector):
    """Reads the sentinel at the moment of the scrape; keeps nothing."""

    def __init__(self, sentinel: Sentinel, door: HostRequests) -> None:
        self._sentinel = sentinel
        self._door = door

    def collect(self) -> Iterator[Metric]:
        """Yield every family, those without a series too."""
        gauges = dict(self._gauges())
        for name, (labels, text) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for values, value in gauges[name].items():
                gauge.add_metric(values, value)
            yield gauge
        counters = dict(self._counters())
        for name, (labels, text) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for values, count in counters[name].items():
                counter.add_metric(values, count)
            yield counter

    def _gauges(self) -> Iterator[tuple[str, dict[tuple[str, ...], float]]]:
        sentinel = self._sentinel
        keeper, world = sentinel.keeper, sentinel.world()
        yield "armed", {(): float(sentinel.settings.mode == "armed")}
        yield "store_writable", {(): float(not keeper.error)}
        yield "store_damaged", {(): float(bool(keeper.damage))}
        yield "intent", {(name,): float(name in world.intents) for name in world.hosts}
        yield "intent_tries", {(name,): float(intent.tries) for name, intent in world.intents.items()}
        power_states = {name: seen.power_on for name, seen in world.seen.items()}
        yield "host_on", {(name,): float(power_on) for name, power_on in power_states.items() if power_on is not None}
        yield "bmc_up", {(name,): float(power_on is not None) for name, power_on in power_states.items()}
        yield "ups_good", {(name,): float(each.good) for name, each in world.supplies.items()}

    def _counters(self) -> Iterator[tuple[str, Mapping[tuple[str, ...], int]]]:
        yield "orders", {(host, result): count for (host, result), count in self._sentinel.orders.items()}
        yield "intents_ended", {(host, how): count for (host, how), count in self._sentinel.ends.items()}
        yield "requests", {(word,): self._door.counts[word] for word in ANSWERS}
