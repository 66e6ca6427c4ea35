"""Cut patterns on real file systems, and print the table: see power.py."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.trainer.cuts.loops import has_mounts_of_its_own
from tests.trainer.cuts.patterns import PATTERNS
from tests.trainer.cuts.power import DISK_BYTES, HEAD, base, cut_power


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trainer.cuts", description=__doc__)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help=f"of: {', '.join(PATTERNS)} (default: all)")
    parser.add_argument("--fs", nargs="+", choices=[*DISK_BYTES], default=[*DISK_BYTES], help="file systems")
    parser.add_argument("--cuts", type=int, default=20, help="cuts of each pattern on each file system")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    has_mounts_of_its_own()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="powerguard-cuts-") as scratch, base(Path(scratch)) as folder:
        for pattern in args.patterns or PATTERNS:
            for kind in args.fs:
                print(cut_power(folder, kind, pattern, cuts=args.cuts, seed=args.seed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
