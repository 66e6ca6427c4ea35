"""What a drill measures: the load before and after, once it has settled, and the speed of training."""

from collections.abc import Callable
from dataclasses import replace

from powerguard.core.decide.turn import Turn
from powerguard.core.drill import checks
from powerguard.core.energy import needs, own
from powerguard.core.model.actions import Action, EnsurePolicy, Scalar
from powerguard.core.model.events import Reading, TrainerSeen
from powerguard.core.model.policy import Drop, Policy
from powerguard.core.model.state import Activity, Drill, DrillOrder, DrillStage, State, Trainer
from powerguard.core.supply import feeds
from powerguard.core.trainers import escalation


def change(turn: Turn, **changes: object) -> None:
    """Change fields of the drill that runs."""
    if turn.state.drill is not None:
        turn.update(drill=replace(turn.state.drill, **changes))  # type: ignore[arg-type]


def change_stage(turn: Turn, **changes: object) -> None:
    """Change fields of the stage that is carried out."""
    drill = turn.state.drill
    if drill is not None and isinstance(drill.part, DrillStage):
        change(turn, part=replace(drill.part, **changes))  # type: ignore[arg-type]


def figure(turn: Turn, **figures: Scalar) -> None:
    """Enter figures; what is not known is left out."""
    drill = turn.state.drill
    if drill is not None:
        known = dict(drill.figures) | {name: value for name, value in figures.items() if value is not None}
        change(turn, figures=tuple(known.items()))


def is_recorded(drill: Drill) -> bool:
    """Say whether this drill only records: in dry-run no trainer is asked."""
    return dict(drill.figures).get("dry_run") is True


def mark(turn: Turn, name: str, changed: Callable[[Trainer], Trainer]) -> None:
    """Change what is known of one trainer."""
    turn.update(trainers=tuple(changed(t) if t.name == name else t for t in turn.state.trainers))


def order(turn: Turn, kind: type[Action], what: str, *, limit_s: float, trainer: str = "", **fields: object) -> str:
    """Give an order for the drill and wait for its outcome. what: as in `DrillOrder`."""
    drill = turn.state.drill
    if trainer:
        fields["trainer"] = trainer
    # If always-on is set for an outage only, a drill must not set it: it would never be put back.
    outage = "" if drill is None or kind is EnsurePolicy else drill.id
    id_ = turn.order(kind, limit_s=limit_s, outage=outage, **fields)
    if drill is not None:
        waits = DrillOrder(id=id_, what=what, by_s=turn.now_s + limit_s, trainer=trainer)
        change(turn, waiting=(*drill.waiting, waits))
    return id_


def rounded(value: float | None) -> float | None:
    """Four decimals: enough for a share, and for seconds."""
    return None if value is None else round(value, 4)


SETTLE_S = 10.0
"""Length of readings whose two halves must agree for a settled load."""
AGREE = 0.015
"""As a share of the rating; a change of one whole percent is not a step."""
_KEPT_S = 16.0
_MOST_SAMPLES = 64
_LEAST_SAMPLES = 4
_LEAST_STEPS = 5


def watch_reading(policy: Policy, state: State, stage: DrillStage, reading: Reading) -> DrillStage:
    """Keep the load of one reading: of this host alone where the UPS is shared and something measures it."""
    load, of = feeds.reported_load(policy, state, reading), "ups"
    host_load = own.own_load(policy, state, reading.at_s)
    if host_load is not None and host_load.measured:
        load, of = host_load.load, host_load.source.value
    if load is None:
        return stage
    kept = tuple(pair for pair in stage.samples if reading.at_s - pair[0] <= _KEPT_S and stage.of in ("", of))
    return replace(stage, samples=(*kept, (reading.at_s, load))[-_MOST_SAMPLES:], of=of)


def watch_trainer(stage: DrillStage, seen: TrainerSeen) -> DrillStage:
    """Keep the step that a trainer reports, for its speed."""
    known = next((entry for entry in stage.seen if entry[0] == seen.trainer), None)
    others = tuple(entry for entry in stage.seen if entry[0] != seen.trainer)
    if not seen.alive or seen.step is None:
        return replace(stage, seen=others)
    if known is None or seen.step < known[3]:
        entry = (seen.trainer, seen.step, seen.at_s, seen.step, seen.at_s)
    else:
        entry = (*known[:3], seen.step, seen.at_s)
    return replace(stage, seen=(*others, entry)[-_MOST_SAMPLES:])


