"""`report` and `history` as their users meet them: on journals that the real loop wrote, whole and damaged."""

import asyncio
import contextlib
import copy
import errno
import json
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from powerguard.cli.main import main
from powerguard.cli.outages.history import Elapsed
from powerguard.cli.outages.picture import timeline
from powerguard.cli.outages.report import headline
from powerguard.cli.render import duration
from powerguard.core.model.actions import (
    CheckHost,
    Conduct,
    ContinueTrainer,
    EnsurePolicy,
    PauseTrainer,
    Reboot,
    StopTrainer,
    TerminateTrainer,
)
from powerguard.core.model.events import (
    Abort,
    ForeignStop,
    Measured,
    PoweredOn,
    Reading,
    RecoverNow,
    SourceFailed,
    StartDrill,
    TrainerSeen,
)
from powerguard.core.model.policy import FeedPolicy, Mode, TrainerPolicy
from powerguard.core.model.state import Recovery
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import Line, OutageRecord
from powerguard.daemon.loop import Loop
from powerguard.daemon.wiring import DryRunEffector
from powerguard.sim.virtual import VirtualLoop
from powerguard.ups.base import Publish
from tests.cli.test_explain import STORIES as TOLD
from tests.cli.test_explain import in_phase, like, told_in
from tests.daemon.looped import Card, Doer, World, in_virtual_time, until
from tests.golden import FIGURES, Golden

pytestmark = pytest.mark.xdist_group("report")  # one process makes the journals, for all

SETTINGS = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
MANY = 40
FAILURE = "it does not answer"
NAME = 'job <b onclick="x()">{}</b> [a](http://evil.example) | `c`'
FEED = "rack <b>&"
Run = Callable[..., tuple[int, str, str]]


def _trainer(
    daemon: Loop, *, alive: bool = True, step: int | None = None, durable_step: int | None = None, step_s: float = 0.0
) -> None:
    """Let the trainer report this."""
    seen = TrainerSeen(at_s=daemon.clock(), trainer="llm", alive=alive, conduct=Conduct.PAUSE, checkpoint_s=20.0)
    daemon.submit(replace(seen, step=step, durable_step=durable_step, step_s=step_s))


class Second(Card):
    """Another card's view of the same power: the other feed."""

    def reading(self) -> Reading:
        return replace(super().reading(), ups=FEED)


async def _feeds_and_many(world: World) -> None:
    """Two feeds, forty trainers whose names would be markup, and each slower than planned."""
    trainers = tuple(TrainerPolicy(name=NAME.format(n), checkpoint_s=12.0, disk=f"d{n}") for n in range(MANY))
    alone = replace(world.policy, trainers=trainers)
    feeds = (FeedPolicy(policy=alone), FeedPolicy(policy=replace(alone, ups=FEED)))
    world.policy = replace(alone, feeds=feeds)
    parts = world.parts()
    both = [*parts.sources, (FEED, "card-b", Second(world.ups, world.clock, "card-b"))]
    async with world.running(replace(parts, sources=both), kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("Holding", daemon))
        await rest(20.0)
        world.ups.utility = True
        await until(in_phase("Online", daemon))
        await rest(5.0)


async def _one_after_another(world: World) -> None:
    """One feed of two goes to battery, and twenty seconds later the other: only then it is an outage."""
    feeds = (FeedPolicy(policy=world.policy), FeedPolicy(policy=replace(world.policy, ups=FEED)))
    world.policy = replace(world.policy, feeds=feeds)
    world.load = 0.3  # of each, so that one of them carries the host
    other = copy.copy(world.ups)
    parts = world.parts()
    both = [*parts.sources, (FEED, "card-b", Second(other, world.clock, "card-b"))]
    async with world.running(replace(parts, sources=both), kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await rest(20.0)
        other.utility = False
        await until(in_phase("OnBattery", daemon))
        await rest(5.0)
        world.ups.utility = other.utility = True
        await until(in_phase("Online", daemon))


class Seldom(Card):
    """A card that is asked every eight seconds."""

    async def run(self, publish: Publish) -> None:
        while True:
            publish(self.reading())
            await rest(8.0)


class Terse(Card):
    """A card that reports its output source, charge and runtime alone."""

    def reading(self) -> Reading:
        return replace(super().reading(), on_battery_s=None, input_present=None, input_v=None)


async def _dip_before(world: World) -> None:
    """One reading of battery, and the outage twenty seconds later."""
    parts = replace(world.parts(), sources=[("rack-a", "card", Terse(world.ups, world.clock))])
    async with world.running(parts, kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await rest(1.0)
        world.ups.utility = True
        await rest(20.0)
        world.ups.utility = False
        await until(in_phase("OnBattery", daemon))
        await rest(5.0)
        world.ups.utility = True
        await until(in_phase("Online", daemon))


async def _everything_fails(world: World) -> None:
    """No checkpoint, no BMC, a load that stays, a source that falls silent, and a card that was asked too seldom."""
    world.trainer.error, world.bmc.error = FAILURE, "no session"
    world.paused_load = world.load
    parts = replace(world.parts(), sources=[("rack-a", "card", Seldom(world.ups, world.clock))])
    async with world.running(parts, kill=True) as daemon:
        await until(lambda: daemon.clock() > 1065.0)
        world.ups.utility = False
        await until(in_phase("EmergencyCheckpoint", daemon))
        silent = SourceFailed(at_s=daemon.clock(), ups="rack-a", source="card", reason="no answer", lost=True)
        daemon.submit(silent)
        await until(in_phase("Shutdown", daemon))
        await rest(3.0)


async def _crashed(world: World) -> None:
    """The host went down while it trained on; the way back was measured, and training told its step."""
    async with world.running(kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("OnBattery", daemon))
        _trainer(daemon, step=500, durable_step=460)
        await rest(30.0)
    await rest(300.0)
    world.ups.utility = True
    world.next_boot()
    world.policy = replace(world.policy, checks_host=True)
    parts = world.parts()
    gpu = Doer(world.clock, takes_s=4.0, error="7 of 8 GPUs are there")
    async with world.running(replace(parts, effectors={**parts.effectors, CheckHost: gpu})) as daemon:
        daemon.submit(Measured(at_s=daemon.clock(), need="stop", seconds=33.0))
        daemon.submit(
            PoweredOn(at_s=daemon.clock(), because="reported by the BMC", cause="power-button", firmware_s=45.0)
        )
        await until(lambda: "host_incomplete" in daemon.state.alarms, 20_000)
        gpu.error = ""
        await until(lambda: isinstance(daemon.state.phase, Recovery) and bool(daemon.state.phase.started_at_s), 20_000)
        await rest(12.0)
        _trainer(daemon, step=461, durable_step=460)
        await rest(20.0)


async def _twice(world: World) -> None:
    """Utility fails again while the host comes back: a second power-off, in the same outage."""
    async with world.running(kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("Shutdown", daemon))
        await rest(10.0)
    await rest(100.0)
    world.ups.utility = True
    await rest(100.0)
    world.next_boot()
    async with world.running(kill=True) as daemon:
        await rest(3.0)
        world.ups.utility = False
        await until(in_phase("Shutdown", daemon))
        await rest(20.0)
    await rest(300.0)
    world.ups.utility = True
    world.next_boot("boot-c-of-the-test")
    async with world.running() as daemon:
        daemon.submit(PoweredOn(at_s=daemon.clock(), because="reported", cause="rtc-wake", ac_failed=False))
        await until(in_phase("Online", daemon), 20_000)
        await rest(20.0)


async def _trains_on(world: World) -> None:
    """The trainer does not pause: it is 30 steps past its only checkpoint when the host goes off."""
    async with world.running(kill=True) as daemon:
        seen = TrainerSeen(at_s=daemon.clock(), trainer="llm", alive=True, conduct=Conduct.CONTINUE, checkpoint_s=20.0)
        daemon.submit(replace(seen, step=5))
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("Holding", daemon))
        await until(in_phase("Shutdown", daemon))
        daemon.submit(replace(seen, at_s=daemon.clock(), step=37))
        await rest(6.0)
    await rest(600.0)
    world.ups.utility = True
    world.next_boot()
    async with world.running() as daemon:
        daemon.submit(PoweredOn(at_s=daemon.clock(), because="reported by the BMC", ac_failed=False))
        await until(in_phase("Online", daemon), 20_000)
        await rest(20.0)


async def _died(world: World) -> None:
    """The trainer dies before its checkpoint is durable, 12 steps after an older one."""
    world.trainer.takes_s = 60.0
    async with world.running() as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("EmergencyCheckpoint", daemon))
        _trainer(daemon, step=50, durable_step=38)
        await rest(2.0)
        world.trainer.error = "its process ended"
        _trainer(daemon, alive=False)
        await rest(70.0)
        world.ups.utility = True
        await until(in_phase("Online", daemon))
        await rest(20.0)


