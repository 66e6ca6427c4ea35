"""Lines that are not all told: what is added up over them, or is the worst of them, is then not known."""

from typing import Any

import pytest

from powerguard.profiles.decode import Decoded, decode
from powerguard.profiles.load import load_profiles
from powerguard.profiles.probe import choose
from powerguard.profiles.values import Answer, Missing, Oid

U = "1.3.6.1.2.1.33.1"
EVERY = load_profiles(None).every()
THREE: dict[str, Any] = {
    ".4.1.0": 3,
    ".2.2.0": 0,
    ".2.4.0": 100,
    ".2.3.0": 20,
    ".4.3.0": 3,
    **{f".4.4.1.4.{line}": watts for line, watts in ((1, 2000), (2, 3000), (3, 1000))},
    **{f".4.4.1.5.{line}": load for line, load in ((1, 20), (2, 30), (3, 10))},
}


def told(**changes: object) -> Decoded:
    """Return what a three-phase card says, changed; None: not answered at all."""
    values: dict[str, Any] = {**THREE, **{name.replace("_", "."): value for name, value in changes.items()}}
    answers: dict[str, Answer] = {Oid(U + oid): value for oid, value in values.items() if value is not None}
    chosen = choose(EVERY, answers, sys_object_id="", sys_descr="")
    assert [profile.name for profile in chosen] == ["rfc1628"]
    return decode(chosen, answers)


def why(decoded: Decoded, field: str) -> str:
    return "; ".join(rejected.why for rejected in decoded.rejected if rejected.field == field)


def test_all_lines_are_told() -> None:
    decoded = told()
    assert (decoded.load_pct, decoded.watts) == (30, 6000)


@pytest.mark.parametrize("line", [1, 2, 3])
@pytest.mark.parametrize("gone", [None, Missing.NO_ANSWER, Missing.NULL])
def test_a_line_that_is_left_out_leaves_no_total(line: int, gone: object) -> None:
    """The load of line 2 left out would be a third too little, and the battery would last that much longer."""
    decoded = told(**{f"_4_4_1_5_{line}": gone})
    assert decoded.load_pct is None or gone is Missing.NULL
    assert decoded.watts == 6000
    decoded = told(**{f"_4_4_1_4_{line}": gone})
    assert (decoded.load_pct, decoded.watts) == (30, None) or gone is Missing.NULL


@pytest.mark.parametrize("line", [2, 3])
def test_another_column_that_tells_of_a_line_is_enough(line: int) -> None:
    """Where the card does not say how many lines it has."""
    decoded = told(_4_3_0=None, **{f"_4_4_1_4_{line}": None})
    assert (decoded.load_pct, decoded.watts) == (30, None)
    assert why(decoded, "watts") == f"line {line} is told by another column only"


def test_lines_that_are_not_there_lack_nothing() -> None:
    """A one-phase UPS whose card answers three rows of one column and one of the other."""
    dead = {"_4_4_1_5_2": 0, "_4_4_1_5_3": 0, "_4_4_1_4_2": None, "_4_4_1_4_3": None}
    decoded = told(_4_3_0=None, **dead)
    assert (decoded.load_pct, decoded.watts) == (20, 2000)
    decoded = told(_4_3_0=1, _4_4_1_4_2=None, _4_4_1_4_3=None)
    assert (decoded.load_pct, decoded.watts) == (20, 2000), "rows beyond the lines that it counts are none"


def test_a_line_that_cannot_be_believed_spoils_the_worst_of_them() -> None:
    """300 % on line 2: nobody knows how loaded the UPS is."""
    decoded = told(_4_4_1_5_2=300)
    assert decoded.load_pct is None
    assert "one line is not believed" in why(decoded, "load_pct")


@pytest.mark.parametrize("watts", [0, 1, 49])
def test_few_watts_with_no_load_beside_them_are_none(watts: int) -> None:
    """0 is not measured, 1 is a kilowatt: with the load in percent that shows, without it nothing may be believed."""
    lines = {f"_4_4_1_5_{line}": None for line in (1, 2, 3)} | {f"_4_4_1_4_{line}": None for line in (2, 3)}
    assert told(_4_3_0=1, _4_4_1_4_1=watts, **lines).watts is None
    assert told(_4_3_0=1, _4_4_1_4_1=50, **lines).watts == 50
