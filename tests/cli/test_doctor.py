"""Doctor beside real answers: a simulated card and BMC, a trainer's socket, a served daemon, and none of them."""

import argparse
import asyncio
import contextlib
import dataclasses
import grp
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from powerguard.cli.doctor.checks import CheckContext, _group, _trainers, journal_finding, source_name, unreadable
from powerguard.cli.main import main
from powerguard.clock import boot_id
from powerguard.core.model.policy import Drop, Learned
from powerguard.core.model.state import State
from powerguard.daemon.control.admin import admin_server
from powerguard.daemon.journal import Entry, Inline, Journal
from powerguard.daemon.observe.status import status
from powerguard.settings.load import load, load_with_origins
from powerguard.settings.policy import policy as make_policy
from powerguard.sim import snmp_values as sim
from powerguard.wire import After, TrainerStatus
from tests.daemon.watched import WALL_S, scene
from tests.golden import FIGURES, Golden
from tests.peers.redfish import OwnRedfish, make_certificate
from tests.peers.sim_bmc import SimBmc
from tests.peers.snmp_agent import SnmpAgent
from tests.ups.snmp.snmp_helpers import NarrowCard, table

COMMUNITY, PASSWORD = "c0mmunity-of-the-tests", "bmc-password-1"

SETTINGS = """\
mode: armed
ups:
  rack-a:
    sources:
      - kind: snmp
        host: 127.0.0.1
        port: {snmp}
        version: 2c
        community: {{file: "{folder}/community"}}
        timeout_s: {timeout_s}
        poll_s: 10.0  # a machine that is busy is no slow card
    runtime_table: {table}
trainers:
  - {{name: llm, url: "unix:{folder}/llm.sock", after: pause}}
trainer_sockets: null
bmc: {{kind: ipmi-lan, host: 127.0.0.1, port: {bmc}, user: pg, password: {{file: "{folder}/bmc"}}}}
host: {{kind: command, command: [/bin/true], force_after_s: 60}}
journal: {{path: "{folder}/journal.sqlite"}}
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/tmp", prefix="pg "))
    for name, text in (("community", COMMUNITY), ("bmc", PASSWORD)):
        (made / name).write_text(text, encoding="utf-8")
        (made / name).chmod(0o400)
    yield made
    shutil.rmtree(made)


def settings(
    folder: Path,
    *,
    snmp: int,
    bmc: int,
    runtimes: str = "{50: 1620, 75: 1080, 100: 720}",
    timeout_s: float = 0.5,
) -> Path:
    """Write them. timeout_s: of the card; short for one that is silent, long for one that a busy machine delays."""
    text = SETTINGS.format(folder=folder, snmp=snmp, bmc=bmc, table=runtimes, timeout_s=timeout_s)
    path = folder / "pg.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@asynccontextmanager
async def trainer(folder: Path, conduct: After = After.PAUSE) -> AsyncIterator[None]:
    async with answering(f"{folder}/llm.sock", TrainerStatus(job="llm", step=7, conduct=conduct).to_json()):
        yield


@asynccontextmanager
async def answering(socket: str, body: bytes) -> AsyncIterator[None]:
    """Answer the question for the status, and no other."""

    async def status(_: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/api/v1/status", status)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def doctor(config: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run it in a thread: its peers are served by this event loop. `test_for_people` starts the real process."""
    printed, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
        async with asyncio.timeout(60.0):
            code = await asyncio.to_thread(main, ["doctor", "--config", str(config), "--json", *words])
    out = printed.getvalue()
    assert complained.getvalue() == ""
    answer = json.loads(out)
    assert (answer["schema_version"], answer["object"], answer["exit"]) == (1, "doctor", code)
    example = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "doctor.json").read_text(encoding="utf-8"))
    assert (list(answer), list(answer["checks"][0])) == (list(example), list(example["checks"][0]))
    for private in (COMMUNITY, PASSWORD):
        assert private not in out
    return code, answer["checks"], out


def verdicts(checks: list[dict[str, Any]], name: str) -> list[str]:
    return [check["verdict"] for check in checks if check["name"] == name]


def text_of(checks: list[dict[str, Any]], name: str, verdict: str = "") -> str:
    return "; ".join(c["text"] for c in checks if c["name"] == name and c["verdict"].startswith(verdict))


