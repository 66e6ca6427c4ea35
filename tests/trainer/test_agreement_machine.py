"""The rules of the log, one by one, and on whatever may stand in it."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from powerguard.trainer.ranks.machine import NEVER, Move, RankState, State, apply, due, move
from powerguard.wire import After


def ask(
    name: str, after: str = "continue", *, save: bool = True, host: int = 0, reason: str = "drill"
) -> dict[str, Any]:
    return {
        "kind": "ask",
        "id": name,
        "reason": reason,
        "event": "",
        "after": after,
        "save": save,
        "deadline_s": None,
        "host": host,
    }


def step(number: int, at: int) -> dict[str, Any]:
    return {"kind": "step", "g": number, "step": at, "token": "0123abcd"}


def begin(number: int) -> dict[str, Any]:
    return {"kind": "begin", "g": number}


def end(number: int, *, ok: bool = True) -> dict[str, Any]:
    return {"kind": "end", "g": number, "ok": ok, "digest": "sha256:aa", "error": "disk full"}


CANCEL, RESUME, LEAVE = (
    {"kind": "cancel", "g": 1, "host": 0},
    {"kind": "resume", "host": 0},
    {"kind": "leave", "host": 0},
)
OTHER = {"kind": "resume", "host": 1}
ALL = {"kind": "resume", "host": None}
ROLL = {"kind": "resume", "host": 0, "roll": True}
DEPART = {"kind": "depart", "host": 1, "because": "b has left"}


def after(*entries: dict[str, Any]) -> State:
    return after_all(State(), *entries)


def after_all(state: State, *entries: dict[str, Any]) -> State:
    for entry in entries:
        state = apply(state, entry)
    return state


TWO = (ask("a", "pause"), ask("b", "pause", host=1))


def test_join_escalates_and_never_back() -> None:
    """continue < pause < exit; a wish for a checkpoint makes one of a pause; hosts on battery add up."""
    state = after(
        ask("a", "pause", save=False, reason="on_battery"),
        ask("b", "continue", host=1, reason="on_battery"),
        ask("c", "exit", host=2),
        ask("d", "pause", host=1, reason="on_battery"),
    )
    assert state.front is not None
    assert (state.number, state.front.after, state.front.save, state.front.on_battery) == (1, After.EXIT, True, (0, 1))
    assert state.front.ids == ("a", "b", "c", "d")


def test_who_joins_what() -> None:
    """A wish to go on joins one that is written beside; a wish to pause gets its own; nobody joins what has ended."""
    beside = after(ask("a"), step(1, 5), begin(1))
    assert beside.back is not None
    assert beside.back.beside
    assert beside.joined(True, After.CONTINUE) is beside.back
    assert beside.joined(True, After.PAUSE) is None
    assert beside.joined(False, After.PAUSE) is None
    both = apply(beside, ask("b", "pause"))
    assert both.front is not None
    assert (both.front.number, both.joined(True, After.CONTINUE)) == (2, both.front)
    assert after(ask("a"), step(1, 5), begin(1), end(1)).joined(True, After.CONTINUE) is None


def test_one_asked_to_go_on_while_another_is_written_stands() -> None:
    """Two are never written beside training: there are two snapshots, and the second is for an emergency."""
    state = after(ask("a"), step(1, 5), begin(1), ask("b", "pause"), RESUME, step(2, 9), begin(2))
    assert state.front is not None
    assert state.back is not None
    assert (state.front.number, state.front.beside, state.back.number) == (2, False, 1)


@pytest.mark.parametrize(
    ("entries", "held_at", "leaving"),
    [
        ((ask("a"), step(1, 5), begin(1), end(1)), None, None),
        ((ask("a", "pause"), step(1, 5), begin(1), end(1)), 5, None),
        ((ask("a", "pause"), step(1, 5), begin(1), end(1, ok=False)), 5, None),
        ((ask("a", "pause"), step(1, 5), begin(1), RESUME, end(1)), None, None),
        ((ask("a", "pause"), step(1, 5), begin(1), CANCEL, end(1)), None, None),
        ((ask("a", "pause"), step(1, 5), CANCEL), None, None),
        ((ask("a", "pause"), end(1, ok=False)), None, None),
        ((ask("a", "exit"), step(1, 5), begin(1), end(1)), 5, 1),
        ((ask("a", "exit"), step(1, 5), begin(1), end(1, ok=False)), 5, None),
        ((ask("a", "exit"), step(1, 5), begin(1), end(1), RESUME), None, None),
        ((ask("a", "pause", save=False), step(1, 5)), 5, None),
        ((ask("a", "pause", save=False), RESUME), None, None),
        ((ask("a", "pause"), step(1, 5), begin(1), end(1), ask("b"), step(2, 5), begin(2), end(2)), 5, None),
        # Two hosts, each with a UPS of its own: the word of one takes back nothing of the other's.
        ((*TWO, step(1, 5), begin(1), end(1), OTHER), 5, None),
        ((*TWO, step(1, 5), begin(1), end(1), OTHER, RESUME), None, None),
        ((*TWO, step(1, 5), begin(1), end(1), RESUME, RESUME), 5, None),
        ((*TWO, step(1, 5), begin(1), end(1), ALL), None, None),
        ((*TWO, RESUME, step(1, 5), begin(1), end(1)), 5, None),
        ((*TWO, step(1, 5), begin(1), RESUME, OTHER, end(1)), None, None),
        ((*TWO, step(1, 5), CANCEL, begin(1), end(1)), 5, None),
        ((*TWO, step(1, 5), CANCEL, {**CANCEL, "host": 1}), None, None),
        ((ask("a", "pause"), step(1, 5), begin(1), end(1), OTHER), 5, None),
        ((ask("a", "exit"), ask("b", "pause", host=1), RESUME, step(1, 5), begin(1), end(1)), 5, None),
        ((ask("a", "exit"), ask("b", "pause", host=1), OTHER, step(1, 5), begin(1), end(1)), 5, 1),
        ((ask("a", "exit"), ask("b", "pause", host=1), step(1, 5), begin(1), end(1), RESUME), 5, None),
        ((ask("a", "pause", save=False), ask("b", "pause", save=False, host=1), RESUME, step(1, 5)), 5, None),
        (
            (ask("a", "pause"), end(1, ok=False), ask("b", "pause", host=1), step(2, 5), begin(2), end(2), OTHER),
            None,
            None,
        ),
        ((*TWO, step(1, 5), begin(1), end(1), LEAVE), 5, None),
        ((*TWO, step(1, 5), begin(1), end(1), OTHER, LEAVE), None, None),
    ],
)
def test_what_comes_after(entries: tuple[dict[str, Any], ...], held_at: int | None, leaving: int | None) -> None:
    """Who stands where, and who leaves, after each way in which one can go."""
    state = after(*entries)
    assert (state.held_at, state.leaving) == (held_at, leaving)
    assert state.front is None
    stance = RankState(taken=9)
    assert due(state, stance) == (NEVER if held_at is None else held_at)
    assert move(state, stance, 4)[0] is Move.GO
    expected = Move.LEAVE if leaving else Move.WAIT if held_at else Move.GO
    assert move(state, stance, 5)[0] is expected


HELD = (ask("a", "pause"), step(1, 5), begin(1), end(1))


@pytest.mark.parametrize(
    ("entries", "held_at", "departed"),
    [
        ((DEPART, step(1, 5)), 5, "b has left"),
        ((*HELD, DEPART, step(2, 5)), 5, "b has left"),
        ((*HELD, DEPART, RESUME, ALL, step(2, 5)), 5, "b has left"),
        ((*HELD, DEPART, end(2, ok=False)), 0, "b has left"),
        ((*HELD, DEPART, LEAVE), 0, "b has left"),
        ((ask("a", "exit"), step(1, 5), begin(1), end(1), DEPART), 5, "b has left"),
        ((ask("a", "pause"), step(1, 5), DEPART, step(2, 6)), 6, "b has left"),
        ((ask("a", "pause"), step(1, 5), begin(1), DEPART, RESUME, CANCEL, end(1)), 5, "b has left"),
        ((ask("a", "pause"), step(1, 5), begin(1), DEPART, end(1, ok=False)), 5, "b has left"),
        ((ask("a"), step(1, 5), begin(1), DEPART, end(1), step(2, 7)), 7, "b has left"),
        ((*HELD, ROLL, end(2, ok=False)), 5, "disk full"),
        ((*HELD, ROLL, DEPART, step(3, 5)), 5, "b has left"),
    ],
)
def test_a_host_that_leaves_ends_every_rank(entries: tuple[dict[str, Any], ...], held_at: int, departed: str) -> None:
    """Whatever is under way: what is being written is finished, all stop at one step, and no host lets them go on."""
    state = after(*entries)
    assert (state.front, state.held_at, state.departed) == (None, held_at, departed)
    assert state.leaving is not None
    assert move(state, RankState(taken=9), held_at)[0] is Move.LEAVE
    assert apply(state, RESUME) == apply(state, ask("late")) == apply(state, DEPART) == state


@pytest.mark.parametrize(
    ("entries", "held_at"),
    [
        ((*HELD, ROLL, step(2, 5)), None),
        ((*HELD, ROLL, ROLL, step(2, 5)), None),
        ((*HELD, ROLL, ask("b", "pause", save=False), step(2, 5)), 5),
        ((*HELD, ROLL, ask("b", "pause"), step(2, 5), begin(2), end(2)), 5),
        ((*HELD, ROLL, ask("b", "pause", save=False), ROLL, step(2, 5)), None),
        ((*HELD, LEAVE, ROLL), None),
        ((ask("a", "pause"), ROLL, step(1, 5), begin(1), end(1)), None),
    ],
)
def test_all_ranks_are_there_before_training_goes_on(entries: tuple[dict[str, Any], ...], held_at: int | None) -> None:
    """All bid once more; a host that wants training to stand meanwhile is heard."""
    state = after(*entries)
    assert (state.front, state.held_at, state.departed) == (None, held_at, "")


def test_a_checkpoint_that_was_not_begun_is_called_off_by_a_departure() -> None:
    """It could not become whole; its asker is told why."""
    (off,) = after(ask("a", "pause"), step(1, 5), DEPART).past
    assert off.ended is not None
    assert (off.ended.ok, off.ended.aborted, off.ended.error) == (False, True, "b has left")


def test_the_first_end_counts() -> None:
    """Whoever gives up after the commit, or commits after another gave up, changes nothing."""
    won = after(ask("a"), step(1, 5), begin(1), end(1), end(1, ok=False))
    assert won.past[-1].ended is not None
    assert won.past[-1].ended.ok
    lost = after(ask("a"), step(1, 5), begin(1), end(1, ok=False), end(1))
    assert lost.past[-1].ended is not None
    assert not lost.past[-1].ended.ok
    assert lost.committed_step is None


def test_nothing_is_committed_that_has_not_begun() -> None:
    """An end that says ok before anybody stood at the step is no end."""
    assert after(ask("a"), end(1)).front is not None
    assert after(ask("a"), step(1, 5), end(1)).front is not None


def test_same_step_again_is_known_to_be_durable() -> None:
    """A second checkpoint of the step that was committed last says so; one of another step does not."""
    once = (ask("a", "pause"), step(1, 5), begin(1), end(1))
    again = after(*once, ask("b"), step(2, 5)).front
    assert again is not None
    assert again.already == "sha256:aa"
    later = after(*once, RESUME, ask("b"), step(2, 6)).front
    assert later is not None
    assert later.already == ""
    back = after(*once, RESUME, {"kind": "back"}, ask("b"), step(2, 5)).front
    assert back is not None
    assert back.already == "", "training was rolled back, and comes to that step with another state"
    between = after(*once, ask("b"), step(2, 5), {"kind": "back"}, begin(2)).back
    assert between is not None
    assert between.already == "", "it rots just before all ranks are there"
    rotten = after(*once, {"kind": "back", "digest": "sha256:aa"})
    assert (rotten.rotten, State.parse(rotten.to_json())) == ("sha256:aa", rotten)
    assert after_all(rotten, {"kind": "back"}).rotten == "", "it may have been restored from the second tier since"


def test_a_checkpoint_that_is_still_written_as_training_is_rolled_back_answers_nothing_later() -> None:
    """It ends well after that, and the same number of a step comes again with another state."""
    back = {"kind": "back"}
    again = after(ask("a"), step(1, 5), begin(1), back, end(1), ask("b"), step(2, 5), begin(2)).back
    assert again is not None
    assert (again.number, again.already, again.follows) == (2, "", 0)
    meanwhile = after(ask("a"), step(1, 5), begin(1), back, ask("b", "pause"), step(2, 5), begin(2)).front
    assert meanwhile is not None
    assert meanwhile.follows == 0


def test_one_that_begins_at_the_step_that_another_writes_follows_it() -> None:
    """What a rank has heard of the end of the other decides nothing: the log says the same to all."""
    first = (ask("a"), step(1, 5), begin(1))
    second = after(*first, ask("b", "pause"), step(2, 5), begin(2)).front
    assert second is not None
    assert (second.follows, second.already) == (1, "")
    done = after(*first, ask("b", "pause"), step(2, 5), end(1), begin(2)).front
    assert done is not None
    assert (done.follows, done.already) == (0, "sha256:aa"), "it ended between the step and the beginning"
    later = after(*first, ask("b", "pause"), step(2, 6), begin(2)).front
    assert later is not None
    assert later.follows == 0


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("is_beside", [True, False])
def test_a_checkpoint_that_joins_a_roll_does_not_keep_training_standing(*, is_beside: bool, ok: bool) -> None:
    """Utility is back, and a periodic checkpoint comes due: no host holds training, so none could resume it."""
    before = () if is_beside else (ask("z"), step(1, 5), begin(1))
    first = len(before) // 3
    state = after(*before, ask("a", "pause", save=False), step(first + 1, 6), ROLL, ask("b"), step(first + 2, 7))
    assert (state.held_at, state.holds) == (7, ())
    state = after_all(state, begin(first + 2), end(first + 2, ok=ok))
    assert (state.held_at, state.holds, state.front) == (None, (), None)


def test_after_somebody_left_nothing_is_opened() -> None:
    """A job that is ending does not begin a checkpoint that can not become whole."""
    state = after(ask("a"), step(1, 5), begin(1), LEAVE, ask("b"))
    assert [(one.number, one.ended is not None and one.ended.aborted) for one in state.past] == [(1, False), (2, True)]
    assert (state.front, state.back) == (None, None)


_words = st.sampled_from(
    ["ask", "step", "begin", "gathered", "end", "cancel", "resume", "depart", "leave", "x", None, 5]
)
_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 6),
    st.just(2**70),
    st.floats(allow_nan=True),
    st.sampled_from(["a", "b", "pause", "exit", "continue", "on_battery", "\x1b[2J"]),
    st.lists(st.integers(), max_size=2),
)
_entries = st.dictionaries(
    st.sampled_from(
        [
            "id",
            "reason",
            "event",
            "after",
            "save",
            "deadline_s",
            "host",
            "g",
            "step",
            "token",
            "key",
            "ok",
            "digest",
            "error",
            "roll",
            "because",
        ]
    ),
    _values,
)
_sensible = st.sampled_from(
    [
        *(
            ask(name, word, save=save)
            for name in "ab"
            for word in ("continue", "pause", "exit")
            for save in (True, False)
        ),
        *(ask(name, "pause", host=1) for name in "cd"),
        OTHER,
        ALL,
        *(make(number) for make in (begin, end) for number in (1, 2, 3)),
        *(step(number, at) for number in (1, 2, 3) for at in (4, 5)),
        *({"kind": "gathered", "g": number, "key": "shard"} for number in (1, 2)),
        CANCEL,
        RESUME,
        ROLL,
        DEPART,
        LEAVE,
    ]
)


@given(
    st.lists(st.one_of(_sensible, st.builds(lambda kind, rest: {**rest, "kind": kind}, _words, _entries)), max_size=30)
)
@example([ask("a", "continue", save=False), step(1, 4)])
def test_any_log_gives_a_state_that_makes_sense(entries: list[dict[str, Any]]) -> None:
    """Total, bounded, and the same after a rank that slept has read the kept state."""
    state = State()
    for entry in entries:
        before, state = state, apply(state, entry)
        assert State.parse(state.to_json()) == state
        assert before.number <= state.number <= before.number + 1
        stands = state.held_at is not None or (state.front is not None and state.front.after is not After.CONTINUE)
        goes_on = state.front is not None and state.front.after is After.CONTINUE
        if not (state.departed or (goes_on and not state.holds)):  # a roll, which a checkpoint may have joined
            assert stands == bool(state.holds), "whoever stands, somebody holds; and nobody holds what goes on"
        if state.departed and state.front is None:
            assert state.leaving is not None, "no rank stands for ever for a host that has left"
        for one in state.past:
            assert one.ended is not None
            assert not (one.ended.ok and one.ended.error)
        if state.front is not None and state.back is not None:
            assert state.back.number < state.front.number
            assert state.back.begun
            assert state.back.beside
        assert len(state.past) <= 16
        for at in range(8):
            action, known = move(state, RankState(), at)
            assert (action is Move.GO) or (at >= due(state, RankState()))
            assert action in {Move.GO, Move.WAIT} or known is not None


def test_the_state_stays_small_in_a_storm() -> None:
    """A hundred thousand askers, all of a different name, fit into what a store takes."""
    state = State()
    for number in range(1, 40):
        for index in range(200):
            state = apply(state, ask(f"{'x' * 100}-{number}-{index}", "pause", host=index, reason="on_battery"))
        state = apply(state, end(number, ok=False))
    assert state.number == 39
    assert len(state.to_json()) < 500_000
