"""What `powerguard status` makes of what the daemon tells: nothing that nobody knows, and nothing twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.render import Paint
from powerguard.cli.status import describe

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
WRONG = "the BMC at 10.0.0.7: power restore policy is last-state"


@pytest.mark.parametrize(
    ("bmc", "told"),
    [
        (
            {"policy": "always-on", "verified": True, "age_s": 600.0, "power_watts": 2860.0},
            "policy always-on, verified 10 m 00 s ago; the host drew 2860 W",
        ),
        ({}, "policy not asked for yet"),
        ({"error": WRONG}, f"policy NOT verified: {WRONG}"),
        (
            {"policy": "last-state", "age_s": 3.0, "error": WRONG},
            f"policy last-state when it was read 3.0 s ago; NOT verified: {WRONG}",
        ),
        (
            {"policy": "always-on", "age_s": 3600.0, "error": "no answer"},
            "policy always-on when it was read 1 h 00 m ago; NOT verified: no answer",
        ),
    ],
)
def test_a_policy_is_told_as_it_was_read(bmc: dict[str, Any], told: str) -> None:
    """A policy that nobody has read is no "?" beside a message that knows it, and an old one is called old."""
    status = json.loads((REFERENCE / "status-online.json").read_text(encoding="utf-8"))
    silent = {"kind": "auto", "policy": None, "verified": False, "age_s": None, "error": "", "power_watts": None}
    status["bmc"] = {**silent, **bmc}
    (line,) = [line.strip() for line in describe(status, Paint()) if line.strip().startswith("bmc ")]
    assert line.removeprefix("bmc").strip() == f"auto: {told}"
