"""Finds possible sources: SNMP cards, upsd, apcupsd, only on given addresses.

Any program may answer: banners without end, strings of a megabyte, control characters. Each conversation has
a deadline and reads through a bounded codec, each text that is kept is printable and short, and the whole has a
deadline after which the result so far is returned.

Who answers SNMP among many addresses: a few small datagrams to each, at a bounded rate, over one socket.
"""

import asyncio
import contextlib
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from powerguard.clock import boottime_s
from powerguard.core.model.events import UNREPORTED, OutputSource, Reading
from powerguard.ups.apcupsd import source as apcupsd
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.apcupsd.protocol import NisError
from powerguard.ups.nut.connection import LateError, Link, LinkError
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.nut.protocol import Answer, Err, NutError, Table, encode
from powerguard.ups.nut.variables import interpret
from powerguard.ups.profiles.load import Profiles, load_profiles
from powerguard.ups.profiles.text_values import rating
from powerguard.ups.snmp.engine import MessageError, Version, answered, hello
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.port import SnmpError
from powerguard.ups.snmp.source import probe

PER_S: Final = 300
"""Datagrams a second: 24 kB/s, which no network and no old card minds."""
_BATCH: Final = 6
_ROUNDS: Final = 2
_LAST_ANSWERS_S: Final = 1.0
_MORE_VERSIONS_S: Final = 0.2
"""After everybody has answered in some version: for the other ones."""
_ANSWERS_EACH: Final = 8
"""Datagrams that one address may send back; what is more is not looked into."""
_ROOM_BYTES: Final = 1 << 20


@dataclass(slots=True)
class _Sweep(asyncio.DatagramProtocol):
    """Matches answers to questions: by address, and by a number that only the one who was asked knows."""

    port: int
    asked: dict[str, int] = field(default_factory=dict)
    versions: dict[str, set[Version]] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        address = addr[0]
        count = self.heard.get(address, 0)
        if addr[1] != self.port or address not in self.asked or count >= _ANSWERS_EACH:
            return
        self.heard[address] = count + 1
        with contextlib.suppress(MessageError):
            version, number = answered(data)
            if number == self.asked[address]:
                self.versions.setdefault(address, set()).add(version)

    def error_received(self, exc: Exception) -> None:
        """ICMP refused: the address is unknown."""


async def sweep(
    addresses: Sequence[str], *, port: int, community: bytes, progress: Callable[[int], None] = lambda _: None
) -> dict[str, set[Version]]:
    """Return which versions each address speaks; those that did not answer are left out.

    addresses: IP addresses. progress: called with the number of finished ones. Never raises; takes
    6 datagrams / PER_S for each address, and _LAST_ANSWERS_S.
    """
    found: dict[str, set[Version]] = {}
    done = 0
    for family, members in _families(addresses):
        try:
            further = partial(_further, progress, done)
            found |= await _sweep(family, members, port, community, further)
        except OSError:  # no such family on this host
            continue
        done += len(members)
    return found


def _further(progress: Callable[[int], None], done: int, count: int) -> None:
    progress(done + count)


def _families(addresses: Sequence[str]) -> Iterator[tuple[socket.AddressFamily, list[str]]]:
    for family, is_six in ((socket.AF_INET, False), (socket.AF_INET6, True)):
        members = [address for address in addresses if (":" in address) is is_six]
        if members:
            yield family, members


