"""Settings are read as they are written, or every mistake is told at once with its place and what would be right."""

import functools
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.effectors.trainer.options import TrainerOptions
from powerguard.settings.load import MAX_REPORTED, Files, SettingsError, load, load_with_origins, read_files, validate
from powerguard.settings.schema import Settings, json_schema
from powerguard.yamlfile import Document
from tests.golden import Golden

LEAST = """\
mode: dry-run
ups:
  rack-a:
    sources:
      - {kind: snmp, host: 10.0.0.5}
"""
SECRET = "hunter2"
HERE = Path(__file__).parent


def write(folder: Path, text: str, name: str = "powerguard.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str) -> Settings:
    return load(write(folder, text))


def mistakes(folder: Path, text: str) -> list[str]:
    """Return the problems of a file, without the folder's name."""
    with pytest.raises(SettingsError) as caught:
        read(folder, text)
    return [problem.removeprefix(f"{folder}/") for problem in caught.value.problems]


def test_a_key_that_reads_as_a_mark_of_pydantic_is_unknown(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, LEAST + '"[key]": 1\n')
    assert found.startswith("powerguard.yaml:6:1: '[key]': unknown key (known here: ")


def test_the_journal_is_not_the_queue_of_messages(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, LEAST + "journal: {path: /var/lib/x/messages.sqlite}\n")
    assert found.endswith("messages.sqlite is the queue of messages there; give another name")


def test_the_least_that_is_needed(tmp_path: Path) -> None:
    settings = read(tmp_path, LEAST)
    assert (settings.mode, settings.feed, settings.budget.margin, settings.http.port) == (
        "dry-run",
        "rack-a",
        0.2,
        13493,
    )
    assert settings.host.force_after_s == 110


def test_every_mistake_of_a_file_is_reported_at_once() -> None:
    """The file of mistakes and what is told of it lie side by side, for whoever changes a message."""
    with pytest.raises(SettingsError) as caught:
        load(HERE / "mistakes.yaml")
    mistakes_found = [problem.removeprefix(f"{HERE}/") for problem in caught.value.problems]
    assert mistakes_found == (HERE / "mistakes.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("budget: {margin: true}", "budget.margin: must be 0 to 0.9, got true"),
        ("budget: {margin: 20}", "budget.margin: must be 0 to 0.9, got 20"),
        ("budget: {margin: '0,2'}", "budget.margin: must be 0 to 0.9, got '0,2' (write 0.2)"),
        ("budget: {blind_s: 1:30}", "budget.blind_s: must be 20 to 3600, got '1:30'"),
        ("budget: {blind_s: 0120}", "budget.blind_s: must be 20 to 3600, got '0120' (write 120)"),
        ("budget: [1]", "budget: must be a map of keys and values, got a list of 1"),
        ("budget: {margin: .nan}", "budget.margin: must be 0 to 0.9, got '.nan'"),
        ("http: {port: 0}", "http.port: must be a whole number, 1 to 65535, got 0"),
        (
            "http: 0.0.0.0:13493",
            "http: must be a map of keys and values, got '0.0.0.0:13493' (write http: {listen: \"127.0.0.1\", port: ",
        ),
        ("bmc: ipmi", "bmc: must be a map of keys and values, got 'ipmi' (write bmc: {kind: auto})"),
        (
            "ups: [a]",
            "ups: must be a map of keys and values of 1 to 64 entries, got a list of 1 (write ups: {rack-a: {",
        ),
        ("trainer_uids: [1.5]", "trainer_uids[0]: must be a user's name or number, got 1.5"),
        (
            "trainers: [{name: a, url: 'unix://run/x'}]",
            "trainers[0].url: must have one slash after unix: (write unix:/run/x)",
        ),
        ("log: {format: yes}", "log.format: must be auto, journald, logfmt or json, got 'yes'"),
        ("log: {level: [info]}", "log.level: must be debug, info, warning or error, got a list of 1"),
        ("host: {kind: comand}", "host.kind: must be systemd or command, got 'comand' (write command)"),
        ("lgo: {}", "lgo: unknown key (did you mean 'log'?)"),
        ("journal: {zzz: 1}", "journal.zzz: unknown key (known here: keep_outages, path)"),
        ("control: {socket: run/x}", "control.socket: must be an absolute path of at most 107 characters, got 'run/x'"),
        (f"control: {{socket: /{'x' * 107}}}", "control.socket: must be an absolute path of at most 107 characters"),
        (
            'log: {level: "\\u202einfo"}',
            "log.level: must be debug, info, warning or error, got '\\u202einfo' (write info)",
        ),
        ("trainers: [{name: a, url: http://10.0.0.9:5000}]", "trainers[0]: a trainer on another host needs a token"),
    ],
)
def test_a_mistake_says_what_would_be_right(tmp_path: Path, setting: str, problem: str) -> None:
    least = "mode: dry-run\n\n\n\n\n" if setting.startswith("ups:") else LEAST
    (found,) = mistakes(tmp_path, f"{least}{setting}\n")
    place, _, what = found.partition(": ")
    assert place.startswith("powerguard.yaml:6:")
    assert what.startswith(problem)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("{}", "must be a map of keys and values of 1 to 32 entries, got an empty map"),
        ("{50: 540, 100: 540}", "must fall as the load rises, got 540 s at 50 % and 540 s at 100 % (write load in"),
        ("{540: 50, 240: 100}", "as a key here must be a load in percent of the rating, above 0, at most 150"),
        ('{50: 540, "50.0": 360}', "6:20: ups.rack-a.runtime_table: has two values for one load; keep one"),
        ("{50: 540, 050: 360, 100: 240}", "ups.rack-a.runtime_table: has two values for one load; keep one"),
    ],
)
def test_a_runtime_table_that_cannot_be(tmp_path: Path, table: str, problem: str) -> None:
    problems = mistakes(tmp_path, f"{LEAST}    runtime_table: {table}\n")
    assert problem in problems[0]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("feeds: {supplies: [rack-b]}", "6:20: feeds.supplies[0]: unknown UPS (known: rack-a)"),
        ("feeds: {supplies: [rack-a], minimum_supplies: 2}", "6:8: feeds: minimum_supplies is 2, but there are only 1"),
        (
            "  b: {sources: [{kind: snmp, host: b}]}",
            "3:3: ups: several UPSes: set feeds",
        ),
        (
            "      - {kind: snmp, host: 10.0.0.5}",
            "6:9: ups.rack-a.sources[1]: the same card as ups.rack-a.sources[0]; a second witness must be another one",
        ),
        (
            "trainers: [{name: a, url: 'unix:/a'}, {name: a, url: 'unix:/b'}]",
            "6:46: trainers[1].name: trainers[0] has this name already; give each its own",
        ),
        (
            "trainers: [{name: a, url: 'unix:/a'}, {name: b, url: 'unix:/a'}]",
            "6:54: trainers[1].url: trainers[0] has this url already; give each its own",
        ),
    ],
)
def test_names_must_agree(tmp_path: Path, more: str, problem: str) -> None:
    (found,) = mistakes(tmp_path, f"{LEAST}{more}\n")
    assert found.startswith(f"powerguard.yaml:{problem}")


