"""Whether a unit has processes: by its control group, in both versions, among others that come and go."""

import threading
from pathlib import Path

import pytest

from powerguard.effectors.trainer.unmodified import is_there


def test_a_units_processes_are_known_by_its_control_group(tmp_path: Path) -> None:
    two, one, none = tmp_path / "two", tmp_path / "one", tmp_path / "none"
    for root in (two, one, none):
        root.mkdir()
    unit = two / "system.slice" / "system-train.slice" / "train@1.service"
    unit.mkdir(parents=True)
    (unit / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert is_there("train@1.service", (two,)) is True
    (unit / "cgroup.events").write_text("populated 0\nfrozen 0\n")
    assert is_there("train@1.service", (two,)) is False
    assert is_there("other.service", (two,)) is False
    below = one / "system.slice" / "unmodified.service" / "rank0"
    below.mkdir(parents=True)
    (below.parent / "cgroup.procs").write_text("")
    (below / "cgroup.procs").write_text("4711\n")
    assert is_there("unmodified.service", (none, one)) is True
    (below / "cgroup.procs").write_text("")
    assert is_there("unmodified.service", (none, one)) is False
    assert is_there("unmodified.service", (none, tmp_path / "gone")) is None
    user = two / "user.slice" / "user-1000.slice" / "mine.service"
    user.mkdir(parents=True)
    assert is_there("mine.service", (two,)) is False


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_that_goes_while_it_is_looked_at_hides_no_other(tmp_path: Path, version: int) -> None:
    """Containers and logins come and go all day; a trainer that is not found is not asked for its checkpoint."""
    unit = tmp_path / "a.slice" / "b.slice" / "train.service"
    unit.mkdir(parents=True)
    if version == 2:
        (unit / "cgroup.events").write_text("populated 1\n")
    else:
        (unit / "z").mkdir()
        (unit / "z" / "cgroup.procs").write_text("4711\n")
    ended = threading.Event()

    def churn() -> None:
        places = [above / f"{number}.slice" for above in (tmp_path, unit.parent.parent, unit) for number in range(9)]
        while not ended.is_set():
            for place in places:
                place.mkdir()
            for place in places:
                place.rmdir()

    churning = threading.Thread(target=churn)
    churning.start()
    try:
        assert {is_there("train.service", (tmp_path,)) for _ in range(600)} == {True}
    finally:
        ended.set()
        churning.join()
