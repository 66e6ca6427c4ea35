"""What must hold whatever happens: a random world plays against `step`, and every invariant is asked after each event.

The world is honest about physics (a battery that really empties) and dishonest about everything else: gauges lie,
sources go silent, trainers hang, fail or join old checkpoints, the daemon is killed, operators interfere.

Once in an example all of it may end (`calm`): utility is there, every order is carried out, and nothing may be left.
"""

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from powerguard.core.comeback.recovery import Stored, restore
from powerguard.core.decide.machine import step
from powerguard.core.decide.transitions import TABLE, Cause
from powerguard.core.energy import own
from powerguard.core.model.actions import (
    Action,
    CapPower,
    Conduct,
    ContinueTrainer,
    DrainNode,
    LeaveNode,
    PauseTrainer,
    PollNow,
    PowerOff,
    RestorePower,
    ResumeTrainer,
    ReturnNode,
    StopTrainer,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import (
    Abort,
    CheckpointNow,
    CheckpointProgress,
    Done,
    Event,
    Failed,
    ForeignStop,
    NetworkSeen,
    OutputSource,
    OwnLoad,
    OwnSource,
    Reading,
    RecoverNow,
    SetMaintenance,
    SourceFailed,
    StartDrill,
    StopDrill,
    Tick,
    TrainerSeen,
)
from powerguard.core.model.policy import Mode
from powerguard.core.model.state import EmergencyCheckpoint, Holding, Online, Recovery, Shutdown, State, Step
from powerguard.sim.world import invariants
from tests.core.invariants import check_spent_battery, check_step, kept
from tests.core.play import make_policy

POLICIES = (
    "table=50:540,75:360,100:240 trainer=llm:pause:20",
    "table=50:540,75:360,100:240 trainer=a:pause:30:d trainer=b:continue:10:d trainer=c:exit:5",
    "table=50:540,75:360,100:240 trainer=llm:pause:20 trainer=b:exit:5 signals=1 cap_share=0.5 scheduler=1",
    "table=50:540,75:360,100:240 trainer=llm:pause:8 trainer=a:pause:5 signals=1 rating_w=5400 shared=hosts:3 shed=0:2",
    "table=50:900,75:700,100:500 trainer=llm:pause:8 signals=1 cap_share=0.5 rating_w=5400 shared=own_w:1500",
    "trainer=llm:pause:20 checks_host=1",
    "table=50:90,75:60,100:40 trainer=llm:pause:8",
    "table=75:3600",
    "table=50:540,75:360,100:240 trainer=llm:pause:20 methods=output,rtc,sentinel,watchdog outputs=ups late_reboot=1",
    (
        "table=50:540,75:360,100:240 trainer=llm:pause:20 feed=a:1 feed=b:1 minimum_supplies=2 methods=output,rtc "
        "outputs=a,b"
    ),
    "",
)


MARKS = {
    TriggerCheckpoint: ("paused", True),
    PauseTrainer: ("paused", True),
    ResumeTrainer: ("paused", False),
    StopTrainer: ("stopped", True),
    ContinueTrainer: ("stopped", False),
    CapPower: ("capped", True),
    RestorePower: ("capped", False),
    DrainNode: ("marked", True),
    LeaveNode: ("marked", True),
    ReturnNode: ("marked", False),
}
"""What each order that is carried out leaves behind in the world, or takes away."""


class Outages(RuleBasedStateMachine):
    """One host, one UPS or two, some trainers."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.charge = 100.0
        self.dark: set[str] = set()
        self.marks: set[tuple[str, str]] = set()
        self.persons: set[str] = set()
        self.is_calm = self.is_forgotten = False
        self.open: dict[str, Action] = {}
        self.ids: set[str] = set()
        self.battery_readings = 0
        self.latched_from: State | None = None
        self.boots = 0
        self.ridable = 500

    @initialize(words=st.sampled_from(POLICIES), mode=st.sampled_from(Mode))
    def start(self, words: str, mode: Mode) -> None:
        self.policy = replace(make_policy(words.split()), mode=mode)
        self.upses = [each.policy.ups for each in self.policy.feeds] or ["ups"]
        self.state = restore(self.policy, None, self.now_s).state

    # --- The world ---------------------------------------------------------------------------------------------------

    @rule(
        seconds=st.sampled_from([0.3, 1.0, 1.0, 1.0, 2.0, 7.0, 30.0, 300.0]),
        load=st.sampled_from([None, 0.0, 45.0, 75.0, 100.0]),
        runtime=st.sampled_from([None, 0.0, 5.0, 100.0, 360.0, 5000.0]),
        charge=st.sampled_from(["reported", "none", "stuck"]),
        extra=st.sampled_from(["", "", "", "low", "witness", "off_in", "fsd", "test", "calibration", "replace"]),
        output=st.sampled_from(["true", "true", "true", "unknown", "off", "bypass"]),
        of=st.sampled_from([0, -1]),
    )
    def read(
        self, seconds: float, load: float | None, runtime: float | None, charge: str, extra: str, output: str, of: int
    ) -> None:
        self._pass(seconds)
        ups = self.upses[of]
        source = OutputSource.BATTERY if ups in self.dark else OutputSource.UTILITY
        if output != "true":
            source = OutputSource(output)
        given = {"reported": self.charge, "none": None, "stuck": 100.0}[charge]
        fields: dict[str, Any] = {}
        match extra:
            case "low":
                fields["low_battery"] = True
            case "witness":
                fields["input_present"] = ups not in self.dark
            case "off_in":
                fields["output_off_in_s"] = 120.0
            case "fsd":
                fields["forced_shutdown"] = True
            case "test":
                fields |= {"testing": True, "input_present": True}
                source = OutputSource.BATTERY
            case "calibration":
                fields |= {"calibrating": True, "input_present": True}
                source = OutputSource.BATTERY
            case "replace":
                fields["replace_battery"] = True
        self._send(
            Reading(
                at_s=self.now_s,
                ups=ups,
                source="snmp",
                output_source=source,
                charge_pct=given,
                load_pct=load,
                runtime_s=runtime,
                **fields,
            )
        )

    @rule(
        readings=st.sampled_from([3, 15, 60, 240]),
        on_battery=st.sampled_from([True, True, True, False]),
        load=st.sampled_from([45.0, 75.0]),
        gauge=st.sampled_from([1.0, 1.0, 0.5, 3.0]),
        answering=st.booleans(),
    )
    def ride(self, readings: int, on_battery: bool, load: float, gauge: float, answering: bool) -> None:
        """A stretch of ordinary readings, one a second, with trainers and effectors that do or do not answer."""
        self.dark = set(self.upses) if on_battery else set()
        # One example may not ride for ever: all of them together have to fit the suite.
        readings = min(readings, self.ridable)
        self.ridable -= readings
        for _ in range(readings):
            self._pass(1.0)
            if answering and self.open:
                self._done(self.open[min(self.open)])
            self._read_all(load, gauge)
            self.a_spent_battery_is_never_sat_on()

    @rule(of=st.sampled_from([0, -1]))
    def flip(self, of: int) -> None:
        self.dark ^= {self.upses[of]}

    @rule(seconds=st.sampled_from([0.25, 1.0, 5.0, 60.0]))
    def tick(self, seconds: float) -> None:
        self._pass(seconds)
        self._send(Tick(at_s=self.now_s))

    @rule(lost=st.booleans(), of=st.sampled_from([0, -1]))
    def lose(self, lost: bool, of: int) -> None:
        self._pass(1.0)
        self._send(SourceFailed(at_s=self.now_s, ups=self.upses[of], source="snmp", reason="no answer", lost=lost))

    @rule(up=st.booleans())
    def network(self, up: bool) -> None:
        self._pass(1.0)
        self._send(NetworkSeen(at_s=self.now_s, part="link eth0", up=up))

    @precondition(lambda self: bool(self.open))
    @rule(data=st.data(), how=st.sampled_from(["done", "done", "failed", "timeout", "older", "progress"]))
    def answer(self, data: st.DataObject, how: str) -> None:
        action = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        self._pass(0.1)
        if how == "progress":
            if isinstance(action, TriggerCheckpoint):
                self._send(
                    CheckpointProgress(
                        at_s=self.now_s,
                        trainer=action.trainer,
                        action_id=action.id,
                        stage="writing",
                        eta_s=5.0,
                        paused=True,
                    )
                )
            return
        if how not in ("failed", "timeout"):
            self._done(action, older=how == "older")
        else:
            del self.open[action.id]
            if how == "timeout":  # It may have arrived for all that.
                self._carry_out(action)
            self._send(Failed(at_s=self.now_s, action=action, took_s=1.0, reason="refused", timed_out=how == "timeout"))

    @rule(alive=st.booleans(), name=st.sampled_from(["llm", "a", "new"]), estimate=st.sampled_from([None, 3.0, 1e9]))
    def see_trainer(self, alive: bool, name: str, estimate: float | None) -> None:
        if not alive:
            self.marks -= {("paused", name), ("stopped", name)}
        seen = TrainerSeen(at_s=self.now_s, trainer=name, alive=alive, checkpoint_s=estimate)
        self._send(replace(seen, conduct=Conduct.CONTINUE if estimate == 1e9 else Conduct.PAUSE, durable_age_s=60.0))

    @rule(name=st.sampled_from(["llm", "a"]), paused=st.booleans())
    def see_pause(self, name: str, paused: bool) -> None:
        self.persons |= {name} if paused else set()
        self._send(TrainerSeen(at_s=self.now_s, trainer=name, alive=True, conduct=Conduct.PAUSE, paused=paused))

    @rule(
        source=st.sampled_from([OwnSource.BMC, OwnSource.PDU, OwnSource.GPU]),
        watts=st.sampled_from([1500.0, 1510.0, 1490.0, 500.0, 505.0, -1.0, 9000.0, math.nan, math.inf]),
        seconds=st.sampled_from([0.0, 1.0, 5.0]),
    )
    def measure(self, source: OwnSource, watts: float, seconds: float) -> None:
        self._pass(seconds)
        self._send(OwnLoad(at_s=self.now_s, source=source, watts=watts))

    @rule(
        what=st.sampled_from(
            ["abort", "maintenance", "maintenance_off", "stop", "drill", "drill_stop", "checkpoint", "recover"]
        )
    )
    def operate(self, what: str) -> None:
        event: Event = Abort(at_s=self.now_s, who="x")
        if what == "checkpoint":
            event = CheckpointNow(at_s=self.now_s, who="x")
        elif what == "recover":
            event = RecoverNow(at_s=self.now_s, who="x")
        elif what == "drill":
            event = StartDrill(at_s=self.now_s, who="x", scopes=("full",))
        elif what == "drill_stop":
            event = StopDrill(at_s=self.now_s, who="x")
        if what.startswith("maintenance"):
            until_s = self.now_s + (0.0 if what.endswith("off") else 30.0)
            event = SetMaintenance(at_s=self.now_s, until_s=until_s, reason="y", who="x")
        elif what == "stop":
            event = ForeignStop(at_s=self.now_s, host_stopping=True)
        self._send(event)

    @rule()
    def forget(self) -> None:
        """Start again in the same boot, with a journal that is lost."""
        self._pass(3.0)
        self.open = {}
        self.is_forgotten = True
        self._take(restore(self.policy, None, self.now_s))
        assert isinstance(self.state.phase, Online)

    @rule(new_boot=st.booleans(), gap=st.sampled_from([None, 5.0, 4000.0, -1e6, 1e12]), heard=st.booleans())
    def restart(self, new_boot: bool, gap: float | None, heard: bool) -> None:
        before_s, boot = self.now_s, self.policy.boot_id
        in_flight = tuple(self.open.values())
        self.open = {}
        for action in in_flight if heard else ():  # Carried out, and the daemon never hears of it.
            self._carry_out(action)
        if new_boot:
            self.marks &= {("marked", "")}
            self.boots += 1
            self.policy = replace(self.policy, boot_id=f"{self.boots:08d}-boot")
            self.now_s = 20.0
            in_flight = ()
        else:
            self._pass(3.0)
        stored = Stored(state=self.state, boot_id=boot, at_s=before_s, gap_s=gap, in_flight=in_flight)
        was = self.state.phase
        answer = restore(self.policy, stored, self.now_s)
        if new_boot:
            assert not isinstance(answer.state.phase, Shutdown), "a latch of another boot never powers off"
            assert not any(isinstance(action, PowerOff) for action in answer.actions)
        else:
            assert type(answer.state.phase) is type(was), "a restart within a boot goes on in the same phase"
        self.ids -= {action.id for action in answer.actions} & {action.id for action in in_flight}
        self._take(answer)

    @precondition(lambda self: not self.is_calm)
    @rule(outage=st.sampled_from([0, 0, 90]))
    def calm(self, outage: int) -> None:
        """Utility is there and every order is carried out: the host and its training are as if nothing had been."""
        self.ride(readings=outage, on_battery=True, load=75.0, gauge=1.0, answering=True)
        self.is_calm, self.dark = True, set()
        if any(each.kept for each in self.state.armed):  # Another program's shutdown ends the daemon.
            self.restart(new_boot=False, gap=None, heard=True)
        self.network(up=True)
        for seconds in (*[2.0] * 9, 700.0, *[2.0] * 9, 4000.0, *[2.0] * 4):
            if isinstance(self.state.phase, Shutdown) and self.policy.powers_off:
                self.restart(new_boot=True, gap=100.0, heard=True)
            self._pass(seconds)
            self.charge = 100.0
            for action in tuple(self.open.values()):
                if action.id in self.open:
                    self._done(action)
            self._read_all(45.0, 4.0)
            for each in self.state.trainers if seconds != 2.0 or not int(self.now_s) % 3 else ():
                seen = TrainerSeen(at_s=self.now_s, trainer=each.name, alive=True, conduct=each.conduct, step=9)
                self._send(replace(seen, paused=("paused", each.name) in self.marks, durable_age_s=60.0))
        state = self.state
        assert isinstance(state.phase, Online)
        assert (state.drill, state.owed, state.maintenance) == (None, (), None)
        left = {(mark, name) for mark, name in self.marks if name not in self.persons}
        assert self.is_forgotten or not left, "what was paused, stopped, lowered or marked is so no more"

    # --- Turning the crank -------------------------------------------------------------------------------------------

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        rate = -100.0 / 360.0 if self.dark else 100.0 / 28800.0
        self.charge = min(100.0, max(0.0, self.charge + rate * seconds))

    def _send(self, event: Event) -> None:
        before = self.state
        answer = step(self.policy, before, event)
        assert step(self.policy, before, event) == answer, "same state and event, same answer"
        if self.policy.feeds:
            invariants.check_step(self.policy, before, event, answer)
        else:
            check_step(self.policy, before, event, answer)
        self._take(answer)

    def _read_all(self, load: float, gauge: float) -> None:
        for ups in self.upses:
            self._send(
                Reading(
                    at_s=self.now_s,
                    ups=ups,
                    source="snmp",
                    output_source=OutputSource.BATTERY if ups in self.dark else OutputSource.UTILITY,
                    charge_pct=self.charge,
                    load_pct=load,
                    runtime_s=gauge * 360.0 * self.charge / 100.0,
                )
            )

    def _done(self, action: Action, *, older: bool = False) -> None:
        del self.open[action.id]
        self._carry_out(action)
        detail = (("step", 7), ("at_paused_step", not older), ("paused", True), ("verified", True))
        self._send(Done(at_s=self.now_s, action=action, took_s=1.0, detail=detail))

    def _carry_out(self, action: Action) -> None:
        """Enter what an order leaves behind in the world, or takes away."""
        mark, stands = MARKS.get(type(action), ("", False))
        name = getattr(action, "trainer", "")
        if isinstance(action, TerminateTrainer):
            self.marks -= {("paused", name), ("stopped", name)}
        elif stands and getattr(action, "after", Conduct.PAUSE) is not Conduct.CONTINUE:
            self.marks.add((mark, name))
        elif not stands:
            self.marks.discard((mark, name))

    def _spares_who_obeyed(self, answer: Step) -> None:
        """On a shared UPS nobody is signalled but by this host's own draw, and not against what it shows of a pause."""
        for action in answer.actions:
            if self.policy.shared is not None and isinstance(action, StopTrainer | TerminateTrainer):
                fall = own.fall(self.policy, replace(answer.state, owed=()), self.now_s)  # without this signal itself
                assert fall is not None
                assert fall.stays_high
                trainer = next(t for t in answer.state.trainers if t.name == action.trainer)
                assert fall.contradicts_pause or not trainer.paused

    def _take(self, answer: Step) -> None:
        self._spares_who_obeyed(answer)
        self.state = kept(answer.state)
        for action in answer.actions:
            assert action.id not in self.ids, "an action's id is never used twice"
            self.ids.add(action.id)
            if not isinstance(action, PollNow):
                self.open[action.id] = action

    @invariant()
    def a_spent_battery_is_never_sat_on(self) -> None:
        """Never stay on past the deadline."""
        state = getattr(self, "state", None)
        if state is not None:
            check_spent_battery(state, self.now_s)


TestOutages = Outages.TestCase
TestOutages.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_table_is_whole() -> None:
    """Every phase can be left, every phase but online is reached, and only another boot ends a shutdown for good."""
    phases = {Online, EmergencyCheckpoint, Holding, Shutdown, Recovery} | {source for source, _ in TABLE}
    assert {source for source, _ in TABLE} == phases
    assert set(TABLE.values()) == phases
    assert {cause for source, cause in TABLE if source is Shutdown} == {Cause.NEXT_BOOT, Cause.REHEARSED}
    assert {cause for _, cause in TABLE} == set(Cause)
