"""Real processes over one root, on a disk that dawdles at every call: nothing is taken from under anybody's hands."""

from pathlib import Path

import pytest

from tests.trainer.rank_storm import judged, storm
from tests.trainer.toy import short_folder

ONE, TWO = ["a", "a", "a"], ["a", "a", "b"]


def held(folder: Path, hosts: list[str], seed: int, seconds: float) -> None:
    result = storm(folder, seed, seconds, hosts)
    wrong = judged(folder, result, hosts, seed)
    assert not wrong, "\n".join(wrong)  # all of it: one rank's line alone does not say which one hangs
    assert result["committed"] > 0
    assert len(result["ranks"]) == len(hosts)
    assert {each["final"] for each in result["ranks"]} == {result["ranks"][0]["final"]}


def test_a_short_storm() -> None:
    with short_folder() as folder:
        held(folder, ["a", "a"], 1, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
@pytest.mark.parametrize("hosts", [ONE, TWO], ids=["one host", "two hosts"])
def test_a_long_storm(hosts: list[str], seed: int) -> None:
    """With two hosts each has a root of its own at odd seeds, and they share one at even ones."""
    with short_folder() as folder:
        held(folder, hosts, seed, 8.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_storms_that_are_cut_short(seed: int) -> None:
    """Ranks are killed in the midst of it, three times over; nothing that was told to be durable is lost."""
    with short_folder() as folder:
        for turn in range(3):
            result = storm(folder, seed + turn, 4.0, ONE, kill=True)
            assert judged(folder, result, ONE, seed) == []
        held(folder, ONE, seed, 2.0)
