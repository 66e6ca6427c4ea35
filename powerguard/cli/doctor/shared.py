"""Checks of `powerguard doctor` on a UPS that other hosts hang on.

Is it declared, is this host's own load measured, and does only one host order its output off?
"""

from collections.abc import Sequence
from typing import Final

from powerguard.core.energy import own
from powerguard.core.energy.budget import shed_s
from powerguard.core.model.events import OwnLoad
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import State
from powerguard.effectors.host.findings import Finding
from powerguard.settings.schema import Settings

_GUIDE: Final = "docs/guides/several-ups.md"
_READERS: Final = 10
"""A network card answers this many readers; upsd answers a thousand."""


def clients_findings(name: str, others: int, *, is_shared: bool, cuts: bool) -> list[Finding]:
    """Say what other clients of upsd mean. others: addresses that are logged in for this UPS, without our own."""
    hosts = "1 other host is" if others == 1 else f"{others} other hosts are"
    if not is_shared:
        text = f"{hosts} logged in for this UPS at upsd, and the settings do not say that it is shared"
        return [Finding(name, "WARN", text, f"set ups.NAME.shared: {{hosts: {others + 1}}} ({_GUIDE})")]
    if cuts:
        text = f"{hosts} logged in for this UPS at upsd, and this host orders its output off (output_off)"
        return [Finding(name, "WARN", text, "see that no other host orders it, upsmon's POWERDOWNFLAG included")]
    return []


def findings(settings: Settings, policy: Policy, state: State, loads: Sequence[OwnLoad], now_s: float) -> list[Finding]:
    """Return what is to be said of all feeds. state: with the newest reading; loads: of this host, as measured."""
    for each in loads:
        state = own.enter(policy, state, each)
    if policy.shared is None:
        why = own.looks_shared(policy, state)
        found = [Finding("shared", "WARN", why, f"set ups.NAME.shared ({_GUIDE})")] if why else []
        if policy.shed is not None:
            text = "shed makes this host give up battery time for others, and no UPS is declared as shared"
            found.append(Finding("shared", "WARN", text, f"set ups.NAME.shared, or remove shed ({_GUIDE})"))
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
            fix = f"let one upsd read the card, and set a source of kind nut on every host ({_GUIDE})"
            found.append(Finding("shared", "WARN", text, fix))
    return found


def _own_load(settings: Settings, policy: Policy, state: State, now_s: float) -> Finding:
    """Is there a measurement of what this host draws?"""
    mine = own.own_load(policy, state, now_s)
    if mine is not None and mine.measured:
        return Finding("shared", "PASS", f"this host draws {mine.watts:.0f} W of the UPS's load, by its {mine.source}")
    over = "" if mine is None else "".join(f"; {source}: {why}" for source, why in mine.passed_over)
    if settings.gpu.kind == "nvml":
        return Finding("shared", "PASS", f"the GPUs' power measures whether this host has paused{over}")
    text = "nothing measures what this host draws: no trainer that draws on after a pause would be stopped"
    return Finding(
        "shared",
        "WARN",
        f"{text}{over}",
        f"set bmc (one that reads power), shared.outlets, or gpu.kind: nvml ({_GUIDE})",
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
