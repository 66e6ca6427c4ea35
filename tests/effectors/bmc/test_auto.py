"""kind auto: in-band, Redfish, IPMI LAN; the first verified result counts, and why earlier ones failed is told.

A test's own device, our own Redfish service, and pyghmi's server behind our plug-in for ipmi_sim's place.
"""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.actions import RestorePolicy
from powerguard.effectors.bmc.effector import BmcEffector, BmcError
from powerguard.effectors.bmc.ipmi import Failure, RestartCause
from powerguard.effectors.options import BmcOptions
from tests.peers.ipmi import ENSURE, keep_secret, until_heard
from tests.peers.ipmi_device import IpmiDevice
from tests.peers.machine import folder_in_memory, quickly, watched
from tests.peers.redfish import Certificate, Faults, OwnRedfish, make_certificate, redfish_options
from tests.peers.sim_bmc import SimBmc

USER, PASSWORD = "powerguard", "Owl-Trap-Nine-42"
PUT_BACK = RestorePolicy(id="back-1", by_s=1e9, outage="outage-1", policy="always-off")
HOURLY = replace(ENSURE, outage="")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Where the policy is written down, which may take half a second."""
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture
def device(tmp_path: Path) -> IpmiDevice:
    return IpmiDevice(tmp_path)


@pytest.fixture
def dead() -> Iterator[tuple[int, int]]:
    """A TCP port that takes connections and a UDP port that takes packets, and nobody behind them."""
    with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        udp.bind(("127.0.0.1", 0))
        yield tcp.getsockname()[1], udp.getsockname()[1]


def test_without_a_login_auto_is_in_band_alone() -> None:
    assert [engine.kind for engine in BmcEffector(BmcOptions(kind="auto"))._engines] == ["in-band"]


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_in_band_comes_first_and_asks_nobody_else(
    tmp_path: Path, device: IpmiDevice, certificate: Certificate
) -> None:
    async with device.listening() as path, OwnRedfish(certificate) as other:
        given = redfish_options(tmp_path, other.port, certificate, kind="auto", socket=str(path))
        detail = dict(await BmcEffector(given, limit_s=30.0).carry_out(ENSURE))
        assert (detail["engine"], detail["verified"], "earlier" in detail) == ("in-band", True, False)
        assert other.heard == []


async def test_without_the_helper_redfish_is_next(tmp_path: Path, certificate: Certificate) -> None:
    async with OwnRedfish(certificate) as bmc:
        given = redfish_options(tmp_path, bmc.port, certificate, kind="auto", socket=str(tmp_path / "none.sock"))
        detail = dict(await BmcEffector(given, limit_s=30.0).carry_out(ENSURE))
        assert (detail["engine"], detail["changed"]) == ("redfish", True)
        assert str(detail["earlier"]).startswith("in-band: ")
        assert "powerguard-ipmi.socket is not listening" in str(detail["earlier"])


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_who_acknowledges_and_does_nothing_is_passed_over(
    tmp_path: Path, device: IpmiDevice, certificate: Certificate
) -> None:
    """In-band lies, Redfish is forbidden, IPMI LAN verifies: both failures are told, in that order."""
    device.misbehave(lie=True)
    async with (
        device.listening() as path,
        OwnRedfish(certificate, faults=Faults(always={"GET": 403})) as other,
        SimBmc(USER, PASSWORD) as bmc,
    ):
        given = redfish_options(
            tmp_path, other.port, certificate, kind="auto", socket=str(path), port=bmc.port, password=PASSWORD
        )
        detail = dict(await BmcEffector(given, limit_s=30.0).carry_out(ENSURE))
        assert (detail["engine"], detail["changed"], detail["before"]) == ("ipmi-lan", True, "last-state")
        earlier = str(detail["earlier"])
        assert earlier.index("in-band: BMC in-band: acknowledged always-on but") < earlier.index(
            "redfish: BMC 127.0.0.1"
        )
        assert bmc.policy == "always-on"


async def test_a_bmc_that_is_dead_in_every_way_ends_in_time_and_the_loop_stays_awake(
    tmp_path: Path, certificate: Certificate, dead: tuple[int, int]
) -> None:
    """Each engine has its share, the action's own deadline holds for all of them, and each is told."""
    https, udp = dead
    given = redfish_options(
        tmp_path, https, certificate, kind="auto", socket=str(tmp_path / "none.sock"), port=udp, password=PASSWORD
    )
    async with watched() as machine:
        for _ in range(8):
            for _ in quickly(3.2):  # a busy machine takes its time to end the worker
                with pytest.raises(BmcError) as caught:
                    await BmcEffector(given).carry_out(replace(ENSURE, by_s=boottime_s() + 2.5))
            if "was killed at its limit" not in str(caught.value):  # else a busy machine gave it no time to fail
                break
    assert machine.worst_s < 0.7, "an engine that held the loop up would do so for its share, more than a second"
    # Where others have taken the cores, the worker has not even got to its login in its share: it says so.
    is_late = "did not start in time" in str(caught.value)
    assert caught.value.failure is (Failure.PROTOCOL if is_late else Failure.UNREACHABLE)
    for kind in ("in-band: ", "redfish: ", "ipmi-lan: "):
        assert kind in str(caught.value)
    with pytest.raises(BmcError, match="not asked, because no time was left"):
        await BmcEffector(given).carry_out(replace(ENSURE, by_s=boottime_s()))


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_bracket_sets_it_for_the_outage_and_returns_what_to_put_back(device: IpmiDevice) -> None:
    """Before an outage nothing is written, only that it could be; in it the policy is set, and `restore` told.

    Also by a daemon that finds it set: it may have been killed after it set it, and never have heard of it.
    """
    (device.folder / "policy").write_text("0\n")
    async with device.listening() as path:
        options = BmcOptions(kind="in-band", socket=str(path), policy="bracket")
        mine = BmcEffector(options, folder=device.folder, limit_s=30.0)
        hourly = dict(await mine.carry_out(HOURLY))
        assert (hourly["policy"], hourly["verified"], hourly["changed"]) == ("always-off", True, False)
        assert device.policy == "always-off"
        first = dict(await mine.carry_out(ENSURE))
        assert (first["policy"], first["restore"], device.policy) == ("always-on", "always-off", "always-on")
        for folder, expected in ((device.folder, "always-off"), (None, None)):
            later = BmcEffector(options, folder=folder, limit_s=30.0)
            again = dict(await later.carry_out(ENSURE))
            assert (again["changed"], again.get("restore")) == (False, expected)
        hourly = dict(await mine.carry_out(HOURLY))  # the outage is over, and the policy not yet put back
        assert hourly["policy"] == "always-on"
        back = dict(await mine.carry_out(PUT_BACK))
        assert (back["policy"], back["before"], back["changed"]) == ("always-off", "always-on", True)
        assert device.policy == "always-off"
        (device.folder / "policy").write_text("2\n")  # the next outage, whose daemon is killed once it is set
        later = dict(await BmcEffector(options, folder=device.folder, limit_s=30.0).carry_out(ENSURE))
        assert (later["changed"], later.get("restore")) == (False, "always-off")
        await mine.carry_out(PUT_BACK)
        back = dict(await mine.carry_out(replace(PUT_BACK, policy="last-state")))
        assert (back["policy"], back["changed"], device.policy) == ("always-off", False, "always-off")


