"""The effector `gpu`: has the power limits of this host's GPUs lowered on battery, and put back afterwards.

The daemon has no right to set a limit. It sends one word to the root helper powerguard-gpu, which has no other function
(docs/guides/gpu-and-signals.md), and waits at most LIMIT_S: a wedged driver never answers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from powerguard.core.model.actions import Action, CapPower, Detail, RestorePower
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host.findings import Finding, watch
from powerguard.effectors.options import GPU_SOCKET, GpuOptions
from powerguard.effectors.root_client import RootHelper, objects_in

log = structlog.get_logger()

LIMIT_S: Final = 4.75
"""Timeout for one request. The helper itself answers within 4 s, whatever NVML does. Less than an order has
(CAP_LIMIT_S): at that, only "timed out" would be reported, and not which helper hangs."""


class GpuEffector:
    """Carries out CapPower and RestorePower. Twice is as good as once: what was found first is what comes back."""

    def __init__(self, options: GpuOptions, *, limit_s: float = LIMIT_S) -> None:
        """Set up, without touching anything. limit_s: for one word; a caller that cancels earlier is free to."""
        self._options = options
        hangs = "powerguard-gpu or the NVIDIA driver hangs"
        self._helper = RootHelper(name="powerguard-gpu", socket=options.socket, real=GPU_SOCKET, hangs=hangs)
        self._limit_s = limit_s

    async def carry_out(self, action: Action) -> Detail:
        """Cap or restore. Raises EffectorError.

        Detail: `gpus` (how many were capped or put back, or were so already), `watts_before` and `watts_after` (sums
        of their limits), `failed` and `left_alone` (how many), and `because`: what there is to say of single ones.
        A cap fails where no GPU was capped, a restore where one could not be put back; the helper tries that again.
        """
        match action:
            case CapPower(share=share):
                if self._options.kind == "none":
                    msg = (
                        "gpu.kind is none: GPUs are left alone (set gpu.kind: nvml, see docs/guides/gpu-and-signals.md)"
                    )
                    raise EffectorError(msg)
                return _detail(await self.ask({"word": "cap", "share": share}), {"capped", "kept"})
            case RestorePower():
                if self._options.kind == "none" and not self._helper.is_there():
                    return (("gpus", 0),)  # the helper is not installed, so no limit was changed
                return _detail(await self.ask({"word": "restore"}), {"restored", "kept"})
            case _:
                msg = f"gpu: cannot carry out {type(action).__name__}: only CapPower and RestorePower"
                raise EffectorError(msg)

    async def hold(self, wanted: Callable[[], bool], rest: Callable[[float], Any]) -> None:
        """Renew the cap's lease at the helper, for as long as the cap is wanted; never returns.

        wanted: what the core remembers. A daemon that is gone, or has forgotten, is silent, and the cap is lifted.
        """

        def failed(because: str) -> None:
            log.warning("gpu_hold_failed", because=because, lifted_after_s=180)

        await self._helper.hold(wanted, rest, failed, limit_s=self._limit_s)

    async def ask(self, word: dict[str, object]) -> dict[str, Any]:
        """Send one word to the helper and return its answer. Raises EffectorError, also if it refuses."""
        return await self._helper.ask(word, limit_s=self._limit_s)


def _detail(answer: dict[str, Any], good: set[str]) -> Detail:
    """The details of an answer, for the journal and for messages."""
    gpus = objects_in(answer, "gpus")
    done = [gpu for gpu in gpus if str(gpu.get("did")) in good]
    rest = [gpu for gpu in gpus if str(gpu.get("did")) not in good]
    because = "; ".join(f"GPU {gpu.get('index')}: {gpu.get('because')}" for gpu in rest)
    return (
        ("gpus", len(done)),
        ("watts_before", sum(_number(gpu.get("watts_before")) for gpu in done)),
        ("watts_after", sum(_number(gpu.get("watts_after")) for gpu in done)),
        ("failed", sum(str(gpu.get("did")) in {"failed", "gone"} for gpu in rest)),
        ("left_alone", sum(str(gpu.get("did")) in {"left_alone", "at_minimum"} for gpu in rest)),
        ("because", because[:1000]),
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


# --- For doctor: would a cap work, how far, and would the limits be restored? -----------------------------------------

WATCH: Final = "powerguard-gpu-watch.path"
_GUIDE: Final = "docs/guides/gpu-and-signals.md"


async def findings(options: GpuOptions, *, spawn: Spawn = run_child, limit_s: float = LIMIT_S) -> list[Finding]:
    """Return the findings; none if the settings leave GPUs alone. Takes some seconds at most."""
    if options.kind == "none":
        return []
    try:
        answer = await GpuEffector(options, limit_s=limit_s).ask({"word": "list"})
    except EffectorError as error:
        if "only powerguard and root may" in str(error):
            return [Finding("gpu", "WARN", f"{error}: not checked", "run doctor as root or as powerguard")]
        return [Finding("gpu", "FAIL", str(error), _GUIDE)]
    gpus = objects_in(answer, "gpus")
    found = [_reach(gpus, options.cap_share), *_single(gpus, options.cap_share)]
    capped = answer.get("capped")
    if isinstance(capped, int) and capped:
        text = f"the limits of {capped} GPUs are lowered now, by an outage, a drill or a failed restore"
        found.append(
            Finding("gpu.capped", "WARN", text, "`powerguard status`; by hand, as root: powerguard-gpu restore")
        )
    well = "limits are restored even if the daemon does not restore them"
    return [*found, await watch(spawn, "gpu.watch", WATCH, well=well, ill="limits would stay lowered")]


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


def _capped_w(gpu: dict[str, Any], share: float) -> float:
    limit_w = _watts(gpu, "limit_w")
    return min(limit_w, max(_watts(gpu, "min_w"), share * limit_w))


def _watts(gpu: dict[str, Any], key: str) -> float:
    value = gpu.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _named(gpus: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"GPU {gpu.get('index')}" for gpu in gpus[:8]) + (" ..." if len(gpus) > 8 else "")
