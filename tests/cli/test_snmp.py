"""`powerguard snmp`: the decoder over a walk, a card or a profile file, and what it says when one of them is wrong."""

import asyncio
import io
import json
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.main import main
from powerguard.sim import snmp_values as sim
from powerguard.ups.profiles.vocabulary import Oid
from powerguard.ups.profiles.walk import read_walk
from powerguard.ups.snmp.port import SnmpError
from powerguard.ups.snmp.source import probe
from tests.golden import FIGURES, Golden
from tests.peers.snmp_agent import Fault, SimUser, SnmpAgent
from tests.ups.snmp.snmp_helpers import U, card, options, table

ROOT = Path(__file__).parents[2]
WALKS = ROOT / "tests" / "ups" / "profiles" / "walks"
REFERENCE = ROOT / "docs" / "reference"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        return dict(json.loads(self.out))


async def snmp(*words: str) -> Ended:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "powerguard", "snmp", *words, "--site", "/nowhere"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ),
        cwd=ROOT,
    )
    async with asyncio.timeout(60.0):
        out, err = await process.communicate()
    assert b"Traceback" not in out + err
    return Ended(process.returncode or 0, out.decode(), err.decode())


def said(*words: str) -> Ended:
    """Run the verb in this process: what asks no network needs no process of its own."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["snmp", *words, "--site", "/nowhere"])
    return Ended(code, out.getvalue(), err.getvalue())


def kinds(value: object) -> object:
    """Return the shape of an object: its keys, and for lists that of their first item."""
    if isinstance(value, dict):
        return {key: kinds(one) for key, one in value.items()}
    return [kinds(value[0])] if isinstance(value, list) and value else None


# --- decode ---------------------------------------------------------------------------------------------------------


def test_the_example_of_the_reference_is_what_is_printed() -> None:
    answer = said("decode", "--json", "tests/ups/profiles/walks/rfc1628.walk").object
    assert answer == json.loads((REFERENCE / "snmp-decode.json").read_text(encoding="utf-8"))


TRIED = {re.compile(r"(?<=\(tried: )[^)]+"): "FAMILIES"}


def test_decode_for_people(golden: Golden) -> None:
    ended = said("decode", str(WALKS / "rfc1628-three-phase.walk"))
    assert ended.code == 0
    golden("snmp", ended.out)


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (b"1.3.6.1|2|1\nrubbish\n", 2, "not OID|tag|value"),
        (b"1.3.6.1|2\n", 1, "no value"),
        (b"1.3.6.1|2|1e9\n", 1, "no whole number"),
        (b"1.3.6.1|2|" + b"9" * 5000 + b"\n", 1, "no whole number"),
        (b"1.3.6.1|4x|abc\n", 1, "no hexadecimal digits"),
        (b"1.3.6.1|2:numeric|rate=1\n", 1, "made up by a simulator's module"),
        (b"1.3.6.1|99|1\n", 1, "is not known"),
        (b"1" + b".1" * 400 + b"|2|1\n", 1, "not OID|tag|value"),
        (b"1.3.6.1|4|" + b"x" * 70_000 + b"\n", 1, "70000 characters"),
        (b"\x00\xff\xfe\n", 1, "not OID|tag|value"),
    ],
)
def test_a_hostile_walk_is_reported_at_its_line(tmp_path: Path, text: bytes, line: int, what: str) -> None:
    walk = tmp_path / "w"
    walk.write_bytes(text)
    ended = said("decode", "--json", str(walk))
    assert ended.code == 65
    assert ended.object["error"].startswith(f"{walk}:{line}: "), ended.out
    assert what in ended.object["error"]
    assert len(ended.out) < 500, "a message is not the file"


def test_a_walk_that_is_none(tmp_path: Path, golden: Golden) -> None:
    for path, what in ((tmp_path / "absent", "No such file"), (tmp_path, "is not a file")):
        ended = said("decode", str(path))
        assert (ended.code, what in ended.err) == (65, True), ended.err
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(17 << 20)
    golden("snmp", said("decode", str(large)).err)


def test_a_walk_of_something_else(tmp_path: Path, golden: Golden) -> None:
    switch = tmp_path / "switch"
    switch.write_text("1.3.6.1.2.1.1.1.0|4|A switch\n1.3.6.1.2.1.2.2.1.1.1|2|1\n", encoding="utf-8")
    ended = said("decode", str(switch))
    assert ended.code == 1
    golden("snmp", ended.err)


def test_a_walk_that_was_cut_short_is_decoded_as_far_as_it_goes(tmp_path: Path, golden: Golden) -> None:
    """Without an output source the daemon would refuse it; a person still wants to see the rest."""
    part = tmp_path / "part"
    part.write_text(f"{U}.2.3.0|2|35\n{U}.2.4.0|2|100\n", encoding="utf-8")
    answer = said("decode", "--json", str(part)).object
    assert (answer["profile"], answer["runtime_s"], answer["charge_pct"]) == ("rfc1628", 2100, 100)
    assert (answer["output_source"], answer["on_battery"]) == ("unknown", None)
    golden("snmp", "\n".join(answer["warnings"]))


def test_a_pdu_and_a_named_profile(tmp_path: Path, golden: Golden) -> None:
    pdu = tmp_path / "pdu"
    base = "1.3.6.1.4.1.318.1.1.4.4.2.1.3"
    pdu.write_text(f"{base}.1|2|1\n{base}.2|2|2\n", encoding="utf-8")
    answer = said("decode", "--json", str(pdu)).object
    assert (answer["kind"], answer["profile"], answer["outlets"]) == ("pdu", "apc-spdu", {"1": "on", "2": "off"})
    assert (answer["output_source"], answer["on_battery"], answer["amps"]) == (None, None, None)
    named = said("decode", "--profile", "apc-spud", str(pdu))
    assert (named.code, "apc-spdu" in named.err) == (1, True)
    forced = said("decode", "--profile", "rfc1628", "--json", str(pdu)).object
    golden("snmp", named.err)
    golden("snmp", "\n".join(forced["warnings"]), "forced")


def test_strings_of_a_device_do_not_reach_the_terminal(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    text = (WALKS / "rfc1628.walk").read_text(encoding="utf-8").replace("UPS card", "UPS \x1b[2J card")
    bad.write_text(text, encoding="utf-8")
    assert "\x1b" not in said("decode", str(bad)).out


# --- test-profile ---------------------------------------------------------------------------------------------------


def test_a_profile_against_its_walk(tmp_path: Path, golden: Golden) -> None:
    profile, walk = "powerguard/ups/profiles/rfc1628.yaml", str(WALKS / "rfc1628.walk")
    assert said("test-profile", profile, walk).code == 0
    expected = tmp_path / "expected.json"
    right = {"profile": "acme|rfc1628", "runtime_s": 99, "watts": 410.04, "accept": {"runtime_s": [2100]}}
    expected.write_text(json.dumps(right), encoding="utf-8")
    ended = said("test-profile", "--json", profile, walk, str(expected))
    assert (ended.code, ended.object["wrong"]) == (0, [])
    expected.write_text(json.dumps({**right, "watts": 411, "on_battery": 0}), encoding="utf-8")
    ended = said("test-profile", "--json", profile, walk, str(expected))
    assert ended.code == 1
    assert ended.object["wrong"] == [
        {"key": "watts", "decoded": 410, "expected": [411]},
        {"key": "on_battery", "decoded": False, "expected": [0]},
    ]
    golden("snmp", said("test-profile", profile, walk, str(expected)).out)


def test_a_profile_that_does_not_fit_says_what_is_missing(golden: Golden) -> None:
    ended = said("test-profile", "powerguard/ups/profiles/rfc1628.yaml", str(WALKS / "apc.walk"))
    assert ended.code == 1
    golden("snmp", ended.err)


def test_files_of_test_profile_that_cannot_be_read(tmp_path: Path) -> None:
    good, walk = "powerguard/ups/profiles/rfc1628.yaml", str(WALKS / "rfc1628.walk")
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nunit: fortnights\n", encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for words, what in (
        ((str(bad), walk), f"; {bad}:2:1: unit: unknown key"),
        ((str(tmp_path / "pipe"), walk), "is not a file"),
        ((str(binary), walk), "is not UTF-8"),
        ((str(tmp_path / "absent"), walk), "No such file"),
        ((good, str(tmp_path / "absent")), "No such file"),
        ((good, walk, walk), "is not JSON"),
        ((good, walk, str(tmp_path)), "is not a file"),
        ((good, walk, str(tmp_path / "pipe")), "is not a file"),
    ):
        ended = said("test-profile", *words)
        assert (ended.code, what in ended.err) == (65, True), (words, ended.err)


# --- probe ----------------------------------------------------------------------------------------------------------


def at(agent: SnmpAgent, *words: str) -> tuple[str, ...]:
    """The words of a probe. The card has the longest time-out, unless it is to be silent."""
    timeout_s = "0.5" if agent.fault is Fault.DROP else "5"
    return ("probe", "127.0.0.1", "--port", str(agent.port), "--timeout", timeout_s, *words)


async def test_probe_reports_what_decode_reports(tmp_path: Path) -> None:
    """A card asked over UDP and the walk that --save makes of it decode alike, and alike to the made walk itself."""
    saved = tmp_path / "saved.walk"
    async with card(table("rfc1628")) as agent:
        ended = await snmp(*at(agent, "--save", str(saved), "--json"))
    assert ended.code == 0, ended.err
    answer = ended.object
    assert kinds(answer).keys() == kinds(json.loads((REFERENCE / "snmp-probe.json").read_text(encoding="utf-8"))).keys()  # type: ignore[attr-defined]
    made = said("decode", "--json", str(WALKS / "rfc1628.walk")).object
    again = said("decode", "--json", str(saved)).object
    for key in ("kind", "profile", "output_source", "runtime_s", "charge_pct", "load_lines", "watts", "input_voltage"):
        assert answer[key] == made[key] == again[key], key
    assert answer["raw"][f"{U}.2.3.0"] == 35
    assert (answer["authenticated"], answer["saved"]) == (False, str(saved))


async def test_a_saved_walk_names_nobody(tmp_path: Path, golden: Golden) -> None:
    """Names, places, addresses and serial numbers are in text; what a profile reads as a number stays."""
    saved = tmp_path / "saved.walk"
    secrets = {
        "1.3.6.1.2.1.1.1.0": b"ACME card (SN: ZA1234567890, HW 2) at 10.1.2.3",
        "1.3.6.1.2.1.1.4.0": b"jane@example.org",
        "1.3.6.1.2.1.1.5.0": b"ups-of-jane",
        "1.3.6.1.2.1.1.6.0": b"room 12",
        f"{U}.1.2.0": b"Acme 3000",
        f"{U}.1.5.0": b"ups-of-jane",
        f"{U}.1.6.0": b"rack of the secret project",
        f"{U}.99.1.0": b"0123456789",
        f"{U}.99.2.0": b"74.5",
    }
    values = {**table("rfc1628"), **{oid: sim.octets(text) for oid, text in secrets.items()}}
    async with card(values) as agent:
        assert (await snmp(*at(agent, "--save", str(saved)))).code == 0
        assert (await snmp(*at(agent, "--save", str(saved)))).code == 64, "never over a file that is there"
        asked = agent.requests
        ended = await snmp(*at(agent, "--save", str(tmp_path / "no-such-folder" / "saved.walk")))
        assert (ended.code, "its folder is not there" in ended.err) == (64, True)
        assert agent.requests == asked, "before the walk, which takes minutes"
    text = saved.read_text(encoding="utf-8")
    for secret in ("ZA1234567890", "10.1.2.3", "jane", "room 12", "secret", "0123456789"):
        assert secret not in text, secret
    kept = read_walk(saved)
    assert (kept[f"{U}.99.2.0"], kept[f"{U}.1.2.0"], kept[f"{U}.99.1.0"]) == (b"74.5", b"Acme 3000", b"<removed>")
    assert kept["1.3.6.1.2.1.1.2.0"] == Oid("1.3.6.1.4.1.8072.3.2.10")
    golden("snmp", "\n".join(line for line in text.splitlines() if line.startswith("#")))


async def test_probe_of_a_silent_card_and_of_no_ups(golden: Golden) -> None:
    async with card(table("rfc1628")) as agent:
        agent.fault = Fault.DROP
        ended = await snmp(*at(agent, "--json"))
        assert ended.code == 1
        golden("snmp", ended.object["error"], "silent", varies=FIGURES)
    async with card({"1.3.6.1.2.1.1.1.0": sim.octets(b"A switch")}) as agent:
        ended = await snmp(*at(agent))
        assert ended.code == 1
        golden("snmp", ended.err, "no UPS", varies={agent.port: "PORT", **TRIED})


async def test_a_card_of_no_known_family_is_saved_all_the_same(tmp_path: Path, golden: Golden) -> None:
    """It is the one whose walk is wanted most: to write its family."""
    saved = tmp_path / "saved.walk"
    maker = "1.3.6.1.4.1.99999"
    values = {
        "1.3.6.1.2.1.1.1.0": sim.octets(b"Acme card"),
        "1.3.6.1.2.1.1.2.0": sim.oid(maker),
        f"{maker}.1.1.0": sim.integer(7),
        f"{maker}.1.2.0": sim.octets(b"rack of jane"),
        "1.3.6.1.4.1.88888.1.0": sim.integer(1),
    }
    async with card(values) as agent:
        ended = await snmp(*at(agent, "--save", str(saved)))
    assert ended.code == 1
    golden("snmp", ended.err, varies={agent.port: "PORT", **TRIED})
    kept = read_walk(saved)
    assert (kept[f"{maker}.1.1.0"], kept[f"{maker}.1.2.0"], kept["1.3.6.1.2.1.1.2.0"]) == (7, b"<removed>", Oid(maker))
    assert "1.3.6.1.4.1.88888.1.0" not in kept, "another maker's"


async def test_probe_of_a_pdu() -> None:
    base = "1.3.6.1.4.1.318.1.1.12"
    values = {
        f"{base}.1.16.0": sim.integer(312),
        f"{base}.2.3.1.1.2.1": sim.integer(28),
        f"{base}.2.3.1.1.5.1": sim.integer(0),
    }
    async with card(values) as agent:
        answer = (await snmp(*at(agent, "--json"))).object
    assert (answer["kind"], answer["profile"], answer["watts"], answer["amps"]) == ("pdu", "apc-rpdu", 312, 2.8)


async def test_a_pdu_is_no_source_of_the_daemon() -> None:
    """It cannot tell whether utility is there, and whoever names its profile is told so."""
    async with card({"1.3.6.1.4.1.318.1.1.12.1.16.0": sim.integer(312)}) as agent:
        with pytest.raises(SnmpError, match="profile apc-rpdu is for rack PDUs"):
            await probe(options(agent.port, timeout_s=5.0, profile="apc-rpdu"))
        with pytest.raises(SnmpError, match="fits no profile"):
            await probe(options(agent.port, timeout_s=5.0))
        named = await probe(options(agent.port, timeout_s=5.0, profile="apc-rpdu"), with_pdus=True)
    assert named.decoded.watts == 312


async def test_probe_with_version_3_reads_its_secrets_from_files(tmp_path: Path, golden: Golden) -> None:
    auth, priv = tmp_path / "auth", tmp_path / "priv"
    for file, secret in ((auth, "authauthauth"), (priv, "privprivpriv")):
        file.write_text(secret + "\n", encoding="utf-8")
        file.chmod(0o400)
    user = SimUser("pg", b"authauthauth", b"privprivpriv")
    words = ("--user", "pg", "--auth-file", str(auth), "--priv-file", str(priv))
    async with card(table("rfc1628"), user=user) as agent:
        ended = await snmp(*at(agent, *words, "--json"))
        assert (ended.code, ended.object["authenticated"]) == (0, True)
        auth.chmod(0o644)
        refused = await snmp(*at(agent, *words))
    assert refused.code == 1
    golden("snmp", refused.err)
    assert "authauth" not in ended.out + ended.err + refused.out + refused.err


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (
            "snmp probe 127.0.0.1 --community hunter2",
            "--community: put it into a file: --community-file FILE (chmod 0400)",
        ),
        ("snmp probe 127.0.0.1 --community=hunter2", "--community: put it into a file: --community-file FILE"),
        ("snmp probe 127.0.0.1 -c hunter2", "-c: put it into a file: --community-file FILE"),
        ("snmp --community hunter2 probe 127.0.0.1", "--community: put it into a file"),
        ("--community hunter2 snmp probe 127.0.0.1", "--community: put it into a file"),
        ("discover --comm hunter2", "--comm: put it into a file: --community-file FILE"),
        ("discover 10.0.0.5 --user pg --auth hunter2", "--auth: put it into a file: --auth-file FILE"),
        ("snmp probe 127.0.0.1 --user pg -X hunter2", "-X: put it into a file: --priv-file FILE"),
        ("snmp probe 127.0.0.1 --password hunter2", "unknown option --password"),
        ("snmp probe 127.0.0.1 --passphrase=hunter2", "unknown option --passphrase"),
        ("snmp probe 127.0.0.1 -phunter2", "unknown option -p"),
        ("snmp probe 127.0.0.1 --auth-f hunter2 --user pg", "unknown option --auth-f"),
        ("discover --community-fil hunter2", "--community-fil"),
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(words: str, right: str) -> None:
    """What NUT's and net-snmp's users type; an abbreviation of --community-file would take it for a file's name."""
    err = io.StringIO()
    with redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(words.split())
    assert (ended.value.code, right in err.getvalue(), "hunter2" in err.getvalue()) == (64, True, False), err.getvalue()


