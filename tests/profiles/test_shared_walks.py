"""Walks of real devices, where they lie beside the checkout: what the two families can tell must be right or None."""

import json
from pathlib import Path
from typing import Any

import pytest

from powerguard.profiles.decode import decode
from powerguard.profiles.load import load_profiles
from powerguard.profiles.probe import choose
from powerguard.profiles.walk import parse_walk

FOLDER = Path(__file__).parents[3] / "shared" / "ups-walks"
FIELDS = {"load_pct": "load_pct", "charge_pct": "charge_pct", "watts": "watts", "battery_temp_c": "battery_temp_c"}
OTHER_MIB = {"mge-upsmg", "xups", "cps"}
"""Families whose own, finer objects are not read yet: what RFC 1628 says of them is right but coarser, or absent."""


def expected() -> dict[str, Any]:
    path = FOLDER / "expected.json"
    return json.loads(path.read_text(encoding="utf-8"))["walks"] if path.is_file() else {}


UPSES = {name: walk for name, walk in expected().items() if walk["kind"] == "ups"}


@pytest.mark.skipif(not UPSES, reason="no recorded walks of real devices beside the checkout")
@pytest.mark.parametrize("name", sorted(UPSES) or ["none"])
def test_a_real_walk(name: str) -> None:
    want = UPSES[name]
    profiles = load_profiles(None).ranked()
    text = (FOLDER / f"{name}.snmprec").read_text(encoding="utf-8", errors="replace")
    answers = parse_walk(text, name)
    chosen = choose(profiles, answers, sys_object_id="", sys_descr="")
    decoded = decode(chosen, answers)
    foreign = want["profile"] in OTHER_MIB or not {"rfc1628", "apc-powernet"} & set(want["profile"].split("|"))
    if not chosen:
        assert foreign, "a family that we know was not recognised"
        return

    def fine(field: str, value: float | None) -> bool:
        allowed = [want[field], *want.get("accept", {}).get(field, [])]
        if foreign:
            allowed += [None, want.get(f"{field}_rfc1628")]
        return any(value == one or (value is not None and one is not None and abs(value - one) < 1) for one in allowed)

    assert decoded.output_source in [want["output_source"], *want.get("accept", {}).get("output_source", [])]
    assert fine("runtime_s", decoded.runtime_s), decoded.runtime_s
    assert fine("input_voltage", decoded.input_v), decoded.input_v
    for field, attribute in FIELDS.items():
        assert fine(field, getattr(decoded, attribute)), (field, getattr(decoded, attribute))
    if name == "cetpower":
        assert decoded.witnesses == ()
    assert decoded.stale is None


def test_a_shared_walk_folder_has_walks() -> None:
    """Where the folder is there at all, it must not silently test nothing."""
    if not FOLDER.is_dir():
        pytest.skip("no recorded walks of real devices beside the checkout")
    assert len(UPSES) >= 20
