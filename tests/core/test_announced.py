"""An end of the output that is announced, by a countdown or FSD: since when it counts, and who may take it back."""

from typing import Any

import pytest

from powerguard.core.model.actions import PowerOff
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.core.model.state import Feed, Online, SourceReport, Supply
from powerguard.core.supply import fusion
from tests.core.play import make_policy, play

ALONE = make_policy([])
BOTH = make_policy(["sources=2"])
FSD = {"forced_shutdown": True}
DELAY_S = ALONE.fsd_delay_s
ReportedLine = tuple[float, str, str] | tuple[float, str, str, dict[str, Any]]


def seen(*readings: ReportedLine, feed: Feed | None = None) -> Feed:
    """Return the feed after readings of "nut" alone: (when, source, output source, other fields)."""
    feed = Feed() if feed is None else feed
    policy = BOTH if feed.heard or {source for _, source, *_ in readings} != {"nut"} else ALONE
    for at_s, source, word, *fields in readings:
        extra = fields[0] if fields else {}
        reading = Reading(at_s=at_s, ups="ups", source=source, output_source=OutputSource(word), **extra)
        feed = fusion.observe(policy, feed, reading)
    return feed


def heard(feed: Feed, source: str) -> SourceReport:
    return next(each for each in feed.heard if each.source == source)


# --- Since when ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("silent_s", "since_s"), [(1.0, 2.0), (3.0, 4.0), (3.01, 1.0), (100.0, 1.0)])
def test_fsd_that_rises_in_a_silence_may_have_risen_at_its_beginning(silent_s: float, since_s: float) -> None:
    """A silence is longer than a reading counts as fresh (3 s); nobody saw the output's time begin in it."""
    rise_s = 1.0 + silent_s
    first = seen((0.0, "nut", "utility"), (1.0, "nut", "battery"), (rise_s, "nut", "battery", FSD))
    assert (first.fsd_since_s, first.fsd_at_s) == (since_s, None), "one reading is none"
    result = seen((rise_s + 1.0, "nut", "battery", FSD), feed=first)
    assert result.fsd_at_s == since_s + DELAY_S
    again = seen((rise_s + 50.0, "nut", "battery", FSD), feed=result)
    assert again.fsd_at_s == result.fsd_at_s, "a silence that follows changes nothing"


@pytest.mark.parametrize(
    ("silent_s", "word", "fsd_at_s"),
    [
        (DELAY_S + 300.0, "utility", 1.0 + DELAY_S),
        (DELAY_S + 300.1, "utility", None),
        (3600.0, "battery", 1.0 + DELAY_S),
    ],
)
def test_fsd_that_rose_long_ago_on_utility_is_history(silent_s: float, word: str, fsd_at_s: float | None) -> None:
    """The daemon was stopped for an hour, and upsd was tried with FSD: the host has outlived the cut."""
    at_s = 1.0 + silent_s
    feed = seen((0.0, "nut", "utility"), (1.0, "nut", word), (at_s, "nut", word, FSD), (at_s + 1.0, "nut", word, FSD))
    assert (feed.fsd_at_s, feed.fsd_at_first) == (fsd_at_s, fsd_at_s is None)
    outage = seen((at_s + 2.0, "nut", "battery", {**FSD, "input_present": False}), feed=feed)
    assert outage.fsd_at_s == (at_s + 2.0 + DELAY_S if fsd_at_s is None else fsd_at_s), "an order on battery"


def test_a_silence_between_its_two_readings_is_none_before_it() -> None:
    feed = seen((1.0, "nut", "utility"), (2.0, "nut", "battery", FSD), (60.0, "nut", "battery", FSD))
    assert feed.fsd_at_s == 2.0 + DELAY_S


def test_two_readings_without_it_end_fsd_and_one_ends_what_only_one_has_reported() -> None:
    """On the short way of utility as on battery."""
    for word in ("utility", "battery"):
        once = seen((1.0, "nut", "utility"), (2.0, "nut", word, FSD), (3.0, "nut", word))
        assert once.fsd_since_s is None
        result = seen((4.0, "nut", word, FSD), (5.0, "nut", word, FSD), (6.0, "nut", word), feed=once)
        assert (result.fsd_since_s, result.fsd_at_s) == (4.0, 4.0 + DELAY_S)
        ended = seen((7.0, "nut", word), feed=result)
        assert (ended.fsd_since_s, ended.fsd_at_s) == (None, None)
        anew = seen((8.0, "nut", word, FSD), (9.0, "nut", word, FSD), feed=ended)
        assert anew.fsd_at_s == 8.0 + DELAY_S


def test_an_order_that_stood_at_first_contact_has_no_beginning_in_a_silence_either() -> None:
    stood = seen((1.0, "nut", "utility", FSD), (60.0, "nut", "utility", FSD), (61.0, "nut", "utility", FSD))
    assert (stood.fsd_at_first, stood.fsd_since_s, stood.fsd_at_s) == (True, None, None)
    cleared = seen((62.0, "nut", "utility"), (63.0, "nut", "utility"), feed=stood)
    risen = seen((99.0, "nut", "utility", FSD), (99.5, "nut", "utility", FSD), feed=cleared)
    assert (risen.fsd_at_first, risen.fsd_at_s) == (False, 63.0 + DELAY_S)


