"""`plan --size` as its users meet it: words, object, exit status, pictures, and what it says to nonsense."""

import asyncio
import itertools
import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.cli.main import main
from powerguard.cli.plan import picture
from powerguard.cli.plan.amounts import AmountError, rate_bytes, seconds, share, size_bytes, table, watts
from powerguard.cli.plan.picture import Stretch
from powerguard.cli.render import Paint, is_utf8
from powerguard.core.energy.nameplate import nameplate_table
from powerguard.daemon.control.admin import admin_server
from powerguard.daemon.observe.terms import tau_from
from powerguard.settings.load import load
from powerguard.settings.policy import policy
from tests.daemon.watched import PHASES, scene
from tests.golden import Golden

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = ["--ups", "APC SRT 6000VA", "--load-pct", "75", "--bytes", "8.5GB", "--checkpoint-s", "20"]
SHORT = ["--ups", "APC SRT 6000VA", "--load-w", "6kW", "--bytes", "8.5GB", "--disk", "0.425GB/s"]
SETTINGS = """\
mode: dry-run
ups:
  rack-a:
    sources: [{kind: snmp, host: 127.0.0.1, version: 2c}]
    %s
trainers:
  - {name: llm, url: "unix:/run/powerguard-trainers/llm.sock", checkpoint_s: 20, disk: nvme}
  - {name: small, url: "unix:/run/powerguard-trainers/small.sock", checkpoint_s: 10, disk: nvme}
budget: {reserve_s: 30, health: 0.9}
"""

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: unix sockets have 108 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pg") as made:
        yield Path(made)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run `plan` with options; returns exit status, stdout and stderr."""

    def run(*options: str) -> tuple[int, str, str]:
        try:
            code = main(["plan", *options])
        except SystemExit as error:
            code = int(error.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def settings_file(folder: Path, ups: str) -> str:
    path = folder / "powerguard.yaml"
    path.write_text(SETTINGS % ups, encoding="utf-8")
    return str(path)


# --- What it says -----------------------------------------------------------------------------------------------------


def test_the_example(say: Say, golden: Golden) -> None:
    """The site that fits: exit 0, 77 s to spare (77.8, on the safe side), and each moment as computed by hand."""
    code, out, err = say("--size", "--no-settings", *EXAMPLE)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "1 m 17 s" in lines[0]
    golden("size", out)
    terms = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert re.search(r"allowed_s +267\.8 s", terms["allowed_s"])
    assert re.search(r"need_s +190\.0 s", terms["need_s"])
    assert "APC SRT 6000VA" in terms["tau_now_s"]


@pytest.mark.parametrize("name", ["battery", "several-ups"])
def test_the_guide_shows_what_is_printed(name: str, say: Say) -> None:
    """Each output in it is how its command begins today."""
    guide = (DOCS / "guides" / f"{name}.md").read_text(encoding="utf-8")
    examples = re.findall(r"```console\n\$ powerguard plan (.*?)\n(.*?)```", guide, flags=re.DOTALL)
    assert examples
    for command, output in examples:
        words = shlex.split(command.replace("\\\n", " "))
        _, out, err = say("--no-settings", *words)
        assert (err, out.startswith(output.removesuffix("...\n").rstrip("\n"))) == ("", True)


def test_the_object_is_the_documented_one(say: Say) -> None:
    """Whoever programs against docs/reference/size.json gets it, to the last figure."""
    code, out, _ = say("--size", "--no-settings", "--json", *SHORT)
    answer = json.loads(out)
    page = DOCS / "reference" / "size.json"
    assert answer == json.loads(page.read_text(encoding="utf-8")), f"{page}: powerguard plan {' '.join(SHORT)} --json"
    assert (code, answer["schema_version"], answer["object"], answer["verdict"]) == (1, 1, "size", "short")


@pytest.mark.parametrize(
    ("options", "code", "first"),
    [
        (SHORT, 1, "Only a short stop fits, with 1 m 37 s to spare: 7.5 s short of a full stop."),
        (
            [*SHORT[:2], "--checkpoint-s", "160"],
            1,
            "Only a bare stop fits, with 32 s to spare: 2 m 08 s short of a full",
        ),
        (
            [*SHORT[:2], "--checkpoint-s", "400"],
            1,
            "It does not fit: 3 m 28 s short of even a bare stop, 6 m 08 s short",
        ),
        ([*SHORT[:2], "--load-w", "10.2kW"], 1, "The load is more than the UPS can carry."),
        (["--table", "100:20m", "--load-pct", "50"], 0, "It fits in full"),
    ],
)
def test_every_verdict(options: list[str], code: int, first: str, say: Say) -> None:
    """The verdict in the first line, and in the exit status."""
    answer, out, err = say("--size", "--no-settings", *options)
    assert (answer, err) == (code, "")
    assert out.startswith(first)


def test_a_ups_of_the_settings_that_is_not_counted_is_named(say: Say, folder: Path) -> None:
    """One battery is checked: "it fits" must not read as an answer for both."""
    path = settings_file(folder, "runtime_table: {50: 540, 100: 240}\n    rating_w: 5400")
    alone = say("--size", "--config", path)[1]
    small = "{sources: [{kind: snmp, host: 127.0.0.2, version: 2c}], runtime_table: {50: 140}, rating_w: 1500}"
    more = f"  rack-b: {small}\nfeeds: {{supplies: [rack-a, rack-b]}}\n"
    text = Path(path).read_text(encoding="utf-8").replace("trainers:\n", f"{more}trainers:\n", 1)
    Path(path).write_text(text, encoding="utf-8")
    for hosts in ([], ["--host", "tier=0,w=1000"]):
        out = say("--size", "--config", path, *hosts)[1]
        assert "This is rack-a alone, without rack-b of the settings; check each UPS" in out.replace("\n", " ")
        assert json.loads(say("--size", "--config", path, *hosts, "--json")[1])["not_counted"] == ["rack-b"]
    assert "alone, without" not in alone
    assert "alone, without" not in say("--size", "--config", path, "--ups", "APC SRT 6000VA")[1]


def test_every_fix_in_its_own_words(say: Say, golden: Golden) -> None:
    """Seconds, bandwidth, bytes, watts, watt-hours: as far as they can be told, and on the safe side."""
    _, out, _ = say("--size", "--no-settings", "--json", *SHORT)
    fixes = {fix["lever"]: fix for fix in json.loads(out)["fixes"]}
    assert fixes["checkpoint"]["bytes_per_s"] == 261538462  # 8.5 GB in 32.5 s, rounded up
    assert fixes["checkpoint"]["at_most_bytes"] == 6906250000
    golden("size", "\n".join(fix["text"] for fix in fixes.values()))
    assert fixes["load"]["less_w"] == 217
    assert {"5784", "96.4", "3470", "57.8"} <= set(re.findall(r"[\d.]+\d", fixes["load"]["text"]))
    assert fixes["battery"]["more_delivered_wh"] == 17  # 4 % of 240 s x 6000 W = 400 Wh, rounded up
    _, out, _ = say(
        *[
            "--size",
            "--no-settings",
            "--json",
            "--battery-wh",
            "1kWh",
            "--rating-w",
            "6000",
            "--load-w",
            "4500",
            "--checkpoint-s",
            "20",
        ]
    )
    battery = {fix["lever"]: fix for fix in json.loads(out)["fixes"]}["battery"]
    assert battery["more_wh"] == pytest.approx((battery["value"] - 1) * 1000, abs=1)
    golden("size", battery["text"], "nameplate")


def test_a_model_by_its_parameters(say: Say, golden: Golden) -> None:
    """70B over 8 hosts at 16 bytes each: 140 GB a host, twice as long as the disk promises until it was measured."""
    _, out, _ = say(
        *["--size", "--no-settings", "--json", "--ups", "srt6000", "--params", "70B", "--hosts", "8", "--disk", "3GB/s"]
    )
    terms = {term["name"]: term for term in json.loads(out)["terms"]}
    assert terms["size_bytes"]["value"] == 140e9
    golden("size", "\n".join(f"{name}: {term['source']}" for name, term in terms.items()))
    assert terms["checkpoint_s"]["value"] == pytest.approx(2 * 140 / 3, abs=1e-3)
    _, out, _ = say(
        *[
            "--size",
            "--no-settings",
            "--json",
            "--ups",
            "srt6000",
            "--params",
            "7B",
            "--bytes-per-param",
            "12",
            "--checkpoint-s",
            "9",
        ]
    )
    assert {term["name"]: term["value"] for term in json.loads(out)["terms"]}["size_bytes"] == 84e9


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_what_is_not_reported_comes_from_the_settings(folder: Path, say: Say, golden: Golden) -> None:
    """Table, reserve, health and the checkpoints that share a disk; an option goes over each."""
    path = settings_file(folder, "runtime_table: {50: 540, 75: 360, 100: 240}")
    _, out, _ = say("--size", "--config", path, "--json", "--load-pct", "75")
    terms = {term["name"]: term for term in json.loads(out)["terms"]}
    assert {name: terms[name]["value"] for name in ("checkpoint_s", "reserve_s", "health")} == {
        "checkpoint_s": 30.0,
        "reserve_s": 30.0,
        "health": 0.9,
    }
    assert terms["reserve_s"]["source"] == "settings"
    golden("size", "\n".join(f"{name}: {term['source']}" for name, term in terms.items()))
    more = [
        "--health",
        "60%",
        "--reserve-s",
        "1m",
        "--checkpoint-s",
        "5",
        "--stop-s",
        "2m",
        "--margin",
        "0.3",
        "--paused-pct",
        "30",
    ]
    _, out, _ = say("--size", "--config", path, "--json", "--load-pct", "75", *more)
    terms = {term["name"]: term for term in json.loads(out)["terms"]}
    found = [terms[name]["value"] for name in ("health", "reserve_s", "checkpoint_s", "host_stop_s", "load_paused")]
    assert found == [0.6, 60.0, 5.0, 120.0, 0.3]
    assert terms["usable"]["value"] == pytest.approx(0.42)


@pytest.mark.parametrize(
    ("shared", "own", "from_"),
    [
        ("{hosts: 6, own_w: 1800}", 0.1125, "shared.own_w of the settings"),
        ("{hosts: 6}", 0.125, "load_now / shared.hosts of the settings"),
    ],
)
def test_a_pause_of_this_host_is_none_of_the_others_on_its_ups(
    shared: str, own: float, from_: str, folder: Path, say: Say
) -> None:
    """The daemon counts on no drop but its own: with 45 % paused it would fit twice, with 70 % it hardly does."""
    path = settings_file(
        folder, f"runtime_table: {{50: 540, 75: 360, 100: 240}}\n    rating_w: 16000\n    shared: {shared}"
    )
    _, out, _ = say("--size", "--config", path, "--json", "--load-w", "12kW")
    answer = json.loads(out)
    term = next(term for term in answer["terms"] if term["name"] == "load_paused")
    assert term["value"] == pytest.approx(0.75 - 0.4 * own)
    assert term["source"] == f"load - 0.4 x load of this host ({from_}); the other hosts as now"
    assert {stage["load"] for stage in answer["stages"]} == {0.75, term["value"]}
    given = json.loads(say("--size", "--config", path, "--json", "--load-w", "12kW", "--paused-w", "7200")[1])
    alone = settings_file(folder, "runtime_table: {50: 540, 75: 360, 100: 240}\n    rating_w: 16000")
    assert given == json.loads(say("--size", "--config", alone, "--json", "--load-w", "12kW", "--paused-w", "7200")[1])


def test_a_tier_of_the_settings_pauses_earlier(folder: Path, say: Say) -> None:
    """By one stop of the slowest host on the UPS, also where the site's paused load is of the whole UPS."""
    table = "runtime_table: {50: 1540, 75: 1060, 100: 840}\n    rating_w: 16000"
    path = settings_file(folder, f"{table}\n    shared: {{hosts: 6, longest_stop_s: 200}}")
    top = json.loads(say("--size", "--config", path, "--json", "--load-w", "12kW")[1])
    text = Path(path).read_text(encoding="utf-8")
    Path(path).write_text(f"{text}shed: {{tier: 1, highest: 2}}\n", encoding="utf-8")
    low = json.loads(say("--size", "--config", path, "--json", "--load-w", "12kW")[1])
    assert top["commit_s"] - low["commit_s"] == pytest.approx(200.0, abs=20.0)


