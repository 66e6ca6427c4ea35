"""Power-on methods: checked, armed at the commit, disarmed when the host is back; and the late decision to reboot.

Utility may return after the commit and before the UPS cuts its output: AC never drops, and the BMC's always-on policy
never acts. Each method here covers that power race for itself (docs/guides/return.md). The power-off waits for them no
longer than for its other preparations, and a method that fails does not affect the others.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from powerguard.core.decide.turn import Turn
from powerguard.core.energy import account, budget
from powerguard.core.model import events
from powerguard.core.model.actions import (
    ArmPowerOn,
    CheckPowerOn,
    DisarmPowerOn,
    EnsurePolicy,
    Grade,
    Level,
    PowerOnMethod,
    Reboot,
    RestorePolicy,
)
from powerguard.core.model.events import Done, Failed, Outcome
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import (
    Armed,
    EmergencyCheckpoint,
    Feed,
    Holding,
    Obligation,
    OnBattery,
    Online,
    Outage,
    Recovery,
    Shutdown,
    State,
    Supplied,
    Supply,
    TemporaryPolicy,
)
from powerguard.core.supply import feeds, fusion

LIMIT_S = 5.0
ARM_AGAIN_S = 10.0
"""From a failure to arm at the commit to the next try, while the host stops."""
AGAIN_S = 60.0
MOST_AGAIN_S = 3600.0
"""Shortest and longest interval of retries to disarm; they grow once the method should have acted."""
SPENT_S = 10.0
"""How long after its time an order to cut an output is still waited for, if the UPS does not show its countdown."""
GIVE_UP_S = 86400.0
"""How long a method that the settings no longer name is kept: they may name it again."""
RESTORE_AGAIN_S = 3600.0
SENTINEL_AFTER_S = 30.0
"""Delay after the latest power-off and the UPS's cut, so that no sentinel powers on a host that still stops."""
RTC_AFTER_S = 60.0
WATCHDOG_AFTER_S = 120.0
"""Both after the latest moment at which the UPS may have cut its output (docs/decisions/0149)."""
UNKNOWN_S = 3600.0
"""Longest assumed runtime of a battery without any figures."""
MOST_WATCHDOG_S = 6553.0
"""IPMI 2.0 section 27.6: 16 bits of tenths of a second."""
BOOTS = 3
BOOTS_WITHIN_S = 3600.0
BACK_OFF_S = 3600.0
MOST_BACK_OFF_S = 4 * 3600.0
STUCK = "power_on_stuck"
DOUBTFUL = "power_on_doubtful"
"""Alarms: a method that is armed cannot be disarmed; a method that may be armed cannot be."""
_KEEPS_AWAY = (PowerOnMethod.RTC, PowerOnMethod.SENTINEL)
"""Methods that take a time, so that a host that came back too early can be powered on later."""


def named(policy: Policy) -> list[tuple[PowerOnMethod, str]]:
    """Return each method that the settings name, in its order; OUTPUT once for each UPS that this host switches off."""
    found: list[tuple[PowerOnMethod, str]] = []
    for method in policy.methods:
        found += [(method, ups) for ups in policy.outputs] if method is PowerOnMethod.OUTPUT else [(method, "")]
    return found


def check(turn: Turn) -> None:
    """Check whether each method could be armed, while the network is still up."""
    for method, ups in named(turn.policy):
        turn.order(CheckPowerOn, limit_s=LIMIT_S, method=method, ups=ups)


