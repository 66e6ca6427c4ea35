"""The units as files: systemd itself finds nothing to say, and the promises that hang on single lines are kept."""

import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from powerguard.cli.install.pieces import RENAMED, TRAINERS, TRAINERS_MOUNT
from powerguard.clock import boot_id
from powerguard.effectors.options import OFF_FIFO, ResumeOptions, RtcOptions
from tests.peers import require

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNITS = (
    "powerguard.service",
    "powerguard-off.service",
    "powerguard-off.socket",
    "powerguard-resume.target",
    "powerguard-disarm.service",
    TRAINERS_MOUNT,
)
PROGRAMS = (
    "opt/powerguard/bin/powerguard",
    "usr/lib/powerguard/powerguard-off",
    "usr/bin/python3",
    "bin/bash",
    "bin/sh",
)
WORST_EXPOSURE = 2.0


class Unit(ConfigParser):
    """A unit file; of a key that is there several times the last one counts."""

    def __init__(self, name: str) -> None:
        super().__init__(interpolation=None, strict=False, delimiters=("=",), comment_prefixes=("#",))
        self.read(SYSTEMD / name, encoding="utf-8")

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def verify(root: Path, *names: str) -> str:
    """What systemd-analyze has to say of our units in a system made of nothing else."""
    argv = [require("systemd-analyze"), "verify", "--man=no", f"--root={root}", *names]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    lines = (ended.stderr + ended.stdout).splitlines()
    return "\n".join(line for line in lines if "powerguard" in line.replace(str(root), ""))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system with systemd's own units, ours, and the programs that ours name."""
    theirs = Path("/usr/lib/systemd/system")
    if not theirs.is_dir():
        require("systemd-analyze")
    shutil.copytree(theirs, tmp_path / "usr/lib/systemd/system", symlinks=True)
    ours = tmp_path / "etc/systemd/system"
    ours.mkdir(parents=True)
    files = {unit: file for file, unit in RENAMED.items()}
    for name in UNITS:
        shutil.copy(SYSTEMD / files.get(name, name), ours / name)
    for name in PROGRAMS:
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n", encoding="ascii")
        program.chmod(0o755)
    return tmp_path


@pytest.mark.peer("systemd-analyze")
def test_systemd_finds_nothing_to_say(root: Path) -> None:
    assert verify(root, *UNITS) == ""


@pytest.mark.peer("systemd-analyze")
def test_a_wrong_key_would_be_found(root: Path) -> None:
    """Or the test above would prove nothing."""
    unit = root / "etc/systemd/system/powerguard.service"
    unit.write_text(unit.read_text(encoding="utf-8").replace("WatchdogSec", "WatchdogSek"), encoding="utf-8")
    assert "WatchdogSek" in verify(root, "powerguard.service")


@pytest.mark.peer("systemd-analyze")
def test_the_daemon_is_exposed_no_more_than_promised() -> None:
    argv = [require("systemd-analyze"), "security", "--offline=true", "--no-pager"]
    argv += [f"--threshold={int(WORST_EXPOSURE * 10)}", str(SYSTEMD / "powerguard.service")]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stdout[-500:]
    exposure = float(ended.stdout.split("powerguard.service:")[-1].split()[0])
    assert 0 < exposure <= WORST_EXPOSURE


def test_the_daemon_is_never_given_up_on_and_has_no_rights() -> None:
    """systemd's default leaves a daemon dead after five quick crashes (measured)."""
    unit = Unit("powerguard.service")
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert "network-online" not in unit["Unit"]["After"]
    service = unit["Service"]
    assert service["Restart"] == "always"
    assert service["Type"] == "notify"
    assert service["User"] == "powerguard"
    assert service["CapabilityBoundingSet"] == ""
    assert "DynamicUser" not in service
    assert "ProcSubset" not in service, "the boot id and the uptime are outside of it"


@pytest.mark.parametrize("name", ["powerguard.service", "powerguard-sentinel.service"])
def test_what_holds_secrets_leaves_no_core(name: str) -> None:
    assert Unit(name)["Service"]["LimitCORE"] == "0"


def test_the_clock_can_be_woken_by_and_not_set() -> None:
    """Its alarm needs no more than the device open for reading; the rest of the sandbox stays as it was."""
    service = Unit("powerguard.service")["Service"]
    assert service["ProtectClock"] == service["PrivateDevices"] == "yes"
    assert service["BindReadOnlyPaths"] == f"-{RtcOptions().device}", "a host without one starts all the same"
    rule = (SYSTEMD / "powerguard.rtc.rules").read_text(encoding="utf-8").splitlines()[-1]
    assert rule == 'SUBSYSTEM=="rtc", KERNEL=="rtc0", GROUP="powerguard", MODE="0640"'


