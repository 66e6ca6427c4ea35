"""`powerguard doctor`: check every part before an outage, and print a remedy for each finding.

Each check is bounded, read-only, and ends in findings, never in a traceback.
"""

import argparse
import asyncio
import contextlib
import grp
import json
import logging
import os
import pwd
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from powerguard.cli.client import DownError, RefusedError, add_options, get
from powerguard.cli.doctor import comeback, rivals
from powerguard.cli.doctor.rivals import apcupsd_findings, nut_findings, supply_finding, trap_findings
from powerguard.cli.recover import host_look
from powerguard.cli.render import NOT_ARMED, Paint, clean, fold, waiting
from powerguard.cli.secret import HANDED, is_set
from powerguard.cli.shared import MissingKeyError
from powerguard.cli.status import last_known, written
from powerguard.clock import boot_id, boottime_s
from powerguard.core.decide.machine import step
from powerguard.core.energy import needs
from powerguard.core.model.actions import Conduct
from powerguard.core.model.events import Event, OwnLoad, OwnSource, Reading, TrainerSeen
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Online, State
from powerguard.daemon.notify.messenger import DRILL_DAYS
from powerguard.daemon.observe.readiness import full_battery, of_battery
from powerguard.daemon.own_load import Outlets
from powerguard.daemon.wiring import outputs_of
from powerguard.effectors.bmc.effector import BmcEffector
from powerguard.effectors.bmc.findings import findings as bmc_findings
from powerguard.effectors.gpu.effector import findings as gpu_findings
from powerguard.effectors.host import findings as resume_findings
from powerguard.effectors.host.filesystems import NETWORKED, VOLATILE, kind_of
from powerguard.effectors.host.findings import Finding, findings
from powerguard.effectors.host.power import DAEMON_USER
from powerguard.effectors.signals.effector import SignalHelper
from powerguard.effectors.signals.effector import findings as signal_findings
from powerguard.effectors.slurm.effector import findings as slurm_findings
from powerguard.effectors.trainer.effector import TrainerEffector
from powerguard.effectors.trainer.findings import crowding, ways
from powerguard.effectors.trainer.findings import findings as checkpoint_findings
from powerguard.options import SECRETS, Secret, SecretError
from powerguard.settings.cautions import authorities_in, authority_trouble, is_roots, secrets_in, warnings
from powerguard.settings.explain import dotted
from powerguard.settings.load import LoadedSettings, SettingsError, load_with_origins
from powerguard.settings.policy import policy as make_policy
from powerguard.settings.schema import Settings, SourceOptions
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.port import SnmpError
from powerguard.ups.snmp.source import SLOW, probe
from powerguard.yamlfile import KeyPath

LIMIT_S: Final = 20.0
"""Of one check; several run at a time."""
OLD_CARD_LIMIT_S: Final = 65.0
"""The same where a card speaks SNMP version 1 only, which takes a request for each object that is not there."""
BMC_LIMIT_S: Final = 15.0
"""Of one question to the BMC: old boards take 10 s for a login over Redfish."""
WATTS_LIMIT_S: Final = 5.0
"""The same for its power reading, as the daemon needs it every 5 s."""
OUTLETS_LIMIT_S: Final = 3.0
RESUME_LIMIT_S: Final = 10.0
_AS_ROOT: Final = "run doctor as root"
_START: Final = "systemctl start powerguard.service, or run doctor as root while it runs"
_RELOAD: Final = "systemctl reload powerguard.service"
_UNREAD: Final = "check address, secret and the card's access list; `powerguard discover` finds UPSes"
_RISK: Final = "If it holds less than this, the power can fail before the stop has ended, without a sign of it"
"""3.7 % of simulated outages of a battery below 56 % with a nameplate gauge, presumed at 75 %."""
_MEASURE: Final = (
    "let a drill or a self-test discharge it: a quarter shows a worn battery, two thirds or low battery a good one "
    "(docs/guides/battery.md)"
)
OLD_MEASUREMENT_S: Final = 9 * 30.44 * 86400.0
"""Age in months from which doctor asks for a new measurement; a measured health expires after 12."""
SMALL_DISK_BYTES: Final = 500_000_000
FULL_DISK_BYTES: Final = 20_000_000

