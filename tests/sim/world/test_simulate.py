"""`powerguard simulate`: what it prints, how it exits, and the large runs in which nothing may be violated."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.main import main
from powerguard.sim.world.many import play_many
from powerguard.sim.world.report import Layers, Return, Sample, SimulationOptions, report, site_file
from powerguard.sim.world.run import Result
from powerguard.sim.world.site import Site, load

ROOT = Path(__file__).parents[3]
KEYS = {
    "outages",
    "excess_s_mean",
    "excess_s_p95",
    "rollback_s_mean",
    "planning_dirty",
    "physics_dirty",
    "shutdowns",
    "needless",
    "stranded",
    "invariant_violations",
}


def simulate(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = main(["simulate", *words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    status, out, _ = simulate(capsys, *words, "--json", "--jobs", "1")
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    return found


# --- Several hosts ----------------------------------------------------------------------------------------------------

RACK = ("--hosts", "1,0,2", "--outages", "3", "--seed", "7")


def test_several_hosts_are_reported_by_tier(capsys: pytest.CaptureFixture[str]) -> None:
    """What the hosts of a tier lose is the sum of its causes; and one outage again is the same outage."""
    result = simulated(capsys, *RACK)
    assert (result["object"], result["hosts"], result["outages"], result["hosts_judged"]) == (
        "simulate_rack",
        [1, 0, 2],
        3,
        9,
    )
    assert [(each["tier"], each["hosts"]) for each in result["tiers"]] == [(0, 1), (2, 2)]
    assert (result["planning_dirty_hosts"], result["invariant_violations"]) == (0, [])
    for tier in result["tiers"]:
        parts = sum(tier[cause] for cause in ("held", "stopped", "boot", "rolled_back"))
        assert parts == pytest.approx(tier["loss_s_mean"], rel=0.02, abs=2.0)
    seeds = [simulated(capsys, "--hosts", "1,0,2", "--outages", "1", "--seed", str(seed)) for seed in (7, 8, 9)]
    assert result["excess_s_mean"] == pytest.approx(sum(each["excess_s_mean"] for each in seeds) / 3, abs=0.01)


def test_several_hosts_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = simulate(capsys, *RACK, "--jobs", "1")
    assert status == 0
    assert out.startswith("3 outages of 3 hosts on one UPS, from seed 7, policy powerguard, without faults")
    assert re.search(r"tier 2 +2 .*\n +tier 0 +1 ", out)


def test_nut_on_every_host_of_a_rack_loses_some(capsys: pytest.CaptureFixture[str]) -> None:
    """The count of lost hosts is none by itself: a rule that waits for low battery loses hosts."""
    result = simulated(capsys, "--hosts", "2,2", "--outages", "40", "--seed", "7", "--policy", "nut")
    assert result["planning_dirty_hosts"] > 0
    assert "--hosts 2,2" in result["planning_dirty_outages"][0]["reproduce"]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--hosts", "0,0"], "must be 1 to 100 hosts in all, got 0"),
        (["--hosts", "99,9"], "must be 1 to 100 hosts in all, got 108"),
        (["--hosts", "4,-1"], "must be the hosts of each tier"),
        (["--hosts", "1,2", "--policy", "fixed"], "--policy powerguard or nut"),
        (["--hosts", "1,2", "--level", "loop"], "need --level core"),
    ],
)
def test_hosts_that_make_no_sense(capsys: pytest.CaptureFixture[str], words: list[str], wrong: str) -> None:
    status, out, err = simulate(capsys, *words)
    assert (status, out) == (64, "")
    assert wrong in err


# --- What it prints --------------------------------------------------------------------------------------------------


def test_the_object_is_the_one_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever programs against docs/reference/simulate.json finds these keys, and these very numbers."""
    example = json.loads((ROOT / "docs/reference/simulate.json").read_text(encoding="utf-8"))
    result = simulated(capsys, "--seed", "300", "--outages", "40", "--policy", "nut", "--no-faults")
    assert result == example
    assert set(result) >= KEYS


