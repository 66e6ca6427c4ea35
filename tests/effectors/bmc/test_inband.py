"""The in-band engine and its root helper, on a stand-in for /dev/ipmi0 that is held to the kernel's own header.

No machine of ours has a BMC: that a real driver takes what we send is for a virtual machine to show.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.actions import Detail
from powerguard.effectors.bmc import helper
from powerguard.effectors.bmc import helper as ipmi_device
from powerguard.effectors.bmc.effector import BmcEffector, BmcError
from powerguard.effectors.bmc.helper import ALLOWED
from powerguard.effectors.bmc.ipmi import BmcFailure, Command, Failure, PowerRestorePolicy, RestartCause
from powerguard.effectors.options import IPMI_SOCKET, BmcOptions
from tests.effectors.root_peers import answering
from tests.peers import require
from tests.peers.ipmi import ENSURE
from tests.peers.ipmi_device import IpmiDevice
from tests.peers.machine import quickly

ROOT = Path(__file__).parents[3]
SYSTEMD = ROOT / "systemd"


@pytest.fixture
def device(tmp_path: Path) -> IpmiDevice:
    return IpmiDevice(tmp_path)


async def ensure(path: Path, *, limit_s: float = 30.0) -> Detail:
    return await BmcEffector(BmcOptions(kind="in-band", socket=str(path)), limit_s=limit_s).carry_out(ENSURE)


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_the_policy_is_set_once_and_verified(device: IpmiDevice) -> None:
    """Through the socket as systemd serves it; the second time nothing is written; the cause of the start is told."""
    async with device.listening() as path:
        result = dict(await ensure(path))
        assert (result["engine"], result["before"], result["policy"]) == ("in-band", "last-state", "always-on")
        assert (result["changed"], result["verified"], result["ac_failed"]) == (True, True, True)
        assert dict(await ensure(path))["changed"] is False
        assert device.heard == ["00/01", "00/06", "00/01", "00/01"]
        seen = await BmcEffector(BmcOptions(kind="in-band", socket=str(path))).probe(30.0)
        assert seen.supported == frozenset(PowerRestorePolicy) - {PowerRestorePolicy.UNKNOWN}
        assert seen.restart_cause is RestartCause.POLICY_ALWAYS_ON
        assert (await BmcEffector(BmcOptions(kind="in-band", socket=str(path))).why_on(30.0)).status.ac_failed
        device.misbehave(lie=True)
        (device.folder / "policy").write_text("0\n")
        with pytest.raises(BmcError, match="acknowledged always-on but still reads always-off") as caught:
            await ensure(path)
        assert caught.value.failure is Failure.MISMATCH


@pytest.mark.peer("cc")
def test_answers_to_others_are_passed_over(device: IpmiDevice) -> None:
    """What an earlier time-out left in the queue carries another number; ours is found behind it, also a long one."""
    device.misbehave(stale=5, status_bytes=290)
    status, answer = device.say("status")
    assert (status, answer["failure"], answer["status"][:2]) == (0, None, "21")
    device.misbehave(stale=64)
    status, answer = device.say("status")
    assert (status, answer["failure"]) == (1, "protocol-error")
    assert "64 answers, and none of them to Get Chassis Status" in answer["text"]


@pytest.mark.peer("cc")
@pytest.mark.parametrize(
    ("faults", "failure", "expected"),
    [
        ({"mute": True}, "timeout", "the BMC does not answer Get Chassis Status"),
        ({"busy": 99}, "busy", "0xC0"),
        ({"code": 0xC1}, "unsupported", "0xC1"),
        ({"code": 0xD4}, "privilege", "0xD4"),
        ({"number": 16}, "busy", "another program holds it"),
        ({"number": 13}, "privilege", "it is root's alone"),
        ({"number": 19}, "unreachable", "modprobe -a ipmi_si ipmi_devintf"),
        ({"number": 5}, "protocol-error", "Input/output error"),
    ],
)
def test_a_fault_is_reported_and_in_time(
    device: IpmiDevice, faults: dict[str, int], failure: str, expected: str
) -> None:
    device.misbehave(**faults)  # type: ignore[arg-type]  # each is what its name says
    for _ in quickly(3.0):
        status, answer = device.say("ensure", "--within-s", "1")
    assert (status, answer["failure"]) == (1, failure)
    assert expected in answer["text"]
    assert device.policy == "last-state"


@pytest.mark.peer("cc")
def test_a_device_that_is_none(device: IpmiDevice, tmp_path: Path) -> None:
    """Absent, the driver missing; a folder; a file that knows no such call."""
    status, result = device.say("status", device=tmp_path / "ipmi9")
    assert (status, result["failure"]) == (1, "unreachable")
    assert "ipmi9: not there: modprobe -a ipmi_si ipmi_devintf" in result["text"]
    assert device.say("status", device=tmp_path)[1]["failure"] == "protocol-error"
    plain = tmp_path / "plain"
    plain.touch()
    environment = {name: value for name, value in device.environment.items() if name != "LD_PRELOAD"}
    device.environment = environment
    assert "is not an IPMI device" in device.say("status", device=plain)[1]["text"]


@pytest.mark.peer("cc")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"word": "off"}, "unknown word; the words are status, ensure, probe, look"),
        ({"word": "ensure", "policy": "always-off"}, "takes within_s "),
        ({"word": "status", "within_s": 600}, "at most 5"),
        ({"word": "status", "within_s": True}, "at most 5"),
        ({"word": ["status"]}, "unknown word"),
        ({"word": "raw", "netfn": 0, "cmd": 2}, "unknown word"),
    ],
)
def test_nothing_else_can_be_said(device: IpmiDevice, line: dict[str, object], expected: str) -> None:
    """No policy but always-on, no time of one's own, and nothing raw."""
    _, answer = device.say("serve", line=json.dumps(line).encode() + b"\n")
    assert answer["ok"] is False
    assert expected in answer["error"]
    assert device.heard == []


