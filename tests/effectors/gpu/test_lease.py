"""Whatever happens to powerguard-gpu and to the daemon, the limits that it found come back: killed, and unasked."""

import subprocess
import time
from pathlib import Path

import pytest

from powerguard.effectors.gpu.helper import LEASE_S, RETRY_S, GpuFolder, KeptLimit, KeptLimits
from tests.peers.nvml import Gpus, did

SET = "DeviceSetPowerManagementLimit"

pytestmark = pytest.mark.peer("cc")


def calls(gpus: Gpus) -> int:
    path = gpus.world / "calls"
    return path.read_bytes().count(b"\n") if path.exists() else 0


# --- It is killed ---------------------------------------------------------------------------------------------------


def test_killed_between_the_file_and_the_first_limit(gpus: Gpus) -> None:
    with gpus.hanging(SET, 0), gpus.hanging(SET, 1):
        gpus.kill_when(lambda: len(gpus.calls(SET)) == 2, "cap", 0.6)
    assert (gpus.limits.exists(), gpus.watts()) == (True, [700, 700])
    assert gpus.ask("restore")["ok"]
    assert (gpus.watts(), gpus.limits.exists()) == ([700, 700], False)


def test_killed_between_two_gpus(gpus: Gpus) -> None:
    with gpus.hanging(SET, 1):
        gpus.kill_when(lambda: gpus.watts()[0] == 420 and len(gpus.calls(SET)) == 2, "cap", 0.6)
    assert gpus.watts() == [420, 700]
    assert did(gpus.ask("restore")) == ["restored", "kept"]
    assert (gpus.watts(), gpus.limits.exists()) == ([700, 700], False)


def test_killed_between_two_gpus_and_capped_again(gpus: Gpus) -> None:
    """The second cap must not take the first one's limit for what was found."""
    with gpus.hanging(SET, 1):
        gpus.kill_when(lambda: gpus.watts()[0] == 420 and len(gpus.calls(SET)) == 2, "cap", 0.6)
    assert did(gpus.ask("cap", 0.6)) == ["kept", "capped"]
    assert gpus.ask("restore")["ok"]
    assert gpus.watts() == [700, 700]


def test_killed_while_it_restores(gpus: Gpus) -> None:
    gpus.ask("cap", 0.6)
    with gpus.hanging(SET, 1):
        gpus.kill_when(lambda: gpus.watts()[0] == 700 and len(gpus.calls(SET)) == 4, "restore")
    assert gpus.watts() == [700, 420]
    assert did(gpus.ask("restore")) == ["kept", "restored"]
    assert (gpus.watts(), gpus.limits.exists()) == ([700, 700], False)


def killed_at(gpus: Gpus, call: int, word: str, share: float | None = None) -> bool:
    """Kill a helper at its n-th call of NVML. False when it makes fewer."""
    before = calls(gpus)
    process = gpus.start(word, *([] if share is None else [str(share)]))
    while process.poll() is None and calls(gpus) - before < call:
        time.sleep(0.001)
    process.kill()
    process.wait(timeout=30)
    return calls(gpus) - before >= call


def test_killed_at_every_few_calls_nothing_is_ever_forgotten(tmp_path: Path) -> None:
    """Cap, killed; cap again with another share, killed; restore, killed; restore: all is as it was found."""
    gpus = Gpus(tmp_path, count=1)
    (gpus.world / "slow_us").write_text("4000\n")
    for call in (1, 5, 9, 12, 13, 14):
        killed_at(gpus, call, "cap", 0.7)
        killed_at(gpus, 15 - call, "cap", 0.6)
        killed_at(gpus, call, "restore")
        assert gpus.ask("restore")["ok"], call
        assert (gpus.watts(), gpus.limits.exists()) == ([700], False), call
    gpus.close()


