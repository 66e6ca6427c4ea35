"""What the settings name: refused if it does not exist, and doubted only if it could not be looked at."""

import errno
import os
import re
from importlib import resources
from pathlib import Path

import pytest

from powerguard.settings.cautions import missing
from powerguard.settings.load import SettingsError, load
from tests.golden import Golden


def missing_in(tmp_path: Path, profile: str, site: Path) -> tuple[list[str], list[str]]:
    path = tmp_path / "powerguard.yaml"
    source = f"{{kind: snmp, host: h{profile and f', profile: {profile}'}}}"
    path.write_text(f"mode: dry-run\nups:\n  a:\n    sources:\n      - {source}\n", encoding="utf-8")
    mistakes, doubts = missing(load(path), site)
    return [str(one) for one in mistakes], [str(one) for one in doubts]


KNOWN = {re.compile(r"(?<=known: apc-powernet, )[^)]*"): "OTHERS"}


@pytest.mark.parametrize(
    ("profile", "hint"),
    [("rfc1682", "rfc1628"), ("apc", "apc-powernet"), ("Riello", "riello"), ("qqqq", "known: apc-powernet, ")],
)
def test_unknown(profile: str, hint: str, tmp_path: Path, golden: Golden) -> None:
    mistakes, doubts = missing_in(tmp_path, profile, tmp_path / "absent")
    assert mistakes[0].startswith("ups.a.sources[0].profile: ")
    assert f"'{profile}'" in mistakes[0]
    assert hint in mistakes[0]
    golden("exists", mistakes[0], varies=KNOWN)
    assert doubts == []


def test_known_or_not_named(tmp_path: Path) -> None:
    for profile in ("", "rfc1628", "apc-rpdu"):
        assert missing_in(tmp_path, profile, tmp_path / "absent") == ([], [])


def test_a_profile_of_the_sites_own(tmp_path: Path, golden: Golden) -> None:
    """It is known by the name that stands in it; a neighbour that is broken makes others doubtful, not this one."""
    site = tmp_path / "profiles.d"
    site.mkdir()
    text = (resources.files("powerguard.ups.profiles") / "rfc1628.yaml").read_text(encoding="utf-8")
    (site / "acme.yaml").write_text(text.replace("name: rfc1628", "name: acme"), encoding="utf-8")
    assert missing_in(tmp_path, "acme", site) == ([], [])
    assert missing_in(tmp_path, "acma", site)[0] != []
    (site / "broken.yaml").write_text("name: [", encoding="utf-8")
    assert missing_in(tmp_path, "acme", site) == ([], [])
    mistakes, doubts = missing_in(tmp_path, "acma", site)
    assert mistakes == []
    assert "acme" in doubts[0]
    assert "broken.yaml:2:1: " in doubts[0]
    golden("exists", doubts[0], varies={re.compile(r"(?<=not YAML: ).*"): "WHY"})


def test_a_folder_that_cannot_be_read_refuses_nothing(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "file").touch()
    mistakes, doubts = missing_in(tmp_path, "acme", tmp_path / "file")
    assert mistakes == []
    assert os.strerror(errno.ENOTDIR) in doubts[0]
    golden("exists", doubts[0], varies=KNOWN)


def test_a_secret_that_is_not_there_or_open_to_others(tmp_path: Path, golden: Golden) -> None:
    """Each is told at its path, and one that is well kept is not opened."""
    kept, shared = tmp_path / "kept", tmp_path / "shared"
    for path, mode in ((kept, 0o400), (shared, 0o644)):
        path.write_text("hunter2", encoding="utf-8")
        path.chmod(mode)
    settings = tmp_path / "powerguard.yaml"
    settings.write_text(
        "mode: dry-run\nups: {a: {sources: [{kind: apcupsd, host: h}]}}\ntrainers:\n"
        + "".join(
            f"  - {{name: {path.name}, url: 'unix:/{path.name}', token: {{file: {path}}}}}\n"
            for path in (kept, shared, tmp_path / "absent", tmp_path, Path("/etc/powerguard/secrets/llm"))
        ).replace(f"name: {tmp_path.name}", "name: folder"),
        encoding="utf-8",
    )
    before_ns = kept.stat().st_atime_ns
    mistakes, doubts = missing(load(settings), tmp_path / "no-profiles")
    assert [one.path for one in mistakes] == [("trainers", at, "token", "file") for at in (1, 2, 3, 4)]
    golden("exists", "\n".join(one.what for one in mistakes))
    assert (doubts, kept.stat().st_atime_ns) == ([], before_ns)


