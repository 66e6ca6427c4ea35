"""The units of powerguard-signal as files: systemd finds nothing to say, and what hangs on single lines is there."""

import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from powerguard.effectors.signals.findings import WATCH
from powerguard.effectors.signals.helper import FOLDER, WITHIN_S, run
from powerguard.effectors.signals.kept import STOPPED
from powerguard.effectors.signals.options import SIGNAL_SOCKET
from tests.peers import require

SYSTEMD = Path(__file__).parents[2] / "systemd"
SOCKET, SERVICE, SERVED = "powerguard-signal.socket", "powerguard-signal-watch.service", "powerguard-signal@.service"
UNITS = (SOCKET, SERVED, WATCH, SERVICE)
WORST_EXPOSURE = 2.0
"""What systemd-analyze calls it, of 10; the daemon's own unit, without root, is at 1.5."""


class Unit(ConfigParser):
    """A unit file; of a key that is there several times the last one counts."""

    def __init__(self, name: str) -> None:
        super().__init__(interpolation=None, strict=False, delimiters=("=",), comment_prefixes=("#",))
        self.read(SYSTEMD / name, encoding="utf-8")

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system with systemd's own units, ours, and an interpreter."""
    require("systemd-analyze")
    shutil.copytree("/usr/lib/systemd/system", tmp_path / "usr/lib/systemd/system", symlinks=True)
    ours = tmp_path / "etc/systemd/system"
    ours.mkdir(parents=True)
    for name in UNITS:
        shutil.copy(SYSTEMD / name, ours)
    python = tmp_path / "opt/powerguard/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n", encoding="ascii")
    python.chmod(0o755)
    return tmp_path


def verify(root: Path) -> str:
    names = [name.replace("@", "@1") for name in UNITS]
    argv = [require("systemd-analyze"), "verify", "--man=no", f"--root={root}", *names]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    lines = (ended.stderr + ended.stdout).splitlines()
    return "\n".join(line for line in lines if "powerguard" in line.replace(str(root), ""))


@pytest.mark.peer("systemd-analyze")
def test_systemd_finds_nothing_to_say(root: Path) -> None:
    assert verify(root) == ""


@pytest.mark.peer("systemd-analyze")
def test_a_wrong_key_would_be_found(root: Path) -> None:
    """Or the test above would prove nothing."""
    unit = root / "etc/systemd/system" / SOCKET
    unit.write_text(unit.read_text(encoding="utf-8").replace("SocketMode", "SocketMood"), encoding="utf-8")
    assert "SocketMood" in verify(root)


@pytest.mark.peer("systemd-analyze")
@pytest.mark.parametrize("name", [SERVED, SERVICE])
def test_root_can_do_no_more_than_it_must(name: str) -> None:
    argv = [require("systemd-analyze"), "security", "--offline=true", "--no-pager"]
    argv += [f"--threshold={int(WORST_EXPOSURE * 10)}", str(SYSTEMD / name)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stdout[-500:]
    service = Unit(name)["Service"]
    assert service["CapabilityBoundingSet"] == "CAP_KILL"
    assert service["SupplementaryGroups"] == "powerguard", "or it could not ask whose a trainer's socket is"
    assert not {"ProtectProc", "ProcSubset"} & set(service), "or it could not see whom it signals"
    assert service["ReadWritePaths"] == FOLDER
    assert service["DevicePolicy"] == "closed"


def test_only_our_user_can_say_a_word() -> None:
    socket = Unit(SOCKET)["Socket"]
    assert socket["ListenStream"] == SIGNAL_SOCKET
    assert (socket["SocketUser"], socket["SocketMode"]) == ("powerguard", "0600")
    assert socket["Accept"] == "yes"
    assert Path(SIGNAL_SOCKET).parent == Path(FOLDER)


def test_a_word_that_hangs_is_ended_and_none_is_ended_too_early() -> None:
    assert float(Unit(SERVED)["Service"]["RuntimeMaxSec"]) > WITHIN_S
    assert "RuntimeMaxSec" not in Unit(SERVICE)["Service"], "the watch waits"


def test_the_watch_runs_whenever_something_is_kept_and_is_never_given_up_on() -> None:
    path = Unit(WATCH)
    assert path["Path"]["PathExists"] == f"{FOLDER}/{STOPPED}"
    assert path["Path"]["Unit"] == SERVICE
    assert WATCH in Unit(SOCKET)["Unit"]["Wants"]
    assert Unit(SERVICE)["Unit"]["StartLimitIntervalSec"] == "0"
    assert "PartOf" not in path["Unit"], "it must go on where the socket is taken away"
    assert "BindsTo" not in path["Unit"]


def test_the_units_say_words_that_the_helper_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    told = capsys.readouterr().out
    for name, word in ((SERVED, "serve"), (SERVICE, "watch")):
        argv = Unit(name)["Service"]["ExecStart"].split()
        assert argv[1:] == ["-I", "-m", "powerguard.effectors.signals.helper", word]
        assert word in told
