"""Trainers that know nothing of us: processes that save at a signal, programs, and what appears in a folder."""

import asyncio
import contextlib
import io
import itertools
import json
import os
import shutil
import signal as numbers
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pydantic import ValidationError

from powerguard.clock import boottime_s
from powerguard.core.model.actions import Conduct, PauseTrainer, ResumeTrainer, TriggerCheckpoint
from powerguard.core.model.events import CheckpointProgress
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import run_child
from powerguard.effectors.signals.effector import SignalHelper
from powerguard.effectors.trainer.checkpoint import QUIET_S
from powerguard.effectors.trainer.effector import TrainerEffector
from powerguard.effectors.trainer.newest_child import _EVERY_S, _GROWING, _vouched, _Watch
from powerguard.effectors.trainer.newest_child import main as newest_child
from powerguard.effectors.trainer.options import (
    AnyTrainerOptions,
    CommandTrainerOptions,
    SignalTrainerOptions,
    TrainerOptions,
)
from powerguard.effectors.trainer.unmodified import SignalRun
from powerguard.settings.schema import Settings
from powerguard.trainer.seal.folder import seal
from tests.cli.checkpoint_sites import save
from tests.peers.jobs import Jobs

TRAINER = """
    import signal, sys, time, pathlib
    folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
    def write(*_):
        made = folder / "checkpoint-77"
        made.mkdir()
        for part in range(4):
            (made / f"{part}.bin").write_bytes(b"x" * 1000)
            time.sleep(0.1)
        if how == "exit":
            sys.exit(0)
    if how != "deaf":
        signal.signal(signal.SIGUSR1, write)
        signal.signal(signal.SIGTERM, write)
    else:
        signal.signal(signal.SIGUSR1, lambda *_: None)
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
"""


class Helper:
    """Signals one process, as powerguard-signal signals a unit's; keeps what it was asked."""

    def __init__(self, process: subprocess.Popen[str] | None = None, refusal: str = "") -> None:
        self.asked: list[tuple[str, str]] = []
        self._process = process
        self._refusal = refusal

    async def checkpoint(self, unit: str, signal: str) -> dict[str, Any]:
        self.asked.append((unit, signal))
        if self._refusal:
            raise EffectorError(self._refusal)
        if self._process is not None:
            self._process.send_signal(numbers.Signals[f"SIG{signal}"])
        return {"ok": True, "signalled": 1}


