"""The objects of docs/reference/signal-*.json are what powerguard-signal says: the same keys, the same kinds."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.peers.jobs import Jobs

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"

pytestmark = pytest.mark.root


def shape(value: Any) -> Any:  # noqa: ANN401 - JSON
    """What a value is made of; of a list, every shape that is in it."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(shape(each), sort_keys=True) for each in value})
    return type(value).__name__


def test_examples_in_the_reference_are_true(jobs: Jobs) -> None:
    unit = jobs.unit("train")
    jobs.rank("llm.sock", "listens", "catches", cgroup=jobs.cgroup(unit))
    (jobs.sockets / "old.sock").write_text("", encoding="ascii")
    jobs.allowed.write_text(f"{unit} USR1\n", encoding="ascii")
    said = {
        "stop": jobs.ask("stop", "llm.sock"),
        "list": jobs.ask("list"),
        "continue": jobs.ask("continue", "llm.sock"),
        "checkpoint": jobs.ask("checkpoint", unit, "USR1"),
    }
    for word, each in said.items():
        example = json.loads((REFERENCE / f"signal-{word}.json").read_text(encoding="utf-8"))
        assert shape(each) == shape(example), word