Verdict = Literal["PASS", "WARN", "FAIL"]
_COLOURS: Final = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Check settings, secrets, UPS, trainers, BMC, host, budget, journal and the daemon itself. It "
        "changes nothing; takes some seconds. Exit 0: all pass; 1: warnings; 2: failures."
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quiet", action="store_true", help="leave out checks that pass")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    with waiting("checking settings, UPS, trainers, BMC and host", quiet=args.json):
        found = examine(args)
    code = _code(found)
    shown = [finding for finding in found if not (args.quiet and finding.verdict == "PASS")]
    if args.json:
        checks = [finding._asdict() for finding in shown]
        print(json.dumps({"schema_version": 1, "object": "doctor", "exit": code, "checks": checks}, indent=2))
        return code
    paint = Paint()
    width = max((len(finding.name) for finding in shown), default=0)
    lines: list[str] = []
    for finding in shown:
        verdict = paint(finding.verdict, _COLOURS[finding.verdict])
        lines.append(f"{verdict}  {clean(finding.name):<{width}}  {clean(finding.text)}")
        if finding.fix:
            lines.append(f"      {'':<{width}}  -> {clean(finding.fix)}")
    print("\n".join([*fold(lines), _summary(found)]))
    return code


def _code(found: Sequence[Finding]) -> int:
    verdicts = {finding.verdict for finding in found}
    return 2 if "FAIL" in verdicts else 1 if "WARN" in verdicts else 0


def _summary(found: Sequence[Finding]) -> str:
    counts = [sum(finding.verdict == verdict for finding in found) for verdict in ("PASS", "WARN", "FAIL")]
    return f"{len(found)} checks: {counts[0]} pass, {counts[1]} warn, {counts[2]} fail"


@dataclass
class CheckContext:
    """State that the checks share."""

    args: argparse.Namespace
    loaded: LoadedSettings
    policy: Policy
    readings: list[Reading] = field(default_factory=list)
    trainers: list[TrainerSeen] = field(default_factory=list)
    own: list[OwnLoad] = field(default_factory=list)
    status: dict[str, Any] | None = None
    """The daemon's status; it has secrets that this user has not. None: it does not answer."""

    @property
    def settings(self) -> Settings:
        """The settings."""
        return self.loaded.settings


def examine(args: argparse.Namespace) -> list[Finding]:
    """Run every check and return what was found."""
    # The libraries log their errors; here the findings report them.
    logging.disable(logging.CRITICAL)
    path = Path(args.config)
    if os.geteuid() == 0 and "CREDENTIALS_DIRECTORY" not in os.environ and Path(HANDED).is_dir():
        os.environ["CREDENTIALS_DIRECTORY"] = HANDED
    try:
        loaded = load_with_origins(path)
    except SettingsError as error:
        found = [Finding("settings", "FAIL", problem, "") for problem in error.problems]
        return [*found, *asyncio.run(comeback.sentinel_findings()), *_daemon(args)]
    today = datetime.now(UTC).date()
    ward = CheckContext(args, loaded, make_policy(loaded.settings, boot_id=boot_id(), today=today))
    with contextlib.suppress(DownError, RefusedError):  # reported with the daemon
        ward.status = get(args, "/api/v1/status")
    text = f"{path}: valid; mode {loaded.settings.mode}, fed by {' and '.join(loaded.settings.feeding)}"
    settings_findings = _looked("settings", lambda: unreadable(path)) or [Finding("settings", "PASS", text)]
    settings_findings += [
        Finding("settings", "WARN", f"{loaded.files.where(mistake.path)}: {mistake}")
        for mistake in warnings(loaded.settings, today=today)
    ]
    settings_findings += _looked("settings", lambda: _not_reloaded(ward, path))
    return [
        *settings_findings,
        *_looked("secret", lambda: _secrets(ward)),
        *_looked("certificate", lambda: _authorities(ward.settings)),
        *asyncio.run(_live(ward)),
        *_looked("power_on", lambda: _power_on(ward)),
        *_looked("budget", lambda: _budget(ward)),
        *_looked("shared", lambda: _shared(ward)),
        *_looked("journal", lambda: [journal_finding(Path(ward.settings.journal.path))]),
        *_looked("host", lambda: _here(ward)),
        *_looked("messages", lambda: message_findings(ward.settings, ward.status)),
        *_looked("daemon", lambda: _daemon(args)),
    ]


def unreadable(path: Path, user: str = DAEMON_USER) -> list[Finding]:
    """As root, which can read every file: can the daemon's user read the settings, too?"""
    try:
        with _as_the_daemon(user):
            load_with_origins(path)
    except SettingsError as error:
        fix = f"chmod 0644 on the file, 0755 on its folder: user {user} must read them"
        return [Finding("settings", "FAIL", problem, fix) for problem in error.problems]
    return []


