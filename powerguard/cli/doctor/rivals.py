"""Others on the UPS: programs that shut this host down or cut its UPS's output, and other hosts.

Two programs that decide are worse than one: the other one's shutdown has no checkpoint, and its cut comes at its own
time. Whether another *host* gives orders to the same UPS cannot be checked here (docs/guides/return.md). A UPS that
other hosts hang on should be declared as shared, and this host's own load measured.
"""

import os
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from powerguard.cli.doctor.comeback import restart_charge
from powerguard.cli.imports.nut import FOLDERS, asking_first, goes_on, nut_directive
from powerguard.clock import boottime_s
from powerguard.core.energy import own
from powerguard.core.energy.budget import shed_s
from powerguard.core.model.events import UNPROTECTED, UNREPORTED, OwnLoad, Reading
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import State
from powerguard.daemon.observe.readiness import ERRORS
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host.findings import Finding, shown
from powerguard.settings.schema import Settings
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.apcupsd.protocol import NisError
from powerguard.ups.apcupsd.source import probe
from powerguard.ups.base import LOOPBACK
from powerguard.ups.nut.connection import LinkError
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.nut.source import NutSource, RefusedError

UNITS: Final = ("nut-monitor.service", "nut-client.service", "apcupsd.service")
HOOK_FOLDERS: Final = ("usr/lib/systemd/system-shutdown", "lib/systemd/system-shutdown")
APCUPSD: Final = "etc/apcupsd"
OWN_HOOK: Final = "powerguard"
PROGRAM: Final = "etc/powerguard/output-off"
_UNASKED: Final = "cannot ask systemd whether upsmon or apcupsd also run"
_MOST_BYTES: Final = 65536
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH | stat.S_ISUID | stat.S_ISGID

Kind = Literal["nut", "apcupsd"]
Wrong = Literal["FAIL", "WARN"]


async def findings(*, armed: bool, cuts: bool, spawn: Spawn = run_child, root: Path = Path("/")) -> list[Finding]:
    """Return the findings. armed: False: a rival is only a warning. cuts: `output_off` is set here.

    root: where the host's files begin.
    """
    running = await _active(spawn)
    active = running or set()
    program = root / PROGRAM
    alone: Wrong = "FAIL" if cuts or os.access(program, os.F_OK) else "WARN"
    found = [] if running is not None else [Finding("rivals", "WARN", _UNASKED, "is this a systemd host?")]
    found += [*_upsmon(root, active), *_apcupsd(root, active)]
    found += [hook for path in _hooks(root) for hook in _hook(root, path, active, alone)]
    if not armed:
        found = [_not_yet(each) if each.verdict == "FAIL" else each for each in found]
    if not found:
        found = [Finding("rivals", "PASS", "neither upsmon nor apcupsd shuts this host down or cuts its UPS's output")]
    return [*found, *_program(program, cuts=cuts)]


def _not_yet(found: Finding) -> Finding:
    """Lower the grade to a warning while powerguard does not power the host off itself."""
    return found._replace(verdict="WARN", text=f"{found.text} (in mode: armed this is a FAIL)")


async def _active(spawn: Spawn) -> set[str] | None:
    """Return which of UNITS run; None where systemd cannot be asked."""
    units = await shown(spawn, "--property=Id,ActiveState", *UNITS)
    if units is None:
        return None
    return {each.get("Id", "") for each in units if each.get("ActiveState") in {"active", "activating", "reloading"}}


def _upsmon(root: Path, active: set[str]) -> list[Finding]:
    if not {"nut-monitor.service", "nut-client.service"} & active:
        return []
    conf = _upsmon_conf(root)
    text = _text(conf)
    if text is None:
        shown = f"/{conf.relative_to(root)}"
        because = f"upsmon runs, but its {shown} cannot be read: not checked whether it shuts this host down"
        return [Finding("rivals.upsmon", "WARN", because, "run doctor as root")]
    command = " ".join(nut_directive(text, "SHUTDOWNCMD"))
    if goes_on(command.partition("/powerguard-shutdown")[2]):
        because = f"upsmon's shell runs a part of SHUTDOWNCMD also where powerguard owns the shutdown ({command[:120]})"
        right = "make one command of what follows powerguard-shutdown: /bin/sh -c '...'; then restart upsmon"
        return [Finding("rivals.upsmon", "FAIL", because, right)]
    if not command or "powerguard" in command:
        return []
    because = f"upsmon shuts this host down at low battery, without a checkpoint (SHUTDOWNCMD {command[:80]})"
    right = f"write {asking_first(command)}, or: systemctl disable --now nut-monitor"
    return [Finding("rivals.upsmon", "FAIL", because, right)]


