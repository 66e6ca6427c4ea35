"""Which UPS is good to power a host on from: read, on utility that holds, with no countdown, charged."""

from dataclasses import replace

import pytest

from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.core.model.state import Feed
from powerguard.sentinel.run import enter, policy_of, supply, unread
from powerguard.settings.schema import SourceOptions
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.snmp.options import SnmpOptions

POLICY = policy_of("a", [NutOptions(kind="nut", host="127.0.0.1", name="a", poll_s=1.0)])
BATTERY = OutputSource.BATTERY


def reading(at_s: float, source: OutputSource = OutputSource.UTILITY, **more: object) -> Reading:
    result = Reading(at_s=at_s, ups="a", source="nut", output_source=source, charge_pct=80.0, input_present=True)
    if source is BATTERY:
        result = replace(result, input_present=False)
    return replace(result, **more)  # type: ignore[arg-type]


def fed(*events: Reading | SourceFailed) -> Feed:
    feed = Feed()
    for event in events:
        feed = enter(POLICY, feed, event)
    return feed


def why(feed: Feed, now_s: float, charge_pct: float = 10.0) -> str:
    result = supply(POLICY, feed, now_s, stable_s=10.0, charge_pct=charge_pct)
    assert result.good == (not result.why)
    return result.why


def steady(begin_s: float, end_s: float, **more: object) -> list[Reading]:
    return [reading(float(at_s), **more) for at_s in range(int(begin_s), int(end_s) + 1)]  # type: ignore[arg-type]


def test_utility_that_holds_is_good() -> None:
    assert why(fed(*steady(0, 9)), 9.0) == "on utility for 9 of 10 s"
    assert why(fed(*steady(0, 10)), 10.0) == ""


def test_since_when_there_is_utility() -> None:
    """Without a break, by all that is known: nobody knows what a battery, a countdown or a silence did to a host."""

    def since_s(now_s: float, *events: Reading | SourceFailed) -> float | None:
        return supply(POLICY, fed(*events), now_s, stable_s=10.0, charge_pct=90.0).utility_since_s

    assert since_s(20.0, *steady(0, 20)) == 0.0, "stable, charged or not"
    assert since_s(21.0, *steady(0, 20), reading(21, BATTERY)) is None
    assert since_s(25.0, *steady(0, 20), reading(21, BATTERY), reading(22, BATTERY), *steady(23, 25)) == 23.0
    assert since_s(21.0, *steady(0, 20), reading(21, output_off_in_s=60.0)) is None
    assert since_s(40.0, *steady(0, 20)) is None
    assert since_s(62.0, *steady(0, 20), *steady(60, 62)) == 60.0
    assert since_s(0.0) is None


@pytest.mark.parametrize(
    ("events", "now_s", "expected"),
    [
        ([], 5.0, "not read"),
        (steady(0, 20), 40.0, "not read for 20 s"),
        ([*steady(0, 20), reading(21, BATTERY), reading(22, BATTERY)], 22.0, "on battery"),
        ([*steady(0, 20), reading(21, BATTERY, input_present=None)], 21.0, "on battery"),
        ([*steady(0, 20), reading(21, BATTERY), reading(22, BATTERY), *steady(23, 28)], 28.0, "on utility for 5 of 10"),
        ([reading(0, BATTERY, input_present=None)], 0.0, "on battery"),
        ([reading(float(at), OutputSource.OFF) for at in range(12)], 11.0, "its output is off"),
        ([reading(float(at), OutputSource.UNKNOWN) for at in range(12)], 11.0, "does not report what its output"),
        ([*steady(0, 20), reading(21, output_off_in_s=60.0)], 21.0, "a countdown to output off runs"),
        ([*steady(0, 20), reading(21, output_off_in_s=60.0), reading(22, output_off_in_s=59.0)], 22.0, "a countdown"),
        (
            [*steady(0, 20), *(reading(21.0 + n, output_off_in_s=60.0 - n) for n in range(3)), reading(24)],
            24.0,
            "a countd",
        ),
        (steady(0, 20, forced_shutdown=True), 20.0, "a forced shutdown is set"),
        (steady(0, 20, charge_pct=9.0), 20.0, "charge 9 of 10 %"),
        (steady(0, 20, charge_pct=None), 20.0, "does not report its charge"),
        (
            [*steady(0, 20), SourceFailed(at_s=21, ups="a", source="nut", reason="x", lost=True)],
            25.0,
            "not read for 4 s",
        ),
    ],
)
def test_what_is_wrong_with_it(events: list[Reading | SourceFailed], now_s: float, expected: str) -> None:
    assert why(fed(*events), now_s).startswith(expected)


def test_a_delay_that_is_only_set_is_no_countdown() -> None:
    assert why(fed(*steady(0, 20, output_off_in_s=20.0)), 20.0) == ""


