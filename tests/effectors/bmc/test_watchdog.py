"""The power-on method `watchdog`: armed only where a drill has shown it, read back, never over somebody else's timer.

The helper is the real one on the stand-in for /dev/ipmi0; the timer itself is also proven with OpenIPMI's ipmi_sim.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.actions import ArmPowerOn, CheckPowerOn, DisarmPowerOn, PowerOnMethod
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc import helper
from powerguard.effectors.bmc import helper as ipmi_device
from powerguard.effectors.bmc.engine import BmcError
from powerguard.effectors.bmc.findings import findings
from powerguard.effectors.bmc.ipmi import DISARM, BmcFailure, Command, Device, Failure, Timer, arm_watchdog
from powerguard.effectors.bmc.watchdog import FILE, Board, DrillFile, DrillRecord, WatchdogEffector
from powerguard.effectors.options import BmcOptions
from tests.peers.ipmi_device import IpmiDevice

BOARD = Board(manufacturer=674, product=256, firmware="1.72", name="Acme X1", bios="Acme 2.4")
PASSED = DrillRecord(
    state="passed", board=BOARD, boot_id="b-1", armed_wall_s=1.8e9, in_s=170.0, because="", judged_wall_s=1.8e9 + 400
)
ARM = ArmPowerOn(id="a-1", by_s=1e9, method=PowerOnMethod.WATCHDOG, outage="o-1", in_s=900.5)
CHECK = CheckPowerOn(id="c-1", by_s=1e9, method=PowerOnMethod.WATCHDOG)
DISARM_WAY = DisarmPowerOn(id="d-1", by_s=1e9, method=PowerOnMethod.WATCHDOG, outage="o-1")
needs_device = pytest.mark.peer("cc", "systemd-socket-activate")


@pytest.fixture
def device(tmp_path: Path) -> IpmiDevice:
    """A BMC in a board that the kernel names."""
    dmi = tmp_path / "dmi"
    dmi.mkdir()
    for name, word in (
        ("board_vendor", "Acme"),
        ("board_name", "X1"),
        ("bios_vendor", "Acme"),
        ("bios_version", "2.4"),
    ):
        (dmi / name).write_text(word + "\n")
    return IpmiDevice(tmp_path)


def options(socket: Path) -> BmcOptions:
    return BmcOptions(kind="in-band", socket=str(socket), watchdog=True)


def effector(device: IpmiDevice, socket: Path, drill: DrillRecord | None = PASSED) -> WatchdogEffector:
    drills = DrillFile(device.folder)
    if drill is not None:
        drills.store(drill)
    return WatchdogEffector(options(socket), drills, dmi=device.folder / "dmi", limit_s=30.0)


async def blocked(doing: WatchdogEffector, action: CheckPowerOn | ArmPowerOn = CHECK) -> str:
    with pytest.raises(EffectorError) as caught:
        await doing.carry_out(action)
    return str(caught.value)


# --- Bytes ----------------------------------------------------------------------------------------------------------


def test_the_bytes_are_those_of_the_specification() -> None:
    """IPMI 2.0 sections 27.6 and 27.7: use SMS/OS, power cycle, 100 ms little-endian; flag 10h is that of SMS/OS."""
    assert arm_watchdog(900).data == bytes.fromhex("440300102823")
    assert DISARM.data == bytes.fromhex("040000006400")
    for none in (0, 6554):
        with pytest.raises(ValueError, match="1 to 6553 s"):
            arm_watchdog(none)
    output = Timer.decode(bytes.fromhex("440300102823f401"))
    assert output == Timer(True, 4, 3, expired=True, initial_s=900.0, present_s=50.0)
    assert Timer.decode(bytes.fromhex("440300102823")) == output._replace(present_s=None)
    assert Timer.decode(bytes.fromhex("440300102823f401ffff")) == output
    assert Timer.decode(b"\x04\x03") == Timer(False, 4, 3)


def test_who_the_bmc_is_is_read_with_and_without_a_vendors_own_revision(tmp_path: Path) -> None:
    short = bytes.fromhex("200101720 2bfa202000001".replace(" ", ""))
    assert Device.decode(short) == Device(674, 256, "1.72")
    assert Device.decode(short + bytes.fromhex("0a0b0c0d")).auxiliary == "0a0b0c0d"
    result = Board.read(Device(674, 256, "1.72", "0a0b0c0d"), tmp_path)
    assert (result.firmware, result.name, result.bios) == ("1.72 (0a0b0c0d)", "", "")


@pytest.mark.parametrize(
    "data", ["", "0403001028", "840300102823", "050300102823", "440100102823", "440310002823", "44030010282300"]
)
def test_only_our_own_timer_passes_the_lock_below_the_words(tmp_path: Path, data: str) -> None:
    """Another use, a reset, a power-down, an interrupt before it, another length: none of it reaches the device."""
    odd = Command("Set Watchdog Timer", 0x06, 0x24, bytes.fromhex(data))
    plain = tmp_path / "plain"
    plain.touch()
    with ipmi_device.IpmiDevice(str(plain), boottime_s() + 60.0) as opened:
        with pytest.raises(BmcFailure, match="is not a permitted command"):
            opened.send(odd)
        with pytest.raises(BmcFailure, match="is not an IPMI device"):
            opened.send(DISARM)


# --- Words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"word": "arm"}, "in_s must be a whole number of 1 to 6553"),
        ({"word": "arm", "in_s": 6554}, "1 to 6553"),
        ({"word": "arm", "in_s": 12.5}, "1 to 6553"),
        ({"word": "arm", "in_s": True}, "1 to 6553"),
        ({"word": "arm", "in_s": 60, "action": 1}, "arm takes in_s, within_s "),
        ({"word": "disarm", "in_s": 60}, "disarm takes within_s "),
        ({"word": "restore"}, "policy must be always-off or last-state"),
        ({"word": "restore", "policy": "always-on"}, "policy must be"),
        ({"word": "restore", "policy": ["always-off"]}, "policy must be"),
    ],
)
def test_nothing_else_can_be_said_of_the_timer(line: dict[str, object], expected: str) -> None:
    with pytest.raises(helper.RefusedError, match=expected):
        helper.checked(line)


@pytest.mark.peer("cc")
@pytest.mark.parametrize(
    ("trick", "expected"),
    [
        ({"is_firm": True}, "Reset Watchdog Timer refused with completion code 0x80"),
        ({"start": "lost"}, "but reads use SMS/OS, action power cycle, stopped"),
        ({"code": 0xCC}, "0xCC"),
        ({"code": 0xD4}, "0xD4"),
        ({"answer_bytes": 1}, "was answered with 1 bytes"),
        ({"answer_bytes": 4}, "and no countdown"),
    ],
)
def test_what_does_not_read_back_is_taken_back(device: IpmiDevice, trick: dict[str, object], expected: str) -> None:
    """A timer of which nobody knows when it fires is worse than none."""
    device.trick(**trick)  # type: ignore[arg-type]  # each is what its name says
    status, answer = device.say("arm", "--in-s", "60")
    assert (status, answer["ok"]) == (1, True)
    assert expected in answer["text"]
    device.trick()
    assert device.say("watchdog")[1]["timer"][2:4] == "00"


@pytest.mark.peer("cc")
@pytest.mark.parametrize(
    "trick", [{"answer_bytes": 6}, {"answer_bytes": 12}, {"start": "untold"}], ids=["short", "long", "untold"]
)
def test_short_and_long_answers_are_read_and_a_falling_countdown_is_believed(
    device: IpmiDevice, trick: dict[str, object]
) -> None:
    """Boards cut bytes off, append some, or do not tell that it runs: then it is seen to fall."""
    device.trick(**trick)  # type: ignore[arg-type]  # each is what its name says
    status, answer = device.say("arm", "--in-s", "60")
    assert (status, answer["text"]) == (0, "")
    assert device.timer == (4, 3, 0, 600, True)
    status, answer = device.say("disarm")
    assert (status, answer["changed"]) == (0, True)
    assert device.timer[1:] == (0, 0, 100, False)
    assert device.say("disarm")[1]["changed"] is False


@pytest.mark.peer("cc")
def test_somebody_elses_timer_is_left_alone(device: IpmiDevice) -> None:
    """FreeIPMI's bmc-watchdog resets the host where nobody is alive; taken from it, nobody would."""
    device.set_timer(4, 1)
    status, answer = device.say("arm", "--in-s", "60")
    assert (status, answer["failure"]) == (1, "held")
    assert "(use SMS/OS, action hard reset, running, " in answer["text"]
    assert device.say("disarm")[1]["changed"] is False
    assert device.timer == (4, 1, 0, 600, True)