@pytest.mark.parametrize(
    ("host", "right"),
    [
        ("10.0.0.5:161", "10.0.0.5:161: write 10.0.0.5 --port 161"),
        ("ups-a.example:1161", "write ups-a.example --port 1161"),
        ("[2001:db8::5]:161", "write [2001:db8::5] --port 161"),
    ],
)
def test_a_port_is_an_option(host: str, right: str) -> None:
    ended = said("probe", host)
    assert (ended.code, right in ended.err) == (64, True), ended.err


@pytest.mark.parametrize(
    "line",
    [
        ".1.3.6.1.2.1.33.1.4.1.0 = INTEGER: 5",
        '1.3.6.1.2.1.33.1.1.5.0 = ""',
        "UPS-MIB::upsOutputSource.0 = INTEGER: battery(5)",
        "iso.3.6.1.2.1.1.3.0 = Timeticks: (12345) 0:02:03.45",
    ],
)
def test_what_snmpwalk_prints_is_no_walk_and_it_is_said_what_makes_one(
    tmp_path: Path, line: str, golden: Golden
) -> None:
    """Its words depend on its version, its options and the MIBs that are installed."""
    file = tmp_path / "net-snmp.walk"
    file.write_text(f"# ours\n{line}\n", encoding="utf-8")
    ended = said("decode", str(file))
    assert ended.code == 65
    assert f"{file}:2: " in ended.err
    golden("snmp", ended.err)


