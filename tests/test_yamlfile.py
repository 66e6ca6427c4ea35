"""What one reads in a YAML file is what the program gets, or an error with line and column."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard import yamlfile
from powerguard.yamlfile import YamlFileError, load, load_file

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def problems(text: str) -> list[str]:
    with pytest.raises(YamlFileError) as caught:
        load(text, "f.yaml")
    return str(caught.value).splitlines()


@pytest.mark.parametrize("word", ["off", "on", "yes", "no", "y", "N", "True", "FALSE", "Null", "1:30", "190:20:30"])
def test_words_that_pyyaml_reads_as_something_else_stay_text(word: str) -> None:
    assert load(f"a: {word}", "f").data == {"a": word}


@pytest.mark.parametrize("number", ["010", "0o17", "0x1f", "1_000", "+5", "1.", ".5", ".inf", "-.INF", ".nan", "0b1"])
def test_numbers_that_people_and_parsers_read_differently_stay_text(number: str) -> None:
    assert load(f"a: {number}", "f").data == {"a": number}


@pytest.mark.parametrize("date", ["2026-11-21", "2026-11-21T10:00:00Z", "2026-11"])
def test_dates_stay_text(date: str) -> None:
    assert load(f"a: {date}", "f").data == {"a": date}


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-12", -12), ("2.50", 2.5), ("2e3", 2000.0), ("-0.5E-1", -0.05), ("true", True), ("false", False)],
)
def test_what_is_a_number_or_a_boolean(text: str, value: float) -> None:
    got = load(f"a: {text}", "f").data["a"]
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize("text", ["a: null", "a:", "a: "])
def test_null_and_nothing_are_none(text: str) -> None:
    assert load(text, "f").data == {"a": None}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null"])
def test_an_empty_document_is_none(text: str) -> None:
    assert load(text, "f").data is None


@pytest.mark.parametrize("key", ["1e3", "2.50", "012", "yes"])
def test_a_key_keeps_its_spelling(key: str) -> None:
    """As a name of a UPS, 1e3 would else be 1000.0."""
    document = load(f"{key}: x", "f")
    assert document.data == {key: "x"}
    assert document.where_key((key,)) == "f:1:1"


def test_quoted_scalars_are_text() -> None:
    assert load("a: '1'\nb: \"true\"\nc: |\n  null\n", "f").data == {"a": "1", "b": "true", "c": "null\n"}


def test_every_piece_knows_where_it_stands() -> None:
    document = load("ups:\n  rack-a:\n    sources:\n      - {kind: snmp, oid: 1.10}\n      - kind: nut\n", "pg.yaml")
    path = ("ups", "rack-a", "sources")
    assert document.where(()) == "pg.yaml:1:1"
    assert document.where_key(path) == "pg.yaml:3:5"
    assert document.where(path) == "pg.yaml:4:7"
    assert document.where((*path, 0, "oid")) == "pg.yaml:4:27"
    assert document.where_key((*path, 0, "oid")) == "pg.yaml:4:22"
    assert document.where((*path, 1, "kind")) == "pg.yaml:5:15"
    assert document.written((*path, 0, "oid")) == "1.10"
    assert document.written(path) is None


def test_what_is_not_there_stands_where_the_map_around_it_begins() -> None:
    document = load("a:\n  b: {c: 1}\n", "f")
    assert document.where(("a", "b", "missing", "more")) == "f:2:6"
    assert document.where_key(("a", "missing")) == "f:2:3"


def test_every_problem_is_reported_at_once_and_in_order() -> None:
    text = "a: &x 1\nb: *x\n<<: {a: 1}\na: 2\n? [1, {b: 2}]\n: 5\nz: !!python/name:os.system ''\n~: 1\nt: ~\ntrue: 2\n"
    assert [line.partition(" ")[0] for line in problems(text)] == [
        "f.yaml:1:4:",
        "f.yaml:2:4:",
        "f.yaml:3:1:",
        "f.yaml:4:1:",
        "f.yaml:5:3:",
        "f.yaml:7:4:",
        "f.yaml:8:1:",
        "f.yaml:9:4:",
        "f.yaml:10:1:",
    ]


def test_the_second_of_two_equal_keys_is_refused_and_the_first_named() -> None:
    assert problems("x: 1\nm:\n  a: 1\n  b: 2\n  a: 3\n") == [
        "f.yaml:5:3: key 'a' occurs twice in this map (first in line 3); keep one"
    ]


@pytest.mark.parametrize("text", ["{50: 1, '50': 2}", "{50: 1, 50.0: 2}", "{a: {x: 1}, a: {x: 2}}"])
def test_keys_that_mean_the_same_are_equal(text: str) -> None:
    assert len(problems(text)) == 1


def test_billions_of_laughs_stay_one_refusal_each() -> None:
    rows = ["a: &a [lol, lol]"]
    rows += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    assert len(problems("\n".join(rows))) <= 50


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 100_000, "{a: " * 1000, "? " * 1000])
def test_depth_is_bounded(text: str) -> None:
    assert "more than 32 levels deep" in problems(text)[-1]


def test_size_is_bounded() -> None:
    assert "more than 100000 values" in problems("- 1\n" * 100_001)[-1]
    assert "is larger than 1048576 bytes" in problems("#" * (yamlfile.MAX_BYTES + 1))[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n\tb: 1\n", "f.yaml:2:1: a tab in the indentation; use spaces"),
        ("a:\n  \tb: 1\n", "f.yaml:2:3: a tab in the indentation; use spaces"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: a second document begins here (---); a file holds one"),
        ("a: 1\nb: \x07\n", "f.yaml:2:4: character U+0007 is invisible in an editor; remove it"),
        ("a: 1\r\nb: \u2028\n", "f.yaml:2:4: character U+2028 is invisible in an editor; remove it"),
        ("a: \ud800", "f.yaml:1:4: character U+D800 is invisible in an editor; remove it"),
        ("# \uffff\na: 1", "f.yaml:1:3: character U+FFFF is invisible in an editor; remove it"),
        ('a: "\\0"', "f.yaml:1:4: a control character in the text; remove it"),
        ("a: 9999999999999999", "f.yaml:1:4: a number of more than 15 digits; quote it when it is text"),
        ("a: 1e999", "f.yaml:1:4: a number too large for any computer; quote it when it is text"),
    ],
)
def test_what_an_editor_does_not_show_and_a_computer_does_not_hold(text: str, problem: str) -> None:
    assert problems(text) == [problem]


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        ("a: b: c", "f.yaml:1:5:", "quote a text with a colon and a space, or correct the indentation"),
        ("a: @x", "f.yaml:1:4:", "quote a text that begins with @"),
        ("a: 1\nbudget\nc: 2", "f.yaml:3:1:", "write a colon and a space after a key"),
        ("\n\na: [1,\n 2\nb: 3", "f.yaml:5:2:", "started in line 3"),
    ],
)
def test_bad_syntax_is_explained(text: str, place: str, hint: str) -> None:
    (found,) = problems(text)
    assert found.startswith(place)
    assert hint in found


def test_no_value_is_quoted_in_a_problem() -> None:
    """A value may be a secret that stands in the wrong place."""
    for text in (
        "p: &a hunter2",
        "p: hunter2: x",
        "p: !x hunter2",
        "p: 'hunter2",
        "p: [hunter2",
        "{p: hunter2, p: hunter2}",
    ):
        assert "hunter2" not in "\n".join(problems(text))


def test_the_slower_parser_reads_the_same() -> None:
    """A PyYAML without libyaml reads the same files; only the wording of a syntax error may differ."""
    text = "a: 1\nb: [x, {c: off, d: 010}]\n'50': null\n50.5: |\n  text\n"
    assert load(text, "f", loader=yaml.SafeLoader) == load(text, "f", loader=yaml.CSafeLoader)
    with pytest.raises(YamlFileError) as caught:
        load("a: 1\na: 2\nb: *c\n", "f.yaml", loader=yaml.SafeLoader)
    assert str(caught.value).splitlines() == problems("a: 1\na: 2\nb: *c\n")


def file_problem(path: Path) -> str:
    with pytest.raises(YamlFileError) as caught:
        load_file(path, "f.yaml")
    (problem,) = caught.value.problems
    return str(problem)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert file_problem(tmp_path / "absent") == "f.yaml: cannot be read: No such file or directory"
    assert file_problem(tmp_path) == "f.yaml: is not a file; name a YAML file"
    assert file_problem(Path("/dev/zero")) == "f.yaml: is not a file; name a YAML file"
    assert file_problem(Path("nul\0")).startswith("f.yaml: cannot be read: ")
    large = tmp_path / "large"
    large.write_bytes(b"#" * (yamlfile.MAX_BYTES + 1))
    assert "is larger than" in file_problem(large)


def test_a_file_that_is_not_utf8_says_where(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("a: 1\nb: Büro\n".encode("latin-1"))
    assert file_problem(path) == "f.yaml:2:5: byte 0xfc is not UTF-8; save the file as UTF-8"


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: 2\r\n")
    document = load_file(path)
    assert document.data == {"a": 1, "b": {"c": 2}}
    assert document.where(("b", "c")) == f"{path}:3:6"


_scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(10**14), max_value=10**14)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=12)
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcxyz", min_size=1), inner, max_size=4),
)


@given(_values)
@settings(max_examples=150, deadline=None)
def test_json_is_read_as_json(value: Plain) -> None:
    """Each JSON document is a YAML document: both readings agree, whatever is in it."""
    import json

    assert load(json.dumps(value, ensure_ascii=False), "f").data == value


@given(st.text("ab:-[]{}&*!|>'\"%@`#,? \n\t01.~<=", max_size=60))
@settings(max_examples=400, deadline=None)
def test_any_text_is_data_or_a_list_of_problems(text: str) -> None:
    try:
        document = load(text, "f")
    except YamlFileError as error:
        message = str(error)
    else:
        message = document.where(())
    assert message.startswith("f:")
