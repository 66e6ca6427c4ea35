"""`powerguard discover [TARGET ...]`: find UPSes and PDUs on given addresses, and print settings for them.

The targets come from the command line, or from this host's own files.
"""

import argparse
import asyncio
import ipaddress
import json
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from powerguard.cli.imports import apcupsd as import_apcupsd
from powerguard.cli.imports import nut as import_nut
from powerguard.cli.imports.draft import Draft, ReadError, scalar
from powerguard.cli.render import Paint, clean, duration, number, table
from powerguard.cli.shared import (
    EX_NOINPUT,
    EX_NOTHING,
    EX_USAGE,
    add_snmp_secrets,
    fail,
    port,
    snmp_options,
    snmp_secrets,
)
from powerguard.options import SecretError
from powerguard.settings.load import SettingsError, load
from powerguard.settings.ups_models import from_data_sheet
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.base import why_not_found
from powerguard.ups.discover import KINDS, MAX_ADDRESSES, Found, Search, Wanted, alike, merged
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.snmp.options import SnmpOptions

_NAME: Final = re.compile(r"[^a-z0-9]+")


def as_credentials(found: Sequence[Found], given: Mapping[str, Any]) -> tuple[list[Found], dict[str, str]]:
    """Replace the caller's secrets by credentials, as the daemon will have them.

    given: the options of SNMP from the command line. Return the sources, and for each needed credential the caller's
    file, which the daemon's user cannot read.
    """
    files = {key: value["file"] for key, value in given.items() if isinstance(value, Mapping)}
    needed: dict[str, str] = {}
    replaced = []
    for one in found:
        source = one.source
        if source is not None and one.kind == "snmp":
            own = [key for key, file in files.items() if source.get(key) == {"file": file}]
            needed |= {f"snmp-{key}": files[key] for key in own}
            source = source | {key: {"credential": f"snmp-{key}"} for key in own}
        replaced.append(replace(one, source=source))
    return replaced, needed


def settings_of(found: Sequence[Found], *, bmc: bool = False) -> dict[str, Any] | None:
    """Return the settings as data; None if no UPS was found. bmc: this host has one."""
    upses = {name: {"sources": [one.source for one in group], **_known(group)[0]} for name, group in _named(found)}
    if not upses:
        return None
    made: dict[str, Any] = {"mode": "dry-run", "ups": upses}
    if len(upses) > 1:
        made["feeds"] = {"supplies": [next(iter(upses))]}
    return made | ({"bmc": {"kind": "auto"}} if bmc else {})


def as_yaml(found: Sequence[Found], *, bmc: bool = False) -> str:
    """Return the settings as a file with comments; "" if no UPS was found. bmc: this host has one."""
    named = _named(found)
    if not named:
        return ""
    lines = ["mode: dry-run          # then rehearse, then armed", "", "ups:"]
    for place, (name, group) in enumerate(named):
        lines += [f"  {scalar(name)}:"]
        again = [other for other, known in named[:place] if alike(known, group)]
        if again:
            lines.append(f"    # If this is the UPS {scalar(again[0])}, seen another way: move its sources there.")
        lines += ["    sources:"]
        for one in group:
            about = ", ".join(filter(None, (one.model, one.profile, one.remark)))
            lines.append(f"      - {scalar(one.source)}" + (f"    # {about}" if about else ""))
        known, why = _known(group)
        lines += [f"    # {line}" for line in why]
        lines += [f"    {key}: {scalar(value)}" for key, value in known.items()] or [
            "    #runtime_table: {50: 540, 75: 360, 100: 240}    # load in percent: seconds; data sheet"
        ]
    if len(named) > 1:
        lines += ["", "# The UPSes that feed this host, one for each of its power supplies:"]
        lines.append(f"feeds: {{supplies: [{scalar(named[0][0])}]}}    # of: {', '.join(name for name, _ in named)}")
    # Over the network: kind: auto with host, user and password.
    lines += ["", f"{'' if bmc else '#'}bmc: {{kind: auto}}    # powers this host on again when power returns"]
    return "\n".join(lines) + "\n"


