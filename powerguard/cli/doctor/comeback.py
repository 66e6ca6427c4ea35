"""Doctor's checks of the power-on methods: can each be armed, and does one cover the power race?

Also of a sentinel on this host: hosts that rely on a sentinel that does not run stay off.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from powerguard.clock import boot_id, boottime_s
from powerguard.core.comeback.methods import named
from powerguard.core.model.actions import CheckPowerOn, PowerOnMethod
from powerguard.core.model.policy import Policy
from powerguard.daemon.attempt import AbandonedTasks, attempt
from powerguard.daemon.loop import entered
from powerguard.daemon.observe.port import PowerOnView
from powerguard.daemon.observe.status import LETTERS, Layer, layers, uncovered
from powerguard.daemon.wiring import methods_of, with_methods
from powerguard.effectors.base import PowerOnEffector
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host.findings import Finding, shown
from powerguard.settings.schema import Settings

LIMIT_S: Final = 5.0
_FIX: Final = (
    "arm one: the host's clock (rtc: {kind: device}), a sentinel on another host (sentinel: {kind: http, ...}), the "
    "UPS's output (ups.NAME.output_off), or the BMC's watchdog; docs/guides/return.md"
)
LEAST_RESTART_PCT: Final = 25.0
"""A quarter of a charge, of a battery of three quarters of its health: three minutes of boot and a bare stop."""
MOST_RESTART_PCT: Final = 80.0
_NO_LATE: Final = "this host powers off even if utility is stable again when all units have stopped"


async def ask(settings: Settings, policy: Policy) -> tuple[Layer, ...]:
    """Check every power-on method of the settings, in parallel, read-only. The BMC's policy has its own check."""
    made = methods_of(settings, clock=boottime_s, wall=time.time, boot=boot_id(), armed=False)  # noqa: TID251 - for display
    policy = with_methods(policy, settings, made, checks_host=False)
    effector, abandoned = PowerOnEffector(made), AbandonedTasks()

    async def one(method: PowerOnMethod, ups: str) -> PowerOnView:
        action = CheckPowerOn(id=f"doctor-{method}{ups}", by_s=boottime_s() + LIMIT_S, method=method, ups=ups)
        outcome = await attempt(effector, action, clock=boottime_s, abandoned=abandoned)
        return entered(PowerOnView(method=method, ups=ups), outcome)

    async with asyncio.TaskGroup() as tasks:
        checks = [tasks.create_task(one(method, ups)) for method, ups in named(policy)]
    return layers(policy, None, [each.result() for each in checks])


def of_status(power_on: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return the methods by the daemon's status: it has the secrets, and the user of doctor has not."""
    return tuple(
        Layer(letter=each["layer"], name=each["name"], stands=each["stands"], why=each["why"], ups=each["ups"])
        for each in power_on["layers"]
    )


def findings(known: Sequence[Layer]) -> list[Finding]:
    """Return the findings on them, with the same grade in every mode: one may arm a host without a FAIL."""
    found = [_layer_finding(each) for each in known if each.letter in LETTERS.values() and each.stands != "off"]
    late = next((each for each in known if each.letter == "A"), None)
    if late is not None and late.stands == "off":
        found.append(
            Finding("power_on.late_reboot", "WARN", _NO_LATE, "set host.late_reboot: true and host.kind: systemd")
        )
    if because := uncovered(known):
        found.append(Finding("power_on", "FAIL", because, _FIX))
    return found


def restart_charge(name: str, restart_pct: float | None, fix: str) -> list[Finding]:
    """Judge the charge at which a UPS switches its output on again; None: its family does not report it.

    Hosts boot as soon as it does. Below 25 % a second outage finds them booting and a battery that does not outlast it.
    """
    if restart_pct is None:
        return []
    text = f"switches its output on again at {restart_pct:g} % charge"
    if restart_pct < LEAST_RESTART_PCT:
        return [Finding(name, "WARN", f"{text}: a second outage would then cut the power while the host boots", fix)]
    if restart_pct > MOST_RESTART_PCT:
        return [Finding(name, "WARN", f"{text} only: the host stays off for hours", fix)]
    return [Finding(name, "PASS", text)]


def _layer_finding(layer: Layer) -> Finding:
    name = f"power_on.{layer.name}" + (f".{layer.ups}" if layer.ups else "")
    if layer.stands == "armed":
        return Finding(name, "PASS", f"method {layer.letter}: checked, and it can be armed")
    return Finding(name, "WARN", f"method {layer.letter} is {layer.stands}: {layer.why}")


SETTINGS: Final = Path("/etc/powerguard/sentinel.yaml")
UNIT: Final = "powerguard-sentinel.service"
_START: Final = f"powerguard sentinel --config {SETTINGS} --check; systemctl enable --now {UNIT}"


async def sentinel_findings(*, spawn: Spawn = run_child, settings: Path = SETTINGS) -> list[Finding]:
    """Return the findings on a sentinel with settings here: are they valid, does it run now and at boot?"""
    if not os.access(settings, os.F_OK):
        return []
    from powerguard.sentinel.options import load
    from powerguard.settings.load import SettingsError

    if not os.access(settings, os.R_OK):
        return [Finding("sentinel", "WARN", f"{settings}: cannot be read from here", "run doctor as root")]
    try:
        mode = load(settings).mode
    except SettingsError as error:
        fix = f"run `powerguard sentinel --config {settings} --check`"
        return [Finding("sentinel", "FAIL", error.problems[0], fix)]
    shows = await shown(spawn, "--property=ActiveState,UnitFileState", UNIT)
    if shows is None:
        return [Finding("sentinel", "WARN", "cannot ask systemd whether it runs", "is this a systemd host?")]
    properties = shows[0]
    if properties.get("ActiveState") not in {"active", "reloading"}:
        because = f"it has settings ({settings}) but does not run: hosts that rely on it stay off"
        return [Finding("sentinel", "FAIL", because, _START)]
    if properties.get("UnitFileState") != "enabled":
        because = "it runs, but does not start at boot: an outage of this host ends it"
        return [Finding("sentinel", "FAIL", because, f"systemctl enable {UNIT}")]
    if mode == "dry-run":
        because = "it runs in dry-run: it only records which hosts it would power on"
        return [Finding("sentinel", "WARN", because, f"mode: armed in {settings}, and systemctl reload {UNIT}")]
    return [Finding("sentinel", "PASS", "it runs, and starts at boot")]
