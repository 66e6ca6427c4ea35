"""`powerguard install` on a booted host: the daemon runs without root and outlives what trains, and nothing is left.

A container with systemd 252; the daemon is the real one, with this machine's interpreter and libraries behind it.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from powerguard.clock import boottime_s
from powerguard.sim.ups import SimUps, UpsBattery
from tests.e2e.test_late_reboot import ONE_BOOT_ID, PORT, card
from tests.peers.installed import FILES, binds, install, say
from tests.peers.nspawn import Container

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.peer("systemd-nspawn", "mmdebstrap", "nsenter")]

SETTINGS = "/etc/powerguard/powerguard.yaml"
UNITS = "/etc/systemd/system"
GOOD = """mode: dry-run
ups: {a: {sources: [{kind: nut, host: 127.0.0.1, name: a}]}}
"""
RUNS = "[Service]\nExecStart=/bin/sleep infinity\n"
SLOW = "[Service]\nExecStop=/bin/sleep 3\n"
# What a real host has, in as few words: a network, a mount that needs it, a scheduler.
NETWORK = """[Unit]
DefaultDependencies=no
Conflicts=shutdown.target
Before=network.target shutdown.target
Wants=network.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
[Install]
WantedBy=multi-user.target
"""
MOUNT = """[Mount]
What=tmpfs
Where=/remote
Type=tmpfs
Options=_netdev
[Install]
WantedBy=remote-fs.target
"""
SCHEDULER = """[Unit]
After=network-online.target
Wants=network-online.target
"""
HOST = {
    f"{UNITS}/train.service": RUNS,
    f"{UNITS}/site-network.service": NETWORK,
    f"{UNITS}/remote.mount": MOUNT,
    f"{UNITS}/scheduler.service": SCHEDULER + RUNS,
    f"{UNITS}/reader.service": f"[Unit]\nRequiresMountsFor=/remote\n{RUNS}",
}


HANGS = "[Service]\\nExecStart=\\nExecStart=/bin/sleep infinity\\nRestartSec=0.2\\n"
CIRCLE = """[Unit]
DefaultDependencies=no
After=network-online.target
Wants=network-online.target
Before=basic.target
[Service]
Type=oneshot
ExecStart=/bin/true
"""


@contextmanager
def host(more: Mapping[str, str] | None = None) -> Iterator[Container]:
    """A booted host with powerguard's program, and nothing of it in place."""
    with Container(binds=binds(), files={**HOST, **FILES, **(more or {})}) as container:
        yield container


def write(container: Container, text: str) -> None:
    container.check("bash", "-c", 'mkdir -p /etc/powerguard; printf "%s" "$1" > "$2"', "bash", text, SETTINGS)