@pytest.mark.peer("cc")
def test_the_kernels_own_driver_blocks_it(device: IpmiDevice) -> None:
    """ipmi_watchdog stops the timer at every power-off: what it would stop is not armed."""
    (device.modules / "ipmi_watchdog").mkdir(parents=True)
    status, answer = device.say("arm", "--in-s", "60")
    assert (status, answer["failure"]) == (1, "held")
    assert "ipmi_watchdog is loaded" in answer["text"]
    assert device.say("watchdog")[1]["kernel_driver"] is True
    assert "06/24" not in device.heard


# --- The way --------------------------------------------------------------------------------------------------------


@needs_device
async def test_armed_read_back_and_disarmed(device: IpmiDevice) -> None:
    """Whole seconds and never sooner; the later order counts; disarmed once, and then there is nothing."""
    async with device.listening() as socket:
        method = effector(device, socket)
        assert dict(await method.carry_out(CHECK)) == {"board": "Acme X1", "drilled_wall_s": 1.8e9 + 400}
        assert not (device.folder / "timer").exists()
        began_s = boottime_s()
        detail = dict(await method.carry_out(ARM))
        assert 899.0 - (boottime_s() - began_s) <= float(str(detail["in_s"])) <= 901.0
        assert device.timer == (4, 3, 0, 9010, True)
        await method.carry_out(replace(ARM, in_s=1200.0))
        assert device.timer == (4, 3, 0, 12000, True)
        assert dict(await method.carry_out(DISARM_WAY)) == {"disarmed": True}
        assert device.timer[1] == 0
        assert dict(await method.carry_out(DISARM_WAY)) == {"disarmed": False}
        dry = WatchdogEffector(options(socket), method.drills, armed=False, dmi=device.folder / "dmi", limit_s=30.0)
        assert await dry.carry_out(CHECK)
        for order in (ARM, DISARM_WAY):
            assert dict(await dry.carry_out(order)) == {"dry_run": True}
        assert device.timer[1] == 0
        assert "6553 s at most, and 7000 s" in await blocked(method, replace(ARM, in_s=7000.0))
        assert device.timer[1] == 0


