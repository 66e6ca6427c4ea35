"""journald's native entries: read back by the rules of its own documentation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.protocols import journald


def read(datagram: bytes) -> dict[str, bytes]:
    """What journald would store."""
    fields: dict[str, bytes] = {}
    while datagram:
        head, _, rest = datagram.partition(b"\n")
        name, equals, value = head.partition(b"=")
        if equals:
            fields[name.decode()] = value
            datagram = rest
        else:
            size = int.from_bytes(rest[:8], "little")
            fields[head.decode()] = rest[8 : 8 + size]
            assert rest[8 + size : 9 + size] == b"\n"
            datagram = rest[9 + size :]
    return fields


def test_a_plain_entry() -> None:
    assert (
        journald.encode({"MESSAGE": "phase_changed", "pg_runtime_s": "612"})
        == b"MESSAGE=phase_changed\nPG_RUNTIME_S=612\n"
    )


@given(st.dictionaries(st.sampled_from(["MESSAGE", "PG_A", "PG_B"]), st.text()))
def test_any_value_comes_back(fields: dict[str, str]) -> None:
    """A newline in a value cannot begin a field of its own, such as PRIORITY or _UID."""
    expected = {name: value.encode("utf-8", "backslashreplace") for name, value in fields.items()}
    assert read(journald.encode(fields)) == expected


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("pg_event", "PG_EVENT"),
        ("_UID", "UID"),
        ("9lives", "LIVES"),
        ("a.b-c=\n", "A_B_C__"),
        ("", "UNNAMED"),
        ("x" * 80, "X" * 64),
    ],
)
def test_field_names(name: str, field: str) -> None:
    """A leading underscore is journald's own, and such a field would be dropped."""
    assert journald.field_name(name) == field


def test_the_stream_is_ours_only_when_device_and_inode_match() -> None:
    assert journald.is_stream("9:123", 9, 123)
    assert not journald.is_stream("9:124", 9, 123)
    assert not journald.is_stream(None, 9, 123)
