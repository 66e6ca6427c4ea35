"""What doctor says of where checkpoints lie: memory, a network, no room, nothing, too old, not sealed."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Ended, run_child
from powerguard.effectors.host.filesystems import kind_of
from powerguard.effectors.host.findings import Finding
from powerguard.effectors.trainer.findings import crowding, findings, judge, ways
from powerguard.effectors.trainer.folder_child import main as folder_child
from powerguard.effectors.trainer.options import AnyTrainerOptions
from powerguard.trainer.seal.folder import leave_behind, newest_whole, seal
from tests.cli.checkpoint_sites import save
from tests.golden import Golden

MOUNTS = (
    "22 1 0:1 / / rw shared:1 - ext4 /dev/vda rw\n"
    "23 22 0:2 / /dev/shm rw - tmpfs tmpfs rw\n"
    "24 22 0:3 / /nas rw shared:2 - nfs4 server:/export rw\n"
    "25 22 0:4 / /with\\040space rw - xfs /dev/vdb rw\n"
    "26 22 0:5 / /nas rw - autofs systemd-1 rw\n"
    "27 22 0:6 / /nas rw - nfs4 server:/export rw\n"
    "broken\n"
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/x", "ext4"),
        ("/dev/shm/llm", "tmpfs"),
        ("/dev/shmoo", "ext4"),
        ("/nas/llm/../llm", "nfs4"),
        ("/with space/x", "xfs"),
    ],
)
def test_a_paths_file_system_is_known_without_touching_it(path: str, kind: str) -> None:
    assert kind_of(path, MOUNTS) == kind
    assert kind_of(path, "") == ""


async def found_at(
    folder: str, tmp_path: Path, *, alive: bool = True, mounts: str = "", ended: Ended | None = None
) -> list[Finding]:
    (tmp_path / "mounts").write_text(mounts)

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        return ended or await run_child(argv, limit_s=limit_s + 20.0)

    names = ["llm"] if alive else []
    async with asyncio.timeout(40.0):
        return await findings({"llm": folder}, alive=names, spawn=spawn, mounts=tmp_path / "mounts")


def verdicts(found: list[Finding]) -> list[tuple[str, str]]:
    return [(each.verdict, each.text) for each in found]


async def test_all_is_well(tmp_path: Path) -> None:
    save(tmp_path / "llm", 12)
    (finding,) = await found_at(str(tmp_path / "llm"), tmp_path)
    assert (finding.name, finding.verdict) == ("checkpoints.llm", "PASS")
    assert "step 12" in finding.text


def test_a_folder_for_all_in_the_memory_of_run_is_found(tmp_path: Path) -> None:
    """By its file system, wherever the settings put it; one that only some users can write is theirs to fill."""
    folder, run = tmp_path / "trainers", str(tmp_path)
    assert crowding(None, run) == crowding(str(folder), run) == []
    folder.mkdir()
    folder.chmod(0o3777)
    (found,) = crowding(str(folder), run)
    assert (found.name, found.verdict) == ("trainers.folder", "WARN")
    assert crowding(str(folder), "/proc") == [], "memory of its own"
    folder.chmod(0o2770)
    assert crowding(str(folder), run) == []


async def test_in_memory_or_on_the_network(tmp_path: Path, golden: Golden) -> None:
    (finding,) = await found_at("/dev/shm/llm", tmp_path, mounts=MOUNTS)
    assert finding.verdict == "FAIL"
    golden("doctor", finding.text, "in memory")
    ended = Ended(returncode=0, stdout=b'{"free_bytes": 1, "slot_bytes": 0, "newest": null}', stderr=b"")
    first, second = await found_at("/nas/llm", tmp_path, mounts=MOUNTS, ended=ended)
    golden("doctor", f"{first.text}\n{second.text}", "on the network")


@pytest.mark.parametrize(
    ("ended", "verdict", "text"),
    [
        (Ended(returncode=-9, stdout=b"", stderr=b"", timed_out=True), "FAIL", "does not answer within 5 s"),
        (Ended(returncode=1, stdout=b"", stderr=b"Permission denied\n"), "WARN", "cannot be checked: Permission"),
        (Ended(returncode=0, stdout=b"garbage", stderr=b""), "WARN", "cannot be checked"),
    ],
)
async def test_a_folder_that_cannot_be_looked_at(tmp_path: Path, ended: Ended, verdict: str, text: str) -> None:
    (finding,) = await found_at("/data", tmp_path, ended=ended)
    assert finding.verdict == verdict
    assert text in finding.text


async def test_one_that_is_not_there(tmp_path: Path) -> None:
    (finding,) = await found_at(str(tmp_path / "gone"), tmp_path)
    assert (finding.verdict, "No such file" in finding.text) == ("WARN", True)
    assert await findings({}, alive=[]) == []


def seen(**newest: object) -> dict[str, object]:
    made = {"state": "complete", "path": "/d/x", "step": 5, "size_bytes": 10**9, "age_s": 60.0, **newest}
    return {"free_bytes": 10**11, "slot_bytes": 0, "newest": made}


def test_room_for_two_counts_what_is_kept_ready() -> None:
    def verdicts(free: int, slots: int) -> list[str]:
        return [
            each.verdict
            for each in judge("c", "/d", {**seen(), "free_bytes": free, "slot_bytes": slots}, is_alive=True)
        ]

    assert verdicts(2 * 10**9, 0) == ["PASS"]
    assert verdicts(10**9 + 1, 0) == ["WARN"]
    assert verdicts(10**9 - 1, 0) == ["FAIL"]
    assert verdicts(10**9, 10**9) == ["PASS"]


def test_old_counts_only_while_somebody_trains() -> None:
    old = seen(age_s=7201.0)
    assert [each.verdict for each in judge("c", "/d", old, is_alive=True)] == ["WARN"]
    assert [each.verdict for each in judge("c", "/d", old, is_alive=False)] == ["PASS"]


def test_several_findings_stand_side_by_side(golden: Golden) -> None:
    found = judge("c", "/d", {**seen(state="not_sealed", age_s=9000.0), "free_bytes": 0}, is_alive=True)
    assert [each.verdict for each in found] == ["FAIL", "WARN", "WARN"]
    assert "2.5 h" in found[2].text
    golden("doctor", "\n".join(each.text for each in found))


def looked(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert folder_child([str(folder)]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_newest_of_all_kinds_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By when it was written: a training that was rolled back has smaller steps."""
    assert looked(tmp_path, capsys)["newest"] is None
    save(tmp_path, 9)
    sealed, plain = tmp_path / "checkpoint-5", tmp_path / "global_step4"
    for folder in (sealed, plain):
        folder.mkdir()
        (folder / "a.bin").write_bytes(b"abc")
    seal(sealed)
    os.utime(plain / "a.bin", (1, 1))
    newest = looked(tmp_path, capsys)["newest"]
    assert isinstance(newest, dict)
    assert (newest["state"], newest["step"], newest["size_bytes"]) == ("complete", 5, 3)
    future_s = time.time() + 100
    os.utime(plain / "a.bin", (future_s, future_s))
    newest = looked(tmp_path, capsys)["newest"]
    assert isinstance(newest, dict)
    assert (newest["state"], newest["path"], newest["age_s"]) == ("not_sealed", str(plain), 0.0)
    for slot in (".slot-0", ".slot-1"):
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "shard-00000").write_bytes(bytes(5000))
    assert looked(tmp_path, capsys)["slot_bytes"] == 5000


