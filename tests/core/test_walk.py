"""Every word of a coarse alphabet, to a fixed depth: what the random world may miss, this cannot.

A letter is a stretch of events, so that a few letters make an outage. Worlds that are equal are walked once. After
each event every invariant of invariants.py is asked; `-s` shows how many states and steps that were.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from powerguard.core.comeback.recovery import Stored, restore
from powerguard.core.decide.machine import step
from powerguard.core.model.actions import Action, Conduct, PollNow, PowerOff, TriggerCheckpoint
from powerguard.core.model.events import Abort, Done, Event, Failed, OutputSource, Reading, SourceFailed, Tick
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Shutdown, State, Step, phase_name
from tests.core.invariants import check_spent_battery, check_step, kept
from tests.core.play import make_policy


@dataclass(frozen=True)
class World:
    """A state, the orders that have no answer yet, and the clock."""

    policy: Policy
    state: State
    now_s: float
    open: tuple[Action, ...] = ()
    steps: ClassVar[int] = 0

    def after(self, event: Event) -> "World":
        """Send one event and ask every invariant."""
        World.steps += 1
        answer = step(self.policy, self.state, event)
        check_step(self.policy, self.state, event, answer)
        check_spent_battery(answer.state, event.at_s)
        return self.took(answer, event.at_s)

    def took(self, answer: Step, now_s: float, still_open: tuple[Action, ...] | None = None) -> "World":
        ordered = tuple(action for action in answer.actions if not isinstance(action, PollNow))
        before = self.open if still_open is None else still_open
        ids = [action.id for action in (*before, *ordered)]
        assert len(ids) == len(set(ids)), "an action's id is never used twice"
        return replace(self, state=answer.state, now_s=now_s, open=(*before, *ordered))


def _readings(world: World, seconds: int, source: str, **fields: object) -> World:
    for _ in range(seconds):
        at_s = world.now_s + 1.0
        reading = Reading(at_s=at_s, ups="ups", source="snmp", output_source=OutputSource(source), load_pct=75.0)
        world = world.after(replace(reading, **fields))  # type: ignore[arg-type]
    return world


def _answered(world: World, *, well: bool) -> World:
    """Answer every order, the oldest first; what that orders stays open."""
    waiting = world.open
    for action in waiting:
        at_s = world.now_s + 0.1
        paused = isinstance(action, TriggerCheckpoint) and action.after is not Conduct.CONTINUE
        detail = (("step", 7), ("at_paused_step", paused), ("paused", paused), ("verified", True))
        event: Event = Failed(at_s=at_s, action=action, took_s=0.1, reason="refused")
        if well:
            event = Done(at_s=at_s, action=action, took_s=0.1, detail=detail)
        world = replace(world, open=tuple(other for other in world.open if other.id != action.id)).after(event)
    return world


def _ticked(world: World, seconds: float) -> World:
    return world.after(Tick(at_s=world.now_s + seconds))


def _restarted(world: World) -> World:
    stored = Stored(state=world.state, boot_id=world.policy.boot_id, at_s=world.now_s, in_flight=world.open)
    answer = restore(world.policy, stored, world.now_s + 2.0)
    assert phase_name(answer.state.phase) == phase_name(world.state.phase), "the same boot goes on in the same phase"
    return world.took(answer, world.now_s + 2.0, still_open=())


def _rebooted(world: World) -> World:
    policy = replace(world.policy, boot_id=f"{int(world.policy.boot_id) + 1}")
    stored = Stored(state=world.state, boot_id=world.policy.boot_id, at_s=world.now_s, gap_s=30.0)
    answer = restore(policy, stored, 10.0)
    assert not isinstance(answer.state.phase, Shutdown), "a latch of another boot never powers off"
    assert not any(isinstance(action, PowerOff) for action in answer.actions)
    return replace(world, policy=policy).took(answer, 10.0, still_open=())


LETTERS = {
    "utility": lambda world: _readings(world, 11, "utility", charge_pct=100.0),
    "battery": lambda world: _readings(world, 9, "battery"),
    "battery_low": lambda world: _readings(world, 2, "battery", low_battery=True),
    "battery_witness": lambda world: _readings(world, 1, "battery", input_present=False),
    "countdown": lambda world: _readings(
        _readings(world, 1, "utility", output_off_in_s=45.0), 1, "utility", output_off_in_s=44.0
    ),
    "lost": lambda world: world.after(
        SourceFailed(at_s=world.now_s + 1.0, ups="ups", source="snmp", reason="no answer", lost=True)
    ),
    "tick_1": lambda world: _ticked(world, 1.0),
    "tick_10": lambda world: _ticked(world, 10.0),
    "done": lambda world: _answered(world, well=True),
    "failed": lambda world: _answered(world, well=False),
    "abort": lambda world: world.after(Abort(at_s=world.now_s, who="x")),
    "restart": _restarted,
    "reboot": _rebooted,
}


def _next(world: World) -> Iterator[tuple[str, World]]:
    for letter, turn in LETTERS.items():
        if world.open or letter not in ("done", "failed"):
            yield letter, turn(world)


SMALL = "table=50:90,75:60,100:40 trainer=llm:pause:8 health=1"
ALL = {"online", "on_battery", "emergency_checkpoint", "holding", "shutdown", "recovery"}


@pytest.mark.parametrize(
    ("words", "prefix", "depth", "reached"),
    [
        (SMALL, "", 4, ALL - {"shutdown"}),
        (SMALL, "battery battery battery", 3, ALL - {"recovery"}),
        (SMALL, "battery battery battery done battery done", 3, ALL),
        ("trainer=llm:pause:8 blind_s=12", "battery", 3, ALL),
        ("table=50:90,75:60,100:40 mode=dry-run", "battery battery battery", 3, ALL - {"emergency_checkpoint"}),
        ("table=75:150 trainer=a:continue:3:x trainer=b:exit:3:x", "battery battery battery", 3, ALL - {"on_battery"}),
        pytest.param(SMALL, "battery battery battery", 4, ALL, marks=pytest.mark.slow),
        pytest.param(SMALL, "battery battery battery done battery done", 4, ALL, marks=pytest.mark.slow),
        pytest.param("trainer=llm:pause:8 blind_s=12", "battery", 4, ALL, marks=pytest.mark.slow),
    ],
    ids=[
        "from utility",
        "from battery",
        "from a late hold",
        "blind",
        "dry-run",
        "some go on, some exit",
        "from battery, deep",
        "from a late hold, deep",
        "blind, deep",
    ],
)
def test_every_word_keeps_every_invariant(words: str, prefix: str, depth: int, reached: set[str]) -> None:
    """All words of so many letters after the prefix; a broken invariant names the word that led to it."""
    policy = make_policy([*words.split(), "boot_id=1"])
    first = _readings(World(policy, restore(policy, None, 0.0).state, 0.0), 1, "utility", charge_pct=100.0)
    for letter in prefix.split():
        first = LETTERS[letter](first)
    seen, edge, before = {first}, {first: prefix}, World.steps
    for _ in range(depth):
        found: dict[World, str] = {}
        for world, word in edge.items():
            try:
                for letter, after in _next(world):
                    if after not in seen and after not in found:
                        found[after] = f"{word} {letter}"
            except AssertionError as error:
                error.add_note(f"the word so far: {word}")
                raise
        seen |= found.keys()
        edge = found
    for world in list(seen)[:: max(1, len(seen) // 300)]:
        kept(world.state)
    print(f"{words}, {prefix!r}: {len(seen)} states, {World.steps - before} steps")
    assert {phase_name(world.state.phase) for world in seen} >= reached
