"""Lines that are not all told: what is added up over them, or is the worst of them, is then not known."""

from typing import Any

import pytest

from powerguard.ups.profiles.decode import Decoded, decode
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.probe import choose
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid

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


def decode_lines(**changes: object) -> Decoded:
    """Return what a three-phase card says, changed; None: not answered at all."""
    values: dict[str, Any] = {**THREE, **{name.replace("_", "."): value for name, value in changes.items()}}
    answers: dict[str, Answer] = {Oid(U + oid): value for oid, value in values.items() if value is not None}
    chosen = choose(EVERY, answers, sys_object_id="", sys_descr="")
    assert [profile.name for profile in chosen] == ["rfc1628"]
    return decode(chosen, answers)


def of(base: str, values: dict[str, Any], gone: str = "") -> Decoded:
    """Return what a card of another family says, with one object left out."""
    answers: dict[str, Answer] = {Oid(base + oid): value for oid, value in values.items() if oid != gone}
    return decode(choose(EVERY, answers, sys_object_id="", sys_descr=""), answers)


def why(decoded: Decoded, field: str) -> str:
    return "; ".join(rejected.why for rejected in decoded.rejected if rejected.field == field)


def test_all_lines_are_reported() -> None:
    decoded = decode_lines()
    assert (decoded.load_pct, decoded.watts) == (30, 6000)


@pytest.mark.parametrize("line", [1, 2, 3])
@pytest.mark.parametrize("gone", [None, Missing.NO_ANSWER, Missing.NO_SUCH_INSTANCE, Missing.NULL, -1, 65535, b"n/a"])
def test_a_line_that_is_left_out_leaves_no_total(line: int, gone: object) -> None:
    """The load of line 2 left out would be a third too little, and the battery would last that much longer."""
    for count in (3, None):
        decoded = decode_lines(_4_3_0=count, **{f"_4_4_1_5_{line}": gone})
        assert (decoded.load_pct, decoded.watts) == (None, 6000)
        decoded = decode_lines(_4_3_0=count, **{f"_4_4_1_4_{line}": gone})
        assert (decoded.load_pct, decoded.watts) == (30, None)


def test_a_line_that_has_volts_is_there() -> None:
    """Both columns cut short after line 2, or line 3 marked as not measured in both: its volts are still told."""
    volts = {f"_4_4_1_2_{line}": 230 for line in (1, 2, 3)}
    for gone in (None, Missing.NULL, -1):
        cut = {"_4_3_0": None, "_4_4_1_4_3": gone, "_4_4_1_5_3": gone}
        assert (decode_lines(**cut).load_pct, decode_lines(**cut).watts) == (30, 5000), "it is not reported"
        decoded = decode_lines(**cut, **volts)
        assert (decoded.load_pct, decoded.watts) == (None, None)
        assert why(decoded, "watts").endswith("line 3 is reported by another object only")
        ghost = {**volts, "_4_4_1_2_3": 24}
        assert (decode_lines(**cut, **ghost).load_pct, decode_lines(**cut, **ghost).watts) == (30, 5000), (
            "less than 25 V is none"
        )


@pytest.mark.parametrize("nothing", [Missing.NULL, -1])
def test_lines_of_which_all_that_is_answered_says_nothing_are_none(nothing: object) -> None:
    """A one-phase UPS whose card counts three lines and fills two of them up; with a gap, nothing is that sure."""
    dead = {f"_4_4_1_{column}_{line}": nothing for column in (4, 5) for line in (2, 3)}
    assert (decode_lines(**dead).load_pct, decode_lines(**dead).watts) == (20, 2000)
    assert decode_lines(**{**dead, "_4_4_1_5_2": None}).load_pct is None
    assert decode_lines(**{**dead, "_4_4_1_4_3": 700}).load_pct is None
    alone = {f"_4_4_1_4_{line}": None for line in (1, 2, 3)} | {"_4_4_1_5_3": nothing}
    assert decode_lines(**alone).load_pct is None, "counted, and nothing else says that it is dead"


