"""The effector `gpu`: has the power limits of this host's GPUs lowered on battery, and put back afterwards.

The daemon has no right to set a limit. It sends one word to the root helper powerguard-gpu, which has no other function
(docs/guides/gpu-and-signals.md), and waits at most LIMIT_S: a wedged driver never answers.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import structlog

from powerguard.core.model.actions import Action, CapPower, Detail, RestorePower
from powerguard.effectors.base import EffectorError
from powerguard.effectors.options import GPU_SOCKET, GpuOptions
from powerguard.effectors.root_client import RootHelper

log = structlog.get_logger()

LIMIT_S: Final = 6.0
"""Timeout for one request. The helper itself answers within 4 s, whatever NVML does."""


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
    told = answer.get("gpus", [])
    gpus = [gpu for gpu in told if isinstance(gpu, dict)] if isinstance(told, list) else []
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


def _number(told: object) -> float:
    return float(told) if isinstance(told, int | float) and math.isfinite(told) else 0.0
