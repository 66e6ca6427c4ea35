"""Converts NUT's configuration to settings: upsmon.conf lists the UPSes of this host, ups.conf their drivers."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from powerguard.cli.imports.draft import Draft, Ups, number
from powerguard.cli.imports.words import Line, ReadError, Section, Words, nut_sections, nut_words, read, shell_words
from powerguard.settings.ups_models import from_data_sheet

FOLDERS: Final = ("/etc/nut", "/etc/ups", "/usr/local/ups/etc")
FILES: Final = ("nut.conf", "ups.conf", "upsd.conf", "upsd.users", "upsmon.conf", "upssched.conf")
PORT: Final = 3493
LOCAL: Final = frozenset(("localhost", "127.0.0.1", "::1", "ip6-localhost"))
_SYSTEM: Final = re.compile(r"([^@]+)(?:@(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?)?")
_NUT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_USER: Final = re.compile(r"[!-~]{1,64}")
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}|[0-9A-Fa-f:.]{2,45}")
_ANY: Final = frozenset(("0.0.0.0", "::", "*", "127.0.0.1"))  # noqa: S104 - read, not bound
ROLES: Final = {"primary": "primary", "master": "primary", "secondary": "secondary", "slave": "secondary"}
_AUTH: Final = {"MD5", "SHA", "SHA-224", "SHA-256", "SHA-384", "SHA-512"}
_PRIV: Final = {"DES", "AES", "AES-192", "AES-256"}


@dataclass(frozen=True, slots=True)
class Monitor:
    """A MONITOR line. role: primary or secondary. secret: its password, which only `Draft.secret` ever gets."""

    where: str
    name: str
    host: str
    port: int
    supplies: int
    user: str
    secret: str = field(repr=False)
    role: str

    @property
    def is_local(self) -> bool:
        """Say whether its upsd runs on this host."""
        return self.host in LOCAL


@dataclass(slots=True)
class Nut:
    """The files that were read. A missing file is None, and its contents are empty."""

    files: dict[str, Words] = field(default_factory=dict)
    monitors: list[Monitor] = field(default_factory=list)
    directives: dict[str, list[Line]] = field(default_factory=dict)
    drivers: dict[str, Section] = field(default_factory=dict)
    all_drivers: Section = field(default_factory=lambda: Section("", ""))
    users: dict[str, Section] = field(default_factory=dict)
    listens: list[tuple[str, int]] = field(default_factory=list)
    timers: list[Line] = field(default_factory=list)
    mode: str = ""

    def has(self, name: str) -> bool:
        """Say whether such a file was read."""
        return name in self.files

    def place(self, name: str, directive: str = "") -> str:
        """Return the place of a directive; the file if it is not set."""
        lines = self.directives.get(directive, [])
        return lines[-1].where if lines else self.files[name].file if name in self.files else name

    def value(self, directive: str, default: str = "") -> str:
        """Return the first word after a directive of upsmon.conf; the last line counts."""
        lines = self.directives.get(directive, [])
        return lines[-1].words[1] if lines and len(lines[-1].words) > 1 else default

    def seconds(self, directive: str, default: float) -> float:
        """Return a directive's number; NUT's own default if it is not set or not a number."""
        found = number(self.value(directive))
        return default if found is None else found


# --- Reading ----------------------------------------------------------------------------------------------------------


def gather(paths: list[Path]) -> dict[str, Path]:
    """Return the files of NUT among these files and folders, by their names. Raises ReadError."""
    found: dict[str, Path] = {}
    for path in paths:
        try:
            if not path.is_dir() and path.name not in FILES:
                path.stat()
                msg = f"{path}: is not named as one of {', '.join(FILES)}: name the original file"
                raise ReadError(msg)
            here = {name: path / name for name in FILES if (path / name).exists()} if path.is_dir() else {}
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            msg = f"{path}: cannot be read: {reason}"
            raise ReadError(msg) from error
        if not here and path.name not in FILES:
            msg = f"{path}: has none of {', '.join(FILES)}: name the folder that has them"
            raise ReadError(msg)
        found |= here or {path.name: path}
    return found


def load(found: dict[str, Path], draft: Draft) -> Nut:
    """Read the files. An unreadable one is a warning; raises ReadError if none can be read."""
    nut = Nut()
    failed: list[str] = []
    for name in FILES:
        if name not in found:
            continue
        try:
            text, mode = read(found[name])
        except ReadError as error:
            failed.append(str(error))
            draft.warn("unreadable", str(found[name]), "cannot be read, so it was left out", "run this as root")
            continue
        parse = shell_words if name == "nut.conf" else nut_words
        words = parse(text, str(found[name]))
        nut.files[name] = Words(words.file, words.lines, words.oddities, mode)
        draft.files.append(words.file)
        for odd in words.oddities:
            draft.warn("odd_line", odd.where, odd.what, odd.right)
    if not nut.files:
        raise ReadError("\n".join(failed))
    _take_drivers(nut, draft)
    _take_server(nut, draft)
    _take_upsmon(nut, draft)
    return nut


def _take_drivers(nut: Nut, draft: Draft) -> None:
    if nut.has("ups.conf"):
        nut.all_drivers, nut.drivers, oddities = nut_sections(nut.files["ups.conf"].lines)
        for odd in oddities:
            draft.warn("odd_line", odd.where, odd.what, odd.right)
    if nut.has("upsd.users"):
        _, nut.users, oddities = nut_sections(nut.files["upsd.users"].lines, frozenset(("upsmon",)))
        for odd in oddities:
            draft.warn("odd_line", odd.where, odd.what, odd.right)


def _take_server(nut: Nut, draft: Draft) -> None:
    if nut.has("nut.conf"):
        for line in nut.files["nut.conf"].lines:
            if line.words[0] == "MODE":
                nut.mode = line.words[1]
    if nut.has("upsd.conf"):
        for line in nut.files["upsd.conf"].lines:
            if line.words[0] == "LISTEN":
                host, port_text, *_ = [*line.words[1:], "", ""]
                port = number(port_text) if port_text else PORT
                if port is None or not 0 < port < 65536 or not (_HOST.fullmatch(host) or host == "*"):
                    draft.warn("odd_line", line.where, "LISTEN without an address and a port", "LISTEN 127.0.0.1 3493")
                else:
                    nut.listens.append((host, int(port)))
            nut.directives.setdefault(line.words[0], []).append(line)
    if nut.has("upssched.conf"):
        nut.timers = list(nut.files["upssched.conf"].lines)


def _take_upsmon(nut: Nut, draft: Draft) -> None:
    if not nut.has("upsmon.conf"):
        return
    for line in nut.files["upsmon.conf"].lines:
        if line.words[0] != "MONITOR":
            nut.directives.setdefault(line.words[0], []).append(line)
            continue
        monitor = _monitor(line)
        if isinstance(monitor, str):
            draft.warn(
                "odd_monitor",
                line.where,
                f"MONITOR: {monitor}; upsmon skips the line or stops at it",
                "MONITOR ups@host 1 user password secondary",
            )
        elif any(
            (known.name, known.host, known.port) == (monitor.name, monitor.host, monitor.port) for known in nut.monitors
        ):
            draft.warn("monitored_twice", line.where, f"{monitor.name} is monitored already", "keep one line")
        else:
            nut.monitors.append(monitor)


def _monitor(line: Line) -> Monitor | str:
    """Read a MONITOR line; a text names the error, without the line's content."""
    if len(line.words) < 6:
        return "five words must follow"
    system, supplies, user, secret, role = line.words[1:6]
    found = _SYSTEM.fullmatch(system)
    if found is None:
        return "the first word must be UPS@HOST or UPS@HOST:PORT"
    if role.lower() not in ROLES:
        return "the last word must be primary or secondary"
    power = number(supplies)
    if power is None or power != int(power) or power > 64:
        return "the second word must be a power value, such as 1"
    name, host, port = found[1], (found[2] or "localhost").strip("[]"), int(found[3] or PORT)
    if not _NUT_NAME.fullmatch(name) or not _HOST.fullmatch(host) or not 0 < port < 65536:
        return "the name of the UPS, its host or its port has characters that powerguard does not accept"
    if not _USER.fullmatch(user):
        return "the user's name has characters that powerguard does not accept"
    return Monitor(line.where, name, host, port, int(power), user, secret, ROLES[role.lower()])


