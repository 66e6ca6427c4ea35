"""Checks of `powerguard doctor` on GPU power: would a cap work, how far, and would the limits be restored?

It asks the root helper to list (a read), and systemd whether the watch is there.
"""

from collections.abc import Sequence
from typing import Any, Final

from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.gpu.effector import GpuEffector
from powerguard.effectors.host.findings import Finding
from powerguard.effectors.options import GpuOptions

WATCH: Final = "powerguard-gpu-watch.path"
LOOK_LIMIT_S: Final = 2.0
_GUIDE: Final = "docs/guides/gpu-and-signals.md"


async def findings(options: GpuOptions, *, spawn: Spawn = run_child) -> list[Finding]:
    """Return the findings; none if the settings leave GPUs alone. Takes some seconds at most."""
    if options.kind == "none":
        return []
    try:
        answer = await GpuEffector(options).ask({"word": "list"})
    except EffectorError as error:
        if "only powerguard and root may" in str(error):
            return [Finding("gpu", "WARN", f"{error}: not checked", "run doctor as root or as powerguard")]
        return [Finding("gpu", "FAIL", str(error), _GUIDE)]
    told = answer.get("gpus")
    gpus = [gpu for gpu in told if isinstance(gpu, dict)] if isinstance(told, list) else []
    found = [_reach(gpus, options.cap_share), *_single(gpus, options.cap_share)]
    capped = answer.get("capped")
    if isinstance(capped, int) and capped:
        text = f"the limits of {capped} GPUs are lowered now, by an outage, a drill or a failed restore"
        found.append(
            Finding("gpu.capped", "WARN", text, "`powerguard status`; by hand, as root: powerguard-gpu restore")
        )
    return [*found, await _watch(spawn)]


def _reach(gpus: Sequence[dict[str, Any]], share: float) -> Finding:
    """Could anything be capped at all?"""
    settable = [gpu for gpu in gpus if gpu.get("settable") is True]
    if not gpus:
        return Finding("gpu", "FAIL", "NVML reports no GPU here", "set gpu.kind: none")
    if not settable:
        reasons = "; ".join(sorted({str(gpu.get("because", "")) for gpu in gpus}))
        return Finding("gpu", "FAIL", f"no power limit can be set: {reasons}", f"{_GUIDE}, or gpu.kind: none")
    now_w = sum(_watts(gpu, "limit_w") for gpu in settable)
    then_w = sum(_capped_w(gpu, share) for gpu in settable)
    text = f"{len(settable)} of {len(gpus)} GPUs can be capped: from {now_w:.0f} W to {then_w:.0f} W in all"
    if then_w >= now_w:
        return Finding("gpu", "WARN", f"{text}, which saves no power", "set gpu.kind: none, or a lower gpu.cap_share")
    if len(settable) < len(gpus):
        reasons = "; ".join(f"GPU {gpu.get('index')}: {gpu.get('because')}" for gpu in gpus if gpu not in settable)
        return Finding("gpu", "WARN", f"{text}; {reasons}", "nvidia-smi; dmesg")
    return Finding("gpu", "PASS", text)


def _single(gpus: Sequence[dict[str, Any]], share: float) -> list[Finding]:
    """Oddities of single GPUs, one line for each kind."""
    found: list[Finding] = []
    forgetful = [gpu for gpu in gpus if gpu.get("persistent") is False]
    if forgetful:
        text = f"persistence mode is off ({_named(forgetful)}): a GPU without a user forgets its power limit"
        found.append(Finding("gpu.persistence", "WARN", text, "systemctl enable --now nvidia-persistenced"))
    high = [
        gpu
        for gpu in gpus
        if gpu.get("settable") is True
        and share * _watts(gpu, "limit_w") < _watts(gpu, "min_w") < _watts(gpu, "limit_w")
    ]
    if high:
        text = (
            f"cannot be lowered to cap_share {share:g} ({_named(high)}): {_watts(high[0], 'min_w'):.0f} W is the least"
        )
        found.append(Finding("gpu.least", "WARN", text, "raise gpu.cap_share to a possible value, and drill again"))
    return found


async def _watch(spawn: Spawn) -> Finding:
    """Would the limits be restored without the daemon?"""
    name = "gpu.watch"
    try:
        ended = await spawn(["systemctl", "show", WATCH, "--property=LoadState,ActiveState"], limit_s=LOOK_LIMIT_S)
    except OSError:
        return Finding(name, "WARN", f"cannot ask systemd about {WATCH}", "is this a systemd host?")
    told = dict(line.split("=", 1) for line in ended.stdout.decode("utf-8", "replace").splitlines() if "=" in line)
    if ended.timed_out or ended.returncode != 0 or "ActiveState" not in told:
        return Finding(name, "WARN", f"cannot ask systemd about {WATCH}", "is this a systemd host?")
    if told["ActiveState"] == "active":
        return Finding(name, "PASS", "limits are restored even if the daemon does not restore them")
    text = (
        f"{WATCH} is {told.get('LoadState')} and {told['ActiveState']}: without the daemon, limits would stay lowered"
    )
    return Finding(name, "FAIL", text, f"systemctl enable --now {WATCH}")


def _capped_w(gpu: dict[str, Any], share: float) -> float:
    limit_w = _watts(gpu, "limit_w")
    return min(limit_w, max(_watts(gpu, "min_w"), share * limit_w))


def _watts(gpu: dict[str, Any], key: str) -> float:
    told = gpu.get(key)
    return float(told) if isinstance(told, int | float) else 0.0


def _named(gpus: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"GPU {gpu.get('index')}" for gpu in gpus[:8]) + (" ..." if len(gpus) > 8 else "")