def _not_reloaded(ward: CheckContext, path: Path) -> list[Finding]:
    """Does the running daemon have older settings than these?"""
    if ward.status is None:
        return []
    running, daemon = ward.status["mode"], ward.status["daemon"]
    if running != ward.settings.mode:
        text = f"the running daemon is in mode {running}, not in mode {ward.settings.mode} of these settings"
        return [Finding("settings", "WARN", text, _RELOAD)]
    if Path(daemon["config_path"]) != path:
        return []
    files = [Path(document.name) for document in ward.loaded.files.documents]
    stats = {file: file.stat() for file in files}
    # st_ctime as well: what rsync, `cp -p` or mv put there is as old as where it came from.
    changed = [file for file, at in stats.items() if max(at.st_mtime, at.st_ctime) > daemon["settings_at"]]
    text = "was changed after the running daemon read it"
    return [Finding("settings", "WARN", f"{file}: {text}", _RELOAD) for file in changed]


def message_findings(settings: Settings, status: dict[str, Any] | None) -> list[Finding]:
    """Say whether people would hear of an outage. status: the daemon's; None: it does not answer."""
    if not settings.notify.targets:
        text = "no target is set: outages and alarms cause no message"
        return [Finding("messages", "WARN", text, "set notify.targets (docs/guides/messages.md)")]
    messages = {} if status is None else status.get("messages") or {}
    found = []
    for each in messages.get("targets", ()):
        name = f"messages.{each['name']}"
        if each["since"] is not None:
            text = f"the last delivery failed: {each['answer']}; {each['queued']} wait"
            found.append(Finding(name, "WARN", text, f"powerguard notify test {each['name']}"))
        elif each["at"] is None:
            text = "nothing was sent to it yet"
            found.append(Finding(name, "WARN", text, f"powerguard notify test {each['name']}"))
        else:
            found.append(Finding(name, "PASS", f"the last delivery was taken: {each['answer']}"))
    return found


def _looked(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of a check; a missing permission is one of them, and the other checks still count."""
    try:
        return check()
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        return [Finding(name, "WARN", f"not checked: {what}{error.strerror or error}", _AS_ROOT)]
    except MissingKeyError as error:
        return [_of_an_older_daemon(name, error)]


def _of_an_older_daemon(name: str, error: MissingKeyError) -> Finding:
    text = f"the daemon does not report {error.args[0]}: it is older than this command"
    return Finding(name, "FAIL", text, "systemctl restart powerguard, unless power is out")


def _power_on(ward: CheckContext) -> list[Finding]:
    """The daemon's result, because it holds the secrets; without a daemon, a check from here."""
    if ward.status is not None:
        known = comeback.of_status(ward.status["power_on"])
    else:
        known = asyncio.run(comeback.ask(ward.settings, ward.policy))
    return comeback.findings(known)


async def _live(ward: CheckContext) -> list[Finding]:
    """Run all checks that wait for another device, in parallel."""
    sources = [(ups, each) for ups in ward.settings.feeding for each in ward.settings.ups[ups].sources]
    armed = ward.settings.mode == "armed"
    checks: list[tuple[str, Callable[[], Awaitable[list[Finding]]]]] = [
        *(
            (source_name(ward.settings, ups, each), lambda ups=ups, each=each: _ups(ward, ups, each))
            for ups, each in sources
        ),
        ("trainers", lambda: _trainers(ward)),
        ("bmc", lambda: _bmc(ward)),
        ("shared", lambda: _outlets(ward)),
        ("gpu", lambda: gpu_findings(ward.settings.gpu)),
        ("scheduler", lambda: slurm_findings(ward.settings.scheduler, host=socket.gethostname())),
        ("signals", lambda: signal_findings(ward.settings.signals, pausing=_pausing(ward))),
        ("host", lambda: _host(ward)),
        ("rivals", lambda: rivals.findings(armed=armed, cuts=bool(outputs_of(ward.settings)))),
        ("resume", lambda: _resume(ward.settings)),
        ("sentinel", comeback.sentinel_findings),
    ]
    is_old = any(isinstance(each, SnmpOptions) and each.version == 1 for _, each in sources)
    limit_s = OLD_CARD_LIMIT_S if is_old else LIMIT_S
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(_bounded(name, check, 3 * BMC_LIMIT_S if name == "bmc" else limit_s))
            for name, check in checks
        ]
    return [finding for task in running for finding in task.result()]


