"""Every host of a job copies the same checkpoints, though no two clocks agree and no word passes between them."""

from dataclasses import replace
from pathlib import Path

from powerguard.trainer.loop.writer import UploadSchedule
from powerguard.trainer.store.folders import SavedCheckpoint
from powerguard.trainer.store.manifest import MANIFEST, Manifest
from powerguard.trainer.tiers.base import period_of
from powerguard.trainer.tiers.upload import Uploader
from tests.trainer.tiers.rig import save


def dated(saved: SavedCheckpoint, created: str) -> SavedCheckpoint:
    """The same checkpoint, made at another time."""
    path = Path(saved.path, MANIFEST)
    manifest = replace(Manifest.parse(path.read_bytes()), created=created)
    path.write_bytes(manifest.to_json())
    return replace(saved, manifest_digest=manifest.digest)


def test_a_period_is_reported_by_the_manifest(tmp_path: Path) -> None:
    saved = save(tmp_path, 7, mib=1)
    found = [
        period_of(dated(saved, created), 1800.0)
        for created in ("2026-01-01T00:00:00+00:00", "2026-01-01T00:29:59Z", "2026-01-01T00:30:00+00:00")
    ]
    assert found[0] is not None
    assert found == [found[0], found[0], found[0] + 1]


def test_what_cannot_be_read_is_not_copied(tmp_path: Path) -> None:
    saved = save(tmp_path, 7, mib=1)
    assert period_of(dated(saved, "yesterday"), 1800.0) is None
    assert period_of(dated(saved, "9999-12-31T23:59:59+00:00"), 1e-300) is None
    assert period_of(replace(saved, path=str(tmp_path / "none")), 1800.0) is None


def test_the_first_of_each_period_is_copied_and_what_was_asked_for(tmp_path: Path) -> None:
    """Two hosts, one of which began a period earlier: from the first common one on they copy the same."""
    (tmp_path / "nas").mkdir()
    offered: dict[str, list[int]] = {"a": [], "b": []}
    for host, first in (("a", 0), ("b", 3)):
        uploader = Uploader(str(tmp_path / "nas"), job=host)
        uploader.hold()
        uploads = UploadSchedule(uploader, every_s=1800.0)
        saved = save(tmp_path / host, 7, mib=1)
        for number in range(first, 16):  # one every five minutes
            saved = dated(saved, f"2026-01-01T{number // 12:02d}:{number * 5 % 60:02d}:07Z")
            uploader._next = None
            uploads.offer(saved, requested=number == 9)
            if uploader._next is not None:
                offered[host].append(number)
        uploads.close()
    assert offered == {"a": [0, 6, 9, 12], "b": [3, 6, 9, 12]}


def test_a_clock_that_was_ahead_holds_up_no_copies(tmp_path: Path) -> None:
    """A host that comes back may take local time for UTC until NTP corrects it; later commits are 1 ms apart then."""
    (tmp_path / "nas").mkdir()
    uploader = Uploader(str(tmp_path / "nas"), job="llm")
    uploader.hold()
    now_s, offered = 0.0, []
    uploads = UploadSchedule(uploader, every_s=1800.0, clock=lambda: now_s)
    saved = save(tmp_path / "root", 7, mib=1)
    for number in range(30):  # one every five minutes
        saved = dated(saved, f"2026-01-01T08:00:00.{number:03d}Z")
        uploader._next = None
        uploads.offer(saved, requested=False)
        if uploader._next is not None:
            offered.append(number)
        now_s += 300.0
    uploads.close()
    assert offered == [0, 12, 24]