def _upsmon_conf(root: Path) -> Path:
    known = [root / folder[1:] / "upsmon.conf" for folder in FOLDERS]
    return next(filter(os.path.lexists, known), known[0])


def _apcupsd(root: Path, active: set[str]) -> list[Finding]:
    if "apcupsd.service" not in active:
        return []
    found = []
    script = root / APCUPSD / "doshutdown"  # apccontrol passes over one that is not executable
    scripts = [root / APCUPSD / "apccontrol", *([script] if os.access(script, os.X_OK) else [])]
    if not any("powerguard" in (_text(path) or "") for path in scripts):
        because = "apcupsd shuts this host down itself, without a checkpoint"
        right = "use powerguard's scripts (docs/guides/apcupsd.md), or: systemctl disable --now apcupsd"
        found.append(Finding("rivals.apcupsd", "FAIL", because, right))
    delay = _directive(_text(root / APCUPSD / "apcupsd.conf") or "", "KILLDELAY")
    if delay and delay[0].isdecimal() and int(delay[0]) > 0:
        because = f"apcupsd cuts the UPS's output {delay[0]} s after its own shutdown began (KILLDELAY)"
        found.append(Finding("rivals.apcupsd", "FAIL", because, "set KILLDELAY 0 in apcupsd.conf"))
    return found


def _hooks(root: Path) -> list[Path]:
    """Return the programs that systemd-shutdown runs at the end, less our own; each once, also on a merged /usr."""
    found: dict[str, Path] = {}
    for folder in HOOK_FOLDERS:
        try:
            for path in sorted((root / folder).iterdir()):
                if path.name != OWN_HOOK and path.is_file() and os.access(path, os.X_OK):
                    found.setdefault(os.path.realpath(path), path)
        except OSError:
            continue
    return list(found.values())


def _hook(root: Path, path: Path, active: set[str], verdict: Wrong) -> list[Finding]:
    """Return what a hook does at the end of a power-off, if the flag that it waits for exists or can appear."""
    text = _text(path) or ""
    kind: Kind | None = "nut" if "upsdrvctl" in text else "apcupsd" if "killpower" in text else None
    if kind is None:
        return []
    flag = _flag(root, kind)
    units = {"apcupsd.service"} if kind == "apcupsd" else {"nut-monitor.service", "nut-client.service"}
    left = flag is not None and os.access(flag, os.F_OK)
    if not left and (not units & active or flag is None):
        return []
    shown = f"/{path.relative_to(root)}"
    why = f"{flag} remains from an earlier outage" if left else f"its daemon runs and writes {flag} for it"
    because = f"{shown} cuts the UPS's output at the end of the power-off, in addition to powerguard: {why}"
    right = f"rm {flag}" if left else f"chmod -x {shown}" + ("" if kind == "apcupsd" else ", or remove POWERDOWNFLAG")
    return [Finding("rivals.hook", verdict, because, right)]


def _flag(root: Path, kind: Kind) -> Path | None:
    """Return the file that the hook waits for; None: upsmon has none, so its hook never acts."""
    if kind == "apcupsd":
        folder = _directive(_text(root / APCUPSD / "apcupsd.conf") or "", "PWRFAILDIR")
        return root / (folder[0].lstrip("/") if folder else APCUPSD) / "powerfail"
    text = _text(_upsmon_conf(root))
    name = ("etc/killpower",) if text is None else nut_directive(text, "POWERDOWNFLAG")
    return root / name[0].lstrip("/") if name else None


def _program(path: Path, *, cuts: bool) -> list[Finding]:
    """Check the site's program for a UPS on this host's cable, as the last step of a power-off does."""
    name = "power_on.local_output"
    try:
        found, folder = path.lstat(), path.parent.lstat()
    except FileNotFoundError:
        return []
    except OSError as error:
        return [Finding(name, "WARN", f"{path}: {error.strerror}", "run doctor as root")]
    fits = stat.S_ISREG(found.st_mode) and stat.S_ISDIR(folder.st_mode) and bool(found.st_mode & stat.S_IXUSR)
    if not fits or any(each.st_uid != 0 or each.st_mode & _WRITABLE for each in (found, folder)):
        because = f"{path} will not run at the end of a power-off: other users can write it, or it is not executable"
        return [Finding(name, "FAIL", because, f"chown root: {path}; chmod 0755 {path} {path.parent}")]
    results = [Finding(name, "PASS", f"{path} runs at the end of powerguard's power-off")]
    if cuts:
        because = f"{path} and output_off both order a UPS to cut its output: correct for two UPSes, wrong for one"
        results.append(Finding(name, "WARN", because, "keep one of them for each UPS"))
    return results


