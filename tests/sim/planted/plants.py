"""The faults that are planted: what is replaced in which module, and within how many seeds the simulator finds it.

Each is a slip that a person could make and a reader could miss. `within` is about three times what it took when it was
written (docs/decisions/0039): seeds move with every change of the world, a fault that hides does not stay within it.
"""

from dataclasses import dataclass, field
from typing import Any

_KILLED: dict[str, Any] = {"faults": {"daemon_killed_share": 1.0}}
_SILENT: dict[str, Any] = {"faults": {"source_lost_share": 1.0, "source_gone_share": 1.0}}
_ORDERED: dict[str, Any] = {"faults": {"countdown_share": 1.0, "fsd_share": 0.0}}
_FORCED: dict[str, Any] = {"faults": {"countdown_share": 0.0, "fsd_share": 1.0}}
_WORN: dict[str, Any] = {"ups": {"health": [0.6, 0.7], "coulomb_share": 1.0, "bad_cell_share": 0.0}}
_BLIND: dict[str, Any] = {
    "ups": {"health": [0.6, 0.62], "coulomb_share": 1.0, "bad_cell_share": 0.0, "gauge_error": 0.0},
    "host": {"stop_stuck_share": 1.0},
    "faults": {"silent_field_share": 1.0},
}
_DEAF: dict[str, Any] = {
    "ups": {"health": [0.6, 0.62], "bad_cell_share": 0.0, "gauge_error": 0.0},
    "host": {"stop_stuck_share": 1.0},
    "faults": {"silent_field_share": 1.0, "source_lost_share": 1.0, "source_gone_share": 1.0},
}
"""A gauge that is heard hastens a stop that began too late, and hides what was wrong before: here nobody hears it."""
_CAPPED: dict[str, Any] = {"drill": {"done": True, "cap": True}}
_JOINED: dict[str, Any] = {"trainer": {"checkpoint_median_s": 60.0}, "faults": {"joins_share": 1.0}}
_FULL: dict[str, Any] = {"faults": {"disk_full_share": 1.0}}
_DRAWING: dict[str, Any] = {"trainer": {"draws_on_share": 0.6, "never_pauses_share": 0.4}}


_RETURNS: dict[str, Any] = {
    "returns": {"output_share": 1.0, "late_share": 1.0, "rtc_share": 1.0, "sentinel_share": 1.0}
}
_RACES: dict[str, Any] = {**_RETURNS, "outage": {"bins": [{"from_s": 150.0, "to_s": 420.0, "share": 1.0}]}}
"""Utility returns while the host goes down, often."""
_SHORT: dict[str, Any] = {"bins": [{"from_s": 150.0, "to_s": 420.0, "share": 1.0}], "restrike_share": 0.0}
_LONG: dict[str, Any] = {"bins": [{"from_s": 900.0, "to_s": 1200.0, "share": 1.0}], "restrike_share": 0.0}
_ANY_WAY: dict[str, Any] = {
    "returns": {
        "rtc_share": 1.0, "sentinel_share": 1.0, "watchdog_share": 1.0, "late_share": 1.0, "output_share": 0.5,
        "fails_share": 0.0, "foreign_share": 0.0,
    },
    "outage": _SHORT,
}  # fmt: skip
_HIDDEN: dict[str, Any] = {"returns": {"output_share": 1.0, "hidden_share": 1.0, "foreign_share": 0.0}, "outage": _LONG}
_CUT_AND_WOKEN: dict[str, Any] = {
    "returns": {"output_share": 1.0, "rtc_share": 1.0, "fails_share": 0.0, "foreign_share": 0.0},
    "outage": _LONG,
}
_STOPPED: dict[str, Any] = {
    "returns": {
        "sentinel_share": 1.0,
        "rtc_share": 1.0,
        "fails_share": 0.0,
        "foreign_share": 1.0,
        "foreign_s": [5, 60],
    },
    "outage": {"bins": [{"from_s": 30.0, "to_s": 120.0, "share": 1.0}], "restrike_share": 0.0},
}
_CALLED_OFF: dict[str, Any] = {**_STOPPED, "returns": {**_STOPPED["returns"], "called_off_share": 1.0}}
_LATE: dict[str, Any] = {"returns": {"late_share": 1.0, "foreign_share": 0.0}, "outage": _SHORT}
_REHEARSED: dict[str, Any] = {
    "returns": {
        "output_share": 1.0,
        "rtc_share": 1.0,
        "bracket_share": 1.0,
        "dry_run_share": 1.0,
        "foreign_share": 0.0,
    },
    "outage": _LONG,
}
_BRACKET: dict[str, Any] = {"returns": {"bracket_share": 1.0, "foreign_share": 0.0}}
_CUT_OFF: dict[str, Any] = {"faults": {"network_lost_share": 1.0, "second_share": 0.0}}
_TWO_UPSES: dict[str, Any] = {"faults": {"twin_share": 1.0, "second_share": 0.0}}
_TWO_CUT_OFF: dict[str, Any] = {"faults": {"twin_share": 1.0, "network_lost_share": 1.0, "second_share": 0.0}}
_TWO_TWICE: dict[str, Any] = {
    "outage": {"restrike_share": 1.0, "sag_share": 1.0, "restrike_after_s": 150.0},
    "faults": {"twin_share": 1.0, "second_share": 0.0, "source_lost_s": [200.0, 600.0]},
}
"""Short outages that strike again, and the other UPS silent for minutes: long before the second one, at times."""
_ONE_FOR_GOOD: dict[str, Any] = {
    "outage": {"bins": [{"from_s": 60.0, "to_s": 300.0, "share": 1.0}], "restrike_share": 0.0},
    "faults": {"twin_share": 1.0, "second_share": 0.0, "source_lost_share": 1.0, "source_gone_share": 1.0},
}
"""Two UPSes, one of which falls silent for good; utility is back soon."""
_TWO_SOURCES: dict[str, Any] = {"faults": {"second_share": 1.0, "glitch_rate": 0.02}}

