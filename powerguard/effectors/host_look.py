"""Looks at this host and compares it with what it was: the child of the daemon's `CheckHost`, and doctor's own eyes.

    python -m powerguard.effectors.host_look        what to look at is a line of JSON on stdin, and so is the answer

Nothing here touches a folder of checkpoints or the NVIDIA driver: both hang when they are ill. Folders are looked at by
children that are killed at their limit, one for each folder and never two; GPUs by the root helper powerguard-gpu, or,
where it is not installed, by the same program as a child. It is a process of its own so that the daemon carries neither
this code nor its faults.
"""

import asyncio
import contextlib
import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from powerguard.clock import Clock, boottime_s
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.filesystems import mount_of
from powerguard.effectors.gpu.options import GPU_SOCKET
from powerguard.effectors.host_look_judge import (
    Found,
    Gpu,
    Gpus,
    Look,
    Memory,
    Mounted,
    Place,
    Verdict,
    from_json,
    judge,
    key_of,
    remembered,
    to_json,
)
from powerguard.effectors.root_client import RootHelper
from powerguard.fields import clean_text

GPU_LIMIT_S: Final = 6.0
FORGOTTEN_S: Final = 86400.0
"""A folder is compared for this long after it last counted as one where a trainer saves."""
FILE_LIMIT_S: Final = 2.0
MOST_MEMORY_BYTES: Final = 1 << 20
_MOUNTS: Final = Path("/proc/self/mountinfo")
_PCI: Final = Path("/sys/bus/pci/devices")
_NVIDIA: Final = "0x10de"
_TOLD: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One look and what came of it."""

    look: Look
    verdict: Verdict
    before: Memory


class HostLook:
    """Looks, compares, and says what is worth remembering.

    memory: the file of what is remembered. dirs: folders of checkpoints that count now; those that are remembered are
    looked at as well. gpu_socket: of powerguard-gpu; where nobody has put one, a child asks NVML. verify, any_gpus: as
    the settings' `resume.verify` and `resume.gpus`.
    """

    def __init__(
        self,
        *,
        memory: Path,
        dirs: Sequence[str],
        gpu_socket: str = GPU_SOCKET,
        verify: str = "manifest",
        any_gpus: bool = False,
        spawn: Spawn = run_child,
        clock: Clock = boottime_s,
        mounts: Path = _MOUNTS,
        pci: Path = _PCI,
    ) -> None:
        self._memory = memory
        self._dirs = tuple(os.path.normpath(each) for each in dirs)
        self._verify = verify
        self._any_gpus = any_gpus
        self._helper = RootHelper(
            name="powerguard-gpu", socket=gpu_socket, real=GPU_SOCKET, hangs="powerguard-gpu or the NVIDIA driver hangs"
        )
        self._spawn = spawn
        self._clock = clock
        self._mounts = mounts
        self._pci = pci

    async def look(self, limit_s: float) -> Checked:
        """Look at everything at once, within limit_s, and change nothing."""
        before, trouble = await self._remembered()
        async with asyncio.TaskGroup() as group:
            gpus = group.create_task(self._gpus(min(GPU_LIMIT_S, limit_s)))
            places = {
                folder: group.create_task(self._place(folder, before, limit_s))
                for folder in dict.fromkeys((*self._dirs, *before.places))
            }
        seen = {folder: task.result() for folder, task in places.items()}
        now = Look(at_s=self._clock(), gpus=gpus.result(), places=seen)
        verdict = judge(before, now, any_gpus=self._any_gpus)
        if trouble:
            verdict = replace(verdict, notes=(trouble, *verdict.notes))
        return Checked(look=now, verdict=verdict, before=before)

    def fresh(self, checked: Checked, wall_s: float) -> str | None:
        """Return what is to be written down of a good day; None where it stands there already."""
        fresh = remembered(checked.before, checked.look, self._dirs, wall_s=wall_s, keep_s=FORGOTTEN_S)
        return None if fresh == checked.before else to_json(fresh)

    # --- GPUs ---------------------------------------------------------------------------------------------------------

    async def _gpus(self, limit_s: float) -> Gpus:
        try:
            if self._helper.is_there():
                answer: Any = await self._helper.ask({"word": "health"}, limit_s=limit_s)
            else:
                answer = await self._gpus_by_child(limit_s)
        except EffectorError as error:
            return Gpus(because=str(error), cards=await asyncio.to_thread(_cards, self._pci))
        told = answer.get("gpus")
        return _gpus_of([gpu for gpu in told if isinstance(gpu, dict)] if isinstance(told, list) else [])

    async def _gpus_by_child(self, limit_s: float) -> dict[str, Any]:
        """Ask NVML in a child. Under the daemon's own sandbox there is no device for it: it says so."""
        argv = [sys.executable, "-I", "-m", "powerguard.effectors.gpu.helper", "health"]
        try:
            ended = await self._spawn(argv, limit_s=limit_s)
        except OSError as error:
            msg = f"no child can be started ({error.strerror})"
            raise EffectorError(msg) from error
        if ended.timed_out:
            msg = f"no answer within {limit_s:g} s: the NVIDIA driver hangs (dmesg says why: look for Xid)"
            raise EffectorError(msg)
        try:
            answer = json.loads(ended.stdout)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("ok") is not True:
            why = str(answer.get("error")) if isinstance(answer, dict) else "it broke"
            msg = f"{why} (powerguard-gpu.socket is not there either: see docs/guides/gpu-power.md)"
            raise EffectorError(msg)
        return answer

    # --- Storage ------------------------------------------------------------------------------------------------------

    async def _place(self, folder: str, before: Memory, limit_s: float) -> Place:
        kept = before.places.get(folder)
        told = await self._ask_child(folder, limit_s)
        real = str(told.get("real") or (folder if kept is None else kept.real))
        # Only now: an automounter mounts when it is touched.
        mounted = self._mounted(real, told.get("fsid"))
        return Place(
            real=real,
            mounted=mounted,
            jobs=tuple(_found(each) for each in told.get("jobs", ())),
            errno=int(told.get("errno", 0)),
            because=clean_text(str(told["because"]), 300),
            late=told.get("hangs") is True,
        )

    async def _ask_child(self, folder: str, limit_s: float) -> dict[str, Any]:
        lock = self._memory.parent / f".look-{sha256(os.fsencode(folder)).hexdigest()[:16]}"
        argv = [sys.executable, "-m", "powerguard.effectors.host_look_child", folder, self._verify]
        try:
            ended = await self._spawn([*argv, f"{0.8 * limit_s:.1f}", str(lock)], limit_s=limit_s)
        except OSError as error:
            return {"because": f"no child can be started ({error.strerror})", "errno": errno.EAGAIN}
        if ended.timed_out:
            return {"because": f"no answer within {limit_s:.0f} s (a hung disk or network file system)", "hangs": True}
        with contextlib.suppress(ValueError, RecursionError):
            told = json.loads(ended.stdout)
            if isinstance(told, dict) and "because" in told:
                return told
        said = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        return {"because": f"the look at it broke: {said[-1] if said else ended.returncode}", "errno": errno.EIO}

    def _mounted(self, path: str, fsid: object) -> Mounted | None:
        try:
            listed = self._mounts.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
        mount, root = mount_of(path, listed), mount_of("/", listed)
        if mount is None or root is None:
            return None
        return Mounted(
            point=mount.point,
            kind=mount.kind,
            source=mount.source,
            on_root=mount.device == root.device,
            writable=mount.writable,
            fsid=fsid if isinstance(fsid, int) and fsid else None,
        )

    # --- Memory -------------------------------------------------------------------------------------------------------

    async def _remembered(self) -> tuple[Memory, str]:
        """Return what is remembered, and what is wrong with that."""
        path = self._memory

        def read() -> str:
            with path.open("rb") as file:
                return file.read(MOST_MEMORY_BYTES).decode("utf-8")

        try:
            async with asyncio.timeout(FILE_LIMIT_S):
                return from_json(await asyncio.to_thread(read)), ""
        except FileNotFoundError:
            return Memory(), ""
        except (OSError, ValueError, TimeoutError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            return Memory(), f"{path}: cannot be read ({why}): what was here before the outage is not known"


def answer(looker: HostLook, checked: Checked, wall_s: float) -> dict[str, Any]:
    """Return what the daemon is told."""
    return {
        "problems": checked.verdict.problems,
        "notes": checked.verdict.notes,
        "gpus": len(checked.look.gpus.there),
        "folders": len(checked.look.places),
        "detail": told(checked),
        "memory": looker.fresh(checked, wall_s),
    }


def told(checked: Checked) -> dict[str, str | int]:
    """What the journal and people read of a look that found everything."""
    places = checked.look.places
    newest = [
        f"{key_of(found)}: {'not told' if found.step is None else f'step {found.step}'} ({found.state}) in {folder}"
        for folder, place in places.items()
        for found in place.jobs
        if found.path
    ]
    storage = [
        f"{folder} on {place.mounted.point} ({place.mounted.kind})" for folder, place in places.items() if place.mounted
    ]
    return {
        "gpus": len(checked.look.gpus.there),
        "storage": clean_text("; ".join(storage), _TOLD),
        "newest": clean_text("; ".join(newest), _TOLD),
        "notes": clean_text("; ".join(checked.verdict.notes), _TOLD),
    }


def _cards(pci: Path) -> int:
    """Count NVIDIA's display and 3D controllers, by the kernel's list of PCI devices."""
    count = 0
    try:
        devices = list(pci.iterdir())
    except OSError:
        return 0
    for device in devices:
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except (OSError, ValueError):
            continue
        count += vendor == _NVIDIA and kind.startswith("0x03")
    return count


def _gpus_of(told: Sequence[Mapping[str, Any]]) -> Gpus:
    there, faults, worn = [], [], []
    for gpu in told:
        name = f"GPU {gpu.get('index')}"
        if gpu.get("because") or not isinstance(gpu.get("uuid"), str):
            faults.append(f"{name}: {gpu.get('because') or 'it has no UUID'}")
            continue
        there.append(Gpu(uuid=str(gpu["uuid"]), name=str(gpu.get("name"))))
        pending = [str(word) for word in gpu.get("pending") or ()]
        if pending:
            named = ", ".join(word.replace("_", " ") for word in pending)
            faults.append(
                f"{name} ({gpu['uuid']}): {named} pending: it needs a reset (nvidia-smi --gpu-reset) or a reboot"
            )
        if gpu.get("worn") is True:
            worn.append(f"{name} ({gpu['uuid']})")
    return Gpus(there=tuple(there), faults=tuple(faults), worn=tuple(worn))


def _found(told: Mapping[str, Any]) -> Found:
    step = told.get("step")
    return Found(
        job=clean_text(str(told.get("job", "")), 128),
        root=str(told.get("root", "")),
        step=step if isinstance(step, int) else None,
        path=str(told.get("path", "")),
        state=str(told.get("state", "")),
        passed=int(told.get("passed", 0)),
        passed_over=tuple(clean_text(str(text), 300) for text in told.get("passed_over", ())),
        because=clean_text(str(told.get("because", "")), 300),
    )


def main() -> int:
    """Look once, as stdin says."""
    asked = json.loads(sys.stdin.buffer.read())
    looker = HostLook(
        memory=Path(asked["memory"]),
        dirs=asked["dirs"],
        gpu_socket=asked["gpu_socket"],
        verify=asked["verify"],
        any_gpus=asked["any_gpus"],
    )
    checked = asyncio.run(looker.look(asked["limit_s"]))
    sys.stdout.write(json.dumps(answer(looker, checked, asked["wall_s"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