@contextlib.contextmanager
def training(folder: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", textwrap.dedent(TRAINER), str(folder), how]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def by_signal(folder: Path | None, **more: object) -> SignalTrainerOptions:
    given: dict[str, object] = {"kind": "signal", "name": "llm", "unit": "unmodified.service", "signal": "USR1", **more}
    if folder is not None:
        given["checkpoint_dir"] = str(folder)
    return SignalTrainerOptions.model_validate(given)


def by_command(*command: str, **more: object) -> CommandTrainerOptions:
    given = {"kind": "command", "name": "llm", "command": list(command), **more}
    return CommandTrainerOptions.model_validate(given)


def order(limit_s: float = 60.0) -> TriggerCheckpoint:
    return TriggerCheckpoint(
        id="a1",
        by_s=boottime_s() + limit_s,
        trainer="llm",
        reason="on_battery",
        after=Conduct.CONTINUE,
        outage="o1",
    )


def nobody_knows(_unit: str) -> None:
    """As where no control groups are told: the host's own are other tests' too, which come and go."""


async def asked(
    options: SignalTrainerOptions | CommandTrainerOptions, helper: Helper | None = None, limit_s: float = 60.0
) -> tuple[dict[str, Any], list[str]]:
    stages: list[str] = []

    def publish(news: object) -> None:
        if isinstance(news, CheckpointProgress) and news.stage not in stages:
            stages.append(news.stage)

    made = TrainerEffector([options], clock=boottime_s, publish=publish, helper=helper, alive=nobody_knows)
    return dict(await made.carry_out(order(limit_s))), stages


# --- By a signal ------------------------------------------------------------------------------------------------------


async def test_what_a_signal_brings_about_is_found_when_it_is_left_alone(tmp_path: Path) -> None:
    """A folder that is still being written is no checkpoint yet."""
    (tmp_path / "checkpoint-70").mkdir()
    (tmp_path / "checkpoint-70" / "old.bin").write_bytes(b"old")
    os.utime(tmp_path / "checkpoint-70" / "old.bin", (0, 0))
    with training(tmp_path, "go on") as process:
        helper = Helper(process)
        detail, stages = await asked(by_signal(tmp_path), helper)
    assert helper.asked == [("unmodified.service", "USR1")]
    assert (detail["step"], detail["bytes"], detail["path"]) == (77, 4000, str(tmp_path / "checkpoint-77"))
    assert (detail["native"], detail["verified"], detail["at_paused_step"], detail["flushed"]) == (
        False,
        False,
        False,
        True,
    )
    assert stages == ["signalling", "waiting_folder", "flushing"]


async def test_a_refused_signal_is_reported_in_the_helpers_words(tmp_path: Path) -> None:
    with pytest.raises(EffectorError, match="is not in /etc/powerguard/signals"):
        await asked(by_signal(tmp_path), Helper(refusal="unmodified.service USR1: is not in /etc/powerguard/signals"))
    with pytest.raises(EffectorError, match="no signal helper here"):
        await asked(by_signal(tmp_path))


async def test_a_deaf_trainer_ends_at_its_time(tmp_path: Path) -> None:
    with (
        training(tmp_path, "deaf") as process,
        pytest.raises(EffectorError, match=r"no newer checkpoint in .* within 1 s"),
    ):
        await asked(by_signal(tmp_path, max_checkpoint_s=1.0, checkpoint_s=1.0), Helper(process))


async def test_without_a_folder_the_configured_time_is_waited(tmp_path: Path) -> None:
    """Nobody can know more; it is told as unverified."""
    began_s = time.perf_counter()
    detail, stages = await asked(by_signal(None, max_checkpoint_s=1.5, checkpoint_s=1.0), Helper())
    assert time.perf_counter() - began_s >= 1.4
    assert (detail["verified"], detail["path"]) == (False, "")
    assert stages == ["signalling", "waiting"]


@pytest.mark.parametrize("how", ["exit", "deaf"])
async def test_one_that_ends_at_the_signal(tmp_path: Path, how: str) -> None:
    """As Megatron and Transformers do: saved and gone; or gone at once, without having saved."""
    with training(tmp_path, how) as process:
        helper = Helper(process)
        run = SignalRun(
            common=by_signal(tmp_path),
            where="unmodified.service",
            action=order(),
            clock=boottime_s,
            publish=lambda _: None,
            spawn=run_child,
            options=by_signal(tmp_path, signal="TERM"),
            helper=helper,
            alive=lambda: process.poll() is None,
        )
        if how == "exit":
            assert dict(await run.run())["step"] == 77
        else:
            with pytest.raises(EffectorError, match="ended at SIGTERM, without a newer checkpoint"):
                await run.run()


async def test_one_that_has_ended_before_the_first_look(tmp_path: Path) -> None:
    """No look is begun then, and none is left behind."""
    helper = Helper()
    run = SignalRun(
        common=by_signal(tmp_path),
        where="unmodified.service",
        action=order(),
        clock=boottime_s,
        publish=lambda _: None,
        spawn=run_child,
        options=by_signal(tmp_path, signal="TERM"),
        helper=helper,
        alive=lambda: not helper.asked,
    )
    with pytest.raises(EffectorError, match="ended at SIGTERM, without a newer checkpoint"):
        await run.run()


async def test_nobody_there_is_not_waited_for(tmp_path: Path) -> None:
    """The battery is not burnt for a job that does not run."""
    helper = Helper()
    run = SignalRun(
        common=by_signal(tmp_path),
        where="unmodified.service",
        action=order(),
        clock=boottime_s,
        publish=lambda _: None,
        spawn=run_child,
        options=by_signal(tmp_path),
        helper=helper,
        alive=lambda: False,
    )
    with pytest.raises(EffectorError, match="has no process"):
        await run.run()
    assert helper.asked == []


async def test_out_of_time_is_reported_before_the_bulkhead_does(tmp_path: Path) -> None:
    for limit_s in (2.0, 20.0):  # the second, where the first look took most of the first to start
        with pytest.raises(EffectorError) as error:
            async with asyncio.timeout(60):
                await asked(by_signal(tmp_path), Helper(), limit_s=limit_s)
        if "waiting_folder" in str(error.value):
            break
    assert "out of time: its checkpoint is still waiting_folder" in str(error.value)
    assert error.value.timed_out
    with pytest.raises(EffectorError, match="was killed") as error:
        async with asyncio.timeout(60):
            await asked(by_command("sleep", "60"), limit_s=2.0)
    assert error.value.timed_out


# --- By a program -----------------------------------------------------------------------------------------------------


async def test_a_program_that_saves(tmp_path: Path) -> None:
    """It is told what it is for, and what it has sealed counts as verified."""
    folder = tmp_path / "checkpoint-5"
    code = (
        "import os, sys; from pathlib import Path; from powerguard.trainer.seal import seal; f = Path(sys.argv[1]);"
        "f.mkdir(); (f / 'a').write_text(os.environ['POWERGUARD_REASON'] + os.environ['POWERGUARD_EVENT']); seal(f)"
    )
    detail, stages = await asked(by_command(sys.executable, "-c", code, str(folder), checkpoint_dir=str(tmp_path)))
    assert (detail["step"], detail["verified"], detail["path"]) == (5, True, str(folder))
    assert (folder / "a").read_text() == "on_batteryo1"
    assert "flushed" not in detail
    assert stages == ["running_command"]


async def test_a_program_that_says_done_is_believed_as_far_as_that_goes(tmp_path: Path) -> None:
    detail, stages = await asked(by_command("true", checkpoint_dir=str(tmp_path)))
    assert (detail["verified"], detail["path"], detail["flushed"]) == (False, "", True)
    assert stages == ["running_command", "flushing"]
    detail, stages = await asked(by_command("true"))
    assert stages == ["running_command"]


async def test_a_program_that_leaves_a_child_at_work_is_not_believed_to_be_done(tmp_path: Path) -> None:
    """It is awaited, since it may be what saves; it is neither killed nor started a second time."""
    script = f'echo . >>"{tmp_path}/starts"; sleep 60 & echo $! >"{tmp_path}/left"'
    try:
        detail, _ = await asked(by_command("sh", "-c", script, max_checkpoint_s=5.0, checkpoint_s=1.0))
    finally:
        os.kill(int((tmp_path / "left").read_text()), numbers.SIGKILL)  # it still runs, or this raises
    assert (detail["confirmed"], (tmp_path / "starts").read_text()) == (False, ".\n")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["sh", "-c", "echo first; echo '  the disk is full\x1b[31m' >&2; exit 3"], r"sh ended with status 3:   the d"),
        (["sh", "-c", "echo only this; exit 1"], "status 1: only this"),
        (["sh", "-c", "kill -9 $$"], "signal 9"),
        (["/no/such/program"], "cannot be started: No such file"),
        (["sh", "-c", "echo at work; sleep 60"], "did not end within 1 s, and was killed"),
    ],
)
async def test_a_program_that_fails_says_why(command: list[str], expected: str) -> None:
    most_s = 1.0 if "within 1 s" in expected else 40.0
    with pytest.raises(EffectorError) as error:
        await asked(by_command(*command, max_checkpoint_s=most_s, checkpoint_s=1.0))
    assert expected.replace("  ", "") in str(error.value).replace("  ", "")
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        SignalTrainerOptions.model_validate(
            {"kind": "signal", "name": "llm", "unit": "a.service", "signal": "TERM", "after": "exit"}
        ),
        CommandTrainerOptions.model_validate({"kind": "command", "name": "llm", "command": ["false"], "after": "exit"}),
        TrainerOptions.model_validate(
            {
                "name": "llm",
                "url": "http://127.0.0.1:9",
                "fallback": {"kind": "signal", "unit": "a.service", "signal": "TERM"},
            }
        ),
    ],
    ids=["signal", "command", "fallback"],
)
@pytest.mark.parametrize(("reason", "after"), [("on_battery", Conduct.CONTINUE), ("drill", Conduct.PAUSE)])
async def test_what_would_end_training_is_not_asked_while_it_is_to_go_on(
    options: TrainerOptions | SignalTrainerOptions | CommandTrainerOptions, reason: str, after: Conduct
) -> None:
    """An operator's `powerguard checkpoint`, a precaution, or a drill must not cost the training."""
    helper = Helper()
    made = TrainerEffector([options], clock=boottime_s, publish=lambda _: None, helper=helper)
    with pytest.raises(EffectorError, match="saves only when it ends, but training is to continue: not asked"):
        await made.carry_out(replace(order(), reason=reason, after=after))
    await made.close()
    assert helper.asked == []


