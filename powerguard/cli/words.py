"""Words for operators: the name of each action, phase and power-on method, and one sentence for each note. Stdlib only.

`explain`, `report` and `replay` use it. The numbers come from the note itself and are not computed again.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from powerguard.cli.render import OUTCOMES, duration, is_endless
from powerguard.core.model.actions import KINDS

Numbers = Mapping[str, Any]
_Sentence = Callable[[str, Numbers], str]

NEED_SHARE: Final = 0.75
"""Share of the runtime with training paused that the needs may take before training is paused."""
WITNESSES: Final = {
    "second_reading": "a second reading confirms it",
    "second_source": "a second source confirms it",
    "on_battery_s": "the UPS counts its seconds on battery",
    "input_present": "the UPS has no input voltage",
    "alarms": "an alarm of the UPS confirms it",
    "charge_pct": "its charge falls",
    "network": "it fell silent with this host's own network",
    "battery": "it continues",
}
PHASES: Final = {
    "online": "online",
    "on_battery": "on battery",
    "emergency_checkpoint": "emergency checkpoint",
    "holding": "hold",
    "shutdown": "power-off",
    "recovery": "return",
}
ORDERS: Final = {kind.__name__: kind.does for kind in KINDS}
METHODS: Final = {
    "output": "the UPS's output, off and on again",
    "rtc": "the alarm of the host's clock",
    "sentinel": "the sentinel",
    "watchdog": "the BMC's watchdog",
}


_DURATIONS: Final = {
    "trained_on_s": "on battery until a checkpoint was due",
    "checkpoint_s": "until every checkpoint was durable",
    "held_s": "held",
    "on_battery_s": "on battery in all",
    "away_s": "host off",
    "recovery_s": "from the daemon's start to training",
    "lasted_s": "the whole outage",
}


def durations_in(mode: str | None) -> dict[str, str]:
    """Return the names of the parts of an outage; in dry-run there was no checkpoint and no hold."""
    if mode != "dry-run":
        return dict(_DURATIONS)
    return {name: text for name, text in _DURATIONS.items() if name != "checkpoint_s"} | {"held_s": "would be held"}


def outcome_of(name: str, mode: str | None = None) -> str:
    """Return how an outage ended. mode: of the settings of that time; in dry-run no training was held."""
    if mode == "dry-run" and name == "resumed_in_place":
        return "dry-run: training would have been held and resumed in place; it never stopped"
    return OUTCOMES.get(name, name)


def sentence(event: str, because: str, numbers: Numbers, mode: str | None = None) -> str:
    """Return the sentence of a note. An event without a sentence is shown by its name, with its reason.

    mode: of the settings of that time; recorded actions are not shown as done.
    """
    made = _recorded(event, mode) or _SENTENCES.get(event)
    if made is not None:
        return made(because, numbers)
    name, _, what = event.rpartition("_")
    if what == "raised":
        return f"alarm, {name.replace('_', ' ')}: {because}"
    if what == "cleared":
        return f"that alarm is over: {name.replace('_', ' ')}"
    return f"{event.replace('_', ' ')}: {because}"


def has_words(event: str) -> bool:
    """Say whether a note has a sentence of its own."""
    return event in _SENTENCES or event.endswith(("_raised", "_cleared"))


def _recorded(event: str, mode: str | None) -> _Sentence | None:
    """Return the sentence for an action that was not done in this mode; None if it was."""
    if mode not in {"dry-run", "rehearse"}:
        return None
    if mode == "dry-run" and event in _NOT_ASKED:
        return _NOT_ASKED[event]
    made = _SENTENCES.get(event)
    if event in _NOT_POWERED_OFF or made is None:
        return _NOT_POWERED_OFF.get(event)
    acts = _ACTS if mode == "dry-run" else _ACTS_ON_POWER
    return (lambda because, numbers: f"{mode}, only recorded: {made(because, numbers)}") if event in acts else None


def short_since_s(
    moments: Iterable[tuple[float, float | None, float | None]], commit_s: float, dwell_s: float
) -> float | None:
    """Return since when the stop no longer fitted, if only the dwell held the commit back.

    moments: of each decision before the commit when it was, what the battery lasted, and what the stop needed.
    dwell_s: seconds on battery before which there is no commit, if the wait costs no more than the reserve.
    """
    if commit_s > dwell_s + _ONE_MORE_POLL_S:
        return None
    short = (at_s for at_s, left_s, stop_s in moments if left_s is not None and stop_s is not None and left_s <= stop_s)
    since_s = next(short, None)
    return since_s if since_s is not None and commit_s - since_s >= 1.0 else None


_ONE_MORE_POLL_S: Final = 3.0


def order(kind: str, whom: str = "") -> str:
    """Return the name of an order."""
    return ORDERS.get(kind, kind) + (f" ({whom})" if whom else "")


def ordered(kind: str, whom: str = "", mode: str | None = None) -> str:
    """Return the sentence of an order without a note of its own. mode: as in `sentence`."""
    return f"{'dry-run, only recorded' if mode == 'dry-run' else 'order'}: {order(kind, whom)}"


def mark(kind: str, what: str, whom: str = "") -> str:
    """Return the name of a mark of a replay: a phase that begins, or an order."""
    return f"phase: {PHASES.get(what, what)}" if kind == "phase" else f"order: {order(what, whom)}"


# --- Phases -----------------------------------------------------------------------------------------------------------


def _seconds(numbers: Numbers, name: str) -> float | None:
    value = numbers.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _for(numbers: Numbers, name: str) -> str:
    return duration(_seconds(numbers, name))


def _method(numbers: Numbers) -> str:
    method = str(numbers.get("method"))
    return METHODS.get(method, method)


def _phase_changed(because: str, numbers: Numbers) -> str:
    new, old = numbers.get("new"), numbers.get("old")
    match new:
        case "on_battery" if old == "online":
            left = _left(numbers) + _own_load(numbers)
            return f"the UPS runs on battery: {WITNESSES.get(because, because)}. {left}"
        case "on_battery":
            return f"the shutdown was aborted ({because}): training continues on battery"
        case "emergency_checkpoint":
            why = _why_checkpoint(because, numbers) + _own_load(numbers)
            return f"a checkpoint was due, because {why}"
        case "holding":
            return (
                f"{because}. The host waits for utility; at the expected load the battery lasts "
                f"{_for(numbers, 'reff_paused_s')} more, of which the stop needs {_for(numbers, 'stop_s')}"
                f"{_own_load(numbers)}{_at_risk(numbers)}"
            )
        case "shutdown":
            return f"the commit point: the host is powered off, because {_why_commit(because, numbers)}"
        case "online":
            return _why_online(because, numbers)
        case "recovery":
            return "training is started once utility is stable and the battery can carry a second outage"
        case _:
            return f"{PHASES.get(str(new), str(new))}: {because}"


def _room(numbers: Numbers) -> str:
    shed_s = _seconds(numbers, "shed_s")
    return f" + {duration(shed_s)} for higher tiers" if shed_s else ""


def _own_load(numbers: Numbers) -> str:
    """Say what this host draws of a shared UPS's load, and by what; nothing where the UPS is not shared."""
    own_w, load, shed_s = (_seconds(numbers, name) for name in ("own_w", "load", "shed_s"))
    if own_w is None or load is None:
        return ""
    room = f"; it makes room for higher tiers {duration(shed_s)} earlier" if shed_s else ""
    shared = f". The UPS is shared: its load is {100 * load:.0f} %, of which this host draws {own_w:.0f} W"
    return f"{shared} (by {numbers.get('own_from')}){room}"


