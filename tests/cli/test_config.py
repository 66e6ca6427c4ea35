"""`powerguard config`: what it prints, where, and how it exits."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from powerguard.cli import config
from tests.golden import Golden

ROOT = Path(__file__).parents[2]
SAMPLE = str(ROOT / "config" / "powerguard.yaml")
LEAST = "mode: dry-run\nups:\n  a:\n    sources:\n      - {kind: snmp, host: h}\n"
SECRET = "hunter2"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    config.register(parser.add_subparsers(dest="verb").add_parser("config"))
    return config.run(parser.parse_args(words))


@pytest.fixture
def least(tmp_path: Path) -> str:
    path = tmp_path / "powerguard.yaml"
    path.write_text(LEAST, encoding="utf-8")
    return str(path)


def test_the_sample_is_valid(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert run("config", "validate", SAMPLE) == 0
    captured = capsys.readouterr()
    golden("config", captured.out)
    assert captured.err == ""


def test_warnings_go_to_stderr_and_change_no_exit_code(
    least: str, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert run("config", "validate", least) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"warning: {least}:1:1: bmc.kind: ")
    assert any(line.startswith(f"warning: {least}:5:9: ups.a.sources[0].version: ") for line in lines)
    golden("config", "\n".join(lines))


def test_a_profile_that_there_is_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What doctor would FAIL is no valid setting."""
    path = tmp_path / "powerguard.yaml"
    path.write_text(LEAST.replace("host: h", "host: h, profile: apc"), encoding="utf-8")
    assert run("config", "validate", str(path)) == 78
    captured = capsys.readouterr()
    line = f"{path}:5:40: ups.a.sources[0].profile: unknown profile 'apc' (did you mean apc-powernet?)"
    assert (captured.out, captured.err) == ("", f"error: {line}\n")
    assert run("config", "validate", "--json", str(path)) == 78
    assert json.loads(capsys.readouterr().out)["problems"] == [line]
    path.write_text(LEAST.replace("host: h", "host: h, profile: apc-powernet"), encoding="utf-8")
    assert run("config", "validate", str(path)) == 0


def test_a_certificate_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an authority: a target of messages would be asked in an outage first."""
    path = tmp_path / "powerguard.yaml"
    source = "{kind: nut, host: h, name: ups, tls: required, ca: /nothere.pem}"
    target = f"{{kind: webhook, url: {{credential: url}}, ca_file: '{path}'}}"
    path.write_text(
        f"{LEAST}      - {source}\nnotify: {{targets: {{ops: {target}}}}}\n",
        encoding="utf-8",
    )
    assert run("config", "validate", str(path)) == 78
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" (")[0] for line in lines] == [
        f"error: {path}:6:60: ups.a.sources[1].ca: /nothere.pem: No such file or directory",
        f"error: {path}:7:74: notify.targets.ops.ca_file: {path}: has no certificate in PEM",
    ]


def test_a_label_named_ca_is_no_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "powerguard.yaml"
    target = "{kind: alertmanager, url: 'http://am:9093', labels: {ca: west, ca_file: north}}"
    path.write_text(f"{LEAST}notify: {{targets: {{ops: {target}}}}}\n", encoding="utf-8")
    assert (run("config", "validate", str(path)), "error:" in capsys.readouterr().err) == (0, False)


def test_what_does_not_exist_is_reported_with_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value, a name that must agree, a profile and a secret: one run, in the order of the file."""
    path = tmp_path / "powerguard.yaml"
    path.write_text(
        "mode: armd\n"
        "ups:\n"
        "  b: {sources: [{kind: snmp}]}\n"
        "  a: {sources: [{kind: snmp}, {kind: snmp, host: h, profile: apc, community: {file: /nothere}}]}\n"
        "feeds: {supplies: [c]}\n",
        encoding="utf-8",
    )
    assert run("config", "validate", "--json", str(path)) == 78
    assert [line.split(": ")[:2] for line in json.loads(capsys.readouterr().out)["problems"]] == [
        [f"{path}:1:7", "mode"],
        [f"{path}:3:17", "ups.b.sources[0].host"],
        [f"{path}:4:17", "ups.a.sources[0].host"],
        [f"{path}:4:62", "ups.a.sources[1].profile"],
        [f"{path}:4:85", "ups.a.sources[1].community.file"],
        [f"{path}:5:20", "feeds.supplies[0]"],
    ]