# --- What else is asked of them ---------------------------------------------------------------------------------------


async def test_they_cannot_be_paused_and_never_stand_for_us(tmp_path: Path) -> None:
    made = TrainerEffector([by_signal(tmp_path)], clock=boottime_s, publish=lambda _: None)
    assert made.names == ("llm",)
    resume = ResumeTrainer(id="r", by_s=boottime_s() + 5, trainer="llm", outage="o1")
    assert dict(await made.carry_out(resume)) == {"native": False, "resumed": False}
    with pytest.raises(EffectorError, match="cannot be paused"):
        await made.carry_out(PauseTrainer(id="p", by_s=boottime_s() + 5, trainer="llm", outage="o1"))


@pytest.mark.parametrize("alive", [True, False, None])
async def test_they_are_seen_as_what_they_do(tmp_path: Path, *, alive: bool | None) -> None:
    seen: list[Any] = []
    options: list[AnyTrainerOptions] = [
        by_signal(tmp_path, after="exit"),
        by_command("true", name="other", disk="nvme"),
    ]
    made = TrainerEffector(options, clock=boottime_s, publish=seen.append, alive=lambda _: alive)
    await made.look()
    assert [(each.trainer, each.alive, each.conduct, each.disk) for each in seen] == [
        ("llm", alive is not False, Conduct.EXIT, ""),
        ("other", True, Conduct.CONTINUE, "nvme"),
    ]


