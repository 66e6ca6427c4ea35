"""A walk of a device that its site can give away: every number, and no name, address or serial number."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from powerguard.profiles.schema import Profile
from powerguard.profiles.values import Answer, below
from powerguard.profiles.walk import format_walk

REMOVED: Final = b"<removed>"
_SYS_DESCR: Final = "1.3.6.1.2.1.1.1.0"
_UPS_MODEL: Final = (
    "1.3.6.1.2.1.33.1.1.1.0",
    "1.3.6.1.2.1.33.1.1.2.0",
    "1.3.6.1.2.1.33.1.1.3.0",
    "1.3.6.1.2.1.33.1.1.4.0",
)
"""RFC 1628 upsIdentManufacturer, Model, UPSSoftwareVersion, AgentSoftwareVersion."""
_KEPT: Final = frozenset({_SYS_DESCR, "1.3.6.1.2.1.1.2.0", "1.3.6.1.2.1.1.3.0", *_UPS_MODEL})
_SYSTEM: Final = "1.3.6.1.2.1.1"
_SERIAL: Final = re.compile(r"(?i)\b(s/?n|serial(?:\s*(?:number|no\.?|num))?)\s*[:=#]?\s*[A-Z0-9-]{4,}")
_ADDRESS: Final = re.compile(
    r"\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b|\b[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}\b|[^\s@]+@[^\s@]+"
)
_READING: Final = re.compile(rb"\s*[+-]?[0-9]{1,6}(\.[0-9]{1,3})?\s*|[01]{8,128}")
"""A number that a device sends as text, or a string of flags; a serial number of digits alone has more of them."""

HEADER: Final = """\
# A walk of a power supply, written by `powerguard snmp probe --save`; OID|tag|value.
# Text that no profile reads ({removed} objects) is replaced by {mark}: names, places, serial numbers and addresses are
# most of it. Numbers stand as they were answered. Look through it before you give it away.
"""


def enterprise(oid: str) -> str | None:
    """Return the node of the maker that an OID is below: 1.3.6.1.4.1.318. None for any other OID."""
    found = re.match(r"1\.3\.6\.1\.4\.1\.[0-9]+(?=\.|$)", oid)
    return found[0] if found else None


def roots(profiles: Iterable[Profile], sys_object_id: str) -> list[str]:
    """Return the subtrees worth walking: who it is, RFC 1628, and the makers' that profiles and the device name.

    Where neither names one, all makers'.
    """
    named = [profile.base for profile in profiles if profile.base is not None]
    makers = [maker for oid in (*named, sys_object_id) if (maker := enterprise(oid)) is not None]
    # net-snmp's own node holds the agent's statistics, not a power supply.
    makers = [one for one in dict.fromkeys(makers) if one != "1.3.6.1.4.1.8072"]
    return [_SYSTEM, "1.3.6.1.2.1.33", *(makers or ["1.3.6.1.4.1"])]


def anonymous(answers: Mapping[str, Answer], profiles: Iterable[Profile]) -> tuple[dict[str, Answer], int]:
    """Return the answers without what could name a site, and how many were taken out."""
    read: set[str] = set()
    columns: list[str] = []
    for profile in profiles:
        read.update(profile.scalars())
        columns.extend(profile.columns())
    kept: dict[str, Answer] = {}
    removed = 0
    for oid, answer in answers.items():
        if below(oid, _SYSTEM) and oid not in _KEPT:
            removed += 1
            continue
        if not isinstance(answer, bytes):
            kept[oid] = answer
            continue
        known = oid in read or oid in _KEPT or any(below(oid, column) for column in columns)
        kept[oid] = _without_names(answer) if known or _READING.fullmatch(answer) else REMOVED
        removed += kept[oid] != answer
    return kept, removed


def _without_names(text: bytes) -> bytes:
    shown = text.decode("utf-8", "replace")
    mark = REMOVED.decode()
    cleaned = _ADDRESS.sub(mark, _SERIAL.sub(lambda found: f"{found[1]}: {mark}", shown))
    return text if cleaned == shown else cleaned.encode()


def walk_file(answers: Mapping[str, Answer], profiles: Iterable[Profile]) -> str:
    """Return the text of the file."""
    kept, removed = anonymous(answers, profiles)
    return HEADER.format(removed=removed, mark=REMOVED.decode()) + format_walk(kept)
