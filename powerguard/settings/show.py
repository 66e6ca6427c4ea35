"""Settings for display: effective values, their origins, and the changes of a reload.

Writes docs/reference/settings.md from the schema: `python -m powerguard.settings.show > docs/...`.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any, Final

import yaml

from powerguard.options import Secret
from powerguard.settings.explain import Explainer, Node, dotted, written
from powerguard.settings.load import Files
from powerguard.settings.schema import Settings, json_schema
from powerguard.yamlfile import FRACTION, KeyPath


class _Dumper(yaml.SafeDumper):
    """Quotes text that `yamlfile` would read as a number and PyYAML would not, such as 1e3."""


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


_HEAD: Final = """\
# Settings

Generated from the schema by `python -m powerguard.settings.show`; a test compares them.
[config/powerguard.yaml](../../config/powerguard.yaml) is the commented sample. `powerguard config validate` checks
a file, `powerguard config show --origin` shows the line that each value comes from.

- The file is `/etc/powerguard/powerguard.yaml`; then `conf.d/*.yaml` in the same folder, in the order of
  their names. Maps are merged, other values replaced.
- Names end with the unit: `_s` seconds, `_h` hours, `_w` watts, `_pct` percent, `_bytes` bytes. Shares
  (`margin`, `health`, `paused_load`) are 0 to 1.
- Strict YAML: only `true` and `false` are booleans, numbers are decimal, a key may appear once; anchors, aliases, merge
  keys and tags are refused.
- The settings name a secret but never contain one: `{credential: NAME}` is a systemd credential, `{file: /PATH}` a
  file that only its owner can read.
- SIGHUP (`systemctl reload powerguard.service`) reads the files again. A reload is refused in an outage, in a drill,
  and if a file has a mistake; the log gives the reason.
- Exit status 78: the settings have mistakes; all of them are reported.
"""


def render() -> str:
    """Return the page."""
    schema = json_schema()
    explainer = Explainer(schema)
    parts = [_HEAD, _section(explainer, "", schema, 2)]
    return "\n".join(parts)


def _section(explainer: Explainer, path: str, node: Node, depth: int) -> str:
    """Render one map of settings and, after it, the maps inside it."""
    title = f"`{path}`" if path else "Top level"
    lines = [f"{'#' * min(depth, 4)} {title}", ""]
    if path and node.get("description"):
        lines += [str(node["description"]), ""]
    lines += ["| setting | what it is | allowed | default |", "| --- | --- | --- | --- |"]
    inner: list[tuple[str, Node]] = []
    required = node.get("required", [])
    for name, field in node["properties"].items():
        full = explainer.resolve(field)
        lines.append(
            f"| `{name}` | {_cell(full.get('description', ''))} | {_allowed(explainer, field)} | "
            f"{_default(name, full, required)} |"
        )
        inner += _below(explainer, f"{path}.{name}" if path else name, full)
    lines.append("")
    return "\n".join([*lines, *(_section(explainer, name, below, depth + 1) for name, below in inner)])


def _below(explainer: Explainer, path: str, node: Node) -> list[tuple[str, Node]]:
    """Return path and schema of the maps of settings at or under a node: one for each kind; none in a secret."""
    if node.get("title") == "Secret":
        return []
    if "discriminator" in node:
        kinds = node["discriminator"]["mapping"]
        return [(f"{path} (kind: {kind})", explainer.resolve({"$ref": ref})) for kind, ref in kinds.items()]
    if "properties" in node:
        return [(path, node)]
    if node.get("type") == "array":
        return _below(explainer, f"{path}[]", explainer.resolve(node.get("items", {})))
    if node.get("type") == "object":
        return _below(explainer, f"{path}.NAME", explainer.resolve(explainer.child(node, "NAME")))
    return []


def _allowed(explainer: Explainer, field: Node) -> str:
    wanted = explainer.wanted(field)
    node = explainer.resolve(field)
    if node.get("type") == "object" and "properties" in node and node.get("title") != "Secret":
        return "a map, below"
    nullable = any(option.get("type") == "null" for option in field.get("anyOf", []))
    return _cell(f"{wanted}{' or null' if nullable else ''}")


def _default(name: str, node: Node, required: list[str]) -> str:
    if name in required:
        return "required"
    if "default" not in node:
        return "see below" if "properties" in node else "empty"
    value: Any = node["default"]
    return "not set" if value is None else f"`{written(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
