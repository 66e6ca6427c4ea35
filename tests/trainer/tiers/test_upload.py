"""The uploader, with its real child, against a real S3 server (often behind a proxy that misbehaves) and a folder."""

import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.trainer.ranks.base import Alone
from powerguard.trainer.ranks.replica import process
from powerguard.trainer.store.folders import Found
from powerguard.trainer.store.items import Loaded
from powerguard.trainer.store.resume import LocalTier, choose
from powerguard.trainer.store.store import Store
from powerguard.trainer.tiers import Remote, tier_of
from powerguard.trainer.tiers.base import Tier, TierError, read_shard
from powerguard.trainer.tiers.path import PathTier
from powerguard.trainer.tiers.transfer import Gate
from powerguard.trainer.tiers.upload import Uploader, UploadStatus
from tests.trainer.checkpoints import read
from tests.trainer.tiers.rig import (
    CHUNK,
    MIB,
    SECRET,
    Fault,
    Proxy,
    S3Server,
    environment,
    flip,
    hung,
    remote_of,
    save,
    state,
    storm,
    until,
)

QUICK = {"first_s": 0.02, "most_s": 0.2, "patience_s": 30.0}


class Uploads:
    """Uploaders that end with the test."""

    def __init__(self) -> None:
        self._all: list[Uploader] = []

    def __call__(self, remote: str | Remote, **options: Any) -> Uploader:  # noqa: ANN401 - as Uploader takes them
        uploader = Uploader(remote, **{"job": "llm", "retry_s": 0.2, "gate": QUICK, **options})
        self._all.append(uploader)
        return uploader

    def close(self) -> None:
        for uploader in self._all:
            uploader.close()


@pytest.fixture
def uploads() -> Iterator[Uploads]:
    uploads = Uploads()
    yield uploads
    uploads.close()


def pid_of(uploader: Uploader) -> int:
    """The child, once there is one."""
    until(lambda: uploader._child is not None)
    child = uploader._child
    return 0 if child is None else child.pid


def committed(uploader: Uploader) -> UploadStatus:
    until(lambda: uploader.status().commits)
    return uploader.status()


def sent(proxy: Proxy) -> int:
    """How many parts were put, whole or not."""
    return sum(method == "PUT" and "/shard-" in path for method, path in proxy.asked)


# --- All is well ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_arrives_in_an_object_store(uploads: Uploads, tmp_path: Path, s3: S3Server, bucket: str) -> None:
    """Offered, uploaded by the child, committed, read back from there and verified."""
    saved = save(tmp_path / "root", 7)
    remote = remote_of(f"{bucket}/checkpoints", s3.url, tmp_path)
    uploader = uploads(remote)
    uploader.offer(saved)
    status = committed(uploader)
    assert (status.error, status.committed_step) == ("", 7)
    assert status.bytes_done == status.bytes_total == status.bytes_sent
    tier = tier_of(remote, "llm")
    (found,) = tier.found()
    assert (found.step, found.digest, found.tier) == (7, saved.manifest_digest, "s3")
    assert tier.committed(found.name) == saved.manifest_digest
    items = read_back(tier, found)
    assert items["state"].data == state(7)
    assert items["step"].value() == 7


def test_a_checkpoint_arrives_on_a_mounted_folder(uploads: Uploads, tmp_path: Path) -> None:
    """The same format as the local one, so that any reader of that reads it."""
    saved = save(tmp_path / "root", 7)
    (tmp_path / "nas").mkdir()
    uploader = uploads(str(tmp_path / "nas"))
    uploader.offer(saved)
    committed(uploader)
    with Store(tmp_path / "nas" / "llm", job="llm", slots=0) as reader:
        (found,) = reader.found()
        assert found.digest == saved.manifest_digest
        assert read(found, 0)["state"].data == state(7)
    assert sorted(path.name for path in Path(found.path).iterdir()) == ["MANIFEST.json", "shard-00000"]