@pytest.mark.slow
def test_killed_at_every_call(tmp_path: Path) -> None:
    """The whole of the test above: every pair of calls, and two GPUs."""
    gpus = Gpus(tmp_path)
    (gpus.world / "slow_us").write_text("2000\n")
    for first in range(1, 30, 2):
        for second in range(1, 30, 3):
            killed_at(gpus, first, "cap", 0.7)
            killed_at(gpus, second, "cap", 0.6)
            killed_at(gpus, first, "restore")
            assert gpus.ask("restore")["ok"], (first, second)
            assert (gpus.watts(), gpus.limits.exists()) == ([700, 700], False), (first, second)
    gpus.close()


# --- Nobody asks any more -------------------------------------------------------------------------------------------


def test_the_watch_ends_where_nothing_is_capped(gpus: Gpus) -> None:
    process = gpus.start("watch")
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 0


def test_the_watch_restores_once_the_daemon_is_silent(gpus: Gpus) -> None:
    """A daemon that died, was taken off, or has lost its journal asks for nothing; and yet the limits come back."""
    gpus.ask("cap", 0.6)
    process = gpus.start("watch", "--lease-s", "0.3")
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"0.3 s: restoring the limits" in log
    assert (gpus.watts(), gpus.limits.exists()) == ([700, 700], False)


def test_a_daemon_that_holds_keeps_its_cap(gpus: Gpus) -> None:
    """Also a daemon that was restarted in between: a hold is all that counts."""
    gpus.ask("cap", 0.6)
    folder = GpuFolder(gpus.folder)
    kept = folder.read()
    assert kept is not None
    folder.write(KeptLimits(capped_s=0.0, ordered_s=kept.ordered_s, gpus=kept.gpus))
    assert gpus.ask("hold") == {"schema_version": 1, "word": "hold", "ok": True, "capped": 2}
    process = gpus.start("watch", "--lease-s", "20")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    assert gpus.watts() == [420, 420]
    assert gpus.ask("restore")["ok"]
    assert process.wait(timeout=60) == 0


def test_what_a_restore_left_undone_the_watch_does_however_much_is_held(gpus: Gpus) -> None:
    """A failed restore is an order: no later hold takes it back, only a new cap does."""
    gpus.ask("cap", 0.6)
    gpus.fail(SET, 999, 1)
    assert not gpus.ask("restore")["ok"]
    gpus.ask("hold")
    folder = GpuFolder(gpus.folder)
    kept = folder.read()
    assert kept is not None
    assert kept.due_s(folder.held_s(), LEASE_S) == kept.ordered_s + RETRY_S[0]
    gpus.fail(SET, 0, 1)
    folder.write(KeptLimits(capped_s=kept.capped_s, ordered_s=kept.ordered_s - RETRY_S[0], gpus=kept.gpus))
    assert gpus.start("watch").wait(timeout=60) == 0
    assert (gpus.watts(), gpus.limits.exists()) == ([700, 700], False)


def test_a_watch_that_fails_is_in_no_hurry_and_never_gives_up() -> None:
    def due_s(ordered_s: float = 0.0, tries: int = 0, tried_s: float = 0.0) -> float:
        limits = KeptLimits(capped_s=100.0, ordered_s=ordered_s, tries=tries, tried_s=tried_s)
        return limits.due_s(held_s=150.0, lease_s=LEASE_S)

    assert due_s() == 150.0 + LEASE_S
    assert due_s(ordered_s=200.0) == 215.0
    assert due_s(ordered_s=200.0, tries=1, tried_s=215.0) == 245.0
    assert due_s(ordered_s=200.0, tries=99, tried_s=9000.0) == 9600.0


def test_the_file_has_what_was_reported(tmp_path: Path) -> None:
    folder = GpuFolder(tmp_path)
    kept = KeptLimit(uuid="GPU-1", index=3, name="H100", found_mw=700_000, set_mw=(420_000, 350_000), gone=True)
    limits = KeptLimits(capped_s=1.5, ordered_s=2.5, tries=3, tried_s=4.5, gpus=(kept,))
    assert folder.read() is None
    folder.write(limits)
    assert folder.read() == limits
    assert sorted(path.name for path in tmp_path.iterdir()) == ["limits.json"]
    folder.forget()
    folder.forget()
    assert folder.read() is None
