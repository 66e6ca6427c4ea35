"""A terminal of 80 columns, as a console has it: no line runs over its edge, where it would break amid a word."""

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.core.model.policy import Mode
from powerguard.daemon.control.admin import admin_server
from powerguard.daemon.journal import Entry, Inline, Journal
from powerguard.daemon.observe.port import BmcView
from tests.cli.checkpoint_sites import save
from tests.daemon.watched import BOOT, NOW_S, WALL_S, drilled, in_mode, scene

ROOT = Path(__file__).parents[2]
COLUMNS = 80
DRAWN = b"\x1b[?2026l"
"""What `status --watch` writes behind a whole screen."""
SIZE = "plan --size --no-settings --load-w 4500W --rating-w 5400 --bytes 8.5GB --disk 0.4GB/s --table 50:540,100:240"


def shown(*words: str, columns: int = COLUMNS) -> list[str]:
    """Run a verb on a terminal, output and errors alike; return the lines as they stand there, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
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


@contextlib.contextmanager
def watching(path: str, columns: int, lines: int) -> Iterator[tuple[int, Callable[[], list[str]]]]:
    """Run `status --watch` on a terminal; yield it, and what reads the lines of its next whole screen."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    words = [sys.executable, "-m", "powerguard", "status", "--watch", "--socket", path]
    env = {**os.environ, "TERM": "xterm", "LANG": "C.UTF-8"}
    said = bytearray()

    def screen() -> list[str]:
        said.clear()
        while not said.endswith(DRAWN) or select.select([ours], [], [], 0.0)[0]:
            part = _read(ours)
            assert part, said.decode()
            said.extend(part)
        whole = said.rpartition(b"\x1b[H")[2].removesuffix(DRAWN).decode().replace("\r\n", "\n")
        assert "\x1b[?7l" not in said.decode(), "what is too long would be cut"
        return re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", whole).split("\n")

    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=ROOT, env=env) as process:
        os.close(theirs)
        try:
            yield ours, screen
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):
                while os.read(ours, 65536):
                    pass
    os.close(ours)
    assert process.returncode == 1, "on battery"


async def test_watch_fits_its_terminal(tmp_path: Path) -> None:
    """Nothing is cut at the right edge, and a window that changes is filled anew with the next screen."""
    daemon = replace(scene("on_battery"), bmc=BmcView(kind="ipmi", policy="always-off"), journal_trouble="full")
    daemon = in_mode(daemon, Mode.DRY_RUN)

    def look(path: str) -> None:
        with watching(path, 80, 24) as (terminal, screen):
            for columns, lines in ((80, 24), (60, 20)):
                fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
                for _ in range(3):  # on a busy machine two were begun before the change
                    shown = screen()
                assert len(shown) <= lines
                assert max(len(line) for line in shown) <= columns
                text = re.sub(r"\s+", " ", " ".join(shown))
                assert "gpu-01: on battery" in text
                # Each reason has its remedy behind it; what finds no room is left out from the end.
                assert "-> set mode: rehearse" in text
                assert ("-> remove the cause" in text) is (columns > 60)
                assert re.search(r"budget [█░]{8,}│[█░]+ .*│;", text)
                assert re.search(r"charge █+░+ 71 %.*load █+░+ 62 %.*next in [0-9 ms]+ \([0-9:]+\): ", text)

    async with admin_server(daemon, path=f"{tmp_path}/s.sock") as path:
        await asyncio.to_thread(look, path)


async def test_watch_on_a_terminal_without_a_size(tmp_path: Path) -> None:
    """A serial console, such as a BMC's, has 0 columns and 0 lines: it is taken for 80 by 24."""

    def look(path: str) -> None:
        with watching(path, 0, 0) as (_, screen):
            screen()
            shown = screen()  # by now the exit status is that of the first one
            assert "on battery" in shown[0]
            assert len(shown) <= 24
            assert max(len(line) for line in shown) <= COLUMNS

    async with admin_server(scene("on_battery"), path=f"{tmp_path}/s.sock") as path:
        await asyncio.to_thread(look, path)


@pytest.mark.parametrize("columns", [44, 60, 130])
async def test_a_picture_is_as_wide_as_the_terminal(columns: int, tmp_path: Path) -> None:
    """Its bar goes from edge to edge and is not torn; a narrow one has less beside it."""
    async with admin_server(scene(), path=f"{tmp_path}/s.sock") as path:
        plan = await asyncio.to_thread(shown, "plan", "--socket", path, columns=columns)
        alone = await asyncio.to_thread(shown, "plan", "--picture", "--socket", path, columns=columns)
    size = await asyncio.to_thread(shown, *SIZE.split(), columns=columns)
    for lines in (plan, alone, size):
        (bar,) = [line for line in lines if re.fullmatch(r" [█▓▒▞░·]+", line)]
        assert len(bar) == columns
        assert max(len(line) for line in lines) == columns
        assert sum(line.startswith(" ██ training") for line in lines) == 1
    assert any(" energy left" in line for line in plan)
    assert any("from" in line for line in plan) is (columns > 44)


@pytest.mark.parametrize(
    "words",
    [
        "battery show",
        "battery replaced --yes",
        "notify list",
        "drill report",
        "drill --yes --no-wait",
        "maintenance on --for 2h --reason x",
    ],
)
async def test_no_answer_of_the_daemon_runs_over_the_edge(words: str, tmp_path: Path) -> None:
    daemon = drilled()
    daemon.message_targets = (replace(daemon.message_targets[0], answer=" ".join(["a long answer"] * 9)),)
    async with admin_server(daemon, path=f"{tmp_path}/s.sock") as path:
        lines = await asyncio.to_thread(shown, *words.split(), "--socket", path)
    assert [line for line in lines if len(line) > COLUMNS] == []


async def _journal(path: Path) -> None:
    journal = Journal(path, boot_id=BOOT, wall=lambda: WALL_S, writer=Inline(), reader=Inline())
    await journal.load()
    assert await journal.append(Entry(at_s=NOW_S, state=scene("on_battery").state))
    assert await journal.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("recover --dry-run --config config/powerguard.yaml --socket {folder}/none.sock", "would start: systemctl"),
        ("config validate tests/settings/mistakes.yaml", "tests/settings/mistakes.yaml:30:9: journal"),
        ("config validate config/powerguard.yaml --conf-d {folder}/conf.d", "valid; mode"),
        ("--help", "verbs:"),
        ("battery show --socket {folder}/none.sock --journal {folder}/journal.sqlite", "Last known battery"),
        ("battery show --socket {folder}/none.sock --journal {folder}/none.sqlite", "Last known battery: none"),
        ("install --root {folder}/conf.d --dry-run", "would be written"),
        ("statsu", "did you mean status?"),
        ("status --socket {folder}/none.sock --journal {folder}/none.sqlite", "DOWN"),
        ("plan --socket {folder}/none.sock", "systemctl start powerguard"),
        (SIZE, "It fits in full"),
        ("simulate --outages 1 --jobs 1", "1 outage from seed 1"),
        pytest.param("demo --fast --keep {folder}/kept", "no training was lost", marks=pytest.mark.slow),
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
    # A word that hardly fits the terminal is a path: that stays whole.
    assert [line for line in lines if len(line) > COLUMNS and max(map(len, line.split())) < COLUMNS - 10] == []
