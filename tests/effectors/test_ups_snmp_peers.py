"""Layer B over real SNMP: our own agent with the faults of the wire, and net-snmp's snmpd with all that it refuses."""

import contextlib
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.actions import ArmPowerOn, CheckPowerOn, DisarmPowerOn, PowerOnMethod
from powerguard.effectors.base import EffectorError
from powerguard.effectors.options import OutputOffOptions
from powerguard.effectors.ups_output import by_snmp
from powerguard.effectors.ups_output.effector import Notes, OutputEffector
from powerguard.options import Secret
from powerguard.sim import snmp_values as sim
from powerguard.sim.ups import APC
from powerguard.ups.profiles.vocabulary import Answer, Oid
from powerguard.ups.snmp.discovery import opened
from powerguard.ups.snmp.engine import User, engine_for
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.port import CardPort
from tests.peers.machine import watched
from tests.peers.snmp_agent import Fault, SnmpAgent
from tests.peers.snmpd import AUTH, COMMUNITY, PRIV, USER, WRITE_COMMUNITY, snmpd
from tests.peers.ups_output import XUPS, SimCard, SimOutput, U
from tests.ups.snmp.snmp_helpers import options, secret

SHUTDOWN, STARTUP = f"{U}.8.2.0", f"{U}.8.3.0"
CARD = Path(__file__).parents[1] / "peers" / "snmpd_ups.py"


@asynccontextmanager
async def telling(
    tmp_path: Path, source: SnmpOptions, community: Secret | None = None
) -> AsyncIterator[OutputEffector]:
    """Make an effector for the card of a source. The source's own poller has a port to it as well, as in the daemon."""
    poller = CardPort(source)
    settings = OutputOffOptions(by="snmp")
    output = by_snmp.opening(lambda: opened(source, community), settings, boottime_s)
    with contextlib.suppress(Exception):
        await poller.get(["1.3.6.1.2.1.1.1.0"])
    try:
        yield OutputEffector({"a": output}, notes=Notes(tmp_path), clock=boottime_s, boot="b", least_s=100.0)
    finally:
        await poller.close()


def arm(limit_s: float = 60.0, in_s: float = 120.0) -> ArmPowerOn:
    return ArmPowerOn(id="a", by_s=boottime_s() + limit_s, method=PowerOnMethod.OUTPUT, outage="o1", in_s=in_s, ups="a")


def check() -> CheckPowerOn:
    return CheckPowerOn(id="c", by_s=boottime_s() + 60, method=PowerOnMethod.OUTPUT, ups="a")


def disarm() -> DisarmPowerOn:
    return DisarmPowerOn(id="d", by_s=boottime_s() + 60, method=PowerOnMethod.OUTPUT, outage="o1", ups="a")


def telling_anew(tmp_path: Path, agent: SnmpAgent) -> OutputEffector:
    """Return another effector, which does not know yet what the card is."""
    output = by_snmp.opening(lambda: opened(options(agent.port)), OutputOffOptions(by="snmp"), boottime_s)
    return OutputEffector({"a": output}, notes=Notes(tmp_path), clock=boottime_s, boot="b", least_s=100.0)


# --- Our own agent --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def carded(lacks: str) -> AsyncIterator[tuple[SimCard, SnmpAgent]]:
    card = SimCard(SimOutput(), boottime_s, utility=lambda: False, lacks=frozenset({lacks, APC}))
    async with SnmpAgent(card.values, on_set=card.take) as agent:
        yield card, agent


async def test_a_set_is_sent_once_however_the_wire_is(tmp_path: Path) -> None:
    """A poll is repeated when it is not answered; a SET must not be: it may have been carried out. Then it is read."""
    write = secret(tmp_path, "write", "private")
    async with carded(U) as (card, agent), telling(tmp_path, options(agent.port), write) as effector:
        agent.fault = Fault.SET_MUTE
        detail = dict(await effector.carry_out(arm()))
        assert (detail["again"], detail["returns"]) == (False, "cycles")
        assert card.sets == [(f"{XUPS}.9.6.0", 120)]


async def test_the_community_that_reads_may_not_write(tmp_path: Path) -> None:
    async with carded(XUPS) as (card, agent), telling(tmp_path, options(agent.port)) as effector:
        assert dict(await effector.carry_out(check()))["returns"] == "cycles", "a look cannot tell"
        with pytest.raises(EffectorError, match=r"upsAutoRestart cannot be set: .*notWritable"):
            await effector.carry_out(arm())
        assert card.sets == []


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.GEN_ERR, Fault.NULLS, Fault.TEXT])
async def test_a_card_that_answers_rubbish_is_sent_nothing(tmp_path: Path, fault: Fault) -> None:
    async with carded(XUPS) as (card, agent), telling(tmp_path, options(agent.port)) as effector:
        agent.fault = fault
        with pytest.raises(EffectorError, match=r"^a: "):
            await effector.carry_out(arm())
        assert card.sets == []


