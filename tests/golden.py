"""The texts of the verbs, one file for each: tests/FOLDER/golden/VERB.txt, read by a reviewer and written by a script.

A test asserts exit status, fields and events itself, and gives the text to the fixture `golden`. Whoever changes a text
runs `pytest --rewrite-golden tests/...` and reads the difference.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_HEAD = re.compile(r"^=== (.+)$", re.MULTILINE)
_VARIES = (
    (re.compile(re.escape(str(Path(__file__).parents[1])) + r"(?=/)"), "CHECKOUT"),
    (
        re.compile(r"/tmp/(pg |pytest-of-)[^ \n]*?(?=[/ '\":;,)\n]|$)(/pytest-\d+(/popen-gw\d+)?/[^/ \n'\":;,)]+)?"),
        "/TMP",
    ),
    (re.compile(r"\bpowerguard \d+\.\d+\.\d+\S*"), "powerguard VERSION"),
)

COLUMNS: Final = {re.compile(r"(?<=\S) {2,}"): "  "}
"""The width of columns, where it follows from what varies."""
FIGURES: Final = {
    **COLUMNS,
    re.compile(r"(?<![\w.])[-+]?\d[\d.:]*(?: (?:ms|s|m|h|d)\b(?: \d+ (?:s|m|h)\b)*)?"): "N",
}
"""What varies in the texts of what the real loop did: figures, times, and the width of columns that follows from them.

A test asserts figures by the fields of the object.
"""

_REWRITTEN: Final[set[tuple[Path, str]]] = set()


class Golden:
    """Compares texts with the golden files; with --rewrite-golden writes them instead."""

    def __init__(self, folder: Path, test: str, *, rewrites: bool) -> None:
        self._folder = folder
        self._test = test
        self._rewrites = rewrites
        self._seen: set[tuple[str, str]] = set()

    def __call__(self, verb: str, text: str, case: str = "", varies: Mapping[object, str] | None = None) -> None:
        """Assert that the text is the one in the file.

        case: which text of this test, if it has several. varies: what differs from run to run, and what stands for it.
        """
        name = f"{self._test} {case}".rstrip()
        assert (verb, name) not in self._seen, f"{name}: give each text of a test a case of its own"
        self._seen.add((verb, name))
        result = normalised(text, varies or {})
        path = self._folder / f"{verb}.txt"
        cases = read(path)
        if self._rewrites:
            # What an earlier run wrote for this test function goes: its parameters may have changed.
            function = self._test.partition("[")[0]
            if (path, function) not in _REWRITTEN:
                _REWRITTEN.add((path, function))
                cases = {other: text for other, text in cases.items() if re.split(r"[ \[]", other)[0] != function}
            write(path, cases | {name: result})
        else:
            assert name in cases, f"{path}: has no text for {name!r} (pytest --rewrite-golden)"
            lines = difflib.unified_diff(cases[name].splitlines(), result.splitlines(), "golden", "now", lineterm="")
            advice = (
                f"{path}: the text of {name!r} differs; if it is meant to, run pytest --rewrite-golden on this test"
            )
            assert result == cases[name], "\n".join([advice, *lines])

    def between(self, page: Path, mark: str, text: str) -> None:
        """Assert that the text is the one between <!-- MARK --> and <!-- /MARK --> of a page, which it belongs to."""
        before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
        there, end, after = rest.partition(f"\n<!-- /{mark} -->")
        assert "" not in (begin, end), f"{page}: put the lines <!-- {mark} --> and <!-- /{mark} --> where it belongs"
        if self._rewrites:
            page.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")
        else:
            advice = f"{page}: run pytest --rewrite-golden on this test, and read the difference"
            assert there == text, advice


def normalised(text: str, varies: Mapping[object, str]) -> str:
    """Return a text without what differs from run to run."""
    for old, new in varies.items():
        text = text if isinstance(old, re.Pattern) else text.replace(str(old), new)
    patterns = [(old, new) for old, new in varies.items() if isinstance(old, re.Pattern)]
    for pattern, new in (*_VARIES, *patterns):
        text = pattern.sub(new, text)
    text = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    assert not _HEAD.search(text)
    return text


def read(path: Path) -> dict[str, str]:
    """Return the texts of a file by the names of their cases."""
    if not path.exists():
        return {}
    _, *parts = _HEAD.split(path.read_text(encoding="utf-8"))
    return {name: text.strip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def write(path: Path, cases: Mapping[str, str]) -> None:
    """Write a file, sorted by the names of its cases."""
    path.parent.mkdir(exist_ok=True)
    parts = [f"=== {name}\n{text}\n" for name, text in sorted(cases.items())]
    path.write_text("\n".join(parts), encoding="utf-8")
