"""Explains a mistake in the settings: what is expected, what is there, what to write.

pydantic finds the mistakes; its texts speak of inputs and tags. Ours are made from the JSON Schema of the settings,
which knows what belongs at each path. A value is quoted only where no secret can stand.
"""

import difflib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import ErrorDetails

from powerguard.options import Secret
from powerguard.yamlfile import Key, KeyPath

Node = dict[str, Any]
"""One place of a JSON Schema."""

_REFERENCE: Final = Secret.__name__
"""Title, in a schema, of the class that says where a secret is kept."""

_TYPES: Final = {"boolean": "true or false", "string": "text", "object": "a map of keys and values", "array": "a list"}
_BOOLEANS: Final = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_UNITS: Final = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 1.0, "kw": 1e3}
_SIZES: Final = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2.0**20, "gib": 2.0**30}
_AMOUNT: Final = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?) *([A-Za-z%]*)")
_LOGIN: Final = re.compile(r"//[^/\s]*@")
_SHOWN: Final = 48
_CABLES: Final = ("usb", "usbhid", "hid", "serial", "modbus")


@dataclass(frozen=True, slots=True)
class Mistake:
    """path: of the value, or of the key where `of_key`. what: what is wrong there, and the fix."""

    path: KeyPath
    what: str
    of_key: bool = False

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.what}" if self.path else self.what


def dotted(path: KeyPath) -> str:
    """Return a path for display: ups.rack-a.sources[0].host, ups.rack-a.runtime_table[50]."""
    text = ""
    for key in path:
        if isinstance(key, int | float):
            text += f"[{key}]"
        else:
            shown = key if re.fullmatch(r"[\w.-]{1,60}", key) else repr(key[:60])
            text += f".{shown}" if text else shown
    return text


@dataclass(slots=True)
class _Place:
    """The place of an error. node: its schema; parent: the one around it; secret: show no value."""

    path: KeyPath
    node: Node
    parent: Node
    value: Any
    text: str = ""
    secret: bool = False
    of_key: bool = False


