"""Checkpoint filesystems are flushed once each, in children that cannot hold anything up."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.actions import PollNow, SyncFilesystems
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Ended, run_child
from powerguard.effectors.host import syncfs_child
from powerguard.effectors.host.filesystems import SyncEffector, by_filesystem

MOUNTINFO = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 259:1 / /nvme rw shared:2 - xfs /dev/nvme0n1 rw
31 22 259:1 /sub /also\040nvme rw shared:3 - xfs /dev/nvme0n1 rw
32 30 0:40 / /nvme/nas rw shared:4 - nfs4 nas:/x rw
garbage
"""


def order(seconds: float) -> SyncFilesystems:
    return SyncFilesystems(id="s1", by_s=boottime_s() + seconds, outage="o1")


@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        (["/nvme/a", "/nvme/b", "/nvme", "/nvme/a"], [["/nvme/a", "/nvme/b", "/nvme"]]),
        (["/nvme/a", "/nvme/nas/b", "/home/c"], [["/nvme/a"], ["/nvme/nas/b"], ["/home/c"]]),
        (["/also nvme/a", "/nvme/b"], [["/also nvme/a", "/nvme/b"]]),
        (["/nvme/x/../nas/a", "/nvme/nas"], [["/nvme/nas/a", "/nvme/nas"]]),
        (["/nvmes"], [["/nvmes"]]),
        ([], []),
    ],
)
def test_by_filesystem_without_touching_any(paths: list[str], chosen: list[list[str]]) -> None:
    """A stat() of a path on a dead NFS server would hang the daemon."""
    assert by_filesystem(paths, MOUNTINFO) == chosen


def test_where_no_mounts_are_listed_every_path_counts() -> None:
    assert by_filesystem(["/a", "/b", "/a"], "") == [["/a"], ["/b"]]


async def test_real_filesystems_are_flushed(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(os.urandom(100_000))
    detail = dict(await SyncEffector([str(tmp_path), str(tmp_path / "data")]).carry_out(order(60)))
    assert detail == {"filesystems": 1, "paths": str(tmp_path)}


async def test_a_missing_folder_is_named_and_the_others_are_flushed(tmp_path: Path) -> None:
    effector = SyncEffector([str(tmp_path / "none"), "/proc"], mounts=tmp_path / "no mountinfo")
    with pytest.raises(EffectorError, match=r"1 of 2 filesystems not flushed: .*none: No such file or directory"):
        await effector.carry_out(order(60))


@pytest.mark.root
async def test_a_folder_that_only_its_user_may_open_is_flushed(tmp_path: Path) -> None:
    """A training user's home is closed to the daemon's user; here root without its capabilities is that one."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    rights = "-dac_override,-dac_read_search"

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        drop = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]
        return await run_child([*drop, *argv], limit_s=limit_s, stdin=stdin, env=env)

    effector = SyncEffector([str(folder / "checkpoints")], spawn=spawn)
    assert dict(await effector.carry_out(order(60)))["filesystems"] == 1


async def test_a_link_to_another_filesystem_is_flushed_too(tmp_path: Path) -> None:
    """By its name it lies on the disk of the first folder; the child follows it. A missing one is named."""
    (tmp_path / "ckpt").symlink_to("/dev/shm")
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; "
        "sys.addaudithook(lambda name, arguments: name == 'open' and print(arguments[0])); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    opened: list[str] = []

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        ended = await run_child([*argv[:3], "-c", code, *argv[3:]], limit_s=limit_s, stdin=stdin, env=env)
        opened.extend(ended.stdout.decode().splitlines())
        return ended

    paths = [str(tmp_path), str(tmp_path / "ckpt"), str(tmp_path / "none")]
    with pytest.raises(EffectorError, match=r"1 of 1 filesystems not flushed: \S*/none: No such file or directory$"):
        await SyncEffector(paths, spawn=spawn).carry_out(order(60))
    assert set(paths) <= set(opened)


async def test_a_hung_one_holds_nothing_up(tmp_path: Path) -> None:
    """The child is killed at its limit, and the other filesystem was flushed meanwhile."""
    flushed: list[str] = []

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        if argv[-1] == "/hung":
            return await run_child([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=limit_s)
        flushed.append(argv[-1])
        return await run_child(argv, limit_s=limit_s, stdin=stdin, env=env)

    effector = SyncEffector(["/hung", "/proc"], spawn=spawn, mounts=tmp_path / "no mountinfo")
    for limit_s in (4.0, 30.0):  # the second, where the other child took most of the first to start
        with pytest.raises(EffectorError, match=r" of 2 .* /hung: not flushed within [0-9.]+ s") as caught:
            async with asyncio.timeout(50):  # the child sleeps for a minute
                await effector.carry_out(order(limit_s))
        if str(caught.value).startswith("1 "):
            break
    assert str(caught.value).startswith("1 of 2 filesystems not flushed: ")
    assert set(flushed) == {"/proc"}


async def test_no_child_no_traceback(tmp_path: Path) -> None:
    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        await asyncio.sleep(0)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with pytest.raises(EffectorError, match=r"no child can be started \(Resource temporarily unavailable\)"):
        await SyncEffector(["/"], spawn=spawn).carry_out(order(5))
    with pytest.raises(EffectorError, match="PollNow "):
        await SyncEffector(["/"]).carry_out(PollNow(id="p", by_s=1.0, ups="a"))


async def test_the_child_starts_without_site_or_environment(tmp_path: Path) -> None:
    """It must work in a shutdown, whatever is left of the environment by then."""
    ended = await run_child(
        [sys.executable, "-I", "-S", syncfs_child.__file__, str(tmp_path)], limit_s=60.0, env={"PATH": "/nowhere"}
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
