"""After a return the host is compared with what it was: GPUs, checkpoint storage, and what training would resume from.

Real children look at real checkpoints, at a file system that is mounted and taken away, and at GPUs behind NVIDIA's own
bindings; what they see is judged without anything.
"""

import asyncio
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Ended, Spawn, clean_environment, run_child
from powerguard.effectors.host.check import MEMORY
from powerguard.effectors.host.look import (
    AT_ONCE,
    MOST_ENDED,
    FolderLook,
    Gpus,
    HostGpu,
    HostLook,
    HostMemory,
    HostView,
    Mounted,
    RememberedFolder,
    ResumePoint,
    details,
    from_json,
    judge,
    remembered,
    to_json,
)
from powerguard.trainer.seal.folder import seal
from powerguard.trainer.store.manifest import MANIFEST
from tests.cli.checkpoint_sites import IDS, flip, save
from tests.golden import Golden
from tests.peers.nvml import Gpus as Cards
from tests.trainer.checkpoints import break_description

ROOT_DISK = Mounted(point="/", kind="ext4", source="/dev/sda2", on_root=True, fsid=11)
NAS = Mounted(point="/nas", kind="nfs4", source="nas:/export", on_root=False, fsid=22)
TWO = (HostGpu(uuid="GPU-a", name="H100"), HostGpu(uuid="GPU-b", name="H100"))


