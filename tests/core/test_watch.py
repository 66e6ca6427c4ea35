"""A UPS that falls silent and stays so: whether it lives is seen from the loads of the others, and never guessed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.core.comeback.recovery import restore
from powerguard.core.comeback.validation import validated
from powerguard.core.decide.machine import step
from powerguard.core.energy import account
from powerguard.core.model.events import Reading, SourceFailed
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Battery, Feed, State, Supplied, Supply, Watch, Witness
from powerguard.core.supply import feeds, silence
from tests.core.play import make_policy, play
from tests.core.test_feeds import ALONE, ONE_OF_TWO, lost, policy, says

TRAINING = 0.7
"""Load of the whole host on each of two, as a share of a rating: one of them cannot carry both."""
PAUSED = 0.25
EVERY_S = 10.0
BACK_S = 120.0
"""Utility is back at the one that is heard."""


def entered(made: Policy, state: State, *events: Reading | SourceFailed) -> State:
    """Return the state after these words, as far as the feeds go."""
    for each in events:
        new = feeds.enter(made, state, each) if isinstance(each, Reading) else feeds.lose(made, state, each)
        state = state if new is None else new
    return state


def played(
    *,
    dies_s: float = 1e9,
    silent_s: float = 60.0,
    pause_s: float = 30.0,
    share: float = 0.5,
    until_s: float = 4000.0,
    made: Policy = ONE_OF_TWO,
    host: Callable[[float], float] | None = None,
    heard: Callable[[float], bool] = lambda _: True,
) -> list[tuple[float, State]]:
    """Play a host on A and B, both on battery from 10 s on; A falls silent for good, B has utility again at BACK_S.

    dies_s: A ends then. pause_s: training stands from then on. share: the part of the host that A carries. host: the
    load of the host, where it is another one. heard: whether B is.
    """
    state, story, at_s = restore(made, None, 0.0).state, [], 0.0
    while at_s < until_s:
        drawn = 2.0 * (TRAINING if at_s < pause_s else PAUSED) if host is None else host(at_s)
        noise = 1.0 + 0.01 * ((int(at_s) // 10) % 3 - 1)
        b_load = 100.0 * drawn * (1.0 if at_s >= dies_s else 1.0 - share) * noise
        word = "battery" if 10.0 <= at_s < BACK_S else "utility"
        if at_s < silent_s:
            a_word = "battery" if at_s >= 10.0 else "utility"
            state = entered(made, state, says(at_s, "a", a_word, load_pct=100.0 * drawn * share / noise))
        elif at_s < silent_s + EVERY_S:
            state = entered(made, state, lost(at_s, "a"))
        if heard(at_s):
            state = entered(made, state, says(at_s + 0.5, "b", word, load_pct=min(200.0, b_load)))
        else:
            state = entered(made, state, lost(at_s + 0.5, "b"))
        story.append((at_s, state))
        at_s += EVERY_S
    return story


def a_of(state: State) -> Supplied:
    a = feeds.of(state, "a")
    assert a is not None
    return a


def lives_at(story: list[tuple[float, State]]) -> float | None:
    return next((at_s for at_s, state in story if silence.lives(a_of(state))), None)


# --- It lives --------------------------------------------------------------------------------------------------------


def test_a_silent_one_that_outlives_every_battery_has_utility() -> None:
    """Before: one that never answered again kept training from going on for ever. Not before a new battery is empty."""
    story = played()
    at_s = lives_at(story)
    full_s = account.tau_s(ALONE.runtime_table, PAUSED)
    assert at_s is not None
    assert 50.0 + 1.25 * full_s <= at_s <= 50.0 + 1.30 * full_s + EVERY_S
    before, after = (next(state for t, state in story if t == at_s + d) for d in (-EVERY_S, 0.0))
    assert [each.overloaded for each in before.upses] == [False, True]
    assert (before.feed.supply, after.feed.supply) == (Supply.BATTERY, Supply.UTILITY)
    assert not any(each.overloaded for each in after.upses)
    assert feeds.redundancy_lost(after) == "a (silent; it has carried its part for longer than a battery lasts)"


def test_a_last_word_in_the_very_pause_is_not_compared_with_what_was_before_it() -> None:
    """A tells the load of the pause, B still that of training: for three times as long it would seem to last."""
    at_s = lives_at(played(pause_s=50.0))
    assert at_s is not None
    assert at_s == pytest.approx(50.0 + 1.25 * account.tau_s(ALONE.runtime_table, PAUSED), abs=50.0)


def test_one_that_was_unheard_then_is_known_by_its_share_of_the_load() -> None:
    """B is silent as A speaks for the last time, paused: what B then tells is what goes with it, no more."""
    assert lives_at(played(heard=lambda at_s: not 20.0 < at_s < 90.0)) is not None
    assert lives_at(played(heard=lambda at_s: not 20.0 < at_s < 90.0, dies_s=65.0)) is None


def test_a_share_is_not_taken_while_one_of_them_lags_behind_a_step() -> None:
    """B tells of the pause, and A, later, still of training: that is no share of the load."""
    loads = (("b", 0.0, 70.0), ("a", 0.5, 70.0), ("b", 10.0, 25.0), ("a", 10.5, 70.0))
    state = entered(ONE_OF_TWO, State(), *(says(at_s, ups, "utility", load_pct=load) for ups, at_s, load in loads))
    watched = a_of(state).watch
    assert watched is not None
    (one,) = watched.others
    assert one.share == pytest.approx(1.0)
    assert one.least == 0.25


def test_a_reading_without_a_load_says_nothing_of_it() -> None:
    story = played(host=lambda at_s: 0.0 if 500.0 <= at_s < 520.0 else 2.0 * (TRAINING if at_s < 30.0 else PAUSED))
    assert lives_at(story) == lives_at(played())


def test_training_that_goes_on_says_nothing_against_it() -> None:
    """The others' loads rise then because of training. At the next transfer it counts as on battery again, and anew."""
    story = played(host=lambda at_s: 2.0 * (TRAINING if at_s < 30.0 or at_s > 1500.0 else PAUSED), until_s=1600.0)
    state = story[-1][1]
    assert silence.lives(a_of(state))
    state = entered(ONE_OF_TWO, state, *(says(1600.0 + n, "b", "battery", load_pct=70.0) for n in range(2)))
    assert (silence.lives(a_of(state)), state.feed.supply) == (False, Supply.BATTERY)
    state = entered(ONE_OF_TWO, state, *(says(1610.0 + n, "b", "utility", load_pct=70.0) for n in range(450)))
    assert (state.feed.supply, [each.overloaded for each in state.upses]) == (Supply.BATTERY, [False, True])
    for at_s in range(2060, 2200, 10):
        state = entered(ONE_OF_TWO, state, says(float(at_s), "b", "utility", load_pct=70.0))
    assert (silence.lives(a_of(state)), state.feed.supply) == (True, Supply.UTILITY)