# --- Making -----------------------------------------------------------------------------------------------------------


def make(nut: Nut, draft: Draft) -> None:
    """Put the UPSes into the draft: the monitored ones, else the served ones."""
    if nut.monitors:
        for monitor in nut.monitors:
            _add_monitored(nut, monitor, draft)
        _supplies(nut, draft)
    else:
        for section in nut.drivers.values():
            _add_served(nut, section, draft)
    _budget(nut, draft)


def _add_monitored(nut: Nut, monitor: Monitor, draft: Draft) -> None:
    name = draft.name_for(monitor.name)
    section = nut.drivers.get(monitor.name) if monitor.is_local else None
    password = draft.secret("upsd", monitor.secret, name, f"password of NUT's user {monitor.user}", monitor.where)
    source: dict[str, Any] = {"kind": "nut", "host": _host(nut, monitor), "port": monitor.port, "name": monitor.name}
    source |= {"user": monitor.user, "password": password}
    if nut.value("CERTVERIFY") == "1" or nut.value("FORCESSL") == "1":
        source["tls"] = "required"
    ups = Ups(name, [_without_default_port(source)], monitor.where, supplies=monitor.supplies)
    ups.about.append(f"{monitor.where}: {monitor.role}, power value {monitor.supplies}")
    if section is not None and section.text("driver") == "snmp-ups":
        _snmp_first(section, ups, draft)
    if monitor.role == "primary":
        delay_s = _output_delay_s(nut, section)
        total_s = nut.seconds("HOSTSYNC", 15) + nut.seconds("FINALDELAY", 5) + delay_s
        ups.options["forced_shutdown_delay_s"] = min(600.0, total_s)
        draft.note(
            "primary",
            monitor.where,
            f"upsmon here is the primary of {monitor.name}: it orders the other hosts to stop, which powerguard never "
            "does; keep it running while other hosts depend on it",
        )
    else:
        draft.note(
            "secondary",
            monitor.where,
            f"from a forced shutdown of {monitor.name} to output off 25 s are presumed: "
            "set forced_shutdown_delay_s to FINALDELAY and HOSTSYNC of the primary, and the UPS's delay",
        )
    _data_sheet(section, ups)
    draft.upses.append(ups)


