"""Powering a host on through its BMC: ipmi_sim and sushy-emulator, which share no code with us, and our own Redfish."""

from pathlib import Path
from typing import Any

import pytest

from powerguard.clock import boottime_s
from powerguard.effectors.bmc.engine import BmcError
from powerguard.effectors.bmc.helper import ALLOWED
from powerguard.effectors.bmc.ipmi import POWER_ON, Failure
from powerguard.effectors.bmc.power import power_of
from powerguard.effectors.options import BmcOptions
from tests.peers.ipmi import IpmiSim, options, until_heard
from tests.peers.redfish import Certificate, Faults, OwnRedfish, SushyEmulator, make_certificate, redfish_options


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def on(options: BmcOptions, limit_s: float = 30.0) -> None:
    await power_of(options).power_on(boottime_s() + limit_s)


async def is_on(options: BmcOptions) -> bool | None:
    return (await power_of(options).status(boottime_s() + 30.0)).power_on


@pytest.mark.peer("ipmi_sim")
async def test_ipmi_powers_on_and_does_nothing_to_what_is_on(tmp_path: Path) -> None:
    for heard in until_heard(["power 1"]):
        async with IpmiSim(plugin=False) as bmc:
            given = options(tmp_path, bmc.port, bmc.user, bmc.password)
            bmc.switch(on=False)
            assert await is_on(given) is False
            await on(given)
            heard.extend(bmc.orders)
            assert await is_on(given) is True
            await on(given)
            assert set(bmc.orders) == {"power 1"}
            wrong = options(tmp_path, bmc.port, bmc.user, "another password")
            with pytest.raises(BmcError, match="login refused") as caught:
                await on(wrong)
            assert caught.value.failure is Failure.AUTH


async def test_ipmi_that_is_dead_ends_in_time(tmp_path: Path) -> None:
    began_s = boottime_s()
    with pytest.raises(BmcError, match="port 1: that UDP port is closed"):
        await on(options(tmp_path, 1, "sentinel", "secret"), 30.0)
    assert boottime_s() - began_s < 31.0


async def test_sushy_emulator_powers_on(tmp_path: Path, certificate: Certificate) -> None:
    """Not ours: the action is found, and takes what we say. Its fake driver obeys 1 to 11 s later, as boards do."""
    async with SushyEmulator(tmp_path, certificate, systems=1, power="Off") as bmc:
        given = redfish_options(tmp_path, bmc.port, certificate)
        assert await is_on(given) is False
        await on(given)


async def test_redfish_powers_on(tmp_path: Path, certificate: Certificate) -> None:
    async with OwnRedfish(certificate) as bmc:
        bmc.system["PowerState"] = "Off"
        given = redfish_options(tmp_path, bmc.port, certificate)
        assert await is_on(given) is False
        await on(given)
        assert (bmc.resets, await is_on(given)) == (["On"], True)
        bmc.reset["ResetType@Redfish.AllowableValues"] = ["ForceOn", "ForceOff"]
        await on(given)
        del bmc.reset["ResetType@Redfish.AllowableValues"]
        await on(given)
        assert bmc.resets == ["On", "ForceOn", "On"]


async def test_redfish_powers_on_without_its_bios(tmp_path: Path, certificate: Certificate) -> None:
    """A board without a policy, whose BIOS resource needs a license: neither matters here, and it is not asked for."""
    async with OwnRedfish(certificate, shape="none", faults=Faults(bios=403)) as bmc:
        bmc.system["PowerState"] = "Off"
        given = redfish_options(tmp_path, bmc.port, certificate)
        assert await is_on(given) is False
        heard = len(bmc.heard)
        await on(given)
        assert bmc.resets == ["On"]
        assert not any(line.endswith("/Bios") for line in bmc.heard[heard:])


@pytest.mark.parametrize("state", ["PoweringOff", "PoweringOn", "Unknown", None])
async def test_redfish_of_a_host_between_on_and_off_says_neither(
    tmp_path: Path, certificate: Certificate, state: str | None
) -> None:
    """A host whose stop takes minutes is PoweringOff: counted as off, it was given orders while it still stopped."""
    async with OwnRedfish(certificate) as bmc:
        bmc.system["PowerState"] = state
        assert await is_on(redfish_options(tmp_path, bmc.port, certificate)) is None


@pytest.mark.parametrize(
    ("reset", "always", "expected"),
    [
        ({"ResetType@Redfish.AllowableValues": ["ForceOff"]}, {}, "does not allow On or ForceOn"),
        ({"target": "https://elsewhere.example/"}, {}, "does not link to a path"),
        ({}, {"POST": 403}, "not permitted to this account"),
        ({}, {"POST": 400}, "refused"),
        ({}, {"POST": 302}, "redirects, which is not followed"),
    ],
)
async def test_redfish_that_refuses_says_so(
    tmp_path: Path, certificate: Certificate, reset: dict[str, Any], always: dict[str, int], expected: str
) -> None:
    async with OwnRedfish(certificate, faults=Faults(always=always)) as bmc:
        bmc.reset.update(reset)
        with pytest.raises(BmcError, match=expected):
            await on(redfish_options(tmp_path, bmc.port, certificate))
        assert bmc.resets == []
        bmc.system["Actions"] = {}
        with pytest.raises(BmcError, match=r"does not offer the action #ComputerSystem\.Reset"):
            await on(redfish_options(tmp_path, bmc.port, certificate))


def test_nobodys_own_bmc_is_reached_this_way() -> None:
    """Not by its kinds, and the host's own root helper has no way to say it."""
    assert (POWER_ON.netfn, POWER_ON.number) not in ALLOWED
    for kind in ("in-band", "none", "auto"):
        with pytest.raises(ValueError, match="another host's BMC"):
            power_of(BmcOptions(kind=kind))  # type: ignore[arg-type]
