"""What a user does wrong is answered at once, and with a sentence."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from powerguard.trainer import Buffer, Guard, Parts
from powerguard.trainer.keeper import GivenUp


def test_a_save_after_the_end_is_refused_at_once(tmp_path: Path) -> None:
    """Whoever calls save() or step() behind the `with` is told so: nobody writes any more, nor comes for it."""
    refused: list[BaseException] = []
    with Guard(Parts(lambda: {"w": bytes(100)}, lambda _: None), tmp_path / "root", job="a", socket=None) as guard:
        guard.step(1)

    def late() -> None:
        try:
            guard.save(1)
        except GivenUp as error:
            refused.append(error)

    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    thread.join(30)
    assert [str(error) for error in refused] == [
        "the guard is closed (step and save before close(), and before the end of its `with`)"
    ]
    with pytest.raises(GivenUp, match=r"^the guard is closed"):
        guard.step(2)


def test_what_cannot_be_kept_is_named() -> None:
    """The name of the item is said, and what may be kept."""
    with pytest.raises(TypeError, match=r"^when: is neither a buffer nor a plain value"):
        list(Parts(lambda: {"when": object()}, lambda _: None).items())
    assert Buffer.json("x", [1]).size_bytes == 3


def test_failures_are_heard_where_no_logging_is_set_up() -> None:
    """No handler of ours keeps Python from showing warnings on stderr, which is all that a plain script has."""
    script = (
        "import logging, powerguard.trainer.guard\n"
        "logging.getLogger('powerguard.trainer').warning('checkpoint of step 7 failed')\n"
    )
    told = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=30)
    assert told.stderr == "checkpoint of step 7 failed\n"