def arm(
    turn: Turn, outage: Outage, methods: Collection[PowerOnMethod], *, off_in_s: float, limit_s: float
) -> tuple[str, ...]:
    """Order each of these methods armed; return the ids. off_in_s: when the host is off at the latest.

    A method that is armed already is ordered again, with the time that counts now; OUTPUT is never ordered twice. What
    acts after the cut counts from that only once it is certain (`_retime`): an order to a UPS may fail. The clock is
    the exception if AC drops whatever utility does: AC brings the host back, unless the BMC's answer was wrong. Then
    only the clock does, whose single alarm must not pass while the output is off.
    """
    standing_s = budget.power_off_at_s(turn.state.feed)
    wanted = [each for each in named(turn.policy) if each[0] in methods]
    if any(method is PowerOnMethod.OUTPUT for method, _ in wanted) and not _may_cut(turn, standing_s):
        wanted = [each for each in wanted if each[0] is not PowerOnMethod.OUTPUT]
    outputs = [each for each in turn.state.armed if each.method is PowerOnMethod.OUTPUT and each.confirmed]
    cuts_s = [each.acts_at_s for each in outputs]
    cut_s = min([*cuts_s, math.inf]) if standing_s is None else standing_s
    is_cut = cut_s < math.inf
    dark_in_s = max(off_in_s, max([cut_s, *cuts_s]) - turn.now_s if is_cut else _empty_in_s(turn))
    drops = bool(outputs) and all(each.returns == "cycles" for each in outputs)
    wake_in_s = max(dark_in_s, _empty_in_s(turn)) if drops else dark_in_s
    if dark_in_s + WATCHDOG_AFTER_S > MOST_WATCHDOG_S and (PowerOnMethod.WATCHDOG, "") in wanted:
        wanted.remove((PowerOnMethod.WATCHDOG, ""))
        because = f"the battery may last for {dark_in_s:.0f} s, and it counts to {MOST_WATCHDOG_S:.0f} at most"
        turn.note("power_on_blocked", because, Level.WARNING, method=PowerOnMethod.WATCHDOG)
    in_s = {
        PowerOnMethod.OUTPUT: off_in_s + budget.CUT_GUARD_S,
        PowerOnMethod.RTC: max(wake_in_s + RTC_AFTER_S, outage.back_off_s),
        PowerOnMethod.SENTINEL: max((dark_in_s if is_cut else off_in_s) + SENTINEL_AFTER_S, outage.back_off_s),
        PowerOnMethod.WATCHDOG: dark_in_s + WATCHDOG_AFTER_S,
    }
    earnest = [(each.method, each.ups) for each in turn.state.armed if each.outage and not each.recorded]
    ids: list[str] = []
    for method, ups in wanted:
        id_ = turn.order(
            ArmPowerOn, limit_s=limit_s, method=method, outage=outage.id, in_s=round(in_s[method], 1), ups=ups
        )
        armed = Armed(
            method=method, ups=ups, outage=outage.id, at_s=turn.now_s, acts_at_s=turn.now_s + in_s[method], order=id_
        )
        # One that may be armed already stays so, whatever a dry-run records about it.
        turn.owe(replace(armed, recorded=not turn.policy.powers_off and (method, ups) not in earnest))
        ids.append(id_)
    return tuple(ids)


def _may_cut(turn: Turn, standing_s: float | None) -> bool:
    """Say whether outputs may be ordered off. A host whose feeds do not go off together would never see AC return."""
    outputs = [each for each in turn.state.armed if each.method is PowerOnMethod.OUTPUT and each.outage]
    # One that is being disarmed was of an earlier boot: the orders to a UPS are carried out one after the other.
    if any(each.confirmed or (each.order is not None and not each.leaving) for each in outputs):
        return False
    because = ""
    others = [each.policy.ups for each in turn.policy.feeds if each.policy.ups not in turn.policy.outputs]
    if standing_s is not None:
        because = "another program has started a countdown at the UPS: powerguard leaves it alone"
    elif others:
        because = f"{', '.join(others)} would stay on, so AC would never drop at this host"
    elif not all(each.feed.supply is Supply.BATTERY or each.presumed for each in turn.state.upses):
        because = "another feed is on utility, so AC would not drop at this host for long enough"
    if because:
        turn.note("power_on_blocked", because, Level.WARNING, method=PowerOnMethod.OUTPUT)
    return not because


