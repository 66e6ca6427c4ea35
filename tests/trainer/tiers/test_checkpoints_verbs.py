"""`powerguard checkpoints` in a real object store: told, read, restored and pruned like any other."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.checkpoints.found import entries_at, tier_at, verified
from powerguard.cli.main import main
from powerguard.cli.render import Bar
from powerguard.trainer.store.store import Store
from powerguard.trainer.tiers import Remote, tier_of
from powerguard.trainer.tiers.transfer import Gate, Progress, Transfer, UploadOrder
from tests.trainer.checkpoints import read
from tests.trainer.tiers.rig import SECRET, Fault, Proxy, S3Server, credentials, remote_of, save, state


@pytest.fixture
def empty(tmp_path: Path, proxy: Proxy, bucket: str) -> list[str]:
    """A job in an empty bucket: its address and how to reach it, through a proxy that may misbehave."""
    file = credentials(tmp_path)
    return [f"{bucket}/llm", "--endpoint", proxy.url, "--region", "us-east-1", "--credentials-file", str(file)]


@pytest.fixture
def place(empty: list[str], tmp_path: Path, s3: S3Server, bucket: str) -> list[str]:
    """The same with steps 1 to 4 of the job."""
    carry(tmp_path, remote_of(bucket, s3.url, tmp_path, keep=9), range(1, 5))
    return empty


def carry(folder: Path, remote: Remote, steps: Iterable[int]) -> None:
    """Upload checkpoints of the job."""
    for step in steps:
        saved = save(folder / "root", step, mib=1)
        order = UploadOrder(remote=remote, job="llm", path=saved.path, digest=saved.manifest_digest)
        assert Transfer(order, tier_of(remote, "llm"), Gate(patience_s=5.0), Progress()).run()


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out))


def test_listed_and_verified(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "list", *place, "--json"]) == 0
    listed = shown(capsys)["checkpoints"]
    assert [(each["step"], each["tier"], each["state"]) for each in listed] == [
        (step, "s3", "complete") for step in (4, 3, 2, 1)
    ]
    assert main(["checkpoints", "verify", *place]) == 0
    out = capsys.readouterr().out
    assert out.count(" verified ") == 4
    assert SECRET not in out


def test_damage_is_reported(place: list[str], s3: S3Server, proxy: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    """An object that somebody has written over, of the same length; what cannot be read just now is no damage."""
    hiccups = [Fault(503, "SlowDown"), Fault(cut=0)]
    proxy.rule = lambda method, path: hiccups.pop() if hiccups and method == "GET" and "/shard-00000/" in path else None
    assert main(["checkpoints", "verify", *place]) == 0
    assert hiccups == []
    capsys.readouterr()
    proxy.rule = lambda _method, path: (
        Fault(403, "AccessDenied") if "step-000000000003" in path and "/shard-" in path else None
    )
    assert main(["checkpoints", "verify", *place, "--json"]) == 1
    states = [each["state"] for each in shown(capsys)["checkpoints"]]
    assert states == ["verified", "unreadable", "verified", "verified"]
    proxy.rule = lambda _method, _path: None
    path = next(path for method, path in proxy.asked if method == "GET" and "/shard-00000/" in path)
    content = s3.get(path)
    s3.put(path, bytes([content[0] ^ 1]) + content[1:])
    assert main(["checkpoints", "verify", *place, "--json"]) == 1
    states = sorted(each["state"] for each in shown(capsys)["checkpoints"])
    assert states == ["corrupt", "verified", "verified", "verified"]


def test_what_training_prunes_before_it_is_read_is_no_damage(place: list[str], tmp_path: Path) -> None:
    access = {"endpoint": place[2], "region": "us-east-1", "credentials_file": str(tmp_path / "credentials")}
    oldest = entries_at(place[0], **access)[-1]
    tier_at(place[0], **access).remove(oldest.name)
    read = verified(oldest, Bar("", quiet=True), **access)
    assert (read.state, read.because) == ("unfinished", "it was removed meanwhile")


def test_restored_into_a_root_of_this_host(place: list[str], tmp_path: Path, proxy: Proxy) -> None:
    """A store that is busy for a moment is asked again."""
    hiccups = [Fault(503, "SlowDown"), Fault(cut=0)]
    proxy.rule = lambda method, path: hiccups.pop() if hiccups and method == "GET" and "/shard-00000/" in path else None
    assert main(["checkpoints", "restore", *place, "--step", "2", "--to", str(tmp_path / "new")]) == 0
    with Store(tmp_path / "new", job="llm") as store:
        (found,) = store.found()
        assert read(found, 0)["state"].data == state(2, mib=1)
    assert main(["checkpoints", "restore", *place, "--step", "2", "--into", str(tmp_path / "root"), "--yes"]) == 0
    with Store(tmp_path / "root", job="llm") as store:
        assert store.found()[0].step == 2


def test_a_store_is_rolled_back_by_marks(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is removed there, and no resume takes what is marked."""
    words = ["checkpoints", "restore", *place, "--step", "2", "--into", place[0]]
    assert main(words) == 1
    assert "add --yes to do it" in capsys.readouterr().err
    assert main([*words, "--only", "state", "--yes"]) == 1
    assert "can only be rolled back as a whole" in capsys.readouterr().err
    assert main([*words, "--yes"]) == 0
    assert "2 newer checkpoints are marked there" in capsys.readouterr().out
    assert main(["checkpoints", "list", *place, "--json"]) == 0
    states = [(each["step"], each["state"]) for each in shown(capsys)["checkpoints"]]
    assert states == [(4, "set_aside"), (3, "set_aside"), (2, "complete"), (1, "complete")]


