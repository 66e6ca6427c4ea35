"""Pages are made from templates that lie in the package."""

import pytest
from jinja2 import UndefinedError

from powerguard.cli.page import Section, render

GIVEN = {
    "title": "<title>",
    "verdict": "a & b",
    "mood": '"good"',
    "drawing": "<svg></svg>",
    "legend": [("stop", "<i>", "0", "1 s", "50 %", "2 -> 1 %")],
    "colours": {"stop": ("#fff", "#000")},
    "notes": ["<note>"],
    "sections": [Section("<name>", ("<th>",), [("<td>",)], numbers=(0,)), Section("empty", ("a",), [])],
    "footer": "<foot>",
}


@pytest.mark.parametrize("template", ["plan.html", "report.html"])
def test_every_word_is_escaped_and_every_name_is_needed(template: str) -> None:
    page = render(template, **GIVEN)
    for word in ("<i>", "<note>", "<name>", "<foot>"):
        assert word not in page
    assert page.count("<svg></svg>") == 1
    assert "&lt;th&gt;</th>" in page
    assert "&lt;td&gt;</td>" in page
    assert '<th class="n">' in page
    assert "empty" not in page
    needed = GIVEN if template == "plan.html" else {name: it for name, it in GIVEN.items() if name != "legend"}
    for name in needed:
        with pytest.raises(UndefinedError):
            render(template, **{other: it for other, it in GIVEN.items() if other != name})
