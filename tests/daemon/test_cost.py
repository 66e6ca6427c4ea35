"""What an outage costs: counted while it runs, kept over a power-off, and the same wherever it is told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from powerguard.cli.main import main
from powerguard.core.model.actions import Conduct, ResumeTrainer, Scalar, TriggerCheckpoint
from powerguard.core.model.events import TrainerSeen
from powerguard.core.model.policy import Mode
from powerguard.core.model.state import GpuCap, Holding, OnBattery, Shutdown, State, Step, Trainer
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import Inline, Journal
from powerguard.daemon.observe import figures
from powerguard.daemon.observe.metrics import DaemonCollector, scrape
from powerguard.daemon.wiring import DryRunEffector
from powerguard.sim.world import policies
from tests.daemon.looped import CHECKPOINT_S, World, in_virtual_time, now_s, over, until
from tests.daemon.watched import outage, scene

DOCS = Path(__file__).parents[2] / "docs" / "reference"


def spent(world: World) -> figures.Cost:
    found = figures.cost_of(world.outages()[0].figures)
    assert found is not None
    return found


@in_virtual_time
async def test_a_hold_costs_the_checkpoint_and_the_wait(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await rest(5.0)
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Holding))
        held_s = now_s()
        await rest(30.0)
        world.ups.utility = True
        await over(daemon)
        held_s = now_s() - 1.0 - held_s
    found = spent(world)
    assert found.lost_s["held"] == pytest.approx(held_s, abs=1.5)
    assert found.lost_s["stalled"] == pytest.approx(CHECKPOINT_S, abs=1.5)
    assert (found.lost_s["stopped"], found.lost_s["rolled_back"], found.lost_s["capped"]) == (0.0, 0.0, 0.0)
    assert found.checkpoints == {"asked": 1, "durable": 1, "late": 0, "failed": 0}
    assert found.gpu_s is None
    assert set(found.return_s.values()) == {()}


@in_virtual_time
async def test_a_dry_run_costs_nothing_and_has_no_checkpoint(tmp_path: Path) -> None:
    """Its orders are only recorded, so no trainer was asked, wrote, or waited."""
    world = World(tmp_path / "journal.sqlite")
    world.policy = replace(world.policy, mode=Mode.DRY_RUN)
    parts = world.parts()
    dry = {TriggerCheckpoint: DryRunEffector(), ResumeTrainer: DryRunEffector()}
    async with world.running(replace(parts, effectors={**parts.effectors, **dry})) as daemon:
        for step in range(3):
            seen = TrainerSeen(at_s=daemon.clock(), trainer="llm", alive=True, conduct=Conduct.PAUSE, step=step)
            daemon.submit(replace(seen, stall_s=0.4))
            await rest(1.0)
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Shutdown))
        world.ups.utility = True
        await over(daemon)
    found = spent(world)
    assert (found.all_lost_s, set(found.checkpoints.values())) == (0.0, {0})
    assert "checkpoint_s" not in world.outages()[0].figures


@in_virtual_time
async def test_a_trainer_that_a_person_had_paused_before_costs_nothing(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    async with world.running() as daemon:
        await rest(5.0)
        for _ in range(2):
            paused = TrainerSeen(at_s=daemon.clock(), trainer="llm", alive=True, conduct=Conduct.PAUSE, paused=True)
            daemon.submit(paused)
            await rest(1.0)
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Holding))
        await rest(30.0)
        world.ups.utility = True
        await over(daemon)
    assert spent(world).all_lost_s == 0.0


async def powered_off(world: World) -> None:
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Shutdown))
        await until(lambda: world.host.done)
        await rest(1.0)
    await rest(1800.0)
    world.next_boot()
    world.ups.utility = True


@in_virtual_time
async def test_a_power_off_costs_the_time_until_training_runs(tmp_path: Path) -> None:
    """Over two boots: the sums of the first are in the journal when the second goes on."""
    world = World(tmp_path / "journal.sqlite")
    await powered_off(world)
    async with world.running() as daemon:
        began_s = now_s()
        await over(daemon)
        back_s = now_s() - began_s
    (record,) = world.outages()
    found = spent(world)
    assert found.lost_s["stopped"] == pytest.approx(1801.0 + back_s, abs=5.0)
    assert found.lost_s["held"] > 30.0
    assert found.lost_s["rolled_back"] == 0.0
    assert found.all_lost_s < float(record.figures["lasted_s"])  # type: ignore[arg-type]
    assert found.return_s["total"][0] == pytest.approx(
        sum(found.return_s[phase][0] for phase in ("power_on_to_boot", "boot_to_ready", "ready_to_resumed")), abs=0.01
    )
    assert found.return_s["power_on_to_boot"][0] == pytest.approx(20.0, abs=2.0)
    assert found.usual_s is not None
    assert found.usual_s > 1800.0


@in_virtual_time
async def test_a_recorded_power_off_costs_the_hold(tmp_path: Path) -> None:
    """In mode rehearse the host stays on: training is held until utility is back, and nothing was down."""
    world = World(tmp_path / "journal.sqlite")
    world.policy = replace(world.policy, mode=Mode.REHEARSE)
    async with world.running() as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Shutdown))
        await rest(300.0)
        world.ups.utility = True
        await over(daemon)
    found = spent(world)
    assert found.lost_s["held"] > 300.0
    assert found.lost_s["stopped"] == 0.0


@in_virtual_time
async def test_a_crash_costs_the_work_since_the_last_checkpoint(tmp_path: Path) -> None:
    """120 steps of 0.5 s ahead of the newest checkpoint, when the host goes dark."""
    world = World(tmp_path / "journal.sqlite")
    async with world.running(kill=True) as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, OnBattery))
        seen = TrainerSeen(at_s=daemon.clock(), trainer="llm", alive=True, step=620, step_s=0.5, durable_step=500)
        daemon.submit(seen)
        await rest(7.0)
    await rest(600.0)
    world.next_boot()
    world.ups.utility = True
    async with world.running() as daemon:
        await over(daemon)
    found = spent(world)
    assert found.lost_s["rolled_back"] == 60.0
    assert found.lost_s["stopped"] > 600.0


@in_virtual_time
async def test_failed_and_late_checkpoints_are_counted(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite")
    world.trainer.error = "disk full"
    async with world.running() as daemon:
        world.ups.utility = False
        await until(lambda: world.trainer.asked)
        world.trainer.takes_s = 2.0 * CHECKPOINT_S  # of the next one
        await rest(CHECKPOINT_S + 1.0)
        world.trainer.error = ""
        await until(lambda: isinstance(daemon.state.phase, Holding))
        world.ups.utility = True
        await over(daemon)
    found = spent(world)
    assert found.checkpoints == {"asked": 2, "durable": 1, "late": 1, "failed": 1}
    assert found.lost_s["stalled"] >= CHECKPOINT_S


@in_virtual_time
async def test_metrics_history_and_report_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One hold and one power-off: the counters, after a restart, are what `history --sum` and the reports print."""
    path = tmp_path / "journal.sqlite"
    world = World(path)
    async with world.running() as daemon:
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Holding))
        world.ups.utility = True
        await over(daemon)
        await rest(7200.0)
    await powered_off(world)
    async with world.running() as daemon:
        await over(daemon)
    async with world.running() as daemon:
        body, _ = scrape(DaemonCollector(daemon), "")
    samples = {
        (sample.name.removeprefix("powerguard_"), *sample.labels.values()): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }
    capsys.readouterr()
    assert main(["history", "--journal", str(path), "--sum", "--json"]) == 0
    summed = json.loads(capsys.readouterr().out)
    assert (summed["outages"], summed["unknown"]) == (2, 0)
    documented = json.loads((DOCS / "history-sum.json").read_text(encoding="utf-8"))
    assert summed.keys() == documented.keys()
    assert {key: summed[key].keys() for key in ("lost_s", "checkpoints", "return_s")} == {
        key: documented[key].keys() for key in ("lost_s", "checkpoints", "return_s")
    }
    for cause in figures.CAUSES:
        assert samples["training_lost_seconds_total", cause] == pytest.approx(summed["lost_s"][cause])
    assert summed["lost_s"]["all"] > 1800.0
    assert samples["usual_script_lost_seconds_total",] == pytest.approx(summed["usual_script_lost_s"])
    for result in figures.CHECKPOINTS:
        assert samples["checkpoints_total", result] == summed["checkpoints"][result]
    for phase in figures.PHASES:
        assert samples["return_duration_seconds_count", phase] == summed["return_s"][phase]["count"] == 1
        assert samples["return_duration_seconds_sum", phase] == pytest.approx(summed["return_s"][phase]["mean"])
    reported = 0.0
    for record in world.outages():
        assert main(["report", record.id, "--journal", str(path), "--json"]) == 0
        reported += json.loads(capsys.readouterr().out)["cost"]["lost_s"]["all"]
    assert reported == pytest.approx(summed["lost_s"]["all"])
    assert main(["history", "--journal", str(path), "--sum", "--since", "2099-01-01"]) == 0
    assert capsys.readouterr().out.startswith("the journal has no outage since 2099-01-01")
    assert main(["history", "--journal", str(path), "--since", "2099-01-01"]) == 0
    assert capsys.readouterr().out.startswith("the journal has no outage since 2099-01-01")
    for words in ([], ["--sum"]):
        assert main(["history", "--journal", str(path), *words, "--since", "monday"]) == 64
        assert "2026-11-01" in capsys.readouterr().err


