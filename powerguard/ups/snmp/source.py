"""The `snmp` source: polls the network card of one UPS and publishes what the decoder makes of its answers."""

import asyncio
import contextlib
import math
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from powerguard.clock import Clock, boottime_s
from powerguard.core.model.events import OutputSource, SourceFailed
from powerguard.ups.base import Notices, PollTrigger, Publish
from powerguard.ups.profiles.decode import Decoded, decode, redundant
from powerguard.ups.profiles.load import Profiles, load_profiles
from powerguard.ups.profiles.schema import Profile
from powerguard.ups.profiles.vocabulary import NUMBERS, Answer, Missing, below
from powerguard.ups.snmp.discovery import SYS_UP_TIME, Identity, Plan, discover, scalars, worth_polling
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.port import MAX_BATCH, CardPort, SnmpError, SnmpPort

log = structlog.get_logger(__name__)

_LOST_AFTER = 3
_ON_BATTERY_LIMIT_S = 0.8
"""Limit for an answer on battery. A request is not repeated there: the next poll follows at once."""
_SLOWER = 1.5
"""A card that needs longer has so many times what it took before."""
_ON_BATTERY_LOST_S = 2.5
"""On battery two misses will do once the last reading is so old: at 3 s the core must know that it counts alone."""
_LONGEST_BACKOFF_S = 3.0
"""From a failed try (2 s) to the next, so that a lost card is asked every 5 s, on utility too: the outage may begin."""
_CLOSEST_S = 0.2
"""Between two polls, however often a poll is requested: hints can be forged, and old cards drown."""
SLOW = 0.5
"""A card that answers for more than this share of the time from poll to poll is slow: others may ask it, too."""
LONGEST = 2.0
"""A slow card is polled at most so many times more rarely than poll_s: a reading is stale after three of them."""
_ON_BATTERY_POLL_S = 2.0
_POLL_JITTER = 0.1
"""Share by which the time to the next poll of a slow card varies, so that its readers do not keep step."""
_DICE = random.SystemRandom()
_REFRESH_S = 300.0
_ALARMS_EVERY = 5
_WHOLE_EVERY = 10
"""Of so many polls on utility one asks for everything; the others leave out objects that a better object covers."""
_LONGEST_LOOK_S = 55.0
"""For finding out what a card is. Old cards know version 1 only, which takes up to 51 requests (measured on 38 walks);
the daemon's watchdog wants to hear something each minute."""
_HEARS_LATE_S = 5.0
"""Limit for an answer to a probe, to see that it comes too late: the longest timeout_s."""
_MODELS = (
    "1.3.6.1.4.1.318.1.1.1.1.1.1.0",
    "1.3.6.1.4.1.534.1.1.2.0",
    "1.3.6.1.4.1.3808.1.1.1.1.1.1.0",
    "1.3.6.1.2.1.33.1.1.2.0",
)
"""upsBasicIdentModel (PowerNet), xupsIdentModel (XUPS), upsBaseIdentModel (CPS) and upsIdentModel (RFC 1628)."""
_SERIALS = ("1.3.6.1.4.1.318.1.1.1.1.2.3.0", "1.3.6.1.4.1.3808.1.1.1.1.2.3.0", "1.3.6.1.4.1.705.1.1.7.0")
"""upsAdvIdentSerialNumber (PowerNet), upsAdvanceIdentSerialNumber (CPS) and upsmgIdentSerialNumber (MGE)."""
_FEW = 4
"""Objects in one request: a card that answers no more is reported."""
_SLACK_S = 60.0
"""By how much the sysUpTime of a card that has rebooted may be above the time since it was last read."""
_WRAP_TICKS = 2**32 - 60_000
"""sysUpTime starts again at 0 after 497 days: from its last ten minutes a step back is no reboot."""


def _where(options: SnmpOptions) -> str:
    return f"{options.host}:{options.port}"


def source_name(options: SnmpOptions) -> str:
    """Return the name of the source in readings, metrics and logs: "snmp:10.0.0.5"."""
    return f"snmp:{options.host}" if options.port == 161 else f"snmp:{_where(options)}"


def _fields_of(decoded: Decoded) -> frozenset[str]:
    return frozenset(name for name in NUMBERS if getattr(decoded, name) is not None)


def poll_limit_s(options: SnmpOptions) -> float:
    """Return the time that one poll of a known card has: three requests, each asked twice."""
    return 6 * options.timeout_s + 1.0


