"""The units of both root helpers as files: systemd finds nothing to say, and what hangs on single lines is there."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from configparser import ConfigParser
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from powerguard.effectors.gpu import effector as gpu_effector
from powerguard.effectors.gpu import helper as gpu
from powerguard.effectors.gpu.helper import LIMITS
from powerguard.effectors.options import GPU_SOCKET, SIGNAL_SOCKET
from powerguard.effectors.signals import effector as signal_effector
from powerguard.effectors.signals import helper as signals
from powerguard.effectors.signals.helper import STOPPED_FILE
from tests.peers import require

SYSTEMD = Path(__file__).parents[2] / "systemd"
WORST_EXPOSURE = 2.0
"""What systemd-analyze calls it, of 10; the daemon's own unit, without root, is at 1.8."""


@dataclass(frozen=True, kw_only=True)
class Helper:
    """What its units must agree with. holds: what more its services must say; lacks: what they must not."""

    name: str
    module: str
    run: Callable[[Sequence[str]], int]
    folder: str
    kept: str
    socket_path: str
    watch: str
    within_s: float
    holds: dict[str, str]
    lacks: set[str] = field(default_factory=set)

    @property
    def socket(self) -> str:
        return f"{self.name}.socket"

    @property
    def served(self) -> str:
        return f"{self.name}@.service"

    @property
    def watching(self) -> str:
        return f"{self.name}-watch.service"

    @property
    def units(self) -> tuple[str, ...]:
        return self.socket, self.served, self.watch, self.watching


HELPERS = (
    Helper(
        name="powerguard-gpu",
        module="powerguard.effectors.gpu.helper",
        run=gpu.run,
        folder=gpu.FOLDER,
        kept=LIMITS,
        socket_path=GPU_SOCKET,
        watch=gpu_effector.WATCH,
        within_s=gpu.WITHIN_S,
        holds={"CapabilityBoundingSet": "CAP_SYS_ADMIN"},
    ),
    Helper(
        name="powerguard-signal",
        module="powerguard.effectors.signals.helper",
        run=signals.run,
        folder=signals.FOLDER,
        kept=STOPPED_FILE,
        socket_path=SIGNAL_SOCKET,
        watch=signal_effector.WATCH,
        within_s=signals.WITHIN_S,
        # The group, to ask whose a trainer's socket is. With the others it could not see whom it signals.
        holds={"CapabilityBoundingSet": "CAP_KILL", "SupplementaryGroups": "powerguard"},
        lacks={"ProtectProc", "ProcSubset"},
    ),
)


@pytest.fixture(params=HELPERS, ids=lambda helper: helper.name)
def helper(request: pytest.FixtureRequest) -> Helper:
    assert isinstance(request.param, Helper)
    return request.param


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
    for name in (name for helper in HELPERS for name in helper.units):
        shutil.copy(SYSTEMD / name, ours)
    for program in ("opt/powerguard/bin/python", "usr/lib/powerguard/powerguard-helper"):
        path = tmp_path / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n", encoding="ascii")
        path.chmod(0o755)
    return tmp_path


@pytest.mark.peer("systemd-analyze")
def test_systemd_finds_nothing_to_say(root: Path) -> None:
    """And would find a wrong key, or this would prove nothing."""

    def verify() -> str:
        names = [name.replace("@", "@1") for helper in HELPERS for name in helper.units]
        argv = [require("systemd-analyze"), "verify", "--man=no", f"--root={root}", *names]
        ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        lines = (ended.stderr + ended.stdout).splitlines()
        return "\n".join(line for line in lines if "powerguard" in line.replace(str(root), ""))

    assert verify() == ""
    for name in (helper.socket for helper in HELPERS):
        unit = root / "etc/systemd/system" / name
        unit.write_text(unit.read_text(encoding="utf-8").replace("SocketMode", "SocketMood"), encoding="utf-8")
    assert verify().count("SocketMood") == len(HELPERS)


@pytest.mark.peer("systemd-analyze")
def test_root_can_do_no_more_than_it_must(helper: Helper) -> None:
    for name in (helper.served, helper.watching):
        argv = [require("systemd-analyze"), "security", "--offline=true", "--no-pager"]
        argv += [f"--threshold={int(WORST_EXPOSURE * 10)}", str(SYSTEMD / name)]
        ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert ended.returncode == 0, ended.stdout[-500:]
        service = Unit(name)["Service"]
        assert {key: service[key] for key in helper.holds} == helper.holds
        assert not helper.lacks & set(service)
        assert (service["ReadWritePaths"], service["DevicePolicy"]) == (helper.folder, "closed")


