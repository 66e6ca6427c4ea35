"""`powerguard discover` as its users meet it: a table, settings that the loader takes, one JSON object, plain words."""

import asyncio
import contextlib
import json
import os
import pty
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.cli.discover import TargetError, Targets, as_yaml, from_words, of_this_host, settings_of
from powerguard.cli.main import main
from powerguard.settings.load import load
from powerguard.sim import snmp_values as sim
from powerguard.ups.discover import Found
from tests.cli.test_commands import Ended, powerguard
from tests.golden import COLUMNS, FIGURES, Golden
from tests.peers.nut import upsd
from tests.peers.snmp_agent import SnmpAgent
from tests.ups.apcupsd.apcupsd_helpers import apcupsd
from tests.ups.snmp.snmp_helpers import table
from tests.ups.snmp.trap_helpers import free_port

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference" / "discover.json"


def card(port: int = 0, name: str = "apc", **more: str) -> SnmpAgent:
    values = table(name)
    return SnmpAgent(lambda: values, port=port, **more)  # type: ignore[arg-type]


async def discover(*words: str) -> Ended:
    """Look at nothing of this machine's own: neither its files nor the usual ports."""
    nothing = str(free_port())
    ports = ("--nut-port", nothing, "--nis-port", nothing, "--snmp-port", nothing)
    return await powerguard("discover", *ports, "--nut", "/nowhere", "--apcupsd", "/nowhere", *words)


def same_keys(answer: object, example: object) -> None:
    """Hold that two JSON values have the same shape; of lists the first elements."""
    assert type(answer) is type(example), (answer, example)
    if isinstance(answer, dict) and isinstance(example, dict):
        assert list(answer) == list(example)
        for key, value in answer.items():
            if value is not None and example[key] is not None and key not in ("source", "ups"):
                same_keys(value, example[key])
    elif isinstance(answer, list) and isinstance(example, list) and answer and example:
        same_keys(answer[0], example[0])


async def test_a_table_and_settings_that_hold(tmp_path: Path, golden: Golden) -> None:
    """All of stdout is a settings file: what was found stands in it as a comment."""
    async with card() as agent, upsd() as peer:
        ended = await discover("127.0.0.1", "--snmp-port", str(agent.port), "--nut-port", str(peer.port))
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert f"127.0.0.1:{agent.port}" in lines[1]
    assert "29 m 00 s" in lines[1]
    golden("discover", ended.out, varies={agent.port: "PORT", peer.port: "PORT", **FIGURES})
    path = tmp_path / "powerguard.yaml"
    path.write_text(ended.out, encoding="utf-8")
    settings = load(path)
    assert settings.mode == "dry-run"
    assert [source.kind for ups in settings.ups.values() for source in ups.sources] == ["snmp", "nut"]
    assert settings.feeds is not None
    assert settings.feeds.supplies[0] in settings.ups


async def test_one_object_for_programs() -> None:
    async with card() as agent:
        ended = await discover("127.0.0.1", "--only", "snmp", "--snmp-port", str(agent.port), "--json")
    answer = ended.object
    answer["settings"].pop("bmc", None)  # of the host that this runs on
    same_keys(answer, json.loads(REFERENCE.read_text(encoding="utf-8")))
    assert (answer["object"], answer["schema_version"], answer["addresses"], answer["whole"]) == (
        "discover",
        1,
        1,
        True,
    )
    found = answer["found"][0]
    assert (found["profile"], found["on_battery"], found["runtime_s"]) == ("apc-powernet", False, 1740)
    assert answer["settings"]["ups"]["apc-127-0-0-1"]["sources"] == [found["source"]]


