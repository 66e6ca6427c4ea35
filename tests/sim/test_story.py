"""The story must be able to be false: worlds in which something was lost, and what `powerguard demo` says of them."""

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from powerguard.cli import demo
from powerguard.daemon.journal import Line
from powerguard.sim.demo import story
from powerguard.sim.demo.story import Act, Facts, Stage, StoryError
from powerguard.sim.virtual import VirtualLoop

TRUE = Facts(left_s=150.0, policy="always-on", checkpoint_step=700, step=700, paused=True)


class ScriptedWorld:
    """A world that tells what its script says: (seconds after each cut, event, numbers)."""

    title = "made up"
    real: Sequence[str] = ("nothing",)
    replaced: Sequence[str] = ("everything",)
    settle_s, dip_s, hold_s, recharge_s, patience_s = 2.0, 2.0, 2.0, 2.0, 60.0
    look_s = 0.5

    def __init__(self) -> None:
        self.cuts: list[list[tuple[float, str, dict[str, object]]]] = [
            [
                (0.5, "outage_began", {"charge_pct": 100.0, "load_pct": 75.0, "runtime_s": 360.0}),
                (3.0, "outage_ended", {"outcome": "ridden_through", "lasted_s": 3.0}),
            ],
            [
                (0.5, "outage_began", {"charge_pct": 99.0, "load_pct": 75.0, "runtime_s": 350.0}),
                (5.0, "phase_changed", {"new": "emergency_checkpoint", "slack_s": 60.0}),
                (8.0, "checkpoint_durable", {"trainer": "toy", "step": 500, "took_s": 3.0}),
                (8.0, "phase_changed", {"new": "holding"}),
                (20.0, "phase_changed", {"new": "online"}),
                (20.0, "outage_ended", {"outcome": "resumed_in_place", "lasted_s": 20.0}),
            ],
            [
                (0.5, "outage_began", {"charge_pct": 99.0, "load_pct": 75.0, "runtime_s": 350.0}),
                (5.0, "phase_changed", {"new": "emergency_checkpoint", "slack_s": 60.0}),
                (8.0, "checkpoint_durable", {"trainer": "toy", "step": 700, "took_s": 3.0}),
                (8.0, "phase_changed", {"new": "holding"}),
                (20.0, "phase_changed", {"new": "shutdown", "reff_paused_s": 160.0}),
                (20.2, "policy_verified", {"policy": "always-on"}),
                (20.3, "power_off_accepted", {"deadline_s": 110.0}),
            ],
        ]
        self.scripted_facts = [
            replace(TRUE, left_s=None, step=90, checkpoint_step=None, paused=False),
            replace(TRUE, left_s=None, step=450, checkpoint_step=None, paused=False),
            replace(TRUE, left_s=None, step=500, checkpoint_step=500),
            replace(TRUE, left_s=None, step=560, checkpoint_step=500, paused=False),
            TRUE,
        ]
        self.dies_after_s = float("inf")
        self.back_s: list[float] = []
        self._lines: list[Line] = []
        self._began_s = self.clock()

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    def set_utility(self, present: bool) -> None:
        if present:
            self.back_s.append(self.clock() - self._began_s)
            return
        now_s = self.clock()
        for after_s, event, each in self.cuts.pop(0):
            asyncio.get_running_loop().call_later(after_s, self._tell, now_s + after_s, event, each)

    def _tell(self, at_s: float, event: str, numbers: dict[str, object]) -> None:
        payload: dict[str, object] = {"numbers": [list(pair) for pair in numbers.items()]}
        self._lines.append(
            Line(
                seq=len(self._lines) + 1,
                boot_id="b",
                at_s=at_s,
                wall=at_s,
                outage="o",
                kind="note",
                event=event,
                because="so",
                payload=payload,
            )
        )

    def lines(self) -> Sequence[Line]:
        return self._lines[-100:]

    async def facts(self) -> Facts:
        return self.scripted_facts.pop(0)

    def check(self) -> None:
        if self.clock() - self._began_s > self.dies_after_s:
            msg = "trainer died with status -9"
            raise StoryError(msg)


def played(change: Callable[[ScriptedWorld], None], *, as_json: bool = False) -> int:
    """Play a changed world through what the command does; returns its exit status."""

    async def world() -> int:
        stage = ScriptedWorld()
        change(stage)
        checked: Stage = stage
        return await demo._play(checked, argparse.Namespace(json=as_json))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(world())


def denials(out: str) -> list[str]:
    return [line.strip().removeprefix("NO").strip() for line in out.splitlines() if line.startswith("  NO ")]


def test_a_world_in_which_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert played(lambda _: None) == 0
    out = capsys.readouterr().out
    assert denials(out) == []
    assert "no training was lost" in out


