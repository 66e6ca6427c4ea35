"""powerguard-disarm, the first act at boot: our watchdog is stopped, anybody else's is not, and no BMC holds it up.

The real program, with the stand-in for /dev/ipmi0 that is held to the kernel's own header.
"""

import subprocess
import sys
import threading
from configparser import ConfigParser
from pathlib import Path

import pytest

from powerguard.daemon.control.admin import SOCKET
from powerguard.effectors.bmc.ipmi import DISARM, arm_watchdog
from tests.peers.ipmi_device import IpmiDevice
from tests.peers.machine import quickly

SYSTEMD = Path(__file__).parents[2] / "systemd"
PROGRAM = SYSTEMD / "powerguard-disarm"
SMS_OS, POWER_CYCLE, HARD_RESET = 4, 3, 1

pytestmark = pytest.mark.peer("cc")


@pytest.fixture
def device(tmp_path: Path) -> IpmiDevice:
    return IpmiDevice(tmp_path)


def run(device: IpmiDevice, *where: str) -> tuple[int, str]:
    argv = [sys.executable, "-I", str(PROGRAM), *(where or (str(device.path), str(device.modules)))]
    ended = subprocess.run(argv, capture_output=True, text=True, env=device.environment, check=False, timeout=60)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("answer_bytes", [2, 6, 8])
def test_what_the_boot_before_has_left_armed_is_stopped(device: IpmiDevice, answer_bytes: int) -> None:
    """Also where the BMC tells less of its timer than the standard wants; the second time there is nothing to do."""
    device.trick(answer_bytes=answer_bytes)
    device.misbehave(stale=3)  # events, and what others have left: passed over
    device.set_timer(SMS_OS, POWER_CYCLE, expired=0x10)
    code, said = run(device)
    assert (code, device.timer[1]) == (0, 0)
    assert device.timer[2] == 0x10, "that it has fired is still told"
    assert "<5>" in said
    assert "it is stopped" in said
    assert run(device) == (0, "")


@pytest.mark.parametrize(("use", "action"), [(SMS_OS, HARD_RESET), (3, POWER_CYCLE), (1, HARD_RESET), (SMS_OS, 0)])
def test_a_timer_that_we_would_not_have_set_is_left_alone(device: IpmiDevice, use: int, action: int) -> None:
    """A site's own watchdog daemon, and the firmware's that guards the start of the system."""
    device.set_timer(use, action)
    assert run(device) == (0, "")
    assert device.timer[:2] == (use, action)
    assert device.heard == ["06/25"], "it only looked"


def test_the_kernels_own_watchdog_is_left_alone(device: IpmiDevice) -> None:
    (device.modules / "ipmi_watchdog").mkdir(parents=True)
    device.set_timer(SMS_OS, POWER_CYCLE)
    code, said = run(device)
    assert (code, device.heard) == (0, [])
    assert "ipmi_watchdog is loaded" in said


@pytest.mark.parametrize(
    ("faults", "why"),
    [({"mute": True}, "does not answer"), ({"number": 5}, "Input/output error")],
)
def test_a_bmc_that_is_no_help_is_reported_and_given_up(device: IpmiDevice, faults: dict[str, int], why: str) -> None:
    device.set_timer(SMS_OS, POWER_CYCLE)
    device.misbehave(**faults)  # type: ignore[arg-type]
    for _ in quickly(10.0, tries=3):
        code, said = run(device)
    assert code == 1
    assert why in said
    assert "ipmitool mc watchdog off" in said


@pytest.mark.parametrize(
    ("trick", "why"), [({"is_firm": True}, "still reports it as armed"), ({"code": 0xD4}, "completion code 0xd4")]
)
def test_a_bmc_that_only_says_so_or_refuses(device: IpmiDevice, trick: dict[str, int], why: str) -> None:
    device.trick(**trick)  # type: ignore[arg-type]
    device.set_timer(SMS_OS, POWER_CYCLE)
    code, said = run(device)
    assert code == 1
    assert why in said


def test_a_host_without_a_bmc_is_not_held_up(device: IpmiDevice) -> None:
    for _ in quickly(2.0):  # no driver is loaded, so none is waited for
        code, said = run(device, str(device.folder / "none"), str(device.modules))
        assert (code, "is not there" in said) == (0, True)


def test_a_driver_that_still_looks_for_its_bmc_is_waited_for(device: IpmiDevice) -> None:
    device.set_timer(SMS_OS, POWER_CYCLE)
    (device.modules / "ipmi_devintf").mkdir(parents=True)
    late = device.folder / "late"
    appears = threading.Timer(0.5, late.symlink_to, args=(device.path,))
    appears.start()
    code, said = run(device, str(late), str(device.modules))
    appears.join()
    assert (code, device.timer[1]) == (0, 0), said


def test_it_refuses_this_machines_own_bmc(device: IpmiDevice) -> None:
    assert run(device, "/dev/ipmi0", str(device.modules))[0] == 1


def test_it_says_what_the_daemon_would_say() -> None:
    """The same bytes as the daemon's own way to disarm, and it knows as ours what that arms."""
    program = PROGRAM.read_text(encoding="utf-8")
    assert "STOP = bytes((SMS_OS, 0, 0, 0, 0x64, 0))" in program
    assert DISARM.data == bytes((SMS_OS, 0, 0, 0, 0x64, 0))
    assert (arm_watchdog(600).data[0] & 7, arm_watchdog(600).data[1]) == (SMS_OS, POWER_CYCLE)


def test_the_unit_is_started_before_everything_that_takes_long_and_nobody_waits_for_it() -> None:
    """Nor is it given up while a timer may run, unless the daemon is there, which may have armed one by then."""
    unit = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    unit.read(SYSTEMD / "powerguard-disarm.service", encoding="utf-8")
    assert unit["Unit"]["DefaultDependencies"] == "no"
    assert "sysinit.target" in unit["Unit"]["Before"].split()
    assert unit["Install"]["WantedBy"] == "sysinit.target"
    assert unit["Service"]["ExecStart"].endswith(" -I -S /usr/lib/powerguard/powerguard-disarm")
    assert "/opt" not in unit["Service"]["ExecStart"]
    service = unit["Service"]
    assert (service["Type"], service["Restart"], "TimeoutStartSec" in service) == ("simple", "on-failure", False)
    assert unit["Unit"]["ConditionPathExists"] == f"!{SOCKET}"
