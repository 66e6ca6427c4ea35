"""powerguard-gpu under a real systemd: its own units with their whole sandbox, in a container, with GPUs of ours.

Here the promise is systemd's as much as ours: whatever is killed, and whoever is gone, the limits come back.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from powerguard.effectors.options import GPU_SOCKET
from tests.peers.installed import FILES, PYTHON, binds, install, say
from tests.peers.nspawn import Container
from tests.peers.nvml import H100, library

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.peer("systemd-nspawn", "mmdebstrap", "nsenter", "cc")]

WORLD = "/run/powerguard-gpu/world"
LIMITS = "/run/powerguard-gpu/limits.json"
WATCH = "powerguard-gpu-watch.service"
LEASE_S = 6

# The driver's library that the helper's interpreter finds.
DRIVER = f"export FAKE_NVML={WORLD} LD_LIBRARY_PATH=/opt/nvml:"
SHORT_LEASE = f"""[Service]
ExecStart=
ExecStart=/opt/powerguard/bin/python -I -S /usr/lib/powerguard/powerguard-helper \\
powerguard.effectors.gpu.helper watch --lease-s {LEASE_S}
"""
CLIENT = """import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    client.sendall(sys.argv[2].encode() + b"\\n")
    print(client.makefile().readline())
"""


class Host:
    """A booted host with two GPUs and the socket of the helper."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def say(self, word: dict[str, object], user: str = "powerguard") -> Any:  # noqa: ANN401 - JSON
        argv = ["setpriv", f"--reuid={user}", "--regid=nogroup", "--clear-groups", PYTHON, "-I", "-c", CLIENT]
        ended = self.container.run(*argv, GPU_SOCKET, json.dumps(word))
        return json.loads(ended.stdout) if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]

    def watts(self) -> list[int]:
        result = self.container.check("sh", "-c", f"cat {WORLD}/gpu*/limit_mw")
        return [int(line) // 1000 for line in result.split()]

    def state(self, unit: str) -> str:
        return self.container.run("systemctl", "is-active", unit).stdout.strip()

    def main_pid(self) -> int:
        return int(self.container.check("systemctl", "show", WATCH, "--property=MainPID", "--value"))

    def log(self) -> str:
        return self.container.check("journalctl", "--identifier=powerguard-gpu", "--output=cat")


def until(what: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.1)


@contextmanager
def booted() -> Iterator[Host]:
    """Boot, put it in place, and put GPUs where the sandboxed helper can reach them."""
    assert "export LD_LIBRARY_PATH=" in FILES[PYTHON]
    files = {
        **FILES,
        PYTHON: FILES[PYTHON].replace("export LD_LIBRARY_PATH=", DRIVER),
        f"/etc/systemd/system/{WATCH}.d/lease.conf": SHORT_LEASE,
    }
    with Container(binds={**binds(), "/opt/nvml": library()}, files=files) as container:
        install(container, "--with", "gpu")
        for index in (0, 1):
            lines = [f"mkdir -p {WORLD}/gpu{index}; cd {WORLD}/gpu{index}"]
            lines += [f"echo '{value}' > {name}" for name, value in {**H100, "uuid": f"GPU-{index}"}.items()]
            container.check("bash", "-euc", "\n".join(lines))
        yield Host(container)


def test_the_whole_life_of_a_cap() -> None:
    """Said by our user through the socket; watched over only meanwhile; put back by an order."""
    with booted() as host:
        assert "Permission" in host.say({"word": "cap", "share": 0.6}, user="nobody")
        assert host.state(WATCH) == "inactive"
        answer = host.say({"word": "cap", "share": 0.6})
        assert (answer["ok"], host.watts()) == (True, [420, 420]), answer
        until(lambda: host.state(WATCH) == "active")
        back = host.say({"word": "restore"})
        assert (back["ok"], host.watts()) == (True, [700, 700]), back
        until(lambda: host.state(WATCH) == "inactive")
        assert "GPU 0 GPU-0: 700 W -> 420 W" in host.log()


def test_a_watch_that_is_killed_comes_back_and_restores_at_the_end_of_the_lease() -> None:
    """No daemon here at all: it was taken off in the middle of an outage. And somebody kills what is left."""
    with booted() as host:
        assert host.say({"word": "cap", "share": 0.6})["ok"]
        for how in (("kill", "--signal=KILL"), ("stop",), ("kill", "--signal=KILL")):
            until(lambda: host.main_pid() != 0)
            before = host.main_pid()
            host.container.check("systemctl", *how, WATCH)
            until(lambda before=before: host.main_pid() not in {0, before})
        until(lambda: host.watts() == [700, 700], limit_s=4 * LEASE_S)
        assert host.container.run("test", "-e", LIMITS).returncode != 0
        until(lambda: host.state(WATCH) == "inactive")
        assert "the daemon has not renewed the cap" in host.log()


def test_a_cap_that_is_held_outlasts_its_lease_and_a_failed_restore_does_not() -> None:
    with booted() as host:
        assert host.say({"word": "cap", "share": 0.6})["ok"]
        for _ in range(6):
            time.sleep(LEASE_S / 4)
            assert host.say({"word": "hold"})["capped"] == 2
        assert host.watts() == [420, 420]
        host.container.check("bash", "-c", f"echo 999 > {WORLD}/gpu1/fail_DeviceSetPowerManagementLimit")
        answer = host.say({"word": "restore"})
        assert (answer["ok"], host.watts()) == (False, [700, 420])
        host.container.check("rm", f"{WORLD}/gpu1/fail_DeviceSetPowerManagementLimit")
        until(lambda: host.watts() == [700, 700], limit_s=60)


def test_taken_off_in_the_middle_of_a_cap_it_leaves_the_limits_as_they_were() -> None:
    with booted() as host:
        assert host.say({"word": "cap", "share": 0.6})["ok"]
        assert say(host.container, "uninstall")["is_done"]
        assert host.watts() == [700, 700]
        assert host.container.run("test", "-e", LIMITS).returncode != 0


def test_the_sandbox_holds_what_the_unit_promises() -> None:
    """From inside of the helper's own process, while a driver that hangs keeps it there."""
    with booted() as host:
        host.container.check("touch", f"{WORLD}/hang_InitWithFlags")
        client = ["setsid", "-f", PYTHON, "-I", "-c", CLIENT, GPU_SOCKET, '{"word": "list"}']
        host.container.check("bash", "-c", '"$@" >/dev/null 2>&1 </dev/null; sleep 1', "bash", *client)
        units = host.container.check("systemctl", "list-units", "--plain", "--no-legend", "powerguard-gpu@*")
        unit = units.split()[0]
        pid = host.container.check("systemctl", "show", unit, "--property=MainPID", "--value").strip()
        status = host.container.check("cat", f"/proc/{pid}/status")
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(facts["CapBnd"], 16) == 1 << 21, "CAP_SYS_ADMIN and nothing else"
        assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
        assert host.container.run("nsenter", "-t", pid, "-m", "touch", "/etc/written").returncode != 0
        assert host.container.run("nsenter", "-t", pid, "-m", "touch", "/run/powerguard-gpu/written").returncode == 0
        network = [host.container.check("readlink", f"/proc/{who}/ns/net") for who in (pid, "1")]
        assert network[0] != network[1]
