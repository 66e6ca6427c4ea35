"""powerguard-signal under a real systemd: its own units with their whole sandbox, in a container, and real jobs.

Here the promise is systemd's as much as ours: with one capability it finds and signals the right processes, and
whatever is killed, and whoever is gone, training goes on.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from powerguard.effectors.options import SIGNAL_SOCKET
from tests.peers.installed import FILES, PYTHON, binds, install, say
from tests.peers.nspawn import Container

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.peer("systemd-nspawn", "mmdebstrap", "nsenter")]

WATCH = "powerguard-signal-watch.service"
SOCKETS = "/run/powerguard-trainers"
LEASE_S = 6

SHORT_LEASE = f"""[Service]
ExecStart=
ExecStart=/opt/powerguard/bin/python -I -S /usr/lib/powerguard/powerguard-helper \\
powerguard.effectors.signals.helper watch --lease-s {LEASE_S}
"""
TRAINER = """import os, signal, socket, sys, time
signal.signal(signal.SIGUSR1, lambda *_: open("/tmp/asked", "w").close())
if len(sys.argv) > 1:
    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[1])
    os.chmod(sys.argv[1], 0o660)
    server.listen()
while True:
    time.sleep(0.01)
"""
UNIT = f"""[Service]
User=daemon
ExecStart=/bin/sh -c '{PYTHON} /opt/trainer.py & exec {PYTHON} /opt/trainer.py {SOCKETS}/llm.sock'
"""
CLIENT = """import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    client.sendall(sys.argv[2].encode() + b"\\n")
    print(client.makefile().readline())
"""


class Host:
    """A booted host with a trainer in a unit, and the socket of the helper."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def say(self, word: dict[str, object], user: str = "powerguard") -> Any:  # noqa: ANN401 - JSON
        argv = ["setpriv", f"--reuid={user}", "--regid=nogroup", "--clear-groups", PYTHON, "-I", "-c", CLIENT]
        ended = self.container.run(*argv, SIGNAL_SOCKET, json.dumps(word))
        return json.loads(ended.stdout) if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]

    def states(self) -> set[str]:
        """States of the trainer's processes, as in proc(5)."""
        script = "for pid in $(cat /sys/fs/cgroup/system.slice/train.service/cgroup.procs "
        script += "/sys/fs/cgroup/systemd/system.slice/train.service/cgroup.procs 2>/dev/null)"
        script += "; do cut -d' ' -f3 /proc/$pid/stat; done"
        return set(self.container.run("sh", "-c", script).stdout.split())

    def state(self, unit: str) -> str:
        return self.container.run("systemctl", "is-active", unit).stdout.strip()

    def log(self) -> str:
        return self.container.check("journalctl", "--identifier=powerguard-signal", "--output=cat")


def until(what: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.1)


@contextmanager
def booted() -> Iterator[Host]:
    """Boot, put it in place, and start a trainer."""
    files = {
        **FILES,
        "/opt/trainer.py": TRAINER,
        "/etc/systemd/system/train.service": UNIT,
        f"/etc/systemd/system/{WATCH}.d/lease.conf": SHORT_LEASE,
    }
    with Container(binds=binds(), files=files) as container:
        install(container, "--with", "signals")
        container.check("systemctl", "start", "train.service")
        until(lambda: container.run("test", "-S", f"{SOCKETS}/llm.sock").returncode == 0)
        yield Host(container)


def test_taken_off_in_the_middle_of_a_stop_it_lets_training_go_on() -> None:
    with booted() as host:
        assert host.say({"word": "stop", "socket": "llm.sock"})["ok"]
        assert host.states() == {"T"}
        assert say(host.container, "uninstall")["is_done"]
        assert "T" not in host.states()


def test_the_whole_life_of_a_stop() -> None:
    """Said by our user through the socket, with one capability; watched over only meanwhile; let go on, and ended."""
    with booted() as host:
        assert "Permission" in host.say({"word": "stop", "socket": "llm.sock"}, user="nobody")
        assert host.state(WATCH) == "inactive"
        answer = host.say({"word": "stop", "socket": "llm.sock"})
        assert (answer["ok"], answer["scope"], answer["stopped"]) == (True, "train.service", 2), answer
        assert host.states() == {"T"}
        until(lambda: host.state(WATCH) == "active")
        assert host.say({"word": "list"})["stopped"][0]["processes"] == 2
        back = host.say({"word": "continue", "socket": "llm.sock"})
        assert (back["ok"], len(back["processes"])) == (True, 2), back
        assert "T" not in host.states()
        until(lambda: host.state(WATCH) == "inactive")
        assert host.say({"word": "stop", "socket": "llm.sock"})["ok"]
        assert host.say({"word": "terminate", "socket": "llm.sock"})["ok"]
        until(lambda: host.state("train.service") != "active")
        assert "llm.sock" in host.log()


def test_a_watch_that_is_killed_comes_back_and_lets_go_on_at_the_end_of_the_lease() -> None:
    """No daemon here at all: it was taken off in the middle of an outage. And somebody kills what is left."""
    with booted() as host:
        assert host.say({"word": "stop", "socket": "llm.sock"})["ok"]
        until(lambda: host.state(WATCH) == "active")
        host.container.check("systemctl", "kill", "--signal=KILL", WATCH)
        until(lambda: "T" not in host.states(), limit_s=4 * LEASE_S)
        until(lambda: host.state(WATCH) == "inactive")
        assert "the daemon has not renewed the stop" in host.log()


def test_a_unit_is_asked_for_a_checkpoint_where_root_has_said_so() -> None:
    with booted() as host:
        word = {"word": "checkpoint", "unit": "train.service", "signal": "USR1"}
        assert "is not in /etc/powerguard/signals" in host.say(word)["error"]
        host.container.check("sh", "-c", "echo 'train.service USR1' > /etc/powerguard/signals")
        answer = host.say(word)
        assert (answer["ok"], answer["signalled"]) == (True, 1), answer
        until(lambda: host.container.run("test", "-e", "/tmp/asked").returncode == 0)
        assert host.state("train.service") == "active"
        host.container.check("chmod", "g+w", "/etc/powerguard/signals")
        assert "other users than root can change it" in host.say(word)["error"]