def _at_risk(numbers: Numbers) -> str:
    """Name the trainers that do not pause. trains_on: of the story before the note, where it is known."""
    names = numbers.get("trains_on")
    return f". {names}: continues, and its work after the checkpoint is lost if the host goes off" if names else ""


def _left(numbers: Numbers) -> str:
    reff_s = _seconds(numbers, "reff_now_s")
    if reff_s is None:
        return "The runtime is unknown"
    paused = "as long as utility" if is_endless(_seconds(numbers, "reff_paused_s")) else _for(numbers, "reff_paused_s")
    need_s = (_seconds(numbers, "checkpoint_s") or 0.0) + (_seconds(numbers, "stop_s") or 0.0)
    return (
        f"It lasts {duration(reff_s)} more at this load and {paused} with training paused (after the margin); "
        f"checkpoint and stop need {duration(need_s)}"
    )


def _why_checkpoint(because: str, numbers: Numbers) -> str:
    match because:
        case "budget":
            paused_s = _seconds(numbers, "reff_paused_s")
            needs = f"checkpoint {_for(numbers, 'checkpoint_s')} + stop {_for(numbers, 'stop_s')}{_room(numbers)}"
            quarters = duration(None if paused_s is None else NEED_SHARE * paused_s)
            return (
                f"three quarters of the runtime with training paused ({duration(paused_s)}, so {quarters}) had fallen "
                f"to the needs ({needs})"
            )
        case "runtime_short":
            return f"at this load the battery would have lasted only {_for(numbers, 'reff_now_s')} more"
        case "low_battery":
            return "the UPS reports a low battery"
        case "blind":
            return "the runtime is unknown: neither the UPS nor the settings have it"
        case "power_off_at" | "countdown":
            return f"the UPS is going to cut its output{_cut(numbers)}"
        case "fsd":
            return f"a forced shutdown (FSD) was ordered at the UPS{_cut(numbers)}"
        case _:
            return because


