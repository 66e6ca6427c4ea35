"""What a poll costs this host in processor time, source by source, when nothing waits between two of them.

The card and the daemons that are asked run in processes of their own (snmpd, upsd, apcupsd): what is counted is ours.
Of an SNMP card as on utility, where one poll of ten is whole and the others leave out what a better object tells.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import structlog

from bench.figure import Figure
from powerguard.clock import boottime_s
from powerguard.core.model.events import Reading, SourceFailed
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.apcupsd.protocol import Flag
from powerguard.ups.apcupsd.source import ApcupsdSource
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.nut.source import NutSource
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.vocabulary import Missing
from powerguard.ups.profiles.walk import parse_walk
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.source import SnmpSource
from tests.peers import find
from tests.peers.apcupsd import apcupsd, scripts
from tests.peers.nut import upsd
from tests.peers.snmpd import AUTH, COMMUNITY, PRIV, USER, Snmpd, snmpd

Poll = Callable[[Callable[[Reading | SourceFailed], None]], Awaitable[None]]

_BAR: Final = "<= 1"
_SNMP_BAR: Final = "<= 10"
"""1 % of a core at one poll a second."""
_POLLS: Final = 100
_WALKS: Final = Path(__file__).parents[1] / "tests" / "ups" / "profiles" / "walks"
_CARDS: Final = {"APC": "apc", "RFC 1628": "rfc1628", "Eaton, two families": "families/xups"}


def run(*, quick: bool) -> list[Figure]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    return asyncio.run(_all(2 if quick else 11))


async def _all(rounds: int) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="pg-bench-", dir="/tmp") as folder:
        if find("snmpd") is not None:
            for card, name in _CARDS.items():
                async with _card(name) as peer:
                    for version, more in _versions(Path(folder)).items():
                        figures.append(await _snmp(peer, f"snmp {version}, {card}", rounds, more))
        if find("upsd") is not None:
            figures.append(await _nut(rounds))
        if find("apcupsd") is not None and find("snmpd") is not None:
            figures.append(await _apcupsd(rounds))
    return figures


async def _cost(name: str, rounds: int, poll: Poll, bar: str = _BAR) -> Figure:
    """Take the processor time of this process for a poll, in milliseconds, as the mean of each round."""
    heard: list[Reading | SourceFailed] = []
    for _ in range(_POLLS // 2):
        await poll(heard.append)
    values = []
    for _ in range(rounds):
        began_s = time.process_time()
        for _ in range(_POLLS):
            await poll(heard.append)
        values.append((time.process_time() - began_s) / _POLLS * 1000)
    lost = next((event.reason for event in heard if isinstance(event, SourceFailed)), None)
    if lost is not None:
        msg = f"{name}: a poll failed, and its time is none: {lost}"
        raise RuntimeError(msg)
    return Figure(name=f"a poll of {name}", unit="ms CPU", values=tuple(values), bar=bar)


def _secret(folder: Path, name: str, text: str) -> dict[str, str]:
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o400)
    return {"file": str(path)}


def _versions(folder: Path) -> dict[str, dict[str, Any]]:
    auth, priv = _secret(folder, "auth", AUTH), _secret(folder, "priv", PRIV)
    return {
        "v2c": {"version": "2c", "community": _secret(folder, "community", COMMUNITY)},
        "v3 authPriv": {"version": 3, "user": USER, "auth": auth, "priv": priv},
    }


def _card(name: str) -> contextlib.AbstractAsyncContextManager[Snmpd]:
    walk = _WALKS / f"{name}.walk"
    answers = parse_walk(walk.read_text(encoding="utf-8"), walk.name)
    return snmpd({oid: answer for oid, answer in answers.items() if not isinstance(answer, Missing)})


async def _snmp(peer: Snmpd, name: str, rounds: int, more: dict[str, Any]) -> Figure:
    options = SnmpOptions.model_validate({"kind": "snmp", "host": "127.0.0.1", "port": peer.port, **more})
    source = SnmpSource(options, ups="bench", clock=boottime_s, profiles=load_profiles(None))
    try:
        return await _cost(name, rounds, source._poll_and_publish, _SNMP_BAR)  # noqa: SLF001 - one poll, without its wait
    finally:
        await source._port.close()  # noqa: SLF001 - likewise


async def _nut(rounds: int) -> Figure:
    async with upsd() as peer:
        options = NutOptions(kind="nut", host="127.0.0.1", port=peer.port, name="dsim")
        source = NutSource(options, ups="bench", clock=boottime_s)

        async def poll(publish: Callable[[Reading | SourceFailed], None]) -> None:
            await source._poll_and_publish(publish, whole=True)  # noqa: SLF001 - one poll, without its wait

        try:
            return await _cost("upsd, all variables (one a second; the status alone four times)", rounds, poll)
        finally:
            await source._drop()  # noqa: SLF001 - likewise


@contextlib.asynccontextmanager
async def _beside_a_card() -> AsyncIterator[ApcupsdOptions]:
    async with _card("apc") as card:
        with scripts() as made:
            device = f"127.0.0.1:{card.port}:APC_NOTRAP:{COMMUNITY}"
            async with apcupsd("snmp", device, scripts_=made, settings={"POLLTIME": 60}) as running:
                await running.until(lambda status: bool(status.flags & Flag.ONLINE))
                yield ApcupsdOptions(kind="apcupsd", port=running.port)


async def _apcupsd(rounds: int) -> Figure:
    async with _beside_a_card() as options:
        source = ApcupsdSource(options, ups="bench", clock=boottime_s)
        return await _cost("apcupsd", rounds, source._poll)  # noqa: SLF001 - one poll, without its wait