async def test_everything_answers(folder: Path) -> None:
    """Card, trainer, BMC and daemon are asked; the sums are the daemon's own."""
    async with (
        SnmpAgent(lambda: table("apc"), community=COMMUNITY) as ups,
        trainer(folder),
        SimBmc("pg", PASSWORD, policy="always-on") as bmc,
        admin_server(scene(), path=f"{folder}/s.sock") as path,
    ):
        code, checks, _ = await doctor(settings(folder, snmp=ups.port, bmc=bmc.port, timeout_s=5.0), "--socket", path)
    assert verdicts(checks, "ups.127.0.0.1") == ["PASS"]
    assert "utility, charge" in text_of(checks, "ups.127.0.0.1")
    assert verdicts(checks, "trainer.llm") == ["PASS"]
    assert verdicts(checks, "bmc") == ["PASS"]
    assert verdicts(checks, "budget") == ["PASS"]
    assert verdicts(checks, "secret") == ["PASS", "PASS"]
    assert verdicts(checks, "journal") == ["PASS"]
    assert verdicts(checks, "daemon") == ["PASS"]
    assert verdicts(checks, "host.power_off") == ["PASS"]
    assert verdicts(checks, "power_on.rtc") == ["PASS"], "as the daemon has found it"
    assert "FAIL" not in {check["verdict"] for check in checks}
    assert code == 1  # SNMP v2c can be forged: a warning on every host that uses it


async def test_what_a_drill_has_measured_counts_in_the_budget(folder: Path) -> None:
    """A host that fits since its drill is no failure: it could never be armed without a FAIL."""
    journal = Journal(folder / "journal.sqlite", boot_id=boot_id(), wall=time.time, writer=Inline(), reader=Inline())
    await journal.load()
    found = []
    for learned in (Learned(), Learned(pauses=(("llm", Drop(before=0.6, after=0.1, at_s=1.0)),))):
        assert await journal.append(Entry(at_s=1.0, state=State(learned=learned)))
        async with SnmpAgent(lambda: table("apc"), community=COMMUNITY) as ups, trainer(folder):
            config = settings(folder, snmp=ups.port, bmc=9, timeout_s=5.0, runtimes="{50: 200, 100: 100}")
            found += verdicts((await doctor(config, "--socket", f"{folder}/none.sock"))[1], "budget")
    assert await journal.close()
    assert found == ["FAIL", "PASS"]


async def test_what_would_not_hold_is_a_failure(folder: Path, golden: Golden) -> None:
    """A battery that is too small, a policy that must still be set, a trainer that does not pause: with numbers."""
    async with (
        SnmpAgent(lambda: table("apc"), community=COMMUNITY) as ups,
        trainer(folder, After.CONTINUE),
        SimBmc("pg", PASSWORD, policy="always-off") as bmc,
    ):
        config = settings(folder, snmp=ups.port, bmc=bmc.port, timeout_s=5.0, runtimes="{50: 150, 100: 60}")
        code, checks, _ = await doctor(config, "--socket", f"{folder}/none.sock")
        assert bmc.policy == "always-off"  # doctor changes nothing
    assert code == 2
    assert verdicts(checks, "budget") == ["FAIL"]
    golden("doctor", text_of(checks, "budget"), "budget")
    assert verdicts(checks, "bmc") == ["WARN"]
    golden("doctor", text_of(checks, "trainer.llm", "WARN"), "trainer")
    assert verdicts(checks, "daemon") == ["FAIL"]
    assert verdicts(checks, "power_on") == ["FAIL"], "as it looks without a daemon: nothing covers the race"
    golden("doctor", text_of(checks, "power_on"), "way back")


async def test_a_wrong_password_is_tried_once(folder: Path) -> None:
    """BMCs lock accounts after a few refused logins, and doctor asks several things."""
    async with OwnRedfish(make_certificate(folder)) as bmc:
        config = settings(folder, snmp=9, bmc=9)
        pinned = f"kind: redfish, https_port: {bmc.port}, fingerprint: {bmc.certificate.sha256}"
        config.write_text(config.read_text(encoding="utf-8").replace("kind: ipmi-lan", pinned), encoding="utf-8")
        _, checks, _ = await doctor(config, "--socket", f"{folder}/none.sock")
    assert "login refused" in text_of(checks, "bmc", "FAIL")
    assert bmc.heard.count("GET /redfish/v1/Systems") == 1


