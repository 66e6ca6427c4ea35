"""Checkpoints that survive a power cut, for any training loop: see `powerguard.trainer.guard`.

    from powerguard.trainer import Guard

Needs the standard library and xxhash, and knows nothing of UPSes.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powerguard.trainer.guard import Guard
    from powerguard.trainer.loop.step_hook import StopTraining
    from powerguard.trainer.store.items import Buffer, Item, Loaded, Parts, State
    from powerguard.trainer.store.store import SavedCheckpoint, StoreError
    from powerguard.wire import Phase

_WHERE = {
    "Buffer": "store.items",
    "Guard": "guard",
    "Item": "store.items",
    "Loaded": "store.items",
    "Parts": "store.items",
    "Phase": "loop.requests",
    "SavedCheckpoint": "store.store",
    "State": "store.items",
    "StopTraining": "loop.step_hook",
    "StoreError": "store.store",
}

__all__ = [
    "Buffer",
    "Guard",
    "Item",
    "Loaded",
    "Parts",
    "Phase",
    "SavedCheckpoint",
    "State",
    "StopTraining",
    "StoreError",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever stands under that name
    """Load what is asked for: the daemon and the command line use modules of this package, and not the guard."""
    if name not in _WHERE:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