async def test_a_card_without_the_command_says_what_it_lacks(tmp_path: Path) -> None:
    async with carded(XUPS) as (card, agent), telling(tmp_path, options(agent.port)) as effector:
        card.lacks = frozenset({XUPS, APC, STARTUP})
        with pytest.raises(EffectorError, match=r"does not offer off_with_return: .*lacks upsStartupAfterDelay"):
            await effector.carry_out(check())


async def test_of_two_commands_the_one_that_promises_the_way_back(tmp_path: Path) -> None:
    """A CyberPower card speaks its own MIB, whose command promises nothing, and RFC 1628 beside it."""
    async with carded(XUPS) as (card, agent), telling(tmp_path, options(agent.port)) as effector:
        cps = "1.3.6.1.4.1.3808.1.1.1"
        card.more = {
            **{f"{cps}.{tail}.0": sim.timeticks(18_000) for tail in ("5.2.11", "5.2.9", "2.2.4")},
            **{f"{cps}.{tail}.0": sim.integer(value) for tail, value in (("4.1.1", 3), ("2.1.1", 2), ("6.2.3", 1))},
            f"{cps}.2.2.1.0": sim.gauge(97),
        }
        detail = dict(await effector.carry_out(check()))
        assert (detail["control"], detail["returns"]) == ("rfc1628 off_with_return", "cycles")
        card.lacks = frozenset({XUPS, APC, STARTUP})
        detail = dict(await telling_anew(tmp_path, agent).carry_out(check()))
        assert (detail["control"], detail["returns"]) == ("cps off_with_return", "unknown")


async def test_a_profile_without_commands_is_reported_so(tmp_path: Path) -> None:
    """The settings insist on a family that has none; RFC 1628 fills its gap, where the card speaks it."""
    async with carded(U) as (_, agent), telling(tmp_path, options(agent.port, profile="huawei")) as effector:
        with pytest.raises(EffectorError, match="it speaks none of the families that have it"):
            await effector.carry_out(check())


# --- net-snmp -------------------------------------------------------------------------------------------------------

READINGS: Mapping[str, Answer] = {
    f"{U}.2.1.0": 2,
    f"{U}.2.4.0": 97,
    f"{U}.4.1.0": 5,
    "1.3.6.1.2.1.1.2.0": Oid("1.3.6.1.2.1.33"),
}


@asynccontextmanager
async def told_by_snmpd(
    tmp_path: Path, *, conduct: str = "obeys", version: int | str = 3, may_write: bool = True
) -> AsyncIterator[tuple[OutputEffector, Path]]:
    """Serve the control group by a program behind snmpd (pass_persist), and hand out the log of what it was told."""
    log = tmp_path / "card.log"
    script = tmp_path / "card"  # snmpd.conf knows no quotes, and a checkout may lie in a folder with a space
    script.write_text(
        f"#!/bin/sh\nexec {shlex.join([sys.executable, str(CARD), str(log), conduct])}\n", encoding="utf-8"
    )
    script.chmod(0o700)
    async with snmpd(READINGS, lines=(f"pass_persist .{U}.8 {script}",)) as daemon:
        if version == 3:
            more: dict[str, object] = {
                "user": USER,
                "auth": secret(tmp_path, "auth", AUTH),
                "priv": secret(tmp_path, "priv", PRIV),
            }
            write = None
        else:
            more = {"community": secret(tmp_path, "read", COMMUNITY)}
            write = secret(tmp_path, "write", WRITE_COMMUNITY) if may_write else None
        source = options(daemon.port, version=version, timeout_s=5.0, **more)
        # The daemon has one long before it gives an order: its source polls the same card.
        await engine_for(User.read(USER, source) if version == 3 else None)
        async with telling(tmp_path, source, write) as effector:
            yield effector, log


