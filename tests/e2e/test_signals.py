"""What the service manager and people do to the daemon: SIGTERM in every state, SIGHUP with good and bad settings."""

import json
import signal

from powerguard.sim.demo.story import numbers
from tests.e2e.peers import Trainer
from tests.e2e.rig import ENDLESS, PAUSED, ROOMY, TRAINING, Rig, rig
from tests.peers.sim_bmc import SimBmc

PROMPT_S = 3.0
"""Less than the 5 s that a BMC may take."""


async def test_sigterm_on_utility_is_prompt_and_clean() -> None:
    """An ordinary stop: no outage, no order, nothing left behind, exit 0."""
    async with rig() as world:
        await world.start()
        await world.signal(signal.SIGTERM)
        assert await world.ended() < PROMPT_S
        assert world.process is not None
        assert world.process.returncode == 0
        assert world.logged("daemon_stopped", phase="online")
        assert not world.socket.exists()
        assert world.actions("EnsurePolicy") == []
        world.no_traceback()


async def test_sigterm_on_battery_is_recorded_and_the_same_boot_goes_on() -> None:
    """Somebody stops the daemon in an outage: recorded, the BMC is asked for the return, and a restart goes on."""
    async with rig(Trainer(write_s=1.0), runtime=ROOMY) as world, SimBmc("powerguard", "of-the-tests") as bmc:
        world.settings["bmc"] = {
            "kind": "ipmi-lan",
            "host": bmc.host,
            "port": bmc.port,
            "user": "powerguard",
            "password": world.secret("bmc-password", "of-the-tests"),
        }
        await world.start()
        await world.until(lambda: world.logged("policy_verified"), "the policy to be ensured at start")
        asked_before = len(bmc.heard)
        world.ups.utility = False
        await world.phase("on_battery")
        await world.signal(signal.SIGTERM)
        await world.ended()
        assert world.process is not None
        assert world.process.returncode == 0
        before = world.one_outage()
        (seen,) = world.notes("foreign_stop_seen")
        assert numbers(seen)["phase"] == "on_battery"
        asked = [line for line in world.actions("EnsurePolicy") if line.at_s >= seen.at_s]
        assert len(asked) == 1
        found = [line.event for line in world.lines() if line.action == asked[0].action]
        # On a busy machine the BMC may answer after the daemon's time to end; the next one asks again.
        assert found in (["EnsurePolicy", "Done"], ["EnsurePolicy"])
        assert len(bmc.heard) > asked_before
        await world.start(wait=False)
        await world.off()
        assert world.one_outage() == before
        assert world.notes("outage_continued", phase="on_battery")
        assert [order.event for order in world.trainers[0].orders] == [before]
        assert world.ups.alive
        world.no_traceback()


async def test_sigterm_past_the_commit_ends_at_once() -> None:
    """systemd stops the daemon in the shutdown that it ordered itself: it must not be what the host waits for."""
    async with rig() as world:
        await world.start()
        world.ups.utility = False
        await world.note("power_off_accepted")
        await world.signal(signal.SIGTERM)
        assert await world.ended() < PROMPT_S
        assert world.process is not None
        assert world.process.returncode == 0
        # A reading that a busy machine delays makes the daemon order again, with less time; SIGTERM orders nothing.
        assert 1 <= len(world.offs()) <= 1 + len(world.notes("power_off_hastened"))
        assert world.notes("foreign_stop_seen") == []
        world.no_traceback()


async def test_sighup_takes_good_settings_and_refuses_bad_ones() -> None:
    """Good: in force at once. Bad: refused with file and line, told by a metric, and the old ones stand."""
    async with rig() as world:
        await world.start()
        world.settings["budget"]["reserve_s"] = 2
        await hang_up(world)
        await world.until(lambda: world.logged("settings_reloaded"), "the settings to be reloaded")
        await stop_takes(world, 3.0)
        await world.metric_becomes("powerguard_config_last_reload_successful", 1.0)

        good = dict(world.settings["budget"])
        world.settings["budget"] |= {"reserve_s": "two", "margin": 7}
        await hang_up(world)
        (refused,) = await world.until(lambda: world.logged("settings_refused"), "the settings to be refused")
        lines = world.config.read_text().splitlines()
        line = next(number for number, text in enumerate(lines, 1) if text.startswith("budget:"))
        assert f"{world.config}:{line}:" in refused["because"]
        assert "budget.reserve_s" in refused["because"]
        assert "budget.margin" in refused["because"]
        assert "Traceback" not in json.dumps(refused)
        await world.metric_becomes("powerguard_config_last_reload_successful", 0.0)
        await world.status_shows(
            lambda status: "settings_rejected" in [reason["name"] for reason in status["reasons"]], "the refusal"
        )
        await stop_takes(world, 3.0)

        world.settings["budget"] = good
        await hang_up(world)
        await world.until(lambda: len(world.logged("settings_reloaded")) == 2, "the settings to be reloaded")
        await world.metric_becomes("powerguard_config_last_reload_successful", 1.0)
        world.ups.utility = False
        await world.off()
        world.no_traceback()


async def test_sighup_is_refused_in_an_outage() -> None:
    """The rules do not change while the game is on; the outage goes on by the old ones."""
    async with rig(runtime=ENDLESS) as world:
        await world.start()
        world.ups.utility = False
        await world.phase("on_battery")
        world.settings["budget"]["reserve_s"] = 1000
        await hang_up(world)
        (refused,) = await world.until(lambda: world.logged("settings_refused"), "the settings to be refused")
        assert "on_battery" in refused["because"]
        await stop_takes(world, 2.0)
        world.wear(((PAUSED, 400.0), (TRAINING, 20.0)))
        await world.phase("holding")
        world.ups.utility = True
        ended = await world.note("outage_ended")
        assert numbers(ended)["outcome"] == "resumed_in_place"
        assert world.offs() == []
        world.no_traceback()


async def hang_up(world: Rig) -> None:
    """Write the settings anew and tell the daemon."""
    world.write_settings()
    await world.signal(signal.SIGHUP)


async def stop_takes(world: Rig, stop_s: float) -> None:
    """The settings in force say so."""
    await world.status_shows(lambda status: status["budget"]["stop_s"] == stop_s, f"a stop of {stop_s} s")
