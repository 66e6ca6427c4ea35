"""The README's way from a bare host to an armed one, word by word, as root and as a user of the host.

Debian 12 in a container, with the settings of the README: a card that speaks SNMP v3 with privacy and takes the order
to cut its output, a BMC over IPMI LAN whose policy is wrong, and the toy trainer as another user's job. Card and BMC
answer from this machine, in the container's network.
"""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from powerguard.clock import boottime_s
from powerguard.sim.snmp_values import SimValue
from powerguard.sim.ups import APC, UpsBattery
from tests.e2e.peers import rfc1628_table
from tests.e2e.test_late_reboot import ONE_BOOT_ID
from tests.e2e.test_systemd_install import SETTINGS, UNITS, is_active, until
from tests.peers.installed import FILES, binds
from tests.peers.nspawn import Container, serving
from tests.peers.sim_bmc import SimBmc
from tests.peers.snmp_agent import SimUser, SnmpAgent
from tests.peers.ups_output import XUPS, SimCard, SwitchedUps

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.peer("systemd-nspawn", "mmdebstrap", "nsenter")]

README: Final = Path(__file__).parents[2] / "README.md"
POWERGUARD: Final = "/opt/powerguard/bin/powerguard"
SECRETS: Final = {"snmp-auth": "auth-passphrase-1", "snmp-priv": "priv-passphrase-1", "bmc": "bmc-password-1"}
LOAD: Final = 0.6
TRAINER: Final = """[Service]
User=train
ExecStart=/opt/powerguard/bin/python -m powerguard.sim.toy_trainer \
--socket /run/powerguard-trainers/llm.sock --dir /var/lib/toy --every 50
StateDirectory=toy
"""
NUT: Final = {
    "/etc/nut/ups.conf": "[rack]\n  driver = usbhid-ups\n  port = auto\n",
    "/etc/nut/upsmon.conf": "MONITOR rack@127.0.0.1 1 monitor upsmon-password-1 primary\nSHUTDOWNCMD /sbin/poweroff\n",
}
APCUPSD: Final = {
    "/etc/apcupsd/apcupsd.conf": "UPSCABLE usb\nUPSTYPE usb\nNETSERVER on\nNISIP 127.0.0.1\nBATTERYLEVEL 20\n"
}
USERS: Final = "u train 1000 -\nu guest 1001 -\n"


