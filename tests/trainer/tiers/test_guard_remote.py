"""A whole training with two tiers: saved, copied, its disk lost, and resumed bit for bit from the slower one."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from powerguard.trainer import Guard
from powerguard.trainer.loop.endpoint import metrics
from powerguard.trainer.store.items import Parts
from powerguard.trainer.tiers import Remote, tier_of
from powerguard.wire import TriggerRequest
from tests.trainer.tiers.rig import S3Server, remote_of, state, until


class Training:
    """A state that is known at every step."""

    def __init__(self) -> None:
        self.weights = bytearray(state(0, mib=2))
        self.position = 0

    def step(self, number: int) -> None:
        self.weights[:] = state(number, mib=2)
        self.position = number

    def parts(self) -> Parts:
        return Parts(lambda: {"weights": self.weights, "position": self.position}, self._load)

    def _load(self, saved: Mapping[str, memoryview]) -> None:
        self.weights[:] = saved["weights"]
        self.position = int(saved["position"])  # type: ignore[call-overload] # a plain value comes back as it was


def trained(root: Path, remote: Remote, until_uploaded: Callable[[], object]) -> None:
    training = Training()
    with Guard(training.parts(), root, job="llm", remote=remote, socket=None, every_s=None) as guard:
        assert guard.restore() == 0
        for number in (1, 2, 3):
            training.step(number)
            guard.step(number)
        guard.requests.trigger(TriggerRequest(id="before-the-disk-dies"))
        training.step(4)
        guard.step(4)
        until(until_uploaded)


def test_an_upload_that_fails_shows_at_the_endpoint(tmp_path: Path) -> None:
    """Since when, and why: before the outage in which the second copy is missing."""
    training = Training()
    remote = str(tmp_path / "nas")
    with Guard(training.parts(), tmp_path / "disk", job="llm", remote=remote, socket=None, every_s=None) as guard:
        guard.requests.trigger(TriggerRequest(id="e"))
        guard.step(1)
        until(lambda: guard.requests.status().uploads_error)
        shown = guard.requests.status()
        assert shown.uploads_step is None
        assert "is not there (is it mounted?)" in shown.uploads_error
        assert 0 < (shown.uploads_failing_s or 0) < 60
        assert not metrics(guard.requests).endswith(b'upload_failing_seconds{job="llm"} 0.0\n')


def resumed(root: Path, remote: Remote) -> Training:
    training = Training()
    with Guard(training.parts(), root, job="llm", remote=remote, socket=None, every_s=None) as guard:
        assert guard.restore() == 4
    return training


def test_a_training_whose_disk_died_resumes_from_the_object_store(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    remote = remote_of(bucket, s3.url, tmp_path)
    trained(tmp_path / "disk", remote, lambda: tier_of(remote, "llm").found())
    shutil.rmtree(tmp_path / "disk")
    training = resumed(tmp_path / "disk", remote)
    assert (training.position, training.weights == state(4, mib=2)) == (4, True)


def test_a_training_whose_disk_died_resumes_from_the_nas(tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    remote = Remote(url=str(tmp_path / "nas"))
    trained(tmp_path / "disk", remote, lambda: tier_of(remote, "llm").found())
    shutil.rmtree(tmp_path / "disk")
    training = resumed(tmp_path / "disk", remote)
    assert (training.position, training.weights == state(4, mib=2)) == (4, True)
