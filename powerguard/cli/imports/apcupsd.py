"""Makes powerguard's settings from apcupsd's: apcupsd.conf and the event scripts next to apccontrol.

Facts about apcupsd are those of 3.14.14. Defaults are those of its source (apcconfig.c), which Debian's apcupsd.conf
changes: MINUTES 5 becomes 3.
"""

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from powerguard.cli.imports.draft import FORCE_AFTER_S, HOST, RESERVE_S, Draft, Line, ReadError, Ups, read, source_at

FOLDER: Final = "/etc/apcupsd"
NIS_PORT: Final = 3551
TYPES: Final = ("dumb", "apcsmart", "net", "usb", "snmp", "pcnet", "modbus", "test")
EVENTS: Final = (
    "powerout", "onbattery", "offbattery", "mainsback", "failing", "timeout", "loadlimit", "runlimit", "emergency",
    "remotedown", "doshutdown", "doreboot", "annoyme", "changeme", "commfailure", "commok", "startselftest",
    "endselftest", "battdetach", "battattach", "killpower",
)  # fmt: skip
DEFAULTS: Final = {"POLLTIME": 60.0, "MINUTES": 5.0, "TIMEOUT": 0.0, "NISPORT": 3551.0}
ALIASES: Final = {"SERVERPORT": "NISPORT", "NETSTATUS": "NETSERVER"}
_SPACE: Final = " \t\v\f\r"
_STOPS: Final = re.compile(r"^[^#\n]*\b(?:shutdown|poweroff|halt|telinit|init\s+0)\b", re.MULTILINE)
_STOCK: Final = "This shell script if placed in /etc/apcupsd"
"""In the scripts that come with apcupsd, which only send mail."""
_SUPPRESSES: Final = re.compile(r"^[^#\n]*\bexit\s+99\b", re.MULTILINE)


@dataclass(slots=True)
class Conf:
    """One apcupsd.conf. values: the line of each key that counts, the last. scripts: those of SCRIPTDIR, by event."""

    file: str
    values: dict[str, Line] = field(default_factory=dict)
    scripts: dict[str, Path] = field(default_factory=dict)

    def text(self, key: str, default: str = "") -> str:
        """Return the value of a key."""
        return self.values[key].words[1] if key in self.values else default

    def word(self, key: str, default: str = "") -> str:
        """Return the first word of a value in lower case: for a choice, apcupsd reads only that."""
        return next(iter(re.split(r"[ \t\v\f\r]", self.text(key))), "").lower() or default

    def number(self, key: str) -> float:
        """Return the number of a key, apcupsd's own default if it is not set or not a number."""
        found = re.match(r"[+-]?[0-9]{1,9}", self.text(key))
        return DEFAULTS[key] if found is None else float(found[0])

    def place(self, key: str) -> str:
        """Return the place of a key; the file if it is not set."""
        return self.values[key].where if key in self.values else self.file


# --- Reading ----------------------------------------------------------------------------------------------------------


def gather(paths: list[Path]) -> list[Path]:
    """Return the apcupsd.conf files among these files and folders. Raises ReadError."""
    found: list[Path] = []
    for path in paths:
        try:
            here = sorted(each for each in path.iterdir() if each.match("apcupsd*.conf")) if path.is_dir() else [path]
            path.stat()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            msg = f"{path}: cannot be read: {reason}"
            raise ReadError(msg) from error
        if not here:
            msg = f"{path}: holds no apcupsd.conf (name the folder or the file)"
            raise ReadError(msg)
        found += here
    return found


def load(path: Path, draft: Draft) -> Conf:
    """Read one apcupsd.conf and look for the scripts next to its apccontrol. Raises ReadError."""
    conf = Conf(str(path))
    for line in apcupsd_words(read(path), conf.file):
        conf.values[ALIASES.get(line.words[0], line.words[0])] = line
    draft.files.append(conf.file)
    named = Path(conf.text("SCRIPTDIR") or path.parent)
    is_copy = path.parent != Path(FOLDER) and named != path.parent
    conf.scripts = (_scripts(path.parent) if is_copy else {}) or _scripts(named)
    if is_copy and not conf.scripts:
        draft.note(
            "scripts_elsewhere",
            conf.place("SCRIPTDIR"),
            f"there is no event script next to this file, nor in SCRIPTDIR ({named}) of this host: none was checked",
        )
    return conf