async def test_nobody_answers(folder: Path, golden: Golden) -> None:
    """Dead ports and sockets: a finding for each, within seconds, none of them a traceback."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    config = settings(folder, snmp=9, bmc=9)
    other = "trainers:\n  - {kind: signal, name: old, unit: old.service, signal: USR1}\n"
    config.write_text(config.read_text(encoding="utf-8").replace("trainers:\n", other), encoding="utf-8")
    code, checks, _ = await doctor(config, "--socket", f"{folder}/none.sock")
    assert loop.time() - began < 40.0
    assert code == 2
    assert verdicts(checks, "ups.127.0.0.1") == ["FAIL"]
    assert verdicts(checks, "trainer.llm") == ["WARN"]
    golden("doctor", text_of(checks, "trainer.llm"))
    assert verdicts(checks, "trainer.old") == ["WARN", "FAIL"], "not there, and nobody may signal it"
    assert verdicts(checks, "bmc") == ["FAIL"]
    assert verdicts(checks, "budget") == ["WARN"]
    assert not [check for check in checks if "check broke" in check["text"]]


@pytest.mark.parametrize(("restart_pct", "verdicts_of_card"), [(0, ["PASS", "WARN"]), (25, ["PASS", "PASS"])])
async def test_the_charge_at_which_a_card_returns_is_asked(
    folder: Path, restart_pct: int, verdicts_of_card: list[str]
) -> None:
    """upsAdvConfigMinReturnCapacity, asked once and not polled."""
    values = table("apc") | {"1.3.6.1.4.1.318.1.1.1.5.2.6.0": sim.integer(restart_pct)}
    async with SnmpAgent(lambda: values, community=COMMUNITY) as ups:
        _, checks, _ = await doctor(
            settings(folder, snmp=ups.port, bmc=9, timeout_s=5.0), "--socket", f"{folder}/none.sock"
        )
    assert verdicts(checks, "ups.127.0.0.1") == verdicts_of_card
    assert re.search(rf"\b{restart_pct} %", text_of(checks, "ups.127.0.0.1"))


@pytest.mark.parametrize(
    ("output_status", "part"), [(1, "would not be seen"), (7, "would not be seen"), (9, "on bypass")]
)
async def test_a_card_that_answers_and_shows_no_outage_does_not_pass(
    folder: Path, output_status: int, part: str
) -> None:
    """upsBasicOutputStatus: unknown, off, bypass. Doctor runs before the daemon, which has an alarm for each."""
    values = table("apc") | {"1.3.6.1.4.1.318.1.1.1.4.1.1.0": sim.integer(output_status)}
    async with SnmpAgent(lambda: values, community=COMMUNITY) as ups:
        _, checks, _ = await doctor(
            settings(folder, snmp=ups.port, bmc=9, timeout_s=5.0), "--socket", f"{folder}/none.sock"
        )
    assert part in text_of(checks, "ups.127.0.0.1", "FAIL")


class ShyCard(SnmpAgent):
    """Refuses one object, or does not answer a question about it."""

    def __init__(self, *, is_mute: bool) -> None:
        super().__init__(lambda: table("apc"), community=COMMUNITY)
        self._is_mute = is_mute

    def _respond(self, pdu: Any, *, v1: bool, may_write: bool) -> Any:  # noqa: ANN401 - the agent's own type is private
        answer = super()._respond(pdu, v1=v1, may_write=may_write)
        if answer is not None and any(name == "1.3.6.1.4.1.318.1.1.1.5.2.6.0" for name, _ in pdu.varbinds):
            return None if self._is_mute else replace(answer, status=5, index=1)
        return answer


@pytest.mark.parametrize("is_mute", [False, True])
async def test_a_card_that_does_not_show_this_setting_is_well(folder: Path, *, is_mute: bool) -> None:
    async with ShyCard(is_mute=is_mute) as ups:
        _, checks, _ = await doctor(
            settings(folder, snmp=ups.port, bmc=9, timeout_s=2.0), "--socket", f"{folder}/none.sock"
        )
    assert verdicts(checks, "ups.127.0.0.1") == ["PASS"]


async def test_a_card_that_answers_one_object_at_a_time(folder: Path) -> None:
    async with NarrowCard(table("apc"), 1, community=COMMUNITY) as ups:
        _, checks, _ = await doctor(
            settings(folder, snmp=ups.port, bmc=9, timeout_s=2.0), "--socket", f"{folder}/none.sock"
        )
    assert verdicts(checks, "ups.127.0.0.1") == ["PASS", "WARN"]
    assert "answers only 1 object in one request" in text_of(checks, "ups.127.0.0.1", "WARN")


class SlowCard(SnmpAgent):
    """Answers, later than anybody waits for it."""

    def _send(self, answer: bytes, sender: tuple[str, int]) -> None:
        asyncio.get_running_loop().call_later(1.2, super()._send, answer, sender)


async def test_a_card_that_answers_too_late_is_reported_once(folder: Path, golden: Golden) -> None:
    """Its address and its community are right: the fix is in the words, and no other one stands beside it."""
    async with SlowCard(lambda: table("apc"), community=COMMUNITY) as ups:
        _, checks, _ = await doctor(settings(folder, snmp=ups.port, bmc=9), "--socket", f"{folder}/none.sock")
    (check,) = [check for check in checks if check["name"] == "ups.127.0.0.1"]
    assert (check["verdict"], check["fix"]) == ("FAIL", "")
    assert re.search(r"\d\.\d s: .*timeout_s", check["text"])
    golden("doctor", check["text"], varies={ups.port: "PORT", **FIGURES})


async def test_wrong_settings_are_findings(folder: Path) -> None:
    """Every mistake with its place; what can be looked at without settings still is."""
    config = folder / "pg.yaml"
    config.write_text("mode: armde\nups: {}\n", encoding="utf-8")
    code, checks, _ = await doctor(config, "--socket", f"{folder}/none.sock")
    assert code == 2
    assert verdicts(checks, "settings") == ["FAIL", "FAIL"]
    assert f"{config}:1:7" in text_of(checks, "settings")
    assert verdicts(checks, "daemon") == ["FAIL"]


def test_sources_of_one_host_are_distinguished(folder: Path) -> None:
    """One upsd often serves several UPSes: which of them has no answer must be seen."""
    config = folder / "pg.yaml"
    nut = "{{sources: [{{kind: nut, host: 10.0.0.9, name: {0}}}{1}]}}"
    upses = {"a": nut.format("a", ", {kind: snmp, host: 10.0.0.5}"), "b": nut.format("b", "")}
    lines = [f"  {name}: {text}" for name, text in upses.items()]
    config.write_text("\n".join(["mode: dry-run", "ups:", *lines, "feeds: {supplies: [a, b]}"]), encoding="utf-8")
    settings = load(config)
    names = [source_name(settings, ups, each) for ups in settings.feeding for each in settings.ups[ups].sources]
    assert names == ["ups.10.0.0.9 (a, nut)", "ups.10.0.0.5", "ups.10.0.0.9 (b, nut)"]


BY_CREDENTIAL = """\
mode: rehearse
ups:
  rack-a:
    sources: [{kind: snmp, host: 127.0.0.1, version: 2c, community: {credential: community}}]
    runtime_table: {50: 1620, 75: 1080, 100: 720}
