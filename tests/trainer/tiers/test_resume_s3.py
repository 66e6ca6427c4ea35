"""Resuming from an object store: only what is needed, and through whatever the network does."""

import shutil
import time
from pathlib import Path

import pytest

from powerguard.trainer.ranks.base import Alone
from powerguard.trainer.store.manifest import MANIFEST, MAX_MANIFEST_BYTES
from powerguard.trainer.store.resume import LocalTier, ResumeError, choose
from powerguard.trainer.store.store import Store
from powerguard.trainer.tiers import ObjectTier
from powerguard.trainer.tiers.transfer import Gate, Progress, Transfer, UploadOrder
from tests.trainer.tiers.rig import CHUNK, Fault, Proxy, S3Server, flip, remote_of, save, state, storm


def test_of_an_object_store_only_the_rotten_chunk_is_fetched(tmp_path: Path, proxy: Proxy, bucket: str) -> None:
    """A link that takes an hour for all of it takes a second for 8 MiB."""
    root = tmp_path / "root"
    remote = remote_of(bucket, proxy.url, tmp_path)
    saved = save(root, 7, mib=40)
    order = UploadOrder(remote=remote, job="llm", path=saved.path, digest=saved.manifest_digest)
    assert Transfer(order, ObjectTier(remote, "llm"), Gate(), Progress()).run()
    flip(Path(saved.path, "shard-00000"), 3 * CHUNK + 9)
    proxy.asked.clear()
    with Store(root, job="llm", slots=0) as store:
        chosen = choose([LocalTier(store), ObjectTier(remote, "llm")], Alone(), job="llm")
    assert chosen is not None
    assert (chosen.tiers, chosen.repaired) == (("local", "s3"), 1)
    assert chosen.items["state"].data == state(7, mib=40)
    assert sum("/shard-00000/" in path for method, path in proxy.asked if method == "GET") == 1


def test_the_checkpoint_committed_last_comes_first(tmp_path: Path, proxy: Proxy, bucket: str) -> None:
    """A training that was rolled back has a lower step than what it left behind; a store tells whole seconds."""
    remote = remote_of(bucket, proxy.url, tmp_path)
    for step in (100, 42):
        saved = save(tmp_path / "root", step, mib=1)
        order = UploadOrder(remote=remote, job="llm", path=saved.path, digest=saved.manifest_digest)
        assert Transfer(order, ObjectTier(remote, "llm"), Gate(), Progress()).run()
        time.sleep(1.1)
    assert [found.step for found in ObjectTier(remote, "llm").found()] == [42, 100]


def test_an_object_store_in_a_storm_still_yields_it(tmp_path: Path, proxy: Proxy, bucket: str) -> None:
    root = tmp_path / "root"
    remote = remote_of(bucket, proxy.url, tmp_path)
    saved = save(root, 7, mib=24)
    order = UploadOrder(remote=remote, job="llm", path=saved.path, digest=saved.manifest_digest)
    assert Transfer(order, ObjectTier(remote, "llm"), Gate(), Progress()).run()
    shutil.rmtree(root)
    proxy.rule = storm(5, 0.25)
    with Store(root, job="llm", slots=0) as store:
        chosen = choose([LocalTier(store), ObjectTier(remote, "llm")], Alone(), job="llm", patience_s=60.0)
    assert chosen is not None
    assert (chosen.tiers, chosen.items["state"].data == state(7, mib=24)) == (("s3",), True)
    assert proxy.met.total() > proxy.met["ok"]


def test_a_rotten_manifest_is_passed_over_and_alone_it_is_no_empty_bucket(
    tmp_path: Path, s3: S3Server, bucket: str
) -> None:
    """The older checkpoint is taken; without one, training must not begin at step 0."""
    remote, folder = remote_of(bucket, s3.url, tmp_path), f"/{bucket.removeprefix('s3://')}/llm"
    for step in (7, 9):
        saved = save(tmp_path / "root", step, mib=1)
        order = UploadOrder(remote=remote, job="llm", path=saved.path, digest=saved.manifest_digest)
        assert Transfer(order, ObjectTier(remote, "llm"), Gate(), Progress()).run()
    names = sorted(path.name for path in (tmp_path / "root").glob("step-*"))
    s3.put(f"{folder}/{names[1]}/{MANIFEST}", bytes(MAX_MANIFEST_BYTES + 1))
    with Store(tmp_path / "new", job="llm", slots=0) as store:
        chosen = choose([LocalTier(store), ObjectTier(remote, "llm")], Alone(), job="llm")
        assert chosen is not None
        assert (chosen.step, chosen.items["state"].data == state(7, mib=1)) == (7, True)
        for name in names:
            s3.put(f"{folder}/{name}/{MANIFEST}", b"rotten")
        with pytest.raises(ResumeError, match=rf"may be some: s3: {bucket}/llm/step-.*/{MANIFEST}: is not readable"):
            choose([LocalTier(store), ObjectTier(remote, "llm")], Alone(), job="llm", key="again")


def test_a_web_page_is_no_empty_bucket(tmp_path: Path, proxy: Proxy, bucket: str) -> None:
    """The console of a store, or a proxy's page for people who have to log in, has a page for every address."""
    proxy.rule = lambda _method, _path: Fault(200, "Login")
    remote = remote_of(bucket, proxy.url, tmp_path)
    with (
        Store(tmp_path / "new", job="llm", slots=0) as store,
        pytest.raises(ResumeError, match=r"may be some: s3: .* answers as a web page does"),
    ):
        choose([LocalTier(store), ObjectTier(remote, "llm")], Alone(), job="llm")
