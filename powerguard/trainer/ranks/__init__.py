"""The ranks of a job and the store that they share: see `base`; `detect` finds out which, by itself."""

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from powerguard.trainer.ranks.base import Alone, Memory, MemoryRanks, Ranks, RanksError
from powerguard.trainer.ranks.socket_store import SocketRanks
from powerguard.trainer.ranks.torch_store import TorchRanks

__all__ = ["Alone", "Memory", "MemoryRanks", "Ranks", "RanksError", "SocketRanks", "TorchRanks", "detect"]

_LONGEST: Final = 50  # bytes of a folder: a unix socket's path has 107
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The launcher's settings for this process. one_host: all ranks run on this host. run: the name of this start."""

    rank: int
    size: int
    one_host: bool
    run: str


def detect(*, join_s: float = 300.0) -> Ranks:
    """Return this process's connection to the ranks of its job, by the first of these that there is.

    1. torch.distributed, if it is imported and initialised: its own store.
    2. What torchrun, Slurm's srun or Open MPI's mpirun have put into the environment: on one host a unix socket in a
       folder of this user alone.
    3. Neither: a job of one process.

    join_s: how long to wait for all ranks. torch is never imported here. Raises RanksError, also for ranks on several
    hosts without torch's store.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return Alone()
        return TorchRanks(join_s=join_s)
    launch = launched(os.environ)
    if launch is None or launch.size == 1:
        return Alone()
    if not launch.one_host:
        msg = (
            f"{launch.size} ranks on several hosts: call torch.distributed.init_process_group before Guard, "
            "or pass ranks=TorchRanks(store, rank, size)"
        )
        raise RanksError(msg)
    name = f"{sha256(launch.run.encode()).hexdigest()[:16]}.sock"
    return SocketRanks(private_folder() / name, launch.rank, launch.size, join_s=join_s)


def launched(environment: Mapping[str, str]) -> Launch | None:
    """Read what a launcher says; None where there was none. Raises RanksError where it makes no sense."""
    names: tuple[str, ...]
    if "RANK" in environment and "WORLD_SIZE" in environment:  # torchrun, and those that imitate it
        rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environment), None)
        one_host = environment.get("MASTER_ADDR", "") in _LOOPBACK
        if local is not None:
            one_host = _number(environment, local) == size
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
    elif "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        # Without a step it is the batch script itself: one process, whatever the job has reserved.
        rank, size = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_STEP_NUM_TASKS")
        one_host = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    elif "OMPI_COMM_WORLD_RANK" in environment and "OMPI_COMM_WORLD_SIZE" in environment:
        rank, size = _number(environment, "OMPI_COMM_WORLD_RANK"), _number(environment, "OMPI_COMM_WORLD_SIZE")
        one_host = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size)
        names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    else:
        return None
    if not 0 <= rank < size:
        msg = f"the environment says rank {rank} of {size} (a launcher sets both, see `env`)"
        raise RanksError(msg)
    run = "\n".join(f"{name}={environment.get(name, '')}" for name in names)
    return Launch(rank=rank, size=size, one_host=one_host, run=run)


def private_folder() -> Path:
    """Return a folder of this host that only this user can enter. Raises RanksError."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # After `su` it may still be another user's.
    is_mine = os.access(runtime, os.W_OK | os.X_OK, effective_ids=True) and Path(runtime).is_dir()
    usable = is_mine and runtime.startswith("/") and len(os.fsencode(runtime)) <= _LONGEST
    path = Path(runtime if usable else "/tmp") / f"powerguard-{os.geteuid()}"  # noqa: S108 - looked at below
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        msg = f"{path}: cannot be made: {error.strerror or error}"
        raise RanksError(msg) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        msg = f"{path}: is not a folder of this user alone (remove it, or set XDG_RUNTIME_DIR)"
        raise RanksError(msg)
    return path


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdecimal() or len(value) > 9:
        msg = f"{name}={value[:40]!r}: must be a whole number (a launcher sets it)"
        raise RanksError(msg)
    return int(value)