async def test_a_card_in_a_state_that_its_family_does_not_list(tmp_path: Path) -> None:
    """The device is found all the same, its state is unknown, and the value is told as rejected."""
    apc = "1.3.6.1.4.1.318.1.1.1"
    values = {
        "1.3.6.1.2.1.1.2.0": sim.oid("1.3.6.1.4.1.318.1.3.27"),
        f"{apc}.4.1.1.0": sim.integer(40),
        f"{apc}.2.2.1.0": sim.integer(97),
        f"{apc}.2.2.3.0": sim.integer(120_000),
    }
    async with card(values) as agent:
        ended = await snmp(*at(agent, "--json"))
        source = await probe(options(agent.port, timeout_s=5.0))
    assert (ended.code, ended.object["output_source"], ended.object["charge_pct"]) == (0, "unknown", 97), ended.err
    assert [one["field"] for one in ended.object["rejected"]] == ["output_source"]
    assert (source.profiles, source.decoded.output_source) == (("apc-powernet",), "unknown")


def test_wrong_options_of_probe() -> None:
    for words, what in (
        (("--version", "3"), "version 3 needs a user"),
        (("--user", "pg", "--version", "2c"), "belong to version 3"),
        (("--timeout", "99"), "timeout_s: must be 0.5 to 5, got 99.0"),
        (("--user", "pg", "--auth-protocol", "ROT13"), "auth_protocol: must be MD5, SHA, SHA-224, SHA-256"),
    ):
        ended = said("probe", "127.0.0.1", *words)
        assert (ended.code, what in ended.err) == (64, True), ended.err
