"""Finding the family over the wire: every made walk served by snmpd in versions 1 and 2c, and what the search costs."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.model.events import Reading, SourceFailed
from powerguard.sim import snmp_values as sim
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid
from powerguard.ups.profiles.walk import parse_walk
from powerguard.ups.snmp.discovery import discover
from powerguard.ups.snmp.port import MAX_BATCH, CardPort, SnmpError
from powerguard.ups.snmp.source import SnmpSource, probe
from tests.peers.hurried import now_s
from tests.peers.snmp_agent import Fault
from tests.peers.snmpd import COMMUNITY, snmpd
from tests.ups.snmp.snmp_helpers import WALKS, as_sim, card, options, secret

PROFILES = load_profiles(None)
FAMILIES = sorted(profile.name for profile in PROFILES.ranked())


def family(name: str) -> dict[str, Answer]:
    path = WALKS / "families" / f"{name}.walk"
    return parse_walk(path.read_text(encoding="utf-8"), path.name)


def outage(name: str) -> dict[str, Answer]:
    """Return what this family answers differently in its case `on battery`."""
    data = json.loads((WALKS / "families" / f"{name}.json").read_text(encoding="utf-8"))
    changed = next(case["set"] for case in data["cases"] if case["expected"].get("on_battery"))
    whole = {Oid(data["base"] + oid if oid.startswith(".") else oid): value for oid, value in changed.items()}
    return {oid: value if isinstance(value, int) else value.encode() for oid, value in whole.items() if is_plain(value)}


def is_plain(value: int | str) -> bool:
    """Whether it is a number or a text, and not one of our marks."""
    return isinstance(value, int) or not (value in {"absent", "null"} or value.startswith("oid:"))


@pytest.mark.peer("snmpd")
@pytest.mark.parametrize("name", FAMILIES)
async def test_every_family_is_found_over_the_wire(name: str, tmp_path: Path) -> None:
    """Version 1 refuses a whole GET for one object that is not there: no family may hide behind that."""
    served = {oid: answer for oid, answer in family(name).items() if not isinstance(answer, Missing)}
    values = {oid: answer for oid, answer in served.items() if not oid.startswith("1.3.6.1.2.1.1.")}
    async with snmpd(values) as peer:
        for version in (1, "2c"):
            (tmp_path / str(version)).mkdir()
            community = secret(tmp_path / str(version), "c", COMMUNITY)
            settings = options(peer.port, version=version, community=community, timeout_s=5.0)
            report = await probe(settings, profiles=PROFILES)
            assert report.profiles[0] == name
            assert report.decoded.output_source == "utility"
            assert all(report.raw[oid] == raw for oid, raw in values.items() if oid in report.raw)


class Counting(CardPort):
    """Counts the round trips."""

    trips = 0

    async def _request(self, generator: object, varbinds: list[Any]) -> tuple[int, int, dict[str, Answer]]:
        self.trips += 1
        return await super()._request(generator, varbinds)


@pytest.mark.parametrize("version", [1, "2c"])
@pytest.mark.parametrize("name", FAMILIES)
async def test_what_the_search_costs(name: str, version: int | str) -> None:
    """Old cards take 0.1 s and more for an answer: a search must stay a matter of seconds with 20 families and more."""
    values = {oid: as_sim(answer) for oid, answer in family(name).items()}
    async with card(values) as agent:
        port = Counting(options(agent.port, version=version, timeout_s=5.0))
        plan = await discover(port, "card", PROFILES, None, with_pdus=True)
        await port.close()
    assert plan.profiles[0].name == name
    assert port.trips <= (35 if version == 1 else 12)


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_card_that_refuses_whatever_it_lacks_is_found(name: str) -> None:
    """A general error for each object that is not there, and there are many of those in every family."""
    values = {oid: as_sim(answer) for oid, answer in family(name).items()}
    async with card(values) as agent:
        agent.fault = Fault.REFUSES
        report = await probe(options(agent.port, timeout_s=5.0), profiles=PROFILES)
        agent.fault = Fault.NONE
        whole = await probe(options(agent.port, timeout_s=5.0), profiles=PROFILES)
    assert report.profiles == whole.profiles
    assert (report.decoded.output_source, report.decoded.numbers) == ("utility", whole.decoded.numbers)


@pytest.mark.parametrize("version", [1, "2c"])
async def test_what_a_stranger_costs(version: int | str) -> None:
    """A printer in the place of a UPS: everything is asked, in vain."""
    async with card({"1.3.6.1.2.1.1.1.0": sim.octets("a printer")}) as agent:
        port = Counting(options(agent.port, version=version, timeout_s=5.0))
        with pytest.raises(SnmpError, match="fits no profile"):
            await discover(port, "card", PROFILES, None)
        await port.close()
    assert port.trips <= (45 if version == 1 else 8)


@pytest.mark.hurried
@pytest.mark.parametrize("name", FAMILIES)
async def test_the_source_reads_every_family(name: str) -> None:
    """Poll after poll, with what is asked every time and what is asked now and then; then its own outage."""
    heard: asyncio.Queue[Reading | SourceFailed] = asyncio.Queue()
    values = {oid: as_sim(answer) for oid, answer in family(name).items()}
    async with card(values) as agent, asyncio.timeout(60):
        source = SnmpSource(options(agent.port, poll_s=0.5, timeout_s=5.0), ups="rack", clock=now_s, profiles=PROFILES)
        async with asyncio.TaskGroup() as group:
            polling = group.create_task(source.run(heard.put_nowait))
            for _ in range(3):
                source.poll_now()
                event = await heard.get()
                assert isinstance(event, Reading), event
                assert (event.output_source, event.low_battery) == ("utility", False)
            for oid, answer in outage(name).items():
                values[oid] = as_sim(answer)
            source.poll_now()
            on_battery = False
            while not on_battery:  # Polls that were under way are of the time before.
                event = await heard.get()
                assert isinstance(event, Reading), event
                on_battery = event.output_source == "battery"
            polling.cancel()


class WithoutNext:
    """A card that answers what it is asked for, and never what comes next."""

    at_once = MAX_BATCH

    def __init__(self, answers: Mapping[str, Answer], how: str) -> None:
        self.answers = answers
        self.how = how

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        return {oid: self.answers.get(oid, Missing.NO_SUCH_OBJECT) for oid in oids}

    async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
        if self.how == "refuses":
            msg = "card: genErr to what comes next"
            raise SnmpError(msg)
        return {} if self.how == "says nothing" else {Oid("1.3.6.1.2.1.1.1.0"): b"the same again"}

    async def walk(self, root: str, *, limit_s: float | None = None) -> dict[str, Answer]:
        return {oid: answer for oid, answer in self.answers.items() if oid.startswith(f"{root}.")}

    async def set(self, values: object) -> None:
        raise SnmpError(str(values))

    async def close(self) -> None:
        return


@pytest.mark.parametrize("how", ["refuses", "says nothing", "says the same again"])
@pytest.mark.parametrize("name", FAMILIES)
async def test_a_card_that_cannot_say_what_comes_next_is_asked_outright(name: str, how: str) -> None:
    plan = await discover(WithoutNext(family(name), how), "card", PROFILES, None)
    assert plan.profiles[0].name == name


class Endless(WithoutNext):
    """A card whose tables never end: there is always a next row."""

    asked = 0

    async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
        if len(oids) > 3:  # The search for families; what comes later are the columns of the one that it is.
            return {}
        self.asked += 1
        return {Oid(f"{oid}.1" if oid.count(".") < 14 else f"{oid.rpartition('.')[0]}.{self.asked}"): 1 for oid in oids}


async def test_a_card_without_end_is_left() -> None:
    endless = Endless(family("rfc1628"), "")
    plan = await discover(endless, "card", PROFILES, None)
    assert plan.profiles[0].name == "rfc1628"
    assert endless.asked <= 260


async def test_a_card_that_leaves_answers_out_loses_no_row() -> None:
    """Four columns are asked at once, and it never answers more than one of them."""

    class Sparse(CardPort):
        async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
            found = await super().following(oids)
            return dict(list(found.items())[:1]) if len(oids) == 4 else found

    async with card({oid: as_sim(answer) for oid, answer in family("rfc1628").items()}) as agent:
        port = Sparse(options(agent.port))
        plan = await discover(port, "card", PROFILES, None)
        await port.close()
    columns = [column for profile in plan.profiles for column in profile.columns()]
    assert len(columns) == 4
    assert all(f"{column}.1" in plan.answers for column in columns)


async def test_a_card_that_falls_silent_is_not_asked_on() -> None:
    """Unanswered is an end, no reason to try the slower way."""

    class Silent(WithoutNext):
        async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
            msg = f"no answer to {len(oids)} objects"
            raise SnmpError(msg, unanswered=True)

    with pytest.raises(SnmpError, match="no answer"):
        await discover(Silent(family("xups"), ""), "card", PROFILES, None)


async def test_a_device_with_another_index_than_the_first_is_found() -> None:
    """Tripp Lite numbers the devices behind a card; what comes next finds the second one as well."""
    answers = {
        Oid(oid.replace(".1.1.1.3.1", ".1.1.1.3.2")) if oid.startswith("1.3.6.1.4.1.850.1.1.3.1.3.1") else oid: raw
        for oid, raw in family("tripplite").items()
    }
    moved = {oid.removesuffix(".1") + ".2" if oid.endswith("3.3.1.1.1.1") else oid: raw for oid, raw in answers.items()}
    async with card({oid: as_sim(raw) for oid, raw in moved.items()}) as agent:
        port = CardPort(options(agent.port))
        plan = await discover(port, "card", PROFILES, None)
        await port.close()
    assert plan.profiles[0].name == "tripplite"