def _cut(numbers: Numbers) -> str:
    cut_s = _seconds(numbers, "cut_in_s")
    return "" if cut_s is None else f" in {duration(cut_s)}, so all actions must end before that"


def _why_commit(because: str, numbers: Numbers) -> str:
    reff_s, stop_s = _seconds(numbers, "reff_s"), _seconds(numbers, "stop_s")
    stop = f"a {numbers.get('grade')} stop takes {duration(stop_s)}"
    match because:
        case "budget":
            now_s = _seconds(numbers, "reff_now_s")
            is_falling = now_s is not None and reff_s is not None and now_s < reff_s - 1.0
            load = "the expected" if is_falling else "this"
            return f"at {load} load the battery lasts only {duration(reff_s)} more, and {stop}{_room(numbers)}"
        case "power_off_at":
            return f"the UPS is going to cut its output{_cut(numbers)}, and {stop}"
        case "power_off_at permits no hold":
            return "the UPS has announced a cut of its output, so there is no time to wait for utility"
        case "blind: low_battery":
            return "the runtime is unknown, and the UPS reports a low battery"
        case "blind: charge_pct":
            return "the runtime is unknown, and its charge is 40 % or less"
        case "blind: blind_s":
            return "the runtime is unknown, and the time that the settings allow (blind_s) is over"
        case _:
            return because


def _why_online(because: str, numbers: Numbers) -> str:
    match numbers.get("cause"):
        case "utility stable":
            return f"{because}: the outage is over, and the host was not powered off"
        case "utility back" | "training resumed":
            return f"the outage is over: {because}"
        case _:
            return f"the outage is over ({because})"


# --- All the others ---------------------------------------------------------------------------------------------------


def _outage_began(because: str, numbers: Numbers) -> str:
    figures = [
        f"charge {numbers['charge_pct']:.0f} %" if _seconds(numbers, "charge_pct") is not None else "",
        f"load {numbers['load_pct']:.0f} %" if _seconds(numbers, "load_pct") is not None else "",
        f"reported runtime {_for(numbers, 'runtime_s')}" if _seconds(numbers, "runtime_s") is not None else "",
    ]
    shown = ", ".join(each for each in figures if each) or "no figures"
    why = {
        "countdown": "the UPS counts down to cut its output",
        "fsd": "a forced shutdown (FSD) was ordered at the UPS",
        "network": "the UPS fell silent with this host's own network, so battery is presumed",
    }.get(because, f"two witnesses report battery ({WITNESSES.get(because, because)})")
    return f"an outage began: {why}; the UPS reports {shown}"


