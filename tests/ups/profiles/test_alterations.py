"""Devices that nobody has seen: each walk altered as cards differ, and what must stay the same or become unknown.

Over every walk of our own, and over those of real devices where they lie beside the checkout.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from powerguard.core.model.events import OutputSource
from powerguard.ups.profiles.decode import Decoded, decode
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.probe import choose
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid, below
from powerguard.ups.profiles.walk import read_walk

OWN = sorted((Path(__file__).parent / "walks").rglob("*.walk"))
REAL = sorted((Path(__file__).parents[4] / "shared" / "ups-walks").glob("*.snmprec"))
EVERY = load_profiles(None).every()
SYSTEM = "1.3.6.1.2.1.1"
COLUMNS = tuple({str(column) for profile in EVERY for column in profile.columns()})

Walk = dict[str, Answer]
each_walk = pytest.mark.parametrize("path", [*OWN, *REAL], ids=lambda path: path.stem)


def choose_and_decode(answers: Walk) -> tuple[list[str], Decoded]:
    chosen = choose(EVERY, answers, sys_object_id="", sys_descr="")
    return [profile.name for profile in chosen], decode(chosen, answers)


def same(one: Decoded, other: Decoded) -> bool:
    return (one.numbers, one.output_source, one.battery_status, one.alarms, one.load_lines, one.outlets) == (
        *(other.numbers, other.output_source, other.battery_status, other.alarms, other.load_lines, other.outlets),
    )


def in_tables(answers: Walk, change: Callable[[str], str]) -> Walk:
    """Return the walk with the index of every table row changed."""
    altered: Walk = {}
    for oid, raw in answers.items():
        column = next((one for one in COLUMNS if below(oid, one)), None)
        altered[oid if column is None else Oid(column + change(oid[len(column) :]))] = raw
    return altered


@each_walk
def test_what_a_card_says_of_itself_changes_nothing(path: Path) -> None:
    """sysObjectID and sysDescr are wrong too often to decide."""
    answers = read_walk(path)
    names, decoded = choose_and_decode(answers)
    nobody: Walk = {oid: raw for oid, raw in answers.items() if not below(oid, SYSTEM)}
    liar: Walk = {**nobody, Oid(f"{SYSTEM}.1.0"): b"PDU", Oid(f"{SYSTEM}.2.0"): Oid("1.3.6.1.4.1.8072.3.2.10")}
    for altered in (nobody, liar):
        assert choose_and_decode(altered)[0] == names
        assert same(choose_and_decode(altered)[1], decoded)


@each_walk
@pytest.mark.parametrize(
    "change", [lambda end: f"{end}.0", lambda end: f".0{end}", lambda end: f".7{end}"], ids=["N.0", "0.N", "7.N"]
)
def test_how_rows_are_numbered_changes_nothing(path: Path, change: Callable[[str], str]) -> None:
    """Rows end in .N, .N.0 or .0.N, by the card; units in a chain have their own number first."""
    answers = read_walk(path)
    assert same(choose_and_decode(in_tables(answers, change))[1], choose_and_decode(answers)[1])


def some_of(answers: Walk, most: int) -> list[str]:
    """Return objects spread over the whole walk."""
    oids = sorted(answers)
    return oids if len(oids) <= most else oids[:: -(-len(oids) // most)]


def check_without(path: Path, most: int) -> None:
    answers = read_walk(path)
    names, decoded = choose_and_decode(answers)
    for oid in some_of(answers, most):
        for gone in ({key: raw for key, raw in answers.items() if key != oid}, {**answers, oid: Missing.NULL}):
            left, less = choose_and_decode(gone)
            if left != names:
                continue  # Other families, with other gauges: what must hold between them is tested elsewhere.
            if decoded.output_source is not OutputSource.BATTERY:
                assert less.output_source is not OutputSource.BATTERY, oid
            assert not less.on_battery or decoded.on_battery, oid
            assert less.low_battery <= decoded.low_battery, oid
            for name in ("runtime_s", "charge_pct"):
                before, after = decoded.numbers[name], less.numbers[name]
                if before is not None and after is not None:
                    assert abs(after - before) <= 0.25 * before + 60, (oid, name)


def check_full(path: Path, most: int) -> None:
    answers = read_walk(path)
    names, decoded = choose_and_decode(answers)
    for number, oid in enumerate(some_of(answers, most)):
        if not isinstance(answers[oid], int):
            continue
        left, altered = choose_and_decode({**answers, oid: FULL[number % len(FULL)]})
        if left != names:
            continue
        before, after = dict(decoded.provenance), dict(altered.provenance)
        for name, value in altered.numbers.items():
            if before.get(name) != after.get(name):
                continue  # Another family took its place.
            honest = decoded.numbers[name]
            assert value is None or honest is None or value <= max(honest * 1.5, honest + 120), (oid, name, value)
        assert not altered.on_battery or decoded.on_battery, oid


FULL = (65535, 2**31 - 1, 2**32 - 1, -(2**31))


@each_walk
def test_one_object_less_makes_nothing_worse_than_unknown(path: Path) -> None:
    """Whatever a card leaves out, no calm is made an outage, and no number jumps."""
    check_without(path, 4)


@each_walk
def test_a_full_counter_is_never_a_number(path: Path) -> None:
    """An object that answers what an unsigned -1 or a full counter looks like."""
    check_full(path, 5)


@pytest.mark.slow
@each_walk
def test_every_object_less_and_every_counter_full(path: Path) -> None:
    check_without(path, 1000)
    check_full(path, 1000)


@each_walk
def test_line_1_left_out_does_not_make_line_2_of_it(path: Path) -> None:
    """A one-phase UPS whose card answers three rows: without the first, two rows of zeros look like an input gone."""
    answers = read_walk(path)
    names, decoded = choose_and_decode(answers)
    for column in [one for one in COLUMNS if any(below(oid, one) for oid in answers)]:
        rows = sorted(oid for oid in answers if below(oid, column))
        left, less = choose_and_decode({oid: raw for oid, raw in answers.items() if oid != rows[0]})
        assert left != names or less.input_present in (decoded.input_present, None), column
        assert left != names or not less.on_battery or decoded.on_battery, column
