"""powerguard-slurm under a real systemd, in a container that is powered off, with stand-ins for Slurm's commands."""

import json

import pytest

from powerguard.effectors.options import SLURM_SOCKET
from tests.peers.installed import FILES, PYTHON, binds, install
from tests.peers.nspawn import Container

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.peer("systemd-nspawn", "mmdebstrap", "nsenter")]

# The power-off begins in the middle of the word, as at a commit: nothing waits for Slurm.
SCONTROL = """#!/bin/sh
case $* in
requeue*) systemctl start --no-block --job-mode=replace-irreversibly poweroff.target; sleep 1 ;;
*"show node"*) echo "NodeName=gpu1 NodeHostName=$(hostname) State=IDLE Version=22.05.8" ;;
esac
"""
SQUEUE = """#!/bin/sh
printf '%-32s%-72s%-8s%-12s\\n' 12 gpu1 1 0
"""
CLIENT = """import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    client.sendall(sys.argv[2].encode() + b"\\n")
    client.recv(4096)
"""
LOGS = "[Service]\nStandardError=journal+console\n"


def test_a_power_off_does_not_cut_the_requeue_of_its_jobs_short() -> None:
    files = {
        **FILES,
        "/usr/bin/scontrol": SCONTROL,
        "/usr/bin/squeue": SQUEUE,
        "/etc/systemd/system/powerguard-slurm@.service.d/logs.conf": LOGS,
    }
    word = {"word": "leave", "node": "gpu1", "outage": "o-1", "ups": "rack-a", "hold": False}
    with Container(binds=binds(), files=files) as container:
        install(container, "--with", "slurm")
        container.run(PYTHON, "-I", "-c", CLIENT, SLURM_SOCKET, json.dumps(word))
        container.off_within(60.0)
        assert "leave: down: node gpu1, jobs ['12']" in container.console
