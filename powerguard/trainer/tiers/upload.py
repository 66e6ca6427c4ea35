"""The uploader, as the training's process sees it: it is offered checkpoints, and can be made to stop at once.

The work is done by a child process, one for each upload, which can be killed at any instant and loses at most the parts
that were on their way. So to hold uploads is to kill it: nothing that hangs, in a mount or in a connection, can be in
the way, and the memory comes back, too. Here is one thread that starts the child, listens to it and remembers.
"""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Condition, Thread
from types import MappingProxyType
from typing import IO, Any, Final

from powerguard.fields import clean_text
from powerguard.trainer.log import log
from powerguard.trainer.ranks.base import boottime_s
from powerguard.trainer.store.folders import SavedCheckpoint
from powerguard.trainer.store.shards import held
from powerguard.trainer.tiers.base import Kind, Remote
from powerguard.trainer.tiers.transfer import UploadOrder, backoff_s
from powerguard.trainer.tiers.upload_child import order_line

_RETRY_FIRST_S: Final = 30.0
_RETRY_MOST_S: Final = 900.0
_STALL_S: Final = 600.0
_LOOK_EVERY_S: Final = 1.0
_CHILD: Final = (
    "import sys; sys.path += [each for each in sys.argv[1:] if each not in sys.path]; "
    "from powerguard.trainer.tiers.upload_child import main; sys.exit(main())"
)
"""Finds us where this process does: a script may have put a checkout into its own `sys.path`."""
_DIES_WITHIN_S: Final = 0.4
_OTHERS: Final = "waiting"
"""How an upload ends that has brought all that lies here, and not all that the other hosts have."""
_DONE_WITH: Final = frozenset({Kind.LOST, Kind.CORRUPT})
"""Not to be tried again: what is here is no good."""

