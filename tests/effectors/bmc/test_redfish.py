"""The Redfish engine against sushy-emulator (discovery, refusals) and our own service (the rest; not independent)."""

import asyncio
import base64
import ssl
import traceback
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.effectors.bmc.effector import BACK_OFF_S, BmcEffector, BmcError
from powerguard.effectors.bmc.ipmi import BmcFailure, Failure, PowerRestorePolicy
from powerguard.effectors.bmc.redfish import RedfishRequests, Resource, basic, session
from powerguard.effectors.http import KnownNames
from tests.peers.ipmi import ENSURE, keep_secret
from tests.peers.machine import watched
from tests.peers.ports import free_port
from tests.peers.redfish import (
    PASSWORD,
    USER,
    Certificate,
    Faults,
    OwnRedfish,
    SushyEmulator,
    make_certificate,
    redfish_options,
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def test_the_draw_is_read_of_the_one_chassis(tmp_path: Path, certificate: Certificate) -> None:
    """EnvironmentMetrics where the chassis has it, else PowerControl; of several chassis none, as they hold others."""
    async with OwnRedfish(certificate) as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate), limit_s=30.0)
        one = bmc.resources["/redfish/v1/Chassis/1"]
        assert await mine.power_watts(30.0) is None
        one["Power"] = {"@odata.id": "/redfish/v1/Chassis/1/Power"}
        bmc.resources["/redfish/v1/Chassis/1/Power"] = {"PowerControl": [{"PowerConsumedWatts": 1234}]}
        assert await mine.power_watts(30.0) == 1234.0
        one["EnvironmentMetrics"] = {"@odata.id": "/redfish/v1/Chassis/1/EnvironmentMetrics"}
        bmc.resources["/redfish/v1/Chassis/1/EnvironmentMetrics"] = {"PowerWatts": {"Reading": 1230.5}}
        assert await mine.power_watts(30.0) == 1230.5
        bmc.resources["/redfish/v1/Chassis/1/EnvironmentMetrics"] = {"PowerWatts": {"Reading": None}}
        assert await mine.power_watts(30.0) == 1234.0
        for status in (401, 403, 404):
            bmc.faults.refused["/redfish/v1/Chassis/1/EnvironmentMetrics"] = status
            assert await mine.power_watts(30.0) == 1234.0, "a link to what is not there, or needs a license"
        bmc.system["Links"]["Chassis"].append({"@odata.id": "/redfish/v1/Chassis/2"})
        assert await mine.power_watts(30.0) is None


@pytest.mark.parametrize("reading", [0, -1, True, pytest.param(10**400, id="huge"), float("nan")])
async def test_a_draw_that_is_none_is_not_believed(tmp_path: Path, certificate: Certificate, reading: float) -> None:
    """Services write 0 before they have measured; what is no figure of a host must not end the task that asks."""
    async with OwnRedfish(certificate) as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate), limit_s=30.0)
        bmc.resources["/redfish/v1/Chassis/1"] = {
            "EnvironmentMetrics": {"@odata.id": "/redfish/v1/Chassis/1/EnvironmentMetrics"},
            "Power": {"@odata.id": "/redfish/v1/Chassis/1/Power"},
        }
        bmc.resources["/redfish/v1/Chassis/1/EnvironmentMetrics"] = {"PowerWatts": {"Reading": reading}}
        bmc.resources["/redfish/v1/Chassis/1/Power"] = {"PowerControl": [{"PowerConsumedWatts": 1234}]}
        assert await mine.power_watts(30.0) == 1234.0


async def test_a_bmc_with_an_ipv6_address(tmp_path: Path, certificate: Certificate) -> None:
    """An address with colons goes into the URL in brackets; this one reaches 127.0.0.1."""
    async with OwnRedfish(certificate) as bmc:
        given = redfish_options(
            tmp_path, bmc.port, certificate, host="::ffff:127.0.0.1", fingerprint=certificate.sha256
        )
        assert dict(await BmcEffector(given).carry_out(ENSURE))["verified"] is True