def test_pruned_when_what_stays_was_read(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "prune", *place]) == 1
    assert "no checkpoint was removed" in capsys.readouterr().err
    assert main(["checkpoints", "prune", *place, "--keep", "1", "--yes"]) == 0
    capsys.readouterr()
    assert main(["checkpoints", "list", *place, "--json"]) == 0
    assert [each["step"] for each in shown(capsys)["checkpoints"]] == [4]


def test_a_prune_that_fails_midway_names_what_went(
    place: list[str], proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that is busy for a moment is asked again. Each is removed by two POSTs: its manifest, and the rest."""
    faults = [Fault(503, "SlowDown"), None, None, Fault(403, "AccessDenied"), None, None]
    proxy.rule = lambda method, _path: faults.pop(0) if method == "POST" else None
    assert main(["checkpoints", "prune", *place, "--keep", "1", "--yes", "--json"]) == 1
    pruned = shown(capsys)
    assert [[each["step"] for each in pruned[word]] for word in ("kept", "removed")] == [[4], [3, 1]]
    (left,) = pruned["left"]
    assert "step-000000000002" in left["path"]
    assert "access is denied" in left["because"]
    assert faults == []


def test_a_store_that_refuses_the_prune_leaves_what_went_elsewhere_in_the_report(
    place: list[str], tmp_path: Path, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    """It refuses when the checkpoints of a folder of this host, named before it, have been removed."""
    old, new = [Path(save(tmp_path / "here", step, mib=1).path) for step in (1, 2)]
    proxy.rule = lambda _method, _path: None if old.exists() else Fault(403, "AccessDenied")
    assert main(["checkpoints", "prune", str(tmp_path / "here"), *place, "--keep", "1", "--yes", "--json"]) == 1
    pruned = shown(capsys)
    assert [each["path"] for each in pruned["removed"]] == [str(old)]
    assert (old.exists(), new.exists()) == (False, True)
    assert ["access is denied" in each["because"] for each in pruned["left"]] == [True] * 3


def test_a_store_of_more_than_a_resume_looks_at_is_listed_and_rolled_back(
    empty: list[str], tmp_path: Path, s3: S3Server, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the usual retention a store holds up to ten checkpoints; a resume looks at the newest eight."""
    carry(tmp_path, remote_of(bucket, s3.url, tmp_path, keep=10), range(1, 11))
    assert main(["checkpoints", "list", *empty, "--json"]) == 0
    assert [each["step"] for each in shown(capsys)["checkpoints"]] == list(range(10, 0, -1))
    assert main(["checkpoints", "restore", *empty, "--step", "1", "--into", empty[0], "--yes"]) == 0
    capsys.readouterr()
    assert main(["checkpoints", "list", *empty, "--json"]) == 0
    states = [each["state"] for each in shown(capsys)["checkpoints"]]
    assert states == ["set_aside"] * 9 + ["complete"]


@pytest.mark.parametrize("file", ["/shard-00000/", "/MANIFEST.json"])
def test_what_does_not_verify_does_not_count(
    place: list[str], file: str, s3: S3Server, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest that was read stays, and so does a newer one that is rotten, whatever the store's own order says."""
    assert main(["checkpoints", "verify", *place]) == 0
    newest = [path for method, path in proxy.asked if method == "GET" and "step-000000000004" in path]
    path = next(path for path in newest if file in path)
    content = s3.get(path)
    s3.put(path, bytes([content[0] ^ 1]) + content[1:])
    capsys.readouterr()
    assert main(["checkpoints", "prune", *place, "--keep", "1", "--yes", "--json"]) == 0
    pruned = shown(capsys)
    assert [[each["step"] for each in pruned[word]] for word in ("kept", "removed")] == [[3], [2, 1]]
    assert main(["checkpoints", "verify", *place, "--json"]) == 1
    states = [(each["step"], each["state"]) for each in shown(capsys)["checkpoints"]]
    assert states == [(4, "corrupt"), (3, "verified")]
    assert s3.get(path) != content


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_store_that_refuses_is_one_line(
    empty: list[str], proxy: Proxy, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.rule = lambda _method, _path: Fault(status, "AccessDenied")
    assert main(["checkpoints", "list", *empty]) == 1
    ended = capsys.readouterr()
    assert ended.err.count("\n") == 1
    assert SECRET not in ended.err
    assert "Traceback" not in ended.err


def test_an_empty_place_says_how_to_name_a_job(empty: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [empty[0].replace("/llm", "/other"), *empty[1:]]
    assert main(["checkpoints", "list", *words]) == 1
    assert "no checkpoint there" in capsys.readouterr().err
