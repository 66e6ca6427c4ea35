"""The daemon's side of signals: what it asks of powerguard-signal, and that it never waits for it too long."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.model.actions import Action, ContinueTrainer, PollNow, StopTrainer, TerminateTrainer
from powerguard.core.trainers import escalation
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Ended
from powerguard.effectors.host.findings import Finding
from powerguard.effectors.options import SIGNAL_SOCKET, SignalsOptions
from powerguard.effectors.signals.effector import LIMIT_S, SignalEffector, SignalHelper, findings
from powerguard.effectors.signals.helper import WITHIN_S
from tests.effectors.root_peers import answering
from tests.peers.jobs import Jobs, state, until


def order(kind: type[Action], trainer: str = "llm") -> Action:
    return kind(id="a-1", by_s=1e9, trainer=trainer, outage="outage-1")  # type: ignore[call-arg]


def effector(path: Path | str, jobs: Jobs | None = None, kind: Any = "helper", **sockets: str | None) -> SignalEffector:  # noqa: ANN401 - a Literal
    folder = "/run/powerguard-trainers" if jobs is None else str(jobs.sockets)
    options = SignalsOptions(kind=kind, socket=str(path))
    return SignalEffector(options, sockets=sockets, folder=folder, limit_s=60.0)


# --- Against the real helper, one process for each connection --------------------------------------------------------


@pytest.mark.peer("systemd-socket-activate")
async def test_stop_continue_and_end_through_the_socket(jobs: Jobs) -> None:
    """A trainer of the settings by the socket that they name, and one that was found by its own."""
    process = jobs.rank("job.sock", "listens", "catches")
    found = jobs.rank("found.sock", "listens")
    with jobs.listening() as path:
        signals = effector(path, jobs, llm=jobs.path("job.sock"))
        detail = dict(await signals.carry_out(order(StopTrainer)))
        assert (detail["processes"], detail["pending"], state(process.pid)) == (1, 0, "T")
        assert dict(await signals.carry_out(order(ContinueTrainer)))["processes"] == 1
        assert state(process.pid) != "T"
        assert dict(await signals.carry_out(order(ContinueTrainer)))["processes"] == 0, "nothing was stopped"
        await signals.carry_out(order(StopTrainer, "found"))
        assert state(found.pid) == "T"
        await signals.carry_out(order(TerminateTrainer))
        until(lambda: process.poll() is not None)


@pytest.mark.root
@pytest.mark.peer("systemd-socket-activate")
async def test_a_unit_is_asked_for_a_checkpoint(jobs: Jobs) -> None:
    unit = jobs.unit("train")
    jobs.rank("t", "catches", cgroup=jobs.cgroup(unit))
    with jobs.listening() as path:
        helper = SignalHelper(str(path), limit_s=60.0)
        with pytest.raises(EffectorError, match="is not in"):
            await helper.checkpoint(unit, "USR1")
        jobs.allowed.write_text(f"{unit} USR1\n", encoding="ascii")
        assert (await helper.checkpoint(unit, "USR1"))["signalled"] == 1
    until(lambda: jobs.noted("t", "SIGUSR1"))


# --- What it does not do --------------------------------------------------------------------------------------------


async def test_nobody_is_signalled_where_the_settings_do_not_say_so(tmp_path: Path) -> None:
    signals = effector(tmp_path / "none.sock", kind="none")
    for kind in (StopTrainer, TerminateTrainer):
        with pytest.raises(EffectorError, match=r"signals\.kind is none"):
            await signals.carry_out(order(kind))
    assert dict(await signals.carry_out(order(ContinueTrainer))) == {"processes": 0}, "nothing of ours is here"


async def test_what_was_stopped_before_the_settings_changed_is_let_go_on(tmp_path: Path) -> None:
    async with answering(tmp_path, b'{"ok": true, "processes": [{"did": "continued"}]}\n') as (path, asked):
        assert dict(await effector(path, kind="none").carry_out(order(ContinueTrainer)))["processes"] == 1
    assert json.loads(asked[0]) == {"word": "continue", "socket": "llm.sock"}


@pytest.mark.parametrize("socket", [None, "/tmp/llm.sock", "/run/powerguard-trainers/deep/llm.sock"])
async def test_a_trainer_whose_process_is_unknown_is_left_alone(tmp_path: Path, socket: str | None) -> None:
    """Reached over TCP, or by a socket elsewhere: the helper looks in one folder only."""
    with pytest.raises(EffectorError, match="its process"):
        await effector(tmp_path / "s.sock", llm=socket).carry_out(order(StopTrainer))


async def test_other_orders_are_not_carried_out() -> None:
    with pytest.raises(EffectorError, match="cannot carry out PollNow"):
        await effector("/nowhere.sock").carry_out(PollNow(id="p", by_s=0.0, ups="ups"))


def test_a_helper_that_hangs_is_named_before_the_order_times_out() -> None:
    """Later there would only be "timed out"; and sooner no answer that the helper still gives in its time."""
    assert WITHIN_S < LIMIT_S < escalation.LIMIT_S


async def test_of_a_long_answer_all_are_counted(tmp_path: Path) -> None:
    named = b'[{"did": "pending"}, {"did": "stopped"}, 7]'
    answer = b'{"ok": true, "stopped": 90, "scope": "t.service", "processes": ' + named + b"}\n"
    async with answering(tmp_path, answer) as (path, _):
        detail = dict(await effector(path).carry_out(order(StopTrainer)))
    assert (detail["processes"], detail["pending"], detail["scope"]) == (90, 1, "t.service")


async def test_it_is_refused_under_test_where_it_would_reach_this_machine() -> None:
    with pytest.raises(EffectorError, match="refused under test"):
        await effector(SIGNAL_SOCKET).carry_out(order(StopTrainer))


# --- What doctor says -----------------------------------------------------------------------------------------------


class Systemctl:
    """Answers as systemctl would, or not at all."""

    def __init__(self, said: str | None = "LoadState=loaded\nActiveState=active\n") -> None:
        self._said = said

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        assert tuple(argv[:3]) == ("systemctl", "show", "powerguard-signal-watch.path")
        assert limit_s <= 2.0
        if self._said is None:
            raise FileNotFoundError(2, "No such file or directory", argv[0])
        return Ended(returncode=0, stdout=self._said.encode(), stderr=b"")


async def looked(path: Path, systemctl: Systemctl | None = None, pausing: Sequence[str] = ()) -> dict[str, Finding]:
    options = SignalsOptions(kind="helper", socket=str(path))
    result = await findings(options, pausing=pausing, spawn=systemctl or Systemctl(), limit_s=60.0)
    assert all(finding.fix for finding in result if finding.verdict != "PASS")
    return {f"{finding.name} {finding.verdict}": finding for finding in result}


async def test_off_is_reported_and_nothing_is_asked() -> None:
    (result,) = await findings(SignalsOptions(), spawn=Systemctl(None))
    assert (result.name, result.verdict, "signals.kind: helper" in result.text) == ("signals", "PASS", True)


async def test_doctor_names_the_cure_of_a_helper_that_is_not_there(tmp_path: Path) -> None:
    result = await looked(tmp_path / "s.sock")
    assert "systemctl enable --now powerguard-signal.socket" in result["signals FAIL"].text


@pytest.mark.peer("systemd-socket-activate")
async def test_doctor_names_who_could_be_stopped_and_who_could_not(jobs: Jobs) -> None:
    jobs.rank("llm.sock", "listens")
    (jobs.sockets / "dead.sock").write_text("", encoding="ascii")
    with jobs.listening() as path:
        result = await looked(path, pausing=["llm.sock", "gone.sock"])
        assert "llm.sock: 1 in process tree" in result["signals PASS"].text
        wrong = result["signals WARN"].text
        assert "dead.sock: " in wrong
        assert "gone.sock: no such socket now" in wrong
        jobs.ask("stop", "llm.sock")
        assert "llm.sock" in (await looked(path))["signals.stopped WARN"].text
    assert result["signals.watch PASS"]


@pytest.mark.parametrize(
    ("said", "verdict"), [("LoadState=not-found\nActiveState=inactive\n", "FAIL"), ("", "WARN"), (None, "WARN")]
)
async def test_doctor_looks_whether_the_watch_is_there(tmp_path: Path, said: str | None, verdict: str) -> None:
    async with answering(tmp_path, b'{"ok": true, "trainers": [], "stopped": []}\n') as (path, _):
        result = await looked(path, Systemctl(said))
    assert f"signals.watch {verdict}" in result
    assert result["signals PASS"].text == "the helper answers; no trainer listens now"