def test_what_it_carries_rises_with_the_others() -> None:
    """It fell silent in a pause; training goes on: what it told then would be no overload of the other one."""
    story = played(host=lambda at_s: 2.0 * (TRAINING if at_s < 30.0 or at_s > 300.0 else PAUSED), until_s=400.0)
    assert a_of(story[20][1]).battery.load == pytest.approx(PAUSED, rel=0.03)
    assert a_of(story[-1][1]).battery.load == pytest.approx(TRAINING, rel=0.03)
    twice = played(host=lambda at_s: 0.1 if at_s < 300.0 else 2.6, until_s=400.0)
    assert a_of(twice[-1][1]).battery.load == 1.0, "no UPS carries more than it can"


def test_what_it_carries_falls_with_the_others() -> None:
    """It fell silent in training. When training has paused, no trainer is suspected for a load of before."""
    held = played(silent_s=60.0, pause_s=100.0, until_s=200.0)
    assert a_of(held[-1][1]).battery.load == pytest.approx(PAUSED, rel=0.06)
    assert held[-1][1].battery.load == pytest.approx(PAUSED, rel=0.06)
    reading = held[-1][1].feed.reading
    assert reading is not None
    assert reading.load_pct == pytest.approx(100.0 * PAUSED, rel=0.06)
    shared = played(silent_s=60.0, pause_s=100.0, until_s=200.0, share=0.75)
    fallen = 0.5 * (TRAINING - PAUSED)
    assert a_of(shared[-1][1]).battery.load == pytest.approx(1.5 * TRAINING - fallen, rel=0.06), "others may hang on it"


