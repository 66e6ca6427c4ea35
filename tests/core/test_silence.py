"""What falls silent with the power, and what is only silent: the edges of the presumption, one by one."""

import pytest

from powerguard.core.model.actions import PowerOff
from powerguard.core.model.events import NetworkSeen, OutputSource, Reading
from powerguard.core.model.state import Feed, NetworkLoss, State, Supplied, Supply
from powerguard.core.supply import silence
from tests.core.play import play

CALM = ("policy table=50:540,100:240", "0..5 utility load=75 charge=100 runtime=360")


def _lost(lost_s: float | None, supply: Supply = Supply.UTILITY) -> Feed:
    reading = Reading(at_s=90.0, ups="a", source="snmp", output_source=OutputSource.UTILITY)
    return Feed(supply=supply, reading=reading, lost_since_s=lost_s)


@pytest.mark.parametrize(
    ("lost_s", "counts"), [(69.9, False), (70.0, True), (100.0, True), (130.0, True), (130.1, False), (None, False)]
)
def test_the_two_go_within_thirty_seconds_of_each_other(lost_s: float | None, counts: bool) -> None:
    """Whichever is noticed first; a second more, and they have nothing to do with each other."""
    gone = (NetworkLoss(part="link eth0", heard_s=100.0, at_s=100.0),)
    assert bool(silence.gone_with(gone, _lost(lost_s))) is counts
    assert (silence.on_battery(gone, _lost(lost_s)).supply is Supply.BATTERY) is counts


@pytest.mark.parametrize(("lost_s", "counts"), [(69.9, False), (70.0, True), (180.0, True), (180.1, False)])
def test_what_is_noticed_late_counts_from_when_it_was_last_heard(lost_s: float, counts: bool) -> None:
    """A dead gateway is found out up to a minute late: it went at some time since it was last heard."""
    gone = (NetworkLoss(part="gateway 10.0.0.1", heard_s=100.0, at_s=150.0),)
    assert bool(silence.gone_with(gone, _lost(lost_s))) is counts


@pytest.mark.parametrize("supply", [Supply.UNKNOWN, Supply.BATTERY])
def test_only_a_ups_that_said_utility_is_presumed(supply: Supply) -> None:
    """Unknown stays unknown: links come up late at boot. A battery needs no presumption."""
    gone = (NetworkLoss(part="link eth0", heard_s=100.0, at_s=100.0),)
    feed = _lost(101.0, supply)
    assert silence.on_battery(gone, feed) is feed


def test_battery_is_presumed_since_the_earlier_of_the_two_and_never_before_the_last_word_of_utility() -> None:
    """What was said counts for as long as it was said."""
    gone = (NetworkLoss(part="link eth0", heard_s=95.0, at_s=95.0),)
    assert silence.on_battery(gone, _lost(101.0)).since_s == 95.0
    early = (NetworkLoss(part="link eth0", heard_s=85.0, at_s=85.0),)
    assert silence.on_battery(early, _lost(101.0)).since_s == 90.0
    late = (NetworkLoss(part="link eth0", heard_s=110.0, at_s=110.0),)
    assert silence.on_battery(late, _lost(101.0)).since_s == 101.0


def test_what_is_known_to_be_gone_is_no_news_and_what_comes_back_is_forgotten() -> None:
    """A netlink that repeats itself must not restart the 30 s."""
    state = silence.seen(State(), NetworkSeen(at_s=5.0, part="link a", up=False))
    assert state is not None
    assert state.gone == (NetworkLoss(part="link a", heard_s=5.0, at_s=5.0),)
    assert silence.seen(state, NetworkSeen(at_s=50.0, part="link a", up=False)) is None
    assert silence.seen(state, NetworkSeen(at_s=50.0, part="link b", up=True)) is None
    back = silence.seen(state, NetworkSeen(at_s=50.0, part="link a", up=True))
    assert back is not None
    assert back.gone == ()
    later = silence.seen(state, NetworkSeen(at_s=7.0, part="link b", up=False, heard_s=9.0))
    assert later is not None
    assert [each.part for each in later.gone] == ["link a", "link b"]
    assert later.gone[1].heard_s == 7.0, "never heard after it was gone"
    assert silence.parts(later.gone) == "link a and link b"


def test_however_many_interfaces_go_the_state_stays_small() -> None:
    """A host of containers has thousands; the journal keeps the newest."""
    state = State()
    for number in range(100):
        state = silence.seen(state, NetworkSeen(at_s=float(number), part=f"link veth{number}", up=False)) or state
    assert len(state.gone) == 16
    assert state.gone[-1].part == "link veth99"