def sets(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


@asynccontextmanager
async def ordered_within(
    limit_s: float, tmp_path: Path, conduct: str
) -> AsyncIterator[tuple[OutputEffector, Path, dict[str, object] | EffectorError]]:
    """Order the output off in 35 s: with another card again, where a busy machine has taken most of the time.

    The card has been checked before, as it is each hour: its program has started, and what the card is is known.
    """
    for number in range(5):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        async with told_by_snmpd(folder, conduct=conduct) as (effector, log):
            await effector.carry_out(check())
            result: dict[str, object] | EffectorError
            try:
                result = dict(await effector.carry_out(arm(limit_s=limit_s, in_s=35.0)))
            except EffectorError as error:
                result = error
            if number < 4 and ("answers too slowly" in str(result) or "stays at 35 s yet" in str(result)):
                continue
            yield effector, log, result
            return


@pytest.mark.parametrize("version", [3, "2c", 1])
async def test_armed_and_called_off_over_every_version(tmp_path: Path, version: int | str) -> None:
    async with told_by_snmpd(tmp_path, version=version) as (effector, log):
        assert dict(await effector.carry_out(check()))["control"] == "rfc1628 off_with_return"
        assert sets(log) == []
        detail = dict(await effector.carry_out(arm()))
        assert isinstance(detail["in_s"], float)
        assert 60 < detail["in_s"] <= 121
        assert sets(log) == ["5 1", "1 1", "3 150", "2 120"]
        assert dict(await effector.carry_out(arm()))["again"] is True
        assert dict(await effector.carry_out(disarm()))["disarmed"] is True
        assert sets(log)[4:] == ["2 -1", "3 -1"]


@pytest.mark.parametrize("conduct", ["whole", "stuck", "obeys"])
async def test_a_bare_stop_keeps_an_order_that_reads_back_as_it_was_set(tmp_path: Path, conduct: str) -> None:
    """A bare stop gives the order 2 s: too short to see that a card that counts whole seconds counts at all."""
    async with ordered_within(2.0, tmp_path, conduct) as (effector, log, result):
        assert isinstance(result, dict), result
        assert result["again"] is False
        assert isinstance(result["in_s"], float)
        assert 34 <= result["in_s"] <= 37
        assert sets(log) == ["5 1", "1 1", "3 65", "2 35"]
        assert dict(await effector.carry_out(disarm()))["disarmed"] is True


async def test_a_bare_stop_leaves_an_order_that_the_card_shows_late(tmp_path: Path) -> None:
    """It is reported as not armed, may be armed all the same, and is called off when the host is back."""
    async with ordered_within(2.0, tmp_path, "late") as (effector, log, result):
        assert isinstance(result, EffectorError), result
        assert "no countdown runs yet" in str(result)
        assert not result.harmless
        assert sets(log)[-1] == "2 35"
        log.with_name("shown").touch()
        assert dict(await effector.carry_out(disarm()))["disarmed"] is True
        assert sets(log)[-2:] == ["2 -1", "3 -1"]


@pytest.mark.parametrize(
    ("conduct", "limit_s", "because"),
    [("stuck", 5.0, "its countdown stays at 35 s"), ("halves", 2.0, "too soon for the host")],
)
async def test_an_order_is_called_off_on_a_contradiction(
    tmp_path: Path, conduct: str, limit_s: float, because: str
) -> None:
    """A countdown that keeps its value for longer than it may, or that shows another value than was set."""
    async with ordered_within(limit_s, tmp_path, conduct) as (_effector, log, result):
        assert isinstance(result, EffectorError), result
        assert because in str(result)
        assert sets(log)[4:6] == ["2 -1", "3 -1"]


@pytest.mark.parametrize(
    ("conduct", "version", "may_write", "because"),
    [
        ("obeys", "2c", False, r"upsAutoRestart cannot be set: .*(noAccess|notWritable)"),
        ("refuses", 3, True, r"upsAutoRestart cannot be set: .*notWritable"),
        ("refuses", 1, True, r"upsAutoRestart cannot be set: .*(readOnly|noSuchName)"),
        ("refuses-2", 3, True, r"the order is refused: .*notWritable"),
        ("wrong-2", 3, True, r"the order is refused: .*wrong(Value|Type)"),
    ],
)
async def test_what_net_snmp_refuses(
    tmp_path: Path, conduct: str, version: int | str, because: str, *, may_write: bool
) -> None:
    """By its access control, and on behalf of the card; each in the words of its version. Nothing counts down."""
    async with told_by_snmpd(tmp_path, conduct=conduct, version=version, may_write=may_write) as (effector, log):
        with pytest.raises(EffectorError, match=because):
            await effector.carry_out(arm())
        assert "2 120" not in sets(log)
        if conduct.endswith("-2"):
            assert sets(log)[-1] == "3 -1", "the countdown to on is taken back"


async def test_what_a_view_hides_is_not_there(tmp_path: Path) -> None:
    """A card whose user may see readings and no controls: told beforehand, by name."""
    hidden = ("view noctl included .1.3.6.1", f"view noctl excluded .{U}.8", "rocommunity hidden 127.0.0.1 -V noctl")
    async with snmpd(READINGS, lines=hidden) as daemon:
        source = options(daemon.port, timeout_s=5.0, community=secret(tmp_path, "hidden", "hidden"))
        async with telling(tmp_path, source) as effector:
            with pytest.raises(EffectorError, match="lacks upsAutoRestart, upsShutdownType"):
                await effector.carry_out(check())


@pytest.mark.slow
async def test_a_card_that_hangs_is_left_in_time(tmp_path: Path) -> None:
    """snmpd waits for its program, and answers nobody meanwhile."""
    async with told_by_snmpd(tmp_path, conduct="hangs-3") as (effector, log):
        async with watched() as machine:
            began_s = boottime_s()
            with pytest.raises(EffectorError, match="a: "):
                await effector.carry_out(arm(limit_s=3.0))
            assert boottime_s() - began_s < 3.0 + machine.late_s
        assert "2 120" not in sets(log)
