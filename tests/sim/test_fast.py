"""`powerguard demo --fast`: the same story in virtual time, quickly, the same every time, and told as what it is."""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from powerguard.daemon.journal import history, read_only

# one process for all: what `first` played serves them all
pytestmark = [pytest.mark.xdist_group("fast demo"), pytest.mark.timeout(300)]

SKELETON = [
    ["outage_began", "on_battery", "online", "outage_ended"],
    [
        "outage_began", "on_battery", "emergency_checkpoint", "checkpoint_ordered", "checkpoint_durable", "holding",
        "online", "outage_ended",
    ],
    [
        "outage_began", "on_battery", "emergency_checkpoint", "checkpoint_ordered", "checkpoint_durable", "holding",
        "shutdown", "power_off_ordered", "power_off_accepted",
    ],
]  # fmt: skip
"""The story: the same in the live world (test_demo) and in this one."""


def skeleton(answer: dict[str, Any]) -> list[list[str]]:
    """The order of events, each move by the phase it leads to.

    What depends on how long the world has run is left out: precautions beside training, and the guard afterwards. So is
    how the BMC answers: on a busy machine it may be too late.
    """
    return [
        [
            event.get("new", event["event"])
            for at, event in enumerate(outage["events"])
            if event["event"] not in ("policy_verified", "action_failed", "guard_started", "guard_ended")
            and not _is_precaution(outage["events"], at)
        ]
        for outage in answer["outages"]
    ]


def _is_precaution(events: list[dict[str, Any]], at: int) -> bool:
    emergency = next((n for n, event in enumerate(events) if event.get("new") == "emergency_checkpoint"), len(events))
    return events[at]["event"].startswith("checkpoint_") and at < emergency


def cpu_s() -> float:
    """Seconds of computing of all children so far: a busy machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fast(*more: str, home: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "powerguard", "demo", "--fast", *more],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": home, "POWERGUARD_UNDER_TEST": "1", "PYTHONPATH": str(Path.cwd())},
    )


@pytest.fixture(scope="module")
def home() -> Any:  # noqa: ANN401 - a generator of one name
    with tempfile.TemporaryDirectory(prefix="pg fast ", dir="/tmp") as folder:
        yield folder


@pytest.fixture(scope="module")
def first(home: str) -> dict[str, Any]:
    ended = fast("--json", "--keep", f"{home}/kept", home=home)
    assert (ended.returncode, ended.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


def test_it_shows_the_story(first: dict[str, Any]) -> None:
    assert skeleton(first) == SKELETON
    assert first["schema_version"] == 1
    assert first["safe"] is True
    assert len(first["checks"]) == 6
    assert all(check["holds"] for check in first["checks"])
    assert first["seconds"] > 3600.0, "an hour and more of recharging"


def test_the_example_in_the_reference_is_this_object(first: dict[str, Any]) -> None:
    """Whoever programs against docs/reference/demo.json finds these keys, checks and events."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "demo.json"
    example = json.loads(page.read_text(encoding="utf-8"))
    assert list(first) == list(example)
    assert skeleton(example) == skeleton(first)
    assert [(check["name"], list(check)) for check in example["checks"]] == [
        (check["name"], list(check)) for check in first["checks"]
    ]


def test_it_says_what_is_not_real(first: dict[str, Any]) -> None:
    assert "virtual time" in first["world"]
    assert "time" in first["replaced"]
    assert "the power-off" in first["replaced"]
    assert not any("SNMP" in thing for thing in first["real"])


def test_the_policy_is_read_back_before_the_power_goes(first: dict[str, Any]) -> None:
    long = [event["event"] for event in first["outages"][2]["events"]]
    assert long.index("policy_verified") < long.index("power_off_ordered")


def test_it_is_the_same_every_time_and_leaves_nothing(first: dict[str, Any], home: str) -> None:
    """Told in words this time, from the same numbers; its journal is gone, and the reports that it names are there."""
    began_s = cpu_s()
    ended = fast(home=home)
    assert cpu_s() - began_s < 60.0, "it is the one that takes no minute"
    assert (ended.returncode, ended.stderr) == (0, "")
    for outage in first["outages"]:
        assert outage["name"] in ended.stdout
    for check in first["checks"]:
        assert f"  yes  {check['name']}: {check['observed']}" in ended.stdout
    assert "no training was lost" in ended.stdout
    kept = Path(home) / "kept"
    reports = [Path(home) / line.strip() for line in ended.stdout.splitlines() if line.endswith(".html")]
    assert [report.name for report in reports] == ["outage-1.html", "outage-2.html", "outage-3.html"]
    assert {report.parent for report in reports} | {kept} == set(Path(home).iterdir())
    shown = [re.sub(r"<footer>.*", "", page.read_text(encoding="utf-8")) for page in reports]
    assert shown == [re.sub(r"<footer>.*", "", (kept / page.name).read_text(encoding="utf-8")) for page in reports]
    assert ["ridden through" in shown[0], "resumed in place" in shown[1], "power-off" in shown[2]] == [True] * 3
    with read_only(kept / "journal.sqlite") as db:
        assert [outage.outcome for outage in reversed(history(db, 3))] == ["ridden_through", "resumed_in_place", ""]
    assert (
        fast("--keep", str(kept), home=home).stderr
        == f"powerguard demo: error: {kept} is not empty: give --keep a new folder\n"
    )


@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_picture_of_the_first_page_is_drawn_by_one_command(
    first: dict[str, Any], home: str, tmp_path: Path, kept: bool
) -> None:
    """It is the picture of the demo's second report; after a change of either: scripts/outage-picture."""
    root = Path(__file__).parents[2]
    drawn = tmp_path / "outage.svg"
    command = [sys.executable, str(root / "scripts" / "outage-picture"), str(drawn), *[f"{home}/kept"][:kept]]
    subprocess.run(command, check=True, cwd=root, timeout=250, env={**os.environ, "PYTHONPATH": str(root)})
    assert drawn.read_text(encoding="utf-8") == (root / "docs" / "outage.svg").read_text(encoding="utf-8")


def test_a_reader_that_leaves_and_a_full_disk_end_it_without_a_traceback(home: str) -> None:
    """`powerguard demo --fast | head -1`, and a disk that takes nothing, also where Python keeps no output back."""
    env = {"PATH": "/usr/bin:/bin", "TMPDIR": home, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-m", "powerguard", "demo", "--fast"]
    read, write = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        for stdout, code, said in (
            (write, 141, ""),
            (full, 74, "powerguard: error: standard output: No space left on device\n"),
        ):
            ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, check=False)
            assert (ended.returncode, ended.stderr) == (code, said)
    finally:
        os.close(write)
        os.close(full)