class SnmpSource:
    """Polls one card every `poll_s` on a fixed grid; three misses in a row and the source is lost, and is tried on.

    port and profiles: stand-ins for tests and the simulator; None: the card itself, and the packaged and site profiles.
    """

    def __init__(
        self,
        options: SnmpOptions,
        *,
        ups: str,
        clock: Clock,
        port: SnmpPort | None = None,
        profiles: Profiles | None = None,
    ) -> None:
        """Ask nothing yet."""
        self.name = source_name(options)
        self._options = options
        self._ups = ups
        self._clock = clock
        self._port = CardPort(options) if port is None else port
        self._profiles = profiles
        self._authenticated = options.version == 3 and options.auth is not None
        self._bell = PollTrigger(clock)
        self._plan: Plan | None = None
        self._refresh_at_s = 0.0
        self._misses = 0
        self._is_lost = False
        self._read_at_s = 0.0
        self._up_ticks, self._up_at_s = 0, 0.0
        self._output_source: OutputSource | None = None
        self._alarms: Mapping[str, Answer] = {}
        self._alarms_state: tuple[object, ...] = ()
        self._alarms_age = 0
        self._notices = Notices(ups, self.name)
        self._polls = 0
        self._too_slow = 0
        self._took_s = deque((0.0, 0.0), maxlen=2)
        """A request's time, the last times: the shorter one counts, for a packet that is lost is no slow card."""
        self._polls_took_s = deque((0.0, 0.0, 0.0), maxlen=3)
        """A poll's time, the last times: the shortest one counts, as a poll now and then asks for more."""
        self._device = ""
        self._spare: frozenset[str] = frozenset()
        self._fields: frozenset[str] = frozenset()

    @property
    def trouble(self) -> str:
        """The card is too slow for its readers; "" if not."""
        return self._notices.trouble

    def poll_now(self) -> None:
        """Poll at once; during a poll: once more after it, for the one in flight may have been asked too early."""
        self._bell.ring()

    async def run(self, publish: Publish) -> None:
        """Poll until cancelled."""
        try:
            grid_s = self._clock()
            while True:
                began_s = self._clock()
                await self._poll_and_publish(publish)
                now_s = self._clock()
                every_s = self._every_s()
                if now_s >= grid_s:  # a poll that came early does not put off the next one in turn
                    grid_s += ((now_s - grid_s) // every_s + 1) * every_s
                next_s = now_s if self._is_missed_on_battery() else max(grid_s, now_s + self._backoff_s())
                await self._bell.rest(until_s=next_s, earliest_s=began_s + _CLOSEST_S)
        finally:
            await self._port.close()

    def _every_s(self) -> float:
        """Return the time to the next poll: more than poll_s where the card is slow, and said once."""
        poll_s, took_s = self._options.poll_s, min(self._polls_took_s)
        longest_s = LONGEST * poll_s
        if self._output_source is OutputSource.BATTERY:
            longest_s = min(longest_s, max(poll_s, _ON_BATTERY_POLL_S))
        every_s = min(took_s / SLOW, longest_s)
        if every_s <= poll_s:
            if took_s < 0.8 * SLOW * poll_s:
                self._notices.is_right("card_slow")
            return poll_s
        because = (
            f"{_where(self._options)} answers for more than half of the time from poll to poll: it is polled every "
            f"{poll_s:g} to {longest_s:g} s. Let one upsd read it for all hosts, or set poll_s higher"
        )
        self._notices.stands("card_slow", because)
        return every_s * (1.0 + _POLL_JITTER * (2.0 * _DICE.random() - 1.0))

    def _is_missed_on_battery(self) -> bool:
        return self._output_source is OutputSource.BATTERY and 0 < self._misses < _LOST_AFTER and not self._is_lost

    def _backoff_s(self) -> float:
        over = self._misses - _LOST_AFTER
        return 0.0 if over < 0 else min(_LONGEST_BACKOFF_S, self._options.poll_s * 2.0 ** min(over, 8))

    # --- One poll -----------------------------------------------------------------------------------------------

    async def _poll_and_publish(self, publish: Publish) -> None:
        limit_s, began_s = self._limit_s(), self._clock()
        try:
            async with asyncio.timeout(limit_s):
                decoded = await self._poll()
        except TimeoutError:
            if self._plan is None:
                self._too_slow += 1
            self._miss(publish, f"{_where(self._options)} answers too slowly: no whole reading in {limit_s:g} s")
        except SnmpError as error:
            self._miss(publish, str(error))
        else:
            if decoded.stale is not None:
                self._miss(publish, f"{_where(self._options)}: {decoded.stale}")
                return
            at_s = self._read_at_s = self._clock()
            self._polls_took_s.append(at_s - began_s)
            publish(decoded.reading(at_s=at_s, ups=self._ups, source=self.name, authenticated=self._authenticated))
            self._note(decoded)
            await self._look_around(decoded, at_s)

    def _limit_s(self) -> float:
        """A card that answers every request just before its timeout would else keep us for minutes.

        One that is not known yet, and answers slowly, is given longer the next time: failures are reported meanwhile.
        """
        if self._plan is not None:
            return poll_limit_s(self._options)
        return min(_LONGEST_LOOK_S, (10 * self._options.timeout_s + 5.0) * 2.0 ** min(self._too_slow, 4))

    async def _poll(self) -> Decoded:
        if self._plan is None:
            self._plan = await self._discover()
        plan = self._plan
        self._polls += 1
        whole = self._polls % _WHOLE_EVERY == 1 or self._output_source is OutputSource.BATTERY
        answers = await self._get([oid for oid in plan.oids if whole or oid not in self._spare])
        self._watch_up_time(answers.get(SYS_UP_TIME))
        decoded = decode(plan.profiles, {**answers, **await self._alarm_rows(plan, answers)})
        rest = [oid for oid in plan.oids if oid not in answers]
        if rest and not self._brief_is_enough(decoded):
            with contextlib.suppress(SnmpError):  # What is known already, a battery above all, is reported in any case.
                answers.update(await self._get(rest))
                decoded = decode(plan.profiles, {**answers, **self._alarms})
                rest = []
        if not rest:
            self._spare = redundant(plan.profiles, answers, decoded)
            self._fields = _fields_of(decoded)
        if decoded.output_source is None:
            objects = " or ".join(source.object for profile in plan.profiles for source in profile.output_source)
            msg = f"{_where(self._options)} answered without {objects}"
            self._plan = None  # Another card may have taken its place.
            raise SnmpError(msg)
        return decoded

    async def _get(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Ask, and ask once more for what was left out of the answer."""
        answers = await self._ask(oids)
        left_out = [oid for oid, answer in answers.items() if answer is Missing.NO_ANSWER]
        if left_out:
            with contextlib.suppress(SnmpError):  # What was read already is reported in any case.
                answers.update(await self._ask(left_out))
        return answers

    async def _ask(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Ask one request after the other; on battery each has less time, and no second try.

        A source that is lost on battery has its time again: it may be slow, and no other source sees utility return.
        """
        began_s, limit_s = self._clock(), self._battery_limit_s
        answers = await (self._port.get(oids) if limit_s is None else self._ask_on_battery(oids, limit_s))
        self._took_s.append((self._clock() - began_s) / max(1, math.ceil(len(oids) / self._port.at_once)))
        return answers

    @property
    def _battery_limit_s(self) -> float | None:
        """Limit for one answer on battery; None: it has its whole time."""
        if self._output_source is not OutputSource.BATTERY or self._is_lost:
            return None
        return max(min(_ON_BATTERY_LIMIT_S, self._options.timeout_s), _SLOWER * min(self._took_s))

    async def _ask_on_battery(self, oids: Sequence[str], limit_s: float) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        at_once = self._port.at_once
        try:
            for start in range(0, len(oids), at_once):
                async with asyncio.timeout(limit_s):
                    answers.update(await self._port.get(oids[start : start + at_once]))
        except TimeoutError as error:
            msg = f"no answer from {_where(self._options)} in {limit_s:.1f} s, on battery"
            raise SnmpError(msg, unanswered=True) from error
        return answers

    def _brief_is_enough(self, decoded: Decoded) -> bool:
        """Whether a poll without the redundant objects has as much as the last whole one, and all is quiet."""
        return decoded.output_source is not OutputSource.BATTERY and _fields_of(decoded) >= self._fields

    async def _discover(self) -> Plan:
        if self._profiles is None:
            self._profiles = await asyncio.to_thread(load_profiles)
            for problem in self._profiles.problems:
                log.error("profile_refused", ups=self._ups, because=problem)
        plan = await discover(self._port, _where(self._options), self._profiles, self._options.profile)
        known = self._plan
        if known is None or (known.profiles, set(known.oids)) != (plan.profiles, set(plan.oids)):
            log.info(
                "source_found",
                ups=self._ups,
                source=self.name,
                profiles=[profile.name for profile in plan.profiles],
                device=plan.identity.sys_descr,
                objects=len(plan.oids),
            )
        device = f"{plan.profiles[0].name} {plan.identity.sys_object_id}"
        if self._device not in ("", device):
            because = "another card or UPS answers there; if its battery is another: `powerguard battery replaced`"
            log.warning(
                "device_changed", ups=self._ups, source=self.name, because=because, was=self._device, now=device
            )
        self._device = device
        self._refresh_at_s = self._clock() + _REFRESH_S
        self._too_slow = 0
        return plan

    async def _alarm_rows(self, plan: Plan, answers: Mapping[str, Answer]) -> Mapping[str, Answer]:
        """Walk the alarm tables while there are alarms: when the count or the status changed, else every few polls.

        A table that cannot be walked must not cost the reading: what stood in it counts as long as nothing changes.
        """
        tables = [profile.alarm_table for profile in plan.profiles if profile.alarm_table is not None]
        counts = tuple(answers.get(table.count.oid) for table in tables)
        statuses = tuple(
            answers.get(source.oid)
            for profile in plan.profiles
            for source in profile.output_source
            if source.oid is not None  # A family that has a table there has no table of alarms of its own.
        )
        self._alarms_age += 1
        if (counts, statuses) == self._alarms_state and self._alarms_age < _ALARMS_EVERY:
            return self._alarms
        rows: dict[str, Answer] = {}
        for table, count in zip(tables, counts, strict=True):
            if isinstance(count, int) and count > 0:
                try:
                    rows.update(await self._port.walk(table.column, limit_s=self._battery_limit_s))
                except (SnmpError, TimeoutError) as error:
                    if (counts, statuses) == self._alarms_state:
                        rows |= {oid: raw for oid, raw in self._alarms.items() if below(oid, table.column)}
                    log.debug("alarms_unreadable", ups=self._ups, source=self.name, because=str(error) or "too slow")
        self._alarms, self._alarms_state, self._alarms_age = rows, (counts, statuses), 0
        return rows

    def _watch_up_time(self, ticks: Answer | None) -> None:
        if not isinstance(ticks, int):
            return
        now_s = self._clock()
        if ticks < self._up_ticks < _WRAP_TICKS:
            if ticks / 100 > now_s - self._up_at_s + _SLACK_S:
                because = "its sysUpTime goes back, but not to 0: another device, or two devices answer there in turn"
                self._notices.once("source_doubtful", f"{_where(self._options)}: {because} (give each its own address)")
            else:
                log.warning("card_rebooted", ups=self._ups, source=self.name, up_s=ticks / 100)
            self._refresh_at_s = 0.0
            self._alarms_state = ()
        self._up_ticks, self._up_at_s = ticks, now_s

    async def _look_around(self, decoded: Decoded, at_s: float) -> None:
        """Look for objects that were not there before: now and then, after a reboot, and when the battery begins.

        On battery only one round for the scalars; else all of it again, because the card may have been replaced.
        """
        on_battery = decoded.output_source is OutputSource.BATTERY
        began = on_battery and self._output_source is not OutputSource.BATTERY
        self._output_source = decoded.output_source
        plan = self._plan
        if plan is None or (at_s < self._refresh_at_s and not began):
            return
        with contextlib.suppress(SnmpError, TimeoutError):
            async with asyncio.timeout(2 * self._options.timeout_s):
                if on_battery:
                    found = await scalars(self._port, plan.profiles)
                    oids = tuple(dict.fromkeys((*worth_polling(found), *plan.oids)))
                    self._plan = Plan(identity=plan.identity, profiles=plan.profiles, oids=oids, answers=found)
                else:
                    self._plan = await self._discover()
        self._refresh_at_s = at_s + _REFRESH_S

    # --- Reports -------------------------------------------------------------------------------------------

    def _miss(self, publish: Publish, reason: str) -> None:
        self._misses += 1
        now_s = self._clock()
        is_old = self._output_source is OutputSource.BATTERY and now_s - self._read_at_s >= _ON_BATTERY_LOST_S
        self._is_lost = self._misses >= (2 if is_old else _LOST_AFTER)
        publish(SourceFailed(at_s=now_s, ups=self._ups, source=self.name, reason=reason, lost=self._is_lost))

    def _note(self, decoded: Decoded) -> None:
        if self._is_lost:
            self._refresh_at_s = 0.0  # another card may have come back
        self._misses, self._is_lost = 0, False
        for rejected in decoded.rejected:
            self._notices.once(
                "value_rejected", f"{rejected.field}: {rejected.why}", field=rejected.field, object=rejected.oid
            )
        for warning in decoded.warnings:
            self._notices.once("objects_disagree", warning)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What doctor and `snmp probe` show of a card.

    profiles: names of the families it speaks, most trusted first. raw: every object asked for. latency_s: one poll.
    model, serial: what the card calls the UPS, and its serial number; "" if it does not say.
    restart_pct: the charge at which the UPS switches its output on again; None: not known of its family.
    at_once: objects that the card answers in one request, at most MAX_BATCH.
    """

    where: str
    identity: Identity
    model: str
    serial: str
    profiles: tuple[str, ...]
    raw: dict[str, Answer]
    decoded: Decoded
    latency_s: float
    authenticated: bool
    at_once: int = MAX_BATCH
    restart_pct: float | None = None
    profile_problems: tuple[str, ...] = ()

    @property
    def few(self) -> str:
        """What to say of a card that answers few objects in one request; "" of any other."""
        if self.at_once > _FEW:
            return ""
        return f"answers only {self.at_once} object{'s' * (self.at_once > 1)} in one request, so a poll takes many"


async def probe(options: SnmpOptions, *, profiles: Profiles | None = None, with_pdus: bool = False) -> ProbeReport:
    """Look at a card once. Raises SnmpError, whose text is for the operator, when there is nothing to report.

    with_pdus: a rack PDU is welcome as well.
    """
    port = CardPort(options, hears_late_s=_HEARS_LATE_S)
    limit_s = max(_LONGEST_LOOK_S if options.version == 1 else 0.0, 10 * options.timeout_s + 5.0)
    try:
        async with asyncio.timeout(limit_s):
            profiles = await asyncio.to_thread(load_profiles) if profiles is None else profiles
            plan = await discover(port, _where(options), profiles, options.profile, with_pdus=with_pdus)
            began_s = boottime_s()
            raw = plan.answers | await port.get(plan.oids)
            latency_s = boottime_s() - began_s
            for profile in plan.profiles:
                table = profile.alarm_table
                if table is not None and raw.get(table.count.oid) != 0:
                    with contextlib.suppress(SnmpError):  # it does not cost a source its readings either
                        raw |= await port.walk(table.column)
            restart_pct = await _restart_pct(port, plan.profiles)
            model, serial = await _model_and_serial(port)
    except TimeoutError as error:
        msg = f"{_where(options)} answers too slowly: no whole report in {limit_s:g} s"
        raise SnmpError(msg, unanswered=True) from error
    finally:
        await port.close()
    return ProbeReport(
        where=_where(options),
        identity=plan.identity,
        model=model,
        serial=serial,
        profiles=tuple(profile.name for profile in plan.profiles),
        raw=raw,
        decoded=decode(plan.profiles, raw),
        latency_s=latency_s,
        authenticated=options.version == 3 and options.auth is not None,
        at_once=port.at_once,
        restart_pct=restart_pct,
        profile_problems=profiles.problems,
    )


async def _model_and_serial(port: SnmpPort) -> tuple[str, str]:
    """Ask for both: in the families' own objects, and for the model also in RFC 1628's. A card may refuse them all."""
    answers: dict[str, Answer] = {}
    with contextlib.suppress(SnmpError):
        answers = await port.get([*_MODELS, *_SERIALS])

    def texts(oids: Sequence[str]) -> Iterator[str]:
        values = (answers.get(oid) for oid in oids)
        found = (raw.decode("utf-8", "replace").strip() for raw in values if isinstance(raw, bytes))
        return (text for text in found if text.isprintable())

    model = next((name for name in texts(_MODELS) if any(map(str.isalpha, name))), "")
    return model, next(filter(None, texts(_SERIALS)), "")


async def _restart_pct(port: SnmpPort, profiles: Sequence[Profile]) -> float | None:
    """Ask at which charge the UPS switches its output on again: a setting, so it is asked here and in no poll.

    A card may refuse it, or not answer: its readings are as good as before.
    """
    places = [each.restart_charge.oid for each in profiles if each.restart_charge is not None]
    answers: dict[str, Answer] = {}
    with contextlib.suppress(SnmpError):
        answers = await port.get(places) if places else {}
    values = (answers.get(place) for place in places)
    return next((float(value) for value in values if isinstance(value, int) and 0 <= value <= 100), None)