async def _signalled(world: World) -> None:
    """A load that does not fall: SIGSTOP, then SIGTERM, then utility."""
    world.paused_load = world.load
    world.policy = replace(world.policy, signals=True)
    parts, signals = world.parts(), Doer(world.clock)
    effectors = {**parts.effectors, StopTrainer: signals, TerminateTrainer: signals, ContinueTrainer: signals}
    async with world.running(replace(parts, effectors=effectors)) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(lambda: len(signals.done) == 2)
        await rest(2.0)
        world.ups.utility = True
        await until(in_phase("Online", daemon))
        await rest(20.0)


async def _late_reboot(world: World) -> None:
    """Utility is back while units still stop: powerguard makes its own power-off a reboot."""
    world.policy = replace(world.policy, late_reboot=True)
    parts = world.parts()
    parts = replace(parts, effectors={**parts.effectors, Reboot: world.host})
    async with world.running(parts, kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("Shutdown", daemon))
        world.ups.utility = True
        await rest(15.0)
        daemon.submit(ForeignStop(at_s=daemon.clock(), host_stopping=True))
        await rest(2.0)
    await rest(60.0)
    world.next_boot()
    async with world.running() as daemon:
        daemon.submit(PoweredOn(at_s=daemon.clock(), because="reported by the BMC", ac_failed=False))
        await until(in_phase("Online", daemon), 20_000)
        await rest(20.0)


async def _utility_stayed(world: World) -> None:
    """Utility is back while the host goes down, and stays: the BMC's bit and the UPS agree that AC never went."""
    async with world.running(kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("Shutdown", daemon))
        await rest(4.0)
        world.ups.utility = True
        await rest(6.0)
    await rest(100.0)
    world.next_boot()
    async with world.running() as daemon:
        daemon.submit(PoweredOn(at_s=daemon.clock(), because="reported", cause="rtc-wake", ac_failed=False))
        await until(in_phase("Online", daemon), 20_000)
        await rest(20.0)


async def _lost_before_the_pause(world: World) -> None:
    """The UPS falls silent before the pause: nobody has measured the load of it."""
    async with world.running(kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("OnBattery", daemon))
        await rest(5.0)
        world.cards[0].hangs = True
        silent = SourceFailed(at_s=daemon.clock(), ups="rack-a", source="card", reason="no answer", lost=True)
        daemon.submit(silent)
        await until(in_phase("Shutdown", daemon))
        await rest(3.0)


async def _dry_run(world: World) -> None:
    """In dry-run every action is only recorded: training draws its power until utility is back."""
    world.policy = replace(world.policy, mode=Mode.DRY_RUN)
    parts = world.parts()
    recorder = DryRunEffector()
    effectors = {kind: world.bmc if kind is EnsurePolicy else recorder for kind in parts.effectors}
    world.bmc.detail = (("policy", "always-off"), ("verified", False))
    async with world.running(replace(parts, effectors=effectors)) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("Shutdown", daemon))
        await rest(10.0)
        world.ups.utility = True
        await until(in_phase("Online", daemon))
        await rest(20.0)


async def _unseen(world: World) -> None:
    """The host loses power in phase online: the BMC reports it at the next boot, and training is started."""
    async with world.running(kill=True) as daemon:
        _trainer(daemon, step=500, durable_step=460, step_s=1.5)
        await until(lambda: daemon.clock() > 1120.0)
    await rest(1800.0)
    world.next_boot()
    async with world.running() as daemon:
        _trainer(daemon, alive=False)
        await rest(3.0)
        daemon.submit(
            PoweredOn(
                at_s=daemon.clock(),
                because="reported by the BMC",
                cause="policy-always-on",
                ac_failed=True,
                firmware_s=45.0,
            )
        )
        await until(lambda: isinstance(daemon.state.phase, Recovery) and bool(daemon.state.phase.started_at_s), 20_000)
        await rest(12.0)
        _trainer(daemon, step=461, durable_step=460)
        await rest(20.0)


