"""Commands made ready for a device: delays in its units, never sooner than asked, and what of a read back counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.ups.profiles.commands import DelayError, SetOrder, Switch, offered
from powerguard.ups.profiles.load import load_profiles, parse_profile
from powerguard.ups.profiles.schema import Verb
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid

PROFILES = load_profiles(None)
MINI = """
name: mini
title: Mini
base: 1.3.6.1.4.1.99999
probe: {all_of: [output_source]}
output_source: [{object: miniSource, oid: .1.0, values: {1: utility}}]
controls:
  off_with_return:
    needs: [{object: miniMode, oid: .2.0, is: [1, [5, 7]]}]
    sets:
      - {object: miniOff, oid: .3.0, type: integer, delay: off_s, unit: min, allowed: [60, 180, 600], read_back: exact}
      - {object: miniGo, oid: .4.0, type: integer, value: 9, read_back: none}
    utility_returns_during_countdown: aborts
"""


def switch(profile: str, verb: Verb = Verb.OFF_WITH_RETURN, outlet: str = "") -> Switch:
    return Switch(PROFILES.by_name[profile], verb, outlet)


WITH_OFF = [one for one in PROFILES.ranked() if Verb.OFF_WITH_RETURN in one.controls]


@pytest.mark.parametrize("name", [one.name for one in WITH_OFF])
@given(off_s=st.floats(0, 700), on_s=st.floats(5, 600))
def test_no_output_goes_off_sooner_than_asked(name: str, off_s: float, on_s: float) -> None:
    """In any unit; what cannot be had is refused, and the SET that acts is the last."""
    one = switch(name)
    try:
        orders = one.orders(off_s=off_s, on_s=on_s)
    except DelayError:
        assert one.longest_s is not None
        assert off_s > one.longest_s
        return
    (off,) = [order for order, step in zip(orders, one.control.sets, strict=True) if step.delay == "off_s"]
    assert isinstance(off.raw, int)
    assert off.raw * off.unit_s >= off_s - 1e-6
    assert off.raw * off.unit_s < max(off_s, 60) + 1
    assert one.control.sets[-1].object == orders[-1].object


def test_allowed_values_are_the_next_larger_one() -> None:
    mini = Switch(parse_profile(MINI, "mini.yaml"), Verb.OFF_WITH_RETURN)
    assert [mini.orders(off_s=each)[0].raw for each in (0, 60, 60.5, 601 - 1)] == [1, 1, 3, 10]
    assert mini.longest_s == 600
    with pytest.raises(DelayError, match="miniOff takes at most 600 s, and 601 s are needed"):
        mini.orders(off_s=601)


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (1, ""),
        (6, ""),
        (4, "miniMode is 4 and must be 1 or"),
        (Missing.NULL, "miniMode is not reported"),
        (None, "not reported"),
    ],
)
def test_what_a_command_needs(mode: Answer | None, problem: str) -> None:
    mini = Switch(parse_profile(MINI, "mini.yaml"), Verb.OFF_WITH_RETURN)
    answers = {} if mode is None else {"1.3.6.1.4.1.99999.2.0": mode}
    found = mini.unfit(answers, today=True)
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def order(read_back: str, seconds: float | None = 120.0, raw: int = 120) -> SetOrder:
    return SetOrder("o", Oid("1.3"), "integer", raw, read_back, 1.0, seconds)


@pytest.mark.parametrize(
    ("one", "answer", "since_s", "heeded"),
    [
        (order("countdown"), 120, 0, True),
        (order("countdown"), 118, 2, True),
        (order("countdown"), 112, 2, False),  # shorter than it was set to
        (order("countdown"), 122, 0, False),
        (order("countdown"), 86, 30, True),
        (order("countdown"), -1, 0, False),
        (order("countdown"), 0, 0, False),
        (order("countdown"), Missing.NO_SUCH_OBJECT, 0, False),
        (order("countdown"), b"120", 0, False),
        (order("rounded"), 180, 0, True),
        (order("rounded"), 119, 0, False),
        (order("exact", None, 1), 1, 0, True),
        (order("exact", None, 1), 2, 0, False),
        (order("none"), Missing.NULL, 0, True),
    ],
)
def test_what_counts_as_done(one: SetOrder, answer: Answer, since_s: float, *, heeded: bool) -> None:
    assert (one.unheeded(answer, since_s=since_s) == "") is heeded


def test_any_countdown_of_the_family_stands() -> None:
    """Of another command, too, and of the outlet that is meant; -1 of a card without signs is none."""
    eaton = switch("xups")
    base = "1.3.6.1.4.1.534.1"
    assert eaton.standing_s({Oid(f"{base}.9.6.0"): -1, Oid(f"{base}.9.1.0"): 40}) == 40
    assert eaton.standing_s({Oid(f"{base}.9.6.0"): 30, Oid(f"{base}.9.1.0"): 40}) == 30
    assert eaton.standing_s({Oid(f"{base}.9.6.0"): 2**32 - 1, Oid(f"{base}.9.1.0"): 0}) is None
    assert eaton.standing_s({Oid(f"{base}.9.6.0"): 65535, Oid(f"{base}.9.1.0"): -1}) is None
    assert eaton.standing_s({Oid(f"{base}.12.2.1.7.2"): 20}) is None
    outlet = switch("xups", Verb.OUTLET_OFF_WITH_RETURN, "2")
    assert outlet.standing_s({Oid(f"{base}.12.2.1.7.2"): 20}) == 20
    assert outlet.orders(off_s=30)[0].oid == f"{base}.12.2.1.7.2"


def test_the_most_trusted_family_goes_first() -> None:
    found = [one.profile.name for one in offered(PROFILES.ranked(), Verb.OFF_WITH_RETURN)]
    assert (found[-1], "apc-powernet" in found, "mge-upsmg" in found) == ("rfc1628", True, False)
