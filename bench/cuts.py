"""Power cuts on real file systems, ours and torch's ways of saving side by side: what can be loaded afterwards.

A table: cuts, good, none (nothing could be loaded), torn (wrong data taken for good), lost (what had been acknowledged
was not there), refused (found, and seen to be bad). See tests/trainer/cuts/power.py for how and what it cannot show.
"""

import os
import tempfile
from pathlib import Path

from bench.dcp import torch_python
from bench.figure import Figure
from tests.trainer.cuts import patterns
from tests.trainer.cuts.power import DISK_BYTES, HEAD, PROGRAM, base, cut_power

TORCH_PATTERNS = (
    "torch DCP",
    "torch DCP, one folder",
    "torch DCP, sealed",
    "torch.save + replace",
    "torch.save + fsync + replace",
)
SAFE = ("powerguard", "powerguard, no slots", "torch DCP, sealed")


def run(*, quick: bool) -> list[Figure]:
    """Cut; where that cannot be done it is said."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        print("  needs root and loop devices, to mount file systems of its own: not run")
        return []
    programs = dict.fromkeys(patterns.PATTERNS, PROGRAM)
    python = torch_python()
    if python is None:
        print("  no torch (scripts/test-torch --env gets it): only what needs none")
    else:
        programs |= dict.fromkeys(TORCH_PATTERNS, (python, "-m", "tests.torch.cut_patterns"))
    figures = []
    print(f"  {HEAD}", flush=True)
    with tempfile.TemporaryDirectory(prefix="powerguard-cuts-") as scratch, base(Path(scratch)) as folder:
        for pattern, program in programs.items():
            for kind in DISK_BYTES:
                cuts = 5 if quick else 20
                tally = cut_power(folder, kind, pattern, cuts=cuts, seed=1, program=program)
                print(f"  {tally}", flush=True)
                harm = Figure(
                    name=f"torn or lost in {cuts} power cuts, {pattern}, {kind}",
                    unit="",
                    values=(float(tally.torn + tally.lost),),
                    bar="0" if pattern in SAFE else "",
                )
                figures.append(harm)
    return figures
