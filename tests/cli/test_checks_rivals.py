"""What doctor says of those who shut the host down or cut its UPS beside us: files as Debian's packages have them."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from powerguard.cli.doctor.rivals import findings
from powerguard.cli.imports.nut import nut_directive
from powerguard.effectors.child import Ended
from tests.golden import Golden

NUT_HOOK = "#!/bin/sh\nif /sbin/upsmon -K; then /sbin/upsdrvctl shutdown; fi\n"
APC_HOOK = "#!/bin/sh\n[ -f /etc/apcupsd/powerfail ] && /etc/apcupsd/apccontrol killpower\n"
FOLDER = "usr/lib/systemd/system-shutdown"


def units(*active: str) -> object:
    """Answer as systemctl does."""

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        del stdin, env
        assert limit_s <= 2.0
        blocks = [f"Id={unit}\nActiveState={'active' if unit in active else 'inactive'}\n" for unit in argv[3:]]
        return Ended(returncode=0, stdout="\n".join(blocks).encode(), stderr=b"", timed_out=False)

    return spawn


def put(root: Path, name: str, text: str, mode: int = 0o644) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


async def verdicts(root: Path, *active: str, armed: bool = True, cuts: bool = True) -> list[tuple[str, str]]:
    found = await findings(armed=armed, cuts=cuts, spawn=units(*active), root=root)  # type: ignore[arg-type]
    assert all(each.fix or each.verdict == "PASS" for each in found)
    return [(each.name, each.verdict) for each in found]


NO_RIVAL = [("rivals", "PASS")]
HOOK = "/usr/lib/powerguard/nut/powerguard-shutdown"


async def test_installed_and_not_running_is_no_rival(tmp_path: Path) -> None:
    """The packages bring their hooks along; without their daemons nothing ever sets the hooks off."""
    put(tmp_path, f"{FOLDER}/nutshutdown", NUT_HOOK, 0o755)
    put(tmp_path, f"{FOLDER}/apcupsd_shutdown", APC_HOOK, 0o755)
    put(tmp_path, f"{FOLDER}/mdadm.shutdown", "#!/bin/sh\nmdadm --wait-clean\n", 0o755)
    put(tmp_path, f"{FOLDER}/powerguard", "#!/bin/sh\n# never upsdrvctl or killpower\n", 0o755)
    put(tmp_path, "etc/nut/upsmon.conf", 'SHUTDOWNCMD "/sbin/shutdown -h +0"\nPOWERDOWNFLAG /etc/killpower\n')
    assert await verdicts(tmp_path) == NO_RIVAL


@pytest.mark.parametrize(
    ("conf", "armed", "expected"),
    [
        ('SHUTDOWNCMD "/sbin/shutdown -h +0"\n', True, [("rivals.upsmon", "FAIL")]),
        ('SHUTDOWNCMD "/sbin/shutdown -h +0"\n', False, [("rivals.upsmon", "WARN")]),
        ('SHUTDOWNCMD "/usr/lib/powerguard/nut/powerguard-shutdown /sbin/shutdown -h +0"\n', True, NO_RIVAL),
        (f'SHUTDOWNCMD "{HOOK} /sbin/stop-vms; /sbin/shutdown -h +0"\n', True, [("rivals.upsmon", "FAIL")]),
        (f'SHUTDOWNCMD "{HOOK} /sbin/stop-vms && /sbin/shutdown -h +0"\n', True, [("rivals.upsmon", "FAIL")]),
        (f'SHUTDOWNCMD "{HOOK} /sbin/shutdown -h +0 || /sbin/poweroff"\n', True, NO_RIVAL),
        (f"SHUTDOWNCMD \"logger FSD; {HOOK} sh -c '/sbin/stop-vms; /sbin/shutdown -h +0' 2>&1\"\n", True, NO_RIVAL),
        ('# SHUTDOWNCMD "x"\n', True, NO_RIVAL),
        ('SHUTDOWNCMD "/sbin/shutdown \\\n -h +0"\n', True, [("rivals.upsmon", "FAIL")]),
        ('SHUTDOWNCMD "/sbin/shutdown -h +0\n', True, [("rivals.upsmon", "FAIL")]),
        (None, True, [("rivals.upsmon", "WARN")]),
    ],
)
async def test_upsmon(tmp_path: Path, conf: str | None, expected: list[tuple[str, str]], *, armed: bool) -> None:
    if conf is not None:
        put(tmp_path, "etc/nut/upsmon.conf", conf)
    assert await verdicts(tmp_path, "nut-monitor.service", armed=armed) == expected


@pytest.mark.parametrize(
    "old", ["/sbin/shutdown -h +0", r"logger down; sh -c \"sync && poweroff\"", "echo 'it goes' | wall && poweroff"]
)
async def test_the_line_that_doctor_advises_makes_it_no_rival(tmp_path: Path, old: str) -> None:
    """And runs the old command as it is where powerguard does not own the shutdown."""
    put(tmp_path, "etc/nut/upsmon.conf", f'SHUTDOWNCMD "{old}"\n')
    spawn = units("nut-monitor.service")
    (found,) = await findings(armed=True, cuts=False, spawn=spawn, root=tmp_path)  # type: ignore[arg-type]
    line = found.fix.removeprefix("write ").partition(", or: ")[0]
    put(tmp_path, "etc/nut/upsmon.conf", f"{line}\n")
    assert await verdicts(tmp_path, "nut-monitor.service") == NO_RIVAL
    (new,) = nut_directive(f"{line}\n", "SHUTDOWNCMD")
    words = shlex.split(new.partition("/powerguard-shutdown")[2])
    (before,) = nut_directive(f'SHUTDOWNCMD "{old}"\n', "SHUTDOWNCMD")
    assert words in (["/bin/sh", "-c", before], shlex.split(before))


@pytest.mark.parametrize("folder", ["etc/nut", "etc/ups", "usr/local/ups/etc"])
async def test_upsmon_is_read_where_its_package_keeps_its_settings(tmp_path: Path, folder: str) -> None:
    """Debian's folder, that of Red Hat and SUSE, and that of NUT's own sources."""
    put(tmp_path, f"{FOLDER}/nutshutdown", NUT_HOOK, 0o755)
    put(tmp_path, f"{folder}/upsmon.conf", 'SHUTDOWNCMD "/sbin/shutdown -h +0"\n')
    assert await verdicts(tmp_path, "nut-monitor.service") == [("rivals.upsmon", "FAIL")]


@pytest.mark.parametrize(
    ("flag", "left", "active", "cuts", "expected"),
    [
        ("POWERDOWNFLAG /etc/killpower\n", False, True, True, [("rivals.hook", "FAIL")]),
        ("POWERDOWNFLAG /etc/killpower\n", False, True, False, [("rivals.hook", "WARN")]),
        ("", False, True, True, NO_RIVAL),
        ("POWERDOWNFLAG /etc/killpower\n", True, False, True, [("rivals.hook", "FAIL")]),
    ],
)
async def test_nuts_hook(
    tmp_path: Path, flag: str, expected: list[tuple[str, str]], *, left: bool, active: bool, cuts: bool
) -> None:
    """Its flag makes it act: one that upsmon would leave, or one that was left on disk years ago."""
    put(tmp_path, f"{FOLDER}/nutshutdown", NUT_HOOK, 0o755)
    put(tmp_path, "etc/nut/upsmon.conf", flag)
    if left:
        put(tmp_path, "etc/killpower", "upsmon-shutdown-file")
    assert await verdicts(tmp_path, *(("nut-client.service",) if active else ()), cuts=cuts) == expected


async def test_a_hook_that_is_not_executable_is_off(tmp_path: Path) -> None:
    put(tmp_path, f"{FOLDER}/nutshutdown", NUT_HOOK)
    put(tmp_path, "etc/nut/upsmon.conf", "POWERDOWNFLAG /etc/killpower\n")
    assert await verdicts(tmp_path, "nut-monitor.service") == NO_RIVAL


async def test_apcupsd(tmp_path: Path, golden: Golden) -> None:
    """Its daemon, its KILLDELAY and its hook; and nothing of the first where our apccontrol has its place."""
    put(tmp_path, f"{FOLDER}/apcupsd_shutdown", APC_HOOK, 0o755)
    put(tmp_path, "etc/apcupsd/apccontrol", "#!/bin/sh\nshutdown -h now\n")
    put(tmp_path, "etc/apcupsd/apcupsd.conf", "## apcupsd.conf v1.1 ##\nKILLDELAY 20\nPWRFAILDIR /var/run/apc\n")
    assert await verdicts(tmp_path, "apcupsd.service") == [
        ("rivals.apcupsd", "FAIL"),
        ("rivals.apcupsd", "FAIL"),
        ("rivals.hook", "FAIL"),
    ]
    put(tmp_path, "etc/apcupsd/apccontrol", "#!/bin/sh\n# apccontrol for hosts where powerguard decides\n")
    put(tmp_path, "etc/apcupsd/apcupsd.conf", "KILLDELAY 0\n")
    assert await verdicts(tmp_path, "apcupsd.service") == [("rivals.hook", "FAIL")]
    put(tmp_path, "etc/apcupsd/powerfail", "")
    found = await findings(armed=True, cuts=True, spawn=units(), root=tmp_path)  # type: ignore[arg-type]
    golden("doctor", found[0].text)
    assert found[0].fix == f"rm {tmp_path}/etc/apcupsd/powerfail"


async def test_an_apcupsd_whose_own_apccontrol_asks_us(tmp_path: Path) -> None:
    """Our script under the name of the event is the first way of the guide; apccontrol runs it only if it may."""
    put(tmp_path, "etc/apcupsd/apccontrol", "#!/bin/sh\nshutdown -h now\n", 0o755)
    ours = put(tmp_path, "usr/lib/powerguard/apcupsd/powerguard-event", "#!/bin/sh\n# asks powerguard\n", 0o755)
    (tmp_path / "etc/apcupsd/doshutdown").symlink_to(ours)
    assert await verdicts(tmp_path, "apcupsd.service") == NO_RIVAL
    ours.chmod(0o644)
    assert await verdicts(tmp_path, "apcupsd.service") == [("rivals.apcupsd", "FAIL")]


async def test_systemd_that_cannot_be_asked_and_files_that_are_none(tmp_path: Path) -> None:
    """In a container, or as somebody who may read nothing: no traceback, and no rival that is only guessed."""

    async def spawn(argv: Sequence[str], **_: object) -> Ended:
        raise FileNotFoundError(2, "No such file or directory", argv[0])

    (tmp_path / "etc/nut/upsmon.conf").mkdir(parents=True)
    os.mkfifo(tmp_path / "etc/killpower")
    put(tmp_path, f"{FOLDER}/binary", "\0\xff upsdrvctl", 0o755)
    found = await findings(armed=True, cuts=True, spawn=spawn, root=tmp_path)
    assert [(each.name, each.verdict) for each in found] == [("rivals", "WARN"), ("rivals.hook", "FAIL")]


@pytest.mark.parametrize(
    ("mode", "folder", "cuts", "verdicts"),
    [
        (0o755, 0o755, False, ["PASS"]),
        (0o700, 0o755, True, ["PASS", "WARN"]),
        (0o775, 0o755, False, ["FAIL"]),
        (0o755, 0o777, False, ["FAIL"]),
        (0o644, 0o755, False, ["FAIL"]),
        (0o4755, 0o755, False, ["FAIL"]),
    ],
)
async def test_the_sites_own_program(
    tmp_path: Path, mode: int, folder: int, verdicts: list[str], *, cuts: bool
) -> None:
    """As the last step of a power-off will look at it: what it would not run must not be counted on."""
    if os.geteuid() != 0:
        pytest.skip("the program must be root's: run as root")
    program = put(tmp_path, "etc/powerguard/output-off", "#!/bin/sh\n", mode)
    program.parent.chmod(folder)
    found = await findings(armed=True, cuts=cuts, spawn=units(), root=tmp_path)  # type: ignore[arg-type]
    assert [each.verdict for each in found if each.name == "power_on.local_output"] == verdicts