def stage_load(stage: DrillStage, now_s: float, *, late: bool) -> tuple[float | None, bool]:
    """Return the load (share of the rating) in this stage, and whether it has settled.

    None while it has not; `late`: the time for it is over, and what there is counts.
    """
    window = [pair for pair in stage.samples if now_s - pair[0] <= SETTLE_S + 1.0]
    if not window:
        return None, False
    mean = sum(load for _, load in window) / len(window)
    whole = window[-1][0] - window[0][0] >= SETTLE_S - 1e-6 and len(window) >= _LEAST_SAMPLES
    half = len(window) // 2
    early = sum(load for _, load in window[:half]) / max(1, half)
    recent = sum(load for _, load in window[half:]) / (len(window) - half)
    if whole and abs(early - recent) <= AGREE:
        return mean, True
    return (mean if late else None), False


def speed_of(stage: DrillStage, name: str) -> float | None:
    """Return steps per second of a trainer in this stage; None while it has reported too few."""
    entry = next((entry for entry in stage.seen if entry[0] == name), None)
    if entry is None:
        return None
    steps, lasted_s = entry[3] - entry[1], entry[4] - entry[2]
    return steps / lasted_s if steps >= _LEAST_STEPS and lasted_s >= SETTLE_S - 1.0 else None


def _speeds_known(turn: Turn, stage: DrillStage) -> bool:
    """Say whether every living trainer that reports steps has reported enough of them."""
    return all(speed_of(stage, t.name) is not None for t in turn.state.trainers if t.alive and t.step is not None)


def look_at_baseline(turn: Turn, stage: DrillStage) -> str | None:
    """Wait until load and speed before anything is done are known, and note what is expected. "": it is over."""
    late = turn.now_s >= stage.by_s
    load, _ = stage_load(stage, turn.now_s, late=late)
    if not late and (load is None or ("cap" in stage.coming and not _speeds_known(turn, stage))):
        return None
    now = turn.budget()
    speeds = tuple((name, speed) for name, *_ in stage.seen if (speed := speed_of(stage, name)) is not None)
    change(turn, load=load, speeds=speeds)
    figure(turn, load_before=rounded(load))
    if turn.policy.shared is not None:
        figure(turn, load_of=stage.of)
        turn.update(learned=replace(turn.state.learned, rest_w=_rest_w(turn)))
    if "pause" in stage.coming:
        others = 0.0 if load is None or stage.of in ("", "ups") else now.load_now - load
        figure(turn, load_paused_expected=rounded(now.load_paused - others))
        figure(turn, runtime_paused_expected_s=rounded(now.reff_paused_s))
    return ""


def look_at_load(turn: Turn, drill: Drill, stage: DrillStage) -> str | None:
    """Paused or capped: wait until the load has settled, and learn by how much it fell.

    "": it is over; another text: a trainer has not paused, so nothing can be measured.
    """
    if is_recorded(drill):
        return ""
    late = turn.now_s >= stage.by_s
    if stage.name == "pause" and (because := _unpaused_because(turn, drill)):
        return because if late else None
    load, settled = stage_load(stage, turn.now_s, late=late)
    if stage.of != dict(drill.figures).get("load_of", stage.of):
        load, settled = None, False  # What measured the host before does so no more: the two cannot be compared.
    if not late and (load is None or (stage.name == "cap" and not _speeds_known(turn, stage))):
        return None
    if load is None or drill.load is None:
        figure(turn, load_reported=False)
        return ""
    figures: dict[str, Scalar] = _drop(own.rating_w(turn.policy, turn.state), stage.name, drill.load, load)
    if not settled:
        # The load of training may vary. A load that did not settle is reported, and not learned.
        figures[f"load_{_WORDS[stage.name]}_settled"] = False
    figure(turn, **figures)
    if stage.name == "pause" and settled:
        _learn_pause(turn, drill, load)
    elif stage.name == "cap":
        _learn_cap(turn, drill, stage, load, settled=settled)
    return ""


def _unpaused_because(turn: Turn, drill: Drill) -> str:
    """Say which trainers have confirmed the pause, and train on by their own report; "" if none does."""
    trains = [t.name for t in turn.state.trainers if t.name in drill.paused and t.activity is Activity.TRAINING]
    return f"{', '.join(trains)}: has not paused" if trains else ""


def _rest_w(turn: Turn) -> float | None:
    """Return what this host draws besides its GPUs: as measured now, else as known."""
    measured_w = own.rest_w(turn.state, turn.now_s)
    return turn.state.learned.rest_w if measured_w is None else round(measured_w, 1)


_WORDS = {"pause": "paused", "cap": "capped"}


def _drop(rating_w: float | None, stage: str, before: float, after: float) -> dict[str, Scalar]:
    """Return the figures of a fall. rating_w: of all UPSes that feed the host; None: unknown."""
    word = _WORDS[stage]
    figures: dict[str, Scalar] = {f"load_{word}": rounded(after), f"drop_{word}": rounded(before - after)}
    if rating_w is not None:
        figures[f"drop_{word}_w"] = round((before - after) * rating_w, 1)
    return figures


