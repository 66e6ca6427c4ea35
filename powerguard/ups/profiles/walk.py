"""Recorded walks of devices, in the snmprec form that others use as well: one `OID|tag|value` a line.

A site that meets a new card records one; a profile's tests are walks; `#` begins a comment line. A walk may come from
any person: whatever is in it, reading ends with its answers or with an error at its line, in bounded memory.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid, parts

MAX_BYTES: Final = 16 << 20
MAX_OBJECTS: Final = 100_000
_MAX_VALUE: Final = 65_535
"""Characters of one value: no UDP packet carries more."""
_OID: Final = re.compile(r"[012](\.(0|[1-9][0-9]{0,9})){1,127}")
"""RFC 2578 section 3.5: at most 128 numbers of 32 bits."""
_NET_SNMP: Final = re.compile(r"[0-9A-Za-z.:_-]{1,1024} = [^|]")
"""snmpwalk's `.1.3.6.1.2.1.33.1.4.1.0 = INTEGER: 5`: its words differ by version, options and MIBs that are there."""
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBERS: Final = frozenset({"2", "65", "66", "67", "70"})
_STRINGS: Final = frozenset({"4", "64", "68"})
_NOTHING: Final = {"128": Missing.NO_SUCH_OBJECT, "129": Missing.NO_SUCH_INSTANCE, "130": Missing.END_OF_MIB}


class WalkError(Exception):
    """A walk that cannot be read: file:line: what."""


def read_walk(path: Path) -> dict[str, Answer]:
    """Return the answers of a walk file. Raises WalkError when it cannot be read, is too large or not understood."""
    try:
        if not path.is_file():
            path.stat()
            msg = f"{path}: is not a file; name a recorded walk"
            raise WalkError(msg)
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        msg = f"{path}: {error.strerror}"
        raise WalkError(msg) from error
    if len(raw) > MAX_BYTES:
        msg = f"{path}: larger than {MAX_BYTES >> 20} MiB; no device has that much to say"
        raise WalkError(msg)
    # Strings of devices are in any encoding; their bytes are kept as they are.
    return parse_walk(raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape"), str(path))


def parse_walk(text: str, name: str) -> dict[str, Answer]:
    """Return the answers of a recorded walk. Raises WalkError with the first line that is not understood."""
    answers: dict[str, Answer] = {}
    start, number = 0, 0
    while start < len(text):
        # Not splitlines: it also splits at characters that a device's string may hold.
        end = text.find("\n", start)
        line = text[start : end if end >= 0 else len(text)].rstrip("\r")
        start, number = (end + 1 if end >= 0 else len(text)), number + 1
        if not line.strip() or line.startswith("#"):
            continue
        oid, _, rest = line.partition("|")
        tag, bar, value = rest.partition("|")
        oid = oid.strip().removeprefix(".")
        try:
            if _NET_SNMP.match(line):
                _refuse("net-snmp's own output; record a walk with `powerguard snmp probe HOST --save FILE`")
            _check_oid(oid)
            if not bar:
                _refuse("no value; a line is OID|tag|value")
            answers[Oid(oid)] = _answer(tag.strip(), value)
        except ValueError as error:
            msg = f"{name}:{number}: {error}"
            raise WalkError(msg) from error
        if len(answers) > MAX_OBJECTS:
            msg = f"{name}:{number}: more than {MAX_OBJECTS} objects; leave out what is not the power supply's"
            raise WalkError(msg)
    return answers


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)


def _check_oid(oid: str) -> None:
    if not _OID.fullmatch(oid):
        _refuse("not OID|tag|value, as in 1.3.6.1.2.1.33.1.4.1.0|2|3")


def _answer(tag: str, value: str) -> Answer:
    if len(value) > _MAX_VALUE:
        _refuse(f"a value of {len(value)} characters; no answer holds that")
    if tag in _NUMBERS:
        if not _INTEGER.fullmatch(value.strip()):
            _refuse("no whole number, and the tag says one")
        return int(value)
    if tag in _STRINGS:
        return value.encode("utf-8", "surrogateescape")
    if tag.endswith("x") and tag[:-1] in _STRINGS:
        digits = value.strip()
        if re.fullmatch(r"([0-9A-Fa-f]{2})*", digits) is None:
            _refuse("no hexadecimal digits, two for each byte, and the tag says so")
        return bytes.fromhex(digits)
    if tag == "6":
        oid = value.strip().removeprefix(".")
        if not _OID.fullmatch(oid):
            _refuse("no OID, and the tag says one")
        return Oid(oid)
    if tag == "5":
        return Missing.NULL
    if tag in _NOTHING:
        return _NOTHING[tag]
    kind = "is made up by a simulator's module, no recorded value" if ":" in tag else "is not known"
    _refuse(f"tag {tag[:20]!r} {kind} (2 integer, 4 string, 4x hex string, 5 NULL, 6 OID, 65 to 67 and 70 counters)")


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