async def failure_of(bmc: BmcEffector) -> BmcError:
    with pytest.raises(BmcError) as caught:
        await bmc.carry_out(ENSURE)
    return caught.value


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_several_systems_are_named_and_none_is_guessed(tmp_path: Path, certificate: Certificate) -> None:
    """sushy-emulator: with two, the settings must say which; the right one lacks the property, so it is unsupported."""
    async with SushyEmulator(tmp_path, certificate, systems=2) as bmc:
        error = await failure_of(BmcEffector(redfish_options(tmp_path, bmc.port, certificate), limit_s=30.0))
        assert error.failure is Failure.SETTINGS
        ours = "00000000-0000-4000-8000-000000000002"
        assert f"set bmc.system to one of 00000000-0000-4000-8000-000000000001, {ours};" in str(error)
        absent = redfish_options(tmp_path, bmc.port, certificate, system="Self")
        error = await failure_of(BmcEffector(absent, limit_s=30.0))
        assert (error.failure, "bmc.system is Self, but the service has: 0000" in str(error)) == (
            Failure.SETTINGS,
            True,
        )
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate, system=ours), limit_s=30.0)
        error = await failure_of(mine)
        assert error.failure is Failure.UNSUPPORTED
        assert f"/redfish/v1/Systems/{ours} has none of PowerRestorePolicy, Oem.Hpe.PowerAutoOn" in str(error)
        seen = await mine.probe(30.0)
        assert (seen.status.power_on, seen.status.policy, seen.supported) == (True, "unknown", frozenset())
        # It refuses a PATCH of the property, too.
        tls = ssl.create_default_context(cafile=str(certificate.cert))
        async with session(tls, KnownNames()) as open_session:
            talk = RedfishRequests(open_session, "127.0.0.1", bmc.port, basic(USER, b"x"), boottime_s() + 30.0)
            system = Resource(path=f"/redfish/v1/Systems/{ours}", body={}, etag=None)
            with pytest.raises(BmcFailure, match="HTTP 400") as caught:
                await talk.patch(system, {"PowerRestorePolicy": "AlwaysOn"})
        assert caught.value.failure is Failure.UNSUPPORTED


async def test_the_policy_is_set_once_and_verified(tmp_path: Path, certificate: Certificate) -> None:
    """Found, changed with its ETag, read back; the second time nothing is written."""
    async with OwnRedfish(certificate) as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate))
        detail = dict(await mine.carry_out(ENSURE))
        assert (detail["engine"], detail["before"], detail["policy"]) == ("redfish", "last-state", "always-on")
        assert (detail["changed"], detail["verified"], detail["power_on"], detail["ac_failed"]) == (
            True,
            True,
            True,
            None,
        )
        assert bmc.system["PowerRestorePolicy"] == "AlwaysOn"
        assert dict(await mine.carry_out(ENSURE))["changed"] is False
        assert bmc.count("PATCH") == 1


async def test_the_system_is_looked_for_once(tmp_path: Path, certificate: Certificate) -> None:
    """A slow service has no time for the way to it in an outage; one that has moved is found again."""
    async with OwnRedfish(certificate) as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate))
        await mine.status(15.0)
        assert bmc.heard == ["GET /redfish/v1/", "GET /redfish/v1/Systems", "GET /redfish/v1/Systems/1"]
        bmc.heard.clear()
        assert dict(await mine.carry_out(ENSURE))["verified"] is True
        assert bmc.heard == ["GET /redfish/v1/Systems/1", "PATCH /redfish/v1/Systems/1", "GET /redfish/v1/Systems/1"]
        bmc.systems = ("Self",)
        assert (await mine.status(15.0)).power_on is True
        assert bmc.heard[-1] == "GET /redfish/v1/Systems/Self"


async def test_observe_never_writes(tmp_path: Path, certificate: Certificate) -> None:
    async with OwnRedfish(certificate) as bmc:
        options = redfish_options(tmp_path, bmc.port, certificate, policy="observe")
        observer = BmcEffector(options)
        assert "is last-state, so this host stays off" in str(await failure_of(observer))
        assert str(await failure_of(observer)).endswith("set bmc.policy: ensure (it is observe)")
        assert (await failure_of(observer)).detail == (("policy", "last-state"),)
        dry_run = BmcEffector(options, dry_run=True)  # what the settings say is not to blame
        assert str(await failure_of(dry_run)).endswith("; in mode rehearse or armed the daemon sets it to always-on")
        assert (await observer.probe(5.0)).supported == frozenset(PowerRestorePolicy) - {PowerRestorePolicy.UNKNOWN}
        assert bmc.count("PATCH") == 0


