"""The snmp source against simulated cards: what it publishes, when it gives up, how it comes back."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pysnmp.proto import rfc1905
from structlog.testing import capture_logs

from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.sim import snmp_values as sim
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.vocabulary import Answer, Missing
from powerguard.ups.snmp.port import MAX_BATCH, CardPort, SnmpError, SnmpPort
from powerguard.ups.snmp.source import SnmpSource, probe
from tests.peers.hurried import now_s
from tests.peers.machine import watched
from tests.peers.snmp_agent import Fault, SimUser, SnmpAgent
from tests.ups.snmp.snmp_helpers import A, NarrowCard, U, card, options, secret, table, walk

pytestmark = pytest.mark.hurried

PROFILES = load_profiles(None)
Kind = TypeVar("Kind", Reading, SourceFailed)
Heard = asyncio.Queue[Reading | SourceFailed]


@asynccontextmanager
async def listening(
    agent: SnmpAgent, *, port: SnmpPort | None = None, retries: int = 1, limit_s: float = 60, **more: object
) -> AsyncIterator[tuple[SnmpSource, Heard]]:
    """Run a source of the card, and hand out what it publishes."""
    heard: asyncio.Queue[Reading | SourceFailed] = asyncio.Queue()
    settings = options(agent.port, **{"poll_s": 0.5, **more})
    port = CardPort(settings, retries=retries) if port is None else port
    source = SnmpSource(settings, ups="rack-a", clock=now_s, port=port, profiles=PROFILES)
    task = asyncio.get_running_loop().create_task(source.run(heard.put_nowait))
    try:
        async with asyncio.timeout(limit_s):
            yield source, heard
    finally:
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.wait([task])


async def until(heard: Heard, kind: type[Kind]) -> Kind:
    while not isinstance(event := await heard.get(), kind):
        pass
    return event


async def test_a_reading_is_whole() -> None:
    async with card(table("apc")) as agent, listening(agent, timeout_s=5.0) as (source, heard):
        reading = await heard.get()
    assert isinstance(reading, Reading)
    assert (reading.ups, reading.source) == ("rack-a", f"snmp:127.0.0.1:{agent.port}")
    assert (reading.output_source, reading.runtime_s, reading.charge_pct) == (OutputSource.UTILITY, 1740, 99.5)
    assert (reading.input_present, reading.low_battery, reading.authenticated) == (True, False, False)
    assert 0 <= now_s() - reading.at_s < 5
    assert source.name == reading.source


@pytest.mark.parametrize("version", [1, "2c", 3])
async def test_polls_keep_to_their_grid(version: int | str, tmp_path: Path) -> None:
    """A poll that took long must not shift the ones after it."""
    user = SimUser(name="pg", auth=b"authpass-of-the-tests", priv=b"privpass-of-the-tests")
    keys: dict[str, Any] = {}
    if version == 3:
        auth, priv = secret(tmp_path, "a", "authpass-of-the-tests"), secret(tmp_path, "p", "privpass-of-the-tests")
        keys = {"user": "pg", "auth": auth, "priv": priv}
    async with (
        card(table("apc"), user=user) as agent,
        listening(agent, version=version, timeout_s=5.0, **keys) as (_, heard),
        watched() as machine,
    ):
        first = await until(heard, Reading)
        times = [(await heard.get()).at_s for _ in range(4)]
        late_s = machine.late_s
    assert first.authenticated is (version == 3)
    assert 1.2 - late_s <= times[-1] - times[0] <= 1.8 + late_s


async def test_battery_is_seen_with_its_witnesses() -> None:
    """The alarm row and the runtime in RFC 1628 appear only on battery; both must be found."""
    values = table("rfc1628")
    del values[f"{U}.2.3.0"]
    async with card(values) as agent, listening(agent, timeout_s=5.0) as (_, heard):
        assert (await until(heard, Reading)).runtime_s is None
        values |= {
            f"{U}.4.1.0": sim.integer(5),
            f"{U}.2.2.0": sim.integer(4),
            f"{U}.3.3.1.3.1": sim.integer(0),
            f"{U}.6.1.0": sim.gauge(1),
            f"{U}.6.2.1.2.17": sim.oid(f"{U}.6.3.2"),
            f"{U}.2.3.0": sim.integer(12),
        }
        while (reading := await until(heard, Reading)).output_source is not OutputSource.BATTERY:
            pass
        assert (reading.on_battery_s, reading.input_present, reading.alarms) == (4, False, ("on_battery",))
        assert (await until(heard, Reading)).runtime_s == 720


async def test_poll_now_polls_at_once_but_never_floods() -> None:
    async with card(table("apc")) as agent, listening(agent, poll_s=10.0, timeout_s=5.0) as (source, heard):
        first = await heard.get()
        source.poll_now()
        second = await heard.get()
        assert second.at_s - first.at_s < 5
        before, began_s = agent.requests, now_s()
        for _ in range(50):
            source.poll_now()
            await asyncio.sleep(0.01)
        polls = (now_s() - began_s) / 0.2 + 1
        assert agent.requests - before <= polls * 2  # a poll is two requests
        await asyncio.sleep(0.5)
        while not heard.empty():
            heard.get_nowait()
        asked_s = now_s()
        third = await until(heard, Reading)
        assert third.at_s - asked_s < 11, "polls that come early do not put off the next one in turn"


async def test_a_slow_card_is_polled_less_often_and_this_is_reported() -> None:
    """A poll takes 0.6 s of the 0.5 s to the next one: others may read the card, too. At most twice poll_s."""
    async with card(table("apc")) as agent, listening(agent, timeout_s=5.0) as (source, heard):
        await until(heard, Reading)
        assert source.trouble == ""
        agent.fault, agent.late_s = Fault.LATE, 0.6
        times = [(await until(heard, Reading)).at_s for _ in range(9)][4:]
        assert all(0.85 <= later - earlier <= 1.15 for earlier, later in pairwise(times))
        assert len({round(later - earlier, 3) for earlier, later in pairwise(times)}) > 1, "readers do not keep step"
        assert "it is polled every 0.5 to 1 s. Let one upsd read it" in source.trouble
        agent.fault = Fault.NONE
        times = [(await until(heard, Reading)).at_s for _ in range(6)][3:]
        assert all(later - earlier <= 0.6 for earlier, later in pairwise(times))
        assert source.trouble == ""


async def test_lost_after_three_misses_and_back_again() -> None:
    values = table("apc")
    with capture_logs() as logs:
        async with card(values) as agent, listening(agent) as (_, heard):
            await until(heard, Reading)
            agent.fault = Fault.DROP
            failures = [await until(heard, SourceFailed) for _ in range(4)]
            assert [failure.lost for failure in failures] == [False, False, True, True]
            assert failures[0].reason.startswith(f"no answer from 127.0.0.1:{agent.port} in 1.0 s (v2c): check")
            agent.fault = Fault.NONE
            values[f"{A}.4.1.1.0"] = sim.integer(3)
            reading = await until(heard, Reading)
            assert reading.output_source is OutputSource.BATTERY
            assert reading.at_s - failures[-1].at_s < 8
    # Lost and back are told once, by the core, which knows what follows from them.
    assert {"source_lost", "source_recovered"}.isdisjoint(entry["event"] for entry in logs)


async def test_lost_on_battery_before_the_last_reading_is_3_s_old() -> None:
    """0.8 s for an answer, no second try, and the next poll at once: the core must soon know that it counts alone."""
    values = table("apc") | {f"{A}.4.1.1.0": sim.integer(3)}
    async with card(values) as agent, listening(agent, poll_s=1.0, timeout_s=1.0) as (source, heard):
        await until(heard, Reading)
        assert (await until(heard, Reading)).output_source is OutputSource.BATTERY
        agent.fault = Fault.DROP
        failures = [await until(heard, SourceFailed) for _ in range(2)]
        assert failures[0].reason == f"no answer from 127.0.0.1:{agent.port} in 0.8 s, on battery"
        assert [failure.lost for failure in failures] == [False, True]
        agent.fault = Fault.NONE
        source.poll_now()
        assert (await until(heard, Reading)).output_source is OutputSource.BATTERY


async def test_a_card_that_is_away_at_the_start_is_found_later() -> None:
    async with card(table("rfc1628")) as agent:
        agent.fault = Fault.DROP
        async with listening(agent) as (_, heard):
            assert isinstance(await heard.get(), SourceFailed)
            agent.fault = Fault.NONE
            assert (await until(heard, Reading)).charge_pct == 100


async def test_a_card_that_lost_its_ups_is_no_source() -> None:
    values = table("apc")
    async with card(values) as agent, listening(agent) as (_, heard):
        await until(heard, Reading)
        values[f"{A}.8.1.0"] = sim.integer(2)
        failure = await until(heard, SourceFailed)
        assert "lost the UPS behind it (upsCommStatus)" in failure.reason
        values[f"{A}.8.1.0"] = sim.integer(1)
        await until(heard, Reading)


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE])
async def test_no_fault_ends_the_source_or_makes_up_a_reading(fault: Fault) -> None:
    """Whatever the card does: a reading that says what the UPS says, or a failure; and all is well afterwards."""
    values = table("apc")
    async with card(values, seed=3) as agent, listening(agent, retries=0) as (source, heard):
        await until(heard, Reading)
        agent.fault, agent.late_s = fault, 0.7
        while not heard.empty():
            heard.get_nowait()
        for _ in range(2):
            source.poll_now()
            event = await heard.get()
            if isinstance(event, Reading):
                rubbish = OutputSource.UNKNOWN if fault is Fault.TEXT else OutputSource.UTILITY
                assert event.output_source is rubbish
                assert event.runtime_s in {1740, None}
                assert event.charge_pct in {99.5, 100, None}
            else:
                assert str(agent.port) in event.reason
        agent.fault = Fault.NONE
        assert (await until(heard, Reading)).runtime_s == 1740


async def test_a_rebooted_card_is_looked_at_again() -> None:
    """sysUpTime went backwards: countdowns and settings may be others, and objects new."""
    values = table("apc")
    with capture_logs() as logs:
        async with card(values) as agent, listening(agent, timeout_s=5.0) as (_, heard):
            assert (await until(heard, Reading)).output_off_in_s is None
            values["1.3.6.1.2.1.1.3.0"] = sim.timeticks(300)
            values |= {f"{U}.4.1.0": sim.integer(3), f"{U}.2.4.0": sim.integer(99), f"{U}.8.2.0": sim.integer(180)}
            while (await until(heard, Reading)).output_off_in_s != 180:
                pass
    assert [entry["up_s"] for entry in logs if entry["event"] == "card_rebooted"] == [3]


async def test_two_cards_with_one_address_are_reported_once() -> None:
    """Each step back looked like a reboot, and the readings of two UPSes would be taken for one's."""
    values = table("apc")
    with capture_logs() as logs:
        async with card(values) as agent, listening(agent, timeout_s=5.0) as (_, heard):
            for up_ticks in (90_000, 50_000) * 4:
                values["1.3.6.1.2.1.1.3.0"] = sim.timeticks(up_ticks)
                for _ in range(2):
                    await until(heard, Reading)
    logged = [entry for entry in logs if entry["event"] in ("card_rebooted", "source_doubtful")]
    assert [entry["event"] for entry in logged] == ["source_doubtful"]
    assert "two devices answer there in turn" in logged[0]["because"]