def test_a_nameplate_in_the_settings(folder: Path, say: Say, golden: Golden) -> None:
    """battery_wh stands in for the table, and everybody who asks is told that it does."""
    path = settings_file(folder, "battery_wh: 2000\n    rating_w: 6000")
    made = policy(load(Path(path)), boot_id="b", today=date(2026, 1, 1))
    assert (made.table_origin, made.runtime_table) == ("nameplate", nameplate_table(2000.0, 6000.0))
    golden("plan", tau_from(made, scene().state))
    _, out, _ = say("--size", "--config", path, "--load-w", "3kW")
    golden("size", out)


@pytest.mark.parametrize(
    ("ups", "expected"),
    [
        ("battery_wh: 2000", "battery_wh needs rating_w"),
        ("battery_wh: 2\n    rating_w: 6000", "ups.rack-a.battery_wh: must be 10 to"),
        ("battery_wh: 100\n    rating_w: 60000", "do not go together: that is 0.1 minutes at full load"),
    ],
)
def test_a_nameplate_that_cannot_be(ups: str, expected: str, folder: Path, say: Say) -> None:
    """A wrong unit is told when the settings are read, not in an outage: exit 78."""
    code, out, err = say("--size", "--config", settings_file(folder, ups))
    assert (code, out) == (78, "")
    assert expected in err