def without_gpus(spawn: Spawn = run_child) -> Spawn:
    """Children as they are, but no NVML: what this machine has is not the tests' business."""

    async def run(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        if "powerguard.effectors.gpu.helper" in argv:
            return Ended(returncode=1, stdout=b'{"ok": false, "error": "no NVML"}', stderr=b"")
        return await spawn(argv, limit_s=limit_s, stdin=stdin, env=env)

    return run


class Looker:
    """A look in this process, with what the daemon makes of it."""

    def __init__(self, look: HostLook, memory: Path) -> None:
        self._look = look
        self._memory = memory

    async def check(self, seconds: float = 60.0) -> dict[str, str | int]:
        """Return what the journal is told; raises EffectorError where training must not start."""
        checked = await self._look.look(seconds)
        if checked.verdict.problems:
            raise EffectorError("; ".join(checked.verdict.problems))
        return details(checked)

    async def remember(self, wall_s: float = 1000.0) -> bool:
        """A good day; say whether there was anything new."""
        fresh = self._look.fresh(await self._look.look(60.0), wall_s)
        if fresh is not None:
            self._memory.write_text(fresh, encoding="utf-8")
        return fresh is not None


def checks(tmp_path: Path, *dirs: Path, **options: Any) -> Looker:  # noqa: ANN401 - those of HostLook
    memory = tmp_path / "state" / MEMORY
    memory.parent.mkdir(exist_ok=True)
    given: dict[str, Any] = {"spawn": without_gpus(), "gpu_socket": str(tmp_path / "no.sock")} | options
    return Looker(HostLook(memory=memory, dirs=[str(each) for each in dirs], **given), memory)


# --- Real folders -----------------------------------------------------------------------------------------------------


async def test_a_whole_host_is_reported_in_full(tmp_path: Path, golden: Golden) -> None:
    root = tmp_path / "ckpt" / "llm"
    save(root, 100)
    newest = save(root, 200)
    effector = checks(tmp_path, tmp_path / "ckpt", root)
    found = await effector.check()
    assert found["gpus"] == 0
    assert re.findall(r"llm: step (\d+) ", str(found["newest"])) == ["200", "200"]
    golden("host-look", str(found["newest"]))
    assert f"{root} on " in str(found["storage"])
    assert found["notes"] == ""
    assert newest.name not in str(found["notes"])


async def test_a_torn_newest_one_is_passed_over_and_reported_and_no_reason_to_wait(
    tmp_path: Path, golden: Golden
) -> None:
    """Training's own resume takes the older one: whoever waits here waits for nothing."""
    root = tmp_path / "llm"
    save(root, 100)
    torn = save(root, 200)
    os.truncate(next(torn.glob("shard-*")), 4096)
    found = await checks(tmp_path, root).check()
    assert "llm: step 100 " in str(found["newest"])
    assert f"{torn.name}: " in str(found["notes"])
    golden("host-look", str(found["notes"]), varies=IDS)


@pytest.mark.parametrize(("verify", "step", "state"), [("manifest", 200, "whole"), ("full", 100, "read")])
async def test_a_flipped_bit_is_found_where_every_byte_is_read(
    tmp_path: Path, verify: str, step: int, state: str
) -> None:
    root = tmp_path / "llm"
    save(root, 100)
    flip(next(save(root, 200).glob("shard-*")))
    found = await checks(tmp_path, root, verify=verify).check()
    assert found["newest"] == f"llm: step {step} ({state}) in {root}"


async def test_a_wrong_description_is_passed_over_where_every_byte_is_read(tmp_path: Path, golden: Golden) -> None:
    root = tmp_path / "llm"
    save(root, 100)
    newer = save(root, 200)
    break_description(newer)
    found = await checks(tmp_path, root, verify="full").check()
    golden("host-look", f"{found['newest']}\n{found['notes']}", varies=IDS)


async def test_sealed_and_foreign_checkpoints(tmp_path: Path, golden: Golden) -> None:
    """A sealed one is judged by its seal; what no seal vouches for is told as that."""
    for name, step in (("global_step_10", 10), ("global_step_20", 20)):
        folder = tmp_path / "deepspeed" / name
        folder.mkdir(parents=True)
        (folder / "rank0.bin").write_bytes(os.urandom(5000))
        seal(folder, step=step)
    os.truncate(tmp_path / "deepspeed/global_step_20/rank0.bin", 100)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model-7.pt").write_bytes(b"x" * 100)
    found = await checks(tmp_path, tmp_path / "deepspeed", tmp_path / "other").check()
    golden("host-look", f"{found['newest']}\n{found['notes']}")
    full = await checks(tmp_path, tmp_path / "deepspeed", verify="full").check()
    golden("host-look", str(full["newest"]), "full")


async def without_privileges(
    argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> Ended:
    """Run a child as the daemon's user would: even as root it may enter no folder that is closed to it."""
    drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.geteuid() == 0 else []
    return await run_child([*drop, *argv], limit_s=limit_s, stdin=stdin, env=env)


@pytest.mark.parametrize("jobs", [False, True])
@pytest.mark.parametrize("closed", ["lost+found", "alice"])
async def test_a_folder_that_only_another_may_enter_hides_no_checkpoint_beside_it(
    tmp_path: Path, closed: str, *, jobs: bool
) -> None:
    """Every ext4 file system has root's own lost+found, and users of one disk have folders that only they may enter."""
    root = tmp_path / "disk"
    save(root / "llm" if jobs else root, 100)
    (root / closed).mkdir(mode=0)
    found = await checks(tmp_path, root, spawn=without_gpus(without_privileges)).check()
    assert "llm: step 100 " in str(found["newest"])
    assert found["notes"] == ""


@pytest.mark.parametrize(("closed", "note"), [("lost+found", ""), ("llm", "judged by its mount alone")])
async def test_an_empty_disk_is_distinguished_from_one_that_may_not_be_seen(
    tmp_path: Path, closed: str, note: str
) -> None:
    root = tmp_path / "disk"
    (root / closed).mkdir(mode=0, parents=True)
    found = await checks(tmp_path, root, spawn=without_gpus(without_privileges)).check()
    assert found["newest"] == ""
    assert note in str(found["notes"])
    assert bool(found["notes"]) == bool(note)


async def test_pipes_in_place_of_files_hang_nothing(tmp_path: Path) -> None:
    root = tmp_path / "llm"
    good = save(root, 100)
    bad = root / good.name.replace("000000000100", "000000000200")
    bad.mkdir()
    os.mkfifo(bad / MANIFEST)
    (root / "job_step_300").mkdir()
    os.mkfifo(root / "job_step_300" / "SEAL.json")
    found = await checks(tmp_path, root).check(60.0)
    assert "llm: step 100 " in str(found["newest"])


async def test_nothing_left_where_there_was_something_waits_for_a_person(tmp_path: Path, golden: Golden) -> None:
    """Training would begin anew, and nobody would notice until days later."""
    root = tmp_path / "llm"
    first, second = save(root, 100), save(root, 200)
    effector = checks(tmp_path, root)
    await effector.remember()
    for each in (first, second):
        (each / MANIFEST).write_bytes(b"{")
    with pytest.raises(EffectorError, match="step 200") as raised:
        await effector.check()
    golden("host-look", str(raised.value), varies=IDS)
    moved = tmp_path / "elsewhere"
    save(moved, 150)
    found = await checks(tmp_path, root, moved).check()
    assert "llm: step 150 " in str(found["newest"])


async def test_a_folder_that_was_never_there_is_no_reason_to_wait(tmp_path: Path) -> None:
    """Trainers make their folders; one that is gone since the good day is another matter."""
    root = tmp_path / "llm"
    effector = checks(tmp_path, root)
    assert "never seen there" in str((await effector.check())["notes"])
    root.mkdir()
    await effector.remember()
    found = await effector.check()
    assert (found["newest"], found["notes"]) == ("", ""), "a host that never had a checkpoint has lost none"
    root.rmdir()
    with pytest.raises(EffectorError, match=r"llm: it cannot be read: No such file or directory"):
        await effector.check()


async def test_many_folders_are_looked_at_in_turns(tmp_path: Path) -> None:
    """One process for each at once would be more than the daemon's unit may have, and each look would fail."""
    folders = [tmp_path / f"job-{number}" for number in range(2 * AT_ONCE)]
    running, most = 0, 0

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return Ended(returncode=0, stdout=b'{"because": "", "errno": 0}', stderr=b"")

    await checks(tmp_path, *folders, spawn=without_gpus(spawn)).check()
    assert most == AT_ONCE


async def test_a_folder_that_was_deleted_after_its_job_is_no_reason_to_wait(tmp_path: Path) -> None:
    """As a scheduler clears the scratch folder of each job. Of a job that still saves there, it is a fault."""
    root = tmp_path / "job-17"
    save(root, 100)
    await checks(tmp_path, root).remember()
    shutil.rmtree(root)
    await checks(tmp_path, root).remember()
    with pytest.raises(EffectorError, match=r"job-17: it cannot be read: No such file or directory"):
        await checks(tmp_path).check()
    await checks(tmp_path).remember()
    await checks(tmp_path).check()
    assert [path.name for path in (tmp_path / "state").iterdir()] == [MEMORY], "no job leaves a file here for good"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A file system of its own, mounted anew each time that it is called."""
    point = tmp_path / "nas"
    point.mkdir()

    def mounted() -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", point], check=False, stderr=-3)
        if done.returncode:
            pytest.skip("may not mount a tmpfs here")
        return point

    yield mounted
    unmount(point)


def unmount(point: Path) -> None:
    subprocess.run(["umount", point], check=False, stderr=-3)


async def test_the_empty_folder_below_a_storage_that_is_not_mounted_is_distinguished(
    tmp_path: Path, mount: Callable[[], Path]
) -> None:
    """It is there, empty and writable: whoever saves there, or begins anew there, loses everything."""
    point = mount()
    save(point / "llm", 100)
    effector = checks(tmp_path, point / "llm")
    await effector.remember()
    unmount(point)
    save(point / "llm", 5)
    with pytest.raises(
        EffectorError, match=rf"is on /\S* \(.*\), but was on {point} \(tmpfs, none\): it is not mounted"
    ):
        await effector.check()
    mount()
    save(point / "llm", 100)
    assert "step 100" in str((await effector.check())["newest"])


async def test_a_storage_that_hangs_costs_its_limit_and_is_asked_by_one_child_only(tmp_path: Path) -> None:
    """The child is killed; one that cannot be killed keeps its lock, and no second one is sent after it."""
    root = tmp_path / "llm"
    save(root, 100)
    code = "import fcntl,sys,time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(60)"

    async def hung(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        return await run_child([sys.executable, "-c", code, argv[-1]], limit_s=limit_s, stdin=stdin, env=env)

    async with asyncio.timeout(50):  # the child sleeps for a minute
        with pytest.raises(EffectorError, match=r"llm: it does not answer: no answer within 1 s \(a hung disk"):
            await checks(tmp_path, root, spawn=without_gpus(hung)).check(1.0)
    lock = next((tmp_path / "state").glob(".look-*"))
    assert "step 100" in str((await checks(tmp_path, root).check())["newest"])
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(EffectorError, match=r"llm: it does not answer: an earlier check of it still hangs"):
            await checks(tmp_path, root).check()


# --- GPUs -------------------------------------------------------------------------------------------------------------


def with_cards(cards: Cards) -> Spawn:
    """Children that find the NVML of the test."""

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        return await run_child(
            argv, limit_s=limit_s, stdin=stdin, env={**clean_environment(), **cards.environment, **(env or {})}
        )

    return spawn


async def test_a_child_that_breaks_says_why(tmp_path: Path) -> None:
    """By its last line on stderr."""

    async def breaks(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        if "powerguard.effectors.gpu.helper" in argv:
            return Ended(returncode=1, stdout=b"", stderr=b"Traceback ...\nImportError: no pynvml\n")
        return await run_child(argv, limit_s=limit_s, stdin=stdin, env=env)

    device = tmp_path / "pci" / "0000:17:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    notes = (await checks(tmp_path, spawn=breaks, pci=tmp_path / "pci").check())["notes"]
    assert "its program ended with status 1: ImportError: no pynvml" in str(notes)


@pytest.mark.peer("cc")
async def test_gpus_that_are_gone_or_want_a_reset_keep_training_from_starting(
    tmp_path: Path, gpus: Cards, golden: Golden
) -> None:
    """Through a child, as where the root helper is not installed."""
    spawn = with_cards(gpus)
    effector = checks(tmp_path, spawn=spawn)
    await effector.remember()
    assert (await effector.check())["gpus"] == 2
    gpus.put(1, "remap_pending", 1)
    with pytest.raises(EffectorError, match=r"GPU 1 \(GPU-00000001") as raised:
        await effector.check()
    golden("host-look", str(raised.value), "reset")
    gpus.put(1, "remap_pending", 0)
    gpus.put(0, "ecc_uncorrected", 2)
    with pytest.raises(EffectorError, match=r"GPU 0 \(GPU-00000000-.*2 uncorrected memory errors") as raised:
        await effector.check()
    golden("host-look", str(raised.value), "memory errors")
    gpus.put(0, "ecc_uncorrected", 0)
    (gpus.world / "gpu1").rename(gpus.world / "away")
    with pytest.raises(EffectorError, match=r"GPU-00000001-") as raised:
        await effector.check()
    golden("host-look", str(raised.value), "gone")
    gpus.put(0, "remap_pending", 1)
    with pytest.raises(EffectorError, match=r"GPU 0 \(GPU-00000000-.*1 of 2 GPUs are there: GPU-00000001-"):
        await effector.check()
    gpus.put(0, "remap_pending", 0)
    anyway = checks(tmp_path, spawn=spawn, any_gpus=True)
    assert "GPU-00000001-" in str((await anyway.check())["notes"])
    gpus.fail("InitWithFlags", 9)
    with pytest.raises(EffectorError, match="2 GPUs") as raised:
        await effector.check()
    golden("host-look", str(raised.value), "no driver")


@pytest.mark.root
@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_gpus_are_asked_for_through_the_root_helper_where_it_is(tmp_path: Path, gpus: Cards) -> None:
    with gpus.listening() as path:
        found = await checks(tmp_path, gpu_socket=str(path)).check()
    assert found["gpus"] == 2


@pytest.mark.root
@pytest.mark.peer("cc", "systemd-socket-activate")
async def test_gpus_are_forgotten_on_a_good_day_once_the_root_helper_is_removed(tmp_path: Path, gpus: Cards) -> None:
    """The daemon itself can ask no GPU: they would be missing at each return, and training would wait for good."""
    with gpus.listening() as path:
        effector = checks(tmp_path, gpu_socket=str(path))
        await effector.remember()
        assert (await effector.check())["gpus"] == 2
    path.touch()  # its socket does not listen: an accident, and no removal
    await effector.remember()
    with pytest.raises(EffectorError, match="2 GPUs were here, and none can be queried now"):
        await effector.check()
    path.unlink()
    with pytest.raises(EffectorError, match="2 GPUs were here, and none can be queried now"):
        await effector.check()
    await effector.remember()
    assert (await effector.check())["gpus"] == 0


@pytest.mark.parametrize(
    ("vendor", "kind", "count"),
    [("0x10de", "0x030200", 1), ("0x10de", "0x0c0330", 0), ("0x1002", "0x030000", 0), ("", "", 0)],
)
async def test_gpus_that_are_here_and_that_nobody_can_ask(
    tmp_path: Path, vendor: str, kind: str, count: int, golden: Golden
) -> None:
    """In the daemon's sandbox there is no driver: without powerguard-gpu nobody would notice that one is missing."""
    device = tmp_path / "pci" / "0000:17:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n", encoding="ascii")
    (device / "class").write_text(f"{kind}\n", encoding="ascii")
    notes = (await checks(tmp_path, pci=tmp_path / "pci").check())["notes"]
    assert str(notes)[:1] == (str(count) if count else "")
    if count:
        golden("host-look", str(notes))


# --- The file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"schema": "other"}', b"\xff", b'{"schema": "powerguard.host/v2"}']
)
async def test_a_memory_that_does_not_hold_together_is_reported_and_believed_in_nothing(
    tmp_path: Path, content: bytes, golden: Golden
) -> None:
    effector = checks(tmp_path)
    (tmp_path / "state" / MEMORY).write_bytes(content)
    found = await effector.check()
    assert found["notes"]
    if not content:
        golden("host-look", str(found["notes"]))


