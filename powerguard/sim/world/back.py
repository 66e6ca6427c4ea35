"""Power-on methods of a host: its clock, a sentinel, the BMC's watchdog, the UPS's output, and a late reboot.

`ReturnFacts` are what is installed and how it really behaves; `Back` is what is armed at the moment. The sentinel is
the real decision of `powerguard.sentinel`, asked when the simulated one would ask it.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict

from powerguard.core.model.actions import PowerOnMethod
from powerguard.sentinel import decide as sentinel
from powerguard.sim.world.chance import stream, uniform
from powerguard.sim.world.site import ReturnSite

STABLE_S = 10.0
"""Time of stable utility before a sentinel acts, as powerguard does."""
_FEED = "sim"
_HOST = "host"
_VALID_S = 30 * 86400.0
_ORDER_S = 0.3
_DISARMED_S = 30.0
"""Time from power-on to powerguard-disarm.service."""
_LOOK_S = 6.0
"""Between two looks of the sentinel at a BMC: more than what makes them two."""


class Waker(StrEnum):
    """The cause of a power-on. OUTPUT: AC's return after a cut that this host had ordered; POLICY: after any other."""

    REBOOT = "reboot"
    OUTPUT = PowerOnMethod.OUTPUT.value
    SENTINEL = PowerOnMethod.SENTINEL.value
    WATCHDOG = PowerOnMethod.WATCHDOG.value
    RTC = PowerOnMethod.RTC.value
    POLICY = "policy"
    PERSON = "person"
    ITSELF = "itself"
    """It has crashed, and had its power all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnFacts:
    """The power-on methods of one outage.

    output: what the UPS does when utility returns in a countdown that was ordered: cycles, aborts or stays_off; "":
    no program here can order one. declared: what its profile says of that. rtc, sentinel, watchdog: installed; each
    *_works: and does what it promises. late: a power-off may end in a reboot. lies: the BMC takes a policy and does not
    keep it. foreign_s: when another program stops the host, should it be on battery then; inf: never. shows: it shows
    the countdown that this host has ordered.

    At the loop level alone: bracket: the BMC's policy is another but for the outage. dry_run: so the host is set.
    called_off: who stops the host changes his mind.
    """

    output: str = ""
    declared: str = ""
    rtc: bool = False
    rtc_works: bool = True
    sentinel: bool = False
    sentinel_works: bool = True
    watchdog: bool = False
    watchdog_works: bool = True
    late: bool = False
    lies: bool = False
    foreign_s: float = math.inf
    shows: bool = True
    bracket: bool = False
    dry_run: bool = False
    called_off: bool = False

    @property
    def methods(self) -> tuple[PowerOnMethod, ...]:
        """The power-on methods that the settings of this host name."""
        present = {
            PowerOnMethod.OUTPUT: bool(self.output),
            PowerOnMethod.RTC: self.rtc,
            PowerOnMethod.SENTINEL: self.sentinel,
            PowerOnMethod.WATCHDOG: self.watchdog,
        }
        return tuple(method for method in PowerOnMethod if present[method])

    @property
    def broken(self) -> bool:
        """Say whether a clock, sentinel or watchdog that is named does not do what it promises."""
        works = {
            PowerOnMethod.RTC: self.rtc_works,
            PowerOnMethod.SENTINEL: self.sentinel_works,
            PowerOnMethod.WATCHDOG: self.watchdog_works,
        }
        return not all(works.get(method, True) for method in self.methods)


def draw_returns(seed: int, site: ReturnSite, *, faults: bool) -> ReturnFacts:
    """Draw what there is, and with faults what of it fails. A site that has nothing draws nothing."""
    if site == ReturnSite():
        return ReturnFacts()
    chance, broken = stream(seed, "ways back"), stream(seed, "ways back fail")
    has_output, which = chance.random() < site.output_share, chance.random()
    rtc, other, dog, late = (chance.random() for _ in range(4))
    fails = [faults and broken.random() < site.fails_share for _ in range(4)]
    foreign, foreign_s = broken.random(), uniform(broken, site.foreign_s)
    shares = ((site.aborts_share, "aborts"), (site.stays_off_share, "stays_off"))
    does, left = "cycles", which
    for share, word in shares:
        if left < share:
            does = word
            break
        left -= share
    unknown = chance.random() < site.unknown_share
    lies = stream(seed, "ways back, a policy that lies").random() < site.lies_share
    more = stream(seed, "ways back at the loop level")
    hidden, bracket, dry_run, called_off = (more.random() for _ in range(4))
    return ReturnFacts(
        output=does if has_output else "",
        declared="unknown" if unknown else does,
        rtc=rtc < site.rtc_share,
        rtc_works=not fails[0],
        sentinel=other < site.sentinel_share,
        sentinel_works=not fails[1],
        watchdog=dog < site.watchdog_share,
        watchdog_works=not fails[2],
        late=late < site.late_share,
        lies=lies or fails[3],
        foreign_s=foreign_s if faults and foreign < site.foreign_share else math.inf,
        shows=hidden >= site.hidden_share,
        bracket=bracket < site.bracket_share,
        dry_run=dry_run < site.dry_run_share,
        called_off=called_off < site.called_off_share,
    )


class PowerState(TypedDict):
    """State of host and UPS that the power-on methods depend on. utility_since_s: None without utility, or output."""

    is_on: bool
    utility_since_s: float | None
    off_since_s: float


class ArmedMethods:
    """What is armed. Times are the world's; inf: not armed."""

    def __init__(self, facts: ReturnFacts) -> None:
        self.facts = facts
        self.rtc_s = self.watchdog_s = self.reboot_s = math.inf
        self.losses = 0
        """So often the output has gone."""
        self.wakers: list[Waker] = []
        """Who has switched the host on, each time."""
        self._reboots_by = Waker.REBOOT
        self._intent: sentinel.Intent | None = None
        self._on_s = math.inf
        """When the host was switched on last."""

    def arm(self, method: PowerOnMethod, now_s: float, in_s: float) -> None:
        """Arm one; an output is the UPS's own matter."""
        match method:
            case PowerOnMethod.RTC:
                self.rtc_s = now_s + in_s
            case PowerOnMethod.WATCHDOG:
                self.watchdog_s = now_s + in_s
            case PowerOnMethod.SENTINEL:
                self._intent = sentinel.Intent(
                    host=_HOST,
                    outage="o",
                    boot_id="b",
                    feeds=(_FEED,),
                    stored_s=now_s,
                    not_before_s=now_s + in_s,
                    expires_s=now_s + _VALID_S,
                )
            case PowerOnMethod.OUTPUT:
                pass

    def disarm(self, method: PowerOnMethod) -> None:
        """Take it back."""
        match method:
            case PowerOnMethod.RTC:
                self.rtc_s = math.inf
            case PowerOnMethod.WATCHDOG:
                self.watchdog_s = math.inf
            case PowerOnMethod.SENTINEL:
                self._intent = None
            case PowerOnMethod.OUTPUT:
                pass

    @property
    def starts(self) -> int:
        """So often the host was switched on."""
        return len(self.wakers)

    def reboot(self, now_s: float, waker: Waker = Waker.REBOOT) -> None:
        """The host that is just off comes up again by itself: its power-off was made a reboot, or it was reset."""
        self.reboot_s, self._reboots_by = now_s + 0.01, waker

    def boots(self, now_s: float, waker: Waker) -> None:
        """The host comes up: what stops a watchdog that was left armed runs long before its daemon does."""
        self.wakers.append(waker)
        self._on_s = now_s
        if self.watchdog_s > now_s + _DISARMED_S:
            self.watchdog_s = math.inf

    def lose_power(self) -> None:
        """The output is gone, and with it what a BMC keeps in its memory."""
        self.watchdog_s = math.inf
        self.losses += 1

    @property
    def armed(self) -> tuple[PowerOnMethod, ...]:
        """What is armed; an output is the UPS's own matter."""
        states = {
            PowerOnMethod.RTC: self.rtc_s < math.inf, PowerOnMethod.SENTINEL: self._intent is not None,
            PowerOnMethod.WATCHDOG: self.watchdog_s < math.inf,
        }  # fmt: skip
        return tuple(method for method, is_armed in states.items() if is_armed)

    @property
    def idle(self) -> bool:
        """Nothing is armed."""
        return self._intent is None and self.rtc_s == self.watchdog_s == self.reboot_s == math.inf

    def next_s(self, *, is_on: bool, utility_since_s: float | None, off_since_s: float) -> float:
        """When something of it next acts; utility_since_s: None where the UPS has none, or gives no output."""
        if is_on:
            return min(self.rtc_s, self.watchdog_s)
        earliest_s = min(self.rtc_s, self.watchdog_s, self.reboot_s)
        if self._intent is None or utility_since_s is None or not self.facts.sentinel_works:
            return earliest_s
        seen_s = max(utility_since_s + STABLE_S, off_since_s, self._intent.not_before_s) + _LOOK_S
        tries, tried_s = self._intent.tries, self._intent.tried_s
        if tried_s is not None:
            seen_s = max(seen_s, tried_s + sentinel.BACK_OFF_S[tries - 1]) if tries < sentinel.MAX_TRIES else math.inf
        return min(earliest_s, seen_s + _ORDER_S)

    def acts(
        self, now_s: float, *, is_on: bool, powered: bool, utility_since_s: float | None, off_since_s: float
    ) -> Waker | None:
        """Do what is due; return who powers the host on. A clock without power at the board wakes no host."""
        waker: Waker | None = None
        if now_s >= self.reboot_s:
            self.reboot_s, waker = math.inf, self._reboots_by if powered else None
        if now_s >= self.rtc_s:
            self.rtc_s, wakes = math.inf, powered and not is_on and self.facts.rtc_works
            waker = waker or (Waker.RTC if wakes else None)
        if now_s >= self.watchdog_s:
            self.watchdog_s, wakes = math.inf, powered and self.facts.watchdog_works
            waker = waker or (Waker.WATCHDOG if wakes else None)
        if waker is None and not is_on and powered and utility_since_s is not None and self._intent is not None:
            waker = Waker.SENTINEL if self._sentinel_says_so(now_s, utility_since_s, off_since_s) else None
        return waker

    def _sentinel_says_so(self, now_s: float, utility_since_s: float, off_since_s: float) -> bool:
        intent = self._intent
        if intent is None or not self.facts.sentinel_works:
            return False
        if intent.tries and off_since_s - self._on_s >= sentinel.STILL_ON_S:
            self._intent = None
            return False
        since_s = max(off_since_s, intent.not_before_s, utility_since_s + STABLE_S)
        good = now_s - utility_since_s >= STABLE_S
        decision = sentinel.decide(
            sentinel.SentinelWorld(
                now_s=now_s,
                hosts={_HOST: sentinel.HostRules(feeds=(_FEED,), minimum_supplies=1, stagger_s=0.0)},
                supplies={_FEED: sentinel.UpsSupply(good=good, why="" if good else "utility is not stable")},
                intents={_HOST: intent},
                seen={_HOST: sentinel.Seen(power_on=False, since_s=since_s, at_s=now_s, looks=2)},
            )
        )
        if decision.order is None:
            return False
        self._intent = sentinel.ordered(intent, now_s)
        return True