def _text(path: Path) -> str | None:
    """Return the beginning of a file; None where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, _MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _directive(text: str, name: str) -> list[str]:
    """Return the words after the name on its last line in apcupsd.conf; [] if there is none."""
    found: list[str] = []
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        if words and words[0] == name:
            found = words[1:]
    return found


def supply_finding(name: str, text: str, reading: Reading, fix: str) -> Finding:
    """Return the finding of a source that was read. fix: of one that does not report where the output comes from.

    The daemon raises alarms for both, but doctor also runs before the first start.
    """
    if reading.output_source in UNREPORTED:
        return Finding(name, "FAIL", f"{text}: {ERRORS['output_unknown']}, so an outage would not be seen", fix)
    if reading.output_source in UNPROTECTED:
        return Finding(name, "FAIL", f"{text}: {ERRORS['unprotected']}", "return it to normal operation")
    return Finding(name, "PASS", text)


_OLD_S: Final = 6.0


async def apcupsd_findings(name: str, options: ApcupsdOptions, *, ups: str) -> tuple[Reading | None, list[Finding]]:
    """Look at the UPS behind one apcupsd. The reading is None when there is none."""
    try:
        report = await probe(options, ups=ups)
    except NisError as error:
        fix = "set NETSERVER on, NISIP and NISPORT in apcupsd.conf there; test with `apcaccess -h HOST:PORT`"
        return None, [Finding(name, "FAIL", str(error), fix)]
    reading = report.reading
    if reading is None:
        return None, [Finding(name, "FAIL", report.why_not, "systemctl status apcupsd there")]
    runtime = "no runtime" if reading.runtime_s is None else f"runtime {reading.runtime_s:.0f} s"
    charge = "no charge" if reading.charge_pct is None else f"charge {reading.charge_pct:.0f} %"
    load = "no load" if reading.load_pct is None else f"load {reading.load_pct:.0f} %"
    age = "age unknown" if report.age_s is None else f"{max(0.0, report.age_s):.0f} s old"
    text = f"{reading.output_source}, {charge}, {load}, {runtime} (apcupsd {report.name or 'without a name'}; {age})"
    fix = f"STATUS must be ONLINE or ONBATT: `apcaccess -h {options.host}:{options.port}`; see the UPS, and UPSTYPE"
    found = [supply_finding(name, text, reading, fix)]
    if report.age_s is not None and report.age_s > _OLD_S:
        text = f"apcupsd polled its UPS {report.age_s:.0f} s ago, so an outage is noticed up to its POLLTIME later"
        found.append(Finding(name, "WARN", text, "set POLLTIME 1 in its apcupsd.conf"))
    if report.slave:
        text = "a net slave does not report the age of its data"
        found.append(Finding(name, "WARN", text, "name its master in the settings (DEVICE in its apcupsd.conf)"))
    if report.shutting_down:
        text = "SHUTTING DOWN since an earlier outage: that apcupsd no longer orders a shutdown"
        found.append(Finding(name, "WARN", text, "systemctl restart apcupsd there"))
    if reading.load_pct is None:
        found.append(Finding(name, "WARN", "reports no load: counted as full", ""))
    fix = "set it to 25 % in the UPS, with apctest while apcupsd is stopped (its EEPROM), or at its panel"
    return reading, [*found, *restart_charge(name, report.restart_pct, fix)]


async def nut_findings(
    name: str, options: NutOptions, *, ups: str, is_shared: bool, cuts: bool
) -> tuple[Reading | None, list[Finding]]:
    """Look at one UPS behind upsd. The reading is None when there is none. cuts: this host orders its output off."""
    try:
        report = await NutSource(options, ups=ups, clock=boottime_s).look()
    except LinkError as error:
        fix = "" if isinstance(error.__cause__, RefusedError) else "check host and port; is upsd running?"
        return None, [Finding(name, "FAIL", str(error), fix)]
    reading = report.reading
    runtime = "no runtime" if reading.runtime_s is None else f"runtime {reading.runtime_s:.0f} s"
    charge = "no charge" if reading.charge_pct is None else f"charge {reading.charge_pct:.0f} %"
    load = "no load" if reading.load_pct is None else f"load {reading.load_pct:.0f} %"
    held = f"; logs in as {options.user}" if report.is_logged_in else ""
    tls = "TLS" if report.tls else "no TLS"
    text = f"{reading.output_source}, {charge}, {load}, {runtime} (nut; {1000 * report.latency_s:.0f} ms; {tls}{held})"
    fix = (
        f"ups.status must have OL or OB: `upsc {options.name}@{options.host}:{options.port}`; see the UPS, and its "
        "driver, or read its card directly (kind: snmp)"
    )
    found = [supply_finding(name, text, reading, fix)]
    if report.forgeable:
        fix = "let the driver read the card by SNMP version 3 with authPriv, or this host (kind: snmp)"
        found.append(Finding(name, "WARN", f"its answers could be forged: {report.forgeable}", fix))
    elif not report.tls and options.host not in LOOPBACK:
        found.append(Finding(name, "WARN", "its answers could be forged: no TLS", "tls: required"))
    if options.user is None:
        text = "no login, so a NUT primary does not wait for this host before it cuts the output"
        found.append(Finding(name, "WARN", text, "set user and password, with an upsmon line in upsd.users"))
    if reading.load_pct is None and reading.watts is None:
        found.append(Finding(name, "WARN", "reports no load: counted as full", ""))
    others = len(report.clients) - report.is_logged_in
    if others > 0:
        found += clients_findings(name, others, is_shared=is_shared, cuts=cuts)
    fix = f"upsrw -s battery.charge.restart=25 {options.name}@{options.host}, where its driver lets it be set"
    found += restart_charge(name, report.restart_pct, fix)
    return reading, [*found, *(Finding(name, "WARN", warning, "") for warning in report.warnings)]


_GUIDE: Final = "docs/guides/ups.md"
_ODD: Final = {
    "unknown_sender": (
        "came from unknown addresses",
        "name them in traps.addresses, or correct the card's host",
    ),
    "wrong_community": ("had another community", "set the card's trap community as traps.community"),
    "unknown_engine": ("came from engine ids that are not in the settings", f"traps.users.engines: {_GUIDE}"),
    "unknown_user": ("came from users that are not in the settings", "name the card's trap user in traps.users"),
    "not_authentic": ("were not authentic", "give traps.users the card's passphrase and protocol"),
    "out_of_time": ("were out of their time window", "restart the card: its informs use another engine time"),
    "undecipherable": ("could not be deciphered", "give traps.users the card's privacy passphrase and protocol"),
}


def trap_findings(traps: dict[str, Any] | None) -> list[Finding]:
    """Return the findings on the trap port, if the settings have one. traps: of the status object."""
    if traps is None:
        return []
    where = traps["listen"]
    if not traps["listening"]:
        text = f"not listening at {where}: {traps['because']}; polls continue, but traps do not trigger one"
        return [Finding("traps", "WARN", text, f"see traps.listen and traps.port ({_GUIDE})")]
    results = traps["results"]
    found = [
        Finding("traps", "WARN", f"{results[word]} datagrams {text}", fix)
        for word, (text, fix) in _ODD.items()
        if results.get(word) and not results["hint"]
    ]
    if found:
        return found
    if not results["hint"]:
        text = f"listening at {where}; no trap of a UPS has arrived yet"
        return [Finding("traps", "PASS", text, f"send a test trap from the card ({_GUIDE})")]
    return [Finding("traps", "PASS", f"listening at {where}; {results['hint']} traps triggered a poll")]


# --- Other hosts on the same UPS ------------------------------------------------------------------------------
#
# Is the UPS declared as shared, is this host's own load measured, and does only one host order its output off?

_SHARED_GUIDE: Final = "docs/guides/several-ups.md"
_READERS: Final = 10
"""A network card answers this many readers; upsd answers a thousand."""


def clients_findings(name: str, others: int, *, is_shared: bool, cuts: bool) -> list[Finding]:
    """Say what other clients of upsd mean. others: addresses that are logged in for this UPS, without our own."""
    hosts = "1 other host is" if others == 1 else f"{others} other hosts are"
    if not is_shared:
        text = f"{hosts} logged in for this UPS at upsd, and the settings do not say that it is shared"
        return [Finding(name, "WARN", text, f"set ups.NAME.shared: {{hosts: {others + 1}}} ({_SHARED_GUIDE})")]
    if cuts:
        text = f"{hosts} logged in for this UPS at upsd, and this host orders its output off (output_off)"
        return [Finding(name, "WARN", text, "see that no other host orders it, upsmon's POWERDOWNFLAG included")]
    return []


def shared_findings(
    settings: Settings, policy: Policy, state: State, loads: Sequence[OwnLoad], now_s: float
) -> list[Finding]:
    """Return what is to be said of all feeds. state: with the newest reading; loads: of this host, as measured."""
    for each in loads:
        state = own.enter(policy, state, each)
    if policy.shared is None:
        why = own.looks_shared(policy, state)
        found = [Finding("shared", "WARN", why, f"set ups.NAME.shared ({_SHARED_GUIDE})")] if why else []
        if policy.shed is not None:
            text = "shed makes this host give up battery time for others, and no UPS is declared as shared"
            found.append(Finding("shared", "WARN", text, f"set ups.NAME.shared, or remove shed ({_SHARED_GUIDE})"))
        return found
    return [
        _own_load(settings, policy, state, now_s),
        *_readers(settings),
        *_output_off(settings, policy),
        *_tier(policy),
    ]


def _readers(settings: Settings) -> list[Finding]:
    """Do more hosts read the card than it answers in time?"""
    found: list[Finding] = []
    for name in settings.feeding:
        ups = settings.ups[name]
        hosts = None if ups.shared is None else ups.shared.hosts
        if hosts is not None and hosts > _READERS and any(source.kind == "snmp" for source in ups.sources):
            text = f"ups.{name}: this host reads the card itself, and so may all {hosts} hosts"
            fix = f"let one upsd read the card, and set a source of kind nut on every host ({_SHARED_GUIDE})"
            found.append(Finding("shared", "WARN", text, fix))
    return found


def _own_load(settings: Settings, policy: Policy, state: State, now_s: float) -> Finding:
    """Is there a measurement of what this host draws?"""
    draw = own.own_load(policy, state, now_s)
    if draw is not None and draw.measured:
        return Finding("shared", "PASS", f"this host draws {draw.watts:.0f} W of the UPS's load, by its {draw.source}")
    over = "" if draw is None else "".join(f"; {source}: {why}" for source, why in draw.passed_over)
    if settings.gpu.kind == "nvml":
        return Finding("shared", "PASS", f"the GPUs' power measures whether this host has paused{over}")
    text = "nothing measures what this host draws: no trainer that draws on after a pause would be stopped"
    return Finding(
        "shared",
        "WARN",
        f"{text}{over}",
        f"set bmc (one that reads power), shared.outlets, or gpu.kind: nvml ({_SHARED_GUIDE})",
    )


def _output_off(settings: Settings, policy: Policy) -> list[Finding]:
    """Only one host may order the output off, and not before all that hang on it are down."""
    found: list[Finding] = []
    for name in settings.feeding:
        ups = settings.ups[name]
        longest_s = None if ups.shared is None else ups.shared.longest_stop_s
        if longest_s is not None and longest_s < settings.host.force_after_s:
            text = (
                f"ups.{name}.shared.longest_stop_s: the output may go off {longest_s:g} s after a commit, and this "
                f"host may take {settings.host.force_after_s:g} s to stop (host.force_after_s)"
            )
            fix = "set longest_stop_s to the longest host.force_after_s, with the same value on all hosts of this UPS"
            found.append(Finding("shared", "FAIL", text, fix))
        if ups.output_off is None or ups.shared is None:
            continue
        where = f"ups.{name}.output_off"
        text = f"{where}: this host orders the output of a shared UPS off, for all that hang on it"
        found.append(Finding("shared", "WARN", text, "set output_off on no other host of this UPS"))
        if ups.shared.longest_stop_s is None:
            text = f"{where}: nothing says how long the other hosts take to stop"
            fix = f"set ups.{name}.shared.longest_stop_s to the longest host.force_after_s of all of them"
            found.append(Finding("shared", "FAIL", text, fix))
        if shed_s(policy) > 0.0:
            text = f"{where}: this host powers off before the hosts of higher tiers, and would cut their power"
            found.append(Finding("shared", "FAIL", text, "move output_off to a host of the highest tier"))
    return found


def _tier(policy: Policy) -> list[Finding]:
    if policy.shed is None:
        return []
    text = (
        f"tier {policy.shed.tier} of 0 to {policy.shed.highest}: pauses and powers off {shed_s(policy):.0f} s earlier"
    )
    return [Finding("shared", "PASS", text)]
