"""Child process: wait for a checkpoint newer than a moment, then print it as JSON.

    python -m powerguard.effectors.trainer.newest_child DIR                              # prints the newest stamp there
    python -m powerguard.effectors.trainer.newest_child DIR SINCE_NS LIMIT_S QUIET_S     # waits for what is newer

A separate process, because the folder may lie on a file system that hangs. Exit codes: 0 found, 1 none in time,
2 the folder cannot be read, 3 none in time, but new files are still changing.
SINCE_NS is a stamp of the same folder, taken before the request: the clock of a file server may differ from ours.

What counts: a manifest or a seal whose names and sizes hold (verified: true). In a folder that has neither, a file or
folder that changed since, once no such file in the folder has changed for QUIET_S (verified: false). Logs and small
text files do not count, and their growth does not delay a checkpoint.
"""

import codecs
import contextlib
import errno
import itertools
import json
import os
import re
import stat
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from powerguard.trainer.seal.folder import glance
from powerguard.trainer.seal.manifest import SEAL, SealError, step_in
from powerguard.trainer.store.disk import is_gone
from powerguard.trainer.store.folders import Found, look, newest_in
from powerguard.trainer.store.manifest import MANIFEST, step_of

_GROWING: Final = 3
_EVERY_S: Final = 0.2
_MOST: Final = 20_000
_SMALL_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 4096
_MOST_HEADER_BYTES: Final = 100_000_000
"""The safetensors library refuses a longer header."""
_CONTROL: Final = bytes(set(range(32)) - set(b"\t\n\r\f\b\x1b"))
_SAVED: Final = (
    *(".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp", ".npz", ".npy", ".h5", ".hdf5", ".keras", ".pkl"),
    *(".msgpack", ".tar"),
)
_SHOWN: Final = (
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf", ".mp4", ".avi", ".mov", ".wav", ".mp3", ".flac", ".parquet"),
)
_LOG: Final = re.compile(
    r"(?:^|[^a-z])(?:logs?|out|err|stdout|stderr|csv|tsv|jsonl|tfevents|wandb|lock|db)(?:[^a-z]|$)"
)
_UNBORN: Final = re.compile(r"(?:^|[^a-z])(?:tmp|incomplete)(?:[^a-z]|$)|\.(?:temp|part|partial|dirty)$|~$")
_OVERWRITTEN: Final = re.compile(r"(?:^|[^a-z])(?:last|latest|emergency|interrupt(?:ed)?)(?:[^a-z]|$)")
"""Names that trainings overwrite, in addition to those of their steps."""
_PART: Final = re.compile(r"^(?P<before>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<after>\..*)$")
"""One file of a model in parts, as Transformers names them: `model-00001-of-00002.safetensors`."""
_MOST_PARTS: Final = 10_000
_DCP_INDEX: Final = ".metadata"
"""The file that torch.distributed.checkpoint writes last, after its `.distcp` files."""
_USUAL: Final = re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt|model|last|latest|emergency|interrupt(?:ed)?)(?:[^a-z]|$)")


@dataclass(frozen=True, slots=True)
class AppearedCheckpoint:
    """A checkpoint that appeared. changed_ns: when it last changed, as the file system stamps it."""

    step: int | None
    path: str
    size_bytes: int
    verified: bool
    changed_ns: int

    def to_json(self) -> str:
        """Return what the daemon reads."""
        fields = {"step": self.step, "path": self.path, "size_bytes": self.size_bytes, "verified": self.verified}
        return json.dumps(fields)


@dataclass(frozen=True, slots=True)
class _Mark:
    """One file as it was at one look. blocks: what is allocated, which grows in a file of preset size.

    top: the name in the watched folder that it has, or lies below.
    """

    top: str
    path: str
    size: int
    blocks: int
    changed_ns: int


def main(argv: list[str]) -> int:
    """Look until found or out of time; or once, for the newest stamp."""
    try:
        return _stamp(Path(argv[0])) if len(argv) == 1 else _wait(Path(argv[0]), int(argv[1]), *map(float, argv[2:]))
    except OSError as error:
        sys.stderr.write(error.strerror or str(error))
        return 2


def _stamp(folder: Path) -> int:
    """Print the newest stamp: of manifests and seals alone, where checkpoints here get one.

    Any other file may have a stamp of the future, and a new seal would never be newer.
    """
    marks = list(_marks(folder))
    if folder.is_dir() and _is_vouched_for(folder):
        marks = [mark for mark in marks if Path(mark.path).name in (MANIFEST, SEAL)] or marks
    sys.stdout.write(str(max((mark.changed_ns for mark in marks), default=0)))
    return 0