def test_settings_that_are_not_there(folder: Path, say: Say) -> None:
    """A file that was named must be there; that there is none at the usual place is no mistake."""
    code, _, err = say("--size", "--config", str(folder / "none.yaml"), *EXAMPLE)
    assert code == 78
    assert "none.yaml" in err


def test_a_model_of_the_site(folder: Path, say: Say, golden: Golden) -> None:
    """A site's own file adds models; what is wrong in it has a line."""
    path = folder / "models.yaml"
    path.write_text(
        "models:\n  Big One:\n    rating_w: 20000\n    runtime_table: {50: 1200, 100: 480}\n    source: its sheet\n",
        encoding="utf-8",
    )
    code, out, _ = say(*["--size", "--no-settings", "--ups", "big-one", "--load-w", "9kW", "--models"], str(path))
    assert code == 0
    golden("size", out)
    path.write_text(
        "models:\n"
        "  Big One: {also: [Big], rating_w: 20000, runtime_table: {50: 1200, 100: 480}, source: its sheet}\n"
        "  Big Two: {also: [BIG], rating_w: 200, runtime_by_w: {50: 1200, 100: 480}, source: its sheet}\n",
        encoding="utf-8",
    )
    code, _, err = say(*["--size", "--no-settings", "--ups", "big", "--models"], str(path))
    assert code == 64
    golden("size", err, "two models")
    path.write_text("models:\n  Big One:\n    rating_w: 20000\n", encoding="utf-8")
    code, _, err = say(*["--size", "--no-settings", "--ups", "x", "--models"], str(path))
    assert code == 78
    assert "models.yaml:3:5" in err


