"""The commands of docs/guides/many-hosts.md, run by torchrun on two hosts: network namespaces with a cable between."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

pytest.importorskip("torch", reason="torch is not installed (scripts/test-torch gets it)")

from powerguard.trainer.store.store import newest_in
from powerguard.wire import After, Reason
from tests.torch.hosts import CHILD, Host
from tests.torch.processes import ROOT
from tests.trainer.toy import LIMIT_S, short_folder

GUIDE = ROOT / "docs" / "guides" / "many-hosts.md"
CABLE = "job0"


def commands() -> list[str]:
    """Return the shell blocks of the guide that run torchrun."""
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "torchrun" in block]


def adapted(command: str, *arguments: str) -> str:
    """Return a command of the guide as it runs here: one rank a host, and our training; waits are shorter."""
    changes = {
        "torchrun ": f"{shlex.quote(sys.executable)} -m torch.distributed.run ",
        "--nproc-per-node 8": "--nproc-per-node 1",
        "train.py": shlex.join([str(CHILD), *arguments]),
        "sleep 5": "sleep 1",
    }
    for old, new in changes.items():
        assert old in command, f"{GUIDE}: the command has no {old!r} any more"
        command = command.replace(old, new)
    return command.replace("last_call_timeout=900", "last_call_timeout=8")


class Cabled:
    """Two hosts with a network, a name and a table of names of their own each."""

    def __init__(self, folder: Path, command: str, *arguments: str) -> None:
        self.all = [Host(folder, f"gpu{number}") for number in range(2)]
        self._command, self._arguments = command, arguments
        self._spaces: list[subprocess.Popen[bytes]] = []
        self._names = folder / "hosts"
        self._names.write_text("127.0.0.1 localhost\n10.78.0.1 gpu0\n10.78.0.2 gpu1\n", encoding="ascii")

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("nsenter") is None or shutil.which("ip") is None:
            pytest.skip("only root makes network namespaces, with nsenter and ip")
        for _ in self.all:
            self._spaces.append(subprocess.Popen(["unshare", "-n", "-u", "-m", "sleep", "1000"]))
        until_s = time.monotonic() + LIMIT_S
        ours = Path("/proc/self/ns/net").readlink()
        while any(Path(f"/proc/{space.pid}/ns/net").readlink() == ours for space in self._spaces):
            assert time.monotonic() < until_s
            if any(space.poll() is not None for space in self._spaces):
                self.__exit__()
                pytest.skip("unshare -n: this machine makes no network namespace")
            time.sleep(0.01)
        cable = ["link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", str(self._spaces[1].pid)]
        if subprocess.run([*self._inside(0), "ip", *cable], capture_output=True, check=False).returncode:
            self.__exit__()
            pytest.skip("ip link add type veth: this kernel lays no cable between network namespaces")
        for number in range(2):
            for words in (
                ["ip", "addr", "add", f"10.78.0.{number + 1}/24", "dev", CABLE],
                ["ip", "link", "set", CABLE, "up"],
                ["ip", "link", "set", "lo", "up"],
                ["mount", "--bind", str(self._names), "/etc/hosts"],  # in there alone
            ):
                subprocess.run([*self._inside(number), *words], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.all:
            host.lose_power()
        for space in self._spaces:
            space.kill()
            space.wait(LIMIT_S)

    def _inside(self, number: int) -> list[str]:
        return ["nsenter", "-t", str(self._spaces[number].pid), "-n", "-u", "-m"]

    def start(self, number: int) -> float:
        """Run the command on one host; return when."""
        command = adapted(self._command, *self._arguments)
        self.all[number].run(self._inside(number), ["sh", "-c", command], GLOO_SOCKET_IFNAME=CABLE)
        return time.monotonic()

    def until(self, what: str, true: Callable[[], object]) -> float:
        """Wait for something to be seen; return when."""
        until_s = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < until_s, (what, [host.output() for host in self.all])
            time.sleep(0.02)
        return time.monotonic()

    def until_training(self, past: int = 0) -> None:
        for host in self.all:
            self.until("training", lambda host=host: any(w == "step" and s > past for w, s, _ in host.said()))


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.mark.root
@pytest.mark.timeout(230)
@pytest.mark.parametrize("leaver", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_host_leaves_and_comes_back(folder: Path, leaver: int) -> None:
    """gpu0 has the rendezvous: where it leaves, torchrun ends on the other host, and waits for it again."""
    stays = 1 - leaver
    with Cabled(folder, commands()[0], "0.02") as world:
        world.start(0)
        world.start(1)
        world.until_training()
        left, stayed = world.all[leaver], world.all[stays]
        left.trigger("e", after=After.PAUSE, reason=Reason.ON_BATTERY, deadline_s=60.0)
        step = left.durable("e").step
        assert step is not None
        world.until("the pause", lambda: (shown := stayed.status()) is not None and shown.held_by == left.name)
        began_s = time.monotonic()
        left.leave()
        ended_s = world.until("the end", lambda: stayed.status() is None) - began_s
        assert f"{left.name} has left" not in stayed.output(), "its rank stood, and was not ended by force"
        assert [s for w, s, _ in stayed.said() if w == "step"][-1] == step
        on_s = world.start(leaver)
        world.until_training(step)
        starts = [[(s, at_s) for w, s, at_s in host.said() if w == "start"][-1] for host in world.all]
        assert [s for s, _ in starts] == [step, step]
        met_s = max(at_s for _, at_s in starts)
        first_s = max(next(at_s for w, s, at_s in host.said() if w == "step" and s == step + 1) for host in world.all)
        print(f"\ntorchrun, {left.name} commits: the rank of {stayed.name} ended after {ended_s:.2f} s")
        print(f"both hosts on: {met_s - on_s:.2f} s to the ranks' meeting by torchrun, {first_s - met_s:.2f} s more")


@pytest.mark.root
@pytest.mark.timeout(230)
@pytest.mark.parametrize("kind", ["dcp", pytest.param("native", marks=pytest.mark.slow)])
def test_a_host_never_comes_back(folder: Path, kind: str) -> None:
    """After the limit the job starts on what is there, if its checkpoint can be loaded so; else it says why not."""
    with Cabled(folder, commands()[1], "0.02", *(["dcp"] if kind == "dcp" else [])) as world:
        world.start(0)
        world.start(1)
        world.until_training()
        stayed, left = world.all
        left.trigger("e", after=After.PAUSE, reason=Reason.ON_BATTERY, deadline_s=60.0)
        step = left.durable("e").step
        assert step is not None
        left.leave()
        if kind == "dcp":
            world.until("training alone", lambda: any(w == "step" and s > step for w, s, _ in stayed.said()))
            assert [s for word, s, _ in stayed.said() if word == "start"] == [0, step]
            return
        text = f"the checkpoint of step {step} was made by 2 ranks, and this training has 1"
        world.until("the refusal", lambda: text in stayed.output())
        assert max(s for _, s, _ in stayed.said()) == step
        assert (found := newest_in(stayed.folder / "ck")) is not None
        assert found.step == step
        world.start(1)
        world.until_training(step)
        assert [[s for w, s, _ in host.said() if w == "start"][-1] for host in world.all] == [step, step]


def test_the_guide_has_its_commands() -> None:
    """Without these blocks the tests above would test a text of their own."""
    assert ["--nnodes 1:2" in command for command in commands()] == [False, True]
