"""What people, the host and the BMC tell the core, and what of it stays: a new battery, works, a stop, a read-back."""

from dataclasses import replace

import pytest

from powerguard.core.energy import needs
from powerguard.core.model.actions import EnsurePolicy, Level, Note, PowerOff, Scalar
from powerguard.core.model.events import Done, Failed, Measured
from powerguard.core.model.policy import BatteryModel, Health, TauPoint
from powerguard.core.model.state import Outage, Phase
from tests.core.play import Player, StoryResult

WORDS = "table=50:540,75:360,100:240 trainer=llm:pause:20"
READY = f"policy {WORDS}\n0..5 utility load=75 charge=100 runtime=360"


def note(result: StoryResult, event: str) -> Note:
    """The newest one of its kind."""
    return next(each for each in reversed(result.notes) if each.event == event)


def outage(phase: Phase) -> Outage:
    found = getattr(phase, "outage", None)
    assert isinstance(found, Outage)
    return found


def test_a_new_battery_is_not_judged_by_the_old_one() -> None:
    """Health and runtimes were the old one's; how fast the charger is was the UPS's, and stays."""
    player = Player()
    result = player.play(f"{READY}\n6 tick")
    old = BatteryModel(
        health=Health(share=0.5, error=0.05, depth=0.4, at_s=1.0, how="fall of the charge"),
        points=(TauPoint(load=0.75, tau_s=200.0, at_s=1.0),),
        recharge_s=12345.0,
    )
    battery = replace(result.state.battery, model=old, health=0.5, tau_point=(0.75, 200.0))
    result.state = replace(result.state, battery=battery)
    result = player.play("7 battery_replaced")
    assert result.state.battery.model == BatteryModel(recharge_s=12345.0, replaced_at_s=7.0)
    assert (result.state.battery.health, result.state.battery.tau_point) == (0.75, None)
    assert note(result, "battery_replaced").numbers == (("who", "alice"),)


@pytest.mark.parametrize("table", ["table=50:1540,75:1360,100:1240", ""])
def test_a_new_battery_in_an_outage_pauses_no_training(table: str) -> None:
    """Until its first reading no figure would be known, and training is paused where none is."""
    result = Player().play(
        f"policy {table} trainer=llm:pause:20\n0..5 utility load=75 charge=100 runtime=1360\n"
        "6..200 battery load=75 charge=80-0.1 runtime=1100-1.4\n200.2 battery_replaced\n200.8 tick\n"
        "201..205 battery load=75 charge=98-0.07 runtime=1320-1"
    )
    assert result.phase == "on_battery"
    assert result.state.battery.left == pytest.approx(0.735, abs=0.01), "of the new one, at the default health"


def test_works_end_at_their_time_and_the_journal_says_whose_they_were() -> None:
    result = Player().play(f"{READY}\n5 maintenance 10\n6..14 utility load=75 charge=100")
    assert result.state.maintenance is not None
    result = Player().play(f"{READY}\n5 maintenance 10\n6..15 utility load=75 charge=100")
    assert result.state.maintenance is None
    ended = note(result, "maintenance_ended")
    assert (ended.because, ended.numbers) == ("expired", (("who", "alice"),))


def test_how_long_the_host_took_is_kept_by_what_it_was() -> None:
    player = Player()
    player.play(f"{READY}\n6 tick")
    player.send(Measured(at_s=7.0, need="stop", seconds=42.0))
    player.send(Measured(at_s=8.0, need="boot", seconds=99.0))
    assert player.result is not None
    assert needs.samples(player.result.state.learned, "stop") == (42.0,)
    assert needs.samples(player.result.state.learned, "boot") == (99.0,)


@pytest.mark.parametrize(
    ("detail", "verified"), [({"verified": True}, True), ({"verified": False}, False), ({}, False)]
)
def test_only_a_policy_that_was_read_back_counts_as_verified(detail: dict[str, Scalar], *, verified: bool) -> None:
    """What the BMC took without showing it is not what it will do; the journal keeps all that was said."""
    player = Player()
    result = player.play(f"{READY}\n6..20 battery load=75 charge=98")
    (asked,) = result.ordered(EnsurePolicy)
    given = (("policy", "always-on"), *detail.items())
    player.send(Done(at_s=20.5, action=asked, took_s=0.1, detail=given))
    assert outage(result.state.phase).policy_verified is verified
    assert note(result, "policy_verified").numbers == given
    assert note(result, "policy_verified").level is Level.INFO


def test_a_power_off_that_was_refused_is_ordered_again_after_five_seconds() -> None:
    player = Player()
    result = player.play(f"{READY}\n5 trainer llm\n6..170 battery load=75 charge=100-0.5")
    assert result.phase == "shutdown"
    first = next(action for action in result.actions if isinstance(action, PowerOff))
    before = len(result.ordered(PowerOff))
    player.send(Failed(at_s=170.5, action=first, took_s=0.1, reason="refused"))
    result = player.play("175 tick")
    assert len(result.ordered(PowerOff)) == before, "not yet"
    result = player.play("175.5 tick")
    assert len(result.ordered(PowerOff)) == before + 1


def test_over_a_reboot_what_was_learned_keeps_its_age() -> None:
    """The clock begins anew: a health of 305 s ago is still one of 305 s ago, and so is a drop."""
    player = Player()
    result = player.play(f"{READY}\n5 learned llm=75:30\n6 tick")
    health = Health(share=0.7, error=0.05, depth=0.4, at_s=5.0, how="fall of the charge")
    model = replace(result.state.battery.model, health=health)
    result.state = replace(result.state, battery=replace(result.state.battery, model=model))
    result = player.play("10 reboot gap=300")
    assert result.state.battery.model.health == replace(health, at_s=5.0 - 6.0 - 300.0 + 10.0)
    assert dict(result.state.learned.pauses)["llm"].at_s == 5.0 - 6.0 - 300.0 + 10.0
