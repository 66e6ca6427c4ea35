"""The tests that need PyTorch: a stage of their own, run by scripts/test-torch; elsewhere they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]
