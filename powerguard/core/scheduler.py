"""What does the scheduler hear of an outage? Drain on battery, requeue and down at the commit, return when it is over.

Nothing waits for any of these orders: a scheduler that hangs or refuses changes no deadline. The mark on the node is
owed (`NodeMarked`) from the first order on, until it was given back or is found to be another's. It survives a restart
of the daemon, a reboot and a second outage, which puts its own mark in place of the first one's.
"""

from dataclasses import replace
from typing import Final

from powerguard.core.decide.turn import Turn
from powerguard.core.model import events
from powerguard.core.model.actions import DrainNode, LeaveNode, Level, ReturnNode, SignalJobs
from powerguard.core.model.events import Done, Outcome
from powerguard.core.model.policy import Mode, Policy
from powerguard.core.model.state import Emergency, NodeMarked, OnBattery, Online, Recovery, Shutdown, State, Supply
from powerguard.core.supply import feeds, fusion

LIMIT_S: Final = 10.0
MOST_SPREAD_S: Final = 30.0
"""Longest `scheduler.spread_s`."""
DRAIN_LIMIT_S: Final = LIMIT_S + MOST_SPREAD_S
"""A host waits for its share of the spread, and then for the scheduler."""
AGAIN_S: Final = 5.0
"""Between two orders in an outage, while the scheduler does not do what it was asked."""
LATER_S: Final = 60.0
"""Longest such time once the outage is over: a node that cannot be given back may need a person, and each try is two
lines. It doubles up to here. A daemon that is killed leaves the next one an order whose time is nearly over; that such
an order fails must not keep the node out for a minute."""
_FAILED: Final = "scheduler_failed"
NOT_DOWN: Final = "requeued"
"""What a LeaveNode did that requeued jobs, but could not set the node down."""
_STAYS: Final = (
    "dry-run changes nothing, so powerguard's mark stays on the node. "
    "When it may run jobs: scontrol update NodeName=NAME State=RESUME"
)


def reconcile(turn: Turn) -> None:
    """Order what is due: mark the node, leave it, or give it back."""
    node, phase = turn.state.node, turn.state.phase
    if node is not None and not node.outage and not unknown(turn.policy, turn.now_s):
        turn.settle(node)
        turn.set_alarm(_FAILED, "the settings name no scheduler, or the mode is dry-run", holds=False)
    elif isinstance(phase, Shutdown):
        _leave(turn, _of_this(turn, node))
    elif isinstance(phase, OnBattery | Emergency) or (
        isinstance(phase, Recovery) and turn.state.feed.supply is Supply.BATTERY
    ):
        node = _drain(turn, node)
        if node is not None and _is_to_signal(turn, node):
            turn.order(SignalJobs, limit_s=LIMIT_S, outage=node.outage)
            turn.owe(replace(node, signalled=True))
    elif node is not None and node.order is None and turn.now_s >= node.retry_at_s and _is_over(turn, node):
        outage = "" if node.older else node.outage
        order = turn.order(ReturnNode, limit_s=LIMIT_S, outage=outage, jobs=node.jobs, rebooted=node.rebooted)
        # From here on the node may be in service, whatever the answer: a further outage marks and leaves it again.
        turn.owe(replace(node, order=order, returning=True, drained=False, left=False, at_s=turn.now_s))


def _of_this(turn: Turn, node: NodeMarked | None) -> NodeMarked:
    """Return what is owed for the open outage; the jobs of an older one are still to be started."""
    if node is not None and node.outage == turn.outage_id:
        return node
    if node is None:
        return NodeMarked(outage=turn.outage_id)
    return NodeMarked(outage=turn.outage_id, jobs=node.jobs, rebooted=node.rebooted, older=True)


