"""A mistake is told in an operator's words, also for shapes that the settings do not have yet."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from powerguard.options import Options, Secret
from powerguard.settings.explain import dotted
from powerguard.settings.load import Files, SettingsError, validate
from powerguard.yamlfile import load


class Snmp(Options):
    kind: Literal["snmp"]
    community: Secret | None = None


class Nut(Options):
    kind: Literal["nut"]
    name: str = Field(examples=["rack a"])
    password: Secret | None = None


class Example(Options):
    sources: list[Annotated[Snmp | Nut, Field(discriminator="kind")]] = []
    on: bool = False
    size_bytes: int | None = Field(default=None, gt=0)
    share: float = Field(default=0.5, gt=0, lt=1)
    pair: tuple[int, int] = (1, 2)
    either: int | str = 1


def mistakes(text: str) -> list[str]:
    document = load(text, "f")
    files = Files(document.data, (document,), {(): document, **dict.fromkeys(document.values, document)})
    with pytest.raises(SettingsError) as caught:
        validate(Example, files, Example.model_json_schema)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sources: [{kind: nutt}]", "f:1:18: sources[0].kind: must be nut or snmp, got 'nutt' (write nut)"),
        ("sources: [{name: a}]", "f:1:11: sources[0].kind: is required (nut or snmp)"),
        ("sources: [{kind: nut}]", 'f:1:11: sources[0].name: is required (write name: "rack a" or the like)'),
        ("sources: [{kind: snmp, name: a}]", "f:1:24: sources[0].name: unknown key (known here: community, kind)"),
        ("sources: [5]", "f:1:11: sources[0]: must be a map with kind: nut or snmp, got 5"),
        ("on: yes", "f:1:5: on: must be true or false, got 'yes' (write true)"),
        ("on: Off", "f:1:5: on: must be true or false, got 'Off' (write false)"),
        ("on: 1", "f:1:5: on: must be true or false, got 1"),
        ("size_bytes: 8.5GB", "f:1:13: size_bytes: must be a whole number, above 0, got '8.5GB' (write 8500000000)"),
        ("size_bytes: 4 GiB", "f:1:13: size_bytes: must be a whole number, above 0, got '4 GiB' (write 4294967296)"),
        ("size_bytes: 0.5", "f:1:13: size_bytes: must be a whole number, above 0, got 0.5"),
        ("size_bytes: 7 parsecs", "f:1:13: size_bytes: must be a whole number, above 0, got '7 parsecs'"),
        ("share: 1.0", "f:1:8: share: must be above 0 and below 1, got 1.0"),
        ("share: 90 %", "f:1:8: share: must be above 0 and below 1, got '90 %' (write 0.9)"),
        ("share:", "f:1:7: share: must be above 0 and below 1, got nothing"),
        ("pair: [1, x]", "f:1:11: pair[1]: must be a whole number, got 'x'"),
        ("[1]", "f:1:1: must be a map of keys and values, got a list of 1"),
    ],
)
def test_what_is_said(text: str, problem: str) -> None:
    assert mistakes(text) == [problem]


def test_of_two_types_both_are_reported_and_no_value() -> None:
    """A union without a tag is not in our schema; what pydantic says of it must not give a value away."""
    assert "hunter2" not in "\n".join(mistakes("either: [hunter2]"))


def test_a_path_is_written_as_people_write_it() -> None:
    assert dotted(("ups", "a b", "sources", 0, "x")) == "ups.'a b'.sources[0].x"
    assert dotted(("t", 12.5)) == "t[12.5]"
    assert dotted(()) == ""
    assert "\x1b" not in dotted(("\x1b[31m",))