def two(first: str, second: str, *, feeds: str = "rack-a, rack-b") -> str:
    return (
        f"mode: dry-run\nups:\n  rack-a: {{sources: [{first}]}}\n  rack-b: {{sources: [{second}]}}\n"
        f"feeds: {{supplies: [{feeds}]}}\n"
    )


CARD = "{kind: snmp, host: 10.0.0.5}"
NUT = "{kind: nut, host: 10.0.0.9, name: a}"
APCUPSD = "{kind: apcupsd, host: localhost}"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (CARD, CARD),
        (CARD, "{kind: snmp, host: 10.0.0.5, poll_s: 2, timeout_s: 1}"),
        (CARD, "{kind: snmp, host: 10.0.0.5, port: 161, community: {file: /c}}"),
        (CARD, "{kind: snmp, host: 10.0.0.5, version: 3, user: x, auth: {file: /a}}"),
        ("{kind: snmp, host: Card.Example.}", "{kind: snmp, host: card.example}"),
        ("{kind: snmp, host: '2001:db8::5'}", "{kind: snmp, host: '2001:db8:0::5'}"),
        ("{kind: snmp, host: '::ffff:10.0.0.5'}", CARD),
        (NUT, NUT),
        (NUT, "{kind: nut, host: 10.0.0.9, port: 3493, name: a, user: x, password: {file: /p}}"),
        (APCUPSD, "{kind: apcupsd, host: 127.0.0.1, poll_s: 3}"),
        (APCUPSD, "{kind: apcupsd, host: '::1', name: a}"),
    ],
)
def test_one_peer_is_no_second_witness(tmp_path: Path, first: str, second: str, golden: Golden) -> None:
    """Whatever else is written: within one UPS it is no witness, and as two UPSes it hides the loss of one."""
    (found,) = mistakes(tmp_path, f"mode: dry-run\nups:\n  rack-a:\n    sources: [{first}, {second}]\n")
    assert re.match(r"powerguard\.yaml:4:\d+: ups\.rack-a\.sources\[1\]: ", found)
    golden("load", found, "one UPS")
    (found,) = mistakes(tmp_path, two(first, second))
    assert re.match(r"powerguard\.yaml:4:\d+: ups\.rack-b\.sources\[0\]: ", found)
    golden("load", found, "two UPSes")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (CARD, "{kind: snmp, host: 10.0.0.6}"),
        (CARD, "{kind: snmp, host: 10.0.0.5, port: 1161}"),
        (CARD, "{kind: nut, host: 10.0.0.5, name: a}"),
        (NUT, "{kind: nut, host: 10.0.0.9, name: b}"),
        (NUT, "{kind: nut, host: 10.0.0.9, name: A}"),
        (NUT, "{kind: nut, host: 10.0.0.9, port: 3494, name: a}"),
        (APCUPSD, "{kind: apcupsd, host: localhost, port: 3552}"),
        ("{kind: apcupsd, host: h, name: a}", "{kind: apcupsd, host: h, name: b}"),
        ("{kind: snmp, host: 127.0.0.1}", "{kind: snmp, host: 127.0.0.2}"),
    ],
)
def test_peers_that_differ_are_two(tmp_path: Path, first: str, second: str) -> None:
    """One upsd serves many UPSes, each by its name; one address may have several daemons."""
    read(tmp_path, two(first, second))
    read(tmp_path, f"mode: dry-run\nups:\n  rack-a:\n    sources: [{first}, {second}]\n")