def _wait(folder: Path, since_ns: int, limit_s: float, quiet_s: float) -> int:
    watch = _Watch(folder, since_ns=since_ns, quiet_s=quiet_s)
    ends_s = time.perf_counter() + limit_s
    while True:
        now_s = time.perf_counter()
        found = watch.look(now_s)
        if found is not None:
            sys.stdout.write(found.to_json())
            return 0
        if now_s >= ends_s:
            return _GROWING if watch.is_growing(now_s) else 1
        time.sleep(_EVERY_S)


class _Watch:
    """Changes of a folder since the first look."""

    def __init__(self, folder: Path, *, since_ns: int, quiet_s: float) -> None:
        self._folder = folder
        self._since_ns = since_ns
        self._quiet_s = quiet_s
        self._first: frozenset[_Mark] | None = None
        self._vouched: set[tuple[int, int]] | None = None
        self._fresh: frozenset[_Mark] = frozenset()
        self._quiet_since_s = 0.0

    def look(self, now_s: float) -> AppearedCheckpoint | None:
        """Return the checkpoint; None while there is none. A file that vanishes meanwhile is checked again."""
        try:
            if not self._folder.is_dir():
                return None
            verified = self._verified()
            if verified is not None or _is_vouched_for(self._folder):
                return verified
            return self._plain(now_s)
        except OSError as error:
            if not is_gone(error):
                raise
            return None

    def is_growing(self, now_s: float) -> bool:
        """Whether files that changed since have not been quiet for long enough."""
        return bool(self._fresh) and now_s - self._quiet_since_s < self._quiet_s

    def _verified(self) -> AppearedCheckpoint | None:
        """Return the newest checkpoint with a manifest or a seal that was written since and holds. Raises OSError.

        One that is written during the watch is new, whatever its stamp: clocks may be set back.
        """
        stamps = _vouched(self._folder)
        if self._vouched is None:
            self._vouched = set(stamps.values())
        new = {path: at for path, at in stamps.items() if at[1] > self._since_ns or at not in self._vouched}
        found = [each for path, (_, changed_ns) in new.items() if (each := _whole(path, changed_ns)) is not None]
        return max(found, key=lambda each: each.changed_ns, default=None)

    def _plain(self, now_s: float) -> AppearedCheckpoint | None:
        marks = frozenset(_marks(self._folder))
        if self._first is None:
            self._first, self._quiet_since_s = marks, now_s
        # A file that changes during the watch is new, whatever its stamp: clocks may be set back.
        changed = (mark for mark in marks if mark.changed_ns > self._since_ns or mark not in self._first)
        fresh = frozenset(mark for mark in changed if not _is_log(mark))
        if fresh != self._fresh:
            self._fresh, self._quiet_since_s = fresh, now_s
        if now_s - self._quiet_since_s < self._quiet_s:
            return None
        found = _likeliest(self._folder, marks, fresh)
        if found is None:
            return None
        top = Path(found.path).name
        paths = [Path(mark.path) for mark in marks if mark.top == top]
        written = [Path(mark.path) for mark in fresh if mark.top == top]
        unfinished = any(_is_unfinished(mark) for mark in fresh if mark.top == top)
        return None if unfinished or _lacks_a_part(paths, written) else found


def newest_file(folder: Path) -> AppearedCheckpoint | None:
    """Return the newest checkpoint that is one file; None: there is none, or those here get a manifest or a seal.

    Raises OSError.
    """
    if _is_vouched_for(folder):
        return None
    marks = frozenset(_marks(folder, deep=False))
    return _likeliest(folder, marks, frozenset(mark for mark in marks if not _is_log(mark)))


