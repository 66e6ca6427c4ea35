"""torch.distributed.checkpoint (DCP) that survives a power cut: its writer, sealing, and its reader, verifying.

    dcp.save(state, storage_writer=SealedFileSystemWriter("/nvme/llm/step-1200"))
    dcp.load(state, storage_reader=SealedFileSystemReader("/nvme/llm/step-1200"))

DCP 2.13 calls fsync on `.metadata` before its bytes have left Python's buffer, and never on the folder: 23 of 23 power
cuts after an acknowledged save left nothing that loads (measured on ext4). It also loads flipped bits without a word.
Here the coordinator flushes every file and folder, digests what was written, and puts the seal in its place last; each
rank verifies the files that it is about to read. Planning and resharding stay DCP's.

The coordinator must see the files of all ranks (one host, or a shared file system). A folder is written once. With
`dcp.async_save` the same holds when its future is done, and not before: an emergency calls `dcp.save`.
"""

import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from powerguard.trainer.seal.folder import (
    Sealed,
    digests,
    each_of,
    hold,
    leave_behind,
    named,
    newest_whole,
    open_to_read,
    prune,
    saved_in,
    seal,
    walk,
)
from powerguard.trainer.seal.manifest import SEAL, UNBORN, Seal, SealedFile, SealError, read_seal
from powerguard.trainer.store.disk import is_there
from powerguard.trainer.store.store import SavedCheckpoint, StoreError, make_root

METADATA: Final = ".metadata"


class SealedFileSystemWriter(FileSystemWriter):
    """DCP's FileSystemWriter, and durable: when `dcp.save` returns, on any rank, a power cut can do no harm any more.

    path: a folder of its own for each checkpoint, that does not hold one yet. options: as FileSystemWriter has them;
    sync_files and overwrite are not for you to choose. step: kept in the seal; None: from the folder's name.
    Raises SealError, which DCP wraps into a CheckpointException on every rank.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int | None = None, **options: Any) -> None:  # noqa: ANN401
        for word in ("sync_files", "overwrite"):
            if word in options:
                msg = f"{word}: a sealed checkpoint is always flushed and never written over; leave it out"
                raise SealError(msg)
        super().__init__(path, sync_files=True, overwrite=False, **options)
        self._step = step
        self.sealed: Sealed | None = None
        """On the coordinator, after the save: the seal."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:  # noqa: ANN401, FBT001
        """Take possession of the folder, before any rank writes into it."""
        if not options.get("use_collectives", True):
            msg = (
                "use_collectives=False: the ranks could not confirm that all have written, so the checkpoint "
                "cannot be sealed"
            )
            raise SealError(msg)
        super().set_up_storage_writer(is_coordinator, *args, **options)
        if is_coordinator:
            _take(Path(self.path))

    def finish(self, metadata: Any, results: Any) -> None:  # noqa: ANN401 - DCP's own classes
        """On the coordinator, when all ranks have written: DCP's metadata, and then the seal."""
        written = {str(each.storage_data.relative_path) for of_rank in results for each in of_rank}
        if missing := sorted(written - walk(Path(self.path)).files.keys()):
            msg = (
                f"{self.path}: {named(missing)}: not here, but on another host's disk (save to a file system that all"
                " ranks share)"
            )
            raise SealError(msg)
        super().finish(metadata, results)
        self.sealed = seal(self.path, step=self._step)


class SealedFileSystemReader(FileSystemReader):
    """DCP's FileSystemReader, which reads nothing that it has not verified; `.metadata` is a pickle.

    A file is verified through the page cache, from which DCP then loads it: one pass over the disk.
    Raises SealError, which DCP wraps into a CheckpointException on every rank.
    """

    def read_metadata(self) -> Any:  # noqa: ANN401 - DCP's Metadata. No keywords: without them DCP looks for nothing else
        root = Path(self.path)
        self._seal = _sealed(root)
        self._check(root, [METADATA])
        return super().read_metadata()

    def read_data(self, plan: Any, planner: Any) -> Any:  # noqa: ANN401 - DCP's own classes
        needed = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        self._check(Path(self.path), sorted(needed))
        return super().read_data(plan, planner)

    def _check(self, root: Path, names: list[str]) -> None:
        files = {file.path: file for file in self._seal.files}
        strange = [name for name in names if name not in files]
        if strange:
            msg = f"{root}: {', '.join(strange[:5])}: not in the seal, so never part of this checkpoint"
            raise SealError(msg)
        each_of(lambda name: _check_file(root, files[name], self._seal.chunk_bytes), names)


def _sealed(root: Path) -> Seal:
    found = read_seal(root)
    if found is None:
        msg = f"{root}: not sealed, so not finished, or written by another writer (`powerguard seal` seals it as it is)"
        raise SealError(msg)
    return found


def _check_file(root: Path, file: SealedFile, chunk_bytes: int) -> None:
    descriptor = open_to_read(root / file.path, direct=False)
    try:
        size = os.fstat(descriptor).st_size
        if size != file.size_bytes:
            msg = f"{root / file.path}: {size} bytes, sealed with {file.size_bytes}"
            raise SealError(msg)
        read = 0
        for chunk, (digest, length) in enumerate(digests(descriptor, size, chunk_bytes)):
            read += length
            if digest != file.digest(chunk):
                msg = (
                    f"{root / file.path}: changed since it was sealed, in chunk {chunk} (offset {chunk * chunk_bytes})"
                )
                raise SealError(msg)
        if read != size:
            msg = f"{root / file.path}: was cut to {read} bytes while it was read"
            raise SealError(msg)
    finally:
        os.close(descriptor)