bmc: {kind: ipmi-lan, host: 127.0.0.1, user: pg, password: {credential: bmc}}
trainer_sockets: null
host: {kind: command, command: [/bin/true]}
"""


@pytest.mark.parametrize("is_up", [True, False])
async def test_what_only_the_daemon_has_a_secret_for_is_its_answer(folder: Path, *, is_up: bool) -> None:
    """No check stays a warning for ever, and what the daemon cannot read is a failure with its own words."""
    config = folder / "pg.yaml"
    config.write_text(f'{BY_CREDENTIAL}journal: {{path: "{folder}/journal.sqlite"}}\n', encoding="utf-8")
    daemon, error = scene(), "the card knows no user 'pg'"
    if not is_up:
        daemon.sources = [dataclasses.replace(daemon.sources[0], up=False, polls=3, failures=3, last_error=error)]
        daemon.bmc = dataclasses.replace(daemon.bmc, verified=False, error="wrong password")
    async with admin_server(daemon, path=f"{folder}/s.sock") as path:
        _, checks, _ = await doctor(config, "--socket", path)
    verdict = "PASS" if is_up else "FAIL"
    assert (verdicts(checks, "ups.127.0.0.1"), verdicts(checks, "bmc")) == ([verdict], [verdict])
    assert verdicts(checks, "secret") == []
    assert (error in text_of(checks, "ups.127.0.0.1")) is not is_up
    assert ("wrong password" in text_of(checks, "bmc")) is not is_up
    _, checks, _ = await doctor(config, "--socket", f"{folder}/none.sock")
    assert verdicts(checks, "secret") == verdicts(checks, "ups.127.0.0.1") + verdicts(checks, "bmc") == ["WARN"] * 2


async def test_open_secret_is_a_failure(folder: Path) -> None:
    """A secret that others can read is none."""
    (folder / "community").chmod(0o444)
    _, checks, _ = await doctor(settings(folder, snmp=9, bmc=9), "--socket", f"{folder}/none.sock")
    assert "other users can read" in text_of(checks, "secret", "FAIL")


async def test_a_certificate_that_is_none_is_a_failure(folder: Path) -> None:
    """Of the authority of a target of messages, to which the daemon connects in an outage first."""
    config = settings(folder, snmp=9, bmc=9)
    target = f"{{kind: webhook, url: {{file: '{folder}/bmc'}}, ca_file: '{folder}/bmc'}}"
    config.write_text(f"{config.read_text()}notify: {{targets: {{ops: {target}}}}}\n", encoding="utf-8")
    _, checks, _ = await doctor(config, "--socket", f"{folder}/none.sock")
    assert "ops.ca_file: " in text_of(checks, "certificate", "FAIL")
    assert verdicts(checks, "certificate") == ["FAIL"]


async def test_settings_that_the_daemon_has_not_read_are_reported(folder: Path) -> None:
    """An operator who wrote dry-run and forgot the reload must not pull the plug of an armed host."""
    config = settings(folder, snmp=9, bmc=9)
    seen = replace(scene(), config_path=str(config))
    changed = f"{config}: was changed after the running daemon read it"
    async with admin_server(replace(seen, settings_at_s=time.time() - WALL_S), path=f"{folder}/s.sock") as path:
        os.utime(config, (WALL_S - 1e6, WALL_S - 1e6))  # as rsync and `cp -p` do, which is a change as well
        _, checks, _ = await doctor(config, "--socket", path)
        assert changed in text_of(checks, "settings", "WARN")
    async with admin_server(replace(seen, settings_at_s=time.time() - WALL_S + 1e6), path=f"{folder}/s.sock") as path:
        os.utime(config, (time.time() + 2e6, time.time() + 2e6))
        _, checks, _ = await doctor(config, "--socket", path)
        assert changed in text_of(checks, "settings", "WARN")
        os.utime(config, (WALL_S - 1e6, WALL_S - 1e6))
        _, checks, _ = await doctor(config, "--socket", path)
        assert "the running daemon" not in text_of(checks, "settings", "WARN")
        written = config.read_text(encoding="utf-8")
        config.write_text(written.replace("mode: armed", "mode: dry-run"), encoding="utf-8")
        _, checks, _ = await doctor(config, "--socket", path)
    assert "the running daemon is in mode armed, not in mode dry-run" in text_of(checks, "settings", "WARN")


@pytest.mark.parametrize("key", ["mode", "daemon", "sources", "power_on", "bmc"])
async def test_what_an_older_daemon_does_not_report_is_one_finding(folder: Path, key: str) -> None:
    """After an update, while power is out, it is not restarted: the other checks count all the more."""
    config = folder / "pg.yaml"
    config.write_text(f'{BY_CREDENTIAL}journal: {{path: "{folder}/journal.sqlite"}}\n', encoding="utf-8")
    status = json.loads((Path(__file__).parents[2] / "docs/reference/status-online.json").read_text(encoding="utf-8"))
    del status[key]
    async with answering(f"{folder}/s.sock", json.dumps(status).encode()):
        code, checks, _ = await doctor(config, "--socket", f"{folder}/s.sock")
    text = f"the daemon does not report {key}: it is older than this command"
    assert code == 2
    assert text in {check["text"] for check in checks if check["verdict"] == "FAIL"}
    assert verdicts(checks, "journal") != []


@pytest.mark.root
def test_settings_that_only_root_can_read_are_a_failure(folder: Path) -> None:
    """A root with umask 077 writes them so, and the daemon, which is not root, then does not start."""
    config = settings(folder, snmp=9, bmc=9)
    folder.chmod(0o755)
    config.chmod(0o644)
    assert load(config).mode == "armed"  # doctor does so first: by then Python has read what it needs
    assert unreadable(config, "nobody") == []
    config.chmod(0o600)
    (found,) = unreadable(config, "nobody")
    assert (found.name, found.verdict, found.text) == (
        "settings",
        "FAIL",
        f"{config}: cannot be read: Permission denied",
    )
    assert os.geteuid() == 0
    assert config.read_bytes()


async def test_for_people(folder: Path) -> None:
    """Verdict, what, and what to do about it below; --quiet leaves out what passes."""
    config = settings(folder, snmp=9, bmc=9)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "powerguard", "doctor", "--config", str(config), "--quiet",
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2], env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    out, _ = await process.communicate()
    lines = out.decode().splitlines()
    assert process.returncode == 2
    assert not [line for line in lines if line.startswith("PASS")]
    assert [line for line in lines if line.strip().startswith("-> ")]
    assert lines[-1].endswith(" fail")


@pytest.mark.root
async def test_a_user_who_may_not_ask_a_trainer_is_not_advised_to_remove_it(folder: Path) -> None:
    """The daemon may; what root's doctor says of it counts."""
    loaded = load_with_origins(settings(folder, snmp=9, bmc=9))
    ward = CheckContext(
        argparse.Namespace(), loaded, make_policy(loaded.settings, boot_id="b", today=date(2026, 11, 1))
    )
    async with trainer(folder):  # in a folder that is closed to others
        assert [found.verdict for found in await _trainers(ward)][:1] == ["PASS"], "and all modules are imported now"
        os.seteuid(65534)
        try:
            found = await _trainers(ward)
            ward.status, ward.trainers = json.loads(json.dumps(status(scene()))), []
            reported = await _trainers(ward)
        finally:
            os.seteuid(0)
    assert [each.fix for each in found if "not permitted to connect" in each.text] == ["run doctor as root"]
    assert not [each for each in found if "no answer" in each.text], "it is not known whether it answers"
    assert [(each.name, each.verdict) for each in reported] == [("trainer.llm", "PASS")], "the daemon reaches it"
    assert [(each.alive, each.checkpoint_s) for each in ward.trainers] == [(True, 20.0)], "and the budget counts it"


