"""Three real daemons in three network namespaces on one upsd, each with its own trainer and its own ipmi_sim."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers import require

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.xdist_group("network")]


@pytest.mark.peer("ipmi_sim", "upsd", "dummy-ups")
@pytest.mark.parametrize("play", ["story", "trouble"])
def test_three_hosts_on_one_ups(play: str) -> None:
    """story: from the cut until all three train again. trouble: upsd, a BMC and a neighbour disturb it (rack_child).

    Slow: an outage with three hosts takes minutes.
    """
    for program in ("unshare", "ip"):
        require(program)
    veth = ["unshare", "-n", "ip", "link", "add", "near", "type", "veth", "peer", "name", "far"]
    if subprocess.run(veth, check=False, capture_output=True).returncode:
        pytest.skip("no network namespace, or no veth in this kernel")
    child = ["unshare", "-n", sys.executable, "-m", "tests.e2e.rack_child", play]
    root = Path(__file__).parents[2]
    ended = subprocess.run(child, check=False, capture_output=True, text=True, timeout=500, cwd=root)
    assert ended.returncode == 0, ended.stderr
