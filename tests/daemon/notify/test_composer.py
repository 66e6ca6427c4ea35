"""What is worth a message, how often, and in which words."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.words import _SENTENCES
from powerguard.core.model.actions import Action, Conduct, Level, Note
from powerguard.core.model.policy import Mode
from powerguard.core.model.state import Battery, Feed, Maintenance, NetworkLoss, State, Supplied
from powerguard.daemon.notify.composer import (
    WATCHED,
    Message,
    MessageComposer,
    StepNotes,
    composed,
    is_wanted,
    reason_levels,
    texts,
)
from powerguard.daemon.notify.messenger import _drill
from powerguard.daemon.observe.port import SourceView
from powerguard.daemon.observe.readiness import readiness
from tests.core.play import play
from tests.daemon.notify.post import began, ended, note
from tests.daemon.watched import NOW_S, TRAINER, drilled, scene

HOUR_S = 3600.0


class Listener(MessageComposer):
    """Hears one note after the other, at a time of the test's own."""

    def __init__(self, language: str = "en", *, mode: str = "armed") -> None:
        self.now = 1_800_000_000.0
        self.mode = mode
        super().__init__("gpu-01", language, lambda: self.now)

    def messages_of(self, *notes: Note, state: State | None = None, outage: str = "o1") -> list[Message]:
        return self.of_step(StepNotes(notes, State() if state is None else state, outage, self.mode, self.now))


def test_an_outage_is_reported_step_by_step() -> None:
    """Begin, emergency, power-off, return, end: each once, for every target, with what comes next."""
    listener = Listener()
    result = listener.messages_of(*began())
    result += listener.messages_of(
        note("phase_changed", because="budget", old="on_battery", new="emergency_checkpoint", stop_s=90.0)
    )
    result += listener.messages_of(note("phase_changed", because="durable", old="emergency_checkpoint", new="holding"))
    result += listener.messages_of(
        note("phase_changed", because="budget", old="holding", new="shutdown", stop_s=90.0, grade="full")
    )
    result += listener.messages_of(note("power_off_ordered"), note("power_on_armed", Level.INFO))
    result += listener.messages_of(note("host_returned", Level.INFO, "powered off by us", outage="o1", away_s=600.0))
    result += listener.messages_of(
        note("phase_changed", Level.INFO, old="recovery", new="online"), *ended(outcome="clean_shutdown")
    )
    assert [(each.event, each.key, each.status, each.level) for each in result] == [
        ("outage_began", "outage:o1", "begin", "warning"),
        ("emergency_checkpoint", "outage:o1", "event", "warning"),
        ("shutdown", "power_off:o1", "begin", "error"),
        ("host_returned", "power_off:o1", "end", "info"),
        ("clean_shutdown", "outage:o1", "end", "info"),
    ]
    assert all(is_wanted(each, "none") for each in result)
    assert listener.standing == {}
    assert "the battery is only just enough" in result[1].text
    assert "lasts 12 min, and 25 min with training paused; checkpoint and stop need 2 min 0 s" in result[0].text
    assert "needs 1 min 30 s (full)" in result[2].text
    assert result[4].title == "gpu-01: training resumed"


@pytest.mark.parametrize(
    ("event", "because", "shown"),
    [
        ("resume_failed", "powerguard gave up: start training by hand", "a person has to start it"),
        ("resume_unconfirmed", "training was started; llm reported no step for 300 s", "llm reported no step"),
    ],
)
@pytest.mark.parametrize("outcome", ["clean_shutdown", "dirty"])
def test_an_outage_that_ends_without_training_is_not_reported_as_training_again(
    event: str, because: str, shown: str, outcome: str
) -> None:
    listener = Listener()
    listener.messages_of(*began())
    over = note("outage_ended", Level.INFO, because, outage="o1", outcome=outcome, lasted_s=3600.0)
    *_, result = listener.messages_of(note(event, Level.ERROR, because), over)
    assert (result.event, result.key, result.status, result.level) == (outcome, "outage:o1", "end", "error")
    assert result.title == "gpu-01: the host is back, but no training is seen"
    assert shown in result.text
    assert "runs again" not in result.text


