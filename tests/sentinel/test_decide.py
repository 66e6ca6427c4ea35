"""Who is powered on, and when: each condition alone keeps the host off, and no walk of the world breaks the promise."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from powerguard.sentinel.decide import (
    ALARMS,
    APART_S,
    BACK_OFF_S,
    FRESH_S,
    LOOK_AHEAD,
    MAX_TRIES,
    STILL_ON_S,
    Decision,
    Ending,
    HostRules,
    Intent,
    PowerOnOrder,
    Seen,
    SentinelWorld,
    UpsSupply,
    decide,
    look,
    noted,
    ordered,
    stored,
)

GOOD, BAD = UpsSupply(good=True, utility_since_s=500.0), UpsSupply(good=False, why="on battery")
ONE = HostRules(feeds=("a",), minimum_supplies=1, stagger_s=10.0)
BOTH = HostRules(feeds=("a", "b"), minimum_supplies=2, stagger_s=10.0)
EITHER = HostRules(feeds=("a", "b"), minimum_supplies=1, stagger_s=10.0)
OFF = Seen(power_on=False, since_s=990.0, at_s=1000.0, looks=3)
ON = Seen(power_on=True, since_s=990.0, at_s=1000.0, looks=3)
INTENT = Intent(
    host="n1", outage="o1", boot_id="b1", feeds=("a",), stored_s=800.0, not_before_s=900.0, expires_s=5000.0
)
WORLD = SentinelWorld(now_s=1000.0, hosts={"n1": ONE}, supplies={"a": GOOD}, intents={"n1": INTENT}, seen={"n1": OFF})


def of_two(rules: HostRules, **supplies: UpsSupply) -> SentinelWorld:
    return replace(
        WORLD,
        hosts={"n1": rules},
        supplies=supplies,
        intents={"n1": replace(INTENT, feeds=tuple(sorted(set(rules.feeds))))},
    )


def with_intent(**changed: object) -> SentinelWorld:
    return replace(WORLD, intents={"n1": replace(INTENT, **changed)})  # type: ignore[arg-type]


def after(world: SentinelWorld) -> SentinelWorld:
    """What it has seen is entered, as before each decision."""
    return replace(world, intents={name: noted(world, intent) for name, intent in world.intents.items()})


def test_all_true_is_an_order() -> None:
    assert decide(WORLD) == Decision(
        order=PowerOnOrder(host="n1", outage="o1", number=1), ends=(), waits={}, looks=frozenset({"n1"})
    )


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (with_intent(not_before_s=1007.0), "not for another 7 s, as the host has asked"),
        (replace(WORLD, supplies={"a": BAD}), "0 of 1 supplies have stable power (a: on battery)"),
        (replace(WORLD, supplies={}), "0 of 1 supplies have stable power (a: it is not read)"),
        (of_two(BOTH, a=GOOD, b=BAD), "1 of 2 supplies have stable power (b: on battery)"),
        (with_intent(feeds=("a", "c")), "the host is fed by a, c; here its feeds are a"),
        (replace(WORLD, seen={}), "its BMC was not polled yet"),
        (replace(WORLD, seen={"n1": ON}), "its BMC reports it as on"),
        (replace(WORLD, seen={"n1": Seen(power_on=None, since_s=0, at_s=999, looks=9, why="dead")}), "dead"),
        (replace(WORLD, seen={"n1": replace(OFF, looks=1)}), "its BMC reports it as off; one more poll confirms it"),
        (replace(WORLD, seen={"n1": replace(OFF, since_s=1000.0 - APART_S + 0.1)}), "off; one more poll"),
        (with_intent(stored_s=999.0), "its BMC reports it as off; one more poll confirms it"),
        (replace(WORLD, now_s=1000.1 + FRESH_S), "its BMC reports it as off; one more poll confirms it"),
        (with_intent(tries=1, tried_s=990.0), "order 1 is given; the next in 50 s, unless it comes up"),
        (with_intent(tries=MAX_TRIES, tried_s=990.0), "all of 3 orders are given"),
        (replace(WORLD, last_order_s=995.0), "staggered: another host was powered on just now; in 5 s"),
    ],
)
def test_each_condition_alone_keeps_it_off(world: SentinelWorld, why: str) -> None:
    decision = decide(world)
    assert (decision.order, decision.ends) == (None, ())
    assert why in decision.waits["n1"]


def test_no_intent_no_order() -> None:
    assert decide(replace(WORLD, intents={})) == Decision(order=None, ends=(), waits={}, looks=frozenset())


def test_one_supply_is_enough_where_the_settings_say_so() -> None:
    assert decide(of_two(EITHER, a=BAD, b=GOOD)).order is not None
    assert decide(of_two(EITHER, a=BAD, b=BAD)).order is None
    twice = HostRules(feeds=("a", "a", "b"), minimum_supplies=2, stagger_s=0.0)
    assert decide(of_two(twice, a=GOOD, b=BAD)).order is not None
    assert decide(of_two(twice, a=BAD, b=GOOD)).order is None


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (with_intent(expires_s=1000.0), Ending.EXPIRED),
        (replace(WORLD, hosts={}), Ending.HOST_UNKNOWN),
        (replace(with_intent(was_off=True, on_since_s=1000.0 - STILL_ON_S), seen={"n1": ON}), Ending.CAME_BACK),
        (
            replace(with_intent(tries=1, tried_s=390.0, on_since_s=1000.0 - STILL_ON_S), seen={"n1": ON}),
            Ending.POWERED_ON,
        ),
        (
            replace(with_intent(tries=3, tried_s=980.0, on_since_s=985.0, expires_s=999.0), seen={"n1": ON}),
            "powered_on",
        ),
        (replace(with_intent(was_off=True, on_since_s=985.0, expires_s=999.0), seen={"n1": ON}), Ending.CAME_BACK),
        (replace(with_intent(expires_s=999.0), seen={"n1": ON}), Ending.STAYED_ON),
        (with_intent(was_off=True, on_since_s=700.0, on_at_s=950.0), Ending.SWITCHED_OFF),
        (
            replace(WORLD, now_s=2000.0, seen={"n1": Seen(power_on=True, since_s=0, at_s=900 + STILL_ON_S, looks=9)}),
            Ending.STAYED_ON,
        ),
        (with_intent(tries=MAX_TRIES, tried_s=1000.0 - BACK_OFF_S[-1]), Ending.GAVE_UP),
    ],
)
def test_how_an_intent_ends(world: SentinelWorld, how: Ending) -> None:
    decision = decide(world)
    assert (decision.order, [end.how for end in decision.ends]) == (None, [how])
    assert (how in ALARMS) == (how in {Ending.EXPIRED, Ending.GAVE_UP, Ending.HOST_UNKNOWN})


@pytest.mark.parametrize(
    "world",
    [
        replace(WORLD, seen={"n1": ON}),  # it has just been told to go off
        replace(WORLD, seen={"n1": replace(ON, since_s=0.0)}),  # and was on for a long time before
        replace(with_intent(was_off=True), seen={"n1": replace(ON, looks=1)}),  # one look alone
        replace(with_intent(tries=1, tried_s=999.0), seen={"n1": ON}),  # one look since the order
        replace(
            with_intent(tries=1, tried_s=980.0, on_since_s=401.0), seen={"n1": ON}
        ),  # the next cut may meet its boot
        replace(with_intent(tries=MAX_TRIES, tried_s=600.0, on_since_s=985.0), seen={"n1": ON}),  # of no use giving up
        replace(with_intent(expires_s=999.0), seen={"n1": replace(ON, looks=1)}),  # nor is one look alone an end
    ],
)
def test_a_host_that_is_on_is_not_back_at_once(world: SentinelWorld) -> None:
    assert decide(world).ends == ()


def test_on_again_is_two_looks_after_it_was_off_and_after_the_last_order() -> None:
    """Its first look says since when, its last one when that was known last, whatever the BMC says in between."""
    was_off = with_intent(was_off=True)
    assert after(replace(was_off, seen={"n1": ON})) == replace(
        was_off, seen={"n1": ON}, intents={"n1": replace(INTENT, was_off=True, on_since_s=990.0, on_at_s=1000.0)}
    )
    for world in (
        replace(WORLD, seen={"n1": ON}),  # it has not been off
        replace(was_off, seen={"n1": replace(ON, looks=1)}),
        replace(with_intent(was_off=True, tries=1, tried_s=996.0), seen={"n1": ON}),
        replace(was_off, seen={}),
        replace(was_off, seen={"n1": Seen(power_on=None, since_s=0.0, at_s=999.0, looks=9)}),
    ):
        assert after(world) == world
    back = replace(INTENT, was_off=True, on_since_s=500.0, on_at_s=560.0)
    silent = replace(WORLD, intents={"n1": back}, seen={"n1": Seen(power_on=None, since_s=580.0, at_s=999.0)})
    assert after(silent) == silent
    assert noted(replace(silent, seen={"n1": ON}), back) == replace(back, on_at_s=1000.0)
    assert ordered(back, 1000.0) == replace(INTENT, was_off=True, tries=1, tried_s=1000.0)


@pytest.mark.parametrize(
    ("world", "again"),
    [
        (of_two(EITHER, a=GOOD, b=GOOD), False),
        (of_two(EITHER, a=GOOD, b=UpsSupply(good=True, utility_since_s=955.0)), False),
        (of_two(BOTH, a=GOOD, b=UpsSupply(good=True, utility_since_s=955.0)), True),
        (of_two(ONE, a=UpsSupply(good=True, utility_since_s=950.0)), False),
        (of_two(ONE, a=UpsSupply(good=True, utility_since_s=950.1)), True),
        (of_two(ONE, a=UpsSupply(good=True)), True),
    ],
)
def test_off_again_while_its_power_was_there_is_a_hand_and_else_a_cut(world: SentinelWorld, *, again: bool) -> None:
    """It was on until 950 s. Where its power may have failed since, its word stands, and what was tried counts."""
    tried = {"was_off": True, "tries": 1, "tried_s": 700.0}
    word = replace(world.intents["n1"], on_since_s=720.0, on_at_s=950.0, **tried)  # type: ignore[arg-type]
    world = after(replace(world, intents={"n1": word}))
    decision = decide(world)
    assert (decision.order is not None, [end.how for end in decision.ends]) == (
        again,
        [] if again else ["switched_off"],
    )
    if decision.order is not None:
        assert decision.order.number == 2
        assert world.intents["n1"].on_at_s is None


def test_a_cut_that_is_not_over_is_one() -> None:
    """Its UPS is on battery, or not read, when its BMC says "off": whatever comes later, it was no hand."""
    word = replace(INTENT, was_off=True, on_since_s=720.0, on_at_s=950.0)
    left = noted(replace(WORLD, supplies={"a": BAD}), word)
    assert left == replace(INTENT, was_off=True)
    assert decide(replace(WORLD, intents={"n1": left})).order is not None


def test_a_look_at_what_is_off_may_be_older_than_the_switching_off() -> None:
    """One look alone decides nothing, and an old one of before its word nothing either."""
    word = replace(INTENT, was_off=True, on_since_s=720.0, on_at_s=950.0)
    for seen in (replace(OFF, looks=1), replace(OFF, since_s=700.0, at_s=790.0)):
        world = replace(WORLD, intents={"n1": word}, seen={"n1": seen})
        assert (after(world), decide(world).ends) == (world, ())


def test_a_host_that_is_given_up_was_perhaps_cut_off_in_each_boot() -> None:
    """It was on after its last order: that its BMC has not reported it as on is not the reason."""
    word = replace(INTENT, tries=MAX_TRIES, tried_s=650.0, was_off=True)
    world = replace(WORLD, supplies={"a": BAD}, intents={"n1": replace(word, on_since_s=700.0, on_at_s=900.0)})
    (end,) = decide(after(world)).ends
    assert (end.how, "it went off again after each; power it on by hand" in end.because) == (Ending.GAVE_UP, True)


def test_the_first_of_several_goes_first_and_the_rest_later() -> None:
    """The order of the settings; one order at a time, and the next one as much later as that host asks for."""
    hosts = {"n2": replace(ONE, stagger_s=30.0), "n1": ONE}
    world = replace(WORLD, hosts=hosts, seen=dict.fromkeys(hosts, OFF))
    world = replace(world, intents={name: replace(INTENT, host=name) for name in ("n1", "n2")})
    decision = decide(world)
    assert decision.order is not None
    assert (decision.order.host, decision.waits) == ("n2", {"n1": "another host is powered on first"})
    left = replace(world, intents={"n1": INTENT}, last_order_s=1000.0)
    assert "in 10 s" in decide(left).waits["n1"]
    assert decide(replace(left, now_s=1010.0)).order is not None


def test_a_room_full_is_not_looked_at_at_once() -> None:
    """Those whose BMC is dead or says "on" take nobody's turn."""
    hosts = {f"n{number}": ONE for number in range(LOOK_AHEAD + 5)}
    seen = {"n0": Seen(power_on=None, since_s=0.0, at_s=999.0), "n1": ON}
    intents = {name: replace(INTENT, host=name) for name in hosts}
    decision = decide(replace(WORLD, hosts=hosts, intents=intents, seen=seen))
    assert decision.looks == {f"n{number}" for number in range(2, LOOK_AHEAD + 2)}
    before = {"n1": replace(ON, at_s=INTENT.not_before_s - 1.0)}  # it may be off by now
    assert "n1" in decide(replace(WORLD, hosts=hosts, intents=intents, seen=before)).looks
    assert decide(with_intent(tries=1, tried_s=980.0)).looks == {"n1"}
    assert decide(with_intent(tries=1, tried_s=960.0)).looks == set()
    assert decide(replace(WORLD, supplies={})).looks == set()


