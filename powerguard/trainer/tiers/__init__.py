"""Slower tiers behind the local disk: a mounted folder, or an object store."""

from powerguard.trainer.tiers.base import Remote
from powerguard.trainer.tiers.objects import ObjectTier
from powerguard.trainer.tiers.path import PathTier

__all__ = ["ObjectTier", "PathTier", "Remote", "tier_of"]


def tier_of(remote: Remote, job: str) -> PathTier | ObjectTier:
    """The tier that an address means. Raises TierError for one that means none, or without what it needs (obstore)."""
    return PathTier(remote, job) if remote.is_folder else ObjectTier(remote, job)
