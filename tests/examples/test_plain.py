"""The examples without torch: killed and started again, they end with the same bits."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(folder: Path) -> subprocess.Popen[str]:
    argv = [ROOT / "examples" / "plain_numpy_free.py", "--dir", folder, "--steps", "300", "--every", "0.1"]
    return subprocess.Popen(
        [sys.executable, *map(str, argv), "--step-s", "0.003"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def end(process: subprocess.Popen[str]) -> str:
    result, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return result


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


def test_the_least_example_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """The guide names it as a complete job, which ends with the same bits after it was killed."""
    script = ROOT / "examples" / "minimal.py"
    assert "`examples/minimal.py`" in (ROOT / "docs/guides/trainers.md").read_text(encoding="utf-8")

    def run(folder: Path, text: str) -> str:
        argv = [sys.executable, "-c", text, str(folder)]
        ended = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
        return ended.stdout

    text = script.read_text(encoding="utf-8")
    kill = "        import glob, os, time; time.sleep(0.01)\n        if glob.glob(f'{folder}/step-*/MANIFEST.json'): "
    killed = text.replace("        train()\n", f"        train()\n{kill}os.kill(os.getpid(), 9)\n")
    killed = killed.replace("every_s=60", "every_s=0.1")
    whole = run(tmp_path / "whole", text)
    assert whole.startswith("begin at step 1\n")
    assert run(tmp_path / "pieces", killed) == "begin at step 1\n"
    rest = run(tmp_path / "pieces", text)
    assert int(re.match(r"begin at step (\d+)", rest)[1]) > 1  # type: ignore[index]
    assert rest.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.parametrize("name", ["minimal.py", "plain_numpy_free.py"])
def test_an_example_asked_for_help_trains_into_no_folder(tmp_path: Path, name: str) -> None:
    """`--help` is no name of a folder, and a missing one is no traceback."""
    for words, code in ((["--help"], 0), (["--no-such-option"], 2)):
        argv = [sys.executable, ROOT / "examples" / name, *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=env, check=False, timeout=60)
        assert (ended.returncode, list(tmp_path.iterdir())) == (code, []), ended.stderr
        assert (ended.stdout + ended.stderr).startswith("usage: ")


def test_the_least_example_saves_when_its_unit_is_stopped(tmp_path: Path) -> None:
    """`systemctl stop` sends SIGTERM to the main process, and to no worker of a data loader."""
    text = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8")
    text = text.replace("        train()\n", "        import time; time.sleep(0.01)\n        train()\n")
    argv = [sys.executable, "-c", text, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "begin at step 1\n"
        training.terminate()
        assert training.wait(60) == 0
    assert len(list(tmp_path.glob("step-*/MANIFEST.json"))) == 1
    unit = (ROOT / "examples" / "llm.service").read_text(encoding="utf-8")
    assert "\nKillMode=mixed\n" in unit