async def _unseen_by_hand(world: World) -> None:
    """A watchdog has reset the host, and a person orders training started two hours later. Then it goes down again."""
    async with world.running(kill=True) as daemon:
        _trainer(daemon, step=500, durable_step=460, step_s=1.5)
        await until(lambda: daemon.clock() > 1120.0)
    await rest(600.0)
    world.next_boot()
    async with world.running(kill=True) as daemon:
        _trainer(daemon, alive=False)
        daemon.submit(PoweredOn(at_s=daemon.clock(), because="reported by the BMC", cause="watchdog"))
        await rest(7200.0)
        daemon.submit(RecoverNow(at_s=daemon.clock(), who="anna"))
        await rest(12.0)
        _trainer(daemon, step=461, durable_step=460)
        await rest(20.0)


async def _unseen_twice(world: World) -> None:
    """The host goes down again before training has reported a step."""
    async with world.running(kill=True) as daemon:
        _trainer(daemon, step=500, durable_step=460, step_s=1.5)
        await rest(120.0)
    for boot in ("boot-b-of-the-test", "boot-c-of-the-test"):
        await rest(600.0)
        world.next_boot(boot)
        async with world.running(kill=True) as daemon:
            _trainer(daemon, alive=False)
            daemon.submit(PoweredOn(at_s=daemon.clock(), because="no report"))
            await until(lambda: isinstance(daemon.state.phase, Recovery) and daemon.state.phase.started_at_s, 20_000)
            if boot == "boot-c-of-the-test":
                _trainer(daemon, step=461, durable_step=460)
            await rest(5.0)


async def _falls(world: World) -> None:
    """The charge falls at once, and the checkpoint is quick: only the wait for a dip holds the commit back."""
    world.trainer.takes_s = 0.1
    async with world.running(kill=True) as daemon:
        await until(lambda: daemon.clock() > 1060.0)
        world.ups.utility = False
        await until(in_phase("OnBattery", daemon))
        world.ups._left = 0.48
        await until(in_phase("Shutdown", daemon))
        await rest(3.0)


ENDS = {
    "unseen": _unseen,
    "unseen-by-hand": _unseen_by_hand,
    "unseen-twice": _unseen_twice,
    "dry-run": _dry_run,
    "falls": _falls,
    "trains-on": _trains_on,
    "died": _died,
    "signalled": _signalled,
    "late-reboot": _late_reboot,
    "utility-stayed": _utility_stayed,
    "lost-before": _lost_before_the_pause,
}
STORIES = {**TOLD, **ENDS, "twice": _twice, "many": _feeds_and_many, "bad": _everything_fails, "crashed": _crashed} | {
    "dip-before": _dip_before,
    "one-after-another": _one_after_another,
}