def _learn_pause(turn: Turn, drill: Drill, load: float) -> None:
    """Learn the load drop of a pause. Trainers that paused together get equal parts of it."""
    before = drill.load
    if before is None or not drill.ordered_to_pause:
        return
    each, watts = max(0.0, before - load) / len(drill.ordered_to_pause), None
    learned = turn.state.learned
    host_load = own.own_load(turn.policy, turn.state, turn.now_s)
    if host_load is not None:
        watts = None if host_load.rating_w is None else each * host_load.rating_w
        if dict(drill.figures).get("load_of") == "ups":
            before = max(host_load.load, each)  # The drop is of this host: so must be what it fell from.
    for name in drill.ordered_to_pause:
        drop = Drop(before=before, after=before - each, at_s=turn.now_s, watts=watts)
        learned = needs.with_drop(learned, name, drop)
    turn.update(learned=learned)


def _learn_cap(turn: Turn, drill: Drill, stage: DrillStage, load: float, *, settled: bool) -> None:
    """Learn what capping brings: load and speed, and whether a battery then lasts for more training."""
    before = drill.load
    ratios = [
        now / old for name, old in drill.speeds if old > 0.0 and (now := speed_of(stage, name)) is not None
    ]  # fmt: skip
    if before is None or not ratios:
        figure(turn, cap_speed_reported=False)
        return
    speed = min(1.0, sum(ratios) / len(ratios))
    figure(turn, cap_speed=rounded(speed))
    if settled:
        drop = Drop(before=before, after=min(before, load), at_s=turn.now_s, speed=speed)
        turn.update(learned=replace(turn.state.learned, cap=drop))
        worth = escalation.cap_gain(turn.policy, turn.state)
        figure(turn, cap_gain=rounded(worth), cap_pays=worth is not None and worth >= escalation.LEAST_CAP_GAIN)


def look_at_self_test(turn: Turn, drill: Drill, stage: DrillStage) -> str | None:
    """Wait for a self-test of the UPS, and measure while it lasts. "": it is over; a text: why it failed."""
    reading, begun = turn.state.feed.reading, dict(drill.figures).get("test_began_s")
    testing = turn.state.feed.test_since_s is not None
    late = turn.now_s >= stage.by_s
    if reading is None:
        return None
    load = feeds.reported_load(turn.policy, turn.state, reading)
    if not isinstance(begun, int | float):
        if testing:
            figure(turn, test_began_s=round(turn.now_s - stage.at_s, 3), load_before=rounded(load))
            figure(turn, charge_before_pct=reading.charge_pct, runtime_before_s=reading.runtime_s)
            figure(turn, health_before=rounded(turn.state.battery.health))
            change_stage(turn, by_s=turn.now_s + checks.SELF_TEST_S)
            return None
        return "the UPS did not begin a self-test: start it at its front panel or on its card" if late else None
    if testing:
        figure(turn, load_test=rounded(load), runtime_test_s=reading.runtime_s, charge_test_pct=reading.charge_pct)
        return "the self-test of the UPS did not end" if late else None
    figure(turn, test_s=round(turn.now_s - stage.at_s - begun, 3))
    report_health(turn, drill.began_s)
    return ""


def report_health(turn: Turn, since_s: float) -> None:
    """Report the health that a discharge since then has measured, if it was deep enough."""
    battery = turn.state.battery
    learned = battery.model.health
    if learned is None or learned.at_s < since_s:
        figure(turn, health_learned=False)
    elif learned.least:
        figure(turn, health=rounded(battery.health), health_at_least=rounded(learned.share), health_learned=True)
    else:
        figure(turn, health=rounded(battery.health), health_measured=rounded(learned.share))
        figure(turn, health_error=rounded(learned.error), health_learned=True)


def look_at_resume(turn: Turn, drill: Drill, stage: DrillStage) -> str | None:
    """Check that training continues: each paused trainer has confirmed its resume and no longer reports a pause."""
    known: dict[str, Trainer] = {t.name: t for t in turn.state.trainers if t.alive}
    owed = [name for name in drill.paused if name in known]
    standing = [name for name in drill.ordered_to_pause if name in known and known[name].paused]
    if not owed and not standing and not drill.waiting:
        if not is_recorded(drill):
            figure(turn, resume_s=round(turn.now_s - stage.at_s, 3))
        return ""
    if turn.now_s >= stage.by_s:
        return f"{', '.join(owed or standing) or 'a trainer'} did not continue after the pause"
    return None
