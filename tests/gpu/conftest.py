"""The tests that need a real GPU: run by `make test-gpu`, skipped without one, and not collected without PyTorch."""

import os
from importlib.util import find_spec

import pytest

os.environ["POWERGUARD_UNDER_TEST"] = "1"

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True)
def gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that PyTorch sees")
    torch.manual_seed(1)