def _empty_in_s(turn: Turn) -> float:
    """Seconds until the battery is empty at the latest; a host that is woken sooner may wake on battery.

    A host that is off draws almost no power, so only the UPS's own draw empties the battery: `budget.tau_s` at 0.
    """
    battery = turn.state.battery
    points = account.table(turn.policy, battery)
    if not points or battery.left is None:
        return UNKNOWN_S
    low_load, low_s = points[0]
    return battery.left * low_s * (low_load + account.OWN_LOAD) / account.OWN_LOAD


def backed_off(turn: Turn, outage: Outage) -> Outage:
    """Return the outage with the time to stay away: a host that came back too early too often waits 1, 2, then 4 h."""
    recent = [at_s for at_s in outage.boots if turn.now_s - at_s <= BOOTS_WITHIN_S]
    if len(recent) < BOOTS and not outage.back_off_s:
        return outage
    back_off_s = min(max(BACK_OFF_S, 2 * outage.back_off_s), MOST_BACK_OFF_S)
    turn.note("return_put_off", f"back {len(outage.boots)} times in this outage", Level.WARNING, back_off_s=back_off_s)
    return replace(outage, back_off_s=back_off_s)


# --- What is armed, and its end ---------------------------------------------------------------------------------


def handle(turn: Turn, outcome: Outcome) -> None:
    """Enter how an order of ours ended."""
    action = outcome.action
    match action:
        case ArmPowerOn():
            _handle_armed(turn, action, outcome)
        case DisarmPowerOn():
            _handle_disarmed(turn, action, outcome)
        case CheckPowerOn():
            if isinstance(outcome, Failed):
                turn.note("power_on_blocked", outcome.reason, Level.WARNING, method=action.method)
        case _:
            pass


def _handle_armed(turn: Turn, action: ArmPowerOn, outcome: Done | Failed) -> None:
    armed = next((each for each in turn.state.armed if each.order == action.id), None)
    if isinstance(outcome, Failed):
        turn.note("power_on_blocked", outcome.reason, Level.WARNING, method=action.method, took_s=outcome.took_s)
        if armed is not None:
            # It may be armed unless the opposite is certain, so it is disarmed with the others.
            if isinstance(turn.state.phase, Shutdown) and action.method is not PowerOnMethod.OUTPUT:
                turn.owe(replace(armed, order=None, retry_at_s=turn.now_s + ARM_AGAIN_S))
            elif outcome.harmless:
                turn.settle(armed)
            else:
                turn.owe(replace(armed, order=None))
        return
    if armed is None:
        return
    if events.is_recorded(outcome):
        if armed.recorded:
            turn.settle(armed)
        else:
            turn.owe(replace(armed, order=None))
        return
    found = events.power_on_armed(outcome)
    if found.in_s is not None:
        armed = replace(armed, acts_at_s=armed.at_s + found.in_s)
    turn.owe(replace(armed, order=None, confirmed=True, returns=found.returns, recorded=False))
    if action.method is PowerOnMethod.OUTPUT:
        _retime(turn)
    turn.note(
        "power_on_armed",
        "read back",
        method=action.method,
        in_s=round(armed.acts_at_s - armed.at_s, 1),
        returns=found.returns,
    )


def _retime(turn: Turn) -> None:
    """Every output has its order to go off: a method that acts after the cut need not wait for the battery's end."""
    confirmed = [each for each in turn.state.armed if each.method is PowerOnMethod.OUTPUT and each.confirmed]
    phase = turn.state.phase
    if len(confirmed) < len(turn.policy.outputs) or not isinstance(phase, Shutdown):
        return
    off_in_s = max(0.0, min(each.acts_at_s for each in confirmed) - budget.CUT_GUARD_S - turn.now_s)
    later = [method for method in turn.policy.methods if method is not PowerOnMethod.OUTPUT]
    arm(turn, phase.outage, later, off_in_s=off_in_s, limit_s=LIMIT_S)


