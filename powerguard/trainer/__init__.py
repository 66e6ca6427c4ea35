"""Checkpoints that survive a power cut, for any training loop: see `powerguard.trainer.guard`.

    from powerguard.trainer import Guard

Needs the standard library and xxhash, and knows nothing of UPSes.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powerguard.trainer.boundary import StopTraining
    from powerguard.trainer.guard import Guard
    from powerguard.trainer.items import Buffer, Item, Loaded, Parts, State
    from powerguard.trainer.store import SavedCheckpoint, StoreError

_WHERE = {
    "Buffer": "items",
    "Guard": "guard",
    "Item": "items",
    "Loaded": "items",
    "Parts": "items",
    "SavedCheckpoint": "store",
    "State": "items",
    "StopTraining": "boundary",
    "StoreError": "store",
}

__all__ = ["Buffer", "Guard", "Item", "Loaded", "Parts", "SavedCheckpoint", "State", "StopTraining", "StoreError"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever stands under that name
    """Load what is asked for: the daemon and the command line use modules of this package, and not the guard."""
    if name not in _WHERE:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