def test_one_that_is_silent_on_utility_is_only_silent() -> None:
    """Nothing went with it: it counts as on utility as long as nobody else goes, and no alarm says more than that."""
    state = entered(ONE_OF_TWO, State(), says(0.0, "b", "utility"), says(0.5, "a", "utility"), lost(4.0, "a"))
    for at_s in range(10, 2000, 10):
        state = entered(ONE_OF_TWO, state, says(float(at_s), "b", "utility"))
    assert (silence.lives(a_of(state)), feeds.redundancy_lost(state)) == (False, "")


def test_a_battery_that_nobody_repeats_any_more_is_no_suspicion() -> None:
    """One odd reading, and then silence: training of the others' feed would never have gone on."""
    state = entered(
        ONE_OF_TWO, State(), says(0.0, "b", "utility"), says(0.5, "a", "utility"), says(1.0, "a", "battery")
    )
    assert state.feed.suspect
    assert not entered(ONE_OF_TWO, state, lost(4.0, "a")).feed.suspect


def test_who_answers_is_believed_again() -> None:
    """Whatever it says: here, that it is on battery."""
    state = played(until_s=1500.0)[-1][1]
    state = entered(ONE_OF_TWO, state, *(says(1500.0 + n, "a", "battery", load_pct=25.0) for n in range(2)))
    assert (silence.lives(a_of(state)), a_of(state).feed.lost_since_s, state.feed.supply) == (
        False,
        None,
        Supply.UTILITY,
    )


def test_one_that_was_presumed_on_battery_may_outlive_it_too() -> None:
    """It said utility and fell silent as the other one went."""
    made = ONE_OF_TWO
    calm = tuple(says(at_s, ups, "utility", load_pct=70.0) for at_s, ups in ((0.0, "b"), (0.5, "a")))
    state = entered(made, State(), *calm)
    state = entered(made, state, *(says(2.0 + n, "b", "battery", load_pct=70.0) for n in range(2)), lost(4.0, "a"))
    assert a_of(state).presumed
    for at_s in range(10, 700, 10):
        state = entered(made, state, says(float(at_s), "b", "utility", load_pct=70.0))
    assert silence.lives(a_of(state))
    assert state.feed.supply is Supply.UTILITY


def test_its_last_words_of_low_battery_and_of_a_countdown_are_outlived_as_well() -> None:
    made = replace(ONE_OF_TWO, minimum_supplies=2)
    story = played(made=made, until_s=100.0)
    low = tuple(
        says(100.0 + n, "a", "battery", load_pct=25.0, low_battery=True, output_off_in_s=90.0 - n) for n in range(3)
    )
    state = entered(made, story[3][1], *low, lost(110.0, "a"))
    assert None not in (state.feed.low_battery_at_s, state.feed.countdown_at_s)
    for at_s in range(120, 1800, 10):
        state = entered(made, state, says(float(at_s), "b", "utility", load_pct=25.0))
    assert silence.lives(a_of(state))
    assert (state.feed.low_battery_at_s, state.feed.countdown_at_s, state.feed.supply) == (None, None, Supply.UTILITY)


