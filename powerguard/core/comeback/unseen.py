"""Did this host lose power in the boot before, although no outage was seen? Then training is started, as after one.

A battery that dies at the transfer, or a breaker behind the UPS, ends a host in phase online: the journal knows of no
outage. What it does know is that the host trained, and that nothing had asked the daemon to stop. A crash looks the
same, so the BMC is asked whether AC was gone; only its report of a reset keeps training from being started
(docs/decisions/0237). Whatever is not started is an alarm until training runs.
"""

from dataclasses import replace
from typing import Final

from powerguard.core.decide.turn import Turn
from powerguard.core.model.actions import Level
from powerguard.core.model.events import PoweredOn
from powerguard.core.model.policy import AfterUnseenStop, Policy
from powerguard.core.model.state import JobEnded, Online, Outage, Recovery, State, Supply, Trainer, UnseenStop

REPORT_LIMIT_S: Final = 60.0
"""A BMC whose AC was gone starts with the host, and is asked twice (`daemon/boots.py`)."""
OFTEN: Final = 3
WITHIN_S: Final = 3600.0
"""So many stops within this time, and nothing that proves a loss of power: training itself may crash this host."""
_AC_CAME: Final = ("policy-always-on", "policy-last-state")
"""Causes of a power-on that prove a loss of AC. The bit for it alone does not: it may be of an older one."""
_RESETS: Final = ("reset-button", "watchdog", "pef-reset", "pef-power-cycle")
"""Causes that prove a reset. A soft reset proves nothing: firmware makes one itself while it trains memory."""
NOT_STARTED: Final = "training_not_started"


def after_boot(policy: Policy, old: State, stored_at_s: float, now_s: float, gap_s: float | None) -> UnseenStop | None:
    """Return how the old boot ended, if it went down unasked and outside an outage; else None.

    None also where nothing trained and no scheduler has a node here. If training was still to be started after such a
    stop before, that one is returned. In a recovery, training that was started may have crashed the host: that is one
    more such stop, which only counts (`hold_back`). old: the state that it left, in its own clock; its last entry is of
    stored_at_s. gap_s: from then to now; None: unknown.
    """
    shift_s = now_s - (gap_s or 0.0) - stored_at_s
    before = None if old.unseen is None else _shifted(old.unseen, shift_s, now_s, gap_s)
    if isinstance(old.phase, Recovery):
        return _in_recovery(old, old.phase, before, now_s)
    if not isinstance(old.phase, Online):
        return None
    found = before
    if old.up:
        found = _found(old, before, stored_at_s, now_s, gap_s, has_node=policy.scheduler)
    if found is None or not (found.by_s is not None or found.left_because):
        return None  # A stop in order, of a host that owed no training.
    # The person who orders a reboot while the alarm stands starts training.
    return None if found.left_because and not old.up else found


def after_restart(stop: UnseenStop | None, now_s: float) -> UnseenStop | None:
    """Return how the boot before ended, for a daemon that is started again in the same boot: it asks the BMC again."""
    if stop is None or stop.by_s is None or stop.reported or stop.forced_by:
        return stop
    return replace(stop, by_s=now_s + REPORT_LIMIT_S)


def _found(
    old: State, before: UnseenStop | None, stored_at_s: float, now_s: float, gap_s: float | None, *, has_node: bool
) -> UnseenStop | None:
    """Return what is known of a boot that ended unasked; None if training was not running and is not owed.

    has_node: a scheduler has a node here, which it took for lost.
    """
    boots = (*(() if before is None else before.boots[1 - OFTEN :]), now_s)
    trained = [trainer for trainer in old.trainers if trainer.alive and not trainer.stood]
    if not trained and before is not None and (before.by_s is not None or before.left_because):
        # Training that was still to be started has done no work, and is owed as before.
        return replace(before, boots=boots)
    is_owed = bool(old.start or old.owing(JobEnded))
    if not (trained or is_owed or has_node):
        return None
    return UnseenStop(
        down_at_s=now_s - (gap_s or 0.0),
        away_s=gap_s,
        trainers=len(trained) or int(is_owed),
        at_risk_s=round(sum(_behind_s(each, stored_at_s) for each in trained), 3),
        boots=boots,
        by_s=now_s + REPORT_LIMIT_S,
    )