# --- Nonsense ---------------------------------------------------------------------------------------------------------

BASE = ("--ups", "APC SRT 6000VA")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --ups MODEL (known: APC"),
        (
            ("--ups", "no such"),
            "'no such' is not a known model; known are APC Back-UPS BE650G2-UK, APC Back-UPS RS 900G, ",
        ),
        (("--ups", "PR1500ELC"), "'PR1500ELC' is not a known model: did you mean CyberPower PR1500ELCD"),
        (("--ups", "CP1500PFCLCD"), "'CP1500PFCLCD' is not a known model: did you mean CyberPower CP1500EPFCLCD or "),
        (("--ups", "x" * 5000), "is not a known model"),
        (("--ups", "\x1b[31m"), "is not a known model"),
        ((*BASE, "--table", "50:540"), "--ups and --table contradict each other"),
        (("--table", "50:540", "--load-w", "3kW", "--models", "m.yaml"), "--models m.yaml needs --ups"),
        (("--table", "50"), "is not a point: write load in percent and seconds"),
        (("--table", ""), "is not a point"),
        (("--table", "50:540,50:500"), "50 % occurs twice"),
        (("--table", "50:240,100:540"), "must fall as the load rises"),
        (("--table", ",".join(f"{at}:{6000 - at}" for at in range(1, 60))), "more than 32"),
        (("--table", "50:nan"), "is not a duration"),
        (("--table", "50:540", "--load-w", "3kW"), "--load-w needs --rating-w"),
        (("--battery-wh", "2kWh"), "--battery-wh needs --rating-w"),
        (("--battery-wh", "2VAh", "--rating-w", "6000"), "'2VAh' is not an energy"),
        ((*BASE, "--load-w", "4500VA"), "'4500VA' is not a power in watts, not VA (examples: 4500W, 4.5kW)"),
        ((*BASE, "--load-w", "-x"), "expected one argument"),
        ((*BASE, "--load-w=-5"), "'-5' is not a power"),
        ((*BASE, "--load-w", "0"), "must be 1 to"),
        ((*BASE, "--load-w", "1e3"), "'1e3' is not a power"),
        ((*BASE, "--load-w", "inf"), "'inf' is not a power"),
        ((*BASE, "--load-w", "٤٥"), "is not a power"),
        ((*BASE, "--load-w", "9" * 4000), "is not a power"),
        ((*BASE, "--load-w", "1kW", "--load-pct", "5"), "--load-w and --load-pct contradict"),
        ((*BASE, "--load-pct", "0.5"), "must be 1 to"),
        ((*BASE, "--load-w", "1kW", "--paused-w", "2kW"), "is more than the load"),
        ((*BASE, "--bytes", "8.5"), "with a unit (example: 8.5GB)"),
        ((*BASE, "--bytes", "8.5Gb/s"), "is not a size"),
        ((*BASE, "--bytes", "8GB"), ""),
        ((*BASE, "--disk", "0.4GB/s"), "--disk needs --params or --bytes"),
        ((*BASE, "--bytes", "8GB", "--disk", "0.4GB"), "is not a bandwidth"),
        ((*BASE, "--bytes", "8GB", "--disk", "0GB/s"), "--disk: must be"),
        ((*BASE, "--bytes", "8GB", "--disk", "1GB/s", "--checkpoint-s", "8"), "contradict each other"),
        ((*BASE, "--params", "70B", "--bytes", "8GB"), "--params and --bytes contradict"),
        ((*BASE, "--params", "70b", "--disk", "1Gbit/s"), "is not a bandwidth"),
        ((*BASE, "--bytes-per-param", "16"), "--bytes-per-param needs --params"),
        ((*BASE, "--hosts", "8"), "--hosts needs --params or --bytes"),
        ((*BASE, "--params", "7B", "--hosts", "1.5"), "--hosts: '1.5' is not a whole number"),
        ((*BASE, "--health", "75"), "is more than 100 % (examples: 0.2, 20%)"),
        ((*BASE, "--health", "0.1"), "--health: must be 0.2 to 1"),
        ((*BASE, "--margin", "0.95"), "--margin: must be 0 to 0.9"),
        ((*BASE, "--reserve-s", "2h"), "--reserve-s: must be 0 to 1800 s"),
        ((*BASE, "--checkpoint-s", "0"), "--checkpoint-s: must be"),
    ],
)
def test_nonsense_is_reported(options: tuple[str, ...], message: str, say: Say) -> None:
    """Exit 64, one line on stderr that names what is wrong and what would be right; nothing on stdout."""
    code, out, err = say("--size", "--no-settings", *options)
    assert (code, out) == (64, "")
    assert message in err
    assert len(err.splitlines()) <= 2
    assert "Traceback" not in err
    assert "\x1b" not in err