def test_the_reference_names_every_key() -> None:
    """Of the object, and of a row of `stranded_by_methods`."""
    example = json.loads((ROOT / "docs/reference/simulate.json").read_text(encoding="utf-8"))
    written = (ROOT / "docs/reference/simulate.md").read_text(encoding="utf-8")
    rows = {key for row in example["stranded_by_methods"] for key in row}
    assert rows
    for key in (KEYS | example.keys() | rows) - {"schema_version", "object"}:
        assert f"`{key}`" in written, key


def test_the_site_of_the_examples_has_every_number_with_its_default() -> None:
    """python -m powerguard.sim.world.report > examples/site.yaml"""
    file = ROOT / "examples" / "site.yaml"
    assert file.read_text(encoding="utf-8") == site_file()
    assert load(file) == Site()


def test_people_get_it_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = simulate(capsys, "--outages", "3", "--seed", "5", "--policy", "fixed")
    assert (status, err) == (0, "")
    assert "3 outages from seed 5, with faults, policy fixed, level core" in out
    assert re.search(r"shut down +\d \(\d+\.\d\d %\), needlessly \d \(\d+\.\d\d %\)", out)
    assert re.search(r"training lost in all +\d+\.\d s an outage", out)
    assert "back by" not in out, "there is nothing but the BMC's policy"


def test_stranded_is_reported_for_each_set_of_methods(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One run of a mixed site: every outage is in the set that it had, with who brought it back, or did not."""
    file = tmp_path / "site.yaml"
    short = "outage: {bins: [{from_s: 150, to_s: 420, share: 1}], restrike_share: 0}\n"
    file.write_text(f"{short}returns: {{sentinel_share: 0.5, late_share: 0.5, output_share: 0.2}}\n", encoding="utf-8")
    words = ("--seed", "1", "--outages", "40", "--site", str(file), "--no-faults")
    result = simulated(capsys, *words)
    sets = {each["set"]: each for each in result["stranded_by_methods"]}
    assert {"P", "A, P", "C, P", "A, C, P", "B cycles, P"} <= set(sets)
    assert sum(each["outages"] for each in sets.values()) == 40
    assert sum(each["stranded"] for each in sets.values()) == result["stranded"] > 0
    assert sets["C, P"]["stranded"] == 0 < sets["C, P"]["back_by"]["sentinel"]
    assert sets["C, P"]["wait_s_mean"] > 5.0
    assert len(sets["P"]["stranded_seeds"]) == sets["P"]["stranded"] > 0
    for each in sets.values():
        assert each["went_off"] <= each["stranded"] + sum(each["back_by"].values())
        assert all(
            count == 0 for method, count in each["back_by"].items() if method not in {*each["methods"], "policy"}
        )
    status, out, _ = simulate(capsys, *words)
    assert status == 0
    assert re.search(r"(?m)^  C, P +\d+ +\d+ +0 +\d+ s  C \d", out)
    assert re.search(r"(?m)^  P +\d+ +\d+ +[1-9]", out)


@pytest.mark.parametrize(("every_s", "count"), [(300, 1), (301, 0)])
def test_a_site_that_saves_without_end_is_warned_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, every_s: int, count: int
) -> None:
    """The site is played all the same; who compares policies by it must know."""
    file = tmp_path / "site.yaml"
    file.write_text(f"trainer: {{checkpoint_median_s: 300, local_every_s: {every_s}}}\n", encoding="utf-8")
    words = ("--outages", "2", "--site", str(file), "--no-faults")
    assert len(simulated(capsys, *words)["warnings"]) == count
    status, out, _ = simulate(capsys, *words)
    assert (status, out.count("warning: trainer.checkpoint_median_s (300 s) is not below")) == (0, count)


def test_a_run_is_its_outages_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The third outage of seed 20 is the outage of seed 22: so one line plays any of them again."""
    whole = simulated(capsys, "--seed", "20", "--outages", "3", "--policy", "nut")
    alone = [simulated(capsys, "--seed", str(seed), "--outages", "1", "--policy", "nut") for seed in (20, 21, 22)]
    assert whole["loss_s_mean"] == pytest.approx(sum(one["loss_s_mean"] for one in alone) / 3, abs=0.01)
    for key in ("planning_dirty", "physics_dirty", "shutdowns", "needless", "stranded"):
        assert whole[key] == sum(one[key] for one in alone)


def test_many_processes_change_nothing() -> None:
    """Split over two interpreters, or played in this one: the same samples; and the progress is told."""
    options = SimulationOptions(seed=1, outages=120, policy="nut")
    seen: list[int] = []
    spread = play_many(Site(), options, jobs=2, progress=seen.append)
    assert sorted(spread) == sorted(play_many(Site(), options, jobs=1))
    assert seen == sorted(seen)
    assert seen[-1] == 120


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--outages", "0"], "must be a whole number, 1 to 999999999999999, got '0'"),
        (["--seed", "-1"], "must be a whole number, 0 to 999999999999999, got '-1'"),
        (["--seed", "1000000000000000"], "0 to 999999999999999, got '1000000000000000'"),
        (["--seed", "1.5"], "must be a whole number, 0 to 999999999999999, got '1.5'"),
        (["--jobs", "none"], "must be a whole number, 1 to"),
        (["--policy", "luck"], "invalid choice: 'luck'"),
        (["--level", "hardware"], "invalid choice: 'hardware'"),
        (["--level", "loop", "--policy", "nut"], "plays powerguard itself only"),
    ],
)
def test_wrong_options_are_reported(capsys: pytest.CaptureFixture[str], words: Sequence[str], wanted: str) -> None:
    status, out, err = simulate(capsys, *words)
    assert (status, out) == (64, "")
    assert wanted in err