def _outage_ended(_: str, numbers: Numbers) -> str:
    outcome = str(numbers.get("outcome", ""))
    return f"the outage ended after {_for(numbers, 'lasted_s')}: {OUTCOMES.get(outcome, outcome)}"


def _checkpoint_ordered(because: str, numbers: Numbers) -> str:
    after = {"pause": ", then to stay paused", "exit": ", then to exit", "continue": ", while it continues"}
    why = {"on_battery": "", "operator": " (an operator asked)"}.get(because, f" ({because.replace('_', ' ')})")
    then = after.get(str(numbers.get("after")), "")
    return f"{numbers.get('trainer')} was asked for a checkpoint{then}{why}; it has {_for(numbers, 'limit_s')} for it"


def _checkpoint_durable(because: str, numbers: Numbers) -> str:
    step = "" if numbers.get("step") is None else f" of step {numbers['step']}"
    took = "" if _seconds(numbers, "took_s") is None else f" after {_for(numbers, 'took_s')}"
    if numbers.get("confirmed") is False:
        return f"{numbers.get('trainer')} has started a checkpoint{took}; its end is not confirmed"
    return f"the checkpoint{step} of {numbers.get('trainer')} is durable{took} ({because})"


def _power_off_ordered(because: str, numbers: Numbers) -> str:
    forced = _for(numbers, "force_after_s")
    return f"the power-off was ordered ({because}): orderly, and by force after {forced}"


def _source_lost(because: str, numbers: Numbers) -> str:
    return f"the UPS no longer answers ({because}); from now on: {numbers.get('conduct')}"


def _drill_began(because: str, numbers: Numbers) -> str:
    scopes = str(numbers.get("scopes") or "").replace(",", ", ") or "with the plug"
    return f"{because} started a drill: {scopes} (witness: {str(numbers.get('witness')).replace('_', ' ')})"


def _maintenance_set(because: str, numbers: Numbers) -> str:
    return f"{numbers.get('who')} set maintenance ({because}): alarms and checkpoints continue, without a power-off"


def _grade_lowered(because: str, numbers: Numbers) -> str:
    return f"only a {numbers.get('new')} stop is planned now instead of a {numbers.get('old')} one: {because}"


def _grade_raised(because: str, numbers: Numbers) -> str:
    return f"a {numbers.get('new')} stop is planned again instead of a {numbers.get('old')} one: {because}"


def _host_returned(because: str, numbers: Numbers) -> str:
    if numbers.get("away_s") is None:
        return f"the host is back ({because}); how long it was off is not known"
    return f"the host is back after {_for(numbers, 'away_s')} ({because})"


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _jobs(numbers: Numbers) -> str:
    jobs = [each for each in str(numbers.get("jobs") or "").split(",") if each]
    if not jobs:
        return "no job"
    return f"{'job' if len(jobs) == 1 else f'{len(jobs)} jobs'} {', '.join(jobs[:8])}{' ...' if len(jobs) > 8 else ''}"


def _refused(numbers: Numbers) -> str:
    refused = _seconds(numbers, "refused")
    return f"; Slurm refused {refused:.0f}: {numbers.get('because')}" if refused else ""


def _node(numbers: Numbers) -> str:
    state = numbers.get("state")
    return f"node {numbers.get('node')}{f' ({state})' if state else ''}"


def _node_left(_because: str, numbers: Numbers) -> str:
    left = "is down" if numbers.get("did") == "down" else "was left as it is"
    return f"{_jobs(numbers)} requeued, {_node(numbers)} {left}{_refused(numbers)}"


def _node_kept(because: str, numbers: Numbers) -> str:
    if "reason" not in numbers:
        return because
    return f"{_node(numbers)} was left as it is: others have marked it: {numbers.get('reason') or 'no reason is given'}"


def _node_returned(_because: str, numbers: Numbers) -> str:
    return f"{_node(numbers)} is given back, {_jobs(numbers)} may start at once{_refused(numbers)}"