def test_a_figure_that_a_gauge_reported_is_named_so(say: Say, golden: Golden) -> None:
    """Whoever reads the terms sees that they are not the maker's."""
    load = ("--load-pct", "50", "--no-settings", "--ups")
    _, out, _ = say("--size", *load, "Eaton 5SC 2200i RT")
    assert "reported" in out
    golden("size", out)
    _, out, _ = say("--size", *load, "APC SMC1000IC")
    assert "reported" not in out


HOSTS = [
    "--host",
    "tier=2,w=3000,checkpoint=20s,n=2",
    "--host",
    "tier=1,w=3kW,n=2",
    "--host",
    "tier=0,w=2500,checkpoint=1m",
]


@pytest.mark.parametrize(
    ("table", "code", "first"),
    [
        ("50:25m,100:10m", 0, "The battery carries every tier, each with a checkpoint and a full stop."),
        ("50:540,100:240", 1, "The battery carries every tier, but tiers 0, 1, 2 without a full stop."),
        ("50:100,100:40", 1, "The battery does not carry tiers 0, 1."),
    ],
)
def test_the_hosts_of_a_shared_ups(table: str, code: int, first: str, say: Say, golden: Golden) -> None:
    """Each tier's pause and stop on one time axis, and which tier the battery cannot carry."""
    reply, out, err = say("--size", "--no-settings", "--rating-w", "20000", "--table", table, *HOSTS)
    assert (reply, err) == (code, "")
    assert out.splitlines()[0] == first
    golden("size", out, table)
    _, out, _ = say("--size", "--no-settings", "--json", "--rating-w", "20000", "--table", table, *HOSTS)
    answer = json.loads(out)
    assert (answer["object"], answer["fits"]) == ("size_hosts", code == 0)
    assert [each["tier"] for each in answer["hosts"]] == [2, 1, 0]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--host", "tier=1"], "has no w"),
        (["--host", "w=1kW"], "has no tier"),
        (["--host", "tier=10,w=1kW"], "--host tier: must be 0 to 9"),
        (["--host", "tier=1,w=0"], "--host w: must be"),
        (["--host", "tier=1,w=1kW,n=0"], "--host n: must be"),
        (["--host", "tier=1,w=1kW,watts=2"], "'watts=2' is not one of"),
        (["--host", "tier=1,w=1kW,w=2kW"], "w occurs twice"),
        (["--host", "tier=1,w=1kW,paused=2kW"], "check whether they are swapped"),
        (["--host", "tier=1,w=1kW", "--load-w", "3kW"], "--load-w and --host contradict each other"),
        (["--host", "tier=1,w=1kW"] * 33, "33 are more than 32"),
        (["--host", ""], "'' is not one of"),
    ],
)
def test_hosts_that_make_no_sense(options: list[str], wrong: str, say: Say) -> None:
    code, out, err = say("--size", "--no-settings", "--rating-w", "20000", "--table", "50:25m,100:10m", *options)
    assert (code, out) == (64, "")
    assert wrong in err