_ENDLESS = """
import contextlib, io, signal, sys, threading, os
signal.signal(signal.SIGINT, signal.default_int_handler)
if __name__ == "__main__":
    from powerguard.cli.main import main
    # Once before, so that what is interrupted is the run, and not the imports of a machine that is busy.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(["simulate", "--level", sys.argv[1], "--outages", "1", "--jobs", "1"])
    # As a terminal does it: everybody in the foreground hears of it, the processes that just start too.
    threading.Timer(float(sys.argv[2]), os.killpg, (0, signal.SIGINT)).start()
    sys.exit(main(["simulate", "--level", sys.argv[1], "--outages", "1000000", "--jobs", "2"]))
"""


@pytest.mark.parametrize(
    ("level", "after_s"),
    [("core", 2.0), ("loop", 1.2), *(pytest.param("loop", s, marks=pytest.mark.slow) for s in (0.6, 6.0))],
)
def test_an_interrupt_ends_it_and_its_processes(level: str, after_s: float, tmp_path: Path) -> None:
    """Ctrl-C in a run of a day: one line within seconds, no traceback of anybody, and nobody is left behind."""
    script = tmp_path / "endless.py"
    script.write_text(_ENDLESS, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(script), level, str(after_s)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
        start_new_session=True,
    )
    assert (ended.returncode, ended.stdout) == (130, "")
    assert re.fullmatch(r"powerguard simulate: interrupted; \d+ of 1000000 outages were played\n", ended.stderr)


# --- The site file ---------------------------------------------------------------------------------------------------


