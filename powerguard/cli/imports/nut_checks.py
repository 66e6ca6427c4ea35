"""Warnings about a NUT configuration, and notes on directives without an equivalent: NUT 2.8.0, mostly measured.

upsmon, upssched and the drivers were run and timed (upsd with dummy-ups, snmp-ups against net-snmp): the figures in the
texts below are from there.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from powerguard.cli.imports.draft import FORCE_AFTER_S, Draft, has_mode, number
from powerguard.cli.imports.nut import Nut
from powerguard.cli.imports.words import Line, Section

EVENTS: Final = (
    "ONLINE",
    "ONBATT",
    "LOWBATT",
    "FSD",
    "COMMOK",
    "COMMBAD",
    "SHUTDOWN",
    "REPLBATT",
    "NOCOMM",
    "NOPARENT",
)
HINTS: Final = ("ONBATT", "ONLINE", "LOWBATT", "FSD", "COMMBAD")
"""Events that are worth an earlier poll."""

NO_EQUIVALENT: Final = {
    "RBWARNTIME": "powerguard logs an alarm when it begins and ends; repeat it in your monitoring",
    "NOCOMMWARNTIME": "powerguard logs an alarm once, and keeps it in the metrics until it ends",
    "NOTIFYMSG": "powerguard's message texts cannot be customised",
    "OFFDURATION": "an output that is off raises an alarm, but is never a reason for a shutdown",
    "OVERDURATION": "an overload is an alarm; the budget counts the real load",
    "OBLBDURATION": "low battery needs two readings, and counts from then on",
    "ALARMCRITICAL": "alarms are logged; lost communication in such a state is not a reason to shut down",
    "POLLFREQALERT": "powerguard always polls upsd four times a second",
    "SHUTDOWNEXIT": "powerguard holds its login at upsd until the work is saved",
    "CERTIDENT": "powerguard logs in by user and password; a client certificate is not used",
    "DEBUG_MIN": "set log: {level: debug}",
}
UPSMON: Final = frozenset(
    (
        "MONITOR",
        "DEADTIME",
        "FINALDELAY",
        "HOSTSYNC",
        "MINSUPPLIES",
        "NOTIFYCMD",
        "NOTIFYFLAG",
        "NOTIFYMSG",
        "POLLFREQ",
        "POLLFREQALERT",
        "POWERDOWNFLAG",
        "RUN_AS_USER",
        "SHUTDOWNCMD",
        "CERTPATH",
        "CERTHOST",
        "CERTVERIFY",
        "FORCESSL",
        "POLLFAIL_LOG_THROTTLE_MAX",
        *NO_EQUIVALENT,
    )
)
UPSD: Final = frozenset(
    (
        "LISTEN",
        "MAXAGE",
        "MAXCONN",
        "STATEPATH",
        "CERTFILE",
        "CERTPATH",
        "CERTIDENT",
        "CERTREQUEST",
        "TRACKINGDELAY",
        "ALLOW_NO_DEVICE",
        "ALLOW_NOT_ALL_LISTENERS",
        "DISABLE_WEAK_SSL",
        "DEBUG_MIN",
        "ACL",
        "ACCEPT",
        "REJECT",
    )
)
_FULL_WALK: Final = frozenset(("snmp-ups", "usbhid-ups"))
_SLOW_S: Final = 5.0


def check(nut: Nut, draft: Draft) -> None:
    """Put all warnings and notes into the draft."""
    _mode(nut, draft)
    _drivers(nut, draft)
    _users(nut, draft)
    _open_files(nut, draft)
    if nut.has("upsmon.conf"):
        _unknown(nut, draft)
        _times(nut, draft)
        _power_off(nut, draft)
        _certificates(nut, draft)
        _notify(nut, draft)
        for directive, why in NO_EQUIVALENT.items():
            if directive in nut.directives:
                draft.note("no_equivalent", nut.place("upsmon.conf", directive), f"{directive}: {why}")
    if nut.has("upssched.conf"):
        _timers(nut, draft)


def _mode(nut: Nut, draft: Draft) -> None:
    if nut.has("nut.conf") and nut.mode in ("", "none"):
        draft.warn(
            "mode_none",
            nut.place("nut.conf"),
            "MODE is none or not set: NUT is not started at boot",
            "standalone, netserver or netclient, while powerguard reads upsd",
        )
    if nut.mode == "netclient" and nut.drivers:
        draft.note("netclient", nut.place("nut.conf"), "MODE netclient: the drivers of ups.conf are not started here")


# --- Drivers and upsd -------------------------------------------------------------------------------------------------


def _drivers(nut: Nut, draft: Draft) -> None:
    for section in nut.drivers.values():
        driver = section.text("driver")
        if not driver:
            draft.warn("no_driver", section.where, "a section without driver: NUT does not start it", "driver = ...")
        if driver in _FULL_WALK:
            _full_walk(nut, section, driver, draft)
        if driver == "snmp-ups":
            draft.warn(
                "killpower_snmp",
                section.place("driver"),
                "upsdrvctl shutdown runs at the very end of a shutdown, when the network is down: over SNMP it "
                "never reaches the card, so the UPS never cuts its output",
                "let the BMC power the host on (bmc: policy: ensure), not the UPS",
            )
        if "ignorelb" in section.values and not any(key.startswith("override.battery.") for key in section.values):
            draft.warn(
                "ignorelb",
                section.place("ignorelb"),
                "ignorelb without override.battery.charge.low or .runtime.low: low battery is never reported",
                "set one of the two, or remove ignorelb",
            )
        charge = section.last("override.battery.charge.low")
        if charge is not None:
            draft.note(
                "low_by_charge",
                charge[1],
                "low battery by charge: powerguard counts energy, and reads the UPS's "
                "low-battery flag as budget.low_battery_s left",
            )
    told = nut.directives.get("MAXAGE", [])
    age_s = number(told[-1].words[1]) if told and len(told[-1].words) > 1 else None
    if age_s is not None and age_s > 15:
        draft.warn("maxage", told[-1].where, f"MAXAGE {age_s:g}: upsd reports data of that age as new", "15 or less")


def _full_walk(nut: Nut, section: Section, driver: str, draft: Draft) -> None:
    told = section.last("pollfreq") or nut.all_drivers.last("pollfreq")
    poll_s = 30.0 if told is None else number(told[0])
    if poll_s is None or poll_s <= _SLOW_S:
        return
    where = section.where if told is None else told[1]
    how = f"pollfreq {poll_s:g}" + (" (NUT's default)" if told is None else "")
    if driver == "snmp-ups":
        draft.warn("pollfreq", where, f"{how}: upsd notices an outage 12 to 30 s late (measured)", "pollfreq = 1")
    else:
        own = section.last("pollinterval") or nut.all_drivers.last("pollinterval")
        status = "2 s, NUT's default" if own is None or number(own[0]) is None else f"{number(own[0]):g} s"
        draft.warn(
            "pollfreq",
            where,
            f"{how}: charge and runtime are that old; the status itself comes every pollinterval ({status})",
            "pollfreq = 5",
        )


def _users(nut: Nut, draft: Draft) -> None:
    for section in nut.users.values():
        if "password" not in section.values:
            draft.warn(
                "no_password", section.where, "a user without password: upsd refuses its login", "password = ..."
            )
    if not nut.has("upsd.users"):
        return
    for monitor in nut.monitors:
        if not monitor.is_local:
            continue
        user = nut.users.get(monitor.user)
        if user is None:
            draft.warn(
                "unknown_user",
                monitor.where,
                "upsd.users has no such user: upsd refuses the login",
                f"a section for it in {nut.place('upsd.users')}",
            )
        elif user.last("password") is not None and user.text("password") != monitor.secret:
            draft.warn(
                "password_differs",
                monitor.where,
                f"the password is not the one in {user.place('password')}",
                "use the same password in both",
            )
        elif monitor.role == "primary" and user.text("upsmon").lower() not in ("primary", "master"):
            draft.warn(
                "not_primary",
                monitor.where,
                f"MONITOR says primary, and {user.place('upsmon')} does not: upsd "
                "refuses a forced shutdown, so the other hosts do not get the order",
                "upsmon primary",
            )


def _open_files(nut: Nut, draft: Draft) -> None:
    for name in ("upsmon.conf", "upsd.users", "ups.conf"):
        words = nut.files.get(name)
        holds = {"upsmon.conf": bool(nut.monitors), "upsd.users": bool(nut.users)}.get(name) or any(
            key in section.values
            for section in nut.drivers.values()
            for key in ("community", "authPassword", "privPassword")
        )
        if words is not None and holds and has_mode(words.mode):
            draft.warn(
                "open_file",
                words.file,
                "holds passwords, and every user of this host can read it",
                f"chmod 0640 {words.file}, group nut",
            )


# --- upsmon -----------------------------------------------------------------------------------------------------------


def _unknown(nut: Nut, draft: Draft) -> None:
    for name, known in (("upsmon.conf", UPSMON), ("upsd.conf", UPSD)):
        for line in nut.files[name].lines if nut.has(name) else ():
            if line.words[0] not in known:
                near = get_close_matches(line.words[0].upper(), known, n=1)
                hint = f"{near[0]}?" if near else "remove the line"
                draft.warn("unknown_directive", line.where, "an unknown directive: NUT ignores it", hint)


def _times(nut: Nut, draft: Draft) -> None:
    hostsync_s, final_s = nut.seconds("HOSTSYNC", 15), nut.seconds("FINALDELAY", 5)
    poll_s, dead_s = nut.seconds("POLLFREQ", 5), nut.seconds("DEADTIME", 15)
    alert_s = nut.seconds("POLLFREQALERT", 5)
    is_primary = any(monitor.role == "primary" for monitor in nut.monitors)
    if hostsync_s < draft.checkpoint_s:
        whose = "" if is_primary else "; the primary's value counts"
        draft.warn(
            "hostsync",
            nut.place("upsmon.conf", "HOSTSYNC"),
            f"HOSTSYNC {hostsync_s:g}: the primary waits that long for the others, and a checkpoint takes "
            f"{draft.checkpoint_s:g} s{whose}",
            f"HOSTSYNC {_up(draft.checkpoint_s)} or more, on the primary, as long as the battery has it",
        )
    if final_s > 10 or final_s >= hostsync_s:
        draft.warn(
            "finaldelay",
            nut.place("upsmon.conf", "FINALDELAY"),
            f"FINALDELAY {final_s:g}: seconds of an almost empty battery without any work saved"
            + ("; the primary no longer waits that long (HOSTSYNC)" if final_s >= hostsync_s else ""),
            "0 to 5; powerguard waits for the checkpoint itself",
        )
    if dead_s < 3 * max(poll_s, alert_s):
        draft.warn(
            "deadtime",
            nut.place("upsmon.conf", "DEADTIME"),
            f"DEADTIME {dead_s:g} is less than 3 polls of {max(poll_s, alert_s):g} s: one lost answer on battery "
            "shuts the host down",
            f"{3 * max(poll_s, alert_s):g}",
        )
    elif dead_s > 15:
        draft.warn(
            "deadtime",
            nut.place("upsmon.conf", "DEADTIME"),
            f"DEADTIME {dead_s:g}: on battery, upsmon notices only after this time that it gets no data, and "
            "upsd's MAXAGE comes on top (measured with 15: 20 to 40 s)",
            "15 or less",
        )
    else:
        draft.note(
            "deadtime",
            nut.place("upsmon.conf", "DEADTIME"),
            f"DEADTIME {dead_s:g}: powerguard notices after 3 s, and continues with its own energy account",
        )
    if poll_s > _SLOW_S:
        draft.warn(
            "upsmon_pollfreq",
            nut.place("upsmon.conf", "POLLFREQ"),
            f"POLLFREQ {poll_s:g}: upsmon does not notice shorter outages",
            "1 to 5",
        )


def _certificates(nut: Nut, draft: Draft) -> None:
    """Warn about a missing CA if NUT verified upsd's certificate."""
    if nut.value("CERTVERIFY") == "1" or nut.value("FORCESSL") == "1":
        where = nut.place("upsmon.conf", "CERTPATH" if "CERTPATH" in nut.directives else "CERTVERIFY")
        draft.note(
            "certificates",
            where,
            "tls: required always verifies upsd's certificate: name its authority (a PEM file) as ca, unless the host "
            "knows it; CERTPATH of NUT is a folder or a database of NSS (certutil -L -d FOLDER -n NAME -a prints one)",
        )


