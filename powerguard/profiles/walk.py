"""Recorded walks of devices, in the snmprec form that others use as well: one `OID|tag|value` a line.

A site that meets a new card records one; a profile's tests are walks; `#` begins a comment line.
"""

from collections.abc import Mapping
from typing import Final

from powerguard.profiles.values import Answer, Missing, Oid, parts

_NUMBERS: Final = frozenset({"2", "65", "66", "67", "70"})
_STRINGS: Final = frozenset({"4", "64", "68"})


class WalkError(Exception):
    """A walk that cannot be read: file:line: what."""


def parse_walk(text: str, name: str) -> dict[str, Answer]:
    """Return the answers of a recorded walk. Raises WalkError with the first line that is not understood."""
    answers: dict[str, Answer] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        oid, _, rest = line.partition("|")
        tag, bar, value = rest.partition("|")
        try:
            parts(oid)
            answers[Oid(oid)] = _answer(tag, value)
        except ValueError as error:
            msg = f"{name}:{number}: not OID|tag|value, as in 1.3.6.1.2.1.33.1.4.1.0|2|3"
            raise WalkError(msg) from error
        if not bar:
            msg = f"{name}:{number}: no value; a line is OID|tag|value"
            raise WalkError(msg)
    return answers


def _answer(tag: str, value: str) -> Answer:
    if tag in _NUMBERS:
        return int(value)
    if tag in _STRINGS:
        return value.encode()
    if tag.endswith("x") and tag[:-1] in _STRINGS:
        return bytes.fromhex(value)
    if tag == "6":
        oid = value.removeprefix(".")
        parts(oid)
        return Oid(oid)
    if tag == "5":
        return Missing.NULL
    msg = f"unknown tag {tag}"
    raise ValueError(msg)


def format_walk(answers: Mapping[str, Answer]) -> str:
    """Return a walk that `parse_walk` reads; what had no value is left out. All numbers become INTEGER."""
    lines = []
    for oid in sorted(answers, key=parts):
        match answers[oid]:
            case int(number):
                lines.append(f"{oid}|2|{number}")
            case bytes(text) if text.isascii() and text.decode().isprintable():
                lines.append(f"{oid}|4|{text.decode()}")
            case bytes(text):
                lines.append(f"{oid}|4x|{text.hex()}")
            case Oid() as value:
                lines.append(f"{oid}|6|{value}")
            case Missing.NULL:
                lines.append(f"{oid}|5|")
            case _:
                pass
    return "\n".join(lines) + "\n"
