"""A UPS behind a switch that has none: the real daemon, a real cable between two network namespaces."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers import require

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("network")]


@pytest.mark.parametrize(
    "play", ["outage", *(pytest.param(play, marks=pytest.mark.slow) for play in ("switch", "somebody", "unasked"))]
)
def test_the_cable_and_the_ups(play: str) -> None:
    """outage: saved and powered off unseen. switch: presumed, and over. somebody, unasked: alarms (cable_child)."""
    for program in ("unshare", "ip"):
        require(program)
    veth = ["unshare", "-n", "ip", "link", "add", "near", "type", "veth", "peer", "name", "far"]
    if subprocess.run(veth, check=False, capture_output=True).returncode:
        pytest.skip("no network namespace, or no veth in this kernel")
    child = ["unshare", "-n", sys.executable, "-m", "tests.e2e.cable_child", play]
    root = Path(__file__).parents[2]
    ended = subprocess.run(child, check=False, capture_output=True, text=True, timeout=250, cwd=root)
    assert ended.returncode == 0, ended.stderr
