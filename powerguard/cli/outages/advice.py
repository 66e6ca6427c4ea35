"""Prediction and fact, and advice for the next outage: rules on the facts that `report` gathered."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import Any, Final, NamedTuple

from powerguard.cli.outages.facts import (
    LATE_REBOOT,
    OutageFacts,
    booted_s,
    measured,
    ordered_grade,
    predicted_paused_load,
    undecided_s,
)
from powerguard.cli.outages.history import BY_HAND
from powerguard.cli.render import clean, duration
from powerguard.cli.words import short_since_s
from powerguard.core.decide.transitions import Cause
from powerguard.core.energy import needs
from powerguard.core.energy.budget import stop_s
from powerguard.core.model.actions import Grade
from powerguard.core.model.policy import Mode
from powerguard.daemon.observe.figures import number

LATE_S: Final = 5.0
"""Longest good time from the loss of power to two witnesses; a second or two is possible."""
OURS_S: Final = 90.0
"""From the start of the operating system to training."""
_LONGER: Final = 1.1
_NAMED: Final = 5
"""Most trainers that one sentence names."""

Advice = dict[str, str | None]


# --- Prediction against fact ------------------------------------------------------------------------------------------


def predictions(facts: OutageFacts, budget: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare the budget's predictions with the measurements, if both exist."""
    found: list[dict[str, Any]] = []

    def add(what: str, predicted: float | None, fact: float | None, unit: str = "s") -> None:
        if predicted is not None and fact is not None:
            digits = 1 if unit == "s" else 3
            found.append(
                {"what": what, "predicted": round(predicted, digits), "measured": round(fact, digits), "unit": unit}
            )

    at = {moment["phase"]: moment for moment in reversed(budget)}
    acts = facts.policy is None or facts.policy.mode is not Mode.DRY_RUN  # else no trainer was asked
    began, paused, held, latched = (at.get(n) for n in ("on_battery", "emergency_checkpoint", "holding", "shutdown"))
    follows = [(before["at_s"], after["at_s"]) for before, after in pairwise(budget)]
    if began and paused and (began["at_s"], paused["at_s"]) in follows:
        what = "effective runtime at the pause, at the load of that moment"
        add(what, began["predicted_s"], paused["effective_now_s"])
    if paused and acts:
        add(
            "all checkpoints, from the pause to durable",
            paused["checkpoint_s"],
            number(facts.outage.record.figures.get("checkpoint_s")),
        )
        later = held or latched
        if later:
            add(
                "load after the checkpoint order",
                predicted_paused_load(facts, paused["load"]),
                _settled(facts, later, latched, budget),
                "share",
            )
    if held and latched and acts and (held["at_s"], latched["at_s"]) in follows:
        add("effective runtime at the commit", held["predicted_s"], latched["effective_now_s"])
    _add_return(facts, latched, add)
    return found


def _settled(
    facts: OutageFacts,
    later: Mapping[str, Any],
    latched: Mapping[str, Any] | None,
    budget: Sequence[Mapping[str, Any]],
) -> float | None:
    """Return the load once the pause had settled: the last one read on battery before the host stops or trains again.

    None if no UPS was read in that time.
    """
    next_s = [moment["at_s"] for moment in budget if moment["at_s"] > later["at_s"]]
    until_s = min(next_s, default=facts.last_s) if latched is not later else latched["at_s"]
    loads = [
        reading.load_pct / 100.0
        for at_s, reading in facts.readings
        if later["at_s"] <= at_s <= until_s and reading.load_pct and reading.output_source.value == "battery"
    ]
    if loads and facts.policy is not None and facts.policy.feeds:
        return number((later if latched is None else latched)["load"])  # Of all feeds together.
    return loads[-1] if loads else None