def test_a_ups_that_feeds_another_host_may_be_written_twice(tmp_path: Path) -> None:
    """It is only looked at: nothing of this host depends on it."""
    read(tmp_path, two(CARD, CARD, feeds="rack-a"))


def test_conf_d_comes_on_top_in_the_order_of_names(tmp_path: Path) -> None:
    path = write(tmp_path, f"{LEAST}budget: {{reserve_s: 30, margin: 0.3}}\ncheckpoint_dirs: [/a, /b]\n")
    write(tmp_path, "budget: {margin: 0.5}\nlog: {level: debug}\n", "conf.d/20-b.yaml")
    write(tmp_path, "budget: {margin: 0.4}\ncheckpoint_dirs: [/c]\n", "conf.d/10-a.yaml")
    write(tmp_path, "budget: {margin: 0.9}\n", "conf.d/.hidden.yaml")
    write(tmp_path, "", "conf.d/30-empty.yaml")
    settings = load(path)
    assert (settings.budget.reserve_s, settings.budget.margin) == (30, 0.5)
    assert (settings.checkpoint_dirs, settings.log.level) == (["/c"], "debug")


@pytest.mark.parametrize("small", ["{50: 400, 100: 150}", '{"50": 400, "100": 150}'])
def test_a_runtime_table_in_conf_d_replaces_the_whole_one(tmp_path: Path, small: str) -> None:
    """Points of two batteries would make a table of neither, with a runtime that is too long in between."""
    path = write(tmp_path, f"{LEAST}    runtime_table: {{25: 1260, 50: 540, 75: 360, 100: 240}}\n")
    write(tmp_path, f"ups: {{rack-a: {{runtime_table: {small}}}}}\n", "conf.d/10-small.yaml")
    table = load(path).ups["rack-a"].runtime_table
    assert table is not None
    assert dict(table) == {50: 400, 100: 150}


