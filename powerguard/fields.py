"""A JSON object from a peer that may be hostile, broken or newer: read key by key. Stdlib only, no I/O.

Every number has a range and every text a length; unknown keys are ignored; a mistake is reported with its
key, what would be right, and never more than a glimpse of what came.
"""

import json
import re
from enum import StrEnum
from typing import Any, Self, TypeVar

MAX_TEXT = 512

_Word = TypeVar("_Word", bound=StrEnum)
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}")
"""What can stand as an id in a URL and in a log line."""
_DIGEST = re.compile(r"[a-z0-9]{1,16}:[0-9a-f]{16,128}")


class FieldError(ValueError):
    """What is wrong with an object, in words for a person."""


class Fields:
    """A JSON object that is read key by key, each with its type and range; None or "" where a key is not there.

    Every method but `raw` raises FieldError for a value that is not what it must be.
    """

    def __init__(self, value: dict[str, Any], where: str = "") -> None:
        """Take an object; where: what leads to its keys, such as `estimate.`."""
        self._value = value
        self._where = where

    @classmethod
    def of(cls, body: bytes, most_bytes: int) -> Self:
        """Decode a message. Raises FieldError for whatever is no JSON object."""
        if len(body) > most_bytes:
            msg = f"a message of {len(body)} bytes (at most {most_bytes})"
            raise FieldError(msg)
        try:
            value = json.loads(body)
        except RecursionError:
            msg = "not JSON that we read: nested too deeply"
            raise FieldError(msg) from None
        except ValueError as error:  # also bad UTF-8, and numbers of more digits than Python converts
            msg = f"not JSON: {clean_text(str(error), 120)}"
            raise FieldError(msg) from None
        if not isinstance(value, dict):
            msg = f"not a JSON object but {clean_text(_shown(value), 60)}"
            raise FieldError(msg)
        return cls(value)

    def raw(self, key: str) -> object:
        """Return what came, whatever it is."""
        return self._value.get(key)

    def inner(self, key: str) -> "Fields | None":
        """Read an object within this one."""
        value = self._value.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._bad(key, "an object", value)
        return Fields(value, f"{self._where}{key}.")

    def whole(self, key: str, most: int) -> int | None:
        """Read a whole number of 0 to `most`."""
        value = self._value.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self._bad(key, f"a whole number of 0 to {most}", value)
        return value

    def number(self, key: str, most: float) -> float | None:
        """Read a number of 0 to `most`."""
        value = self._value.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise self._bad(key, f"a number of 0 to {most:g}", value)
        return float(value)

    def at_most(self, key: str, most: float) -> float | None:
        """Read a guess: bytes left over a rate of next to nothing is huge or endless, and no mistake."""
        value = self._value.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > most:
            return most
        return self.number(key, most)

    def flag(self, key: str) -> bool:
        """Read true or false; false where it is not there."""
        value = self._value.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._bad(key, "true or false", value)
        return value

    def text(self, key: str, limit: int) -> str:
        """Read a text: printable, cut at `limit` characters."""
        value = self._value.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._bad(key, "a text", value)
        return clean_text(value, limit)

    def required_text(self, key: str, limit: int) -> str:
        """Read a text that must be there."""
        text = self.text(key, limit)
        if not text:
            raise self._bad(key, "a text", self._value.get(key))
        return text

    def identifier(self, key: str) -> str:
        """Read an id, which must be there."""
        value = self._value.get(key)
        if not isinstance(value, str) or not IDENTIFIER.fullmatch(value):
            raise self._bad(key, "1 to 128 of A-Z a-z 0-9 . _ : @ + -, led by a letter or digit", value)
        return value

    def digest(self, key: str) -> str:
        """Read a digest with the name of its algorithm."""
        value = self._value.get(key)
        if value is None or value == "":
            return ""
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            raise self._bad(key, "an algorithm, a colon and hexadecimal digits, such as sha256:9f86...", value)
        return value

    def word(self, key: str, words: type[_Word], default: _Word | None, *, unknown: _Word | None = None) -> _Word:
        """Read one of `words`. default: where it is not there; None: it must be. unknown: for any other word."""
        value = self._value.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, str):
            try:
                return words(value)
            except ValueError:
                if unknown is not None:
                    return unknown
        raise self._bad(key, "one of " + ", ".join(words), value)

    def _bad(self, key: str, right: str, value: object) -> FieldError:
        return FieldError(f"{self._where}{key}: must be {right}, got {clean_text(_shown(value), 60)}")


def clean_text(text: str, limit: int = MAX_TEXT) -> str:
    """Return text fit for a log line: at most `limit` characters, all printable (no newlines, no escapes)."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


def _shown(value: object) -> str:
    """Show a value of unknown size: never the whole of it."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    return "nothing" if value is None else repr(value[:60] if isinstance(value, str) else value)
