"""What the documents show is there: commands and their options, settings, links."""

import argparse
import ast
import contextlib
import io
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from powerguard.cli.main import VERBS, Verbs
from powerguard.daemon.observe.readiness import ERRORS, WARNINGS
from powerguard.effectors.bmc import helper as bmc
from powerguard.effectors.gpu import helper as gpu
from powerguard.effectors.signals import helper as signals
from powerguard.settings.load import load
from powerguard.settings.schema import Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md"), *(DOCS / "guides").glob("*.md")])
LINKED = sorted([*DOCS.glob("*.md"), *(DOCS / "guides").glob("*.md"), *(DOCS / "reference").glob("*.md")])
SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "powerguard").rglob("*.py")}
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
HELPERS = {
    "powerguard-gpu": gpu.WORDS,
    "powerguard-ipmi": bmc.WORDS,
    "powerguard-signal": signals.WORDS,
    "powerguard-slurm": ("show",),
}
"""The words that root types to each helper."""
UPS = "mode: rehearse\nups:\n  rack-a:\n    sources:\n      - {kind: snmp, host: 10.0.0.1}\n"


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def code_lines(text: str) -> list[str]:
    """Return the lines of a page that are code: its blocks, fenced or indented."""
    blocks = [match[3] for match in FENCED.finditer(text)]
    blocks += [line[4:] for line in text.splitlines() if line.startswith("    ")]
    return [line for block in blocks for line in block.splitlines()]


def code_within(text: str) -> list[str]:
    """Return the pieces of code within the sentences of a page."""
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def commands(lines: list[str]) -> Iterator[str]:
    """Yield each powerguard command of these lines."""
    for line in lines:
        for part in re.split(r"&&|[|;]", line.split(" #")[0]):
            command = part.strip().removeprefix("$ ").removeprefix("/opt/powerguard/bin/").removeprefix(".venv/bin/")
            if command.startswith("powerguard ") and not command.startswith("powerguard {"):
                yield command.split(" > ")[0]


def parsers_of(verb: str) -> argparse.ArgumentParser:
    verbs = Verbs()
    verbs.add(verb)
    found: argparse.ArgumentParser = verbs.subparsers.choices[verb]
    return found


def mistakes(command: str) -> list[str]:
    """Return which words of a command powerguard does not have; [] for none."""
    words = shlex.split(command)[1:]
    if words[0].startswith("-") or words[0] == "VERB":
        return []
    if words[0] not in VERBS:
        return [words[0]]
    parser = parsers_of(words[0])
    for word in words[1:]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
    known = {option for action in parser._actions for option in action.option_strings}
    own = words[: words.index("--")] if "--" in words else words
    return [word for word in own if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known]


@pytest.mark.parametrize("page", names(PAGES))
def test_every_command_and_option_is_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = code_lines(text) + code_within(text)
    wrong = {command: found for command in commands(lines) if (found := mistakes(command))}
    assert wrong == {}


def refusal(command: str) -> str:
    """Return what the command line says to a command that it refuses; "" if it is taken."""
    verb, *words = shlex.split(command)[1:]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            parsers_of(verb).parse_args(words)
        except SystemExit:
            return said.getvalue()
    return ""


@pytest.mark.parametrize("page", names(PAGES))
def test_every_command_that_is_shown_on_a_line_can_be_typed(page: str) -> None:
    """With its arguments and values, as today's command line takes them."""
    lines = code_lines((ROOT / page).read_text(encoding="utf-8"))
    wrong = {command: said for command in commands(lines) if (said := refusal(command))}
    assert wrong == {}


@pytest.mark.parametrize("page", names(PAGES))
def test_every_word_of_a_helper_and_every_unit_is_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "\n".join(code_lines(text) + code_within(text))
    typed = re.findall(r"^(powerguard-(?:gpu|ipmi|signal|slurm)) ([a-z]+)", code, re.MULTILINE)
    assert [f"{helper} {word}" for helper, word in typed if word not in HELPERS[helper]] == []
    units = re.findall(r"\bpowerguard[\w-]*@?\.(?:mount|path|service|socket|target)\b", code)
    units += [f"{unit}.service" for unit in re.findall(r"-u (powerguard[\w-]*)(?![\w.-])", code)]
    assert [unit for unit in units if not (ROOT / "systemd" / unit).exists()] == []


def test_a_wrong_command_is_found() -> None:
    text = "`powerguard stauts` and\n\n    powerguard drill --scpoe pause | tee x   # a comment\n"
    found = [mistakes(command) for command in commands(code_lines(text) + code_within(text))]
    assert found == [["--scpoe"], ["stauts"]]
    assert "unrecognized arguments" in refusal("powerguard explain last twice")
    assert refusal("powerguard explain last") == ""


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models that a field may hold, also within lists, maps and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def is_setting(path: list[str], models: list[type[BaseModel]]) -> bool:
    """Whether some of the models have this setting; the name of a UPS may stand between."""
    if not path or not models:
        return not path
    first, *rest = path
    fields = [field for model in models if (field := model.model_fields.get(first))]
    inner = [each for field in fields for each in models_in(field.annotation)]
    return bool(fields) and (is_setting(rest, inner) or (len(rest) > 1 and is_setting(rest[1:], inner)))


