"""Pages for a browser: made from the templates in this folder, and written completely or not at all.

Jinja2 is imported when a page is made: `status` and `event` do not need it.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Section(NamedTuple):
    """A table of a page. numbers: which columns are numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()


def render(template: str, **values: object) -> str:
    """Return a page. Every word is escaped; a name that the template uses and that is not given is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("powerguard.cli"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return pages.get_template(template).render(values)


def write(where: str, text: str) -> str:
    """Write a page, completely or not at all. "-": stdout. Return why not, or ""."""
    if where == "-":
        sys.stdout.write(text)
        return ""
    path = beside = Path(where)
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # A device or a pipe cannot be replaced as a whole.
            return ""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        if beside != path:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
        return f"--html: {path}: {error.strerror or error}"
    return ""
