"""The page of `report` is made from a template in the package, and written whole or not at all."""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from powerguard.cli.outages.report import Section, render

ROOT = Path(__file__).parents[2]
GIVEN = {
    "title": "<title>",
    "verdict": "a & b",
    "mood": '"good"',
    "drawing": "<svg></svg>",
    "style": "svg { display: block; }",
    "notes": ["<note>"],
    "sections": [Section("<name>", ("<th>",), [("<td>",)], numbers=(0,)), Section("empty", ("a",), [])],
    "footer": "<foot>",
}


def test_every_word_is_escaped_and_every_name_is_needed() -> None:
    page = render(**GIVEN)
    for word in ("<note>", "<name>", "<foot>"):
        assert word not in page
    assert page.count("<svg></svg>") == 1
    assert "&lt;th&gt;</th>" in page
    assert "&lt;td&gt;</td>" in page
    assert '<th class="n">' in page
    assert "empty" not in page
    for name in GIVEN:
        with pytest.raises(UndefinedError):
            render(**{other: it for other, it in GIVEN.items() if other != name})


def test_a_page_that_finds_no_room_leaves_the_older_one(tmp_path: Path) -> None:
    """A full disk (here: a limit) costs the new page, not the one that is there."""
    path = tmp_path / "page.html"
    path.write_text("older", encoding="utf-8")
    program = f"from powerguard.cli.outages.report import write; print(write({str(path)!r}, 'x' * 100_000))"
    limited = f"ulimit -f 4; exec {shlex.join([sys.executable, '-c', program])}"
    ended = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, check=False, cwd=ROOT)
    assert os.strerror(errno.EFBIG) in ended.stdout
    assert [(each.name, each.read_text(encoding="utf-8")) for each in tmp_path.iterdir()] == [("page.html", "older")]
