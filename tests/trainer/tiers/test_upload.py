"""The uploader, with its real child, against a real S3 server (often behind a proxy that misbehaves) and a folder."""

from pathlib import Path

from powerguard.trainer.snapshot import Snapshot
from powerguard.trainer.tiers import Remote, tier_of
from powerguard.trainer.tiers.base import read_shard
from powerguard.trainer.tiers.upload import Uploader
from tests.trainer.tiers.rig import S3Server, remote_of, save, state, until


def test_a_checkpoint_arrives_in_an_object_store(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    """Offered, uploaded by the child, committed, read back from there and verified."""
    saved = save(tmp_path / "root", 7)
    remote = remote_of(f"{bucket}/checkpoints", s3.url, tmp_path)
    uploader = Uploader(remote, job="llm")
    uploader.offer(saved)
    until(lambda: uploader.status().commits)
    status = uploader.status()
    uploader.close()
    assert (status.state, status.error, status.committed_step) == ("idle", "", 7)
    assert status.bytes_done == status.bytes_total == status.bytes_sent
    tier = tier_of(remote, "llm")
    (found,) = tier.found()
    assert (found.step, found.digest, found.tier) == (7, saved.manifest_digest, "s3")
    items = read_shard(tier, found, 0, Snapshot())
    assert items["state"].data == state(7)
    assert items["step"].value() == 7


def test_a_checkpoint_arrives_on_a_mounted_folder(tmp_path: Path) -> None:
    """The same format as the local one, so that any reader of that reads it."""
    saved = save(tmp_path / "root", 7)
    (tmp_path / "nas").mkdir()
    remote = Remote(url=str(tmp_path / "nas"))
    uploader = Uploader(remote, job="llm")
    uploader.offer(saved)
    until(lambda: uploader.status().commits)
    uploader.close()
    tier = tier_of(remote, "llm")
    (found,) = tier.found()
    assert found.digest == saved.manifest_digest
    assert read_shard(tier, found, 0)["state"].data == state(7)
    assert sorted(path.name for path in Path(found.path).iterdir()) == ["MANIFEST.json", "shard-00000"]
