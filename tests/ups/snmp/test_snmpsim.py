"""snmpsim as the card: another SNMP engine than ours, with NULLs, overlays and errors that snmpd cannot serve.

What a walk tells from its file it must tell over the wire: made walks of every family, and recorded ones where they lie
beside the checkout.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.main import main
from powerguard.cli.snmp.probe import shape
from powerguard.cli.snmp.verb import choose_for
from powerguard.clock import boottime_s
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.ups.profiles.decode import decode
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.probe import choose
from powerguard.ups.profiles.vocabulary import Missing
from powerguard.ups.profiles.walk import parse_walk
from powerguard.ups.snmp.port import CardPort, SnmpError, Typed
from powerguard.ups.snmp.source import ProbeReport, SnmpSource, probe
from tests.peers.snmpsim import AUTH, COMMUNITY, PRIV, USERS, Records, Snmpsim, read_records, snmpsim, written
from tests.ups.snmp.snmp_helpers import WALKS, U, options, secret

pytestmark = [pytest.mark.peer("snmpsim-command-responder"), pytest.mark.xdist_group("snmpsim")]

PROFILES = load_profiles(None)
UPSES = PROFILES.ranked()
FAMILIES = WALKS / "families"
MADE = sorted(WALKS.rglob("*.walk"))
RECORDED = sorted((Path(__file__).parents[4] / "shared" / "ups-walks").glob("*.snmprec"))
WAYS: tuple[dict[str, Any], ...] = ({"version": 1}, {"version": "2c"}, {"user": "sha"}, {"user": "aes256"})
"""In versions 1, 2c and 3, with authentication alone and with privacy."""
STATUS, CHARGE, BATTERY_S, RUNTIME = f"{U}.4.1.0", f"{U}.2.4.0", f"{U}.2.2.0", f"{U}.2.3.0"


@pytest.fixture(scope="module")
def agent() -> Iterator[Snmpsim]:
    with snmpsim() as running:
        yield running


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("secrets")
    texts = {"community": COMMUNITY, "auth": AUTH, "priv": PRIV, "wrong": "wrongpass-of-the-tests"}
    return {name: secret(folder, name, text) for name, text in texts.items()}


def way(secrets: Mapping[str, Any], *, version: int | str = 3, user: str | None = None) -> dict[str, Any]:
    """Settings of one version; of a user with the protocols that snmpsim was told."""
    if user is None:
        return {"version": version, "community": secrets["community"]}
    given: dict[str, Any] = {"version": 3, "user": user}
    for kind, protocol in zip(("auth", "priv"), USERS[user], strict=False):
        given |= {kind: secrets[kind], f"{kind}_protocol": protocol}
    return given


async def look(agent: Snmpsim, settings: Mapping[str, Any]) -> ProbeReport:
    return await probe(options(agent.port, **{"timeout_s": 5.0, **settings}), profiles=PROFILES, with_pdus=True)


@asynccontextmanager
async def opened(agent: Snmpsim, settings: Mapping[str, Any], *, retries: int = 1) -> AsyncIterator[CardPort]:
    port = CardPort(options(agent.port, **{"timeout_s": 5.0, **settings}), retries=retries)
    try:
        yield port
    finally:
        await port.close()


# --- Walks ----------------------------------------------------------------------------------------------------------


async def compare(agent: Snmpsim, settings: Mapping[str, Any], path: Path) -> None:
    """Probe the card, and look at the file: what is told of both must be the same, to the last word."""
    text = written(read_records(path))
    agent.show(text)
    answers = parse_walk(text, path.name)
    chosen, _notes = choose_for(PROFILES, answers, None)
    want = shape("walk", chosen, decode(chosen, answers), answers, from_={})
    report = await look(agent, settings)
    found = [PROFILES.by_name[name] for name in report.profiles]
    assert shape("walk", found, report.decoded, {**answers, **report.raw}, from_={}) == want
    assert report.identity.sys_object_id == (want["device"]["sys_object_id"] or "")
    heard = {oid: raw for oid, raw in report.raw.items() if not isinstance(raw, Missing)}
    assert heard == {oid: answers[oid] for oid in heard}


PAIRS = [
    pytest.param(path, how, id=f"{path.stem}-{path.parent.name}", marks=() if at % 5 == 0 else pytest.mark.slow)
    for at, (path, how) in enumerate(zip(MADE, cycle(WAYS)))
]
"""At each commit every fifth walk, in each version in turn: our own card serves them all (test_snmp_families)."""
REAL = [pytest.param(path, how, id=path.stem) for path, how in zip(RECORDED, cycle(WAYS[1:]))] or [
    pytest.param(None, None, marks=pytest.mark.skip("no recorded walks of real devices beside the checkout"))
]
"""Without version 1, which takes three times as many requests: the long run has it."""


@pytest.mark.parametrize(("path", "how"), PAIRS)
async def test_a_made_walk_reports_the_same_over_the_wire(
    agent: Snmpsim, secrets: dict[str, Any], path: Path, how: dict[str, Any]
) -> None:
    await compare(agent, way(secrets, **how), path)


@pytest.mark.parametrize(("path", "how"), REAL)
async def test_a_recorded_walk_reports_the_same_over_the_wire(
    agent: Snmpsim, secrets: dict[str, Any], path: Path, how: dict[str, Any]
) -> None:
    await compare(agent, way(secrets, **how), path)


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("path", [*MADE, *RECORDED], ids=lambda path: path.stem)
async def test_every_walk_in_every_version(
    agent: Snmpsim, secrets: dict[str, Any], path: Path, how: dict[str, Any]
) -> None:
    await compare(agent, way(secrets, **how), path)


def test_probe_prints_of_a_card_what_decode_prints_of_its_walk(
    agent: Snmpsim, secrets: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The command itself; what it saves is a walk that tells the same once more."""
    text = written(read_records(FAMILIES / "xups.walk"))
    agent.show(text)
    (tmp_path / "made.walk").write_text(text)
    files = ["--auth-file", secrets["auth"].file, "--priv-file", secrets["priv"].file]
    words = ["--user", "aes256", "--auth-protocol", "SHA-256", "--priv-protocol", "AES-256", *files]
    save = ["--save", str(tmp_path / "saved.walk")]

    def run_json(*argv: str) -> dict[str, Any]:
        assert main(["snmp", *argv, "--json", "--site", "/nowhere"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    asked = run_json("probe", "127.0.0.1", "--port", str(agent.port), *words, *save)
    assert asked["authenticated"] is True
    for name in ("made", "saved"):
        read = run_json("decode", str(tmp_path / f"{name}.walk"))
        same = read.keys() & asked.keys() - {"object", "device"}
        assert {key: asked[key] for key in same} == {key: read[key] for key in same}, name


# --- Overlays -------------------------------------------------------------------------------------------------------


def overlaid(family: str, changed: Mapping[str, Any]) -> Records:
    """Return a family's walk with what one of its cases changes: a number, text, "null", "absent" or "oid:..."."""
    base = json.loads((FAMILIES / f"{family}.json").read_text(encoding="utf-8"))["base"]
    records = read_records(FAMILIES / f"{family}.walk")

    def whole(place: str) -> str:
        return base + place if place.startswith(".") else place

    for place, value in changed.items():
        oid = whole(place)
        if value == "absent":
            del records[oid]
        elif isinstance(value, int):
            tag = records.get(oid, ("2", ""))[0]
            fits = tag in {"2", "65", "66", "67"} and (-(2**31) <= value < 2**31 if tag == "2" else value >= 0)
            records[oid] = (tag if fits else "2" if value < 2**31 else "66", str(value))
        elif value == "null":
            records[oid] = ("5", "")
        elif value.startswith("oid:"):
            records[oid] = ("6", whole(value[4:]))
        else:
            records[oid] = ("4", value)
    return records


KINDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "battery": lambda case: case["expected"].get("on_battery") is True,
    "low": lambda case: case["expected"].get("low_battery") is True,
    "communication lost": lambda case: case["expected"].get("stale") is True,
    "sentinels": lambda case: case["case"] == "sentinels" or "unsigned" in case["case"],
    "NULL": lambda case: "null" in case["set"].values(),
}


def overlays() -> list[Any]:
    """Of every family the first case of each kind."""
    params = []
    ways, counts = cycle(WAYS), Counter[str]()
    for path in sorted(FAMILIES.glob("*.json")):
        cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
        for kind, is_one in KINDS.items():
            found = next((case for case in cases if is_one(case)), None)
            if found is not None:
                often = counts[kind] < 4  # the other families are for the long run
                counts[kind] += 1
                marks = () if often else pytest.mark.slow
                params.append(pytest.param(path.stem, found, next(ways), id=f"{path.stem}: {kind}", marks=marks))
    return params


OVERLAYS = overlays()


def test_there_are_overlays_of_every_kind() -> None:
    kinds = [str(param.id).partition(": ")[2] for param in OVERLAYS]
    assert {kind: kinds.count(kind) >= least for kind, least in (("battery", 15), ("low", 14), ("NULL", 1))} == {
        "battery": True,
        "low": True,
        "NULL": True,
    }
    assert min(kinds.count("communication lost"), kinds.count("sentinels")) >= 5


Heard = Reading | SourceFailed


@pytest.mark.parametrize(("family", "case", "how"), OVERLAYS)
async def test_the_source_reads_what_the_case_says(
    agent: Snmpsim, secrets: dict[str, Any], family: str, case: dict[str, Any], how: dict[str, Any]
) -> None:
    """The source from its start: what it publishes is what the decoder makes of the same walk."""
    text = written(overlaid(family, case["set"]))
    agent.show(text)
    answers = parse_walk(text, family)
    described = answers["1.3.6.1.2.1.1.2.0"]
    want = decode(choose(UPSES, answers, sys_object_id=str(described), sys_descr=""), answers)
    heard: asyncio.Queue[Heard] = asyncio.Queue()
    settings = options(agent.port, **way(secrets, **how) | {"timeout_s": 5.0})
    source = SnmpSource(settings, ups="rack", clock=boottime_s, profiles=PROFILES)
    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        polling = group.create_task(source.run(heard.put_nowait))
        event = await heard.get()
        polling.cancel()
    if want.stale is not None:
        assert isinstance(event, SourceFailed)
        assert event.reason == f"127.0.0.1:{agent.port}: {want.stale}"
        return
    authenticated = "user" in how
    assert event == want.reading(at_s=event.at_s, ups="rack", source=source.name, authenticated=authenticated)
    for key in case["expected"].keys() & {"output_source", "low_battery", "runtime_s", "charge_pct", "watts"}:
        assert getattr(event, key) == case["expected"][key], key


async def test_an_outage_while_it_is_polled(agent: Snmpsim, secrets: dict[str, Any]) -> None:
    """The card changes its mind under four sources: utility, battery, low battery, communication lost, and back."""
    walk = read_records(FAMILIES / "rfc1628.walk")
    battery = {**walk, STATUS: ("2", "5"), BATTERY_S: ("2", "7")}
    low = {**battery, BATTERY_S: ("2", "60"), f"{U}.2.1.0": ("2", "3"), RUNTIME: ("2", "2")}
    lost = {**low, f"{U}.6.1.0": ("65", "1"), f"{U}.6.2.1.2.1": ("6", f"{U}.6.3.20"), f"{U}.6.2.1.3.1": ("67", "1")}
    agent.show(written(walk))
    heard: list[asyncio.Queue[Heard]] = [asyncio.Queue() for _ in WAYS]
    sources = [
        SnmpSource(
            options(agent.port, **way(secrets, **how) | {"timeout_s": 5.0}),
            ups="rack",
            clock=boottime_s,
            profiles=PROFILES,
        )
        for how in WAYS
    ]

    async def until(is_so: Callable[[Heard], bool]) -> None:
        for queue in heard:
            while not is_so(await queue.get()):
                pass

    def reads(output: OutputSource, *, low: bool = False) -> Callable[[Heard], bool]:
        return lambda given: isinstance(given, Reading) and (given.output_source, given.low_battery) == (output, low)

    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        polling = [group.create_task(one.run(queue.put_nowait)) for one, queue in zip(sources, heard, strict=True)]
        await until(reads(OutputSource.UTILITY))
        for records, is_so in (
            (battery, reads(OutputSource.BATTERY)),
            (low, reads(OutputSource.BATTERY, low=True)),
            (lost, lambda given: isinstance(given, SourceFailed) and "lost the UPS" in given.reason),
            (walk, reads(OutputSource.UTILITY)),
        ):
            agent.show(written(records))
            for source in sources:
                source.poll_now()
            await until(is_so)
        for task in polling:
            task.cancel()


# --- Errors ---------------------------------------------------------------------------------------------------------


async def test_every_security_level(agent: Snmpsim, secrets: dict[str, Any]) -> None:
    """Of snmpsim's protocols, all that we have; with a key that must be lengthened for its cipher as well."""
    agent.show(written(read_records(WALKS / "rfc1628.walk")))
    for user in USERS:
        async with opened(agent, way(secrets, user=user)) as port:
            assert await port.get([CHARGE]) == {CHARGE: 100}, user


WRONG: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "community, 1": ({"version": 1}, {"community": "wrong"}, r"no answer .* \(v1\): check address, community, ACL"),
    "community, 2c": ({"version": "2c"}, {"community": "wrong"}, r"no answer .* \(v2c\): check address, community"),
    "user": ({"user": "aes"}, {"user": "stranger"}, "the card knows no user 'stranger'"),
    "auth": ({"user": "sha"}, {"auth": "wrong"}, "the auth passphrase or auth_protocol is not the card's"),
    "auth_protocol": ({"user": "sha"}, {"auth_protocol": "MD5"}, "the auth passphrase or auth_protocol is not"),
    "priv": ({"user": "aes256"}, {"priv": "wrong"}, "the priv passphrase or priv_protocol is not the card's"),
    "priv_protocol": ({"user": "des"}, {"priv_protocol": "AES"}, "the priv passphrase or priv_protocol is not"),
    "no priv": ({"user": "aes"}, {"priv": ""}, "the user has another security level on the card: set auth and priv"),
    "priv that it has not": ({"user": "sha"}, {"priv": "priv"}, "check address, user, priv passphrase"),
}


