"""What doctor finds of a sentinel that this host is to run: hosts that rely on one that does not run stay off."""

import os
from pathlib import Path
from typing import Final

from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host_findings import LOOK_LIMIT_S, Finding

SETTINGS: Final = Path("/etc/powerguard/sentinel.yaml")
UNIT: Final = "powerguard-sentinel.service"
_START: Final = f"powerguard sentinel --config {SETTINGS} --check; systemctl enable --now {UNIT}"


async def findings(*, spawn: Spawn = run_child, settings: Path = SETTINGS) -> list[Finding]:
    """Return nothing where no sentinel has settings here; else whether they hold, and it runs now and at boot."""
    if not os.access(settings, os.F_OK):
        return []
    from powerguard.sentinel.options import load
    from powerguard.settings.load import SettingsError

    if not os.access(settings, os.R_OK):
        return [Finding("sentinel", "WARN", f"{settings}: cannot be read from here", "run doctor as root")]
    try:
        mode = load(settings).mode
    except SettingsError as error:
        fix = f"`powerguard sentinel --config {settings} --check` tells all"
        return [Finding("sentinel", "FAIL", error.problems[0], fix)]
    told = await _asked(spawn)
    if told is None:
        return [Finding("sentinel", "WARN", "cannot ask systemd whether it runs", "is this a systemd host?")]
    if told.get("ActiveState") not in {"active", "reloading"}:
        because = f"it has settings ({settings}) and does not run: hosts that rely on it stay off"
        return [Finding("sentinel", "FAIL", because, _START)]
    if told.get("UnitFileState") != "enabled":
        because = "it runs, and is not started at boot: an outage that takes this host along ends it"
        return [Finding("sentinel", "FAIL", because, f"systemctl enable {UNIT}")]
    if mode == "dry-run":
        because = "it runs in dry-run: it only writes down whom it would power on"
        return [Finding("sentinel", "WARN", because, f"mode: armed in {settings}, and systemctl reload {UNIT}")]
    return [Finding("sentinel", "PASS", "it runs, and is started at boot")]


async def _asked(spawn: Spawn) -> dict[str, str] | None:
    """What systemd says of its unit; None where it cannot be asked."""
    try:
        ended = await spawn(("systemctl", "show", "--property=ActiveState,UnitFileState", UNIT), limit_s=LOOK_LIMIT_S)
    except OSError:
        return None
    if ended.timed_out or ended.returncode != 0:
        return None
    lines = ended.stdout.decode("utf-8", "replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)
