"""A disk that does what it is told and writes down what that changes: pages, sizes and names, flushed or not."""

from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from powerguard.trainer.store.disk import Disk

ROOT = 0


@dataclass(frozen=True)
class Page:
    """One write, as far as it touches one page of a file."""

    node: int
    offset: int
    content: bytes


@dataclass(frozen=True)
class Size:
    """A file got this long, by a write or by an allocation."""

    node: int
    size: int


@dataclass(frozen=True)
class Name:
    """A folder's entry now leads to this node; None: it is gone."""

    folder: int
    name: str
    node: int | None


@dataclass(frozen=True)
class Flush:
    """Everything about this file or folder was flushed."""

    node: int


@dataclass(frozen=True)
class Promise:
    """The store has said: this checkpoint is durable (or a newer one is), and there are so many good ones."""

    step: int
    good: int


Change = tuple[Page | Size | Name | Flush | Promise, ...]


class RecordingDisk(Disk):
    """Records every change of what lies under a root. Nodes have numbers of our own: the system uses its again.

    forgets: a kind of flush (see `kind_of`) that is not done, and not recorded.
    """

    def __init__(self, root: Path, forgets: str = "") -> None:
        self.changes: list[Change] = []
        self.kinds: set[str] = set()
        self.is_folder = {ROOT: True}
        self._root = root
        self._forgets = forgets
        self._names: dict[int, dict[str, int]] = {ROOT: {}}
        self._sizes: dict[int, int] = {}
        self._open: dict[int, tuple[int, str]] = {}
        self._lock = RLock()

    def promise(self, step: int, good: int) -> None:
        self.changes.append((Promise(step, good),))

    def make_folder(self, path: Path) -> None:
        with self._lock:
            super().make_folder(path)
            self._new(path, folder=True)

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        with self._lock:
            descriptor = super().open(path, create=create, direct=direct)
            if create:
                self._new(path, folder=False)
            self._open[descriptor] = (self._node(path), path.name)
            return descriptor

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        with self._lock:
            super().allocate(descriptor, size_bytes)
            self._grow(self._open[descriptor][0], size_bytes)

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        with self._lock:
            done = super().write(descriptor, content, offset)
            node = self._open[descriptor][0]
            starts = range(0, done, 4096)
            pages = [Page(node, offset + start, bytes(content[start : min(start + 4096, done)])) for start in starts]
            self.changes.append(tuple(pages))
            self._grow(node, offset + done)
            return done

    def sync(self, descriptor: int) -> None:
        with self._lock:
            node, name = self._open[descriptor]
            self._flush(node, "manifest" if name.startswith("MANIFEST") else "shard")

    def sync_folder(self, path: Path) -> None:
        with self._lock:
            self._flush(self._node(path), self.kind_of(path))

    def rename(self, old: Path, new: Path) -> None:
        with self._lock:
            node = self._node(old)
            super().rename(old, new)
            gone, there = self._node(old.parent), self._node(new.parent)
            del self._names[gone][old.name]
            self._names[there][new.name] = node
            self.changes.append((Name(gone, old.name, None), Name(there, new.name, node)))

    def unlink(self, path: Path) -> None:
        with self._lock:
            super().unlink(path)
            self._forget(path)

    def remove_folder(self, path: Path) -> None:
        with self._lock:
            super().remove_folder(path)
            self._forget(path)

    def kind_of(self, path: Path) -> str:
        """What kind of folder a flush is of: the root, one being written, or one whose manifest just went."""
        if path == self._root:
            return "root"
        names = self._names[self._node(path)]
        was_manifest = self.changes and any(
            isinstance(change, Name) and change.name == "MANIFEST.json" and change.node is None
            for change in self.changes[-1]
        )
        if was_manifest:
            return "folder that lost its manifest"
        return "folder with its manifest" if "MANIFEST.json" in names else "folder"

    def _flush(self, node: int, kind: str) -> None:
        self.kinds.add(kind)
        if kind != self._forgets:
            self.changes.append((Flush(node),))

    def _new(self, path: Path, *, folder: bool) -> None:
        node = len(self.is_folder)
        self.is_folder[node] = folder
        self._names[node] = {}
        self._sizes[node] = 0
        parent = self._node(path.parent)
        self._names[parent][path.name] = node
        self.changes.append((Name(parent, path.name, node),))

    def _forget(self, path: Path) -> None:
        parent = self._node(path.parent)
        del self._names[parent][path.name]
        self.changes.append((Name(parent, path.name, None),))

    def _grow(self, node: int, size: int) -> None:
        if size > self._sizes[node]:
            self._sizes[node] = size
            self.changes.append((Size(node, size),))

    def _node(self, path: Path) -> int:
        node = ROOT
        for name in path.relative_to(self._root).parts:
            node = self._names[node][name]
        return node
