"""Puts pieces in place below a root and takes them away again: whole or not at all, and never over what is not ours."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from powerguard.cli.install.pieces import LIBRARY, Piece

MANIFEST: Final = f"{LIBRARY}/installed.json"
"""In a folder of root's: whoever could write it could have root remove any file."""

Found = Literal["same", "absent", "ours", "mode", "foreign", "disabled"]


class PlaceError(Exception):
    """A place that is not what it must be: what, where, and what would be right."""


@dataclass
class Manifest:
    """What was put in place. files: path and every mark that it may have there (two while it is being replaced).

    is_whole: the newest run has ended. folders: those that were made for it, the outer ones first.
    """

    prefix: str = ""
    parts: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    files: dict[str, list[str]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    is_whole: bool = True


class Look(NamedTuple):
    """What lies where a piece belongs. foreign: not ours, or changed since; disabled: a link that was removed."""

    piece: Piece
    found: Found
    why: str = ""


class Disk:
    """A system: the running one (root /) or an image. Raises PlaceError, and OSError where the disk fails."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.manifest = Manifest()
        self._changed: set[Path] = set()
        """Folders whose entries are not durable yet."""

    def place(self, path: str) -> Path:
        """Return where an absolute path of that system lies, with no link in it that leads out of the root."""
        where = self.root / path.lstrip("/")
        folder = Path(os.path.realpath(where.parent))
        if not folder.is_relative_to(self.root):
            msg = f"{where.parent}: leads out of {self.root}"
            raise PlaceError(msg)
        return folder / where.name

    # --- The manifest ------------------------------------------------------------------------------------------

    def load(self) -> bool:
        """Read the manifest; False where there is none."""
        path = self.place(MANIFEST)
        try:
            told = json.loads(path.read_bytes())
            self.manifest = Manifest(
                prefix=str(told["prefix"]),
                parts=_strings(told["parts"]),
                choices=_strings(told["choices"]),
                files={_path(name): _strings(marks) for name, marks in told["files"].items()},
                folders=[_path(each) for each in told["folders"]],
                is_whole=told["is_whole"] is True,
            )
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"{path}: is not what powerguard install has written: move it away and install again (--force)"
            raise PlaceError(msg) from error
        return True

    def save(self) -> None:
        """Write the manifest, whole and durable."""
        self._folders(MANIFEST)
        told = {"schema_version": 1, **vars(self.manifest)}
        path = self.place(MANIFEST)
        _write(path, (json.dumps(told, indent=1) + "\n").encode(), 0o644)
        _sync(path.parent)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep a second install or uninstall of the same system out."""
        self._folders(MANIFEST)
        descriptor = os.open(self.place(MANIFEST).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            msg = "another powerguard install or uninstall is at work: let it end"
            raise PlaceError(msg) from None
        finally:
            os.close(descriptor)

    # --- Looking -----------------------------------------------------------------------------------------------

    def look(self, piece: Piece) -> Look:
        """See what lies where a piece belongs."""
        path, known = self.place(piece.path), self.manifest.files.get(piece.path, [])
        try:
            mark = mark_of(path)
        except FileNotFoundError:
            if piece.link and known and self.manifest.is_whole:
                return Look(piece, "disabled", "was removed since: left so (--force puts it back)")
            return Look(piece, "absent")
        if mark == wanted(piece):
            is_right = piece.link or stat.S_IMODE(path.lstat().st_mode) == piece.mode
            return Look(piece, "same" if is_right else "mode")
        if mark in known:
            return Look(piece, "ours")
        if mark == "folder":
            msg = f"{path}: is a folder, and a file belongs there"
            raise PlaceError(msg)
        because = "was changed since it was put there" if known else "was there before, and is not ours"
        if mark == "link:/dev/null":
            because = "is masked"
        return Look(piece, "foreign", because)

    # --- Putting in place --------------------------------------------------------------------------------------

    def begin(self, pieces: Iterable[Piece]) -> None:
        """Write down what is going to be put in place, beside what still lies there: a run that is killed can go on."""
        for piece in pieces:
            self._note_folders(piece.path)
            _half(self.place(piece.path)).unlink(missing_ok=True)
            marks = self.manifest.files.setdefault(piece.path, [])
            if wanted(piece) not in marks:
                marks.append(wanted(piece))
            if piece.is_choice and piece.path not in self.manifest.choices:
                self.manifest.choices.append(piece.path)
        self.manifest.is_whole = False
        self.save()

    def others(self, pieces: Iterable[Piece], *, dry_run: bool) -> list[tuple[str, str]]:
        """Go through what lies there of earlier runs and is not among pieces: (path, what became of it).

        What was asked for by name stays. The rest was part of an older powerguard, and goes.
        """
        told: list[tuple[str, str]] = []
        now = {piece.path for piece in pieces}
        for path in [each for each in self.manifest.files if each not in now]:
            is_choice = path in self.manifest.choices
            found = self.state_of(path)
            if found == "same" and is_choice:
                told.append((path, "unchanged"))
                continue
            if found == "same":
                told.append((path, "would be removed" if dry_run else "removed"))
            elif found == "changed":
                told.append((path, "left, and not ours any more: was changed since"))
            if not dry_run:
                self.take_away(path)
                self.forget(path)
        return told

    def end(self, pieces: Iterable[Piece]) -> None:
        """Write down that all of it lies there."""
        for piece in pieces:
            if piece.path in self.manifest.files:
                self.manifest.files[piece.path] = [wanted(piece)]
        self.settle()
        self.manifest.is_whole = True
        self.save()

    def settle(self) -> None:
        """Make durable what was put in place or taken away; before the manifest says so."""
        for folder in self._changed:
            if folder.is_dir():
                _sync(folder)
        self._changed.clear()

    def put(self, piece: Piece) -> None:
        """Put one piece in place, whole, over whatever lies there."""
        self._folders(piece.path)
        path = self.place(piece.path)
        self._changed.add(path.parent)
        if not piece.link:
            _write(path, piece.content, piece.mode)
            return
        made = _half(path)
        made.unlink(missing_ok=True)
        made.symlink_to(piece.link)
        made.replace(path)

    def state_of(self, path: str) -> Literal["same", "gone", "changed"]:
        """Say what became of a path of the manifest."""
        try:
            mark = mark_of(self.place(path))
        except (FileNotFoundError, NotADirectoryError):
            return "gone"
        return "same" if mark in self.manifest.files[path] else "changed"

    def take_away(self, path: str) -> None:
        """Remove a path of the manifest, if it is as it was put there, and what a killed run has left beside it."""
        _half(self.place(path)).unlink(missing_ok=True)
        if self.state_of(path) == "same":
            where = self.place(path)
            where.unlink()
            self._changed.add(where.parent)

    def forget(self, path: str) -> None:
        """Take a path out of the manifest; it is not written yet."""
        del self.manifest.files[path]
        if path in self.manifest.choices:
            self.manifest.choices.remove(path)

    def take_folders_away(self) -> list[str]:
        """Remove the folders that were made and are empty now, the inner ones first; return them."""
        gone: list[str] = []
        for path in reversed(self.manifest.folders):
            try:
                self.place(path).rmdir()
                gone.append(path)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.ENOENT, errno.ENOTDIR}:
                    raise
        return gone

    def _folders(self, path: str) -> None:
        """Make the folders of a path, and remember which."""
        self._note_folders(path)
        for each in _parents(path):
            where = self.place(each)
            with contextlib.suppress(FileExistsError):
                where.mkdir(mode=0o755)
                where.chmod(0o755)  # whatever the umask is
                self._changed.add(where.parent)

    def _note_folders(self, path: str) -> None:
        """Remember the folders of a path that are still to be made."""
        for each in _parents(path):
            if each not in self.manifest.folders and not self.place(each).exists():
                self.manifest.folders.append(each)


def wanted(piece: Piece) -> str:
    """Return the mark that a piece has once it is in place."""
    return f"link:{piece.link}" if piece.link else f"sha256:{hashlib.sha256(piece.content).hexdigest()}"


def mark_of(path: Path) -> str:
    """Return by what something on disk is known: a file's digest, a link's target. Raises FileNotFoundError."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link:{path.readlink()}"
    if stat.S_ISREG(mode):
        return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    return "folder" if stat.S_ISDIR(mode) else "special"


def _parents(path: str) -> list[str]:
    """Return the folders that a path lies in, the outer ones first, without the root."""
    return [str(each) for each in reversed(Path(path).parents)][1:]


def _half(path: Path) -> Path:
    """Where a piece is made before it is moved to its place: hidden, so that nobody takes it for a unit or a hook."""
    return path.with_name(f".{path.name}.powerguard-new")


def _write(path: Path, content: bytes, mode: int) -> None:
    made = _half(path)
    made.unlink(missing_ok=True)
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    made.replace(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _strings(value: Any) -> list[str]:  # noqa: ANN401 - read from a file
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError
    return value


def _path(value: str) -> str:
    """Return a path of the manifest: absolute, with nothing in it that leads elsewhere. Raises ValueError."""
    if not value.startswith(("/etc/", "/usr/")) and value not in {"/etc", "/usr"}:
        raise ValueError
    if os.path.normpath(value) != value:
        raise ValueError
    return value
