"""A small language for outages, so that a story is read and written as text.

    policy table=50:540,75:360,100:240 trainer=llm:pause:20
    auto policy sync poweroff resume checkpoint=20
    0..5 utility load=75 charge=100 runtime=360
    6..60 battery load=75 charge=100-0.2 runtime=360-1      # "100-0.2": from 100, 0.2 less each second
    40 restart                                             # kill and start the daemon, same boot
    70 reboot gap=300                                      # the host was away for 300 s
    90 amnesia                                             # restarted in the same boot, and the journal is lost
    6..9 battery load=75 | utility source=nut load=75       # two sources, the second a quarter of a second later

Every line with a time is one event, or one a second (`6..60`). After each event the orders whose `auto` answer is due
are answered; an order of a kind that `auto` does not name is answered by a line of the story or never, as if its
effector hung. `KINDS` has the words. A power-off that is answered ends the host's life at its deadline, except with
`auto survives`: events after that, before a `reboot`, do not reach the core. The result is text: the notes, the orders
(`!`), and the phase at the end (`=`).
"""

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

from powerguard.core.comeback.recovery import Stored, restore
from powerguard.core.decide.machine import step
from powerguard.core.energy import needs
from powerguard.core.model import actions
from powerguard.core.model.actions import (
    Action,
    ArmPowerOn,
    CapPower,
    CheckHost,
    CheckPowerOn,
    Conduct,
    ContinueTrainer,
    DisarmPowerOn,
    DrainNode,
    EnsurePolicy,
    LeaveNode,
    Level,
    Note,
    PauseTrainer,
    PollNow,
    PowerOff,
    PowerOnMethod,
    RestorePolicy,
    RestorePower,
    ResumeTrainer,
    ResumeTraining,
    ReturnNode,
    SignalJobs,
    StopTrainer,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import (
    Abort,
    BatteryReplaced,
    CheckpointNow,
    CheckpointProgress,
    Done,
    Event,
    Failed,
    ForeignStop,
    Measured,
    NetworkSeen,
    OutputSource,
    OwnLoad,
    OwnSource,
    PoweredOn,
    Reading,
    RecoverNow,
    SetMaintenance,
    SourceFailed,
    StartDrill,
    StopDrill,
    Tick,
    TrainerSeen,
)
from powerguard.core.model.policy import AfterUnseenStop, Drop, FeedPolicy, Mode, Policy, Shared, Shed, TrainerPolicy
from powerguard.core.model.serialisation import from_plain, to_plain
from powerguard.core.model.state import State, Step, phase_name

_SHORT: dict[str, type[Action]] = {
    "policy": EnsurePolicy,
    "poweroff": PowerOff,
    "resume": ResumeTraining,
    "trainer_resume": ResumeTrainer,
    "pause": PauseTrainer,
    "cap": CapPower,
    "restore": RestorePower,
    "stop": StopTrainer,
    "terminate": TerminateTrainer,
    "continue": ContinueTrainer,
    "check": CheckPowerOn,
    "arm": ArmPowerOn,
    "disarm": DisarmPowerOn,
    "host": CheckHost,
    "bracket": RestorePolicy,
    "drain": DrainNode,
    "signal": SignalJobs,
    "leave": LeaveNode,
    "give_back": ReturnNode,
}
"""Words of the scenarios that are shorter than the kind's own."""
KINDS = {**{kind.word: kind for kind in actions.KINDS if kind not in _SHORT.values()}, **_SHORT}
_NOTED = (
    "reff_paused_s",
    "stop_s",
    "checkpoint_s",
    "grade",
    "outcome",
    "lasted_s",
    "away_s",
    "trainer",
    "after",
    "steps_lost",
    "result",
    "load_before",
    "load_paused",
    "load_capped",
    "drop_paused",
    "cap_speed",
    "cap_gain",
    "method",
    "in_s",
    "returns",
    "back_off_s",
    "shed_s",
    "own_w",
    "own_from",
    "expected_w",
    "did",
    "jobs",
    "hosts",
    "waited_s",
)


def make_policy(words: list[str]) -> Policy:
    """Read `policy` words: table=, trainer=name:conduct:seconds[:disk[:priority]] (often), feed=ups:supplies
    (often), any Policy field."""
    fields: dict[str, Any] = {}
    trainers = []
    feeds: list[tuple[str, int]] = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "table":
            points = (pair.split(":") for pair in value.split(","))
            fields["runtime_table"] = tuple((float(load) / 100, float(seconds)) for load, seconds in points)
        elif key == "trainer":
            name, conduct, seconds, disk, priority = (*value.split(":"), "", "")[:5]
            trainers.append(
                TrainerPolicy(
                    name=name,
                    conduct=Conduct(conduct),
                    checkpoint_s=float(seconds),
                    disk=disk,
                    priority=int(priority or 0),
                )
            )
        elif key == "feed":
            name, _, supplies = value.partition(":")
            feeds.append((name, int(supplies or 1)))
        elif key == "shared":  # shared=hosts:4,own_w:1500
            given = {name: float(number) for name, number in (each.split(":") for each in value.split(","))}
            hosts = given.pop("hosts", None)
            fields[key] = Shared(hosts=None if hosts is None else int(hosts), **given)
        elif key == "shed":  # shed=tier:highest or tier:highest:extra
            tier, highest, *extra = value.split(":")
            fields[key] = Shed(tier=int(tier), highest=int(highest), extra_s=float(extra[0]) if extra else None)
        elif key == "boot_id":
            fields[key] = value
        elif key == "after_unseen_stop":
            fields[key] = AfterUnseenStop(value)
        elif key == "mode":
            fields[key] = Mode(value)
        elif key == "methods":
            fields[key] = tuple(PowerOnMethod(method) for method in value.split(","))
        elif key == "outputs":
            fields[key] = tuple(value.split(","))
        else:
            assert value, f"policy {word}: write FIELD=NUMBER, with 1 for yes"
            fields[key] = float(value)
    made = Policy(**{"boot_id": "boot-one", "ups": "ups", "trainers": tuple(trainers), **fields})
    return replace(
        made, feeds=tuple(FeedPolicy(policy=replace(made, ups=name), supplies=supplies) for name, supplies in feeds)
    )


@dataclass
class StoryResult:
    """What a story came to. lines: notes and orders as text; actions: all ordered; notes: all said."""

    state: State
    lines: list[str] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def phase(self) -> str:
        return phase_name(self.state.phase)

    def ordered(self, kind: type[Action]) -> list[Action]:
        return [action for action in self.actions if isinstance(action, kind)]


class Player:
    """Plays a story through the real `step`, with states going through the journal's own plain form."""

    def __init__(self) -> None:
        self.policy = make_policy([])
        self.now_s = 0.0
        self.open: list[tuple[float, Action]] = []
        self.auto: dict[str, float] = {}
        self.details: dict[str, dict[str, str]] = {}
        self.result: StoryResult | None = None
        self.steps = 0
        self.dark_at_s = math.inf

    def play(self, text: str) -> StoryResult:
        for raw in text.splitlines():
            line = raw.partition("#")[0].strip()
            if line:
                self.line(line)
        assert self.result is not None
        return self.result

    def line(self, line: str) -> None:
        word, *rest = line.split()
        if word == "policy":
            self.policy = make_policy(rest)
            return
        if word == "detail":  # `detail arm returns=aborts`: what an automatic answer tells besides.
            self.details[rest[0]] = dict(each.partition("=")[::2] for each in rest[1:])
            return
        if word == "auto":
            self.auto = {k: float(v or 0.1) for k, _, v in (w.partition("=") for w in rest)}
            return
        start, _, end = word.partition("..")
        at_s = float(start)
        first_s = at_s
        parts = [part.split() for part in " ".join(rest).split("|")]
        while at_s <= float(end or start) + 1e-9:
            for place, (verb, *words) in enumerate(parts):
                self._answer(until_s=at_s + 0.25 * place)
                self._event(at_s + 0.25 * place, verb, words, at_s - first_s)
            at_s += 1.0
        self._answer(until_s=at_s - 1.0)

    def _state(self) -> State:
        if self.result is None:
            self.result = StoryResult(restore(self.policy, None, self.now_s).state)
        return self.result.state

    def _answer(self, until_s: float) -> None:
        """Give the `auto` answers that are due by now, in their order."""
        while True:
            due = [(at + self._delay(a), a) for at, a in self.open if self._delay(a) >= 0]
            due = [(when, a) for when, a in due if when <= until_s]
            if not due or min(when for when, _ in due) > self.dark_at_s:
                return
            when, action = min(due, key=lambda pair: pair[0])
            self._done(when, action, {})

    def _delay(self, action: Action) -> float:
        name = next(name for name, kind in KINDS.items() if isinstance(action, kind))
        if name == "checkpoint" and isinstance(action, TriggerCheckpoint) and action.trainer in self.auto:
            return self.auto[action.trainer]
        return self.auto.get(name, -1.0)

    def _done(self, at_s: float, action: Action, detail: dict[str, Any]) -> None:
        self.open = [(at, a) for at, a in self.open if a.id != action.id]
        if isinstance(action, EnsurePolicy):
            detail = {"policy": "always-on", "verified": True, **self.details.get("policy", {}), **detail}
        if isinstance(action, ArmPowerOn):
            returns = {"returns": "cycles"} if action.method is PowerOnMethod.OUTPUT else {}
            detail = {"in_s": action.in_s, **returns, **self.details.get("arm", {}), **detail}
        if isinstance(
            action, DisarmPowerOn
        ):  # Of an outage of which nobody knows, nothing is armed, unless it is said.
            detail = {"disarmed": bool(action.outage), **self.details.get("disarm", {}), **detail}
        if isinstance(action, DrainNode | SignalJobs | LeaveNode | ReturnNode):
            name = next(name for name, kind in KINDS.items() if isinstance(action, kind))
            detail = {"node": "gpu1", **self.details.get(name, {}), **detail}
            if self.policy.mode is Mode.DRY_RUN:
                detail = {"dry_run": True}
        if isinstance(action, TriggerCheckpoint):
            paused = action.after is not Conduct.CONTINUE
            detail = {"step": 1000, "verified": True, "at_paused_step": paused, "paused": paused, **detail}
        if isinstance(action, PauseTrainer):
            detail = {"native": True, "paused": True, **detail}
        if isinstance(action, ResumeTrainer) and action.outage and "drill" in action.outage:
            detail = {"native": True, "resumed": True, **detail}
        self.send(Done(at_s=at_s, action=action, took_s=0.1, detail=tuple(detail.items())))
        if isinstance(action, PowerOff) and self.policy.powers_off and "survives" not in self.auto:
            self.dark_at_s = min(self.dark_at_s, at_s + action.force_after_s + 2.0)

    def _pending(self, name: str, trainer: str = "") -> Action:
        kind = KINDS[name]
        for _, action in self.open:
            if isinstance(action, kind) and (not trainer or getattr(action, "trainer", "") == trainer):
                return action
        msg = f"no {name} is open"
        raise AssertionError(msg)

    def _event(self, at_s: float, verb: str, words: list[str], into_s: float) -> None:
        self.now_s = at_s
        if verb == "reboot":
            self.dark_at_s = math.inf
        if at_s > self.dark_at_s:
            return
        if verb in tuple(OutputSource):
            self.send(self._reading(at_s, verb, words, into_s))
            return
        given = dict(w.partition("=")[::2] for w in words if "=" in w)
        plain = [w for w in words if "=" not in w]
        players = (self._network, self._world, self._operator)
        if not any(play(at_s, verb, plain, given) for play in players):
            msg = f"unknown word {verb!r}"
            raise AssertionError(msg)

    def _network(self, at_s: float, verb: str, plain: list[str], given: dict[str, str]) -> bool:
        """Play a source that is lost, what the host draws, and a part of its network: `network link eth0 gone`, `back`.

        `own bmc 1500~6`: by the BMC, 1500, 1506 or 1512 W, as no real draw is the same to the watt twice.
        """
        if verb == "lost":
            ups, name = given.get("ups", "ups"), given.get("source", "snmp")
            self.send(SourceFailed(at_s=at_s, ups=ups, source=name, reason=" ".join(plain), lost=True))
        elif verb == "network":
            heard_s = float(given["heard"]) if "heard" in given else None
            self.send(
                NetworkSeen(at_s=at_s, part=" ".join(plain[:-1]), up=plain[-1] == "back", heard_s=heard_s),
            )
        elif verb == "own":
            watts, _, wobble = plain[1].partition("~")
            draws_w = float(watts) + float(wobble or 0) * (int(at_s) % 3)
            self.send(OwnLoad(at_s=at_s, source=OwnSource(plain[0]), watts=draws_w))
        return verb in ("lost", "network", "own")

    def _world(self, at_s: float, verb: str, plain: list[str], given: dict[str, str]) -> bool:
        """Play what the world does: trainers, outcomes, time, boots."""
        match verb:
            case "tick":
                self.send(Tick(at_s=at_s))
            case "trainer":
                self.send(self._seen(at_s, plain[0], given))
            case "progress":
                action = self._pending("checkpoint", plain[0])
                eta_s = float(given["eta"]) if "eta" in given else None
                paused = "paused" in plain
                self.send(
                    CheckpointProgress(
                        at_s=at_s,
                        trainer=plain[0],
                        action_id=action.id,
                        stage=given.get("stage", "writing"),
                        eta_s=eta_s,
                        paused=paused,
                    )
                )
            case "durable":
                detail = {"at_paused_step": False} if "older" in plain else {}
                self._done(at_s, self._pending("checkpoint", plain[0]), detail)
            case "failed":
                name, trainer = (plain[0], "") if plain[0] in KINDS else ("checkpoint", plain[0])
                action = self._pending(name, trainer)
                self.open = [(at, a) for at, a in self.open if a.id != action.id]
                reason = " ".join(w for w in plain[1:] if w != "timeout") or "refused"
                self.send(Failed(at_s=at_s, action=action, took_s=0.1, reason=reason, timed_out="timeout" in plain))
            case "done":
                self._done(at_s, self._pending(plain[0]), {})
            case "measured":
                self.send(Measured(at_s=at_s, need=plain[0], seconds=float(plain[1])))
            case "powered_on":
                ac_failed = "ac" in plain
                self.send(PoweredOn(at_s=at_s, because="reported by the BMC", cause=plain[0], ac_failed=ac_failed))
            case "learned":
                self._learned(at_s, given)
            case "sigterm":
                self.send(ForeignStop(at_s=at_s, host_stopping="host" in plain))
            case "restart" | "reboot" | "amnesia":
                self._restart(at_s, verb, given)
            case _:
                return False
        return True

    def _operator(self, at_s: float, verb: str, plain: list[str], given: dict[str, str]) -> bool:
        """Play the word of a person."""
        match verb:
            case "battery_replaced":
                self.send(BatteryReplaced(at_s=at_s, who="alice"))
            case "abort":
                self.send(Abort(at_s=at_s, who="alice"))
            case "maintenance":
                self.send(SetMaintenance(at_s=at_s, until_s=at_s + float(plain[0]), reason="works", who="alice"))
            case "checkpoint_now":
                self.send(CheckpointNow(at_s=at_s, who="alice"))
            case "drill":
                scopes = tuple(given["scope"].split(",")) if "scope" in given else ()
                self.send(StartDrill(at_s=at_s, who="alice", scopes=scopes, witness=given.get("witness", "simulated")))
            case "recover":
                self.send(RecoverNow(at_s=at_s, who="alice"))
            case "drill_stop":
                self.send(StopDrill(at_s=at_s, who="alice"))
            case _:
                return False
        return True

    def _reading(self, at_s: float, source: str, words: list[str], into_s: float) -> Reading:
        fields: dict[str, Any] = {"source": "snmp", "ups": "ups"}
        names = {"load": "load_pct", "charge": "charge_pct", "runtime": "runtime_s", "on_battery": "on_battery_s"}
        names |= {"off_in": "output_off_in_s"}
        for word in words:
            key, _, value = word.partition("=")
            key = names.get(key, key)
            if not value:
                fields[key] = True
            elif key in ("source", "ups"):
                fields[key] = value
            elif value in ("true", "false"):
                fields[key] = value == "true"
            else:
                sign = "-" if "-" in value[1:] else "+"
                base, _, slope = value.partition(sign) if value[0] != "-" else (value, "", "")
                fields[key] = float(base) + (-1 if sign == "-" else 1) * float(slope or 0) * into_s
                if key != "on_battery_s":
                    fields[key] = max(0.0, fields[key])
        return Reading(at_s=at_s, output_source=OutputSource(source), **fields)

    def _seen(self, at_s: float, name: str, given: dict[str, str]) -> TrainerSeen:
        return TrainerSeen(
            at_s=at_s,
            trainer=name,
            alive=given.get("alive", "true") == "true",
            conduct=Conduct(given.get("conduct", "pause")),
            checkpoint_s=float(given["checkpoint_s"]) if "checkpoint_s" in given else None,
            paused=given.get("paused") == "true",
            step=int(given["step"]) if "step" in given else None,
            stall_s=float(given["stall_s"]) if "stall_s" in given else None,
            durable_age_s=float(given["durable_age_s"]) if "durable_age_s" in given else None,
            hosts=int(given.get("hosts", "1")),
            held_by=given.get("held_by", "").replace("_", " "),
            ended_by=given.get("ended_by", "").replace("_", " "),
            paused_for=given.get("paused_for", ""),
        )

    def _restart(self, at_s: float, verb: str, given: dict[str, str]) -> None:
        old = self._state()
        new_boot = verb == "reboot"
        in_flight = tuple(action for _, action in self.open)
        self.open = []
        before_s, boot = self.last_s, self.policy.boot_id
        if new_boot:
            self.policy = replace(self.policy, boot_id="boot-" + given.get("id", "two"))
        gap = float(given["gap"]) if "gap" in given else None
        if verb == "amnesia":
            self._tell(at_s, restore(self.policy, None, at_s))
            return
        stored = Stored(state=old, boot_id=boot, at_s=before_s, gap_s=gap, in_flight=() if new_boot else in_flight)
        self._tell(at_s, restore(self.policy, stored, at_s))

    def _learned(self, at_s: float, given: dict[str, str]) -> None:
        """`learned cap=75:50:0.8 llm=75:30`: what a drill has left behind: load before and after in percent, speed."""
        learned = self._state().learned
        for name, value in given.items():
            before, after, *speed = (float(word) for word in value.split(":"))
            drop = Drop(before=before / 100, after=after / 100, at_s=at_s, speed=speed[0] if speed else 0.0)
            learned = replace(learned, cap=drop) if name == "cap" else needs.with_drop(learned, name, drop)
        assert self.result is not None
        self.result.state = replace(self.result.state, learned=learned)

    def send(self, event: Event) -> Step:
        state = self._state()
        self.last_s = event.at_s
        policy = needs.fold(self.policy, state.learned)
        answer = step(policy, state, event)
        assert step(policy, state, event) == answer, "same state and event, same answer"
        self._tell(event.at_s, answer)
        return answer

    def _tell(self, at_s: float, answer: Step) -> None:
        assert self.result is not None
        self.result.state = answer.state
        self.steps += 1
        if answer.actions or answer.notes or self.steps % 10 == 0:
            # Whatever the journal would have to keep, and some more, goes through its plain form.
            self.result.state = from_plain(json.loads(json.dumps(to_plain(answer.state))), State)
            assert self.result.state == answer.state, "the journal keeps a state whole"
        for note in answer.notes:
            numbers = " ".join(f"{k}={_short(v)}" for k, v in note.numbers if k in _NOTED and v is not None)
            if note.event == "phase_changed":
                old, new = dict(note.numbers)["old"], dict(note.numbers)["new"]
                numbers = f"{old} -> {new} {numbers}"
            self.result.notes.append(note)
            mark = {Level.WARNING: " (warning)", Level.ERROR: " (error)"}.get(note.level, "")
            self.result.lines.append(f"{at_s:g} {note.event}{mark} because={note.because!r} {numbers}".rstrip())
        for action in answer.actions:
            shown = {
                k: getattr(action, k, None) for k in ("trainer", "after", "grade", "force_after_s", "method", "in_s")
            }
            shown["jobs"] = ",".join(getattr(action, "jobs", ())) or None
            text = " ".join(f"{k}={_short(v)}" for k, v in shown.items() if v is not None)
            limit_s = action.by_s - at_s
            self.result.lines.append(f"{at_s:g} ! {type(action).__name__} within={limit_s:.3g}s {text}".rstrip())
            self.result.actions.append(action)
            if not isinstance(action, PollNow):
                self.open.append((at_s, action))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def play(*lines: str) -> StoryResult:
    """Play a story given line by line."""
    return Player().play("\n".join(lines))
