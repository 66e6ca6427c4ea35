"""Whatever a card answers, the decoder answers too, and whatever a walk file holds, its reader ends in its own error.

The properties run with every test run; the marked ones put a million inputs through each.
"""

import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.ups.profiles.decode import Decoded, decode
from powerguard.ups.profiles.load import ProfileError, load_profiles, parse_profile
from powerguard.ups.profiles.probe import choose, partly
from powerguard.ups.profiles.schema import Profile
from powerguard.ups.profiles.vocabulary import NUMBERS, Answer, Combine, Missing, Oid
from powerguard.ups.profiles.walk import WalkError, format_walk, parse_walk

PROFILES = load_profiles(None)
UPSES, PDUS, EVERY = PROFILES.ranked(), PROFILES.ranked("pdu"), PROFILES.every()
ROWS = ("1", "2.0", "3", "0.1", "0.2", "7.1.0")
WALKS = Path(__file__).parent / "walks"
A_MILLION = 1_000_000
PARTS = 8
"""The million in so many tests: none of them takes minutes on a busy machine."""


def objects(profiles: Sequence[Profile]) -> list[str]:
    scalars = {oid for profile in profiles for oid in profile.scalars()}
    columns = {column for profile in profiles for column in profile.columns()}
    columns |= {profile.alarm_table.column for profile in profiles if profile.alarm_table}
    return sorted({*scalars, *(f"{column}.{row}" for column in columns for row in ROWS)})


OIDS = objects(EVERY)
ODD = (0, -1, 1, 2, 3, 5, 255, 9999, 65535, 32767, 2**31 - 1, 2**32 - 1, 2**64, -(2**31), -(2**63), 10**30)
ALARMS = tuple(Oid(f"1.3.6.1.2.1.33.1.6.3.{alarm}") for alarm in range(1, 26))
NUMBER = st.one_of(st.integers(-(10**30), 10**30), st.integers(-2, 300), st.sampled_from(ODD))
ANSWER = st.one_of(
    NUMBER,
    st.binary(max_size=80),
    st.text("01", max_size=70).map(str.encode),
    st.integers(-10, 99999).map(lambda number: str(number).encode()),
    st.sampled_from(list(Missing)),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12).map(
        lambda numbers: Oid(".".join(map(str, [1, *numbers])))
    ),
    st.sampled_from(ALARMS),
)
ANSWERS = st.dictionaries(st.sampled_from(OIDS), ANSWER)


def check(decoded: Decoded) -> None:
    """What must hold of anything decoded."""
    for name, value in decoded.numbers.items():
        window = NUMBERS[name]
        most = window.highest * (12 if window.combine is Combine.SUM else 1)
        assert value is None or window.lowest <= value <= most, name
    if decoded.runtime_s is not None and decoded.output_source != "battery":
        assert decoded.runtime_s >= 30
    if decoded.runtime_s == 0:
        assert decoded.low_battery or (decoded.charge_pct is not None and decoded.charge_pct <= 20)
    if decoded.on_battery:
        assert decoded.output_source == "battery"
        assert decoded.witnesses
    if decoded.battery_status in ("low", "depleted", "fault", "missing"):
        assert decoded.low_battery
    if decoded.watts == 0:
        assert not decoded.load_pct
    assert len(decoded.outlets) <= 256


@settings(max_examples=300, deadline=None)
@given(ANSWERS, st.sampled_from(["upses", "pdus", "vendor", "standard"]))
def test_any_answer_decodes_to_something_believable(answers: dict[str, Answer], which: str) -> None:
    profiles = {"upses": UPSES, "pdus": PDUS, "vendor": UPSES[:1], "standard": UPSES[-1:]}[which]
    decoded = decode(profiles, answers)
    check(decoded)
    assert decode(profiles, answers) == decoded
    chosen = choose(EVERY, answers, sys_object_id="", sys_descr="")
    assert len({profile.kind for profile in chosen}) <= 1
    for profile in partly(EVERY, answers, sys_object_id="", sys_descr=""):
        check(decode([profile], answers))


