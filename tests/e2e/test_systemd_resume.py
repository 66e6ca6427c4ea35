"""Back in time: from the operating system of a booted host to training that has resumed, by the daemon's own report.

Debian 12 in a container, with powerguard put in place by its own `install`, armed; what trains is the toy trainer, in a
unit that only powerguard-resume.target wants. An outage powers the host off, and it is booted again from the same disk.
"""

import time
from pathlib import Path
from typing import Final

import pytest

from powerguard.clock import boottime_s
from powerguard.daemon.journal import read_only, recent
from powerguard.sim.demo.story import numbers
from powerguard.sim.ups import SimUps, UpsBattery
from tests.e2e.test_late_reboot import ONE_BOOT_ID, PORT, UNITS, Story, card
from tests.peers.installed import FILES, binds, install, say
from tests.peers.nspawn import Container, disk

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.peer("systemd-nspawn", "mmdebstrap", "nsenter")]

BAR_S: Final = 90.0
"""The promise of docs/guides/return.md: from the operating system to a step of training, UPS and charge willing."""
LOAD: Final = 0.6
RUNTIME: Final = ((0.3, 200.0), (LOAD, 100.0))
SETTINGS: Final = f"""mode: armed
ups:
  a:
    sources: [{{kind: snmp, host: 127.0.0.1, port: {PORT}, poll_s: 0.5, timeout_s: 0.5}}]
    runtime_table: {{30: 200, 60: 100}}
budget: {{health: 0.5, reserve_s: 1, stop_q95_s: 30, stop_median_s: 10, bare_stop_s: 5, recharge_h: 0.01}}
host: {{kind: systemd, force_after_s: 60}}
bmc: {{kind: none}}
"""
TRAINER: Final = """[Service]
ExecStart=/opt/powerguard/bin/python -m powerguard.sim.toy_trainer \
--socket /run/powerguard-trainers/toy.sock --dir /var/lib/toy --every 50
StateDirectory=toy
"""


def host(root: Path) -> Container:
    units = {"powerguard.service.d/one-boot-id.conf": ONE_BOOT_ID, "train.service": TRAINER}
    files = {**FILES, **{f"{UNITS}/{name}": text for name, text in units.items()}}
    return Container(binds=binds(), files=files, root=root)


def power_off(root: Path, story: Story, ups: SimUps) -> None:
    """The boot before: training runs, the daemon has seen where it saves, and an outage takes the host down."""
    with host(root) as container, card(ups, container.network):
        write = 'mkdir -p /etc/powerguard; printf "%s" "$1" > "$2"'
        container.check("bash", "-c", write, "bash", SETTINGS, "/etc/powerguard/powerguard.yaml")
        install(container, "--resume-unit", "train.service")
        container.check("systemctl", "start", "powerguard-resume.target")
        remembered = root / "var/lib/powerguard/host.json"
        end_s = time.monotonic() + 90
        while not remembered.exists() or '"toy"' not in remembered.read_text(encoding="utf-8"):
            assert time.monotonic() < end_s, f"where training saves was not remembered; {story.end()}"
            time.sleep(0.2)
        ups.utility = False
        story.until("power_off_accepted", 90)
        container.off_within(60)
    ups.utility = True


def test_training_has_resumed_within_the_bar_and_nobody_slept(capsys: pytest.CaptureFixture[str]) -> None:
    """Each phase is in the report. Ours follow from what happens: the answer to one order gives the next, at once.

    The container shares the clock of the machine around it, so the report's kernel is that machine's: the operating
    system's own start is asked of systemd.
    """
    ups = SimUps(UpsBattery(runtime=RUNTIME, health=0.5, recharge_s=36.0), clock=boottime_s, load=lambda: LOAD)
    with disk() as root:
        story = Story(root)
        power_off(root, story, ups)
        with host(root) as container, card(ups, container.network):
            story.until("outage_ended", 180)
            container.check("mountpoint", "--quiet", "/run/powerguard-trainers")  # at boot, by the unit
            reply = say(container, "report")
            shown = container.check("systemctl", "show", "--property=UserspaceTimestampMonotonic", "--value")
        saved = [numbers(line)["step"] for line in story.notes("checkpoint_durable")]
        with read_only(root / "var/lib/powerguard/journal.sqlite") as db:
            lines = recent(db, 5000)
    (returned,) = (line for line in lines if line.event == "host_returned")
    since = {line.event: line for line in lines if line.seq >= returned.seq and line.kind in ("note", "action")}
    checked, ended = since["host_checked"], since["outage_ended"]
    back = reply["recovery"]
    parts = {name: back[name] for name in ("stop_s", "gate_s", "check_s", "start_s", "resumed_s", "ours_s")}
    assert None not in parts.values(), parts
    assert reply["outcome"] == "clean_shutdown"
    assert f"toy: step {saved[-1]} (whole) in /var/lib/toy" in str(numbers(checked)["newest"])
    assert int(ended.because.rpartition(" ")[2]) >= int(str(saved[-1])), "it went on where it was"

    # The host is checked while utility has to hold; what comes last orders the start, and the first step ends it.
    assert checked.at_s <= since["gate_opened"].at_s == since["ResumeTraining"].at_s
    assert since["trainer_appeared"].at_s == ended.at_s
    assert sum(parts[name] for name in ("gate_s", "check_s", "start_s", "resumed_s")) == pytest.approx(parts["ours_s"])

    os_s = int(shown) / 1e6
    with capsys.disabled():
        print(f"\nOS to resumed {ended.at_s - os_s:.1f} s: OS to the daemon {returned.at_s - os_s:.1f} s,", parts)
    assert ended.at_s - os_s <= BAR_S
