"""Makes our settings of NUT's: upsmon.conf says what feeds this host, ups.conf how it is reached.

The words of a file are those that NUT reads (common/parseconf.c): `"..."` is one word, even over the end of a line; a
backslash takes the next character as it is, and a line goes on where that is a newline; `=` is a word of its own; `#`
outside quotes begins a comment, even within a word. Facts about NUT are those of 2.8.0; the figures were measured with
upsd, dummy-ups and snmp-ups.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from powerguard.cli.imports.draft import HOST, Draft, Line, ReadError, Ups, number, read, source_at
from powerguard.settings.ups_models import from_data_sheet

FOLDERS: Final = ("/etc/nut", "/etc/ups", "/usr/local/ups/etc")
"""Where Debian's packages, those of Red Hat and SUSE, and NUT's own sources keep its files."""
FILES: Final = ("nut.conf", "ups.conf", "upsd.conf", "upsmon.conf", "upssched.conf")
PORT: Final = 3493
LOCAL: Final = frozenset(("localhost", "127.0.0.1", "::1", "ip6-localhost"))
_TOKEN: Final = re.compile(
    r"""(?P<end>\n) | \#[^\n]* | "(?P<quoted>(?:\\.|[^"\\])*)"? | (?P<bare>=|(?:\\.|[^\s"\#=\\])(?:\\.|[^\s\#=\\])*)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPED: Final = re.compile(r"\\(.)|\n", re.DOTALL)
_DROPPED: Final = re.compile(r"[^\t\n\v\f\r -\x7e]")
_SYSTEM: Final = re.compile(r"([^@]+)(?:@(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?)?")
_NUT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_USER: Final = re.compile(r"[!-~]{1,64}")
_ANY: Final = frozenset(("0.0.0.0", "::", "*", "127.0.0.1"))  # noqa: S104 - read, not bound
ROLES: Final = {"primary": "primary", "master": "primary", "secondary": "secondary", "slave": "secondary"}
_AUTH: Final = {"MD5", "SHA", "SHA-224", "SHA-256", "SHA-384", "SHA-512"}
_PRIV: Final = {"DES", "AES", "AES-192", "AES-256"}
_FULL_WALK: Final = frozenset(("snmp-ups", "usbhid-ups"))
_SLOW_S: Final = 5.0
_HINTS: Final = ("ONBATT", "ONLINE", "LOWBATT", "FSD", "COMMBAD")
"""Events of upsmon that are worth an earlier poll."""


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
class Section:
    """A section of ups.conf. values: the last value of each key, with its line; a flag has ""."""

    name: str
    where: str
    values: dict[str, tuple[str, str]] = field(default_factory=dict)

    def text(self, key: str, default: str = "") -> str:
        """Return the last value of a key."""
        return self.values.get(key, (default, ""))[0]

    def place(self, key: str) -> str:
        """Return the place of the last line with this key, or of the section."""
        return self.values.get(key, ("", self.where))[1]


@dataclass(slots=True)
class Nut:
    """Everything that was read. files: the path of each file that was, by its name."""

    files: dict[str, str] = field(default_factory=dict)
    monitors: list[Monitor] = field(default_factory=list)
    directives: dict[str, list[Line]] = field(default_factory=dict)
    drivers: dict[str, Section] = field(default_factory=dict)
    all_drivers: Section = field(default_factory=lambda: Section("", ""))
    listens: list[tuple[str, int]] = field(default_factory=list)
    timers: list[Line] = field(default_factory=list)
    mode: str = ""

    def place(self, name: str, directive: str = "") -> str:
        """Return the place of a directive; the file if it is not set."""
        lines = self.directives.get(directive, [])
        return lines[-1].where if lines else self.files.get(name, name)

    def value(self, directive: str) -> str:
        """Return the first word after a directive of upsmon.conf, "" without one; the last line counts."""
        lines = self.directives.get(directive, [])
        return lines[-1].words[1] if lines and len(lines[-1].words) > 1 else ""

    def seconds(self, directive: str, default: float) -> float:
        """Return a directive's number; NUT's own default if it is not set or not a number."""
        found = number(self.value(directive))
        return default if found is None else found


