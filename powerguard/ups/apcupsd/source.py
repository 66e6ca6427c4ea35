"""The `apcupsd` source: asks apcupsd's network information server, and dates its news by what it says of their age.

From a status of apcupsd to what it says in our words: pure, and as slow to believe as the decoder of cards.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from powerguard.clock import Clock, boottime_s
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.apcupsd.protocol import PORT, Flag, NisError, Reply, Status, parse_status, request
from powerguard.ups.base import LOOPBACK, Notices, PollTrigger, Publish, Resolver
from powerguard.ups.profiles import text_values
from powerguard.ups.profiles.decode import Draft
from powerguard.ups.profiles.vocabulary import State

_NUMBERS: Final = (
    ("BCHARGE", "charge_pct", 1.0),
    ("TIMELEFT", "runtime_s", 60.0),
    ("LOADPCT", "load_pct", 1.0),
    ("LINEV", "input_v", 1.0),
    ("ITEMP", "battery_temp_c", 1.0),
)
"""TONBATT is left out: it is apcupsd's own clock since it saw ONBATT, so it is not a second witness, and it
restarts at 0 with apcupsd. NOMPOWER times LOADPCT is not a measurement."""
_STATES: Final = (
    (Flag.BATTLOW, State.LOW_BATTERY),
    (Flag.REPLACEBATT, State.REPLACE_BATTERY),
    (Flag.OVERLOAD, State.OVERLOAD),
    (Flag.CALIBRATION, State.CALIBRATION),
)
_SELF_TEST: Final = "Automatic or explicit self test"
_IN_PROGRESS: Final = "IP"
_NETWORK_DRIVERS: Final = frozenset(("NETWORK UPS Driver", "PCNET UPS Driver", "SNMP UPS Driver"))
"""DRIVER of an apcupsd that reads its UPS over the network."""


def draft_of(status: Status) -> Draft:
    """Return what a status says, not yet checked field against field as `text_values.reading` does. Never raises."""
    draft = Draft(output_source=_output_source(status.flags))
    draft.provenance["output_source"] = "STATFLAG"
    for key, field, times in _NUMBERS:
        text = status.values.get(key, "N/A").partition(" ")[0]
        if text != "N/A":
            text_values.enter(draft, field, text, key, times=times)
    for flag, state in _STATES:
        if status.flags & flag:
            draft.states[state] = "STATFLAG"
    if not status.flags & Flag.BATTPRESENT:
        draft.states[State.BATTERY_MISSING] = "STATFLAG"
    tested_by = _self_test(status)
    if tested_by:
        draft.states[State.SELF_TEST] = tested_by
    if status.flags & Flag.ONLINE and status.flags & Flag.ONBATT:
        draft.warnings.append("STATFLAG says both ONLINE and ONBATT: battery counts")
    draft.input_present = text_values.is_input_there([draft.numbers["input_v"]] if "input_v" in draft.numbers else [])
    if draft.input_present is not None:
        draft.provenance["input_present"] = "LINEV"
    return draft


def _output_source(flags: int) -> OutputSource:
    """In bypass, off and before the first contact apcupsd sets neither bit, and then takes it for mains. We do not."""
    if flags & Flag.ONBATT:
        return OutputSource.BATTERY
    if not flags & Flag.ONLINE:
        return OutputSource.UNKNOWN
    if flags & Flag.BOOST:
        return OutputSource.BOOST
    return OutputSource.TRIM if flags & Flag.TRIM else OutputSource.UTILITY


def _self_test(status: Status) -> str:
    """Return the record that shows a running self-test, or "".

    LASTXFER stays after the test until the next transfer, so on utility it is history.
    """
    if status.values.get("SELFTEST") == _IN_PROGRESS:
        return "SELFTEST"
    on_battery = bool(status.flags & Flag.ONBATT)
    return "LASTXFER" if on_battery and status.values.get("LASTXFER") == _SELF_TEST else ""


_LOST_AFTER = 3
_LOST_AFTER_S = 3.0
"""Without news on battery, without an answer on utility (apcupsd restarts in 2 s), the source is lost."""
_BATTERY_TIMEOUT_S = 0.8
_BATTERY_POLL_S = 0.5
_LONGEST_BACKOFF_S = 3.0
_CLOSEST_S = 0.1
"""Shortest time between two requests, regardless of hints, which can be forged."""
_EVERY_S = 60.0
"""POLLTIME, until two dates have shown it. It is in no answer."""
SLOW_S = 6.0
"""POLLTIME from which on apcupsd reads its UPS too seldom."""
_LONGEST_EVERY_S = 300.0
_LONGEST_ON_BATTERY_S = 30.0
"""Upper bound of the patience on battery with a UPS that answers slowly."""
_SHRINKS = 0.8
"""A shorter interval on battery counts by degrees: a question during a look is not answered, and intervals vary."""
_LEAST_PATIENCE_S = 5.0
_SET_BACK_S = -5.0
"""END APC is taken before apcupsd waits for its own lock, DATE after it: a little below 0 is an age of 0."""
_ORDER_SPENT_S = 300.0
"""A host that is still up this long after utility came back will not go down."""
_LEFT_OVER = (
    "SHUTTING DOWN is left over from an earlier outage: that apcupsd protects its host no more, and leaves its "
    "powerfail file behind (systemctl restart apcupsd there)"
)
_CHUNK_BYTES = 4096
_STEP_S = 0.001
_OF_THE_UPS = Flag.CALIBRATION | Flag.TRIM | Flag.BOOST | Flag.ONLINE | Flag.ONBATT | Flag.OVERLOAD | Flag.BATTLOW


def _where(options: ApcupsdOptions) -> str:
    return f"{options.host}:{options.port}"


def source_name(options: ApcupsdOptions) -> str:
    """Return the name of the source in readings, metrics and logs: "apcupsd:10.0.0.9"."""
    return f"apcupsd:{options.host}" if options.port == PORT else f"apcupsd:{_where(options)}"


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class NisClient:
    """Asks one apcupsd, over a connection that is kept. Raises NisError only."""

    def __init__(self, options: ApcupsdOptions) -> None:
        """Do not connect yet."""
        self._options = options
        self._resolver = Resolver(options.host, OSError)
        self._streams: Streams | None = None

    async def status(self, limit_s: float) -> Status:
        """Ask for a status. A kept connection that proves dead is replaced at once: apcupsd was restarted."""
        where = _where(self._options)
        try:
            async with asyncio.timeout(limit_s):
                if self._streams is not None:
                    with contextlib.suppress(OSError, EOFError):
                        return await self._ask(self._streams)
                    self._drop()
                addresses = await self._resolver.addresses(limit_s / 2)
                self._streams = await self._connect(addresses, limit_s / (len(addresses) + 1))
                return await self._ask(self._streams)
        except NisError as error:
            self._drop()
            msg = f"{where} {error}"
            raise NisError(msg) from error
        except TimeoutError as error:
            self._drop()
            msg = f"no answer from {where} in time: apcupsd hangs, or waits for its UPS"
            raise NisError(msg) from error
        except (OSError, EOFError) as error:
            self._drop()
            msg = f"{where}: {_why(error)}"
            raise NisError(msg) from error
        except BaseException:
            self._drop()
            raise

    async def _connect(self, addresses: Sequence[str], each_s: float) -> Streams:
        """Connect to the first address that answers: `localhost` is ::1 as well, where apcupsd never listens.

        each_s: for every address but the last one, which may take the rest of the time.
        """
        *others, last = addresses
        for address in others:
            with contextlib.suppress(OSError):  # a TimeoutError is one
                async with asyncio.timeout(each_s):
                    return await asyncio.open_connection(address, self._options.port, limit=_CHUNK_BYTES)
        return await asyncio.open_connection(last, self._options.port, limit=_CHUNK_BYTES)

    async def _ask(self, streams: Streams) -> Status:
        reader, writer = streams
        writer.write(request("status"))
        await writer.drain()
        reply = Reply()
        while True:
            data = await reader.read(_CHUNK_BYTES)
            if not data:
                msg = "breaks off in the middle of its answer" if reply.began else _HUNG_UP
                raise EOFError(msg)
            frames = reply.feed(data)
            if frames is not None:
                return parse_status(frames)

    def close(self) -> None:
        """Close it, and wait for no look-up of its name any more."""
        self._resolver.close()
        self._drop()

    def _drop(self) -> None:
        """Close the connection; the next request connects again."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()


