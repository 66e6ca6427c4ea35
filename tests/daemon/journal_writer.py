"""A daemon in small, to be killed: appends steps for ever and says each one that was acknowledged."""

import asyncio
import contextlib
import sys
from pathlib import Path

from powerguard.core.model.actions import EnsurePolicy, Grade
from powerguard.core.model.state import OnBattery, Outage, State
from powerguard.daemon.journal import Entry, Journal, JournalLimits, Loaded
from powerguard.daemon.journal.store import Store


class Patient(Store):
    """A store that a busy machine does not keep from finding what is there."""

    look_s = 60.0


def loaded_once(store: Store) -> Loaded:
    """Return what a journal has, and close it: from Python 3.13 on, an open one that is forgotten is a warning."""
    with contextlib.closing(store):
        return store.load()[0]


async def write(path: Path) -> None:
    """Go on from where the last one was killed."""
    journal = Journal(path, boot_id="boot-1", store=Patient(path), limits=JournalLimits(append_s=60.0, load_s=60.0))
    loaded = await journal.load()
    serial = 0 if loaded.state is None else loaded.state.serial
    phase = OnBattery(outage=Outage(id="o-1", since_s=1.0, grade=Grade.FULL))
    while True:
        serial += 1
        action = EnsurePolicy(id=f"o-1-{serial}", by_s=1e9, outage="o-1")
        journal.count("steps")
        entry = Entry(at_s=float(serial), state=State(phase=phase, serial=serial), actions=(action,))
        if not await journal.append(entry):
            sys.exit(f"not durable: {journal.health.reason}")
        sys.stdout.write(f"{serial}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1])))