def _known(group: Sequence[Found]) -> tuple[dict[str, Any], list[str]]:
    """Return the data sheet of this UPS, by the model that its sources report."""
    rating_w = next((one.rating_w for one in group if one.rating_w is not None), None)
    return from_data_sheet([one.model for one in group], rating_w)


def _named(found: Sequence[Found]) -> list[tuple[str, list[Found]]]:
    """Give each UPS a unique name: its name in NUT or apcupsd, else its maker and address."""
    named: dict[str, list[Found]] = {}
    for group in merged(found):
        first = next((one for one in group if one.name), group[0])
        wanted = first.name or f"{(first.profile or 'ups').split('-')[0].split(',')[0]}-{first.host}"
        name = _NAME.sub("-", wanted.lower()).strip("-")[:28] or "ups"
        again, number = name, 2
        while again in named:
            again, number = f"{name}-{number}", number + 1
        named[again] = group
    return list(named.items())


SMALLEST_PREFIX: Final = {4: 22, 6: 118}
"""Largest number of addresses: a wider scan is the work of another tool."""
_WITH_PORT: Final = re.compile(r"([^\[\]:]+|\[[^\[\]]*\]):[0-9]{1,5}")
_RESOLVE_S: Final = 3.0
_LOOPBACK: Final = "127.0.0.1"


class TargetError(Exception):
    """An invalid target: what it is, and the fix."""


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
        msg = f"{len(targets.addresses)} addresses are more than {MAX_ADDRESSES}: name one network at a time"
        raise TargetError(msg)
    return targets


def _network(word: str) -> list[str]:
    try:
        network = ipaddress.ip_network(word, strict=False)
    except ValueError as error:
        msg = f"{word!r} is not a network (example: 10.0.0.0/24)"
        raise TargetError(msg) from error
    smallest = SMALLEST_PREFIX[network.version]
    if network.prefixlen < smallest:
        msg = f"{word} is larger than a /{smallest}: name the part with the UPSes"
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
    # One of them: most cards with an IPv6 address do not answer on it.
    return [str(min(found, key=lambda one: one[0] is not socket.AF_INET)[4][0])]


async def of_this_host(config: Path, nut: Path, apcupsd: Path) -> Targets:
    """Return the loopback and the addresses in this host's own files. Unreadable files are noted and skipped."""
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
        targets.notes.append(_skipped(config, error))
        return
    except SettingsError as error:
        targets.notes.append(f"{config} is skipped: {error.problems[0]}")
        return
    targets.files.append(str(config))
    targets.known += [source for ups in settings.ups.values() for source in ups.sources]


def _skipped(path: Path, error: OSError) -> str:
    fix = " (run this as root)" if isinstance(error, PermissionError) else ""
    return f"{path} is skipped: {error.strerror or error}{fix}"


def _from_files(nut: Path, apcupsd: Path, targets: Targets) -> list[str]:
    """Read NUT's and apcupsd's files as `powerguard import` does; returns the hosts of cards that they name."""
    draft = Draft()
    try:
        if nut.is_dir():
            import_nut.make(import_nut.load(import_nut.gather([nut]), draft), draft)
    except ReadError as error:
        targets.notes.append(f"{nut} is skipped: {error}")
    except OSError as error:
        targets.notes.append(_skipped(nut, error))
    try:
        if apcupsd.exists():
            for path in import_apcupsd.gather([apcupsd]):
                import_apcupsd.make(import_apcupsd.load(path, draft), draft)
    except ReadError as error:
        targets.notes.append(f"{apcupsd} is skipped: {error}")
    except OSError as error:
        targets.notes.append(_skipped(apcupsd, error))
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
            targets.notes.append(f"a {source['kind']} source with an unusual name or address is skipped")
    return hosts


