"""The whole chain: the real daemon, its journal, the real helper behind a socket, and GPUs of ours.

A drill is what caps them: it is the one outage that an operator orders. In its middle the daemon is killed.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.e2e.rig import ROOMY, Rig, rig
from tests.peers.nvml import Gpus

pytestmark = [pytest.mark.peer("cc", "systemd-socket-activate"), pytest.mark.slow]

FOUND, CAPPED = [700, 500], [420, 300]


@asynccontextmanager
async def host(tmp_path: Path) -> AsyncIterator[tuple[Rig, Gpus]]:
    """A host that may be drilled: its trainer has a checkpoint, and its GPUs have limits of their own."""
    gpus = Gpus(tmp_path)
    gpus.put(1, "limit_mw", 500_000)
    try:
        with gpus.listening() as path:
            async with rig(runtime=ROOMY) as world:
                world.settings["gpu"] = {"kind": "nvml", "cap_share": 0.6, "socket": str(path)}
                await world.start()
                await drill(world, "checkpoint")
                yield world, gpus
    finally:
        gpus.close()


async def drill(world: Rig, *words: str) -> None:
    """Order a drill; it is refused until utility has been stable for some seconds."""
    argv = ["-P", "-m", "powerguard", "drill", "--scope", *words, "--yes", "--socket", str(world.socket)]
    said = b""

    async def accepted() -> bool:
        nonlocal said
        process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        return process.returncode == 0

    try:
        await world.until(accepted, f"a drill of {words}", 90.0)
    except AssertionError as error:
        error.add_note(said.decode())
        raise


async def test_a_drill_caps_and_puts_back(tmp_path: Path) -> None:
    async with host(tmp_path) as (world, gpus):
        assert gpus.watts() == FOUND
        await drill(world, "cap", "--no-wait")
        await world.until(lambda: gpus.watts() == CAPPED, "the cap", 60.0)
        await world.metric_becomes("powerguard_gpu_cap_active", 1.0)
        await world.until(lambda: gpus.watts() == FOUND, "the restore", 90.0)
        await world.until(lambda: not gpus.limits.exists(), "the file to go")
        assert await world.metric('powerguard_actions_total{action="cap_power",result="done"}') == 1.0
        world.no_traceback()


async def test_a_daemon_that_is_killed_while_gpus_are_capped_puts_them_back_when_it_is_there_again(
    tmp_path: Path,
) -> None:
    async with host(tmp_path) as (world, gpus):
        await drill(world, "cap", "--no-wait")
        await world.until(lambda: gpus.watts() == CAPPED, "the cap", 60.0)
        await world.kill()
        assert gpus.watts() == CAPPED, "the helper has no opinion: a daemon may be back at once"
        await world.start()
        await world.until(lambda: gpus.watts() == FOUND, "the restore", 60.0)
        await world.until(lambda: not gpus.limits.exists(), "the file to go")
        world.no_traceback()


async def test_a_daemon_that_has_lost_its_journal_is_silent_and_the_watch_puts_them_back(tmp_path: Path) -> None:
    async with host(tmp_path) as (world, gpus):
        await drill(world, "cap", "--no-wait")
        await world.until(lambda: gpus.watts() == CAPPED, "the cap", 60.0)
        await world.until((gpus.folder / "held").exists, "the first hold", 40.0)
        await world.kill()
        for path in world.journal.parent.iterdir():
            path.unlink()
        await world.start()
        watch = gpus.start("watch", "--lease-s", "40")
        await world.until(lambda: gpus.watts() == FOUND, "the watch", 90.0)
        assert watch.wait(timeout=60) == 0
        assert world.actions("restore_power") == []
