"""`powerguard scheduler topology`: what it prints, and that a real slurmctld takes it."""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from powerguard.cli.main import main
from tests.peers.slurm import Cluster

ROOT = Path(__file__).parents[2]
HOSTS = {"gpu1": ["rack-a"], "gpu2": ["rack-a"], "gpu3": ["rack-b"], "gpu4": ["rack-b", "rack-a"]}
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    def run(*words: str | Path) -> tuple[int, str, str]:
        try:
            code = main(["scheduler", "topology", *map(str, words)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def fleet(folder: Path) -> Path:
    """The sample of the sentinel's settings, with other hosts."""
    sample = (ROOT / "config" / "sentinel.yaml").read_text(encoding="utf-8")
    hosts = "".join(
        f"  {name}:\n    key: {{credential: {name}}}\n"
        f"    bmc: {{kind: ipmi-lan, host: 10.0.8.{place}, user: s, password: {{credential: b}}}}\n    feeds: {feeds}\n"
        for place, (name, feeds) in enumerate(HOSTS.items())
    )
    path = folder / "fleet.yaml"
    text = re.sub(r"(?ms)^hosts:\n.*?(?=^log:)", f"hosts:\n{hosts}\n", sample)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_sentinels_hosts(tmp_path: Path, say: Say) -> None:
    code, out, err = say(fleet(tmp_path))
    assert (code, err) == (0, "")
    assert "NodeName=gpu4 Features=ups=rack-b,ups=rack-a" in out
    assert "SwitchName=ups-rack-a Nodes=gpu1,gpu2\n" in out
    assert "SwitchName=ups-rack-a+rack-b Nodes=gpu4\n" in out
    assert "SwitchName=power Switches=ups-rack-a,ups-rack-b,ups-rack-a+rack-b" in out
    code, out, _ = say(fleet(tmp_path), "--json")
    assert (code, json.loads(out)["nodes"]["gpu4"]) == (0, ["rack-b", "rack-a"])


def test_the_settings_of_each_host(tmp_path: Path, say: Say) -> None:
    text = "mode: dry-run\nups:\n  rack-a: {sources: [{kind: nut, host: 10.0.0.9, name: a}]}\nhost: {kind: systemd}\n"
    paths = [tmp_path / f"{node}.yaml" for node in ("gpu1", "gpu2")]
    for path in paths:
        path.write_text(f"{text}scheduler: {{kind: slurm, node: {path.stem}}}\n", encoding="utf-8")
    code, out, _ = say(*paths)
    assert code == 0
    assert "SwitchName=ups-rack-a Nodes=gpu1,gpu2" in out
    assert "SwitchName=power" not in out
    code, _, err = say(paths[0], paths[0])
    assert (code, "node gpu1 is in an earlier file" in err) == (78, True)
    paths[0].write_text(text, encoding="utf-8")
    code, _, err = say(*paths)
    assert (code, "set scheduler.node" in err) == (78, True)


@pytest.mark.parametrize("text", ["", "hosts: 3\n", "ups: {}\n", "\x00", "- a\n"])
def test_a_file_that_is_neither(text: str, tmp_path: Path, say: Say) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    for each in (path, tmp_path / "gone.yaml", tmp_path, tmp_path / ("x" * 300)):
        code, out, err = say(each)
        assert (code, out) == (78, "")
        assert str(each) in err
        assert "Traceback" not in err


@pytest.mark.xdist_group("slurm")
@pytest.mark.peer("slurmctld", "munged", "slurmd", "scontrol")
def test_a_real_controller_places_jobs_by_it(tmp_path: Path, say: Say) -> None:
    """A job that asks for a UPS gets nodes of that UPS; the tree has a switch for each set of feeds."""
    _, out, _ = say(fleet(tmp_path))
    features, _, switches = out.partition("\n\n")
    with tempfile.TemporaryDirectory(prefix="sl") as folder:
        cluster = Cluster(Path(folder), list(HOSTS))
        result = dict(re.findall(r"(?m)^NodeName=(\S+) (Features=\S+)", features))
        conf = re.sub(
            r"(?m)^(NodeName=(gpu\d) .*)$", lambda line: f"{line[1]} {result[line[2]]}", cluster.conf.read_text()
        )
        cluster.conf.write_text(f"{conf}\nTopologyPlugin=topology/tree\n")
        (Path(folder) / "topology.conf").write_text(switches)
        try:
            cluster.start()
            shown = cluster.ask("scontrol", "show", "topology")
            assert re.search(r"SwitchName=ups-rack-a Level=0 .*Nodes=gpu1,gpu2", shown)
            assert re.search(r"SwitchName=power Level=1 .*Nodes=gpu\[1-4\]", shown)
            cluster.submit("sleep 900", "--constraint=ups=rack-b", "--nodes=2", "--job-name=both")
            assert cluster.ask("squeue", "--noheader", "--format=%N") == "gpu[3-4]"
            with pytest.raises(subprocess.CalledProcessError):
                cluster.ask("sbatch", "--constraint=ups=rack-c", "--wrap=true")
        finally:
            cluster.stop()
