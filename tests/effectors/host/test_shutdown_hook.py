"""The last step of a shutdown, `systemd/powerguard-shutdown`: it obeys an order of this boot, and nothing else.

Run by /bin/sh with our own small tools before the real ones; without them it does nothing (POWERGUARD_UNDER_TEST).
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from powerguard.clock import boot_id

HOOK = Path(__file__).parents[3] / "systemd" / "powerguard-shutdown"
REBOOT = ["systemctl reboot --force --force", "sysrq b"]
TOOL = '#!/bin/sh\necho "${0##*/} $*" >>"${0%/*}/calls"\n'
SLEEP = '#!/bin/sh\nuntil [ -s "${0%/*}/calls" ]; do :; done\n'  # long enough for what was started before it
OTHER = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of orders, with the tools in it."""
    with TemporaryDirectory(prefix="pg last ", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for tool, script in (("systemctl", TOOL), ("sysrq", TOOL), ("sleep", SLEEP)):
            (folder / tool).write_text(script, encoding="ascii")
            (folder / tool).chmod(0o755)
        yield folder


def order(folder: Path, text: str, name: str = "reboot") -> Path:
    """Leave an order as powerguard-off does."""
    path = folder / name
    path.write_text(text, encoding="ascii")
    path.chmod(0o600)
    return path


def run(folder: Path, *argv: str) -> list[str]:
    """Run the hook as systemd-shutdown does, and return what it called."""
    environment = {"POWERGUARD_UNDER_TEST": "1", "POWERGUARD_OFF_TOOLS": str(folder)}
    ended = subprocess.run(["/bin/sh", HOOK, *argv], env=environment, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    calls = folder / "calls"
    return calls.read_text(encoding="ascii").splitlines() if calls.exists() else []


def test_an_order_of_this_boot_makes_it_a_reboot(folder: Path) -> None:
    """By systemctl, and by the kernel's own key where that has not done it at once."""
    order(folder, f"{boot_id()}\n")
    assert run(folder, "poweroff") == REBOOT


@pytest.mark.parametrize("argv", [("reboot",), ("halt",), ("kexec",), ("POWEROFF",), ("",), ()])
def test_only_a_power_off_is_turned_round(folder: Path, argv: tuple[str, ...]) -> None:
    """What reboots anyway, and what a person wanted halted, goes its way."""
    order(folder, f"{boot_id()}\n")
    assert run(folder, *argv) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"{boot_id()}",
        f"{boot_id()[:20]}\n",
        f"{OTHER}\n",
        f"{boot_id()}\n\n",
        f" {boot_id()}",
        f"{boot_id()}\n{boot_id()}\n",
        '$(touch "$folder/calls")\n',
        "given=x;boot=x # is 37 characters ..\n",
    ],
)
def test_what_was_not_written_whole_in_this_boot_is_no_order(folder: Path, text: str) -> None:
    """Half-written, another boot's, or somebody's idea of a script: the host is powered off as was ordered."""
    order(folder, text)
    assert run(folder, "poweroff") == []


def no_order(path: Path) -> None:
    path.unlink()


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o600)


def another_mode(path: Path) -> None:
    path.chmod(0o622)


def a_folder_for_all(path: Path) -> None:
    path.parent.chmod(0o1777)


@pytest.mark.parametrize("planted", [no_order, a_link, a_fifo, a_folder, another_mode, a_folder_for_all])
def test_what_powerguard_off_would_not_have_made_is_no_order(folder: Path, planted: Callable[[Path], None]) -> None:
    """The right words in the wrong place are somebody else's."""
    planted(order(folder, f"{boot_id()}\n"))
    assert run(folder, "poweroff") == []


@pytest.mark.root
@pytest.mark.parametrize("which", ["reboot", "."])
def test_an_order_or_a_folder_of_another_user_is_none(folder: Path, which: str) -> None:
    order(folder, f"{boot_id()}\n")
    os.chown(folder / which, 65534, 65534)
    assert run(folder, "poweroff") == []


# --- The local UPS --------------------------------------------------------------------------------------------------

CUTS = '#!/bin/sh\necho "cut $# $(id -u)" >>"${0%/*}/calls"\n'


def site_program(folder: Path, text: str = CUTS, mode: int = 0o755) -> Path:
    """Put the site's program where it belongs."""
    path = folder / "output-off"
    path.write_text(text, encoding="ascii")
    path.chmod(mode)
    return path


def ours(folder: Path) -> None:
    """Leave the order that powerguard-off leaves with `off`."""
    order(folder, f"{boot_id()}\n", "off")


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o555, 0o750])
def test_the_local_ups_is_ordered_at_the_end_of_our_power_off(folder: Path, mode: int) -> None:
    """Once, without arguments, and then the host goes off as it was."""
    ours(folder)
    site_program(folder, mode=mode)
    assert run(folder, "poweroff") == [f"cut 0 {os.getuid()}"]


def test_a_reboot_leaves_the_local_ups_alone(folder: Path) -> None:
    """Utility is back and the host reboots: cutting its power then would be the second outage."""
    ours(folder)
    order(folder, f"{boot_id()}\n")
    site_program(folder)
    assert run(folder, "poweroff") == REBOOT


@pytest.mark.parametrize("argv", [("reboot",), ("halt",), ("kexec",), ()])
def test_the_local_ups_is_ordered_on_a_power_off_only(folder: Path, argv: tuple[str, ...]) -> None:
    ours(folder)
    site_program(folder)
    assert run(folder, *argv) == []


@pytest.mark.parametrize("text", [None, "", f"{boot_id()}", f"{OTHER}\n", "$(reboot)"])
def test_the_local_ups_is_ordered_in_no_power_off_but_ours(folder: Path, text: str | None) -> None:
    """A person's, another boot's flag, or a half-written one: the neighbours on that UPS keep their power."""
    if text is not None:
        order(folder, text, "off")
    site_program(folder)
    assert run(folder, "poweroff") == []


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o644, 0o4755, 0o722])
def test_a_program_that_others_could_have_written_is_not_run(folder: Path, mode: int) -> None:
    ours(folder)
    site_program(folder, mode=mode)
    assert run(folder, "poweroff") == []


def test_a_linked_program_or_none_is_not_run(folder: Path) -> None:
    ours(folder)
    assert run(folder, "poweroff") == []
    real = site_program(folder)
    real.rename(folder / "elsewhere")
    real.symlink_to(folder / "elsewhere")
    assert run(folder, "poweroff") == []
    real.unlink()
    real.mkdir()
    assert run(folder, "poweroff") == []


@pytest.mark.parametrize("rest", ["exit 3\n", "exec /no/such/program\n", "trap '' TERM HUP INT; while :; do :; done\n"])
def test_a_program_that_fails_or_hangs_holds_nothing_up(folder: Path, rest: str) -> None:
    """The limit is 20 s; here its sleep ends as soon as the program has begun."""
    ours(folder)
    site_program(folder, CUTS + rest)
    assert run(folder, "poweroff") == [f"cut 0 {os.getuid()}"]


def test_under_test_it_does_nothing_for_real() -> None:
    """Whatever lies in the folder of the machine that the tests run on."""
    environment = {"POWERGUARD_UNDER_TEST": "1"}
    traced = subprocess.run(
        ["/bin/sh", "-x", HOOK, "poweroff"], env=environment, capture_output=True, timeout=60, check=False
    )
    assert traced.returncode == 0
    assert traced.stderr.splitlines()[-1] == b"+ exit 0"
    assert b"ordered" not in traced.stderr
