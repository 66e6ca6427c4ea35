"""Reads the settings: powerguard.yaml, and over it conf.d/*.yaml in the order of their names.

Maps merge, everything else replaces. Every mistake of every file is told at once, with file, line and column, what
is wrong and what would be right.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from powerguard.options import Options
from powerguard.settings.explain import Explainer, Mistake
from powerguard.settings.schema import Settings, SourceOptions, json_schema
from powerguard.strictyaml import Document, KeyPath, Problem, StrictYamlError, load_file

DEFAULT_PATH: Final = Path("/etc/powerguard/powerguard.yaml")
MAX_FILES: Final = 100
"""In conf.d; more are a folder that was named by mistake."""

MAX_TOLD: Final = 100
"""Mistakes that are spelt out; nobody reads more, and a wrong file may have thousands."""

_Options = TypeVar("_Options", bound=Options)


class SettingsError(Exception):
    """Settings that cannot be used. problems: one line each, in the order of the files; its text is all of them."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


@dataclass(frozen=True, slots=True)
class Files:
    """The merged data of the files, and which file each value comes from."""

    data: Any
    documents: tuple[Document, ...]
    origins: dict[KeyPath, Document] = field(repr=False)

    def document(self, path: KeyPath) -> Document:
        """Return the file that a value comes from; for one that is not there, the file of the map around it."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, self.documents[0])

    def where(self, path: KeyPath, *, of_key: bool = False) -> str:
        """Return "file:line:column" of a value, or of its key."""
        document = self.document(path)
        return document.where_key(path) if of_key else document.where(path)

    def written(self, path: KeyPath) -> str | None:
        """Return a scalar as its file has it; None where there is none."""
        return self.document(path).written(path)

    def origin(self, path: KeyPath) -> str | None:
        """Return "file:line" of what the files say at `path`; None where it is a default."""
        if path not in self.origins:
            return None
        document = self.origins[path]
        return f"{document.name}:{document.position(path)[0]}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings that hold, and the files that they come from."""

    settings: Settings
    files: Files


def load(path: Path, conf_d: Path | None = None) -> Settings:
    """Read the settings. conf_d: folder of additions; None: "conf.d" beside the file, where there is one.

    Raises SettingsError with every problem. Secrets are not read here, only their references.
    """
    return load_with_origins(path, conf_d).settings


def load_with_origins(path: Path, conf_d: Path | None = None) -> Loaded:
    """Read the settings and keep where each value comes from. As `load`."""
    files = read_files(path, conf_d)
    settings = validate(Settings, files)
    mistakes = cross_checks(settings)
    if mistakes:
        raise SettingsError(_in_order(files, mistakes))
    return Loaded(settings, files)


def read_files(path: Path, conf_d: Path | None = None) -> Files:
    """Read and merge the files without looking at what they say. Raises SettingsError."""
    problems: list[str] = []
    documents: list[Document] = []
    for file in (path, *_additions(path, conf_d, problems)):
        try:
            document = load_file(file)
        except StrictYamlError as error:
            problems += [str(problem) for problem in error.problems]
            if file == path and problems[-1].endswith("No such file or directory"):
                problems[-1] += (
                    " (write one: `powerguard discover` and `powerguard import` print settings to begin with; "
                    "or name another with --config)"
                )
            continue
        if isinstance(document.data, dict):
            documents.append(document)
        elif document.data is not None:
            line, column = document.position(())
            problems.append(str(Problem(document.name, line, column, "must be a map of settings (key: value lines)")))
        elif file == path:
            problems.append(
                f"{document.name}: is empty; it needs at least mode and ups (`powerguard discover` prints them)"
            )
    if problems:
        raise SettingsError(problems)
    data: dict[Any, Any] = {}
    origins: dict[KeyPath, Document] = {}
    for document in documents:
        _merge(data, document.data, (), document, origins)
    return Files(data, tuple(documents), origins)


def _additions(path: Path, conf_d: Path | None, problems: list[str]) -> list[Path]:
    folder = path.parent / "conf.d" if conf_d is None else conf_d
    try:
        if conf_d is None and not folder.is_dir():
            return []
        names = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        problems.append(f"{folder}: cannot be read: {error.strerror}")
        return []
    problems += [f"{name}: is not read; call it {name.stem}.yaml" for name in names if name.suffix == ".yml"]
    files = [name for name in names if name.suffix == ".yaml"]
    if len(files) > MAX_FILES:
        problems.append(f"{folder}: holds more than {MAX_FILES} settings files")
    return files[:MAX_FILES]


def _merge(
    into: dict[Any, Any], data: dict[Any, Any], path: KeyPath, document: Document, origins: dict[KeyPath, Document]
) -> None:
    origins.setdefault(path, document)
    for key, value in data.items():
        below = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, below, document, origins)
            continue
        if key in into:
            _forget(into[key], below, origins)
        into[key] = _copy(value, below, document, origins)


