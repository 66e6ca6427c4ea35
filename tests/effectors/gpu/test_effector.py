"""The daemon's side of GPU power: what it asks of powerguard-gpu, and that it never waits for it too long."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.model.actions import Action, CapPower, PollNow, RestorePower
from powerguard.core.trainers.escalation import CAP_LIMIT_S
from powerguard.daemon.own_load import gpu_watts
from powerguard.effectors.base import EffectorError
from powerguard.effectors.gpu.effector import LIMIT_S, GpuEffector
from powerguard.effectors.gpu.helper import WITHIN_S
from powerguard.effectors.options import GPU_SOCKET, GpuOptions
from tests.effectors.root_peers import answering
from tests.peers.nvml import Gpus

CAP = CapPower(id="cap-1", by_s=1e9, outage="outage-1", share=0.6)
RESTORE = RestorePower(id="restore-1", by_s=1e9, outage="outage-1")


def effector(path: Path | str, kind: Any = "nvml", limit_s: float = 30.0) -> GpuEffector:  # noqa: ANN401 - a Literal
    return GpuEffector(GpuOptions(kind=kind, socket=str(path)), limit_s=limit_s)


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
async def test_what_the_gpus_draw_is_their_sum_or_not_known(gpus: Gpus) -> None:
    """This host's own load on a shared UPS: one GPU that does not tell makes the sum worthless."""
    with gpus.listening() as path:
        assert await gpu_watts(effector(path), 60.0) == pytest.approx(2 * 650.123)
        gpus.forget(1, "power_mw")
        assert await gpu_watts(effector(path), 60.0) is None


@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_single_gpus_that_fail_are_reported(gpus: Gpus) -> None:
    gpus.fail("DeviceSetPowerManagementLimit", 4, 1)
    with gpus.listening() as path:
        capped = dict(await effector(path).carry_out(CAP))
        assert (capped["gpus"], capped["failed"], capped["watts_before"], capped["watts_after"]) == (1, 1, 700, 420)
        assert str(capped["because"]).startswith("GPU 1: not permitted")
        gpus.fail("DeviceSetPowerManagementLimit", 999, 0)
        with pytest.raises(EffectorError, match="some limits are not restored, powerguard-gpu tries again: GPU 0"):
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


async def test_kind_none_caps_nothing_and_still_restores_what_there_is(tmp_path: Path) -> None:
    """Somebody may have changed the settings while GPUs were capped."""
    none = effector(tmp_path / "gpu.sock", kind="none")
    with pytest.raises(EffectorError, match=r"gpu\.kind is none"):
        await none.carry_out(CAP)
    assert await none.carry_out(RESTORE) == (("gpus", 0),)
    async with answering(tmp_path, b'{"ok": true, "gpus": []}\n') as (path, asked):
        await effector(path, kind="none").carry_out(RESTORE)
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


def test_a_helper_that_hangs_is_named_before_the_order_times_out() -> None:
    """Later there would only be "timed out"; and sooner no answer that the helper still gives in its time."""
    assert WITHIN_S < LIMIT_S < CAP_LIMIT_S


async def test_an_answer_that_is_only_half_sense_does_no_harm(tmp_path: Path) -> None:
    gpus = b'1, {"did": ["capped"]}, {"did": "capped", "watts_before": "much", "watts_after": NaN}'
    answer = b'{"ok": true, "gpus": [' + gpus + b"]}\n"
    async with answering(tmp_path, answer) as (path, _):
        detail = dict(await effector(path).carry_out(CAP))
    assert (detail["gpus"], detail["watts_before"], detail["failed"]) == (1, 0.0, 0)
