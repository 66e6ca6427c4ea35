"""The sentinel's unit as a file: systemd itself finds nothing to say, and it has no rights."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.peers import require

UNIT = Path(__file__).parents[2] / "systemd" / "powerguard-sentinel.service"
WORST_EXPOSURE = 1.5


@pytest.mark.peer("systemd-analyze")
@pytest.mark.parametrize("wrong", ["", "WatchdogSek"])
def test_systemd_finds_nothing_to_say(tmp_path: Path, wrong: str) -> None:
    """And it would find a wrong key, or this would prove nothing."""
    theirs = Path("/usr/lib/systemd/system")
    if not theirs.is_dir():
        require("systemd-analyze")
    shutil.copytree(theirs, tmp_path / "usr/lib/systemd/system", symlinks=True)
    ours = tmp_path / "etc/systemd/system" / UNIT.name
    ours.parent.mkdir(parents=True)
    text = UNIT.read_text(encoding="utf-8")
    ours.write_text(text.replace("WatchdogSec", wrong) if wrong else text, encoding="utf-8")
    program = tmp_path / "opt/powerguard/bin/powerguard"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n", encoding="ascii")
    program.chmod(0o755)
    argv = [require("systemd-analyze"), "verify", "--man=no", f"--root={tmp_path}", UNIT.name]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    found = [
        line for line in (ended.stderr + ended.stdout).splitlines() if UNIT.name in line.replace(str(tmp_path), "")
    ]
    assert [wrong in line for line in found] == ([True] if wrong else []), found


@pytest.mark.peer("systemd-analyze")
def test_it_is_exposed_no_more_than_promised() -> None:
    argv = [require("systemd-analyze"), "security", "--offline=true", "--no-pager", str(UNIT)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    exposure = float(ended.stdout.split(f"{UNIT.name}:")[-1].split()[0])
    assert 0 < exposure <= WORST_EXPOSURE


def test_it_is_never_given_up_on_and_reaches_no_device() -> None:
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    for line in (
        "StartLimitIntervalSec=0",
        "Restart=always",
        "Type=notify",
        "CapabilityBoundingSet=",
        "PrivateDevices=yes",
        "DevicePolicy=closed",
        "LimitCORE=0",
        "ExecReload=/opt/powerguard/bin/powerguard sentinel --config /etc/powerguard/sentinel.yaml --check",
        "ExecReload=/bin/sh -c 'kill -s HUP \"$$MAINPID\"'",
        "ExecStart=/opt/powerguard/bin/powerguard sentinel --config /etc/powerguard/sentinel.yaml",
    ):
        assert line in lines
    assert not [line for line in lines if line.startswith(("ProcSubset", "SupplementaryGroups"))]