def test_a_site_changes_what_it_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A battery for a day: nobody has to shut down any more. The file is named in the reproduction and the object."""
    file = tmp_path / "site.yaml"
    file.write_text("ups:\n  runtime_table: {50: 90000, 100: 80000}\n  bad_cell_share: 0\n", encoding="utf-8")
    result = simulated(capsys, "--site", str(file), "--outages", "3", "--no-faults")
    assert (result["shutdowns"], result["planning_dirty"], result["site"]) == (0, 0, str(file))
    assert load(file).host == Site().host


def test_the_sites_of_the_guide_are_some(tmp_path: Path) -> None:
    guide = (ROOT / "docs/reference/simulate.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", guide, flags=re.DOTALL)
    sites = []
    for block in blocks:
        file = tmp_path / "site.yaml"
        file.write_text(block, encoding="utf-8")
        sites.append(load(file))
    site, returning = sites
    assert (site.ups.runtime_table[50.0], site.drill.done, len(site.outage.bins)) == (900.0, True, 2)
    assert (returning.returns.output_share, returning.returns.bracket_share) == (0.5, 0.3)


def test_an_empty_site_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("# nothing yet\n", encoding="utf-8")
    assert load(file) == Site()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ups:\n  health: [0.6, 1.4]\n", "site.yaml:2:"),
        ("host:\n  laod: 0.5\n", "did you mean 'load'?"),
        ("trainer:\n  checkpoint_median_s: '20'\n", "site.yaml:2:"),
        ("outage:\n  bins: [{from_s: 60, to_s: 1, share: 1}]\n", "to_s must not be below from_s"),
        ("outage:\n  bins: [{from_s: 1, to_s: 2, share: 0}]\n", "at least one share must be above 0"),
        ("outage:\n  sag_s: [0, 1]\n", "both above 0"),
        ("ups:\n  health: [0.9, 0.5]\n", "site.yaml:2:11: ups.health: must be [least, most], got [0.9, 0.5]"),
        ("faults:\n  fsd_delay_s: [90, 45]\n", "must be [least, most], got [90, 45]"),
        ("ups:\n  health: [0, 0.5]\n", "site.yaml:2:12: ups.health[0]: must be above 0 and at most 1, got 0"),
        ("ups:\n  runtime_table: {50: 300, 100: 400}\n", "must fall as the load rises, got 300 s at 50 %"),
        ("trainer:\n  step_s: 0\n", "site.yaml:2:11: trainer.step_s: must be above 0"),
        ("- 1\n", "must be a map of sections"),
        ("ups: {health: [1, 1]\n", "site.yaml:"),
    ],
)
def test_mistakes_in_a_site_are_reported_with_their_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, wanted: str
) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(text, encoding="utf-8")
    status, out, err = simulate(capsys, "--site", str(file))
    assert (status, out) == (78, "")
    assert wanted in err
    assert str(file) in err
    assert "Traceback" not in err


def test_one_mistake_in_a_list_is_one_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Not "a list of 1 to 100 items, got a list of 1" beside it."""
    file = tmp_path / "site.yaml"
    file.write_text("outage:\n  bins: [{from_s: 1, to_s: 1000000000, share: 1}]\n", encoding="utf-8")
    _, _, err = simulate(capsys, "--site", str(file))
    assert err.splitlines() == [
        f"{file}:2:28: outage.bins[0].to_s: must be above 0 and at most 10000000, got 1000000000"
    ]
    file.write_text("outage:\n  bins: []\n", encoding="utf-8")
    assert "must be a list of 1 to 100 items, got" in simulate(capsys, "--site", str(file))[2]


def test_a_site_that_is_not_there_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = simulate(capsys, "--site", "/nowhere/site.yaml")
    assert status == 78
    assert "/nowhere/site.yaml" in err


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--site", "/nowhere/site.yaml"], 78, "/nowhere/site.yaml: "),
        (["--level", "loop", "--policy", "nut"], 64, "--level loop plays powerguard itself only, not --policy nut"),
    ],
)
def test_a_program_is_reported_as_an_object(
    capsys: pytest.CaptureFixture[str], words: Sequence[str], status: int, said: str
) -> None:
    ended, out, err = simulate(capsys, *words, "--json")
    answer = json.loads(out)
    assert (ended, err, answer["object"]) == (status, "", "error")
    assert said in answer["error"]


# --- The report ------------------------------------------------------------------------------------------------------


def some(seed: int, excess_s: float = 0.0) -> Sample:
    return Sample(
        seed=seed,
        excess_s=excess_s,
        loss_s=excess_s,
        rollback_s=0.0,
        planning_dirty=False,
        physics_dirty=False,
        shutdown=False,
        needless=False,
        stranded=False,
        violations=(),
    )


