"""The simulated output: what each kind of UPS does when utility returns, before, during and after the cut."""

from typing import Literal

import pytest

from powerguard.sim.ups import UpsBattery
from tests.peers.ups_output import SimOutput, SwitchedUps

Returns = Literal["cycles", "aborts", "stays_off"]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ups_with(
    returns: Returns, *, on_after_s: float = 5.0, restart: bool = True
) -> tuple[Clock, SwitchedUps, SimOutput]:
    """Return a UPS on battery that was told to be off in 60 s; a full battery lasts 300 s."""
    clock = Clock()
    output = SimOutput(returns=returns, on_after_s=on_after_s, restart=restart)
    ups = SwitchedUps(UpsBattery(runtime=((1.0, 300.0),)), clock=clock, load=lambda: 1.0, output=output)
    ups.utility = False
    output.order(clock(), off_in_s=60.0)
    return clock, ups, output


def after(clock: Clock, ups: SwitchedUps, seconds: float) -> bool:
    clock.now_s += seconds
    ups.look()
    return ups.output.on


@pytest.mark.parametrize("returns", ["cycles", "aborts", "stays_off"])
def test_after_a_long_outage_all_come_back(returns: Returns) -> None:
    """With auto restart, that is; and what is off draws nothing."""
    clock, ups, output = ups_with(returns)
    assert after(clock, ups, 59.0)
    assert not after(clock, ups, 2.0)
    left = ups.charge
    assert not after(clock, ups, 3600.0)
    assert ups.alive
    assert left == pytest.approx(0.8, abs=0.01)
    ups.utility = True
    assert not after(clock, ups, 4.0)
    assert after(clock, ups, 2.0)
    assert output.cuts == 1


@pytest.mark.parametrize(
    ("returns", "cuts", "back"), [("cycles", 1, True), ("aborts", 0, True), ("stays_off", 1, False)]
)
def test_utility_returns_while_it_counts_down(returns: Returns, cuts: int, *, back: bool) -> None:
    """Where the three differ, and where a host that has halted is stranded by the last two."""
    clock, ups, output = ups_with(returns)
    after(clock, ups, 30.0)
    ups.utility = True
    after(clock, ups, 31.0)
    assert output.on is (cuts == 0)
    assert after(clock, ups, 3600.0) is back
    assert output.cuts == cuts


def test_without_auto_restart_none_comes_back() -> None:
    clock, ups, _ = ups_with("cycles", restart=False)
    after(clock, ups, 61.0)
    ups.utility = True
    assert not after(clock, ups, 86400.0)


@pytest.mark.parametrize("back_after_s", [30.0, 61.0, 120.0, 500.0])
def test_a_second_countdown_brings_back_what_auto_restart_would_not(back_after_s: float) -> None:
    """RFC 1628's upsStartupAfterDelay: it ends with utility there, or waits for it."""
    clock, ups, output = ups_with("cycles", restart=False)
    output.order(clock(), off_in_s=60.0, start_in_s=90.0)
    after(clock, ups, back_after_s)
    ups.utility = True
    after(clock, ups, 61.0)
    assert after(clock, ups, 60.0)
    assert output.cuts == 1


def test_it_can_be_called_off() -> None:
    clock, ups, output = ups_with("cycles")
    after(clock, ups, 59.0)
    assert output.off_in_s(clock()) == 1.0
    output.order(clock(), off_in_s=None)
    assert after(clock, ups, 30.0)
    assert output.off_in_s(clock()) is None