# --- Reading ----------------------------------------------------------------------------------------------------------


def folder(root: Path = Path("/")) -> Path:
    """Return the folder of NUT's files on this host, which its packages call differently."""
    known = [root / place[1:] for place in FOLDERS]
    return next(filter(Path.is_dir, known), known[0])


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
    take = {
        "nut.conf": _take_mode,
        "ups.conf": _take_drivers,
        "upsd.conf": _take_server,
        "upsmon.conf": _take_upsmon,
        "upssched.conf": _take_timers,
    }
    for name in FILES:
        if name not in found:
            continue
        try:
            text = read(found[name])
        except ReadError as error:
            failed.append(str(error))
            draft.warn("unreadable", str(found[name]), "cannot be read, so it was left out", "run this as root")
            continue
        file = str(found[name])
        nut.files[name] = file
        draft.files.append(file)
        take[name](nut, shell_words(text, file) if name == "nut.conf" else nut_words(text, file), draft)
    if not nut.files:
        raise ReadError("\n".join(failed))
    return nut


def nut_words(text: str, file: str) -> list[Line]:
    """Divide a file of NUT's into lines of words. Total: whatever the text is, it has an answer."""
    text = _DROPPED.sub("", text)
    lines: list[Line] = []
    words: list[str] = []
    row, began, counted = 1, 0, 0
    for token in _TOKEN.finditer(text):
        row, counted = row + text.count("\n", counted, token.start()), token.start()
        word = token["bare"] if token["quoted"] is None else token["quoted"]
        if word is not None:
            began = began or row
            words.append(_ESCAPED.sub(lambda found: (found[1] or "").strip("\n"), word))
        elif token["end"] is not None and words:
            lines.append(Line(file, began, tuple(words)))
            words, began = [], 0
    if words:
        lines.append(Line(file, began, tuple(words)))
    return lines


def nut_directive(text: str, name: str) -> tuple[str, ...]:
    """Return the words after the name on its last line in a file of NUT's; () if there is none."""
    found = [line.words[1:] for line in nut_words(text, "") if line.words[0] == name]
    return found[-1] if found else ()


def goes_on(command: str) -> bool:
    """Say whether a second command follows in upsmon's shell where the first one ends with 0, as our script does."""
    try:
        return not {";", "&", "&&", "|"}.isdisjoint(shlex.shlex(command, posix=True, punctuation_chars=True))
    except ValueError:
        return False


def asking_first(command: str) -> str:
    """Return the line of upsmon.conf that runs a command only where powerguard does not own the shutdown."""
    alone = f"/bin/sh -c {shlex.quote(command)}" if goes_on(command) else command
    escaped = alone.replace("\\", r"\\").replace('"', r"\"")
    return f'SHUTDOWNCMD "/usr/lib/powerguard/nut/powerguard-shutdown {escaped}"'


def nut_sections(lines: list[Line]) -> tuple[Section, dict[str, Section]]:
    """Return the values before any section, and the sections by name. NUT passes over a line that is neither."""
    current = before = Section("", "")
    sections: dict[str, Section] = {}
    for line in lines:
        first, *rest = line.words
        if first.startswith("[") and first.endswith("]") and len(first) > 2:
            current = sections.setdefault(first[1:-1], Section(first[1:-1], line.where))
        elif not rest:
            current.values[first] = "", line.where
        elif rest[0] == "=" and len(rest) > 1:
            current.values[first] = rest[1], line.where
    return before, sections


def shell_words(text: str, file: str) -> list[Line]:
    """Return the assignments (name, value) of nut.conf, which a shell and systemd read. Quotes are removed."""
    lines: list[Line] = []
    for row, raw in enumerate(text.split("\n"), start=1):
        name, equals, rest = raw.strip().removeprefix("export ").partition("=")
        name = name.strip()
        if not equals or not name.isidentifier() or not name.isascii():
            continue
        value = rest.strip()
        quote = value[:1]
        value = value[1:].partition(quote)[0] if quote and quote in "'\"" else value.partition(" #")[0].strip()
        lines.append(Line(file, row, (name, value)))
    return lines