def settings() -> str:
    """Return the README's settings for peers on this host; a container has no clock that could wake it."""
    (text,) = re.findall(r"^    ```yaml\n(.*?)^    ```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("    ") for line in text.splitlines()]
    there = "\n".join(lines).replace("10.0.0.5", "127.0.0.1").replace("10.0.1.5", "127.0.0.1")
    assert "rtc: {kind: device}" in there
    there = re.sub(r"^rtc: .*$", "", there, flags=re.MULTILINE)
    return there.replace("    rating_w: 5400\n", "    rating_w: 5400\n    output_off: {by: snmp}\n")


@contextlib.contextmanager
def peers(ups: SwitchedUps, network: Path) -> Iterator[SimBmc]:
    """Card and BMC in that network."""
    user = SimUser("powerguard", SECRETS["snmp-auth"].encode(), SECRETS["snmp-priv"].encode())
    card = SimCard(ups.output, boottime_s, utility=lambda: ups.utility, lacks=frozenset({XUPS, APC, "1.3.6.1.2.1.1."}))
    bmc = SimBmc("powerguard", SECRETS["bmc"], policy="always-off", port=623)

    def values() -> Mapping[str, SimValue]:
        return {**card.values(), **rfc1628_table(ups)}

    @contextlib.asynccontextmanager
    async def both() -> AsyncIterator[None]:
        async with SnmpAgent(values, port=161, user=user, on_set=card.take), bmc:
            yield

    with serving(network, both):
        yield bmc


class Operator:
    """Types the commands of the README, as root or as a user of the host."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def types(self, *words: str, user: str = "root", stderr: bool = True) -> tuple[int, str]:
        """Run a command of ours; returns its exit status and what it says, which is never a traceback or a secret."""
        become = () if user == "root" else ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups")
        ended = self.container.run("env", "--unset=POWERGUARD_UNDER_TEST", *become, POWERGUARD, *words, limit_s=300)
        said = ended.stdout + ended.stderr
        assert "Traceback" not in said
        assert not [secret for secret in SECRETS.values() if secret in said]
        return ended.returncode, said if stderr else ended.stdout

    def doctor(self, user: str = "root") -> dict[str, list[tuple[str, str]]]:
        """Return what doctor finds: verdict to (name, text)."""
        found: dict[str, list[tuple[str, str]]] = {"PASS": [], "WARN": [], "FAIL": []}
        for check in json.loads(self.types("doctor", "--json", user=user)[1])["checks"]:
            found[check["verdict"]].append((check["name"], check["text"]))
        return found

    def status(self) -> dict[str, Any]:
        """Return the object of status; {} while the daemon is down."""
        answer: dict[str, Any] = json.loads(self.types("status", "--json")[1])
        return answer if answer.get("reachable") else {}

    def writes(self, text: str) -> None:
        """Put the settings in place."""
        self.container.check("bash", "-c", 'printf "%s" "$1" > "$2"', "bash", text, SETTINGS)


def installs(operator: Operator) -> None:
    """Steps 1 and 2. Before them there is one thing to do, and everybody is told what."""
    for user in ("root", "guest"):
        assert any("powerguard is not installed on this host" in text for _, text in operator.doctor(user)["FAIL"])
        assert operator.types("status", user=user)[0] == 4
    code, said = operator.types("install", "--prefix", "/opt/powerguard", "--resume-unit", "train.service")
    assert (code, "next: write /etc/powerguard/powerguard.yaml" in said) == (0, True), said
    is_printed_settings(operator)
    operator.writes(settings())
    assert operator.types("config", "validate")[0] == 0


def is_printed_settings(operator: Operator) -> None:
    """Step 2 by its other ways: what `discover` and `import` print are settings, valid as they stand."""
    for name in ("snmp-auth", "snmp-priv"):
        typed = 'umask 077; printf "%s" "$1" > "/root/$2"'
        operator.container.check("bash", "-c", typed, "bash", SECRETS[name], name)
    keys = "--user powerguard --auth-file /root/snmp-auth --priv-file /root/snmp-priv"
    for verb in (f"discover 127.0.0.1 {keys}", "import nut", "import apcupsd"):
        code, printed = operator.types(*verb.split(), stderr=False)
        assert (code, "\nups:\n" in printed) == (0, True), (verb, printed)
        operator.writes(printed)
        code, said = operator.types("config", "validate")
        assert code == 0, (verb, said)


def gives_secrets(operator: Operator) -> None:
    """Step 3. The daemon runs without them, and all that it says names what is missing; `install` restarts it later."""
    code, said = operator.types("install", "--prefix", "/opt/powerguard")
    assert code == 0
    assert re.findall(r"next: powerguard secret set (\S+):", said) == list(SECRETS)
    until(lambda: bool(operator.status()), "the daemon is not up without its secrets")
    until(lambda: "secret set snmp-auth" in json.dumps(operator.status()), "what is missing is not named")
    assert any("secret set bmc" in text for _, text in operator.doctor()["FAIL"])
    for name, secret in SECRETS.items():
        typed = 'unset POWERGUARD_UNDER_TEST; printf "%s" "$1" | "$2" secret set "$3"'
        operator.container.check("bash", "-c", typed, "bash", secret, POWERGUARD, name)
    assert operator.types("secret", "list")[0] == 0
    started_without = [text for _, text in operator.doctor()["FAIL"] if "the running daemon started without it" in text]
    assert len(started_without) == len(SECRETS)
    code, said = operator.types("install", "--prefix", "/opt/powerguard", "--verbose")
    assert (code, "systemctl restart powerguard.service" in said) == (0, True), said
    until(lambda: operator.status().get("supply") == "utility", "the UPS is not read")


def rehearses(operator: Operator, ups: SwitchedUps, bmc: SimBmc) -> None:
    """Step 4: all of it is real; the power-off is recorded, and the UPS is not told to cut its output."""

    def errors() -> list[str]:
        return [each["name"] for each in operator.status()["reasons"] if each["severity"] == "error"]

    def trainer() -> dict[str, Any]:
        trainers: list[dict[str, Any]] = operator.status()["trainers"]
        return trainers[0] if trainers else {"alive": False}

    container = operator.container
    remembered = ("test", "-s", "/var/lib/powerguard/host.json")
    container.check("systemctl", "start", "powerguard-resume.target")
    until(lambda: bool(trainer()["alive"]), "the trainer is not found")
    until(lambda: bmc.policy == "always-on", "a rehearsal sets the BMC's policy")
    until(lambda: errors() == ["rehearse"], "something else keeps it from being ready")
    until(lambda: container.run(*remembered).returncode == 0, "the host is not remembered", 90)
    for user in ("root", "guest"):
        assert operator.doctor(user)["FAIL"] == [], user
    code, said = operator.types("drill", "--yes")
    assert code == 0, said
    assert "drill" in [name for name, _ in operator.doctor()["PASS"]]

    ups._left = 0.4  # as after another outage
    ups.utility = False
    until(lambda: operator.status()["phase"] == "shutdown", "no power-off in the rehearsal", 200)
    assert trainer()["paused"]
    ups.utility, ups._left = True, ups.battery.health
    until(lambda: operator.status()["phase"] == "online", "utility does not end the rehearsal", 60)
    until(lambda: not trainer()["paused"], "training does not go on", 60)
    assert ups.output.cuts == 0
    assert is_active(container, "train.service")


def arms(operator: Operator, ups: SwitchedUps) -> None:
    """Step 5, and the outage that it was for."""
    operator.writes(settings().replace("mode: rehearse", "mode: armed"))
    operator.container.check("systemctl", "reload", "powerguard.service")
    until(lambda: bool(operator.status()["mode"] == "armed"), "the reload was not taken")
    until(lambda: bool(operator.status()["ready"]), "not ready")
    for user in ("root", "guest"):
        assert operator.doctor(user)["FAIL"] == [], user
    ups._left = 0.4
    ups.utility = False
    operator.container.off_within(300)
    assert not operator.container.rebooted


def test_from_a_bare_host_to_an_armed_one() -> None:
    """At each step for root and for a user: what is missing is named with its remedy, and at the end nothing fails."""
    ups = SwitchedUps(
        UpsBattery(runtime=((0.5, 540.0), (0.75, 360.0), (1.0, 240.0))), clock=boottime_s, load=lambda: LOAD
    )
    files = {
        **FILES,
        f"{UNITS}/powerguard.service.d/one-boot-id.conf": ONE_BOOT_ID,
        f"{UNITS}/train.service": TRAINER,
        "/usr/lib/sysusers.d/people.conf": USERS,
        **NUT,
        **APCUPSD,
    }
    with Container(binds=binds(), files=files) as container, peers(ups, container.network) as bmc:
        container.check("systemd-sysusers")
        operator = Operator(container)
        installs(operator)
        gives_secrets(operator)
        rehearses(operator, ups, bmc)
        arms(operator, ups)