def _add_return(facts: OutageFacts, latched: Mapping[str, Any] | None, add: Any) -> None:  # noqa: ANN401 - a local function
    returned = facts.notes("host_returned")
    if not returned or facts.start is None:
        return
    boot_id, learned, policy = returned[-1].line.boot_id, facts.start.state.learned, facts.policy
    if latched is not None and latched["grade"] in (Grade.FULL, Grade.SHORT, Grade.BARE) and policy is not None:
        stop = stop_s(policy, Grade(latched["grade"]), reserve_s=0.0)
        add("the host's stop", stop - policy.ups_off_s, measured(facts, "stop", boot_id))
    for need, what in (
        ("boot", "the host's boot, from its kernel to the daemon"),
        ("resume", "from the daemon to training"),
    ):
        known = needs.samples(learned, need)
        if known:
            fact = booted_s(returned[-1]) if need == "boot" else number(facts.outage.record.figures.get("recovery_s"))
            add(what, needs.median(known), fact)


# --- What to improve --------------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    """The input of a rule: the gathered outage, and the report so far."""

    facts: OutageFacts
    report: Mapping[str, Any]
    measured: bool


def advice(facts: OutageFacts, report: Mapping[str, Any], *, measured: bool = False) -> list[Advice]:
    """Return the advice for the next outage, the most important first; empty if there is none.

    measured: the battery's health has been measured by now. In dry-run there is no advice on actions that were only
    recorded.
    """
    case = _Case(facts, report, measured)
    rules = _RULES_OF_DRY_RUN if report["mode"] == "dry-run" else _RULES
    found = [each for rule in rules for each in rule(case)]
    order = ("error", "warning", "info")
    return sorted(found, key=lambda each: order.index(str(each["level"])))


def _say(rule: str, level: str, text: str, setting: str | None = None) -> Advice:
    return {"rule": rule, "level": level, "text": text, "setting": setting}


def _names(trainers: Sequence[Mapping[str, Any]]) -> str:
    names = [clean(each["trainer"]) for each in trainers]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _dirty(case: _Case) -> Iterator[Advice]:
    if case.facts.first("phase_changed", cause=Cause.POWER_LOST.value) is not None:
        yield _say(
            "unseen",
            "error",
            "The host lost power, or crashed, while its UPS reported utility. `powerguard drill --witness plug` shows "
            "a battery that fails at the transfer. Look for a breaker or a cable between UPS and host, and for a crash "
            "in `journalctl --boot -1`.",
        )
    elif case.report["outcome"] == "dirty":
        yield _say(
            "dirty",
            "error",
            "The host went down before its orderly power-off: the battery gave less than every term predicted, or the "
            "host crashed. Replay the outage (`powerguard history export`, `powerguard replay --diff`), rehearse with "
            "`powerguard drill`, and until then raise budget.margin or lower budget.health.",
            "budget.margin",
        )
    elif case.report["outcome"] == "lost":
        yield _say(
            "lost", "warning", "The journal has no end of this outage: look for `journal_not_durable` and "
            "crashes in the system's log.",
        )  # fmt: skip


def _checkpoint_slow(case: _Case) -> Iterator[Advice]:
    slow = [
        t
        for t in case.report["trainers"]
        if t["took_s"] is not None and t["expected_s"] is not None and t["took_s"] > _LONGER * t["expected_s"] + 1.0
    ]
    if slow:
        worst = max(slow, key=lambda t: t["took_s"] - t["expected_s"])
        yield _say(
            "checkpoint_slow",
            "warning",
            f"The checkpoint of {_names(slow)} took longer than planned: {duration(worst['took_s'])} instead of "
            f"{duration(worst['expected_s'])} ({clean(worst['trainer'])}). Set checkpoint_s: {ceil(worst['took_s'])} "
            "for it, and trainers that write to one disk the same word in `disk`.",
            "trainers[].checkpoint_s",
        )


def _never_answered(case: _Case) -> Iterator[Advice]:
    mute = [
        t
        for t in case.report["trainers"]
        if t["durable_s"] is None and (t["failed"] or case.report["ended_at"] is not None)
    ]
    if mute:
        first = mute[0]
        why = f": {clean(first['failure'])}" if first["failure"] else ""
        yield _say(
            "checkpoint_missing",
            "error",
            f"{_names(mute)} wrote no checkpoint, asked {_times(first['tries'])}{why}. Check that it runs, and that it "
            "answers `powerguard checkpoint`. Configure a `fallback` (a signal or a program) for the case that HTTP "
            "fails.",
            "trainers[].fallback",
        )
    again = [t for t in case.report["trainers"] if t["durable_s"] is not None and t["failed"]]
    if again:
        tries = max(t["tries"] for t in again)
        yield _say(
            "checkpoint_repeated",
            "warning",
            f"The first checkpoint of {_names(again)} failed; {tries} were asked for. The reason is in "
            f"`powerguard explain`.",
        )