# --- It may not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        {"dies_s": 60.0},
        {"dies_s": 65.0, "silent_s": 70.0},
        {"dies_s": 500.0},
        {"dies_s": 1000.0, "share": 0.3},
        {"dies_s": 300.0, "share": 0.12},
        {"dies_s": 500.0, "host": lambda at_s: 0.5 if at_s < 800.0 else 0.2},
        {"dies_s": 300.0, "host": lambda at_s: 0.8 if at_s < 310.0 else 0.4},
        {"dies_s": 500.0, "heard": lambda at_s: not 400.0 < at_s < 600.0},
        {"dies_s": 500.0, "made": policy("feed=a:2", "feed=b:1")},
        {"dies_s": 500.0, "made": policy("feed=a:1", "feed=b:2")},
    ],
    ids=[
        "silent because dead",
        "dead before",
        "in the hold",
        "a third",
        "little",
        "then less",
        "at once half",
        "unheard",
        "2:1",
        "1:2",
    ],
)
def test_who_has_ended_is_never_taken_for_alive(case: dict[str, object]) -> None:
    """Whenever it ended and whatever it carried: training on what is left would be overload."""
    assert lives_at(played(**case)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    [
        {"share": 0.12},
        {"host": lambda at_s: 1.4 if at_s < 30.0 or 600.0 < at_s < 640.0 else 0.5},
        {"heard": lambda at_s: not 400.0 < at_s < 600.0, "host": lambda at_s: 0.8 if at_s < 500.0 else 0.5},
        {"heard": lambda at_s: at_s < 300.0},
    ],
    ids=["too small to be seen", "a load that rose", "a fall that nobody saw", "nobody is heard"],
)
def test_what_cannot_be_distinguished_from_an_end_is_no_proof(case: dict[str, object]) -> None:
    """It lives in each of these, but it cannot be seen."""
    assert lives_at(played(**case)) is None  # type: ignore[arg-type]


def test_of_three_the_one_that_is_heard_is_witness_for_both() -> None:
    """A switch dies, and two cards with it; each of them carries a third."""
    made = policy("feed=a", "feed=b", "feed=c")

    def at_last(c_dies_s: float) -> State:
        state = restore(made, None, 0.0).state
        for at_s in range(0, 2500, 10):
            host = 2.1 if at_s < 30 else 0.9
            word = "battery" if 10 <= at_s < BACK_S else "utility"
            for name, late_s in (("a", 0.0), ("c", 0.2)):
                gone = lost(at_s + late_s, name)
                readings = says(
                    at_s + late_s, name, "battery" if at_s >= 10 else "utility", load_pct=100.0 * host / 3.0
                )
                state = entered(made, state, readings if at_s < 60 else gone)
            load_pct = 100.0 * host / (2.0 if at_s >= c_dies_s else 3.0)
            state = entered(made, state, says(at_s + 0.5, "b", word, load_pct=load_pct))
        return state

    both = at_last(1e9)
    assert [silence.lives(each) for each in both.upses] == [True, True, False]
    assert both.feed.supply is Supply.UTILITY
    assert [silence.lives(each) for each in at_last(600.0).upses] == [False, False, False]


@settings(max_examples=25, deadline=None)
@given(
    dies=st.one_of(st.none(), st.integers(2, 200)),
    silent=st.integers(3, 30),
    pause=st.integers(3, 60),
    share=st.floats(0.02, 0.98),
    supplies=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
)
def test_it_is_taken_for_alive_only_where_it_is(
    dies: int | None, silent: int, pause: int, share: float, supplies: tuple[int, int]
) -> None:
    """Any end, any silence, any pause, any share. Only an end between the same two readings as the pause is unseen."""
    if dies == pause:
        dies += 1
    made = policy(f"feed=a:{supplies[0]}", f"feed=b:{supplies[1]}")
    dies_s = 1e9 if dies is None else EVERY_S * dies
    silent_s = min(EVERY_S * silent, dies_s)
    story = played(dies_s=dies_s, silent_s=silent_s, pause_s=EVERY_S * pause, share=share, made=made, until_s=2600.0)
    at_s = lives_at(story)
    assert at_s is None or at_s <= dies_s
    if dies is None and 0.3 <= share <= 0.7:
        assert at_s is not None, "and then it is found out"


# --- Edges ----------------------------------------------------------------------------------------------------------


NOW_S = 500.0
B = Witness(ups="b", share=1.0, least=0.5)


