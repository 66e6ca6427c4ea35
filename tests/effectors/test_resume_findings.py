"""What doctor says before training has to start by itself: nothing would be started, or too early, or half a host."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from powerguard.effectors.child import Ended
from powerguard.effectors.host.findings import host, target
from powerguard.effectors.host.look import CheckedHost, Gpus, HostGpu, HostMemory, HostVerdict, HostView
from powerguard.effectors.options import ResumeOptions

TARGET = "powerguard-resume.target"


class Systemctl:
    """Answers `systemctl show` for units, as systemd 252 prints it: one block for each, properties in any order."""

    def __init__(self, **units: str | None) -> None:
        self.units = {name.replace("__", ".").replace("_", "-"): each for name, each in units.items()}

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        assert list(argv[:2]) == ["systemctl", "show"]
        assert limit_s <= 2.0
        asked = argv[list(argv).index("--") + 1 :]
        blocks = []
        for unit in asked:
            result = self.units.get(unit, "LoadState=not-found")
            if result is None:
                raise FileNotFoundError(2, "No such file or directory", "systemctl")
            blocks.append("\n".join([f"Id={unit}", *result.split(";")]))
        return Ended(returncode=0, stdout="\n\n".join(blocks).encode() + b"\n", stderr=b"")


LOADED = "LoadState=loaded"


@pytest.mark.parametrize(
    ("systemctl", "verdicts", "word"),
    [
        (Systemctl(powerguard_resume__target=None), ["WARN"], "cannot ask systemd"),
        (Systemctl(), ["FAIL"], "not-found: "),
        (Systemctl(powerguard_resume__target="LoadState=masked"), ["FAIL"], "masked"),
        (Systemctl(powerguard_resume__target=LOADED), ["FAIL"], "wants no unit"),
        (
            Systemctl(
                powerguard_resume__target=f"{LOADED};Wants=llm.service", llm__service=f"{LOADED};WantedBy={TARGET}"
            ),
            ["PASS"],
            f"{TARGET} starts llm.service",
        ),
        (
            Systemctl(powerguard_resume__target=f"{LOADED};Requires=llm.service"),
            ["FAIL"],
            "llm.service, which is not-found",
        ),
        (
            Systemctl(
                powerguard_resume__target=f"{LOADED};Wants=llm.service",
                llm__service=f"{LOADED};WantedBy={TARGET} multi-user.target",
            ),
            ["WARN"],
            "at boot and before the gate",
        ),
    ],
)
async def test_the_target(systemctl: Systemctl, verdicts: list[str], word: str) -> None:
    """A target that wants no unit starts nothing; a unit that something else wants, too, does not wait for the gate."""
    found = await target(ResumeOptions(), spawn=systemctl)
    assert [finding.verdict for finding in found] == verdicts
    assert word in found[-1].text
    assert all(finding.fix for finding in found if finding.verdict != "PASS")


async def test_another_unit_needs_a_rule_and_a_command_a_program() -> None:
    found = await target(ResumeOptions(target="train.service"), spawn=Systemctl(train__service=LOADED))
    assert ("polkit" in found[0].text, found[0].verdict, len(found)) == (True, "WARN", 1)
    assert (await target(ResumeOptions(command=["/bin/true"])))[0].verdict == "PASS"
    assert (await target(ResumeOptions(command=["/nowhere/x"])))[0].verdict == "FAIL"


@pytest.mark.root
async def test_a_command_that_root_alone_may_run_would_start_nothing(tmp_path: Path) -> None:
    """doctor is mostly run as root; the daemon is not."""
    program = tmp_path / "start-training"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    (found,) = await target(ResumeOptions(command=[str(program)]), user="nobody")
    assert (found.verdict, "user nobody may not run it" in found.text) == ("FAIL", True)
    assert (await target(ResumeOptions(command=["true"]), user="nobody"))[0].verdict == "PASS"


def looked(
    verdict: HostVerdict | None = None, before: HostMemory | None = None, gpus: Gpus | None = None
) -> CheckedHost:
    look = HostView(gpus=gpus or Gpus(because="no NVML"), places={})
    return CheckedHost(look=look, verdict=verdict or HostVerdict(), before=before or HostMemory())


KNOWN = HostMemory(gpus=(HostGpu(uuid="GPU-a", name="H100"),))


def test_a_host_as_it_is_remembered(tmp_path: Path) -> None:
    (found,) = host(looked(before=KNOWN, gpus=Gpus(there=KNOWN.gpus)), tmp_path)
    assert (found.verdict, found.text) == ("PASS", "as remembered: GPUs 1, folders of checkpoints 0")


def test_what_would_keep_training_waiting_is_a_failure_today(tmp_path: Path) -> None:
    verdict = HostVerdict(problems=("/nas: is on /",), notes=("llm: 1 newer ones",))
    found = host(looked(verdict, KNOWN), tmp_path)
    assert [(each.verdict, each.text) for each in found] == [
        ("FAIL", "/nas: is on /"),
        ("WARN", "llm: 1 newer ones"),
    ]


def test_what_is_not_remembered_cannot_be_missed(tmp_path: Path) -> None:
    (found,) = host(looked(), tmp_path)
    assert found.verdict == "WARN"
    (found,) = host(looked(), tmp_path / "absent")
    assert "no such folder" in found.text
    (tmp_path / "closed").write_text("nobody can look into it, root neither")
    (found,) = host(looked(), tmp_path / "closed")
    assert "cannot be read" in found.text


@pytest.mark.parametrize(
    ("state", "fix"),
    [
        ("not-found", "write /etc/systemd/system/llm.service and systemctl daemon-reload, or name the training unit: "),
        ("masked", "systemctl unmask llm.service, or name the training unit: powerguard install --resume-unit UNIT"),
        ("bad-setting", "systemctl status llm.service; correct it, then systemctl daemon-reload"),
    ],
)
async def test_what_would_be_right_of_a_unit_that_cannot_start(state: str, fix: str) -> None:
    """A unit that is not there cannot be disabled."""
    systemctl = Systemctl(powerguard_resume__target=f"{LOADED};Requires=llm.service", llm__service=f"LoadState={state}")
    (found,) = await target(ResumeOptions(), spawn=systemctl)
    assert (found.verdict, found.fix.startswith(fix)) == ("FAIL", True), found