def test_hosts_need_the_rating_of_their_ups(say: Say) -> None:
    code, _, err = say("--size", "--no-settings", "--table", "50:25m,100:10m", "--host", "tier=1,w=1kW")
    assert (code, "--rating-w" in err) == (64, True)


def test_options_of_size_need_it(say: Say, golden: Golden) -> None:
    """A forgotten --size is told, instead of being passed over."""
    code, _, err = say("--load-w", "3kW", "--disk", "1GB/s")
    assert code == 64
    golden("plan", err)


def test_wrong_input_as_an_object(say: Say) -> None:
    """Programs get the error as an object."""
    code, out, _ = say("--size", "--no-settings", "--json", "--ups", "x")
    assert (code, json.loads(out)["object"]) == (64, "error")


@given(st.text(max_size=60))
def test_any_text_is_an_amount_or_refused(text: str) -> None:
    """No text makes a parser fail in any other way, or return what is no usable number."""
    for parse in (
        lambda: size_bytes("--x", text),
        lambda: rate_bytes("--x", text),
        lambda: watts("--x", text),
        lambda: share("--x", text, 0.0, 1.0),
        lambda: seconds("--x", text, 0.0, 1e6),
        lambda: len(table("--x", text)),
    ):
        message = ""
        value = 0.0
        try:
            value = parse()
        except AmountError as error:
            message = str(error)
        assert message == "" or message.startswith("--x: ")
        assert 0.0 <= value < 1e17


@pytest.mark.parametrize(
    ("text", "value"),
    [("8.5GB", 8.5e9), ("8.5 GB", 8.5e9), ("1GiB", 2**30), ("8gb", 8e9), ("12kB", 12e3), ("7B", 7.0)],
)
def test_sizes(text: str, value: float) -> None:
    """Decimal and binary units, as written on disks and in memory."""
    assert size_bytes("--bytes", text) == value