def _take_mode(nut: Nut, lines: list[Line], _draft: Draft) -> None:
    nut.mode = next((line.words[1] for line in reversed(lines) if line.words[0] == "MODE"), "")


def _take_drivers(nut: Nut, lines: list[Line], _draft: Draft) -> None:
    nut.all_drivers, nut.drivers = nut_sections(lines)


def _take_server(nut: Nut, lines: list[Line], _draft: Draft) -> None:
    for line in lines:
        nut.directives.setdefault(line.words[0], []).append(line)
        if line.words[0] == "LISTEN":
            host, port_text, *_ = [*line.words[1:], "", ""]
            port = number(port_text) if port_text else PORT
            if port is not None and 0 < port < 65536 and (HOST.fullmatch(host) or host == "*"):
                nut.listens.append((host, int(port)))


def _take_timers(nut: Nut, lines: list[Line], _draft: Draft) -> None:
    nut.timers = lines


def _take_upsmon(nut: Nut, lines: list[Line], draft: Draft) -> None:
    for line in lines:
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
        elif not any(
            (known.name, known.host, known.port) == (monitor.name, monitor.host, monitor.port) for known in nut.monitors
        ):
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
    if not _NUT_NAME.fullmatch(name) or not HOST.fullmatch(host) or not 0 < port < 65536:
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
        draft.presume_feeds()
    _budget(nut, draft)
    _check(nut, draft)


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
    delay_s = None if section is None else number(section.text("offdelay") or nut.all_drivers.text("offdelay"))
    return 20.0 if delay_s is None else delay_s


def _snmp_first(section: Section, ups: Ups, draft: Draft) -> None:
    """Read the card directly; upsd stays in the list, because only upsd reports a forced shutdown."""
    host, _, port_text = section.text("port").partition(":")
    source = source_at("snmp", host, port_text, 161)
    if source is None:
        draft.warn("odd_driver", section.place("port"), "snmp-ups without an address in port", "port = 10.0.0.5")
        return
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
        algorithm = section.text(protocol, default).upper().replace("SHA2", "SHA-2").replace("AES128", "AES")
        algorithm = re.sub(r"(SHA|AES)(?=[0-9])", r"\1-", algorithm)
        if algorithm not in known:
            draft.warn(
                "odd_driver",
                section.place(protocol),
                f"powerguard does not support {protocol}",
                f"one of {', '.join(sorted(known))}",
            )
            algorithm = default
        what = f"SNMP {whose} passphrase of {ups.name}"
        source[key] = draft.secret(f"snmp-{key}", section.text(secret), ups.name, what, section.place(secret))
        source[f"{key}_protocol"] = algorithm


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
    draft.minimum_supplies = max(1, min(wanted, total, 16))


def _budget(nut: Nut, draft: Draft) -> None:
    """Convert the low-battery limits of ups.conf."""
    for section in nut.drivers.values():
        for key in ("override.battery.runtime.low", "default.battery.runtime.low"):
            limit_s = number(section.text(key))
            if limit_s is not None and 20 <= limit_s <= 1800:
                draft.budget["low_battery_s"] = limit_s
                draft.about_budget["low_battery_s"] = f"{key}, {section.place(key)}"
                return


# --- What to look at --------------------------------------------------------------------------------------------------


