"""Writes docs/reference/settings.md from the schema: `python -m powerguard.settings.reference > docs/...`."""

import sys
from typing import Any, Final

from powerguard.settings.explain import Explainer, Node, written
from powerguard.settings.schema import json_schema

_HEAD: Final = """\
# Settings

Made from the schema by `python -m powerguard.settings.reference`; a test holds it to be the same.
[config/powerguard.yaml](../../config/powerguard.yaml) is the commented sample. `powerguard config validate` checks
a file, `powerguard config show --origin` says which line a value comes from.

- The file is `/etc/powerguard/powerguard.yaml`; `conf.d/*.yaml` beside it come on top in the order of their names. Maps
  merge, everything else replaces.
- Units stand at the end of the names: `_s` seconds, `_h` hours, `_w` watts, `_pct` percent, `_bytes` bytes. Shares
  (`margin`, `health`, `paused_load`) are 0 to 1.
- YAML without its traps: only `true` and `false` are booleans, numbers are decimal, a key stands once; anchors,
  aliases, merge keys and tags are refused.
- A secret is named, never written: `{credential: NAME}` is a systemd credential, `{file: /PATH}` a file that nobody but
  its owner can read.
- SIGHUP reads the files again. It is refused in an outage or a drill, and when a file has a mistake; the log says why.
- Exit code 78: the settings have mistakes. All of them are told at once.
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
