"""What a user does wrong is answered at once, and with a sentence."""

import errno
import logging
import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import powerguard.trainer
from powerguard.trainer import Buffer, Guard, Parts, StoreError
from powerguard.trainer.guard import second_tier
from powerguard.trainer.loop.checkpointer import WriteAbandoned
from powerguard.trainer.loop.endpoint import SOCKETS
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.folders import newest_in
from powerguard.trainer.store.manifest import committed_ms
from powerguard.trainer.store.store import Store
from powerguard.trainer.weights import read_weights
from powerguard.wire import ENDED, Loop, TriggerRequest
from tests.trainer.checkpoints import read
from tests.trainer.tiers.rig import environment
from tests.trainer.toy import short_folder


def test_a_save_after_the_end_is_refused_at_once(tmp_path: Path) -> None:
    """Whoever calls save() or step() behind the `with` is told so: nobody writes any more, nor comes for it."""
    refused: list[BaseException] = []
    with Guard(Parts(lambda: {"w": bytes(100)}, lambda _: None), tmp_path / "root", job="a", socket=None) as guard:
        guard.step(1)

    def late() -> None:
        try:
            guard.save(1)
        except WriteAbandoned as error:
            refused.append(error)

    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    thread.join(60)
    assert [str(error) for error in refused] == [
        "the guard is closed (step and save before close(), and before the end of its `with`)"
    ]
    with pytest.raises(WriteAbandoned, match=r"^the guard is closed"):
        guard.step(2)