def test_fsd_whose_cut_has_not_come_ends_with_utility() -> None:
    """Five minutes after it was due: upsd keeps FSD until it is restarted."""
    feed = seen((1.0, "nut", "utility"), (2.0, "nut", "battery", FSD), (3.0, "nut", "battery", FSD))
    end_s = 2.0 + DELAY_S
    dark = seen((end_s + 400.0, "nut", "battery", FSD), feed=feed)
    assert dark.fsd_at_s == end_s
    lit = seen((end_s + 300.0, "nut", "utility", FSD), feed=feed)
    assert (lit.fsd_at_s, lit.fsd_at_first) == (end_s, False)
    spent = seen((end_s + 300.1, "nut", "utility", FSD), (end_s + 301.0, "nut", "utility", FSD), feed=lit)
    assert (spent.fsd_at_s, spent.fsd_at_first) == (None, True)


def test_an_outage_that_was_aborted_before_a_cut_that_did_not_come_does_not_last_into_the_next() -> None:
    """The operator aborts, utility comes back, and upsd keeps FSD: the next outage is not the one that was aborted."""
    result = play(
        "policy table=50:540,75:360,100:240 trainer=llm:pause:20",
        "auto policy sync poweroff checkpoint=15",
        "0..5 utility load=75 charge=100 runtime=360",
        "6..9 battery load=75 charge=99 runtime=350",
        "10..12 battery load=75 charge=98 runtime=345 forced_shutdown",
        "12.5 abort",
        "13..400 utility load=75 charge=98 runtime=345 forced_shutdown",
    )
    assert isinstance(result.state.phase, Online)


def test_what_may_have_begun_too_long_ago_leaves_no_time_for_a_checkpoint() -> None:
    """The output may go at any moment: off at once, by two readings and one more poll."""
    result = play(
        "policy table=50:540,75:360,100:240 trainer=llm:pause:20",
        "auto policy sync poweroff checkpoint=15",
        "0..5 utility load=75 charge=100 runtime=360",
        "6..9 battery load=75 charge=99 runtime=350",
        "60..63 battery load=75 charge=85 runtime=290 forced_shutdown",
    )
    assert [(off.grade.value, off.force_after_s) for off in result.ordered(PowerOff) if isinstance(off, PowerOff)] == [
        ("bare", 3.0)
    ]
    assert result.state.phase.latched_s == 62.0  # type: ignore[union-attr]


# --- Of several sources -------------------------------------------------------------------------------------------


def test_only_who_was_silent_may_have_missed_the_rise() -> None:
    """The card answers each second all the time: it knows nothing of FSD."""
    feed = seen(
        (1.0, "snmp", "utility"), (1.1, "nut", "utility"), *((float(n), "snmp", "battery") for n in range(2, 40))
    )
    feed = seen((40.0, "nut", "battery", FSD), (40.1, "snmp", "battery"), (40.5, "nut", "battery", FSD), feed=feed)
    assert feed.fsd_at_s == 1.1 + DELAY_S
    seen_rising = seen((1.0, "snmp", "utility"), (1.1, "nut", "utility"), (2.0, "snmp", "utility"))
    risen = seen((2.1, "nut", "utility", FSD), (3.0, "snmp", "utility"), feed=seen_rising)
    assert risen.fsd_at_s is None, "the arrival of another source repeats nothing"
    assert seen((3.1, "nut", "utility", FSD), feed=risen).fsd_at_s == 2.1 + DELAY_S


@pytest.mark.parametrize("first", ["snmp", "nut"])
def test_an_order_that_stood_at_its_sources_first_contact_is_history(first: str) -> None:
    """Whoever answers first when the daemon starts: upsd keeps FSD, and must not shut the host down at every boot."""
    readings: list[ReportedLine] = [
        (n + (0.25 if first == "snmp" else -0.25), "nut", "utility", FSD) for n in range(1, 20)
    ]
    readings += [(float(n), "snmp", "utility") for n in range(1, 20)]
    feed = seen(*sorted(readings, key=lambda given: given[0]))
    assert (feed.fsd_at_first, feed.fsd_at_s) == (True, None)
    silent = seen(*((float(n), "snmp", "battery") for n in range(20, 60)), feed=feed)
    assert (silent.supply, silent.fsd_at_s) == (Supply.BATTERY, None), "who is silent orders nothing anew"
    outage = seen((20.0, "snmp", "battery"), (20.1, "nut", "battery", FSD), (20.6, "nut", "battery", FSD), feed=feed)
    assert outage.fsd_at_s == 20.1 + DELAY_S, "an order on battery"
    cleared = seen((21.0, "nut", "utility"), (22.0, "nut", "utility"), feed=outage)
    assert (cleared.fsd_at_first, cleared.fsd_at_s) == (False, None)


