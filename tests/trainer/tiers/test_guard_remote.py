"""A whole training with two tiers: saved, copied, its disk lost, and resumed bit for bit from the slower one."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from powerguard.trainer import Guard, StopTraining
from powerguard.trainer.loop.endpoint import metrics
from powerguard.trainer.store.items import Parts
from powerguard.trainer.tiers import Remote, tier_of
from powerguard.wire import After, TriggerRequest
from tests.trainer.tiers.rig import S3Server, hung, remote_of, state, until


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


def ended(root: Path, remote: str, **options: Any) -> Callable[[], list[int]]:  # noqa: ANN401 - as Guard takes them
    """Train two steps, the second one saved; return what finds the steps that lie in the tier."""
    training = Training()
    with Guard(training.parts(), root, job="llm", remote=remote, socket=None, every_s=None, **options) as guard:
        guard.step(1)
        training.step(2)
        guard.save(2)
    return lambda: [each.step for each in tier_of(Remote(url=remote), "llm").found()]


def test_a_training_that_ends_waits_for_the_copy_of_its_last_step(tmp_path: Path) -> None:
    """A disk that goes with its job, as in a cloud: the last hours of training must not go with it."""
    (tmp_path / "nas").mkdir()
    assert ended(tmp_path / "disk", str(tmp_path / "nas"))() == [2]


@pytest.mark.parametrize(
    ("mounted", "limit_s"),
    [(False, 60.0), (True, 0.5), (False, 0.0)],
    ids=["no mount", "a hung mount", "not to be waited for"],
)
def test_a_copy_that_cannot_be_made_holds_no_training_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, mounted: bool, limit_s: float
) -> None:
    """One that fails ends the wait, one that hangs meets its limit; both say where the last step lies."""
    nas = tmp_path / "nas"
    with ExitStack() as stack:
        if mounted:
            nas.mkdir()
            stack.enter_context(hung(nas))
        began_s = time.monotonic()
        ended(tmp_path / "disk", str(nas), remote_end_s=limit_s)
        assert time.monotonic() - began_s < 30.0
    assert "copy_unfinished step=2" in caplog.text


def test_a_training_that_ends_for_an_outage_waits_for_no_copy(tmp_path: Path) -> None:
    """The host is about to go: its daemon waits for the processes, and holds the uploads."""
    nas = tmp_path / "nas"
    nas.mkdir()
    began_s = time.monotonic()
    with hung(nas), pytest.raises(StopTraining):
        asked_to_exit(tmp_path / "disk", str(nas))
    assert time.monotonic() - began_s < 60.0


def asked_to_exit(root: Path, remote: str) -> None:
    parts = Training().parts()
    with Guard(parts, root, job="llm", conduct="exit", remote=remote, socket=None, every_s=None) as guard:
        guard.requests.trigger(TriggerRequest(id="e", after=After.EXIT))
        for number in range(1, 1000):
            guard.step(number)


@pytest.mark.parametrize("end", [ValueError("a bug"), KeyboardInterrupt()], ids=repr)
def test_a_training_that_ends_with_an_error_waits_for_no_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: BaseException
) -> None:
    """A launcher starts it again, or a person waits for the prompt: not for five minutes."""
    with pytest.raises(type(end)):
        failing(tmp_path / "disk", str(tmp_path / "nas"), end)
    assert "copy_unfinished" not in caplog.text


def failing(root: Path, remote: str, end: BaseException) -> None:
    with Guard(Training().parts(), root, job="llm", remote=remote, socket=None, every_s=None) as guard:
        guard.step(1)
        guard.save(1)
        raise end


@pytest.mark.parametrize(("last", "copies"), [("raise ValueError", False), ("", True)], ids=["an error", "in order"])
def test_a_process_that_ends_without_close_waits_for_a_copy_only_in_order(
    tmp_path: Path, last: str, *, copies: bool
) -> None:
    script = f"""
from powerguard.trainer import Guard
from powerguard.trainer.store.items import Parts
parts = Parts(lambda: {{"position": 1}}, lambda saved: None)
guard = Guard(parts, {str(tmp_path / "disk")!r}, job="llm", remote={str(tmp_path / "nas")!r}, socket=None)
guard.save(1)
{last}
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, "copy_unfinished" in ran.stderr) == (0 if copies else 1, copies), ran.stderr


def test_a_signal_after_the_last_step_ends_the_wait_for_a_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler ends the job, and kills it half a minute later."""
    remote = str(tmp_path / "nas")
    with Guard(
        Training().parts(), tmp_path / "disk", job="llm", remote=remote, socket=None, every_s=None, signals=True
    ) as guard:
        guard.step(1)
        guard.save(1)
        signal.raise_signal(signal.SIGTERM)
    assert "copy_unfinished" not in caplog.text


def test_uploads_that_are_held_are_the_reason_why_a_copy_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A training that comes to its end in an outage does not wait, and does not say that it has."""
    (tmp_path / "nas").mkdir()
    remote = str(tmp_path / "nas")
    with Guard(Training().parts(), tmp_path / "disk", job="llm", remote=remote, socket=None, every_s=None) as guard:
        guard.step(1)
        guard.requests.hold_uploads(lease_s=60.0)
        guard.save(1)
    assert "reason=uploads are held" in caplog.text


def test_a_training_that_only_resumed_from_a_nas_ends_although_that_hangs(tmp_path: Path) -> None:
    """What lies there need not be copied there, nor be looked at."""
    nas = tmp_path / "nas"
    nas.mkdir()
    ended(tmp_path / "disk", str(nas))
    shutil.rmtree(tmp_path / "disk")
    guard = Guard(Training().parts(), tmp_path / "disk", job="llm", remote=str(nas), socket=None, every_s=None)
    assert guard.restore() == 2
    closing = threading.Thread(target=guard.close, daemon=True)
    with hung(nas):
        closing.start()
        closing.join(10.0)
        assert not closing.is_alive()


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
