"""logfmt: one event stays one line, and each value can be read back, whatever a hostile UPS calls itself."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.daemon.log import PROCESSORS, STRING_CHARS, clean, open_scope, printable, safe_key


@pytest.fixture(autouse=True)
def no_scope() -> None:
    """Another test of this process may have opened an outage's scope, which every line names."""
    open_scope()


PAIR = re.compile(r'([A-Za-z0-9_.]+)=(?:"((?:[^"\\]|\\.)*)"|([^ "=]*))(?: |$)')


def read(line: str) -> dict[str, str]:
    """The pairs of a line, by the grammar of logfmt: a value is bare, or quoted with backslashes."""
    pairs: dict[str, str] = {}
    while line:
        found = PAIR.match(line)
        assert found is not None, line
        key, quoted, bare = found.groups()
        pairs[key] = bare if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        line = line[found.end() :]
    return pairs


def line_of(**values: object) -> str:
    done: Any = {"event": "x_happened", **values}
    for processor in PROCESSORS["logfmt"]:
        done = processor(None, "info", done)
    line: str = done.decode()
    assert line.startswith("time=20")
    assert line.endswith("\n")
    return line[:-1].partition(" event=x_happened")[2].lstrip()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "v=plain"),
        ("", "v="),
        ("two words", 'v="two words"'),
        ('say "x"', r'v="say \"x\""'),
        ("a=b", 'v="a=b"'),
        ("back\\slash", r"v=back\slash"),
        ("back\\slash x", r'v="back\\slash x"'),
        ("x\nlevel=error", r'v="x\\nlevel=error"'),
        ("\x1b[31mred\x07", r"v=\x1b[31mred\x07"),
        ("turn \u202e around", r'v="turn \\u202e around"'),
        ("line\u2028sep\x85", r"v=line\u2028sep\x85"),
        ("\ud800", r"v=\ud800"),
        ("机架", "v=机架"),
        (None, "v="),
        (True, "v=true"),
        (612, "v=612"),
        (612.0, "v=612.0"),
        (0.12345, "v=0.123"),
        (math.inf, "v=inf"),
    ],
)
def test_values(value: object, text: str) -> None:
    assert line_of(v=value) == text


def test_a_long_value_is_cut_and_says_so() -> None:
    assert line_of(v="x" * (STRING_CHARS + 7), w=1) == f'v="{"x" * STRING_CHARS}...(+7 chars)" w=1'


def test_a_key_cannot_end_early() -> None:
    assert safe_key('a b="\n') == "a_b___"
    assert safe_key("") == "_"


@given(st.dictionaries(st.from_regex(r"v[a-z]{0,3}", fullmatch=True), st.text(), max_size=4))
def test_any_text_stays_one_line_of_printable_characters_and_is_read_back(values: dict[str, str]) -> None:
    line = line_of(**values)
    assert line == "" or line.isprintable()
    assert read(line) == {key: printable(str(clean(value))) for key, value in values.items()}
