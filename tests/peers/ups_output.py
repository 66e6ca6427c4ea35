"""A UPS whose output can be ordered off after a time, and a card that takes such orders.

If utility returns during the countdown, UPSes differ, and that strands hosts: the output goes off and on all the same
(cycles), stays on (aborts), or goes off and stays off (stays_off).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from powerguard.clock import Clock
from powerguard.sim.snmp_values import SimValue, gauge, integer, octets, oid, timeticks
from powerguard.sim.ups import APC, SimUps, UpsBattery

Returns = Literal["cycles", "aborts", "stays_off"]

U: Final = "1.3.6.1.2.1.33.1"
XUPS: Final = "1.3.6.1.4.1.534.1"
_SHUTDOWN_TYPE, _SHUTDOWN, _STARTUP, _REBOOT = (f"{U}.8.{number}.0" for number in range(1, 5))
_RESTART = f"{U}.8.5.0"
_SHED, _OFF_DELAY, _ON_DELAY = f"{XUPS}.9.6.0", f"{XUPS}.9.1.0", f"{XUPS}.9.2.0"
_APC_OFF, _APC_RETURN, _APC_REBOOT = f"{APC}.5.2.10.0", f"{APC}.5.2.9.0", f"{APC}.6.2.2.0"
_APC_TAKES_S: Final = (0, 20, 60, 120, 180, 240, 300, 600)
"""A value between two of them counts as the larger one, one beyond the last as that (PowerNet-MIB)."""
WRONG_VALUE: Final = 10
"""RFC 3416 section 3."""


@dataclass(slots=True)
class SimOutput:
    """The output by itself; its owner passes the time and whether utility is there (`look`).

    off_at_s: when it goes off. start_at_s: a countdown to on by itself. on_after_s: from utility's return to on.
    restart: whether it comes back at all. cuts: how often it went off.
    """

    returns: Returns = "cycles"
    on: bool = True
    restart: bool = True
    on_after_s: float = 0.0
    off_at_s: float | None = None
    start_at_s: float | None = None
    cuts: int = 0
    _on_at_s: float | None = None
    _fell_on_battery: bool = False
    _utility: bool = True

    def look(self, now_s: float, *, utility: bool) -> None:
        """Let time and utility have come; called at every change of either."""
        if utility and not self._utility and self.off_at_s is not None and self.returns == "aborts":
            self.off_at_s = self.start_at_s = None
        if self.off_at_s is not None and now_s >= self.off_at_s:
            self.on, self.cuts = False, self.cuts + 1
            self._fell_on_battery = not utility
            self._on_at_s = self.off_at_s + self.on_after_s if utility else None
            self.off_at_s = None
        if not self.on and utility and not self._utility:
            self._on_at_s = now_s + self.on_after_s
        self._utility = utility
        by_itself = self.restart and (self._fell_on_battery or self.returns == "cycles")
        if not self.on and utility and by_itself and self._on_at_s is not None and now_s >= self._on_at_s:
            self.on = True
        if self.start_at_s is not None and now_s >= self.start_at_s and utility:
            self.start_at_s = None
            self.on = self.on or self.returns != "stays_off"

    def order(self, now_s: float, *, off_in_s: float | None, start_in_s: float | None = None) -> None:
        """Order it off, or (None) call that off. start_in_s: when it is to start by itself, also from now."""
        self.off_at_s = None if off_in_s is None else now_s + off_in_s
        self.start_at_s = None if start_in_s is None else now_s + start_in_s

    def off_in_s(self, now_s: float) -> float | None:
        """Return the seconds left until it goes off."""
        return None if self.off_at_s is None else max(0.0, self.off_at_s - now_s)


class SwitchedUps(SimUps):
    """A UPS with such an output; it draws nothing while that is off."""

    def __init__(
        self,
        battery: UpsBattery,
        *,
        clock: Clock,
        load: Callable[[], float],
        output: SimOutput | None = None,
        **more: Any,  # noqa: ANN401 - as SimUps
    ) -> None:
        self.output = SimOutput() if output is None else output
        super().__init__(battery, clock=clock, load=lambda: load() if self.output.on else 0.0, **more)

    def look(self) -> None:
        """Let physics catch up: until the output goes off the load draws, from then on nothing does."""
        off_at_s = self.output.off_at_s
        if off_at_s is not None and self._at_s < off_at_s < self._clock():
            self._look(off_at_s)
        super().look()

    def _look(self, now_s: float) -> None:
        alive, was_on = self.alive, self.output.on
        super()._look(now_s)
        if not was_on:
            self.alive = alive
        self.output.look(now_s, utility=self._utility)


@dataclass(slots=True)
class SimCard:
    """The objects by which a card is ordered to switch the output: UPS-MIB, Eaton's and APC's, with the faults of each.

    refuses: objects whose SET is refused, with the error status. ignores: SETs are taken, and nothing happens. stuck: a
    countdown is shown, and does not run. one: a countdown to off ends the one to on. most_s: a longer delay is cut down
    to it, in silence. lacks: how the objects begin that the card does not have. sets: every SET that came, in order.
    apc_s: off delay and return delay, which APC's card keeps and shows, where it shows no countdown. more: further
    objects, that only stand there.
    """

    output: SimOutput
    clock: Callable[[], float]
    utility: Callable[[], bool] = lambda: True
    refuses: dict[str, int] = field(default_factory=dict)
    ignores: bool = False
    stuck: bool = False
    one: bool = False
    most_s: int | None = None
    shutdown_type: int = 1
    lacks: frozenset[str] = frozenset()
    apc_s: list[int] = field(default_factory=lambda: [20, 0])
    more: dict[str, SimValue] = field(default_factory=dict)
    sets: list[tuple[str, object]] = field(default_factory=list)

    def look(self) -> None:
        """Let time have come."""
        self.output.look(self.clock(), utility=self.utility())

    def values(self) -> dict[str, SimValue]:
        """Return what the card answers."""
        self.look()
        now_s = self.clock()
        off_s, start_at_s = self.output.off_in_s(now_s), self.output.start_at_s
        if self.stuck and self.sets:
            numbers = [value for name, value in self.sets if name in {_SHUTDOWN, _SHED} and isinstance(value, int)]
            off_s = float(numbers[-1]) if numbers else None
        left = -1 if off_s is None else max(1, int(off_s))
        source = 3 if self.utility() else 5
        given = {
            "1.3.6.1.2.1.1.1.0": octets("UPS card (simulated by powerguard)"),
            "1.3.6.1.2.1.1.2.0": oid("1.3.6.1.2.1.33"),
            f"{U}.2.1.0": integer(2),
            f"{U}.2.3.0": integer(20),
            f"{U}.2.4.0": integer(97),
            f"{U}.4.1.0": integer(source),
            _SHUTDOWN_TYPE: integer(self.shutdown_type),
            _SHUTDOWN: integer(left),
            _STARTUP: integer(-1 if start_at_s is None else max(1, int(start_at_s - now_s))),
            _REBOOT: integer(-1),
            _RESTART: integer(1 if self.output.restart else 2),
            f"{XUPS}.2.1.0": integer(1200),
            f"{XUPS}.2.4.0": integer(97),
            f"{XUPS}.4.5.0": integer(source),
            f"{APC}.2.2.1.0": gauge(97),
            f"{APC}.2.2.3.0": timeticks(120_000),
            f"{APC}.4.1.1.0": integer(2 if self.utility() else 3),
            _APC_OFF: timeticks(100 * self.apc_s[0]),
            _APC_RETURN: timeticks(100 * self.apc_s[1]),
            _APC_REBOOT: integer(1),
            _SHED: integer(left),
            _OFF_DELAY: integer(-1),
            _ON_DELAY: integer(-1),
        }
        given |= self.more
        return {name: value for name, value in given.items() if not name.startswith(tuple(self.lacks) or ("-",))}

    def take(self, name: str, value: SimValue) -> bool | int:
        """Take one SET: True, False where the object is not writable, or an error status."""
        self.look()
        number = value.content
        self.sets.append((name, number))
        if name in self.refuses:
            return self.refuses[name]
        if not isinstance(number, int) or name not in self.values():
            return False
        if self.ignores or self.stuck:
            return True
        return self._obey(name, number)

    def _obey(self, name: str, number: int) -> bool | int:
        now_s = self.clock()
        output = self.output
        if self.most_s is not None and name in {_SHUTDOWN, _SHED}:
            number = min(number, self.most_s)
        if name == _RESTART:
            output.restart = number == 1
        elif name == _SHUTDOWN_TYPE:
            self.shutdown_type = number
        elif name == _STARTUP:
            output.start_at_s = None if number < 0 else now_s + number
        elif name in {_SHUTDOWN, _OFF_DELAY}:
            output.off_at_s = None if number < 0 or (name == _OFF_DELAY and number == 0) else now_s + number
            output.start_at_s = None if self.one else output.start_at_s
        elif name == _SHED:
            if output.off_at_s is not None:
                return WRONG_VALUE
            output.off_at_s = now_s + number
        elif name in {_APC_OFF, _APC_RETURN}:
            self.apc_s[name == _APC_RETURN] = next((each for each in _APC_TAKES_S if 100 * each >= number), 600)
        elif name == _APC_REBOOT:
            output.off_at_s, output.on_after_s = now_s + self.apc_s[0], float(self.apc_s[1])
        elif name != _ON_DELAY:
            return False
        return True