def test_the_same_outage_again_changes_the_times_and_another_one_starts_over() -> None:
    tried = ordered(INTENT, 1000.0)
    again = replace(INTENT, stored_s=1050.0, not_before_s=1100.0, expires_s=9000.0)
    assert stored(tried, again) == replace(again, tries=1, tried_s=1000.0), "who asks again is on"
    assert stored(tried, replace(again, outage="o2")).tries == 0
    assert stored(None, again) == again


def test_looks_count_as_long_as_they_say_the_same() -> None:
    seen = look(None, 1.0, power_on=False)
    seen = look(seen, 6.0, power_on=False)
    assert seen.twice(power_on=False)
    assert not seen.twice(power_on=False, after_s=2.0)
    seen = look(seen, 7.0, power_on=None, why="busy")
    assert not look(seen, 12.0, power_on=False).twice(power_on=False)


class Walk(RuleBasedStateMachine):
    """A world that does what it likes. Kept by hand beside it: what must have been true for each order."""

    hosts = {"n1": ONE, "n2": replace(BOTH, stagger_s=25.0)}

    @initialize()
    def begin(self) -> None:
        self.world = SentinelWorld(now_s=0.0, hosts=self.hosts, supplies={"a": BAD, "b": BAD})
        self.orders: list[tuple[float, PowerOnOrder]] = []
        self.looked: dict[str, list[tuple[float, bool | None]]] = {name: [] for name in self.hosts}
        self.dark: dict[str, float] = dict.fromkeys("ab", 0.0)
        self.on_s: dict[str, float] = {}

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0, 70.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.world = replace(self.world, now_s=self.world.now_s + seconds)
        self._mind_the_dark()

    def _mind_the_dark(self) -> None:
        """Until when each UPS gave no utility."""
        for ups, supply in self.world.supplies.items():
            if supply.utility_since_s is None:
                self.dark[ups] = self.world.now_s

    @rule(ups=st.sampled_from("ab"), good=st.booleans())
    def supply_changes(self, ups: str, good: bool) -> None:
        self._mind_the_dark()
        if good == self.world.supplies[ups].good:
            return
        result = UpsSupply(good=True, utility_since_s=self.world.now_s) if good else BAD
        self.world = replace(self.world, supplies={**self.world.supplies, ups: result})

    @rule(host=st.sampled_from(["n1", "n2"]), power_on=st.sampled_from([True, False, False, False, None]))
    def bmc_is_looked_at(self, host: str, power_on: bool | None) -> None:
        now_s = self.world.now_s
        self.looked[host].append((now_s, power_on))
        self.world = replace(
            self.world, seen={**self.world.seen, host: look(self.world.seen.get(host), now_s, power_on=power_on)}
        )

    @rule(host=st.sampled_from(["n1", "n2"]), text=st.sampled_from(["off", "on", "off on", "off on off"]))
    def bmc_says_each_for_a_while(self, host: str, text: str) -> None:
        for word in text.split():
            for seconds in (60.0, 6.0):
                self.time_passes(seconds)
                self.bmc_is_looked_at(host, power_on=word == "on")
                self.sentinel_decides()

    @rule(
        host=st.sampled_from(["n1", "n2"]),
        outage=st.sampled_from(["o1", "o2"]),
        in_s=st.sampled_from([0.0, 20.0]),
        valid_s=st.sampled_from([60.0, 4000.0]),
    )
    def host_asks(self, host: str, outage: str, in_s: float, valid_s: float) -> None:
        now_s = self.world.now_s
        new = Intent(
            host=host,
            outage=outage,
            boot_id="b",
            feeds=self.hosts[host].feeds,
            stored_s=now_s,
            not_before_s=now_s + in_s,
            expires_s=now_s + valid_s,
        )
        self.on_s.pop(host, None)
        old = self.world.intents.get(host)
        self.world = replace(self.world, intents={**self.world.intents, host: stored(old, new)})

    @rule(host=st.sampled_from(["n1", "n2"]))
    def host_withdraws(self, host: str) -> None:
        self._drop(host)

    def _drop(self, host: str) -> None:
        left = {name: intent for name, intent in self.world.intents.items() if name != host}
        self.world = replace(self.world, intents=left)

    @rule()
    def sentinel_decides(self) -> None:
        world = self.world = after(self.world)
        decision = decide(world)
        for host, intent in world.intents.items():
            looks = self.looked[host]
            begin_s = max(intent.stored_s, -1.0 if intent.tried_s is None else intent.tried_s)
            since = [at_s for number, (at_s, _) in enumerate(looks) if all(on for _, on in looks[number:])]
            if intent.was_off and len(since) > 1 and since[-1] - max(since[0], begin_s) >= APART_S:
                self.on_s[host] = since[-1]
        assert set(decision.waits) | {end.host for end in decision.ends} | (
            {decision.order.host} if decision.order else set()
        ) == set(world.intents)
        for end in decision.ends:
            self._drop(end.host)
        if decision.order is None:
            return
        intent = world.intents[decision.order.host]
        self._check(world, decision.order, intent)
        self.on_s.pop(decision.order.host, None)
        self.orders.append((world.now_s, decision.order))
        self.world = replace(
            self.world,
            intents={**self.world.intents, intent.host: ordered(intent, world.now_s)},
            last_order_s=world.now_s,
        )

    def _check(self, world: SentinelWorld, order: PowerOnOrder, intent: Intent) -> None:
        rules, now_s = self.hosts[order.host], world.now_s
        assert intent.not_before_s <= now_s < intent.expires_s
        assert all(world.supplies[name].good for name in rules.feeds)
        last, before = self.looked[order.host][-1], self.looked[order.host][-2]
        assert (last[1], before[1]) == (False, False), "two looks in a row"
        assert now_s - last[0] <= FRESH_S
        assert last[0] >= intent.stored_s + APART_S
        assert intent.tries < MAX_TRIES
        if self.orders:
            assert now_s - self.orders[-1][0] >= rules.stagger_s
        if intent.tried_s is not None:
            assert now_s - intent.tried_s >= BACK_OFF_S[intent.tries - 1]
            assert last[0] > intent.tried_s
        if order.host in self.on_s:
            assert any(self.dark[name] > self.on_s[order.host] for name in rules.feeds), "no hand is fought"

    @invariant()
    def the_same_world_has_the_same_answer(self) -> None:
        assert decide(self.world) == decide(self.world)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