@pytest.mark.parametrize("vendor", ["Hpe", "Hp"])
async def test_hpe_has_its_own_property(tmp_path: Path, certificate: Certificate, vendor: str) -> None:
    """By another name up to iLO 4."""
    async with OwnRedfish(certificate, shape=vendor, policy="Restore") as bmc:
        detail = dict(await BmcEffector(redfish_options(tmp_path, bmc.port, certificate)).carry_out(ENSURE))
        assert (detail["before"], detail["policy"], detail["changed"]) == ("last-state", "always-on", True)
        assert bmc.system["Oem"] == {vendor: {"PowerAutoOn": "PowerOn"}}


async def test_what_the_bios_stages_is_read_and_never_written(tmp_path: Path, certificate: Certificate) -> None:
    """Dell up to iDRAC 9: "On" is as good as any always-on; anything else is for people, as it takes a reboot."""
    async with OwnRedfish(certificate, shape="dell", policy="Last") as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate))
        error = await failure_of(mine)
        assert error.failure is Failure.UNSUPPORTED
        assert "BIOS attribute AcPwrRcvry reads 'Last';" in str(error)
        bmc.bios["Attributes"]["AcPwrRcvry"] = "On"
        detail = dict(await mine.carry_out(ENSURE))
        assert (detail["verified"], detail["changed"], bmc.count("PATCH")) == (True, False, 0)


async def test_another_bios_attribute_that_begins_alike_is_not_the_policy(
    tmp_path: Path, certificate: Certificate
) -> None:
    """JSON objects have no order: Dell's AcPwrRcvryDelay may come before AcPwrRcvry."""
    async with OwnRedfish(certificate, shape="none") as bmc:
        bmc.bios["Attributes"] = {"AcPwrRcvryDelay": "Immediate", "AcPwrRcvry": "On", "AcPwrRcvryUserDelay": 60}
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate), limit_s=30.0)
        assert (await mine.status(30.0)).policy is PowerRestorePolicy.ALWAYS_ON


@pytest.mark.parametrize("status", [401, 403, 404, 500])
async def test_a_bios_that_is_refused_hides_nothing_else(tmp_path: Path, certificate: Certificate, status: int) -> None:
    """It is linked, but needs a license or is not there: the system and its draw are read, and the login is good."""
    async with OwnRedfish(certificate, shape="none", faults=Faults(bios=status)) as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate), limit_s=30.0)
        assert (await mine.status(30.0)).power_on is True
        error = await failure_of(mine)
        assert error.failure is Failure.UNSUPPORTED
        assert "GET /redfish/v1/Systems/1/Bios: " in str(error)
        assert f"(HTTP {status}); powerguard only reads BIOS attributes" in str(error)
        bmc.resources["/redfish/v1/Chassis/1"] = {"Power": {"@odata.id": "/redfish/v1/Chassis/1/Power"}}
        bmc.resources["/redfish/v1/Chassis/1/Power"] = {"PowerControl": [{"PowerConsumedWatts": 1234}]}
        assert await mine.power_watts(30.0) == 1234.0


MAY_NOT = (
    "the account may log in but not do this: if the BMC asks for it, change its first password; else give it the role "
    "Operator"
)


