r"""logfmt: `key=value key="two words"` on one line, whatever the values hold (https://brandur.org/logfmt).

A hostile UPS names itself `x\n... level=error`; here that stays one value of one line, and shows as what it is.
"""

import math
import re
from collections.abc import Iterable

VALUE_CHARS = 1024
"""Longest value; what is cut off is counted in its place."""

_HARMLESS = re.compile(r"[^\x00-\x20\x7f-\xa0\"\\=]*")
_KEY = re.compile(r"[^A-Za-z0-9_.]")


def printable(text: str, limit: int = VALUE_CHARS, keep: str = "") -> str:
    """Return text with everything escaped that a terminal or a log reader could act on, cut at limit.

    Escaped are controls, line and paragraph separators, surrogates, and the format characters that turn text around;
    not those in keep (such as the newlines of a traceback).
    """
    left_out = len(text) - limit
    if left_out > 0:
        text = text[:limit]
    if not text.isprintable():
        text = "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)
    return f"{text}...(+{left_out} chars)" if left_out > 0 else text


def _escaped(char: str) -> str:
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    if short is not None:
        return short
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe_key(key: str) -> str:
    """Return key with nothing in it that could end it early."""
    return _KEY.sub("_", key)[:64] or "_"


def number(value: float) -> str:
    """Return a number as people write it: at most three decimals, none that are zero."""
    if isinstance(value, int) or not math.isfinite(value) or abs(value) >= 1e15:
        return str(value)
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def encode(pairs: Iterable[tuple[str, object]]) -> str:
    """Return one line without its newline. Values are None, bool, int, float or what str() makes of them."""
    return " ".join(f"{safe_key(key)}={_value(value)}" for key, value in pairs)


def _value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number(value)
    text = str(value)
    left_out = len(text) - VALUE_CHARS
    text = text[:VALUE_CHARS]
    if not text or not _HARMLESS.fullmatch(text) or left_out > 0:
        # Backslashes and quotes of the value are doubled; those that `printable` adds stay single.
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    text = printable(text, len(text))
    return f"{text}...(+{left_out} chars)" if left_out > 0 else text
