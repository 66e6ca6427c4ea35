"""Reading profile files: the packaged ones and a site's own, with every error at its file and line."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from powerguard import yamlfile
from powerguard.ups.profiles.schema import Kind, Profile, Root

SITE_FOLDER = Path("/etc/powerguard/profiles.d")


_MUST: Final = "must be "
_WANTED: Final = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
    "tuple_type": "a range [low, high]",
    "too_long": "a range [low, high]",
}
"""The expected value of each pydantic error, in words for an author of profiles."""


class ProfileError(Exception):
    """A profile file cannot be used; one line for each mistake: file:line:column: field: what is wrong."""


@dataclass(frozen=True, slots=True)
class Profiles:
    """All known families by name. problems: site files that were left out, one line each, for doctor and the log."""

    by_name: dict[str, Profile]
    problems: tuple[str, ...] = ()

    def ranked(self, kind: Kind = "ups") -> tuple[Profile, ...]:
        """Return those of one kind, most trusted first."""
        found = (profile for profile in self.by_name.values() if profile.kind == kind)
        return tuple(sorted(found, key=lambda profile: (-profile.rank, profile.name)))

    def every(self) -> tuple[Profile, ...]:
        """Return UPSes, then PDUs, most trusted first."""
        return (*self.ranked("ups"), *self.ranked("pdu"))


def load_profiles(site_folder: Path | None = SITE_FOLDER) -> Profiles:
    """Return the packaged profiles and the site's own (*.yaml); a site's file replaces a packaged one of its name.

    A bad site file is left out and listed in `problems`: a typing error must not take the working families away.
    Raises ProfileError only for a packaged file, which would be a broken installation.
    """
    by_name = {profile.name: profile for profile in _packaged()}
    problems: list[str] = []
    if site_folder is not None:
        read: dict[str, Path] = {}
        for path in _site_files(site_folder, problems):
            try:
                profile = read_profile(path)
            except ProfileError as error:
                problems.append(str(error).replace("\n", "; "))
            else:
                if profile.name in read:
                    problems.append(f"{path}: profile {profile.name} is already in {read[profile.name]}; left out")
                    continue
                read[profile.name] = path
                by_name[profile.name] = profile
    return Profiles(by_name, tuple(problems))


def _site_files(folder: Path, problems: list[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".yaml")
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{folder}: cannot be read: {error.strerror}")
        return []


@cache
def _packaged() -> tuple[Profile, ...]:
    """Return the profiles that come with the package. Each source and each check of the settings asks for them."""
    files = resources.files("powerguard.ups.profiles").iterdir()
    return tuple(
        parse_profile(each.read_text(encoding="utf-8"), each.name) for each in files if each.name.endswith(".yaml")
    )


def read_profile(path: Path) -> Profile:
    """Return the profile of a file, as `parse_profile` does.

    An object that is not a file (a pipe) or too large is a mistake too.
    """
    try:
        document = yamlfile.load_file(path)
    except yamlfile.YamlFileError as error:
        raise ProfileError(str(error)) from error
    return _profile(document)


def parse_profile(text: str, name: str) -> Profile:
    """Return the profile of a text. Raises ProfileError with every mistake, each at its file:line:column."""
    try:
        document = yamlfile.load(text, name)
    except yamlfile.YamlFileError as error:
        raise ProfileError(str(error)) from error
    return _profile(document)


def _profile(document: yamlfile.Document) -> Profile:
    base = document.data.get("base") if isinstance(document.data, dict) else None
    root = Root(base if isinstance(base, str) and not base.startswith(".") else None)
    try:
        # By way of JSON: strict, yet a list may become a tuple and a word an enum.
        return Profile.model_validate_json(json.dumps(document.data), context=root)
    except ValidationError as error:
        raise ProfileError("\n".join(_lines(document, error))) from error


def _lines(document: yamlfile.Document, error: ValidationError) -> list[str]:
    """Return one line for each place in the file: what may stand there may be one of several things."""
    found: dict[str, list[str]] = {}
    for problem in error.errors():
        for loc, what in problem.get("ctx", {}).get("mistakes", [(problem["loc"], _in_words(problem))]):
            place, mistake = _located(document, loc, problem["type"], what)
            found.setdefault(place, []).append(mistake)
    lines: list[str] = []
    for place, mistakes in found.items():
        wanted = list(dict.fromkeys(one.removeprefix(_MUST) for one in mistakes if one.startswith(_MUST)))
        others = list(dict.fromkeys(one for one in mistakes if not one.startswith(_MUST)))
        if "a number" in wanted and "a whole number" in wanted:
            wanted.remove("a whole number")
        if wanted:
            others.append(_MUST + (wanted[0] if len(wanted) == 1 else f"{', '.join(wanted[:-1])} or {wanted[-1]}"))
        lines += [f"{place}{what}" for what in others]
    return lines


def _in_words(problem: Any) -> str:  # noqa: ANN401 - pydantic's own
    """Return pydantic's finding as what would be right."""
    kind = problem["type"]
    if kind == "missing" and isinstance(problem["loc"][-1], int):
        kind = "tuple_type"
    if kind in {"enum", "literal_error"}:
        expected = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        return f"{_MUST}one of: {expected}"
    return f"{_MUST}{_WANTED[kind]}" if kind in _WANTED else problem["msg"].removeprefix("Value error, ")


def _located(document: yamlfile.Document, loc: tuple[int | str, ...], kind: str, what: str) -> tuple[str, str]:
    """Return the place, as a message begins, and what is wrong there."""
    path = _in_file(document.data, loc)
    where = document.where_key(path) if kind in {"extra_forbidden", "profile"} else document.where(path)
    if kind == "extra_forbidden":
        what = "unknown key"
    elif kind == "missing" and isinstance(loc[-1], str):
        what = f"{loc[-1]} is missing"
        path = path if path and path[-1] == loc[-1] else (*path, loc[-1])
    dotted = ".".join(str(part) for part in path)
    return f"{where}: {dotted + ': ' if dotted else ''}", what


def _in_file(data: object, loc: tuple[int | str, ...]) -> yamlfile.KeyPath:
    """Return the part of pydantic's location that is in the file: number keys as numbers, its own marks left out."""
    path: list[yamlfile.Key] = []
    for part in loc:
        if isinstance(data, dict):
            key = part if part in data else _as_number(part)
            if key not in data:
                break
            path.append(key)
            data = data[key]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
        else:
            break
    return tuple(path)


def _as_number(part: int | str) -> int | str:
    return int(part) if isinstance(part, str) and part.lstrip("-").isdigit() else part
