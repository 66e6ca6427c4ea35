"""`powerguard sentinel`, whole, with a clock that runs faster: `fast_sentinel.py SETTINGS PACE ZERO_S`.

What it waits for by rule (half a minute after the host is off, three tries within a quarter of an hour) passes in
seconds. zero_s: moment of CLOCK_BOOTTIME at which both clocks agree, so that another one goes on where this one ended.
"""

import sys
import time
from pathlib import Path

from powerguard.clock import boottime_s
from powerguard.sentinel.main import main
from powerguard.sentinel.run import SentinelPorts

PACE, ZERO_S = float(sys.argv[2]), float(sys.argv[3])


def clock() -> float:
    return ZERO_S + PACE * (boottime_s() - ZERO_S)


sys.exit(main(Path(sys.argv[1]), ports=SentinelPorts(clock=clock, wall=time.time, pace=PACE)))