async def test_a_card_that_is_as_it_was_is_no_news() -> None:
    """It is looked at again every five minutes."""
    values = table("apc")
    with capture_logs() as logs:
        async with card(values) as agent, listening(agent, poll_s=10.0, limit_s=1000.0) as (_, heard):
            began_s = now_s()
            while now_s() - began_s < 320.0:
                await until(heard, Reading)
    assert [entry["event"] for entry in logs].count("source_found") == 1


async def test_another_card_takes_the_place() -> None:
    """An address that suddenly belongs to another family: found at once, and told, for its battery is another, too."""
    values = table("apc")
    async with card(values) as agent, listening(agent) as (_, heard):
        await until(heard, Reading)
        values.clear()
        values |= table("rfc1628")
        with capture_logs() as logs:
            assert "without upsBasicOutputStatus" in (await until(heard, SourceFailed)).reason
            assert (await until(heard, Reading)).load_pct == 38
    (logged,) = [entry for entry in logs if entry["event"] == "device_changed"]
    assert logged["was"].startswith("apc-powernet ")
    assert logged["now"].startswith("rfc1628 ")


class Drowsy:
    """A port whose card answers well until it falls asleep: each request then takes longer than any patience."""

    at_once = MAX_BATCH

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.asleep = False

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        if self.asleep:
            await asyncio.sleep(30)
        return {oid: self.answers.get(oid, Missing.NO_SUCH_OBJECT) for oid in oids}

    async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
        return {}

    async def walk(self, root: str, *, limit_s: float | None = None) -> dict[str, Answer]:
        return {}

    async def set(self, values: object) -> None:
        raise SnmpError(str(values))

    async def close(self) -> None:
        return


