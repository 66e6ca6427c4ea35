"""The power-on methods as a person sees them: each state of each layer, and whether the race is covered."""

from dataclasses import replace

import pytest

from powerguard.core.model.actions import ArmPowerOn, CheckPowerOn, EnsurePolicy, PowerOnMethod
from powerguard.core.model.events import Done, Failed
from powerguard.core.model.policy import FeedPolicy, Policy
from powerguard.daemon.loop import ReturnWatch
from powerguard.daemon.observe.port import BmcView, PowerOnView
from powerguard.daemon.observe.status import UNCOVERED, covers, layers, uncovered

POLICY = Policy(boot_id="b", ups="rack-a", outputs=("rack-a",))
RTC = PowerOnView(method=PowerOnMethod.RTC, ready=True, checked_at_s=5.0)
OUTPUT = PowerOnView(method=PowerOnMethod.OUTPUT, ups="rack-a", ready=True, returns="cycles", checked_at_s=5.0)


def stands(*methods: PowerOnView, bmc: BmcView | None = None, policy: Policy = POLICY) -> dict[str, str]:
    return {each.letter: each.stands for each in layers(policy, bmc, methods)}


def test_what_the_settings_do_not_name_is_off_and_says_where_it_would_be_set() -> None:
    known = layers(POLICY, None, ())
    assert [each.letter for each in known] == list("PABCDE")
    assert {each.stands for each in known} == {"off"}
    assert [each.why for each in known][3:] == ["sentinel.kind is none", "bmc.watchdog is false", "rtc.kind is none"]
    assert uncovered(known) == UNCOVERED


@pytest.mark.parametrize(
    ("bmc", "word", "why"),
    [
        (BmcView(kind="auto"), "unknown", "not checked yet"),
        (BmcView(kind="auto", policy="always-on", verified=True, checked_at_s=5.0), "armed", ""),
        (BmcView(kind="auto", policy="last-state", checked_at_s=5.0), "blocked", "the policy is last-state"),
        (BmcView(kind="auto", checked_at_s=5.0), "blocked", "the policy is unknown"),
        (BmcView(kind="auto", error="no answer"), "blocked", "no answer"),
    ],
)
def test_the_bmc_is_a_layer_that_covers_no_race(bmc: BmcView, word: str, why: str) -> None:
    known = layers(replace(POLICY, late_reboot=True), bmc, ())
    assert (known[0].stands, known[0].why) == (word, why)
    assert known[1].stands == "armed"
    assert not covers(known)


@pytest.mark.parametrize(
    ("view", "word", "why"),
    [
        (RTC, "armed", ""),
        (replace(RTC, ready=False, why="/dev/rtc0: no such file"), "blocked", "/dev/rtc0: no such file"),
        (replace(RTC, ready=None, checked_at_s=None), "unknown", "not checked yet"),
        (OUTPUT, "armed", ""),
        (replace(OUTPUT, returns="aborts"), "blocked", "this UPS aborts the cut"),
        (replace(OUTPUT, returns="stays_off"), "blocked", "this UPS stays off"),
        (replace(OUTPUT, returns="unknown"), "blocked", "this UPS may not switch its output off and on"),
        (replace(OUTPUT, ready=False, why="auto restart is off"), "blocked", "auto restart is off"),
    ],
)
def test_a_way_stands_as_it_was_last_asked(view: PowerOnView, word: str, why: str) -> None:
    known = layers(POLICY, None, (view,))
    mine = next(each for each in known if each.name == view.method)
    assert mine.stands == word
    assert mine.why.endswith(why)
    assert (mine.ups, mine.checked_at_s) == (view.ups, view.checked_at_s)
    assert covers(known) is (word == "armed")
    assert (uncovered(known) == "") is (word == "armed")
    if word == "blocked":
        assert mine.why in uncovered(known)


def test_outputs_that_do_not_go_off_together_cover_nothing() -> None:
    feeds = tuple(FeedPolicy(policy=replace(POLICY, ups=name)) for name in ("rack-a", "rack-b"))
    one = replace(POLICY, feeds=feeds)
    assert stands(OUTPUT, policy=one)["B"] == "blocked"
    both = replace(one, outputs=("rack-a", "rack-b"))
    second = replace(OUTPUT, ups="rack-b")
    assert covers(layers(both, None, (OUTPUT, second)))
    known = layers(both, None, (OUTPUT, replace(second, ready=False, why="no answer")))
    assert not covers(known), "each of them must be"
    assert uncovered(known) == f"{UNCOVERED} (B output rack-b: no answer)"
    assert covers(layers(both, None, (OUTPUT, replace(second, ready=False), RTC)))


def test_what_the_host_draws_is_of_the_last_check_alone() -> None:
    """An order of an outage does not ask for it: what was read an hour ago is no figure for now."""
    watch = ReturnWatch(lambda: 9.0)
    watch._kind = "in-band"
    order = EnsurePolicy(id="p-1", by_s=10.0, outage="")
    for detail, watts in (((("power_watts", 2860.0),), 2860.0), ((), None), ((("power_watts", True),), None)):
        watch.enter(Done(at_s=9.0, action=order, took_s=0.1, detail=(("policy", "always-on"), *detail)))
        assert watch.bmc is not None
        assert watch.bmc.power_watts == watts


def test_a_rehearsal_that_records_an_order_does_not_unblock_a_method() -> None:
    """A clock that is not there stays blocked, in status and in doctor, however often the commit point is rehearsed."""
    watch = ReturnWatch(lambda: 9.0)
    watch.methods = (PowerOnView(method=PowerOnMethod.RTC),)
    check = CheckPowerOn(id="c-1", by_s=10.0, method=PowerOnMethod.RTC)
    arm = ArmPowerOn(id="a-1", by_s=10.0, method=PowerOnMethod.RTC, outage="o", in_s=60.0)
    watch.enter(Failed(at_s=9.0, action=check, took_s=0.1, reason="/dev/rtc0: not there"))
    watch.enter(Done(at_s=9.0, action=arm, took_s=0.1, detail=(("dry_run", True),)))
    assert stands(*watch.methods)["E"] == "blocked"
    watch.enter(Done(at_s=9.0, action=arm, took_s=0.1))
    assert stands(*watch.methods)["E"] == "armed"