class Explainer:
    """Explains the mistakes of one kind of settings.

    schema: its JSON Schema, as pydantic makes it. written: a scalar as it stands in the file, where 1.10 is not 1.1.
    """

    def __init__(self, schema: Node, written: Callable[[KeyPath], str | None] = lambda _: None) -> None:
        self._schema = schema
        self._written = written

    def explain(self, error: ErrorDetails, data: Any) -> Mistake:  # noqa: ANN401 - any parsed file
        """Explain one of pydantic's errors about `data`."""
        place = self._locate(error["loc"], data)
        kind, context = error["type"], error.get("ctx", {})
        if kind == "missing":
            return Mistake(place.path, self._missing(place))
        if kind == "extra_forbidden":
            return Mistake(place.path, self._unknown(place), of_key=True)
        if kind in {"union_tag_invalid", "union_tag_not_found"}:
            return self._tag(place)
        if kind == "value_error":
            return Mistake(place.path, str(context.get("error", error["msg"])))
        if place.of_key:
            wanted = place.node.get("x-keys") or _plain(error["msg"])
            return Mistake(place.path, f"as a key here must be {wanted}", of_key=True)
        return Mistake(place.path, self._wrong(place, _plain(error["msg"])))

    def _locate(self, loc: tuple[int | str, ...], data: Any) -> _Place:  # noqa: ANN401 - any parsed file
        """Follow pydantic's location through schema and data; it names the tags of unions among the keys."""
        place = _Place(path=(), node=self._schema, parent={}, value=data)
        for step in loc:
            node = self.resolve(place.node)
            if step == "[key]" and step not in (place.value if isinstance(place.value, dict) else ()):
                place.of_key, place.node = True, place.parent
                continue
            tags = node.get("discriminator", {}).get("mapping", {})
            if step in tags:
                place.node = {"$ref": tags[step]}
                continue
            place.secret = place.secret or node.get("title") == _REFERENCE
            key = _key(place.value, step)
            place.path, place.parent, place.node = (*place.path, key), node, self.child(node, step)
            place.value = _below(place.value, key)
        place.secret = place.secret or self.resolve(place.node).get("title") == _REFERENCE
        return place

    def resolve(self, node: Node) -> Node:
        """Follow references, and look through "or null". A description next to a reference wins.

        allOf of one is how pydantic before 2.9 adds a description to a reference.
        """
        while True:
            beside = {key: value for key, value in node.items() if key not in {"$ref", "anyOf", "allOf"}}
            if "$ref" in node:
                found = self._schema["$defs"][node["$ref"].rpartition("/")[2]]
            else:
                together: list[Node] = node.get("anyOf") or node.get("allOf") or []
                options = [option for option in together if option.get("type") != "null"]
                if len(options) != 1:
                    return node
                found = options[0]
            node = {**found, **beside}
            if "title" in found:
                node["title"] = found["title"]

    def child(self, node: Node, step: int | str) -> Node:
        """Return the schema of one key or item below a resolved node; {} if it has none."""
        if isinstance(step, int) and step < len(node.get("prefixItems", ())):
            found = node["prefixItems"][step]
        elif isinstance(step, int) and "items" in node:
            found = node["items"]
        else:
            found = node.get("properties", {}).get(step)
            found = found or next(iter(node.get("patternProperties", {}).values()), None)
            found = found or node.get("additionalProperties")
        return found if isinstance(found, dict) else {}

    def _missing(self, place: _Place) -> str:
        node = self.resolve(place.node)
        wanted = self.wanted(place.node)
        if place.secret or not node.get("examples") or _choices(node):
            return f"is required ({wanted})" if wanted else "is required"
        return f"is required (write {place.path[-1]}: {written(node['examples'][0])} or the like)"

    def _unknown(self, place: _Place) -> str:
        name = str(place.path[-1])[:_SHOWN]
        known = sorted(place.parent.get("properties", {}))
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        if near:
            return f"unknown key (did you mean {near[0]!r}?)"
        for section, node in self._schema.get("properties", {}).items():
            if name in self.resolve(node).get("properties", {}):
                return f"unknown key (it belongs under {section!r})"
        return f"unknown key (known here: {', '.join(known)})" if known else "unknown key"

    def _tag(self, place: _Place) -> Mistake:
        union = self.resolve(place.node).get("discriminator", {})
        name, tags = str(union.get("propertyName", "kind")), sorted(union.get("mapping", {}))
        given = _below(place.value, name)
        if given is None:
            return Mistake((*place.path, name), f"is required ({_one_of(tags)})")
        cable = "nut" in tags and str(given).lower() in _CABLES
        hint = " (a UPS on a cable is read through NUT or apcupsd)" if cable else _write(_near(given, tags))
        return Mistake((*place.path, name), f"must be {_one_of(tags)}, got {_shown(given)}{hint}")

    def wanted(self, node: Node) -> str:
        """Return what belongs at a node of the schema; "" if the schema does not say."""
        node = self.resolve(node)
        kind, choices = node.get("type", ""), _choices(node)
        if node.get("title") == _REFERENCE:
            return "{credential: NAME} or {file: PATH}"
        if "discriminator" in node:
            union = node["discriminator"]
            return f"a map with {union.get('propertyName', 'kind')}: {_one_of(sorted(union.get('mapping', {})))}"
        if "x-wanted" in node:
            return str(node["x-wanted"])
        if choices:
            return _one_of(choices)
        if kind in {"integer", "number"}:
            parts = ("a whole number" if kind == "integer" else "", _range(node))
            return ", ".join(word for word in parts if word) or "a number"
        kind_of = _TYPES.get(str(kind), "")
        if kind == "string" and node.get("examples"):
            kind_of = f"text such as {written(node['examples'][0])}"
        return f"{kind_of}{_size(node)}"

    def _wrong(self, place: _Place, message: str) -> str:
        wanted = self.wanted(place.node)
        text = f"must be {wanted or message}"
        if place.secret:
            return f"{text}; never write the secret itself into the settings"
        if not wanted:
            return text  # A place that the schema does not describe may be that of a secret.
        if isinstance(place.value, int | float) and not isinstance(place.value, bool):
            place.text = self._written(place.path) or str(place.value)
        got = place.text or _shown(place.value)
        return f"{text}, got {got}{_write(_better(self.resolve(place.node), place))}"