def _take(folder: Path) -> None:
    """Make a folder ours: an empty seal says that we are at work. What an earlier attempt left there is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_there(folder / SEAL):
        msg = f"{folder}: holds a sealed checkpoint; one is never written over (give each step a folder of its own)"
        raise SealError(msg)
    if is_there(folder / UNBORN):
        for left in [*folder.glob("__*.distcp"), *folder.glob(f"{METADATA}*")]:
            left.unlink()
    elif is_there(folder / METADATA):
        msg = (
            f"{folder}: holds a checkpoint without a seal (`powerguard seal {folder}` seals it; or take another folder)"
        )
        raise SealError(msg)
    (folder / UNBORN).touch()


_NAMES: Final = "dcp-step-*"


# --- One folder per step ------------------------------------------------------------------------------------------


def save_sealed(
    state: Mapping[str, Any],
    root: str | os.PathLike[str],
    step: int,
    *,
    keep: int = 2,
    **options: Any,  # noqa: ANN401
) -> SavedCheckpoint:
    """Save on all ranks into a new folder under root; durable when it returns. What `Guard` takes as its `save`.

    keep: how many sealed ones stay, at least 2; older ones go when this one is durable. Those of higher steps are set
    aside as `old-...`: training was rolled back behind them. What a kill has left unfinished is removed first: it would
    fill the disk. options: FileSystemWriter's.
    Raises SealError on every rank when it failed on any; the earlier checkpoints then stand. StoreError: another
    process saves there. The first save locks root until this process ends.
    """
    root = Path(root).expanduser()

    def new() -> str:
        make_root(root)
        hold(root, ".lock-dcp")
        leave_behind(root, step, _NAMES)
        for left in root.glob(f"{_NAMES}/{UNBORN}"):
            if not is_there(left.parent / SEAL):  # a kill, or a power cut, in the midst of an earlier save
                shutil.rmtree(left.parent, ignore_errors=True)
        # Not as the store names its own: those it removes when they have no manifest.
        return f"dcp-step-{step}-{secrets.token_hex(4)}"

    folder = root / _from_coordinator(new)
    writer = SealedFileSystemWriter(folder, step=step, **options)
    try:
        dcp.save(dict(state), storage_writer=writer)
    except CheckpointException as error:  # no Exception of Python's, so that it would end the training
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # all ranks have failed: else a full disk would stay full
        msg = f"{folder}: the checkpoint of step {step} failed: {error}"
        raise SealError(msg) from error
    if writer.sealed is not None:
        prune(root, max(keep, 2), _NAMES)
    return saved_in(folder, step)


def load_newest_sealed(state: dict[str, Any], root: str | os.PathLike[str]) -> int | None:
    """Load, in place and on all ranks, the newest checkpoint under root that verifies. Its step; None without one.

    A missing root is made, with a warning: a disk may not be mounted.
    One that does not verify is renamed to `bad-...` and passed over. Raises SealError when none is left, and what
    dcp.load raises when it does not fit; that includes what it has in a part of the state, and no rank has a place for:
    the moments of an optimizer that was just made, say. A part (a key of `state`) that is not given is left out.
    """
    root = Path(root).expanduser()

    def newest() -> Path | None:
        make_root(root)
        return newest_whole(root)

    folder = _from_coordinator(newest)
    if folder is None:
        return None
    step = _sealed(folder).step
    if step is None:
        msg = f"{folder}: its seal has no step to go on from (seal it with --step, or move it away)"
        raise SealError(msg)
    dcp.load(state, storage_reader=SealedFileSystemReader(folder), planner=_WholePlanner())
    return step


class _WholePlanner(DefaultLoadPlanner):
    """DCP's own, which leaves out in silence what the state has no place for."""

    def create_global_plan(self, global_plan: Any) -> Any:  # noqa: ANN401 - DCP's own classes
        paths = self.metadata.planner_data
        if isinstance(paths, dict):
            loaded = {item.dest_index.fqn for plan in global_plan for item in plan.items}
            given = {path[0] for name, path in paths.items() if name in loaded} | {*self.original_state_dict}
            kept = self.metadata.state_dict_metadata
            left = [name for name, path in paths.items() if name not in loaded and path[0] in given]
            left = [name for name in left if math.prod(getattr(kept[name], "size", ())) > 0]  # an empty one is not read
            if left:
                msg = (
                    f"the state has no place for these parts of the checkpoint: {named(left)}"
                    " (get_state_dict of torch.distributed.checkpoint.state_dict makes an optimizer's moments first)"
                )
                raise SealError(msg)
        return super().create_global_plan(global_plan)


def _from_coordinator(make: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever it makes
    """What the first rank makes of it, on every rank; its error is one of every rank, too."""
    if not (dist.is_available() and dist.is_initialized()):
        return make()
    box: list[Any] = [None, ""]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except (OSError, SealError, StoreError) as raised:  # the others wait for an answer
            error, box[1] = raised, f"{type(raised).__name__}: {raised}"
    device = torch.device("cuda") if dist.get_backend() == "nccl" else None
    dist.broadcast_object_list(box, src=0, device=device)
    if error is not None:
        raise error
    if box[1]:
        msg = f"rank 0 could not go on: {box[1]}"
        raise SealError(msg)
    return box[0]
