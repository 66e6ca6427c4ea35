"""Give DistributedDataParallel its final buckets before the first step, so that every step adds gradients in one order.

DDP begins with one bucket of all gradients. After the first backward pass it rebuilds its buckets, in the order in
which the gradients came. An all-reduce adds the ranks' numbers in an order that depends on their place in a bucket. So
the first step of a resumed process adds in another order than the same step of a run that was never interrupted, and
from three ranks on its sums differ in the last bits (two numbers have one sum only).

One backward pass of zeros, before the first step, makes DDP rebuild its buckets at the first forward pass. It visits
the parameters from the last to the first, as the backward pass of most models does, so that communication still
overlaps with computation. (`Reducer._push_all_rebuilt_params` would take the opposite order, and lose the overlap.)
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from powerguard.trainer.torch.tree import layout_of

Module = Any
"""One of torch."""

_log = logging.getLogger("powerguard.trainer")
_FEWEST_RANKS = 3


def ddp_within(module: Module) -> Module | None:
    """Return the DistributedDataParallel that this module is or that torch.compile wraps; None: neither."""
    while type(module).__name__ == "OptimizedModule":
        module = module._orig_mod  # noqa: SLF001 - torch documents no other way
    return module if type(module).__name__ == "DistributedDataParallel" else None


def settle_buckets(modules: Iterable[object]) -> None:
    """Have each DDP module rebuild its buckets before its first step. A collective from three ranks on.

    Call it on every rank, at a fresh start and before a resume alike. A module that has gradients is left as it is: it
    is in training already. Where DDP cannot do this a warning names the reason and the remedy.
    """
    for ddp in map(ddp_within, modules):
        if ddp is None or ddp.process_group.size() < _FEWEST_RANKS:
            continue
        if ddp.find_unused_parameters and not ddp.static_graph:
            continue  # such a module never rebuilds its buckets
        params = [param for param in ddp.module.parameters() if param.requires_grad]
        if any(param.grad is not None for param in params):
            continue
        hindrance = next(_hindrances(ddp, params), None)
        if hindrance is None:
            _pass_zeros(ddp, params)
        else:
            _log.warning(
                "DDP with %s rebuilds its buckets after the first backward pass: a resumed run may differ from an"
                " uninterrupted one in the last bits (for the same bits make it with find_unused_parameters=True,"
                " static_graph=False)",
                hindrance,
            )


def warn_of_unwrapped(modules: Iterable[Module]) -> None:
    """Warn where DDP may hide: many ranks, and modules that are neither DDP nor sharded by FSDP2 or the like."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < _FEWEST_RANKS:
        return
    given = list(modules)
    if any(ddp_within(module) is not None for module in given):
        return
    if any(layout_of(param) is not None for module in given for param in module.parameters()):
        return
    _log.warning(
        "the model is not a DistributedDataParallel: if DDP wraps it, a resumed run may differ from an uninterrupted"
        " one in the last bits (give TorchState the module that DDP(...) returned)"
    )


def _hindrances(ddp: Module, params: Iterable[Any]) -> Iterator[str]:
    """Yield what forbids a backward pass of zeros through this module."""
    if ddp.static_graph:
        yield "static_graph=True"
    if getattr(ddp, "mixed_precision", None) is not None:
        yield "mixed_precision"
    embeddings = torch.nn.Embedding | torch.nn.EmbeddingBag
    if any(part.sparse for part in ddp.module.modules() if isinstance(part, embeddings)):
        yield "sparse gradients"
    if any(getattr(param, "_post_accumulate_grad_hooks", None) for param in params):
        yield "a hook after each gradient (such as an optimizer in the backward pass)"
    if not all(
        hasattr(getattr(ddp, "reducer", None), name) for name in ("prepare_for_forward", "prepare_for_backward")
    ):
        yield f"torch {torch.__version__}"


def _pass_zeros(ddp: Module, params: list[Any]) -> None:
    """Run one backward pass in which every gradient is zero, past the forward pass: buffers and dropout stay as is."""
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    with torch.enable_grad():
        sums = [param.sum() for param in params]  # autograd takes the newest first
    torch.autograd.backward(sums, [torch.zeros_like(each) for each in sums])
    for param in params:
        param.grad = None
