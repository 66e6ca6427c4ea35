"""The journal's data form: whatever the model can say comes back unchanged, and damage is told with its place."""

import dataclasses
import functools
import json
import math
import sys
import types
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.core.model import actions, events
from powerguard.core.model import serialisation as codecs
from powerguard.core.model import state as model
from powerguard.core.model.actions import Action, EnsurePolicy, Grade, Note, PowerOff
from powerguard.core.model.events import Done, Event, OutputSource, Reading
from powerguard.core.model.serialisation import PlainError, from_plain, to_plain
from powerguard.core.model.state import Feed, Phase, State, Supply, Trainer

CLASSES = [
    cls
    for module in (actions, events, model)
    for cls in vars(module).values()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
]
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
# An action's class is told by its kind, so the base class stands for every action there is.
ACTIONS = [cls for cls in CLASSES if issubclass(cls, Action)]
st.register_type_strategy(Action, lambda _: st.one_of(*(instances(cls) for cls in ACTIONS)))


@pytest.fixture(autouse=True)
def _nothing_is_built() -> None:
    """Let every test build its decoders itself: one that a test before it has left would hide a builder gone wrong."""
    known: dict[Any, Any] = codecs._DECODERS
    for cls in known.keys() - {bool, int, float, str, type(None)}:
        del known[cls]


@functools.cache
def instances(cls: type) -> st.SearchStrategy[object]:
    """Any instance of cls with every field drawn, defaults included."""
    hints = get_type_hints(cls)
    return st.builds(cls, **{each.name: st.from_type(hints[each.name]) for each in dataclasses.fields(cls)})


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@settings(deadline=None, max_examples=15)  # the first builds the strategy; each run draws others
@given(data=st.data())
def test_every_class_of_the_model_comes_back_unchanged(cls: type, data: st.DataObject) -> None:
    """Through real JSON text, for every dataclass: the journal is only as good as this."""
    value = data.draw(instances(cls))
    text = json.dumps(to_plain(value), allow_nan=False)
    again: object = from_plain(json.loads(text), cls)
    assert again == value
    assert type(again) is cls


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls in Event.__args__], ids=lambda cls: cls.__name__)
@settings(deadline=None, max_examples=15)  # the first builds the strategy; each run draws others
@given(data=st.data())
def test_an_event_is_reported_by_its_kind(cls: type, data: st.DataObject) -> None:
    """A union is read without knowing beforehand which of its classes was written."""
    value = data.draw(instances(cls))
    assert from_plain(to_plain(value), Event) == value


def test_the_written_form_is_readable_by_people() -> None:
    """The exact form, since CLI, replay and older journals depend on it."""
    policy = EnsurePolicy(id="o-7", by_s=9.5, outage="2026-11-21T04:12Z-a3")
    done = Done(at_s=5.0, action=policy, took_s=0.25, detail=(("policy", "always-on"), ("verified", True)))
    assert to_plain(done) == {
        "kind": "Done",
        "at_s": 5.0,
        "action": {"kind": "EnsurePolicy", "id": "o-7", "by_s": 9.5, "outage": "2026-11-21T04:12Z-a3"},
        "took_s": 0.25,
        "detail": [["policy", "always-on"], ["verified", True]],
    }
    reading = to_plain(Reading(at_s=1.0, ups="a", source="snmp", output_source=OutputSource.BYPASS))
    assert isinstance(reading, dict)
    assert (reading["output_source"], reading["runtime_s"], reading["alarms"]) == ("bypass", None, [])


def test_a_subclass_of_action_is_found_inside_an_outcome() -> None:
    """`Done.action` is declared as the base class; what comes back must be the real action."""
    done = Done(
        at_s=1.0, took_s=0.5, action=PowerOff(id="o-1", by_s=9.0, outage="o", grade=Grade.BARE, force_after_s=110.0)
    )
    again = from_plain(to_plain(done), Done)
    assert isinstance(again.action, PowerOff)
    assert again == done