def _drain(turn: Turn, node: NodeMarked | None) -> NodeMarked | None:
    """Mark the node once the outage has lasted, also where the mark is still that of an older outage."""
    is_new = node is None or node.outage != turn.outage_id
    if not turn.policy.scheduler or (is_new and not _has_lasted(turn)):
        return node
    if node is not None and node.order is not None and not (is_new and isinstance(turn.state.phase, Emergency)):
        return node  # A return that is in flight could lift the new mark.
    node = _of_this(turn, node)
    if node.drained or node.left or turn.now_s < node.retry_at_s:
        return node
    order = turn.order(DrainNode, limit_s=DRAIN_LIMIT_S, outage=node.outage)
    node = replace(node, order=order, returning=False, at_s=turn.now_s)
    turn.owe(node)
    return node


def _is_to_signal(turn: Turn, node: NodeMarked) -> bool:
    """Say whether jobs are to be sent their signal: once, and again where none has got it."""
    return isinstance(turn.state.phase, Emergency) and not node.signalled and turn.now_s >= node.signal_at_s


def _has_lasted(turn: Turn) -> bool:
    """Say whether the outage is no flicker any more."""
    if isinstance(turn.state.phase, Emergency):
        return True
    feed = turn.state.feed
    return feed.supply is Supply.BATTERY and turn.now_s - feed.since_s >= turn.policy.commit_dwell_s


def _leave(turn: Turn, node: NodeMarked) -> None:
    """Requeue the jobs at the commit, whatever became of the drain. No order is waited for, nor holds anything up."""
    if not turn.policy.scheduler or node.left:
        return
    if node.leaving and (node.order is not None or turn.now_s < node.retry_at_s):
        return
    order = turn.order(LeaveNode, limit_s=LIMIT_S, outage=node.outage)
    jobs = _union(node.jobs, node.running)
    turn.owe(replace(node, order=order, leaving=True, returning=False, running=(), jobs=jobs, at_s=turn.now_s))


def _union(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*one, *other)))


def _is_over(turn: Turn, node: NodeMarked) -> bool:
    """Say whether jobs may run here again: utility is stable, or after a boot the gate has opened.

    Once the order was given, it is repeated as soon as there is utility: a failure, or a daemon that was killed, does
    not begin the wait again.
    """
    phase, feed = turn.state.phase, turn.state.feed
    if feed.awaits_witness:
        return False  # One reading of battery causes a poll and nothing else.
    if isinstance(phase, Recovery):
        return phase.tries > 0
    if node.returning and feed.supply is Supply.UTILITY:
        return True
    if fusion.is_stable(turn.policy, feed, turn.now_s, stable_s=turn.policy.node_return_s):
        return True
    since_s = feeds.unreported_since_s(turn.state)
    return since_s is not None and turn.now_s - since_s >= turn.policy.unknown_hold_s


def begin_again(turn: Turn, *, old_mode: Mode) -> None:
    """Forget what was only recorded of this outage, in a mode that carries out less. old_mode: that mode."""
    node = turn.state.node
    if node is not None and node.outage == turn.outage_id:
        node = replace(node, left=False, leaving=False, recorded=False)
        if old_mode is Mode.DRY_RUN:
            node = replace(node, drained=False, signalled=False, running=())
        turn.owe(node)


def handle(turn: Turn, outcome: Outcome) -> None:
    """Enter how an order ended; one that was overtaken by another is passed over."""
    node, action = turn.state.node, outcome.action
    if isinstance(action, SignalJobs):
        _handle_signalled(turn, action, outcome)
        return
    if node is None or node.order != action.id:
        return
    node = replace(node, order=None)
    if not isinstance(outcome, Done):
        _again(turn, node, outcome.reason)
        return
    result, recorded = events.node_marked(outcome), events.is_recorded(outcome)
    if result.effect == NOT_DOWN:
        _again(turn, replace(node, jobs=_union(node.jobs, result.jobs)), result.because)
        return
    turn.set_alarm(_FAILED, "the scheduler answers again", holds=False)
    if isinstance(action, DrainNode):
        turn.owe(replace(node, drained=True, running=result.jobs, recorded=recorded, older=node.older and recorded))
        _note(turn, "node_drained", outcome, result)
    elif isinstance(action, LeaveNode):
        jobs = _union(node.jobs, result.jobs)
        recorded = recorded and (node.recorded or not node.drained)  # a rehearsal drains the node, and then leaves it
        older = node.older and recorded
        turn.owe(replace(node, left=True, leaving=False, jobs=jobs, recorded=recorded, older=older))
        _note(turn, "node_left", outcome, result)
    elif isinstance(action, ReturnNode):
        turn.settle(node)
        if recorded and not node.recorded:
            turn.note("node_kept", _STAYS, Level.ERROR)
        _note(turn, "node_returned", outcome, result)


