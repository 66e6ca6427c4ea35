"""Run every benchmark, or those that are named, one after the other; print medians and worst, and the machine."""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from bench import (
    apcupsd,
    core,
    cuts,
    daemon,
    gpu,
    guard,
    history,
    hosts,
    messages,
    nut,
    outages,
    page,
    poll,
    processes,
    ranks,
    react,
    readers,
    restore,
    shared,
    simulated,
    slurm,
    tiers,
    trainer,
    ways,
)
from bench.figure import Figure

BENCHES: dict[str, Callable[..., list[Figure]]] = {
    "core": core.run,
    "processes": processes.run,
    "react": react.run,
    "daemon": daemon.run,
    "messages": messages.run,
    "page": page.run,
    "outages": outages.run,
    "history": history.run,
    "simulated": simulated.run,
    "shared": shared.run,
    "ways": ways.run,
    "apcupsd": apcupsd.run,
    "nut": nut.run,
    "readers": readers.run,
    "poll": poll.run,
    "tiers": tiers.run,
    "ranks": ranks.run,
    "hosts": hosts.run,
    "slurm": slurm.run,
    "guard": guard.run,
    "gpu": gpu.run,
    "trainer": trainer.run,
    "restore": restore.run,
    "cuts": cuts.run,
}


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
    parser.add_argument("names", nargs="*", help="which (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer runs: to see that it works")
    parser.add_argument("--outages", type=int, help="simulated outages of each row of shared (default: 2,000)")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    args = parser.parse_args()
    print(machine(), flush=True)
    figures: list[Figure] = []
    for name in args.names or BENCHES:
        print(f"\n{name}", flush=True)
        sized = name == "shared" and args.outages
        for figure in shared.table(args.outages) if sized else BENCHES[name](quick=args.quick):
            print(f"  {figure}", flush=True)
            figures.append(figure)
    if args.json is not None:
        text = json.dumps({"machine": machine(), "figures": [figure.as_json() for figure in figures]}, indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
