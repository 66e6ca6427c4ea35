"""Converts apcupsd's configuration to settings, with warnings: apcupsd.conf, and the event scripts next to apccontrol.

Facts about apcupsd 3.14.14, measured against an SNMP card and against a simulated master: the figures in the texts
below are from there. Defaults are those of its source (apcconfig.c), which Debian's apcupsd.conf changes: MINUTES 5
becomes 3, BATTERYLEVEL 10 becomes 5.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from powerguard.cli.imports.draft import FORCE_AFTER_S, RESERVE_S, Draft, Ups, has_mode, number
from powerguard.cli.imports.words import Line, ReadError, Words, apcupsd_words, read

FOLDER: Final = "/etc/apcupsd"
MAGIC: Final = "## apcupsd.conf v1.1 ##"
NIS_PORT: Final = 3551
TYPES: Final = ("dumb", "apcsmart", "net", "usb", "snmp", "pcnet", "modbus", "test")
EVENTS: Final = (
    "powerout", "onbattery", "offbattery", "mainsback", "failing", "timeout", "loadlimit", "runlimit", "emergency",
    "remotedown", "doshutdown", "doreboot", "annoyme", "changeme", "commfailure", "commok", "startselftest",
    "endselftest", "battdetach", "battattach", "killpower",
)  # fmt: skip
DEFAULTS: Final = {"POLLTIME": 60.0, "ONBATTERYDELAY": 6.0, "BATTERYLEVEL": 10.0, "MINUTES": 5.0, "TIMEOUT": 0.0,
                   "KILLDELAY": 0.0, "ANNOY": 300.0, "ANNOYDELAY": 60.0, "NISPORT": 3551.0}  # fmt: skip
NUMBERS: Final = frozenset((
    *DEFAULTS, "EVENTSFILEMAX", "STATTIME", "DATATIME", "LOTRANSFER", "HITRANSFER", "LOWBATT", "WAKEUP", "RETURNCHARGE",
    "OUTPUTVOLTS", "SLEEP", "NETTIME", "NETPORT",
))  # fmt: skip
_ON_OFF: Final = ("on", "off")
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "UPSTYPE": TYPES,
    "NETSERVER": _ON_OFF,
    "LOGSTATS": _ON_OFF,
    "NOLOGON": ("disable", "timeout", "percent", "minutes", "always"),
    "UPSCLASS": ("standalone", "shareslave", "sharemaster"),
    "UPSMODE": ("disable", "share"),
}
TEXTS: Final = frozenset((
    "UPSNAME", "UPSCABLE", "DEVICE", "LOCKFILE", "SCRIPTDIR", "PWRFAILDIR", "NOLOGINDIR", "NISIP", "EVENTSFILE",
    "STATFILE", "FACILITY", "BATTDATE", "SENSITIVITY", "BEEPSTATE", "SELFTEST", "SLAVE", "USERMAGIC",
))  # fmt: skip
KEYS: Final = NUMBERS | TEXTS | frozenset(CHOICES)
"""Values that apcupsd 3.14.14 accepts (tried): with any other it ends with an error."""
ALIASES: Final = {"SERVERPORT": "NISPORT", "NETSTATUS": "NETSERVER"}
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}|[0-9A-Fa-f:.]{2,45}")
_STOPS: Final = re.compile(r"^[^#\n]*\b(?:shutdown|poweroff|halt|telinit|init\s+0)\b", re.MULTILINE)
_SLEEPS: Final = re.compile(r"^[^#\n]*\bsleep\s+([0-9]{1,6})\b", re.MULTILINE)
_SUPPRESSES: Final = re.compile(r"^[^#\n]*\bexit\s+99\b", re.MULTILINE)


@dataclass(slots=True)
class Conf:
    """One apcupsd.conf. values: the line of each key that counts, the last. scripts: those of SCRIPTDIR, by event."""

    file: str
    words: Words
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
        found = re.match(r"\+?([0-9]{1,9})", self.text(key))
        return DEFAULTS[key] if found is None else float(found[1])

    def place(self, key: str) -> str:
        """Return the place of a key; the file if it is not set."""
        return self.values[key].where if key in self.values else self.file

    def told(self, key: str) -> str:
        """Return a key and its number, marked as apcupsd's default if it is not set."""
        return f"{key} {self.number(key):g}" + ("" if key in self.values else " (apcupsd's default)")