def test_the_command_line_takes_words_and_no_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    """A person may say the same words, and is told when it is none."""
    assert helper.run(["--help"]) == 0
    assert "powerguard-ipmi" in capsys.readouterr().out
    for nonsense in (["off"], ["status", "--within-s", "nan"], ["status", "--within-s", "6"], []):
        assert helper.run(nonsense) == 64
    assert "at most 5" in capsys.readouterr().err


def test_no_command_passes_that_is_not_listed(tmp_path: Path) -> None:
    """The second lock, below the words: chassis control, users, raw access to anything else never reach the device."""
    assert (0x00, 0x02) not in ALLOWED
    fifo = tmp_path / "ipmi0"
    os.mkfifo(fifo)
    refused = 0
    with ipmi_device.IpmiDevice(str(fifo), boottime_s() + 60.0) as device:
        for netfn in range(0, 0x40, 2):
            for number in range(256):
                if (netfn, number) not in ALLOWED:
                    with pytest.raises(BmcFailure, match="is not a permitted command"):
                        device.send(Command("Some Command", netfn, number))
                    refused += 1
    assert refused == 32 * 256 - len(ALLOWED)


def test_no_real_device_is_touched_under_test() -> None:
    assert helper.carry_out(ipmi_device.DEVICE, helper.IpmiRequest("ensure"))["text"].startswith("refused under test")


async def test_a_helper_that_is_not_there_or_is_not_ours(tmp_path: Path) -> None:
    """Where to look is in the message; half a line, nonsense and silence end in time."""
    with pytest.raises(BmcError, match=r"systemctl enable --now powerguard-ipmi\.socket") as caught:
        await ensure(tmp_path / "none.sock")
    assert caught.value.failure is Failure.UNREACHABLE
    verified = b'{"ok": true, "before": "41", "after": "zz"}\n'
    nonsense = (b"", b'{"ok": tr', b"[]\n", verified, b'{"ok": true, "before": "01", "after": "01"}\n', None)
    async with answering(tmp_path, *nonsense) as (path, asked):
        for _ in nonsense:
            with pytest.raises(BmcError):
                await ensure(path, limit_s=0.5)
    assert {json.loads(line)["word"] for line in asked} == {"ensure"}
    assert all(0 < json.loads(line)["within_s"] < 0.5 for line in asked)