@needs_device
async def test_it_counts_only_where_it_was_drilled(device: IpmiDevice) -> None:
    """Never, not yet, in vain, elsewhere, before an update: each is said, and nothing is armed."""
    async with device.listening() as socket:
        drill = "powerguard drill --scope bmc-watchdog"
        assert await blocked(effector(device, socket, None)) == f"not drilled on this board ({drill})"
        assert "not drilled" in await blocked(effector(device, socket, None), ARM)
        assert "not judged yet" in await blocked(effector(device, socket, replace(PASSED, state="pending")))
        failed = replace(PASSED, state="failed", because="powered on by power-button")
        assert "its drill failed: powered on by power-button" in await blocked(effector(device, socket, failed))
        method = effector(device, socket)
        device.set_board(firmware="0174")
        assert "firmware was 1.72, is 1.74): drill again" in await blocked(method)
        device.set_board()
        (device.folder / "dmi" / "bios_version").write_text("2.5\n")
        assert "bios was Acme 2.4, is Acme 2.5" in await blocked(method, ARM)
        (device.folder / "dmi" / "bios_version").write_text("2.4\n")
        assert await method.carry_out(CHECK)
        assert "06/24" not in device.heard


@needs_device
async def test_it_is_blocked_and_why(device: IpmiDevice, tmp_path: Path) -> None:
    """Somebody else's timer, the kernel's driver, a BMC without a name, and nobody who listens."""
    async with device.listening() as socket:
        method = effector(device, socket)
        device.set_timer(1, 1)
        assert "(use BIOS FRB2, action hard reset" in await blocked(method)
        device.set_timer(1, 1, runs=False)
        (device.folder / "board").write_text("- 6 -1\n")
        assert "does not identify itself" in await blocked(method)
        device.set_board()
        assert await method.carry_out(CHECK)
        (device.modules / "ipmi_watchdog").mkdir(parents=True)
        assert "rmmod ipmi_watchdog" in await blocked(method, ARM)
    nobody = WatchdogEffector(BmcOptions(kind="in-band", socket=str(tmp_path / "none.sock")), DrillFile(tmp_path))
    with pytest.raises(BmcError, match=r"systemctl enable --now powerguard-ipmi\.socket") as caught:
        await nobody.carry_out(DISARM_WAY)
    assert caught.value.failure is Failure.UNREACHABLE


