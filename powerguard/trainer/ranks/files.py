"""Ranks over a folder that all of them can write: one file for each key. For hosts that share nothing else.

What it stands on holds on NFS too: a name comes into being whole, by rename(2) or link(2), and link fails when there is
one already, on the server. No lock is used, because a lock of a host that lost its power is nobody's to lift. What an
NFS client may do is look away: it remembers for a while (`acdirmax`, up to 60 s) that a name does not exist, unless it
has changed that folder itself. So whoever waits touches the folder now and then, where the file system is no local one.

Files of an earlier run are told apart by a handshake: each rank leaves a fresh word, rank 0 answers with all the words
and the name of this run's folder, and a rank believes only an answer that has its own word in it.
"""

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final, Self

from powerguard.trainer.locks import FolderLock
from powerguard.trainer.ranks.base import Place, RanksError, boottime_s, meet

_LOOK_S: Final = (0.0003, 0.01)  # from often to seldom; the latter is what an idle rank costs: 100 stats a second
_REMOTE_LOOK_S: Final = (0.01, 0.1)
_TOUCH_S: Final = 1.0
_ANSWER: Final = "run.json"
_LEAD: Final = ".lead"
_LOCAL: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs"})


class FileRanks(Place):
    """One rank's way to a folder that all ranks of one job share, and no other job.

    folder: made if need be, mode 0700. join_s: how long to wait for all ranks to come. Raises RanksError.
    """

    may_hang = True

    def __init__(self, folder: Path | str, rank: int, size: int, *, join_s: float = 300.0) -> None:
        super().__init__(rank, size)
        self._mark = f"{rank}.{secrets.token_hex(4)}"
        self._serial = count()
        folder = Path(folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._look_s = _LOOK_S if _file_system(folder) in _LOCAL else _REMOTE_LOOK_S
            self._run, self._lead = _joined(folder, self, boottime_s() + join_s, self._look_s)
        except OSError as error:
            raise RanksError(_unusable(folder, error)) from error
        super().__init__(rank, size, meet(self, rank, size, join_s))

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        with self._telling(path):
            self._unborn(value).rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        path = self._path(key)
        until_s = boottime_s() + timeout_s
        look_s, most_s = self._look_s
        touched_s = boottime_s()
        while True:
            with self._telling(path), contextlib.suppress(FileNotFoundError):
                return path.read_bytes()
            now_s = boottime_s()
            if now_s >= until_s:
                raise TimeoutError(key)
            if self._look_s is _REMOTE_LOOK_S and now_s - touched_s >= _TOUCH_S:
                touched_s = now_s
                with self._telling(path):
                    self._unborn(b"").unlink()
            time.sleep(min(look_s, until_s - now_s))
            look_s = min(1.5 * look_s, most_s)

    def check(self, key: str) -> bool:
        path = self._path(key)
        with self._telling(path):
            try:
                path.stat()
            except FileNotFoundError:
                return False
        return True

    def claim(self, key: str, value: bytes) -> bytes:
        path = self._path(key)
        with self._telling(path):
            unborn = self._unborn(value)
            try:
                # Over NFS the answer to a link may be lost although it was made: what lies there decides.
                with contextlib.suppress(FileExistsError):
                    path.hardlink_to(unborn)
                return path.read_bytes()
            finally:
                unborn.unlink(missing_ok=True)

    def add(self, key: str, amount: int) -> int:
        """As the protocol has it: each addition claims the next of a row of files, so the n-th looks at n of them."""
        value = f"{amount}/{self._word()}".encode("ascii")
        total = 0
        for at in count():
            name = f"{key}/{at}"
            try:
                got = self.get(name, 0.0)
            except TimeoutError:
                got = self.claim(name, value)
            total += int(got.partition(b"/")[0])
            if got == value:
                break
        return total

    def delete(self, key: str) -> None:
        with self._telling(self._path(key)):
            if not key.endswith("#"):
                self._path(key).unlink(missing_ok=True)
                return
            for at in count():
                try:
                    self._path(f"{key}/{at}").unlink()
                except FileNotFoundError:
                    return

    def clone(self) -> Self:
        return self

    def close(self) -> None:
        pass

    def _path(self, key: str) -> Path:
        return self._run / key.replace("/", "!")

    def _unborn(self, value: bytes) -> Path:
        path = self._run / f".{self._word()}"
        path.write_bytes(value)
        return path

    def _word(self) -> str:
        return f"{self._mark}.{next(self._serial)}"

    @contextlib.contextmanager
    def _telling(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RanksError(_unusable(path.parent, error)) from error


def _joined(folder: Path, place: Place, until_s: float, look_s: tuple[float, float]) -> tuple[Path, FolderLock | None]:
    """Find this run's folder, with all others of this run and nobody else. The lock is rank 0's, while it lives."""
    word = secrets.token_hex(8)
    _write(folder / f"hello-{place.rank}.json", {"word": word})
    if place.rank:
        return folder / _follow(folder, place, word, until_s, look_s), None
    run, lock = _made(folder)
    return folder / _lead(folder, run, place.size, until_s, look_s), lock


def _made(folder: Path) -> tuple[str, FolderLock]:
    """As rank 0: make the folder of this run, and remove those of earlier ones, but none where a rank 0 still lives.

    The same job started twice by mistake must not take the ground from under the first. A lock that nobody can lift,
    of a host without power over NFS, keeps a folder of small files, and nothing else.
    """
    for old in folder.glob("run-*"):
        with contextlib.suppress(OSError), FolderLock(old / _LEAD, create=True):
            shutil.rmtree(old, ignore_errors=True)
    run = f"run-{secrets.token_hex(8)}"
    (folder / run).mkdir(mode=0o700)
    return run, FolderLock(folder / run / _LEAD, create=True)


def _lead(folder: Path, run: str, size: int, until_s: float, look_s: tuple[float, float]) -> str:
    """As rank 0: answer everybody's word until everybody is in the folder of this run."""
    missing = set(range(1, size))
    told: dict[str, object] = {}
    while missing:
        words = {str(rank): _read(folder / f"hello-{rank}.json").get("word", "") for rank in missing}
        if words.items() - told.items() and (folder / run).is_dir():
            told |= words
            _write(folder / _ANSWER, {"run": run, "size": size, "words": told})
        missing = {rank for rank in missing if not (folder / run / f"in-{rank}").exists()}
        if missing and boottime_s() >= until_s:
            shown = ", ".join(str(rank) for rank in sorted(missing)[:8])
            msg = f"{folder}: {len(missing)} ranks have not come: {shown} (did they start, and see this folder?)"
            raise RanksError(msg)
        time.sleep(look_s[1])
    return run


def _follow(folder: Path, place: Place, word: str, until_s: float, look_s: tuple[float, float]) -> str:
    """As another rank: believe only an answer that has our own word of this start in it."""
    rank, size = place.rank, place.size
    while True:
        answer = _read(folder / _ANSWER)
        run, words = answer.get("run"), answer.get("words")
        if isinstance(words, dict) and words.get(str(rank)) == word and isinstance(run, str) and "/" not in run:
            if answer.get("size") != size:
                msg = f"{folder}: rank 0 counts {answer.get('size')} ranks, and rank {rank} counts {size}"
                raise RanksError(msg)
            (folder / run / f"in-{rank}").touch()
            return run
        if boottime_s() >= until_s:
            msg = f"{folder}: rank 0 has not answered (did it start, and does it see this folder?)"
            raise RanksError(msg)
        time.sleep(look_s[1])
        _write(folder / f"hello-{rank}.json", {"word": word})  # also refreshes what an NFS client believes to be there


def _write(path: Path, value: dict[str, object]) -> None:
    unborn = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    unborn.write_text(json.dumps(value), encoding="ascii")
    unborn.rename(path)


def _read(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _file_system(folder: Path) -> str:
    """Name the type of the file system (proc(5), mountinfo); "" where it cannot be told."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    here, found, length = folder.resolve(), "", -1
    for line in lines:
        fields = line.split(" ")
        point = fields[4].replace("\\040", " ")
        if here.is_relative_to(point) and len(point) >= length:
            found, length = fields[fields.index("-") + 1], len(point)
    return found


def _unusable(folder: Path, error: OSError) -> str:
    return f"{folder}: the ranks cannot meet in this folder: {error.strerror or error} (it must be shared and writable)"