async def test_what_is_remembered_is_read_back_as_it_was(tmp_path: Path) -> None:
    root = tmp_path / "llm"
    save(root, 100)
    effector = checks(tmp_path, root)
    assert await effector.remember()
    kept = from_json((tmp_path / "state" / MEMORY).read_text(encoding="utf-8"))
    assert (kept.places[str(root)].steps, kept.places[str(root)].current_at) == ({"llm": 100}, 1000.0)
    assert from_json(to_json(kept)) == kept
    assert not await effector.remember(), "what has not changed is not written"


# --- Judging ----------------------------------------------------------------------------------------------------------


def kept(mounted: Mounted | None = NAS, current_at: float = 1000.0, **steps: int) -> RememberedFolder:
    return RememberedFolder(real="/nas/llm", mounted=mounted, steps=steps, current_at=current_at)


def place(mounted: Mounted | None = NAS, *jobs: ResumePoint, **more: Any) -> FolderLook:  # noqa: ANN401 - as its fields
    return FolderLook(real="/nas/llm", mounted=mounted, jobs=jobs, **more)


def newest(step: int = 100, job: str = "llm") -> ResumePoint:
    return ResumePoint(job=job, root="/nas/llm", step=step, path=f"/nas/llm/{step}", state="whole")


def seen(now: FolderLook, gpus: Gpus | None = None) -> HostView:
    return HostView(gpus=gpus or Gpus(because="no NVML", cards=0), places={"/nas/llm": now})