def until(what: Callable[[], bool], why: str, limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end_s, why
        time.sleep(0.2)


def is_active(container: Container, unit: str) -> bool:
    return container.run("systemctl", "is-active", "--quiet", unit).returncode == 0


def shown(container: Container, unit: str, name: str) -> str:
    return container.check("systemctl", "show", unit, f"--property={name}", "--value").strip()


def listing(container: Container) -> set[str]:
    """Every file of the system, less what systemd and dpkg keep of users, and what the test itself has put there."""
    found = container.check("find", "/etc", "/usr", "-xdev", "(", "-type", "f", "-o", "-type", "l", ")").splitlines()
    users = ("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow", "/etc/subuid", "/etc/subgid", "/etc/.pwd.lock")
    return {path for path in found if not path.startswith((*users, "/etc/powerguard/", "/etc/ld.so.cache"))}


def test_installed_started_used_and_taken_away() -> None:
    """The whole life of it on one host; each run says what it did, and the second one did nothing."""
    with host() as container:
        before = listing(container)
        ended = install(container, "--resume-unit", "train.service")
        assert ended["next"] != [], "no settings yet, so no daemon"
        assert not is_active(container, "powerguard.service")
        assert is_active(container, "powerguard-off.socket")
        write(container, GOOD)
        ended = install(container)
        assert ended["doubts"] == [], "no circle with the units of the host, and polkit is there"
        assert {row["did"] for row in ended["files"]} == {"unchanged", "written"}
        until(
            lambda: is_active(container, "powerguard.service"), "the daemon is not ready, with a UPS that is not there"
        )
        pid = shown(container, "powerguard.service", "MainPID")
        status = container.check("cat", f"/proc/{pid}/status")
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        uid = container.check("id", "-u", "powerguard").strip()
        assert facts["Uid"].split() == [uid] * 4
        assert (int(facts["CapBnd"], 16), facts["NoNewPrivs"], facts["Seccomp"]) == (0, "1", "2")
        assert {row["did"] for row in install(container)["files"]} == {"unchanged"}

        start = (
            "setpriv",
            "--reuid=powerguard",
            "--regid=powerguard",
            "--clear-groups",
            "systemctl",
            "--no-ask-password",
        )
        assert container.run(*start, "start", "train.service").returncode != 0
        container.check(*start, "start", "powerguard-resume.target")
        assert is_active(container, "train.service")

        ended = say(container, "uninstall")
        assert ended["is_done"]
        for unit in ("powerguard.service", "powerguard-off.socket"):
            assert not is_active(container, unit)
        assert shown(container, "powerguard.service", "LoadState") == "not-found"
        assert listing(container) == before
        assert container.check("find", "/run", "-maxdepth", "1", "-name", "powerguard*") == ""
        assert container.run("test", "-e", SETTINGS).returncode == 0
        assert container.run("test", "-d", "/var/lib/powerguard").returncode == 0
        assert is_active(container, "train.service"), "training is none of its business"


FILL = """cd /run/powerguard-trainers
head -c 64M /dev/zero >filler 2>/dev/null
for number in {1..4000}; do : >"$number" || exit 0; done 2>/dev/null
exit 1
"""


def test_no_user_can_fill_run() -> None:
    """Trainers' sockets lie in memory of their own, from the install on; a host where they are in use gets it later."""
    folder, nobody = "/run/powerguard-trainers", ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    mounted = ("mountpoint", "--quiet", folder)

    def size() -> int:
        """KiB that are used in /run."""
        return int(container.check("df", "--output=used", "/run").split()[-1])

    with host() as container:
        write(container, GOOD)
        assert install(container)["doubts"] == []
        container.check(*mounted)
        assert container.check("stat", "--format=%a %U %G", folder).split() == ["3777", "root", "powerguard"]
        orders = container.check("bash", "-c", "stat --format=%a:%s:%U /run/powerguard-off/{off,reboot}").split()
        assert orders == ["600:37:root"] * 2, "there from the boot on, and written in place"
        before = size()
        container.check(*nobody, "bash", "-c", FILL)
        assert size() - before < 512
        container.check("systemctl", "restart", "powerguard.service")
        assert container.run("test", "-e", f"{folder}/filler").returncode == 0, "it outlives the daemon"

        answer = say(container, "uninstall")
        assert next(row["did"] for row in answer["files"] if row["path"] == folder).startswith("kept")
        container.check("bash", "-c", f"rm {folder}/*; umount {folder}; touch {folder}/train.sock")
        assert any(folder in doubt for doubt in install(container)["doubts"])
        assert container.run(*mounted).returncode != 0, "it would hide the socket of training that runs"
        assert container.run("test", "-e", f"{folder}/train.sock").returncode == 0
        checks = json.loads(container.run("/opt/powerguard/bin/powerguard", "doctor", "--json").stdout)["checks"]
        assert [each["verdict"] for each in checks if each["name"] == "trainers.folder"] == ["WARN"]
        container.check("rm", f"{folder}/train.sock")
        assert install(container)["doubts"] == []
        container.check(*mounted)


def test_an_outage_is_no_time_to_uninstall() -> None:
    """Refused, and nothing is touched; --force goes on, and says what is at stake."""
    ups = SimUps(UpsBattery(runtime=((0.6, 3600.0),)), clock=boottime_s, load=lambda: 0.6)
    with (
        host({f"{UNITS}/powerguard.service.d/one-boot-id.conf": ONE_BOOT_ID}) as container,
        card(ups, container.network),
    ):
        source = f"{{kind: snmp, host: 127.0.0.1, port: {PORT}, poll_s: 0.5, timeout_s: 0.5}}"
        write(container, f"mode: dry-run\nups: {{a: {{sources: [{source}], runtime_table: {{60: 3600}}}}}}\n")
        install(container)
        status = ("/opt/powerguard/bin/powerguard", "status", "--short")
        until(lambda: container.run(*status).stdout.startswith("online"), "not online")
        ups.utility = False
        until(lambda: container.run(*status).stdout.startswith("on_battery"), "not on battery")
        for words in (("uninstall",), ("uninstall", "--dry-run")):
            assert "outage" in say(container, *words, status=1)["error"]
        assert is_active(container, "powerguard.service")
        assert is_active(container, "powerguard-off.socket")
        container.check("systemctl", "kill", "--signal=KILL", "powerguard.service")
        container.check("systemctl", "stop", "powerguard.service")
        assert "as the daemon last wrote" in say(container, "uninstall", status=1)["error"]
        answer = say(container, "uninstall", "--force")
        assert answer["is_done"]
        assert any("outage" in doubt for doubt in answer["doubts"])


def reasons(container: Container) -> set[str]:
    ended = container.run("/opt/powerguard/bin/powerguard", "status", "--json").stdout
    return {reason["name"] for reason in json.loads(ended).get("reasons", ())}


def test_the_power_off_listens_again_after_restart_crash_and_reinstall() -> None:
    """All within one boot. While nothing listens, the armed daemon is not ready; root's doctor agrees."""
    socket, word = "powerguard-off.socket", "/run/powerguard-off/word"

    def power_off_check() -> str:
        answer = json.loads(container.run("/opt/powerguard/bin/powerguard", "doctor", "--json").stdout)
        return next(str(each["verdict"]) for each in answer["checks"] if each["name"] == "host.power_off")

    drop_in = f"{UNITS}/powerguard.service.d/one-boot-id.conf"
    with host({drop_in: ONE_BOOT_ID}) as container:
        write(container, GOOD.replace("dry-run", "armed"))
        install(container)
        until(lambda: is_active(container, "powerguard.service"), "not started")
        until(lambda: "no_reading" in reasons(container), "no status")
        until(lambda: "no_power_off" not in reasons(container), "the helper does not answer")
        assert power_off_check() == "PASS"

        container.check("systemctl", "stop", socket)
        assert container.run("test", "-e", word).returncode != 0
        assert power_off_check() == "FAIL"
        until(lambda: "no_power_off" in reasons(container), "ready without a power-off", limit_s=75.0)
        container.check("systemctl", "restart", socket)
        until(lambda: "no_power_off" not in reasons(container), "the repair does not show")
        assert power_off_check() == "PASS"

        container.check("systemctl", "stop", socket)
        container.check("mkfifo", "--mode=0200", word)  # as an older version leaves it
        container.check("chown", "powerguard:root", word)
        container.check("systemctl", "start", socket)

        say(container, "uninstall")
        assert container.run("test", "-e", word).returncode != 0
        install(container)
        assert is_active(container, socket)
        until(lambda: is_active(container, "powerguard.service"), "not started again")
        until(lambda: "no_reading" in reasons(container), "no status")
        until(lambda: "no_power_off" not in reasons(container), "the helper does not answer after a reinstall")


def test_a_daemon_that_sees_another_boot_id_is_not_ready() -> None:
    """As in this container with the daemon's whole sandbox: its word would be refused, and it is told beforehand."""
    with host() as container:
        write(container, GOOD.replace("dry-run", "armed"))
        install(container)
        until(lambda: is_active(container, "powerguard.service"), "not started")
        until(lambda: "no_power_off" in reasons(container), "ready, and its word would be refused")
        log = container.check("journalctl", "--unit=powerguard.service", "--output=cat")
        assert "power_off_unavailable" in log
        assert "meant for another boot" in log


def test_the_daemon_sees_the_clock_and_no_other_device() -> None:
    """A container has no clock: a harmless device of this name stands for it. Without one the daemon starts as well."""
    with host() as container:
        write(container, GOOD)
        install(container)
        until(lambda: is_active(container, "powerguard.service"), "not started without a clock")
        container.check("mknod", "/dev/rtc0", "c", "1", "8")
        container.check("chgrp", "powerguard", "/dev/rtc0")
        container.check("chmod", "0640", "/dev/rtc0")
        container.check("systemctl", "restart", "powerguard.service")
        pid = shown(container, "powerguard.service", "MainPID")
        inside = ("nsenter", "--target", pid, "--mount", "--", "setpriv", "--reuid=powerguard", "--regid=powerguard")
        inside = (*inside, "--clear-groups", "bash", "-c")
        container.check(*inside, "exec < /dev/rtc0")
        assert container.run(*inside, "exec > /dev/rtc0").returncode != 0
        assert container.run("test", "-e", "/dev/console").returncode == 0
        assert container.run(*inside, "test -e /dev/console").returncode != 0


def test_settings_that_are_wrong_keep_no_training_from_running() -> None:
    """The gate opens once; a person who stops training then is obeyed, and the daemon is tried again all the while."""
    with host() as container:
        write(container, "mode: yes please\n")
        install(container, "--resume-unit", "train.service", status=1)
        until(lambda: is_active(container, "train.service"), "the gate stayed shut")
        container.check("systemctl", "stop", "train.service")
        tries = int(shown(container, "powerguard.service", "NRestarts"))
        until(lambda: int(shown(container, "powerguard.service", "NRestarts")) > tries + 1, "not tried again")
        assert not is_active(container, "train.service")
        write(container, GOOD)
        until(lambda: is_active(container, "powerguard.service"), "mended settings were not noticed")


@pytest.mark.parametrize("slow", ["train.service", "scheduler.service", "reader.service"])
def test_the_daemon_outlives_training_scheduler_and_mounts_but_not_the_network(slow: str) -> None:
    """By the console of the shutdown. One at a time is slow to stop: being first by chance proves nothing."""
    with host({f"{UNITS}/{slow}.d/slow.conf": SLOW}) as container:
        write(container, GOOD)
        container.check("mkdir", "-p", "/remote")
        install(container, "--resume-unit", "train.service")
        until(lambda: is_active(container, "powerguard.service"), "not started")
        units = ("site-network.service", "reader.service", "scheduler.service", "powerguard-resume.target")
        container.check("systemctl", "start", *units)
        container.check("bash", "-c", "kill -s RTMIN+20 1")  # systemd tells each step on the console
        container.check("systemctl", "start", "--no-block", "poweroff.target")
        container.off_within(60)
        ends = re.sub("\x1b\\[[0-9;]*[a-zA-Z]", "", container.console)
    outlived = ("Stopped train.service", "Stopped scheduler.service", "Unmounted remote.mount")
    order = [ends.find(step) for step in (*outlived, "Stopping powerguard.serv", "Stopped site-network.service")]
    assert -1 not in order, ends[-4000:]
    assert max(order[:3]) < order[3] < order[4], ends[-4000:]


def test_the_watchdog_is_looked_at_before_sysinit_and_holds_nothing_up() -> None:
    """A container has neither modules nor a BMC, and that is told; the boot unit finds nothing and ends well.

    One that hangs is not waited for, and is tried again until the daemon is there.

    On this host something before basic.target waits for the network: with the daemon that is a circle, and is told too.
    """
    circle = {f"{UNITS}/circle.service": CIRCLE, f"{UNITS}/basic.target.d/x.conf": "[Unit]\nWants=circle.service\n"}
    with host(circle) as container:
        write(container, GOOD)
        finished = install(container, "--with", "ipmi", status=1)
        assert any("powerguard.service" in doubt and "wait for each other" in doubt for doubt in finished["doubts"]), (
            finished
        )
        assert [row["command"].split()[0] for row in finished["steps"] if row["did"] != "done"] == [
            "modprobe",
            "modprobe",
        ]
        unit = "powerguard-disarm.service"
        container.check("systemctl", "stop", "powerguard.service")
        container.check("rm", "-rf", "/run/powerguard")
        container.check("systemctl", "start", unit)
        until(lambda: shown(container, unit, "ActiveState") == "inactive", "it does not end without a BMC")
        ended = [shown(container, unit, name) for name in ("ConditionResult", "Result", "NRestarts")]
        assert ended == ["yes", "success", "0"]
        assert "sysinit.target" in shown(container, unit, "Before")

        folder = f"/run/systemd/system/{unit}.d"
        container.check("bash", "-c", f"mkdir -p {folder}; printf '{HANGS}' >{folder}/x.conf")
        container.check("systemctl", "daemon-reload")
        container.check("systemctl", "start", unit)  # within the limit of any command, and it hangs for ever
        container.check("systemctl", "kill", "--signal=KILL", unit)
        until(lambda: shown(container, unit, "NRestarts") == "1" and is_active(container, unit), "not tried again")
        container.check("bash", "-c", "mkdir -p /run/powerguard; touch /run/powerguard/powerguard.sock")
        container.check("systemctl", "kill", "--signal=KILL", unit)
        until(lambda: shown(container, unit, "ActiveState") in {"inactive", "failed"}, "it is tried beside the daemon")