def test_a_training_with_many_open_files_uploads(uploads: Uploads, tmp_path: Path) -> None:
    """The child's pipe has a number above 1023, which select(2) does not take."""
    (tmp_path / "nas").mkdir()
    saved = save(tmp_path / "root", 7, mib=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2048), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        uploader = uploads(str(tmp_path / "nas"))
        uploader.offer(saved)
        assert committed(uploader).error == ""
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_child_finds_the_library_where_the_training_does(tmp_path: Path) -> None:
    """A script has put a checkout into its `sys.path`; no environment says so, and none of it is installed."""
    saved = save(tmp_path / "root", 7, mib=1)
    (tmp_path / "nas").mkdir()
    script = (
        "import json, sys, time\nsys.path += json.loads(sys.argv[1])\n"
        "from powerguard.trainer.store.store import SavedCheckpoint\n"
        "from powerguard.trainer.tiers.upload import Uploader\n"
        "uploader = Uploader(sys.argv[2], job='llm')\n"
        "uploader.offer(SavedCheckpoint(**json.loads(sys.argv[3])))\n"
        "while not (status := uploader.status()).commits and not status.error: time.sleep(0.01)\n"
        "print(status.error, status.committed_step)\n"
    )
    saved_json = json.dumps({name: getattr(saved, name) for name in saved.__slots__})
    bare = venv.EnvBuilder(symlinks=True)
    bare.create(tmp_path / "bare")
    done = subprocess.run(
        [tmp_path / "bare/bin/python", "-I", "-c", script, json.dumps(sys.path), tmp_path / "nas", saved_json],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.stdout, done.stderr) == (" 7\n", "")


def test_the_newest_offer_is_next(uploads: Uploads, tmp_path: Path) -> None:
    """One that was offered while another was on its way, and is not the newest, is left out."""
    (tmp_path / "nas").mkdir()
    uploader = uploads(str(tmp_path / "nas"))
    uploader.hold()
    for step in (5, 6, 7):
        uploader.offer(save(tmp_path / "root", step, mib=1))
    uploader.release()
    assert committed(uploader).committed_step == 7
    assert len(list((tmp_path / "nas" / "llm").iterdir())) == 1