SCHEMA_VERSION: Final = 1
APCUPSD: Final = "/etc/apcupsd/apcupsd.conf"
LEAST_S: Final = 15.0
EACH_S: Final = 0.06
"""Seconds for each address (measured: 6 datagrams at 300 a second, 2 unanswered connections, 48 at once)."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Look for SNMP cards, upsd and apcupsd on the targets: addresses, names, or networks up to a /22. "
        "Without a target: on this host, and on the addresses in the settings and of NUT and apcupsd. Prints the "
        "devices found, and settings (mode: dry-run) for them. Exit 0: found; 1: not found."
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="10.0.0.5, ups-a.example or 10.0.0.0/24")
    parser.add_argument("--only", metavar="KINDS", help="of snmp,nut,apcupsd (all)")
    add_snmp_secrets(parser)
    parser.add_argument("--snmp-port", type=port(161), default=161, metavar="PORT", help="UDP port of cards (161)")
    parser.add_argument("--nut-port", type=port(3493), default=3493, metavar="PORT", help="TCP port of upsd (3493)")
    parser.add_argument("--nis-port", type=port(3551), default=3551, metavar="PORT", help="TCP port of apcupsd (3551)")
    parser.add_argument(
        "--nut", metavar="FOLDER", help="folder of NUT's files, used without a target (/etc/nut or /etc/ups)"
    )
    parser.add_argument(
        "--apcupsd", default=APCUPSD, metavar="FILE", help=f"file of apcupsd, used without a target ({APCUPSD})"
    )
    parser.add_argument(
        "--deadline", type=float, metavar="S", help="seconds for all of it (15, more for many addresses)"
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings whose addresses are used")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    try:
        return asyncio.run(_run(args))
    except TargetError as error:
        return fail(args, "discover", str(error), EX_USAGE)
    except SecretError as error:
        return fail(args, "discover", str(error), EX_NOINPUT)
    except ValueError as error:
        return fail(args, "discover", str(error), EX_USAGE)


async def _run(args: argparse.Namespace) -> int:
    wanted = _wanted(args)
    if args.targets:
        targets = await from_words(args.targets)
    else:
        nut = import_nut.folder() if args.nut is None else Path(args.nut)
        targets = await of_this_host(Path(args.config), nut, Path(args.apcupsd))
    wanted = replace(wanted, addresses=targets.addresses, known=targets.known)
    limit_s = args.deadline if args.deadline is not None else LEAST_S + EACH_S * len(targets.addresses)
    progress = _Progress(quiet=args.json or not sys.stderr.isatty())
    search = Search(wanted, progress.step)
    began_s = time.perf_counter()
    try:
        await search.run(deadline_s=limit_s)
    finally:
        progress.clear()
    took_s = time.perf_counter() - began_s
    search.found, secrets = as_credentials(search.found, wanted.snmp)
    if args.json:
        print(json.dumps(_shape(search, targets, took_s, secrets), indent=2))
        return 0 if search.found else EX_NOTHING
    return _print_found(search, targets, took_s, limit_s, secrets)


def _wanted(args: argparse.Namespace) -> Wanted:
    """Read the options. Raises ValueError or SecretError, both before the first request."""
    kinds = tuple(KINDS) if args.only is None else tuple(filter(None, args.only.split(",")))
    if not kinds or not set(kinds) <= set(KINDS):
        msg = f"--only: write some of {','.join(KINDS)}, got {args.only!r}"
        raise ValueError(msg)
    ports = {name: getattr(args, name) for name in ("snmp_port", "nut_port", "nis_port")}
    if args.deadline is not None and not 1 <= args.deadline <= 3600:
        msg = f"--deadline: write 1 to 3600 seconds, got {args.deadline:g}"
        raise ValueError(msg)
    snmp: dict[str, Any] = {} if args.user is None else {"version": 3, "user": args.user}
    snmp |= snmp_secrets(args)
    options = snmp_options({"host": "any", **snmp})
    for secret in (options.auth, options.priv):
        if secret is not None:
            secret.read()
    community = b"public" if options.community is None else options.community.read()
    return Wanted(kinds=kinds, snmp=snmp, community=community, **ports)


class _Progress:
    """One progress line on a terminal's stderr, redrawn at most ten times a second."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._drawn_s = 0.0
        self._width = 0

    def step(self, done: int, total: int, found: int) -> None:
        now_s = time.perf_counter()
        if self._quiet or now_s - self._drawn_s < 0.1:
            return
        self._drawn_s = now_s
        line = f"{done} of {total} asked, {found} found"
        self._width = max(self._width, len(line))
        print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)