def _powered_on(because: str, numbers: Numbers) -> str:
    cause = str(numbers.get("cause") or "")
    lost = {True: "AC had been gone", False: "its bit for a loss of AC is clear", None: ""}[
        _flag(numbers.get("ac_failed"))
    ]
    firmware = f"firmware took {_for(numbers, 'firmware_s')}" if numbers.get("firmware_s") is not None else ""
    details = "; ".join(filter(None, (lost, firmware)))
    what = f"powered on by {cause.replace('-', ' ')}" if cause else "the cause of the power-on is unknown"
    if numbers.get("late_reboot") is True:
        what = "a late reboot, ordered by powerguard"
    return f"{what} ({because}{'; ' if details else ''}{details})"


def _continued(because: str, numbers: Numbers) -> str:
    phase = PHASES.get(str(numbers.get("phase")), str(numbers.get("phase")))
    return f"{because} after {_for(numbers, 'away_s')} away; the outage continues in phase {phase}"


def _foreign_stop(because: str, _: Numbers) -> str:
    if because.startswith("another program"):
        return f"{because}: the power-on methods are armed while there is time"
    return f"{because}: until it runs again, it neither saves training nor powers the host off"


def _withdrawn(because: str, numbers: Numbers) -> str:
    left = f"the battery lasts {_for(numbers, 'reff_s')}, the stop needs {_for(numbers, 'stop_s')}"
    return f"the power-off was near and was withdrawn: {because} ({left})"


def _older(because: str, numbers: Numbers) -> str:
    lost = numbers.get("steps_lost")
    steps = "" if lost is None else f"; {lost} steps would be lost"
    return f"an older checkpoint counts, because {because}{steps}"


def _policy(because: str, numbers: Numbers) -> str:
    if numbers.get("verified") is True:
        return f"the BMC will power the host on when AC returns ({because}: {numbers.get('policy', 'set')})"
    return f"the BMC does not confirm that it will power the host on when AC returns ({because})"


def because_of(text: str) -> str:
    """Return why a drill was refused or ended, in words instead of field names."""
    head, colon, witness = text.rpartition(": ")
    if head == "a real outage" and witness in WITNESSES:
        return f"{head}{colon}{WITNESSES[witness]}"
    return text


def _who(text: str) -> _Sentence:
    """Make a sentence that names the operator and the reason."""

    def make(because: str, numbers: Numbers) -> str:
        who = numbers.get("who")
        by = f" by {who}" if who and str(who) not in because else ""
        return f"{text}{by} ({because})"

    return make


def _plain(text: str) -> _Sentence:
    """Make a sentence that ends with its reason."""
    return lambda because, _: f"{text} ({because})"


def _of(text: str) -> _Sentence:
    """Make a sentence that begins with the trainer's name."""
    return lambda because, numbers: f"{numbers.get('trainer')} {text} ({because})"


