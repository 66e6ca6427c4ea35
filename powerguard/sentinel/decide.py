"""Which host is powered on now, and which intent has ended: a pure function of what is stored, read and looked at.

It reads no clock and has no effects; the same world gives the same answer. Times are seconds of this boot's
CLOCK_BOOTTIME.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

MAX_TRIES: Final = 3
BACK_OFF_S: Final = (60.0, 300.0, 300.0)
"""Time from each try to the next, and from the last to giving up: some boards report only after a minute."""
APART_S: Final = 5.0
"""Two looks at a BMC that are this far apart are two; one alone may be a BMC that has just started."""
FRESH_S: Final = 20.0
"""An older look is not what a host is powered on for."""
LOOK_AHEAD: Final = 8
"""Most hosts whose BMCs are polled every few seconds: the next ones in line, never all at once."""
JUST_ORDERED_S: Final = 30.0
"""Time after an order in which the host is looked at as often, to see whether it came on."""
STILL_ON_S: Final = 600.0
"""How long an intent stays valid for a host that is on: its boot may meet the next cut, or it may still be stopping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRules:
    """The settings of a host. feeds: the UPS of each of its power supplies; one UPS may occur twice.

    minimum_supplies: power supplies that must have power. stagger_s: from the last order to any host to this one's.
    """

    feeds: tuple[str, ...]
    minimum_supplies: int
    stagger_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A host's request, made before it went off, to be powered on again. One for each host.

    stored_s: when it came, so the host was on; earlier answers of its BMC do not count. not_before_s, expires_s:
    moments of the same clock, the sentinel's own: the host has sent seconds, not times. tries: orders given; tried_s:
    when the last one was. was_off: the BMC has said twice that the host is off. on_since_s, on_at_s: first and last of
    the looks that have said that it is on again, since it was off and since the last order; None: none has, twice.
    """

    host: str
    outage: str
    boot_id: str
    feeds: tuple[str, ...]
    stored_s: float
    not_before_s: float
    expires_s: float
    tries: int = 0
    tried_s: float | None = None
    was_off: bool = False
    on_since_s: float | None = None
    on_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpsSupply:
    """Whether a UPS is good now. why: what is wrong with it, where it is not good.

    utility_since_s: since when it has had utility, without a break. None: it has not now, or it is unknown.
    """

    good: bool
    why: str = ""
    utility_since_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The results of consecutive looks at a host's BMC.

    power_on: None where the last look has failed; why says how. since_s: first of the looks that said so; at_s: the
    last one; looks: how many.
    """

    power_on: bool | None
    since_s: float
    at_s: float
    looks: int = 1
    why: str = ""

    def twice(self, *, power_on: bool, after_s: float = -float("inf")) -> bool:
        """Say whether two looks, far enough apart and none before after_s, have said it and nothing else."""
        return self.power_on is power_on and self.looks >= 2 and self.at_s - max(self.since_s, after_s) >= APART_S