# --- What appears -----------------------------------------------------------------------------------------------------


def newest(
    folder: Path, since_ns: int, limit_s: float, quiet_s: float = 1.0, happens: Iterator[object] | None = None
) -> dict[str, Any] | None:
    """Look as `newest_child` does, for so many seconds that do not pass. happens: a step of it between two looks."""
    watch, looks = _Watch(folder, since_ns=since_ns, quiet_s=quiet_s), itertools.count()
    while (now_s := next(looks) * _EVERY_S) <= limit_s:
        found = watch.look(now_s)
        if found is not None:
            return dict(json.loads(found.to_json()))
        if happens is not None:
            next(happens, None)
    return None


def test_native_sealed_and_plain_are_found(tmp_path: Path) -> None:
    since_ns = time.time_ns() - 1_000_000_000
    for name in ("native", "sealed", "plain", "self"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path / "plain", since_ns, 0.0) is None
    save(tmp_path / "native", 9)
    found = newest(tmp_path / "native", since_ns, 0.0)
    assert found is not None
    assert (found["step"], found["verified"]) == (9, True)
    (tmp_path / "sealed" / "iter_0000012").mkdir()
    (tmp_path / "sealed" / "iter_0000012" / "a").write_text("a")
    seal(tmp_path / "sealed" / "iter_0000012")
    found = newest(tmp_path / "sealed", since_ns, 0.0)
    assert found == {"step": 12, "path": str(tmp_path / "sealed/iter_0000012"), "size_bytes": 1, "verified": True}
    (tmp_path / "self" / "a").write_text("a")
    seal(tmp_path / "self")
    assert newest(tmp_path / "self", since_ns, 0.0) is not None
    (tmp_path / "plain" / "epoch=1-step=34.ckpt").write_text("abc")
    assert newest(tmp_path / "plain", since_ns, 0.0) is None  # it may still be written
    found = newest(tmp_path / "plain", since_ns, 40.0)
    assert found is not None
    assert (found["step"], found["size_bytes"], found["verified"]) == (34, 3, False)