@pytest.mark.parametrize(
    ("faults", "failure", "expected", "patches"),
    [
        (
            Faults(always={"GET": 401}),
            Failure.AUTH,
            "login refused (HTTP 401: it said [2Jso); the next try is in 10 minutes",
            0,
        ),
        (
            Faults(always={"GET": 403}),
            Failure.PRIVILEGE,
            f"GET /redfish/v1/Systems: not permitted to this account (HTTP 403: it said [2Jso); {MAY_NOT}",
            0,
        ),
        (
            Faults(always={"PATCH": 403}),
            Failure.PRIVILEGE,
            f"PATCH /redfish/v1/Systems/1: not permitted to this account (HTTP 403: it said [2Jso); {MAY_NOT}",
            1,
        ),
        (Faults(always={"PATCH": 400}), Failure.UNSUPPORTED, "HTTP 400: it said [2Jso", 1),
        (Faults(always={"PATCH": 405}), Failure.UNSUPPORTED, "cannot be changed (HTTP 405", 1),
        (Faults(always={"PATCH": 412}), Failure.BUSY, "was changed by another client each time", 3),
        (Faults(always={"GET": 503}, retry_after="Sat, 21 Nov 2026 09:00:00 GMT"), Failure.BUSY, "is not ready", 0),
        (Faults(always={"GET": 302}), Failure.PROTOCOL, "redirects, which is not followed", 0),
        (Faults(always={"GET": 500}), Failure.PROTOCOL, "failed inside the service (HTTP 500", 0),
        (Faults(always={"PATCH": 409}), Failure.PROTOCOL, "an unexpected status (HTTP 409: it said", 1),
        (Faults(lie=True), Failure.MISMATCH, "acknowledged always-on but still reads last-state", 1),
        (Faults(hang="answer"), Failure.TIMEOUT, "fell silent during GET /redfish/v1/Systems;", 0),
        (Faults(hang="headers"), Failure.TIMEOUT, "fell silent during GET /redfish/v1/Systems;", 0),
        (Faults(hang="answer", hang_at="/redfish/v1/"), Failure.UNREACHABLE, "no answer", 0),
        (Faults(body=b"[1]"), Failure.PROTOCOL, "JSON object", 0),
        (Faults(body=b"[" * 100_000), Failure.PROTOCOL, "JSON object", 0),
        (Faults(body=b" " * 300_000), Failure.PROTOCOL, "longer than 262144 bytes", 0),
        (
            Faults(body=b'{"Members": [{"@odata.id": "https://evil.example/x"}]}'),
            Failure.PROTOCOL,
            "its member",
            0,
        ),
        (Faults(body=b'{"Members": []}'), Failure.UNSUPPORTED, "does not list a system", 0),
        (
            Faults(body=b'{"Members@odata.count": 2, "Members": [{"@odata.id": "/redfish/v1/Systems/1"}]}'),
            Failure.SETTINGS,
            "has several systems: set bmc.system to one of 1;",
            0,
        ),
    ],
)
async def test_a_fault_is_reported_with_where_and_what_would_be_right(
    tmp_path: Path, certificate: Certificate, faults: Faults, failure: Failure, expected: str, patches: int
) -> None:
    """Each failure names the BMC, what was seen and what to do, in time; nothing is tried more often than it may."""
    for limit_s in (3.0, 20.0):  # the second, where a busy machine took most of the first
        async with OwnRedfish(certificate, faults=faults) as bmc:
            mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate), limit_s=limit_s)
            async with watched() as machine:
                began_s = boottime_s()
                error = await failure_of(mine)
                assert boottime_s() - began_s < limit_s + 1.2 + machine.late_s
        if error.failure is failure:
            break
    assert (error.failure, bmc.count("PATCH")) == (failure, patches)
    assert str(error).startswith(f"BMC 127.0.0.1 port {bmc.port}: ")
    assert expected in str(error)
    assert str(error).isprintable()
    assert bmc.system["PowerRestorePolicy"] == "LastState"
    assert "GET /redfish/v1/elsewhere" not in bmc.heard
    if failure in {Failure.AUTH, Failure.PRIVILEGE} and not patches:
        assert bmc.count("GET") == 2, "the root, which is everybody's, and one try"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"error": {"message": "See more.", "@Message.ExtendedInfo": [{"MessageId": "iLO.2.14.SystemResetRequired"}]}},
         "iLO.2.14.SystemResetRequired"),
        ({"@Message.ExtendedInfo": [{"Message": "The property is read-only."}]}, "The property is read-only."),
        ({"PowerRestorePolicy@Message.ExtendedInfo": [{"Message": "Not now."}]}, "Not now."),
        ({"Id": "1", "@Message.ExtendedInfo": "nonsense"}, ""),
    ],
)  # fmt: skip
async def test_a_change_that_is_acknowledged_and_not_made_is_reported_with_what_the_service_says_of_it(
    tmp_path: Path, certificate: Certificate, said: dict[str, object], words: str
) -> None:
    async with OwnRedfish(certificate, faults=Faults(lie=True, said=said)) as bmc:
        error = await failure_of(BmcEffector(redfish_options(tmp_path, bmc.port, certificate), limit_s=20.0))
    assert error.failure is Failure.MISMATCH
    assert f"2 s later{f' (it said: {words})' if words else ''}; " in str(error)


