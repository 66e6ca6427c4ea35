"""The sentinel: watches UPSes and BMCs, keeps intents, and powers hosts on when `decide` says so.

Whether a UPS is good to power a host on from is decided by the core's own fusion of its sources.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import structlog

from powerguard.clock import Clock, boot_id, boottime_s
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Feed, Supply
from powerguard.core.supply.fusion import is_fresh, is_stable, lose, observe, plausible
from powerguard.daemon.attempt import keep_running
from powerguard.daemon.wiring import source_of
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.engine import BmcError, Refusals, hasten
from powerguard.effectors.bmc.ipmi import Failure
from powerguard.effectors.bmc.power import Power, power_of
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.sentinel import protocol as wire
from powerguard.sentinel import decide
from powerguard.sentinel.decide import Decision, End, Ending, HostRules, Intent, PowerOnOrder, Seen, SentinelWorld
from powerguard.sentinel.options import SentinelHost, SentinelSettings
from powerguard.sentinel.server import Answer, refusal
from powerguard.sentinel.store import Clocks, IntentStore, IntentTable
from powerguard.settings.schema import SourceOptions
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.apcupsd.source import SLOW_S
from powerguard.ups.base import Source
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.source import LONGEST, poll_limit_s

_MISSES: Final = 3


def policy_of(ups: str, sources: list[SourceOptions]) -> Policy:
    """Return as much of a policy as fusion needs."""
    return Policy(boot_id="", ups=ups, sources=len(sources), stale_s=max(map(_silent_after_s, sources)))


def _silent_after_s(source: SourceOptions) -> float:
    """Return the age from which a reading shows a silence: more than the source needs while it reports no failure."""
    stale_s = _MISSES * max(1.0, source.poll_s + source.timeout_s)
    match source:
        case SnmpOptions():
            return max(stale_s, LONGEST * source.poll_s + poll_limit_s(source))
        case ApcupsdOptions():
            return max(stale_s, _MISSES * SLOW_S)
        case _:
            return stale_s


def enter(policy: Policy, feed: Feed, event: Reading | SourceFailed) -> Feed:
    """Enter a reading or a failed poll. After a silence earlier readings do not count: utility must be stable again."""
    if isinstance(event, SourceFailed):
        feed = lose(policy, feed, event)
        return feed if feed.lost_since_s is None else Feed(lost_since_s=feed.lost_since_s)
    last = feed.reading
    if last is not None and event.at_s - last.at_s > policy.stale_s:
        feed = Feed()
    return observe(policy, feed, plausible(event))


def unread(policy: Policy, feed: Feed, now_s: float) -> str:
    """Return why the UPS's state is unknown; empty if it is read."""
    if feed.reading is None:
        return "not read" if feed.lost_since_s is None else f"not read for {now_s - feed.lost_since_s:.0f} s"
    return "" if is_fresh(policy, feed, now_s) else f"not read for {now_s - feed.reading.at_s:.0f} s"


def supply(policy: Policy, feed: Feed, now_s: float, *, stable_s: float, charge_pct: float) -> decide.UpsSupply:
    """Say what the UPS is good for. stable_s: how long utility must hold; charge_pct: what the battery must hold."""
    why = _absent(policy, feed, now_s)
    if why:
        return decide.UpsSupply(good=False, why=why)
    why = _wanting(policy, feed, now_s, stable_s, charge_pct)
    return decide.UpsSupply(good=not why, why=why, utility_since_s=feed.since_s)


def _absent(policy: Policy, feed: Feed, now_s: float) -> str:
    """Why what hangs on it may have no power, now or in a moment; empty where utility is there."""
    reading = feed.reading
    if (why := unread(policy, feed, now_s)) or reading is None:
        return why
    if feed.countdown_at_s is not None or _counts_down(feed, reading):
        return "a countdown to output off runs"
    if feed.fsd_at_s is not None or reading.forced_shutdown:
        return "a forced shutdown is set (NUT: FSD)"
    if feed.supply is not Supply.UTILITY or feed.suspect:
        return _NO_UTILITY.get(reading.output_source, f"on {reading.output_source}")
    return ""


