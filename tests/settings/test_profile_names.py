"""A profile's name in the settings: refused where there is none, and doubted only where nobody could look."""

from importlib import resources
from pathlib import Path

import pytest

from powerguard.settings.load import load_with_origins
from powerguard.settings.profile_names import unknown_profiles


def told(tmp_path: Path, profile: str, site: Path) -> tuple[list[str], list[str]]:
    path = tmp_path / "powerguard.yaml"
    source = f"{{kind: snmp, host: h{profile and f', profile: {profile}'}}}"
    path.write_text(f"mode: dry-run\nups:\n  a:\n    sources:\n      - {source}\n", encoding="utf-8")
    mistakes, doubts = unknown_profiles(load_with_origins(path), site)
    return [line.partition(": ")[2] for line in mistakes], [line.partition(": ")[2] for line in doubts]


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
