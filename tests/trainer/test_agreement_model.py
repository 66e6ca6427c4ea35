"""Every interleaving of a small job's threads, by the very functions that decide: nobody passes, nobody deadlocks.

Each rank has a training thread, which ends a step only when all ranks are in it (a barrier per step, as collectives
are), and a watcher, which applies the log and bids. What one of them does between two waits is one move of the model,
and what may fall between two halves is two moves: of the training thread's look at a boundary (write `step`, then read
`due`), and of the watcher's bid (read `step`, then write `due`; under the lock that the training thread takes only
where it is due).
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from powerguard.trainer.ranks.machine import Move, RankState, State, apply, due, first_boundary, move
from powerguard.wire import After

Said = tuple[tuple[str, Any], ...]
RUNNING, LOOKING, STANDING, DEAD = "running", "looking", "standing", "dead"


_KEPT: list[Any] = []
_PLACES: dict[Any, int] = {}


def kept(value: State | RankState) -> int:
    """Return where a value is kept: worlds are compared a million times, and numbers are quick to compare."""
    if value not in _PLACES:
        _PLACES[value] = len(_KEPT)
        _KEPT.append(value)
    return _PLACES[value]


class Rank(NamedTuple):
    """One rank. step: ended last. at: what its training thread does. read: entries of the log that it has applied.

    glimpse: what its watcher is about to bid, with the lock held.
    """

    step: int = 0
    at: str = RUNNING
    read: int = 0
    state_at: int = kept(State())
    stance_at: int = kept(RankState())
    due: int = 2**63
    stopped: bool = False
    glimpse: int | None = None

    @property
    def state(self) -> State:
        known: State = _KEPT[self.state_at]
        return known

    @property
    def stance(self) -> RankState:
        known: RankState = _KEPT[self.stance_at]
        return known


class World(NamedTuple):
    """The job. bids, done: (generation, rank, step) of what was handed in. left: what outsiders will still do."""

    ranks: tuple[Rank, ...]
    log: tuple[tuple[tuple[str, Any], ...], ...] = ()
    bids: frozenset[tuple[int, int, int]] = frozenset()
    done: frozenset[tuple[int, int, int]] = frozenset()
    left: tuple[tuple[tuple[str, Any], ...], ...] = ()
    deaths: int = 0
    giving_up: bool = False


@cache
def applied(state_at: int, entry: tuple[tuple[str, Any], ...]) -> int:
    return kept(apply(_KEPT[state_at], dict(entry)))


def moves(world: World, last_step: int) -> Iterator[tuple[str, World]]:
    """Yield whatever may happen next."""
    for index, rank in enumerate(world.ranks):
        if rank.at == DEAD:
            continue
        yield from of_watcher(world, index, rank)
        yield from of_training(world, index, rank, last_step)
        if world.deaths:
            yield f"{index} dies", put(world._replace(deaths=world.deaths - 1), index, rank._replace(at=DEAD))
    if world.left:
        # An outsider writes at the end of the log, whoever lets him in.
        yield "outsider", world._replace(log=(*world.log, world.left[0]), left=world.left[1:])


def of_watcher(world: World, index: int, rank: Rank) -> Iterator[tuple[str, World]]:
    if rank.glimpse is not None and rank.state.front is not None:
        number = rank.state.front.number
        stance = replace(rank.stance, bid=rank.glimpse, bid_for=number)
        new = rank._replace(stance_at=kept(stance), due=due(rank.state, stance), glimpse=None)
        yield f"{index} bids", put(world._replace(bids=world.bids | {(number, index, rank.glimpse)}), index, new)
        return
    if rank.read < len(world.log):
        state_at = applied(rank.state_at, world.log[rank.read])
        read = rank._replace(state_at=state_at, read=rank.read + 1, due=due(_KEPT[state_at], rank.stance))
        yield f"{index} reads", put(world, index, read)
        return
    front = rank.state.front
    if front is not None and front.step is None:
        if rank.stance.bid_for != front.number:
            bid = first_boundary(rank.step, rank.step if rank.at == STANDING else None)
            yield f"{index} is about to bid {bid}", put(world, index, rank._replace(glimpse=bid))
        else:
            bids = {who: bid for number, who, bid in world.bids if number == front.number}
            if len(bids) == len(world.ranks):
                entry = (("kind", "step"), ("g", front.number), ("step", max(bids.values())), ("token", "t"))
                yield f"{index} says the step", world._replace(log=(*world.log, entry))
    for known in (front, rank.state.back):
        if known is not None and world.giving_up:
            entry = (("kind", "end"), ("g", known.number), ("ok", False), ("error", "given up"))
            yield f"{index} gives up", world._replace(log=(*world.log, entry), giving_up=False)
        if known is not None and known.begun:
            done = [step for number, _, step in world.done if number == known.number]
            if len(done) == len(world.ranks):
                assert set(done) == {known.step}
                entry = (("kind", "end"), ("g", known.number), ("ok", True), ("digest", "d"))
                yield f"{index} ends", world._replace(log=(*world.log, entry))


def of_training(world: World, index: int, rank: Rank, last_step: int) -> Iterator[tuple[str, World]]:
    if rank.at == RUNNING:
        together = all(
            other.step > rank.step or (other.step == rank.step and other.at == RUNNING) for other in world.ranks
        )
        if together and rank.step < last_step:
            yield f"{index} ends step", put(world, index, rank._replace(step=rank.step + 1, at=LOOKING))
    elif rank.at == LOOKING:
        if rank.step < rank.due:
            yield f"{index} looks", put(world, index, rank._replace(at=RUNNING))
        elif rank.glimpse is None:
            yield f"{index} stands", put(world, index, rank._replace(at=STANDING))
    elif not rank.stopped and rank.glimpse is None:
        action, known = move(rank.state, rank.stance, rank.step)
        if action is Move.GO:
            yield f"{index} goes on", put(world, index, rank._replace(at=RUNNING, due=due(rank.state, rank.stance)))
        elif action is Move.BEGIN and known is not None and rank.read == len(world.log):
            yield f"{index} begins", world._replace(log=(*world.log, (("kind", "begin"), ("g", known.number))))
        elif action is Move.TAKE and known is not None:
            assert known.step == rank.step
            stance = replace(rank.stance, taken=known.number)
            done = world.done | {(known.number, index, rank.step)}
            new = rank._replace(stance_at=kept(stance), due=due(rank.state, stance))
            yield f"{index} saves", put(world._replace(done=done), index, new)
        elif action is Move.LEAVE:
            yield f"{index} exits", put(world, index, rank._replace(stopped=True))
        assert action is not Move.PASSED, "a rank went past the agreed step"


def put(world: World, index: int, rank: Rank) -> World:
    return world._replace(ranks=(*world.ranks[:index], rank, *world.ranks[index + 1 :]))


def check(world: World, last_step: int, text: str) -> None:
    """What holds in every world."""
    state_at = kept(State())
    for entry in world.log:
        state_at = applied(state_at, entry)
    state: State = _KEPT[state_at]
    if not (has_failed(world.log) or state.departed or (state.front is not None and state.front.rolls)):
        stands = state.held_at is not None or (state.front is not None and state.front.after is not After.CONTINUE)
        assert stands == bool(holding(world.log)), f"a host's word was not kept: {text}"
    for known in (*state.past, state.front, state.back):
        if known is not None and known.ended is not None and known.ended.ok and known.save:
            assert {who for number, who, _ in world.done if number == known.number} == set(range(len(world.ranks))), (
                text
            )
    for rank in world.ranks:
        if rank.at != DEAD:
            held = rank.state.held_at
            bound = held is None or rank.stopped or rank.state.departed or rank.state.front is not None
            assert bound or rank.step <= (held or 0), text


@cache
def has_failed(log: tuple[Said, ...]) -> bool:
    return any(dict(entry).get("ok") is False or dict(entry)["kind"] == "cancel" for entry in log)


@cache
def holding(log: tuple[Said, ...]) -> set[int]:
    """The hosts that want training to stand, by their own last word and nothing else."""
    hosts: set[int] = set()
    for entry in map(dict, log):
        if entry["kind"] == "ask" and entry["after"] != "continue":
            hosts.add(entry["host"])
        elif entry["kind"] == "resume":
            hosts.discard(entry["host"])
    return hosts


def settled(world: World, last_step: int) -> bool:
    """Has everybody who lives a reason to rest?"""
    if any(rank.at == DEAD for rank in world.ranks):
        return True  # the others wait for the dead in their collectives, until they give up or are ended
    if all(rank.step == last_step and rank.at == RUNNING for rank in world.ranks):
        return True  # training has ended, maybe before the agreed step
    states = {rank.state_at for rank in world.ranks}
    state = world.ranks[0].state if len(states) == 1 else None
    if state is not None and state.departed and any(rank.stopped for rank in world.ranks):
        return True  # a rank that waits for it in a collective is ended by force
    if state is None or state.front is not None or state.back is not None:
        return False
    if all(rank.step == last_step for rank in world.ranks):
        return True
    return state.held_at is not None and all(rank.step == state.held_at and rank.at == STANDING for rank in world.ranks)


def explore(start: World, last_step: int) -> int:
    """Walk through every world that can be reached; return their number."""
    seen = {start}
    todo = deque([start])
    while todo:
        world = todo.popleft()
        stuck = True
        for each, then in moves(world, last_step):
            stuck = False
            if then not in seen:
                check(then, last_step, each)
                seen.add(then)
                todo.append(then)
        assert not stuck or settled(world, last_step), f"deadlock: {world}"
    return len(seen)


def ask(name: str, after: After = After.CONTINUE, *, save: bool = True, host: int = 0) -> Said:
    return (
        ("kind", "ask"),
        ("id", name),
        ("reason", "on_battery"),
        ("event", ""),
        ("after", after.value),
        ("save", save),
        ("deadline_s", None),
        ("host", host),
    )


def resume(host: int | None = 0, *, roll: bool = False) -> Said:
    return (("kind", "resume"), ("host", host), ("roll", roll))


CANCEL = (("kind", "cancel"), ("g", 1), ("host", 0))
RESUME = resume()
DEPART = (("kind", "depart"), ("host", 1), ("because", "b has left"))
PAUSES = (ask("a", After.PAUSE), ask("b", After.PAUSE, host=1))
STORIES = {
    "one checkpoint beside training": (2, 3, (ask("a"),), 0, False),
    "one that pauses, and utility back": (2, 3, (ask("a", After.PAUSE), RESUME), 0, False),
    "two askers, the second wants a pause": (2, 3, (ask("a"), ask("b", After.PAUSE)), 0, False),
    "called off": (2, 3, (ask("a", After.PAUSE), CANCEL), 0, False),
    "a pause without a checkpoint, then one with": (
        2,
        3,
        (ask("a", save=False, after=After.PAUSE), ask("b")),
        0,
        False,
    ),
    "exit": (2, 3, (ask("a", After.EXIT),), 0, False),
    "given up at any moment": (2, 2, (ask("a", After.PAUSE),), 0, True),
    "a death at any moment": (2, 2, (ask("a", After.PAUSE),), 1, True),
    "three ranks": (3, 2, (ask("a", After.PAUSE),), 0, False),
    "two hosts pause, and utility is back at one": (2, 2, (*PAUSES, resume(1)), 0, False),
    "two hosts pause, and utility is back at both": (2, 2, (*PAUSES, resume(0), resume(1)), 0, False),
    "back at one before the other asks": (2, 2, (PAUSES[0], resume(1), PAUSES[1], resume(0)), 0, False),
    "calls its own off, not the other's": (2, 2, (*PAUSES, CANCEL), 0, False),
    "all are there before they go on": (2, 2, (*PAUSES, resume(1, roll=True), resume(0, roll=True)), 0, False),
    "one dies before they go on": (2, 2, (ask("a", After.PAUSE, save=False), resume(roll=True)), 1, True),
    "a host leaves while training runs": (2, 3, (DEPART,), 0, False),
    "a host leaves at any moment of a checkpoint": (2, 2, (ask("a", After.PAUSE), DEPART), 0, False),
    "a host leaves, and the other wants to go on": (2, 2, (PAUSES[0], DEPART, resume(roll=True)), 0, False),
    "a host leaves, and dies": (2, 2, (ask("a", After.PAUSE, save=False), DEPART), 1, True),
}


@pytest.mark.parametrize("story", STORIES)
def test_every_interleaving_agrees(story: str) -> None:
    """All ranks save at one step or nothing counts, nobody passes the step, and nobody waits for ever."""
    ranks, last_step, left, deaths, giving_up = STORIES[story]
    start = World(ranks=(Rank(),) * ranks, left=left, deaths=deaths, giving_up=giving_up)
    number = explore(start, last_step)
    print(f"{story}: {number} worlds")
    assert number > 100


def test_long_random_walks_agree() -> None:
    """Four ranks and six wishes one after the other: too many worlds to visit all, so a thousand ways through them."""
    dice = random.Random(5)
    wishes = [ask("a"), ask("b", After.PAUSE), RESUME, ask("c"), CANCEL, ask("d", After.PAUSE, save=False)]
    wishes += [resume(roll=True), DEPART]
    for _ in range(300):
        left = tuple(dice.sample(wishes, k=5))
        world = World(ranks=(Rank(),) * 4, left=left, deaths=dice.randrange(2), giving_up=dice.random() < 0.5)
        while True:
            ways = list(moves(world, 12))
            if not ways:
                break
            move, world = dice.choice(ways)
            check(world, 12, move)
        assert settled(world, 12), world
