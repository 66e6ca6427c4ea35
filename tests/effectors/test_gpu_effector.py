"""The daemon's side of GPU power: what it asks of powerguard-gpu, and that it never waits for it too long."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.events import Action, CapPower, PollNow, RestorePower
from powerguard.effectors.base import EffectorError
from powerguard.effectors.gpu.effector import HOLD_EVERY_S, GpuEffector
from powerguard.effectors.gpu.limits import LEASE_S
from powerguard.effectors.gpu.options import GPU_SOCKET, GpuOptions
from tests.peers.nvml import Gpus

CAP = CapPower(id="cap-1", by_s=1e9, outage="outage-1", share=0.6)
RESTORE = RestorePower(id="restore-1", by_s=1e9, outage="outage-1")


def effector(path: Path | str, kind: Any = "nvml", limit_s: float = 30.0) -> GpuEffector:  # noqa: ANN401 - a Literal
    return GpuEffector(GpuOptions(kind=kind, socket=str(path)), limit_s=limit_s)


@asynccontextmanager
async def answering(tmp_path: Path, *answers: bytes | None) -> AsyncIterator[tuple[Path, list[bytes]]]:
    """A socket that gives these answers, one for each connection (None: none, ever), and what it was asked."""
    path, asked, left = tmp_path / "gpu.sock", list[bytes](), list(answers)
    never = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        told = left.pop(0) if left else answers[-1]
        if told is None:
            await never.wait()
        else:
            writer.write(told)
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    try:
        yield path, asked
    finally:
        never.set()
        server.close()
        await server.wait_closed()


# --- Against the real helper, one process for each connection --------------------------------------------------------


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_cap_and_restore_through_the_socket(gpus: Gpus) -> None:
    with gpus.listening() as path:
        capped = dict(await effector(path).carry_out(CAP))
        assert capped == {
            "gpus": 2,
            "watts_before": 1400.0,
            "watts_after": 840.0,
            "failed": 0,
            "left_alone": 0,
            "because": "",
        }
        assert gpus.watts() == [420, 420]
        assert dict(await effector(path).carry_out(CAP)) == capped, "twice is as good as once"
        restored = dict(await effector(path).carry_out(RESTORE))
        assert (restored["gpus"], restored["watts_after"], gpus.watts()) == (2, 1400.0, [700, 700])
        assert dict(await effector(path).carry_out(RESTORE))["gpus"] == 0, "nothing was changed: nothing to do"


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_single_gpus_that_fail_are_told(gpus: Gpus) -> None:
    gpus.fail("DeviceSetPowerManagementLimit", 4, 1)
    with gpus.listening() as path:
        capped = dict(await effector(path).carry_out(CAP))
        assert (capped["gpus"], capped["failed"], capped["watts_before"], capped["watts_after"]) == (1, 1, 700, 420)
        assert str(capped["because"]).startswith("GPU 1: not permitted")
        gpus.fail("DeviceSetPowerManagementLimit", 999, 0)
        with pytest.raises(EffectorError, match="not all limits are back, it is tried again: GPU 0"):
            await effector(path).carry_out(RESTORE)


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_where_no_gpu_was_capped_the_action_has_failed(gpus: Gpus) -> None:
    gpus.fail("InitWithFlags", 9)
    with (
        gpus.listening() as path,
        pytest.raises(EffectorError, match="powerguard-gpu: the NVIDIA driver is not loaded"),
    ):
        await effector(path).carry_out(CAP)


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_many_at_once_take_turns(gpus: Gpus) -> None:
    """A doctor that looks, a hold and a second cap: nobody gets a broken answer."""
    with gpus.listening() as path:
        async with asyncio.TaskGroup() as tasks:
            words = [{"word": "list"}, {"word": "cap", "share": 0.6}, {"word": "hold"}, {"word": "cap", "share": 0.6}]
            asked = [tasks.create_task(effector(path).ask(dict(word))) for word in words]
        assert [task.result()["ok"] for task in asked] == [True] * 4
        assert gpus.watts() == [420, 420]


# --- Where there is none ---------------------------------------------------------------------------------------------


async def test_a_socket_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(EffectorError, match=r"systemctl enable --now powerguard-gpu\.socket"):
        await effector(tmp_path / "gpu.sock").carry_out(CAP)
    (tmp_path / "file").touch()
    with pytest.raises(EffectorError, match=r"powerguard-gpu\.socket"):
        await effector(tmp_path / "file").carry_out(RESTORE)


async def test_kind_none_caps_nothing_and_still_restores_what_there_is(tmp_path: Path) -> None:
    """Somebody may have changed the settings while GPUs were capped."""
    none = effector(tmp_path / "gpu.sock", kind="none")
    with pytest.raises(EffectorError, match=r"gpu\.kind is none"):
        await none.carry_out(CAP)
    assert await none.carry_out(RESTORE) == (("gpus", 0),)
    async with answering(tmp_path, b'{"ok": true, "gpus": []}\n') as (_, asked):
        await none.carry_out(RESTORE)
    assert [json.loads(line) for line in asked] == [{"word": "restore"}]


async def test_other_actions_are_not_ours(tmp_path: Path) -> None:
    wrong: Action = PollNow(id="p", by_s=1.0, ups="a")
    with pytest.raises(EffectorError, match="only CapPower and RestorePower"):
        await effector(tmp_path / "gpu.sock").carry_out(wrong)


async def test_a_test_cannot_reach_the_gpus_of_this_machine() -> None:
    with pytest.raises(EffectorError, match="refused under test"):
        await effector(GPU_SOCKET).carry_out(RESTORE)


# --- Where it is no good ---------------------------------------------------------------------------------------------


async def test_a_helper_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    async with answering(tmp_path, None) as (path, _):
        with pytest.raises(EffectorError, match=r"no answer within 0\.2 s: .* hangs"):
            await effector(path, limit_s=0.2).carry_out(CAP)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\n",
        b"garbage\n",
        b"\xff\n",
        b"[]\n",
        b"{}\n",
        b'{"ok": 1}\n',
        b'{"ok": true, "gpus": [',
        b'{"ok": true, "gpus": 1',
        b"[" * 60000 + b"\n",
        b"x" * 100_000 + b"\n",
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_expected_failure(tmp_path: Path, answer: bytes) -> None:
    async with answering(tmp_path, answer) as (path, _):
        with pytest.raises(EffectorError, match="what answers is not powerguard-gpu"):
            await effector(path).carry_out(CAP)


async def test_an_answer_that_is_only_half_sense_does_no_harm(tmp_path: Path) -> None:
    gpus = b'1, {"did": ["capped"]}, {"did": "capped", "watts_before": "much", "watts_after": NaN}'
    answer = b'{"ok": true, "gpus": [' + gpus + b"]}\n"
    async with answering(tmp_path, answer) as (path, _):
        told = dict(await effector(path).carry_out(CAP))
    assert (told["gpus"], told["watts_before"], told["failed"]) == (1, 0.0, 0)


async def test_a_share_that_is_no_number_is_never_sent(tmp_path: Path) -> None:
    async with answering(tmp_path, b'{"ok": true}\n') as (path, asked):
        with pytest.raises(EffectorError):
            await effector(path).carry_out(CapPower(id="c", by_s=1e9, outage="o", share=float("nan")))
    assert asked in ([], [b""])


# --- The lease -------------------------------------------------------------------------------------------------------


async def test_a_cap_is_held_for_as_long_as_it_is_wanted(tmp_path: Path) -> None:
    """Silent before it, silent after it; and a helper that fails once is asked again."""
    wanted = iter([False, True, True, True, False])
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 5:
            raise asyncio.CancelledError

    async with answering(tmp_path, b'{"ok": true}\n', b"garbage\n", b'{"ok": true}\n') as (path, asked):
        with pytest.raises(asyncio.CancelledError):
            await effector(path).hold(lambda: next(wanted), rest)
    assert [json.loads(line) for line in asked] == [{"word": "hold"}] * 3
    assert rests == [HOLD_EVERY_S] * 5


def test_a_lease_outlasts_a_restart_of_the_daemon() -> None:
    """20 s to stop, 2 s of rest and 60 s to start (powerguard.service), and two holds that were missed."""
    assert LEASE_S >= 20 + 2 + 60 + 2 * HOLD_EVERY_S