def test_a_newer_daemons_keys_are_ignored() -> None:
    """After a downgrade the journal holds keys that this version does not know."""
    plain = {"kind": "EnsurePolicy", "id": "a", "by_s": 5.0, "outage": "o", "invented_later": [1, {"x": 2}]}
    assert from_plain(plain, Action) == EnsurePolicy(id="a", by_s=5.0, outage="o")


def test_an_older_daemons_missing_keys_take_the_default() -> None:
    """After an upgrade the journal lacks the fields that are new."""
    assert from_plain({"kind": "State"}, State) == State()
    assert from_plain({"kind": "Trainer", "name": "llm"}, Trainer) == Trainer(name="llm")
    assert from_plain({"name": "llm"}, Trainer) == Trainer(name="llm")


def test_a_whole_number_stands_for_a_float() -> None:
    """JSON written by another tool says 5, not 5.0."""
    feed = from_plain({"kind": "Feed", "since_s": 5, "lost_since_s": 7}, Feed)
    assert (feed.since_s, feed.lost_since_s) == (5.0, 7.0)
    assert type(feed.since_s) is float
    assert type(feed.lost_since_s) is float


def test_numbers_of_a_note_keep_their_type() -> None:
    """A step is a whole number and stays one; a flag stays a flag."""
    note = Note(event="checkpoint_durable", because="paused", numbers=(("step", 7), ("paused", True), ("took_s", 2.0)))
    again = from_plain(json.loads(json.dumps(to_plain(note))), Note)
    assert [type(value) for _, value in again.numbers] == [int, bool, float]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_json_cannot_hold_is_refused_with_its_place(bad: float) -> None:
    """Infinity would be written as something that no reader takes."""
    state = State(
        feed=Feed(reading=Reading(at_s=1.0, ups="a", source="snmp", output_source=OutputSource.UTILITY, watts=bad))
    )
    with pytest.raises(PlainError, match=r"feed\.reading\.watts: cannot keep .* \(finite numbers only"):
        to_plain(state)
    with pytest.raises(PlainError, match=r"numbers\[1\]\[1\]: cannot keep"):
        to_plain(Note(event="x_y", because="", numbers=(("a", 1), ("b", bad))))
    with pytest.raises(PlainError, match=r"Feed\.since_s: expected a finite number"):
        from_plain({"kind": "Feed", "since_s": bad}, Feed)


@dataclasses.dataclass(frozen=True)
class Base:
    """Is what a field is declared as."""


@dataclasses.dataclass(frozen=True)
class Plain(Base):
    """Has no slots, as a class may."""

    x: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted(Base):
    """Has slots, and so a second class of the same name behind it."""

    x: int = 0


def test_every_subclass_is_read_with_slots_or_without() -> None:
    """Which of them was meant says the kind; the class without slots behind one with slots is none of them."""
    for value in (Base(), Plain(x=1), Slotted(x=2)):
        again = from_plain(to_plain(value), Base)
        assert again == value
        assert type(again) is type(value)


def test_a_union_of_an_enum_or_of_a_list_with_null_is_read() -> None:
    """Neither is told by a kind: at most one of them may stand in a union, and then it is what is left."""
    for value in (None, Supply.BATTERY):
        assert from_plain(to_plain(value), Supply | None) is value
    for held in (None, (1, 2)):
        assert from_plain(to_plain(held), tuple[int, ...] | None) == held
    assert from_plain(None, type(None)) is None