async def _bounded(name: str, check: Callable[[], Awaitable[list[Finding]]], limit_s: float) -> list[Finding]:
    try:
        async with asyncio.timeout(limit_s):
            return await check()
    except TimeoutError:
        return [Finding(name, "FAIL", f"the check did not end within {limit_s:g} s", "check it by hand")]
    except MissingKeyError as error:
        return [_of_an_older_daemon(name, error)]
    except Exception as error:  # noqa: BLE001 - a check that breaks is a finding; the others still count
        return [Finding(name, "FAIL", f"the check failed: {type(error).__name__}: {error}", "report this as a bug")]


# --- Secrets --------------------------------------------------------------------------------------------------------


def _secrets(ward: CheckContext) -> list[Finding]:
    """Read every secret as the daemon does, and drop it. Secrets of the daemon alone are checked by their use."""
    return [
        _secret(path, secret)
        for path, secret in secrets_in(ward.settings)
        if ward.status is None or not _is_elsewhere(secret)
    ]


def _secret(path: KeyPath, secret: Secret) -> Finding:
    name, where = "secret", dotted(path)
    if _is_elsewhere(secret):
        text = f"{where}: credential {secret.credential}: not checked, systemd gives it to the daemon only"
        return Finding(name, "WARN", text, _START)
    try:
        with _as_the_daemon() if secret.file else contextlib.nullcontext():
            secret.read()
    except SecretError as error:
        if isinstance(error.__cause__, PermissionError) and os.geteuid() != 0:
            return Finding(name, "WARN", f"{where}: {error}: not checked", _AS_ROOT)
        if secret.credential is not None and is_set(secret.credential):
            text = f"{where}: credential {secret.credential}: is set, but the running daemon started without it"
            return Finding(name, "FAIL", text, "powerguard install (restarts the daemon while utility is there)")
        return Finding(name, "FAIL", f"{where}: {error}", _right(secret, error.__cause__))
    return Finding(name, "PASS", f"{where}: {secret.file or secret.credential}: readable, by its owner only")


def _right(secret: Secret, cause: BaseException | None) -> str:
    """Return what makes a secret readable; "" if its error names it."""
    if secret.file and is_roots(secret.file):
        return f"write {{credential: {Path(secret.file).name}}}: only root may enter {SECRETS}"
    if isinstance(cause, FileNotFoundError) and secret.file:
        return f"install -m 0400 -o {DAEMON_USER} /dev/stdin {secret.file}"
    return f"chown {DAEMON_USER} {secret.file}" if isinstance(cause, PermissionError) and secret.file else ""


def _authorities(settings: Settings) -> list[Finding]:
    """Read every certificate of an authority as the daemon does. A target of messages is asked only in an outage."""
    found: list[Finding] = []
    for path, file in authorities_in(settings):
        try:
            with _as_the_daemon():
                trouble = authority_trouble(Path(file))
        except PermissionError as error:
            if os.geteuid() != 0:
                raise
            trouble = f"{file}: user {DAEMON_USER} must read it: {error.strerror} (chmod 0644 {file})"
        verdict: Literal["PASS", "FAIL"] = "FAIL" if trouble else "PASS"
        found.append(Finding("certificate", verdict, f"{dotted(path)}: {trouble or f'{file}: readable'}"))
    return found


@contextlib.contextmanager
def _as_the_daemon(name: str = DAEMON_USER) -> Iterator[None]:
    """As root: check a file as the daemon's user, if there is one. No other thread runs yet."""
    try:
        user = pwd.getpwnam(name) if os.geteuid() == 0 else None
    except KeyError:
        user = None
    if user is None:
        yield
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


def _is_elsewhere(secret: Secret | None) -> bool:
    """A credential that systemd gives only to the daemon's unit."""
    return secret is not None and secret.credential is not None and "CREDENTIALS_DIRECTORY" not in os.environ


# --- Devices ---------------------------------------------------------------------------------------------------------


def source_name(settings: Settings, ups: str, options: SourceOptions) -> str:
    """Return the name of a source's findings: its host, with more details if that has several."""
    hosts = [each.host for name in settings.feeding for each in settings.ups[name].sources]
    return f"ups.{options.host}" + (f" ({ups}, {options.kind})" if hosts.count(options.host) > 1 else "")


