"""The example without torch: killed and started again, it ends with the same bits."""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(folder: Path) -> subprocess.Popen[str]:
    argv = [ROOT / "examples" / "plain_numpy_free.py", "--dir", folder, "--steps", "300", "--every", "0.1"]
    return subprocess.Popen(
        [sys.executable, *map(str, argv), "--step-s", "0.003"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def end(process: subprocess.Popen[str]) -> str:
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return told


def test_killed_and_started_again_it_ends_with_the_same_line(tmp_path: Path) -> None:
    whole = end(start(tmp_path / "whole"))
    assert whole.startswith("step 0: begin")
    first = start(tmp_path / "pieces")
    until_s = time.monotonic() + 30
    while not any((tmp_path / "pieces" / "checkpoints").glob("step-*/MANIFEST.json")):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    first.kill()
    first.communicate()
    rest = end(start(tmp_path / "pieces"))
    assert int(re.match(r"step (\d+): go on", rest)[1]) > 0  # type: ignore[index]
    assert rest.splitlines()[-1] == whole.splitlines()[-1]
