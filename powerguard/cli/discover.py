"""`powerguard discover [TARGET ...]`: UPSes and PDUs on given addresses, and settings made of them."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from powerguard.cli.operate import Subparsers, fail
from powerguard.cli.render import Paint, clean, duration, number, table

if TYPE_CHECKING:
    from powerguard.cli.discover_targets import Targets
    from powerguard.sources.discover import Found, Search, Wanted

EX_NOTHING: Final = 1
EX_USAGE: Final = 64
EX_NOINPUT: Final = 66
SCHEMA_VERSION: Final = 1
NUT: Final = "/etc/nut"
APCUPSD: Final = "/etc/apcupsd/apcupsd.conf"
LEAST_S: Final = 15.0
EACH_S: Final = 0.06
"""Measured: 6 datagrams at 300 a second, and two connections that nobody takes, 48 at once, 1 s each."""


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "discover",
        help="find UPSes and PDUs, and print settings for them",
        description="Look for SNMP cards, upsd and apcupsd on the targets: addresses, names, or networks up to a /22. "
        "Without a target: on this host, and on what the settings, /etc/nut and /etc/apcupsd name. Prints what was "
        "found, and settings (mode: dry-run) made of it. Exit 0: something was found; 1: nothing.",
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="10.0.0.5, ups-a.example or 10.0.0.0/24")
    parser.add_argument("--only", metavar="KINDS", default=None, help="of snmp,nut,apcupsd (all)")
    parser.add_argument("--community-file", metavar="FILE", default=None, help="SNMP community of v1 and v2c (public)")
    parser.add_argument("--user", default=None, help="user of SNMP v3")
    parser.add_argument("--auth-file", metavar="FILE", default=None, help="its authentication passphrase")
    parser.add_argument("--auth-protocol", default=None, help="MD5, SHA (default), SHA-224, SHA-256, SHA-384, SHA-512")
    parser.add_argument("--priv-file", metavar="FILE", default=None, help="its privacy passphrase")
    parser.add_argument("--priv-protocol", default=None, help="DES, AES (default), AES-192, AES-256")
    parser.add_argument("--snmp-port", type=int, default=161, metavar="PORT", help="UDP port of cards (161)")
    parser.add_argument("--nut-port", type=int, default=3493, metavar="PORT", help="TCP port of upsd (3493)")
    parser.add_argument("--nis-port", type=int, default=3551, metavar="PORT", help="TCP port of apcupsd (3551)")
    parser.add_argument("--nut", default=NUT, metavar="FOLDER", help=f"NUT's files, without a target ({NUT})")
    parser.add_argument("--apcupsd", default=APCUPSD, metavar="FILE", help=f"apcupsd's, likewise ({APCUPSD})")
    parser.add_argument("--deadline", type=float, default=None, metavar="S", help="seconds for all (15, more for many)")
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings to look into")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from powerguard.cli.discover_targets import TargetError
    from powerguard.options import SecretError

    try:
        return asyncio.run(_run(args))
    except TargetError as error:
        return fail(args, "discover", str(error), EX_USAGE)
    except SecretError as error:
        return fail(args, "discover", str(error), EX_NOINPUT)
    except ValueError as error:
        return fail(args, "discover", _told(error), EX_USAGE)


def _told(error: ValueError) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    problems = [(".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")) for one in error.errors()]
    return "; ".join(f"{where}: {what}" if where else what for where, what in problems)


async def _run(args: argparse.Namespace) -> int:
    from powerguard.cli.discover_settings import as_credentials
    from powerguard.cli.discover_targets import from_words, of_this_host
    from powerguard.sources.discover import Search

    wanted = _wanted(args)
    if args.targets:
        targets = await from_words(args.targets)
    else:
        targets = await of_this_host(Path(args.config), Path(args.nut), Path(args.apcupsd))
    wanted = _with_targets(wanted, targets)
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
    return _tell(search, targets, took_s, limit_s, secrets)


def _wanted(args: argparse.Namespace) -> "Wanted":
    """Read the options. Raises ValueError or SecretError, both before anybody is asked anything."""
    from powerguard.sources.discover import KINDS, Wanted
    from powerguard.sources.snmp_options import SnmpOptions

    kinds = tuple(KINDS) if args.only is None else tuple(filter(None, args.only.split(",")))
    if not kinds or not set(kinds) <= set(KINDS):
        msg = f"--only: write some of {','.join(KINDS)}, got {args.only!r}"
        raise ValueError(msg)
    ports = {name: getattr(args, name) for name in ("snmp_port", "nut_port", "nis_port")}
    for name, port in ports.items():
        if not 1 <= port <= 65535:
            msg = f"--{name.replace('_', '-')}: a port is 1 to 65535, got {port}"
            raise ValueError(msg)
    if args.deadline is not None and not 1 <= args.deadline <= 3600:
        msg = f"--deadline: write 1 to 3600 seconds, got {args.deadline:g}"
        raise ValueError(msg)
    snmp: dict[str, Any] = {} if args.user is None else {"version": 3, "user": args.user}
    for key in ("community", "auth", "priv"):
        file = getattr(args, f"{key}_file")
        if file is not None:
            snmp[key] = {"file": str(Path(file).absolute())}
    for key in ("auth_protocol", "priv_protocol"):
        if getattr(args, key) is not None:
            snmp[key] = getattr(args, key)
    options = SnmpOptions.model_validate({"kind": "snmp", "host": "any", **snmp})
    for secret in (options.auth, options.priv):
        if secret is not None:
            secret.read()
    community = b"public" if options.community is None else options.community.read()
    return Wanted(kinds=kinds, snmp=snmp, community=community, **ports)


def _with_targets(wanted: "Wanted", targets: "Targets") -> "Wanted":
    from dataclasses import replace

    return replace(wanted, addresses=targets.addresses, known=targets.known)


class _Progress:
    """One line on a terminal's stderr that is drawn over, at most ten times a second."""

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


