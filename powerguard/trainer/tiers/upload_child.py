"""The process that uploads: niced, idle for the disk, and killed at once when another process needs the bandwidth.

    stdin    one line of JSON: the order; then nothing, for as long as the parent lives and wants it
    stdout   lines of JSON: {"progress": ...} every second, and one {"ended": ...}

Nothing secret comes in by arguments or environment of ours; the order names files that hold credentials, at most.
"""

import contextlib
import ctypes
import json
import os
import platform
import select
import sys
from dataclasses import fields
from threading import Event, Thread
from typing import Any, Final

from powerguard.trainer.tiers import tier_of
from powerguard.trainer.tiers.base import Remote, TierError
from powerguard.trainer.tiers.transfer import Gate, Progress, Transfer, UploadOrder

_NICE: Final = 19
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IDLE: Final = 3 << 13  # IOPRIO_CLASS_IDLE, linux/ioprio.h
_REPORT_EVERY_S: Final = 1.0
MAX_ORDER_BYTES: Final = 64 << 10


def order_line(order: UploadOrder, gate: dict[str, float]) -> bytes:
    """What the parent writes. gate: settings of `Gate`, where they are not its own."""
    document = {field.name: getattr(order, field.name) for field in fields(order)}
    return json.dumps({**document, "remote": order.remote.as_json(), "gate": gate}).encode() + b"\n"


def main() -> int:
    """Carry out one order; end at once when the parent does. The exit status adds nothing to stdout."""
    _step_back()
    document = json.loads(sys.stdin.buffer.readline(MAX_ORDER_BYTES))
    remote = Remote.from_json(document["remote"])
    order = UploadOrder(remote=remote, job=document["job"], path=document["path"], digest=document["digest"])
    gate = Gate(bytes_per_s=order.remote.bytes_per_s, **document["gate"])
    progress = Progress()
    ended = Event()
    verdict: dict[str, Any] = {}

    def work() -> None:
        try:
            committed = Transfer(order, tier_of(order.remote, order.job), gate, progress).run()
            verdict.update(ended="committed" if committed else "waiting")
        except TierError as error:
            verdict.update(ended=error.kind.value, error=str(error))
        finally:
            ended.set()

    worker = Thread(target=work, name="powerguard-transfer", daemon=True)
    worker.start()
    parent = os.getppid()
    while not ended.wait(_REPORT_EVERY_S):
        # The parent's end may be open in its own children after it died: the parent's id shows that, too.
        if os.getppid() != parent or select.select([sys.stdin], [], [], 0)[0] or not _send(_report(progress, gate)):
            os._exit(1)  # threads that hang in a mount are not waited for
    worker.join(_REPORT_EVERY_S)  # a bug's last words come before ours
    _send(_report(progress, gate) | verdict)
    os._exit(0)


def _report(progress: Progress, gate: Gate) -> dict[str, Any]:
    return {
        "moved": progress.moved,
        "committed": progress.committed,
        "trouble": "" if gate.trouble is None else str(gate.trouble),
        "bytes_total": progress.bytes_total,
        "bytes_done": progress.bytes_done,
        "bytes_sent": progress.bytes_sent,
        "retries": {kind.value: count for kind, count in list(gate.retries.items())},
        "backing_off": gate.backing_off,
        "resting": gate.resting,
    }


def _send(document: dict[str, Any]) -> bool:
    try:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _step_back() -> None:
    """Let everybody else go first, for the processor and for the disk."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, _IDLE)


if __name__ == "__main__":
    sys.exit(main())