async def test_what_a_wrong_setting_says(agent: Snmpsim, secrets: dict[str, Any]) -> None:
    """One line that names the setting, and shows no secret. All at once: each waits its time for a better answer."""

    async def said(how: dict[str, Any], bad: dict[str, str]) -> str:
        settings = way(secrets, **how)
        for key, value in bad.items():
            is_secret = key in {"community", "auth", "priv"}
            settings[key] = value if not is_secret else secrets[value] if value else None
        async with opened(agent, {"timeout_s": 5.0, **settings}, retries=0) as port:
            with pytest.raises(SnmpError) as caught:
                await port.get([STATUS])
        return str(caught.value)

    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(said(how, bad)) for name, (how, bad, _) in WRONG.items()}
    for name, (_, _, want) in WRONG.items():
        assert re.search(want, tasks[name].result()), name
        assert "of-the-tests" not in tasks[name].result()


def numbers(walk: Records) -> dict[str, float | None]:
    """What the standard's family tells of a walk."""
    return dict(decode([PROFILES.by_name["rfc1628"]], parse_walk(written(walk), "walk")).numbers)


@pytest.mark.parametrize("how", WAYS, ids=str)
async def test_an_object_that_is_refused_costs_no_other(
    agent: Snmpsim, secrets: dict[str, Any], how: dict[str, Any]
) -> None:
    """snmpsim, as some cards, names the first object of the question when another one is at fault."""
    walk = read_records(FAMILIES / "rfc1628.walk")
    agent.show(written({**walk, CHARGE: ("2:error", "status=genError")}))
    report = await look(agent, way(secrets, **how))
    assert report.decoded.output_source == "utility"
    assert report.decoded.numbers == {**numbers(walk), "charge_pct": None}


