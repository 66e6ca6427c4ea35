"""Layer A, end to end: utility that is back while units stop turns the power-off of the real daemon into a reboot.

Debian 12 in a container, with powerguard put in place by its own `install`, armed; a simulated card of a UPS in the
container's network, but outside of it, so that it answers until the end. Both boots have one disk and one journal.
"""

import contextlib
import time
from pathlib import Path
from typing import Final

import pytest

from powerguard.clock import boottime_s
from powerguard.daemon.journal import JournalError, Line, read_only, recent
from powerguard.sim.ups import SimUps, UpsBattery
from tests.peers.installed import FILES, binds, install
from tests.peers.nspawn import Container, disk, serving
from tests.peers.snmp_agent import SnmpAgent

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.peer("systemd-nspawn", "mmdebstrap", "nsenter")]

UNITS: Final = "/etc/systemd/system"
PORT: Final = 10161
LOAD: Final = 0.6
RUNTIME: Final = ((0.3, 280.0), (LOAD, 140.0))
"""Half worn: 70 s; the commit comes when a stop of 35 s still fits, about 20 s after the cut."""
SETTINGS: Final = f"""mode: armed
ups:
  a:
    sources: [{{kind: snmp, host: 127.0.0.1, port: {PORT}, poll_s: 0.5, timeout_s: 0.5}}]
    runtime_table: {{30: 280, 60: 140}}
trainer_sockets: null
budget: {{health: 0.5, reserve_s: 1, stop_q95_s: 60, stop_median_s: 35, bare_stop_s: 5, recharge_h: 0.01}}
host: {{kind: systemd, force_after_s: 90}}
bmc: {{kind: none}}
"""
# Each of these mounts /proc anew, which in a container shows the boot id of the machine around it; on a host there is
# one. The word of the daemon names the boot, and powerguard-off obeys none that is meant for another.
ONE_BOOT_ID: Final = "[Service]\nProtectProc=default\nProtectKernelTunables=no\nProtectControlGroups=no\n"
SLOW: Final = "[Service]\nExecStart=/bin/sleep infinity\nExecStop=/bin/sleep {stop_s}\n"


def host(root: Path, stop_s: int) -> Container:
    """Return a host on that disk, whose training takes so long to stop."""
    units = {"powerguard.service.d/one-boot-id.conf": ONE_BOOT_ID, "train.service": SLOW.format(stop_s=stop_s)}
    files = {**FILES, **{f"{UNITS}/{name}": text for name, text in units.items()}}
    return Container(binds=binds(), files=files, root=root)


def card(ups: SimUps, network: Path) -> contextlib.AbstractContextManager[None]:
    """Answer for the UPS in that network."""
    return serving(network, lambda: SnmpAgent(ups.apc_table, port=PORT))


class Story:
    """The journal, as it lies on the disk of the host."""

    def __init__(self, root: Path) -> None:
        self._path = root / "var/lib/powerguard/journal.sqlite"

    def notes(self, event: str) -> list[Line]:
        """Every note of that name, over all boots."""
        return [line for line in self._lines() if line.event == event]

    def until(self, event: str, limit_s: float) -> None:
        """Wait for a note."""
        end_s = time.monotonic() + limit_s
        while not self.notes(event):
            assert time.monotonic() < end_s, f"no {event} within {limit_s:.0f} s; {self.end()}"
            time.sleep(0.2)

    def end(self) -> str:
        """What it says last."""
        lines = self._lines()[-20:]
        return "the journal ends:\n" + "\n".join(f"{line.at_s:.1f} {line.event}: {line.because}" for line in lines)

    def _lines(self) -> tuple[Line, ...]:
        try:
            with read_only(self._path) as db:
                return recent(db, 5000)
        except JournalError:
            return ()


@pytest.mark.parametrize(("returns", "stop_s"), [(True, 20), (False, 20), (True, 300)])
def test_the_power_off_ends_in_a_reboot_where_utility_is_back_and_only_there(*, returns: bool, stop_s: int) -> None:
    """Utility is back 3 s after the word, training takes 20 s to stop, and the daemon is stopped last: it decides.

    So too where training hangs in its stop until the deadline kills it: the daemon is then heard after that.
    After the reboot the same outage goes on: in recovery, until the gate opens and the resume target is started.
    """
    ups = SimUps(UpsBattery(runtime=RUNTIME, health=0.5, recharge_s=36.0), clock=boottime_s, load=lambda: LOAD)
    with disk() as root:
        story = Story(root)
        with host(root, stop_s) as container, card(ups, container.network):
            container.check("bash", "-c", 'mkdir -p /etc/powerguard; printf "%s" "$1" > "$2"', "bash",
                            SETTINGS, "/etc/powerguard/powerguard.yaml")  # fmt: skip
            install(container, "--resume-unit", "train.service")
            container.check("systemctl", "start", "powerguard-resume.target")
            ups.utility = False
            story.until("power_off_accepted", 90)
            time.sleep(3)
            ups.utility = returns
            container.off_within(60)
            assert container.rebooted == returns, f"{story.end()}\n{container.console[-1000:]}"
        if not returns:
            (left,) = story.notes("reboot_left")
            assert "utility is not stable" in left.because
            assert story.notes("reboot_ordered") == []
            return
        assert len(story.notes("reboot_ordered")) == 1
        with host(root, stop_s) as container, card(ups, container.network):
            story.until("host_returned", 30)
            story.until("gate_opened", 60)
            end_s = time.monotonic() + 10
            while container.run("systemctl", "is-active", "--quiet", "train.service").returncode != 0:
                assert time.monotonic() < end_s, "training was not started"
                time.sleep(0.2)
        assert len(story.notes("power_off_accepted")) == 1
        assert len({line.outage for line in story.notes("phase_changed")} - {None}) == 1