def _older(case: _Case) -> Iterator[Advice]:
    older = [t for t in case.report["trainers"] if t["steps_lost"] is None or t["steps_lost"] > 0]
    stood = case.facts.notes("older_checkpoint_stands")
    if stood:
        known = [t["steps_lost"] for t in older if t["steps_lost"]]
        lost = f", {max(known)} steps behind" if known else ""
        yield _say(
            "older_checkpoint",
            "warning",
            f"An older checkpoint had to do{lost}: {clean(stood[-1].line.because)}. A faster disk or an earlier "
            "pause (a larger budget.reserve_s) would leave time for one at the paused step.",
            "budget.reserve_s",
        )


def _trained_on(case: _Case) -> Iterator[Advice]:
    on = [t for t in case.report["trainers"] if t["after"] == "continue" and t["at_risk_s"]]
    if on:
        worst = max(on, key=lambda t: t["at_risk_s"])
        steps = "" if worst["steps_lost"] is None else f" ({worst['steps_lost']} steps)"
        yield _say(
            "trained_on",
            "warning",
            f"{_names(on)} trained on after its checkpoint: {duration(worst['at_risk_s'])}{steps} of work were lost. "
            "Let it pause after the checkpoint: docs/reference/trainer-endpoint.md.",
        )


def _signalled(case: _Case) -> Iterator[Advice]:
    for each in case.report["trainers"]:
        if each["signals"]:
            sent = ", ".join(f"{s['signal']} at +{duration(s['at_s'])}" for s in each["signals"])
            yield _say(
                "signalled",
                "warning",
                f"The processes of {clean(each['trainer'])} got {sent}: the load had not fallen after the pause. "
                "Measure what the pause saves with `powerguard drill --scope pause`; if other hosts hang on the UPS, "
                "set ups.NAME.shared.",
            )


def _load(case: _Case) -> Iterator[Advice]:
    raised = case.facts.notes("load_not_fallen_raised")
    if raised:
        yield _say(
            "load_not_fallen",
            "warning",
            f"The load did not fall as expected of a pause: {clean(raised[-1].line.because)}. Measure it with "
            "`powerguard drill`; gpu.kind: nvml caps GPUs, signals.kind: helper stops a trainer that does not pause.",
            "gpu.kind",
        )
        return
    for each in case.report["predictions"]:
        if each["unit"] == "share" and each["measured"] > 1.1 * each["predicted"] + 0.02:
            paused = all(trainer["after"] != "continue" for trainer in case.report["trainers"])
            what = "Paused load" if paused else "The load after the checkpoint order"
            yield _say(
                "load_high",
                "warning",
                f"{what} was {100 * each['measured']:.0f} %; the plan assumed {100 * each['predicted']:.0f} %. "
                "A drill measures it: `powerguard drill --scope pause`.",
            )


def _sources(case: _Case) -> Iterator[Advice]:
    lost = case.facts.notes("source_lost")
    if lost:
        back = [number(s.numbers.get("lost_s")) for s in case.facts.notes("source_recovered")]
        longest = max((s for s in back if s is not None), default=None)
        how_long = f", at the longest for {duration(longest)}" if longest is not None else ""
        one = case.facts.policy is not None and case.facts.policy.sources < 2
        second = "Give the UPS a second source, over another path" if one else "All paths to the UPS failed"
        yield _say(
            "source_lost",
            "warning",
            f"The UPS did not answer in the outage ({_times(len(lost))}{how_long}): from then on the budget was "
            f"estimated, not read. {second}; power the switch in between from the UPS, too.",
            "ups.NAME.sources",
        )


