"""May a drill begin, what would it do, and how long at most? Asked before anything is done, by people and by the core.

Each refusal says what is wrong, with the numbers, and what would be right.
"""

import math
from collections.abc import Iterable
from typing import Final

from powerguard.core.decide import conditions
from powerguard.core.energy import budget
from powerguard.core.model.actions import Conduct
from powerguard.core.model.policy import Mode, Policy
from powerguard.core.model.state import Online, State, Supply, Trainer, phase_name
from powerguard.core.supply import fusion

SCOPES: Final = ("checkpoint", "pause", "cap", "policy", "full")
WITNESSES: Final = ("simulated", "self_test", "plug")
RECENT_S: Final = 1800.0
"""Most training time that a failed pause or cap may cost."""
PLUG_S: Final = 120.0
SELF_TEST_S: Final = 300.0
"""A self-test takes 10 to 60 s; one that lasts longer than that is an outage anyway (see `fusion`)."""
_TOUCHING: Final = ("pause", "cap")
_LONGEST_CHECKPOINT_S: Final = 600.0
_SPEED_STEPS: Final = 8.0


def pausing(state: State) -> tuple[Trainer, ...]:
    """Return the trainers that are alive and pause (or exit) in an outage."""
    return tuple(t for t in state.trainers if t.alive and t.conduct is not Conduct.CONTINUE)


def refusal(policy: Policy, state: State, now_s: float, scopes: tuple[str, ...], witness: str) -> str:
    """Say why this drill may not begin now, or "" when it may. In dry-run no trainer is asked or harmed."""
    return (
        _wrong_words(scopes, witness)
        or _not_now(policy, state)
        or _supply_unsafe(policy, state, now_s)
        or (_scope_unfit(policy, state, scopes) if witness == "simulated" else "")
        or (unsaved(state, now_s) if {"full", *_TOUCHING} & set(scopes) and policy.mode is not Mode.DRY_RUN else "")
    )


def _wrong_words(scopes: tuple[str, ...], witness: str) -> str:
    if witness not in WITNESSES:
        return f"unknown witness {witness!r} (one of {', '.join(WITNESSES)})"
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown:
        return f"unknown scope {unknown[0]!r} (of {', '.join(SCOPES)})"
    if witness == "simulated" and not scopes:
        return f"a simulated drill needs a scope (of {', '.join(SCOPES)})"
    if witness != "simulated" and scopes:
        return f"the witness {witness} takes no scope: the drill gives no orders and only measures"
    return ""


def _not_now(policy: Policy, state: State) -> str:
    if not isinstance(state.phase, Online):
        return f"the phase is {phase_name(state.phase)}, not online: wait until training runs again"
    if state.drill is not None:
        return f"drill {state.drill.id} is running (stage {state.drill.stage}): wait for its end, or stop it"
    if state.cap is not None:
        return "GPU power is capped: wait until the limits are restored"
    if state.maintenance is not None:
        return "maintenance suspends the power-off, and the drill would not handle a real outage: end maintenance first"
    return "" if policy.boot_id else "this boot has no id"


def _supply_unsafe(policy: Policy, state: State, now_s: float) -> str:
    """A second outage must be survivable at any moment of the drill, and must be seen at once."""
    feed, reading = state.feed, state.feed.reading
    if reading is None:
        return "the UPS has not been read yet: wait for the first reading"
    if not fusion.is_fresh(policy, feed, now_s):
        age_s = now_s - reading.at_s
        return f"the newest reading is {age_s:.0f} s old (at most {policy.stale_s:g} s): repair the UPS's source first"
    if feed.supply is not Supply.UTILITY:
        return f"the supply is {feed.supply}, not utility: wait until utility is there"
    if feed.suspect:
        return "the newest reading reports battery: wait until it is clear whether utility is there"
    if budget.power_off_at_s(feed) is not None:
        return "a countdown of the UPS to output off is running: cancel it first"
    if feed.test_since_s is not None or fusion.is_draining(feed):
        return "the UPS tests its battery: wait until the test has ended"
    if not fusion.is_stable(policy, feed, now_s, stable_s=policy.utility_stable_s):
        return (
            f"utility has been there for {math.floor(now_s - feed.since_s)} s only: it must be stable for "
            f"{policy.utility_stable_s:.0f} s"
        )
    if not conditions.gate_open(policy, state, now_s):
        charge = "not reported" if reading.charge_pct is None else f"{reading.charge_pct:.0f} %"
        now = conditions.outage_budget(policy, state, now_s)
        needs = "" if now.reff_paused_s is None else (
            f"; checkpoint and stop need {now.need_s:.0f} s of {0.75 * now.reff_paused_s:.0f} s"
        )  # fmt: skip
        return f"an outage in the drill could not be survived (charge {charge}{needs}): wait until it has charged"
    return ""


def _scope_unfit(policy: Policy, state: State, scopes: tuple[str, ...]) -> str:
    alive = [trainer for trainer in state.trainers if trainer.alive]
    if not alive and {"checkpoint", "pause"} & set(scopes):
        return "no trainer is alive (see trainers in `powerguard status`): start training, or drill the policy alone"
    if "pause" in scopes and not pausing(state):
        names = ", ".join(trainer.name for trainer in alive)
        return f"{names}: continues in an outage and cannot be paused: embed powerguard.trainer, or leave pause out"
    if "cap" in scopes and policy.cap_share is None:
        return "the settings cap no GPU power: set gpu.kind: nvml (and gpu.cap_share), or leave cap out"
    if "policy" in scopes and not policy.bmc:
        return "the settings have no BMC: set bmc, or leave policy out"
    return ""


