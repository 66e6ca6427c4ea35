"""`powerguard seal` and the bar, as their users meet them."""

import errno
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.main import main
from powerguard.cli.render import Bar, amount
from powerguard.trainer.seal.folder import verify
from powerguard.trainer.seal.manifest import SEAL
from tests.golden import Golden
from tests.trainer.tiers.rig import small_disk

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoint-1200"
    made.mkdir()
    (made / "model.bin").write_bytes(bytes(100_000))
    return made


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out))


def test_seal_says_what_it_sealed(folder: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert main(["seal", str(folder)]) == 0
    golden("seal", capsys.readouterr().out)
    assert main(["seal", str(folder)]) == 0
    golden("seal", capsys.readouterr().out, "again")
    assert verify(folder).is_whole


def test_object_of_seal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the reference shows is what programs get."""
    assert main(["seal", str(folder), "--json"]) == 0
    got = shown(capsys)
    example = json.loads((ROOT / "docs/reference/seal.json").read_text(encoding="utf-8"))
    assert list(got) == list(example)
    assert [list(each) for each in got["sealed"]] == [list(each) for each in example["sealed"]]
    assert got["sealed"][0]["is_new"]


def test_what_cannot_be_sealed(folder: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    """One line, exit 1, and the way out."""
    assert main(["seal", str(folder)]) == 0
    (folder / "model.bin").write_bytes(b"changed")
    assert main(["seal", str(folder)]) == 1
    golden("seal", capsys.readouterr().err)
    assert main(["seal", str(folder), "--json"]) == 1
    assert shown(capsys)["object"] == "error"
    assert main(["seal", "--again", "--step", "7", str(folder)]) == 0
    assert main(["seal", str(folder / "gone")]) == 1
    with pytest.raises(SystemExit, match="64"):
        main(["seal", "--step", "-1", str(folder)])


def test_of_several_the_first_are_reported_when_one_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seal", str(folder), str(folder / "gone")]) == 1
    assert f"{folder}: sealed" in capsys.readouterr().out
    assert (folder / SEAL).exists()


def test_a_folder_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    folder.chmod(0o500)
    try:
        assert main(["seal", str(folder)]) == 1
    finally:
        folder.chmod(0o700)
    assert os.strerror(errno.EACCES) in capsys.readouterr().err


def test_of_several_the_one_on_a_full_disk_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    with small_disk(full, 1):
        (full / "model.bin").write_bytes(bytes(1 << 20))
        assert main(["seal", str(folder), str(full)]) == 1
        assert not (full / SEAL).exists()
    assert f"{full}: {os.strerror(errno.ENOSPC)}; there is no new seal" in capsys.readouterr().err


def test_without_xxhash_it_says_what_to_install(folder: Path, golden: Golden) -> None:
    code = (
        "import sys; sys.modules['xxhash'] = None; from powerguard.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "seal", str(folder)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ended.returncode == 1
    assert f"{sys.executable} " in " ".join(ended.stderr.split())
    golden("seal", ended.stderr, varies={sys.executable: "PYTHON"})


# --- The bar ----------------------------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_bar_is_drawn_on_a_terminal_and_gone_at_the_end() -> None:
    screen = _Terminal()
    with Bar("sealing", stream=screen) as bar:
        bar._drawn_s = 0.0
        bar(5_000_000, 10_000_000)
        assert bar._drawn_s >= bar._began_s
        bar._drawn_s += 3600.0  # a busy machine may take longer than a tenth of a second until here
        bar(6_000_000, 10_000_000)  # too soon after the other
    text = screen.getvalue()
    assert "50 %  5.00 MB " in text
    assert "60 %" not in text
    assert text.endswith("\r\x1b[K")


@pytest.mark.parametrize("quiet", [True, False])
def test_no_bar_elsewhere(*, quiet: bool) -> None:
    stream = _Terminal() if quiet else io.StringIO()
    with Bar("sealing", quiet=quiet, stream=stream) as bar:
        bar._drawn_s = 0.0
        bar(1, 2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("width", [20, 60, 79, 200])
def test_bar_fits_its_line(width: int) -> None:
    """A line that wraps would fill the screen with itself."""
    bar = Bar("reading", stream=_Terminal())
    for done, total in ((0, 10**12), (10**11, 10**12), (10**12, 10**12), (5, None)):
        assert len(bar.line(done, total, 12.0, width)) <= width
    assert "1 m 48 s" in bar.line(10**11, 10**12, 12.0, 100)


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "?"), (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (99_950_000, "100 MB"), (8.5e9, "8.50 GB")],
)
def test_amounts(size: float | None, text: str) -> None:
    assert amount(size) == text


def test_a_real_terminal_shows_the_bar(folder: Path) -> None:
    """Through script(1), and not a byte of it in what a program reads."""
    with (folder / "model.bin").open("wb") as file:
        file.truncate(600 << 20)
    words = f"{shlex.quote(sys.executable)} -m powerguard seal {shlex.quote(str(folder))}"
    ended = subprocess.run(
        ["script", "-qec", words, "/dev/null"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    assert ended.returncode == 0
    assert b"sealing  " in ended.stdout
    assert b"sealed\x1b[0m: step 1200" in ended.stdout