def _in_recovery(old: State, phase: Recovery, before: UnseenStop | None, now_s: float) -> UnseenStop | None:
    """Return the stops until now, if a host that came back went down unasked and on utility once more."""
    if not old.up or old.feed.supply is Supply.BATTERY:
        return None
    boots = () if before is None else before.boots
    if phase.tries:
        boots = (*boots[1 - OFTEN :], now_s)
    return UnseenStop(down_at_s=now_s, boots=boots, by_s=None) if boots else None


def _shifted(stop: UnseenStop, shift_s: float, now_s: float, gap_s: float | None) -> UnseenStop:
    """Return a stop of an earlier boot in the clock of this one, whose BMC is asked again."""
    down_at_s = stop.down_at_s + shift_s
    return replace(
        stop,
        down_at_s=down_at_s,
        away_s=None if stop.away_s is None or gap_s is None else round(now_s - down_at_s, 3),
        boots=tuple(at_s + shift_s for at_s in stop.boots),
        lost_power=None,
        reported="",
        firmware_s=None,
        gone=False,
        by_s=None if stop.by_s is None else now_s + (0.0 if stop.forced_by else REPORT_LIMIT_S),
    )


def _behind_s(trainer: Trainer, at_s: float) -> float:
    """Work of a trainer since its newest durable checkpoint; 0 where it is not known."""
    if trainer.step is not None and trainer.durable_step is not None and trainer.step_s > 0.0:
        return max(0, trainer.step - trainer.durable_step) * trainer.step_s
    return 0.0 if trainer.durable_at_s is None else max(0.0, at_s - trainer.durable_at_s)


def note_stop(turn: Turn, old: State, gap_s: float | None) -> None:
    """Log that the boot before, which left the state old, ended out of order."""
    unseen = turn.state.unseen
    if unseen is not None and old.up:
        because = "on utility, and nothing had asked it to: it lost power, or crashed"
        away_s = None if gap_s is None else round(gap_s, 3)
        turn.note("host_went_down", because, away_s=away_s, trainers=unseen.trainers)


def lost_power(event: PoweredOn) -> bool | None:
    """Say whether AC was gone before this boot, by what powered the host on; None if that does not say.

    The bit for a loss of AC (IPMI 2.0 section 28.2, "last power event") outlives a reset, so it may be of an older
    loss; and boards that leave the byte at zero say nothing with it.
    """
    if event.cause in _RESETS:
        return False
    return True if event.ac_failed or event.cause in _AC_CAME else None


def handle(turn: Turn, event: PoweredOn) -> None:
    """Enter what is reported of the end of the boot before."""
    unseen = turn.state.unseen
    if unseen is not None and (unseen.by_s is not None or isinstance(turn.state.phase, Recovery)):
        lost = lost_power(event)
        is_doubtful = lost and _is_often(unseen) and event.cause not in _AC_CAME
        turn.update(
            unseen=replace(
                unseen,
                lost_power=None if is_doubtful else lost,
                reported=f"the BMC reports {event.cause}" if lost is False else event.because,
                firmware_s=event.firmware_s,
                by_s=None if unseen.by_s is None else min(unseen.by_s, turn.now_s),
            )
        )


def overrule(turn: Turn, who: str) -> None:
    """Enter that a person wants training started, whatever the boot before ended with."""
    unseen = turn.state.unseen
    if unseen is not None and is_open(turn.state):
        turn.update(unseen=replace(unseen, by_s=turn.now_s, left_because="", forced_by=who))


def is_open(state: State) -> bool:
    """Say whether training that such a stop has ended is still to be started, by powerguard or by a person."""
    stop = state.unseen
    return isinstance(state.phase, Online) and stop is not None and (stop.by_s is not None or bool(stop.left_because))


def power_lost_because(policy: Policy, state: State, now_s: float) -> str:
    """Say why training is started as after an outage; "" while this is not known, and where it is not."""
    unseen = state.unseen
    if unseen is None or unseen.by_s is None or _runs(state, unseen):
        return ""
    if unseen.forced_by:
        return f"{unseen.forced_by} wants training started"
    if now_s < unseen.by_s and not unseen.lost_power:
        return ""
    return "" if _kept_by_people(policy, state) or _left_because(policy, unseen) else _why_gone(unseen)


def _why_gone(unseen: UnseenStop) -> str:
    if unseen.lost_power:
        return "the host lost power, and no UPS had reported an outage"
    return "the host went down on utility, unasked: it lost power, or crashed"


def _kept_by_people(policy: Policy, state: State) -> str:
    """Say why training is not started, whatever the boot before ended with; "" if the settings and people permit it."""
    if policy.after_unseen_stop is AfterUnseenStop.NEVER:
        return "resume.after_unseen_stop is never"
    return "" if state.maintenance is None else f"{state.maintenance.who} has set maintenance"


