"""Invariants of every step of the core, whatever the world does; with several feeds, those of the feeds as well.

Each is a sentence. One that does not hold raises `InvariantBroken` with it. tests/core checks more, in every corner of
the state space; these mean something to a person who simulates a site.

Those of feeds are worked out again from the readings, without the core's sums. A feed carries the host when it answers,
says utility, and needs no bypass for it. One that falls silent within 30 s of another's transfer, or of this host's own
network, went with the power: it counts as on battery until it answers, or until it has outlived every battery while the
others carry no more than before.
"""

import math

from powerguard.core.decide import conditions
from powerguard.core.decide.machine import WRONG
from powerguard.core.decide.transitions import TABLE
from powerguard.core.energy import account, budget
from powerguard.core.model import events
from powerguard.core.model.actions import (
    CapPower,
    Conduct,
    Grade,
    PollNow,
    PowerOff,
    ResumeTrainer,
    StopTrainer,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import ON_UTILITY, Done, Event, Failed, Outcome, OutputSource, Reading
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import (
    Battery,
    EmergencyCheckpoint,
    Feed,
    GivenUp,
    Holding,
    NotDurable,
    OnBattery,
    Online,
    Recovery,
    Shutdown,
    State,
    Step,
    Supplied,
    Supply,
    phase_name,
)
from powerguard.core.supply import silence
from powerguard.core.trainers import escalation, lifecycle


class InvariantBroken(AssertionError):  # noqa: N818 - it is one
    """An invariant that does not hold; its text is the invariant."""


def hold(condition: object, sentence: str) -> None:
    """Raise Violation where the condition is not true."""
    if not condition:
        raise InvariantBroken(sentence)


_TOGETHER_S = 30.0
_ENDLESS_S = 30 * 86400.0
_CARRIES_NOBODY = (OutputSource.BYPASS, OutputSource.OFF, OutputSource.UNKNOWN)


def check_feeds(policy: Policy, before: State, answer: Step) -> None:
    """Ask every invariant of several feeds. Raises Violation."""
    state = answer.state
    known = {each.ups: each for each in before.upses}
    hold({each.ups for each in state.upses} >= known.keys(), "no feed is forgotten")
    for each in state.upses:
        _check_silent(state, each, known.get(each.ups))
        if _outlived(each):
            _check_outlived(policy, state, each, known.get(each.ups))
    _check_word(policy, before, state)
    lost = [each.feed.lost_since_s is not None for each in state.upses]
    hold(state.feed.lost_since_s is None or all(lost), "the source counts as lost only when no feed answers")
    if state.battery is not before.battery:
        _check_accounts(state)
    if state.feed.reading is not None and state.feed.reading is not before.feed.reading:
        charges = [each.feed.reading.charge_pct for each in state.upses if each.feed.reading is not None]
        least = min((charge for charge in charges if charge is not None), default=None)
        hold(state.feed.reading.charge_pct == least, "the reported charge is the lowest one")


def check_restored(stored: State, state: State) -> None:
    """Ask of a state that was restored whether every feed is in it, with what was used of its battery."""
    for earlier in stored.upses:
        each = next((each for each in state.upses if each.ups == earlier.ups), None)
        hold(each is not None, "no feed is forgotten")
        if each is not None:
            hold(
                earlier.battery.used is None or each.battery.used is not None,
                "the used energy of a battery is not forgotten",
            )


def _check_word(policy: Policy, before: State, state: State) -> None:
    """An outage of the host is what its feeds make of it, and begins when the last of those went that it needs."""
    supplies = {feed.policy.ups: feed.supplies for feed in policy.feeds}
    on_battery = [each for each in state.upses if each.feed.supply is Supply.BATTERY and not _outlived(each)]
    carrying = sum(supplies[each.ups] for each in state.upses if _carries(each))
    if on_battery and state.feed.supply is Supply.UTILITY:
        hold(carrying >= policy.minimum_supplies, "in an outage of one feed only those that are seen to carry count")
    if state.feed.supply is Supply.BATTERY and not any(each.overloaded for each in state.upses):
        hold(carrying < policy.minimum_supplies, "enough feeds on utility are not an outage")
    if state.feed.supply is Supply.BATTERY and before.feed.supply is not Supply.BATTERY and on_battery:
        last_s = max(each.feed.since_s for each in on_battery)
        hold(state.feed.since_s >= last_s, "an outage begins with the last transfer that it took")


def _carries(each: Supplied) -> bool:
    """Say whether it is seen to carry its part. A test of a battery is none of this: its input may be there or not."""
    feed = each.feed
    if _outlived(each):
        return True
    if feed.reading is None or feed.lost_since_s is not None or feed.reading.output_source in _CARRIES_NOBODY:
        return False
    return feed.supply is Supply.UTILITY


def _check_silent(state: State, each: Supplied, earlier: Supplied | None) -> None:
    lost_s = each.feed.lost_since_s
    if lost_s is None:
        hold(not each.presumed, "a feed that answers is believed, and not presumed on battery")
        return
    stays = earlier is not None and earlier.presumed and earlier.feed.lost_since_s is not None
    others = [other for other in state.upses if other.ups != each.ups and other.feed.supply is Supply.BATTERY]
    with_others = any(abs(other.feed.since_s - lost_s) <= _TOGETHER_S for other in others)
    with_network = each.feed.supply is Supply.UTILITY and any(
        part.heard_s - _TOGETHER_S <= lost_s <= part.at_s + _TOGETHER_S for part in state.gone
    )
    if stays or with_others or with_network:
        hold(each.presumed, "what fell silent with the power is presumed to be on battery until it answers")


def _outlived(each: Supplied) -> bool:
    return each.watch is not None and each.watch.lives


def _check_outlived(policy: Policy, state: State, each: Supplied, earlier: Supplied | None) -> None:
    """A silent one has utility only where its battery must have ended, and nothing else says that utility is gone."""
    hold(each.feed.lost_since_s is not None, "a feed that answers is believed, and not presumed on battery")
    others = [other for other in state.upses if other.ups != each.ups and other.feed.lost_since_s is None]
    hold(all(other.feed.supply is not Supply.BATTERY for other in others), "who is silent goes with who is heard to go")
    if earlier is not None and _outlived(earlier):
        return
    hold(
        any(other.feed.supply is Supply.UTILITY for other in others),
        "another feed must be seen to carry no more than before",
    )
    shortest_s = min((seconds for feed in policy.feeds for _, seconds in feed.policy.runtime_table), default=0.0)
    last_read_s = math.inf if each.feed.reading is None else each.feed.reading.at_s
    hold(state.battery.at_s - last_read_s > shortest_s, "a silent one must have outlived a new battery")


def _check_accounts(state: State) -> None:
    """Energy is counted of every feed on battery, heard or not."""
    now_s = state.battery.at_s
    for each in state.upses:
        ended = silence.has_ended(state.upses, each)  # Silent, and others have its load: there is nothing to count.
        if (each.feed.supply is Supply.BATTERY or each.presumed) and not (_outlived(each) or ended):
            hold(each.battery.at_s >= now_s - 1e-6, "the energy of every feed on battery is counted")
    lefts = [each.battery.left for each in state.upses if each.battery.left is not None]
    if state.battery.left is not None and lefts:
        hold(min(lefts) - 1e-6 <= state.battery.left <= max(lefts) + 1e-6, "what is left together is between them")
    if state.feed.supply is not Supply.BATTERY:
        endless = any(tau_s >= _ENDLESS_S for _, tau_s in state.battery.composed)
        hold(not endless, "before an outage the sums are those of one that takes every feed")


_MOVES = {(phase_name(old), cause.value, phase_name(new)) for (old, cause), new in TABLE.items()}
_GRADES = tuple(Grade)
_HAIR = 1e-6
_BATTERY = Supply.BATTERY


def check_step(policy: Policy, before: State, event: Event, answer: Step) -> None:
    """Ask every invariant of one step. Raises Violation."""
    old, new = before.phase, answer.state.phase
    if answer.actions:
        _check_actions(policy, before, event, answer)
    if isinstance(event, Outcome) and isinstance(event.action, TriggerCheckpoint):
        _check_checkpoint(before, event, event.action, answer)
    if old is not new or answer.notes:
        _check_phases(policy, before, answer)
    _check_account(before, answer.state)
    if answer.state.feed.heard:
        _check_sources(before, answer)
    if answer.state.upses and policy.feeds:
        check_feeds(policy, before, answer)


def _check_sources(before: State, answer: Step) -> None:
    """Of several sources each is heard in the order of its own time, and two witnesses are two."""
    sources = answer.state.feed.heard
    by_source = {each.source: each.reading for each in before.feed.heard}
    for each in sources:
        earlier = by_source.get(each.source)
        older = earlier is not None and each.reading is not None and each.reading.at_s < earlier.at_s
        hold(not older, "no source is heard backwards")
    if any(note.event == "outage_began" and note.because == "second_source" for note in answer.notes):
        battery = [each for each in sources if each.reading and each.reading.output_source is OutputSource.BATTERY]
        hold(len(battery) > 1, "two sources are two witnesses, and one is none")


def _check_actions(policy: Policy, before: State, event: Event, answer: Step) -> None:
    state, new = answer.state, answer.state.phase
    suspect = state.feed.suspect and state.feed.supply is not Supply.BATTERY  # Of several, another may be proven.
    unproven = isinstance(event, Reading) and suspect and isinstance(before.phase, Online)
    if unproven and budget.power_off_at_s(state.feed) is None:
        # One that begins now, too: the calibration of one UPS counts, while the reading of another waits for a second.
        guarded = any(each.guarded_since_s is not None for each in (before, state))
        allowed = (PollNow, TriggerCheckpoint) if guarded else (PollNow,)
        hold(
            all(isinstance(action, allowed) for action in answer.actions) and isinstance(new, Online),
            "one unconfirmed reading only causes a poll",
        )
    for action in answer.actions:
        hold(action.by_s >= event.at_s, "no order is late when it is given")
        if isinstance(action, PowerOff):
            hold(isinstance(new, Shutdown), "only a latched shutdown powers off")
            hold(isinstance(new, Shutdown) and new.boot_id == policy.boot_id, "a latch holds in its own boot only")
            hold(action.force_after_s >= 0.0, "a deadline lies in the future")
        elif isinstance(action, CapPower):
            hold(0.0 < action.share <= 1.0, "GPU power is never raised")
        elif isinstance(action, StopTrainer | TerminateTrainer):
            _check_signal(policy, before, answer.state, action)
        elif isinstance(action, ResumeTrainer):
            hold(not escalation.is_stopped(state, action.trainer), "no trainer is resumed that cannot receive it")


def _check_checkpoint(before: State, event: Done | Failed, action: TriggerCheckpoint, answer: Step) -> None:
    """A checkpoint counts for what it is: of the paused step, of an older one, or none."""
    earlier = before.trainer(action.trainer)
    now = answer.state.trainer(action.trainer)
    if earlier is None or now is None:
        return
    tries = now.checkpoint.tries if isinstance(now.checkpoint, NotDurable | GivenUp) else 0
    hold(tries <= lifecycle.MAX_TRIES, "no trainer is asked without end for the checkpoint of one pause")
    if earlier.durable or not now.durable:
        return
    hold(isinstance(event, Done), "a checkpoint that failed is not durable")
    found = events.checkpoint_done(event) if isinstance(event, Done) else None
    older = action.after is not Conduct.CONTINUE and found is not None and found.older
    is_noted = any(note.event == "older_checkpoint_stands" for note in answer.notes)
    hold(not older or is_noted, "an older checkpoint is not taken for one of the paused step")
    during = action.after is Conduct.CONTINUE and earlier.conduct is not Conduct.CONTINUE
    stands = now.paused and found is not None and found.step == earlier.step
    hold(not during or stands, "a checkpoint during training is not taken for one of a pause")


def _check_signal(policy: Policy, before: State, state: State, action: StopTrainer | TerminateTrainer) -> None:
    """Only a trainer is signalled that has the order to pause, whose checkpoint is not on its way, on battery."""
    reading = state.feed.reading
    on_battery = reading is not None and reading.output_source is OutputSource.BATTERY
    hold(policy.signals, "no trainer is signalled unless the settings permit it")
    hold(isinstance(state.phase, EmergencyCheckpoint | Holding), "signals come after the pause and before the commit")
    hold(state.feed.supply is Supply.BATTERY and on_battery, "no trainer is signalled except on battery")
    hold(state.maintenance is None, "no trainer is signalled in maintenance")
    hold(budget.power_off_at_s(state.feed) is None, "no trainer is signalled for a cut that comes anyway")
    trainer = state.trainer(action.trainer)
    hold(
        trainer is not None and trainer.alive and trainer.pause_ordered,
        "no trainer is signalled unless it was asked to pause",
    )
    if trainer is not None:
        hold(trainer.conduct is not Conduct.CONTINUE, "no trainer is signalled whose settings let it continue")
        settled = trainer.order is None and not trainer.owes
        hold(settled, "no trainer is signalled while its checkpoint is in flight")
    known = escalation.of(before, action.trainer)
    stopped = known is not None and known.carried_out == escalation.STOP
    hold(stopped or isinstance(action, StopTrainer), "no trainer is ended unless it was stopped before")


def _check_phases(policy: Policy, before: State, answer: Step) -> None:
    old, new = before.phase, answer.state.phase
    if isinstance(old, Shutdown):
        hold(isinstance(new, Shutdown) or not policy.powers_off, "a latch is not undone in its boot")
        if isinstance(new, Shutdown) and old.force_at_s:
            hold(new.force_at_s <= old.force_at_s + _HAIR, "a deadline is never moved back")
    elif isinstance(new, Shutdown):
        _check_latch(policy, before, answer.state, new)
    if isinstance(new, Online | OnBattery) and not answer.state.feed.suspect:
        standing = [each for each in answer.state.signalled if each.word != escalation.CONTINUE and each.order is None]
        hold(not standing, "no trainer stays stopped while training may continue")
    if isinstance(new, Online) and isinstance(old, EmergencyCheckpoint | Holding):
        hold(answer.state.feed.supply is Supply.UTILITY, "training resumes on utility only")
        hold(not answer.state.feed.suspect, "training resumes on proven utility only")
    moves = [dict(note.numbers) for note in answer.notes if note.event == "phase_changed"]
    at = phase_name(old)
    for move in moves:
        hold(move["old"] == at, "no move without a note")
        hold((move["old"], move["cause"], move["new"]) in _MOVES, "every move is in the table")
        at = str(move["new"])
    hold(at == phase_name(new), "no move without a note")
    through_online = any(move["new"] == "online" for move in moves)
    if not isinstance(old, Online) and not isinstance(new, Online) and not through_online:
        hold(old.outage.id == new.outage.id, "an outage keeps its id")
        lowered = _GRADES.index(new.outage.grade) >= _GRADES.index(old.outage.grade)
        hold(lowered or may_raise_grade(before, answer.state), "a grade is raised only for a reason")


def may_raise_grade(before: State, state: State) -> bool:
    """Say whether a step may raise the grade of the stop: what it was lowered for is no longer so.

    More is left than wrong readings reported; or the power has failed again in a recovery, before which the battery
    was charged; or a stop is short again that a checkpoint had made a bare one, in a hold with none owed.
    """
    old, phase = before.phase, state.phase
    if (state.battery.left or 0.0) > (before.battery.left or 0.0) + WRONG:
        return True
    if isinstance(old, Recovery) and state.transfers != before.transfers:
        return True
    if not isinstance(phase, Holding | Shutdown) or isinstance(old, Online) or not old.outage.lowered:
        return False
    rose = (old.outage.grade, phase.outage.grade) == (Grade.BARE, Grade.SHORT)
    return rose and not any(t.owes for t in state.trainers)


def _check_latch(policy: Policy, before: State, state: State, phase: Shutdown) -> None:
    """Every commit has its reasons: battery or a countdown, and a budget that is really used up."""
    old, reading = before.phase, state.feed.reading
    hold(isinstance(old, Recovery | EmergencyCheckpoint | Holding), "training is asked to pause before a commit")
    looked = isinstance(old, Recovery | EmergencyCheckpoint | Holding) and old.due_at_s is not None
    hold(looked, "a commit is looked at twice")
    hold(state.maintenance is None, "maintenance suspends commits")
    hold(not phase.outage.aborted_by, "an aborted outage does not power off")
    hold(phase.boot_id == policy.boot_id, "a latch holds in its own boot only")
    if budget.power_off_at_s(state.feed) is not None:
        return
    # Of a UPS that fell silent with the network the last word was utility, and is no news any more.
    heard = reading is not None and state.feed.lost_since_s is None
    on_utility = heard and reading is not None and reading.output_source in ON_UTILITY
    hold(not on_utility, "never shut down while the newest reading says utility")
    hold(state.feed.supply is Supply.BATTERY, "only a battery that is confirmed is a reason to power off")
    if state.battery.left is not None:
        now = conditions.outage_budget(policy, state, phase.latched_s)
        full_s = budget.stop_s(policy, Grade.FULL) + budget.shed_s(policy)
        lasts = now.reff_s is not None and now.reff_s > full_s + _HAIR
        hold(not lasts, "a host whose battery still lasts is not powered off")


def _check_account(before: State, state: State) -> None:
    if state.battery is before.battery:
        return
    if not state.upses:
        _check_battery(before.battery, before.feed, state.battery, state.feed)
        return
    # Of several together, what is left is the mean of those that are known: one that answers again may raise it.
    hold(state.battery.at_s >= before.battery.at_s, "the account never runs backwards")
    for each in state.upses:
        earlier = next((other for other in before.upses if other.ups == each.ups), None)
        if earlier is not None and earlier.battery is not each.battery:
            _check_battery(earlier.battery, earlier.feed, each.battery, each.feed)


def _check_battery(earlier: Battery, earlier_feed: Feed, battery: Battery, feed: Feed) -> None:
    used, left = battery.used, battery.left
    hold(used is None or 0.0 <= used <= 1.0, "what is used is a share")
    hold(left is None or left >= 0.0, "what is left is a share")
    hold(battery.at_s >= earlier.at_s, "the account never runs backwards")
    if earlier_feed.supply is _BATTERY and feed.supply is _BATTERY:
        rises = left is not None and earlier.left is not None and left > earlier.left + 1e-9
        hold(not rises or may_rise(earlier, battery), "on battery the energy left never rises")
        given_back = earlier.used is not None and (used is None or used < earlier.used - 1e-9)
        hold(not given_back or is_begun_again(earlier, battery), "what is used is never given back on battery")


def is_begun_again(before: Battery, battery: Battery) -> bool:
    """Say whether the account began with this reading: with the first charge, or with the first true runtime."""
    return (before.presumed and not battery.presumed) or before.model.denied != battery.model.denied


def may_rise(before: Battery, battery: Battery) -> bool:
    """Say whether what is left may rise on battery: a flag was withdrawn or is doubted, or all terms say more."""
    if battery.composed or is_begun_again(before, battery) or before.low_left is not None:
        return True
    since_s = battery.higher_since_s
    return since_s is not None and battery.at_s - since_s >= account.AGREED_S
