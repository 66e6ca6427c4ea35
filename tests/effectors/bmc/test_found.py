"""What `bmc.policy: bracket` puts back is known over restarts, and its file can do no harm."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from powerguard.effectors.bmc.effector import FILE, FoundPolicy
from powerguard.effectors.bmc.ipmi import PowerRestorePolicy
from tests.peers.machine import folder_in_memory

LAST, ON = PowerRestorePolicy.LAST_STATE, PowerRestorePolicy.ALWAYS_ON


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Where the policy is written down, which may take half a second."""
    with folder_in_memory() as folder:
        yield folder


async def test_it_is_kept_and_written_only_where_it_is_another(tmp_path: Path) -> None:
    mine = FoundPolicy(tmp_path)
    assert await mine.read() is None
    await mine.write(LAST)
    assert await mine.read() is await FoundPolicy(tmp_path).read() is LAST
    written = (tmp_path / FILE).stat().st_ino
    await mine.write(LAST)
    assert (tmp_path / FILE).stat().st_ino == written, "each hour of each year"
    await mine.write(ON)
    assert await FoundPolicy(tmp_path).read() is ON
    forgetful = FoundPolicy()
    await forgetful.write(LAST)
    assert (await forgetful.read(), await FoundPolicy().read()) == (LAST, None)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"policy": 7}', '{"policy": "mostly-on"}', "[" * 4000, "\xff"])
async def test_a_file_that_makes_no_sense_is_nothing_that_is_known(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    mine = FoundPolicy(tmp_path)
    assert await mine.read() is None
    await mine.write(LAST)
    assert await FoundPolicy(tmp_path).read() is LAST


async def test_a_folder_that_cannot_be_had_costs_the_memory_of_a_restart_alone(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    mine = FoundPolicy(tmp_path)
    assert await mine.read() is None
    await mine.write(LAST)
    assert (await mine.read(), await FoundPolicy(tmp_path / "none").read()) == (LAST, None)


async def test_a_file_that_could_not_be_written_is_written_with_the_next_check(tmp_path: Path) -> None:
    """The disk was full: the same policy is found an hour later, and must not count as kept."""
    (tmp_path / FILE).mkdir()
    mine = FoundPolicy(tmp_path)
    await mine.write(LAST)
    (tmp_path / FILE).rmdir()
    await mine.write(LAST)
    assert await FoundPolicy(tmp_path).read() is LAST