def _left_because(policy: Policy, unseen: UnseenStop) -> str:
    """Say why training is not started after a stop that is not known to be a loss of power; "" if it is."""
    if unseen.lost_power:
        return ""
    if unseen.lost_power is False:
        return unseen.reported
    if policy.after_unseen_stop is AfterUnseenStop.IF_CONFIRMED:
        return f"nothing confirms a loss of power ({unseen.reported or 'no report'})"
    return _too_often(unseen)


def _too_often(unseen: UnseenStop) -> str:
    return f"it went down {OFTEN} times within an hour, and nothing proves a loss of power" if _is_often(unseen) else ""


def _is_often(unseen: UnseenStop) -> bool:
    return len(unseen.boots) >= OFTEN and unseen.boots[-1] - unseen.boots[-OFTEN] <= WITHIN_S


def _runs(state: State, stop: UnseenStop) -> bool:
    """Say whether training runs, whatever has started it.

    While it is not decided, as many trainers as before must report a step. Later a person has started one, which may
    report none (a signal, a program).
    """
    alive = [trainer for trainer in state.trainers if trainer.alive]
    if stop.by_s is None and stop.gone:
        return bool(alive)
    running = [trainer for trainer in alive if trainer.step is not None]
    return len(running) >= (max(1, stop.trainers) if stop.by_s is not None else 1)


def reconcile(turn: Turn) -> None:
    """Decide that training is not started, and keep the alarm until it runs."""
    unseen = turn.state.unseen
    if unseen is None:
        return
    if is_open(turn.state) and _runs(turn.state, unseen):
        unseen = replace(unseen, by_s=None, left_because="")
    elif unseen.by_s is not None and not unseen.forced_by:
        because = _kept_by_people(turn.policy, turn.state)
        if not because and turn.now_s >= unseen.by_s:
            because = _left_because(turn.policy, unseen)
        unseen = replace(unseen, by_s=None, left_because=because) if because else unseen
    if not any(trainer.alive for trainer in turn.state.trainers):
        unseen = replace(unseen, gone=True)
    turn.update(unseen=unseen)
    text = f"the host went down on utility, unasked, while it trained; {unseen.left_because}"
    holds = bool(unseen.left_because) and unseen.trainers > 0
    turn.set_alarm(NOT_STARTED, text if holds else "training runs", holds=holds, level=Level.ERROR)


def hold_back(turn: Turn, phase: Recovery) -> bool:
    """Keep training from being started in this recovery if it may crash the host, and raise the alarm; end it else.

    Returns whether it is kept.
    """
    unseen = turn.state.unseen
    if unseen is None:
        return False
    because = "" if unseen.lost_power or phase.forced_by else _too_often(unseen)
    if because and not unseen.reported and turn.now_s - phase.began_s < REPORT_LIMIT_S:
        return True
    turn.update(unseen=replace(unseen, left_because=because))
    text = f"the host went down on utility, unasked; {because}"
    turn.set_alarm(NOT_STARTED, text if because else "training is started", holds=bool(because), level=Level.ERROR)
    return bool(because)


def note_return(turn: Turn) -> None:
    """Log that the host is back from such a stop, whose outage begins here."""
    unseen = turn.state.unseen
    if unseen is not None:
        turn.note(
            "host_returned",
            _why_gone(unseen),
            Level.ERROR,
            outage=turn.outage_id,
            phase="online",
            away_s=None if unseen.away_s is None else round(unseen.away_s, 3),
            trainers=unseen.trainers,
            at_risk_s=unseen.at_risk_s,
            firmware_s=unseen.firmware_s,
            booted_s=round(unseen.boots[-1], 3) if unseen.boots else None,
        )


def returned(turn: Turn, outage: Outage) -> Recovery:
    """Return the phase that brings training back."""
    unseen = turn.state.unseen
    if unseen is None:  # pragma: no cover - the cause is only given where there is one
        return Recovery(outage=outage, began_s=turn.now_s, clean=False)
    turn.update(unseen=replace(unseen, by_s=None, left_because=""))
    turn.set_alarm(NOT_STARTED, "training is started", holds=False)
    outage = replace(outage, since_s=unseen.down_at_s, load_at_start=None, boots=unseen.boots[-1:])
    return Recovery(outage=outage, began_s=turn.now_s, clean=False, forced_by=unseen.forced_by)
