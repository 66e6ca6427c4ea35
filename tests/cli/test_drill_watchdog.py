"""`powerguard drill --scope bmc-watchdog`: says what will happen, and does nothing without the host's name."""

import asyncio
import json
import os
import pty
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from powerguard.daemon.control.admin import admin_server
from powerguard.daemon.observe.status import Json
from powerguard.daemon.watchdog_drill import WatchdogDrill
from powerguard.effectors.base import EffectorError
from tests.cli.test_commands import Ended, powerguard
from tests.daemon.test_drills import REFERENCE, ready
from tests.golden import Golden

ROOT = Path(__file__).parents[2]


@pytest.fixture
def socket() -> Iterator[str]:
    folder = tempfile.mkdtemp(dir="/tmp", prefix="pg-")
    yield f"{folder}/s"
    shutil.rmtree(folder)


@dataclass
class Drill(WatchdogDrill):
    """The daemon's side, which remembers what it was asked; its own tests are in tests/daemon."""

    refused: str = ""
    mode: str = "armed"
    begun: list[tuple[str, str]] = field(default_factory=list)

    async def plan(self) -> Json:
        plan = json.loads((REFERENCE / "watchdog-drill-plan.json").read_bytes())
        return dict(plan) | {"refused": self.refused, "mode": self.mode}

    async def begin(self, who: str, host_name: str) -> float:
        if self.refused:
            raise EffectorError(self.refused)
        self.begun.append((who, host_name))
        return 169.8


@asynccontextmanager
async def asked(socket: str, drill: Drill) -> AsyncIterator[None]:
    async with admin_server(ready(), path=socket, watchdog=drill):
        yield


async def call(socket: str, *words: str) -> Ended:
    return await powerguard("drill", "--scope", "bmc-watchdog", "--socket", socket, *words)


async def test_it_says_what_will_happen_and_wants_the_hosts_name(socket: str, golden: Golden) -> None:
    """Another name, no name, and --yes: nothing is done."""
    drill = Drill()
    async with asked(socket, drill):
        ended = await call(socket, "--yes")
        assert (ended.code, drill.begun) == (64, [])
        assert "2 m 50 s" in ended.out
        golden("drill", ended.out + ended.err, "no name")
        ended = await call(socket, "--host", "gpu08")
        assert (ended.code, drill.begun) == (1, [])
        golden("drill", ended.err, "another name")
        ended = await call(socket, "--host", "gpu07")
        assert (ended.code, [name for _, name in drill.begun]) == (0, ["gpu07"])
        golden("drill", ended.out)
        ended = await call(socket, "--host", "gpu07", "--json")
        assert (ended.code, json.loads(ended.out)["in_s"]) == (0, 169.8)


@pytest.mark.parametrize("more", [("--scope", "policy"), ("--witness", "plug"), ("--no-wait",)])
async def test_it_stands_alone(socket: str, more: tuple[str, ...], golden: Golden) -> None:
    drill = Drill()
    async with asked(socket, drill):
        ended = await call(socket, "--host", "gpu07", *more)
    assert (ended.code, drill.begun) == (64, [])
    golden("drill", ended.err)


async def test_dry_run_and_a_refusal_only_report(socket: str, golden: Golden) -> None:
    dry, refused = Drill(mode="dry-run"), Drill(refused="the phase is on_battery, not online")
    async with asked(socket, dry):
        ended = await call(socket, "--host", "gpu07")
        assert (ended.code, dry.begun) == (0, [])
        golden("drill", ended.out)
    async with asked(socket, refused):
        ended = await call(socket, "--host", "gpu07")
        assert (ended.code, refused.begun) == (1, [])
        golden("drill", ended.err, "refused")
        ended = await call(socket, "--json")
        assert (ended.code, json.loads(ended.out)["refused"]) == (1, refused.refused)


@pytest.mark.parametrize(("typed", "code"), [(b"gpu07\n", 0), (b"yes\n", 1)])
async def test_it_asks_on_a_terminal(socket: str, typed: bytes, code: int) -> None:
    drill = Drill()
    async with asked(socket, drill):
        ours, theirs = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "powerguard", "drill", "--scope", "bmc-watchdog", "--socket", socket),
            stdin=theirs,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        os.write(ours, typed)
        async with asyncio.timeout(60.0):
            _, err = await process.communicate()
        os.close(ours)
        os.close(theirs)
    assert b"Type this host's name (gpu07) to power it off now: " in err
    assert (process.returncode, len(drill.begun)) == (code, 1 - code)