def test_training_that_a_second_outage_has_met_is_not_reported_as_training_again() -> None:
    """It was started, and the power failed before its first step."""
    story = play(
        "policy table=50:540,75:360,100:240 trainer=llm:pause:20",
        "auto policy sync poweroff resume checkpoint=15",
        "0..5 utility load=75 charge=100 runtime=360",
        "6..86 battery load=75 charge=100-0.27 runtime=350-1",
        "87..300 battery load=45 charge=78-0.15 runtime=500-1",
        "20 reboot gap=36000",
        "21..60 utility load=10 charge=95 runtime=2500",
        "61..64 battery load=10 charge=95 runtime=2500",
    )
    because = [each.because for each in story.notes if each.event == "outage_ended"]
    listener = Listener()
    listener.messages_of(*began())
    over = note("outage_ended", Level.INFO, because[0], outage="o1", outcome="clean_shutdown", lasted_s=3600.0)
    (result,) = listener.messages_of(over)
    assert result.title == "gpu-01: the host is back, but no training is seen"
    assert "the power failed again before training reported a step" in result.text


def test_a_rehearsed_power_off_ends_with_its_outage() -> None:
    """One message says that it is over, and that the power-off was only recorded."""
    listener = Listener(mode="rehearse")
    result = listener.messages_of(*began())
    result += listener.messages_of(note("phase_changed", because="budget", old="holding", new="shutdown"))
    assert all(each.text.endswith("Mode rehearse: the power-off is only recorded.") for each in result)
    assert (result[-1].title, result[-1].level) == ("gpu-01: would power off now", "error"), (
        "as it would reach the pager"
    )
    assert (result[-1].key, result[-1].status) == ("power_off:o1", "event")
    (over,) = listener.messages_of(*ended(outcome="rehearsed"))
    assert (over.key, over.status, over.event) == ("outage:o1", "end", "rehearsed")
    assert listener.standing == {}


@pytest.mark.parametrize(
    ("story", "titles", "shown"),
    [
        (
            ("6..30 utility load=75 charge=100 runtime=360 off_in=200-1",),
            ["the UPS is about to switch off", "training must checkpoint and pause"],
            "as soon as the checkpoint is written, without waiting for utility",
        ),
        (
            (
                "6..60 battery load=75 charge=100-0.5 runtime=350-2 calibrating",
                "61..80 battery load=75 charge=70-0.5 runtime=240-2 calibrating low_battery",
            ),
            ["a calibration has drained the battery", "training must checkpoint and pause"],
            "powerguard waits for utility",
        ),
        (
            ("6..20 battery load=75 charge=100 runtime=360",),
            ["on battery"],
            "Utility power failed",
        ),
    ],
    ids=["countdown", "calibration", "outage"],
)
def test_an_outage_is_called_what_it_is(story: tuple[str, ...], titles: list[str], shown: str) -> None:
    """A countdown on utility is no failure of utility, and permits no wait for it; a calibration is none either."""
    listener = Listener()
    played = play(
        "policy table=50:540,75:360,100:240 trainer=llm:pause:20",
        "auto policy sync",
        "0..5 utility load=75 charge=100 runtime=360",
        *story,
    )
    found = [each for each in listener.messages_of(*played.notes) if each.story]
    assert [each.title.removeprefix("gpu-01: ") for each in found][: len(titles)] == titles
    assert shown in found[len(titles) - 1].text
    assert any("Utility power failed" in each.text for each in found) is (titles == ["on battery"])


def test_an_abort_is_reported_to_all_who_read_that_the_host_will_be_powered_off() -> None:
    """By the move that ends a hold, or by a note of its own; and when it does not count any more."""
    listener = Listener()
    listener.messages_of(*began())
    moved = {"old": "holding", "new": "on_battery", "cause": "operator aborts"}
    found = listener.messages_of(note("phase_changed", because="alice: generator runs", **moved))
    found += listener.messages_of(note("shutdown_aborted", because="bob", who="bob"))
    found += listener.messages_of(note("abort_ended", because="the outage counts"))
    assert [(each.event, each.key, each.status, is_wanted(each, "none")) for each in found] == [
        ("shutdown_aborted", "outage:o1", "event", True),
        ("shutdown_aborted", "outage:o1", "event", True),
        ("abort_ended", "outage:o1", "event", True),
    ]
    assert found[0].text.startswith("By alice: generator runs. Training goes on. powerguard does not power")
    assert list(listener.standing) == ["outage:o1"]


def test_utility_that_fails_again_in_a_recovery_is_reported_once_an_hour() -> None:
    """Before the power-off of a host that has just come back: for every target, and however often utility comes."""
    listener = Listener()
    again = note("utility_failed_again", because="training is not started yet", charge_pct=40.0, load_pct=20.0)
    (result,) = listener.messages_of(again)
    assert (result.event, result.key, result.status) == ("utility_failed_again", "outage:o1", "event")
    assert is_wanted(result, "none")
    assert "charge 40 %" in result.text
    assert listener.messages_of(again) == []
    assert len(listener.messages_of(again, outage="o2")) == 1
    listener.now += HOUR_S
    assert len(listener.messages_of(again)) == 1


