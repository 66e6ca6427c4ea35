"""torch.distributed.checkpoint beside ours, on the same disk or folder, wherever a python with torch can be found."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.figure import Figure

_ROOT: Final = Path(__file__).parents[1]


def torch_python() -> str | None:
    """A python that has torch: this one, or that of the torch tests."""
    for python in (sys.executable, str(_ROOT / ".venv-torch" / "bin" / "python")):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0:
                return python
    return None


def saved(folder: Path, size: int, rounds: int, where: str = "") -> list[Figure]:
    """As it comes and with more threads, with the flushes that it leaves out. where: named in the rows."""
    python = torch_python()
    if python is None:
        print("  no torch here (scripts/test-torch --env gets it): its own checkpoint is left out")
        return []
    figures = []
    for name, threads in (("default", 1), ("4 threads", 4)):
        command = [python, str(_ROOT / "bench" / "dcp_child.py"), str(folder), str(size), str(threads), str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
        rates, cpu = json.loads(done.stdout.splitlines()[-1])
        shutil.rmtree(folder, ignore_errors=True)
        what = f"torch DCP {name}, {size / 1e9:.1f} GB{where}"
        figures += [
            Figure(name=what, unit="GB/s", values=tuple(rates)),
            Figure(name=what, unit="CPU s/GB", values=tuple(cpu)),
        ]
    return figures