async def test_without_a_target_what_this_hosts_files_name(tmp_path: Path) -> None:
    """Our settings, NUT's and apcupsd's: each with its own port, and nothing beyond."""
    async with card() as agent, upsd("rack-n") as nut, apcupsd() as apc:
        (tmp_path / "powerguard.yaml").write_text(
            "mode: dry-run\nups:\n  rack-a:\n    sources:\n"
            f"      - {{kind: snmp, host: 127.0.0.1, port: {agent.port}}}\n",
            encoding="utf-8",
        )
        folder = tmp_path / "nut"
        folder.mkdir()
        (folder / "upsmon.conf").write_text(
            f"MONITOR rack-n@127.0.0.1:{nut.port} 1 upsmon not-to-be-shown secondary\n"
            "MONITOR rack-x@no..host 1 upsmon not-to-be-shown secondary\n",
            encoding="utf-8",
        )
        (folder / "upsmon.conf").chmod(0o600)
        (tmp_path / "apcupsd.conf").write_text(
            f"## apcupsd.conf v1.1 ##\nUPSTYPE usb\nDEVICE\nNETSERVER on\nNISIP 127.0.0.1\nNISPORT {apc.port}\n",
            encoding="utf-8",
        )
        ended = await discover(
            *("--config", str(tmp_path / "powerguard.yaml"), "--nut", str(folder)),
            *("--apcupsd", str(tmp_path / "apcupsd.conf"), "--json"),
        )
    answer = ended.object
    assert [(one["kind"], one["port"], one["name"]) for one in answer["found"]] == [
        ("snmp", agent.port, ""),
        ("nut", nut.port, "rack-n"),
        ("apcupsd", apc.port, "rack-a"),
    ]
    assert [one["where"] for one in answer["others"]] == ["no..host:3493"]
    assert "not-to-be-shown" not in ended.out + ended.err
    assert (answer["addresses"], len(answer["files"])) == (1, 3)


async def test_a_community_from_a_file(tmp_path: Path, golden: Golden) -> None:
    """The settings name a credential, for the daemon's user cannot read the caller's file; how to put it there is told.

    It is never shown. A file that others can read is refused before anybody is asked.
    """
    path = tmp_path / "community"
    path.write_text("of-the-card\n", encoding="utf-8")
    path.chmod(0o400)
    words = ("127.0.0.1", "--only", "snmp", "--community-file", str(path))
    async with card(community="of-the-card") as agent:
        ended = await discover(*words, "--snmp-port", str(agent.port))
        path.chmod(0o444)
        refused = await discover(*words, "--snmp-port", str(agent.port))
    assert ended.code == 0
    assert "community: {credential: snmp-community}" in ended.out
    assert str(path) not in ended.out
    golden("discover", ended.err)
    assert "of-the-card" not in ended.out + ended.err
    assert refused.code == 66
    golden("discover", refused.err, "refused")


async def test_nothing_found_says_where_it_looked(golden: Golden) -> None:
    ended = await discover("127.0.0.1", "127.0.0.2")
    assert (ended.code, ended.out) == (1, "")
    golden("discover", ended.err, varies=FIGURES)
    ended = await discover("127.0.0.1", "--json")
    assert (ended.code, ended.object["found"], ended.object["settings"], ended.object["yaml"]) == (1, [], None, "")


async def test_whoever_answered_and_is_nothing_is_named() -> None:
    async with apcupsd() as peer:
        peer.mute = True
        ended = await discover("127.0.0.1", "--only", "apcupsd", "--nis-port", str(peer.port))
    assert ended.code == 1
    assert f"note: 127.0.0.1:{peer.port}: " in ended.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["10.0.0.0/16"], "10.0.0.0/16 is larger than a /22"),
        (["10.0.0.0/abc"], "is not a network (example: 10.0.0.0/24)"),
        (["no-such-host.invalid"], "cannot look up 'no-such-host.invalid'"),
        (["no..host"], "cannot look up 'no..host': "),
        (["10.0.0.5:161"], "10.0.0.5:161: write the address alone, and the port as --snmp-port"),
        (["[::1]:3493"], "[::1]:3493: write the address alone, and the port as --snmp-port"),
        (["10.0.0.0/22", "10.1.0.0/22", "10.2.0.0/22"], "3066 addresses are more than 2048"),
        (["127.0.0.1", "--only", "snmp,ups"], "--only: write some of snmp,nut,apcupsd"),
        (["127.0.0.1", "--deadline", "0"], "--deadline: write 1 to 3600 seconds"),
        (["127.0.0.1", "--user", "pg", "--auth-protocol", "ROT13"], "auth_protocol: "),
        (["127.0.0.1", "--auth-file", "/nowhere"], "belong to version 3"),
    ],
)
def test_wrong_words_are_one_line_and_64(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["discover", *words]) == 64
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert what in captured.err