def test_a_conf_d_that_leads_nowhere_is_not_silently_left_out(tmp_path: Path) -> None:
    """Its file system is not mounted yet: without the host's own settings it would watch another host's UPS."""
    path = write(tmp_path, LEAST)
    (tmp_path / "conf.d").symlink_to(tmp_path / "not-mounted")
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert caught.value.problems == (f"{tmp_path}/conf.d: cannot be read: No such file or directory",)
    (tmp_path / "not-mounted").mkdir()
    assert load(path).mode == "dry-run"


def test_another_conf_d_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, LEAST)
    write(tmp_path, "mode: armed\n", "other place/x.yaml")
    assert (load(path).mode, load(path, tmp_path / "other place").mode) == ("dry-run", "armed")
    with pytest.raises(SettingsError, match="absent: cannot be read: No such file or directory"):
        load(path, tmp_path / "absent")


def test_mistakes_in_conf_d_name_the_file_that_made_them(tmp_path: Path) -> None:
    path = write(tmp_path, LEAST)
    first = write(tmp_path, "ups:\n  rack-a:\n    rating_w: big\n    sources: [{kind: snmp}]\n", "conf.d/a.yaml")
    second = write(tmp_path, "ups: {rack-a: {rating_wt: 1}}\nmode: null\n", "conf.d/b.yaml")
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        f"{first}:3:15",
        f"{first}:4:15",
        f"{second}:1:16",
        f"{second}:2:7",
    ]


def test_names_are_compared_beside_mistakes_of_other_kinds(tmp_path: Path, golden: Golden) -> None:
    """One run tells what otherwise took one run a kind: a value, a name that must agree, settings that go together."""
    text = """\
mode: dry-run
budget: {margin: 5}
ups:
  a: {sources: [{kind: snmp, host: h, poll_s: 99, profil: x}], battery_wh: 500}
  b: {sources: [{kind: snmp}, {kind: nut, host: g, name: u, tls: required}]}
feeds: {supplies: [c]}
trainers:
  - {name: a, url: "unix:/x"}
  - {name: b}
  - {name: a, url: "unix:/y"}
  - {name: c, url: "http://10.0.0.9:5000"}
"""
    problems = [problem.partition(": ")[2] for problem in mistakes(tmp_path, text)]
    assert [problem.partition(": ")[0] for problem in problems] == [
        "budget.margin",
        "ups.a",
        "ups.a.sources[0].poll_s",
        "ups.a.sources[0].profil",
        "ups.b.sources[0].host",
        "feeds.supplies[0]",
        "trainers[1].url",
        "trainers[2].name",
        "trainers[3]",
    ]
    golden("load", "\n".join(problems))


@pytest.mark.parametrize(
    "text",
    [
        "bmc: {kind: ipmi-lan, host: h, user: u, password: {credential: 'a b'}}",
        "bmc: {kind: ipmi-lan, host: h, user: u, pasword: {credential: a}, password: 5}",
        "trainers: [{name: a, url: 'http://10.0.0.9:5000', token: {credential: 'a b'}}]",
        "feeds: {supplies: rack-a}",
        "feeds: {supplies: [rack-a], minimum_supplies: x}",
        "budget: {stop_median_s: 100, stop_q95_s: x}",
        "checkpoint_dirs: [a]",
    ],
)
def test_a_value_that_is_wrong_makes_no_second_mistake(tmp_path: Path, text: str) -> None:
    """What is missing only because it is wrong is not told again as missing."""
    problems = mistakes(tmp_path, f"{LEAST}{text}\n")
    assert len(problems) == 1 + text.count("pasword"), problems