# --- Reading ----------------------------------------------------------------------------------------------------------


def gather(paths: list[Path]) -> list[Path]:
    """Return the apcupsd.conf files among these files and folders. Raises ReadError."""
    found: list[Path] = []
    for path in paths:
        try:
            here = sorted(path.glob("apcupsd*.conf")) if path.is_dir() else [path]
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
    text, mode = read(path)
    words = apcupsd_words(text, str(path))
    words = Words(words.file, words.lines, words.oddities, mode)
    conf = Conf(str(path), words)
    draft.files.append(conf.file)
    for odd in words.oddities:
        draft.warn("odd_line", odd.where, odd.what, odd.right)
    if not text.startswith(MAGIC):
        draft.note("old_file", f"{path}:1", "the first line is not that of apcupsd 3.14: it warns, and continues")
    for line in words.lines:
        key = ALIASES.get(line.words[0], line.words[0])
        if _refused(key, line, draft):
            continue
        conf.values[key] = line
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


def _scripts(folder: Path) -> dict[str, Path]:
    """Return the event scripts of a folder, by event."""
    found: dict[str, Path] = {}
    for event in EVENTS:
        with contextlib.suppress(OSError, ValueError):
            if (folder / event).is_file():
                found[event] = folder / event
    return found


def _refused(key: str, line: Line, draft: Draft) -> bool:
    """Report a line over which apcupsd ends with an error; return whether it does."""
    value = line.words[1]
    ends = "apcupsd ends with an error over this line"
    if key not in KEYS:
        near = get_close_matches(key, KEYS, n=1)
        hint = f"{near[0]}?" if near else "remove the line"
        draft.warn("unknown_directive", line.where, f"apcupsd does not know this directive: {ends}", hint)
    elif key in NUMBERS and value and not re.match(r"[+-]?[0-9]", value):
        right = f"{key} {DEFAULTS[key]:g}" if key in DEFAULTS else f"{key} and a number"
        draft.warn("no_number", line.where, f"{key} needs a number: {ends}", right)
    elif key in CHOICES and re.split(r"[ \t\v\f\r]", value)[0].lower() not in CHOICES[key]:
        draft.warn("odd_value", line.where, f"{key}: {ends}", f"one of {', '.join(CHOICES[key])}")
    else:
        return False
    return True


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
    _limits(conf, kind, draft)
    _killpower(conf, kind, draft)
    _pace(conf, kind, draft)
    _rest(conf, draft)
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
    port = number(port_text) if port_text else 161.0
    if not _HOST.fullmatch(host) or port is None or not 0 < port < 65536:
        draft.warn(
            "odd_device",
            conf.place("DEVICE"),
            "DEVICE is not the address of a card",
            "DEVICE host:port:vendor:community",
        )
        return
    source: dict[str, Any] = {"kind": "snmp", "host": host}
    if port != 161:
        source["port"] = int(port)
    source["version"] = 1  # apcupsd speaks no other
    ups = _add(conf, source, "UPSTYPE snmp; the card is asked directly", draft)
    if community and community != "public":
        what = f"SNMP community of {ups.name}"
        source["community"] = draft.secret("snmp-community", community, ups.name, what, conf.place("DEVICE"))
    if has_mode(conf.words.mode) and community not in ("", "public", "private"):
        draft.warn(
            "open_file",
            conf.file,
            "holds a community, and every user of this host can read it",
            f"chmod 0600 {conf.file}",
        )
    draft.warn(
        "snmp_forgeable",
        conf.place("DEVICE"),
        "SNMP version 1: every host on that network can forge its answers",
        "version 3 with auth, which powerguard can use and apcupsd cannot",
    )
    draft.warn(
        "snmp_blind",
        conf.place("UPSTYPE"),
        "when the card falls silent on battery, apcupsd keeps the last figures without end (measured)",
        "powerguard counts the energy itself, from 3 s on",
    )


