"""What `powerguard doctor` looks at of the BMC: will it bring the host back, and does it let strangers in?

Only reads: the policy, what it can be set to, what powered the host on last, what it draws, the watchdog; over IPMI LAN
also what it answers to who has no login, and how much our own account may do.
"""

from pathlib import Path
from typing import Final

from powerguard.clock import boottime_s
from powerguard.core.actions import CheckWay, Way
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc import audit
from powerguard.effectors.bmc.audit import Openness
from powerguard.effectors.bmc.drilled import DrillFile
from powerguard.effectors.bmc.effector import BmcEffector, BmcError, Probe
from powerguard.effectors.bmc.ipmi import ADMINISTRATOR, PowerRestorePolicy, RestartCause
from powerguard.effectors.bmc.lan import LanEngine
from powerguard.effectors.bmc.options import BmcOptions
from powerguard.effectors.bmc.watchdog import WatchdogEffector
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host_findings import Finding

LIMIT_S: Final = 5.0
_NAME: Final = "bmc.security"
_GUIDE: Final = "docs/guides/bmc.md"


async def findings(
    options: BmcOptions, *, folder: Path | None = None, spawn: Spawn = run_child, limit_s: float = LIMIT_S
) -> list[Finding]:
    """Look, and say what was found. Four times limit_s at most. folder: the daemon's, where drills are kept."""
    if options.kind == "none":
        return []
    bmc = BmcEffector(options, spawn=spawn, limit_s=limit_s)
    try:
        seen = await bmc.probe(limit_s)
    except BmcError as error:
        found, answered = [Finding("bmc", "FAIL", str(error), "")], False
    else:
        found, answered = [_policy(seen, options, await bmc.power_watts(1.0))], True
    if options.watchdog and folder is not None:
        found.append(await _watchdog(options, folder, limit_s))
    if options.host is None:
        return found
    try:
        openness = await audit.look(options.host, options.port)
    except* OSError:  # no route, no name: where that matters, the probe has told it
        openness = Openness(cipher_0=None, cipher_17=None, anonymous=None, null_user=None)
    is_silent = openness.cipher_0 is None and openness.anonymous is None
    level = await _level(options, spawn, limit_s) if answered and not is_silent else None
    return [*found, *_security(openness, level, options)]


async def _watchdog(options: BmcOptions, folder: Path, limit_s: float) -> Finding:
    """Could its watchdog be armed, and has a drill shown that it works here?"""
    way = WatchdogEffector(options, DrillFile(folder), limit_s=limit_s)
    try:
        told = dict(await way.carry_out(CheckWay(id="doctor", by_s=boottime_s() + limit_s, way=Way.WATCHDOG)))
    except EffectorError as error:
        return Finding("bmc.watchdog", "WARN", f"blocked: {error}", _GUIDE)
    return Finding("bmc.watchdog", "PASS", f"drilled on this board ({told['board']}), and free: armed in an outage")


def _policy(seen: Probe, options: BmcOptions, watts: float | None) -> Finding:
    """Will it power the host on?"""
    policy, wanted = seen.status.policy, PowerRestorePolicy.ALWAYS_ON
    if policy is wanted:
        draws = "" if watts is None else f"; the host draws {watts:.0f} W"
        text = f"power restore policy is always-on: the host comes back with the power{_last(seen)}{draws}"
        return Finding("bmc", "PASS", text)
    if seen.supported is not None and wanted not in seen.supported:
        return Finding(
            "bmc", "FAIL", f"policy is {policy}, and it cannot be set to always-on", "set it in the firmware"
        )
    if options.policy == "observe":
        return Finding("bmc", "FAIL", f"policy is {policy}: the host stays off", "set bmc.policy: ensure")
    if options.policy == "bracket":
        return Finding("bmc", "PASS", f"policy is {policy}; the armed daemon sets always-on when an outage begins")
    return Finding("bmc", "WARN", f"policy is {policy}; the armed daemon sets always-on", "start the daemon")


def _last(seen: Probe) -> str:
    """What powered the host on last, where the BMC says it."""
    cause = seen.restart_cause
    told = "" if cause in {None, RestartCause.UNKNOWN} else f"; last powered on by {cause}"
    return f"{told}; its last power-off was a loss of AC" if seen.status.ac_failed else told


async def _level(options: BmcOptions, spawn: Spawn, limit_s: float) -> int | None:
    """How much our account may do; None where nobody says, or no login over LAN is ours to make."""
    if options.kind not in {"ipmi-lan", "auto"} or not (options.host and options.user and options.password):
        return None
    lan = LanEngine(options, spawn=spawn, clock=boottime_s)
    try:
        return await lan.account_level(boottime_s() + limit_s)
    except BmcError:  # it has answered already, maybe another way: this is a question beside
        return None


def _security(seen: Openness, level: int | None, options: BmcOptions) -> list[Finding]:
    """Does it let strangers in?"""
    found = []
    if seen.cipher_0:
        text = "cipher suite 0 is accepted over IPMI LAN: whoever knows a user's name needs no password"
        found.append(
            Finding(_NAME, "FAIL", text, f"forbid it: ipmitool lan set 1 cipher_privs Xaaaaaaaaaaaaaa ({_GUIDE})")
        )
    if seen.anonymous:
        text = "anonymous login is on over IPMI LAN: no name and no password are needed"
        found.append(Finding(_NAME, "FAIL", text, "disable user 1: ipmitool user disable 1"))
    elif seen.null_user:
        text = "a user without a name may log in over IPMI LAN"
        found.append(Finding(_NAME, "WARN", text, "disable user 1: ipmitool user disable 1"))
    if seen.cipher_17 is False:
        text = "no cipher suite 17 (SHA-256) over IPMI LAN: its older hash is attacked faster"
        found.append(Finding(_NAME, "WARN", text, "look for a firmware update; a random password of 16 to 20 bytes"))
    if level is not None and level >= ADMINISTRATOR:
        text = f"account {options.user} may do more than Operator (level {level}), and need not"
        found.append(Finding(_NAME, "WARN", text, "ipmitool channel setaccess 1 USER-ID privilege=3"))
    if found:
        return found
    if seen.cipher_0 is None and seen.anonymous is None:
        if options.kind == "ipmi-lan":
            return []
        return [Finding(_NAME, "PASS", "IPMI over LAN does not answer strangers from here")]
    return [Finding(_NAME, "PASS", "over IPMI LAN: no cipher suite 0, no anonymous login")]