_HUNG_UP = "hangs up without an answer (does hosts.allow or hosts.deny there keep this host out?)"


def _why(error: OSError | EOFError) -> str:
    """Say what an operator would do about it."""
    if isinstance(error, ConnectionRefusedError):
        return (
            "connection refused: check that apcupsd runs with NETSERVER on, and NISIP and NISPORT as in these settings"
        )
    if isinstance(error, ConnectionResetError):
        return _HUNG_UP
    return getattr(error, "strerror", None) or str(error)


@dataclass(slots=True)
class News:
    """Dates apcupsd's data on our own clock, and recognises old data.

    DATE is when apcupsd last read its UPS, by a wall clock that may be set at any time. So the difference to END APC
    counts at first contact only; after that a DATE is as new as the pause between two of our questions lets it be.
    at_s: of the newest observation; None: there was none whose age is known. every_s: from one to the next, on utility.
    on_battery_s: likewise, on battery: there apcupsd waits for 1 s after each look, and a look may take some seconds.
    """

    at_s: float | None = None
    every_s: float | None = None
    on_battery_s: float = 0.0
    _date: str | None = None
    _flags: int = 0
    _asked_s: float = 0.0
    _calm: bool = False

    def note(self, status: Status, *, asked_s: float, answered_s: float) -> bool:
        """Enter an answer; return whether it is a new observation."""
        before_s, was_calm, known = self.at_s, self._calm, self._date
        earliest_s, self._asked_s = self._asked_s, asked_s
        flags, were = status.flags & _OF_THE_UPS, self._flags
        same = status.date == known
        if same and flags == were:
            return False
        self._date, self._flags = status.date, flags
        self._calm = not status.flags & (Flag.ONBATT | Flag.FASTPOLL)
        age_s = status.age_s
        if known is None:
            if age_s is None or age_s < _SET_BACK_S:
                return False
            self.at_s = answered_s - max(0.0, age_s)
            return True
        if before_s is not None:
            earliest_s = max(earliest_s, before_s + _STEP_S)
        # With drivers that the UPS notifies (USB), they change the flags between two readings, and leave DATE as it is.
        reported_s = earliest_s if same else answered_s - max(0.0, age_s or 0.0)
        self.at_s = min(max(reported_s, earliest_s), max(answered_s, earliest_s))
        if before_s is not None and was_calm and self._calm and not same:
            self.every_s = min(self.at_s - before_s, _LONGEST_EVERY_S)
        if before_s is not None and flags & were & Flag.ONBATT and not same:
            self.on_battery_s = max(self.at_s - before_s, _SHRINKS * self.on_battery_s)
        return True

    def forget_pace(self) -> None:
        """Measure no pause across answers that were missed."""
        self._calm = False

    def patience_s(self) -> float:
        """For how long the newest observation is good: some polls of apcupsd, which polls every second on battery."""
        if self._flags & Flag.ONBATT:
            return max(_LOST_AFTER_S, min(2.0 * self.on_battery_s, _LONGEST_ON_BATTERY_S))
        return max(_LEAST_PATIENCE_S, 3.0 * (self.every_s or _EVERY_S))