def test_a_source_with_a_mistake_is_neither_a_witness_nor_unfit(tmp_path: Path) -> None:
    """Its host, port or version may be what is wrong: it is compared with no other and orders nothing yet."""
    text = """\
mode: dry-run
ups:
  a: {sources: [{kind: snmp, host: h, port: 0}, {kind: snmp, host: h}]}
  b: {sources: [{kind: snmp, host: g, version: 3, user: u, auth: {credential: a}, priv: 5}], output_off: {by: snmp}}
feeds: {supplies: [a, b]}
"""
    assert [problem.split(": ")[1] for problem in mistakes(tmp_path, text)] == [
        "ups.a.sources[0].port",
        "ups.b.sources[0].priv",
    ]


def test_users_are_named_or_numbered(tmp_path: Path) -> None:
    """Both are numbers once the settings are read."""
    settings = read(
        tmp_path, f"{LEAST}trainers: [{{name: a, url: 'unix:/a', uids: [root, 7]}}]\ntrainer_uids: [root, 5]\n"
    )
    (trainer,) = settings.trainers
    assert isinstance(trainer, TrainerOptions)
    assert (trainer.uids, settings.trainer_uids) == ([0, 7], [0, 5])


@pytest.mark.parametrize("ending", ["yml", "YAML", "conf", "json"])
def test_a_file_in_conf_d_with_another_ending_is_not_silently_left_out(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path, LEAST)
    write(tmp_path, "mode: armed\n", f"conf.d/a.{ending}")
    for backup in ("a.yaml~", "a.yaml.bak", "a.yaml.dpkg-old", "README", ".a.yaml.swp"):
        write(tmp_path, "not even YAML: {", f"conf.d/{backup}")
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert caught.value.problems == (f"{tmp_path}/conf.d/a.{ending}: is not read; call it a.yaml",)


def test_where_each_value_comes_from(tmp_path: Path) -> None:
    path = write(tmp_path, f"{LEAST}checkpoint_dirs: [/a, /b]\n")
    added = write(tmp_path, "\ncheckpoint_dirs:\n  - /c\n", "conf.d/a.yaml")
    files = load_with_origins(path).files
    assert files.origin(("ups", "rack-a", "sources", 0, "host")) == f"{path}:5"
    assert files.origin(("checkpoint_dirs", 0)) == f"{added}:3"
    assert files.origin(("checkpoint_dirs", 1)) is None
    assert files.origin(("budget", "margin")) is None


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_says_what_it_needs(tmp_path: Path, text: str, golden: Golden) -> None:
    (found,) = mistakes(tmp_path, text)
    assert found.startswith("powerguard.yaml: ")
    golden("load", found)


@pytest.mark.parametrize("text", ["- a\n", "mode\n", "5\n", "'mode: armed'\n"])
def test_a_file_that_is_no_map(tmp_path: Path, text: str, golden: Golden) -> None:
    (found,) = mistakes(tmp_path, text)
    assert found.startswith("powerguard.yaml:1:1: ")
    golden("load", found)


def test_a_missing_file_says_where_settings_come_from(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"No such file or directory \(write one: `powerguard discover`"):
        load(tmp_path / "absent.yaml")


