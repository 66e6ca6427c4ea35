"""Two real daemons on one UPS whose load is the sum of both hosts, each with its trainer; one pauses, one draws on.

The first host draws 500 W and 1000 W more in training; the second one draws 2400 W and never pauses. So the UPS's load
falls to 54 %, and not to 60 % of what it was, however well the first one obeys.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import pytest

from powerguard.clock import boottime_s
from powerguard.sim.demo.story import numbers
from tests.e2e.peers import Trainer
from tests.e2e.rig import Rig, rig
from tests.peers import nut
from tests.peers.sim_bmc import SimBmc

RATING_W: Final = 5400.0
IDLE_W, TRAINING_W, NEIGHBOUR_W = 500.0, 1000.0, 2400.0
RUNTIME: Final = ((0.54, 400.0), (0.72, 240.0))
RESERVE_S: Final = 87
SIGNALLED_S: Final = 35.0
"""Both signals came within 32 s of the order to pause, when the neighbour's load was taken for this host's."""


def _draws_w(trainer: Trainer) -> float:
    return IDLE_W + (0.0 if trainer.paused else TRAINING_W)


@contextlib.asynccontextmanager
async def hosts() -> AsyncIterator[tuple[Rig, Rig, SimBmc]]:
    """Two hosts on one simulated card. The first one has a BMC that measures what it draws."""
    obeys, draws_on = Trainer("llm"), Trainer("other")

    def load() -> float:
        return (_draws_w(obeys) + NEIGHBOUR_W) / RATING_W

    async with (
        rig(obeys, runtime=RUNTIME, load=load) as first,
        rig(draws_on, runtime=RUNTIME, card=False) as second,
        SimBmc("powerguard", "of-the-tests") as bmc,
    ):
        assert first.agent is not None
        second.ups = first.ups
        second.add_snmp(first.agent.port)
        second.settings["trainers"][0]["after"] = "continue"
        for each in (first, second):
            each.settings["ups"]["rack-a"]["rating_w"] = RATING_W
            each.settings["signals"] = {"kind": "helper", "socket": str(each.folder / "signal.sock")}
        first.settings["budget"] |= {"reserve_s": RESERVE_S, "paused_load": 0.6}
        password = first.secret("bmc-password", "of-the-tests")
        first.settings["bmc"] = {
            "kind": "ipmi-lan",
            "host": bmc.host,
            "port": bmc.port,
            "user": "powerguard",
            "password": password,
        }

        async def measure() -> None:
            for number in range(10_000):
                await bmc.set_watts(round(_draws_w(obeys)) + number % 7)
                await asyncio.sleep(1.0)

        measuring = asyncio.create_task(measure())
        try:
            yield first, second, bmc
        finally:
            measuring.cancel()
            await asyncio.wait((measuring,))


async def test_training_that_obeyed_is_spared_while_the_neighbour_draws_on() -> None:
    """Paused, held, and resumed in place when utility is back: neither GPU cap nor SIGSTOP nor SIGTERM was ordered."""
    outlet = {"ups.status": "OL", "outlet.7.realpower": str(NEIGHBOUR_W)}
    async with hosts() as (first, second, _), nut.upsd("pdu", values=outlet) as pdu:
        first.settings["ups"]["rack-a"]["shared"] = {"hosts": 2}
        outlets = {"kind": "nut", "host": "127.0.0.1", "port": pdu.port, "name": "pdu", "outlets": [7]}
        second.settings["ups"]["rack-a"]["shared"] = {"hosts": 2, "outlets": [outlets]}
        await first.start()
        await second.start()
        await second.status_shows(
            lambda status: (
                (status["own_load"] or {}).get("source") == "pdu" and status["own_load"]["watts"] == NEIGHBOUR_W
            ),
            "the outlet's watts",
        )
        await first.status_shows(lambda status: (status["own_load"] or {}).get("source") == "bmc", "the BMC's reading")
        first.ups.utility = False
        began = await first.phase("on_battery")
        assert numbers(began)["own_from"] == "bmc"
        paused = await first.phase("emergency_checkpoint")
        await first.phase("holding")
        await second.phase("on_battery")
        end_s = paused.at_s + SIGNALLED_S
        await first.until(lambda: boottime_s() >= end_s, "the signals' time to pass")
        assert first.ups.load == pytest.approx((IDLE_W + NEIGHBOUR_W) / RATING_W)
        first.ups.utility = True
        ended = await first.note("outage_ended")
        assert numbers(ended)["outcome"] == "resumed_in_place"
        for host in (first, second):
            assert host.actions("StopTrainer") == []
            assert host.actions("TerminateTrainer") == []
            assert host.offs() == []
            host.no_traceback()
        await first.until(lambda: first.trainers[0].resumed_at_s, "the trainer's resume")
        assert len(second.trainers[0].resumed_at_s) == 0


@pytest.mark.slow
async def test_without_the_setting_the_neighbours_load_is_taken_for_ours() -> None:
    """Shows that the test above can fail, and what the setting is for."""
    async with hosts() as (first, second, _):
        await first.start()
        await second.start()
        first.ups.utility = False
        await first.phase("emergency_checkpoint")
        await first.until(lambda: first.actions("StopTrainer"), "the signal that should not be")
        first.no_traceback()