def test_only_our_user_can_say_a_word(helper: Helper) -> None:
    socket = Unit(helper.socket)["Socket"]
    assert socket["ListenStream"] == helper.socket_path
    assert (socket["SocketUser"], socket["SocketMode"]) == ("powerguard", "0600")
    assert socket["Accept"] == "yes"
    assert Path(helper.socket_path).parent == Path(helper.folder)


def test_a_word_that_hangs_is_ended_and_none_is_ended_too_early(helper: Helper) -> None:
    assert float(Unit(helper.served)["Service"]["RuntimeMaxSec"]) > helper.within_s
    assert "RuntimeMaxSec" not in Unit(helper.watching)["Service"], "the watch waits"


def test_the_watch_runs_whenever_something_is_kept_and_is_never_given_up_on(helper: Helper) -> None:
    path, service = Unit(helper.watch), Unit(helper.watching)
    assert path["Path"]["PathExists"] == f"{helper.folder}/{helper.kept}"
    assert path["Path"]["Unit"] == helper.watching
    assert helper.watch in Unit(helper.socket)["Unit"]["Wants"]
    assert service["Unit"]["StartLimitIntervalSec"] == "0"
    assert not {"PartOf", "BindsTo"} & set(path["Unit"]), "it must go on where the socket is taken away"
    # Of a path that starts it more often than 200 times in 2 s systemd thinks no more (systemd.path(5)).
    assert (service["Service"]["Restart"], float(service["Service"]["RestartSec"]) > 0.1) == ("on-failure", True)


def test_the_units_say_words_that_the_helper_knows(helper: Helper, capsys: pytest.CaptureFixture[str]) -> None:
    assert helper.run(["--help"]) == 0
    stdout = capsys.readouterr().out
    for name, word in ((helper.served, "serve"), (helper.watching, "watch")):
        argv = Unit(name)["Service"]["ExecStart"].split()
        assert argv[1:] == ["-I", "-S", "/usr/lib/powerguard/powerguard-helper", helper.module, word]
        assert word in stdout


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A virtual environment of ours, into which another package has put a .pth file that runs code."""
    packages = tmp_path / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (packages / "powerguard").symlink_to(SYSTEMD.parent / "powerguard")
    (packages / "other.pth").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})\n", encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(Path(sys.executable).resolve())
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n", encoding="utf-8")
    return tmp_path


STARTED_BY_US = [
    path.name for path in sorted(SYSTEMD.glob("*.service")) if "/opt/powerguard/bin/python" in path.read_text("utf-8")
]


@pytest.mark.parametrize("name", STARTED_BY_US)
def test_no_other_packages_code_runs_in_a_root_helper(prefix: Path, name: str) -> None:
    """Each as its unit starts it; without -S the .pth file is executed, or this would prove nothing."""
    python, *words, _ = Unit(name)["Service"]["ExecStart"].split()
    assert python == "/opt/powerguard/bin/python"
    words = [word.replace("/usr/lib/powerguard", str(SYSTEMD)) for word in words]
    ended = subprocess.run([prefix / "bin/python", *words, "--help"], capture_output=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert not (prefix / "ran").exists()
    words.remove("-S")
    subprocess.run([prefix / "bin/python", *words, "--help"], capture_output=True, check=True, timeout=60)
    assert (prefix / "ran").exists()


def test_powerguard_is_found_where_install_says(prefix: Path) -> None:
    """From a folder that is not the environment's own: a system's dist-packages, a checkout."""
    packages = next((prefix / "lib").glob("*/site-packages"))
    (packages / "powerguard").unlink()
    program = (SYSTEMD / "powerguard-helper").read_text(encoding="utf-8")
    written = prefix / "powerguard-helper"
    for places, code in (((), 1), ((str(SYSTEMD.parent),), 0)):
        written.write_text(program.replace("\nPLACES = ()", f"\nPLACES = {places!r}"), encoding="utf-8")
        argv = [prefix / "bin/python", "-I", "-S", written, HELPERS[0].module, "--help"]
        assert subprocess.run(argv, capture_output=True, check=False, timeout=60).returncode == code