def _add_served(nut: Nut, section: Section, draft: Draft) -> None:
    if not _NUT_NAME.fullmatch(section.name):
        draft.warn(
            "odd_name", section.where, "a name that powerguard does not accept", "letters, digits, dots and dashes"
        )
        return
    host, port = _listening(nut)
    source = {"kind": "nut", "host": host, "port": port, "name": section.name}
    ups = Ups(draft.name_for(section.name), [_without_default_port(source)], section.where)
    ups.about.append(f"{section.where}: no MONITOR line names it, so powerguard reads it without logging in")
    if section.text("driver") == "snmp-ups":
        _snmp_first(section, ups, draft)
    _data_sheet(section, ups)
    draft.upses.append(ups)


def _data_sheet(section: Section | None, ups: Ups) -> None:
    """Add the data of the model, if ups.conf names it: as nut-scanner writes it, or in the description."""
    if section is not None:
        product = section.text("product")
        named = (section.text("desc"), product, f"{section.text('vendor')} {product}" if product else "")
        ups.sheet, ups.about_sheet = from_data_sheet(filter(None, named))


def _without_default_port(source: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in source.items() if key != "port" or value != PORT}


def _listening(nut: Nut) -> tuple[str, int]:
    """Return where this host reaches its own upsd."""
    everywhere = [(host, port) for host, port in nut.listens if host in _ANY]
    if everywhere or not nut.listens:
        return "127.0.0.1", everywhere[0][1] if everywhere else PORT
    return nut.listens[0]


def _host(nut: Nut, monitor: Monitor) -> str:
    if monitor.host not in ("localhost", "ip6-localhost"):
        return monitor.host
    same = [host for host, port in nut.listens if port == monitor.port]
    return "::1" if same and all(host == "::1" for host in same) else "127.0.0.1"


def _output_delay_s(nut: Nut, section: Section | None) -> float:
    """Return the UPS's own delay to output off after `upsdrvctl shutdown`; 20 s is NUT's default."""
    told = None if section is None else number(section.text("offdelay") or nut.all_drivers.text("offdelay"))
    return 20.0 if told is None else told