async def test_what_passes_is_waited_for(tmp_path: Path, certificate: Certificate) -> None:
    """Not ready twice, changed by somebody else once, stored a read late: verified all the same."""
    faults = Faults(answers={"GET": [503, 503], "PATCH": [412]}, retry_after="0", late_reads=1)
    async with OwnRedfish(certificate, faults=faults) as bmc:
        detail = dict(await BmcEffector(redfish_options(tmp_path, bmc.port, certificate)).carry_out(ENSURE))
        assert (detail["verified"], detail["before"], bmc.count("PATCH")) == (True, "last-state", 2)


async def test_a_service_that_closes_each_connection_unannounced(tmp_path: Path, certificate: Certificate) -> None:
    """As iLO 5 was seen to do. What reads is repeated by aiohttp, what changes is not."""
    async with OwnRedfish(certificate, faults=Faults(closes=True)) as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate), limit_s=30.0)
        assert dict(await mine.carry_out(ENSURE))["changed"] is True
        assert bmc.count("PATCH") == 1


@pytest.mark.parametrize(("if_match", "patches"), [("as sent", 1), ("strong", 2), ("none", 3)])
async def test_an_etag_that_its_own_service_refuses(
    tmp_path: Path, certificate: Certificate, if_match: str, patches: int
) -> None:
    """A weak one matches nothing where RFC 9110 is kept; other services refuse each of theirs."""
    async with OwnRedfish(certificate, faults=Faults(if_match=if_match)) as bmc:
        detail = dict(await BmcEffector(redfish_options(tmp_path, bmc.port, certificate)).carry_out(ENSURE))
        assert (detail["verified"], detail["changed"], bmc.count("PATCH")) == (True, True, patches)


async def test_a_failure_spoils_nothing_that_follows(tmp_path: Path, certificate: Certificate) -> None:
    """After one that hung, a hundred in the same process are as good as the first, and no connection is left open."""
    async with OwnRedfish(certificate, faults=Faults(hang="headers")) as bmc:
        given = redfish_options(tmp_path, bmc.port, certificate)
        assert (await failure_of(BmcEffector(given, limit_s=2.0))).failure is Failure.TIMEOUT
        bmc.faults = Faults()
        mine = BmcEffector(given)
        assert (await mine.status(15.0)).power_on
        before = open_files()
        for _ in range(100):
            assert (await mine.status(15.0)).power_on
        async with asyncio.timeout(20):
            while open_files() > before + 1:  # noqa: ASYNC110 - until the server hears that the last one has gone
                await asyncio.sleep(0.05)


async def test_a_refused_login_rests_and_a_new_password_does_not(tmp_path: Path, certificate: Certificate) -> None:
    now_s = 1000.0
    async with OwnRedfish(certificate) as bmc:
        wrong = redfish_options(tmp_path, bmc.port, certificate, password="wrong")
        mine = BmcEffector(wrong, clock=lambda: now_s)
        assert (await failure_of(mine)).failure is Failure.AUTH
        heard = len(bmc.heard)
        now_s += BACK_OFF_S - 1
        error = await failure_of(mine)
        assert "in 1 s" in str(error)
        assert "HTTP Basic" in str(error), "a BMC may have it off, which looks like a wrong password"
        assert len(bmc.heard) == heard
        keep_secret(tmp_path / "bmc-password", PASSWORD)
        assert dict(await mine.carry_out(ENSURE))["verified"] is True


async def test_a_wrong_password_is_not_sent_by_several_questions_at_once(
    tmp_path: Path, certificate: Certificate
) -> None:
    async with OwnRedfish(certificate) as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate, password="wrong"))
        result = await asyncio.gather(
            mine.status(60.0), mine.probe(60.0), mine.power_watts(60.0), return_exceptions=True
        )
        assert bmc.heard == ["GET /redfish/v1/", "GET /redfish/v1/Systems"]
        # Which of the three was first is for the threads that read the password.
        assert any("the next try is in 10 minutes" in str(each) for each in result), result
        assert any("login was refused" in str(each) for each in result), result


