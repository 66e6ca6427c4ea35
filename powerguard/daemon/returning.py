"""What a host that is back waits for, as one object: each gate with its state and why, and what would be started.

Pure over `Daemon`, as `status`. A gate that is closed keeps training from starting; `powerguard recover` is a person's
word that it is to start nevertheless (docs/decisions/0158).
"""

from typing import Final, NamedTuple

from powerguard.core import budget as sums
from powerguard.core import fusion, plan
from powerguard.core.model import Recovery, Supply
from powerguard.core.table import phase_name
from powerguard.daemon.port import Daemon
from powerguard.daemon.status import SCHEMA_VERSION, Json, Times

FRESH_S: Final = 60.0
"""A look at the host that is older than this tells how it was."""


class Gate(NamedTuple):
    """One thing that training waits for. open: None where it is not known. text: how it is, and what would be right."""

    name: str
    open: bool | None
    text: str


def returning(daemon: Daemon) -> Json:
    """Return the object of `/api/v1/recovery`."""
    times, phase = Times(daemon), daemon.state.phase
    told = phase if isinstance(phase, Recovery) else None
    view = daemon.returning
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "recovery",
        "at": round(times.wall_s, 3),
        "phase": phase_name(phase),
        "mode": daemon.policy.mode.value,
        "outage": None if told is None else told.outage.id,
        "back_since_at": None if told is None else times.at(told.began_s),
        "stage": stage(daemon),
        "forced_by": None if told is None else told.forced_by or None,
        "gates": [gate._asdict() for gate in gates(daemon)],
        "starts": {"target": None if view.command else view.target, "command": list(view.command)},
        "refused": refusal(daemon) or None,
        "refused_unchecked": refusal(daemon, unchecked=True) or None,
    }


def stage(daemon: Daemon) -> str:
    """Return how far a recovery is: none, gate, check, start, first_step."""
    phase = daemon.state.phase
    if not isinstance(phase, Recovery):
        return "none"
    if phase.started_at_s is not None:
        return "first_step"
    if phase.tries:
        return "start"
    return "gate" if any(gate.open is False for gate in gates(daemon)[:3]) else "check"


def gates(daemon: Daemon) -> list[Gate]:
    """Return utility, countdown, charge and host, in the order in which they are waited for."""
    return [_utility(daemon), _countdown(daemon), _charge(daemon), _host(daemon)]


def _utility(daemon: Daemon) -> Gate:
    policy, feed, now_s = daemon.policy, daemon.state.feed, daemon.clock()
    if feed.supply is Supply.BATTERY:
        return Gate("utility", open=False, text="on battery")
    if feed.supply is Supply.UNKNOWN or not fusion.is_fresh(policy, feed, now_s):
        hold = f"training starts blind {policy.unknown_hold_s:.0f} s after the return"
        return Gate("utility", open=False, text=f"not known: no source tells; {hold}")
    for_s = now_s - feed.since_s
    if not fusion.is_stable(policy, feed, now_s, stable_s=policy.utility_stable_s):
        return Gate("utility", open=False, text=f"for {for_s:.0f} s; must hold {policy.utility_stable_s:.0f} s")
    return Gate("utility", open=True, text=f"for {for_s:.0f} s")


def _countdown(daemon: Daemon) -> Gate:
    off_at_s = sums.power_off_at_s(daemon.state.feed)
    if off_at_s is None:
        return Gate("countdown", open=True, text="none runs")
    left_s = max(0.0, off_at_s - daemon.clock())
    return Gate("countdown", open=False, text=f"a UPS cuts its output in {left_s:.0f} s")


def _charge(daemon: Daemon) -> Gate:
    policy, state, now_s = daemon.policy, daemon.state, daemon.clock()
    reading = state.feed.reading
    told = "not told" if reading is None or reading.charge_pct is None else f"{reading.charge_pct:.0f} %"
    if because := plan.may_start(policy, state, now_s):
        return Gate("charge", open=True, text=f"{told}: {because}")
    began_s = state.phase.began_s if isinstance(state.phase, Recovery) else state.feed.since_s
    left_s = policy.charge_hold_s - (now_s - max(began_s, state.feed.since_s))
    if state.feed.supply is Supply.UTILITY and left_s <= 0.0:
        return Gate("charge", open=True, text=f"{told}: utility for long, and waiting on would cost more")
    text = f"{told}: a second outage would cost the checkpoint; waited for at most {max(0.0, left_s):.0f} s of utility"
    return Gate("charge", open=False, text=text)


def _host(daemon: Daemon) -> Gate:
    seen = daemon.returning.seen
    if seen is None:
        return Gate("host", open=None, text="not looked at yet")
    age_s = daemon.clock() - seen.at_s
    when = "" if age_s < FRESH_S else f" ({age_s / 60:.0f} min ago)"
    if seen.problems:
        return Gate("host", open=False, text="; ".join(seen.problems) + when)
    found = [f"{seen.gpus} GPUs" if seen.gpus else "no GPU that could be asked", f"{seen.folders} folders"]
    return Gate("host", open=True, text="; ".join((*found, *seen.notes)) + when)


def refusal(daemon: Daemon, *, unchecked: bool = False) -> str:
    """Return why a person's word to start training now is not taken; "" where it is.

    unchecked: the person trains without what the check of the host misses. On battery, and before a cut, nobody's word
    helps: training would be stopped again at once, or cost the battery that the next stop needs.
    """
    phase = daemon.state.phase
    if not isinstance(phase, Recovery):
        return f"nothing to recover from: the phase is {phase_name(phase)}"
    if phase.started_at_s is not None:
        return "training was started already: its first step is waited for"
    countdown = _countdown(daemon)
    if not countdown.open:
        return f"{countdown.text}: nothing is started before that"
    if daemon.state.feed.supply is Supply.BATTERY:
        return "on battery: training would only empty it; it starts by itself once utility is back"
    if unchecked:
        return ""
    host = _host(daemon)
    if host.open is None:
        return "the host was not looked at yet: ask again in 15 s, or say --unchecked"
    return host.text if host.open is False else ""