@pytest.mark.parametrize("kind", ["redfish", "auto"])
async def test_what_was_set_and_not_read_back_is_to_be_put_back_all_the_same(
    tmp_path: Path, certificate: Certificate, kind: str
) -> None:
    """Redfish stores always-on and goes on showing the old: it fails, or IPMI finds it set already. Both tell it."""
    late = Faults(late_reads=99)
    async with OwnRedfish(certificate, faults=late) as own, SimBmc(USER, PASSWORD, policy="always-on") as lan:
        own.password = PASSWORD
        given = redfish_options(
            tmp_path, own.port, certificate, kind=kind, policy="bracket", port=lan.port, password=PASSWORD
        ).model_copy(update={"socket": str(tmp_path / "none.sock")})
        mine = BmcEffector(given, limit_s=30.0)
        assert "restore" not in dict(await mine.carry_out(HOURLY))
        order = replace(ENSURE, by_s=boottime_s() + 30.0)
        if kind == "auto":
            outcome = dict(await mine.carry_out(order))
            assert (outcome["engine"], outcome["changed"], outcome["restore"]) == ("ipmi-lan", False, "last-state")
        else:
            with pytest.raises(BmcError, match="acknowledged always-on but still reads last-state") as raised:
                await mine.carry_out(order)
            assert raised.value.detail == (("policy", "last-state"), ("restore", "last-state"))
        assert own.count("PATCH") >= 1