def test_decoders_are_built_once() -> None:
    """A report reads thousands of events; asking a class for its hints takes a hundred times as long."""
    asked: list[str] = []

    def watch(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is get_type_hints.__code__:
            asked.append(frame.f_code.co_name)

    counts, plain = [], to_plain(State())
    for _ in range(2):
        asked.clear()
        sys.setprofile(watch)
        try:
            from_plain(plain, State)
        finally:
            sys.setprofile(None)
        counts.append(len(asked))
    assert counts[0] > 0
    assert counts[1] == 0


def test_an_error_without_a_place_has_none() -> None:
    assert str(PlainError("why")) == "why"
    assert str(PlainError("why").under(3).under("x")) == "x[3]: why"


@pytest.mark.parametrize(
    ("plain", "cls", "message"),
    [
        ({"kind": "Trainer"}, Trainer, "Trainer.name: missing, and it has no default"),
        ({"kind": "Trainer", "name": 5}, Trainer, "Trainer.name: expected a string, found int 5"),
        (
            {"kind": "Trainer", "name": "x", "pause_ordered": 1},
            Trainer,
            "Trainer.pause_ordered: expected true or false, found int 1",
        ),
        ({"kind": "State", "serial": True}, State, "State.serial: expected a whole number, found bool True"),
        ({"kind": "State", "serial": 1.5}, State, "State.serial: expected a whole number, found float 1.5"),
        (
            {"kind": "State", "transfers": [1, "x"]},
            State,
            "State.transfers[1]: expected a finite number, found str 'x'",
        ),
        ({"kind": "State", "transfers": 1}, State, "State.transfers: expected a list, found int 1"),
        (
            {"kind": "State", "transfers": [10**400]},
            State,
            f"State.transfers[0]: expected a finite number, found int 1{'0' * 59}",
        ),
        (
            {"kind": "State", "phase": {"kind": "Party"}},
            State,
            "State.phase: unknown kind 'Party' (one of Online, OnBattery",
        ),
        ({"kind": "State", "phase": {}}, State, "State.phase: unknown kind None (one of Online"),
        ({"kind": "State", "phase": 3}, State, "State.phase: expected Online, OnBattery"),
        ({"kind": "Feed", "supply": "gas"}, State, "State: unknown kind 'Feed' (one of State)"),
        (
            {"kind": "Feed", "supply": "gas"},
            Feed,
            "Feed.supply: expected one of unknown, utility, battery, found str 'gas'",
        ),
        ({"kind": "Feed", "supply": []}, Feed, "Feed.supply: expected one of"),
        (
            {"kind": "Note", "event": "a", "because": "b", "numbers": [["x"]]},
            Note,
            "Note.numbers[0]: expected a list of 2, found list ['x']",
        ),
        ({"kind": "Feed", "lost_since_s": "x"}, Feed, "Feed.lost_since_s: expected float, null, found str 'x'"),
        ([], State, "State: expected an object with kind State, found list []"),
        ("x", Phase, "value: expected Online, OnBattery, EmergencyCheckpoint"),
        ({}, int | None, "value: expected int, null, found dict {}"),
        ([], Base, "Base: expected an object with kind Base, Plain, Slotted, found list []"),
        (0, type(None), "NoneType: expected null, found int 0"),
        ("gas", Supply | None, "value: expected one of unknown, utility, battery, found str 'gas'"),
    ],
)
def test_damage_is_reported_with_its_place(plain: object, cls: object, message: str) -> None:
    """A journal that was edited or torn says where, what was found and what would be right."""
    with pytest.raises(PlainError) as caught:
        from_plain(plain, cls)
    assert message in str(caught.value)


@dataclasses.dataclass(frozen=True)
class Odd:
    """Holds something that is no plain data."""

    what: object


@dataclasses.dataclass(frozen=True)
class Clash:
    """Has a field that the tag needs."""

    kind: str


def test_what_is_not_plain_data_is_refused() -> None:
    """A list, a set or an object in the state is a bug that must show at the first write, not at the restart."""
    with pytest.raises(PlainError, match=r"what: cannot keep a list"):
        to_plain(Odd(what=[1]))
    with pytest.raises(PlainError, match="has a field named 'kind'"):
        to_plain(Clash(kind="x"))
    with pytest.raises(PlainError, match="cannot read a"):
        from_plain({}, list)
    with pytest.raises(PlainError, match="cannot be distinguished"):
        from_plain([], tuple[int, ...] | tuple[str, ...])


@settings(deadline=None)
@given(
    plain=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "phase", "feed", "x"]), inner)
        ),
        max_leaves=8,
    )
)
def test_any_json_is_read_or_refused(plain: object) -> None:
    """Whatever a damaged journal holds: a State or a PlainError, nothing else."""
    try:
        state = from_plain(plain, State)
    except PlainError:
        return
    assert isinstance(state, State)