def test_show_takes_a_file_as_validate_does(least: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", least) == 0
    by_place = capsys.readouterr().out
    assert run("config", "show", "--config", least) == 0
    assert by_place == capsys.readouterr().out
    assert "mode: dry-run" in by_place


def test_mistakes_go_to_stderr_with_78(tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(LEAST.replace("dry-run", "dryrun") + "lgo: 1\n", encoding="utf-8")
    for verb in ("validate", "show"):
        assert run("config", verb, "--config", str(path)) == 78
        captured = capsys.readouterr()
        assert captured.out == ""
        assert [line.rpartition(": ")[0] for line in captured.err.splitlines()] == [
            f"error: {path}:1:7: mode",
            f"error: {path}:6:1: lgo",
        ]
        golden("config", captured.err, verb)


def test_the_settings_of_a_sentinel_are_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The advice was to put `listen` under traps, and to call `hosts` host."""
    sentinels = ROOT / "config" / "sentinel.yaml"
    assert run("config", "validate", str(sentinels)) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentinels}: these are the settings of a sentinel")
    assert f"powerguard sentinel --config {sentinels} --check" in line
    path = tmp_path / "powerguard.yaml"
    path.write_text(f"{LEAST}hosts: {{kind: systemd}}\n", encoding="utf-8")
    assert run("config", "validate", str(path)) == 78
    assert "hosts: unknown key (did you mean 'host'?)" in capsys.readouterr().err


def test_a_program_reads_one_object(tmp_path: Path, least: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "validate", "--json", least) == 0
    good = json.loads(capsys.readouterr().out)
    assert run("config", "validate", "--json", str(tmp_path / "absent")) == 78
    bad = json.loads(capsys.readouterr().out)
    assert set(good) == set(bad) == {"schema_version", "object", "valid", "file", "problems", "warnings"}
    assert good["object"] == bad["object"] == "config_validate"
    assert (good["schema_version"], good["valid"], good["problems"]) == (1, True, [])
    assert (bad["valid"], len(bad["problems"])) == (False, 1)


def test_show_prints_defaults_and_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A secret's file is never opened: what stands in it cannot be shown."""
    secret = tmp_path / "password"
    secret.write_text(SECRET, encoding="utf-8")
    path = tmp_path / "powerguard.yaml"
    bmc = f"bmc: {{kind: ipmi-lan, host: b, user: u, password: {{file: '{secret}'}}}}\n"
    path.write_text(LEAST + bmc, encoding="utf-8")
    before_ns = secret.stat().st_atime_ns
    for words in ([], ["--origin"], ["--json"], ["--json", "--origin"]):
        assert run("config", "show", "--config", str(path), *words) == 0
        shown = capsys.readouterr().out
        assert SECRET not in shown
        assert str(secret) in shown
        assert "13493" in shown
    assert secret.stat().st_atime_ns == before_ns


def test_show_says_where_each_value_comes_from(least: str, capsys: pytest.CaptureFixture[str]) -> None:
    added = Path(least).parent / "additions" / "10.yaml"
    added.parent.mkdir()
    added.write_text("\nlog: {level: debug}\n", encoding="utf-8")
    assert run("config", "show", "--origin", "--config", least, "--conf-d", str(added.parent)) == 0
    shown = dict(line.split("  # ") for line in capsys.readouterr().out.splitlines())
    origins = {line.strip(): origin for line, origin in shown.items()}
    assert origins['log.level: "debug"'] == f"{added}:2"
    assert origins['mode: "dry-run"'] == f"{least}:1"
    assert origins["http.port: 13493"] == "default"


def test_show_as_json_has_settings_and_origins(least: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--origin", "--json", "--config", least) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["object"] == "config_show"
    assert shown["settings"]["ups"]["a"]["sources"][0]["host"] == "h"
    assert shown["origins"]["ups.a.sources[0].host"] == f"{least}:5"
    assert shown["origins"]["log.level"] is None


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) >= {"mode", "ups", "trainers", "budget"}


def test_a_config_before_the_verb_and_one_in_the_environment(
    least: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", SAMPLE, "config", "validate") == 0
    assert SAMPLE in capsys.readouterr().out
    monkeypatch.setenv("POWERGUARD_CONFIG", least)
    assert run("config", "validate") == 0
    assert least in capsys.readouterr().out


@pytest.mark.parametrize("words", [["config"], ["config", "validat"], ["config", "show", "--orgin"]])
def test_wrong_usage_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*words)
    assert caught.value.code != 0


def test_registering_the_verb_loads_no_library() -> None:
    """`event` and `status` share the command line with us and must start at once."""
    code = (
        "import argparse, sys; from powerguard.cli import config\n"
        "config.register(argparse.ArgumentParser())\n"
        "print(sorted(name for name in ('pydantic', 'yaml', 'asyncio', 'powerguard.settings') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == "[]"
