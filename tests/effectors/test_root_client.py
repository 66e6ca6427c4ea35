"""How the daemon asks a root helper: it never waits too long, believes no nonsense, and else is silent."""

import asyncio
import json
from pathlib import Path

import pytest

from powerguard.effectors.base import EffectorError
from powerguard.effectors.gpu import helper as limits
from powerguard.effectors.root_client import HOLD_EVERY_S, RootHelper
from powerguard.effectors.signals import helper as kept
from tests.effectors.root_peers import answering

LIST: dict[str, object] = {"word": "list"}


def helper(path: Path, real: str = "/run/powerguard-x/x.sock") -> RootHelper:
    return RootHelper(name="powerguard-x", socket=str(path), real=real)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\n",
        b"no\n",
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
        with pytest.raises(EffectorError, match="the answer is not from powerguard-x"):
            await helper(path).ask(LIST, limit_s=30.0)


async def test_a_no_is_reported_in_its_own_words(tmp_path: Path) -> None:
    async with answering(tmp_path, b'{"ok": false, "error": "root listens there"}\n') as (path, _):
        with pytest.raises(EffectorError, match="powerguard-x: root listens there"):
            await helper(path).ask(LIST, limit_s=30.0)


async def test_a_helper_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    async with answering(tmp_path, None) as (path, _):
        with pytest.raises(EffectorError, match=r"no answer within 0\.1 s: it hangs \(systemctl status"):
            await helper(path).ask(LIST, limit_s=0.1)


async def test_a_socket_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none.sock", "file"):
        with pytest.raises(EffectorError, match=r"systemctl enable --now powerguard-x\.socket"):
            await helper(tmp_path / name).ask(LIST, limit_s=30.0)


async def test_what_is_no_number_is_never_sent(tmp_path: Path) -> None:
    async with answering(tmp_path, b'{"ok": true}\n') as (path, asked):
        with pytest.raises(EffectorError):
            await helper(path).ask({"word": "cap", "share": float("nan")}, limit_s=30.0)
    assert asked in ([], [b""])


async def test_a_test_cannot_reach_this_machines_own(tmp_path: Path) -> None:
    """Also by another way to it."""
    (tmp_path / "link.sock").symlink_to(tmp_path / "real.sock")
    with pytest.raises(EffectorError, match="refused under test"):
        await helper(tmp_path / "link.sock", real=str(tmp_path / "real.sock")).ask(LIST, limit_s=30.0)


async def test_what_is_changed_is_held_for_as_long_as_it_is_wanted(tmp_path: Path) -> None:
    """Silent before it, silent after it; a helper that fails is asked again, and told of once."""
    wanted = iter([False, True, True, True, True, False])
    rests, heard = list[float](), list[str]()

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 6:
            raise asyncio.CancelledError

    async with answering(tmp_path, b'{"ok": true}\n', b"garbage\n", b"garbage\n", b'{"ok": true}\n') as (path, asked):
        with pytest.raises(asyncio.CancelledError):
            await helper(path).hold(lambda: next(wanted), rest, heard.append, limit_s=30.0)
    assert [json.loads(line) for line in asked] == [{"word": "hold"}] * 4
    assert rests == [HOLD_EVERY_S] * 6
    assert ["the answer is not from powerguard-x" in because for because in heard] == [True]


@pytest.mark.parametrize("lease_s", [limits.LEASE_S, kept.LEASE_S])
def test_a_lease_outlasts_a_restart_of_the_daemon(lease_s: float) -> None:
    """20 s to stop, 2 s of rest and 60 s to start (powerguard.service), and two holds that were missed."""
    assert lease_s >= 20 + 2 + 60 + 2 * HOLD_EVERY_S