@pytest.mark.parametrize("page", names(PAGES))
def test_every_setting_that_is_named_is_one(page: str) -> None:
    """`budget.reserve_s` and the like, by the first word."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)(?::[^`]*)?`", text)
    files = (
        "log",
        "py",
        "md",
        "yaml",
        "json",
        "service",
        "socket",
        "target",
        "path",
        "conf",
        "sqlite",
        "config",
        "users",
    )
    sections = [each for each in named if each.split(".")[0] in Settings.model_fields and not each.endswith(files)]
    metrics_of_nut = ("ups.status", "ups.delay.", "ups.timer.", "ups.test.", "ups.load", "ups.realpower")
    checks = ("host.power_off", "host.helper", "bmc.watchdog", "scheduler.jobs")  # of doctor
    settings = [each for each in sections if not each.startswith(metrics_of_nut) and each not in checks]
    assert [each for each in settings if not is_setting(each.split("."), [Settings])] == []


def yaml_of(text: str) -> Iterator[str]:
    """Yield what may be settings: fenced YAML, and runs of indented lines."""
    for match in FENCED.finditer(text):
        if match[2] == "yaml":
            yield textwrap.dedent(match[3])
    for run in re.findall(r"(?:^ {4,}\S.*\n)+", FENCED.sub("", text), re.MULTILINE):
        yield textwrap.dedent(run)


def settings_shown() -> Iterator[tuple[str, str]]:
    """Yield the blocks of settings: those whose first key is a section of the settings."""
    for page in PAGES:
        for block in yaml_of(page.read_text(encoding="utf-8")):
            first = re.match(r"(\w+):(\s|$)", re.sub(r"^(#.*)?\n", "", block))
            if first and first[1] in Settings.model_fields:
                yield f"{page.name}: {block.splitlines()[0]}", block


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in settings_shown()])
def test_the_settings_that_are_shown_hold(block: str, tmp_path: Path) -> None:
    file = tmp_path / "powerguard.yaml"
    block = block.replace("9f86d081884c7d65...", "9f86d081884c7d65" * 4)
    whole = block if re.search(r"^ups:", block, re.MULTILINE) else UPS.replace("mode: rehearse\n", "") + block
    file.write_text(
        whole if re.search(r"^mode:", whole, re.MULTILINE) else "mode: rehearse\n" + whole, encoding="utf-8"
    )
    assert load(file).ups


def test_troubleshooting_explains_every_reason() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert [name for name in {**ERRORS, **WARNINGS} if f"`{name}`" not in page and name != "other"] == []


def test_troubleshooting_explains_every_error_of_the_log() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    logged = re.compile(r"""log\.(?:error|exception|critical)\(\s*["'](\w+)["']""")
    names = {name for text in SOURCES.values() for name in logged.findall(text)}
    assert len(names) > 20
    assert sorted(name for name in names if f"`{name}`" not in page) == []


def events_of(text: str) -> Iterator[str]:
    """Yield the names of the events that a file of the product logs, and of its alarms."""
    log = {"info", "warning", "error", "exception"}
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and call.args and isinstance(call.func, ast.Attribute):
            says, to = call.func.attr, ast.unparse(call.func.value)
            if says in {"note", "_note", "set_alarm", "once", "stands"} or (says in log and to in {"log", "_log"}):
                yield from (each.value for each in branches(call.args[0]) if re.fullmatch(r"[a-z_]+", each.value))


def branches(value: ast.expr) -> Iterator[Any]:
    """Yield the texts that an argument can be."""
    if isinstance(value, ast.IfExp):
        yield from (*branches(value.body), *branches(value.orelse))
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value


def test_the_reference_has_every_event() -> None:
    page = (DOCS / "reference" / "events.md").read_text(encoding="utf-8")
    named = {name for row in re.findall(r"^\|(.*?)\|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    daemons = [text for path, text in SOURCES.items() if path.relative_to(ROOT).parts[1] not in {"cli", "trainer"}]
    logged = {name for text in daemons for name in events_of(text)}
    assert len(logged) > 150
    assert sorted(name for name in logged if f"`{name}`" not in page) == []
    assert sorted(name for name in named if not any(f'"{name}"' in text for text in SOURCES.values())) == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", names(LINKED))
def test_every_link_leads_somewhere(page: str) -> None:
    file = ROOT / page
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", file.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        if path.startswith(("https://", "http://")):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_guide_that_the_product_names_is_there() -> None:
    """An error that sends its reader to a page that was renamed helps nobody."""
    places: dict[str, Any] = {}
    for folder in ("powerguard", "config", "systemd", "scripts", "examples"):
        for file in (ROOT / folder).rglob("*"):
            # Other tests' processes are writing __pycache__ meanwhile, by files of other names that come and go.
            if "__pycache__" not in file.parts and file.is_file() and file.suffix != ".so":
                text = file.read_text(encoding="utf-8", errors="replace")
                places |= dict.fromkeys(re.findall(r"docs/[\w/-]+\.(?:md|json)", text), file)
    assert places
    assert [f"{places[path]}: {path}" for path in places if not (ROOT / path).exists()] == []