def test_a_presumed_feed_stays_presumed_until_it_answers() -> None:
    """That the network is back says nothing of utility."""
    gone = (NetworkLoss(part="link eth0", heard_s=100.0, at_s=100.0),)
    battery = play(*CALM).state.battery
    silent = Supplied(ups="b", feed=_lost(103.0), battery=battery)
    presumed = silence.presumed(gone, (silent,), silent)
    assert presumed.presumed
    assert silence.presumed((), (presumed,), presumed).presumed
    answers = Supplied(ups="b", feed=_lost(None), battery=battery, presumed=True)
    assert not silence.presumed(gone, (answers,), answers).presumed


def test_a_restart_of_the_daemon_goes_on_presuming() -> None:
    """What went, and what was made of it, is in the journal."""
    result = play(*CALM, "6 network link eth0 gone", "9 lost no answer", "10..15 tick", "20 restart", "21..30 tick")
    assert result.phase == "on_battery"
    assert result.state.gone
    assert result.state.feed.proven_by == silence.NETWORK


def test_another_source_that_answers_keeps_the_ups_from_being_presumed() -> None:
    """apcupsd by USB goes on telling while the network is gone: nothing is presumed."""
    result = play(
        "policy table=50:540,100:240 sources=2",
        "0..5 utility source=snmp load=75 | utility source=usb load=75",
        "6 network link eth0 gone",
        "7..8 utility source=usb load=75",
        "9 lost source=snmp no answer",
        "10..60 utility source=usb load=75",
    )
    assert result.phase == "online"
    assert not [note for note in result.notes if note.event == "battery_presumed"]


def test_battery_once_the_ups_answers_needs_no_second_witness() -> None:
    """It was presumed already: the card's own word makes it certain at once."""
    result = play(*CALM, "6 network link eth0 gone", "9 lost no answer", "10..12 tick", "13 battery load=75 charge=98")
    assert result.phase == "on_battery"
    assert result.state.feed.supply is Supply.BATTERY
    assert result.state.feed.lost_since_s is None


@pytest.mark.parametrize("answer", ["off load=45 charge=100 runtime=600", "unknown load=45"])
def test_what_the_network_alone_has_shown_ends_with_the_first_answer(answer: str) -> None:
    """A switch and a card at work on the rack: the UPS has never said battery, and the host is not powered off."""
    silent = ("6 network link eth0 gone", "9 lost no answer", "10..30 tick", "31 network link eth0 back")
    result = play(*CALM, *silent, f"32..900 {answer}")
    assert not [action for action in result.actions if isinstance(action, PowerOff)]
    assert result.state.feed.supply is Supply.UNKNOWN
    found = play(*CALM, *silent, f"32..36 {answer}", "37..38 battery load=45 charge=90")
    assert (found.state.feed.supply, found.state.feed.proven_by) == (Supply.BATTERY, "second_reading")
    confirmed = play(*CALM, *silent, "32 battery load=45 charge=90", f"33..36 {answer}")
    assert confirmed.state.feed.supply is Supply.BATTERY
    shown = play(*CALM, *silent, "32..33 unknown load=45 input_present=false")
    assert shown.state.feed.supply is Supply.BATTERY, "another object shows it"


def test_the_battery_is_counted_from_the_last_reading_on() -> None:
    """Not from when the gateway was found out: the minute until then was drawn from the battery as well."""
    lines = (*CALM, "9 lost no answer", "55 network gateway 10.0.0.1 gone heard=2", "56 tick")
    drained = play(*lines).state.battery.left
    tau_s = 360.0
    assert drained is not None
    calm = play(*CALM).state.battery.left
    assert calm is not None
    assert calm - drained == pytest.approx(51.0 / tau_s, rel=0.1)


def test_what_is_presumed_is_reported_with_how_long_the_ups_has_been_silent() -> None:
    """Found out late that the gateway went: what was drawn until then counts, and is said."""
    result = play(*CALM, "9.25 lost no answer", "55 network gateway 10.0.0.1 gone heard=2")
    (note,) = [note for note in result.notes if note.event == "battery_presumed"]
    assert dict(note.numbers) == {"silent_s": 45.75}


def test_each_part_of_the_network_is_named_when_it_goes_and_when_it_is_back() -> None:
    result = play(*CALM, "6 network link eth0 gone", "7 network link eth0 back")
    notes = [(note.event, note.because, dict(note.numbers)) for note in result.notes if "network" in note.event]
    assert notes == [
        ("network_lost", "link eth0 went down, and no program on this host took it down", {"part": "link eth0"}),
        ("network_back", "link eth0 is back", {"part": "link eth0"}),
    ]