def unheard(*others: Witness, spent: float = 2.0, lives: bool = False) -> Supplied:
    """A, silent on battery since 50 s, after it was watched until now."""
    feed = Feed(supply=Supply.BATTERY, reading=says(50.0, "a", "battery"), lost_since_s=53.0)
    seen = Watch(load=0.5, others=others, spent=spent, counted_s=NOW_S, lives=lives)
    return Supplied(ups="a", feed=feed, battery=Battery(load=0.5), watch=seen)


def with_utility(ups: str, *, heard: bool = True, before_s: float = 1.0, **fields: float | None) -> Supplied:
    """Another one that has utility, and reported something before_s before its newest word."""
    previous = says(NOW_S - before_s, ups, "utility")
    feed = Feed(supply=Supply.UTILITY, reading=says(NOW_S, ups, "utility", **fields), previous=previous)
    return Supplied(ups=ups, feed=feed if heard else replace(feed, lost_since_s=NOW_S), battery=Battery(load=0.5))


def after_word(silent: Supplied, *others: Supplied, made: Policy = ONE_OF_TWO) -> Watch:
    watched = silence.watched(made, (silent, *others), silent, NOW_S, others[0].feed)
    assert watched.watch is not None
    return watched.watch


@pytest.mark.parametrize(
    ("made", "least", "beside", "alive"),
    [
        (ONE_OF_TWO, 0.08, (), True),
        (ONE_OF_TWO, 0.0799, (), False),
        (policy("feed=a", "feed=b:2", "feed=c"), 0.12, ("c",), True),
        (policy("feed=a", "feed=b:2", "feed=c"), 0.11, ("c",), False),
        (ONE_OF_TWO, 0.08, ("gone",), True),
    ],
    ids=["just", "not", "two thirds of it", "less", "one that the settings name no more takes nothing"],
)
def test_what_would_be_taken_over_must_be_seen(
    made: Policy, least: float, beside: tuple[str, ...], *, alive: bool
) -> None:
    """By power supplies, of what the silent one carries; twelve hundredths of which two thirds come to B are enough."""
    others = tuple(with_utility(ups, load_pct=50.0) for ups in beside)
    found = after_word(unheard(replace(B, least=least)), with_utility("b", load_pct=100.0 * least), *others, made=made)
    assert found.lives is alive


@pytest.mark.parametrize(("spent", "alive"), [(1.25, True), (1.2499, False)])
def test_it_has_outlived_a_quarter_more_than_a_battery(spent: float, *, alive: bool) -> None:
    assert after_word(unheard(B, spent=spent), with_utility("b", load_pct=50.0)).lives is alive


def test_where_no_witness_is_heard_nothing_is_seen() -> None:
    far = Witness(ups="c", share=1.0, least=0.5)
    found = after_word(unheard(far), with_utility("b", load_pct=50.0), with_utility("c", heard=False, load_pct=50.0))
    assert (found.lives, found.others) == (False, (far,))


@pytest.mark.parametrize(
    ("load_pct", "before_s", "risen", "least"),
    [
        (62.5, 1.0, False, 0.5),
        (62.6, 1.0, True, 0.5),
        (37.5, 31.0, False, 0.375),
        (37.4, 31.0, True, 0.374),
        (37.4, 30.0, False, 0.374),
        (0.0, 31.0, False, 0.5),
    ],
)
def test_a_load_has_risen_by_a_quarter_of_what_would_come(
    load_pct: float, before_s: float, least: float, *, risen: bool
) -> None:
    """Or may have, while nobody heard it for more than half a minute, and has fallen by as much."""
    (one,) = after_word(unheard(B, spent=0.0), with_utility("b", load_pct=load_pct, before_s=before_s)).others
    assert one.risen is risen
    assert one.least == pytest.approx(least)