class ApcupsdSource:
    """Asks one apcupsd every `poll_s`; publishes when it has read its UPS again, or has not for too long.

    jitter: a share from 0 to 1 by which a hundred hosts do not all come back in the same moment.
    """

    def __init__(
        self, options: ApcupsdOptions, *, ups: str, clock: Clock, jitter: Callable[[], float] = random.random
    ) -> None:
        """Do not ask yet."""
        self.name = source_name(options)
        self._options = options
        self._ups = ups
        self._clock = clock
        self._jitter = jitter
        self._client = NisClient(options)
        self._bell = PollTrigger(clock)
        self._news = News()
        self._reading: Reading | None = None
        self._misses = 0
        self._missed_s = 0.0
        self._order_seen_s: float | None = None
        self._order_spent = False
        self._has_cable = False
        self._notices = Notices(ups, self.name)

    @property
    def is_local(self) -> bool:
        """The program runs on this host, and has a cable to the UPS."""
        return self._options.host in LOOPBACK and self._has_cable

    def poll_now(self) -> None:
        """Poll at once; during a poll: once more after it, for the one in flight may have been asked too early."""
        self._bell.ring()

    async def run(self, publish: Publish) -> None:
        """Poll until cancelled."""
        try:
            grid_s = self._clock()
            while True:
                began_s = self._clock()
                await self._poll(publish)
                now_s = self._clock()
                if self._misses:
                    next_s = min(now_s + self._backoff_s(), max(now_s, self._lost_at_s()))
                    grid_s = next_s
                else:
                    poll_s = self._options.poll_s
                    poll_s = min(poll_s, _BATTERY_POLL_S) if self._on_battery else poll_s
                    grid_s += (max(0.0, now_s - grid_s) // poll_s + 1) * poll_s
                    next_s = min(grid_s, now_s + poll_s)
                await self._bell.rest(until_s=next_s, earliest_s=began_s + _CLOSEST_S)
        finally:
            self._client.close()

    @property
    def _on_battery(self) -> bool:
        return self._reading is not None and self._reading.output_source is OutputSource.BATTERY

    def _lost_at_s(self) -> float:
        """When the source counts as lost; a past time is ignored once it is reported."""
        if self._on_battery and self._news.at_s is not None:
            lost_s = self._news.at_s + self._news.patience_s()
        else:
            lost_s = self._missed_s + _LOST_AFTER_S
        return lost_s if self._clock() <= lost_s else math.inf

    def _backoff_s(self) -> float:
        longest_s = _BATTERY_POLL_S if self._on_battery else _LONGEST_BACKOFF_S
        wait_s = min(longest_s, self._options.poll_s * 2.0 ** min(self._misses, 8))
        return wait_s * (0.5 + 0.5 * self._jitter())

    # --- One poll -----------------------------------------------------------------------------------------------

    async def _poll(self, publish: Publish) -> None:
        limit_s = self._options.timeout_s
        left_s = self._lost_at_s() - self._clock()
        if self._on_battery and math.isfinite(left_s):  # lost, it has its whole time again: it may be slow
            limit_s = max(_CLOSEST_S, min(limit_s, _BATTERY_TIMEOUT_S, left_s))
        asked_s = self._clock()
        try:
            status = await self._client.status(limit_s)
        except NisError as error:
            self._miss(publish, str(error))
            return
        because = self._why_no_reading(status)
        if because:
            self._miss(publish, because)
            return
        now_s = self._clock()
        is_new = self._news.note(status, asked_s=asked_s, answered_s=now_s)
        at_s = self._news.at_s
        if at_s is None:
            self._miss(
                publish, f"{_where(self._options)}: its DATE gives no age (check its clock): waiting for the next"
            )
        elif now_s - at_s > self._news.patience_s():
            self._miss(publish, f"{_where(self._options)}: apcupsd does not read its UPS any more")
        elif is_new or self._reading is None:
            self._publish_reading(publish, status, at_s)
        elif self._misses:
            publish(self._reading)  # It answers again, but has not read the UPS since.
            self._misses = 0

    def _why_no_reading(self, status: Status) -> str:
        """Say why this status is none of our UPS now, or ""."""
        where, name = _where(self._options), status.values.get("UPSNAME", "")[:64]
        if self._options.name is not None and name != self._options.name:
            return f"{where}: its UPSNAME is {name!r}, not {self._options.name!r}: another UPS, or another port"
        if status.flags & Flag.COMMLOST:
            last = ", and were those of an outage" if status.flags & Flag.ONBATT else ""
            return f"{where}: apcupsd has lost its UPS (COMMLOST): its values are frozen{last}"
        return ""

    def _publish_reading(self, publish: Publish, status: Status, at_s: float) -> None:
        draft = draft_of(status)
        forced = self._is_ordered(status, at_s)
        self._reading = text_values.reading(draft, at_s=at_s, ups=self._ups, source=self.name, forced_shutdown=forced)
        self._misses = 0
        self._has_cable = status.values.get("DRIVER") not in _NETWORK_DRIVERS
        publish(self._reading)
        for rejected in draft.rejected:
            because = f"{rejected.field}: {rejected.why}"
            self._notices.once("value_rejected", because, field=rejected.field, object=rejected.oid)
        for warning in draft.warnings:
            self._notices.once("objects_disagree", warning)
        self._warn(status)

    def _is_ordered(self, status: Status, at_s: float) -> bool:
        """Say whether SHUTTING DOWN is an order that still applies.

        The bit stays until apcupsd is restarted, long after the outage: once apcupsd goes on answering on utility,
        its host has not gone down, and no later outage may take the old order for its own. A daemon that starts in
        between has readings from before without the order: it must not see it rise.
        """
        if not status.flags & Flag.SHUTDOWN:
            self._order_seen_s, self._order_spent = None, False
            self._notices.forget(_LEFT_OVER)
            return False
        if status.flags & Flag.ONBATT:
            self._order_seen_s = None
            return not self._order_spent and not self._options.leaves_shutdown
        if self._order_seen_s is None:
            # Later the bit may be a moment ahead of its date.
            self._order_seen_s = at_s - (status.back_for_s if self._reading is None else 0.0)
        if at_s - self._order_seen_s >= _ORDER_SPENT_S:
            self._order_spent = True
            self._notices.once("source_doubtful", _LEFT_OVER)
        return not self._order_spent and not self._options.leaves_shutdown

    def _warn(self, status: Status) -> None:
        every_s = self._news.every_s
        if every_s is not None and every_s > SLOW_S:
            self._notices.once(
                "source_doubtful",
                "apcupsd reads its UPS too seldom: an outage is seen as late as its POLLTIME allows (POLLTIME 1)",
                every_s=round(every_s),
            )
        if status.flags & Flag.SLAVE:
            master = status.values.get("MASTER", "its master")
            self._notices.once(
                "source_doubtful",
                f"that apcupsd is a net slave, which does not report the age of its data (name {master} in the "
                "settings)",
            )

    # --- Reports -------------------------------------------------------------------------------------------

    def _miss(self, publish: Publish, reason: str) -> None:
        now_s = self._clock()
        if not self._misses:
            self._missed_s = now_s
        self._misses += 1
        self._news.forget_pace()
        if self._on_battery and self._news.at_s is not None:
            lost = now_s - self._news.at_s >= self._news.patience_s() - _STEP_S
        else:
            lost = self._misses >= _LOST_AFTER and now_s - self._missed_s >= _LOST_AFTER_S - _STEP_S
        publish(SourceFailed(at_s=now_s, ups=self._ups, source=self.name, reason=reason, lost=lost))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What doctor and discover show of an apcupsd. reading: None, with why_not, where it would be none.

    age_s: of its newest look at the UPS, by its own two dates. slave: it asks another apcupsd.
    rating_w: NOMPOWER. restart_pct: RETPCT, the charge at which the UPS switches its output on again; None: not
        reported.
    """

    name: str
    model: str
    serial: str
    reading: Reading | None
    why_not: str
    age_s: float | None
    slave: bool
    shutting_down: bool
    rating_w: float | None = None
    restart_pct: float | None = None


async def probe(options: ApcupsdOptions, *, ups: str) -> ProbeReport:
    """Look at an apcupsd once. Raises NisError, whose text is for the operator, when it cannot be asked."""
    client = NisClient(options)
    try:
        status = await client.status(2 * options.timeout_s)
    finally:
        client.close()
    source = ApcupsdSource(options, ups=ups, clock=boottime_s)
    why_not = source._why_no_reading(status)  # noqa: SLF001 - of this module's own class
    draft = draft_of(status)
    at_s = boottime_s() - max(0.0, status.age_s or 0.0)
    reading = text_values.reading(draft, at_s=at_s, ups=ups, source=source.name)
    return ProbeReport(
        name=status.values.get("UPSNAME", ""),
        model=status.values.get("MODEL", status.values.get("APCMODEL", "")),
        serial=status.values.get("SERIALNO", ""),
        reading=None if why_not else reading,
        why_not=why_not,
        age_s=status.age_s,
        slave=bool(status.flags & Flag.SLAVE),
        shutting_down=bool(status.flags & Flag.SHUTDOWN),
        rating_w=text_values.rating(status.values.get("NOMPOWER", "")),
        restart_pct=text_values.share_of_charge(status.values.get("RETPCT", "").partition(" ")[0]),
    )