def test_an_outage_in_maintenance_promises_no_power_off() -> None:
    """The host then runs until the battery is empty."""
    state = replace(State(), maintenance=Maintenance(until_s=NOW_S + 3600.0, reason="fan", who="a"))
    result = Listener().messages_of(*began(), state=state)
    result += Listener().messages_of(
        note("phase_changed", because="budget", old="on_battery", new="emergency_checkpoint"), state=state
    )
    assert len(result) == 2
    assert all("Maintenance is on: powerguard does not power the host off" in each.text for each in result)


def test_the_same_trouble_is_reported_once_an_hour() -> None:
    """Its end is told, too. What stands again within the hour is told when that is over."""
    listener = Listener()
    raised, cleared = note("overload_raised", Level.ERROR), note("overload_cleared", Level.INFO)
    assert [each.status for each in listener.messages_of(raised)] == ["begin"]
    assert [each.status for each in listener.messages_of(cleared)] == ["end"]
    for _ in range(5):
        listener.now += 60.0
        assert listener.messages_of(raised) == []
        assert listener.messages_of(cleared) == []
    assert listener.messages_of(raised) == []
    began_at = listener.now
    standing = replace(State(), alarms=("overload",))
    assert listener.watch({}, standing, "armed") == []
    listener.now += HOUR_S
    (again,) = listener.watch({}, standing, "armed")
    assert (again.status, again.key) == ("begin", "alarm:overload")
    assert again.at == listener.standing[again.key].at == round(began_at, 3), "it says since when it stands"
    assert "This happened at" in composed([again], "en", listener.now, 60.0).text
    assert [each.status for each in listener.messages_of(cleared)] == ["end"]


def test_a_trouble_that_was_held_back_has_no_time_of_a_clock_that_was_not_set() -> None:
    listener = Listener()
    raised, cleared = note("overload_raised", Level.ERROR), note("overload_cleared", Level.INFO)
    for each in (raised, cleared, raised):
        listener.messages_of(each)
    listener.now += 3 * 365 * 86400.0
    (again,) = listener.watch({}, replace(State(), alarms=("overload",)), "armed")
    assert again.at == round(listener.now, 3)


def test_a_clock_that_is_set_back_mutes_nothing() -> None:
    """After a power-off the host's clock may be wrong, and be set only once the network is there."""
    listener = Listener()
    listener.messages_of(note("power_on_blocked", method="rtc"))
    listener.now -= 365 * 86400.0
    assert len(listener.messages_of(note("power_on_blocked", method="rtc"))) == 1


def test_troubles_of_different_things_are_different() -> None:
    listener = Listener()
    found = [listener.messages_of(note("power_on_blocked", method=method)) for method in ("rtc", "sentinel", "rtc")]
    assert [len(each) for each in found] == [1, 1, 0]


def test_what_fails_again_in_the_next_outage_is_reported_again() -> None:
    """Within the hour, too: the checkpoint of the second outage is missing as well. In one outage it is one trouble."""
    listener = Listener()
    failed = note("action_failed", Level.ERROR, "timed out", action="TriggerCheckpoint")
    found = [listener.messages_of(failed, outage=outage) for outage in ("o1", "o1", "o2", "o2", "", "")]
    assert [len(each) for each in found] == [1, 0, 1, 0, 1, 0]


def test_what_was_not_reported_does_not_end() -> None:
    listener = Listener()
    assert listener.messages_of(note("overload_cleared", Level.INFO)) == []
    assert listener.messages_of(note("source_recovered", Level.INFO)) == []
    assert listener.messages_of(note("trainer_appeared", Level.INFO)) == []


def test_a_source_that_comes_back_ends_its_alarm() -> None:
    listener = Listener()
    (lost,) = listener.messages_of(
        note("source_lost", Level.ERROR, "no answer", source="snmp:10.0.0.5", conduct="count on")
    )
    assert lost.title == "gpu-01: UPS source snmp:10.0.0.5 does not answer"
    (back,) = listener.messages_of(
        note("source_recovered", Level.INFO, "snmp:10.0.0.5 answers", source="snmp:10.0.0.5")
    )
    assert (back.status, back.key) == ("end", lost.key)


def test_each_source_has_an_alarm_of_its_own() -> None:
    """The second loss leaves the UPS unread, and the return of the first does not end it."""
    listener, two = Listener(), ("snmp:10.0.0.5", "nut:rack@10.0.0.6")
    found = [
        listener.messages_of(note("source_lost", Level.ERROR, "no answer", source=each, conduct="alarm"))
        for each in two
    ]
    assert [len(each) for each in found] == [1, 1]
    (back,) = listener.messages_of(note("source_recovered", Level.INFO, f"{two[0]} answers", source=two[0]))
    assert back.key == found[0][0].key
    assert list(listener.standing) == [found[1][0].key]