# --- The pictures -----------------------------------------------------------------------------------------------------


class _Coloured(Paint):
    """A terminal with colours."""

    def __init__(self) -> None:
        self._on = True


def stretches() -> st.SearchStrategy[tuple[Stretch, ...]]:
    names = ("training", "checkpoint", "holding", "stop", "reserve", "margin")

    def make(lasts: list[float], left: float, load: float) -> tuple[Stretch, ...]:
        made, at_s, end_s = [], 0.0, sum(lasts)
        for name, lasts_s in zip(names, lasts, strict=False):
            after = max(0.0, left * (1.0 - (at_s + lasts_s) / end_s))
            made.append(Stretch(name, at_s, lasts_s, load, left * (1.0 - at_s / end_s), after))
            at_s += lasts_s
        return tuple(made)

    return st.builds(
        make, st.lists(st.floats(0.001, 2e5), min_size=1, max_size=6), st.floats(0.01, 1.0), st.floats(0.05, 1.5)
    )


@given(stretches(), st.booleans())
def test_the_bar_fits_the_terminal(parts: tuple[Stretch, ...], utf8: bool) -> None:
    """Whatever the times: at most 80 columns, one cell at least for each part, and ASCII where that is all there is."""
    lines = picture.text(parts, Paint(), utf8=utf8)
    assert max(len(line) for line in lines) <= 80
    assert len(lines) == 3 + len(parts)
    assert len(lines[0]) == picture.WIDTH
    assert len(set(lines[0].strip())) == len(parts)
    if not utf8:
        assert "".join(lines).isascii()


@given(stretches())
def test_colours_change_nothing_but_colour(parts: tuple[Stretch, ...]) -> None:
    """Without its colours the picture is the plain one: nobody needs them to read it."""
    coloured = "\n".join(picture.text(parts, _Coloured(), utf8=True))
    assert "\x1b[32m" in coloured
    assert re.sub(r"\x1b\[[0-9]+m", "", coloured) == "\n".join(picture.text(parts, Paint(), utf8=True))


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=6), st.integers(6, 200))
def test_cells_are_shared_out_whole(parts: list[float], cells: int) -> None:
    """They add up, and more time never has fewer cells."""
    counts = picture.shares(parts, cells)
    assert sum(counts) == cells
    assert min(counts) >= 1
    ranked = sorted(zip(parts, counts, strict=True))
    assert all(low <= high + 1 for (_, low), (_, high) in itertools.pairwise(ranked))


@pytest.mark.parametrize("phase", PHASES)
async def test_the_running_budget_as_a_picture(phase: str, folder: Path, say: Say) -> None:
    """`plan --picture` draws what the daemon tells: the same moments as its own forecast."""
    async with admin_server(scene(phase), path=f"{folder}/s.sock") as path:
        _, out, err = await asyncio.to_thread(say, "--socket", path, "--picture")
        answer = json.loads((await asyncio.to_thread(say, "--socket", path, "--json"))[1])
    assert err == ""
    drawn = picture.from_plan(answer)
    at = {step["action"]: step["in_s"] for step in answer["next"]}
    if phase == "shutdown":
        assert drawn == ()
        assert out.startswith("No picture")
        return
    assert out.splitlines()[1:] == picture.text(drawn, Paint(), utf8=is_utf8())
    begins = {each.name: each.begins_s for each in drawn}
    assert begins["stop"] == pytest.approx(max(0.0, at["shutdown"]), abs=0.01)
    if "checkpoint" in begins and "emergency_checkpoint" in at:
        assert begins["checkpoint"] == pytest.approx(max(0.0, at["emergency_checkpoint"]), abs=0.01)
    assert drawn[-1].left_after == pytest.approx(0.0, abs=1e-6)


def test_nothing_known_is_nothing_drawn() -> None:
    """A blind UPS has no budget to draw."""
    assert picture.from_plan({"terms": [{"name": "left", "value": None}], "next": []}) == ()
    assert picture.text((), Paint(), utf8=True) == []