async def _sweep(
    family: socket.AddressFamily, addresses: list[str], port: int, community: bytes, progress: Callable[[int], None]
) -> dict[str, set[Version]]:
    loop = asyncio.get_running_loop()
    own = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM_BYTES)
    listener = _Sweep(port)
    transport, _ = await loop.create_datagram_endpoint(lambda: listener, sock=own)
    try:
        numbers = random.SystemRandom()
        for address in addresses:
            listener.asked[address] = numbers.randrange(2**24, 2**31)  # four bytes: `hello` has room for no fewer
        for turn in range(_ROUNDS):
            for place, address in enumerate(addresses):
                if address not in listener.versions:
                    for version in (1, "2c", 3):
                        transport.sendto(hello(version, listener.asked[address], community), (address, port))
                if place % (_BATCH // 3) == 0:
                    await _pause(_BATCH / PER_S)
                if turn == _ROUNDS - 1:
                    progress(place)
            await _pause(_LAST_ANSWERS_S if len(listener.versions) < len(addresses) else _MORE_VERSIONS_S)
    finally:
        transport.close()
    return listener.versions


async def _pause(seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


KINDS: Final = ("snmp", "nut", "apcupsd")
MAX_ADDRESSES: Final = 2048
MAX_FOUND: Final = 256
MAX_UPSES: Final = 32
"""UPSes of one upsd that are looked at."""
_AT_ONCE: Final = 48
_PROBES_AT_ONCE: Final = 4
_CONNECT_S: Final = 1.0
_CONVERSATION_S: Final = 5.0
_MAX_TEXT: Final = 80
_MAX_WHY: Final = 240


def text(value: object, limit: int = _MAX_TEXT) -> str:
    """Return what a stranger calls itself as one short, printable line, cut between two words if they are words."""
    cut = str(value)[: 4 * limit]
    line = " ".join("".join(char if char.isprintable() else " " for char in cut).split())
    if len(line) <= limit:
        return line
    end = line[: limit - 3]
    whole = end.rpartition(" ")[0]
    return f"{whole if len(whole) > limit // 2 else end}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to look for, and where. addresses: swept for what is there. known: sources that are already written down.

    snmp: how cards are asked, as the settings of a source without its host; community: what stands there, read.
    *_port: where.
    """

    addresses: Sequence[str] = ()
    known: Sequence[SnmpOptions | NutOptions | ApcupsdOptions] = ()
    kinds: Sequence[str] = KINDS
    snmp: Mapping[str, Any] = field(default_factory=dict)
    community: bytes = field(default=b"public", repr=False)
    snmp_port: int = 161
    nut_port: int = 3493
    nis_port: int = 3551


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One UPS or PDU, as one program or card shows it.

    what: "ups" or "pdu". name: in that program, "" for a card. profile: the SNMP families, most trusted first.
    behind: "snmp:HOST:PORT" of the card that this program reads by itself, "" where it does not say.
    serial: its serial number, "" when not reported.
    source: what the settings would have; None where they cannot have it, and `remark` says why.
    on_battery, runtime_s, charge_pct, load_pct, watts, rating_w: None when not reported.
    """

    kind: str
    what: str
    host: str
    port: int
    name: str = ""
    model: str = ""
    serial: str = ""
    profile: str = ""
    output_source: str | None = None
    on_battery: bool | None = None
    runtime_s: float | None = None
    charge_pct: float | None = None
    load_pct: float | None = None
    watts: float | None = None
    rating_w: float | None = None
    authenticated: bool = False
    behind: str = ""
    remark: str = ""
    source: dict[str, Any] | None = None

    @property
    def where(self) -> str:
        """What to write on a command line: HOST:PORT."""
        return endpoint(self.host, self.port)


def endpoint(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A device that answered but cannot be a source, and why."""

    where: str
    why: str


@dataclass(slots=True)
class Search:
    """One search and what it has found so far. whole: False when the deadline cut it short.

    progress: called after every step with the numbers of finished, all and found ones.
    """

    wanted: Wanted
    progress: Callable[[int, int, int], None] = lambda *_: None
    found: list[Found] = field(default_factory=list)
    others: list[Other] = field(default_factory=list)
    whole: bool = False
    _done: int = 0
    _total: int = 0
    _profiles: Profiles | None = None

    async def run(self, *, deadline_s: float) -> None:
        """Search, for deadline_s at most. Raises CancelledError only."""
        wanted = self.wanted
        known = [options for options in wanted.known if options.kind in wanted.kinds]
        self._total = len(wanted.addresses) * len(wanted.kinds) + len(known)
        try:
            async with asyncio.timeout(deadline_s):
                self._profiles = await asyncio.to_thread(load_profiles)
                async with asyncio.TaskGroup() as tasks:
                    talks, probes = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_PROBES_AT_ONCE)
                    for options in known:
                        tasks.create_task(self._step(talks, partial(self._known, options)))
                    if "snmp" in wanted.kinds and wanted.addresses:
                        tasks.create_task(self._snmp(tasks, probes))
                    if "nut" in wanted.kinds:
                        tasks.create_task(self._tcp(tasks, talks, wanted.nut_port, self._nut))
                    if "apcupsd" in wanted.kinds:
                        tasks.create_task(self._tcp(tasks, talks, wanted.nis_port, self._nis))
            self.whole = len(self.found) < MAX_FOUND
        except TimeoutError:
            self.whole = False
        self._tidy()

    async def _step(self, turns: asyncio.Semaphore, talk: Callable[[], Awaitable[None]], count: int = 1) -> None:
        async with turns:
            await talk()
        self._asked(count)

    def _asked(self, count: int) -> None:
        self._done = min(self._total, self._done + count)
        self.progress(self._done, self._total, len(self.found))

    def _add(self, found: Found) -> None:
        if len(self.found) < MAX_FOUND:
            self.found.append(found)

    def _other(self, host: str, port: int, why: str) -> None:
        if len(self.others) < MAX_FOUND:
            self.others.append(Other(where=endpoint(host, port), why=text(why, _MAX_WHY)))

    def _tidy(self) -> None:
        """Sort, and leave out what was found twice: a source of the settings, and the same one by its address."""
        order = {kind: place for place, kind in enumerate(KINDS)}
        unique = {(one.kind, one.host, one.port, one.name): one for one in self.found}
        self.found = sorted(
            unique.values(), key=lambda one: (order[one.kind], _key(one.host), one.host, one.port, one.name)
        )
        self.others.sort(key=lambda one: one.where)

    # --- SNMP ---------------------------------------------------------------------------------------------------

    async def _snmp(self, tasks: asyncio.TaskGroup, probes: asyncio.Semaphore) -> None:
        wanted = self.wanted
        known = {(options.host, options.port) for options in wanted.known if isinstance(options, SnmpOptions)}
        addresses = [address for address in wanted.addresses if (address, wanted.snmp_port) not in known]
        before = 0

        def step(done: int) -> None:
            nonlocal before
            self._asked(done - before)
            before = done

        speaks = await sweep(addresses, port=wanted.snmp_port, community=wanted.community, progress=step)
        for address, versions in speaks.items():
            tasks.create_task(self._step(probes, partial(self._card, address, versions), 0))
        self._asked(len(wanted.addresses) - before)

    def _options(self, address: str, version: Version) -> SnmpOptions:
        given = {"version": version, **self.wanted.snmp}
        return SnmpOptions.model_validate({"kind": "snmp", "host": address, "port": self.wanted.snmp_port, **given})

    async def _card(self, address: str, versions: set[Version]) -> None:
        version: Version = "2c" if "2c" in versions else 1 if 1 in versions else 3
        version = self.wanted.snmp.get("version", version)
        if version == 3 and self.wanted.snmp.get("user") is None:
            # It may know another community or none: an agent drops a message with a wrong one without a word.
            community = "the community given" if "community" in self.wanted.snmp else "community `public`"
            why = f"answers SNMP, but not to {community}: --community-file, or --user for version 3"
            self._other(address, self.wanted.snmp_port, why)
            return
        await self._probe(self._options(address, version))

    async def _probe(self, options: SnmpOptions) -> None:
        try:
            report = await probe(options, profiles=self._profiles, with_pdus=True)
        except SnmpError as error:
            self._other(options.host, options.port, str(error).removeprefix(f"{options.host}:{options.port} "))
            return
        decoded = report.decoded
        is_pdu = decoded.kind == "pdu"
        remark = "a rack PDU, which cannot be a source of a UPS" if is_pdu else decoded.stale or report.few
        self._add(
            Found(
                kind="snmp",
                what=decoded.kind,
                host=options.host,
                port=options.port,
                model=text(report.model or report.identity.sys_descr or report.identity.sys_object_id),
                serial=text(report.serial),
                profile=", ".join(report.profiles),
                output_source=None if decoded.output_source is None else str(decoded.output_source),
                on_battery=decoded.on_battery,
                runtime_s=decoded.runtime_s,
                charge_pct=decoded.charge_pct,
                load_pct=decoded.load_pct,
                watts=decoded.watts,
                authenticated=report.authenticated,
                remark=text(remark),
                source=None if is_pdu else written(options),
            )
        )

    async def _known(self, options: SnmpOptions | NutOptions | ApcupsdOptions) -> None:
        match options:
            case SnmpOptions():
                await self._probe(options)
            case NutOptions():
                await self._nut(options.host, options.port)
            case ApcupsdOptions():
                await self._nis(options.host, options.port)

    # --- upsd and apcupsd ---------------------------------------------------------------------------------------

    async def _tcp(
        self,
        tasks: asyncio.TaskGroup,
        talks: asyncio.Semaphore,
        port: int,
        talk: Callable[[str, int], Awaitable[None]],
    ) -> None:
        """Try the port of every address, at most PER_S a second."""
        known = {(options.host, options.port) for options in self.wanted.known}
        for place, address in enumerate(self.wanted.addresses):
            if (address, port) in known:
                self._asked(1)
                continue
            tasks.create_task(self._step(talks, partial(self._tried, address, port, talk)))
            if place % _AT_ONCE == _AT_ONCE - 1:
                await _pause(_AT_ONCE / PER_S)

    async def _tried(self, address: str, port: int, talk: Callable[[str, int], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(address, port)
        except (OSError, TimeoutError):
            return
        writer.transport.abort()
        await talk(address, port)

    async def _nut(self, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(_CONVERSATION_S):
                await self._ask_upsd(host, port)
        except (LinkError, LateError, TimeoutError) as error:
            self._other(
                host,
                port,
                str(error).partition(": ")[2] or "takes connections on NUT's port, and gives no whole answer",
            )

    async def _ask_upsd(self, host: str, port: int) -> None:
        link = await Link.open([host], port, endpoint(host, port), limit_s=_CONNECT_S, on_lost=lambda: None)
        try:
            (answer,) = await link.ask(encode("LIST", "UPS"), limit_s=_CONNECT_S)
            if not isinstance(answer, Table):
                code = answer.code if isinstance(answer, Err) else "something else"
                self._other(host, port, f"answers LIST UPS with {code}: is it upsd?")
                return
            if not answer.rows:
                self._other(host, port, "upsd without a UPS: its ups.conf has none")
            if len(answer.rows) > MAX_UPSES:
                self._other(host, port, f"upsd with {len(answer.rows)} UPSes: the first {MAX_UPSES} are listed")
            for row in filter(None, answer.rows[:MAX_UPSES]):
                reply = await _variables(link, row[0])
                rows = reply.rows if isinstance(reply, Table) else ()
                variables = {words[0]: words[1] for words in rows if len(words) == 2}
                trouble = reply.code if isinstance(reply, Err) else ""
                self._add(_behind_upsd(host, port, row, variables, trouble))
        finally:
            await link.close()

    async def _nis(self, host: str, port: int) -> None:
        options = ApcupsdOptions(kind="apcupsd", host=host, port=port, timeout_s=_CONNECT_S)
        try:
            async with asyncio.timeout(_CONVERSATION_S):
                report = await apcupsd.probe(options, ups="found")
        except (NisError, TimeoutError) as error:
            self._other(host, port, str(error).removeprefix(f"{host}:{port}").lstrip(": ") or "answers too slowly")
            return
        remark = report.why_not
        if report.slave:
            remark = "a net slave: name its master instead"
        made = Found(
            kind="apcupsd",
            what="ups",
            host=host,
            port=port,
            name=text(report.name),
            model=text(report.model),
            serial=text(report.serial),
            rating_w=report.rating_w,
            remark=text(remark),
            source=written(options, "timeout_s"),
        )
        self._add(made if report.reading is None else _with_reading(made, report.reading))


async def _variables(link: Link, name: str) -> Answer | None:
    """Ask for all variables of a UPS; None if its name cannot be sent back to it."""
    try:
        request = encode("LIST", "VAR", name)
    except NutError:
        return None
    (answer,) = await link.ask(request, limit_s=2 * _CONNECT_S)
    return answer if not isinstance(answer, Table) or answer.words == ("VAR", name) else None


def _behind_upsd(host: str, port: int, row: Sequence[str], variables: Mapping[str, str], trouble: str) -> Found:
    name = row[0]
    source: dict[str, Any] | None = None
    remark = f"upsd says {text(trouble)}" if trouble else ""
    try:
        source = written(NutOptions(kind="nut", host=host, port=port, name=name))
    except ValueError:
        remark = "its name is none that the settings take: letters, digits, dots and dashes"
    maker = [variables.get(f"device.{word}") or variables.get(f"ups.{word}", "") for word in ("mfr", "model")]
    model = text(" ".join(filter(None, maker)) or (row[1] if len(row) > 1 else ""))
    found = Found(
        kind="nut",
        what="pdu" if variables.get("device.type") == "pdu" else "ups",
        host=host,
        port=port,
        name=text(name),
        model=model,
        serial=text(variables.get("device.serial") or variables.get("ups.serial", "")),
        rating_w=rating(variables.get("ups.realpower.nominal", "")),
        behind=_card_behind(variables),
        remark=remark,
        source=source,
    )
    if not variables:
        return found
    reading = interpret(variables).reading(at_s=boottime_s(), ups="found", source="nut", authenticated=False)
    return _with_reading(found, reading)


def _card_behind(variables: Mapping[str, str]) -> str:
    """Return the card that snmp-ups reads: the same UPS as the one that we find there ourselves."""
    place = variables.get("driver.parameter.port", "")
    if variables.get("driver.name") != "snmp-ups" or not place:
        return ""
    host, colon, port = place.rpartition(":")
    return f"snmp:{text(place)}" if colon and port.isdigit() and host else f"snmp:{endpoint(text(place), 161)}"


def _with_reading(found: Found, reading: Reading) -> Found:
    is_reported = reading.output_source not in UNREPORTED
    return replace(
        found,
        output_source=str(reading.output_source),
        on_battery=reading.output_source is OutputSource.BATTERY if is_reported else None,
        runtime_s=reading.runtime_s,
        charge_pct=reading.charge_pct,
        load_pct=reading.load_pct,
        watts=reading.watts,
    )


def written(options: SnmpOptions | NutOptions | ApcupsdOptions, *without: str) -> dict[str, Any]:
    """Return a source as one would write it: what is not the default, the kind and the host always."""
    values = options.model_dump(exclude_defaults=True, exclude_none=True, exclude=set(without))
    return {
        "kind": options.kind,
        "host": options.host,
        **{k: v for k, v in values.items() if k not in ("kind", "host")},
    }


def _key(host: str) -> tuple[int, ...]:
    parts = host.split(".")
    return tuple(map(int, parts)) if len(parts) == 4 and all(map(str.isdigit, parts)) else (999,)


def merged(found: Iterable[Found]) -> list[list[Found]]:
    """Return the UPSes, each with its sources.

    One UPS are: a card, and the upsd whose driver reads that very card; sources of different kinds that report the same
    model and serial number.
    """
    upses = [one for one in found if one.source is not None and one.what == "ups"]
    groups: dict[str, list[Found]] = {}
    for place, one in enumerate(upses):
        key = f"snmp:{one.where}" if one.kind == "snmp" else one.behind or f"{place}"
        groups.setdefault(key, []).append(one)
    # Makers ship placeholders (123456789): a number that two sources of one kind report does not identify a UPS.
    counts = Counter((one.kind, one.serial) for one in upses)
    doubtful = {serial for (_, serial), count in counts.items() if count > 1}
    whole: list[list[Found]] = []
    for group in groups.values():
        same = next((known for known in whole if _is_one_ups(known, group, doubtful)), None)
        if same is None:
            whole.append(group)
        else:
            same += group
    return whole


def _is_one_ups(one: Sequence[Found], other: Sequence[Found], doubtful: Collection[str]) -> bool:
    return alike(one, other) and any(
        a.serial and a.serial == b.serial and a.serial not in doubtful for a in one for b in other
    )


def alike(one: Sequence[Found], other: Sequence[Found]) -> bool:
    """Return whether two groups of sources may be of one UPS: of different kinds, with the same model."""
    models = [(a.model.casefold(), b.model.casefold()) for a in one for b in other]
    return not {a.kind for a in one} & {b.kind for b in other} and any(
        a and b and (a in b or b in a) for a, b in models
    )
