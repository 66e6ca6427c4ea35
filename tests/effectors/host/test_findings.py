"""What doctor says of the host: each finding from what the real programs print, and never an exception."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from powerguard.effectors.child import Ended
from powerguard.effectors.host.findings import Finding, findings, seconds
from powerguard.effectors.options import HostOptions

# As systemd 252 prints it.
UNITS = """TimeoutStopUSec=1min 30s
KillMode=control-group
Id=ssh.service

TimeoutStopUSec=5min
KillMode=mixed
Id=postgresql.service

TimeoutStopUSec=infinity
KillMode=process
Id=slurmd.service
"""

HELPER = 'LoadState=loaded\nEnvironment=LC_ALL=C "POWERGUARD_OFF_KILL=slurmd.service containerd.service"\n'


class Programs:
    """Answers as busctl and systemctl would, or not at all."""

    def __init__(
        self,
        delay: str | None = "t 5000000\n",
        units: str | None = UNITS,
        helper: str | None = HELPER,
        locks: str | None = None,
        apt: str | None = None,
    ) -> None:
        self._said = {
            "busctl": delay,
            "systemctl": units,
            "powerguard-off.service": helper,
            "ListInhibitors": locks,
            "apt-config": apt,
        }

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        said = self._said[next((word for word in reversed(argv) if word in self._said), argv[0])]
        assert limit_s <= 2.0
        if said is None:
            raise FileNotFoundError(2, "No such file or directory", argv[0])
        return Ended(returncode=0, stdout=said.encode(), stderr=b"", timed_out=said == "hangs")


async def found(options: HostOptions, programs: Programs | None = None) -> dict[str, Finding]:
    result = await findings(options, spawn=programs or Programs())
    return {finding.name: finding for finding in result}


async def test_units_that_stop_too_slowly_are_named() -> None:
    """Beyond force_after_s they are killed; better to know beforehand."""
    answer = await found(HostOptions(force_after_s=110))
    assert answer["host.stop"].verdict == "WARN"
    assert "postgresql.service, slurmd.service" in answer["host.stop"].text
    assert "ssh.service" not in answer["host.stop"].text
    assert answer["host.kill_mode"].verdict == "PASS", "it is named in POWERGUARD_OFF_KILL"
    assert "slurmd.service" in answer["host.kill_mode"].text


@pytest.mark.parametrize(
    ("kind", "helper", "verdict"),
    [
        ("systemd", HELPER, "PASS"),
        ("systemd", HELPER.replace("slurmd", "site-agent"), "WARN"),
        ("systemd", HELPER.replace('"', "", 1), "WARN"),
        ("systemd", None, "WARN"),
        ("command", HELPER, "WARN"),
    ],
)
async def test_what_a_unit_leaves_behind_must_be_somebodys_to_kill(kind: str, helper: str | None, verdict: str) -> None:
    """Named for powerguard-off, it ends at the deadline; else systemd waits for it at the very end."""
    command = ["/bin/true"] if kind == "command" else []
    options = HostOptions.model_validate({"kind": kind, "command": command})
    answer = (await found(options, Programs(helper=helper)))["host.kill_mode"]
    assert answer.verdict == verdict
    assert "slurmd.service" in answer.text
    assert ("POWERGUARD_OFF_KILL" in answer.fix) == (verdict == "WARN")


# As busctl 252 prints them: what, who, why, mode, uid, pid.
LOCKS = (
    '{"type":"a(ssssuu)","data":[[["shutdown:sleep","kubelet","Kubelet needs time","delay",0,900],'
    '["shutdown","Unattended Upgrades Shutdown","Stop ongoing upgrades","delay",0,700],'
    '["sleep","upsd","no","delay",0,1],["handle-lid-switch:shutdown","dpkg","busy","block",0,2]]]}\n'
)


async def test_who_holds_shutdowns_up_is_named() -> None:
    """A lock that delays, for a shutdown, by name; not one that is for sleep or that blocks."""
    answer = await found(HostOptions(), Programs(locks=LOCKS))
    assert "held now by Unattended Upgrades Shutdown, kubelet)" in answer["host.inhibitors"].text
    assert answer["host.kubelet"].verdict == "WARN"
    assert "host.kubelet" not in await found(HostOptions(kind="command", command=["/bin/true"]), Programs(locks=LOCKS))


@pytest.mark.parametrize(
    "locks",
    [
        None,
        "",
        "hangs",
        "[]",
        "{}",
        '{"data":[]}',
        '{"data":[[["shutdown"]]]}',
        '{"data":[[1]]}',
        '{"data":' + "[" * 9000,
    ],
)
async def test_locks_that_cannot_be_read_are_none(locks: str | None) -> None:
    answer = await found(HostOptions(), Programs(locks=locks))
    assert "held now" not in answer["host.inhibitors"].text
    assert "host.kubelet" not in answer


UPGRADES = "TimeoutStopUSec=30min\nKillMode=process\nId=unattended-upgrades.service\n"


@pytest.mark.parametrize(
    ("units", "apt", "verdict", "fix"),
    [
        (UPGRADES, 'APT::Architecture "amd64";\n', "PASS", ""),
        (UPGRADES, None, "PASS", ""),
        (UPGRADES, 'Unattended-Upgrade::InstallOnShutdown "true";\n', "WARN", "InstallOnShutdown"),
        (UPGRADES, 'Unattended-Upgrade::MinimalSteps "false";\n', "WARN", "MinimalSteps"),
        (UNITS, 'Unattended-Upgrade::MinimalSteps "false";\n', None, ""),
    ],
)
async def test_updates_that_a_deadline_would_cut(units: str, apt: str | None, verdict: str | None, fix: str) -> None:
    """Where it runs; dpkg that is killed in the middle of its work leaves a host that may not boot."""
    answer = (await found(HostOptions(), Programs(units=units, apt=apt))).get("host.upgrades")
    assert (None if answer is None else answer.verdict) == verdict
    assert answer is None or fix in answer.fix


async def test_the_last_step_must_be_there(tmp_path: Path) -> None:
    """Without it the word `reboot` is heard, and the host stays off all the same."""
    path = tmp_path / "powerguard"
    for mode, verdict in ((None, "WARN"), (0o644, "WARN"), (0o755, "PASS")):
        if mode is not None:
            path.write_text("", encoding="ascii")
            path.chmod(mode)
        result = await findings(HostOptions(), spawn=Programs(), last_step=str(path))
        (last,) = [finding for finding in result if finding.name == "host.last_step"]
        assert last.verdict == verdict


async def test_units_that_stop_in_time_pass() -> None:
    answer = await found(HostOptions(), Programs(units="TimeoutStopUSec=1min 30s\nKillMode=mixed\nId=a.service\n"))
    assert answer["host.stop"] == Finding(
        "host.stop", "PASS", "1 active services may stop within force_after_s (110 s)"
    )
    assert "host.kill_mode" not in answer


async def test_many_units_are_counted_and_not_listed() -> None:
    units = "\n\n".join(f"TimeoutStopUSec=infinity\nKillMode=mixed\nId=u{number}.service" for number in range(9))
    assert "and 4 more" in (await found(HostOptions(), Programs(units=units)))["host.stop"].text


@pytest.mark.parametrize(
    ("kind", "delay", "verdict"),
    [
        ("systemd", "t 5000000\n", "PASS"),
        ("systemd", "t 30000000\n", "PASS"),
        ("command", "t 5000000\n", "PASS"),
        ("command", "t 30000000\n", "WARN"),
        ("command", "t many\n", "WARN"),
        ("command", "hangs", "WARN"),
        ("command", None, "WARN"),
    ],
)
async def test_delay_locks_matter_where_we_wait_for_them(kind: str, delay: str | None, verdict: str) -> None:
    """Thirty seconds on a stock Debian, for everyone but powerguard-off."""
    command = ["/bin/true"] if kind == "command" else []
    options = HostOptions.model_validate({"kind": kind, "command": command})
    answer = (await found(options, Programs(delay=delay)))["host.inhibitors"]
    assert answer.verdict == verdict
    assert bool(answer.fix) == (verdict == "WARN")


async def test_a_host_without_systemd_is_reported_and_not_a_crash() -> None:
    answer = await found(HostOptions(), Programs(delay=None, units=None))
    assert answer["host.stop"].verdict == "WARN"
    assert answer["host.stop"].fix


async def test_the_way_to_power_off_is_tried_without_a_word(tmp_path: Path) -> None:
    """Listening: pass, and nothing was written. Not listening: fail, with the command that helps."""
    path = tmp_path / "word"
    options = HostOptions(fifo=str(path))
    answer = (await found(options))["host.power_off"]
    assert (answer.verdict, answer.fix) == ("FAIL", "systemctl restart powerguard-off.socket")
    os.mkfifo(path, 0o600)
    end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        answer = (await found(options))["host.power_off"]
        assert answer.verdict == "PASS"
        assert os.read(end, 4096).startswith(b"\nhello "), "the only word, and it does nothing"
        with pytest.raises(BlockingIOError):
            os.read(end, 1)
    finally:
        os.close(end)


@pytest.mark.parametrize(
    ("helper", "verdict", "fix"),
    [
        (HELPER, "PASS", ""),
        ("LoadState=not-found\n", "FAIL", "powerguard install"),
        ("LoadState=masked\n", "FAIL", "systemctl unmask"),
        ("LoadState=loaded\nEnvironment=LC_ALL=C POWERGUARD_OFF_RECORD=/run/x\n", "FAIL", "systemctl cat"),
        (None, "WARN", "systemd host"),
    ],
)
async def test_the_helper_behind_the_socket_is_looked_at(helper: str | None, verdict: str, fix: str) -> None:
    """A rehearsal that was forgotten would be found out in the dark otherwise."""
    answer = (await found(HostOptions(), Programs(helper=helper)))["host.helper"]
    assert answer.verdict == verdict
    assert fix in answer.fix


async def test_a_command_must_be_there() -> None:
    for program, verdict in (("/bin/sh", "PASS"), ("sh", "FAIL"), ("/nonexistent/off", "FAIL")):
        answer = await found(HostOptions(kind="command", command=[program]))
        assert answer["host.power_off"].verdict == verdict


@pytest.mark.parametrize(
    ("span", "expected_s"),
    [("1min 30s", 90), ("infinity", float("inf")), ("500ms", 0.5), ("1h 5min 2s", 3902), ("2w 1d", 1296000), ("", 0)],
)
def test_time_spans_as_systemctl_prints_them(span: str, expected_s: float) -> None:
    assert seconds(span) == pytest.approx(expected_s)