@pytest.mark.slow
async def test_an_old_card_that_is_slow_is_found_in_the_end() -> None:
    """Version 1 needs some thirty requests to be known, and this card takes 0.35 s for each: more than the first limit.

    It is told as a failure meanwhile, and the next look-around has twice as long.
    """
    async with card(table("families/apc-powernet")) as agent:
        agent.fault, agent.late_s = Fault.LATE, 0.65
        async with listening(agent, version=1, limit_s=60) as (_, heard):
            failed = await until(heard, SourceFailed)
            assert "answers too slowly: no whole reading in 10 s" in failed.reason
            reading = await until(heard, Reading)
            assert reading.output_source is OutputSource.UTILITY
            agent.late_s = 0.05
            await until(heard, Reading)


async def test_a_card_slower_than_patience() -> None:
    """The source says so instead of falling minutes behind."""
    port = Drowsy(walk("apc"))
    async with card({}) as agent, listening(agent, port=port) as (_, heard):
        assert (await until(heard, Reading)).runtime_s == 1740
        port.asleep = True
        assert "answers too slowly: no whole reading in 4 s" in (await until(heard, SourceFailed)).reason


async def test_a_card_that_answers_one_object_at_a_time_is_heard_through_an_outage() -> None:
    """It takes 50 ms for each: what is patience with a whole request on battery is patience with one object here."""
    values = table("rfc1628")
    async with NarrowCard(values, 1) as agent:
        agent.fault, agent.late_s = Fault.LATE, 0.05
        async with listening(agent, timeout_s=1.0) as (_, heard):
            for _ in range(3):
                assert (await until(heard, Reading)).output_source is OutputSource.UTILITY
            values |= {f"{U}.4.1.0": sim.integer(5), f"{U}.2.2.0": sim.integer(4)}
            events = [await heard.get() for _ in range(8)]
    assert [each for each in events if isinstance(each, SourceFailed)] == []
    assert isinstance(events[-1], Reading)
    assert events[-1].output_source is OutputSource.BATTERY