_GATE: Final[dict[str, str]] = {
    "budget": "the charge would survive a second outage",
    "charge_pct": "the battery is charged enough",
    "bare stop fits": "a second outage would leave time for the checkpoint and a bare stop",
    "charge not reported": "the UPS does not report its charge, and no other condition is against it",
}
_SIGNALS: Final = {"stop": "to be stopped by SIGSTOP", "terminate": "to be ended by SIGTERM"}
_SENTENCES: Final[dict[str, _Sentence]] = {
    "action_failed": lambda b, n: f"an order failed ({order(str(n.get('action')))}): {b}",
    "battery_low": lambda _, n: f"the UPS reports a low battery, twice; its runtime is {_for(n, 'runtime_s')}",
    "battery_presumed": lambda b, _: f"battery is presumed: {b}",
    "battery_replaced": _who("a new battery was installed"),
    "checkpoint_deferred": _of("must wait with its checkpoint"),
    "checkpoint_durable": _checkpoint_durable,
    "checkpoint_ordered": _checkpoint_ordered,
    "checkpoint_requested": _who("a checkpoint was asked for"),
    "commit_withdrawn": _withdrawn,
    "drill_began": _drill_began,
    "drill_ended": lambda b, n: f"the drill ended, {n.get('result')}, after {_for(n, 'lasted_s')} ({because_of(b)})",
    "drill_left_behind": lambda b, n: f"the drill could not put back {n.get('what')} ({b})",
    "drill_refused": _who("a drill was refused"),
    "drill_stage": lambda b, _: f"drill: the stage {b.replace('_', ' ')} begins",
    "drill_undoing": _plain("drill: everything is put back"),
    "foreign_stop_seen": _foreign_stop,
    "gate_forced": lambda b, _: f"training may continue although it is not safe yet: {b}",
    "gate_overruled": _who("the gate was overruled"),
    "gate_opened": lambda b, _: f"training may start: {_GATE.get(b, b)}",
    "gpu_cap_ordered": lambda b, n: f"GPU power was ordered down to {100 * (_seconds(n, 'share') or 0):.0f} % ({b})",
    "gpu_power_capped": _plain("GPU power is lowered"),
    "gpu_power_restored": _plain("GPU power is as it was before"),
    "grade_lowered": _grade_lowered,
    "grade_raised": _grade_raised,
    "node_drained": lambda _, n: f"the scheduler starts no further job on {_node(n)}",
    "node_kept": _node_kept,
    "node_left": _node_left,
    "node_returned": _node_returned,
    "guard_ended": lambda b, _: f"no more extra checkpoints: {b}",
    "guard_started": lambda b, _: f"training continues, with a checkpoint whenever it costs little: {b}",
    "host_checked": lambda b, _: f"the host is complete: {b}",
    "host_powered_on": _powered_on,
    "host_returned": _host_returned,
    "host_went_down": _plain("the host went down"),
    "maintenance_ended": _who("maintenance ended"),
    "maintenance_set": _maintenance_set,
    "network_back": _plain("this host's own network is back"),
    "network_lost": _plain("this host's own network failed"),
    "older_checkpoint_stands": _older,
    "outage_began": _outage_began,
    "outage_continued": _continued,
    "outage_ended": _outage_ended,
    "phase_changed": _phase_changed,
    "policy_verified": _policy,
    "power_off_accepted": _plain("the power-off is under way"),
    "power_off_cancelled": lambda b, _: f"the UPS does not cut its output after all: {b}",
    "power_off_hastened": lambda b, n: f"the host is now powered off by force in {_for(n, 'force_after_s')}: {b}",
    "power_off_ordered": _power_off_ordered,
    "power_off_rehearsed": _plain("drill: here the host would have been powered off"),
    "power_off_repeated": lambda b, n: f"the power-off was ordered again, with {_for(n, 'force_after_s')} left: {b}",
    "precaution_ordered": _of("was asked for a precautionary checkpoint while training continues"),
    "policy_restored": lambda b, n: f"the BMC's policy was put back to {n.get('policy', 'what it was')} ({b})",
    "reboot_left": lambda b, _: f"the host powers off and does not reboot: {b}",
    "reboot_ordered": lambda b, _: f"the power-off will end in a reboot: {b}",
    "resume_unconfirmed": lambda b, _: b,
    "return_put_off": lambda b, n: f"{b}: it will stay off for {_for(n, 'back_off_s')}",
    "resume_failed": lambda b, n: f"{b} in {n.get('tries')} tries: start it by hand",
    "utility_failed_again": lambda b, _: f"utility failed again after the return: {b}",
    "abort_ended": lambda b, _: f"the aborted shutdown may come again: {b}",
    "shutdown_aborted": _who("the shutdown was aborted"),
    "source_lost": _source_lost,
    "source_recovered": lambda b, n: f"{b} again after {_for(n, 'lost_s')}",
    "trainer_appeared": _of("was seen for the first time"),
    "trainer_continued": _of("continues: its processes got SIGCONT"),
    "trainer_gone": _of("is gone"),
    "pause_forgotten": _of("is resumed"),
    "trainer_left_paused": _of("stays paused, as before the outage"),
    "training_held": lambda b, n: (
        f"training of {n.get('trainer')} stands, held by {n.get('hosts')} ({b}): the GPUs here are idle"
    ),
    "training_released": lambda b, n: f"training of {n.get('trainer')} goes on: {b}",
    "job_ended": lambda b, n: f"training of {n.get('trainer')} ends on all its hosts: {b}",
    "job_left": lambda b, n: f"this host has left the job of {n.get('trainer')}: {b}",
    "job_restarted": lambda _, n: f"training of {n.get('trainer')} runs again, after {_for(n, 'waited_s')}",
    "trainer_signalled": lambda b, n: f"processes of {n.get('trainer')} are {_SIGNALS.get(str(n.get('word')))} ({b})",
    "trainer_stopped": _of("is stopped: its processes got SIGSTOP"),
    "trainer_terminated": _of("was ended: its processes got SIGTERM"),
    "power_on_armed": lambda _, n: f"armed, so that the host comes back: {_method(n)}, in {_for(n, 'in_s')}",
    "power_on_blocked": lambda b, n: f"not armed: {_method(n)}: {b}",
    "power_on_disarmed": lambda _, n: f"disarmed: {_method(n)}",
    "power_on_found_disarmed": lambda b, n: f"was no longer armed when it was to be disarmed: {_method(n)} ({b})",
    "power_on_given_up": lambda b, _: f"given up: {b}",
    "power_on_unknown": lambda b, _: b,
}