TEMPLATES = [
    ('{"text": "$title ${text}, $$5"}', ""),
    ("", "gives no JSON"),
    ('{"text": "$titel"}', ":1: unknown placeholder $titel"),
    ('{\n"text": "$5"}', ":2: a lone $"),
    ('{"text": $title}', "gives no JSON"),
    ("x" * 20_000, "is longer than 16384 bytes"),
    ("[" * 16_000, "gives no JSON"),
    ('{"text": "\udcff"}', "is not UTF-8"),
]


@pytest.mark.parametrize(("text", "wrong"), TEMPLATES, ids=[wrong or "good" for _, wrong in TEMPLATES])
def test_a_template_of_a_webhook(text: str, wrong: str, tmp_path: Path) -> None:
    """A body that would not be JSON, or names what there is not, is told before the first outage."""
    url, template, path = tmp_path / "url", tmp_path / "slack.json", tmp_path / "powerguard.yaml"
    url.touch(mode=0o600)
    template.write_text(text, encoding="utf-8", errors="surrogateescape")
    path.write_text(
        "mode: dry-run\nups: {a: {sources: [{kind: apcupsd, host: h}]}}\n"
        f"notify: {{targets: {{chat: {{kind: webhook, url: {{file: {url}}}, template: {template}}}}}}}\n",
        encoding="utf-8",
    )
    mistakes, doubts = missing(load(path), tmp_path / "no-profiles")
    assert doubts == []
    assert [one.path for one in mistakes] == ([("notify", "targets", "chat", "template")] if wrong else [])
    assert wrong in "".join(one.what for one in mistakes)
    template.unlink()
    (gone,) = missing(load(path), tmp_path / "no-profiles")[0]
    assert gone.what == f"{template}: No such file or directory (put the body of the message there)"
    for make in (os.mkfifo, os.mkdir):
        make(template)
        (none,) = missing(load(path), tmp_path / "no-profiles")[0]
        assert none.what == f"{template}: is not a file (name the file with the body)"
        template.rmdir() if template.is_dir() else template.unlink()


WRONG = [
    ("{kind: webhook, url: 'https://hooks.example/x'}", "url"),
    ("{kind: alertmanager, url: 'http://user:pw@host:9093'}", "url"),
    ("{kind: alertmanager, url: 'http://host:9093/?token=x'}", "url"),
    ("{kind: mail, host: h, sender: a@b, to: [not-an-address]}", "to"),
    ("{kind: mail, host: h, sender: a@b, to: [a@b], user: u}", ""),
    ("{kind: mail, host: h, sender: a@b, to: [a@b], user: u, password: {file: /x}, tls: none}", ""),
    ("{kind: command, command: []}", "command"),
    ("{kind: pigeon}", ""),
]


@pytest.mark.parametrize(("target", "key"), WRONG)
def test_targets_that_are_refused(target: str, key: str, tmp_path: Path) -> None:
    """An URL of a webhook in the settings themselves is one of them: it is a secret."""
    path = tmp_path / "powerguard.yaml"
    head = "mode: dry-run\nups: {a: {sources: [{kind: apcupsd, host: h}]}}\n"
    path.write_text(f"{head}notify: {{targets: {{ops: {target}}}}}\n", encoding="utf-8")
    with pytest.raises(SettingsError) as refused:
        load(path)
    assert f"notify.targets.ops{'.' + key if key else ''}" in str(refused.value)