@pytest.fixture(scope="module")
def journals() -> Iterator[dict[str, Path]]:
    made = Path(tempfile.mkdtemp(dir="/tmp", prefix="pg "))
    paths = {name: made / f"{name}.sqlite" for name in STORIES}
    for name, story in STORIES.items():
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(told_in(paths[name], story))
    yield paths
    shutil.rmtree(made)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def ran(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ran


@pytest.fixture
def report(run: Run) -> Callable[[Path], dict[str, Any]]:
    """Return the object that `report --json` tells of the last outage of a journal."""

    def reported(journal: Path) -> dict[str, Any]:
        code, out, err = run("report", "--json", "--journal", journal)
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return reported


Report = Callable[[Path], dict[str, Any]]


def changed(journal: Path, path: Path, *statements: str) -> Path:
    """Return a copy of a journal with something done to it."""
    shutil.copy(journal, path)
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()
    return path


def test_a_return_from_a_stop_that_was_no_outage_begins_with_the_boot(
    report: Report, journals: dict[str, Path]
) -> None:
    """Two hours of an alarm that no person saw are no boot of two hours."""
    answer = report(journals["unseen-by-hand"])
    found = answer["recovery"]
    assert found["boot_s"] == pytest.approx(20.0, abs=1.0)
    assert found["gate_s"] == 0.0
    assert "recovery_slow" not in rules(answer)
    assert found["ours_s"] == pytest.approx(7212.0, abs=5.0) == answer["durations"]["recovery_s"]
    lasted = {part["name"]: part["s"] for part in answer["phases"]}
    assert lasted["boot"] == pytest.approx(20.0, abs=1.0)
    assert lasted["recovery"] == pytest.approx(7212.0, abs=5.0)


def test_steps_after_the_return_say_nothing_of_those_that_were_lost(report: Report, journals: dict[str, Path]) -> None:
    """The steps at the stop are not in the record of an outage that began with it, so they are unknown."""
    assert report(journals["unseen-twice"])["steps_lost"] is None


def rules(answer: dict[str, Any]) -> set[str]:
    return {each["rule"] for each in answer["advice"]}


# --- What is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("story", STORIES)
def test_the_object_is_as_documented(story: str, journals: dict[str, Path], report: Report) -> None:
    """And its phases follow each other without a hole, up to the last moment of which anything is known."""
    summary = report(journals[story])
    like(summary, "report")
    phases = summary["phases"]
    assert [p["to_s"] for p in phases[:-1]] == [p["from_s"] for p in phases[1:]]
    assert (phases[0]["from_s"], phases[-1]["to_s"]) == (0.0, summary["last_s"])
    marks = [mark["at_s"] for mark in summary["marks"]]
    assert marks == sorted(marks)
    settings = {each["setting"].split(".")[-1].split("[")[0] for each in summary["advice"] if each["setting"]}
    known = SETTINGS.read_text(encoding="utf-8")
    assert [name for name in settings if f"- `{name}` (" not in known] == [], "an option that there is not"


@pytest.mark.parametrize("story", STORIES)
def test_the_page_stands_alone(story: str, journals: dict[str, Path], run: Run) -> None:
    """Well-formed, nothing from elsewhere, no script, and nothing of a name that is markup."""
    code, page, _ = run("report", "--html", "-", "--journal", journals[story])
    assert code == 0
    drawn = page[page.index("<svg") : page.index("</svg>") + 6]
    ET.fromstring(drawn)
    assert re.findall(r"<script|<link|<img|src=|href=|url\(|@import|<b ", page) == []
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    coordinates = [float(x) for x in re.findall(r' (?:x|x1|x2|width)="(-?[\d.]+)"', drawn)]
    assert coordinates
    assert min(coordinates) >= 0.0
    assert max(coordinates) <= 960.0
    # On a phone what is wider scrolls in a box of its own, by keyboard too, and the box shows where there is more.
    boxes = re.findall(r'<div class="scroll" tabindex="0" role="region" aria-label="[^"]+">\s*<(?:table|svg)', page)
    assert len(boxes) == len(re.findall(r"<(?:table|svg)\b", page))
    assert page.count("<main>") == 1
    assert ' style="' not in page, "the policy of the read-only port admits the style sheet alone"
    (box,) = re.findall(r"\.scroll { overflow-x: auto; background:([^}]*)}", page)
    assert (box.count("no-repeat local"), box.count("no-repeat scroll")) == (2, 2)


@pytest.mark.parametrize("story", STORIES)
def test_a_story_is_reported(story: str, journals: dict[str, Path], run: Run, golden: Golden) -> None:
    """What the tests below assert by fields, in words."""
    code, out, err = run("report", "--journal", journals[story])
    assert (code, err) == (0, "")
    golden("report", out, varies=FIGURES)
    if story not in TOLD:
        golden("explain", run("explain", "--journal", journals[story])[1], varies=FIGURES)
    if story in {"dry-run", "powered-off", "bad"}:
        golden("report", run("report", "--markdown", "--journal", journals[story])[1], "markdown", varies=FIGURES)


def test_a_drill_just_before_the_outage_counts_in_the_prediction(tmp_path: Path, report: Report) -> None:
    """What the drill measured is what the pause was counted with, although the recording begins before the drill."""

    async def outage(world: World) -> None:
        world.paused_load, world.resumer.detail = 0.30, (("native", True), ("resumed", True), ("step", 7))
        parts = world.parts()
        async with world.running(
            replace(parts, effectors={**parts.effectors, PauseTrainer: world.trainer}), kill=True
        ) as daemon:
            seen = TrainerSeen(at_s=daemon.clock(), trainer="llm", alive=True, conduct=Conduct.PAUSE, step=1)
            daemon.submit(replace(seen, checkpoint_s=20.0, durable_age_s=10.0))
            await rest(60.0)
            daemon.submit(StartDrill(at_s=daemon.clock(), who="alice", scopes=("pause",), witness="simulated"))
            await until(lambda: daemon.state.learned.pauses and daemon.state.drill is None)
            world.ups.utility = False
            await until(in_phase("Holding", daemon))
            await rest(20.0)
            world.ups.utility = True
            await until(in_phase("Online", daemon))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(told_in(tmp_path / "journal.sqlite", outage))
    (load,) = [p for p in report(tmp_path / "journal.sqlite")["predictions"] if p["unit"] == "share"]
    assert (load["predicted"], load["measured"]) == (0.3, 0.3)


def test_a_power_off_and_back(journals: dict[str, Path], report: Report, run: Run) -> None:
    """Every part of it with its time: the sums of then against what came, and the way back by whose it is."""
    summary = report(journals["powered-off"])
    assert (summary["outcome"], summary["mode"], summary["boots"], summary["steps_lost"]) == (
        "clean_shutdown",
        "armed",
        2,
        0,
    )
    names = [p["name"] for p in summary["phases"]]
    assert names == ["on_battery", "emergency_checkpoint", "holding", "shutdown", "off", "boot", "recovery"]
    assert sum(p["s"] for p in summary["phases"]) == pytest.approx(summary["durations"]["lasted_s"], abs=0.01)
    assert summary["recovery"] == {
        "away_s": 604.85, "stop_s": None, "powered_on_by": None, "ac_failed": None, "ac_gone": None, "firmware_s": None,
        "boot_s": 20.0, "gate_s": 10.0, "check_s": None, "start_s": 0.0, "resumed_s": None, "ours_s": 10.0,
    }  # fmt: skip
    load = next(p for p in summary["predictions"] if p["unit"] == "share")
    assert (load["predicted"], load["measured"]) == (0.45, 0.4)
    checkpoint = next(p for p in summary["predictions"] if p["what"].startswith("all checkpoints"))
    assert (checkpoint["predicted"], checkpoint["measured"]) == (20.0, 20.0)
    assert summary["detection"]["confirmed_s"] - summary["detection"]["power_lost_s"] <= 1.5
    assert rules(summary) == {"return_unknown"}, "all went as planned, and the discharge measured the battery's health"
    assert "health_unknown" in rules(report(journals["dip"])), "a dip measures nothing"
    out = run("report", "--journal", journals["powered-off"])[1]
    assert (summary["host"], out.startswith("gpu-01: outage ")) == ("gpu-01", True)
    assert run("report", "--markdown", "--journal", journals["powered-off"])[1].startswith("# gpu-01: outage ")
    assert "<title>gpu-01: outage " in run("report", "--html", "-", "--journal", journals["powered-off"])[1]


def test_an_outage_that_runs(journals: dict[str, Path], report: Report) -> None:
    """So far, and nothing of an end that there was not."""
    summary = report(journals["running"])
    assert (summary["ended_at"], summary["outcome"], summary["durations"]["lasted_s"]) == (None, None, None)
    assert summary["phases"][-1]["name"] == "holding"
    assert 90.0 < summary["phases"][-1]["from_s"] < 110.0
    assert summary["phases"][-1]["s"] < 10.0


def test_a_host_that_crashed(journals: dict[str, Path], report: Report) -> None:
    """What was lost is what training was ahead of its newest checkpoint; the dark ends where the kernel began."""
    summary = report(journals["crashed"])
    assert (summary["outcome"], summary["steps_lost"]) == ("dirty", 40)
    assert [p["name"] for p in summary["phases"]] == ["on_battery", "off", "boot", "recovery"]
    assert summary["phases"][2]["s"] == 65.0, "power-on to OS: the firmware's part is in it"
    assert summary["recovery"]["stop_s"] == 33.0
    assert (summary["recovery"]["powered_on_by"], summary["recovery"]["firmware_s"]) == ("power-button", 45.0)
    assert summary["recovery"]["check_s"] == pytest.approx(22.0, abs=1.0), "three times, and a rest between"
    assert summary["recovery"]["gate_s"] == pytest.approx(38.0, abs=1.0), "utility had to hold for a minute, all in all"
    assert summary["recovery"]["resumed_s"] == pytest.approx(12.0, abs=0.5), "which ends the outage"
    assert summary["recovery"]["ours_s"] == pytest.approx(72.0, abs=1.5)
    assert {"dirty", "switched_on_by_hand", "host_incomplete"} <= rules(summary)


def test_a_second_power_off_in_the_same_outage(journals: dict[str, Path], report: Report) -> None:
    """Both are there, each with its darkness; the host was away for the sum of both."""
    summary = report(journals["twice"])
    names = [p["name"] for p in summary["phases"]]
    assert names[3:] == ["shutdown", "off", "boot", "recovery", "shutdown", "off", "boot", "recovery"]
    dark_s = sum(p["s"] for p in summary["phases"] if p["name"] in ("off", "boot"))
    assert summary["boots"] == 3
    assert summary["durations"]["away_s"] == pytest.approx(dark_s, abs=0.1)
    assert summary["recovery"]["away_s"] < dark_s, "of the last return alone"
    assert (summary["recovery"]["powered_on_by"], summary["recovery"]["ac_gone"]) == ("rtc-wake", None)
    assert "ac_never_gone" not in rules(summary), "the UPS was on battery when it was last heard"
    assert sum(p["s"] for p in summary["phases"]) == pytest.approx(summary["durations"]["lasted_s"], abs=0.1)


_DONE = (
    "nothing can be lost",
    "was asked for",
    "is powered off",
    "under way",
    "held, paused",
    "every checkpoint is durable",
    "was ordered",
)
"""What explain and report say of an armed outage (the golden files have it), and of no dry-run."""


def test_a_dry_run_claims_nothing_that_was_not_done(journals: dict[str, Path], report: Report, run: Run) -> None:
    """Conditional, named as a dry-run in every header, and no prediction or advice of what was only recorded."""
    summary = report(journals["dry-run"])
    assert (summary["mode"], summary["outcome"]) == ("dry-run", "rehearsed")
    assert [p["unit"] for p in summary["predictions"]] == ["s"]
    assert rules(summary) <= {"health_unknown", "no_runtime_table"}
    for verb in (("report",), ("report", "--markdown"), ("explain",)):
        out = " ".join(run(*verb, "--journal", journals["dry-run"])[1].split())
        assert re.search(r"\(dry\\?-run\)", out), verb
        for claim in _DONE:
            assert claim not in out, verb


def test_the_curve_is_drawn_at_the_scale_of_the_outage(journals: dict[str, Path], report: Report) -> None:
    """An idle UPS on utility reports hours, which would flatten the minutes that decided."""
    summary = report(journals["held"])
    top = max(point["reported_s"] for point in summary["runtime"])
    after = [stretch for feed in summary["feeds"] for stretch in feed["stretches"] if stretch["source"] == "utility"][
        -1
    ]
    summary["runtime"].append(summary["runtime"][-1] | {"at_s": after["to_s"], "reported_s": 100_000.0})
    drawn = timeline(summary, [])
    assert duration(100_000.0) not in drawn
    assert duration(top) in drawn


def drawn_lines(drawing: ET.Element, name: str) -> list[list[tuple[float, float]]]:
    """The points of each line of this class."""
    found = (each.get("points", "") for each in drawing.iter("polyline") if each.get("class") == name)
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in points.split())] for points in found]


