"""What a status of apcupsd says in our words, how old it is, and which stories of the field it survives."""

from collections.abc import Callable

import pytest

from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Feed, Supply
from powerguard.core.supply import fusion
from powerguard.ups.apcupsd.protocol import Status, stamp_s
from powerguard.ups.apcupsd.source import News, draft_of
from powerguard.ups.profiles import text_values

POLICY = Policy(boot_id="boot", ups="rack-a")
UTILITY, BATTERY = 0x05000008, 0x05060010
WHOLE = {"BCHARGE": "100.0 Percent", "TIMELEFT": "30.0 Minutes", "LOADPCT": "40.0 Percent", "LINEV": "230.0 Volts"}


def status(flags: int, date: str = "2026-11-21 04:20:12 +0000", now: str = "", /, **records: str) -> Status:
    return Status(flags=flags, date=date, date_s=stamp_s(date), now_s=stamp_s(now or date), values=records)


def reading(flags: int, at_s: float = 0.0, /, **records: str) -> Reading:
    return text_values.reading(draft_of(status(flags, **records)), at_s=at_s, ups="rack-a", source="apcupsd:x")


@pytest.mark.parametrize(
    ("flags", "source"),
    [
        (0x05000008, OutputSource.UTILITY),
        (0x0500000C, OutputSource.BOOST),
        (0x0500000A, OutputSource.TRIM),
        (0x05060010, OutputSource.BATTERY),
        (0x05060011, OutputSource.BATTERY),
        (0x05000000, OutputSource.UNKNOWN),  # bypass, off, or not yet contacted: apcupsd takes it for mains
        (0x0500000E, OutputSource.BOOST),
        (0x05000004, OutputSource.UNKNOWN),
    ],
)
def test_output_source(flags: int, source: OutputSource) -> None:
    assert reading(flags).output_source is source


def test_everything_that_is_reported() -> None:
    made = reading(BATTERY | 0xE0, **{**WHOLE, "LINEV": "000.0 Volts"}, ITEMP="26.0 C", TONBATT="12 Seconds")
    assert (made.charge_pct, made.runtime_s, made.load_pct) == (100.0, 1800.0, 40.0)
    assert (made.input_v, made.input_present, made.battery_temp_c) == (0.0, False, 26.0)
    assert (made.low_battery, made.replace_battery, made.overload) == (True, True, True)
    assert made.alarms == ("low_battery", "overload", "replace_battery")
    assert dict(made.provenance)["runtime_s"] == "TIMELEFT"
    assert not made.authenticated


def test_what_a_ups_does_not_report_is_none() -> None:
    """apcupsd leaves such records out; 0 would be a lie."""
    made = reading(UTILITY)
    assert (made.charge_pct, made.runtime_s, made.load_pct, made.input_v, made.input_present) == (None,) * 5


@pytest.mark.parametrize(
    ("records", "field"),
    [
        ({"TIMELEFT": "0.0 Minutes", "BCHARGE": "100.0 Percent"}, "runtime_s"),
        ({"TIMELEFT": "65535.0 Minutes"}, "runtime_s"),
        ({"BCHARGE": "104.0 Percent"}, "charge_pct"),
        ({"LOADPCT": "-1.0 Percent"}, "load_pct"),
        ({"LINEV": "2300.0 Volts"}, "input_v"),
        ({"ITEMP": "250.0 C"}, "battery_temp_c"),
        ({"BCHARGE": "nan Percent"}, "charge_pct"),
    ],
)
def test_numbers_pass_the_gates_of_every_source(records: dict[str, str], field: str) -> None:
    draft = draft_of(status(UTILITY, **records))
    made = text_values.reading(draft, at_s=0.0, ups="rack-a", source="apcupsd:x")
    assert getattr(made, field) is None
    assert field in [rejected.field for rejected in draft.rejected]


def test_no_battery_is_no_full_battery() -> None:
    made = reading(UTILITY & ~0x4000000, **WHOLE)
    assert made.alarms == ("battery_missing",)
    assert made.low_battery
    assert made.replace_battery


# --- Stories of the field ------------------------------------------------------------------------------------------


def fused(*readings: Reading) -> Feed:
    feed = Feed()
    for each in readings:
        feed = fusion.observe(POLICY, feed, each)
    return feed


def calm(at_s: float = 0.0) -> Reading:
    return reading(UTILITY, at_s, **WHOLE)