def test_no_secret_is_in_arguments_environment_or_log(
    uploads: Uploads, tmp_path: Path, proxy: Proxy, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Arguments are everybody's to read; the environment is every child's; a log is for ever."""
    caplog.set_level(logging.DEBUG)
    proxy.bytes_per_s = MIB
    uploader = uploads(remote_of(bucket, proxy.url, tmp_path))
    uploader.offer(save(tmp_path / "root", 7))
    until(lambda: proxy.bytes_up)
    proc = Path(f"/proc/{pid_of(uploader)}")
    assert SECRET.encode() not in proc.joinpath("cmdline").read_bytes() + proc.joinpath("environ").read_bytes()
    assert int(proc.joinpath("stat").read_text().split()[18]) == 19  # nice
    proxy.rule = lambda _method, _path: Fault(403, "SignatureDoesNotMatch")
    proxy.bytes_per_s = None
    until(lambda: uploader.status().failures)
    assert SECRET not in repr(uploader.status()) + caplog.text
    assert "the secret key is wrong" in uploader.status().error


# --- Killed, held, orphaned ----------------------------------------------------------------------------------------


def read_back(tier: Tier, found: Found, rank: int = 0) -> dict[str, Loaded]:
    """Read a shard as a resume does: what the network or a busy server refuses is asked for again."""
    return Gate(patience_s=60.0).call(lambda: read_shard(tier.open_shard, found, rank))


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 9))]


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_instants_it_ends_with_the_same_bytes(
    uploads: Uploads, tmp_path: Path, proxy: Proxy, bucket: str, seed: int
) -> None:
    """kill -9, again and again: what is there counts, what was on its way is sent again, nothing is torn."""
    rng = random.Random(seed)
    proxy.bytes_per_s = 20 * MIB
    saved = save(tmp_path / "root", 7, mib=40)
    remote = remote_of(bucket, proxy.url, tmp_path)
    uploader = uploads(remote)
    uploader.offer(saved)
    for _ in range(3):
        until(lambda: uploader._child is not None or uploader.status().commits)
        time.sleep(rng.uniform(0.0, 1.0))
        child = uploader._child
        if child is not None:
            child.send_signal(signal.SIGKILL)
            child.wait()
            until(lambda child=child: uploader._child is not child)
    committed(uploader)
    tier = tier_of(remote, "llm")
    (found,) = tier.found()
    assert found.digest == saved.manifest_digest
    assert read_back(tier, found)["state"].data == state(7, mib=40)
    assert sent(proxy) <= 6 + 3 * remote.connections  # each kill costs what was on its way, and no more


def test_a_hold_stops_it_at_once_and_it_goes_on_by_part(
    uploads: Uploads, tmp_path: Path, proxy: Proxy, bucket: str
) -> None:
    proxy.bytes_per_s = 8 * MIB
    saved = save(tmp_path / "root", 7, mib=80)
    remote = remote_of(bucket, proxy.url, tmp_path)
    uploader = uploads(remote)
    uploader.offer(saved)
    until(lambda: uploader.status().bytes_sent >= CHUNK)
    pid = pid_of(uploader)
    uploader.hold()
    until(lambda: uploader._child is None and not uploader._busy)
    assert (uploader.status().state, uploader.status().commits) == ("held", 0)
    assert not Path(f"/proc/{pid}").exists()
    until(lambda: not proxy.in_flight)
    up = proxy.bytes_up
    time.sleep(0.3)
    assert (proxy.bytes_up, uploader._child) == (up, None)
    proxy.bytes_per_s = None
    uploader.release()
    committed(uploader)
    assert sent(proxy) <= 11 + remote.connections
    assert read_back(tier_of(remote, "llm"), tier_of(remote, "llm").found()[0])["state"].data == state(7, mib=80)


def test_a_hold_at_any_instant_leaves_no_child(uploads: Uploads, tmp_path: Path) -> None:
    """Before it is started, while it is, in its first lines, at its end: nothing goes on after a hold."""
    rng = random.Random(5)
    (tmp_path / "nas").mkdir()
    saved = save(tmp_path / "root", 7, mib=8)
    uploader = uploads(Remote(url=str(tmp_path / "nas"), bytes_per_s=MIB))
    for _ in range(12):
        uploader.offer(saved)
        time.sleep(rng.choice([0.0, 0.001, 0.01, 0.2]) * rng.random())
        uploader.hold()
        until(lambda: uploader._child is None and not uploader._busy)
        assert uploader.status().state == "held"
        uploader.release()
    assert committed(uploader).failures == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_two_hosts_in_a_storm_with_kills_and_holds(
    uploads: Uploads, tmp_path: Path, proxy: Proxy, bucket: str, seed: int
) -> None:
    """Whatever happens to either, in the end one manifest stands there, with every byte of both."""
    rng = random.Random(seed)
    proxy.rule = storm(seed, 0.2)
    proxy.bytes_per_s = 30 * MIB
    remote = remote_of(bucket, proxy.url, tmp_path)
    roots = {0: tmp_path / "a", 1: tmp_path / "b"}
    saved = save(roots, 7, ranks=2, mib=40)
    hosts = [uploads(remote), uploads(remote)]
    for rank, uploader in enumerate(hosts):
        uploader.offer(replace(saved, path=str(roots[rank] / Path(saved.path).name)))
    for _ in range(8):
        time.sleep(rng.uniform(0.0, 1.0))
        uploader = rng.choice(hosts)
        child = uploader._child
        if rng.random() < 0.5 and child is not None:
            child.send_signal(signal.SIGKILL)
        else:
            uploader.hold()
            uploader.release()
    for uploader in hosts:
        committed(uploader)
    proxy.rule = lambda _method, _path: None
    tier = tier_of(remote, "llm")
    (found,) = tier.found()
    for rank in roots:
        assert read_back(tier, found, rank)["state"].data == state(7, rank, 40)


def test_an_orphan_ends(tmp_path: Path, proxy: Proxy, bucket: str) -> None:
    """The training was killed: its upload must not go on for hours beside the next start."""
    proxy.bytes_per_s = MIB
    saved = save(tmp_path / "root", 7, mib=80)
    remote = remote_of(bucket, proxy.url, tmp_path)
    script = (
        "import sys, json\nfrom powerguard.trainer.tiers import Remote\n"
        "from powerguard.trainer.tiers.upload import Uploader\nfrom powerguard.trainer import SavedCheckpoint\n"
        "given = json.loads(sys.argv[1])\n"
        "uploader = Uploader(Remote(**given['remote']), job='llm')\n"
        "uploader.offer(SavedCheckpoint(**given['saved']))\n"
        "while uploader._child is None: pass\n"
        "print(uploader._child.pid, flush=True)\n"
        "input()\n"
    )
    given = {"remote": remote.as_json(), "saved": {name: getattr(saved, name) for name in saved.__slots__}}
    with subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(given)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as training:
        assert training.stdout is not None
        child = Path("/proc") / training.stdout.readline().decode().strip()
        until(lambda: proxy.bytes_up > MIB)
        assert process(child.name)[1] == child.name
        training.kill()
        until(lambda: process(child.name)[1] != child.name)


# --- A store that misbehaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_of_errors_and_cut_connections_is_weathered(
    uploads: Uploads, tmp_path: Path, proxy: Proxy, bucket: str, seed: int
) -> None:
    """Half of all requests fail, in every way there is; it arrives, and is told how often what was met."""
    proxy.rule = storm(seed, 0.5)
    remote = remote_of(bucket, proxy.url, tmp_path)
    uploader = uploads(remote)
    uploader.offer(save(tmp_path / "root", 7, mib=40))
    status = committed(uploader)
    assert set(status.retries) <= {"throttled", "server", "network"}
    assert sum(status.retries.values()) >= 3
    assert status.failures == {}
    proxy.rule = lambda _method, _path: None
    tier = tier_of(remote, "llm")
    assert read_back(tier, tier.found()[0])["state"].data == state(7, mib=40)


def test_a_store_that_is_down_is_asked_less_and_less_and_then_served(
    uploads: Uploads, tmp_path: Path, proxy: Proxy, bucket: str
) -> None:
    """Out of patience it rests; each rest is longer; when the store is back, the upload is done without a word."""
    proxy.rule = lambda _method, _path: Fault(503, "SlowDown")
    remote = remote_of(bucket, proxy.url, tmp_path)
    uploader = uploads(remote, gate={**QUICK, "patience_s": 2.0})
    uploader.offer(save(tmp_path / "root", 7))
    until(lambda: uploader.status().failures.get("throttled"))
    assert "asks us to slow down [503 SlowDown]" in uploader.status().error
    attempts = len(proxy.asked)
    assert 2 <= attempts <= 80  # at full speed it would be hundreds
    proxy.rule = lambda _method, _path: None
    status = committed(uploader)
    assert status.error == ""
    assert sum(status.retries.values()) >= attempts - sum(status.failures.values())


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (Fault(403, "InvalidAccessKeyId"), "denied", "the access key is not known there"),
        (Fault(403, "AccessDenied"), "denied", "get, put, list and delete are needed"),
        (Fault(403, "RequestTimeTooSkewed"), "clock", "this host's clock is off"),
        (Fault(400, "AuthorizationHeaderMalformed"), "unusable", "another region"),
        (Fault(400, "QuotaExceeded"), "full", "quota"),
    ],
)
def test_what_patience_does_not_help_against_is_reported_at_once(
    uploads: Uploads, tmp_path: Path, proxy: Proxy, bucket: str, fault: Fault, kind: str, words: str
) -> None:
    """One request, one clear sentence, and a rest; not a thousand refused requests, which some stores punish."""
    proxy.rule = lambda _method, _path: fault
    uploader = uploads(remote_of(bucket, proxy.url, tmp_path), retry_s=60.0)
    uploader.offer(save(tmp_path / "root", 7, mib=1))
    until(lambda: uploader.status().failures)
    status = uploader.status()
    assert (dict(status.failures), status.state, len(proxy.asked)) == ({kind: 1}, "resting", 1)
    assert words in status.error


def test_who_may_not_delete_commits_all_the_same_and_hears_of_it(
    uploads: Uploads, tmp_path: Path, proxy: Proxy, bucket: str
) -> None:
    """A training that must not be able to remove checkpoints: retention is then somebody else's."""

    def rule(method: str, path: str) -> Fault | None:
        return Fault(403, "AccessDenied") if method == "POST" or "?delete" in path else None

    proxy.rule = rule
    uploader = uploads(remote_of(bucket, proxy.url, tmp_path, keep=1, keep_days=0))
    uploader.offer(save(tmp_path / "root", 6, mib=1))
    committed(uploader)
    newest = save(tmp_path / "root", 7, mib=1)
    uploader.offer(newest)
    until(lambda: uploader.status().commits == 2)
    status = uploader.status()
    assert (status.committed_step, dict(status.failures)) == (7, {"denied": 1})
    assert "access is denied" in status.error
    assert uploader.finish(newest, 10.0)
    assert uploader.status().state == "idle"


def test_a_bucket_that_is_made_later_is_used(uploads: Uploads, tmp_path: Path, s3: S3Server) -> None:
    uploader = uploads(remote_of("s3://made-later", s3.url, tmp_path))
    uploader.offer(save(tmp_path / "root", 7, mib=1))
    until(lambda: uploader.status().failures.get("absent"))
    status = uploader.status()
    assert "there is no such bucket" in status.error
    assert status.error_since_s is not None
    until(lambda: uploader.status().failures["absent"] > 1)
    assert uploader.status().error_since_s == status.error_since_s, "since the first one"
    s3.bucket("made-later")
    status = committed(uploader)
    assert (status.error, status.error_since_s) == ("", None)


def test_an_error_is_over_once_all_that_lies_here_is_there(uploads: Uploads, tmp_path: Path) -> None:
    """Another host commits, later than this one looks: this one would report its last error for ever."""
    uploader = uploads(Remote(url=str(tmp_path / "nas")), retry_s=600.0)
    saved = save(tmp_path / "root", 7, mib=1)
    uploader.offer(saved)
    until(lambda: uploader.status().failures)
    uploader._conclude(saved, {"ended": "waiting"})
    status = uploader.status()
    assert (status.error, status.error_since_s, status.state, status.commits) == ("", None, "idle", 0)
    assert uploader.has_brought(saved)


def test_a_server_that_is_not_there(uploads: Uploads, tmp_path: Path) -> None:
    uploader = uploads(remote_of("s3://bucket", "http://127.0.0.1:9", tmp_path), gate={**QUICK, "patience_s": 0.3})
    uploader.offer(save(tmp_path / "root", 7, mib=1))
    until(lambda: uploader.status().failures.get("network"))
    assert "no answer" in uploader.status().error


def test_what_a_library_prints_is_no_answer(uploads: Uploads, tmp_path: Path) -> None:
    """Whatever else comes out of the child, lines that look like JSON too: it is passed over."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "sitecustomize.py").write_text(
        'print(7); print("{}"); print("[1]"); print("hello", flush=True)'
    )
    (tmp_path / "nas").mkdir()
    with environment(PYTHONPATH=str(tmp_path / "shadow")):
        uploader = uploads(str(tmp_path / "nas"))
        uploader.offer(save(tmp_path / "root", 7, mib=1))
        assert committed(uploader).failures == {}


def test_a_child_that_cannot_even_begin_reports_its_last_words(uploads: Uploads, tmp_path: Path) -> None:
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "xxhash.py").write_text("raise ImportError('broken here')")
    (tmp_path / "nas").mkdir()
    with environment(PYTHONPATH=str(tmp_path / "shadow")):
        uploader = uploads(str(tmp_path / "nas"))
        uploader.offer(save(tmp_path / "root", 7, mib=1))
        until(lambda: uploader.status().failures)
    assert "broken here" in uploader.status().error


def test_without_obstore_it_says_what_to_install(uploads: Uploads, tmp_path: Path) -> None:
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "obstore.py").write_text("raise ImportError('not here')")
    with environment(PYTHONPATH=str(tmp_path / "shadow")):
        uploader = uploads(remote_of("s3://bucket", "http://127.0.0.1:9", tmp_path))
        uploader.offer(save(tmp_path / "root", 7, mib=1))
        until(lambda: uploader.status().failures)
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = project["optional-dependencies"]["s3"]
    assert f"({sys.executable} -m pip install '{needed}')" in uploader.status().error, "a training has no checkout"


# --- A mount that vanishes -----------------------------------------------------------------------------------------


def test_a_mount_that_hangs_holds_up_nobody_and_is_used_again(uploads: Uploads, tmp_path: Path) -> None:
    """The cable of the NAS is pulled in mid-upload: the child hangs, is killed, and the upload ends when it is back."""
    nas = tmp_path / "nas"
    nas.mkdir()
    saved = save(tmp_path / "root", 7, mib=56)
    uploader = uploads(
        Remote(url=str(nas), part_bytes=CHUNK, connections=1, bytes_per_s=16 * MIB), stall_s=10.0, retry_s=0.2
    )
    uploader.offer(saved)
    until(lambda: any(nas.rglob("*.part")))
    with hung(nas):
        until(lambda: uploader.status().failures.get("stalled"))
        assert "no progress for 10 s" in uploader.status().error
        until(lambda: uploader._child is not None)  # it tries again, and hangs again
        uploader.hold()
        until(lambda: not uploader._busy)
        uploader.release()
    committed(uploader)
    tier = PathTier(Remote(url=str(nas)), "llm")
    assert read_shard(tier.open_shard, tier.found()[0], 0)["state"].data == state(7, mib=56)


def test_a_mount_that_hangs_does_not_hang_a_start(tmp_path: Path) -> None:
    """Looking for checkpoints at a start happens in the training's own process: behind a limit."""
    nas = tmp_path / "nas"
    nas.mkdir()
    tier = PathTier(Remote(url=str(nas)), "llm", limit_s=0.3)
    with hung(nas), pytest.raises(TierError, match=r"no answer within 0\.3 s"):
        tier.found()
    assert PathTier(Remote(url=str(nas)), "llm").found() == []


@pytest.mark.slow
def test_a_tier_that_is_slow_at_a_start_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ten seconds of silence are enough: the operator must know what the start waits for, and how long."""
    nas = tmp_path / "nas"
    nas.mkdir()
    save(tmp_path / "root", 1, mib=1)
    tier = PathTier(Remote(url=str(nas)), "llm", limit_s=11.0)
    with hung(nas), Store(tmp_path / "root", job="llm", slots=0) as store:
        chosen = choose([LocalTier(store), tier], Alone(), job="llm", patience_s=0.0)
    assert chosen is not None
    found = [record.getMessage() for record in caplog.records if "tier_slow" in record.getMessage()]
    assert found == [f"tier_slow {tier.word}: no answer for 10 s: tried for about 10 s, then left out"]


# --- The local checkpoint ------------------------------------------------------------------------------------------


def test_what_is_on_its_way_is_not_pruned(uploads: Uploads, tmp_path: Path, proxy: Proxy, bucket: str) -> None:
    proxy.bytes_per_s = 2 * MIB
    saved = save(tmp_path / "root", 1, mib=40)
    uploader = uploads(remote_of(bucket, proxy.url, tmp_path))
    uploader.offer(saved)
    until(lambda: proxy.bytes_up > MIB)
    for step in (2, 3, 4):
        save(tmp_path / "root", step, mib=1)
    with Store(tmp_path / "root", job="llm", slots=0) as store:
        for found in store.found():
            read(found, 0)
        store.prune()
        assert Path(saved.path).exists()
        proxy.bytes_per_s = None
        committed(uploader)
        until(lambda: uploader.status().state == "idle")
        assert Path(saved.path).name in store.prune()


def test_one_that_is_gone_is_reported_and_the_next_is_taken(uploads: Uploads, tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    uploader = uploads(str(tmp_path / "nas"), retry_s=0.05)
    gone = save(tmp_path / "root", 6, mib=1)
    Path(gone.path).rename(tmp_path / "gone")
    uploader.offer(gone)
    until(lambda: uploader.status().failures.get("lost"))
    assert "was removed before it was uploaded" in uploader.status().error
    uploader.offer(save(tmp_path / "root", 7, mib=1))
    assert committed(uploader).committed_step == 7


def test_a_rotten_one_is_never_sent_as_a_good_one(uploads: Uploads, tmp_path: Path) -> None:
    """Each chunk is verified as it is read: a disk that rots must not spoil the second copy."""
    (tmp_path / "nas").mkdir()
    saved = save(tmp_path / "root", 7)
    flip(Path(saved.path, "shard-00000"), CHUNK + 9)
    uploader = uploads(Remote(url=str(tmp_path / "nas"), part_bytes=CHUNK))
    uploader.offer(saved)
    until(lambda: uploader.status().failures.get("corrupt"))
    assert "chunk 1" in uploader.status().error
    assert uploader.status().state in {"idle", "uploading"}
    assert PathTier(Remote(url=str(tmp_path / "nas")), "llm").found() == []


def test_a_child_that_was_killed_by_somebody_else_is_reported(uploads: Uploads, tmp_path: Path, proxy: Proxy) -> None:
    """The kernel, short of memory: it is no secret that this is why."""
    proxy.bytes_per_s = 1.0
    uploader = uploads(remote_of("s3://bucket", proxy.url, tmp_path), retry_s=60.0)
    uploader.offer(save(tmp_path / "root", 7, mib=1))
    os.kill(pid_of(uploader), signal.SIGKILL)
    until(lambda: uploader.status().failures)
    assert "was killed" in uploader.status().error


def test_a_hold_that_is_taken_back_before_the_child_has_ended_is_no_failure(
    uploads: Uploads, tmp_path: Path, proxy: Proxy, bucket: str
) -> None:
    """A child takes its time to die where its NAS hangs: it was killed by the hold, and not short of memory."""
    proxy.bytes_per_s = 1.0
    uploader = uploads(remote_of(bucket, proxy.url, tmp_path), retry_s=60.0)
    uploader.offer(save(tmp_path / "root", 7, mib=1))
    for _ in range(5):
        pid = pid_of(uploader)
        holding = threading.Thread(target=uploader.hold)
        holding.start()
        while not uploader._held:  # taken back at once, before the thread has heard of it
            pass
        uploader.release()
        holding.join(60)
        until(lambda pid=pid: pid_of(uploader) != pid)  # type: ignore[misc]
    assert (uploader.status().error, dict(uploader.status().failures)) == ("", {})


def test_a_child_that_ends_by_itself_is_reported_with_its_status(
    uploads: Uploads, tmp_path: Path, proxy: Proxy
) -> None:
    proxy.bytes_per_s = 1.0
    uploader = uploads(remote_of("s3://bucket", proxy.url, tmp_path), retry_s=60.0)
    uploader.offer(save(tmp_path / "root", 7, mib=1))
    os.kill(pid_of(uploader), signal.SIGTERM)
    until(lambda: uploader.status().failures)
    assert "was killed by signal 15" in uploader.status().error
