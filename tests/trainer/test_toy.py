"""The toy as a whole process: it learns, it is killed, and it ends with the bits it would have had anyway."""

import json
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from powerguard.sim.toy_trainer import Model
from powerguard.trainer.store.store import Store
from tests.trainer.checkpoints import read
from tests.trainer.toy import Toy, short_folder

STEPS = 200


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def state(checkpoints: Path) -> bytes:
    with Store(checkpoints, job="toy") as store:
        return bytes(read(store.found()[0], 0)["state"].data)


def uninterrupted(steps: int) -> bytes:
    model = Model(20_240_501)
    for _ in range(steps):
        model.train()
    return model.to_json()


def test_it_really_learns() -> None:
    model = Model(20_240_501)
    model.train()
    first = model.loss
    for _ in range(500):
        model.train()
    assert model.loss < 0.3 * first


def test_a_state_that_is_loaded_trains_on_to_the_same_bits() -> None:
    model = Model(20_240_501)
    for _ in range(37):
        model.train()
    other = Model(1)
    other.load(model.to_json())
    for each in (model, other):
        for _ in range(20):
            each.train()
    assert model.to_json() == other.to_json()


def test_killed_and_restored_is_bitwise_the_same(folder: Path) -> None:
    """kill -9 at three instants, a checkpoint every 7 steps and some on demand: the last state has the same bits."""
    chance = random.Random(5)
    arguments = ("--step-ms", "4", "--steps", str(STEPS), "--every", "7", "--mb", "2")
    for trial in range(3):
        with Toy(folder, *arguments) as toy:
            assert toy.said == f"ready {toy.socket}\n"
            time.sleep(chance.uniform(0.05, 0.3))
            if trial % 2:
                with suppress(OSError):  # this thread may have come too late, and the toy have ended
                    toy.ask("POST", "/api/v1/trigger_checkpoint", {"id": f"t{trial}"})
                time.sleep(chance.uniform(0.0, 0.02))
    with Toy(folder, *arguments) as toy:
        assert toy.end() == (0, "")
    assert json.loads(state(folder / "ck"))["step"] == STEPS
    assert state(folder / "ck") == uninterrupted(STEPS)


def test_paused_then_killed_loses_no_step(folder: Path) -> None:
    """What an outage does: checkpoint, pause, power gone; the next start goes on from the very step."""
    with Toy(folder, "--step-ms", "2") as toy:
        toy.until_step(20)
        code, answer = toy.ask("POST", "/api/v1/trigger_checkpoint", {"id": "e1", "after": "pause", "deadline_s": 20})
        assert (code, answer["id"]) == (202, "e1")
        ended = toy.until_ended("e1")
        assert (ended["durable"], ended["paused_step"]) == (True, ended["step"])
    with Toy(folder, "--step-ms", "2") as again:
        again.until_step(ended["step"] + 1)
        assert again.ask("GET", "/api/v1/status")[1]["last_committed"]["step"] == ended["step"]
    assert state(folder / "ck") == uninterrupted(ended["step"])


def test_resumed_in_place_is_bitwise_the_same(folder: Path) -> None:
    with Toy(folder, "--step-ms", "2", "--conduct", "exit") as toy:
        toy.until_step(10)
        toy.ask("POST", "/api/v1/trigger_checkpoint", {"id": "e1", "after": "pause"})
        stands = toy.until_ended("e1")["paused_step"]
        time.sleep(0.1)
        assert toy.ask("GET", "/api/v1/status")[1]["step"] == stands
        assert toy.ask("POST", "/api/v1/resume")[1]["paused"] is False
        toy.until_step(stands + 100)
        toy.ask("POST", "/api/v1/trigger_checkpoint", {"id": "e2", "after": "exit"})
        ended = toy.until_ended("e2")["step"]
        assert toy.end() == (0, "")
    assert ended >= stands + 100
    assert state(folder / "ck") == uninterrupted(ended)


def test_killed_in_mid_write_the_older_one_stands(folder: Path) -> None:
    """A torn checkpoint is never taken for a good one."""
    with Toy(folder, "--step-ms", "2") as toy:
        toy.until_step(5)
        toy.ask("POST", "/api/v1/trigger_checkpoint", {"id": "good"})
        good = toy.until_ended("good")["step"]
    with Toy(folder, "--step-ms", "2", "--mb", "120", "--mb-per-s", "15") as toy:
        toy.until_step(good + 5)
        toy.ask("POST", "/api/v1/trigger_checkpoint", {"id": "torn", "after": "pause", "deadline_s": 60})
        status = toy.ask("GET", "/api/v1/checkpoints/torn?wait=1")[1]
        while not status.get("bytes_done"):
            status = toy.ask("GET", "/api/v1/checkpoints/torn")[1]
        assert status["phase"] == "writing"
        assert status["bytes_total"] > 120_000_000
        assert status["eta_s"] > 0
    assert len(list((folder / "ck").glob("step-*"))) == 2
    with Toy(folder, "--step-ms", "2") as again:
        assert again.ask("GET", "/api/v1/status")[1]["last_committed"]["step"] == good
        again.until_step(good + 3)
        again.ask("POST", "/api/v1/trigger_checkpoint", {"id": "next"})
        assert again.until_ended("next")["durable"]
        assert len(list((folder / "ck").glob("step-*"))) == 2, "the torn one is swept away, the older one kept"


def test_exit_ends_the_process_after_its_checkpoint(folder: Path) -> None:
    with Toy(folder, "--step-ms", "2", "--conduct", "exit") as toy:
        toy.ask("POST", "/api/v1/trigger_checkpoint", {"id": "e1", "after": "exit"})
        assert toy.until_ended("e1")["durable"]
        assert toy.end() == (0, "")
    assert not toy.socket.exists()


@pytest.mark.parametrize("when", ["training", "paused", "writing"])
def test_asked_to_end_it_ends_at_once_and_cleans_up(folder: Path, when: str) -> None:
    """SIGTERM, as systemd sends it: no traceback, no socket, no half checkpoint left behind."""
    size, rate = ("150", "25") if when == "writing" else ("20", "600")  # more than what is under way at once
    with Toy(folder, "--step-ms", "2", "--mb", size, "--mb-per-s", rate) as toy:
        toy.until_step(2)
        if when != "training":
            toy.ask("POST", "/api/v1/trigger_checkpoint", {"id": "e1", "after": "pause"})
            if when == "paused":
                assert toy.until_ended("e1")["paused"]
            while when == "writing" and not toy.ask("GET", "/api/v1/checkpoints/e1")[1].get("bytes_done"):
                time.sleep(0.01)
        toy.kill(signal.SIGTERM)
        assert toy.end() == (0, "")
    assert not toy.socket.exists()
    assert len(list((folder / "ck").glob("step-*"))) == (1 if when == "paused" else 0)


def test_a_second_trainer_in_the_same_place_says_so(folder: Path) -> None:
    with Toy(folder):
        with Toy(folder, socket_name="other.sock") as second:
            code, said = second.end()
        assert code == 1
        assert "another process writes checkpoints here" in said