def test_the_program_says_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing there, still growing, found: three statuses, and an answer with the last one only."""
    listed = []
    for made in (lambda: None, lambda: (tmp_path / "step_3.pt").write_bytes(b"\0"), lambda: save(tmp_path, 4)):
        made()
        code = newest_child([str(tmp_path), "0", "0", "1.0"])
        listed.append((code, json.loads(capsys.readouterr().out or "{}").get("step")))
    assert listed == [(1, None), (_GROWING, None), (0, 4)]


def test_what_goes_while_it_is_looked_at_is_passed_over(tmp_path: Path) -> None:
    """A training prunes when it likes: the search goes on, and finds what has come instead."""
    save(tmp_path, 1)

    def prune(frame: FrameType, event: str, found: object) -> None:
        if event == "return" and frame.f_code is _vouched.__code__ and found:
            sys.setprofile(None)
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            save(tmp_path, 2)

    sys.setprofile(prune)
    try:
        newest_file = newest(tmp_path, 0, 5.0)
    finally:
        sys.setprofile(None)
    assert newest_file is not None
    assert newest_file["step"] == 2


def test_where_somebody_vouches_nothing_else_counts(tmp_path: Path) -> None:
    """A job that seals its checkpoints has not finished one that is not sealed yet."""
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "a").write_text("a")
    seal(tmp_path / "checkpoint-1")
    since_ns = time.time_ns() + 1
    os.utime(tmp_path / "checkpoint-1" / "SEAL.json", (1, 1))
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "a").write_text("a")
    os.utime(tmp_path / "checkpoint-2" / "a", ns=(since_ns, since_ns))
    assert newest(tmp_path, since_ns, 2.5) is None
    seal(tmp_path / "checkpoint-2")
    assert newest(tmp_path, since_ns, 0.0) is not None


BLOCK = bytes(range(256)) * 40
HALT = 15
"""So many looks make three seconds."""


def grows(path: Path, blocks: int = HALT) -> Iterator[None]:
    for _ in range(blocks):
        with path.open("ab") as file:
            file.write(BLOCK)
        yield


def saves(path: Path, how: str) -> Iterator[None]:
    """A training that saves for three seconds."""
    if how == "grows":
        yield from grows(path)
    elif how == "in turn":
        path.mkdir()
        for part in ("model.bin", "optimizer.bin", "random.bin"):
            yield from grows(path / part, HALT // 3)
    elif how == "renamed":
        unborn = path.with_name(f"{path.name}.tmp")
        yield from grows(unborn)
        unborn.rename(path)
    else:
        if how == "zip":
            made = io.BytesIO()
            with zipfile.ZipFile(made, "w") as archive:
                archive.writestr("data/0", BLOCK * 10)
            whole, first = made.getvalue(), 50_000
        else:
            whole, first = b"x" * (1 << 20), 0
        with path.open("wb", buffering=0) as file:
            if how == "preset":
                file.truncate(len(whole))
            file.write(whole[:first])
            for _ in range(HALT):
                yield
            file.write(whole[first:])


NAMES = [
    "ckpt_68.pt",
    "pytorch_model.bin",
    "epoch_242.ckpt",
    "model_68",
    "68",
    "ckpt-68",
    "checkpoint_step_68",
    "model",
]


def stamp(folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """The newest stamp before a request, as the daemon takes it."""
    assert newest_child([str(folder)]) == 0
    since_ns = int(capsys.readouterr().out)
    time.sleep(0.02)  # what comes now has a newer one, however coarse the file system's clock
    return since_ns


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "grows") for name in NAMES), *(("ckpt_68", how) for how in ("in turn", "renamed", "preset", "zip"))],
)
def test_a_log_line_is_no_checkpoint_while_the_real_one_grows(
    tmp_path: Path, name: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log is quiet at once, and the file is not: a torn file must never be taken for the checkpoint."""
    (tmp_path / "ckpt_50.pt").write_bytes(bytes(range(256)))
    since_ns = stamp(tmp_path, capsys)
    (tmp_path / "train.log").write_text("POST\n")
    (tmp_path / "heard").write_text("POST /api/v1/trigger_checkpoint\n" * 10)
    if name in ("pytorch_model.bin", "model"):  # a name without a number counts only if no name has one
        (tmp_path / "ckpt_50.pt").unlink()
        (tmp_path / "figures.npy").write_bytes(bytes(range(256)))
    ended = False

    def training() -> Iterator[None]:
        nonlocal ended
        yield from saves(tmp_path / name, how)
        ended = True

    found = newest(tmp_path, since_ns, 40.0, happens=training())
    assert ended, f"reported while it was still being written: {found}"
    assert found is not None
    assert (found["path"], found["verified"]) == (str(tmp_path / name), False)
    whole = {"preset": 1 << 20, "in turn": HALT * len(BLOCK)}
    assert found["size_bytes"] == (whole.get(how) or (tmp_path / name).stat().st_size)


@pytest.mark.parametrize("name", ["train.log", "slurm-68.out", "events.out.tfevents.1.host", "step_68.json", "latest"])
def test_a_log_or_a_small_text_alone_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("step 68\n")
    assert newest(tmp_path, 0, 1.5, quiet_s=0.5) is None


def test_a_large_text_counts_only_under_a_checkpoints_name(tmp_path: Path) -> None:
    """Some models are text; so is a log without a known name."""
    (tmp_path / "heard").write_text("POST\n" * 300_000)
    assert newest(tmp_path, 0, 1.5, quiet_s=0.5) is None
    (tmp_path / "model_68.json").write_text("[1.5]\n" * 300_000)
    found = newest(tmp_path, 0, 40.0, quiet_s=0.5)
    assert found is not None
    assert found["step"] == 68


