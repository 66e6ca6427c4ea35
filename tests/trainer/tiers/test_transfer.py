"""One checkpoint on its way, without the child: several hosts, several writers, what was there before, what is kept."""

import base64
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from powerguard.trainer.store.folders import SavedCheckpoint
from powerguard.trainer.store.manifest import MANIFEST, Manifest
from powerguard.trainer.tiers import ObjectTier, PathTier, Remote, tier_of
from powerguard.trainer.tiers.base import SET_ASIDE, Kind, Listed, TierError, outdated, read_shard
from powerguard.trainer.tiers.transfer import Gate, Progress, Transfer, UploadOrder
from tests.trainer.tiers.rig import CHUNK, Fault, Proxy, S3Server, flip, remote_of, save, small_disk, state

DAY_S = 86400.0


@pytest.fixture(params=["path", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """Each kind of tier."""
    if request.param == "path":
        (tmp_path / "nas").mkdir()
        return Remote(url=str(tmp_path / "nas"), part_bytes=CHUNK, connections=2)
    server: S3Server = request.getfixturevalue("s3")
    bucket: str = request.getfixturevalue("bucket")
    return remote_of(bucket, server.url, tmp_path)


def carried(saved: SavedCheckpoint, remote: Remote, progress: Progress | None = None, **options: float) -> bool:
    order = UploadOrder(remote=remote, job="llm", path=saved.path, digest=saved.manifest_digest)
    target = tier_of(remote, "llm")
    return Transfer(order, target, Gate(patience_s=5.0), progress or Progress(), **options).run()


def manifest_of(saved: SavedCheckpoint) -> Manifest:
    return Manifest.parse(Path(saved.path, MANIFEST).read_bytes())


def test_twice_is_as_good_as_once(tmp_path: Path, remote: Remote) -> None:
    saved = save(tmp_path / "root", 7)
    assert carried(saved, remote)
    progress = Progress()
    assert carried(saved, remote, progress)
    assert (progress.bytes_sent, progress.committed) == (0, True)


def test_what_is_there_in_parts_of_another_size_counts(tmp_path: Path, remote: Remote) -> None:
    """An option that was changed, or another version: a name says what it holds."""
    saved = save(tmp_path / "root", 7)
    shard = manifest_of(saved).shard(0)
    name = Path(saved.path).name
    tier = tier_of(remote, "llm")
    content = memoryview(Path(saved.path, shard.file).read_bytes())
    for part in tier.missing(name, shard, lambda _count: None)[:2]:
        tier.put(name, part, content[part.offset : part.offset + part.size_bytes])
    progress = Progress()
    assert carried(saved, replace(remote, part_bytes=2 * CHUNK), progress)
    assert progress.bytes_sent == shard.size_bytes - 2 * CHUNK
    assert read_shard(tier.open_shard, tier.found()[0], 0)["state"].data == state(7)


def test_hosts_upload_side_by_side_and_the_last_one_commits(tmp_path: Path, remote: Remote) -> None:
    """No word passes between them but what lies in the tier."""
    a, b = tmp_path / "a", tmp_path / "b"
    saved = save({0: a, 1: b}, 7, ranks=2, mib=9)
    other = replace(saved, path=str(b / Path(saved.path).name))
    with ThreadPoolExecutor(2) as pool:
        result = list(pool.map(lambda each: carried(each, remote, linger_s=20.0), [saved, other]))
    assert result == [True, True]
    tier = tier_of(remote, "llm")
    (found,) = tier.found()
    assert [bytes(read_shard(tier.open_shard, found, rank)["state"].data) for rank in (0, 1)] == [
        state(7, 0, 9),
        state(7, 1, 9),
    ]


def test_one_host_alone_commits_nothing(tmp_path: Path, remote: Remote) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    saved = save({0: a, 1: b}, 7, ranks=2, mib=1)
    progress = Progress()
    assert not carried(saved, remote, progress, linger_s=0.0)
    assert not progress.committed
    assert tier_of(remote, "llm").found() == []


def test_two_writers_of_one_manifest(tmp_path: Path, remote: Remote) -> None:
    """Exactly one of many creates it; the same one again is done; another one is an error and changes nothing."""
    manifest = manifest_of(save(tmp_path / "root", 7, mib=1))
    name = "step-000000000007-00000070"
    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(lambda _: tier_of(remote, "llm").commit(name, manifest), range(4)))
    assert sorted(result) == [False, False, False, True]
    other = manifest_of(save(tmp_path / "other", 7, mib=2))
    with pytest.raises(TierError, match="another checkpoint stands under this name") as caught:
        tier_of(remote, "llm").commit(name, other)
    assert caught.value.kind is Kind.CONFLICT
    assert tier_of(remote, "llm").committed(name) == manifest.digest


@pytest.mark.parametrize("is_half", [False, True])
def test_a_checkpoint_that_was_copied_there_by_hand_is_the_same(tmp_path: Path, *, is_half: bool) -> None:
    """Its manifest is filled up with line ends, as the store makes it. What such a copy lacks is added."""
    saved = save(tmp_path / "root", 7, mib=1)
    copy = tmp_path / "nas" / "llm" / Path(saved.path).name
    shutil.copytree(saved.path, copy)
    if is_half:
        os.truncate(copy / "shard-00000", 1000)
    remote, progress = Remote(url=str(tmp_path / "nas")), Progress()
    assert carried(saved, remote, progress)
    assert (progress.bytes_sent > 0) == is_half
    tier = tier_of(remote, "llm")
    (found,) = tier.found()
    assert found.digest == saved.manifest_digest
    assert read_shard(tier.open_shard, found, 0)["state"].data == state(7, mib=1)


def test_each_part_carries_its_sha256(tmp_path: Path, proxy: Proxy, bucket: str) -> None:
    """The server is told what it must have received, and refuses anything else."""
    remote = remote_of(bucket, proxy.url, tmp_path)
    saved = save(tmp_path / "root", 7)
    carried(saved, remote)
    content = state_file(saved)
    parts = [content[start : start + CHUNK] for start in range(0, len(content), CHUNK)]
    due = {base64.b64encode(sha256(part).digest()).decode() for part in parts}
    puts = [index for index, (method, path) in enumerate(proxy.asked) if method == "PUT" and "/shard-" in path]
    assert {proxy.headers[index]["x-amz-checksum-sha256"] for index in puts} == due


def test_a_commit_whose_answer_was_lost_is_done(tmp_path: Path, proxy: Proxy, bucket: str) -> None:
    """The manifest stands, and nobody told us: the second try finds it, and that it is ours."""
    lost = [Fault(lost=True)]
    proxy.rule = lambda method, path: lost.pop() if lost and method == "PUT" and path.endswith(MANIFEST) else None
    remote = remote_of(bucket, proxy.url, tmp_path)
    saved = save(tmp_path / "root", 7, mib=1)
    assert carried(saved, remote)
    assert proxy.met["lost"] == 1
    assert [found.digest for found in tier_of(remote, "llm").found()] == [saved.manifest_digest]


def test_another_checkpoint_under_this_name_is_never_mixed_with(tmp_path: Path, remote: Remote) -> None:
    saved = save(tmp_path / "root", 7, mib=1)
    assert carried(saved, remote)
    with pytest.raises(TierError, match="give each"):
        carried(save(tmp_path / "other", 7, mib=2), remote)


def test_a_torn_file_of_a_killed_upload_is_mended_by_part(tmp_path: Path) -> None:
    """On a NAS a kill, or the server's own crash, leaves holes: what does not read back right is written again."""
    saved = save(tmp_path / "root", 7)
    (tmp_path / "nas").mkdir()
    remote = Remote(url=str(tmp_path / "nas"), part_bytes=CHUNK)
    shard = manifest_of(saved).shard(0)
    torn = tmp_path / "nas" / "llm" / Path(saved.path).name / f"{shard.file}.part"
    torn.parent.mkdir(parents=True)
    content = bytearray(Path(saved.path, shard.file).read_bytes())
    content[CHUNK + 5 : CHUNK + 5000] = bytes(4995)
    torn.write_bytes(content[: 2 * CHUNK + 100] + b"x" * (2 * CHUNK))
    progress = Progress()
    assert carried(saved, remote, progress)
    assert progress.bytes_sent == shard.size_bytes - CHUNK
    assert torn.with_name(shard.file).read_bytes()[: shard.size_bytes] == state_file(saved)


def state_file(saved: SavedCheckpoint) -> bytes:
    shard = manifest_of(saved).shard(0)
    return Path(saved.path, shard.file).read_bytes()[: shard.size_bytes]


def test_a_folder_that_the_nas_puts_into_a_checkpoint_goes_with_it(tmp_path: Path) -> None:
    """With it, the retention stopped for ever, and the NAS filled."""
    nas = tmp_path / "nas"
    nas.mkdir()
    remote = Remote(url=str(nas), keep=1, keep_days=0)
    for step in (7, 8, 9):
        assert carried(save(tmp_path / "root", step), remote)
        for folder in nas.rglob("step-*"):
            (folder / "@eaDir").mkdir(exist_ok=True)
            (folder / "@eaDir" / "shard@SynoEAStream").write_bytes(b"x")
    assert [found.step for found in PathTier(remote, "llm").found()] == [9]
    assert len(list(nas.rglob("step-*"))) == 1


def test_an_nas_that_gives_back_other_bytes_commits_nothing(tmp_path: Path) -> None:
    """Verified by reading it back: rot in the server's memory is found now, and not when it is needed."""
    saved = save(tmp_path / "root", 7)
    (tmp_path / "nas").mkdir()
    remote = Remote(url=str(tmp_path / "nas"), part_bytes=CHUNK, connections=1)

    class Rotten(PathTier):
        """A server that lets a bit flip once it has acknowledged."""

        def finish(self, name: str, shard: object, seen: Callable[[int], None]) -> None:
            flip(Path(self.url, name, "shard-00000.part"), CHUNK + 3)
            super().finish(name, shard, seen)  # type: ignore[arg-type]

    order = UploadOrder(remote=remote, job="llm", path=saved.path, digest=saved.manifest_digest)
    with pytest.raises(TierError, match="chunk 1 reads back other than it was written") as caught:
        Transfer(order, Rotten(remote, "llm"), Gate(), Progress()).run()
    assert caught.value.kind is not Kind.CORRUPT, "what is here is good, and the uploader must try again"
    assert PathTier(remote, "llm").found() == []
    assert carried(saved, remote)


def test_an_nas_that_is_full_says_so(tmp_path: Path) -> None:
    saved = save(tmp_path / "root", 7)
    (tmp_path / "nas").mkdir()
    with small_disk(tmp_path / "nas", 12), pytest.raises(TierError, match="the file system is full") as caught:
        carried(saved, Remote(url=str(tmp_path / "nas"), part_bytes=CHUNK))
    assert caught.value.kind is Kind.FULL


def test_what_interrupted_uploads_have_left_keeps_no_nas_full(tmp_path: Path) -> None:
    """It has room for the one that stays and one more, as it needs. What is of use in a full one stays."""
    nas = tmp_path / "nas"
    nas.mkdir()
    remote = Remote(url=str(nas), keep=1, keep_days=0, part_bytes=CHUNK)
    saved = [save(tmp_path / "root", step, mib=16) for step in (1, 2, 3)]
    with small_disk(nas, 44):
        assert carried(saved[0], remote)
        tier = PathTier(remote, "llm")
        shard = manifest_of(saved[1]).shard(0)
        content = memoryview(Path(saved[1].path, shard.file).read_bytes())
        for part in tier.missing(Path(saved[1].path).name, shard, lambda _count: None)[:2]:
            tier.put(Path(saved[1].path).name, part, content[part.offset : part.offset + part.size_bytes])
        progress = Progress()
        assert carried(saved[2], remote, progress)
        assert progress.bytes_done == progress.bytes_total
        assert [path.name for path in (nas / "llm").iterdir()] == [Path(saved[2].path).name]
        (nas / "filling").write_bytes(bytes(20 << 20))
        with pytest.raises(TierError, match="full"):
            carried(saved[1], remote)
        assert [found.step for found in tier.found()] == [3]


def test_an_nas_that_is_not_mounted_fills_no_other_disk(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="is it mounted"):
        carried(save(tmp_path / "root", 7, mib=1), Remote(url=str(tmp_path / "nas")))
    assert not (tmp_path / "nas").exists()


def test_an_object_that_was_cut_or_spoilt_is_noticed(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    """Whatever happened inside the store, or whoever wrote there: a digest says no."""
    remote = remote_of(bucket, s3.url, tmp_path)
    saved = save(tmp_path / "root", 7)
    carried(saved, remote)
    tier = ObjectTier(remote, "llm")
    (found,) = tier.found()
    folder = f"{bucket.removeprefix('s3://')}/llm/{found.name}"
    part = tier.missing(found.name, replace(found.shard(0), digests=("0" * 32,) * 3), lambda _: None)[0]
    assert part.first == 0  # parts of other digests are not taken for these
    (path, first) = tier._chunks(found.name, found.shard(0))[1]
    key = path.rpartition("/")[2]
    content = bytearray(s3.get(f"/{folder}/shard-00000/{key}"))
    content[9] ^= 1
    s3.put(f"/{folder}/shard-00000/{key}", bytes(content))
    with pytest.raises(TierError, match="chunk 1 does not match its digest"):
        read_shard(tier.open_shard, found, 0)
    s3.put(f"/{folder}/shard-00000/{key}", bytes(content[:-1]))
    with pytest.raises(TierError, match=f"the part with chunk {first} is missing"):
        read_shard(tier.open_shard, found, 0)


def test_a_hostile_manifest_in_a_bucket_is_passed_by(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    """Whoever can write there can spoil checkpoints, and do nothing else."""
    remote = remote_of(bucket, s3.url, tmp_path)
    saved = save(tmp_path / "root", 7, mib=1)
    carried(saved, remote)
    content = Path(saved.path, MANIFEST).read_bytes()
    folder = f"{bucket.removeprefix('s3://')}/llm"
    s3.put(f"/{folder}/step-000000000009-00000090/MANIFEST.json", content)  # of another step
    s3.put(f"/{folder}/step-000000000010-00000090/MANIFEST.json", b"{" * 100_000)
    s3.put(f"/{folder}/step-000000000011-00000090/other", b"")
    s3.put(f"/{folder}/unrelated/MANIFEST.json", content)
    assert [found.step for found in ObjectTier(remote, "llm").found()] == [7]


def test_only_so_many_bytes_a_second(tmp_path: Path, proxy: Proxy, bucket: str) -> None:
    """On average: each part is sent as fast as it goes."""
    remote = remote_of(bucket, proxy.url, tmp_path, bytes_per_s=16.0 * CHUNK)
    clock = Clock()
    saved = save(tmp_path / "root", 7, mib=40)
    order = UploadOrder(remote=remote, job="llm", path=saved.path, digest=saved.manifest_digest)
    gate = Gate(bytes_per_s=remote.bytes_per_s)
    assert Transfer(order, tier_of(remote, "llm"), gate, Progress()).run()
    assert clock.passed_s() >= 5 / 16


class Clock:
    def __init__(self) -> None:
        self._began = os.times().elapsed

    def passed_s(self) -> float:
        return os.times().elapsed - self._began


# --- What is kept --------------------------------------------------------------------------------------------------


def test_the_newest_stay_and_what_was_set_aside(tmp_path: Path, remote: Remote) -> None:
    """Older ones go only after a newer one is committed; a marked one is for whoever wants to know why."""
    keeping = replace(remote, keep=2, keep_days=0)
    for step in (1, 2):
        carried(save(tmp_path / "root", step, mib=1), keeping)
    tier = tier_of(keeping, "llm")
    oldest = tier.found()[-1]
    tier.set_aside(oldest, "rotten")
    for step in (3, 4, 5):
        carried(save(tmp_path / "root", step, mib=1), keeping)
    assert [found.step for found in tier.found()] == [5, 4]
    assert tier.aside() == [oldest.name]


def test_with_days_to_keep_today_s_newest_stays_once(tmp_path: Path, remote: Remote) -> None:
    keeping = replace(remote, keep=1, keep_days=7)
    for step in (1, 2, 3):
        carried(save(tmp_path / "root", step, mib=1), keeping)
    assert [found.step for found in tier_of(keeping, "llm").found()] == [3]


def test_what_was_just_committed_stays_whatever_the_servers_clock_said(tmp_path: Path) -> None:
    """A NAS whose clock was a year ahead dated its checkpoints so; until then each new one is older than they are."""
    (tmp_path / "nas").mkdir()
    remote = Remote(url=str(tmp_path / "nas"), keep=2, keep_days=7)
    for step in (1, 2):
        carried(save(tmp_path / "root", step, mib=1), remote)
    for path in (tmp_path / "nas").rglob("*"):
        ahead_s = path.stat().st_mtime + 365 * DAY_S
        os.utime(path, (ahead_s, ahead_s))
    for step in (3, 4):
        carried(save(tmp_path / "root", step, mib=1), remote)
        assert step in [found.step for found in tier_of(remote, "llm").found()]


def listed(name: str, at_s: float, *, committed: bool = True, set_aside: bool = False) -> Listed:
    return Listed(name=name, at_s=at_s, committed=committed, set_aside=set_aside)


def test_one_a_day_for_some_days() -> None:
    entries = [listed(f"{day}-{hour}", day * DAY_S + hour * 3600) for day in range(10) for hour in (3, 9, 15)]
    gone = set(outdated(entries, 2, 4))
    assert [each.name for each in entries if each.name not in gone] == ["6-15", "7-15", "8-15", "9-9", "9-15"]


def test_a_rolled_back_training_keeps_what_it_commits_now() -> None:
    """Its steps are smaller than those it left behind; the server's clock says which are newer."""
    entries = [listed("step-900", 1.0), listed("step-1000", 2.0), listed("step-950", 3.0)]
    assert outdated(entries, 1, 0) == ["step-1000", "step-900"]


def test_what_was_never_committed_goes_a_day_later() -> None:
    """Not before: another host may be at it still."""
    entries = [
        listed("old", 0.0, committed=False),
        listed("being-uploaded", DAY_S, committed=False),
        listed("marked", 0.0, committed=False, set_aside=True),
        listed("whole", DAY_S + 5),
    ]
    assert outdated(entries, 1, 7) == ["old"]
    assert outdated(entries[:3], 1, 7) == []  # nothing is committed: nothing goes


def test_a_marker_says_why(tmp_path: Path, remote: Remote) -> None:
    carried(save(tmp_path / "root", 7, mib=1), remote)
    tier = tier_of(remote, "llm")
    (found,) = tier.found()
    for _ in range(2):
        tier.set_aside(found, "chunk 3 does not match")
    assert tier.found() == []
    if isinstance(tier, PathTier):
        assert Path(found.path, SET_ASIDE).read_text() == "chunk 3 does not match"