def test_the_silence_of_its_source_takes_no_order_back() -> None:
    """The primary that has ordered everybody down goes down with its upsd; the card knows nothing of it."""
    calm = seen((1.0, "snmp", "utility"), (1.1, "nut", "utility"))
    result = seen((2.0, "nut", "utility", FSD), (2.5, "nut", "utility", FSD), feed=calm)
    silent = seen(*((float(n), "snmp", "utility") for n in range(3, 120)), feed=result)
    assert silent.fsd_at_s == 2.0 + DELAY_S
    once = seen((120.0, "nut", "utility"), (120.1, "snmp", "utility"), feed=silent)
    assert once.fsd_at_s == 2.0 + DELAY_S
    assert seen((121.0, "nut", "utility"), feed=once).fsd_at_s is None, "it has said so twice itself"


@pytest.mark.parametrize("fields", [{"forced_shutdown": True}, {"output_off_in_s": 20.0}])
def test_what_did_not_come_is_spent_when_its_source_is_lost(fields: dict[str, Any]) -> None:
    """Five minutes after the output should have gone; a card that is dead for good cannot take back what it said."""
    calm = seen((1.0, "snmp", "utility"), (1.1, "nut", "utility"))
    again = {"output_off_in_s": 19.5} if "output_off_in_s" in fields else fields
    feed = seen((2.0, "nut", "utility", fields), (2.5, "nut", "utility", again), feed=calm)
    end_s = 22.0 if "output_off_in_s" in fields else 2.0 + DELAY_S
    assert {feed.countdown_at_s, feed.fsd_at_s} == {end_s, None}
    silent = seen((end_s + 301.0, "snmp", "utility"), feed=feed)
    assert {silent.countdown_at_s, silent.fsd_at_s} == {end_s, None}, "silent, and not known to be lost"
    gone = fusion.lose(BOTH, feed, SourceFailed(at_s=9.0, ups="ups", source="nut", reason="no answer", lost=True))
    for at_s, ends in ((end_s + 300.0, {end_s, None}), (end_s + 300.1, {None})):
        later = seen((at_s, "snmp", "utility"), feed=gone)
        assert {later.countdown_at_s, later.fsd_at_s} == ends
    back = seen((end_s + 400.0, "nut", "utility", fields), feed=gone)
    assert {back.countdown_at_s, back.fsd_at_s} == {None}, "it is there again, and no cut has come"


def test_a_countdown_is_taken_back_by_who_has_reported_it() -> None:
    """And each falls by itself: two sources with different clocks are no countdown that runs."""
    calm = seen((1.0, "snmp", "utility"), (1.1, "nut", "utility"))
    stands = [(2.0, "snmp", "utility", {"output_off_in_s": 180.0}), (2.1, "nut", "utility", {"output_off_in_s": 179.0})]
    both = seen(*stands, (3.0, "snmp", "utility", {"output_off_in_s": 180.0}), feed=calm)
    assert both.countdown_at_s is None, "a delay that is set, told by two"
    runs = seen((3.1, "nut", "utility", {"output_off_in_s": 178.0}), feed=both)
    assert runs.countdown_at_s == 181.1
    silent = seen(*((float(n), "snmp", "utility") for n in range(4, 60)), feed=runs)
    assert silent.countdown_at_s == 181.1
    gone = seen((60.0, "nut", "utility"), (61.0, "nut", "utility"), feed=silent)
    assert gone.countdown_at_s is None


def test_the_earliest_end_counts() -> None:
    calm = seen((1.0, "snmp", "utility"), (1.1, "nut", "utility"))
    feed = seen(
        (2.0, "snmp", "utility", {"output_off_in_s": 90.0, **FSD}),
        (2.1, "nut", "utility", {"output_off_in_s": 80.0}),
        (3.0, "snmp", "utility", {"output_off_in_s": 89.0, **FSD}),
        (3.1, "nut", "utility", {"output_off_in_s": 79.0, **FSD}),
        (4.1, "nut", "utility", {"output_off_in_s": 78.0, **FSD}),
        feed=calm,
    )
    assert (heard(feed, "snmp").countdown_at_s, heard(feed, "nut").countdown_at_s) == (92.0, 82.1)
    assert (heard(feed, "snmp").fsd_at_s, heard(feed, "nut").fsd_at_s) == (2.0 + DELAY_S, 3.1 + DELAY_S)
    assert (feed.countdown_at_s, feed.fsd_at_s) == (82.1, 2.0 + DELAY_S)


def test_who_is_found_out_announces_nothing_either() -> None:
    """A battery that nothing empties, while another source sees the input for minutes: its FSD is not believed."""
    full = {"charge_pct": 100.0, "runtime_s": 600.0}
    calm = seen((1.0, "snmp", "utility", {"input_present": True}), (1.1, "nut", "utility", full))
    feed = calm
    for n in range(2, 400):
        lies = (n + 0.1, "nut", "battery", full | (FSD if n >= 300 else {}))
        feed = seen((float(n), "snmp", "utility", {"input_present": True}), lies, feed=feed)
    assert heard(feed, "nut").doubted
    assert heard(feed, "nut").fsd_at_s == 300.1 + DELAY_S
    assert (feed.fsd_at_s, feed.countdown_at_s, feed.fsd_at_first) == (None, None, False)