async def test_a_column_that_is_refused_costs_no_other(agent: Snmpsim, secrets: dict[str, Any]) -> None:
    walk = read_records(FAMILIES / "rfc1628.walk")
    agent.show(written({**walk, f"{U}.4.4.1.5.1": ("2:error", "status=genError")}))
    report = await look(agent, way(secrets, version="2c"))
    assert report.decoded.output_source == "utility"
    assert report.decoded.numbers == {**numbers(walk), "load_pct": None}


async def test_a_card_that_refuses_what_counts_says_what(agent: Snmpsim, secrets: dict[str, Any]) -> None:
    walk = read_records(FAMILIES / "rfc1628.walk")
    agent.show(written({**walk, STATUS: ("2:error", "status=authorizationError")}))
    with pytest.raises(SnmpError, match=rf"and refuses {STATUS}: is it a UPS, may this user see its objects"):
        await look(agent, way(secrets, user="aes"))


def is_late(failed: SourceFailed) -> bool:
    """Whether that is of a busy machine: on battery an answer has 0.8 s."""
    return failed.reason.endswith(" in 0.8 s, on battery")


async def test_an_object_that_begins_to_be_refused_in_mid_outage(agent: Snmpsim, secrets: dict[str, Any]) -> None:
    """A battery that is known goes on being told, without what the card refuses from now on."""
    walk = read_records(FAMILIES / "rfc1628.walk")
    battery = {**walk, STATUS: ("2", "5"), BATTERY_S: ("2", "7")}
    agent.show(written(battery))
    heard: asyncio.Queue[Heard] = asyncio.Queue()
    settings = options(agent.port, **way(secrets, version="2c") | {"timeout_s": 5.0})
    source = SnmpSource(settings, ups="rack", clock=boottime_s, profiles=PROFILES)
    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        polling = group.create_task(source.run(heard.put_nowait))
        first = await heard.get()
        agent.show(written({**battery, CHARGE: ("2:error", "status=genError"), BATTERY_S: ("2", "9")}))
        source.poll_now()
        while (event := await heard.get()) and (
            event.on_battery_s == 7 if isinstance(event, Reading) else is_late(event)
        ):
            pass
        polling.cancel()
    assert isinstance(first, Reading)
    assert isinstance(event, Reading), event
    assert (first.charge_pct, event.charge_pct) == (98, None)
    assert (event.output_source, event.on_battery_s, event.runtime_s) == ("battery", 9, 2460)


