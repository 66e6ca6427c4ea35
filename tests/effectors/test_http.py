"""Trainers, BMCs and sentinels by name, when the name service hangs: one look-up, and the known address serves."""

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from powerguard.effectors.bmc.effector import BmcEffector, BmcError
from powerguard.effectors.child import Ended
from powerguard.effectors.options import BmcOptions
from powerguard.effectors.trainer.options import TrainerOptions
from powerguard.effectors.trainer.peer import HttpAnswer, TrainerPeer
from powerguard.options import Secret
from tests.effectors.trainer_peers import STATUS, serve
from tests.peers.ipmi import keep_secret
from tests.peers.names import NameService

HERE = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))


def a_loop(runner: asyncio.Runner) -> NameService:
    loop = runner.get_loop()
    assert isinstance(loop, NameService)
    return loop


def remote(folder: Path, port: int) -> TrainerOptions:
    token = Secret(file=str(keep_secret(folder / "token", "0123456789abcdef")))
    return TrainerOptions(name="llm", url=f"http://trainer.example:{port}", token=token)


def test_a_trainer_is_looked_up_once_while_the_name_service_hangs(tmp_path: Path) -> None:
    """A look-up cannot be stopped, and holds one of the threads that read passwords and write orders down."""

    async def calls(loop: NameService) -> None:
        peer, after = TrainerPeer(remote(tmp_path, 9), uids=None), 0
        while after < 3:
            assert not isinstance(await peer.call("GET", "/api/v1/status", headers_s=-0.9), HttpAnswer)
            after += loop.asked > 0  # On a busy machine the first may end before the token is read.
        await peer.close()

    with asyncio.Runner(loop_factory=NameService) as runner:
        loop = a_loop(runner)
        runner.run(calls(loop))
        assert loop.asked == 1


def test_a_trainer_whose_name_is_known_answers_while_the_name_service_hangs(tmp_path: Path) -> None:
    async def calls(loop: NameService) -> None:
        async with serve({STATUS: [{"body": "{}"}]}) as trainer:
            peer = TrainerPeer(remote(tmp_path, int(trainer.url.rpartition(":")[2])), uids=None)
            for loop.found in ([HERE], None, None):
                answer = await peer.call("GET", "/api/v1/status", headers_s=30.0)
                assert isinstance(answer, HttpAnswer), answer
                assert answer.status == 200
            await peer.close()

    with asyncio.Runner(loop_factory=NameService) as runner:
        loop = a_loop(runner)
        runner.run(calls(loop))
        assert loop.asked == 2


def test_a_bmc_over_lan_is_called_by_its_known_address(tmp_path: Path) -> None:
    """Its worker cannot look the name up either: the policy of bmc.policy: bracket would not be set in the outage."""
    password = Secret(file=str(keep_secret(tmp_path / "password", "secret")))
    options = BmcOptions(kind="ipmi-lan", host="bmc.example", user="powerguard", password=password)
    asked: list[str] = []

    async def spawn(
        _argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        del limit_s, env
        asked.append(json.loads(stdin)["host"])
        return Ended(returncode=0, stdout=b'{"ok": true, "status": "41"}', stderr=b"")

    async def asks(loop: NameService) -> None:
        await BmcEffector(options, spawn=spawn).status(30.0)
        assert asked == ["bmc.example"], "the worker reports it"
        bmc, loop.found = BmcEffector(options, spawn=spawn), [HERE]
        async with asyncio.timeout(60):
            while asked[-1] != "127.0.0.1":  # a busy machine
                await bmc.status(30.0)
        loop.found = None
        await bmc.status(30.0)
        await bmc.status(30.0)
        assert asked[-2:] == ["127.0.0.1", "127.0.0.1"]

    with asyncio.Runner(loop_factory=NameService) as runner:
        runner.run(asks(a_loop(runner)))


def test_a_bmc_is_looked_up_once_while_the_name_service_hangs(tmp_path: Path) -> None:
    password = Secret(file=str(keep_secret(tmp_path / "password", "secret")))
    options = BmcOptions(kind="redfish", host="bmc.example", user="powerguard", password=password)

    async def asks(loop: NameService) -> None:
        bmc, after = BmcEffector(options), 0
        while after < 3:
            with pytest.raises(BmcError):
                await bmc.status(0.2)
            after += loop.asked > 0  # On a busy machine the first may end before anything is looked up.

    with asyncio.Runner(loop_factory=NameService) as runner:
        loop = a_loop(runner)
        runner.run(asks(loop))
        assert loop.asked == 1
