"""What mkdocs.yml cannot say: which files outside docs/ belong to the site, and how the pages' links lead to them."""

from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES: Final = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""Markdown files of the repository's root, and their places in the site."""

FOLDERS: Final = ("config", "examples")
"""Folders whose files the pages link to. They are copied into the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files from outside docs/."""
    root = Path(config.config_file_path).parent
    for source, target in PAGES.items():
        text = (root / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, target, content=text))
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file():
                files.append(File.generated(config, str(path.relative_to(root)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:  # noqa: ANN401 - mkdocs passes its own objects
    """Lead the links out of docs/ to the copies in the site."""
    for folder in FOLDERS:
        markdown = markdown.replace(f"](../../{folder}/", f"](../{folder}/")
    return markdown