async def _ups(ward: CheckContext, ups: str, options: SourceOptions) -> list[Finding]:
    name = source_name(ward.settings, ups, options)
    needed = [secret for _, secret in secrets_in(options)]
    if any(map(_is_elsewhere, needed)):
        return [_ups_of_the_daemon(ward, ups, name, options)]
    try:
        for secret in needed:
            secret.read()
    except SecretError as error:
        return [Finding(name, "FAIL", f"not asked: {error}")]
    match options:
        case SnmpOptions():
            return await _snmp(ward, ups, name, options)
        case NutOptions():
            ups_settings = ward.settings.ups[ups]
            is_shared, cuts = ups_settings.shared is not None, ups_settings.output_off is not None
            reading, found = await nut_findings(name, options, ups=ups, is_shared=is_shared, cuts=cuts)
        case ApcupsdOptions():
            reading, found = await apcupsd_findings(name, options, ups=ups)
    ward.readings += [] if reading is None else [reading]
    return found


def _ups_of_the_daemon(ward: CheckContext, ups: str, name: str, options: SourceOptions) -> Finding:
    """Return the daemon's result for a source whose secret only the daemon has."""
    if ward.status is None:
        return Finding(name, "WARN", "not asked: systemd gives its secret to the daemon only", _START)
    place = ward.settings.ups[ups].sources.index(options)
    sources = [each for each in ward.status["sources"] if each["ups"] == ups]
    if place >= len(sources):
        return Finding(name, "WARN", "the daemon does not know it yet", _RELOAD)
    source = sources[place]
    polls = f"{source['polls']} polls, {source['failures']} failed"
    if source["up"]:
        return Finding(name, "PASS", f"the daemon reads it as {source['source']}: {polls}")
    error = source["last_error"] or "no answer yet"
    return Finding(name, "FAIL", f"the daemon cannot read it as {source['source']}: {error} ({polls})", _UNREAD)


async def _snmp(ward: CheckContext, ups: str, name: str, options: SnmpOptions) -> list[Finding]:
    try:
        report = await probe(options)
    except SnmpError as error:
        # A card that answers too late has accepted address and community; the text names the fix.
        fix = "" if error.late else "check address, version, community or user, and the card's access list"
        return [Finding(name, "FAIL", str(error), fix)]
    decoded = report.decoded
    if decoded.stale is not None:
        return [Finding(name, "FAIL", f"{report.where}: {decoded.stale}", "reseat or restart the card")]
    reading = decoded.reading(
        at_s=boottime_s(),
        ups=ups,
        source=report.where,
        authenticated=report.authenticated,
    )
    ward.readings.append(reading)
    runtime = "no runtime" if reading.runtime_s is None else f"runtime {reading.runtime_s:.0f} s"
    charge = "no charge" if reading.charge_pct is None else f"charge {reading.charge_pct:.0f} %"
    load = "no load" if reading.load_pct is None and reading.watts is None else f"load {_load(reading)}"
    speaks = ", ".join(report.profiles)
    text = f"{reading.output_source}, {charge}, {load}, {runtime} ({speaks}; {1000 * report.latency_s:.0f} ms)"
    fix = f"see the UPS, and its profile: powerguard snmp probe {options.host}"
    found = [supply_finding(name, text, reading, fix)]
    if report.few:
        found.append(Finding(name, "WARN", report.few, "update the card's firmware, or replace the card"))
    if report.latency_s > SLOW * options.poll_s:
        text = f"one poll takes {report.latency_s:.1f} s: the card is polled less often than every {options.poll_s:g} s"
        found.append(Finding(name, "WARN", text, "let one upsd read it for all hosts, or set poll_s higher"))
    if reading.load_pct is None and (reading.watts is None or ward.policy.rating_w is None):
        found.append(Finding(name, "WARN", "reports no load: counted as full", "set rating_w if it reports watts"))
    found += [Finding(name, "WARN", text, "") for text in decoded.warnings]
    fix = "set the return battery capacity (minimum return charge) to 25 % on the card's page"
    found += comeback.restart_charge(name, report.restart_pct, fix)
    found += [
        Finding(name, "WARN", f"profile: {problem}", "correct or remove it") for problem in report.profile_problems
    ]
    return found


def _load(reading: Reading) -> str:
    return f"{reading.load_pct:.0f} %" if reading.load_pct is not None else f"{reading.watts:.0f} W"