def _check(nut: Nut, draft: Draft) -> None:
    """Note what makes NUT a slow or a silent source, and what disturbs powerguard while both run."""
    if "nut.conf" in nut.files and nut.mode in ("", "none"):
        draft.warn(
            "mode_none",
            nut.place("nut.conf"),
            "MODE is none or not set: NUT is not started at boot",
            "standalone, netserver or netclient, while powerguard reads upsd",
        )
    for section in nut.drivers.values():
        _check_driver(nut, section, draft)
    age_s = nut.seconds("MAXAGE", 15)
    if age_s > 15:
        where = nut.place("upsd.conf", "MAXAGE")
        draft.warn("maxage", where, f"MAXAGE {age_s:g}: upsd reports data of that age as new", "15 or less")
    if "upsmon.conf" in nut.files:
        _check_upsmon(nut, draft)
    for line in nut.timers:
        if line.words[:2] == ("AT", "ONBATT") and len(line.words) > 5 and line.words[3].startswith("START-TIMER"):
            _check_timer(line, draft)


def _check_driver(nut: Nut, section: Section, draft: Draft) -> None:
    driver = section.text("driver")
    pollfreq = section.values.get("pollfreq") or nut.all_drivers.values.get("pollfreq")
    poll_s = 30.0 if pollfreq is None else number(pollfreq[0])
    if driver in _FULL_WALK and poll_s is not None and poll_s > _SLOW_S:
        where = section.where if pollfreq is None else pollfreq[1]
        setting = f"pollfreq {poll_s:g}" + (" (NUT's default)" if pollfreq is None else "")
        late = "upsd learns of an outage 12 to 30 s late (measured)" if driver == "snmp-ups" else "charge and runtime"
        late += "" if driver == "snmp-ups" else " are that old; the status itself comes every pollinterval"
        draft.warn("pollfreq", where, f"{setting}: {late}", "pollfreq = 1" if driver == "snmp-ups" else "pollfreq = 5")
    if driver == "snmp-ups":
        draft.warn(
            "killpower_snmp",
            section.place("driver"),
            "upsdrvctl shutdown runs at the very end of a shutdown, when the network is down: over SNMP it "
            "never reaches the card, so the UPS never cuts its output",
            "let the BMC power the host on (bmc: policy: ensure), not the UPS",
        )
    if "override.battery.charge.low" in section.values:
        draft.note(
            "low_by_charge",
            section.place("override.battery.charge.low"),
            "low battery by charge: powerguard counts energy, and reads the UPS's "
            "low-battery flag as budget.low_battery_s left",
        )


def _check_upsmon(nut: Nut, draft: Draft) -> None:
    hostsync_s = nut.seconds("HOSTSYNC", 15)
    if hostsync_s < draft.checkpoint_s:
        is_primary = any(monitor.role == "primary" for monitor in nut.monitors)
        draft.warn(
            "hostsync",
            nut.place("upsmon.conf", "HOSTSYNC"),
            f"HOSTSYNC {hostsync_s:g}: the primary waits that long for the others, and a checkpoint takes "
            f"{draft.checkpoint_s:g} s" + ("" if is_primary else "; what counts is the primary's"),
            f"HOSTSYNC {-int(-draft.checkpoint_s // 1)} or more, on the primary, as long as the battery has it",
        )
    _check_times(nut, draft)
    _check_end(nut, draft)
    if nut.value("CERTVERIFY") == "1" or nut.value("FORCESSL") == "1":
        draft.note(
            "certificates",
            nut.place("upsmon.conf", "CERTPATH" if "CERTPATH" in nut.directives else "CERTVERIFY"),
            "tls: required always verifies upsd's certificate: name its authority (a PEM file) as ca, unless the host "
            "knows it; CERTPATH of NUT is a folder or a database of NSS (certutil -L -d FOLDER -n NAME -a prints one)",
        )
    if "SHUTDOWNCMD" not in nut.directives:
        draft.warn(
            "no_shutdowncmd",
            nut.place("upsmon.conf"),
            "no SHUTDOWNCMD: upsmon does not shut the host down",
            asking_first("/sbin/shutdown -h +0"),
        )
    elif "powerguard" not in " ".join(nut.directives["SHUTDOWNCMD"][-1].words):
        draft.note(
            "shutdowncmd",
            nut.place("upsmon.conf", "SHUTDOWNCMD"),
            "while both run, only one of them may shut the host down: write "
            + asking_first(" ".join(nut.directives["SHUTDOWNCMD"][-1].words[1:])),
        )


