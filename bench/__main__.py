"""Run every benchmark, or those that are named, one after the other; print medians and worst, and the machine."""

import argparse
import json
import platform
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

from bench.figure import Figure

BENCHES: Final = (
    *(
        "core",
        "processes",
        "react",
        "daemon",
        "messages",
        "page",
        "outages",
        "history",
        "simulated",
        "shared",
        "power_on",
    ),
    *("apcupsd", "nut", "readers", "poll", "tiers", "ranks", "hosts", "slurm", "guard", "gpu", "trainer", "restore"),
    "cuts",
)
"""Each is a module here, which is loaded when its turn comes: `gpu` runs where PyTorch is and the daemon is not."""


def machine() -> str:
    """Return what this was measured on."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = sum(line.startswith("processor") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    load = Path("/proc/loadavg").read_text(encoding="ascii").split()[0]
    return (
        f"{cores} x {model}, Linux {platform.release()}, Python {platform.python_version()}, load {load} at the start"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which (default: all): {', '.join(BENCHES)}")
    parser.add_argument("--quick", action="store_true", help="fewer runs: to see that it works")
    parser.add_argument("--outages", type=int, help="simulated outages of each row of shared (default: 2,000)")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(BENCHES)):
        parser.error(f"no such benchmark: {', '.join(unknown)}")
    print(machine(), flush=True)
    figures: list[Figure] = []
    for name in args.names or BENCHES:
        print(f"\n{name}", flush=True)
        module = import_module(f"bench.{name}")
        sized = name == "shared" and args.outages
        for figure in module.table(args.outages) if sized else module.run(quick=args.quick):
            print(f"  {figure}", flush=True)
            figures.append(figure)
    if args.json is not None:
        text = json.dumps({"machine": machine(), "figures": [figure.as_json() for figure in figures]}, indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