def test_story_5_a_self_test_is_no_outage() -> None:
    """LASTXFER tells why it went to battery; with utility at the input nobody is hurried."""
    tested = reading(0x05040010, 1.0, **WHOLE, LASTXFER="Automatic or explicit self test", SELFTEST="IP")
    again = reading(0x05040010, 2.0, **WHOLE, LASTXFER="Automatic or explicit self test")
    assert tested.testing
    assert fused(calm(), tested, again).supply is Supply.UTILITY


def test_story_5_a_self_test_of_last_week_hides_no_outage() -> None:
    """LASTXFER stays until the next transfer; an input without volts says what this one is."""
    assert not reading(UTILITY, **WHOLE, LASTXFER="Automatic or explicit self test").testing
    dark = {**WHOLE, "LINEV": "000.0 Volts", "LASTXFER": "Automatic or explicit self test"}
    assert fused(calm(), reading(0x05040010, 1.0, **dark)).supply is Supply.BATTERY


def test_story_5_a_calibration_is_no_outage_and_hides_none() -> None:
    calibrated = reading(BATTERY | 1, 1.0, **WHOLE)
    assert calibrated.calibrating
    assert fused(calm(), calibrated, reading(BATTERY | 1, 2.0, **WHOLE)).supply is Supply.UTILITY
    dark = {**WHOLE, "LINEV": "000.0 Volts"}
    assert fused(calm(), calibrated, reading(BATTERY | 1, 2.0, **dark)).supply is Supply.BATTERY


def test_story_6_bypass_and_off_are_not_mains() -> None:
    """apcupsd sets neither bit, and raises mainsback; on battery that ends nothing here."""
    dark = {**WHOLE, "LINEV": "000.0 Volts"}
    feed = fused(calm(), reading(BATTERY, 1.0, **dark), reading(0x05000000, 2.0, **dark))
    assert feed.supply is Supply.BATTERY
    assert fused(calm(), reading(0x05000000, 1.0, **WHOLE)).supply is Supply.UNKNOWN


def test_story_7_low_battery_beside_a_full_charge_is_reported_as_it_is() -> None:
    made = reading(BATTERY | 0x40, **{**WHOLE, "BCHARGE": "090.0 Percent"})
    assert made.low_battery
    assert (made.charge_pct, made.runtime_s) == (90.0, 1800.0)


def test_story_8_a_runtime_that_is_a_lie() -> None:
    """0 on mains is not measured; 0 at the end of the battery is real."""
    assert reading(UTILITY, TIMELEFT="0.0 Minutes").runtime_s is None
    end = reading(BATTERY | 0x40, TIMELEFT="0.0 Minutes", BCHARGE="005.0 Percent")
    assert end.runtime_s == 0.0


def test_story_12_an_order_that_stood_before_us_shuts_nothing_down_on_utility() -> None:
    """SHUTTING DOWN outlives the outage by days; at first contact with utility it is history."""
    old = text_values.reading(
        draft_of(status(0x05000208, **WHOLE)), at_s=1.0, ups="rack-a", source="apcupsd:x", forced_shutdown=True
    )
    feed = fused(old)
    assert feed.fsd_at_first
    assert feed.fsd_at_s is None


def test_story_13_a_clock_that_apcupsd_started_again_counts_for_nothing() -> None:
    """TONBATT starts at 0 with apcupsd, and is its own clock beside the same bit: no witness and no beginning."""
    made = reading(BATTERY, TONBATT="86400 Seconds", **WHOLE)
    assert made.on_battery_s is None
    stuck = reading(BATTERY, 1.0, TONBATT="86400 Seconds", BCHARGE="100.0 Percent")
    feed = fused(reading(BATTERY, 0.0, TONBATT="86399 Seconds", BCHARGE="100.0 Percent"), stuck)
    assert feed.unproven_battery  # a UPS that has said battery ever since we know it


def test_story_15_online_and_onbatt_at_once() -> None:
    """What apcupsd calls emergency, and its exporters showed as both: battery counts, and it is told."""
    draft = draft_of(status(0x05060058, **WHOLE))
    assert draft.output_source is OutputSource.BATTERY
    assert draft.warnings == ["STATFLAG says both ONLINE and ONBATT: battery counts"]


# --- How old it is --------------------------------------------------------------------------------------------------


def at(second: int, now: int | None = None, flags: int = UTILITY) -> Status:
    """A status whose DATE is so many seconds past noon, and END APC `now` (the same second when not told)."""

    def date(seconds: int) -> str:
        return f"2026-11-21 12:{seconds // 60 % 60:02d}:{seconds % 60:02d} +0000"

    return status(flags, date(second), date(second if now is None else now))


