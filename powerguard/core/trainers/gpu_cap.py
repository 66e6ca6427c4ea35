"""GPU power as what stretches the battery: capped on battery where a drill has measured that it pays, always restored.

What pays is work done with one charge: how much longer the battery lasts at the capped load, times the speed that is
left. If GPUs are a small part of the load it does not pay (measured: a weak drop is worse than no cap).
"""

from dataclasses import replace

from powerguard.core.decide.turn import Turn
from powerguard.core.energy import account
from powerguard.core.energy import budget as sums
from powerguard.core.model.actions import CapPower, Level, RestorePower
from powerguard.core.model.events import Done, Failed
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Emergency, GpuCap, OnBattery, Online, Shutdown, State, Supply
from powerguard.core.supply import fusion

LEAST_GAIN = 1.05
LIMIT_S = 5.0
AGAIN_S = 10.0
FAILED = "gpu_cap_failed"
"""Alarm: GPU power could not be capped in this outage; what comes after a cap waits for none."""
_STUCK = "gpu_power_stuck"


def gain(policy: Policy, state: State) -> float | None:
    """Work done with one charge when capped, as a share of that without; None where no drill has measured it."""
    drop = state.learned.cap
    if drop is None or not 0.0 < drop.after < drop.before:
        return None
    points = account.table(policy, state.battery)
    longer = drop.before / drop.after
    if points and policy.shared is not None:
        # The others draw on: the battery lasts longer only by what this host takes off the load of all.
        load = account.load_of(state.battery)
        capped = max(load - (drop.before - drop.after), account.LOAD_FLOOR)
        longer = account.tau_s(points, capped) / account.tau_s(points, load)
    elif points:
        longer = account.tau_s(points, drop.after) / account.tau_s(points, drop.before)
    return longer * drop.speed


def tend(turn: Turn) -> None:
    """Cap when it is time, restore when it is over; a failed restore is repeated without limit, and logged."""
    cap = turn.state.cap
    if cap is None:
        _begin(turn)
    elif cap.order is None and not isinstance(turn.state.phase, Shutdown) and _is_over(turn):
        _lift(turn, cap)


def _begin(turn: Turn) -> None:
    policy, state = turn.policy, turn.state
    if policy.cap_share is None:
        return
    if isinstance(state.phase, Online):
        turn.tell_once(FAILED, "the next outage tries again", holds=False)
        return
    if FAILED in state.told or state.feed.supply is not Supply.BATTERY:
        return
    because = ""
    if isinstance(state.phase, OnBattery):
        waited_s = turn.now_s - state.feed.since_s
        worth = gain(policy, state)
        if waited_s >= policy.cap_dwell_s and worth is not None and worth >= LEAST_GAIN:
            because = f"{worth:.2f} times the work with the energy that is left"
    elif isinstance(state.phase, Emergency):
        paused_s = turn.now_s - state.phase.paused_at_s
        if paused_s >= policy.cap_dwell_s and turn.load_stays_high(state.phase):
            # It no longer costs anything: paused trainers cannot be slowed down.
            because = "the load has not fallen although training was asked to pause"
    if because and sums.power_off_at_s(state.feed) is None:
        order = turn.order(CapPower, limit_s=LIMIT_S, outage=turn.outage_id, share=policy.cap_share)
        turn.owe(GpuCap(outage=turn.outage_id, at_s=turn.now_s, order=order))
        turn.note("gpu_cap_ordered", because, share=policy.cap_share)


def _is_over(turn: Turn) -> bool:
    """Utility is stable; or the cap was lost half-way; or it has long been unknown whether there is utility."""
    cap, feed, drill = turn.state.cap, turn.state.feed, turn.state.drill
    if cap is not None and drill is not None and drill.stage == "cap" and cap.outage == drill.id:
        return False  # It measures what the cap brings, and ends in time.
    if cap is not None and cap.lifting:
        return turn.now_s - cap.at_s >= AGAIN_S
    if sums.power_off_at_s(feed) is None and fusion.is_stable(
        turn.policy, feed, turn.now_s, stable_s=turn.policy.cap_lift_s
    ):
        return True
    lost_s = 0.0 if feed.lost_since_s is None else turn.now_s - feed.lost_since_s
    return isinstance(turn.state.phase, Online) and lost_s >= turn.policy.unknown_hold_s


def _lift(turn: Turn, cap: GpuCap) -> None:
    order = turn.order(RestorePower, limit_s=LIMIT_S, outage=cap.outage)
    turn.owe(replace(cap, order=order, lifting=True, at_s=turn.now_s))


def take_in(turn: Turn, outcome: Done | Failed) -> None:
    """Enter how an order to cap or to restore ended; an order that is not ours, such as a drill's, is passed over."""
    cap, action = turn.state.cap, outcome.action
    if cap is None or cap.order != action.id:
        return
    cap = replace(cap, order=None)
    if isinstance(action, RestorePower):
        if isinstance(outcome, Done):
            turn.settle(cap)
            turn.tell_once(_STUCK, "restored", holds=False)
            turn.note("gpu_power_restored", "confirmed by the helper", **dict(outcome.detail))
        else:
            turn.owe(cap)
            turn.tell_once(_STUCK, f"{outcome.reason}: training runs at lower power", holds=True, level=Level.ERROR)
    elif isinstance(outcome, Done):
        turn.owe(cap)
        turn.note("gpu_power_capped", "confirmed by the helper", **dict(outcome.detail))
    else:
        # An error of the helper may have left some of them capped: what was found is put back, then it is over.
        turn.tell_once(FAILED, outcome.reason, holds=True)
        _lift(turn, cap)