def test_what_was_set_aside_is_not_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resume found that 40 does not verify, and training then went back behind 30: it is as old as 20."""
    for step in (20, 30, 40):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "a.bin").write_bytes(b"abc")
        seal(tmp_path / f"checkpoint-{step}")
        os.utime(tmp_path / f"checkpoint-{step}" / "SEAL.json", (step, step))
    (tmp_path / "checkpoint-40" / "a.bin").write_bytes(b"abd")
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-30"
    leave_behind(tmp_path, 25)
    newest = looked(tmp_path, capsys)["newest"]
    assert isinstance(newest, dict)
    assert (newest["step"], newest["path"]) == (20, str(tmp_path / "checkpoint-20"))


def test_a_checkpoint_that_is_one_file_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Most scripts write these: doctor said that there is no checkpoint yet, and looked at neither its age nor room."""
    for step in (67, 68):
        (tmp_path / f"ckpt_{step}.pt").write_bytes(bytes(1000 + step))
        os.utime(tmp_path / f"ckpt_{step}.pt", (step, step))
    (tmp_path / "train.log").write_text("step 69")
    newest = looked(tmp_path, capsys)["newest"]
    assert isinstance(newest, dict)
    assert (newest["state"], newest["step"], newest["size_bytes"]) == ("not_sealed", 68, 1068)
    save(tmp_path, 9)
    newest = looked(tmp_path, capsys)["newest"]
    assert isinstance(newest, dict)
    assert (newest["state"], newest["step"]) == ("complete", 9)