def test_a_delay_that_fell_and_then_stands_is_no_countdown_for_ever() -> None:
    """A card shows the delay that is set: a host that sets it for its own cut, or a real countdown, makes it fall once.

    One that is prolonged still runs.
    """
    fell = [*steady(0, 20, output_off_in_s=140.0), *steady(21, 30, output_off_in_s=120.0)]
    countdown = "a countdown to output off runs"
    assert why(fed(*fell), 30.0) == countdown
    assert why(fed(*fell, *steady(31, 441, output_off_in_s=120.0)), 441.0) == countdown
    assert why(fed(*fell, *steady(31, 443, output_off_in_s=120.0)), 443.0) == ""
    longer = [reading(float(at_s), output_off_in_s=1000.0 - at_s // 2 * 2) for at_s in range(31, 445)]
    assert why(fed(*fell, *longer), 444.0) == countdown
    assert why(fed(*fell, *longer, reading(445.0, output_off_in_s=556.0)), 445.0) == countdown


def test_of_two_sources_a_delay_that_stands_is_no_countdown_for_ever() -> None:
    policy, feed = replace(POLICY, sources=2), Feed()
    for at_s in range(500):
        card = replace(reading(at_s), source="snmp", output_off_in_s=140.0 if at_s < 20 else 120.0)
        for each in (card, reading(at_s + 0.5)):
            feed = enter(policy, feed, each)
        result = supply(policy, feed, at_s + 0.5, stable_s=10.0, charge_pct=10.0)
        assert result.good == (9 < at_s < 20 or at_s > 440), at_s


def test_whatever_charge_there_is_where_none_is_asked_for() -> None:
    assert why(fed(*steady(0, 20, charge_pct=None)), 20.0, charge_pct=0.0) == ""


def test_after_a_silence_utility_holds_again() -> None:
    """Nobody knows what it did meanwhile."""
    feed = fed(*steady(0, 20), reading(60.0))
    assert why(feed, 60.0) == "on utility for 0 of 10 s"
    lost = SourceFailed(at_s=21.0, ups="a", source="nut", reason="x", lost=True)
    feed = fed(*steady(0, 20), lost, reading(23.0))
    assert why(feed, 23.0) == "on utility for 0 of 10 s"
    assert unread(POLICY, feed, 23.0) == ""


@pytest.mark.parametrize(
    ("source", "every_s"),
    [(SnmpOptions(kind="snmp", host="10.0.0.5"), 8.0), (ApcupsdOptions(kind="apcupsd"), 6.0)],
)
def test_a_slow_source_is_not_silent(source: SourceOptions, every_s: float) -> None:
    """It reports no failure, so its readings are no silence in which utility could not be seen to hold."""
    policy, feed = policy_of("a", [source]), Feed()
    for turn in range(20):
        feed = enter(policy, feed, reading(turn * every_s))
    assert supply(policy, feed, 20 * every_s - 0.5, stable_s=60.0, charge_pct=10.0).good


def test_one_poll_that_fails_is_not_news() -> None:
    missed = SourceFailed(at_s=21.0, ups="a", source="nut", reason="x")
    assert why(fed(*steady(0, 20), missed, reading(22.0)), 22.0) == ""


class TestForcedShutdownOfTwoSources:
    """upsd tells FSD, the card knows none: its utility says nothing of an output that is about to be cut."""

    POLICY = replace(POLICY, sources=2)
    LOST = SourceFailed(at_s=24.0, ups="a", source="nut", reason="x", lost=True)

    def _why(self, *events: Reading | SourceFailed, card_until_s: int) -> str:
        """Why the UPS is no good, with a card beside that tells utility once a second."""
        card = [replace(each, at_s=each.at_s + 0.5, source="snmp") for each in steady(0, card_until_s)]
        feed = Feed()
        for event in sorted((*events, *card), key=lambda each: each.at_s):
            feed = enter(self.POLICY, feed, event)
        return supply(self.POLICY, feed, card_until_s + 0.5, stable_s=10.0, charge_pct=10.0).why

    def test_it_stands_until_its_own_source_takes_it_back(self) -> None:
        rises = (*steady(0, 20), *steady(21, 23, forced_shutdown=True))
        fsd = "a forced shutdown is set (NUT: FSD)"
        assert self._why(*rises, card_until_s=23) == fsd
        assert self._why(*rises, self.LOST, card_until_s=60) == fsd
        assert self._why(*rises, *steady(24, 24), card_until_s=24) == fsd, "one reading may be wrong"
        assert self._why(*rises, *steady(24, 25), card_until_s=25) == ""

    def test_one_that_did_not_come_is_spent(self) -> None:
        """Its source is lost for good: no host may stay off for that."""
        rises = (*steady(0, 20), *steady(21, 23, forced_shutdown=True), self.LOST)
        assert self._why(*rises, card_until_s=340)
        assert self._why(*rises, card_until_s=360) == ""
