"""How long `powerguard history --sum` takes over a journal with 1,000 outages, as a whole process."""

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.figure import Figure
from powerguard.core.model.actions import Grade
from powerguard.core.model.state import OnBattery, Outage, State
from powerguard.daemon.journal import Entry, Journal, JournalLimits
from powerguard.daemon.journal.store import Retention, Store

OUTAGES = 1000


async def _fill(path: Path) -> None:
    journal = Journal(
        path,
        boot_id="boot-1",
        store=Store(path, Retention(outages=OUTAGES)),
        limits=JournalLimits(append_s=60.0, load_s=60.0),
    )
    await journal.load()
    for number in range(OUTAGES):
        at_s = 600.0 * number
        phase = OnBattery(outage=Outage(id=f"o-{number}", since_s=at_s, grade=Grade.FULL))
        figures = (("trainers", 1.0), ("lost_held_s", 40.0 + number), ("lost_stalled_s", 20.0), ("usual_lost_s", 300.0))
        await journal.append(Entry(at_s=at_s, state=State(phase=phase)))
        await journal.append(Entry(at_s=at_s + 90.0, state=State(), outcome="resumed_in_place", figures=figures))
    await journal.close(60.0)


def run(*, quick: bool) -> list[Figure]:
    taken_s = []
    with tempfile.TemporaryDirectory(prefix="powerguard-bench-") as folder:
        path = Path(folder) / "journal.sqlite"
        asyncio.run(_fill(path))
        for _ in range(3 if quick else 20):
            began_s = time.perf_counter()
            command = [sys.executable, "-m", "powerguard", "history", "--sum", "--journal", str(path)]
            ended = subprocess.run(command, check=True, capture_output=True, text=True)
            taken_s.append(time.perf_counter() - began_s)
            if not ended.stdout.startswith(f"{OUTAGES} outages"):
                message = f"the sum is not of {OUTAGES} outages: {ended.stdout[:80]}"
                raise RuntimeError(message)
    return [Figure(name=f"history --sum over {OUTAGES} outages", unit="s", values=tuple(taken_s), bar="<= 1")]