def test_the_daemon_writes_to_where_the_helper_listens() -> None:
    socket = Unit("powerguard-off.socket")
    assert socket["Socket"]["ListenFIFO"] == OFF_FIFO
    assert socket["Socket"]["SocketMode"] == "0200"
    assert socket["Socket"]["SocketUser"] == "powerguard"
    assert socket["Unit"]["DefaultDependencies"] == "no"
    target = ResumeOptions().target
    assert (SYSTEMD / target).exists()
    assert f'"{target}"' in (SYSTEMD / "powerguard.rules").read_text(encoding="utf-8")


def test_the_helper_outlives_the_shutdown_and_holds_nothing_mounted() -> None:
    """No default dependencies; @ in argv[0]; and nothing that would give it a mount namespace of its own."""
    unit = Unit("powerguard-off.service")
    assert unit["Unit"]["DefaultDependencies"] == "no"
    assert "Conflicts" not in unit["Unit"]
    assert unit["Service"]["ExecStart"].startswith("@/bin/bash @")
    mounting = ("Private", "Protect", "ReadOnly", "ReadWrite", "Inaccessible", "Bind", "Root", "TemporaryFile")
    assert [key for key in unit["Service"] if key.startswith(mounting)] == []
    assert "RuntimeDirectory" not in unit["Service"]


def test_the_helper_needs_nothing_but_bash_and_systemd() -> None:
    """No virtual environment, no Python: both may be gone when it counts."""
    program = (SYSTEMD / "powerguard-off").read_text(encoding="utf-8")
    assert program.startswith("#!/bin/bash\n")
    assert "python" not in program
    checked = subprocess.run(["/bin/bash", "-n", SYSTEMD / "powerguard-off"], capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")
    assert (SYSTEMD / "powerguard-off").stat().st_mode & 0o111 == 0o111


def test_trainers_have_little_memory_and_of_their_own() -> None:
    """Bounded in size and in files; a mount over the sockets of trainers that run is left out."""
    unit = Unit("powerguard-trainers.mount")
    escaped = subprocess.run(["systemd-escape", "--path", "--suffix=mount", TRAINERS], capture_output=True, check=True)
    assert escaped.stdout.decode().strip() == TRAINERS_MOUNT
    assert (unit["Mount"]["Where"], unit["Mount"]["Type"]) == (TRAINERS, "tmpfs")
    options = set(unit["Mount"]["Options"].split(","))
    assert {"mode=3777", "size=1m", "nr_inodes=2k", "nodev", "nosuid", "noexec"} == options
    assert unit["Unit"]["ConditionDirectoryNotEmpty"] == f"!{TRAINERS}"
    assert unit["Unit"]["DefaultDependencies"] == "no"


def test_our_own_folder_of_trainers_is_sticky() -> None:
    lines = (SYSTEMD / "powerguard.tmpfiles.conf").read_text(encoding="utf-8").splitlines()
    folders = {line.split()[1]: line.split()[2:4] for line in lines if line.startswith("d ")}
    assert folders == {
        "/run/powerguard-trainers": ["3777", "root"],
        "/run/powerguard-off": ["0755", "root"],
        "/var/lib/powerguard-off": ["0755", "root"],
        "/etc/powerguard": ["0755", "root"],
        "/etc/powerguard/secrets": ["0700", "root"],
    }


def test_orders_for_the_last_step_have_their_files_from_the_boot_on() -> None:
    """As long as an order is, and none: powerguard-off writes in place."""
    lines = (SYSTEMD / "powerguard.tmpfiles.conf").read_text(encoding="utf-8").splitlines()
    files = [line.split(maxsplit=6)[1:] for line in lines if line.startswith("f ")]
    assert [each[:4] for each in files if each[0].endswith("/answer")] == [
        ["/run/powerguard-off/answer", "0644", "root", "root"]
    ]
    made = [each for each in files if not each[0].endswith("/answer")]
    assert [[path, mode, user, group] for path, mode, user, group, _, _ in made] == [
        [f"/run/powerguard-off/{order}", "0600", "root", "root"] for order in ("off", "reboot")
    ]
    assert {len(content) for *_, content in made} == {len(f"{boot_id()}\n")}
    assert boot_id() not in {content for *_, content in made}