# --- What was only recorded -------------------------------------------------------------------------------------------


def _phase_recorded(because: str, numbers: Numbers) -> str:
    if numbers.get("new") == "shutdown":
        return f"the commit point: the host would be powered off, because {_why_commit(because, numbers)}"
    return _phase_changed(because, numbers)


def _phase_not_asked(because: str, numbers: Numbers) -> str:
    if numbers.get("new") != "holding":
        return _phase_recorded(because, numbers)
    return (
        "no trainer was asked, so training continues. The host would wait for utility; at the expected load the "
        f"battery lasts {_for(numbers, 'reff_paused_s')} more, of which the stop needs {_for(numbers, 'stop_s')}"
    )


def _checkpoint_not_asked(because: str, numbers: Numbers) -> str:
    text = _checkpoint_ordered(because, numbers).replace(" was asked for ", " would be asked for ", 1)
    return text.replace("; it has ", "; it would have ", 1)


def _outage_recorded(_: str, numbers: Numbers) -> str:
    return (
        f"the outage ended after {_for(numbers, 'lasted_s')}: {outcome_of(str(numbers.get('outcome', '')), 'dry-run')}"
    )


_NOT_POWERED_OFF: Final[dict[str, _Sentence]] = {
    "phase_changed": _phase_recorded,
    "power_off_ordered": lambda b, n: _power_off_ordered(b, n).replace(" was ordered ", " would be ordered ", 1),
    "power_off_accepted": lambda *_: "the power-off is recorded, but not done",
    "power_off_hastened": lambda b, n: f"the host would be powered off by force in {_for(n, 'force_after_s')}: {b}",
}
_NOT_ASKED: Final[dict[str, _Sentence]] = {
    "phase_changed": _phase_not_asked,
    "outage_ended": _outage_recorded,
    "checkpoint_ordered": _checkpoint_not_asked,
    "checkpoint_durable": lambda _, n: f"no checkpoint of {n.get('trainer')}: it was not asked for one",
    "precaution_ordered": _of("would be asked for a precautionary checkpoint while training continues"),
}
_ACTS_ON_POWER: Final = frozenset({"power_on_armed", "power_on_disarmed", "reboot_ordered"})
_ACTS: Final = _ACTS_ON_POWER | {
    "gpu_cap_ordered",
    "gpu_power_capped",
    "gpu_power_restored",
    "node_drained",
    "job_left",
    "node_left",
    "node_returned",
    "policy_restored",
    "trainer_continued",
    "trainer_signalled",
    "trainer_stopped",
    "trainer_terminated",
}
"""Events that are only recorded: in dry-run all of them, in rehearse those that would cut the host's power."""
