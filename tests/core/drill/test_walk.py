"""Every interleaving of a drill with what may come in between: nobody stands still, and no GPU is capped, after it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from powerguard.core.comeback.recovery import Stored, restore
from powerguard.core.decide.machine import step
from powerguard.core.model.actions import (
    Action,
    CapPower,
    Conduct,
    PauseTrainer,
    PollNow,
    PowerOff,
    RestorePower,
    ResumeTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import (
    Done,
    Event,
    Failed,
    ForeignStop,
    OutputSource,
    Reading,
    SourceFailed,
    StartDrill,
    StopDrill,
    Tick,
    TrainerSeen,
)
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Drill, GpuCap, Online, Resume, State, Step
from tests.core.invariants import check_step, kept
from tests.core.play import make_policy

WORDS = "table=50:540,75:360,100:240 trainer=llm:pause:20 rating_w=4000"
PAUSES = (PauseTrainer, TriggerCheckpoint)


@dataclass(frozen=True)
class World:
    """A state, the orders without outcome, and what the drill's orders have really done to trainer and GPUs.

    An order takes effect, if it does, between order and outcome: at worst right before the outcome, after everything
    else that was answered. stands: the trainer stands still by a drill's word; capped: the GPUs are, by anybody's.
    """

    policy: Policy
    state: State
    now_s: float
    open: tuple[Action, ...] = ()
    stands: bool = False
    capped: bool = False

    def after(self, event: Event) -> "World":
        answer = step(self.policy, self.state, event)
        check_step(self.policy, self.state, event, answer)
        return self.took(answer, event.at_s)

    def took(self, answer: Step, now_s: float, still_open: tuple[Action, ...] | None = None) -> "World":
        assert not any(isinstance(a, PowerOff) for a in answer.actions if isinstance(answer.state.phase, Online))
        ordered = tuple(action for action in answer.actions if not isinstance(action, PollNow))
        before = self.open if still_open is None else still_open
        ids = [action.id for action in (*before, *ordered)]
        assert len(ids) == len(set(ids)), "an action's id is never used twice"
        world = replace(self, state=answer.state, now_s=now_s, open=(*before, *ordered))
        world.check()
        return world

    def landed(self, action: Action) -> "World":
        """What this order does to the world when it gets there."""
        own = "drill" in getattr(action, "outage", "") and all(trainer.alive for trainer in self.state.trainers)
        pauses = isinstance(action, TriggerCheckpoint) and action.after is not Conduct.CONTINUE
        if own and (pauses or isinstance(action, PauseTrainer)):
            return replace(self, stands=True)
        if isinstance(action, CapPower):
            return replace(self, capped=True)
        if isinstance(action, ResumeTrainer):
            return replace(self, stands=False)
        return replace(self, capped=False) if isinstance(action, RestorePower) else self

    def check(self) -> None:
        """Online, no drill, nothing on its way and nothing to be told again: then everything is as it was."""
        state = self.state
        pending = any(isinstance(a, ResumeTrainer | RestorePower | CapPower | PauseTrainer) for a in self.open)
        again = bool(state.owing(GpuCap) or state.owing(Resume))
        alive = all(trainer.alive for trainer in state.trainers)
        if isinstance(state.phase, Online) and state.drill is None and not pending and not again:
            assert not (self.stands and alive), "after a drill nobody stands still"
            assert not self.capped, "after a drill no GPU is capped"
        if isinstance(state.phase, Online) and state.drill is None:
            assert not any(trainer.pause_ordered for trainer in state.trainers)
        if state.drill is not None and isinstance(state.phase, Online):
            assert state.drill.stage not in ("outage", "handed_over")


def _readings(world: World, seconds: int, source: str, **fields: object) -> World:
    for _ in range(seconds):
        at_s = world.now_s + 1.0
        reading = Reading(
            at_s=at_s, ups="ups", source="snmp", output_source=OutputSource(source), load_pct=75.0, charge_pct=100.0
        )
        world = world.after(replace(reading, **fields))  # type: ignore[arg-type]
    return world


def _outcome(world: World, action: Action, *, well: bool) -> World:
    at_s = world.now_s + 0.1
    world = replace(world, open=tuple(other for other in world.open if other.id != action.id))
    # A failure may have landed all the same: a pause or a cap, to be on the safe side of neither.
    if well or isinstance(action, (*PAUSES, CapPower)):
        world = world.landed(action)
    detail = (("step", 7), ("paused", True), ("verified", True), ("resumed", True), ("at_paused_step", True))
    event: Event = Done(at_s=at_s, action=action, took_s=0.1, detail=detail)
    return world.after(event if well else Failed(at_s=at_s, action=action, took_s=0.1, reason="refused"))


def _oldest(world: World, *, well: bool) -> World:
    return _outcome(world, world.open[0], well=well)


def _all_but_oldest(world: World) -> World:
    """The first order hangs; whatever was ordered after it is answered."""
    for action in world.open[1:]:
        world = _outcome(world, action, well=True)
    return world


def _waited(world: World) -> World:
    """A long time, in which every order that ends by itself has ended: the bulkhead sees to that."""
    for action in world.open:
        if action.by_s < world.now_s + 50.0:
            world = _outcome(world, action, well=False)
    return world.after(Tick(at_s=world.now_s + 50.0))


def _restarted(world: World) -> World:
    stored = Stored(state=kept(world.state), boot_id=world.policy.boot_id, at_s=world.now_s, in_flight=world.open)
    for action in world.open:
        if isinstance(action, (*PAUSES, CapPower)):
            world = world.landed(action)
    answer = restore(world.policy, stored, world.now_s + 2.0)
    return world.took(answer, world.now_s + 2.0, still_open=())


def _rebooted(world: World) -> World:
    policy = replace(world.policy, boot_id=f"{int(world.policy.boot_id) + 1}")
    stored = Stored(state=world.state, boot_id=world.policy.boot_id, at_s=world.now_s, gap_s=30.0)
    answer = restore(policy, stored, 10.0)
    assert answer.state.drill is None
    found = [note for note in answer.notes if note.event == "drill_ended"]
    running = world.state.drill
    owed = running is not None and running.stage != "handed_over" and not _is_told(world.state, running)
    assert len(found) == owed, "a drill that a reboot has cut short is logged, once"
    return replace(world, policy=policy, stands=False, capped=False).took(answer, 10.0, still_open=())


def _is_told(state: State, running: Drill) -> bool:
    return state.learned.drill is not None and state.learned.drill.id == running.id


def _seen(world: World, **fields: object) -> World:
    seen = TrainerSeen(at_s=world.now_s, trainer="llm", alive=True, conduct=Conduct.PAUSE, paused=world.stands)
    return world.after(replace(seen, **fields))  # type: ignore[arg-type]


LETTERS: dict[str, Callable[[World], World]] = {
    "utility": lambda world: _readings(world, 12, "utility"),
    "battery": lambda world: _readings(world, 3, "battery"),
    "suspect": lambda world: _readings(world, 1, "battery"),
    "test": lambda world: _readings(world, 2, "battery", testing=True, input_present=True),
    "silent": lambda world: world.after(
        SourceFailed(at_s=world.now_s + 1.0, ups="ups", source="snmp", reason="no answer", lost=True)
    ),
    "wait": _waited,
    "well": lambda world: _oldest(world, well=True),
    "badly": lambda world: _oldest(world, well=False),
    "later": _all_but_oldest,
    "stop": lambda world: world.after(StopDrill(at_s=world.now_s, who="x")),
    "sigterm": lambda world: world.after(ForeignStop(at_s=world.now_s, host_stopping=False)),
    "seen": _seen,
    "gone": lambda world: _seen(replace(world, stands=False), alive=False),
    "restart": _restarted,
    "reboot": _rebooted,
}
_ANSWERING = ("well", "badly", "later")


def _next(world: World) -> Iterator[tuple[str, World]]:
    for letter, turn in LETTERS.items():
        if letter in _ANSWERING and len(world.open) < (2 if letter == "later" else 1):
            continue
        yield letter, turn(world)


def _begun(scopes: str, prefix: str) -> World:
    policy = make_policy([*WORDS.split(), "cap_share=0.7", "boot_id=1"])
    world = World(policy, restore(policy, None, 0.0).state, 0.0)
    world = _seen(_readings(world, 13, "utility"), durable_age_s=60.0)
    world = world.after(StartDrill(at_s=world.now_s, who="x", scopes=tuple(scopes.split(","))))
    assert world.state.drill is not None
    for letter in prefix.split():
        world = LETTERS[letter](world)
    return world


@pytest.mark.parametrize(
    ("scopes", "prefix", "stage"),
    [
        ("pause", "utility", "pause"),
        *(
            pytest.param(*stage, marks=pytest.mark.slow)
            for stage in (
                ("pause", "utility stop", "undo"),
                ("cap", "utility", "cap"),
                ("checkpoint,pause", "utility", "checkpoint"),
                ("checkpoint,pause", "utility well", "pause"),
                ("pause", "utility well utility", "resume"),
                ("cap", "utility well", "cap"),
                ("pause", "utility battery", "handed_over"),
                ("cap", "utility stop", "undo"),
            )
        ),
    ],
)
def test_nothing_stays_whatever_comes_in_between(scopes: str, prefix: str, stage: str) -> None:
    """Every word of so many letters from each stage: outage, failure, late outcome, stop, kill, reboot, silence."""
    first = _begun(scopes, prefix)
    assert first.state.drill is not None
    assert first.state.drill.stage == stage
    seen, edge = {first: prefix}, {first: prefix}
    for _ in range(3):
        found: dict[World, str] = {}
        for world, word in edge.items():
            try:
                for letter, after in _next(world):
                    if after not in seen and after not in found:
                        found[after] = f"{word} {letter}"
            except AssertionError as error:
                error.add_note(f"{scopes}: the word so far: {word}")
                raise
        seen |= found
        edge = found
    for world in seen:
        kept(world.state)
        _settles(world)


def _settles(world: World) -> None:
    """From wherever it is, with a world that answers and utility that stays, it ends, and nobody stands still."""
    for _ in range(30):
        world = _readings(world, 10, "utility")
        while world.open:
            world = _oldest(world, well=True)
        world = _seen(world.after(Tick(at_s=world.now_s + 0.5)))
        owed = bool(world.open) or bool(world.state.owing(Resume))
        if isinstance(world.state.phase, Online) and world.state.drill is None and world.state.cap is None and not owed:
            break
    settled = world.state.drill is None and world.state.cap is None
    latched = not isinstance(world.state.phase, Online)
    assert settled or latched, world.state.drill
    assert latched or not world.stands