async def test_an_answer_that_takes_its_time_and_one_that_never_comes(agent: Snmpsim, secrets: dict[str, Any]) -> None:
    walk = read_records(FAMILIES / "rfc1628.walk")
    agent.show(written({**walk, CHARGE: ("2:delay", "wait=300,value=97"), RUNTIME: ("2:delay", "wait=100000,value=1")}))
    async with opened(agent, way(secrets, user="aes")) as port:
        assert await port.get([STATUS, CHARGE]) == {STATUS: 3, CHARGE: 97}
    async with opened(agent, {"timeout_s": 0.5, **way(secrets, version="2c")}, retries=0) as port:
        with pytest.raises(SnmpError, match=r"no answer from 127.0.0.1:\d+ in 0.5 s") as caught:
            await port.get([RUNTIME])
    assert caught.value.unanswered


# --- Orders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS, ids=str)
async def test_a_set_is_taken_refused_or_doubted(agent: Snmpsim, secrets: dict[str, Any], how: dict[str, Any]) -> None:
    """What it cannot set snmpsim answers with no error (but for version 1), and with "no such object" for a value."""
    off, restart = f"{U}.8.2.0", f"{U}.8.5.0"
    walk = read_records(FAMILIES / "rfc1628.walk")
    changed = {off: ("2:writecache", "value=-1"), restart: ("2:writecache", "value=1,vlist=eq:3:wrongvalue")}
    agent.show(written({**walk, **changed}))
    async with opened(agent, way(secrets, **how), retries=0) as port:
        await port.set({off: Typed("integer", 120)})
        assert await port.get([off]) == {off: 120}
        with pytest.raises(SnmpError, match=rf"(badValue|wrongValue) for {restart}"):
            await port.set({restart: Typed("integer", 3)})
        with pytest.raises(SnmpError, match=STATUS) as caught:
            await port.set({STATUS: Typed("integer", 2)})
    assert caught.value.unanswered == (how != {"version": 1})