_MAX_LINE: Final = 64 << 10
_MAX_TEXT: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadStatus:
    """How the uploads are.

    state: "idle", "uploading", "backing_off" (the store refuses, and is asked less and less), "resting" (an upload
    failed; the next attempt comes later), "held", "stuck" (a killed child does not go: its mount hangs), "closed".
    error: what went wrong last, in words for a person; "" since the last commit. error_since_s: when the first of
    these errors came, on the uploader's clock.
    committed_*: the newest checkpoint that is whole in the tier, as far as this process knows.
    retries, failures: counts by kind (`base.Kind`) since the start. bytes_sent: since the start.
    """

    state: str
    bytes_total: int = 0
    bytes_done: int = 0
    error: str = ""
    error_since_s: float | None = None
    committed_step: int | None = None
    committed_at_s: float | None = None
    commits: int = 0
    bytes_sent: int = 0
    retries: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class Uploader:
    """Copies checkpoints to one slower tier, in the background. Every call returns at once; none touches the tier.

    remote: where to. retry_s: the first rest after a failed upload; it doubles. stall_s: a child that moves nothing for
    so long is killed (a hung mount). gate: settings of the child's `Gate`.
    """

    def __init__(
        self,
        remote: str | Remote,
        *,
        job: str,
        retry_s: float = _RETRY_FIRST_S,
        stall_s: float = _STALL_S,
        gate: Mapping[str, float] | None = None,
    ) -> None:
        self._remote = Remote.of(remote)
        self._job = job
        self._retry_s = retry_s
        self._stall_s = stall_s
        self._gate = dict(gate or {})
        self._rng = random.Random()  # noqa: S311 - spreads retries, hides nothing
        self._changed = Condition()
        self._next: SavedCheckpoint | None = None
        self._held = False
        self._closed = False
        self._called_off = False
        """The upload that runs is to end: its child was killed by `hold` or `close`, whatever was said since."""
        self._child: subprocess.Popen[bytes] | None = None
        self._busy = False
        self._backing_off = False
        self._brought = ""
        """Digest of the last one of which all that lies here is there."""
        self._rest_until_s = 0.0
        self._failed_in_a_row = 0
        self._status = UploadStatus(state="idle")
        self._thread = Thread(target=self._run, name="powerguard-uploads", daemon=True)
        self._thread.start()

    # --- What the guard calls --------------------------------------------------------------------------------------

    def offer(self, saved: SavedCheckpoint) -> None:
        """Upload next what lies here of this one; one that was offered before and not begun is forgotten."""
        with self._changed:
            self._next = saved
            self._changed.notify_all()

    def finish(self, saved: SavedCheckpoint, limit_s: float) -> bool:
        """Upload this one and wait for it, for limit_s at most; not while uploads are held, nor after one has failed.

        Returns whether what lies here of it is there.
        """
        with self._changed:
            self._next, self._rest_until_s = saved, 0.0
            failures = self._status.failures
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._next is None or self._held or self._closed or self._status.failures != failures, limit_s
            )
            return self.has_brought(saved)

    def has_brought(self, saved: SavedCheckpoint) -> bool:
        """Whether this process has brought there what lies here of this one."""
        return self._brought == saved.manifest_digest

    def hold(self) -> bool:
        """Stop now: the child is killed, and the local checkpoint let go. True when that is done (within 0.4 s)."""
        with self._changed:
            self._held = True
            return self._stopped()

    def release(self) -> None:
        """Go on where it stopped, by part."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def status(self) -> UploadStatus:
        with self._changed:
            return replace(self._status, state=self._state())

    def close(self) -> None:
        """Stop for good; a later uploader goes on by part."""
        with self._changed:
            self._closed = True
            self._stopped()
        self._thread.join(_DIES_WITHIN_S)

    def _stopped(self) -> bool:
        self._called_off = True
        if self._child is not None:
            self._child.kill()
        self._changed.notify_all()
        return self._changed.wait_for(lambda: not self._busy, _DIES_WITHIN_S)

    def _state(self) -> str:
        if self._closed:
            return "closed"
        if self._held:
            return "held"
        if self._busy:
            return "backing_off" if self._backing_off else "uploading"
        if self._child is not None:
            return "stuck"
        return "idle" if self._next is None else "resting"

    # --- The thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (saved := self._awaited()) is not None:
            report: dict[str, Any] = {}
            try:
                with held(Path(saved.path)):
                    self._listen(saved, report)
            except FileNotFoundError:
                report = {"ended": Kind.LOST.value, "error": f"{saved.path}: was removed before it was uploaded"}
            except OSError as error:
                reason = f"the process that uploads cannot be started ({error.strerror})"
                report = {"ended": Kind.UNUSABLE.value, "error": reason}
            self._conclude(saved, report)

    def _awaited(self) -> SavedCheckpoint | None:
        """The next checkpoint, once it is its time; None: closed, and the last child has ended."""
        with self._changed:
            while True:
                now_s = boottime_s()
                if self._child is not None and self._child.poll() is not None:
                    self._child = None
                if self._closed and self._child is None:
                    return None
                ready = self._next is not None and not self._held and not self._closed and self._child is None
                if ready and now_s >= self._rest_until_s:
                    self._busy, self._called_off = True, False
                    return self._next
                self._changed.wait(self._until_next_s(now_s, ready=ready))

    def _until_next_s(self, now_s: float, *, ready: bool) -> float | None:
        """How long nothing can change by itself; None: for ever."""
        times_s = [self._rest_until_s - now_s] if ready else []
        if self._child is not None:
            times_s.append(_LOOK_EVERY_S)
        return max(0.0, min(times_s)) if times_s else None

    def _listen(self, saved: SavedCheckpoint, report: dict[str, Any]) -> None:
        """Run one child to its end, or until it is not wanted or moves nothing any more."""
        order = UploadOrder(remote=self._remote, job=self._job, path=saved.path, digest=saved.manifest_digest)
        child = subprocess.Popen(
            [sys.executable or "python3", "-P", "-c", _CHILD, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # its last words, when it cannot even begin
            start_new_session=True,
            bufsize=0,
        )
        with self._changed:
            self._child = child
            self._status = replace(self._status, bytes_done=0, bytes_total=0)
            wanted = not self._called_off  # a hold in the meantime found no child to kill
        try:
            if not wanted:
                return
            with contextlib.suppress(BrokenPipeError):
                _pipe(child.stdin).write(order_line(order, self._gate))
            self._follow(_pipe(child.stdout), report)
        finally:
            child.kill()
            _pipe(child.stdin).close()
            _pipe(child.stdout).close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_DIES_WITHIN_S)
            with self._changed:
                report["returncode"] = child.returncode
                if child.returncode is not None:
                    self._child = None

    def _follow(self, pipe: IO[bytes], report: dict[str, Any]) -> None:
        unread = b""
        moved: object = None
        moved_at_s = boottime_s()
        poll = select.poll()  # select() takes no descriptor above 1023, and a training may have many files open
        poll.register(pipe, select.POLLIN)
        while True:
            ready = poll.poll(1000 * _LOOK_EVERY_S)
            with self._changed:
                if self._called_off:
                    return
            if ready:
                content = os.read(pipe.fileno(), _MAX_LINE)
                if not content:
                    return
                *lines, unread = (unread + content)[-_MAX_LINE:].split(b"\n")
                for line in lines:
                    self._read_line(line, report)
            now_s = boottime_s()
            if moved != (seen := report.get("moved")) or report.get("resting"):
                moved, moved_at_s = seen, now_s
            if now_s - moved_at_s >= self._stall_s:
                report.update(
                    ended=Kind.STALLED.value, error=f"{self._remote.url}: no progress for {self._stall_s:g} s"
                )
                return

    def _read_line(self, line: bytes, report: dict[str, Any]) -> None:
        try:
            document = json.loads(line)
        except ValueError:
            document = None
        if not isinstance(document, dict) or "bytes_total" not in document:  # what a library printed, or a traceback
            report["last_words"] = clean_text(line.decode("utf-8", "replace"), _MAX_TEXT)
            return
        before = report.copy()
        report.update(document)
        with self._changed:
            self._backing_off = bool(report["backing_off"])
            self._status = replace(
                self._status,
                bytes_total=report["bytes_total"],
                bytes_done=report["bytes_done"],
                bytes_sent=self._status.bytes_sent + report["bytes_sent"] - before.get("bytes_sent", 0),
                retries=_added(self._status.retries, report["retries"], before.get("retries", {})),
                **self._troubled(report["trouble"] or self._status.error),
            )

    def _troubled(self, error: str, *, again: bool = False) -> dict[str, Any]:
        """What the status says of an error. again: a transfer has succeeded since the error before."""
        since_s = None if again else self._status.error_since_s
        return {"error": error, "error_since_s": (since_s or boottime_s()) if error else None}

    def _conclude(self, saved: SavedCheckpoint, report: dict[str, Any]) -> None:
        """Remember how it ended, and when to try again what did not work."""
        committed = bool(report.get("committed"))
        ended = str(report.get("ended", ""))
        error = str(report.get("error", ""))
        rest_s = 0.0
        with self._changed:
            self._busy = self._backing_off = False
            if committed:
                self._status = replace(
                    self._status,
                    committed_step=saved.step,
                    committed_at_s=boottime_s(),
                    commits=self._status.commits + 1,
                )
            elif not ended and not self._called_off:
                ended = Kind.UNUSABLE.value
                error = str(report.get("last_words") or f"the process that uploads {_end(report.get('returncode'))}")
            is_all_there = committed or ended == _OTHERS
            self._brought = saved.manifest_digest if is_all_there else self._brought
            if (is_all_there or ended in _DONE_WITH) and self._next is saved:
                self._next = None
            if error:
                self._status = replace(self._status, failures=_added(self._status.failures, {ended: 1}, {}))
            if error and not committed:
                self._failed_in_a_row += 1
                rest_s = backoff_s(self._failed_in_a_row, first_s=self._retry_s, most_s=_RETRY_MOST_S, rng=self._rng)
                self._rest_until_s = boottime_s() + rest_s
            else:
                self._failed_in_a_row = 0
            if error or is_all_there:
                self._status = replace(self._status, **self._troubled(error, again=is_all_there))
            self._changed.notify_all()
        if committed:
            log.info("upload_committed step=%d tier=%s", saved.step, self._remote.url)
        if error:
            log.warning("upload_failed step=%d reason=%s rest_s=%.0f", saved.step, error, rest_s)


def _end(returncode: int | None) -> str:
    if returncode is None:
        return "was killed by another process and does not end (does its mount hang?)"
    if returncode == -signal.SIGKILL:
        return "was killed (if memory was short, the kernel's log says so)"
    return f"was killed by signal {-returncode}" if returncode < 0 else f"ended with exit status {returncode}"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # noqa: S101 - both were asked for
    return pipe


def _added(counts: Mapping[str, int], new: Mapping[str, int], before: Mapping[str, int]) -> Mapping[str, int]:
    grown = {kind: count - before.get(kind, 0) for kind, count in new.items()}
    return MappingProxyType({kind: counts.get(kind, 0) + grown.get(kind, 0) for kind in {*counts, *grown}})
