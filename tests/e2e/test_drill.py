"""A drill on a real host, as far as that goes without one: real daemon, real UPS protocol, real trainer that pauses."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from powerguard.sim.demo.live import LiveStage, live
from tests.daemon.looped import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("live demo"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


async def drill(stage: LiveStage, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "powerguard", "drill", *words, "--yes", "--json", "--socket",
        str(stage.folder / "powerguard.sock"),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, dict[str, Any]]:
    async with asyncio.timeout(120.0):
        out, err = await process.communicate()
    assert err == b""
    return process.returncode, dict(json.loads(out))


async def trains_on(stage: LiveStage) -> None:
    """Training runs: the trainer itself says so, and its step rises."""
    await until(lambda: not stage.paused, 60.0)
    step = stage.step or 0
    await until(lambda: (stage.step or 0) > step, 60.0)


async def test_a_trainer_is_saved_paused_measured_and_goes_on() -> None:
    """Refused while nothing is saved; then all of it; then stopped in its middle by Ctrl-C."""
    async with live() as stage:
        async with asyncio.timeout(120.0):
            while True:
                code, outcome = await ended(await drill(stage))
                assert code == 1
                if "no known checkpoint" in outcome["error"]:
                    break
                assert "must be stable" in outcome["error"], outcome
                await asyncio.sleep(1.0)
        code, outcome = await ended(await drill(stage, "--scope", "checkpoint"))
        assert (code, outcome["last"]["result"]) == (0, "passed")
        code, outcome = await ended(await drill(stage))
        figures = outcome["last"]["figures"]
        assert (code, outcome["last"]["result"]) == (0, "passed"), outcome
        assert figures["checkpoint_verified.toy"] is True
        assert (figures["load_before"], figures["load_paused"]) == (0.6, 0.36)
        assert figures["policy_verified"] is True
        assert figures["power_off_force_after_s"] == 10.0
        await trains_on(stage)

        stopped = await drill(stage, "--scope", "pause")
        await until(lambda: stage.paused, 60.0)
        stopped.send_signal(signal.SIGINT)
        code, outcome = await ended(stopped)
        assert (code, outcome["last"]["result"]) == (1, "interrupted")
        await trains_on(stage)

        killed = await drill(stage, "--scope", "pause")
        await until(lambda: stage.paused, 60.0)
        daemon = next(process for name, process in stage._processes if name == "daemon")
        daemon.kill()
        await daemon.wait()
        await stage.start(
            "daemon again", sys.executable, "-P", "-m", "powerguard", "run", "--config",
            str(stage.folder / "powerguard.yaml"),
        )  # fmt: skip
        code, outcome = await ended(killed)
        assert (code, outcome["last"]["result"]) == (1, "interrupted")
        assert outcome["last"]["because"] == "the daemon was restarted in the middle of it"
        await trains_on(stage)