_NOTED = "        await self._notes.write(action.ups, sent)\n"
_SENT = "        left_s = await self._send(output, action, prepared_s)\n"
_TOLD_OFF = "    if feed.countdown_at_s is None or feed.fsd_at_s is None:\n"
_START = "        for action in answer.actions:\n            self._start(action)\n"

_LASTS: dict[str, Any] = {
    "outage": _LONG,
    "ups": {"bad_cell_share": 0.0},
    "cluster": {"fault_share": 0.0, "deed_share": 0.0},
}
_SLURM_HANGS: dict[str, Any] = {
    "outage": {"bins": [{"from_s": 300.0, "to_s": 1200.0, "share": 1.0}]},
    "cluster": {"fault_share": 0.7, "deed_share": 0.0},
}
_PERSONS: dict[str, Any] = {**_LASTS, "cluster": {"fault_share": 0.0, "deed_share": 0.5}}
_APART: dict[str, Any] = {
    "outage": {"bins": [{"from_s": 150.0, "to_s": 900.0, "share": 1.0}]},
    "faults": {"daemon_killed_share": 0.0},
    "cluster": {"apart_share": 1.0, "fault_share": 0.0, "deed_share": 0.0},
}
_LEFT_ALONE: dict[str, Any] = {
    "outage": _LONG,
    "faults": {"daemon_killed_share": 0.0},
    "cluster": {"apart_share": 1.0, "fault_share": 1.0, "fault_s": [600.0, 900.0], "deed_share": 0.0},
}
"""Slurm, which would end the job on all hosts, hangs: they have the word of the host that leaves alone."""

