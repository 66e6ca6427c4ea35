"""The look at the host under a real systemd, in the daemon's own sandbox: no device, no root, nothing to write to."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from powerguard.effectors.host.check import MEMORY
from powerguard.effectors.options import GPU_SOCKET
from tests.effectors.gpu.test_systemd import WORLD, Host, booted

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.peer("systemd-nspawn", "mmdebstrap", "nsenter", "cc")]

STATE = "/var/lib/powerguard"
POINT = "/srv/nas"
ASKED = {
    "memory": f"{STATE}/{MEMORY}",
    "dirs": [POINT],
    "gpu_socket": GPU_SOCKET,
    "verify": "full",
    "any_gpus": False,
    "limit_s": 15.0,
    "wall_s": 1000.0,
}
ONCE = f"""[Service]
Type=oneshot
ExecStart=
ExecStart=/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor} -m powerguard.effectors.host.look
Environment=LD_LIBRARY_PATH=/opt/python/lib:/opt/libraries PYTHONPATH=/opt/site:/opt/site-packages
StandardInput=file:/etc/powerguard/asked.json
StandardOutput=truncate:{STATE}.answer
ExecStopPost=
WatchdogSec=0
Restart=no
"""


class Looked(Host):
    """The same host, looked at by what would be the daemon's child."""

    def look(self) -> dict[str, Any]:
        self.container.check("systemctl", "start", "powerguard.service")
        return dict(json.loads(self.container.check("cat", f"{STATE}.answer")))

    def mount(self) -> None:
        lines = [f"mkdir -p {POINT}", f"mount -t tmpfs none {POINT}", f"mkdir {POINT}/global_step_5"]
        lines += [
            f"echo weights > {POINT}/global_step_5/rank0",
            f"/opt/powerguard/bin/powerguard seal {POINT}/global_step_5",
        ]
        self.container.check("bash", "-euc", "\n".join(lines))


@contextmanager
def host() -> Iterator[Looked]:
    with booted() as made:
        looked = Looked(made.container)
        folder = "/etc/systemd/system/powerguard.service.d"
        lines = [f"mkdir -p {folder} /etc/powerguard", f"cat > {folder}/once.conf <<'END'\n{ONCE}END"]
        lines += [f"cat > /etc/powerguard/asked.json <<'END'\n{json.dumps(ASKED)}\nEND"]
        made.container.check("bash", "-euc", "\n".join([*lines, "systemctl daemon-reload"]))
        yield looked


def test_what_the_daemon_would_hear_of_its_host() -> None:
    """GPUs through the root helper, a mount of its own, every byte of a seal; then each of them is missing."""
    with host() as looked:
        looked.mount()
        result = looked.look()
        assert (result["problems"], result["gpus"]) == ([], 2)
        assert result["detail"]["storage"] == f"{POINT} on {POINT} (tmpfs)"
        assert result["detail"]["newest"] == f"{POINT}: step 5 (read) in {POINT}"
        looked.container.check("bash", "-euc", f"cat > {STATE}/{MEMORY} <<'END'\n{result['memory']}\nEND")
        assert looked.look()["problems"] == []
        looked.container.check("umount", POINT)
        looked.container.check("mv", f"{WORLD}/gpu1", f"{WORLD}/away")
        gone, unmounted = looked.look()["problems"]
        assert "1 of 2 GPUs are there: GPU-1 (NVIDIA H100 80GB HBM3) is missing" in gone
        assert f"but was on {POINT} (tmpfs, none): it is not mounted" in unmounted
        looked.container.check("mv", f"{WORLD}/away", f"{WORLD}/gpu1")
        looked.mount()
        assert looked.look()["problems"] == []
