"""`powerguard explain job`: when training stood here for another host, on journals that the real loop wrote."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from powerguard.cli.main import main
from powerguard.cli.shared import EX_USAGE
from powerguard.core.model.events import TrainerSeen
from powerguard.daemon.attempt import rest
from powerguard.daemon.loop import Loop
from powerguard.sim.virtual import VirtualLoop
from tests.daemon.looped import World, until

LEFT = "gpu2 has left the job: its power fails"


def says(daemon: Loop, *, held_by: str = "", ended_by: str = "", step: int = 70) -> None:
    """Its trainer says this of the other hosts."""
    paused = bool(held_by or ended_by)
    daemon.submit(
        TrainerSeen(
            at_s=daemon.clock(),
            trainer="many",
            alive=True,
            step=step,
            step_s=1.0,
            paused=paused,
            hosts=3,
            held_by=held_by,
            ended_by=ended_by,
        )
    )


async def held_for_30_s(daemon: Loop) -> None:
    """It trains for a minute, and is then held by one host."""
    await rest(60.0)
    says(daemon)
    says(daemon, held_by="gpu2")
    await rest(30.0)


async def held(path: Path, *, cut: bool) -> None:
    """Held by one host and then by two, for 90 s; later the job ends, and trains again after 50 s."""
    world = World(path)
    async with world.running() as daemon:
        await held_for_30_s(daemon)
        says(daemon, held_by="gpu2, gpu3")
        if cut:
            world.ups.utility = False
            await until(lambda: type(daemon.state.phase).__name__ == "OnBattery")
            await rest(20.0)
            world.ups.utility = True
            await until(lambda: type(daemon.state.phase).__name__ == "Online")
        else:
            await rest(60.0)
        says(daemon)
        await rest(600.0)
        says(daemon, held_by="gpu2")
        await rest(10.0)
        says(daemon, ended_by=LEFT)
        await rest(50.0)
        says(daemon, step=71)
        await rest(10.0)


def journal(path: Path, *, cut: bool = False) -> Path:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(held(path, cut=cut))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def ran(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ran


Run = Callable[..., tuple[int, str, str]]


def test_who_held_it_and_how_long_the_gpus_were_idle(tmp_path: Path, run: Run) -> None:
    path = journal(tmp_path / "journal.sqlite")
    code, out, _ = run("explain", "job", "--json", "--journal", path)
    answer = json.loads(out)
    assert (code, answer["object"]) == (0, "explanation_job")
    first, then = answer["holds"]
    assert (first["trainer"], first["held_by"], first["job_ended"], first["step"]) == (
        "many",
        ["gpu2", "gpu3"],
        None,
        70,
    )
    assert first["idle_s"] == pytest.approx(90.0, abs=1.0)
    assert (then["held_by"], then["job_ended"]) == (["gpu2"], LEFT)
    assert then["idle_s"] == pytest.approx(60.0, abs=1.0)
    _, out, _ = run("explain", "job", "--journal", path)
    assert "held by gpu2, gpu3, on battery there" in out
    assert f"the job ended: {LEFT}" in out
    assert "the GPUs here were idle for" in out


@pytest.mark.parametrize("verb", ["explain", "report"])
def test_a_host_without_an_outage_is_pointed_to_it(tmp_path: Path, run: Run, verb: str) -> None:
    path = journal(tmp_path / "journal.sqlite")
    code, _, err = run(verb, "--journal", path)
    assert code == EX_USAGE
    assert "the journal has no outage; training stood 2 times because of another host: powerguard explain job" in err


def test_an_outage_of_its_own_points_to_it_too(tmp_path: Path, run: Run) -> None:
    path = journal(tmp_path / "journal.sqlite", cut=True)
    code, out, _ = run("explain", "--journal", path)
    assert code == 0
    assert "because of another host of its job: powerguard explain job" in " ".join(out.split())


async def cut_short(path: Path, *, by_boot: bool) -> None:
    """Held for 30 s, until the host goes down or the trainer's process ends; an hour later held again for 30 s."""
    world = World(path)
    async with world.running() as daemon:
        await held_for_30_s(daemon)
        if not by_boot:
            daemon.submit(TrainerSeen(at_s=daemon.clock(), trainer="many", alive=False))
            await rest(1.0)
    await rest(3600.0)
    if by_boot:
        world.next_boot()
    async with world.running() as daemon:
        await rest(60.0)
        says(daemon)
        await rest(3600.0)
        says(daemon, held_by="gpu3")
        await rest(30.0)
        says(daemon)
        await rest(1.0)


@pytest.mark.parametrize(
    ("by_boot", "how", "text"),
    [(True, "reboot", "the host was back from a reboot at"), (False, "gone", "then its process ended")],
)
def test_a_hold_that_ends_with_its_process_is_over(
    tmp_path: Path, run: Run, by_boot: bool, how: str, text: str
) -> None:
    """Neither a trainer that has gone nor a host that was off reports that no other host holds it any more."""
    path = tmp_path / "journal.sqlite"
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(cut_short(path, by_boot=by_boot))
    first, then = json.loads(run("explain", "job", "--json", "--journal", path)[1])["holds"]
    assert (first["held_by"], first["ended_by"]) == (["gpu2"], how)
    assert first["idle_s"] == (None if by_boot else pytest.approx(30.0, abs=1.0))
    assert (then["held_by"], then["ended_by"]) == (["gpu3"], "training")
    assert then["idle_s"] == pytest.approx(30.0, abs=1.0)
    assert text in run("explain", "job", "--journal", path)[1]


def test_a_host_that_was_never_held(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "journal.sqlite"

    async def nothing() -> None:
        async with World(path).running():
            await rest(5.0)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(nothing())
    code, out, _ = run("explain", "job", "--journal", path)
    assert code == 0
    assert "never stood" in out
    assert json.loads(run("explain", "job", "--json", "--journal", path)[1])["holds"] == []