def _vouched(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the manifests and seals of this folder and of those in it: inode, which a new name keeps, and stamp.

    Raises OSError.
    """
    stamps = {}
    for path in (folder, *(each for each in folder.iterdir() if each.is_dir() and not each.is_symlink())):
        for name in (SEAL, MANIFEST) if step_of(path.name) is not None else (SEAL,):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                found = (path / name).stat()
                stamps[path / name] = (found.st_ino, found.st_mtime_ns)
    return stamps


def _whole(path: Path, changed_ns: int) -> AppearedCheckpoint | None:
    """Return the checkpoint of this manifest or seal; None if names and sizes do not hold."""
    if path.name == MANIFEST:
        for found in look(path.parent.parent, among=[path.parent]):
            if isinstance(found, Found):
                return AppearedCheckpoint(found.step, found.path, found.manifest.size_bytes, True, changed_ns)
        return None
    with contextlib.suppress(OSError, SealError):
        verdict = glance(path.parent)
        if verdict is not None and verdict.is_whole:
            return AppearedCheckpoint(verdict.seal.step, str(path.parent), verdict.seal.size_bytes, True, changed_ns)
    return None


def _is_vouched_for(folder: Path) -> bool:
    """Whether checkpoints here get a manifest or a seal: then one without is not finished."""
    return newest_in(folder) is not None or (folder / SEAL).exists() or any(folder.glob(f"*/{SEAL}"))


def _likeliest(folder: Path, marks: frozenset[_Mark], fresh: frozenset[_Mark]) -> AppearedCheckpoint | None:
    """Return the newest of the files and folders here that changed since and hold data; None: there is none.

    In a folder in which any file is named by a step, only such names and overwritten ones (`last.ckpt`) count.
    In any other folder the usual names count, if there are any.
    """
    tops = {mark.top for mark in marks if step_of(mark.top) is None and not _is_log(mark)}
    highest = max(map(_rank, tops), default=0)
    found = []
    for top in tops:
        changed = [mark for mark in fresh if mark.top == top and mark.size > 0]
        may_count = _rank(top) == highest or _OVERWRITTEN.search(top.lower()) is not None
        if changed and may_count and not top.startswith(".") and not _UNBORN.search(top.lower()):
            size = sum(mark.size for mark in marks if mark.top == top)
            changed_ns = max(mark.changed_ns for mark in changed)
            found.append(AppearedCheckpoint(step_in(Path(top).stem), str(folder / top), size, False, changed_ns))
    return max(found, key=lambda each: each.changed_ns, default=None)


def _rank(name: str) -> int:
    return 2 if step_in(Path(name).stem) is not None else 1 if _USUAL.search(name.lower()) else 0


def _is_log(mark: _Mark) -> bool:
    """Whether a file is a log, a picture or a sound, by its name; or a text, unless it is large and named as a model.

    An empty file passes for a text.
    """
    path = Path(mark.path)
    name = path.name.lower()
    if name.endswith(_SAVED):
        return False
    if name.endswith(_SHOWN) or _LOG.search(name) is not None:
        return True
    return (mark.size < _SMALL_BYTES or _rank(mark.top) == 0) and _is_text(path)


def _is_text(path: Path) -> bool:
    with contextlib.suppress(OSError, UnicodeDecodeError), path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
        return not any(byte in _CONTROL for byte in head)
    return False


def _lacks_a_part(files: list[Path], written: list[Path]) -> bool:
    """Whether the newest files are a part of a checkpoint, of which another part is not there yet.

    files: all of the checkpoint; written: those that changed since. An index of the save before does not count.
    """
    indexed = {path.parent for path in written if path.name == _DCP_INDEX}
    if any(path.suffix == ".distcp" and path.parent not in indexed for path in written):
        return True
    return any(not set(_parts(path)) <= set(files) for path in written)


def _parts(path: Path) -> Iterator[Path]:
    """Yield all files of the model that this file is a part of; none if its name does not show it."""
    found = _PART.match(path.name)
    if found is not None and int(found["parts"]) <= _MOST_PARTS:
        for part in range(1, int(found["parts"]) + 1):
            yield path.with_name(f"{found['before']}-{part:05}-of-{found['parts']}{found['after']}")


def _is_unfinished(mark: _Mark) -> bool:
    """Whether a quiet file is incomplete: a temporary name, or a missing end.

    torch.save and numpy write zips, whose directory comes last; a `.safetensors` begins with where its tensors end; a
    file of preset size ends in a hole until then.
    """
    path = Path(mark.path)
    if _UNBORN.search(path.name.lower()):
        return True
    with contextlib.suppress(OSError), path.open("rb") as file:
        if path.suffix == ".safetensors" and mark.size < _safetensors_bytes(file):
            return True
        file.seek(0)
        if file.read(4) == b"PK\3\4" and not zipfile.is_zipfile(file):
            return True
        try:
            os.lseek(file.fileno(), max(0, mark.size - 1), os.SEEK_DATA)
        except OSError as error:
            return error.errno == errno.ENXIO and mark.size > 0
    return False


def _safetensors_bytes(file: BinaryIO) -> int:
    """Return how long the file will be, by its header; 0 if it has none.

    Eight bytes (little-endian) are the size of a JSON header, which has begin and end of each tensor, counted from the
    end of the header. Source: the format's description in the safetensors README.
    """
    first = file.read(8)
    size = int.from_bytes(first, "little")
    if len(first) < 8 or size > _MOST_HEADER_BYTES:
        return 8 if len(first) < 8 else 0
    head = file.read(size)
    if len(head) < size:
        return 8 + size
    with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        tensors = [tensor for name, tensor in json.loads(head).items() if name != "__metadata__"]
        return 8 + size + max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    return 0


def _marks(folder: Path, *, deep: bool = True) -> Iterator[_Mark]:
    """Yield every regular file in a folder, and below it if deep, as it is now; none if there is no such folder."""
    for top in folder.iterdir() if folder.is_dir() else ():
        for path in itertools.islice(_files(top), _MOST) if deep else (top,):
            with contextlib.suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    yield _Mark(top.name, str(path), found.st_size, found.st_blocks, found.st_mtime_ns)


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir() and not path.is_symlink():
        for above, _, names in os.walk(path):
            yield from (Path(above) / name for name in names)
    else:
        yield path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
