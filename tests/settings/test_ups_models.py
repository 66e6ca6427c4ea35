"""UPS models by name: what is told of each, by which names they are found, and what a found UPS gets of them."""

import itertools
import re
from pathlib import Path

import pytest

from powerguard.settings.load import SettingsError
from powerguard.settings.ups_models import Origin, closest, find_model, from_data_sheet, known_models, models_named
from tests.golden import Golden

MODELS = known_models()
WITHOUT_A_SHEET = "APC SRT 6000VA"
"""The one model whose figures are older than the rule that a document must have been read; its entry says so."""
SITE = """\
models:
  APC Twin 230V:
    {also: [Twin], rating_w: 1000, runtime_by_w: {600: 300, 100: 3840}, source: a, where: b, read: "2026-01-31"}
  APC Twin 120V: {also: [twin], rating_w: 900, runtime_table: {50: 600, 100: 200}, source: c}
  Eaton Twin: {rating_w: 800, runtime_table: {50: 600, 100: 200}, source: d}
"""


@pytest.mark.parametrize("name", MODELS)
def test_each_model_is_documented(name: str) -> None:
    """Every table falls as the load rises, and says which document was read, where and when."""
    model = MODELS[name]
    assert all(long_s > short_s for long_s, short_s in itertools.pairwise(model.table.values()))
    assert model.source
    if model.origin is Origin.GAUGE:
        assert "device dump" in model.source
        assert max(model.table) < 60.0
    else:
        assert len(model.table) >= 2
        assert max(model.table) == 100.0
    if name == WITHOUT_A_SHEET:
        assert (model.read, "no data sheet was read" in model.where) == ("", True)
    else:
        assert model.where.startswith("https://")
        assert model.read >= "2026-11-23"


def test_the_guide_lists_all_models_with_their_ratings() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "reference" / "ups-models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- ([^(\n]+) \(([0-9]+) W\)", guide, re.MULTILINE)
    assert sorted((name, float(rating_w)) for name, rating_w in rows) == sorted(
        (name, model.rating_w) for name, model in MODELS.items()
    )
    of_makers = [name for name, model in MODELS.items() if model.origin is Origin.MAKER]
    assert (len(MODELS), len(of_makers)) == (24, 8), "the guide says 24, eight of them from makers"


@pytest.mark.parametrize("name", MODELS)
def test_every_name_of_a_model_finds_it_alone(name: str) -> None:
    for each in (name, *MODELS[name].also):
        for spelled in (each, each.upper(), each.lower().replace(" ", "-"), each.replace(" ", "")):
            assert find_model(MODELS, spelled)[0] == name


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("APC SRT 6000", "APC SRT 6000VA"),
        ("srt6000", "APC SRT 6000VA"),
        ("American Power Conversion Smart-UPS SRT 6000", "APC SRT 6000VA"),
        ("CPS PR1500ELCD", "CyberPower PR1500ELCD"),
        ("EATON Tripp Lite SUINT3000LCD2U", "Tripp Lite SUINT3000LCD2U"),
        ("SMC1000IC", "APC SMC1000IC"),
    ],
)
def test_with_the_makers_name_or_without(wanted: str, name: str) -> None:
    assert find_model(MODELS, wanted)[0] == name


@pytest.mark.parametrize(
    ("wanted", "close"),
    [
        ("PR1500ELC", "CyberPower PR1500ELCD"),
        ("apc smc1000i", "APC SMC1000IC"),
        ("CP1500", "CyberPower CP1500PFCLCD 1000W"),
        ("Tripplite SUINT3000", "Tripp Lite SUINT3000LCD2U"),
        ("Eaton SRT 6000", "APC SRT 6000VA"),
    ],
)
def test_a_name_that_is_none_brings_the_closest(wanted: str, close: str) -> None:
    """A model of the same name and another maker is not meant, but proposed."""
    assert closest(MODELS, wanted)[0] == close
    with pytest.raises(LookupError, match=f"is not a known model: did you mean {close}"):
        find_model(MODELS, wanted)


@pytest.mark.parametrize("wanted", ["SMT1500", "no such", "", "APC", "-", "UPS", "x" * 5000])
def test_what_is_like_nothing_brings_no_proposal(wanted: str) -> None:
    """Another series of the maker is no proposal: its battery is another."""
    assert closest(MODELS, wanted) == []
    with pytest.raises(LookupError, match="is not a known model; known are APC Back-UPS BE650G2-UK, "):
        find_model(MODELS, wanted)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "ups-models.yaml"
    path.write_text(SITE, encoding="utf-8")
    return path


def test_several_of_one_name_are_all_named(site: Path) -> None:
    models = known_models(site)
    assert models_named(models, "twin") == ["APC Twin 230V", "APC Twin 120V", "Eaton Twin"]
    assert models_named(models, "APC Twin") == ["APC Twin 230V", "APC Twin 120V"]
    assert find_model(models, "eaton twin")[0] == "Eaton Twin"
    with pytest.raises(LookupError, match="'APC Twin' may be APC Twin 120V or APC Twin 230V: give the full name"):
        find_model(models, "APC Twin")


def test_a_found_ups_gets_the_table_of_its_data_sheet(site: Path, golden: Golden) -> None:
    """Loads in watts become percent of the rating; the comment names the document, and what is not in it."""
    known, comments = from_data_sheet(["ups", "Twin 230V"], site_file=site)
    assert known == {"runtime_table": {10: 3840, 60: 300}, "rating_w": 1000}
    assert comments[:3] == ["APC Twin 230V: a", "b", "read 2026-01-31"]
    golden("ups-models", comments[-1])


def test_only_the_very_model_counts(site: Path) -> None:
    """A shared name says nothing, unless the rating that the UPS reports tells which is meant."""
    assert from_data_sheet(["APC Twin"], site_file=site) == ({}, [])
    assert from_data_sheet(["APC Twin"], 905.0, site_file=site)[0]["rating_w"] == 900
    assert from_data_sheet(["APC Twin"], 700.0, site_file=site) == ({}, [])
    assert from_data_sheet(["CPS CP1500PFCLCD"]) == ({}, [])
    assert from_data_sheet(["CPS CP1500PFCLCD"], 900.0) == ({}, [])
    assert from_data_sheet(["CPS CP1500PFCLCD"], 1000.0)[0]["runtime_table"] == {50: 600, 100: 150}
    assert from_data_sheet(["", "APC Web/SNMP Management Card"]) == ({}, [])


def test_what_one_gauge_reported_is_not_written_into_settings() -> None:
    """A running UPS of that model has a gauge of its own, at its own load and with its own battery."""
    assert MODELS["Eaton 5SC 2200i RT"].origin is Origin.GAUGE
    assert from_data_sheet(["EATON Eaton 5SC 2200i RT"], 1980.0) == ({}, [])


def test_a_sites_file_with_mistakes_is_reported(site: Path) -> None:
    site.write_text(
        "models:\n  X: {rating_w: 500, runtime_table: {50: 60}, runtime_by_w: {50: 60}, source: a}\n", encoding="utf-8"
    )
    with pytest.raises(SettingsError, match="one of them"):
        known_models(site)
    known, (comment,) = from_data_sheet(["X"], site_file=site)
    assert known == {}
    assert f"{site} has mistakes" in comment