def _better(node: Node, place: _Place) -> str:
    """Return what was probably meant, where it is allowed; else ""."""
    kind, value, choices = node.get("type"), place.value, _choices(node)
    if kind == "object" and value is not None and not isinstance(value, dict) and node.get("examples"):
        return f"{place.path[-1]}: {written(node['examples'][0])}"
    if value is None or isinstance(value, dict | list):
        return ""
    if choices:
        return _near(value, choices)
    word = str(value).lower()
    if kind == "boolean":
        return word if word in {"true", "false"} else _BOOLEANS.get(word, "")
    if isinstance(value, bool):
        return ""
    if kind in {"integer", "number"}:
        return _number(str(value), node, of_bytes=str(place.path[-1]).endswith("_bytes"))
    if kind == "string" and isinstance(value, int | float):
        return f"'{place.text}'"
    if kind == "array":
        return f"[{value}]" if re.fullmatch(r"[\w./:-]+", str(value)) else ""
    return ""


def _number(text: str, node: Node, *, of_bytes: bool) -> str:
    """Return the number that "20%", "2m", "8.5GB" or "010" probably mean, where it is in range; else ""."""
    match = _AMOUNT.fullmatch(text.replace("_", "").replace(",", "."))
    if match is None:
        return ""
    amount, unit = float(match[1]), match[2].lower()
    if unit == "%":
        amount *= 0.01 if min(node.get("maximum", math.inf), node.get("exclusiveMaximum", math.inf)) <= 1.0 else 1.0
    else:
        scale = (_SIZES if of_bytes else _UNITS).get(unit)
        if scale is None:
            return ""
        amount *= scale
    if not _within(node, amount) or (node.get("type") == "integer" and amount != int(amount)):
        return ""
    return f"{amount:.12g}"


def _within(node: Node, amount: float) -> bool:
    low, above = float(node.get("minimum", -math.inf)), float(node.get("exclusiveMinimum", -math.inf))
    high, below = float(node.get("maximum", math.inf)), float(node.get("exclusiveMaximum", math.inf))
    return low <= amount <= high and above < amount < below


def _range(node: Node) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"{low:.12g} to {high:.12g}"
    bounds = (("at least", low), ("above", above), ("at most", high), ("below", below))
    return " and ".join(f"{word} {bound:.12g}" for word, bound in bounds if bound is not None)


def _size(node: Node) -> str:
    for low, high, unit in (("minItems", "maxItems", "items"), ("minProperties", "maxProperties", "entries")):
        if node.get(low) is not None or node.get(high) is not None:
            return _bounds(node.get(low), node.get(high), unit)
    return _bounds(None, node.get("maxLength"), "characters")


def _bounds(low: int | None, high: int | None, unit: str) -> str:
    if low and high:
        return f" of {low} to {high} {unit}"
    return f" of {low} or more {unit}" if low else f" of at most {high} {unit}" if high else ""


def _choices(node: Node) -> list[str]:
    return [str(choice) for choice in node.get("enum", [node["const"]] if "const" in node else [])]


def _one_of(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}" if choices else "no value"


def _near(value: object, choices: list[str]) -> str:
    near = difflib.get_close_matches(str(value)[:_SHOWN].lower(), choices, n=1, cutoff=0.6)
    return near[0] if near else ""


def _write(better: str) -> str:
    return f" (write {better})" if better else ""


def written(value: object) -> str:
    """Return a value as one would write it in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(written(item) for item in value) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./-]*", value) and value not in {"true", "false", "null"}:
        return value
    return json.dumps(value, ensure_ascii=False)


def _shown(value: object) -> str:
    """Return a value as it may be shown: short, printable, without a login in a URL."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a map" if value else "an empty map"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = _LOGIN.sub("//...@", str(value))
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return ascii(text) if isinstance(value, str) else text


def _plain(message: str) -> str:
    """Return the end of one of pydantic's sentences, for the rare kinds that we do not word ourselves."""
    for start in ("Input should be ", "Value should have ", "String should ", "Value error, "):
        message = message.removeprefix(start)
    return message[:1].lower() + message[1:]


def _key(value: object, step: int | str) -> Key:
    """Return the key that stands in the data for a step of pydantic's, which sees every key as text."""
    if isinstance(value, dict) and step not in value:
        return next((key for key in value if str(key) == step), step)
    return step


def _below(value: object, key: Key) -> Any:  # noqa: ANN401 - any parsed file
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return value[key]
    return None
