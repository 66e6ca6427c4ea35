"""The verbs are asked in the tests' own process, and so is the daemon that answers them."""

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """What the daemon logs is none of what a verb prints, whether or not a test before has configured the log."""
    with capture_logs():
        yield