def _handle_signalled(turn: Turn, action: SignalJobs, outcome: Outcome) -> None:
    """Enter whether jobs got their signal. A job gets it once, so the order is repeated only if none has."""
    node = turn.state.node
    if isinstance(outcome, Done):
        if node is not None and node.drained:  # Else another order fails.
            turn.set_alarm(_FAILED, "the scheduler answers again", holds=False)
        if because := events.node_marked(outcome).because:
            turn.note("action_failed", because, Level.ERROR, action=type(action).__name__, took_s=outcome.took_s)
    elif node is None or node.outage != action.outage or not isinstance(turn.state.phase, Emergency):
        turn.note("action_failed", outcome.reason, Level.ERROR, action=type(action).__name__, took_s=outcome.took_s)
    else:
        turn.owe(replace(node, signalled=False, signal_at_s=turn.now_s + AGAIN_S))
        turn.set_alarm(_FAILED, f"{outcome.reason}; the order is repeated", holds=True, level=Level.ERROR)


def _again(turn: Turn, node: NodeMarked, because: str) -> None:
    """Keep what is known of the node, and repeat the order later."""
    again_s = min(2.0 * node.waited_s or AGAIN_S, LATER_S) if isinstance(turn.state.phase, Online) else AGAIN_S
    waited_s = again_s if isinstance(turn.state.phase, Online) else 0.0
    turn.owe(replace(node, retry_at_s=turn.now_s + again_s, waited_s=waited_s))
    turn.set_alarm(_FAILED, f"{because}; the order is repeated", holds=True, level=Level.ERROR)


def _note(turn: Turn, event: str, outcome: Done, result: events.NodeChanged) -> None:
    if events.is_recorded(outcome):
        return
    if isinstance(outcome.action, ReturnNode) and not outcome.action.outage and result.effect != "resumed":
        return  # There was no mark of an unknown outage.
    if result.effect == "not_ours":
        turn.note("node_kept", "others have marked it, so it is left as it is", Level.WARNING, **dict(outcome.detail))
        if not isinstance(outcome.action, LeaveNode):
            return
    turn.note(event, "read back from the scheduler", **dict(outcome.detail))


def unknown(policy: Policy, now_s: float) -> tuple[NodeMarked, ...]:
    """Return the node as one that may have the mark of an outage that the daemon does not know.

    The journal was lost, or could not be written. A node without a mark of powerguard is left as it is.
    """
    return (NodeMarked(at_s=now_s),) if policy.scheduler and policy.mode is not Mode.DRY_RUN else ()


def rebooted(turn: Turn) -> None:
    """Enter that the host lost power unannounced: the scheduler may have set its node down for that."""
    for node in (turn.state.node,) if turn.state.node is not None else unknown(turn.policy, turn.now_s):
        # An order that is in flight does not know it yet: its answer counts no more.
        turn.owe(replace(node, rebooted=True, order=None, retry_at_s=turn.now_s))


def after_boot(policy: Policy, old: State, now_s: float, *, whole: bool) -> tuple[NodeMarked, ...]:  # noqa: ARG001
    """Return the mark that is still to be taken off in another boot: the scheduler keeps it.

    If the state knows of none, it is that of an unknown outage. whole: as in `Stored`.
    """
    known = tuple(
        replace(
            each,
            order=None,
            leaving=False,
            returning=False,
            at_s=now_s,
            retry_at_s=now_s,
            rebooted=each.rebooted or not each.left,
        )
        for each in old.owing(NodeMarked)
    )
    return known or unknown(policy, now_s)