def _bmc(case: _Case) -> Iterator[Advice]:
    answers = case.facts.notes("policy_verified")
    failed = [s for s in case.facts.notes("action_failed") if s.numbers.get("action") == "EnsurePolicy"]
    if any(s.numbers.get("verified") is True for s in answers) or not (answers or failed):
        return
    why = f": {clean(failed[-1].line.because)}" if failed else ""
    yield _say(
        "bmc_not_verified",
        "error",
        f"The BMC never confirmed that it powers the host on when power returns{why}. `powerguard doctor` shows what "
        "is missing; until it passes, a person must switch the host on after a long outage.",
        "bmc.kind",
    )


def _health(case: _Case) -> Iterator[Advice]:
    policy = case.facts.policy
    if policy is None or case.facts.start is None:
        return
    if not policy.runtime_table and not any(each.policy.runtime_table for each in policy.feeds):
        yield _say(
            "no_runtime_table",
            "warning",
            "No runtime table: the UPS's own runtime was used. Set runtime_table from the data sheet "
            "(`powerguard plan --size` prints one for known models).",
            "ups.NAME.runtime_table",
        )
    origins = [each.policy for each in policy.feeds] or [policy]
    models = [each.battery.model for each in case.facts.start.state.upses] or [case.facts.start.state.battery.model]
    presumed = any(p.health_from in ("default", "battery_old") for p in origins)
    if presumed and not case.measured and not any(_has_measured(m) for m in models):
        share = min(p.health for p in origins)
        yield _say(
            "health_unknown",
            "info",
            f"The battery's health was presumed ({100 * share:.0f} %), never measured. A discharge measures it: a "
            "quarter shows a worn battery, two thirds or low battery a good one (`powerguard drill --witness plug`). "
            "If it was measured elsewhere, set budget.health.",
            "budget.health",
        )


def _has_measured(model: object) -> bool:
    health = getattr(model, "health", None)
    return health is not None and not health.least


def _late(case: _Case) -> Iterator[Advice]:
    lost_s, confirmed_s = case.report["detection"]["power_lost_s"], case.report["detection"]["confirmed_s"]
    if lost_s is None or confirmed_s is None or confirmed_s - lost_s <= LATE_S:
        return
    yield _say(
        "late_detection",
        "warning",
        f"The outage was confirmed {duration(confirmed_s - lost_s)} after the power failed. Poll more often (poll_s "
        "of the source; POLLTIME 1 in apcupsd.conf, pollinterval 1 in ups.conf), and let the card send traps "
        "(`traps`).",
        "ups.NAME.sources[].poll_s",
    )


def _grade(case: _Case) -> Iterator[Advice]:
    phases = case.facts.notes("phase_changed")
    latched = next((step for step in reversed(phases) if step.numbers.get("new") == "shutdown"), None)
    if latched is None:
        return
    grade = ordered_grade(case.facts) or latched.numbers.get("grade")
    if grade in (Grade.SHORT, Grade.BARE):
        yield _say(
            "stop_cut_short",
            "warning",
            f"Only a {grade} stop fitted the battery: it is too small for this load, or its health counts as too low. "
            "`powerguard plan --size` shows which changes make a full one fit.",
        )
    slack_s = number(case.facts.outage.record.figures.get("slack_at_commit_s"))
    if slack_s is None or slack_s >= -LATE_S:
        return
    text = f"The stop began {duration(-slack_s)} late and used up part of the reserve"
    dwell_s = 0.0 if case.facts.policy is None else case.facts.policy.commit_dwell_s
    before = [step for step in phases if step.after_s < latched.after_s and step.numbers.get("new") != "online"]
    moments = [(s.after_s, number(s.numbers.get("reff_s")), number(s.numbers.get("stop_s"))) for s in before]
    if short_since_s(moments, latched.after_s, dwell_s) is not None:
        yield _say(
            "commit_waited",
            "info",
            f"{text}: the stop no longer fitted when the outage had just begun, and powerguard waits for "
            f"{dwell_s:.0f} s on battery before it powers off, because a shorter dip needs no power-off.",
        )
        return
    yield _say("commit_late", "warning", f"{text}. Raise budget.reserve_s by as much.", "budget.reserve_s")