def _forget(value: Any, path: KeyPath, origins: dict[KeyPath, Document]) -> None:  # noqa: ANN401 - any parsed file
    """Take a value that is replaced out of the origins."""
    del origins[path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _forget(item, (*path, key), origins)


def _copy(value: Any, path: KeyPath, document: Document, origins: dict[KeyPath, Document]) -> Any:  # noqa: ANN401 - any parsed file
    origins[path] = document
    if isinstance(value, dict):
        return {key: _copy(item, (*path, key), document, origins) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item, (*path, place), document, origins) for place, item in enumerate(value)]
    return value


def validate(model: type[_Options], files: Files, schema: Callable[[], dict[str, Any]] = json_schema) -> _Options:
    """Check merged data against a settings class. Raises SettingsError with every mistake."""
    try:
        # As JSON, because there a list is good for a tuple and text for a path, and nothing else is coerced.
        return model.model_validate_json(json.dumps(files.data))
    except ValidationError as error:
        details = error.errors(include_url=False)
    # Raised out here, so that no traceback leads to pydantic's error, whose text quotes every value.
    explainer = Explainer(schema(), files.written)
    # A list is called too short when its items have mistakes, which are told themselves.
    around = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    details = [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in around]
    told = _in_order(files, [explainer.explain(detail, files.data) for detail in details[:MAX_TOLD]])
    if len(details) > MAX_TOLD:
        told.append(f"{files.documents[0].name}: and {len(details) - MAX_TOLD} more mistakes")
    raise SettingsError(told)


def _in_order(files: Files, mistakes: list[Mistake]) -> list[str]:
    def place(mistake: Mistake) -> tuple[int, int, int]:
        document = files.document(mistake.path)
        at = document.key_position(mistake.path) if mistake.of_key else document.position(mistake.path)
        return (files.documents.index(document), *at)

    ordered = sorted(mistakes, key=place)
    return list(dict.fromkeys(f"{files.where(mistake.path, of_key=mistake.of_key)}: {mistake}" for mistake in ordered))


def cross_checks(settings: Settings) -> list[Mistake]:
    """Return what the schema cannot see: names that must agree."""
    mistakes: list[Mistake] = []
    names = ", ".join(settings.ups)
    if settings.feeds is None and len(settings.ups) > 1:
        mistakes.append(
            Mistake(("ups",), f"several UPSes, so feeds must say which one feeds this host (one of {names})")
        )
    if settings.feeds is not None:
        for place, name in enumerate(settings.feeds.supplies):
            if name not in settings.ups:
                mistakes.append(
                    Mistake(("feeds", "supplies", place), f"no UPS of this name under ups (known: {names})")
                )
    mistakes += _same_twice(settings)
    if settings.traps is not None:
        unknown = sorted(settings.traps.names - set(settings.ups))
        mistakes += [Mistake(("traps",), f"no UPS {name} under ups (known: {names})") for name in unknown]
    seen: dict[str, int] = {}
    for place, trainer in enumerate(settings.trainers):
        if trainer.name in seen:
            what = f"trainers[{seen[trainer.name]}] has this name already; give each its own"
            mistakes.append(Mistake(("trainers", place, "name"), what))
        seen.setdefault(trainer.name, place)
    return mistakes


_PEER: Final = {"snmp": "card", "nut": "UPS of the same upsd", "apcupsd": "apcupsd"}


def _same_twice(settings: Settings) -> list[Mistake]:
    """Return the sources that ask whom another one asks, whatever else they say: one peer is one witness.

    Within each UPS, and among those that feed this host: a card that counts as two UPSes hides the loss of one.
    """
    feeding = set(settings.ups if settings.feeds is None else settings.feeds.supplies)
    mistakes: list[Mistake] = []
    seen: list[tuple[str, int, SourceOptions]] = []
    for ups, its in settings.ups.items():
        for place, source in enumerate(its.sources):
            for other_ups, at, other in seen:
                if (other_ups == ups or {ups, other_ups} <= feeding) and _is_same_peer(source, other):
                    own = "a second witness must be another one" if other_ups == ups else "each UPS has its own"
                    what = f"the same {_PEER[source.kind]} as ups.{other_ups}.sources[{at}]; {own}"
                    mistakes.append(Mistake(("ups", ups, "sources", place), what))
                    break
            seen.append((ups, place, source))
    return mistakes


def _is_same_peer(one: SourceOptions, other: SourceOptions) -> bool:
    if (one.kind, _host(one.host), one.port) != (other.kind, _host(other.host), other.port):
        return False
    if one.kind == "snmp" or other.kind == "snmp":
        return True
    return one.name == other.name or one.name is None or other.name is None


def _host(text: str) -> str:
    """Return a host as it is compared: two spellings of one address or name are one host. Nothing is looked up."""
    name = text.strip("[]").rstrip(".").casefold()
    try:
        address = ip_address(name)
    except ValueError:
        return "localhost" if name in {"localhost.localdomain", "ip6-localhost"} else name
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "localhost" if str(address) in {"127.0.0.1", "::1"} else str(address)