_NO_UTILITY: Final = {
    OutputSource.OFF: "its output is off",
    OutputSource.UNKNOWN: "does not report what its output comes from",
}


def _wanting(policy: Policy, feed: Feed, now_s: float, stable_s: float, charge_pct: float) -> str:
    """Why it is not good though utility is there."""
    charge = None if feed.reading is None else feed.reading.charge_pct
    if not is_stable(policy, feed, now_s, stable_s=stable_s):
        return f"on utility for {max(now_s - feed.since_s, 0.0):.0f} of {stable_s:g} s"
    if charge_pct > 0.0 and charge is None:
        return "does not report its charge (set charge_pct: 0 to ignore it)"
    if charge is not None and charge < charge_pct:
        return f"charge {charge:.0f} of {charge_pct:g} %"
    return ""


def _counts_down(feed: Feed, reading: Reading) -> bool:
    """A delay that is only set stands still; until that is seen it may as well run."""
    if reading.output_off_in_s is None:
        return False
    last = feed.previous
    return last is None or last.output_off_in_s is None or reading.output_off_in_s < last.output_off_in_s


log = structlog.get_logger()

TICK_S: Final = 1.0
LOOK_SOON_S: Final = 5.0
LOOK_INTENT_S: Final = 60.0
LOOK_IDLE_S: Final = 300.0
LOOK_LIMIT_S: Final = 12.0
"""Old boards take 6 to 10 s for a login. Two looks LOOK_SOON_S apart are both still fresh (`decide.FRESH_S`)."""
LOOKS_AT_ONCE: Final = 4
"""Over IPMI each is a process of its own (34 MB). As many again for hosts that are due: a dead BMC delays no other."""
ORDER_LIMIT_S: Final = 15.0
DISK_LIMIT_S: Final = 3.0
GRACE_S: Final = 600.0
"""An intent stands at least this long past its not-before, whatever it asks for."""


@dataclass(kw_only=True)
class SentinelPorts:
    """The sentinel's interfaces to the world; tests replace them.

    wall: only for the times in the file, from one boot to the next. pace: how much faster clock runs than the loop.
    refusals: logins that BMCs have refused. left_off: hosts whose intent ended although they are not on, until they are
    on. Both outlive a reload.
    """

    clock: Clock = boottime_s
    wall: Callable[[], float]
    boot: Callable[[], str] = boot_id
    spawn: Spawn = run_child
    pace: float = 1.0
    sources: Callable[[SentinelSettings, Clock], list[tuple[str, Source]]] | None = None
    power: Callable[[str, SentinelHost], Power] | None = None
    refusals: Refusals = field(default_factory=dict)
    left_off: set[str] = field(default_factory=set)


def _sources(settings: SentinelSettings, clock: Clock) -> list[tuple[str, Source]]:
    return [(ups, source_of(each, ups, clock)) for ups, options in settings.ups.items() for each in options.sources]


