"""What a drill measures: the load before and after, once it has settled, and the speed of training."""

from powerguard.core import account, cap, drill_checks, needs, plan
from powerguard.core.actions import Scalar
from powerguard.core.drill_turn import change, figure, is_recorded, rounded
from powerguard.core.events import TrainerSeen
from powerguard.core.frozen import replace
from powerguard.core.learned import Drop
from powerguard.core.model import Drill, Trainer
from powerguard.core.policy import Policy
from powerguard.core.readings import Reading
from powerguard.core.turn import Turn

SETTLE_S = 10.0
"""The load has settled when it was read for so long and its two halves agree."""
AGREE = 0.015
"""As a share of the rating: whole percents of a gauge are no step."""
_KEPT_S = 16.0
_MOST_SAMPLES = 64
_LEAST_SAMPLES = 4
_LEAST_STEPS = 5


def watch_reading(policy: Policy, drill: Drill, reading: Reading) -> Drill:
    """Keep the load of one reading."""
    load = account.told_load(policy, reading)
    if load is None:
        return drill
    kept = tuple(pair for pair in drill.samples if reading.at_s - pair[0] <= _KEPT_S)
    return replace(drill, samples=(*kept, (reading.at_s, load))[-_MOST_SAMPLES:])


def watch_trainer(drill: Drill, seen: TrainerSeen) -> Drill:
    """Keep the step that a trainer tells, for its speed."""
    known = next((entry for entry in drill.seen if entry[0] == seen.trainer), None)
    others = tuple(entry for entry in drill.seen if entry[0] != seen.trainer)
    if not seen.alive or seen.step is None:
        return replace(drill, seen=others)
    if known is None or seen.step < known[3]:
        entry = (seen.trainer, seen.step, seen.at_s, seen.step, seen.at_s)
    else:
        entry = (*known[:3], seen.step, seen.at_s)
    return replace(drill, seen=(*others, entry)[-_MOST_SAMPLES:])


def stage_load(drill: Drill, now_s: float, *, late: bool) -> tuple[float | None, bool]:
    """Return the load (share of the rating) in this stage, and whether it has settled.

    None while it has not; `late`: the time for it is over, and what there is counts.
    """
    window = [pair for pair in drill.samples if now_s - pair[0] <= SETTLE_S + 1.0]
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


def speed_of(drill: Drill, name: str) -> float | None:
    """Return steps a second of a trainer in this stage; None while it has told too few."""
    entry = next((entry for entry in drill.seen if entry[0] == name), None)
    if entry is None:
        return None
    steps, lasted_s = entry[3] - entry[1], entry[4] - entry[2]
    return steps / lasted_s if steps >= _LEAST_STEPS and lasted_s >= SETTLE_S - 1.0 else None


def _speeds_known(turn: Turn, drill: Drill) -> bool:
    """Every living trainer that tells steps has told enough of them."""
    return all(speed_of(drill, t.name) is not None for t in turn.state.trainers if t.alive and t.step is not None)


def look_at_baseline(turn: Turn, drill: Drill) -> str | None:
    """Wait until load and speed before anything is done are known, and note what is expected. "": it is over."""
    late = turn.now_s >= drill.stage_by_s
    load, _ = stage_load(drill, turn.now_s, late=late)
    if not late and (load is None or ("cap" in drill.stages and not _speeds_known(turn, drill))):
        return None
    now = plan.outage_budget(turn.policy, turn.state, turn.now_s)
    speeds = tuple((name, speed) for name, *_ in drill.seen if (speed := speed_of(drill, name)) is not None)
    change(turn, load=load, speeds=speeds)
    figure(turn, load_before=rounded(load))
    if "pause" in drill.stages:
        figure(turn, load_paused_expected=rounded(now.load_paused))
        figure(turn, runtime_paused_expected_s=rounded(now.reff_paused_s))
    if "checkpoint" in drill.stages:
        figure(turn, checkpoint_expected_s=rounded(now.checkpoint_s))
    return ""


def look_at_load(turn: Turn, drill: Drill) -> str | None:
    """Paused or capped: wait until the load has settled, and learn by how much it fell. "": it is over."""
    if is_recorded(drill):
        return ""
    late = turn.now_s >= drill.stage_by_s
    load, settled = stage_load(drill, turn.now_s, late=late)
    if not late and (load is None or (drill.stage == "cap" and not _speeds_known(turn, drill))):
        return None
    if load is None or drill.load is None:
        figure(turn, load_told=False)
        return ""
    figures: dict[str, Scalar] = _drop(turn.policy, drill.stage, drill.load, load)
    if not settled:
        # Training may draw now more, now less; what did not come to rest is told, and taught to nobody.
        figures[f"load_{_WORDS[drill.stage]}_settled"] = False
    figure(turn, **figures)
    if drill.stage == "pause" and settled:
        _learn_pause(turn, drill, load)
    elif drill.stage == "cap":
        _learn_cap(turn, drill, load, settled=settled)
    return ""