class Forgetful(SnmpAgent):
    """A card that stops to answer what comes next among its alarms, or refuses it: the table cannot be walked."""

    is_mute = False
    refuses = False

    def _respond(self, pdu: Any, *, v1: bool, may_write: bool) -> Any:  # noqa: ANN401 - the agent's own type is private
        answer = super()._respond(pdu, v1=v1, may_write=may_write)
        if pdu.kind is not rfc1905.GetNextRequestPDU or not pdu.varbinds[0][0].startswith(f"{U}.6.2"):
            return answer
        return None if self.is_mute else replace(answer, status=5, index=1) if self.refuses else answer


async def test_on_battery_no_reading_waits_for_the_alarms() -> None:
    """They are walked with every fifth poll. What stood in the table counts on, while nothing else has changed."""
    values = table("rfc1628") | {
        f"{U}.4.1.0": sim.integer(5),
        f"{U}.2.2.0": sim.integer(4),
        f"{U}.6.1.0": sim.gauge(2),
        f"{U}.6.2.1.2.1": sim.oid(f"{U}.6.3.2"),
        f"{U}.6.2.1.2.2": sim.oid(f"{U}.6.3.3"),
    }
    async with Forgetful(lambda: values) as agent, listening(agent, timeout_s=5.0) as (_, heard), watched() as machine:
        while (before := await until(heard, Reading)).alarms != ("low_battery", "on_battery"):
            pass
        await until(heard, Reading)
        agent.is_mute = True
        for _ in range(12):
            reading = await heard.get()
            assert isinstance(reading, Reading)
            assert reading.alarms == ("low_battery", "on_battery")
            assert reading.at_s - before.at_s <= 2.0 + machine.late_s
            before = reading


async def test_oddities_are_reported_once() -> None:
    values = table("apc")
    values[f"{A}.2.2.3.0"] = sim.timeticks(2**32 - 1)
    with capture_logs() as logs:
        async with card(values) as agent, listening(agent) as (_, heard):
            for _ in range(3):
                assert (await until(heard, Reading)).runtime_s is None
    (logged,) = [entry for entry in logs if entry["event"] == "value_rejected"]
    assert logged["because"] == "runtime_s: means: not measured"


async def test_an_oddity_with_other_figures_is_the_same_one() -> None:
    """Both families count down in an outage, and temperatures change: not a warning for each poll."""
    values = table("apc") | {oid: value for oid, value in table("rfc1628").items() if oid.startswith(U)}
    values[f"{U}.2.3.0"] = sim.integer(10)
    with capture_logs() as logs:
        async with card(values) as agent, listening(agent) as (source, heard):
            for turn in range(3):
                values[f"{A}.2.2.3.0"] = sim.timeticks(174_000 - 100 * turn)
                values[f"{A}.2.3.2.0"] = sim.integer(1205 + turn)
                source.poll_now()
                await until(heard, Reading)
    logged = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert sorted(logged) == ["objects_disagree", "value_rejected"]