@needs_device
async def test_the_kernels_own_timer_is_not_stopped(device: IpmiDevice) -> None:
    """ipmi_watchdog with action=power_cycle sets the timer as we do. One that an outage has armed is ours even so."""
    (device.modules / "ipmi_watchdog").mkdir(parents=True)
    device.set_timer(4, 3)
    async with device.listening() as socket:
        method = effector(device, socket)
        assert dict(await method.carry_out(replace(DISARM_WAY, outage=""))) == {"disarmed": False}
        assert device.timer == (4, 3, 0, 600, True)
        assert dict(await method.carry_out(DISARM_WAY)) == {"disarmed": True}
        assert device.timer[4] is False


@needs_device
async def test_doctor_says_whether_it_would_be_armed(device: IpmiDevice) -> None:
    """Beforehand, and what the host draws where its BMC measures it; where nobody has asked for it, nothing."""
    device.set_board(watts=2860)
    (device.folder / "policy").write_text("2\n")
    async with device.listening() as socket:
        for _ in range(5):  # its watts have a second
            bmc, blocked_one = await findings(options(socket), folder=device.folder)
            if "draws" in bmc.text:
                break
        assert (bmc.verdict, bmc.text[-23:]) == ("PASS", "; the host draws 2860 W")
        assert (blocked_one.name, blocked_one.verdict) == ("bmc.watchdog", "WARN")
        assert blocked_one.text.startswith("blocked: not drilled on this board (powerguard drill --scope bmc-watchdog")
        here = Board.read(Device(674, 256, "1.72"))
        DrillFile(device.folder).store(replace(PASSED, board=here))
        found = await findings(options(socket), folder=device.folder)
        assert (found[1].verdict, found[1].text) == (
            "PASS", f"drilled on this board ({here.name}), and free: armed in an outage"
        )  # fmt: skip
        plain = options(socket).model_copy(update={"watchdog": False})
        assert len(await findings(plain, folder=device.folder)) == 1


# --- The file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"state": "fine"},
        {"in_s": "170"},
        {"armed_wall_s": float("inf")},
        {"boot_id": 7},
        {"board": {"manufacturer": 674}},
        {"board": {**{name: getattr(BOARD, name) for name in ("firmware", "name", "bios")}, "manufacturer": 1.5}},
        {"who": "somebody"},
    ],
)
def test_a_damaged_file_is_a_board_that_was_never_drilled(tmp_path: Path, change: dict[str, object]) -> None:
    """Whoever cut, changed or swapped it: nothing in it is believed, and what to do is said."""
    DrillFile(tmp_path).store(PASSED)
    path = tmp_path / FILE
    good = json.loads(path.read_bytes())
    assert DrillFile(tmp_path).load() == PASSED
    for bad in (json.dumps(good | change), json.dumps(good)[:-20], "", "[]", "\0" * 40, "[" * 20000):
        path.write_text(bad)
        with pytest.raises(Exception, match="no drill counts: remove it") as caught:
            DrillFile(tmp_path).load()
        assert type(caught.value).__name__ == "DrillFileError"


def test_the_file_is_replaced_as_a_whole_and_what_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """A half-written one lies beside it under another name; a folder that is gone is said."""
    drills = DrillFile(tmp_path)
    assert drills.load() is None
    (tmp_path / f".{FILE}.new").write_text("half")
    drills.store(PASSED)
    assert sorted(each.name for each in tmp_path.iterdir()) == [FILE]
    gone = DrillFile(tmp_path / "none")
    with pytest.raises(Exception, match="cannot be written: No such file"):
        gone.store(PASSED)
    assert gone.load() is None