def test_predictions_are_drawn_beside_what_came(journals: dict[str, Path], report: Report) -> None:
    """Runtime, charge and load: the dashed line ends where the forecast said, the whole line where it was."""
    summary = report(journals["powered-off"])
    drawing = ET.fromstring(timeline(summary, []))
    level = {text.text: float(text.get("y", "")) - 4.0 for text in drawing.iter("text") if text.get("class") == "soft"}

    def percent(y: float) -> float:
        return 100.0 - 50.0 * (y - level["100 %"]) / (level["50 %"] - level["100 %"])

    (load,) = drawn_lines(drawing, "load predicted")
    predicted = next(each for each in summary["predictions"] if each["unit"] == "share")
    assert [percent(y) for _, y in load] == pytest.approx([100.0 * predicted["predicted"]] * 2, abs=0.2)
    measured = [percent(y) for x, y in drawn_lines(drawing, "load")[0] if load[0][0] + 10.0 < x < load[1][0]]
    assert measured[-1] == pytest.approx(100.0 * predicted["measured"], abs=0.2)

    began, paused, held = drawn_lines(drawing, "effective predicted")[:3]
    was = drawn_lines(drawing, "effective")
    assert [line[0] for line in was] == [line[0] for line in (began, paused, held)], "both begin at the decision"
    for each in (p for p in summary["predictions"] if p["what"].startswith("effective runtime")):
        assert each["measured"] == pytest.approx(each["predicted"], abs=1.0), "the load was constant"
    assert began[1][1] == pytest.approx(was[0][1][1], abs=1.0)
    assert held[1][1] == pytest.approx(was[2][1][1], abs=1.0)

    charges = [percent(y) for line in drawn_lines(drawing, "charge") for _, y in line]
    known = [point["charge_pct"] for point in summary["runtime"]]
    assert charges == pytest.approx(known, abs=0.6)
    foretold = drawn_lines(drawing, "charge predicted")
    assert len(foretold) == 4
    reported = dict(drawn_lines(drawing, "charge")[0])
    at_pause = reported[min(reported, key=lambda x: abs(x - foretold[0][1][0]))]
    assert percent(foretold[0][1][1]) == pytest.approx(percent(at_pause), abs=9.0), "a battery of 75 % was presumed"


def test_few_readings_of_a_long_outage_are_one_line(journals: dict[str, Path], report: Report) -> None:
    """A silent UPS still makes a gap in it."""
    summary = report(journals["held"])
    point = summary["runtime"][0]
    summary["runtime"] = [point | {"at_s": 5.0 * number} for number in (*range(10), *range(30, 40))]
    drawing = ET.fromstring(timeline(summary, []))
    assert [len(line) for line in drawn_lines(drawing, "charge")] == [10, 10]
    summary["runtime"] = [point | {"at_s": 90.0 * number} for number in range(10)]
    assert [len(line) for line in drawn_lines(ET.fromstring(timeline(summary, [])), "charge")] == [10]


def test_a_checkpoint_at_the_end_has_its_words_within_the_drawing(journals: dict[str, Path], report: Report) -> None:
    """The outage still runs: behind the bar there is no room for them."""
    summary = report(journals["running"])
    drawing = ET.fromstring(timeline(summary, []))
    (words,) = (text for text in drawing.iter("text") if (text.text or "").startswith("checkpoint of step"))
    at, width = float(words.get("x", "")), 6.0 * len(words.text or "")
    left = {"start": at, "middle": at - width / 2, "end": at - width}[words.get("text-anchor", "start")]
    assert 118.0 <= left <= left + width <= 960.0


