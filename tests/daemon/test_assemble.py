"""Who is who: what dry-run replaces, what a reload reads, and a process that ends though something in it does not."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.clock import Clock, boottime_s
from powerguard.core.model.actions import (
    KINDS,
    Action,
    ArmPowerOn,
    CheckHost,
    CheckPowerOn,
    ContinueTrainer,
    Detail,
    DisarmPowerOn,
    EnsurePolicy,
    LeaveJob,
    LeaveNode,
    PowerOff,
    PowerOnMethod,
    Reboot,
    RestorePower,
    ResumeTrainer,
    ResumeTraining,
    TriggerCheckpoint,
)
from powerguard.core.model.policy import Mode
from powerguard.core.model.state import GpuCap, Online, Shutdown, State
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import Inline, Journal
from powerguard.daemon.loop import Loop
from powerguard.daemon.observe.readiness import readiness
from powerguard.daemon.wiring import DryRunEffector, Ports, assemble, await_users, build, main
from powerguard.effectors.base import EffectorError, PowerOnEffector, Turns
from powerguard.effectors.bmc.effector import BmcEffector
from powerguard.effectors.child import Ended
from powerguard.effectors.gpu.effector import GpuEffector
from powerguard.effectors.host.power import HostEffector
from powerguard.effectors.signals.effector import SignalEffector
from powerguard.effectors.trainer.effector import TrainerEffector
from powerguard.settings.load import load
from powerguard.settings.schema import Settings
from powerguard.sim.ups import SimUps, UpsBattery
from powerguard.ups.base import Source
from powerguard.ups.snmp.source import SnmpSource
from tests.daemon.looped import EPOCH_S, TABLE, Card, in_virtual_time, now_s, until
from tests.effectors.trainer_peers import serve
from tests.peers.ipmi import keep_secret
from tests.peers.ports import free_port
from tests.ups.nut.nut_helpers import FakeUpsd

SETTINGS = """\
mode: {mode}
ups:
  rack-a:
    sources:
      - {{kind: snmp, host: 127.0.0.1, version: 2c}}
    runtime_table: {{50: 540, 75: 360, 100: 240}}
bmc: {{kind: none}}
budget: {{reserve_s: {reserve_s}, recharge_h: 1}}
trainers:
  - {{name: llm, url: "unix:{folder}/llm.sock", checkpoint_s: 20}}
trainer_sockets: null
control: {{socket: {folder}/powerguard.sock}}
journal: {{path: {folder}/journal.sqlite}}
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pg as-", dir="/tmp") as name:
        yield Path(name)


def write(folder: Path, mode: str = "dry-run", reserve_s: int = 60, more: str = "") -> Path:
    path = folder / "powerguard.yaml"
    path.write_text(SETTINGS.format(mode=mode, reserve_s=reserve_s, folder=folder) + more)
    return path


def hands_of(ups: SimUps) -> Ports:
    def sources(_settings: Settings, clock: Clock) -> list[tuple[str, str, Source]]:
        return [("rack-a", "card", Card(ups, clock))]

    return Ports(clock=now_s, wall=lambda: EPOCH_S + now_s(), boot=lambda: "boot-of-the-test", sources=sources)


def journal_in(folder: Path, ports: Ports) -> Journal:
    return Journal(folder / "journal.sqlite", boot_id=ports.boot(), wall=ports.wall, writer=Inline(), reader=Inline())


KNOW_THE_MODE = {EnsurePolicy, CheckHost, PowerOff, ResumeTraining, Reboot, CheckPowerOn, ArmPowerOn, DisarmPowerOn}
"""Kinds of action whose own effectors stay in dry-run: they only look, or know the mode themselves."""


