"""The report of `powerguard install` and `uninstall`: one line for each step, or one object."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from powerguard.cli.render import Paint, clean, fold, table

EX_NOT_DONE: Final = 1
SYSTEM: Final = "/run/systemd/system"
"""There where systemd runs as PID 1 (sd_booted(3))."""
Row = tuple[str, str, str]
"""The object, its purpose, and its result."""


@dataclass
class Report:
    """The steps done, or planned, in order. offers: (path, why, content); doubts: warnings."""

    verb: str
    root: Path
    dry_run: bool
    files: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    offers: list[Row] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    then: list[str] = field(default_factory=list)
    failed: bool = False

    @property
    def live(self) -> bool:
        """Whether it is the system that runs here, and systemd is its PID 1."""
        return self.root == Path("/") and Path(SYSTEM).is_dir()

    @property
    def refused(self) -> str:
        """Why this system may not be changed; "" if it may."""
        if not self.root.is_dir():
            return f"{self.root}: is not a folder"
        if self.root == Path("/") and os.environ.get("POWERGUARD_UNDER_TEST"):
            return "refused under test: it would change this machine; give --root DIR"
        if self.root == Path("/") and not self.dry_run and os.geteuid() != 0:
            return "must be run as root (--dry-run only shows the steps)"
        return ""

    def result_word(self, word: str) -> str:
        """Return the word for a result, in dry-run with "would be"."""
        return f"would be {word}" if self.dry_run else word

    def show(self, *, as_json: bool, verbose: bool = True) -> int:
        """Print it; return the exit status. verbose: name each file that is unchanged, and each step that was done."""
        status = EX_NOT_DONE if self.failed else 0
        if as_json:
            print(json.dumps(self._object(), indent=2))
            return status
        paint = Paint(sys.stdout)
        for rows, usual, text in ((self.files, "unchanged", "files unchanged"), (self.steps, "done", "steps done")):
            shown = [row for row in rows if verbose or row[2] != usual]
            if shown:
                _say(*table([[clean(result), clean(path), clean(what)] for path, what, result in shown], indent=""))
            if len(shown) < len(rows):
                print(f"{len(rows) - len(shown)} {text} (--verbose names them)")
        for path, why, content in self.offers:
            print(f"{paint('optional', 'yellow')}, written only with --with drop-ins: {clean(why)}\n  {clean(path)}")
            print("\n".join(f"    {clean(line)}" for line in content.splitlines() if line[:1] != "#"))
        for doubt in self.doubts:
            _say(f"{paint('warning', 'yellow')}: {clean(doubt)}")
        if self.failed:
            _say(paint("some steps failed, see above; correct the cause and run it again", "red"))
        for line in self.then:
            _say(f"next: {clean(line)}")
        return status

    def _object(self) -> dict[str, object]:
        offers = [{"path": path, "what": why, "content": content} for path, why, content in self.offers]
        return {
            "schema_version": 1,
            "object": self.verb,
            "root": str(self.root),
            "dry_run": self.dry_run,
            "is_done": not self.failed,
            "files": [{"path": path, "what": what, "did": result} for path, what, result in self.files],
            "steps": [{"command": command, "what": what, "did": result} for command, what, result in self.steps],
            **({"offers": offers} if self.verb == "install" else {}),
            "doubts": self.doubts,
            "next": self.then,
        }


def _say(*lines: str) -> None:
    print("\n".join(fold(lines)))
