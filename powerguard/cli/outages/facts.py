"""The facts of one outage in the journal, gathered for `report`: feeds, phases, trainers, budget, recovery.

Every moment is seconds since the outage began; None means that it did not happen, or is unknown. There are no guesses:
a fact that was not written stays None.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final, NamedTuple

from powerguard.cli.outages.history import Elapsed, Outage, between, is_late_reboot
from powerguard.cli.render import is_endless
from powerguard.core.decide.conditions import SETTLE_S
from powerguard.core.energy import needs, own
from powerguard.core.energy.budget import paused_load, usable
from powerguard.core.model.events import Measured, OwnLoad, Reading, TrainerSeen
from powerguard.core.model.policy import Policy
from powerguard.core.model.serialisation import PlainError, from_plain
from powerguard.daemon.journal import Line, pairs
from powerguard.daemon.journal.records import ReplayStart
from powerguard.daemon.observe.figures import number
from powerguard.effectors.bmc.ipmi import RestartCause

LATE_REBOOT: Final = "late-reboot"
"""The cause of the return if powerguard itself turned the power-off into a reboot."""
POINTS: Final = 400
"""Most points of the runtime that are kept: more than a picture shows."""


class Step(NamedTuple):
    """One line of the story with its moment. numbers: of a note, or the fields of an order."""

    after_s: float
    line: Line
    numbers: Mapping[str, Any]


class OutageFacts(NamedTuple):
    """An outage as it is gathered from. readings, events: (moment, event), in their order."""

    outage: Outage
    elapsed: Elapsed
    steps: tuple[Step, ...]
    readings: tuple[tuple[float, Reading], ...]
    events: tuple[tuple[float, Any], ...]
    start: ReplayStart | None
    last_s: float
    """The last known moment."""

    @property
    def policy(self) -> Policy | None:
        """The settings of that time, with the measurements; None if the journal did not keep them."""
        return None if self.start is None else needs.fold(self.start.policy, self.start.state.learned)

    def notes(self, *events: str) -> tuple[Step, ...]:
        """Return the notes of these names."""
        return tuple(step for step in self.steps if step.line.kind == "note" and step.line.event in events)

    def first(self, event: str, **numbers: object) -> Step | None:
        """Return the first note of that name with these numbers."""
        found = self.notes(event)
        return next((s for s in found if all(s.numbers.get(k) == v for k, v in numbers.items())), None)

    def phase(self, new: str) -> float | None:
        """Return when a phase first began."""
        step = self.first("phase_changed", new=new)
        return None if step is None else step.after_s


def gather(outage: Outage) -> OutageFacts:
    """Read an outage once, for all facts."""
    elapsed = Elapsed(outage.record, outage.lines, outage.rows)
    steps = tuple(Step(elapsed.of(line), line, _numbers(line)) for line in outage.lines)
    events = [
        (at_s, event)
        for row in outage.rows
        for event in row.heard.events
        if (at_s := elapsed.at(row.boot_id, event.at_s)) is not None
    ]
    readings = [(at_s, event) for at_s, event in events if isinstance(event, Reading)]
    if not readings:  # A journal of before readings were kept, or one that was salvaged: one in five seconds.
        read = ((step.after_s, _read(step.line, Reading)) for step in steps)
        readings = [(at_s, reading) for at_s, reading in read if isinstance(reading, Reading)]
    known = [0.0, *(step.after_s for step in steps), *(at_s for at_s, _ in readings)]
    last_s = max(known) if elapsed.ended_s is None else elapsed.ended_s
    return OutageFacts(
        outage=outage,
        elapsed=elapsed,
        steps=steps,
        readings=tuple(readings),
        events=tuple(events),
        start=next((row.heard.start for row in outage.rows if row.heard.start is not None), None),
        last_s=last_s,
    )


def _read(line: Line, kind: type[Reading | TrainerSeen]) -> Reading | TrainerSeen | None:
    """Return what was answered with a line, if it is of that kind and can be read."""
    if line.kind != "event" or line.event != kind.__name__:
        return None
    try:
        return from_plain(line.payload, kind)
    except PlainError:
        return None


def _numbers(line: Line) -> dict[str, Any]:
    """Read a note's numbers, which the journal keeps as pairs; of an order, its fields."""
    if line.kind == "action":
        return dict(line.payload)
    return pairs(line.payload.get("detail" if line.kind == "outcome" else "numbers"))