def unsaved(state: State, now_s: float) -> str:
    """Name the trainer whose work would be lost if it ended now, or "": one without a recent checkpoint."""
    for trainer in state.trainers:
        if not trainer.alive:
            continue
        if trainer.paused or trainer.pause_ordered:
            return f"{trainer.name} is already paused by another request: resume it first"
        if trainer.order is not None:
            return f"{trainer.name} is writing a checkpoint: wait until it is durable"
        age_s = None if trainer.durable_at_s is None else now_s - trainer.durable_at_s
        if age_s is None or age_s > RECENT_S:
            problem = "no known checkpoint" if age_s is None else f"its checkpoint is {age_s / 60:.0f} minutes old"
            return (
                f"{trainer.name}: {problem} (at most {RECENT_S / 60:.0f} minutes): "
                "run `powerguard drill --scope checkpoint` first"
            )
    return ""


def stages(
    policy: Policy, state: State, scopes: tuple[str, ...], witness: str
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return what a drill goes through, and what a full one leaves out on this host: (name, why)."""
    if witness != "simulated":
        return (witness,), ()
    full = "full" in scopes
    wanted = {"checkpoint", "pause", "cap", "policy"} if full else set(scopes)
    skipped: list[tuple[str, str]] = []
    if full and not any(trainer.alive for trainer in state.trainers):
        skipped += [("checkpoint", "no trainer is alive"), ("pause", "no trainer is alive")]
    elif full and not pausing(state):
        skipped.append(("pause", "every trainer continues in an outage"))
    if full and policy.cap_share is None:
        skipped.append(("cap", "the settings cap no GPU power"))
    if full and not policy.bmc:
        skipped.append(("policy", "the settings have no BMC"))
    wanted -= {name for name, _ in skipped}
    found: list[str] = []
    if wanted & set(_TOUCHING):
        found.append("baseline")
    if "checkpoint" in wanted:
        found.append("checkpoint")
    if "pause" in wanted:
        found += ["pause", "resume"]
    if "cap" in wanted:
        found += ["cap", "restore"]
    if "policy" in wanted:
        found.append("policy")
    if full:
        found += ["sync", "record"]
    return tuple(found), tuple(skipped)


def checkpoint_limit_s(trainer: Trainer) -> float:
    """Seconds that a trainer has for the drill's checkpoint: long, but limited."""
    return min(max(4 * trainer.checkpoint_s, 60.0), _LONGEST_CHECKPOINT_S)


def stage_s(policy: Policy, state: State, stage: str, coming: Iterable[str] = ()) -> float:
    """Seconds after which a stage ends at the latest, answered or not. coming: this stage and what follows."""
    step_s = max((t.step_s for t in state.trainers if t.alive), default=0.0)
    speed_s = min(max(_SPEED_STEPS * step_s + 10.0, 30.0), 150.0)
    match stage:
        case "baseline":
            return speed_s if "cap" in coming else 30.0
        case "checkpoint":
            return max((checkpoint_limit_s(t) for t in state.trainers if t.alive), default=0.0)
        case "pause":  # docs/decisions/0046: the load has got there by then
            return max(2 * step_s + 15.0, 45.0)
        case "resume":
            return max(2 * step_s + 15.0, 30.0)
        case "cap":
            return max(speed_s, 45.0)
        case "restore":
            return 30.0
        case "policy" | "sync":
            return policy.bmc_limit_s
        case "plug" | "self_test":
            return PLUG_S
        case _:
            return 0.0


def outline(policy: Policy, state: State, scopes: tuple[str, ...], witness: str) -> tuple[tuple[str, str, float], ...]:
    """Return what exactly would happen: (stage, in words, seconds at most)."""
    found, skipped = stages(policy, state, scopes, witness)
    alive = [trainer for trainer in state.trainers if trainer.alive]
    everybody = ", ".join(trainer.name for trainer in alive) or "no trainer"
    pausers = ", ".join(trainer.name for trainer in pausing(state)) or "no trainer"
    stand = "pause" in found
    descriptions = {
        "baseline": "measure load and training speed; no order is given",
        "checkpoint": f"ask {everybody} for a checkpoint"
        + (" and to pause there" if stand else "; training continues"),
        "pause": f"keep {pausers} paused until the load has settled",
        "resume": f"resume {pausers}, and check that training runs",
        "cap": f"lower every GPU's power limit to {100 * (policy.cap_share or 1.0):.0f} %, measure load and speed",
        "restore": "restore every GPU's power limit",
        "policy": "read back that the BMC powers the host on when power returns",
        "sync": "sync the checkpoint filesystems",
        "record": "record the power-off that an outage would order; the host stays on",
        "plug": "wait until you pull the UPS's plug: from then on the real rules apply, with the real power-off",
        "self_test": "wait for the UPS to begin a self-test (start it at the UPS), measure load and runtime",
    }
    steps = [(stage, descriptions[stage], stage_s(policy, state, stage, found)) for stage in found]
    steps += [(name, f"left out: {why}", 0.0) for name, why in skipped]
    return tuple(steps)