async def test_the_child_is_a_program(tmp_path: Path) -> None:
    save(tmp_path, 3)
    argv = [sys.executable, "-m", "powerguard.effectors.trainer.folder_child", str(tmp_path)]
    ended = await run_child(argv, limit_s=60.0)
    assert json.loads(ended.stdout)["newest"]["step"] == 3
    assert (await run_child([*argv[:-1], str(tmp_path / "gone")], limit_s=60.0)).returncode == 1


# --- Ways -------------------------------------------------------------------------------------------------------------

SIGNAL = {"kind": "signal", "unit": "train.service", "signal": "USR1"}
LISTED = {"units": [{"unit": "train.service", "signal": "USR1"}, {"unit": "other.service", "signal": "TERM"}]}


def trainers(*options: dict[str, object]) -> list[AnyTrainerOptions]:
    return TypeAdapter(list[AnyTrainerOptions]).validate_python([{"name": "llm", **each} for each in options])


@pytest.mark.parametrize(
    ("trainer", "answer", "verdict", "text"),
    [
        (SIGNAL, LISTED, "PASS", "SIGUSR1 may be sent"),
        ({"url": "unix:/a", "fallback": SIGNAL}, LISTED, "PASS", "SIGUSR1 may be sent"),
        ({**SIGNAL, "signal": "TERM"}, LISTED, "FAIL", "/etc/powerguard/signals does not list it"),
        (SIGNAL, {"units": "nonsense"}, "FAIL", "does not list it"),
        (
            SIGNAL,
            {"units": [], "units_because": "others can change it"},
            "FAIL",
            "may not be sent to train.service: others can",
        ),
        (SIGNAL, EffectorError("s: not there"), "FAIL", "sent by powerguard-signal: s: not there"),
        (SIGNAL, EffectorError("s: only powerguard and root may"), "WARN", "only powerguard and root may"),
        ({"kind": "command", "command": ["/no/such"]}, LISTED, "FAIL", "/no/such: no such program"),
    ],
)
async def test_a_way_that_would_fail_is_reported_beforehand(
    trainer: dict[str, object], answer: dict[str, object] | EffectorError, verdict: str, text: str
) -> None:
    async def ask(_: dict[str, object]) -> dict[str, object]:
        if isinstance(answer, EffectorError):
            raise answer
        return answer

    (finding,) = await ways(trainers(trainer), ask)
    assert (finding.name, finding.verdict) == ("trainer.llm", verdict)
    assert text in finding.text


@pytest.mark.root
async def test_a_folder_that_is_closed_to_the_daemon_is_reported(tmp_path: Path) -> None:
    """Root, who mostly runs doctor, can read it. One that is not there is another finding's."""

    async def ask(_: dict[str, object]) -> dict[str, object]:
        return dict(LISTED)

    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    saves = trainers({**SIGNAL, "checkpoint_dir": str(folder)}, {**SIGNAL, "checkpoint_dir": str(tmp_path / "gone")})
    found = await ways(saves, ask, user="nobody")
    assert [each.verdict for each in found] == ["WARN", "PASS", "PASS"]
    assert f"{folder}: user nobody may not read it" in found[0].text


async def test_who_needs_no_way_is_not_asked_about() -> None:
    async def ask(_: dict[str, object]) -> dict[str, object]:
        raise AssertionError

    assert await ways(trainers({"url": "unix:/a"}, {"kind": "command", "command": ["true"]}), ask) == []