def test_dry_run_touches_nothing(folder: Path) -> None:
    """Trainers and disks are recorded, the BMC is only read, the power-off is recorded; the real UPS is watched."""
    for mode, dry_run in (("dry-run", False), ("armed", True)):
        settings = load(write(folder, mode=mode))
        parts = build(settings, Ports(), lambda _: None, dry_run=dry_run)
        assert parts.policy.mode is Mode.DRY_RUN
        acting = {kind for kind, effector in parts.effectors.items() if not isinstance(effector, DryRunEffector)}
        assert acting == KNOW_THE_MODE, "register a DryRunEffector for the others (`build` in daemon/wiring.py)"
        bmc, host = parts.effectors[EnsurePolicy], parts.effectors[PowerOff]
        assert isinstance(bmc, BmcEffector)
        assert (bmc._options.policy, bmc._dry_run) == ("observe", True)
        assert isinstance(host, HostEffector)
        assert host._mode is Mode.DRY_RUN
        assert parts.effectors[ResumeTraining] is host
        assert [type(source) for _, _, source in parts.sources] == [SnmpSource]
        assert parts.policy.source_names == ("snmp:127.0.0.1",)


async def test_the_bmc_has_the_time_of_its_order(folder: Path) -> None:
    """Without an outage a slow board is waited for; the core's orders have limits of their own."""
    limits_s: list[float] = []

    async def spawn(
        _argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        del stdin, env
        limits_s.append(limit_s)
        return Ended(returncode=0, stdout=b"{}", stderr=b"")

    keep_secret(folder / "bmc", "secret")
    bmc = f"bmc: {{kind: ipmi-lan, host: 127.0.0.1, user: pg, password: {{file: {folder}/bmc}}}}"
    config = write(folder, mode="armed")
    config.write_text(config.read_text().replace("bmc: {kind: none}", bmc))
    effector = build(load(config), Ports(spawn=spawn), lambda _: None).effectors[EnsurePolicy]
    for limit_s in (60.0, 3.0):
        with pytest.raises(EffectorError):
            await effector.carry_out(EnsurePolicy(id="e", by_s=boottime_s() + limit_s, outage=""))
    calm_s, ordered_s = limits_s
    assert calm_s > 10.0
    assert ordered_s < 3.0


async def test_the_admin_socket_is_no_trainer(folder: Path) -> None:
    """Both may lie in one folder: what answers on the daemon's own socket is not asked for a checkpoint."""
    config = write(folder, mode="armed")
    config.write_text(config.read_text().replace("trainer_sockets: null", f"trainer_sockets: {folder}"))
    trainers = build(load(config), Ports(), lambda _: None).effectors[TriggerCheckpoint]
    assert isinstance(trainers, TrainerEffector)
    answer = {"body": {"api_version": 1}}
    async with serve({"GET /api/v1/status": [answer]}, path=folder / "powerguard.sock"):
        await trainers.look()
    assert trainers.names == ("llm",)
    await trainers.close()


def test_armed_is_armed(folder: Path) -> None:
    parts = build(load(write(folder, mode="armed")), Ports(), lambda _: None)
    assert parts.policy.mode is Mode.ARMED
    assert not any(isinstance(effector, DryRunEffector) for effector in parts.effectors.values())
    host = parts.effectors[PowerOff]
    assert isinstance(host, HostEffector)
    assert host._mode is Mode.ARMED
    assert (parts.host, "power-off" in parts.watchers) == (host, True)
    missing = {kind.__name__ for kind in KINDS} - {kind.__name__ for kind in parts.effectors} - {"PollNow"}
    assert missing == set(), f"register an effector for {missing} in `build` (powerguard/daemon/wiring.py)"


def test_a_rehearsal_does_everything_but_the_power_off(folder: Path) -> None:
    """Trainers, disks and BMC are real, and so is the check of the power-off's path; the host and its UPS stay on."""
    parts = build(load(write(folder, mode="rehearse")), Ports(), lambda _: None)
    assert (parts.policy.mode, parts.policy.powers_off) == (Mode.REHEARSE, False)
    recorded = {kind for kind, effector in parts.effectors.items() if isinstance(effector, DryRunEffector)}
    assert recorded == {LeaveJob, LeaveNode}, "a rehearsal ends no job"
    bmc, host = parts.effectors[EnsurePolicy], parts.effectors[PowerOff]
    assert isinstance(bmc, BmcEffector)
    assert (bmc._options.policy, bmc._dry_run) == ("ensure", False)
    assert isinstance(host, HostEffector)
    assert host._mode is Mode.REHEARSE
    assert (parts.host, "power-off" in parts.watchers) == (host, True)


@pytest.mark.parametrize(("mode", "is_armed"), [("armed", True), ("rehearse", False)])
async def test_no_way_back_is_armed_for_a_host_that_stays_on(folder: Path, mode: str, *, is_armed: bool) -> None:
    """A rehearsal's watchdog would cycle a host that nobody has powered off, and its UPS would cut the output."""
    settings = load(write(folder, mode=mode, more="rtc: {kind: device, device: /dev/null}\n"))
    parts = build(settings, Ports(), lambda _: None)
    assert parts.policy.methods == (PowerOnMethod.RTC,)
    order = ArmPowerOn(id="a-1", by_s=boottime_s() + 5.0, method=PowerOnMethod.RTC, outage="o-1", in_s=600.0)
    if is_armed:
        with pytest.raises(EffectorError, match="refused under test"):
            await parts.effectors[ArmPowerOn].carry_out(order)
    else:
        assert await parts.effectors[ArmPowerOn].carry_out(order) == (("dry_run", True),)
    gone = DisarmPowerOn(id="d-1", by_s=order.by_s, method=PowerOnMethod.WATCHDOG, outage="o-1")
    with pytest.raises(EffectorError, match=r"method watchdog, .* put it back into the settings until"):
        await parts.effectors[DisarmPowerOn].carry_out(gone)


@pytest.mark.parametrize("is_stated", [False, True])
def test_a_host_without_a_bmc_has_no_alarm_once_the_settings_state_it(folder: Path, *, is_stated: bool) -> None:
    """Else the alarm could never be cleared on such a host, and would be ignored."""
    config = write(folder)
    if not is_stated:
        config.write_text(config.read_text().replace("bmc: {kind: none}\n", ""))
    daemon = assemble(load(config), config=config, journal=journal_in(folder, Ports()))
    assert ("no_bmc" in {reason.name for reason in readiness(daemon)}) is not is_stated


async def test_a_way_has_one_order_at_a_time_over_a_reload_too() -> None:
    """A slow order to disarm, of the settings before, must not undo one to arm that came after it; others go on."""
    found: list[str] = []
    let_go = asyncio.Event()

    class Slow:
        def __init__(self, name: str) -> None:
            self.name = name

        async def carry_out(self, action: Action) -> Detail:
            if isinstance(action, DisarmPowerOn):
                await let_go.wait()
            found.append(f"{self.name} {type(action).__name__}")
            return ()

    turns: Turns = {}
    old, new = (
        PowerOnEffector({PowerOnMethod.RTC: Slow(name), PowerOnMethod.SENTINEL: Slow(name)}, turns)
        for name in ("old", "new")
    )
    orders = {
        method: ArmPowerOn(id="a-1", by_s=1e9, method=method, outage="o", in_s=60.0)
        for method in (PowerOnMethod.RTC, PowerOnMethod.SENTINEL)
    }
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(old.carry_out(DisarmPowerOn(id="d-1", by_s=1e9, method=PowerOnMethod.RTC, outage="o")))
        await asyncio.sleep(0)
        tasks.create_task(new.carry_out(orders[PowerOnMethod.RTC]))
        await new.carry_out(orders[PowerOnMethod.SENTINEL])
        assert found == ["new ArmPowerOn"]
        let_go.set()
    assert found == ["new ArmPowerOn", "old DisarmPowerOn", "new ArmPowerOn"]


@pytest.mark.parametrize(
    ("mode", "kind", "watched", "touched"),
    [("armed", "none", False, True), ("armed", "nvml", True, True), ("dry-run", "nvml", False, False)],
)
def test_gpus_are_touched_where_the_settings_say_so(
    folder: Path, mode: str, kind: str, *, watched: bool, touched: bool
) -> None:
    """Kind none restores too: what was capped before somebody changed the settings must not stay so."""
    settings = Settings.model_validate({**load(write(folder, mode=mode)).model_dump(), "gpu": {"kind": kind}})
    parts = build(settings, Ports(), lambda _: None)
    assert ("gpu" in parts.watchers) is watched
    assert ("own load" in parts.watchers) is (kind == "nvml"), "what GPUs draw is read in every mode"
    assert isinstance(parts.effectors[RestorePower], GpuEffector) is touched
    assert (parts.policy.cap_share is None) is (kind == "none")


@pytest.mark.parametrize(
    ("mode", "kind", "watched", "touched"),
    [("armed", "none", False, True), ("armed", "helper", True, True), ("dry-run", "helper", False, False)],
)
def test_processes_are_touched_where_the_settings_say_so(
    folder: Path, mode: str, kind: str, *, watched: bool, touched: bool
) -> None:
    """Kind none lets go on, too: who was stopped before somebody changed the settings must not stay so."""
    settings = Settings.model_validate({**load(write(folder, mode=mode)).model_dump(), "signals": {"kind": kind}})
    parts = build(settings, Ports(), lambda _: None)
    assert ("signals" in parts.watchers) is watched
    assert isinstance(parts.effectors[ContinueTrainer], SignalEffector) is touched
    assert parts.policy.signals is (kind == "helper")


@pytest.mark.parametrize(
    ("resume", "starts"),
    [
        ({}, ("powerguard-resume.target", ())),
        ({"command": ["/x"]}, (None, ("/x",))),
        ({"by": "scheduler"}, (None, ())),
        ({"by": "scheduler", "command": ["/x"]}, (None, ())),
    ],
)
def test_what_starts_training_is_shown_as_the_settings_have_it(
    folder: Path, resume: dict[str, object], starts: tuple[str | None, tuple[str, ...]]
) -> None:
    config = write(folder, mode="armed")
    settings = Settings.model_validate({**load(config).model_dump(), "resume": resume})
    view = assemble(settings, config=config, journal=journal_in(folder, Ports())).returning
    assert (view.target, view.command) == starts


async def test_a_cap_is_held_for_as_long_as_the_core_remembers_it(folder: Path) -> None:
    """A daemon that has lost its journal must be as silent as one that is gone, or GPUs stay slow for ever."""
    asked: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.put_nowait(await reader.readline())
        writer.write(b'{"ok": true}\n')
        writer.close()

    config = write(folder, mode="armed")
    gpu = {"kind": "nvml", "socket": str(folder / "gpu.sock")}
    settings = Settings.model_validate({**load(config).model_dump(), "gpu": gpu})
    daemon = assemble(settings, config=config, journal=journal_in(folder, Ports()))
    server = await asyncio.start_unix_server(answer, folder / "gpu.sock")
    for cap, words in ((None, []), (GpuCap(outage="o", at_s=0.0), [b'{"word": "hold"}\n'])):
        daemon.state = State(owed=() if cap is None else (cap,))
        watching = asyncio.get_running_loop().create_task(daemon.parts.watchers["gpu"]())  # type: ignore[arg-type]
        if words:
            async with asyncio.timeout(60):
                assert await asked.get() == words[0]
        else:
            await rest(0.1)
            assert asked.empty()
        watching.cancel()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("mode", ["dry-run", "rehearse"])
def test_a_rehearsal_from_the_plug_to_the_return(folder: Path, mode: str) -> None:
    """The whole of an outage in dry-run: to the recorded power-off, and back online when utility is."""

    @in_virtual_time
    async def play() -> None:
        ups = SimUps(UpsBattery(runtime=TABLE), clock=now_s, load=lambda: 0.75)
        config = write(folder, mode=mode)
        ports = hands_of(ups)
        ports.effectors = {TriggerCheckpoint: DryRunEffector(), ResumeTrainer: DryRunEffector()}
        daemon = assemble(load(config), config=config, ports=ports, journal=journal_in(folder, ports))
        running = asyncio.get_running_loop().create_task(daemon.run())
        await rest(30.0)
        ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Shutdown) and daemon.state.phase.ordered, 600.0)
        assert ups.left_s > 60.0
        await rest(30.0)
        ups.utility = True
        await until(lambda: isinstance(daemon.state.phase, Online), 60.0)
        assert daemon.last_outage is not None
        assert daemon.last_outage.outcome == "rehearsed"
        assert daemon.actions.counts["power_off", "done"] == 1
        daemon.stop()
        await running

    play()


