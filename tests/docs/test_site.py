"""The site that `make docs` builds: it has every page, and no link or anchor that leads nowhere."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config import load_config

ROOT = Path(__file__).parents[2]
OUTSIDE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}


def pages_in(nav: Any) -> Iterator[str]:  # noqa: ANN401 - YAML
    """Yield the files that a navigation names, in its order."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_in(entry)


def test_the_navigation_names_every_page() -> None:
    """The decisions are named by their own list, docs/decisions/README.md."""
    named = list(pages_in(load_config(str(ROOT / "mkdocs.yml")).nav))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(OUTSIDE.keys() | {page for page in pages if not page.startswith("decisions/0")})


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    """`--strict` makes an error of each link, anchor and page that is missing. It takes three seconds."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (built.returncode, built.stderr) == (0, "")
    assert "powerguard" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
