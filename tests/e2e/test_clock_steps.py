"""Somebody, or NTP, sets the wall clock in mid-outage: nothing that matters may notice.

CLOCK_MONOTONIC and CLOCK_BOOTTIME stay real, as they do on a real host.
"""

import pytest

from powerguard.clock import boottime_s
from tests.e2e.rig import BUSY_S, LONG, queued_s, rig
from tests.peers.faketime import faked
from tests.peers.snmp_agent import Fault

HOUR_S = 3600.0
LOST_S = 3 * 1.0 + 1.0 + BUSY_S
"""Three misses of 1 s each (asked twice, 0.5 s), the first of them not begun at once."""
TRAINING_S = 4.0
"""Before that the battery of this host has no reason to be given up."""


@pytest.mark.peer("faketime")
@pytest.mark.slow  # at each commit the loop meets steps of the clock in virtual time (tests/sim/test_looped_loop.py)
@pytest.mark.parametrize("step", ["-1h", "+1h"])
async def test_a_step_of_the_wall_clock_changes_no_deadline(step: str) -> None:
    """An hour back or forth: one outage, no poll lost, a silent card missed as soon as ever, the commit in time."""
    async with rig(runtime=LONG) as world:
        assert world.agent is not None
        clock = world.folder / "clock"
        clock.write_text("+0", encoding="ascii")
        await world.start(env=faked(clock))
        world.ups.utility = False
        before = await world.phase("on_battery")
        clock.write_text(step, encoding="ascii")
        asked = world.agent.requests
        await world.until(lambda: world.agent and world.agent.requests > asked + 1, "two more polls")
        status = await world.status()
        assert status is not None
        assert status["sources"][0]["up"]
        assert not world.notes("source_lost")
        assert world.process is not None
        silent_at_s, queued_before_s = boottime_s(), queued_s(world.process.pid)
        world.agent.fault = Fault.DROP
        lost = await world.note("source_lost")
        assert lost.at_s - silent_at_s - (queued_s(world.process.pid) - queued_before_s) < LOST_S
        off = await world.off()
        await world.note("power_off_accepted")
        assert world.ups.alive
        after = world.lines()[-1]
        moved_s = (after.wall - before.wall) - (after.at_s - before.at_s)
        assert abs(abs(moved_s) - HOUR_S) < 60.0, "the daemon's wall clock did step"
        (latched,) = world.notes("phase_changed", new="shutdown")
        assert before.at_s + TRAINING_S < latched.at_s <= off.at_s
        world.one_outage()
        world.no_traceback()
