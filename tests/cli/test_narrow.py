"""A terminal of 80 columns, as a console has it: no line runs over its edge, where it would break amid a word."""

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from powerguard.daemon.journal import Entry, Journal
from tests.cli.checkpoint_sites import save
from tests.daemon.watched import BOOT, NOW_S, WALL_S, scene

ROOT = Path(__file__).parents[2]
COLUMNS = 80
SIZE = "plan --size --no-settings --load-w 4500W --rating-w 5400 --bytes 8.5GB --disk 0.4GB/s --table 50:540,100:240"


def shown(*words: str) -> list[str]:
    """Run a verb on a terminal, output and errors alike; return the lines as they stand there, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "powerguard", *words],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm"},
    ):
        os.close(theirs)
        said = b""
        while chunk := _read(ours):
            said += chunk
    os.close(ours)
    plain = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", said.decode())
    return [line.rpartition("\r")[2] for line in plain.replace("\r\n", "\n").split("\n")]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: nobody writes there any more
        return b""


async def _journal(path: Path) -> None:
    journal = Journal(path, boot_id=BOOT, wall=lambda: WALL_S)
    await journal.load()
    assert await journal.append(Entry(at_s=NOW_S, state=scene("on_battery").state))
    assert await journal.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("recover --dry-run --config config/powerguard.yaml --socket {folder}/none.sock", "would start: systemctl"),
        ("config validate tests/settings/mistakes.yaml", "tests/settings/mistakes.yaml:30:9: journal"),
        ("config validate config/powerguard.yaml --conf-d {folder}/conf.d", "valid; mode"),
        ("statsu", "did you mean status?"),
        ("status --socket {folder}/none.sock --journal {folder}/none.sqlite", "DOWN"),
        ("plan --socket {folder}/none.sock", "systemctl start powerguard"),
        (SIZE, "It fits in full"),
        ("simulate --outages 1 --jobs 1", "1 outage from seed 1"),
        ("demo --fast", "nothing was lost"),
        ("history --journal {folder}/journal.sqlite", "6f1d2c3b-49400"),
        ("checkpoints list {folder}/store", "state"),
        ("checkpoints list {folder}/none", "no such folder"),
    ],
)
def test_nothing_runs_over_the_edge(words: str, said: str, tmp_path: Path) -> None:
    asyncio.run(_journal(tmp_path / "journal.sqlite"))
    (tmp_path / "conf.d").mkdir()
    save(tmp_path / "store", 7)
    lines = shown(*words.format(folder=tmp_path).split())
    assert said in re.sub(r"\s+", " ", " ".join(lines))
    # One word that is longer than the terminal is wide is a path: that stays whole.
    assert [line for line in lines if len(line) > COLUMNS and len(line.split()) > 1] == []
