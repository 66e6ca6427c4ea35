"""Entries for journald: read back by the rules of its documentation, and by a real journald and journalctl."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.daemon.log import encode_entry, field_name
from tests.peers import require

JOURNALD = Path("/lib/systemd/systemd-journald")


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
        encode_entry({"MESSAGE": "phase_changed", "pg_runtime_s": "612"})
        == b"MESSAGE=phase_changed\nPG_RUNTIME_S=612\n"
    )


@given(st.dictionaries(st.sampled_from(["MESSAGE", "PG_A", "PG_B"]), st.text()))
def test_any_value_comes_back(fields: dict[str, str]) -> None:
    """A newline in a value cannot begin a field of its own, such as PRIORITY or _UID."""
    expected = {name: value.encode("utf-8", "backslashreplace") for name, value in fields.items()}
    assert read(encode_entry(fields)) == expected


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
    assert field_name(name) == field


# --- A real journald ----------------------------------------------------------------------------------

IN_A_WORLD_OF_ITS_OWN = """
set -e
for folder in /run /var/log /etc/systemd; do mount -t tmpfs none "$folder"; done
mkdir -p /run/systemd
# An empty Audit= leaves the kernel's auditing alone, which no namespace keeps apart.
printf '[Journal]\\nAudit=\\n' > /etc/systemd/journald@pgtest.conf
"$1" pgtest &
lines() { journalctl -q -D /var/log/journal/*.pgtest -o json PG_OUTAGE=o-1; }
for _ in $(seq 1000); do test -S /run/systemd/journal.pgtest/socket && break; sleep 0.05; done
"$2" -c "$3"
for _ in $(seq 1000); do lines | grep -q host_back && break; sleep 0.05; done
lines
"""

SPEAK = r"""
import structlog
from powerguard.daemon.log import JournalSink, bind_outage, configure
log = configure(style="journald", sink=JournalSink("/run/systemd/journal.pgtest/socket"))
bind_outage("o-1")
logger = structlog.get_logger()
logger.warning("source_lost", ups="x\nPRIORITY=0\nMESSAGE=forged", age_s=3.5)
try:
    int("x" * 9000)
except ValueError:
    logger.exception("action_failed", wide={str(n): "y" * 500 for n in range(20)})
logger.info("host_back")
assert log.lost == 0
"""


@pytest.mark.root
def test_journalctl_finds_an_outage_by_its_id() -> None:
    """A journald of our own, in namespaces of its own: nothing of this machine's journal or /run is touched."""
    unshare = require("unshare")
    require("journalctl")
    if not JOURNALD.exists():
        pytest.skip("no systemd-journald on this machine")
    command = [unshare, "-m", "-n", "-u", "-p", "-f", "--mount-proc", "bash", "-c", IN_A_WORLD_OF_ITS_OWN, "bash"]
    try:
        ended = subprocess.run(
            [*command, str(JOURNALD), sys.executable, SPEAK], capture_output=True, text=True, check=False, timeout=100
        )
    except PermissionError:
        pytest.skip("may not make namespaces here")
    if "unshare failed" in ended.stderr or "permission denied" in ended.stderr.lower():
        pytest.skip("may not make namespaces here")
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [line["PG_EVENT"] for line in lines] == ["source_lost", "action_failed", "host_back"], ended.stderr
    lost, failed, back = lines
    assert (lost["PRIORITY"], lost["SYSLOG_IDENTIFIER"], lost["PG_AGE_S"]) == ("4", "powerguard", "3.5")
    assert lost["PG_UPS"] == r"x\nPRIORITY=0\nMESSAGE=forged"
    assert lost["MESSAGE"] == r'source_lost outage=o-1 ups="x\\nPRIORITY=0\\nMESSAGE=forged" age_s=3.5'
    assert failed["PRIORITY"] == "3"
    assert failed["PG_EXCEPTION"].startswith("Traceback (most recent call last):\n")
    assert "ValueError: invalid literal" in failed["PG_EXCEPTION"]
    assert back["MESSAGE"] == "host_back outage=o-1"
