"""Where `powerguard discover` looks: what was written on the command line, or what this host's own files name."""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from powerguard.settings.load import SettingsError, load
from powerguard.sources.apcupsd_options import ApcupsdOptions
from powerguard.sources.base import why_not_found
from powerguard.sources.discover import MAX_ADDRESSES
from powerguard.sources.nut_options import NutOptions
from powerguard.sources.snmp_options import SnmpOptions

SMALLEST_PREFIX: Final = {4: 22, 6: 118}
"""1024 addresses: more is a scan, which is another tool's work, and another person's decision."""
_WITH_PORT: Final = re.compile(r"([^\[\]:]+|\[[^\[\]]*\]):[0-9]{1,5}")
_RESOLVE_S: Final = 3.0
_LOOPBACK: Final = "127.0.0.1"


class TargetError(Exception):
    """A target that cannot be meant: what it is, and what would be right."""


@dataclass(slots=True)
class Targets:
    """addresses: IP addresses to look at. known: sources with their ports. files: what was read. notes: oddities."""

    addresses: list[str] = field(default_factory=list)
    known: list[SnmpOptions | NutOptions | ApcupsdOptions] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


async def from_words(words: Sequence[str]) -> Targets:
    """Return the addresses of targets as the operator wrote them. Raises TargetError."""
    targets = Targets()
    for word in words:
        targets.addresses += _network(word) if "/" in word else await _host(word)
    targets.addresses = list(dict.fromkeys(targets.addresses))
    if len(targets.addresses) > MAX_ADDRESSES:
        msg = f"{len(targets.addresses)} addresses are more than {MAX_ADDRESSES}; ask for one network at a time"
        raise TargetError(msg)
    return targets


def _network(word: str) -> list[str]:
    try:
        network = ipaddress.ip_network(word, strict=False)
    except ValueError as error:
        msg = f"{word!r} is no network (write it as 10.0.0.0/24)"
        raise TargetError(msg) from error
    smallest = SMALLEST_PREFIX[network.version]
    if network.prefixlen < smallest:
        msg = f"{word} is larger than a /{smallest}: name the part where the UPSes are"
        raise TargetError(msg)
    return [str(address) for address in network.hosts()]


async def _host(word: str) -> list[str]:
    try:
        return [str(ipaddress.ip_address(word.strip("[]")))]
    except ValueError:
        pass
    if _WITH_PORT.fullmatch(word):
        msg = f"{word}: write the address alone, and the port as --snmp-port, --nut-port or --nis-port"
        raise TargetError(msg)
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(word, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        because = why_not_found(error)
        msg = f"cannot look up {word!r}: {because} (write an address, a name, or a network such as 10.0.0.0/24)"
        raise TargetError(msg) from error
    # One of them: most cards that have an IPv6 address speak nothing on it.
    return [str(min(found, key=lambda one: one[0] is not socket.AF_INET)[4][0])]


async def of_this_host(config: Path, nut: Path, apcupsd: Path) -> Targets:
    """Return the loopback and what this host's own files name. What cannot be read is noted, and passed over."""
    targets = Targets(addresses=[_LOOPBACK])
    _from_settings(config, targets)
    hosts = await asyncio.to_thread(_from_files, nut, apcupsd, targets)
    for host in dict.fromkeys(hosts):
        try:
            targets.addresses += await _host(host)
        except TargetError as error:
            targets.notes.append(str(error))
    known = {options.host for options in targets.known if isinstance(options, SnmpOptions)}
    targets.addresses = [a for a in dict.fromkeys(targets.addresses) if a not in known or a == _LOOPBACK]
    return targets


def _from_settings(config: Path, targets: Targets) -> None:
    try:
        if not config.exists():
            return
        settings = load(config)
    except OSError as error:
        targets.notes.append(f"{config} is passed over: {error.strerror or error}")
        return
    except SettingsError as error:
        targets.notes.append(f"{config} is passed over: {error.problems[0]}")
        return
    targets.files.append(str(config))
    targets.known += [source for ups in settings.ups.values() for source in ups.sources]


def _from_files(nut: Path, apcupsd: Path, targets: Targets) -> list[str]:
    """Read NUT's and apcupsd's files as `powerguard import` does; returns the hosts of cards that they name."""
    from powerguard.cli import import_apcupsd, import_nut
    from powerguard.cli.import_draft import Draft
    from powerguard.cli.import_words import ReadError

    draft = Draft()
    try:
        if nut.is_dir():
            import_nut.make(import_nut.load(import_nut.gather([nut]), draft), draft)
    except ReadError as error:
        targets.notes.append(f"{nut} is passed over: {error}")
    try:
        if apcupsd.exists():
            for path in import_apcupsd.gather([apcupsd]):
                import_apcupsd.make(import_apcupsd.load(path, draft), draft)
    except ReadError as error:
        targets.notes.append(f"{apcupsd} is passed over: {error}")
    targets.files += draft.files
    return _sources((source for ups in draft.upses for source in ups.sources), targets)


def _sources(sources: Iterable[dict[str, object]], targets: Targets) -> list[str]:
    hosts: list[str] = []
    for source in sources:
        plain = {key: source[key] for key in ("kind", "host", "port", "name") if key in source}
        try:
            if source["kind"] == "nut":
                targets.known.append(NutOptions.model_validate(plain))
            elif source["kind"] == "apcupsd":
                plain.pop("name", None)
                targets.known.append(ApcupsdOptions.model_validate(plain))
            else:
                hosts.append(str(source["host"]))
        except ValidationError:
            targets.notes.append(f"a {source['kind']} source of an unusual name or address is passed over")
    return hosts