FIRST = 20
"""The first seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """One fault. swaps: (text, what stands there instead), each text to be found once. level: "core", "loop" or "job".

    within: so many seeds, from FIRST on, find it. hint: the one that did when this was written; it is played first.
    site: what the world has more of, so that the fault has something to meet.
    """

    name: str
    module: str
    swaps: tuple[tuple[str, str], ...]
    level: str = "core"
    within: int = 60
    hint: int = FIRST
    site: dict[str, Any] = field(default_factory=dict)


PLANTS: tuple[Plant, ...] = (
    # --- The account -------------------------------------------------------------------------------------------------
    Plant(
        name="charge_in_percent_instead_of_a_share",
        module="powerguard.core.energy.learning",
        swaps=(("return charge_pct / 100.0 if charge_pct", "return charge_pct if charge_pct"),),
        site=_WORN,
    ),
    Plant(
        name="margin_dropped",
        module="powerguard.core.energy.budget",
        swaps=(("min((1.0 - policy.margin) * left, left - policy.floor)", "left"),),
        within=400,
        hint=141,
        site=_DEAF,
    ),
    Plant(
        name="seconds_taken_for_minutes",
        module="powerguard.core.energy.account",
        swaps=(("    drain = gone_s / tau_s(", "    drain = gone_s / 60.0 / tau_s("),),
        within=600,
        hint=190,
        site=_BLIND,
    ),
    Plant(
        name="energy_never_counted",
        module="powerguard.core.energy.account",
        swaps=(
            (
                "    gone_s = now_s - battery.at_s\n    if gone_s <= 0.0:",
                "    gone_s = now_s - battery.at_s\n    if True:",
            ),
        ),
        within=600,
        hint=187,
        site=_BLIND,
    ),
    Plant(
        name="health_believed_to_be_new",
        module="powerguard.core.energy.learning",
        swaps=(("        return presumed\n", "        return 1.0\n"),),
        within=300,
        hint=89,
        site=_DEAF,
    ),
    Plant(
        name="used_forgotten_at_boot",
        module="powerguard.core.comeback.recovery",
        swaps=(("            used=battery.used,\n", "            used=None,\n"),),
        level="loop",
        within=20,
    ),
    Plant(
        name="used_reset_at_a_restart",
        module="powerguard.core.comeback.recovery",
        swaps=(
            (
                "replace(state, trainers=_known(policy, state), unseen=stop)",
                "replace(state, battery=Battery(at_s=now_s))",
            ),
        ),
        level="loop",
        within=20,
        hint=26,
    ),
    # --- Checkpoints -------------------------------------------------------------------------------------------------
    Plant(
        name="older_checkpoint_taken_for_the_paused_step",
        module="powerguard.core.trainers.lifecycle",
        swaps=(("older = found.older and action.after is not Conduct.CONTINUE", "older = False"),),
        site=_JOINED,
        hint=24,
    ),
    Plant(
        name="failed_checkpoint_counts",
        module="powerguard.core.trainers.lifecycle",
        swaps=(
            (
                "fresh, owed = replace(trainer, in_flight=None), trainer.checkpoint",
                "fresh, owed = replace(trainer, in_flight=None, checkpoint=Durable()), trainer.checkpoint",
            ),
        ),
        site=_FULL,
    ),
    Plant(
        name="failed_checkpoint_asked_for_without_end",
        module="powerguard.core.trainers.lifecycle",
        swaps=(("failed.timed_out or not _may_try_again", "failed.timed_out or not _fits_again"),),
        site=_FULL,
    ),
    # --- Several sources, several UPSes, and a network that goes ------------------------------------------------------
    Plant(
        name="silent_with_the_network_and_only_alarmed",
        module="powerguard.core.supply.silence",
        swaps=(
            (
                "    return tuple(each for each in gone if each.heard_s - PRESUMED_S",
                "    return tuple(each for each in () if each.heard_s - PRESUMED_S",
            ),
        ),
        site=_CUT_OFF,
    ),
    Plant(
        name="presumed_battery_never_counted",
        module="powerguard.core.supply.feeds",
        swaps=(
            (
                "_advanced(policy, each, now_s) if ups_supply[each.ups] is Supply.BATTERY",
                "_advanced(policy, each, now_s) if each.feed.supply is Supply.BATTERY",
            ),
        ),
        site=_TWO_CUT_OFF,
    ),
    Plant(
        name="several_on_battery_and_nobody_knows",
        module="powerguard.core.supply.feeds",
        swaps=(
            (
                "    elif on_battery:\n        supply = Supply.BATTERY",
                "    elif on_battery:\n        supply = Supply.UNKNOWN",
            ),
        ),
        site=_TWO_UPSES,
    ),
    Plant(
        name="silent_feed_counts_as_utility",
        module="powerguard.core.supply.feeds",
        swaps=(
            (
                "    return Supply.UNKNOWN if bypassed or feed.lost_since_s is not None else Supply.UTILITY",
                "    return Supply.UTILITY",
            ),
        ),
        within=75,
        hint=44,
        site=_TWO_TWICE,
    ),
    Plant(
        name="one_feed_is_enough_whatever_is_needed",
        module="powerguard.core.supply.feeds",
        swaps=(("    if on_utility >= policy.minimum_supplies:", "    if on_utility >= 1:"),),
        within=240,
        hint=233,
        site=_TWO_UPSES,
    ),
    Plant(
        name="one_silent_feed_silences_the_host",
        module="powerguard.core.supply.feeds",
        swaps=(("max(lost) if lost and len(lost) == len(policy.feeds) else None", "max(lost) if lost else None"),),
        within=20,
        site=_TWO_UPSES,
    ),
    Plant(
        name="energy_of_a_silent_feed_not_counted",
        module="powerguard.core.supply.feeds",
        swaps=(("_advanced(policy, each, now_s) if ups_supply[each.ups] is Supply.BATTERY else each", "each"),),
        within=20,
        site=_TWO_CUT_OFF,
    ),
    Plant(
        name="energy_of_several_added_up",
        module="powerguard.core.supply.feeds",
        swaps=(("for supplies, value in known) / weight if weight", "for supplies, value in known) if weight"),),
        within=20,
        site=_TWO_UPSES,
    ),
    Plant(
        name="endless_before_the_outage",
        module="powerguard.core.supply.feeds",
        swaps=(("supply is Supply.UTILITY and feed.supply is Supply.BATTERY", "supply is Supply.UTILITY"),),
        within=20,
        site=_TWO_UPSES,
    ),
    Plant(
        name="feeds_forgotten_at_boot",
        module="powerguard.core.supply.feeds",
        swaps=(("each.feed, each.battery)) for each in upses)", "each.feed, each.battery)) for each in ())"),),
        within=20,
        site=_TWO_UPSES,
    ),
    Plant(
        name="presumption_ends_by_itself",
        module="powerguard.core.supply.silence",
        swaps=(("        each.presumed\n        or bool", "        False\n        or bool"),),
        within=20,
        hint=22,
        site=_TWO_CUT_OFF,
    ),
    Plant(
        name="silent_with_another_feed_and_only_alarmed",
        module="powerguard.core.supply.silence",
        swaps=(("abs(other.feed.since_s - lost_s) <= PRESUMED_S", "abs(other.feed.since_s - lost_s) <= -1.0"),),
        within=75,
        hint=43,
        site=_TWO_UPSES,
    ),
    Plant(
        name="silent_for_good_and_held_for_ever",
        module="powerguard.core.supply.silence",
        swaps=(("OUTLIVED = 1.25\n", "OUTLIVED = 1e9\n"),),
        within=35,
        hint=39,
        site=_ONE_FOR_GOOD,
    ),
    Plant(
        name="silent_for_good_and_believed_at_once",
        module="powerguard.core.supply.silence",
        swaps=(("OUTLIVED = 1.25\n", "OUTLIVED = 0.0\n"),),
        within=20,
        site=_ONE_FOR_GOOD,
    ),
    Plant(
        name="a_source_is_its_own_second_witness",
        module="powerguard.core.supply.fusion",
        swaps=(('return "second_source" if len(together) > 1 and', 'return "second_source" if len(together) > 0 and'),),
        site=_TWO_SOURCES,
        hint=67,
    ),
    Plant(
        name="older_readings_taken_for_newer",
        module="powerguard.core.supply.fusion",
        swaps=(
            (
                "    if old.reading is not None and reading.at_s <= old.reading.at_s:\n        return None\n",
                "",
            ),
        ),
        site={"faults": {"second_share": 1.0, "second_reordered_share": 1.0}},
    ),
    # --- Witnesses ---------------------------------------------------------------------------------------------------
    Plant(
        name="one_witness_enough",
        module="powerguard.core.supply.fusion",
        swaps=(
            ("        witness = supports_battery(reading)\n", '        witness = supports_battery(reading) or "one"\n'),
        ),
        level="loop",
        within=60,
        hint=21,
    ),
    Plant(
        name="poll_not_repeated_before_the_latch",
        module="powerguard.core.decide.machine",
        swaps=(
            ("    if phase.due_at_s is None:\n        turn.set_phase", "    if False:\n        turn.set_phase"),
            ("    if conditions.may_latch(", "    if phase.due_at_s is None or conditions.may_latch("),
        ),
    ),
    Plant(
        name="countdown_of_the_ups_ignored",
        module="powerguard.core.energy.budget",
        swaps=((_TOLD_OFF, f"    if True:\n        return feed.fsd_at_s\n{_TOLD_OFF}"),),
        site=_ORDERED,
        hint=21,
    ),
    Plant(
        name="forced_shutdown_of_the_ups_ignored",
        module="powerguard.core.energy.budget",
        swaps=((_TOLD_OFF, f"    if True:\n        return feed.countdown_at_s\n{_TOLD_OFF}"),),
        site=_FORCED,
        hint=21,
    ),
    Plant(
        name="lost_source_blocks_the_commit",
        module="powerguard.core.decide.conditions",
        swaps=(("        return now_s - due_at_s >= (_FRESH_S", "        return False and (_FRESH_S"),),
        site=_SILENT,
        hint=37,
    ),
    # --- The rule ----------------------------------------------------------------------------------------------------
    Plant(
        name="utility_ignored_before_the_latch",
        module="powerguard.core.decide.machine",
        swaps=(("    if not _is_stable(turn):", "    if True:"),),
        hint=22,
    ),
    Plant(
        name="resume_while_on_battery",
        module="powerguard.core.decide.machine",
        swaps=(
            ("    if state.feed.supply is Supply.BATTERY or budget.", "    if budget."),
            ("    if not _is_stable(turn):", "    if False:"),
            # Only out of a hold: from a checkpoint on its way it would come and go within one step, without end.
            ("not lifecycle.holds_return(state.trainers, turn.now_s)", "type(state.phase).__name__ == 'Holding'"),
        ),
        level="loop",
    ),
    Plant(
        name="utility_undoes_the_latch",
        module="powerguard.core.decide.machine",
        swaps=(
            (
                "if not turn.policy.powers_off and turn.state.phase.ordered and _may_return(turn):",
                "if _may_return(turn):",
            ),
        ),
        hint=47,
    ),
    Plant(
        name="abort_after_the_commit",
        module="powerguard.core.decide.machine",
        swaps=(
            (
                "if not turn.policy.powers_off and turn.state.phase.ordered and _may_return(turn):",
                "if isinstance(event, Abort):",
            ),
        ),
        level="loop",
        within=100,
        hint=34,
    ),
    Plant(
        name="pause_never_undone",
        module="powerguard.core.decide.transitions",
        swaps=(("if cause in _RESUMES:", "if cause is Cause.ABORTED:"),),
        hint=22,
    ),
    Plant(
        name="nobody_lets_go_on_what_was_stopped",
        module="powerguard.core.trainers.escalation",
        swaps=(
            (
                "    return not isinstance(state.phase, EmergencyCheckpoint | Holding | Shutdown) and",
                "    return False and",
            ),
        ),
        hint=28,
        site=_DRAWING,
    ),
    Plant(
        name="stop_forgotten_at_a_restart",
        module="powerguard.core.obligations",
        swaps=(
            (
                "else each for each in turn.state.owed))\n",
                "else each for each in turn.state.owed if not isinstance(each, Signalled)))\n",
            ),
        ),
        level="loop",
        within=90,
        hint=47,
        site=_DRAWING,
    ),
    Plant(
        name="signalled_while_it_saves",
        module="powerguard.core.trainers.escalation",
        swaps=(("    if trainer.order is not None or trainer.owes:\n", "    if False:\n"),),
        site=_DRAWING,
    ),
    Plant(
        name="signalled_whatever_the_supply",
        module="powerguard.core.trainers.escalation",
        swaps=(("    if feed.supply is not Supply.BATTERY or not on_battery or budget", "    if budget"),),
        within=120,
        hint=58,
        site=_DRAWING,
    ),
    Plant(
        name="told_to_go_on_while_it_is_stopped",
        module="powerguard.core.trainers.lifecycle",
        swaps=(("        elif due and not escalation.is_stopped(turn.state, trainer.name):\n", "        elif due:\n"),),
        hint=30,
        site=_DRAWING,
    ),
    Plant(
        name="cap_never_lifted",
        module="powerguard.core.trainers.escalation",
        swaps=(
            (
                "turn.policy, feed, turn.now_s, stable_s=turn.policy.cap_lift_s\n    ):\n        return True",
                "turn.policy, feed, turn.now_s, stable_s=turn.policy.cap_lift_s\n    ):\n        return False",
            ),
        ),
        site=_CAPPED,
        hint=22,
    ),
    Plant(
        name="bare_stop_never_forced",
        module="powerguard.core.energy.budget",
        swaps=(
            ("            return min(_BARE_FORCE_S, policy.force_after_s)", "            return policy.force_after_s"),
        ),
        within=40,
        site=_FORCED,
        hint=21,
    ),
    Plant(
        name="power_off_not_repeated_when_refused",
        module="powerguard.core.decide.machine",
        swaps=(('                changes["again_at_s"] = turn.now_s + RETRY_S\n', "                pass\n"),),
        level="loop",
        within=40,
    ),
    Plant(
        name="policy_not_checked",
        module="powerguard.core.decide.transitions",
        swaps=(
            ("        *methods.ensure_policy(turn, outage.id, limit_s=prepare_s),\n", ""),
            (
                "                methods.ensure_policy(turn, phase.outage.id, limit_s=turn.policy.bmc_limit_s)\n",
                "                pass\n",
            ),
        ),
        level="loop",
        within=40,
    ),
    Plant(
        name="power_off_before_the_sync",
        module="powerguard.core.decide.transitions",
        swaps=(
            (
                "    first = not phase.force_at_s and (not phase.waiting or turn.now_s >= phase.prepare_by_s)",
                "    first = not phase.force_at_s",
            ),
        ),
        level="loop",
        within=40,
    ),
    Plant(
        name="trainer_that_did_not_hear_stays_paused",
        module="powerguard.core.trainers.lifecycle",
        swaps=(
            (
                "        if is_resumed or not trainer.alive:\n            _settle",
                "        if True:\n            _settle",
            ),
        ),
        level="loop",
        within=60,
        hint=57,
    ),
    # --- Restarts ----------------------------------------------------------------------------------------------------
    Plant(
        name="latch_lost_at_a_restart",
        module="powerguard.core.comeback.recovery",
        swaps=(
            (
                "replace(state, trainers=_known(policy, state), unseen=stop)",
                "replace(state, trainers=_known(policy, state), phase=Online())",
            ),
        ),
        level="loop",
        within=40,
        hint=26,
    ),
    Plant(
        name="latch_holds_in_the_next_boot",
        module="powerguard.core.comeback.recovery",
        swaps=(("    same = stored.boot_id == policy.boot_id and stored.at_s <= now_s\n", "    same = True\n"),),
        level="loop",
        within=40,
    ),
    Plant(
        name="deadline_moved_back_at_a_restart",
        module="powerguard.core.comeback.recovery",
        swaps=(
            (
                "turn.set_phase(replace(phase, waiting=waiting, again_at_s=again_at_s))",
                "turn.set_phase(replace(phase, waiting=waiting, again_at_s=now_s, latched_s=now_s, force_at_s=0.0))",
            ),
        ),
        level="loop",
        within=60,
        hint=56,
    ),
    # --- Loop, bulkhead, journal -------------------------------------------------------------------------------------
    Plant(
        name="journal_after_the_action",
        module="powerguard.daemon.loop",
        swaps=(
            (
                "        self._recorder.hear(event, ",
                f"{_START}        self._recorder.hear(event, ",
            ),
            (
                f"        self._log_story(old, answer)\n{_START}",
                "        self._log_story(old, answer)\n",
            ),
        ),
        level="loop",
        within=10,
    ),
    Plant(
        name="outcome_forgotten",
        module="powerguard.daemon.journal.store",
        swaps=(('        _run(db, "DELETE FROM actions WHERE id = ?", line.action)', "        pass"),),
        level="loop",
        within=40,
    ),
    Plant(
        name="state_not_written",
        module="powerguard.daemon.journal.store",
        swaps=(
            (
                "                newest = _write_snapshot(db, batch.snapshot)",
                '                newest = ""',
            ),
        ),
        level="loop",
        within=40,
        hint=26,
    ),
    Plant(
        name="a_hung_disk_holds_up_the_loop",
        module="powerguard.daemon.journal.journal",
        swaps=(
            (
                "await asyncio.wait((waiter,), timeout=self._limits.append_s)",
                "await asyncio.wait((waiter,), timeout=None)",
            ),
        ),
        level="loop",
        within=150,
        hint=58,
    ),
    Plant(
        name="no_deadline_for_an_effector",
        module="powerguard.daemon.attempt",
        swaps=(("timeout=None if math.isinf(limit_s) else limit_s", "timeout=None"),),
        level="loop",
        within=40,
    ),
    Plant(
        name="an_effectors_bug_ends_the_daemon",
        module="powerguard.daemon.attempt",
        swaps=(
            (
                "    except BaseException as error:  # noqa: BLE001",
                "    except EffectorError as error:  # noqa: BLE001",
            ),
        ),
        level="loop",
        within=40,
    ),
    Plant(
        name="a_reboot_races_the_cut",
        module="powerguard.core.comeback.methods",
        swaps=(
            ('each.method is PowerOnMethod.OUTPUT and each.returns != "aborts" for each', "False for each"),
            ("if budget.power_off_at_s(feed) is not None:", "if False:"),
        ),
        site=_RACES,
        within=120,
        hint=21,
    ),
    Plant(
        name="an_output_cut_before_the_host_is_off",
        module="powerguard.core.comeback.methods",
        swaps=(
            ("        PowerOnMethod.OUTPUT: off_in_s + budget.", "        PowerOnMethod.OUTPUT: off_in_s - budget."),
        ),
        site=_RETURNS,
        within=60,
    ),
    Plant(
        name="a_power_on_method_that_is_never_disarmed",
        module="powerguard.core.comeback.methods",
        swaps=(
            (
                "        if each.order is None and not (each.kept or (dark and each.method in _KEEPS_AWAY)):",
                "        if each.order is None and dark and not dark:",
            ),
        ),
        site=_RETURNS,
        within=20,
    ),
    Plant(
        name="armed_methods_forgotten_over_a_boot",
        module="powerguard.core.obligations",
        swaps=(("        after_boot=methods.after_boot,\n", ""),),
        site=_RETURNS,
        within=20,
    ),
    # --- The power-on methods, with the real loop ---------------------------------------------------------------
    Plant(
        name="armed_in_dry_run",
        module="powerguard.daemon.wiring",
        swaps=(("        return ports.methods(armed)\n", "        return ports.methods(True)\n"),),
        level="loop",
        within=10,
        site=_REHEARSED,
    ),
    Plant(
        name="policy_set_in_dry_run",
        module="powerguard.daemon.wiring",
        swaps=(
            (
                '    options = settings.bmc if acts else settings.bmc.model_copy(update={"policy": "observe"})\n',
                "    options = settings.bmc\n",
            ),
        ),
        level="loop",
        within=10,
        site=_REHEARSED,
    ),
    Plant(
        name="policy_never_put_back",
        module="powerguard.core.comeback.methods",
        swaps=(("    if changed.order is None and turn.now_s >= changed.retry_at_s:\n", "    if False:\n"),),
        level="loop",
        within=10,
        site=_BRACKET,
    ),
    Plant(
        name="a_cut_noted_after_it_is_ordered",
        module="powerguard.effectors.ups_output.effector",
        swaps=(
            (
                f"{_NOTED}{_SENT}",
                f"{_SENT}{_NOTED}",
            ),
        ),
        level="loop",
        within=90,
        hint=52,
        site=_HIDDEN,
    ),
    Plant(
        name="a_cut_that_nobody_sees_counts_as_none",
        module="powerguard.effectors.ups_output.effector",
        swaps=(
            ("        if sent is not None and not output.shows and sent.left_s(came_s) > 0:\n", "        if False:\n"),
        ),
        level="loop",
        within=90,
        hint=41,
        site=_HIDDEN,
    ),
    Plant(
        name="a_stop_outside_an_outage_ends_training",
        module="powerguard.core.comeback.unseen",
        swaps=(("    if not isinstance(old.phase, Online):", "    if True:"),),
        level="loop",
        within=1100,
        hint=373,
    ),
    Plant(
        name="an_order_that_failed_armed_nothing",
        module="powerguard.core.comeback.methods",
        swaps=(
            (
                "            if isinstance(turn.state.phase, Shutdown) and action.method is not",
                "            if False and action.method is not",
            ),
            (
                "            elif outcome.harmless:\n",
                "            elif True:\n",
            ),
        ),
        level="loop",
        within=100,
        hint=52,
        site=_ANY_WAY,
    ),
    Plant(
        name="woken_before_the_output_is_cut",
        module="powerguard.core.comeback.methods",
        swaps=(("        PowerOnMethod.RTC: max(wake_in_s + RTC_AFTER_S", "        PowerOnMethod.RTC: max(off_in_s"),),
        level="loop",
        within=60,
        hint=22,
        site=_CUT_AND_WOKEN,
    ),
    Plant(
        name="somebody_elses_shutdown_arms_nothing",
        module="powerguard.core.decide.machine",
        swaps=(("    if event.host_stopping:\n        methods.foreign_stop(turn)\n", ""),),
        level="loop",
        within=30,
        hint=21,
        site=_STOPPED,
    ),
    Plant(
        name="a_shutdown_that_is_called_off_leaves_its_methods_armed",
        module="powerguard.core.comeback.methods",
        swaps=(("        if each.kept:\n", "        if False:\n"),),
        level="loop",
        within=30,
        hint=21,
        site=_CALLED_OFF,
    ),
    Plant(
        name="the_daemon_ends_before_its_reboot_is_ordered",
        module="powerguard.daemon.loop",
        swaps=(("RETURNS = (EnsurePolicy, ArmPowerOn, Reboot)", "RETURNS = (EnsurePolicy, ArmPowerOn)"),),
        level="loop",
        within=60,
        hint=22,
        site=_LATE,
    ),
    Plant(
        name="the_daemon_ends_before_a_method_is_armed",
        module="powerguard.daemon.loop",
        swaps=(("RETURNS = (EnsurePolicy, ArmPowerOn, Reboot)", "RETURNS = (Reboot,)"),),
        level="loop",
        within=30,
        hint=21,
        site=_STOPPED,
    ),
    # --- Slurm, and a job on several hosts ----------------------------------------------------------------------------
    Plant(
        name="the_power_off_waits_for_slurm",
        module="powerguard.core.decide.transitions",
        swaps=(
            (
                "not phase.force_at_s and (not phase.waiting or turn.now_s >= phase.prepare_by_s)",
                "not phase.force_at_s and (turn.state.node is None or turn.state.node.left)",
            ),
        ),
        level="job",
        site=_SLURM_HANGS,
    ),
    Plant(
        name="a_drain_of_a_person_is_ours",
        module="powerguard.effectors.slurm.helper",
        swaps=(
            (
                '    node, did = _node(request), "drained"\n    if node.is_foreign:',
                '    node, did = _node(request), "drained"\n    if False:',
            ),
        ),
        level="job",
        hint=43,
        site=_PERSONS,
    ),
    Plant(
        name="a_node_is_set_down_whoever_drained_it",
        module="powerguard.effectors.slurm.helper",
        swaps=(
            (
                '        if not node.is_foreign:\n            node, did = _set_state(request, "DOWN")',
                '        if True:\n            node, did = _set_state(request, "DOWN")',
            ),
        ),
        level="job",
        site=_PERSONS,
    ),
    Plant(
        name="a_node_is_given_back_whoever_drained_it",
        module="powerguard.effectors.slurm.helper",
        swaps=(
            (
                "    if node.is_ours(request.outage) or (request.rebooted and node.reason == REBOOTED):\n",
                "    if node.is_out:\n",
            ),
        ),
        level="job",
        site=_PERSONS,
    ),
    Plant(
        name="a_mark_with_a_persons_words_is_ours",
        module="powerguard.effectors.slurm.helper",
        swaps=(("        found = _OURS.fullmatch(self.reason)", "        found = _OURS.match(self.reason)"),),
        level="job",
        within=120,
        site=_PERSONS,
    ),
    Plant(
        name="every_host_requeues_the_job",
        module="powerguard.effectors.slurm.helper",
        swaps=(
            (
                "        jobs = [job.id for job in _jobs(early) if job.leads]",
                "        jobs = [job.id for job in _jobs(early)]",
            ),
        ),
        level="job",
        site=_LASTS,
    ),
    Plant(
        name="the_mark_is_forgotten_at_a_boot",
        module="powerguard.core.scheduler",
        swaps=(("    return known or unknown(policy, now_s)\n", "    return ()\n"),),
        level="job",
        site=_LASTS,
    ),
    Plant(
        name="a_return_that_failed_is_not_repeated",
        module="powerguard.core.scheduler",
        swaps=(
            ("        _again(turn, node, outcome.reason)\n        return", "        turn.settle(node)\n        return"),
        ),
        level="job",
        within=120,
        site=_SLURM_HANGS,
    ),
    Plant(
        name="the_node_is_given_back_on_battery",
        module="powerguard.core.scheduler",
        swaps=(
            ("isinstance(phase, OnBattery | Emergency) or (", "isinstance(phase, OnBattery) or ("),
            (
                "turn.state.feed\n    if feed.awaits_witness",
                "turn.state.feed\n    return True\n    if feed.awaits_witness",
            ),
        ),
        level="job",
        site=_LASTS,
    ),
    Plant(
        name="no_word_of_leaving",
        module="powerguard.core.decide.transitions",
        swaps=(("        *lifecycle.leave_jobs(turn, outage.id, limit_s=prepare_s),\n", ""),),
        level="job",
        site=_LEFT_ALONE,
    ),
    Plant(
        name="one_host_lets_all_go_on",
        module="powerguard.trainer.ranks.machine",
        swaps=(
            (
                "    holds = tuple(hold for hold in state.holds if host is not None and hold[0] != host)",
                "    holds: tuple[tuple[int, After], ...] = ()",
            ),
        ),
        level="job",
        within=200,
        hint=58,
        site=_APART,
    ),
    Plant(
        name="ranks_go_on_after_a_departure",
        module="powerguard.trainer.ranks.machine",
        swaps=(("    if state.departed and known.after is After.EXIT:", "    if False:"),),
        level="job",
        site=_LEFT_ALONE,
    ),
)
"""All of them."""