def _net(conf: Conf, draft: Draft) -> None:
    host, _, port_text = (
        conf.text("DEVICE").rpartition(":") if ":" in conf.text("DEVICE") else (conf.text("DEVICE"), "", "")
    )
    port = number(port_text) if port_text else float(NIS_PORT)
    if not _HOST.fullmatch(host) or port is None or not 0 < port < 65536:
        draft.warn("odd_device", conf.place("DEVICE"), "DEVICE is not the address of an apcupsd", "DEVICE host:3551")
        return
    source: dict[str, Any] = {"kind": "apcupsd", "host": host}
    if port != NIS_PORT:
        source["port"] = int(port)
    _add(conf, source, "UPSTYPE net; its master is asked directly", draft)
    draft.warn(
        "net_slave",
        conf.place("DEVICE"),
        "a slave of apcupsd shuts down 5 s after it loses its master on battery (measured), and the master does "
        "not wait for it",
        "the switch between both on the UPS; powerguard continues with its own energy account",
    )


def _local(conf: Conf, kind: str, draft: Draft) -> None:
    port = conf.number("NISPORT")
    address = conf.text("NISIP", "0.0.0.0")  # noqa: S104 - read, not bound
    host = address if _HOST.fullmatch(address) and address not in ("0.0.0.0", "localhost") else "127.0.0.1"  # noqa: S104
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
    if kind == "pcnet" and has_mode(conf.words.mode):
        draft.warn(
            "open_file",
            conf.file,
            "holds a passphrase, and every user of this host can read it",
            f"chmod 0600 {conf.file}",
        )


# --- Looking ----------------------------------------------------------------------------------------------------------


def _budget(conf: Conf, draft: Draft) -> None:
    """Be at least as careful as MINUTES was; TIMEOUT counts only without other information."""
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


def _limits(conf: Conf, kind: str, draft: Draft) -> None:
    minutes_s = 60 * conf.number("MINUTES")
    if minutes_s < draft.need_s:
        draft.warn(
            "minutes",
            conf.place("MINUTES"),
            f"{conf.told('MINUTES')}: {minutes_s:g} s are left then, and a checkpoint ({draft.checkpoint_s:g} s), "
            f"a stop ({FORCE_AFTER_S:g} s) and a reserve ({RESERVE_S:g} s) need {draft.need_s:g} s",
            f"MINUTES {-int(-draft.need_s // 60)}, while apcupsd still decides",
        )
    if conf.number("BATTERYLEVEL") < 20:
        draft.warn(
            "batterylevel",
            conf.place("BATTERYLEVEL"),
            f"{conf.told('BATTERYLEVEL')}: a worn battery falls from there to empty within seconds",
            "BATTERYLEVEL 30, while apcupsd still decides; powerguard does not plan with the last 10 %",
        )
    if conf.number("TIMEOUT") > 0:
        draft.warn(
            "timeout",
            conf.place("TIMEOUT"),
            f"{conf.told('TIMEOUT')}: shuts down after a fixed time, whatever the charge; it restarts when "
            "apcupsd is restarted in an outage (measured)",
            "0 for a UPS that reports its runtime" if kind != "dumb" else "what the data sheet says, halved",
        )
    delay_s = conf.number("ONBATTERYDELAY")
    draft.note(
        "onbatterydelay",
        conf.place("ONBATTERYDELAY"),
        f"{conf.told('ONBATTERYDELAY')}: powerguard waits 4 s before "
        "it pauses and 8 s before it commits, and not even that where it could not afford to",
    )
    if delay_s > 30:
        draft.warn(
            "onbatterydelay_long",
            conf.place("ONBATTERYDELAY"),
            f"{conf.told('ONBATTERYDELAY')}: your hooks are not called before that time",
            "6",
        )


def _killpower(conf: Conf, kind: str, draft: Draft) -> None:
    if kind == "snmp":
        draft.warn(
            "killpower_snmp",
            conf.place("UPSTYPE"),
            "killpower over SNMP does not work: the SET lacks its instance and is refused, but apcupsd exits with 0 "
            "(measured), and Debian sends it when the network is already down",
            "let the BMC power the host on (bmc: policy: ensure), not the UPS",
        )
    delay_s = conf.number("KILLDELAY")
    if 0 < delay_s < FORCE_AFTER_S:
        draft.warn(
            "killdelay",
            conf.place("KILLDELAY"),
            f"{conf.told('KILLDELAY')}: the UPS gets the order to cut its output that soon after the shutdown "
            f"begins, but this host may take {FORCE_AFTER_S:g} s to stop",
            "0",
        )
    sleep_s = number(conf.text("SLEEP"))
    if sleep_s is not None and sleep_s < FORCE_AFTER_S:
        draft.warn(
            "sleep",
            conf.place("SLEEP"),
            f"SLEEP {sleep_s:g}: the UPS cuts its output {sleep_s:g} s after the order; "
            f"other hosts on it may take {FORCE_AFTER_S:g} s to stop",
            "SLEEP 180",
        )
    charge = number(conf.text("RETURNCHARGE"))
    if charge == 0:
        draft.warn(
            "returncharge",
            conf.place("RETURNCHARGE"),
            "RETURNCHARGE 0: the host comes back with an empty battery, and would not survive a second outage",
            "RETURNCHARGE 50, if the UPS has it",
        )


