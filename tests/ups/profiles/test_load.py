"""Profile files: what is wrong is told at its line, and a site's typing error takes no working family away."""

import os
from pathlib import Path

import pytest

import powerguard.ups.profiles
from powerguard.ups.profiles.load import ProfileError, load_profiles, parse_profile
from powerguard.ups.profiles.probe import choose
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid
from powerguard.ups.profiles.walk import WalkError, parse_walk, read_walk

GOOD = """\
name: mini
title: A made family
base: 1.3.6.1.4.1.99999.1
match: {sys_object_ids: [1.3.6.1.4.1.99999]}
probe: {all_of: [output_source], any_of: [runtime_s]}
output_source:
  - {object: miniSource, oid: .1.0, values: {0: utility, 1: battery}}
numbers:
  runtime_s:
    - {object: miniRuntime, oid: .2.0, unit: min/10, text: true, none: [-1, [9999, null]], valid: [60, 7200]}
"""


def mistakes(text: str) -> list[str]:
    with pytest.raises(ProfileError) as caught:
        parse_profile(text, "mini.yaml")
    return str(caught.value).splitlines()


def test_the_packaged_profiles_load() -> None:
    profiles = load_profiles(None)
    assert profiles.problems == ()
    # Vendors before the standard, however many families there are.
    ranked = [profile.name for profile in profiles.ranked()]
    assert ranked[-1] == "rfc1628"
    assert "apc-powernet" in ranked
    packaged = Path(powerguard.ups.profiles.__file__).parent.glob("*.yaml")
    every = [profile.name for profile in profiles.every()]
    assert every[: len(ranked)] == ranked, "the UPSes come first"
    assert sorted(every) == sorted(path.stem for path in packaged), "a profile is named as its file"


def test_a_site_profile_is_used(tmp_path: Path) -> None:
    (tmp_path / "mini.yaml").write_text(GOOD)
    profiles = load_profiles(tmp_path)
    assert {"apc-powernet", "mini", "rfc1628"} <= {profile.name for profile in profiles.ranked()}
    mini = profiles.by_name["mini"]
    answers: dict[str, Answer] = {Oid("1.3.6.1.4.1.99999.1.1.0"): 0, Oid("1.3.6.1.4.1.99999.1.2.0"): b"347"}
    assert choose(profiles.ranked(), answers, sys_object_id="", sys_descr="") == (mini,)


def test_a_site_file_of_the_same_name_replaces_the_packaged_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD.replace("name: mini", "name: rfc1628"))
    assert load_profiles(tmp_path).by_name["rfc1628"].title == "A made family"


def test_a_broken_site_file_is_left_out_and_reported(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(GOOD.replace("unit: min/10", "unit: fortnights"))
    (tmp_path / "torn.yaml").write_bytes(b"name: \xff\n")
    (tmp_path / "good.yaml").write_text(GOOD)
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "twice.yaml").write_text(GOOD)
    profiles = load_profiles(tmp_path)
    assert set(profiles.by_name) == {*load_profiles(None).by_name, "mini"}
    bad, pipe, torn, twice = profiles.problems
    assert bad.startswith(f"{tmp_path}/bad.yaml:10:")
    assert "unknown unit 'fortnights' (one of: s, min, min/10" in bad
    assert pipe.startswith(f"{tmp_path}/pipe.yaml: is not a file")
    assert torn.startswith(f"{tmp_path}/torn.yaml:1:7: byte 0xff is not UTF-8")
    assert twice == f"{tmp_path}/twice.yaml: profile mini is already in {tmp_path}/good.yaml; left out"


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("title: A made family\n", "", 1, "title is missing"),
        ("name: mini", "name: Mini UPS", 1, "name: "),
        ("1: battery", "1: on-battery", 7, "output_source.0.values.1: "),
        ("title:", "titel: x\ntitle:", 2, "titel: unknown key"),
        ("numbers:", "number:", 8, "number: unknown key"),
        ("unit: min/10", "unit: V", 10, "unit 'V' is no time"),
        ("runtime_s:\n", "run_time:\n", 9, "unknown field"),
        ("oid: .2.0", "oid: 2..0", 10, "numbers.runtime_s.0.oid: "),
        ("base: 1.3.6.1.4.1.99999.1\n", "", 1, "an OID with a leading dot needs a base"),
        ("oid: .2.0", "oid: .2.0, column: .2", 10, "must name exactly one of oid and column"),
        ("[9999, null]", "[9999, 3]", 10, "range [9999, 3] runs backwards"),
        ("any_of: [runtime_s]", "any_of: [watts]", 5, "probe.any_of.0: 'watts' is not a field of this profile"),
        ("numbers:", "controls: {off: null}\nnumbers:", 8, "controls"),
        ("name: mini", "name: mini\nname: maxi", 2, "occurs twice"),
    ],
)
def test_mistakes_are_reported_at_their_line(old: str, new: str, line: int, what: str) -> None:
    text = GOOD.replace(old, new)
    problems = mistakes(text)
    assert any(one.startswith(f"mini.yaml:{line}:") and what in one for one in problems), problems
    assert all(one.startswith("mini.yaml:") for one in problems)


def test_an_empty_file_is_reported() -> None:
    assert mistakes("# nothing\n")


def test_text_numbers_and_windows() -> None:
    """Liebert sends numbers as text; ITA2 counts tenths of a minute."""
    from powerguard.ups.profiles.decode import decode

    mini = parse_profile(GOOD, "mini.yaml")
    base = "1.3.6.1.4.1.99999.1"

    def runtime_s(raw: bytes | int) -> float | None:
        return decode([mini], {f"{base}.1.0": 1, f"{base}.2.0": raw}).runtime_s

    assert runtime_s(b"347") == 2082
    assert runtime_s(b" 34.5 ") == 207
    assert runtime_s(9) is None
    for nonsense in (b"", b"nan", b"1e9", b"-1", b"99999", b"\xff", b"1" * 40):
        assert runtime_s(nonsense) is None, nonsense


@pytest.mark.parametrize("line", ["1.3.6|2|three", "1.3.6", "1.3.x|2|3", "1.3.6|77|1", "1.3.6|6|1..3", "1.3.6|4x|zz"])
def test_a_broken_walk_is_reported_at_its_line(line: str) -> None:
    with pytest.raises(WalkError, match=r"^w:2: "):
        parse_walk(f"# a walk\n{line}\n", "w")


def test_a_walk_in_another_editors_habits(tmp_path: Path) -> None:
    """A byte-order mark, CRLF, leading dots, spaces, bytes that are no UTF-8, characters that only look like lines."""
    path = tmp_path / "w"
    text = b"\xef\xbb\xbf1.3.6.1|2| 7 \r\n\r\n.1.3.6.2|4|a\x85b\xe2\x80\xa8|c\xff\r\n1.3.6.3|4x|00Ff\r\n1.3.6.4|129|\n"
    path.write_bytes(text)
    found = read_walk(path)
    assert found == {
        "1.3.6.1": 7,
        "1.3.6.2": b"a\x85b\xe2\x80\xa8|c\xff",
        "1.3.6.3": b"\0\xff",
        "1.3.6.4": Missing.NO_SUCH_INSTANCE,
    }


def test_a_walk_of_too_many_objects() -> None:
    text = "\n".join(f"1.3.6.{number}|2|1" for number in range(100_001))
    with pytest.raises(WalkError, match=r"^w:100001: more than 100000 objects"):
        parse_walk(text, "w")