# --- Feeds ------------------------------------------------------------------------------------------------------------


def feeds(facts: OutageFacts) -> list[dict[str, Any]]:
    """Return each UPS with the stretches of its output source; a gap of the readings ends a stretch."""
    found: dict[str, list[list[Any]]] = {}
    for at_s, reading in sorted(facts.readings, key=lambda each: each[0]):
        stretches = found.setdefault(reading.ups, [])
        source = reading.output_source.value
        if stretches and stretches[-1][0] == source and at_s - stretches[-1][2] <= _SILENT_S:
            stretches[-1][2] = at_s
            continue
        if stretches and at_s - stretches[-1][2] <= _SILENT_S:
            stretches[-1][2] = at_s
        stretches.append([source, at_s, at_s])
    return [
        {
            "ups": ups,
            "stretches": [{"source": s, "from_s": _r(begun_s), "to_s": _r(to_s)} for s, begun_s, to_s in stretches],
        }
        for ups, stretches in found.items()
    ]


_SILENT_S: Final = 15.0
"""A longer gap of the readings ends a stretch: the UPS's state is unknown. Old journals keep one in 5 s."""


def _r(seconds: float) -> float:
    return round(seconds, 3)


def runtime(facts: OutageFacts) -> list[dict[str, Any]]:
    """Return the reported runtime, charge and load over time: of several feeds that with the least. At most POINTS."""
    least: dict[int, tuple[tuple[float, float], float, Reading]] = {}
    for at_s, reading in facts.readings:
        lasts_s, charge, load = reading.runtime_s, reading.charge_pct, reading.load_pct
        rank = (math.inf if lasts_s is None else lasts_s, math.inf if charge is None else charge)
        if at_s >= 0.0 and (lasts_s, charge, load) != (None, None, None):
            known = least.get(int(at_s))
            if known is None or rank < known[0]:
                least[int(at_s)] = (rank, at_s, reading)
    points = [least[second] for second in sorted(least)]
    every = max(1, -(-len(points) // POINTS))
    kept = points[::every] + (points[-1:] if points and (len(points) - 1) % every else [])
    return [
        {"at_s": _r(at_s), "reported_s": r.runtime_s, "charge_pct": r.charge_pct, "load_pct": r.load_pct}
        for _, at_s, r in kept
    ]


def detection(facts: OutageFacts) -> dict[str, float | None]:
    """Return when power went, by the UPS's own clock or the last reading on utility, and how late that was known."""
    began = facts.first("outage_began")
    confirmed_s = None if began is None else began.after_s
    first = _first_on_battery(facts, math.inf if confirmed_s is None else confirmed_s)
    if first is None:
        return {"power_lost_s": None, "first_heard_s": None, "confirmed_s": confirmed_s}
    lost_s = first[0] - (first[1].on_battery_s or 0.0)
    before = [at_s for at_s, r in facts.readings if at_s < first[0] and r.ups == first[1].ups]
    lost_s = max([lost_s, *before[-1:]]) if before else lost_s
    return {"power_lost_s": _r(lost_s), "first_heard_s": _r(first[0]), "confirmed_s": confirmed_s}


def _first_on_battery(facts: OutageFacts, until_s: float) -> tuple[float, Reading] | None:
    """Return the reading that the outage began with: a dip just before it, with utility in between, is none of it.

    Of several feeds, the one that left too few power supplies on utility: those before it are a loss of redundancy.
    """
    firsts: dict[str, tuple[float, Reading]] = {}
    for at_s, reading in facts.readings:
        if reading.output_source.value == "battery" and at_s > -30.0:
            firsts.setdefault(reading.ups, (at_s, reading))
        elif reading.output_source.value == "utility" and at_s <= until_s:
            firsts.pop(reading.ups, None)
    found = sorted(firsts.values(), key=lambda each: each[0])
    supplies = {} if facts.policy is None else {each.policy.ups: each.supplies for each in facts.policy.feeds}
    spare = sum(supplies.values()) - (0 if facts.policy is None else facts.policy.minimum_supplies)
    for each in found:
        spare -= supplies.get(each[1].ups, 0)
        if supplies and spare < 0 and each[0] <= until_s:
            return each
    return found[0] if found else None


# --- Phases -----------------------------------------------------------------------------------------------------------


def phases(facts: OutageFacts) -> list[dict[str, Any]]:
    """Return every stretch of the outage: phases, and between commit and return the host's own stop, dark and boot."""
    found: list[tuple[str, float]] = []
    ended = False
    for step in facts.notes("phase_changed", "host_returned", "outage_ended"):
        if step.line.event == "outage_ended":
            ended = True
        elif step.line.event == "host_returned":
            found += _away(facts, step, found[-1][1] if found else 0.0)
        elif not ended and isinstance(new := step.numbers.get("new"), str):
            ended = new == "online"
            if not ended and (new != "recovery" or not found):  # else the line before says that the host is back
                found.append((new, 0.0 if not found else step.after_s))
    stretches = []
    for at, (name, begun_s) in enumerate(found):
        to_s = found[at + 1][1] if at + 1 < len(found) else facts.last_s
        stretches.append({"name": name, "from_s": _r(begun_s), "to_s": _r(max(begun_s, to_s)), "s": None})
        if not (facts.elapsed.doubted and name in ("shutdown", "off")):
            stretches[-1]["s"] = _r(max(0.0, to_s - begun_s))
    return stretches


def _away(facts: OutageFacts, returned: Step, since_s: float) -> list[tuple[str, float]]:
    """Return the parts between the last entry of the old boot and the daemon's return."""
    earlier_s = [
        s.after_s for s in facts.steps if s.line.seq < returned.line.seq and s.line.boot_id != returned.line.boot_id
    ]
    last_s = max(earlier_s, default=since_s)
    stop_s = measured(facts, "stop", returned.line.boot_id)
    commit = [s for s in facts.notes("phase_changed") if s.numbers.get("new") == "shutdown" and s.after_s <= last_s]
    dark_s = last_s if stop_s is None or not commit else max(last_s, commit[-1].after_s + stop_s)
    # The boot's clock began at 0 when its kernel did; the firmware came before that.
    firmware_s = number(_powered_on(facts, returned.line.boot_id).get("firmware_s")) or 0.0
    power_on_s = max(dark_s, returned.after_s - returned.line.at_s - firmware_s)
    back_s = max(power_on_s, returned.after_s - undecided_s(returned))
    return [("off", min(dark_s, power_on_s)), ("boot", power_on_s), ("recovery", back_s)]


def booted_s(returned: Step) -> float:
    """Return when the daemon of this return started, in its boot's clock.

    Of a host that went down before its outage was known, it was first decided what that was.
    """
    at_s = number(returned.numbers.get("booted_s"))
    return returned.line.at_s if at_s is None else min(max(0.0, at_s), returned.line.at_s)


def undecided_s(returned: Step) -> float:
    """Return how long it took to decide that it was one."""
    return returned.line.at_s - booted_s(returned)


def away_s(facts: OutageFacts, returned: Step) -> float | None:
    """Return how long the host was off before this return; None if it is unknown.

    Of a host that went down before its outage was known, only the note of its return says so.
    """
    return facts.elapsed.away_s.get(returned.line.boot_id, number(returned.numbers.get("away_s")))


def _powered_on(facts: OutageFacts, boot_id: str) -> Mapping[str, Any]:
    """Return the journal's facts on the start of a boot; empty if there are none."""
    return next((step.numbers for step in facts.notes("host_powered_on") if step.line.boot_id == boot_id), {})


def _ac_gone(facts: OutageFacts, back: Step, powered_on: Mapping[str, Any], *, rebooted: bool) -> bool | None:
    """Return whether AC was gone at this host, by all evidence; None if that is inconclusive.

    The BMC's bit alone proves only a loss: boards that were off in order may leave it clear when AC goes.
    """
    causes = (RestartCause.POLICY_ALWAYS_ON.value, RestartCause.POLICY_LAST_STATE.value)
    if powered_on.get("ac_failed") is True or powered_on.get("cause") in causes:
        return True
    if rebooted:
        return False
    kernel_s = back.after_s - back.line.at_s
    before = {r.ups: r for at_s, r in facts.readings if at_s < kernel_s}
    after = {r.ups: r for at_s, r in reversed(facts.readings) if at_s >= kernel_s}
    methods = [
        s for s in facts.notes("power_on_armed") if s.line.seq < back.line.seq and s.numbers.get("method") == "output"
    ]
    drained = any(
        (old_pct := before[ups].charge_pct) is not None
        and now.charge_pct is not None
        and now.charge_pct < old_pct - _DRAINED
        for ups, now in after.items()
        if ups in before
    )
    on_utility = bool(before) and all(each.output_source.value == "utility" for each in before.values())
    return False if powered_on.get("ac_failed") is False and on_utility and not methods and not drained else None


_DRAINED: Final = 5.0
"""A charge that is lower by more than these points after the return: the battery went on to discharge."""


def _brought_by(cause: object, later: Sequence[Step], *, rebooted: bool) -> str | None:
    """Return what powered the host on: as its BMC names it, and the origin of an order over the BMC, if it was ours.

    later: the lines after the return. A sentinel reports its orders when the host withdraws the intent. rebooted: by
    our own late reboot, which a BMC does not see: it names the cause of the earlier power-on.
    """
    if rebooted:
        return LATE_REBOOT
    known_cause = cause if isinstance(cause, str) and cause else None
    ordered = any(s.line.event == "Done" and number(s.numbers.get("orders")) for s in later)
    return "sentinel" if ordered and known_cause in {None, RestartCause.CHASSIS_CONTROL.value} else known_cause


def measured(facts: OutageFacts, need: str, boot_id: str) -> float | None:
    """Return a boot's measurement of the stop before it, or of itself; None if there is none."""
    return next(
        (
            event.seconds
            for row in facts.outage.rows
            if row.boot_id == boot_id
            for event in row.heard.events
            if isinstance(event, Measured) and event.need == need
        ),
        None,
    )


_RECOVERY: Final = (
    "away_s",
    "stop_s",
    "powered_on_by",
    "ac_failed",
    "ac_gone",
    "firmware_s",
    "boot_s",
    "gate_s",
    "check_s",
    "start_s",
    "resumed_s",
    "ours_s",
)


def recovery(facts: OutageFacts) -> dict[str, Any]:
    """Return the last return, with the time of each part. None: unknown, or there was none."""
    returns = facts.notes("host_returned")
    if not returns:
        return dict.fromkeys(_RECOVERY)
    back = returns[-1]
    later = [step for step in facts.steps if step.line.seq > back.line.seq]
    gate = next((s for s in later if s.line.event in ("gate_opened", "gate_forced")), None)
    order = next((s for s in later if s.line.kind == "action" and s.line.event == "ResumeTraining"), None)
    begun = order or gate
    begun_s = None if begun is None else begun.after_s
    check_s = _check_s(later, begun_s)
    gate_s = between(back.after_s, begun_s)
    powered_on = _powered_on(facts, back.line.boot_id)
    rebooted = is_late_reboot([step.line for step in facts.steps], back.line, powered_on)
    answers = {s.line.action for s in later if s.line.kind == "action" and s.line.event == "ResumeTraining"}
    started = next((s for s in later if s.line.event == "Done" and s.line.action in answers), None)
    seen_s = None
    if started is not None:
        seen_s = min((at_s for at_s in _answers(facts) if at_s >= started.after_s), default=None)
    started_s = None if started is None else started.after_s
    ended_s = seen_s if seen_s is not None else started_s
    return {
        "away_s": away_s(facts, back),
        "stop_s": measured(facts, "stop", back.line.boot_id),
        "powered_on_by": _brought_by(powered_on.get("cause"), later, rebooted=rebooted),
        "ac_failed": powered_on.get("ac_failed"),
        "ac_gone": _ac_gone(facts, back, powered_on, rebooted=rebooted),
        "firmware_s": number(powered_on.get("firmware_s")),
        "boot_s": _r(booted_s(back)),
        "gate_s": gate_s if gate_s is None or check_s is None else _r(gate_s - check_s),
        "check_s": check_s,
        "start_s": between(begun_s, started_s),
        "resumed_s": between(started_s, seen_s),
        "ours_s": between(back.after_s - undecided_s(back), ended_s),
    }


def _check_s(later: list[Step], begun_s: float | None) -> float | None:
    """Return how long it took until the host was found complete, while the gate waited; None: no check.

    If the gate waits for long, the check is repeated.
    """
    took_s, since_s = None, None
    for step in later:
        if begun_s is not None and step.after_s > begun_s:
            break
        if step.line.event == "CheckHost" and step.line.kind == "action":
            since_s = step.after_s if since_s is None else since_s
            took_s = took_s or 0.0
        elif step.line.event == "host_checked" and since_s is not None:
            took_s, since_s = (took_s or 0.0) + step.after_s - since_s, None
    if took_s is None or begun_s is None:
        return None
    return _r(took_s if since_s is None else took_s + begun_s - since_s)


def _answers(facts: OutageFacts) -> list[float]:
    """Return when a trainer was seen to train: it reported a step, or appeared.

    The outage ends when training is started; its first step is in the lines after it.
    """
    found = [at_s for at_s, event in facts.events if isinstance(event, TrainerSeen) and _trains(event)]
    for line in (*facts.outage.lines, *facts.outage.after):
        seen = _read(line, TrainerSeen)
        if line.event == "trainer_appeared" or (isinstance(seen, TrainerSeen) and _trains(seen)):
            found.append(facts.elapsed.of(line))
    return found


def _trains(seen: TrainerSeen) -> bool:
    return seen.alive and not seen.paused and seen.step is not None


# --- Trainers ---------------------------------------------------------------------------------------------------------


def trainers(facts: OutageFacts) -> list[dict[str, Any]]:
    """Return the requests to each trainer from the pause on, and their results."""
    paused_s = facts.phase("emergency_checkpoint")
    if paused_s is None:
        return []
    outcomes = {step.line.action: step for step in facts.steps if step.line.kind == "outcome"}
    orders: dict[str, list[Step]] = {}
    for step in facts.steps:
        if step.line.kind == "action" and step.line.event == "TriggerCheckpoint" and step.after_s >= paused_s:
            orders.setdefault(str(step.numbers.get("trainer")), []).append(step)
    expected = _expected(facts, paused_s)
    lost = _steps_lost(facts)
    found = [_trainer(name, requests, outcomes, expected.get(name), lost) for name, requests in orders.items()]
    for each in found:
        _add_end(facts, each, paused_s)
    return found


def _add_end(facts: OutageFacts, trainer: dict[str, Any], paused_s: float) -> None:
    """Enter the signals, and the work at risk after the checkpoint: until the trainer's end, or the commit."""
    steps = [s for s in facts.steps if s.after_s >= paused_s and s.numbers.get("trainer") == trainer["trainer"]]
    trainer["signals"] = [
        {"signal": _SIGNALS[s.line.event], "at_s": s.after_s, **_effect(facts, s.after_s)}
        for s in steps
        if s.line.event in _SIGNALS
    ]
    returned = facts.first("host_returned")
    stays = returned is None and facts.outage.record.ended_wall is not None  # rehearsed, called off, or never ordered
    off_s = None if stays else facts.phase("shutdown")
    off_s = returned.after_s if off_s is None and returned is not None else off_s
    ends = [s.after_s for s in steps if s.line.event in _ENDS and (off_s is None or s.after_s <= off_s)]
    trainer["ended_s"] = min(ends, default=None)
    until_s = min([*ends, *([] if off_s is None else [off_s])], default=None)
    durable_s = trainer["durable_s"]
    if trainer["steps_lost"] is not None:
        return
    if until_s is None:
        if durable_s is not None and facts.outage.record.ended_wall is not None:
            trainer["at_risk_s"], trainer["steps_lost"] = 0.0, 0
    elif durable_s is None or trainer["after"] == "continue":
        if durable_s is not None:
            trainer["at_risk_s"] = _r(max(0.0, until_s - durable_s))
        trainer["steps_lost"] = _behind(facts, trainer, facts.last_s if returned is None else returned.after_s)


def _behind(facts: OutageFacts, trainer: Mapping[str, Any], until_s: float) -> int | None:
    """Return by how many steps a trainer was ahead of its newest checkpoint when last seen; None: unknown."""
    seen = [e for at_s, e in facts.events if isinstance(e, TrainerSeen) and at_s < until_s and e.alive]
    reports = [e for e in seen if e.trainer == trainer["trainer"]]
    steps = [e.step for e in reports if e.step is not None]
    saved = [e.durable_step for e in reports if e.durable_step is not None]
    saved += [] if trainer["step"] is None else [trainer["step"]]
    return max(0, steps[-1] - max(saved)) if steps and saved else None


def _effect(facts: OutageFacts, at_s: float) -> dict[str, float | None]:
    """Return what a signal did: load of the UPS and draw of this host before it, and once they had time to follow."""
    loads = [(seen_s, each.load_pct) for seen_s, each in sorted(facts.readings, key=lambda pair: pair[0])]
    draws = [(seen_s, each.watts) for seen_s, each in facts.events if isinstance(each, OwnLoad)]

    def around(seen: Sequence[tuple[float, float | None]]) -> tuple[float | None, float | None]:
        known = [(seen_s, value) for seen_s, value in seen if value is not None]
        before = [value for seen_s, value in known if seen_s <= at_s]
        after = [value for seen_s, value in known if at_s < seen_s <= at_s + SETTLE_S]
        return (before[-1] if before else None), (after[-1] if after else None)

    load_before, load_after = around(loads)
    own_before, own_after = around(draws)
    return {
        "load_before_pct": load_before,
        "load_after_pct": load_after,
        "own_before_w": own_before,
        "own_after_w": own_after,
    }


_SIGNALS: Final = {"trainer_stopped": "SIGSTOP", "trainer_continued": "SIGCONT", "trainer_terminated": "SIGTERM"}
_ENDS: Final = ("trainer_terminated", "trainer_gone")


def _trainer(
    name: str,
    requests: Sequence[Step],
    outcomes: Mapping[str | None, Step],
    expected_s: float | None,
    lost: Mapping[str, int | None],
) -> dict[str, Any]:
    answers = [outcomes[step.line.action] for step in requests if step.line.action in outcomes]
    good = [step for step in answers if step.line.event == "Done"]
    bad = [step for step in answers if step.line.event == "Failed"]
    last = good[-1] if good else None
    found = {} if last is None else last.numbers
    # A trainer that continues is no longer at the step of its checkpoint.
    at_step = found.get("at_paused_step") is True and requests[-1].numbers.get("after") != "continue"
    return {
        "trainer": name,
        "asked_s": requests[0].after_s,
        "tries": len(requests),
        "expected_s": expected_s,
        "took_s": None if last is None else number(last.line.payload.get("took_s")),
        "durable_s": None if last is None else last.after_s,
        "step": found.get("step") if isinstance(found.get("step"), int) else None,
        "verified": None if last is None else found.get("verified") is True,
        "steps_lost": lost.get(name, 0 if at_step else None),
        "after": requests[-1].numbers.get("after"),
        "at_risk_s": 0.0 if at_step else None,
        "signals": [],
        "ended_s": None,
        "failure": bad[-1].line.because if bad and last is None else None,
        "timed_out": any(step.line.payload.get("timed_out") is True for step in bad),
        "failed": len(bad),
    }


def _expected(facts: OutageFacts, paused_s: float) -> dict[str, float]:
    """Return what a checkpoint of each trainer was counted with when the pause was ordered."""
    if facts.start is None:
        return {}
    reported = {each.name: each.checkpoint_s for each in facts.start.policy.trainers}
    reported |= {each.name: each.checkpoint_s for each in facts.start.state.trainers}
    for at_s, event in facts.events:
        if isinstance(event, TrainerSeen) and at_s <= paused_s and event.checkpoint_s is not None:
            reported[event.trainer] = event.checkpoint_s
    learned = facts.start.state.learned
    return {name: round(needs.checkpoint_s(learned, name, reported_s), 3) for name, reported_s in reported.items()}


def _steps_lost(facts: OutageFacts) -> dict[str, int | None]:
    """Return by how many steps an older checkpoint that counts is behind, by trainer; None if unknown."""
    found: dict[str, int | None] = {}
    whose = ""
    orders = {s.line.action: str(s.numbers.get("trainer")) for s in facts.steps if s.line.kind == "action"}
    for step in facts.steps:
        if step.line.kind == "outcome":
            whose = orders.get(step.line.action, "")
        elif step.line.event == "older_checkpoint_stands" and whose:
            lost = step.numbers.get("steps_lost")
            found[whose] = lost if isinstance(lost, int) else None
    return found


def steps_lost(facts: OutageFacts, trainer_rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the most steps that a trainer has lost; None if that is unknown for one of them.

    No step is lost if the host and its trainers never went down. If the host did, without a checkpoint in time, the
    distance of training to its newest checkpoint counts.
    """
    returned, outcome = facts.first("host_returned"), facts.outage.record.outcome
    stayed_on = returned is None and facts.phase("shutdown") is None
    if stayed_on and outcome not in ("lost", "clean_shutdown", "dirty"):  # else the journal has lost these steps
        ended = [trainer["steps_lost"] for trainer in trainer_rows if trainer["ended_s"] is not None]
        return None if None in ended else max(ended, default=0)
    known: list[int] = [trainer["steps_lost"] for trainer in trainer_rows if trainer["steps_lost"] is not None]
    if trainer_rows and len(known) == len(trainer_rows):
        return max(known)
    return None if returned is None else _rolled_back(facts, returned)


def _rolled_back(facts: OutageFacts, returned: Step) -> int | None:
    """Return by how many steps the newest durable checkpoint was behind when the host went down unasked."""
    last: dict[str, int | None] = {}
    for row in takewhile(lambda row: row.boot_id != returned.line.boot_id, facts.outage.rows):
        for event in row.heard.events:
            if isinstance(event, TrainerSeen) and event.alive:
                both = event.step is not None and event.durable_step is not None
                last[event.trainer] = max(0, event.step - event.durable_step) if both else None  # type: ignore[operator]
    known = [steps for steps in last.values() if steps is not None]
    return max(known) if known and len(known) == len(last) else None


# --- The budget -------------------------------------------------------------------------------------------------------


def budget(facts: OutageFacts) -> list[dict[str, Any]]:
    """Return the budget at each decision. grade: of the power-off, as ordered.

    predicted_s, predicted_left: effective runtime and energy at the next decision, or when the host was off, as this
    decision predicted them: until the pause its load counts, then the paused one.
    """
    found: list[dict[str, Any]] = []
    cuts_in_s: list[float | None] = []
    ordered = ordered_grade(facts)
    for step in facts.notes("phase_changed"):
        if not isinstance(step.numbers.get("new"), str):
            continue
        reff_s, checkpoint_s, stop_s = (number(step.numbers.get(n)) for n in ("reff_now_s", "checkpoint_s", "stop_s"))
        room_s = number(step.numbers.get("shed_s")) or 0.0
        needs_s = None if checkpoint_s is None or stop_s is None else _r(checkpoint_s + stop_s + room_s)
        cuts_in_s.append(number(step.numbers.get("cut_in_s")))
        found.append(
            {
                "at_s": step.after_s,
                "phase": str(step.numbers.get("new")),
                "effective_now_s": reff_s,
                "effective_paused_s": number(step.numbers.get("reff_paused_s")),
                "checkpoint_s": checkpoint_s,
                "stop_s": stop_s,
                "needs_s": needs_s,
                "left": number(step.numbers.get("left")),
                "load": number(step.numbers.get("load")),
                "grade": ordered if ordered and step.numbers.get("new") == "shutdown" else step.numbers.get("grade"),
            }
        )
    off_s = next((part["from_s"] for part in phases(facts) if part["name"] == "off"), facts.last_s)
    ends_s = [*(row["at_s"] for row in found[1:]), facts.last_s]
    for row, cut_in_s, ends_at_s in zip(found, cuts_in_s, ends_s, strict=False):
        until_s = min(ends_at_s, off_s) if row["at_s"] <= off_s else ends_at_s
        row["predicted_s"], row["predicted_left"] = _predicted(facts.policy, row, cut_in_s, until_s - row["at_s"])
    return found


def _predicted(
    policy: Policy | None, row: Mapping[str, Any], cut_in_s: float | None, for_s: float
) -> tuple[float | None, float | None]:
    """Return effective runtime and energy after for_s more, as this decision predicted them. None: unknown, or endless.

    The margin is a share of the energy, so a large effective runtime falls by less than one second per second.
    """
    lasts_s, left = row["effective_now_s" if row["phase"] == "on_battery" else "effective_paused_s"], row["left"]
    if policy is None or left is None or not lasts_s or is_endless(lasts_s) or not usable(policy, left):
        return None, None
    if cut_in_s is not None and lasts_s >= cut_in_s:
        return _r(max(0.0, lasts_s - for_s)), None
    tau_s = lasts_s / usable(policy, left)
    then_left = max(0.0, left - for_s / tau_s)
    then_s = usable(policy, then_left) * tau_s
    return _r(then_s if cut_in_s is None else min(then_s, max(0.0, cut_in_s - for_s))), _r(then_left)


def ordered_grade(facts: OutageFacts) -> str:
    """Return the grade of the stop that was ordered; "" for none. The commit may lower that of its sums."""
    ordered = facts.notes("power_off_ordered")
    return str(ordered[-1].numbers.get("grade") or "") if ordered else ""


def predicted_paused_load(facts: OutageFacts, load: float | None) -> float | None:
    """Return the load that the pause was counted with. load: at the pause, a share of the rating."""
    if load is None or facts.start is None or facts.policy is None:
        return None
    state = facts.start.state
    then = replace(state, battery=replace(state.battery, load=load))
    own_load = own.own_load(facts.policy, then, facts.start.at_s)
    return round(paused_load(facts.policy, state.trainers, load, state.learned, own=own_load), 3)