def test_a_line_of_0_beside_its_load() -> None:
    """0 W at a real load is not measured; 0 % at watts that are a load of the others neither. A line may be bare."""
    assert (decode_lines(_4_4_1_4_2=0).load_pct, decode_lines(_4_4_1_4_2=0).watts) == (30, None)
    assert why(decode_lines(_4_4_1_4_2=0), "watts") == "line 2 at 0 W and 30 %: not measured"
    assert (decode_lines(_4_4_1_5_2=0).load_pct, decode_lines(_4_4_1_5_2=0).watts) == (None, 6000)
    assert why(decode_lines(_4_4_1_5_2=0), "load_pct") == "line 2 at 3000 W and 0 %: not measured"
    bare = decode_lines(_4_4_1_4_2=0, _4_4_1_5_2=0)
    assert (bare.load_pct, bare.watts) == (20, 3000)
    assert decode_lines(_4_4_1_4_2=0, _4_4_1_5_2=1).watts == 3000, "rounding"
    assert decode_lines(_4_4_1_4_2=100, _4_4_1_5_2=0).load_pct == 20, "rounding"


def test_objects_named_one_by_one_are_lines_too() -> None:
    """Liebert's points and Huawei's scalars: line 2 left out between two, or told by the watts alone."""
    points = {f".9.20.1.20.1.2.1.{point}": text for point, text in ((4223, b"20"), (4224, b"30"), (4225, b"10"))}
    volts = {f".9.20.1.20.1.2.1.{point}": b"230.1" for point in (4385, 4386, 4387)}
    gp = {".9.20.1.20.1.2.1.4872": b"normal", ".5.1.19.0": 100, **points}
    assert of("1.3.6.1.4.1.476.1.42.3", gp).load_pct == 30
    assert of("1.3.6.1.4.1.476.1.42.3", gp, ".9.20.1.20.1.2.1.4224").load_pct is None
    assert of("1.3.6.1.4.1.476.1.42.3", gp, ".9.20.1.20.1.2.1.4225").load_pct == 30
    assert of("1.3.6.1.4.1.476.1.42.3", {**gp, **volts}, ".9.20.1.20.1.2.1.4225").load_pct is None
    power = {
        f".4.100.1.{number}.1": raw for number, raw in ((8, 31), (9, 28), (10, 30), (14, 312), (15, 286), (16, 301))
    }
    huawei = {".2.101.1.1.1": 3, ".6.100.1.4.1": 1800, **power}
    assert of("1.3.6.1.4.1.2011.6.174.1", huawei).watts == 8900
    for gone in (".4.100.1.9.1", ".4.100.1.10.1"):
        assert of("1.3.6.1.4.1.2011.6.174.1", huawei, gone).watts is None


@pytest.mark.parametrize("line", [2, 3])
def test_another_column_about_a_line_is_enough(line: int) -> None:
    """Where the card does not say how many lines it has."""
    decoded = decode_lines(_4_3_0=None, **{f"_4_4_1_4_{line}": None})
    assert (decoded.load_pct, decoded.watts) == (30, None)
    assert why(decoded, "watts") == (
        "line 2 is not reported" if line == 2 else "line 3 is reported by another object only"
    )


def test_lines_that_are_not_there_lack_nothing() -> None:
    """A one-phase UPS whose card answers three rows of one column and one of the other."""
    dead = {"_4_4_1_5_2": 0, "_4_4_1_5_3": 0, "_4_4_1_4_2": None, "_4_4_1_4_3": None}
    decoded = decode_lines(_4_3_0=None, **dead)
    assert (decoded.load_pct, decoded.watts) == (20, 2000)
    decoded = decode_lines(_4_3_0=1, _4_4_1_4_2=None, _4_4_1_4_3=None)
    assert (decoded.load_pct, decoded.watts) == (20, 2000), "rows beyond the lines that it counts are none"


def test_a_line_that_cannot_be_believed_spoils_the_worst_of_them() -> None:
    """300 % on line 2: nobody knows how loaded the UPS is."""
    decoded = decode_lines(_4_4_1_5_2=300)
    assert decoded.load_pct is None
    assert "one line is not believed" in why(decoded, "load_pct")


@pytest.mark.parametrize("watts", [0, 1, 49])
def test_few_watts_with_no_load_beside_them_are_none(watts: int) -> None:
    """0 is not measured, 1 is a kilowatt: with the load in percent that shows, without it nothing may be believed."""
    lines = {f"_4_4_1_5_{line}": None for line in (1, 2, 3)} | {f"_4_4_1_4_{line}": None for line in (2, 3)}
    assert decode_lines(_4_3_0=1, _4_4_1_4_1=watts, **lines).watts is None
    assert decode_lines(_4_3_0=1, _4_4_1_4_1=50, **lines).watts == 50
