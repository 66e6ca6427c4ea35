"""What a daemon asks of a training in this very process, over its socket `folder`/net.sock."""

import json
from pathlib import Path
from threading import Thread
from typing import Any

from powerguard.wire import After, TriggerRequest
from tests.trainer.toy import ask


def wish(folder: Path, after: After = After.EXIT) -> None:
    """Ask for a checkpoint and for what comes after it."""
    body = TriggerRequest(id="w", after=after).to_json()
    code, _, _ = ask(folder / "net.sock", "POST", "/api/v1/trigger_checkpoint", body)
    assert code == 202


def wait_until_durable(folder: Path) -> None:
    """Return when the checkpoint that was asked for is durable."""
    for _ in range(200):
        if json.loads(ask(folder / "net.sock", "GET", "/api/v1/checkpoints/w?wait=1")[2])["phase"] == "committed":
            return
    msg = "no durable checkpoint within 200 s"
    raise AssertionError(msg)


class Dip:
    """An outage that is over as soon as the checkpoint is durable and training stands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, Any] = {}
        self._thread = Thread(target=self._resume)

    def begin(self) -> None:
        """To be called by the training itself, in the middle of a step."""
        wish(self._folder, After.PAUSE)
        self._thread.start()

    def ended(self) -> dict[str, Any]:
        """Return the last status of the checkpoint, before training went on."""
        self._thread.join()
        return self._seen

    def _resume(self) -> None:
        for _ in range(200):
            self._seen = json.loads(ask(self._folder / "net.sock", "GET", "/api/v1/checkpoints/w?wait=1")[2])
            if self._seen["phase"] == "committed" and self._seen["paused"]:
                break
        ask(self._folder / "net.sock", "POST", "/api/v1/resume")
