"""What the settings name: refused if it does not exist, and doubted only if it could not be looked at."""

from importlib import resources
from pathlib import Path

import pytest

from powerguard.settings.exists import missing
from powerguard.settings.load import load


def told(tmp_path: Path, profile: str, site: Path) -> tuple[list[str], list[str]]:
    path = tmp_path / "powerguard.yaml"
    source = f"{{kind: snmp, host: h{profile and f', profile: {profile}'}}}"
    path.write_text(f"mode: dry-run\nups:\n  a:\n    sources:\n      - {source}\n", encoding="utf-8")
    mistakes, doubts = missing(load(path), site)
    return [str(one) for one in mistakes], [str(one) for one in doubts]


@pytest.mark.parametrize(
    ("profile", "hint"),
    [
        ("rfc1682", "did you mean rfc1628?"),
        ("apc", "did you mean apc-powernet?"),
        ("Riello", "did you mean riello?"),
        ("qqqq", "known: apc-powernet, cps, "),
    ],
)
def test_unknown(profile: str, hint: str, tmp_path: Path) -> None:
    mistakes, doubts = told(tmp_path, profile, tmp_path / "absent")
    assert mistakes[0].startswith(f"ups.a.sources[0].profile: there is no profile '{profile}' ({hint}")
    assert doubts == []


def test_known_or_not_named(tmp_path: Path) -> None:
    for profile in ("", "rfc1628", "apc-rpdu"):
        assert told(tmp_path, profile, tmp_path / "absent") == ([], [])


def test_a_profile_of_the_sites_own(tmp_path: Path) -> None:
    """It is known by the name that stands in it; a neighbour that is broken makes others doubtful, not this one."""
    site = tmp_path / "profiles.d"
    site.mkdir()
    text = (resources.files("powerguard.profiles") / "rfc1628.yaml").read_text(encoding="utf-8")
    (site / "acme.yaml").write_text(text.replace("name: rfc1628", "name: acme"), encoding="utf-8")
    assert told(tmp_path, "acme", site) == ([], [])
    assert told(tmp_path, "acma", site)[0] != []
    (site / "broken.yaml").write_text("name: [", encoding="utf-8")
    assert told(tmp_path, "acme", site) == ([], [])
    mistakes, doubts = told(tmp_path, "acma", site)
    assert mistakes == []
    assert "(did you mean acme?); or it is in what could not be read: " in doubts[0]
    assert "broken.yaml:2:1: " in doubts[0]


def test_a_folder_that_cannot_be_read_refuses_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mistakes, doubts = told(tmp_path, "acme", tmp_path / "file")
    assert mistakes == []
    assert "file: cannot be read: Not a directory" in doubts[0]


def test_a_secret_that_is_not_there_or_open_to_others(tmp_path: Path) -> None:
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
            for path in (kept, shared, tmp_path / "absent", tmp_path)
        ).replace(f"name: {tmp_path.name}", "name: folder"),
        encoding="utf-8",
    )
    before_ns = kept.stat().st_atime_ns
    put = "put the secret there: install -m 0400 -o powerguard /dev/stdin"
    mistakes, doubts = missing(load(settings), tmp_path / "no-profiles")
    assert [(one.path, one.what.removeprefix(f"{tmp_path}")) for one in mistakes] == [
        (("trainers", 1, "token", "file"), f"/shared: others can read this secret (chmod 0400 {shared})"),
        (
            ("trainers", 2, "token", "file"),
            f"/absent: No such file or directory ({put} {tmp_path}/absent)",
        ),
        (("trainers", 3, "token", "file"), ": is not a file (name the file that holds the secret)"),
    ]
    assert (doubts, kept.stat().st_atime_ns) == ([], before_ns)