def test_what_the_ups_does_not_report_is_not_drawn(journals: dict[str, Path], report: Report) -> None:
    summary = report(journals["held"])
    summary["runtime"] = [point | {"reported_s": None, "load_pct": None} for point in summary["runtime"]]
    drawing = ET.fromstring(timeline(summary, []))
    assert (drawn_lines(drawing, "reported"), drawn_lines(drawing, "load")) == ([], [])
    assert drawn_lines(drawing, "charge") != []
    summary["runtime"] = []
    assert ">unknown<" in timeline(summary, [])


def test_a_bare_stop_is_not_reported_as_an_orderly_one(
    journals: dict[str, Path], report: Report, golden: Golden
) -> None:
    summary = report(journals["powered-off"])
    golden("report", headline(summary)[0], "full")
    next(row for row in summary["budget"] if row["phase"] == "shutdown")["grade"] = "bare"
    golden("report", headline(summary)[0], "bare")


def test_the_page_says_when_it_was_made(journals: dict[str, Path], run: Run, golden: Golden) -> None:
    """And shows no backtick: a page has no code in them."""
    out = run("report", "--html", "-", "--journal", journals["bad"])[1]
    assert re.search(r"<footer><p>\w+ \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4} ", out)
    assert "`" not in out
    words = re.sub(r"<[^>]+>", " ", out.partition("</svg>")[2])
    golden("report", "\n".join(line.strip() for line in words.splitlines() if line.strip()), varies=FIGURES)


def test_why_a_commit_waited(journals: dict[str, Path], report: Report) -> None:
    """The stop no longer fitted, and only the wait for a dip held the commit back: no reserve is blamed."""
    summary = report(journals["falls"])
    assert "commit_waited" in rules(summary)
    assert "commit_late" not in rules(summary)
    assert not {"commit_waited", "commit_late"} & rules(report(journals["powered-off"]))


def test_the_stop_of_the_commit_is_judged(journals: dict[str, Path], report: Report) -> None:
    """A full stop at the commit, and sums of a short one after it: no stop was cut short."""
    summary = report(journals["powered-off"])
    grades = [(row["phase"], row["grade"]) for row in summary["budget"]]
    assert ("shutdown", "full") in grades
    assert "stop_cut_short" not in rules(summary)


def test_a_trainer_that_trains_on(journals: dict[str, Path], report: Report, run: Run) -> None:
    """What it did after its checkpoint was lost with the host, in steps and seconds; nothing claims a pause."""
    summary = report(journals["trains-on"])
    (llm,) = summary["trainers"]
    assert (llm["after"], llm["step"], llm["steps_lost"], summary["steps_lost"]) == ("continue", 7, 30, 30)
    commit_s = next(b["at_s"] for b in summary["budget"] if b["phase"] == "shutdown")
    assert llm["at_risk_s"] == pytest.approx(commit_s - llm["durable_s"])
    assert llm["at_risk_s"] > 1.0
    assert "trained_on" in rules(summary)
    for verb in ("report", "explain"):
        out = run(verb, "--journal", journals["trains-on"])[1]
        assert not re.search(r"nothing can be lost|[Tt]raining waits|held, paused|asked to pause", out)


def test_a_trainer_that_died(journals: dict[str, Path], report: Report) -> None:
    """The host stayed up, and 12 steps are lost all the same."""
    summary = report(journals["died"])
    (llm,) = summary["trainers"]
    assert llm["ended_s"] is not None
    assert (llm["durable_s"], llm["steps_lost"], summary["steps_lost"]) == (None, 12, 12)


def test_signals_are_reported(journals: dict[str, Path], report: Report, run: Run) -> None:
    summary = report(journals["signalled"])
    (llm,) = summary["trainers"]
    assert [each["signal"] for each in llm["signals"]] == ["SIGSTOP", "SIGTERM"]
    assert all(each["load_before_pct"] == each["load_after_pct"] is not None for each in llm["signals"]), "in vain"
    assert (summary["outcome"], summary["steps_lost"]) == ("resumed_in_place", 0), (
        "its checkpoint is of the paused step"
    )
    assert llm["ended_s"] == llm["signals"][1]["at_s"]
    assert "signalled" in rules(summary)
    assert "SIGSTOP, SIGTERM" in run("report", "--journal", journals["signalled"])[1].splitlines()[1]


@pytest.mark.parametrize(
    ("story", "by", "gone", "rule"),
    [
        ("late-reboot", "late-reboot", False, None),
        ("utility-stayed", "rtc-wake", False, "ac_never_gone"),
        ("trains-on", None, None, "return_unknown"),
    ],
)
def test_what_brought_the_host_back(
    story: str, by: str | None, gone: bool | None, rule: str | None, journals: dict[str, Path], report: Report
) -> None:
    """Our own order, the UPS's output and the BMC; unknown if they do not settle it: a clear bit proves nothing."""
    summary = report(journals[story])
    back = summary["recovery"]
    assert (back["powered_on_by"], back["ac_failed"], back["ac_gone"]) == (by, False, gone)
    found = rules(summary) & {"ac_never_gone", "return_unknown", "switched_on_by_hand"}
    assert found == ({rule} if rule else set())


def test_a_load_that_nobody_read_is_not_measured(journals: dict[str, Path], report: Report) -> None:
    summary = report(journals["lost-before"])
    assert any(b["phase"] == "emergency_checkpoint" for b in summary["budget"])
    assert [p for p in summary["predictions"] if p["unit"] == "share"] == []
    assert "load_high" not in rules(summary)


def test_a_dip_before_the_outage_is_no_late_detection(journals: dict[str, Path], report: Report) -> None:
    summary = report(journals["dip-before"])
    assert summary["feeds"][0]["stretches"][1]["source"] == "battery"
    assert summary["feeds"][0]["stretches"][1]["from_s"] < -15.0
    assert summary["detection"]["first_heard_s"] >= -1.0
    assert summary["detection"]["confirmed_s"] - summary["detection"]["power_lost_s"] <= 2.5
    assert "late_detection" not in rules(summary)


def test_a_lost_redundancy_before_the_outage_is_no_late_detection(journals: dict[str, Path], report: Report) -> None:
    """While the other feed had utility there was no outage: faster polling would not have found it sooner."""
    summary = report(journals["one-after-another"])
    assert min(s["from_s"] for feed in summary["feeds"] for s in feed["stretches"] if s["source"] == "battery") < -15.0
    assert summary["detection"]["confirmed_s"] - summary["detection"]["power_lost_s"] <= 2.5
    assert "late_detection" not in rules(summary)


