"""A process finds out by itself which rank it is and how it reaches the others."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerguard.trainer.ranks import RanksError, launched, private_folder

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "77"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (TORCHRUN, (3, 8, False)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, (3, 8, True)),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, (0, 2, True)),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, (0, 2, False)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, (1, 2, True)),
        ({"RANK": "0"}, None),
        (SRUN, (2, 4, False)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, (2, 4, True)),
        # The batch script itself: one process, whatever the job has reserved.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_NNODES": "4"}, None),
        (SRUN | TORCHRUN, (3, 8, False)),
        (MPIRUN, (1, 2, True)),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, (1, 2, False)),
    ],
)
def test_launchers(environment: dict[str, str], expected: tuple[int, int, bool] | None) -> None:
    """torchrun and its imitators, Slurm, Open MPI; torchrun within Slurm is torchrun."""
    found = launched(environment)
    assert (None if found is None else (found.rank, found.size, found.one_host)) == expected


def test_every_start_has_a_name_of_its_own() -> None:
    """A restart of the same job is another run."""
    first, again = launched(TORCHRUN), launched(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"})
    other = launched(TORCHRUN | {"RANK": "5"})
    assert first is not None
    assert again is not None
    assert other is not None
    assert first.run != again.run
    assert first.run == other.run


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "9" * 20},
        {"RANK": "0", "WORLD_SIZE": ""},
        SRUN | {"SLURM_PROCID": "4"},
    ],
)
def test_nonsense_is_refused_in_words(environment: dict[str, str]) -> None:
    """A launcher that says what cannot be."""
    with pytest.raises(RanksError, match=r"launcher sets"):
        launched(environment)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name is short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        yield Path(name)


PROGRAM = """
import json, sys
from powerguard.trainer.ranks import RanksError, detect
try:
    ranks = detect(join_s=60.0)
    ranks.add("all#", 1)
    while ranks.add("all#", 0) < ranks.size:
        pass
    print(json.dumps([type(ranks).__name__, ranks.rank, ranks.size, ranks.local_rank, ranks.hosts]), flush=True)
    sys.stdin.read()
except RanksError as error:
    print(json.dumps(str(error)))
"""


def run(runtime: Path, environments: list[dict[str, str]]) -> list[object]:
    """Start one process for each environment; return what they say."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "RANK", "WORLD", "OMPI"))}
    clean["XDG_RUNTIME_DIR"] = str(runtime)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=clean | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    said: list[object] = []
    for process in started:
        assert process.stdout is not None
        said.append(json.loads(process.stdout.readline()))
    for process in started:
        process.communicate(timeout=60)
    return said


def test_no_launcher_is_a_job_of_one(tmp_path: Path) -> None:
    """Nothing is opened, nothing is awaited."""
    assert run(tmp_path, [{}]) == [["Alone", 0, 1, 0, 1]]
    assert list(tmp_path.iterdir()) == []


def test_one_host_meets_at_a_socket_of_this_user_alone(short: Path) -> None:
    """Two processes of one start find each other by the environment; their folder is closed to others."""
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": "x"}
    said = run(short, [launch | {"RANK": "0"}, launch | {"RANK": "1"}])
    assert said == [["SocketRanks", 0, 2, 0, 1], ["SocketRanks", 1, 2, 1, 1]]
    folder = short / f"powerguard-{os.geteuid()}"
    assert folder.stat().st_mode & 0o077 == 0


def test_several_hosts_need_torchs_store(tmp_path: Path) -> None:
    """Without it, words that say what to do."""
    said = run(tmp_path, [SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}])
    assert "2 ranks on several hosts: call torch.distributed.init_process_group before Guard" in str(said[0])


def test_a_folder_that_others_enter_is_not_used(short: Path) -> None:
    """Somebody else's folder of that name would let him speak for a rank."""
    folder = short / f"powerguard-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    assert "is not a folder of this user alone" in str(run(short, [launch])[0])


def test_a_runtime_folder_of_another_user_is_not_used(short: Path) -> None:
    """`su` keeps XDG_RUNTIME_DIR: the ranks meet in /tmp, as where there is none."""
    short.chmod(0o500)
    before, user = os.environ.get("XDG_RUNTIME_DIR"), os.geteuid()
    os.environ["XDG_RUNTIME_DIR"] = str(short)
    os.seteuid(user or 65534)
    try:
        assert private_folder() == Path(f"/tmp/powerguard-{os.geteuid()}")
    finally:
        os.seteuid(user)
        os.environ.pop("XDG_RUNTIME_DIR")
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before
        short.chmod(0o700)