@pytest.mark.root
def test_a_socket_that_the_group_cannot_use_is_reported(folder: Path) -> None:
    """The daemon could not give it to the group of the settings, because its user is not in that group."""
    path = folder / "powerguard.sock"
    group = grp.getgrnam("daemon")
    path.touch()
    assert _group(group.gr_name, path).verdict == "WARN"
    os.chown(path, -1, group.gr_gid)
    assert _group(group.gr_name, path).verdict == "PASS"


@pytest.mark.root
async def test_a_check_that_may_not_look_does_not_end_the_others(folder: Path) -> None:
    """As an ordinary user, who may not read the daemon's folder: root without the right to read everything."""
    state = folder / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 65534, 65534)
    config = settings(folder, snmp=9, bmc=9)
    config.write_text(config.read_text(encoding="utf-8").replace(f"{folder}/journal", f"{state}/journal"), "utf-8")
    rights = "-dac_override,-dac_read_search"
    process = await asyncio.create_subprocess_exec(
        "setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", sys.executable, "-m", "powerguard", "doctor",
        "--config", str(config), "--json", stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    out, _ = await process.communicate()
    checks = json.loads(out)["checks"]
    assert process.returncode == 2
    assert text_of(checks, "journal") == f"not checked: {state}/journal.sqlite: Permission denied"
    assert verdicts(checks, "admin") != []
    assert verdicts(checks, "daemon") == ["FAIL"]


@pytest.mark.parametrize("kind", ["nfs4", "fuse.glusterfs", "gpfs"])
def test_a_journal_on_a_network_is_not_durable(tmp_path: Path, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:40 / {tmp_path} rw - {kind} server:/x rw\n", "utf-8"
    )
    found = journal_finding(tmp_path / "journal.sqlite", mounts)
    assert (found.verdict, found.fix) == ("FAIL", "use a local disk")
    assert f"is on {kind}" in found.text
