"""The sentinel as a unit of a booted host: started by a person, reloaded, and taken away with everything else.

A container with systemd 252: a user of its own, the whole sandbox, secrets as credentials.
"""

import time
from collections.abc import Callable
from typing import Final

import pytest

from tests.peers.installed import FILES, PREFIX, binds, install, say
from tests.peers.nspawn import Container

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.peer("systemd-nspawn", "mmdebstrap", "nsenter")]

UNIT: Final = "powerguard-sentinel.service"
SETTINGS: Final = "/etc/powerguard/sentinel.yaml"
GOOD: Final = """mode: armed
ups: {a: {sources: [{kind: nut, host: 127.0.0.1, name: a}]}}
hosts:
  n1:
    key: {credential: n1}
    bmc: {kind: ipmi-lan, host: 127.0.0.1, user: u, password: {credential: bmc}}
    feeds: [a]
"""
SECRETS: Final = """[Service]
LoadCredential=n1:/etc/powerguard/secrets/n1
LoadCredential=bmc:/etc/powerguard/secrets/bmc
"""


def write(container: Container, path: str, text: str) -> None:
    script = 'mkdir -p "${2%/*}"; printf "%s" "$1" > "$2"'
    container.check("bash", "-c", script, "bash", text, path)


def log_shows(container: Container, words: str) -> None:
    def shows() -> bool:
        return words in container.check("journalctl", "--unit", UNIT, "--no-pager")

    until(shows, f"the log to say {words!r}")


def until(holds: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.2)


def verdicts(container: Container) -> list[str]:
    """What doctor says of the sentinel on this host."""
    argv = ("env", "--unset=POWERGUARD_UNDER_TEST", f"{PREFIX}/bin/powerguard", "doctor")
    said = container.run(*argv, limit_s=60).stdout.splitlines()
    return [line.split()[0] for line in said if line.split()[1:2] == ["sentinel"]]


def test_started_by_a_person_reloaded_and_taken_away() -> None:
    """A reload with a mistake fails and says so, and what stood stands; one that holds counts; uninstall ends it."""
    drop_in = {f"/etc/systemd/system/{UNIT}.d/secrets.conf": SECRETS}
    with Container(binds=binds(), files={**FILES, **drop_in}) as container:
        assert not any("sentinel" in line for line in install(container)["next"])
        assert verdicts(container) == []
        for name in ("n1", "bmc"):
            write(container, f"/etc/powerguard/secrets/{name}", f"{name:-<64}")
        write(container, SETTINGS, GOOD)
        (result,) = (line for line in install(container)["next"] if "sentinel" in line)
        assert f"systemctl enable --now {UNIT}" in result
        assert verdicts(container) == ["FAIL"]
        container.check("systemctl", "enable", "--now", UNIT)
        assert verdicts(container) == ["PASS"]

        write(container, SETTINGS, GOOD.replace("feeds: [a]", "feeds: [b]"))
        assert container.run("systemctl", "reload", UNIT).returncode != 0
        log_shows(container, "unknown UPS (known: a)")
        write(container, SETTINGS, GOOD.replace("credential: n1", "credential: n2"))
        container.check("systemctl", "reload", UNIT)
        log_shows(container, "settings_refused")
        write(container, SETTINGS, GOOD.replace("mode: armed", "mode: dry-run"))
        container.check("systemctl", "reload", UNIT)
        log_shows(container, "settings_reloaded mode=dry-run")
        assert container.check("systemctl", "show", UNIT, "--property=NRestarts", "--value").strip() == "0"
        assert container.run("systemctl", "is-active", "--quiet", UNIT).returncode == 0
        assert verdicts(container) == ["WARN"]

        assert say(container, "uninstall")["is_done"]
        assert container.run("systemctl", "is-active", "--quiet", UNIT).returncode != 0
        assert container.run("test", "-e", "/var/lib/private/powerguard-sentinel/intents.json").returncode == 0