async def _trainers(ward: CheckContext) -> list[Finding]:
    seen: dict[str, TrainerSeen] = {}

    def publish(event: Event) -> None:
        if isinstance(event, TrainerSeen):
            seen[event.trainer] = event

    folder = ward.settings.trainer_sockets
    known = None if folder is None else Path(folder)
    effector = TrainerEffector(
        ward.settings.trainers,
        clock=boottime_s,
        publish=publish,
        discover_dir=known,
        discover_uids=ward.settings.trainer_uids,
        not_trainers=[ward.settings.control.socket],
    )
    try:
        await effector.look()
    finally:
        await effector.close()
    strangers = effector.strangers
    if os.geteuid() != 0 and ward.status is not None:
        # Their sockets may be closed to this user; the daemon's own alarms name the sockets that it refuses.
        answering = {name for name, event in seen.items() if event.alive}
        seen |= {each.trainer: each for each in _reported(ward.status) if each.trainer not in answering}
        strangers = ()
    ward.trainers.extend(seen.values())
    urls = {each.name: each.url for each in ward.settings.trainers if each.kind == "http"}
    refused = [name for name, url in urls.items() if any(text.startswith(f"{url}: ") for text in strangers)]
    found = [_trainer(event, urls.get(event.trainer, "")) for event in seen.values() if event.trainer not in refused]
    allow = _AS_ROOT if os.geteuid() != 0 else "allow its user (trainer_uids, uids), or remove the socket"
    found += [Finding("trainers", "WARN", text, allow) for text in strangers]
    alive = [event.trainer for event in seen.values() if event.alive]
    found += await ways(ward.settings.trainers, SignalHelper(ward.settings.signals.socket).ask)
    found += await checkpoint_findings(effector.saves_in, alive=alive)
    crowded = crowding(folder)
    if found:
        return [*found, *crowded]
    where = f" in {folder}" if folder is not None else ""
    text = f"none found{where} and none in the settings"
    return [Finding("trainers", "WARN", text, "start training, or name trainers"), *crowded]


def _reported(status: dict[str, Any]) -> list[TrainerSeen]:
    """Return the living trainers, as the daemon reports them."""
    return [
        TrainerSeen(
            at_s=boottime_s(),
            trainer=each["name"],
            alive=True,
            conduct=Conduct(each["conduct"]),
            checkpoint_s=each["checkpoint_s"],
            disk=each["disk"],
            step=each["step"],
        )
        for each in status["trainers"]
        if each["alive"]
    ]


async def _resume(settings: Settings) -> list[Finding]:
    """Would training start after a power-off, and is the host as it was?"""
    folder = Path(settings.journal.path).parent
    checked = await host_look(settings).look(RESUME_LIMIT_S)
    return [*await resume_findings.target(settings.resume), *resume_findings.host(checked, folder)]


async def _host(ward: CheckContext) -> list[Finding]:
    """Return the findings on the power-off; parts that only root may check come from the daemon."""
    found = await findings(ward.settings.host)
    if ward.status is None or ward.status["mode"] == "dry-run":
        return found
    trouble = next((each["text"] for each in ward.status["reasons"] if each["name"] == "no_power_off"), "")
    verdict: Verdict = "FAIL" if trouble else "PASS"
    finding = Finding("host.power_off", verdict, trouble or "the daemon can order it, by its last check")
    return [finding if (each.name, each.verdict) == ("host.power_off", "WARN") else each for each in found]


def _pausing(ward: CheckContext) -> list[str]:
    """Names of the sockets of the settings' trainers that are to pause in an outage."""
    paths = [each.socket_path for each in ward.settings.trainers if each.after != "continue"]
    return [Path(path).name for path in paths if path is not None]


def _trainer(event: TrainerSeen, url: str) -> Finding:
    name = f"trainer.{event.trainer}"
    if not event.alive:
        text = f"{url}: no answer" if url else "not there"
        return Finding(name, "WARN", text, f"start training, or correct its {'url' if url else 'settings'}")
    at = "" if event.step is None else f" at step {event.step}"
    takes = "time unknown" if event.checkpoint_s is None else f"takes {event.checkpoint_s:.0f} s"
    text = f"answers{at}; after a checkpoint: {event.conduct}; checkpoint {takes}"
    if event.conduct == "continue":
        fix = "embed powerguard.trainer: with training paused, the battery lasts about three times longer"
        return Finding(name, "WARN", f"{text}; it does not pause", fix)
    return Finding(name, "PASS", text)


async def _bmc(ward: CheckContext) -> list[Finding]:
    options = ward.settings.bmc
    if options.kind == "none":
        return []  # reported with the settings
    if _is_elsewhere(options.password):
        return [_bmc_of_the_daemon(ward.status)]
    bmc = BmcEffector(options, limit_s=BMC_LIMIT_S)  # one for all, as a refused login is not repeated
    folder = Path(ward.settings.journal.path).parent
    found = await bmc_findings(options, folder=folder, limit_s=BMC_LIMIT_S, bmc=bmc)
    watts = await bmc.power_watts(WATTS_LIMIT_S)
    if watts is not None:
        ward.own.append(OwnLoad(at_s=boottime_s(), source=OwnSource.BMC, watts=watts))
    return found


