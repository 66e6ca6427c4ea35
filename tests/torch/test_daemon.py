"""The character model beside the real daemon: the plug is pulled, it saves and stands; put back, it goes on."""

import itertools
import json
from pathlib import Path
from typing import Any, Self, cast

import pytest

from powerguard.sim.demo.story import numbers
from powerguard.trainer.store.store import newest_in
from tests.e2e.peers import Order, Trainer
from tests.e2e.rig import ROOMY, rig
from tests.torch.processes import ROOT, Launched
from tests.trainer.toy import ask, short_folder


class Example:
    """examples/train_char.py in a process of its own, as the rig of the daemon's tests knows trainers."""

    name = "char"
    native = True
    orders: tuple[Order, ...] = ()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looks = itertools.count()
        self.url = f"unix:{folder}/char.sock"
        self.is_ordered: Any = None
        self.on_change: Any = None

    async def __aenter__(self) -> Self:
        argv = ["--dir", self._folder, "--text", ROOT / "LICENSE", "--steps", "1000000", "--every", "2"]
        self._process = Launched(1, ROOT / "examples" / "train_char.py", *argv, log=self._folder / "log")
        try:
            self._process.until(lambda: bool(self.status().get("step")))
        except BaseException:
            self._process.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(ask(self._folder / "char.sock", "GET", "/api/v1/status")[2])
        except OSError:
            return {}
        return found

    @property
    def looks(self) -> int:
        return next(self._looks)

    @property
    def paused(self) -> bool:
        return bool(self.status().get("paused"))


@pytest.mark.timeout(230)
async def test_the_plug_is_pulled_and_put_back() -> None:
    with short_folder() as folder:
        char = Example(folder)
        async with rig(cast("Trainer", char), runtime=ROOMY) as world:
            await world.start()
            world.ups.utility = False
            durable = await world.note("checkpoint_durable")
            await world.until(lambda: char.paused, "training to stand")
            step = char.status()["step"]
            assert numbers(durable)["step"] == step
            assert numbers(durable)["verified"] is True
            saved = newest_in(folder / "checkpoints")
            assert saved is not None
            assert saved.step == step
            world.ups.utility = True
            await world.note("outage_ended")
            await world.until(lambda: char.status()["step"] > step, "training to go on")
            assert world.offs() == []
            world.no_traceback()