def _handle_disarmed(turn: Turn, action: DisarmPowerOn, outcome: Done | Failed) -> None:
    armed = next((each for each in turn.state.armed if each.order == action.id), None)
    if armed is None:
        return
    because = outcome.reason if isinstance(outcome, Failed) else ""
    is_recorded = events.is_recorded(outcome)
    if is_recorded and action.outage and not armed.recorded:
        because = f"it may be armed, and {turn.policy.mode} disarms no method: set mode: armed until it is disarmed"
    if because:
        turn.owe(replace(armed, order=None))
        if action.outage:
            turn.set_alarm(STUCK, f"{action.method}: {because}", holds=True, level=Level.ERROR)
        else:
            turn.set_alarm(DOUBTFUL, f"{action.method}: {because}", holds=True)
        return
    turn.settle(armed)
    if is_recorded:
        return
    found = events.power_on_disarmed(outcome)
    if found.disarmed:
        turn.note("power_on_disarmed", found.because or "confirmed by the device", method=action.method)
    elif action.outage:
        turn.note(
            "power_on_found_disarmed", found.because or "the device had it disarmed already", method=action.method
        )


def reconcile(turn: Turn) -> None:
    """Disarm each method that is no longer needed; arm again if the host may lose power before it can report."""
    phase = turn.state.phase
    if isinstance(phase, Shutdown):
        _arm_what_failed(turn, phase)
        _arm_what_passed(turn, phase)
        return
    dark = isinstance(phase, Recovery) and phase.started_at_s is None and turn.state.feed.supply is Supply.BATTERY
    if dark and isinstance(phase, Recovery):
        staying = {each.method for each in turn.state.armed if not each.leaving}
        missing = [method for method in turn.policy.methods if method in _KEEPS_AWAY and method not in staying]
        if missing and turn.policy.powers_off:  # A recorded order arms no method, which would stay missing.
            arm(turn, phase.outage, missing, off_in_s=_off_in_s(turn), limit_s=LIMIT_S)
    for each in turn.state.armed:
        if each.order is None and not (each.kept or (dark and each.method in _KEEPS_AWAY)):
            if (each.method, each.ups) in named(turn.policy):
                _take_back(turn, each)
            else:
                _give_up(turn, each)
    if STUCK in turn.state.alarms or DOUBTFUL in turn.state.alarms:
        _clear(turn)


def _arm_what_failed(turn: Turn, phase: Shutdown) -> None:
    """Arm again, while the host still stops, what its device or its network did not take at the commit."""
    if turn.now_s >= phase.force_at_s - LIMIT_S:  # Or it is not ordered yet.
        return
    failed = [
        each
        for each in turn.state.armed
        if each.outage == phase.outage.id and each.order is None and not (each.confirmed or each.leaving)
        if each.method is not PowerOnMethod.OUTPUT and turn.now_s >= each.retry_at_s
    ]
    for each in failed:
        turn.owe(replace(each, retry_at_s=turn.now_s + ARM_AGAIN_S))
    if failed:
        _arm_again(turn, phase, {each.method for each in failed})


def _arm_what_passed(turn: Turn, phase: Shutdown) -> None:
    """Arm again what has acted in vain: the power-off is overdue, and once the host goes off it must come back.

    An alarm of the clock that finds the host on is gone, and so is an intent at a sentinel, ten minutes later.
    """
    if not turn.policy.powers_off or not phase.force_at_s or turn.now_s < phase.force_at_s:
        return
    passed = {
        each.method
        for each in turn.state.armed
        if each.outage == phase.outage.id and each.order is None and not each.leaving
        if each.method is not PowerOnMethod.OUTPUT and turn.now_s >= each.acts_at_s
    }
    if passed:
        _arm_again(turn, phase, passed)