async def _outlets(ward: CheckContext) -> list[Finding]:
    """Do the outlets of a PDU say what this host draws?"""
    if not ward.settings.outlets:
        return []
    outlets = Outlets(ward.settings.outlets)
    watts = await outlets.watts(OUTLETS_LIMIT_S)
    if watts is None:
        fix = "check ups.NAME.shared.outlets; the next source of this host's own load counts meanwhile"
        return [Finding("shared", "WARN", f"outlets: {outlets.trouble}", fix)]
    ward.own.append(OwnLoad(at_s=boottime_s(), source=OwnSource.PDU, watts=watts))
    return [Finding("shared", "PASS", f"the outlets of this host carry {watts:.0f} W")]


def _bmc_of_the_daemon(status: dict[str, Any] | None) -> Finding:
    if status is None:
        return Finding("bmc", "WARN", "not asked: systemd gives its password to the daemon only", _START)
    if status["bmc"] is None:
        return Finding("bmc", "WARN", "the daemon does not know it yet", _RELOAD)
    bmc = status["bmc"]
    if bmc["verified"]:
        return Finding("bmc", "PASS", f"the daemon has read the power restore policy back: {bmc['policy']}")
    because = bmc["error"] or f"the power restore policy is {bmc['policy'] or 'not read yet'}"
    return Finding("bmc", "FAIL", f"as the daemon found it: {because}", "run doctor as root, to ask the BMC directly")


# --- Sums -----------------------------------------------------------------------------------------------------------


def _budget(ward: CheckContext) -> list[Finding]:
    """The budget with the newest readings, and what the daemon has measured; its result if a secret is missing."""
    if not ward.readings and ward.status is not None and ward.status["ups"] is not None:
        return []  # The daemon's reasons report it.
    if not ward.readings:
        return [Finding("budget", "WARN", "not computed: no UPS could be read", _UNREAD)]
    loaded, state, _ = written(ward.settings.journal.path)
    if loaded is None or state is None or loaded.boot_id != ward.policy.boot_id or not isinstance(state.phase, Online):
        state = State()
    policy = needs.fold(ward.policy, state.learned)
    events: tuple[Event, ...] = (*ward.readings, *ward.trainers)
    for event in events:
        state = step(policy, state, event).state
    now_s = boottime_s()
    found = [Finding("budget", "FAIL", reason.text, reason.fix) for reason in of_battery(policy, state, now_s)]
    full = full_battery(policy, state, now_s)
    if full is not None and full.fits:
        text = (
            f"a full battery has {full.available_s:.0f} s for checkpoint {full.checkpoint_s:.0f} s + full stop "
            f"{full.stop_s:.0f} s, at a paused load of {100 * full.load_paused:.0f} %"
        )
        found.append(Finding("budget", "PASS", text))
    return found


def _shared(ward: CheckContext) -> list[Finding]:
    """Compare what the UPS carries with what this host draws."""
    state = State()
    for reading in ward.readings:
        state = step(ward.policy, state, reading).state
    return rivals.shared_findings(ward.settings, ward.policy, state, ward.own, boottime_s())


# --- This host ------------------------------------------------------------------------------------------------------


def _here(ward: CheckContext) -> list[Finding]:
    found = [_group(ward.settings.control.group, Path(ward.settings.control.socket))]
    if not Path("/var/log/journal").is_dir():
        text = "journald loses its log at a power-off (no /var/log/journal)"
        found.append(Finding("log", "WARN", text, "mkdir /var/log/journal; journalctl --flush"))
    return found


