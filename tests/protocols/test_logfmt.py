"""logfmt: one event stays one line, whatever a hostile UPS calls itself."""

import math
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.protocols.logfmt import VALUE_CHARS, encode, number, printable, safe_key


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "v=plain"),
        ("", 'v=""'),
        ("two words", 'v="two words"'),
        ('say "x"', r'v="say \"x\""'),
        ("a=b", 'v="a=b"'),
        ("back\\slash", r'v="back\\slash"'),
        ("x\nlevel=error", r'v="x\nlevel=error"'),
        ("\x1b[31mred\x07", r'v="\x1b[31mred\x07"'),
        ("turn \u202e around", r'v="turn \u202e around"'),
        ("line\u2028sep\x85", r'v="line\u2028sep\x85"'),
        ("\ud800", r"v=\ud800"),
        ("机架", "v=机架"),
        (None, "v=null"),
        (True, "v=true"),
        (612, "v=612"),
        (612.0, "v=612"),
        (0.12345, "v=0.123"),
        (-0.0001, "v=0"),
        (math.inf, "v=inf"),
    ],
)
def test_values(value: object, text: str) -> None:
    assert encode([("v", value)]) == text


def test_a_long_value_is_cut_and_says_so() -> None:
    line = encode([("v", "x" * (VALUE_CHARS + 7)), ("w", 1)])
    assert line == f'v="{"x" * VALUE_CHARS}"...(+7 chars) w=1'
    assert printable("abcdef", 4) == "abcd...(+2 chars)"


def test_a_key_cannot_end_early() -> None:
    assert safe_key('a b="\n') == "a_b___"
    assert safe_key("") == "_"
    assert number(10**400) == str(10**400)


@given(st.lists(st.tuples(st.text(), st.text()), max_size=4))
def test_any_text_stays_one_line_of_printable_characters(pairs: list[tuple[str, str]]) -> None:
    """And every pair stays one word, as a shell would split it."""
    line = encode(pairs)
    assert line == "" or line.isprintable()
    unescaped = re.sub(r"\\(.)", r"_", line)  # escapes inside the quotes
    assert len(shlex.split(unescaped.replace("'", "_"))) == len(pairs)
