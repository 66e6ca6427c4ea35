"""The tests that need PyTorch: a stage of their own, run by scripts/test-torch; elsewhere they are not collected."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.trainer.toy import short_folder

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]

HERE = Path(__file__).parent
LONGEST = [
    "test_resume.py",
    "test_examples.py",
    "test_cuts.py",
    "test_late_kills.py",
    "test_fsdp.py",
    "test_torch_ddp.py",
    "test_torch_ranks.py",
]


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no worker is left with them at the end."""
    mine = [at for at, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[at] for at in mine), key=lambda item: item.path.name not in LONGEST)
    for at, item in zip(mine, ordered, strict=True):
        items[at] = item