def test_beside_one_that_lives_the_others_carry_what_they_carry() -> None:
    """Who tells no load, or is not heard, carries what it carried; watts are a load where the rating is known."""
    rated = policy("feed=a", "feed=b", "feed=c", "rating_w=1000")
    others = (replace(B, risen=True), Witness(ups="c", share=1.0, least=0.3))
    for fields, least in (
        ({"load_pct": 70.0}, 0.7),
        ({"load_pct": None}, 0.5),
        ({"load_pct": None, "watts": 640.0}, 0.64),
    ):
        far = with_utility("c", heard=False, load_pct=90.0)
        found = after_word(unheard(*others, lives=True), with_utility("b", **fields), far, made=rated)
        assert found == Watch(load=0.5, others=(replace(B, least=least), others[1]), counted_s=NOW_S, lives=True)
        assert [one.risen for one in found.others] == [False, False]


@pytest.mark.parametrize("made", [policy("feed=b"), replace(ONE_OF_TWO, feeds=make_policy(["feed=a", "feed=b"]).feeds)])
def test_without_settings_or_a_table_nothing_is_counted(made: Policy) -> None:
    """The settings name it no more, or tell nothing of how long it lasts."""
    seen = unheard(B, spent=9.0)
    assert after_word(seen, with_utility("b", load_pct=50.0), made=made) == seen.watch


def test_one_that_is_heard_carries_what_it_reports() -> None:
    """Whatever the others say; and alone it has no witness."""
    state = entered(ONE_OF_TWO, State(), says(0.0, "a", "utility", load_pct=25.0))
    assert a_of(state).watch is None
    state = entered(
        ONE_OF_TWO, state, says(0.5, "b", "utility", load_pct=50.0), says(1.0, "a", "utility", load_pct=25.0)
    )
    state = entered(ONE_OF_TWO, state, says(1.5, "b", "utility", load_pct=90.0))
    assert a_of(state).battery.load == pytest.approx(0.25)


@pytest.mark.parametrize(("step_s", "share"), [(5.0, 1.0), (4.9, 2.0)])
def test_five_seconds_after_a_step_a_share_is_taken_again(step_s: float, share: float) -> None:
    mine = replace(unheard(replace(B, share=2.0)), feed=Feed(reading=says(NOW_S, "a", "utility")))
    mine = replace(mine, battery=replace(mine.battery, step_at_s=NOW_S - step_s))
    found = silence.watched(ONE_OF_TWO, (mine, with_utility("b", load_pct=50.0)), mine, NOW_S, mine.feed).watch
    assert found is not None
    assert found.others == (replace(B, share=share),)


def test_who_is_not_heard_as_it_speaks_carries_what_goes_with_it() -> None:
    mine = replace(unheard(replace(B, share=2.0)), feed=Feed(reading=says(NOW_S, "a", "utility")))
    found = silence.watched(ONE_OF_TWO, (mine, with_utility("b", heard=False)), mine, NOW_S, mine.feed).watch
    assert found is not None
    assert found.others == (replace(B, share=2.0, least=0.25),)


# --- Kept ------------------------------------------------------------------------------------------------------------


def test_a_restart_of_the_daemon_goes_on_watching_and_a_boot_starts_over() -> None:
    """What the others carried is in the journal."""
    lines = (
        "policy table=50:540,75:360,100:240 trainer=llm:pause:20 feed=a feed=b",
        "auto policy sync poweroff resume trainer_resume checkpoint=15",
        "0..5 utility ups=a load=70 charge=100 runtime=380 | utility ups=b load=70 charge=100 runtime=380",
        "6..9 battery ups=a load=70 charge=99 runtime=370 | battery ups=b load=70 charge=99 runtime=370",
        "10 lost ups=a no answer",
        "11..15 battery ups=b load=70 charge=98 runtime=360",
    )
    result = play(*lines, "18 restart", "20..21 battery ups=b load=70 charge=97 runtime=350")
    kept = a_of(result.state).watch
    assert kept is not None
    assert (kept.others, kept.counted_s, kept.lives) == ((Witness(ups="b", share=1.0, least=0.7),), 21.0, False)
    assert kept.load == pytest.approx(0.7)
    assert kept.spent == pytest.approx(12.0 / 393.0, rel=0.05)
    again = play(*lines, "60 reboot gap=40", "61..62 utility ups=b load=30 charge=97 runtime=350")
    assert a_of(again.state).watch is None