def test_problems_of_all_files_are_reported_together(tmp_path: Path) -> None:
    path = write(tmp_path, "a: 1\na: 2\n")
    write(tmp_path, "b: *c\n", "conf.d/x.yaml")
    (tmp_path / "conf.d" / "y.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "conf.d" / "z.yaml").mkdir()
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert [problem.split(": ")[0].removeprefix(f"{tmp_path}/") for problem in caught.value.problems] == [
        "powerguard.yaml:2:1",
        "conf.d/x.yaml:1:4",
        "conf.d/y.yaml:1:1",
        "conf.d/z.yaml",
    ]


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    """A loop of links stands for every refusal of the system; permissions do not stop a test that runs as root."""
    path = tmp_path / "powerguard.yaml"
    path.symlink_to(path)
    with pytest.raises(SettingsError, match="cannot be read: Too many levels of symbolic links"):
        load(path)


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"key{number}: 1" for number in range(30_000)),
        f"mode: armed\nups: {{a: {{sources: [{', '.join(['{kind: x}'] * 20_000)}]}}}}",
        f"{'x' * 500_000}: 1",
        f"mode: {'x' * 500_000}",
        "ups: " + "[" * 31 + "]" * 31,
        "mode: armed\nups: {" + ", ".join(f"u{number}: {{sources: []}}" for number in range(6_000)) + "}",
        "mode: armed\nups: {"
        + ", ".join(f"u{number}: {{sources: [{{kind: snmp, host: h{number}}}]}}" for number in range(3_000))
        + "}\nfeeds: {supplies: [u1]}",
    ],
    ids=["many keys", "many items", "a long key", "a long value", "deep", "many empty lists", "many UPSes"],
)
def test_a_hostile_file_is_refused_soon_and_briefly(tmp_path: Path, text: str) -> None:
    """No file keeps the daemon from starting for long, or floods its log."""
    write(tmp_path, text, "conf.d/same.yaml")
    began_s = time.process_time()
    problems = mistakes(tmp_path, text)
    assert time.process_time() - began_s < 15
    assert len(problems) <= MAX_REPORTED + 1
    assert max(map(len, problems)) < 600


@pytest.mark.parametrize(
    "setting",
    [
        f"bmc: {{kind: ipmi-lan, host: b, user: u, password: {SECRET}}}",
        f"bmc: {{kind: ipmi-lan, host: b, user: u, password: {{file: {SECRET}}}}}",
        f"bmc: {{kind: ipmi-lan, host: b, user: u, password: {{credential: a, file: /{SECRET}}}}}",
        f"bmc: {{kind: ipmi-lan, host: b, user: u, password: [{SECRET}]}}",
        f"bmc: {{kind: ipmi-lan, host: b, user: u, pasword: {SECRET}}}",
        f"trainers: [{{name: a, url: 'http://u:{SECRET}@h:5000'}}]",
        f"trainers: [{{name: a, url: 'unix:/a', token: {SECRET}}}]",
        f"http: {{listen: 'http://u:{SECRET}@h'}}",
        f"password: {SECRET}",
        f"password: &x {SECRET}",
    ],
)
def test_no_secret_that_stands_in_the_wrong_place_is_shown(tmp_path: Path, setting: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, f"{LEAST}{setting}\n")
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


def test_where_the_schema_says_nothing_no_value_is_shown(tmp_path: Path, golden: Golden) -> None:
    """Another version of pydantic may shape its schema in a way that we do not follow: then we say less, not more."""
    path = write(tmp_path, f"{LEAST}bmc: {{kind: ipmi-lan, password: {SECRET}}}\n")
    with pytest.raises(SettingsError) as caught:
        validate(Settings, read_files(path), schema=dict)
    (found,) = caught.value.problems
    assert found.startswith(f"{path}:6:33: bmc.password: ")
    golden("load", found)


_schema = functools.cache(json_schema)  # a tenth of a second each time

_junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**9) | st.floats(-10, 1e6) | st.text("abc-/:{}1", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "host", "x", "1"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*Settings.model_fields, "modee", "50"]), _junk, max_size=5))
@settings(max_examples=150, deadline=None)
def test_whatever_stands_in_the_file_the_answer_is_settings_or_mistakes(data: dict[str, object]) -> None:
    """Nothing else is ever raised, and every mistake has a place."""
    files = Files(data, (Document("f.yaml", data),), {})
    try:
        validate(Settings, files, schema=_schema)
    except SettingsError as error:
        mistakes_found = error.problems
    else:
        mistakes_found = ("f.yaml:valid",)
    assert all(problem.startswith("f.yaml:") for problem in mistakes_found)
