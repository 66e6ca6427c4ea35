"""The verbs are asked in the tests' own process, and so is the daemon that answers them."""

import logging
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """What the daemon logs is none of what a verb prints; and a verb that sets up the log, or ends it, ends with it."""
    root = logging.getLogger()
    before, disabled, handlers, level = structlog.get_config(), root.manager.disable, root.handlers[:], root.level
    with capture_logs():
        yield
    structlog.configure(**before)
    logging.disable(disabled)
    root.handlers[:] = handlers
    root.setLevel(level)