async def test_what_a_better_object_reports_is_asked_now_and_then_only() -> None:
    """A quiet card with both families is asked half; on battery, or when a number falls silent, everything at once."""
    values = table("apc") | {oid: value for oid, value in table("rfc1628").items() if oid.startswith(U)}
    fallback = f"{U}.2.3.0"
    asked: list[bool] = []

    class Watched(CardPort):
        async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
            asked.append(fallback in oids)
            return await super().get(oids)

    async with card(values) as agent:
        port = Watched(options(agent.port, timeout_s=5.0))
        async with listening(agent, port=port) as (source, heard):
            await until(heard, Reading)
            asked.clear()
            for _ in range(3):
                source.poll_now()
                assert (await until(heard, Reading)).runtime_s == 1740
            assert asked == [False] * len(asked)
            del values[f"{A}.2.2.3.0"]
            source.poll_now()
            while (await until(heard, Reading)).runtime_s != 2100:
                pass
            assert asked[-1]
            values[f"{A}.4.1.1.0"] = sim.integer(3)
            source.poll_now()
            while (await until(heard, Reading)).output_source is not OutputSource.BATTERY:
                pass
            asked.clear()
            source.poll_now()
            while not any(asked):
                await until(heard, Reading)


async def test_the_smaller_of_two_runtimes_is_in_every_reading() -> None:
    """Far apart, the less trusted object's counts: not only in the polls that ask for everything."""
    values = table("apc") | {oid: value for oid, value in table("rfc1628").items() if oid.startswith(U)}
    values[f"{U}.2.3.0"] = sim.integer(10)
    async with card(values) as agent, listening(agent) as (source, heard):
        for _ in range(4):
            source.poll_now()
            assert (await until(heard, Reading)).runtime_s == 600


# --- The probe ------------------------------------------------------------------------------------------------------


async def test_a_probe_shows_what_a_card_is() -> None:
    values = table("apc") | {oid: value for oid, value in table("rfc1628").items() if oid.startswith(U)}
    async with card(values) as agent:
        report = await probe(options(agent.port), profiles=PROFILES)
    assert report.profiles == ("apc-powernet", "rfc1628")
    assert report.identity.sys_object_id == "1.3.6.1.4.1.318.1.3.27"
    assert report.identity.sys_descr.startswith("APC Web/SNMP")
    assert report.raw[f"{A}.4.1.1.0"] == 2
    assert (report.decoded.runtime_s, report.authenticated) == (1740, False)
    assert 0 < report.latency_s < 10


@pytest.mark.parametrize("how", ["is_mute", "refuses"])
async def test_a_probe_of_a_card_whose_alarms_cannot_be_walked(how: str) -> None:
    """Its source reads it, so doctor and discover do."""
    values = table("rfc1628") | {f"{U}.6.1.0": sim.gauge(1)}
    async with Forgetful(lambda: values) as agent:
        setattr(agent, how, True)
        report = await probe(options(agent.port), profiles=PROFILES)
    assert (report.decoded.output_source, report.decoded.runtime_s) == (OutputSource.UTILITY, 2100)


@pytest.mark.parametrize(
    ("name", "more", "hint"),
    [
        ("apc", {"profile": "apc-powernett"}, "there is no profile 'apc-powernett' (did you mean apc-powernet?)"),
        ("apc", {"profile": "x"}, "there is no profile 'x' (known: apc-powernet, "),
        ("rfc1628", {"profile": "apc-powernet"}, "does not fit profile apc-powernet"),
        (None, {}, "fits no profile (tried: apc-powernet, "),
    ],
)
async def test_a_card_that_does_not_fit(name: str | None, more: dict[str, Any], hint: str) -> None:
    values = {"1.3.6.1.2.1.1.1.0": sim.octets("a printer\n\x1b[31m")} if name is None else table(name)
    async with card(values) as agent:
        with pytest.raises(SnmpError) as caught:
            await probe(options(agent.port, **more), profiles=PROFILES)
    assert hint in str(caught.value)
    assert str(caught.value).isprintable()


async def test_a_named_profile_is_still_helped_by_rfc1628() -> None:
    values = table("apc") | {f"{U}.4.1.0": sim.integer(3), f"{U}.2.4.0": sim.integer(1), f"{U}.8.2.0": sim.integer(77)}
    async with card(values) as agent:
        report = await probe(options(agent.port, profile="apc-powernet"), profiles=PROFILES)
    assert (report.profiles, report.decoded.output_off_in_s) == (("apc-powernet", "rfc1628"), 77)