def test_what_a_reboot_has_ended_does_not_stand() -> None:
    """The next boot begins without feeds, guard and lost links, and no note says so."""
    listener = Listener()
    (lost,) = listener.messages_of(
        note("source_lost", Level.ERROR, "no answer", source="snmp:10.0.0.5", conduct="alarm")
    )
    listener.messages_of(note("network_lost", because="eth0 went down", part="eth0"))
    listener.messages_of(note("guard_started"))
    silent = replace(
        State(), feed=Feed(lost_since_s=NOW_S), gone=(NetworkLoss(part="eth0", heard_s=NOW_S, at_s=NOW_S),)
    )
    assert listener.watch({}, replace(silent, guarded_since_s=NOW_S), "armed") == []
    several = replace(State(), upses=(Supplied(ups="a", feed=Feed(), battery=Battery()),))
    for after in (State(), several):
        again = Listener()
        again.standing = dict(listener.standing)
        assert [each.event for each in again.watch({}, after, "armed")] == [
            "source_lost",
            "network_lost",
            "guard_started",
        ]
        assert lost.key not in again.standing


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State(), 1),
        (replace(State(), trainers=(replace(TRAINER, conduct=Conduct.EXIT, pause_ordered=True),)), 0),
        (replace(State(), trainers=(replace(TRAINER, conduct=Conduct.EXIT),)), 1),
        (replace(State(), trainers=(replace(TRAINER, conduct=Conduct.PAUSE, pause_ordered=True),)), 1),
        (scene("shutdown").state, 0),
    ],
    ids=["unknown", "asked to exit", "not asked", "asked to pause", "the host stops"],
)
def test_a_trainer_is_missed_unless_it_was_asked_to_go(state: State, expected: int) -> None:
    assert (
        len(Listener().messages_of(note("trainer_gone", because="no longer reachable", trainer="llm"), state=state))
        == expected
    )


def test_levels() -> None:
    listener = Listener()
    (warning,) = listener.messages_of(note("redundancy_lost_raised"))
    (error,) = listener.messages_of(note("overload_raised", Level.ERROR))
    assert [is_wanted(warning, each) for each in ("warning", "error", "none")] == [True, False, False]
    assert [is_wanted(error, each) for each in ("warning", "error", "none")] == [True, True, False]


def test_reasons_begin_and_end() -> None:
    """What no note tells: a journal in memory, a power-off that would fail."""
    listener = Listener()
    reasons = {"no_power_off": ("error", "the daemon cannot power this host off (no helper)")}
    (begun,) = listener.watch(reasons, State(), "armed")
    assert begun.text.endswith("(no helper). see host.power_off and host.helper in `powerguard doctor`")
    assert listener.watch(reasons, State(), "armed") == []
    assert [each.status for each in listener.watch({}, State(), "armed")] == ["end"]


def test_the_trouble_of_a_second_ups_or_trainer_is_another_trouble() -> None:
    """It begins while the first one stands, and each ends by itself."""
    daemon, listener = scene(), Listener()
    both = [SourceView(ups=ups, source=f"nut:{ups}", up=True, trouble="the login is refused") for ups in ("a", "b")]
    strange = [f"unix:/run/{name}.sock: served by uid 65534" for name in ("x", "y", "z", "w")]
    found = []
    for troubled, strangers in ((both[:1], strange[:1]), (both, strange[:2]), (both[1:], strange[1:2]), ([], strange)):
        its = replace(daemon, sources=troubled, strangers=strangers)
        messages = listener.watch(reason_levels(readiness(its), its.strangers), daemon.state, "armed")
        found.append([(each.status, each.key.removeprefix("reason:")) for each in messages])
    assert found == [
        [("begin", "source_troubled:nut:a"), ("begin", "trainer_stranger:unix:/run/x.sock")],
        [("begin", "source_troubled:nut:b"), ("begin", "trainer_stranger:unix:/run/y.sock")],
        [("end", "source_troubled:nut:a"), ("end", "trainer_stranger:unix:/run/x.sock")],
        [("begin", "trainer_stranger:unix:/run/z.sock"), ("end", "source_troubled:nut:b")],
    ], "a crowd of sockets does not use up the messages of others"


