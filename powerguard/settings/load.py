"""Reads the settings: powerguard.yaml, and over it conf.d/*.yaml in the order of their names.

Maps are merged; other values, and a runtime_table, are replaced. Every mistake of every file is reported at once, with
file, line and column, what is wrong, and the fix.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from powerguard.options import Options
from powerguard.settings.explain import Explainer, Mistake
from powerguard.settings.schema import Settings, SourceOptions, UnfitError, json_schema
from powerguard.yamlfile import Document, KeyPath, Problem, YamlFileError, load_file
from powerguard.yamlfile import load as load_yaml

MAX_FILES: Final = 100
"""Most files in conf.d; a folder with more was named by mistake."""

MAX_REPORTED: Final = 100
"""Most mistakes that are listed; a wrong file may have thousands."""

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
class LoadedSettings:
    """Settings that hold, and the files that they come from."""

    settings: Settings
    files: Files


def load(path: Path, conf_d: Path | None = None) -> Settings:
    """Read the settings. conf_d: folder of additions; None: "conf.d" next to the file, if there is one.

    Raises SettingsError with every problem. Secrets are not read here, only their references.
    """
    return load_with_origins(path, conf_d).settings


def load_with_origins(path: Path, conf_d: Path | None = None) -> LoadedSettings:
    """Read the settings and keep where each value comes from. As `load`."""
    return _without_mistakes(check(path, conf_d))


def load_text(text: str, name: str) -> Settings:
    """Read settings that are in no file yet; name: of the file to be. As `load`."""
    try:
        document = load_yaml(text, name)
    except YamlFileError as error:
        raise SettingsError([str(problem) for problem in error.problems]) from error
    return _without_mistakes(_checked(_merged([document]))).settings


def _without_mistakes(checked: "CheckedSettings") -> LoadedSettings:
    problems = checked.problems(checked.mistakes)
    if problems or checked.settings is None:
        raise SettingsError(problems)
    return LoadedSettings(checked.settings, checked.files)


@dataclass(frozen=True, slots=True)
class CheckedSettings:
    """The files and every mistake in them.

    settings: what is left of the settings without the mistakes, to look for further ones; None if none is left.
    original: path in the files of a path in `settings`, from which items of lists may be gone.
    unlisted: mistakes that are not in `mistakes`, because there are too many.
    """

    files: Files
    settings: Settings | None
    mistakes: list[Mistake]
    original: Callable[[KeyPath], KeyPath]
    unlisted: int = 0

    def problems(self, mistakes: Sequence[Mistake]) -> list[str]:
        """Return a line for each mistake, in the order of the files."""
        more = [f"{self.files.documents[0].name}: and {self.unlisted} more mistakes"] if self.unlisted else []
        return _in_order(self.files, mistakes) + more


def check(path: Path, conf_d: Path | None = None) -> CheckedSettings:
    """Read the settings and find every mistake. Raises SettingsError if a file cannot be read.

    A value with a mistake is taken out and the rest is checked again: names that must agree are compared only in
    settings that hold. A mistake that is due to a value that was taken out is not reported.
    """
    return _checked(read_files(path, conf_d))


def _checked(files: Files) -> CheckedSettings:
    left = _Left(files.data)
    mistakes: list[Mistake] = []
    for turn in range(_TURNS):
        data = left.whole(fill=turn > 0)
        settings, details = _validated(Settings, data)
        if settings is not None:
            names = list(map(str, files.data["ups"])) if isinstance(files.data.get("ups"), dict) else []
            found = cross_checks(settings, names, lambda path: left.lacks(left.original(path)))
            found += _loads_twice(settings, data["ups"])
            mistakes += [Mistake(left.original(each.path), each.what, each.of_key) for each in found]
            return CheckedSettings(files, settings, mistakes, left.original)
        explainer = Explainer(json_schema(), lambda path: files.written(left.original(path)))
        explained = [(each, explainer.explain(each, data)) for each in details[:MAX_REPORTED]]
        new = [(each, Mistake(left.original(what.path), what.what, what.of_key)) for each, what in explained]
        mistakes += [mistake for detail, mistake in new if turn == 0 or not left.is_due(detail, mistake.path)]
        if len(details) > MAX_REPORTED or not all(left.take_out(detail, mistake.path) for detail, mistake in new):
            return CheckedSettings(files, None, mistakes, left.original, len(details) - len(explained))
    return CheckedSettings(files, None, mistakes, left.original)


_TURNS: Final = 10
"""A mistake takes out at most what is around it, level by level: the settings are never deeper than this."""

_GONE: Final = object()
_FILLED: Final = {"mode": "dry-run", "ups": {"none": {"sources": [{"kind": "apcupsd", "host": "none"}]}}}
"""Replaces required values that have mistakes, so that the rest can be checked."""


class _Left:
    """Data of which values with mistakes are taken out. Its own paths are those of the files."""

    def __init__(self, data: Any) -> None:  # noqa: ANN401 - any parsed file
        self._data = _plain_copy(data)
        self._gone: set[KeyPath] = set()

    def whole(self, *, fill: bool) -> Any:  # noqa: ANN401 - any parsed file
        """Return the data without what is gone. fill: put in what no settings can be without."""
        data = _without_gone(self._data)
        return {**data, **{key: value for key, value in _FILLED.items() if not data.get(key)}} if fill else data

    def original(self, path: KeyPath) -> KeyPath:
        """Return the path in the files of a path in `whole`, where the items after a missing one move up."""
        at: list[Any] = []
        value = self._data
        for key in path:
            here = key
            if isinstance(value, list) and isinstance(key, int):
                kept = [place for place, item in enumerate(value) if item is not _GONE]
                here = kept[key] if key < len(kept) else key
            at.append(here)
            known = isinstance(value, dict | list) and (
                here in value if isinstance(value, dict) else isinstance(here, int) and here < len(value)
            )
            value = value[here] if known else None
        return tuple(at)

    def lacks(self, path: KeyPath) -> bool:
        """Return whether something at or below this path is gone."""
        return any(removed[: len(path)] == path for removed in self._gone)

    def is_due(self, detail: ErrorDetails, path: KeyPath) -> bool:
        """Return whether a mistake may come from what is gone: the value itself, or one that it is checked against."""
        if isinstance(detail.get("ctx", {}).get("error"), UnfitError):
            return self.lacks(path)
        return path in self._gone or any(removed[:-1] == path for removed in self._gone)

    def take_out(self, detail: ErrorDetails, path: KeyPath) -> bool:
        """Take out the value of a mistake, or the map that cannot be without it. Return whether it can be done."""
        around = detail["type"] in {"missing", "union_tag_invalid", "union_tag_not_found"}
        path = path[:-1] if around else path
        if not path:
            return around  # mode or ups is missing: `whole` fills it in
        inside = self._data
        for key in path[:-1]:
            if not isinstance(inside, dict | list):
                return True  # what is around it is gone already
            inside = inside.get(key) if isinstance(inside, dict) else inside[int(key)]
        value = inside.get(path[-1]) if isinstance(inside, dict) else None
        if isinstance(value, dict) and not around:
            # Settings that do not go together: what is plain goes first, because the other maps and lists may be right.
            plain = [key for key, item in value.items() if not isinstance(item, dict | list)]
            self._gone |= {(*path, key) for key in plain}
            for key in plain:
                del value[key]
            if plain:
                return True
        self._gone.add(path)
        if isinstance(inside, dict):
            inside.pop(path[-1], None)
        elif isinstance(inside, list):
            inside[int(path[-1])] = _GONE
        return True


def _plain_copy(value: Any) -> Any:  # noqa: ANN401 - any parsed file
    if isinstance(value, dict):
        return {key: _plain_copy(item) for key, item in value.items()}
    return [_plain_copy(item) for item in value] if isinstance(value, list) else value


def _without_gone(value: Any) -> Any:  # noqa: ANN401 - any parsed file
    if isinstance(value, dict):
        return {key: _without_gone(item) for key, item in value.items()}
    return [_without_gone(item) for item in value if item is not _GONE] if isinstance(value, list) else value


def read_files(path: Path, conf_d: Path | None = None) -> Files:
    """Read and merge the files without looking at what they say. Raises SettingsError."""
    problems: list[str] = []
    documents: list[Document] = []
    for file in (path, *_additions(path, conf_d, problems)):
        try:
            document = load_file(file)
        except YamlFileError as error:
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
    return _merged(documents)


def _merged(documents: list[Document]) -> Files:
    data: dict[Any, Any] = {}
    origins: dict[KeyPath, Document] = {}
    for document in documents:
        _merge(data, document.data, (), document, origins)
    return Files(data, tuple(documents), origins)


def _additions(path: Path, conf_d: Path | None, problems: list[str]) -> list[Path]:
    folder = path.parent / "conf.d" if conf_d is None else conf_d
    try:
        if conf_d is None and not folder.is_dir() and not folder.is_symlink():
            return []  # a link that leads nowhere is reported: the host's own settings are where it should lead
        names = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        problems.append(f"{folder}: cannot be read: {error.strerror}")
        return []
    problems += [
        f"{name}: is not read; call it {name.stem}.yaml"
        for name in names
        if name.suffix != ".yaml" and name.suffix.lower() in _ALSO_MEANT
    ]
    files = [name for name in names if name.suffix == ".yaml"]
    if len(files) > MAX_FILES:
        problems.append(f"{folder}: holds more than {MAX_FILES} settings files")
    return files[:MAX_FILES]


_ALSO_MEANT: Final = {".yaml", ".yml", ".conf", ".json"}
"""Endings of a file in conf.d that was meant to be read. Any other one is a backup or a note."""


def _merge(
    into: dict[Any, Any], data: dict[Any, Any], path: KeyPath, document: Document, origins: dict[KeyPath, Document]
) -> None:
    origins.setdefault(path, document)
    for key, value in data.items():
        below = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key), dict) and key not in _WHOLE:
            _merge(into[key], value, below, document, origins)
            continue
        if key in into:
            _forget(into[key], below, origins)
        into[key] = _copy(value, below, document, origins)


_WHOLE: Final = {"runtime_table"}
"""Maps that are replaced as a whole: points of two batteries' tables would make one of neither."""


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
    options, details = _validated(model, files.data)
    if options is not None:
        return options
    explainer = Explainer(schema(), files.written)
    messages = _in_order(files, [explainer.explain(detail, files.data) for detail in details[:MAX_REPORTED]])
    if len(details) > MAX_REPORTED:
        messages.append(f"{files.documents[0].name}: and {len(details) - MAX_REPORTED} more mistakes")
    raise SettingsError(messages)