def _pace(conf: Conf, kind: str, draft: Draft) -> None:
    poll_s = conf.number("POLLTIME")
    if poll_s <= 5:
        return
    seen = "32 to 48 s (measured)" if kind == "snmp" else f"up to {poll_s:g} s"
    right = "powerguard asks the card every second itself" if kind == "snmp" else "POLLTIME 1"
    draft.warn(
        "polltime",
        conf.place("POLLTIME"),
        f"{conf.told('POLLTIME')}: an outage is noticed after {seen}, and a shorter one never",
        right,
    )


def _rest(conf: Conf, draft: Draft) -> None:
    for key, why in (
        ("ANNOY", "powerguard writes to no terminals"),
        ("NOLOGON", "powerguard does not block logins"),
        ("STATTIME", "see `powerguard status` and /metrics"),
        ("DATATIME", "see /metrics"),
        ("EVENTSFILE", "see `powerguard history` and the journal"),
        ("BATTDATE", "use battery_installed: 'YYYY-MM' instead"),
        ("LOWBATT", "only apctest uses it; if the UPS has it set, set budget.low_battery_s to it, in seconds"),
    ):
        if conf.text(key).lower() not in ("", "0", "disable"):
            draft.note("no_equivalent", conf.place(key), f"{key}: {why}")
    if conf.word("NETSERVER", "on") == "on" and conf.text("NISIP", "0.0.0.0") == "0.0.0.0":  # noqa: S104 - read, not bound
        draft.warn(
            "nisip",
            conf.place("NISIP"),
            "NISIP 0.0.0.0"
            + ("" if "NISIP" in conf.values else " (apcupsd's default)")
            + ": every host on the network can read this UPS's status, since apcupsd has no login",
            "NISIP 127.0.0.1, unless other hosts use it (UPSTYPE net)",
        )
    shared = conf.word("UPSCLASS", "standalone"), conf.word("UPSMODE", "disable")
    if any("share" in word for word in shared):
        draft.warn(
            "shareups",
            conf.place("UPSCLASS"),
            "a Share-UPS: it signals its other hosts over a wire that powerguard does not support",
            "powerguard on each host, with the card or this apcupsd as its source",
        )


def _script(event: str, script: Path, draft: Draft) -> bool:
    """Check an event script; return whether it calls powerguard."""
    where = str(script)
    try:
        text, mode = read(script)
    except ReadError:
        draft.warn("unreadable", where, "cannot be read, so it was left out", "run this as root")
        return False
    if not mode & 0o111:
        draft.warn("script_not_run", where, "is not executable, so apccontrol skips it", f"chmod 0755 {where}")
        return False
    if "powerguard" in text:
        draft.note("script_ours", where, "calls powerguard already")
        return True
    if event == "doshutdown" and _SUPPRESSES.search(text):
        draft.warn(
            "script_suppresses",
            where,
            "always exits with 99, so apcupsd's own shutdown never runs",
            "config/apcupsd/powerguard-event exits with 99 only while powerguard owns the shutdown",
        )
    elif event not in ("doshutdown", "doreboot", "killpower") and _STOPS.search(text):
        draft.warn(
            "script_shuts_down",
            where,
            f"shuts the host down at {event}, whatever the charge",
            "leave that to powerguard",
        )
    else:
        draft.note("script", where, "a script of your own: keep it, or replace it by that in config/apcupsd")
    slept = [int(found) for found in _SLEEPS.findall(text)]
    if slept and max(slept) >= 5:
        draft.warn(
            "script_sleeps",
            where,
            f"sleeps {max(slept)} s: a fixed time instead of a checkpoint that is awaited",
            "name the trainer in the settings: powerguard waits until its checkpoint is durable",
        )
    return False
