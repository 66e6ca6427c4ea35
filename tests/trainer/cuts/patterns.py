"""Ways of saving, to be cut: each with a writer that never ends, and a judge that opens what is left.

    python -m tests.trainer.cuts.patterns write PATTERN FOLDER
    python -m tests.trainer.cuts.patterns judge PATTERN       (paths on stdin, one line of JSON each)

A state is 12 MB in two halves, every byte of which tells the step: a mixture shows.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.shards import CorruptError
from powerguard.trainer.store.store import Found, Store
from tests.trainer.checkpoints import read, save

HALF_BYTES = 6_000_000
GAP_S = 0.02

Judged = tuple[str, int, int]


def half(step: int) -> bytes:
    return bytes([step % 251]) * HALF_BYTES


def steps(save_step: Callable[[int], object]) -> None:
    """Save one step after the other, for ever, and tell."""
    step = 0
    while True:
        step += 1
        save_step(step)
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        time.sleep(GAP_S)


# --- Ours ------------------------------------------------------------------------------------------------------------


def write_store(root: Path, slots: int = 2) -> None:
    with Store(root, job="cut", slots=slots, chunk_bytes=1 << 20) as store:
        store.prepare(2 * HALF_BYTES + 8192)

        def save_step(step: int) -> None:
            items = [Buffer("a", half(step)), Buffer("b", half(step)), Buffer.json("step", step)]
            save(store, step, items, urgent=step % 3 == 0)

        steps(save_step)


def judge_store(root: Path) -> Judged:
    with Store(root, job="cut") as store:
        refused = len(store.refused())
        for found in store.found():
            try:
                return verdict(store, found), found.step, refused
            except CorruptError:
                refused += 1
    return "none", 0, refused


def verdict(store: Store, found: Found) -> str:
    items = read(found, 0)
    whole = items["a"].data == items["b"].data == half(found.step) and items["step"].value() == found.step
    return "good" if whole else "torn"


# --- Without any flush, as `torch.save` to another name and then a rename --------------------------------------------


def write_rename(root: Path) -> None:
    root.mkdir(exist_ok=True)

    def save_step(step: int) -> None:
        (root / "last.tmp").write_bytes(f"{step:012d}".encode() + half(step) * 2)
        (root / "last.tmp").replace(root / "last")

    steps(save_step)


def judge_rename(root: Path) -> Judged:
    try:
        content = (root / "last").read_bytes()
        step = int(content[:12])
    except (OSError, ValueError):
        return "none", 0, 0
    if len(content) != 12 + 2 * HALF_BYTES:
        return "none", 0, 1  # a loader sees that a file is short
    return ("good" if content[12:] == half(step) * 2 else "torn"), step, 0


# --- Over the same files, as frameworks do that keep one name --------------------------------------------------------


def write_in_place(root: Path) -> None:
    root.mkdir(exist_ok=True)

    def save_step(step: int) -> None:
        for name in "ab":
            descriptor = os.open(root / name, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, f"{step:012d}".encode() + half(step))
            os.fsync(descriptor)
            os.close(descriptor)

    steps(save_step)


def judge_in_place(root: Path) -> Judged:
    try:
        contents = [(root / name).read_bytes() for name in "ab"]
        step = int(contents[0][:12])
    except (OSError, ValueError):
        return "none", 0, 0
    if any(len(content) != 12 + HALF_BYTES for content in contents):
        return "none", 0, 1
    whole = all(content == f"{step:012d}".encode() + half(step) for content in contents)
    return ("good" if whole else "torn"), step, 0


PATTERNS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Judged]]] = {
    "powerguard": (write_store, judge_store),
    "powerguard, no slots": (lambda root: write_store(root, slots=0), judge_store),
    "write + rename": (write_rename, judge_rename),
    "in place, fsync": (write_in_place, judge_in_place),
}
"""Name -> (writer, judge). Add one here to see it cut."""


def main(argv: list[str]) -> int:
    what, pattern, *rest = argv
    writer, judge = PATTERNS[pattern]
    if what == "write":
        writer(Path(rest[0]))
    for line in sys.stdin:
        found: Any = dict(zip(("verdict", "step", "refused"), judge(Path(line.strip())), strict=True))
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
