"""When checkpoints are copied to slower storage: now and then, and never while somebody fights for time."""

from collections.abc import Callable, Mapping

from powerguard.trainer.ports import UploadsSeen
from powerguard.trainer.ranks.base import boottime_s
from powerguard.trainer.store import SavedCheckpoint
from powerguard.trainer.tiers.schedule import period_of
from powerguard.trainer.tiers.upload import Uploader


class Uploads:
    """Offers the uploader one checkpoint in every_s seconds, and each that somebody asked for; see `desk.Uploads`."""

    def __init__(self, uploader: Uploader, *, every_s: float, clock: Callable[[], float] = boottime_s) -> None:
        self._uploader = uploader
        self._every_s = every_s
        self._clock = clock
        self._period: int | None = None

    def offer(self, saved: SavedCheckpoint, *, asked: bool) -> None:
        """Copy this one next, if it is time for one. What was offered and is not begun is forgotten."""
        period = period_of(saved, self._every_s)
        if period is not None and (asked or period != self._period):
            self._period = period
            self._uploader.offer(saved)

    def hold(self) -> None:
        """Stop at once."""
        self._uploader.hold()

    def release(self) -> None:
        """Go on."""
        self._uploader.release()

    def close(self) -> None:
        """Stop for good."""
        self._uploader.close()

    def seen(self) -> UploadsSeen:
        """Return how they go, for people."""
        status = self._uploader.status()
        return UploadsSeen(status.committed_step, status.error, self._since_s(status.error_since_s))

    def _since_s(self, at_s: float | None) -> float | None:
        return None if at_s is None else max(0.0, self._clock() - at_s)

    def figures(self) -> Mapping[str, tuple[str, str, float]]:
        """Return metrics: name -> (type, help, value)."""
        status = self._uploader.status()
        found: dict[str, tuple[str, str, float]] = {
            "commits_total": ("counter", "Checkpoints that became whole in the slower tier.", status.commits),
            "sent_bytes_total": ("counter", "Bytes that were sent there.", status.bytes_sent),
            "retries_total": ("counter", "Requests that had to be repeated.", sum(status.retries.values())),
            "failures_total": ("counter", "Uploads that failed and are tried again.", sum(status.failures.values())),
            "active": ("gauge", "An upload is running (1) or not (0).", int(status.state == "uploading")),
        }
        if status.committed_step is not None:
            found["durable_step"] = ("gauge", "Step of the newest checkpoint there.", status.committed_step)
        if (age_s := self._since_s(status.committed_at_s)) is not None:
            found["durable_age_seconds"] = ("gauge", "Age of the newest checkpoint there.", age_s)
        failing_s = self._since_s(status.error_since_s) or 0.0
        found["failing_seconds"] = (
            "gauge",
            "For how long uploads have met errors; 0: the last one did not.",
            failing_s,
        )
        return found