@pytest.mark.parametrize(
    "wrong",
    [
        Watch(load=0.5, others=(Witness(ups="b", share=0.0, least=0.5),)),
        Watch(load=0.5, others=(Witness(ups="b", share=0.5, least=-1.0),)),
        Watch(load=0.5, others=()),
        Watch(load=0.0, others=(Witness(ups="b", share=0.5, least=0.5),)),
        Watch(load=0.5, others=(Witness(ups="b", share=0.5, least=0.5),), spent=-1.0),
        Watch(load=0.5, others=(Witness(ups="b", share=0.5, least=0.5),), counted_s=1e9, lives=True),
    ],
)
def test_a_stored_watch_that_cannot_be_true_is_dropped(wrong: Watch) -> None:
    """It would divide by nothing, or take what is silent for alive."""
    state = played(until_s=100.0)[-1][1]
    stored = replace(state, upses=tuple(replace(each, watch=wrong) for each in state.upses))
    read, dropped = validated(stored, 100.0)
    assert [each.watch for each in read.upses] == [None, None]
    assert dropped == ("a.watch", "b.watch")
    assert step(ONE_OF_TWO, read, says(101.0, "b", "utility")).state.upses
    assert validated(state, 100.0) == (state, ())


# --- One that has ended, and whose load has moved --------------------------------------------------------------------


def one_on_battery(
    load: float, *, dies_s: float, until_s: float, host: Callable[[float], float] = lambda _: 1.0, alive: bool = False
) -> State:
    """Play A on battery from 10 s on and silent from dies_s on; B has utility. load: of each of them, in percent.

    host: a factor of both loads. alive: A is only silent, with a battery that lasts.
    """
    state, at_s, lasts_s = restore(ONE_OF_TWO, None, 0.0).state, 0.0, 2000.0 if alive else dies_s - 10.0
    while at_s < until_s:
        share = max(0.0, min(1.0, 1.0 - (at_s - 10.0) / lasts_s))
        now = load * host(at_s)
        if at_s < dies_s:
            word = "battery" if at_s >= 10.0 else "utility"
            reading = says(at_s, "a", word, load_pct=now, charge_pct=100.0 * share, runtime_s=lasts_s * share)
            state = entered(ONE_OF_TWO, state, reading)
        elif at_s >= dies_s + 3.0:
            state = entered(ONE_OF_TWO, state, lost(at_s, "a"))
        moved = at_s >= dies_s and not alive
        state = entered(ONE_OF_TWO, state, says(at_s + 0.5, "b", "utility", load_pct=now * (2.0 if moved else 1.0)))
        at_s += 1.0
    return state


@pytest.mark.parametrize("load", [25.0, 34.0, 38.0, 49.0])
@pytest.mark.parametrize("until_s", [402.0, 410.0, 2400.0])
def test_a_load_that_has_moved_counts_once(load: float, until_s: float) -> None:
    """A's battery runs dry, and B carries everything on utility: that is utility, whether A answers again or not."""
    state = one_on_battery(load, dies_s=400.0, until_s=until_s)
    assert (state.feed.supply, [each.overloaded for each in state.upses]) == (Supply.UTILITY, [False, False])


def test_what_one_cannot_carry_alone_is_no_utility() -> None:
    """B is above its rating when A ends: a pause that cures it must not bring training back."""
    paused = one_on_battery(62.0, dies_s=400.0, until_s=900.0, host=lambda at_s: 1.0 if at_s < 100.0 else 0.4)
    assert paused.feed.supply is Supply.BATTERY


@pytest.mark.parametrize("factor", [1.4, 2.0, 2.6])
def test_a_host_that_draws_more_is_no_load_that_has_moved(factor: float) -> None:
    """A is silent and lives, and half a minute later the host draws more: when A ends, B would be overloaded."""
    state = one_on_battery(
        38.0, dies_s=400.0, until_s=450.0, host=lambda at_s: factor if at_s >= 430.0 else 1.0, alive=True
    )
    b = feeds.of(state, "b")
    assert b is not None
    assert b.overloaded