def test_of_a_running_outage_and_an_old_record_nothing_is_reported() -> None:
    known = figures.cost_of({"trainers": 2.0, "lost_held_s": 10.0, "gpus": 8.0})
    assert known is not None
    assert known.gpu_s == 40.0
    found = figures.total([None, known, figures.cost_of({"on_battery_s": 12.0})])
    assert (found.outages, found.unknown, found.all_lost_s) == (1, 2, 10.0)


def test_a_return_whose_record_could_not_be_read_is_no_crash(tmp_path: Path) -> None:
    """The state is known, the figures are not: the daemon would end at each start until training runs again."""
    daemon = scene("recovery")
    journal = Journal(tmp_path / "journal.sqlite", boot_id="b", writer=Inline(), reader=Inline())
    made = figures.Figures(journal, "gpu-01")
    made.load(())
    for _ in range(2):
        made.note(daemon, Step(daemon.state))
    assert dict(made.of_outage(Step(daemon.state)))["lost_stopped_s"] == 0.0


def test_capped_training_loses_the_steps_that_it_did_not_do() -> None:
    """60 s at half speed lose 30 s; the time of a step is what it was before the outage."""
    trainer = Trainer(name="llm", step=100, step_s=9.0)
    meter, kept = figures.Meter(), dict[str, Scalar]()
    meter.online(State(trainers=(trainer,)), 0.0)
    meter.online(State(trainers=(replace(trainer, step=200),)), 100.0)
    capped = State(
        phase=OnBattery(outage=outage(since_s=100.0)),
        trainers=(replace(trainer, step=200),),
        owed=(GpuCap(outage="o", at_s=100.0),),
    )
    meter.begin()
    meter.step(kept, Step(capped), 100.0, 8)
    meter.step(kept, Step(replace(capped, trainers=(replace(trainer, step=215),))), 130.0, 8)
    meter.step(kept, Step(replace(capped, trainers=(replace(trainer, step=230),))), 160.0, 8)
    found = meter.end(kept, capped)
    assert found is not None
    assert found.lost_s["capped"] == pytest.approx(30.0)
    assert found.gpu_s == pytest.approx(240.0)


def test_the_usual_script_loses_what_it_trains_on_and_the_reboot() -> None:
    """Utility back after 30 s: it halts all the same. A checkpoint that outlasts its sleep is lost."""
    assert figures.usual_script_s(dark_s=4.0, checkpoint_s=20.0, at_risk_s=600.0, return_s=180.0) == 0.0
    short = figures.usual_script_s(dark_s=30.0, checkpoint_s=20.0, at_risk_s=600.0, return_s=180.0)
    assert short == 50.0 + 180.0
    long = figures.usual_script_s(dark_s=1000.0, checkpoint_s=20.0, at_risk_s=600.0, return_s=180.0)
    assert long == 50.0 + 945.0 + 180.0
    slow = figures.usual_script_s(dark_s=30.0, checkpoint_s=51.0, at_risk_s=600.0, return_s=180.0)
    assert slow == short + 605.0
    assert (policies.USUAL_LOOK_S, policies.USUAL_SLEEP_S) == (figures.USUAL_LOOK_S, figures.USUAL_SLEEP_S)