def test_a_word_waits_for_no_module_that_it_does_not_need() -> None:
    """Each word starts a Python: what is slow to import, or is for other words, is not there when ensure begins."""
    code = "import sys; before = set(sys.modules); import powerguard.effectors.bmc.helper; "
    code += "print(*(set(sys.modules) - before))"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(ROOT)!r}); {code}"],
                           capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
    found = set(ended.stdout.split())
    assert {name for name in found if name.startswith("powerguard.effectors.bmc.")} == {
        f"powerguard.effectors.bmc.{name}" for name in ("helper", "ipmi")
    }
    assert not found & {"argparse", "asyncio", "dataclasses", "inspect", "subprocess", "tempfile"}


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_who_says_nothing_holds_nobody_up(device: IpmiDevice) -> None:
    """One process listens, each word has its own: silence, half a line and a hanging BMC are somebody else's."""
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    async with device.listening() as path, asyncio.timeout(90):
        for _ in quickly(1.9):
            silent = [await asyncio.open_unix_connection(path) for _ in range(3)]
            silent[1][1].write(b'{"word": "ensure"')
            await silent[1][1].drain()
            assert dict(await ensure(path))["verified"] is True
            opened.extend(silent)
        found = [await reader.readline() for reader, _ in opened]
        assert all(b"no whole line within 2 s" in line for line in found)
        for _, writer in opened:
            writer.close()


def test_it_ends_when_nobody_comes_any_more(device: IpmiDevice) -> None:
    """Root's memory does not wait for months; the socket is systemd's, and starts it again."""
    path = device.folder / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.set_inheritable(True)
        code = "import sys; from powerguard.effectors.bmc import helper; "
        code += f"sys.exit(helper.listen({listening.fileno()}, lambda request: dict(request), 3.0))"
        argv = [sys.executable, "-c", code]
        with subprocess.Popen(argv, pass_fds=[listening.fileno()], cwd=ROOT) as served:
            for number in range(2):
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(60)
                    client.connect(str(path))
                    client.sendall(b'{"number": %d}\n' % number)
                    assert json.loads(client.makefile().readline()) == {"number": number}
            assert served.wait(timeout=60) == 0


def unit(name: str) -> ConfigParser:
    read = ConfigParser(interpolation=None, strict=False, delimiters=("=",), comment_prefixes=("#",))
    read.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
    read.read(SYSTEMD / name, encoding="utf-8")
    return read


def test_only_our_user_can_say_a_word() -> None:
    listens, service = unit("powerguard-ipmi.socket")["Socket"], unit("powerguard-ipmi.service")["Service"]
    assert (listens["ListenStream"], listens["Accept"]) == (IPMI_SOCKET, "no")
    assert (listens["SocketUser"], listens["SocketMode"]) == ("powerguard", "0600")
    assert service["ExecStart"].split()[1:3] == ["-I", "-S"]
    assert service["ExecStart"].split()[4:] == [helper.__name__, "serve"]
    assert (service["CapabilityBoundingSet"], service["DeviceAllow"]) == ("", "char-ipmidev rw")


@pytest.mark.peer("systemd-analyze")
def test_systemd_finds_nothing_to_say(tmp_path: Path) -> None:
    """Of the units' words, and of what root can still do there."""
    shutil.copytree("/usr/lib/systemd/system", tmp_path / "usr/lib/systemd/system", symlinks=True)
    python = tmp_path / "opt/powerguard/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    ours = tmp_path / "etc/systemd/system"
    ours.mkdir(parents=True)
    for name in ("powerguard-ipmi.socket", "powerguard-ipmi.service"):
        shutil.copy(SYSTEMD / name, ours)
    names = ("powerguard-ipmi.socket", "powerguard-ipmi.service")
    argv = [require("systemd-analyze"), "verify", "--man=no", f"--root={tmp_path}", *names]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert "powerguard" not in (ended.stderr + ended.stdout).replace(str(tmp_path), "")
    argv = [require("systemd-analyze"), "security", "--offline=true", "--no-pager", "--threshold=20"]
    argv.append(str(SYSTEMD / "powerguard-ipmi.service"))
    assert subprocess.run(argv, capture_output=True, check=False, timeout=60).returncode == 0