def came(stranded: bool, *by: str, broken: bool = False, **there: bool | str) -> Sample:
    methods = {"reboot": False, "output": "", "sentinel": False, "watchdog": False, "rtc": False, "policy": "always-on"}
    layers = Layers(**(methods | there))  # type: ignore[arg-type] # a table
    return some(1)._replace(stranded=stranded, back=Return(layers=layers, broken=broken, by=by, wait_s=8.0 * len(by)))


def test_sets_of_methods_are_counted_apart() -> None:
    """Two outages of the same set are one row; who was never off waits for nobody, and a broken way is told as one."""
    samples = [
        came(False, "rtc", "policy", rtc=True),
        came(False, rtc=True),
        came(True, broken=True, rtc=True),
        came(True, output="aborts", policy="lies"),
        some(9),
    ]
    samples = [one._replace(seed=seed) for seed, one in enumerate(samples)]
    rows = report(samples, SimulationOptions(seed=0, outages=5))["stranded_by_methods"]
    assert [row["set"] for row in rows] == ["E, P", "B aborts, P lies"]
    counts = ("outages", "went_off", "stranded", "stranded_broken", "stranded_seeds", "wait_s_mean")
    assert [rows[0][key] for key in counts] == [3, 2, 1, 1, [2], 16.0]
    assert (rows[0]["back_by"]["rtc"], rows[0]["back_by"]["policy"], rows[0]["back_by"]["reboot"]) == (1, 1, 0)
    assert (rows[1]["methods"], rows[1]["output"], rows[1]["policy"]) == (["output"], "aborts", "lies")
    assert str(rows[1]["stranded_seeds"]) == "[3]"


def test_sums_are_of_outages() -> None:
    """Mean and 95th percentile of 1 to 100; what happened is counted once for each outage."""
    samples = [some(seed, float(seed))._replace(shutdown=seed % 2 == 0) for seed in range(100, 0, -1)]
    summary = report(samples, SimulationOptions(seed=1, outages=100))
    assert (summary["outages"], summary["excess_s_mean"], summary["excess_s_p95"], summary["shutdowns"]) == (
        100,
        50.5,
        96.0,
        50,
    )
    assert (summary["schema_version"], summary["object"], summary["invariant_violations"]) == (1, "simulate", [])


def test_a_violation_comes_with_the_line_that_plays_it_again() -> None:
    options = SimulationOptions(
        seed=1, outages=9, policy="powerguard", faults=False, site="'my site.yaml'", level="loop"
    )
    violated = some(4)._replace(violations=("a grade only goes down",))
    summary = report([violated, some(5)._replace(planning_dirty=True)], options)
    line = "powerguard simulate --seed {} --outages 1 --no-faults --site 'my site.yaml' --level loop"
    assert summary["invariant_violations"] == [
        {"seed": 4, "violation": "a grade only goes down", "reproduce": line.format(4)}
    ]
    assert summary["planning_dirty_outages"] == [{"seed": 5, "reproduce": line.format(5)}]
    assert "--policy nut" in SimulationOptions(seed=1, outages=1, policy="nut").reproduce(7)


def test_a_result_says_whose_fault_it_was() -> None:
    result = Result(seed=1, dirty=[(5.0, "physics"), (9.0, "planning")])
    assert (result.dirty_by("physics"), result.dirty_by("planning")) == (True, True)
    assert not Result(seed=1).dirty_by("planning")


# --- The large runs --------------------------------------------------------------------------------------------------


def all_is_well(samples: list[Sample], options: SimulationOptions) -> None:
    summary = report(samples, options)
    assert summary["outages"] == options.outages
    assert summary["invariant_violations"] == []
    assert summary["planning_dirty_outages"] == []
    assert summary["shutdowns"] > 0, "a world in which nothing happens proves nothing"


@pytest.mark.parametrize(
    ("seed", "outages"), [(1, 25), *(pytest.param(seed, 100, marks=pytest.mark.slow) for seed in range(1, 2001, 100))]
)
def test_two_thousand_outages_with_faults(seed: int, outages: int) -> None:
    """No invariant violated, and no power lost that planning could have avoided (in parts, for a busy machine)."""
    options = SimulationOptions(seed=seed, outages=outages)
    all_is_well(play_many(Site(), options, jobs=1), options)