@pytest.mark.parametrize("kind", ["redfish", "ipmi-lan"])
async def test_what_an_outage_found_is_put_back_over_always_on_alone(
    tmp_path: Path, certificate: Certificate, kind: str
) -> None:
    """Somebody's own change since then stays; a word that no outage could have found is refused, and so is observe."""
    for heard in until_heard([] if kind == "redfish" else ["set always-off"]):
        async with OwnRedfish(certificate, policy="AlwaysOn") as own, SimBmc(USER, PASSWORD, policy="always-on") as lan:
            own.password = PASSWORD
            given = redfish_options(
                tmp_path, own.port, certificate, kind=kind, policy="bracket", port=lan.port, password=PASSWORD
            )
            if kind == "ipmi-lan":
                given = given.model_copy(update={"ca": None, "fingerprint": None})
            mine = BmcEffector(given, limit_s=30.0)
            detail = dict(await mine.carry_out(PUT_BACK))
            assert (detail["policy"], detail["before"], detail["changed"]) == ("always-off", "always-on", True)
            detail = dict(await mine.carry_out(replace(PUT_BACK, policy="last-state")))
            assert (detail["policy"], detail["changed"]) == ("always-off", False)
            assert own.count("PATCH") == (kind == "redfish")
            heard.extend(word for word in lan.heard if word.startswith("set "))
            for word in ("always-on", "unknown", "", "../etc"):
                with pytest.raises(BmcError, match="not a policy") as raised:
                    await mine.carry_out(replace(PUT_BACK, policy=word))
                assert raised.value.harmless, "nobody has to try again"
            observer = BmcEffector(given.model_copy(update={"policy": "observe"}))
            with pytest.raises(BmcError, match=r"bmc.policy is now observe"):
                await observer.carry_out(PUT_BACK)


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_watts_are_reported_where_the_bmc_measures_them_and_never_in_an_outage(device: IpmiDevice) -> None:
    """DCMI is optional: what refuses it, or measures nothing, is passed over in silence."""
    async with device.listening() as path:
        mine = BmcEffector(BmcOptions(kind="in-band", socket=str(path)), limit_s=30.0)
        assert "power_watts" not in dict(await mine.carry_out(HOURLY))
        device.set_board(watts=412)
        assert dict(await mine.carry_out(HOURLY))["power_watts"] == 412.0
        assert "power_watts" not in dict(await mine.carry_out(ENSURE))
        device.set_board(watts=0)
        assert await mine.power_watts(2.0) is None


async def test_bracket_promises_nothing_where_the_bmc_does_not(tmp_path: Path, certificate: Certificate) -> None:
    async with OwnRedfish(certificate, shape="dell", policy="Off") as bmc:
        given = redfish_options(tmp_path, bmc.port, certificate, policy="bracket")
        with pytest.raises(BmcError, match="policy is always-off") as caught:
            await BmcEffector(given).carry_out(HOURLY)
        assert caught.value.failure is Failure.UNSUPPORTED


async def test_observe_takes_the_first_that_can_read(tmp_path: Path, certificate: Certificate) -> None:
    """Redfish that tells no policy is passed over; one that tells a wrong one is believed, and nobody else is asked."""
    for heard in until_heard(["status"]):
        async with OwnRedfish(certificate, shape="none") as bmc, SimBmc(USER, PASSWORD, policy="always-off") as lan:
            given = redfish_options(
                tmp_path, bmc.port, certificate, kind="auto", socket=str(tmp_path / "none.sock"), port=lan.port
            ).model_copy(update={"policy": "observe"})
            bmc.password = PASSWORD
            keep_secret(tmp_path / "bmc-password", PASSWORD)
            with pytest.raises(BmcError, match="is always-off, so this host stays off"):
                await BmcEffector(given, limit_s=30.0).carry_out(ENSURE)
            bmc.system["PowerRestorePolicy"] = "LastState"
            with pytest.raises(BmcError, match="is last-state, so this host stays off"):
                await BmcEffector(given, limit_s=30.0).carry_out(ENSURE)
            assert bmc.count("PATCH") == 0
            heard.extend(lan.heard)


async def test_what_powered_the_host_on_is_asked_of_who_reports_it(tmp_path: Path, certificate: Certificate) -> None:
    """Redfish does not; IPMI does, and only reads."""
    for heard in until_heard(["status", "cause"]):
        async with OwnRedfish(certificate) as bmc, SimBmc(USER, PASSWORD, state_file=tmp_path / "kept") as lan:
            bmc.password = PASSWORD
            given = redfish_options(
                tmp_path,
                bmc.port,
                certificate,
                kind="auto",
                socket=str(tmp_path / "none.sock"),
                port=lan.port,
                password=PASSWORD,
            )
            mine = BmcEffector(given, limit_s=30.0)
            seen = await mine.why_on(30.0)
            assert (seen.restart_cause, seen.status.ac_failed) == (RestartCause.UNKNOWN, False)
            assert bmc.count("PATCH") == 0
            heard.extend(lan.heard)
            with pytest.raises(BmcError, match="does not report what powered this host on"):
                await BmcEffector(given.model_copy(update={"kind": "redfish"})).why_on(5.0)