@pytest.mark.parametrize(
    ("was", "now", "is_same"),
    [
        (NAS, replace(NAS, fsid=99), True),
        (NAS, replace(NAS, kind="autofs", source="systemd-1", fsid=None), True),
        (NAS, replace(NAS, point="/mnt/nas"), True),
        (NAS, ROOT_DISK, False),
        (NAS, replace(ROOT_DISK, point="/nas"), False),
        (NAS, replace(ROOT_DISK, fsid=22), False),
        (NAS, replace(NAS, point="/", fsid=None), False),
        (NAS, replace(NAS, point="/data", source="/dev/sdb1", fsid=33), False),
        (ROOT_DISK, replace(ROOT_DISK, source="/dev/sdb2"), True),
        (ROOT_DISK, replace(ROOT_DISK, point="/home"), True),
    ],
)
def test_where_a_folder_lies(was: Mounted, now: Mounted, *, is_same: bool, golden: Golden) -> None:
    """Device names and ids change over a reboot; a bind mount of the root's own file system is still the root's."""
    verdict = judge(HostMemory(places={"/nas/llm": kept(was)}), seen(place(now)))
    assert (not verdict.problems) is is_same
    if not is_same and now == ROOT_DISK:
        golden("host-look", verdict.problems[0])


def test_a_file_system_that_has_become_read_only(golden: Golden) -> None:
    verdict = judge(HostMemory(places={"/nas/llm": kept()}), seen(place(replace(NAS, writable=False))))
    golden("host-look", verdict.problems[0])


