"""How long a training takes to load what it saved: powerguard's library, torch.load and DCP, from the disk, in turn."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from bench.dcp import torch_python
from bench.figure import Figure

WAYS = {"powerguard": "restore()", "torch": "torch.load and load_state_dict", "dcp": "torch.distributed.checkpoint"}
STATES = {"large": "{gb:.1f} GB in 61 tensors", "small": "100,000 tensors of 2 kB"}


def run(*, quick: bool) -> list[Figure]:
    """Each round loads once each way, in a process of its own and without what the system keeps of the files."""
    python = torch_python()
    if python is None:
        print("  no torch here (scripts/test-torch --env gets it): nothing measured")
        return []
    figures = []
    for state, text in STATES.items():
        taken_s: dict[str, list[float]] = {way: [] for way in WAYS}
        with tempfile.TemporaryDirectory(prefix="powerguard-bench-") as folder:

            def child(way: str, state: str = state, folder: str = folder) -> dict[str, float]:
                command = [python, "-m", "bench.restore_child", folder, state, way, "quick" if quick else "whole"]
                done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
                result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
                return result

            gb = child("save")["gb"]
            for _ in range(1 if quick else 5):
                for way in WAYS:
                    forget_files()
                    taken_s[way].append(child(way)["s"])
        figures += [
            Figure(name=f"{WAYS[way]}, {text.format(gb=gb)}", unit="s", values=tuple(values))
            for way, values in taken_s.items()
        ]
    return figures


def forget_files() -> None:
    """Have the system read from the disk again; only root may ask for it."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
    except OSError as error:
        print(f"  files may still be in memory: {error}")
