"""Settings as people and programs look at them: effective values, where each comes from, what a reload changes."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from powerguard.options import Secret
from powerguard.settings.explain import dotted
from powerguard.settings.load import Files
from powerguard.settings.schema import Settings
from powerguard.strictyaml import FRACTION, KeyPath


class _Dumper(yaml.SafeDumper):
    """Quotes text that `strictyaml` would read as a number and PyYAML would not, such as 1e3."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"{FRACTION.pattern}\Z"), list("-0123456789"))


def effective(settings: Settings) -> dict[str, Any]:
    """Return every value, defaults included, as plain data. Secrets are references here as everywhere."""
    plain = _plain(settings.model_dump())
    return plain if isinstance(plain, dict) else {}


def as_yaml(settings: Settings) -> str:
    """Return the effective settings as a settings file that says the same."""
    return yaml.dump(effective(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def as_json(settings: Settings) -> dict[str, Any]:
    """Return the effective settings as JSON has them: keys are text."""
    dumped: dict[str, Any] = _text_keys(effective(settings))
    return dumped


def origins(settings: Settings, files: Files) -> list[tuple[str, Any, str | None]]:
    """Return (dotted key, value, "file:line" or None for a default) of every value."""
    return [(dotted(path), value, files.origin(path)) for path, value in _leaves(effective(settings), ())]


def changed(old: Settings, new: Settings) -> list[str]:
    """Return the dotted keys that a reload changes, adds or removes."""
    before, after = (dict(_leaves(effective(settings), ())) for settings in (old, new))
    missing = object()
    paths = dict.fromkeys((*before, *after))
    return [dotted(path) for path in paths if before.get(path, missing) != after.get(path, missing)]


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:  # noqa: ANN401 - plain data
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for place, item in enumerate(value):
            yield from _leaves(item, (*path, place))
    else:
        yield path, value


def _plain(value: Any) -> Any:  # noqa: ANN401 - plain data
    """Turn what pydantic dumps into what a file would say: lists, and whole numbers without a point."""
    if isinstance(value, dict):
        if set(value) == set(Secret.model_fields):
            value = {key: item for key, item in value.items() if item is not None}
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _text_keys(value: Any) -> Any:  # noqa: ANN401 - plain data
    if isinstance(value, dict):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list) else value
