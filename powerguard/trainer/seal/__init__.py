"""Folders that other frameworks wrote, sealed: after a power cut such a folder is whole, or known not to be."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powerguard.trainer.seal.folder import newest_whole, saved_in, seal, verify

__all__ = ["newest_whole", "saved_in", "seal", "verify"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has that name
    """Load what is asked for: the daemon reads seals with the standard library alone."""
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    return getattr(import_module(f"{__name__}.folder"), name)