@settings(max_examples=100, deadline=None)
@given(ANSWERS)
def test_a_written_walk_reads_back_as_it_was(answers: dict[str, Answer]) -> None:
    kept = {oid: answer for oid, answer in answers.items() if answer is Missing.NULL or not isinstance(answer, Missing)}
    assert parse_walk(format_walk(answers), "made") == kept


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=300), st.text("0123456789.|x-+:\r\n\0é#", max_size=300)))
def test_any_text_is_a_walk_or_an_error_at_its_line(text: str) -> None:
    read(text)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_profile_with_any_line_changed_loads_or_says_where(data: st.DataObject) -> None:
    """A typing error anywhere in a real file ends in a profile or in an error with file and line."""
    name = data.draw(st.sampled_from(sorted(SOURCES)))
    lines = SOURCES[name].splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    change = data.draw(st.sampled_from(["drop", "twice", "swap", "word", "indent"]))
    if change == "drop":
        del lines[at]
    elif change == "twice":
        lines.insert(at, lines[at])
    elif change == "swap":
        other = data.draw(st.integers(0, len(lines) - 1))
        lines[at], lines[other] = lines[other], lines[at]
    elif change == "indent":
        lines[at] = "  " + lines[at]
    else:
        words = re.split(r"([\w.\"/%-]+)", lines[at])
        spot = data.draw(st.integers(0, len(words) - 1))
        words[spot] = data.draw(
            st.sampled_from(["", "0", "-1", "[]", "{}", "null", "x", ".1", "1.3.6", "[3, 1]", "true"])
        )
        lines[at] = "".join(words)
    text = ""
    try:
        parse_profile("\n".join(lines), name)
    except ProfileError as error:
        text = str(error)
    assert all(re.match(rf"{re.escape(name)}(:\d+:\d+)?: ", line) for line in text.splitlines()), text


SOURCES = {
    f"{profile.name}.yaml": (
        Path(__file__).parents[3] / "powerguard" / "ups" / "profiles" / f"{profile.name}.yaml"
    ).read_text(encoding="utf-8")
    for profile in EVERY
}


def read(text: str) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    message = "w:1: "
    try:
        answers = parse_walk(text, "w")
    except WalkError as error:
        message = str(error)
    assert re.match(r"w:\d+: ", message)
    assert len(message) < 300
    assert parse_walk(format_walk(answers), "again").keys() <= answers.keys()
    return answers


# --- A million ------------------------------------------------------------------------------------------------------


def some_answer(dice: random.Random) -> Answer:
    kind = dice.randrange(10)
    if kind < 4:
        return dice.randrange(-3, 400)
    if kind < 6:
        return dice.choice(ODD)
    if kind == 6:
        return dice.getrandbits(dice.randrange(1, 70)) - dice.getrandbits(dice.randrange(1, 70))
    if kind == 7:
        return dice.choice((dice.randbytes(dice.randrange(40)), str(dice.randrange(9999)).encode(), b"01" * 32))
    return dice.choice(ALARMS) if kind == 8 else dice.choice(list(Missing))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_million_answers_are_decoded(part: int) -> None:
    """Half of them answers of whole devices that the fuzzer has meddled with: deeper than chance alone gets."""
    dice = random.Random(f"answers {part}")
    devices = [parse_walk(path.read_text(encoding="utf-8"), path.name) for path in sorted(WALKS.rglob("*.walk"))]
    fitting = [(walk, choose(EVERY, walk, sys_object_id="", sys_descr="")) for walk in devices]
    fitting = [(walk, chosen) for walk, chosen in fitting if chosen]
    assert fitting
    slowest_s = 0.0
    for number in range(A_MILLION // PARTS):
        if number % 2:
            walk, profiles = dice.choice(fitting)
            answers = dict(walk)
            for oid in dice.choices(list(walk), k=dice.randrange(1, 6)):
                answers[oid] = some_answer(dice)
        else:
            profiles = dice.choice((UPSES[:2], UPSES[-2:], PDUS))
            answers = {oid: some_answer(dice) for oid in dice.choices(OIDS, k=dice.randrange(12))}
        began_s = time.thread_time()
        check(decode(profiles, answers))
        slowest_s = max(slowest_s, time.thread_time() - began_s)
    assert slowest_s < 5.0, "no input takes long"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_million_walks_are_read(part: int) -> None:
    dice = random.Random(f"walks {part}")
    texts = [path.read_text(encoding="utf-8") for path in sorted(WALKS.rglob("*.walk"))]
    lines = [line for text in texts for line in text.splitlines()]
    letters = "0123456789.|x-+:\r\n\t #\0\x1b\x85é\ud800"
    good = 0
    for _ in range(A_MILLION // PARTS):
        line = list(dice.choice(lines))
        for _ in range(dice.randrange(3)):
            at = dice.randrange(len(line) + 1)
            line[at : at + dice.randrange(3)] = dice.choice(letters) * dice.choice((1, 1, 1, 2, 40))
        good += bool(read("".join(line)))
    assert good > A_MILLION / PARTS / 5, "it must not be rubbish alone"
