"""A job on four hosts, each a process group with gloo between them: one commits, and no rank hangs in a collective."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed (scripts/test-torch gets it)")

from powerguard.trainer.store.store import newest_in
from powerguard.wire import HOST_LEFT, After, Reason
from tests.torch.hosts import Hosts
from tests.trainer.toy import short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def committed(hosts: Hosts, leaver: int) -> float:
    """Have one host commit and go dark; return how long the last other rank took to end, with the status of its own."""
    others = [host for host in hosts.all if host is not hosts.all[leaver]]
    began_s = time.monotonic()
    hosts.all[leaver].leave()
    assert [(host.name, host.end()) for host in others] == [(host.name, HOST_LEFT) for host in others]
    return max(host.ended_s for host in others) - began_s


@pytest.mark.timeout(400)
@pytest.mark.parametrize("leaver", [pytest.param(2, marks=pytest.mark.slow), 0])
def test_one_host_commits_in_the_hold_and_all_come_back(folder: Path, leaver: int) -> None:
    """Rank 0's host holds the store of all ranks. The job begins again where it stood, on all four hosts."""
    with Hosts(folder, 4) as hosts:
        hosts.start()
        hosts.until_training()
        hosts.all[leaver].trigger("e", after=After.PAUSE, reason=Reason.ON_BATTERY, deadline_s=60.0)
        step = hosts.all[leaver].durable("e").step
        assert step is not None
        hosts.until(lambda: all(one is not None and one.paused for one in [host.status() for host in hosts.all]))
        names = [status.held_by for host in hosts.all if (status := host.status()) is not None]
        assert names == ["" if number == leaver else f"gpu{leaver}" for number in range(4)]
        took_s = committed(hosts, leaver)
        print(f"\nhost {leaver} of 4 commits in the hold: the last other rank ended after {took_s:.2f} s")
        assert took_s < 100.0
        assert {max(s for _, s, _ in host.said()) for host in hosts.all} == {step}
        began_s = time.monotonic()
        hosts.start()
        hosts.until_training(step)
        starts = [[s for word, s, _ in host.said() if word == "start"][-1] for host in hosts.all]
        assert starts == [step] * 4
        ready_s = max(at_s for host in hosts.all for word, _, at_s in host.said() if word == "start")
        first_s = max(min(at_s for w, s, at_s in host.said() if w == "step" and s == step + 1) for host in hosts.all)
        print(f"all four hosts start: {ready_s - began_s:.2f} s to the ranks' meeting, {first_s - ready_s:.2f} s more")


@pytest.mark.timeout(400)
def test_a_host_leaves_while_training_runs(folder: Path) -> None:
    """Its checkpoint came to nothing, say: all stop at one step, and none hangs in the next one's collective."""
    with Hosts(folder, 4) as hosts:
        hosts.start()
        hosts.until_training()
        took_s = committed(hosts, 3)
        print(f"\nhost 3 of 4 leaves while training runs: the last other rank ended after {took_s:.2f} s")
        assert took_s < 100.0
        assert len({max(s for _, s, _ in host.said()) for host in hosts.all[:3]}) == 1


@pytest.mark.timeout(400)
def test_a_rank_that_hangs_in_a_collective_is_ended(folder: Path) -> None:
    """One rank is stuck in the middle of a step, and the others in the all-reduce with it: no boundary ever comes."""
    with Hosts(folder, 3) as hosts:
        hosts.start()
        hosts.until_training()
        (hosts.all[1].folder / "hang").touch()
        hosts.until(lambda: any(word == "hangs" for word, _, _ in hosts.all[1].said()))
        took_s = committed(hosts, 2)
        print(f"\na host leaves while a rank hangs: the last other rank ended after {took_s:.2f} s")
        assert took_s < 100.0
        assert "training came to no step: gpu2 has left the job" in hosts.all[0].output()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("dying", "shared", "moment"),
    [
        (0, False, "committing"),
        pytest.param(1, False, "committed", marks=pytest.mark.slow),
        pytest.param(0, True, "committing", marks=pytest.mark.slow),
    ],
)
def test_a_host_vanishes_between_durable_and_committed(folder: Path, dying: int, shared: bool, moment: str) -> None:
    """Every part is durable, the manifest is not everywhere: the checkpoint before is the newest one on all hosts."""
    roots = {"HOST_ROOT": folder / "ck"} if shared else {}
    with Hosts(folder, 2) as hosts:
        hosts.start(**roots)
        hosts.until_training()
        dies, stays = hosts.all[dying], hosts.all[1 - dying]
        stays.trigger("first", deadline_s=60.0)
        before = stays.durable("first").step
        assert before is not None
        hosts.until_training(before)
        (dies.folder / f"die-{moment}").touch()
        stays.trigger("second", after=After.PAUSE, deadline_s=60.0)
        assert dies.end() == -9
        hosts.until(lambda: stays.has_lost_the_others("second"))
        for host in hosts.all:
            host.lose_power()
        (dies.folder / f"die-{moment}").unlink()
        hosts.start(**roots)
        hosts.until(lambda: all(len([w for w, _, _ in host.said() if w == "start"]) == 2 for host in hosts.all))
        starts = {[s for word, s, _ in host.said() if word == "start"][-1] for host in hosts.all}
        last = max(s for word, s, _ in stays.said() if word == "step")
        assert len(starts) == 1, "all hosts begin at one step"
        assert starts == {before} or (moment == "committed" and starts == {last})
        hosts.until(lambda: stays.status() is not None)
        stays.trigger("third", deadline_s=60.0)
        third = stays.durable("third").step
        for root in {*(host.folder / "ck" for host in hosts.all)} if not shared else {folder / "ck"}:
            hosts.until(lambda root=root: (found := newest_in(root)) is not None and found.step == third)
