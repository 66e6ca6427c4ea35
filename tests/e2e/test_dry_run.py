"""mode: dry-run, for the cautious: the whole decision, told and journalled, and nobody is touched."""

from powerguard.sim.demo.story import numbers
from tests.e2e.rig import LONG, rig
from tests.peers.sim_bmc import SimBmc


async def test_an_outage_is_rehearsed() -> None:
    """Nothing is called at trainer or host, the BMC is only read; when utility returns, the daemon is back online."""
    async with rig(runtime=LONG) as world, SimBmc("powerguard", "of-the-tests", policy="always-off") as bmc:
        password = world.secret("bmc-password", "of-the-tests")
        world.settings["bmc"] = {
            "kind": "ipmi-lan",
            "host": bmc.host,
            "port": bmc.port,
            "user": "powerguard",
            "password": password,
        }
        world.settings["mode"] = "dry-run"
        await world.start()
        status = await world.status()
        assert status is not None
        assert (status["mode"], status["ready"]) == ("dry-run", False)
        assert "dry_run" in [reason["name"] for reason in status["reasons"]]
        await world.metric_becomes("powerguard_armed", 0.0)
        await world.until(lambda: world.logged("daemon_started", mode="dry-run"), "daemon_started")
        world.ups.utility = False
        await world.note("power_off_accepted", dry_run=True)
        world.ups.utility = True
        ended = await world.note("outage_ended")
        assert numbers(ended)["outcome"] == "rehearsed"
        moved = [numbers(line)["new"] for line in world.notes("phase_changed")]
        assert moved[-2:] == ["shutdown", "online"]
        (trainer,) = world.trainers
        assert (trainer.orders, trainer.resumed_at_s, trainer.paused) == ([], [], False)
        assert world.offs() == []
        assert bmc.policy == "always-off"
        assert set(bmc.heard) == {"status"}
        world.no_traceback()


async def test_the_command_line_disarms_whatever_the_settings_say() -> None:
    """`run --dry-run` on settings that say armed: told everywhere as a dry-run; a commit calls nobody."""
    async with rig() as world:
        await world.start("--dry-run")
        status = await world.status()
        assert status is not None
        assert status["mode"] == "dry-run"
        await world.metric_becomes("powerguard_armed", 0.0)
        world.ups.utility = False
        await world.note("power_off_accepted", dry_run=True)
        assert world.offs() == []
        assert world.trainers[0].orders == []
        world.no_traceback()
