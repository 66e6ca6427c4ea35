"""How fast the core decides: a reading on utility, and one on battery with the whole plan."""

import time

from bench.figure import Figure
from powerguard.core.comeback.recovery import restore
from powerguard.core.decide.machine import step
from powerguard.core.model.actions import Conduct
from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.policy import Policy, TrainerPolicy
from powerguard.core.model.state import State, phase_name

_POLICY = Policy(
    boot_id="bench000-boot",
    ups="ups",
    runtime_table=((0.50, 5400.0), (0.75, 3600.0), (1.00, 2400.0)),
    trainers=tuple(TrainerPolicy(name=f"t{i}", conduct=Conduct.PAUSE, disk=f"d{i % 2}") for i in range(4)),
)


def _readings(source: OutputSource, n: int, from_s: float, every_s: float) -> list[Reading]:
    battery = source is OutputSource.BATTERY
    return [
        Reading(
            at_s=from_s + i * every_s,
            ups="ups",
            source="snmp",
            output_source=source,
            charge_pct=100.0 if not battery else 100.0 - i * every_s / 72.0,
            load_pct=75.0,
            runtime_s=3600.0 if not battery else 3600.0 - i * every_s,
            on_battery_s=0.0 if not battery else 1.0 + i * every_s,
        )
        for i in range(n)
    ]


def _micros(state: State, readings: list[Reading]) -> tuple[float, State]:
    began = time.process_time()  # of this process: what else the machine does is not the core's
    for reading in readings:
        state = step(_POLICY, state, reading).state
    return (time.process_time() - began) / len(readings) * 1e6, state


def run(*, quick: bool) -> list[Figure]:
    n, runs = (2000, 3) if quick else (50_000, 9)
    start = restore(_POLICY, None, 0.0).state
    utility, battery = [], []
    for _ in range(runs):
        micros, online = _micros(start, _readings(OutputSource.UTILITY, n, 10.0, 1.0))
        utility.append(1e6 / micros)
        _, riding = _micros(online, _readings(OutputSource.BATTERY, 5, 20.0 + n, 1.0))
        micros, after = _micros(riding, _readings(OutputSource.BATTERY, 500, 25.0 + n, 1.0))
        assert phase_name(after.phase) == "on_battery", phase_name(after.phase)
        battery.append(micros)
    return [
        Figure(name="steps on utility", unit="steps/s", values=tuple(utility)),
        Figure(name="step on battery, full plan, 4 trainers", unit="us", values=tuple(battery)),
    ]
