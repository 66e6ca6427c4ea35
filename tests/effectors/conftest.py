"""What tests of both root helpers are given: jobs of a user, and GPUs that are files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.jobs import Jobs
from tests.peers.nvml import Gpus


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    """Jobs, their sockets, and powerguard-signal; all is ended at the end."""
    made = Jobs()
    yield made
    made.close()


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[Gpus]:
    """Two GPUs, and powerguard-gpu."""
    made = Gpus(tmp_path)
    yield made
    made.close()