async def test_a_network_is_every_host_in_it() -> None:
    """Not its own address, not the broadcast; a /31 and a single address in full."""
    targets = await from_words(["10.0.0.0/29", "10.0.0.3", "10.1.0.4/31", "localhost", "[::1]"])
    assert targets.addresses == [*(f"10.0.0.{n}" for n in range(1, 7)), "10.1.0.4", "10.1.0.5", "127.0.0.1", "::1"]
    with pytest.raises(TargetError):
        await from_words(["fe80::/64"])


async def test_settings_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    """Somebody who looks for a UPS has no settings yet, or wrong ones."""
    wrong = tmp_path / "powerguard.yaml"
    wrong.write_text("mode: armed\nups: {}\n", encoding="utf-8")
    ended = await discover("--config", str(wrong), "--only", "nut")
    assert ended.code == 1
    assert f"note: {wrong} is skipped: " in ended.err


async def test_what_lies_in_a_closed_folder_is_passed_over(tmp_path: Path) -> None:
    """Where and why is noted, and how to look there."""
    places = [tmp_path / "closed" / name for name in ("pg.yaml", "nut", "apcupsd.conf")]
    places[0].parent.mkdir(mode=0o000)
    nowhere = Path("/nowhere")
    await of_this_host(nowhere, nowhere, nowhere)  # loads what a user without rights could not
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        targets = await of_this_host(*places)
    finally:
        if is_root:
            os.seteuid(0)
    assert targets.notes == [f"{place} is skipped: Permission denied (run this as root)" for place in places]


async def test_progress_on_a_terminal_leaves_nothing_behind() -> None:
    """Drawn over itself on stderr, and wiped; a pipe never sees it."""
    here, there = pty.openpty()
    port = str(free_port())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "powerguard", "discover", "127.0.0.0/28", "--only", "snmp", "--snmp-port", port),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=there,
        cwd=ROOT,
    )
    os.close(there)
    seen = b""
    with contextlib.suppress(OSError):  # the other end was closed
        while piece := await asyncio.to_thread(os.read, here, 4096):
            seen += piece
    await process.wait()
    os.close(here)
    assert b"of 14 asked, 0 found" in seen
    assert seen.rpartition(b"asked, 0 found")[2].lstrip(b"\r ").startswith(b"No UPS or PDU found")


def test_names_in_the_settings_are_our_own_and_differ() -> None:
    """A UPS's name in NUT may have any letters; two of one name are told apart."""
    found = [
        Found(kind="nut", what="ups", host="a", port=3493, name=name, source={"kind": "nut", "host": "a", "name": name})
        for name in ("Rack_A", "rack-a", "-", "x" * 60)
    ]
    made = settings_of(found)
    assert made is not None
    assert list(made["ups"]) == ["rack-a", "rack-a-2", "ups", "x" * 28]
    assert made["feeds"] == {"supplies": ["rack-a"]}
    assert settings_of([]) is None
    assert as_yaml([]) == ""