def _arm_again(turn: Turn, phase: Shutdown, methods: Collection[PowerOnMethod]) -> None:
    """Arm for a power-off that is under way."""
    policy, grade = turn.policy, phase.outage.grade
    stops_s = phase.stops_within_s or budget.force_after_s(policy, grade)
    off_at_s = phase.force_at_s or phase.latched_s + stops_s
    off_in_s = max(off_at_s - turn.now_s, budget.force_after_s(policy, Grade.BARE))
    arm(turn, phase.outage, methods, off_in_s=off_in_s, limit_s=LIMIT_S)


def _clear(turn: Turn) -> None:
    """End each alarm whose last method is disarmed."""
    known = named(turn.policy)
    left = [bool(each.outage) and (each.method, each.ups) in known for each in turn.state.armed if each.leaving]
    for alarm, holds in ((STUCK, any(left)), (DOUBTFUL, not all(left))):
        if not holds:
            turn.set_alarm(alarm, "every method is disarmed", holds=False)


def _take_back(turn: Turn, each: Armed) -> None:
    """Order it disarmed, and again until that is confirmed."""
    feed = turn.state.feed
    if feed.awaits_witness:
        return  # One unconfirmed reading only causes a poll.
    if each.method is PowerOnMethod.OUTPUT and each.outage and not (each.confirmed or _may_still_cut(each, turn.now_s)):
        turn.settle(each)
        turn.note(
            "power_on_found_disarmed", "the time of its order has passed, and the host has power", method=each.method
        )
        return
    if each.method is PowerOnMethod.OUTPUT and not each.outage and feed.supply is not Supply.UTILITY:
        return  # It may be an outage's, whose power-off is under way: without the cut AC would never drop.
    if each.leaving and turn.now_s - each.at_s < min(max(AGAIN_S, each.at_s - each.acts_at_s), MOST_AGAIN_S):
        return
    order = turn.order(DisarmPowerOn, limit_s=LIMIT_S, method=each.method, outage=each.outage, ups=each.ups)
    turn.owe(replace(each, order=order, leaving=True, at_s=turn.now_s))


def _give_up(turn: Turn, each: Armed) -> None:
    """The settings no longer name this method. It is kept for a while: they may name it again."""
    what = f"{each.method} of {each.ups}" if each.ups else each.method.value
    because = f"{what} may be armed, and the settings no longer name it, so powerguard cannot disarm it"
    turn.set_alarm(DOUBTFUL, f"{because}: put it back into the settings until it is disarmed", holds=True)
    if not each.leaving:
        turn.owe(replace(each, leaving=True, at_s=turn.now_s))
    elif turn.now_s - each.at_s >= GIVE_UP_S:
        turn.settle(each)
        turn.note("power_on_given_up", because, Level.WARNING, method=each.method)


def _off_in_s(turn: Turn) -> float:
    """Return seconds until a host that is stopped now is off, at the latest."""
    return turn.policy.force_after_s + turn.policy.bmc_limit_s


def after_restart(turn: Turn, lost: tuple[Obligation, ...]) -> None:
    """Arm again what was being armed for our own power-off; what another program's shutdown needed is disarmed.

    An output is ordered again too: its effector keeps a note of the order to the UPS. lost: orders whose outcome will
    not come. The daemon was killed at the commit, what became of them is unknown, and the host may be up for another
    minute.
    """
    for each in turn.state.armed:
        if each.kept:
            turn.owe(replace(each, kept=False))
    methods = {each.method for each in lost if isinstance(each, Armed) and not each.leaving}
    phase = turn.state.phase
    if methods and isinstance(phase, Shutdown):
        _arm_again(turn, phase, methods)


def unknown(policy: Policy, now_s: float) -> tuple[Armed, ...]:
    """Return each method as one that may be armed, for an unknown outage: the daemon has no history.

    It was lost, or this is the first start. To disarm a method that is not armed has no effect.
    """
    return tuple(Armed(method=method, ups=ups, outage="", at_s=now_s, acts_at_s=now_s) for method, ups in named(policy))


