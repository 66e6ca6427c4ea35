"""journald's native datagram: one entry as bytes (systemd, "Native Journal Protocol")."""

import re
from collections.abc import Mapping

SOCKET = "/run/systemd/journal/socket"
FIELD_CHARS = 64
"""Longest field name that journald takes."""

_NOT_IN_A_NAME = re.compile(r"[^A-Z0-9_]")


def field_name(name: str) -> str:
    """Return name as journald takes it: capitals, digits and underscores, no digit or underscore in front."""
    upper = _NOT_IN_A_NAME.sub("_", name.upper()).lstrip("_0123456789")
    return upper[:FIELD_CHARS] or "UNNAMED"


def encode(fields: Mapping[str, str]) -> bytes:
    """Return the datagram of one entry; a value with a newline is sent with its length in front."""
    parts: list[bytes] = []
    for name, value in fields.items():
        key = field_name(name).encode("ascii")
        data = value.encode("utf-8", "backslashreplace")
        if b"\n" in data:
            parts += (key, b"\n", len(data).to_bytes(8, "little"), data, b"\n")
        else:
            parts += (key, b"=", data, b"\n")
    return b"".join(parts)


def is_stream(told: str | None, device: int, inode: int) -> bool:
    """Tell whether $JOURNAL_STREAM (told) names the file with this device and inode: stderr goes to journald."""
    return told == f"{device}:{inode}"
