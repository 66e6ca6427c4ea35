"""The daemon's part of the host's check: a child looks, a good day is remembered, a failed look is no clean bill."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.actions import CheckHost, PollNow
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Ended, Spawn, run_child
from powerguard.effectors.host.check import MEMORY, HostCheckEffector
from powerguard.effectors.options import ResumeOptions
from tests.cli.checkpoint_sites import save


def order(seconds: float = 60.0) -> CheckHost:
    return CheckHost(id="c1", by_s=boottime_s() + seconds, outage="o1")


def effector_of(
    tmp_path: Path, *dirs: Path, spawn: Spawn = run_child, verify: Literal["manifest", "full"] = "manifest"
) -> HostCheckEffector:
    state = tmp_path / "state"
    state.mkdir(exist_ok=True)
    names = [str(each) for each in dirs]
    options = ResumeOptions(gpus="any", verify=verify)  # this machine's GPUs are not the tests' business
    socket = str(tmp_path / "no.sock")
    return HostCheckEffector(
        options,
        folder=state,
        dirs=names[:1],
        reported_dirs=lambda: names[1:],
        wall=lambda: 1000.0,
        gpu_socket=socket,
        spawn=spawn,
    )


async def test_the_daemon_hears_what_the_child_has_seen(tmp_path: Path) -> None:
    """Folders of the settings and those that trainers tell; one that is gone since a good day is an error."""
    first, second = tmp_path / "a", tmp_path / "b"
    save(first, 100, job="a")
    save(second, 200, job="b")
    effector = effector_of(tmp_path, first, second)
    detail = dict(await effector.carry_out(order()))
    assert f"a: step 100 (whole) in {first}; b: step 200 (whole) in {second}" == detail["newest"]
    assert effector.last is not None
    assert (effector.last.folders, effector.last.problems) == (2, ())
    assert effector.last.memory is not None
    (tmp_path / "state" / MEMORY).write_text(effector.last.memory, encoding="utf-8")
    second.rename(tmp_path / "away")
    with pytest.raises(EffectorError, match=r"b: it cannot be read: No such file or directory"):
        await effector.carry_out(order())
    with pytest.raises(TypeError):
        await effector.carry_out(PollNow(id="p", by_s=0.0, ups="a"))


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (Ended(returncode=-9, stdout=b"", stderr=b"", timed_out=True), r"the check did not end within \d+ s"),
        (Ended(returncode=1, stdout=b"", stderr=b"Traceback\nMemoryError\n"), "the check failed: MemoryError"),
        (Ended(returncode=0, stdout=b"[]", stderr=b""), "the check failed: status 0"),
        (Ended(returncode=0, stdout=b'{"problems": 1}', stderr=b""), "the check failed"),
        (OSError(11, "Resource temporarily unavailable"), "no child can be started"),
    ],
)
async def test_a_look_that_fails_is_a_reason_to_wait_and_never_a_clean_bill(
    tmp_path: Path, ended: Ended | OSError, why: str
) -> None:
    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        if isinstance(ended, OSError):
            raise ended
        return ended

    with pytest.raises(EffectorError, match=rf"this host cannot be checked: {why}"):
        await effector_of(tmp_path, spawn=spawn).carry_out(order())


async def test_who_asks_during_a_look_gets_what_it_finds(tmp_path: Path) -> None:
    """The gate's check and the daemon's own look must not take each other for a storage that hangs."""
    going, asked = asyncio.Event(), 0

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        nonlocal asked
        asked += 1
        await going.wait()
        return await run_child(argv, limit_s=limit_s, stdin=stdin, env=env)

    effector = effector_of(tmp_path, spawn=spawn)
    async with asyncio.TaskGroup() as group:
        first, second = group.create_task(effector.look()), group.create_task(effector.carry_out(order()))
        given_up = group.create_task(effector.look())
        await asyncio.sleep(0)
        given_up.cancel()
        going.set()
    assert (asked, first.result().problems, dict(second.result())["gpus"]) == (1, (), 0)
    await effector.look()
    assert asked == 2


class Days:
    """Answers looks as told, counts them, and ends the watch after some rounds."""

    def __init__(self, *, memory: str | None = "new", problems: Sequence[str] = (), rounds: int = 1) -> None:
        self.memory = memory
        self.problems = list(problems)
        self.looks = 0
        self.verify: list[str] = []
        self.left = rounds
        self.calm = self.waiting = False
        self.ends_calm = False

    async def spawn(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        self.looks += 1
        self.verify.append(json.loads(stdin)["verify"])
        self.calm = self.calm and not self.ends_calm
        answer = {
            "problems": self.problems,
            "notes": [],
            "gpus": 0,
            "folders": 0,
            "detail": {},
            "memory": self.memory,
        }
        return Ended(returncode=0, stdout=json.dumps(answer).encode(), stderr=b"")

    async def rest(self, seconds: float) -> None:
        assert seconds == 15.0
        self.left -= 1
        if not self.left:
            raise TimeoutError

    async def watch(self, tmp_path: Path) -> str | None:
        """Watch; return what stands in the file afterwards."""
        effector = effector_of(tmp_path, spawn=self.spawn, verify="full")
        with pytest.raises(TimeoutError):
            await effector.keep(lambda: self.calm, lambda: self.waiting, self.rest, first_s=0.0)
        path = tmp_path / "state" / MEMORY
        return path.read_text(encoding="utf-8") if path.exists() else None


async def test_a_good_day_is_remembered_once_in_ten_minutes(tmp_path: Path) -> None:
    days = Days(rounds=5)
    days.calm = True
    assert (await days.watch(tmp_path), days.looks) == ("new", 1)
    assert not list((tmp_path / "state").glob("*.new")), "half a file is never there"


async def test_on_a_good_day_no_checkpoint_is_read_although_it_is_before_training_starts(tmp_path: Path) -> None:
    """Every byte, each ten minutes, at the daemon's priority, would take the disk from the training that runs."""
    for calm, verify in ((True, "manifest"), (False, "full")):
        days = Days()
        days.calm, days.waiting = calm, not calm
        await days.watch(tmp_path)
        assert days.verify == [verify]


async def test_an_outage_that_begins_during_the_look_is_not_remembered(tmp_path: Path) -> None:
    """What the power took along  the host is like."""
    days = Days()
    days.calm = days.ends_calm = True
    assert (await days.watch(tmp_path), days.looks) == (None, 1)


async def test_while_the_gate_waits_it_is_looked_often_and_nothing_is_remembered(tmp_path: Path) -> None:
    days = Days(rounds=4)
    days.waiting = True
    assert (await days.watch(tmp_path), days.looks) == (None, 4)


async def test_in_an_outage_nobody_looks(tmp_path: Path) -> None:
    days = Days(rounds=4)
    assert (await days.watch(tmp_path), days.looks) == (None, 0)


async def test_a_state_folder_that_cannot_be_written_costs_the_memory_and_nothing_else(tmp_path: Path) -> None:
    days = Days(rounds=2)
    days.calm = True
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / f".{MEMORY}.new").mkdir()
    assert await days.watch(tmp_path) is None