def _validated(model: type[_Options], data: Any) -> tuple[_Options | None, list[ErrorDetails]]:  # noqa: ANN401 - any parsed file
    """Return the options, or pydantic's errors: not its exception, whose text quotes every value."""
    try:
        # As JSON, because there a list is good for a tuple and text for a path, and nothing else is coerced.
        return model.model_validate_json(json.dumps(data)), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    # A list is called too short when its items have mistakes, which are reported themselves.
    around = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    return None, [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in around]


def _in_order(files: Files, mistakes: Sequence[Mistake]) -> list[str]:
    def place(mistake: Mistake) -> tuple[int, int, int]:
        document = files.document(mistake.path)
        at = document.key_position(mistake.path) if mistake.of_key else document.position(mistake.path)
        return (files.documents.index(document), *at)

    ordered = sorted(mistakes, key=place)
    return list(dict.fromkeys(f"{files.where(mistake.path, of_key=mistake.of_key)}: {mistake}" for mistake in ordered))


MESSAGES: Final = "messages.sqlite"
"""The queue of messages, in the journal's folder."""


def cross_checks(settings: Settings, upses: Sequence[str], lacks: Callable[[KeyPath], bool]) -> list[Mistake]:
    """Return what the schema cannot see: names that must agree.

    upses: names under ups, also of those with mistakes. lacks: whether a value at or below a path was taken out.
    """
    mistakes: list[Mistake] = []
    names = ", ".join(upses)
    if settings.feeds is None and len(upses) > 1 and not lacks(("feeds",)):
        mistakes.append(Mistake(("ups",), f"several UPSes: set feeds to those that feed this host (of {names})"))
    if settings.feeds is not None and upses:
        for place, name in enumerate(settings.feeds.supplies):
            if name not in upses:
                mistakes.append(Mistake(("feeds", "supplies", place), f"unknown UPS (known: {names})"))
    mistakes += _same_twice(settings, lacks)
    if settings.traps is not None and upses:
        unknown = sorted(settings.traps.names - set(upses))
        mistakes += [Mistake(("traps",), f"no UPS {name} under ups (known: {names})") for name in unknown]
    mistakes += _trainers_twice(settings)
    if Path(settings.journal.path).name == MESSAGES and not lacks(("journal", "path")):
        mistakes.append(Mistake(("journal", "path"), f"{MESSAGES} is the queue of messages there; give another name"))
    return mistakes