def noted(news: News, status_: Status, asked_s: float, took_s: float = 0.01) -> float | None:
    return news.at_s if news.note(status_, asked_s=asked_s, answered_s=asked_s + took_s) else None


def test_the_first_date_is_as_old_as_the_peer_says() -> None:
    assert noted(News(), at(0, 45), 1000.0) == pytest.approx(955.01)


def test_the_same_date_is_no_news() -> None:
    news = News()
    assert noted(news, at(0), 1000.0) == pytest.approx(1000.01)
    assert noted(news, at(0, 1), 1000.5) is None
    assert news.at_s == pytest.approx(1000.01)
    assert noted(news, at(1), 1001.0) == pytest.approx(1001.01)


@pytest.mark.parametrize(("said", "read"), [(2000, 3500), (3500, 60), (60, 3561)])
def test_a_wall_clock_that_is_set_moves_no_reading(said: int, read: int) -> None:
    """Forth or back, in DATE or in END APC: a new DATE is no older than the question before it, nor of tomorrow."""
    news = News()
    noted(news, at(0), 1000.0)
    made = noted(news, at(said, read), 1001.0)
    assert made is not None
    assert 1000.0 <= made <= 1001.01


def test_a_date_of_the_future_at_first_contact_is_not_believed() -> None:
    """Nobody knows how old it is; the next one is new."""
    news = News()
    assert noted(news, at(600, 0), 1000.0) is None
    assert news.at_s is None
    assert noted(news, at(601, 1), 1001.0) == pytest.approx(1001.01, abs=1.1)


def test_dates_that_cannot_be_read_still_show_news() -> None:
    news = News()
    assert noted(news, status(UTILITY, "soon", "now"), 1000.0) is None
    made = noted(news, status(UTILITY, "later", "now"), 1001.0)
    assert made == pytest.approx(1001.01)


def test_flags_that_change_between_two_dates_are_news() -> None:
    """USB drivers hear the UPS itself between two polls, and leave DATE as it is."""
    news = News()
    noted(news, at(0), 1000.0)
    made = noted(news, at(0, 3, BATTERY), 1003.0)
    assert made == pytest.approx(1000.011)  # no earlier than the last answer, which did not know of it
    assert noted(news, at(0, 4, BATTERY | 0x200), 1004.0) is None  # apcupsd's own bits are no news of the UPS


def test_times_never_go_back() -> None:
    news, last_s = News(), 0.0
    for question in range(200):
        date = (question * 7) % 60
        made = noted(news, at(date, (question * 13) % 60), 1000.0 + 0.2 * question)
        if made is not None:
            assert made > last_s
            last_s = made


@pytest.mark.parametrize(("every_s", "patience_s"), [(1, 5.0), (5, 15.0), (60, 180.0)])
def test_patience_is_learned(every_s: int, patience_s: float) -> None:
    """POLLTIME is in no answer; three of them without a look at the UPS are too many. On battery it is 3 s always."""
    news = News()
    assert news.patience_s() == 180.0
    for look in range(3):
        noted(news, at(look * every_s), 1000.0 + look * every_s)
    assert news.patience_s() == pytest.approx(patience_s, abs=0.2)
    noted(news, at(3 * every_s, flags=BATTERY), 1000.0 + 3 * every_s)
    assert news.patience_s() == 3.0


def test_on_battery_patience_covers_the_longer_of_intervals_that_vary() -> None:
    """A question during a look is not answered, so that some looks are heard 3 s after each other, some 2 s."""
    news = News()
    for at_s in (0, 3, 5, 8, 10):
        noted(news, at(at_s, flags=BATTERY), 1000.0 + at_s)
    assert news.patience_s() == pytest.approx(4.8, abs=0.1)
    for at_s in range(11, 31):
        noted(news, at(at_s, flags=BATTERY), 1000.0 + at_s)
    assert news.patience_s() == 3.0


def test_a_pause_of_ours_is_no_pace_of_theirs() -> None:
    news = News()
    noted(news, at(0), 1000.0)
    noted(news, at(1), 1001.0)
    news.forget_pace()
    noted(news, at(50), 1050.0)
    assert news.every_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    "mangle", [lambda text: text, lambda text: text[:7], lambda text: text * 100, lambda _: "\0\ufffd"]
)
def test_any_text_is_survived(mangle: Callable[[str], str]) -> None:
    for flags in (0, UTILITY, BATTERY, 0xFFFFFFFF):
        made = reading(flags, **{key: mangle(text) for key, text in WHOLE.items()}, LASTXFER=mangle("x"))
        assert made.ups == "rack-a"
