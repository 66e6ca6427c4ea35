"""What doctor says of GPU power: each finding from a real helper with GPUs of ours, and never an exception."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from powerguard.effectors.child import Ended
from powerguard.effectors.gpu.effector import findings
from powerguard.effectors.host.findings import Finding
from powerguard.effectors.options import GpuOptions
from tests.golden import Golden
from tests.peers.nvml import Gpus


class Systemctl:
    """Answers as systemctl would, or not at all."""

    def __init__(self, said: str | None = "LoadState=loaded\nActiveState=active\n") -> None:
        self._said = said

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        assert tuple(argv[:3]) == ("systemctl", "show", "powerguard-gpu-watch.path")
        assert limit_s <= 2.0
        if self._said is None:
            raise FileNotFoundError(2, "No such file or directory", argv[0])
        return Ended(returncode=0, stdout=self._said.encode(), stderr=b"")


async def found(path: Path, systemctl: Systemctl | None = None, cap_share: float = 0.6) -> dict[str, Finding]:
    options = GpuOptions(kind="nvml", socket=str(path), cap_share=cap_share)
    result = await findings(options, spawn=systemctl or Systemctl(), limit_s=60.0)
    assert all(finding.fix for finding in result if finding.verdict != "PASS")
    return {finding.name: finding for finding in result}


async def test_gpus_that_are_left_alone_are_not_looked_at() -> None:
    assert await findings(GpuOptions(), spawn=Systemctl(None)) == []


async def test_a_helper_that_is_not_there_is_a_failure_with_its_cure(tmp_path: Path, golden: Golden) -> None:
    answer = await found(tmp_path / "gpu.sock")
    assert answer["gpu"].verdict == "FAIL"
    golden("doctor", f"{answer['gpu'].text} -> {answer['gpu'].fix}")


@pytest.mark.root
@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_all_is_well(gpus: Gpus, golden: Golden) -> None:
    with gpus.listening() as path:
        answer = await found(path)
    assert {name: finding.verdict for name, finding in answer.items()} == {"gpu": "PASS", "gpu.watch": "PASS"}
    assert {"1400 W", "840 W"} == set(re.findall(r"\d+ W", answer["gpu"].text))
    golden("doctor", "\n".join(f"{name}: {finding.text}" for name, finding in answer.items()))
    assert (gpus.calls("DeviceSetPowerManagementLimit"), gpus.watts()) == ([], [700, 700])


@pytest.mark.root
@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_what_reduces_the_gain_is_reported(gpus: Gpus, golden: Golden) -> None:
    """Persistence mode off, a least limit above the share, a GPU that fell off the bus, limits that are lowered now."""
    gpus.ask("cap", 0.9)
    gpus.put(0, "persistence", 0)
    gpus.put(0, "min_mw", 500_000)
    gpus.fail("DeviceGetHandleByIndex", 15, 1)
    with gpus.listening() as path:
        answer = await found(path, cap_share=0.3)
    assert {name: finding.verdict for name, finding in answer.items()} == {
        "gpu": "WARN",
        "gpu.persistence": "WARN",
        "gpu.least": "WARN",
        "gpu.capped": "WARN",
        "gpu.watch": "PASS",
    }
    assert {"630 W", "500 W"} <= set(re.findall(r"\d+ W", answer["gpu"].text))
    golden("doctor", "\n".join(f"{name}: {finding.text} -> {finding.fix}" for name, finding in answer.items()))


@pytest.mark.root
@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_a_cap_that_would_change_nothing_is_reported(gpus: Gpus) -> None:
    for index in (0, 1):
        gpus.put(index, "limit_mw", 200_000)
    with gpus.listening() as path:
        answer = await found(path)
    assert answer["gpu"].verdict == "WARN"


@pytest.mark.peer("cc", "systemd-socket-activate")
@pytest.mark.parametrize(
    ("function", "code", "words"),
    [("InitWithFlags", 9, "modprobe nvidia"), ("DeviceGetPowerManagementLimitConstraints", 3, "no power limit")],
)
async def test_gpus_that_cannot_be_capped_are_a_failure(gpus: Gpus, function: str, code: int, words: str) -> None:
    gpus.fail(function, code)
    for index in (0, 1):
        gpus.fail(function, code, index)
    with gpus.listening() as path:
        answer = await found(path)
    assert (answer["gpu"].verdict, words in answer["gpu"].text) == ("FAIL", True)


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_a_host_without_gpus_is_a_failure(tmp_path: Path, golden: Golden) -> None:
    gpus = Gpus(tmp_path, count=0)
    with gpus.listening() as path:
        answer = await found(path)
    assert answer["gpu"].verdict == "FAIL"
    golden("doctor", f"{answer['gpu'].text} -> {answer['gpu'].fix}")
    gpus.close()


@pytest.mark.peer("cc", "systemd-socket-activate")
@pytest.mark.parametrize(
    ("said", "verdict", "words"),
    [
        ("LoadState=not-found\nActiveState=inactive\n", "FAIL", "is not-found and inactive"),
        ("LoadState=loaded\nActiveState=failed\n", "FAIL", "limits would stay lowered"),
        ("", "WARN", "cannot ask systemd"),
        (None, "WARN", "cannot ask systemd"),
    ],
)
async def test_a_watch_that_does_not_watch_is_found(gpus: Gpus, said: str | None, verdict: str, words: str) -> None:
    with gpus.listening() as path:
        answer = await found(path, Systemctl(said))
    assert (answer["gpu.watch"].verdict, words in answer["gpu.watch"].text) == (verdict, True)
