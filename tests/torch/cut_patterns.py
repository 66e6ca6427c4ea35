"""Ways of saving with torch, to be cut: as tests/trainer/cuts/patterns.py has them, for the same table.

python -m tests.torch.cut_patterns write PATTERN FOLDER
python -m tests.torch.cut_patterns judge PATTERN
"""

import logging
import os
import pickle
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from powerguard.trainer.dcp import load_newest_sealed, save_sealed
from powerguard.trainer.seal.manifest import SealError
from tests.trainer.cuts import patterns
from tests.trainer.cuts.patterns import HALF_BYTES, Judged, steps

UNREADABLE = (
    CheckpointException,
    SealError,
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    pickle.UnpicklingError,
    BadZipFile,
)


def state(step: int) -> dict[str, Any]:
    """Every byte of both halves tells the step: a mixture shows."""
    half = torch.full((HALF_BYTES,), step % 251, dtype=torch.uint8)
    return {"a": half, "b": half.clone(), "step": step}


def verdict(found: dict[str, Any]) -> str:
    expected = state(found["step"])
    whole = torch.equal(found["a"], expected["a"]) and torch.equal(found["b"], expected["b"])
    return "good" if whole else "torn"


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def write_dcp(root: Path) -> None:
    """A new folder for each step, the last two stay."""

    def save(step: int) -> None:
        dcp.save(state(step), storage_writer=dcp.FileSystemWriter(root / f"step-{step:06d}"))
        shutil.rmtree(root / f"step-{step - 2:06d}", ignore_errors=True)

    steps(save)


def judge_dcp(root: Path) -> Judged:
    refused = 0
    for folder in sorted(root.glob("step-*"), reverse=True):
        found = state(0)
        try:
            dcp.load(found, storage_reader=dcp.FileSystemReader(folder))
        except UNREADABLE:
            refused += 1
            continue
        return verdict(found), found["step"], refused
    return "none", 0, refused


def write_dcp_over(root: Path) -> None:
    """Over the same folder, one file for each tensor."""

    def save(step: int) -> None:
        dcp.save(state(step), storage_writer=dcp.FileSystemWriter(root / "step-last", single_file_per_rank=False))

    steps(save)


def write_sealed(root: Path) -> None:
    root.mkdir(exist_ok=True)
    steps(lambda step: save_sealed(state(step), root, step))


def judge_sealed(root: Path) -> Judged:
    before = len(list(root.glob("bad-*")))
    found = state(0)
    try:
        loaded = load_newest_sealed(found, root)
    except UNREADABLE:
        return "none", 0, 1
    refused = len(list(root.glob("bad-*"))) - before
    return ("none", 0, refused) if loaded is None else (verdict(found), loaded, refused)


# --- torch.save -------------------------------------------------------------------------------------------------------


def write_replace(root: Path, *, flush: bool = False) -> None:
    root.mkdir(exist_ok=True)

    def save(step: int) -> None:
        with (root / "last.tmp").open("wb") as file:
            torch.save(state(step), file)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        (root / "last.tmp").replace(root / "last")

    steps(save)


def judge_replace(root: Path) -> Judged:
    try:
        found = torch.load(root / "last", weights_only=True)
    except UNREADABLE:
        return "none", 0, int((root / "last").exists())
    return verdict(found), found["step"], 0


PATTERNS = {
    "torch DCP": (write_dcp, judge_dcp),
    "torch DCP, one folder": (write_dcp_over, judge_dcp),
    "torch DCP, sealed": (write_sealed, judge_sealed),
    "torch.save + replace": (write_replace, judge_replace),
    "torch.save + fsync + replace": (lambda root: write_replace(root, flush=True), judge_replace),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()  # DCP logs a traceback for each checkpoint that it cannot read
    patterns.PATTERNS |= PATTERNS
    sys.exit(patterns.main(sys.argv[1:]))