def test_a_dip_lasts_until_the_daemon_has_noticed_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A busy machine notices it after ten seconds: utility is not back before that, or there would be no outage."""
    stages: list[ScriptedWorld] = []

    def late(stage: ScriptedWorld) -> None:
        stages.append(stage)
        stage.cuts[0] = [(10.0 + after_s, event, each) for after_s, event, each in stage.cuts[0]]

    assert played(late) == 0
    assert stages[0].back_s[0] >= stages[0].settle_s + 10.5
    assert denials(capsys.readouterr().out) == []


def fact(which: int, **changes: object) -> Callable[[ScriptedWorld], None]:
    def change(stage: ScriptedWorld) -> None:
        stage.scripted_facts[which] = replace(stage.scripted_facts[which], **changes)  # type: ignore[arg-type]

    return change


def numbers(cut: int, event: str, **changes: object) -> Callable[[ScriptedWorld], None]:
    def change(stage: ScriptedWorld) -> None:
        for _, name, each in stage.cuts[cut]:
            if name == event:
                each.update(changes)

    return change


def without(cut: int, event: str) -> Callable[[ScriptedWorld], None]:
    def change(stage: ScriptedWorld) -> None:
        stage.cuts[cut] = [entry for entry in stage.cuts[cut] if entry[1] != event]

    return change


def disturbed(stage: ScriptedWorld) -> None:
    stage.cuts[0].insert(1, (1.0, "checkpoint_ordered", {"trainer": "toy", "after": "pause"}))


@pytest.mark.parametrize(
    ("change", "denied"),
    [
        (disturbed, "the dip was ridden through: outcome ridden_through, trainer was disturbed"),
        (numbers(0, "outage_ended", outcome="resumed_in_place"), "the dip was ridden through"),
        (fact(2, checkpoint_step=None), "the emergency checkpoint is durable at the paused step"),
        (fact(2, checkpoint_step=499), "the emergency checkpoint is durable at the paused step"),
        (fact(2, paused=False), "the emergency checkpoint is durable at the paused step"),
        (numbers(1, "checkpoint_durable", step=400), "the emergency checkpoint is durable at the paused step"),
        (numbers(1, "outage_ended", outcome="clean_shutdown"), "training resumed in place"),
        (fact(3, step=500), "training resumed in place"),
        (fact(3, step=None), "training resumed in place"),
        (fact(4, checkpoint_step=None), "the last checkpoint is durable and verified"),
        (fact(4, checkpoint_step=500), "the last checkpoint is durable and verified"),
        (fact(4, step=701), "the last checkpoint is durable and verified"),
        (without(2, "checkpoint_durable"), "the last checkpoint is durable and verified"),
        (fact(4, policy="last-state"), "the host will come back: the BMC itself says last-state"),
        (without(2, "policy_verified"), "the host will come back"),
        (fact(4, left_s=109.0), "the host went down in order, before the battery was empty: 109 s really left"),
        (fact(4, left_s=None), "the host went down in order"),
        (numbers(2, "power_off_accepted", deadline_s=None), "the host went down in order"),
    ],
)
def test_a_lie_is_found_out(
    change: Callable[[ScriptedWorld], None], denied: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One thing is not as claimed: that claim is denied, no other, and the demo's status is 1."""
    assert played(change) == 1
    out = capsys.readouterr().out
    assert len(denials(out)) == 1, out
    assert denials(out)[0].startswith(denied)
    assert "WOULD HAVE BEEN LOST" in out


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    for change, status in ((lambda _: None, 0), (fact(4, policy="always-off"), 1)):
        assert played(change, as_json=True) == status
        answer = json.loads(capsys.readouterr().out)
        assert answer["schema_version"] == 1
        assert answer["safe"] is (status == 0)
        assert [outage["name"] for outage in answer["outages"]] == [
            "A short dip",
            "An outage that the battery outlasts",
            "An outage to the end",
        ]
        assert len(answer["checks"]) == 6
        assert sum(not check["holds"] for check in answer["checks"]) == status
        first = answer["outages"][0]["events"][0]
        assert (first["event"], first["after_s"], first["runtime_s"]) == ("outage_began", 0.5, 360.0)


def test_a_world_that_stands_still_or_dies_is_reported_as_such() -> None:
    """Waited for in vain, or a part of the world is gone: an error in words, never a story."""

    def dies(stage: ScriptedWorld) -> None:
        stage.dies_after_s = 10.0

    with pytest.raises(StoryError, match="waited 60 s for the power-off, in vain"):
        played(without(2, "power_off_accepted"))
    with pytest.raises(StoryError, match="trainer died with status -9"):
        played(dies)


def test_the_timeline_adds_up() -> None:
    """Every second from the cut to the end of the battery has one sign, and the legend names the seconds."""

    async def world() -> Act:
        stage = ScriptedWorld()
        script = stage.cuts[2]
        act = Act("An outage to the end", 100.0, facts=TRUE)
        for after_s, event, each in script:
            stage._tell(100.0 + after_s, event, each)
        act.lines = list(stage.lines())
        return act

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        act = runner.run(world())
    bar, legend = story.timeline(act)
    assert legend.split(",  ") == [
        "   = train on 5.0 s",
        "c checkpoint 3.0 s",
        ". hold 12.0 s",
        "# stop 110.3 s",
        "_ left in the battery 40.0 s",
    ]
    signs = bar.strip().strip("|")
    assert signs == "".join(sorted(signs, key="=c.#_".index))
    assert 60 <= len(signs) <= 68
    assert story.timeline(Act("nothing yet", 1.0)) == []