def after_boot(policy: Policy, old: State, now_s: float, *, whole: bool = True) -> tuple[Armed, ...]:
    """Return what is still to be disarmed in another boot: a UPS that has cut its output is no longer armed.

    A host that is back before that cut would lose its power: the order is cancelled, if that can be done.
    A host that went down in an outage, before its commit as far as the journal knows, may have gone on in memory alone.
    whole: as in `Stored`; what is lost may have armed any of them.
    """
    rest = {each.method: each for each in old.armed if each.method is not PowerOnMethod.OUTPUT}
    if not whole or not isinstance(old.phase, Online | Shutdown):
        rest = {each.method: each for each in unknown(policy, now_s) if each.method is not PowerOnMethod.OUTPUT} | rest
    cuts = [each for each in old.armed if _may_still_cut(each, now_s) and (each.method, each.ups) in named(policy)]
    return (
        *(replace(each, order=None, kept=False, leaving=False, at_s=now_s, confirmed=False) for each in cuts),
        *(replace(each, order=None, kept=False, leaving=False, at_s=now_s, acts_at_s=now_s) for each in rest.values()),
    )


def _may_still_cut(each: Armed, now_s: float) -> bool:
    """Say whether an order to cut an output may still act, also when utility is back."""
    pending = each.method is PowerOnMethod.OUTPUT and each.outage and each.returns != "aborts"
    return bool(pending) and now_s <= each.acts_at_s + SPENT_S


def in_the_clock_of(owed: tuple[Obligation, ...], shift_s: float) -> tuple[Obligation, ...]:
    """Move the time at which each method acts into the clock of another boot."""
    return tuple(
        replace(each, acts_at_s=each.acts_at_s + shift_s) if isinstance(each, Armed) else each for each in owed
    )


def cut_at_s(state: State, now_s: float) -> float | None:
    """Return when a UPS may cut its output by an order of powerguard that is not known to be cancelled; None: none may.

    Most UPSes show such a countdown themselves (`budget.power_off_at_s`).
    """
    return max((each.acts_at_s for each in state.armed if _may_still_cut(each, now_s)), default=None)


# --- The BMC's policy -------------------------------------------------------------------------------------------


def ensure_policy(turn: Turn, outage: str, *, limit_s: float) -> tuple[str, ...]:
    """Order that the BMC powers the host on when AC returns; return the ids: none without a BMC in the settings."""
    return (turn.order(EnsurePolicy, limit_s=limit_s, outage=outage),) if turn.policy.bmc else ()


def reconcile_policy(turn: Turn) -> None:
    """Put the policy back that an outage found, once there is none."""
    changed = turn.state.temporary_policy
    if changed is None or not isinstance(turn.state.phase, Online) or turn.state.feed.awaits_witness:
        return  # One unconfirmed reading only causes a poll: it may be the next outage, which needs always-on.
    if changed.order is None and turn.now_s >= changed.retry_at_s:
        id_ = turn.order(RestorePolicy, limit_s=turn.policy.bmc_limit_s, outage="", policy=changed.policy)
        turn.owe(replace(changed, order=id_, at_s=turn.now_s))


def handle_policy(turn: Turn, outcome: Outcome) -> None:
    """Enter that the policy was changed, or put back."""
    if isinstance(outcome.action, RestorePolicy):
        _handle_restored(turn, outcome)
    elif isinstance(outcome.action, EnsurePolicy):
        # From one that failed, too: a policy that was set is in force even if it could not be read back.
        restore = events.policy_ensured(outcome).restore
        if outcome.action.outage and restore is not None and turn.state.temporary_policy is None:
            turn.owe(TemporaryPolicy(policy=restore))


