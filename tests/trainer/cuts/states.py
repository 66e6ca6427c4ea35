"""Every state that a power cut may leave, for two kinds of file system.

ordered (ext4): names change in the order in which they were changed, each change whole, and a flush of anything flushes
all names. weakest (the letter of POSIX): a flush is of that one file or folder; every other change of a name, also the
two halves of a rename, is there or not, in any combination. On both, each page of each write that was not flushed is
there or not, or half of it is, and so is a file's length; what was never there reads as zeroes.

Of each instant all combinations are tried where they are few, else the extremes and a seeded sample.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.trainer.cuts.recording import ROOT, Change, Flush, Name, Page, Promise, Size

Tree = dict[str, bytes | None]
"""Paths under the root; None for a folder."""

FEW = 5


@dataclass
class Durable:
    """What is flushed for good, and what is not yet."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    contents: dict[int, bytearray] = field(default_factory=dict)
    pending_names: list[tuple[Name, ...]] = field(default_factory=list)
    pending: dict[int, list[Page | Size]] = field(default_factory=dict)

    def add(self, change: Change, *, ordered: bool) -> None:
        """Follow one recorded change."""
        for each in change:
            if isinstance(each, Page | Size):
                self.pending.setdefault(each.node, []).append(each)
            elif isinstance(each, Flush):
                self._flush(each.node, ordered=ordered)
        names = tuple(each for each in change if isinstance(each, Name))
        if names:
            self.pending_names.extend([names] if ordered else [(each,) for each in names])

    def _flush(self, node: int, *, ordered: bool) -> None:
        for change in self.pending.pop(node, []):
            apply(self.contents.setdefault(node, bytearray()), change)
        left = []
        for group in self.pending_names:
            if ordered or all(each.folder == node for each in group):
                for each in group:
                    rename(self.names, each)
            else:
                left.append(group)
        self.pending_names = left


def apply(content: bytearray, change: Page | Size) -> None:
    """Carry one change of a file out; what lies between reads as zeroes."""
    size = change.size if isinstance(change, Size) else change.offset + len(change.content)
    content.extend(bytes(max(size - len(content), 0)))
    if isinstance(change, Page):
        content[change.offset : change.offset + len(change.content)] = change.content


def first_half(change: Page | Size) -> Page | Size:
    """As much of a write as may have reached the disk: whole sectors."""
    if isinstance(change, Size):
        return change
    return Page(change.node, change.offset, change.content[: len(change.content) // 2 & ~511])


def rename(names: dict[int, dict[str, int]], change: Name) -> None:
    """Carry one change of a name out."""
    entries = names.setdefault(change.folder, {})
    if change.node is None:
        entries.pop(change.name, None)
    else:
        entries[change.name] = change.node


def choices(durable: Durable, *, ordered: bool, rng: random.Random, samples: int) -> Iterator[tuple[list[bool], ...]]:
    """Which changes survive: of names, then of data. Extremes first."""
    names = len(durable.pending_names)
    data = sum(len(pending) for pending in durable.pending.values())
    if names + data <= FEW:
        for flags in itertools.product((False, True), repeat=names + data):
            yield list(flags[:names]), list(flags[names:])
        return
    for kept_names, kept_data in itertools.product((False, True), repeat=2):
        yield [kept_names] * names, [kept_data] * data
    for _ in range(samples):
        share = rng.choice((0.1, 0.5, 0.9))
        yield (
            [rng.random() < share for _ in range(names)],
            [rng.random() < share for _ in range(data)],
        )


def state(durable: Durable, kept: tuple[list[bool], ...], *, ordered: bool, torn: random.Random | None) -> Tree:
    """Build what is found after the cut. torn: also tear the pages that survive, now and then."""
    kept_names, kept_data = kept
    names = {folder: dict(entries) for folder, entries in durable.names.items()}
    lost = False
    for group, is_kept in zip(durable.pending_names, kept_names, strict=True):
        lost = lost or not is_kept
        if is_kept and not (ordered and lost):
            for each in group:
                rename(names, each)
    contents = dict(durable.contents)
    flags = iter(kept_data)
    for node, pending in durable.pending.items():
        content = contents[node] = bytearray(contents.get(node, b""))
        for change in pending:
            if next(flags):
                half = torn is not None and torn.random() < 0.2
                apply(content, first_half(change) if half else change)
    tree: Tree = {}
    _walk(tree, "", ROOT, names, contents, depth=0)
    return tree


def _walk(
    tree: Tree, path: str, node: int, names: dict[int, dict[str, int]], contents: dict[int, bytearray], depth: int
) -> None:
    for name, child in names.get(node, {}).items():
        below = f"{path}{name}"
        if depth == 0 and not name.startswith(".room"):
            tree[below] = None
            _walk(tree, below + "/", child, names, contents, depth=1)
        else:
            tree[below] = bytes(contents.get(child, b""))


def cuts(changes: Sequence[Change], *, ordered: bool, seed: int, samples: int) -> Iterator[tuple[int, Promise, Tree]]:
    """Yield (instant, what was promised last, state) of every cut, each distinct state once for each promise."""
    rng = random.Random(seed)
    durable = Durable()
    promised = Promise(0, 0)
    seen: set[tuple[Promise, int]] = set()
    for instant, change in enumerate(changes):
        durable.add(change, ordered=ordered)
        for each in change:
            if isinstance(each, Promise):
                promised = each
        for kept in choices(durable, ordered=ordered, rng=rng, samples=samples):
            tree = state(durable, kept, ordered=ordered, torn=rng if any(kept[1]) else None)
            key = (promised, hash(frozenset(tree.items())))
            if key not in seen:
                seen.add(key)
                yield instant, promised, tree


def lay_down(tree: Tree, root: Path) -> None:
    """Make real files of it."""
    root.mkdir(parents=True)
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