def journal_finding(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Finding:
    """Is the journal on a disk that is there, local, and not full?"""
    folder = path.parent
    try:
        kind = kind_of(str(folder.resolve()), mounts.read_text(encoding="utf-8", errors="surrogateescape"))
        if not folder.is_dir():
            return Finding("journal", "FAIL", f"{folder}: no such folder", "install -d -o powerguard " + str(folder))
        room = os.statvfs(folder)
    except OSError as error:
        return Finding("journal", "FAIL", f"{folder}: {error.strerror}", "make the folder readable")
    free = room.f_bavail * room.f_frsize
    if kind in NETWORKED:
        return Finding(
            "journal", "FAIL", f"{folder} is on {kind}: a network without power is not durable", "use a local disk"
        )
    if kind in VOLATILE or kind == "overlay":
        return Finding(
            "journal", "WARN", f"{folder} is on {kind}: it may not survive the power-off", "use a local disk"
        )
    if room.f_flag & os.ST_RDONLY:
        return Finding("journal", "FAIL", f"{folder} is mounted read-only", "mount it writable")
    if free < SMALL_DISK_BYTES:
        verdict: Verdict = "FAIL" if free < FULL_DISK_BYTES else "WARN"
        return Finding("journal", verdict, f"{folder} has {free / 1e6:.0f} MB free", "make room")
    known, trouble = last_known(str(path))
    state = f"last state: {known['phase']}" if known is not None else "no state yet" if not path.exists() else trouble
    return Finding("journal", "PASS", f"{folder} is on {kind}, {free / 1e9:.0f} GB free; {state}")


def _group(name: str, socket_path: Path) -> Finding:
    try:
        group = grp.getgrnam(name)
    except KeyError:
        text = f"group {name} does not exist: only root may abort or set maintenance"
        return Finding("admin", "WARN", text, f"groupadd --system {name}")
    with contextlib.suppress(OSError):  # no daemon runs here
        if socket_path.stat().st_gid != group.gr_gid:
            text = f"{socket_path} does not belong to group {name}: its members cannot use it"
            right = f"SupplementaryGroups={name} in a drop-in of powerguard.service; then restart it"
            return Finding("admin", "WARN", text, right)
    members = group.gr_mem
    return Finding("admin", "PASS", f"group {name} may use the admin socket ({len(members)} members)")


def _daemon(args: argparse.Namespace) -> list[Finding]:
    try:
        return _daemon_findings(args)
    except (DownError, RefusedError) as error:
        return [Finding("daemon", "FAIL", str(error))]
    except MissingKeyError as error:
        return [_of_an_older_daemon("daemon", error)]


def _daemon_findings(args: argparse.Namespace) -> list[Finding]:
    status = get(args, "/api/v1/status")
    found = [Finding("daemon", "PASS", f"answers: {status['phase']}, {status['mode']}")]
    for reason in status["reasons"]:
        fails = reason["severity"] == "error" and reason["name"] not in NOT_ARMED
        verdict: Verdict = "FAIL" if fails else "WARN"
        found.append(Finding(f"daemon.{reason['name']}", verdict, str(reason["text"]), str(reason["fix"])))
    found += trap_findings(status.get("traps"))
    with contextlib.suppress(DownError, RefusedError):  # reported above, or an older daemon without drills
        found.append(drill_finding(get(args, "/api/v1/drill")["last"]))
    with contextlib.suppress(DownError, RefusedError):  # likewise
        found += [health_finding(ups["name"], ups["health"]) for ups in get(args, "/api/v1/battery")["ups"]]
    return found


def health_finding(name: str, health: dict[str, Any]) -> Finding:
    """Report a presumed health, which costs training time, and a measurement that is about to expire."""
    name, text = f"battery.{name}", f"health counts as {100 * health['share']:.0f} %: {health['because']}"
    measured = health["measured"]
    if health["origin"] == "settings":
        return Finding(name, "PASS", text)
    if measured is None or measured["expired"] or (measured["at_least"] and health["origin"] != "measured"):
        return Finding(name, "WARN", f"{text}. {_RISK}", _MEASURE)
    if measured["age_s"] > OLD_MEASUREMENT_S:
        months = measured["age_s"] / (30.44 * 86400.0)
        return Finding(name, "WARN", f"{text} ({months:.0f} months ago; it expires after 12)", _MEASURE)
    return Finding(name, "PASS", text)


def drill_finding(last: dict[str, Any] | None) -> Finding:
    """Report a missing, old or failed drill. last: the report of the last drill."""
    fix = "powerguard drill"
    if last is None:
        return Finding("drill", "WARN", "there was no drill yet: this host has never rehearsed an outage", fix)
    days = last["age_s"] / 86400.0
    ago = "today" if days < 1.0 else "1 day ago" if days < 1.5 else f"{days:.0f} days ago"
    summary = f"the last drill was {ago}: {last['result']}"
    if last["result"] == "recorded":
        text = f"{summary}: in dry-run no trainer was asked, so there is no measurement"
        return Finding("drill", "WARN", text, f"mode: rehearse, then {fix}")
    if last["result"] != "passed":
        return Finding("drill", "WARN", f"{summary}: {last['because']}", fix)
    if days > DRILL_DAYS:
        return Finding("drill", "WARN", f"{summary} (older than {DRILL_DAYS} days)", fix)
    return Finding("drill", "PASS", summary)
