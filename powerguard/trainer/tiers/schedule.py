"""Which checkpoints are copied to the slower tier: one in so many seconds, and on all hosts of a job the same ones."""

from datetime import datetime
from pathlib import Path

from powerguard.trainer.found import SavedCheckpoint
from powerguard.trainer.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, ManifestError


def period_of(saved: SavedCheckpoint, every_s: float) -> int | None:
    """The number of the period of every_s seconds in which a checkpoint was made; the first of each period is copied.

    By the time in its manifest, on which all hosts agreed: by clocks of their own one host would copy this checkpoint
    and another the next one, and the slower tier would never have all shards of any. None: it cannot be read any more.
    """
    try:
        with Path(saved.path, MANIFEST).open("rb") as file:
            created = Manifest.parse(file.read(MAX_MANIFEST_BYTES + 1)).created
        return int(datetime.fromisoformat(created).timestamp() // every_s)
    except (OSError, ManifestError, ValueError, OverflowError):
        return None
