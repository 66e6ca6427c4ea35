"""powerguard-ipmi under a real systemd: its own units with their whole sandbox, in a container, on a stand-in device.

Here the promise is systemd's as much as ours: our user alone is heard, one process answers many words, each in a child
of its own, and what ends it, the next word starts it again.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest

from powerguard.effectors.options import IPMI_SOCKET
from tests.peers.installed import FILES, PYTHON, binds, install
from tests.peers.ipmi_device import library
from tests.peers.nspawn import Container

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.peer("systemd-nspawn", "mmdebstrap", "nsenter", "cc")]

FAKE = "/run/fake"
UNIT = "powerguard-ipmi.service"
DROP_IN = f"""[Service]
ReadWritePaths={FAKE}
ExecStart=
ExecStart=/opt/powerguard/bin/python -I -S /usr/lib/powerguard/powerguard-helper \\
powerguard.effectors.bmc.helper --device {FAKE}/ipmi0 serve
"""
CLIENT = """import json, socket, sys, time
took = []
for word in sys.argv[2:]:
    began_s = time.monotonic()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(sys.argv[1])
        client.sendall(word.encode() + b"\\n")
        answer = client.makefile().readline()
    took.append(time.monotonic() - began_s)
print(json.dumps([json.loads(answer), took]))
"""

# In place of the daemon: it asks the BMC when it is stopped, as the daemon does in an outage.
ASKS_LATE = f"""import os, signal, socket, threading
stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
    manager.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
stopped.wait()
with socket.socket(socket.AF_UNIX) as client:
    client.connect("{IPMI_SOCKET}")
    client.sendall(b'{{"word": "arm", "in_s": 900}}\\n')
    print("late answer:", client.makefile().readline())
"""
LATE = f"""[Service]
WatchdogSec=0
ExecStart=
ExecStart={PYTHON} -I /opt/asks-late.py
StandardOutput=journal+console
"""
LATE_FILES = {"/opt/asks-late.py": ASKS_LATE, "/etc/systemd/system/powerguard.service.d/late.conf": LATE}


class Host:
    """A booted host with a BMC that is a folder, and the socket of the helper."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def say(self, *words: dict[str, object], user: str = "powerguard") -> Any:  # noqa: ANN401 - JSON
        """Say words one after the other; the last answer, and the seconds of each."""
        argv = ["setpriv", f"--reuid={user}", "--regid=nogroup", "--clear-groups", PYTHON, "-I", "-c", CLIENT]
        ended = self.container.run(*argv, IPMI_SOCKET, *(json.dumps(word) for word in words), limit_s=60.0)
        return json.loads(ended.stdout) if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]

    def main_pid(self) -> int:
        return int(self.container.check("systemctl", "show", UNIT, "--property=MainPID", "--value"))


@contextmanager
def booted(more: Mapping[str, str] = MappingProxyType({})) -> Iterator[Host]:
    preload = f"export FAKE_IPMI={FAKE} LD_PRELOAD=/opt/ipmi.so LD_LIBRARY_PATH="
    files = {
        **FILES,
        PYTHON: FILES[PYTHON].replace("export LD_LIBRARY_PATH=", preload),
        f"/etc/systemd/system/{UNIT}.d/fake.conf": DROP_IN,
        "/usr/sbin/modprobe": "#!/bin/sh\nexit 0\n",
        **more,
    }
    with Container(binds={**binds(), "/opt/ipmi.so": library()}, files=files) as container:
        container.check("sh", "-c", f"mkdir {FAKE}; mkfifo {FAKE}/ipmi0; echo 1 > {FAKE}/policy")
        install(container, "--with", "ipmi")
        yield Host(container)


def test_one_process_hears_our_user_alone_and_forks_for_each_word() -> None:
    ensure: dict[str, object] = {"word": "ensure"}
    with booted() as host:
        assert host.main_pid() == 0
        assert "Permission" in host.say(ensure, user="nobody")
        answer, first = host.say(ensure)
        assert (answer["failure"], answer["changed"], host.container.check("cat", f"{FAKE}/policy").strip()) == (
            None, True, "2"
        )  # fmt: skip
        pid = host.main_pid()
        answer, took = host.say(*[ensure] * 50)
        assert answer["changed"] is False
        print(f"\nfirst word {first[0] * 1000:.0f} ms; then median {statistics.median(took) * 1000:.1f} ms, "
              f"worst {max(took) * 1000:.1f} ms of 50")  # fmt: skip
        assert host.main_pid() == pid > 0
        answer, _ = host.say({"word": "arm", "in_s": 900})
        assert answer["timer"][:4] == "4403"
        assert host.say({"word": "disarm"})[0]["changed"] is True
        host.container.check("systemctl", "kill", "--signal=KILL", UNIT)
        assert host.say({"word": "status"})[0]["failure"] is None
        assert host.main_pid() not in (0, pid)
        log = host.container.check("journalctl", "--identifier=powerguard-ipmi", "--output=cat")
        assert "power restore policy set to always-on" in log
        assert "watchdog armed: power cycle in 900 s" in log


def test_a_helper_that_could_not_start_for_a_while_starts_again() -> None:
    """As in an update of its Python. The socket stayed failed, and the BMC out of reach until a person noticed it."""
    helper = "/usr/lib/powerguard/powerguard-helper"
    with booted() as host:
        host.container.check("mv", helper, f"{helper}.away")
        waits = f"import socket, time; s = socket.socket(socket.AF_UNIX); s.connect('{IPMI_SOCKET}'); time.sleep(30)"
        host.container.check(PYTHON, "-I", "-c", waits)
        host.container.check("mv", f"{helper}.away", helper)
        assert host.container.run("systemctl", "is-active", "powerguard-ipmi.socket").stdout.strip() == "active"
        answer = host.say({"word": "status"})
        assert answer[0]["failure"] is None, answer


@pytest.mark.parametrize("is_running", [True, False], ids=["runs", "has-ended"])
def test_the_daemon_reaches_the_bmc_while_another_program_stops_the_host(is_running: bool) -> None:
    """What runs then must outlive the daemon, and what has ended for want of words must start once more."""
    with booted(LATE_FILES) as host:
        host.container.check("systemctl", "start", "powerguard.service")
        if is_running:
            assert host.say({"word": "status"})[0]["failure"] is None
        assert (host.main_pid() > 0) is is_running
        host.container.run("systemctl", "poweroff")
        host.container.off_within(60.0)
        assert '"failure":null' in host.container.console.partition("late answer:")[2].partition("\n")[0]


def test_an_update_ends_the_process_of_the_older_version() -> None:
    """On a shared UPS the daemon reads the host's draw every minute, so that it never ends for want of words."""
    with booted() as host:
        host.say({"word": "status"})
        pid = host.main_pid()
        install(host.container)
        assert host.say({"word": "status"})[0]["failure"] is None
        assert host.main_pid() not in (0, pid)