def test_what_cannot_be_kept_is_named() -> None:
    """The name of the item is said, and what may be kept."""
    with pytest.raises(TypeError, match=r"^when: is neither a buffer nor a plain value"):
        list(Parts(lambda: {"when": object()}, lambda _: None).items())
    with pytest.raises(TypeError, match=r"^save\(\) of Parts returned None: must return a dict, name -> buffer"):
        list(Parts(lambda: None, lambda _: None).items())  # type: ignore[arg-type,return-value] # a forgotten return
    assert Buffer.json("x", [1]).size_bytes == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"job": ""}, r"^job='': must be the training's name"),
        ({"job": None}, r"^job=None: must be"),
        ({"job": "llm/7b"}, r"^job='llm/7b': must be a name without '/'"),
        ({"ranks": 2}, r"^ranks=2: must be a way to the others"),
        ({"every_s": "5m"}, r"^every_s='5m': must be seconds, more than 0"),
        ({"every_s": float("nan")}, r"^every_s=nan: must be"),
        ({"every_s": 0}, r"^every_s=0: must be"),
        ({"remote_every_s": None}, r"^remote_every_s=None: must be"),
        ({"remote_end_s": -1}, r"^remote_end_s=-1: must be seconds, 0 or more"),
        ({"keep": None}, r"^keep=None: must be how many"),
        ({"keep": 1}, r"^keep=1: keep at least 2"),
        ({"snapshots": 3}, r"^snapshots=3: must be how many states host memory holds, 1 or 2, or None$"),
        ({"conduct": "stop"}, r"^conduct='stop': must be one of continue, pause, exit$"),
        ({"state": {"w": b"1"}}, r"^state {'w': b'1'}: must have items\(\) and load\(\), as Parts"),
        ({"root": ""}, r"needs a root"),
        ({"root": "/dev/null"}, r"^/dev/null: cannot be made, for checkpoints: is not a folder"),
        ({"root": "/proc/none"}, r"^/proc/none: cannot be made, for checkpoints: No such file"),
    ],
)
def test_an_option_that_would_fail_at_a_step_is_refused_at_once(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(StoreError, match=expected):
        Guard(
            **{"state": Parts(dict, lambda _: None), "root": tmp_path / "root", "job": "a", "socket": None, **options}
        )


@pytest.mark.parametrize("url", ["s3://", "gs:///", "s3:///prefix"])
def test_a_second_tier_without_a_bucket_is_refused_at_once(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="names no bucket"):
        Guard(Parts(dict, lambda _: None), tmp_path, job="a", socket=None, remote=url)


def test_a_second_tier_that_is_the_first_is_refused_at_once(tmp_path: Path) -> None:
    """Each checkpoint would be its own second copy."""
    state = Parts(lambda: {"w": bytes(10)}, lambda _: None)
    with pytest.raises(StoreError, match=f"^remote='{tmp_path}/': its folder for this job is the root itself"):
        Guard(state, tmp_path / "a", job="a", socket=None, remote=f"{tmp_path}/")
    Guard(state, tmp_path / "b", job="a", socket=None, remote=tmp_path).close()


def test_a_path_may_begin_with_the_home_folder() -> None:
    """As in a shell: else a folder named `~` is made, which one does not want to remove by its name."""
    with short_folder() as home, environment(HOME=str(home)):
        (home / "token").write_text("Heron-Lamp-Seven-19")
        (home / "token").chmod(0o600)
        options: dict[str, Any] = {"socket": "~/a.sock", "port": 0, "token_file": "~/token"}
        with Guard(Parts(lambda: {"w": b"1"}, lambda _: None), "~/root", job="a", **options) as guard:
            assert guard.save(1).path.startswith(f"{home}/root/step-")
            assert (home / "a.sock").is_socket()
        with pytest.raises(StoreError, match=rf"^{home}/root/step-.*: was not written by TorchState"):
            read_weights("~/root")
        assert [path.name for path in home.iterdir() if path.is_dir()] == ["root"]


def test_a_second_tier_is_compared_with_the_home_folder_itself() -> None:
    """A root below `~` is no folder of that name: the second copy would be the first one. A bucket is never it."""
    user = pwd.getpwuid(os.geteuid())
    with short_folder() as home, environment(HOME=str(home)):
        for begin, folder in (("~", home), (f"~{user.pw_name}", Path(user.pw_dir))):
            root = f"{begin}/checkpoints/llm"
            with pytest.raises(StoreError, match=f"^remote='{folder}/checkpoints': its folder for this job is the"):
                second_tier(folder / "checkpoints", "llm", root)
            assert second_tier("s3://bucket/checkpoints", "llm", root).url == "s3://bucket/checkpoints"
            assert second_tier(folder / "nas", "llm", root).url == f"{folder}/nas"


@pytest.mark.parametrize("step", [-1, 2**62 + 1, 2**70])
def test_a_step_that_no_checkpoint_can_name_is_refused_at_once(tmp_path: Path, step: int) -> None:
    """At the first step, and not by the first checkpoint, which may be the emergency's."""
    with Guard(Parts(lambda: {"w": b"1"}, lambda _: None), tmp_path / "root", job="a", socket=None) as guard:
        for call in (guard.step, guard.save, guard.start_from):
            with pytest.raises(ValueError, match=rf"^step is {step}: must be from 0 to 2\*\*62"):
                call(step)
        with pytest.raises(ValueError, match=rf"^step is {step}"), guard.phase("eval", step=step):
            pass
        assert guard.requests.pace.loop is Loop.TRAIN
        guard.step(2**62)
        assert guard.save(2**62).step == 2**62


def test_a_step_that_an_earlier_epoch_had_too_is_saved_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that counts the steps of each epoch: an emergency was answered with the checkpoint of an earlier one."""
    state = bytearray(1)
    with Guard(Parts(lambda: {"w": state}, lambda _: None), tmp_path / "root", job="a", socket=None) as guard:
        for epoch in (1, 2, 3):
            state[0] = epoch
            guard.step(6)
            guard.requests.trigger(TriggerRequest(id=f"e{epoch}"))
            guard.step(7)
            while (answer := guard.requests.checkpoint(f"e{epoch}", wait_s=30)) is not None and not answer.durable:
                assert answer.phase not in ENDED
            with Store(tmp_path / "root", job="a", leader=False) as store:
                newest = max(store.found(), key=lambda found: committed_ms(found.manifest.created))
                assert bytes(read(newest, 0)["w"].data) == state
    assert caplog.text.count("step 6 follows step 7 without a restore()") == 1


def test_a_save_that_counts_epochs_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume would begin at step 3 with the state of step 5000."""
    with Guard(Parts(lambda: {"w": b"1"}, lambda _: None), tmp_path / "root", job="a", socket=None) as guard:
        guard.step(5000)
        assert guard.save(3, keep_as="best").step == 3
    assert caplog.text.count("step 3 follows step 5000 without a restore()") == 1


def test_the_package_is_typed_for_type_checkers() -> None:
    assert (Path(powerguard.trainer.__file__).parents[1] / "py.typed").is_file()


def test_a_function_that_saves_and_a_phase_are_held_to_their_word() -> None:
    with Guard(lambda _: None, job="a", socket=None) as guard:  # type: ignore[arg-type,return-value]
        with pytest.raises(TypeError, match=r"returned None, not a SavedCheckpoint"):
            guard.save(1)
        with (
            pytest.raises(StoreError, match=r"^loop='evaluation': must be one of train, eval"),
            guard.phase("evaluation"),
        ):
            pass


class Odd:
    """An item as a framework might make it by mistake."""

    def __init__(self, **odd: object) -> None:
        vars(self).update({"name": "w", "dtype": "uint8", "shape": (10,), "size_bytes": 10, **odd})

    def copy_to(self, target: memoryview) -> None:
        target[:] = bytes(len(target))


def test_a_state_of_odd_sizes_is_reported_at_its_first_step_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a number, negative, or not what the dtype says: named before a byte is written, and the last one stays."""
    items: list[Odd] = []
    state = Parts(dict, lambda _: None)
    state.items = lambda: items  # type: ignore[assignment,method-assign,return-value]
    for odd, expected in (
        ({"size_bytes": float("nan")}, "w: nan bytes in the shape (10,) do not describe a buffer"),
        ({"size_bytes": -4}, "w: -4 bytes in the shape"),
        ({"shape": (float("nan"),)}, "w: 10 bytes in the shape (nan,)"),
        ({"dtype": "float32"}, "item 'w' of 10 bytes is no 'float32' of that shape"),
    ):
        with Guard(state, tmp_path / "root", job="a", socket=None) as guard:
            items[:] = [Odd(size_bytes=Index(10), shape=(Index(10),))]  # as numpy and torch count
            good = guard.save(guard.restore() + 1)
            items[:] = [Odd(**odd)]
            guard.step(good.step + 1)
            assert (
                f"measuring the state failed: {'Store' if 'w:' in expected else 'Manifest'}Error: {expected}"
                in caplog.text
            )
            with pytest.raises(StoreError) as caught:
                guard.save(Index(good.step + 1))  # type: ignore[arg-type]
            assert expected in str(caught.value)
            assert newest_in(tmp_path / "root") == good
            with pytest.raises(TypeError, match=r"^step is 1\.5: must be a whole number"):
                guard.step(1.5)  # type: ignore[arg-type]


class Index:
    """A whole number that is no int, as a numpy scalar or a tensor is none."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


def test_where_no_daemon_was_installed_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, and nobody believes that it is looked after; who wants no socket says so, and hears nothing."""
    if SOCKETS.exists():
        pytest.skip(f"{SOCKETS} is there")
    parts = Parts(lambda: {"w": bytes(10)}, lambda _: None)
    for options in ({"socket": None}, {}):
        assert not caplog.messages
        with Guard(parts, tmp_path, job="a", **options) as guard:  # type: ignore[arg-type]
            guard.step(1)
    assert caplog.messages[0].startswith(
        f"this training cannot receive checkpoint requests: no folder {SOCKETS} (`systemd-"
    )


def test_failures_are_heard_where_no_logging_is_set_up() -> None:
    """No handler of ours keeps Python from showing warnings on stderr, which is all that a plain script has."""
    script = (
        "import logging, powerguard.trainer.guard\n"
        "logging.getLogger('powerguard.trainer').warning('checkpoint of step 7 failed')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert ended.stderr == "checkpoint of step 7 failed\n"


def test_a_log_handler_that_raises_costs_nothing_but_its_line(tmp_path: Path) -> None:
    """Such as one that wants the event loop of its thread: the thread that writes goes on, and no save waits for it."""
    outcomes: list[object] = []

    class Failing(Disk):
        def sync(self, descriptor: int) -> None:
            if not outcomes:
                raise OSError(errno.EIO, "broken")
            super().sync(descriptor)

    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record.getMessage())

    def saves() -> None:
        for step in (1, 2):
            try:
                outcomes.append(guard.save(step).step)
            except OSError as error:
                outcomes.append(error.errno)

    logger, handler = logging.getLogger("powerguard.trainer"), Raising()
    state = Parts(lambda: {"w": bytes(10)}, lambda _: None)
    guard = Guard(state, tmp_path, job="a", socket=None, disk=Failing())
    logger.addHandler(handler)
    try:
        thread = threading.Thread(target=saves, daemon=True)
        thread.start()
        thread.join(60)
        assert outcomes == [errno.EIO, 2]
        guard.close()
    finally:
        logger.removeHandler(handler)