# --- Telling ----------------------------------------------------------------------------------------------------------


def _tell(search: "Search", targets: "Targets", took_s: float, limit_s: float, secrets: Mapping[str, str]) -> int:
    from powerguard.cli.discover_settings import as_yaml
    from powerguard.cli.install_host import has_bmc

    told = sys.stderr
    for note in targets.notes:
        print(f"note: {clean(note)}", file=told)
    for other in search.others:
        print(f"note: {clean(other.where)}: {clean(other.why)}", file=told)
    if not search.whole:
        print(f"note: cut short after {limit_s:g} s; --deadline gives it more", file=told)
    if not search.found:
        looked = f"{len(targets.addresses)} addresses" if len(targets.addresses) != 1 else targets.addresses[0]
        print(f"Nothing found on {looked} in {duration(took_s)}.", file=told)
        print("Name the card's address or network.", file=told)
        print("A card with another community than `public` needs --community-file.", file=told)
        print("A card that speaks SNMP version 3 alone needs --user and its files.", file=told)
        return EX_NOTHING
    # Into a file all of it is YAML: what was found stands there as a comment.
    on_screen = sys.stdout.isatty()
    lines = table([_HEAD, *(_row(one, Paint()) for one in search.found)], indent="" if on_screen else "# ")
    print("\n".join(lines))
    print()
    text = as_yaml(search.found, bmc=has_bmc(Path("/")))
    print(text or "# No UPS that could be a source.", end="" if text else "\n")
    sys.stdout.flush()
    for name, file in secrets.items():
        print(f"secret: {name}: powerguard secret set {name} < {clean(file)}; powerguard install", file=told)
    return 0


_HEAD: Final = ("WHAT", "WHERE", "NAME", "SUPPLY", "RUNTIME", "CHARGE", "LOAD", "FAMILY", "MODEL")


def _row(one: "Found", paint: Paint) -> tuple[str, ...]:
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


def _shape(search: "Search", targets: "Targets", took_s: float, secrets: Mapping[str, str]) -> dict[str, Any]:
    from dataclasses import asdict

    from powerguard.cli.discover_settings import as_yaml, settings_of
    from powerguard.cli.install_host import has_bmc

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