def _check_times(nut: Nut, draft: Draft) -> None:
    """Warn of upsmon's own times: until powerguard is armed, upsmon is what shuts this host down."""
    poll_s, dead_s, final_s = nut.seconds("POLLFREQ", 5), nut.seconds("DEADTIME", 15), nut.seconds("FINALDELAY", 5)
    slowest_s = max(poll_s, nut.seconds("POLLFREQALERT", 5))
    if final_s > 10:
        draft.warn(
            "finaldelay",
            nut.place("upsmon.conf", "FINALDELAY"),
            f"FINALDELAY {final_s:g}: seconds of an almost empty battery in which no work is saved",
            "0 to 5; powerguard waits for the checkpoint itself",
        )
    if dead_s < 3 * slowest_s:
        draft.warn(
            "deadtime",
            nut.place("upsmon.conf", "DEADTIME"),
            f"DEADTIME {dead_s:g} is less than 3 polls of {slowest_s:g} s: one lost answer on battery shuts the host "
            "down",
            f"DEADTIME {3 * slowest_s:g}",
        )
    elif dead_s > 15:
        draft.warn(
            "deadtime",
            nut.place("upsmon.conf", "DEADTIME"),
            f"DEADTIME {dead_s:g}: upsmon needs that long to notice on battery that upsd is silent (measured with 15: "
            "20 to 40 s, because upsd's MAXAGE is added)",
            "DEADTIME 15; powerguard notices after 3 s",
        )
    if poll_s > _SLOW_S:
        where = nut.place("upsmon.conf", "POLLFREQ")
        draft.warn("upsmon_pollfreq", where, f"POLLFREQ {poll_s:g}: upsmon misses shorter outages", "1 to 5")


def _check_end(nut: Nut, draft: Draft) -> None:
    """Warn of a UPS that never cuts its output, and of hooks that are never called."""
    if any(monitor.role == "primary" for monitor in nut.monitors) and not nut.value("POWERDOWNFLAG"):
        draft.warn(
            "powerdownflag",
            nut.place("upsmon.conf"),
            "no POWERDOWNFLAG: the UPS is not ordered to cut its output, so a host that went down while utility came "
            "back stays off",
            "POWERDOWNFLAG /etc/killpower; and bmc: policy: ensure",
        )
    lines = [line for line in nut.directives.get("NOTIFYFLAG", []) if len(line.words) > 2]
    executed = {line.words[1] for line in lines if "EXEC" in line.words[2].split("+")}
    missing = [event for event in _HINTS if event not in executed]
    if nut.value("NOTIFYCMD") and missing:
        draft.warn(
            "no_exec",
            nut.place("upsmon.conf", "NOTIFYCMD"),
            f"NOTIFYCMD is not called for {', '.join(missing)}: their NOTIFYFLAG has no EXEC",
            f"NOTIFYFLAG {missing[0]} SYSLOG+WALL+EXEC, and so on",
        )
    elif executed and not nut.value("NOTIFYCMD"):
        where = next(line.where for line in lines if line.words[1] in executed)
        draft.warn("no_notifycmd", where, "EXEC without a NOTIFYCMD: no program is called", "NOTIFYCMD ...")


def _check_timer(line: Line, draft: Draft) -> None:
    seconds = number(line.words[5])
    if seconds is None:
        return
    draft.warn(
        "timer",
        line.where,
        f"a timer of {seconds:g} s on battery: if CMDSCRIPT shuts down when it fires, it does so after a fixed "
        "time, whatever the charge and whether or not the work is saved",
        "no timer: powerguard counts the energy, and acts at the last safe moment",
    )
    if 20 <= seconds <= 3600 and "blind_s" not in draft.budget:
        draft.budget["blind_s"] = seconds
        draft.about_budget["blind_s"] = f"counts only if no runtime is known; the timer of {line.where}"