def test_a_folder_that_only_training_may_enter_is_judged_by_its_mount(golden: Golden) -> None:
    closed = place(NAS, because="Permission denied", errno=13)
    verdict = judge(HostMemory(places={"/nas/llm": kept(llm=100)}), seen(closed))
    assert verdict.problems == ()
    golden("host-look", verdict.notes[0])
    assert judge(HostMemory(places={"/nas/llm": kept(llm=100)}), seen(replace(closed, mounted=ROOT_DISK))).problems


@pytest.mark.parametrize(
    ("before", "now", "problem", "note"),
    [
        (TWO, Gpus(there=TWO), "", ""),
        (TWO, Gpus(there=(TWO[0], HostGpu(uuid="GPU-c", name="H100"))), "", "as many GPUs as before, but not the same"),
        ((), Gpus(there=TWO), "", ""),
        ((), Gpus(), "", ""),
        (TWO[:1], Gpus(because="gone"), "one GPU was here, and none can be queried now: gone", ""),
        (TWO, Gpus(there=TWO[:1], silent=1, faults=("GPU 1: off the bus",)), "GPU 1: off the bus", ""),
        ((), Gpus(there=TWO, worn=("GPU 1",)), "", "GPU 1: its memory"),
    ],
)
def test_gpus(before: tuple[HostGpu, ...], now: Gpus, problem: str, note: str) -> None:
    verdict = judge(HostMemory(gpus=before), HostView(gpus=now, places={}))
    assert [len(verdict.problems), len(verdict.notes)] == [bool(problem), bool(note)]
    assert problem in "".join(verdict.problems)
    assert note in "".join(verdict.notes)