def _stop(case: _Case) -> Iterator[Advice]:
    for each in case.report["predictions"]:
        if each["what"] == "the host's stop" and each["measured"] > _LONGER * each["predicted"] + 1.0:
            yield _say(
                "stop_slow",
                "warning",
                f"The host took {duration(each['measured'])} to stop, planned were {duration(each['predicted'])}. "
                "`powerguard doctor` names the units that stop slowly; else set budget.stop_q95_s: "
                f"{ceil(each['measured'])}.",
                "budget.stop_q95_s",
            )


def _return(case: _Case) -> Iterator[Advice]:
    if case.facts.notes("resume_failed"):
        yield _say(
            "resume_failed", "error", "powerguard could not start training, and a person had to. Check the unit that "
            "resume.target names.", "resume.target",
        )  # fmt: skip
    yield from _powered_on(case)
    missed = case.facts.notes("host_incomplete_raised")
    if missed:
        yield _say(
            "host_incomplete",
            "warning",
            f"Training waited because the host was not complete: {clean(missed[-1].line.because)}. See "
            "docs/guides/return.md.",
        )
    ours_s, gate_s = case.report["recovery"]["ours_s"], case.report["recovery"]["gate_s"]
    decided_s = sum(undecided_s(step) for step in case.facts.notes("host_returned")[-1:])
    if ours_s is not None and ours_s - decided_s > OURS_S:
        gate = f", of which {duration(gate_s)} waited for utility and charge" if gate_s else ""
        yield _say(
            "recovery_slow",
            "info",
            f"From the start of the daemon to training it took {duration(ours_s)}{gate}. budget.resume_charge_pct and "
            "budget.charge_hold_s decide how long it waits for charge.",
            "budget.resume_charge_pct",
        )


def _powered_on(case: _Case) -> Iterator[Advice]:
    """The cause of the return shows whether a power-on method worked."""
    back = case.report["recovery"]
    if back["powered_on_by"] in BY_HAND:
        yield _say(
            "switched_on_by_hand",
            "warning",
            f"The host was switched on by hand ({back['powered_on_by'].replace('-', ' ')}): no power-on method worked. "
            "`powerguard doctor` shows which of them can be armed, and why others cannot.",
            "bmc.policy",
        )
    elif case.report["outcome"] != "clean_shutdown" or back["powered_on_by"] == LATE_REBOOT:
        return
    elif back["ac_gone"] is False:
        cause = back["powered_on_by"]
        what = (
            f"It was powered on by: {cause.replace('-', ' ')}."
            if cause
            else "The BMC does not report what powered it on."
        )
        yield _say(
            "ac_never_gone",
            "info",
            "AC never failed at this host: power returned before the UPS cut its output, and the BMC's policy alone "
            f"would have left it off. {what}",
        )
    elif back["ac_gone"] is None and back["powered_on_by"] is None:
        yield _say(
            "return_unknown",
            "info",
            "The BMC does not report what powered the host on, and neither it nor the UPS shows whether AC was gone. "
            "Read the BMC's event log (`ipmitool sel list`) at the time of the return.",
        )


def _journal(case: _Case) -> Iterator[Advice]:
    if any(step.line.kind == "gap" for step in case.facts.steps):
        yield _say(
            "journal_gap",
            "warning",
            "Steps of this outage are missing: the journal could not be written. Put it on a local disk with free "
            "space.",
            "journal.path",
        )
    if case.facts.elapsed.doubted or case.facts.elapsed.set_s:
        yield _say(
            "clock_set",
            "info",
            "The wall clock was set during the outage, so the training time lost is not reliable: it counts the time "
            "off by the old clock. Keep the real-time clock right (chrony, NTP, its battery).",
        )


_RULES: Final = (
    _dirty, _never_answered, _bmc, _return, _checkpoint_slow, _older, _trained_on, _signalled, _load, _sources, _late,
    _grade, _stop, _journal, _health,
)  # fmt: skip
_RULES_OF_DRY_RUN: Final = (_dirty, _sources, _late, _journal, _health)