def _power_off(nut: Nut, draft: Draft) -> None:
    where = nut.files["upsmon.conf"].file
    primaries = [monitor for monitor in nut.monitors if monitor.role == "primary"]
    if primaries and not nut.value("POWERDOWNFLAG"):
        draft.warn(
            "powerdownflag",
            where,
            "no POWERDOWNFLAG: the UPS never gets the order to cut its output, so a host that went "
            "down while utility returned stays off",
            "POWERDOWNFLAG /etc/killpower; and bmc: policy: ensure",
        )
    if not nut.value("SHUTDOWNCMD"):
        draft.warn(
            "no_shutdowncmd",
            where,
            "no SHUTDOWNCMD: upsmon does not shut the host down",
            'SHUTDOWNCMD "/usr/lib/powerguard/nut/powerguard-shutdown /sbin/shutdown -h +0"',
        )
    elif "powerguard" not in " ".join(nut.directives["SHUTDOWNCMD"][-1].words):
        draft.note(
            "shutdowncmd",
            nut.place("upsmon.conf", "SHUTDOWNCMD"),
            "SHUTDOWNCMD: put /usr/lib/powerguard/nut/"
            "powerguard-shutdown before it while both run, so that only one of them shuts the host down",
        )
    if nut.value("RUN_AS_USER") == "root":
        draft.warn(
            "run_as_root",
            nut.place("upsmon.conf", "RUN_AS_USER"),
            "upsmon's network process runs as root, and so do its hooks",
            "RUN_AS_USER nut",
        )
    for monitor in (monitor for monitor in primaries if monitor.supplies):
        section = nut.drivers.get(monitor.name)
        others = [user for user in nut.users.values() if user.text("upsmon").lower() in ("secondary", "slave")]
        told = None if section is None else section.last("offdelay")
        delay_s = 20.0 if told is None else number(told[0])
        if others and delay_s is not None and delay_s < FORCE_AFTER_S:
            draft.warn(
                "offdelay",
                monitor.where if told is None else told[1],
                f"the UPS cuts its output {delay_s:g} s after the primary's order"
                + (" (NUT's default)" if told is None else "")
                + f"; the other hosts that it feeds may take {FORCE_AFTER_S:g} s to stop",
                f"offdelay = {FORCE_AFTER_S + 10:g}, if the battery lasts for it",
            )


