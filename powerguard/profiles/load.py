"""Reading profile files: the packaged ones and a site's own, with every error at its file and line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from powerguard import strictyaml
from powerguard.profiles.schema import Kind, Profile

SITE_FOLDER = Path("/etc/powerguard/profiles.d")


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

    A bad site file is left out and told in `problems`: a typing error must not take the working families away.
    Raises ProfileError only for a packaged file, which would be a broken installation.
    """
    by_name = {profile.name: profile for profile in _packaged()}
    problems: list[str] = []
    if site_folder is not None:
        read: dict[str, Path] = {}
        for path in _site_files(site_folder, problems):
            try:
                profile = parse_profile(path.read_text(encoding="utf-8"), str(path))
            except (OSError, UnicodeDecodeError) as error:
                problems.append(f"{path}: cannot be read: {error}")
            except ProfileError as error:
                problems.append(str(error))
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


def _packaged() -> Iterator[Profile]:
    for file in resources.files("powerguard.profiles").iterdir():
        if file.name.endswith(".yaml"):
            yield parse_profile(file.read_text(encoding="utf-8"), file.name)


def parse_profile(text: str, name: str) -> Profile:
    """Return the profile of one file. Raises ProfileError with every mistake, each at its file:line:column."""
    try:
        document = strictyaml.load(text, name)
    except strictyaml.StrictYamlError as error:
        raise ProfileError(str(error)) from error
    try:
        # By way of JSON: strict, yet a list may become a tuple and a word an enum.
        return Profile.model_validate_json(json.dumps(document.data))
    except ValidationError as error:
        lines: list[str] = []
        for problem in error.errors():
            for loc, what in problem.get("ctx", {}).get("mistakes", [(problem["loc"], problem["msg"])]):
                lines.append(_tell(document, loc, problem["type"], what))
        raise ProfileError("\n".join(dict.fromkeys(lines))) from error


def _tell(document: strictyaml.Document, loc: tuple[int | str, ...], kind: str, what: str) -> str:
    path = _in_file(document.data, loc)
    where = document.where_key(path) if kind in {"extra_forbidden", "profile"} else document.where(path)
    if kind == "extra_forbidden":
        what = "unknown key"
    elif kind == "missing":
        what = f"{loc[-1]} is missing"
        path = path if path and path[-1] == loc[-1] else (*path, loc[-1])
    dotted = ".".join(str(part) for part in path)
    return f"{where}: {dotted + ': ' if dotted else ''}{what.removeprefix('Value error, ')}"


def _in_file(data: object, loc: tuple[int | str, ...]) -> strictyaml.KeyPath:
    """Return the part of pydantic's location that is in the file: number keys as numbers, its own marks left out."""
    path: list[strictyaml.Key] = []
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
