"""What a host that is back waits for, gate by gate, and whether a person's word to start now is taken."""

from dataclasses import replace

import pytest

from powerguard.core.model.events import OutputSource, RecoverNow
from powerguard.core.model.state import Battery, Feed, Recovery, State, Supply
from powerguard.daemon.control.admin import Admin, Caller, Directory
from powerguard.daemon.observe.port import ReturnView
from powerguard.daemon.observe.status import gates, returning, stage
from powerguard.effectors.host.check import HostSeen
from tests.daemon.watched import NOW_S, Watched, outage, reading, scene

ME = Caller(pid=1, uid=0, gid=0, name="root")
WHOLE = HostSeen(0.0, notes=("llm: 1 newer passed over",), gpus=2, folders=1)
LESS = HostSeen(0.0, problems=("1 of 2 GPUs are there: GPU-b is missing",), gpus=1)


def seen(look: HostSeen, age_s: float = 5.0) -> HostSeen:
    return look._replace(at_s=NOW_S - age_s)


def back(
    *, supply: Supply = Supply.UTILITY, for_s: float = 100.0, charge: float = 80.0, look: HostSeen | None = WHOLE
) -> Watched:
    """A host that came back for_s ago, with this charge."""
    daemon = scene("online")
    source = {Supply.UTILITY: OutputSource.UTILITY, Supply.BATTERY: OutputSource.BATTERY}.get(supply)
    result = None if source is None else reading(output_source=source, charge_pct=charge, runtime_s=12.6 * charge)
    feed = Feed(supply=supply, since_s=NOW_S - for_s, reading=result)
    phase = Recovery(outage=outage(), began_s=NOW_S - for_s, clean=True)
    used = 0.75 * (1.0 - charge / 100.0)
    battery = Battery(at_s=NOW_S, used=used, health=0.75, load=0.62)
    daemon.state = State(phase=phase, feed=feed, battery=battery, trainers=daemon.state.trainers)
    daemon.returning = ReturnView(target="powerguard-resume.target", seen=None if look is None else seen(look))
    return daemon


def with_phase(daemon: Watched, **changes: float) -> Watched:
    phase = daemon.state.phase
    assert isinstance(phase, Recovery)
    daemon.state = replace(daemon.state, phase=replace(phase, **changes))  # type: ignore[arg-type] # its own fields
    return daemon


@pytest.mark.parametrize(
    ("daemon", "shut", "word"),
    [
        (back(), "", ""),
        (back(for_s=3.0), "utility", "for 3 s; must hold 10 s"),
        (back(supply=Supply.BATTERY), "utility", "on battery"),
        (back(supply=Supply.UNKNOWN), "utility", "no source reports"),
        (
            back(for_s=20.0, charge=2.0),
            "charge",
            "2 %: a second outage would cost the checkpoint; waited for at most 40 s",
        ),
        (back(look=LESS), "host", "1 of 2 GPUs are there"),
    ],
)
def test_each_gate_says_how_it_is(daemon: Watched, shut: str, word: str) -> None:
    """What is closed is named with what would open it; the rest is open, and says why."""
    by_name = {gate.name: gate for gate in gates(daemon)}
    assert list(by_name) == ["utility", "countdown", "charge", "host"]
    closed = [name for name, gate in by_name.items() if gate.open is False]
    assert closed[:1] == ([shut] if shut else [])
    assert not shut or word in by_name[shut].text


def test_an_unknown_output_without_input_is_waited_for() -> None:
    daemon = back(supply=Supply.UNKNOWN)
    seen = reading(output_source=OutputSource.UNKNOWN, input_present=False)
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, reading=seen))
    assert gates(daemon)[0].text == "unknown, with the UPS's input gone: waited for"


def test_why_a_charge_is_enough_is_said_in_words() -> None:
    """On the page and in `recover`, the core's own words ("charge_pct") explain nothing."""
    assert gates(back(for_s=20.0, charge=95.0))[2].text == "95 %: enough"


def test_a_charge_that_would_take_hours_is_not_waited_for() -> None:
    assert gates(back(for_s=100.0, charge=2.0))[2].open


def test_a_host_that_was_not_looked_at_is_not_known_to_be_whole() -> None:
    assert gates(back(look=None))[3].open is None
    daemon = back()
    daemon.returning = replace(daemon.returning, seen=seen(WHOLE, age_s=600.0))
    assert gates(daemon)[3].text.endswith("(10 min ago)")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "check"),
        ({"tries": 1}, "start"),
        ({"started_at_s": NOW_S - 1.0}, "first_step"),
    ],
)
def test_how_far_a_recovery_is(changes: dict[str, float], word: str) -> None:
    daemon = with_phase(back(), **changes)
    assert (stage(daemon), returning(daemon)["stage"]) == (word, word)
    assert (stage(back(for_s=3.0)), stage(scene("online"))) == ("gate", "none")


@pytest.mark.parametrize(
    ("daemon", "unchecked", "refused"),
    [
        (back(for_s=3.0), False, ""),
        (back(for_s=20.0, charge=2.0), False, ""),
        (back(supply=Supply.UNKNOWN), False, ""),
        (back(look=LESS), True, ""),
        (back(look=None), True, ""),
        (back(look=LESS), False, "GPU-b is missing"),
        (back(look=None), False, "not checked yet"),
        (back(supply=Supply.BATTERY), True, "on battery: training starts by itself"),
        (scene("online"), True, "there was no power-off to recover from: the phase is online"),
        (scene("holding"), True, "there was no power-off to recover from: the phase is holding"),
    ],
)
def test_a_persons_word_is_taken_or_refused_with_the_reason(daemon: Watched, *, unchecked: bool, refused: str) -> None:
    """The gate may be overruled, the host's check only knowingly, a battery never."""
    daemon.events.clear()
    code, body, _ = Admin(daemon, Directory("nobody")).recover(ME, {"unchecked": unchecked})
    assert (code, refused in body.decode()) == (409 if refused else 202, True)
    assert daemon.events == ([] if refused else [RecoverNow(at_s=NOW_S, who="root")])


def test_nothing_is_started_before_a_cut_nor_twice() -> None:
    daemon = back()
    result = daemon.state.feed.reading
    assert result is not None
    feed = replace(daemon.state.feed, reading=replace(result, output_off_in_s=30.0), countdown_at_s=NOW_S + 30.0)
    daemon.state = replace(daemon.state, feed=feed)
    assert Admin(daemon, Directory("nobody")).recover(ME, {"unchecked": True})[0] == 409
    assert not gates(daemon)[1].open
    daemon = with_phase(back(), started_at_s=NOW_S)
    assert b"waits for its first step" in Admin(daemon, Directory("nobody")).recover(ME, {})[1]
