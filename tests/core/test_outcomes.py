"""Outcomes are read in one place: what is not reported, or is of another type, counts as not reported."""

import pytest

from powerguard.core.model import events
from powerguard.core.model.actions import Action, Scalar
from powerguard.core.model.events import Done, Failed

ACTION = Action(id="a", by_s=1.0)


def done(**detail: Scalar) -> Done:
    return Done(at_s=1.0, action=ACTION, took_s=0.1, detail=tuple(detail.items()))


@pytest.mark.parametrize(
    ("detail", "changes"),
    [
        ({}, {}),
        ({"step": 7}, {"step": 7}),
        ({"step": "7", "verified": "yes", "paused": 1, "confirmed": None, "tier": None}, {}),
        ({"confirmed": False, "at_paused_step": False}, {"confirmed": False, "older": True}),
        (
            {"at_paused_step": True, "verified": True, "paused": True, "tier": "s3"},
            {"verified": True, "paused": True, "tier": "s3"},
        ),
        ({"dry_run": True}, {"recorded": True}),
    ],
)
def test_a_checkpoint(detail: dict[str, Scalar], changes: dict[str, Scalar]) -> None:
    """What says nothing is confirmed, of the paused step, and to the local tier; verified only if it says so."""
    found = events.checkpoint_done(done(**detail))
    known: dict[str, Scalar] = {name: getattr(found, name) for name in found.__slots__}
    plain = {"step": None, "tier": "", "recorded": False, "confirmed": True, "older": False}
    assert known == {**plain, "paused": False, "verified": False, **changes}


def test_a_policy() -> None:
    failed = Failed(at_s=1.0, action=ACTION, took_s=0.1, reason="r", detail=(("restore", "always-off"),))
    assert events.policy_ensured(failed).restore == "always-off"
    found = events.policy_ensured(done(policy=1, verified="yes", restore=7, power_watts=300))
    assert (found.policy, found.verified, found.restore, found.power_watts) == (None, False, None, None)
    found = events.policy_ensured(done(policy="always-on", verified=True, power_watts=300.5))
    assert (found.policy, found.verified, found.restore, found.power_watts) == ("always-on", True, None, 300.5)


def test_a_power_on_method() -> None:
    assert events.power_on_armed(done(in_s=7, returns="cycles")) == events.PowerOnArmed(in_s=7, returns="cycles")
    assert events.power_on_armed(done(in_s="soon", returns=3)) == events.PowerOnArmed(in_s=None, returns="")
    assert events.power_on_disarmed(done()) == events.PowerOnDisarmed(disarmed=True, because="")
    assert events.power_on_disarmed(done(disarmed=False, because="b")) == events.PowerOnDisarmed(
        disarmed=False, because="b"
    )


@pytest.mark.parametrize(("value", "is_so"), [(True, True), (False, False), (None, False), (1, False), ("yes", False)])
def test_a_resume_and_a_dry_run(value: Scalar, *, is_so: bool) -> None:
    assert events.is_resumed(done(resumed=value)) is is_so
    assert events.is_recorded(done(dry_run=value)) is is_so
    assert not events.is_recorded(Failed(at_s=1.0, action=ACTION, took_s=0.1, reason="r"))