async def test_a_resource_that_is_refused_is_no_refused_login(tmp_path: Path, certificate: Certificate) -> None:
    """Some services answer 401 for want of a license: the policy is ensured all the same, and not 10 minutes later."""
    async with OwnRedfish(certificate) as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate), limit_s=30.0)
        bmc.resources["/redfish/v1/Chassis/1"] = {"Power": {"@odata.id": "/redfish/v1/Chassis/1/Power"}}
        bmc.resources["/redfish/v1/Chassis/1/Power"] = {}
        bmc.faults.refused["/redfish/v1/Chassis/1/Power"] = 401
        assert await mine.power_watts(30.0) is None
        assert dict(await mine.carry_out(ENSURE))["verified"] is True


async def test_a_root_that_asks_for_the_login_gets_it(tmp_path: Path, certificate: Certificate) -> None:
    """Some services keep the root closed, which is no refused login; a wrong password still is one, sent once."""
    async with OwnRedfish(certificate, faults=Faults(closed_root=True)) as bmc:
        wrong = redfish_options(tmp_path, bmc.port, certificate, password="wrong")
        error = await failure_of(BmcEffector(wrong, limit_s=30.0))
        assert (error.failure, bmc.heard) == (Failure.AUTH, ["GET /redfish/v1/"] * 2)
        keep_secret(tmp_path / "bmc-password", PASSWORD)
        assert dict(await BmcEffector(wrong, limit_s=30.0).carry_out(ENSURE))["verified"] is True


async def test_only_our_own_bmc_is_given_the_login(tmp_path: Path, certificate: Certificate) -> None:
    """A certificate that nobody vouches for, or another one than the pinned: told, and nothing is sent."""
    async with OwnRedfish(certificate) as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate, ca="/etc/ssl/certs/ca-certificates.crt"))
        error = await failure_of(mine)
        if "cannot be read" not in str(error):  # a machine without such a file
            assert "its certificate does not verify (self-signed certificate)" in str(error)
        assert error.failure is Failure.SETTINGS
        error = await failure_of(BmcEffector(redfish_options(tmp_path, bmc.port, certificate, fingerprint="9f" * 32)))
        assert error.failure is Failure.SETTINGS
        assert f"but sha256 {certificate.sha256}" in str(error)
        assert bmc.heard == []
        colons = ":".join(certificate.sha256[n : n + 2] for n in range(0, 64, 2)).upper()
        pinned = BmcEffector(redfish_options(tmp_path, bmc.port, certificate, fingerprint=colons))
        assert dict(await pinned.carry_out(ENSURE))["verified"] is True


async def test_a_renewed_authority_needs_no_restart(tmp_path: Path, certificate: Certificate) -> None:
    """The file of bmc.ca is another one since the engine was made: after a failure it is read again."""
    (tmp_path / "old").mkdir()
    authority = tmp_path / "ca.pem"
    authority.write_bytes(make_certificate(tmp_path / "old").cert.read_bytes())
    async with OwnRedfish(certificate) as bmc:
        mine = BmcEffector(redfish_options(tmp_path, bmc.port, certificate, ca=str(authority)))
        assert (await failure_of(mine)).failure is Failure.SETTINGS
        authority.write_bytes(certificate.cert.read_bytes())
        assert dict(await mine.carry_out(ENSURE))["verified"] is True


async def test_who_is_not_there_is_reported_at_once(tmp_path: Path, certificate: Certificate) -> None:
    """A closed port, and a listener without TLS."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    error = await failure_of(BmcEffector(redfish_options(tmp_path, port, certificate)))
    assert error.failure in {Failure.PROTOCOL, Failure.UNREACHABLE}
    server.close()
    await server.wait_closed()
    error = await failure_of(BmcEffector(redfish_options(tmp_path, free_port(), certificate)))
    assert (error.failure, "no connection (ECONNREFUSED)" in str(error)) == (Failure.UNREACHABLE, True)


async def test_the_password_shows_nowhere(
    tmp_path: Path, certificate: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in errors, tracebacks, reprs and logs, in clear or as the header carries it."""
    async with OwnRedfish(certificate, faults=Faults(always={"PATCH": 400})) as bmc:
        given = redfish_options(tmp_path, bmc.port, certificate)
        mine = BmcEffector(given)
        error = await failure_of(mine)
    seen = "".join([*traceback.format_exception(error), repr(error), repr(given), repr(mine), caplog.text])
    assert PASSWORD not in seen
    assert base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode() not in seen