def test_too_many_become_one_and_an_outage_gets_through() -> None:
    listener = Listener()
    found = [listener.messages_of(note("power_on_blocked", method=f"w{number}")) for number in range(1000)]
    assert sum(map(len, found)) == 60
    assert len(listener.messages_of(*began(), *ended())) == 2
    (summary,) = listener.watch({}, State(), "armed")
    assert (summary.title, summary.level) == ("gpu-01: 940 more alarms", "error")
    assert "a power-on method cannot be used (940)" in summary.text


def test_an_outage_that_ended_unseen_is_ended() -> None:
    listener = Listener()
    listener.messages_of(*began())
    (over,) = listener.watch({}, State(), "armed")
    assert (over.key, over.status, over.title) == ("outage:o1", "end", "gpu-01: the outage is over")


def test_a_drill_is_overdue_after_90_days() -> None:
    """Never in the first weeks: a host in rehearse or dry-run has not been drilled yet, and need not be."""
    fresh = drilled()
    assert _drill(fresh) == {}
    assert fresh.state.learned.drill is not None
    old = replace(fresh.state.learned.drill, at_s=NOW_S - 91 * 86400.0)
    fresh.state = replace(fresh.state, learned=replace(fresh.state.learned, drill=old))
    assert _drill(fresh) == {"drill_overdue": ("warning", "the last one was 91 days ago")}
    never = scene()
    assert _drill(never) == {"drill_overdue": ("warning", "none has been run yet")}
    never.policy = replace(never.policy, mode=Mode.REHEARSE)
    assert _drill(never) == {}


NO_MESSAGE = {
    *("battery_low", "grade_lowered", "guard_ended", "outage_continued", "phase_changed", "power_off_accepted"),
    *("power_off_ordered", "reboot_ordered", "trainer_signalled"),
    *("network_back", "source_recovered"),  # the end of what has not begun here
}
"""Notes that give no message of their own: another message reports what they report."""


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("event", sorted({*_SENTENCES, "overload_raised", "never_heard_of"}))
def test_every_note_has_words(language: str, event: str) -> None:
    """With no number at all, and with hostile ones: braces, newlines, controls."""
    bad: dict[str, Any] = {"source": "{host}\n\x1b[31m", "trainer": "%s{0}", "away_s": float("nan"), "lasted_s": -1e300}
    for numbers in ({}, bad):
        messages = Listener(language).messages_of(note(event, Level.ERROR, "{because}\u202e", **numbers))
        assert len(messages) == (event not in NO_MESSAGE)
        for each in messages:
            assert each.title.startswith("gpu-01")
            assert each.text
            assert (each.title + each.text).isprintable()


def test_an_order_that_failed_is_named_by_what_it_was_to_do() -> None:
    """Every order that the table names exists; one that it does not name is an order all the same."""
    orders = {each.__name__ for each in Action.__subclasses__()}
    named = {name.removeprefix("action failed ") for name in texts("en")["alarms"] if name.startswith("action failed ")}
    assert named <= orders
    for action, title in (("TriggerCheckpoint", "a checkpoint failed"), ("Reboot", "an order failed")):
        (result,) = Listener("en").messages_of(note("action_failed", Level.ERROR, "timed out", action=action))
        assert result.title == f"gpu-01: {title}"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_alarm_has_a_name_for_people(language: str) -> None:
    """An alarm without one is called as in the log, in English, whatever the language of the settings."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    listed = re.findall(r"`([a-z_]+)`", page.partition("The names:")[2].partition("Level:")[0])
    names = {*listed, *WATCHED, "power_on_given_up"}
    assert {"power_on_stuck", "overload", "supply_contradicted", "undersized"} <= names
    assert [name for name in sorted(names) if name.replace("_", " ") not in texts(language)["alarms"]] == []


def test_the_languages_say_the_same() -> None:
    """The same messages with the same values, so that a translation cannot leave a number out."""
    english, chinese = texts("en"), texts("zh")
    assert list(english["messages"]) == list(chinese["messages"])
    for name, message in english["messages"].items():
        other = chinese["messages"][name]
        for part in ("title", "text"):
            assert re.findall(r"{\w+}", message[part]) == re.findall(r"{\w+}", other[part]), name
    assert set(english["reasons"]) <= set(chinese["reasons"])
    assert set(english["alarms"]) <= set(chinese["alarms"])
    assert set(english["units"]) == set(chinese["units"])


def test_late_messages_say_when_it_was() -> None:
    listener = Listener("zh")
    (one,) = listener.messages_of(*began())
    assert composed([one], "zh", listener.now + 1.0, 60.0) == one
    assert "发生于" in composed([one], "zh", listener.now + 100.0, 60.0).text