def test_what_looks_wrong_is_not_remembered() -> None:
    """On a good day too a storage may be away for a moment: what counts is what was there when all was well."""
    before = HostMemory(gpus=TWO, places={"/nas/llm": kept(llm=100)})

    def after(
        now: FolderLook, gpus: Gpus | None = None, wall_s: float = 2000.0, current: Sequence[str] = ("/nas/llm",)
    ) -> HostMemory:
        return remembered(before, seen(now, gpus), current, wall_s=wall_s, keep_s=86400.0)

    assert after(place(ROOT_DISK)) == before
    assert after(place(NAS, because="no answer", late=True)) == before
    moved = after(place(ROOT_DISK, newest(150)), Gpus(there=TWO[:1]))
    assert moved.gpus == TWO[:1], "a GPU that was taken out on a good day is not missed for ever"
    assert (moved.places["/nas/llm"].mounted, moved.places["/nas/llm"].steps) == (ROOT_DISK, {"llm": 150})
    assert after(place(NAS, newest(7)), Gpus(there=TWO[:1], faults=("GPU 1: off the bus",))).gpus == TWO
    assert after(place(NAS), wall_s=1000.0 + 86400.0, current=()).places
    assert not after(place(NAS), wall_s=1001.0 + 86400.0, current=()).places, (
        "a job that has ended is not missed for ever"
    )
    gone: dict[str, Any] = {"because": "No such file or directory", "errno": errno.ENOENT}
    assert not after(place(NAS, **gone), current=()).places, "its folder was deleted"
    assert after(place(NAS, **gone)) == before, "a trainer still saves there"
    for away in (ROOT_DISK, replace(NAS, kind="autofs", source="systemd-1", fsid=None), None):
        assert after(place(away, **gone), current=()) == before, "its storage is away"


