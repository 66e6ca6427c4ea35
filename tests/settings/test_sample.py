"""The sample, each alternative in it, the schema and the reference page say the same as the code."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from powerguard.settings.explain import Explainer
from powerguard.settings.load import load
from powerguard.settings.schema import Settings, json_schema
from powerguard.settings.show import as_yaml, changed, effective, origins, render
from powerguard.yamlfile import load as load_yaml

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "config" / "powerguard.yaml"
LINES = SAMPLE.read_text(encoding="utf-8").splitlines()
OPTIONAL = re.compile(r"(\s*)#(\S.*|  .*)")


def blocks() -> list[tuple[int, int]]:
    """Return first and last line (exclusive) of every run of commented-out settings."""
    found: list[tuple[int, int]] = []
    for number, line in enumerate(LINES):
        if not OPTIONAL.fullmatch(line) or line == "#":
            continue
        indent = len(line) - len(line.lstrip())
        goes_on = (
            found and found[-1][1] == number and indent == len(LINES[number - 1]) - len(LINES[number - 1].lstrip())
        )
        if goes_on and line.lstrip().startswith("#  "):
            found[-1] = (found[-1][0], number + 1)
        elif not line.lstrip().startswith("#  "):
            found.append((number, number + 1))
    return found


def uncommented(begin: int, end: int) -> str:
    """Return the sample with one block in force, instead of the active one above it where it says "Instead"."""
    own = [OPTIONAL.fullmatch(line) for line in LINES[begin:end]]
    lines = [f"{match[1]}{match[2]}" for match in own if match]
    before = LINES[:begin]
    if re.match(r"\s*# Instead: ", LINES[begin - 1]):
        first = lines[0]
        indent = len(first) - len(first.lstrip())
        start = " " * indent + re.split(r"[ :]", first.strip())[0]
        at = max(number for number, line in enumerate(before) if line.startswith(start))
        before = before[:at]
    return "\n".join([*before, *lines, *LINES[end:]])


def test_the_sample_holds_and_its_budget_is_the_default() -> None:
    settings = load(SAMPLE)
    assert settings.mode == "rehearse"
    assert settings.budget == Settings.model_fields["budget"].get_default(call_default_factory=True)


def test_the_sample_names_every_top_level_setting() -> None:
    text = SAMPLE.read_text(encoding="utf-8")
    missing = [name for name in Settings.model_fields if not re.search(rf"^#?{name}:", text, re.MULTILINE)]
    assert missing == [], f"add a block for each of these, commented out, to {SAMPLE}"


def test_the_sample_begins_with_the_line_for_editors() -> None:
    assert LINES[0].startswith("# yaml-language-server: $schema=")


def test_there_are_alternatives_in_the_sample() -> None:
    assert len(blocks()) >= 10


@pytest.mark.parametrize(("begin", "end"), blocks(), ids=lambda number: str(number + 1))
def test_each_alternative_of_the_sample_holds(tmp_path: Path, begin: int, end: int) -> None:
    path = tmp_path / "powerguard.yaml"
    path.write_text(uncommented(begin, end), encoding="utf-8")
    assert changed(load(SAMPLE), load(path)) != []


def test_the_reference_page_is_the_one_that_the_schema_makes() -> None:
    page = ROOT / "docs" / "reference" / "settings.md"
    assert page.read_text(encoding="utf-8") == render(), (
        "python -m powerguard.settings.show > docs/reference/settings.md"
    )


def fields(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, definition in (("Settings", schema), *schema["$defs"].items()):
        for field, node in definition["properties"].items():
            yield f"{name}.{field}", node


def test_every_setting_is_described() -> None:
    schema = json_schema()
    explainer = Explainer(schema)
    assert [name for name, node in fields(schema) if not explainer.resolve(node).get("description")] == []


def test_every_number_has_a_range() -> None:
    """A number without bounds is one that a slip of the finger can make deadly."""
    schema = json_schema()
    explainer = Explainer(schema)
    numbers = {name: explainer.resolve(node) for name, node in fields(schema)}
    bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    assert [
        name for name, node in numbers.items() if node.get("type") in {"integer", "number"} and not bounds & set(node)
    ] == []


def test_the_schema_is_json_and_closed() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    closed = [schema, *schema["$defs"].values()]
    assert all(definition["additionalProperties"] is False for definition in closed)
    assert set(schema["required"]) == {"mode", "ups"}


def test_what_is_shown_is_a_settings_file_that_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "shown.yaml"
    text = (
        SAMPLE.read_text(encoding="utf-8")
        .replace("name: llm", "name: '1e3'")
        .replace("user: powerguard", "user: 'off'")
    )
    source = tmp_path / "source.yaml"
    source.write_text(text, encoding="utf-8")
    settings = load(source)
    path.write_text(as_yaml(settings), encoding="utf-8")
    assert load(path) == settings
    assert load_yaml(as_yaml(settings), "f").data == effective(settings)


def test_a_reload_names_the_keys_that_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    text = SAMPLE.read_text(encoding="utf-8")
    text = (
        text.replace("margin: 0.2", "margin: 0.25")
        .replace("25: 1260, ", "")
        .replace("auth: {credential: snmp-auth}", "auth: {file: /x}")
    )
    path.write_text(text, encoding="utf-8")
    assert changed(load(SAMPLE), load(path)) == [
        "ups.rack-a.sources[0].auth.credential",
        "ups.rack-a.runtime_table[25]",
        "budget.margin",
        "ups.rack-a.sources[0].auth.file",
    ]
    assert changed(load(SAMPLE), load(SAMPLE)) == []


def test_every_value_has_an_origin_or_is_a_default() -> None:
    from powerguard.settings.load import load_with_origins

    loaded = load_with_origins(SAMPLE)
    rows = {key: (value, origin) for key, value, origin in origins(loaded.settings, loaded.files)}
    line = next(number for number, line in enumerate(LINES, 1) if "runtime_table: {" in line)
    assert rows["ups.rack-a.runtime_table[50]"] == (540, f"{SAMPLE}:{line}")
    assert rows["bmc.port"] == (623, None)