def look(seen: Seen | None, at_s: float, *, power_on: bool | None, why: str = "") -> Seen:
    """Enter one look at a BMC."""
    if seen is None or seen.power_on is not power_on:
        return Seen(power_on=power_on, since_s=at_s, at_s=at_s, why=why)
    return Seen(power_on=power_on, since_s=seen.since_s, at_s=at_s, looks=seen.looks + 1, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelWorld:
    """Everything that is decided by. hosts: in the order in which they are powered on, where several are due."""

    now_s: float
    hosts: Mapping[str, HostRules]
    supplies: Mapping[str, UpsSupply]
    intents: Mapping[str, Intent] = field(default_factory=dict)
    seen: Mapping[str, Seen] = field(default_factory=dict)
    last_order_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOnOrder:
    """Power this host on. number: which try it is, from 1."""

    host: str
    outage: str
    number: int


class Ending(StrEnum):
    """How an intent ends. `ALARMS` are those that a person must look at."""

    POWERED_ON = "powered_on"
    CAME_BACK = "came_back"
    STAYED_ON = "stayed_on"
    SWITCHED_OFF = "switched_off"
    WITHDRAWN = "withdrawn"
    REPLACED = "replaced"
    EXPIRED = "expired"
    GAVE_UP = "gave_up"
    HOST_UNKNOWN = "host_unknown"
    RECORDED = "recorded"
    """Dry-run: the order was only written down."""


ALARMS: Final = frozenset((Ending.EXPIRED, Ending.GAVE_UP, Ending.HOST_UNKNOWN))


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """An intent ends. because: one line for people."""

    host: str
    outage: str
    how: Ending
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """order: at most one at a time. waits: why each other intent waits. looks: whose BMC is to be looked at soon."""

    order: PowerOnOrder | None
    ends: tuple[End, ...]
    waits: Mapping[str, str]
    looks: frozenset[str]


def decide(world: SentinelWorld) -> Decision:
    """Decide. Without a stored intent there is no order in any case.

    The intents are as `noted` has left them in this same world.
    """
    ends: list[End] = []
    waits: dict[str, str] = {}
    looks: set[str] = set()
    order: PowerOnOrder | None = None
    for intent in _in_order(world):
        end = _ended(world, intent)
        if end is not None:
            ends.append(end)
            continue
        why = _waits(world, intent)
        if len(looks) < LOOK_AHEAD and _worth_a_look(world, intent, is_due=not why):
            looks.add(intent.host)
        why = why or _not_seen_off(world, intent) or _staggered(world, intent)
        if not why and order is None:
            order = PowerOnOrder(host=intent.host, outage=intent.outage, number=intent.tries + 1)
            continue
        waits[intent.host] = why or "another host is powered on first"
    return Decision(order=order, ends=tuple(ends), waits=waits, looks=frozenset(looks))


def ordered(intent: Intent, now_s: float) -> Intent:
    """Enter that an order for it is about to be given: before it is, so that no crash makes it one more."""
    return replace(intent, tries=intent.tries + 1, tried_s=now_s, was_off=True, on_since_s=None, on_at_s=None)


def noted(world: SentinelWorld, intent: Intent) -> Intent:
    """Enter what its BMC has said, as far as it must be known once the BMC gives another answer, or none."""
    seen = world.seen.get(intent.host)
    if seen is None:
        return intent
    if is_off(seen, intent):
        back = intent if _is_left_off(world, intent, seen) else replace(intent, on_since_s=None, on_at_s=None)
        return replace(back, was_off=True)
    tried_s = -math.inf if intent.tried_s is None else intent.tried_s
    if intent.was_off and seen.twice(power_on=True, after_s=tried_s):
        since_s = seen.since_s if intent.on_since_s is None else intent.on_since_s
        return replace(intent, on_since_s=since_s, on_at_s=seen.at_s)
    return intent


def stored(old: Intent | None, new: Intent) -> Intent:
    """Take a host's newest word. Of the same outage it changes the times, and what was tried still counts."""
    if old is None or (old.outage, old.boot_id) != (new.outage, new.boot_id):
        return new
    return replace(new, tries=old.tries, tried_s=old.tried_s)


def is_off(seen: Seen | None, intent: Intent) -> bool:
    """Say whether the host's BMC has said twice that it is off, since it has asked."""
    return seen is not None and seen.twice(power_on=False, after_s=intent.stored_s)


def missing(host: HostRules, feeds: Iterable[str]) -> str:
    """Return how a host's feeds differ from those that it has here; empty where they do not."""
    theirs, ours = set(feeds), set(host.feeds)
    if theirs == ours:
        return ""
    return f"the host is fed by {', '.join(sorted(theirs))}; here its feeds are {', '.join(sorted(ours))}"


def _in_order(world: SentinelWorld) -> list[Intent]:
    known = [world.intents[name] for name in world.hosts if name in world.intents]
    return [*known, *(intent for name, intent in world.intents.items() if name not in world.hosts)]


def _ended(world: SentinelWorld, intent: Intent) -> End | None:
    how = _how_ended(world, intent)
    if how is None:
        return None
    return End(host=intent.host, outage=intent.outage, how=how[0], because=how[1])


_GAVE_UP: Final = (
    f"{MAX_TRIES} orders are given, and it is not on: they had no effect, or it went off again after each; power it on "
    "by hand"
)


def _how_ended(world: SentinelWorld, intent: Intent) -> tuple[Ending, str] | None:
    now_s, seen = world.now_s, world.seen.get(intent.host)
    if intent.host not in world.hosts:
        return Ending.HOST_UNKNOWN, "the settings no longer have this host"
    if seen is not None and seen.power_on:
        return _how_ended_on(intent, seen, is_over=now_s >= intent.expires_s)
    if seen is not None and _is_left_off(world, intent, seen):
        return Ending.SWITCHED_OFF, "it was on again, and went off on utility: it stays off"
    if now_s >= intent.expires_s:
        return Ending.EXPIRED, "it was not powered on within the time that the host had set: power it on by hand"
    if intent.tries >= MAX_TRIES and now_s - (intent.tried_s or 0.0) >= BACK_OFF_S[-1]:
        return Ending.GAVE_UP, _GAVE_UP
    return None


def _how_ended_on(intent: Intent, seen: Seen, *, is_over: bool) -> tuple[Ending, str] | None:
    """The intent of a host that is on ends when its time is over; until then the next cut may meet its boot."""
    if intent.on_since_s is not None:
        if not is_over and seen.at_s - intent.on_since_s < STILL_ON_S:
            return None
        if intent.tries:
            return Ending.POWERED_ON, f"its BMC reports it as on, after {intent.tries} of {MAX_TRIES} orders"
        return Ending.CAME_BACK, "it was off, and came on without an order"
    if seen.looks >= 2 and (is_over or seen.at_s - max(seen.since_s, intent.not_before_s) >= STILL_ON_S):
        return Ending.STAYED_ON, f"its BMC reports it as on, {STILL_ON_S:g} s after it should have been off"
    return None


def _is_left_off(world: SentinelWorld, intent: Intent, seen: Seen) -> bool:
    """Say whether it was on again and was then switched off, by hand or by itself: since then its power has not failed.

    If that is unknown, because a UPS was not read or the sentinel was down, the intent remains.
    """
    if intent.on_at_s is None or not is_off(seen, intent):
        return False
    host = world.hosts[intent.host]
    feed_since_s = (_supply(world, name).utility_since_s for name in host.feeds)
    since_s = sorted(each for each in feed_since_s if each is not None)
    return len(since_s) >= host.minimum_supplies and since_s[host.minimum_supplies - 1] <= intent.on_at_s


def _waits(world: SentinelWorld, intent: Intent) -> str:
    """Why an intent waits, independent of its BMC; empty if it does not."""
    host = world.hosts[intent.host]
    if world.now_s < intent.not_before_s:
        return f"not for another {intent.not_before_s - world.now_s:.0f} s, as the host has asked"
    differ = missing(host, intent.feeds)
    if differ:
        return differ
    bad = [name for name in host.feeds if not _supply(world, name).good]
    good = len(host.feeds) - len(bad)
    if good < host.minimum_supplies:
        reasons = "; ".join(f"{name}: {_supply(world, name).why}" for name in dict.fromkeys(bad))
        return f"{good} of {host.minimum_supplies} supplies have stable power ({reasons})"
    if intent.tries >= MAX_TRIES:
        return f"all of {MAX_TRIES} orders are given"
    if intent.tries and intent.tried_s is not None:
        rest_s = intent.tried_s + BACK_OFF_S[intent.tries - 1] - world.now_s
        if rest_s > 0.0:
            return f"order {intent.tries} is given; the next in {rest_s:.0f} s, unless it comes up"
    return ""


def _not_seen_off(world: SentinelWorld, intent: Intent) -> str:
    seen = world.seen.get(intent.host)
    if seen is None:
        return "its BMC was not polled yet"
    if seen.power_on is None:
        return seen.why or "its BMC does not report whether it is on"
    if seen.power_on:
        return "its BMC reports it as on"
    if world.now_s - seen.at_s > FRESH_S or not is_off(seen, intent):
        return "its BMC reports it as off; one more poll confirms it"
    return ""


def _worth_a_look(world: SentinelWorld, intent: Intent, *, is_due: bool) -> bool:
    """Say whether the next look is what it waits for: not of a BMC that is dead, nor of a host that just stays on."""
    seen = world.seen.get(intent.host)
    if intent.tried_s is not None and world.now_s - intent.tried_s <= JUST_ORDERED_S:
        return seen is not None and seen.power_on is not None
    if not is_due:
        return False
    return seen is None or seen.power_on is False or (seen.power_on is True and seen.at_s < intent.not_before_s)


def _staggered(world: SentinelWorld, intent: Intent) -> str:
    if world.last_order_s is None:
        return ""
    rest_s = world.last_order_s + world.hosts[intent.host].stagger_s - world.now_s
    return f"staggered: another host was powered on just now; in {rest_s:.0f} s" if rest_s > 0.0 else ""


def _supply(world: SentinelWorld, name: str) -> UpsSupply:
    return world.supplies.get(name) or UpsSupply(good=False, why="it is not read")
