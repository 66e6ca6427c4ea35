"""Puts pieces in place below a root and removes them again: completely or not at all, never over foreign files."""

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

from powerguard.cli.install.pieces import LIBRARY, InstalledFile

MANIFEST: Final = f"{LIBRARY}/installed.json"
"""In a folder of root's: a user who could write it could make root remove any file."""

Found = Literal["same", "absent", "ours", "mode", "foreign", "disabled"]


class PlaceError(Exception):
    """An unsuitable place: what, where, and the fix."""


@dataclass
class Manifest:
    """The installed files. files: path and every mark that it may have there (two while it is being replaced).

    is_whole: the newest run has ended. folders: those that were made for it, the outer ones first.
    """

    prefix: str = ""
    parts: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    files: dict[str, list[str]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    is_whole: bool = True


class Look(NamedTuple):
    """The present state of a piece's place.

    mode: another mode or owner; foreign: not ours, or changed since; disabled: a link that was removed.
    """

    piece: InstalledFile
    found: Found
    why: str = ""


class Disk:
    """A system: the running one (root /) or an image. Raises PlaceError, and OSError if the disk fails."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.manifest = Manifest()
        self._loaded: bytes | None = None
        """The manifest's text when it was read; None if there was none."""
        self._changed: set[Path] = set()
        """Folders whose entries are not durable yet."""

    def place(self, path: str) -> Path:
        """Return the place of an absolute path of that system; no link in it may lead out of the root."""
        where = self.root / path.lstrip("/")
        folder = Path(os.path.realpath(where.parent))
        if not folder.is_relative_to(self.root):
            msg = f"{where.parent}: leads out of {self.root}"
            raise PlaceError(msg)
        return folder / where.name

    # --- The manifest ------------------------------------------------------------------------------------------

    def load(self) -> bool:
        """Read the manifest; False if there is none."""
        path = self.place(MANIFEST)
        try:
            self._loaded = path.read_bytes()
            fields = json.loads(self._loaded)
            self.manifest = Manifest(
                prefix=str(fields["prefix"]),
                parts=_strings(fields["parts"]),
                choices=_strings(fields["choices"]),
                files={_path(name): _strings(marks) for name, marks in fields["files"].items()},
                folders=[_path(each) for each in fields["folders"]],
                is_whole=fields["is_whole"] is True,
            )
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"{path}: powerguard install did not write this content: move it away and install again (--force)"
            raise PlaceError(msg) from error
        return True

    def save(self) -> None:
        """Write the manifest, whole and durable."""
        self._folders(MANIFEST)
        fields = {"schema_version": 1, **vars(self.manifest)}
        path = self.place(MANIFEST)
        _write(path, (json.dumps(fields, indent=1) + "\n").encode(), 0o644)
        _sync(path.parent)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude a second install or uninstall of the same system, also one that has ended since `load`."""
        self._folders(MANIFEST)
        descriptor = os.open(self.place(MANIFEST).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._loaded != _bytes(self.place(MANIFEST)):
                msg = "another powerguard install or uninstall has changed files meanwhile: run this again"
                raise PlaceError(msg)
            yield
        except BlockingIOError:
            msg = "another powerguard install or uninstall is running: wait for its end"
            raise PlaceError(msg) from None
        finally:
            os.close(descriptor)

    # --- Looking -----------------------------------------------------------------------------------------------

    def look(self, piece: InstalledFile) -> Look:
        """Check the place of a piece."""
        path, known = self.place(piece.path), self.manifest.files.get(piece.path, [])
        try:
            mark = mark_of(path)
        except FileNotFoundError:
            if piece.link and known and self.manifest.is_whole:
                return Look(piece, "disabled", "was removed since, and stays so (--force puts it back)")
            return Look(piece, "absent")
        if mark == wanted(piece):
            status, owner = path.lstat(), 0 if self.root == Path("/") else os.geteuid()
            is_right = piece.link or (stat.S_IMODE(status.st_mode), status.st_uid) == (piece.mode, owner)
            return Look(piece, "same" if is_right else "mode")
        if mark in known:
            return Look(piece, "ours")
        if mark == "folder":
            msg = f"{path}: is a folder, but must be a file"
            raise PlaceError(msg)
        because = "was changed since it was installed" if known else "was not installed by powerguard"
        if mark == "link:/dev/null":
            because = "is masked"
        return Look(piece, "foreign", because)

    # --- Putting in place --------------------------------------------------------------------------------------

    def begin(self, pieces: Iterable[InstalledFile]) -> None:
        """Record the new pieces in addition to the present ones, so that a run that is killed can continue."""
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

    def others(self, pieces: Iterable[InstalledFile], *, dry_run: bool) -> list[tuple[str, str]]:
        """Handle files of earlier runs that are not among pieces: (path, what became of it).

        Optional parts stay. The rest belonged to an older powerguard, and is removed.
        """
        results: list[tuple[str, str]] = []
        now = {piece.path for piece in pieces}
        for path in [each for each in self.manifest.files if each not in now]:
            is_choice = path in self.manifest.choices
            found = self.state_of(path)
            if found == "same" and is_choice:
                results.append((path, "unchanged"))
                continue
            if found == "same":
                results.append((path, "would be removed" if dry_run else "removed"))
            elif found == "changed":
                results.append((path, "left, because it was changed since"))
            if not dry_run:
                self.take_away(path)
                self.forget(path)
        return results

    def end(self, pieces: Iterable[InstalledFile]) -> None:
        """Record that all of it is in place."""
        for piece in pieces:
            if piece.path in self.manifest.files:
                self.manifest.files[piece.path] = [wanted(piece)]
        self.settle()
        self.manifest.is_whole = True
        self.save()

    def settle(self) -> None:
        """Make the changes durable, before the manifest records them."""
        for folder in self._changed:
            if folder.is_dir():
                _sync(folder)
        self._changed.clear()

    def put(self, piece: InstalledFile) -> None:
        """Put one piece in place, completely, over the present file."""
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
        """Return the state of a path of the manifest."""
        try:
            mark = mark_of(self.place(path))
        except (FileNotFoundError, NotADirectoryError):
            return "gone"
        return "same" if mark in self.manifest.files[path] else "changed"

    def begin_to_remove(self) -> None:
        """Record that links will go, so that an install after a kill does not take them for ones that a person removed.

        On a full disk they are removed all the same.
        """
        self.manifest.is_whole = False
        with contextlib.suppress(OSError):
            self.save()

    def take_away(self, path: str) -> None:
        """Remove a path of the manifest, if it is unchanged, and temporary files of a killed run."""
        _half(self.place(path)).unlink(missing_ok=True)
        if self.state_of(path) == "same":
            where = self.place(path)
            where.unlink()
            self._changed.add(where.parent)

    def forget(self, path: str) -> None:
        """Remove a path from the manifest, which is not written yet."""
        del self.manifest.files[path]
        if path in self.manifest.choices:
            self.manifest.choices.remove(path)

    def take_folders_away(self) -> None:
        """Remove the folders that were made and are empty now, the inner ones first."""
        for path in reversed(self.manifest.folders):
            try:
                self.place(path).rmdir()
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.ENOENT, errno.ENOTDIR}:
                    raise

    def _folders(self, path: str) -> None:
        """Make the folders of a path, and remember which."""
        self._note_folders(path)
        for each in _parents(path):
            where = self.place(each)
            with contextlib.suppress(FileExistsError):
                where.mkdir(mode=0o755)
                where.chmod(0o755)  # regardless of the umask
                self._changed.add(where.parent)

    def _note_folders(self, path: str) -> None:
        """Remember the folders of a path that are still to be made."""
        for each in _parents(path):
            if each not in self.manifest.folders and not self.place(each).exists():
                self.manifest.folders.append(each)


def wanted(piece: InstalledFile) -> str:
    """Return the mark that a piece has once it is in place."""
    return f"link:{piece.link}" if piece.link else f"sha256:{hashlib.sha256(piece.content).hexdigest()}"


def mark_of(path: Path) -> str:
    """Return the mark of a path on disk: a file's digest, a link's target. Raises FileNotFoundError."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link:{path.readlink()}"
    if stat.S_ISREG(mode):
        return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    return "folder" if stat.S_ISDIR(mode) else "special"


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parents(path: str) -> list[str]:
    """Return the folders that a path lies in, the outer ones first, without the root."""
    return [str(each) for each in reversed(Path(path).parents)][1:]


def _half(path: Path) -> Path:
    """Temporary name of a piece before it is moved to its place: hidden, so that it is not used as a unit or a hook."""
    return path.with_name(f".{path.name}.powerguard-new")


def _write(path: Path, content: bytes, mode: int) -> None:
    made = _half(path)
    made.unlink(missing_ok=True)
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
    except OSError as error:
        made.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
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
    """Return a path of the manifest: absolute, without `..`. Raises ValueError."""
    if not value.startswith(("/etc/", "/usr/")) and value not in {"/etc", "/usr"}:
        raise ValueError
    if os.path.normpath(value) != value:
        raise ValueError
    return value