def _snmp_first(section: Section, ups: Ups, draft: Draft) -> None:
    """Read the card directly; upsd stays in the list, because only upsd reports a forced shutdown."""
    host, _, port_text = section.text("port").partition(":")
    port = number(port_text) if port_text else 161
    if not _HOST.fullmatch(host) or port is None or not 0 < port < 65536:
        draft.warn("odd_driver", section.place("port"), "snmp-ups without an address in port", "port = 10.0.0.5")
        return
    source: dict[str, Any] = {"kind": "snmp", "host": host}
    if port != 161:
        source["port"] = int(port)
    version = section.text("snmp_version", "v1").lower().removeprefix("v")
    if version == "3":
        _snmp_v3(section, source, ups, draft)
    else:
        source["version"] = "2c" if version == "2c" else 1
        community = section.text("community", "public")
        if community != "public":
            what = f"SNMP community of {ups.name}"
            source["community"] = draft.secret("snmp-community", community, ups.name, what, section.place("community"))
        draft.warn(
            "snmp_forgeable",
            section.place("snmp_version"),
            f"SNMP version {source['version']}: every host on that network can forge its answers",
            "version 3 with auth, if the card has it; or a separate network",
        )
    ups.sources.insert(0, source)
    ups.about.append(f"{section.where}: driver snmp-ups; the card is asked directly, every second instead of every 30")
    ups.about.append("upsd stays as a second source: only it reports a forced shutdown")


def _snmp_v3(section: Section, source: dict[str, Any], ups: Ups, draft: Draft) -> None:
    user = section.text("secName")
    level = section.text("secLevel", "noAuthNoPriv").lower()
    source["version"] = 3
    source["user"] = user if re.fullmatch(r"[!-~]{1,32}", user) else "powerguard"
    if source["user"] != user:
        draft.warn(
            "odd_driver",
            section.place("secName"),
            "version 3 without a user name that powerguard accepts",
            "secName = the user of the card",
        )
    if level not in ("authnopriv", "authpriv"):
        draft.warn(
            "snmp_forgeable",
            section.place("secLevel"),
            "version 3 without auth can be forged like version 1",
            "secLevel = authPriv",
        )
        return
    for key, protocol, known, default, secret, whose in (
        ("auth", "authProtocol", _AUTH, "MD5", "authPassword", "authentication"),
        ("priv", "privProtocol", _PRIV, "DES", "privPassword", "privacy"),
    ):
        if key == "priv" and level != "authpriv":
            continue
        told = section.text(protocol, default).upper().replace("SHA2", "SHA-2").replace("AES128", "AES")
        told = re.sub(r"(SHA|AES)(?=[0-9])", r"\1-", told)
        if told not in known:
            draft.warn(
                "odd_driver",
                section.place(protocol),
                f"powerguard does not support {protocol}",
                f"one of {', '.join(sorted(known))}",
            )
            told = default
        what = f"SNMP {whose} passphrase of {ups.name}"
        source[key] = draft.secret(f"snmp-{key}", section.text(secret), ups.name, what, section.place(secret))
        source[f"{key}_protocol"] = told


def _supplies(nut: Nut, draft: Draft) -> None:
    """Convert power values and MINSUPPLIES: the supplies on each UPS, and how many must have power."""
    where = nut.place("upsmon.conf", "MINSUPPLIES")
    wanted = int(nut.seconds("MINSUPPLIES", 1))
    total = sum(ups.supplies for ups in draft.upses)
    for ups in draft.upses:
        if ups.supplies == 0:
            draft.note(
                "power_value_0", ups.where, f"{ups.name} has power value 0: it is read, but does not feed this host"
            )
    if total == 0:
        draft.warn(
            "nothing_feeds",
            where,
            "every power value is 0: none of the UPSes that NUT monitors here feeds this host",
            "run powerguard on the hosts that the UPS feeds, or set the power values",
        )
        for ups in draft.upses[:1]:
            ups.supplies = 1
        total = 1
    if wanted == 0:
        draft.warn(
            "minsupplies_0",
            where,
            "MINSUPPLIES 0: upsmon never shuts this host down; powerguard would",
            "keep mode: dry-run if you intend this",
        )
    elif wanted > total:
        draft.warn(
            "minsupplies",
            where,
            f"MINSUPPLIES {wanted} of {total} power supplies: upsmon refuses to start",
            f"at most {total}",
        )
    draft.minimum_supplies = max(1, min(wanted, total, 16))


def _budget(nut: Nut, draft: Draft) -> None:
    """Convert the low-battery limits of ups.conf."""
    for section in nut.drivers.values():
        for key in ("override.battery.runtime.low", "default.battery.runtime.low"):
            told = number(section.text(key))
            if told is not None and 20 <= told <= 1800:
                draft.budget["low_battery_s"] = told
                draft.about_budget["low_battery_s"] = f"{key}, {section.place(key)}"
                return