def test_a_log_that_is_written_holds_up_none(tmp_path: Path) -> None:
    """It is written all the time; where things are named by their step, only those count."""
    since_ns = time.time_ns() - 1_000_000_000
    (tmp_path / "train.log").write_text("quiet for now")
    (tmp_path / "model.pt").write_bytes(b"x" * 100)

    def chatter() -> Iterator[None]:
        while True:
            for name in ("train.log", "heard"):
                with (tmp_path / name).open("a") as file:
                    file.write("step\n")
            yield

    found = newest(tmp_path, since_ns, 40.0, happens=chatter())
    assert found is not None
    assert found["path"] == str(tmp_path / "model.pt")
    (tmp_path / "step_5.pt").write_bytes(b"old")
    os.utime(tmp_path / "step_5.pt", (1, 1))
    assert newest(tmp_path, since_ns, 3.0, happens=chatter()) is None


def test_a_disk_that_pauses_has_not_saved(tmp_path: Path) -> None:
    """A busy one takes nothing for five seconds; the folder has to be quiet for longer."""
    ended = False

    def training() -> Iterator[object]:
        nonlocal ended
        for _ in range(3):
            yield from grows(tmp_path / "ckpt_68.pt", 2)
            yield from range(int(5.0 / _EVERY_S))
        ended = True

    assert newest(tmp_path, 0, 60.0, QUIET_S, happens=training()) is not None
    assert ended


