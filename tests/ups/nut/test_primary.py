"""A real upsmon as the primary, and our source as the secondary that it must wait for."""

import asyncio
import subprocess
import time
from pathlib import Path

import pytest

from powerguard.core.model.events import Reading
from tests.peers.nut import USERS, upsd
from tests.peers.upsmon import upsmon
from tests.ups.nut.nut_helpers import listening, options, until
from tests.ups.snmp.snmp_helpers import secret

pytestmark = [pytest.mark.peer("upsd", "dummy-ups", "upsmon", "unshare"), pytest.mark.root]


def needs_a_mount_namespace() -> None:
    argv = ("unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/run")
    if subprocess.run(argv, check=False, capture_output=True).returncode:
        pytest.skip("no mount namespace here: upsmon would use this machine's /run/nut")


async def test_story_11_a_primary_waits_for_as_long_as_we_hold_the_login(tmp_path: Path) -> None:
    """On a low battery it sets FSD, and shuts down when we leave: neither before, nor only after its HOSTSYNC."""
    needs_a_mount_namespace()
    more = {"user": "sec", "password": secret(tmp_path, "sec", USERS["sec"])}
    lines = ("POLLFREQ 1", "POLLFREQALERT 1", "FINALDELAY 0", "HOSTSYNC 60")
    async with upsd() as peer, upsmon(peer, "primary", *lines, user="prim", role="primary") as primary:
        async with listening(options(peer.port, **more)) as (_, heard):
            await until(heard, Reading)
            await peer.counts(2)
            wall_s = time.time()
            peer.change({"ups.status": "OB LB"})
            reading = await until(heard, Reading, lambda reading: reading.forced_shutdown)
            assert reading.low_battery
            await asyncio.sleep(3)  # the checkpoint, as it were
            assert "SHUTDOWNCMD" not in [kind for kind, _ in primary.notified()]
        left_s = time.time()
        at_s = await primary.until("SHUTDOWNCMD", wall_s)
        assert left_s - 1 < at_s < left_s + 30