class Sentinel:
    """One sentinel. keeper: the intents. seen: what BMCs have said. waits: why each intent waits.

    orders: (host, "ordered", "failed" or "recorded"); ends: (host, `Ending`); turned_s: when it has decided last.
    """

    def __init__(self, settings: SentinelSettings, keeper: IntentStore, ports: SentinelPorts) -> None:
        self.settings = settings
        self.keeper = keeper
        self.clock = ports.clock
        self.wall = ports.wall
        self.hosts: dict[str, HostRules] = {name: host.rules for name, host in settings.hosts.items()}
        self.seen: dict[str, Seen] = {}
        self.waits: Mapping[str, str] = {}
        self.orders: Counter[tuple[str, str]] = Counter()
        self.ends: Counter[tuple[str, str]] = Counter()
        self.left_off = ports.left_off
        self.turned_s = ports.clock()
        self._hands = ports
        self._policies = {name: policy_of(name, options.sources) for name, options in settings.ups.items()}
        self._feeds = dict.fromkeys(settings.ups, Feed())
        make = ports.power or (
            lambda _, host: power_of(host.bmc, spawn=ports.spawn, clock=ports.clock, refusals=ports.refusals)
        )
        self._power = {name: make(name, host) for name, host in settings.hosts.items()}
        self._looks: frozenset[str] = frozenset()
        self._bells = {name: asyncio.Event() for name in settings.hosts}
        self._news = asyncio.Event()
        self._gates = {is_due: asyncio.Semaphore(LOOKS_AT_ONCE) for is_due in (False, True)}
        self._logged: dict[tuple[str, str], str] = {}
        keeper.apply(lambda table: table.only(self.hosts))

    def tasks(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """Return the permanent tasks, by name."""
        found: dict[str, Callable[[], Awaitable[object]]] = {"intents": self.keeper.run, "decisions": self._decide}
        for number, (ups, source) in enumerate((self._hands.sources or _sources)(self.settings, self.clock)):
            found[f"source {number} of {ups}"] = partial(source.run, self._publish)
        return found | {f"looks at {name}": partial(self._look, name) for name in self.settings.hosts}

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, each in self.tasks().items():
                tasks.create_task(keep_running(name, each))

    # --- What comes in ----------------------------------------------------------------------------------------------

    def _publish(self, event: Reading | SourceFailed) -> None:
        whose = f"{event.ups} {event.source}"
        if isinstance(event, Reading):
            if self._logged.pop(("source", whose), ""):
                log.info("source_recovered", ups=event.ups, source=event.source, because="it is read again")
        elif event.lost and self._is_news("source", whose, event.reason):
            log.warning("source_lost", ups=event.ups, source=event.source, because=event.reason)
        if event.ups in self._feeds:
            self._feeds[event.ups] = enter(self._policies[event.ups], self._feeds[event.ups], event)

    async def _look(self, name: str) -> None:
        while True:
            gate = await self._turn_of(name)
            try:
                power_on, why = await self._ask(name)
            finally:
                gate.release()
            before = self.seen.get(name)
            self.seen[name] = decide.look(before, self.clock(), power_on=power_on, why=why)
            if power_on is None:
                if self._is_news("bmc", name, why):
                    log.warning("bmc_silent", host=name, because=why)
            elif self._logged.pop(("bmc", name), ""):
                log.info("bmc_back", host=name, because="its BMC answers again")
            if power_on:
                self.left_off.discard(name)
            self._news.set()
            looked_s = self.clock()
            while (left_s := looked_s + self._look_every_s(name) - self.clock()) > 0.0:
                self._bells[name].clear()
                await self._rest(self._bells[name], left_s)

    async def _turn_of(self, name: str) -> asyncio.Semaphore:
        """Wait for a place among those who look, in the line that is this host's by now. The caller gives it back.

        It keeps its place in a line: hundreds of dead BMCs may be in front of it.
        """
        bell = self._bells[name]
        while True:
            is_due = name in self._looks
            async with asyncio.TaskGroup() as tasks:
                place = tasks.create_task(self._gates[is_due].acquire())
                place.add_done_callback(lambda _: bell.set())
                while not place.done() and (name in self._looks) is is_due:
                    bell.clear()
                    await bell.wait()
                place.cancel()
            if not place.cancelled():
                return self._gates[is_due]

    async def _ask(self, name: str) -> tuple[bool | None, str]:
        power = self._power[name]
        if name in self.keeper.table.intents:
            hasten(self._hands.refusals, power.where)
        try:
            async with asyncio.timeout(LOOK_LIMIT_S + 1.0):
                power_on = (await power.status(boottime_s() + LOOK_LIMIT_S)).power_on
        except EffectorError as error:
            return None, str(error)
        except TimeoutError:
            return None, f"{power.where}: no answer"
        return power_on, "" if power_on is not None else f"{power.where}: does not report whether the host is on"

    def _look_every_s(self, name: str) -> float:
        if name in self._looks:
            return LOOK_SOON_S
        return LOOK_INTENT_S if name in self.keeper.table.intents else LOOK_IDLE_S

    # --- What is decided --------------------------------------------------------------------------------------------

    async def _decide(self) -> None:
        while True:
            await self.turn()
            self._news.clear()
            await self._rest(self._news, TICK_S)

    async def turn(self) -> None:
        """Decide once, and carry it out."""
        self.turned_s = self.clock()
        self._note()
        world = self.world()
        decision = decide.decide(world)
        for end in decision.ends:
            self._end(end)
        self._log_changes(world, decision)
        changed = self._looks ^ decision.looks
        self._looks = decision.looks
        for name in changed:
            self._bells[name].set()
        if decision.order is not None:
            await self._order(decision.order)

    def world(self) -> SentinelWorld:
        """Return everything that is decided by, as it is now."""
        now_s, settings, table = self.clock(), self.settings, self.keeper.table
        stable_s, charge_pct = settings.utility_stable_s, settings.charge_pct
        return SentinelWorld(
            now_s=now_s,
            hosts=self.hosts,
            supplies={
                name: supply(self._policies[name], feed, now_s, stable_s=stable_s, charge_pct=charge_pct)
                for name, feed in self._feeds.items()
            },
            intents=table.intents,
            seen=dict(self.seen),
            last_order_s=table.last_order_s,
        )

    def _note(self) -> None:
        """Keep what BMCs have said of hosts whose intents stand."""
        world = self.world()
        for name, intent in world.intents.items():
            if name not in world.hosts:
                continue
            noted = decide.noted(world, intent)
            if noted == intent:
                continue
            self.keeper.apply(partial(IntentTable.put, intent=noted))
            if noted.was_off and not intent.was_off:
                log.info("host_off_seen", host=name, outage=intent.outage)
            elif noted.on_since_s is not None and intent.on_since_s is None:
                log.info("host_on_seen", host=name, outage=intent.outage, stands_s=decide.STILL_ON_S)
            elif noted.on_since_s is None and intent.on_since_s is not None:
                because = "it was on again, and its power may have failed since then"
                log.warning("host_off_again", host=name, outage=intent.outage, because=because)

    def _end(self, end: End) -> None:
        self.keeper.apply(lambda table: table.drop(end.host))
        self._logged.pop(("wait", end.host), None)
        self.ends[end.host, end.how.value] += 1
        if end.how in decide.ALARMS:
            self.left_off.add(end.host)
        log_event = log.error if end.how in decide.ALARMS else log.info
        log_event("intent_ended", host=end.host, outage=end.outage, how=end.how.value, because=end.because)

    def _log_changes(self, world: SentinelWorld, decision: Decision) -> None:
        """Log what a UPS is good for and why a host waits: when it is another reason, not when its seconds are."""
        self.waits = decision.waits
        for name, each in world.supplies.items():
            if self._is_news("supply", name, each.why):
                log.info("supply_changed", ups=name, good=each.good, because=each.why or "utility holds")
        for name in world.intents:
            why = decision.waits.get(name, "")
            if self._is_news("wait", name, why) and why:
                log.info("power_on_waits", host=name, because=why)

    def _is_news(self, kind: str, name: str, why: str) -> bool:
        text = re.sub(r"\d+", "", why)
        is_news = self._logged.get((kind, name)) != text
        self._logged[kind, name] = text
        return is_news

    async def _order(self, order: PowerOnOrder) -> None:
        """Power one host on. The try is on disk before it, as far as there is a disk."""
        before = self.world()
        intent, now_s = before.intents[order.host], before.now_s
        if self.settings.mode == "dry-run":
            self.orders[order.host, "recorded"] += 1
            because = "dry-run: it would have been powered on now"
            self._end(End(host=order.host, outage=order.outage, how=Ending.RECORDED, because=because))
            return
        tried = decide.ordered(intent, now_s)
        self.keeper.apply(partial(_at, tried, now_s))
        error = await self.keeper.flush(DISK_LIMIT_S)
        if error:
            log.error("order_unwritten", host=order.host, outage=order.outage, because=error)
        # While the disk was at work the host may have come up and taken its word back, or utility have gone again.
        now = replace(self.world(), intents={order.host: intent}, last_order_s=before.last_order_s)
        if self.keeper.table.intents.get(order.host) != tried or decide.decide(now).order != order:
            log.warning(
                "power_on_withheld", host=order.host, outage=order.outage, because="its conditions have changed"
            )
            return
        # From here the next try and the next host are counted: the disk may have taken its time.
        now_s = self.clock()
        self.keeper.apply(partial(_at, replace(tried, tried_s=now_s), now_s))
        power = self._power[order.host]
        try:
            async with asyncio.timeout(ORDER_LIMIT_S + 1.0):
                await power.power_on(boottime_s() + ORDER_LIMIT_S)
        except (EffectorError, TimeoutError) as failed:
            because = str(failed) or f"{power.where}: no answer"
            self.orders[order.host, "failed"] += 1
            if isinstance(failed, BmcError) and failed.failure is not Failure.TIMEOUT:
                self._refused(replace(tried, tried_s=now_s))
            log.error("power_on_failed", host=order.host, outage=order.outage, number=order.number, because=because)  # noqa: TRY400 - reported in full
        else:
            self.orders[order.host, "ordered"] += 1
            because = "utility is stable on its feeds, and its BMC reports it as off"
            log.info("power_on_ordered", host=order.host, outage=order.outage, number=order.number, because=because)

    def _refused(self, tried: Intent) -> None:
        """Give the last try again, since the order had no effect: a BMC may refuse for long after a power cut."""
        if tried.tries == decide.MAX_TRIES and self.keeper.table.intents.get(tried.host) == tried:
            self.keeper.apply(partial(IntentTable.put, intent=replace(tried, tries=decide.MAX_TRIES - 1)))

    async def _rest(self, bell: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds / self._hands.pace):
                await bell.wait()

    # --- What hosts ask ---------------------------------------------------------------------------------------------

    async def answer(self, kind: str, request: wire.Request) -> Answer:
        """Answer a host that has proven who it is."""
        self.left_off.discard(request.host)
        if kind != "hello":
            self.keeper.hear(request.host)
        match kind:
            case "store":
                return await self._store(request)
            case "withdraw":
                return await self._withdraw(request)
            case _:
                return 200, self._hello(request)

    async def _store(self, request: wire.Request) -> Answer:
        differ = decide.missing(self.hosts[request.host], request.feeds)
        if differ:
            return 409, refusal(f"{differ} (name the same UPSes on both sides)")
        now_s = self.clock()
        not_before_s = now_s + request.in_s
        intent = Intent(
            host=request.host,
            outage=request.outage,
            boot_id=request.boot_id,
            feeds=request.feeds,
            stored_s=now_s,
            not_before_s=not_before_s,
            expires_s=max(now_s + request.valid_s, not_before_s + GRACE_S),
        )
        old = self.keeper.table.intents.get(request.host)
        error = await self.keeper.commit(
            lambda table: table.put(decide.stored(table.intents.get(request.host), intent)), DISK_LIMIT_S
        )
        if error:
            log.error("intent_refused", host=request.host, outage=request.outage, because=error)
            return 503, refusal(f"not stored: {error}")
        if old is not None and old.outage != request.outage:
            self.ends[request.host, Ending.REPLACED.value] += 1
            self._logged.pop(("wait", request.host), None)
        log.info("intent_stored", host=request.host, outage=request.outage, in_s=request.in_s, valid_s=request.valid_s)
        self._bells[request.host].set()
        # What is read back is what stands in the table.
        held = self.keeper.table.intents.get(request.host, intent)
        return 200, {
            "object": "stored",
            "outage": held.outage,
            "in_s": round(held.not_before_s - now_s, 3),
            "valid_s": round(held.expires_s - now_s, 3),
            "mode": self.settings.mode,
        }

    async def _withdraw(self, request: wire.Request) -> Answer:
        was_there = self._end_withdrawn(request)
        error = await self.keeper.flush(DISK_LIMIT_S) if was_there or self.keeper.is_behind else ""
        if not error and self._end_withdrawn(request):  # the disk has taken an earlier request to store it only now
            was_there = True
            error = await self.keeper.flush(DISK_LIMIT_S)
        orders = self.keeper.table.orders(request.host, request.outage)
        if error:
            return 503, refusal(f"withdrawn, but it would be back after a restart: {error}")
        return 200, {"object": "withdrawn", "outage": request.outage, "was_there": was_there, "orders": orders}

    def _end_withdrawn(self, request: wire.Request) -> bool:
        """End the intent that the host withdraws; say whether there was one."""
        intent = self.keeper.table.intents.get(request.host)
        if intent is None or intent.outage != request.outage:
            return False
        because = "the host is up and has withdrawn it"
        self._end(End(host=request.host, outage=request.outage, how=Ending.WITHDRAWN, because=because))
        return True

    def _hello(self, request: wire.Request) -> dict[str, Any]:
        now_s, rules = self.clock(), self.hosts[request.host]
        world, seen = self.world(), self.seen.get(request.host)
        intent = world.intents.get(request.host)
        return {
            "object": "hello",
            "host": request.host,
            "mode": self.settings.mode,
            "blocked": list(self._blocked(request, rules, seen, now_s)),
            "feeds": {
                name: {"good": world.supplies[name].good, "why": world.supplies[name].why}
                for name in dict.fromkeys(rules.feeds)
            },
            "bmc": {
                "power_on": None if seen is None else seen.power_on,
                "looked_ago_s": None if seen is None else round(now_s - seen.at_s, 1),
            },
            "intent": None
            if intent is None
            else {
                "outage": intent.outage,
                "in_s": round(intent.not_before_s - now_s, 3),
                "valid_s": round(intent.expires_s - now_s, 3),
                "tries": intent.tries,
                "waits": self.waits.get(request.host, ""),
            },
        }

    def _blocked(self, request: wire.Request, rules: HostRules, seen: Seen | None, now_s: float) -> list[str]:
        """Why this host would not be powered on, as far as that can be known on any day."""
        found = []
        if self.settings.mode == "dry-run":
            found.append("it runs in dry-run (mode: armed powers hosts on)")
        if self.keeper.error:
            found.append(self.keeper.error)
        differ = decide.missing(rules, request.feeds)
        if differ:
            found.append(differ)
        unread = {name: why for name in rules.feeds if (why := self._unread(name, now_s))}
        if len(rules.feeds) - sum(name in unread for name in rules.feeds) < rules.minimum_supplies:
            found += [f"UPS {name}: {why}" for name, why in unread.items()]
        if seen is None or now_s - seen.at_s > 2.0 * LOOK_IDLE_S:
            found.append("it has not polled the BMC yet" if seen is None else "it cannot poll the BMC")
        elif seen.power_on is None:
            found.append(seen.why)
        return found

    def _unread(self, name: str, now_s: float) -> str:
        feed = self._feeds[name]
        why = unread(self._policies[name], feed, now_s)
        if why or feed.reading is None:
            return why
        if self.settings.charge_pct > 0.0 and feed.reading.charge_pct is None:
            return "does not report its charge (set charge_pct: 0 to ignore it)"
        # "On battery" is an outage, and passes; these may be so for ever, and no host would be powered on.
        return _NO_UTILITY.get(feed.reading.output_source, "")


def _at(tried: Intent, now_s: float, table: IntentTable) -> IntentTable:
    return replace(table.put(tried), last_order_s=now_s)


def moment_of(ports: SentinelPorts) -> Callable[[], Clocks]:
    """Return the present moment by every clock."""
    name = ports.boot()
    return lambda: Clocks(boot_id=name, boottime_s=ports.clock(), wall_s=ports.wall())