def test_of_jobs_that_have_ended_only_the_newest_are_remembered() -> None:
    names = [f"/nas/job-{number:03}" for number in range(2 * MOST_ENDED)]
    before = HostMemory(places={name: kept(current_at=1000.0 + at) for at, name in enumerate(names)})
    now = HostView(gpus=Gpus(), places={name: place(NAS) for name in names})
    fresh = remembered(before, now, names[:1], wall_s=2000.0, keep_s=86400.0)
    assert list(fresh.places) == [names[0], *names[-MOST_ENDED:]]


def test_a_folder_of_another_framework_is_not_walked(tmp_path: Path) -> None:
    """A hundred checkpoints of thousands of files each, on a file server: what is told of them is in their names."""
    for step in (900, 1000):
        folder = tmp_path / "run" / f"checkpoint-{step}" / "deep"
        folder.mkdir(parents=True)
        for number in range(20):
            (folder / f"{number}.bin").touch()
    code = (
        "import sys; seen = []; sys.addaudithook(lambda name, arguments: seen.append(str(arguments[:1])) if name in "
        "('os.scandir', 'os.listdir', 'open') else None); from powerguard.effectors.host.look_child import main; "
        "main(sys.argv[1:]); sys.stderr.write('\\n'.join(list(seen)))"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "run"), "manifest", "10"]
    ended = subprocess.run(argv, capture_output=True, check=True, timeout=60, text=True)
    found = json.loads(ended.stdout)
    assert (found["jobs"][0]["step"], found["jobs"][0]["state"]) == (1000, "not_judged")
    assert f"{tmp_path}/run" in ended.stderr, "the audit hears"
    assert "/deep" not in ended.stderr


def test_the_childs_answer_holds_no_more_than_is_asked_for(tmp_path: Path) -> None:
    """A thousand rotten checkpoints make a line that can be read, and no flood."""
    root = tmp_path / "llm"
    root.mkdir()
    for step in range(1000):
        folder = root / f"step-{step:012d}-0123abcd"
        folder.mkdir()
        (folder / MANIFEST).write_bytes(b"rot" * 200)
    argv = [sys.executable, "-m", "powerguard.effectors.host.look_child", str(root), "manifest", "10"]
    ended = subprocess.run(argv, capture_output=True, check=True, timeout=100)
    found = json.loads(ended.stdout)
    assert (found["jobs"][0]["passed"], found["jobs"][0]["path"], len(ended.stdout) < 5000) == (1000, "", True)
