"""The site that `make docs` builds: it has every page, and no link or anchor that leads nowhere."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from mkdocs.config import load_config

pytestmark = pytest.mark.xdist_group("site")  # built once

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


def built(folder: Path) -> "subprocess.CompletedProcess[str]":
    """Build the site. `--strict` makes an error of each link, anchor and page that is missing."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site. It takes three seconds."""
    folder = tmp_path_factory.mktemp("site")
    ended = built(folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    return folder


def test_the_site_has_a_home_and_a_search(site: Path) -> None:
    assert "<h1" in (site / "index.html").read_text(encoding="utf-8")
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    """Neither a page nor a style names a file of another server; Mermaid's block would make the theme fetch one."""
    loads = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*rel=["']?(?:stylesheet|preconnect|icon)"""
        r"""["']?[^>]*href=["']?(?:https?:)?//|class=["']?mermaid\b"""
    )
    pages = [path for path in site.rglob("*.html") if loads.search(path.read_text(encoding="utf-8"))]
    styles = [
        path
        for path in site.rglob("*.css")
        if re.search(r"url\(['\"]?(?:https?:)?//", path.read_text(encoding="utf-8"))
    ]
    assert (pages, styles) == ([], [])


def blocks(html: str) -> dict[str, int]:
    """Count the blocks of a page."""
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in ("li", "ol", "ul", "pre", "table")}


def test_a_page_of_the_site_has_the_blocks_that_github_shows(site: Path) -> None:
    """The site's Markdown wants a blank line before a list, and four spaces before what belongs to an item."""
    wrong = {}
    github = MarkdownIt("commonmark").enable("table")
    for page in pages_in(load_config(str(ROOT / "mkdocs.yml")).nav):
        source = ROOT / OUTSIDE.get(page, f"docs/{page}")
        place = re.sub(r"(README|index)?\.md$", "", page)
        html = (site / place / "index.html").read_text(encoding="utf-8")
        html = re.sub(r"<nav.*?</nav>", "", html[html.index("<article") : html.index("</article>")], flags=re.DOTALL)
        wanted = blocks(github.render(source.read_text(encoding="utf-8")))
        if blocks(html) != wanted:
            wrong[page] = (blocks(html), wanted)
    assert wrong == {}