# --- NOTIFYCMD and upssched -------------------------------------------------------------------------------------------


def _flags(nut: Nut) -> dict[str, tuple[frozenset[str], str]]:
    """Return flags and place of each event that has a NOTIFYFLAG."""
    return {
        line.words[1]: (frozenset(line.words[2].split("+")), line.where)
        for line in nut.directives.get("NOTIFYFLAG", [])
        if len(line.words) > 2
    }


def _notify(nut: Nut, draft: Draft) -> None:
    flags = _flags(nut)
    executed = [kind for kind, (told, _) in flags.items() if "EXEC" in told]
    if executed and not nut.value("NOTIFYCMD"):
        draft.warn(
            "no_notifycmd", flags[executed[0]][1], "EXEC without a NOTIFYCMD: no program is called", "NOTIFYCMD ..."
        )
    if not nut.value("NOTIFYCMD"):
        return
    missing = [kind for kind in HINTS if kind not in executed]
    if missing:
        draft.warn(
            "no_exec",
            nut.place("upsmon.conf", "NOTIFYCMD"),
            f"NOTIFYCMD is not called for {', '.join(missing)}: their NOTIFYFLAG has no EXEC",
            f"NOTIFYFLAG {missing[0]} SYSLOG+WALL+EXEC, and so on",
        )