def apcupsd_words(text: str, file: str) -> list[Line]:
    """Return the pairs (KEY, the rest of the line without a comment) of an apcupsd.conf."""
    lines: list[Line] = []
    for row, raw in enumerate(text.split("\n"), start=1):
        bare = raw.strip(f"{_SPACE}\0")
        if bare and not bare.startswith("#"):
            key, *rest = re.split(f"[{_SPACE}]+", bare, maxsplit=1)
            value = (rest[0] if rest else "").partition("#")[0].rstrip()
            lines.append(Line(file, row, (key.upper(), value)))
    return lines


def _scripts(folder: Path) -> dict[str, Path]:
    """Return the event scripts of a folder, by event."""
    found: dict[str, Path] = {}
    for event in EVENTS:
        with contextlib.suppress(OSError, ValueError):
            if (folder / event).is_file():
                found[event] = folder / event
    return found


# --- Making -----------------------------------------------------------------------------------------------------------


def make(conf: Conf, draft: Draft) -> None:
    """Put the UPS of one apcupsd into the draft, with its warnings."""
    kind = conf.word("UPSTYPE")
    before = len(draft.upses)
    if kind not in TYPES:
        draft.warn(
            "no_upstype",
            conf.place("UPSTYPE"),
            "apcupsd does not know this UPSTYPE and does not start",
            f"one of {', '.join(TYPES)}",
        )
    elif kind == "snmp":
        _snmp(conf, draft)
    elif kind == "net":
        _net(conf, draft)
    else:
        _local(conf, kind, draft)
    if len(draft.upses) == before:
        return
    _budget(conf, draft)
    for event, script in conf.scripts.items():
        if _script(event, script, draft) and event == "doshutdown":
            for source in draft.upses[-1].sources:
                if source["kind"] == "apcupsd" and kind != "net":
                    source["leaves_shutdown"] = True


def _add(conf: Conf, source: dict[str, Any], about: str, draft: Draft) -> Ups:
    wanted = conf.text("UPSNAME") or (Path(conf.file).stem.removeprefix("apcupsd").strip(".-_") or "ups")
    ups = Ups(draft.name_for(wanted), [source], conf.file)
    ups.about.append(f"{conf.place('UPSTYPE')}: {about}")
    draft.upses.append(ups)
    return ups


def _snmp(conf: Conf, draft: Draft) -> None:
    """Take DEVICE host:port:vendor:community over: the card is asked directly."""
    host, port_text, _, community = [*conf.text("DEVICE").split(":", 3), "", "", "", ""][:4]
    source = source_at("snmp", host, port_text, 161)
    if source is None:
        draft.warn(
            "odd_device",
            conf.place("DEVICE"),
            "DEVICE is not the address of a card",
            "DEVICE host:port:vendor:community",
        )
        return
    source["version"] = 1  # apcupsd speaks no other
    ups = _add(conf, source, "UPSTYPE snmp; the card is asked directly", draft)
    if community and community != "public":
        what = f"SNMP community of {ups.name}"
        source["community"] = draft.secret("snmp-community", community, ups.name, what, conf.place("DEVICE"))
    draft.warn(
        "snmp_forgeable",
        conf.place("DEVICE"),
        "SNMP version 1: every host on that network can forge its answers",
        "version 3 with auth, which powerguard can use and apcupsd cannot",
    )
    draft.warn(
        "killpower_snmp",
        conf.place("UPSTYPE"),
        "killpower over SNMP does not work: the SET lacks its instance and is refused, but apcupsd exits with 0 "
        "(measured), and Debian sends it when the network is already down",
        "let the BMC power the host on (bmc: policy: ensure), not the UPS",
    )


def _net(conf: Conf, draft: Draft) -> None:
    device = conf.text("DEVICE")
    host, _, port_text = device.rpartition(":") if ":" in device else (device, "", "")
    source = source_at("apcupsd", host, port_text, NIS_PORT)
    if source is None:
        draft.warn("odd_device", conf.place("DEVICE"), "DEVICE is not the address of an apcupsd", "DEVICE host:3551")
        return
    _add(conf, source, "UPSTYPE net; its master is asked directly", draft)