# --- Output -----------------------------------------------------------------------------------------------------------


def _print_found(search: Search, targets: Targets, took_s: float, limit_s: float, secrets: Mapping[str, str]) -> int:
    from powerguard.cli.install.host import has_bmc

    stderr = sys.stderr
    for note in targets.notes:
        print(f"note: {clean(note)}", file=stderr)
    for other in search.others:
        print(f"note: {clean(other.where)}: {clean(other.why)}", file=stderr)
    if not search.whole:
        print(f"note: stopped after {limit_s:g} s; set --deadline for more", file=stderr)
    if not search.found:
        looked = f"{len(targets.addresses)} addresses" if len(targets.addresses) != 1 else targets.addresses[0]
        print(f"No UPS or PDU found on {looked} in {duration(took_s)}.", file=stderr)
        print("Name the card's address or network.", file=stderr)
        print("A card with another community than `public` needs --community-file.", file=stderr)
        print("A card that speaks only SNMP version 3 needs --user and its files.", file=stderr)
        return EX_NOTHING
    # In a file all of it is YAML: the found devices are comments.
    on_screen = sys.stdout.isatty()
    lines = table([_HEAD, *(_row(one, Paint()) for one in search.found)], indent="" if on_screen else "# ")
    print("\n".join(lines))
    print()
    text = as_yaml(search.found, bmc=has_bmc(Path("/")))
    print(text or "# No usable UPS was found.", end="" if text else "\n")
    sys.stdout.flush()
    for name, file in secrets.items():
        print(
            f"secret: {name}: powerguard secret set {name} < {shlex.quote(clean(file))}; powerguard install",
            file=stderr,
        )
    return 0


_HEAD: Final = ("WHAT", "WHERE", "NAME", "SUPPLY", "RUNTIME", "CHARGE", "LOAD", "FAMILY", "MODEL")


def _row(one: Found, paint: Paint) -> tuple[str, ...]:
    supply = clean(one.output_source or "?")
    if one.output_source == "battery":
        supply = "battery" if one.on_battery else "battery?"
    model = f"{one.model} ({one.remark})" if one.remark else one.model
    return (
        f"{one.kind} {one.what}",
        clean(one.where),
        clean(one.name) or "-",
        supply,
        duration(one.runtime_s),
        number(one.charge_pct, "%"),
        number(one.load_pct, "%") if one.load_pct is not None else number(one.watts, "W"),
        clean(one.profile) or "-",
        paint(clean(model), "bold"),
    )


def _shape(search: Search, targets: Targets, took_s: float, secrets: Mapping[str, str]) -> dict[str, Any]:
    from dataclasses import asdict

    from powerguard.cli.install.host import has_bmc

    bmc = has_bmc(Path("/"))

    return {
        "schema_version": SCHEMA_VERSION,
        "object": "discover",
        "addresses": len(targets.addresses),
        "files": targets.files,
        "took_s": round(took_s, 3),
        "whole": search.whole,
        "found": [{"where": one.where, **asdict(one)} for one in search.found],
        "others": [asdict(one) for one in search.others],
        "notes": targets.notes,
        "secrets": [{"name": name, "file": file} for name, file in secrets.items()],
        "settings": settings_of(search.found, bmc=bmc),
        "yaml": as_yaml(search.found, bmc=bmc),
    }
