"""The only interface of status, metrics, HTTP and the admin socket to a running daemon, and the views that it keeps."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import structlog

from powerguard.clock import Clock
from powerguard.core.model.actions import KINDS, Action, PollNow, PowerOnMethod
from powerguard.core.model.events import Done, Event, Outcome, Reading, SourceFailed
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import State
from powerguard.daemon.journal.records import OutageRecord
from powerguard.effectors.host.check import HostSeen
from powerguard.ups.base import Local, ReportsTrouble, Source
from powerguard.ups.snmp.traps import TrapCounts

log = structlog.get_logger()

ACTION_WORDS: Final[Mapping[type[Action], str]] = {kind: kind.word for kind in KINDS if kind is not PollNow}
"""The kinds of action that are counted, by their word in metrics. Polls are counted for each source instead."""

RESULTS: Final = ("done", "failed", "timed_out")

BOUNDS_S: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0)
"""Upper bounds of the buckets for durations of actions, seconds."""

_MOST_REASONS: Final = 8
"""Most error texts of one loss that are logged: a peer may fail in a new way each second."""


class ActionFigures:
    """How many actions of each kind went how, and how long they took. One writer: the loop."""

    def __init__(self) -> None:
        """Begin with every kind and result at 0, so that `rate()` sees the very first failure."""
        self.counts: dict[tuple[str, str], int] = {(word, res): 0 for word in ACTION_WORDS.values() for res in RESULTS}
        self.buckets: dict[str, list[int]] = {word: [0] * (len(BOUNDS_S) + 1) for word in ACTION_WORDS.values()}
        self.seconds: dict[str, float] = dict.fromkeys(ACTION_WORDS.values(), 0.0)

    def count(self, outcome: Outcome) -> None:
        """Enter one outcome; kinds that are not counted are passed over."""
        word = ACTION_WORDS.get(type(outcome.action))
        if word is None:
            return
        result = "done" if isinstance(outcome, Done) else "timed_out" if outcome.timed_out else "failed"
        took_s = max(0.0, outcome.took_s)
        self.counts[word, result] += 1
        self.buckets[word][bisect_left(BOUNDS_S, took_s)] += 1
        self.seconds[word] += took_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """One source as its poller sees it.

    up: its newest poll brought a reading. last_reading_at_s: seconds of CLOCK_BOOTTIME; None before the first.
    polls, failures: since the daemon started; failures are part of polls. last_error: "" when there was none.
    authenticated: its answers cannot be forged. forgeable: another host could forge them. trouble: an error to correct
        although it delivers readings, such as a login that upsd refuses; "" if none.
    """

    ups: str
    source: str
    up: bool
    last_reading_at_s: float | None = None
    polls: int = 0
    failures: int = 0
    last_error: str = ""
    authenticated: bool = False
    forgeable: bool = True
    trouble: str = ""


class SourceViews:
    """One view for each source of the settings, by UPS and name."""

    def __init__(self, clock: Clock) -> None:
        """Begin without sources."""
        self._clock = clock
        self._sources: dict[str, Source] = {}
        self._views: dict[str, SourceView] = {}
        self._reported_at_s: dict[str, float] = {}
        self._reasons: dict[str, set[str]] = {}

    def begin(self, sources: Sequence[tuple[str, str, Source]]) -> None:
        """Track exactly these, (UPS, name, poller); the states of those that stay are kept."""
        self._sources = {f"{ups}/{name}": source for ups, name, source in sources}
        self._views = {
            f"{ups}/{name}": self._views.get(f"{ups}/{name}") or SourceView(ups=ups, source=name, up=False)
            for ups, name, _ in sources
        }
        self._reported_at_s = dict.fromkeys(self._views, self._clock())

    def take(self, event: Reading | SourceFailed) -> None:
        """Enter a source's report."""
        key = f"{event.ups}/{event.source}"
        view = self._views.get(key) or SourceView(ups=event.ups, source=event.source, up=False)
        self._reported_at_s[key] = self._clock()
        if isinstance(event, Reading):
            self._reasons.pop(key, None)
            self._views[key] = replace(
                view,
                up=True,
                last_reading_at_s=event.at_s,
                polls=view.polls + 1,
                last_error="",
                authenticated=event.authenticated,
            )
            return
        if event.lost:
            self._log_other_reason(key, event)
        self._views[key] = replace(
            view, up=False, polls=view.polls + 1, failures=view.failures + 1, last_error=event.reason
        )

    def _log_other_reason(self, key: str, event: SourceFailed) -> None:
        """Log when a lost source fails for another reason: the first one is in the story, and may be corrected."""
        reasons = self._reasons.setdefault(key, set())
        if event.reason in reasons or len(reasons) >= _MOST_REASONS:
            return
        if reasons:
            log.warning("failure_changed", ups=event.ups, source=event.source, because=event.reason)
        reasons.add(event.reason)

    def all(self) -> Sequence[SourceView]:
        """Return every source, with its last state."""
        return tuple(
            replace(view, forgeable=self._is_forgeable(key, view), trouble=self._trouble(key))
            for key, view in self._views.items()
        )

    def _is_forgeable(self, key: str, view: SourceView) -> bool:
        source = self._sources.get(key)
        return not view.authenticated and not (isinstance(source, Local) and source.is_local)

    def _trouble(self, key: str) -> str:
        source = self._sources.get(key)
        return source.trouble if isinstance(source, ReportsTrouble) else ""

    def silent(self, longer_s: float) -> str:
        """Return a source without any report, not even a failure, for this long; "" if there is none."""
        now_s = self._clock()
        return next((key for key, at_s in self._reported_at_s.items() if now_s - at_s > longer_s), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BmcView:
    """The BMC's power restore policy as last read back. policy: None when it was never read.

    verified: it is what the settings want. checked_at_s: when that was read; None when never. error: why it is not
    verified, and newer than what was read where that is older; "" when none.
    power_watts: what the host drew then, as the BMC measures it; None where it does not, or was not asked (an outage).
    """

    kind: str
    policy: str | None = None
    verified: bool = False
    checked_at_s: float | None = None
    error: str = ""
    power_watts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnView:
    """Facts about a return from power-off. seen: the newest look at the host; None before the first.

    target: the unit that training starts by; None: the command is run in its place. Without both the scheduler starts
    training.
    """

    target: str | None
    command: tuple[str, ...] = ()
    seen: HostSeen | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOnView:
    """A power-on method as last checked. ups: of OUTPUT, else "". ready: it could be armed; None: not checked yet.

    why: what blocks it, "" if it is ready. returns: of OUTPUT, as in `state.Armed`. checked_at_s: when it was checked.
    """

    method: PowerOnMethod
    ups: str = ""
    ready: bool | None = None
    why: str = ""
    returns: str = ""
    checked_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastOutage:
    """The last outage that has ended, in numbers. *_wall_s: Unix seconds. None: did not happen, or is not known.

    outcome: one of families.OUTCOMES. recovery_s: from start-up to training again.
    """

    id: str
    outcome: str
    began_wall_s: float
    ended_wall_s: float
    on_battery_s: float | None = None
    checkpoint_s: float | None = None
    recovery_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetView:
    """One target of messages. Counters over all lives of the daemon; at, since: Unix seconds.

    queued: messages that it is owed; oldest_age_s: of the oldest of them, None without any. at: of the last delivery
    that was tried; since: of the first of those that failed in a row, None while none does. answer: what the other side
    said, or why it was not reached. dropped: messages that it refused for good.
    """

    name: str
    kind: str
    queued: int = 0
    oldest_age_s: float | None = None
    delivered: int = 0
    failed: int = 0
    dropped: int = 0
    at: float | None = None
    since: float | None = None
    answer: str = ""


class Daemon(Protocol):
    """A running daemon, read from its own loop's thread. Every `*_s` without `wall` is CLOCK_BOOTTIME."""

    @property
    def policy(self) -> Policy:
        """The policy that the settings make."""
        ...

    @property
    def state(self) -> State:
        """The core's state after the newest event."""
        ...

    @property
    def clock(self) -> Clock:
        """The one clock of this boot."""
        ...

    @property
    def started_at_s(self) -> float:
        """When this daemon started."""
        ...

    @property
    def progressed_at_s(self) -> float:
        """When the loop last finished an event; it gets one at least every second."""
        ...

    @property
    def boot_id(self) -> str:
        """Name of this boot."""
        ...

    @property
    def config_path(self) -> str:
        """The settings file."""
        ...

    @property
    def settings_ok(self) -> bool:
        """The newest attempt to load the settings was accepted."""
        ...

    @property
    def settings_at_s(self) -> float:
        """When settings were last accepted."""
        ...

    @property
    def strangers(self) -> Sequence[str]:
        """Sockets of trainers that other users serve, and why."""
        ...

    @property
    def journal_trouble(self) -> str:
        """Why the journal cannot be written, while memory replaces it; "" when it is on disk."""
        ...

    @property
    def history_lost(self) -> str:
        """Records of earlier runs that could not be read at the start; "" when there are none."""
        ...

    @property
    def journal_counters(self) -> Mapping[str, float]:
        """Lifetime counters by the names of `metrics.LIFETIME`; they survive power-off."""
        ...

    @property
    def sources(self) -> Sequence[SourceView]:
        """Every source of the settings."""
        ...

    @property
    def traps(self) -> TrapCounts | None:
        """Counts of the trap port; None when the settings have none."""
        ...

    @property
    def methods(self) -> Sequence[PowerOnView]:
        """The power-on methods of the settings."""
        ...

    @property
    def bmc(self) -> BmcView | None:
        """The BMC; None when the settings have none."""
        ...

    @property
    def has_no_bmc(self) -> bool:
        """The settings state that this host has no BMC."""
        ...

    @property
    def host_name(self) -> str:
        """The host's own name; "" when unknown."""
        ...

    @property
    def host_kind(self) -> str:
        """How the host is powered off: `kind` of the host's settings."""
        ...

    @property
    def power_off_trouble(self) -> str:
        """Why a power-off would fail, by the check that an armed daemon makes every minute; "" when it would not."""
        ...

    @property
    def returning(self) -> ReturnView:
        """How the host is, and what starts training."""
        ...

    @property
    def actions(self) -> ActionFigures:
        """How the actions went since the daemon started."""
        ...

    @property
    def last_outage(self) -> LastOutage | None:
        """The last outage that has ended; None when there was none."""
        ...

    @property
    def outages(self) -> Sequence[OutageRecord]:
        """The newest outages that memory holds, the newest first."""
        ...

    @property
    def message_targets(self) -> Sequence[TargetView]:
        """Targets of messages, and how their deliveries go."""
        ...

    def pending_messages(self, most: int) -> Sequence[Mapping[str, object]]:
        """Return the oldest messages that wait, as plain data: target, at, event, title."""
        ...

    @property
    def messages_trouble(self) -> str:
        """Why messages that were not delivered may be lost; "" while they are on disk."""
        ...

    @property
    def loop_lag_s(self) -> float:
        """The longest delay of the event loop's own timer in the last minute."""
        ...

    def submit(self, event: Event) -> None:
        """Hand one event to the loop; never blocks."""
        ...

    def poll_now(self) -> None:
        """Poll every source at once."""
        ...

    def wall(self) -> float:
        """Return Unix seconds, for display and for metrics."""
        ...