def _timers(nut: Nut, draft: Draft) -> None:
    if not any(line.words[0] == "AT" for line in nut.timers):
        return
    called = {kind for kind, (told, _) in _flags(nut).items() if "EXEC" in told}
    script = next((line for line in nut.timers if line.words[0] == "CMDSCRIPT"), None)
    if script is None:
        draft.warn(
            "no_cmdscript",
            nut.place("upssched.conf"),
            "no CMDSCRIPT: upssched ends without any action",
            "CMDSCRIPT /usr/lib/powerguard/nut/powerguard-notify",
        )
    for needed in ("PIPEFN", "LOCKFN"):
        if not any(line.words[0] == needed for line in nut.timers):
            draft.warn(
                "upssched_incomplete",
                nut.place("upssched.conf"),
                f"no {needed}: upssched has no effect",
                f"{needed} /run/nut/upssched/{needed[:4].lower()}",
            )
    for line in nut.timers:
        if line.words[0] == "AT":
            _timer(line, called, nut, draft)


def _timer(line: Line, called: Iterable[str], nut: Nut, draft: Draft) -> None:
    if len(line.words) < 5:
        draft.warn(
            "odd_timer", line.where, "AT without event, UPS, command and name", "AT ONBATT * START-TIMER name 30"
        )
        return
    kind, _, command = line.words[1:4]
    if nut.has("upsmon.conf") and kind in EVENTS and kind not in called:
        draft.warn(
            "timer_never",
            line.where,
            f"{kind} never arrives here: its NOTIFYFLAG in upsmon.conf has no EXEC",
            f"NOTIFYFLAG {kind} SYSLOG+WALL+EXEC",
        )
    seconds = number(line.words[5]) if command.startswith("START-TIMER") and len(line.words) > 5 else None
    if kind == "ONBATT" and seconds is not None:
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


def _up(seconds: float) -> int:
    return -int(-seconds // 1)