def _loads_twice(settings: Settings, written: dict[Any, Any]) -> list[Mistake]:
    """Return the runtime tables with one load in two spellings (50 and '50.0'): one of the two values was dropped."""
    return [
        Mistake(("ups", name, "runtime_table"), "has two values for one load; keep one")
        for name, ups in written.items()
        if len(ups.get("runtime_table") or ()) > len(settings.ups[str(name)].runtime_table or ())
    ]


def _trainers_twice(settings: Settings) -> list[Mistake]:
    """Return the trainers that have the name or the url of an earlier one: one job would be asked and counted twice."""
    mistakes: list[Mistake] = []
    seen: dict[tuple[str, str], int] = {}
    for place, trainer in enumerate(settings.trainers):
        for key in ("name", "url"):
            value = getattr(trainer, key, None)
            first = place if value is None else seen.setdefault((key, value), place)
            if first != place:
                what = f"trainers[{first}] has this {key} already; give each its own"
                mistakes.append(Mistake(("trainers", place, key), what))
    return mistakes


_PEER: Final = {"snmp": "card", "nut": "UPS of the same upsd", "apcupsd": "apcupsd"}


def _same_twice(settings: Settings, lacks: Callable[[KeyPath], bool]) -> list[Mistake]:
    """Return the sources that ask the same peer as another one: one peer is one witness.

    Within each UPS, and among those that feed this host: a card that counts as two UPSes hides the loss of one.
    """
    feeding = set(settings.ups if settings.feeds is None else settings.feeds.supplies)
    mistakes: list[Mistake] = []
    seen: list[tuple[str, int, SourceOptions]] = []
    for ups, its in settings.ups.items():
        for place, source in enumerate(its.sources):
            if lacks(("ups", ups, "sources", place)):
                continue
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