def test_a_picture_of_a_step_is_no_checkpoint_and_hides_none(tmp_path: Path) -> None:
    """Trainings draw as they go: `val_epoch_3.png` has a step in its name, and `last.ckpt` has none."""
    (tmp_path / "val_epoch_3.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    assert newest(tmp_path, 0, 1.5, quiet_s=0.5) is None
    (tmp_path / "last.ckpt").write_bytes(bytes(range(256)))
    found = newest(tmp_path, 0, 40.0, quiet_s=0.5)
    assert found is not None
    assert found["path"] == str(tmp_path / "last.ckpt")


@pytest.mark.parametrize("name", ["last.ckpt", "emergency.pt", "checkpoint_latest.pth", "interrupted.pt"])
def test_a_name_that_is_overwritten_counts_beside_steps(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a training saves at a signal often has no step in its name."""
    (tmp_path / "ckpt_100.pt").write_bytes(b"\0old")
    (tmp_path / name).write_bytes(b"\0older")
    since_ns = stamp(tmp_path, capsys)
    assert newest(tmp_path, since_ns, 1.0, quiet_s=0.5) is None
    (tmp_path / name).write_bytes(b"\0new")
    found = newest(tmp_path, since_ns, 40.0, quiet_s=0.5)
    assert found is not None
    assert found["path"] == str(tmp_path / name)


def safetensors(tensor_bytes: int) -> bytes:
    head = json.dumps({"__metadata__": {"a": "b"}, "w": {"dtype": "U8", "data_offsets": [0, tensor_bytes]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(range(1, 256)) * (tensor_bytes // 255)


WHOLE = safetensors(25_500)


@pytest.mark.parametrize(
    ("before", "first", "then"),
    [
        ({}, {"__0_0.distcp": b"\0a", "__1_0.distcp": b"\0a"}, {".metadata": b"\x80\4"}),
        ({".metadata": b"\x80\4old"}, {"__0_0.distcp": b"\0a"}, {".metadata": b"\x80\4new"}),
        (
            {},
            {"model-00001-of-00002.safetensors": WHOLE, "config.json": b"{}"},
            {"model-00002-of-00002.safetensors": WHOLE},
        ),
        ({}, {"pytorch_model-00002-of-00002.bin": b"\0a"}, {"pytorch_model-00001-of-00002.bin": b"\0a"}),
        ({}, {"model.safetensors": WHOLE[:-1]}, {"model.safetensors": WHOLE}),
        ({}, {"model.safetensors": WHOLE[:40]}, {"model.safetensors": WHOLE}),
        ({}, {"model.safetensors": WHOLE[:4]}, {"model.safetensors": WHOLE}),
    ],
    ids=["dcp", "dcp over an old one", "part 1", "part 2", "a byte short", "in its header", "in its first bytes"],
)
def test_a_part_is_no_checkpoint_however_quiet_it_is(
    tmp_path: Path,
    before: dict[str, bytes],
    first: dict[str, bytes],
    then: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank that waits for another, or a file server that hangs, is silent for longer than the quiet time."""
    folder = tmp_path / "checkpoint-68"
    folder.mkdir()
    for name, content in before.items():
        (folder / name).write_bytes(content)
    since_ns = stamp(tmp_path, capsys)
    for name, content in first.items():
        (folder / name).write_bytes(content)
    assert newest(tmp_path, since_ns, 1.5, quiet_s=0.3) is None
    for name, content in then.items():
        (folder / name).write_bytes(content)
    found = newest(tmp_path, since_ns, 40.0, quiet_s=0.3)
    assert found is not None
    assert (found["path"], found["step"]) == (str(folder), 68)


def test_what_is_no_safetensors_header_says_nothing_of_its_length(tmp_path: Path) -> None:
    """A file of another kind under that name is judged by its quiet alone."""
    heads = (b"{}", b'{"w": 1}', b'{"w": {"data_offsets": ["x", null]}}', b"[" * 5000, b"\xff" * 30)
    for number, head in enumerate(heads):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
        assert newest(tmp_path / f"{number}", 0, 40.0, quiet_s=0.3) is not None
    (tmp_path / "0" / "model.safetensors").write_bytes(b"\xff" * 100)
    assert newest(tmp_path / "0", 0, 40.0, quiet_s=0.3) is not None


def test_the_folders_own_clock_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file server's clock may be behind or ahead of ours: what was there before the request is never the answer."""
    for ahead_s in (-3600, 3600):
        old, new = tmp_path / f"ckpt_{ahead_s + 4000}.pt", tmp_path / f"ckpt_{ahead_s + 4001}.pt"
        old.write_bytes(b"\0old")
        os.utime(old, (time.time() + ahead_s,) * 2)
        since_ns = stamp(tmp_path, capsys)
        assert newest(tmp_path, since_ns, 1.0, quiet_s=0.5) is None
        new.write_bytes(b"\0new")
        os.utime(new, (time.time() + ahead_s + 1,) * 2)
        found = newest(tmp_path, since_ns, 40.0, quiet_s=0.5)
        assert found is not None
        assert found["path"] == str(new)


def test_what_changes_while_it_is_watched_is_new_whatever_its_stamp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host that came up with a wrong date has left a file of next year: stamps are then of no use."""
    (tmp_path / "ckpt_1.pt").write_bytes(b"\0old")
    os.utime(tmp_path / "ckpt_1.pt", (time.time() + 1e7,) * 2)
    since_ns = stamp(tmp_path, capsys)

    def training() -> Iterator[object]:
        yield from range(3)
        yield (tmp_path / "ckpt_2.pt").write_bytes(b"\0new")

    found = newest(tmp_path, since_ns, 40.0, happens=training())
    assert found is not None
    assert found["step"] == 2


@pytest.mark.root
def test_a_folder_that_cannot_be_looked_at_is_reported(tmp_path: Path) -> None:
    """The daemon's user may have no right to it: that is for a person to mend."""
    (tmp_path / "folder").mkdir(mode=0o700)
    child = os.fork()
    if child == 0:
        code = 9
        try:
            os.setgroups([])
            os.setuid(65534)
            code = newest_child([str(tmp_path / "folder"), "0", "0", "0"])
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


@pytest.mark.root
@pytest.mark.peer("systemd-socket-activate", "setpriv")
async def test_the_whole_way_through_the_real_helper() -> None:
    """A unit's process of another user gets the signal that root has listed, and what it writes is found."""
    jobs = Jobs()
    try:
        unit = jobs.unit("signalled")
        jobs.rank("t", "catches", cgroup=jobs.cgroup(unit))
        jobs.allowed.write_text(f"{unit} USR1\n", encoding="ascii")
        with jobs.listening() as path:
            stages: list[object] = []
            made = TrainerEffector(
                [by_signal(jobs.sockets, unit=unit)],
                clock=boottime_s,
                publish=stages.append,
                helper=SignalHelper(str(path), limit_s=30.0),
            )
            detail = dict(await made.carry_out(order(40.0)))
        assert jobs.noted("t", "SIGUSR1")
        assert (detail["path"], detail["verified"]) == (f"{jobs.path('t')}.rank0.ckpt", False)
    finally:
        jobs.close()


def test_a_stamp_of_the_future_hides_no_new_seal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of notes from a host whose clock is days ahead: what is sealed after the request is newer all the same."""
    for number in (1, 2):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "a").write_text("a")
    seal(tmp_path / "checkpoint-1")
    (tmp_path / "notes.txt").write_text("x")
    ahead_s = time.time() + 3 * 86400.0
    os.utime(tmp_path / "notes.txt", (ahead_s, ahead_s))
    assert newest_child([str(tmp_path)]) == 0
    since_ns = int(capsys.readouterr().out)
    assert newest(tmp_path, since_ns, 0.0) is None
    time.sleep(0.02)
    seal(tmp_path / "checkpoint-2")
    found = newest(tmp_path, since_ns, 0.0)
    assert found is not None
    assert found["step"] == 2


@pytest.mark.parametrize("is_native", [False, True])
def test_what_is_vouched_for_during_the_watch_is_new_whatever_its_stamp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_native: bool
) -> None:
    """A host that came up with a wrong date has sealed a checkpoint of next year."""

    def saved(step: int) -> Path:
        if is_native:
            save(tmp_path, step)
            (manifest,) = tmp_path.glob(f"step-*{step}-*/MANIFEST.json")
            return manifest
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "a").write_text("a")
        seal(tmp_path / f"checkpoint-{step}")
        return tmp_path / f"checkpoint-{step}" / "SEAL.json"

    old = saved(41)
    os.utime(old, (time.time() + 1e7,) * 2)
    since_ns = stamp(tmp_path, capsys)

    def training() -> Iterator[object]:
        yield from range(3)
        yield old.parent.rename(tmp_path / f"old-{old.parent.name}")
        yield from range(3)
        yield saved(42)

    found = newest(tmp_path, since_ns, 10.0, happens=training())
    assert found is not None
    assert (found["step"], found["verified"]) == (42, True)


def test_a_seal_that_does_not_hold_is_none(tmp_path: Path) -> None:
    since_ns = time.time_ns() - 1_000_000_000
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "a").write_text("abc")
    seal(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "a").write_text("a")
    assert newest(tmp_path, since_ns, 0.0) is None
    assert newest(tmp_path / "gone", since_ns, 0.0) is None


async def test_the_child_is_a_program(tmp_path: Path) -> None:
    save(tmp_path, 3)
    argv = [sys.executable, "-m", "powerguard.effectors.trainer.newest_child", str(tmp_path), "0", "0", "0"]
    async with asyncio.timeout(70.0):
        ended = await run_child(argv, limit_s=60.0)
    assert json.loads(ended.stdout)["step"] == 3


# --- The settings -----------------------------------------------------------------------------------------------------


def settings_of(**trainer: object) -> Settings:
    given = {"mode": "dry-run", "ups": {"a": {"sources": [{"kind": "nut", "host": "h", "name": "a"}]}}}
    return Settings.model_validate({**given, "trainers": [{"name": "llm", **trainer}]})


def test_the_kind_says_how_and_is_http_where_none_stands() -> None:
    assert settings_of(url="unix:/a").trainers[0].kind == "http"
    assert settings_of(kind="signal", unit="a.service", signal="TERM").trainers[0].after == "continue"
    both = settings_of(kind="command", command=["a"], after="exit", size_bytes=100, write_bytes_per_s=10.0)
    assert (both.trainers[0].after, both.trainers[0].seed_s, both.trainers[0].socket_path) == ("exit", 20.0, None)


@pytest.mark.parametrize(
    ("trainer", "where", "why"),
    [
        ({"kind": "signal", "unit": "train", "signal": "USR1"}, "signal.unit", "string_pattern_mismatch"),
        ({"kind": "signal", "unit": "../a.service", "signal": "USR1"}, "signal.unit", "string_pattern_mismatch"),
        ({"kind": "signal", "unit": "a.service", "signal": "KILL"}, "signal.signal", "literal_error"),
        ({"kind": "signal", "unit": "a.service", "signal": "USR1", "after": "pause"}, "signal.after", "literal_error"),
        ({"kind": "command", "command": []}, "command.command", "too_short"),
        ({"kind": "command", "command": ["a\0b"]}, "command.command.0", "string_pattern_mismatch"),
        ({"kind": "command", "command": "rm -rf /"}, "command.command", "list_type"),
        ({"kind": "carrier-pigeon"}, "", "union_tag_invalid"),
        ({"url": "unix:/a", "fallback": {"kind": "http"}}, "http.fallback", "union_tag_invalid"),
        (
            {"url": "unix:/a", "fallback": {"kind": "command", "command": []}},
            "http.fallback.command.command",
            "too_short",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(trainer: dict[str, object], where: str, why: str) -> None:
    """Each for its own fault, and not for a field that its kind has got since."""
    with pytest.raises(ValidationError) as refused:
        settings_of(**trainer)
    (error,) = refused.value.errors()
    assert (".".join(map(str, error["loc"][2:])), error["type"]) == (where, why)