def test_feeds_and_trainers_by_the_dozen(journals: dict[str, Path], report: Report, run: Run) -> None:
    """Each feed has its lane; the text names a dozen trainers, the page all; the advice names five."""
    summary = report(journals["many"])
    assert [feed["ups"] for feed in summary["feeds"]] == ["rack-a", FEED]
    assert {s["source"] for feed in summary["feeds"] for s in feed["stretches"]} == {"utility", "battery"}
    assert len(summary["trainers"]) == MANY
    slow = next(each for each in summary["advice"] if each["rule"] == "checkpoint_slow")
    assert {"20 s", "12 s"} <= set(re.findall(r"\d+ s", slow["text"]))
    assert "checkpoint_s: 2" in slow["text"]
    assert f"{MANY - 5} more" in slow["text"]
    out = run("report", "--journal", journals["many"])[1]
    assert sum("onclick" in line and "checkpoint" not in line for line in out.splitlines()) == 12
    page = run("report", "--html", "-", "--journal", journals["many"])[1]
    assert all(f"&gt;{n}&lt;/b&gt;" in page for n in range(MANY))
    assert f"{MANY} of {MANY} trainers durable" in page
    markdown = run("report", "--markdown", "--journal", journals["many"])[1]
    assert r"\<b onclick" in markdown
    assert "[a](http" not in markdown
    rows = [line for line in markdown.splitlines() if "onclick" in line and line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, "a name makes no new column"


def test_all_that_went_wrong_is_reported(journals: dict[str, Path], report: Report, run: Run) -> None:
    """Each with what to do, the gravest first; what came of it is not told as nothing lost."""
    summary = report(journals["bad"])
    assert {"checkpoint_missing", "bmc_not_verified", "load_not_fallen", "late_detection", "source_lost"} <= rules(
        summary
    )
    levels = [each["level"] for each in summary["advice"]]
    assert levels == sorted(levels, key=("error", "warning", "info").index)
    assert summary["steps_lost"] is None
    assert summary["trainers"][0]["failure"] == FAILURE
    assert "checkpoint_repeated" in rules(report(journals["held"]))


@in_virtual_time
async def test_an_abort_ends_the_pause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its load of training was taken for the paused one, and a drill was advised for it."""
    world = World(tmp_path / "j.sqlite")
    async with world.running() as daemon:
        await rest(5.0)
        world.ups.utility = False
        await until(in_phase("Holding", daemon))
        await rest(5.0)
        daemon.submit(Abort(at_s=daemon.clock(), who="root", reason="diesel"))
        await rest(30.0)
        world.ups.utility = True
        await until(in_phase("Online", daemon))
        await rest(1.0)
    assert main(["report", "--json", "--journal", str(world.path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    (load,) = [each["measured"] for each in answer["predictions"] if each["unit"] == "share"]
    assert (answer["outcome"], load) == ("resumed_in_place", pytest.approx(world.paused_load))
    assert "load_high" not in rules(answer)


# --- What the journal no longer tells ---------------------------------------------------------------------------------


def test_an_older_journal(journals: dict[str, Path], report: Report, run: Run, tmp_path: Path, golden: Golden) -> None:
    """Schema 1 kept one reading in five seconds and no settings: both are said, and the rest is told."""
    path = changed(journals["powered-off"], tmp_path / "old.sqlite", "DROP TABLE recorded", "PRAGMA user_version = 1")
    summary = report(path)
    assert (summary["mode"], summary["steps_lost"]) == (None, 0)
    assert summary["feeds"][0]["stretches"]
    assert summary["trainers"][0]["expected_s"] is None
    assert len(summary["doubts"]) == 1
    golden("report", run("report", "--journal", path)[1], varies=FIGURES)


def test_a_power_off_whose_steps_are_gone_has_an_unknown_loss(
    journals: dict[str, Path], report: Report, tmp_path: Path
) -> None:
    """A journal that was rebuilt from a damaged file may have the outage and no step of it."""
    summary = report(changed(journals["powered-off"], tmp_path / "j.sqlite", "DELETE FROM entries"))
    assert (summary["outcome"], summary["steps_lost"]) == ("clean_shutdown", None)


def test_an_export_without_its_first_inputs_is_not_complete(
    journals: dict[str, Path], run: Run, tmp_path: Path
) -> None:
    """The oldest inputs of a very long outage are removed: a replay of it must say so."""
    first = "DELETE FROM recorded WHERE seq = (SELECT min(seq) FROM recorded)"
    path = changed(journals["powered-off"], tmp_path / "j.sqlite", first)
    meta = json.loads(run("history", "export", "last", "--journal", path)[1].splitlines()[0])
    assert (meta["complete"], meta["dropped"]) == (False, 0)


@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", '"<b>"', "null", "true", "[1]", "-5", "1e300"])
def test_figures_that_are_none_are_unknown(value: str, journals: dict[str, Path], run: Run, tmp_path: Path) -> None:
    """Every verb still answers, and what is for programs is JSON."""
    with contextlib.closing(sqlite3.connect(journals["held"])) as db:
        ((text,),) = db.execute("SELECT figures FROM outages").fetchall()
    figures = "{" + ", ".join(f'"{name}": {value}' for name in json.loads(text)) + "}"
    path = changed(journals["held"], tmp_path / "j.sqlite", f"UPDATE outages SET figures = '{figures}'")
    for words in ("history", "history --sum", "report", "report --markdown", "report --html -", "explain"):
        assert run(*words.split(), "--journal", path)[0] == 0
    for words in ("history", "history --sum", "report", "explain"):
        _, out, _ = run(*words.split(), "--json", "--journal", path)
        json.loads(out, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "cut",
    [
        "DELETE FROM entries",
        "DELETE FROM entries WHERE kind != 'event'",
        "DELETE FROM entries WHERE kind = 'note' AND event = 'phase_changed'",
        "DELETE FROM entries WHERE seq % 2",
        "DELETE FROM recorded WHERE seq % 2",
        'UPDATE entries SET payload = \'{"numbers": [[1]], "detail": 7}\'',
        "UPDATE recorded SET payload = 'x'",
        "UPDATE outages SET figures = '{}', ended_at_s = NULL",
        "UPDATE entries SET at_s = 'x', wall = 9e999 WHERE seq % 5 = 0",
    ],
)
def test_a_salvaged_journal(cut: str, journals: dict[str, Path], run: Run, tmp_path: Path) -> None:
    """Whatever is left of it is told in every shape, and no more is claimed."""
    path = changed(journals["powered-off"], tmp_path / "cut.sqlite", cut)
    for shape in ((), ("--json",), ("--markdown",), ("--html", "-")):
        code, out, err = run("report", *shape, "--journal", path)
        assert (code, err) == (0, ""), shape
        assert "None" not in out
    assert run("explain", "last", "--journal", path)[0] == 0
    assert run("history", "--journal", path)[0] == 0


def test_a_clock_that_lost_a_year(
    journals: dict[str, Path], report: Report, run: Run, tmp_path: Path, golden: Golden
) -> None:
    """The battery of the clock was empty: how long the host was off is not told, not 0 and not a year."""
    back = "UPDATE {} SET wall = wall - 31536000 WHERE boot_id LIKE 'boot-b%'"
    path = changed(
        journals["powered-off"], tmp_path / "c.sqlite", back.format("entries"), back.format("recorded"),
        "UPDATE outages SET ended_wall = ended_wall - 31536000",
    )  # fmt: skip
    summary = report(path)
    assert (summary["recovery"]["away_s"], summary["durations"]["lasted_s"], summary["durations"]["away_s"]) == (
        None,
    ) * 3
    assert next(p["s"] for p in summary["phases"] if p["name"] == "off") is None
    assert summary["recovery"]["ours_s"] == 10.0, "within the boot its own clock counts"
    assert "clock_set" in rules(summary)
    golden("report", run("report", "--journal", path)[1], varies=FIGURES)
    lasted = json.loads(run("history", "--json", "--journal", path)[1])["outages"][0]["lasted_s"]
    assert lasted == 875.6, "as the daemon counted it"


def line(boot_id: str, at_s: float, wall: float) -> Line:
    return Line(
        seq=0, boot_id=boot_id, at_s=at_s, wall=wall, outage="o", kind="note", event="x", because="", payload={}
    )


def test_each_boot_has_its_own_clock() -> None:
    """A clock that is wrong when the host comes up, and set right soon, spoils nothing."""
    record = OutageRecord(id="o", boot_id="a", started_at_s=100.0, started_wall=1000.0)
    lines = [line("a", 110.0, 1010.0), line("b", 20.0, 50.0), line("b", 40.0, 1640.0)]
    elapsed = Elapsed(record, lines)
    assert [elapsed.of(each) for each in lines] == [10.0, 620.0, 640.0]
    assert (elapsed.set_s, elapsed.doubted) == ([("b", 1570.0)], [])
    assert (elapsed.at("b", 30.0), elapsed.at("c", 1.0)) == (630.0, None)
    stepped = Elapsed(record, [line("a", 110.0, 1010.0), line("b", 20.0, 500.0)])
    assert (stepped.doubted, stepped.of(line("b", 21.0, 501.0))) == (["b"], 11.0)
    month = Elapsed(record, [line("a", 110.0, 1010.0), line("b", 20.0, 1010.0 + 31 * 86400.0)])
    assert month.doubted == ["b"]


def test_an_outage_that_began_with_the_end_of_the_boot_before_has_the_clock_of_its_own_boot_set_right() -> None:
    """The host was off for half an hour, and its clock was two hours fast when it came up."""
    record = OutageRecord(id="o", boot_id="b", started_at_s=-8980.0, started_wall=1000.0)
    numbers = [["away_s", 9000.0], ["phase", "online"]]
    back = replace(line("b", 23.0, 10003.0), event="host_returned", payload={"numbers": numbers})
    elapsed = Elapsed(record, [back, line("b", 42.0, 2822.0)])
    assert (elapsed.of(back), elapsed.away_s, elapsed.doubted) == (1803.0, {"b": 1800.0}, [])
    right = Elapsed(replace(record, started_at_s=-1780.0), [back, line("b", 42.0, 2822.0)])
    assert (right.of(back), right.away_s) == (1803.0, {"b": 9000.0})
    gone = Elapsed(record, [back, line("b", 42.0, 900.0)])
    assert gone.of(back) == 9003.0, "by the clock at boot, where the later one is before its beginning"


# --- Where it goes ----------------------------------------------------------------------------------------------------


def test_the_page_is_written_whole_or_not_at_all(journals: dict[str, Path], run: Run, tmp_path: Path) -> None:
    """An older page stays where the new one cannot be written, and nothing is left beside it."""
    path = tmp_path / "o.html"
    assert run("report", "last", "--html", path, "--journal", journals["dip"])[0] == 0
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert [each.name for each in tmp_path.iterdir()] == ["o.html"]
    code, out, err = run("report", "--html", tmp_path / "no" / "o.html", "--journal", journals["dip"])
    assert (code, out) == (73, "")
    assert os.strerror(errno.ENOENT) in err
    for folder in (tmp_path, "/", ""):
        code, out, err = run("report", "--html", folder, "--journal", journals["dip"])
        assert (code, out, "Is a directory" in err) == (73, "", True)
    assert run("report", "--html", tmp_path, "--journal", journals["dip"])[0] == 73
    assert run("report", "--html", "/dev/null", "--journal", journals["dip"])[0] == 0


def test_which_outage(journals: dict[str, Path], run: Run, tmp_path: Path) -> None:
    """As in `explain`: last by default; one that there is not is refused, and so is no journal."""
    code, out, err = run("report", "nobody", "--journal", journals["dip"])
    assert (code, out, "'nobody'" in err) == (64, "", True)
    assert json.loads(run("report", "nobody", "--json", "--journal", journals["dip"])[1])["object"] == "error"
    assert run("report", "--journal", tmp_path / "none.sqlite")[0] == 66


def test_history_has_each_part(journals: dict[str, Path], run: Run) -> None:
    """On battery, checkpoint, commit, recovery; a part that there was not is a dash."""
    head, row = run("history", "--journal", journals["powered-off"])[1].splitlines()
    assert head.split("  ")[0] == "began"
    assert re.search(r"14 m 36 s +3 m 2\d s +20 s +3 m 16 s +1 m 10 s", row)
    assert row.split()[-2] == "clean_shutdown"
    code, out, _ = run("history", "--limit", "9" * 15, "--journal", journals["dip"])
    assert code == 0, "more than SQLite can count to is all of them"
    dip = out.splitlines()[1]
    assert dip.split()[-5:-1] == ["-", "-", "-", "ridden_through"]