def test_a_reload_names_the_credentials_that_need_a_restart(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systemd passes them at the start alone: one that is new, or was empty then, is named by the reload."""
    credentials = folder / "credentials"
    credentials.mkdir()
    (credentials / "passed").write_text("s")
    (credentials / "placeholder").write_text("\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))

    @in_virtual_time
    async def play() -> None:
        ups = SimUps(UpsBattery(runtime=TABLE), clock=now_s, load=lambda: 0.75)
        config = write(folder)
        ports = hands_of(ups)
        daemon = assemble(load(config), config=config, ports=ports, journal=journal_in(folder, ports))
        running = asyncio.get_running_loop().create_task(daemon.run())
        await rest(5.0)
        (folder / "conf.d").mkdir()
        names = ("passed", "placeholder", "later")
        jobs = [f"{{name: {name}, url: 'unix:{folder}/{name}', token: {{credential: {name}}}}}" for name in names]
        (folder / "conf.d" / "a.yaml").write_text(f"trainers: [{', '.join(jobs)}]\n")
        for is_new in (True, False):
            capsys.readouterr()
            daemon.reload()
            await rest(3.0)
            stdout = capsys.readouterr().out
            assert ("systemd passes credentials only at the start: placeholder, later" in stdout) is is_new
            assert ("right='systemctl restart powerguard.service'" in stdout) is is_new
            assert daemon.settings_ok
        daemon.stop()
        await running

    play()


def test_a_reload_without_a_thread_for_a_target_is_refused(folder: Path) -> None:
    """Where TasksMax= is reached, because children hang in a dead disk, no thread can start: the daemon goes on."""

    @in_virtual_time
    async def play() -> None:
        config = write(folder)
        ports = hands_of(SimUps(UpsBattery(runtime=TABLE), clock=now_s, load=lambda: 0.75))
        daemon = assemble(load(config), config=config, ports=ports, journal=journal_in(folder, ports))
        running = asyncio.get_running_loop().create_task(daemon.run())
        await rest(5.0)
        write(folder, more="notify: {targets: {own: {kind: command, command: [/bin/true]}}}\n")
        for size, is_taken in ((1 << 46, False), (0, True)):
            threading.stack_size(size)
            try:
                daemon.reload()
                await rest(3.0)
            finally:
                threading.stack_size(0)
            assert (daemon.settings_ok, bool(daemon.message_targets)) == (is_taken, is_taken)
        daemon.stop()
        await running

    play()


def test_a_reload_is_no_reason_to_send_a_refused_password_again(folder: Path) -> None:
    """BMCs lock accounts. A new one is sent at once."""
    sent: list[bytes] = []

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        del limit_s, env
        if "powerguard.effectors.bmc.worker" in argv:
            sent.append(stdin)
        data = b'{"ok": false, "failure": "auth-failed", "text": "Incorrect password provided"}'
        return Ended(returncode=0, stdout=data, stderr=b"")

    @in_virtual_time
    async def play() -> None:
        password = keep_secret(folder / "bmc-password", "wrong")
        login = f"{{kind: ipmi-lan, host: 127.0.0.1, user: pg, password: {{file: '{password}'}}}}"
        config = write(folder)
        config.write_text(config.read_text().replace("{kind: none}", login))
        ports = replace(hands_of(SimUps(UpsBattery(runtime=TABLE), clock=now_s, load=lambda: 0.75)), spawn=spawn)
        daemon = assemble(load(config), config=config, ports=ports, journal=journal_in(folder, ports))
        running = asyncio.get_running_loop().create_task(daemon.run())
        await until(lambda: sent)
        for _ in range(3):
            daemon.reload()
            await rest(60.0)
        assert len(sent) == 1
        keep_secret(folder / "bmc-password", "another")
        daemon.reload()
        await rest(60.0)
        assert len(sent) == 2
        daemon.stop()
        await running

    play()


def test_a_reload_reads_the_file_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What changed is told against what ran until now; a mistake is told with its place and changes nothing."""

    @in_virtual_time
    async def play() -> None:
        ups = SimUps(UpsBattery(runtime=TABLE), clock=now_s, load=lambda: 0.75)
        config = write(folder)
        ports = hands_of(ups)
        daemon = assemble(load(config), config=config, ports=ports, journal=journal_in(folder, ports))
        running = asyncio.get_running_loop().create_task(daemon.run())
        await rest(5.0)

        async def reloaded() -> str:
            capsys.readouterr()
            daemon.reload()
            await rest(3.0)
            return capsys.readouterr().out

        before = daemon.parts.effectors[ArmPowerOn]
        write(folder, reserve_s=90)
        result = await reloaded()
        after = daemon.parts.effectors[ArmPowerOn]
        assert isinstance(before, PowerOnEffector)
        assert isinstance(after, PowerOnEffector)
        assert after is not before
        assert after._turns is before._turns, "an order to disarm may still be under way"
        assert "setting_changed" in result
        assert "budget.reserve_s" in result
        assert daemon.policy.reserve_s == 90
        assert daemon.settings_ok

        write(folder, reserve_s=60)
        assert "budget.reserve_s" in await reloaded(), "against the settings that ran, not those of the start"
        assert daemon.policy.reserve_s == 60

        write(folder, more="bugdet: {reserve_s: 1}\n")
        result = await reloaded()
        assert "settings_refused" in result
        assert "bugdet" in result
        assert "did you mean" in result
        assert not daemon.settings_ok
        assert daemon.policy.reserve_s == 60

        for hostile in ("# \uffff\n", '"[key]": 1\n', "budget: {'[key]': 1}\n"):
            write(folder, more=hostile)
            assert "settings_refused" in await reloaded()
            assert daemon.policy.reserve_s == 60

        config.unlink()
        assert "settings_refused" in await reloaded()

        for fixed in ("log: {level: debug}\n", "http: {port: 13999}\n"):
            write(folder, reserve_s=70, more=fixed)
            assert "restart_needed" in await reloaded()
        assert daemon.settings_ok
        assert daemon.policy.reserve_s == 70
        assert isinstance(daemon, Loop)
        daemon.stop()
        await running

    play()


async def test_a_user_that_the_directory_knows_only_later_is_accepted(folder: Path) -> None:
    """The lookup reads the file again; what else an operator has changed in it waits for a reload of theirs."""
    reloaded = asyncio.Event()
    config = write(folder, more="trainer_uids: [0, no-such-user]\n")
    settings = load(config)
    ports = hands_of(SimUps(UpsBattery(runtime=TABLE), clock=now_s, load=lambda: 0.75))
    daemon = assemble(settings, config=config, ports=ports)
    assert "users" in daemon.parts.watchers
    waiting = asyncio.create_task(await_users(settings, config, reloaded.set, every_s=0.01))
    await asyncio.sleep(0.2)
    assert not reloaded.is_set(), "not known yet"
    config.write_text("nonsense: [")
    await asyncio.sleep(0.2)
    write(folder, reserve_s=90, more="trainer_uids: [0, 1000]\n")
    await asyncio.sleep(0.2)
    assert not reloaded.is_set(), "the operator is changing the file"
    config = write(folder, more="trainer_uids: [0, 1000]\n")  # as a file reads once the directory knows the name
    await reloaded.wait()
    waiting.cancel()
    daemon = assemble(load(config), config=config, ports=ports)
    assert "users" not in daemon.parts.watchers


def test_wrong_settings_are_78_and_no_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = folder / "powerguard.yaml"
    config.write_text("mode: armde\n")
    assert main(config) == 78
    said = capsys.readouterr()
    assert "powerguard.yaml:1:7: mode" in said.err
    assert "Traceback" not in said.err


DEAF = """
import asyncio, contextlib, sys
from pathlib import Path
from powerguard.core.model.actions import TriggerCheckpoint
from powerguard.daemon import wiring as assemble
from powerguard.daemon.log import configure
from powerguard.settings.load import load

class Deaf:
    async def carry_out(self, action):
        print("deaf_asked", flush=True)
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

class Dull:
    def poll_now(self): pass
    async def run(self, publish): await asyncio.Event().wait()

config = Path(sys.argv[1])
ports = assemble.Ports(sources=lambda _s, _c: [("rack-a", "dull", Dull())], effectors={TriggerCheckpoint: Deaf()})
flush = configure(style="logfmt", level="info").close
asyncio.run(assemble.run(load(config), config=config, dry_run=True, ports=ports, flush=flush))
"""


def listens(path: Path) -> bool:
    """Whether a process listens there: the file is there before."""
    with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(OSError):
        asking.connect(str(path))
        return True
    return False


def test_a_process_ends_though_an_effector_does_not(folder: Path) -> None:
    """SIGTERM beside an effector that swallows every cancellation: told, and gone in seconds, with status 0."""
    config = write(folder, more=f"http: {{port: {free_port()}}}\n")
    with subprocess.Popen(
        [sys.executable, "-c", DEAF, str(config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            assert child.stdout is not None
            socket_path = folder / "powerguard.sock"
            deadline_s = time.monotonic() + 100.0
            while not listens(socket_path):
                assert time.monotonic() < deadline_s
                assert child.poll() is None, child.stdout.read()
                time.sleep(0.05)
            subprocess.run(
                [sys.executable, "-m", "powerguard", "checkpoint", "--socket", str(socket_path)],
                check=True,
                timeout=100,
            )
            for line in child.stdout:
                if "deaf_asked" in line:
                    break
            child.send_signal(signal.SIGTERM)
            rest_of_it = child.stdout.read()  # to its end, which would not come
            child.wait(60)
        finally:
            child.kill()
    assert child.returncode == 0
    assert "exit_forced" in rest_of_it
    assert "daemon_stopped" in rest_of_it
    assert "Traceback" not in rest_of_it


async def test_a_process_ends_though_a_thread_does_not(folder: Path) -> None:
    """It hangs in a disk, or in a name server that has no power; a FIFO that is never written to its end hangs as well.

    systemd would kill the daemon after 20 s, and the power-off would come as much later.
    """
    os.mkfifo(folder / "ca.pem")
    (folder / "password").touch(0o600)
    (folder / "password").write_text("secret")
    config = folder / "powerguard.yaml"
    upsd = FakeUpsd(answer=lambda upsd, words, _: b"OK STARTTLS\n" if words == ("STARTTLS",) else upsd.honest(words))
    async with upsd.serving():
        config.write_text(
            f"""mode: dry-run
ups: {{a: {{sources: [{{kind: nut, host: 127.0.0.1, port: {upsd.port}, name: a, user: u,
  password: {{file: "{folder}/password"}}, tls: required, ca: "{folder}/ca.pem"}}]}}}}
trainer_sockets: null
control: {{socket: {folder}/powerguard.sock}}
journal: {{path: {folder}/journal.sqlite}}
http: {{port: {free_port()}}}
"""
        )
        argv = [sys.executable, "-m", "powerguard", "run", "--config", str(config)]
        child = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.PIPE)
        try:
            async with asyncio.timeout(100):
                while (held := opened_by_a_reader(folder / "ca.pem")) is None:  # noqa: ASYNC110 - the thread gives no sign
                    await asyncio.sleep(0.05)
                child.terminate()
                _, said = await child.communicate()
            os.close(held)
        finally:
            if child.returncode is None:
                child.kill()
    assert child.returncode == 0, said
    assert b"daemon_stopped" in said


def opened_by_a_reader(fifo: Path) -> int | None:
    """Open a FIFO for writing; None while none reads it."""
    with contextlib.suppress(OSError):
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    return None