def _handle_restored(turn: Turn, outcome: Outcome) -> None:
    changed = turn.state.temporary_policy
    if changed is None or changed.order != outcome.action.id:
        return
    if isinstance(outcome, Done) and not events.is_recorded(outcome):
        turn.settle(changed)
        turn.note("policy_restored", "as the outage found it", **dict(outcome.detail))
    elif isinstance(outcome, Failed) and outcome.harmless:
        turn.settle(changed)  # The failure says so: it will never be put back.
    else:
        turn.owe(replace(changed, order=None, retry_at_s=turn.now_s + RESTORE_AGAIN_S))
    if turn.outage_id:
        # The next outage began meanwhile, and may have made sure of the policy before this undid it.
        ensure_policy(turn, turn.outage_id, limit_s=turn.policy.bmc_limit_s)


def policy_after_boot(_policy: Policy, old: State, now_s: float, *, whole: bool) -> tuple[TemporaryPolicy, ...]:  # noqa: ARG001
    """Return the policy that is still to be put back in another boot: a BMC keeps it. whole: as in `Stored`."""
    return tuple(replace(each, order=None, at_s=now_s, retry_at_s=now_s) for each in old.owing(TemporaryPolicy))


# --- A shutdown that ends ---------------------------------------------------------------------------------------


def foreign_stop(turn: Turn) -> None:
    """Another program stops the host on battery. The host must come back; the UPS's output is not powerguard's."""
    phase = turn.state.phase
    if not isinstance(phase, OnBattery | EmergencyCheckpoint | Holding | Recovery):
        return
    methods = [method for method in turn.policy.methods if method is not PowerOnMethod.OUTPUT]
    arm(turn, phase.outage, methods, off_in_s=_off_in_s(turn), limit_s=LIMIT_S)
    for each in turn.state.armed:
        turn.owe(replace(each, kept=True))


def decide_late(turn: Turn, phase: Shutdown, *, stable: bool) -> None:
    """Units have stopped and the network is still up: decide once whether this becomes a reboot.

    stable: utility has been back for long enough, by fresh readings.
    """
    if not turn.policy.late_reboot or phase.boot_id != turn.policy.boot_id or not phase.ordered:
        return
    because = _against_reboot(turn, stable=stable)
    if because:
        turn.note("reboot_left", because, method="reboot")
        return
    left_s = max(0.0, phase.force_at_s - turn.now_s)
    turn.order(Reboot, limit_s=2.0, outage=phase.outage.id, force_after_s=left_s)
    turn.note("reboot_ordered", "utility is stable and no countdown runs, so AC would never drop", Level.WARNING)


def _against_reboot(turn: Turn, *, stable: bool) -> str:
    """Say why the host must power off and not reboot, or "". The UPSes that cut nothing must feed it by themselves."""
    policy, state = turn.policy, turn.state
    if not stable:
        return "utility is not stable, or the UPS cannot be read"
    if not policy.feeds:
        return _cut_to_come(state.feed, state.armed)
    against = {each.ups: because for each in state.upses if (because := _against_ups(turn, each))}
    if feeds.are_fed(policy, state, lambda _, each: each.ups not in against):
        return ""
    return "; ".join(f"{ups} {because}" for ups, because in against.items())


def _against_ups(turn: Turn, each: Supplied) -> str:
    """Say why one of several UPSes may not feed the host on, or "". One without a reading may be about to cut."""
    if each.presumed or not fusion.is_stable(turn.policy, each.feed, turn.now_s, stable_s=0.0):
        return "is not on utility, or cannot be read"
    because = _cut_to_come(each.feed, [order for order in turn.state.armed if order.ups == each.ups])
    return because and f"may drop: {because}"


def _cut_to_come(feed: Feed, armed: Iterable[Armed]) -> str:
    """Say why a UPS may cut its output, or ""."""
    if budget.power_off_at_s(feed) is not None:
        return "a countdown runs: the UPS cuts its output"
    if any(each.method is PowerOnMethod.OUTPUT and each.returns != "aborts" for each in armed):
        return "the UPS has the order to switch its output off and on"
    return ""