_WORDS = {"pause": "paused", "cap": "capped"}


def _drop(policy: Policy, stage: str, before: float, after: float) -> dict[str, Scalar]:
    word = _WORDS[stage]
    figures: dict[str, Scalar] = {f"load_{word}": rounded(after), f"drop_{word}": rounded(before - after)}
    if policy.rating_w is not None:
        figures[f"drop_{word}_w"] = round((before - after) * policy.rating_w, 1)
    return figures


def _learn_pause(turn: Turn, drill: Drill, load: float) -> None:
    """Learn what a pause brings. Of several trainers that paused together each gets the same part of the drop."""
    before = drill.load
    if before is None or not drill.told:
        return
    each = max(0.0, before - load) / len(drill.told)
    learned = turn.state.learned
    for name in drill.told:
        learned = needs.with_drop(learned, name, Drop(before=before, after=before - each, at_s=turn.now_s))
    turn.update(learned=learned)


def _learn_cap(turn: Turn, drill: Drill, load: float, *, settled: bool) -> None:
    """Learn what capping brings: load and speed, and whether a battery then lasts for more training."""
    before = drill.load
    ratios = [
        now / was for name, was in drill.speeds if was > 0.0 and (now := speed_of(drill, name)) is not None
    ]  # fmt: skip
    if before is None or not ratios:
        figure(turn, cap_speed_told=False)
        return
    speed = min(1.0, sum(ratios) / len(ratios))
    figure(turn, cap_speed=rounded(speed))
    if settled:
        drop = Drop(before=before, after=min(before, load), at_s=turn.now_s, speed=speed)
        turn.update(learned=replace(turn.state.learned, cap=drop))
        worth = cap.gain(turn.policy, turn.state)
        figure(turn, cap_gain=rounded(worth), cap_pays=worth is not None and worth >= cap.LEAST_GAIN)


def look_at_self_test(turn: Turn, drill: Drill) -> str | None:
    """Wait for a self-test of the UPS, and measure while it lasts. "": it is over; a text: why there is nothing."""
    reading, begun = turn.state.feed.reading, dict(drill.figures).get("test_began_s")
    testing = turn.state.feed.test_since_s is not None
    late = turn.now_s >= drill.stage_by_s
    if reading is None:
        return None
    load = account.told_load(turn.policy, reading)
    if not isinstance(begun, int | float):
        if testing:
            figure(turn, test_began_s=round(turn.now_s - drill.stage_at_s, 3), load_before=rounded(load))
            figure(turn, charge_before_pct=reading.charge_pct, runtime_before_s=reading.runtime_s)
            figure(turn, health_before=rounded(turn.state.battery.health))
            change(turn, stage_by_s=turn.now_s + drill_checks.SELF_TEST_S)
            return None
        return "the UPS began no self-test (start it at its front panel or on its card)" if late else None
    if testing:
        figure(turn, load_test=rounded(load), runtime_test_s=reading.runtime_s, charge_test_pct=reading.charge_pct)
        return "the self-test of the UPS did not end" if late else None
    figure(turn, test_s=round(turn.now_s - drill.stage_at_s - begun, 3))
    tell_health(turn, drill.began_s)
    return ""


def tell_health(turn: Turn, since_s: float) -> None:
    """Tell what a discharge since then has taught of the battery's health; it is learned where it was deep enough."""
    battery = turn.state.battery
    learned = battery.model.health
    if learned is None or learned.at_s < since_s:
        figure(turn, health_learned=False)
    elif learned.least:
        figure(turn, health=rounded(battery.health), health_at_least=rounded(learned.share), health_learned=True)
    else:
        figure(turn, health=rounded(battery.health), health_measured=rounded(learned.share))
        figure(turn, health_error=rounded(learned.error), health_learned=True)


def look_at_resume(turn: Turn, drill: Drill) -> str | None:
    """See that training goes on: whoever was paused has heard it, and does not say any more that it stands."""
    known: dict[str, Trainer] = {t.name: t for t in turn.state.trainers if t.alive}
    owed = [name for name in drill.paused if name in known]
    standing = [name for name in drill.told if name in known and known[name].paused]
    if not owed and not standing and not drill.waiting:
        figure(turn, resume_s=round(turn.now_s - drill.stage_at_s, 3))
        return ""
    if turn.now_s >= drill.stage_by_s:
        return f"{', '.join(owed or standing) or 'a trainer'} did not go on after the pause"
    return None