def test_two_sources_of_one_model_are_asked_about_and_a_bmc_is_proposed(golden: Golden) -> None:
    """Without a serial number they may be one UPS or two: the settings ask. The BMC: if this host has one."""
    sources = [
        {"kind": "snmp", "host": "10.0.0.5"},
        {"kind": "nut", "host": "10.0.0.9", "name": "a"},
        {"kind": "nut", "host": "h", "name": "b"},
    ]
    found = [
        Found(kind=one["kind"], what="ups", host=one["host"], port=1, model="SMT3000", source=dict(one))
        for one in sources
    ]
    text = as_yaml(found)
    golden("discover", text)
    assert "\n#bmc: {kind: auto}    # " in text
    assert "\nbmc: {kind: auto}    # " in as_yaml(found, bmc=True)
    golden("discover", as_yaml(found[1:]), "without a card")
    assert [(settings_of(found, bmc=bmc) or {}).get("bmc") for bmc in (False, True)] == [None, {"kind": "auto"}]


async def test_a_known_model_brings_its_table(tmp_path: Path, golden: Golden) -> None:
    """The card names the model: the settings have its runtimes, and name where they come from. Else as ever."""
    values = table("apc")
    values["1.3.6.1.4.1.318.1.1.1.1.1.1.0"] = sim.octets(b"Smart-UPS SRT 6000")
    async with SnmpAgent(lambda: values) as agent:
        known = await discover("127.0.0.1", "--only", "snmp", "--snmp-port", str(agent.port))
        values["1.3.6.1.4.1.318.1.1.1.1.1.1.0"] = sim.octets(b"Smart-UPS SRT 999")
        unknown = await discover("127.0.0.1", "--only", "snmp", "--snmp-port", str(agent.port))
    golden("discover", known.out, varies={agent.port: "PORT", **COLUMNS})
    path = tmp_path / "powerguard.yaml"
    path.write_text(known.out, encoding="utf-8")
    (ups,) = load(path).ups.values()
    assert (ups.runtime_table, ups.rating_w) == ({50.0: 540.0, 75.0: 360.0, 100.0: 240.0}, 6000.0)
    assert "\n    #runtime_table: " in unknown.out
    assert "rating_w" not in unknown.out


async def test_a_model_that_upsd_reports() -> None:
    """One of another rating is another model, though its name is the same."""
    given = {"ups.mfr": "CPS", "ups.model": "CP1500PFCLCD", "ups.status": "OL"}
    rows = []
    for rating in ("1000", "900"):
        async with upsd("rack-n", values={**given, "ups.realpower.nominal": rating}) as peer:
            ended = await discover("127.0.0.1", "--only", "nut", "--nut-port", str(peer.port), "--json")
        assert ended.object["found"][0]["rating_w"] == float(rating)
        rows.append(list(ended.object["settings"]["ups"]["rack-n"]))
    assert rows == [["sources", "runtime_table", "rating_w"], ["sources"]]


def test_a_model_that_apcupsd_reports() -> None:
    """What its MODEL and NOMPOWER say counts as much."""
    found = Found(
        kind="apcupsd", what="ups", host="a", port=3551, model="SMC1000IC", source={"kind": "apcupsd", "host": "a"}
    )
    made = [settings_of([replace(found, rating_w=rating_w)]) for rating_w in (None, 600.0, 865.0)]
    assert [each is not None and "runtime_table" in each["ups"]["ups-a"] for each in made] == [True, True, False]


def test_hostile_words_stay_in_their_comment(tmp_path: Path) -> None:
    """A model that tries to be a setting, a host that tries to be YAML."""
    source = {"kind": "snmp", "host": "ups: {evil", "port": 161}
    found = Found(kind="snmp", what="ups", host="x", port=161, model="mode: armed # x", source=source)
    path = tmp_path / "powerguard.yaml"
    path.write_text(as_yaml([found]), encoding="utf-8")
    settings = load(path)
    assert settings.mode == "dry-run"
    assert next(iter(settings.ups.values())).sources[0].host == "ups: {evil"


def test_targets_begin_with_nothing() -> None:
    assert Targets() == Targets(addresses=[], known=[], files=[], notes=[])