def _local(conf: Conf, kind: str, draft: Draft) -> None:
    port = conf.number("NISPORT")
    address = conf.text("NISIP", "0.0.0.0")  # noqa: S104 - read, not bound
    host = address if HOST.fullmatch(address) and address not in ("0.0.0.0", "localhost") else "127.0.0.1"  # noqa: S104
    source: dict[str, Any] = {"kind": "apcupsd", "host": host}
    if port != NIS_PORT and 0 < port < 65536:
        source["port"] = int(port)
    _add(conf, source, f"UPSTYPE {kind}; apcupsd keeps reading the UPS, and powerguard asks apcupsd", draft)
    if conf.word("NETSERVER", "on") == "off":
        where = conf.place("NETSERVER")
        draft.warn(
            "netserver_off",
            where,
            "apcupsd's information server is off, so powerguard cannot ask it",
            "NETSERVER on, NISIP 127.0.0.1",
        )
    if kind == "dumb":
        draft.warn(
            "dumb",
            conf.place("UPSTYPE"),
            "a UPS that reports neither charge nor runtime: powerguard could not compute the runtime",
            "runtime_table and rating_w from the data sheet",
        )
    poll_s = conf.number("POLLTIME")
    if poll_s > 5:
        setting = f"POLLTIME {poll_s:g}" + ("" if "POLLTIME" in conf.values else " (apcupsd's default)")
        draft.warn(
            "polltime",
            conf.place("POLLTIME"),
            f"{setting}: an outage is seen after up to {poll_s:g} s, and shorter ones not at all",
            "POLLTIME 1",
        )
    shared = conf.word("UPSCLASS", "standalone"), conf.word("UPSMODE", "disable")
    if any("share" in word for word in shared):
        draft.warn(
            "shareups",
            conf.place("UPSCLASS"),
            "a Share-UPS: it signals its other hosts over a wire that powerguard does not support",
            "powerguard on each host, with the card or this apcupsd as its source",
        )


# --- Polling ----------------------------------------------------------------------------------------------------------


def _budget(conf: Conf, draft: Draft) -> None:
    """Be no less careful than MINUTES was. TIMEOUT stands in only where nothing else is known."""
    reserve_s = min(1800.0, 60 * conf.number("MINUTES") - FORCE_AFTER_S)
    if "MINUTES" in conf.values and reserve_s > max(RESERVE_S, float(draft.budget.get("reserve_s", 0.0))):
        draft.budget["reserve_s"] = reserve_s
        draft.about_budget["reserve_s"] = (
            f"so that the stop begins no later than MINUTES had it, {conf.place('MINUTES')}"
        )
    timeout_s = conf.number("TIMEOUT")
    if 20 <= timeout_s <= 3600:
        draft.budget["blind_s"] = timeout_s
        draft.about_budget["blind_s"] = f"counts only if no runtime is known; TIMEOUT, {conf.place('TIMEOUT')}"


def _script(event: str, script: Path, draft: Draft) -> bool:
    """Check an event script; return whether it calls powerguard."""
    where = str(script)
    try:
        text = read(script)
    except ReadError:
        draft.warn("unreadable", where, "cannot be read, so it was left out", "run this as root")
        return False
    if not os.access(script, os.X_OK):
        return False  # apccontrol passes over it
    if "powerguard" in text:
        draft.note("script_ours", where, "calls powerguard already")
        return True
    if event == "doshutdown" and _SUPPRESSES.search(text):
        draft.warn(
            "script_suppresses",
            where,
            "always exits with 99, so apcupsd's own shutdown never runs",
            "/usr/lib/powerguard/apcupsd/powerguard-event exits with 99 only while powerguard owns the shutdown",
        )
    elif event not in ("doshutdown", "doreboot", "killpower") and _STOPS.search(text):
        draft.warn(
            "script_shuts_down",
            where,
            f"shuts the host down at {event}, whatever the charge",
            "leave that to powerguard",
        )
    elif _STOCK not in text:
        draft.note(
            "script",
            where,
            "a script of your own: keep it, or replace it by /usr/lib/powerguard/apcupsd/powerguard-event",
        )
    return False
